"""Records the calls made to a log and its answers, and checks whether they are consistent.

A test records while it runs, from any thread; `check_history` then examines the whole history and lists every
contradiction.

Lives: a history is divided at every `reopened`. Within one life
- an offset is accepted once, and the accepted ones leave no gap (at a crash: at most one for each attempt that
  got no answer);
- each thread gets growing offsets;
- each reader gets offsets that grow by one, and every reader gets the same value at the same offset, which is the one
  that was accepted there.
From one life to the next
- every message acknowledged as synced is still there: below the next offset, and read by some reader;
- appends continue at the next offset that the reopened log named, which may reuse offsets that were never synced.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

Offset = int
_MOST_VIOLATIONS_SHOWN = 20


@dataclass
class Life:
    """What happened between two openings of a log."""

    start_offset: Offset | None = None
    next_offset: Offset | None = None
    attempts: list[tuple[Hashable, Any]] = field(default_factory=list)
    accepted: list[tuple[Hashable, Offset, Any]] = field(default_factory=list)
    synced: set[Offset] = field(default_factory=set)
    synced_through: Offset = -1
    reads: dict[Hashable, list[tuple[Offset, Any]]] = field(default_factory=dict)

    def copy(self) -> Life:
        reads = {reader: list(messages) for reader, messages in self.reads.items()}
        return replace(
            self, attempts=list(self.attempts), accepted=list(self.accepted), synced=set(self.synced), reads=reads
        )


class History:
    """The recorder. A thread or a reader is named by anything hashable, a value is anything that can be compared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lives = [Life()]

    def attempted(self, thread: Hashable, value: Any) -> None:
        """An append is about to be made. Needed where a crash may come before the answer: its value may be found."""
        with self._lock:
            self._lives[-1].attempts.append((thread, value))

    def accepted(self, thread: Hashable, offset: Offset, value: Any) -> None:
        """An append returned its offset."""
        with self._lock:
            self._lives[-1].accepted.append((thread, offset, value))

    def synced(self, offset: Offset) -> None:
        """The log said that this message is on disk."""
        with self._lock:
            self._lives[-1].synced.add(offset)

    def synced_through(self, offset: Offset) -> None:
        """The log said that this message and all before it are on disk (a flush, a durable offset)."""
        with self._lock:
            self._lives[-1].synced_through = max(offset, self._lives[-1].synced_through)

    def read(self, reader: Hashable, offset: Offset, value: Any) -> None:
        """A reader was given a message."""
        with self._lock:
            self._lives[-1].reads.setdefault(reader, []).append((offset, value))

    def reopened(self, next_offset: Offset, start_offset: Offset = 0) -> None:
        """The log was reopened and reports that it continues at `next_offset` and still keeps `start_offset`."""
        with self._lock:
            self._lives.append(Life(start_offset, next_offset))

    @property
    def lives(self) -> list[Life]:
        """A copy of everything recorded so far, cut at each reopening."""
        with self._lock:
            return [life.copy() for life in self._lives]

    @property
    def values(self) -> dict[Offset, Any]:
        """The value last accepted at each offset."""
        return {offset: value for life in self.lives for _, offset, value in life.accepted}

    @property
    def synced_offsets(self) -> set[Offset]:
        """All offsets that were ever acknowledged as synced."""
        lives = self.lives
        through = max(life.synced_through for life in lives)
        return {offset for life in lives for offset in life.synced} | set(range(through + 1))

    def copy(self) -> History:
        """An independent copy."""
        other = History()
        other._lives = self.lives
        return other


@dataclass(frozen=True)
class Violation:
    """A broken promise of the log."""

    promise: str
    detail: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.detail}"


def assert_history(history: History) -> None:
    """Raises AssertionError with all violations, if there are any."""
    violations = check_history(history)
    if violations:
        shown = [str(violation) for violation in violations[:_MOST_VIOLATIONS_SHOWN]]
        raise AssertionError(f"{len(violations)} violations of the log's promises\n  " + "\n  ".join(shown))


def check_history(history: History) -> list[Violation]:
    """Everything in the history that cannot be."""
    checker = _Checker()
    lives = history.lives
    for number, life in enumerate(lives):
        checker.check_life(life, is_last=number == len(lives) - 1)
    return checker.violations


