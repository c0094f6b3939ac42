"""Entries of an engine's log as Arrow record batches, built from the buffers that the extension gathers.

Invariants
- There is no object per row, except where a value is compressed, or its metadata has fractions, lists or maps, and they
  were requested.
- Columns that are not in the schema are neither gathered nor sent.
- Values are checked against the checksum in their record before any of their bytes are returned.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import compute

from tidelog import _native
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.planned_catalog import PlannedCatalog
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.cold.value_store import value_of
from tidelog.engine.wal.operations import PUT_OBJECT, decode_operation
from tidelog.engine.wal.record_header import COPY_OBJECT, REFUSED
from tidelog.engine.wal.replay import (
    WANT_METADATA,
    WANT_NAMES,
    WANT_REASONS,
    WANT_SOURCES,
    WANT_VALUES,
    Chosen,
    EntryColumns,
    LogRange,
    ShippedLog,
    Strings,
    counting,
    gather_entries,
    missing_records,
    packed_ranges,
)
from tidelog.errors import CorruptionError, DataError, NotFoundError
from tidelog.log.frame import Frames
from tidelog.pipeline.location import EngineLocation
from tidelog.store.object_store import ObjectStore

# A part of an engine's log for one task: which LSNs, what counts of them, and where the objects are. Plain data, made
# by the driver and sent to a worker.
#
# Invariants
# - Objects are read where the plan says they are. If one is gone meanwhile (compacted, dropped), the catalog is asked
#   where its records are now, and reading continues at the same LSN.

PART_BYTES = 16 << 20


class LogPart(LogRange, frozen=True, kw_only=True):
    """A range of an engine's log, and the objects that have its records, as far as they are known."""

    place: EngineLocation
    descriptors: tuple[Descriptor, ...] = ()

    def log(self, objects: ObjectStore | None = None, fetchers: Executor | None = None) -> ShippedLog:
        """The log to read it from, in the process that reads; `objects` may stand between it and the store.

        Who reads many parts gives `fetchers` to all of them.
        """
        opened = self.place.opened()
        catalog = PlannedCatalog(self.descriptors, opened.keys, self.place.catalog)
        return ShippedLog(catalog, objects or opened.objects, fetchers or opened.fetchers)


def log_part(
    place: EngineLocation,
    manifest: Manifest,
    start_lsn: int,
    stop_lsn: int,
    *,
    first_seq: int = 0,
    last_seq: int | None = None,
    descriptors: tuple[Descriptor, ...] = (),
) -> LogPart:
    """One part; `last_seq` is the high-water mark by default, and not above it."""
    mark = manifest.high_water_mark
    return LogPart(
        place=place,
        start_lsn=start_lsn,
        stop_lsn=stop_lsn,
        end_lsn=manifest.high_water_lsn + 1,
        first_seq=first_seq,
        last_seq=mark if last_seq is None else min(mark, last_seq),
        dead=packed_ranges(manifest.rolled_back, start_lsn, stop_lsn),
        descriptors=descriptors,
    )


def plan_log(
    catalog: Catalog,
    place: EngineLocation,
    manifest: Manifest,
    start_lsn: int,
    stop_lsn: int | None = None,
    *,
    first_seq: int = 0,
    last_seq: int | None = None,
    part_bytes: int = PART_BYTES,
) -> list[LogPart]:
    """The entries that begin in a range of the log, in parts of about so many bytes; GapError if records are missing.

    Small objects are read together, large ones in several parts.
    """
    end_lsn = manifest.high_water_lsn + 1
    stop = end_lsn if stop_lsn is None else min(stop_lsn, end_lsn)
    if start_lsn >= stop:
        return []
    descriptors = list(catalog.between(start_lsn, stop))
    reached = start_lsn
    for one in descriptors:
        if one.start_offset > reached:
            break
        reached = one.next_offset
    if reached < stop:
        raise missing_records(reached, stop)
    return [
        log_part(place, manifest, first, behind, first_seq=first_seq, last_seq=last_seq, descriptors=group)
        for first, behind, group in cut_log(descriptors, start_lsn, stop, part_bytes)
    ]


