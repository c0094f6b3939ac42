"""The pure-Python twin of the C kernel that makes frames of rows: the same bytes, the same faults, slower.

Signatures are those of `_envelope_rows.h`; `columns.py` says what each buffer is. Columns travel as tuples of buffers.
What is wrong with a row is told as numbers, which `columns.py` puts into words.
"""

from __future__ import annotations

import operator
import struct

from tidelog.errors import InputError
from tidelog.log.frame_python import Buffer, byte_view, encode_many
from tidelog.topics.envelope_python import LEAST_US, MOST_US, encode

ROW_SOUND, SHORT_COLUMN, BAD_ENDS, BAD_TIME, NULL_VALUE, TOO_MANY_HEADERS, NULL_NAME = range(7)
LONG_NAME, NULL_CONTENT, NAME_NOT_UTF8, NAME_TWICE, TOO_LARGE, CHANGED = range(7, 13)
MAX_HEADERS = MAX_NAME_BYTES = 0xFFFF
_MAX_LENGTH = (1 << 32) - 1
_MAX_OFFSET = (1 << 64) - 1

BytesColumn = tuple[Buffer | None, Buffer, Buffer, int, int]
"""Validity, ends, data, first row, bytes of an end."""
ListsColumn = tuple[Buffer | None, Buffer, BytesColumn, BytesColumn, int, int]
"""Validity, ends, names, contents, first row, bytes of an end."""
NumbersColumn = tuple[Buffer | None, Buffer, int]
"""Validity, numbers, first row."""


class _FaultyRowError(Exception):
    """What is wrong with the row at hand: one of the numbers above, and a detail."""

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
            raise _FaultyRowError(BAD_ENDS)
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

    def get(self, row: int) -> dict[str, bytes]:
        start, stop = self._lists.range_of(row, min(self._names.rows, self._contents.rows))
        if self._lists.validity.is_null(row):
            return {}
        if stop - start > MAX_HEADERS:
            raise _FaultyRowError(TOO_MANY_HEADERS, stop - start)
        pairs = [self._pair(header) for header in range(start, stop)]
        headers = {_text(name): content for name, content in pairs}
        if len(headers) < len(pairs):
            raise _FaultyRowError(NAME_TWICE)
        return headers

    def _pair(self, header: int) -> tuple[bytes, bytes]:
        name, content = self._names.get(header), self._contents.get(header)
        if name is None:
            raise _FaultyRowError(NULL_NAME)
        if len(name) > MAX_NAME_BYTES:
            raise _FaultyRowError(LONG_NAME)
        if content is None:
            raise _FaultyRowError(NULL_CONTENT)
        return name, content


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise _FaultyRowError(NAME_NOT_UTF8) from None


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
            raise _FaultyRowError(BAD_TIME, time_us)
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
        return SHORT_COLUMN, 0, 0
    most = min(max_message_bytes, _MAX_LENGTH)
    payloads: list[bytes] = []
    try:
        for row in range(count):
            payloads.append(_payload(row, most, times, value_rows, key_rows, header_rows))
    except _FaultyRowError as error:
        return error.fault, len(payloads), error.detail
    return ROW_SOUND, *encode_many(first_offset, payloads)


def _payload(
    row: int, most: int, times: _Times, values: _Bytes, keys: _Bytes | None, headers: _Headers | None
) -> bytes:
    time_us = times.get(row)
    value = values.get(row)
    if value is None:
        raise _FaultyRowError(NULL_VALUE)
    key = None if keys is None else keys.get(row)
    payload = encode(value, key, None if headers is None else headers.get(row), time_us)
    if len(payload) > most:
        raise _FaultyRowError(TOO_LARGE, len(payload))
    return payload
