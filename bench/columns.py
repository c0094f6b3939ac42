"""How fast messages become Arrow columns, and rows become frames: the C kernel against a plain copy of the same bytes.

Batches have the size that Spark is given. A copy reads and writes every byte once, as gathering must too; encoding also
works out every checksum. The oracle in Python is measured on a part.

python bench/columns.py [--rounds 15] [--json]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import Figure, at_least, parser_for, report

from tidelog.log.frame import Frames, encode_many
from tidelog.topics.columns import TimesColumn, encode_columns, frames_digest, gather_columns
from tidelog.topics.message import encode_message

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.oracles import columns as oracle

BATCH_BYTES = 8_000_000
TWIN_ROWS = 500
EVERY_COLUMN_BUT_HEADERS = 15


def fastest_seconds(work: Callable[[], Any], rounds: int) -> float:
    """The best of some runs: the others were disturbed."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def twin_row_seconds(frames: Frames) -> float:
    """Seconds that the oracle takes to gather one row."""
    places = frames.buffer, frames.positions, frames.lengths
    arguments = 0, *places, 0, TWIN_ROWS, EVERY_COLUMN_BUT_HEADERS, TWIN_ROWS, 1 << 30
    return fastest_seconds(lambda: oracle.gather_columns(*arguments), 1) / TWIN_ROWS


def measure(value_bytes: int, rounds: int) -> dict[str, float]:
    """All figures for one size of message."""
    count = BATCH_BYTES // value_bytes
    frames = encode_many(
        0, [encode_message(os.urandom(value_bytes), b"key-%04d" % row, None, row) for row in range(count)]
    )
    found = gather_columns(frames, 0, count)
    assert found.values is not None
    assert found.timestamps is not None
    values, keys, times = found.values, found.keys, TimesColumn(None, found.timestamps)

    def encode() -> Frames:
        return encode_columns(0, count, values, keys=keys, timestamps=times, timestamp_us=0)

    assert encode() == frames
    gather_seconds = fastest_seconds(lambda: gather_columns(frames, 0, count), rounds)
    encode_seconds = fastest_seconds(encode, rounds)
    digest_seconds = fastest_seconds(lambda: frames_digest(frames), rounds)
    copy_seconds = fastest_seconds(lambda: bytearray(frames.buffer), rounds)
    gigabytes = len(frames.buffer) / 1e9
    return {
        "value_bytes": value_bytes,
        "gather_gb_per_s": gigabytes / gather_seconds,
        "gather_million_rows_per_s": count / gather_seconds / 1e6,
        "encode_gb_per_s": gigabytes / encode_seconds,
        "encode_million_rows_per_s": count / encode_seconds / 1e6,
        "digest_gb_per_s": gigabytes / digest_seconds,
        "copy_gb_per_s": gigabytes / copy_seconds,
        "twin_million_rows_per_s": 1 / twin_row_seconds(frames) / 1e6,
    }


def figures_of(small: dict[str, float], large: dict[str, float]) -> list[Figure]:
    """What the targets speak of."""
    gather, copy = large["gather_gb_per_s"], large["copy_gb_per_s"]
    rows, twin_rows = small["gather_million_rows_per_s"], small["twin_million_rows_per_s"]
    encode, digest = large["encode_gb_per_s"], large["digest_gb_per_s"]
    return [
        at_least("columns of 1 KiB messages", f"{gather:.1f} GB/s", f"a copy {copy:.1f} GB/s", gather, 4, " GB/s"),
        at_least("columns of 100-byte messages", f"{rows:.0f} M/s", f"in Python {twin_rows:.2f} M/s", rows, 10, " M/s"),
        at_least("frames of 1 KiB rows", f"{encode:.1f} GB/s", f"a copy {copy:.1f} GB/s", encode, 1.5, " GB/s"),
        at_least("digest of 1 KiB frames", f"{digest:.1f} GB/s", f"a copy {copy:.1f} GB/s", digest, 4, " GB/s"),
    ]


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each, the best counts (15)")
    arguments = parser.parse_args()
    small, large = (measure(size, arguments.rounds) for size in (100, 1024))
    details = {"sizes": [small, large]}
    report("columns", figures_of(small, large), details, as_json=arguments.json)


if __name__ == "__main__":
    main()
