"""Whether a whole tree is what it must be: order, levels, siblings, every page in one place."""

from __future__ import annotations

from typing import NamedTuple

from tidelog.engine.buffer_pool import BufferPool
from tidelog.engine.page import ROOT, Cell, cells, check_page, level_of, right_of
from tidelog.errors import DataError


class TreeReport(NamedTuple):
    """What a tree consists of."""

    pages: int
    cells: int
    height: int


class _Range(NamedTuple):
    """A page, and the keys that may be below it: from `low` to before `high`."""

    page_id: int
    low: bytes
    high: bytes | None


def check_tree(pool: BufferPool, next_page: int) -> TreeReport:
    """Reads all pages, level by level; DataError at the first that is wrong."""
    level = level_of(_page_of(pool, ROOT))
    height, cell_count = level + 1, 0
    row = [_Range(ROOT, b"", None)]
    seen = {ROOT}
    while True:
        below, cell_count = _check_row(pool, row, level)
        if level == 0:
            return TreeReport(len(seen), cell_count, height)
        for each in below:
            if each.page_id in seen or not ROOT < each.page_id < next_page:
                raise DataError(f"page {each.page_id} has more than one parent, or was never given out")
            seen.add(each.page_id)
        row, level = below, level - 1


def _check_row(pool: BufferPool, row: list[_Range], level: int) -> tuple[list[_Range], int]:
    """Checks the pages of a level from left to right; (those of the level below, number of cells)."""
    below: list[_Range] = []
    cell_count = 0
    rights = [each.page_id for each in row[1:]] + [0]
    for each, right in zip(row, rights, strict=True):
        page = _page_of(pool, each.page_id)
        if level_of(page) != level or right_of(page) != right:
            raise DataError(f"page {each.page_id}: its level or its right sibling is wrong")
        found = cells(page)
        _check_keys(found, each, level)
        cell_count += len(found)
        if level:
            below += _children(found, each)
    return below, cell_count


def _check_keys(found: list[Cell], within: _Range, level: int) -> None:
    if level and found[0][0] != b"":
        raise DataError(f"page {within.page_id}: the first key of an inner page is not empty")
    keys = [key for key, _ in found[1 if level else 0 :]]
    if keys and (keys[0] < within.low or (within.high is not None and keys[-1] >= within.high)):
        raise DataError(f"page {within.page_id}: a key belongs elsewhere")


def _children(found: list[Cell], within: _Range) -> list[_Range]:
    lows = [within.low] + [key for key, _ in found[1:]]
    highs = [*lows[1:], within.high]
    numbers = [int.from_bytes(value, "little") for _, value in found]
    return [_Range(*parts) for parts in zip(numbers, lows, highs, strict=True)]


def _page_of(pool: BufferPool, page_id: int) -> bytes:
    """A copy of a page that is sound by itself."""
    while (page := pool.pages.get(page_id)) is None:
        pool.load(page_id)
    copy = bytes(page)
    fault = check_page(copy, page_id)
    if fault is not None:
        raise DataError(f"page {page_id}: {fault}")
    return copy
