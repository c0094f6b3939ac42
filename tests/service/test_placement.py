"""Several nodes over one store: each serves its partitions, and says who serves the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.service.installation import Installation, installed, run
from tests.service.kafka.test_server import (
    FETCH,
    LOOPBACK,
    METADATA,
    PRODUCE,
    WAIT_SECONDS,
    fetch_request,
    fetched,
    produced,
)
from tests.service.kafka.test_server import produce_request as request_for_0

import tidelog
from tidelog.errors import ConflictError, StoreUnavailableError, TidelogError
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.transactions.producer_state import StoredProducers
from tidelog.service.node import Node
from tidelog.service.placement import SLOTS, Alone, slot_of
from tidelog.topics.names import TopicName, parse_topic_name

LIST_OFFSETS, CREATE_TOPICS, DELETE_TOPICS, OFFSET_FOR_LEADER_EPOCH = 2, 19, 20, 23
DESCRIBE_CONFIGS, CREATE_PARTITIONS, INCREMENTAL_ALTER_CONFIGS, DESCRIBE_CLUSTER = 32, 37, 44, 60
DESCRIBE_TOPIC_PARTITIONS = 75
TOPIC = "shop/orders"


def create_request(partitions: int, topic: str = "shop.orders", **configs: str) -> Any:
    module = wire(CREATE_TOPICS)
    given = [module.CreateTopicsRequestCreatableTopicConfig(name, value) for name, value in configs.items()]
    asked = module.CreateTopicsRequestCreatableTopic(topic, partitions, -1, [], given)
    return module.CreateTopicsRequest(topics=[asked], timeout_ms=WAIT_SECONDS * 1000)


def produce_request(*values: bytes, partition: int = 0) -> Any:
    request = request_for_0(*values)
    request.topic_data[0].partition_data[0].index = partition
    return request


async def created(nodes: Installation, partitions: int, by: int = 1, **configs: str) -> Any:
    (answer,) = (await nodes.call(by, CREATE_TOPICS, 7, create_request(partitions, **configs))).topics
    assert answer.error_code == ErrorCode.NONE, answer
    return answer


async def metadata(nodes: Installation, number: int) -> Any:
    asked = wire(METADATA).MetadataRequestTopic(name="shop.orders")
    request = wire(METADATA).MetadataRequest(topics=[asked], allow_auto_topic_creation=False)
    return await nodes.call(number, METADATA, 12, request)


async def append(nodes: Installation, number: int, *values: bytes, partition: int = 0) -> tuple[int, int]:
    return produced(await nodes.call(number, PRODUCE, 9, produce_request(*values, partition=partition)))


def test_a_node_by_itself_leads_everything(tmp_path: Path) -> None:
    """It is what a node is without a placement, and it says its own address."""

    async def work() -> None:
        node = Node(tidelog.open(tmp_path))
        listening = await node.start(LOOPBACK, LOOPBACK)
        try:
            assert isinstance(node.placement, Alone)
            (address,) = node.placement.nodes()
            assert (address.kafka, address.http) == (listening.kafka, listening.http_url)
        finally:
            await node.stop()

    run(work())


def test_slots_spread_groups_evenly() -> None:
    """Every slot gets its share of names that differ by a number only."""
    found = [slot_of(f"group-{number}") for number in range(100 * SLOTS)]
    assert set(found) == set(range(SLOTS))
    assert max(map(found.count, range(SLOTS))) < 200


def test_every_node_lists_all_nodes_and_leaders(tmp_path: Path) -> None:
    """Metadata, DescribeCluster and DescribeTopicPartitions are the same wherever they are asked, ids among it."""

    async def work() -> None:
        async with installed(tmp_path, 3) as nodes:
            made = await created(nodes, 6, by=2)
            brokers = sorted((number, *address.kafka) for number, address in nodes.addresses.items())
            for number in nodes.nodes:
                answer = await metadata(nodes, number)
                (topic,) = answer.topics
                assert sorted((one.node_id, one.host, one.port) for one in answer.brokers) == brokers
                assert [one.leader_id for one in topic.partitions] == [1, 2, 3, 1, 2, 3]
                assert topic.topic_id == made.topic_id
                cluster = await nodes.call(number, DESCRIBE_CLUSTER, 0, wire(DESCRIBE_CLUSTER).DescribeClusterRequest())
                assert sorted((one.broker_id, one.host, one.port) for one in cluster.brokers) == brokers
                assert cluster.cluster_id == answer.cluster_id
                module = wire(DESCRIBE_TOPIC_PARTITIONS)
                asked = [module.DescribeTopicPartitionsRequestTopicRequest(name="shop.orders")]
                described = await nodes.call(
                    number, DESCRIBE_TOPIC_PARTITIONS, 0, module.DescribeTopicPartitionsRequest(topics=asked)
                )
                assert [one.leader_id for one in described.topics[0].partitions] == [1, 2, 3, 1, 2, 3]

    run(work())


def test_a_node_that_has_not_heard_of_a_topic_looks_for_it(tmp_path: Path) -> None:
    """Another node created it a moment ago. Where it cannot look, it does not say that there is none."""

    async def work() -> None:
        async with installed(tmp_path, auto_create_topics=False) as nodes:
            name = parse_topic_name(TOPIC)

            def forget() -> None:
                nodes.unheard.add((2, name))
                nodes._changed()

            forget()
            await created(nodes, 1)
            (found,) = (await metadata(nodes, 2)).topics
            assert (found.error_code, len(found.partitions)) == (ErrorCode.NONE, 1)
            forget()
            module = wire(DESCRIBE_CONFIGS)
            asked = module.DescribeConfigsRequest(
                resources=[module.DescribeConfigsRequestResource(2, "shop.orders", None)]
            )
            (described,) = (await nodes.call(2, DESCRIBE_CONFIGS, 4, asked)).results
            assert described.error_code == ErrorCode.NONE
            forget()

            async def fails(name: Any) -> None:
                raise StoreUnavailableError("away")

            nodes.nodes[2].placement.hear_of = fails  # type: ignore[method-assign]
            (found,) = (await metadata(nodes, 2)).topics
            assert found.error_code == ErrorCode.LEADER_NOT_AVAILABLE

    run(work())


def test_data_is_served_by_owners_only(tmp_path: Path) -> None:
    """Produce, Fetch and ListOffsets at another node are answered NOT_LEADER_OR_FOLLOWER, and open nothing there."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 1)
            assert await append(nodes, 1, b"a") == (0, 0)
            assert (await append(nodes, 2, b"b"))[0] == ErrorCode.NOT_LEADER_OR_FOLLOWER
            assert fetched(await nodes.call(2, FETCH, 12, fetch_request(0))).error_code == 6
            module = wire(LIST_OFFSETS)
            asked = module.ListOffsetsRequestPartition(partition_index=0, timestamp=-1)
            topic = module.ListOffsetsRequestTopic("shop.orders", [asked])
            request = module.ListOffsetsRequest(topics=[topic])
            (answer,) = (await nodes.call(2, LIST_OFFSETS, 7, request)).topics
            assert answer.partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
            (served,) = nodes.nodes[2]._broker.topics()
            assert served.opened_at == {}, "it was tried to open"
            assert await append(nodes, 1, b"c") == (0, 1)

    run(work())


