"""`tidelog serve` beside a real Kafka on the same machine, in alternating rounds: produce, consume, latency, memory.

Kafka answers acks=all when a batch is in the page cache; so does tidelog for topics with flush.messages above 1. With
fsync before every answer (the default here, `log.flush.interval.messages=1` there) both are compared too. The clients
are Kafka's own tools and librdkafka, the same for both.

python bench/kafka.py [--records 300000] [--rounds 3] [--only NAME ...] [--jars DIR] [--dir .] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka_codec import make_batch
from kafka_peer import JARS, Broker, Kafka, Tidelog
from measuring import Figure, MissingPeerError, at_least, at_most, compared, parser_for, report, scratch_directory

from tidelog import _native
from tidelog.cli.dev_s3 import free_ports
from tidelog.service.kafka.codec import encode_request, wire

VALUE = os.urandom(1024)
FETCH, LIST_OFFSETS = 1, 2
Measure = Callable[[Broker, str], float]


class Synced(NamedTuple):
    """What synced producers reached, and the CPU that one message cost on either side."""

    rate: float
    server_us: float
    client_us: float


class Bench:
    """Both brokers, and what is measured with them."""

    def __init__(self, kafka: Kafka, tidelog: Tidelog, records: int, rounds: int) -> None:
        self.kafka = kafka
        self.tidelog = tidelog
        self._records = records
        self.rounds = rounds

    def new_topic(self, broker: Broker, name: str, partitions: int = 1, **config: str) -> str:
        topic = f"{name}-{time.monotonic_ns()}"
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(60)
        return topic

    def alternate(self, name: str, measure: Measure, **config: str) -> tuple[list[float], list[float]]:
        """What both reached in each round, tidelog first."""
        found: dict[str, list[float]] = {"tidelog": [], "kafka": []}
        for number in range(self.rounds):
            brokers: list[Broker] = [self.kafka, self.tidelog]
            for broker in brokers if number % 2 else reversed(brokers):
                own = config if broker is self.tidelog else {}
                found[broker.name].append(measure(broker, self.new_topic(broker, name, **own)))
        return found["tidelog"], found["kafka"]

    # Kafka's own tools

    def producer_perf(self, *properties: str) -> Measure:
        def measure(broker: Broker, topic: str) -> float:
            said = self.kafka.tool(
                *("ProducerPerformance", "--topic", topic, "--num-records", str(self._records)),
                *("--record-size", "1024", "--throughput", "-1", "--producer-props"),
                *(f"bootstrap.servers={broker.address}", *properties),
            )
            return float(said.splitlines()[-1].split(",")[1].split()[0])

        return measure

    # librdkafka

    def produce(self, broker: Broker, topic: str, batch_bytes: int = 1_000_000) -> float:
        settings = {"linger.ms": 5, "acks": "all", "batch.size": batch_bytes}
        producer = Producer({"bootstrap.servers": broker.address, **settings})
        begin = time.perf_counter()
        for number in range(self._records):
            while True:
                try:
                    producer.produce(topic, VALUE)
                    break
                except BufferError:
                    producer.poll(0.01)
            if number % 1000 == 0:
                producer.poll(0)
        assert producer.flush(120) == 0
        return self._records / (time.perf_counter() - begin)

    def produce_small(self, broker: Broker, topic: str) -> float:
        """With batches of 16 KiB, as Java's: those of 1 MB are so few that the client decides, synced or not."""
        return self.produce(broker, topic, 16384)

    def consume(self, broker: Broker, topic: str) -> float:
        self.produce(broker, topic)
        consumer = Consumer({"bootstrap.servers": broker.address, "group.id": topic, "enable.auto.commit": False})
        consumer.assign([TopicPartition(topic, 0, 0)])
        begin, found = time.perf_counter(), 0
        while found < self._records:
            found += len(consumer.consume(10_000, 1.0))
        seconds = time.perf_counter() - begin
        consumer.close()
        return found / seconds

    def latency_ms(self, broker: Broker, topic: str) -> float:
        """p99 from produce() to poll(), at 1,000 messages a second.

        One message a call: consume(100) waits for 100 messages, which is a tenth of a second at this rate.
        """
        count = 5000
        took: list[float] = []
        consumer = Consumer({"bootstrap.servers": broker.address, "group.id": topic, "enable.auto.commit": False})
        consumer.assign([TopicPartition(topic, 0, 0)])

        def receive() -> None:
            while len(took) < count:
                message = consumer.poll(1.0)
                if message is not None and isinstance(value := message.value(), bytes):
                    took.append(time.perf_counter() - struct.unpack_from("d", value)[0])

        thread = threading.Thread(target=receive)
        thread.start()
        producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0, "acks": "all"})
        begin = time.perf_counter()
        for number in range(count):
            time.sleep(max(0.0, begin + number / 1000 - time.perf_counter()))
            producer.produce(topic, struct.pack("d", time.perf_counter()) + VALUE[:1016])
            producer.poll(0)
        producer.flush(60)
        thread.join(120)
        consumer.close()
        return statistics.quantiles(took[count // 5 :], n=100)[98] * 1000

    # Many clients

    def synced_producers(self, scratch: Path, connections: int, in_flight: int, seconds: float = 5.0) -> Synced:
        """Clients that wait until their messages of 1 KiB are on the disk, with so many of them on their way."""
        topic = self.new_topic(self.tidelog, "synced")
        asked = scratch / "request"
        asked.write_bytes(_produce_request(topic))
        used = self.tidelog.cpu_seconds()
        command = [
            _compiled(scratch, "kafka_load"),
            *map(str, (*_host(self.tidelog), asked, connections, in_flight, seconds)),
        ]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        used = self.tidelog.cpu_seconds() - used
        rate = float(said[0])
        answers = rate * seconds
        return Synced(rate, used / answers * 1e6, float(said[1]) / answers * 1e6)

    def idle_cpu(self, broker: Broker, consumers: int = 1000, seconds: float = 10.0) -> float:
        """Share of a core that consumers cost who wait at the end of a topic."""
        topic = self.new_topic(broker, "idle")
        request = _fetch_request(topic)

        async def one(until: float) -> None:
            reader, writer = await asyncio.open_connection(*_host(broker))
            with contextlib.suppress(asyncio.IncompleteReadError):
                while time.perf_counter() < until:
                    writer.write(request)
                    await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            writer.close()

        async def all_of_them() -> float:
            begin = time.perf_counter()
            tasks = [asyncio.create_task(one(begin + seconds + 5)) for _ in range(consumers)]
            await asyncio.sleep(5)
            before = broker.cpu_seconds()
            await asyncio.sleep(seconds)
            used = broker.cpu_seconds() - before
            await asyncio.gather(*tasks)
            return used / seconds

        return asyncio.run(all_of_them())


def _host(broker: Broker) -> tuple[str, int]:
    host, _, port = broker.address.rpartition(":")
    return host, int(port)


def _produce_request(topic: str) -> bytes:
    module = wire(0)
    records = bytearray(make_batch(1024, 1))
    struct.pack_into(">qhi", records, 43, -1, -1, -1)  # no producer
    struct.pack_into(">I", records, 17, _native.crc32c(memoryview(records)[21:]))
    partition = module.ProduceRequestPartitionProduceData(index=0, records=bytes(records))
    data = module.ProduceRequestTopicProduceData(name=topic, partition_data=[partition])
    return bytes(encode_request(0, 9, 1, "bench", module.ProduceRequest(acks=-1, timeout_ms=60_000, topic_data=[data])))


def _fetch_request(topic: str) -> bytes:
    module = wire(FETCH)
    partition = module.FetchRequestPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    asked = module.FetchRequestTopic(topic=topic, partitions=[partition])
    request = module.FetchRequest(max_wait_ms=500, min_bytes=1, max_bytes=1 << 24, topics=[asked])
    return bytes(encode_request(FETCH, 12, 1, "bench", request))


def _compiled(scratch: Path, name: str) -> str:
    """A program of bench/, compiled: a client in Python would cost more than the server."""
    program = scratch / name
    if not program.exists():
        source = Path(__file__).with_name(f"{name}.c")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-pthread", "-o", str(program), str(source)], check=True)
    return str(program)


def raw_synced(directory: Path, group: int = 64, seconds: float = 3.0) -> float:
    """Messages of 1 KiB a second by write and fdatasync of groups, without anything around it."""
    data = os.urandom(1040) * group
    with (directory / "raw").open("wb", buffering=0) as file:
        begin, groups = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            file.write(data)
            os.fdatasync(file.fileno())
            groups += 1
        return groups * group / (time.perf_counter() - begin)


def floor_rate(scratch: Path, request: bytes, connections: int, in_flight: int, seconds: float = 3.0) -> float:
    """What the same client reaches against a server in C that only receives, writes, syncs and answers."""
    (scratch / "floor-data").mkdir(exist_ok=True)
    asked = scratch / "request"
    asked.write_bytes(request)
    command = [_compiled(scratch, "kafka_floor"), str(scratch / "floor-data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        address = ("127.0.0.1", server.stdout.readline().strip())
        client = [_compiled(scratch, "kafka_load"), *map(str, (*address, asked, connections, in_flight, seconds))]
        said = subprocess.run(client, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        server.stdin.close()
    return float(said[0])


def open_partitions(directory: Path, count: int = 2000) -> tuple[float, int]:
    """Seconds until every partition of a topic answers after a start, and the threads that this takes."""
    with Tidelog(directory) as broker:
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.create_topics([NewTopic("many", count, 1)])["many"].result(120)
        _ask_all(broker, count)
    with Tidelog(directory) as broker:
        begin = time.perf_counter()
        _ask_all(broker, count)
        return time.perf_counter() - begin, broker.threads()


def _ask_all(broker: Broker, count: int) -> None:
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "none", "enable.auto.commit": False})
    asked = [TopicPartition("many", number, 1) for number in range(count)]
    assert len(consumer.offsets_for_times(asked, timeout=120)) == count
    consumer.close()


NOT_SYNCED = {"flush.messages": "9223372036854775807"}


def synced_figures(bench: Bench, scratch: Path) -> list[Figure]:
    """64 producers with one message on its way each, and with five, beside write and fdatasync of 64 in rounds, and
    beside the least that a server does."""
    found = []
    for in_flight in (1, 5):
        rounds = []
        for _ in range(bench.rounds):
            ours, raw = bench.synced_producers(scratch, 64, in_flight), raw_synced(scratch)
            rounds.append((ours, raw, floor_rate(scratch, _produce_request("synced"), 64, in_flight)))
        ours, raw, floor = sorted(rounds, key=lambda one: one[0].rate / one[1])[len(rounds) // 2]
        words = f"{ours.rate:,.0f}/s ({ours.server_us:.0f} us of CPU a message, the client {ours.client_us:.0f})"
        name = "64 synced producers" if in_flight == 1 else f"the same, {in_flight} on their way"
        found.append(
            at_least(name, words, f"write + fdatasync {raw:,.0f}/s", ours.rate / raw, 0.5, durability="synced")
        )
        found.append(
            at_least(
                f"{name}, server in C",
                words,
                f"a server in C {floor:,.0f}/s",
                ours.rate / floor,
                0.5,
                durability="synced",
            )
        )
    return found


def figures(bench: Bench, synced: Bench, scratch: Path, only: list[str]) -> list[Figure]:
    """What was asked for."""
    found: list[Figure] = []

    def rates(name: str, work: Callable[[], tuple[list[float], list[float]]], target: float) -> None:
        if not only or name in only:
            durability = "synced" if "fsync" in name else "in the file"
            both = dict(zip(("tidelog", "Kafka"), work(), strict=True))
            found.append(compared(name, both, "Kafka", target, durability=durability))

    small, large = bench.producer_perf("acks=all"), bench.producer_perf("acks=all", "batch.size=262144", "linger.ms=10")
    rates("producer-perf, default", lambda: bench.alternate("small", small, **NOT_SYNCED), 1)
    rates("producer-perf, 256 KiB", lambda: bench.alternate("large", large, **NOT_SYNCED), 1)
    rates("librdkafka produce", lambda: bench.alternate("produce", bench.produce, **NOT_SYNCED), 1)
    rates("librdkafka consume", lambda: bench.alternate("consume", bench.consume, **NOT_SYNCED), 1)
    rates("producer-perf, fsync", lambda: synced.alternate("fsync", synced.producer_perf("acks=all")), 3)
    rates("librdkafka produce, fsync", lambda: synced.alternate("fsync", synced.produce), 3)
    rates("librdkafka 16 KiB, fsync", lambda: synced.alternate("fsync", synced.produce_small), 3)
    if not only or "latency" in only:
        rounds = bench.alternate("latency", bench.latency_ms, **NOT_SYNCED)
        ours, theirs = map(statistics.median, rounds)
        words = f"{ours:.1f} ms", f"Kafka {theirs:.1f} ms"
        found.append(at_most("p99 at 1,000/s", *words, ours / theirs, 1, durability="in the file", rounds=rounds))
    if not only or "idle" in only:
        ours, theirs = bench.idle_cpu(bench.tidelog), bench.idle_cpu(bench.kafka)
        found.append(at_most("1,000 idle consumers", f"{ours:.1%} of a core", f"Kafka {theirs:.1%}", ours / theirs, 1))
    if not only or "memory" in only:
        ours, theirs = bench.tidelog.resident_bytes(), bench.kafka.resident_bytes()
        found.append(at_most("resident memory", f"{ours >> 20} MiB", f"Kafka {theirs >> 20} MiB", ours / theirs, 0.25))
    if not only or "synced producers" in only:
        found += synced_figures(bench, scratch)
    if not only or "partitions" in only:
        seconds, threads = open_partitions(scratch / "many")
        found.append(at_most("open 2,000 partitions", f"{seconds:.1f} s", f"{threads} threads", seconds, 5))
    return found


def measured(arguments: argparse.Namespace) -> list[Figure]:
    """Both brokers side by side; a third, which syncs, where it is asked for."""
    with scratch_directory(arguments.dir) as scratch, contextlib.ExitStack() as running:
        ports = free_ports(4)
        kafka = running.enter_context(Kafka(scratch / "kafka", arguments.jars, ports[0]))
        tidelog = running.enter_context(Tidelog(scratch / "served"))
        bench = Bench(kafka, tidelog, arguments.records, arguments.rounds)
        synced_kafka = kafka
        if not arguments.only or any("fsync" in name for name in arguments.only):
            properties = "log.flush.interval.messages=1"
            synced_kafka = running.enter_context(Kafka(scratch / "synced", arguments.jars, ports[2], properties))
        synced = Bench(synced_kafka, tidelog, arguments.records // 3, arguments.rounds)
        return figures(bench, synced, scratch, arguments.only)


def main() -> None:
    """Prints the figures."""
    parser = parser_for(__doc__)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jars", type=Path, default=JARS)
    arguments = parser.parse_args()
    try:
        found, missing = measured(arguments), []
    except MissingPeerError as error:
        found, missing = [], [f"Kafka: {error}"]
    report("kafka", found, {"records": arguments.records}, as_json=arguments.json, missing=missing)


if __name__ == "__main__":
    main()
