"""Unmodified admin clients of Kafka create, divide, configure, empty and delete topics of `tidelog serve`."""

from __future__ import annotations

import asyncio
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AioTopic
from aiokafka.admin.config_resource import ConfigResource as AioResource
from aiokafka.admin.config_resource import ConfigResourceType as AioType
from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from tests.clients.conftest import Service

import tidelog
from tidelog.service.kafka.codec import AMONG_NODES, WITH_AUTHENTICATION, decode_response, encode_request, wire

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaAdminClient
    from kafka import TopicPartition as PythonPartition
    from kafka.admin import ConfigResource as PythonResource
    from kafka.admin import ConfigResourceType as PythonType
    from kafka.admin import NewTopic as PythonTopic
    from kafka.errors import TransactionalIdNotFoundError

TOPIC = "shop.orders"
_WAIT_SECONDS = 120.0


@pytest.fixture
def admin(service: Service) -> AdminClient:
    return AdminClient({"bootstrap.servers": service.kafka})


@pytest.fixture
def python(service: Service) -> Iterator[Any]:
    client = KafkaAdminClient(bootstrap_servers=service.kafka)
    yield client
    client.close()


def done(futures: dict[Any, Future[Any]]) -> Any:
    """What became of the only item of a request."""
    (future,) = futures.values()
    return future.result(_WAIT_SECONDS)


def refused(futures: dict[Any, Future[Any]]) -> tuple[int, str]:
    """The code and the words of an error of the only item."""
    with pytest.raises(KafkaException) as caught:
        done(futures)
    error = caught.value.args[0]
    return error.code(), error.str()


def configs(admin: AdminClient, name: str = TOPIC, kind: Any = ResourceType.TOPIC) -> dict[str, Any]:
    return dict(done(admin.describe_configs([ConfigResource(kind, name)])))


def alter(admin: AdminClient, *entries: tuple[str, str | None, AlterConfigOpType], **options: Any) -> Any:
    made = [ConfigEntry(name, value, incremental_operation=operation) for name, value, operation in entries]
    return admin.incremental_alter_configs(
        [ConfigResource(ResourceType.TOPIC, TOPIC, incremental_configs=made)], **options
    )


def set_config(admin: AdminClient, name: str, value: str) -> None:
    done(alter(admin, (name, value, AlterConfigOpType.SET)))


def produce(service: Service, values: list[bytes], partition: int = 0, **settings: Any) -> None:
    failures: list[object] = []

    def delivered(error: object, message: Message) -> None:
        if error is not None:
            failures.append(error)

    producer = Producer({"bootstrap.servers": service.kafka, **settings})
    for value in values:
        producer.produce(TOPIC, value, key=b"k", partition=partition, on_delivery=delivered)
    assert producer.flush(_WAIT_SECONDS) == 0
    if failures:
        raise KafkaException(failures[0])


def consume(service: Service, count: int, start: int = 0, **settings: Any) -> list[Message]:
    given = {"bootstrap.servers": service.kafka, "group.id": "none", "enable.auto.commit": False, **settings}
    consumer = Consumer(given)
    consumer.assign([TopicPartition(TOPIC, 0, start)])
    found: list[Message] = []
    deadline = time.monotonic() + _WAIT_SECONDS
    while len(found) < count and time.monotonic() < deadline:
        for message in consumer.consume(count, 0.5):
            assert message.error() is None, message.error()
            found.append(message)
    consumer.close()
    return found


# Topics


def test_topic_is_created_described_grown_and_deleted(service: Service, admin: AdminClient) -> None:
    """By librdkafka; the replication factor is accepted, and reported as 1."""
    done(admin.create_topics([NewTopic(TOPIC, num_partitions=3, replication_factor=3)]))
    described = done(admin.describe_topics(TopicCollection([TOPIC])))
    assert (described.name, described.is_internal, len(described.partitions)) == (TOPIC, False, 3)
    assert {len(one.replicas) for one in described.partitions} == {1}
    done(admin.create_partitions([NewPartitions(TOPIC, 5)]))
    assert len(admin.list_topics(timeout=_WAIT_SECONDS).topics[TOPIC].partitions) == 5
    done(admin.delete_topics([TOPIC]))
    assert TOPIC not in admin.list_topics(timeout=_WAIT_SECONDS).topics
    done(admin.create_topics([NewTopic(TOPIC)]))
    again = done(admin.describe_topics(TopicCollection([TOPIC])))
    assert again.topic_id != described.topic_id


