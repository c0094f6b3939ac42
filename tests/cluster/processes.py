"""A cluster of real processes, as `tidelog cluster dev` starts it, and clients that remember what they were told."""

from __future__ import annotations

import contextlib
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

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tidelog.cli.cluster.dev import NodeProcess, node_environment
from tidelog.cli.dev_s3 import SeaweedDirectory
from tidelog.cluster.operations import ClusterOperations
from tidelog.errors import StoreUnavailableError
from tidelog.store.keys import DEFAULT_ROOT
from tidelog.store.metadata.open import open_metadata_store

WAIT_SECONDS = 180
PARTITIONS = 6
QUIET = {"log_level": 0, "reconnect.backoff.max.ms": 500, "topic.metadata.refresh.interval.ms": 2000}


SHOWN_LINES = 15


_VERSIONED = """
import sys, tidelog
tidelog.__version__ = sys.argv[1]
from tidelog.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


class VersionedNode(NodeProcess):
    """A node whose program says that it is of another version."""

    def __init__(self, name: str, directory: Path, options: list[str], environment: dict[str, str], version: str):
        self.name, self.log = name, directory.with_name(f"{name}.log")
        command = [sys.executable, "-c", _VERSIONED, version, "serve", "--dir", str(directory), "--node", name]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.kafka = self.http = ""


class DevCluster:
    """A running `tidelog cluster dev`."""

    def __init__(self, directory: Path, lease_seconds: float) -> None:
        self.directory = directory
        self._lease_seconds = lease_seconds
        self._restarted: dict[str, NodeProcess] = {}
        command = [
            sys.executable,
            "-m",
            "tidelog.cli.main",
            "cluster",
            "dev",
            "--nodes",
            "3",
            "--lease",
            str(lease_seconds),
        ]
        os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # what ends a node is in its log
        self._process = subprocess.Popen(
            [*command, "--dir", str(directory), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        self.facts: dict[str, Any] = json.loads(line)
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap, **QUIET})
        _running.append(self)
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

    def run_at(self, node: str, *words: str) -> subprocess.CompletedProcess[str]:
        """A command with --json in the directory of a node, with the variables that `cluster dev` has named."""
        command = [sys.executable, "-m", "tidelog.cli.main", *words, "--dir", str(self.directory / node), "--json"]
        environment = {**os.environ, **self.facts["environment"]}
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)

    def said_at(self, node: str, *words: str) -> Any:
        """What it says; it must succeed."""
        done = self.run_at(node, *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def move(self, topic: str, partition: int, node: str) -> None:
        """Returns when clients are sent there."""
        request = self.operations.move(topic.replace(".", "/", 1), partition, node)
        assert self.operations.until(self.operations.is_carried_out(request), WAIT_SECONDS)
        until(lambda: self.leaders(topic)[partition] == node)

    def create(self, **configs: str) -> str:
        """A new topic; its name."""
        return self.create_of(PARTITIONS, configs)

    def create_of(self, partitions: int, configs: dict[str, str] | None = None) -> str:
        """The same with so many partitions."""
        name = f"shop.t{secrets.token_hex(4)}"
        for created in self._admin.create_topics([NewTopic(name, partitions, config=configs or {})]).values():
            created.result(WAIT_SECONDS)
        return name

    def leaders(self, topic: str) -> dict[int, str]:
        """The node of each partition, as clients see it."""
        found = self._admin.list_topics(topic, timeout=WAIT_SECONDS)
        names = {node["kafka"]: name for name, node in self.nodes.items()}
        brokers = {one.id: names.get(f"{one.host}:{one.port}", "?") for one in found.brokers.values()}
        return {number: brokers.get(one.leader, "") for number, one in found.topics[topic].partitions.items()}

    def end(self, topic: str, partition: int) -> int:
        """The offset after the last message, as its owner says."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": secrets.token_hex(4), **QUIET})
        try:
            return consumer.get_watermark_offsets(TopicPartition(topic, partition), WAIT_SECONDS)[1]
        finally:
            consumer.close()

    def kill(self, name: str) -> None:
        """At once, and nothing is finished."""
        self.signal(name, signal.SIGKILL)

    def signal(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.nodes[name]["pid"], number)

    @contextlib.contextmanager
    def without_bucket(self) -> Iterator[None]:
        """The bucket answers nothing meanwhile."""
        os.kill(self.facts["store_pid"], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.facts["store_pid"], signal.SIGCONT)

    def crashes(self) -> list[str]:
        """What nodes said when they ended by a fault of their own."""
        logs = {name: (self.directory / f"{name}.log").read_text("utf-8", "replace") for name in self.nodes}
        return [f"{name}: {log}" for name, log in logs.items() if "Fatal Python error" in log or "Traceback" in log]

    def missing(self) -> list[str]:
        """Nodes whose process has ended."""
        found = []
        for name, node in self.nodes.items():
            try:
                os.kill(node["pid"], 0)
                is_there = "Z" not in Path(f"/proc/{node['pid']}/stat").read_text().rpartition(")")[2].split()[0]
            except (ProcessLookupError, FileNotFoundError):
                is_there = False
            if not is_there:
                found.append(name)
        return found

    def shut_down(self, name: str) -> None:
        """As an operator does: it hands over first."""
        self.signal(name, signal.SIGTERM)
        until(lambda: name in self.missing())

    def start(self, name: str, version: str | None = None, source: Path | None = None) -> None:
        """Starts a node on its directory, as an operator would; of another version, if one is named, or the program
        of another source tree. A name that is new is one node more."""
        keys = SeaweedDirectory(self.directory / "s3").keys()
        environment = node_environment(self.facts["endpoint"], keys, self._lease_seconds)
        if source is not None:
            environment["PYTHONPATH"] = str(source / "src")
        options = ["--store", self.facts["store"], "--metadata", self.facts["metadata"]]
        process = (
            NodeProcess(name, self.directory / name, options, environment)
            if version is None
            else VersionedNode(name, self.directory / name, options, environment, version)
        )
        try:
            process.wait()
        except StoreUnavailableError:
            process.stop()
            raise
        if name in self._restarted:
            self._restarted[name].stop()
        self._restarted[name] = process
        if name not in self.nodes:
            self.facts["nodes"].append({"name": name})
        self.nodes[name].update(process.description())

    def stop(self) -> str:
        """Ctrl-C; returns what it said."""
        for node in self._restarted.values():
            node.process.terminate()
            node.stop()
        self._process.send_signal(signal.SIGINT)
        _running.remove(self)
        try:
            return self._process.communicate(timeout=2 * WAIT_SECONDS)[1]
        except subprocess.TimeoutExpired:
            nodes = [node["pid"] for node in self.facts["nodes"]]
            for pid in (self._process.pid, *nodes, self.facts["store_pid"], *self.facts["etcd_pids"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"the cluster does not stop\n{self.tails()}") from None

    def tails(self) -> str:
        """What the nodes said last."""
        logs = sorted(self.directory.glob("n?.log"))
        last = [log.read_text("utf-8", "replace").splitlines()[-SHOWN_LINES:] for log in logs]
        return "\n".join(["", f"ended: {self.missing()}", *(line for lines in last for line in lines)])


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


_running: list[DevCluster] = []


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "\n".join(["it does not happen", *(one.tails() for one in _running)])
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