def test_a_partition_without_owner_has_no_leader(tmp_path: Path) -> None:
    """Metadata says LEADER_NOT_AVAILABLE, so that clients ask again."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 1)
            nodes.owners.clear()
            (topic,) = (await metadata(nodes, 1)).topics
            (partition,) = topic.partitions
            assert (partition.error_code, partition.leader_id) == (ErrorCode.LEADER_NOT_AVAILABLE, -1)
            assert (await append(nodes, 2, b"a"))[0] == ErrorCode.NOT_LEADER_OR_FOLLOWER

    run(work())


def test_a_moved_partition_goes_on_at_its_offset(tmp_path: Path) -> None:
    """The old owner refuses at once, a consumer that waits there is told, and the new one has every message and knows
    where the old epoch ended."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 1)
            assert await append(nodes, 1, b"a", b"b") == (0, 0)
            epoch = (await metadata(nodes, 1)).topics[0].partitions[0].leader_epoch
            client = await nodes.client(1)
            waiting = asyncio.ensure_future(client.call(FETCH, 12, fetch_request(2, wait_ms=WAIT_SECONDS * 5000)))
            await asyncio.sleep(0)
            await nodes.move(TOPIC, 0, 2)
            assert fetched(await waiting).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
            assert (await append(nodes, 1, b"x"))[0] == ErrorCode.NOT_LEADER_OR_FOLLOWER
            assert await append(nodes, 2, b"c") == (0, 2)
            found = fetched(await nodes.call(2, FETCH, 12, fetch_request(0)))
            assert all(value in bytes(found.records) for value in (b"a", b"b"))
            module = wire(OFFSET_FOR_LEADER_EPOCH)
            asked = module.OffsetForLeaderEpochRequestOffsetForLeaderPartition(partition=0, leader_epoch=epoch)
            topics = [module.OffsetForLeaderEpochRequestOffsetForLeaderTopic("shop.orders", [asked])]
            request = module.OffsetForLeaderEpochRequest(topics=topics)
            (topic,) = (await nodes.call(2, OFFSET_FOR_LEADER_EPOCH, 4, request)).topics
            assert topic.partitions[0].end_offset == 2
            await nodes.move(TOPIC, 0, 1)
            assert await append(nodes, 1, b"d") == (0, 3)

    run(work())