def test_refusals_say_why(admin: AdminClient) -> None:
    """With Kafka's codes, and words that name the fix."""
    done(admin.create_topics([NewTopic(TOPIC, 2)]))

    def creating(name: str, partitions: int = 1, **options: Any) -> tuple[int, str]:
        return refused(admin.create_topics([NewTopic(name, partitions, **options)]))

    assert creating(TOPIC) == (KafkaError.TOPIC_ALREADY_EXISTS, "Topic 'shop.orders' already exists.")
    assert creating("shop/a/b")[0] == KafkaError.TOPIC_EXCEPTION
    assert creating("shop.orders-part-7")[0] == KafkaError.TOPIC_EXCEPTION
    assert creating("many", 10_001)[0] == KafkaError.INVALID_PARTITIONS
    code, words = creating("typo", config={"retention.mss": "1"})
    assert (code, words) == (
        KafkaError.INVALID_CONFIG,
        "Unknown topic config name: retention.mss. Did you mean retention.ms?",
    )
    assert creating("bad", config={"retention.ms": "soon"})[0] == KafkaError.INVALID_CONFIG
    code, words = creating("nostore", config={"local.retention.ms": "1000"})
    assert code == KafkaError.INVALID_CONFIG
    assert "retention.ms" in words
    code, words = refused(admin.create_partitions([NewPartitions(TOPIC, 2)]))
    assert (code, "currently has 2 partition(s)" in words) == (KafkaError.INVALID_PARTITIONS, True)
    assert refused(admin.delete_topics(["nobody"]))[0] == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert refused(admin.create_partitions([NewPartitions("nobody", 2)]))[0] == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert set(admin.list_topics(timeout=_WAIT_SECONDS).topics) == {TOPIC}


def test_validation_changes_nothing(admin: AdminClient) -> None:
    """`validate_only` says what would happen."""
    assert done(admin.create_topics([NewTopic(TOPIC, 3)], validate_only=True)) is None
    assert admin.list_topics(timeout=_WAIT_SECONDS).topics == {}
    done(admin.create_topics([NewTopic(TOPIC)]))
    done(admin.create_partitions([NewPartitions(TOPIC, 4)], validate_only=True))
    done(alter(admin, ("retention.ms", "5000", AlterConfigOpType.SET), validate_only=True))
    assert len(admin.list_topics(timeout=_WAIT_SECONDS).topics[TOPIC].partitions) == 1
    assert configs(admin)["retention.ms"].value == "-1"


def test_kafka_python_handles_topics(service: Service, python: Any) -> None:
    """Another client, with other versions of the requests."""
    python.create_topics([PythonTopic(TOPIC, 2, 1, topic_configs={"retention.ms": "60000"})])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = python.describe_configs([PythonResource(PythonType.TOPIC, TOPIC)], config_filter="all")
    assert "60000" in str(found)
    python.create_partitions({TOPIC: 4})
    (described,) = python.describe_topics([TOPIC])
    assert len(described["partitions"]) == 4
    produce(service, [b"0", b"1", b"2"], partition=3)
    assert python.delete_records({PythonPartition(TOPIC, 3): 2})
    python.delete_topics([TOPIC])
    assert TOPIC not in python.list_topics()


def test_aiokafka_handles_topics(service: Service) -> None:
    """It replaces configs as a whole: what is not named is taken back."""

    async def play() -> dict[str, str]:
        admin = AIOKafkaAdminClient(bootstrap_servers=service.kafka)
        await admin.start()
        try:
            await admin.create_topics([AioTopic(TOPIC, 1, 1, topic_configs={"retention.ms": "60000"})])
            await admin.alter_configs([AioResource(AioType.TOPIC, TOPIC, {"retention.bytes": "70000"})])
            (answer,) = await admin.describe_configs([AioResource(AioType.TOPIC, TOPIC)])
            await admin.delete_topics([TOPIC])
            return {entry[0]: entry[1] for entry in answer.resources[0][4]}
        finally:
            await admin.close()

    found = asyncio.run(play())
    assert (found["retention.ms"], found["retention.bytes"]) == ("-1", "70000")


