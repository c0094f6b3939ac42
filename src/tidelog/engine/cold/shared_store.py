"""The cold tier of a replica that shares its store with others: one of them ships, and the others read what it shipped.

    owner      log -> store, under its epoch (`shipping.py`)
    follower   applies the same entries into a log of its own; what the owner has shipped may leave its disk
               cold read: its index -> the same version in the owner's index, in the store -> the value

Each replica has LSNs and positions of its own: their logs hold the same entries, and other records between them. So a
position of a follower means nothing in the store. What means the same everywhere is a version: bucket, key and seq,
with the size and the checksum of its value, which follow from the entry. By that a value is looked up.

Invariants
- A follower claims nothing, and changes nothing in the store. There is one copy of the data, whatever the number of
  replicas.
- A value leaves the disk of a follower after some version that points to it was found in the store, at or below both
  high-water mark and low-water mark, with the same size and checksum. A value without such a version keeps its file.
- A version that the owner has not shipped yet, and whose value has left the disk, is a copy of a version that was: that
  one is found by the position that both have. No version is removed here above the high-water mark (`least_seq`), and
  the owner's log has the copy before the removal of its source, so one of the two is always in the store.
- The high-water mark of a follower is what the manifest covers, as far as its own orchestrator has called it final. A
  follower with an uncommitted tail can still roll that back, whatever the owner has shipped.
- A value whose size or checksum in the store is another one is a DataError: the replicas were not given the same log.
- Applies, listings and reads of what is on this disk never ask the store: what came back to it is known by the cells
  here, and needs not be looked up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock

from tidelog.cold.catalog import Catalog, Owner
from tidelog.cold.lease import NodeLease
from tidelog.engine.cold.disk_cache import DiskCache
from tidelog.engine.cold.manifest import Manifest, read_manifest
from tidelog.engine.cold.reader import ColdReader, PlacedCell
from tidelog.engine.cold.shipping import removable_below
from tidelog.engine.cold.store_link import take_over_start
from tidelog.engine.cold.value_store import stored_values
from tidelog.engine.core import Core
from tidelog.engine.follower import StoreFollower
from tidelog.engine.mvcc.cells import Cell, at, decode_cell, is_pointer, object_prefix, seq_of
from tidelog.engine.succession import Succession
from tidelog.engine.wal.value import CODEC_FILE
from tidelog.errors import ClosedError, DataError, NotFoundError, TidelogError
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import DaemonPool, Task, Threads

_logger = logging.getLogger("tidelog.engine")
_FETCHING_THREADS = 4


class SharedStore:
    """The store of a follower, in the place of `Shipping`. Thread-safe."""

    def __init__(
        self,
        core: Core,
        objects: ObjectStore,
        metadata: MetadataStore,
        keys: EngineKeys,
        *,
        replicas: Sequence[ObjectStore] = (),
        threads: Threads | None = None,
        node: str,
    ) -> None:
        settings = core.settings
        self._core = core
        self._objects = objects
        self._metadata = metadata
        self._keys = keys
        self._threads = threads or Threads()
        # It is never held: it tells whether others live.
        self._lease = NodeLease(metadata, core.clock, node, core.directory, root=keys.root, renews_itself=False)
        catalog = Catalog(metadata, keys)
        self._catalog = catalog
        self._fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-engine-shared")
        self._follower = StoreFollower(catalog, objects, keys, self._fetchers, settings.buffer_pool_bytes)
        self.reader = ColdReader(
            catalog,
            objects,
            settings.cold_cache_bytes,
            lambda: replicas,
            on_manifest=self._note,
            threads=settings.cold_read_threads,
            disk=DiskCache(core.files, core.directory, settings.disk_cache_bytes),
        )
        self.refusal: Callable[[], TidelogError] | None = None
        self.succession: Succession | None = None
        """Where it takes over by itself."""
        self._following = Lock()
        self._origins: dict[int, list[bytes]] = {}
        self._tasks: list[Task] = []
        self._is_stopped = False
        self.evicted_bytes = 0

    # Where a value is in the store

    def place(self, bucket: str, key: str, seq: int, cell: Cell) -> Cell:
        """The cell of the same version in the owner's index. NotFoundError if the store does not have it."""
        placed = self.place_named(at(object_prefix(bucket, key), seq), cell)
        return PlacedCell.of(placed, here=cell)

    def place_named(self, name: bytes, cell: Cell) -> Cell:
        """The same by the key of the version in the tree."""
        if cell.codec == CODEC_FILE:
            return cell  # its file has the same name everywhere
        found: Cell | None = None
        for is_again in (False, True):
            if is_again or not self._follower.is_ready:
                self._refresh()
            found = self._follower.versions.version(name)
            if found is not None and _is_same(found, cell):
                return found
        origin = self._by_origin(cell)
        if origin is not None:
            return origin
        if found is not None:
            raise self._diverged(name, found, cell)
        raise NotFoundError(
            f"a value of seq {seq_of(name)} is neither on this disk nor in the store", path=self._core.directory
        )

    def _diverged(self, name: bytes, found: Cell, cell: Cell) -> DataError:
        return DataError(
            f"{self._objects.url} has another value of seq {seq_of(name)} than this replica: {found.size} bytes with "
            f"checksum {found.crc:08x}, and here {cell.size} with {cell.crc:08x}",
            path=self._core.directory,
            hint="The replicas of a store must be given the same entries; restore this one from the store",
        )

    def _by_origin(self, cell: Cell) -> Cell | None:
        """That of a version which points to the same value, for a copy that is not shipped yet."""
        for is_again in (False, True):
            if is_again:
                self._origins = self._found_origins()
            for name in self._origins.get(cell.position, ()):
                found = self._follower.versions.version(name)
                if found is not None and _is_same(found, cell):
                    return found
        return None

    def _found_origins(self) -> dict[int, list[bytes]]:
        """For every value that has left the disk and has a version that is not shipped: those that are, by position.

        What is shipped is what the store says: the marks here may be behind after a crash.
        """
        core, shipped_seq = self._core, self._follower.marks.applied_seq
        wanted: set[int] = set()
        shipped: dict[int, list[bytes]] = {}
        for name, raw in core.tree.scan():
            if is_pointer(raw):
                position = decode_cell(raw).position
                if position < core.wal.first_position and seq_of(name) > shipped_seq:
                    wanted.add(position)
        for name, raw in core.tree.scan() if wanted else ():
            if is_pointer(raw) and (position := decode_cell(raw).position) in wanted and seq_of(name) <= shipped_seq:
                shipped.setdefault(position, []).append(name)
        return shipped

    def _refresh(self) -> None:
        """Reads what was shipped since. The owner may have moved the start of history, which counts here too."""
        with self._following:
            self._follower.refresh()
        core = self._core
        start_seq = min(self._follower.history.start_seq, core.marks.applied_seq)
        if start_seq > core.history.start_seq:
            core.history.move_start(start_seq)

    # Following the owner

    def ship(self) -> int:
        """Follows the owner: learns what is in the store, and evicts what need not be here. Ships nothing; returns the
        high-water mark.
        """
        if self._is_stopped:
            raise ClosedError("the engine is closed", path=self._core.directory, hint="Open it again")
        found = read_manifest(self._metadata, self._keys)
        if found is not None:
            self._note(found[0])
            self.evict()
        return self._core.marks.high_water_mark

    def _note(self, manifest: Manifest) -> None:
        core = self._core
        take_over_start(core, manifest)
        with core.applying:
            core.marks.raise_high_water_mark(min(manifest.high_water_mark, core.marks.low_water_mark))

    def least_seq(self) -> int:
        """No version is removed here that a state from this seq on needs."""
        return self._core.marks.high_water_mark

    def truncation_mark(self) -> int:
        return self._core.marks.high_water_mark

    def checkpoint(self) -> None:
        """Snapshots in the store are the owner's."""

    # Eviction

    def evict(self) -> int:
        """Removes files from this disk whose values are all proven to be in the store; returns the bytes freed."""
        core, wal = self._core, self._core.wal
        hot_bytes = core.settings.local_retention_bytes
        freed = 0
        shipped_seq = core.marks.high_water_mark
        ends = core.entry_ends()
        ends.learn_disk(wal.durable_lsn + 1, wal.first_lsn)
        limit_lsn = min(core.checkpointer.redo_lsn, ends.at_or_before(shipped_seq).lsn + 1)
        below_lsn = removable_below(wal.spans(), limit_lsn, hot_bytes, wal.was_read_lately)
        if below_lsn > wal.first_lsn:
            self._refresh()
            freed = wal.remove_below(self._proven_below(below_lsn, shipped_seq))
        room = max(0, hot_bytes - wal.statistics().file_bytes)
        if core.values.bytes > room:
            stored = stored_values(self._objects, self._keys)
            freed += core.values.evict(room, lambda name: name.seq <= shipped_seq and name in stored)
        self.evicted_bytes += freed
        return freed

    def _proven_below(self, below_lsn: int, shipped_seq: int) -> int:
        """The LSN up to which every value of the log has a version that is in the store."""
        core = self._core
        first_position, spans = core.wal.first_position, core.wal.spans()
        end_position = max(span.next_position for span in spans if span.next_lsn <= below_lsn)
        proven: set[int] = set()
        open_positions: set[int] = set()
        for name, raw in core.tree.scan():
            if not is_pointer(raw):
                continue
            cell = decode_cell(raw)
            if not first_position <= cell.position < end_position or cell.position in proven:
                continue
            if seq_of(name) <= shipped_seq and self._is_in_store(name, cell):
                proven.add(cell.position)
                open_positions.discard(cell.position)
            else:
                open_positions.add(cell.position)
        stop = min(open_positions, default=end_position)
        return max((span.next_lsn for span in spans if span.next_position <= stop), default=0)

    def _is_in_store(self, name: bytes, cell: Cell) -> bool:
        """Whether the owner has shipped a version; DataError if it is another one."""
        found = self._follower.versions.version(name)
        if found is not None and not _is_same(found, cell):
            raise self._diverged(name, found, cell)
        return found is not None

    # The owner

    def owner_is_alive(self) -> bool:
        """Whether the replica that ships has given a sign of life within its lease."""
        found = self._catalog.owner()
        return found is not None and self._lease.holder(found[0]) is not None

    def dead_owner(self) -> Owner | None:
        """The owner, if it has missed its lease, or was closed."""
        found = self._catalog.owner()
        return None if found is None or self._lease.holder(found[0]) is not None else found[0]

    # In the background

    def start(self) -> None:
        """Follows the owner by itself."""
        interval = self._core.settings.ship_interval_seconds

        def follow() -> float:
            try:
                self.ship()
            except ClosedError:
                pass
            except (TidelogError, OSError) as error:
                _logger.warning("%s: the store was not followed, which is tried again: %s", self._core.directory, error)
            return interval

        self._tasks.append(self._threads.store_work.add(follow, 0.0))
        if self.succession is not None:
            self._tasks.append(self._threads.store_work.add(self.succession.look, self.succession.pause_seconds))

    def stop(self) -> None:
        """Ends following. Idempotent."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        self.reader.close()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._threads.close()
        self._metadata.close()


def _is_same(one: Cell, other: Cell) -> bool:
    """Whether two cells of a version have the same value, wherever it is."""
    return (one.size, one.crc) == (other.size, other.crc)
