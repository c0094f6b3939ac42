"""Where a log begins is known from elsewhere than its oldest file: what is gone is missed, what was pruned is not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.log.workbench import DIRECTORY, contents, files_of, numbered, payload

import tidelog
from tidelog.errors import GapError
from tidelog.log import Log, LogSettings
from tidelog.log.directory import start_offsets, wal_files
from tidelog.log.recovery import KeptElsewhere, move_start, read_start, remove_start
from tidelog.log.repair import plan_repair
from tidelog.log.verify import verify_files
from tidelog.log.view import LogView
from tidelog.testing import FaultyFiles, History, crash_everywhere

# Three messages of 20 bytes a file.
SETTINGS = LogSettings(rotate_max_bytes=100, cache_max_messages=0, cache_max_bytes=0)
NAME = "shop/orders"


def open_log(files: FaultyFiles, kept_elsewhere: KeptElsewhere | None = None, first_offset: int = 0) -> Log:
    return Log.open(DIRECTORY, SETTINGS, files=files, kept_elsewhere=kept_elsewhere, first_offset=first_offset)


def filled(files: FaultyFiles, count: int = 20, prune_below: int = 0) -> FaultyFiles:
    """A closed log."""
    with contextlib.closing(open_log(files)) as log:
        for number in range(log.next_offset, log.next_offset + count):
            log.append(payload(number), sync=True)
        log.remove_below(prune_below)
    return files


def wal_names(files: FaultyFiles) -> list[str]:
    return [name for _, name in wal_files(sorted(files_of(files)))]


def lose_oldest(files: FaultyFiles, with_checkpoint: bool) -> None:
    files.remove(DIRECTORY / wal_names(files)[0])
    if not with_checkpoint:
        files.remove(DIRECTORY / "wal.ckpt")


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("prune_below", [0, 7])
def test_a_lost_oldest_file_is_a_gap(with_checkpoint: bool, prune_below: int) -> None:
    """Opening names the offsets that are missing, in a log that was pruned and in one that never was."""
    files = filled(FaultyFiles(), prune_below=prune_below)
    start = LogView(DIRECTORY, SETTINGS, files=files).start_offset
    lose_oldest(files, with_checkpoint)
    left = LogView(DIRECTORY, SETTINGS, files=files).start_offset
    for _ in range(2):
        with pytest.raises(GapError, match=f"offsets {start} to {left - 1} missing.*tidelog repair") as caught:
            open_log(files)
        assert (caught.value.first, caught.value.last) == (start, left - 1)
    with pytest.raises(GapError):
        LogView(DIRECTORY, SETTINGS, files=files, refuses_missing_start=True)
    problem = verify_files(DIRECTORY, files=files).findings[0]
    assert (problem.first_offset, problem.last_offset, problem.byte) == (start, left - 1, 0)


def test_several_lost_files_are_one_gap() -> None:
    """All that is missing is named at once."""
    files = filled(FaultyFiles())
    for name in wal_names(files)[:3]:
        files.remove(DIRECTORY / name)
    left = LogView(DIRECTORY, SETTINGS, files=files).start_offset
    with pytest.raises(GapError) as caught:
        open_log(files)
    assert (caught.value.first, caught.value.last) == (0, left - 1)


def test_a_file_that_is_put_back_mends_it() -> None:
    """Nothing was changed by the refusal."""
    files = filled(FaultyFiles())
    name = wal_names(files)[0]
    content = files.read(DIRECTORY / name)
    files.remove(DIRECTORY / name)
    with pytest.raises(GapError):
        open_log(files)
    files.write_atomically(DIRECTORY / name, content)
    with contextlib.closing(open_log(files)) as log:
        assert contents(log) == numbered(20)


def test_a_repair_marks_what_is_lost() -> None:
    """The offsets stay, and the rest is read as before."""
    files = filled(FaultyFiles())
    lose_oldest(files, with_checkpoint=True)
    left = LogView(DIRECTORY, SETTINGS, files=files).start_offset
    plan = plan_repair(DIRECTORY, files=files)
    assert plan.lost == ((0, left - 1),)
    plan.apply()
    assert not plan_repair(DIRECTORY, files=files).is_needed
    with contextlib.closing(open_log(files)) as log:
        assert (log.start_offset, log.next_offset) == (0, 20)
        assert contents(log)[left:] == numbered(20 - left, first=left)


def test_what_is_kept_elsewhere_is_not_missed() -> None:
    """Whoever knows of another copy is asked about the whole range, and the log begins later from then on."""
    files = filled(FaultyFiles())
    lose_oldest(files, with_checkpoint=True)
    left = LogView(DIRECTORY, SETTINGS, files=files).start_offset
    asked: list[tuple[int, int]] = []

    def kept_elsewhere(first: int, stop: int) -> bool:
        asked.append((first, stop))
        return len(asked) > 1

    with pytest.raises(GapError):
        open_log(files, kept_elsewhere)
    with contextlib.closing(open_log(files, kept_elsewhere)) as log:
        assert log.start_offset == left
    assert asked == [(0, left), (0, left)]
    open_log(files).close()


def test_a_log_without_a_mark_begins_with_its_oldest_file() -> None:
    """A copy of some files can be looked at, and opening it for writing marks where it begins."""
    files = filled(FaultyFiles())
    remove_start(files, DIRECTORY)
    lose_oldest(files, with_checkpoint=True)
    assert verify_files(DIRECTORY, files=files).findings == ()
    with contextlib.closing(open_log(files)) as log:
        assert read_start(files, DIRECTORY) == log.start_offset > 0


def test_a_log_without_files_begins_where_it_is_told() -> None:
    """The mark of one that has nothing yet follows."""
    files = FaultyFiles()
    for first_offset in (7, 100, 3):
        open_log(files, first_offset=first_offset).close()
        assert start_offsets(files.list(DIRECTORY)) == [first_offset]


def test_pruning_needs_no_room() -> None:
    """On a full disk the files that are to make room can go."""
    files = filled(FaultyFiles())
    with contextlib.closing(open_log(files)) as log:
        files.capacity_bytes = 0
        assert log.remove_below(10) > 0
        files.capacity_bytes = None
    open_log(files).close()


def test_a_full_disk_keeps_nobody_from_opening() -> None:
    """A mark that cannot be made now is made the next time."""
    files = filled(FaultyFiles())
    remove_start(files, DIRECTORY)
    files.fail("create", error=28, matching="wal.start-*")
    open_log(files).close()
    assert read_start(files, DIRECTORY) is None
    open_log(files).close()
    assert read_start(files, DIRECTORY) == 0


def test_a_mark_that_cannot_be_moved_keeps_the_files() -> None:
    """Nothing is removed before it is durable that the log begins behind it."""
    files = filled(FaultyFiles())
    before = wal_names(files)
    with contextlib.closing(open_log(files)) as log:
        files.fail("rename", matching="wal.start-*")
        with pytest.raises(tidelog.TidelogError):
            log.remove_below(10)
        assert wal_names(files) == before
        assert log.remove_below(10) > 0


def test_an_empty_file_begins_where_the_mark_says() -> None:
    """Used twice: offsets of a log whose only file had lost its frames, and whose checkpoint was gone."""
    files = filled(FaultyFiles(), prune_below=100)
    (name,) = wal_names(files)
    start = read_start(files, DIRECTORY)
    file = files.open(DIRECTORY / name, write=True)
    file.truncate(0)
    file.close()
    files.remove(DIRECTORY / "wal.ckpt")
    with contextlib.closing(open_log(files)) as log:
        assert log.next_offset == start
        assert start is not None
        assert start > 0


def test_two_marks_are_one() -> None:
    """A crash may leave a file under its old and its new name: the later one counts, and the other one goes."""
    files = filled(FaultyFiles())
    files.create(DIRECTORY / "wal.start-00000000000000000005").close()
    assert read_start(files, DIRECTORY) == 5
    move_start(files, DIRECTORY, 6)
    assert start_offsets(files.list(DIRECTORY)) == [6]


def test_pruning_can_be_cut_at_every_call() -> None:
    """Whatever a crash leaves is opened without a gap, is pruned further, and opened again."""

    def workload(files: FaultyFiles, _history: History) -> None:
        filled(files, 14)
        with contextlib.closing(open_log(files)) as log:
            log.remove_below(5)
            log.remove_below(11)

    def check(files: FaultyFiles, _history: History) -> None:
        for prune_below in (0, 8, 14):
            with contextlib.closing(open_log(files)) as log:
                start = log.start_offset
                assert contents(log) == numbered(log.next_offset - start, first=start)
                log.remove_below(prune_below)
        assert verify_files(DIRECTORY, files=files).findings == ()

    crash_everywhere(workload, check)


def test_a_topic_says_that_its_start_is_gone(tmp_path: Path) -> None:
    """Silent before: a subscription from the earliest message on that began later."""
    with tidelog.open(tmp_path, rotate_max_bytes=200) as log:
        for number in range(20):
            log.topic(NAME).append(b"message %d" % number, sync=True)
    min((tmp_path / NAME).glob("wal.*.log")).unlink()
    with tidelog.open(tmp_path) as log, pytest.raises(GapError, match="offsets 0 to"):
        log.topic(NAME)
    with tidelog.open(tmp_path, read_only=True) as log, pytest.raises(GapError, match="offsets 0 to"):
        log.topic(NAME)


def test_a_topic_with_a_store_misses_only_what_was_not_shipped(tmp_path: Path) -> None:
    """What the catalog has is read from there; what it has not is a gap at opening."""
    store = (tmp_path / "store").as_uri()
    root = tmp_path / "data"
    with tidelog.open(root, store=store, rotate_max_bytes=200, ship_interval_seconds=1000.0) as log:
        topic = log.topic(NAME)
        for number in range(20):
            topic.append(b"message %d" % number, sync=True)
        assert topic.ship() == 20
        for number in range(20, 40):
            topic.append(b"message %d" % number, sync=True)
    oldest, *_ = sorted((root / NAME).glob("wal.*.log"))
    oldest.unlink()
    with tidelog.open(root, ship_interval_seconds=1000.0) as log:
        assert len(list(log.topic(NAME).read(0))) == 40
    for path in sorted((root / NAME).glob("wal.*.log"))[:-1]:
        path.unlink()
    with tidelog.open(root, ship_interval_seconds=1000.0) as log, pytest.raises(GapError):
        log.topic(NAME)


def test_an_engine_whose_oldest_file_is_gone_is_not_opened(tmp_path: Path) -> None:
    """Its log begins where it began."""
    root = tmp_path / "engine"
    with tidelog.open_engine(root, rotate_max_bytes=1 << 20) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        for seq in range(2, 8):
            engine.apply(seq, tidelog.PutObject("b", "k", bytes(400_000)))
    files = sorted((root / "wal").glob("wal.*.log"))
    assert len(files) > 2
    files[0].unlink()
    with pytest.raises(tidelog.DataError, match="missing"):
        tidelog.open_engine(root)
