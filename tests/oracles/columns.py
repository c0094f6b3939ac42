"""The oracle of messages as columns: the same buffers and answers as `native/envelopes_columns.h`, slower.

`tidelog.topics.columns` says what each buffer is. Arrays travel as bytes. The way back is in `column_rows`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.oracles.column_rows import encode_columns as encode_columns
from tests.oracles.envelopes import Parts, parse_envelope
from tests.oracles.frames import byte_view, places

from tidelog.errors import DataError, InputError
from tidelog.log.frame import Buffer, is_no_message
from tidelog.log.repair import is_lost
from tidelog.topics.columns import (
    MAX_COLUMN_BYTES,
    WANT_HEADERS,
    WANT_KEYS,
    WANT_OFFSETS,
    WANT_TIMESTAMPS,
    WANT_VALUES,
    Ended,
)

_HEADER_BYTES = 6
_TIMESTAMP_BYTES = slice(8, 16)
_MAX_OFFSET = (1 << 63) - 1

_ALL_BITS = (1 << 64) - 1

Gathered = tuple[int, int, int, tuple[bytes | None, ...]]


class _Row(NamedTuple):
    offset: int
    timestamp: bytes
    parts: Parts


def gather_columns(
    first_offset: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    stop: int,
    wanted: int,
    max_rows: int,
    max_bytes: int,
    /,
) -> Gathered:
    """Messages of frames as buffers: (rows, index of the first frame not taken, why it ended, buffers)."""
    count = len(byte_view(lengths)) // 4
    if not 0 <= first_offset <= _MAX_OFFSET - count:
        raise InputError("offsets in a column must be in the range 0 to 2**63 - 1")
    rows: list[_Row] = []
    room = min(max_bytes, MAX_COLUMN_BYTES)
    view = byte_view(buffer)
    for index, position, length in places(view, positions, lengths, start, stop):
        if len(rows) == max_rows:
            return len(rows), index, Ended.LIMIT, _buffers(rows, wanted)
        payload = bytes(view[position : position + length])
        if is_no_message(payload):
            continue
        parts = _parsed(first_offset + index, payload)
        if parts is None:
            ended = Ended.LOST if is_lost(payload) else Ended.UNREADABLE
            return len(rows), index, ended, _buffers(rows, wanted)
        size = _row_bytes(parts, wanted)
        if not rows and size > MAX_COLUMN_BYTES:
            fault = f"is too large for a column, which holds at most {MAX_COLUMN_BYTES} bytes"
            raise InputError(f"message {first_offset + index} {fault}")
        if rows and size > room:
            return len(rows), index, Ended.LIMIT, _buffers(rows, wanted)
        room -= size
        rows.append(_Row(first_offset + index, payload[_TIMESTAMP_BYTES], parts))
    end = min(stop, count)
    return len(rows), end, Ended.ALL, _buffers(rows, wanted)


def _parsed(offset: int, payload: bytes) -> Parts | None:
    try:
        return parse_envelope(offset, payload)
    except DataError:
        return None


def _row_bytes(parts: Parts, wanted: int) -> int:
    """What a row adds to the columns with data. With that bounded, no single column can outgrow its 32-bit offsets."""
    key_bytes = len(parts.key or b"") if wanted & WANT_KEYS else 0
    value_bytes = len(parts.value) if wanted & WANT_VALUES else 0
    block = (_HEADER_BYTES + len(name.encode()) + len(content) for name, content in parts.headers)
    return key_bytes + value_bytes + (sum(block) if wanted & WANT_HEADERS else 0)


def _buffers(rows: Sequence[_Row], wanted: int) -> tuple[bytes | None, ...]:
    return (
        _numbers(row.offset for row in rows) if wanted & WANT_OFFSETS else None,
        b"".join(row.timestamp for row in rows) if wanted & WANT_TIMESTAMPS else None,
        *(_nullable([row.parts.key for row in rows]) if wanted & WANT_KEYS else (None,) * 3),
        *(_nullable([row.parts.value_or_null for row in rows]) if wanted & WANT_VALUES else (None,) * 3),
        *(_header_buffers([row.parts.headers_or_nulls for row in rows]) if wanted & WANT_HEADERS else (None,) * 7),
    )


def _nullable(items: list[bytes | None]) -> tuple[bytes | None, ...]:
    validity = None if None not in items else _bitmap([item is not None for item in items])
    return validity, *_variable([item or b"" for item in items])


def _header_buffers(lists: list[list[tuple[str, bytes | None]]]) -> tuple[bytes | None, ...]:
    headers = [header for each in lists for header in each]
    return (
        _bitmap([bool(each) for each in lists]),
        _ends(len(each) for each in lists),
        *_variable([name.encode() for name, _ in headers]),
        *_nullable([content for _, content in headers]),
    )


def _variable(items: list[bytes]) -> tuple[bytes, bytes]:
    """Offsets and data of a column of bytes."""
    return _ends(map(len, items)), b"".join(items)


def _ends(sizes: Iterable[int]) -> bytes:
    """0, and the sum of the sizes up to each of them: i32."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return struct.pack(f"<{len(ends)}i", *ends)


def _numbers(numbers: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<q", number) for number in numbers)


def _bitmap(bits: list[bool]) -> bytes:
    """One bit a row, the lowest of a byte first."""
    number = sum(1 << index for index, bit in enumerate(bits) if bit)
    return number.to_bytes((len(bits) + 7) // 8, "little")


def frames_digest(
    first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> int:
    """The sum, modulo 2**64, of a mix of each frame's offset, length and checksum."""
    view = byte_view(buffer)
    return (
        sum(
            _digest(first_offset + index, length, zlib.crc32(view[position : position + length]))
            for index, position, length in places(view, positions, lengths, start, stop)
        )
        & _ALL_BITS
    )


def _digest(offset: int, length: int, crc32: int) -> int:
    return _mix(_mix(offset + 0x9E3779B97F4A7C15 & _ALL_BITS) + (length << 32 | crc32) & _ALL_BITS)


def _mix(word: int) -> int:
    """A bijection of 64 bits in which every bit depends on all: the last step of the generator SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _ALL_BITS
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _ALL_BITS
    return word ^ word >> 31