def test_topics_are_not_created_by_asking_where_that_is_off(serve: Callable[..., Service]) -> None:
    """`--no-auto-create-topics`: producers and consumers learn that there is no such topic."""
    service = serve("--no-auto-create-topics")
    admin = AdminClient({"bootstrap.servers": service.kafka})
    found = admin.list_topics("typo", timeout=_WAIT_SECONDS).topics["typo"]
    assert found.error is not None
    assert found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert configs(admin, "1", ResourceType.BROKER)["auto.create.topics.enable"].value == "false"
    done(admin.create_topics([NewTopic(TOPIC)]))
    produce(service, [b"there"])
    assert set(admin.list_topics(timeout=_WAIT_SECONDS).topics) == {TOPIC}


def test_names_are_listed_as_they_are_understood(service: Service) -> None:
    """`a.b.c` is `a/b.c`; a topic whose namespace has a dot is listed with its slash, so that nothing collides."""
    assert service.stop() == 0
    with tidelog.open(service.directory) as log:
        for name in ("a/b.c", "a.b/c", "default/plain", "default/with.dot", "shop/orders"):
            log.topic(name).append(name.encode(), sync=True)
    admin = AdminClient({"bootstrap.servers": service.start().kafka})
    listed = {"a.b.c", "a.b/c", "plain", "default.with.dot", "shop.orders"}
    assert set(admin.list_topics(timeout=_WAIT_SECONDS).topics) == listed
    assert refused(admin.create_topics([NewTopic("a.b.c")]))[0] == KafkaError.TOPIC_ALREADY_EXISTS
    done(admin.delete_topics(["a.b/c"]))
    assert set(admin.list_topics(timeout=_WAIT_SECONDS).topics) == listed - {"a.b/c"}


# Configs


def test_configs_are_what_was_set_and_survive(service: Service, admin: AdminClient) -> None:
    """Set, taken back, appended to; the library has them as settings, and both outlive a restart."""
    given = {"retention.ms": "86400123", "cleanup.policy": "compact", "segment.bytes": "1048576"}
    done(admin.create_topics([NewTopic(TOPIC, 2, config=given)]))
    found = configs(admin)
    assert {name: found[name].value for name in given} == given
    assert not found["retention.ms"].is_default
    assert found["max.message.bytes"].is_default
    assert "log.retention.ms" in found["retention.ms"].synonyms
    done(
        alter(
            admin,
            ("cleanup.policy", "delete", AlterConfigOpType.APPEND),
            ("segment.bytes", None, AlterConfigOpType.DELETE),
            ("retention.bytes", "1000", AlterConfigOpType.SET),
        )
    )
    assert service.stop() == 0
    with tidelog.open(service.directory) as log:
        own = log.configure_topic("shop/orders")
        assert (own["retention_seconds"], own["retention_bytes"], own["compaction"]) == (86401, 1000, "by_key")
        log.configure_topic("shop/orders", retention_bytes=2000)
    admin = AdminClient({"bootstrap.servers": service.start().kafka})
    found = configs(admin)
    assert found["cleanup.policy"].value == "compact,delete"
    assert found["retention.ms"].value == "86400123"
    assert found["retention.bytes"].value == "2000"  # the library had the last word
    assert (found["segment.bytes"].value, found["segment.bytes"].is_default) == ("1073741824", True)


