"""Objects of an engine as Arrow record batches, made of the buffers that the kernel gathers.

Invariants
- There is no object a row, except where bodies are asked for: of those many are fetched together, in the order in which
  the log has them.
- Columns that are not in the schema are neither made nor sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyarrow import compute

from tidelog.engine.cell import TOMBSTONE, Cell
from tidelog.engine.cold import Body
from tidelog.engine.entry_columns import Strings
from tidelog.engine.restore_runs import RawRows
from tidelog.engine.version_columns import VersionColumns, VersionLook
from tidelog.errors import DataError
from tidelog.pipeline.engines.metadata_map import METADATA_TYPE, metadata_array
from tidelog.pipeline.engines.object_bodies import read_bodies
from tidelog.pipeline.engines.object_part import ObjectPart
from tidelog.pipeline.engines.state_rows import merged_rows

_FETCHED_TOGETHER_BYTES = 64 << 20
_ROW_BYTES = 1 << 20
_ROW_BYTES_WITH_BODIES = 8 << 20
BODY_COLUMNS = {"metadata", "data"}
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
    needs_bodies = bool(BODY_COLUMNS.intersection(names))
    look = VersionLook(part.seq, part.created, start=part.start, stop=part.stop, all_versions=part.all_versions)
    for raw in _joined(merged_rows(part.place.opened().objects, part.files, part.tail), needs_bodies):
        columns = look.gather(raw)
        batch = _whole_batch(columns, schema)
        groups = _with_bodies(batch, list(columns.cells()), part) if needs_bodies else iter((batch,))
        for group in groups:
            yield from (group.slice(start, max_rows) for start in range(0, group.num_rows, max_rows))


def _joined(rows: Iterable[RawRows], needs_bodies: bool) -> Iterator[bytes]:
    """Rows of several blocks together: many make good batches, and of many bodies more lie near each other."""
    waiting: list[bytes] = []
    size, enough = 0, _ROW_BYTES_WITH_BODIES if needs_bodies else _ROW_BYTES
    for raw, _ in rows:
        waiting.append(raw)
        size += len(raw)
        if size >= enough:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _whole_batch(columns: VersionColumns, schema: pa.Schema) -> pa.RecordBatch:
    """All rows of some columns; those of the bodies stay null here."""
    arrays = [_array(columns, name) for name in schema.names]
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    # A batch without columns has no other way to know how many rows it has.
    return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), columns.count, [None]))


def _with_bodies(batch: pa.RecordBatch, cells: list[Cell], part: ObjectPart) -> Iterator[pa.RecordBatch]:
    """The rows with their bodies, as many at a time as fit into memory well."""
    for start, stop in _cuts(cells):
        bodies = read_bodies(part.place, cells[start:stop])
        piece = batch.slice(start, stop - start)
        arrays = [
            _of_bodies(name, bodies) if name in BODY_COLUMNS else piece.column(name) for name in batch.schema.names
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _cuts(cells: list[Cell]) -> Iterator[tuple[int, int]]:
    start = size = 0
    for at, cell in enumerate(cells):
        if at > start and size + cell.size > _FETCHED_TOGETHER_BYTES:
            yield start, at
            start, size = at, 0
        size += cell.size
    if start < len(cells):
        yield start, len(cells)


def _of_bodies(name: str, bodies: list[Body | None]) -> pa.Array:
    if name == "data":
        return pa.array([None if body is None else body[0] for body in bodies], pa.binary())
    return metadata_array(None if body is None else body[1] for body in bodies)


def _array(columns: VersionColumns, name: str) -> pa.Array:
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
