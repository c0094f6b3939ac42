"""Objects of an engine as Arrow record batches, made of the buffers that the extension gathers.

Invariants
- There is no object a row, except where values are asked for: of those many are fetched together, in the order in which
  the log has them.
- Columns that are not in the schema are neither made nor sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec
import pyarrow as pa
from pyarrow import compute

from tidelog._native import check_rows
from tidelog.engine.cold.reader import ColdReader, Value
from tidelog.engine.mvcc.cells import TOMBSTONE, Cell
from tidelog.engine.mvcc.versions import VersionColumns, VersionLook
from tidelog.engine.recovery.sorted_runs import RawRows, merge_newest_first
from tidelog.engine.sst.block import (
    HEADER_BYTES,
    TARGET_BLOCK_BYTES,
    block_bytes,
    count_of,
    decode_block,
    encode_packed_blocks,
    joined,
)
from tidelog.engine.sst.sstable import BlockHandle, read_row_blocks
from tidelog.engine.wal.replay import Strings
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entry_batches import METADATA_TYPE, metadata_array
from tidelog.pipeline.source.log_changes import packed_rows
from tidelog.store.object_store import ObjectStore

_CACHE_BYTES = 64 << 20
_KEPT_READERS = 4


def read_values(place: EngineLocation, cells: Sequence[Cell]) -> list[Value | None]:
    """Data and metadata for each cell; None for a deletion."""
    return _reader(place).read_many(cells)


@lru_cache(_KEPT_READERS)
def _reader(place: EngineLocation) -> ColdReader:
    """Opened in the process that reads, and kept for its next task."""
    return ColdReader(place.catalog(), place.opened().objects, _CACHE_BYTES)


# A part of an engine's objects for one task: a range of keys, and where their rows and values are.
#
# Plain data, made by the driver and sent to a worker.
#
# Invariants
# - A range ends between two names, never between versions of one: a task sees all versions of what it has.
# - Rows come from blocks of the sorted files of a snapshot or a compaction, and from `tail`, what the log behind it
#   changed: that wins.


class RowBlocks(msgspec.Struct, frozen=True):
    """Blocks of a sorted file, side by side."""

    key: str
    blocks: tuple[BlockHandle, ...]

    def between(self, start: bytes, stop: bytes) -> RowBlocks:
        """Those that may have rows of a range of keys."""
        found = tuple(one for one in self.blocks if one.last_key >= start and one.first_key < stop)
        return RowBlocks(self.key, found)


class ObjectPart(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the tree from `start` up to `stop` (exclusive), as of `seq`.

    `created` has the creation (seq, order) of every bucket that is there at the seq; `tail` are blocks of rows.
    """

    place: EngineLocation
    seq: int
    start: bytes
    stop: bytes
    all_versions: bool = False
    created: dict[str, tuple[int, int]] = {}
    files: tuple[RowBlocks, ...] = ()
    tail: bytes = b""


# Rows of an engine's state as they are in the store, by ranges of keys, and the changes of the log after it.
#
# Invariants
# - Rows come in order of key, many at a time and without an object for each. A row of the tail overrides the
#   snapshot's; one without a value removes the key.
# - Blocks are returned whole: around the rows of a range there may be others.
# - Every block is compared with its checksum and with its footer entry. Damage is named by file and byte.


_FASTEST_LEVEL = 1


def merged_rows(objects: ObjectStore, files: Sequence[RowBlocks], tail: bytes) -> Iterator[RawRows]:
    """Keys and cells: those of the files, which are in order, changed by those of the tail."""
    return merge_newest_first([(_unpacked(tail), False), (_stored(objects, files), True)])


def packed_tail(keys: pa.Array, cells: pa.Array) -> bytes:
    """Rows on their way to a task, compressed; one that is removed has no cell."""
    packed = packed_rows(keys, cells, TARGET_BLOCK_BYTES)
    return b"".join(block.data for block in encode_packed_blocks(packed, _FASTEST_LEVEL))


def _unpacked(data: bytes) -> Iterator[RawRows]:
    view, at, last_key = memoryview(data), 0, b""
    while at < len(view):
        block = view[at : at + block_bytes(view[at : at + HEADER_BYTES])]
        raw, count = decode_block(block), count_of(block)
        last_key = check_rows(raw, count, last_key, False)
        yield RawRows(raw, count)
        at += len(block)


def _stored(objects: ObjectStore, files: Sequence[RowBlocks]) -> Iterator[RawRows]:
    for file in files:
        try:
            for block in read_row_blocks(objects, file.key, file.blocks):
                yield RawRows(block.raw, block.place.rows)
        except NotFoundError as error:
            raise NotFoundError(
                f"{file.key} is not there any more: a newer state took its place while it was read",
                operation="read objects",
                hint="Run the query again; the option pinSeconds keeps a state for a while",
            ) from error


