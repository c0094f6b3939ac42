"""Unmodified clients of Kafka as members of consumer groups: both protocols, rebalances under load, administration."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from tests.clients.conftest import Service

import tidelog
from tidelog.service.kafka.groups.classic import GroupSettings
from tidelog.service.kafka.groups.consumer import ConsumerGroupSettings
from tidelog.service.kafka.groups.table import CoordinatorSettings
from tidelog.service.node import Node
from tidelog.service.placement import Address

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaConsumer

TOPIC = "shop.orders"
PARTITIONS = 6
_WAIT_SECONDS = 120.0
QUICK = CoordinatorSettings(
    classic=GroupSettings(initial_rebalance_delay_ms=0), consumer=ConsumerGroupSettings(heartbeat_interval_ms=200)
)
PROTOCOLS: dict[str, dict[str, Any]] = {
    "range": {"partition.assignment.strategy": "range"},
    "cooperative-sticky": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """The server in a thread, with groups that do not wait; its address."""
    has_started, stopping, address = threading.Event(), asyncio.Event(), ""
    loop = asyncio.new_event_loop()

    async def main() -> None:
        nonlocal address
        node = Node(await asyncio.to_thread(tidelog.open, directory), group_settings=QUICK)
        listening = await node.start(Address("127.0.0.1", 0), Address("127.0.0.1", 0))
        address = f"{listening.kafka.host}:{listening.kafka.port}"
        has_started.set()
        await stopping.wait()
        await node.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert has_started.wait(_WAIT_SECONDS)
        yield address
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(_WAIT_SECONDS)
        loop.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    """A server with a topic of several partitions."""
    make_topic(tmp_path / "served")
    with served(tmp_path / "served") as address:
        yield address


def make_topic(directory: Path) -> None:
    with tidelog.open(directory) as log:
        log.topic("shop/orders", partitions=PARTITIONS)


def produce(address: str, numbers: range) -> None:
    """One message for each number, spread over the partitions."""
    producer = Producer({"bootstrap.servers": address})
    for number in numbers:
        producer.produce(TOPIC, b"%d" % number, partition=number % PARTITIONS)
    assert producer.flush(_WAIT_SECONDS) == 0


def commit_zero(address: str, group: str = "billing") -> None:
    """The group begins at offset 0 by a commit, not by `auto.offset.reset`.

    A member of librdkafka that gives a partition up while it looks for the beginning, and gets it back within half a
    second, goes back to that beginning later.
    """
    consumer = Consumer({"bootstrap.servers": address, "group.id": group})
    consumer.commit(offsets=[TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)], asynchronous=False)
    consumer.close()


class Member:
    """A consumer of librdkafka that the test polls, and that commits what it has processed before it gives it up."""

    def __init__(self, address: str, group: str = "billing", **settings: Any) -> None:
        base: dict[str, Any] = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
        if settings != PROTOCOLS["consumer"]:
            base["heartbeat.interval.ms"] = 100
        self.consumer = Consumer({"bootstrap.servers": address, "group.id": group, **base, **settings})
        self.assignments = 0
        self.failures: list[KafkaException] = []
        """Commits that failed in a callback: librdkafka would raise something that is no exception."""
        self.is_incremental = settings in (PROTOCOLS["cooperative-sticky"], PROTOCOLS["consumer"])
        self.consumer.subscribe([TOPIC], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._gave_up)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.assignments += 1
        (consumer.incremental_assign if self.is_incremental else consumer.assign)(partitions)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            self.commit()
        except KafkaException as error:
            self.failures.append(error)
        self._gave_up(consumer, partitions)

    def _gave_up(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self.is_incremental:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def commit(self) -> None:
        """What was processed; nothing is fine."""
        positions = [one for one in self.consumer.position(self.consumer.assignment()) if one.offset >= 0]
        if positions:
            self.consumer.commit(offsets=positions, asynchronous=False)

    def poll(self) -> list[int]:
        """The numbers that came by now, one at a time: a callback sees the position of all that was returned."""
        found, message = [], self.consumer.poll(0.05)
        while message is not None:
            assert message.error() is None, message.error()
            value = message.value()
            assert value is not None
            found.append(int(value))
            message = self.consumer.poll(0) if len(found) < 50 else None
        return found

    @property
    def owned(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}

    def close(self) -> None:
        self.commit()
        self.consumer.close()
        assert self.failures == []


def until(condition: Callable[[], bool], members: list[Member], seen: list[int]) -> None:
    """Polls all members until a condition holds."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, [sorted(one.owned) for one in members]
        for member in members:
            seen += member.poll()


def is_shared(members: list[Member]) -> bool:
    """Whether each has some partitions, and all together have each once."""
    owned = [one.owned for one in members]
    return all(owned) and sorted(number for one in owned for number in one) == list(range(PARTITIONS))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_come_and_go_under_load(broker: str, protocol: str) -> None:
    """Everything arrives, and nothing twice: what a member processed is committed before another one goes on."""
    settings, seen = PROTOCOLS[protocol], list[int]()
    total = 3000
    commit_zero(broker)

    def feed() -> None:
        for first in range(0, total, 100):
            produce(broker, range(first, first + 100))

    feeding = threading.Thread(target=feed)
    feeding.start()
    first = Member(broker, **settings)
    until(lambda: len(first.owned) == PARTITIONS and len(seen) > 100, [first], seen)
    second = Member(broker, **settings)
    until(lambda: is_shared([first, second]), [first, second], seen)
    third = Member(broker, **settings)
    until(lambda: is_shared([first, second, third]), [first, second, third], seen)
    first.close()
    until(lambda: is_shared([second, third]), [second, third], seen)
    feeding.join(_WAIT_SECONDS)
    until(lambda: len(seen) >= total, [second, third], seen)
    second.close()
    until(lambda: third.owned == set(range(PARTITIONS)), [third], seen)
    third.close()
    assert sorted(seen) == list(range(total))


