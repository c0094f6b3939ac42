"""Share groups (KIP-932) by librdkafka: consumers share a partition, and settle each message by itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import AcknowledgeType, Message, Producer, ShareConsumer
from tests.clients.conftest import Service

TOPIC = "shop.orders"
_WAIT_SECONDS = 120.0
Join = Callable[..., ShareConsumer]


@pytest.fixture
def join(service: Service) -> Iterator[Join]:
    """Makes members of the group `workers`, which begin at the end of the topic."""
    members: list[ShareConsumer] = []

    def make(mode: str = "explicit") -> ShareConsumer:
        member = ShareConsumer(
            {"bootstrap.servers": service.kafka, "group.id": "workers", "share.acknowledgement.mode": mode}
        )
        member.subscribe([TOPIC])
        members.append(member)
        return member

    yield make
    for member in members:
        member.close()


def produce(service: Service, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": service.kafka})
    for value in values:
        producer.produce(TOPIC, value)
    assert producer.flush(_WAIT_SECONDS) == 0


def poll(member: ShareConsumer) -> list[Message]:
    found = list(member.poll(0.5))
    for message in found:
        assert message.error() is None, message.error()
    return found


def settle(member: ShareConsumer, messages: list[Message], kind: AcknowledgeType) -> None:
    for message in messages:
        member.acknowledge(message, kind)


def begin(service: Service, *members: ShareConsumer) -> None:
    """The group begins at the end of the topic: messages are sent until one arrives, and all of them are accepted."""
    deadline = time.monotonic() + _WAIT_SECONDS
    seen = sent = 0
    while not seen or seen < sent - 1000:
        assert time.monotonic() < deadline
        produce(service, b"first")
        sent += 1
        for member in members:
            found = poll(member)
            settle(member, found, AcknowledgeType.ACCEPT)
            seen += len(found)
    for member in members:
        while found := poll(member):
            settle(member, found, AcknowledgeType.ACCEPT)
        member.commit_sync()


def test_released_messages_come_again_and_rejected_ones_do_not(service: Service, join: Join) -> None:
    """Each message is settled by itself."""
    produce(service)
    member = join()
    begin(service, member)
    produce(service, b"accept", b"release", b"reject")
    seen: Counter[bytes] = Counter()
    deadline = time.monotonic() + _WAIT_SECONDS
    while seen[b"release"] < 2 or len(seen) < 3:
        assert time.monotonic() < deadline, seen
        for message in poll(member):
            value = message.value()
            assert isinstance(value, bytes)
            if value == b"first":
                member.acknowledge(message, AcknowledgeType.ACCEPT)
                continue
            seen[value] += 1
            is_released = value == b"release" and seen[value] == 1
            kinds = {b"accept": AcknowledgeType.ACCEPT, b"reject": AcknowledgeType.REJECT}
            kind = AcknowledgeType.RELEASE if is_released else kinds.get(value, AcknowledgeType.ACCEPT)
            member.acknowledge(message, kind)
        member.commit_sync()
    assert seen == {b"accept": 1, b"release": 2, b"reject": 1}


def test_members_share_the_messages_of_one_partition(service: Service, join: Join) -> None:
    """Every message goes to one of them."""
    produce(service)
    members = [join(), join()]
    begin(service, *members)
    values = [b"%d" % number for number in range(200)]
    produce(service, *values)
    seen: Counter[bytes] = Counter()
    deadline = time.monotonic() + _WAIT_SECONDS
    while len(seen) < len(values):
        assert time.monotonic() < deadline, len(seen)
        for member in members:
            found = poll(member)
            settle(member, found, AcknowledgeType.ACCEPT)
            seen.update(message.value() for message in found if message.value() != b"first")  # type: ignore[misc]
            member.commit_sync()
    assert seen == Counter(values)
