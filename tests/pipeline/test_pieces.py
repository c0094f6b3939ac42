"""Rows in pieces: what goes into a shuffle comes out of it, in order, whatever the sizes are."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pytest

from tidelog.pipeline import pieces
from tidelog.pipeline.pieces import Divided, Gathered, packed, remainders, unpacked

TASKS = 3


def table(rows: int, seed: int = 1) -> pa.Table:
    choose = random.Random(seed)
    keys = [choose.randbytes(choose.randrange(1, 9)) for _ in range(rows)]
    return pa.table(
        {
            "part": pa.array([choose.randrange(-50, 50) for _ in keys], pa.int32()),
            "key": pa.array(keys, pa.binary()),
            "row": pa.array(range(rows), pa.int64()),
            "cell": pa.array([None if row % 7 == 0 else b"c" * (row % 40) for row in range(rows)], pa.binary()),
        }
    )


def batches(rows: pa.Table, size: int) -> Iterator[pa.RecordBatch]:
    return iter(rows.to_batches(max_chunksize=size))


@pytest.mark.parametrize("piece_bytes", [1, 300, 1 << 20])
def test_packed_rows_come_out_as_they_went_in(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """However large a piece is, the rows are the same, in their order; a piece is not larger than it may be."""
    monkeypatch.setattr(pieces, "_PIECE_BYTES", piece_bytes)
    rows = table(500)
    found = list(packed(batches(rows, 64)))
    assert pa.Table.from_batches(unpacked(found), rows.schema).combine_chunks().equals(rows.combine_chunks())
    assert len(found) >= min(500, rows.nbytes // piece_bytes)


def test_packed_rows_of_nothing_are_nothing() -> None:
    """Empty batches make no piece."""
    assert list(packed(iter(table(0).to_batches()))) == list(packed(iter([table(3).to_batches()[0].slice(0, 0)]))) == []


@pytest.mark.parametrize("run_bytes", [1, 2000, 1 << 30])
@pytest.mark.parametrize("divided_bytes", [1, 4000, 1 << 30])
def test_shuffled_rows_are_in_their_task_in_order(
    monkeypatch: pytest.MonkeyPatch, divided_bytes: int, run_bytes: int
) -> None:
    """All rows of a number are in one task, sorted, whether they fit into memory or wait in files."""
    monkeypatch.setattr(pieces, "_DIVIDED_BYTES", divided_bytes)
    monkeypatch.setattr(pieces, "_RUN_BATCH_ROWS", 5)
    rows = table(400)
    sent = list(Divided("part", TASKS)(batches(rows, 32)))
    for task in range(TASKS):
        mine = [batch.select(["piece"]) for batch in sent if batch.column("task")[0].as_py() == task]
        gathered = Gathered(["key", "row"], run_bytes)(mine)
        found = [row for batch in gathered for row in batch.to_pylist()]
        wanted = [row for row in rows.to_pylist() if row["part"] % TASKS == task]
        assert found == sorted(wanted, key=lambda row: (row["key"], row["row"]))


def test_merged_runs_of_equal_keys_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that consist of one key, and runs that end while others go on, are merged to the end."""
    monkeypatch.setattr(pieces, "_RUN_BATCH_ROWS", 2)
    rows = pa.table({"key": pa.array([b"a"] * 9 + [b"b"] * 3, pa.binary()), "row": range(12)})
    sent = [batch for one in batches(rows, 3) for batch in packed(iter([one]))]
    found = [row for batch in Gathered(["key"], run_bytes=1)(sent) for row in batch.to_pylist()]
    assert sorted(found, key=lambda row: row["row"]) == rows.to_pylist()
    assert [row["key"] for row in found] == rows.column("key").to_pylist()


def test_remainders_are_never_negative() -> None:
    """As Python's own: also of negative numbers."""
    numbers = [-(1 << 31), -7, -1, 0, 1, 6, 7, (1 << 31) - 1]
    assert remainders(pa.array(numbers, pa.int32()), 7).to_pylist() == [number % 7 for number in numbers]
