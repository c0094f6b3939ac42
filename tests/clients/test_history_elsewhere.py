"""Unmodified clients of Kafka that are far behind: they read history from nodes that do not own it, and the rest from
the owner, each message once and in order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from tests.clients.test_several_nodes import bootstrap, in_thread
from tests.service.installation import Installation, installed, run
from tests.service.kafka.test_server import FETCH, Client, fetch_request, fetched
from tests.service.test_placement import metadata

from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.partition_reader import ReadCounts
from tidelog.topics.names import parse_topic_name
from tidelog.topics.topic import Topic

TOPIC, LISTED = "shop/orders", "shop.orders"
SMALL_LOG: dict[str, Any] = {"rotate_max_bytes": 20_000, "cache_max_messages": 0, "local_retention_bytes": 1}
HISTORY, HOT = 2000, 50
WAIT_SECONDS = 100
PACED = {"max.partition.fetch.bytes": 20_000, "queued.min.messages": 1, "fetch.queue.backoff.ms": 10}


def value(number: int) -> bytes:
    return b"%0100d" % number


def log_of(nodes: Installation) -> Topic:
    """The partition at its owner."""
    served = nodes.nodes[nodes.owner(TOPIC)]._broker.find(parse_topic_name(TOPIC))
    assert served is not None
    return served.open[0].topic


def append(topic: Topic, values: Iterable[bytes]) -> None:
    """In small groups: a file never ends within one."""
    for some in batched(values, 10):
        topic.append_many(some)
    topic.flush()


def batched(values: Iterable[bytes], count: int) -> Iterator[list[bytes]]:
    left = iter(values)
    while some := list(itertools.islice(left, count)):
        yield some


def to_history(topic: Topic) -> None:
    """Everything that is there goes to the store, and only there."""
    topic._log.end_file()
    topic.ship()
    topic.prune()


def counts(nodes: Installation, number: int) -> ReadCounts:
    return nodes.nodes[number]._broker.read_counts


def others(nodes: Installation) -> list[int]:
    """The nodes that do not own the partition."""
    return [number for number in nodes.nodes if number != nodes.owner(TOPIC)]


@contextlib.asynccontextmanager
async def behind(root: Path, **settings: Any) -> AsyncIterator[Installation]:
    """Three nodes and a partition, most of which is in the store alone."""
    given = {"far_behind_bytes": 20_000, **settings}
    async with installed(root, 3, log_settings=SMALL_LOG, **given) as nodes:
        await nodes.create_topic(TOPIC, 1)
        topic = log_of(nodes)
        append(topic, map(value, range(HISTORY)))
        await asyncio.to_thread(to_history, topic)
        append(topic, map(value, range(HISTORY, HISTORY + HOT)))
        assert HISTORY - 20 < topic.hot_start_offset <= HISTORY
        await nodes.give_slots(nodes.owner(TOPIC))
        yield nodes


def consume(
    settings: dict[str, Any],
    count: int,
    step: Callable[[int], None] = lambda done: None,
    isolation: str = "read_committed",
    more: Mapping[str, Any] | None = None,
) -> list[tuple[int, bytes]]:
    """So many messages from the beginning on, up to the end of the partition, which is told once and then."""
    consumer = Consumer(
        {
            **settings,
            "group.id": "far-behind",
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "fetch.error.backoff.ms": 50,
            "isolation.level": isolation,
            **(more or {}),
        }
    )
    consumer.assign([TopicPartition(LISTED, 0, 0)])
    found: list[tuple[int, bytes]] = []
    ends = 0
    try:
        for _ in range(WAIT_SECONDS * 10):
            for message in consumer.consume(20, 0.1):
                error = message.error()
                if error is None:
                    found.append((message.offset() or 0, message.value() or b""))
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    assert len(found) >= count, "this is not the end"
                    ends += 1
            step(len(found))
            if ends:
                return found
        raise AssertionError(f"{len(found)} of {count} messages came")
    finally:
        consumer.close()


WHOLE = [(number, value(number)) for number in range(HISTORY + HOT)]


def test_a_consumer_far_behind_reads_from_another_node(tmp_path: Path) -> None:
    """Everything once and in order, and its owner reads nothing from the store for it."""

    async def work() -> None:
        async with behind(tmp_path) as nodes:
            owner = nodes.owner(TOPIC)
            assert await in_thread(consume, bootstrap(nodes), len(WHOLE)) == WHOLE
            assert (counts(nodes, owner).sent_away, counts(nodes, owner).store) == (1, 0)
            assert sorted(counts(nodes, number).for_others > 0 for number in others(nodes)) == [False, True]
            text = await asyncio.to_thread(scrape, nodes, owner)
            assert "tidelog_consumers_sent_away_total 1" in text
            assert "tidelog_reads_for_others_total 0" in text

    run(work())


def scrape(nodes: Installation, number: int) -> str:
    with urllib.request.urlopen(f"{nodes.addresses[number].http}/metrics", timeout=WAIT_SECONDS) as answer:
        found: str = answer.read().decode()
    return found


@pytest.mark.parametrize("event", ["stopped", "moved to the reader", "moved elsewhere"])
def test_a_consumer_far_behind_goes_on_when_something_happens(tmp_path: Path, event: str) -> None:
    """The node that it reads from ends, or the partition gets another owner, in the middle of its history."""

    async def work() -> None:
        async with behind(tmp_path) as nodes:
            loop, is_under_way = asyncio.get_running_loop(), asyncio.Event()

            def step(done: int) -> None:
                if done >= 300:
                    loop.call_soon_threadsafe(is_under_way.set)

            reading = asyncio.ensure_future(
                asyncio.to_thread(consume, bootstrap(nodes, nodes.owner(TOPIC)), len(WHOLE), step, more=PACED)
            )
            waiting = asyncio.ensure_future(is_under_way.wait())
            await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            reader = next(number for number in others(nodes) if counts(nodes, number).for_others)
            if event == "stopped":
                await nodes.stop_node(reader)
            elif event == "moved to the reader":
                await nodes.move(TOPIC, 0, reader)
            else:
                await nodes.move(TOPIC, 0, next(number for number in others(nodes) if number != reader))
            assert await reading == WHOLE

    run(work())


def test_history_with_transactions_is_read_as_its_owner_would_give_it(tmp_path: Path) -> None:
    """Messages of aborted transactions are not seen by readers of committed messages, those of committed ones are, and
    at an open one they stop; others see everything."""

    def fill(settings: dict[str, Any]) -> list[bytes]:
        producer = Producer({**settings, "transactional.id": "orders", "linger.ms": 0})
        producer.init_transactions(WAIT_SECONDS)
        committed = []
        for round_ in range(30):
            producer.begin_transaction()
            some = [b"%d-%d" % (round_, number) for number in range(10)]
            for one in some:
                producer.produce(LISTED, one.ljust(100), partition=0)
            if round_ % 3 == 0:
                producer.flush(WAIT_SECONDS)
                producer.abort_transaction(WAIT_SECONDS)
            else:
                producer.commit_transaction(WAIT_SECONDS)
                committed += some
        return committed

    async def work() -> None:
        async with behind(tmp_path) as nodes:
            owner = nodes.owner(TOPIC)
            committed = await in_thread(fill, bootstrap(nodes))
            open_one = Producer({**bootstrap(nodes), "transactional.id": "open", "linger.ms": 0})
            await in_thread(open_one.init_transactions, WAIT_SECONDS)
            open_one.begin_transaction()
            open_one.produce(LISTED, b"undecided", partition=0)
            await in_thread(open_one.flush, WAIT_SECONDS)
            topic = log_of(nodes)
            append(topic, [value(0)] * 300)
            await asyncio.to_thread(to_history, topic)
            assert topic.hot_start_offset > HISTORY + HOT + 600
            expected = [one for _, one in WHOLE] + [one.ljust(100) for one in committed]
            found = await in_thread(consume, bootstrap(nodes), len(expected))
            assert [one for _, one in found] == expected
            assert [offset for offset, _ in found] == sorted({offset for offset, _ in found})
            assert counts(nodes, owner).sent_away == 1
            assert sum(counts(nodes, number).for_others for number in others(nodes)) > 0
            assert counts(nodes, owner).store <= 1, "what its owner reads is around the open transaction"
            everything = await asyncio.to_thread(lambda: consume(bootstrap(nodes), 0, isolation="read_uncommitted"))
            assert len(everything) == HISTORY + HOT + 300 + 1 + 300
            assert counts(nodes, owner).sent_away == 2

    run(work())


def test_clients_that_know_no_other_replicas_are_served_by_the_owner(tmp_path: Path) -> None:
    """aiokafka asks in a version without them."""

    async def work() -> None:
        async with behind(tmp_path) as nodes:
            owner = nodes.owner(TOPIC)
            host, port = nodes.addresses[owner].kafka
            consumer = AIOKafkaConsumer(bootstrap_servers=f"{host}:{port}", enable_auto_commit=False)
            await consumer.start()
            try:
                place = AioPartition(LISTED, 0)
                consumer.assign([place])
                consumer.seek(place, 0)
                found: list[tuple[int, bytes]] = []
                async with asyncio.timeout(WAIT_SECONDS):
                    while len(found) < len(WHOLE):
                        for some in (await consumer.getmany(timeout_ms=1000)).values():
                            found += [(one.offset, one.value or b"") for one in some]
                assert found == WHOLE
            finally:
                await consumer.stop()

    run(work())


async def ask(client: Client, offset: int, version: int = 12, rack: str = "", **more: Any) -> Any:
    request = fetch_request(offset, **more)
    request.rack_id = rack
    return fetched(await client.call(FETCH, version, request))


def test_who_is_sent_away_and_who_is_not(tmp_path: Path) -> None:
    """The far behind, once; not those at the tail, those a little behind, those that come back, and old versions."""

    async def work() -> None:
        async with behind(tmp_path) as nodes:
            owner = nodes.owner(TOPIC)
            client = await nodes.client(owner)
            for offset in (HISTORY + HOT, HISTORY + 1, HISTORY, HISTORY - 20):
                answer = await ask(client, offset)
                assert (answer.error_code, answer.preferred_read_replica) == (0, -1)
                assert bool(len(answer.records)) is (offset < HISTORY + HOT)
            for version in (4, 10):
                assert (await ask(await nodes.client(owner), 0, version)).preferred_read_replica == -1
            answer = await ask(client, 0)
            assert answer.preferred_read_replica in others(nodes)
            assert (answer.error_code, bytes(answer.records), answer.high_watermark) == (0, b"", HISTORY + HOT)
            for offset in (0, 0, 7):  # it ignores that
                answer = await ask(client, offset)
                assert (answer.preferred_read_replica, len(answer.records) > 0) == (-1, True)
            assert (await ask(await nodes.client(owner), 0)).preferred_read_replica in others(nodes)

    run(work())


def test_a_node_that_reads_history_sends_back_to_the_owner(tmp_path: Path) -> None:
    """At the end of what is shipped, and where something fails; it never says that an offset is out of range, or the
    end. To those who come by old metadata it says that it does not lead."""

    async def work() -> None:
        async with behind(tmp_path) as nodes:
            owner, other = nodes.owner(TOPIC), others(nodes)[0]
            client = await nodes.client(other)
            for offset in (HISTORY, HISTORY + HOT, 10**9):
                answer = await ask(client, offset)
                assert (answer.error_code, bytes(answer.records)) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, b"")
            answer = await ask(client, 0, version=10)
            assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
            answer = await ask(client, HISTORY - 5)
            assert (answer.error_code, answer.preferred_read_replica, answer.high_watermark) == (0, -1, HISTORY)
            assert len(answer.records) > 0
            for offset in (HISTORY, HISTORY + HOT, 10**9):
                answer = await ask(client, offset)
                assert (answer.error_code, answer.preferred_read_replica, bytes(answer.records)) == (0, owner, b"")
            del nodes.owners[parse_topic_name(TOPIC), 0]
            answer = await ask(client, HISTORY)
            assert (answer.error_code, answer.high_watermark) == (ErrorCode.OFFSET_NOT_AVAILABLE, -1)

    run(work())


def test_metadata_names_the_nodes_that_read_history(tmp_path: Path) -> None:
    """As replicas, the same at every node: Java's clients go to no other node. Consumers are sent to their own zone."""

    async def work() -> None:
        zones = {1: "a", 2: "b", 3: "c", 4: "c"}
        async with installed(tmp_path, 4, log_settings=SMALL_LOG, far_behind_bytes=1, zones=zones) as nodes:
            await nodes.create_topic(TOPIC, 5)
            found = []
            for number in nodes.nodes:
                answer = await metadata(nodes, number)
                assert {one.node_id: one.rack for one in answer.brokers} == zones
                found.append([(one.leader_id, *one.replica_nodes) for one in answer.topics[0].partitions])
                assert all(one.isr_nodes == one.replica_nodes for one in answer.topics[0].partitions)
            assert found == found[:1] * 4
            for leader, first, *replicas in found[0]:
                assert leader == first
                assert {zones[one] for one in replicas} == {"a", "b", "c"} - ({zones[leader]} & {"a", "b"})
            assert len({replicas[1:] for replicas in found[0]}) > 1
            topic = log_of(nodes)
            append(topic, map(value, range(1000)))
            await asyncio.to_thread(to_history, topic)
            readers = next(one for one in found[0] if one[0] == nodes.owner(TOPIC))[1:]
            client_of = [await nodes.client(nodes.owner(TOPIC)) for _ in range(4)]
            near = (await ask(client_of[0], 0, rack="b")).preferred_read_replica
            assert zones[near] == "b"
            sent = {(await ask(one, 0, rack="elsewhere")).preferred_read_replica for one in client_of[1:]}
            assert sent <= set(readers)
            assert len(sent) > 1

    run(work())


