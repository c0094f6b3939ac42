"""Files that leave a log from its start, what those who ship are told about the rest, and appends that are barred."""

from __future__ import annotations

import contextlib
import itertools
import threading
from functools import partial

import pytest
from tests.log.workbench import (
    DIRECTORY,
    Gate,
    Threads,
    calls_of,
    contents,
    everything,
    files_of,
    numbered,
    payload,
    payloads,
    wait_until,
)

from tidelog.errors import FencedError, OffsetOutOfRangeError, TidelogError
from tidelog.log import Log, LogSettings
from tidelog.log.directory import wal_files
from tidelog.log.view import LogView
from tidelog.testing import FaultyFiles, History, crash_everywhere

# Three messages of 20 bytes a file, and nothing in memory that is in one.
SETTINGS = LogSettings(rotate_max_bytes=100, cache_max_messages=0, cache_max_bytes=0)


def open_log(files: FaultyFiles, first_offset: int = 0) -> Log:
    return Log.open(DIRECTORY, SETTINGS, files=files, first_offset=first_offset)


def fill(log: Log, count: int) -> None:
    first = log.next_offset
    for number in range(first, first + count):
        log.append(payload(number), sync=True)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


def wal_names(files: FaultyFiles) -> list[str]:
    return [name for _, name in wal_files(sorted(files_of(files)))]


# What those who ship and prune are told


def test_parts_cover_a_range_without_gap_or_overlap(files: FaultyFiles) -> None:
    """Whatever range is asked for, its parts are the files that hold some of it, in order."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        spans = log.file_spans()
        assert len(spans) > 4
        for first in range(20):
            for stop in range(first + 1, 21):
                parts = log.parts(first, stop)
                wanted = [span for span in spans if span.next_offset > first and span.first_offset < stop]
                assert [part.segment.first_offset for part in parts] == [span.first_offset for span in wanted]
                assert all(part.offset <= max(first, part.segment.first_offset) for part in parts)


def test_an_empty_range_has_no_parts(files: FaultyFiles) -> None:
    """Nothing is there in a log without files, or behind the end."""
    with contextlib.closing(open_log(files)) as log:
        assert log.parts(0, 100) == []
        assert log.file_spans() == []
        fill(log, 7)
        assert log.parts(7, 100) == []


def test_spans_say_what_the_files_hold(files: FaultyFiles) -> None:
    """They follow each other, and their sizes are those of the files."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 10)
        spans = log.file_spans()
        assert spans[0].first_offset == 0
        assert spans[-1].next_offset == 10
        assert all(before.next_offset == behind.first_offset for before, behind in itertools.pairwise(spans))
        assert [span.size for span in spans] == [len(files_of(files)[name]) for name in wal_names(files)]


# Removing


def test_only_files_wholly_below_the_offset_go(files: FaultyFiles) -> None:
    """A file of which one message stays, stays; what was freed is told in bytes."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 12)
        spans = log.file_spans()
        assert log.remove_below(spans[1].next_offset - 1) == spans[0].size
        assert log.start_offset == spans[1].first_offset
        assert log.remove_below(spans[1].next_offset) == spans[1].size
        assert log.remove_below(spans[1].next_offset) == 0
        assert contents(log) == numbered(12 - spans[2].first_offset, first=spans[2].first_offset)
        assert len(wal_names(files)) == len(spans) - 2


def test_the_last_file_never_goes(files: FaultyFiles) -> None:
    """However far the offset is, the file that is written to stays, and with it where the log goes on."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 10)
        last = log.file_spans()[-1]
        log.remove_below(1 << 60)
        assert log.file_spans() == [last]
        assert log.append(payload(10), sync=True) == 10
    with contextlib.closing(open_log(files)) as log:
        assert (log.start_offset, log.next_offset) == (last.first_offset, 11)


