"""The real file system, with a count of what is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tidelog.files import File, LocalFiles, ReadsRanges


class CountingFile(ReadsRanges):
    """A file that tells how much was read from it."""

    def __init__(self, file: File, on_read: Callable[[int], None]) -> None:
        self._file = file
        self._on_read = on_read
        self.write_at = file.write_at
        self.sync = file.sync
        self.truncate = file.truncate
        self.size = file.size
        self.close = file.close

    def read_at(self, position: int, size: int) -> bytes:
        data = self._file.read_at(position, size)
        self._on_read(len(data))
        return data


class CountingFiles(LocalFiles):
    """The real file system, with the bytes that were read and the names that were opened since the last `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.read_bytes = 0
        self.opened: list[str] = []

    def open(self, path: Path, *, write: bool = False) -> File:
        self.opened.append(path.name)
        return CountingFile(super().open(path, write=write), self._count)

    def _count(self, size: int) -> None:
        self.read_bytes += size
