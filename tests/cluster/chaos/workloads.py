"""What clients do during a campaign, and what they are told, written into the history.

    Producing      idempotent, to every partition of a topic
    Appending      one append at a time, and where the log ends: what is asked of Porcupine
    Transacting    the same number into every partition, in a transaction; some are aborted on purpose
    Copying        consume, transform, produce in transactions, in a group with others
    GroupReading   a member of a group that commits what it has, and asks what is committed
    Subscribing    a consumer of a subscription over HTTP

Invariants
- A workload runs in a thread of its own until `stop`. An error that a client reports is written down; a client that can
  do nothing any more is replaced by a new one, under another name: what it had sent is unknown then.
- What was not answered is written down as unknown when the workload ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from tests.cluster.chaos.history import Append, Commit, Committed, EndOffset, Read, Recorder, Transaction

import tidelog
from tidelog.errors import TidelogError

QUIET: dict[str, Any] = {
    "log_level": 0,
    "reconnect.backoff.max.ms": 500,
    "topic.metadata.refresh.interval.ms": 2000,
    # With the default, `rebootstrap`, librdkafka can wait for ever for a coordinator (librdkafka#5511).
    "metadata.recovery.strategy": "none",
    "socket.timeout.ms": 10_000,
}
PATIENCE_SECONDS = 300.0
SESSION_MS = 15_000
_TRANSACTION_SECONDS = 60.0
_MAX_UNANSWERED = 5000
_OFFSETS_SECONDS = 90.0


def within(seconds: float, work: Callable[..., object], *arguments: object) -> None:
    """A call of a client that may never return, whatever timeout it was given (librdkafka#5456, #5511: a coordinator
    that is away). It is left behind then, in a thread of its own, with its client."""
    raised: list[KafkaException | SystemError] = []

    def call() -> None:
        try:
            work(*arguments)
        except (KafkaException, SystemError) as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"the client did not return in {seconds:g} s"))
    if raised:
        raise raised[0]


class Workload:
    """A thread that does something until it is stopped."""

    def __init__(self, recorder: Recorder, bootstrap: str, name: str) -> None:
        self.recorder = recorder
        self.name = name
        self.fatal: list[str] = []
        """Errors that no client of this kind should see."""
        self._common = {**QUIET, "bootstrap.servers": bootstrap}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Returns when it has ended."""
        self._is_over.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.fatal.append(f"{self.name} does not end")

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - it is in the report
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.fatal.append(f"{self.name}: {type(error).__name__} in line {where.lineno}: {error}")
            self.recorder.note(self.name, self.fatal[-1])

    def _run(self) -> None:
        raise NotImplementedError


