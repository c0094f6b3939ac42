"""Readers of committed messages over one log, held to an oracle, wherever they begin and however it is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transactional import PLAIN, STEPS, Step, fill, last_stable_offset, outcome, payload_of, visible

from tidelog.errors import InputError
from tidelog.log import Log, LogSettings, isolation
from tidelog.log.frame import Frames, encode_many
from tidelog.log.isolation import CommittedReader, check_isolation, committed_batches, decided_batches
from tidelog.log.tail_cache import Batch
from tidelog.log.transactions import AbortedTransaction, Mark, Outcomes, Transactions, marks_in, marks_of
from tidelog.testing import FaultyFiles, ManualClock

SMALL = LogSettings(rotate_max_bytes=1024, read_chunk_bytes=256, cache_max_messages=3)


def open_log(settings: LogSettings = SMALL) -> Log:
    return Log.open(Path("/log"), settings, files=FaultyFiles(), clock=ManualClock())


def committed(log: Log, start: int = 0, stop: int | None = None, *, follow: bool = False) -> CommittedReader:
    return CommittedReader(log.read(start, stop, follow=follow), lambda offset: log.scout(offset, follow=follow))


def offsets_of(batches: Iterator[Batch] | CommittedReader) -> list[int]:
    return [offset for batch in batches for offset in range(batch.first_offset, batch.next_offset)]


@pytest.mark.parametrize("ahead", [0, 1, 200, 4 << 20])
def test_committed_reader_sees_what_the_oracle_sees(ahead: int) -> None:
    """From any offset to any other, across files and memory, whatever is held before a scout runs."""

    @given(STEPS, st.integers(0, 40), st.integers(0, 45), st.booleans(), st.sampled_from([0, 30, 300]))
    def check(steps: list[Step], start: int, stop: int, flushes: bool, size: int) -> None:
        log = open_log()
        for step in steps:
            fill(log, [step], size)
            if flushes:
                log.flush()  # so that it is a batch of its own
        start, stop = sorted((start % (len(steps) + 1), stop % (len(steps) + 2)))
        reader = committed(log, start, stop)
        found = [
            (offset, payload) for batch in reader for offset, payload in enumerate(batch.payloads(), batch.first_offset)
        ]
        expected = visible(steps, start, stop)
        assert found == [(offset, payload_of(steps[offset], offset, size)) for offset in expected]
        log.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "AHEAD_BYTES", ahead)
        check()


@given(STEPS, st.integers(0, 40), st.integers(0, 45), st.integers(1, 7), st.sampled_from([0, 100, 4 << 20]))
def test_iterator_of_batches_sees_the_same(steps: list[Step], start: int, stop: int, cut: int, ahead: int) -> None:
    """As tasks read: any iterator of batches, cut anywhere, and another one for the scout, cut elsewhere."""
    frames = encode_many(0, [payload_of(step, number) for number, step in enumerate(steps)])

    def batches(first: int, last: int, size: int) -> Iterator[Batch]:
        for at in range(first, last, size):
            yield Batch(at, frames, at, min(at + size, last), [])

    start, stop = sorted((start % (len(steps) + 1), stop % (len(steps) + 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "AHEAD_BYTES", ahead)
        found = committed_batches(batches(start, stop, cut), lambda offset: batches(offset, len(steps), 5))
        assert offsets_of(found) == visible(steps, start, stop)


@given(STEPS, st.integers(0, 40), st.integers(0, 45), st.integers(1, 7))
def test_decided_batches_leave_out_what_has_no_outcome(steps: list[Step], start: int, stop: int, cut: int) -> None:
    """As a rescue reads a tail: what the part does not know to be committed is left out, and holds nothing up."""
    start, stop = sorted((start % (len(steps) + 1), stop % (len(steps) + 1)))
    part = steps[:stop]
    frames = encode_many(0, [payload_of(step, number) for number, step in enumerate(steps)])

    def read() -> Iterator[Batch]:
        return (Batch(at, frames, at, min(at + cut, stop), []) for at in range(start, stop, cut))

    expected = [at for at in range(start, stop) if not part[at].is_control and outcome(part, at)]
    assert offsets_of(decided_batches(read)) == expected


@pytest.mark.parametrize("ahead", [0, 4 << 20])
@given(before=STEPS, after=STEPS)
def test_follower_waits_for_the_outcome(ahead: int, before: list[Step], after: list[Step]) -> None:
    """What is open is not returned, and waited for where the log grows; once it is decided, reading goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "AHEAD_BYTES", ahead)
        log = open_log()
        fill(log, before)
        reader = committed(log, follow=True)
        assert drained(reader) == visible(before)
        assert reader.offset == last_stable_offset(before)
        assert reader.waits_at == len(before)
        fill(log, after)
        assert visible(before) + drained(reader) == visible(before + after)
        log.close()


