"""Who holds locks, who waits for one, and what a lock looks like once two want it.

A lock that one owner holds alone, with nobody waiting, is nothing but that owner in the manager's table: no object is
made for it. `SharedLock` stands there as soon as a second one holds or wants it. In both cases the mode is in the
owner's `held`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tidelog.engine.lock_modes import COMPATIBLE
from tidelog.errors import TidelogError
from tidelog.log.waiting import Waiter

Resource = str | tuple[str, str]
"""A bucket by its name, or (bucket, key)."""
MakeFailure = Callable[[], TidelogError]


class LockOwner:
    """A transaction as the locks see it. One thread or task at a time may use it.

    `number` grows with every owner, so the greatest is the youngest. `seq` is where it reads; `failure` makes the error
    of an owner that was ended from outside: it holds nothing any more, and gets nothing.
    """

    __slots__ = ("failure", "held", "is_prepared", "number", "request", "seq")

    def __init__(self, number: int) -> None:
        self.number = number
        self.seq = 0
        self.held: dict[Resource, int] = {}
        self.request: Request | None = None
        self.failure: MakeFailure | None = None
        self.is_prepared = False

    def __repr__(self) -> str:
        return f"<LockOwner {self.number}>"


class Request:
    """An owner that waits; `mode` is what it will hold then, with what it holds already."""

    __slots__ = ("mode", "owner", "resource", "waiter")

    def __init__(self, owner: LockOwner, resource: Resource, mode: int, waiter: Waiter) -> None:
        self.owner = owner
        self.resource = resource
        self.mode = mode
        self.waiter = waiter


class SharedLock:
    """A lock with several holders or with a queue.

    The queue is served strictly in order, so nobody starves. Holders who want more stand before those who hold nothing
    (these wait for them anyway), and among themselves in order.
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
