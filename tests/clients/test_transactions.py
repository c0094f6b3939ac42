"""Transactions and idempotent producers of unmodified clients, against `tidelog serve`, and through a kill of it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioPartition
from aiokafka.errors import ProducerFenced
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from tests.clients.conftest import Service
from tests.oracles.record_batches import Record, batch_bytes, put_record

import tidelog
from tidelog.service.kafka.codec import decode_response, encode_request, wire
from tidelog.service.kafka.error_codes import ErrorCode

INPUT, OUTPUT = "shop.input", "shop.output"
_WAIT_SECONDS = 120.0
_QUIET: dict[str, Any] = {"log_level": 0, "metadata.recovery.strategy": "none"}
"""With the default, `rebootstrap`, librdkafka can wait for ever for a coordinator (librdkafka#5511)."""


def producer(service: Service, transactional_id: str, **settings: Any) -> Producer:
    """Of librdkafka, initialized: another one of this id is fenced."""
    made = Producer({**_QUIET, "bootstrap.servers": service.kafka, "transactional.id": transactional_id, **settings})
    made.init_transactions(_WAIT_SECONDS)
    return made


def consume(service: Service, count: int, isolation: str, topic: str = OUTPUT) -> list[bytes | None]:
    """The values of so many messages from the beginning; fewer only after a long time."""
    settings = {"group.id": "none", "enable.auto.commit": False, "isolation.level": isolation}
    consumer = Consumer({**_QUIET, "bootstrap.servers": service.kafka, **settings})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []
    deadline = time.monotonic() + _WAIT_SECONDS
    while len(found) < count and time.monotonic() < deadline:
        found += [value_of(message) for message in consumer.consume(count, 0.2)]
    consumer.close()
    return found


def value_of(message: Message) -> bytes | None:
    assert message.error() is None, message.error()
    value = message.value()
    assert value is None or isinstance(value, bytes)
    return value


def send(sender: Producer, *values: bytes, topic: str = OUTPUT) -> None:
    """And waits until all are stored."""
    for value in values:
        sender.produce(topic, value)
    assert sender.flush(_WAIT_SECONDS) == 0


def test_committed_messages_are_seen_and_aborted_ones_are_not(service: Service) -> None:
    """By consumers that ask for it, and by readers of the library; others see all."""
    sender = producer(service, "app")
    for value, is_commit in ((b"1", True), (b"aborted", False), (b"2", True)):
        sender.begin_transaction()
        send(sender, value)
        if is_commit:
            sender.commit_transaction(_WAIT_SECONDS)
        else:
            sender.abort_transaction(_WAIT_SECONDS)
    assert consume(service, 2, "read_committed") == [b"1", b"2"]
    assert consume(service, 3, "read_uncommitted") == [b"1", b"aborted", b"2"]
    assert service.stop() == 0
    with tidelog.open(service.directory) as log:
        assert [message.value for message in log.topic("shop/output").read()] == [b"1", b"2"]


def test_an_open_transaction_holds_back_what_comes_after_it(service: Service) -> None:
    """Until it ends: a plain message behind it has its place, and waits."""
    sender = producer(service, "app")
    sender.begin_transaction()
    send(sender, b"in")
    plain = Producer({**_QUIET, "bootstrap.servers": service.kafka})
    send(plain, b"plain")
    settings = {"group.id": "none", "isolation.level": "read_committed"}
    consumer = Consumer({**_QUIET, "bootstrap.servers": service.kafka, **settings})
    assert consumer.get_watermark_offsets(TopicPartition(OUTPUT, 0), 60) == (0, 0)
    consumer.close()
    assert consume(service, 2, "read_uncommitted") == [b"in", b"plain"]
    sender.commit_transaction(_WAIT_SECONDS)
    assert consume(service, 2, "read_committed") == [b"in", b"plain"]


def test_a_second_producer_fences_the_first(service: Service) -> None:
    """Whose open transaction is aborted, and who can do nothing more."""
    zombie = producer(service, "app")
    zombie.begin_transaction()
    send(zombie, b"zombie")
    second = producer(service, "app")
    zombie.produce(OUTPUT, b"late")
    with pytest.raises(KafkaException) as raised:
        zombie.commit_transaction(_WAIT_SECONDS)
    assert raised.value.args[0].code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED)
    second.begin_transaction()
    send(second, b"second")
    second.commit_transaction(_WAIT_SECONDS)
    assert consume(service, 1, "read_committed") == [b"second"]


def test_a_transaction_that_takes_too_long_is_aborted(service: Service) -> None:
    """By the broker alone; its producer cannot commit it any more, and may go on after an abort."""
    sender = producer(service, "app", **{"transaction.timeout.ms": 1000})
    sender.begin_transaction()
    send(sender, b"late")
    send(Producer({**_QUIET, "bootstrap.servers": service.kafka}), b"plain")
    assert consume(service, 1, "read_committed") == [b"plain"]
    with pytest.raises(KafkaException):
        sender.commit_transaction(_WAIT_SECONDS)


