"""Bulk load: builds a tree from sorted cells, filling pages one after the other on every level at once; or in pieces,
many key ranges in parallel.

Invariants
- The pages that are being filled, one per level, are pinned; all others are complete and may be evicted.
- Page 1 becomes the root at the end: it takes over the contents of the single page of the highest level.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tidelog._native import fill_page
from tidelog.engine.btree.buffer_pool import BufferPool
from tidelog.engine.btree.page import (
    CELL_HEADER_BYTES,
    HEADER_BYTES,
    MAX_CELL_BYTES,
    PAGE_BYTES,
    ROOT,
    SLOT_BYTES,
    Cell,
    cells,
    divider_of,
    format_page,
    free_bytes,
    insert,
    new_page,
    sealed,
    set_header,
)
from tidelog.engine.sst.block import row_at
from tidelog.errors import DataError, InputError

# A tenth stays free, so that the first inserts after a restore do not split every page.
RESERVED_BYTES = PAGE_BYTES // 10

_CHILD = struct.Struct("<I")


class _Loader:
    def __init__(self, pool: BufferPool, lsn: int) -> None:
        self._pool = pool
        self._lsn = lsn
        self._open: list[int] = []  # the page being filled, of each level
        self._last_key: bytes | None = None
        self.next_page = ROOT + 1

    def add(self, key: bytes, value: bytes) -> None:
        """The next cell of the leaves."""
        if self._last_key is not None and key <= self._last_key:
            raise InputError("cells to load are not sorted, or a key occurs twice")
        if CELL_HEADER_BYTES + len(key) + len(value) > MAX_CELL_BYTES:
            raise InputError(f"a cell has at most {MAX_CELL_BYTES} bytes")
        self._put(0, key, value)
        self._last_key = key

    def add_rows(self, raw: bytes) -> None:
        """The next cells of the leaves, as rows of a block."""
        if not self._open:
            self._open.append(self._begin(0))
        at = 0
        while at < len(raw):
            begin = at
            at, last_at = fill_page(self._pool.pages[self._open[0]], raw, at, RESERVED_BYTES, self._lsn)
            if at > begin:
                self._last_key = row_at(raw, last_at)[0]
            if at < len(raw):
                self._begin_leaf(row_at(raw, at)[0])

    def _begin_leaf(self, key: bytes) -> None:
        if self._last_key is not None and key <= self._last_key:
            raise InputError("cells to load are not sorted, or a key occurs twice")
        self._go_on(0, key)

    def _put(self, level: int, key: bytes, value: bytes) -> None:
        if level == len(self._open):
            self._open.append(self._begin(level))
            if level:  # the first page of the level below has no page to the left, and so no least key
                key = b""
        page = self._pool.pages[self._open[level]]
        if free_bytes(page) - CELL_HEADER_BYTES - len(key) - len(value) - SLOT_BYTES < RESERVED_BYTES:
            page, key = self._go_on(level, key), b"" if level else key
        insert(page, key, value, self._lsn)

    def _begin(self, level: int) -> int:
        page_id = self.next_page
        self.next_page += 1
        self._pool.new(page_id, level)
        self._pool.pin(page_id)
        self._pool.dirtied(page_id, self._lsn)
        return page_id

    def _go_on(self, level: int, key: bytes) -> bytearray:
        """Closes the page of a level and begins the next one, which its parent gets to know."""
        full, page_id = self._open[level], self._begin(level)
        if level == 0:
            key = divider_of(self._last_key or b"", key)
        set_header(self._pool.pages[full], page_id, self._lsn)
        if level + 1 == len(self._open):
            self._put(level + 1, b"", _CHILD.pack(full))
        self._put(level + 1, key, _CHILD.pack(page_id))
        self._open[level] = page_id
        self._pool.unpin(full)
        return self._pool.pages[page_id]

    def finish(self) -> None:
        """Makes page 1 the root."""
        root = self._pool.new(ROOT, 0)
        self._pool.dirtied(ROOT, self._lsn)
        if self._open:
            format_page(root, ROOT, len(self._open) - 1)
            for key, value in cells(self._pool.pages[self._open[-1]]):
                insert(root, key, value, self._lsn)
        set_header(root, 0, self._lsn)
        for page_id in self._open:
            self._pool.unpin(page_id)


def load_tree(pool: BufferPool, source: Iterable[Cell], lsn: int) -> tuple[int, int]:
    """Fills an empty pool and page file; (number of cells, next page)."""
    loader = _Loader(pool, lsn)
    count = 0
    for key, value in source:
        loader.add(key, value)
        count += 1
    loader.finish()
    return count, loader.next_page


def load_tree_of_rows(pool: BufferPool, source: Iterable[bytes], lsn: int) -> int:
    """The same from rows as they are in blocks, many at a time; the next page."""
    loader = _Loader(pool, lsn)
    for raw in source:
        loader.add_rows(raw)
    loader.finish()
    return loader.next_page


# Building a tree in pieces: first leaves of key ranges, each without its number, then the numbers, then the inner
# pages.
#
# `load_tree` fills pages one after the other in one pool. Here many workers may fill leaves at once, each those of a
# range of keys: the number of a leaf is known once all of them have been counted.
#
# Invariants
# - Pages are filled up to the same tenth as in `load_tree`, and hold the same cells; only the last leaf of a range may
#   have less. A tree built in either way has the same cells.
# - Leaves are numbered from 2 on in key order, inner pages after them; page 1 is the root.
# - A placed page is sealed: it has its number, its right sibling, its LSN and its checksum.


FIRST_LEAF = ROOT + 1
_NO_NUMBER = 0
_ROOM_BYTES = PAGE_BYTES - HEADER_BYTES - RESERVED_BYTES
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
                if filling.is_empty and row_at(raw, begin)[0] <= last_key:
                    raise DataError("rows of a tree are not sorted, or a key occurs twice")
                last_key = row_at(raw, last_at)[0]
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
        return Leaf(self.page, rows, cell_count(self.page), row_at(rows, 0)[0], self._last_key)


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
        needed = CELL_HEADER_BYTES + len(child.key) + _CHILD.size + SLOT_BYTES
        if not groups or needed > room:
            groups.append([child])
            room = _ROOM_BYTES - CELL_HEADER_BYTES - _CHILD.size - SLOT_BYTES
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