def drained(reader: CommittedReader) -> list[int]:
    """All that can be had without waiting."""
    return offsets_of(iter(lambda: reader.next_batch(0.0), None))


@given(STEPS)
def test_tasks_see_the_same(steps: list[Step]) -> None:
    """The reader of a task follows the same rules."""

    async def read(log: Log) -> list[int]:
        return [offset async for batch in committed(log) for offset in range(batch.first_offset, batch.next_offset)]

    log = open_log()
    fill(log, steps)
    assert asyncio.run(read(log)) == visible(steps)
    log.close()


def test_task_is_woken_by_the_end_of_the_transaction() -> None:
    """A follower that waits at an open transaction gets its messages when the control record is appended."""

    async def read(log: Log) -> int:
        reader = committed(log, follow=True)
        waiting = asyncio.ensure_future(reader.next_batch_async())
        await asyncio.sleep(0)
        assert not waiting.done()
        fill(log, [PLAIN, Step(1, commits=True)])
        batch = await asyncio.wait_for(waiting, 60)
        assert batch is not None
        return batch.first_offset

    log = open_log()
    fill(log, [Step(1), Step(1)])
    assert asyncio.run(read(log)) == 0
    log.close()


def test_plain_batches_are_returned_as_they_came() -> None:
    """Without transactions nothing is copied, split or held."""
    log = open_log(LogSettings())
    fill(log, [PLAIN] * 10)
    log.flush()
    reader = committed(log)
    batch = log.read().next_batch()
    assert batch is not None
    assert reader.next_batch() == batch
    assert reader.next_batch() is None
    log.close()


def test_held_payloads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open transaction before a long log holds a bounded number of bytes: the scout remembers offsets only."""
    monkeypatch.setattr(isolation, "AHEAD_BYTES", 10_000)
    log = open_log()
    fill(log, [Step(1), *[PLAIN] * 400, Step(1, commits=True)], size=400)
    reader = committed(log)
    most = 0
    seen: list[int] = []
    while (batch := reader.next_batch()) is not None:
        seen += range(batch.first_offset, batch.next_offset)
        most = max(most, reader._visibility.held_bytes)
    assert seen == list(range(401))
    assert most < 12_000
    log.close()


def test_closing_the_reader_closes_its_scout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither keeps a file open."""
    monkeypatch.setattr(isolation, "AHEAD_BYTES", 0)
    log = open_log()
    fill(log, [Step(1), *[PLAIN] * 50], size=100)
    log.flush()
    reader = committed(log)
    assert reader.next_batch() is None
    assert reader._scout is not None
    reader.close()
    assert reader._scout._file is None  # type: ignore[attr-defined]
    log.close()


def test_isolation_is_one_of_two_words() -> None:
    """Anything else is refused with the two."""
    check_isolation("read_committed")
    check_isolation("read_uncommitted")
    with pytest.raises(InputError, match="read_uncommitted"):
        check_isolation("serializable")


# The state machines below the readers