def test_a_static_member_comes_back_to_its_partitions(broker: str) -> None:
    """Nobody else is rebalanced."""
    commit_zero(broker)
    produce(broker, range(60))
    seen = list[int]()
    stays = Member(broker, **{"group.instance.id": "one", **PROTOCOLS["range"]})
    goes = Member(broker, **{"group.instance.id": "two", **PROTOCOLS["range"]})
    until(lambda: is_shared([stays, goes]) and len(seen) == 60, [stays, goes], seen)
    owned, before = goes.owned, stays.assignments
    goes.close()
    back = Member(broker, **{"group.instance.id": "two", **PROTOCOLS["range"]})
    until(lambda: back.owned == owned, [stays, back], seen)
    produce(broker, range(60, 120))
    until(lambda: len(seen) == 120, [stays, back], seen)
    assert stays.assignments == before
    assert sorted(seen) == list(range(120))
    stays.close()
    back.close()


def test_clients_of_different_makers_share_a_group(broker: str) -> None:
    """Each goes on where the one before it has committed."""
    produce(broker, range(60))
    settings: dict[str, Any] = {"group_id": "billing", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    one = KafkaConsumer(TOPIC, bootstrap_servers=broker, **settings)
    first = [int(next(one).value) for _ in range(60)]
    one.commit()
    one.close()
    produce(broker, range(60, 90))

    async def second() -> list[int]:
        consumer = AIOKafkaConsumer(TOPIC, bootstrap_servers=broker, **settings)
        await consumer.start()
        found = [int((await asyncio.wait_for(consumer.getone(), _WAIT_SECONDS)).value or b"") for _ in range(30)]
        await consumer.commit()
        await consumer.stop()
        return found

    then = asyncio.run(second())
    produce(broker, range(90, 120))
    third, last = list[int](), Member(broker)
    until(lambda: len(third) >= 30, [last], third)
    last.close()
    assert [sorted(one) for one in (first, then, third)] == [list(range(60)), list(range(60, 90)), list(range(90, 120))]


def test_an_administrator_sees_resets_and_deletes_groups(broker: str) -> None:
    """A group with members is neither reset nor deleted."""
    produce(broker, range(60))
    admin = AdminClient({"bootstrap.servers": broker})
    places = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
    member, seen = Member(broker, "old"), list[int]()
    until(lambda: len(seen) == 60, [member], seen)
    member.commit()
    listed = admin.list_consumer_groups().result(_WAIT_SECONDS)
    assert [(one.group_id, one.state) for one in listed.valid or []] == [("old", ConsumerGroupState.STABLE)]
    described = admin.describe_consumer_groups(["old"])["old"].result(_WAIT_SECONDS)
    assert [len(one.assignment.topic_partitions) for one in described.members] == [PARTITIONS]
    zero = [TopicPartition(TOPIC, one.partition, 0) for one in places]
    reset = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions("old", zero)])["old"]
    assert {one.error.name() for one in reset.result(_WAIT_SECONDS).topic_partitions} == {"UNKNOWN_MEMBER_ID"}
    refused = admin.delete_consumer_groups(["old"])["old"].exception(_WAIT_SECONDS)
    assert isinstance(refused, KafkaException)
    assert refused.args[0].name() == "NON_EMPTY_GROUP"
    member.close()
    reset = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions("old", zero)])["old"]
    assert {one.error for one in reset.result(_WAIT_SECONDS).topic_partitions} == {None}
    again, back = list[int](), Member(broker, "old")
    until(lambda: len(again) == 60, [back], again)
    back.close()
    found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("old")])["old"].result(_WAIT_SECONDS)
    assert [one.offset for one in found.topic_partitions] == [10] * PARTITIONS
    admin.delete_consumer_groups(["old"])["old"].result(_WAIT_SECONDS)
    assert (admin.list_consumer_groups().result(_WAIT_SECONDS).valid or []) == []


@pytest.mark.parametrize("protocol", ["range", "consumer"])
def test_groups_go_on_when_the_server_was_killed(serve: Callable[..., Service], tmp_path: Path, protocol: str) -> None:
    """Consumers that run through it stay members, and go on; a new one begins at what was committed."""
    make_topic(tmp_path / "killed")
    service = serve(directory=tmp_path / "killed")
    produce(service.kafka, range(60))
    member, seen = Member(service.kafka, **PROTOCOLS[protocol]), list[int]()
    until(lambda: len(seen) == 60, [member], seen)
    member.commit()
    service.kill()
    service.start()
    places = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
    other = Consumer({"bootstrap.servers": service.kafka, "group.id": "billing"})
    assert [one.offset for one in other.committed(places, _WAIT_SECONDS)] == [10] * PARTITIONS
    other.close()
    produce(service.kafka, range(60, 120))
    until(lambda: len(seen) >= 120, [member], seen)
    assert sorted(seen) == list(range(120))
    member.close()
    assert member.assignments == 1
