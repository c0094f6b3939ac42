"""The oracle of pages: the same answers as `native/page_calls.h`, slower; `page.py` draws the page."""

from __future__ import annotations

import struct

from tidelog.engine.btree.page import (
    ACCESSES_AT,
    CELL_HEADER_BYTES,
    HEADER_BYTES,
    MAGIC,
    PAGE_BYTES,
    ROOT,
    SLOT_BYTES,
    Cell,
    Page,
    lsn_of,
)
from tidelog.errors import DataError

TREE_KIND = 1
MAX_LEVEL = 15
# In memory only, in pages other than the root: where the last insert was, and how many had come there in order.
RUN_INDEX_AT, RUN_LENGTH_AT = 30, 32
# So many inserts, each right behind the one before, are an order and no coincidence.
LONG_RUN = 8

_HEADER = struct.Struct("<IHBBIIQHHH")
_COUNTS = struct.Struct("<HHH")
_COUNTS_AT = 24
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_LSN_AT, _RIGHT_AT = 16, 12
_CELL = struct.Struct("<HH")


# ---- what is in a page ----


def id_of(page: Page) -> int:
    """The page's own number."""
    return int(_U32.unpack_from(page, 8)[0])


def damage(page: Page, text: str) -> DataError:
    """An error that names the page."""
    return DataError(f"page {id_of(page)}: {text}")


def expect_page(page: object, *kinds: type[Page]) -> None:
    """Whatever else is in it, it is of the right type and size."""
    if not isinstance(page, kinds) or len(page) != PAGE_BYTES:
        raise ValueError(f"a page is a bytearray of {PAGE_BYTES} bytes")


def opened(page: Page) -> tuple[int, int, int]:
    """(cell count, heap start, dead bytes) of something that looks like a page of the tree."""
    expect_page(page, bytes, bytearray)
    magic, kind = struct.unpack_from("<HB", page, 4)
    count, heap, dead = _COUNTS.unpack_from(page, _COUNTS_AT)
    if (
        magic != MAGIC
        or kind != TREE_KIND
        or heap > PAGE_BYTES
        or HEADER_BYTES + SLOT_BYTES * count > heap
        or dead > PAGE_BYTES - heap
    ):
        raise damage(page, "its header is damaged")
    return count, heap, dead


def opened_to_change(page: bytearray) -> tuple[int, int, int]:
    """The same, of one that can be changed."""
    expect_page(page, bytearray)
    return opened(page)


def place_of_cell(page: Page, index: int) -> tuple[int, int, int]:
    """(start of the key, key bytes, value bytes), checked to lie inside of the heap."""
    position = _U16.unpack_from(page, HEADER_BYTES + SLOT_BYTES * index)[0]
    heap = _U16.unpack_from(page, 26)[0]
    if position >= heap and position + CELL_HEADER_BYTES <= PAGE_BYTES:
        key_bytes, value_bytes = _CELL.unpack_from(page, position)
        if position + CELL_HEADER_BYTES + key_bytes + value_bytes <= PAGE_BYTES:
            return position + CELL_HEADER_BYTES, key_bytes, value_bytes
    raise damage(page, f"cell {index} lies outside of the heap")


def key_at(page: Page, index: int) -> bytes:
    """The key of a cell."""
    start, key_bytes, _ = place_of_cell(page, index)
    return bytes(page[start : start + key_bytes])


def value_at(page: Page, index: int) -> bytes:
    """The value of a cell."""
    start, key_bytes, value_bytes = place_of_cell(page, index)
    return bytes(page[start + key_bytes : start + key_bytes + value_bytes])


def cell_size(page: Page, index: int) -> int:
    """Bytes of a cell in the heap."""
    _, key_bytes, value_bytes = place_of_cell(page, index)
    return CELL_HEADER_BYTES + key_bytes + value_bytes


