"""The pure-Python twin of the C kernel for page updates: parsing them and doing them again.

The same answers as `_engine.c`, slower. `updates.py` draws the bytes.

Nothing of a record is done before all of its pages are in memory, so whoever is told of a missing page loads it and
makes the same call again. A page that has a record's changes already (by its LSN) is left alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from tidelog.engine.page_image_python import put_image
from tidelog.engine.page_python import (
    atomic,
    expect_page,
    insert_cell,
    lsn_of,
    opened,
    raise_lsn,
    remove_cell,
    replace_cell,
    truncate_cells,
)
from tidelog.engine.tree_python import IMAGE, INSERT, REMOVE, REPLACE, TRUNCATE
from tidelog.errors import DataError
from tidelog.log.frame_python import Buffer, byte_view, places

UPDATE_HEADER_BYTES = 11
RECORD_HEADER_BYTES = 32

_UPDATE = struct.Struct("<IBHHH")
PUT = 6
PUT_UPDATE = struct.Struct("<IBQ")
_OPERATION, _PUT_OBJECT = 1, 4
_PUT_RECORD_BYTES = 72
_MAX_KEY_BYTES = 2048
_CELL_BYTES = 38
_LENGTHS = struct.Struct("<HH")
_U32 = struct.Struct("<I")

Pages = dict[int, bytearray]


class ParsedUpdate(NamedTuple):
    """A page update; `what` is one of INSERT, REPLACE, REMOVE, IMAGE, TRUNCATE."""

    page: int
    what: int
    key: bytes
    value: bytes
    old: bytes


@atomic
def decode_updates(updates: Buffer, lsn: int, /) -> list[tuple[int, int, bytes, bytes, bytes]]:
    """All updates of a record: (page, what, key, value, old)."""
    return [tuple(each) for each in parse(byte_view(updates), lsn)]  # type: ignore[misc]


def parse(view: memoryview, lsn: int) -> list[ParsedUpdate]:
    """The updates, each checked to lie inside of the record."""
    found: list[ParsedUpdate] = []
    position = 0
    while position < len(view):
        if position + UPDATE_HEADER_BYTES > len(view):
            raise DataError(f"record {lsn}: a page update is cut short")
        page, what, key_bytes, value_bytes, old_bytes = _UPDATE.unpack_from(view, position)
        if not INSERT <= what <= TRUNCATE:
            raise DataError(f"record {lsn}: a page update of an unknown kind {what}")
        position += UPDATE_HEADER_BYTES
        if position + key_bytes + value_bytes + old_bytes > len(view):
            raise DataError(f"record {lsn}: a page update is cut short")
        parts = []
        for size in (key_bytes, value_bytes, old_bytes):
            parts.append(bytes(view[position : position + size]))
            position += size
        found.append(ParsedUpdate(page, what, *parts))
    return found


def _insert(page: bytearray, update: ParsedUpdate) -> None:
    insert_cell(page, update.key, update.value)


def _replace(page: bytearray, update: ParsedUpdate) -> None:
    replace_cell(page, update.key, update.value)


def _remove(page: bytearray, update: ParsedUpdate) -> None:
    remove_cell(page, update.key)


def _image(page: bytearray, update: ParsedUpdate) -> None:
    put_image(page, update.value, update.page)


def _truncate(page: bytearray, update: ParsedUpdate) -> None:
    opened(page)
    if len(update.value) != 4:
        raise DataError(f"page {update.page}: a right sibling is a number of 4 bytes")
    truncate_cells(page, update.key, _U32.unpack(update.value)[0])


_DO: dict[int, Callable[[bytearray, ParsedUpdate], None]] = {
    INSERT: _insert,
    REPLACE: _replace,
    REMOVE: _remove,
    IMAGE: _image,
    TRUNCATE: _truncate,
}


def _redo_parsed(pages: Pages, parsed: list[ParsedUpdate], lsn: int, rec_lsns: dict[int, int]) -> ParsedUpdate | None:
    """Does one record's updates; or the first one whose page is missing, and nothing was done."""
    for update in parsed:
        if update.page not in pages:
            return update
    behind = {update.page for update in parsed if lsn_of(_page(pages, update.page)) < lsn}
    for update in parsed:
        if update.page in behind:
            _DO[update.what](pages[update.page], update)
    for update in parsed:
        if update.page in behind:
            raise_lsn(pages[update.page], lsn)
            rec_lsns.setdefault(update.page, lsn)
    return None


