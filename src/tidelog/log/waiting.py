"""How threads and tasks wait for the writer, and how it wakes them.

A waiter is made by the one who waits, handed over under the log's mutex, and finished exactly once by whoever took it
off its list. A thread sleeps on a lock of its own. A task awaits a plain future of its loop, and all futures of one
loop are finished by one call into it, since waking a loop costs more than everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from threading import TIMEOUT_MAX, Lock

MakeError = Callable[[], BaseException]


def _lock_timeout(seconds: float | None) -> float:
    return -1 if seconds is None else min(max(0.0, seconds), TIMEOUT_MAX)


class ThreadWaiter:
    """A blocked thread."""

    __slots__ = ("_error", "_lock")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lock = Lock()
        self._lock.acquire()

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._lock.release()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """False when the time passed (the waiter may still be on its list then); raises what it was finished with."""
        in_time = self._lock.acquire(timeout=_lock_timeout(timeout_seconds))
        if self._error is not None:
            raise self._error
        return in_time


TaskWaiter = asyncio.Future[None]
Waiter = ThreadWaiter | TaskWaiter


def task_waiter() -> TaskWaiter:
    """A waiter for the running task, to be awaited."""
    return asyncio.get_running_loop().create_future()


def finish_all(waiters: Iterable[Waiter], make_error: MakeError | None = None) -> None:
    """Wakes them all. Each gets an error of its own, so that tracebacks do not mix."""
    loops: dict[asyncio.AbstractEventLoop, list[TaskWaiter]] = {}
    for waiter in waiters:
        if type(waiter) is ThreadWaiter:
            waiter.finish(None if make_error is None else make_error())
        elif isinstance(waiter, asyncio.Future):
            loops.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, futures in loops.items():
        try:
            loop.call_soon_threadsafe(_finish_futures, futures, make_error)
        except RuntimeError:
            continue  # the loop was closed; nobody waits any more


def _finish_futures(futures: list[TaskWaiter], make_error: MakeError | None) -> None:
    """Runs in the loop. A task that was cancelled meanwhile no longer listens."""
    for future in futures:
        if future.done():
            continue
        if make_error is None:
            future.set_result(None)
        else:
            future.set_exception(make_error())
