"""Who waits for a message of a subscription, in threads and tasks. Everything is called under the subscription's lock.

Invariants
- A waiter is finished exactly once: by the log when it was the lookout and there is news, else from here.
- At most one of them, the lookout, listens to the log: an append wakes one, who reads a batch and wakes the others.
"""

from __future__ import annotations

import asyncio

from tidelog.log import Log
from tidelog.log.waiting import Waiter, finish_all
from tidelog.topics.live_log import LiveLog


class Waiters:
    """Those who wait, in order of arrival."""

    def __init__(self, log: Log | LiveLog) -> None:
        self._log = log
        self._waiting: list[Waiter] = []
        self.is_empty = True
        self._lookout: Waiter | None = None
        self.alarm_us: int | None = None
        """When the one who came last looks again by itself."""

    @property
    def has_lookout(self) -> bool:
        """One whose loop was closed in the middle of its waiting hears nothing any more: it makes room for another."""
        if self._lookout is not None and _is_lost(self._lookout):
            self.remove(self._lookout)
        return self._lookout is not None

    def add(self, waiter: Waiter, due_us: int | None) -> None:
        """Somebody begins to wait."""
        self._waiting.append(waiter)
        self.is_empty = False
        self.alarm_us = due_us

    def look_out(self, waiter: Waiter, offset: int) -> bool:
        """This one is woken by news at an offset. False: there is some already, or nothing will ever come."""
        if not self._log.listen(waiter, offset):
            self._waiting.remove(waiter)
            self.is_empty = not self._waiting
            return False
        self._lookout = waiter
        return True

    def remove(self, waiter: Waiter) -> None:
        """It waits no longer, for whatever reason."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self.is_empty = not self._waiting
        if self._lookout is waiter:
            self._lookout = None
            self._log.stop_listening(waiter)
        self.alarm_us = None

    def wake(self, count: int | None = None) -> None:
        """So many of them look again, or all."""
        if count is not None:
            self._waiting = [waiter for waiter in self._waiting if not _is_lost(waiter)]
        woken = self._waiting[:count]
        del self._waiting[: len(woken)]
        self.is_empty = not self._waiting
        lookout = self._lookout
        if lookout is not None and lookout in woken:
            self._lookout = None
            if not self._log.stop_listening(lookout):
                woken.remove(lookout)  # the log has woken it
        finish_all(woken)


def _is_lost(waiter: Waiter) -> bool:
    return isinstance(waiter, asyncio.Future) and waiter.get_loop().is_closed()
