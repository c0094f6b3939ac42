"""A task's change data: versions of objects become rows with what was there before and after.

    rows of the store -> versions, newest first -> those of the range and the newest before it -> values -> rows

Invariants
- A task has all versions of what it has. Rows of one object come one after the other, so what is before a version is
  the next row of the same object.
- A bucket that loses all that is in it deletes each of its objects, though no version says so: a row is put in for it.
- Of what does not change in the range no value is read, and of what does nothing older than the version before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import compute

from tidelog.engine.mvcc.cells import INLINE, TOMBSTONE, Cell
from tidelog.engine.mvcc.versions import VersionColumns, VersionLook
from tidelog.engine.sst.block import joined
from tidelog.pipeline.source.object_batches import (
    OBJECT_TYPES,
    ObjectPart,
    column_array,
    merged_rows,
    read_values,
    value_array,
    value_groups,
)

_ROW_BYTES = 1 << 20
_FIELDS = ("seq", "size", "crc", "metadata", "data")
_OBJECT = pa.struct([pa.field(name, OBJECT_TYPES[name]) for name in _FIELDS])
CHANGE_TYPES: dict[str, pa.DataType] = {
    "bucket": pa.string(),
    "key": pa.string(),
    "seq": pa.int64(),
    "order": pa.int32(),
    "change": pa.string(),
    "before": _OBJECT,
    "after": _OBJECT,
}
# How a cell says where its value is, besides what is a column of the object.
_PLACE = {"flags": pa.uint8(), "codec": pa.uint8(), "lsn": pa.uint64(), "position": pa.uint64(), "stored": pa.uint32()}
_ROWS = pa.schema(
    [
        *(pa.field(name, OBJECT_TYPES[name]) for name in ("bucket", "key", "seq", "order", "size", "crc")),
        *(pa.field(name, kind) for name, kind in _PLACE.items()),
        pa.field("inline", pa.binary()),
    ]
)
_NEWEST_FIRST = [("bucket", "ascending"), ("key", "ascending"), ("seq", "descending"), ("order", "descending")]


class ChangePart(msgspec.Struct, frozen=True, kw_only=True):
    """A range of keys for one task. `emptied` has (bucket, seq, order) where one lost all that was in it."""

    objects: ObjectPart
    first_seq: int
    emptied: tuple[tuple[str, int, int], ...] = ()
    newest_only: bool = False
    with_metadata: bool = True
    with_data: bool = False


def read_change_batches(part: ChangePart, names: Sequence[str], max_rows: int) -> Iterator[pa.RecordBatch]:
    """The changes of a part, with these columns."""
    for rows in _whole_objects(part.objects):
        wanted = _of_range(_with_emptied(rows, part), part)
        for batch in _changes(wanted, part):
            found = batch.select(list(names))
            yield from (found.slice(start, max_rows) for start in range(0, found.num_rows, max_rows))


# Versions


def _whole_objects(part: ObjectPart) -> Iterator[pa.RecordBatch]:
    """The versions, some at a time, those of one object always together."""
    look = VersionLook(part.seq, part.created, start=part.start, stop=part.stop, all_versions=True)
    held = _ROWS.empty_table()
    for raw in joined((one.raw for one in merged_rows(part.place.opened().objects, part.files, part.tail)), _ROW_BYTES):
        found = _one_batch(pa.concat_tables([held, pa.Table.from_batches([_versions(look.gather(raw))])]))
        if found.num_rows:
            begun = compute.indices_nonzero(_are_first(found))[-1].as_py()
            yield found.slice(0, begun)
            found = found.slice(begun)
        held = pa.Table.from_batches([found])
    yield _one_batch(held)


def _versions(columns: VersionColumns) -> pa.RecordBatch:
    count = columns.count
    places = (columns.flags, columns.codecs, columns.lsns, columns.positions, columns.stored_bytes)
    return pa.RecordBatch.from_arrays(
        [
            *(column_array(columns, name) for name in ("bucket", "key", "seq", "order", "size", "crc")),
            *(
                pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])
                for kind, data in zip(_PLACE.values(), places, strict=True)
            ),
            pa.Array.from_buffers(
                pa.binary(), count, [None, pa.py_buffer(columns.inline.ends), pa.py_buffer(columns.inline.data)]
            ),
        ],
        schema=_ROWS,
    )


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    whole = rows.combine_chunks().to_batches()
    return whole[0] if whole else pa.RecordBatch.from_pylist([], schema=rows.schema)


def _are_first(rows: pa.RecordBatch) -> pa.BooleanArray:
    """Whether each row is the first of its object."""
    if not rows.num_rows:
        return pa.array([], pa.bool_())
    bucket, key = rows.column("bucket"), rows.column("key")
    differs = compute.or_(
        compute.not_equal(bucket.slice(1), bucket.slice(0, rows.num_rows - 1)),
        compute.not_equal(key.slice(1), key.slice(0, rows.num_rows - 1)),
    )
    return pa.concat_arrays([pa.array([True]), differs])


def _with_emptied(rows: pa.RecordBatch, part: ChangePart) -> pa.RecordBatch:
    """With a deletion for each object of a bucket that lost all that was in it."""
    events = part.emptied
    buckets = pa.array(sorted({bucket for bucket, _, _ in events}), pa.string())
    is_concerned = compute.and_(_are_first(rows), compute.is_in(rows.column("bucket"), value_set=buckets))
    objects = rows.filter(is_concerned).select(["bucket", "key"])
    if not objects.num_rows:
        return rows
    columns = [pa.array([one[at] for one in events], _ROWS.types[index]) for at, index in ((0, 0), (1, 2), (2, 3))]
    at = pa.Table.from_arrays(columns, names=["bucket", "seq", "order"])
    deleted = pa.Table.from_batches([objects]).join(at, "bucket", join_type="inner")
    count = deleted.num_rows
    filled = {
        name: deleted.column(name) if name in deleted.column_names else pa.nulls(count, kind)
        for name, kind in zip(_ROWS.names, _ROWS.types, strict=True)
    }
    filled |= {name: pa.repeat(pa.scalar(0, kind), count) for name, kind in _PLACE.items()}
    filled["flags"] = pa.repeat(pa.scalar(TOMBSTONE, _PLACE["flags"]), count)
    both = pa.concat_tables([pa.Table.from_batches([rows]), pa.table(filled, schema=_ROWS)])
    return _one_batch(both.sort_by(_NEWEST_FIRST))


def _of_range(rows: pa.RecordBatch, part: ChangePart) -> pa.RecordBatch:
    """The versions of the range, and of each object that has any the newest before it."""
    are_first, are_old = _are_first(rows), compute.less(rows.column("seq"), part.first_seq)
    if not rows.num_rows:
        return rows
    behind_old = pa.concat_arrays([pa.array([False]), are_old.slice(0, rows.num_rows - 1)])
    before = compute.and_(are_old, compute.invert(compute.or_(are_first, behind_old)))
    of_range = compute.invert(are_old)
    if part.newest_only:
        of_range = compute.and_(of_range, are_first)
    return rows.filter(compute.or_(of_range, before))


# Before and after


def _changes(rows: pa.RecordBatch, part: ChangePart) -> Iterator[pa.RecordBatch]:
    needs_values = part.with_metadata or part.with_data
    cells = _cells(rows) if needs_values else []
    groups = value_groups(cells) if needs_values else iter([(0, rows.num_rows)])
    for start, stop in groups:
        # What is before the last one of a group is the first one of the next.
        piece = rows.slice(start, stop + 1 - start)
        values = read_values(part.objects.place, cells[start : stop + 1]) if needs_values else None
        yield _before_and_after(piece, _objects(piece, values, part), stop - start, part.first_seq)


def _cells(rows: pa.RecordBatch) -> list[Cell]:
    """Where the values are; a deletion has none."""
    names = ("flags", "order", "size", "crc", "codec", "lsn", "position", "stored", "inline")
    found: Any = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
    return [
        Cell(flags, order, size or 0, crc or 0, codec, lsn, position, *_stored(flags, stored, inline))
        for flags, order, size, crc, codec, lsn, position, stored, inline in found
    ]


def _stored(flags: int, stored_bytes: int, inline: bytes) -> tuple[int, bytes | None]:
    return (len(inline), inline) if flags == INLINE else (stored_bytes, None)


def _objects(rows: pa.RecordBatch, values: Sequence[Any] | None, part: ChangePart) -> pa.StructArray:
    """Each version as one value; null for a deletion."""
    wanted = {"metadata": part.with_metadata, "data": part.with_data}
    arrays = [
        value_array(name, values)
        if values is not None and wanted.get(name)
        else pa.nulls(rows.num_rows, OBJECT_TYPES[name])
        if name in wanted
        else rows.column(name)
        for name in _FIELDS
    ]
    are_deleted = compute.equal(rows.column("flags"), pa.scalar(TOMBSTONE, pa.uint8()))
    return pa.StructArray.from_arrays(arrays, fields=list(_OBJECT), mask=are_deleted)


def _before_and_after(rows: pa.RecordBatch, after: pa.StructArray, count: int, first_seq: int) -> pa.RecordBatch:
    """The first rows as changes; what is behind them is what was before the last one."""
    are_last = pa.concat_arrays([_are_first(rows).slice(1), pa.array([True])])
    behind = pa.concat_arrays([after.slice(1), pa.nulls(1, _OBJECT)])
    before = compute.if_else(are_last, pa.scalar(None, _OBJECT), behind)
    was_there, is_there = before.is_valid(), after.is_valid()
    change = compute.if_else(was_there, compute.if_else(is_there, "update", "delete"), "insert")
    columns = [*(rows.column(name) for name in ("bucket", "key", "seq", "order")), change, before, after]
    made = pa.RecordBatch.from_arrays(columns, schema=pa.schema([*CHANGE_TYPES.items()]))
    are_changes = compute.and_(compute.greater_equal(rows.column("seq"), first_seq), compute.or_(was_there, is_there))
    return made.slice(0, count).filter(are_changes.slice(0, count))
