"""Faults that a relative of this log had, one test each. The number is that of the fault; each opens with the loss."""

from __future__ import annotations

import contextlib
import errno
import itertools
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.log.workbench import (
    DIRECTORY,
    WAL_FILES,
    Gate,
    Threads,
    calls_of,
    contents,
    everything,
    flip_bit,
    frames_in,
    kill,
    numbered,
    payload,
    payloads,
    run_python,
    until_damage,
    wait_until,
    wal_paths,
)

import tidelog
from tidelog.errors import CorruptionError, LogFailedError, TidelogError
from tidelog.log import Log, LogSettings
from tidelog.log.directory import wal_files
from tidelog.log.frame import HEADER_BYTES
from tidelog.log.segment import read_checkpoint
from tidelog.testing import POLICIES, Crash, FaultyFiles

FRAME_BYTES = HEADER_BYTES + 20
TEN_A_FILE = LogSettings(rotate_max_bytes=10 * FRAME_BYTES)

STOPPED_BY_A_SIGNAL = """
import os, signal, sys, time, tidelog
topic = tidelog.open(sys.argv[1], fsync_interval_ms=3_600_000).topic("shop/orders")
for number in range(5000):
    topic.append(b"%d" % number)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_1_offsets_go_on_after_a_restart() -> None:
    """Loses what was there: a killed log began again at offset 0 and wrote over its readers' positions."""
    files = FaultyFiles()
    log = Log.open(DIRECTORY, files=files)
    log.append_many(payloads(3), sync=True)
    kill(files, log)
    found = files.after_crash("keep")
    with closing(Log.open(DIRECTORY, files=found)) as again:
        assert (again.start_offset, again.next_offset) == (0, 3)
        assert again.append(payload(3)) == 3
        assert contents(again) == numbered(4)


def test_2_synced_means_on_the_disk() -> None:
    """Loses acknowledged messages with the power: they were acknowledged before they were written or synced."""
    files = FaultyFiles()
    log = Log.open(DIRECTORY, LogSettings(fsync_interval_ms=3_600_000), files=files)
    log.append(payload(0), sync=True)
    log.append(payload(1))
    log.flush()
    assert log.durable_offset == 2
    kill(files, log)
    with closing(Log.open(DIRECTORY, files=files.after_crash("lose"))) as again:
        assert contents(again) == numbered(2)


def test_2_nothing_counts_as_durable_before_its_sync() -> None:
    """Loses what an application deleted elsewhere: it was told too early that a message is safe."""
    files = FaultyFiles()
    with Gate(files, "sync") as gate:
        log = Log.open(DIRECTORY, LogSettings(fsync_interval_ms=1), files=files)
        log.append(payload(0))
        gate.wait_until_reached()
        assert (log.next_offset, log.durable_offset) == (1, 0)
        gate.open()
        wait_until(lambda: log.durable_offset == 1, "the sync")
        log.close()


def test_2_a_stop_signal_loses_nothing(tmp_path: Path) -> None:
    """Loses seconds of accepted messages at every deployment: a stop signal ended the process before its flush."""
    stopped = run_python(STOPPED_BY_A_SIGNAL, tmp_path)
    assert stopped.returncode == -signal.SIGTERM, stopped.stderr
    with tidelog.open(tmp_path) as log:
        assert [message.value for message in log.topic("shop/orders").read()] == [b"%d" % n for n in range(5000)]


def test_3_a_checkpoint_is_whole_or_absent_after_any_crash() -> None:
    """Loses the checkpoint, or leaves an empty one: it was renamed before its content was on the disk."""
    for crash_at in range(1, 60):
        files = FaultyFiles(crash_at=crash_at)
        # What a dead process raises does not matter here, only what it left.
        with contextlib.suppress(Crash, TidelogError):
            log = Log.open(DIRECTORY, TEN_A_FILE, files=files)
            with contextlib.suppress(TidelogError):
                log.append_many(payloads(35), sync=True)
            kill(files, log)
        for policy in POLICIES:
            found = files.after_crash(policy, seed=crash_at)
            assert read_checkpoint(found, DIRECTORY)[1] in (None, "there is none")


def test_3_a_checkpoint_is_durable_once_it_is_written() -> None:
    """Loses the checkpoint of a closed log: neither the file nor its directory was synced around the rename."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, TEN_A_FILE, files=files)) as log:
        log.append_many(payloads(35))
    checkpoint, problem = read_checkpoint(files.after_crash("lose"), DIRECTORY)
    assert problem is None
    assert checkpoint is not None
    assert checkpoint.last_offset == 34


@pytest.mark.parametrize("partial_bytes", [0, 1, 15, 16, 40, 107])
def test_4_a_partial_write_leaves_no_torn_frame_in_the_middle(partial_bytes: int) -> None:
    """Loses everything behind a torn frame: a write that failed half-way was made again behind its remains."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, files=files)) as log:
        log.append_many(payloads(2), sync=True)
        files.fail("write_at", error=errno.ENOSPC, partial_bytes=partial_bytes, matching=WAL_FILES)
        log.append_many(payloads(3, first=2))
        wait_until(lambda: log.statistics().written_offset == 5, "the second attempt")
        log.flush()
    written = files.tree()[str(DIRECTORY / "wal.0000000000.log")]
    assert frames_in(written or b"", 0).payloads() == payloads(5)


def test_4_producers_are_told_of_a_failed_write() -> None:
    """Loses messages that were never written: the write failed and nobody who appended heard of it."""
    files = FaultyFiles()
    log = Log.open(DIRECTORY, files=files)
    files.fail("write_at", error=errno.EIO, partial_bytes=5, matching=WAL_FILES)
    with pytest.raises(LogFailedError):
        log.append(payload(0), sync=True)
    with pytest.raises(LogFailedError):
        log.append(payload(1))
    with pytest.raises(LogFailedError, match="offset 0 "):
        log.close()


