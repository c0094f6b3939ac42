"""One suite for everything that calls itself a file system: real, failing on demand, in memory."""

from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path

import pytest

from tidelog.errors import LockedError
from tidelog.files import File, Files, LocalFiles
from tidelog.memory_files import MemoryFiles
from tidelog.testing import FaultyFiles

KINDS: dict[str, type[Files]] = {"local": LocalFiles, "faulty": FaultyFiles, "memory": MemoryFiles}


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest) -> Files:
    return KINDS[request.param]()


@pytest.fixture
def root(files: Files, tmp_path: Path) -> Path:
    """An empty directory."""
    files.make_directories(tmp_path)
    return tmp_path


def create(files: Files, path: Path, content: bytes = b"") -> File:
    """A new file with some content, left open."""
    file = files.create(path)
    if content:
        file.write_at(0, content)
    return file


def store(files: Files, path: Path, content: bytes) -> None:
    """A new file with some content."""
    create(files, path, content).close()


class TestOpenFiles:
    """Handles."""

    def test_a_new_file_is_empty_and_can_be_written_and_read(self, files: Files, root: Path) -> None:
        """What was written can be read through the same handle."""
        file = files.create(root / "a")
        assert file.size() == 0
        file.write_at(0, b"hello")
        file.sync()
        assert (file.read_at(0, 5), file.size()) == (b"hello", 5)
        file.close()

    def test_what_the_system_does_in_pieces_is_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A system that writes and reads fewer bytes than it was asked for is asked again for the rest."""
        write, read = os.pwrite, os.pread
        file = LocalFiles().create(tmp_path / "a")
        monkeypatch.setattr(os, "pwrite", lambda fd, data, position: write(fd, bytes(data[:3]), position))
        monkeypatch.setattr(os, "pread", lambda fd, size, position: read(fd, min(size, 3), position))
        file.write_at(0, b"0123456789")
        file.write_at(4, memoryview(b"abcd"))
        assert (file.read_at(0, 10), file.read_at(2, 100)) == (b"0123abcd89", b"23abcd89")
        file.close()

    def test_creating_a_name_that_is_taken_is_refused(self, files: Files, root: Path) -> None:
        """A file is never emptied by creating it."""
        store(files, root / "a", b"hello")
        with pytest.raises(FileExistsError):
            files.create(root / "a")
        assert files.read(root / "a") == b"hello"

    def test_creating_in_a_directory_that_is_missing_is_refused(self, files: Files, root: Path) -> None:
        """Directories are not made on the way."""
        with pytest.raises(FileNotFoundError):
            files.create(root / "none" / "a")

    def test_creating_below_a_file_is_refused(self, files: Files, root: Path) -> None:
        """A file is no directory."""
        store(files, root / "a", b"")
        with pytest.raises(NotADirectoryError):
            files.create(root / "a" / "b")

    def test_opening_what_is_missing_is_refused(self, files: Files, root: Path) -> None:
        """Opening never creates."""
        for write in (False, True):
            with pytest.raises(FileNotFoundError):
                files.open(root / "a", write=write)
        assert files.list(root) == []

    def test_opening_a_directory_for_writing_is_refused(self, files: Files, root: Path) -> None:
        """A directory is no file."""
        with pytest.raises(IsADirectoryError):
            files.open(root, write=True)

    def test_reads_are_short_only_at_the_end(self, files: Files, root: Path) -> None:
        """The end of a file is a short read, then an empty one, never an error."""
        file = create(files, root / "a", b"0123456789")
        assert file.read_at(4, 3) == b"456"
        assert file.read_at(8, 100) == b"89"
        assert file.read_at(10, 1) == b""
        assert file.read_at(99, 1) == b""
        ranges = array("Q", (3, 4, 0, 1, 5, 0, 6, 9, 90, 2)).tobytes()
        assert file.read_ranges(1, ranges) == b"4567" + b"1" + b"789" + bytes(6) + bytes(2)
        assert file.read_ranges(0, b"") == b""
        file.close()

    def test_a_write_replaces_what_it_covers_and_extends_the_file(self, files: Files, root: Path) -> None:
        """Positions are explicit, so a write can be made again at the same place."""
        file = create(files, root / "a", b"0123456789")
        file.write_at(8, memoryview(b"abcd"))
        assert file.read_at(0, 100) == b"01234567abcd"
        file.write_at(0, b"")
        assert file.size() == 12
        file.close()

    def test_a_write_beyond_the_end_leaves_zeros_before_it(self, files: Files, root: Path) -> None:
        """A hole reads as zeros."""
        file = create(files, root / "a", b"ab")
        file.write_at(4, b"cd")
        assert file.read_at(0, 100) == b"ab\0\0cd"
        file.close()

    def test_truncate_cuts_and_extends_with_zeros(self, files: Files, root: Path) -> None:
        """What was cut off does not come back."""
        file = create(files, root / "a", b"0123456789")
        file.truncate(4)
        assert file.read_at(0, 100) == b"0123"
        file.truncate(6)
        assert file.read_at(0, 100) == b"0123\0\0"
        file.close()

    def test_two_handles_see_the_same_file(self, files: Files, root: Path) -> None:
        """A reader sees at once what a writer wrote."""
        writer = create(files, root / "a")
        reader = files.open(root / "a")
        writer.write_at(0, b"hello")
        assert reader.read_at(0, 5) == b"hello"
        reader.close()
        writer.close()

    def test_a_handle_for_reading_cannot_write(self, files: Files, root: Path) -> None:
        """A reader cannot damage the log."""
        store(files, root / "a", b"hello")
        file = files.open(root / "a")
        with pytest.raises(OSError, match="Bad file descriptor"):
            file.write_at(0, b"x")
        file.close()
        assert files.read(root / "a") == b"hello"

    def test_a_closed_handle_is_of_no_use_and_may_be_closed_again(self, files: Files, root: Path) -> None:
        """A handle never comes to stand for another file."""
        file = create(files, root / "a", b"hello")
        file.close()
        file.close()
        for use in (lambda: file.read_at(0, 1), lambda: file.write_at(0, b"x"), file.size):
            with pytest.raises(OSError, match="Bad file descriptor"):
                use()

    def test_a_removed_file_lives_on_in_its_handles(self, files: Files, root: Path) -> None:
        """Retention does not pull a file away from under a reader."""
        file = create(files, root / "a", b"hello")
        files.remove(root / "a")
        assert not files.exists(root / "a")
        assert file.read_at(0, 5) == b"hello"
        file.close()


class TestNames:
    """Directories and what is in them."""

    def test_names_are_listed_sorted(self, files: Files, root: Path) -> None:
        """The order does not depend on the file system."""
        for name in ("b", "c", "a"):
            store(files, root / name, b"")
        files.make_directory(root / "aa")
        assert files.list(root) == ["a", "aa", "b", "c"]

    def test_listing_what_is_no_directory_is_refused(self, files: Files, root: Path) -> None:
        """A missing directory is never taken for an empty one."""
        store(files, root / "a", b"")
        with pytest.raises(FileNotFoundError):
            files.list(root / "none")
        with pytest.raises(NotADirectoryError):
            files.list(root / "a")

    def test_what_exists_and_what_is_a_directory(self, files: Files, root: Path) -> None:
        """Looking below a file finds nothing and raises nothing."""
        store(files, root / "a", b"")
        paths = (root, root / "a", root / "none", root / "a" / "b")
        assert [files.exists(path) for path in paths] == [True, True, False, False]
        assert [files.is_directory(path) for path in paths] == [True, False, False, False]

    def test_a_directory_may_be_made_twice(self, files: Files, root: Path) -> None:
        """Making what is there already is no error, unless a file is in its place."""
        files.make_directory(root / "d")
        store(files, root / "d" / "a", b"")
        files.make_directory(root / "d")
        assert files.list(root / "d") == ["a"]
        with pytest.raises(NotADirectoryError):
            files.make_directory(root / "d" / "a")
        with pytest.raises(FileNotFoundError):
            files.make_directory(root / "none" / "d")

    def test_missing_levels_are_made(self, files: Files, root: Path) -> None:
        """A whole path can be asked for, and asked for again."""
        for _ in range(2):
            files.make_directories(root / "x" / "y" / "z")
        assert files.list(root / "x" / "y") == ["z"]

    def test_removing_a_file(self, files: Files, root: Path) -> None:
        """Files only, and only those that are there."""
        store(files, root / "a", b"")
        files.remove(root / "a")
        assert files.list(root) == []
        with pytest.raises(FileNotFoundError):
            files.remove(root / "a")
        with pytest.raises(IsADirectoryError):
            files.remove(root)

    def test_removing_a_directory(self, files: Files, root: Path) -> None:
        """Directories only, and only empty ones."""
        files.make_directory(root / "d")
        store(files, root / "d" / "a", b"")
        with pytest.raises(OSError, match="not empty") as refused:
            files.remove_directory(root / "d")
        assert refused.value.errno == errno.ENOTEMPTY
        with pytest.raises(NotADirectoryError):
            files.remove_directory(root / "d" / "a")
        files.remove(root / "d" / "a")
        files.remove_directory(root / "d")
        with pytest.raises(FileNotFoundError):
            files.remove_directory(root / "d")

    def test_removing_a_tree(self, files: Files, root: Path) -> None:
        """Everything below goes, everything beside stays."""
        files.make_directories(root / "t" / "u")
        for path in (root / "t" / "a", root / "t" / "u" / "b", root / "beside"):
            store(files, path, b"")
        files.remove_tree(root / "t")
        assert files.list(root) == ["beside"]

    def test_renaming_moves_a_file_to_another_name(self, files: Files, root: Path) -> None:
        """Also into another directory."""
        files.make_directory(root / "d")
        store(files, root / "a", b"hello")
        files.rename(root / "a", root / "b")
        files.rename(root / "b", root / "d" / "c")
        assert (files.list(root), files.read(root / "d" / "c")) == (["d"], b"hello")

    def test_renaming_replaces_a_file(self, files: Files, root: Path) -> None:
        """Who has the old file open keeps reading the old one."""
        store(files, root / "a", b"new")
        old = create(files, root / "b", b"old")
        files.rename(root / "a", root / "b")
        assert (files.read(root / "b"), old.read_at(0, 3), files.list(root)) == (b"new", b"old", ["b"])
        old.close()

    def test_renaming_a_file_to_itself_changes_nothing(self, files: Files, root: Path) -> None:
        """It does not vanish."""
        store(files, root / "a", b"hello")
        files.rename(root / "a", root / "a")
        assert files.read(root / "a") == b"hello"

    def test_renaming_moves_a_directory_with_all_in_it(self, files: Files, root: Path) -> None:
        """An empty directory in the way is replaced, a full one is not."""
        for name in ("d", "empty", "full"):
            files.make_directory(root / name)
        store(files, root / "d" / "a", b"")
        store(files, root / "full" / "b", b"")
        with pytest.raises(OSError, match="not empty"):
            files.rename(root / "d", root / "full")
        files.rename(root / "d", root / "empty")
        assert (files.list(root), files.list(root / "empty")) == (["empty", "full"], ["a"])

    def test_renaming_what_cannot_be_is_refused(self, files: Files, root: Path) -> None:
        """Nothing is lost by it."""
        files.make_directory(root / "d")
        store(files, root / "a", b"hello")
        with pytest.raises(FileNotFoundError):
            files.rename(root / "none", root / "a")
        with pytest.raises(FileNotFoundError):
            files.rename(root / "a", root / "none" / "a")
        with pytest.raises(IsADirectoryError):
            files.rename(root / "a", root / "d")
        with pytest.raises(NotADirectoryError):
            files.rename(root / "d", root / "a")
        assert (files.list(root), files.read(root / "a")) == (["a", "d"], b"hello")

    def test_a_directory_can_be_synced(self, files: Files, root: Path) -> None:
        """A directory that is missing cannot, and says so."""
        files.sync_directory(root)
        with pytest.raises(FileNotFoundError):
            files.sync_directory(root / "none")


class TestWholeFiles:
    """Reading and replacing a small file."""

    def test_a_file_is_written_atomically(self, files: Files, root: Path) -> None:
        """New or replaced, it has exactly the given content and leaves nothing beside it."""
        for content in (b"first, the longer one", b"second"):
            files.write_atomically(root / "a", content)
            assert (files.read(root / "a"), files.list(root)) == (content, ["a"])

    def test_what_an_earlier_attempt_left_is_no_obstacle(self, files: Files, root: Path) -> None:
        """A crash between writing and renaming leaves a temporary file."""
        store(files, root / "a.tmp", b"half of somethi")
        files.write_atomically(root / "a", b"whole")
        assert (files.read(root / "a"), files.list(root)) == (b"whole", ["a"])

    def test_reading_what_is_missing_is_refused(self, files: Files, root: Path) -> None:
        """A missing file is never taken for an empty one."""
        with pytest.raises(FileNotFoundError):
            files.read(root / "a")


class TestLocks:
    """One owner at a time."""

    def test_a_held_lock_is_refused_to_the_next(self, files: Files, root: Path) -> None:
        """At once, with the directory named."""
        lock = files.lock(root / "lock")
        with pytest.raises(LockedError, match="already open") as refused:
            files.lock(root / "lock")
        assert str(root) in str(refused.value)
        lock.release()

    def test_a_released_lock_is_free(self, files: Files, root: Path) -> None:
        """Releasing it twice frees nobody else's."""
        first = files.lock(root / "lock")
        first.release()
        second = files.lock(root / "lock")
        first.release()
        with pytest.raises(LockedError):
            files.lock(root / "lock")
        second.release()

    def test_a_lock_leaves_a_file_that_is_no_obstacle(self, files: Files, root: Path) -> None:
        """The name stays, the lock does not."""
        files.lock(root / "lock").release()
        assert files.list(root) == ["lock"]

    def test_a_lock_needs_its_directory(self, files: Files, root: Path) -> None:
        """Directories are not made on the way."""
        with pytest.raises(FileNotFoundError):
            files.lock(root / "none" / "lock")


def test_room_is_told_in_bytes(files: Files, root: Path) -> None:
    """A disk says how much more it can take."""
    assert files.free_bytes(root) > 0
    with pytest.raises(FileNotFoundError):
        files.free_bytes(root / "none")
