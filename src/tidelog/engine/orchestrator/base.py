"""The orchestrator interface (the owner of an engine's log), and `drive`, which applies its entries to an engine.
`drive_async` is the same in an event loop: there the orchestrator's methods are coroutines, and the engine, which waits
for its disk, works in a thread.

    log of the orchestrator ──entries──> drive ──apply_many──> engine ──truncation mark──> orchestrator

An orchestrator is anything with an ordered log: Raft, a topic, a table with a growing number. It must provide:

    low_water_mark()                 the least seq that all replicas have applied; 0 while it is not known
    entries(after_seq, up_to=None)   (seq, entry) in order, seqs above `after_seq` and not above `up_to`, as far as
                                     there are any now. If an entry after `after_seq` was truncated: GapError
    truncate(seq)                    everything up to `seq` is in the store: the log need not keep it

and may provide, each by having the method:

    agreed_seq(applied_seq)          the greatest seq, not above `applied_seq`, up to which its log is what it gave out
    note_applied(seq)                receives the seq that this engine has applied
    wait(after_seq, timeout_seconds) returns when there is an entry above `after_seq`, or the time has passed

Invariants of `drive`
- Entries are applied in the order of the log, each once, and all of them before the low-water mark is moved over them.
- Any number of threads and tasks may drive one engine; they take turns (`base.py`). Each of them hears what became of
  the entries that it gave, and all hear the same: the answer for a seq is the engine's, and is given once.
- The engine's low-water mark is the orchestrator's, but never above what this engine has applied.
- `truncate` is called with `engine.truncation_mark`, which never goes back.
- A log that lost its end is followed: the engine rolls back to `agreed_seq`, in the beginning and whenever it asks for
  more. With `compares_last` a log that has another entry where the engine stands, and does not say so, is an error.
- It keeps no state: a driver that was killed resumes from `engine.applied_seq`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Event, Lock, get_ident
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from tidelog.engine.entry import PutObject, Result, operations
from tidelog.engine.txn.read_set import Carried, Readable, batch_of, decode_entry, encode_entry
from tidelog.errors import GapError, InputError

# Entries on their way from a log to an engine: as many at a time as one sync is worth.
#
# Plain or guarded, the engine judges them (`engine/txn/read_set.py`), one by one, and gives each seq one answer.


BATCH_ENTRIES: Final = 256
"""Entries that are applied with one sync. More of them make no entry cheaper, and let readers wait longer for news."""
BATCH_BYTES: Final = 8 << 20


class Gathered:
    """Entries on their way into one batch."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, Carried]] = []
        self._bytes = 0

    def add(self, pair: tuple[int, Carried]) -> bool:
        """Whether it is time to apply them."""
        self.pairs.append(pair)
        self._bytes += data_bytes(pair[1])
        return len(self.pairs) >= BATCH_ENTRIES or self._bytes >= BATCH_BYTES

    def take(self) -> list[tuple[int, Carried]]:
        """What has gathered; nothing is left."""
        pairs, self.pairs, self._bytes = self.pairs, [], 0
        return pairs


def data_bytes(entry: Carried) -> int:
    """Bytes of data in an entry. One whose data is read where it is applied counts as a whole batch."""
    puts = (entry,) if isinstance(entry, PutObject) else operations(batch_of(entry))
    data = [put.data for put in puts if isinstance(put, PutObject)]
    return sum(len(one) if isinstance(one, bytes) else BATCH_BYTES for one in data)


# Turns: one driver of an engine at a time, of threads and of tasks.
#
# Invariants
# - Between asking a log for entries and applying them nobody else drives: another driver might roll the engine back
#   meanwhile, and apply other entries under the same seqs.
# - A driver that comes while another one is at work waits, and then applies only what is new since.
# - Turns are reentrant: a driver that drives again within its own turn (in `on_result`, or in an orchestrator) does not
#   wait for itself.


_LOOK_SECONDS: Final = 0.05
_TASK_SECONDS: Final = 0.002


