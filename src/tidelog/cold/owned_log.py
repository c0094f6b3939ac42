"""The owner's shell of a log, one for topics and engines: claims it, ships it, and notices that another node owns it.

    claim -> the policy's documents settle in -> ship -> documents and replicas follow -> evict local files

What a topic and an engine differ in is a `Policy`: how the log is claimed, what may ship, which further documents there
are (staging, a manifest), what may leave the disk, and what runs in the background.

Invariants
- Nothing is shipped, published, evicted or deleted without a claim, and everything is under its epoch.
- A lost claim is noticed once, wherever FencedError comes up. From then on appends are refused, and everything that
  changes anything raises FencedError without asking anybody. Reading continues.
- A claim is watched: an owner that has nothing to do learns within `ownership_check_seconds` that it was replaced. The
  watch has threads of its own, and all logs of a node share its requests.
- A log works without its store. It may be claimed when the store first answers; until then it waits on this disk.
- One thread ships at a time. No other lock is held while a store is waited for.
- Background work that fails is retried, with one backoff for everything. It never fails an append.
- Stopping waits a few seconds at most, and abandons uploads before they are published.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, RLock, Thread
from typing import TypeVar

from tidelog.clock import Clock
from tidelog.cold.flush_log import FlushLog, FlushReader
from tidelog.cold.lease import DEFAULT_LEASE_SECONDS, NodeLease
from tidelog.cold.ownership import KeyWatch, OwnedCatalog, Watched
from tidelog.cold.settings import TierSettings
from tidelog.cold.shipper import Shipper
from tidelog.cold.takeover import Taken
from tidelog.errors import ClosedError, FencedError, RetryError, StoreUnavailableError, TidelogError
from tidelog.events import tell
from tidelog.limits import start_thread
from tidelog.log import Log
from tidelog.store.binding import StoreBinding
from tidelog.store.keys import DEFAULT_ROOT, TopicKeys
from tidelog.store.metadata.base import MeasuredMetadata, MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, Lazy, Task, Threads, in_thread, with_backoff

_logger = logging.getLogger("tidelog.cold")
Result = TypeVar("Result")


class Node:
    """An open store with its metadata, and what all logs of one directory share: the lease and the threads."""

    def __init__(
        self,
        objects: ObjectStore,
        metadata: MetadataStore,
        *,
        clock: Clock,
        name: str,
        directory: Path,
        root: str = DEFAULT_ROOT,
        binding: StoreBinding | None = None,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        renews_lease: bool = True,
        runs_in_background: bool = True,
        threads: Threads | None = None,
    ) -> None:
        """`directory` is that of the node, whose lock the caller holds.

        `binding` is checked before the first use of the catalog, which others may share.
        """
        self.objects = objects
        self.runs_in_background = runs_in_background
        self.metadata = MeasuredMetadata(metadata)
        self.clock = clock
        self.name = name
        self.root = root
        self._binding = binding
        self.threads = threads or Threads()
        self.watch = KeyWatch(lambda: self.metadata, self.threads.questions)
        self.lease = NodeLease(
            self.metadata,
            clock,
            name,
            directory,
            lease_seconds=lease_seconds,
            root=root,
            renews_itself=renews_lease,
            ending=self.threads.store_work,
        )
        """What tells other nodes that this one lives."""
        self.flush_log = Lazy(
            lambda: FlushLog(self.metadata, objects, self.lease, root, runs_in_background=runs_in_background),
            FlushLog.close,
        )
        """What brings messages to the store before they are acknowledged, for the topics that ask for it."""
        self.flush_reader = Lazy(lambda: FlushReader(self.metadata, objects, self.lease.session, root))

    def check_binding(self, *, asks_store: bool = False) -> None:
        """ConfigError where the catalog is that of another store."""
        if self._binding is not None:
            self._binding.check(asks_store=asks_store)

    def close(self) -> None:
        """Its logs are stopped before. Closing twice is fine."""
        self.threads.close()
        self.flush_log.close()
        try:
            self.lease.release()
        finally:
            self.metadata.close()


class Policy:
    """What one kind of log differs in from another, as its owner treats it."""

    flushes_before_shipping = True
    has_followers = True
    """Whether anything follows what is shipped: `catch_up` does something."""
    objects_a_round: int | None = None
    """So many objects are published before the policy's documents follow; None: all there are."""

    def claim(self) -> Taken:
        """Takes the next epoch."""
        raise NotImplementedError

    def new_shipper(self, taken: Taken) -> Shipper:
        """What ships the log from here on, with the gate for what may ship."""
        raise NotImplementedError

    def settle_in(self, taken: Taken, shipper: Shipper) -> None:
        """The log is claimed: further documents become the new owner's. An error here undoes the claim."""

    def catch_up(self) -> None:
        """Brings further documents and replicas up to what is shipped, and evicts what is not wanted here any more.

        Called before the first object of a round and after the last.
        """

    def add_tasks(self) -> None:
        """Adds what runs by itself (`OwnedLog.add_task`)."""

    def fenced(self, make_error: Callable[[], FencedError]) -> None:
        """The claim is lost: nothing may be accepted from here on."""


