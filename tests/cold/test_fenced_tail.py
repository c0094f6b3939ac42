"""What a fenced owner left: moved whole, found by name, cut anywhere and finished, deleted only when asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.log.workbench import contents, numbered, payloads

from tidelog.codec import encode_document
from tidelog.cold.takeover import (
    FENCED,
    DivergentTail,
    discard,
    divergent_tails,
    remove_files,
    secure_tails,
    set_aside,
    tail_directory,
)
from tidelog.errors import DataError, NotFoundError
from tidelog.log import Log, LogSettings
from tidelog.log.directory import CHECKPOINT, wal_files
from tidelog.log.view import LogView
from tidelog.testing import FaultyFiles, History, crash_machine_everywhere

DIRECTORY = Path("/log")
SETTINGS = LogSettings(rotate_max_bytes=100, cache_max_messages=0, cache_max_bytes=0)
TAIL = DivergentTail(epoch=3, claim="abc", first_offset=5, next_offset=14, set_aside_us=7)


@pytest.fixture
def files() -> FaultyFiles:
    """A log of fourteen messages in five files."""
    return filled()


def filled() -> FaultyFiles:
    files = FaultyFiles()
    log = Log.open(DIRECTORY, SETTINGS, files=files)
    log.append_many(payloads(14), sync=True)
    log.close()
    return files


def wal_names(files: FaultyFiles, directory: Path = DIRECTORY) -> list[str]:
    return [name for _, name in wal_files(files.list(directory))] if files.is_directory(directory) else []


def test_the_files_are_a_log_of_their_own(files: FaultyFiles) -> None:
    """Whole and readable where they were put, and nothing of them is left where they were."""
    names = wal_names(files)
    set_aside(files, DIRECTORY, TAIL)
    folder = tail_directory(files, DIRECTORY, TAIL.name)
    assert (wal_names(files), wal_names(files, folder)) == ([], names)
    assert not files.exists(DIRECTORY / CHECKPOINT)
    assert contents(LogView(folder, SETTINGS, files=files)) == numbered(14)
    assert divergent_tails(files, DIRECTORY) == [TAIL]
    assert (TAIL.count, TAIL.name) == (9, "e3-abc")


def test_a_tail_without_messages_counts_none() -> None:
    """Files that the store has all of are put aside as well."""
    assert DivergentTail(epoch=1, claim="a", first_offset=9, next_offset=9, set_aside_us=0).count == 0
    assert DivergentTail(epoch=1, claim="a", first_offset=9, next_offset=5, set_aside_us=0).count == 0


def test_doing_it_again_changes_nothing(files: FaultyFiles) -> None:
    """Not even what the tail says of itself."""
    set_aside(files, DIRECTORY, TAIL)
    before = files.tree()
    later = DivergentTail(epoch=3, claim="abc", first_offset=0, next_offset=0, set_aside_us=99)
    set_aside(files, DIRECTORY, later)
    assert files.tree() == before


def test_files_are_moved_newest_first(files: FaultyFiles) -> None:
    """What is left at a crash is a log that begins where it began; each move is durable before the next."""
    names = wal_names(files)
    before = len(files.calls)
    set_aside(files, DIRECTORY, TAIL)
    moved = [call.path.rpartition("/")[2] for call in files.calls[before:] if call.operation == "rename"]
    assert [name for name in moved if name in names] == names[::-1]


def test_a_crash_anywhere_loses_no_message() -> None:
    """Cut at any call and done again, all messages are in the tail, and it says whose they are."""

    def workload(files: FaultyFiles, _history: History) -> None:
        set_aside(files, DIRECTORY, TAIL)

    def check(files: FaultyFiles, _history: History) -> None:
        left = wal_names(files)
        if left:
            view = LogView(DIRECTORY, SETTINGS, files=files)
            assert contents(view) == numbered(view.next_offset)
        secure_tails(files, DIRECTORY)
        set_aside(files, DIRECTORY, TAIL)
        folder = tail_directory(files, DIRECTORY, TAIL.name)
        assert contents(LogView(folder, SETTINGS, files=files)) == numbered(14)
        assert divergent_tails(files, DIRECTORY) == [TAIL]

    crash_machine_everywhere(_crashing, workload, check)


def _crashing(crash_at: int | None) -> FaultyFiles:
    files = filled()
    files.crash()
    return files.after_crash("keep", crash_at=crash_at)


def test_tails_are_listed_oldest_first(files: FaultyFiles) -> None:
    """By epoch, then by time; other things in the folder are passed over."""
    for epoch, claim, at in ((3, "b", 5), (1, "z", 9), (3, "a", 2)):
        tail = DivergentTail(epoch=epoch, claim=claim, first_offset=0, next_offset=0, set_aside_us=at)
        set_aside(files, DIRECTORY, tail)
    for other in ("notes", "e1", "ex-a", "e5-never_finished"):
        files.make_directories(DIRECTORY / FENCED / other)
    files.make_directories(DIRECTORY / FENCED / "e7-empty")
    assert [tail.name for tail in divergent_tails(files, DIRECTORY)] == ["e1-z", "e3-a", "e3-b"]


def test_no_tails_is_an_empty_list() -> None:
    """Also where there is no such topic."""
    files = FaultyFiles()
    assert divergent_tails(files, DIRECTORY) == []
    files.make_directories(DIRECTORY)
    assert divergent_tails(files, DIRECTORY) == []
    secure_tails(files, DIRECTORY)


@pytest.mark.parametrize("name", ["", ".", "..", "e1", "../wal", "e3-abc/..", "e3-ABC", "e3-abc\n", "e9-zzz"])
def test_a_name_that_is_no_tail_is_not_found(files: FaultyFiles, name: str) -> None:
    """Nothing outside can be reached, and nothing is deleted."""
    set_aside(files, DIRECTORY, TAIL)
    before = files.tree()
    with pytest.raises(NotFoundError):
        tail_directory(files, DIRECTORY, name)
    with pytest.raises(NotFoundError):
        discard(files, DIRECTORY, name)
    assert files.tree() == before


@pytest.mark.parametrize("data", [b"", b"{}", encode_document("fenced-tail", 1, {"epoch": 1}), b"\xff"])
def test_a_tail_that_cannot_be_read_is_an_error(files: FaultyFiles, data: bytes) -> None:
    """Messages are in there: it is not passed over in silence."""
    set_aside(files, DIRECTORY, TAIL)
    files.write_atomically(DIRECTORY / FENCED / TAIL.name / "tail.json", data)
    with pytest.raises(DataError):
        divergent_tails(files, DIRECTORY)


def test_discarding_is_for_good(files: FaultyFiles) -> None:
    """That tail and no other one."""
    set_aside(files, DIRECTORY, TAIL)
    other = DivergentTail(epoch=4, claim="d", first_offset=0, next_offset=0, set_aside_us=0)
    set_aside(files, DIRECTORY, other)
    discard(files, DIRECTORY, TAIL.name)
    assert divergent_tails(files, DIRECTORY) == [other]
    files.crash()
    assert divergent_tails(files.after_crash("lose"), DIRECTORY) == [other]


def test_removing_the_files_goes_oldest_first(files: FaultyFiles) -> None:
    """What a crash leaves is still the end of the log; tails and everything else stay."""
    set_aside(files, DIRECTORY, TAIL)
    log = Log.open(DIRECTORY, SETTINGS, files=files, first_offset=20)
    log.append_many(payloads(10), sync=True)
    log.close()
    files.write_atomically(DIRECTORY / "topic.json", b"{}")
    names, before = wal_names(files), len(files.calls)
    remove_files(files, DIRECTORY)
    operations = [(call.operation, call.path.rpartition("/")[2]) for call in files.calls[before:]]
    removed = ["wal.start-00000000000000000020", *names]
    assert operations[: 2 * len(removed) : 2] == [("remove", name) for name in removed]
    assert {operation for operation, _ in operations[1::2]} == {"sync_directory"}
    assert wal_names(files) == []
    assert files.exists(DIRECTORY / "topic.json")
    assert divergent_tails(files, DIRECTORY) == [TAIL]
    remove_files(files, DIRECTORY)