@pytest.mark.parametrize("problem", [ConflictError, StoreUnavailableError])
def test_partition_that_was_half_opened_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: type[TidelogError]
) -> None:
    """Loses otherwise: a node that could not read a partition's producers keeps its claim, and no other opens it."""

    def fail(stored: StoredProducers) -> None:
        raise problem("the state of the producers cannot be read")

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 2)
            name = parse_topic_name("shop/orders")
            before = nodes.owners[name, 0]
            other = 3 - before
            nodes.owners[name, 0] = other
            nodes._changed()
            await nodes.nodes[before].release_partition(name, 0)
            with monkeypatch.context() as patch:
                patch.setattr(StoredProducers, "load", fail)
                with pytest.raises(TidelogError):
                    await nodes.nodes[other].open_partition(name, 0)
            nodes.owners[name, 0] = before
            nodes._changed()
            await nodes.nodes[other].release_partition(name, 0)
            await nodes.nodes[before].open_partition(name, 0)
            assert (await append(nodes, before, b"goes on"))[0] == ErrorCode.NONE

    run(work())


def test_partitions_of_an_ended_node_are_opened_by_another(tmp_path: Path) -> None:
    """With what the ended one had shipped."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 2)
            assert await append(nodes, 2, b"a", partition=1) == (0, 0)
            await nodes.nodes[2].release_partition(*next(key for key in nodes.owners if key[1] == 1))
            await nodes.stop_node(2)
            await nodes.move(TOPIC, 1, 1)
            assert await append(nodes, 1, b"b", partition=1) == (0, 1)

    run(work())


def test_topics_grow_and_are_deleted_by_any_node(tmp_path: Path) -> None:
    """Partitions that are added on one node are opened on others; a topic that is created again is empty and has
    another id, also where the old one was."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            first = await created(nodes, 1)
            await append(nodes, 1, b"a")
            module = wire(CREATE_PARTITIONS)
            asked = module.CreatePartitionsRequestTopic("shop.orders", 3, None)
            (grown,) = (await nodes.call(2, CREATE_PARTITIONS, 2, module.CreatePartitionsRequest([asked]))).results
            assert grown.error_code == ErrorCode.NONE, grown
            assert [nodes.owner(TOPIC, number) for number in range(3)] == [1, 2, 1]
            assert await append(nodes, 2, b"b", partition=1) == (0, 0)
            assert await append(nodes, 1, b"c", partition=0) == (0, 1)
            request = wire(DELETE_TOPICS).DeleteTopicsRequest(topic_names=["shop.orders"])
            (deleted,) = (await nodes.call(2, DELETE_TOPICS, 4, request)).responses
            assert deleted.error_code == ErrorCode.NONE, deleted
            for number in nodes.nodes:
                assert (await metadata(nodes, number)).topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            again = await created(nodes, 2, by=2)
            assert again.topic_id != first.topic_id
            for partition in range(2):
                assert await append(nodes, nodes.owner(TOPIC, partition), b"n", partition=partition) == (0, 0)

    run(work())


