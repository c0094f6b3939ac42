"""Unmodified clients of Kafka produce to `tidelog serve` and consume from it."""

from __future__ import annotations

import asyncio
import time
import urllib.request
import warnings
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from tests.clients.conftest import Service

import tidelog

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaConsumer, KafkaProducer
    from kafka import TopicPartition as PythonPartition

TOPIC = "shop.orders"
_WAIT_SECONDS = 120.0
_NO_GROUP = {"group.id": "none", "enable.auto.commit": False}


def produce(service: Service, values: list[bytes | None], *, topic: str = TOPIC, **settings: Any) -> list[int | None]:
    """Appends values by librdkafka; their offsets."""
    offsets: list[int | None] = []

    def delivered(error: object, message: Message) -> None:
        assert error is None, error
        offsets.append(message.offset())

    producer = Producer({"bootstrap.servers": service.kafka, **settings})
    for value in values:
        producer.produce(topic, value, key=b"k", on_delivery=delivered)
    assert producer.flush(_WAIT_SECONDS) == 0
    return offsets


def consume(service: Service, count: int, *, topic: str = TOPIC, start: int = 0, **settings: Any) -> list[Message]:
    """So many messages from an offset on, by librdkafka."""
    consumer = Consumer({**_NO_GROUP, "bootstrap.servers": service.kafka, **settings})
    consumer.assign([TopicPartition(topic, 0, start)])
    found: list[Message] = []
    deadline = time.monotonic() + _WAIT_SECONDS
    while len(found) < count and time.monotonic() < deadline:
        for message in consumer.consume(count, 0.5):
            assert message.error() is None, message.error()
            found.append(message)
    consumer.close()
    return found


def _with(codec: str) -> dict[str, Any]:
    return {"compression.type": codec, "linger.ms": 20}


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_librdkafka_reads_what_it_wrote(service: Service, codec: str) -> None:
    """Keys, nulls and offsets, with every compression."""
    values = [None if number == 7 else b"value %d " % number * 20 for number in range(500)]
    assert produce(service, values, **_with(codec)) == list(range(500))
    found = consume(service, 500)
    assert [(message.offset(), message.value()) for message in found] == list(enumerate(values))
    assert {message.key() for message in found} == {b"k"}


def test_headers_keep_order_repetition_and_null(service: Service) -> None:
    """What our own envelope had no place for."""
    headers: list[tuple[str, str | bytes | None]] = [("a", b"1"), ("b", None), ("a", b""), ("ä", b"2")]
    producer = Producer({"bootstrap.servers": service.kafka})
    producer.produce(TOPIC, b"v", headers=headers)
    assert producer.flush(_WAIT_SECONDS) == 0
    assert consume(service, 1)[0].headers() == headers


def test_kafka_python_and_librdkafka_read_each_other(service: Service) -> None:
    """Two clients with nothing in common."""
    producer = KafkaProducer(bootstrap_servers=service.kafka, enable_idempotence=False)
    assert producer.send(TOPIC, b"python").get(_WAIT_SECONDS).offset == 0
    producer.close()
    assert produce(service, [b"c"]) == [1]
    consumer = KafkaConsumer(bootstrap_servers=service.kafka, auto_offset_reset="earliest", consumer_timeout_ms=60_000)
    consumer.assign([PythonPartition(TOPIC, 0)])
    found = [next(consumer).value for _ in range(2)]
    consumer.close()
    assert found == [b"python", b"c"]


def test_aiokafka_follows_the_tail(service: Service) -> None:
    """A consumer that waits is answered when something comes."""

    async def play() -> list[bytes | None]:
        consumer = AIOKafkaConsumer(TOPIC, bootstrap_servers=service.kafka, auto_offset_reset="earliest")
        producer = AIOKafkaProducer(bootstrap_servers=service.kafka, enable_idempotence=False)
        await producer.start()
        await producer.send_and_wait(TOPIC, b"0")
        await consumer.start()
        try:
            found = []
            for number in range(1, 4):
                found.append((await asyncio.wait_for(anext(consumer), _WAIT_SECONDS)).value)
                await producer.send_and_wait(TOPIC, b"%d" % number)
            return found
        finally:
            await consumer.stop()
            await producer.stop()

    assert asyncio.run(play()) == [b"0", b"1", b"2"]


def test_a_topic_is_one_for_clients_and_for_the_library(service: Service) -> None:
    """`shop.orders`, `shop/orders` and the topic that a directory has are the same."""
    produce(service, [b"by dot"])
    produce(service, [b"by slash"], topic="shop/orders")
    produce(service, [b"bare"], topic="bare")
    assert service.stop() == 0
    with tidelog.open(service.directory) as log:
        assert log.topics() == ["default/bare", "shop/orders"]
        assert [message.value for message in log.topic("shop/orders").read()] == [b"by dot", b"by slash"]
        log.topic("shop/orders").append(b"by the library", key=b"x", headers={"h": b"1"})
    service.start()
    (message,) = consume(service, 1, start=2)
    assert (message.value(), message.key(), message.headers()) == (b"by the library", b"x", [("h", b"1")])


def test_acknowledged_messages_survive_a_kill(service: Service) -> None:
    """With acks=all and with acks=1: both are answered once the messages are in a file."""
    produce(service, [b"all"] * 10, acks="all")
    produce(service, [b"one"] * 10, acks="1")
    service.kill()
    service.start()
    assert [message.value() for message in consume(service, 20)] == [b"all"] * 10 + [b"one"] * 10


def test_offsets_by_time_and_ends(service: Service) -> None:
    """ListOffsets: earliest, latest, a time between two messages, and one after all of them."""
    producer = Producer({"bootstrap.servers": service.kafka})
    for number in range(10):
        producer.produce(TOPIC, b"v", timestamp=1_700_000_000_000 + number * 1000)
    assert producer.flush(_WAIT_SECONDS) == 0
    consumer = Consumer({**_NO_GROUP, "bootstrap.servers": service.kafka})
    assert consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=_WAIT_SECONDS) == (0, 10)
    times = [1_700_000_003_500, 1_600_000_000_000, 1_800_000_000_000]
    found = [consumer.offsets_for_times([TopicPartition(TOPIC, 0, time)], _WAIT_SECONDS)[0].offset for time in times]
    assert found == [4, 0, -1]
    consumer.close()


@pytest.mark.parametrize(("policy", "first"), [("earliest", 0), ("latest", 20)])
def test_librdkafka_resets_a_position_out_of_range(service: Service, policy: str, first: int) -> None:
    """What comes with an error is an empty set of records: librdkafka takes null for a broken answer, for ever."""
    produce(service, [b"v"] * 20)
    consumer = Consumer({**_NO_GROUP, "bootstrap.servers": service.kafka, "auto.offset.reset": policy})
    consumer.assign([TopicPartition(TOPIC, 0, 99_999)])
    found = None
    deadline = time.monotonic() + _WAIT_SECONDS
    while found is None and time.monotonic() < deadline:
        found = consumer.poll(0.5)
        if found is None and policy == "latest":
            produce(service, [b"v"])
    consumer.close()
    assert found is not None
    offset = found.offset()
    assert offset is not None
    assert found.error() is None
    assert offset == 0 if policy == "earliest" else offset >= first


def test_health_is_served_over_http(service: Service) -> None:
    """For whoever starts and stops it."""
    for path in ("live", "ready"):
        with urllib.request.urlopen(f"{service.http}/health/{path}", timeout=_WAIT_SECONDS) as answer:
            assert answer.status == 200
