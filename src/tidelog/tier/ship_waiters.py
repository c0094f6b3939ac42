"""Group commit to the object store: those who wait for their messages to be shipped share one object.

Invariants
- A waiter is resolved only after an object that holds its message is published, or with the error of the round that
  should have published it.
- One round at a time. Those who come while a round is under way share the next one, however many they are.
- No thread waits while nobody does: the thread that runs the rounds ends with the last waiter.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import NamedTuple

from tidelog.errors import InternalError
from tidelog.tier.background import in_thread


class _Waiter(NamedTuple):
    offset: int
    answer: Future[None]


class ShipWaiters:
    """Those who wait for one log. `ship` publishes all that is accepted and returns the first unshipped offset."""

    def __init__(self, ship: Callable[[], int]) -> None:
        self._ship = ship
        self._guard = Lock()
        self._waiting: list[_Waiter] = []
        self._is_running = False

    def join(self, offset: int) -> Future[None]:
        """Done once the message at `offset`, which must be accepted already, is in the store."""
        answer: Future[None] = Future()
        with self._guard:
            self._waiting.append(_Waiter(offset, answer))
            must_start, self._is_running = not self._is_running, True
        if must_start:
            in_thread(self._run_rounds, "tidelog-ship-now")
        return answer

    def _run_rounds(self) -> None:
        while (waiting := self._next_round()) is not None:
            try:
                shipped_offset = self._ship()
            except BaseException as error:  # noqa: BLE001 - those who wait get it
                for waiter in waiting:
                    waiter.answer.set_exception(error)
            else:
                for waiter in waiting:
                    _resolve(waiter, shipped_offset)

    def _next_round(self) -> list[_Waiter] | None:
        """Those who share the next round; None when nobody waits, and the thread ends."""
        with self._guard:
            waiting, self._waiting = self._waiting, []
            self._is_running = bool(waiting)
        if not waiting:
            return None
        return [waiter for waiter in waiting if waiter.answer.set_running_or_notify_cancel()]


def _resolve(waiter: _Waiter, shipped_offset: int) -> None:
    if waiter.offset < shipped_offset:
        waiter.answer.set_result(None)
    else:
        waiter.answer.set_exception(
            InternalError(f"a round shipped up to {shipped_offset} and left out offset {waiter.offset}")
        )
