"""The log on a disk that lives and fails: a sync that fails, a disk that fills up and gets room again."""

from __future__ import annotations

import errno
import time

import pytest
from tests.crash.promises import CHECKING, DIRECTORY, TRUSTING, Appender, check_with, mixed_workload, reopen

from tidelog.errors import DiskFullError, LogFailedError
from tidelog.log.log import Log
from tidelog.testing import FaultyFiles, History, Policy, assert_history

WAL_FILES = "wal.*.log"
EVERY_POLICY: tuple[Policy, ...] = ("lose", "tear", "reorder", "keep")


def check_remains(files: FaultyFiles, history: History) -> None:
    """The promises hold if it crashes right now: by power loss, and by a kill after which the machine runs on."""
    for policy in EVERY_POLICY:
        check_with(CHECKING)(files.after_crash(policy, seed=7), history.copy())


@pytest.mark.parametrize("nth", range(1, 60, 6))
def test_a_failed_sync_ends_the_log_and_loses_nothing_promised(nth: int) -> None:
    """What it should have kept is gone from the system's memory: neither this log nor the next counts on it."""
    files, history = FaultyFiles(), History()
    files.fail("sync", nth=nth, error=errno.EIO, matching=WAL_FILES)
    with pytest.raises(LogFailedError):
        mixed_workload(files, history)
    syncs = [call for call in files.calls if call.operation == "sync" and call.path.endswith(".log")]
    assert len(syncs) == nth
    check_remains(files, history)


@pytest.mark.parametrize("nth", range(3, 12, 2))
def test_a_new_file_whose_name_cannot_be_synced_is_not_used(nth: int) -> None:
    """What would be in it could be lost with its name."""
    files, history = FaultyFiles(), History()
    files.make_directories(DIRECTORY)
    # The first is that of the mark where the log begins, every other one that of a checkpoint, which is only a hint.
    files.fail("sync_directory", nth=nth, error=errno.EIO, matching=DIRECTORY.name)
    with pytest.raises(LogFailedError):
        mixed_workload(files, history)
    check_remains(files, history)


@pytest.mark.parametrize("nth", range(1, 90, 9))
@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
def test_a_failed_write_ends_the_log_and_leaves_no_torn_frame(nth: int, error: int) -> None:
    """Half a frame is cut off again or is the end of the file; it is never in the middle."""
    files, history = FaultyFiles(), History()
    files.fail("write_at", nth=nth, error=error, partial_bytes=nth, matching=WAL_FILES)
    with pytest.raises(LogFailedError):
        mixed_workload(files, history)
    check_remains(files, history)


@pytest.mark.parametrize("capacity_bytes", range(100, 12_000, 1_700))
def test_a_full_disk_refuses_appends_loses_nothing_and_goes_on(capacity_bytes: int) -> None:
    """Wherever it fills up: a clear error, no torn frame, everything accepted is written once there is room."""
    files, history = FaultyFiles(capacity_bytes=capacity_bytes), History()
    log = Log.open(DIRECTORY, TRUSTING, files=files)
    appender = Appender(log, history, "main")
    with pytest.raises(DiskFullError, match="disk is full"):
        appender.run(200, seed=1)
    with pytest.raises(DiskFullError, match="disk is full"):
        appender.append(10)
    check_remains_of_full_disk(files, history)
    files.heal()
    flush_when_there_is_room(appender)
    appender.run(50, seed=2)
    log.close()
    history.synced_through(log.next_offset - 1)
    check_remains(files, history)


def flush_when_there_is_room(appender: Appender) -> None:
    """Until writing goes on by itself, the answer is that the disk is full."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return appender.flush()
        except DiskFullError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def check_remains_of_full_disk(files: FaultyFiles, history: History) -> None:
    """Opening works with no room left, and what was promised is there."""
    for policy in EVERY_POLICY:
        seen = history.copy()
        reopen(files.after_crash(policy, seed=7), CHECKING, seen).close()
        assert_history(seen)


def test_a_log_that_is_closed_on_a_full_disk_says_what_is_missing() -> None:
    """Closing does not wait for room for ever, and names the offsets that are not on the disk."""
    files, history = FaultyFiles(capacity_bytes=1000), History()
    log = Log.open(DIRECTORY, TRUSTING, files=files)
    with pytest.raises(DiskFullError):
        Appender(log, history, "main").run(200, seed=1)
    with pytest.raises(LogFailedError, match=f"offset {log.durable_offset} "):
        log.close()
    files.heal()
    check_remains(files, history)
