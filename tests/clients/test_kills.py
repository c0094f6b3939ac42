"""Kills of `tidelog serve` under idempotent and transactional load of librdkafka, and what is left of it afterwards.

writers      idempotent, to INPUT         what was confirmed is there, once, in order
tellers      transactional, to LEDGER     both partitions or none; as confirmed
a copier     INPUT to COPY, exactly once  with its offsets in the same transaction
a reader     a member of a group          goes on where it was: nothing that it has committed comes again
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from tests.campaign import first_seed
from tests.clients.conftest import Service

INPUT, LEDGER, COPY = "kills.input", "kills.ledger", "kills.copy"
PARTITIONS = 2
_WAIT_SECONDS = 120.0
_QUIET: dict[str, Any] = {"log_level": 0, "metadata.recovery.strategy": "none", "reconnect.backoff.max.ms": 200}


def value_of(message: Message) -> str:
    value = message.value()
    assert isinstance(value, bytes)
    return value.decode()


class Worker(threading.Thread):
    """Works until it is asked to stop; then finishes what it has begun. Its error is the test's."""

    def __init__(self, load: Load) -> None:
        super().__init__(daemon=True)
        self.load = load
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except (Exception, AssertionError) as error:  # noqa: BLE001  # the test raises it
            self.error = error

    def work(self) -> None:
        raise NotImplementedError


class Writer(Worker):
    """An idempotent producer."""

    def __init__(self, load: Load, name: str) -> None:
        super().__init__(load)
        self.name = name
        self.confirmed: dict[str, tuple[int, int]] = {}
        self.sent = 0

    def work(self) -> None:
        producer = self.load.producer({"enable.idempotence": True, "linger.ms": 5, "message.timeout.ms": 600_000})
        while not self.load.is_over.is_set():
            for _ in range(20):
                number, self.sent = self.sent, self.sent + 1
                producer.produce(
                    INPUT, f"{self.name} {number}", partition=number % PARTITIONS, on_delivery=self._delivered
                )
            producer.poll(0.02)
            while len(producer) > 2000 and not self.load.is_over.is_set():
                producer.poll(0.1)
        assert producer.flush(_WAIT_SECONDS) == 0, "messages were never confirmed"

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            raise KafkaException(error)
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        self.confirmed[value_of(message)] = (partition, offset)


class Teller(Worker):
    """A transactional producer: each transaction has messages in both partitions, and is committed or aborted."""

    def __init__(self, load: Load, name: str, seed: int) -> None:
        super().__init__(load)
        self.name = name
        self.chance = random.Random(seed)
        self.outcomes: dict[int, bool | None] = {}
        """By number: committed, aborted, or not known."""

    def work(self) -> None:
        number = 0
        while not self.load.is_over.is_set():
            producer = self.load.producer({"transactional.id": self.name, "transaction.timeout.ms": 60_000})
            try:
                retried(lambda: producer.init_transactions(_WAIT_SECONDS))  # noqa: B023
                while not self.load.is_over.is_set():
                    number += 1
                    self.outcomes[number] = None
                    self.outcomes[number] = self._transaction(producer, number)
            except KafkaException as error:
                if not error.args[0].fatal():
                    raise

    def _transaction(self, producer: Producer, number: int) -> bool:
        is_commit = self.chance.random() < 0.7
        producer.begin_transaction()
        for partition in range(PARTITIONS):
            for copy in range(3):
                producer.produce(LEDGER, f"{self.name} {number} {copy}", partition=partition)
        if self.chance.random() < 0.2:
            time.sleep(self.chance.random() * 0.3)
        return ended(producer, is_commit)


