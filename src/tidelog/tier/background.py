"""Work that comes back: a few threads share the upkeep of many topics.

Invariants
- One task never runs twice at the same time, and says itself when it wants to run next. One that says `NEVER` rests,
  and costs nothing, until somebody wakes it.
- What a task raises is written to the log and does not end the thread: it runs again after a pause.
- Cancelling waits for a run that is under way, but not for ever: what hangs in a dead store must not hold up an exit.
  The patience is one for all that are cancelled soon after each other: many that hang take no longer than one.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Condition, Thread, current_thread

from tidelog.limits import start_thread

_logger = logging.getLogger("tidelog.tier")
NEVER = float("inf")
_PAUSE_AFTER_ERROR_SECONDS = 10.0
_PATIENCE_SECONDS = 5.0
_BRIEFLY_SECONDS = 0.05
_NEW_PATIENCE_AFTER_SECONDS = 30.0


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
        """None of them runs again; waits for those that are running, for some seconds in all."""
        with self._changed:
            for task in tasks:
                task.is_cancelled = True
            if any(map(_runs_elsewhere, tasks)):
                self._wait_for_end_of(tasks)

    def _wait_for_end_of(self, tasks: Sequence[Task]) -> None:
        if not self._changed.wait_for(lambda: not any(map(_runs_elsewhere, tasks)), self._patience_left()):
            self._hopeless_until = time.monotonic() + _NEW_PATIENCE_AFTER_SECONDS

    def attempt(self, work: Callable[[], None]) -> None:
        """Does something at once that is not worth a long wait: it may go on by itself when this returns.

        As long as attempts get through, each is waited for. One that does not takes the patience for those after it.
        """
        attempted = in_thread(work, f"{self._name} attempt")
        try:
            attempted.result(self._patience_seconds if time.monotonic() > self._hopeless_until else _BRIEFLY_SECONDS)
        except TimeoutError:
            self._hopeless_until = time.monotonic() + _NEW_PATIENCE_AFTER_SECONDS

    def _patience_left(self) -> float:
        """Seconds that whoever ends something now waits for it."""
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
                        continue  # cancelled, or scheduled anew since
                    task.runs_in, task.again = current_thread(), False
                    return task
                self._changed.wait(self._queue[0][0] - now if self._queue else None)
        return None

    def _finished(self, task: Task, delay_seconds: float | None) -> None:
        """In one step, so that whoever asks for another run just then is not overruled. None: it does not run again."""
        with self._changed:
            task.runs_in = None
            if delay_seconds is not None:
                self.schedule(task, 0.0 if task.again else delay_seconds)
            self._changed.notify_all()


def _runs_elsewhere(task: Task) -> bool:
    return task.runs_in not in (None, current_thread())


def in_thread(work: Callable[[], None], name: str) -> Future[None]:
    """Runs something once, in a thread that does not hold up an exit; the result says how it went."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    try:
        Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:  # the interpreter ends, and lets no thread begin any more
        run()
    return outcome
