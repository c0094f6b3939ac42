"""The transaction coordinator: its rules one by one, and a model that crashes at every step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.campaign import run_machine

from tidelog.errors import DataError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.records import StoredBatch
from tidelog.service.kafka.transactions.producers import PartitionProducers
from tidelog.service.kafka.transactions.state_machine import (
    KEPT_PARTITIONS,
    MAX_EPOCH,
    CommittedOffset,
    Effect,
    EndedTransaction,
    Partition,
    Persist,
    Reply,
    TransactionCoordinator,
    TransactionRecord,
    TransactionState,
    WriteMarkers,
    decode_record,
    encode_record,
)

TIMEOUT_MS = 60_000
A0, B1 = ("a", 0), ("b", 1)


class Broker:
    """Carries effects out at once; what is written survives it."""

    def __init__(self, records: dict[str, bytes] | None = None) -> None:
        self.records = {} if records is None else records
        self.markers: list[WriteMarkers] = []
        ids = itertools.count(1000)
        self.coordinator = TransactionCoordinator(lambda: next(ids))
        self.replies: dict[Any, Reply] = {}
        self.carry_out(self.coordinator.recover(map(decode_record, self.records.values())))

    def carry_out(self, effects: list[Effect], now_ms: int = 0, *, confirms: bool = True) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.replies[effect.token] = effect
            elif isinstance(effect, WriteMarkers):
                self.markers.append(effect)
                places: list[Partition | str] = [*effect.partitions, *effect.offsets]
                for place in places if confirms else ():
                    self.carry_out(self.coordinator.marker_written(now_ms, effect, place), now_ms)
            else:
                if effect.record is None:
                    del self.records[effect.transactional_id]
                else:
                    self.records[effect.transactional_id] = encode_record(effect.record)
                self.carry_out(self.coordinator.persisted(effect.transactional_id), now_ms, confirms=confirms)

    def call(self, method: str, *arguments: Any, now_ms: int = 0, confirms: bool = True, **more: Any) -> Reply:
        effects = getattr(self.coordinator, method)(now_ms, "t", *arguments, **more)
        self.carry_out(effects, now_ms, confirms=confirms)
        return self.replies.pop("t")

    def init(self, now_ms: int = 0, **more: Any) -> tuple[int, int]:
        reply = self.call("init_producer", "app", TIMEOUT_MS, now_ms=now_ms, **more)
        assert reply.error is ErrorCode.NONE, reply
        return reply.producer_id, reply.epoch


def test_a_transaction_is_committed_in_all_its_partitions() -> None:
    """And its offsets in their groups."""
    broker = Broker()
    who = broker.init()
    assert who == (1000, 0)
    assert broker.call("add_partitions", "app", *who, [A0, B1]).error is ErrorCode.NONE
    assert broker.call("add_offsets", "app", *who, "group").error is ErrorCode.NONE
    offset = CommittedOffset(7, 0, "meta")
    assert broker.call("commit_offsets", "app", *who, "group", {A0: offset}).error is ErrorCode.NONE
    assert broker.call("end", "app", *who, True).error is ErrorCode.NONE
    [markers] = broker.markers
    assert (markers.is_commit, markers.partitions, markers.epoch) == (True, frozenset((A0, B1)), 0)
    assert markers.offsets == {"group": {"a": {0: offset}}}
    assert decode_record(broker.records["app"]).state is TransactionState.COMPLETE_COMMIT
    assert broker.call("end", "app", *who, True).error is ErrorCode.NONE
    assert broker.call("end", "app", *who, False).error is ErrorCode.INVALID_TXN_STATE


def test_transactions_of_an_id_are_numbered() -> None:
    """Also by the next coordinator: partitions tell by it what ends a transaction, and what comes late."""
    broker = Broker()
    who = broker.init()
    for is_commit in (True, False):
        broker.call("add_partitions", "app", *who, [A0])
        broker.call("end", "app", *who, is_commit)
    again = Broker(broker.records)
    again.call("add_partitions", "app", *who, [A0])
    again.call("end", "app", *who, True)
    assert [markers.number for markers in (*broker.markers, *again.markers)] == [1, 2, 3]


def test_a_record_says_which_transaction_was_the_last_one_in_each_partition() -> None:
    """A new owner that has lost the end of it writes it again, whatever the producer did elsewhere since."""
    broker = Broker()
    who = broker.init()
    many = [("c", number) for number in range(KEPT_PARTITIONS)]

    def run(partitions: list[Partition], *, is_commit: bool) -> TransactionRecord:
        assert broker.call("add_partitions", "app", *who, partitions).error is ErrorCode.NONE
        assert broker.call("end", "app", *who, is_commit).error is ErrorCode.NONE
        return decode_record(broker.records["app"])

    run([A0, B1], is_commit=True)
    ended = (EndedTransaction(2, False, frozenset((B1,))), EndedTransaction(1, True, frozenset((A0,))))
    assert run([B1], is_commit=False).ended == ended
    run(many[:-1], is_commit=True)
    record = run(many[-1:], is_commit=False)
    last = [record.last_in(partition) for partition in (A0, B1, many[0], many[-1])]
    assert [one if one is None else (one.number, one.is_commit) for one in last] == [None, None, (3, True), (4, False)]
    assert sum(len(one.partitions) for one in record.ended) == KEPT_PARTITIONS


def test_an_aborted_transaction_commits_no_offsets() -> None:
    """They are forgotten, and do not come back in the next one."""
    broker = Broker()
    who = broker.init()
    broker.call("add_offsets", "app", *who, "group")
    broker.call("commit_offsets", "app", *who, "group", {A0: CommittedOffset(7)})
    assert broker.call("end", "app", *who, False).error is ErrorCode.NONE
    assert [(one.is_commit, list(one.offsets)) for one in broker.markers] == [(False, ["group"])]
    broker.call("add_offsets", "app", *who, "group")
    broker.call("add_partitions", "app", *who, [A0])
    broker.call("end", "app", *who, True)
    assert broker.markers[1].offsets == {}


def test_nothing_is_answered_before_it_is_durable() -> None:
    """And nothing else is begun meanwhile."""
    broker = Broker()
    who = broker.init()
    coordinator = broker.coordinator
    effects = coordinator.add_partitions(0, "t", "app", *who, [A0])
    assert [type(one) for one in effects] == [Persist]
    for effect in (
        coordinator.add_partitions(0, "x", "app", *who, [B1]),
        coordinator.end(0, "x", "app", *who, True),
        coordinator.init_producer(0, "x", "app", TIMEOUT_MS),
    ):
        assert effect == [Reply("x", ErrorCode.CONCURRENT_TRANSACTIONS)]
    assert coordinator.verify(*who, A0) is ErrorCode.INVALID_TXN_STATE
    assert coordinator.persisted("app") == [Reply("t", ErrorCode.NONE)]
    assert coordinator.verify(*who, A0) is ErrorCode.NONE


def test_a_record_that_was_not_written_changes_nothing() -> None:
    """A store that refuses it: the client tries again."""
    broker = Broker()
    coordinator = broker.coordinator
    coordinator.init_producer(0, "t", "app", TIMEOUT_MS)
    assert coordinator.not_persisted("app") == [Reply("t", ErrorCode.COORDINATOR_NOT_AVAILABLE)]
    assert coordinator.transactional_ids() == []
    who = broker.init()
    coordinator.add_partitions(0, "t", "app", *who, [A0])
    coordinator.not_persisted("app")
    assert coordinator.verify(*who, A0) is ErrorCode.INVALID_TXN_STATE


def test_a_second_instance_fences_the_first_and_aborts_its_transaction() -> None:
    """It is told to try again until that is done."""
    broker = Broker()
    who = broker.init()
    broker.call("add_partitions", "app", *who, [A0])
    assert broker.call("init_producer", "app", TIMEOUT_MS).error is ErrorCode.CONCURRENT_TRANSACTIONS
    assert (broker.markers[0].is_commit, broker.markers[0].epoch) == (False, 1)
    assert broker.init() == (1000, 2)
    assert broker.call("end", "app", *who, True).error is ErrorCode.PRODUCER_FENCED
    assert broker.call("add_partitions", "app", *who, [A0]).error is ErrorCode.PRODUCER_FENCED
    assert broker.call("init_producer", "app", TIMEOUT_MS, *who).error is ErrorCode.PRODUCER_FENCED
    assert broker.coordinator.verify(*who, A0) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_transaction_that_is_open_too_long_is_aborted() -> None:
    """Its producer is fenced, and may go on with a new epoch if nobody took its place."""
    broker = Broker()
    who = broker.init()
    broker.call("add_partitions", "app", *who, [A0], now_ms=100)
    assert broker.coordinator.next_deadline_ms == 100 + TIMEOUT_MS
    assert broker.coordinator.tick(99 + TIMEOUT_MS) == []
    broker.carry_out(broker.coordinator.tick(100 + TIMEOUT_MS))
    assert not broker.markers[0].is_commit
    assert broker.call("end", "app", *who, True).error is ErrorCode.PRODUCER_FENCED
    assert broker.init(producer_id=who[0], epoch=who[1]) == (1000, 1)


def test_an_init_whose_answer_was_lost_is_answered_again() -> None:
    """With the same epoch: a further one would fence nobody but itself."""
    broker = Broker()
    first = broker.init()
    second = broker.init(producer_id=first[0], epoch=first[1])
    assert second == (1000, 1)
    assert broker.init(producer_id=first[0], epoch=first[1]) == second
    assert broker.call("init_producer", "app", TIMEOUT_MS, 77, 0).error is ErrorCode.PRODUCER_FENCED


def test_epochs_that_are_used_up_give_a_new_producer() -> None:
    """The one before is unknown then."""
    broker = Broker()
    record = TransactionRecord(transactional_id="app", producer_id=5, epoch=MAX_EPOCH, timeout_ms=1000)
    broker = Broker({"app": encode_record(record)})
    assert broker.init() == (1000, 0)
    assert broker.call("end", "app", 5, MAX_EPOCH, True).error is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert broker.coordinator.verify(5, MAX_EPOCH, A0) is ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_wrong_requests_are_refused() -> None:
    """Without a change."""
    broker = Broker()
    assert broker.call("init_producer", "", TIMEOUT_MS).error is ErrorCode.INVALID_REQUEST
    assert broker.call("init_producer", "app", 1 << 40).error is ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert broker.call("init_producer", "app", 0).error is ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert broker.call("end", "app", 1, 0, True).error is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    who = broker.init()
    assert broker.call("end", "app", *who, True).error is ErrorCode.INVALID_TXN_STATE
    assert broker.call("commit_offsets", "app", *who, "g", {}).error is ErrorCode.INVALID_TXN_STATE
    broker.call("add_partitions", "app", *who, [A0])
    assert broker.call("commit_offsets", "app", *who, "g", {}).error is ErrorCode.INVALID_TXN_STATE


def test_idempotent_producers_need_no_transactional_id() -> None:
    """Each gets an id of its own, and nothing is stored."""
    broker = Broker()
    replies = [broker.call("init_producer", None, 0) for _ in range(2)]
    assert [(one.producer_id, one.epoch) for one in replies] == [(1000, 0), (1001, 0)]
    assert broker.records == {}


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_new_coordinator_finishes_what_was_decided(is_commit: bool) -> None:
    """The old one died before the markers were written."""
    broker = Broker()
    who = broker.init()
    broker.call("add_partitions", "app", *who, [A0, B1])
    assert broker.call("end", "app", *who, is_commit, confirms=False).error is ErrorCode.NONE
    assert broker.call("end", "app", *who, is_commit).error is ErrorCode.CONCURRENT_TRANSACTIONS
    second = Broker(broker.records)
    assert [(one.is_commit, one.partitions) for one in second.markers] == [(is_commit, frozenset((A0, B1)))]
    assert second.call("end", "app", *who, is_commit).error is ErrorCode.NONE


def test_markers_that_nobody_confirms_are_written_again() -> None:
    """And a late confirmation of the first ones does not count for another transaction."""
    broker = Broker()
    who = broker.init()
    broker.call("add_partitions", "app", *who, [A0])
    broker.call("end", "app", *who, True, confirms=False)
    broker.carry_out(broker.coordinator.tick(TIMEOUT_MS), TIMEOUT_MS)
    assert len(broker.markers) == 2
    broker.call("add_partitions", "app", *who, [A0])
    broker.call("end", "app", *who, False, confirms=False)
    assert broker.coordinator.marker_written(0, broker.markers[0], A0) == []
    assert decode_record(broker.records["app"]).state is TransactionState.PREPARE_ABORT


def test_transactional_ids_that_nobody_uses_are_forgotten() -> None:
    """After a week."""
    broker = Broker()
    broker.init()
    due = broker.coordinator.next_deadline_ms
    assert due is not None
    broker.carry_out(broker.coordinator.tick(due))
    assert broker.records == {}
    assert broker.coordinator.transactional_ids() == []


def test_damaged_records_are_refused() -> None:
    """Whatever they hold."""
    for data in (b"", b"{}", b"[1]", b'{"transactional_id": 3}'):
        with pytest.raises(DataError):
            decode_record(data)


class Producer:
    """An instance of an application."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.who: tuple[int, int] | None = None
        self.sequences: dict[Partition, int] = {}
        self.transaction: Transaction | None = None
        self.token: int | None = None
        self.is_fenced = False


