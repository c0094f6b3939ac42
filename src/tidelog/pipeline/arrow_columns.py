"""Arrow record batches of a topic, made of the buffers that `topics.columns` gathers: no copy, and no object a row.

Invariants
- A batch has the columns of the schema it is given, in its order, and the types of `arrow_schema`: what Spark expects.
- As in Spark's Kafka source, `headers` is null where a message has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import pyarrow as pa

from tidelog.errors import InputError, InternalError
from tidelog.log.frame_python import Buffer
from tidelog.topics.columns import Columns, HeadersColumn, VarColumn

_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": pa.list_(pa.field("element", _HEADER)),
}

_Column = TypeVar("_Column")


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of these columns of a topic, in this order."""
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
        raise InputError(f"a topic has no column {unknown[0]}", hint=f"Columns are {', '.join(_TYPES)}")
    return pa.schema([pa.field(name, _TYPES[name]) for name in names])


def record_batch(columns: Columns, schema: pa.Schema, topic: str) -> pa.RecordBatch:
    """The rows as a batch with the columns of the schema; each of them must have been gathered."""
    arrays = [_array(columns, name, topic) for name in schema.names]
    if not arrays:  # a batch without columns has no other way to know how many rows it has
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), columns.count, [None]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(columns: Columns, name: str, topic: str) -> pa.Array:
    count, kind = columns.count, _TYPES[name]
    match name:
        case "key":
            return _bytes(_gathered(columns.keys, name), count, kind)
        case "value":
            return _bytes(_gathered(columns.values, name), count, kind)
        case "offset":
            return _numbers(_gathered(columns.offsets, name), count, kind)
        case "timestamp":
            return _numbers(_gathered(columns.timestamps, name), count, kind)
        case "headers":
            return _headers(_gathered(columns.headers, name), count)
        case "topic":
            return _constant(topic, count, kind)
        case _:  # partition and timestampType
            return _constant(0, count, kind)


@lru_cache(maxsize=16)
def _constant(content: str | int, count: int, kind: pa.DataType) -> pa.Array:
    """Nearly all batches have the same number of rows, so the one array serves many of them: arrays never change."""
    return pa.repeat(pa.scalar(content, kind), count)


def _gathered(column: _Column | None, name: str) -> _Column:
    if column is None:
        raise InternalError(f"the column {name} was not gathered")
    return column


def _bytes(column: VarColumn, count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [_optional(column.validity), _buffer(column.ends), _buffer(column.data)])


def _numbers(numbers: bytes, count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, _buffer(numbers)])


def _headers(column: HeadersColumn, count: int) -> pa.Array:
    total = len(column.names.ends) // 4 - 1
    fields = [_bytes(column.names, total, pa.string()), _bytes(column.contents, total, pa.binary())]
    headers = pa.Array.from_buffers(_HEADER, total, [None], children=fields)
    buffers = [_optional(column.validity), _buffer(column.ends)]
    return pa.Array.from_buffers(_TYPES["headers"], count, buffers, children=[headers])


def _buffer(content: Buffer) -> pa.Buffer:
    return pa.py_buffer(content)


def _optional(content: Buffer | None) -> pa.Buffer | None:
    return None if content is None else pa.py_buffer(content)
