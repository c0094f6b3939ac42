"""Idempotent producers of a partition: sequences, duplicates, epochs, limits, aborted ranges, snapshots."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.campaign import run_machine

from tidelog.errors import DataError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.records import StoredBatch
from tidelog.service.kafka.transactions.producers import (
    MAX_NUMBER,
    SEQUENCES,
    AbortedTransaction,
    PartitionProducers,
    Verdict,
)


def batch(
    first: int, producer: int, sequence: int, count: int = 1, epoch: int = 0, transactional: bool = False
) -> StoredBatch:
    return StoredBatch(first, first + count - 1, producer, epoch, sequence, transactional, False, False, first * 10)


def marker(offset: int, producer: int, is_commit: bool, epoch: int = 0, number: int = 0) -> StoredBatch:
    return StoredBatch(offset, offset, producer, epoch, number, True, True, is_commit, offset * 10)


def test_a_batch_that_comes_again_gets_its_first_offset() -> None:
    """One of the last five; an older one is out of order, as with Kafka."""
    producers = PartitionProducers()
    for index in range(7):
        assert producers.check(1, 0, index * 3, 3) == Verdict()
        producers.record(batch(100 + index * 3, 1, index * 3, 3))
    assert producers.check(1, 0, 18, 3) == Verdict(ErrorCode.NONE, 118, 1180)
    assert producers.check(1, 0, 6, 3) == Verdict(ErrorCode.NONE, 106, 1060)
    assert producers.check(1, 0, 3, 3).error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producers.check(1, 0, 18, 2).error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_marker_of_a_transaction_that_has_ended_is_late() -> None:
    """Loses otherwise: it ends the transaction after, which has the same producer and epoch. Numbers go around."""
    producers = PartitionProducers()
    assert not producers.is_late(1, 0, 1)
    for number in (MAX_NUMBER - 1, MAX_NUMBER, 1):
        producers.record(batch(producers.next_offset, 1, 0, transactional=True))
        assert not producers.is_late(1, 0, number)
        producers.record(marker(producers.next_offset, 1, True, number=number))
        assert producers.is_late(1, 0, number)
    assert producers.is_late(1, 0, MAX_NUMBER)
    assert not producers.is_late(1, 0, 2)
    assert not producers.is_late(1, 0, 0), "one without a number is of a coordinator that does not know it"


def test_numbers_of_ended_transactions_outlive_a_snapshot_and_a_new_epoch() -> None:
    """A node that opens the partition knows which markers are late."""
    producers = PartitionProducers()
    producers.record(marker(0, 1, True, number=5))
    producers.record(batch(1, 1, 0, epoch=1, transactional=True))
    restored = PartitionProducers()
    restored.restore(producers.snapshot())
    assert [restored.is_late(1, 1, number) for number in (4, 5, 6)] == [True, True, False]
    assert restored.is_late(1, 0, 6), "an epoch before the known one"


def test_a_gap_in_the_sequences_is_refused() -> None:
    """A batch was lost on the way: the one after it must not be stored before it."""
    producers = PartitionProducers()
    producers.record(batch(0, 1, 0, 2))
    assert producers.check(1, 0, 3, 1).error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producers.check(1, 0, 2, 1) == Verdict()


def test_sequences_go_on_after_the_largest_one() -> None:
    """With 0."""
    producers = PartitionProducers()
    producers.record(batch(0, 1, SEQUENCES - 2, 3))
    assert producers.check(1, 0, 1, 1) == Verdict()
    assert producers.check(1, 0, SEQUENCES - 2, 3).duplicate_offset == 0


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_0() -> None:
    """Also when only a control record has brought the newer one."""
    producers = PartitionProducers()
    producers.record(batch(0, 1, 0, epoch=3))
    assert producers.check(1, 2, 1, 1).error == ErrorCode.INVALID_PRODUCER_EPOCH
    assert producers.check(1, 4, 1, 1).error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producers.check(1, 4, 0, 1) == Verdict()
    producers.record(marker(1, 1, is_commit=False, epoch=5))
    assert producers.check(1, 4, 0, 1).error == ErrorCode.INVALID_PRODUCER_EPOCH
    assert producers.check(1, 5, 7, 1).error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producers.check(1, 5, 0, 1) == Verdict()


def test_an_unknown_producer_may_begin_anywhere() -> None:
    """Retention may have dropped what was known of it."""
    assert PartitionProducers().check(9, 4, 77, 1) == Verdict()


def test_memory_is_bounded() -> None:
    """Tens of thousands of producers come and go; those silent longest are dropped, open transactions stay."""
    producers = PartitionProducers(max_producers=1000)
    producers.record(batch(0, 10**9, 0, transactional=True))
    for number in range(30_000):
        producers.record(batch(number + 1, number, 0))
    assert producers.count == 1000
    assert producers.check(29_999, 0, 0, 1).duplicate_offset == 30_000
    assert producers.check(5, 0, 9, 1) == Verdict()
    assert producers.check(10**9, 0, 0, 1).duplicate_offset == 0
    assert producers.last_stable_offset(30_001) == 0


def test_silent_producers_expire() -> None:
    """But not while a transaction is open."""
    producers = PartitionProducers(expiration_us=100)
    producers.record_all([batch(1, 1, 0), batch(2, 2, 0, transactional=True), batch(50, 3, 0)])
    producers.expire(now_us=300)
    assert producers.check(1, 0, 5, 1) == Verdict()
    assert producers.check(2, 0, 5, 1).error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producers.check(3, 0, 5, 1).error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_the_last_stable_offset_waits_for_the_oldest_transaction() -> None:
    """However many have ended after it began."""
    producers = PartitionProducers()
    producers.record_all([batch(0, 1, 0), batch(1, 2, 0, 2, transactional=True), batch(3, 3, 0, transactional=True)])
    assert producers.last_stable_offset(4) == 1
    producers.record(marker(4, 3, is_commit=True))
    assert producers.last_stable_offset(5) == 1
    producers.record(marker(5, 2, is_commit=False))
    assert producers.last_stable_offset(6) == 6
    assert producers.last_stable_offset(2) == 2
    assert producers.aborted(0, 6) == [AbortedTransaction(2, 1, 5)]
    assert producers.aborted(5, 6) == [AbortedTransaction(2, 1, 5)]
    assert producers.aborted(6, 9) == []
    assert producers.aborted(0, 1) == []


def test_a_second_marker_changes_nothing() -> None:
    """A coordinator that recovers writes it again."""
    producers = PartitionProducers()
    producers.record_all(
        [batch(0, 1, 0, transactional=True), marker(1, 1, is_commit=False), marker(2, 1, is_commit=True)]
    )
    assert producers.aborted(0, 3) == [AbortedTransaction(1, 0, 1)]
    assert producers.last_stable_offset(3) == 3


def test_aborted_transactions_before_the_log_s_start_are_forgotten() -> None:
    """Nobody can read them."""
    producers = PartitionProducers()
    for first in range(0, 10, 2):
        producers.record_all([batch(first, 1, first // 2, transactional=True), marker(first + 1, 1, is_commit=False)])
    producers.forget_before(5)
    assert [one.first_offset for one in producers.aborted(0, 100)] == [4, 6, 8]


@given(data=st.binary(max_size=50))
def test_a_damaged_snapshot_is_refused(data: bytes) -> None:
    """Then the log is read instead."""
    producers = PartitionProducers()
    with pytest.raises(DataError):
        producers.restore(data)


@given(seed=st.integers(0, 1 << 30))
def test_a_cut_snapshot_is_refused(seed: int) -> None:
    """At any byte."""
    producers = PartitionProducers()
    producers.record_all([batch(0, 1, 0, 5, transactional=True), batch(5, 2, 0), marker(6, 1, is_commit=False)])
    data = producers.snapshot()
    with pytest.raises(DataError):
        producers.restore(data[: random.Random(seed).randrange(len(data))])


class ProducerModel(RuleBasedStateMachine):
    """Producers that send, send again and begin epochs; the partition is restored at any time from any snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[StoredBatch] = []
        self.next_offset = 0
        self.producers = PartitionProducers()
        self.snapshot = self.producers.snapshot()
        self.sequences: dict[int, tuple[int, int]] = {}

    def append(self, entry: StoredBatch) -> None:
        self.log.append(entry)
        self.next_offset = entry.last_offset + 1
        self.producers.record(entry)

    @rule(producer=st.integers(1, 3), count=st.integers(1, 4), transactional=st.booleans())
    def the_next_batch_is_appended(self, producer: int, count: int, transactional: bool) -> None:
        epoch, sequence = self.sequences.get(producer, (0, 0))
        assert self.producers.check(producer, epoch, sequence, count) == Verdict()
        self.append(batch(self.next_offset, producer, sequence, count, epoch, transactional))
        self.sequences[producer] = (epoch, sequence + count)

    @rule(data=st.data(), producer=st.integers(1, 3))
    def a_batch_comes_again(self, data: st.DataObject, producer: int) -> None:
        epoch = self.sequences.get(producer, (0, 0))[0]
        sent = [
            one
            for one in self.log
            if one.producer_id == producer and one.producer_epoch == epoch and not one.is_control
        ]
        if sent:
            one = data.draw(st.sampled_from(sent))
            verdict = self.producers.check(producer, epoch, one.base_sequence, one.last_offset - one.first_offset + 1)
            if one in sent[-5:]:
                assert verdict.duplicate_offset == one.first_offset
            else:
                assert verdict.error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    @rule(producer=st.integers(1, 3), ahead=st.integers(1, 5))
    def a_batch_with_a_gap_is_refused(self, producer: int, ahead: int) -> None:
        if producer in self.sequences:
            epoch, sequence = self.sequences[producer]
            assert self.producers.check(producer, epoch, sequence + ahead, 1).error != ErrorCode.NONE

    @rule(producer=st.integers(1, 3), is_commit=st.booleans(), bumps=st.booleans())
    def a_transaction_ends(self, producer: int, is_commit: bool, bumps: bool) -> None:
        epoch, sequence = self.sequences.get(producer, (0, 0))
        if bumps:
            epoch, sequence = epoch + 1, 0
        self.append(marker(self.next_offset, producer, is_commit, epoch))
        self.sequences[producer] = (epoch, sequence)

    @rule()
    def a_snapshot_is_taken(self) -> None:
        self.snapshot = self.producers.snapshot()

    @rule()
    def the_partition_is_opened_again(self) -> None:
        """From an old snapshot, and the log again from anywhere before its end."""
        self.producers = PartitionProducers()
        self.producers.restore(self.snapshot)
        self.producers.record_all(self.log)

    @invariant()
    def aborted_and_open_are_what_the_log_says(self) -> None:
        begun: dict[int, int] = {}
        aborted = []
        for one in self.log:
            if one.is_control:
                first = begun.pop(one.producer_id, None)
                if first is not None and not one.is_commit:
                    aborted.append(AbortedTransaction(one.producer_id, first, one.last_offset))
            elif one.is_transactional:
                begun.setdefault(one.producer_id, one.first_offset)
        assert self.producers.aborted(0, 1 << 60) == aborted
        assert self.producers.last_stable_offset(self.next_offset) == min(begun.values(), default=self.next_offset)


@pytest.mark.deeper
def test_producers_are_what_the_log_says() -> None:
    """After any appends, retries and restarts."""
    run_machine(ProducerModel, 60, steps=30)
