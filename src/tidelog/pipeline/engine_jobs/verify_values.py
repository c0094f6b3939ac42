"""Whether every value that can still be asked for is somewhere: in the log that is left, or in compacted data.

    rows of the newest state and of the log behind it -> values whose records were dropped -> the body index has them

Invariants
- A version is needed when a state from the start of history on shows it (`engine/vacuum_rules.py`). What retention may
  remove may have lost its value with the log; nobody reads it.
- Values in the log are read by `verify_log`, those in compacted data by `verify_bodies`: here is only looked for those
  that are in neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

import msgspec

from tidelog.engine.buckets import BucketVersion
from tidelog.engine.cell import decode_bucket, decode_cell
from tidelog.engine.cell_blocks import Row
from tidelog.engine.row_file import RowPart
from tidelog.engine.vacuum_rules import Rule, is_pointer, judged
from tidelog.engine.version_keys import BUCKETS, SEQ_BYTES, seq_of
from tidelog.errors import DataError
from tidelog.pipeline.arrow_map import map_in_arrow
from tidelog.pipeline.engine_jobs.digest_merge import InRow, parts_in
from tidelog.pipeline.engine_jobs.digest_rows import START, RowItem
from tidelog.pipeline.engine_jobs.digest_state import sorted_rows
from tidelog.pipeline.engine_jobs.verify_places import (
    BODY,
    PLACE_SCHEMA,
    IndexPart,
    PlaceReader,
    PlaceRow,
    rows_in,
    to_batches,
)
from tidelog.pipeline.engine_jobs.verify_words import described_key, engine_problem
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.jobs.job import Problem
from tidelog.pipeline.jobs.spark_errors import told_in_our_words

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

NEEDED: Final = 3
_LOST_SCHEMA: Final = "result binary"
_MOST_NAMED = 5
_TASK_BYTES = 16 << 20
_MAX_TASKS = 1024


class LostValues(msgspec.Struct, frozen=True):
    """Versions of one task whose values are nowhere: how many, and the first of them."""

    count: int
    names: tuple[str, ...]


class NeededValues:
    """What a task does with sorted rows: those values that are needed, and whose records were dropped."""

    def __init__(self, start_lsn: int, horizon_seq: int) -> None:
        self._start_lsn = start_lsn
        self._horizon_seq = horizon_seq

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts_in(batches):
            yield from to_batches(self._needed(part.rows), PlaceRow)

    def _needed(self, rows: Iterable[InRow]) -> Iterator[PlaceRow]:
        horizon, alive = self._horizon_seq, dict[bytes, BucketVersion]()
        for name, changes in groupby(rows, key=lambda row: row.key[:-SEQ_BYTES]):
            if not name:
                horizon = max([horizon, *(row.lsn for row in changes if row.source == START)])
                continue
            versions = _left(changes)
            if name[:1] == BUCKETS:
                _note_alive(alive, name[1:-1], versions, horizon)
            else:
                yield from self._of_name(versions, Rule(horizon, 1, alive))

    def _of_name(self, versions: list[Row], rule: Rule) -> Iterator[PlaceRow]:
        pointers = [(key, decode_cell(cell)) for key, cell in versions if is_pointer(cell)]
        dropped = [(key, cell) for key, cell in pointers if cell.lsn < self._start_lsn]
        if not dropped:
            return
        doomed = {key for verdict in judged(versions, rule, _nothing) for key in verdict.doomed()}
        for key, cell in dropped:
            if key not in doomed:
                yield PlaceRow(NEEDED, cell.position, described_key(key), b"", 0, 0, cell.lsn, 0)


def _left(changes: Iterable[InRow]) -> list[Row]:
    """The versions of a name, newest first, after all changes."""
    last = {row.key: row.cell for row in changes}
    return [(key, cell) for key, cell in last.items() if cell is not None]


def _note_alive(alive: dict[bytes, BucketVersion], name: bytes, versions: list[Row], horizon_seq: int) -> None:
    newest = next((row for row in versions if seq_of(row[0]) <= horizon_seq), None)
    with contextlib.suppress(DataError):  # who compares states tells of it
        if newest is not None and not (version := decode_bucket(newest[1])).is_deleted:
            alive[name] = BucketVersion(seq_of(newest[0]), version.order, False)


def _nothing(cell: bytes) -> None:
    """Cells that stay are of no interest here."""


class LostFinder:
    """What a task does with rows in order of (position, source): needed values that no body index has."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        count, names = 0, list[str]()
        for _, rows in groupby(rows_in(batches), key=lambda row: row.position):
            listed = list(rows)
            needed = [row.name for row in listed if row.source == NEEDED]
            if needed and all(row.source != BODY for row in listed):
                count += len(needed)
                names = sorted([*names, *needed])[:_MOST_NAMED]
        encoded = msgspec.msgpack.encode(LostValues(count, tuple(names)))
        yield pa.record_batch([pa.array([encoded], pa.binary())], names=["result"])


def find_lost_values(
    spark: SparkSession,
    place: EnginePlace,
    items: Sequence[RowItem],
    size: int,
    bodies: Sequence[RowPart],
    needed: NeededValues,
) -> list[Problem]:
    """The values of these rows that are in none of these files of the body index."""
    found = _found(spark, place, items, size, bodies, needed)
    count = sum(one.count for one in found)
    if not count:
        return []
    names = sorted(name for one in found for name in one.names)[:_MOST_NAMED]
    reason = f"{count:,} values are neither in the log nor in compacted data; the first: {', '.join(names)}"
    return [engine_problem(place.name, None, reason)]


def _found(
    spark: SparkSession,
    place: EnginePlace,
    items: Sequence[RowItem],
    size: int,
    bodies: Sequence[RowPart],
    needed: NeededValues,
) -> list[LostValues]:
    rows = map_in_arrow(sorted_rows(spark, items, size), needed, PLACE_SCHEMA)
    if bodies:
        parts = [IndexPart(place=place, part=part, is_bodies=True) for part in bodies]
        rows = rows.union(map_in_arrow(spark.range(0, len(parts), 1, len(parts)), PlaceReader(parts), PLACE_SCHEMA))
    tasks = min(_MAX_TASKS, max(1, (size + sum(part.size for part in bodies)) // _TASK_BYTES))
    by_position = rows.repartition(tasks, "position").sortWithinPartitions("position", "source", "name")
    lost = map_in_arrow(by_position, LostFinder(), _LOST_SCHEMA)
    with told_in_our_words("looking for values"):
        return [msgspec.msgpack.decode(bytes(row.result), type=LostValues) for row in lost.collect()]
