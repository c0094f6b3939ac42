"""Opening many topics: seconds, threads, descriptors, and what they cost when nobody uses them.

The topics are made with a message each and closed; then they are opened again, all in one call, and left alone for a
while. The peer is what the file system takes for the same number of plain files in the same run: each in a directory
of its own, made, synced with its directory and closed; and opened, read and closed.

python bench/many_topics.py [--topics 10000] [--idle-seconds 5] [--dir .] [--json]
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from measuring import at_most, parser_for, report, scratch_directory, settle

import tidelog

VALUE = b"v" * 100


def processor_seconds() -> float:
    """What this process has used so far."""
    times = os.times()
    return times.user + times.system


def make_files(root: Path, count: int) -> float:
    """Seconds for as many plain files, each durable."""
    begin = time.perf_counter()
    root.mkdir()
    for number in range(count):
        directory = root / str(number)
        directory.mkdir()
        descriptor = os.open(directory / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(descriptor, VALUE)
        os.fdatasync(descriptor)
        os.close(descriptor)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - begin


def open_files(root: Path, count: int) -> float:
    """Seconds to list, open, read and close them."""
    begin = time.perf_counter()
    for number in range(count):
        directory = root / str(number)
        for name in os.listdir(directory):
            descriptor = os.open(directory / name, os.O_RDWR)
            os.pread(descriptor, 4096, 0)
            os.close(descriptor)
    return time.perf_counter() - begin


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(scratch: Path, count: int, idle_seconds: float) -> dict[str, float]:
    """All figures of one run."""
    names = [f"bench/t{number:06d}" for number in range(count)]
    settle()
    found = {"topics": float(count), "files_made_seconds": make_files(scratch / "files", count)}
    settle()
    begin = time.perf_counter()
    with tidelog.open(scratch / "log") as log:
        topics = log.open_topics(names)
        found["made_seconds"] = time.perf_counter() - begin
        for topic in topics:
            topic.append(VALUE)
        found["appended_seconds"] = time.perf_counter() - begin - found["made_seconds"]
        found["closed_seconds"] = timed(log.close)
    settle()
    found["files_opened_seconds"] = open_files(scratch / "files", count)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    used, begin = processor_seconds(), time.perf_counter()
    with tidelog.open(scratch / "log") as log:
        log.open_topics(names)
        found["opened_seconds"] = time.perf_counter() - begin
        found["opened_processor_seconds"] = processor_seconds() - used
        time.sleep(idle_seconds)  # helpers of the opening have ended by then
        used, begin = processor_seconds(), time.perf_counter()
        time.sleep(idle_seconds)
        found["idle_share"] = (processor_seconds() - used) / (time.perf_counter() - begin)
        found["threads"] = float(threading.active_count() - threads)
        found["descriptors"] = float(len(os.listdir("/proc/self/fd")) - descriptors)
        found["closed_unchanged_seconds"] = timed(log.close)
    return found


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--topics", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--idle-seconds", type=float, default=5.0, help="how long they are left alone (5)")
    arguments = parser.parse_args()
    with scratch_directory(arguments.dir) as scratch:
        found = measure(scratch, arguments.topics, arguments.idle_seconds)
    what = f"{arguments.topics:,} topics"
    opened, files_opened = found["opened_seconds"], found["files_opened_seconds"]
    made, files_made = found["made_seconds"], found["files_made_seconds"]
    per_topic_ms = opened / arguments.topics * 1000
    figures = [
        at_most(f"{what} opened", f"{opened:.1f} s", f"plain files {files_opened:.1f} s", per_topic_ms, 2, " ms each"),
        at_most(f"{what} made", f"{made:.1f} s", f"plain files {files_made:.1f} s", made / files_made, 2),
        at_most(f"threads of {what}", f"{found['threads']:.0f}", "one each", found["threads"], 63, ""),
        at_most(f"descriptors of {what}", f"{found['descriptors']:.0f}", "two each", found["descriptors"], 512, ""),
        at_most(f"{what}, idle", f"{found['idle_share']:.2%} of a core", "nothing", found["idle_share"] * 100, 3, " %"),
    ]
    report("many_topics", figures, found, as_json=arguments.json)


if __name__ == "__main__":
    main()
