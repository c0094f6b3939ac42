"""What a message costs on its way to the reader: a million messages of 100 bytes through the public iterator.

The log is opened afresh, so everything comes out of the files. From the time a message takes, the time that the kernel
needs to scan its frame (the same bytes, already in memory) is taken away: what is left is what the iterator costs.

python bench/read_back.py [--messages 1000000] [--rounds 5] [--dir .] [--json]
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from statistics import median

from filled_topic import TOPIC, fill, scan_in_memory_seconds
from measuring import at_most, parser_for, report, scratch_directory

import tidelog

VALUE_BYTES = 100


def read_seconds(directory: Path, count: int) -> float:
    """Seconds to read everything with a `for` loop."""
    with tidelog.open(directory) as log:
        topic = log.topic(TOPIC)
        begin = time.perf_counter()
        last = -1
        for message in topic.read(start="earliest"):
            last = message.offset
        seconds = time.perf_counter() - begin
    assert last == count - 1, f"the last offset was {last}"
    return seconds


def drain_seconds(directory: Path) -> float:
    """Seconds to pull everything out of the iterator without a loop in Python."""
    with tidelog.open(directory) as log:
        topic = log.topic(TOPIC)
        begin = time.perf_counter()
        deque(topic.read(start="earliest"), maxlen=0)
        return time.perf_counter() - begin


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="how many are read back (1000000)")
    parser.add_argument("--rounds", type=int, default=5, help="how often; the median counts (5)")
    arguments = parser.parse_args()
    count = arguments.messages
    rounds = []
    with scratch_directory(arguments.dir) as scratch:
        fill(scratch, count, VALUE_BYTES)
        for _ in range(arguments.rounds):
            times = (scan_in_memory_seconds(scratch), read_seconds(scratch, count), drain_seconds(scratch))
            rounds.append([seconds / count * 1e6 for seconds in times])
    scan_us, read_us, drain_us = (median(column) for column in zip(*rounds, strict=True))
    figure = at_most(
        "read back, 100 bytes, beyond the scan",
        f"{read_us:.2f} us a message",
        f"kernel's scan {scan_us:.3f} us",
        read_us - scan_us,
        1.5,
        " us",
    )
    details = {"messages": count, "read_us": read_us, "scan_us": scan_us, "drain_us": drain_us}
    report("read_back", [figure], details, as_json=arguments.json)


if __name__ == "__main__":
    main()
