"""Memory while a slow reader lags by a million messages: bounded by the settings, not by the lag.

A reader follows from the first message and takes its time; meanwhile more than a million messages are appended. The
resident memory of the process is sampled all the time. What it may grow by is what the settings allow for bytes (the
hand-over, the cache, one chunk for the reader) and a quarter more for the objects around them. And it must not grow
with the lag: what was seen by the half of the way is about all that is ever seen.

python bench/slow_reader.py [--messages 1100000] [--size 1024] [--dir .] [--json]
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from measuring import at_most, parser_for, report, scratch_directory

import tidelog
from tidelog.log.settings import LogSettings

MEGABYTE = 1 << 20
LAG = 1_000_000
OBJECTS_FACTOR = 1.25
READER_PAUSE_SECONDS = 0.001
SAMPLE_SECONDS = 0.01


def resident_bytes() -> int:
    """The memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Samples the memory in the background."""

    def __init__(self) -> None:
        self.bytes = resident_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, resident_bytes())

    def stop(self) -> int:
        """The most that was seen."""
        self._over.set()
        self._thread.join()
        return self.bytes


class SlowReader:
    """Follows a topic and rests after every message."""

    def __init__(self, topic: tidelog.Topic) -> None:
        self.offset = -1
        self._topic = topic
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for message in self._topic.read(start="earliest", follow=True):
            assert message.offset == self.offset + 1
            self.offset = message.offset
            if self._over.wait(READER_PAUSE_SECONDS):
                return

    def stop(self) -> None:
        """Ends after the message it is at."""
        self._over.set()
        self._thread.join()


def measure(directory: Path, count: int, size: int) -> dict[str, float]:
    """Appends at full speed past a slow reader, and watches the memory."""
    value = os.urandom(size)
    with tidelog.open(directory) as log:
        topic = log.topic("bench/lag")
        topic.append(value, sync=True)
        reader = SlowReader(topic)
        before = resident_bytes()
        peak = Peak()
        begin = time.perf_counter()
        for _ in range(count // 2):
            topic.append(value)
        highest_by_half = peak.bytes
        for _ in range(count - count // 2):
            topic.append(value)
        seconds = time.perf_counter() - begin
        lag = topic.next_offset - reader.offset - 1
        highest = peak.stop()
        reader.stop()
    return {
        "lag": lag,
        "seconds": seconds,
        "passed_bytes": count * size,
        "half_growth_bytes": highest_by_half - before,
        "growth_bytes": highest - before,
    }


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--messages", type=int, default=LAG + 100_000, help="how many are appended (1100000)")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a value (1024)")
    arguments = parser.parse_args()
    with scratch_directory(arguments.dir) as scratch:
        found = measure(scratch, arguments.messages, arguments.size)
    settings = LogSettings()
    bound = settings.append_queue_max_bytes + settings.cache_max_bytes + settings.read_chunk_bytes
    growth, half_growth = found["growth_bytes"], found["half_growth_bytes"]
    passed = f"{found['passed_bytes'] / MEGABYTE:,.0f} MiB passed"
    figures = [
        at_most(
            f"memory while a reader lags by {found['lag']:,.0f}",
            f"+{growth / MEGABYTE:.0f} MiB",
            f"settings allow {bound / MEGABYTE:.0f} MiB, {passed}",
            growth / bound,
            OBJECTS_FACTOR,
        ),
        at_most(
            "the same, at the end against half-way",
            f"+{growth / MEGABYTE:.0f} MiB",
            f"half-way +{half_growth / MEGABYTE:.0f} MiB",
            growth / max(1, half_growth),
            1.1,
        ),
    ]
    report("slow_reader", figures, {**found, "bound_bytes": bound}, as_json=arguments.json)


if __name__ == "__main__":
    main()
