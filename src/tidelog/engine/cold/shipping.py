"""The cold tier of an open engine: ships its log, publishes the marks, writes snapshots, purges files, feeds replicas.

    ship watermark -> objects (several at once, published in order) -> manifest -> read back -> high-water mark -> purge

Invariants
- An engine works without its store: entries are applied and hot values are read while it is unreachable. The backlog is
  counted (bytes, seconds), and shipped when the store is back. The claim itself is made when the store first answers.
- The high-water mark moves after the manifest was published and read back, and with `replication_mode` "sync" after all
  replicas have it.
- An owner that lost its claim publishes and deletes nothing: every such call raises FencedError. A background engine
  checks its ownership every `ownership_check_seconds`, so that it also stops applying.
- An engine that another node has open is claimed only with `take_over`, or when that node's lease has expired.
- No code here holds the engine's lock while it waits for a store.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog
from tidelog.cold.owned_log import Node, OwnedLog, Policy
from tidelog.cold.reader import History
from tidelog.cold.replicas import Goal, Origin, Replica, Replicas
from tidelog.cold.retention import Eviction
from tidelog.cold.settings import ReplicaStatistics, ShipperStatistics, TierSettings
from tidelog.cold.shipper import Shipper
from tidelog.cold.takeover import Taken
from tidelog.engine.cold.disk_cache import DiskCache
from tidelog.engine.cold.gc import remove_engine_orphans, superseded_parts
from tidelog.engine.cold.manifest import Manifest, StoredCheckpoint, without_old
from tidelog.engine.cold.reader import ColdReader
from tidelog.engine.cold.replicas import EngineDocuments, goal_of
from tidelog.engine.cold.store_link import StoreLink, claim_engine, take_over_start
from tidelog.engine.cold.value_store import ValueStore
from tidelog.engine.core import WAL, Core, ShippedPieces
from tidelog.engine.mvcc.cells import MAX_SEQ, SEQ_BYTES, decode_cell, is_pointer
from tidelog.engine.sst.block import Row
from tidelog.engine.sst.snapshot import write_parts_state, write_row_parts
from tidelog.engine.sst.value_file import ValueName
from tidelog.engine.wal.files import WalSpan
from tidelog.engine.wal.record_header import OPERATION, decode_operation_head
from tidelog.engine.wal.wal import Wal
from tidelog.errors import FencedError, HeldError, RetryError, TidelogError
from tidelog.events import tell
from tidelog.files import explained
from tidelog.log.frame import Frames
from tidelog.store.keys import CheckpointId, EngineKeys
from tidelog.store.metadata.open import BUCKET, open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import DaemonPool, Lazy, answered_within

# Writing snapshots into the store, and deleting old ones.
#
# Invariants
# - The two newest are kept: if one is corrupted, a restore begins with the other.
# - A snapshot is listed after the newest one or not at all: a process without the engine may have listed one meanwhile.
# - A deletion is recorded first (`leaving` in the manifest), then executed, then removed from the list. The next owner
#   finishes an interrupted one. A pinned snapshot stays. With a snapshot, those of its files are deleted that no other
#   uses; files of a compaction stay. While the published copy of the manifest is out of date nothing is deleted.


_logger = logging.getLogger("tidelog.engine")


class _NotShippedError(Exception):
    """A value was moved just now: a snapshot would point to what is on this disk alone."""


class StoredSnapshots:
    """The snapshots of one engine in its store."""

    def __init__(self, core: Core, objects: ObjectStore, keys: EngineKeys) -> None:
        self._core = core
        self._objects = objects
        self._keys = keys

    def write(self, link: StoreLink) -> StoredCheckpoint | None:
        """Writes the snapshot at the published high-water mark, if there is none yet; None if nothing is shipped."""
        published = link.refresh()  # somebody else may have listed one
        seq, lsn = published.high_water_mark, published.high_water_lsn + 1
        newest = published.checkpoints[-1] if published.checkpoints else None
        if not seq or (newest is not None and (newest.seq, newest.lsn) >= (seq, lsn)):
            return newest
        begin = self._core.clock.monotonic()
        with self._core.history.pin(seq):
            name, level = CheckpointId(seq, lsn, link.owned.epoch), self._core.settings.ship_compression_level
            try:
                rows = self._rows(seq, published.shipped_lsn)
                parts = write_row_parts(self._objects, self._keys, name, rows, level=level)
            except _NotShippedError:
                return newest  # the next one has it
            written = write_parts_state(
                self._objects,
                self._keys,
                name,
                parts,
                created_us=self._core.clock.now_us(),
                history_start_seq=self._core.history.start_seq,
                results=self._core.results.known_up_to(seq),
            )
        changed = link.manifest.change(lambda manifest: _with(manifest, written))
        link.note(changed)
        if all(state.key != written.key for state in changed.checkpoints):
            link.owned.ownership.verify()
            # Somebody else's is listed, and is as new. It may have the same files, which go with those of older ones.
            self._objects.delete(written.key)
        else:
            tell(
                _logger,
                "state_written",
                engine=self._core.directory,
                seq=written.seq,
                lsn=written.lsn,
                object=written.key,
                seconds=self._core.clock.monotonic() - begin,
            )
        self.let_go(link)
        return changed.checkpoints[-1]

    def _rows(self, seq: int, shipped_lsn: int) -> Iterator[Row]:
        """Yields all versions up to a seq, in tree order; `_NotShippedError` if one has its value in a record that is
        not in the store.
        """
        least = (MAX_SEQ - seq).to_bytes(SEQ_BYTES, "big")
        for key, value in self._core.tree.scan(b"", None):
            if key[-SEQ_BYTES:] >= least:
                if is_pointer(value) and decode_cell(value).lsn >= shipped_lsn:
                    raise _NotShippedError
                yield key, value

    def let_go(self, link: StoreLink) -> None:
        """Deletes old snapshots, and what an interrupted attempt has left."""
        now_us = self._core.clock.now_us()
        planned = link.manifest.change(lambda manifest: without_old(manifest, now_us))
        link.note(planned)
        if planned.leaving and link.owned.catalog.metadata.copy_is_current(self._keys.engine_manifest):
            link.owned.ownership.verify()
            self._objects.delete([*planned.leaving, *superseded_parts(self._objects, self._keys, planned)])
            gone = frozenset(planned.leaving)
            link.note(link.manifest.change(lambda manifest: _without_gone(manifest, gone)))


def _with(manifest: Manifest, written: StoredCheckpoint) -> Manifest:
    states = manifest.checkpoints
    if states and (written.seq, written.lsn) <= (states[-1].seq, states[-1].lsn):
        return manifest
    return msgspec.structs.replace(manifest, checkpoints=(*states, written))


def _without_gone(manifest: Manifest, gone: frozenset[str]) -> Manifest:
    return msgspec.structs.replace(manifest, leaving=tuple(key for key in manifest.leaving if key not in gone))


# Lag: how long the oldest shippable entry that is not in the store yet has been waiting.
#
# An entry above the low-water mark waits for the orchestrator and its replicas, not for the store: it does not count as
# lag, however long that takes.


LOOKED_AT = 256
"""Records that are looked at: between two entries there are a few at most that are none, or were rolled back."""


class Lag:
    """Caches the time of that entry: it is looked up once per shipped position."""

    def __init__(self, wal: Wal, clock: Clock) -> None:
        self._wal = wal
        self._clock = clock
        self._known: tuple[int, int] | None = None

    def seconds(self, shipped_lsn: int, low_water_mark: int) -> float:
        """0 if no entry waits for the store."""
        known = self._known
        if known is None or known[0] != shipped_lsn:
            time_us = self._time_from(shipped_lsn, low_water_mark)
            if time_us is None:
                return 0.0
            known = self._known = shipped_lsn, time_us
        return max(0, self._clock.now_us() - known[1]) / 1_000_000

    def _time_from(self, lsn: int, low_water_mark: int) -> int | None:
        first = max(lsn, self._wal.first_lsn)
        stop = min(first + LOOKED_AT, self._wal.log.durable_offset)
        try:
            for frames in self._wal.batches(first, stop):
                if (found := first_time(frames, low_water_mark)) is not None:
                    return found
        except TidelogError:
            return None
        return None


def first_time(frames: Frames, low_water_mark: int) -> int | None:
    """The apply time of the first entry in these frames that is at or below the low-water mark; None if there is
    none.
    """
    for lsn, payload in enumerate(frames.payloads(), frames.first_offset):
        if payload[0] == OPERATION:
            head = decode_operation_head(payload, lsn)
            if head.seq <= low_water_mark:
                return head.time_us
    return None


# Which WAL files may leave the disk once the store has them (`Eviction`): oldest first, and only while they exceed
# `local_retention_bytes`. A recently read file stays longer, as long as there is less than twice as much.


Reads = Callable[[WalSpan], bool]


def removable_below(spans: Sequence[WalSpan], limit_lsn: int, hot_bytes: int, was_read_lately: Reads) -> int:
    """The LSN below which files may be evicted by age and size; 0 for none."""
    total = sum(span.next_position - span.first_position for span in spans)
    below = 0
    for span in spans[:-1]:
        if span.next_lsn > limit_lsn or total <= hot_bytes:
            break
        if was_read_lately(span) and total <= 2 * hot_bytes:
            break
        total -= span.next_position - span.first_position
        below = span.next_lsn
    return below


# Statistics of the cold tier, as one immutable snapshot.


class ShippingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of shipping statistics. `lag_bytes` is what only the orchestrator has if the disk is lost,
    large values among it.
    `lag_seconds` is how long the oldest shippable entry has been waiting: 0 if everything up to the low-water mark is
    in the store.

    `is_connected`: whether the store was reached since the engine was opened. `epoch` is 0 until then.
    """

    store: str
    is_connected: bool
    is_fenced: bool
    epoch: int
    high_water_mark: int
    truncation_mark: int
    shipped_lsn: int
    shipped_position: int
    lag_bytes: int
    lag_seconds: float
    errors_total: int
    errors_in_a_row: int
    last_error: str | None
    purged_bytes: int
    checkpoints: int
    newest_checkpoint_seq: int
    newest_checkpoint_us: int | None
    shipper: ShipperStatistics | None
    replicas: tuple[ReplicaStatistics, ...]


