"""Rows of an engine at a seq: those of a state or a compaction, and what the log behind it changed.

    base rows + changes of the log -> grouped by name, in order of key and LSN -> the last of each key -> retention

Invariants
- What comes out depends on the engine alone, not on the state that it began with nor on the number of tasks.
- All versions of a name are in one task, newest first, after `settled`: retention and the digest look at them together.
- Cells come out as they went in. What is read is checked, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tidelog.engine.buckets import Buckets, BucketVersion
from tidelog.engine.cell import Cell, decode_cell
from tidelog.engine.cell_blocks import Row
from tidelog.engine.compacted import CompactedData, Compaction
from tidelog.engine.place import cell_of
from tidelog.engine.row_file import RowFile, RowPart
from tidelog.engine.vacuum_rules import Rule, is_pointer, judged
from tidelog.engine.version_keys import BUCKETS, SEQ_BYTES, seq_of
from tidelog.pipeline.engine_jobs.log_rows import (
    BATCH_ROWS,
    CHANGE_SCHEMA,
    LogWork,
    change_batches,
    first_lsn_above,
    to_batch,
)
from tidelog.pipeline.engines.store_place import EnginePlace

if TYPE_CHECKING:
    import pyarrow as pa

    from tidelog.pipeline.engine_jobs.compact_flow import Flow, Rows

ROW_SCHEMA = "key binary, cell binary"
TOLD_SCHEMA = "told binary"
Told = TypeVar("Told", bound=msgspec.Struct)


class PartWork(msgspec.Struct, frozen=True, kw_only=True):
    """A row file of the version index, or of a state."""

    place: EnginePlace
    part: RowPart


def part_batches(work: PartWork) -> Iterator[pa.RecordBatch]:
    """The rows of such a file as changes that came before every record of the log."""
    rows = RowFile(work.place.opened().objects, work.part, kind="versions").rows()
    return as_changes((key, cell_of(value)) for key, value in rows)


def as_changes(rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
    """Rows of a tree as changes of LSN 0: whatever the log says of the same key comes later."""
    for some in in_batches(rows):
        yield to_batch([(key, 0, 0, cell) for key, cell in some])


Item = TypeVar("Item")


def in_batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Lists of a size that is good for a batch."""
    gathered: list[Item] = []
    for item in items:
        gathered.append(item)
        if len(gathered) >= BATCH_ROWS:
            yield gathered
            gathered = []
    if gathered:
        yield gathered


def settled_rows(flow: Flow, base: Rows | None, log: list[LogWork], tasks: int) -> Rows:
    """The rows as they are behind the log, each key once; kept, since everything else looks at them."""
    changes = flow.source(change_batches, log, CHANGE_SCHEMA) if log or base is None else None
    if base is not None:
        changes = base if changes is None else changes.joined_by(base)
    assert changes is not None
    grouped = changes.grouped("part", tasks, ["key", "lsn", "number"])
    return grouped.mapped(settled, ROW_SCHEMA).kept()


