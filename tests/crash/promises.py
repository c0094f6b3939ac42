"""What the log promises about crashes and failing disks: work that writes the promises down, and a check of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tidelog.log.log import Log
from tidelog.log.settings import LogSettings
from tidelog.testing import FaultyFiles, History, assert_history

DIRECTORY = Path("/data/log")
OPERATIONS = 200
ROTATE_BYTES = 2048
# Nothing is checked again that the checkpoint vouches for, so a checkpoint that lies is found.
TRUSTING = LogSettings(rotate_max_bytes=ROTATE_BYTES, open_check_bytes=0)
# Every frame is checked at opening, as it is with the default settings for a log of this size.
CHECKING = LogSettings(rotate_max_bytes=ROTATE_BYTES)


class Appender:
    """One thread's appends to a log, with what they were promised."""

    def __init__(self, log: Log, history: History, name: str) -> None:
        self._log = log
        self._history = history
        self._name = name
        self._count = 0

    def append(self, size: int, *, sync: bool = False) -> None:
        """One message, told apart from all others."""
        payload = self._payload(size)
        self._history.attempted(self._name, payload)
        offset = self._log.append(payload, sync=sync)
        self._history.accepted(self._name, offset, payload)
        if sync:
            self._history.synced(offset)

    def append_many(self, sizes: list[int], *, sync: bool) -> None:
        """Several at once."""
        payloads = [self._payload(size) for size in sizes]
        for payload in payloads:
            self._history.attempted(self._name, payload)
        offsets = self._log.append_many(payloads, sync=sync)
        for offset, payload in zip(offsets, payloads, strict=True):
            self._history.accepted(self._name, offset, payload)
            if sync:
                self._history.synced(offset)

    def flush(self) -> None:
        """All that were accepted are durable then."""
        next_offset = self._log.next_offset
        self._log.flush()
        self._history.synced_through(next_offset - 1)

    def run(self, operations: int, seed: int) -> None:
        """A mixture of everything, the same for the same seed."""
        choose = random.Random(seed)
        for _ in range(operations):
            kind = choose.random()
            if kind < 0.45:
                self.append(choose.randint(8, 200))
            elif kind < 0.75:
                self.append(choose.randint(8, 200), sync=True)
            elif kind < 0.95:
                sizes = [choose.randint(8, 300) for _ in range(choose.randint(1, 5))]
                self.append_many(sizes, sync=choose.random() < 0.5)
            else:
                self.flush()

    def _payload(self, size: int) -> bytes:
        self._count += 1
        return f"{self._name}-{self._count}-".encode().ljust(size, b".")


def messages(log: Log) -> Iterator[tuple[int, bytes]]:
    for batch in log.read("earliest"):
        yield from enumerate(batch.payloads(), batch.first_offset)


def reopen(files: FaultyFiles, settings: LogSettings, history: History) -> Log:
    """Opens what a crash left, and writes down what the log says of itself and all that can be read."""
    log = Log.open(DIRECTORY, settings, files=files)
    history.reopened(log.next_offset, log.start_offset)
    found = list(messages(log))
    for offset, payload in found:
        history.read("after", offset, payload)
    assert [offset for offset, _ in found] == list(range(log.next_offset))
    history.synced_through(log.durable_offset - 1)
    return log


def check_with(settings: LogSettings) -> Callable[[FaultyFiles, History], None]:
    """The promises hold, new appends are taken, and the promises still hold when the power fails once more."""

    def check(files: FaultyFiles, history: History) -> None:
        log = reopen(files, settings, history)
        appender = Appender(log, history, f"life{len(history.lives)}")
        appender.append(50)
        appender.append_many([20, 30], sync=True)
        appender.append(50)
        without_power = files.after_crash("lose")
        log.close()
        reopen(without_power, settings, history).close()
        assert_history(history)

    return check


def mixed_workload(files: FaultyFiles, history: History) -> None:
    log = Log.open(DIRECTORY, TRUSTING, files=files)
    try:
        Appender(log, history, "main").run(OPERATIONS, seed=1)
    finally:
        log.close()
    history.synced_through(log.next_offset - 1)
