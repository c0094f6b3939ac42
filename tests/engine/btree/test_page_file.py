"""The page file: what is read is what was written, or an error that names the byte."""

from __future__ import annotations

import errno

import pytest
from tests.engine.tree_workbench import PATH, new_files

from tidelog.engine.btree import page
from tidelog.engine.btree.page_file import PageFile
from tidelog.errors import CorruptionError, DiskFullError, InputError, LogFailedError
from tidelog.testing import FaultyFiles


def written(files: FaultyFiles, page_id: int) -> PageFile:
    """A page file with one page, synced."""
    file = PageFile.create(files, PATH)
    made = page.new_page(page_id, 0)
    page.insert(made, b"key", b"value", 7)
    file.write_page(page_id, page.sealed(made))
    file.sync()
    return file


def scribble(files: FaultyFiles, position: int, data: bytes) -> None:
    """Somebody else writes into the file."""
    file = files.open(PATH, write=True)
    file.write_at(position, data)
    file.close()


def test_a_page_comes_back() -> None:
    """Also after closing and opening the file."""
    files = new_files()
    written(files, 3).close()
    file = PageFile(files, PATH)
    assert page.cells(file.read_page(3)) == [(b"key", b"value")]
    assert file.page_count == 4
    file.close()


def test_pages_that_were_never_written_are_named() -> None:
    """A hole and the end of the file are no pages."""
    file = written(new_files(), 3)
    with pytest.raises(CorruptionError, match="page 2: it was never written at byte 16384"):
        file.read_page(2)
    with pytest.raises(CorruptionError, match="page 9: the file ends before it"):
        file.read_page(9)


def test_a_damaged_page_is_named() -> None:
    """A flipped bit, and a page in the place of another."""
    files = new_files()
    file = written(files, 3)
    scribble(files, 3 * 8192 + 100, b"x")
    with pytest.raises(CorruptionError, match="page 3: checksum does not match at byte 24576"):
        file.read_page(3)
    file.write_page(3, page.sealed(page.new_page(4, 0)))
    with pytest.raises(CorruptionError, match="page 3: it says that it is page 4"):
        file.read_page(3)


def test_after_a_failed_sync_there_is_no_other() -> None:
    """What was written before may be lost, and a second sync that succeeds would hide it."""
    files = new_files()
    file = written(files, 3)
    files.fail("sync", error=errno.ENOSPC)
    with pytest.raises(DiskFullError):
        file.sync()
    with pytest.raises(LogFailedError, match="Open the engine again"):
        file.sync()


def test_another_file_is_refused() -> None:
    """The header says what it is."""
    files = new_files()
    written(files, 3).close()
    scribble(files, 12, b"\2")
    with pytest.raises(CorruptionError, match="not a page file of this version"):
        PageFile(files, PATH)


def test_a_file_that_is_not_there_is_no_page_file() -> None:
    """Opening does not create."""
    with pytest.raises(InputError, match="open the page file"):
        PageFile(new_files(), PATH)