class Failures:
    """Counts failures of the store's side, for statistics."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self.last: str | None = None

    def add(self, error: TidelogError) -> None:
        self.total += 1
        self.in_a_row += 1
        self.last = str(error)

    def clear(self) -> None:
        self.in_a_row, self.last = 0, None


class OwnedLog:
    """A log on this disk that this process owns in a store, or will own once the store answers. Thread-safe."""

    def __init__(
        self,
        log: Log,
        node: Node,
        keys: TopicKeys,
        policy: Policy,
        settings: TierSettings,
        *,
        directory: Path | None = None,
    ) -> None:
        """`directory` is what errors name."""
        self.log = log
        self.directory = directory or log.directory
        self.node = node
        self.settings = settings
        self.failures = Failures()
        self.is_running = False
        """Whether there is background work."""
        self._keys = keys
        self._policy = policy
        self._taken: Taken | None = None
        self._shipper: Shipper | None = None
        self.shipping = RLock()
        """Held while something is shipped."""
        self._fenced: FencedError | None = None
        self._is_stopped = False
        self._tasks: list[Task] = []
        self._question: Task | None = None
        self._watched: list[Watched] = []

    # The claim

    @property
    def is_claimed(self) -> bool:
        """Whether the store has answered, and the log is ours or was."""
        return self._shipper is not None

    @property
    def owned(self) -> OwnedCatalog:
        """The catalog, as its owner changes it. Only after the claim."""
        assert self._taken is not None, "the log is claimed"
        return self._taken.catalog

    @property
    def shipper(self) -> Shipper:
        """Only after the claim."""
        assert self._shipper is not None, "the log is claimed"
        return self._shipper

    def claim(self) -> None:
        """Claims the log if it is not claimed yet; FencedError, HeldError and others say why that cannot be."""
        with self.guarded():
            self._claim()

    def _claim(self) -> None:
        self.check()
        if self._shipper is None:
            with self.shipping:
                if self._shipper is None:
                    self._claim_once()

    def _claim_once(self) -> None:
        taken = self._policy.claim()
        try:
            shipper = self._policy.new_shipper(taken)
            self._policy.settle_in(taken, shipper)
            self.check()  # it may have been stopped while the store did not answer
        except BaseException:
            with contextlib.suppress(TidelogError):  # not closed to others while this node lives
                taken.catalog.ownership.release()
            raise
        self._taken = taken
        self._shipper = shipper  # last: others look at it without the lock
        if self.is_running:
            self._watch_owner()

    def verify(self) -> None:
        """Asks the store whether the log is still ours; FencedError when it is not."""
        with self.guarded():
            self._claim()
            self.owned.ownership.verify()

    def change(self, work: Callable[[OwnedCatalog], Result]) -> Result:
        """Changes the catalog as its owner; FencedError if this node no longer is."""
        with self.guarded():
            self._claim()
            return work(self.owned)

    def check(self) -> None:
        """Raises if nothing may be changed any more: fenced or closed. Asks nobody."""
        self.check_not_fenced()
        if self._is_stopped:
            raise ClosedError(f"the {self._keys.noun} is closed", path=self.directory, hint="Open it again")
        self.log.check_open()  # a forked child has a copy of everything here, and its parent runs on

    def check_not_fenced(self) -> None:
        """FencedError when the claim is known to be lost. Asks nobody."""
        if self._fenced is not None:
            raise self._repeated(self._fenced)

    @property
    def is_fenced(self) -> bool:
        return self._fenced is not None

    @property
    def fenced_error(self) -> Callable[[], FencedError] | None:
        """What makes the error of a lost claim; None while none is known to be."""
        error = self._fenced
        return None if error is None else lambda: self._repeated(error)

    def _repeated(self, error: FencedError) -> FencedError:
        return FencedError(error.message, path=self.directory, hint=error.hint)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Around whatever asks the store: a lost claim is noticed, and failures are counted."""
        try:
            yield
        except FencedError as error:
            self.fence(error)
            raise
        except TidelogError as error:
            self.failures.add(error)
            raise
        self.failures.clear()

    def fence(self, error: FencedError) -> None:
        """The claim is lost, as somebody has found out. The first one counts."""
        if self._fenced is not None:
            return
        # First: a caller that sees that it is fenced must not be able to append any more.
        self._policy.fenced(lambda: self._repeated(error))
        self._fenced = error
        self.failures.last = str(error)
        _logger.error("%s: %s", self.directory, error)
        epoch = None if self._taken is None else self.owned.epoch
        tell(_logger, "fenced", **self.log.subject, epoch=epoch, reason=error.message)
        if self._shipper is not None:
            self._shipper.close()

    # Shipping

    @property
    def shipped_offset(self) -> int:
        """Everything below is in the store."""
        return 0 if self._shipper is None else self._shipper.shipped_offset

    def ship(self) -> int:
        """Ships everything that may go now, claiming the log first; returns the first offset that is not shipped."""
        with self.shipping, self.guarded():
            self._claim()
            if self._policy.flushes_before_shipping:
                self.log.flush()
            shipper = self.shipper
            # Later messages wait for the next round: on a busy log this one would never end.
            before, target = shipper.shipped_offset, self.log.next_offset
            self._catch_up()
            while shipper.shipped_offset < target and self._ship_some(shipper):
                self._catch_up()
            if shipper.shipped_offset == before:
                self.owned.ownership.verify()  # publishing would have noticed that another node owns the log
            return shipper.shipped_offset

    def _ship_some(self, shipper: Shipper) -> bool:
        """Whether there was anything to ship."""
        before = shipper.shipped_offset
        try:
            shipper.ship(max_objects=self._policy.objects_a_round)
        except RetryError:
            if shipper.shipped_offset > before:
                self._catch_up()  # what got through counts
            raise
        return shipper.shipped_offset > before

    def ship_if_due(self) -> float:
        """One background round of a log that ships by age and size; the seconds until the next."""
        with self.shipping, self.guarded():
            before = self.shipped_offset
            seconds = self.shipper.ship_if_due()
            if self.shipped_offset > before:
                self._catch_up()
            return seconds

    def _catch_up(self) -> None:
        if self._policy.has_followers:
            self._policy.catch_up()

    # In the background

    def start(self) -> None:
        """Does the policy's work by itself from now on, and learns that it was replaced. An idle log does nothing."""
        self.is_running = True
        self._policy.add_tasks()
        if self.is_claimed:
            self._watch_owner()

    def add_task(self, what: str, work: Callable[[], float], first_seconds: float = 0.0) -> Task:
        """Does something again and again until the log is stopped: `work` returns the seconds until the next time."""
        task = self.node.threads.store_work.add(self._retried(what, work), first_seconds)
        self._tasks.append(task)
        return task

    def _retried(self, what: str, work: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            self.check()
            try:
                return work()
            except FencedError as error:
                self.fence(error)
                raise

        def tell_error(error: TidelogError) -> None:
            log_it = _logger.warning if isinstance(error, StoreUnavailableError) else _logger.error
            log_it("%s: %s failed and is tried again: %s", self.directory, what, error)

        return with_backoff(run, self.settings.ship_retry_max_seconds, tell_error)

    def watch(self, key: str, version: str | None, on_change: Callable[[], None], seconds: float) -> None:
        """Calls `on_change` when another process changes a key, until the log is stopped."""
        self._watched.append(self.node.watch.add(key, version, on_change, seconds))

    def _watch_owner(self) -> None:
        question = self._question = self.node.threads.questions.add(
            self._retried("a question", self._verify_once), NEVER
        )
        seconds = self.settings.ownership_check_seconds
        self.watch(self._keys.owner, self.owned.ownership.version, question.wake, seconds)

    def _verify_once(self) -> float:
        """Because the owner's entry has changed. Repeated while the store does not say who it is."""
        try:
            self.owned.ownership.verify()
        except RetryError:
            return self.settings.ownership_check_seconds
        return NEVER

    def stop(self) -> None:
        """Ends what runs in the background, and nothing is published from now on. Twice is fine."""
        self._is_stopped = True
        if self._shipper is not None:
            self._shipper.close()
        for watched in self._watched:
            watched.cancel()
        if self._question is not None:
            self._question.is_cancelled = True  # not waited for: it changes nothing
        tasks, self._tasks = self._tasks, []
        self.node.threads.store_work.cancel(*tasks)


# Detects whether this process has been asleep: stopped, suspended with its machine, or starved.
#
# A process that was stopped while its topic moved to another node must not accept anything before it has checked who
# owns the topic. It cannot know by itself that it was stopped; but a thread that ticks can be seen to have missed its
# ticks.


TICK_SECONDS = 0.1
ASLEEP_SECONDS = 0.4

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the latter stands still while a machine is suspended


def now() -> float:
    """Seconds that go on while the process, or the machine, sleeps."""
    return time.clock_gettime(_CLOCK)


class Pulse:
    """`last` is the last tick, `sleeps` how often ticks were missed. One thread ticks for the whole process."""

    def __init__(self) -> None:
        self.last = now()
        self.sleeps = 0
        self._started_in: int | None = None
        self._starting = Lock()

    def start(self) -> None:
        """Begins to tick in this process, once."""
        with self._starting:
            if self._started_in != os.getpid():
                self.last = now()
                start_thread(Thread(target=self._tick, name="tidelog-pulse", daemon=True))
                self._started_in = os.getpid()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            tick = now()
            if tick - self.last > ASLEEP_SECONDS:
                self.sleeps += 1  # before `last`: who looks at both must see one of them
            self.last = tick


pulse = Pulse()
"""This process's."""


# Whether an owner may keep appending: it was awake all the time, or it has checked again who owns the topic.
#
# Between two such checks an owner that was replaced without having slept may still accept messages; it ships none of
# them, and they are kept for a rescue. While the store is unreachable nobody can tell, and appending resumes after some
# seconds: accepted messages are on this disk, and a node that took over in the meantime has a higher epoch. The check
# stays open, and its answer counts when it comes.


_PATIENCE_SECONDS = 5.0


class PauseDetector:
    """`verify` asks the store, and raises FencedError when the topic has another owner."""

    def __init__(self, verify: Callable[[], None]) -> None:
        pulse.start()
        self._verify = verify
        self._sleeps = pulse.sleeps
        self._verified_at = now()
        self._asking = Lock()
        self._question: Future[None] | None = None
        self._asked_at = 0.0

    @property
    def is_in_doubt(self) -> bool:
        """Whether the process may have been asleep: `check` may then wait for the store."""
        return pulse.sleeps != self._sleeps or now() - pulse.last > ASLEEP_SECONDS

    def check(self) -> None:
        """Cheap while the process is awake; asks the store when it was not."""
        if pulse.sleeps != self._sleeps or now() - pulse.last > ASLEEP_SECONDS:
            self._ask()

    def _ask(self) -> None:
        sleeps, moment = pulse.sleeps, now()
        if sleeps == self._sleeps and moment - self._verified_at <= ASLEEP_SECONDS:
            return  # the ticking thread is late, and it was asked just now
        with self._asking:
            question = self._question
            if question is None or question.done():
                question = self._question = in_thread(self._verify, "tidelog-awake")
                self._asked_at = moment
            patience_seconds = self._asked_at + _PATIENCE_SECONDS - moment
        try:
            # One check for all threads, and none of them proceeds before its answer while there is hope for one.
            question.result(max(0.0, patience_seconds))
        except FencedError:
            raise
        except (TidelogError, TimeoutError):
            pass  # out of reach, or keys that expired while it slept: nobody can tell
        self._sleeps, self._verified_at = sleeps, now()