class Turn:
    """The turns of one engine."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: object = None

    @contextmanager
    def taken(self, stop: Event) -> Iterator[bool]:
        """Waits for the turn of this thread; False when it was told to stop before."""
        if self._holder == get_ident():
            yield True
            return
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            if stop.is_set():
                yield False
                return
        with self._as(get_ident()):
            yield True

    @asynccontextmanager
    async def taken_async(self) -> AsyncIterator[None]:
        """Waits for the turn of this task."""
        task = asyncio.current_task()
        if self._holder is task:
            yield
            return
        # A lock of threads can be released by any of them; a task that is cancelled while it waits holds nothing.
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(_TASK_SECONDS)
        with self._as(task):
            yield

    @contextmanager
    def _as(self, holder: object) -> Iterator[None]:
        self._holder = holder
        try:
            yield
        finally:
            self._holder = None
            self._lock.release()


__all__ = [
    "AsyncOrchestrator",
    "Driven",
    "Orchestrator",
    "decode_entry",
    "drive",
    "drive_async",
    "encode_entry",
]

POLL_SECONDS: Final = 0.02
MARKS_SECONDS: Final = 1.0
"""How often marks are told while much is being applied: it costs a record here, and a sync or a message there."""

_METHODS = ("low_water_mark", "entries", "truncate")
Pair = tuple[int, Carried]
OnResult = Callable[[Result], None]
Answer = TypeVar("Answer")


@runtime_checkable
class Orchestrator(Protocol):
    """The owner of the log. Any object with these methods is one; docs/how-to/orchestrators.md explains them."""

    def low_water_mark(self) -> int:
        """The seq up to which all replicas have applied the log."""
        ...

    def entries(self, after_seq: int, up_to: int | None = None) -> Iterable[Pair]:
        """The entries after a seq as (seq, entry), in order, up to another seq (inclusive) or to the current end."""
        ...

    def truncate(self, seq: int) -> None:
        """Called when the store has everything up to a seq: the log may forget it."""
        ...


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

    def note_applied(self, seq: int) -> object: ...


@runtime_checkable
class Waits(Protocol):
    """An orchestrator that can be waited for."""

    def wait(self, after_seq: int, timeout_seconds: float) -> object: ...


class Driven(Readable, Protocol):
    """What is asked of an engine."""

    def apply_many(self, entries: Iterable[Pair]) -> list[Result]: ...

    @property
    def _driving(self) -> Turn: ...

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

    With `follow` it runs until `stop` is set. `on_result` receives the result of each entry, including refused ones.
    """
    check_orchestrator(orchestrator)
    ways = InThread(stop or Event())
    return ways.run(Driver(engine, orchestrator, ways, on_result).drive(follow, up_to, compares_last))


async def drive_async(
    engine: Driven,
    orchestrator: AsyncOrchestrator,
    *,
    follow: bool = False,
    up_to: int | None = None,
    on_result: OnResult | None = None,
    compares_last: bool = False,
) -> int:
    """Like `drive`, in an event loop; with `follow` it goes on until it is cancelled."""
    check_orchestrator(orchestrator, is_async=True)
    return await Driver(engine, orchestrator, _InTask(), on_result).drive(follow, up_to, compares_last)


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


