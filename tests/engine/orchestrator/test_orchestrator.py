"""Driving an engine from an orchestrator's log: order, marks, rollbacks, guarded entries, and entries as bytes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.engines import open_local
from tests.engine.fake_engine import FakeEngine
from tests.engine.list_orchestrator import ForgetfulOrchestrator, ListOrchestrator

from tidelog.engine.engine import Engine
from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Operation,
    PutObject,
    Result,
)
from tidelog.engine.orchestrator.base import (
    BATCH_BYTES,
    BATCH_ENTRIES,
    AsyncOrchestrator,
    Driver,
    InThread,
    Orchestrator,
    decode_entry,
    drive,
    drive_async,
    encode_entry,
)
from tidelog.engine.txn.read_set import Carried, Guarded, ListingRead, NeverTrue, ObjectRead
from tidelog.errors import DataError, GapError, InputError


def puts(first: int, last: int) -> dict[int, Carried]:
    return {seq: PutObject("b", f"k{seq % 7}", b"%d" % seq) for seq in range(first, last + 1)}


def log_of(last: int) -> dict[int, Carried]:
    return {1: CreateBucket("b"), **puts(2, last)}


def wait_until(condition: threading.Event) -> None:
    assert condition.wait(120)


# Driving


def test_it_applies_everything_once_and_in_order() -> None:
    """In batches with one sync each, and asking again applies nothing."""
    engine, orchestrator = FakeEngine(), ListOrchestrator(log_of(600))
    assert drive(engine, orchestrator) == 600
    assert engine.batches == [BATCH_ENTRIES, BATCH_ENTRIES, 600 - 2 * BATCH_ENTRIES]
    assert drive(engine, orchestrator) == 600
    assert len(engine.batches) == 3
    assert orchestrator.asked == [0, 600]


def test_large_entries_are_not_gathered_without_end() -> None:
    """A batch ends by its bytes too, so that a log of large objects does not fill the memory."""
    engine, data = FakeEngine(), bytes(BATCH_BYTES // 4 + 1)
    large = Guarded(Batch((PutObject("b", "k", data), DeleteObject("b", "l"))), ())
    log: dict[int, Carried] = {
        1: CreateBucket("b"),
        **{seq: PutObject("b", "k", data) for seq in range(2, 8)},
        8: large,
    }
    drive(engine, ListOrchestrator(log))
    assert engine.batches == [5, 3]


def test_it_stops_where_it_is_told() -> None:
    """`up_to` belongs to it; the next call goes on behind."""
    engine, orchestrator = FakeEngine(), ListOrchestrator(log_of(50))
    assert drive(engine, orchestrator, up_to=20) == 20
    assert drive(engine, orchestrator) == 50


def test_seqs_may_have_gaps() -> None:
    """They are any numbers that grow: times, terms and indexes, offsets."""
    engine = FakeEngine()
    orchestrator = ListOrchestrator({1_000: CreateBucket("b"), 5_000: PutObject("b", "k", b"")})
    assert drive(engine, orchestrator) == 5_000


def test_the_low_water_mark_follows_what_is_applied() -> None:
    """It is the orchestrator's, and never above what this engine has."""
    engine, orchestrator = FakeEngine(), ListOrchestrator(log_of(10))
    orchestrator.mark = 25
    drive(engine, orchestrator, up_to=4)
    assert engine.low_water_mark == 4
    orchestrator.mark = 7
    drive(engine, orchestrator)
    assert engine.low_water_mark == 7
    orchestrator.mark = 5
    drive(engine, orchestrator)
    assert engine.low_water_mark == 7


def test_the_orchestrator_hears_how_far_it_may_truncate() -> None:
    """Once for every time that the mark has moved."""
    engine, orchestrator = FakeEngine(), ListOrchestrator(log_of(10))
    drive(engine, orchestrator)
    assert orchestrator.truncations == []
    engine.truncation_mark = 6
    drive(engine, orchestrator)
    assert orchestrator.truncations == [6]


