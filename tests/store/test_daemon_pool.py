"""The pool of threads for questions to a store."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest
from tests.log.workbench import run_python

from tidelog.store import scheduler as daemon_pool
from tidelog.store.scheduler import DaemonPool


def test_results_and_errors_come_back() -> None:
    """A call's result is the future's, and so is what it raised; `map` keeps the order."""
    pool = DaemonPool(2, "test")
    assert pool.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result()
    assert list(pool.map(str, range(50))) == [str(number) for number in range(50)]
    pool.shutdown()


def test_no_more_at_once_than_wanted() -> None:
    """However much is submitted, so many calls run at the same time and no more."""
    pool, guard, running, most = DaemonPool(3, "test"), threading.Lock(), 0, 0
    three = threading.Event()

    def work() -> None:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
            if running == 3:
                three.set()
        assert three.wait(120)
        with guard:
            running -= 1

    for call in [pool.submit(work) for _ in range(20)]:
        call.result()
    pool.shutdown()
    assert most == 3


def test_thread_that_took_a_call_and_has_not_begun_it_is_not_idle() -> None:
    """Two uploads ran where three were asked for: a call was left to a thread that had just taken another one."""

    class Hesitant(queue.SimpleQueue):  # type: ignore[type-arg]
        """What was taken is kept back until all calls are submitted."""

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            call = super().get(block, timeout)
            taken.set()
            assert all_are_submitted.wait(120)
            return call

    pool, together = DaemonPool(3, "test"), threading.Barrier(3)
    taken, all_are_submitted = threading.Event(), threading.Event()
    pool._queue = Hesitant()
    calls = [pool.submit(together.wait, 60)]
    assert taken.wait(120)
    calls += [pool.submit(together.wait, 60) for _ in range(2)]
    all_are_submitted.set()
    assert sorted(call.result() for call in calls) == [0, 1, 2]
    pool.shutdown()


def test_shutdown_cancels_what_waits() -> None:
    """What is under way ends, what waits is cancelled if asked for, and nothing is taken any more."""
    pool, may_end = DaemonPool(1, "test"), threading.Event()
    first, second = pool.submit(may_end.wait, 60), pool.submit(may_end.wait, 60)
    while not first.running():
        time.sleep(0.001)
    pool.shutdown(wait=False, cancel_futures=True)
    may_end.set()
    assert first.result()
    with pytest.raises(CancelledError):
        second.result()
    with pytest.raises(RuntimeError):
        pool.submit(may_end.wait, 60)
    pool.shutdown()


def test_process_ends_although_a_call_hangs() -> None:
    """A call that does not return does not keep the process from ending."""
    begin = time.monotonic()
    program = (
        "import time; from tidelog.store.scheduler import DaemonPool; DaemonPool(1, 'test').submit(time.sleep, 600)"
    )
    assert run_python(program).returncode == 0
    assert time.monotonic() - begin < 300


def test_threads_that_nobody_needs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was not closed leaves no threads behind, and starts new ones when it is asked again."""
    monkeypatch.setattr(daemon_pool, "_IDLE_SECONDS", 0.01)
    pool = DaemonPool(2, "forgotten")
    for number in range(50):
        assert pool.submit(lambda one=number: one).result(120) == number  # type: ignore[misc]
        time.sleep(0.001 * (number % 15))
    deadline = time.monotonic() + 120
    while any(thread.name.startswith("forgotten") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pool.submit(lambda: "again").result(120) == "again"
    pool.shutdown()
