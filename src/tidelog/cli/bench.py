"""`tidelog bench`: measures appends and reads on this machine, next to the ceiling that the hardware sets."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from threading import Thread
from typing import Annotated, NamedTuple

import typer

from tidelog.cli.output import parse_size
from tidelog.cli.session import Session, command, command_group
from tidelog.errors import TidelogError
from tidelog.log import LogSettings
from tidelog.log.binding import BoundFiles
from tidelog.log.directory import wal_files
from tidelog.log.frame import HEADER_BYTES
from tidelog.log.segment import FileScanner
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import encode_message
from tidelog.topics.topic import Topic

SizeOption = Annotated[int, typer.Option(metavar="BYTES", parser=parse_size, help="Size of a value, such as 4KiB.")]
MessagesOption = Annotated[int, typer.Option("--messages", "-n", metavar="N", min=1, help="How many.")]


class Mode(Enum):
    """Who appends at the same time."""

    THREADS = "threads"
    TASKS = "tasks"


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("Measure appending and reading on this machine.")
    command(group, "append")(append)
    command(group, "read")(read)
    app.add_typer(group, name="bench")


def append(
    session: Session,
    messages: MessagesOption = 200_000,
    size: SizeOption = 1024,
    sync: Annotated[bool, typer.Option("--sync", help="Wait for the disk with every message.")] = False,
    appenders: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many append at once [default: 1, with --sync 64].")
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="What the appenders are [default: threads, with --sync tasks].")
    ] = None,
) -> None:
    """Measures appends. Messages and megabytes a second, and the latency of a call.

    With --sync it also measures, before and after, what the disk can do at best: writes of 64 frames of the same size,
    each followed by fdatasync. The ratio says how much of that the log reaches. It works in a temporary directory on
    the disk of the log directory, which is removed afterwards.
    """
    appenders = appenders or (64 if sync else 1)
    mode = mode or (Mode.TASKS if sync else Mode.THREADS)
    bench = AppendBench(messages, size, sync, appenders, mode.value)
    with scratch_directory(session.root) as scratch, session.output.progress("appending", messages) as on_done:
        result = measure_append(scratch, session.settings.log, bench, on_done)
    session.output.record(result)


def read(session: Session, messages: MessagesOption = 1_000_000, size: SizeOption = 100) -> None:
    """Measures reading a topic back from its files. Time a message, next to the bare scan of the same bytes.

    The scan checks every frame and does nothing else; the difference is what it costs to hand out messages. It works in
    a temporary directory on the disk of the log directory, which is removed afterwards.
    """
    with scratch_directory(session.root) as scratch, session.output.progress("reading", 2 * messages) as on_done:
        result = measure_read(scratch, session.settings.log, messages, size, on_done)
    session.output.record(result)


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """A directory beside the log directory, and inside it when only that is on the same disk."""
    from tidelog.cli.doctor import nearest_directory

    place = nearest_directory(root)
    beside = place.parent
    if place == root.absolute() and beside.stat().st_dev == place.stat().st_dev and os.access(beside, os.W_OK):
        place = beside
    scratch = Path(tempfile.mkdtemp(prefix=".tidelog-bench-", dir=place))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


# Measures appends, and the ceiling that the disk sets.
#
# Every call of append is timed. The ceiling writes prepared bytes of the same size in groups and syncs each group: the
# least that any log has to do. Half of it runs before and half after the appends, so that a disk that speeds up or
# slows down meanwhile does not favour either.


_TOPIC = "bench/append"
_GROUP_MESSAGES = 64
_CEILING_GROUPS = 2000
_REPORT_EVERY = 1000

Times = list[int]  # nanoseconds


class AppendBench(NamedTuple):
    """What to measure; `mode` is threads or tasks."""

    messages: int
    size: int
    sync: bool
    appenders: int
    mode: str


def measure_append(
    scratch: Path, settings: LogSettings, bench: AppendBench, on_done: Callable[[int], None]
) -> dict[str, object]:
    """All figures of one run."""
    frame_bytes = HEADER_BYTES + len(encode_message(bytes(bench.size), None, None, 0))
    before = _ceiling_per_second(scratch, bench, frame_bytes) if bench.sync else 0.0
    with LogDirectory(scratch / "log", settings) as log:
        topic = log.topic(_TOPIC)
        seconds, times = _run(topic, bench, on_done)
        started = time.perf_counter()
        topic.flush()
        flush_seconds = time.perf_counter() - started
    after = _ceiling_per_second(scratch, bench, frame_bytes) if bench.sync else 0.0
    result = _describe(bench, seconds, times)
    if bench.sync:
        ceiling = 2 / (1 / before + 1 / after)
        result |= {"ceiling_messages_per_second": ceiling, "ratio": bench.messages / seconds / ceiling}
    else:
        result["flush_seconds"] = flush_seconds
    return result


def _run(topic: Topic, bench: AppendBench, on_done: Callable[[int], None]) -> tuple[float, Times]:
    if bench.mode == "tasks":
        return asyncio.run(_run_tasks(topic, bench, on_done))
    if bench.appenders == 1:
        return _run_one(topic, bench, on_done)
    return _run_threads(topic, bench, on_done)


def _run_one(topic: Topic, bench: AppendBench, on_done: Callable[[int], None]) -> tuple[float, Times]:
    """Throughput first, then latency: reading the clock twice a message would cost a good part of an append."""
    value, sync = os.urandom(bench.size), bench.sync
    started = time.perf_counter()
    for _ in range(bench.messages):
        topic.append(value, sync=sync)
    seconds = time.perf_counter() - started
    topic.flush()
    times: Times = []
    _append(topic, bench, bench.messages, times, on_done)
    return seconds, times


def _shares(bench: AppendBench) -> list[int]:
    """How many messages each appender appends."""
    each, more = divmod(bench.messages, bench.appenders)
    return [each + (number < more) for number in range(bench.appenders)]


def _append(topic: Topic, bench: AppendBench, count: int, times: Times, on_done: Callable[[int], None]) -> None:
    value, sync, clock = os.urandom(bench.size), bench.sync, time.perf_counter_ns
    for number in range(count):
        started = clock()
        topic.append(value, sync=sync)
        times.append(clock() - started)
        if number % _REPORT_EVERY == 0:
            on_done(topic.next_offset)


class _Appender(Thread):
    """Appends its share; an error is kept for the thread that waits for it."""

    def __init__(self, topic: Topic, bench: AppendBench, count: int, on_done: Callable[[int], None]) -> None:
        super().__init__(name="bench-append")
        self.times: Times = []
        self.error: TidelogError | None = None
        self._job = (topic, bench, count, self.times, on_done)

    def run(self) -> None:
        try:
            _append(*self._job)
        except TidelogError as error:
            self.error = error  # after Ctrl-C: the log was closed, and the error is not read


def _run_threads(topic: Topic, bench: AppendBench, on_done: Callable[[int], None]) -> tuple[float, Times]:
    threads = [_Appender(topic, bench, count, on_done) for count in _shares(bench)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    for thread in threads:
        if thread.error is not None:
            raise thread.error
    return seconds, _joined([thread.times for thread in threads])


async def _run_tasks(topic: Topic, bench: AppendBench, on_done: Callable[[int], None]) -> tuple[float, Times]:
    parts: list[Times] = [[] for _ in range(bench.appenders)]

    async def append(count: int, times: Times) -> None:
        value, clock = os.urandom(bench.size), time.perf_counter_ns
        for number in range(count):
            started = clock()
            await topic.append_async(value, sync=bench.sync)
            times.append(clock() - started)
            if number % _REPORT_EVERY == 0:
                on_done(topic.next_offset)

    started = time.perf_counter()
    await asyncio.gather(*(append(count, times) for count, times in zip(_shares(bench), parts, strict=True)))
    return time.perf_counter() - started, _joined(parts)


def _joined(parts: list[Times]) -> Times:
    return [time_ns for part in parts for time_ns in part]


def _describe(bench: AppendBench, seconds: float, times: Times) -> dict[str, object]:
    ordered = sorted(times)
    assert len(ordered) == bench.messages, "an appender ended early"

    def percentile_us(share: float) -> float:
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] / 1000

    return {
        **bench._asdict(),
        "seconds": seconds,
        "messages_per_second": bench.messages / seconds,
        "megabytes_per_second": bench.messages * bench.size / seconds / 1e6,
        "p50_us": percentile_us(0.5),
        "p99_us": percentile_us(0.99),
        "p999_us": percentile_us(0.999),
        "max_us": ordered[-1] / 1000,
    }


def _ceiling_per_second(scratch: Path, bench: AppendBench, frame_bytes: int) -> float:
    """Messages per second that write + fdatasync alone could sustain in groups of 64."""
    groups = max(1, min(bench.messages // _GROUP_MESSAGES, _CEILING_GROUPS) // 2)
    group = os.urandom(frame_bytes * _GROUP_MESSAGES)
    path = scratch / "ceiling"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        started = time.perf_counter()
        for number in range(groups):
            os.pwrite(descriptor, group, number * len(group))
            os.fdatasync(descriptor)
        return groups * _GROUP_MESSAGES / (time.perf_counter() - started)
    finally:
        os.close(descriptor)
        path.unlink()


# How fast a topic is read through the public iterator, and how fast the extension scans the same bytes.
#
# The topic is closed and opened again before it is read, so that its messages come from files and not from memory. Both
# read the same chunks of the same files, which the system has in its cache by then: this measures code, not the disk.


_READ_TOPIC = "bench/read"
_BATCH_MESSAGES = 1000
_ROUNDS = 3


def measure_read(
    scratch: Path, settings: LogSettings, messages: int, size: int, on_done: Callable[[int], None]
) -> dict[str, object]:
    """All figures of one run; of three rounds each the fastest counts, since the others were disturbed."""
    root = scratch / "log"
    _fill(root, settings, messages, size, on_done)
    with LogDirectory(root, settings) as log:
        directory = log._topic_directory(_READ_TOPIC)
        read_seconds = min(_read_seconds(log, messages) for _ in range(_ROUNDS))
        scan_seconds = min(_scan_seconds(directory, settings.read_chunk_bytes, messages) for _ in range(_ROUNDS))
        on_done(2 * messages)
        total_bytes = sum(path.stat().st_size for path in directory.glob("wal.*.log"))
    return {
        "messages": messages,
        "size": size,
        "total_bytes": total_bytes,
        "messages_per_second": messages / read_seconds,
        "read_us_per_message": read_seconds / messages * 1e6,
        "scan_us_per_message": scan_seconds / messages * 1e6,
        "beyond_scan_us_per_message": (read_seconds - scan_seconds) / messages * 1e6,
        "scan_gigabytes_per_second": total_bytes / scan_seconds / 1e9,
    }


def _fill(root: Path, settings: LogSettings, messages: int, size: int, on_done: Callable[[int], None]) -> None:
    with LogDirectory(root, settings) as log:
        topic = log.topic(_READ_TOPIC)
        for start in range(0, messages, _BATCH_MESSAGES):
            count = min(_BATCH_MESSAGES, messages - start)
            data = os.urandom(size * count)
            topic.append_many([data[index * size : (index + 1) * size] for index in range(count)])
            on_done(start + count)


def _read_seconds(log: LogDirectory, messages: int) -> float:
    topic = log.topic(_READ_TOPIC)
    started = time.perf_counter()
    last = deque(topic.read(), maxlen=1)
    seconds = time.perf_counter() - started
    assert last[0].offset == messages - 1, "not all messages were read"
    return seconds


def _scan_seconds(directory: Path, chunk_bytes: int, messages: int) -> float:
    files = BoundFiles()
    started = time.perf_counter()
    offset = 0
    for _, name in wal_files(files.list(directory)):
        file = files.open(directory / name)
        try:
            scanner, size = FileScanner(file, 0, offset, chunk_bytes), file.size()
            while scanner.read(size) is not None:
                pass
            offset = scanner.offset
        finally:
            file.close()
    seconds = time.perf_counter() - started
    assert offset == messages, "not all frames were scanned"
    return seconds
