"""A thread that ticks tells whether the process slept: ticks that were missed are noticed, whoever looks first."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from tests.log.workbench import lines_of, start_python, wait_until

from tidelog.cold import owned_log as pulse_module
from tidelog.cold.owned_log import ASLEEP_SECONDS, TICK_SECONDS, Pulse


def test_it_ticks() -> None:
    """While the process is awake the last tick is never long ago."""
    pulse = Pulse()
    pulse.start()
    first = pulse.last
    wait_until(lambda: pulse.last > first, "a tick")


def test_it_is_started_once() -> None:
    """Many topics share one thread."""
    pulse = Pulse()
    before = ticking()
    for _ in range(5):
        pulse.start()
    assert len(ticking() - before) == 1


def ticking() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tidelog-pulse"}


def test_missed_ticks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump of the clock between two ticks is a sleep."""
    moment = [100.0]
    monkeypatch.setattr(pulse_module, "now", lambda: moment[0])
    pulse = Pulse()
    pulse.start()
    moment[0] += ASLEEP_SECONDS + 0.1
    wait_until(lambda: pulse.sleeps == 1, "the sleep to be noticed")
    wait_until(lambda: pulse.last == moment[0], "the tick")
    moment[0] += TICK_SECONDS
    wait_until(lambda: pulse.last == moment[0], "the next tick")
    assert pulse.sleeps == 1


PROGRAM = """
import sys, time
from tidelog.cold.owned_log import pulse
pulse.start()
time.sleep(0.3)
before = pulse.sleeps
print("ready", flush=True)
sys.stdin.readline()
while pulse.sleeps == before:
    time.sleep(0.01)
print("slept", flush=True)
"""


def test_a_process_that_was_stopped_knows_it() -> None:
    """After SIGSTOP and SIGCONT the sleep has been counted."""
    process = start_python(PROGRAM)
    try:
        lines = lines_of(process)
        assert next(lines) == "ready"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(ASLEEP_SECONDS + 0.2)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert next(lines) == "slept"
    finally:
        process.kill()
        process.communicate()