def test_a_truncated_log_is_not_applied_from_its_middle() -> None:
    """An engine that needs what is gone is told, and stays as it is."""
    engine, orchestrator = FakeEngine(), ListOrchestrator(log_of(10))
    drive(engine, orchestrator, up_to=3)
    orchestrator.first_seq = 7
    with pytest.raises(GapError):
        drive(engine, orchestrator)
    assert engine.applied_seq == 3


def test_it_follows_until_it_is_stopped() -> None:
    """Entries and marks that come later arrive without another call."""
    engine, orchestrator, stop = FakeEngine(), ListOrchestrator(log_of(5)), threading.Event()
    arrived = threading.Event()

    def hear(result: Result) -> None:
        if result.seq == 9:
            arrived.set()

    options = {"follow": True, "stop": stop, "on_result": hear}
    thread = threading.Thread(target=drive, args=(engine, orchestrator), kwargs=options)
    thread.start()
    orchestrator.log = log_of(9)
    wait_until(arrived)
    orchestrator.mark = 9
    deadline = time.monotonic() + 120
    while engine.low_water_mark < 9 and time.monotonic() < deadline:
        time.sleep(0.005)
    stop.set()
    thread.join(120)
    assert (engine.applied_seq, engine.low_water_mark) == (9, 9)


# A log that lost its end


def test_a_lost_end_is_rolled_back_and_replaced() -> None:
    """The engine then is what one would be that has only ever seen the new log."""
    engine, orchestrator = FakeEngine(), ForgetfulOrchestrator(log_of(10))
    drive(engine, orchestrator)
    orchestrator.log = {**log_of(6), 7: PutObject("b", "other", b"1"), 8: DeleteObject("b", "k2")}
    orchestrator.agreed = 6
    other = FakeEngine()
    drive(engine, orchestrator)
    drive(other, ListOrchestrator(orchestrator.log))
    assert engine.applied_seq == 8
    assert engine.digest() == other.digest()


def test_nothing_below_the_low_water_mark_is_rolled_back() -> None:
    """All replicas have it: an orchestrator that lost that is wrong, and told so."""
    engine, orchestrator = FakeEngine(), ForgetfulOrchestrator(log_of(10))
    orchestrator.mark = 8
    drive(engine, orchestrator)
    orchestrator.agreed = 6
    with pytest.raises(InputError, match="below the low-water mark"):
        drive(engine, orchestrator)
    assert engine.applied_seq == 10


def test_another_log_is_noticed() -> None:
    """With `compares_last`, before anything of it is applied; where the log was truncated nothing can be compared."""
    engine, orchestrator = FakeEngine(), ListOrchestrator(log_of(10))
    drive(engine, orchestrator)
    orchestrator.log[11] = PutObject("b", "k", b"")
    assert drive(engine, orchestrator, compares_last=True) == 11
    orchestrator.first_seq = 12
    drive(engine, orchestrator, compares_last=True)
    orchestrator.first_seq = 1
    orchestrator.log = {**log_of(10), 11: PutObject("b", "k", b"another"), 12: PutObject("b", "k", b"")}
    with pytest.raises(InputError, match="another entry"):
        drive(engine, orchestrator, compares_last=True)
    assert engine.applied_seq == 11


# Several drivers


def test_what_another_driver_applies_meanwhile_is_not_rolled_back() -> None:
    """A log that agrees up to where the engine stood agrees; the engine may stand further by the time it answers."""

    class Busy(ForgetfulOrchestrator):
        def agreed_seq(self, applied_seq: int) -> int:
            if engine.applied_seq < 5:
                engine.apply_many([(seq, self.log[seq]) for seq in range(applied_seq + 1, 6)])
                engine.update_low_water_mark(5)
            return super().agreed_seq(applied_seq)

    engine, orchestrator = FakeEngine(), Busy(log_of(7))
    assert drive(engine, orchestrator) == 7


def test_a_driver_goes_on_where_another_one_has_rolled_back_to() -> None:
    """It has given seqs that were thrown away since, and gives the new entries under the same seqs."""
    engine, orchestrator = FakeEngine(), ForgetfulOrchestrator(log_of(7))
    ways = InThread(threading.Event())
    first, second = Driver(engine, orchestrator, ways), Driver(engine, orchestrator, ways)
    ways.run(first.catch_up(None))
    orchestrator.agreed = 4
    orchestrator.log.update({seq: PutObject("b", "new", b"%d" % seq) for seq in range(5, 9)})
    ways.run(second.catch_up(5))
    assert engine.applied_seq == 5
    orchestrator.agreed = 1 << 62
    ways.run(first.catch_up(None))
    other = FakeEngine()
    drive(other, ListOrchestrator(orchestrator.log))
    assert engine.digest() == other.digest()


