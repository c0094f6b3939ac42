"""The oracle of rows of the version index as columns: the same answers as `native/entries_versions.h`, slower.

Invariants
- At a seq an object is its newest version that is not after it, if that is no deletion and belongs to the bucket that
  is there: it was put after the bucket's creation. With all versions, everything that is not after the seq is there.
- Bytes are hostile: a row that is no version of an object raises DataError.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from tests.oracles.cells import decode_cell
from tests.oracles.frames import byte_view
from tests.oracles.versions import plain_row

from tidelog.engine.mvcc.cells import INLINE, MAX_SEQ, OBJECTS, SEQ_BYTES, TOMBSTONE, Cell
from tidelog.engine.mvcc.versions import Row
from tidelog.errors import DataError
from tidelog.log.frame import Buffer

_LENGTHS = struct.Struct("<HH")
_LEAST_KEY_BYTES = 5 + SEQ_BYTES

Gathered = tuple[int, bytes, tuple[bytes, ...], tuple[bytes, ...]]


def gather_versions(
    raw: Buffer,
    seq: int,
    all_versions: bool,
    start: bytes,
    stop: bytes,
    settled: bytes,
    bucket_ends: Buffer,
    bucket_names: Buffer,
    bucket_seqs: Buffer,
    bucket_orders: Buffer,
    /,
) -> Gathered:
    """(versions, the name that was decided about last, numbers, strings) of rows with keys from `start` up to `stop`.

    `settled` is what the rows before ended with. The four arrays are the buckets that are there, in order of name, and
    their creations. Numbers are seq, size, lsn, position (i64), crc, order, stored bytes (u32), flags, codec (u8);
    strings are bucket, key, inline value, each as ends (i32) and bytes.
    """
    created = _created(bucket_ends, bucket_names, bucket_seqs, bucket_orders)
    wide, narrow, codes = (
        [array("Q") for _ in range(4)],
        [array("I") for _ in range(3)],
        [bytearray() for _ in range(2)],
    )
    ends, texts = [array("i", [0]) for _ in range(3)], [bytearray() for _ in range(3)]
    count = 0
    for prefix, found_seq, value in _rows(byte_view(raw), start, stop):
        bucket, key, cell = _parsed(prefix, value)
        if found_seq > seq or (prefix == settled and not all_versions):
            continue
        if not all_versions:
            settled = prefix
            if cell.flags & TOMBSTONE or not _is_of(created.get(bucket), found_seq, cell.order):
                continue
        _append(wide, (found_seq, cell.size, cell.lsn, cell.position))
        _append(narrow, (cell.crc, cell.order, 0 if cell.flags == INLINE else cell.stored_bytes))
        _append(codes, (cell.flags, cell.codec))
        for end, text, part in zip(ends, texts, (bucket, key, cell.inline or b""), strict=True):
            text.extend(part)
            end.append(len(text))
        count += 1
    numbers = tuple(bytes(column) for column in (*wide, *narrow, *codes))
    return count, settled, numbers, tuple(bytes(part) for pair in zip(ends, texts, strict=True) for part in pair)


def gather_rows(*arguments: Any) -> tuple[bytes, list[Row]]:
    """The same as rows of a listing, with the columns that the last argument says."""
    *given, columns = arguments
    if columns > 3:
        raise ValueError("columns must be from 0 to 3")
    _, settled, numbers, strings = gather_versions(*given)
    seqs, sizes, lsns, positions = (memoryview(one).cast("Q") for one in numbers[:4])
    crcs, _, stored_bytes = (memoryview(one).cast("I") for one in numbers[4:7])
    names, inlined = (_texts(*strings[first : first + 2]) for first in (2, 4))
    rows: list[Row] = [
        (name.decode(), *places, small if flags == INLINE else None)
        for name, small, flags, *places in zip(
            *(names, inlined, numbers[7], sizes, seqs, crcs, numbers[8], lsns, positions, stored_bytes), strict=True
        )
    ]
    plain = [plain_row(row) for row in rows] if columns == 3 else [None]
    if None not in plain:
        return settled, [row for row in plain if row is not None]
    return settled, [row[: (3, 4, 9, 9)[columns]] for row in rows]


def _texts(ends: bytes, data: bytes) -> list[bytes]:
    return [data[begin:end] for begin, end in pairwise(memoryview(ends).cast("i"))]


def _append(columns: list[array[int]] | list[bytearray], numbers: tuple[int, ...]) -> None:
    for column, number in zip(columns, numbers, strict=True):
        column.append(number)


def _created(ends: Buffer, names: Buffer, seqs: Buffer, orders: Buffer) -> dict[bytes, tuple[int, int]]:
    places, texts = byte_view(ends).cast("I"), bytes(byte_view(names))
    versions = list(zip(byte_view(seqs).cast("Q"), byte_view(orders).cast("I"), strict=False))
    inside = all(low <= high <= len(texts) for low, high in pairwise(places))
    if len(places) != len(versions) + 1 or len(byte_view(orders)) != 4 * len(versions) or not inside:
        raise ValueError("the arrays of buckets do not fit together")
    return {texts[places[at] : places[at + 1]]: version for at, version in enumerate(versions)}


def _rows(view: memoryview, start: bytes, stop: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    at = 0
    while at < len(view):
        key_bytes, value_bytes = _LENGTHS.unpack_from(view, at) if at + _LENGTHS.size <= len(view) else (0, 0)
        key_at = at + _LENGTHS.size
        at = key_at + key_bytes + value_bytes
        if at > len(view):
            raise DataError("truncated row in a block")
        key = bytes(view[key_at : key_at + key_bytes])
        if start <= key < stop:
            seq = MAX_SEQ - int.from_bytes(key[-SEQ_BYTES:], "big")
            yield key[:-SEQ_BYTES], seq, bytes(view[at - value_bytes : at])


def _parsed(prefix: bytes, value: bytes) -> tuple[bytes, bytes, Cell]:
    bucket, _, key = prefix[1:-1].partition(b"\0")
    is_key = len(prefix) + SEQ_BYTES >= _LEAST_KEY_BYTES and prefix[:1] == OBJECTS and prefix[-1:] == b"\0"
    if not is_key or not bucket or not key or b"\0" in key:
        raise DataError("a row that is no version of an object")
    try:
        return bucket, key, decode_cell(value)
    except DataError as error:
        raise DataError("a row that is no version of an object") from error


def _is_of(created: tuple[int, int] | None, seq: int, order: int) -> bool:
    """Whether a version belongs to the bucket that was created then."""
    return created is not None and (seq > created[0] or (seq == created[0] and order >= created[1]))