def test_what_is_left_is_found_again(files: FaultyFiles) -> None:
    """Opened again, the log begins where it was cut off, with and without its checkpoint."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        log.remove_below(9)
        start = log.start_offset
    if files.exists(DIRECTORY / "wal.ckpt"):
        files.remove(DIRECTORY / "wal.ckpt")
    with contextlib.closing(open_log(files)) as log:
        assert (log.start_offset, log.next_offset) == (start, 20)
        assert contents(log) == numbered(20 - start, first=start)


def test_a_reader_inside_a_removed_file_goes_on_or_hears_of_it(files: FaultyFiles) -> None:
    """It never jumps: it gets the next offset, or OffsetOutOfRangeError."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        for begun in range(1, 5):
            reader = log.read(log.start_offset)
            found = []
            for _ in range(begun):
                batch = reader.next_batch()
                assert batch is not None
                found += list(enumerate(batch.payloads(), batch.first_offset))
            log.remove_below(log.file_spans()[1].next_offset)
            with contextlib.suppress(OffsetOutOfRangeError):
                found += everything(reader)
            assert found == numbered(len(found), first=found[0][0])
            fill(log, 10)


def test_a_reader_before_the_start_hears_of_it(files: FaultyFiles) -> None:
    """An offset that was removed is out of range, for new readers and for old ones that come to it."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        slow = log.read(0)
        log.remove_below(12)
        with pytest.raises(OffsetOutOfRangeError):
            everything(slow)
        with pytest.raises(OffsetOutOfRangeError):
            log.read(0)
        assert everything(log.read("earliest"))[0][0] == log.start_offset


def test_an_onlooker_sees_the_new_start(files: FaultyFiles) -> None:
    """Somebody who only reads the files notices that the oldest are gone."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        view = LogView(DIRECTORY, SETTINGS, files=files)
        log.remove_below(12)
        assert view.next_offset == 20
        assert view.start_offset == log.start_offset
        assert everything(view.read("earliest")) == contents(log)


@pytest.mark.parametrize("operation", ["remove", "sync_directory"])
def test_a_removal_that_failed_is_made_before_the_next_one(files: FaultyFiles, operation: str) -> None:
    """A file that could not be removed, and then one behind it removed, would leave a hole that opening refuses."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        names = wal_names(files)
        files.fail(operation, nth=2)  # type: ignore[arg-type]  # both are operations
        with pytest.raises(TidelogError):
            log.remove_below(9)
        assert set(wal_names(files)) <= set(names[1:])
        before = len(files.calls)
        log.remove_below(20)
        first_calls = [call.operation for call in files.calls[before:]][:4]
        assert first_calls == ["rename", "sync_directory", "remove", "sync_directory"]
        assert wal_names(files) == names[-1:]
    with contextlib.closing(open_log(files)) as log:
        assert log.next_offset == 20


def test_a_removal_that_keeps_failing_leaves_no_hole(files: FaultyFiles) -> None:
    """As long as one file cannot be removed, none behind it is; they go later, and nobody reads them meanwhile."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        names = wal_names(files)
        files.fail("remove", times=None, matching=names[0])
        for _ in range(3):
            with pytest.raises(TidelogError):
                log.remove_below(20)
        assert wal_names(files) == names
        start_offset = log.file_spans()[-1].first_offset
    files.heal()
    with contextlib.closing(open_log(files)) as log:
        assert log.start_offset == start_offset
        assert contents(log) == numbered(20 - start_offset, first=start_offset)
        log.remove_below(start_offset)
        assert wal_names(files) == names[-1:]


def test_a_file_that_is_gone_already_is_no_error(files: FaultyFiles) -> None:
    """Somebody removed it by hand: the next one is removed, and its absence is made durable too."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 12)
        names = wal_names(files)
        files.remove(DIRECTORY / names[0])
        log.remove_below(log.file_spans()[-1].first_offset)
        assert wal_names(files) == names[-1:]


def test_each_removal_is_durable_before_the_next(files: FaultyFiles) -> None:
    """Between two removals the directory is synced, and before the first where the log begins from then on."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        before = len(files.calls)
        log.remove_below(20)
        operations = [call.operation for call in files.calls[before:]]
    assert operations.count("remove") > 3
    assert operations == ["rename", "sync_directory", *["remove", "sync_directory"] * operations.count("remove")]


