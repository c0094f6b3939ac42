"""A shared directory as an object store: every write is on the disk, content and name, when it returns.

obstore reads and lists it. obstore writes without syncing, so that a power failure can leave an empty object under a
published name; therefore this module does the writing.

    <directory>/<key>           an object
    <directory>/<key>#<digits>  one that is being written; not a key, and no listing shows it
    <directory>/.lock#0         the lock that a writer holds while it adds or removes a name (see below)

Invariants
- Content is synced before it gets its name, the directory after it: a name never shows half an object.
- Every name is added and removed under the lock, so what `put_if_match` compares is unchanged until it replaces it.
  This holds among all processes that open this same directory, on one machine or over a file system whose flock works
  (over NFS: where the lock goes to the server). Content is written and synced before the lock is taken.
- An etag (obstore derives it from inode, time and size) is never reused: no two writes get the same time, whatever the
  clock does. Only a copy has the etag of its original.
- `put_if_absent` is also a hard link, which exactly one of several writers gets even without the lock.
- A missing directory (not mounted) is an error, never an empty store.
- Only regular files are opened: opening a FIFO may hang, and a device may have no end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import obstore
from obstore.store import LocalStore

from tidelog.clock import jittered
from tidelog.errors import (
    AccessDeniedError,
    ConflictError,
    DataError,
    DiskFullError,
    InputError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.files import File, LocalFiles, is_full_disk, open_regular
from tidelog.limits import is_out_of_descriptors, out_of_descriptors
from tidelog.store.keys import check_key, check_prefix, is_key
from tidelog.store.object_store import ObjectInfo, ObjectWriter
from tidelog.store.obstore import ObstoreStore, Reopen

# The lock of a shared directory: one writer at a time, and a unique time for each of its writes.
#
#     <directory>/.lock#0    ASCII digits: the last time that was given out, in microseconds since 1970
#
# No key has such a name, and no listing shows it.
#
# Invariants
# - The lock excludes all threads and processes that open the same directory. The system releases it when its holder
#   dies. A holder that is only paused keeps it: the others give up after a while with an error that asks to retry.
# - Times only grow. A file's etag is made of its inode, time and size, and inodes and sizes are reused: the time must
#   not be.
# - It relies on flock. On file systems of one machine that works. Over NFS it works where the lock goes to the server:
#   v4, or v3 with its lock daemon, and not mounted with `nolock` or `local_lock`. Where flock is refused, writing is
#   refused.
# - Two directories have two locks: a store inside another one's directory does not know of it.


LOCK_NAME = ".lock#0"
LOCK_TIMEOUT_SECONDS = 30.0
_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.02
_MAX_DIGITS = 20
# A time further ahead is not followed: some clock was wrong once, and is not to date all objects from then on.
_MAX_AHEAD_US = 24 * 3600 * 1_000_000


class HeldLock:
    """The operations that need the lock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def new_time_us(self, after_us: int = 0) -> int:
        """A time after all that were given out before and after `after_us`; now, unless the clock went back."""
        now_us = time.time_ns() // 1000
        last_us = self._last_us()
        if last_us > now_us + _MAX_AHEAD_US:
            last_us = 0
        new_us = max(now_us, last_us + 1, after_us + 1)
        os.pwrite(self._descriptor, b"%020d" % new_us, 0)
        return new_us

    def _last_us(self) -> int:
        """Only a hint against clocks that stand still or go back, so what cannot be read counts as nothing."""
        text = os.pread(self._descriptor, _MAX_DIGITS, 0)
        return int(text) if text.isdigit() else 0


class DirectoryLock:
    """The lock of one directory; not reentrant."""

    def __init__(self, directory: Path, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
        self._path = directory / LOCK_NAME
        self._timeout_seconds = timeout_seconds

    @contextlib.contextmanager
    def held(self) -> Iterator[HeldLock]:
        """Waits for its turn. StoreUnavailableError when that takes too long; nothing was done then."""
        deadline = time.monotonic() + self._timeout_seconds
        descriptor = self._acquire(deadline)
        try:
            yield HeldLock(descriptor)
        finally:
            # A process that is just being started may hold a copy of the descriptor, so closing alone is not enough.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _acquire(self, deadline: float) -> int:
        while True:
            # All writers must be able to open it for writing: the umask decides, as for the others.
            descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._wait(descriptor, deadline)
                if self._is_current(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _wait(self, descriptor: int, deadline: float) -> None:
        """Asks again and again: a call that waits could not be given up when the holder is paused."""
        pause_seconds = _POLL_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            else:
                return
            if time.monotonic() > deadline:
                message = f"{self._path}: another process has held the lock for {self._timeout_seconds:g} s"
                raise StoreUnavailableError(
                    message, operation="lock", hint="Find that process with `fuser` and check whether it hangs"
                )
            time.sleep(jittered(pause_seconds))
            pause_seconds = min(pause_seconds * 2, _MAX_POLL_SECONDS)

    def _is_current(self, descriptor: int) -> bool:
        """Whether the locked file still has its name: a lock on a removed file protects nothing."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


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
        """A hint to drop cached pages; unsynced ones stay."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self._directory / check_key(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
        """Creates a free name in one step: a process killed here leaves nothing beside it that looks like it."""
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
            hint = "Read it again, then decide whether to write"
            raise ConflictError(f"{self._place(key)}: another writer changed it first", operation="replace", hint=hint)

    def _check_directory(self) -> None:
        if not self._files.is_directory(self._directory):
            raise StoreUnavailableError(f"{self.url}: the directory is gone", hint="Is it mounted?")

    def _refuse_special_file(self, operation: str, key: str) -> None:
        try:
            kind = os.stat(self._directory / key).st_mode
        except OSError:
            return  # obstore says what is wrong
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            hint = "Remove it, or put the object back from a copy"
            raise DataError(f"{self._place(key)} is a FIFO, a socket or a device", operation=operation, hint=hint)

    @contextlib.contextmanager
    def _asking(self, operation: str, key: str) -> Iterator[None]:
        self._refuse_special_file(operation, key)
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
            message = f"{self._place(key)}: there is no such object; it is a folder"
            raise NotFoundError(message, operation=operation) from error

    @contextlib.contextmanager
    def _on_disk(self, operation: str, key: str) -> Iterator[Path]:
        """The path of a key; translates errors of the operating system into tidelog's."""
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
    """Writes a temporary file, then renames it if the existing object is the expected one."""

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
        """Another process may remove an empty folder just when it is needed again: under the lock it cannot."""
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
                # Not under the lock: a writer that depends on this name syncs the same directory before it reports
                # success.
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
        return self._store.head(self.key)  # still under the lock: later it could be another writer's

    def _refuse_coarse_time(self) -> None:
        if _modified_us(self._unfinished) != self._time_us:
            message = f"{self._store.url}: this file system stores no microseconds, so tidelog cannot detect changes"
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
        return ConflictError(
            f"{place}: another writer changed it first",
            operation=operation,
            hint="Read it again, then decide whether to write",
        )
    if is_full_disk(error):
        return DiskFullError(f"{operation}: no space left for {place} ({reason})", path=directory)
    if is_out_of_descriptors(error):
        return out_of_descriptors(operation, directory, error)
    if error.errno in _DENIED:
        hint = "Check the permissions of the directory"
        return AccessDeniedError(f"{place}: access is denied ({reason})", operation=operation, hint=hint)
    if error.errno in _WRONG_KEY:
        return InputError(f"{place}: {reason}", operation=operation)
    return StoreUnavailableError(f"{place}: the directory cannot be used now ({reason})", operation=operation)
