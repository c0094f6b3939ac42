"""Page updates: what a record of the engine's log says about pages, for redo and undo.

    byte   0      4      5           7             9           11
           +------+------+-----------+-------------+-----------+-----+-------+-----+
           | page | what | key bytes | value bytes | old bytes | key | value | old |   all little-endian
           | u32  | u8   | u16       | u16         | u16       |     |       |     |
           +------+------+-----------+-------------+-----------+-----+-------+-----+

    what  1 INSERT    a new cell
          2 REPLACE   another value for a cell; old = the value before
          3 REMOVE    a cell goes; old = the value before
          4 IMAGE     value = the page's image (`page.py`): replaces whatever the page was, without reading it
          5 TRUNCATE  all cells with a key >= key go, value = u32 right sibling from now on; redo only

    what  6 PUT       page u32, what u8, position u64: an INSERT of which the rest follows from the record of a put: the
                      key from its names and its seq, the cell from its numbers, its LSN and the position of its body

Invariants
- A record is done on a page whose LSN is smaller than the record's, all of its updates to that page together; then the
  page has the record's LSN. So redo may be repeated, and begin anywhere.
- REPLACE and REMOVE of a cell that is not there, and INSERT of one that is, are damage: DataError.
- Nothing of a record is done before all of its pages are in memory.
- PUT stands alone in a record. `record_updates` writes it out; nobody else knows of it.

The loops are C (`_engine.c`); `updates_python` gives the same answers where it could not be built.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine import tree_python, updates_python
from tidelog.engine.page import Pages
from tidelog.errors import DataError
from tidelog.log.frame import Frames

if TYPE_CHECKING:
    _kernel = updates_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _engine as _kernel
    except ImportError:
        _kernel = updates_python

INSERT, REPLACE, REMOVE = tree_python.INSERT, tree_python.REPLACE, tree_python.REMOVE
IMAGE, TRUNCATE = tree_python.IMAGE, tree_python.TRUNCATE

UPDATE_HEADER = struct.Struct("<IBHHH")
UPDATE_HEADER_BYTES = UPDATE_HEADER.size
_pack = UPDATE_HEADER.pack

redo = _kernel.redo
record_updates = _kernel.record_updates
_pack_put = updates_python.PUT_UPDATE.pack


class Update(NamedTuple):
    """One page update."""

    page: int
    what: int
    key: bytes
    value: bytes = b""
    old: bytes = b""


class Redone(NamedTuple):
    """How far `redo_frames` came: the next frame, and the page that it misses (-1: none)."""

    next_index: int
    missing_page: int
    must_be_read: bool


def encode(update: Update) -> bytes:
    """The bytes of one update."""
    page, what, key, value, old = update
    return b"".join((_pack(page, what, len(key), len(value), len(old)), key, value, old))


def encode_insert(page: int, key: bytes, value: bytes) -> bytes:
    """The bytes of an INSERT, the update of nearly every record."""
    return _pack(page, INSERT, len(key), len(value), 0) + key + value


def encode_put_update(page: int, position: int) -> bytes:
    """The bytes of a PUT, whose body is at a position of the log."""
    return _pack_put(page, updates_python.PUT, position)


def encode_image(page: int, image: bytes) -> bytes:
    """The bytes of an IMAGE."""
    return _pack(page, IMAGE, 0, len(image), 0) + image


def decode(updates: bytes | memoryview, lsn: int = 0) -> list[Update]:
    """The updates of a record; DataError, with the LSN, when they are damaged."""
    return [Update(*parts) for parts in _kernel.decode_updates(updates, lsn)]


def redo_frames(pages: Pages, rec_lsns: dict[int, int], frames: Frames, start: int = 0) -> Redone:
    """Does the records of whole frames from index `start` on, until the end or until a page is missing.

    Pages that were changed join `rec_lsns` with the LSN of their first change, unless they are there. `must_be_read` is
    False when the record replaces the missing page as a whole: an empty one will do.
    """
    places = (frames.buffer, frames.positions, frames.lengths)
    return Redone(*_kernel.redo_frames(pages, rec_lsns, frames.first_offset, *places, start))


def reverse_of(update: Update) -> Update:
    """What takes an update back, in the same page; it may be elsewhere by now: `Tree.reversal` looks for it."""
    page, what, key, value, old = update
    if what == INSERT:
        return Update(page, REMOVE, key, b"", value)
    if what == REPLACE:
        return Update(page, REPLACE, key, old, value)
    if what == REMOVE:
        return Update(page, INSERT, key, old)
    raise DataError(f"page {page}: an update of kind {what} cannot be undone")
