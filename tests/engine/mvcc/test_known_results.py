"""An engine answers a repeated entry truly, whatever has become of its records: purged, restored, compacted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.engine.engines import RandomEntries, open_local
from tests.engine.stations import EngineNode, new_store, successor
from tests.oracles import results as results_oracle
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteBucket, DeleteObject, Entry, PutObject, Result
from tidelog.engine.mvcc import known_results
from tidelog.engine.mvcc.cells import MAX_SEQ
from tidelog.engine.mvcc.known_results import NONE_OPEN, NOTHING_KNOWN, KnownResults, ResultTable, print_of
from tidelog.errors import DataError, InputError
from tidelog.log.frame import encode_many

engine_kernel = _native

STRANGER = PutObject("bucket-0", "nobody has put this", b"stranger")


def _entries(chance: RandomEntries, count: int, after: int = 0) -> list[tuple[int, Entry]]:
    """Random entries, with a seq before each of them that nobody uses."""
    return [(after + 2 * number, chance.entry()) for number in range(1, count + 1)]


def _with_results(engine: Engine, entries: list[tuple[int, Entry]]) -> dict[int, tuple[Entry, Result]]:
    """Entries and what became of them."""
    results = engine.apply_many(entries)
    return {seq: (entry, result) for (seq, entry), result in zip(entries, results, strict=True)}


def _applied(node: EngineNode, count: int) -> dict[int, tuple[Entry, Result]]:
    """The same of random entries."""
    seq = node.engine.applied_seq
    return _with_results(node.engine, _entries(RandomEntries(f"known-{seq}"), count, seq))


def assert_answers(engine: Engine, given: dict[int, tuple[Entry, Result]]) -> None:
    """Every entry again gives its result; another one, and a seq that was passed over, are errors."""
    digest = engine.digest()
    for seq, (entry, result) in given.items():
        assert engine.apply(seq, entry) == result
        with pytest.raises(InputError, match="another entry"):
            engine.apply(seq, STRANGER)
        with pytest.raises(InputError, match="none with this seq"):
            engine.apply(seq - 1, entry)
    assert engine.digest() == digest


def test_engine_answers_again_after_it_was_opened_again(tmp_path: Path) -> None:
    """With a checkpoint and records behind it, and rolled back entries in both."""
    chance = RandomEntries("again")
    with open_local(tmp_path / "e") as engine:
        given = _with_results(engine, _entries(chance, 60))
        engine.apply_many(_entries(chance, 20, 120))
        engine.rollback_to(120)
        engine.create_checkpoint()
        given |= _with_results(engine, _entries(chance, 40, 120))
        engine.apply_many(_entries(chance, 20, 200))
        engine.rollback_to(200)
        assert {result.status for _, result in given.values()} == {"applied", "refused", "nothing"}
        assert_answers(engine, given)
        engine.close(checkpoint=False)
    with open_local(tmp_path / "e") as engine:
        assert_answers(engine, given)


def test_engine_answers_when_its_log_has_left_the_disk() -> None:
    """Everything is shipped and purged; then the engine is opened again."""
    with EngineNode(new_store(), local_retention_bytes=0).open() as node:
        given = _applied(node, 150)
        node.ship_all()
        node.engine.create_checkpoint()
        node.shipping.purge()
        assert node.core.wal.first_lsn > 150
        assert_answers(node.engine, given)
        node.close()
        node.open()
        assert_answers(node.engine, given)


@pytest.mark.parametrize("has_log", [False, True])
def test_restored_engine_answers_as_the_one_before(has_log: bool) -> None:
    """From a state, and from a state with log behind it."""
    node = EngineNode(new_store()).open()
    given = _applied(node, 80)
    node.ship_all()
    node.engine.create_checkpoint()
    if has_log:
        given |= _applied(node, 40)
        seq = node.engine.applied_seq
        _applied(node, 10)
        node.engine.rollback_to(seq)
        given |= _applied(node, 10)
        node.ship_all()
    digest = node.engine.digest()
    node.close()
    other = successor(node)
    other.restore()
    with other.open():
        assert other.engine.digest() == digest
        assert_answers(other.engine, given)


def test_restore_without_a_state_answers_too() -> None:
    """All of it is learned from the shipped log."""
    node = EngineNode(new_store()).open()
    given = _applied(node, 60)
    node.ship_all()
    node.crash()
    other = successor(node)
    other.restore()
    with other.open():
        assert_answers(other.engine, given)


def test_what_nobody_knows_any_more_is_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound, and without records: what is contradicted is an error, and nothing is claimed of the rest."""
    monkeypatch.setattr(known_results, "KEPT", 4)
    node = EngineNode(new_store()).open()
    entries: list[tuple[int, Entry]] = [
        (1, CreateBucket("b")),
        (2, PutObject("b", "k", b"v")),
        (3, CreateBucket("b")),
        *((seq, PutObject("b", "k", b"%d" % seq)) for seq in range(10, 16)),
    ]
    results = node.engine.apply_many(entries)
    assert results[2].status == "refused"
    node.ship_all()
    node.engine.create_checkpoint()
    node.close()
    other = successor(node)
    other.restore()
    with other.open() as restored:
        engine = restored.engine
        for seq, entry in (*entries[:3], (5, STRANGER), (3, DeleteObject("b", "k"))):
            again = engine.apply(seq, entry)
            assert again.status == "unverified"
            assert "results are kept from seq 12 on" in (again.reason or "")
            assert not again.applied
        with pytest.raises(InputError, match="put something else"):
            engine.apply(2, PutObject("b", "k", b"w"))
        assert [engine.apply(seq, entry) for seq, entry in entries[-4:]] == results[-4:]
        with pytest.raises(InputError, match="another entry"):
            engine.apply(15, STRANGER)
        assert engine.applied_seq == 15


