"""`pages.db`: the pages of the tree on the disk, each at its number times 8192 bytes; and the rebuild of a damaged page
from the WAL.

    page 0, the header:  0 u32 crc32 of bytes 4..8191 | 4 u16 magic | 6 u8 kind 0 | 7 zero | 8 u32 page id 0
                         12 u32 format version | 16 u32 page size | 24 u64 made LSN | the rest is zero

Invariants
- Every page that is read is verified: crc, number and structure; corruption raises an error with the file and the byte.
  A page of zeros was never written.
- The made LSN is 0, or that of the record up to which all pages were built at once from their cells: page updates of
  the WAL up to it belong to another file, with other numbers.
- A write is durable after `sync` only. A torn write is detected by its crc. After a failed sync it is unknown which
  writes are durable, and a later sync would not tell: further syncs are refused.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from tidelog.engine.btree.page import (
    IMAGE,
    MAGIC,
    PAGE_BYTES,
    SPLIT,
    Update,
    check_page,
    decode,
    encode,
    record_updates,
    redo,
    verify_crc,
)
from tidelog.engine.wal.record_header import STRUCTURE
from tidelog.errors import CorruptionError, DataError, LogFailedError
from tidelog.files import Files, explained
from tidelog.log.frame import Frames, crc32

FORMAT_VERSION = 1
_HEADER = struct.Struct("<IHBBIII4xQ")
_ZEROS = bytes(PAGE_BYTES)


def _header_page(made_lsn: int) -> bytes:
    page = bytearray(PAGE_BYTES)
    _HEADER.pack_into(page, 0, 0, MAGIC, 0, 0, 0, FORMAT_VERSION, PAGE_BYTES, made_lsn)
    struct.pack_into("<I", page, 0, crc32(memoryview(page)[4:]))
    return bytes(page)


class PageFile:
    """The open page file. Not thread-safe for one page; different pages are independent."""

    def __init__(self, files: Files, path: Path) -> None:
        self.path = path
        self._sync_failed = False
        with explained("open the page file", path):
            self._file = files.open(path, write=True)
        try:
            self.made_lsn = self._checked_header()
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def create(cls, files: Files, path: Path, made_lsn: int = 0) -> PageFile:
        """Creates a file with nothing but its header, durably, replacing an older one of that name."""
        with explained("create the page file", path):
            files.write_atomically(path, _header_page(made_lsn))
        return cls(files, path)

    def _checked_header(self) -> int:
        """The made LSN."""
        with explained("read the page file", self.path):
            header = self._file.read_at(0, PAGE_BYTES)
        version, size, made_lsn = _HEADER.unpack_from(header)[5:] if len(header) >= _HEADER.size else (0, 0, 0)
        if header != _header_page(made_lsn):
            text = f"not a page file of this version (format {version}, pages of {size} bytes)"
            raise CorruptionError(text, path=self.path, byte=0, hint="Restore the engine from its store")
        return int(made_lsn)

    @property
    def page_count(self) -> int:
        """Pages that fit into the file as it is, the header page included."""
        return self._file.size() // PAGE_BYTES

    def read_page(self, page_id: int) -> bytearray:
        """A page of the tree, checked; CorruptionError when it is not what was written."""
        with explained("read the page file", self.path):
            data = self._file.read_at(page_id * PAGE_BYTES, PAGE_BYTES)
        fault = _fault_of(data, page_id)
        if fault is not None:
            byte = page_id * PAGE_BYTES
            raise CorruptionError(f"page {page_id}: {fault}", path=self.path, byte=byte, operation="read a page")
        return bytearray(data)

    def write_page(self, page_id: int, image: bytes) -> None:
        """Writes a sealed page at its offset."""
        with explained("write the page file", self.path):
            self._file.write_at(page_id * PAGE_BYTES, image)

    def sync(self) -> None:
        """All pages written so far are durable when this returns."""
        if self._sync_failed:
            hint = "Open the engine again: its log has what the pages lack"
            raise LogFailedError("an earlier sync failed", operation="sync the page file", path=self.path, hint=hint)
        try:
            with explained("sync the page file", self.path):
                self._file.sync()
        except BaseException:
            self._sync_failed = True
            raise

    def close(self) -> None:
        """Closes the file; what was not synced may be lost."""
        self._file.close()


def _fault_of(data: bytes, page_id: int) -> str | None:
    if len(data) < PAGE_BYTES:
        return "the file ends before it"
    if data == _ZEROS:
        return "it was never written"
    if not verify_crc(data):
        return "checksum does not match"
    return check_page(data, page_id)


# Rebuilding a damaged page from the WAL, on this disk and in the store.
#
# Invariants
# - The WAL from a page's last image on has all updates to it, and so does the WAL from the split on that created it, if
#   the page that was split is known as of then. (Every page begins with one of the two: a split logs an image of a new
#   page or where its cells come from, and a checkpoint makes the next change log an image of the old one. Only a page
#   that was bulk loaded by a restore or a compaction of the index, and not changed since, has none. The WAL before that
#   is of other pages, and is not given here.)
# - Pieces of the WAL are read newest first, and no further back than needed. Page updates of one piece are in memory.


_logger = logging.getLogger("tidelog.engine")
Change = tuple[int, list[Update]]


def rebuild_page(page_id: int, pieces: Iterable[Iterable[Frames]]) -> bytearray:
    """The page as the newest record left it; `pieces` of the log come newest first, the frames of each in order."""
    wanted, changes = {page_id}, list[Change]()
    for piece in pieces:
        changes = [*_changes_of(wanted, piece), *changes]
        page = _replayed(changes).get(page_id)
        if page is not None:
            _logger.warning("page %d was damaged and is rebuilt from the log", page_id)
            return page
    raise DataError(
        f"page {page_id} is damaged, and the log no longer has its last image",
        hint="Restore the engine from its store into a new directory; one without a store rebuilds its index from "
        "the log, if `pages.db` is moved away and no file of the log is missing",
    )


def _changes_of(wanted: set[int], piece: Iterable[Frames]) -> list[Change]:
    """What records of a piece did to pages; those that they were split from join the wanted ones."""
    records: list[tuple[int, bytes]] = []
    splits: list[Update] = []
    for lsn, payload in _records_of(piece):
        updates = record_updates(payload, lsn)
        if payload[0] == STRUCTURE:
            splits += (one for one in decode(updates, lsn) if one.what == SPLIT)
        records.append((lsn, updates))
    for split in reversed(splits):
        if split.page in wanted:
            wanted.add(_source(split))
    found = ((lsn, _own(wanted, updates, lsn)) for lsn, updates in records)
    return [change for change in found if change[1]]


def _records_of(piece: Iterable[Frames]) -> Iterator[tuple[int, bytes]]:
    for frames in piece:
        yield from enumerate(frames.payloads(), frames.first_offset)


def _own(wanted: set[int], updates: bytes, lsn: int) -> list[Update]:
    """Those of the wanted pages; most records have none, and are not taken apart."""
    if not any(page_id.to_bytes(4, "little") in updates for page_id in wanted):
        return []
    return [update for update in decode(updates, lsn) if update.page in wanted]


def _source(split: Update) -> int:
    return int.from_bytes(split.value, "little")


def _replayed(changes: list[Change]) -> dict[int, bytearray]:
    """All pages that are known from their beginning on, as these records leave them."""
    pages: dict[int, bytearray] = {}
    for lsn, updates in changes:
        for update in updates:
            if update.what == IMAGE or (update.what == SPLIT and _source(update) in pages):
                pages.setdefault(update.page, bytearray(PAGE_BYTES))
        known = [update for update in updates if update.page in pages]
        redo(pages, b"".join(map(encode, known)), lsn)
    return pages
