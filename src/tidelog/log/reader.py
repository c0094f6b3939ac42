"""Reading: files, then memory, then whatever comes, as one stream of batches.

Invariants
- A reader tracks the next offset and hands out exactly that one next: no gap, no overlap, no duplicate.
- It holds no lock while it reads a file or while its caller works, so a slow reader never holds up an append.
- What is not in memory is in a file: memory is looked at first, and both are looked up under one hold of the mutex.
- Only whole, checked frames are handed out. Damage raises and names the file and the byte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

from tidelog.errors import CorruptionError, OffsetOutOfRangeError, TidelogError
from tidelog.files import File, Files, explained
from tidelog.log.cache import Batch, framed_batch
from tidelog.log.recovery import REPAIR_HINT
from tidelog.log.scanner import FileScanner
from tidelog.log.segment import Segment


class FilePart:
    """Where an offset is in the files: the segment, and how far it goes at this moment."""

    __slots__ = ("end_byte", "next_offset", "offset", "position", "segment")

    def __init__(self, segment: Segment, offset: int) -> None:
        start = segment.index.floor(offset)
        self.segment = segment
        self.offset, self.position = start if start is not None else (segment.first_offset, 0)
        self.next_offset = segment.next_offset
        self.end_byte = segment.size


class Source(Protocol):
    """What a reader reads from."""

    @property
    def files(self) -> Files: ...

    @property
    def read_chunk_bytes(self) -> int: ...

    @property
    def over(self) -> bool:
        """Whether nothing will ever be added."""
        ...

    @property
    def failure(self) -> TidelogError | None:
        """Why nothing will ever be added, when that is not because it was closed."""
        ...

    def locate(self, offset: int, stop_offset: int) -> Batch | FilePart | None:
        """The messages themselves when they are in memory, else their place in a file; None when not there yet."""
        ...

    def place_of(self, offset: int) -> Path:
        """The file that an offset is in, or the directory."""
        ...

    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool:
        """Returns when there may be something at `offset`; False when the time passed."""
        ...

    async def wait_for_news_async(self, offset: int) -> None: ...


class Reader:
    """A position in a log. Each reader is independent; one reader is for one thread or task at a time."""

    def __init__(self, source: Source, offset: int, stop_offset: int, follow: bool) -> None:
        self.offset = offset
        self._source = source
        self._stop_offset = stop_offset
        self._follow = follow
        self._closed = False
        self._segment: Segment | None = None
        self._file: File | None = None
        self._scanner: FileScanner | None = None

    def __iter__(self) -> Iterator[Batch]:
        try:
            while (batch := self.next_batch()) is not None:
                yield batch
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[Batch]:
        try:
            while (batch := await self.next_batch_async()) is not None:
                yield batch
        finally:
            self.close()

    def next_batch(self, timeout_seconds: float | None = None) -> Batch | None:
        """The next messages; None at the stop, at the end without `follow`, or when the time passed."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.offset < self._stop_offset:
            over = self._source.over  # asked first: what came before the end is found below
            found = self._source.locate(self.offset, self._stop_offset)
            if found is not None:
                return self._advance(found if isinstance(found, Batch) else self._read_file(found))
            if not self._follow or over:
                self._check_failure()
                return None
            left = None if deadline is None else deadline - time.monotonic()
            if not self._source.wait_for_news(self.offset, left):
                return None
        return None

    async def next_batch_async(self) -> Batch | None:
        """As `next_batch`; files are read in a worker thread, so that the loop goes on."""
        while self.offset < self._stop_offset:
            over = self._source.over
            found = self._source.locate(self.offset, self._stop_offset)
            if isinstance(found, Batch):
                return self._advance(found)
            if found is not None:
                return self._advance(await asyncio.to_thread(self._read_file, found))
            if not self._follow or over:
                self._check_failure()
                return None
            await self._source.wait_for_news_async(self.offset)
        return None

    def place_of(self, offset: int) -> Path:
        """The file that an offset is in, for an error that names it; the directory when it is in none."""
        return self._source.place_of(offset)

    def close(self) -> None:
        """Lets go of the file that it has open."""
        self._closed = True
        self._close_file()

    def _close_file(self) -> None:
        file, self._file, self._scanner, self._segment = self._file, None, None, None
        if file is not None:
            file.close()

    def _check_failure(self) -> None:
        """Who follows must not take a failed log for one that was closed in order."""
        failure = self._source.failure if self._follow else None
        if failure is not None:
            raise failure

    def _advance(self, batch: Batch) -> Batch:
        assert batch.first_offset == self.offset and batch.stop > batch.start
        self.offset = batch.next_offset
        return batch

    def _read_file(self, part: FilePart) -> Batch:
        with explained("read", part.segment.path):
            try:
                return self._next_in_file(part, self._position_at(part))
            finally:
                if self._closed:
                    self.close()  # it was closed while a worker thread was opening the file

    def _next_in_file(self, part: FilePart, scanner: FileScanner) -> Batch:
        while True:
            base = scanner.position
            frames = scanner.read(part.end_byte)
            if frames is None:
                raise CorruptionError(
                    scanner.stop.reason,
                    path=part.segment.path,
                    byte=scanner.position,
                    operation="read",
                    hint=REPAIR_HINT,
                )
            part.segment.index.extend(frames, base)
            if frames.next_offset > self.offset:
                return framed_batch(frames, self.offset, self._stop_offset)

    def _position_at(self, part: FilePart) -> FileScanner:
        """The scanner that is there already when this is the continuation, else a new one close to the offset."""
        scanner = self._scanner
        if scanner is not None and self._segment is part.segment and scanner.offset == self.offset:
            return scanner
        if self._segment is not part.segment or self._file is None:
            self._close_file()
            self._file = self._open(part.segment)
            self._segment = part.segment
        self._scanner = FileScanner(self._file, part.position, part.offset, self._source.read_chunk_bytes)
        return self._scanner

    def _open(self, segment: Segment) -> File:
        try:
            return self._source.files.open(segment.path)
        except FileNotFoundError:
            raise OffsetOutOfRangeError(
                f"offset {self.offset} is gone: its file was removed while it was about to be read",
                operation="read",
                path=segment.path,
            ) from None
