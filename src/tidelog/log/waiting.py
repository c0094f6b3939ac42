"""How threads and tasks wait for the writer, and how it wakes them.

A waiter is made by the one who waits, handed over under the log's mutex, and finished exactly once. Threads sleep on a
lock of their own; tasks on a future of their loop, and all futures of one loop are finished by one call into it, since
waking a loop costs more than everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Protocol


class Waiter(Protocol):
    """Somebody who waits for an offset to be durable, for room, or for news."""

    error: BaseException | None

    def finish(self) -> None:
        """Wakes the waiter; called once, by the side that took it off its list."""
        ...


class ThreadWaiter:
    """A blocked thread."""

    __slots__ = ("_lock", "error")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._lock = Lock()
        self._lock.acquire()

    def finish(self) -> None:
        self._lock.release()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """False when the time passed; the waiter may still be on its list then."""
        return self._lock.acquire(timeout=-1 if timeout_seconds is None else max(0.0, timeout_seconds))


class TaskWaiter:
    """A suspended task."""

    __slots__ = ("error", "future", "loop")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def finish(self) -> None:
        finish_all([self])

    def resolve(self) -> None:
        """Runs in the loop. A task that was cancelled meanwhile no longer listens."""
        if not self.future.done():
            self.future.set_result(None)


def finish_all(waiters: Iterable[Waiter], make_error: Callable[[], BaseException] | None = None) -> None:
    """Wakes them all, those of one event loop by one call. Each gets an error of its own: tracebacks do not mix."""
    loops: dict[asyncio.AbstractEventLoop, list[TaskWaiter]] = {}
    for waiter in waiters:
        if make_error is not None:
            waiter.error = make_error()
        if isinstance(waiter, TaskWaiter):
            loops.setdefault(waiter.loop, []).append(waiter)
        else:
            waiter.finish()
    for loop, tasks in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve_all, tasks)
        except RuntimeError:
            continue  # the loop was closed; nobody waits any more


def _resolve_all(tasks: list[TaskWaiter]) -> None:
    for task in tasks:
        task.resolve()


class Doorbell:
    """The writer's own way to sleep: ringing costs a system call only while it really sleeps.

    `ring` and `prepare` are called under the log's mutex, `sleep` outside of it.
    """

    def __init__(self, mutex: Lock) -> None:
        self._mutex = mutex
        self._lock = Lock()
        self._lock.acquire()
        self.sleeping = False

    def ring(self) -> None:
        if self.sleeping:
            self.sleeping = False
            self._lock.release()

    def prepare(self) -> None:
        self.sleeping = True

    def sleep(self, timeout_seconds: float | None) -> None:
        """Until somebody rings or the time passes."""
        if self._lock.acquire(timeout=-1 if timeout_seconds is None else max(0.0, timeout_seconds)):
            return
        with self._mutex:
            if self.sleeping:
                self.sleeping = False
                return
        self._lock.acquire()  # somebody rang in between; take the ring so that it does not count twice