class Sent:
    """Messages of one producer on their way: each is written down with its answer, or as unknown in the end."""

    def __init__(self, recorder: Recorder, who: str) -> None:
        self._recorder = recorder
        self._who = who
        self._open: dict[tuple[str, int, str], Append] = {}
        self.errors: list[KafkaError] = []
        self.last: dict[tuple[str, int], float] = {}
        """When a partition last acknowledged something."""

    def send(self, producer: Producer, topic: str, partition: int, value: str, transaction: str = "") -> None:
        begin = self._recorder.now()
        append = Append(topic=topic, partition=partition, value=value, begin=begin, transaction=transaction)
        self._open[topic, partition, value] = append
        producer.produce(topic, value.encode(), partition=partition, on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        topic, partition, value = message.topic(), message.partition(), message.value()
        assert topic is not None
        assert partition is not None
        assert isinstance(value, bytes)
        append = self._open.pop((topic, partition, value.decode()), None)
        if append is None:
            return
        end = self._recorder.now()
        if error is None:
            answered = {"outcome": "ok", "end": end, "offset": message.offset()}
            self.last[topic, partition] = end
        else:
            self.errors.append(error)
            answered = {"outcome": "unknown", "error": str(error)}
        self._recorder.add(Append(**{**_fields(append), **answered}))

    def forget(self) -> None:
        """No answer will come any more."""
        self._recorder.add(*self._open.values())
        self._open.clear()

    def __len__(self) -> int:
        return len(self._open)


def value_of(producer: str, partition: int, number: int) -> str:
    """A value that is nowhere else in a history."""
    return f"{producer}.{partition}:{number}"


def _fields(append: Append) -> dict[str, Any]:
    return {name: getattr(append, name) for name in append.__struct_fields__}


class Producing(Workload):
    """An idempotent producer. One that fails for good is replaced, which only a lost tail may cause."""

    def __init__(
        self, recorder: Recorder, bootstrap: str, name: str, topic: str, partitions: int, pause_seconds: float
    ) -> None:
        super().__init__(recorder, bootstrap, name)
        self.topic = topic
        self.replaced = 0
        self._partitions = partitions
        self._pause_seconds = pause_seconds
        self._sent = Sent(recorder, name)

    def has_answered_since(self, moment: float) -> bool:
        """Whether every partition acknowledged something after it."""
        return all(self._sent.last.get((self.topic, one), -1.0) > moment for one in range(self._partitions))

    def _run(self) -> None:
        number = 0
        while not self._is_over.is_set():
            settings = {"enable.idempotence": True, "linger.ms": 5, "message.timeout.ms": 280_000}
            producer = Producer({**self._common, **settings})
            name = f"{self.name}.{self.replaced}" if self.replaced else self.name
            while not self._is_over.is_set() and not self._sent.errors:
                if len(self._sent) < _MAX_UNANSWERED:
                    self._send_to_all(producer, name, number)
                    number += 1
                self._wait(producer)
            if not self._sent.errors:
                with contextlib.suppress(KafkaException):  # it has failed for good meanwhile
                    producer.flush(PATIENCE_SECONDS)
            if self._sent.errors:
                self._replace(producer)
        self._sent.forget()

    def _wait(self, producer: Producer) -> None:
        try:
            producer.poll(self._pause_seconds)
        except KafkaException as error:  # it has failed for good
            self._sent.errors.append(error.args[0])

    def _send_to_all(self, producer: Producer, name: str, number: int) -> None:
        for partition in range(self._partitions):
            try:
                self._sent.send(producer, self.topic, partition, value_of(name, partition, number))
            except KafkaException as error:  # it has failed for good
                self._sent.errors.append(error.args[0])
                return

    def _replace(self, producer: Producer) -> None:
        self.recorder.note(self.name, f"replaced: {self._sent.errors[0]}")
        self.replaced += 1
        with contextlib.suppress(KafkaException):
            producer.purge()
            producer.flush(5.0)
        self._sent.forget()
        self._sent.errors.clear()


class Appending(Workload):
    """Several of these append to the same partitions, one message at a time, and ask where they end."""

    def __init__(self, recorder: Recorder, bootstrap: str, name: str, topic: str, partitions: int) -> None:
        super().__init__(recorder, bootstrap, name)
        self._topic = topic
        self._partitions = partitions
        self._sent = Sent(recorder, name)

    def _run(self) -> None:
        producer = Producer({**self._common, "enable.idempotence": True, "linger.ms": 0})
        consumer = Consumer({**self._common, "group.id": f"none-{self.name}"})
        number = 0
        while not self._is_over.wait(0.25):
            for partition in range(self._partitions):
                self._sent.send(producer, self._topic, partition, value_of(self.name, partition, number))
                producer.flush(20.0)
                self._ask_end(consumer, partition)
            number += 1
        producer.flush(PATIENCE_SECONDS)
        self._sent.forget()
        self.fatal += [str(error) for error in self._sent.errors]
        consumer.close()

    def _ask_end(self, consumer: Consumer, partition: int) -> None:
        begin = self.recorder.now()
        try:
            _, end = consumer.get_watermark_offsets(TopicPartition(self._topic, partition), 5.0)
        except KafkaException:
            return
        answered = EndOffset(
            topic=self._topic, partition=partition, client=self.name, offset=end, begin=begin, end=self.recorder.now()
        )
        self.recorder.add(answered)


class Transactions:
    """A transactional producer that is made again, under the same id, when it cannot go on."""

    def __init__(self, workload: Workload, common: dict[str, Any], transactional_id: str) -> None:
        self._workload = workload
        self._settings = {**common, "transactional.id": transactional_id, "linger.ms": 5}
        self._settings["transaction.timeout.ms"] = int(_TRANSACTION_SECONDS * 1000)
        self._id = transactional_id
        self._count = 0
        self._producer: Producer | None = None
        self.outcomes = {"committed": 0, "aborted": 0, "unknown": 0}
        self.sent = Sent(workload.recorder, transactional_id)

    def run(self, fill: Any, *, aborts: bool = False) -> bool:
        """One transaction: `fill` is called with the producer, what is sent, and the name. Whether it was committed."""
        recorder = self._workload.recorder
        self._count += 1
        name, begin = f"{self._id}#{self._count}", recorder.now()
        outcome = "unknown"
        try:
            producer = self._ready()
            producer.begin_transaction()
            fill(producer, self.sent, name)
            outcome = self._ended(producer, aborts=aborts)
        except KafkaException as error:
            outcome = self._failed(error)
        except SystemError as error:  # the binding calls back while it has an error to raise
            outcome = self._failed(KafkaException(KafkaError(KafkaError._FAIL, str(error))))
        if self._producer is None:
            self.sent.forget()
        self.outcomes[outcome] += 1
        recorder.add(Transaction(name=name, outcome=outcome, begin=begin, end=recorder.now()))  # type: ignore[arg-type]
        return outcome == "committed"

    def _ready(self) -> Producer:
        if self._producer is None:
            producer = Producer(self._settings)
            producer.init_transactions(PATIENCE_SECONDS)
            self._producer = producer
        return self._producer

    def _ended(self, producer: Producer, *, aborts: bool) -> str:
        if aborts:
            producer.flush(PATIENCE_SECONDS)  # else nothing would have been sent
            producer.abort_transaction(PATIENCE_SECONDS)
            return "aborted"
        while True:
            try:
                producer.commit_transaction(PATIENCE_SECONDS)
                return "committed"
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise

    def _failed(self, error: KafkaException) -> str:
        """What may be aborted is; else how it ends is decided by the next producer of this id, and not known."""
        recorder, code = self._workload.recorder, error.args[0]
        recorder.note(self._id, f"{code.name()}: {code.str()}, fatal={code.fatal()}, abort={code.txn_requires_abort()}")
        producer = self._producer
        if producer is not None and code.txn_requires_abort():
            with contextlib.suppress(KafkaException):
                producer.abort_transaction(PATIENCE_SECONDS)
                return "aborted"
        self._producer = None
        if producer is not None:
            with contextlib.suppress(KafkaException):
                producer.purge()
                producer.flush(1.0)
        return "unknown"

    def close(self) -> None:
        if self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.flush(PATIENCE_SECONDS)
        self.sent.forget()


class Transacting(Workload):
    """All partitions get the same number, or none does."""

    def __init__(self, recorder: Recorder, bootstrap: str, name: str, topic: str, partitions: int) -> None:
        super().__init__(recorder, bootstrap, name)
        self._topic = topic
        self._partitions = partitions
        self.transactions = Transactions(self, self._common, name)

    def _run(self) -> None:
        number = 0
        while not self._is_over.wait(0.05):
            number += 1

            def fill(producer: Producer, sent: Sent, name: str, number: int = number) -> None:
                for partition in range(self._partitions):
                    sent.send(producer, self._topic, partition, value_of(self.name, partition, number), name)

            self.transactions.run(fill, aborts=number % 5 == 0)
        self.transactions.close()


class Copying(Workload):
    """One of several that copy a topic into another, exactly once, as Kafka's clients do it."""

    def __init__(self, recorder: Recorder, bootstrap: str, name: str, group: str, source: str, target: str) -> None:
        super().__init__(recorder, bootstrap, name)
        self._group = group
        self._source = source
        self._target = target
        self.transactions = Transactions(self, self._common, name)

    def _run(self) -> None:
        while not self._is_over.is_set():
            settings = {"group.id": self._group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
            settings |= {"isolation.level": "read_committed", "session.timeout.ms": SESSION_MS}
            consumer = Consumer({**self._common, **settings})
            try:
                consumer.subscribe([self._source])
                self._copy(consumer)
            finally:
                consumer.close()
        self.transactions.close()

    def _copy(self, consumer: Consumer) -> None:
        """Until a transaction fails: a new consumer then begins at what is committed."""
        while not self._is_over.is_set():
            messages = [one for one in consumer.consume(100, 0.3) if one.error() is None]
            if not messages:
                continue

            def fill(producer: Producer, sent: Sent, name: str, messages: Sequence[Message] = messages) -> None:
                for message in messages:
                    partition, value = message.partition(), message.value()
                    assert partition is not None
                    assert isinstance(value, bytes)
                    producer.produce(self._target, value, partition=partition)
                positions = [one for one in consumer.position(consumer.assignment()) if one.offset >= 0]
                group = consumer.consumer_group_metadata()
                within(_OFFSETS_SECONDS, producer.send_offsets_to_transaction, positions, group, PATIENCE_SECONDS)

            if not self.transactions.run(fill):
                return


class GroupReading(Workload):
    """A member of a group. What it reads, commits and is told goes into the history."""

    def __init__(self, recorder: Recorder, bootstrap: str, name: str, group: str, topic: str) -> None:
        super().__init__(recorder, bootstrap, name)
        self._group = group
        self._topic = topic
        self._life = 0
        self.seen = 0

    def _run(self) -> None:
        settings = {"group.id": self._group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer = Consumer({**self._common, **settings, "session.timeout.ms": SESSION_MS})
        consumer.subscribe([self._topic], on_assign=self._assigned)
        while not self._is_over.is_set():
            messages = [one for one in consumer.consume(500, 0.5) if one.error() is None]
            self._took(messages)
            if messages:
                self._commit(consumer)
                self._ask(consumer)
        consumer.close()

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._life += 1

    def _took(self, messages: Iterable[Message]) -> None:
        found: dict[int, list[tuple[int, str]]] = {}
        for message in messages:
            partition, offset, value = message.partition(), message.offset(), message.value()
            assert partition is not None
            assert offset is not None
            assert isinstance(value, bytes)
            found.setdefault(partition, []).append((offset, value.decode()))
        for partition, some in found.items():
            self.seen += len(some)
            self.recorder.add(
                Read(
                    topic=self._topic,
                    partition=partition,
                    reader=f"{self._group}/{self.name}",
                    life=self._life,
                    messages=some,
                    end=self.recorder.now(),
                )
            )

    def _commit(self, consumer: Consumer) -> None:
        begin = self.recorder.now()
        positions = [one for one in consumer.position(consumer.assignment()) if one.offset >= 0]
        outcome, done = "unknown", positions
        with contextlib.suppress(KafkaException):
            done = consumer.commit(offsets=positions, asynchronous=False) or []
            outcome = "ok"
        for one in done:
            answered = outcome if one.error is None else "unknown"
            self.recorder.add(
                Commit(
                    group=self._group,
                    topic=self._topic,
                    partition=one.partition,
                    offset=one.offset,
                    begin=begin,
                    end=self.recorder.now(),
                    outcome=answered,  # type: ignore[arg-type]
                )
            )

    def _ask(self, consumer: Consumer) -> None:
        begin = self.recorder.now()
        try:
            found = consumer.committed(consumer.assignment(), 5.0)
        except KafkaException:
            return
        end = self.recorder.now()
        self.recorder.add(
            *(
                Committed(
                    group=self._group,
                    topic=self._topic,
                    partition=one.partition,
                    offset=one.offset if one.offset >= 0 else None,
                    begin=begin,
                    end=end,
                )
                for one in found
                if one.error is None
            )
        )


class Subscribing(Workload):
    """A consumer of a subscription, of a topic with one partition; it goes on with the next node when one fails."""

    def __init__(self, recorder: Recorder, urls: Sequence[str], name: str, topic: str) -> None:
        super().__init__(recorder, "", name)
        self._urls = urls
        self._topic = topic
        self._life = 0
        self.newest = -1
        """The last offset that it got."""

    def _run(self) -> None:
        while not self._is_over.is_set():
            url = self._urls[self._life % len(self._urls)]
            self._life += 1
            try:
                with tidelog.connect(url, timeout=20.0) as log:
                    self._consume(log)
            except (TidelogError, TimeoutError) as error:
                self.recorder.note(self.name, f"{type(error).__name__}: {error}")
                time.sleep(0.5)

    def _consume(self, log: Any) -> None:
        consumer = log.topic(self._topic.replace(".", "/", 1)).subscribe(self.name, "exclusive", consumer="one")
        try:
            while not self._is_over.is_set():
                messages = consumer.receive_many(500, 0.5)
                if messages:
                    read = Read(
                        topic=self._topic,
                        partition=0,
                        reader=f"{self.name}/one",
                        life=self._life,
                        messages=[(one.offset, one.value.decode()) for one in messages],
                        end=self.recorder.now(),
                    )
                    self.recorder.add(read)
                    self.newest = max(self.newest, *(one.offset for one in messages))
                    consumer.ack_many(messages)
        finally:
            consumer.close()
