"""Locks on buckets and keys, for the transactions of one process: threads and tasks alike.

- A key is locked in S or X under an intention (IS, IX) on its bucket; a bucket in S or X is locked with all its keys.
  Who asks for more than it holds gets the join of both (`lock_modes.py`).
- Whoever has to wait stands in a queue that is served in order (`lock_owner.py`). Before it waits, circles through it
  are looked for (`deadlock.py`); of each one the youngest transaction, and nobody else, is ended with DeadlockError.
- An owner that is ended from outside (a victim of a deadlock, or one that an entry of the log overtook) loses all its
  locks in that moment, and every later request of it raises. So nobody waits for the dead.
- The log never waits. `settle(seq, writes)` tells what entries up to `seq` have changed, after they became visible:
  every owner that reads below `seq` and holds a lock that such a write does not go together with is ended. Every grant
  moves its owner's `seq` up to what has been settled, under the same mutex. Hence: **as long as an owner has not been
  ended, everything that it has locked is, at its present seq, what it was when it locked it.**

  Why: call an owner *sound* if nothing that it holds was changed by an entry after its seq and up to the settled one. A
  new owner holds nothing and is sound, and a grant keeps it so, since it moves the owner to the settled seq. Only
  `settle` can make an owner unsound. So it looks at all writes first, while nobody has got anything from it, and ends
  those whom they concern together: no lock that one of them frees goes to another. Only then do grants move others up
  to the new seq, and those hold nothing that was written. To free locks write by write would be wrong: an owner that
  inherits a lock of the first entry would be moved past the second, which changed what it had read.
- The mutex is held for a few dictionary operations and never while anybody waits, reads or calls out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from threading import Lock

import msgspec

from tidelog.engine.deadlock import find_circle, youngest
from tidelog.engine.lock_modes import COMPATIBLE, IX, NAMES, X, intention_of
from tidelog.engine.lock_owner import LockOwner, MakeFailure, Request, Resource, SharedLock
from tidelog.errors import ClosedError, ConflictError, DeadlockError, InputError, LockTimeoutError, TidelogError
from tidelog.log.waiting import ThreadWaiter, Waiter, finish_all, task_waiter

__all__ = ["LockManager", "LockOwner", "LockStatistics", "Resource"]


class LockStatistics(msgspec.Struct, frozen=True):
    """Locks at one moment, and what has happened so far."""

    owners: int
    held: int
    waiting: int
    waits: int
    timeouts: int
    deadlocks: int
    overtaken: int
    """Transactions that were ended because an entry of the log changed what they had locked."""


Wakeups = list[tuple[Waiter, MakeFailure | None]]


class LockManager:
    """The locks of one engine."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._table: dict[Resource, LockOwner | SharedLock] = {}
        self._owners: dict[LockOwner, None] = {}
        self._numbers = count(1)
        self._settled_seq = 0
        self._waits = 0
        self._timeouts = 0
        self._deadlocks = 0
        self._overtaken = 0

    # Owners

    def begin(self) -> LockOwner:
        """A new owner, younger than all others. Set its `seq` afterwards: entries are told to it from now on."""
        owner = LockOwner(next(self._numbers))
        with self._mutex:
            self._owners[owner] = None
        return owner

    def has_owners(self) -> bool:
        """Whether anybody could be in the way of an entry."""
        return bool(self._owners)

    def least_seq(self) -> int | None:
        """The oldest seq that an owner reads at, 0 for one that is about to say; None when there is no owner."""
        with self._mutex:
            return min((owner.seq for owner in self._owners), default=None)

    def check(self, owner: LockOwner) -> None:
        """Raises what ended this owner, if something did."""
        if owner.failure is not None:
            raise owner.failure()

    def release_all(self, owner: LockOwner) -> None:
        """The end of a transaction: all of its locks at once. Doing it again changes nothing."""
        wakeups: Wakeups = []
        with self._mutex:
            self._end({owner: owner.failure or _ended}, wakeups)
            self._owners.pop(owner, None)
        _wake(wakeups)

    # Asking

    def acquire_key(
        self, owner: LockOwner, bucket: str, key: str, mode: int = X, timeout_seconds: float | None = None
    ) -> None:
        """A key in S or X, with the intention on its bucket. Nearly free when nobody else wants either."""
        resource = (bucket, key)
        with self._mutex:
            table = self._table
            if owner.failure is None and table.setdefault(bucket, owner) is owner:
                held = owner.held
                held[bucket] = held.get(bucket, 0) | (IX if mode == X else intention_of(mode))
                if table.setdefault(resource, owner) is owner:
                    held[resource] = held.get(resource, 0) | mode
                    if owner.seq < self._settled_seq:
                        owner.seq = self._settled_seq
                    return
        self.acquire(owner, bucket, intention_of(mode), timeout_seconds)
        if owner.held.get(bucket, 0) & mode != mode:
            self.acquire(owner, resource, mode, timeout_seconds)

    def acquire(self, owner: LockOwner, resource: Resource, mode: int, timeout_seconds: float | None = None) -> None:
        """Returns when the lock is held. LockTimeoutError: not in time, and what was held before is still held."""
        request = self._ask(owner, resource, mode, ThreadWaiter)
        if request is None:
            return
        waiter = request.waiter
        assert isinstance(waiter, ThreadWaiter)
        try:
            in_time = waiter.wait(timeout_seconds)
        except TidelogError:
            raise  # somebody ended this owner, and took the request off the queue
        except BaseException:
            self._withdraw(request)
            raise
        if not in_time and self._withdraw(request):
            raise self._timed_out(request)
        if not in_time:
            waiter.wait()  # somebody finished it in between

    async def acquire_async(
        self, owner: LockOwner, resource: Resource, mode: int, timeout_seconds: float | None = None
    ) -> None:
        """As `acquire`, without blocking the loop."""
        request = self._ask(owner, resource, mode, task_waiter)
        if request is None:
            return
        waiter = request.waiter
        assert not isinstance(waiter, ThreadWaiter)
        try:
            done, _ = await asyncio.wait((waiter,), timeout=timeout_seconds)
            if not done and self._withdraw(request):
                raise self._timed_out(request)
            await waiter  # without `done` somebody has finished it in between
        finally:
            self._withdraw(request)  # for a task that was cancelled; otherwise it is off the queue already
            if not waiter.cancel() and not waiter.cancelled():
                waiter.exception()  # nobody else asks for it

    async def acquire_key_async(
        self, owner: LockOwner, bucket: str, key: str, mode: int = X, timeout_seconds: float | None = None
    ) -> None:
        """As `acquire_key`, without blocking the loop."""
        await self.acquire_async(owner, bucket, intention_of(mode), timeout_seconds)
        if owner.held.get(bucket, 0) & mode != mode:
            await self.acquire_async(owner, (bucket, key), mode, timeout_seconds)

    def _ask(
        self, owner: LockOwner, resource: Resource, mode: int, make_waiter: Callable[[], Waiter]
    ) -> Request | None:
        """None when the lock is held now; otherwise what to wait for."""
        wakeups: Wakeups = []
        with self._mutex:
            self.check(owner)
            if self._try(owner, resource, mode):
                return None
            request = self._enqueue(owner, resource, mode, make_waiter)
            self._break_circles(owner, wakeups)
        _wake(wakeups)
        return request

    def _timed_out(self, request: Request) -> LockTimeoutError:
        with self._mutex:
            self._timeouts += 1
        return LockTimeoutError(f"{NAMES[request.mode]} on {_name(request.resource)} was not to be had in time")

    # Under the mutex

    def _try(self, owner: LockOwner, resource: Resource, mode: int) -> bool:
        """Takes a lock that can be had without waiting."""
        there = self._table.setdefault(resource, owner)
        held = owner.held.get(resource, 0)
        wanted = held | mode
        if there is owner or held == wanted:
            self._grant(owner, resource, wanted)
            return True
        lock = self._shared(resource, there)
        # Whoever holds a part may pass those who wait: they wait for it anyway.
        if (lock.queue and not held) or not lock.fits(owner, wanted):
            return False
        lock.holders[owner] = None
        self._grant(owner, resource, wanted)
        return True

    def _grant(self, owner: LockOwner, resource: Resource, mode: int) -> None:
        owner.held[resource] = mode
        owner.seq = max(owner.seq, self._settled_seq)

    def _shared(self, resource: Resource, there: LockOwner | SharedLock) -> SharedLock:
        if isinstance(there, SharedLock):
            return there
        lock = self._table[resource] = SharedLock(resource, there)
        return lock

    def _enqueue(self, owner: LockOwner, resource: Resource, mode: int, make_waiter: Callable[[], Waiter]) -> Request:
        if owner.request is not None:
            raise InputError("this transaction already waits for a lock", hint="Use it from one thread or task")
        lock = self._table[resource]
        assert isinstance(lock, SharedLock)
        request = Request(owner, resource, owner.held.get(resource, 0) | mode, make_waiter())
        lock.enqueue(request)
        owner.request = request
        self._waits += 1
        return request

    def _blockers(self, owner: LockOwner) -> Iterable[LockOwner]:
        if owner.request is None:
            return ()
        lock = self._table[owner.request.resource]
        assert isinstance(lock, SharedLock)
        return lock.blockers(owner.request)

    def _break_circles(self, owner: LockOwner, wakeups: Wakeups) -> None:
        """One victim a circle; there may be several circles, through several holders of one lock."""
        while owner.request is not None and (circle := find_circle(owner, self._blockers)):
            self._deadlocks += 1
            self._end({youngest(circle): _deadlock}, wakeups)

    def _end(self, failures: Mapping[LockOwner, MakeFailure], wakeups: Wakeups) -> None:
        """Takes everything from these owners in one step: none of them gets what another one frees."""
        waited_for = [self._fail(owner, failure, wakeups) for owner, failure in failures.items()]
        for owner in failures:
            for resource in owner.held:
                self._release(owner, resource, wakeups)
            owner.held.clear()
        for lock in waited_for:
            if lock is not None and self._table.get(lock.resource) is lock:
                self._serve(lock, wakeups)  # those who stood behind it may be next

    def _fail(self, owner: LockOwner, failure: MakeFailure, wakeups: Wakeups) -> SharedLock | None:
        """The owner gets nothing any more. The lock that it waited for, whose queue is still to be served."""
        owner.failure = failure
        request = owner.request
        if request is None:
            return None
        wakeups.append((request.waiter, failure))
        return self._unqueue(request)

    def _release(self, owner: LockOwner, resource: Resource, wakeups: Wakeups) -> None:
        lock = self._table[resource]
        if isinstance(lock, LockOwner):
            del self._table[resource]
            return
        del lock.holders[owner]
        self._serve(lock, wakeups)

    def _drop(self, request: Request, wakeups: Wakeups) -> None:
        """Takes a request off its queue; those behind it may be next."""
        self._serve(self._unqueue(request), wakeups)

    def _unqueue(self, request: Request) -> SharedLock:
        request.owner.request = None
        lock = self._table[request.resource]
        assert isinstance(lock, SharedLock)
        lock.queue.remove(request)
        return lock

    def _serve(self, lock: SharedLock, wakeups: Wakeups) -> None:
        """Grants what can be granted, in order, and leaves the table as small as it can be."""
        while lock.queue and lock.fits(lock.queue[0].owner, lock.queue[0].mode):
            request = lock.queue.pop(0)
            request.owner.request = None
            lock.holders[request.owner] = None
            self._grant(request.owner, lock.resource, request.mode)
            wakeups.append((request.waiter, None))
        if not lock.holders:
            del self._table[lock.resource]
        elif len(lock.holders) == 1 and not lock.queue:
            self._table[lock.resource] = next(iter(lock.holders))

    def _withdraw(self, request: Request) -> bool:
        """Whether it was still waiting."""
        wakeups: Wakeups = []
        with self._mutex:
            was_waiting = request.owner.request is request
            if was_waiting:
                self._drop(request, wakeups)
        _wake(wakeups)
        return was_waiting

    # The log

    def settle(self, seq: int, writes: Iterable[Resource]) -> None:
        """Entries up to `seq` are visible and have changed these; ends every owner that this makes wrong."""
        wakeups: Wakeups = []
        failures: dict[LockOwner, MakeFailure] = {}
        with self._mutex:
            for resource in writes:
                for owner in self._in_the_way(resource):
                    if owner.seq < seq and owner not in failures:
                        failures[owner] = partial(_overtaken, resource, seq)
                        self._overtaken += not owner.is_prepared
            self._settled_seq = max(self._settled_seq, seq)  # before grants: whoever inherits a lock reads there
            self._end(failures, wakeups)
        _wake(wakeups)

    def roll_back(self, seq: int) -> None:
        """The log's end was thrown away, and `seq` is the last one now: whoever may have read what is gone is ended."""
        wakeups: Wakeups = []
        with self._mutex:
            self._settled_seq = min(self._settled_seq, seq)
            self._end({owner: owner.failure or _rolled_back for owner in self._owners}, wakeups)
        _wake(wakeups)

    def close(self) -> None:
        """Ends every owner: there is nothing to lock any more."""
        wakeups: Wakeups = []
        with self._mutex:
            self._end({owner: owner.failure or _closed for owner in self._owners}, wakeups)
        _wake(wakeups)

    def _in_the_way(self, resource: Resource) -> list[LockOwner]:
        """Whose locks a write of the log does not go together with: X on a bucket, or X on a key under IX."""
        found = self._holders(resource)
        if isinstance(resource, tuple):
            bucket = resource[0]
            found += [owner for owner in self._holders(bucket) if owner.held[bucket] not in COMPATIBLE[IX]]
        return found

    def _holders(self, resource: Resource) -> list[LockOwner]:
        lock = self._table.get(resource)
        if lock is None:
            return []
        return [lock] if isinstance(lock, LockOwner) else list(lock.holders)

    def statistics(self) -> LockStatistics:
        """An immutable snapshot."""
        with self._mutex:
            return LockStatistics(
                owners=len(self._owners),
                held=sum(len(owner.held) for owner in self._owners),
                waiting=sum(owner.request is not None for owner in self._owners),
                waits=self._waits,
                timeouts=self._timeouts,
                deadlocks=self._deadlocks,
                overtaken=self._overtaken,
            )


def _wake(wakeups: Wakeups) -> None:
    for waiter, failure in wakeups:
        finish_all((waiter,), failure)


def _name(resource: Resource) -> str:
    return f"bucket {resource!r}" if isinstance(resource, str) else f"{resource[0]!r}/{resource[1]!r}"


def _closed() -> TidelogError:
    return ClosedError("the engine was closed during the transaction", hint="Open it again and run it once more")


def _ended() -> TidelogError:
    return ClosedError("the transaction has ended", hint="Begin a new one")


def _deadlock() -> TidelogError:
    message = "transactions waited for each other in a circle, and this one is the youngest of them"
    return DeadlockError(message, hint="Its locks are free again; run the whole transaction once more")


def _rolled_back() -> TidelogError:
    return ConflictError("the log's end was rolled back during the transaction", hint="Run it once more")


def _overtaken(resource: Resource, seq: int) -> TidelogError:
    message = f"an entry of the log (seq {seq} or before) changed {_name(resource)} during the transaction"
    return ConflictError(message, hint="Run the whole transaction once more")
