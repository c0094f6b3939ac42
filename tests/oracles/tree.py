"""The oracle of the tree: finding, scanning and splitting over the resident pages.

The same answers as `native/tree.h`, slower. Every call starts at the root; a page that is not in memory is named in
the answer, and the caller loads it and asks again.

Pages are hostile: levels must fall by one on the way down, and siblings cannot go in a circle for ever.
"""

from __future__ import annotations

import struct

from tests.oracles.page_images import image_of
from tests.oracles.pages import (
    MAX_LEVEL,
    cell_size,
    continues_run,
    damage,
    format_fresh,
    free_bytes,
    id_of,
    key_at,
    lower_bound,
    opened,
    put_cell,
    value_at,
)

from tidelog.engine.btree.page import (
    ACCESSES_AT,
    CELL_HEADER_BYTES,
    IMAGE,
    INSERT,
    MISSING,
    NEEDS_IMAGE,
    NO_ROOM,
    PAGE_BYTES,
    REFERENCED_AT,
    SLOT_BYTES,
    SPLIT,
    TRUNCATE,
    Cell,
    Pages,
    divider_of,
    level_of,
    lsn_of,
    right_of,
)

# Below this many bytes the moved cells are logged themselves: the page can be made anew without the other.
SMALL_IMAGE_BYTES = 128

_UPDATE = struct.Struct("<IBHHH")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class MissingError(Exception):
    """A page is not in memory."""

    def __init__(self, page_id: int) -> None:
        self.page_id = page_id


def visit(pages: Pages, root: int, page_id: int, level: int | None) -> bytearray:
    """A resident page that is what it is expected to be; counted and marked as used."""
    page = pages.get(page_id)
    if page is None:
        raise MissingError(page_id)
    opened(page)
    if id_of(page) != page_id or level_of(page) > MAX_LEVEL or (level is not None and level_of(page) != level):
        raise damage(page, f"it is not the page {page_id} that another one names")
    page[REFERENCED_AT] = 1
    counter = pages[root]
    _U64.pack_into(counter, ACCESSES_AT, (_U64.unpack_from(counter, ACCESSES_AT)[0] + 1) & 0xFFFFFFFFFFFFFFFF)
    return page


def _child_index(page: bytearray, key: bytes) -> int:
    """Index of the child whose range holds the key."""
    count, _, _ = opened(page)
    if not count:
        raise damage(page, "an inner page without a child")
    low, high = 1, count
    while low < high:
        middle = (low + high) // 2
        if key_at(page, middle) <= key:
            low = middle + 1
        else:
            high = middle
    return low - 1


def _child_of(page: bytearray, index: int) -> int:
    value = value_at(page, index)
    if len(value) != 4:
        raise damage(page, f"cell {index} of an inner page names no child")
    return int(_U32.unpack(value)[0])


def _descend(pages: Pages, root: int, key: bytes) -> list[bytearray]:
    """The pages from the root to the leaf of a key."""
    page = visit(pages, root, root, None)
    path = [page]
    for level in range(level_of(page) - 1, -1, -1):
        page = visit(pages, root, _child_of(page, _child_index(page, key)), level)
        path.append(page)
    return path


def _right_leaf(pages: Pages, root: int, page: bytearray, steps: int) -> bytearray | None:
    right = right_of(page)
    if right == 0:
        return None
    if steps > len(pages):
        raise damage(page, "its right siblings go in a circle")
    return visit(pages, root, right, 0)


def find(pages: Pages, root: int, key: bytes, /) -> Cell | int | None:
    """The first cell of the tree whose key is not less; None behind the last; a page's number when it is missing."""
    try:
        page: bytearray | None = _descend(pages, root, key)[-1]
        steps = 0
        while page is not None:
            count, _, _ = opened(page)
            index = 0 if steps else lower_bound(page, count, key)
            if index < count:
                return key_at(page, index), value_at(page, index)
            steps += 1
            page = _right_leaf(pages, root, page, steps)
    except MissingError as missing:
        return missing.page_id
    return None


