"""Old messages through Kafka's protocol: `tidelog serve` with a store, beside a real Kafka with tiered storage.

Both have the same messages of 1 KiB in a directory that stands for the bucket: Kafka by its LocalTieredStorage, tidelog
by a file:// store. Local copies are gone, except for Kafka's active segment, which it keeps. The client is librdkafka
for both: everything from the first offset, and the first message from somewhere in the middle, always with a new one.

python bench/kafka_history.py [--megabytes 256] [--rounds 3] [--jars DIR] [--dir .] [--json]
"""

from __future__ import annotations

import argparse
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka_peer import JARS, Broker, Kafka, Tidelog
from measuring import Figure, MissingPeerError, alternate, compared, parser_for, report, scratch_directory

import tidelog
from tidelog.cli.dev_s3 import free_ports

TOPIC = "history"
VALUE = os.urandom(1024)
SEGMENT_BYTES = 16 << 20
PATIENCE_SECONDS = 120.0
STORAGE = "org.apache.kafka.server.log.remote.storage.LocalTieredStorage"
TIERED = (
    "remote.log.storage.system.enable=true",
    f"remote.log.storage.manager.class.name={STORAGE}",
    "remote.log.storage.manager.class.path=",
    "remote.log.metadata.manager.listener.name=PLAINTEXT",
    "rlmm.config.remote.log.metadata.topic.replication.factor=1",
    "rlmm.config.remote.log.metadata.topic.num.partitions=1",
    "remote.log.manager.task.interval.ms=500",
    "log.retention.check.interval.ms=500",
    "log.initial.task.delay.ms=500",
)


def fill_kafka(kafka: Kafka, logs: Path, count: int) -> None:
    """A topic whose closed segments are remote only."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    config = {
        "remote.storage.enable": "true",
        "segment.bytes": str(SEGMENT_BYTES),
        "local.retention.bytes": "1",
        "retention.ms": "-1",
    }
    admin.create_topics([NewTopic(TOPIC, 1, 1, config=config)])[TOPIC].result(60)
    producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 5, "acks": "all"})
    for number in range(count):
        while True:
            try:
                producer.produce(TOPIC, VALUE)
                break
            except BufferError:
                producer.poll(0.01)
        if number % 1000 == 0:
            producer.poll(0)
    assert producer.flush(120) == 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list((logs / f"{TOPIC}-0").glob("*.log"))) > 1:
        if time.monotonic() > deadline:
            raise MissingPeerError(f"Kafka has not moved its segments after {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.1)


def fill_tidelog(directory: Path, store: Path, count: int) -> None:
    """The same messages, shipped; nothing of them stays here."""
    with tidelog.open(directory, store=f"file://{store}", local_retention_bytes=1) as log:
        topic = log.topic(f"default/{TOPIC}")
        for first in range(0, count, 4096):
            topic.append_many([VALUE] * min(4096, count - first))
        topic.ship()
        topic.prune()


def consumer_at(broker: Broker, offset: int) -> Consumer:
    """A new consumer that begins there."""
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "bench", "enable.auto.commit": False})
    consumer.assign([TopicPartition(TOPIC, 0, offset)])
    return consumer


def consume_rate(broker: Broker, count: int) -> float:
    """Messages a second, everything from the first one."""
    consumer, found = consumer_at(broker, 0), 0
    begin = time.perf_counter()
    while found < count:
        found += len(consumer.consume(10_000, 1.0))
        assert time.perf_counter() - begin < PATIENCE_SECONDS, f"only {found:,} of {count:,} messages came"
    seconds = time.perf_counter() - begin
    consumer.close()
    return count / seconds


def seek_ms(broker: Broker, count: int) -> float:
    """Milliseconds until the first message from an offset in the first three quarters is there."""
    consumer = consumer_at(broker, random.randrange(count * 3 // 4))
    begin = time.perf_counter()
    while consumer.poll(1.0) is None:
        assert time.perf_counter() - begin < PATIENCE_SECONDS, "no message came"
    milliseconds = (time.perf_counter() - begin) * 1000
    consumer.close()
    return milliseconds


def measured(arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, object]]:
    """Both, in turns."""
    count = max(1000, arguments.megabytes * 1024)
    with scratch_directory(arguments.dir) as scratch, ExitStack() as running:
        remote = scratch / "remote"
        properties = (*TIERED, f"rsm.config.dir={remote}")
        kafka = running.enter_context(Kafka(scratch / "kafka", arguments.jars, free_ports(2)[0], *properties))
        fill_kafka(kafka, scratch / "kafka" / "data" / "logs", count)
        fill_tidelog(scratch / "served", scratch / "store", count)
        ours = running.enter_context(Tidelog(scratch / "served"))
        brokers: dict[str, Broker] = {"tidelog": ours, "Kafka": kafka}
        rates = alternate(
            {name: lambda one=one: consume_rate(one, count) for name, one in brokers.items()}, arguments.rounds
        )
        seeks = alternate(
            {name: lambda one=one: seek_ms(one, count) for name, one in brokers.items()}, 5 * arguments.rounds
        )
        tiered = sum(path.stat().st_size for path in remote.rglob("*") if path.is_file())
    figures = [
        compared(f"consume {count >> 10} MiB of history", rates, "Kafka", 1, durability="in the store"),
        compared(
            "first message in the middle of it",
            seeks,
            "Kafka",
            1,
            unit=" ms",
            digits=1,
            durability="in the store",
            smaller_is_better=True,
        ),
    ]
    return figures, {"messages": count, "rates": rates, "seek_ms": seeks, "kafka_remote_bytes": tiered}


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of messages (256)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    parser.add_argument("--jars", type=Path, default=JARS, help="where Kafka's jars are kept")
    arguments = parser.parse_args()
    missing: list[str] = []
    figures, details = list[Figure](), dict[str, object]()
    try:
        figures, details = measured(arguments)
    except MissingPeerError as error:
        missing.append(f"Kafka with tiered storage: {error}")
    report("kafka_history", figures, details, as_json=arguments.json, missing=missing)


if __name__ == "__main__":
    main()
