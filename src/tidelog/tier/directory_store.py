"""A shared directory as an object store: every write is on the disk, content and name, when it returns.

obstore reads and lists it. It writes without syncing, so that a power failure can leave an empty object under a
published name; therefore writing is done here.

    <directory>/<key>           an object
    <directory>/<key>#<digits>  one that is being written; not a key, and no listing shows it

Invariants
- Content is synced before it gets its name, the directory after it: a name never shows half an object.
- `put_if_absent` is a hard link, which exactly one of several writers gets.
- There is no way to replace on a condition: `supports_conditional_update` says so.
- A directory that is gone (not mounted) is an error, never an empty store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from obstore.store import LocalStore

from tidelog.errors import (
    AccessDeniedError,
    ConflictError,
    DiskFullError,
    InputError,
    NotFoundError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.files import File, LocalFiles, is_full_disk
from tidelog.tier.keys import check_key
from tidelog.tier.object_store import ObjectInfo, ObjectWriter
from tidelog.tier.obstore_store import ObstoreStore, Reopen

_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_WRONG_KEY = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


class DirectoryStore(ObstoreStore):
    """Objects are files below `directory`, which exists."""

    supports_conditional_update = False

    def __init__(self, directory: Path, url: str, reopen: Reopen) -> None:
        super().__init__(LocalStore(directory), url, reopen)
        self._directory = directory
        self._files = LocalFiles()

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        found = sorted(super().list(prefix, start_after=start_after))
        if not found:
            self._check_directory()
        return iter(found)

    def put(self, key: str, data: bytes) -> str:
        with self.open_writer(key) as writer:
            writer.write(data)
        assert writer.published is not None
        return writer.published.etag

    def put_if_absent(self, key: str, data: bytes) -> str:
        with _DirectoryWriter(self, key, must_be_new=True) as writer:
            writer.write(data)
        assert writer.published is not None
        return writer.published.etag

    def open_writer(self, key: str) -> ObjectWriter:
        return _DirectoryWriter(self, key, must_be_new=False)

    def copy(self, source: str, target: str) -> None:
        self.head(source)
        with self._on_disk("copy", source) as original, self._on_disk("copy", target) as path:
            self._files.make_directories(path.parent)
            unfinished = _unfinished_name(path)
            os.link(original, unfinished)  # objects are replaced, never changed, so two names may share one content
            self._files.rename(unfinished, path)
            self._files.sync_directory(path.parent)

    def delete(self, keys: str | Iterable[str]) -> None:
        parents = set()
        for key in [keys] if isinstance(keys, str) else keys:
            with self._on_disk("delete", key) as path, contextlib.suppress(*_NO_FILE):
                self._files.remove(path)
                parents.add(path.parent)
        for parent in parents:
            with self._on_disk("delete", parent.name):
                self._files.sync_directory(parent)

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

    @contextlib.contextmanager
    def _on_disk(self, operation: str, key: str) -> Iterator[Path]:
        """The path of a key; what the operating system says about it becomes an error of ours."""
        check_key(key)
        try:
            yield self._directory / key
        except OSError as error:
            raise _translate(error, operation, self._place(key), self._directory) from error


class _DirectoryWriter(ObjectWriter):
    """Writes beside the name, then gives the name."""

    def __init__(self, store: DirectoryStore, key: str, *, must_be_new: bool) -> None:
        super().__init__(key)
        self._store = store
        self._files = store._files
        self._must_be_new = must_be_new
        store._check_directory()
        with store._on_disk("write", key) as path:
            self._path = path
            self._unfinished = _unfinished_name(path)
            self._files.make_directories(path.parent)
            self._file: File = self._files.create(self._unfinished)

    def _write(self, data: bytes | memoryview) -> None:
        with self._store._on_disk("write", self.key):
            self._file.write_at(self.bytes_written, data)

    def _publish(self) -> ObjectInfo:
        try:
            with self._store._on_disk("publish", self.key):
                self._file.sync()
                self._file.close()
                self._give_name()
                self._files.sync_directory(self._path.parent)
        except TidelogError:
            self._abort()
            raise
        return self._store.head(self.key)

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


def _translate(error: OSError, operation: str, place: str, directory: Path) -> TidelogError:
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError):
        return ConflictError(f"{place}: somebody else was first", operation=operation, hint="Read it again and decide")
    if is_full_disk(error):
        return DiskFullError(f"{operation}: no room for {place} ({reason})", path=directory)
    if error.errno in _DENIED:
        hint = "Check the permissions of the directory"
        return AccessDeniedError(f"{place}: access is denied ({reason})", operation=operation, hint=hint)
    if error.errno in _WRONG_KEY:
        return InputError(f"{place}: {reason}", operation=operation)
    return StoreUnavailableError(f"{place}: the directory cannot be used now ({reason})", operation=operation)
