"""SQLite as metadata store: several processes, forks, files of others and damage."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import warnings
from pathlib import Path

import pytest

from tidelog.errors import ClosedError, ConflictError, DataError, InputError, StoreUnavailableError
from tidelog.store.metadata import Check, Put
from tidelog.store.metadata.sqlite import SqliteMetadataStore

PROCESSES = 4
ROUNDS = 25


def increment(path: str) -> None:
    """Adds to a number, in a process of its own."""
    with SqliteMetadataStore(Path(path)) as store:
        done = 0
        while done < ROUNDS:
            entry = store.get("n")
            check = Check("n", None if entry is None else entry.version)
            number = 0 if entry is None else int(entry.value)
            try:
                store.commit([check], [Put("n", b"%d" % (number + 1))])
            except ConflictError:
                continue
            done += 1


def test_file_is_for_its_owner_only(tmp_path: Path) -> None:
    """Hashes of passwords may be in it; a mode that somebody gave it stays."""
    path = tmp_path / "metadata.db"
    with SqliteMetadataStore(path) as store:
        store.commit([], [Put("n", b"1")])
        modes = {one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()}
        assert set(modes.values()) == {0o600}, modes
    path.chmod(0o640)
    with SqliteMetadataStore(path):
        assert path.stat().st_mode & 0o777 == 0o640


def test_processes_take_turns(tmp_path: Path) -> None:
    """All of them open the file at once, while it is made, and no increment is lost."""
    path = tmp_path / "metadata.db"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=increment, args=(str(path),)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    with SqliteMetadataStore(path) as store:
        entry = store.get("n")
        assert entry is not None
        assert int(entry.value) == PROCESSES * ROUNDS


def test_a_commit_is_synced(tmp_path: Path) -> None:
    """WAL with synchronous=FULL (2): a commit that returned survives a power failure."""
    with SqliteMetadataStore(tmp_path / "metadata.db") as store, store._connected() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_what_was_committed_is_there_again(tmp_path: Path) -> None:
    """Also without a clean end, and versions go on where they were."""
    path = tmp_path / "metadata.db"
    first = SqliteMetadataStore(path)
    version = first.put("a", b"hello")
    second = SqliteMetadataStore(path)
    assert second.get("a") == ("a", b"hello", version)
    first.close()
    first.close()
    assert int(second.put("a", b"again")) > int(version)
    second.close()


def test_a_forked_child_uses_a_connection_of_its_own(tmp_path: Path) -> None:
    """Both go on, and see each other's commits."""
    with SqliteMetadataStore(tmp_path / "metadata.db") as store:
        store.put("parent", b"1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                found = store.get("parent")
                store.put("child", b"2" if found is not None else b"lost")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        store.put("parent", b"3")
        assert [entry.value for entry in store.range("")] == [b"2", b"3"]


def test_a_writer_that_holds_on_is_a_reason_to_retry(tmp_path: Path) -> None:
    """After the busy time, with nothing written; reading goes on meanwhile."""
    path = tmp_path / "metadata.db"
    with SqliteMetadataStore(path, busy_seconds=0.05) as store:
        store.put("a", b"hello")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError):
            store.put("a", b"no")
        entry = store.get("a")
        assert entry is not None
        assert entry.value == b"hello"
        other.close()
        store.put("a", b"yes")


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """It is neither used nor changed."""
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE mine (x)")
    other.commit()
    other.close()
    with pytest.raises(InputError, match="not created by tidelog"):
        SqliteMetadataStore(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    """An older tidelog does not touch what a newer one wrote."""
    path = tmp_path / "metadata.db"
    SqliteMetadataStore(path).close()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 2")
    newer.close()
    with pytest.raises(DataError, match="format 2"):
        SqliteMetadataStore(path)


def test_damage_is_named(tmp_path: Path) -> None:
    """With the file and what to do, and never taken for an empty store."""
    path = tmp_path / "metadata.db"
    path.write_bytes(b"this is no database at all, whatever its name says" * 100)
    with pytest.raises(DataError, match=r"metadata\.db"):
        SqliteMetadataStore(path)


def test_paths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """A directory in the place of the file, a file in the place of a directory."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "file" / "metadata.db"):
        with pytest.raises(InputError):
            SqliteMetadataStore(path)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    """It does not open itself again."""
    store = SqliteMetadataStore(tmp_path / "metadata.db")
    store.close()
    with pytest.raises(ClosedError):
        store.get("a")