def test_drivers_take_turns() -> None:
    """While one reads the log nobody else does; one that is told to stop waits no longer; nobody waits for itself."""
    engine, other_engine = FakeEngine(), FakeEngine()
    reading, go_on, stop = threading.Event(), threading.Event(), threading.Event()

    class Slow(ListOrchestrator):
        def entries(self, after_seq: int, up_to: int | None = None) -> Iterator[tuple[int, Carried]]:
            reading.set()
            wait_until(go_on)
            return super().entries(after_seq, up_to)

    orchestrator, heard = ListOrchestrator(log_of(9)), list[int]()

    def hear(result: Result) -> None:
        heard.append(result.seq)
        drive(engine, orchestrator)  # from within its own turn

    slow = threading.Thread(target=drive, args=(engine, Slow(log_of(3))), kwargs={"on_result": hear})
    slow.start()
    wait_until(reading)
    stop.set()
    drive(engine, orchestrator, stop=stop)
    assert orchestrator.asked == []
    assert drive(other_engine, orchestrator) == 9  # turns are those of one engine
    go_on.set()
    slow.join(60)
    assert (heard, engine.applied_seq) == ([1, 2, 3], 9)


# Guarded entries


def increment(key: str, seen_seq: int, value: int) -> Guarded:
    return Guarded(Batch((PutObject("b", key, b"%d" % value),)), (ObjectRead("b", key, seen_seq),))


def test_of_two_guarded_entries_the_first_one_counts() -> None:
    """Both were made from the same state; the second would lose the first one's update, and is refused."""
    engine = FakeEngine()
    entries: dict[int, Carried] = {
        1: CreateBucket("b"),
        2: PutObject("b", "n", b"1"),
        3: increment("n", 2, 2),
        4: increment("n", 2, 2),
        5: increment("n", 3, 3),
    }
    results = engine.apply_many(entries.items())
    assert [(result.seq, result.status) for result in results] == [
        (1, "applied"),
        (2, "applied"),
        (3, "applied"),
        (4, "refused"),
        (5, "applied"),
    ]
    assert "'b'/'n' was changed" in str(results[3].reason)
    assert engine.read("b", "n").data == b"3"


def test_guarded_entries_are_judged_within_one_call(tmp_path: Path) -> None:
    """Each by what those before it have done, visible or not; one sync is enough for all of them."""
    with open_local(tmp_path) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, CreateBucket("c")), (3, PutObject("b", "n", b"1"))])
        listing = Guarded(Batch((PutObject("c", "x", b""),)), (ListingRead("c", "", _empty_listing(engine)),))
        entries: list[tuple[int, Carried]] = [
            (4, PutObject("b", "m", b"")),
            (5, increment("n", 3, 2)),
            (6, listing),
            (7, listing),
            (8, increment("n", 3, 2)),
            (9, increment("n", 5, 3)),
            (10, Guarded(Batch((CreateBucket("b"),)), ())),
        ]
        syncs = engine.statistics().wal.sync_seconds.count
        results = engine.apply_many(entries)
        statuses = [result.status for result in results]
        assert statuses == ["applied"] * 3 + ["refused", "refused", "applied", "refused"]
        assert [results[number].reason for number in (3, 4, 6)] == [
            "the objects of 'c' with the prefix '' were changed since they were listed",
            "'b'/'n' was changed: its version of seq 3 was read, and is no longer true",
            "there is a bucket 'b' already",
        ]
        assert engine.statistics().wal.sync_seconds.count == syncs + 1
        assert engine.apply_many(entries) == results  # again: one answer for a seq


