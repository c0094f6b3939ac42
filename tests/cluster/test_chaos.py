"""Minutes of kills, pauses, drains, moves and balance under a producer and a group: with `durability=shipped` nothing
that was acknowledged is lost, doubled or out of order, offsets are used once, and a group sees everything.

The history (what was done, what was acknowledged, what was read) is written beside the nodes as `history.jsonl`.
"""

from __future__ import annotations

import json
import random
import secrets
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from tests.campaign import SEED
from tests.cluster.processes import PARTITIONS, QUIET, WAIT_SECONDS, DevCluster, Producing, consumed, until

MINUTES = 3.0
LEASE_SECONDS = 4.0
MAX_PAUSE_SECONDS = 12.0


class History:
    """What happened, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        self._begun = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def add(self, **what: Any) -> None:
        print(json.dumps({"seconds": round(time.monotonic() - self._begun, 3), **what}), file=self._file, flush=True)


class GroupReading:
    """A consumer of a group that commits; what it reads is remembered."""

    def __init__(self, cluster: DevCluster, topic: str, group: str) -> None:
        self.seen: set[tuple[int, int, int]] = set()
        settings = {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 10_000,
            **QUIET,
        }
        self._consumer = Consumer(settings)
        self._consumer.subscribe([topic])
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.is_over.is_set():
            some = self._consumer.consume(500, 0.5)
            for message in some:
                partition, offset, value = message.partition(), message.offset(), message.value()
                if message.error() is None and partition is not None and offset is not None and value is not None:
                    self.seen.add((partition, offset, int(value)))
            if some:
                self._consumer.commit(asynchronous=True)
        self._consumer.close()

    def stop(self) -> None:
        self.is_over.set()
        self._thread.join(WAIT_SECONDS)


class Chaos:
    """Misfortunes by a seed, at most one node at a time."""

    def __init__(self, cluster: DevCluster, history: History, seed: int) -> None:
        self._cluster = cluster
        self._history = history
        self._random = random.Random(seed)

    def misfortune(self, topic: str) -> None:
        """One, to its end."""
        victim = self._random.choice(sorted(self._cluster.nodes))
        what = self._random.choice(["kill", "kill", "pause", "pause", "drain", "move", "balance"])
        self._history.add(event=what, node=victim)
        seconds = self._random.uniform(0.5, MAX_PAUSE_SECONDS)
        operations = self._cluster.operations
        if what == "kill":
            self._cluster.kill(victim)
            time.sleep(seconds)
            self._cluster.start(victim)
        elif what == "pause":
            self._cluster.signal(victim, signal.SIGSTOP)
            time.sleep(seconds)
            self._cluster.signal(victim, signal.SIGCONT)
        elif what == "drain":
            operations.drain(victim)
            operations.until(operations.is_empty(victim), WAIT_SECONDS)
            operations.undrain(victim)
        elif what == "move":
            request = operations.move(topic.replace(".", "/", 1), self._random.randrange(PARTITIONS), victim)
            operations.until(operations.is_carried_out(request), WAIT_SECONDS)
        else:
            request = operations.balance()
            operations.until(operations.is_carried_out(request), WAIT_SECONDS)
        for name in self._cluster.missing():
            self._history.add(event="it was ended by somebody else", node=name)
            self._cluster.start(name)
        until(lambda: operations.status()["nodes"] == 3)
        self._history.add(event=f"{what} is over", node=victim)


@pytest.mark.long
def test_nothing_acknowledged_is_lost_in_minutes_of_misfortunes(tmp_path: Path) -> None:
    """A checker goes over the whole history."""
    cluster = DevCluster(tmp_path, LEASE_SECONDS)
    try:
        history = History(tmp_path / "history.jsonl")
        topic = cluster.create(**{"tidelog.durability": "shipped"})
        producing = Producing(cluster, topic)
        reading = GroupReading(cluster, topic, f"g-{secrets.token_hex(3)}")
        chaos = Chaos(cluster, history, SEED)
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end:
            producing.more()
            assert producing.errors == [], history.path
            chaos.misfortune(topic)
        producing.more()
        producing.stop()
        check(cluster, producing, reading, history)
        assert cluster.crashes() == []
        history.close()
    finally:
        (tmp_path / "said").write_text(cluster.stop())


def check(cluster: DevCluster, producing: Producing, reading: GroupReading, history: History) -> None:
    """What was acknowledged is there, once and in order; and the group has seen it."""
    acknowledged = {number: sorted(some) for number, some in producing.acknowledged.items()}
    for number, some in acknowledged.items():
        history.add(event="acknowledged", partition=number, messages=some)
    found = consumed(cluster, producing.topic, {number: len(some) for number, some in acknowledged.items()})
    for number, some in found.items():
        history.add(event="read", partition=number, messages=some)
    assert producing.errors == [], history.path
    for number, some in acknowledged.items():
        assert len({offset for offset, _ in some}) == len(some), f"partition {number}: an offset was used twice"
        missing = set(some) - set(found[number])
        assert not missing, f"partition {number}: {len(missing)} lost, {sorted(missing)[:3]}; {history.path}"
        values = [value for _, value in found[number]]
        assert values == sorted(set(values)), f"partition {number}: doubled or out of order; {history.path}"
    wanted = {(number, *message) for number, some in acknowledged.items() for message in some}
    until(lambda: wanted <= reading.seen)
    reading.stop()
