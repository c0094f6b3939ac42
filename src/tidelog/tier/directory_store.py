"""A shared directory as an object store: every write is on the disk, content and name, when it returns.

obstore reads and lists it. It writes without syncing, so that a power failure can leave an empty object under a
published name; therefore writing is done here.

    <directory>/<key>           an object
    <directory>/<key>#<digits>  one that is being written; not a key, and no listing shows it
    <directory>/.lock#0         whose lock a writer holds while it gives or takes away a name (see directory_lock.py)

Invariants
- Content is synced before it gets its name, the directory after it: a name never shows half an object.
- Every name is given and taken under the lock, so what `put_if_match` compares stays so until it has replaced it. This
  holds among all processes that open this same directory, on one machine or over a file system whose flock works
  (over NFS: where the lock goes to the server). Content is written and synced before the lock is taken.
- An etag (obstore makes it of inode, time and size) never comes back: no two writes get the same time, whatever the
  clock does. A copy alone has the etag of what it is a copy of.
- `put_if_absent` is a hard link as well, which exactly one of several writers gets even without the lock.
- A directory that is gone (not mounted) is an error, never an empty store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import obstore
from obstore.store import LocalStore

from tidelog.errors import (
    AccessDeniedError,
    ConflictError,
    DiskFullError,
    InputError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.files import File, LocalFiles, is_full_disk
from tidelog.limits import is_out_of_descriptors, out_of_descriptors
from tidelog.tier.directory_lock import DirectoryLock, HeldLock
from tidelog.tier.keys import check_key, check_prefix, is_key
from tidelog.tier.object_store import ObjectInfo, ObjectWriter
from tidelog.tier.obstore_store import ObstoreStore, Reopen

_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_BELOW_A_FILE = "(os error 20)"
_UNFINISHED = re.compile(r"(.+)#[0-9]+", re.ASCII)
_WRONG_KEY = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


class DirectoryStore(ObstoreStore):
    """Objects are files below `directory`, which exists."""

    def __init__(self, directory: Path, url: str, reopen: Reopen) -> None:
        super().__init__(LocalStore(directory), url, reopen)
        self._directory = directory
        self._files = LocalFiles()
        self._lock = DirectoryLock(directory)

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Straight from the file, which spares a buffer of zeros and two changes of threads. Errors are obstore's."""
        path = self._directory / check_key(key)
        if start >= 0 and length > 0:
            with contextlib.suppress(OSError):
                file = self._files.open(path)
                try:
                    return memoryview(file.read_at(start, length))
                finally:
                    file.close()
        return super().read_range(key, start, length)

    def let_go_below(self, key: str, position: int) -> None:
        """What is not on the disk yet stays in the system's cache, whatever is said here."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self._directory / check_key(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, position, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        found = sorted(super().list(prefix, start_after=start_after))
        if not found:
            self._check_directory()
        return iter(found)

    def put(self, key: str, data: bytes) -> str:
        return self._put(_DirectoryWriter(self, key), data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._put(_DirectoryWriter(self, key, must_be_new=True), data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        self._refuse_unless_same(key, etag)  # who has lost already writes nothing; what counts is asked under the lock
        return self._put(_DirectoryWriter(self, key, must_have_etag=etag), data)

    def open_writer(self, key: str) -> ObjectWriter:
        return _DirectoryWriter(self, key)

    def copy(self, source: str, target: str) -> None:
        self.head(source)
        with self._on_disk("copy", source) as original, self._on_disk("copy", target) as path:
            self._files.make_directories(path.parent)
            with self._lock.held():
                self._link(original, path)  # objects are replaced, never changed, so two names may share one content
            self._files.sync_directory(path.parent)

    def _link(self, original: Path, path: Path) -> None:
        """A name that is free is given in one step: whoever is killed leaves nothing beside it that looks like it."""
        with contextlib.suppress(FileExistsError):
            os.link(original, path)
            return
        unfinished = _unfinished_name(path)
        os.link(original, unfinished)
        self._files.rename(unfinished, path)
        with contextlib.suppress(FileNotFoundError):  # if the target was such a copy already, both names stay
            self._files.remove(unfinished)

    def delete(self, keys: str | Iterable[str]) -> None:
        parents = set()
        for key in [keys] if isinstance(keys, str) else keys:
            with self._on_disk("delete", key) as path, self._lock.held(), contextlib.suppress(*_NO_FILE):
                self._files.remove(path)
                parents.add(path.parent)
        for parent in parents:
            with self._explaining("delete", parent.name), contextlib.suppress(FileNotFoundError):
                self._files.sync_directory(parent)

    def remove_folder(self, prefix: str) -> None:
        path = self._directory / check_prefix(prefix)
        with self._lock.held(), contextlib.suppress(OSError):  # it is not empty, or gone already, and both are fine
            path.rmdir()

    # What dead writers left

    def unfinished_uploads(self, prefix: str = "", *, modified_before_us: int | None = None) -> Iterator[ObjectInfo]:
        top = self._directory / check_prefix(prefix)
        self._check_directory()
        with self._explaining("list", prefix):
            for folder, _, names in os.walk(top, onerror=_raise_unless_gone):
                for path in (Path(folder, name) for name in names):
                    info = self._unfinished_info(path)
                    if info and (modified_before_us is None or info.modified_us < modified_before_us):
                        yield info

    def delete_unfinished(self, uploads: Iterable[ObjectInfo]) -> None:
        for upload in uploads:
            path = self._directory / upload.key
            if not _is_unfinished(upload.key):
                raise InputError(f"{self._place(upload.key)} is not an unfinished object", operation="delete")
            with self._explaining("delete", upload.key), self._lock.held(), contextlib.suppress(*_NO_FILE):
                if self._unfinished_info(path) == upload:
                    self._files.remove(path)

    def _unfinished_info(self, path: Path) -> ObjectInfo | None:
        name = path.relative_to(self._directory).as_posix()
        if not _is_unfinished(name):
            return None
        try:
            status = path.lstat()
        except _NO_FILE:
            return None
        modified_us = status.st_mtime_ns // 1000
        return ObjectInfo(name, status.st_size, f"{status.st_ino:x}-{modified_us:x}-{status.st_size:x}", modified_us)

    # Conditions and errors

    def _put(self, writer: ObjectWriter, data: bytes) -> str:
        with writer:
            writer.write(data)
        assert writer.published is not None
        return writer.published.etag

    def _refuse_unless_same(self, key: str, etag: str) -> None:
        check_key(key)
        try:
            with self._asking("replace", key):
                # Opened, not only looked up: over a network, opening is what asks the server for its newest state.
                found = self._etag(obstore.get(self._client, key).meta)
        except NotFoundError:
            found = None
        if found != etag:
            hint = "Read it again and decide"
            raise ConflictError(f"{self._place(key)}: somebody else was first", operation="replace", hint=hint)

    def _check_directory(self) -> None:
        if not self._files.is_directory(self._directory):
            raise StoreUnavailableError(f"{self.url}: the directory is gone", hint="Is it mounted?")

    @contextlib.contextmanager
    def _asking(self, operation: str, key: str) -> Iterator[None]:
        try:
            with super()._asking(operation, key):
                yield
        except NotFoundError:
            self._check_directory()
            raise
        except StoreUnavailableError as error:
            if _BELOW_A_FILE not in str(error):
                raise
            self._check_directory()
            message = f"{self._place(key)}: there is no such object, its folder is one"
            raise NotFoundError(message, operation=operation) from error

    @contextlib.contextmanager
    def _on_disk(self, operation: str, key: str) -> Iterator[Path]:
        """The path of a key; what the operating system says about it becomes an error of ours."""
        check_key(key)
        with self._explaining(operation, key):
            yield self._directory / key

    @contextlib.contextmanager
    def _explaining(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _translate(error, operation, self._place(key), self._directory) from error


class _DirectoryWriter(ObjectWriter):
    """Writes beside the name, then gives the name, if what is there now is what must be there."""

    def __init__(
        self, store: DirectoryStore, key: str, *, must_be_new: bool = False, must_have_etag: str | None = None
    ) -> None:
        super().__init__(key)
        self._store = store
        self._files = store._files
        self._must_be_new = must_be_new
        self._must_have_etag = must_have_etag
        self._time_us = 0
        store._check_directory()
        with store._on_disk("write", key) as path:
            self._path = path
            self._unfinished = _unfinished_name(path)
            self._file: File = self._created()

    def _created(self) -> File:
        """An empty folder may be removed by somebody else just when it is wanted again: under the lock it is not."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._files.make_directories(self._path.parent)
            return self._files.create(self._unfinished)
        with self._store._lock.held():
            self._files.make_directories(self._path.parent)
            return self._files.create(self._unfinished)

    def _write(self, data: bytes | memoryview) -> None:
        with self._store._on_disk("write", self.key):
            self._file.write_at(self.bytes_written, data)

    def _publish(self) -> ObjectInfo:
        try:
            with self._store._on_disk("publish", self.key):
                self._sync()
                with self._store._lock.held() as lock:
                    info = self._replace(lock)
                # Not under the lock: who builds on this name syncs the same directory before telling anybody.
                self._files.sync_directory(self._path.parent)
        except BaseException:
            self._abort()
            raise
        return info

    def _sync(self) -> None:
        """The time comes first, so that it is as durable as the content."""
        with self._store._lock.held() as lock:
            time_us = lock.new_time_us()
        self._set_time(time_us)
        self._file.sync()
        self._file.close()

    def _set_time(self, time_us: int) -> None:
        self._time_us = time_us
        os.utime(self._unfinished, ns=(time_us * 1000, time_us * 1000))

    def _replace(self, lock: HeldLock) -> ObjectInfo:
        if self._must_have_etag is not None:
            self._store._refuse_unless_same(self.key, self._must_have_etag)
            self._refuse_coarse_time()
        replaced_us = _modified_us(self._path)
        if self._time_us <= replaced_us:  # another writer took its time later and was here before us
            self._set_time(lock.new_time_us(replaced_us))
        self._give_name()
        return self._store.head(self.key)  # still under the lock: later it could be somebody else's

    def _refuse_coarse_time(self) -> None:
        if _modified_us(self._unfinished) != self._time_us:
            message = f"{self._store.url}: this file system keeps no microseconds, so changes cannot be told apart"
            raise NotSupportedError(message, operation="replace", hint="Keep the metadata in sqlite:///path")

    def _give_name(self) -> None:
        if not self._must_be_new:
            self._files.rename(self._unfinished, self._path)
            return
        os.link(self._unfinished, self._path)
        self._files.remove(self._unfinished)

    def _abort(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):
            self._files.remove(self._unfinished)


def _unfinished_name(path: Path) -> Path:
    return path.with_name(f"{path.name}#{secrets.randbits(60)}")


def _is_unfinished(name: str) -> bool:
    found = _UNFINISHED.fullmatch(name)
    return found is not None and is_key(found[1])


def _modified_us(path: Path) -> int:
    """0 where there is no such file."""
    try:
        return path.stat().st_mtime_ns // 1000
    except _NO_FILE:
        return 0


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _translate(error: OSError, operation: str, place: str, directory: Path) -> TidelogError:
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError):
        return ConflictError(f"{place}: somebody else was first", operation=operation, hint="Read it again and decide")
    if is_full_disk(error):
        return DiskFullError(f"{operation}: no room for {place} ({reason})", path=directory)
    if is_out_of_descriptors(error):
        return out_of_descriptors(operation, directory, error)
    if error.errno in _DENIED:
        hint = "Check the permissions of the directory"
        return AccessDeniedError(f"{place}: access is denied ({reason})", operation=operation, hint=hint)
    if error.errno in _WRONG_KEY:
        return InputError(f"{place}: {reason}", operation=operation)
    return StoreUnavailableError(f"{place}: the directory cannot be used now ({reason})", operation=operation)
