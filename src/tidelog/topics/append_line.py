"""Appends of tasks that have to wait, made one after the other in the order in which they were asked for.

A producer takes a sequence that is below its last one for stored. So an append must not overtake another one of the
same producer: the one that was overtaken would count as stored and never be.

Invariants
- One thread of the event loop's pool makes them all, while there are any.
- A task that is cancelled leaves its append in the line: it may be made, as an append that gets no answer may.
- An append that fails for the moment (no room) takes those behind it with it, so that all of them can be made again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from tidelog.errors import BackpressureError, RetryError

Made = TypeVar("Made")


class _Waiting(NamedTuple):
    append: Callable[[], Any]
    answer: Future[Any]


class AppendLine:
    """The line of one producer. Tasks of several event loops may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[_Waiting] = deque()
        self._is_moving = False

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits and nothing is being appended: who comes now overtakes nobody."""
        return not self._is_moving

    async def join(self, append: Callable[[], Made]) -> Made:
        """Has `append` called in a worker thread when it is its turn; what it returns, or raises."""
        answer: Future[Made] = Future()
        with self._lock:
            self._waiting.append(_Waiting(append, answer))
            must_move, self._is_moving = not self._is_moving, True
        if must_move:
            self._start(asyncio.get_running_loop())
        return await asyncio.shield(asyncio.wrap_future(answer))

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_in_executor(None, self._move)
        except RuntimeError as error:  # the loop is ending, and its pool has ended
            self._is_moving = False
            self._fail_waiting(error)

    def _move(self) -> None:
        """In the worker thread, until nobody waits."""
        while (waiting := self._next()) is not None:
            try:
                waiting.answer.set_result(waiting.append())
            except BaseException as error:  # noqa: BLE001 - the task that waits for it gets it
                waiting.answer.set_exception(error)
                if isinstance(error, RetryError):
                    self._fail_waiting(_left_behind(error))

    def _next(self) -> _Waiting | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._is_moving = False
            return None

    def _fail_waiting(self, error: BaseException) -> None:
        with self._lock:
            left, self._waiting = self._waiting, deque()
        for waiting in left:
            waiting.answer.set_exception(error)


def _left_behind(error: RetryError) -> BackpressureError:
    return BackpressureError(
        f"an append of this producer that was before this one failed: {error.message}",
        operation="append",
        hint="Make them again, in the order of their sequences",
    )
