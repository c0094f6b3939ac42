"""A state computed as Spark's workers do it, in this process: many histories can be tried so."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa

from tidelog.pipeline.engine_jobs.digest_merge import Merge, PartResult
from tidelog.pipeline.engine_jobs.digest_rows import DAMAGE, START, RawRow, RowItem, rows_of
from tidelog.pipeline.engine_jobs.digest_state import ComputedState, _added_up

PARTS = 3


def compute_here(
    spark: object, items: Sequence[RowItem], size: int, *, seq: int, horizon_seq: int, compares: bool = False
) -> ComputedState:
    """What `compute_state` does, with the shuffle of Spark played by a sort."""
    rows = [(part, row) for item in items for row in rows_of(item) for part in _parts_of(row)]
    rows.sort(key=lambda one: (one[0], one[1][1], one[1][0], one[1][2], one[1][3]))
    batches = Merge(seq, horizon_seq, compares=compares)(_batches(rows))
    found = [msgspec.msgpack.decode(data, type=PartResult) for batch in batches for data in batch.column(0).to_pylist()]
    return _added_up(found, seq)


def _parts_of(row: RawRow) -> range:
    source, key, *_ = row
    if source == DAMAGE:
        return range(1)
    if source == START or key.startswith(b"b"):
        return range(PARTS)
    number = zlib.crc32(key[:-8]) % PARTS
    return range(number, number + 1)


def _batches(rows: list[tuple[int, RawRow]]) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(rows), 100):
        some = rows[start : start + 100]
        yield pa.record_batch(
            [
                pa.array([part for part, _ in some], pa.int32()),
                pa.array([row[0] for _, row in some], pa.int32()),
                pa.array([row[1] for _, row in some], pa.binary()),
                pa.array([row[2] for _, row in some], pa.int64()),
                pa.array([row[4] for _, row in some], pa.binary()),
            ],
            names=["part", "source", "key", "lsn", "cell"],
        )
