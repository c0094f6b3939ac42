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
from tidelog.engine.rows import fill_page
from tidelog.engine.rows_python import row_at
from tidelog.engine.tree_load import RESERVED_BYTES
from tidelog.errors import DataError

FIRST_LEAF = ROOT + 1
_NO_NUMBER = 0
_ROOM_BYTES = PAGE_BYTES - HEADER_BYTES - RESERVED_BYTES
_CHILD = struct.Struct("<I")
_COUNT = struct.Struct("<H")
_PAGE_ID_AT, _COUNT_AT = 8, 24


class Leaf(NamedTuple):
    """A leaf without a number, and the rows in it as they came."""

    page: bytearray
    rows: bytes
    cells: int
    first_key: bytes
    last_key: bytes


class Child(NamedTuple):
    """A page as its parent knows it: the least key that may be below it, and its number."""

    key: bytes
    page_id: int


def filled_leaves(blocks: Iterable[bytes], lsn: int) -> Iterator[Leaf]:
    """Leaves with the rows of these blocks, which are in order of key."""
    filling = _Filling()
    last_key = b""
    for raw in blocks:
        at = 0
        while at < len(raw):
            begin = at
            at, last_at = fill_page(filling.page, raw, at, RESERVED_BYTES, lsn)
            if at > begin:
                if filling.is_empty and row_at(raw, begin, False)[0] <= last_key:
                    raise DataError("rows of a tree are not in order, or a key comes twice")
                last_key = row_at(raw, last_at, False)[0]
                filling.note(raw[begin:at], last_key)
            if at < len(raw):
                yield filling.leaf()
                filling = _Filling()
    if not filling.is_empty:
        yield filling.leaf()


class _Filling:
    """The leaf that is being filled."""

    def __init__(self) -> None:
        self.page = new_page(_NO_NUMBER, 0)
        self._rows: list[bytes] = []
        self._last_key = b""

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def note(self, rows: bytes, last_key: bytes) -> None:
        self._rows.append(rows)
        self._last_key = last_key

    def leaf(self) -> Leaf:
        rows = b"".join(self._rows)
        return Leaf(self.page, rows, cell_count(self.page), row_at(rows, 0, False)[0], self._last_key)


def cell_count(page: bytes | bytearray) -> int:
    """How many cells a page has."""
    return int(_COUNT.unpack_from(page, _COUNT_AT)[0])


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
