"""The oracle of cells: what one says about a version of an object."""

from __future__ import annotations

import struct

from tidelog.engine.mvcc.cells import INLINE, POINTER, TOMBSTONE, Cell
from tidelog.engine.wal.record_header import U32, decode_varint
from tidelog.errors import DataError

_CRC = struct.Struct("<I")


def cell_parts(value: bytes) -> tuple[int, int, int, int, int, int, int, int, bytes | None] | None:
    """The fields of a `Cell`, None when it is none."""
    try:
        return _decoded(value)
    except (DataError, struct.error, IndexError):
        return None


def decode_cell(value: bytes) -> Cell:
    """A version of an object."""
    found = cell_parts(value)
    if found is None:
        raise DataError(f"invalid version: {len(value)} bytes")
    return Cell(*found)


def _decoded(value: bytes) -> Cell:
    number = decode_varint
    flags, codec = value[0] & 15, value[0] >> 4
    order, at = number(value, 1, U32)
    if flags == POINTER:
        size, at = number(value, at)
        stored_bytes, at = number(value, at, U32)
        (crc,) = _CRC.unpack_from(value, at)
        lsn, at = number(value, at + _CRC.size)
        position, at = number(value, at)
        if at == len(value):
            return Cell(flags, order, size, crc, codec, lsn, position, stored_bytes)
    elif flags == INLINE:
        size, at = number(value, at)
        stored = value[at + _CRC.size :]
        return Cell(flags, order, size, _CRC.unpack_from(value, at)[0], codec, 0, 0, len(stored), stored)
    elif value[0] == TOMBSTONE and at == len(value):
        return Cell(flags, order, 0, 0)
    raise DataError("its flags and its length do not go together")
