"""A tiered log: the log of a topic, its head on this disk and its history in the object store, one owner at a time; and
the cold side of a log directory, through which topics are opened (`Tier`).

`takeover` finds where to continue, `owned_log` is the owner's shell, `shipper` ships, `tiered_reader` reads and
`retention` deletes. What ingests rows that others staged is passed in (`Staged`): it sits above this package.

Invariants
- The log accepts appends only while the claim is not known to be lost.
- Closing neither ships nor waits for the store, unless `ship_on_close` asks for it: unshipped messages are on this
  disk, and are shipped after the next opening.
- Sealing removes files from the disk only after the marker is written, and writes the marker only after everything is
  published.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, Catalogs, EpochStarts
from tidelog.cold.fetch import ColdReadCounters, FetchSettings
from tidelog.cold.flush_log import FlushedLog
from tidelog.cold.gc import Collector, Plan, Reason, Report, finish_deletion
from tidelog.cold.lease import DEFAULT_LEASE_SECONDS
from tidelog.cold.owned_log import Node, OwnedLog, PauseDetector, Policy
from tidelog.cold.ownership import NEVER_SEEN, OwnedCatalog, Ownership, claim_topic, new_claim
from tidelog.cold.reader import History
from tidelog.cold.replicas import Goal, Origin, Replica, Replicas, ReplicaStores, TopicDocuments
from tidelog.cold.retention import Pruner, RetentionPlan
from tidelog.cold.settings import TierSettings, TierStatistics, with_live
from tidelog.cold.shipper import Shipper, ShipWaiters
from tidelog.cold.takeover import Taken, Takeover, remove_files
from tidelog.cold.tiered_reader import TieredView
from tidelog.errors import (
    ClosedError,
    DiskFullError,
    FencedError,
    LogFailedError,
    NotSupportedError,
    StoreUnavailableError,
    TidelogError,
    offsets_text,
)
from tidelog.files import Files, explained
from tidelog.log import Log, LogSettings
from tidelog.log.atomic_batches import GroupOf
from tidelog.log.binding import bound
from tidelog.log.reader import ReadableLog
from tidelog.log.settings import DEFAULT_MAX_MESSAGE_BYTES
from tidelog.store.binding import StoreBinding
from tidelog.store.keys import DEFAULT_ROOT, TopicKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.open import RememberedMetadata
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, DaemonPool, Task
from tidelog.store.urls import open_store

_logger = logging.getLogger("tidelog.cold")


class Staged(Protocol):
    """Ingests the rows that others stage for a topic, for its owner (`staging/ingest.py`)."""

    is_told: bool
    looks_are_paid: bool
    has_moved_places: bool

    def settle(self) -> None: ...

    def ingest(self) -> int: ...

    def look(self) -> float: ...

    def paused(self) -> contextlib.AbstractContextManager[None]: ...

    def stop(self) -> None: ...


class TieredLog(TieredView, Policy):
    """The open log of a topic that this process owns, with its history. As a policy: all that is synced may ship."""

    def __init__(
        self,
        log: Log,
        node: Node,
        taken: Taken,
        history: History,
        settings: TierSettings,
        *,
        time_field: int | None,
        group_of: GroupOf | None = None,
        replicas: Replicas,
    ) -> None:
        super().__init__(log, history, time_field=time_field)
        self.log = log
        self.settings = settings
        self.owned = taken.catalog
        self.staged: Staged | None = None
        self.node = node
        self._taken = taken
        self._group_of = group_of
        self._replicas = replicas
        self.has_followers = bool(replicas)
        self.first_own_offset = log.next_offset
        self._epoch_starts: EpochStarts | None = None
        self.owner = owner = OwnedLog(log, node, taken.catalog.catalog.keys, self, settings)
        owner.claim()
        self.shipper = owner.shipper
        self.pruner = Pruner(log, self.owned, node.objects, settings, node.clock, self._safe_offset)
        self._retention: Task | None = None
        self._shipping: Task | None = None
        self._flush_callbacks: tuple[Callable[[], None], ...] = ()
        self._pauses = PauseDetector(owner.verify)
        self.verify = owner.verify
        self.change = owner.change
        self.check_not_fenced = owner.check_not_fenced
        self.ship = owner.ship
        self._ship_waiters = ShipWaiters(owner.ship)
        self.flushed: FlushedLog | None = None
        """Where messages are acknowledged only once the store has them (`durability = "shipped"`): what brings them
        there."""
        self.check_awake = self._pauses.check
        """Called before an append: cheap, unless the process has been asleep."""

    def wait_shipped(self, offset: int) -> Future[None]:
        """A future that is done once the message at an accepted offset is in the store."""
        flushed = self.flushed
        return self._ship_waiters.join(offset) if flushed is None else flushed.join(offset)

    def use_durability(self) -> None:
        """Follows the setting: begins to flush, or ends it."""
        if self.settings.durability == "synced":
            if self.flushed is not None:
                flushed, self.flushed = self.flushed, None
                flushed.close()
        elif self.flushed is None:
            self.flushed = self.node.flush_log().add(
                *(self.owned.catalog.keys.subject, self.log, self.owned),
                *(lambda: self.shipper.shipped_offset, self._group_of, self.owner.fence),
            )
            self.flushed.on_flushed = self.on_flushed
            self.shipper.flushed_offset = lambda: 0 if self.flushed is None else self.flushed.flushed_offset

    def on_flushed(self) -> None:
        """Called when more is flushed than before, or never will be."""
        for callback in self._flush_callbacks:
            callback()

    def add_flush_callback(self, callback: Callable[[], None]) -> None:
        """Calls this too: it must be quick, and raise nothing."""
        self._flush_callbacks += (callback,)

    @property
    def may_have_slept(self) -> bool:
        """Whether `check_awake` may wait for the store."""
        return self._pauses.is_in_doubt

    def epoch_starts(self) -> EpochStarts:
        """Where the messages of each owner begin. The first call records those of this one."""
        if self._epoch_starts is None:
            self._epoch_starts = self.change(lambda owned: owned.record_epoch(self.first_own_offset))
        return self._epoch_starts

    # The policy of a topic

    def claim(self) -> Taken:
        """It was claimed before its log was opened: the catalog says where that begins."""
        return self._taken

    def new_shipper(self, taken: Taken) -> Shipper:
        return Shipper(
            *(self.log, taken.catalog, self.node.objects, self.settings, self.node.clock),
            *(self._time_field, taken.next_offset),
            group_of=self._group_of,
        )

    def catch_up(self) -> None:
        """Replicas follow what is shipped; in "sync" mode nothing counts as shipped before they have it."""
        if self._replicas.is_sync:
            self.replicate()
        else:
            self._replicas.wake()

    def replicate(self) -> None:
        """Brings all replicas up to what is shipped; raises the first failure after all were tried."""
        self._replicas.bring_up_to(self._replica_goal(), Origin.of(self.node.objects, self.owned))

    def _replica_goal(self) -> Goal:
        shipped = self.owner.shipped_offset
        return Goal(shipped, self.owner.shipper.raw_bytes_shipped, shipped)

    def _safe_offset(self) -> int:
        """Everything below may leave the disk."""
        shipped = self.owner.shipped_offset
        return min(shipped, self._replicas.next_offset) if self._replicas and self._replicas.is_sync else shipped

    def add_tasks(self) -> None:
        """Ships, ingests and prunes in the background. An idle topic does nothing."""
        settings, owner = self.settings, self.owner
        first_seconds = min(1.0, settings.ship_interval_seconds)
        shipping = self._shipping = owner.add_task("shipping", owner.ship_if_due, first_seconds)
        self.log.on_durable(lambda: shipping.wake(first_seconds))
        self._retention = owner.add_task("retention", self._prune_if_due, settings.retention_interval_seconds)
        self._replicas.add_tasks(owner, self._replica_goal)
        if self.staged is not None:
            self._start_ingest(self.staged)

    def _prune_if_due(self) -> float:
        before = self.start_offset
        seconds = self.pruner.prune_if_due()
        if self.start_offset > before:
            self._replicas.wake()  # they delete it too
        return seconds

    def _start_ingest(self, staging: Staged) -> None:
        staging.is_told = not staging.looks_are_paid
        seconds = self.settings.ingest_check_seconds
        ingesting = self.owner.add_task("ingest", staging.look, NEVER if staging.is_told else seconds)
        if staging.is_told:
            self.owner.watch(self.owned.catalog.keys.staging, NEVER_SEEN, ingesting.soon, seconds)

    def fenced(self, make_error: Callable[[], FencedError]) -> None:
        self.log.refuse_appends(make_error)

    # Where it stands

    @property
    def start_offset(self) -> int:
        """The oldest offset that may be read. The owner alone moves it, so it is known here."""
        return self.pruner.start_offset

    @property
    def known_start_offset(self) -> int:
        return self.pruner.start_offset

    @property
    def hot_start_offset(self) -> int:
        return self.log.start_offset

    @property
    def shipped_offset(self) -> int:
        """Everything below is in the store."""
        return self.shipper.shipped_offset

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            store=self.node.objects.url,
            epoch=self.owned.epoch,
            fenced=self.owner.is_fenced,
            start_offset=self.start_offset,
            hot_start_offset=self.hot_start_offset,
            shipper=self.shipper.statistics(),
            retention=self.pruner.statistics(),
            history=self.history.counters.snapshot(),
            metadata=self.node.metadata.statistics(),
            replicas=self._replicas.statistics(self.shipper.raw_bytes_shipped),
            flushes=None if self.node.flush_log.built is None else self.node.flush_log.built.statistics(),
        )

    # Ingest, retention, orphans

    def ingest(self) -> int:
        """Ingests the staged commits of the topic; returns how many."""
        with self.owner.guarded():
            self.owner.check()
            return 0 if self.staged is None else self.staged.ingest()

    def configure(self, settings: TierSettings) -> None:
        """Changes what can change while it is open (`LIVE_SETTINGS`)."""
        self.settings = settings = with_live(self.settings, settings)
        self.shipper.configure(settings)
        self.pruner.configure(settings)
        self.use_durability()
        if self._retention is not None:
            self._retention.soon()
        if self._shipping is not None:
            self._shipping.soon()

    def delete_before(self, offset: int) -> None:
        """Moves the start of the topic for good. What is not shipped yet is shipped first: a start beyond the end of
        the catalog would mean nothing to the next owner."""
        with self.owner.guarded():
            self.owner.check()
            if offset > self.shipped_offset:
                try:
                    self.owner.ship()
                except DiskFullError:
                    self._make_room_below(offset)
            self.pruner.delete_before(offset)
            self.log.delete_before(offset)  # readers that are below it stop here too
        self._replicas.wake()  # they delete it too

    def _make_room_below(self, offset: int) -> None:
        """On a full disk: what is in files is shipped and deleted first, and then there is room for the rest."""
        with self.owner.shipping:
            self.shipper.ship()
        room = min(offset, self.shipped_offset)
        self.pruner.delete_before(room)
        self.log.delete_before(room)
        if offset > self.shipped_offset:
            self.owner.ship()

    def plan_retention(self) -> RetentionPlan:
        """What `prune` would delete now. Changes nothing."""
        with self.owner.guarded():
            self.owner.check()
            return self.pruner.plan()

    def prune(self, plan: RetentionPlan | None = None) -> None:
        """Deletes what is due by the retention settings now, or what the plan says."""
        with self.owner.guarded():
            self.owner.check()
            self.pruner.prune(plan)

    def plan_orphans(self) -> Plan:
        """Plans an orphan removal. Changes nothing."""
        with self.owner.guarded():
            return self._collector().plan()

    def remove_orphans(self, plan: Plan, *, drop_lost: bool = False, drop_uncovered: bool = False) -> Report:
        drops = [(Reason.LOST, drop_lost), (Reason.ONLY_COPY, drop_uncovered)]
        with self.owner.guarded():
            return self._collector().apply(plan, drop=[reason for reason, is_wanted in drops if is_wanted])

    def _collector(self) -> Collector:
        self.owner.check()
        in_flight, now_us = self.shipper.in_flight(), self.shipper.now_us()
        return Collector(self.owned.catalog, self.node.objects, now_us, owned=self.owned, in_flight=in_flight)

    # Ending

    def seal(self) -> None:
        """Ships everything, records where the next owner continues, and closes. A failure leaves it open."""
        with contextlib.nullcontext() if self.staged is None else self.staged.paused():
            self._ship_and_mark()
        self._stop()
        self.log.close()
        self._clear_disk("seal")

    def _ship_and_mark(self) -> None:
        self.log.refuse_appends(self._sealed_error)
        try:
            shipped = self.ship()
            if shipped < self.log.next_offset:
                raise NotSupportedError(f"offsets from {shipped} on may not be shipped yet, so it cannot be sealed")
            self.change(lambda owned: owned.seal(shipped, is_unused=not self._has_accepted))
            self._replicate_the_end()
        except BaseException:
            self.log.refuse_appends(self.owner.fenced_error)
            raise

    def _replicate_the_end(self) -> None:
        """Nobody may open the topic again for long. A replica that is away now follows when it is opened."""
        try:
            self.replicate()
        except TidelogError as error:
            _logger.warning("%s: sealed, and not all of it is in every replica: %s", self.log.directory, error)

    def _sealed_error(self) -> ClosedError:
        return ClosedError("the topic is sealed", path=self.log.directory, hint="Open it again to own it again")

    def _clear_disk(self, operation: str) -> None:
        self.log.forget()
        with explained(operation, self.log.directory):
            remove_files(self.log.files, self.log.directory)

    def close(self) -> None:
        """Ships what is left if that was asked for, flushes, stops and lets go. Closing twice is fine."""
        try:
            if self.settings.ship_on_close and not self.owner.is_fenced and not self.log.over:
                self._ship_the_rest()
        finally:
            self._close()

    def _ship_the_rest(self) -> None:
        try:
            self.ship()
        except StoreUnavailableError as error:
            rest = offsets_text(self.shipped_offset, self.next_offset - 1)
            raise StoreUnavailableError(
                f"not in the store yet, only on this disk: {rest} ({error.message})",
                operation="close",
                path=self.log.directory,
                hint="It is closed, and nothing is lost: open it again and ship once the store answers",
            ) from error

    def _close(self) -> None:
        self._stop()
        try:
            self.log.close()
        finally:
            self._give_back_incarnation()

    def let_go(self) -> None:
        """Closes it while the node runs on: others may open the topic at once."""
        self.close()
        with contextlib.suppress(TidelogError):
            self.owned.ownership.release()

    def delete(self) -> None:
        """Removes the topic: its messages from the disk, the store and the catalog. Its directory is the caller's."""
        self.verify()  # while it is open: who does not own it any more keeps what it has
        with self.owner.guarded():
            self._stop()
            with contextlib.suppress(LogFailedError):  # what did not reach a full disk is deleted, too
                self.log.close()
            self.owned.mark_deleted()
            # Before the mark goes: files that outlive it would be the end of a topic whose beginning is deleted.
            self._clear_disk("delete")
            finish_deletion(self.owned, self.node.objects)

    def _stop(self) -> None:
        if self.staged is not None:
            self.staged.stop()
        if self.flushed is not None:
            self.flushed.close()
        self.owner.stop()

    @property
    def _has_accepted(self) -> bool:
        """Under this claim, or before it on this disk."""
        has_moved = self.staged is not None and self.staged.has_moved_places
        return self.log.next_offset != self.first_own_offset or has_moved or bool(self.log.file_spans())

    def _give_back_incarnation(self) -> None:
        """An owner that only read must not turn another node's local messages into a divergent tail, unless they
        contain rows that are to be ingested again by now."""
        if not self.owner.is_fenced and not self._has_accepted:
            give_back = self.owned.give_back
            with contextlib.suppress(TidelogError):
                self.node.threads.store_work.attempt(give_back) if self.owner.is_running else give_back()


