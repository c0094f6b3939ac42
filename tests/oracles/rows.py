"""The oracle of rows of blocks: whether they are sound, merging them, filling pages."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tests.oracles import pages

from tidelog.engine.btree.page import (
    CELL_HEADER_BYTES,
    MAX_CELL_BYTES,
    PAGE_BYTES,
    SLOT_BYTES,
    lsn_of,
    right_of,
)
from tidelog.engine.sst.sstable import Source
from tidelog.errors import DataError

_LENGTHS = struct.Struct("<HH")
_CELL_BYTES = struct.Struct("<H")


def row_at(raw: bytes, at: int, has_places: bool) -> tuple[bytes, bytes, int]:
    """The row at a place: key, value (of one with a place, the cell), and where the next one is."""
    key_at = at + _LENGTHS.size
    if key_at > len(raw):
        raise DataError("truncated row in a block")
    key_bytes, value_bytes = _LENGTHS.unpack_from(raw, at)
    value_at = key_at + key_bytes
    end = value_at + value_bytes
    if end > len(raw):
        raise DataError("truncated row in a block")
    if not has_places:
        return raw[key_at:value_at], raw[value_at:end], end
    cell_at = value_at + _CELL_BYTES.size
    cell_bytes = _CELL_BYTES.unpack_from(raw, value_at)[0] if cell_at <= end else 0
    if not cell_bytes or cell_at + cell_bytes > end:
        raise DataError("a block with a row that has no cell")
    return raw[key_at:value_at], raw[cell_at : cell_at + cell_bytes], end


def check_rows(raw: bytes, count: int, after_key: bytes, has_places: bool, /) -> bytes:
    """The last key of a block whose rows are in order and behind `after_key`."""
    at = found = 0
    while at < len(raw):
        key, _, at = row_at(raw, at, has_places)
        if key <= after_key:
            raise DataError("rows of a block are not in order")
        after_key = key
        found += 1
    if found != count:
        raise DataError("a block with another number of rows than it says")
    return after_key


def find_row(raw: bytes, key: bytes, /) -> tuple[bytes, bytes] | None:
    """The first row that is not before a key."""
    at = 0
    while at < len(raw):
        found, value, at = row_at(raw, at, False)
        if found >= key:
            return found, value
    return None


class _Stream:
    def __init__(self, source: Source) -> None:
        self.raw, self.at, self.has_places = source
        if self.at >= len(self.raw):
            raise ValueError("a source is at its end")

    def look(self) -> None:
        self.key, self.value, self.end = row_at(self.raw, self.at, self.has_places)

    def step(self, key: bytes) -> bool:
        """Goes on if it is at this key; whether it is at its end then."""
        if self.key != key:
            return False
        self.at = self.end
        if self.at == len(self.raw):
            return True
        self.look()
        if self.key <= key:
            raise DataError("rows of a block are not in order")
        return False


def merge_rows(sources: tuple[Source, ...], drops_removed: bool, /) -> tuple[bytes, int, tuple[int, ...]]:
    """(rows of all sources in order, how many, where each source is then). It stops when one is at its end.

    Of rows with the same key that of the first source counts. One without a value says that the key is gone; such rows
    can be left out, when there is nothing older that they are about.
    """
    if not sources:
        raise ValueError("there is no source")
    streams = [_Stream(source) for source in sources]
    rows = list(_merged(streams, drops_removed))
    raw = b"".join(part for key, value in rows for part in (_LENGTHS.pack(len(key), len(value)), key, value))
    return raw, len(rows), tuple(stream.at for stream in streams)


def _merged(streams: list[_Stream], drops_removed: bool) -> Iterator[tuple[bytes, bytes]]:
    for stream in streams:
        stream.look()
    is_over = False
    while not is_over:
        least = min(streams, key=lambda stream: stream.key)  # the first of those that are equal
        key, value = least.key, least.value
        if value or not drops_removed:
            yield key, value
        for stream in streams:
            is_over |= stream.step(key)


def fill_page(page: bytearray, raw: bytes, at: int, reserved_bytes: int, lsn: int, /) -> tuple[int, int]:
    """Rows go behind the cells of a page, as long as it keeps so many bytes.

    (Where the next row is, where the last one was that went in.)
    """
    if at > len(raw) or reserved_bytes > PAGE_BYTES:
        raise ValueError("a place behind the rows, or more reserved than a page has")
    there = pages.cells(page)
    before, last_at = there[-1][0] if there else None, at
    if lsn < lsn_of(page):
        found = lsn_of(page)
        raise pages.damage(page, f"a change of record {lsn} comes behind one of record {found}")
    while at < len(raw):
        key, value, end = row_at(raw, at, False)
        size = CELL_HEADER_BYTES + len(key) + len(value)
        if size > MAX_CELL_BYTES:
            raise DataError("a row that is too large for a page")
        if before is not None and key <= before:
            raise DataError("rows to be loaded are not in order, or a key comes twice")
        if pages.free_bytes(page) < size + SLOT_BYTES + reserved_bytes:
            break
        pages.insert(page, key, value, lsn)
        before, last_at, at = key, at, end
    pages.set_header(page, right_of(page), lsn)
    return at, last_at