def test_wrong_configs_change_nothing(admin: AdminClient) -> None:
    """One that is wrong keeps the others of its topic from being set."""
    done(admin.create_topics([NewTopic(TOPIC)]))
    for name, value in (("retention.ms", "-2"), ("compression.type", "brotli"), ("cleanup.policy", "shred")):
        futures = alter(admin, ("retention.bytes", "5", AlterConfigOpType.SET), (name, value, AlterConfigOpType.SET))
        assert refused(futures)[0] == KafkaError.INVALID_CONFIG
    assert refused(alter(admin, ("retention.ms", "1", AlterConfigOpType.APPEND)))[0] == KafkaError.INVALID_CONFIG
    assert configs(admin)["retention.bytes"].value == "-1"
    broker = ConfigResource(
        ResourceType.BROKER,
        "1",
        incremental_configs=[ConfigEntry("num.partitions", "9", incremental_operation=AlterConfigOpType.SET)],
    )
    code, words = refused(admin.incremental_alter_configs([broker]))
    assert (code, "tidelog serve" in words) == (KafkaError.INVALID_REQUEST, True)


def test_changed_configs_take_effect_without_a_restart(service: Service, admin: AdminClient) -> None:
    """On partitions that are open: the size of batches, the time of messages, the compression of answers."""
    done(admin.create_topics([NewTopic(TOPIC)]))
    old = 1_000_000_000_000
    producer = Producer({"bootstrap.servers": service.kafka})
    producer.produce(TOPIC, b"x" * 5000, timestamp=old)
    assert producer.flush(_WAIT_SECONDS) == 0
    set_config(admin, "max.message.bytes", "2000")
    with pytest.raises(KafkaException) as caught:
        produce(service, [b"y" * 5000])
    assert caught.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    set_config(admin, "max.message.bytes", "1000000")
    set_config(admin, "message.timestamp.type", "LogAppendTime")
    producer.produce(TOPIC, b"now", timestamp=old)
    assert producer.flush(_WAIT_SECONDS) == 0
    found: list[Message] = []
    for codec in ("zstd", "gzip", "snappy", "lz4", "uncompressed"):
        set_config(admin, "compression.type", codec)
        found = consume(service, 2)
        assert [message.value() for message in found] == [b"x" * 5000, b"now"]
    assert found[0].timestamp() == (TIMESTAMP_CREATE_TIME, old)
    kind, time = found[1].timestamp()
    assert (kind, time > old) == (TIMESTAMP_LOG_APPEND_TIME, True)


def test_broker_is_described_under_known_names(serve: Callable[..., Service]) -> None:
    """What users look for, read-only."""
    service = serve("--default-partitions", "4")
    admin = AdminClient({"bootstrap.servers": service.kafka})
    found = configs(admin, "1", ResourceType.BROKER)
    assert found["num.partitions"].value == "4"
    assert found["advertised.listeners"].value == f"PLAINTEXT://{service.kafka}"
    assert all(entry.is_read_only for entry in found.values())
    done(admin.create_topics([NewTopic(TOPIC, num_partitions=-1)]))
    assert len(admin.list_topics(timeout=_WAIT_SECONDS).topics[TOPIC].partitions) == 4


# Records


def test_deleted_records_stay_deleted(service: Service, admin: AdminClient) -> None:
    """Up to an offset, up to the end with -1; after a kill too."""
    done(admin.create_topics([NewTopic(TOPIC)]))
    produce(service, [b"%d" % number for number in range(10)])
    deleted = done(admin.delete_records([TopicPartition(TOPIC, 0, 4)]))
    assert deleted.low_watermark == 4
    assert [message.value() for message in consume(service, 6, start=4)][:1] == [b"4"]
    assert refused(admin.delete_records([TopicPartition(TOPIC, 0, 11)]))[0] == KafkaError.OFFSET_OUT_OF_RANGE
    service.kill()
    admin = AdminClient({"bootstrap.servers": service.start().kafka})
    earliest = admin.list_offsets({TopicPartition(TOPIC, 0): OffsetSpec.earliest()})  # type: ignore[no-untyped-call]
    assert done(earliest).offset == 4
    assert done(admin.delete_records([TopicPartition(TOPIC, 0, -1)])).low_watermark == 10
    produce(service, [b"next"])
    assert consume(service, 1, start=10)[0].value() == b"next"
    set_config(admin, "cleanup.policy", "compact")
    assert refused(admin.delete_records([TopicPartition(TOPIC, 0, 11)]))[0] == KafkaError.POLICY_VIOLATION


# Quotas