class Copier(Worker):
    """Consumes INPUT and produces COPY; its offsets are part of the transactions."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.transactions = 0

    def work(self) -> None:
        while not self.is_done:
            producer = self.load.producer({"transactional.id": "copier", "transaction.timeout.ms": 60_000})
            try:
                retried(lambda: producer.init_transactions(_WAIT_SECONDS))  # noqa: B023
                self._copy(producer)
            except KafkaException as error:
                if not error.args[0].fatal():
                    raise

    @property
    def is_done(self) -> bool:
        return self.load.is_over.is_set() and self.load.lag("copiers", INPUT) == 0

    def _copy(self, producer: Producer) -> None:
        consumer = self.load.consumer("copiers")
        try:
            consumer.assign(self.load.committed("copiers", INPUT))
            while True:
                messages = [one for one in consumer.consume(500, 0.1) if one.error() is None]
                if not messages and self.is_done:
                    return
                if messages and not self._copy_some(producer, consumer, messages):
                    consumer.assign(self.load.committed("copiers", INPUT))
        finally:
            consumer.close()

    def _copy_some(self, producer: Producer, consumer: Consumer, messages: list[Message]) -> bool:
        producer.begin_transaction()
        reached: dict[int, int] = {}
        for message in messages:
            partition, offset = message.partition(), message.offset()
            assert partition is not None
            assert offset is not None
            producer.produce(COPY, message.value(), partition=partition)
            reached[partition] = offset + 1
        positions = [TopicPartition(INPUT, partition, offset) for partition, offset in reached.items()]
        group = consumer.consumer_group_metadata()
        try:
            retried(lambda: producer.send_offsets_to_transaction(positions, group, _WAIT_SECONDS))
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            return ended(producer, False)
        self.transactions += 1
        return ended(producer, True)


class Reader(Worker):
    """A member of a group, with `read_committed`. After a confirmed commit nothing before it may come."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.seen: list[Counter[str]] = [Counter() for _ in range(PARTITIONS)]
        self.commits = 0
        self._safe = [0] * PARTITIONS
        """Up to where a commit was confirmed."""

    def work(self) -> None:
        consumer = self.load.consumer("readers", **{"heartbeat.interval.ms": 200, "session.timeout.ms": 6000})
        consumer.subscribe([LEDGER])
        try:
            while True:
                messages = [one for one in consumer.consume(500, 0.1) if one.error() is None]
                if not messages:
                    if self.load.is_over.is_set() and self.load.lag("readers", LEDGER) == 0:
                        return
                    continue
                self._take(messages)
                try:
                    committed = consumer.commit(asynchronous=False)
                except KafkaException:
                    continue  # what is not confirmed may come again
                for one in committed or ():
                    if one.error is None and one.offset >= 0:
                        self._safe[one.partition] = max(self._safe[one.partition], one.offset)
                        self.commits += 1
        finally:
            consumer.close()

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            partition, offset = message.partition(), message.offset()
            assert partition is not None
            assert offset is not None
            assert offset >= self._safe[partition], (
                f"{LEDGER}-{partition}: {offset} again, after {self._safe[partition]}"
            )
            self.seen[partition][value_of(message)] += 1


