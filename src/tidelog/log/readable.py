"""What every readable log offers, the owner's and an onlooker's alike: positions, and readers from one to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime
from pathlib import Path

from tidelog.clock import to_microseconds
from tidelog.errors import InputError, OffsetOutOfRangeError, TidelogError
from tidelog.files import Files
from tidelog.log.cache import Batch
from tidelog.log.frame import encode_many
from tidelog.log.reader import FilePart, Reader

Position = int | str | datetime

NO_STOP = 1 << 64


class ReadableLog(ABC):
    """A log that can be read from any position. It is the `Source` of its readers."""

    def __init__(self, directory: Path, files: Files, read_chunk_bytes: int, time_field: int | None) -> None:
        self.directory = directory
        self.files = files
        self.read_chunk_bytes = read_chunk_bytes
        self._time_field = time_field

    @property
    @abstractmethod
    def start_offset(self) -> int:
        """The oldest offset that is still here."""

    @property
    @abstractmethod
    def next_offset(self) -> int:
        """The offset that the next message gets."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether nothing will ever be added."""

    @property
    def is_gone(self) -> bool:
        """Whether there is nothing here any more, and what there was has to be looked for elsewhere."""
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
        end = self._resolve_stop(stop)
        return Reader(self, first, end if follow else min(end, latest), follow)

    def resolve(self, position: Position) -> int:
        """The offset that a position means now."""
        if isinstance(position, datetime):
            return self.offset_at(to_microseconds(position))
        if position == "latest":
            return self.next_offset
        if position == "earliest":
            return self.start_offset
        offset = checked_offset(position)
        earliest, latest = self.start_offset, self.next_offset
        if not earliest <= offset <= latest:
            raise OffsetOutOfRangeError(
                f"offset {offset} is not in the log, which holds {earliest} up to {latest} (exclusive)",
                operation="read",
                path=self.directory,
            )
        return offset

    def _resolve_stop(self, stop: Position) -> int:
        """A stop may lie in the future; a start may not."""
        return self.resolve(stop) if isinstance(stop, (str, datetime)) else checked_offset(stop)

    def place_of(self, offset: int) -> Path:
        """The file that an offset is in; the directory when it is in none yet, or not any more."""
        return self.directory

    def offset_at(self, time_us: int, first_offset: int = 0) -> int:
        """The first offset from `first_offset` on whose time is `time_us` or later; the next when there is none yet."""
        if self._time_field is None:
            raise InputError("this log keeps no times", operation="read")
        latest = self.next_offset
        for batch in Reader(self, max(first_offset, self._file_for_time(time_us)), latest, follow=False):
            frames = batch.frames or encode_many(batch.first_offset, batch.bare)
            found = frames.first_at_least(self._time_field, time_us, batch.start)
            if found is not None and found < batch.stop:
                return frames.first_offset + found
        return latest


def checked_offset(position: object) -> int:
    """The same offset, if it can be one."""
    if isinstance(position, bool) or not isinstance(position, int):
        raise InputError(f'a position is an offset, "earliest", "latest" or a datetime, not {position!r}')
    if position < 0:
        raise OffsetOutOfRangeError(f"an offset is 0 or more, not {position}", operation="read")
    return position
