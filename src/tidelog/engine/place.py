"""Places: where in compacted data a body is; and the rows of the two indexes that tell it.

    u8 1, codec u8, pack u32, byte u64, stored bytes u32                     in a pack, by its number in the root
    u8 2, codec u8, stored bytes u32, name below `data/` in UTF-8            a file of its own

    version index:  key of the tree                 -> cell bytes u16, cell, place (or nothing)
    body index:     position u64, big-endian        -> place

Little-endian, except for positions: as keys they are compared byte by byte.

Invariants
- The cell in a row is the tree's own, unchanged. It tells the checksum of the body; a place does not.
- A version whose body is in its cell, a tombstone and a version of a bucket have no place. Neither has any version in a
  file that was written without a compaction.
- What is decoded comes from a store: what does not fit together raises DataError.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from tidelog.engine.body import CODEC_NONE, CODEC_ZSTD
from tidelog.errors import DataError, InputError
from tidelog.tier.compacted_names import parse_data_name

_PACK: Final = 1
_FILE: Final = 2
_PACK_PLACE = struct.Struct("<BBIQI")
_FILE_PLACE = struct.Struct("<BBI")
_CELL_BYTES = struct.Struct("<H")
_MAX_CELL_BYTES = 0xFFFF
_POSITION_BYTES = 8


class PackPlace(NamedTuple):
    """In a pack: its number in the root's list, and the byte where the stored body begins."""

    codec: int
    pack: int
    byte: int
    stored_bytes: int


class FilePlace(NamedTuple):
    """A file of its own; `name` is that below `data/`."""

    codec: int
    stored_bytes: int
    name: str


Place = PackPlace | FilePlace


def encode_place(place: Place) -> bytes:
    """The bytes of a place."""
    if isinstance(place, PackPlace):
        return _PACK_PLACE.pack(_PACK, *place)
    return _FILE_PLACE.pack(_FILE, place.codec, place.stored_bytes) + place.name.encode()


def decode_place(data: bytes) -> Place:
    """The place in these bytes, which must be all of it."""
    kind = data[0] if data else 0
    if kind == _PACK and len(data) == _PACK_PLACE.size:
        return _checked(PackPlace(*_PACK_PLACE.unpack(data)[1:]))
    if kind == _FILE and len(data) > _FILE_PLACE.size:
        _, codec, stored_bytes = _FILE_PLACE.unpack_from(data)
        return _checked(FilePlace(codec, stored_bytes, _decoded_name(data[_FILE_PLACE.size :])))
    raise DataError(f"a place of kind {kind} and {len(data)} bytes is none")


def _checked(place: Place) -> Place:
    if place.codec not in (CODEC_NONE, CODEC_ZSTD):
        raise DataError(f"a place has codec {place.codec}, which is not known")
    return place


def _decoded_name(data: bytes) -> str:
    try:
        name = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise DataError("a place whose file has no name of ours") from error
    if parse_data_name(name) is None:
        raise DataError("a place whose file has no name of ours")
    return name


def encode_version(cell: bytes, place: Place | None) -> bytes:
    """The value of a row of the version index."""
    if len(cell) > _MAX_CELL_BYTES:
        raise InputError(f"a cell of {len(cell)} bytes is too large")
    return _CELL_BYTES.pack(len(cell)) + cell + (b"" if place is None else encode_place(place))


def decode_version(value: bytes) -> tuple[bytes, Place | None]:
    """The cell, and the place where its body is, if it has one."""
    cell = cell_of(value)
    behind = value[_CELL_BYTES.size + len(cell) :]
    return cell, decode_place(behind) if behind else None


def cell_of(value: bytes) -> bytes:
    """The cell alone: what a restore needs."""
    if len(value) > _CELL_BYTES.size:
        end = _CELL_BYTES.size + _CELL_BYTES.unpack_from(value)[0]
        if _CELL_BYTES.size < end <= len(value):
            return value[_CELL_BYTES.size : end]
    raise DataError(f"a row of {len(value)} bytes has no cell")


def body_key(position: int) -> bytes:
    """The key of a row of the body index."""
    return position.to_bytes(_POSITION_BYTES, "big")


def position_of(key: bytes) -> int:
    """The position in such a key."""
    if len(key) != _POSITION_BYTES:
        raise DataError(f"a position of {len(key)} bytes is none")
    return int.from_bytes(key, "big")
