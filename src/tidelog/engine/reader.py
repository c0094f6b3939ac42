"""An engine read from its store alone: no directory, no claim, any number of readers beside the owner.

    manifest -> newest snapshot (or sorted index of a compaction) by blocks -> changes of the log shipped after it
       └── read again every `refresh_seconds`: what was shipped since becomes visible

Invariants
- Nothing is claimed, pinned or changed in the store: permission to read it is enough.
- `applied_seq` is the seq that is shown: everything up to it, nothing above it. It is at most the owner's high-water
  mark, so nothing that is shown is ever rolled back, and every answer is that of the owner at the same seq.
- Opening fetches the manifest, the document of a snapshot and the log that was shipped after that. If that log is
  longer than `_OPENING_BYTES`, the snapshot is shown at once, and the log follows in the background.
- A newer index is complete before it is shown, and its seq is shown last: a reader never sees half of a refresh.
- A refresh that fails changes nothing, and is tried again.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from tidelog.cold.catalog import Catalog
from tidelog.cold.fetch import CacheStatistics, ColdCache
from tidelog.engine.aio import TaskThreads, reading_cold
from tidelog.engine.changes import ChangeCalls, StoredChangeLog
from tidelog.engine.cold.manifest import Manifest, no_engine, read_manifest
from tidelog.engine.cold.reader import ColdReader, ColdStatistics
from tidelog.engine.mvcc.cells import BUCKETS
from tidelog.engine.mvcc.retention import History, Marks, forgotten
from tidelog.engine.mvcc.versions import Buckets
from tidelog.engine.reads import EngineStat, News
from tidelog.engine.scan import EngineScans
from tidelog.engine.scan_iterator import AsyncScan
from tidelog.engine.settings import EngineSettings
from tidelog.engine.sst.snapshot import StoredState, named_states
from tidelog.engine.sst.stored_index import StoredFiles, StoredIndex, StoredVersions
from tidelog.engine.value_files import NoValueFiles
from tidelog.engine.wal.replay import Replay, ShippedLog, log_range
from tidelog.engine.wal.scan_values import ScannedRows
from tidelog.errors import ClosedError, DataError, NotFoundError, TidelogError
from tidelog.store.aio import ClosedAtExit, twin, twin_by, twin_iterator, twin_of
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, Background, DaemonPool, Lazy

_logger = logging.getLogger("tidelog.engine")
_FETCHING_THREADS = 4
_OPENING_BYTES = 16 << 20
_STEP_BYTES = 64 << 20
_MAX_POSITION = (1 << 64) - 1


class _NoDisk:
    """Nothing is on this disk."""

    first_position = _MAX_POSITION

    def read_stored(self, position: int, length: int) -> None:
        """Never there."""

    def read_values(self, scanned: ScannedRows) -> None:
        """None of them is."""


class _Start:
    """Where history begins."""

    history_start_seq = 0


class _Standing:
    """Whether a reader is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def check(self) -> None:
        if self.is_closed:
            raise self.closed_error()

    def closed_error(self) -> ClosedError:
        return ClosedError("the engine is closed", hint="Open it again")


