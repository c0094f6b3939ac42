"""Real nodes, etcd and SeaweedFS as processes, as `tidelog cluster dev` starts them, under producers and consumers of
Kafka's protocol: nodes are drained and killed, and nothing that was acknowledged is lost, doubled or out of order."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tidelog.cluster.operations import ClusterOperations
from tidelog.store.keys import DEFAULT_ROOT
from tidelog.store.metadata.open import open_metadata_store

WAIT_SECONDS = 180
PARTITIONS = 6
# Longer than a busy machine pauses a process: a node that is alive must not lose its partitions to others here.
LEASE_SECONDS = "12"
QUIET = {"log_level": 0, "reconnect.backoff.max.ms": 500, "topic.metadata.refresh.interval.ms": 2000}


class DevCluster:
    """A running `tidelog cluster dev`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "tidelog.cli.main", "cluster", "dev", "--nodes", "3", "--lease", LEASE_SECONDS]
        self._process = subprocess.Popen(
            [*command, "--dir", str(directory), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        self.facts: dict[str, Any] = json.loads(line)
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap, **QUIET})
        self.operations = ClusterOperations(open_metadata_store(self.facts["metadata"]), DEFAULT_ROOT)

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in self.facts["nodes"]}

    @property
    def bootstrap(self) -> str:
        return ",".join(node["kafka"] for node in self.facts["nodes"])

    def command(self, *words: str) -> Any:
        """What a command says with --json; it must succeed."""
        command = [sys.executable, "-m", "tidelog.cli.main", "cluster", *words, "--json"]
        done = subprocess.run(
            [*command, "--metadata", self.facts["metadata"]], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def move(self, topic: str, partition: int, node: str) -> None:
        """Returns when clients are sent there."""
        request = self.operations.move(topic.replace(".", "/", 1), partition, node)
        assert self.operations.until(self.operations.is_carried_out(request), WAIT_SECONDS)
        until(lambda: self.leaders(topic)[partition] == node)

    def create(self, **configs: str) -> str:
        """A new topic; its name."""
        name = f"shop.t{secrets.token_hex(4)}"
        for created in self._admin.create_topics([NewTopic(name, PARTITIONS, config=configs)]).values():
            created.result(WAIT_SECONDS)
        return name

    def leaders(self, topic: str) -> dict[int, str]:
        """The node of each partition, as clients see it."""
        found = self._admin.list_topics(topic, timeout=WAIT_SECONDS)
        names = {node["kafka"]: name for name, node in self.nodes.items()}
        brokers = {one.id: names.get(f"{one.host}:{one.port}", "?") for one in found.brokers.values()}
        return {number: brokers.get(one.leader, "") for number, one in found.topics[topic].partitions.items()}

    def stop(self) -> str:
        """Ctrl-C; returns what it said."""
        self._process.send_signal(signal.SIGINT)
        return self._process.communicate(timeout=WAIT_SECONDS)[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """Three nodes."""
    running = DevCluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield running
    finally:
        running.stop()


class Producing:
    """An idempotent producer that sends numbers to every partition, and remembers what was acknowledged."""

    def __init__(self, cluster: DevCluster, topic: str) -> None:
        self.topic = topic
        self.acknowledged: dict[int, list[tuple[int, int]]] = {number: [] for number in range(PARTITIONS)}
        self.errors: list[str] = []
        settings = {"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "linger.ms": 5, **QUIET}
        self._producer = Producer(settings)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._is_over.is_set():
            for partition in range(PARTITIONS):
                self._producer.produce(self.topic, b"%d" % number, partition=partition, on_delivery=self._delivered)
            number += 1
            self._producer.poll(0.01)
        self._producer.flush(WAIT_SECONDS)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(str(error))
            return
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None
        assert offset is not None
        assert value is not None
        self.acknowledged[partition].append((offset, int(value)))

    @property
    def count(self) -> int:
        return min(map(len, self.acknowledged.values()))

    def more(self, count: int = 50) -> None:
        """Waits until so many more are acknowledged in every partition."""
        wanted = self.count + count
        until(lambda: self.count >= wanted or bool(self.errors))

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


def consumed(cluster: DevCluster, topic: str, counts: dict[int, int]) -> dict[int, list[tuple[int, int]]]:
    """So many messages of each partition from its beginning: offsets and values."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": secrets.token_hex(4), **QUIET})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    found: dict[int, list[tuple[int, int]]] = {number: [] for number in range(PARTITIONS)}
    deadline = time.monotonic() + WAIT_SECONDS
    while any(len(found[number]) < count for number, count in counts.items()):
        assert time.monotonic() < deadline, {number: len(some) for number, some in found.items()}
        for message in consumer.consume(1000, 1.0):
            partition, offset, value = message.partition(), message.offset(), message.value()
            if message.error() is None and partition is not None and offset is not None and value is not None:
                found[partition].append((offset, int(value)))
    consumer.close()
    return found


def check_everything_is_there(cluster: DevCluster, producing: Producing) -> None:
    """Each acknowledged message once, at its offset, in order, and nothing else."""
    producing.stop()
    assert producing.errors == []
    counts = {number: len(some) for number, some in producing.acknowledged.items()}
    assert consumed(cluster, producing.topic, counts) == {
        number: sorted(some) for number, some in producing.acknowledged.items()
    }
    for some in producing.acknowledged.values():
        values = [value for _, value in some]
        assert values == sorted(set(values))


def test_draining_a_node_moves_everything_without_an_error(cluster: DevCluster) -> None:
    """Producers go on, nothing is lost or doubled, and the node comes back when it is undrained."""
    topic = cluster.create()
    assert set(cluster.leaders(topic).values()) <= set(cluster.nodes)
    producing = Producing(cluster, topic)
    producing.more()
    victim = cluster.leaders(topic)[0]
    planned = cluster.command("plan", "--drain", victim)
    assert {one["from"] for one in planned if one["kind"] == "drain"} == {victim}
    assert cluster.command("drain", victim, "--wait", str(WAIT_SECONDS)) == {"node": victim, "done": True}
    producing.more()
    assert victim not in cluster.leaders(topic).values()
    states = {node["name"]: node["state"] for node in cluster.command("nodes")}
    assert states[victim] == "drained"
    cluster.command("undrain", victim)
    cluster.move(topic, 0, victim)
    producing.more()
    check_everything_is_there(cluster, producing)


def test_partitions_of_a_killed_node_are_served_again(cluster: DevCluster) -> None:
    """Once its lease has run out, by the others; what it had shipped is there, and later messages follow it."""
    topic = cluster.create()
    producing = Producing(cluster, topic)
    producing.more()
    producing.stop()
    until(lambda: set(cluster.leaders(topic).values()) <= set(cluster.nodes))
    victim = cluster.leaders(topic)[0]
    others = [name for name in cluster.nodes if name != victim]
    mine = [number for number, node in cluster.leaders(topic).items() if node == victim]
    # Shipped: a move seals what there is. Then back, so that the victim owns it when it dies.
    for number in mine:
        cluster.move(topic, number, others[0])
        cluster.move(topic, number, victim)
    os.kill(cluster.nodes[victim]["pid"], signal.SIGKILL)
    until(lambda: victim not in cluster.leaders(topic).values() and "" not in cluster.leaders(topic).values())
    again = Producing(cluster, topic)
    again.more()
    again.stop()
    assert again.errors == []
    for number in range(PARTITIONS):
        before, after = producing.acknowledged[number], again.acknowledged[number]
        assert min(after)[0] == max(before)[0] + 1, f"partition {number}"
    both = {number: sorted(producing.acknowledged[number] + again.acknowledged[number]) for number in range(PARTITIONS)}
    assert consumed(cluster, topic, {number: len(some) for number, some in both.items()}) == both
    decided = [one for rounds in cluster.operations.decisions() for one in rounds.decisions]
    assert f"{victim} is not alive" in {one.reason for one in decided if one.kind == "failover"}
    status = cluster.operations.status()
    assert (status["nodes"], status["unassigned"]) == (2, 0)