class InThread:
    """How a driver waits in a thread. Every answer is there at once, so that its coroutines never suspend (`run`)."""

    def __init__(self, stop: Event) -> None:
        self.stop = stop

    async def answer(self, given: Any) -> Any:
        return given

    async def work(self, call: Callable[[], Answer]) -> Answer:
        return call()

    def pairs(self, entries: Iterable[Pair]) -> AsyncIterator[Pair]:
        return _Ready(entries)

    @asynccontextmanager
    async def turn(self, turn: Turn) -> AsyncIterator[bool]:
        with turn.taken(self.stop) as is_taken:
            yield is_taken

    async def pause(self) -> None:
        self.stop.wait(POLL_SECONDS)

    @staticmethod
    def run(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        raise AssertionError("a driver in a thread never suspends")


class _Ready:
    """What an `async for` takes from an iterable without suspending."""

    def __init__(self, entries: Iterable[Pair]) -> None:
        self._entries = iter(entries)

    def __aiter__(self) -> AsyncIterator[Pair]:
        return self

    async def __anext__(self) -> Pair:
        for pair in self._entries:
            return pair
        raise StopAsyncIteration


class _InTask:
    """How a driver waits in a task, which ends by being cancelled."""

    def __init__(self) -> None:
        self.stop = Event()

    async def answer(self, given: Any) -> Any:
        return await given

    async def work(self, call: Callable[[], Answer]) -> Answer:
        """In a thread, wholly even if the task is cancelled meanwhile: a thread cannot be stopped halfway."""
        working = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def pairs(self, entries: AsyncIterator[Pair]) -> AsyncIterator[Pair]:
        return entries

    @asynccontextmanager
    async def turn(self, turn: Turn) -> AsyncIterator[bool]:
        async with turn.taken_async():
            yield True

    async def pause(self) -> None:
        await asyncio.sleep(POLL_SECONDS)


class Driver:
    """Brings entries from an orchestrator to an engine, a batch at a time. `ways` says how it waits."""

    def __init__(
        self, engine: Driven, orchestrator: Any, ways: InThread | _InTask, on_result: OnResult | None = None
    ) -> None:
        self._engine = engine
        self._orchestrator = orchestrator
        self._ways = ways
        self._on_result = on_result
        self._seen_seq = engine.applied_seq
        self._truncated_seq = 0
        self._told_at = time.monotonic()

    async def drive(self, follow: bool, up_to: int | None, compares_last: bool) -> int:
        """Applies what there is; with `follow` until it is stopped."""
        stop = self._ways.stop
        if compares_last:
            await self._compare_last()
        await self.catch_up(up_to)
        while follow and not stop.is_set():
            await self._pause()
            await self.catch_up(up_to)
        return self._engine.applied_seq

    async def _compare_last(self) -> None:
        """Gives the engine its last entry again: the same does nothing, and another one is an error that names it."""
        async with self._ways.turn(self._engine._driving) as is_taken:
            if not is_taken:
                return
            await self._roll_back()
            applied = self._engine.applied_seq
            if applied:
                with contextlib.suppress(GapError):  # truncated, so it was in the store, and all replicas had it
                    given = self._ways.pairs(self._orchestrator.entries(applied - 1, applied))
                    await self._apply([pair async for pair in given])

    async def catch_up(self, up_to: int | None) -> None:
        """Applies what is there now, and tells the marks."""
        async with self._ways.turn(self._engine._driving) as is_taken:
            if is_taken:
                await self._catch_up(up_to)

    async def _catch_up(self, up_to: int | None) -> None:
        await self._roll_back()
        # Another driver may have rolled back what this one has given.
        self._seen_seq = min(self._seen_seq, self._engine.applied_seq)
        gathered = Gathered()
        async for pair in self._ways.pairs(self._orchestrator.entries(self._seen_seq, up_to)):
            if gathered.add(pair):
                if self._ways.stop.is_set():
                    break
                await self._apply(gathered.take())
                if time.monotonic() > self._told_at + MARKS_SECONDS:
                    await self._tell_marks()
        if gathered.pairs and not self._ways.stop.is_set():
            await self._apply(gathered.take())
        await self._tell_marks()

    async def _pause(self) -> None:
        """Until there may be news."""
        if isinstance(self._orchestrator, Waits):
            await self._ways.answer(self._orchestrator.wait(self._seen_seq, POLL_SECONDS * 10))
        else:
            await self._ways.pause()

    async def _apply(self, batch: list[Pair]) -> None:
        results = await self._ways.work(lambda: self._engine.apply_many(batch))
        for result in results:
            if self._on_result is not None:
                self._on_result(result)
        if batch:
            self._seen_seq = batch[-1][0]

    async def _roll_back(self) -> None:
        """Follows a log that lost its end."""
        if not isinstance(self._orchestrator, RollsBack):
            return
        applied = self._engine.applied_seq  # it may grow meanwhile, by entries that nobody was asked about
        agreed = await self._ways.answer(self._orchestrator.agreed_seq(applied))
        if agreed < applied:
            await self._ways.work(lambda: self._engine.rollback_to(agreed))

    async def _tell_marks(self) -> None:
        engine, orchestrator, ways = self._engine, self._orchestrator, self._ways
        self._told_at = time.monotonic()
        if isinstance(orchestrator, NotesApplied):
            await ways.answer(orchestrator.note_applied(engine.applied_seq))
        low = min(await ways.answer(orchestrator.low_water_mark()), engine.applied_seq)
        if low > engine.low_water_mark:
            await ways.work(lambda: engine.update_low_water_mark(low))
        mark = await ways.work(lambda: engine.truncation_mark)
        if mark > self._truncated_seq:
            await ways.answer(orchestrator.truncate(mark))
            self._truncated_seq = mark
