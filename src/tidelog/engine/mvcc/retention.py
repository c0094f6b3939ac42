"""Retention: the oldest seq that can be read, and what holds it back; and the marks of an engine (`Marks`).

    history_start_seq        every state from here on is exactly readable
    horizon                  where it may move to: see `Retention.horizon`

Invariants
- The start of history never goes back, and moves before anything below it is removed.
- It never passes the low-water mark (a rollback may need what is above), nor the high-water mark of an engine with a
  store (a restore begins with a snapshot at it), nor the seq of a pin or of an open transaction.
- Taking a pin and moving the start are atomic: the holder of a pin can read its state to the end.
- A rollback replaces the states of the seqs above its target. Pins there are ended before anything is changed: a reader
  that checks its pin after each read without an error has read the state that it pinned.
"""

# ruff: noqa: ERA001 (comments draw formats and formulas)
from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Protocol

from tidelog.engine.settings import EngineSettings
from tidelog.errors import ConflictError, InputError, InternalError, NotFoundError

# The marks of an engine, and their order.
#
#     high_water_mark <= low_water_mark <= applied_seq <= accepted_seq
#
# Invariants
# - Every change is checked here: a mark that would break the order raises, and nothing moves.
# - The low-water and the high-water mark only grow. `applied_seq` goes back in a rollback alone, never below the
#   low-water mark.
# - `accepted_seq` is ahead of `applied_seq` while the WAL has records of entries that it could not sync yet. Once the
#   WAL is committed, both are equal.


class Marks:
    """The marks of an engine. One thread at a time moves them; any thread may read them."""

    def __init__(self, applied_seq: int = 0, low_water_mark: int = 0, high_water_mark: int = 0) -> None:
        self.applied_seq = applied_seq
        self.low_water_mark = low_water_mark
        self.high_water_mark = high_water_mark
        self.accepted_seq = applied_seq
        self.check()

    def check(self) -> None:
        """The order holds, or the engine is wrong."""
        if not 0 <= self.high_water_mark <= self.low_water_mark <= self.applied_seq:
            raise InternalError(
                f"marks out of order: high-water {self.high_water_mark}, low-water {self.low_water_mark}, "
                f"applied {self.applied_seq}"
            )

    def applied(self, seq: int) -> None:
        """Everything up to a seq is on the disk."""
        if seq < self.applied_seq:
            raise InternalError(f"seq {seq} was applied after {self.applied_seq}")
        self.applied_seq = seq
        self.accepted_seq = max(seq, self.accepted_seq)

    def accepted(self, seq: int) -> None:
        """The log has the records of everything up to a seq, and brings them to the disk as soon as it can."""
        self.accepted_seq = seq

    def rolled_back(self, seq: int) -> None:
        """What was after a seq is thrown away."""
        if seq < self.low_water_mark:
            raise InputError(
                f"seq {seq} is below the low-water mark {self.low_water_mark}: all replicas have later entries",
                operation="roll back",
                hint="Only entries above the low-water mark can be rolled back",
            )
        self.applied_seq = min(seq, self.applied_seq)
        self.accepted_seq = min(seq, self.accepted_seq)

    def raise_low_water_mark(self, seq: int) -> bool:
        """All replicas have applied everything up to a seq. Whether it moved; an older mark that comes late is fine."""
        if seq > self.applied_seq:
            raise InputError(
                f"low-water mark {seq} is above applied_seq {self.applied_seq}",
                operation="update low-water mark",
                hint="It is the lowest applied seq of all replicas, including this one; apply the entries first",
            )
        moved = seq > self.low_water_mark
        self.low_water_mark = max(seq, self.low_water_mark)
        return moved

    def raise_high_water_mark(self, seq: int) -> None:
        """Everything up to a seq is in the store, and its manifest says so."""
        if seq > self.low_water_mark:
            raise InternalError(f"seq {seq} was shipped, above the low-water mark {self.low_water_mark}")
        self.high_water_mark = max(seq, self.high_water_mark)


MICROSECONDS = 1_000_000


class HoldsStart(Protocol):
    """The keeper of the start of history: the checkpointer."""

    history_start_seq: int


class Pin:
    """Keeps the states from a seq on readable until it is released; a context manager. Garbage collection releases it
    too.

    A state above the low-water mark may be rolled back meanwhile: then `check` and the end of the `with` block raise
    ConflictError.
    """

    __slots__ = ("_history", "_is_held", "_rollbacks", "seq")

    def __init__(self, history: History, seq: int) -> None:
        self._history = history
        self._is_held = True
        self._rollbacks = history.rollbacks
        self.seq = seq

    def check(self) -> None:
        """What was read so far is the state that was pinned; ConflictError when it may be another one."""
        if self._is_rolled_back():
            raise rolled_back(self.seq)

    def _is_rolled_back(self) -> bool:
        return self._history.was_rolled_back(self.seq, self._rollbacks)

    def again(self) -> Pin:
        """Another pin of the same state, also if this one was released: NotFoundError if it may be gone, ConflictError
        if it was rolled back since.
        """
        self.check()
        pin = self._history.pin(self.seq)
        pin._rollbacks = self._rollbacks
        pin.check()
        return pin

    def release(self) -> None:
        """Releases the pin. Idempotent."""
        if self._is_held:
            self._is_held = False
            self._history.unpin(self.seq)

    def __enter__(self) -> int:
        return self.seq

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
        # What was not found, or not applied, is so because of the rollback.
        if (error is None or isinstance(error, InputError)) and self._is_rolled_back():
            raise rolled_back(self.seq) from error

    def __del__(self) -> None:
        self.release()