OpenStaged = Callable[[TieredLog], Staged]
PublishStaged = Callable[[OwnedCatalog, History, int], int]
_FETCHING_THREADS = 8


def _published(takeover: Takeover, taken: Taken, history: History, publish: PublishStaged | None) -> Taken:
    """With the staged rows that could be published behind what the catalog has: there must be nothing else to go
    there."""
    if publish is None or takeover.has_files or taken.catalog.ownership.owner.flushed is not None:
        return taken
    return taken._replace(next_offset=publish(taken.catalog, history, taken.next_offset))


class Tier:
    """An open store with its metadata. Topics are opened through it; closing it ends what runs in the background."""

    def __init__(
        self,
        objects: ObjectStore,
        metadata: MetadataStore,
        *,
        files: Files,
        clock: Clock,
        node: str,
        directory: Path = Path("/"),
        root: str = DEFAULT_ROOT,
        binding: StoreBinding | None = None,
        runs_in_background: bool = True,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        renews_lease: bool | None = None,
        open_objects: Callable[[str], ObjectStore] | None = None,
    ) -> None:
        """`directory` is that of the node, whose lock the caller holds. `renews_lease`: as `runs_in_background`.

        `binding` is checked before the first use of the catalog, which others may share. `open_objects` opens the
        stores of replicas.
        """
        self._replica_stores = ReplicaStores(open_objects or open_store)
        self._node = Node(
            *(objects, metadata),
            clock=clock,
            name=node,
            directory=directory,
            root=root,
            binding=binding,
            lease_seconds=lease_seconds,
            renews_lease=runs_in_background if renews_lease is None else renews_lease,
            runs_in_background=runs_in_background,
        )
        self.objects = objects
        self.metadata = self._node.metadata
        self.lease = self._node.lease
        self._files = bound(files)
        self._clock = clock
        self._root = root
        self.catalogs = Catalogs(self.metadata, root, self._node.check_binding)
        self.runs_in_background = runs_in_background
        self._fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-fetch")

    def check_reachable(self) -> None:
        """Asks both stores something small; an error of theirs when they are not what was meant."""
        next(iter(self.objects.list("storage/")), None)
        self.metadata.get(f"{self._root}/storage/epoch-floor")
        self._node.check_binding(asks_store=True)

    def shared_metadata(self) -> tuple[MetadataStore, str]:
        """For documents of the whole installation: the metadata store, and the root of its keys there."""
        self._node.check_binding()
        return self.metadata, self._root

    def catalog(self, namespace: str, name: str) -> Catalog:
        """What is known about a topic."""
        return self.catalogs.of(namespace, name)

    def topics(self) -> Iterator[tuple[str, str]]:
        """All topics in the metadata store, as (namespace, name)."""
        return self.catalogs.topics()

    def opening_catalog(self, namespace: str, name: str) -> Catalog:
        """The same for a caller that is about to open the topic: reads what opening needs at once, and caches it."""
        self._node.check_binding()
        keys = TopicKeys(namespace, name, self._root)
        asked = (
            *(keys.owner, keys.start, keys.state, keys.settings, keys.partitions),
            *(keys.staging, keys.current, keys.epoch_floor),
        )
        return Catalog(RememberedMetadata(self.metadata, asked, keys.metadata_prefix), keys)

    def open_log(
        self,
        directory: Path,
        namespace: str,
        name: str,
        log_settings: LogSettings,
        settings: TierSettings,
        *,
        time_field: int | None,
        first_offset: int = 0,
        group_of: GroupOf | None = None,
        open_staged: OpenStaged | None = None,
        publish_staged: PublishStaged | None = None,
        take_over: bool = False,
        is_covered: bool = False,
        catalog: Catalog | None = None,
        keep: Callable[[Catalog], None] | None = None,
    ) -> TieredLog:
        """Claims a topic and opens it for writing. The caller holds the lock of the directory above.

        HeldError while another node has it open, unless `take_over`. `is_covered`: the lock covers the topic's
        directory too, which is there and durable. `catalog` is an `opening_catalog` that has been used already. `keep`
        is called with it once the topic is claimed: what it asks for was read with the rest. `open_staged` makes what
        ingests staged rows. `publish_staged` makes objects of them where nothing of the topic is on this disk, before
        the log is opened; it gets the next offset, and returns what that is then.
        """
        catalog = catalog or self.opening_catalog(namespace, name)
        if not is_covered:
            self._files.make_directories(directory)
        takeover = Takeover(self._files, directory, catalog, self.objects, self._clock, self.lease)
        taken = takeover.take(first_offset, take_over=take_over)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release, taken.catalog)
            history = self.history(taken.catalog.catalog, log_settings.max_message_bytes)
            before, taken = taken.next_offset, _published(takeover, taken, history, publish_staged)
            log = Log.open(
                directory,
                log_settings,
                files=self._files,
                clock=self._clock,
                time_field=time_field,
                first_offset=taken.next_offset,
                group_of=group_of,
                kept_elsewhere=lambda first, stop: catalog.covers(max(first, catalog.start_offset()), stop),
                is_covered=is_covered,
            )
            undo.callback(log.close)
            has_recovered = self._recover_flushed(log, taken.catalog.ownership)
            taken.catalog.clip_cursors(log.next_offset)
            tiered = TieredLog(
                *(log, self._node, taken, history, settings),
                time_field=time_field,
                group_of=group_of,
                replicas=self._replicas(settings, catalog.keys),
            )
            tiered.first_own_offset -= taken.next_offset - before
            if has_recovered:
                tiered.epoch_starts()  # from where on its messages are this owner's, and not the earlier one's
            tiered.use_durability()
            if open_staged is not None:
                tiered.staged = open_staged(tiered)
                tiered.staged.settle()
            if keep is not None:
                keep(catalog)
            if isinstance(catalog.metadata, RememberedMetadata):
                keys = catalog.keys
                catalog.metadata.forget_all_but((keys.epochs, keys.producers, keys.kafka_producers))
            if self.runs_in_background:
                tiered.owner.start()
            undo.pop_all()
            return tiered

    def _recover_flushed(self, log: Log, ownership: Ownership) -> bool:
        """Appends what an earlier owner has acknowledged, and neither the catalog nor this disk has. Whether there was
        any."""
        source = ownership.owner.flushed
        if source is None:
            return False
        first = log.next_offset
        for frames in self._node.flush_reader().frames(source, ownership.owner.log_id, first):
            log.append_frames(frames)
        if log.next_offset == first:
            return False
        log.flush()
        _logger.warning(
            "%s: %s were recovered from the flushes of %s",
            log.directory,
            offsets_text(first, log.next_offset - 1),
            source.node,
        )
        return True

    @contextlib.contextmanager
    def claimed(self, catalog: Catalog) -> Iterator[Ownership]:
        """The claim of a name that is no topic yet, until what it becomes is recorded; ConflictError when it is one.

        Who claims the name later reads what was recorded (`Takeover`).
        """
        claim = claim_topic(catalog, None, self.lease, self._clock, new_claim())
        try:
            yield claim
        finally:
            claim.remove()

    def _replicas(self, settings: TierSettings, keys: TopicKeys) -> Replicas:
        stores = [self._replica_stores.open(url) for url in settings.replicas]
        replicas = [Replica(*store, keys, self._clock, TopicDocuments()) for store in stores]
        return Replicas(replicas, is_sync=settings.replication_mode == "sync")

    def _release(self, owned: OwnedCatalog) -> None:
        """What was claimed, and could not be opened then, does not stay closed to others while this node lives."""
        with contextlib.suppress(TidelogError):
            owned.ownership.release()

    def view(
        self,
        namespace: str,
        name: str,
        hot: ReadableLog | None,
        time_field: int | None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> TieredView:
        """A topic for reading only; `hot` is what this disk has of it."""
        return TieredView(hot, self.history(self.catalog(namespace, name), max_message_bytes), time_field=time_field)

    def history(self, catalog: Catalog, max_message_bytes: int) -> History:
        """What reads the objects of a catalog."""
        settings = FetchSettings.of(self.objects.settings, max_message_bytes)
        return History(catalog, self.objects, self._fetchers, counters=ColdReadCounters(), settings=settings)

    def close(self) -> None:
        """Topics are closed before. Closing twice is fine."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._replica_stores.close()
        self._node.close()
