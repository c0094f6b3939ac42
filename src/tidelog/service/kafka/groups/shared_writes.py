"""Writes that share: those that arrive while another one is under way are made together, by one call of the store.

Invariants
- One call at a time, in a worker thread. What was asked for later is written later, or by the same call; of several
  values for a key in one call the last one is written.
- A write that has begun is finished, whatever becomes of the task that asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from tidelog.errors import TidelogError
from tidelog.store.scheduler import in_store_thread

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SharedWrites(Generic[Key, Value]):
    """Collects writes for one store; `store` returns the keys that failed."""

    def __init__(self, store: Callable[[Mapping[Key, Value]], Mapping[Key, TidelogError]]) -> None:
        self._store = store
        self._waiting: list[tuple[Mapping[Key, Value], asyncio.Future[dict[Key, TidelogError]]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def write(self, changes: Mapping[Key, Value]) -> dict[Key, TidelogError]:
        """Returns when all of it is durable or has failed, with those that failed."""
        if not changes:
            return {}
        loop = asyncio.get_running_loop()
        done: asyncio.Future[dict[Key, TidelogError]] = loop.create_future()
        self._waiting.append((changes, done))
        if self._writer is None:
            self._writer = loop.create_task(self._write_all())
        return await done

    async def finish(self) -> None:
        """Returns when nothing is under way."""
        while self._writer is not None:
            await asyncio.wait([self._writer])

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                merged: dict[Key, Value] = {}
                for changes, _ in batch:
                    merged.update(changes)
                failed = await self._try(merged)
                for changes, done in batch:
                    if not done.done():
                        done.set_result({key: failed[key] for key in changes if key in failed})
        finally:
            self._writer = None

    async def _try(self, merged: Mapping[Key, Value]) -> Mapping[Key, TidelogError]:
        try:
            return await in_store_thread(self._store, merged)
        except TidelogError as error:
            return dict.fromkeys(merged, error)
