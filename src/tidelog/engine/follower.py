"""The state of an engine as its store has it, for those who read there and own nothing.

    manifest -> newest snapshot (or sorted index of a compaction) by blocks -> changes of the log shipped after it

Invariants
- Nothing is claimed, pinned or changed in the store.
- A newer index is complete before it is shown, and its seq is shown last: a reader never sees half of a refresh.
- What is shown is at most the owner's high-water mark, and never goes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from tidelog.cold.catalog import Catalog
from tidelog.cold.fetch import CacheStatistics, ColdCache
from tidelog.engine.cold.manifest import Manifest, no_engine, read_manifest
from tidelog.engine.mvcc.cells import BUCKETS
from tidelog.engine.mvcc.retention import History, Marks
from tidelog.engine.mvcc.versions import Buckets
from tidelog.engine.sst.snapshot import StoredState, named_states
from tidelog.engine.sst.stored_index import StoredFiles, StoredIndex, StoredVersions
from tidelog.engine.value_files import NoValueFiles
from tidelog.engine.wal.replay import Replay, ShippedLog, log_range
from tidelog.engine.wal.scan_values import ScannedRows
from tidelog.errors import DataError, NotFoundError
from tidelog.store.keys import EngineKeys
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import DaemonPool

_logger = logging.getLogger("tidelog.engine")
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
