"""Which versions of objects are to be seen in a range of keys: the engine's own rule, over rows from the store.

Invariants
- At a seq an object is its newest version that is not after it, if that is no deletion and belongs to the bucket that
  is there: it was put after the bucket's creation (`engine/versions.py`).
- With all versions, everything that is kept and not after the seq is there, newest first, deletions and objects of
  earlier buckets included.
- Rows come in order of bucket, key, newest version first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidelog.engine.cell import TOMBSTONE, Cell, decode_cell
from tidelog.engine.cell_blocks import Row
from tidelog.engine.version_keys import MAX_SEQ, OBJECTS, SEQ_BYTES
from tidelog.errors import DataError
from tidelog.pipeline.engines.object_part import ObjectPart
from tidelog.pipeline.engines.state_rows import merged_rows, rows_of_blocks, rows_of_files, unpacked_rows
from tidelog.tier.object_store import ObjectStore


class ObjectRow(NamedTuple):
    """A version of an object; names in UTF-8."""

    bucket: bytes
    key: bytes
    seq: int
    cell: Cell


def read_object_rows(part: ObjectPart) -> Iterator[ObjectRow]:
    """The objects of a part."""
    rows = merged_rows(_base(part, part.place.opened().objects), unpacked_rows(part.tail))
    return _all_versions(rows, part) if part.all_versions else _seen(rows, part)


def _base(part: ObjectPart, objects: ObjectStore) -> Iterator[Row]:
    if part.state is not None:
        return rows_of_blocks(objects, part.state, part.start, part.stop)
    return rows_of_files(objects, part.files, part.start, part.stop)


def _seen(rows: Iterator[Row], part: ObjectPart) -> Iterator[ObjectRow]:
    created = {bucket.encode(): version for bucket, version in part.created.items()}
    settled = b""
    for tree_key, value in rows:
        prefix = tree_key[:-SEQ_BYTES]
        seq = MAX_SEQ - int.from_bytes(tree_key[-SEQ_BYTES:], "big")
        if prefix == settled or seq > part.seq:
            continue
        settled = prefix
        row = _row(prefix, seq, value)
        if not row.cell.flags & TOMBSTONE and _is_of(created.get(row.bucket), seq, row.cell.order):
            yield row


def _is_of(created: tuple[int, int] | None, seq: int, order: int) -> bool:
    """Whether a version belongs to the bucket that was created then."""
    return created is not None and (seq > created[0] or (seq == created[0] and order >= created[1]))


def _all_versions(rows: Iterator[Row], part: ObjectPart) -> Iterator[ObjectRow]:
    for tree_key, value in rows:
        seq = MAX_SEQ - int.from_bytes(tree_key[-SEQ_BYTES:], "big")
        if seq <= part.seq:
            yield _row(tree_key[:-SEQ_BYTES], seq, value)


def _row(prefix: bytes, seq: int, value: bytes) -> ObjectRow:
    bucket, _, key = prefix[1:-1].partition(b"\0")
    if prefix[:1] != OBJECTS or prefix[-1:] != b"\0" or not bucket or not key:
        raise DataError(f"{prefix!r} is not the key of an object")
    return ObjectRow(bucket, key, seq, decode_cell(value))
