"""Objects of an engine as Arrow record batches.

Invariants
- Bodies are fetched only where data or metadata are asked for; then a batch has about as many as fit into memory well.
- Columns that are not in the schema are neither made nor sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from tidelog.engine.cold import Body
from tidelog.errors import DataError
from tidelog.pipeline.engines.metadata_map import METADATA_TYPE, metadata_array
from tidelog.pipeline.engines.object_bodies import read_bodies
from tidelog.pipeline.engines.object_part import ObjectPart
from tidelog.pipeline.engines.object_rows import ObjectRow, read_object_rows

_FETCHED_TOGETHER_BYTES = 32 << 20
_BODY_COLUMNS = {"metadata", "data"}
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
_OF_ROW: dict[str, Callable[[ObjectRow], Any]] = {
    "bucket": lambda row: row.bucket,
    "key": lambda row: row.key,
    "seq": lambda row: row.seq,
    "order": lambda row: row.cell.order,
    "is_deleted": lambda row: row.cell.is_tombstone,
    "size": lambda row: None if row.cell.is_tombstone else row.cell.size,
    "crc": lambda row: None if row.cell.is_tombstone else row.cell.crc,
}


def read_object_batches(part: ObjectPart, names: list[str], max_rows: int) -> Iterator[pa.RecordBatch]:
    """The objects of a part, with these columns."""
    schema = pa.schema([pa.field(name, OBJECT_TYPES[name]) for name in names])
    needs_bodies = bool(_BODY_COLUMNS.intersection(names))
    for rows in _grouped(read_object_rows(part), max_rows, needs_bodies):
        bodies = read_bodies(part.place, [row.cell for row in rows]) if needs_bodies else []
        arrays = [_array(name, rows, bodies) for name in names]
        if arrays:
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        else:  # a batch without columns has no other way to know how many rows it has
            struct = pa.StructArray.from_buffers(pa.struct([]), len(rows), [None])
            yield pa.RecordBatch.from_struct_array(struct)


def _grouped(rows: Iterator[ObjectRow], max_rows: int, needs_bodies: bool) -> Iterator[list[ObjectRow]]:
    group: list[ObjectRow] = []
    size = 0
    for row in rows:
        if group and (len(group) >= max_rows or (needs_bodies and size + row.cell.size > _FETCHED_TOGETHER_BYTES)):
            yield group
            group, size = [], 0
        group.append(row)
        size += row.cell.size
    if group:
        yield group


def _array(name: str, rows: list[ObjectRow], bodies: list[Body | None]) -> pa.Array:
    if name == "data":
        return pa.array([None if body is None else body[0] for body in bodies], pa.binary())
    if name == "metadata":
        return metadata_array(None if body is None else body[1] for body in bodies)
    values = [_OF_ROW[name](row) for row in rows]
    if name not in ("bucket", "key"):
        return pa.array(values, OBJECT_TYPES[name])
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid as error:
        raise DataError(f"a {name} in the state is not UTF-8") from error
