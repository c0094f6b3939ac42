"""What workers make of an engine's log: the same rows as the engine's tree, however the log is split among tasks."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest
from tests.engine.stations import EngineNode, new_store
from tests.oracles.changes import read_changes
from tests.pipeline.engines.in_memory import place_of

from tidelog.engine.btree.page import IMAGE, INSERT, Update, encode
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket, PutObject
from tidelog.engine.mvcc.cells import SEQ_BYTES, at, encode_inline, object_prefix, seq_of
from tidelog.engine.wal.operations import encode_operation
from tidelog.engine.wal.record_header import PART_OF_BATCH
from tidelog.engine.wal.records import encode_vacuum
from tidelog.engine.wal.value import StoredValue, encode_value
from tidelog.errors import CorruptionError, DataError, GapError
from tidelog.log.frame import crc32
from tidelog.pipeline.source import log_changes
from tidelog.pipeline.source.entry_batches import LogPart, plan_log
from tidelog.pipeline.source.log_changes import EntryEnds, LastChanges, RangedChanges, change_batches, change_columns

Rows = dict[bytes, bytes]


def planned(node: EngineNode, task_bytes: int, max_seq: int | None = None) -> list[LogPart]:
    """The whole log of a node, in tasks of so many bytes."""
    place, manifest = place_of(node.objects), node.view.manifest
    return plan_log(place.catalog(), place, manifest, 1, last_seq=max_seq, part_bytes=task_bytes)


def settled(works: list[LogPart]) -> Rows:
    """The last change of every key counts, whichever task told it and when."""
    changes = [change for work in reversed(works) for change in read_changes(work.log(), work)]
    found: dict[bytes, tuple[int, int, bytes | None]] = {}
    for key, lsn, number, cell in changes:
        assert key not in found or found[key][:2] != (lsn, number)
        found[key] = max(found.get(key, (0, 0, None)), (lsn, number, cell), key=lambda one: one[:2])
    return {key: cell for key, (_, _, cell) in found.items() if cell is not None}


def tree_of(engine: Engine) -> Rows:
    """What the engine itself has."""
    return dict(engine._core.tree.scan())


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_those_of_the_tree(seed: int) -> None:
    """Batches, copies, refused entries, rollbacks: the last changes are the rows of the tree, however it is split."""
    with EngineNode(new_store(), name=f"rows-{seed}", rotate_max_bytes=4096).open() as node:
        for turn in range(4):
            node.apply(40)
            node.ship_all()
            if turn % 2:
                kept = node.engine.applied_seq
                node.apply(15)
                node.roll_back(kept)
        node.apply(10)
        node.ship_all()
        rows = tree_of(node.engine)
        for task_bytes in (1, 5_000, 1 << 30):
            assert settled(planned(node, task_bytes)) == rows


def last_changes(work: LogPart) -> LastChanges:
    """Those of one task."""
    changes = LastChanges()
    for _, columns in change_columns(work):
        changes.add(columns)
    return changes


@pytest.mark.parametrize("unsettled_bytes", [1, 3_000, 1 << 30])
def test_last_changes_are_rows_of_the_tree_in_order_whichever_part_comes_first(
    monkeypatch: pytest.MonkeyPatch, unsettled_bytes: int
) -> None:
    """Settled after every batch, now and then, or once: in order of key, and a removed row has no cell."""
    monkeypatch.setattr(log_changes, "_UNSETTLED_BYTES", unsettled_bytes)
    monkeypatch.setattr(log_changes, "_MOST_UNSETTLED_BYTES", unsettled_bytes)
    with EngineNode(new_store(), name="last", rotate_max_bytes=4096).open() as node:
        for _ in range(2):
            node.apply(60)
            kept = node.engine.applied_seq
            node.apply(15)
            node.roll_back(kept)
        node.ship_all()
        node.engine.collect_garbage(horizon=node.engine.applied_seq)
        node.apply(1)
        node.ship_all()
        for task_bytes in (1, 1 << 30):
            works = planned(node, task_bytes)
            changes, ranged = LastChanges(), RangedChanges(2, range_bytes=700)
            for work in reversed(works):
                changes.merge(last_changes(work))
                ranged.merge(last_changes(work))
            ranges = ranged.settle()
            found = changes.settle().select(["key", "cell"]).to_pylist()
            keys = [one["key"] for one in found]
            assert keys == sorted(set(keys))
            assert None in [one["cell"] for one in found]
            assert {one["key"]: one["cell"] for one in found if one["cell"] is not None} == tree_of(node.engine)
            assert pa.concat_tables(ranges).select(["key", "cell"]).to_pylist() == found
            assert len(ranges) > 5
            assert max(one.nbytes for one in ranges if one.num_rows > 1) <= 700


def test_nothing_that_was_changed_is_a_table_without_rows() -> None:
    """A part may have refused entries alone."""
    with EngineNode(new_store()).open() as node:
        node.apply_these([(1, PutObject("none", "k", b"1"))])
        node.ship_all()
        (work,) = planned(node, 1 << 30)
        found = last_changes(work).settle()
        assert (found.num_rows, found.schema.names) == (0, ["key", "lsn", "number", "cell"])


@pytest.mark.parametrize("task_bytes", [1, 5_000, 1 << 30])
def test_entries_are_counted_where_they_begin(task_bytes: int) -> None:
    """Batches once, refused ones too; what retention removed is no entry."""
    with EngineNode(new_store(), name="count", rotate_max_bytes=4096).open() as node:
        node.apply(80)
        node.ship_all()
        node.engine.collect_garbage(horizon=node.engine.applied_seq)
        node.apply(1)
        node.ship_all()
        ends = EntryEnds()
        for work in planned(node, task_bytes):
            for _ in change_columns(work, on_records=ends.count):
                pass
        assert ends.entries == 81


def test_a_batch_in_several_objects_is_with_one_task() -> None:
    """An entry that begins in one object and ends in a later one is told once, by whoever has its beginning."""
    with EngineNode(new_store(), rotate_max_bytes=4096).open() as node:
        puts = [PutObject("b", f"key-{number}", bytes(900)) for number in range(30)]
        node.apply_these([(1, CreateBucket("b")), (2, Batch(puts)), (3, PutObject("b", "last", b""))])
        node.ship_all()
        works = planned(node, 1)
        assert len(works) > 4
        told = [len(list(read_changes(work.log(), work))) for work in works]
        assert sorted(told, reverse=True)[:3] == [30, 1, 1]
        assert settled(works) == tree_of(node.engine)


def test_an_entry_that_was_never_whole_changes_nothing() -> None:
    """A batch that a crash cut off was undone, not rolled back: nothing of it is told, though its records are there."""
    node = EngineNode(new_store(), rotate_max_bytes=4096).open()
    node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "first", bytes(300)))])
    torn = PutObject("b", "torn", bytes(300))
    node.core.wal.add(_first_of_a_batch(node, 3, torn))
    node.core.wal.commit()
    node.crash()
    with node.open():
        node.apply_these([(3, PutObject("b", "other", bytes(300)))])
        node.ship_all()
        assert not node.view.manifest.rolled_back
        rows = tree_of(node.engine)
        assert len(rows) == 3
        assert settled(planned(node, 1)) == settled(planned(node, 1 << 30)) == rows


def _first_of_a_batch(node: EngineNode, seq: int, put: PutObject) -> bytes:
    """The first record of a batch whose others never came."""
    value = encode_value(put.data, {})
    stored = StoredValue(value, 0, len(put.data), crc32(value))
    key = at(object_prefix(put.bucket, put.key), seq)
    cell = encode_inline(0, len(put.data), stored.crc, 0, b"x")
    page = node.core.tree.prepare(key, len(cell))
    update = encode(Update(page, INSERT, key, cell))
    return encode_operation(put, seq, flags=PART_OF_BATCH, time_us=1, value=stored, updates=update)


def test_a_seq_in_the_past() -> None:
    """Entries above the seq that is asked for do not count."""
    with EngineNode(new_store(), rotate_max_bytes=4096).open() as node:
        node.apply(60)
        node.ship_all()
        seqs = sorted(map(seq_of, tree_of(node.engine)))
        middle = seqs[len(seqs) // 2]
        wanted = {key: cell for key, cell in tree_of(node.engine).items() if seq_of(key) <= middle}
        assert settled(planned(node, 5_000, middle)) == wanted


def test_batches_have_the_columns_that_are_promised() -> None:
    """An Arrow batch has key, lsn, number, cell and part; all versions of a name have the same part."""
    with EngineNode(new_store()).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "k", b"1")), (3, PutObject("b", "k", b"2"))])
        node.ship_all()
        (batch,) = change_batches(planned(node, 1 << 30)[0])
        assert batch.schema.names == ["key", "lsn", "number", "cell", "part"]
        keys, parts = batch.column("key").to_pylist(), batch.column("part").to_pylist()
        assert parts == [crc32(key[:-SEQ_BYTES]) & 0x7FFFFFFF for key in keys]
        assert parts[1] == parts[2] != parts[0]


def test_what_is_missing_or_damaged_is_told() -> None:
    """A descriptor or an object that is gone is a gap; a flipped bit is found before its record counts."""
    with EngineNode(new_store(), rotate_max_bytes=4096).open() as node:
        node.apply(60)
        node.ship_all()
        works = planned(node, 1)
        keys = node.view.object_keys()
        data = bytearray(node.objects.get(keys[1]).data)
        data[len(data) // 2] ^= 1
        node.objects.put(keys[1], bytes(data))
        with pytest.raises(CorruptionError):
            settled(works)
        node.objects.delete(keys[1])
        with pytest.raises(GapError):
            settled(works)
        with pytest.raises(GapError):
            planned_behind_the_end(node)


def planned_behind_the_end(node: EngineNode) -> list[LogPart]:
    place, manifest = place_of(node.objects), node.view.manifest
    beyond = msgspec.structs.replace(manifest, high_water_lsn=manifest.shipped_lsn + 4)
    return plan_log(place.catalog(), place, beyond, 1)


def test_records_that_are_none_are_refused() -> None:
    """An update that is no row's raises DataError."""
    with EngineNode(new_store()).open() as node:
        node.apply_these([(1, CreateBucket("b"))])
        node.core.wal.add(encode_vacuum(0, encode(Update(7, IMAGE, b"", b"image"))))
        node.apply_these([(2, PutObject("b", "k", b"1"))])
        node.ship_all()
        with pytest.raises(DataError, match="no row"):
            settled(planned(node, 1 << 30))


def test_forgotten_rollback_is_refused() -> None:
    """Records that a rollback undid must not come back because nobody knows of it any more."""
    with EngineNode(new_store()).open() as node:
        node.apply(20)
        kept = node.engine.applied_seq
        node.apply(5)
        node.roll_back(kept)
        node.apply(5)
        node.ship_all()
        place, manifest = place_of(node.objects), node.view.manifest
        assert manifest.rolled_back
        parts = plan_log(place.catalog(), place, msgspec.structs.replace(manifest, rolled_back=()), 1)
        with pytest.raises(DataError, match="no longer known"):
            settled(parts)
