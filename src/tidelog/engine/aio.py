"""Where the async twins of an engine run: in worker threads of the engine's own.

    applying   one thread: calls run in the order in which they were made, so tasks need not wait for each other
    reading    a few: the index, values on this disk, digests; none of them waits for a store
    cold       many (`cold_read_threads`): values that have left the disk, also those of scans, and the log in the store
    store      a few: calls that may wait a long time for a store, so that nothing else waits with them

Invariants
- Entries of tasks that wait at the same time share one sync but are applied individually: an invalid one fails alone.
- A thread cannot be stopped halfway. The call of a cancelled task is executed or not, never half: a call that had not
  started is skipped, one that had started continues.
- What is on this disk never waits for a cold thread: each read, and each step of a scan or a change feed, is tried by
  `reading` first, which gives up where the store would have to be asked.
- The threads are not those of the event loop: a store that does not answer neither exhausts them nor delays the exit of
  the process.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import islice
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

from tidelog.engine.entry import Result
from tidelog.engine.txn.read_set import Carried
from tidelog.errors import ClosedError, InputError
from tidelog.store.scheduler import DaemonPool, Lazy

_READING_THREADS = 4
_STORE_THREADS = 4
_MAX_TOGETHER = 256

Answer = TypeVar("Answer")


class _Engine(Protocol):
    """What a group of entries is applied with."""

    def apply(self, seq: int, entry: Carried) -> Result: ...

    def apply_many(self, entries: Iterable[tuple[int, Carried]]) -> list[Result]: ...


class _Asked(NamedTuple):
    """An entry that a task has queued to be applied."""

    seq: int
    entry: Carried
    result: Future[Result]


class TaskThreads:
    """The worker threads of one engine, started on demand."""

    def __init__(self, cold_threads: int) -> None:
        self._applying = DaemonPool(1, "tidelog-engine-apply")
        self._reading = DaemonPool(_READING_THREADS, "tidelog-engine-read")
        self._cold = DaemonPool(cold_threads, "tidelog-engine-cold")
        self._store = DaemonPool(_STORE_THREADS, "tidelog-engine-store")
        self._grouping = Lock()
        self._group: list[_Asked] | None = None
        """Calls that are served together; a call after one of another kind is in the next group."""

    async def apply(self, engine: _Engine, seq: int, entry: Carried) -> Result:
        """Applies an entry, in one group with those of other waiting tasks."""
        asked = _Asked(seq, entry, Future())
        with self._grouping:
            if self._group is None or len(self._group) == _MAX_TOGETHER:
                self._group = self._new_group(engine)
            self._group.append(asked)
        return await asyncio.wrap_future(asked.result)

    def _new_group(self, engine: _Engine) -> list[_Asked]:
        group: list[_Asked] = []
        turn = _submitted(self._applying, lambda: self._apply_group(engine, group))
        turn.add_done_callback(lambda done: _give_up(group) if done.cancelled() else None)
        return group

    def _apply_group(self, engine: _Engine, group: list[_Asked]) -> None:
        with self._grouping:
            if self._group is group:
                self._group = None
        wanted = [asked for asked in group if asked.result.set_running_or_notify_cancel()]
        if len(wanted) > 1 and _is_in_order(wanted) and _are_applied_together(engine, wanted):
            return
        for asked in wanted:
            _apply_alone(engine, asked)

    async def run_in_order(self, call: Callable[[], Answer]) -> Answer:
        """Runs a call after everything queued before it, and before everything queued later."""
        return await asyncio.wrap_future(self.submit_in_order(call))

    def submit_in_order(self, call: Callable[[], Answer]) -> Future[Answer]:
        """Like `run_in_order`, returning a future."""
        with self._grouping:
            self._group = None
            return _submitted(self._applying, call)

    async def read(self, call: Callable[[], Answer]) -> Answer:
        """Runs a read-only call that waits for no store."""
        return await asyncio.wrap_future(_submitted(self._reading, call))

    async def read_cold(self, call: Callable[[], Answer]) -> Answer:
        """Runs a read-only call that may wait for a store."""
        return await asyncio.wrap_future(_submitted(self._cold, call))

    async def read_here_or_cold(self, here: Callable[[], Answer | None], cold: Callable[[], Answer]) -> Answer:
        """Reads what is on this disk; None if it is not, which is read by a thread that may wait for the store."""
        found = await self.read(here)
        return await self.read_cold(cold) if found is None else found

    async def reach_store(self, call: Callable[[], Answer]) -> Answer:
        """Runs a call that may wait for a store."""
        return await asyncio.wrap_future(_submitted(self._store, call))

    def close(self) -> None:
        """Rejects further calls. Does not wait; calls that are queued but not started are dropped."""
        with self._grouping:
            self._group = None
        for pool in (self._applying, self._reading, self._cold, self._store):
            pool.shutdown(wait=False, cancel_futures=True)


def _give_up(group: list[_Asked]) -> None:
    for asked in group:
        if asked.result.set_running_or_notify_cancel():
            asked.result.set_exception(_closed())


def _are_applied_together(engine: _Engine, wanted: list[_Asked]) -> bool:
    """Applies a group with one sync; False if one entry is invalid: applying those before it again is a no-op."""
    try:
        results = engine.apply_many([(asked.seq, asked.entry) for asked in wanted])
    except InputError:
        return False
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        for asked in wanted:
            asked.result.set_exception(error)
        return True
    for asked, result in zip(wanted, results, strict=True):
        asked.result.set_result(result)
    return True


def _apply_alone(engine: _Engine, asked: _Asked) -> None:
    try:
        asked.result.set_result(engine.apply(asked.seq, asked.entry))
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        asked.result.set_exception(error)


def _is_in_order(wanted: list[_Asked]) -> bool:
    return all(
        type(a.seq) is int and type(b.seq) is int and a.seq < b.seq
        for a, b in zip(wanted, islice(wanted, 1, None), strict=False)
    )


def _submitted(pool: DaemonPool, call: Callable[[], Answer]) -> Future[Answer]:
    try:
        return pool.submit(contextvars.copy_context().run, call)
    except RuntimeError:
        raise _closed() from None


def _closed() -> ClosedError:
    return ClosedError("the engine is closed", hint="Open it again")


class _HasTasks(Protocol):
    @property
    def _tasks(self) -> Lazy[TaskThreads]: ...


async def in_order(engine: _HasTasks, call: Callable[[], Answer]) -> Answer:
    """For twins: after everything queued before, and before everything queued later."""
    return await engine._tasks().run_in_order(call)


async def reading(engine: _HasTasks, call: Callable[[], Answer]) -> Answer:
    """For twins: in a thread for reads that wait for no store."""
    return await engine._tasks().read(call)


async def reading_cold(engine: _HasTasks, call: Callable[[], Answer]) -> Answer:
    """For twins: in a thread for reads that may wait for a store."""
    return await engine._tasks().read_cold(call)


async def reading_here_or_cold(engine: _HasTasks, call: Callable[[bool], Answer | None]) -> Answer:
    """For a call that is told whether it may wait for a store, and returns None where it would have to."""
    return await engine._tasks().read_here_or_cold(lambda: call(False), lambda: _answered(call(True)))


def _answered(answer: Answer | None) -> Answer:
    assert answer is not None, "who may wait gets an answer"
    return answer


async def reaching_store(engine: _HasTasks, call: Callable[[], Answer]) -> Answer:
    """For twins: in a thread for what may wait long for a store."""
    return await engine._tasks().reach_store(call)
