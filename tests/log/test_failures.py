"""A disk that fails or fills up: who is told, what is kept, and what is never tried again."""

from __future__ import annotations

import asyncio
import errno
import logging
from contextlib import closing
from functools import partial

import pytest
from tests.log.workbench import (
    DIRECTORY,
    WAL_FILES,
    Gate,
    Threads,
    calls_of,
    contents,
    everything,
    frames_in,
    numbered,
    payload,
    payloads,
    wait_until,
)

from tidelog.errors import DiskFullError, LogFailedError
from tidelog.log import Log, LogSettings, writer
from tidelog.log import log as log_module
from tidelog.log.directory import CHECKPOINT
from tidelog.log.frame import HEADER_BYTES
from tidelog.testing import FaultyFiles
from tidelog.testing.faulty_files import ChangingOperation

FRAME_BYTES = HEADER_BYTES + 20
CHECKPOINT_FILES = "wal.ckpt*"
ON_DEMAND = LogSettings(fsync_interval_ms=3_600_000)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that waits for room on its disk looks for it a hundred times a second."""
    monkeypatch.setattr(writer, "_FULL_DISK_RETRY_SECONDS", 0.01)


def wal_content(files: FaultyFiles, seq: int = 0) -> bytes:
    return files.tree()[str(DIRECTORY / f"wal.{seq:010d}.log")] or b""


def reopened(files: FaultyFiles) -> list[tuple[int, bytes]]:
    """What a log that is opened again finds, on this disk and after a power failure."""
    with closing(Log.open(DIRECTORY, files=files.after_crash("lose"))) as log:
        durable = contents(log)
    with closing(Log.open(DIRECTORY, files=files.after_crash("keep"))) as log:
        assert contents(log)[: len(durable)] == durable
    return durable


class TestFailedSync:
    """The disk did not keep what it was given."""

    def test_it_is_final_and_never_retried(self) -> None:
        """The system may have dropped the data and would call the next sync a success: there is none."""
        files = FaultyFiles()
        log = Log.open(DIRECTORY, ON_DEMAND, files=files)
        log.append(payload(0), sync=True)
        files.fail("sync", error=errno.EIO, matching=WAL_FILES)
        with pytest.raises(LogFailedError):
            log.append(payload(1), sync=True)
        for _ in range(3):
            with pytest.raises(LogFailedError):
                log.append(payload(2), sync=True)
            with pytest.raises(LogFailedError):
                log.flush()
        with pytest.raises(LogFailedError):
            log.close()
        assert len(calls_of(files, "sync")) == 2
        assert reopened(files) == numbered(1)

    def test_everybody_who_waits_is_told(self) -> None:
        """No thread waits for ever, and each error says what to do."""
        files = FaultyFiles()
        files.fail("sync", error=errno.EIO, matching=WAL_FILES)
        with Gate(files, "sync", ".log") as gate:
            log = Log.open(DIRECTORY, ON_DEMAND, files=files)
            errors: list[LogFailedError] = []

            def append(number: int) -> None:
                with pytest.raises(LogFailedError) as caught:
                    log.append(payload(number), sync=True)
                errors.append(caught.value)

            with Threads() as threads:
                for number in range(20):
                    threads.start(partial(append, number))
                wait_until(lambda: log.next_offset == 20, "all appends")
                gate.open()
        assert len({id(error) for error in errors}) == 20
        assert all("must be opened again" in str(error) for error in errors)
        with pytest.raises(LogFailedError, match="offsets 0 to 19"):
            log.close()

    def test_a_task_that_waits_is_told(self) -> None:
        """As a thread is."""
        files = FaultyFiles()
        files.fail("sync", error=errno.EIO, matching=WAL_FILES)
        log = Log.open(DIRECTORY, ON_DEMAND, files=files)

        async def append() -> None:
            with pytest.raises(LogFailedError):
                await log.append_async(payload(0), sync=True)
            with pytest.raises(LogFailedError):
                await log.append_async(payload(1))

        asyncio.run(append())
        with pytest.raises(LogFailedError):
            log.close()

    def test_what_was_durable_stays_durable(self) -> None:
        """The durable offset does not move by a failed sync, and statistics say what happened."""
        files = FaultyFiles()
        log = Log.open(DIRECTORY, ON_DEMAND, files=files)
        log.append_many(payloads(5), sync=True)
        files.fail("sync", error=errno.ENOSPC, matching=WAL_FILES)
        log.append_many(payloads(5, first=5))
        with pytest.raises(LogFailedError):
            log.flush()
        assert log.durable_offset == 5
        assert log.statistics().state == "failed"
        with pytest.raises(LogFailedError, match="offsets 5 to 9"):
            log.close()
        assert reopened(files) == numbered(5)

    def test_readers_that_follow_are_told(self) -> None:
        """Nothing will ever be added, so nobody waits for it, or takes it for a log that was closed in order."""
        files = FaultyFiles()
        log = Log.open(DIRECTORY, ON_DEMAND, files=files)
        log.append(payload(0), sync=True)
        reader = log.read("latest", follow=True)
        told: list[LogFailedError] = []

        def follow() -> None:
            with pytest.raises(LogFailedError) as caught:
                everything(reader)
            told.append(caught.value)

        with Threads() as threads:
            threads.start(follow)
            files.fail("sync", error=errno.EIO, matching=WAL_FILES)
            with pytest.raises(LogFailedError):
                log.append(payload(1), sync=True)
        assert len(told) == 1
        with pytest.raises(LogFailedError):
            log.close()

    def test_a_log_that_cannot_be_synced_is_not_opened(self) -> None:
        """What is found counts as durable, so it is synced first; if that fails, opening does."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, files=files)) as log:
            log.append_many(payloads(3))
        files.remove(DIRECTORY / CHECKPOINT)  # it would vouch for a sync that was made before
        files.fail("sync", error=errno.EIO, matching=WAL_FILES)
        with pytest.raises(LogFailedError):
            Log.open(DIRECTORY, files=files)
        with closing(Log.open(DIRECTORY, files=files)) as log:
            assert contents(log) == numbered(3)