def test_what_is_no_guarded_entry_is_refused_at_once() -> None:
    """Before it is in any log, and in words."""
    batch = Batch((CreateBucket("b"),))
    for make in (
        lambda: Guarded(CreateBucket("b"), ()),  # type: ignore[arg-type]
        lambda: Guarded(batch, ("b",)),  # type: ignore[arg-type]
        lambda: ObjectRead("b", 7, 1),  # type: ignore[arg-type]
        lambda: ListingRead("\ud800", "", b""),
    ):
        with pytest.raises(InputError, match=r"must|UTF-8"):
            make()


def _empty_listing(engine: Engine) -> bytes:
    with engine.transaction() as tx:
        list(tx.list_objects("c"))
        (read,) = tx.reads()
    assert isinstance(read, ListingRead)
    return read.digest


@pytest.mark.parametrize("cut", range(1, 8))
def test_the_verdict_is_the_same_however_the_log_is_cut(cut: int) -> None:
    """Replicas that get it in other pieces, or start again in between, end in the same state."""
    entries: dict[int, Carried] = {
        1: CreateBucket("b"),
        2: PutObject("b", "n", b"1"),
        3: increment("n", 2, 2),
        4: Batch((DeleteBucket("b", force=True), CreateBucket("b"))),
        5: increment("n", 3, 9),
        6: increment("n", 0, 1),
        7: increment("n", 5, 5),
    }
    whole, parts = FakeEngine(), FakeEngine()
    drive(whole, ListOrchestrator(entries))
    drive(parts, ListOrchestrator(entries), up_to=cut)
    drive(parts, ListOrchestrator(entries))
    assert whole.digest() == parts.digest()
    assert whole.read("b", "n").data == b"1"


def test_a_refused_end_is_not_judged_again_and_again() -> None:
    """The engine's applied seq is that of the refused entry, and `drive` goes on behind it."""
    engine, orchestrator = FakeEngine(), ListOrchestrator({1: CreateBucket("b"), 2: increment("n", 1, 1)})
    heard: list[Result] = []
    stop = threading.Event()
    options = {"follow": True, "stop": stop, "on_result": heard.append}
    thread = threading.Thread(target=drive, args=(engine, orchestrator), kwargs=options)
    thread.start()
    while len(orchestrator.asked) < 4:
        time.sleep(0.005)
    stop.set()
    thread.join(120)
    assert [(result.seq, result.status) for result in heard] == [(1, "applied"), (2, "refused")]
    assert engine.applied_seq == 2


def test_a_guarded_entry_that_comes_again_changes_nothing() -> None:
    """It is not judged again, by a state that has itself in it: the answer is that of the first time."""
    engine = FakeEngine()
    engine.apply_many([(1, CreateBucket("b")), (2, increment("n", 0, 1)), (3, PutObject("b", "m", b""))])
    (result,) = engine.apply_many([(2, increment("n", 0, 1))])
    assert result.status == "applied"
    assert engine.applied_seq == 3


def refused_at_the_end(engine: Engine) -> None:
    """A log whose last entry is refused because of what was read for it."""
    entries: list[tuple[int, Carried]] = [(1, CreateBucket("b")), (2, increment("n", 0, 1)), (3, increment("n", 0, 1))]
    assert [result.status for result in engine.apply_many(entries)] == ["applied", "applied", "refused"]


def test_a_refused_end_is_applied_here_and_after_a_restart(tmp_path: Path) -> None:
    """Its seq is used: it may be read at, the low-water mark may reach it, and it has the same answer for ever."""
    with open_local(tmp_path) as engine:
        refused_at_the_end(engine)
        assert engine.applied_seq == 3
        assert engine.read("b", "n", seq=3).data == b"1"
        engine.update_low_water_mark(3)
        digest = engine.digest(3)
    with open_local(tmp_path) as engine:
        assert (engine.applied_seq, engine.low_water_mark, engine.digest()) == (3, 3, digest)
        again = engine.apply(3, increment("n", 0, 1))
        assert (again.status, "'b'/'n' was changed" in str(again.reason)) == ("refused", True)
        with pytest.raises(InputError, match="another entry was applied under this seq"):
            engine.apply(3, increment("n", 0, 2))
        engine.apply(4, PutObject("b", "n", b"2"))
        engine.rollback_to(3)
        assert (engine.applied_seq, engine.digest()) == (3, digest)


