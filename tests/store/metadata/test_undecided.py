"""Writes without an answer: found again when they were done, made again when they were not, never reported wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from tidelog.errors import ConflictError, StoreUnavailableError
from tidelog.store.metadata import base as undecided
from tidelog.store.metadata.base import settle

DONE = {"key": "7"}


class Server:
    """Answers writes and reads as the scripts say."""

    def __init__(self, writes: list[object], reads: list[object]) -> None:
        self.writes = writes
        self.reads = reads

    def settle(self) -> Mapping[str, str]:
        return settle(lambda: answer(self.writes), lambda: answer(self.reads))  # type: ignore[arg-type,return-value]


def answer(script: list[object]) -> object:
    """The next answer of a script; an exception is raised."""
    said = script.pop(0)
    if isinstance(said, Exception):
        raise said
    return said


def silence() -> StoreUnavailableError:
    return StoreUnavailableError("no answer")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undecided, "FIRST_PAUSE_SECONDS", 0.0)


def test_an_answer_is_the_outcome() -> None:
    """Nothing is read back."""
    assert Server([DONE], []).settle() == DONE
    with pytest.raises(ConflictError):
        Server([ConflictError("x")], []).settle()


def test_a_write_that_was_done_is_not_made_again() -> None:
    """It is found by reading back."""
    server = Server([silence(), DONE], [DONE])
    assert server.settle() == DONE
    assert server.writes == [DONE]


def test_a_write_that_was_not_done_is_made_again() -> None:
    """As often as the store fails to answer, within bounds."""
    assert Server([silence(), silence(), DONE], [None, silence()]).settle() == DONE


def test_a_writer_does_not_lose_against_itself() -> None:
    """The first attempt arrives late, and the second conflicts with it."""
    assert Server([silence(), ConflictError("x")], [None, DONE]).settle() == DONE


def test_a_conflict_after_silence_proves_nothing() -> None:
    """The first attempt may have been done and replaced since: that is no conflict, it is not known."""
    with pytest.raises(StoreUnavailableError, match="not known"):
        Server([silence(), ConflictError("x")], [None, None]).settle()


def test_a_store_that_stays_silent_leaves_it_undecided() -> None:
    """The caller hears that it is not known, after a bounded number of attempts."""
    server = Server([silence() for _ in range(9)], [silence() for _ in range(9)])
    with pytest.raises(StoreUnavailableError, match="not known"):
        server.settle()
    assert len(server.writes) == 9 - undecided.ATTEMPTS


def test_no_attempt_is_begun_when_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for a minute by itself is not asked four times; what it left is still looked for."""
    monkeypatch.setattr(undecided, "PATIENCE_SECONDS", -1.0)
    server = Server([silence(), DONE], [None])
    with pytest.raises(StoreUnavailableError, match="not known"):
        server.settle()
    assert (server.writes, server.reads) == ([DONE], [])


def test_other_errors_pass() -> None:
    """What is wrong with the call itself is not tried again."""
    calls: list[Callable[[], object]] = []

    def write() -> Mapping[str, str]:
        calls.append(write)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        settle(write, lambda: None)
    assert len(calls) == 1
