"""Many logs share a few threads: each is written in its turn, and none holds up the others."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.log.workbench import (
    LIMIT_SECONDS,
    Gate,
    Threads,
    contents,
    numbered,
    open_below,
    payload,
    payloads,
    wait_until,
)

from tidelog.errors import DiskFullError, ExhaustedError
from tidelog.files import LocalFiles
from tidelog.log import Log, LogSettings, writer_pool
from tidelog.testing import Call, FaultyFiles

NEVER_BY_ITSELF = LogSettings(fsync_interval_ms=3_600_000)


def new_threads(before: set[threading.Thread]) -> list[str]:
    names = sorted(thread.name for thread in threading.enumerate() if thread not in before)
    return [name for name in names if name.startswith("tidelog")]


@contextlib.contextmanager
def opened(files: FaultyFiles, count: int, settings: LogSettings = NEVER_BY_ITSELF) -> Iterator[list[Log]]:
    """So many logs on one disk."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Log.open(Path(f"/logs/{number}"), settings, files=files)))
            for number in range(count)
        ]


def is_open(log: Log) -> bool:
    return log.statistics().state == "open"


def are_durable(logs: list[Log], offset: int) -> bool:
    return all(log.durable_offset == offset for log in logs)


def hang_in_all(stack: contextlib.ExitStack, files: FaultyFiles, logs: list[Log]) -> Gate:
    """A worker hangs in the file of each of these logs."""
    hanging: set[str] = set()
    gate = stack.enter_context(Gate(files))
    hold = files.faults.on_call
    assert hold is not None

    def note(call: Call) -> None:
        if call.operation == "write_at" and call.path.endswith(".log"):
            hanging.add(call.path)
        hold(call)

    files.faults.on_call = note
    for log in logs:
        log.append(payload(0))
    wait_until(lambda: len(hanging) == len(logs), "a worker in each file")
    return gate


def test_threads_do_not_grow_with_the_logs() -> None:
    """Lost: the use of a process with thousands of topics, each with a thread of its own."""
    before = set(threading.enumerate())
    with opened(FaultyFiles(), 200) as logs:
        for log in logs:
            log.append(payload(0))
        for log in logs:
            log.flush()
        assert len(new_threads(before)) <= writer_pool.MAX_WORKERS + 1
        assert [contents(log) for log in logs] == [numbered(1)] * 200


def test_threads_end_with_the_last_log() -> None:
    """Who closes all logs is left with no thread of theirs."""
    before = set(threading.enumerate())
    with opened(FaultyFiles(), 3) as logs:
        logs[0].append(payload(0), sync=True)
        logs[0].close()
        assert new_threads(before)
        logs[1].append(payload(0), sync=True)
    wait_until(lambda: not new_threads(before), "the end of the threads")


def test_a_log_that_hangs_holds_up_no_other() -> None:
    """Others on the same disk are written meanwhile, and it goes on by itself."""
    files = FaultyFiles()
    with opened(files, 2) as (stuck, other), contextlib.ExitStack() as stack:
        gate = hang_in_all(stack, files, [stuck])
        files.faults.on_call = None
        assert other.append(payload(0), sync=True) == 0
        assert stuck.durable_offset == 0
        gate.open()
        stuck.flush()


def test_a_disk_that_hangs_holds_up_no_other_disk() -> None:
    """As many logs hang on one disk as it has workers, and more wait there; another disk does not notice."""
    files = FaultyFiles()
    with opened(files, writer_pool.MAX_WORKERS + 2) as logs, contextlib.ExitStack() as stack:
        gate = hang_in_all(stack, files, logs[: writer_pool.MAX_WORKERS])
        files.faults.on_call = None
        for log in logs[writer_pool.MAX_WORKERS :]:
            log.append(payload(0))
        with opened(FaultyFiles(), 1) as (elsewhere,):
            assert elsewhere.append(payload(0), sync=True) == 0
        assert [log.durable_offset for log in logs] == [0] * len(logs)
        gate.open()
        for log in logs:
            log.flush()
        assert [contents(log) for log in logs] == [numbered(1)] * len(logs)