class TestFailedWrite:
    """The disk did not take what it was given."""

    @pytest.mark.parametrize("partial_bytes", [0, 1, HEADER_BYTES, FRAME_BYTES, FRAME_BYTES + 7])
    def test_it_ends_the_log_and_leaves_no_torn_frame(self, partial_bytes: int) -> None:
        """What was synced before is there, and what the write left behind is cut off."""
        files = FaultyFiles()
        log = Log.open(DIRECTORY, files=files)
        log.append(payload(0), sync=True)
        files.fail("write_at", error=errno.EIO, partial_bytes=partial_bytes, matching=WAL_FILES)
        with pytest.raises(LogFailedError):
            log.append_many(payloads(3, first=1), sync=True)
        with pytest.raises(LogFailedError, match="offsets 1 to 3"):
            log.close()
        assert len(calls_of(files, "write_at")) == 2
        assert reopened(files) == numbered(1)

    def test_it_is_reported_at_close_when_nobody_waited(self) -> None:
        """Accepted and lost is never silent: closing names the offsets."""
        files = FaultyFiles()
        files.fail("write_at", error=errno.EIO, matching=WAL_FILES)
        log = Log.open(DIRECTORY, ON_DEMAND, files=files)
        log.append_many(payloads(3))
        with pytest.raises(LogFailedError, match="offsets 0 to 2"):
            log.close()
        log.close()

    def test_a_file_that_cannot_be_made_ends_the_log(self) -> None:
        """Rotation needs a new file; without it, what was synced is safe and the rest is named."""
        files = FaultyFiles()
        log = Log.open(DIRECTORY, LogSettings(rotate_max_bytes=2 * FRAME_BYTES), files=files)
        log.append_many(payloads(2), sync=True)
        files.fail("create", error=errno.EACCES, matching=WAL_FILES)
        with pytest.raises(LogFailedError):
            log.append(payload(2), sync=True)
        with pytest.raises(LogFailedError, match=r"offset 2\b"):
            log.close()
        assert reopened(files) == numbered(2)


def fill_disk(files: FaultyFiles, spare_bytes: int) -> None:
    """So many bytes of room are left."""
    used = sum(len(content) for content in files.tree().values() if content is not None)
    files.capacity_bytes = used + spare_bytes


def append_by(log: Log, way: str) -> None:
    """Appends payload 1 in one of the four ways, and waits for its sync."""
    if way == "append":
        log.append(payload(1), sync=True)
    elif way == "append_many":
        log.append_many([payload(1)], sync=True)
    elif way == "append_async":
        asyncio.run(log.append_async(payload(1), sync=True))
    else:
        asyncio.run(log.append_many_async([payload(1)], sync=True))


