"""The gate: which records may leave for the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.engine.entry import CreateBucket
from tidelog.engine.wal import ship_watermark as gate_module
from tidelog.engine.wal.operations import encode_operation
from tidelog.engine.wal.record_header import LAST, OPERATION
from tidelog.engine.wal.records import encode_rollback_begin, encode_rollback_end, encode_structure
from tidelog.engine.wal.ship_watermark import EntryEnd, LsnRange, SeqIndex
from tidelog.errors import DataError
from tidelog.log.frame import Frames, encode_many


def operation(seq: int, flags: int) -> bytes:
    """A record of an entry."""
    return encode_operation(CreateBucket("b"), seq, flags=flags, time_us=0)


class LogInMemory:
    """Records of a log, and what they mean, in the plainest way."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.live: list[EntryEnd] = []
        self.reads = 0
        self.lost_below = 1

    @property
    def next_lsn(self) -> int:
        return len(self.payloads) + 1

    def add(self, payload: bytes) -> int:
        self.payloads.append(payload)
        return self.next_lsn - 1

    def apply(self, seq: int, operations: int = 1) -> None:
        """An entry of several operations, with a split somewhere in it."""
        for number in range(operations):
            self.add(encode_structure(b""))
            self.add(operation(seq, LAST * (number == operations - 1)))
        self.live.append(EntryEnd(seq, self.next_lsn - 1))

    def lose(self, seq: int) -> None:
        """An operation of an entry that was never completed."""
        self.add(operation(seq, 0))

    def roll_back(self, seq: int) -> None:
        begin = self.add(encode_rollback_begin(seq, self.next_lsn - 1))
        self.add(encode_rollback_end(seq, begin))
        self.live = [end for end in self.live if end.seq <= seq]

    def frames(self, first_lsn: int, stop_lsn: int) -> Iterator[Frames]:
        """A few at a time."""
        self.reads += stop_lsn - first_lsn
        assert first_lsn >= self.lost_below
        for first in range(first_lsn, stop_lsn, 5):
            yield encode_many(first, self.payloads[first - 1 : min(first + 5, stop_lsn) - 1])

    def index(self) -> SeqIndex:
        return SeqIndex(self.frames, EntryEnd(0, 0), 1)

    def expected_gate(self, mark: int) -> int:
        return max([end.lsn for end in self.live if end.seq <= mark], default=0) + 1

    @property
    def applied_seq(self) -> int:
        return self.live[-1].seq if self.live else 0


def test_the_gate_is_behind_the_last_entry_at_the_mark() -> None:
    """All records of entries up to the mark are before it, and none of later ones."""
    log = LogInMemory()
    for seq in (3, 5, 9):
        log.apply(seq, 2)
    index = log.index()
    assert [index.gate(mark, log.next_lsn) for mark in (0, 2, 3, 4, 5, 8, 9, 10)] == [1, 1, 5, 5, 9, 9, 13, 13]


def test_what_is_not_durable_does_not_leave() -> None:
    """An entry whose last record is not on the disk yet is not before the gate."""
    log = LogInMemory()
    log.apply(1)
    log.apply(2, 3)
    assert log.index().gate(2, log.next_lsn - 1) == 3


def test_a_rolled_back_entry_is_not_taken_for_the_one_of_its_seq() -> None:
    """The entry that counts is the one behind the rollback."""
    log = LogInMemory()
    for seq in range(1, 6):
        log.apply(seq)
    log.roll_back(2)
    log.apply(4)
    index = log.index()
    assert index.gate(3, log.next_lsn) == 5
    assert index.gate(4, log.next_lsn) == log.next_lsn
    assert index.rolled_back_below(log.next_lsn) == (LsnRange(5, 12),)


