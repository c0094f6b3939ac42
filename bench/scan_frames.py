"""How fast frames are scanned: the C kernel, its oracle in Python, and zlib over the same bytes as the yardstick.

python bench/scan_frames.py [--megabytes 64] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def describe(row: dict[str, float]) -> str:
    """One size of payload, for people."""
    return (
        f"{row['payload_bytes']:>6.0f} B  "
        f"kernel {row['kernel_gb_per_s']:6.2f} GB/s {row['kernel_ns_per_frame']:7.1f} ns/frame   "
        f"twin {row['twin_gb_per_s']:6.3f} GB/s {row['twin_ns_per_frame']:7.1f} ns/frame   "
        f"{row['kernel_over_twin']:5.0f}x   zlib.crc32 {row['zlib_crc32_gb_per_s']:5.2f} GB/s"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="how much to scan for each size (64)")
    parser.add_argument("--json", action="store_true", help="figures for programs")
    arguments = parser.parse_args()
    rows = [measure(size, arguments.megabytes * 1_000_000) for size in SIZES_BYTES]
    if arguments.json:
        print(json.dumps({"crc32_by": _native.CRC32_BY, "sizes": rows}, indent=2))
    else:
        print("\n".join(map(describe, rows)))


if __name__ == "__main__":
    main()