class History:
    """Which states can be read, and the current readers of old ones. Thread-safe."""

    def __init__(self, holder: HoldsStart) -> None:
        self._holder = holder
        self._pins: dict[int, int] = {}
        # A pin may be released by the garbage collector in the middle of anything, so nothing is called under it.
        self._mutex = Lock()
        self._dropped: list[int] = []
        self._targets: list[int] = []

    @property
    def start_seq(self) -> int:
        """The oldest seq that may be asked for."""
        return self._holder.history_start_seq

    @property
    def pins(self) -> int:
        """How many pins there are."""
        self._settle()
        return sum(self._pins.values())

    def pin(self, seq: int) -> Pin:
        """Protects everything that the states from a seq on need; NotFoundError if some of it may be gone already."""
        with self._mutex:
            self._settle_locked()
            if seq >= self.start_seq:
                self._pins[seq] = self._pins.get(seq, 0) + 1
                return Pin(self, seq)
        raise forgotten(self.start_seq)

    @property
    def rollbacks(self) -> int:
        """How many there were since the engine was opened."""
        return len(self._targets)

    def rolled_back(self, seq: int) -> None:
        """States above a seq are about to be taken back: the applied seq is lowered, and nothing else has changed."""
        self._targets.append(seq)

    def was_rolled_back(self, seq: int, rollbacks: int) -> bool:
        """Whether a state was rolled back since this number of rollbacks."""
        return any(target < seq for target in self._targets[rollbacks:])

    def unpin(self, seq: int) -> None:
        """Forgets a pin. Takes no lock: it may be called while this thread holds it."""
        self._dropped.append(seq)

    def least_pinned(self) -> int | None:
        """The oldest seq that is being read; None without readers."""
        self._settle()
        return min(self._pins, default=None)

    def move_start(self, seq: int) -> int:
        """Moves the start of history, as far as pins allow it; where it is then."""
        with self._mutex:
            self._settle_locked()
            wanted = min([seq, *self._pins])
            self._holder.history_start_seq = max(self.start_seq, wanted)
            return self.start_seq

    def _settle(self) -> None:
        with self._mutex:
            self._settle_locked()

    def _settle_locked(self) -> None:
        while self._dropped:
            seq = self._dropped.pop()
            left = self._pins.get(seq, 0) - 1
            if left > 0:
                self._pins[seq] = left
            else:
                self._pins.pop(seq, None)


def forgotten(start_seq: int) -> NotFoundError:
    """The error for a state that is no longer kept."""
    return NotFoundError(
        f"states before seq {start_seq} are no longer kept", operation="read", hint=f"Read at {start_seq} or later"
    )


def rolled_back(seq: int) -> ConflictError:
    """The error for a reader whose state was rolled back."""
    return ConflictError(
        f"entries were rolled back while the state of seq {seq} was read: that seq now names a different state",
        operation="read",
        hint="Read it again; entries at or below the low-water mark are never rolled back",
    )


class Limit(NamedTuple):
    """A seq that the start of history must not pass, and why."""

    seq: int
    reason: str


def forgets_versions(settings: EngineSettings) -> bool:
    """Whether the settings let old versions go, by age or by number."""
    return settings.keep_versions is not None or settings.keep_seconds is not None


class Retention:
    """Where history may begin, by the settings and by the limits.

    `seq_at` returns the last seq that was surely reached at a time, `least_read_seq` the oldest one that transactions
    read at.
    """

    def __init__(
        self,
        settings: EngineSettings,
        marks: Marks,
        history: History,
        *,
        has_store: bool,
        seq_at: Callable[[int], int],
        least_read_seq: Callable[[], int | None],
        now_us: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._marks = marks
        self._history = history
        self._has_store = has_store
        self._seq_at = seq_at
        self._least_read_seq = least_read_seq
        self._now_us = now_us

    @property
    def is_set(self) -> bool:
        """Whether the settings let anything go."""
        return forgets_versions(self._settings)

    @property
    def keep_versions(self) -> int:
        """How many versions of an object stay, however old they are."""
        return self._settings.keep_versions or 1

    def horizon(self, wanted: int | None = None) -> int:
        """Where history may begin: as wanted or as the settings say, and never where it must not."""
        start = self._history.start_seq
        if wanted is None:
            wanted = self._by_settings(start)
        return max(start, min(wanted, self.limit()))

    def _by_settings(self, start: int) -> int:
        seconds = self._settings.keep_seconds
        if seconds is not None:
            return self._seq_at(self._now_us() - seconds * MICROSECONDS)
        return start if self._settings.keep_versions is None else self.limit()

    def limit(self) -> int:
        """What the start of history must not pass."""
        return self._limits()[0].seq

    def held_back_by(self, wanted: int | None = None) -> str | None:
        """What keeps history from starting where it is wanted, or where the settings say; None if nothing does."""
        if wanted is None:
            if not self.is_set:
                return None
            seconds = self._settings.keep_seconds
            wanted = self._marks.applied_seq if seconds is None else self._by_settings(0)
        least = self._limits()[0]
        return least.reason if least.seq < wanted else None

    def _limits(self) -> list[Limit]:
        """All that hold it back, the strictest first."""
        marks, pinned, read = self._marks, self._history.least_pinned(), self._least_read_seq()
        if self._has_store:
            mark = marks.high_water_mark
            found = [Limit(mark, f"the high-water mark: what is above seq {mark} is not in the store yet")]
        else:
            mark = marks.low_water_mark
            found = [Limit(mark, f"the low-water mark: what is above seq {mark} may still be rolled back")]
        if pinned is not None:
            found.append(Limit(pinned, f"a reader that has pinned the state of seq {pinned}"))
        if read is not None:
            found.append(Limit(read, f"a transaction that reads at seq {read}"))
        return sorted(found)
