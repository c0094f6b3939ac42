"""A cluster of real processes as it grows: metadata traffic, memory, failover, and the pause of planned moves.

Three nodes, a member of etcd and a SeaweedFS (`tidelog cluster dev`) for each number of partitions a node. What
etcd answers is counted by etcd itself: requests and bytes, while nothing happens and while a producer writes to every
partition. One node is killed then, while another producer waits for one message of each partition, and it is measured
how long it takes until the others have all partitions open, and until all have acknowledged again, less the lease that
has to run out. The growth is the exponent between the smallest and the largest: 1 is linear.

Planned moves are those of one partition that a producer writes to all the time, with so much unshipped: the pause is
the longest time without an acknowledgement around the move.

python bench/cluster.py [--partitions 10,100,1000 | --most 1000] [--moves 50] [--unshipped-bytes 1048576] [--settle 45]
    [--dir .] [--json]
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from measuring import Figure, MissingPeerError, at_most, cpu_seconds, parser_for, program, report, scratch_directory

from tidelog.cluster.operations import ClusterOperations
from tidelog.store.keys import DEFAULT_ROOT
from tidelog.store.metadata.open import open_metadata_store
from tidelog.topics.names import parse_topic_name

NODES = 3
LEASE_SECONDS = 5.0
WAIT_SECONDS = 900.0
QUIET = {"log_level": 0, "topic.metadata.refresh.interval.ms": 2000, "reconnect.backoff.max.ms": 200}
_HANDLED = "grpc_server_handled_total"
_RECEIVED = "etcd_network_client_grpc_received_bytes_total"
_SENT = "etcd_network_client_grpc_sent_bytes_total"
Traffic = dict[str, float]


class Cluster:
    """`tidelog cluster dev`, running."""

    def __init__(self, directory: Path) -> None:
        words = ["cluster", "dev", "--nodes", str(NODES), "--lease", str(LEASE_SECONDS), "--dir", str(directory)]
        command = [sys.executable, "-m", "tidelog.cli.main", *words, "--json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"`{' '.join(words)}` does not start"
        self.facts: dict[str, Any] = json.loads(line)
        self.pids = {node["name"]: int(node["pid"]) for node in self.facts["nodes"]}
        self.bootstrap = ",".join(node["kafka"] for node in self.facts["nodes"])
        self.operations = ClusterOperations(open_metadata_store(self.facts["metadata"]), DEFAULT_ROOT)

    def create(self, partitions: int) -> str:
        """A topic whose partitions are open everywhere."""
        name = f"bench.t{secrets.token_hex(4)}"
        admin = AdminClient({"bootstrap.servers": self.bootstrap, **QUIET})
        for created in admin.create_topics([NewTopic(name, partitions)], request_timeout=WAIT_SECONDS).values():
            created.result(WAIT_SECONDS)
        self.until(lambda: self.opened() >= partitions)
        return name

    def opened(self) -> int:
        """Partitions that living nodes have told to have open."""
        return sum(load.open for load in self.operations.loads().values())

    def until(self, is_so: Callable[[], bool]) -> float:
        """Seconds until it is so."""
        begin = time.monotonic()
        while not is_so():
            if time.monotonic() - begin > WAIT_SECONDS:
                raise TimeoutError("the cluster does not do what it should")
            time.sleep(0.05)
        return time.monotonic() - begin

    def leader(self) -> str:
        found = self.operations.state().leader
        return "" if found is None else found.node

    def resident_bytes(self, node: str) -> int:
        fields = Path(f"/proc/{self.pids[node]}/statm").read_text("ascii").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def traffic(self, seconds: float) -> Traffic:
        """Requests and bytes a second that etcd has answered, all members together."""
        before = self._counted()
        begin = time.monotonic()
        time.sleep(seconds)
        after, took = self._counted(), time.monotonic() - begin
        return {name: (after[name] - before[name]) / took for name in after}

    def _counted(self) -> Traffic:
        found = dict.fromkeys(("requests", "received_bytes", "sent_bytes"), 0.0)
        names = {_HANDLED: "requests", _RECEIVED: "received_bytes", _SENT: "sent_bytes"}
        for endpoint in self.facts["metadata"].removeprefix("etcd://").split("/")[0].split(","):
            with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
                lines = answer.read().decode("utf-8").splitlines()
            for line in lines:
                name = names.get(line.split("{")[0].split(" ")[0])
                if name is not None:
                    found[name] += float(line.rpartition(" ")[2])
        return found

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(300)
        except subprocess.TimeoutExpired:
            pids = [*self.pids.values(), self.facts["store_pid"], *self.facts["etcd_pids"], self._process.pid]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


class Writer:
    """Writes to partitions in turn, and remembers when each was acknowledged last."""

    def __init__(self, cluster: Cluster, topic: str, partitions: range, pause_seconds: float, value: bytes) -> None:
        self.acknowledged: list[float] = []
        self.last = dict.fromkeys(partitions, 0.0)
        self.errors: list[str] = []
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "linger.ms": 0, **QUIET})
        self._topic, self._partitions, self._pause, self._value = topic, partitions, pause_seconds, value
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for partition in self._partitions:
                while not self._is_over.is_set():
                    try:
                        self._producer.produce(self._topic, self._value, partition=partition, on_delivery=self._told)
                        break
                    except BufferError:
                        self._producer.poll(0.1)
                self._producer.poll(0)
            until = time.monotonic() + self._pause
            while (left := until - time.monotonic()) > 0 and not self._is_over.is_set():
                self._producer.poll(min(left, 0.1))
        self._producer.flush(60)

    def _told(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            moment, number = time.monotonic(), message.partition()
            assert number is not None
            self.acknowledged.append(moment)
            self.last[number] = moment
        else:
            self.errors.append(str(error))

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(120)


def measure_failover(cluster: Cluster, topic: str, total: int, victim: str) -> dict[str, float]:
    """A node is killed while a producer has sent something to each partition, and goes on slowly."""
    placed = cluster.operations.state().topics[parse_topic_name(topic.replace(".", "/", 1))].partitions
    theirs = [number for number, node in enumerate(placed) if node == victim]
    writer = Writer(cluster, topic, range(total), max(1.0, total / 500), b"v" * 100)
    try:
        cluster.until(lambda: min(writer.last.values()) > 0)
        os.kill(cluster.pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        cluster.until(lambda: victim not in cluster.operations.loads())
        gone, cpu = time.monotonic(), cpu_seconds()
        cluster.until(lambda: cluster.opened() >= total)
        opened, spent = time.monotonic(), cpu_seconds() - cpu
        cluster.until(lambda: all(writer.last[number] > killed + 0.5 for number in theirs))
        acknowledged = time.monotonic()
        return {
            "failover_seconds": opened - killed,
            "failover_after_lease_seconds": opened - gone,
            "acknowledged_after_lease_seconds": acknowledged - gone,
            "failover_cpu_seconds": spent,
            "failover_partitions": len(theirs),
            "failover_errors": len(writer.errors),
        }
    finally:
        writer.stop()


def measure_size(scratch: Path, partitions: int, seconds: float, settle_seconds: float) -> dict[str, float]:
    """One cluster with so many partitions a node."""
    cluster = Cluster(scratch / f"p{partitions}")
    try:
        begin = time.monotonic()
        total = partitions * NODES
        topic = cluster.create(total)
        found = {"opened_seconds": time.monotonic() - begin}
        time.sleep(settle_seconds)  # what the opening has left to do is done
        found |= {f"idle_{name}": value for name, value in cluster.traffic(seconds).items()}
        leader = cluster.leader()
        others = [name for name in cluster.pids if name != leader]
        found["leader_bytes"] = cluster.resident_bytes(leader)
        found["node_bytes"] = max(map(cluster.resident_bytes, others))
        writer = Writer(cluster, topic, range(total), 0.01, b"v" * 100)
        time.sleep(2)
        found |= {f"load_{name}": value for name, value in cluster.traffic(seconds).items()}
        writer.stop()
        found["written"] = len(writer.acknowledged)
        found |= measure_failover(cluster, topic, total, others[0])
        return found
    finally:
        cluster.stop()


def measure_moves(scratch: Path, moves: int, unshipped_bytes: int) -> dict[str, float]:
    """The pauses of moves to and fro."""
    cluster = Cluster(scratch / "moves")
    try:
        topic = cluster.create(1)
        name = topic.replace(".", "/", 1)
        writer = Writer(cluster, topic, range(1), 0.002, b"v" * 100)
        burst = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "1", "linger.ms": 20, **QUIET})
        pauses = []
        for number in range(moves):
            for _ in range(unshipped_bytes // 10_000):
                burst.produce(topic, b"u" * 10_000, partition=0)
            burst.flush(60)
            target = sorted(cluster.pids)[number % NODES]
            begin = time.monotonic()
            request = cluster.operations.move(name, 0, target)
            cluster.operations.until(cluster.operations.is_carried_out(request), 60)
            acknowledged = len(writer.acknowledged)
            cluster.until(lambda more=acknowledged + 100: len(writer.acknowledged) >= more)  # type: ignore[misc]
            times = [at for at in writer.acknowledged if at >= begin - 0.5]
            pauses.append(max(after - before for before, after in pairwise(times)))
        writer.stop()
        pauses.sort()
        return {
            "moves": moves,
            "pause_p50_seconds": pauses[len(pauses) // 2],
            "pause_p99_seconds": pauses[min(len(pauses) - 1, math.ceil(0.99 * len(pauses)) - 1)],
            "pause_max_seconds": pauses[-1],
            "producer_errors": len(writer.errors),
        }
    finally:
        cluster.stop()


def growth(sizes: dict[int, dict[str, float]], name: str) -> float:
    """The exponent between the smallest and the largest: 1 is linear."""
    small, large = min(sizes), max(sizes)
    before, after = sizes[small][name], sizes[large][name]
    return math.log(after / before) / math.log(large / small) if before > 0 and after > 0 and small < large else 0.0


def figures_of(sizes: dict[int, dict[str, float]], moves: dict[str, float]) -> list[Figure]:
    """How each grows, and the pause of moves."""
    shown = {
        "idle_requests": ("requests to etcd a second, idle", 1),
        "idle_sent_bytes": ("kB a second from etcd, idle", 1e3),
        "idle_received_bytes": ("kB a second to etcd, idle", 1e3),
        "load_requests": ("requests to etcd a second, under load", 1),
        "node_bytes": ("MB of a node", 1e6),
        "leader_bytes": ("MB of the leader", 1e6),
        "failover_after_lease_seconds": ("seconds until a dead node's partitions are open, after its lease", 1),
        "acknowledged_after_lease_seconds": ("seconds until they have all acknowledged again, after its lease", 1),
    }
    figures = []
    for name, (what, unit) in shown.items() if sizes else ():
        ours = ", ".join(f"{found[name] / unit:.1f} at {size}" for size, found in sorted(sizes.items()))
        figures.append(at_most(what, ours, "partitions a node", growth(sizes, name), 1.1, " (growth)"))
    if moves:
        p50, p99 = moves["pause_p50_seconds"], moves["pause_p99_seconds"]
        what = f"pause of a planned move, p99 of {moves['moves']:.0f}"
        figures.append(at_most(what, f"{p99:.2f} s (p50 {p50:.2f} s)", "nothing", p99, 1, " s"))
    return figures


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--partitions", default="10,100,1000", help="numbers of partitions a node (10,100,1000)")
    parser.add_argument("--most", type=int, default=0, help="in place of them: 10, 100 and so on up to this")
    parser.add_argument("--settle", type=float, default=45.0, help="seconds between opening and measuring (45)")
    parser.add_argument("--moves", type=int, default=50, help="planned moves; 0: none (50)")
    parser.add_argument("--unshipped-bytes", type=int, default=1 << 20, help="written before each move (1 MiB)")
    parser.add_argument("--seconds", type=float, default=20.0, help="so long traffic is counted (20)")
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.partitions.split(",") if text]
    if arguments.most:
        counts = [10**power for power in range(1, 7) if 10**power <= arguments.most] or [arguments.most]
    try:
        program("etcd", remedy="pip install 'tidelog[dev-cluster]'")
    except MissingPeerError as error:
        report("cluster", [], {}, as_json=arguments.json, missing=[str(error)])
        return
    with scratch_directory(arguments.dir) as scratch:
        sizes = {count: measure_size(scratch, count, arguments.seconds, arguments.settle) for count in counts}
        moves = measure_moves(scratch, arguments.moves, arguments.unshipped_bytes) if arguments.moves else {}
    facts: dict[str, Any] = {"sizes": {str(size): found for size, found in sizes.items()}, "moves": moves}
    report("cluster", figures_of(sizes, moves), facts, as_json=arguments.json)


if __name__ == "__main__":
    main()
