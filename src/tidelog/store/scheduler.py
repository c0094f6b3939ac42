"""Background work: a scheduler for recurring maintenance tasks, a thread pool for store requests, and parallel maps.

Invariants
- A task never runs concurrently with itself, and returns when it wants to run next. One that returns `NEVER` is idle,
  and costs nothing, until it is woken.
- An error raised by a task is logged and does not end the thread: the task runs again after a pause.
- Cancelling waits for a run in progress, for a limited time: a call that hangs in a dead store must not block an exit.
  Tasks cancelled soon after each other share one timeout: many that hang take no longer than one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from threading import Condition, Lock, Thread, current_thread
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from tidelog.clock import jittered
from tidelog.errors import ClosedError, ExhaustedError, FencedError, StoreUnavailableError, TidelogError
from tidelog.limits import start_thread

_logger = logging.getLogger("tidelog.cold")
NEVER = float("inf")
_PAUSE_AFTER_ERROR_SECONDS = 10.0
_PATIENCE_SECONDS = 5.0
_BRIEFLY_SECONDS = 0.05
_NEW_PATIENCE_AFTER_SECONDS = 30.0


Part = TypeVar("Part")


class Lazy(Generic[Part]):
    """A part that is built when it is first asked for, once for all threads. If it was closed before, it is built
    closed."""

    def __init__(self, build: Callable[[], Part], close: Callable[[Part], object] | None = None) -> None:
        self._build = build
        self._close = close
        self._building = Lock()
        self._is_closed = False
        self.built: Part | None = None

    def __call__(self) -> Part:
        built = self.built
        if built is None:
            with self._building:
                built = self.built
                if built is None:
                    built = self._build()
                    if self._is_closed and self._close is not None:
                        self._close(built)
                    self.built = built
        return built

    def close(self) -> None:
        with self._building:
            self._is_closed = True
            if self.built is not None and self._close is not None:
                self._close(self.built)


class Task:
    """Something to be done again and again. `work` returns the seconds until it wants to run again."""

    def __init__(self, background: Background, work: Callable[[], float]) -> None:
        self._background = background
        self.work = work
        self.due = 0.0
        self.is_cancelled = False
        self.runs_in: Thread | None = None
        self.again = False

    def soon(self) -> None:
        """Runs as soon as a thread is free, once more if it is running now."""
        self._background.schedule(self, 0.0)

    def wake(self, delay_seconds: float = 0.0) -> None:
        """If it rests, it runs after this time; if it is running now, it runs once more."""
        self._background.schedule(self, delay_seconds, only_if_resting=True)

    def cancel(self) -> None:
        """It does not run again; returns when a run that is under way has ended, or after some seconds."""
        self._background.cancel(self)


class Background:
    """A bounded pool of threads, started with the first task."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads_wanted = threads
        self._name = name
        self._changed = Condition()
        self._queue: list[tuple[float, int, Task]] = []
        self._order = itertools.count()
        self._threads: list[Thread] = []
        self._is_closed = False
        self._patience_seconds = _PATIENCE_SECONDS
        self._patience_ends = float("-inf")
        self._hopeless_until = float("-inf")

    def add(self, work: Callable[[], float], delay_seconds: float = 0.0) -> Task:
        """Begins to run something."""
        task = Task(self, work)
        self.schedule(task, delay_seconds)
        return task

    def schedule(self, task: Task, delay_seconds: float, *, only_if_resting: bool = False) -> None:
        """Sets when a task runs next."""
        with self._changed:
            if self._is_closed or task.is_cancelled:
                return
            if task.runs_in is not None:
                task.again = True
                return
            if only_if_resting and task.due != NEVER:
                return
            task.due = time.monotonic() + delay_seconds
            if task.due == NEVER:
                return
            heapq.heappush(self._queue, (task.due, next(self._order), task))
            self._start_threads()
            self._changed.notify_all()

    def cancel(self, *tasks: Task) -> None:
        """Cancels them, and waits some seconds in all for those that are running."""
        with self._changed:
            for task in tasks:
                task.is_cancelled = True
            if any(map(_runs_elsewhere, tasks)):
                self._wait_for_end_of(tasks)

    def _wait_for_end_of(self, tasks: Sequence[Task]) -> None:
        if not self._changed.wait_for(lambda: not any(map(_runs_elsewhere, tasks)), self._patience_left()):
            self._hopeless_until = time.monotonic() + _NEW_PATIENCE_AFTER_SECONDS

    def attempt(self, work: Callable[[], None]) -> None:
        """Runs something now and waits for it only a short time: it may still run when this returns.

        As long as attempts get through, each is waited for. One that does not takes the patience for those after it.
        """
        attempted = in_thread(work, f"{self._name} attempt")
        try:
            attempted.result(self._patience_seconds if time.monotonic() > self._hopeless_until else _BRIEFLY_SECONDS)
        except TimeoutError:
            self._hopeless_until = time.monotonic() + _NEW_PATIENCE_AFTER_SECONDS

    def _patience_left(self) -> float:
        """Seconds that a caller that ends something now waits for it."""
        now = time.monotonic()
        if now > self._patience_ends + _NEW_PATIENCE_AFTER_SECONDS:
            self._patience_ends = now + self._patience_seconds
        return max(0.0, self._patience_ends - now)

    def close(self) -> None:
        """No task runs again. Threads end by themselves."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _start_threads(self) -> None:
        while len(self._threads) < self._threads_wanted:
            thread = Thread(target=self._run, name=f"{self._name} {len(self._threads)}", daemon=True)
            start_thread(thread)
            self._threads.append(thread)

    def _run(self) -> None:
        while (task := self._take()) is not None:
            delay_seconds: float | None = None
            try:
                delay_seconds = task.work()
            except Exception:
                _logger.exception("work in the background failed, and is tried again")
                delay_seconds = _PAUSE_AFTER_ERROR_SECONDS
            finally:
                self._finished(task, delay_seconds)

    def _take(self) -> Task | None:
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                if self._queue and self._queue[0][0] <= now:
                    due, _, task = heapq.heappop(self._queue)
                    if task.is_cancelled or due != task.due or task.runs_in is not None:
                        continue  # cancelled, or rescheduled since
                    task.runs_in, task.again = current_thread(), False
                    return task
                self._changed.wait(self._queue[0][0] - now if self._queue else None)
        return None

    def _finished(self, task: Task, delay_seconds: float | None) -> None:
        """In one step, so that a concurrent request for another run is not lost. None: it does not run again."""
        with self._changed:
            task.runs_in = None
            if delay_seconds is not None:
                self.schedule(task, 0.0 if task.again else delay_seconds)
            self._changed.notify_all()


class Threads:
    """The threads that all parts of one node share. They are started when there is something to do.

    `store_work` may wait for a store, `disk_work` needs this disk alone, and `questions` ask who owns what: uploads to
    a slow store may take all other threads for minutes.
    """

    def __init__(self, store_threads: int = 4) -> None:
        self.store_work = Background(store_threads, "tidelog-store")
        self.disk_work = Background(1, "tidelog-disk")
        self.questions = Background(2, "tidelog-owner")

    def close(self) -> None:
        """No task runs again. Twice is fine."""
        for one in (self.store_work, self.disk_work, self.questions):
            one.close()


_FIRST_PAUSE_SECONDS = 0.5


def with_backoff(
    work: Callable[[], float], longest_seconds: float, on_error: Callable[[TidelogError], None]
) -> Callable[[], float]:
    """Work for a task whose failures are retried: the pause doubles with each, up to the longest.

    There is some chance in it, so that many who fail at the same time do not come back all at once. Work that was
    closed, or has lost its claim, rests.
    """
    failures = 0

    def run() -> float:
        nonlocal failures
        try:
            delay_seconds = work()
        except (FencedError, ClosedError):
            return longest_seconds
        except TidelogError as error:
            on_error(error)
            pause = min(longest_seconds, _FIRST_PAUSE_SECONDS * (1 << min(failures, 30)))
            failures += 1
            return jittered(pause)
        failures = 0
        return delay_seconds

    return run


def _runs_elsewhere(task: Task) -> bool:
    return task.runs_in not in (None, current_thread())


def in_thread(work: Callable[[], None], name: str) -> Future[None]:
    """Runs something once, in a thread that does not hold up an exit; the result says how it went."""
    outcome: Future[None] = Future()
    outcome.set_running_or_notify_cancel()  # a task that waits for it may be cancelled, the work cannot

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the result raises it
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    try:
        Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:  # the interpreter ends: no thread can be started
        run()
    return outcome


def answered_within(seconds: float, work: Callable[[], None], name: str) -> None:
    """Runs something that asks a store, and waits so long for it. StoreUnavailableError if it is not done by then: it
    goes on by itself, and its result has to be asked for again.
    """
    asked = in_thread(work, name)
    try:
        asked.result(seconds)
    except TimeoutError:
        raise StoreUnavailableError(
            f"the store gave no answer within {seconds:g} s", hint="It is asked again in the background"
        ) from None


# A bounded pool of threads that does not delay the end of a process.
#
# The pool of the standard library waits at exit until its threads are done. Ours make requests to stores, which
# may not answer for minutes; nothing is lost when such a request ends with the process.
#
# `in_store_thread` is for tasks: calls that may wait for a store have threads of their own, shared by all event loops
# of the process. Hot reads never wait for one of them, nor do they take the threads that event loops give to other
# work.


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_IDLE_SECONDS = 5.0
# Each waits for one answer of a store. Further calls wait for their turn.
STORE_THREADS = 32


class PoolClosedError(ClosedError, RuntimeError):
    """What an Executor raises after its end, and a tidelog error: something was closed while it was in use."""


class _Call(NamedTuple):
    """A call to make, and the future that receives its outcome."""

    future: Future[Any]
    work: Callable[[], Any]

    def run(self, on_end: Callable[[], None]) -> None:
        """Makes the call, unless it was cancelled. `on_end` runs before anybody learns the outcome."""
        if not self.future.set_running_or_notify_cancel():
            on_end()
            return
        try:
            result = self.work()
        except BaseException as error:  # noqa: BLE001 - the result raises it
            on_end()
            self.future.set_exception(error)
        else:
            on_end()
            self.future.set_result(result)


class DaemonPool(Executor):
    """Runs a limited number of calls at once; threads are started as they are needed.

    Calls are counted from `submit` to their end, so that a thread that has taken one and not begun it is not idle.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads_wanted = threads
        self._name = name
        self._guard = Lock()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[Thread] = []
        self._unfinished = 0
        self._is_closed = False

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Runs a call in one of the threads; RuntimeError after the end, as an Executor does."""
        future: Future[Result] = Future()
        with self._guard:
            if self._is_closed:
                raise PoolClosedError("the store was closed during this call", hint="Open it again")
            if len(self._threads) < min(self._unfinished + 1, self._threads_wanted):
                self._start_thread()
            self._unfinished += 1
            self._queue.put(_Call(future, lambda: fn(*args, **kwargs)))
        return future

    def _start_thread(self) -> None:
        """Starts one more thread. If that fails, the existing ones serve all calls in turn."""
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
            call.run(self._finished)
            del call  # its result must not stay in memory until the next one comes

    def _finished(self) -> None:
        with self._guard:
            self._unfinished -= 1

    def _take(self) -> _Call | None:
        """The next call; None at the end, and when there was none for a while: forgetting to close leaks nothing."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=_IDLE_SECONDS)
            with self._guard:
                if self._queue.empty():
                    self._threads.remove(current_thread())
                    return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more calls. Waiting ones still run unless they are cancelled; `wait` returns after all of them."""
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


# Applies the same work to many items in parallel, in a few threads that end with it.
#
# Invariants
# - The caller works too: if no thread can be started, as at the end of the interpreter, it does all of it.
# - Each item is processed once, even if others fail. The first error, in the order of the items, is raised when
#   all are done; an interrupted caller starts no more of them, and waits for those in progress.


Item = TypeVar("Item")


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item], threads: int, name: str) -> list[Result]:
    """The results of the work, in the order of the items."""
    run = _Run(work, items)
    helpers = [Thread(target=run.help, name=f"{name} {number}", daemon=True) for number in range(1, threads)]
    begun: list[Thread] = []
    try:
        with contextlib.suppress(RuntimeError):
            for helper in helpers[: len(items) - 1]:
                helper.start()
                begun.append(helper)
        run.help()
    except BaseException:
        run.stop()
        raise
    finally:
        for helper in begun:
            helper.join()
    return run.outcome()


class _Run(Generic[Item, Result]):
    def __init__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> None:
        self._work = work
        self._items = items
        self._results: dict[int, Result] = {}
        self._errors: dict[int, BaseException] = {}
        self._guard = Lock()
        self._next = 0

    def help(self) -> None:
        while (number := self._take()) is not None:
            try:
                self._results[number] = self._work(self._items[number])
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self._errors[number] = error
                if not isinstance(error, Exception):
                    self.stop()

    def _take(self) -> int | None:
        with self._guard:
            number = self._next
            self._next = number + 1
            return number if number < len(self._items) else None

    def stop(self) -> None:
        with self._guard:
            self._next = len(self._items)

    def outcome(self) -> list[Result]:
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[number] for number in range(len(self._items))]