def test_two_who_prune_at_once_leave_no_hole(files: FaultyFiles) -> None:
    """Removals never overlap: the second waits for the first, or what a crash leaves could have a hole."""
    log = open_log(files)
    fill(log, 20)
    with Gate(files, "remove") as gate, Threads() as threads:
        threads.start(lambda: log.remove_below(9))
        gate.wait_until_reached()
        second = threads.start(lambda: log.remove_below(20))
        second.join(0.1)
        assert len(calls_of(files, "remove")) == 1
        gate.open()
    assert len(log.file_spans()) == 1
    log.close()


def test_nothing_is_removed_from_a_closed_log(files: FaultyFiles) -> None:
    """After closing the directory may be somebody else's."""
    log = open_log(files)
    fill(log, 20)
    log.close()
    names = wal_names(files)
    assert log.remove_below(20) == 0
    assert wal_names(files) == names


def test_a_crash_anywhere_in_pruning_leaves_a_log_without_a_hole() -> None:
    """Cut between any two calls, and with any of the removals undone, the log opens with all that was not removed."""

    def workload(files: FaultyFiles, _history: History) -> None:
        log = open_log(files)
        try:
            log.append_many(payloads(14), sync=True)
            log.remove_below(log.file_spans()[3].first_offset)
        finally:
            log.close()

    def check(files: FaultyFiles, _history: History) -> None:
        with contextlib.closing(open_log(files)) as log:
            assert contents(log) == numbered(log.next_offset - log.start_offset, first=log.start_offset)
            starts.add(log.start_offset)
            assert log.next_offset == 14 or log.start_offset == 0

    starts: set[int] = set()
    crash_everywhere(workload, check)
    assert len(starts) == 2  # it moves at once, before the first file goes


