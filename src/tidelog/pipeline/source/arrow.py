"""Arrow record batches of a topic, built from the buffers that `topics.columns` gathers, and frames of their rows.

Invariants
- No column is copied on its way into or out of Arrow, and there is no object per row.
- A batch has the columns of the given schema, in its order, and the types of `arrow_schema`: what Spark expects.
- As in Spark's Kafka source, `headers` is null where a message has none, and a null `value`, of a message or of a
  header, is one that the message has not.
- As in Spark's Kafka sink, rows need a column `value`, and may have `key` and `headers`. Keys and values are binary or
  text (its UTF-8), headers are lists of `struct<key: string, value: binary>`. Other columns are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import pyarrow as pa
from pyarrow import types

from tidelog.errors import InputError, InternalError
from tidelog.log.frame import MAX_PAYLOAD_BYTES, Buffer, Frames
from tidelog.topics.columns import Columns, HeadersColumn, TimesColumn, VarColumn, encode_columns

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


# ---- columns to batches ----


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of these columns of a topic, in this order."""
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
        raise InputError(f"a topic has no column {unknown[0]}", hint=f"Columns are {', '.join(_TYPES)}")
    return pa.schema([pa.field(name, _TYPES[name]) for name in names])


def record_batch(columns: Columns, schema: pa.Schema, topic: str, partition: int = 0) -> pa.RecordBatch:
    """The rows as a batch with the columns of the schema; each of them must have been gathered."""
    arrays = [_array(columns, name, topic, partition) for name in schema.names]
    if not arrays:  # a batch without columns has no other way to know how many rows it has
        return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), columns.count, [None]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(columns: Columns, name: str, topic: str, partition: int) -> pa.Array:
    count, kind = columns.count, _TYPES[name]
    match name:
        case "key":
            return _bytes_array(_gathered(columns.keys, name), count, kind)
        case "value":
            return _bytes_array(_gathered(columns.values, name), count, kind)
        case "offset":
            return _numbers_array(_gathered(columns.offsets, name), count, kind)
        case "timestamp":
            return _numbers_array(_gathered(columns.timestamps, name), count, kind)
        case "headers":
            return _headers_array(_gathered(columns.headers, name), count)
        case "topic":
            return _constant(topic, count, kind)
        case "partition":
            return _constant(partition, count, kind)
        case _:  # timestampType
            return _constant(0, count, kind)


@lru_cache(maxsize=16)
def _constant(content: str | int, count: int, kind: pa.DataType) -> pa.Array:
    """Nearly all batches have the same number of rows, so the one array serves many of them: arrays never change."""
    return pa.repeat(pa.scalar(content, kind), count)


def _gathered(column: _Column | None, name: str) -> _Column:
    if column is None:
        raise InternalError(f"the column {name} was not gathered")
    return column


def _bytes_array(column: VarColumn, count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [_optional(column.validity), _buffer(column.ends), _buffer(column.data)])


def _numbers_array(numbers: bytes, count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, _buffer(numbers)])


def _headers_array(column: HeadersColumn, count: int) -> pa.Array:
    total = len(column.names.ends) // 4 - 1
    fields = [_bytes_array(column.names, total, pa.string()), _bytes_array(column.contents, total, pa.binary())]
    headers = pa.Array.from_buffers(_HEADER, total, [None], children=fields)
    buffers = [_optional(column.validity), _buffer(column.ends)]
    return pa.Array.from_buffers(_TYPES["headers"], count, buffers, children=[headers])


def _buffer(content: Buffer) -> pa.Buffer:
    return pa.py_buffer(content)


def _optional(content: Buffer | None) -> pa.Buffer | None:
    return None if content is None else pa.py_buffer(content)


# ---- rows to frames ----


def frames_of(
    batch: pa.RecordBatch,
    first_offset: int,
    timestamp_us: int,
    *,
    keeps_timestamps: bool = False,
    max_message_bytes: int = MAX_PAYLOAD_BYTES,
) -> Frames:
    """The rows as frames, numbered from `first_offset`; InputError names the row or column that cannot become one.

    All messages get `timestamp_us`; with `keeps_timestamps`, those that have one in a column `timestamp` keep it.
    """
    values = bytes_column(batch, "value")
    if values is None:
        raise InputError("there is no column value", hint="Name a column of binary or text so: it becomes the message")
    return encode_columns(
        first_offset,
        batch.num_rows,
        values,
        keys=bytes_column(batch, "key"),
        headers=_headers_column(batch),
        timestamps=_times_column(batch) if keeps_timestamps else None,
        timestamp_us=timestamp_us,
        max_message_bytes=max_message_bytes,
    )


def _find(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """The one column of that name; None where there is none, or where it holds nothing at all."""
    found = batch.schema.get_all_field_indices(name)
    if len(found) > 1:
        raise InputError(f"there is more than one column {name}")
    array = batch.column(found[0]) if found else None
    return None if array is None or (types.is_null(array.type) and name != "value") else array


def bytes_column(batch: pa.RecordBatch, name: str) -> VarColumn | None:
    """A column of binary or text by its name; None where there is none, InputError where it is of another type."""
    array = _find(batch, name)
    return None if array is None else _column_of(array, name)


def _column_of(array: pa.Array, name: str) -> VarColumn:
    kind = array.type
    is_large = types.is_large_binary(kind) or types.is_large_string(kind)
    if not (is_large or types.is_binary(kind) or types.is_string(kind)):
        raise InputError(f"the column {name} is of the type {kind}", hint="Cast it to binary or string")
    validity, ends, data = array.buffers()
    return VarColumn(validity, _filled(ends), _filled(data), array.offset, 8 if is_large else 4)


def _headers_column(batch: pa.RecordBatch) -> HeadersColumn | None:
    array = _find(batch, "headers")
    if array is None:
        return None
    kind = array.type
    is_large = types.is_large_list(kind)
    if not (is_large or types.is_list(kind)) or not _is_header(kind.value_type):
        raise InputError(
            f"the column headers is of the type {kind}",
            hint="Make it an array of structs with the fields key (string) and value (binary)",
        )
    validity, ends = array.buffers()[:2]
    fields = array.values.flatten()  # a header that is null as a whole has neither a name nor a value
    names, contents = (fields[kind.value_type.get_field_index(name)] for name in ("key", "value"))
    columns = _column_of(names, "headers.key"), _column_of(contents, "headers.value")
    return HeadersColumn(validity, _filled(ends), *columns, array.offset, 8 if is_large else 4)


def _is_header(kind: pa.DataType) -> bool:
    return bool(types.is_struct(kind)) and {field.name for field in kind} == {"key", "value"}


def _times_column(batch: pa.RecordBatch) -> TimesColumn | None:
    array = _find(batch, "timestamp")
    if array is None:
        return None
    kind = array.type
    if not types.is_timestamp(kind) or kind.unit != "us" or kind.tz is None:
        raise InputError(f"the column timestamp is of the type {kind}", hint="Cast it to timestamp")
    validity, numbers = array.buffers()
    return TimesColumn(validity, _filled(numbers), array.offset)


def _filled(buffer: pa.Buffer | None) -> pa.Buffer:
    """An array without rows may come without buffers."""
    return pa.py_buffer(b"") if buffer is None else buffer
