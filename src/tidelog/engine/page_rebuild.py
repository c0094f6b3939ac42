"""Making a damaged page anew from the log.

Invariant: the log from a page's last image on says all that became of it. (Every page begins with an image: a split
logs the new one, and a checkpoint makes the next change log the old one.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tidelog.engine.page import PAGE_BYTES
from tidelog.engine.record_header import decode_header
from tidelog.engine.updates import IMAGE, decode, encode, redo
from tidelog.errors import DataError
from tidelog.log.frame import Frames

_logger = logging.getLogger("tidelog.engine")


def rebuild_page(page_id: int, batches: Iterable[Frames]) -> bytearray:
    """The page as the newest record left it."""
    pages: dict[int, bytearray] = {}
    needle = page_id.to_bytes(4, "little")
    for frames in batches:
        for index, payload in enumerate(frames.payloads()):
            if needle in payload:
                _redo_for(page_id, payload, frames.first_offset + index, pages)
    if page_id not in pages:
        raise DataError(
            f"page {page_id} is damaged, and its last image is no longer in the local log",
            hint="Restore the engine from its store into a new directory",
        )
    _logger.warning("page %d was damaged and was made anew from the log", page_id)
    return pages[page_id]


def _redo_for(page_id: int, payload: bytes, lsn: int, pages: dict[int, bytearray]) -> None:
    updates = [
        update
        for update in decode(payload[decode_header(payload, lsn).updates_offset :], lsn)
        if update.page == page_id
    ]
    if updates and updates[0].what == IMAGE:
        pages[page_id] = bytearray(PAGE_BYTES)
    if updates and page_id in pages:
        redo(pages, b"".join(encode(update) for update in updates), lsn)