DEFAULT_CHECK_SECONDS = TierSettings().ownership_check_seconds


class Shipping(Policy):
    """An engine's store, as the engine uses it. As a policy: what is at or below the low-water mark may ship, and the
    manifest is published after the objects. Thread-safe.
    """

    flushes_before_shipping = False

    def __init__(
        self,
        core: Core,
        node: Node,
        *,
        keys: EngineKeys,
        replicas: Sequence[ObjectStore] = (),
        take_over: bool = False,
        ownership_check_seconds: float = DEFAULT_CHECK_SECONDS,
    ) -> None:
        settings = core.settings
        self._core = core
        self._node = node
        self._objects = node.objects
        self._keys = keys
        self._take_over = take_over
        self._catalog = Catalog(node.metadata, keys)
        self._replica_metadata = [open_metadata_store(BUCKET, one, proves_late=True) for one in replicas]
        self._replicas = Lazy(
            lambda: Replicas(
                [
                    Replica(objects, metadata, keys, core.clock, EngineDocuments(keys))
                    for objects, metadata in zip(replicas, self._replica_metadata, strict=True)
                ],
                is_sync=settings.replication_mode == "sync",
            )
        )
        self.refusal: Callable[[], TidelogError] | None = None
        self.objects_a_round = settings.ship_batch_objects
        self.owner = OwnedLog(
            core.wal.log,
            node,
            keys,
            self,
            TierSettings(
                max_object_bytes=settings.rotate_max_bytes,
                ship_compression=settings.ship_compression,
                ship_compression_level=settings.ship_compression_level,
                ownership_check_seconds=ownership_check_seconds,
            ),
            directory=core.directory,
        )
        self.reader = ColdReader(
            self._catalog,
            node.objects,
            settings.cold_cache_bytes,
            lambda: self._replicas().stores,
            on_manifest=self._noted,
            threads=settings.cold_read_threads,
            disk=DiskCache(core.files, core.directory, settings.disk_cache_bytes),
        )
        """Reads values that have left the disk. It needs no claim."""
        self._values = Lazy(lambda: ValueStore(node.objects, keys, core.values))
        self._states = StoredSnapshots(core, node.objects, keys)
        self._eviction = Lazy(lambda: Eviction(core.wal.log, node.objects, self._unwanted_below, core.wal.remove_below))
        self._lag = Lag(core.wal, core.clock)
        self._link: StoreLink | None = None
        self._writing_state = Lock()
        self._dropped_lsn = 0
        self._has_swept = False

    # The claim

    def connect(self) -> None:
        """Claims the engine if it is not claimed yet. FencedError and others say why it cannot be claimed."""
        self.owner.claim()

    def connect_within(self, seconds: float) -> None:
        """Like `connect`; a store that does not answer in time is left to the background. HeldError while another node
        has the engine.
        """
        try:
            answered_within(seconds, self.connect, "tidelog-engine-claim")
        except HeldError:
            raise
        except RetryError as error:
            _logger.warning("%s: the store is not claimed yet, which is tried again: %s", self._core.directory, error)

    def claim(self) -> Taken:
        core, node = self._core, self._node
        with explained("claim", core.directory):
            node.check_binding(asks_store=True)
            return claim_engine(
                core.files,
                core.directory / WAL,
                self._catalog,
                node.objects,
                core.clock,
                node.lease,
                take_over=self._take_over,
            )

    def new_shipper(self, taken: Taken) -> Shipper:
        return Shipper(
            self._core.wal.log,
            taken.catalog,
            self._objects,
            self.owner.settings,
            self._core.clock,
            None,
            taken.next_offset,
            self._gate,
            concurrency=self._core.settings.ship_concurrency,
            first_position=0,
        )

    def _gate(self) -> int:
        """What names a value file that is not in the store waits for it."""
        link, mark = self._claimed, self._core.marks.low_water_mark
        pending = self._values().pending(link.published.high_water_mark, mark)
        return link.gate(pending[0].seq - 1 if pending else mark)

    def settle_in(self, taken: Taken, shipper: Shipper) -> None:
        with explained("claim", self._core.directory):
            link = StoreLink(self._core, self._objects, self._keys, taken, shipper)
            self._raise_marks(link.published)
            self._states.let_go(link)
        self._link = link

    def fenced(self, make_error: Callable[[], FencedError]) -> None:
        self.refusal = make_error

    @property
    def _claimed(self) -> StoreLink:
        assert self._link is not None, "the engine is claimed"
        return self._link

    @contextlib.contextmanager
    def linked(self) -> Iterator[StoreLink]:
        """The claim on the store, for cleanup there; failures are handled as usual."""
        self.owner.claim()
        with self.owner.guarded():
            yield self._claimed

    def _noted(self, manifest: Manifest) -> None:
        """Called with a manifest that a reader fetched: another process may have moved the start of history."""
        if self._link is not None:
            self._link.note(manifest)
        else:
            take_over_start(self._core, manifest)

    def now_us(self) -> int:
        """The clock by which pins in the manifest expire."""
        return self._core.clock.now_us()

    @property
    def answers(self) -> int:
        """How many requests the store has answered."""
        return self._objects.answers

    # Shipping

    def ship(self) -> int:
        """Ships everything up to the low-water mark now; returns the new high-water mark."""
        if self._core.values.names():
            with self.linked() as link:
                self._values().upload(link.published.high_water_mark, self._core.marks.low_water_mark)
        self.owner.ship()
        self.purge()
        return self._claimed.published.high_water_mark

    def catch_up(self) -> None:
        """Publishes what was shipped, reads it back, and raises the high-water mark."""
        link = self._claimed
        if link.is_behind:
            if self._replicas().is_sync:
                link.refresh()  # replicas that know of a compaction which this one does not take nothing older
            self._raise_marks(link.publish(self._bring_replicas if self._replicas().is_sync else _nothing))
            self._eviction().run(link.owned)

    def _raise_marks(self, published: Manifest) -> None:
        """Published entries were at or below the low-water mark, whether or not this disk remembers that."""
        seq = published.high_water_mark
        with self._core.applying:
            if seq > self._core.marks.low_water_mark:
                self._core.marks.raise_low_water_mark(seq)
            self._core.marks.raise_high_water_mark(seq)

    def truncation_mark(self) -> int:
        """The high-water mark of the published manifest; 0 until that was read."""
        link = self._link
        return 0 if link is None else link.published.high_water_mark

    def purge(self) -> int:
        """Evicts files from the disk that may go; returns the bytes freed."""
        with self.linked() as link:
            freed = self._eviction().run(link.owned)
            core, stored_seq = self._core, link.published.high_water_mark
            room = core.settings.local_retention_bytes - core.wal.statistics().file_bytes
            return freed + core.values.evict(max(0, room), lambda name: name.seq <= stored_seq)

    def purge_below(self, dropped_lsn: int) -> None:
        """As `purge`, when the store has dropped its log below an LSN to which nobody points: it goes here too, however
        much may stay on the disk.
        """
        self._dropped_lsn = max(self._dropped_lsn, dropped_lsn)
        self.purge()

    def remove_unused_values(self, used: Collection[ValueName], up_to_seq: int) -> None:
        """Deletes the value files of entries up to a seq that no version refers to, from the store."""
        with self.linked() as link:
            self._values().remove_unused(used, up_to_seq, link.owned.ownership.verify)

    def _unwanted_below(self) -> int:
        """Nothing from the beginning of the last complete checkpoint on: redo starts there."""
        limit_lsn = min(self._claimed.published.shipped_lsn, self._core.checkpointer.redo_lsn)
        wal, hot_bytes = self._core.wal, self._core.settings.local_retention_bytes
        unwanted = removable_below(wal.spans(), limit_lsn, hot_bytes, wal.was_read_lately)
        return max(unwanted, min(self._dropped_lsn, limit_lsn))

    # Snapshots and replicas

    def checkpoint(self) -> None:
        """Ships, and writes the snapshot at the high-water mark into the store."""
        self.write_state()

    def write_state(self) -> StoredCheckpoint | None:
        """Like `checkpoint`, while shipping goes on; returns the newest snapshot, None while nothing is shipped."""
        self.ship()
        with self._writing_state, self.linked() as link:
            return self._states.write(link)

    def remove_orphans(self) -> list[str]:
        """Deletes orphans that earlier owners left in the store, and returns their keys."""
        with self.owner.shipping, self.linked() as link:
            return list(remove_engine_orphans(link.owned, self._objects, self.now_us()).objects)

    def replicate(self) -> None:
        """Brings all replicas up to date; raises the first failure after all were tried."""
        with self.linked() as link:
            self._bring_replicas(link.refresh())

    def _bring_replicas(self, manifest: Manifest) -> None:
        self._replicas().bring_up_to(goal_of(manifest), Origin.of(self._objects, self._claimed.owned))

    def _replica_goal(self) -> Goal | None:
        return None if self._link is None else goal_of(self._link.refresh())

    # In the background

    def start(self) -> None:
        """Starts what runs in the background."""
        self.owner.start()

    def add_tasks(self) -> None:
        """Ships, writes snapshots and feeds replicas by itself."""
        interval, owner = self._core.settings.ship_interval_seconds, self.owner
        owner.add_task("shipping", self._ship_and_sweep, interval if owner.is_claimed else 0.0)
        owner.add_task("writing a snapshot", self._write_state_if_due, interval)
        if self._replica_metadata:
            self._replicas().add_tasks(owner, self._replica_goal, interval)

    def stop(self) -> None:
        """Stops background work, and abandons uploads before they are published. Waits a few seconds at most."""
        self.owner.stop()
        self.reader.close()
        for metadata in self._replica_metadata:
            metadata.close()
        self._node.close()

    def _ship_and_sweep(self) -> float:
        self.ship()
        if not self._has_swept:
            self.remove_orphans()
            self._has_swept = True
        return self._core.settings.ship_interval_seconds

    def _write_state_if_due(self) -> float:
        if self._link is not None and self._state_is_due(self._link.published):
            self.write_state()
        return self._core.settings.ship_interval_seconds

    def _state_is_due(self, published: Manifest) -> bool:
        """Whether the last snapshot is old enough, and something was shipped since."""
        if not published.high_water_mark:
            return False
        newest = published.checkpoints[-1] if published.checkpoints else None
        if newest is None:
            return True
        age_us = self._core.clock.now_us() - newest.created_us
        is_old = age_us >= self._core.settings.checkpoint_max_age_seconds * 1_000_000
        return is_old and newest.seq < published.high_water_mark

    # Statistics

    def statistics(self) -> ShippingStatistics:
        link = self._link
        published = Manifest(epoch=0) if link is None else link.published
        states = published.checkpoints
        shipped_lsn = published.shipped_lsn
        return ShippingStatistics(
            store=self._objects.url,
            is_connected=link is not None,
            is_fenced=self.owner.is_fenced,
            epoch=0 if link is None else link.owned.epoch,
            high_water_mark=self._core.marks.high_water_mark,
            truncation_mark=self.truncation_mark(),
            shipped_lsn=shipped_lsn,
            shipped_position=published.shipped_position,
            lag_bytes=self._core.wal.next_position
            - published.shipped_position
            + self._core.values.bytes_above(published.high_water_mark),
            lag_seconds=self._lag.seconds(shipped_lsn, self._core.marks.low_water_mark),
            errors_total=self.owner.failures.total,
            errors_in_a_row=self.owner.failures.in_a_row,
            last_error=self.owner.failures.last,
            purged_bytes=self._eviction().freed_bytes,
            checkpoints=len(states),
            newest_checkpoint_seq=states[-1].seq if states else 0,
            newest_checkpoint_us=states[-1].created_us if states else None,
            shipper=None if link is None else link.shipper.statistics(),
            replicas=self._replicas().statistics(published.shipped_position),
        )


def _nothing(manifest: Manifest) -> None:
    """Replicas follow in the background."""


# The shipped part of an engine's log, read backwards by objects.


_FETCHING_THREADS = 2


def shipped_pieces_of(objects: ObjectStore, catalog: Catalog) -> ShippedPieces:
    """Returns a function that reads the shipped log below an LSN, newest object first. Each call reads the catalog."""

    def pieces(below_lsn: int) -> Iterator[Iterator[Frames]]:
        fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-shipped")
        try:
            history = History(catalog, objects, fetchers)
            for descriptor in reversed(list(catalog.between(catalog.start_offset(), below_lsn))):
                yield history.frames(descriptor.start_offset, min(descriptor.next_offset, below_lsn))
        finally:
            fetchers.shutdown(wait=False, cancel_futures=True)

    return pieces
