"""A log with a history: its head on this disk, the rest in the object store, one owner at a time.

This file only puts the parts together: `takeover` has found out where to go on, `shipper` ships, `joined` reads,
`pruner` deletes, `intake` takes in what others hand over, and tasks in the background keep all of that going.

Invariants
- The log takes appends only while the claim is not known to be lost. Once it is, everything that changes anything
  raises FencedError; reading goes on.
- Closing neither ships nor waits for the store, unless `ship_on_close` asks for it: what is not shipped is on this
  disk, and is shipped after the next opening.
- Files leave the disk at sealing only after the marker is written, and the marker only after everything is published.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from tidelog.errors import ClosedError, FencedError, NotSupportedError, RetryError, TidelogError
from tidelog.files import explained
from tidelog.log import Log
from tidelog.tier.background import NEVER, Background, Task
from tidelog.tier.fenced_tail import remove_files
from tidelog.tier.history import History
from tidelog.tier.intake_taker import IntakeTaker
from tidelog.tier.joined import JoinedLog
from tidelog.tier.key_watch import NEVER_SEEN, KeyWatch, Watched
from tidelog.tier.metadata.measured import MeasuredMetadata
from tidelog.tier.metadata.remembered import RememberedMetadata
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.pruner import Pruner
from tidelog.tier.ship_waiters import ShipWaiters
from tidelog.tier.shipper import Shipper
from tidelog.tier.sweep import SweepPlan, SweepReport, apply_sweep, finish_deletion, plan_sweep
from tidelog.tier.tier_settings import TierSettings
from tidelog.tier.tier_statistics import TierStatistics
from tidelog.tier.wakefulness import Wakefulness

_logger = logging.getLogger("tidelog.tier")
Result = TypeVar("Result")


class TieredLog(JoinedLog):
    """An open log that this process owns, with its history."""

    def __init__(
        self,
        log: Log,
        owned: OwnedCatalog,
        objects: ObjectStore,
        history: History,
        shipper: Shipper,
        pruner: Pruner,
        intake: IntakeTaker,
        settings: TierSettings,
        time_field: int | None,
    ) -> None:
        super().__init__(log, history, time_field=time_field)
        self.log = log
        self.owned = owned
        self.shipper = shipper
        self.pruner = pruner
        self.intake = intake
        self.settings = settings
        self._objects = objects
        self._first_own_offset = log.next_offset
        self._fenced: FencedError | None = None
        self._tasks: list[Task] = []
        self._question: Task | None = None
        self._watched: list[Watched] = []
        self._background: Background | None = None
        self._wakefulness = Wakefulness(self.verify)
        self.wait_shipped = ShipWaiters(self.ship).join
        """A future that is done once the message at an accepted offset is in the store."""
        self.check_awake = self._wakefulness.check
        """Called before an append: cheap, unless the process has been asleep."""

    @property
    def may_have_slept(self) -> bool:
        """Whether `check_awake` may wait for the store."""
        return self._wakefulness.is_in_doubt

    def start_tasks(self, background: Background, questions: Background, watch: KeyWatch) -> None:
        """Ships, prunes and learns that it was replaced from now on, in the background. An idle topic does nothing.

        Questions have threads of their own: uploads to a slow store may take all others for minutes.
        """
        self._background = background
        settings, keys = self.settings, self.owned.catalog.keys
        first_seconds = min(1.0, settings.ship_interval_seconds)
        shipping = background.add(self._guarded(self.shipper.ship_if_due), first_seconds)
        self.intake.is_told = not self.intake.looks_are_paid
        taking = background.add(
            self._guarded(self.intake.look), NEVER if self.intake.is_told else settings.intake_check_seconds
        )
        pruning = background.add(self._guarded(self.pruner.prune_if_due), settings.retention_interval_seconds)
        self._tasks = [shipping, taking, pruning]
        self.log.on_durable(lambda: shipping.wake(first_seconds))
        question = self._question = questions.add(self._guarded(self._verify_once), NEVER)
        version = self.owned.ownership.version
        self._watched = [watch.add(keys.owner, version, question.wake, settings.ownership_check_seconds)]
        if self.intake.is_told:
            self._watched.append(watch.add(keys.intake, NEVER_SEEN, taking.soon, settings.intake_check_seconds))

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
        """One moment of the cold tier."""
        metadata = self.owned.catalog.metadata
        metadata = metadata.store if isinstance(metadata, RememberedMetadata) else metadata
        return TierStatistics(
            store=self._objects.url,
            epoch=self.owned.epoch,
            fenced=self._fenced is not None,
            start_offset=self.start_offset,
            hot_start_offset=self.hot_start_offset,
            shipper=self.shipper.statistics(),
            retention=self.pruner.statistics(),
            history=self.history.counters.snapshot(),
            metadata=metadata.statistics() if isinstance(metadata, MeasuredMetadata) else None,
        )

    # Ownership

    def verify(self) -> None:
        """Asks the store whether the topic is still ours; FencedError when it is not."""
        with self._noticing_fences():
            self._check_not_fenced()
            self.owned.ownership.verify()

    def change(self, work: Callable[[OwnedCatalog], Result]) -> Result:
        """Does something with the catalog as its owner; who is not that any more gets FencedError."""
        with self._noticing_fences():
            self._check_not_fenced()
            return work(self.owned)

    def check_not_fenced(self) -> None:
        """FencedError when the claim is known to be lost. Asks nobody."""
        self._check_not_fenced()

    def _verify_once(self) -> float:
        """Because the owner's entry has changed. Asked again while the store does not say who it is."""
        try:
            self.verify()
        except RetryError:
            return self.settings.ownership_check_seconds
        except FencedError:
            raise
        except TidelogError:
            return NEVER
        return NEVER

    def _check_not_fenced(self) -> None:
        if self._fenced is not None:
            raise self._fenced_again()
        # A forked child has a copy of everything here, and its parent goes on: it must not even delete what is due.
        self.log.read("latest").close()  # a log that is closed says so

    def _fenced_again(self) -> FencedError:
        assert self._fenced is not None
        return self._repeated(self._fenced)

    def _repeated(self, error: FencedError) -> FencedError:
        return FencedError(error.message, path=self.log.directory, hint=error.hint)

    @contextlib.contextmanager
    def _noticing_fences(self) -> Iterator[None]:
        try:
            yield
        except FencedError as error:
            self._fence(error)
            raise

    def _fence(self, error: FencedError) -> None:
        if self._fenced is None:
            # First: whoever sees that it is fenced must not be able to append any more.
            self.log.refuse_appends(lambda: self._repeated(error))
            self._fenced = error
            _logger.error("%s: %s", self.log.directory, error)
            self.shipper.close()

    def _guarded(self, work: Callable[[], float]) -> Callable[[], float]:
        """A background task that ends quietly when the topic has another owner: its next look finds it fenced."""

        def run() -> float:
            if self._fenced is not None:
                return self.settings.ship_retry_max_seconds
            with contextlib.suppress(FencedError), self._noticing_fences():
                return work()
            return self.settings.ship_retry_max_seconds

        return run

    # Shipping, pruning, sealing

    def ship(self) -> int:
        """Brings everything accepted so far to the store; returns the first offset that is not there yet."""
        with self._noticing_fences():
            self._check_not_fenced()
            self.log.flush()
            before = self.shipped_offset
            shipped = self.shipper.ship()
            if shipped == before:
                self.owned.ownership.verify()  # publishing would have noticed that somebody else owns the topic
            return shipped

    def take_in(self) -> int:
        """Takes in what was handed over to the topic; returns how many consignments."""
        with self._noticing_fences():
            self._check_not_fenced()
            return self.intake.take_in()

    def prune(self) -> None:
        """Deletes what is due by the retention settings now."""
        with self._noticing_fences():
            self._check_not_fenced()
            self.pruner.prune()

    def plan_sweep(self) -> SweepPlan:
        """What a sweep would do. Changes nothing."""
        with self._noticing_fences():
            self._check_not_fenced()
            now_us = self.shipper.now_us()
            return plan_sweep(self.owned.catalog, self._objects, self.owned, now_us, in_flight=self.shipper.in_flight())

    def sweep(self, plan: SweepPlan, *, drop_lost: bool = False, drop_uncovered: bool = False) -> SweepReport:
        """Carries out a plan."""
        with self._noticing_fences():
            self._check_not_fenced()
            return apply_sweep(
                *(plan, self.owned.catalog, self._objects, self.owned),
                in_flight=self.shipper.in_flight(),
                drop_lost=drop_lost,
                drop_uncovered=drop_uncovered,
            )

    def seal(self) -> None:
        """Ships everything, writes down where the next owner goes on, and closes. A failure leaves it open."""
        with self.intake.paused():
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
            with self._noticing_fences():
                self.owned.seal(shipped)
        except BaseException:
            self.log.refuse_appends(None if self._fenced is None else self._fenced_again)
            raise

    def _sealed_error(self) -> ClosedError:
        return ClosedError("the topic is sealed", path=self.log.directory, hint="Open it again to own it again")

    def _clear_disk(self, operation: str) -> None:
        self.log.forget()
        with explained(operation, self.log.directory):
            remove_files(self.log.files, self.log.directory)

    # Ending

    def close(self) -> None:
        """Ships what is left if that was asked for, flushes, stops and lets go. Closing twice is fine."""
        try:
            if self.settings.ship_on_close and self._fenced is None and not self.log.over:
                self.ship()
        finally:
            self._close()

    def _close(self) -> None:
        self._stop()
        try:
            self.log.close()
        finally:
            self._give_back_lineage()

    def let_go(self) -> None:
        """Closes it while the node goes on: others may open the topic at once."""
        self.close()
        with contextlib.suppress(TidelogError):
            self.owned.ownership.release()

    def delete(self) -> None:
        """Removes the topic: its messages from the disk, the store and the catalog. Its directory is the caller's."""
        self.verify()  # while it is open: who does not own it any more keeps what it has
        with self._noticing_fences():
            self._stop()
            self.log.close()
            self.owned.mark_deleted()
            # Before the mark goes: files that outlive it would be the end of a topic whose beginning is deleted.
            self._clear_disk("delete")
            finish_deletion(self.owned, self._objects)

    def _stop(self) -> None:
        self.shipper.close()
        self.intake.stop()
        for watched in self._watched:
            watched.cancel()
        if self._question is not None:
            self._question.is_cancelled = True  # not waited for: it changes nothing
        tasks, self._tasks = self._tasks, []
        if self._background is not None:
            self._background.cancel(*tasks)

    def _give_back_lineage(self) -> None:
        """Who only looked must not turn what another node has on its disk into a fenced tail, unless there are rows in
        it that are to be taken in again by now."""
        has_appended = self.log.next_offset != self._first_own_offset or self.intake.has_moved_places
        if self._fenced is None and not has_appended and not self.log.file_spans():
            give_back = self.owned.give_back
            with contextlib.suppress(TidelogError):
                give_back() if self._background is None else self._background.attempt(give_back)