def scan_tree(
    pages: Pages, root: int, start: bytes, stop: bytes | None, limit: int, /
) -> tuple[list[Cell], bytes | None] | int:
    """Up to `limit` cells from `start` to before `stop`, and the key to go on from: None at the end.

    A missing page is named, unless some cells were found before it: then they are the answer.
    """
    if limit < 1:
        raise ValueError("limit must be at least 1")
    found: list[Cell] = []
    try:
        page: bytearray | None = _descend(pages, root, start)[-1]
        steps = 0
        while page is not None:
            if _take_cells(page, start if not steps else b"", stop, limit, found):
                return found, found[-1][0] + b"\0" if len(found) == limit else None
            steps += 1
            page = _right_leaf(pages, root, page, steps)
    except MissingError as missing:
        return (found, found[-1][0] + b"\0") if found else missing.page_id
    return found, None


def _take_cells(page: bytearray, start: bytes, stop: bytes | None, limit: int, found: list[Cell]) -> bool:
    """Whether the scan is over, by its limit or by its stop."""
    count, _, _ = opened(page)
    for index in range(lower_bound(page, count, start), count):
        key = key_at(page, index)
        if stop is not None and key >= stop:
            return True
        found.append((key, value_at(page, index)))
        if len(found) == limit:
            return True
    return False


def skip(pages: Pages, root: int, key: bytes, /) -> bytes | int | None:
    """Where the next leaf begins, if the leaf of a key has no cell at or behind it; a page's number when it is missing.

    None when there is such a cell, or no leaf to the right.
    """
    try:
        page, fence = leaf_and_fence(pages, root, key)
    except MissingError as missing:
        return missing.page_id
    count, _, _ = opened(page)
    return None if lower_bound(page, count, key) < count else fence


def leaf_and_fence(pages: Pages, root: int, key: bytes) -> tuple[bytearray, bytes | None]:
    """The leaf of a key, and the least key of what is to the right of it, if anything is."""
    fence: bytes | None = None
    page = visit(pages, root, root, None)
    while level_of(page):
        index = _child_index(page, key)
        child = _child_of(page, index)
        if index + 1 < opened(page)[0]:
            fence = key_at(page, index + 1)
            if fence <= key:
                raise damage(page, "its cells are not in order")
        page = visit(pages, root, child, level_of(page) - 1)
    return page, fence


def leaf_before(pages: Pages, root: int, key: bytes) -> tuple[bytearray, bytes | None]:
    """The leaf where the last cell before a key must be, and where that leaf begins, if anything is to its left."""
    fence: bytes | None = None
    page = visit(pages, root, root, None)
    while level_of(page):
        count = opened(page)[0]
        if not count:
            raise damage(page, "an inner page without a child")
        index = max(1, lower_bound(page, count, key)) - 1
        child = _child_of(page, index)
        if index:
            fence = key_at(page, index)
        page = visit(pages, root, child, level_of(page) - 1)
    return page, fence


def place(
    pages: Pages, root: int, key: bytes, cell_bytes: int, image_floor: int, /
) -> int | tuple[int, int] | tuple[int, tuple[int, ...]]:
    """The leaf where a key belongs, if it has room for that many bytes and has no need of an image.

    Otherwise what is to be done first: (MISSING, page), (NO_ROOM, path from the root) or (NEEDS_IMAGE, page).
    """
    try:
        path = _descend(pages, root, key)
    except MissingError as missing:
        return MISSING, missing.page_id
    leaf = path[-1]
    if cell_bytes and cell_bytes + SLOT_BYTES > free_bytes(leaf):
        return NO_ROOM, tuple(id_of(page) for page in path)
    if lsn_of(leaf) < image_floor:
        return NEEDS_IMAGE, id_of(leaf)
    return id_of(leaf)


# ---- splitting ----


def update(page_id: int, what: int, key: bytes, value: bytes) -> bytes:
    """One page update without an old value."""
    return _UPDATE.pack(page_id, what, len(key), len(value), 0) + key + value


def _middle(page: bytearray, count: int) -> int:
    """The cell at which the bytes of a page are divided into about two halves; at least one stays on each side."""
    total = sum(cell_size(page, index) + SLOT_BYTES for index in range(count))
    point, taken = 0, 0
    while point < count - 1 and 2 * taken < total:
        taken += cell_size(page, point) + SLOT_BYTES
        point += 1
    return max(point, 1)