class StoreFollower:
    """The state of an engine in its store, as far as it was read: what reads need (`ReadParts`). Thread-safe."""

    directory: Path | None = None

    def __init__(
        self, catalog: Catalog, objects: ObjectStore, keys: EngineKeys, fetchers: DaemonPool, cache_bytes: int
    ) -> None:
        self._catalog = catalog
        self._objects = objects
        self._keys = keys
        self._fetchers = fetchers
        self._log = ShippedLog(catalog, objects, fetchers)
        self._cache = ColdCache(cache_bytes)
        self._start = _Start()
        self._rows: dict[bytes, bytes] = {}
        self._replay = Replay(self._log, self, 1)
        self._refreshing = Lock()
        self.wal = _NoDisk()
        self.values = NoValueFiles()
        self.marks = Marks()
        self.history = History(self._start)
        self.buckets = Buckets()
        self.versions = StoredVersions(self.buckets, self.refresh)
        self.base_seq = 0
        self.on_news: Callable[[], None] = lambda: None

    def set(self, key: bytes, value: bytes) -> None:
        """Takes a row that the log has changed (`RowSink`)."""
        self._rows[key] = value

    def refresh(self, max_bytes: int | None = None) -> bool:
        """Reads the manifest, and shows everything that it covers. With `max_bytes`, a log that is longer is left for
        later; returns whether something of it is.
        """
        with self._refreshing:
            manifest = self._read_manifest()
            self._rebase(manifest)
            stops = self._stops(manifest)
            if max_bytes is not None and sum(size for _, size in stops) > max_bytes:
                return True
            for stop_lsn, _ in stops:
                self._advance(manifest, stop_lsn)
            self._show(manifest, manifest.high_water_mark)
            return False

    def _read_manifest(self) -> Manifest:
        found = read_manifest(self._catalog.metadata, self._keys)
        if found is None:
            raise no_engine(self._keys, self._objects, "open engine")
        return found[0]

    # The snapshot

    def _rebase(self, manifest: Manifest) -> None:
        """Begins with the newest snapshot, or goes on with one that is newer than the one in use."""
        known_lsn = self.versions.newest.base_lsn if self._has_index else 0
        for named in reversed(named_states(self._objects, self._keys, manifest)):
            if named.lsn <= known_lsn:
                return
            try:
                state = named.open()
            except (DataError, NotFoundError) as error:
                _logger.warning("a snapshot in %s cannot be used: %s", self._objects.url, error)
                continue
            self._use(state)
            return
        if not self._has_index:
            self._require_whole_log()
            self.versions.use(StoredIndex(StoredFiles(self._objects, (), self._cache), 1))

    @property
    def is_ready(self) -> bool:
        """Whether something was read: `refresh` does."""
        return self._has_index

    @property
    def _has_index(self) -> bool:
        return bool(self.versions._indexes)

    def _use(self, state: StoredState) -> None:
        footer = state.footer
        files = StoredFiles(self._objects, state.parts(), self._cache, self._fetchers)
        if self._has_index and footer.lsn <= self._replay.lsn:
            index = self.versions.newest.rebased(files, footer.lsn)
        else:
            index = StoredIndex(files, footer.lsn, (), footer.history_start_seq)
            self._replay = Replay(self._log, self, footer.lsn)
        self._replay.history_start_seq = max(self._replay.history_start_seq, footer.history_start_seq)
        self._use_index(index, reloads=True)
        self.base_seq = footer.seq
        if footer.seq > self.marks.applied_seq:
            self._show(None, footer.seq)

    def _require_whole_log(self) -> None:
        start = self._catalog.start_offset()
        if start > 1:
            raise DataError(
                f"no snapshot in {self._objects.url} can be read, and its log begins at LSN {start}",
                operation="open engine",
                hint="Open a replica, or put a good copy of a snapshot in its place",
            )

    # The log after it

    def _stops(self, manifest: Manifest) -> list[tuple[int, int]]:
        """Where the pieces end in which the rest of the log is replayed, with their bytes."""
        end_lsn = manifest.high_water_lsn + 1
        found: list[tuple[int, int]] = []
        size = 0
        if self._replay.lsn >= end_lsn:
            return found
        for one in self._catalog.between(self._replay.lsn, end_lsn):
            size += one.raw_size
            if size >= _STEP_BYTES and one.next_offset < end_lsn:
                found.append((one.next_offset, size))
                size = 0
        return [*found, (end_lsn, size)]

    def _advance(self, manifest: Manifest, stop_lsn: int) -> None:
        self._rows = {}
        self._replay.run_range(log_range(manifest, self._replay.lsn, stop_lsn))
        rows, self._rows = self._rows, {}
        index = self.versions.newest.changed(rows, self._replay.lsn, self.versions.newest.history_start_seq)
        self._use_index(index, reloads=any(key.startswith(BUCKETS) for key in rows))
        if self._replay.last_seq > self.marks.applied_seq:
            self._show(None, self._replay.last_seq)

    def _use_index(self, index: StoredIndex, *, reloads: bool) -> None:
        start_seq = max(index.history_start_seq, self._replay.history_start_seq)
        self.versions.use(StoredIndex(index.files, index.base_lsn, index.changes, start_seq))
        self._start.history_start_seq = max(self._start.history_start_seq, start_seq)
        if reloads:
            self.buckets.load(index)

    def _show(self, manifest: Manifest | None, seq: int) -> None:
        """Everything up to a seq is in the index: it is visible from here on."""
        if manifest is not None:
            start_seq = min(manifest.history_start_seq, seq)
            self._start.history_start_seq = max(self._start.history_start_seq, start_seq)
        if seq > self.marks.applied_seq:
            self.marks.applied(seq)
            self.marks.raise_low_water_mark(seq)
            self.marks.raise_high_water_mark(seq)
            self.on_news()

    # How it is

    @property
    def changed_bytes(self) -> int:
        """What the changes since the snapshot take in memory."""
        return sum(one.memory_bytes for one in self.versions.newest.changes)

    def cache_statistics(self) -> CacheStatistics:
        """Those of the blocks of the index."""
        return self._cache.statistics()


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


class EngineReader(EngineScans, ChangeCalls, ClosedAtExit):
    """An engine that is read from its store: `tidelog.open_engine(store=..., read_only=True)`. It shows what was
    shipped, owns nothing and changes nothing.
    """

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
    open_object_async = twin(EngineStat.open_object, reading_cold)
    stat_async = twin(EngineStat.stat, reading_cold)
    has_bucket_async = twin(EngineStat.has_bucket, reading_cold)
    find_object_async = twin(EngineStat.find_object, reading_cold)

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
