"""Readers: files, then memory, then new messages, as one stream of batches.

Invariants
- A reader tracks the next offset and returns exactly that one next: no gap, no overlap, no duplicate.
- It holds no lock while it reads a file or while its caller works, so a slow reader never blocks an append.
- A message that is not in memory is in a file: memory is checked first, and both lookups happen under one hold of the
  mutex.
- Only whole, verified frames are returned. Damage raises an error that names the file and the byte.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Protocol

from tidelog.clock import to_microseconds
from tidelog.codec import MAX_OFFSET
from tidelog.errors import CorruptionError, InputError, OffsetOutOfRangeError, TidelogError
from tidelog.files import File, Files, explained
from tidelog.log.frame import encode_many
from tidelog.log.recovery import REPAIR_HINT
from tidelog.log.segment import FilePart, FileScanner, Segment
from tidelog.log.tail_cache import Batch, framed_batch


class Source(Protocol):
    """The source that a reader reads from."""

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
        """The messages themselves when they are in memory, else their location in a file; None when not there yet."""
        ...

    def place_of(self, offset: int) -> Path:
        """The file that an offset is in, or the directory."""
        ...

    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool:
        """Returns when there may be something at `offset`; False when the time passed."""
        ...

    async def wait_for_news_async(self, offset: int) -> None: ...


class BatchReader(ABC):
    """What all readers of a log or a topic have in common. One reader is for one thread or task at a time."""

    @property
    @abstractmethod
    def offset(self) -> int:
        """The next one."""

    @property
    @abstractmethod
    def is_at_stop(self) -> bool:
        """Whether it has reached where it was to stop, so that it never returns anything again."""

    @property
    def waits_at(self) -> int:
        """Where messages have to come for it to have more; behind `offset` while an open transaction holds it up."""
        return self.offset

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

    @abstractmethod
    def next_batch(self, timeout_seconds: float | None = None) -> Batch | None:
        """The next messages; None at the stop, at the end without `follow`, or when the time passed."""

    @abstractmethod
    async def next_batch_async(self) -> Batch | None:
        """As `next_batch`; files and objects are read in a worker thread, so that the event loop is not blocked."""

    @abstractmethod
    def place_of(self, offset: int) -> Path | str:
        """The file or the key of the object that an offset is in, for an error that names it."""

    @abstractmethod
    def close(self) -> None:
        """Releases files, and what is being fetched."""


class RangeReader(BatchReader):
    """A reader of one range of offsets, in which it has a position."""

    offset = 0

    def __init__(self, offset: int, stop_offset: int, follow: bool) -> None:
        self.offset = offset
        self._stop_offset = stop_offset
        self._follow = follow

    @property
    def is_at_stop(self) -> bool:
        return self.offset >= self._stop_offset

    def _advance(self, batch: Batch) -> Batch:
        assert batch.first_offset == self.offset and batch.stop > batch.start
        self.offset = batch.next_offset
        return batch


class Reader(RangeReader):
    """A position in a log that is in files and memory."""

    def __init__(self, source: Source, offset: int, stop_offset: int, follow: bool) -> None:
        super().__init__(offset, stop_offset, follow)
        self._source = source
        self._closed = False
        self._segment: Segment | None = None
        self._file: File | None = None
        self._scanner: FileScanner | None = None

    def next_batch(self, timeout_seconds: float | None = None) -> Batch | None:
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
        return self._source.place_of(offset)

    def close(self) -> None:
        self._closed = True
        self._close_file()

    def _close_file(self) -> None:
        file, self._file, self._scanner, self._segment = self._file, None, None, None
        if file is not None:
            file.close()

    def _check_failure(self) -> None:
        """A follower must not mistake a failed log for one that was closed in order."""
        failure = self._source.failure if self._follow else None
        if failure is not None:
            raise failure

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
                f"offset {self.offset} is gone: its file was removed before it could be read",
                operation="read",
                path=segment.path,
            ) from None


# What every readable log offers, the owner's and a view alike: positions, and readers from one to another.


Position = int | str | datetime

NO_STOP = 1 << 64


class Positions(ABC):
    """What can be read from any position."""

    @property
    @abstractmethod
    def start_offset(self) -> int:
        """The oldest offset that may be read."""

    @property
    @abstractmethod
    def next_offset(self) -> int:
        """The offset that the next message gets."""

    @abstractmethod
    def offset_at(self, time_us: int) -> int:
        """The first offset whose time is `time_us` or later; the next offset if none is."""

    @property
    @abstractmethod
    def _where(self) -> Path | str:
        """The directory or the prefix of keys, for errors."""

    def resolve(self, position: Position) -> int:
        """The offset that a position means now."""
        if isinstance(position, datetime):
            return self.offset_at(to_microseconds(position))
        if position == "latest":
            return self.next_offset
        if position == "earliest":
            return self.start_offset
        offset = checked_offset(position)
        self._check_kept(offset)
        return offset

    def resolve_stop(self, stop: Position) -> int:
        """A stop may lie in the future; a start may not."""
        return self.resolve(stop) if isinstance(stop, (str, datetime)) else checked_offset(stop)

    def _check_kept(self, offset: int) -> None:
        earliest, latest = self.start_offset, self.next_offset
        if not earliest <= offset <= latest:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not in the log, which holds {earliest} up to {latest} (exclusive)",
                operation="read",
                path=self._where,
            )


class ReadableLog(Positions):
    """A log that can be read from any position. It is the `Source` of its readers."""

    def __init__(self, directory: Path, files: Files, read_chunk_bytes: int, time_field: int | None) -> None:
        self.directory = directory
        self.files = files
        self.read_chunk_bytes = read_chunk_bytes
        self._time_field = time_field

    @property
    def _where(self) -> Path:
        return self.directory

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether nothing will ever be added."""

    def check_open(self) -> None:
        """Raises ClosedError once nothing can be read here any more."""
        return

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left here, so that its messages have to be read from elsewhere."""
        return False

    @property
    def failure(self) -> TidelogError | None:
        """Why nothing will ever be added, when that is not because it was closed."""
        return None

    @abstractmethod
    def locate(self, offset: int, stop_offset: int) -> Batch | FilePart | None: ...

    @abstractmethod
    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool: ...

    @abstractmethod
    async def wait_for_news_async(self, offset: int) -> None: ...

    @abstractmethod
    def _file_for_time(self, time_us: int) -> int:
        """An offset at or before the first message of this time or later, as close as the files' times tell."""

    def read(self, start: Position = "earliest", stop: Position | None = None, *, follow: bool = False) -> Reader:
        """A reader from `start` (an offset, "earliest", "latest" or a time) to `stop` (exclusive).

        Without `follow` it ends at the offset that is next now.
        """
        first, latest = self.resolve(start), self.next_offset
        if stop is None:
            return Reader(self, first, NO_STOP if follow else latest, follow)
        end = self.resolve_stop(stop)
        return Reader(self, first, end if follow else min(end, latest), follow)

    def scout(self, offset: int, *, follow: bool) -> Reader:
        """A reader from an offset to wherever the log ends by then; with `follow` it waits there."""
        return Reader(self, offset, NO_STOP, follow)

    def place_of(self, offset: int) -> Path:
        """The file that an offset is in; the directory if no file has it."""
        return self.directory

    def offset_at(self, time_us: int, first_offset: int = 0) -> int:
        """The first offset from `first_offset` on whose time is `time_us` or later; the next offset if none is."""
        if self._time_field is None:
            raise InputError("this log stores no timestamps", operation="read")
        latest = self.next_offset
        first = max(first_offset, self._file_for_time(time_us), self.start_offset)
        for batch in Reader(self, first, latest, follow=False):
            frames = batch.frames or encode_many(batch.first_offset, batch.bare)
            found = frames.first_at_least(self._time_field, time_us, batch.start)
            if found is not None and found < batch.stop:
                return frames.first_offset + found
        return latest


def check_first_offset(offset: int) -> None:
    """InputError when no log can begin there."""
    if not 0 <= offset <= MAX_OFFSET + 1:  # one whose offsets are all used, and whose files are elsewhere, begins there
        raise InputError(
            f"the first offset of a log must be between 0 and {MAX_OFFSET}, not {offset}", operation="open"
        )


def check_position(position: object) -> None:
    """InputError when this is no position in any log."""
    if not isinstance(position, datetime) and position not in ("earliest", "latest"):
        checked_offset(position)


def checked_offset(position: object) -> int:
    """The same offset, if it can be one."""
    if isinstance(position, bool) or not isinstance(position, int):
        raise InputError(f'position must be an offset, "earliest", "latest" or a datetime, not {position!r}')
    if position < 0:
        raise OffsetOutOfRangeError(f"offset must be 0 or more, not {position}", operation="read")
    return position