def test_what_left_the_disk_before_it_was_read_is_not_missed() -> None:
    """The files between what is known and where the disk begins are gone; what is behind them is found."""
    log = LogInMemory()
    for seq in range(1, 6):
        log.apply(seq)
    index = log.index()
    index.learn(4)
    log.roll_back(4)
    log.apply(7, 2)
    log.apply(8)
    first_lsn = log.next_lsn - 6
    log.lost_below = first_lsn
    index.learn_disk(log.next_lsn, first_lsn)
    assert index.at_or_before(8).lsn == log.next_lsn - 1
    assert index.at_or_before(6) == EntryEnd(0, 0)


def test_ranges_of_rollbacks_inside_others_become_one() -> None:
    """A rollback that goes further back covers the ones before it."""
    log = LogInMemory()
    for seq in range(1, 6):
        log.apply(seq)
    log.roll_back(4)
    log.apply(5)
    log.roll_back(2)
    index = log.index()
    index.learn(log.next_lsn)
    assert index.rolled_back_below(log.next_lsn) == (LsnRange(5, log.next_lsn - 1),)


def test_a_record_that_is_cut_short_is_told() -> None:
    """Bytes that are no record raise, with the LSN."""
    log = LogInMemory()
    log.add(bytes((OPERATION, LAST)) + b"x" * 7)
    with pytest.raises(DataError, match="LSN 1"):
        log.index().learn(2)


@pytest.mark.parametrize("count", [5000])
def test_many_entries_take_little_memory_and_are_found_all_the_same(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old entries are known every 256th only, and what is between two of them is read again when it is asked for."""
    monkeypatch.setattr(gate_module, "_KNOWN_EXACTLY", 512)
    log = LogInMemory()
    for seq in range(1, count):
        log.apply(2 * seq)
    index = log.index()
    index.learn(log.next_lsn)
    assert len(index._exact) + len(index._samples) < 1100
    for mark in (2, 3, 511, 512, 513, 1024, 7777, 2 * count):
        log.reads = 0
        assert index.gate(mark, log.next_lsn) == log.expected_gate(mark)
        assert log.reads <= 3 * 256
    log.roll_back(1001)
    assert index.gate(5000, log.next_lsn) == log.expected_gate(5000)
    log.apply(1003)
    assert index.gate(5000, log.next_lsn) == log.next_lsn


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.integers(1, 4), st.integers(1, 3)),
        st.tuples(st.just("back"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("lose"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("ship"), st.integers(0, 12), st.integers(0, 6)),
    ),
    max_size=60,
)


@given(STEPS, st.sampled_from([4, 8, 1 << 16]))
def test_it_agrees_with_the_plainest_way(steps: list[tuple[str, int, int]], exact: int) -> None:
    """Whatever is applied, rolled back, lost and shipped: the gate, the last entry and what is dead are right."""
    before = gate_module._KNOWN_EXACTLY, gate_module._SAMPLE_EVERY
    gate_module._KNOWN_EXACTLY, gate_module._SAMPLE_EVERY = exact, 2
    try:
        _walk(steps)
    finally:
        gate_module._KNOWN_EXACTLY, gate_module._SAMPLE_EVERY = before


def _walk(steps: list[tuple[str, int, int]]) -> None:
    log = LogInMemory()
    index, low, shipped = log.index(), 0, 1
    for what, number, more in steps:
        if what == "apply":
            log.apply(log.applied_seq + number, more)
        elif what == "back":
            log.roll_back(max(low, log.applied_seq - number))
        elif what == "lose":
            log.lose(log.applied_seq + number)
        else:
            low = max(low, min(log.applied_seq, low + number))
            reached = index.gate(low, log.next_lsn)
            assert reached == log.expected_gate(low)
            shipped = max(shipped, reached - more)
            last = index.last_entry_below(shipped)
            assert last == max([end for end in log.live if end.lsn < shipped], default=EntryEnd(0, 0))
            dead = {lsn for one in index.rolled_back_below(shipped) for lsn in range(one.first, one.last + 1)}
            assert not dead.intersection(end.lsn for end in log.live)
            index.forget_below(shipped)
            assert index.last_entry_below(shipped) == last
