"""Whether every value that can still be read exists: in the remaining log, or in compacted data.

    rows of the newest snapshot and the log after it -> values whose records were dropped -> the value index has them

Invariants
- A version is needed if a state since the start of history shows it (`engine/mvcc/vacuum_rules.py`). A version that
  retention may remove may have lost its value with the log; it is never read.
- Values in the log and in compacted data are read elsewhere: this step only finds values that are in neither.
- No object is made for a row, but for those of buckets, and of values that are nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from tidelog.engine.mvcc.cells import BUCKETS, SEQ_BYTES, decode_cell
from tidelog.engine.mvcc.versions import BucketVersion, CreatedColumns
from tidelog.engine.sst.sstable import RowPart, SSTable
from tidelog.engine.verify.describe import describe_key
from tidelog.engine.verify.store import about_engine
from tidelog.errors import DataError, NotFoundError
from tidelog.findings import Finding
from tidelog.pipeline.jobs.engine.columns import (
    file_rows,
    going_rows,
    live_values,
    one_array,
    place_rows,
    pointing_rows,
    whole_groups,
)
from tidelog.pipeline.jobs.engine.digest_tasks import START, RowItem, sorted_rows
from tidelog.pipeline.jobs.engine.rows import TOLD_SCHEMA, as_told, note_alive, rows_of, told_by
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.log_changes import LastOfEach
from tidelog.pipeline.spark_flow import spark_flow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_PART_BYTES = 32 << 20
_MAX_TASKS = 1024
_MOST_NAMED = 5

# The key of a version that needs the value at a position of the log; null where the value index has it.
NEEDED_SCHEMA: Final = "position bigint, key binary"


class LostValues(msgspec.Struct, frozen=True):
    """Versions of one task whose values are nowhere: how many, and the first of them."""

    count: int
    names: tuple[str, ...]


class ValuePart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the value index."""

    place: EngineLocation
    part: RowPart


def value_batches(work: ValuePart) -> Iterator[pa.RecordBatch]:
    """The positions of values in compacted data, as batches of `NEEDED_SCHEMA`."""
    import pyarrow as pa

    try:
        for rows in file_rows(SSTable(work.place.opened().objects, work.part, kind="values")):
            _, positions = place_rows(rows.keys, 1, None)
            yield _batch(positions, pa.nulls(len(positions), pa.binary()))
    except (DataError, NotFoundError):
        return  # the check of the indexes says it


def _batch(positions: pa.Array, keys: pa.Array) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([positions, keys], names=["position", "key"])


class NeededValues:
    """What a task does with sorted rows: those values that are needed, and whose records were dropped."""

    def __init__(self, start_lsn: int, horizon_seq: int) -> None:
        self._start_lsn = start_lsn
        self._horizon_seq = horizon_seq

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _, rows in whole_groups(batches, "part"):
            yield from self._of_part(rows)

    def _of_part(self, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """A part has all versions of a name, and all buckets."""
        import pyarrow as pa
        import pyarrow.compute as pc

        is_start = pc.equal(rows.column("source"), START)
        horizon = max([self._horizon_seq, *rows.filter(is_start).column("lsn").to_pylist()])
        is_row = pc.greater(pc.binary_length(rows.column("key")), SEQ_BYTES)
        last = LastOfEach()
        settled = pa.concat_tables([last.take(rows.filter(is_row).select(["key", "cell"])), last.rest()])
        there = settled.filter(pc.is_valid(settled.column("cell")))
        is_bucket = pc.starts_with(there.column("key"), pattern=BUCKETS)
        created = CreatedColumns.of(_alive(there.filter(is_bucket), horizon))
        objects = there.filter(pc.invert(is_bucket))
        keys, cells = one_array(objects.column("key")), one_array(objects.column("cell"))
        stays = pc.invert(going_rows(keys, cells, horizon, 1, created))
        yield self._dropped(keys.filter(stays), cells.filter(stays))

    def _dropped(self, keys: pa.Array, cells: pa.Array) -> pa.RecordBatch:
        """Of these versions those whose values were in records that were dropped, one for each value."""
        import pyarrow as pa
        import pyarrow.compute as pc

        pointing = pointing_rows(keys, cells, 1, None)
        order = pc.sort_indices(pointing.positions)
        rows, positions = pointing.rows.take(order), pointing.positions.take(order)
        keys, cells = keys.take(rows), cells.take(rows)
        try:
            values = live_values(pa.table({"position": positions, "key": keys, "value": cells}))
        except DataError:  # versions contradict each other, which the check of the indexes says
            lsns = pa.array([decode_cell(cell).lsn for cell in cells.to_pylist()], pa.uint64())
            is_dropped = pc.less(lsns, pa.scalar(self._start_lsn, pa.uint64()))
            return _batch(positions.filter(is_dropped), keys.filter(is_dropped))
        is_dropped = pc.less(values.lsn, pa.scalar(self._start_lsn, pa.uint64()))
        return _batch(values.position.filter(is_dropped), keys.take(values.first_row).filter(is_dropped))


def _alive(buckets: pa.Table, horizon: int) -> dict[bytes, BucketVersion]:
    """The buckets that are there at the start of history."""
    found, versions = dict[bytes, BucketVersion](), dict[bytes, list[tuple[bytes, bytes]]]()
    for key, cell in rows_of(buckets.to_batches()):
        versions.setdefault(key[1 : -SEQ_BYTES - 1], []).append((key, cell))
    for name, rows in versions.items():
        note_alive(found, name, rows, horizon)
    return found


class LostFinder:
    """What a task does with all that is known of some positions: needed values that no value index has."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = list(batches)
        if not rows:
            return
        whole = pa.Table.from_batches(rows)
        needed = whole.filter(pc.is_valid(whole.column("key")))
        there = whole.filter(pc.is_null(whole.column("key"))).column("position")
        lost = needed.filter(pc.invert(pc.is_in(needed.column("position"), value_set=there.combine_chunks())))
        names = sorted(describe_key(key) for key in lost.column("key").to_pylist())[:_MOST_NAMED]
        yield from as_told([LostValues(lost.num_rows, tuple(names))])


def find_lost_values(
    spark: SparkSession,
    place: EngineLocation,
    items: Sequence[RowItem],
    size: int,
    values: Sequence[RowPart],
    needed: NeededValues,
) -> Iterator[Finding]:
    """The values of these rows that are in none of these files of the value index."""
    found = _found(spark, place, items, size, values, needed)
    count = sum(one.count for one in found)
    if count:
        names = sorted(name for one in found for name in one.names)[:_MOST_NAMED]
        reason = f"{count:,} values are neither in the log nor in compacted data; the first: {', '.join(names)}"
        yield about_engine(place.name).finding("value", None, reason)


def _found(
    spark: SparkSession,
    place: EngineLocation,
    items: Sequence[RowItem],
    size: int,
    values: Sequence[RowPart],
    needed: NeededValues,
) -> list[LostValues]:
    flow = spark_flow(spark)
    rows = sorted_rows(flow, items, size).mapped(needed, NEEDED_SCHEMA)
    if values:
        parts = [ValuePart(place=place, part=part) for part in values]
        rows = rows.joined_by(flow.source(value_batches, parts, NEEDED_SCHEMA))
    whole = size + sum(part.size for part in values)
    together = rows.grouped("position", min(_MAX_TASKS, max(2, -(-whole // _PART_BYTES))), ["position"])
    return told_by(together.mapped(LostFinder(), TOLD_SCHEMA), LostValues)
