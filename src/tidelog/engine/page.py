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
- A page image is the page without its free middle: header, slots, heap; no dead bytes, and crc and LSN are 0.
- Every call here is one step for all threads: nobody sees half of a change, and readers need no lock.

Pages from a disk are hostile: a damaged one raises DataError, whatever is in it. The loops are C (`_engine.c`);
`page_python`, `page_image_python` and `tree_python` give the same answers where it could not be built.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tidelog.engine import page_image_python, page_python, tree_python

if TYPE_CHECKING:
    _pages = page_python
    _images = page_image_python
    _tree = tree_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _engine

        _pages = _images = _tree = _engine
    except ImportError:
        _pages, _images, _tree = page_python, page_image_python, tree_python

KERNEL_IS_NATIVE = _pages is not page_python
PAGE_BYTES = page_python.PAGE_BYTES
HEADER_BYTES = page_python.HEADER_BYTES
SLOT_BYTES = page_python.SLOT_BYTES
CELL_HEADER_BYTES = page_python.CELL_HEADER_BYTES
# At least four cells fit into a page, so that one split in the middle always makes room for one more.
MAX_CELL_BYTES = (PAGE_BYTES - HEADER_BYTES) // 4 - SLOT_BYTES
ROOT = page_python.ROOT

MISSING, NO_ROOM, NEEDS_IMAGE = tree_python.MISSING, tree_python.NO_ROOM, tree_python.NEEDS_IMAGE

Cell = page_python.Cell
Page = page_python.Page
Pages = tree_python.Pages

format_page = _pages.format_page
insert = _pages.insert
replace = _pages.replace
remove = _pages.remove
set_header = _pages.set_header
get = _pages.get
cells = _pages.cells
compact_image = _images.compact_image
set_image = _images.set_image
sealed = _images.sealed
verify_crc = _images.verify_crc
check_page = _images.check_page
put_back = _images.put_back
find = _tree.find
scan = _tree.scan
skip = _tree.skip
place = _tree.place
plan_split = _tree.plan_split

id_of = page_python.id_of
level_of = page_python.level_of
right_of = page_python.right_of
lsn_of = page_python.lsn_of
free_bytes = page_python.free_bytes


def cell_bytes(key_bytes: int, value_bytes: int) -> int:
    """Bytes of a cell in the heap of its page; what `place` and `Tree.prepare` want to know."""
    return CELL_HEADER_BYTES + key_bytes + value_bytes


def new_page(page_id: int, level: int) -> bytearray:
    """An empty page with LSN 0."""
    page = bytearray(PAGE_BYTES)
    format_page(page, page_id, level)
    return page


def accesses_of(root: Page) -> int:
    """How many pages were looked at since the root came into memory."""
    return int.from_bytes(root[page_python.ACCESSES_AT : page_python.REFERENCED_AT], "little")


def keep_accesses(before: Page | None, root: bytearray) -> None:
    """Goes on counting in another root."""
    if before is not None:
        root[page_python.ACCESSES_AT : page_python.REFERENCED_AT] = before[
            page_python.ACCESSES_AT : page_python.REFERENCED_AT
        ]


def is_referenced(page: Page) -> bool:
    """Whether somebody has used the page since `clear_reference`."""
    return page[page_python.REFERENCED_AT] != 0


def clear_reference(page: bytearray) -> None:
    """Gives the page its second chance."""
    page[page_python.REFERENCED_AT] = 0
