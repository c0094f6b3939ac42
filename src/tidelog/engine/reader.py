"""An engine read from its store alone: no directory, no claim, any number of readers beside the owner.

    state as far as it was read (`follower.py`) -> the read path of the engine itself (`reads.py`, `scan.py`)
       └── read again every `refresh_seconds`: what was shipped since becomes visible

Invariants
- Nothing is claimed, pinned or changed in the store: permission to read it is enough.
- `applied_seq` is the seq that is shown: everything up to it, nothing above it. It is at most the owner's high-water
  mark, so nothing that is shown is ever rolled back, and every answer is that of the owner at the same seq.
- Opening fetches the manifest, the document of a snapshot and the log that was shipped after that. If that log is
  longer than `_OPENING_BYTES`, the snapshot is shown at once, and the log follows in the background.
- A refresh that fails changes nothing, and is tried again.
- One that an engine has taken over from (`restoring.py`) looks at the store again only for feeds that wait for more.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec

from tidelog.cold.catalog import Catalog
from tidelog.cold.fetch import CacheStatistics
from tidelog.engine.aio import TaskThreads, reading_cold
from tidelog.engine.changes import ChangeCalls, StoredChangeLog
from tidelog.engine.cold.reader import ColdReader, ColdStatistics
from tidelog.engine.engine import Engine
from tidelog.engine.follower import StoreFollower
from tidelog.engine.mvcc.retention import forgotten
from tidelog.engine.object_file import AsyncObjectFile
from tidelog.engine.reads import EngineStat, News
from tidelog.engine.scan import EngineScans
from tidelog.engine.scan_iterator import AsyncScan
from tidelog.engine.settings import EngineSettings
from tidelog.errors import ClosedError, NotSupportedError, TidelogError
from tidelog.store.aio import ClosedAtExit, twin, twin_by, twin_iterator, twin_of
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, Background, DaemonPool, Lazy

_logger = logging.getLogger("tidelog.engine")
_FETCHING_THREADS = 4
_OPENING_BYTES = 16 << 20


class _Standing:
    """Whether a reader is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def check(self) -> None:
        if self.is_closed:
            raise self.closed_error()

    def closed_error(self) -> ClosedError:
        return ClosedError("the engine is closed", hint="Open it again")


def _called(again: weakref.WeakMethod[Callable[[], float]]) -> float:
    work = again()
    return NEVER if work is None else work()


class ReaderStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the statistics of a read-only engine.

    `snapshot_seq` is the seq of the snapshot in use, `changed_bytes` the memory for what the log changed since,
    `index` the cache of index blocks, `cold` the reads of values.
    """

    applied_seq: int
    history_start_seq: int
    snapshot_seq: int
    changed_bytes: int
    refreshes: int
    failed_refreshes: int
    last_error: str | None
    index: CacheStatistics
    cold: ColdStatistics


class _OnlyOfEngineError(NotSupportedError, AttributeError):
    """What is only read has no such method: `hasattr` says so too."""


class OnlyRead:
    """What is read as an engine is, and has nothing else of `Engine`: asked for it, it says where it is."""

    _what: ClassVar[str]
    _hint: ClassVar[str]

    if not TYPE_CHECKING:  # a type checker knows it without

        def __getattr__(self, name: str) -> NoReturn:
            """Explains why there is nothing that needs an engine of its own."""
            if name.startswith("_") or hasattr(type(self), name) or not hasattr(Engine, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise _OnlyOfEngineError(f"{self._what}: {name} is not possible", hint=self._hint)


class EngineReader(OnlyRead, EngineScans, ChangeCalls, ClosedAtExit):
    """An engine that is read from its store: `tidelog.open_engine(store=..., read_only=True)`. It shows what was
    shipped, owns nothing and changes nothing.
    """

    _what = "this engine is read from its store, and has no directory"
    _hint = "Open it by its directory, tidelog.open_engine(directory, store=...), or ask the process that has it open"

    def __init__(
        self,
        objects: ObjectStore,
        metadata: MetadataStore,
        keys: EngineKeys,
        settings: EngineSettings,
        *,
        replicas: tuple[ObjectStore, ...] = (),
        runs_in_background: bool = True,
    ) -> None:
        catalog = Catalog(metadata, keys)
        self._objects = objects
        self._metadata = metadata
        self._fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-engine-reader")
        self._follower = follower = StoreFollower(catalog, objects, keys, self._fetchers, settings.buffer_pool_bytes)
        self._reader_standing = standing = _Standing()
        cold = ColdReader(
            catalog, objects, settings.cold_cache_bytes, lambda: replicas, threads=settings.cold_read_threads
        )
        super().__init__(follower, cold, standing)
        self._values = cold
        self._news = News()
        follower.on_news = self._news.tell
        self._tasks = Lazy(lambda: TaskThreads(settings.cold_read_threads), TaskThreads.close)
        self._change_log = Lazy(lambda: StoredChangeLog(follower.marks, follower.history, cold, standing.check))
        self._interval = settings.refresh_seconds
        self._refreshes = self._failed_refreshes = 0
        self._last_error: str | None = None
        self._background = Background(1, "tidelog-engine-reader")
        self._is_superseded: Callable[[], bool] = lambda: False
        """Whether an engine answers in its place: nobody begins to read here any more."""
        self._is_behind = True
        """Whether there is more in the store than opening has read."""
        try:
            self._is_behind = follower.refresh(_OPENING_BYTES)
        except BaseException:
            self.close()
            raise
        if runs_in_background:
            again = weakref.WeakMethod(self._refresh_again)  # a reader that its user has dropped is not kept alive
            self._background.add(lambda: _called(again), 0.0 if self._is_behind else self._interval)

    # Reading, in tasks. Every read may wait for the store, and has threads of its own.

    read_async = twin(EngineStat.read, reading_cold)
    stat_async = twin(EngineStat.stat, reading_cold)
    has_bucket_async = twin(EngineStat.has_bucket, reading_cold)
    find_object_async = twin(EngineStat.find_object, reading_cold)

    @twin_of(EngineStat.open_object)
    async def open_object_async(self, bucket: str, key: str, seq: int | None = None) -> AsyncObjectFile:
        """Each call on it is awaited, and so is each step of `async for`, which yields pieces."""
        file = await reading_cold(self, lambda: self.open_object(bucket, key, seq))
        return AsyncObjectFile(file, partial(reading_cold, self))

    def _scan_in_task(self, *args: Any, **kwargs: Any) -> AsyncScan:
        return AsyncScan(lambda: self.scan(*args, **kwargs), lambda take: reading_cold(self, lambda: take(True) or []))

    scan_async = twin_by(EngineScans.scan, _scan_in_task)
    read_many_async = twin(EngineScans.read_many, reading_cold)
    list_objects_async = twin_iterator(EngineStat.list_objects, reading_cold)
    list_buckets_async = twin(EngineStat.list_buckets, reading_cold)
    versions_async = twin(EngineStat.versions, reading_cold)
    digest_async = twin(EngineStat.digest, reading_cold)

    @property
    def applied_seq(self) -> int:
        """The last seq that is shown: at most the high-water mark of the owner."""
        return self._marks.applied_seq

    @property
    def history_start_seq(self) -> int:
        """The oldest seq that can be read."""
        return self._history.start_seq

    def refresh(self) -> int:
        """Shows everything that is in the store now; returns the `applied_seq`. It also happens by itself, every
        `refresh_seconds`.
        """
        self._reader_standing.check()
        self._follower.refresh()
        self._is_behind = False
        self._refreshes += 1
        return self._marks.applied_seq

    refresh_async = twin(refresh, reading_cold)

    def _refresh_again(self) -> float:
        if self._is_superseded() and not self._news.is_awaited:
            return self._interval  # a feed that was made before may begin to wait yet
        try:
            self.refresh()
            self._last_error = None
        except ClosedError:
            return self._interval
        except (TidelogError, OSError) as error:
            self._failed_refreshes += 1
            self._last_error = str(error)
            _logger.warning("%s: was not read again, which is tried later: %s", self._objects.url, error)
        return self._interval

    def _no_bucket(self, bucket: str, seq: int) -> TidelogError:
        # Its versions may be gone while a read of an older state was about to begin.
        return forgotten(self._kept_from()) if seq < self._kept_from() else super()._no_bucket(bucket, seq)

    def statistics(self) -> ReaderStatistics:
        """Returns a snapshot of the statistics. Makes no request to the store."""
        return ReaderStatistics(
            applied_seq=self._marks.applied_seq,
            history_start_seq=self._history.start_seq,
            snapshot_seq=self._follower.base_seq,
            changed_bytes=self._follower.changed_bytes,
            refreshes=self._refreshes,
            failed_refreshes=self._failed_refreshes,
            last_error=self._last_error,
            index=self._follower.cache_statistics(),
            cold=self._values.statistics(),
        )

    def close(self) -> None:
        """Ends reading and following. Idempotent; waits for no request that hangs."""
        if self._standing.is_closed:
            return
        self._end_reading()
        self._news.tell()
        self._background.close()
        self._tasks.close()
        self._values.close()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(TidelogError):
            self._metadata.close()

    @twin_of(close)
    async def close_async(self) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._standing.is_closed else "open"
        return f"<tidelog.EngineReader {self._objects.url!r} applied_seq={self._marks.applied_seq} {state}>"