def cut_log(
    descriptors: Sequence[Descriptor], start_lsn: int, stop_lsn: int, part_bytes: int
) -> Iterator[tuple[int, int, tuple[Descriptor, ...]]]:
    """Ranges of LSNs of about the same size, with the objects that have them."""
    begin, gathered, group = start_lsn, 0, list[Descriptor]()
    for one in descriptors:
        start, stop = max(one.start_offset, start_lsn), min(one.next_offset, stop_lsn)
        parts = max(1, one.raw_size // part_bytes)
        group.append(one)
        for cut in (start + (stop - start) * part // parts for part in range(1, parts + 1)):
            gathered += one.raw_size // parts
            if gathered >= part_bytes and cut > begin:
                yield begin, cut, tuple(group)
                begin, gathered, group = cut, 0, [one] if cut < stop else []
    if begin < stop_lsn:
        yield begin, stop_lsn, tuple(group)


def objects_of(parts: Iterable[LogPart]) -> list[Descriptor]:
    """The objects that parts of a log are read from, each once."""
    return list({one.start_offset: one for part in parts for one in part.descriptors}.values())


def _chosen(part: LogPart, *, skips_gaps: bool) -> Iterator[Chosen]:
    """The records of a part that count; with `skips_gaps` lost entries are skipped."""
    try:
        yield from counting(part.log(), part, on_gap="skip" if skips_gaps else "raise")
    except CorruptionError:
        raise
    except DataError as error:
        hint = "startingSeq behind the oldest state passes over it; `tidelog pipeline verify --engine` finds damage"
        raise DataError(error.message, operation="read entries", hint=error.hint or hint) from error


# Metadata of objects as Spark has it: map<string, string>, null where there is none to speak of.
#
#     text as it is        numbers and truth values as JSON writes them        bytes in base64        None as null
#
# Invariants
# - No metadata is an empty map; null is for rows that have no value: a deletion, a bucket, a refused entry.
# - Where no row has metadata, nothing is done for any row.


METADATA_TYPE = pa.map_(pa.string(), pa.string())


def as_text(value: object) -> str | None:
    """One value of an object's metadata."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return msgspec.json.encode(value).decode()


def metadata_array(rows: Iterable[dict[str, Any] | None]) -> pa.Array:
    """A map for each row; None is null."""
    ends: list[int | None] = []
    names: list[str] = []
    values: list[str | None] = []
    for metadata in rows:
        ends.append(None if metadata is None else len(names))
        for name, value in (metadata or {}).items():
            names.append(name)
            values.append(as_text(value))
    offsets = pa.array([*ends, len(names)], pa.int32())
    return pa.MapArray.from_arrays(offsets, pa.array(names, pa.string()), pa.array(values, pa.string()))


def empty_metadata_array(has_value: pa.Array) -> pa.Array:
    """An empty map for each row with a value, null for the others."""
    zero = pa.scalar(0, pa.int32())
    offsets = pa.concat_arrays(
        [compute.if_else(has_value, zero, pa.scalar(None, pa.int32())), pa.array([0], pa.int32())]
    )
    return pa.MapArray.from_arrays(offsets, pa.array([], pa.string()), pa.array([], pa.string()))


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

    def __init__(self, columns: EntryColumns, frames: Frames, indexes: bytes, place: EngineLocation) -> None:
        self._place = place
        self.columns = columns
        self.count = columns.count
        self.ops = _numbers(columns.ops, self.count, pa.uint8())
        refused = compute.bit_wise_and(_numbers(columns.flags, self.count, pa.uint8()), pa.scalar(REFUSED, pa.uint8()))
        self.is_refused = compute.not_equal(refused, pa.scalar(0, pa.uint8()))
        self.has_value = compute.and_not(_is(self.ops, PUT_OBJECT), self.is_refused)
        self._frames = frames
        self._indexes = indexes
        self._decoded: list[tuple[bytes, dict[str, Any]] | None] | None = None

    def decoded(self) -> list[tuple[bytes, dict[str, Any]] | None]:
        """Data and metadata of each row; None where there is no value."""
        if self._decoded is None:
            self._decoded = [self._value_of(index) for index in memoryview(self._indexes).cast("I")]
        return self._decoded

    def _value_of(self, index: int) -> tuple[bytes, dict[str, Any]] | None:
        lsn = self._frames.first_offset + index
        record = decode_operation(self._frames.payloads(index, index + 1)[0], lsn)
        if not record.stored_bytes:
            return None
        opened = self._place.opened()
        try:
            return value_of(opened.objects, opened.keys, record, lsn)
        except NotFoundError:  # it had a file of its own, which no version refers to any more
            return None


def read_entry_batches(
    part: LogPart, names: list[str], *, includes_refused: bool, skips_gaps: bool, max_rows: int
) -> Iterator[pa.RecordBatch]:
    """The entries of a part, with these columns."""
    schema = pa.schema([pa.field(name, ENTRY_TYPES[name]) for name in names])
    wanted = 0
    for name in names:
        wanted |= _WANTED.get(name, 0)
    for frames, indexes in _chosen(part, skips_gaps=skips_gaps):
        for columns, taken in gather_entries(frames, indexes, wanted, max_rows, _MAX_BATCH_BYTES):
            batch = _record_batch(_Rows(columns, frames, taken, part.place), schema, includes_refused)
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
        return pa.array([None if value is None else value[0] for value in rows.decoded()], pa.binary())
    values = _strings(rows.columns.values, rows.count, pa.binary())
    return compute.if_else(rows.has_value, values, pa.scalar(None, pa.binary()))


def _metadata(rows: _Rows) -> pa.Array:
    if rows.columns.compressed:
        return metadata_array(None if value is None else value[1] for value in rows.decoded())
    packed = rows.columns.metadata
    if not packed.data:
        return empty_metadata_array(rows.has_value)
    found = _native.metadata_columns(packed.ends, packed.data)
    if found is not None:
        return _map_array(*found, rows.has_value)
    ends = memoryview(packed.ends).cast("i")
    has_value = rows.has_value.to_pylist()
    return metadata_array(
        _unpacked(packed.data[ends[row] : ends[row + 1]], rows, row) if has_value[row] else None
        for row in range(rows.count)
    )


def _map_array(
    ends: bytes, name_ends: bytes, names: bytes, value_ends: bytes, values: bytes, is_there: bytes, has_value: pa.Array
) -> pa.Array:
    """Maps of all rows; those without a value have no entry, and are null."""
    count = len(is_there)
    firsts = _numbers(ends, len(has_value) + 1, pa.int32())
    offsets = compute.if_else(has_value, firsts.slice(0, len(has_value)), pa.scalar(None, pa.int32()))
    texts = _strings(Strings(value_ends, values), count, pa.string())
    known = compute.not_equal(_numbers(is_there, count, pa.uint8()), 0)
    return pa.MapArray.from_arrays(
        pa.concat_arrays([offsets, firsts.slice(len(has_value))]),
        _strings(Strings(name_ends, names), count, pa.string()),
        compute.if_else(known, texts, pa.scalar(None, pa.string())),
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
