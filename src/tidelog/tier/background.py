"""Work that comes back: a few threads share the upkeep of many topics.

Invariants
- One task never runs twice at the same time, and says itself when it wants to run next.
- What a task raises is written to the log and does not end the thread: it runs again after a pause.
- Cancelling waits for a run that is under way, but not for ever: what hangs in a dead store must not hold up an exit.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable
from threading import Condition, Thread, current_thread

_logger = logging.getLogger("tidelog.tier")
_PAUSE_AFTER_ERROR_SECONDS = 10.0
_CANCEL_PATIENCE_SECONDS = 5.0


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

    def add(self, work: Callable[[], float], delay_seconds: float = 0.0) -> Task:
        """Begins to run something."""
        task = Task(self, work)
        self.schedule(task, delay_seconds)
        return task

    def schedule(self, task: Task, delay_seconds: float) -> None:
        """Sets when a task runs next."""
        with self._changed:
            if self._is_closed or task.is_cancelled:
                return
            if task.runs_in is not None:
                task.again = True
                return
            task.due = time.monotonic() + delay_seconds
            heapq.heappush(self._queue, (task.due, next(self._order), task))
            self._start_threads()
            self._changed.notify_all()

    def cancel(self, *tasks: Task) -> None:
        """None of them runs again; waits for those that are running, for some seconds in all."""
        deadline = time.monotonic() + _CANCEL_PATIENCE_SECONDS
        with self._changed:
            for task in tasks:
                task.is_cancelled = True
            while any(task.runs_in not in (None, current_thread()) for task in tasks):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def close(self) -> None:
        """No task runs again. Threads end by themselves."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _start_threads(self) -> None:
        while len(self._threads) < self._threads_wanted:
            thread = Thread(target=self._run, name=f"{self._name} {len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while (task := self._take()) is not None:
            delay = _PAUSE_AFTER_ERROR_SECONDS
            try:
                delay = task.work()
            except Exception:
                _logger.exception("work in the background failed, and is tried again")
            finally:
                self._finished(task)
            self.schedule(task, 0.0 if task.again else delay)

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

    def _finished(self, task: Task) -> None:
        with self._changed:
            task.runs_in = None
            self._changed.notify_all()
