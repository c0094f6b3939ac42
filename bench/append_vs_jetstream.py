"""Accepted appends against NATS JetStream: 1 KiB messages, one producer, neither side synced at every message.

Both sides take turns on the same disk. JetStream counts until the last acknowledgement; it is driven with several sizes
of window, of which the best counts. Tidelog counts until the last append has returned (accepted: it has its offset and
readers see it), and in a row of its own until the last message is in its file, where a killed process cannot lose it.
Latency is that of one append after the other, against one publish with its acknowledgement after the other.

python bench/append_vs_jetstream.py [--messages 200000] [--rounds 3] [--dir .] [--json]
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from statistics import median

from jetstream import Client, Server
from measuring import at_least, at_most, parser_for, percentile, report, scratch_directory, settle

import tidelog

WINDOWS = (256, 1024, 4096)
ONE_BY_ONE = 5000
WARM_UP = 5000


def append_seconds(directory: Path, value: bytes, count: int) -> tuple[float, float]:
    """Seconds from the first append until all messages are accepted, and until they are in the file."""
    with tidelog.open(directory) as log:
        topic = log.topic("bench/append")
        topic.append_many([value] * WARM_UP, sync=True)
        begin = time.perf_counter()
        for _ in range(count):
            topic.append(value)
        accepted = time.perf_counter() - begin
        while written_offset(topic) < topic.next_offset:
            time.sleep(0.002)
        return accepted, time.perf_counter() - begin


def append_microseconds(directory: Path, value: bytes, count: int) -> list[float]:
    """How long each of many appends took, one after the other at full speed, sorted."""
    clock = time.perf_counter_ns
    times = []
    with tidelog.open(directory) as log:
        topic = log.topic("bench/latency")
        topic.append_many([value] * WARM_UP, sync=True)
        for _ in range(count):
            begin = clock()
            topic.append(value)
            times.append((clock() - begin) / 1000)
    return sorted(times)


def written_offset(topic: tidelog.Topic) -> int:
    """Up to where the messages are in the file."""
    statistics = topic.statistics().log
    assert statistics is not None
    return statistics.written_offset


def jetstream_seconds(client: Client, value: bytes, count: int, window: int) -> float:
    """Seconds from the first publish to the last acknowledgement, into a fresh stream."""
    client.make_stream()
    client.publish_many(value, WARM_UP, window)
    seconds = client.publish_many(value, count, window)
    stored = client.stored_messages()
    assert stored == WARM_UP + count, f"the server has {stored} messages"
    return seconds


def measure(scratch: Path, value: bytes, count: int, rounds: int) -> dict[str, float]:
    """All figures, the two sides taking turns."""
    ours: list[tuple[float, float]] = []
    theirs: dict[int, list[float]] = {window: [] for window in WINDOWS}
    with Server(scratch) as server:
        client = Client(server.port)
        for turn in range(rounds):
            for window, times in theirs.items():
                settle()
                times.append(jetstream_seconds(client, value, count, window))
            settle()
            ours.append(append_seconds(scratch / f"throughput-{turn}", value, count))
            # Both sides begin each turn with their old files gone, so that nobody has to find fresh memory for pages.
            shutil.rmtree(scratch / f"throughput-{turn}")
        client.make_stream()
        settle()
        one_by_one = client.publish_one_by_one(value, ONE_BY_ONE)
        client.close()
    settle()
    appends = append_microseconds(scratch / "latency", value, count)
    best_window = min(WINDOWS, key=lambda window: median(theirs[window]))
    return {
        "messages": count,
        "append_per_second": count / median(accepted for accepted, _ in ours),
        "append_in_file_per_second": count / median(in_file for _, in_file in ours),
        "append_p50_us": percentile(appends, 50),
        "append_p99_us": percentile(appends, 99),
        "append_p999_us": percentile(appends, 99.9),
        "append_max_us": appends[-1],
        "jetstream_window": best_window,
        **{f"jetstream_per_second_window_{window}": count / median(times) for window, times in theirs.items()},
        "jetstream_per_second": count / median(theirs[best_window]),
        "jetstream_p50_us": percentile(one_by_one, 50),
        "jetstream_p99_us": percentile(one_by_one, 99),
    }


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--messages", type=int, default=200_000, help="in each round and on each side (200000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    arguments = parser.parse_args()
    with scratch_directory(arguments.dir) as scratch:
        found = measure(scratch, os.urandom(1024), arguments.messages, arguments.rounds)
    ours, theirs = found["append_per_second"], found["jetstream_per_second"]
    figures = [
        at_least("append, 1 KiB, accepted", f"{ours:,.0f} msg/s", f"JetStream {theirs:,.0f} msg/s", ours / theirs, 3),
        at_least(
            "the same, until in the file",
            f"{found['append_in_file_per_second']:,.0f} msg/s",
            f"JetStream {theirs:,.0f} msg/s",
            found["append_in_file_per_second"] / theirs,
            1,
        ),
        at_most(
            "p99 of one append",
            f"{found['append_p99_us']:.1f} us",
            f"JetStream {found['jetstream_p99_us']:.0f} us",
            found["append_p99_us"],
            100,
            " us",
        ),
    ]
    report("append_vs_jetstream", figures, found, as_json=arguments.json)


if __name__ == "__main__":
    main()
