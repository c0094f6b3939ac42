"""The guard of the paths that every message takes says what has become more than it may."""

from __future__ import annotations

import sys

import pytest
from tests.bench.test_bench import module

GUARD = module("guard")
WRITTEN = {"instructions": {"append": 10_000, "scan": 500}, "append_over_copy": 0.74}


def test_guard_lets_pass_what_is_within_its_limits() -> None:
    """Fewer instructions, 15 % more, and an operation that nothing is written down for are no finding."""
    found = {"instructions": {"append": 11_500, "scan": 400, "new": 10**9}, "append_over_copy": 3.7}
    assert GUARD.judged(found, WRITTEN) == []


def test_guard_catches_one_more_copy_and_a_sleep() -> None:
    """16 % more instructions fail, with the operation named; so does an append that sleeps for 50 us, which takes 86
    times a copy of memory and no more instructions than before."""
    (told,) = GUARD.judged({"instructions": {"append": 11_600, "scan": 500}, "append_over_copy": 0.74}, WRITTEN)
    assert told == "append costs 11,600 instructions, 16% more than the 10,000 before"
    (told,) = GUARD.judged({"instructions": {"append": 10_000, "scan": 500}, "append_over_copy": 86.0}, WRITTEN)
    assert "it waits for something" in told


@pytest.mark.parametrize(("variable", "code"), [(None, 0), ("true", 1)])
def test_missing_valgrind_is_said_and_fails_in_ci(
    variable: str | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine for development may have none; CI must not be green because it counts nothing."""
    monkeypatch.delenv("CI", raising=False)
    if variable is not None:
        monkeypatch.setenv("CI", variable)
    monkeypatch.setattr(GUARD.shutil, "which", lambda name: None)
    monkeypatch.setattr(GUARD, "append_over_copy", lambda: 0.0)
    monkeypatch.setattr(sys, "argv", ["guard.py"])
    assert GUARD.main() == code
    assert "there is no valgrind: instructions are not counted" in capsys.readouterr().err
