"""The oracle of page updates: parsing them and doing them again.

The same answers as `native/updates.h`, slower; `page.py` draws the bytes.

Nothing of a record is done before all of its pages are in memory, so whoever is told of a missing page loads it and
makes the same call again. A page that has a record's changes already (by its LSN) is left alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from tests.oracles.frames import byte_view, places
from tests.oracles.page_images import put_image
from tests.oracles.pages import (
    expect_page,
    insert_cell,
    lower_bound,
    opened,
    raise_lsn,
    remove_cell,
    replace_cell,
    truncate_cells,
)
from tests.oracles.tree import page_of_range

from tidelog.engine.btree.page import (
    ACCESSES_AT,
    IMAGE,
    INSERT,
    PUT,
    PUT_HEADER,
    REMOVE,
    REPLACE,
    SPLIT,
    TRUNCATE,
    UPDATE_HEADER,
    Pages,
    lsn_of,
    right_of,
)
from tidelog.engine.btree.page import HEADER_BYTES as PAGE_HEADER_BYTES
from tidelog.engine.mvcc.cells import at, encode_pointer
from tidelog.engine.wal.record_header import (
    HEADER_BYTES,
    OPERATION,
    OperationHead,
    decode_operation_head,
    decode_varint,
)
from tidelog.errors import DataError
from tidelog.log.frame import Buffer

_PUT_OBJECT = 4
_MAX_KEY_BYTES = 2048
_U32 = struct.Struct("<I")


class ParsedUpdate(NamedTuple):
    """A page update; `what` is one of INSERT, REPLACE, REMOVE, IMAGE, TRUNCATE."""

    page: int
    what: int
    key: bytes
    value: bytes
    old: bytes


def decode_updates(updates: Buffer, lsn: int, /) -> list[tuple[int, int, bytes, bytes, bytes]]:
    """All updates of a record: (page, what, key, value, old)."""
    return [tuple(each) for each in parse(byte_view(updates), lsn)]  # type: ignore[misc]


def parse(view: memoryview, lsn: int) -> list[ParsedUpdate]:
    """The updates, each checked to lie inside of the record."""
    found: list[ParsedUpdate] = []
    position = 0
    while position < len(view):
        if position + UPDATE_HEADER.size > len(view):
            raise DataError(f"record {lsn}: a page update is cut short")
        page, what, key_bytes, value_bytes, old_bytes = UPDATE_HEADER.unpack_from(view, position)
        if what not in _DO and what != SPLIT:
            raise DataError(f"record {lsn}: a page update of an unknown kind {what}")
        position += UPDATE_HEADER.size
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


def _split(pages: Pages, update: ParsedUpdate, later: list[ParsedUpdate]) -> None:
    """Makes the page what the right part of another is, which a later update of the same record cuts."""
    source_id = _U32.unpack(update.value)[0] if len(update.value) == 4 else 0
    if not any(one.what == TRUNCATE and one.page == source_id for one in later):
        raise DataError(f"page {update.page}: the page that it was split from is not as it was then")
    source, page = pages[source_id], pages[update.page]
    count, _, _ = opened(source)
    fresh = page_of_range(source, lower_bound(source, count, update.key), count, update.page, right_of(source))
    page[:ACCESSES_AT], page[PAGE_HEADER_BYTES:] = fresh[:ACCESSES_AT], fresh[PAGE_HEADER_BYTES:]


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
    for number, update in enumerate(parsed):
        if update.page in behind and update.what == SPLIT:
            _split(pages, update, [one for one in parsed[number + 1 :] if one.page in behind])
        elif update.page in behind:
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


def redo(pages: Pages, updates: Buffer, lsn: int, /) -> int:
    """Does the updates of one record where a page has not got them; a missing page, or -1 when all is done."""
    missing = _redo_parsed(pages, parse(byte_view(updates), lsn), lsn, {})
    return -1 if missing is None else missing.page


def record_updates(record: Buffer, lsn: int, /) -> bytes:
    """The page updates of a record, that of a put written out."""
    return bytes(_updates_of(byte_view(record), lsn))


def _put_update(view: memoryview, head: OperationHead, lsn: int) -> bytes:
    """The INSERT that the update of a put stands for."""
    page = _U32.unpack_from(view, head.updates_offset)[0]
    if head.op != _PUT_OBJECT:
        raise DataError(f"record {lsn}: the update of a put, and it is none")
    try:
        position, end = decode_varint(view, head.updates_offset + PUT_HEADER.size)
    except DataError as error:
        raise DataError(f"record {lsn}: a page update is cut short") from error
    if end != len(view):
        raise DataError(f"record {lsn}: the update of a put does not stand alone")
    start, (bucket_bytes, name_bytes, *_) = head.names_offset, head.lengths
    bucket, name = view[start : start + bucket_bytes], view[start + bucket_bytes : start + bucket_bytes + name_bytes]
    key = at(b"o%b\0%b\0" % (bytes(bucket), bytes(name)), head.seq)
    if len(key) > _MAX_KEY_BYTES:
        raise DataError(f"record {lsn}: its names are too long")
    value = encode_pointer(head.order, head.size, head.crc, head.codec, lsn, position, head.stored_bytes)
    return b"".join((UPDATE_HEADER.pack(page, INSERT, len(key), len(value), 0), key, value))


def _updates_offset(view: memoryview, lsn: int) -> int:
    if len(view) < HEADER_BYTES:
        raise DataError(f"a record of {len(view)} bytes has no header, LSN {lsn}")
    start = int(_U32.unpack_from(view, 4)[0])
    if not HEADER_BYTES <= start <= len(view):
        raise DataError(f"a record of {len(view)} bytes has its page updates at {start}, LSN {lsn}")
    return start


def _updates_of(view: memoryview, lsn: int) -> memoryview:
    if not view or view[0] != OPERATION:
        return view[_updates_offset(view, lsn) :]
    head = decode_operation_head(view, lsn)
    updates = view[head.updates_offset :]
    if len(updates) >= PUT_HEADER.size and updates[4] == PUT:
        return memoryview(_put_update(view, head, lsn))
    return updates


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
            return index, missing.page, missing.what not in (IMAGE, SPLIT)
        index += 1  # noqa: PLW2901 - where to go on, if this was the last
    return index, -1, False
