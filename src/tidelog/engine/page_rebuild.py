"""Making a damaged page anew from the log, on this disk and in the store.

Invariants
- The log from a page's last image on says all that became of it. (Every page begins with an image: a split logs the new
  one, and a checkpoint makes the next change log the old one. Only a page that a restore or a compaction of the index
  loaded in bulk, and nobody changed since, has none. The log before that is of other pages, and is not given here.)
- Pieces of the log are read newest first, and no further back than to that image.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tidelog.engine.page import PAGE_BYTES
from tidelog.engine.updates import IMAGE, Update, decode, encode, record_updates, redo
from tidelog.errors import DataError
from tidelog.log.frame import Frames

_logger = logging.getLogger("tidelog.engine")
Change = tuple[int, list[Update]]


def rebuild_page(page_id: int, pieces: Iterable[Iterable[Frames]]) -> bytearray:
    """The page as the newest record left it; `pieces` of the log come newest first, the frames of each in order."""
    changes: list[Change] = []
    for piece in pieces:
        found = _since_last_image(_changes_of(page_id, piece))
        changes = [*found, *changes]
        if found and _begins_with_image(found[0]):
            _logger.warning("page %d was damaged and is made anew from the log", page_id)
            return _replayed(page_id, changes)
    raise DataError(
        f"page {page_id} is damaged, and the log does not reach back to its last image",
        hint="Restore the engine from its store into a new directory; one without a store makes its index anew from "
        "the log, if `pages.db` is moved away and no file of the log is missing",
    )


def _changes_of(page_id: int, piece: Iterable[Frames]) -> list[Change]:
    """What records of a piece did to the page."""
    needle = page_id.to_bytes(4, "little")
    found: list[Change] = []
    for frames in piece:
        for lsn, payload in enumerate(frames.payloads(), frames.first_offset):
            if needle in payload:
                updates = decode(record_updates(payload, lsn), lsn)
                own = [update for update in updates if update.page == page_id]
                if own:
                    found.append((lsn, own))
    return found


def _begins_with_image(change: Change) -> bool:
    return change[1][0].what == IMAGE


def _since_last_image(changes: list[Change]) -> list[Change]:
    for index in range(len(changes) - 1, -1, -1):
        if _begins_with_image(changes[index]):
            return changes[index:]
    return changes


def _replayed(page_id: int, changes: list[Change]) -> bytearray:
    pages = {page_id: bytearray(PAGE_BYTES)}
    for lsn, updates in changes:
        redo(pages, b"".join(map(encode, updates)), lsn)
    return pages[page_id]
