"""Appends that return when the object store has the message, and closing that ships what is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.crash.tier_promises import NAME, open_node
from tests.log.workbench import LIMIT_SECONDS

import tidelog
from tidelog.clock import ManualClock
from tidelog.cold.settings import TierSettings
from tidelog.errors import FencedError, InputError, NotSupportedError, StoreUnavailableError
from tidelog.testing import World
from tidelog.topics.directory import LogDirectory
from tidelog.topics.topic import Topic

QUIET = TierSettings(ship_interval_seconds=3600, ship_max_delay_seconds=3600)


@pytest.fixture
def world() -> World:
    return World(clock=ManualClock())


@pytest.fixture
def log(world: World) -> Iterator[LogDirectory]:
    with open_node(world, "a", QUIET) as log:
        yield log


def read_elsewhere(world: World, settings: TierSettings = QUIET) -> list[bytes]:
    """What another node finds once the disk of the first is gone."""
    with open_node(world.lose_disk("a"), "b", settings) as log:
        return [message.value or b"" for message in log.topic(NAME).read()]


def append_with_producer(topic: Topic, value: bytes) -> None:
    with topic.producer("p") as producer:
        producer.append(value, sync="shipped")
        producer.append(value, sequence=0, sync="shipped")


def append_many_with_producer(topic: Topic, value: bytes) -> None:
    with topic.producer("p") as producer:
        producer.append_many([value], sync="shipped")


async def append_as_producer_task(topic: Topic, value: bytes) -> None:
    async with await topic.producer_async("p") as producer:
        await producer.append_async(value, sync="shipped")


WAYS: dict[str, Callable[[Topic, bytes], object]] = {
    "append": lambda topic, value: topic.append(value, sync="shipped"),
    "append_many": lambda topic, value: topic.append_many([value], sync="shipped"),
    "append_async": lambda topic, value: asyncio.run(_awaited(topic.append_async(value, sync="shipped"))),
    "append_many_async": lambda topic, value: asyncio.run(_awaited(topic.append_many_async([value], sync="shipped"))),
    "producer": append_with_producer,
    "producer.append_many": append_many_with_producer,
    "producer.append_async": lambda topic, value: asyncio.run(append_as_producer_task(topic, value)),
}


async def _awaited(coroutine: object) -> object:
    return await coroutine  # type: ignore[misc]  # any awaitable


@pytest.mark.parametrize("way", WAYS)
def test_a_shipped_append_outlives_the_disk(world: World, log: LogDirectory, way: str) -> None:
    """When it returns, another node reads the message from the store alone."""
    WAYS[way](log.topic(NAME), b"kept")
    assert log.topic(NAME).shipped_offset == 1
    assert read_elsewhere(world) == [b"kept"]


def test_an_append_that_cannot_be_shipped_says_where_it_is(world: World, log: LogDirectory) -> None:
    """The message is on the disk and is not to be appended again; it is shipped once the store answers."""
    topic = log.topic(NAME)
    world.store.fail("put", times=None)
    world.store.fail("publish", times=None)
    with pytest.raises(StoreUnavailableError, match="offset 0 on this disk, but not in the store") as caught:
        topic.append(b"kept", sync="shipped")
    assert "Do not append again" in str(caught.value)
    world.heal()
    assert topic.ship() == 1
    assert read_elsewhere(world) == [b"kept"]


def test_the_wait_for_the_store_is_bounded(world: World, log: LogDirectory) -> None:
    """With a timeout a store that does not answer holds nobody up for longer."""
    topic, go_on = log.topic(NAME), threading.Event()
    world.store.on_request = lambda operation, _: None if operation != "publish" else _wait(go_on)
    try:
        with pytest.raises(StoreUnavailableError, match="longer than 0"):
            topic.append(b"kept", sync="shipped", timeout=0.05)
        with pytest.raises(StoreUnavailableError, match="longer than 0"):
            asyncio.run(_awaited(topic.append_async(b"too", sync="shipped", timeout=0.05)))
    finally:
        go_on.set()
    assert topic.append(b"last", sync="shipped") == 2
    assert read_elsewhere(world) == [b"kept", b"too", b"last"]


def _wait(event: threading.Event) -> None:
    assert event.wait(LIMIT_SECONDS)


def test_a_replaced_owner_is_not_told_that_it_shipped(world: World, log: LogDirectory) -> None:
    """Another node owns the topic: the append ends with FencedError."""
    topic = log.topic(NAME)
    topic.append(b"first", sync="shipped")
    with open_node(world, "b", QUIET) as other:
        other.topic(NAME)
        with pytest.raises(FencedError):
            topic.append(b"second", sync="shipped")


@pytest.mark.parametrize("sync", ["shiped", 1])
def test_an_unknown_kind_of_sync_is_refused(log: LogDirectory, sync: object) -> None:
    """A slip does not pass for a promise, and nothing is appended."""
    topic = log.topic(NAME)
    for append in (topic.append, topic.append_async):
        with pytest.raises(InputError, match='True, False or "shipped"'):
            append(b"value", sync=sync)  # type: ignore[arg-type]  # what somebody might try
    assert topic.next_offset == 0


def test_without_a_store_nothing_can_be_shipped() -> None:
    """It is refused before anything is appended."""
    world = World()
    with LogDirectory(Path("/data"), files=world.files("a")) as log:
        topic = log.topic(NAME)
        with pytest.raises(NotSupportedError, match="needs an object store"):
            topic.append(b"value", sync="shipped")
        with topic.producer("p") as producer, pytest.raises(NotSupportedError, match="needs an object store"):
            producer.append(b"value", sync="shipped")
        assert topic.next_offset == 0


# Closing


def test_closing_ships_what_is_left_when_it_is_asked_to(world: World) -> None:
    """With `ship_on_close` a clean end leaves nothing that the disk alone has."""
    settings = TierSettings(ship_interval_seconds=3600, ship_on_close=True)
    with open_node(world, "a", settings) as log:
        log.topic(NAME).append(b"kept")
    assert read_elsewhere(world) == [b"kept"]


def test_closing_ships_nothing_by_default(world: World) -> None:
    """Closing does not wait for the store."""
    with open_node(world, "a", QUIET) as log:
        log.topic(NAME).append(b"kept")
    assert read_elsewhere(world) == []


def test_a_close_that_cannot_ship_closes_and_says_so(world: World) -> None:
    """The directory is free again, and the message is on its disk."""
    settings = TierSettings(ship_interval_seconds=3600, ship_on_close=True)
    log = open_node(world, "a", settings)
    log.topic(NAME).append(b"kept")
    world.store.fail("put", times=None)
    world.store.fail("publish", times=None)
    with pytest.raises(
        StoreUnavailableError, match=r"close: .*only on this disk: offset 0 .*It is closed, and nothing is lost"
    ):
        log.close()
    world.heal()
    with open_node(world, "a", settings) as log:
        assert [message.value for message in log.topic(NAME).read()] == [b"kept"]
    assert read_elsewhere(world) == [b"kept"]


def test_opening_takes_the_setting(tmp_path: Path) -> None:
    """`ship_on_close` is a setting like the others: the bucket has what a closed directory had."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket", ship_on_close=True) as log:
        log.topic(NAME).append(b"kept")
    assert len(list((tmp_path / "bucket").rglob("*.tlog"))) == 1
