"""The pure-Python twin of the C kernel for whole pages: images, checksums, and whether a page is sound.

The same answers as `_engine.c`, slower; `page.py` draws the page and says what an image is.
"""

from __future__ import annotations

import struct
import zlib

from tidelog.engine.page_python import (
    ACCESSES_AT,
    CELL_HEADER_BYTES,
    HEADER_BYTES,
    MAX_LEVEL,
    PAGE_BYTES,
    REFERENCED_AT,
    SLOT_BYTES,
    Page,
    atomic,
    compact,
    expect_page,
    id_of,
    key_at,
    level_of,
    opened,
    place_of_cell,
    raise_lsn,
)
from tidelog.errors import DataError

_COUNTS = struct.Struct("<HHH")
_COUNTS_AT = 24
_U32 = struct.Struct("<I")


def image_of(page: Page) -> bytes:
    """The page without its free middle, its dead bytes, its LSN and what it holds in memory only."""
    copy = bytearray(page)
    compact(copy, -1)
    count, heap, _ = opened(copy)
    _U32.pack_into(copy, 0, 0)
    raise_lsn(copy, 0)
    copy[ACCESSES_AT:HEADER_BYTES] = bytes(HEADER_BYTES - ACCESSES_AT)
    return bytes(copy[: HEADER_BYTES + SLOT_BYTES * count] + copy[heap:])


@atomic
def compact_image(page: Page, /) -> bytes:
    """The page without its free middle: what an IMAGE update holds."""
    opened(page)
    return image_of(page)


def page_of_image(image: bytes, page_id: int) -> bytearray:
    """The whole page again; DataError when it is not a sound image of that page."""
    wrong = DataError(f"page {page_id}: its image is damaged")
    if len(image) < HEADER_BYTES:
        raise wrong
    count, heap, _ = _COUNTS.unpack_from(image, _COUNTS_AT)
    slots_end = HEADER_BYTES + SLOT_BYTES * count
    if heap > PAGE_BYTES or slots_end > heap or len(image) != slots_end + PAGE_BYTES - heap:
        raise wrong
    page = bytearray(PAGE_BYTES)
    page[:slots_end] = image[:slots_end]
    page[heap:] = image[slots_end:]
    if fault_of(page, page_id) is not None:
        raise wrong
    return page


def put_image(page: bytearray, image: bytes, page_id: int) -> None:
    """Makes the page what the image says; what it holds in memory only stays."""
    expect_page(page, bytearray)
    whole = page_of_image(image, page_id)
    whole[ACCESSES_AT:HEADER_BYTES] = page[ACCESSES_AT:HEADER_BYTES]
    page[:] = whole


@atomic
def set_image(page: bytearray, image: bytes, /) -> None:
    """Makes the page what the image says; DataError when the image is not sound."""
    put_image(page, image, _U32.unpack_from(image, 8)[0] if len(image) >= HEADER_BYTES else 0)


@atomic
def sealed(page: Page, /) -> bytes:
    """The page as it goes into the file: free bytes and what is in memory only are zero, and the crc is there."""
    count, heap, _ = opened(page)
    slots_end = HEADER_BYTES + SLOT_BYTES * count
    copy = bytearray(page)
    copy[ACCESSES_AT:HEADER_BYTES] = bytes(HEADER_BYTES - ACCESSES_AT)
    copy[slots_end:heap] = bytes(heap - slots_end)
    _U32.pack_into(copy, 0, zlib.crc32(memoryview(copy)[4:]))
    return bytes(copy)


@atomic
def verify_crc(page: Page, /) -> bool:
    """Whether the bytes are those that were sealed."""
    expect_page(page, bytes, bytearray)
    copy = bytearray(page)
    copy[REFERENCED_AT] = 0
    return bool(zlib.crc32(memoryview(copy)[4:]) == _U32.unpack_from(page, 0)[0])


@atomic
def check_page(page: Page, page_id: int, /) -> str | None:
    """What is wrong with the structure of a page; None when it is sound."""
    expect_page(page, bytes, bytearray)
    return fault_of(page, page_id)


def fault_of(page: Page, page_id: int) -> str | None:
    """The first fault of a page, in words."""
    try:
        count, heap, dead = opened(page)
    except DataError:
        return "its header is damaged"
    if id_of(page) != page_id:
        return f"it says that it is page {id_of(page)}"
    level = level_of(page)
    if level > MAX_LEVEL:
        return f"its level is {level}"
    if level and not count:
        return "an inner page without a child"
    return _fault_of_cells(page, count, level) or _fault_of_heap(page, count, heap, dead)


def _fault_of_cells(page: Page, count: int, level: int) -> str | None:
    before: bytes | None = None
    for index in range(count):
        try:
            _, _, value_bytes = place_of_cell(page, index)
        except DataError:
            return f"cell {index} lies outside of the heap"
        if level and value_bytes != 4:
            return f"cell {index} of an inner page names no child"
        key = key_at(page, index)
        if before is not None and key <= before:
            return f"cell {index} is out of order"
        before = key
    return None


def _fault_of_heap(page: Page, count: int, heap: int, dead: int) -> str | None:
    used = bytearray(PAGE_BYTES)
    total = 0
    for index in range(count):
        start, key_bytes, value_bytes = place_of_cell(page, index)
        size = CELL_HEADER_BYTES + key_bytes + value_bytes
        begin = start - CELL_HEADER_BYTES
        if any(used[begin : begin + size]):
            return f"cell {index} overlaps another"
        used[begin : begin + size] = b"\1" * size
        total += size
    if total + dead != PAGE_BYTES - heap:
        return "its heap is miscounted"
    return None


@atomic
def put_back(pages: dict[int, bytearray], copies: list[tuple[int, Page | None]], /) -> None:
    """Makes pages what they were, all in one step; those without a copy were not there and leave."""
    for _, copy in copies:
        if copy is not None:
            expect_page(copy, bytes, bytearray)
    for page_id, copy in copies:
        if copy is None:
            pages.pop(page_id, None)
        elif page_id in pages:
            pages[page_id][:] = copy