def test_nothing_below_a_deletion_can_be_read(files: FaultyFiles) -> None:
    """The start may lie inside a file: readers, views and the next opening begin there, and never before."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 20)
        spans = log.file_spans()
        offset = spans[2].first_offset + 1
        following = log.read(offset - 1, follow=True)
        log.delete_before(offset)
        assert log.file_spans() == spans[2:]
        assert (log.start_offset, contents(log)) == (offset, numbered(20 - offset, first=offset))
        for start in (0, offset - 1):
            with pytest.raises(OffsetOutOfRangeError):
                log.read(start)
        with pytest.raises(OffsetOutOfRangeError):
            next(iter(following))
        log.delete_before(offset - 1)  # it never goes back
        log.remove_below(offset - 1)
        assert log.start_offset == offset
    assert LogView(DIRECTORY, files=files).start_offset == offset
    with contextlib.closing(open_log(files)) as log:
        assert contents(log) == numbered(20 - offset, first=offset)
        log.delete_before(20)
        assert (contents(log), log.next_offset, len(log.file_spans())) == ([], 20, 1)
        assert log.append(payload(20)) == 20
        assert contents(log) == [(20, payload(20))]


def test_a_crash_anywhere_in_a_deletion_leaves_all_of_it_or_nothing() -> None:
    """Cut between any two calls, the log begins where it began or where it was to begin; once said, it stays said."""

    def workload(files: FaultyFiles, history: History) -> None:
        log = open_log(files)
        try:
            log.append_many(payloads(14))
            history.attempted("delete", 9)
            log.delete_before(9)
            history.attempted("deleted", 9)
            log.append(payload(14), sync=True)
        finally:
            log.close()

    def check(files: FaultyFiles, history: History) -> None:
        said = {kind for life in history.lives for kind, _ in life.attempts}
        with contextlib.closing(open_log(files)) as log:
            assert contents(log) == numbered(log.next_offset - log.start_offset, first=log.start_offset)
            assert log.start_offset in ((9,) if "deleted" in said else (0, 9))
            assert log.next_offset >= 14 or log.start_offset == 0
            starts.add(log.start_offset)

    starts: set[int] = set()
    crash_everywhere(workload, check)
    assert starts == {0, 9}


def test_appends_and_readers_go_on_while_files_are_removed(files: FaultyFiles) -> None:
    """No message is lost, none comes twice, and offsets are contiguous while one thread prunes and one appends."""
    log = open_log(files)
    fill(log, 10)
    done = threading.Event()

    def prune() -> None:
        while not done.is_set():
            log.remove_below(max(0, log.durable_offset - 6))

    def has_pruned(offset: int) -> bool:
        return log.start_offset >= offset

    def append() -> None:
        try:
            for number in range(10, 300):
                assert log.append(payload(number), sync=number % 7 == 0) == number
                if number % 50 == 0:  # neither of the two may be over before the other one begins
                    log.flush()
                    wait_until(partial(has_pruned, number - 20), "the other thread to prune")
            log.flush()
        finally:
            done.set()

    with Threads() as threads:
        threads.start(prune)
        threads.start(append)
    found = contents(log)
    assert found == numbered(300 - log.start_offset, first=log.start_offset)
    assert log.start_offset > 200
    log.close()
    with contextlib.closing(open_log(files)) as again:
        assert again.next_offset == 300


# Appends that are barred


def fenced() -> FencedError:
    return FencedError("somebody else owns it")


def test_a_barred_log_accepts_nothing_and_keeps_what_it_has(files: FaultyFiles) -> None:
    """Every way to append raises; what was accepted before reaches the disk, and reading goes on."""
    log = open_log(files)
    log.append_many(payloads(5))
    log.refuse_appends(fenced)
    for append in (
        lambda: log.append(b"late"),
        lambda: log.append_many([b"late"]),
        lambda: log.append(b"late", sync=True),
    ):
        with pytest.raises(FencedError):
            append()
    assert log.try_append(b"late") is None
    log.flush()
    assert (log.next_offset, log.durable_offset) == (5, 5)
    assert contents(log) == numbered(5)
    log.close()


def test_a_bar_can_be_lifted(files: FaultyFiles) -> None:
    """After None the next append gets the next offset."""
    with contextlib.closing(open_log(files)) as log:
        fill(log, 3)
        log.refuse_appends(fenced)
        with pytest.raises(FencedError):
            log.append(b"late")
        log.refuse_appends(None)
        assert log.append(payload(3), sync=True) == 3


def test_every_append_gets_an_error_of_its_own(files: FaultyFiles) -> None:
    """One error object that is raised twice would collect the tracebacks of both."""
    with contextlib.closing(open_log(files)) as log:
        log.refuse_appends(fenced)
        errors = []
        for _ in range(2):
            with pytest.raises(FencedError) as raised:
                log.append(b"late")
            errors.append(raised.value)
        assert errors[0] is not errors[1]


def test_who_waits_for_room_hears_of_the_bar(files: FaultyFiles) -> None:
    """An append that was waiting when the log was barred does not get through, not even when it is closed."""
    settings = LogSettings(append_queue_max_messages=1, append_timeout_ms=60_000)
    log = Log.open(DIRECTORY, settings, files=files)
    errors: list[TidelogError] = []

    def append() -> None:
        try:
            for number in range(3):
                log.append(payload(number))
        except TidelogError as error:
            errors.append(error)

    with Gate(files, "write_at"), Threads() as threads:
        thread = threads.start(append)
        thread.join(0.2)
        log.refuse_appends(fenced)
        thread.join(120)
        assert not thread.is_alive()
    assert isinstance(errors[0], FencedError)
    log.close()
    with pytest.raises(FencedError):
        log.append(b"late")