def test_a_topic_created_again_has_no_settings_of_the_deleted_one(tmp_path: Path) -> None:
    """Its first owner still had them on its disk."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 1, by=2, **{"max.message.bytes": "4000"})
            assert (await append(nodes, 1, b"x" * 5000))[0] == ErrorCode.MESSAGE_TOO_LARGE
            request = wire(DELETE_TOPICS).DeleteTopicsRequest(topic_names=["shop.orders"])
            assert (await nodes.call(2, DELETE_TOPICS, 4, request)).responses[0].error_code == ErrorCode.NONE
            await created(nodes, 1, by=2)
            await nodes.move(TOPIC, 0, 1)
            assert await append(nodes, 1, b"x" * 5000) == (0, 0)

    run(work())


def test_configs_of_any_node_reach_the_owner(tmp_path: Path) -> None:
    """Those of the creation before the first message, and changes within seconds: the owner refuses a batch that is
    larger than another node was told a moment ago."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            await created(nodes, 1, by=2, **{"max.message.bytes": "4000"})
            assert nodes.owner(TOPIC) == 1
            assert (await append(nodes, 1, b"x" * 5000))[0] == ErrorCode.MESSAGE_TOO_LARGE
            assert (await append(nodes, 1, b"x" * 500))[0] == ErrorCode.NONE
            module = wire(INCREMENTAL_ALTER_CONFIGS)
            change = module.IncrementalAlterConfigsRequestAlterableConfig("max.message.bytes", 0, "300")
            resource = module.IncrementalAlterConfigsRequestAlterConfigsResource(2, "shop.orders", [change])
            request = module.IncrementalAlterConfigsRequest([resource])
            (changed,) = (await nodes.call(2, INCREMENTAL_ALTER_CONFIGS, 1, request)).responses
            assert changed.error_code == ErrorCode.NONE, changed
            async with asyncio.timeout(WAIT_SECONDS):
                while (await append(nodes, 1, b"x" * 500))[0] != ErrorCode.MESSAGE_TOO_LARGE:
                    await asyncio.sleep(0.05)

    run(work())


@pytest.mark.parametrize("partitions", [1, 2])
def test_settings_are_changed_before_the_owners_have_opened_the_topic(tmp_path: Path, partitions: int) -> None:
    """What it was created with stays, and what was changed counts when it is opened."""

    async def work() -> None:
        async with installed(tmp_path) as nodes:
            opening = nodes._assign
            nodes._assign = later  # type: ignore[method-assign]
            facts = await nodes.create(parse_topic_name(TOPIC), partitions, {"retention_seconds": 50})
            nodes._changed()
            broker = nodes.nodes[2]._broker
            served = broker.find(parse_topic_name(TOPIC))
            assert served is not None
            await broker.change_settings(served, {"ship_max_delay_seconds": 3600})
            await opening(parse_topic_name(TOPIC), 0, facts.partitions)
            for node in nodes.nodes.values():
                for log in node._broker.topics()[0].open.values():
                    assert log.topic._tiered is not None
                    settings = log.topic._tiered.settings
                    assert (settings.retention_seconds, settings.ship_max_delay_seconds) == (50, 3600)

    async def later(name: TopicName, first: int, stop: int) -> None:
        """Nobody opens it yet."""

    run(work())
