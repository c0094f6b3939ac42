"""Files that are prepared beside the log: nothing of them counts before they are adopted, and then all of it does."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from tests.log.test_handover import wait_for_line
from tests.log.workbench import DIRECTORY, Threads, contents, numbered, payloads

from tidelog.errors import ClosedError, DiskFullError, LogFailedError
from tidelog.log import Log, LogSettings
from tidelog.log.directory import ingested_name, is_ingested, wal_name, wal_seq
from tidelog.log.frame import encode_many
from tidelog.log.view import LogView
from tidelog.log.writer import IngestedSegments
from tidelog.testing import CrashPlan, FaultyFiles, History, crash_everywhere

SMALL_FILES = LogSettings(rotate_max_bytes=200, fsync_interval_ms=3_600_000)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def log(files: FaultyFiles) -> Iterator[Log]:
    with closing(Log.open(DIRECTORY, SMALL_FILES, files=files)) as opened:
        yield opened


def prepare(log: Log, first: int, count: int, number: int = 0) -> IngestedSegments:
    """Payloads from `first` on, a few at a time."""
    prepared = log.prepare_files(first, number)
    for start in range(first, first + count, 3):
        prepared.write(encode_many(7, payloads(min(3, first + count - start), first=start)))
    return prepared


def append_prepared(log: Log, count: int) -> None:
    first = log.hold_appends()
    log.adopt_held(prepare(log, first, count).finish())
    log.release_appends()


def prepared_names(files: FaultyFiles) -> list[str]:
    return [name for name in files.list(DIRECTORY) if is_ingested(name)]


@pytest.mark.parametrize("before", [0, 1, 9])
def test_what_is_adopted_follows_what_was_appended(log: Log, files: FaultyFiles, before: int) -> None:
    """Also what was accepted and not written yet; it is durable at once, and appends go on behind it."""
    log.append_many(payloads(before))
    append_prepared(log, 20)
    assert (log.next_offset, log.durable_offset) == (before + 20, before + 20)
    assert contents(log) == numbered(before + 20)
    log.append_many(payloads(2, first=before + 20))
    assert contents(log) == numbered(before + 22)
    assert max(span.size for span in log.file_spans()) <= 200
    assert prepared_names(files) == []
    log.close()
    with closing(Log.open(DIRECTORY, SMALL_FILES, files=files)) as again:
        assert contents(again) == numbered(before + 22)
        assert again.recovery.checkpoint_problem is None


def test_several_writers_prepare_at_once(log: Log) -> None:
    """Each from an offset of its own; they are adopted in the order of the offsets."""
    log.append_many(payloads(2))
    log.hold_appends()
    second, first = prepare(log, 12, 10, number=1), prepare(log, 2, 10, number=0)
    log.adopt_held([*first.finish(), *second.finish()])
    log.release_appends()
    assert contents(log) == numbered(22)


def test_what_is_not_adopted_does_not_count(log: Log, files: FaultyFiles) -> None:
    """Discarded it goes at once, and what a crash leaves goes at the next opening."""
    log.append_many(payloads(2))
    first = log.hold_appends()
    prepare(log, first, 9).discard()
    assert prepared_names(files) == []
    prepare(log, first, 9).finish()
    log.release_appends()
    log.close()
    assert len(prepared_names(files)) > 1
    with closing(Log.open(DIRECTORY, SMALL_FILES, files=files)) as again:
        assert contents(again) == numbered(2)
    assert prepared_names(files) == []


def test_an_onlooker_sees_it_when_it_is_adopted(log: Log, files: FaultyFiles) -> None:
    """And not before."""
    log.append_many(payloads(2), sync=True)
    view = LogView(DIRECTORY, SMALL_FILES, files=files)
    first = log.hold_appends()
    prepared = prepare(log, first, 9).finish()
    assert contents(view) == numbered(2)
    log.adopt_held(prepared)
    log.release_appends()
    assert contents(view) == numbered(11)


def test_those_who_wait_are_woken(log: Log) -> None:
    """A reader that follows goes on with the rows, and an append that was held back comes behind them."""
    reader = log.read("earliest", follow=True)
    found: list[bytes] = []

    def follow() -> None:
        while len(found) < 11 and (batch := reader.next_batch()) is not None:
            found.extend(batch.payloads())

    first = log.hold_appends()
    with Threads() as threads:
        threads.start(follow)
        threads.start(partial(log.append, b"10:".ljust(20, b"-")))
        wait_for_line(log, 1)
        log.adopt_held(prepare(log, first, 10).finish())
        log.release_appends()
    assert found == payloads(11)


def test_a_file_without_frames_is_replaced(files: FaultyFiles) -> None:
    """A log whose only file was cut to nothing: another file behind it would be taken for damage."""
    with closing(Log.open(DIRECTORY, SMALL_FILES, files=files)) as log:
        log.append_many(payloads(1), sync=True)
    file = files.open(DIRECTORY / wal_name(0), write=True)
    file.truncate(0)
    file.sync()
    file.close()
    with closing(Log.open(DIRECTORY, SMALL_FILES, files=files)) as log:
        append_prepared(log, 9)
        assert contents(log) == numbered(9)
    with closing(Log.open(DIRECTORY, SMALL_FILES, files=files)) as log:
        assert contents(log) == numbered(9)


def test_a_disk_without_room_fails_the_writing_beside_and_nothing_else(log: Log, files: FaultyFiles) -> None:
    """The log goes on."""
    log.append_many(payloads(1), sync=True)
    first = log.hold_appends()
    prepared = log.prepare_files(first)
    files.capacity_bytes = 300
    with pytest.raises(DiskFullError):
        prepared.write(encode_many(0, payloads(40)))
    prepared.discard()
    log.release_appends()
    log.append_many(payloads(1, first=1), sync=True)
    assert contents(log) == numbered(2)


def test_a_failed_rename_ends_the_log(log: Log, files: FaultyFiles) -> None:
    """Whoever waits for the adoption hears it; opened again, the log has whole files of it, or none."""
    first = log.hold_appends()
    prepared = prepare(log, first, 20).finish()
    files.fail("rename", error=errno.EIO, nth=2, matching="wal.*.log")
    with pytest.raises(LogFailedError):
        log.adopt_held(prepared)
    assert log.over
    log.release_appends()
    log.close()
    with closing(Log.open(DIRECTORY, SMALL_FILES, files=files)) as again:
        found = contents(again)
        assert found == numbered(prepared[0].next_offset)
        assert prepared_names(files) == []


def test_a_closed_log_adopts_nothing(log: Log) -> None:
    """It says so."""
    first = log.hold_appends()
    prepared = prepare(log, first, 5).finish()
    log.close()
    with pytest.raises(ClosedError):
        log.adopt_held(prepared)


def test_names_are_told_apart() -> None:
    """No WAL file looks prepared, and nothing prepared looks like a WAL file."""
    assert is_ingested(ingested_name(1, 2))
    assert wal_seq(ingested_name(1, 2)) is None
    assert not is_ingested(wal_name(3))


def test_a_crash_leaves_whole_files_without_a_hole() -> None:
    """Cut at every call: what was appended before is there, then files of what was adopted from the first one on."""

    def workload(files: FaultyFiles, history: History) -> None:
        log = Log.open(DIRECTORY, SMALL_FILES, files=files)
        try:
            log.append_many(payloads(2), sync=True)
            history.attempted("appended", 2)
            log.append_many(payloads(1, first=2))  # in the file and not synced, or not even there, when it is to end
            append_prepared(log, 20)
            history.attempted("adopted", 23)
            log.append_many(payloads(2, first=23), sync=True)
            history.attempted("appended", 25)
        finally:
            log.close()

    def check(files: FaultyFiles, history: History) -> None:
        promised = max([int(count) for life in history.lives for _, count in life.attempts], default=0)
        with closing(Log.open(DIRECTORY, SMALL_FILES, files=files)) as log:
            found = contents(log)
            assert found == numbered(len(found))
            assert promised <= len(found)
            log.append_many(payloads(1, first=len(found)), sync=True)
            assert contents(log) == numbered(len(found) + 1)
        assert prepared_names(files) == []

    summary = crash_everywhere(workload, check, CrashPlan(every=1))
    assert summary.cut_points > 20
    assert summary.abandoned_threads == 0