def settled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The last change of each key; batches are in order of key, LSN and number."""
    return as_rows(_last_of_each(rows_of(batches)))


def _last_of_each(changes: Iterator[tuple[bytes, bytes | None]]) -> Iterator[Row]:
    last_key, last_cell = b"", None
    for key, cell in changes:
        if key != last_key and last_cell is not None:
            yield last_key, last_cell
        last_key, last_cell = key, cell
    if last_cell is not None:
        yield last_key, last_cell


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bytes, bytes]]:
    """Key and cell of each row."""
    for batch in batches:
        yield from zip(batch.column("key").to_pylist(), batch.column("cell").to_pylist(), strict=True)


def as_rows(rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
    """Rows as batches of `ROW_SCHEMA`."""
    import pyarrow as pa

    for some in in_batches(rows):
        columns = [pa.array([row[index] for row in some], pa.binary()) for index in (0, 1)]
        yield pa.RecordBatch.from_arrays(columns, names=["key", "cell"])


# What tasks tell the driver


def as_told(things: Iterable[msgspec.Struct]) -> Iterator[pa.RecordBatch]:
    """Things for the driver as batches of `TOLD_SCHEMA`."""
    import pyarrow as pa

    for some in in_batches(things):
        yield pa.RecordBatch.from_arrays(
            [pa.array([msgspec.msgpack.encode(one) for one in some], pa.binary())], names=["told"]
        )


def told_by(rows: Rows, kind: type[Told]) -> list[Told]:
    """What the tasks told."""
    return [msgspec.msgpack.decode(data, type=kind) for data in rows.collected().column("told").to_pylist()]


class FirstAbove(msgspec.Struct, frozen=True):
    """Where the first entry above a seq begins, among those of a task."""

    lsn: int


def first_above(work: LogWork) -> Iterator[pa.RecordBatch]:
    """The same, for the driver; nothing when all of them are at or below it."""
    lsn = first_lsn_above(work)
    return as_told([] if lsn is None else [FirstAbove(lsn)])


# Buckets: few, and needed for what is to be seen of objects

Created = Mapping[bytes, BucketVersion]
"""The buckets that are there at a seq, by their names as bytes."""


class BucketRow(msgspec.Struct, frozen=True):
    """A row of a bucket."""

    key: bytes
    cell: bytes


def bucket_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of buckets, for the driver."""
    return as_told(BucketRow(key, cell) for key, cell in rows_of(batches) if key.startswith(BUCKETS))


def buckets_in(rows: Rows) -> Buckets:
    """All buckets that rows tell of."""
    found = sorted((row.key, row.cell) for row in told_by(rows.mapped(bucket_rows, TOLD_SCHEMA), BucketRow))
    buckets = Buckets()
    buckets.load(_Listed(found))
    return buckets


def created_at(buckets: Buckets, seq: int) -> Created:
    """The buckets that are there at a seq."""
    return {name.encode(): version for name, version in buckets.alive(seq)}


class _Listed:
    """Rows that are asked for as those of a tree are."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def scan(self, start: bytes, stop: bytes) -> Iterator[Row]:
        return iter(self._rows)


# Retention


class PackedBodies:
    """Which bodies are in the data of a compaction; asked by tasks."""

    def __init__(self, place: EnginePlace, compaction: Compaction) -> None:
        self._place = place
        self._compaction = compaction
        self._data: CompactedData | None = None

    def has(self, position: int) -> bool:
        """Whether the body at a position of the log is in it."""
        if self._data is None:
            opened = self._place.opened()
            self._data = CompactedData(opened.objects, opened.keys, self._compaction)
        return self._data.find_body(position) is not None


class Retained:
    """Leaves out what a rule lets go; for tasks that have all versions of a name.

    With `below_lsn` only versions go whose value is in a record below it, and with `packed` only those of them whose
    value is not in compacted data either.
    """

    def __init__(
        self,
        horizon: int,
        keep_versions: int,
        created: Created,
        below_lsn: int | None = None,
        packed: PackedBodies | None = None,
    ) -> None:
        self._rule = Rule(horizon, keep_versions, dict(created))
        self._below_lsn = below_lsn
        self._packed = packed

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_rows(self.kept(rows_of(batches)))

    def kept(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows that stay."""
        for _, versions in groupby(rows, key=_name_of):
            name = list(versions)
            gone = {seq for verdict in judged(name, self._rule, _nothing) for seq in verdict.seqs}
            yield from (row for row in name if seq_of(row[0]) not in gone or self._stays(row)) if gone else name

    def _stays(self, row: Row) -> bool:
        """Whether a version stays although the rule lets it go."""
        if self._below_lsn is None:
            return False
        return not is_pointer(row[1]) or self._has_value(decode_cell(row[1]), self._below_lsn)

    def _has_value(self, cell: Cell, below_lsn: int) -> bool:
        return cell.lsn >= below_lsn or (self._packed is not None and self._packed.has(cell.position))


def _name_of(row: Row) -> bytes:
    return row[0][:-SEQ_BYTES]


_nothing: Callable[[bytes], None] = bytes.__len__  # type: ignore[assignment]
