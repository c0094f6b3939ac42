"""Cells: what the tree knows about a version of an object, and where its body is.

    flags u8, order u32, size u64, crc u32                                      every version
    ... and, unless it is a tombstone, one of
    codec u8, stored body                                                       a small one, here in the page
    codec u8, lsn u64, position u64, stored bytes u32                           one that stayed in the log

    flags u8, order u32                                                         a version of a bucket

Little-endian. `order` is the place of the operation in its batch: versions of one seq are told apart by it. `crc` is
that of the body before it was compressed, so it is the same wherever and however the body is stored.

Invariants
- A pointer never changes: files leave the disk and objects are put together, the position in the log stays.
- Cells come from pages, and pages from a disk: what does not fit together raises DataError.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidelog.errors import DataError

TOMBSTONE = 1
INLINE = 2
DELETED_BUCKET = 1

_HEAD = struct.Struct("<BIQI")
_POINTER = struct.Struct("<BIQIBQQI")
_BUCKET = struct.Struct("<BI")
POINTER_BYTES = _POINTER.size
HEAD_BYTES = _HEAD.size


class Cell(NamedTuple):
    """A version of an object. `inline` is its stored body when that is in the page; else `lsn` and the rest say where
    in the log it is."""

    flags: int
    order: int
    size: int
    crc: int
    codec: int = 0
    lsn: int = 0
    position: int = 0
    stored_bytes: int = 0
    inline: bytes | None = None

    @property
    def is_tombstone(self) -> bool:
        return bool(self.flags & TOMBSTONE)


_make = Cell._make


class BucketCell(NamedTuple):
    """A version of a bucket."""

    is_deleted: bool
    order: int


def encode_pointer(order: int, size: int, crc: int, codec: int, lsn: int, position: int, stored_bytes: int) -> bytes:
    """The cell of a body that is in the log."""
    return _POINTER.pack(0, order, size, crc, codec, lsn, position, stored_bytes)


def encode_inline(order: int, size: int, crc: int, codec: int, stored: bytes) -> bytes:
    """The cell of a small body."""
    return b"%b%c%b" % (_HEAD.pack(INLINE, order, size, crc), codec, stored)


def encode_tombstone(order: int) -> bytes:
    """The cell of a deletion."""
    return _HEAD.pack(TOMBSTONE, order, 0, 0)


def with_order(cell: Cell, order: int) -> bytes:
    """The same body as another version: what a copy is."""
    if cell.inline is not None:
        return encode_inline(order, cell.size, cell.crc, cell.codec, cell.inline)
    return encode_pointer(order, cell.size, cell.crc, cell.codec, cell.lsn, cell.position, cell.stored_bytes)


def decode_cell(value: bytes) -> Cell:
    """A version of an object."""
    if len(value) == POINTER_BYTES and not value[0]:
        return _make((*_POINTER.unpack(value), None))
    if len(value) < HEAD_BYTES:
        raise DataError(f"a version of {len(value)} bytes is none")
    flags, order, size, crc = _HEAD.unpack_from(value)
    if flags == TOMBSTONE and len(value) == HEAD_BYTES:
        return Cell(flags, order, size, crc)
    if flags == INLINE and len(value) > HEAD_BYTES:
        stored = value[HEAD_BYTES + 1 :]
        return Cell(flags, order, size, crc, value[HEAD_BYTES], 0, 0, len(stored), stored)
    raise DataError(f"a version with flags {flags} and {len(value)} bytes is none")


def encode_bucket(order: int, *, is_deleted: bool) -> bytes:
    """The cell of a bucket that was created or deleted."""
    return _BUCKET.pack(DELETED_BUCKET if is_deleted else 0, order)


def decode_bucket(value: bytes) -> BucketCell:
    """A version of a bucket."""
    if len(value) != _BUCKET.size or value[0] > DELETED_BUCKET:
        raise DataError(f"a version of a bucket with {len(value)} bytes is none")
    flags, order = _BUCKET.unpack(value)
    return BucketCell(bool(flags), order)
