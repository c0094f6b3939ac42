"""The cold half of an open engine: ships its log, tells the marks, writes states, lets files go, keeps replicas.

    gate -> objects (several at once, published in order) -> manifest -> read back -> high-water mark -> purge

Invariants
- An engine works without its store: entries are applied and hot values are read while it is away. What waits is counted
  (bytes, seconds), and shipped when it is back. The claim itself is made when the store answers for the first time.
- The high-water mark moves when the manifest was published and read back, and with `replication_mode` "sync" when all
  replicas have it.
- Who lost the claim publishes and deletes nothing any more: every call that would raises FencedError. An engine that
  runs in the background asks for that every `ownership_check_seconds`, so that it also stops to apply.
- What another node has open is claimed only with `take_over`, or when that node's lease has run out.
- Nothing in here holds the engine's lock while it waits for a store.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from threading import Lock, RLock
from typing import NamedTuple

from tidelog.engine.cold import ColdReader
from tidelog.engine.core import Core
from tidelog.engine.lag import Lag
from tidelog.engine.manifest import Manifest, StoredCheckpoint
from tidelog.engine.purge import Purger
from tidelog.engine.replicas import Origin, Replica
from tidelog.engine.shipping_statistics import ShippingStatistics
from tidelog.engine.store_link import StoreLink, take_over_start
from tidelog.engine.store_states import StoreStates
from tidelog.engine.store_sweep import sweep_store
from tidelog.errors import ClosedError, FencedError, HeldError, RetryError, TidelogError
from tidelog.tier.background import Background, Task
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.node_lease import DEFAULT_LEASE_SECONDS, NodeLease
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.tier_settings import TierSettings

_logger = logging.getLogger("tidelog.engine")
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0


class ClaimPolicy(NamedTuple):
    """How an engine claims its store and keeps it."""

    take_over: bool = False
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    ownership_check_seconds: float = TierSettings().ownership_check_seconds
    renews_lease: bool = True


_DEFAULT_POLICY = ClaimPolicy()


class Shipping:
    """An engine's store, for the engine. Any thread may call it; one ships at a time."""

    def __init__(
        self,
        core: Core,
        objects: ObjectStore,
        *,
        keys: EngineKeys,
        node: str,
        replicas: Sequence[ObjectStore] = (),
        policy: ClaimPolicy = _DEFAULT_POLICY,
    ) -> None:
        self._core = core
        self._objects = objects
        self._keys = keys
        self._node = node
        self._policy = policy
        self._replicas = [Replica(replica, core.clock) for replica in replicas]
        self._reading = open_metadata_store(BUCKET, objects, read_only=True)
        self.reader = ColdReader(
            *(Catalog(self._reading, keys), objects, core.settings.cold_cache_bytes),
            lambda: [replica.objects for replica in self._replicas],
            on_manifest=self._noted,
        )
        """Reads values that have left the disk. It needs no claim."""
        self._states = StoreStates(core, objects, keys)
        self._purger = Purger(core.wal, objects, core.settings.hot_tier_bytes, core.wal.was_read_lately)
        self._lag = Lag(core.wal, core.clock)
        self._link: StoreLink | None = None
        self._shipping = RLock()
        self._writing_state = Lock()
        self._has_swept = False
        self._fenced: FencedError | None = None
        self._is_closed = False
        self._errors = 0
        self._errors_in_a_row = 0
        self._last_error: str | None = None
        # One thread for each task: an upload to a slow store keeps nothing else from being done in time.
        self._own_background = Background(3 + len(self._replicas), "tidelog-cold")
        self._tasks: list[Task] = []

    # The claim

    def connect(self) -> None:
        """Claims the engine, if that was not done yet. FencedError and others say why it cannot be had."""
        with self._shipping, self._counted():
            self._connected()

    def connect_if_possible(self) -> None:
        """As `connect`; a store that gives no answer is asked again later. HeldError while another node has it."""
        try:
            self.connect()
        except HeldError:
            raise
        except RetryError as error:
            _logger.warning("%s: the store is out of reach, and is tried again: %s", self._core.directory, error)

    def _connected(self) -> StoreLink:
        self._check_usable()
        if self._link is None:
            with self._shipping:
                if self._link is None:
                    self._link = self._claimed()
                    self._raise_marks(self._link.published)
                    self._states.let_go(self._link)
        return self._link

    @contextlib.contextmanager
    def linked(self) -> Iterator[StoreLink]:
        """The claim on the store, for those who clean up there; what goes wrong is noticed as ever."""
        with self._counted():
            yield self._connected()

    def _noted(self, manifest: Manifest) -> None:
        """A reader has asked for the manifest: somebody may have moved the start of history there."""
        if self._link is not None:
            self._link.note(manifest)
        else:
            take_over_start(self._core, manifest)

    def now_us(self) -> int:
        """The time by which pins in the manifest end."""
        return self._core.clock.now_us()

    def _claimed(self) -> StoreLink:
        core, policy = self._core, self._policy
        with contextlib.ExitStack() as undo:
            metadata = undo.enter_context(open_metadata_store(BUCKET, self._objects))
            lease = NodeLease(
                *(metadata, core.clock, self._node, core.directory),
                lease_seconds=policy.lease_seconds,
                renews_itself=policy.renews_lease,
                ending=self._own_background,
            )
            undo.callback(lease.release)
            link = StoreLink(core, self._objects, metadata, self._keys, lease, take_over=policy.take_over)
            undo.pop_all()
            return link

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the engine is closed", path=self._core.directory)
        self.check_not_fenced()

    def check_not_fenced(self) -> None:
        """FencedError when the claim is known to be lost. Asks nobody."""
        if self._fenced is not None:
            raise FencedError(self._fenced.message, path=self._core.directory, hint=self._fenced.hint)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Notices what goes wrong, a lost claim above all."""
        try:
            yield
        except FencedError as error:
            self._fence(error)
            raise
        except TidelogError as error:
            self._errors += 1
            self._errors_in_a_row += 1
            self._last_error = str(error)
            raise
        else:
            self._errors_in_a_row, self._last_error = 0, None

    def _fence(self, error: FencedError) -> None:
        if self._fenced is None:
            self._fenced = error
            self._last_error = str(error)
            _logger.error("%s: %s", self._core.directory, error)
            if self._link is not None:
                self._link.shipper.close()

    # Shipping

    def ship(self) -> int:
        """Ships everything up to the low-water mark now; the high-water mark then."""
        with self._shipping, self._counted():
            link = self._connected()
            before = link.shipper.shipped_offset
            if link.is_behind:
                self._publish(link)
            # What comes meanwhile is for the next time: a busy engine would keep this one for ever.
            target_lsn = self._core.wal.next_lsn
            while link.shipper.shipped_offset < target_lsn and self._ship_some(link):
                self._publish(link)
                self._purge(link)
            self._purge(link)
            if link.shipper.shipped_offset == before:
                link.owned.ownership.verify()  # publishing would have noticed that another node owns the engine
            return link.published.high_water_mark

    def _ship_some(self, link: StoreLink) -> bool:
        """Some objects; whether there were any."""
        before = link.shipper.shipped_offset
        try:
            link.shipper.ship(max_objects=self._core.settings.shipping_batch_size)
        except RetryError:
            if link.is_behind:
                self._publish(link)  # what got through counts
            raise
        return link.shipper.shipped_offset > before

    def _publish(self, link: StoreLink) -> None:
        is_sync = self._core.settings.replication_mode == "sync"
        if is_sync:
            link.refresh()  # replicas that know of a compaction which this one does not take nothing older
        self._raise_marks(link.publish(self._bring_replicas if is_sync else _nothing))

    def _raise_marks(self, published: Manifest) -> None:
        """What was published was at or below the low-water mark, whether or not this disk remembers that."""
        seq = published.high_water_mark
        with self._core.applying:
            if seq > self._core.marks.low_water_mark:
                self._core.marks.raise_low_water_mark(seq)
            self._core.marks.raise_high_water_mark(seq)

    def truncation_mark(self) -> int:
        """The high-water mark as the published manifest has it; 0 until that was read."""
        link = self._link
        return 0 if link is None else link.published.high_water_mark

    def purge(self) -> int:
        """Lets files leave the disk that may; the bytes that this freed."""
        with self._shipping, self._counted():
            return self._purge(self._connected())

    def _purge(self, link: StoreLink) -> int:
        shipped_lsn = link.published.shipped_lsn
        return self._purger.purge(link.owned, shipped_lsn, self._core.checkpointer.redo_lsn)

    # States and replicas

    def checkpoint(self) -> None:
        """Ships, and writes the state at the high-water mark into the store."""
        self.write_state()

    def write_state(self) -> StoredCheckpoint | None:
        """As `checkpoint`, while shipping goes on; the newest state then, None while nothing is shipped."""
        self.ship()
        with self._writing_state, self._counted():
            return self._states.write(self._connected())

    def sweep(self) -> list[str]:
        """Deletes what earlier owners left in the store and nobody names; which."""
        with self._shipping, self._counted():
            return sweep_store(self._connected(), self._objects, self._keys)

    def replicate(self) -> None:
        """Brings all replicas up to date; the first that cannot be raises, after all were tried."""
        with self._counted():
            self._bring_replicas(self._connected().refresh())

    def _bring_replicas(self, manifest: Manifest) -> None:
        failure: TidelogError | None = None
        for replica in self._replicas:
            try:
                replica.bring_up_to(manifest, self._origin())
            except FencedError as error:
                failure = failure or RetryError(error.message, operation="replicate", hint=error.hint)
            except TidelogError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _origin(self) -> Origin:
        assert self._link is not None
        return Origin(self._objects, self._link.owned.catalog, self._keys, self._link.owned.epoch)

    # In the background

    def start(self, background: Background) -> None:
        """Ships, writes states and lets go by itself from now on. Stores may hang, so the threads are its own."""
        interval = self._core.settings.shipping_interval_secs
        own = self._own_background
        self._tasks = [
            own.add(self._guarded(self._ship_and_sweep), 0.0 if self._link is None else interval),
            own.add(self._guarded(self._write_state_if_due), interval),
            own.add(self._ask_for_ownership, self._policy.ownership_check_seconds),
        ]
        self._tasks += [own.add(self._guarded(lambda one=replica: self._bring_one(one))) for replica in self._replicas]  # type: ignore[misc]

    def stop(self) -> None:
        """Ends that, and gives up what is under way before it is published. Waits a few seconds at most."""
        self._is_closed = True
        link = self._link
        if link is not None:
            link.shipper.close()
        self._own_background.cancel(*self._tasks)
        self._own_background.close()
        self.reader.close()
        for replica in self._replicas:
            replica.close()
        self._reading.close()
        if link is not None:
            link.close()

    def _ship_and_sweep(self) -> None:
        self.ship()
        if not self._has_swept:
            self.sweep()
            self._has_swept = True

    def _ask_for_ownership(self) -> float:
        """An engine that has nothing to ship would not notice otherwise that another node owns it by now."""
        if self._link is not None and self._fenced is None:
            try:
                self._link.owned.ownership.verify()
            except FencedError as error:
                self._fence(error)
            except TidelogError:
                pass  # out of reach: nobody can tell, and shipping counts such errors
        return self._policy.ownership_check_seconds

    def _write_state_if_due(self) -> None:
        if self._link is not None and self._state_is_due(self._link.published):
            self.write_state()

    def _state_is_due(self, published: Manifest) -> bool:
        """Old enough, and something was shipped since."""
        if not published.high_water_mark:
            return False
        newest = published.checkpoints[-1] if published.checkpoints else None
        if newest is None:
            return True
        age_us = self._core.clock.now_us() - newest.created_us
        is_old = age_us >= self._core.settings.checkpoint_max_age_secs * 1_000_000
        return is_old and newest.seq < published.high_water_mark

    def _bring_one(self, replica: Replica) -> None:
        link = self._link
        if link is not None:
            replica.bring_up_to(link.refresh(), self._origin())

    def _guarded(self, work: Callable[[], object]) -> Callable[[], float]:
        """Runs again after the interval; after a failure after a pause that grows, with some chance in it."""
        failures = 0

        def run() -> float:
            nonlocal failures
            try:
                work()
            except (FencedError, ClosedError):
                return _LONGEST_PAUSE_SECONDS
            except TidelogError as error:
                _logger.warning("%s: the cold tier failed and is tried again: %s", self._core.directory, error)
                pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * (1 << min(failures, 20)))
                failures += 1
                return pause * random.uniform(0.5, 1.0)
            failures = 0
            return self._core.settings.shipping_interval_secs

        return run

    # Looking at it

    def statistics(self) -> ShippingStatistics:
        """One moment of it."""
        link = self._link
        published = Manifest(epoch=0) if link is None else link.published
        states = published.checkpoints
        shipped_lsn = published.shipped_lsn
        return ShippingStatistics(
            store=self._objects.url,
            is_connected=link is not None,
            is_fenced=self._fenced is not None,
            epoch=0 if link is None else link.owned.epoch,
            high_water_mark=self._core.marks.high_water_mark,
            truncation_mark=self.truncation_mark(),
            shipped_lsn=shipped_lsn,
            shipped_position=published.shipped_position,
            lag_bytes=self._core.wal.next_position - published.shipped_position,
            lag_seconds=self._lag.seconds(shipped_lsn, self._core.marks.low_water_mark),
            errors_total=self._errors,
            errors_in_a_row=self._errors_in_a_row,
            last_error=self._last_error,
            purged_bytes=self._purger.freed_bytes,
            checkpoints=len(states),
            newest_checkpoint_seq=states[-1].seq if states else 0,
            newest_checkpoint_us=states[-1].created_us if states else None,
            shipper=None if link is None else link.shipper.statistics(),
            cold=self.reader.statistics(),
            replicas=tuple(replica.statistics(published.shipped_position) for replica in self._replicas),
        )


def _nothing(manifest: Manifest) -> None:
    """Replicas follow by themselves."""