class Load:
    """A server that is killed again and again, and its clients."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.service = Service(directory, "--default-partitions", str(PARTITIONS))
        self.chance = random.Random(seed)
        self.is_over = threading.Event()
        self.writers = [Writer(self, f"writer-{number}") for number in range(2)]
        self.tellers = [Teller(self, f"teller-{number}", seed + number) for number in range(2)]
        self.copier = Copier(self)
        self.reader = Reader(self)

    @property
    def workers(self) -> list[Worker]:
        return [*self.writers, *self.tellers, self.copier, self.reader]

    def play(self, kills: int) -> None:
        """So many kills at times that nobody chose, then a quiet end."""
        self.service.start()
        for name in (INPUT, LEDGER, COPY):
            self.producer({}).list_topics(name, _WAIT_SECONDS)  # which creates it
        for worker in self.workers:
            worker.start()
        for _ in range(kills):
            self.is_over.wait(self.chance.choice([0.05, 0.3, 0.6, 1.0, 1.5, 5.0]) * self.chance.uniform(0.5, 1.5))
            for worker in self.workers:
                if worker.error is not None:
                    raise worker.error
            self.service.kill()
            self.service.start()
        self.is_over.set()
        for worker in self.workers:
            worker.join(4 * _WAIT_SECONDS)
            if worker.error is not None:
                raise worker.error
            assert not worker.is_alive(), f"{worker} does not end; the server said {self.service.said[-2000:]}"

    # Clients

    def producer(self, settings: dict[str, Any]) -> Producer:
        return Producer({**_QUIET, "bootstrap.servers": self.service.kafka, **settings})

    def consumer(self, group: str, **settings: Any) -> Consumer:
        given = {"group.id": group, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        given |= {"isolation.level": "read_committed", **settings}
        return Consumer({**_QUIET, "bootstrap.servers": self.service.kafka, **given})

    def committed(self, group: str, topic: str) -> list[TopicPartition]:
        """Where a group goes on; at the beginning without a commit."""
        consumer = self.consumer(group)
        try:
            wanted = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            found = retried(lambda: consumer.committed(wanted, 10.0))
            return [TopicPartition(topic, one.partition, max(one.offset, 0)) for one in found]
        finally:
            consumer.close()

    def lag(self, group: str, topic: str) -> int:
        """How many messages a group has not done."""
        consumer = self.consumer("nobody")
        try:
            done = {one.partition: one.offset for one in self.committed(group, topic)}
            return sum(len(self.values(TopicPartition(topic, number, done[number]))) for number in range(PARTITIONS))
        finally:
            consumer.close()

    def values(self, start: TopicPartition) -> list[str]:
        """What a consumer of committed messages gets from a position up to the end."""
        consumer = self.consumer("nobody", **{"enable.partition.eof": True})
        found: list[str] = []
        try:
            consumer.assign([start])
            deadline = time.monotonic() + _WAIT_SECONDS
            while time.monotonic() < deadline:
                for message in consumer.consume(10_000, 0.05):
                    error = message.error()
                    if error is None:
                        found.append(value_of(message))
                    elif error.code() == KafkaError._PARTITION_EOF:
                        return found
            raise AssertionError(f"{start} has no end; the server said {self.service.said[-2000:]}")
        finally:
            consumer.close()

    def all_values(self, topic: str) -> list[list[str]]:
        return [self.values(TopicPartition(topic, number, 0)) for number in range(PARTITIONS)]

    # Checks

    def check(self) -> str:
        """Everything that was promised; what there was of it."""
        stored = self.all_values(INPUT)
        self._check_writers(stored)
        self._check_tellers(self.all_values(LEDGER))
        assert self.all_values(COPY) == stored, "the copy is not what was copied"
        outcomes = Counter(outcome for teller in self.tellers for outcome in teller.outcomes.values())
        return (
            f"{sum(map(len, stored))} messages of idempotent producers, {outcomes[True]} transactions committed, "
            f"{outcomes[False]} aborted, {outcomes[None]} of unknown outcome, {self.copier.transactions} copied, "
            f"{self.reader.commits} commits of the reader"
        )

    def _check_writers(self, stored: list[list[str]]) -> None:
        for values in stored:
            assert max(Counter(values).values(), default=1) == 1, "a message is there twice"
        for writer in self.writers:
            assert len(writer.confirmed) == writer.sent
            for partition, values in enumerate(stored):
                own = [int(value.split()[1]) for value in values if value.startswith(writer.name)]
                assert own == list(range(partition, writer.sent, PARTITIONS)), "lost, or out of order"

    def _check_tellers(self, stored: list[list[str]]) -> None:
        for partition, values in enumerate(stored):
            assert max(Counter(values).values(), default=1) == 1, "a message is there twice"
            assert set(self.reader.seen[partition]) == set(values), "a member of a group saw other messages"
        assert [set(values) for values in stored] == [set(stored[0])] * PARTITIONS, "a transaction is there in part"
        present = Counter(value.rpartition(" ")[0] for value in stored[0])
        assert set(present.values()) <= {3}, "a transaction is there in part"
        for teller in self.tellers:
            for number, outcome in teller.outcomes.items():
                is_there = f"{teller.name} {number}" in present
                assert outcome is None or outcome is is_there, f"{teller.name} {number}: {outcome} but {is_there}"


def retried(call: Callable[[], Any]) -> Any:
    """Calls again after an error that passes."""
    deadline = time.monotonic() + 2 * _WAIT_SECONDS
    while True:
        try:
            return call()
        except KafkaException as error:
            problem = error.args[0]
            is_transport = problem.code() in (
                KafkaError._TRANSPORT,
                KafkaError._TIMED_OUT,
                KafkaError._ALL_BROKERS_DOWN,
            )
            if not (problem.retriable() or is_transport) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def ended(producer: Producer, is_commit: bool) -> bool:
    """Ends a transaction; whether it was committed. A fatal error is raised: then nobody knows."""
    if is_commit:
        try:
            retried(lambda: producer.commit_transaction(_WAIT_SECONDS))
            return True
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
    retried(lambda: producer.abort_transaction(_WAIT_SECONDS))
    return False


def campaign(directory: Path, kills: int, seed: int) -> str:
    """Plays and checks; what there was."""
    load = Load(directory, seed)
    try:
        load.play(kills)
        return load.check()
    finally:
        load.service.close()


@pytest.mark.long
def test_two_hundred_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    """No confirmed message is lost or there twice, nothing of an aborted transaction is seen, groups go on."""
    campaign(tmp_path / "served", 200, first_seed())