class Transaction:
    """What a producer did within one transaction, and what it knows of the outcome."""

    def __init__(self) -> None:
        self.partitions: set[Partition] = set()
        self.batches: list[tuple[Partition, int, int]] = []
        """Partition, offset and producer id."""
        self.asked: bool | None = None
        self.answered = False
        self.offset: int | None = None
        """Committed for its application, and unique."""
        self.has_offset = False


class TransactionModel(RuleBasedStateMachine):
    """Two applications, instances that replace each other, a broker that carries effects out late, and crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, bytes] = {}
        self.logs: dict[Partition, list[StoredBatch]] = {A0: [], B1: []}
        self.group_offsets: dict[str, set[int]] = {}
        self.producer_ids = itertools.count(1)
        self.tokens = itertools.count(1)
        self.numbers = itertools.count(1)
        self.now_ms = 0
        self.transactions: list[Transaction] = []
        self.producers: list[Producer] = []
        self.waiting: dict[int, tuple[Producer, str]] = {}
        self.start()

    def start(self) -> None:
        """A broker begins with what is durable; clients hear nothing of what they had asked for."""
        self.waiting.clear()
        for producer in self.producers:
            producer.token = None
        self.effects: list[Effect] = []
        self.unwritten: list[tuple[WriteMarkers, Partition | str]] = []
        self.confirmations: list[tuple[WriteMarkers, Partition | str]] = []
        self.coordinator = TransactionCoordinator(lambda: next(self.producer_ids))
        self.partitions = {partition: PartitionProducers() for partition in self.logs}
        for partition, log in self.logs.items():
            self.partitions[partition].record_all(log)
        self.take(self.coordinator.recover(map(decode_record, self.records.values())))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.answer(effect)
            else:
                self.effects.append(effect)

    def answer(self, reply: Reply) -> None:
        producer, what = self.waiting.pop(reply.token)  # type: ignore[call-overload]
        producer.token = None
        transaction = producer.transaction
        if reply.error in (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_ID_MAPPING):
            producer.is_fenced = True
        if reply.error is not ErrorCode.NONE:
            return
        assert not producer.is_fenced
        if what == "init":
            self.fence_others(producer, (reply.producer_id, reply.epoch))
        elif what in ("a", "b"):
            assert transaction is not None
            transaction.partitions.add(A0 if what == "a" else B1)
        elif what == "offsets":
            assert transaction is not None
            transaction.has_offset = True
        elif what == "end":
            assert transaction is not None
            transaction.answered = True
            producer.transaction = None

    def fence_others(self, producer: Producer, who: tuple[int, int]) -> None:
        producer.who, producer.sequences, producer.transaction = who, {}, None
        for other in self.producers:
            if other is not producer and other.transactional_id == producer.transactional_id:
                assert other.who is None or other.who < who
                other.is_fenced = other.who is not None or other.is_fenced

    def ask(self, producer: Producer, what: str, method: str, *arguments: Any) -> None:
        token = next(self.tokens)
        producer.token = token
        self.waiting[token] = (producer, what)
        self.take(getattr(self.coordinator, method)(self.now_ms, token, producer.transactional_id, *arguments))

    @rule(data=st.data(), steps=st.integers(1, 8))
    def an_application_works(self, data: st.DataObject, steps: int) -> None:
        """Several natural steps at once, each carried out: what single rules would come to only now and then."""
        if not self.producers:
            self.an_instance_starts(data.draw(st.sampled_from(["app", "other"])))
        producer = data.draw(st.sampled_from(self.producers))
        for _ in range(steps):
            self.everything_is_carried_out(data.draw(st.sampled_from([1000, 1000, 1000, 1, 2, 3])))
            if producer.token is not None or producer.is_fenced:
                return
            self.next_step(data, producer)

    def next_step(self, data: st.DataObject, producer: Producer) -> None:
        partition = data.draw(st.sampled_from([A0, B1]))
        transaction = producer.transaction
        if producer.who is None:
            self.ask(producer, "init", "init_producer", TIMEOUT_MS)
        elif transaction is None or not transaction.partitions:
            self.add(producer, partition)
        elif transaction.asked is not None:
            self.finish(producer, transaction.asked)
        else:
            step = data.draw(st.sampled_from(["produce", "produce", "add", "add", "offsets", "end"]))
            if step == "produce":
                self.produce(producer, partition)
            elif step == "add":
                self.add(producer, partition)
            elif step == "offsets":
                self.commit_offsets(producer, transaction)
            else:
                self.finish(producer, data.draw(st.booleans()))

    def ready(self) -> list[Producer]:
        return [one for one in self.producers if one.token is None and one.who is not None]

    # Clients

    @rule(name=st.sampled_from(["app", "other"]))
    def an_instance_starts(self, name: str) -> None:
        producer = Producer(name)
        self.producers.append(producer)
        self.ask(producer, "init", "init_producer", TIMEOUT_MS)

    @rule(data=st.data())
    def an_instance_tries_again_to_start(self, data: st.DataObject) -> None:
        new = [one for one in self.producers if one.who is None and one.token is None]
        if new:
            self.ask(data.draw(st.sampled_from(new)), "init", "init_producer", TIMEOUT_MS)

    @rule(data=st.data(), partition=st.sampled_from([A0, B1]))
    def a_partition_is_added(self, data: st.DataObject, partition: Partition) -> None:
        if ready := self.ready():
            self.add(data.draw(st.sampled_from(ready)), partition)

    def add(self, producer: Producer, partition: Partition) -> None:
        if producer.transaction is None:
            producer.transaction = Transaction()
            self.transactions.append(producer.transaction)
        if producer.transaction.asked is None:
            assert producer.who is not None
            self.ask(producer, partition[0], "add_partitions", *producer.who, [partition])

    @rule(data=st.data())
    def a_batch_is_produced(self, data: st.DataObject) -> None:
        """By anybody, zombies included, to anywhere: the broker decides."""
        if ready := self.ready():
            self.produce(data.draw(st.sampled_from(ready)), data.draw(st.sampled_from([A0, B1])))

    def produce(self, producer: Producer, partition: Partition) -> None:
        assert producer.who is not None
        if not producer.is_fenced and producer.transaction is not None and producer.transaction.asked is not None:
            return  # it waits for the end, and sends nothing more
        sequence = producer.sequences.get(partition, 0)
        if self.coordinator.verify(*producer.who, partition) is not ErrorCode.NONE:
            return
        if self.partitions[partition].check(*producer.who, sequence, 1).error is not ErrorCode.NONE:
            return
        assert not producer.is_fenced
        assert producer.transaction is not None
        assert producer.transaction.asked is None
        offset = self.append(partition, producer.who, sequence)
        producer.sequences[partition] = sequence + 1
        producer.transaction.batches.append((partition, offset, producer.who[0]))

    def append(self, partition: Partition, who: tuple[int, int], sequence: int, is_commit: bool | None = None) -> int:
        log = self.logs[partition]
        entry = StoredBatch(len(log), len(log), *who, sequence, True, is_commit is not None, bool(is_commit), 0)
        log.append(entry)
        self.partitions[partition].record(entry)
        return entry.first_offset

    @rule(data=st.data())
    def offsets_are_committed(self, data: st.DataObject) -> None:
        ready = [one for one in self.ready() if one.transaction is not None and one.transaction.asked is None]
        if ready:
            producer = data.draw(st.sampled_from(ready))
            assert producer.transaction is not None
            self.commit_offsets(producer, producer.transaction)

    def commit_offsets(self, producer: Producer, transaction: Transaction) -> None:
        assert producer.who is not None
        group = f"group-{producer.transactional_id}"
        if transaction.offset is None:
            transaction.offset = next(self.numbers)
            self.ask(producer, "group", "add_offsets", *producer.who, group)
        else:
            offset = {A0: CommittedOffset(transaction.offset)}
            self.ask(producer, "offsets", "commit_offsets", *producer.who, group, offset)

    @rule(data=st.data(), is_commit=st.booleans())
    def a_transaction_is_ended(self, data: st.DataObject, is_commit: bool) -> None:
        ready = [one for one in self.ready() if one.transaction is not None]
        if ready:
            self.finish(data.draw(st.sampled_from(ready)), is_commit)

    def finish(self, producer: Producer, is_commit: bool) -> None:
        assert producer.transaction is not None
        assert producer.who is not None
        wanted = is_commit if producer.transaction.asked is None else producer.transaction.asked
        producer.transaction.asked = wanted
        self.ask(producer, "end", "end", *producer.who, wanted)

    # The broker

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Persist):
            self.write(effect)
            self.take(self.coordinator.persisted(effect.transactional_id))
        elif isinstance(effect, WriteMarkers):
            places: list[Partition | str] = [*sorted(effect.partitions), *effect.offsets]
            self.unwritten += [(effect, place) for place in places]

    def write_marker(self, markers: WriteMarkers, place: Partition | str) -> None:
        if isinstance(place, str) and not markers.is_commit:
            pass
        elif isinstance(place, str):
            committed = markers.offsets[place]["a"].values()
            self.group_offsets.setdefault(place, set()).update(one.offset for one in committed)
        else:
            self.append(place, (markers.producer_id, markers.epoch), -1, markers.is_commit)
        self.confirmations.append((markers, place))

    @rule(data=st.data())
    def a_marker_is_written(self, data: st.DataObject) -> None:
        if self.unwritten:
            self.write_marker(*self.unwritten.pop(data.draw(st.integers(0, len(self.unwritten) - 1))))

    def write(self, effect: Persist) -> None:
        if effect.record is None:
            self.records.pop(effect.transactional_id)
        else:
            self.records[effect.transactional_id] = encode_record(effect.record)

    @rule(data=st.data())
    def an_effect_is_carried_out(self, data: st.DataObject) -> None:
        if self.effects:
            self.carry_out(self.effects.pop(data.draw(st.integers(0, len(self.effects) - 1))))

    @rule(data=st.data())
    def a_marker_is_confirmed(self, data: st.DataObject) -> None:
        if self.confirmations:
            markers, place = self.confirmations.pop(data.draw(st.integers(0, len(self.confirmations) - 1)))
            self.take(self.coordinator.marker_written(self.now_ms, markers, place))

    @rule(passed_ms=st.sampled_from([1, TIMEOUT_MS // 2, TIMEOUT_MS]))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.take(self.coordinator.tick(self.now_ms))

    @rule(limit=st.sampled_from([1000, 1, 2, 3, 4]))
    def everything_is_carried_out(self, limit: int) -> None:
        """Or as many things as the limit says."""
        for step in range(limit):
            assert step < 999, "the coordinator does not come to rest"
            if self.effects:
                self.carry_out(self.effects.pop(0))
            elif self.unwritten and not self.confirmations:
                self.write_marker(*self.unwritten.pop(0))
            elif self.confirmations:
                markers, place = self.confirmations.pop(0)
                self.take(self.coordinator.marker_written(self.now_ms, markers, place))
            else:
                break

    @rule(data=st.data())
    def the_broker_crashes(self, data: st.DataObject) -> None:
        """Also between the moment when a record is durable and the moment when the coordinator hears of it."""
        durable = [one for one in self.effects if isinstance(one, Persist)]
        if durable:
            written = data.draw(st.sampled_from([None, *durable]))
            if written is not None:
                self.write(written)
        self.start()

    # In the end

    def teardown(self) -> None:
        """All is or nothing is: in every partition, for the offsets too, and as the client was told."""
        self.everything_is_carried_out(1000)
        self.now_ms += 2 * TIMEOUT_MS
        self.take(self.coordinator.tick(self.now_ms))
        self.everything_is_carried_out(1000)
        for partition, log in self.logs.items():
            assert self.partitions[partition].last_stable_offset(len(log)) == len(log)
        for transaction in self.transactions:
            outcomes = {self.outcome(*one) for one in transaction.batches}
            assert len(outcomes) < 2
            if transaction.offset is not None and outcomes == {False}:
                assert all(transaction.offset not in known for known in self.group_offsets.values())
            if transaction.answered and transaction.asked and transaction.has_offset:
                assert any(transaction.offset in known for known in self.group_offsets.values())
            if transaction.answered and outcomes:
                assert outcomes == {transaction.asked}
            if transaction.asked is not True:
                assert outcomes <= {False}
        assert not self.waiting

    def outcome(self, partition: Partition, offset: int, producer_id: int) -> bool:
        """By the first control record of the producer behind it; the aborted ranges say the same."""
        after = self.logs[partition][offset + 1 :]
        is_commit = next(one.is_commit for one in after if one.is_control and one.producer_id == producer_id)
        ranges = self.partitions[partition].aborted(offset, offset + 1)
        is_aborted = any(one.producer_id == producer_id and one.first_offset <= offset for one in ranges)
        assert is_aborted is not is_commit
        return is_commit


@pytest.mark.deeper
def test_transactions_are_atomic_through_every_crash() -> None:
    """And zombies write nothing that counts."""
    run_machine(TransactionModel, 150, steps=40)