def test_5_a_file_begins_at_the_offset_that_is_recorded_for_it() -> None:
    """Loses the match of record and file: rotation did not flush first, and the file was shipped again and again."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, TEN_A_FILE, files=files)) as log:
        for number in range(64):
            log.append(payload(number))
    checkpoint, _ = read_checkpoint(files, DIRECTORY)
    assert checkpoint is not None
    assert [(file.first_offset, file.next_offset) for file in checkpoint.files] == [
        (0, 10), (10, 20), (20, 30), (30, 40), (40, 50), (50, 60), (60, 64)
    ]  # fmt: skip
    for file in checkpoint.files:
        written = files.tree()[str(DIRECTORY / f"wal.{file.seq:010d}.log")] or b""
        assert frames_in(written, file.first_offset).payloads() == payloads(file.next_offset, 20)[file.first_offset :]


def test_5_a_file_is_synced_before_the_next_one_is_begun() -> None:
    """Loses the end of a full file with the power, while the file behind it survives."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, TEN_A_FILE, files=files)) as log:
        log.append_many(payloads(25), sync=True)
    creations = calls_of(files, "create")
    assert len(creations) == 3
    for before, creation in itertools.pairwise(creations):
        to_before = [call for call in files.calls if call.path == before.path and call.number < creation.number]
        assert [call.operation for call in to_before][-2:] == ["write_at", "sync"]


def test_9_the_start_never_goes_back(tmp_path: Path) -> None:
    """Loses the place where a log begins: the next flush undid the removal of old files, and reads of them failed."""
    with closing(Log.open(tmp_path, TEN_A_FILE)) as log:
        log.append_many(payloads(35))
        log.flush()
        assert log.remove_below(10) > 0
    for count in (35, 36, 37):
        with closing(Log.open(tmp_path, TEN_A_FILE)) as log:
            assert (log.start_offset, log.next_offset) == (10, count)
            log.append(payload(count))
            log.flush()
            assert log.start_offset == 10
            assert contents(log) == numbered(count - 9, first=10)
            with pytest.raises(tidelog.OffsetOutOfRangeError):
                log.read(9)


def test_11_more_than_a_cache_full_of_unwritten_messages_is_readable() -> None:
    """Loses sight of messages between two flushes: what the cache had dropped was not in a file yet."""
    files = FaultyFiles()
    settings = LogSettings(cache_max_messages=4, cache_max_bytes=200)
    with Gate(files) as gate, closing(Log.open(DIRECTORY, settings, files=files)) as log:
        for number in range(500):
            log.append(payload(number))
        gate.wait_until_reached()
        assert log.statistics().written_offset == 0
        assert contents(log) == numbered(500)
        gate.open()
        log.flush()
        assert log.statistics().cached_messages <= 4
        assert contents(log) == numbered(500)


def test_12_frames_are_in_the_order_of_their_offsets() -> None:
    """Loses messages at the next start: concurrent producers took their offsets in one order and queued in another."""
    files, taken = FaultyFiles(), dict[int, bytes]()
    with closing(Log.open(DIRECTORY, LogSettings(rotate_max_bytes=5000), files=files)) as log:

        def produce(name: int) -> None:
            for number in range(300):
                value = b"%d/%d" % (name, number)
                taken[log.append(value)] = value

        with Threads() as threads:
            for name in range(8):
                threads.start(partial(produce, name))
    tree, in_files = files.tree(), list[bytes]()
    for _, wal_file in wal_files(files.list(DIRECTORY)):
        in_files += frames_in(tree[str(DIRECTORY / wal_file)] or b"", len(in_files)).payloads()
    assert in_files == [taken[offset] for offset in range(8 * 300)]


@pytest.mark.parametrize(("byte", "bit"), [(3 * FRAME_BYTES + 16, 0), (3 * FRAME_BYTES + 8, 5), (3 * FRAME_BYTES, 0)])
def test_13_damage_never_ends_a_read_in_silence(tmp_path: Path, byte: int, bit: int) -> None:
    """Loses the files behind a damaged frame: a bad checksum, length or offset looked like the end of the log."""
    with closing(Log.open(tmp_path, TEN_A_FILE)) as log:
        log.append_many(payloads(35))
    trusting = LogSettings(rotate_max_bytes=10 * FRAME_BYTES, open_check_bytes=0, cache_max_messages=0)
    with closing(Log.open(tmp_path, trusting)) as log:
        flip_bit(wal_paths(tmp_path)[1], byte, bit)
        read, error = until_damage(log.read("earliest"))
        assert read == numbered(13)
        assert (error.path, error.byte) == (wal_paths(tmp_path)[1], 3 * FRAME_BYTES)
        assert everything(log.read(20)) == numbered(15, first=20)


def test_13_damage_in_the_middle_is_not_cut_off_at_opening(tmp_path: Path) -> None:
    """Loses good messages for ever: only the part before the damage was kept and the rest was deleted."""
    with closing(Log.open(tmp_path)) as log:
        log.append_many(payloads(35))
    flip_bit(wal_paths(tmp_path)[0], 3 * FRAME_BYTES + 16)
    before = wal_paths(tmp_path)[0].read_bytes()
    with pytest.raises(CorruptionError, match=rf"byte {3 * FRAME_BYTES} of .*wal\.0000000000\.log"):
        Log.open(tmp_path)
    assert wal_paths(tmp_path)[0].read_bytes() == before