def _page(pages: Pages, page_id: int) -> bytearray:
    page = pages[page_id]
    expect_page(page, bytearray)
    return page


@atomic
def redo(pages: Pages, updates: Buffer, lsn: int, /) -> int:
    """Does the updates of one record where a page has not got them; a missing page, or -1 when all is done."""
    missing = _redo_parsed(pages, parse(byte_view(updates), lsn), lsn, {})
    return -1 if missing is None else missing.page


def record_updates(record: Buffer, lsn: int, /) -> bytes:
    """The page updates of a record, that of a put written out."""
    return bytes(_updates_of(byte_view(record), lsn))


def _put_update(view: memoryview, update: memoryview, lsn: int) -> bytes:
    """The INSERT that the update of a put stands for."""
    if len(view) < _PUT_RECORD_BYTES + PUT_UPDATE.size or view[0] != _OPERATION or view[44] != _PUT_OBJECT:
        raise DataError(f"record {lsn}: the update of a put, and it is none")
    page, _, position = PUT_UPDATE.unpack(update)
    bucket_bytes, name_bytes = _LENGTHS.unpack_from(view, 45)
    names = view[_PUT_RECORD_BYTES : _PUT_RECORD_BYTES + bucket_bytes + name_bytes]
    key_bytes = bucket_bytes + name_bytes + 11
    if len(names) < bucket_bytes + name_bytes or key_bytes > _MAX_KEY_BYTES:
        raise DataError(f"record {lsn}: its names go beyond its end")
    seq = int.from_bytes(view[8:16], "little")
    head = _UPDATE.pack(page, INSERT, key_bytes, _CELL_BYTES, 0)
    key = b"o%b\0%b\0" % (bytes(names[:bucket_bytes]), bytes(names[bucket_bytes:]))
    order, crc, size, codec, stored_bytes = view[40:44], view[55:59], view[59:67], view[67:68], view[68:72]
    place = lsn.to_bytes(8, "little") + position.to_bytes(8, "little")
    inverted = ((1 << 64) - 1 - seq).to_bytes(8, "big")
    return b"".join((head, key, inverted, b"\0", order, size, crc, codec, place, stored_bytes))


def _updates_of(view: memoryview, lsn: int) -> memoryview:
    if len(view) < RECORD_HEADER_BYTES:
        raise DataError(f"record {lsn}: it is too short for a record")
    start = _U32.unpack_from(view, 4)[0]
    if not RECORD_HEADER_BYTES <= start <= len(view):
        raise DataError(f"record {lsn}: its page updates begin outside of it")
    updates = view[start:]
    if len(updates) == PUT_UPDATE.size and updates[4] == PUT:
        return memoryview(_put_update(view, updates, lsn))
    return updates


@atomic
def redo_frames(
    pages: Pages,
    rec_lsns: dict[int, int],
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    /,
) -> tuple[int, int, bool]:
    """Does the records of whole frames from index `start` on; pages that were changed join `rec_lsns`.

    Returns (index of the first record that is not done, the page that it misses or -1, whether that page must be read
    from the file because it is not replaced as a whole).
    """
    view = byte_view(buffer)
    index = start
    for index, position, length in places(view, positions, lengths, start):
        lsn = first_lsn + index
        parsed = parse(_updates_of(view[position : position + length], lsn), lsn)
        missing = _redo_parsed(pages, parsed, lsn, rec_lsns)
        if missing is not None:
            return index, missing.page, missing.what != IMAGE
        index += 1  # noqa: PLW2901 - where to go on, if this was the last
    return index, -1, False
