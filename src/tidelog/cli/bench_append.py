"""How fast messages are appended, and the ceiling that the disk sets.

Every call of append is timed. The ceiling writes ready-made bytes of the same size in groups and syncs each group: the
least that any log has to do. Half of it runs before and half after the appends, so that a disk that speeds up or slows
down meanwhile does not favour either.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from tidelog.errors import TidelogError
from tidelog.log import LogSettings
from tidelog.log.frame import HEADER_BYTES
from tidelog.topics.message import encode_message
from tidelog.topics.storage import LogDirectory
from tidelog.topics.topic import Topic

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
    """Appends its share; what goes wrong is kept for whoever waits for it."""

    def __init__(self, topic: Topic, bench: AppendBench, count: int, on_done: Callable[[int], None]) -> None:
        super().__init__(name="bench-append")
        self.times: Times = []
        self.error: TidelogError | None = None
        self._job = (topic, bench, count, self.times, on_done)

    def run(self) -> None:
        try:
            _append(*self._job)
        except TidelogError as error:
            self.error = error  # after Ctrl-C this is that the log was closed, and nobody asks any more


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
    """Messages a second that write + fdatasync alone could take in groups of 64."""
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
