"""Columnar codec for messages: converts between log frames and the buffers of Arrow arrays, with no object per message.

    column      buffers (all little-endian)
    offsets     i64 a row
    timestamps  i64 a row, microseconds since 1970 UTC
    keys        validity (one bit a row, lowest first; None when every row has a key), i32 ends, data
    values      validity (None when no value is null), i32 ends, data
    headers     validity (none set where a row has no headers), i32 ends of the lists; names (UTF-8): i32 ends, data;
                contents: validity (None when none is null), i32 ends, data

Ends are `count + 1` numbers that begin with 0: row i is data[ends[i]:ends[i + 1]].

Invariants
- Bytes are checked as `decode_frames` checks them, whichever columns are requested.
- Frames emptied by compaction produce no row. A lost offset, or a payload that is not a message, ends the columns just
  before it; the caller decides how to handle it.
- One call returns at most 2**31 - 1 bytes of data, so 32-bit ends always suffice. The remainder is left for the next
  call, which begins at `stopped_at`.
- Encoding is all or nothing: every row is checked before the first frame is written, and every accepted row can be read
  back.
- What is null in a column is null in the message, and the other way round; headers keep their order, and names may
  repeat.

This module does not depend on Arrow. The loops are written in C (`native/envelopes_columns.h`,
`native/envelopes_rows.h`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tidelog import _native
from tidelog.errors import DataError, InputError, MessageTooLargeError
from tidelog.log.frame import MAX_PAYLOAD_BYTES, Buffer, Frames
from tidelog.log.repair import is_lost
from tidelog.topics.message import decode_frames

MAX_COLUMN_BYTES = (1 << 31) - 1
MAX_HEADERS = MAX_NAME_BYTES = 0xFFFF
MAX_NULL_HEADERS = 2032
WANT_OFFSETS, WANT_TIMESTAMPS, WANT_KEYS, WANT_VALUES, WANT_HEADERS = 1, 2, 4, 8, 16


class Ended(enum.IntEnum):
    """Why a batch of columns ends where it does."""

    ALL = 0
    LIMIT = 1
    LOST = 2
    UNREADABLE = 3


class RowFault(enum.IntEnum):
    """What keeps a row from becoming a message."""

    SOUND = 0
    SHORT_COLUMN = 1
    BAD_ENDS = 2
    BAD_TIME = 3
    TOO_MANY_HEADERS = 4
    NULL_NAME = 5
    LONG_NAME = 6
    NULL_CONTENT = 7
    NAME_NOT_UTF8 = 8
    TOO_LARGE = 9
    CHANGED = 10


class VarColumn(NamedTuple):
    """A column of bytes.

    `first`: which row of the buffers counts as row 0 (what Arrow calls an array's offset). `end_bytes`: 4, or 8 for
    what Arrow calls large.
    """

    validity: Buffer | None
    ends: Buffer
    data: Buffer
    first: int = 0
    end_bytes: int = 4


class HeadersColumn(NamedTuple):
    """Lists of headers: the rows of `names` and `contents` from ends[i] to ends[i + 1] belong to row i."""

    validity: Buffer | None
    ends: Buffer
    names: VarColumn
    contents: VarColumn
    first: int = 0
    end_bytes: int = 4


class TimesColumn(NamedTuple):
    """A column of times: i64, microseconds since 1970 UTC."""

    validity: Buffer | None
    times_us: Buffer
    first: int = 0


class Columns(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Rows as buffers; a column that was not asked for is None."""

    count: int
    stopped_at: int
    ended: Ended
    offsets: bytes | None
    timestamps: bytes | None
    keys: VarColumn | None
    values: VarColumn | None
    headers: HeadersColumn | None


def gather_columns(
    frames: Frames,
    start: int,
    stop: int,
    *,
    keys: bool = True,
    values: bool = True,
    headers: bool = False,
    offsets: bool = True,
    timestamps: bool = True,
    max_rows: int | None = None,
    max_bytes: int = MAX_COLUMN_BYTES,
) -> Columns:
    """Messages `start` to `stop` (exclusive) of a batch of frames, or as many as the limits allow, but one at least.

    `stopped_at` is the index of the first frame that was not taken, `ended` says why: `read_error` has the words for
    one that is no message. `max_bytes` bounds keys, values and headers together.
    """
    if max_bytes < 1 or (max_rows is not None and max_rows < 1):
        raise InputError("max_rows and max_bytes must be 1 or more")
    wanted = (
        WANT_OFFSETS * offsets
        | WANT_TIMESTAMPS * timestamps
        | WANT_KEYS * keys
        | WANT_VALUES * values
        | WANT_HEADERS * headers
    )
    rows = frames.count if max_rows is None else max_rows
    places = frames.buffer, frames.positions, frames.lengths
    return _columns(*_native.gather_columns(frames.first_offset, *places, start, stop, wanted, rows, max_bytes))


def _columns(count: int, stopped_at: int, ended: int, buffers: tuple[bytes | None, ...]) -> Columns:
    offsets, timestamps, key_validity, key_ends, key_data, value_validity, value_ends, value_data, *lists = buffers
    return Columns(
        count=count,
        stopped_at=stopped_at,
        ended=Ended(ended),
        offsets=offsets,
        timestamps=timestamps,
        keys=_variable(key_validity, key_ends, key_data),
        values=_variable(value_validity, value_ends, value_data),
        headers=_headers(*lists),
    )


def _variable(validity: bytes | None, ends: bytes | None, data: bytes | None) -> VarColumn | None:
    return None if ends is None or data is None else VarColumn(validity, ends, data)


def _headers(validity: bytes | None, ends: bytes | None, *buffers: bytes | None) -> HeadersColumn | None:
    name_ends, name_data, *content_buffers = buffers
    names, contents = _variable(None, name_ends, name_data), _variable(*content_buffers)
    if ends is None or names is None or contents is None:
        return None
    return HeadersColumn(validity, ends, names, contents)


def read_error(frames: Frames, index: int) -> DataError | None:
    """Why no message can be read from a frame; None when one can."""
    try:
        decode_frames(frames, index, index + 1)
    except DataError as error:
        return error
    return None


def unreadable_frames(frames: Frames) -> Iterator[tuple[int, str]]:
    """The index of every frame that is no message, though neither lost nor removed, and why it is none."""
    index, end = 0, frames.count
    while index < end:
        columns = gather_columns(frames, index, end, keys=False, values=False, offsets=False, timestamps=False)
        index = columns.stopped_at
        if columns.ended is Ended.LOST:
            index = lost_until(frames, index, end)
        elif columns.ended is Ended.UNREADABLE:
            yield index, str(read_error(frames, index))
            index += 1


def check_readable(frames: Frames) -> None:
    """Raises DataError unless every frame is a message. Frames of rows that the caller supplied are numbered from 0."""
    found = next(unreadable_frames(frames), None)
    if found is not None:
        raise DataError(f"a row is no message: {found[1]}")


def lost_until(frames: Frames, index: int, stop: int) -> int:
    """The index after the run of lost offsets that begins at `index`: where to gather on, past a gap."""
    for each in range(index, min(stop, frames.count)):
        if not is_lost(frames.payloads(each, each + 1)[0]):
            return each
    return min(stop, frames.count)


def encode_columns(
    first_offset: int,
    count: int,
    values: VarColumn,
    *,
    keys: VarColumn | None = None,
    headers: HeadersColumn | None = None,
    timestamps: TimesColumn | None = None,
    timestamp_us: int,
    max_message_bytes: int = MAX_PAYLOAD_BYTES,
) -> Frames:
    """Rows 0 to `count` (exclusive) of the columns as frames, numbered from `first_offset`.

    A null key is no key, null headers are none, a null time is `timestamp_us`, as are all where there are no times.
    Null values, of messages and of headers, stay null. Anything that could not be read back is an InputError that names
    the row.
    """
    most = min(max_message_bytes, MAX_PAYLOAD_BYTES)
    result = _native.encode_columns(first_offset, count, timestamp_us, most, values, keys, headers, timestamps)
    if len(result) == 3:
        raise _row_error(*result, most)
    return Frames(first_offset, *result[1:])


_ROW_FAULTS: dict[int, str] = {
    RowFault.BAD_ENDS: "lies outside the data of its column",
    RowFault.NULL_NAME: "has a header without a name",
    RowFault.LONG_NAME: f"has a header name of more than {MAX_NAME_BYTES} bytes",
    RowFault.NULL_CONTENT: f"has a null among its header values after the first {MAX_NULL_HEADERS}",
    RowFault.NAME_NOT_UTF8: "has a header name that is not UTF-8",
    RowFault.CHANGED: "was changed by somebody while it was read",
}
_ROW_HINTS: dict[int, str] = {
    RowFault.NULL_CONTENT: "Give it an empty value",
}


def _row_error(fault: int, row: int, detail: int, most: int) -> InputError:
    if fault == RowFault.TOO_LARGE:
        text = f"row {row} makes a message of {detail} bytes, which is over max_message_bytes ({most})"
        return MessageTooLargeError(text, hint="Split it, or raise max_message_bytes")
    if fault == RowFault.SHORT_COLUMN:
        return InputError("a column has fewer rows than were announced")
    if fault == RowFault.BAD_TIME:
        return InputError(f"row {row} has a time outside of the years 1 to 9999 ({detail} us since 1970)")
    if fault == RowFault.TOO_MANY_HEADERS:
        return InputError(f"row {row} has {detail} headers, a message has at most {MAX_HEADERS}")
    return InputError(f"row {row} {_ROW_FAULTS[fault]}", hint=_ROW_HINTS.get(fault))


def frames_digest(frames: Frames, start: int = 0, stop: int | None = None) -> int:
    """One number for frames `start` to `stop` (exclusive), in 64 bits; docs/formats.md draws it.

    It is a sum modulo 2**64, so the digests of parts add up to that of the whole, however it was split and in whatever
    order. It speaks of offsets and of the bytes that are there, not of the checksums in the frames' headers.
    """
    last = frames.count if stop is None else stop
    return _native.frames_digest(frames.first_offset, frames.buffer, frames.positions, frames.lengths, start, last)
