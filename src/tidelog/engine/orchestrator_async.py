"""Driving an engine from an event loop: as `orchestrator.drive`, with the engine's work in a thread.

The invariants are those of `orchestrator.py`. An engine waits for its disk, so everything that is asked of it runs in
a worker thread, one thing at a time; the orchestrator is awaited in the loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, runtime_checkable

from tidelog.engine.applying import Gathered, apply_entries
from tidelog.engine.orchestrator import (
    MARKS_SECONDS,
    POLL_SECONDS,
    AsyncOrchestrator,
    Driven,
    OnResult,
    Pair,
    check_orchestrator,
)
from tidelog.engine.results import Result


@runtime_checkable
class _RollsBack(Protocol):
    async def agreed_seq(self, applied_seq: int) -> int: ...


@runtime_checkable
class _NotesApplied(Protocol):
    async def note_applied(self, seq: int) -> None: ...


@runtime_checkable
class _Waits(Protocol):
    async def wait(self, after_seq: int, timeout_seconds: float) -> object: ...


async def drive_async(
    engine: Driven,
    orchestrator: AsyncOrchestrator,
    *,
    follow: bool = False,
    up_to: int | None = None,
    on_result: OnResult | None = None,
) -> int:
    """Applies what the orchestrator has, and returns the applied seq; with `follow` goes on until it is cancelled."""
    check_orchestrator(orchestrator, is_async=True)
    driver = _AsyncDriver(engine, orchestrator, on_result)
    await driver.catch_up(up_to)
    while follow:
        await driver.pause()
        await driver.catch_up(up_to)
    return engine.applied_seq


class _AsyncDriver:
    def __init__(self, engine: Driven, orchestrator: AsyncOrchestrator, on_result: OnResult | None) -> None:
        self._engine = engine
        self._orchestrator = orchestrator
        self._on_result = on_result
        self._seen_seq = engine.applied_seq
        self._truncated_seq = 0
        self._told_at = time.monotonic()

    async def catch_up(self, up_to: int | None) -> None:
        async with self._engine.driving.taken_async():
            await self._catch_up(up_to)

    async def _catch_up(self, up_to: int | None) -> None:
        await self._roll_back()
        gathered = Gathered()
        self._seen_seq = min(self._seen_seq, self._engine.applied_seq)  # others may have rolled back
        async for pair in self._orchestrator.entries(self._seen_seq, up_to):
            if gathered.add(pair):
                await self._apply(gathered.take())
                if time.monotonic() > self._told_at + MARKS_SECONDS:
                    await self._tell_marks()
        if gathered.pairs:
            await self._apply(gathered.take())
        await self._tell_marks()

    async def pause(self) -> None:
        if isinstance(self._orchestrator, _Waits):
            await self._orchestrator.wait(self._seen_seq, POLL_SECONDS * 10)
        else:
            await asyncio.sleep(POLL_SECONDS)

    async def _apply(self, batch: list[Pair]) -> None:
        """Applies a batch wholly even if the task is cancelled meanwhile: a thread cannot be stopped halfway."""
        applying = asyncio.ensure_future(asyncio.to_thread(apply_entries, self._engine, batch))
        try:
            results = await asyncio.shield(applying)
        except asyncio.CancelledError:
            await asyncio.wait([applying])
            raise
        self._seen_seq = batch[-1][0]
        for result in results:
            self._hear(result)

    def _hear(self, result: Result) -> None:
        if self._on_result is not None:
            self._on_result(result)

    async def _roll_back(self) -> None:
        if not isinstance(self._orchestrator, _RollsBack):
            return
        applied = self._engine.applied_seq
        agreed = await self._orchestrator.agreed_seq(applied)
        if agreed < applied:
            await asyncio.to_thread(self._engine.rollback_to, agreed)

    async def _tell_marks(self) -> None:
        engine, orchestrator = self._engine, self._orchestrator
        self._told_at = time.monotonic()
        if isinstance(orchestrator, _NotesApplied):
            await orchestrator.note_applied(engine.applied_seq)
        low = min(await orchestrator.low_water_mark(), engine.applied_seq)
        if low > engine.low_water_mark:
            await asyncio.to_thread(engine.update_low_water_mark, low)
        mark = await asyncio.to_thread(lambda: engine.truncation_mark)
        if mark > self._truncated_seq:
            await orchestrator.truncate(mark)
            self._truncated_seq = mark