def test_a_refused_end_is_rolled_back_as_any_other(tmp_path: Path) -> None:
    """Another entry comes in its place."""
    with open_local(tmp_path) as engine:
        refused_at_the_end(engine)
        engine.rollback_to(2)
        assert engine.apply(3, increment("n", 2, 5)).applied
    with open_local(tmp_path) as engine:
        assert (engine.applied_seq, engine.read("b", "n").data) == (3, b"5")


def test_a_transaction_is_not_ended_by_what_was_refused(tmp_path: Path) -> None:
    """A refused entry has changed nothing: whoever reads what it would have written goes on."""
    with open_local(tmp_path) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "n", b"1"))])
        with engine.transaction() as tx:
            assert tx.read("b", "n").data == b"1"
            assert engine.apply(3, increment("n", 0, 9)).status == "refused"
            assert engine.apply(4, Batch((PutObject("b", "n", b""), CreateBucket("b")))).status == "refused"
            assert tx.read("b", "n").data == b"1"
            tx.put("b", "n", b"2")
            assert engine.apply(5, tx.guarded()).applied


# In an event loop


class AsyncListOrchestrator:
    """The list, for tasks."""

    def __init__(self, inner: ForgetfulOrchestrator) -> None:
        self.inner = inner
        self.noted: list[int] = []

    async def low_water_mark(self) -> int:
        return self.inner.low_water_mark()

    async def entries(self, after_seq: int, up_to: int | None = None) -> AsyncIterator[tuple[int, Carried]]:
        for pair in self.inner.entries(after_seq, up_to):
            await asyncio.sleep(0)
            yield pair

    async def truncate(self, seq: int) -> None:
        self.inner.truncate(seq)

    async def agreed_seq(self, applied_seq: int) -> int:
        return self.inner.agreed_seq(applied_seq)

    async def note_applied(self, seq: int) -> None:
        self.noted.append(seq)


def test_a_task_drives_an_engine() -> None:
    """The same as in a thread: batches, marks, a rollback, and following until it is cancelled."""
    engine, inner = FakeEngine(), ForgetfulOrchestrator(log_of(300))
    orchestrator = AsyncListOrchestrator(inner)
    inner.mark = 290
    engine.truncation_mark = 4

    async def play() -> None:
        assert await drive_async(engine, orchestrator, up_to=280) == 280
        assert engine.batches == [BATCH_ENTRIES, 280 - BATCH_ENTRIES]
        assert (engine.low_water_mark, inner.truncations, orchestrator.noted[-1]) == (280, [4], 280)
        following = asyncio.create_task(drive_async(engine, orchestrator, follow=True))
        while engine.applied_seq < 300:
            await asyncio.sleep(0.005)
        inner.log = {**log_of(295), 296: PutObject("b", "new", b"")}
        inner.agreed = 295
        while engine.applied_seq != 296:
            await asyncio.sleep(0.005)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following

    asyncio.run(asyncio.wait_for(play(), 120))
    assert engine.read("b", "new").seq == 296


