"""Building a tree from cells that come in order: pages are filled one after the other, on every level at once.

Invariants
- The pages that are still being filled, one a level, are pinned; all others are complete and may leave memory.
- Page 1 becomes the root at the end: it takes over what the one page of the highest level has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from tidelog.engine.buffer_pool import BufferPool
from tidelog.engine.page import (
    MAX_CELL_BYTES,
    PAGE_BYTES,
    ROOT,
    SLOT_BYTES,
    Cell,
    cell_bytes,
    cells,
    format_page,
    free_bytes,
    insert,
    set_header,
)
from tidelog.engine.rows import fill_page
from tidelog.engine.rows_python import row_at
from tidelog.engine.tree_python import divider_of
from tidelog.errors import InputError

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
            raise InputError("cells to be loaded are not in order, or a key comes twice")
        if cell_bytes(len(key), len(value)) > MAX_CELL_BYTES:
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
                self._last_key = row_at(raw, last_at, False)[0]
            if at < len(raw):
                self._begin_leaf(row_at(raw, at, False)[0])

    def _begin_leaf(self, key: bytes) -> None:
        if self._last_key is not None and key <= self._last_key:
            raise InputError("cells to be loaded are not in order, or a key comes twice")
        self._go_on(0, key)

    def _put(self, level: int, key: bytes, value: bytes) -> None:
        if level == len(self._open):
            self._open.append(self._begin(level))
            if level:  # the first page of the level below has no page to the left, and so no least key
                key = b""
        page = self._pool.pages[self._open[level]]
        if free_bytes(page) - cell_bytes(len(key), len(value)) - SLOT_BYTES < RESERVED_BYTES:
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
