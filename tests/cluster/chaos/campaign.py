"""A campaign from its beginning to its report: machines, topics, workloads, misfortunes, the final look, the check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from tests.cluster.chaos.checker import Anomaly, Promises, by_check
from tests.cluster.chaos.engines import ENGINE, Driving, EngineReading
from tests.cluster.chaos.history import Final, Recorder, Rescued
from tests.cluster.chaos.linearizability import ask_porcupine, not_linearizable, operations, register_operations
from tests.cluster.chaos.machines import DISK_BYTES, Machines, until
from tests.cluster.chaos.nemesis import Nemesis
from tests.cluster.chaos.report import coverage, report
from tests.cluster.chaos.workloads import (
    QUIET,
    Appending,
    Copying,
    GroupReading,
    Producing,
    Subscribing,
    Transacting,
    Workload,
)

ORDERS, COPY, TRANSACTED, SYNCED, REGISTER, EVENTS, ENDS = (
    *("chaos.orders", "chaos.copy", "chaos.transacted"),
    *("chaos.synced", "chaos.register", "chaos.events", "chaos.ends"),
)
PARTITIONS = {ORDERS: 4, COPY: 4, TRANSACTED: 3, SYNCED: 4, REGISTER: 3, EVENTS: 1, ENDS: 2}
PROMISES = Promises(
    shipped=frozenset(PARTITIONS) - {SYNCED, ENDS},
    synced=frozenset({SYNCED}),
    read_by={"readers": ORDERS, "subscribers": EVENTS},
    redelivers=frozenset({"subscribers"}),
    copies={COPY: ORDERS},
)
_QUIET_SECONDS = 240.0
_READ_SECONDS = 300.0
_STABLE_SECONDS = 180.0
"""So long transactions may stay open that nobody goes on with: they have a timeout of a minute."""


class Outcome(NamedTuple):
    """What a campaign found."""

    anomalies: list[Anomaly]
    not_linearizable: list[str]
    fatal: list[str]
    """What clients or nodes met that they never should."""
    directory: Path


class Campaign:
    """One run; its files are in `directory`."""

    def __init__(self, machines: Machines, directory: Path, seed: int) -> None:
        self._machines = machines
        self._directory = directory
        self._seed = seed
        self.recorder = Recorder(directory / "history.jsonl")
        self._workloads: list[Workload] = []

    def run(self, minutes: float) -> Outcome:
        self.recorder.note("campaign", f"begins at {time.time():.3f}")
        self._create_topics()
        producing = self._start()
        targets = list(PARTITIONS.items())
        nemesis = Nemesis(self._machines, self.recorder, targets, [ENGINE], self._seed)
        until(lambda: all(one.has_answered_since(0.0) for one in producing))
        end = time.monotonic() + minutes * 60
        is_served = lambda moment: all(one.has_answered_since(moment) for one in producing)  # noqa: E731
        while time.monotonic() < end and nemesis.strike(nemesis.choose(), is_served):
            pass
        self._settle(producing)
        unstable = self._unstable()
        for topic, count in PARTITIONS.items():
            self.recorder.add(*final(self._machines.bootstrap, topic, count, unstable))
        self._machines.keep_logs(self._directory)
        said = self._machines.said("Traceback", "Fatal Python error")
        fatal = [*nemesis.unexpected, *(line for one in self._workloads for line in one.fatal)]
        fatal += [f"{name}: {line}" for name, lines in said.items() for line in lines]
        self._rescue()
        return self._check(minutes, fatal)

    def _create_topics(self) -> None:
        admin = AdminClient({**QUIET, "bootstrap.servers": self._machines.bootstrap})
        topics = [
            NewTopic(topic, count, config={"tidelog.durability": "shipped"} if topic in PROMISES.shipped else {})
            for topic, count in PARTITIONS.items()
        ]
        for created in admin.create_topics(topics).values():
            created.result(120)
        self._machines.operations.add_engine(ENGINE)
        self._machines.operations.settings(min_disk_free_bytes=DISK_BYTES // 8)

    def _start(self) -> list[Producing]:
        common = (self.recorder, self._machines.bootstrap)
        producing = [
            Producing(*common, "a", ORDERS, PARTITIONS[ORDERS], 0.04),
            Producing(*common, "b", SYNCED, PARTITIONS[SYNCED], 0.04),
            Producing(*common, "c", EVENTS, 1, 0.02),
        ]
        urls = [self._machines.url(name) for name in self._machines.nodes]
        self._subscribing = Subscribing(self.recorder, urls, "subscribers", EVENTS)
        driver = Driving(self.recorder, urls, self._seed)
        self._workloads = [
            *producing,
            driver,
            *(EngineReading(self.recorder, urls, f"e{number}", self._seed, driver) for number in range(2)),
            *(Appending(*common, f"r{number}", REGISTER, PARTITIONS[REGISTER]) for number in range(3)),
            *(Transacting(*common, f"t{number}", TRANSACTED, PARTITIONS[TRANSACTED]) for number in range(2)),
            Transacting(*common, "u", ENDS, PARTITIONS[ENDS]),
            *(Copying(*common, f"copy{number}", "copiers", ORDERS, COPY) for number in range(2)),
            *(GroupReading(*common, f"g{number}", "readers", ORDERS) for number in range(2)),
            self._subscribing,
        ]
        for workload in self._workloads:
            workload.start()
        return producing

    def _settle(self, producing: list[Producing]) -> None:
        """Those who write stop first; the others get time for what is left, as long as they get on."""
        for workload in self._workloads:
            if isinstance(workload, Producing | Appending | Transacting | Driving):
                workload.stop()
        shown, since = -1, time.monotonic()
        while not self._is_done():
            now = len(self.recorder.events) + self._copied()
            if now != shown:
                shown, since = now, time.monotonic()
            if time.monotonic() - since > _QUIET_SECONDS:
                break
            time.sleep(1.0)
        for workload in self._workloads:
            if not isinstance(workload, Producing | Appending | Transacting | Driving):
                workload.stop()

    def _copied(self) -> int:
        consumer = Consumer({**QUIET, "bootstrap.servers": self._machines.bootstrap, "group.id": "none"})
        try:
            places = [TopicPartition(COPY, number) for number in range(PARTITIONS[COPY])]
            return sum(consumer.get_watermark_offsets(place, 60)[1] for place in places)
        except KafkaException as error:
            self.recorder.note("campaign", f"copies at the end: {error}")
            return 0
        finally:
            consumer.close()

    def _is_done(self) -> bool:
        """Whether readers, copiers and subscribers are at the ends of their topics."""
        consumer = Consumer({**QUIET, "bootstrap.servers": self._machines.bootstrap, "group.id": "readers"})
        copier = Consumer({**QUIET, "bootstrap.servers": self._machines.bootstrap, "group.id": "copiers"})
        try:
            places = [TopicPartition(ORDERS, number) for number in range(PARTITIONS[ORDERS])]
            ends = [consumer.get_watermark_offsets(place, 60)[1] for place in places]
            read = [[one.offset for one in who.committed(places, 60)] for who in (consumer, copier)]
            end_of_events = consumer.get_watermark_offsets(TopicPartition(EVENTS, 0), 60)[1]
            are_read = all(offset >= end for some in read for offset, end in zip(some, ends, strict=True))
            return are_read and self._subscribing.newest + 1 >= end_of_events
        except KafkaException as error:
            self.recorder.note("campaign", f"offsets at the end: {error}")
            return False
        finally:
            consumer.close()
            copier.close()

    def _unstable(self) -> dict[tuple[str, int], int]:
        """How many offsets of each partition stay behind an open transaction."""
        admin = AdminClient({**QUIET, "bootstrap.servers": self._machines.bootstrap})
        places = [TopicPartition(topic, number) for topic, count in PARTITIONS.items() for number in range(count)]

        def ends(level: IsolationLevel) -> dict[tuple[str, int], int]:
            latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
            wanted = dict.fromkeys(places, latest)
            asked = admin.list_offsets(wanted, isolation_level=level)
            return {(one.topic, one.partition): answer.result(60).offset for one, answer in asked.items()}

        unstable: dict[tuple[str, int], int] = {}
        deadline = time.monotonic() + _STABLE_SECONDS
        while True:
            try:
                all_of_it, stable = ends(IsolationLevel.READ_UNCOMMITTED), ends(IsolationLevel.READ_COMMITTED)
                unstable = {place: all_of_it[place] - stable[place] for place in all_of_it}
            except KafkaException as error:
                self.recorder.note("campaign", f"stable offsets: {error}")
            if (unstable and not any(unstable.values())) or time.monotonic() > deadline:
                return unstable
            time.sleep(1.0)

    def _rescue(self) -> None:
        """What the disks have of the tails that were lost: nodes are stopped, and asked as an operator would."""
        for machine in self._machines.nodes.values():
            machine.stop()
        for name, machine in self._machines.nodes.items():
            for partition in range(PARTITIONS[SYNCED]):
                self.recorder.add(*self._rescued(name, machine.data, partition))

    def _rescued(self, name: str, data: Path, partition: int) -> Iterator[Rescued]:
        topic = f"{SYNCED.replace('.', '/', 1)}-part-{partition}"
        output = self._directory / f"rescued-{name}-{partition}.jsonl"
        command = [sys.executable, "-m", "tidelog.cli.main", "topic", "rescue", topic, "--dir", str(data)]
        environment = {**os.environ, **self._machines.nodes[name]._environment}
        done = subprocess.run(
            [*command, "--output", str(output), "--json"], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            self.recorder.note("rescue", done.stderr)
            return
        if output.exists():
            lines = [json.loads(line) for line in output.read_text().splitlines()]
            yield Rescued(
                topic=SYNCED,
                partition=partition,
                node=name,
                messages=[(line["offset"], line["value"]) for line in lines],
            )

    def _check(self, minutes: float, fatal: list[str]) -> Outcome:
        self.recorder.close()
        events = self.recorder.events
        checks = by_check(events, PROMISES)
        asked = operations(events, REGISTER) | register_operations(events, f"engine {ENGINE}")
        linearizable = ask_porcupine(asked, self._directory)
        facts = {
            "minutes": minutes,
            "seed": self._seed,
            "lease": f"{self._machines.lease_seconds:g} s",
            "events": len(events),
            "load of the machine": ", ".join(f"{one:.1f}" for one in os.getloadavg()),
            "never expected": "; ".join(fatal) or "nothing",
            **coverage(linearizable, can_fill=self._machines.can_fill),
        }
        text = report("Chaos campaign", events, checks, linearizable, facts, self._machines.lease_seconds)
        (self._directory / "report.md").write_text(text)
        anomalies = [one for found in checks.values() for one in found]
        return Outcome(anomalies, not_linearizable(linearizable), fatal, self._directory)


def final(bootstrap: str, topic: str, count: int, unstable: Mapping[tuple[str, int], int]) -> Iterator[Final]:
    """All committed messages of each partition, up to its end."""
    settings = {"group.id": "none", "enable.auto.commit": False, "isolation.level": "read_committed"}
    consumer = Consumer({**QUIET, **settings, "bootstrap.servers": bootstrap, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(count)])
    found: dict[int, list[tuple[int, str]]] = {number: [] for number in range(count)}
    ended: set[int] = set()
    deadline = time.monotonic() + _READ_SECONDS
    while len(ended) < count:
        assert time.monotonic() < deadline, f"{topic} cannot be read to its end: {ended} of {count}"
        for message in consumer.consume(1000, 1.0):
            error, partition, offset, value = message.error(), message.partition(), message.offset(), message.value()
            assert partition is not None
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                ended.add(partition)
            elif error is None and offset is not None and isinstance(value, bytes):
                ended.discard(partition)
                found[partition].append((offset, value.decode()))
    consumer.close()
    for number, messages in found.items():
        yield Final(topic=topic, partition=number, messages=messages, unstable=unstable.get((topic, number), -1))
