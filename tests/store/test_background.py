"""Work that comes back: never twice at once, soon when asked, and over when cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.log.workbench import LIMIT_SECONDS, wait_until

from tidelog.store import scheduler as background_module
from tidelog.store.scheduler import Background, Lazy, in_thread

LONG_SECONDS = 1000.0


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background(3, "test")
    yield background
    background.close()


class Work:
    """Counts its runs, notes how many run at once, and may be held up."""

    def __init__(self, pause_seconds: float = LONG_SECONDS) -> None:
        self.runs = 0
        self.at_once = 0
        self.most_at_once = 0
        self.started = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        self.pause_seconds = pause_seconds
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.started.set()
        assert self.may_end.wait(LIMIT_SECONDS)
        with self._lock:
            self.at_once -= 1
            self.runs += 1
        return self.pause_seconds


def test_a_task_runs_again_after_the_time_that_it_says(background: Background) -> None:
    """What it returns is the pause: many runs with a short one, a single run with a long one."""
    often, once = Work(0.001), Work()
    background.add(often)
    background.add(once)
    wait_until(lambda: often.runs >= 20, "20 runs")
    assert once.runs == 1


def test_the_first_run_may_wait(background: Background) -> None:
    """A delay is kept, and others run in the meantime."""
    late, now = Work(), Work()
    background.add(late, LONG_SECONDS)
    background.add(now)
    wait_until(lambda: now.runs == 1, "the other one")
    assert late.runs == 0


def test_a_task_never_runs_twice_at_once(background: Background) -> None:
    """However often it is asked for, and however many threads are free."""
    work = Work(0.0)
    task = background.add(work)

    def asked_again() -> bool:
        task.soon()
        return work.runs > 30

    wait_until(asked_again, "many runs")
    assert work.most_at_once == 1


def test_soon_runs_it_before_its_time(background: Background) -> None:
    """A task that wants to run in a quarter of an hour runs now."""
    work = Work()
    task = background.add(work)
    for runs in range(1, 30):
        wait_until(lambda runs=runs: work.runs >= runs, "a run")  # type: ignore[misc]  # binds the loop's value
        task.soon()
    wait_until(lambda: work.runs == 30, "the last run")


def test_soon_during_a_run_means_once_more(background: Background) -> None:
    """What was asked for while it ran may have come too late for that run."""
    work = Work()
    work.may_end.clear()
    task = background.add(work)
    assert work.started.wait(LIMIT_SECONDS)
    for _ in range(5):
        task.soon()
    work.may_end.set()
    wait_until(lambda: work.runs == 2, "a second run")
    time.sleep(0.05)
    assert work.runs == 2


def test_soon_at_the_very_end_of_a_run_is_not_lost(background: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of a run and the decision when to run next there is no moment in which asking is in vain."""
    work = Work()
    task = background.add(work)
    wait_until(lambda: work.runs == 1 and task.runs_in is None, "the first run")
    asked: list[int] = []
    finished: Callable[..., None] = background._finished

    def finish_and_ask(*arguments: object) -> None:
        finished(*arguments)
        if not asked:
            asked.append(1)
            task.soon()

    monkeypatch.setattr(background, "_finished", finish_and_ask)
    task.soon()
    wait_until(lambda: work.runs >= 3, "the run that was asked for last")


