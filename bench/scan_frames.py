"""How fast frames are scanned: the C kernel, its oracle in Python, and zlib over the same bytes as the yardstick.

python bench/scan_frames.py [--megabytes 64] [--dir .] [--json]
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import Figure, at_least, parser_for, report

from tidelog import _native
from tidelog.log import frame

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.oracles import frames as oracle

SIZES_BYTES = (100, 1024)
REPEATS = 5
# The twin takes microseconds a frame; a part of the buffer is enough to know how many.
TWIN_FRAMES = 20_000


def fastest_seconds(work: Callable[[], Any]) -> float:
    """The best of a few runs: the others were disturbed."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def scan_seconds(module: Any, frames: frame.Frames, count: int) -> float:
    """Seconds to scan the first `count` frames."""
    part = frames.buffer[: frames.start_of(count)]
    assert len(module.scan_frames(part, 0, 0, frame.MAX_PAYLOAD_BYTES)[1]) == 4 * count
    return fastest_seconds(lambda: module.scan_frames(part, 0, 0, frame.MAX_PAYLOAD_BYTES))


def measure(payload_bytes: int, total_bytes: int) -> dict[str, float]:
    """All figures for one size of payload."""
    count = total_bytes // (payload_bytes + frame.HEADER_BYTES)
    frames = frame.encode_many(0, [os.urandom(payload_bytes) for _ in range(count)])
    twin_count = min(count, TWIN_FRAMES)
    kernel_seconds = scan_seconds(_native, frames, count)
    twin_seconds = scan_seconds(oracle, frames, twin_count)
    zlib_seconds = fastest_seconds(lambda: zlib.crc32(frames.buffer))
    frame_bytes = payload_bytes + frame.HEADER_BYTES
    return {
        "payload_bytes": payload_bytes,
        "kernel_gb_per_s": len(frames.buffer) / kernel_seconds / 1e9,
        "kernel_ns_per_frame": kernel_seconds / count * 1e9,
        "twin_gb_per_s": twin_count * frame_bytes / twin_seconds / 1e9,
        "twin_ns_per_frame": twin_seconds / twin_count * 1e9,
        "kernel_over_twin": (twin_seconds / twin_count) / (kernel_seconds / count),
        "zlib_crc32_gb_per_s": len(frames.buffer) / zlib_seconds / 1e9,
    }


def figures_of(small: dict[str, float], large: dict[str, float]) -> list[Figure]:
    """What the targets speak of."""
    speed, zlib_speed = large["kernel_gb_per_s"], large["zlib_crc32_gb_per_s"]
    kernel_ns, twin_ns = small["kernel_ns_per_frame"], small["twin_ns_per_frame"]
    peer = f"zlib's crc32 alone {zlib_speed:.1f} GB/s"
    return [
        at_least("scan of 1 KiB frames", f"{speed:.1f} GB/s", peer, speed, 1, " GB/s"),
        at_least(
            "scan of 100-byte frames",
            f"{kernel_ns:.0f} ns a frame",
            f"in Python {twin_ns:.0f} ns",
            small["kernel_over_twin"],
            20,
        ),
    ]


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=float, default=64, help="how much to scan for each size (64)")
    arguments = parser.parse_args()
    small, large = (measure(size, int(arguments.megabytes * 1_000_000)) for size in SIZES_BYTES)
    details = {"crc32_by": _native.CRC32_BY, "sizes": [small, large]}
    report("scan_frames", figures_of(small, large), details, as_json=arguments.json)


if __name__ == "__main__":
    main()