def copy(service: Service, group: str, count: int, *, kills_at: int = -1) -> list[int]:
    """Consume, transform, produce: exactly once, as a client of the protocol does it. Returns sizes of transactions.

    In the middle of one transaction the server may be killed and started again; a consumer that is no member of the
    group, and only commits for it, need not join again then.
    """
    settings = {"group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    settings |= {"isolation.level": "read_committed"}
    consumer = Consumer({**_QUIET, "bootstrap.servers": service.kafka, **settings})
    if kills_at < 0:
        consumer.subscribe([INPUT])
    else:
        consumer.assign([TopicPartition(INPUT, 0, 0)])
    sender = producer(service, f"copy-{group}")
    sizes: list[int] = []
    deadline = time.monotonic() + _WAIT_SECONDS
    while sum(sizes) < count and time.monotonic() < deadline:
        messages = [one for one in consumer.consume(10, 0.2) if one.error() is None]
        if not messages:
            continue
        sender.begin_transaction()
        for message in messages:
            sender.produce(OUTPUT, b"<%s>" % (value_of(message) or b""))
        if len(sizes) == kills_at:
            kills_at = -1
            service.kill()
            service.start()
        positions = [TopicPartition(INPUT, 0, max(one.offset() or 0 for one in messages) + 1)]
        try:
            sender.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), _WAIT_SECONDS)
            sender.commit_transaction(_WAIT_SECONDS)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            sender.abort_transaction(_WAIT_SECONDS)
            consumer.seek(TopicPartition(INPUT, 0, messages[0].offset() or 0))
            continue
        sizes.append(len(messages))
    consumer.close()
    return sizes


@pytest.mark.parametrize("kills_at", [-1, 1])
def test_a_copy_is_exact(service: Service, kills_at: int) -> None:
    """Nothing is lost and nothing is there twice; a second copy of the same group finds nothing left to do."""
    send(Producer({**_QUIET, "bootstrap.servers": service.kafka}), *(b"%d" % one for one in range(50)), topic=INPUT)
    sizes = copy(service, "copiers", 50, kills_at=kills_at)
    assert sum(sizes) == 50
    assert consume(service, 50, "read_committed") == [b"<%d>" % one for one in range(50)]
    consumer = Consumer({**_QUIET, "bootstrap.servers": service.kafka, "group.id": "copiers"})
    [committed] = consumer.committed([TopicPartition(INPUT, 0)], 60)
    assert committed.offset == 50
    consumer.close()


def test_aiokafka_copies_exactly_once(service: Service) -> None:
    """Offsets within the transaction, an abort by an exception, and fencing."""

    async def play() -> list[bytes | None]:
        plain = AIOKafkaProducer(bootstrap_servers=service.kafka, enable_idempotence=True)
        await plain.start()
        for number in range(10):
            await plain.send_and_wait(INPUT, b"%d" % number)
        await plain.stop()
        sender = AIOKafkaProducer(bootstrap_servers=service.kafka, transactional_id="app")
        await sender.start()
        with contextlib.suppress(ZeroDivisionError):
            async with sender.transaction():
                await sender.send_and_wait(OUTPUT, b"aborted")
                raise ZeroDivisionError
        group: dict[str, Any] = {"group_id": "aio", "enable_auto_commit": False, "auto_offset_reset": "earliest"}
        consumer = AIOKafkaConsumer(bootstrap_servers=service.kafka, isolation_level="read_committed", **group)
        consumer.assign([AioPartition(INPUT, 0)])
        await consumer.start()
        for _ in range(10):
            message = await asyncio.wait_for(consumer.getone(), _WAIT_SECONDS)
            async with sender.transaction():
                await sender.send(OUTPUT, message.value)
                await sender.send_offsets_to_transaction({AioPartition(INPUT, 0): message.offset + 1}, "aio")
        async with asyncio.timeout(_WAIT_SECONDS):
            # A commit is answered when it is decided; that the group has the offset comes a moment later.
            while await consumer.committed(AioPartition(INPUT, 0)) != 10:
                await asyncio.sleep(0.01)
        await consumer.stop()
        second = AIOKafkaProducer(bootstrap_servers=service.kafka, transactional_id="app")
        await second.start()
        with pytest.raises(ProducerFenced):
            async with sender.transaction():
                await sender.send_and_wait(OUTPUT, b"zombie")
        await second.stop()
        await sender.stop()
        reader = AIOKafkaConsumer(
            OUTPUT, bootstrap_servers=service.kafka, auto_offset_reset="earliest", isolation_level="read_committed"
        )
        await reader.start()
        found = [(await asyncio.wait_for(reader.getone(), _WAIT_SECONDS)).value for _ in range(10)]
        await reader.stop()
        return found

    assert asyncio.run(play()) == [b"%d" % number for number in range(10)]