def test_a_busy_log_starves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: a topic that was never written because the only free worker stayed with another that is never done."""
    monkeypatch.setattr(writer_pool, "MAX_WORKERS", 1)
    files = FaultyFiles()
    with opened(files, 2) as (busy, other), Threads() as threads:
        is_served = threading.Event()

        def keep_busy(call: Call) -> None:
            if call.operation == "write_at" and call.path.startswith("/logs/0/") and not is_served.is_set():
                busy.append(payload(0))

        files.faults.on_call = keep_busy
        busy.append(payload(0))

        def append() -> None:
            other.append(payload(0), sync=True)
            is_served.set()

        threads.start(append)
        assert is_served.wait(LIMIT_SECONDS)


def test_a_full_disk_keeps_no_worker() -> None:
    """More logs than there are workers wait for room; one that has room is written, and all go on when there is."""
    files = FaultyFiles()
    count = writer_pool.MAX_WORKERS + 4
    with opened(files, count + 1) as logs:
        lucky = logs.pop()
        lucky.append(payload(0), sync=True)
        logs[0].append(payload(0), sync=True)

        def fail(call: Call) -> None:
            if call.operation == "write_at" and call.path.endswith(".log") and f"/{count}/" not in call.path:
                raise OSError(errno.ENOSPC, "No space left on device")

        files.faults.on_call = fail
        for log in logs:
            with pytest.raises(DiskFullError):
                log.append(payload(1), sync=True)
        assert lucky.append(payload(1), sync=True) == 1
        files.faults.on_call = None
        for log in logs:
            wait_until(partial(is_open, log), "room")
            log.flush()


def test_the_timer_syncs_all_that_is_due() -> None:
    """What nobody waits for is on the disk after the interval, in every log and whenever it was appended."""
    with opened(FaultyFiles(), 40, LogSettings(fsync_interval_ms=20)) as logs:
        for turn in range(3):
            for log in logs:
                log.append(payload(turn))
            wait_until(partial(are_durable, logs, turn + 1), "the interval")
            assert all(contents(log) == list(enumerate(payloads(turn + 1))) for log in logs)


@pytest.mark.parametrize("sync", [False, True])
def test_descriptors_do_not_grow_with_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool) -> None:
    """Lost: every log after the thousandth, for want of a descriptor."""
    monkeypatch.setattr(writer_pool, "MAX_IDLE_FILES", 2)
    monkeypatch.setattr(writer_pool, "MAX_UNSYNCED_FILES", 4)
    files = LocalFiles()
    with contextlib.ExitStack() as stack:
        logs = []
        for number in range(40):
            directory = tmp_path / str(number)
            directory.mkdir()
            log = Log.open(directory, NEVER_BY_ITSELF, files=files, is_covered=True)
            logs.append(stack.enter_context(contextlib.closing(log)))
        before = len(open_below(tmp_path))
        for turn in range(3):
            for log in logs:
                log.append(payload(turn), sync=sync)
        most = 2 if sync else 4
        wait_until(lambda: len(open_below(tmp_path)) <= before + most, "few descriptors")
        assert [contents(log) for log in logs] == [numbered(3)] * 40


def test_want_of_a_descriptor_is_waited_out() -> None:
    """It says so, refuses appends meanwhile, and goes on by itself with nothing lost."""
    files = FaultyFiles()
    with opened(files, 1) as (log,):
        log.append(payload(0), sync=True)
    with opened(files, 1) as (log,):
        files.fail("open", error=errno.EMFILE, times=None, matching="wal.*.log")
        with pytest.raises(ExhaustedError):
            log.append(payload(1), sync=True)
        files.heal()
        wait_until(partial(is_open, log), "a descriptor")
        log.flush()
        assert contents(log) == numbered(2)
