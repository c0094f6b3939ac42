"""Entries of an engine's log as Arrow record batches, made of the buffers that the kernel gathers.

Invariants
- There is no object a row, except where a body is compressed or has metadata, and those were asked for.
- Columns that are not in the schema are neither gathered nor sent.
- Bodies are checked against the checksum in their record before anything of them is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import compute

from tidelog.engine.body import decode_body
from tidelog.engine.entry_columns import (
    WANT_METADATA,
    WANT_NAMES,
    WANT_REASONS,
    WANT_SOURCES,
    WANT_VALUES,
    EntryColumns,
    Strings,
    gather_entries,
)
from tidelog.engine.operation_record import COPY_OBJECT, PUT_OBJECT, decode_operation
from tidelog.engine.record_header import REFUSED
from tidelog.errors import DataError
from tidelog.log.frame import Frames
from tidelog.pipeline.engines.log_part import LogPart
from tidelog.pipeline.engines.log_reader import read_chosen
from tidelog.pipeline.engines.metadata_map import METADATA_TYPE, empty_metadata_array, metadata_array

_MAX_BATCH_BYTES = 8 << 20
_KINDS = ("", "CreateBucket", "DeleteBucket", "DeleteBucket", "PutObject", "DeleteObject", "CopyObject")
_FORCED = 3
_WANTED = {
    "bucket": WANT_NAMES,
    "key": WANT_NAMES,
    "src_bucket": WANT_SOURCES,
    "src_key": WANT_SOURCES,
    "reason": WANT_REASONS,
    "metadata": WANT_METADATA,
    "value": WANT_VALUES,
}
ENTRY_TYPES: dict[str, pa.DataType] = {
    "seq": pa.int64(),
    "order": pa.int32(),
    "lsn": pa.int64(),
    "kind": pa.string(),
    "bucket": pa.string(),
    "key": pa.string(),
    "src_bucket": pa.string(),
    "src_key": pa.string(),
    "is_forced": pa.bool_(),
    "size": pa.int64(),
    "metadata": METADATA_TYPE,
    "timestamp": pa.timestamp("us", tz="UTC"),
    "is_refused": pa.bool_(),
    "reason": pa.string(),
    "value": pa.binary(),
}


class _Rows:
    """Columns of some operations, with the frames that they came from."""

    def __init__(self, columns: EntryColumns, frames: Frames, indexes: bytes) -> None:
        self.columns = columns
        self.count = columns.count
        self.ops = _numbers(columns.ops, self.count, pa.uint8())
        refused = compute.bit_wise_and(_numbers(columns.flags, self.count, pa.uint8()), pa.scalar(REFUSED, pa.uint8()))
        self.is_refused = compute.not_equal(refused, pa.scalar(0, pa.uint8()))
        self.has_body = compute.and_not(_is(self.ops, PUT_OBJECT), self.is_refused)
        self._frames = frames
        self._indexes = indexes
        self._decoded: list[tuple[bytes, dict[str, Any]] | None] | None = None

    def decoded(self) -> list[tuple[bytes, dict[str, Any]] | None]:
        """Data and metadata of each row; None where there is no body."""
        if self._decoded is None:
            self._decoded = [self._body_of(index) for index in memoryview(self._indexes).cast("I")]
        return self._decoded

    def _body_of(self, index: int) -> tuple[bytes, dict[str, Any]] | None:
        lsn = self._frames.first_offset + index
        record = decode_operation(self._frames.payloads(index, index + 1)[0], lsn)
        if not record.stored_bytes:
            return None
        return decode_body(record.stored, record.codec, record.size, record.crc, lsn)


def read_entry_batches(
    part: LogPart, names: list[str], *, includes_refused: bool, skips_gaps: bool, max_rows: int
) -> Iterator[pa.RecordBatch]:
    """The entries of a part, with these columns."""
    schema = pa.schema([pa.field(name, ENTRY_TYPES[name]) for name in names])
    wanted = 0
    for name in names:
        wanted |= _WANTED.get(name, 0)
    for frames, indexes in read_chosen(part, skips_gaps=skips_gaps):
        for columns, taken in gather_entries(frames, indexes, wanted, max_rows, _MAX_BATCH_BYTES):
            batch = _record_batch(_Rows(columns, frames, taken), schema, includes_refused)
            if batch.num_rows:
                yield batch


def _record_batch(rows: _Rows, schema: pa.Schema, includes_refused: bool) -> pa.RecordBatch:
    arrays = [_array(rows, name) for name in schema.names]
    if arrays:
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    else:  # a batch without columns has no other way to know how many rows it has
        struct = pa.StructArray.from_buffers(pa.struct([]), rows.count, [None])
        batch = pa.RecordBatch.from_struct_array(struct)
    return batch if includes_refused else batch.filter(compute.invert(rows.is_refused))


_NUMBERS = {"seq": "seqs", "order": "orders", "lsn": "lsns", "timestamp": "times_us"}
_TEXTS = {"bucket": "buckets", "key": "keys", "src_bucket": "src_buckets", "src_key": "src_keys", "reason": "reasons"}


def _array(rows: _Rows, name: str) -> pa.Array:
    columns, kind = rows.columns, ENTRY_TYPES[name]
    if name in _NUMBERS:
        return _numbers(getattr(columns, _NUMBERS[name]), rows.count, kind)
    if name in _TEXTS:
        return _texts(getattr(columns, _TEXTS[name]), rows.count, name)
    match name:
        case "kind":
            return pa.DictionaryArray.from_arrays(rows.ops.cast(pa.int8()), pa.array(_KINDS)).dictionary_decode()
        case "is_forced":
            return compute.if_else(_is(rows.ops, 2, _FORCED), _is(rows.ops, _FORCED), pa.scalar(None, pa.bool_()))
        case "size":
            sizes = _numbers(columns.sizes, rows.count, kind)
            return compute.if_else(_is(rows.ops, PUT_OBJECT, COPY_OBJECT), sizes, pa.scalar(None, kind))
        case "is_refused":
            return rows.is_refused
        case "metadata":
            return _metadata(rows)
        case _:
            return _values(rows)


def _values(rows: _Rows) -> pa.Array:
    if rows.columns.compressed:
        return pa.array([None if body is None else body[0] for body in rows.decoded()], pa.binary())
    values = _strings(rows.columns.values, rows.count, pa.binary())
    return compute.if_else(rows.has_body, values, pa.scalar(None, pa.binary()))


def _metadata(rows: _Rows) -> pa.Array:
    if rows.columns.compressed:
        return metadata_array(None if body is None else body[1] for body in rows.decoded())
    packed = rows.columns.metadata
    if not packed.data:
        return empty_metadata_array(rows.has_body)
    ends = memoryview(packed.ends).cast("i")
    has_body = rows.has_body.to_pylist()
    return metadata_array(
        _unpacked(packed.data[ends[row] : ends[row + 1]], rows, row) if has_body[row] else None
        for row in range(rows.count)
    )


def _unpacked(data: bytes, rows: _Rows, row: int) -> dict[str, Any]:
    if not data:
        return {}
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        lsn = memoryview(rows.columns.lsns).cast("q")[row]
        raise DataError(f"the metadata of the object cannot be read, LSN {lsn}: {error}") from error


def _is(ops: pa.Array, *codes: int) -> pa.Array:
    return compute.is_in(ops, pa.array(codes, pa.uint8()))


def _numbers(data: bytes, count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def _strings(column: Strings, count: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(column.ends), pa.py_buffer(column.data)])


def _texts(column: Strings, count: int, name: str) -> pa.Array:
    """Names as text, null where there is none; bytes that are no text are damage."""
    texts = _strings(column, count, pa.string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"a {name} in the log is not UTF-8") from error
    if name == "bucket":
        return texts
    return compute.if_else(compute.equal(compute.binary_length(texts), 0), pa.scalar(None, pa.string()), texts)
