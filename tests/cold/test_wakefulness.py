"""An owner that was asleep asks before it goes on; one that cannot ask goes on all the same."""

from __future__ import annotations

import threading
import time

import pytest
from tests.log.workbench import LIMIT_SECONDS

from tidelog.cold import owned_log as wakefulness_module
from tidelog.cold.owned_log import PauseDetector, Pulse
from tidelog.errors import AccessDeniedError, DataError, FencedError, StoreUnavailableError, TidelogError


class Still(Pulse):
    """A pulse that a test moves by hand."""

    def start(self) -> None:
        """No thread."""


class Bench:
    """Time that stands still, and a store that counts the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment = 100.0
        self.pulse = Still()
        self.pulse.last = self.moment
        self.questions = 0
        self.error: TidelogError | None = None
        monkeypatch.setattr(wakefulness_module, "now", lambda: self.moment)
        monkeypatch.setattr(wakefulness_module, "pulse", self.pulse)
        self.wakefulness = PauseDetector(self.verify)

    def verify(self) -> None:
        self.questions += 1
        if self.error is not None:
            raise self.error

    def sleep(self, *, noticed: bool) -> None:
        """The process stood still; the ticking thread has noticed it already, or not yet."""
        self.moment += 10
        if noticed:
            self.pulse.sleeps += 1
            self.pulse.last = self.moment


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_nobody_asks_while_the_process_is_awake(bench: Bench) -> None:
    """A check costs two comparisons."""
    for _ in range(100):
        bench.wakefulness.check()
        bench.moment += 0.1
        bench.pulse.last = bench.moment
    assert bench.questions == 0


@pytest.mark.parametrize("noticed", [True, False])
def test_a_sleep_is_asked_about_once(bench: Bench, noticed: bool) -> None:
    """Whether the ticking thread was faster or the appending one: one question, then it goes on."""
    bench.sleep(noticed=noticed)
    for _ in range(10):
        bench.wakefulness.check()
    assert bench.questions == 1


@pytest.mark.parametrize("noticed", [True, False])
def test_an_owner_that_was_replaced_meanwhile_stops(bench: Bench, noticed: bool) -> None:
    """Every append hears of it, not only the first one."""
    bench.error = FencedError("somebody else owns it")
    for _ in range(3):
        bench.sleep(noticed=noticed)
        with pytest.raises(FencedError):
            bench.wakefulness.check()


def test_a_second_sleep_is_asked_about_again(bench: Bench) -> None:
    """What was true before the nap need not be afterwards."""
    for expected in (1, 2, 3):
        bench.sleep(noticed=True)
        bench.wakefulness.check()
        assert bench.questions == expected


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailableError("no answer"),
        AccessDeniedError("the keys expired while the machine was suspended"),
        DataError("the owner's entry cannot be understood"),
    ],
)
def test_a_store_that_cannot_tell_does_not_block_appends(bench: Bench, error: TidelogError) -> None:
    """What is accepted is on this disk, and a replaced owner ships none of it."""
    bench.error = error
    bench.sleep(noticed=True)
    for _ in range(3):
        bench.wakefulness.check()
    assert bench.questions == 1


def test_a_store_that_hangs_holds_up_one_append_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question stays open, others do not wait for it again, and its answer counts when it comes."""
    monkeypatch.setattr(wakefulness_module, "_PATIENCE_SECONDS", 0.1)
    bench = Bench(monkeypatch)
    may_answer = threading.Event()

    def hang() -> None:
        bench.questions += 1
        assert may_answer.wait(LIMIT_SECONDS)

    bench.wakefulness = PauseDetector(hang)
    begin = time.monotonic()
    for _ in range(5):
        bench.sleep(noticed=True)
        bench.wakefulness.check()
    assert time.monotonic() - begin < LIMIT_SECONDS / 2
    assert bench.questions == 1
    may_answer.set()