def test_records_on_the_disk_answer_beyond_the_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The table is short, and the log is all here."""
    monkeypatch.setattr(known_results, "KEPT", 4)
    chance = RandomEntries("disk")
    with open_local(tmp_path / "e") as engine:
        given = _with_results(engine, _entries(chance, 50))
        engine.create_checkpoint()
    with open_local(tmp_path / "e") as engine:
        assert engine._core.results.floor > 50
        assert_answers(engine, given)


# The table


def test_table_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The oldest go; what is kept of reasons is bounded too."""
    monkeypatch.setattr(known_results, "MOST", 16)
    with open_local(tmp_path / "e") as engine:
        for seq in range(1, 90):
            engine.apply(seq, CreateBucket("b"))
        table = engine._core.results
        assert 89 - 32 <= table.floor < 89 - 15
        assert len(table.known_up_to(MAX_SEQ).seqs) <= 8 * 32
        assert len(table.known_up_to(89).reasons) == 89 - table.floor
        monkeypatch.setattr(known_results, "_REASON_BYTES", 100)
        few = table.known_up_to(89)
        assert len(few.reasons) == len(few.statuses) == 100 // len("there is a bucket 'b' already")
        assert few.floor == 89 - len(few.statuses)


def test_part_of_a_log_knows_what_is_in_it(tmp_path: Path) -> None:
    """An entry whose beginning is not seen is not known, nor is anything before it."""
    batch = Batch([CreateBucket("a"), CreateBucket("b")])
    with open_local(tmp_path / "e") as engine:
        engine.apply_many([(5, batch), (9, CreateBucket("c"))])
        records = [payload for frames in engine._wal.batches(1) for payload in frames.payloads()]
    for start in range(len(records)):
        table = ResultTable(NOTHING_KNOWN)
        table.take(1 + start, records[start:])
        if records[start:] == records[-1:]:
            assert (table.floor, table.find(5)) == (8, None)
        assert table.find(9) is not None or start == len(records)
        assert (table.find(5) is None) == (table.floor >= 5)
    empty = ResultTable(NOTHING_KNOWN).known_up_to(7)
    assert (empty.floor, empty.seqs) == (7, b"")


def test_prints_tell_entries_apart() -> None:
    """Names that run into each other, another order, other data or metadata, a batch of one."""
    entries: list[Entry] = [
        CreateBucket("ab"),
        DeleteBucket("ab"),
        DeleteBucket("ab", force=True),
        PutObject("a", "bc", b""),
        PutObject("ab", "c", b""),
        PutObject("ab", "c", b"\0"),
        PutObject("ab", "c", b"", {"a": 1}),
        DeleteObject("ab", "c"),
        CopyObject("a", "b", "c", "d"),
        CopyObject("c", "d", "a", "b"),
        Batch([CreateBucket("a"), CreateBucket("b")]),
        Batch([CreateBucket("b"), CreateBucket("a")]),
    ]
    assert len({print_of(entry) for entry in entries}) == len(entries)
    assert print_of(Batch([CreateBucket("ab")])) == print_of(CreateBucket("ab"))


@pytest.mark.parametrize(
    "known",
    [
        KnownResults(floor=0, seqs=bytes(8)),
        KnownResults(floor=0, seqs=bytes(7), prints=bytes(7), statuses=b""),
        KnownResults(floor=0, seqs=bytes(8), prints=bytes(8), statuses=b"\3"),
    ],
)
def test_table_that_does_not_hold_together_is_refused(known: KnownResults) -> None:
    """It comes from a disk or a store."""
    with pytest.raises(DataError, match="table of results"):
        ResultTable(known)


def test_results_are_found_as_the_twin_finds_them(tmp_path: Path) -> None:
    """Records of a real log from every place on, and random bytes."""
    with open_local(tmp_path / "e") as engine:
        engine.apply_many(RandomEntries("twin", keys=5, largest=50).entries(80))
        engine.rollback_to(60)
        records = [payload for frames in engine._wal.batches(1) for payload in frames.payloads()]
    chance = random.Random(3)
    for start in range(0, len(records), 3):
        some = records[start : start + 40]
        if start % 2:
            some[-1] = some[-1][: chance.randrange(1, 90)]
        frames = encode_many(1 + start, some)
        opened = (chance.randrange(3), 7, 9, True) if start % 4 else NONE_OPEN
        listed = agreed(engine_kernel, results_oracle, "results_of", 1 + start, some, opened)
        framed = (1 + start, frames.buffer, frames.positions, frames.lengths, opened)
        assert agreed(engine_kernel, results_oracle, "results_in", *framed) == listed
