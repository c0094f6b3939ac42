"""A copy-on-write overlay over the real file system: recovers an engine without touching its files.

Invariants
- The real files are never changed. Writes go to a sparse temporary file for each file, a block at a time, which is
  discarded with this object; reads through the overlay see writes through it.
- The lock is the real one: while an engine is open in here, nobody else opens it.
- Memory use is one number per written block; the blocks themselves are on the disk for temporary files.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import IO, Self

from tidelog.files import File, LocalFiles, ReadsRanges
from tidelog.log.binding import WrappedFiles

_BLOCK_BYTES = 8192


class OverlayFiles(WrappedFiles):
    """The real files as they would be after what was done in here."""

    def __init__(self) -> None:
        super().__init__(LocalFiles())
        self._mutex = RLock()
        self._files: dict[Path, _OverlayFile] = {}
        self._gone: set[Path] = set()
        self._made: set[Path] = set()
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.clear()
        self._opened.close()

    def create(self, path: Path) -> File:
        with self._mutex:
            if self.exists(path):
                raise FileExistsError(str(path))
            self._gone.discard(path)
            file = self._files[path] = _OverlayFile(None, self._mutex, self._opened)
            return file

    def open(self, path: Path, *, write: bool = False) -> File:
        with self._mutex:
            if path not in self._files:
                if path in self._gone:
                    raise FileNotFoundError(str(path))
                self._files[path] = _OverlayFile(self.below.open(path), self._mutex, self._opened)
            return self._files[path]

    def list(self, directory: Path) -> list[str]:
        real = () if directory in self._made else self.below.list(directory)
        names = {name for name in real if directory / name not in self._gone}
        names |= {path.name for path in (*self._files, *self._made) if path.parent == directory}
        return sorted(names)

    def exists(self, path: Path) -> bool:
        with self._mutex:
            return path in self._files or path in self._made or (path not in self._gone and self.below.exists(path))

    def is_directory(self, path: Path) -> bool:
        return path in self._made or (path not in self._gone and self.below.is_directory(path))

    def is_link(self, path: Path) -> bool:
        return path not in self._files and self.below.is_link(path)

    def make_directory(self, path: Path) -> None:
        if not self.is_directory(path):
            self._made.add(path)

    def remove(self, path: Path) -> None:
        with self._mutex:
            if not self.exists(path):
                raise FileNotFoundError(str(path))
            self._files.pop(path, None)
            self._gone.add(path)

    def remove_directory(self, path: Path) -> None:
        self._made.discard(path)
        self._gone.add(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._mutex:
            self.open(source)
            self._files[target] = self._files.pop(source)
            self._gone.add(source)
            self._gone.discard(target)

    def sync_directory(self, path: Path) -> None:
        """There is nothing to keep."""


class _OverlayFile(ReadsRanges):
    """A real file, or none, below the blocks that were written since. All who have it open share it."""

    def __init__(self, below: File | None, mutex: RLock, opened: contextlib.ExitStack) -> None:
        self._below = below
        self._mutex = mutex
        self._opened = opened
        self._above: IO[bytes] | None = None
        self._written: set[int] = set()
        self._size = self._below_bytes = 0 if below is None else below.size()
        if below is not None:
            opened.callback(below.close)

    def size(self) -> int:
        return self._size

    def read_at(self, position: int, size: int) -> bytes:
        size = max(0, min(size, self._size - position))
        if not self._written and self._below is not None and position + size <= self._below_bytes:
            return self._below.read_at(position, size)
        with self._mutex:
            first, last = position // _BLOCK_BYTES, (position + size - 1) // _BLOCK_BYTES
            data = b"".join(self._block(index) for index in range(first, last + 1)) if size else b""
        begin = position - first * _BLOCK_BYTES
        return data[begin : begin + size]

    def _block(self, index: int) -> bytes:
        """A whole block; what was never written is zero."""
        start = index * _BLOCK_BYTES
        if index in self._written:
            assert self._above is not None
            return os.pread(self._above.fileno(), _BLOCK_BYTES, start)
        room = max(0, min(_BLOCK_BYTES, self._below_bytes - start))
        data = b"" if self._below is None or not room else self._below.read_at(start, room)
        return data.ljust(_BLOCK_BYTES, b"\0")

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with self._mutex:
            done = 0
            while done < len(view):
                index, at = divmod(position + done, _BLOCK_BYTES)
                part = view[done : done + _BLOCK_BYTES - at]
                block = bytearray(self._block(index))
                block[at : at + len(part)] = part
                self._put(index, block)
                done += len(part)
            self._size = max(self._size, position + len(view))

    def _put(self, index: int, block: bytes | bytearray) -> None:
        if self._above is None:
            self._above = self._opened.enter_context(tempfile.TemporaryFile(prefix="tidelog-"))  # noqa: SIM115 - the stack closes it
        os.pwrite(self._above.fileno(), block, index * _BLOCK_BYTES)
        self._written.add(index)

    def truncate(self, size: int) -> None:
        with self._mutex:
            cut, at = divmod(size, _BLOCK_BYTES)
            if size < self._size:
                if at:
                    self._put(cut, self._block(cut)[:at].ljust(_BLOCK_BYTES, b"\0"))
                self._written = {index for index in self._written if index < cut + bool(at)}
                self._below_bytes = min(self._below_bytes, size)
            self._size = size

    def sync(self) -> None:
        """There is nothing to keep."""

    def close(self) -> None:
        """The content stays: others may have it open."""
