"""The oracle of frames from rows: the same bytes and faults as `native/envelopes_rows.h`, slower.

`tidelog.topics.columns` says what each buffer is. Columns travel as tuples of buffers.
What is wrong with a row is told as numbers, which `tidelog.topics.columns` puts into words.
"""

from __future__ import annotations

import operator
import struct

from tests.oracles.frames import byte_view, encode_many

from tidelog.errors import InputError
from tidelog.log.frame import Buffer
from tidelog.topics.columns import MAX_HEADERS, MAX_NAME_BYTES, MAX_NULL_HEADERS, RowFault
from tidelog.topics.message import LEAST_US, MOST_US

_FIXED = struct.Struct("<BBHIqII")
_HEADER = struct.Struct("<HI")
_MAX_LENGTH = (1 << 32) - 1
_MAX_OFFSET = (1 << 64) - 1

BytesColumn = tuple[Buffer | None, Buffer, Buffer, int, int]
"""Validity, ends, data, first row, bytes of an end."""
ListsColumn = tuple[Buffer | None, Buffer, BytesColumn, BytesColumn, int, int]
"""Validity, ends, names, contents, first row, bytes of an end."""
NumbersColumn = tuple[Buffer | None, Buffer, int]
"""Validity, numbers, first row."""


class _FaultyRowError(Exception):
    """What is wrong with the row at hand: a `RowFault`, and a detail."""

    def __init__(self, fault: int, detail: int = 0) -> None:
        super().__init__(fault, detail)
        self.fault, self.detail = fault, detail


