"""Ending the file at the end of a log because somebody asks for it."""

from __future__ import annotations

import errno
from contextlib import closing

import pytest
from tests.log.workbench import DIRECTORY, Gate, Threads, calls_of, contents, numbered, payload, payloads

from tidelog.errors import ClosedError, DiskFullError, LogFailedError
from tidelog.log import Log, LogSettings
from tidelog.testing import FaultyFiles

ON_DEMAND = LogSettings(fsync_interval_ms=3_600_000)


def ranges(log: Log) -> list[tuple[int, int]]:
    return [(span.first_offset, span.next_offset) for span in log.file_spans()]


def test_what_was_accepted_is_in_the_ended_file() -> None:
    """Messages before the call are in files that do not change any more, synced; later ones are in the next."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, ON_DEMAND, files=files)) as log:
        log.append_many(payloads(3))
        log.end_file()
        assert log.durable_offset == 3
        log.append(payload(3), sync=True)
        log.end_file()
        assert ranges(log) == [(0, 3), (3, 4)]
        assert contents(log) == numbered(4)
    with closing(Log.open(DIRECTORY, files=files.after_crash("lose"))) as log:
        assert contents(log) == numbered(4)


def test_an_empty_file_is_never_left_behind() -> None:
    """To ask again, or before the first message, changes nothing."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, ON_DEMAND, files=files)) as log:
        log.end_file()
        log.append(payload(0))
        log.end_file()
        log.end_file()
        assert ranges(log) == [(0, 1)]
        assert len(calls_of(files, "create")) == 1


def test_a_file_that_was_there_before_can_be_ended() -> None:
    """Whoever opens a log again goes on in its last file until that is ended."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, files=files)) as log:
        log.append(payload(0))
    with closing(Log.open(DIRECTORY, files=files)) as log:
        log.end_file()
        log.append(payload(1), sync=True)
        assert ranges(log) == [(0, 1), (1, 2)]


def test_appends_go_on_meanwhile() -> None:
    """Other threads append while the file is being ended; their messages are in one file or the other."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, ON_DEMAND, files=files)) as log, Threads() as threads:
        for _ in range(3):
            threads.start(lambda: [log.append(payload(0)) for _ in range(200)])
        for _ in range(10):
            before = log.next_offset
            log.end_file()
            sealed = [stop for _, stop in ranges(log)]
            assert any(stop >= before for stop in sealed) or before == 0
        log.append(payload(0), sync=True)


def test_it_waits_for_the_writer() -> None:
    """The call returns when the file is ended, not before."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, ON_DEMAND, files=files)) as log:
        with Gate(files) as gate, Threads() as threads:
            log.append(payload(0))
            gate.wait_until_reached()
            asking = threads.start(log.end_file)
            asking.join(0.05)
            assert asking.is_alive()
            gate.open()
        assert ranges(log) == [(0, 1)]


def test_a_full_disk_is_told() -> None:
    """Who asks while messages wait for room hears why it takes so long."""
    files = FaultyFiles(capacity_bytes=2000)
    log = Log.open(DIRECTORY, ON_DEMAND, files=files)
    log.append(payload(0, 5000))
    with pytest.raises(DiskFullError):
        log.end_file()
    files.capacity_bytes = None
    log.close()


def test_a_failed_or_closed_log_says_so() -> None:
    """Nobody waits for a writer that is gone."""
    files = FaultyFiles()
    log = Log.open(DIRECTORY, ON_DEMAND, files=files)
    log.append(payload(0))
    files.fail("sync", error=errno.EIO, matching="wal.*.log")
    with pytest.raises(LogFailedError):
        log.end_file()
    with pytest.raises(LogFailedError):
        log.end_file()
    with pytest.raises(LogFailedError):
        log.close()
    closed = Log.open(DIRECTORY, files=FaultyFiles())
    closed.close()
    with pytest.raises(ClosedError):
        closed.end_file()
