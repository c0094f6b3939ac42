"""Fetch from the object store: history comes by itself, and a store that hangs delays only those who ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from threading import Event
from typing import Any

import pytest
from tests.cold.station import SMALL_FILES as NOTHING_IN_MEMORY
from tests.crash import tier_promises
from tests.crash.tier_promises import NAME, open_node, tier_settings
from tests.service.kafka.test_server import (
    FETCH,
    LIST_OFFSETS,
    LOOPBACK,
    PRODUCE,
    WAIT_SECONDS,
    Client,
    Running,
    fetch_request,
    fetched,
    produce_request,
    produced,
)

from tidelog.clock import ManualClock
from tidelog.errors import FencedError
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.records import HEADER_BYTES, Control, read_header
from tidelog.service.node import Node
from tidelog.store.scheduler import STORE_THREADS
from tidelog.testing import World
from tidelog.topics.directory import LogDirectory

TOPIC = NAME.replace("/", ".")
VALUES = [b"%030d" % number for number in range(40)]
HOT_FROM = 30
OFFSET_COMMIT = 8


def play(monkeypatch: pytest.MonkeyPatch, work: Callable[[Running, World], Coroutine[Any, Any, None]]) -> None:
    """A server of a topic whose first messages are in the store alone."""
    monkeypatch.setattr(tier_promises, "SMALL_FILES", NOTHING_IN_MEMORY)
    world = World(clock=ManualClock())
    directory = open_node(world, "a", tier_settings(local_retention_bytes=1))
    topic = directory.topic(NAME)
    topic.append_many(VALUES[:HOT_FROM], sync=True)
    topic.ship()
    topic.prune()
    topic.append_many(VALUES[HOT_FROM:], sync=True)
    assert 0 < topic.hot_start_offset <= HOT_FROM
    serve(directory, lambda server: work(server, world))


def serve(directory: LogDirectory, work: Callable[[Running], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        node = Node(directory)
        listening = await node.start(LOOPBACK, LOOPBACK)
        server = Running(node, listening.kafka)
        try:
            await work(server)
        finally:
            await server.close()
            await node.stop()

    asyncio.run(run())


async def read(client: Client, offset: int) -> tuple[int, int]:
    """The first offset and the count of what a Fetch gets."""
    answer = fetched(await client.call(FETCH, 12, fetch_request(offset, topic=TOPIC)))
    assert answer.error_code == 0
    records = bytes(answer.records)
    first, count = read_header(records).base_offset, 0
    while len(records) >= HEADER_BYTES:
        header = read_header(records)
        count += header.record_count
        records = records[header.size :]
    return first, count


async def commit(client: Client) -> int:
    """Commits an offset of a group without members; the error code."""
    module = wire(OFFSET_COMMIT)
    partition = module.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    topic = module.OffsetCommitRequestTopic(name=TOPIC, partitions=[partition])
    request = module.OffsetCommitRequest(group_id="group", topics=[topic])
    response = await client.call(OFFSET_COMMIT, 8, request)
    error: int = response.topics[0].partitions[0].error_code
    return error


def test_history_and_tail_are_fetched_as_one_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the store, from files and from memory, by the same requests."""

    async def work(server: Running, world: World) -> None:
        client, offset = await server.client(), 0
        while offset < len(VALUES):
            first, count = await read(client, offset)
            assert first == offset
            offset += count
        assert offset == len(VALUES)

    play(monkeypatch, work)


def test_a_store_that_hangs_delays_only_those_who_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many consumers of history as there are threads wait, and come back after a disconnect."""

    async def work(server: Running, world: World) -> None:
        go_on = Event()

        def hold(operation: str, _key: str) -> None:
            assert go_on.wait(10 * WAIT_SECONDS)

        client = await server.client()
        await read(client, HOT_FROM)
        world.store.on_request = hold
        waiting: list[Client] = []
        try:
            for _ in range(2):
                waiting = [await server.client() for _ in range(STORE_THREADS)]
                for one in waiting:
                    await one.send(one.request(FETCH, 12, fetch_request(0, topic=TOPIC)))
                assert (await read(client, HOT_FROM))[0] == HOT_FROM
                assert produced(await client.call(PRODUCE, 9, produce_request(b"x", topic=TOPIC)))[0] == 0
                assert await commit(client) == 0
                for one in waiting[1:]:
                    await one.close()
        finally:
            go_on.set()
            world.store.on_request = None
        _, response = await waiting[0].answer(FETCH, 12)
        assert fetched(response).error_code == 0

    play(monkeypatch, work)


def test_a_server_whose_topic_was_taken_over_leads_it_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has messages that the new owner never got, under offsets that others will have."""

    async def work(server: Running, world: World) -> None:
        client = await server.client()
        assert (await read(client, HOT_FROM))[0] == HOT_FROM
        owner = open_node(world, "b", tier_settings())
        await asyncio.to_thread(owner.topic, NAME, take_over=True)
        with pytest.raises(FencedError):
            await asyncio.to_thread(server.node._directory.topic(NAME).ship)
        answer = fetched(await client.call(FETCH, 12, fetch_request(HOT_FROM, topic=TOPIC)))
        assert (answer.error_code, bytes(answer.records)) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, b"")
        assert produced(await client.call(PRODUCE, 9, produce_request(b"lost", topic=TOPIC)))[0] != ErrorCode.NONE
        owner.close()

    play(monkeypatch, work)


