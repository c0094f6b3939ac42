"""Messages as columns: the buffers that Arrow arrays are made of, from frames and to frames, no object a message.

    column      buffers (all little-endian)
    offsets     i64 a row
    timestamps  i64 a row, microseconds since 1970 UTC
    keys        validity (one bit a row, lowest first; None when every row has a key), i32 ends, data
    values      i32 ends, data
    headers     validity (none set where a row has no headers), i32 ends of the lists; names (UTF-8): i32 ends, data;
                contents: i32 ends, data

Ends are `count + 1` numbers that begin with 0: row i is data[ends[i]:ends[i + 1]].

Invariants
- Bytes are checked as `decode_frames` checks them, whichever columns are asked for.
- Frames that a compaction emptied give no row. A lost offset, or a payload that is no message, ends the columns before
  it: what it means is the caller's to decide.
- All data of one call is at most 2**31 - 1 bytes, so that 32-bit ends are always enough; what is over is left for the
  next call, which begins at `stopped_at`.
- Rows become frames only if all of them can: each is checked before the first is written, and what was taken can be
  read back.

This module knows nothing of Arrow itself. The loops are in C (`_envelope_columns.h`, `_envelope_rows.h`);
`columns_python` gives the same answers where the extension could not be built.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.errors import DataError, InputError, MessageTooLargeError
from tidelog.log.frame import MAX_PAYLOAD_BYTES, Frames
from tidelog.log.frame_python import Buffer
from tidelog.log.repair import is_lost
from tidelog.topics import columns_python, rows_python
from tidelog.topics.message import decode_frames

if TYPE_CHECKING:
    _kernel = columns_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.topics import _envelope as _kernel
    except ImportError:
        _kernel = columns_python

KERNEL_IS_NATIVE = _kernel is not columns_python
MAX_COLUMN_BYTES = columns_python.MAX_COLUMN_BYTES


class Ended(enum.IntEnum):
    """Why a batch of columns ends where it does."""

    ALL = columns_python.TOOK_ALL
    LIMIT = columns_python.REACHED_LIMIT
    LOST = columns_python.MET_LOST
    UNREADABLE = columns_python.MET_FAULT


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
        columns_python.WANT_OFFSETS * offsets
        | columns_python.WANT_TIMESTAMPS * timestamps
        | columns_python.WANT_KEYS * keys
        | columns_python.WANT_VALUES * values
        | columns_python.WANT_HEADERS * headers
    )
    rows = frames.count if max_rows is None else max_rows
    places = frames.buffer, frames.positions, frames.lengths
    return _columns(*_kernel.gather_columns(frames.first_offset, *places, start, stop, wanted, rows, max_bytes))


def _columns(count: int, stopped_at: int, ended: int, buffers: tuple[bytes | None, ...]) -> Columns:
    offsets, timestamps, key_validity, key_ends, key_data, value_ends, value_data, *list_buffers = buffers
    return Columns(
        count=count,
        stopped_at=stopped_at,
        ended=Ended(ended),
        offsets=offsets,
        timestamps=timestamps,
        keys=_variable(key_validity, key_ends, key_data),
        values=_variable(None, value_ends, value_data),
        headers=_headers(*list_buffers),
    )


def _variable(validity: bytes | None, ends: bytes | None, data: bytes | None) -> VarColumn | None:
    return None if ends is None or data is None else VarColumn(validity, ends, data)


def _headers(validity: bytes | None, ends: bytes | None, *buffers: bytes | None) -> HeadersColumn | None:
    name_ends, name_data, content_ends, content_data = buffers
    names, contents = _variable(None, name_ends, name_data), _variable(None, content_ends, content_data)
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
    """DataError when not every frame is a message. Those of rows that were handed over are numbered from 0."""
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

    A null key is no key, null headers are none, a null time is `timestamp_us`, as are all where there are no times. A
    null value, or anything that could not be read back, is an InputError that names the row.
    """
    most = min(max_message_bytes, MAX_PAYLOAD_BYTES)
    result = _kernel.encode_columns(first_offset, count, timestamp_us, most, values, keys, headers, timestamps)
    if len(result) == 3:
        raise _row_error(*result, most)
    return Frames(first_offset, *result[1:])


_ROW_FAULTS = {
    rows_python.BAD_ENDS: "lies outside the data of its column",
    rows_python.NULL_VALUE: "has no value",
    rows_python.NULL_NAME: "has a header without a name",
    rows_python.LONG_NAME: f"has a header name of more than {rows_python.MAX_NAME_BYTES} bytes",
    rows_python.NULL_CONTENT: "has a header without a value",
    rows_python.NAME_NOT_UTF8: "has a header name that is not UTF-8",
    rows_python.NAME_TWICE: "has two headers of the same name",
    rows_python.CHANGED: "was changed by somebody while it was read",
}
_ROW_HINTS = {
    rows_python.NULL_VALUE: "Leave the row out, or give it an empty value",
    rows_python.NULL_CONTENT: "Give it an empty value",
    rows_python.NAME_TWICE: "Header names are unique within a message: keep one of them, or name them apart",
}


def _row_error(fault: int, row: int, detail: int, most: int) -> InputError:
    if fault == rows_python.TOO_LARGE:
        text = f"row {row} makes a message of {detail} bytes, which is over max_message_bytes ({most})"
        return MessageTooLargeError(text, hint="Split it, or raise max_message_bytes")
    if fault == rows_python.SHORT_COLUMN:
        return InputError("a column has fewer rows than were announced")
    if fault == rows_python.BAD_TIME:
        return InputError(f"row {row} has a time outside of the years 1 to 9999 ({detail} us since 1970)")
    if fault == rows_python.TOO_MANY_HEADERS:
        return InputError(f"row {row} has {detail} headers, a message has at most {rows_python.MAX_HEADERS}")
    return InputError(f"row {row} {_ROW_FAULTS[fault]}", hint=_ROW_HINTS.get(fault))


def frames_digest(frames: Frames, start: int = 0, stop: int | None = None) -> int:
    """One number for frames `start` to `stop` (exclusive), in 64 bits; docs/formats.md draws it.

    It is a sum modulo 2**64, so the digests of parts add up to that of the whole, however it was split and in whatever
    order. It speaks of offsets and of the bytes that are there, not of the checksums in the frames' headers.
    """
    last = frames.count if stop is None else stop
    return _kernel.frames_digest(frames.first_offset, frames.buffer, frames.positions, frames.lengths, start, last)
