"""The oracle of whole pages: images, checksums, and whether a page is sound.

The same answers as `native/page_calls.h`, slower; `page.py` draws the page and says what an image is.
"""

from __future__ import annotations

import struct
import zlib

from tests.oracles.pages import (
    MAX_LEVEL,
    compact,
    expect_page,
    format_fresh,
    free_bytes,
    id_of,
    key_at,
    opened,
    place_of_cell,
    put_cell,
    value_at,
)

from tidelog.engine.btree.page import (
    ACCESSES_AT,
    CELL_HEADER_BYTES,
    HEADER_BYTES,
    PAGE_BYTES,
    REFERENCED_AT,
    SLOT_BYTES,
    Page,
    level_of,
    right_of,
)
from tidelog.engine.wal.record_header import decode_varint, encode_varint
from tidelog.errors import DataError

_IMAGE = struct.Struct("<IIB")
_U32 = struct.Struct("<I")


def image_of(page: Page) -> bytes:
    """What an IMAGE update holds: each cell without what its key and its value share with those before."""
    copy = bytearray(page)
    compact(copy, -1)
    parts = [_IMAGE.pack(id_of(page), right_of(page), level_of(page))]
    key = value = b""
    for index in range(opened(copy)[0]):
        before, (key, value) = (key, value), (key_at(copy, index), value_at(copy, index))
        shared_key, shared_value = _common(before[0], key), _common(before[1], value)
        for number in (shared_key, len(key) - shared_key, shared_value, len(value) - shared_value):
            parts.append(encode_varint(number))
        parts += (key[shared_key:], value[shared_value:])
    return b"".join(parts)


def _common(left: bytes, right: bytes) -> int:
    """How many bytes both begin with."""
    differing = (at for at, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, min(len(left), len(right)))


def compact_image(page: Page, /) -> bytes:
    """The page in as few bytes as redo needs: what an IMAGE update holds."""
    opened(page)
    return image_of(page)


def page_of_image(image: bytes, page_id: int) -> bytearray:
    """The whole page again; DataError when it is not a sound image of that page."""
    page = bytearray(PAGE_BYTES)
    try:
        own_id, right, level = _IMAGE.unpack_from(image)
        format_fresh(page, own_id, level, right)
        _put_cells(page, image)
    except (DataError, struct.error) as error:
        raise DataError(f"page {page_id}: its image is damaged") from error
    if fault_of(page, page_id) is not None:
        raise DataError(f"page {page_id}: its image is damaged")
    return page


def _put_cells(page: bytearray, image: bytes) -> None:
    at, count = _IMAGE.size, 0
    key = value = b""
    while at < len(image):
        lengths = []
        for _ in range(4):
            length, at = decode_varint(image, at, PAGE_BYTES)
            lengths.append(length)
        key, at = _part(image, at, key, *lengths[:2])
        value, at = _part(image, at, value, *lengths[2:])
        if CELL_HEADER_BYTES + len(key) + len(value) + SLOT_BYTES > free_bytes(page):
            raise DataError("its cells have no room")
        put_cell(page, count, key, value, count + 1, -1)
        count += 1


def _part(image: bytes, at: int, before: bytes, shared: int, own: int) -> tuple[bytes, int]:
    """A key or a value: the beginning of the one before and what is its own; where the next begins."""
    if shared > len(before) or at + own > len(image):
        raise DataError("a cell is cut short")
    return before[:shared] + image[at : at + own], at + own


def put_image(page: bytearray, image: bytes, page_id: int) -> None:
    """Makes the page what the image says; what it holds in memory only stays."""
    expect_page(page, bytearray)
    whole = page_of_image(image, page_id)
    whole[ACCESSES_AT:HEADER_BYTES] = page[ACCESSES_AT:HEADER_BYTES]
    page[:] = whole


def set_image(page: bytearray, image: bytes, /) -> None:
    """Makes the page what the image says; DataError when the image is not sound."""
    put_image(page, image, _U32.unpack_from(image)[0] if len(image) >= _IMAGE.size else 0)


def sealed(page: Page, /) -> bytes:
    """The page as it goes into the file: free bytes and what is in memory only are zero, and the crc is there."""
    count, heap, _ = opened(page)
    slots_end = HEADER_BYTES + SLOT_BYTES * count
    copy = bytearray(page)
    copy[ACCESSES_AT:HEADER_BYTES] = bytes(HEADER_BYTES - ACCESSES_AT)
    copy[slots_end:heap] = bytes(heap - slots_end)
    _U32.pack_into(copy, 0, zlib.crc32(memoryview(copy)[4:]))
    return bytes(copy)


def verify_crc(page: Page, /) -> bool:
    """Whether the bytes are those that were sealed."""
    expect_page(page, bytes, bytearray)
    copy = bytearray(page)
    copy[REFERENCED_AT] = 0
    return bool(zlib.crc32(memoryview(copy)[4:]) == _U32.unpack_from(page, 0)[0])


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