_FETCHED_TOGETHER_BYTES = 64 << 20
_ROW_BYTES = 1 << 20
_ROW_BYTES_WITH_VALUES = 8 << 20
VALUE_COLUMNS = {"metadata", "data"}
OBJECT_TYPES: dict[str, pa.DataType] = {
    "bucket": pa.string(),
    "key": pa.string(),
    "seq": pa.int64(),
    "order": pa.int32(),
    "is_deleted": pa.bool_(),
    "size": pa.int64(),
    "crc": pa.int64(),
    "metadata": METADATA_TYPE,
    "data": pa.binary(),
}


def read_object_batches(part: ObjectPart, names: list[str], max_rows: int) -> Iterator[pa.RecordBatch]:
    """The objects of a part, with these columns."""
    schema = pa.schema([pa.field(name, OBJECT_TYPES[name]) for name in names])
    needs_values = bool(VALUE_COLUMNS.intersection(names))
    look = VersionLook(part.seq, part.created, start=part.start, stop=part.stop, all_versions=part.all_versions)
    rows = (one.raw for one in merged_rows(part.place.opened().objects, part.files, part.tail))
    # Many rows make good batches, and of many values more lie near each other.
    for raw in joined(rows, _ROW_BYTES_WITH_VALUES if needs_values else _ROW_BYTES):
        columns = look.gather(raw)
        batch = _whole_batch(columns, schema)
        groups = _with_values(batch, list(columns.cells()), part) if needs_values else iter((batch,))
        for group in groups:
            yield from (group.slice(start, max_rows) for start in range(0, group.num_rows, max_rows))


def _whole_batch(columns: VersionColumns, schema: pa.Schema) -> pa.RecordBatch:
    """All rows of some columns; those of the values stay null here."""
    arrays = [column_array(columns, name) for name in schema.names]
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    # A batch without columns has no other way to know how many rows it has.
    return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), columns.count, [None]))


def _with_values(batch: pa.RecordBatch, cells: list[Cell], part: ObjectPart) -> Iterator[pa.RecordBatch]:
    """The rows with their values, as many at a time as fit into memory well."""
    for start, stop in value_groups(cells):
        values = read_values(part.place, cells[start:stop])
        piece = batch.slice(start, stop - start)
        arrays = [
            value_array(name, values) if name in VALUE_COLUMNS else piece.column(name) for name in batch.schema.names
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def value_groups(cells: Sequence[Cell]) -> Iterator[tuple[int, int]]:
    """Ranges of cells whose values fit into memory well."""
    start = size = 0
    for at, cell in enumerate(cells):
        if at > start and size + cell.size > _FETCHED_TOGETHER_BYTES:
            yield start, at
            start, size = at, 0
        size += cell.size
    if start < len(cells):
        yield start, len(cells)


def value_array(name: str, values: Sequence[Value | None]) -> pa.Array:
    """A column of the values that were read."""
    if name == "data":
        return pa.array([None if value is None else value[0] for value in values], pa.binary())
    return metadata_array(None if value is None else value[1] for value in values)


def column_array(columns: VersionColumns, name: str) -> pa.Array:
    """A column as Arrow has it; those of values are null."""
    count = columns.count
    match name:
        case "bucket":
            return _texts(columns.buckets, count, name)
        case "key":
            return _texts(columns.keys, count, name)
        case "seq":
            return _numbers(columns.seqs, count, pa.int64())
        case "order":
            return _numbers(columns.orders, count, pa.int32())
        case "is_deleted":
            return _is_deleted(columns)
        case "size":
            return _unless_deleted(columns, _numbers(columns.sizes, count, pa.int64()))
        case "crc":
            return _unless_deleted(columns, _numbers(columns.crcs, count, pa.uint32()).cast(pa.int64()))
        case _:
            return pa.nulls(count, OBJECT_TYPES[name])


def _is_deleted(columns: VersionColumns) -> pa.Array:
    return compute.equal(_numbers(columns.flags, columns.count, pa.uint8()), pa.scalar(TOMBSTONE, pa.uint8()))


def _unless_deleted(columns: VersionColumns, values: pa.Array) -> pa.Array:
    return compute.if_else(_is_deleted(columns), pa.scalar(None, values.type), values)


def _numbers(data: bytes, count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def _texts(column: Strings, count: int, name: str) -> pa.Array:
    texts = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(column.ends), pa.py_buffer(column.data)])
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"a {name} in the state is not UTF-8") from error
    return texts