def test_an_incremental_answer_says_where_to_read_on(tmp_path: Path) -> None:
    """A consumer with a fetch session waits otherwise for ever for what it has been told once."""

    async def work() -> None:
        async with behind(tmp_path) as nodes:
            client = await nodes.client(nodes.owner(TOPIC))
            request = fetch_request(HISTORY + HOT)
            request.session_epoch = 0
            made = await client.call(FETCH, 12, request)
            assert made.session_id > 0
            request = fetch_request(0)
            request.session_id, request.session_epoch = made.session_id, 1
            assert fetched(await client.call(FETCH, 12, request)).preferred_read_replica in others(nodes)

    run(work())


def test_history_is_read_from_the_owner_where_the_setting_says_so(tmp_path: Path) -> None:
    """`history_from_any_node = false`: nobody is sent away, nobody else answers, and metadata names no replicas."""

    async def work() -> None:
        async with behind(tmp_path, history_from_any_node=False) as nodes:
            owner = nodes.owner(TOPIC)
            assert len((await ask(await nodes.client(owner), 0)).records) > 0
            answer = await ask(await nodes.client(others(nodes)[0]), 0)
            assert answer.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
            (topic,) = (await metadata(nodes, owner)).topics
            assert [one.replica_nodes for one in topic.partitions] == [[owner]]

    run(work())
