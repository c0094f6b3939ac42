"""Blob files: many small values in one object, in the order of the keys of objects that have them.

    "TBLB" u32 version | stored value ... stored value | directory | count u32, crc32 of the directory u32, "TBLBEND1"

    directory: for each value    position u64, stored bytes u32, crc32 of the stored bytes u32          little-endian

Invariants
- The same values in the same order produce the same bytes. A compaction writes them in the order of keys (that of the
  first version that points to each), so that a scan reads neighbours with one request; readers rely on no order.
- Values follow each other without a gap, so the directory gives the location of
  each, and every byte of the file is covered by a checksum.
- Reading one value does not need the directory: its location is in the index, its checksum in its cell. The directory
  serves verification of the file.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from tidelog._native import blob_directory
from tidelog.engine.wal.value import CODEC_NONE, CODEC_ZSTD, MAX_VALUE_BYTES
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.log.frame import Buffer, crc32
from tidelog.store.keys import digest_of, parse_data_name

MAGIC = b"TBLB"
END_MAGIC = b"TBLBEND1"
VERSION = 1

_HEAD = struct.Struct("<4sI")
_ENTRY = struct.Struct("<QII")
_TAIL = struct.Struct("<II8s")
HEADER_BYTES = _HEAD.size
_HINT = "Put a good copy of the blob file in its place; a replica has one"


class DirectoryEntry(NamedTuple):
    """The location of a value in a blob file, as its directory records it, with the checksum of the stored bytes."""

    position: int
    byte: int
    stored_bytes: int
    crc: int


class EncodedBlobFile(NamedTuple):
    """An encoded blob file. `digest` goes into its name."""

    data: bytes
    digest: str


def encode_blob_file(values: Buffer, positions: Buffer, lengths: Buffer, crcs: Buffer) -> EncodedBlobFile:
    """Encodes values as a blob file: the stored bytes one after the other, and arrays of u64, u32 and u32."""
    listed = blob_directory(positions, lengths, crcs)
    if not listed:
        raise InputError("a blob file has at least one value")
    tail = _TAIL.pack(len(listed) // _ENTRY.size, crc32(listed), END_MAGIC)
    data = b"".join((_HEAD.pack(MAGIC, VERSION), values, listed, tail))
    return EncodedBlobFile(data, digest_of(data))


def _directory_begin(tail: memoryview, size: int) -> int:
    if size < _HEAD.size + _TAIL.size:
        raise DataError(f"blob file too short: {size} bytes")
    count, _, magic = _TAIL.unpack_from(tail, len(tail) - _TAIL.size)
    begin = size - _TAIL.size - int(count) * _ENTRY.size
    if magic != END_MAGIC or not count or begin < _HEAD.size:
        raise DataError("blob file has no valid trailer")
    return begin


def _directory(listed: memoryview, end: int) -> list[DirectoryEntry]:
    """Decodes the directory from its bytes and the trailer; `end` is where the values end."""
    entries = listed[: -_TAIL.size]
    count, crc, _ = _TAIL.unpack_from(listed, len(entries))
    if len(entries) != count * _ENTRY.size or crc32(entries) != crc:
        raise DataError("directory checksum does not match")
    found, byte = list[DirectoryEntry](), _HEAD.size
    for position, stored_bytes, value_crc in _ENTRY.iter_unpack(entries):
        if not 0 < stored_bytes <= MAX_VALUE_BYTES:
            raise DataError(f"a value of {stored_bytes} bytes cannot be in a blob file")
        found.append(DirectoryEntry(position, byte, stored_bytes, value_crc))
        byte += stored_bytes
    if len({entry.position for entry in found}) != len(found):
        raise DataError("a position comes twice in the directory")
    if byte != end:
        raise DataError("values in the directory do not add up to the file")
    return found


def check_blob_file(data: bytes, key: str = "blob file") -> list[DirectoryEntry]:
    """Verifies every byte of a whole blob file in memory. CorruptionError names what is wrong."""
    view = memoryview(data)
    if len(view) < _HEAD.size or view[: _HEAD.size] != _HEAD.pack(MAGIC, VERSION):
        raise _damage(key, 0, f"not a blob file of version {VERSION}")
    try:
        begin = _directory_begin(view, len(view))
        found = _directory(view[begin:], begin)
    except DataError as error:
        raise _damage(key, max(0, len(view) - _TAIL.size), error.message) from error
    for entry in found:
        if crc32(view[entry.byte : entry.byte + entry.stored_bytes]) != entry.crc:
            raise _damage(key, entry.byte, f"checksum of the value at position {entry.position} does not match")
    return found


def _damage(key: str, byte: int, message: str) -> CorruptionError:
    return CorruptionError(message, path=key, byte=byte, operation="read", hint=_HINT)


# Value pointers: the location of a value in compacted data, and the rows of the two indexes that hold them.
#
#     u8 1, codec u8, blob file u32, byte u64, stored bytes u32                in a blob file, by its number in the root
#     u8 2, codec u8, stored bytes u32, name below `data/` in UTF-8            a file of its own
#
#     version index:  key of the tree                 -> cell bytes u16, cell, value pointer (or nothing)
#     value index:    position u64, big-endian        -> value pointer
#
# Little-endian, except for positions: as keys they are compared byte by byte.
#
# Invariants
# - The cell in a row is the tree's own, unchanged. It holds the checksum of the value; a value pointer does not.
# - A version whose value is inline in its cell, a tombstone and a version of a bucket have no value pointer. Neither
#   has any version in a file that was written without a compaction.
# - The input of every decoder comes from a store: inconsistent input raises DataError.


_BLOB: Final = 1
_FILE: Final = 2
_BLOB_PLACE = struct.Struct("<BBIQI")
_FILE_PLACE = struct.Struct("<BBI")
_CELL_BYTES = struct.Struct("<H")
_MAX_CELL_BYTES = 0xFFFF
BLOB_POINTER_BYTES = _BLOB_PLACE.size
BLOB_POINTER_HEADS: Final = tuple(bytes((_BLOB, codec)) for codec in (CODEC_NONE, CODEC_ZSTD))
"""How pointers into blob files begin; they are as long as each other."""
_POSITION_BYTES = 8


class BlobPointer(NamedTuple):
    """A location in a blob file: the file's number in the root's list, and the byte where the stored value begins."""

    codec: int
    blob_file: int
    byte: int
    stored_bytes: int


class FilePointer(NamedTuple):
    """A file of its own; `name` is the name below `data/`."""

    codec: int
    stored_bytes: int
    name: str


Place = BlobPointer | FilePointer


def encode_value_pointer(place: Place) -> bytes:
    """Encodes a value pointer."""
    if isinstance(place, BlobPointer):
        return _BLOB_PLACE.pack(_BLOB, *place)
    return _FILE_PLACE.pack(_FILE, place.codec, place.stored_bytes) + place.name.encode()


def decode_value_pointer(data: bytes) -> Place:
    """Decodes a value pointer, which must fill all of these bytes."""
    kind = data[0] if data else 0
    if kind == _BLOB and len(data) == _BLOB_PLACE.size:
        return _checked(BlobPointer(*_BLOB_PLACE.unpack(data)[1:]))
    if kind == _FILE and len(data) > _FILE_PLACE.size:
        _, codec, stored_bytes = _FILE_PLACE.unpack_from(data)
        return _checked(FilePointer(codec, stored_bytes, _decoded_name(data[_FILE_PLACE.size :])))
    raise DataError(f"invalid value pointer: kind {kind}, {len(data)} bytes")


def _checked(place: Place) -> Place:
    if place.codec not in (CODEC_NONE, CODEC_ZSTD):
        raise DataError(f"value pointer has unknown codec {place.codec}")
    return place


def _decoded_name(data: bytes) -> str:
    try:
        name = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise DataError("value pointer names an unknown data file") from error
    if parse_data_name(name) is None:
        raise DataError("value pointer names an unknown data file")
    return name


def encode_version(cell: bytes, place: Place | None) -> bytes:
    """Encodes the value of a row of the version index."""
    if len(cell) > _MAX_CELL_BYTES:
        raise InputError(f"a cell of {len(cell)} bytes is too large")
    return _CELL_BYTES.pack(len(cell)) + cell + (b"" if place is None else encode_value_pointer(place))


def decode_version(value: bytes) -> tuple[bytes, Place | None]:
    """Returns the cell and its value pointer, if it has one."""
    cell = cell_of(value)
    behind = value[_CELL_BYTES.size + len(cell) :]
    return cell, decode_value_pointer(behind) if behind else None


def cell_of(value: bytes) -> bytes:
    """Returns the cell alone, which is what a restore needs."""
    if len(value) > _CELL_BYTES.size:
        end = _CELL_BYTES.size + _CELL_BYTES.unpack_from(value)[0]
        if _CELL_BYTES.size < end <= len(value):
            return value[_CELL_BYTES.size : end]
    raise DataError(f"a row of {len(value)} bytes has no cell")


def value_key(position: int) -> bytes:
    """The key of a row of the value index."""
    return position.to_bytes(_POSITION_BYTES, "big")


def position_of(key: bytes) -> int:
    """The position in a key of the value index."""
    if len(key) != _POSITION_BYTES:
        raise DataError(f"invalid WAL position: {len(key)} bytes")
    return int.from_bytes(key, "big")
