"""The log, killed at every write, sync, rename and removal: nothing that was promised is ever lost."""

from __future__ import annotations

import contextlib
import threading

import pytest
from tests.campaign import every
from tests.crash.promises import (
    CHECKING,
    DIRECTORY,
    OPERATIONS,
    TRUSTING,
    Appender,
    check_with,
    mixed_workload,
)

from tidelog.errors import TidelogError
from tidelog.log.log import Log
from tidelog.testing import Crash, CrashPlan, FaultyFiles, History, crash_everywhere, crash_machine_everywhere


def threaded_workload(files: FaultyFiles, history: History) -> None:
    log = Log.open(DIRECTORY, TRUSTING, files=files)
    try:
        run_threads(log, files, history)
    finally:
        log.close()


def run_threads(log: Log, files: FaultyFiles, history: History) -> None:
    """Four threads; what they raise after the crash is the crash."""
    errors: list[TidelogError] = []

    def run(number: int) -> None:
        try:
            Appender(log, history, f"thread{number}").run(12, seed=number)
        except TidelogError as error:
            if not files.crashed:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.deeper
def test_nothing_synced_is_lost_at_any_cut_point() -> None:
    """200 mixed appends, syncs, flushes and rotations, cut anywhere: the log opens, keeps its word and goes on."""
    step = every(7)
    summary = crash_everywhere(mixed_workload, check_with(TRUSTING), CrashPlan(every=step))
    assert summary.cut_points > OPERATIONS // step
    assert summary.checks > 3 * OPERATIONS // step
    assert summary.abandoned_threads == 0


@pytest.mark.deeper
def test_nothing_is_lost_where_opening_checks_every_frame() -> None:
    """The same without trust in the checkpoint, with other remains, at some of the cut points."""
    summary = crash_everywhere(mixed_workload, check_with(CHECKING), CrashPlan(every=every(15), seeds=2, seed=1000))
    assert summary.abandoned_threads == 0


@pytest.mark.deeper
def test_nothing_is_lost_under_concurrent_appends() -> None:
    """Threads that append and wait at once keep their order and their synced messages."""
    summary = crash_everywhere(threaded_workload, check_with(CHECKING), CrashPlan(every=every(2)))
    assert summary.cut_points > 10
    assert summary.abandoned_threads == 0


@pytest.mark.parametrize("crash_at", range(12, 300, 24))
def test_opening_can_itself_be_crashed(crash_at: int) -> None:
    """A log that dies while it recovers, at any call, is found as well as one that did not."""
    files, history = FaultyFiles(crash_at=crash_at), History()
    with contextlib.suppress(Crash, TidelogError):
        mixed_workload(files, history)
    torn = files.after_crash("tear", seed=crash_at, torn_bytes=files.in_flight_bytes // 2)

    def recover(files: FaultyFiles, _: History) -> None:
        Log.open(DIRECTORY, TRUSTING, files=files).close()

    def check(files: FaultyFiles, _: History) -> None:
        check_with(TRUSTING)(files, history.copy())

    summary = crash_machine_everywhere(lambda call: torn.after_crash("keep", crash_at=call), recover, check)
    assert summary.cut_points > 1  # where the checkpoint vouches for all of it, opening changes hardly anything
