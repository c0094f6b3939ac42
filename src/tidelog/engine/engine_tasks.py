"""The async twins of an engine: the same calls for tasks, in worker threads of the engine's own.

    applying   one thread: what is asked for is done in that order, so that tasks need not wait for each other
    reading    a few: the index, values, digests
    store      a few: what may wait for a store for long, so that nothing else waits with it

Invariants
- Every twin does what the method without `_async` does, and raises what that raises.
- Entries of tasks that wait at the same time are applied with one sync, each by itself: one that is wrong fails alone.
- A thread cannot be stopped halfway. Whoever is cancelled has its call done or not done, never half: one that had not
  begun is left out, one that had goes on.
- The threads are not those of the event loop: a store that does not answer fills none of those, nor does it hold up the
  end of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from threading import Lock
from types import TracebackType
from typing import NamedTuple, ParamSpec, Protocol, Self, TypeVar

from tidelog.engine.entry_codec import Carried
from tidelog.engine.results import ObjectInfo, ObjectStat, Result, StoredObject, VersionInfo
from tidelog.errors import ClosedError, InputError
from tidelog.tier.daemon_pool import DaemonPool

_READING_THREADS = 4
_STORE_THREADS = 4
_MAX_TOGETHER = 256
_LISTED_AT_ONCE = 1000

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class _Engine(Protocol):
    """What an engine does by waiting."""

    @property
    def _tasks(self) -> TaskThreads: ...

    def apply(self, seq: int, entry: Carried) -> Result: ...

    def apply_many(self, entries: Iterable[tuple[int, Carried]]) -> list[Result]: ...

    def update_low_water_mark(self, seq: int) -> None: ...

    def rollback_to(self, seq: int) -> None: ...

    def read(self, bucket: str, key: str, seq: int | None = None) -> StoredObject: ...

    def stat(self, bucket: str, key: str, seq: int | None = None) -> ObjectStat: ...

    def has_bucket(self, bucket: str, seq: int | None = None) -> bool: ...

    def find_object(self, bucket: str, key: str, seq: int | None = None) -> ObjectInfo | None: ...

    def list_objects(
        self,
        bucket: str,
        prefix: str = "",
        seq: int | None = None,
        *,
        start_after: str | None = None,
        limit: int | None = None,
    ) -> Iterator[ObjectInfo]: ...

    def list_buckets(self, seq: int | None = None) -> list[str]: ...

    def versions(self, bucket: str, key: str) -> list[VersionInfo]: ...

    def digest(self, seq: int | None = None) -> str: ...

    def create_checkpoint(self) -> int: ...

    def ship(self) -> int: ...

    def close(self, *, checkpoint: bool = True) -> None: ...


class _Asked(NamedTuple):
    """An entry that a task wants to have applied."""

    seq: int
    entry: Carried
    result: Future[Result]


class TaskThreads:
    """The threads of one engine for its tasks. They are started when they are needed."""

    def __init__(self) -> None:
        self._applying = DaemonPool(1, "tidelog-engine-apply")
        self._reading = DaemonPool(_READING_THREADS, "tidelog-engine-read")
        self._store = DaemonPool(_STORE_THREADS, "tidelog-engine-store")
        self._grouping = Lock()
        self._group: list[_Asked] | None = None
        """Those who will be served together; whoever comes behind another kind of call is of the next group."""

    async def apply(self, engine: _Engine, seq: int, entry: Carried) -> Result:
        """Applies an entry, together with those of others who wait."""
        asked = _Asked(seq, entry, Future())
        with self._grouping:
            if self._group is None or len(self._group) == _MAX_TOGETHER:
                self._group = self._new_group(engine)
            self._group.append(asked)
        return await asyncio.wrap_future(asked.result)

    def _new_group(self, engine: _Engine) -> list[_Asked]:
        group: list[_Asked] = []
        turn = _submitted(self._applying, self._apply_group, engine, group)
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

    async def run_in_order(
        self, work: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """A call behind everything that was asked for before, and before everything that comes."""
        return await asyncio.wrap_future(self.submit_in_order(work, *args, **kwargs))

    def submit_in_order(
        self, work: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Answer]:
        """The same, for whoever waits in another way."""
        with self._grouping:
            self._group = None
            return _submitted(self._applying, work, *args, **kwargs)

    async def read(
        self, work: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """A call that looks."""
        return await asyncio.wrap_future(_submitted(self._reading, work, *args, **kwargs))

    async def reach_store(self, work: Callable[[], Answer]) -> Answer:
        """A call that may wait for a store."""
        return await asyncio.wrap_future(_submitted(self._store, work))

    def close(self) -> None:
        """No more calls. Waits for nothing; what was asked for and not begun is given up."""
        with self._grouping:
            self._group = None
        for pool in (self._applying, self._reading, self._store):
            pool.shutdown(wait=False, cancel_futures=True)


def _give_up(group: list[_Asked]) -> None:
    for asked in group:
        if asked.result.set_running_or_notify_cancel():
            asked.result.set_exception(_closed())


def _are_applied_together(engine: _Engine, wanted: list[_Asked]) -> bool:
    """With one sync; False when one of them is wrong: those before it do nothing when they are applied again."""
    try:
        results = engine.apply_many([(asked.seq, asked.entry) for asked in wanted])
    except InputError:
        return False
    except BaseException as error:  # noqa: BLE001 - whoever asked hears of it
        for asked in wanted:
            asked.result.set_exception(error)
        return True
    for asked, result in zip(wanted, results, strict=True):
        asked.result.set_result(result)
    return True


def _apply_alone(engine: _Engine, asked: _Asked) -> None:
    try:
        asked.result.set_result(engine.apply(asked.seq, asked.entry))
    except BaseException as error:  # noqa: BLE001 - whoever asked hears of it
        asked.result.set_exception(error)


def _is_in_order(wanted: list[_Asked]) -> bool:
    return all(
        type(a.seq) is int and type(b.seq) is int and a.seq < b.seq
        for a, b in zip(wanted, islice(wanted, 1, None), strict=False)
    )


def _submitted(
    pool: DaemonPool, work: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Future[Answer]:
    try:
        return pool.submit(work, *args, **kwargs)
    except RuntimeError:
        raise _closed() from None


def _closed() -> ClosedError:
    return ClosedError("the engine is closed", hint="Open it again")


class EngineTasks:
    """What an engine has for tasks."""

    async def apply_async(self: _Engine, seq: int, entry: Carried) -> Result:
        """As `apply`. Tasks that wait at the same time share a sync; entries are applied in the order of the calls."""
        return await self._tasks.apply(self, seq, entry)

    async def apply_many_async(self: _Engine, entries: Iterable[tuple[int, Carried]]) -> list[Result]:
        """As `apply_many`."""
        return await self._tasks.run_in_order(self.apply_many, list(entries))

    async def update_low_water_mark_async(self: _Engine, seq: int) -> None:
        """As `update_low_water_mark`."""
        await self._tasks.run_in_order(self.update_low_water_mark, seq)

    async def rollback_to_async(self: _Engine, seq: int) -> None:
        """As `rollback_to`."""
        await self._tasks.run_in_order(self.rollback_to, seq)

    async def read_async(self: _Engine, bucket: str, key: str, seq: int | None = None) -> StoredObject:
        """As `read`."""
        return await self._tasks.read(self.read, bucket, key, seq)

    async def stat_async(self: _Engine, bucket: str, key: str, seq: int | None = None) -> ObjectStat:
        """As `stat`."""
        return await self._tasks.read(self.stat, bucket, key, seq)

    async def has_bucket_async(self: _Engine, bucket: str, seq: int | None = None) -> bool:
        """As `has_bucket`."""
        return await self._tasks.read(self.has_bucket, bucket, seq)

    async def find_object_async(self: _Engine, bucket: str, key: str, seq: int | None = None) -> ObjectInfo | None:
        """As `find_object`."""
        return await self._tasks.read(self.find_object, bucket, key, seq)

    async def list_objects_async(
        self: _Engine,
        bucket: str,
        prefix: str = "",
        seq: int | None = None,
        *,
        start_after: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[ObjectInfo]:
        """As `list_objects`, for `async for`."""
        tasks = self._tasks
        found = await tasks.read(self.list_objects, bucket, prefix, seq, start_after=start_after, limit=limit)
        while some := await tasks.read(_some, found):
            for item in some:
                yield item

    async def list_buckets_async(self: _Engine, seq: int | None = None) -> list[str]:
        """As `list_buckets`."""
        return await self._tasks.read(self.list_buckets, seq)

    async def versions_async(self: _Engine, bucket: str, key: str) -> list[VersionInfo]:
        """As `versions`."""
        return await self._tasks.read(self.versions, bucket, key)

    async def digest_async(self: _Engine, seq: int | None = None) -> str:
        """As `digest`."""
        return await self._tasks.read(self.digest, seq)

    async def create_checkpoint_async(self: _Engine) -> int:
        """As `create_checkpoint`."""
        return await self._tasks.reach_store(self.create_checkpoint)

    async def ship_async(self: _Engine) -> int:
        """As `ship`."""
        return await self._tasks.reach_store(self.ship)

    async def close_async(self: _Engine, *, checkpoint: bool = True) -> None:
        """As `close`; what tasks had asked to be applied before is applied first."""
        await close_in_thread(self, checkpoint=checkpoint)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self: _Engine,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await close_in_thread(self)


async def close_in_thread(engine: _Engine, *, checkpoint: bool = True) -> None:
    """Closes an engine behind everything that was asked for; one that is closed already is left alone."""
    try:
        closing = engine._tasks.submit_in_order(engine.close, checkpoint=checkpoint)
    except ClosedError:
        return
    await asyncio.wrap_future(closing)


def _some(found: Iterator[ObjectInfo]) -> list[ObjectInfo]:
    return list(islice(found, _LISTED_AT_ONCE))
