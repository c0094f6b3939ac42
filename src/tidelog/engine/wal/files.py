"""WAL files by position: a position is the address of a byte since the log's beginning.

Invariants
- A position never changes, whatever file or object holds it. Files are contiguous, so one known frame (the anchor, or
  the beginning of a file that was located before) and the sizes of the files determine where each of them begins.
- Reading does not wait for the log to write, which would be in vain on a full disk: the anchor may be in the log's
  memory only, but a file that was located before, or the position where the log began, serves as well. Only if all of
  those were removed at once does it wait for the anchor.
- Readers take no lock: they use an immutable view that is replaced as a whole.
- A file is closed only when no reader holds it any more. A descriptor that was closed under a reader could be another
  file by the time it reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from tidelog.engine.wal.scan_values import Places, ScannedRows
from tidelog.errors import ClosedError, CorruptionError, DataError
from tidelog.files import File, Files
from tidelog.log.log import Log
from tidelog.log.segment import FilePart, byte_of_offset

_ALL = 1 << 64
# A call of the system costs as much as copying some kilobytes.
_GAP_BYTES = 4096
_TOGETHER_BYTES = 256 << 10
_MAX_OPEN_FILES = 64


class Anchor(NamedTuple):
    """A frame whose position is known, or the end of the log."""

    lsn: int
    position: int


class WalSpan(NamedTuple):
    """A snapshot of a WAL file: its records and bytes from the first to the next (exclusive)."""

    path: Path
    first_lsn: int
    next_lsn: int
    first_position: int
    next_position: int
    created_us: int


class _Handle:
    """An open file that closes itself with its last reference."""

    __slots__ = ("_file", "read", "read_ranges")

    def __init__(self, file: File) -> None:
        self._file = file
        self.read = file.read_at  # a caller holds the handle, not the file alone
        self.read_ranges = file.read_ranges

    def __del__(self) -> None:
        self._file.close()


class _PlacedFile:
    """A file and its start position; opened at the first read."""

    __slots__ = ("first_lsn", "handle", "path", "start", "was_read")

    def __init__(self, span: WalSpan) -> None:
        self.path = span.path
        self.first_lsn = span.first_lsn
        self.start = span.first_position
        self.handle: _Handle | None = None
        self.was_read = False


class _View(NamedTuple):
    starts: list[int]
    files: list[_PlacedFile]


class WalFiles:
    """Maps positions to the files that are still on this disk."""

    def __init__(self, log: Log, files: Files, anchor: Anchor) -> None:
        self._log = log
        self._files = files
        self.anchor = anchor
        """The newest known place; appends keep it up to date, since the files it is in may go at any time."""
        self._origin = anchor
        self._refreshing = Lock()
        self._opened: deque[_PlacedFile] = deque()
        self._view = _View([], [])
        self._is_closed = False
        self.refresh()

    @property
    def start_position(self) -> int:
        """The first byte that is on this disk."""
        starts = self._view.starts
        return starts[0] if starts else self._origin.position

    def read(self, position: int, length: int) -> bytes | None:
        """Reads bytes; fewer if they are not in a file yet, None if they are no longer on this disk."""
        starts, files = self._view
        index = bisect_right(starts, position) - 1
        if index < 0:
            return None if starts or position < self._origin.position else b""
        file = files[index]
        file.was_read = True
        handle = file.handle or self._open(file)
        return b"" if handle is None else handle.read(position - file.start, length)

    def read_values(self, scanned: ScannedRows) -> None:
        """Takes the values of rows that are in files, and leaves out all others."""
        starts, files = self._view
        if not starts:
            return
        places = Places(scanned)
        places.in_log(0, starts, [*starts[1:], _ALL - 1])
        for joined in places.joined(gap_bytes=_GAP_BYTES, most_bytes=_TOGETHER_BYTES):
            file = files[joined.unit]
            file.was_read = True
            handle = file.handle or self._open(file)
            if handle is not None:
                places.take_joined(joined, handle.read_ranges(0, joined.ranges))

    def _open(self, file: _PlacedFile) -> _Handle | None:
        """None if it was removed meanwhile."""
        with self._refreshing:
            if self._is_closed:
                raise ClosedError("the engine's log is closed", path=self._log.directory, hint="Open it again")
            if file.handle is None:
                try:
                    file.handle = _Handle(self._files.open(file.path))
                except FileNotFoundError:
                    return None
                self._opened.append(file)
                if len(self._opened) > _MAX_OPEN_FILES:
                    self._opened.popleft().handle = None
            return file.handle

    def refresh(self) -> list[WalSpan]:
        """Lists the files again: some may be new, some may be gone."""
        with self._refreshing:
            known = {file.first_lsn: file for file in self._view.files}
            parts = self._log.parts(0, _ALL)
            if not parts:
                return []
            start = self._start_by_known(parts, known)
            if start is None:
                parts, start = self._placed_by_anchor(parts)
            spans = _spans(parts, start)
            files = [known.get(span.first_lsn) or _PlacedFile(span) for span in spans]
            self._view = _View([file.start for file in files], files)
            self._opened = deque(file for file in self._opened if file in files)
            return spans

    def _start_by_known(self, parts: list[FilePart], known: dict[int, _PlacedFile]) -> int | None:
        """Locates the first file by the bytes between its beginning and that of a known one."""
        starts = {first_lsn: file.start for first_lsn, file in known.items()}
        starts.setdefault(*self._origin)
        before = 0
        for part in parts:
            start = starts.get(part.segment.first_offset)
            if start is not None and start >= before:
                return start - before
            before += part.end_byte
        return None

    def _placed_by_anchor(self, parts: list[FilePart]) -> tuple[list[FilePart], int]:
        """The files and the start of the first one, by the bytes between its beginning and the anchor."""
        lsn, position = self.anchor
        if lsn > parts[-1].next_offset:
            self._log.flush()
            parts = self._log.parts(0, _ALL)
        before = 0
        for part in parts:
            segment = part.segment
            if segment.first_offset <= lsn <= part.next_offset:
                start = position - before - byte_of_offset(self._files, FilePart(segment, lsn), lsn)
                if start >= 0:
                    return parts, start
            before += part.end_byte
        raise DataError(
            f"the log holds LSN {parts[0].segment.first_offset} to {parts[-1].next_offset - 1}, which says nothing "
            f"about LSN {lsn} at position {position}",
            path=self._log.directory,
            hint="These files do not belong together; restore the engine from its store",
        )

    def was_read(self, first_lsn: int) -> bool:
        """Whether the file that begins there was read since the last call."""
        for file in self._view.files:
            if file.first_lsn == first_lsn:
                was_read, file.was_read = file.was_read, False
                return was_read
        return False

    def missing(self, position: int, length: int, found: int) -> CorruptionError:
        """The error for bytes that should be there and are not."""
        starts, files = self._view
        file = files[max(0, bisect_right(starts, position) - 1)]
        return CorruptionError(
            f"a file of the log ends {length - found} bytes before the object that is at position {position} does",
            path=file.path,
            byte=position - file.start + found,
            operation="read",
        )

    def close(self) -> None:
        with self._refreshing:
            self._is_closed = True
            for file in self._view.files:
                file.handle = None
            self._opened.clear()


def _spans(parts: list[FilePart], start: int) -> list[WalSpan]:
    """Each file begins where the one before it ends."""
    spans: list[WalSpan] = []
    for part in parts:
        segment, end = part.segment, start + part.end_byte
        lsns = (segment.first_offset, part.next_offset)
        spans.append(WalSpan(segment.path, *lsns, start, end, segment.created_us))
        start = end
    return spans