class _Checker:
    """Goes through the lives in order and carries along what must hold in the next."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._values: dict[Offset, Any] = {}
        self._unanswered: list[Any] = []
        self._synced: set[Offset] = set()

    def check_life(self, life: Life, *, is_last: bool) -> None:
        self._check_opening(life)
        self._check_accepted(life, is_last=is_last)
        self._check_thread_order(life)
        for reader, messages in life.reads.items():
            self._check_reader(reader, messages)
        if life.next_offset is not None and (life.reads or is_last):
            self._check_synced_were_read(life)
        self._synced |= life.synced
        self._synced |= {offset for offset in self._values if offset <= life.synced_through}

    def _check_opening(self, life: Life) -> None:
        if life.next_offset is None:
            return
        for offset in sorted(offset for offset in self._synced if offset >= life.next_offset):
            self._report("synced is never lost", f"offset {offset}, but the reopened log is at {life.next_offset}")
        # What was accepted and never synced may be gone, and its offset given to another message.
        self._values = {offset: value for offset, value in self._values.items() if offset < life.next_offset}
        self._synced = {offset for offset in self._synced if offset < life.next_offset}

    def _check_accepted(self, life: Life, *, is_last: bool) -> None:
        for thread, offset, value in life.accepted:
            if offset in self._values:
                was = self._values[offset]
                self._report("an offset is used once", f"offset {offset} is {was!r} and {value!r} (thread {thread})")
            self._values[offset] = value
        unanswered = _without([value for _, value in life.attempts], (value for _, _, value in life.accepted))
        self._unanswered += unanswered
        self._check_no_gaps(life, excused=0 if is_last else len(unanswered))

    def _check_no_gaps(self, life: Life, excused: int) -> None:
        offsets = {offset for _, offset, _ in life.accepted}
        if not offsets:
            return
        first = min(offsets) if life.next_offset is None else life.next_offset
        if min(offsets) < first:
            self._report("appends continue where the log said", f"offset {min(offsets)}, expected {first}")
        missing = sorted(set(range(first, max(offsets))) - offsets)
        if len(missing) > excused:
            self._report("accepted offsets leave no gap", f"missing: {_some(missing)}")

    def _check_thread_order(self, life: Life) -> None:
        last: dict[Hashable, Offset] = {}
        for thread, offset, _ in life.accepted:
            if offset <= last.get(thread, -1):
                self._report("a thread's order is kept", f"thread {thread} got {offset} after {last[thread]}")
            last[thread] = offset

    def _check_reader(self, reader: Hashable, messages: list[tuple[Offset, Any]]) -> None:
        previous: Offset | None = None
        for offset, value in messages:
            if previous is not None and offset != previous + 1:
                self._report("a reader sees no gap and no repeat", f"reader {reader} got {offset} after {previous}")
            previous = offset
            self._check_value(reader, offset, value)

    def _check_value(self, reader: Hashable, offset: Offset, value: Any) -> None:
        if offset in self._values:
            if self._values[offset] != value:
                expected = self._values[offset]
                self._report("an offset has one value", f"reader {reader} got {value!r} at {offset}, not {expected!r}")
        elif value in self._unanswered:
            self._values[offset] = value
            self._unanswered.remove(value)
        else:
            self._report("what is read was appended", f"reader {reader} got {value!r} at {offset}")

    def _check_synced_were_read(self, life: Life) -> None:
        read = {offset for messages in life.reads.values() for offset, _ in messages}
        missing = sorted(offset for offset in self._synced - read if offset >= (life.start_offset or 0))
        if missing:
            self._report("synced is read again", f"not read after reopening: {_some(missing)}")

    def _report(self, promise: str, detail: str) -> None:
        self.violations.append(Violation(promise, detail))


def _without(values: list[Any], taken: Iterable[Any]) -> list[Any]:
    """`values` less one of each that was taken."""
    left = list(values)
    for value in taken:
        if value in left:
            left.remove(value)
    return left


def _some(offsets: list[Offset]) -> str:
    shown = ", ".join(map(str, offsets[:10]))
    return f"offsets {shown}" + (f" and {len(offsets) - 10} more" if len(offsets) > 10 else "")