class _Validity:
    """Which rows are null, and how many there are at most."""

    def __init__(self, validity: Buffer | None, first: int) -> None:
        if operator.index(first) < 0:
            raise ValueError("first must not be negative")
        self._bits = None if validity is None else byte_view(validity)
        self.first = first

    def rows_of(self, rows: int) -> int:
        """How many of a buffer's rows count."""
        known = rows if self._bits is None else min(rows, len(self._bits) * 8)
        return max(known - self.first, 0)

    def is_null(self, row: int) -> bool:
        bit = self.first + row
        return self._bits is not None and not self._bits[bit // 8] >> bit % 8 & 1


class _Lists:
    """A column whose rows go from one end to the next: of bytes, or of other rows."""

    def __init__(self, validity: Buffer | None, ends: Buffer, first: int, end_bytes: int) -> None:
        self.validity = _Validity(validity, first)
        if operator.index(end_bytes) < 0:
            raise ValueError("end_bytes must not be negative")
        view = byte_view(ends)
        if end_bytes not in (4, 8):
            raise ValueError("end_bytes must be 4 or 8")
        count = len(view) // end_bytes
        self._ends = struct.unpack_from(f"<{count}{'i' if end_bytes == 4 else 'q'}", view)
        self.rows = self.validity.rows_of(max(count - 1, 0))

    def range_of(self, row: int, limit: int) -> tuple[int, int]:
        start, stop = self._ends[self.validity.first + row : self.validity.first + row + 2]
        if not 0 <= start <= stop <= limit:
            raise _FaultyRowError(RowFault.BAD_ENDS)
        return start, stop


class _Bytes(_Lists):
    """A column of bytes."""

    def __init__(self, validity: Buffer | None, ends: Buffer, data: Buffer, first: int, end_bytes: int) -> None:
        super().__init__(validity, ends, first, end_bytes)
        self._data = byte_view(data)

    def get(self, row: int) -> bytes | None:
        start, stop = self.range_of(row, len(self._data))
        return None if self.validity.is_null(row) else bytes(self._data[start:stop])


class _Headers:
    """A column of headers."""

    def __init__(
        self,
        validity: Buffer | None,
        ends: Buffer,
        names: BytesColumn,
        contents: BytesColumn,
        first: int,
        end_bytes: int,
    ) -> None:
        self._lists = _Lists(validity, ends, first, end_bytes)
        self._names, self._contents = _Bytes(*names), _Bytes(*contents)
        self.rows = self._lists.rows

    def get(self, row: int) -> list[tuple[bytes, bytes | None]]:
        start, stop = self._lists.range_of(row, min(self._names.rows, self._contents.rows))
        if self._lists.validity.is_null(row):
            return []
        if stop - start > MAX_HEADERS:
            raise _FaultyRowError(RowFault.TOO_MANY_HEADERS, stop - start)
        pairs = [self._pair(header, header - start) for header in range(start, stop)]
        for name, _ in pairs:
            _check_text(name)
        return pairs

    def _pair(self, header: int, index: int) -> tuple[bytes, bytes | None]:
        name, content = self._names.get(header), self._contents.get(header)
        if name is None:
            raise _FaultyRowError(RowFault.NULL_NAME)
        if len(name) > MAX_NAME_BYTES:
            raise _FaultyRowError(RowFault.LONG_NAME)
        if content is None and index >= MAX_NULL_HEADERS:
            raise _FaultyRowError(RowFault.NULL_CONTENT)
        return name, content


def _check_text(name: bytes) -> None:
    try:
        name.decode()
    except UnicodeDecodeError:
        raise _FaultyRowError(RowFault.NAME_NOT_UTF8) from None


class _Times:
    """The time of every row: its own, or the one for all."""

    def __init__(self, column: NumbersColumn | None, timestamp_us: int) -> None:
        validity, numbers, first = column or (b"", b"", 0)
        self._validity = _Validity(validity, first)
        self._numbers = byte_view(numbers)
        self._timestamp_us = timestamp_us
        self._is_given = column is not None
        self.rows = self._validity.rows_of(len(self._numbers) // 8)

    def get(self, row: int) -> int:
        time_us = self._timestamp_us
        if self._is_given and not self._validity.is_null(row):
            (time_us,) = struct.unpack_from("<q", self._numbers, 8 * (self._validity.first + row))
        if not LEAST_US <= time_us <= MOST_US:
            raise _FaultyRowError(RowFault.BAD_TIME, time_us)
        return time_us


def encode_columns(
    first_offset: int,
    count: int,
    timestamp_us: int,
    max_message_bytes: int,
    values: BytesColumn,
    keys: BytesColumn | None,
    headers: ListsColumn | None,
    timestamps: NumbersColumn | None,
    /,
) -> tuple[int, bytes, bytes, bytes] | tuple[int, int, int]:
    """The rows as frames: (0, frames, positions, lengths), or what is wrong with one: (fault, row, detail)."""
    if count < 0 or max_message_bytes < 0:
        raise ValueError(f"{'count' if count < 0 else 'max_message_bytes'} must not be negative")
    if not 0 <= first_offset <= _MAX_OFFSET - max(count - 1, 0):
        raise InputError("offsets of frames must be in the range 0 to 2**64 - 1")
    if not -(1 << 63) <= timestamp_us < 1 << 63:
        raise OverflowError("timestamp_us does not fit in 64 bits")
    value_rows, times = _Bytes(*values), _Times(timestamps, timestamp_us)
    key_rows = None if keys is None else _Bytes(*keys)
    header_rows = None if headers is None else _Headers(*headers)
    given = [value_rows, key_rows, header_rows, None if timestamps is None else times]
    if any(column is not None and column.rows < count for column in given):
        return RowFault.SHORT_COLUMN, 0, 0
    most = min(max_message_bytes, _MAX_LENGTH)
    payloads: list[bytes] = []
    try:
        for row in range(count):
            payloads.append(_payload(row, most, times, value_rows, key_rows, header_rows))
    except _FaultyRowError as error:
        return error.fault, len(payloads), error.detail
    return RowFault.SOUND, *encode_many(first_offset, payloads)


def _nulls(value: bytes | None, headers: list[tuple[bytes, bytes | None]]) -> bytes:
    """The entry of an extension that says what is null; none where nothing is."""
    bits = sum(1 << index for index, (_, content) in enumerate(headers) if content is None)
    bitmap = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    return bytes([4, 1 + len(bitmap), value is None]) + bitmap if bits or value is None else b""


def _payload(
    row: int, most: int, times: _Times, values: _Bytes, keys: _Bytes | None, headers: _Headers | None
) -> bytes:
    time_us = times.get(row)
    value = values.get(row)
    key = None if keys is None else keys.get(row)
    given = [] if headers is None else headers.get(row)
    block = b"".join(_HEADER.pack(len(name), len(content or b"")) + name + (content or b"") for name, content in given)
    nulls = _nulls(value, given)
    fixed = _FIXED.pack(1, key is not None, len(given), len(key or b""), time_us, len(block), len(nulls))
    payload = fixed + (key or b"") + block + nulls + (value or b"")
    if len(payload) > most:
        raise _FaultyRowError(RowFault.TOO_LARGE, len(payload))
    return payload
