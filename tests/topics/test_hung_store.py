"""A store that does not answer: what is on the disk is read all the same, however many wait for the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from threading import Event

import pytest
from tests.cold.station import SMALL_FILES as NOTHING_IN_MEMORY
from tests.crash import tier_promises
from tests.crash.tier_promises import NAME, open_node, tier_settings
from tests.log.workbench import LIMIT_SECONDS

from tidelog.clock import ManualClock
from tidelog.store.scheduler import STORE_THREADS
from tidelog.testing import World
from tidelog.topics.directory import LogDirectory

VALUES = [b"%030d" % number for number in range(40)]


class Half:
    """A topic whose older messages are in a store that gives no answer until it is let go."""

    def __init__(self, log: LogDirectory, world: World) -> None:
        self.topic = log.topic(NAME)
        self.topic.append_many(VALUES[:30], sync=True)
        self.topic.ship()
        self.topic.prune()
        self.topic.append_many(VALUES[30:], sync=True)
        self.go_on = Event()
        self._world = world
        assert 0 < self.topic.hot_start_offset <= 30

    def hang(self) -> None:
        self._world.store.on_request = self._hold

    def _hold(self, operation: str, _key: str) -> None:
        assert self.go_on.wait(LIMIT_SECONDS)

    async def read_cold(self) -> bytes:
        async for message in self.topic.read_async(0, 1):
            return message.value or b""
        raise AssertionError("nothing was read")

    async def read_hot(self) -> list[bytes]:
        return [message.value or b"" async for message in self.topic.read_async(30, 40)]


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[Half]:
    monkeypatch.setattr(tier_promises, "SMALL_FILES", NOTHING_IN_MEMORY)
    world = World(clock=ManualClock())
    with open_node(world, "a", tier_settings(local_retention_bytes=1)) as log:
        yield Half(log, world)


def test_hung_cold_reads_do_not_hold_up_hot_ones(half: Half) -> None:
    """More tasks than there are threads wait for the store; a task that reads what is on the disk does not."""

    async def run() -> None:
        half.hang()
        waiting = [asyncio.create_task(half.read_cold()) for _ in range(STORE_THREADS + 10)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                assert await half.read_hot() == VALUES[30:]
        finally:
            half.go_on.set()
        assert set(await asyncio.gather(*waiting)) == {VALUES[0]}

    asyncio.run(run())


def test_a_subscription_that_waits_for_the_store_does_not_hold_up_another(half: Half) -> None:
    """One that reads history hangs; one that is at the end of the topic gets its messages."""

    async def run() -> None:
        behind = [await half.topic.subscribe_async(f"behind-{number}") for number in range(10)]
        ahead = await half.topic.subscribe_async("ahead", start=30)
        half.hang()
        waiting = [asyncio.create_task(sub.receive_async(timeout=LIMIT_SECONDS)) for sub in behind]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                message = await ahead.receive_async(timeout=LIMIT_SECONDS)
                assert message is not None
                assert message.value == VALUES[30]
        finally:
            half.go_on.set()
        received = await asyncio.gather(*waiting)
        assert {message.value for message in received if message is not None} == {VALUES[0]}

    asyncio.run(run())
