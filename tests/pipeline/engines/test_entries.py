"""`tidelog_entries` without Spark: what the driver plans and what tasks read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.engines.histories import History

import tidelog
from tidelog.engine.entry import CopyObject, CreateBucket, DeleteBucket, DeleteObject, PutObject, operations
from tidelog.errors import InputError, OffsetOutOfRangeError
from tidelog.pipeline.source.entries import EntriesDataSource
from tidelog.pipeline.source.entry_batches import as_text


def rows_of(root: object, **options: object) -> list[dict[str, Any]]:
    """All rows, in the order of the parts; read as tasks do."""
    given = {"root": str(root), **{name: str(value) for name, value in options.items()}}
    source = EntriesDataSource(given)
    reader = source.reader(source.schema())
    batches: list[Any] = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    for batch in batches:
        batch.validate(full=True)
    return [row for batch in batches for row in batch.to_pylist()]


def expected_rows(history: History) -> list[dict[str, Any]]:
    """What the entries that were applied must look like."""
    return [
        _expected(seq, order, part, is_applied)
        for seq, entry, is_applied in history.applied
        for order, part in enumerate(operations(entry))
    ]


def _expected(seq: int, order: int, part: Any, is_applied: bool) -> dict[str, Any]:
    is_put, is_copy = isinstance(part, PutObject), isinstance(part, CopyObject)
    has_value = is_put and is_applied
    return {
        "seq": seq,
        "order": order,
        "kind": type(part).__name__,
        "bucket": part.dest_bucket if is_copy else part.bucket,
        "key": part.dest_key if is_copy else getattr(part, "key", None),
        "src_bucket": part.src_bucket if is_copy else None,
        "src_key": part.src_key if is_copy else None,
        "is_forced": part.force if isinstance(part, DeleteBucket) else None,
        "is_refused": not is_applied,
        "metadata": [(name, as_text(value)) for name, value in part.metadata.items()] if has_value else None,
        "value": part.data if has_value else None,
    }


def test_metadata_of_any_kind_is_a_map_of_texts(tmp_path: Path) -> None:
    """Null stays null, bytes are in base64, the rest is as JSON has it; other rows have no metadata, or no value."""
    plain = {"a": None, "b": b"\xff\0", "c": -5, "d": True, "e": "\u00e9"}
    for more in ({}, {"f": 1.5}):
        home = tmp_path / f"more-{len(more)}"
        with tidelog.open_engine(home, store=f"{home.as_uri()}-store") as engine:
            engine.apply(1, CreateBucket("b"))
            engine.apply(2, PutObject("b", "k", b"1", {**plain, **more}))
            engine.apply(3, PutObject("b", "k", b"2"))
            engine.apply(4, DeleteObject("b", "k"))
            engine.update_low_water_mark(4)
            engine.ship()
        rows = rows_of(f"{home.as_uri()}-store")
        shown = [("a", None), ("b", "/wA="), ("c", "-5"), ("d", "true"), ("e", "\u00e9"), *((f, "1.5") for f in more)]
        assert [row["metadata"] for row in rows] == [None, shown, [], None]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_every_entry_that_counts_is_there_once(tmp_path: Path, seed: int, compression: str) -> None:
    """Batches, copies, refused entries and rollbacks: however the log is divided, the rows are the entries applied."""
    history = History(tmp_path, seed, wal_compression=compression)
    with history.open() as engine:
        history.grow(engine)
        expected = expected_rows(history)
        names = list(expected[0])
        rows: list[dict[str, Any]] = []
        for options in ({}, {"minPartitions": 7}, {"minPartitions": 40, "maxRowsPerBatch": 3}):
            rows = rows_of(history.store, columns=",".join([*names, "size", "reason"]), **options)
            assert [{name: row[name] for name in names} for row in rows] == expected
    assert all((row["reason"] is not None) == row["is_refused"] for row in rows)
    assert all(row["size"] == len(row["value"]) for row in rows if row["value"] is not None)


def test_a_batch_across_objects_and_tasks_comes_whole_and_once(tmp_path: Path) -> None:
    """A batch that is larger than a file of the log, and a task for nearly every record, do not tear it apart."""
    with tidelog.open_engine(tmp_path / "e", store=f"file://{tmp_path}/s", rotate_max_bytes=16 << 10) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply(2, tidelog.Batch([PutObject("b", f"k{number}", b"x" * 3000) for number in range(30)]))
        engine.apply(3, PutObject("b", "last", b""))
        engine.update_low_water_mark(3)
        engine.ship()
    rows = rows_of(tmp_path / "e", minPartitions=30)
    assert [(row["seq"], row["order"]) for row in rows] == [(1, 0), *((2, order) for order in range(30)), (3, 0)]
    assert len({row["lsn"] for row in rows}) == 32


def test_a_batch_that_was_torn_by_a_crash_is_there_once(tmp_path: Path) -> None:
    """Its first records are in the log twice: those that recovery took back are no rows, however tasks are cut."""
    puts = tidelog.Batch([PutObject("b", f"k{number}", b"v" * 300) for number in range(5)])
    with tidelog.open_engine(tmp_path / "whole") as engine:
        engine.apply_many([(1, tidelog.CreateBucket("b")), (2, puts)])
        shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    (newest,) = (tmp_path / "torn" / "wal").glob("wal.*.log")
    os.truncate(newest, newest.stat().st_size - 100)
    with tidelog.open_engine(tmp_path / "torn", store=f"file://{tmp_path}/s") as engine:
        assert engine._core.recovery.undone_seq == 2
        engine.apply_many([(2, puts), (3, PutObject("b", "last", b""))])
        engine.update_low_water_mark(3)
        engine.ship()
    for parts in (1, 4, 20):
        rows = rows_of(tmp_path / "torn", minPartitions=parts)
        assert [(row["seq"], row["order"]) for row in rows] == [(1, 0), *((2, order) for order in range(5)), (3, 0)]


def test_seqs_choose_the_range_both_ends_included(tmp_path: Path) -> None:
    """The same rows as by filtering, whether states help to find the place or not."""
    history = History(tmp_path, "range")
    with history.open() as engine:
        for _ in range(3):
            history.grow(engine, 30)
            engine.create_checkpoint()
    seqs = [row["seq"] for row in rows_of(history.store)]
    for low, high in ((seqs[0], seqs[-1]), (seqs[7], seqs[40]), (seqs[30], seqs[30]), (seqs[50] + 1, seqs[-1])):
        found = [row["seq"] for row in rows_of(history.store, startingSeq=low, endingSeq=high)]
        assert found == [seq for seq in seqs if low <= seq <= high]
    assert [row["seq"] for row in rows_of(history.store, startingSeq="earliest")] == seqs


def test_columns_are_those_that_are_asked_for(tmp_path: Path) -> None:
    """Values only when asked, metadata unless not wanted, refused entries unless left out."""
    history = History(tmp_path, "columns")
    with history.open() as engine:
        history.grow(engine, rolls_back=False)
    assert "value" not in rows_of(history.store)[0]
    assert "value" in rows_of(history.store, includeValue="true")[0]
    assert "metadata" not in rows_of(history.store, includeMetadata="false")[0]
    assert list(rows_of(history.store, columns="key, SEQ")[0]) == ["key", "seq"]
    refused = [row for row in rows_of(history.store) if row["is_refused"]]
    assert refused
    assert len(rows_of(history.store, includeRefused="false")) + len(refused) == len(rows_of(history.store))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingSeq": "9", "endingSeq": "8"}, "nothing between them"),
        ({"startingSeq": "latest"}, "cannot start at latest"),
        ({"columns": "seq,nope"}, "no column nope"),
        ({"includeValue": "yes"}, "true or false"),
        ({"startingSeqs": "1"}, "no option startingSeqs"),
        ({"startingSeq": "soon"}, "a number of 0 or more"),
        ({"store": "s3://bucket/prefix"}, "the option store is for topics"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, str], says: str) -> None:
    """A slip is an error that says what would be right."""
    with tidelog.open_engine(tmp_path / "e", store=f"file://{tmp_path}/s"):
        pass
    with pytest.raises(InputError, match=says):
        rows_of(tmp_path / "e", **options)


def test_objects_that_were_put_together_meanwhile_are_found_again(tmp_path: Path) -> None:
    """A read that was planned before small objects of the log were replaced by large ones gives the same rows."""
    history = History(tmp_path, "together")
    with history.open() as engine:
        history.grow(engine, 90)
        expected = rows_of(history.store)
        source = EntriesDataSource({"root": history.store, "minPartitions": "5"})
        reader = source.reader(source.schema())
        partitions = reader.partitions()
        assert engine.compact(grace_seconds=0).replaced_objects > 1
        engine.compact(grace_seconds=0)
        found: list[Any] = [batch for one in partitions for batch in reader.read(one)]
    assert [row for batch in found for row in batch.to_pylist()] == expected


def test_a_beginning_that_was_dropped_is_told(tmp_path: Path) -> None:
    """With the raw log gone below a compaction, what is there is read; who asks for more is told where it begins."""
    history = History(tmp_path, "dropped")
    with history.open() as engine:
        history.grow(engine, 60)
        everything = [row["seq"] for row in rows_of(history.store)]
        assert history.compact() > 1
    left = [row["seq"] for row in rows_of(history.store)]
    assert left == everything[-len(left) :]
    assert len(left) < len(everything)
    assert [row["seq"] for row in rows_of(history.store, startingSeq=left[0])] == left
    with pytest.raises(OffsetOutOfRangeError, match=f"begins with seq {left[0]}"):
        rows_of(history.store, startingSeq=left[0] - 1)
    assert [row["seq"] for row in rows_of(history.store, startingSeq=1, failOnDataLoss="false")] == left


def test_what_is_not_shipped_yet_is_told(tmp_path: Path) -> None:
    """An end behind the last shipped entry is an error, or with failOnDataLoss=false what is there."""
    history = History(tmp_path, "ahead")
    with history.open() as engine:
        history.grow(engine, 30)
        last = engine.applied_seq
        engine.apply(last + 5, tidelog.CreateBucket("not-shipped"))
    with pytest.raises(OffsetOutOfRangeError, match=f"up to seq {last}, not up to {last + 5}"):
        rows_of(history.store, endingSeq=last + 5)
    with pytest.raises(OffsetOutOfRangeError, match=f"from seq {last + 2} on"):
        rows_of(history.store, startingSeq=last + 2)
    assert rows_of(history.store, startingSeq=last + 1) == []
    rows = rows_of(history.store, endingSeq=last + 5, failOnDataLoss="false")
    assert rows[-1]["seq"] == last
