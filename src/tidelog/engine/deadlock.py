"""Finding a circle of transactions that wait for each other.

A circle can only come into being when somebody begins to wait, and then that one is part of it: whoever gets a lock is
running, and waits for nobody. So it is enough to look, at that moment, for a way from the new waiter back to itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from tidelog.engine.lock_owner import LockOwner

Blockers = Callable[[LockOwner], Iterable[LockOwner]]


def find_circle(start: LockOwner, blockers: Blockers) -> list[LockOwner]:
    """A shortest circle through `start`, or nothing."""
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
