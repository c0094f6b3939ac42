"""A file system over the real one whose changes go nowhere: for recovering an engine without touching its files.

Invariants
- Nothing of the real files is changed. What is written is kept in a temporary file, a block at a time, and is gone with
  this object; whoever reads through it sees what was written through it.
- The lock is the real one: while an engine is open in here, nobody else opens it.
- Memory is a number a block that was written; the blocks themselves are on the disk for temporary files.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Hashable
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import IO, Self

from tidelog.files import File, Files, LocalFiles, Lock

_BLOCK_BYTES = 8192


class OverlayFiles(Files):
    """The real files as they would be after what was done in here."""

    def __init__(self) -> None:
        self._real = LocalFiles()
        self._mutex = RLock()
        self._contents: dict[Path, _Content] = {}
        self._gone: set[Path] = set()
        self._made: set[Path] = set()
        self._blocks = _Blocks()

    def close(self) -> None:
        """Forgets everything."""
        with self._mutex:
            for content in self._contents.values():
                content.close()
            self._contents.clear()
            self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def create(self, path: Path) -> File:
        with self._mutex:
            if self.exists(path):
                raise FileExistsError(str(path))
            self._gone.discard(path)
            content = self._contents[path] = _Content(None, self._blocks, self._mutex)
            return _Handle(content)

    def open(self, path: Path, *, write: bool = False) -> File:
        with self._mutex:
            content = self._contents.get(path)
            if content is None:
                if path in self._gone:
                    raise FileNotFoundError(str(path))
                content = self._contents[path] = _Content(self._real.open(path), self._blocks, self._mutex)
            return _Handle(content)

    def list(self, directory: Path) -> list[str]:
        real = () if directory in self._made else self._real.list(directory)
        names = {name for name in real if directory / name not in self._gone}
        names |= {path.name for path in (*self._contents, *self._made) if path.parent == directory}
        return sorted(names)

    def exists(self, path: Path) -> bool:
        with self._mutex:
            return path in self._contents or path in self._made or (path not in self._gone and self._real.exists(path))

    def is_directory(self, path: Path) -> bool:
        return path in self._made or (path not in self._gone and self._real.is_directory(path))

    def is_link(self, path: Path) -> bool:
        return path not in self._contents and self._real.is_link(path)

    def make_directory(self, path: Path) -> None:
        if not self.is_directory(path):
            self._made.add(path)

    def remove(self, path: Path) -> None:
        with self._mutex:
            if not self.exists(path):
                raise FileNotFoundError(str(path))
            self._contents.pop(path, None)
            self._gone.add(path)

    def remove_directory(self, path: Path) -> None:
        self._made.discard(path)
        self._gone.add(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._mutex:
            if source not in self._contents:
                self.open(source)
            self._contents[target] = self._contents.pop(source)
            self._gone.add(source)
            self._gone.discard(target)

    def sync_directory(self, path: Path) -> None:
        """There is nothing to keep."""

    def lock(self, path: Path) -> Lock:
        return self._real.lock(path)

    def free_bytes(self, path: Path) -> int:
        return self._real.free_bytes(path)

    def device(self, path: Path) -> Hashable:
        return self._real.device(path)


class _Blocks:
    """Blocks in a temporary file, by number."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._count = 0

    def add(self, block: bytes) -> int:
        number = self._count
        self._count += 1
        self.put(number, block)
        return number

    def put(self, number: int, block: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="tidelog-overlay-")  # noqa: SIM115 - it lives as long as this
        os.pwrite(self._file.fileno(), block, number * _BLOCK_BYTES)

    def get(self, number: int) -> bytes:
        assert self._file is not None
        return os.pread(self._file.fileno(), _BLOCK_BYTES, number * _BLOCK_BYTES)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Content:
    """What a file holds: a real one below, and the blocks that were written since."""

    def __init__(self, below: File | None, blocks: _Blocks, mutex: RLock) -> None:
        self._below = below
        self._blocks = blocks
        self._mutex = mutex
        self._written: dict[int, int] = {}
        self.size = 0 if below is None else below.size()
        self._below_bytes = self.size

    def read(self, position: int, size: int) -> bytes:
        size = max(0, min(size, self.size - position))
        if not self._written and self._below is not None and position + size <= self._below_bytes:
            return self._below.read_at(position, size)
        with self._mutex:
            first, last = position // _BLOCK_BYTES, (position + size - 1) // _BLOCK_BYTES
            data = b"".join(self._block(index) for index in range(first, last + 1)) if size else b""
        begin = position - first * _BLOCK_BYTES
        return data[begin : begin + size]

    def _block(self, index: int) -> bytes:
        """A whole block; what was never written is zero."""
        number = self._written.get(index)
        if number is not None:
            return self._blocks.get(number)
        start = index * _BLOCK_BYTES
        room = max(0, min(_BLOCK_BYTES, self._below_bytes - start))
        data = b"" if self._below is None or not room else self._below.read_at(start, room)
        return data.ljust(_BLOCK_BYTES, b"\0")

    def write(self, position: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with self._mutex:
            done = 0
            while done < len(view):
                index, at = divmod(position + done, _BLOCK_BYTES)
                part = view[done : done + _BLOCK_BYTES - at]
                block = bytearray(self._block(index))
                block[at : at + len(part)] = part
                self._put(index, bytes(block))
                done += len(part)
            self.size = max(self.size, position + len(view))

    def _put(self, index: int, block: bytes) -> None:
        number = self._written.get(index)
        if number is None:
            self._written[index] = self._blocks.add(block)
        else:
            self._blocks.put(number, block)

    def truncate(self, size: int) -> None:
        with self._mutex:
            cut, at = divmod(size, _BLOCK_BYTES)
            if size < self.size and at:
                self._put(cut, self._block(cut)[:at].ljust(_BLOCK_BYTES, b"\0"))
            first_gone = cut + (1 if at else 0)
            if size < self.size:
                self._written = {index: one for index, one in self._written.items() if index < first_gone}
                self._below_bytes = min(self._below_bytes, size)
            self.size = size

    def close(self) -> None:
        if self._below is not None:
            with contextlib.suppress(OSError):
                self._below.close()


class _Handle:
    """An open file. Closing it closes nothing: others may have it open."""

    def __init__(self, content: _Content) -> None:
        self._content = content

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        self._content.write(position, data)

    def read_at(self, position: int, size: int) -> bytes:
        return self._content.read(position, size)

    def sync(self) -> None:
        """There is nothing to keep."""

    def truncate(self, size: int) -> None:
        self._content.truncate(size)

    def size(self) -> int:
        return self._content.size

    def close(self) -> None:
        """The content stays."""