class TestFullDisk:
    """No room: appends are refused, nothing accepted is lost, and it goes on by itself."""

    def full(self, files: FaultyFiles, spare_bytes: int = FRAME_BYTES + 7) -> Log:
        """A log with two durable messages, one that is written and two that wait in memory."""
        log = Log.open(DIRECTORY, ON_DEMAND, files=files)
        log.append_many(payloads(2), sync=True)
        fill_disk(files, spare_bytes)
        log.append(payload(2))
        wait_until(lambda: log.statistics().written_offset == 3, "the last that fits")
        log.append_many(payloads(2, first=3))
        wait_until(lambda: log.statistics().state == "disk full", "the full disk")
        return log

    def test_appends_are_refused_with_a_clear_error(self) -> None:
        """Each way to append raises DiskFullError, uses no offset, and says that it was not accepted."""
        files = FaultyFiles()
        with closing(self.full(files)) as log:
            with pytest.raises(DiskFullError, match="Free some space") as caught:
                log.append(payload(5))
            assert caught.value.offset is None
            with pytest.raises(DiskFullError):
                log.append_many(payloads(2), sync=True)
            with pytest.raises(DiskFullError):
                asyncio.run(log.append_async(payload(5)))
            with pytest.raises(DiskFullError):
                log.flush()
            assert log.next_offset == 5
            files.heal()

    def test_nothing_accepted_is_lost_and_it_goes_on(self) -> None:
        """Once there is room, what waited in memory is written, whole and once, and appends are taken again."""
        files = FaultyFiles()
        with closing(self.full(files)) as log:
            assert contents(log) == numbered(5)
            files.heal()
            wait_until(lambda: log.statistics().state == "open", "room")
            assert log.append(payload(5), sync=True) == 5
            assert contents(log) == numbered(6)
        assert frames_in(wal_content(files), 0).payloads() == payloads(6)
        assert reopened(files) == numbered(6)

    def test_what_got_into_the_file_is_made_durable_at_once(self) -> None:
        """It does not wait for room: only what is still in memory is at risk."""
        files = FaultyFiles()
        with closing(self.full(files)) as log:
            assert log.durable_offset == 3
            assert reopened(files) == numbered(3)
            files.heal()

    @pytest.mark.parametrize("way", ["append", "append_many", "append_async", "append_many_async"])
    def test_who_waits_for_a_sync_is_told_with_the_offset(self, way: str) -> None:
        """The message is accepted and kept: whoever appended it is told its offset, so as not to append it again."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, ON_DEMAND, files=files)) as log:
            log.append(payload(0), sync=True)
            fill_disk(files, 7)
            with pytest.raises(DiskFullError) as caught:
                append_by(log, way)
            assert caught.value.offset == 1
            files.heal()
            wait_until(lambda: log.statistics().state == "open", "room")
            log.flush()
            assert contents(log) == numbered(2)

    def test_an_append_that_waits_for_room_in_memory_is_refused(self) -> None:
        """It does not wait for a disk that has no room; it was not accepted."""
        files = FaultyFiles()
        settings = LogSettings(fsync_interval_ms=3_600_000, append_queue_max_messages=2)
        with Gate(files) as gate, closing(Log.open(DIRECTORY, settings, files=files)) as log:
            log.append_many(payloads(2))
            gate.wait_until_reached()
            fill_disk(files, 3)

            def append() -> None:
                with pytest.raises(DiskFullError) as caught:
                    log.append(b"waits")
                assert caught.value.offset is None

            with Threads() as threads:
                threads.start(append)
                gate.open()
            files.heal()
            wait_until(lambda: log.statistics().state == "open", "room")
            assert contents(log) == numbered(2)

    def test_closing_a_full_log_names_what_is_not_on_the_disk(self) -> None:
        """It does not wait for room for ever: it raises and says which offsets are lost."""
        files = FaultyFiles()
        log = self.full(files)
        with pytest.raises(LogFailedError, match="offsets 3 to 4"):
            log.close()
        assert reopened(files) == numbered(3)
        files.heal()
        with closing(Log.open(DIRECTORY, files=files)) as again:
            assert again.append(payload(3)) == 3

    @pytest.mark.parametrize("spare_bytes", range(0, 6 * FRAME_BYTES, 11))
    def test_no_torn_frame_is_left_wherever_it_fills_up(self, spare_bytes: int) -> None:
        """Whole frames only, at every moment that a power failure could make the last."""
        files = FaultyFiles()
        settings = LogSettings(fsync_interval_ms=3_600_000, rotate_max_bytes=3 * FRAME_BYTES)
        log = Log.open(DIRECTORY, settings, files=files)
        log.append(payload(0), sync=True)
        fill_disk(files, spare_bytes)
        log.append_many(payloads(7, first=1))
        with pytest.raises(LogFailedError):
            log.close()
        files.heal()
        with closing(Log.open(DIRECTORY, settings, files=files)) as again:
            assert again.recovery.torn_tail is None
            assert contents(again) == numbered(again.next_offset)
            assert again.next_offset >= 1

    def test_a_full_disk_at_rotation_is_waited_out(self) -> None:
        """The new file cannot be made yet: nothing is lost, and it is made later."""
        files = FaultyFiles()
        settings = LogSettings(rotate_max_bytes=2 * FRAME_BYTES)
        with closing(Log.open(DIRECTORY, settings, files=files)) as log:
            log.append_many(payloads(2), sync=True)
            files.fail("create", error=errno.ENOSPC, times=None, matching=WAL_FILES)
            log.append_many(payloads(3, first=2))
            wait_until(lambda: log.statistics().full_disk_waits > 0, "the full disk")
            files.heal()
            wait_until(lambda: log.statistics().state == "open", "room")
            log.flush()
            assert contents(log) == numbered(5)
            assert log.statistics().files == 3


class TestFailedCheckpoint:
    """The checkpoint is a hint: that it cannot be written is no reason to stop."""

    @pytest.mark.parametrize("operation", ["create", "write_at", "sync", "rename"])
    def test_it_is_only_a_warning(self, operation: ChangingOperation, caplog: pytest.LogCaptureFixture) -> None:
        """The log goes on, counts the failures, says so, and is found again without it."""
        files = FaultyFiles()
        files.fail(operation, error=errno.EIO, times=None, matching=CHECKPOINT_FILES)
        settings = LogSettings(rotate_max_bytes=2 * FRAME_BYTES)
        with (
            caplog.at_level(logging.WARNING, "tidelog.log"),
            closing(Log.open(DIRECTORY, settings, files=files)) as log,
        ):
            log.append_many(payloads(10), sync=True)
            assert log.statistics().checkpoint_failures >= 4
            assert log.statistics().state == "open"
        assert "checkpoint could not be written" in caplog.text
        assert reopened(files) == numbered(10)
        with closing(Log.open(DIRECTORY, settings, files=files)) as again:
            assert not again.recovery.checkpoint_used
            assert again.recovery.checkpoint_problem == "there is none"


def test_deletion_makes_room_on_a_full_disk() -> None:
    """Who deletes everything gets the space, that of the file in use included, and the log goes on by itself."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, ON_DEMAND, files=files)) as log:
        log.append_many([payload(number) for number in range(50)], sync=True)
        fill_disk(files, FRAME_BYTES // 2)
        with pytest.raises(DiskFullError):
            log.append(payload(50), sync=True)
        log.delete_before(50)
        assert (log.start_offset, log.durable_offset) == (50, 51)
        assert log.append(payload(51), sync=True) == 51
        assert [one for _, one in contents(log)] == [payload(50), payload(51)]
    with closing(Log.open(DIRECTORY, files=files)) as log:
        assert (log.start_offset, log.next_offset) == (50, 52)


def test_deletion_on_a_full_disk_takes_nothing_that_should_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what may go makes no room, the full disk is told, and what stays is readable."""
    monkeypatch.setattr(log_module, "_ROOM_SECONDS", 0.1)
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, ON_DEMAND, files=files)) as log:
        log.append_many([payload(number) for number in range(50)], sync=True)
        fill_disk(files, FRAME_BYTES // 2)
        with pytest.raises(DiskFullError):
            log.append(payload(50), sync=True)
        with pytest.raises(DiskFullError):
            log.delete_before(10)
        files.capacity_bytes = None
        wait_until(lambda: log.stall is None, "there is room again")
        assert [one for _, one in contents(log)][-41:] == [payload(number) for number in range(10, 51)]