def test_tasks_take_turns() -> None:
    """Two that drive one engine at once never read the log at the same time; a cancelled one leaves no turn behind."""

    class Counting(AsyncListOrchestrator):
        readers = most = 0

        async def entries(self, after_seq: int, up_to: int | None = None) -> AsyncIterator[tuple[int, Carried]]:
            self.readers += 1
            self.most = max(self.most, self.readers)
            async for pair in super().entries(after_seq, up_to):
                yield pair
            self.readers -= 1

    engine, orchestrator = FakeEngine(), Counting(ForgetfulOrchestrator(log_of(20)))

    async def play() -> None:
        tasks = [asyncio.create_task(drive_async(engine, orchestrator)) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        assert await asyncio.gather(*tasks[:1], *tasks[2:]) == [20, 20, 20]
        assert await drive_async(engine, orchestrator) == 20

    asyncio.run(asyncio.wait_for(play(), 60))
    assert (orchestrator.most, orchestrator.readers) == (1, 0)


def test_orchestrators_are_known_by_their_methods() -> None:
    """No class has to be inherited from."""
    assert isinstance(ListOrchestrator(), Orchestrator)
    assert isinstance(AsyncListOrchestrator(ForgetfulOrchestrator()), AsyncOrchestrator)
    assert not isinstance(object(), Orchestrator)


# Entries as bytes

NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=20)
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(CreateBucket, NAMES),
    st.builds(DeleteBucket, NAMES, st.booleans()),
    st.builds(PutObject, NAMES, NAMES, st.binary(max_size=50), st.dictionaries(NAMES, st.one_of(NAMES, st.binary()))),
    st.builds(DeleteObject, NAMES, NAMES),
    st.builds(CopyObject, NAMES, NAMES, NAMES, NAMES),
)
BATCHES = st.builds(Batch, st.lists(OPERATIONS, min_size=1, max_size=4).map(tuple))
SEQS = st.integers(0, (1 << 64) - 1)
READS = st.one_of(
    st.builds(ObjectRead, NAMES, NAMES, SEQS),
    st.builds(ListingRead, NAMES, NAMES, st.binary()),
    st.builds(NeverTrue, NAMES),
)
CARRIED = st.one_of(OPERATIONS, BATCHES, st.builds(Guarded, BATCHES, st.lists(READS, max_size=3).map(tuple)))


def test_the_bytes_of_an_entry_are_those_of_the_formats_page() -> None:
    """A reader written from the page alone reads what the code writes."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text("utf-8")
    drawn = page.split("```hex entry\n")[1].split("```")[0]
    expected = b"".join(bytes.fromhex(line.split("  ")[0]) for line in drawn.splitlines())
    assert encode_entry(PutObject("photos", "cat", b"meow", {"type": "sound"})) == expected


@given(CARRIED)
def test_an_entry_comes_back_from_its_bytes(entry: Carried) -> None:
    """Every kind of them, whatever is in it, also out of a part of a larger buffer."""
    data = encode_entry(entry)
    assert decode_entry(data) == entry
    assert decode_entry(memoryview(b"x" + data)[1:]) == entry


@given(CARRIED, st.data())
def test_damaged_bytes_are_refused_or_another_valid_entry(entry: Carried, data: st.DataObject) -> None:
    """Cut, lengthened or changed: DataError and nothing else, and what passes is an entry like any other."""
    encoded = bytearray(encode_entry(entry))
    position = data.draw(st.integers(0, len(encoded) - 1))
    for damaged in (encoded[:position], encoded + b"\0"):
        with pytest.raises(DataError, match="not an entry"):
            decode_entry(damaged)
    encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_entry(encoded)
    except DataError:
        return
    assert decode_entry(encode_entry(found)) == found


@pytest.mark.parametrize(
    "body",
    [
        {"type": "PutObject", "bucket": "", "key": "k", "data": b""},
        {"type": "PutObject", "bucket": "b", "key": "a\0b", "data": b""},
        {"type": "PutObject", "bucket": "b" * 256, "key": "k", "data": b""},
        {"type": "PutObject", "bucket": "b", "key": "k", "data": "text"},
        {"type": "PutObject", "bucket": "b", "key": "k", "data": b"", "metadata": {"a": [1]}},
        {"type": "Batch", "entries": []},
        {"type": "Batch", "entries": [{"type": "Batch", "entries": [{"type": "CreateBucket", "bucket": "b"}]}]},
        {"type": "Guarded", "batch": {"type": "CreateBucket", "bucket": "b"}, "reads": []},
        {"type": "Unknown"},
        {"bucket": "b"},
        ["CreateBucket", "b"],
        None,
    ],
)
def test_bytes_that_no_entry_has_are_refused(body: object) -> None:
    """Everything is checked that is checked when an entry is made by hand."""
    with pytest.raises(DataError, match="not an entry"):
        decode_entry(b"\x01" + msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x02\xc0", b"\x01" + b"\x91" * 100_000, b"\x01\x81\xa4type\xa2\xff\xff"]
)
def test_other_versions_and_nonsense_are_refused(data: bytes) -> None:
    """Nested without end, not UTF-8, or of a version that is not known here."""
    with pytest.raises(DataError, match="not an entry"):
        decode_entry(data)
