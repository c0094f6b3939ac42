"""Tree keys and cells: the encoding of versions of objects and buckets in the tree.

    "o" bucket NUL key NUL (2**64 - 1 - seq, 8 bytes big-endian)      a version of an object
    "b" bucket NUL (the same 8 bytes)                                 a version of a bucket: created or deleted

Invariants
- Compared byte by byte, keys are in the order of bucket, key, newest version first. Neither name contains a NUL, so a
  name that has another as its prefix never sorts between the versions of that one.
- The first key at or after `at(prefix, seq)` that begins with the prefix is the version visible at `seq`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidelog._native import cell_parts
from tidelog.engine.wal.record_header import MAX_BYTES, MAX_U32_BYTES, U32, encode_varint
from tidelog.errors import DataError

MAX_SEQ = (1 << 64) - 1
SEQ_BYTES = 8
OBJECTS = b"o"
BUCKETS = b"b"


class VersionKey(NamedTuple):
    """A decoded key; `key` is None for a bucket's own versions."""

    bucket: str
    key: str | None
    seq: int


def object_prefix(bucket: str, key: str) -> bytes:
    """The common prefix of all versions of an object."""
    return b"o%b\0%b\0" % (bucket.encode(), key.encode())


def bucket_prefix(bucket: str) -> bytes:
    """The common prefix of all versions of a bucket."""
    return b"b%b\0" % bucket.encode()


def objects_of(bucket: str, key_prefix: str = "") -> tuple[bytes, bytes]:
    """The key range (end exclusive) of the objects whose keys start with the prefix."""
    start = b"o%b\0%b" % (bucket.encode(), key_prefix.encode())
    return start, prefix_end(start)


def prefix_end(prefix: bytes) -> bytes:
    """The first key after everything with this prefix. Prefixes are never all 0xff: they begin with a letter."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,))


def at(prefix: bytes, seq: int) -> bytes:
    """The key of the version of this seq, or where it would be: the next older one is after it."""
    return prefix + (MAX_SEQ - seq).to_bytes(SEQ_BYTES, "big")


def seq_of(key: bytes) -> int:
    """The seq in a key."""
    return MAX_SEQ - int.from_bytes(key[-SEQ_BYTES:], "big")


def parse(key: bytes) -> VersionKey:
    """The names and the seq in a key that was built here."""
    names = key[1 : -SEQ_BYTES - 1].decode()
    if key[:1] == BUCKETS:
        return VersionKey(names, None, seq_of(key))
    bucket, _, name = names.partition("\0")
    return VersionKey(bucket, name, seq_of(key))


# Cells: what the tree records about a version of an object, and the location of its value.
#
#     flags u8, order                                                             a tombstone
#     flags u8, order, size, crc u32, stored value                                a small one, inline in the page
#     flags u8, order, size, stored bytes, crc u32, lsn, position                 one that stayed in the log
#
#     flags u8, order u32                                                         a version of a bucket
#
# Little-endian; fields without a width are varints (`wal/record_header.py`). The upper half of the flags of an object
# is its codec, and numbers that neighbours have in common come first, so that images of pages are small. `order` is the
# index of the operation in its batch: it distinguishes versions of one seq. `crc` covers the value before compression,
# so it does not depend on where or how the value is stored.
#
# Invariants
# - A position in the log stays, though files are purged and objects are merged. A pointer changes only when its value
#   is moved (`relocation.py`): then the cell names another position.
# - Cells come from pages, and pages from a disk: inconsistent ones raise DataError.


TOMBSTONE = 1
INLINE = 2
POINTER = 4
DELETED_BUCKET = 1

_CRC = struct.Struct("<I")
_BUCKET = struct.Struct("<BI")
_MAX_CODEC = 15
MAX_POINTER_BYTES = 1 + MAX_U32_BYTES + MAX_BYTES + MAX_U32_BYTES + _CRC.size + 2 * MAX_BYTES
"""What a cell that points into the log takes at most. Where its value will be is not known when room is made for it."""
MAX_INLINE_HEAD_BYTES = 1 + MAX_U32_BYTES + MAX_BYTES + _CRC.size
"""What a cell takes at most besides the value that is in it."""


class Cell(NamedTuple):
    """A version of an object. `inline` is its stored value if that is in the page; otherwise `lsn` and the rest locate
    it in the log.
    """

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
    """Encodes the cell of a value in the log."""
    number = encode_varint
    lengths = number(size) + number(stored_bytes, U32)
    return b"".join((_head(POINTER, codec, order), lengths, _CRC.pack(crc), number(lsn), number(position)))


def encode_inline(order: int, size: int, crc: int, codec: int, stored: bytes) -> bytes:
    """Encodes the cell of an inline value."""
    return b"".join((_head(INLINE, codec, order), encode_varint(size), _CRC.pack(crc), stored))


def encode_tombstone(order: int) -> bytes:
    """Encodes a tombstone."""
    return _head(TOMBSTONE, 0, order)


def _head(flags: int, codec: int, order: int) -> bytes:
    if not 0 <= codec <= _MAX_CODEC:
        raise OverflowError(f"codec {codec} is out of range")
    return b"%c%b" % (flags | codec << 4, encode_varint(order, U32))


def with_order(cell: Cell, order: int) -> bytes:
    """The same value as another version: what a copy is."""
    if cell.inline is not None:
        return encode_inline(order, cell.size, cell.crc, cell.codec, cell.inline)
    return encode_pointer(order, cell.size, cell.crc, cell.codec, cell.lsn, cell.position, cell.stored_bytes)


def is_pointer(value: bytes) -> bool:
    """Whether a cell, of an object or of a bucket, points into the log."""
    return bool(value) and value[0] & 15 == POINTER


def decode_cell(value: bytes) -> Cell:
    """A version of an object."""
    parts = cell_parts(value)
    if parts is None:
        raise DataError(f"invalid version: {len(value)} bytes")
    return _make(parts)


def encode_bucket(order: int, *, is_deleted: bool) -> bytes:
    """The cell of a bucket that was created or deleted."""
    return _BUCKET.pack(DELETED_BUCKET if is_deleted else 0, order)


def decode_bucket(value: bytes) -> BucketCell:
    """A version of a bucket."""
    if len(value) != _BUCKET.size or value[0] > DELETED_BUCKET:
        raise DataError(f"invalid version of a bucket: {len(value)} bytes")
    flags, order = _BUCKET.unpack(value)
    return BucketCell(bool(flags), order)
