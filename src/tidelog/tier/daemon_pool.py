"""A bounded pool of threads that does not hold up the end of a process.

The pool of the standard library waits at exit for whatever its threads are doing. Ours ask stores, which may not answer
for minutes; nothing is lost when such a question ends with the process.

`in_store_thread` is for tasks: what may wait for a store has threads of its own, shared by all event loops of the
process. Hot reads never wait for one of them, nor do they take the threads that event loops give to other work.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock, Thread, current_thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tidelog.errors import ClosedError, ExhaustedError
from tidelog.limits import start_thread

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_IDLE_SECONDS = 5.0
# Each waits for one answer of a store. More than so many at once wait for their turn.
STORE_THREADS = 32


class PoolClosedError(ClosedError, RuntimeError):
    """What an Executor raises after its end, and an error of ours: something was closed while it was in use."""


class _Call(NamedTuple):
    """Something to be done, and who wants to know how it went."""

    future: Future[Any]
    work: Callable[[], Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self.future.set_exception(error)


class DaemonPool(Executor):
    """Up to so many calls at once; threads are started as they are needed."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads_wanted = threads
        self._name = name
        self._guard = Lock()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[Thread] = []
        self._idle = 0
        self._is_closed = False

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Runs a call in one of the threads; RuntimeError after the end, as an Executor does."""
        future: Future[Result] = Future()
        with self._guard:
            if self._is_closed:
                raise PoolClosedError("it was closed while it was in use", hint="Open it again")
            if self._queue.qsize() >= self._idle and len(self._threads) < self._threads_wanted:
                self._start_thread()
            self._queue.put(_Call(future, lambda: fn(*args, **kwargs)))
        return future

    def _start_thread(self) -> None:
        """One more. Where there is none to be had, those that are there serve everybody in turn."""
        thread = Thread(target=self._run, name=f"{self._name} {len(self._threads)}", daemon=True)
        try:
            start_thread(thread)
        except ExhaustedError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        while (call := self._take()) is not None:
            call.run()
            del call  # its result must not stay in memory until the next one comes

    def _take(self) -> _Call | None:
        """The next call; None at the end, and when there was none for a while: who forgets to close leaks nothing."""
        with self._guard:
            self._idle += 1
        while True:
            with contextlib.suppress(queue.Empty):
                call = self._queue.get(timeout=_IDLE_SECONDS)
                with self._guard:
                    self._idle -= 1
                return call
            with self._guard:
                if self._queue.empty():
                    self._idle -= 1
                    self._threads.remove(current_thread())
                    return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No more calls. Those that wait are still made, unless they are cancelled; `wait` returns after all."""
        with self._guard:
            self._is_closed = True
            if cancel_futures:
                self._cancel_waiting()
            for _ in self._threads:
                self._queue.put(None)
        if wait:
            for thread in list(self._threads):
                thread.join()

    def _cancel_waiting(self) -> None:
        while True:
            try:
                call = self._queue.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call.future.cancel()


_store_threads = DaemonPool(STORE_THREADS, "tidelog-store")


async def in_store_thread(
    work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """As `asyncio.to_thread`, for what may wait for a store: it holds up nothing else."""
    context = contextvars.copy_context()
    return await asyncio.wrap_future(_store_threads.submit(lambda: context.run(work, *args, **kwargs)))


def _renew_store_threads() -> None:
    """A forked child has none of its parent's threads."""
    global _store_threads
    _store_threads = DaemonPool(STORE_THREADS, "tidelog-store")


os.register_at_fork(after_in_child=_renew_store_threads)
