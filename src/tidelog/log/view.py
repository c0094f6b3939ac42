"""A read-only view of a log that another process may own, from its files and without its lock.

Invariants
- It changes nothing. It sees what the owner has written (synced or not), whole frames only.
- It polls for growth and does not read again what it has verified once.
- An unfinished frame at the very end is "not there yet", and so is an atomic batch (see `atomic_batches`) whose end is
  missing; anything else that is not a frame is damage, and the error names it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from threading import Lock

from tidelog.clock import Clock, SystemClock
from tidelog.errors import NotFoundError, OffsetOutOfRangeError
from tidelog.files import Files
from tidelog.log.atomic_batches import GroupOf, without_unfinished
from tidelog.log.binding import BoundFiles
from tidelog.log.directory import wal_files
from tidelog.log.reader import ReadableLog
from tidelog.log.recovery import Recovered, Recovery, read_start, recover, refuse_missing_start
from tidelog.log.segment import FilePart, Segment, Segments, describe_segments
from tidelog.log.settings import LogSettings, RecoveryReport
from tidelog.log.tail_cache import Batch

_POLL_SECONDS = 0.05
_ATTEMPTS = 5


class LogView(ReadableLog):
    """A log opened for reading only."""

    def __init__(
        self,
        directory: Path,
        settings: LogSettings | None = None,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        time_field: int | None = None,
        first_offset: int = 0,
        group_of: GroupOf | None = None,
        refuses_missing_start: bool = False,
    ) -> None:
        """`first_offset` is where a log begins that has no frames yet; `group_of` tells which payloads are atomic
        batches.

        With `refuses_missing_start` a log whose oldest files are gone is not opened.
        """
        settings = settings or LogSettings()
        super().__init__(directory, files or BoundFiles(), settings.read_chunk_bytes, time_field)
        self._clock = clock or SystemClock()
        self._looking = Lock()
        self._seen: tuple[list[tuple[int, str]], int] | None = None
        self._closed = False
        self._first_offset = first_offset
        self._had_files = False
        self._group_of = group_of
        if not self.files.is_directory(directory):
            raise NotFoundError("there is no log in this directory", path=directory)
        found = self._whole(recover(self.files, self._clock, directory, settings, time_field, first_offset))
        if refuses_missing_start:
            refuse_missing_start(read_start(self.files, directory), found.segments)
        self.recovery: RecoveryReport = found.report
        self._adopt(found)

    @property
    def start_offset(self) -> int:
        return self._segments.start_offset

    @property
    def next_offset(self) -> int:
        """The end of what the owner has written by now; polls the files."""
        self._look()
        return self._next_offset

    def segments(self) -> tuple[Segment, ...]:
        """The files as of the last poll; they only grow, or are deleted."""
        with self._looking:
            return tuple(self._segments)

    @property
    def is_gone(self) -> bool:
        """There were files, and none is left: the topic was sealed, or taken over by another node."""
        if self._had_files and not len(self._segments):
            self._look()
            return not len(self._segments)
        return False

    @property
    def over(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Ends the readers that follow."""
        self._closed = True

    def locate(self, offset: int, stop_offset: int) -> Batch | FilePart | None:
        if offset >= self._next_offset:
            self._look()
        if self.is_gone:
            raise OffsetOutOfRangeError("the files of the log were removed", operation="read", path=self.directory)
        with self._looking:
            segment = self._segments.find(offset)
            if segment is not None:
                return FilePart(segment, offset)
            if offset >= self._next_offset:
                return None
            earliest = self._segments.start_offset
        raise OffsetOutOfRangeError(
            f"offset {offset} is no longer kept; the oldest is {earliest}", operation="read", path=self.directory
        )

    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool:
        if timeout_seconds is not None and timeout_seconds <= 0:
            return False
        time.sleep(_POLL_SECONDS if timeout_seconds is None else min(_POLL_SECONDS, timeout_seconds))
        return True

    async def wait_for_news_async(self, offset: int) -> None:
        await asyncio.sleep(_POLL_SECONDS)

    def place_of(self, offset: int) -> Path:
        with self._looking:
            segment = self._segments.find(offset)
        return self.directory if segment is None else segment.path

    def _file_for_time(self, time_us: int) -> int:
        with self._looking:
            segment = self._segments.first_for_time(time_us)
            return segment.first_offset if segment is not None else self._next_offset

    def _adopt(self, found: Recovered) -> None:
        self._segments = Segments(found.segments, found.start_offset)
        self._segments.floor = min(read_start(self.files, self.directory) or 0, found.next_offset)
        self._next_offset = found.next_offset
        self._had_files = self._had_files or bool(found.segments)

    def _look(self) -> None:
        """Reads what was written since the last poll."""
        with self._looking:
            for _ in range(_ATTEMPTS):
                try:
                    now = self._names_and_last_size()
                    if now != self._seen:
                        self._adopt(self._keep_indexes(self._find_growth()))
                        self._seen = now
                    return
                except FileNotFoundError:
                    continue  # a file was removed between listing and opening
        raise NotFoundError("the files of the log were removed", operation="read", path=self.directory)

    def _find_growth(self) -> Recovered:
        """What is known serves as the checkpoint, so only growth is read."""
        known = [segment for segment in self._segments if segment.size]
        hint = describe_segments(known, self._segments.start_offset, self._clock.now_us())
        run = Recovery(self.files, self._clock, self.directory, self._time_field, hint, 0)
        return self._whole(run.find(self._first_offset))

    def _whole(self, found: Recovered) -> Recovered:
        return without_unfinished(self.files, found, self._group_of, self._time_field)

    def _names_and_last_size(self) -> tuple[list[tuple[int, str]], int]:
        """Changes whenever something was written; an unfinished frame that stays as it is does not count as growth."""
        names = wal_files(self.files.list(self.directory))
        if not names:
            return names, 0
        file = self.files.open(self.directory / names[-1][1])
        try:
            return names, file.size()
        finally:
            file.close()

    def _keep_indexes(self, found: Recovered) -> Recovered:
        """What was learnt about the insides of a file stays while it only grew; after a cut other frames are there."""
        known = {segment.seq: segment for segment in self._segments}
        for segment in found.segments:
            before = known.get(segment.seq)
            was_read_anew = segment.index.floor(segment.first_offset) is not None
            if before is not None and not was_read_anew:
                segment.index = before.index
        return found
