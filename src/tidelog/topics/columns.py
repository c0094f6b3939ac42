"""Messages as columns: the buffers that Arrow arrays are made of, straight from frames, no object a message.

    column      buffers (all little-endian)
    offsets     i64 a row
    timestamps  i64 a row, microseconds since 1970 UTC
    keys        validity (one bit a row, lowest first; None when every row has a key), i32 ends, data
    values      i32 ends, data
    headers     validity (none set where a row has no headers), i32 ends of the lists; names (UTF-8): i32 ends, data;
                contents: i32 ends, data

Ends are `count + 1` numbers that begin with 0: row i is data[ends[i]:ends[i + 1]].

Invariants
- Bytes are checked as `decode_frames` checks them, with the same errors, whichever columns are asked for.
- Frames that a compaction emptied give no row. A lost offset ends the columns before it: what it means is the caller's
  to decide.
- All data of one call is at most 2**31 - 1 bytes, so that 32-bit ends are always enough; what is over is left for the
  next call, which begins at `stopped_at`.

This module knows nothing of Arrow itself. The loops are in C (`_envelope_columns.h`); `columns_python` gives the same
answers where the extension could not be built.
"""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.errors import InputError
from tidelog.log.frame import Frames
from tidelog.log.frame_python import Buffer
from tidelog.log.repair import is_lost
from tidelog.topics import columns_python

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


class VarColumn(NamedTuple):
    """A column of bytes. `first`: which row of the buffers counts as row 0 (what Arrow calls an array's offset)."""

    validity: Buffer | None
    ends: Buffer
    data: Buffer
    first: int = 0


class HeadersColumn(NamedTuple):
    """Lists of headers: the rows of `names` and `contents` from ends[i] to ends[i + 1] belong to row i."""

    validity: Buffer | None
    ends: Buffer
    names: VarColumn
    contents: VarColumn
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

    `stopped_at` is the index of the first frame that was not taken, `ended` says why. DataError names the offset of
    what is no message; `max_bytes` bounds keys, values and headers together.
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


def lost_until(frames: Frames, index: int, stop: int) -> int:
    """The index after the run of lost offsets that begins at `index`: where to gather on, past a gap."""
    for each in range(index, min(stop, frames.count)):
        if not is_lost(frames.payloads(each, each + 1)[0]):
            return each
    return min(stop, frames.count)
