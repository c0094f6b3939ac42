"""The threads that write for all open logs of a process: a few for each file system, not one for each log.

    append -> a log has work -> `call`: the log is queued -> a worker serves it -> nothing left: it rests
                                   ^                                             |
                                   +------ the timer, when it is due again ------+

Invariants
- One worker at a time serves one log (`AppendQueue.begin_service`): offsets, frames and deliveries keep one order. Any
  thread will do: each continues from the state that the previous one left.
- A log that was called is served: in the same step in which it is queued, an idle worker is woken, or another one is
  started, or, if the maximum number is working, one of them serves it before it rests. Calling twice is harmless.
- A log that is served for long while others wait is requeued after them (`is_crowded`): no busy log starves the others.
- A disk that hangs blocks only the logs on it: each file system (`Files.device`) has workers of its own. On one file
  system, as many logs may hang as there are workers before the others there wait too.
- A worker blocks on nothing but the disk: a log that has to wait for a time releases the worker, and the timer calls
  it. The timer wakes at the earliest time requested; spurious calls are harmless: a log called for
  nothing checks again.
- A log at rest keeps its file open only while few do (`may_keep_file`): ten thousand logs need a few hundred
  descriptors. Unsynced data keeps its file open while that is possible, so that a sync covers many writes.
- While there are logs, a few descriptors are kept in reserve for closing them (`limits.reserve`).
- The threads end with the last log. They are daemons: exit does not wait for them, and `shutdown` closes the logs.
- A forked child has none of these threads; it starts with pools of its own.
- Lock order: a log's mutex, then the pool's. Nothing in here calls a log while it holds a lock.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import time
from collections import deque
from collections.abc import Hashable
from pathlib import Path
from threading import TIMEOUT_MAX, Condition, Lock, Thread
from typing import Protocol

from tidelog.errors import ExhaustedError
from tidelog.files import Files
from tidelog.limits import reserve, start_thread

MAX_WORKERS = 16
"""On one file system. More syncs than this at once make no disk faster."""
MAX_IDLE_FILES = 128
"""This many idle logs may keep their files open; opening one again takes microseconds."""
MAX_UNSYNCED_FILES = 384
"""This many may have an unsynced file open; one more is synced at once. Half of the usual limit of 1,024."""


class Served(Protocol):
    """A log as the pool sees it. `alarm_at` is the pool's: when the timer calls it next."""

    alarm_at: float | None

    def serve(self) -> None:
        """Does what there is to do, in a worker. Raises nothing."""
        ...

    def ring(self) -> None:
        """By the timer: calls a worker, unless one is there."""
        ...


class WriterPool:
    """The workers and the timer of one file system."""

    def __init__(self, device: Hashable) -> None:
        self._device = device
        self.members: set[Served] = set()
        self._open_files: set[Served] = set()
        self._guard = Lock()
        self._queue: deque[Served] = deque()
        self._idle: list[Lock] = []
        self._workers = 0
        self._is_over = False
        self._alarms: list[tuple[float, int, Served]] = []
        self._order = itertools.count()
        self._alarms_changed = Condition(self._guard)

    # For logs

    @property
    def is_crowded(self) -> bool:
        """Whether other logs wait and no worker is free to serve them."""
        return bool(self._queue) and not self._idle and self._workers >= MAX_WORKERS

    def call(self, log: Served) -> None:
        """Some worker serves this log soon."""
        with self._guard:
            self._queue.append(log)
            idle = self._idle
            if idle:
                # No call in between: Ctrl-C may raise after any, and a worker that is never woken would be lost.
                bed = idle[-1]
                del idle[-1]
                bed.release()
            elif self._workers < MAX_WORKERS:
                # No thread can be started, or the interpreter ends: the existing ones serve it in turn.
                with contextlib.suppress(RuntimeError, ExhaustedError):
                    self._start_worker()

    def call_within(self, log: Served, seconds: float) -> None:
        """The timer calls this log then, or before."""
        moment = time.monotonic() + seconds
        with self._guard:
            if log.alarm_at is not None and log.alarm_at <= moment:
                return
            log.alarm_at = moment
            heapq.heappush(self._alarms, (moment, next(self._order), log))
            if self._alarms[0][2] is log:
                self._alarms_changed.notify()

    def may_keep_file(self, log: Served, *, is_synced: bool) -> bool:
        """By a log that comes to rest with its file open. If not, it closes it."""
        with self._guard:
            self._open_files.add(log)
            if len(self._open_files) <= (MAX_IDLE_FILES if is_synced else MAX_UNSYNCED_FILES):
                return True
            self._open_files.remove(log)
            return False

    def file_is_closed(self, log: Served) -> None:
        """By one that has let go of it for another reason."""
        with self._guard:
            self._open_files.discard(log)

    def leave(self, log: Served) -> None:
        self.file_is_closed(log)
        with _guard:
            self.members.discard(log)
            if self.members or self._is_over:
                return
            _pools.pop(self._device, None)
            self._end()
        reserve.let_go()

    # Workers

    def start(self) -> None:
        """The first worker and the timer: when the interpreter ends, no thread can be started."""
        self._start_worker()
        try:
            start_thread(Thread(target=self._keep_time, name="tidelog-timer", daemon=True))
        except BaseException:
            self._end()
            raise

    def _start_worker(self) -> None:
        start_thread(Thread(target=self._work, name=f"tidelog-writer {self._workers}", daemon=True))
        self._workers += 1

    def _work(self) -> None:
        bed = Lock()
        bed.acquire()
        while (log := self._take(bed)) is not None:
            log.serve()
            del log  # a closed log must not stay in memory until the next one has work

    def _take(self, bed: Lock) -> Served | None:
        """The next log, however long that takes; None at the end."""
        while True:
            with self._guard:
                if self._queue:
                    return self._queue.popleft()
                if self._is_over:
                    return None
                self._idle.append(bed)
            bed.acquire()

    def _end(self) -> None:
        with self._guard:
            self._is_over = True
            idle, self._idle = self._idle, []
            for bed in idle:
                bed.release()
            self._alarms.clear()
            self._alarms_changed.notify()

    # The timer

    def _keep_time(self) -> None:
        while (log := self._next_due()) is not None:
            log.ring()
            del log

    def _next_due(self) -> Served | None:
        with self._guard:
            while not self._is_over:
                if not self._alarms:
                    self._alarms_changed.wait()
                    continue
                moment, _, log = self._alarms[0]
                seconds = moment - time.monotonic()
                if log.alarm_at == moment and seconds > 0:
                    del log
                    self._alarms_changed.wait(min(seconds, TIMEOUT_MAX))
                    continue
                heapq.heappop(self._alarms)
                if log.alarm_at == moment:  # else another time was set since
                    log.alarm_at = None
                    return log
        return None


_pools: dict[Hashable, WriterPool] = {}
_guard = Lock()


def join_pool(log: Served, files: Files, directory: Path) -> WriterPool:
    """The pool that writes for a log in this directory, until the log leaves it."""
    device = files.device(directory)
    with _guard:
        pool = _pools.get(device)
        is_new = pool is None
        if pool is None:
            pool = WriterPool(device)
            pool.start()
            _pools[device] = pool
        pool.members.add(log)
    if is_new:
        reserve.hold()  # without the guard: the user of the reserve may wait for a disk
    return pool


def _forget_pools() -> None:
    """In a forked child."""
    global _guard
    _guard = Lock()
    _pools.clear()
    reserve.forget()


os.register_at_fork(after_in_child=_forget_pools)