def test_partition_that_another_node_holds_is_named_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    """Clients try again several times a second until it is free, and then it is served."""
    world = World(clock=ManualClock())
    holder = open_node(world, "b", tier_settings())
    holder.topic(NAME).append(b"first", sync=True)

    async def work(server: Running) -> None:
        client = await server.client()
        for _ in range(3):
            answer = produced(await client.call(PRODUCE, 9, produce_request(b"x", topic=TOPIC)))
            assert answer == (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1)
        told = [record.getMessage() for record in caplog.records if "NOT_LEADER" in record.getMessage()]
        assert [f"{NAME}, partition 0" in message for message in told] == [True]
        await asyncio.to_thread(holder.close)
        assert produced(await client.call(PRODUCE, 9, produce_request(b"x", topic=TOPIC)))[0] == ErrorCode.NONE

    serve(open_node(world, "a", tier_settings(), ends_leases=False), work)


def test_acks_all_waits_for_the_store_where_the_topic_says_so() -> None:
    """What was answered outlives the disk of the server, with `tidelog.durability=shipped`."""
    world = World(clock=ManualClock())

    async def work(server: Running) -> None:
        client = await server.client()
        for offset, value in enumerate((b"first", b"second")):
            answer = produced(await client.call(PRODUCE, 9, produce_request(value, topic=TOPIC)))
            assert answer == (ErrorCode.NONE, offset)
        taken = await asyncio.to_thread(open_node(world, "b", tier_settings()).topic, NAME, take_over=True)
        assert [message.value for message in taken.read(0)] == [b"first", b"second"]

    serve(open_node(world, "a", tier_settings(durability="shipped")), work)


def test_end_of_a_transaction_outlives_the_disk_with_its_messages() -> None:
    """Loses otherwise: a committed transaction is open for the next owner, whose consumers wait for ever."""
    world = World(clock=ManualClock())
    control = Control(True, 7, 0, 1, 1)

    async def work(server: Running) -> None:
        client = await server.client()
        answer = produced(await client.call(PRODUCE, 9, produce_request(b"paid", topic=TOPIC)))
        assert answer == (ErrorCode.NONE, 0)
        for _ in range(2):  # the second is late: it waits for the first, and changes nothing
            await server.node._broker.write_own_marker(NAME, 0, control)
        taken = await asyncio.to_thread(open_node(world, "b", tier_settings()).topic, NAME, take_over=True)
        assert taken.next_offset == 2

    serve(open_node(world, "a", tier_settings(durability="shipped")), work)


@pytest.mark.parametrize("seconds", [-7200, 7200])
def test_transactions_time_out_by_time_that_passes(seconds: int) -> None:
    """Loses otherwise: a clock that is set an hour ahead aborts every open transaction, and fences its producer."""
    clock = ManualClock()
    world = World(clock=clock)

    async def work(server: Running) -> None:
        transactions = server.node._transactions
        assert transactions is not None
        before_ms = transactions._now_ms()
        clock.jump(seconds)
        assert transactions._now_ms() == before_ms
        clock.advance(5)
        assert transactions._now_ms() == before_ms + 5000

    serve(open_node(world, "a", tier_settings()), work)


def test_consumers_get_nothing_that_the_loss_of_the_disk_could_take_back() -> None:
    """With `tidelog.durability=shipped` the high watermark is what the store has."""
    world = World(clock=ManualClock())

    async def work(server: Running) -> None:
        client = await server.client()
        answer = produced(await client.call(PRODUCE, 9, produce_request(b"in a file", acks=1, topic=TOPIC)))
        assert answer == (ErrorCode.NONE, 0)
        partition = fetched(await client.call(FETCH, 12, fetch_request(0, topic=TOPIC)))
        assert (partition.high_watermark, bytes(partition.records)) == (0, b"")
        partition = fetched(await client.call(FETCH, 12, fetch_request(1, topic=TOPIC)))
        assert (partition.error_code, bytes(partition.records)) == (ErrorCode.NONE, b""), "its end is not out of range"
        partition = fetched(await client.call(FETCH, 12, fetch_request(2, topic=TOPIC)))
        assert partition.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        await client.call(PRODUCE, 9, produce_request(b"in the store", topic=TOPIC))
        assert await read(client, 0) == (0, 2)

    serve(open_node(world, "a", tier_settings(durability="shipped")), work)


def test_the_end_of_a_partition_does_not_go_back_with_its_owner() -> None:
    """What the owner before had acknowledged was recovered from its flushes. Until the store confirms it, clients hear
    that the end is not known yet, and not the end of what was shipped: that is before what others have read."""
    world = World(clock=ManualClock())
    settings = tier_settings(durability="shipped")
    before = open_node(world, "a", settings).topic(NAME)
    before.append(b"acknowledged", sync=True)
    assert before.shipped_offset == 0

    async def asked(client: Any, version: int, timestamp: int) -> tuple[int, int]:
        module = wire(LIST_OFFSETS)
        part = module.ListOffsetsRequestPartition(partition_index=0, timestamp=timestamp)
        topic = module.ListOffsetsRequestTopic(name=TOPIC, partitions=[part])
        answer = await client.call(LIST_OFFSETS, version, module.ListOffsetsRequest(replica_id=-1, topics=[topic]))
        found = answer.topics[0].partitions[0]
        return found.error_code, found.offset

    async def work(server: Running) -> None:
        client = await server.client()
        assert await asked(client, 7, -1) == (ErrorCode.OFFSET_NOT_AVAILABLE, -1)
        assert await asked(client, 4, -1) == (ErrorCode.LEADER_NOT_AVAILABLE, -1)
        assert await asked(client, 7, 1) == (ErrorCode.OFFSET_NOT_AVAILABLE, -1)
        assert await asked(client, 7, -2) == (ErrorCode.NONE, 0)
        await client.call(PRODUCE, 9, produce_request(b"in the store", topic=TOPIC))
        assert await asked(client, 7, -1) == (ErrorCode.NONE, 2)

    directory = open_node(world, "b", settings)
    directory.topic(NAME, take_over=True)
    serve(directory, work)