class RawClient:
    """Sends requests as they are made here: what no good client would send."""

    def __init__(self, service: Service) -> None:
        host, _, port = service.kafka.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 60)

    def call(self, api_key: int, version: int, request: Any) -> Any:
        self._socket.sendall(encode_request(api_key, version, 1, "raw", request))
        size = struct.unpack(">i", self._received(4))[0]
        return decode_response(api_key, version, self._received(size))[1]

    def _received(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            assert more, "the server closed the connection"
            data += more
        return data

    def init(self, transactional_id: str | None) -> tuple[int, int]:
        answer = self.call(22, 4, wire(22).InitProducerIdRequest(transactional_id, 60_000))
        assert answer.error_code == 0
        return answer.producer_id, answer.producer_epoch

    def produce(
        self,
        who: tuple[int, int],
        sequence: int,
        count: int,
        *,
        transactional_id: str | None = None,
        version: int = 9,
        value: bytes = b"v",
    ) -> tuple[int, int]:
        """The error and the base offset."""
        records = [put_record(Record(0, number, None, value, [])) for number in range(count)]
        attributes = 0 if transactional_id is None else 0x10
        batch = batch_bytes(0, count - 1, 0, attributes, (*who, sequence), 1_700_000_000_000, 0, records)
        module = wire(0)
        part = module.ProduceRequestPartitionProduceData(index=0, records=batch)
        topic = module.ProduceRequestTopicProduceData(name=OUTPUT, partition_data=[part])
        answer = self.call(0, version, module.ProduceRequest(transactional_id, -1, 30_000, [topic]))
        found = answer.responses[0].partition_responses[0]
        return found.error_code, found.base_offset

    def close(self) -> None:
        self._socket.close()


def test_a_batch_that_comes_again_has_its_first_offset_also_after_a_kill(service: Service) -> None:
    """Any of the last five, if it has the same messages; what is not the next one is refused."""
    client = RawClient(service)
    who = client.init(None)
    offsets = [client.produce(who, sequence, 3) for sequence in range(0, 18, 3)]
    assert offsets == [(0, offset) for offset in range(0, 18, 3)]
    assert client.produce(who, 3, 3) == (0, 3)
    client.close()
    service.kill()
    service.start()
    client = RawClient(service)
    for sequence in range(3, 18, 3):
        assert client.produce(who, sequence, 3) == (0, sequence)
    assert client.produce(who, 15, 3, value=b"another")[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.produce(who, 0, 3)[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.produce(who, 21, 1)[0] == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.produce(who, 18, 1) == (0, 18)
    assert client.init(None)[0] > who[0]
    client.close()


def test_partitions_refuse_zombies_and_what_no_transaction_has(service: Service) -> None:
    """A batch that nobody would end, and one of an epoch that is over; before and after a kill."""
    client = RawClient(service)
    who = client.init("app")
    assert client.produce((who[0], 0), 0, 1)[0] == 0  # idempotent: the topic is made by it
    assert client.produce(who, 1, 1, transactional_id="app")[0] == ErrorCode.INVALID_TXN_STATE
    assert client.produce(who, 1, 1, transactional_id="app", version=11)[0] == ErrorCode.TRANSACTION_ABORTABLE
    module = wire(24)
    topics = [module.AddPartitionsToTxnRequestTopic(OUTPUT, [0])]
    answer = client.call(24, 3, module.AddPartitionsToTxnRequest([], "app", *who, topics))
    assert answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code == 0
    assert client.produce(who, 1, 1, transactional_id="app")[0] == 0
    newer = client.init("app")
    assert newer > who
    assert client.produce(who, 2, 1, transactional_id="app")[0] == ErrorCode.INVALID_PRODUCER_EPOCH
    client.close()
    service.kill()
    service.start()
    client = RawClient(service)
    assert client.produce(who, 2, 1, transactional_id="app")[0] == ErrorCode.INVALID_PRODUCER_EPOCH
    assert client.produce((newer[0] + 5000, 0), 0, 1, transactional_id="x")[0] == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    client.close()


def test_transactional_ids_outlive_the_disk(serve: Callable[..., Service], tmp_path: Path) -> None:
    """They are where the metadata is: the same producer goes on with the next epoch, and no id is given twice."""
    options = ("--store", f"file://{tmp_path}/objects", "--metadata", "bucket")
    service = serve(*options)
    client = RawClient(service)
    who, other = client.init("app"), client.init(None)
    client.close()
    service.kill()
    shutil.rmtree(service.directory)
    client = RawClient(serve(*options, directory=tmp_path / "another"))
    assert client.init("app") == (who[0], who[1] + 1)
    assert client.init(None)[0] not in (who[0], other[0])
    client.close()
