"""What of the past is kept: the oldest seq that may be read, and who holds it back.

    history_start_seq        every state from here on is exactly readable
    horizon                  where it may move to: see `Retention.horizon`

Invariants
- The start of history never goes back, and moves before anything below it is removed.
- It never passes the low-water mark (a rollback may need what is above), nor the high-water mark where there is a store
  (what a restore begins with is a state of that), nor the seq of a pin or of an open transaction.
- A pin is taken and the start is moved in one step each: who holds a pin reads its state to the end.
- A rollback makes other states of the seqs above its target. Pins there are ended before anything is changed: whoever
  asks its pin after each look, and is told nothing, has seen the state that it pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Protocol

from tidelog.engine.marks import Marks
from tidelog.engine.settings import EngineSettings
from tidelog.errors import ConflictError, InputError, NotFoundError

MICROSECONDS = 1_000_000


class HoldsStart(Protocol):
    """Whoever remembers the start of history: the checkpointer."""

    history_start_seq: int


class Pin:
    """Keeps the states from a seq on readable until it is released; a context manager. One that is dropped is too.

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

    def release(self) -> None:
        """Nobody reads there any more, as far as this one is concerned. Twice is fine."""
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
    """Which states can be read, and who reads old ones just now. Any thread may use it."""

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
        """Nothing is removed that the states from a seq on need; NotFoundError when something may be gone already."""
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
        """Whether a state was taken back since there were so many rollbacks."""
        return any(target < seq for target in self._targets[rollbacks:])

    def unpin(self, seq: int) -> None:
        """A pin is no more. Takes no lock: it may be called while this very thread holds it."""
        self._dropped.append(seq)

    def least_pinned(self) -> int | None:
        """The oldest seq that somebody reads; None when nobody does."""
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
    """What whoever asks for a state is told that is no longer kept."""
    return NotFoundError(
        f"states before seq {start_seq} are no longer kept", operation="read", hint=f"Read at {start_seq} or later"
    )


def rolled_back(seq: int) -> ConflictError:
    """What whoever reads a state is told that a rollback took away."""
    return ConflictError(
        f"the log's end was rolled back while the state of seq {seq} was read: that seq means another state now",
        operation="read",
        hint="Read it once more; what is at or below the low-water mark is never rolled back",
    )


class Limit(NamedTuple):
    """A seq that the start of history must not pass, and why."""

    seq: int
    reason: str


class Retention:
    """How far history may begin, by the settings and by what is needed.

    `seq_at` gives the last seq that was surely reached at a time, `least_read_seq` the oldest one that transactions
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
        return self._settings.keep_versions is not None or self._settings.keep_seconds is not None

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
        """Who keeps history from beginning where it is wanted, or where the settings would have it; None for nobody."""
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