def test_an_error_does_not_end_it(
    background: Background, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is written to the log, and the work is done again after a pause, by the same threads."""
    monkeypatch.setattr(background_module, "_PAUSE_AFTER_ERROR_SECONDS", 0.001)
    runs: list[int] = []

    def fail() -> float:
        runs.append(1)
        raise ValueError("a bug")

    background.add(fail)
    wait_until(lambda: len(runs) >= 10, "ten failures")
    other = Work()
    background.add(other)
    wait_until(lambda: other.runs == 1, "another task")
    assert "a bug" in caplog.text


def test_cancelling_waits_for_a_run_under_way(background: Background) -> None:
    """When it returns, the work is not being done any more and is not done again."""
    work = Work(0.0)
    work.may_end.clear()
    task = background.add(work)
    assert work.started.wait(LIMIT_SECONDS)
    threading.Timer(0.1, work.may_end.set).start()
    task.cancel()
    assert (work.runs, work.at_once) == (1, 0)
    task.soon()
    time.sleep(0.05)
    assert work.runs == 1


def test_cancelling_does_not_wait_for_ever(background: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs in a dead store does not hold up whoever closes; the second that hangs is not waited for as long."""
    monkeypatch.setattr(background_module, "_NEW_PATIENCE_AFTER_SECONDS", LONG_SECONDS)
    background._patience_seconds = 0.2
    background._patience_ends = float("-inf")
    hanging = [Work(), Work()]
    for work in hanging:
        work.may_end.clear()
    tasks = [background.add(work) for work in hanging]
    assert all(work.started.wait(LIMIT_SECONDS) for work in hanging)
    begin = time.monotonic()
    for task in tasks:
        task.cancel()
        background._patience_seconds = LIMIT_SECONDS  # for the second none is left
    took_seconds = time.monotonic() - begin
    for work in hanging:
        work.may_end.set()
    assert took_seconds < LIMIT_SECONDS / 2


def test_a_task_that_does_not_run_is_cancelled_at_once(background: Background) -> None:
    """There is nothing to wait for."""
    work = Work()
    task = background.add(work, LONG_SECONDS)
    background._patience_seconds = LIMIT_SECONDS
    begin = time.monotonic()
    task.cancel()
    assert time.monotonic() - begin < LIMIT_SECONDS / 2
    assert work.runs == 0


def test_a_task_can_cancel_itself(background: Background) -> None:
    """From inside its own run it does not wait for itself."""
    runs: list[int] = []

    def once() -> float:
        runs.append(1)
        task.cancel()
        return 0.0

    task = background.add(once, LONG_SECONDS)  # not before it has a name
    task.soon()
    wait_until(lambda: bool(runs), "a run")
    time.sleep(0.05)
    assert len(runs) == 1


def test_closing_ends_everything(background: Background) -> None:
    """No task runs again, none can be added, and the threads end."""
    work = Work(0.001)
    task = background.add(work)
    wait_until(lambda: work.runs > 0, "a run")
    background.close()
    wait_until(lambda: not any(thread.is_alive() for thread in background._threads), "the threads to end")
    runs = work.runs
    task.soon()
    background.add(work)
    time.sleep(0.02)
    assert work.runs == runs
    background.close()


def test_one_that_hangs_does_not_hold_up_the_others(background: Background) -> None:
    """As long as there is a thread left, the rest goes on."""
    hanging, other = Work(), Work(0.001)
    hanging.may_end.clear()
    background.add(hanging)
    background.add(other)
    wait_until(lambda: other.runs > 5, "the other one")
    hanging.may_end.set()


def test_no_threads_without_work() -> None:
    """A directory that never has anything to do costs none."""
    background = Background(4, "idle")
    assert background._threads == []
    background.close()


def test_an_attempt_is_not_waited_for_for_long(background: Background) -> None:
    """It goes on by itself; one that ends in time is waited for, and what it raises is raised."""
    background._patience_seconds = 0.1
    may_end = threading.Event()
    begin = time.monotonic()
    background.attempt(lambda: assert_waited(may_end))
    assert time.monotonic() - begin < LIMIT_SECONDS / 2
    may_end.set()
    done: list[int] = []
    background._patience_seconds = LIMIT_SECONDS
    background._hopeless_until = float("-inf")
    background.attempt(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(ValueError, match="in vain"):
        background.attempt(fail_in_vain)


def test_attempts_after_one_that_hangs_are_not_waited_for(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many topics of a dead store are closed in little more than the time for one."""
    monkeypatch.setattr(background_module, "_NEW_PATIENCE_AFTER_SECONDS", LONG_SECONDS)
    background._patience_seconds = 0.1
    may_end = threading.Event()
    begin = time.monotonic()
    for _ in range(6):
        background.attempt(lambda: assert_waited(may_end))
        background._patience_seconds = LIMIT_SECONDS  # which the first has used up for the others
    may_end.set()
    assert time.monotonic() - begin < LIMIT_SECONDS / 2


def test_the_patience_is_for_all_that_are_cancelled_together(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that end one after the other, each nearly in time, do not add up."""
    monkeypatch.setattr(background_module, "_NEW_PATIENCE_AFTER_SECONDS", LONG_SECONDS)
    background._patience_seconds = 0.3
    background._patience_ends = float("-inf")
    late = [Work(), Work()]
    for work in late:
        work.may_end.clear()
    tasks = [background.add(work) for work in late]
    assert all(work.started.wait(LIMIT_SECONDS) for work in late)
    threading.Timer(0.1, late[0].may_end.set).start()
    begin = time.monotonic()
    for task in tasks:
        task.cancel()
        background._patience_seconds = LIMIT_SECONDS  # for the second there is what the first has left
    assert time.monotonic() - begin < LIMIT_SECONDS / 2
    for work in late:
        work.may_end.set()


def assert_waited(event: threading.Event) -> None:
    assert event.wait(LIMIT_SECONDS)


def fail_in_vain() -> None:
    raise ValueError("in vain")


def test_what_runs_in_a_thread_tells_how_it_went() -> None:
    """The result comes, or the error does."""
    in_thread(lambda: None, "fine").result(LIMIT_SECONDS)
    with pytest.raises(ValueError, match="in vain"):
        in_thread(fail_in_vain, "broken").result(LIMIT_SECONDS)


def test_work_goes_on_when_the_task_that_waits_for_it_is_cancelled() -> None:
    """Its thread ends with the work, and not with an error because nobody waits for the result any more."""
    may_end = threading.Event()
    working = in_thread(lambda: assert_waited(may_end), "slow")

    async def wait_in_vain() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(working))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(wait_in_vain())
    may_end.set()
    assert working.result(LIMIT_SECONDS) is None


class TestLazy:
    """A part that is built when it is first asked for."""

    def test_threads_that_ask_at_once_get_one_part(self) -> None:
        """The second one waits for the first to have built it."""
        began, goes_on, built = threading.Event(), threading.Event(), list[object]()

        def build() -> object:
            began.set()
            assert goes_on.wait(LIMIT_SECONDS)
            built.append(object())
            return built[-1]

        part = Lazy(build)
        got: list[object] = []
        threads = [threading.Thread(target=lambda: got.append(part())) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert began.wait(LIMIT_SECONDS)
        assert part.built is None
        goes_on.set()
        for thread in threads:
            thread.join()
        assert got == built * 4

    def test_closed_part_is_closed_however_late_it_is_built(self) -> None:
        """What nobody asked for is not built to be closed; asked for later, it is closed at once."""
        closed: list[str] = []
        early, late = Lazy(lambda: "early", closed.append), Lazy(lambda: "late", closed.append)
        assert early() == "early"
        early.close()
        late.close()
        assert closed == ["early"]
        assert late() == "late"
        assert closed == ["early", "late"]
