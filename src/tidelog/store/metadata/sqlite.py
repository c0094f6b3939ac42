"""A metadata store in one SQLite file: the default of an embedded log.

    entries(key, value, version)    version is the number of the commit that wrote it
    commits(last)                   one row: the number of the last commit

Invariants
- A commit is on the disk when it returns: WAL mode with synchronous=FULL syncs every commit.
- BEGIN IMMEDIATE serializes writers, within a process and between processes; checks and writes see one state.
- Commit numbers only grow, so no version is reused.
- A process uses only connections that it opened itself: those that a fork copied are left alone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import RLock

from tidelog.errors import (
    AccessDeniedError,
    ClosedError,
    ConflictError,
    DataError,
    DiskFullError,
    InputError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.files import LocalFiles, explained, refuse_other_kinds
from tidelog.limits import out_of_descriptors, why_few_can_be_opened
from tidelog.store.keys import check_key, check_prefix
from tidelog.store.metadata.base import Check, Delete, Entry, MetadataStore, Write, end_of, numeric_version

APPLICATION_ID = 0x74646C67  # "tdlg"
FORMAT = 1
_BUSY_SECONDS = 30.0
_NO_LIMIT = -1
_KEYS_AT_ONCE = 500

_SCHEMA = f"""
CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE commits (last INTEGER NOT NULL);
INSERT INTO commits VALUES (0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
"""


class SqliteMetadataStore(MetadataStore):
    """`path` and its directory are made when absent. The directory may be a link, the file may not."""

    supports_multi_key = True
    supports_leases = False
    reads_many_at_once = True

    def __init__(self, path: Path, busy_seconds: float = _BUSY_SECONDS) -> None:
        self.url = f"sqlite://{path}"
        self._path = path
        self._busy_seconds = busy_seconds
        self._is_closed = False
        with explained("open metadata", path):
            LocalFiles().make_directories(path.parent)
            for suffix in ("", "-wal", "-shm", "-journal"):
                refuse_other_kinds(path.with_name(path.name + suffix))
        self._session = _Session(path, busy_seconds)
        try:
            # SQLite syncs what is in the file; that the file has a name is ours to sync.
            with explained("open metadata", path):
                LocalFiles().sync_directory(path.parent)
        except BaseException:
            self._session.close()
            raise

    def get(self, key: str) -> Entry | None:
        return next(iter(self._select("key = ?", [check_key(key)])), None)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            some = [check_key(key) for key in keys[first : first + _KEYS_AT_ONCE]]
            found |= {entry.key: entry for entry in self._select(f"key IN ({', '.join('?' * len(some))})", some)}
        return found

    def change_mark(self) -> object | None:
        """The number of the last commit, of any process."""
        with self._connected() as connection:
            (last,) = connection.execute("SELECT last FROM commits").fetchone()
            return int(last)

    def floor(self, prefix: str, key: str) -> Entry | None:
        end = end_of(check_prefix(prefix))
        # One upper bound only: with two, SQLite begins at the first and steps back to the second.
        upper, last = ("<=", key) if check_key(key) < end else ("<", end)
        return next(iter(self._select(f"key >= ? AND key {upper} ? ORDER BY key DESC LIMIT 1", [prefix, last])), None)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._session.pid == os.getpid():
                self._session.close()

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        bounds = (start, end_of(prefix), _NO_LIMIT if limit is None else limit)
        return self._select("key >= ? AND key < ? ORDER BY key LIMIT ?", bounds)

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        question = "SELECT key FROM entries WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
        with self._connected() as connection:
            bounds = (start, end_of(prefix), _NO_LIMIT if limit is None else limit)
            return [key for (key,) in connection.execute(question, bounds)]

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        with self._connected() as connection, _transaction(connection):
            for check in checks:
                row = connection.execute("SELECT version FROM entries WHERE key = ?", (check.key,)).fetchone()
                if numeric_version(check) != (row[0] if row else 0):
                    raise ConflictError(f"{check.key} was changed concurrently")
            connection.execute("UPDATE commits SET last = last + 1")
            (version,) = connection.execute("SELECT last FROM commits").fetchone()
            return _write(connection, writes, version)

    def _select(self, condition: str, parameters: Sequence[str | int]) -> list[Entry]:
        question = f"SELECT key, value, version FROM entries WHERE {condition}"
        with self._connected() as connection:
            return [Entry(key, value, str(version)) for key, value, version in connection.execute(question, parameters)]

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if self._is_closed:
            raise ClosedError(f"{self.url} is closed")
        if self._session.pid != os.getpid():
            self._session = _Session(self._path, self._busy_seconds, inherited=self._session)
        with self._session.guard, _explained(self._path):
            yield self._session.connection


class _Session:
    """A connection of this process. Its threads take turns."""

    def __init__(self, path: Path, busy_seconds: float, inherited: _Session | None = None) -> None:
        self.pid = os.getpid()
        self.guard = RLock()
        # Never closed, and kept so that nothing closes it behind our back: it is the parent's file.
        self._inherited = inherited
        with _explained(path):
            # Hashes of passwords may be in it. SQLite gives its other files the mode of this one.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
            try:
                _prepare(self.connection, path, busy_seconds)
            except BaseException:
                self.connection.close()
                raise

    def close(self) -> None:
        with self.guard:
            self.connection.close()


def _prepare(connection: sqlite3.Connection, path: Path, busy_seconds: float) -> None:
    _use_wal(connection, path, busy_seconds)
    connection.execute("PRAGMA synchronous = FULL")
    with _transaction(connection):
        if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
            for statement in filter(str.strip, _SCHEMA.split(";")):
                connection.execute(statement)
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise InputError(
            "this SQLite file was not created by tidelog", path=path, hint="Choose another file for the metadata"
        )
    if version != FORMAT:
        raise DataError(f"metadata of format {version}; this tidelog reads format {FORMAT}", path=path)


def _use_wal(connection: sqlite3.Connection, path: Path, busy_seconds: float) -> None:
    """Two openers of a new file can be in each other's way here, where SQLite does not wait by itself."""
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
            continue
        if mode != "wal":
            hint = "Put it on a local disk"
            raise InputError(f"SQLite cannot use a write-ahead log there ({mode})", path=path, hint=hint)
        return


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some failures SQLite has rolled back by itself.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _write(connection: sqlite3.Connection, writes: Sequence[Write], version: int) -> dict[str, str]:
    versions = {}
    for write in writes:
        if isinstance(write, Delete):
            connection.execute("DELETE FROM entries WHERE key = ?", (write.key,))
        else:
            row = (write.key, bytes(write.value), version)
            connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", row)
            versions[write.key] = str(version)
    return versions


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what SQLite says into an error of ours that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translate(error, path) from error


def _translate(error: sqlite3.Error, path: Path) -> TidelogError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return DiskFullError(f"no room for the metadata ({error})", path=path)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        hint = "Move it away and rebuild the catalog from the objects, or restore it from a copy"
        return DataError(f"the metadata file is damaged ({error})", path=path, hint=hint)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return AccessDeniedError(f"the metadata cannot be written ({error})", path=path, hint="Check its permissions")
    if code == sqlite3.SQLITE_CANTOPEN and (reason := why_few_can_be_opened()) is not None:
        return out_of_descriptors("open metadata", path, reason)
    if code == sqlite3.SQLITE_CANTOPEN:
        return InputError(f"the metadata file cannot be opened ({error})", path=path, hint="Check the path")
    return StoreUnavailableError(f"the metadata cannot be used now ({error})", path=path)
