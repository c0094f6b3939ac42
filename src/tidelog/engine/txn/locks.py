"""The lock manager: locks on buckets and keys, for the transactions of one process, in threads and tasks alike.

- A key is locked in S or X under an intention (IS, IX) on its bucket; a bucket in S or X is locked with all its keys.
  An owner that asks for more than it holds gets the join of both.
- Waiters queue and are served in order. Before an owner waits, the manager looks for wait-for cycles
  through it (`find_cycle`); of each cycle the youngest transaction, and no other, is aborted with DeadlockError.
- An owner that is aborted from outside (a deadlock victim, or one that an entry of the log overtook) loses all its
  locks at that moment, and every later request of it raises. So no owner waits for an aborted one.
- The log never waits. `settle(seq, writes)` reports what entries up to `seq` have changed, after they became visible:
  every owner that reads below `seq` and holds a lock that conflicts with such a write is aborted. Every grant moves its
  owner's `seq` up to what has been settled, under the same mutex. Hence: **as long as an owner has not been aborted,
  everything that it has locked is, at its present seq, what it was when it locked it.**

  Why: call an owner *sound* if nothing that it holds was changed by an entry after its seq and up to the settled one. A
  new owner holds nothing and is sound, and a grant keeps it so, since it moves the owner to the settled seq. Only
  `settle` can make an owner unsound. So it looks at all writes first, before anybody is granted anything, and aborts
  all owners that they affect together: no lock that one of them frees is granted to another. Only then do grants move
  others up to the new seq, and those hold nothing that was written. Freeing locks write by write would be wrong: an
  owner that inherits a lock of the first entry would be moved past the second, which changed what it had read.
- The mutex is held for a few dictionary operations and never while anybody waits, reads or calls out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from threading import Lock
from typing import Final

import msgspec

from tidelog.errors import ClosedError, ConflictError, DeadlockError, InputError, LockTimeoutError, TidelogError
from tidelog.log.append_queue import ThreadWaiter, Waiter, finish_all, task_waiter

# Lock modes, lock owners, waiting requests, and locks with several holders or a queue.
#
# A lock that one owner holds alone, without waiters, is just that owner in the manager's table: no object is
# allocated for it. A `SharedLock` replaces it once a second owner holds or wants it. In both cases the mode is in the
# owner's `held`, and nowhere else.


# Lock modes as bit sets: a mode has the bits of every mode that it covers.
#
#     IS   0001   reads some keys of the bucket
#     IX   0011   writes some keys of the bucket
#     S    0101   reads all of it
#     SIX  0111   reads all of it, writes some keys: what a holder of one of S and IX has when it asks for the other
#     X    1111   writes all of it
#
# So `held & wanted == wanted` says that `held` is enough, and `held | wanted` is the weakest mode that covers both.


IS: Final = 0b0001
IX: Final = 0b0011
S: Final = 0b0101
SIX: Final = 0b0111
X: Final = 0b1111

NAMES: Final = {IS: "IS", IX: "IX", S: "S", SIX: "SIX", X: "X"}

COMPATIBLE: Final[dict[int, frozenset[int]]] = {
    IS: frozenset((IS, IX, S, SIX)),
    IX: frozenset((IS, IX)),
    S: frozenset((IS, S)),
    SIX: frozenset((IS,)),
    X: frozenset(),
}
"""Which modes others may hold beside one."""


def intention_of(mode: int) -> int:
    """What a bucket has to be locked with before one of its keys is locked in `mode`."""
    return IX if mode & ~S else IS


Resource = str | tuple[str, str]
"""A bucket by its name, or (bucket, key)."""
MakeFailure = Callable[[], TidelogError]


class LockOwner:
    """A transaction as the lock manager sees it. Not thread-safe.

    `number` grows with every owner, so the greatest is the youngest. `seq` is where it reads; `failure` makes the error
    of an owner that was aborted from outside: it holds nothing and gets nothing.
    """

    __slots__ = ("failure", "held", "is_ingested", "number", "request", "seq")

    def __init__(self, number: int) -> None:
        self.number = number
        self.seq = 0
        self.held: dict[Resource, int] = {}
        self.request: Request | None = None
        self.failure: MakeFailure | None = None
        self.is_ingested = False

    def __repr__(self) -> str:
        return f"<LockOwner {self.number}>"


class Request:
    """A waiting owner; `mode` is what it will hold once granted, joined with what it holds already."""

    __slots__ = ("mode", "owner", "resource", "waiter")

    def __init__(self, owner: LockOwner, resource: Resource, mode: int, waiter: Waiter) -> None:
        self.owner = owner
        self.resource = resource
        self.mode = mode
        self.waiter = waiter


class SharedLock:
    """A lock with several holders or with a queue.

    The queue is served strictly in order, so no owner starves. Upgrades by holders go before requests of owners that
    hold nothing (these wait for them anyway), and among themselves in order.
    """

    __slots__ = ("holders", "queue", "resource")

    def __init__(self, resource: Resource, holder: LockOwner) -> None:
        self.resource = resource
        self.holders: dict[LockOwner, None] = {holder: None}
        self.queue: list[Request] = []

    def fits(self, owner: LockOwner, mode: int) -> bool:
        """Whether `mode` may be held beside what the others hold."""
        return not any(True for _ in self.in_the_way(owner, mode))

    def in_the_way(self, owner: LockOwner, mode: int) -> Iterator[LockOwner]:
        """The other holders that `mode` cannot be held beside."""
        allowed, resource = COMPATIBLE[mode], self.resource
        return (other for other in self.holders if other is not owner and other.held[resource] not in allowed)

    def enqueue(self, request: Request) -> None:
        """Puts a request where it belongs in the queue."""
        place = len(self.queue)
        if request.owner in self.holders:
            place = sum(1 for other in self.queue if other.owner in self.holders)
        self.queue.insert(place, request)

    def blockers(self, request: Request) -> Iterator[LockOwner]:
        """Whom a request of the queue waits for: holders in the way, and all who stand before it."""
        yield from self.in_the_way(request.owner, request.mode)
        for other in self.queue:
            if other is request:
                return
            yield other.owner


# Deadlock detection: finds a cycle of transactions that wait for each other.
#
# A cycle can only arise when an owner begins to wait, and then that owner is part of it: an owner that gets a lock is
# running, and waits for no one. So it is enough to search, at that moment, for a path from the new waiter back to
# itself.


Blockers = Callable[[LockOwner], Iterable[LockOwner]]


def find_cycle(start: LockOwner, blockers: Blockers) -> list[LockOwner]:
    """Returns a shortest cycle through `start`, or nothing."""
    came_from: dict[LockOwner, LockOwner] = {}
    unseen = deque([start])
    while unseen:
        owner = unseen.popleft()
        for other in blockers(owner):
            if other is start:
                return _way_back(owner, start, came_from)
            if other not in came_from:
                came_from[other] = owner
                unseen.append(other)
    return []


def _way_back(last: LockOwner, start: LockOwner, came_from: dict[LockOwner, LockOwner]) -> list[LockOwner]:
    way = [last]
    while way[-1] is not start:
        way.append(came_from[way[-1]])
    return way


def youngest(circle: Iterable[LockOwner]) -> LockOwner:
    """The victim: it has done the least, and an old transaction gets through however often others are in its way."""
    return max(circle, key=lambda owner: owner.number)


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
        self.owners: dict[LockOwner, None] = {}
        self._numbers = count(1)
        self._settled_seq = 0
        self._waits = 0
        self._timeouts = 0
        self._deadlocks = 0
        self._overtaken = 0

    # Owners

    def begin(self) -> LockOwner:
        """Returns a new owner, younger than all others. Set its `seq` afterwards: entries are checked against it from
        now on.
        """
        owner = LockOwner(next(self._numbers))
        with self._mutex:
            self.owners[owner] = None
        return owner

    def least_seq(self) -> int | None:
        """The oldest seq that an owner reads at, 0 for one that is about to say; None when there is no owner."""
        with self._mutex:
            return min((owner.seq for owner in self.owners), default=None)

    def check(self, owner: LockOwner) -> None:
        """Raises what ended this owner, if something did."""
        if owner.failure is not None:
            raise owner.failure()

    def release_all(self, owner: LockOwner) -> None:
        """The end of a transaction: all of its locks at once. Doing it again changes nothing."""
        wakeups: Wakeups = []
        with self._mutex:
            self._end({owner: owner.failure or _ended}, wakeups)
            self.owners.pop(owner, None)
        _wake(wakeups)

    # Asking

    def acquire_key(
        self, owner: LockOwner, bucket: str, key: str, mode: int = X, timeout_seconds: float | None = None
    ) -> None:
        """A key in S or X, with the intention on its bucket. Nearly free without contention."""
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
            raise  # another thread ended this owner and removed the request
        except BaseException:
            self._withdraw(request)
            raise
        if not in_time and self._withdraw(request):
            raise self._timed_out(request)
        if not in_time:
            waiter.wait()  # another thread finished it in between

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
            await waiter  # another thread finished it in between
        finally:
            self._withdraw(request)  # for a task that was cancelled; otherwise it is off the queue already
            if not waiter.cancel() and not waiter.cancelled():
                waiter.exception()  # marks it as retrieved

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
        return LockTimeoutError(f"{NAMES[request.mode]} on {_name(request.resource)} was not granted in time")

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
        # An upgrade may overtake waiters: they wait for its owner anyway.
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
        while owner.request is not None and (circle := find_cycle(owner, self._blockers)):
            self._deadlocks += 1
            self._end({youngest(circle): _deadlock}, wakeups)

    def _end(self, failures: Mapping[LockOwner, MakeFailure], wakeups: Wakeups) -> None:
        """Releases all locks of these owners in one step: none of them gets what another one frees."""
        waited_for = [self._fail(owner, failure, wakeups) for owner, failure in failures.items()]
        for owner in failures:
            for resource in owner.held:
                self._release(owner, resource, wakeups)
            owner.held.clear()
        for lock in waited_for:
            if lock is not None and self._table.get(lock.resource) is lock:
                self._serve(lock, wakeups)  # the requests after it may be next

    def _fail(self, owner: LockOwner, failure: MakeFailure, wakeups: Wakeups) -> SharedLock | None:
        """Ends the owner; returns the lock that it waited for, whose queue is still to be served."""
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
        """Removes a request from its queue; the ones after it may be next."""
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
                        self._overtaken += not owner.is_ingested
            self._settled_seq = max(self._settled_seq, seq)  # before grants: an owner that inherits a lock reads there
            self._end(failures, wakeups)
        _wake(wakeups)

    def roll_back(self, seq: int) -> None:
        """The log's tail was discarded, and `seq` is the last one now: aborts every owner that may have read what is
        gone.
        """
        wakeups: Wakeups = []
        with self._mutex:
            self._settled_seq = min(self._settled_seq, seq)
            self._end({owner: owner.failure or _rolled_back for owner in self.owners}, wakeups)
        _wake(wakeups)

    def close(self) -> None:
        """Ends every owner, because the engine closes."""
        wakeups: Wakeups = []
        with self._mutex:
            self._end({owner: owner.failure or _closed for owner in self.owners}, wakeups)
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
        with self._mutex:
            return LockStatistics(
                owners=len(self.owners),
                held=sum(len(owner.held) for owner in self.owners),
                waiting=sum(owner.request is not None for owner in self.owners),
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
    return ClosedError(
        "the engine was closed during the transaction", hint="Open the engine again and run the transaction again"
    )


def _ended() -> TidelogError:
    return ClosedError("the transaction has ended", hint="Begin a new one")


def _deadlock() -> TidelogError:
    message = "deadlock: transactions wait for each other in a cycle, and this one is the youngest"
    return DeadlockError(message, hint="Its locks are released; run the whole transaction again")


def _rolled_back() -> TidelogError:
    return ConflictError("entries were rolled back during the transaction", hint="Run it again")


def _overtaken(resource: Resource, seq: int) -> TidelogError:
    message = f"an entry of the log (seq {seq} or earlier) changed {_name(resource)} during the transaction"
    return ConflictError(message, hint="Run the whole transaction again")
