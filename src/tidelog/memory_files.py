"""An in-memory file system, for programs under test: `tidelog.open(None)`.

Invariants
- It behaves as `LocalFiles` does, errors included; one contract suite runs over both.
- Nothing outlives it, so sync is a no-op. An open file stays readable after its name is removed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock as Mutex

from tidelog.errors import LockedError
from tidelog.files import File, Files, Lock, ReadsRanges

_ROOT = Path("/")
_FREE_BYTES = 1 << 40


class MemoryFiles(Files):
    """One file system. Threads may share it."""

    def __init__(self) -> None:
        self._guard = Mutex()
        self._contents: dict[Path, _Content] = {}
        self._directories: set[Path] = {_ROOT}
        self._locked: set[Path] = set()

    def create(self, path: Path) -> File:
        with self._guard:
            self._require_directory(path.parent)
            if self._is_taken(path):
                raise _error(FileExistsError, errno.EEXIST, path)
            content = self._contents[path] = _Content()
        return _MemoryFile(content, write=True)

    def open(self, path: Path, *, write: bool = False) -> File:
        with self._guard:
            return _MemoryFile(self._content(path), write=write)

    def list(self, directory: Path) -> list[str]:
        with self._guard:
            self._require_directory(directory)
            return sorted(path.name for path in self._children(directory))

    def exists(self, path: Path) -> bool:
        with self._guard:
            return self._is_taken(path)

    def is_directory(self, path: Path) -> bool:
        with self._guard:
            return path in self._directories

    def make_directory(self, path: Path) -> None:
        with self._guard:
            self._require_directory(path.parent)
            if path in self._contents:
                raise _error(NotADirectoryError, errno.ENOTDIR, path)
            self._directories.add(path)

    def remove(self, path: Path) -> None:
        with self._guard:
            self._content(path)
            del self._contents[path]

    def remove_directory(self, path: Path) -> None:
        with self._guard:
            self._require_directory(path)
            if self._children(path):
                raise _error(OSError, errno.ENOTEMPTY, path)
            self._directories.discard(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._guard:
            self._require_directory(target.parent)
            if source in self._directories:
                self._rename_directory(source, target)
            elif target in self._directories:
                raise _error(IsADirectoryError, errno.EISDIR, target)
            else:
                self._contents[target] = self._content(source)
                if source != target:
                    del self._contents[source]

    def _rename_directory(self, source: Path, target: Path) -> None:
        if target in self._contents:
            raise _error(NotADirectoryError, errno.ENOTDIR, target)
        if target in self._directories and self._children(target):
            raise _error(OSError, errno.ENOTEMPTY, target)
        moved = {path: target / path.relative_to(source) for path in self._below(source)}
        self._directories = {moved.get(path, path) for path in self._directories}
        self._contents = {moved.get(path, path): content for path, content in self._contents.items()}

    def sync_directory(self, path: Path) -> None:
        with self._guard:
            self._require_directory(path)

    def lock(self, path: Path) -> Lock:
        with self._guard:
            self._require_directory(path.parent)
            if path in self._locked:
                raise LockedError(f"{path.parent} is already open", path=path, hint="Close it there")
            self._contents.setdefault(path, _Content())
            self._locked.add(path)
        return _MemoryLock(self, path)

    def unlock(self, path: Path) -> None:
        """What a lock does when it is released."""
        with self._guard:
            self._locked.discard(path)

    def free_bytes(self, path: Path) -> int:
        with self._guard:
            self._require_directory(path)
        return _FREE_BYTES

    # Under the guard

    def _content(self, path: Path) -> _Content:
        if path in self._directories:
            raise _error(IsADirectoryError, errno.EISDIR, path)
        try:
            return self._contents[path]
        except KeyError:
            raise _error(FileNotFoundError, errno.ENOENT, path) from None

    def _is_taken(self, path: Path) -> bool:
        return path in self._contents or path in self._directories

    def _require_directory(self, path: Path) -> None:
        if path in self._contents:
            raise _error(NotADirectoryError, errno.ENOTDIR, path)
        if path not in self._directories:
            raise _error(FileNotFoundError, errno.ENOENT, path)

    def _children(self, directory: Path) -> Sequence[Path]:
        return [path for path in (*self._contents, *self._directories) if path.parent == directory and path != _ROOT]

    def _below(self, directory: Path) -> Sequence[Path]:
        return [path for path in (*self._contents, *self._directories) if path.is_relative_to(directory)]


class _Content:
    """The bytes of one file, which outlive its name while it is open."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.guard = Mutex()


class _MemoryFile(ReadsRanges):
    def __init__(self, content: _Content, *, write: bool) -> None:
        self._opened: _Content | None = content
        self._may_write = write

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        content = self._writable()
        with content.guard:
            if position > len(content.data):
                content.data += bytes(position - len(content.data))
            content.data[position : position + len(data)] = data

    def read_at(self, position: int, size: int) -> bytes:
        content = self._readable()
        with content.guard:
            return bytes(memoryview(content.data)[position : position + size])

    def sync(self) -> None:
        self._readable()

    def truncate(self, size: int) -> None:
        content = self._writable()
        with content.guard:
            del content.data[size:]
            content.data += bytes(size - len(content.data))

    def size(self) -> int:
        return len(self._readable().data)

    def close(self) -> None:
        self._opened = None

    def _readable(self) -> _Content:
        if self._opened is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._opened

    def _writable(self) -> _Content:
        if not self._may_write:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._readable()


class _MemoryLock:
    def __init__(self, files: MemoryFiles, path: Path) -> None:
        self._files: MemoryFiles | None = files
        self._path = path

    def release(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.unlock(self._path)

    def abandon(self) -> None:
        self._files = None


def _error(kind: type[OSError], number: int, path: Path) -> OSError:
    return kind(number, os.strerror(number), str(path))