def ask(service: Service, api_key: int, version: int, request: Any) -> Any:
    """One request, for what no client in Python can ask."""
    host, _, port = service.kafka.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_WAIT_SECONDS) as connection:
        connection.sendall(encode_request(api_key, version, 7, "tests", request))
        answers = connection.makefile("rb")
        size = int.from_bytes(answers.read(4), "big")
        return decode_response(api_key, version, answers.read(size))[1]


def set_quota(service: Service, key: str, rate: float, client_id: str) -> None:
    module = wire(49)
    entry = module.AlterClientQuotasRequestEntryData(
        [module.AlterClientQuotasRequestEntityData("client-id", client_id)],
        [module.AlterClientQuotasRequestOpData(key, rate, False)],
    )
    (answer,) = ask(service, 49, 1, module.AlterClientQuotasRequest(entries=[entry], validate_only=False)).entries
    assert (answer.error_code, answer.error_message) == (0, None)


def test_client_beyond_its_quota_is_throttled(service: Service) -> None:
    """A producer and a consumer are told to wait, and lose nothing; others do not wait. Quotas outlive a kill."""
    set_quota(service, "producer_byte_rate", 200_000.0, "slow")
    set_quota(service, "consumer_byte_rate", 200_000.0, "slow")
    service.kill()
    service.start()
    throttled: list[str] = []

    def noted(who: str) -> dict[str, Any]:
        return {"client.id": who, "throttle_cb": lambda event: throttled.append(f"{who} {event.throttle_time > 0}")}

    values = [b"%d" % number * 10_000 for number in range(40)]
    produce(service, values, **noted("fast"))
    produce(service, values, **noted("slow"), **{"batch.size": 50_000})
    assert set(throttled) <= {"slow True", "slow False"}
    assert "slow True" in throttled
    throttled.clear()
    assert len(consume(service, 80, **noted("slow"))) == 80
    assert "slow True" in throttled


def test_requests_that_are_served_are_those_of_the_reference(service: Service) -> None:
    """docs/reference/kafka.md promises no more and no less than a running server offers (SASL with `--auth` only)."""
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "kafka.md"
    rows = re.findall(r"^\| (\d+) \| \w+ \| (\d+)(?:-(\d+))?", page.read_text("utf-8"), re.MULTILINE)
    promised = {int(key): (int(first), int(last or first)) for key, first, last in rows}
    assert all(promised.pop(key) for key in (*WITH_AUTHENTICATION, *AMONG_NODES))
    found = ask(service, 18, 0, wire(18).ApiVersionsRequest()).api_keys
    assert {one.api_key: (one.min_version, one.max_version) for one in found} == promised


# With a store


def test_admin_requests_work_with_a_store(serve: Callable[..., Service], tmp_path: Path) -> None:
    """Local retention is accepted there; configs and deletions are in the catalog, and a new disk has them."""
    store = ("--store", f"file://{tmp_path}/bucket", "--metadata", "bucket")
    service = serve(*store)
    admin = AdminClient({"bootstrap.servers": service.kafka})
    done(admin.create_topics([NewTopic(TOPIC, 1, config={"local.retention.ms": "1000", "retention.ms": "600000"})]))
    produce(service, [b"%d" % number for number in range(10)], **{"enable.idempotence": True})
    set_config(admin, "compression.type", "zstd")
    assert done(admin.delete_records([TopicPartition(TOPIC, 0, 6)])).low_watermark == 6
    assert configs(admin)["remote.storage.enable"].value == "true"
    assert service.stop() == 0
    again = serve(*store, directory=tmp_path / "other")
    admin = AdminClient({"bootstrap.servers": again.kafka})
    found = configs(admin)
    assert (found["local.retention.ms"].value, found["compression.type"].value) == ("1000", "zstd")
    produce(again, [b"10"], **{"enable.idempotence": True})
    assert [message.value() for message in consume(again, 5, start=6)] == [b"6", b"7", b"8", b"9", b"10"]
    done(admin.delete_topics([TOPIC]))
    assert admin.list_topics(timeout=_WAIT_SECONDS).topics == {}


