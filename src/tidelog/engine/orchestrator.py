"""What owns the log of an engine, and how its entries reach the engine.

    log of the orchestrator ──entries──> drive ──apply_many──> engine ──truncation mark──> orchestrator

An orchestrator is anything with an ordered log: Raft, a topic, a table with a growing number. It is asked for little:

    low_water_mark()                 the least seq that all replicas have applied; 0 while it is not known
    entries(after_seq, up_to=None)   (seq, entry) in order, seqs above `after_seq` and not above `up_to`, as far as
                                     there are any now. If an entry after `after_seq` was truncated: GapError
    truncate(seq)                    everything up to `seq` is in the store: the log need not keep it

and may offer more, each of them by having the method:

    agreed_seq(applied_seq)          the greatest seq, not above `applied_seq`, up to which its log is what it gave out
    note_applied(seq)                is told how far this engine has come
    wait(after_seq, timeout_seconds) returns when there is an entry above `after_seq`, or the time has passed

Invariants of `drive`
- Entries are applied in the order of the log, each once, and all of them before the low-water mark is moved over them.
- Any number of threads and tasks may drive one engine; they take turns (`turn.py`). Each of them hears what became of
  the entries that it gave, and all hear the same: the answer for a seq is the engine's, and is given once.
- The engine's low-water mark is the orchestrator's, but never above what this engine has applied.
- The orchestrator is told to truncate up to `engine.truncation_mark`, and that never goes back.
- A log that lost its end is followed: the engine rolls back to `agreed_seq`, in the beginning and whenever it asks for
  more. With `compares_last` a log that has another entry where the engine stands, and does not say so, is an error.
- It keeps nothing: whoever is killed drives again, from `engine.applied_seq`.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable
from threading import Event
from typing import Final, Protocol, runtime_checkable

from tidelog.engine.applying import Applying, apply_entries, batches
from tidelog.engine.entry_codec import Carried, decode_entry, encode_entry
from tidelog.engine.results import Result
from tidelog.engine.turn import Turn
from tidelog.errors import GapError, InputError

__all__ = [
    "AsyncOrchestrator",
    "Driven",
    "Orchestrator",
    "apply_entries",
    "decode_entry",
    "drive",
    "encode_entry",
]

POLL_SECONDS: Final = 0.02
MARKS_SECONDS: Final = 1.0
"""How often marks are told while much is being applied: it costs a record here, and a sync or a message there."""

_METHODS = ("low_water_mark", "entries", "truncate")
Pair = tuple[int, Carried]
OnResult = Callable[[Result], None]


@runtime_checkable
class Orchestrator(Protocol):
    """The owner of the log."""

    def low_water_mark(self) -> int: ...

    def entries(self, after_seq: int, up_to: int | None = None) -> Iterable[Pair]: ...

    def truncate(self, seq: int) -> None: ...


@runtime_checkable
class AsyncOrchestrator(Protocol):
    """The same for an event loop (`drive_async`). `agreed_seq`, `note_applied` and `wait` are coroutines there too."""

    async def low_water_mark(self) -> int: ...

    def entries(self, after_seq: int, up_to: int | None = None) -> AsyncIterator[Pair]: ...

    async def truncate(self, seq: int) -> None: ...


@runtime_checkable
class RollsBack(Protocol):
    """An orchestrator whose log may lose its end."""

    def agreed_seq(self, applied_seq: int) -> int: ...


@runtime_checkable
class NotesApplied(Protocol):
    """An orchestrator that wants to know how far an engine is."""

    def note_applied(self, seq: int) -> None: ...


@runtime_checkable
class Waits(Protocol):
    """An orchestrator that can be waited for."""

    def wait(self, after_seq: int, timeout_seconds: float) -> object: ...


class Driven(Applying, Protocol):
    """What is asked of an engine."""

    @property
    def driving(self) -> Turn: ...

    @property
    def low_water_mark(self) -> int: ...

    @property
    def truncation_mark(self) -> int: ...

    def update_low_water_mark(self, seq: int) -> None: ...

    def rollback_to(self, seq: int) -> None: ...


def drive(
    engine: Driven,
    orchestrator: Orchestrator,
    *,
    follow: bool = False,
    up_to: int | None = None,
    stop: Event | None = None,
    on_result: OnResult | None = None,
    compares_last: bool = False,
) -> int:
    """Applies what the orchestrator has, and returns the engine's applied seq.

    With `follow` it goes on until `stop` is set. `on_result` hears what became of each entry, refused ones included.
    """
    check_orchestrator(orchestrator)
    driver = Driver(engine, orchestrator, on_result)
    stop = stop or Event()
    if compares_last:
        driver.compare_last(stop)
    driver.catch_up(up_to, stop)
    while follow and not stop.is_set():
        driver.pause(stop)
        driver.catch_up(up_to, stop)
    return engine.applied_seq


def check_orchestrator(orchestrator: object, *, is_async: bool = False) -> None:
    """InputError that says what something lacks to be an orchestrator, of tasks or of threads."""
    kind = type(orchestrator).__name__
    missing = [f"{name}()" for name in _METHODS if not callable(getattr(orchestrator, name, None))]
    if missing:
        raise InputError(
            f"{kind} is no orchestrator: it has no {', '.join(missing)}",
            hint="tidelog.Orchestrator says what is asked of one",
        )
    if inspect.iscoroutinefunction(getattr(orchestrator, "low_water_mark", None)) != is_async:
        raise InputError(
            f"{kind} is an orchestrator for {'threads' if is_async else 'tasks'}",
            hint=f"Drive it with {'drive()' if is_async else 'drive_async()'}",
        )


class Driver:
    """Brings entries from an orchestrator to an engine, a batch at a time."""

    def __init__(self, engine: Driven, orchestrator: Orchestrator, on_result: OnResult | None = None) -> None:
        self._engine = engine
        self._orchestrator = orchestrator
        self._on_result = on_result
        self._seen_seq = engine.applied_seq
        self._truncated_seq = 0
        self._told_at = time.monotonic()

    def compare_last(self, stop: Event) -> None:
        """Gives the engine its last entry again: the same does nothing, and another one is an error that names it."""
        with self._engine.driving.taken(stop) as is_taken:
            if is_taken:
                self._compare_last()

    def _compare_last(self) -> None:
        self._roll_back()
        applied = self._engine.applied_seq
        if applied:
            with contextlib.suppress(GapError):  # truncated, so it was in the store, and all replicas had it
                self._apply(self._orchestrator.entries(applied - 1, applied))

    def catch_up(self, up_to: int | None, stop: Event) -> None:
        """Applies what is there now, and tells the marks."""
        with self._engine.driving.taken(stop) as is_taken:
            if is_taken:
                self._catch_up(up_to, stop)

    def _catch_up(self, up_to: int | None, stop: Event) -> None:
        self._roll_back()
        for batch in batches(self._orchestrator.entries(self._next_seq(), up_to)):
            if stop.is_set():
                break
            self._apply(batch)
            self._seen_seq = batch[-1][0]
            if time.monotonic() > self._told_at + MARKS_SECONDS:
                self._tell_marks()
        self._tell_marks()

    def pause(self, stop: Event) -> None:
        """Until there may be news."""
        if isinstance(self._orchestrator, Waits):
            self._orchestrator.wait(self._seen_seq, POLL_SECONDS * 10)
        else:
            stop.wait(POLL_SECONDS)

    def _apply(self, entries: Iterable[Pair]) -> None:
        for result in apply_entries(self._engine, entries):
            if self._on_result is not None:
                self._on_result(result)

    def _roll_back(self) -> None:
        """Follows a log that lost its end."""
        if not isinstance(self._orchestrator, RollsBack):
            return
        applied = self._engine.applied_seq  # it may grow meanwhile, by entries that nobody was asked about
        agreed = self._orchestrator.agreed_seq(applied)
        if agreed < applied:
            self._engine.rollback_to(agreed)

    def _next_seq(self) -> int:
        """Behind which entries are asked for: another driver may have rolled back what this one has given."""
        self._seen_seq = min(self._seen_seq, self._engine.applied_seq)
        return self._seen_seq

    def _tell_marks(self) -> None:
        engine, orchestrator = self._engine, self._orchestrator
        self._told_at = time.monotonic()
        if isinstance(orchestrator, NotesApplied):
            orchestrator.note_applied(engine.applied_seq)
        low = min(orchestrator.low_water_mark(), engine.applied_seq)
        if low > engine.low_water_mark:
            engine.update_low_water_mark(low)
        mark = engine.truncation_mark
        if mark > self._truncated_seq:
            orchestrator.truncate(mark)
            self._truncated_seq = mark