def _divide(page: bytearray, key: bytes) -> tuple[int, bytes]:
    """(first cell that moves to the right, the key that divides). Whoever inserts in order leaves full pages."""
    count, _, _ = opened(page)
    if level_of(page):
        if count < 2:
            raise damage(page, "it is too small to be split")
        point = count - 1 if _child_index(page, key) == count - 1 else _middle(page, count)
        return point, key_at(page, point)
    index = lower_bound(page, count, key)
    if index and (index == count or continues_run(page, index)):
        return index, divider_of(key_at(page, index - 1), key)
    if count < 2:
        raise damage(page, "it is too small to be split")
    point = _middle(page, count)
    return point, divider_of(key_at(page, point - 1), key_at(page, point))


def page_of_range(page: bytearray, start: int, stop: int, page_id: int, right: int) -> bytearray:
    """A page that has some of the cells; the first key of an inner page is not needed and left out."""
    level = level_of(page)
    fresh = bytearray(PAGE_BYTES)
    format_fresh(fresh, page_id, level, right)
    for index in range(start, stop):
        key, value = b"" if level and index == start else key_at(page, index), value_at(page, index)
        if CELL_HEADER_BYTES + len(key) + len(value) + SLOT_BYTES > free_bytes(fresh):
            raise damage(page, "its cells overlap")
        put_cell(fresh, index - start, key, value, index - start + 1, -1)
    return fresh


def _root_split(page: bytearray, point: int, divider: bytes, next_page: int) -> bytes:
    count, _, _ = opened(page)
    if level_of(page) >= MAX_LEVEL:
        raise damage(page, "the tree is too high")
    top = bytearray(PAGE_BYTES)
    format_fresh(top, id_of(page), level_of(page) + 1, 0)
    put_cell(top, 0, b"", _U32.pack(next_page), 1, -1)
    put_cell(top, 1, divider, _U32.pack(next_page + 1), 2, -1)
    left = image_of(page_of_range(page, 0, point, next_page, next_page + 1))
    right = image_of(page_of_range(page, point, count, next_page + 1, right_of(page)))
    parts = ((next_page, left), (next_page + 1, right), (id_of(page), image_of(top)))
    return b"".join(update(page_id, IMAGE, b"", image) for page_id, image in parts)


def _page_split(page: bytearray, parent: bytearray, point: int, divider: bytes, next_page: int) -> bytes:
    count, _, _ = opened(page)
    fresh = page_of_range(page, point, count, next_page, right_of(page))
    moved = PAGE_BYTES - opened(fresh)[1]
    return (
        update(next_page, IMAGE, b"", image_of(fresh))
        if moved < SMALL_IMAGE_BYTES
        else update(next_page, SPLIT, divider, _U32.pack(id_of(page)))
    ) + (
        update(id_of(page), TRUNCATE, divider, _U32.pack(next_page))
        + update(id_of(parent), INSERT, divider, _U32.pack(next_page))
    )


def plan_split(pages: Pages, path: tuple[int, ...], key: bytes, next_page: int, /) -> tuple[bytes, int]:
    """(page updates, number of new pages) of the split that makes room on the way to a key. Changes nothing.

    It is the lowest page whose parent has room for one more child, or the root: so one split may have to be followed by
    others until the leaf has room.
    """
    if not path:
        raise ValueError("a path has at least one page")
    for depth in range(len(path) - 1, -1, -1):
        page = _resident(pages, path[depth])
        point, divider = _divide(page, key)
        if depth == 0:
            return _root_split(page, point, divider, next_page), 2
        parent = _resident(pages, path[depth - 1])
        if CELL_HEADER_BYTES + len(divider) + 4 + SLOT_BYTES <= free_bytes(parent):
            return _page_split(page, parent, point, divider, next_page), 1
    raise AssertionError("a path ends at the root")


def _resident(pages: Pages, page_id: int) -> bytearray:
    page = pages.get(page_id)
    if page is None:
        raise ValueError(f"page {page_id} is not in memory")
    opened(page)
    return page
