"""The pure-Python twin of the C kernel for frames: the same answers, slower.

It is what runs where the extension could not be built, and the oracle that the kernel is tested against. Signatures are
the kernel's own (`_kernel.c`): arrays travel as bytes, positions as native u64 and lengths as native u32.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence

from tidelog.errors import InputError

_HEADER = struct.Struct("<QII")
_FIELD = struct.Struct("<q")
_HEADER_BYTES = _HEADER.size

END, PARTIAL, BAD_CRC, WRONG_OFFSET, BAD_LENGTH = range(5)

Buffer = bytes | bytearray | memoryview


def crc32(data: Buffer, value: int = 0) -> int:
    """CRC-32 as zlib computes it."""
    return zlib.crc32(data, value)


def encode_many(first_offset: int, payloads: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """All payloads as consecutive frames: (buffer, payload positions, payload lengths)."""
    parts: list[bytes] = []
    positions, lengths = array("Q"), array("I")
    end = 0
    for index, payload in enumerate(payloads):
        if not payload:
            raise InputError("a frame must hold at least one byte")
        parts.append(_HEADER.pack(first_offset + index, len(payload), zlib.crc32(payload)))
        parts.append(payload)
        positions.append(end + _HEADER_BYTES)
        lengths.append(len(payload))
        end += _HEADER_BYTES + len(payload)
    return b"".join(parts), positions.tobytes(), lengths.tobytes()


def scan(buffer: Buffer, position: int, offset: int, max_payload: int) -> tuple[bytes, bytes, int, int]:
    """Whole frames from `position` on, the first of which must carry `offset`.

    Returns (payload positions, payload lengths, end of the last whole frame, why it stopped).
    """
    view = memoryview(buffer).cast("B")
    size = len(view)
    positions, lengths = array("Q"), array("I")
    while True:
        stop = _judge(view, position, size, offset, max_payload)
        if stop is not None:
            return positions.tobytes(), lengths.tobytes(), position, stop
        length = _HEADER.unpack_from(view, position)[1]
        positions.append(position + _HEADER_BYTES)
        lengths.append(length)
        position += _HEADER_BYTES + length
        offset += 1


def _judge(view: memoryview, position: int, size: int, offset: int, max_payload: int) -> int | None:
    """Why there is no whole frame with `offset` at `position`; None when there is one."""
    if position == size:
        return END
    if position + _HEADER_BYTES > size:
        return PARTIAL
    found, length, crc = _HEADER.unpack_from(view, position)
    if found != offset:
        return WRONG_OFFSET
    if not 0 < length <= max_payload:
        return BAD_LENGTH
    start = position + _HEADER_BYTES
    if start + length > size:
        return PARTIAL
    if zlib.crc32(view[start : start + length]) != crc:
        return BAD_CRC
    return None


def find_frame(
    buffer: Buffer, position: int, min_offset: int, max_offset: int, max_payload: int
) -> tuple[int, int] | None:
    """The first whole frame at or after `position` whose offset is in the range: (position, offset)."""
    view = memoryview(buffer).cast("B")
    size = len(view)
    for start in range(position, size - _HEADER_BYTES + 1):
        offset = _HEADER.unpack_from(view, start)[0]
        if min_offset <= offset <= max_offset and _judge(view, start, size, offset, max_payload) is None:
            return start, offset
    return None


def payloads(buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int) -> list[bytes]:
    """Copies of the payloads `start` to `stop` (exclusive)."""
    view = memoryview(buffer).cast("B")
    return [bytes(view[at : at + length]) for at, length in _pairs(positions, lengths, start, stop)]


def field_range(buffer: Buffer, positions: Buffer, lengths: Buffer, field: int) -> tuple[int, int] | None:
    """Least and greatest i64 at byte `field` of the payloads; those too short for one do not count."""
    view = memoryview(buffer).cast("B")
    found = [
        _FIELD.unpack_from(view, at + field)[0]
        for at, length in _pairs(positions, lengths, 0, len(memoryview(lengths).cast("B")) // 4)
        if length >= field + 8
    ]
    return (min(found), max(found)) if found else None


def first_at_least(
    buffer: Buffer, positions: Buffer, lengths: Buffer, field: int, minimum: int, start: int
) -> int:
    """Index of the first payload from `start` on whose i64 at byte `field` is at least `minimum`, or -1."""
    view = memoryview(buffer).cast("B")
    count = len(memoryview(lengths).cast("B")) // 4
    for index, (at, length) in enumerate(_pairs(positions, lengths, start, count), start):
        if length >= field + 8 and _FIELD.unpack_from(view, at + field)[0] >= minimum:
            return index
    return -1


def _pairs(positions: Buffer, lengths: Buffer, start: int, stop: int) -> zip[tuple[int, int]]:
    at = memoryview(positions).cast("B").cast("Q")
    long = memoryview(lengths).cast("B").cast("I")
    return zip(at[start:stop], long[start:stop], strict=True)
