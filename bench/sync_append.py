"""Synced appends by 64 appenders, as threads and as tasks, against what the disk allows.

The ceiling is a loop that writes 64 ready-made frames and calls fdatasync, on the same disk in the same run. The three
take turns, since the speed of a disk changes from minute to minute; medians count.

python bench/sync_append.py [--appenders 64] [--seconds 2] [--rounds 5] [--dir .] [--json]
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from measuring import at_least, parser_for, report, scratch_directory, settle

import tidelog
from tidelog.log.frame import encode_many
from tidelog.topics.message import encode_message

VALUE_BYTES = 1024


class Workload:
    """What every contender does: `appenders` messages at a time, for `seconds`."""

    def __init__(self, appenders: int, seconds: float) -> None:
        self.appenders = appenders
        self.seconds = seconds
        self.value = os.urandom(VALUE_BYTES)

    def ceiling(self, directory: Path) -> float:
        """Messages a second of a loop of one write and one fdatasync for all appenders' frames."""
        payloads = [encode_message(self.value, None, None, 0)] * self.appenders
        frames = encode_many(0, payloads).buffer
        descriptor = os.open(directory / "ceiling", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        groups, begin = 0, time.perf_counter()
        deadline = begin + self.seconds
        while time.perf_counter() < deadline:
            os.write(descriptor, frames)
            os.fdatasync(descriptor)
            groups += 1
        seconds = time.perf_counter() - begin
        os.close(descriptor)
        return groups * self.appenders / seconds

    def threads(self, directory: Path) -> float:
        """Messages a second of threads that each append and wait for the disk."""
        with tidelog.open(directory) as log:
            topic = log.topic("bench/threads")
            go = threading.Barrier(self.appenders + 1)

            def append() -> None:
                go.wait()
                deadline = time.perf_counter() + self.seconds
                while time.perf_counter() < deadline:
                    topic.append(self.value, sync=True)

            threads = [threading.Thread(target=append) for _ in range(self.appenders)]
            for thread in threads:
                thread.start()
            go.wait()
            begin = time.perf_counter()
            for thread in threads:
                thread.join()
            return topic.durable_offset / (time.perf_counter() - begin)

    def tasks(self, directory: Path) -> float:
        """Messages a second of tasks in one event loop that each append and wait for the disk."""
        with tidelog.open(directory) as log:
            topic = log.topic("bench/tasks")

            async def append(deadline: float) -> None:
                while time.perf_counter() < deadline:
                    await topic.append_async(self.value, sync=True)

            async def append_all() -> float:
                begin = time.perf_counter()
                await asyncio.gather(*(append(begin + self.seconds) for _ in range(self.appenders)))
                return time.perf_counter() - begin

            seconds = asyncio.run(append_all())
            return topic.durable_offset / seconds


def measure(scratch: Path, workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Messages a second of each contender in each round."""
    contenders: dict[str, Callable[[Path], float]] = {
        "ceiling": workload.ceiling,
        "threads": workload.threads,
        "tasks": workload.tasks,
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, contender in contenders.items():
            directory = scratch / f"{name}-{turn}"
            directory.mkdir()
            settle()
            found[name].append(contender(directory))
    return found


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--appenders", type=int, default=64, help="how many append at the same time (64)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn (2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (5)")
    arguments = parser.parse_args()
    workload = Workload(arguments.appenders, arguments.seconds)
    with scratch_directory(arguments.dir) as scratch:
        found = measure(scratch, workload, arguments.rounds)
    ceiling = median(found["ceiling"])
    figures = [
        at_least(
            f"synced append, {arguments.appenders} {name}",
            f"{median(found[name]):,.0f} msg/s",
            f"write + fdatasync {ceiling:,.0f} msg/s",
            median(found[name]) / ceiling,
            0.6,
            durability="synced",
            rounds=(found[name], found["ceiling"]),
        )
        for name in ("threads", "tasks")
    ]
    report("sync_append", figures, {"messages_per_second": found}, as_json=arguments.json)


if __name__ == "__main__":
    main()
