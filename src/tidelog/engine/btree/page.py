"""Pages of the tree: 8192 bytes, in memory (a bytearray) and in the page file alike, little-endian.

    byte   0      4       6      7       8         12              16         24          26           28
           +------+-------+------+-------+---------+---------------+----------+-----------+------------+------------+
           | crc  | magic | kind | level | page id | right sibling | page LSN | cell count| heap start | dead bytes |
           | u32  | u16   | u8   | u8    | u32     | u32           | u64      | u16       | u16        | u16        |
           +------+-------+------+-------+---------+---------------+----------+-----------+------------+------------+
    30 zero (8 bytes) | 38 referenced (u8) | 39 zero | 40 slots: u16 each, sorted by key | free | heap of cells, to 8192

    cell: u16 key bytes, u16 value bytes, key, value

Invariants
- Keys of a page are all different and in order of their bytes. A leaf has level 0. The value of an inner cell is the
  u32 number of a child, its key is not greater than any key below that child and greater than all keys left of it; the
  key of the first cell of an inner page is empty.
- The page has all changes of records up to its LSN that concern it.
- Bytes 30 to 39 are zero in the file. In memory the root counts accesses to pages in bytes 30 to 37, other pages
  remember there whether inserts come in order, and byte 38 says that a page was used since the last sweep for something
  to evict. The crc covers bytes 4 to 8191, with byte 38 as 0.
- A page image is what redo needs of a page: page id u32, right sibling u32, level u8, then the cells in order, each as
  four varints (`wal/record_header.py`) and two texts: how many bytes its key shares with the key before, how many more
  it has, the same for its value; and those further bytes of both.
- Every call here is one step for all threads: no reader sees half of a change, and readers need no lock.

Pages from a disk are hostile: a damaged one raises DataError. The loops are C (`native/pages.c`).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidelog import _native
from tidelog.errors import DataError
from tidelog.log.frame import Frames

PAGE_BYTES = 8192
HEADER_BYTES = 40
SLOT_BYTES = 2
CELL_HEADER_BYTES = 4
MAGIC = 0x5447
# At least four cells fit into a page, so that one split in the middle always makes room for one more.
MAX_CELL_BYTES = (PAGE_BYTES - HEADER_BYTES) // 4 - SLOT_BYTES
ROOT = 1
# In memory only: the count of page accesses, in the root; whether the page was used since the last sweep.
ACCESSES_AT, REFERENCED_AT = 30, 38
# What `place` asks for.
MISSING, NO_ROOM, NEEDS_IMAGE = range(3)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_COUNTS = struct.Struct("<HHH")
_RIGHT_AT, _LSN_AT, _COUNTS_AT = 12, 16, 24

Cell = tuple[bytes, bytes]
Page = bytes | bytearray
Pages = dict[int, bytearray]

format_page = _native.format_page
insert = _native.insert
replace = _native.replace
remove = _native.remove
set_header = _native.set_header
get = _native.get
cells = _native.cells
page_rows = _native.page_rows
compact_image = _native.compact_image
set_image = _native.set_image
sealed = _native.sealed
verify_crc = _native.verify_crc
check_page = _native.check_page
put_back = _native.put_back
find = _native.find
scan = _native.scan_tree
skip = _native.skip
place = _native.place
plan_split = _native.plan_split


def level_of(page: Page) -> int:
    """0 for a leaf."""
    return page[7]


def right_of(page: Page) -> int:
    """The page to the right on the same level, 0 when there is none."""
    return int(_U32.unpack_from(page, _RIGHT_AT)[0])


def lsn_of(page: Page) -> int:
    """The last record whose changes are in the page."""
    return int(_U64.unpack_from(page, _LSN_AT)[0])


def free_bytes(page: Page) -> int:
    """Room for cells and their slots, once the dead bytes are taken back; of a page that is sound."""
    count, heap, dead = _COUNTS.unpack_from(page, _COUNTS_AT)
    return int(heap - HEADER_BYTES - SLOT_BYTES * count + dead)


def divider_of(left: bytes, right: bytes) -> bytes:
    """The shortest beginning of `right` that is greater than `left`."""
    common = 0
    while common < len(left) and common < len(right) and left[common] == right[common]:
        common += 1
    return right[: common + 1]


def new_page(page_id: int, level: int) -> bytearray:
    """An empty page with LSN 0."""
    page = bytearray(PAGE_BYTES)
    format_page(page, page_id, level)
    return page


def accesses_of(root: Page) -> int:
    """How many pages were looked at since the root came into memory."""
    return int.from_bytes(root[ACCESSES_AT:REFERENCED_AT], "little")


def keep_accesses(before: Page | None, root: bytearray) -> None:
    """Continues counting in another root."""
    if before is not None:
        root[ACCESSES_AT:REFERENCED_AT] = before[ACCESSES_AT:REFERENCED_AT]


def is_referenced(page: Page) -> bool:
    """Whether the page was used since `clear_reference`."""
    return page[REFERENCED_AT] != 0


def clear_reference(page: bytearray) -> None:
    """Gives the page its second chance."""
    page[REFERENCED_AT] = 0


# Page updates: what a record of the engine's log says about pages, for redo and undo.
#
#     byte   0      4      5           7             9           11
#            +------+------+-----------+-------------+-----------+-----+-------+-----+
#            | page | what | key bytes | value bytes | old bytes | key | value | old |   all little-endian
#            | u32  | u8   | u16       | u16         | u16       |     |       |     |
#            +------+------+-----------+-------------+-----------+-----+-------+-----+
#
#     what  1 INSERT    a new cell
#           2 REPLACE   another value for a cell; old = the value before
#           3 REMOVE    a cell goes; old = the value before
#           4 IMAGE     value = the page's image (`page.py`): replaces the page without reading it
#           5 TRUNCATE  all cells with a key >= key go, value = u32 right sibling from now on; redo only
#           7 SPLIT     value = u32 of another page: the page is what that one has from key on; a TRUNCATE of that one
#           in
#                       the same record follows; redo only
#
#     what  6 PUT       page u32, what u8, position varint: an INSERT of which the rest follows from the record of a
#                       put: the key from its names and its seq, the cell from its numbers, its LSN and where its value
#                       is
#
# Invariants
# - A record is done on a page whose LSN is smaller than the record's, all of its updates to that page together; then
#   the page has the record's LSN. So redo may be repeated. It begins where every page that changes begins with its
#   image: a SPLIT needs the other page as it was then.
# - REPLACE and REMOVE of a cell that is not there, and INSERT of one that is, are damage: DataError.
# - Nothing of a record is done before all of its pages are in memory.
# - PUT stands alone in a record. `record_updates` expands it; no other code handles it.
#
# The loops are C (`native/updates.h`).


INSERT, REPLACE, REMOVE, IMAGE, TRUNCATE, PUT, SPLIT = range(1, 8)

UPDATE_HEADER = struct.Struct("<IBHHH")
PUT_HEADER = struct.Struct("<IB")
_pack = UPDATE_HEADER.pack

redo = _native.redo
record_updates = _native.record_updates


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


def encode_image(page: int, image: bytes) -> bytes:
    """The bytes of an IMAGE."""
    return _pack(page, IMAGE, 0, len(image), 0) + image


def decode(updates: bytes | memoryview, lsn: int = 0) -> list[Update]:
    """The updates of a record; DataError, with the LSN, when they are damaged."""
    return [Update(*parts) for parts in _native.decode_updates(updates, lsn)]


def redo_frames(pages: Pages, rec_lsns: dict[int, int], frames: Frames, start: int = 0) -> Redone:
    """Does the records of whole frames from index `start` on, until the end or until a page is missing.

    Pages that were changed join `rec_lsns` with the LSN of their first change, unless they are there. `must_be_read` is
    False when the record replaces the missing page as a whole: an empty one will do.
    """
    places = (frames.buffer, frames.positions, frames.lengths)
    return Redone(*_native.redo_frames(pages, rec_lsns, frames.first_offset, *places, start))


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
