"""`pages.db`: the pages of the tree on the disk, each at its number times 8192 bytes.

    page 0, the header:  0 u32 crc32 of bytes 4..8191 | 4 u16 magic | 6 u8 kind 0 | 7 zero | 8 u32 page id 0
                         12 u32 format version | 16 u32 page size | 24 u64 made LSN | the rest is zero

Invariants
- A page that is read is the one that was written: crc, number and structure are checked, and damage raises with the
  file and the byte. A page of zeros was never written.
- The made LSN is 0, or that of the record up to which all pages were made at once from their cells: page updates of
  the log up to it are of another file, with other numbers.
- A write is durable after `sync` only. A torn one is found by its crc. After a sync that failed nobody knows which
  writes are durable, and a later sync would not tell: there is none any more.
"""

from __future__ import annotations

import struct
from pathlib import Path

from tidelog.engine.page import PAGE_BYTES, check_page, verify_crc
from tidelog.engine.page_python import MAGIC
from tidelog.errors import CorruptionError, LogFailedError
from tidelog.files import Files, explained
from tidelog.log.frame import crc32

FORMAT_VERSION = 1
_HEADER = struct.Struct("<IHBBIII4xQ")
_ZEROS = bytes(PAGE_BYTES)


def _header_page(made_lsn: int) -> bytes:
    page = bytearray(PAGE_BYTES)
    _HEADER.pack_into(page, 0, 0, MAGIC, 0, 0, 0, FORMAT_VERSION, PAGE_BYTES, made_lsn)
    struct.pack_into("<I", page, 0, crc32(memoryview(page)[4:]))
    return bytes(page)


class PageFile:
    """The open page file. Not for several threads on one page; different pages are independent."""

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
        """A new file with nothing but its header, durable; an older one of that name is replaced."""
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
        """A sealed page in its place."""
        with explained("write the page file", self.path):
            self._file.write_at(page_id * PAGE_BYTES, image)

    def sync(self) -> None:
        """All pages written so far are durable when this returns."""
        if self._sync_failed:
            hint = "Open the engine again: its log has all that the pages lack"
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
        return "a checksum that does not match"
    return check_page(data, page_id)
