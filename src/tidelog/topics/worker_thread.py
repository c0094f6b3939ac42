"""Work that may wait for a disk or a store, done in a thread while its task waits.

Invariants
- The loop is never blocked. What may wait for a store has threads apart from those of the loop (`daemon_pool`).
- What was made for a task that is cancelled meanwhile is given back: nobody else would ever close it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from tidelog.tier.daemon_pool import in_store_thread

Made = TypeVar("Made")


async def made_in_worker_thread(make: Callable[[], Made], give_back: Callable[[Made], None]) -> Made:
    """What `make` returns. If the task is cancelled while it works, `give_back` takes it, in a worker thread too."""
    making = _Making(make, give_back)
    try:
        return await in_store_thread(making.run)
    except asyncio.CancelledError:
        left = making.abandon()
        if left is not None:
            # Not waited for: who cancels does not want to wait, and the loop waits for its threads when it ends.
            asyncio.get_running_loop().run_in_executor(None, give_back, left)
        raise


class _Making(Generic[Made]):
    """One such work: whoever comes second, the thread with the result or the task that gives up, sees to it."""

    def __init__(self, make: Callable[[], Made], give_back: Callable[[Made], None]) -> None:
        self._make = make
        self._give_back = give_back
        self._lock = Lock()
        self._is_abandoned = False
        self._made: Made | None = None

    def run(self) -> Made:
        """In the worker thread."""
        made = self._make()
        with self._lock:
            self._made = made
            is_abandoned = self._is_abandoned
        if is_abandoned:
            self._give_back(made)
        return made

    def abandon(self) -> Made | None:
        """In the task: what is there already and nobody takes."""
        with self._lock:
            self._is_abandoned = True
            return self._made