@given(STEPS, st.integers(0, 40), st.integers(0, 40))
def test_transactions_know_what_is_open_and_aborted(steps: list[Step], start: int, stop: int) -> None:
    """The last stable offset, the open ones in order, and the aborted ones of a range."""
    known = Transactions()
    for mark in marks(steps) or ():
        known.record(mark)
    assert known.last_stable_offset(len(steps)) == last_stable_offset(steps)
    firsts = [one.first_offset for one in known.open]
    assert firsts == sorted(firsts)
    assert {one.producer_id for one in known.open} == {
        step.producer for at, step in enumerate(steps) if not step.is_control and outcome(steps, at) is None
    }
    ranges = known.aborted(start, stop)
    for offset in range(start, min(stop, len(steps))):
        step = steps[offset]
        if not step.is_control and step.producer is not None and step.is_transactional:
            inside = [
                one
                for one in ranges
                if one.producer_id == step.producer and one.first_offset <= offset <= one.last_offset
            ]
            assert bool(inside) == (outcome(steps, offset) is False)


def test_aborted_transactions_before_the_start_are_forgotten() -> None:
    """They are of no use to a reader of what is left."""
    known = Transactions()
    for mark in marks([Step(1), Step(1, commits=False), Step(2), Step(2, commits=False)]) or ():
        known.record(mark)
    known.forget_before(2)
    assert known.all_aborted == [AbortedTransaction(2, 2, 3)]


@given(STEPS)
def test_outcomes_decide_as_the_oracle(steps: list[Step]) -> None:
    """However much was learnt at once, and twice, each message has the outcome of its transaction."""
    known = Outcomes()
    found = marks(steps) or []
    known.learn(found, len(steps))
    known.learn(found, len(steps))
    for at, step in enumerate(steps):
        if step.producer is not None and step.is_transactional and not step.is_control:
            assert known.of(step.producer, at) is outcome(steps, at)


def test_outcomes_of_the_same_kind_take_one_place() -> None:
    """A million committed transactions of a producer are one number, and what is passed is forgotten."""
    known = Outcomes()
    known.learn((Mark(at, at, 1, 0, 2) for at in range(1000)), 1000)
    known.learn((Mark(at, at, at, 0, 2) for at in range(1000, 2000)), 2000)
    assert sum(map(len, known._ends.values())) == 1001
    known.forget_before(1990)
    assert sum(map(len, known._ends.values())) == 10


def test_outcomes_that_alternate_are_forgotten_on_the_way() -> None:
    """A producer that aborts every other transaction does not fill the memory of a reader that goes forward."""
    known = Outcomes()
    for at in range(1, 20_000, 2):
        known.learn([Mark(at, at, 1, 0, 1 + at // 2 % 2)], at + 1)
        assert known.of(1, at - 1) is bool(at // 2 % 2)
        assert known.of(1, at) is None
    assert sum(map(len, known._ends.values())) <= 64


def marks(steps: Sequence[Step]) -> list[Mark] | None:
    return marks_in(frames_of(steps))


def frames_of(steps: Sequence[Step]) -> Frames:
    return encode_many(0, [payload_of(step, number) for number, step in enumerate(steps)])


@given(STEPS, st.integers(0, 40), st.integers(0, 40))
def test_marks_are_the_same_of_frames_and_of_payloads(steps: list[Step], start: int, stop: int) -> None:
    """A batch that is not written yet has the marks that it has in a file."""
    frames = frames_of(steps)
    stop = max(start, min(stop, len(steps)))
    bare = frames.payloads(start, stop)
    assert marks_of(Batch(start, frames, start, stop, [])) == marks_of(Batch(start, None, 0, len(bare), bare))


Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize("cut", [lambda data: data[:20], lambda data: data[:30], lambda data: b"\x07" + data[1:]])
def test_damaged_message_belongs_to_no_transaction(cut: Damage) -> None:
    """Who decodes it says what is wrong; here nothing is raised."""
    assert marks_in(encode_many(0, [cut(payload_of(Step(1), 0))])) is None
