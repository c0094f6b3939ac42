"""The only access to the file system.

Invariants
- Everything that must survive a crash goes through here, so a test can crash it at any call
  (`tidelog.testing.FaultyFiles`).
- A new, renamed or removed name survives a crash only after `sync_directory` of its parent; file contents only after
  `sync`. `write_atomically` does both, in the order that leaves either the old content or the new.
- Positions are explicit (`write_at`): a write that failed half-way can be retried at the same position.
- A name in a tidelog directory is the file itself: a symbolic link there is not followed, and anything else (a FIFO, a
  device) is neither waited for nor written to. Directories (the root, a namespace, a topic) may be reached through
  links that the user made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Protocol

from tidelog._native import read_ranges
from tidelog.errors import DiskFullError, InputError, LockedError, LogFailedError
from tidelog.limits import is_out_of_descriptors, out_of_descriptors

TEMPORARY_SUFFIX = ".tmp"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_NOT_USABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
)


def is_full_disk(error: OSError) -> bool:
    """Whether an operation failed for want of room, and may succeed later."""
    return error.errno in _FULL_DISK


@contextlib.contextmanager
def explained(operation: str, path: Path) -> Iterator[None]:
    """Translates an error of the operating system into a tidelog error that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if is_full_disk(error):
            raise DiskFullError(f"{operation}: the disk is full ({reason})", path=path) from error
        if is_out_of_descriptors(error):
            raise out_of_descriptors(operation, path, error) from error
        if error.errno in _NOT_USABLE:
            is_other = error.errno in (errno.ELOOP, errno.EINVAL)
            hint = "Put the file itself there, or remove it" if is_other else "Check the path and its permissions"
            raise InputError(f"the path cannot be used: {reason}", operation=operation, path=path, hint=hint) from error
        raise LogFailedError(f"the disk failed: {reason}", operation=operation, path=path) from error


def open_regular(path: Path, flags: int, mode: int = 0o644) -> int:
    """The descriptor of a regular file. OSError, at once and with the name, when it is a link or anything else."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        refuse_other_kinds(path)
        raise error
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise _not_regular(path, kind)
    return descriptor


def refuse_other_kinds(path: Path) -> None:
    """OSError when a name is there that is no regular file."""
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(kind):
        raise _not_regular(path, kind)


def refuse_link(path: Path) -> None:
    """Raises OSError when a name in a tidelog directory is a symbolic link."""
    if path.is_symlink():
        raise _not_regular(path, stat.S_IFLNK)


def _not_regular(path: Path, kind: int) -> OSError:
    if stat.S_ISDIR(kind):
        return IsADirectoryError(errno.EISDIR, f"{path.name} is a directory", str(path))
    if stat.S_ISLNK(kind):
        return OSError(errno.ELOOP, f"{path.name} is a symbolic link, which is not followed", str(path))
    what = "a FIFO" if stat.S_ISFIFO(kind) else "a socket" if stat.S_ISSOCK(kind) else "a device"
    return OSError(errno.EINVAL, f"{path.name} is {what}, not a file", str(path))


class File(Protocol):
    """An open file."""

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        """Writes all of `data`, or raises OSError after having written some prefix of it."""
        ...

    def read_at(self, position: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        ...

    def read_ranges(self, position: int, ranges: bytes) -> bytes:
        """The bytes of many ranges, one after the other: native pairs u64 of the first byte, from the position on, and
        the count. What the file does not have is zero: the caller knows what must be there, and checks it.
        """
        ...

    def sync(self) -> None:
        """Contents and size are on the disk when this returns. A failure must not be retried on this handle."""
        ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class ReadsRanges:
    """Reads ranges one by one: for files that the kernel does not have."""

    def read_ranges(self: _Reads, position: int, ranges: bytes) -> bytes:
        """As `File` says."""
        numbers = array("Q", ranges)
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return b"".join(self.read_at(position + byte, size).ljust(size, b"\0") for byte, size in pairs)


class _Reads(Protocol):
    def read_at(self, position: int, size: int) -> bytes: ...


class Lock(Protocol):
    """A held directory lock."""

    def release(self) -> None: ...

    def abandon(self) -> None:
        """In a forked child: releases the copy, and the parent keeps the lock."""
        ...


class Files(ABC):
    """The file system interface."""

    @abstractmethod
    def create(self, path: Path) -> File:
        """A new, empty file for reading and writing; FileExistsError when the name is taken."""

    @abstractmethod
    def open(self, path: Path, *, write: bool = False) -> File:
        """An existing file; FileNotFoundError when there is none."""

    @abstractmethod
    def list(self, directory: Path) -> list[str]:
        """Names in a directory, sorted; FileNotFoundError when it does not exist."""

    @abstractmethod
    def exists(self, path: Path) -> bool: ...

    @abstractmethod
    def is_directory(self, path: Path) -> bool: ...

    @abstractmethod
    def make_directory(self, path: Path) -> None:
        """One level; the parent must exist. An existing directory is fine."""

    @abstractmethod
    def remove(self, path: Path) -> None: ...

    @abstractmethod
    def remove_directory(self, path: Path) -> None:
        """An empty directory."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Files replace an existing target in one step."""

    @abstractmethod
    def sync_directory(self, path: Path) -> None: ...

    @abstractmethod
    def lock(self, path: Path) -> Lock:
        """Takes the lock file at once or raises LockedError; the system frees it when the process dies."""

    @abstractmethod
    def free_bytes(self, path: Path) -> int:
        """Room left for an ordinary user."""

    def device(self, path: Path) -> Hashable:
        """Tells which file system a path is on: what hangs on one must not hold up what is on another."""
        return self

    def read(self, path: Path) -> bytes:
        """The whole of a small file."""
        file = self.open(path)
        try:
            return file.read_at(0, file.size())
        finally:
            file.close()

    def write_atomically(self, path: Path, data: bytes, *, syncs_directory: bool = True) -> None:
        """Old content or new content, never a mixture, whatever happens; durable when it returns, or when the caller
        has synced the directory."""
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        if self.exists(temporary):
            self.remove(temporary)
        file = self.create(temporary)
        try:
            file.write_at(0, data)
            file.sync()
        finally:
            file.close()
        self.rename(temporary, path)
        if syncs_directory:
            self.sync_directory(path.parent)

    def make_directories(self, path: Path) -> None:
        """All missing levels, each durable in its parent before the next is made."""
        if not self.is_directory(path):
            self.make_directories(path.parent)
            self.make_directory(path)
            self.sync_directory(path.parent)
            return
        # The process that created it may have been killed before the sync. If we may not open a parent, we did not
        # create it there.
        with contextlib.suppress(PermissionError):
            self.sync_directory(path.parent)

    def is_link(self, path: Path) -> bool:
        """Whether a name only points elsewhere; what it points at is not ours to remove."""
        return False

    def has_own_directory(self, path: Path) -> bool:
        """Whether there is a directory that only we make, inside another; OSError for a link to one."""
        if self.is_link(path):
            refuse_link(path)
        return self.is_directory(path)

    def make_own_directory(self, path: Path) -> None:
        """As `make_directories`, for a directory that only we make; OSError for a link to one."""
        self.has_own_directory(path)
        self.make_directories(path)

    def remove_tree(self, path: Path) -> None:
        """Removes a directory and all below it; links below are removed, never followed, and a link at the top is
        refused."""
        if self.is_link(path):
            refuse_link(path)
        for name in self.list(path):
            child = path / name
            if self.is_directory(child) and not self.is_link(child):
                self.remove_tree(child)
            else:
                self.remove(child)
        self.remove_directory(path)


