"""A tree that is built in pieces: leaves of key ranges, each without its number, then the numbers, then what is above.

`tree_load` fills pages one after the other in one pool. Here many may fill leaves at once, each those of a range of
keys: which number a leaf gets is known when all of them have been counted.

Invariants
- Pages are filled up to the same tenth as in `tree_load`, and hold what they would hold there; only the last leaf of a
  range may have less. A tree built in either way has the same cells.
- Leaves are numbered from 2 on in the order of their keys, inner pages behind them; page 1 is the root.
- A page that was placed is sealed: it has its number, its right sibling, its LSN and its checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tidelog.engine.page import (
    HEADER_BYTES,
    MAX_CELL_BYTES,
    PAGE_BYTES,
    ROOT,
    SLOT_BYTES,
    Cell,
    cell_bytes,
    insert,
    new_page,
    sealed,
    set_header,
)
from tidelog.engine.tree_load import RESERVED_BYTES
from tidelog.errors import DataError

FIRST_LEAF = ROOT + 1
_NO_NUMBER = 0
_ROOM_BYTES = PAGE_BYTES - HEADER_BYTES - RESERVED_BYTES
_CHILD = struct.Struct("<I")
_PAGE_ID_AT = 8


class Leaf(NamedTuple):
    """A leaf without a number, and the cells in it."""

    page: bytearray
    cells: list[Cell]


class Child(NamedTuple):
    """A page as its parent knows it: the least key that may be below it, and its number."""

    key: bytes
    page_id: int


def filled_leaves(rows: Iterable[Cell], lsn: int) -> Iterator[Leaf]:
    """Leaves with these cells, which come in order of key."""
    gathered: list[Cell] = []
    room, last_key = _ROOM_BYTES, b""
    for row in rows:
        key, value = row
        if key <= last_key:
            raise DataError("rows of a tree are not in order, or a key comes twice")
        needed = cell_bytes(len(key), len(value)) + SLOT_BYTES
        if needed > MAX_CELL_BYTES + SLOT_BYTES:
            raise DataError(f"a row of a tree has {needed - SLOT_BYTES} bytes, and at most {MAX_CELL_BYTES} fit")
        if needed > room:
            yield Leaf(_page_of(0, gathered, lsn), gathered)
            gathered, room = [], _ROOM_BYTES
        gathered.append(row)
        room -= needed
        last_key = key
    if gathered:
        yield Leaf(_page_of(0, gathered, lsn), gathered)


def _page_of(level: int, gathered: Iterable[Cell], lsn: int) -> bytearray:
    page = new_page(_NO_NUMBER, level)
    for key, value in gathered:
        insert(page, key, value, lsn)
    return page


def placed(page: bytes | bytearray, page_id: int, right: int, lsn: int) -> bytes:
    """The same page with its number and its right sibling (0: there is none), as it goes into the file."""
    numbered = bytearray(page)
    _CHILD.pack_into(numbered, _PAGE_ID_AT, page_id)
    set_header(numbered, right, lsn)
    return sealed(numbered)


def inner_pages(leaves: Sequence[Child], lsn: int) -> tuple[list[tuple[int, bytes]], int]:
    """All pages above two or more leaves, each with its number, the root among them; and the first free number."""
    pages: list[tuple[int, bytes]] = []
    children, level, next_page = list(leaves), 1, leaves[-1].page_id + 1
    while len(groups := _grouped(children)) > 1:
        ids = range(next_page, next_page + len(groups))
        rights = [*ids[1:], 0]
        pages += [
            (page_id, placed(_inner_page(level, group, lsn), page_id, right, lsn))
            for page_id, right, group in zip(ids, rights, groups, strict=True)
        ]
        children = [Child(group[0].key, page_id) for page_id, group in zip(ids, groups, strict=True)]
        level, next_page = level + 1, ids.stop
    pages.append((ROOT, placed(_inner_page(level, groups[0], lsn), ROOT, 0, lsn)))
    return pages, next_page


def _grouped(children: Sequence[Child]) -> list[list[Child]]:
    """Those of one page together. The first of a page costs no key: nothing is to the left of it there."""
    groups: list[list[Child]] = []
    room = 0
    for child in children:
        needed = cell_bytes(len(child.key), _CHILD.size) + SLOT_BYTES
        if not groups or needed > room:
            groups.append([child])
            room = _ROOM_BYTES - cell_bytes(0, _CHILD.size) - SLOT_BYTES
        else:
            groups[-1].append(child)
            room -= needed
    return groups


def _inner_page(level: int, group: Sequence[Child], lsn: int) -> bytearray:
    first, *others = group
    entries = [(b"", _CHILD.pack(first.page_id)), *((one.key, _CHILD.pack(one.page_id)) for one in others)]
    return _page_of(level, entries, lsn)


def empty_root(lsn: int) -> bytes:
    """The root of a tree without cells."""
    return placed(new_page(ROOT, 0), ROOT, 0, lsn)