def test_producers_go_on_after_everything_was_deleted(service: Service, admin: AdminClient) -> None:
    """What is known of them outlives their messages, and a restart."""
    done(admin.create_topics([NewTopic(TOPIC)]))
    settings = {"enable.idempotence": True, "bootstrap.servers": service.kafka}
    producer = Producer(settings)
    for number in range(3):
        producer.produce(TOPIC, b"%d" % number)
        assert producer.flush(_WAIT_SECONDS) == 0
    assert done(admin.delete_records([TopicPartition(TOPIC, 0, -1)])).low_watermark == 3
    service.kill()
    service.start()
    producer.produce(TOPIC, b"3")
    assert producer.flush(_WAIT_SECONDS) == 0
    assert consume(service, 1, start=3)[0].value() == b"3"


def test_open_transaction_does_not_keep_deleted_records(service: Service, admin: AdminClient) -> None:
    """The last stable offset is never before the start; the outcome of the transaction counts for what follows."""
    done(admin.create_topics([NewTopic(TOPIC)]))
    producer = Producer({"bootstrap.servers": service.kafka, "transactional.id": "t"})
    producer.init_transactions(_WAIT_SECONDS)
    producer.begin_transaction()
    for number in range(3):
        producer.produce(TOPIC, b"%d" % number)
    assert producer.flush(_WAIT_SECONDS) == 0
    assert done(admin.delete_records([TopicPartition(TOPIC, 0, -1)])).low_watermark == 3
    ends = {TopicPartition(TOPIC, 0): OffsetSpec.latest()}  # type: ignore[no-untyped-call]
    assert done(admin.list_offsets(ends, isolation_level=IsolationLevel.READ_COMMITTED)).offset == 3
    producer.produce(TOPIC, b"3")
    producer.commit_transaction(_WAIT_SECONDS)
    found = consume(service, 1, start=3, **{"isolation.level": "read_committed"})
    assert [message.value() for message in found] == [b"3"]


def transactional(service: Service, name: str) -> Producer:
    """A producer with transactions."""
    made = Producer({"bootstrap.servers": service.kafka, "transactional.id": name, "log_level": 0})
    made.init_transactions(_WAIT_SECONDS)
    return made


def test_administrators_see_transactions_and_producers(service: Service, python: Any) -> None:
    """As kafka-transactions shows them: open ones with their partitions, those that ended, and who writes where."""
    teller, other = transactional(service, "teller"), transactional(service, "other")
    for sender in (other, teller):
        sender.begin_transaction()
        sender.produce(TOPIC, b"value")
        assert sender.flush(_WAIT_SECONDS) == 0
        if sender is other:
            sender.commit_transaction(_WAIT_SECONDS)
    admin = python
    try:
        ((listed,),) = [admin.list_transactions(state_filters=["Ongoing"]).values()]
        assert [(one.transactional_id, one.state.value) for one in listed] == [("teller", "Ongoing")]
        ((listed,),) = [admin.list_transactions().values()]
        assert sorted(one.transactional_id for one in listed) == ["other", "teller"]
        ((listed,),) = [admin.list_transactions(producer_id_filters=[listed[0].producer_id]).values()]
        assert len(listed) == 1
        ((listed,),) = [admin.list_transactions(state_filters=["Ongoing"], duration_filter_ms=86_400_000).values()]
        assert listed == []
        described = admin.describe_transactions(["teller", "other"])
        partition = PythonPartition(TOPIC, 0)
        assert (described["teller"].state.value, described["teller"].topic_partitions) == ("Ongoing", {partition})
        assert described["teller"].transaction_start_time_ms > 0
        assert (described["other"].state.value, described["other"].topic_partitions) == ("CompleteCommit", set())
        with pytest.raises(TransactionalIdNotFoundError):
            admin.describe_transactions(["nobody"])
        known = {one.producer_id: one for one in admin.describe_producers([partition])[partition].active_producers}
        writes = known[described["teller"].producer_id]
        assert (writes.last_sequence, writes.current_transaction_start_offset) == (0, 2)
        ended = known[described["other"].producer_id]
        assert (ended.last_sequence, ended.current_transaction_start_offset) == (0, -1)
    finally:
        teller.abort_transaction(_WAIT_SECONDS)