class LocalFiles(Files):
    """The real file system."""

    _syncs_times = False
    """Whether the sync of a file covers its times too, which nothing here needs."""

    def create(self, path: Path) -> File:
        return self._file(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def open(self, path: Path, *, write: bool = False) -> File:
        return self._file(open_regular(path, os.O_RDWR if write else os.O_RDONLY))

    def _file(self, descriptor: int) -> File:
        return _LocalFile(descriptor, self._syncs_times)

    def list(self, directory: Path) -> list[str]:
        return sorted(os.listdir(directory))

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)  # a name is taken also by a link that leads nowhere

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        return path.is_symlink()

    def make_directory(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: Path) -> Lock:
        return _LocalLock(path)

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def device(self, path: Path) -> Hashable:
        return path.stat().st_dev


class ScratchFiles(LocalFiles):
    """The real file system, for a directory that is worth nothing once its process has ended: nothing is synced."""

    def _file(self, descriptor: int) -> File:
        return _ScratchFile(descriptor, self._syncs_times)

    def sync_directory(self, path: Path) -> None:
        pass


class _LocalFile:
    def __init__(self, descriptor: int, syncs_times: bool) -> None:
        self._descriptor = descriptor
        self._syncs_times = syncs_times

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        written = os.pwrite(self._descriptor, data, position)
        if written == len(data):
            return
        view = memoryview(data)
        while written < len(view):
            written += os.pwrite(self._descriptor, view[written:], position + written)

    def read_at(self, position: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size:
            more = os.pread(self._descriptor, size - got, position + got)
            if not more:
                break
            parts.append(more)
            got += len(more)
        return b"".join(parts)

    def read_ranges(self, position: int, ranges: bytes) -> bytes:
        return read_ranges(self._descriptor, position, ranges)

    def sync(self) -> None:
        if self._syncs_times:
            os.fsync(self._descriptor)
        else:
            os.fdatasync(self._descriptor)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _ScratchFile(_LocalFile):
    def sync(self) -> None:
        pass


class _LocalLock:
    """flock belongs to the open file, so a second open in the same process is refused as well."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._descriptor, 64, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            who = f"process {owner}" if owner else "another process"
            raise LockedError(
                f"{path.parent} is already open in {who}",
                path=path,
                hint="Close it there, open this directory with read_only=True, or tidelog.connect() to its server",
            ) from None
        # Only for the message above; a full disk must not prevent opening.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode("ascii"), 0)

    def release(self) -> None:
        """Unlocks before it closes: a process that is just being started may hold a copy of the descriptor."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.abandon()

    def abandon(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