def lower_bound(page: Page, count: int, key: bytes) -> int:
    """Index of the first cell whose key is not less."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if key_at(page, middle) < key:
            low = middle + 1
        else:
            high = middle
    return low


def has_at(page: Page, count: int, index: int, key: bytes) -> bool:
    """Whether the cell at `index` is there and has this key."""
    return index < count and key_at(page, index) == key


def free_bytes(page: Page) -> int:
    """Room for cells and their slots, once the dead bytes are taken back."""
    count, heap, dead = opened(page)
    return heap - HEADER_BYTES - SLOT_BYTES * count + dead


def _set_counts(page: bytearray, count: int, heap: int, dead: int) -> None:
    _COUNTS.pack_into(page, _COUNTS_AT, count, heap, dead)


# ---- changes ----


def format_fresh(page: bytearray, page_id: int, level: int, right: int) -> None:
    """An empty page in the place of whatever it was; what it holds in memory only stays."""
    memory_only = page[ACCESSES_AT:HEADER_BYTES]
    page[:] = bytes(PAGE_BYTES)
    _HEADER.pack_into(page, 0, 0, MAGIC, TREE_KIND, level, page_id, right, 0, 0, PAGE_BYTES, 0)
    page[ACCESSES_AT:HEADER_BYTES] = memory_only


def format_page(page: bytearray, page_id: int, level: int, /) -> None:
    """Makes an empty page of the tree."""
    expect_page(page, bytearray)
    format_fresh(page, page_id, level, 0)


def compact(page: bytearray, skipped: int) -> None:
    """Moves the cells together; that of the index `skipped` (-1: none) is dropped from the heap, its slot stays."""
    count, _, _ = opened(page)
    slots_end = HEADER_BYTES + SLOT_BYTES * count
    image = bytearray(page)
    heap = PAGE_BYTES
    for index in range(count):
        if index == skipped:
            continue
        start, key_bytes, value_bytes = place_of_cell(page, index)
        size = CELL_HEADER_BYTES + key_bytes + value_bytes
        heap -= size
        if heap < slots_end:
            raise damage(page, "its cells overlap")
        image[heap : heap + size] = page[start - CELL_HEADER_BYTES : start - CELL_HEADER_BYTES + size]
        _U16.pack_into(image, HEADER_BYTES + SLOT_BYTES * index, heap)
    page[:] = image
    _set_counts(page, count, heap, 0)


def _no_room(page: Page, size: int) -> DataError:
    return damage(page, f"no room for a cell of {size} bytes")


def put_cell(page: bytearray, index: int, key: bytes, value: bytes, slots: int, skipped: int) -> None:
    """Writes a cell into the heap, moving the others together when they are in the way, and points the slot at it.

    `slots` is how many slots there will be: one more than now for a new cell.
    """
    size = CELL_HEADER_BYTES + len(key) + len(value)
    heap = _COUNTS.unpack_from(page, _COUNTS_AT)[1]
    if heap - size < HEADER_BYTES + SLOT_BYTES * slots:
        compact(page, skipped)
        heap = _COUNTS.unpack_from(page, _COUNTS_AT)[1]
        if heap - size < HEADER_BYTES + SLOT_BYTES * slots:
            raise damage(page, "its free room is miscounted")
    elif skipped >= 0:
        _add_dead(page, cell_size(page, skipped))
    count, heap, dead = _COUNTS.unpack_from(page, _COUNTS_AT)
    heap -= size
    page[heap : heap + size] = _CELL.pack(len(key), len(value)) + key + value
    at = HEADER_BYTES + SLOT_BYTES * index
    if slots > count:
        end = HEADER_BYTES + SLOT_BYTES * count
        page[at + SLOT_BYTES : end + SLOT_BYTES] = page[at:end]
    _U16.pack_into(page, at, heap)
    _set_counts(page, slots, heap, dead)


def _add_dead(page: bytearray, size: int) -> None:
    count, heap, dead = _COUNTS.unpack_from(page, _COUNTS_AT)
    if dead + size > PAGE_BYTES - heap:
        raise damage(page, "its dead bytes are miscounted")
    _set_counts(page, count, heap, dead + size)


def insert_cell(page: bytearray, key: bytes, value: bytes) -> None:
    """A new cell; one that is there already is damage."""
    count, _, _ = opened_to_change(page)
    index = lower_bound(page, count, key)
    if has_at(page, count, index, key):
        raise damage(page, "the key to insert is already there")
    size = CELL_HEADER_BYTES + len(key) + len(value)
    if size + SLOT_BYTES > free_bytes(page):
        raise _no_room(page, size)
    put_cell(page, index, key, value, count + 1, -1)
    _note_run(page, index)


def _note_run(page: bytearray, index: int) -> None:
    if id_of(page) != ROOT:
        is_next = index == _U16.unpack_from(page, RUN_INDEX_AT)[0] + 1
        page[RUN_LENGTH_AT] = min(page[RUN_LENGTH_AT] + 1, 255) if is_next else 0
        _U16.pack_into(page, RUN_INDEX_AT, index)


def continues_run(page: Page, index: int) -> bool:
    """Whether an insert at `index` goes on with many that came in order."""
    is_next = index == _U16.unpack_from(page, RUN_INDEX_AT)[0] + 1
    return id_of(page) != ROOT and is_next and page[RUN_LENGTH_AT] >= LONG_RUN


def replace_cell(page: bytearray, key: bytes, value: bytes) -> None:
    """Another value for a cell; one that is not there is damage."""
    count, _, _ = opened_to_change(page)
    index = lower_bound(page, count, key)
    if not has_at(page, count, index, key):
        raise damage(page, "the key to replace is not there")
    start, key_bytes, old_bytes = place_of_cell(page, index)
    if len(value) <= old_bytes:
        _add_dead(page, old_bytes - len(value))
        _U16.pack_into(page, start - 2, len(value))
        page[start + key_bytes : start + key_bytes + len(value)] = value
        return
    size = CELL_HEADER_BYTES + len(key) + len(value)
    if size > free_bytes(page) + CELL_HEADER_BYTES + key_bytes + old_bytes:
        raise _no_room(page, size)
    put_cell(page, index, key, value, count, index)


def remove_cell(page: bytearray, key: bytes) -> None:
    """Takes a cell away; one that is not there is damage."""
    count, _, _ = opened_to_change(page)
    index = lower_bound(page, count, key)
    if not has_at(page, count, index, key):
        raise damage(page, "the key to remove is not there")
    _add_dead(page, cell_size(page, index))
    at, end = HEADER_BYTES + SLOT_BYTES * index, HEADER_BYTES + SLOT_BYTES * count
    page[at : end - SLOT_BYTES] = page[at + SLOT_BYTES : end]
    _, heap, dead = _COUNTS.unpack_from(page, _COUNTS_AT)
    _set_counts(page, count - 1, heap, dead)


def truncate_cells(page: bytearray, key: bytes, right: int) -> None:
    """Takes all cells from `key` on away: they are in the page `right` now."""
    count, heap, dead = opened_to_change(page)
    keep = lower_bound(page, count, key)
    dead += sum(cell_size(page, index) for index in range(keep, count))
    if dead > PAGE_BYTES - heap:
        raise damage(page, "its dead bytes are miscounted")
    _set_counts(page, keep, heap, dead)
    _U32.pack_into(page, _RIGHT_AT, right)


def raise_lsn(page: bytearray, lsn: int) -> None:
    """The page has all changes up to this record now."""
    _U64.pack_into(page, _LSN_AT, lsn)


def _check_lsn(page: Page, lsn: int) -> None:
    if lsn < lsn_of(page):
        raise damage(page, f"a change of record {lsn} comes behind one of record {lsn_of(page)}")


def insert(page: bytearray, key: bytes, value: bytes, lsn: int, /) -> None:
    """Adds a cell; DataError when the key is there or there is no room."""
    opened_to_change(page)
    _check_lsn(page, lsn)
    insert_cell(page, key, value)
    raise_lsn(page, lsn)


def replace(page: bytearray, key: bytes, value: bytes, lsn: int, /) -> None:
    """Gives a cell another value; DataError when the key is not there or there is no room."""
    opened_to_change(page)
    _check_lsn(page, lsn)
    replace_cell(page, key, value)
    raise_lsn(page, lsn)


def remove(page: bytearray, key: bytes, lsn: int, /) -> None:
    """Takes a cell away; DataError when the key is not there."""
    opened_to_change(page)
    _check_lsn(page, lsn)
    remove_cell(page, key)
    raise_lsn(page, lsn)


def set_header(page: bytearray, right: int, lsn: int, /) -> None:
    """Sets right sibling and LSN, for whoever builds a page cell by cell."""
    opened_to_change(page)
    _U32.pack_into(page, _RIGHT_AT, right)
    raise_lsn(page, lsn)


# ---- reading ----


def get(page: Page, key: bytes, /) -> bytes | None:
    """The value of a key in this page."""
    count, _, _ = opened(page)
    index = lower_bound(page, count, key)
    return value_at(page, index) if has_at(page, count, index, key) else None


def cells(page: Page, /) -> list[Cell]:
    """All cells of a page, in order."""
    count, _, _ = opened(page)
    return [(key_at(page, index), value_at(page, index)) for index in range(count)]


def page_rows(page: Page, /) -> tuple[int, bytes]:
    """How many cells a page has, and all of them as rows of a block."""
    count, rows = opened(page)[0], b""
    for index in range(count):
        key, value = key_at(page, index), value_at(page, index)
        rows += len(key).to_bytes(2, "little") + len(value).to_bytes(2, "little") + key + value
        if len(rows) > PAGE_BYTES:
            raise damage(page, "its cells overlap")
    return count, rows
