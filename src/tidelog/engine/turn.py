"""Whose turn it is to drive an engine: one driver at a time, of threads and of tasks.

Invariants
- Between asking a log for entries and applying them nobody else drives: another driver might roll the engine back
  meanwhile, and apply other entries under the same seqs.
- A driver that comes while another one is at work waits, and finds the work done: it applies what is new since.
- Whoever drives from within its own turn (in `on_result`, or in an orchestrator) need not wait for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Event, Lock, get_ident
from typing import Final

_LOOK_SECONDS: Final = 0.05
_TASK_SECONDS: Final = 0.002


class Turn:
    """The turns of one engine."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: object = None

    @contextmanager
    def taken(self, stop: Event) -> Iterator[bool]:
        """Waits for the turn of this thread; False when it was told to stop before."""
        if self._holder == get_ident():
            yield True
            return
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            if stop.is_set():
                yield False
                return
        with self._as(get_ident()):
            yield True

    @asynccontextmanager
    async def taken_async(self) -> AsyncIterator[None]:
        """Waits for the turn of this task."""
        task = asyncio.current_task()
        if self._holder is task:
            yield
            return
        # A lock of threads can be released by any of them; a task that is cancelled while it waits holds nothing.
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(_TASK_SECONDS)
        with self._as(task):
            yield

    @contextmanager
    def _as(self, holder: object) -> Iterator[None]:
        self._holder = holder
        try:
            yield
        finally:
            self._holder = None
            self._lock.release()
