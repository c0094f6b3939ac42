"""The guard of the paths that every message takes says what has become more than it may."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.bench.test_bench import module

import tidelog

GUARD = module("guard")
SOURCE = Path(tidelog.__file__).parent
WRITTEN = {"instructions": {"append": 10_000, "scan": 500}, "waits": {"append": 0}, "append_over_copy": 0.74}
SLEEP_SECONDS = 50e-6


def judged(**found: Any) -> list[str]:
    """What the guard says of something that was found, and nothing else."""
    nothing = {"instructions": {}, "waits": {}, "append_over_copy": 0.0}
    return list(GUARD.judged({**nothing, **found}, WRITTEN))


def test_guard_lets_pass_what_is_within_its_limits() -> None:
    """Fewer instructions, 15 % more, and an operation that nothing is written down for are no finding."""
    counts = {"append": 11_500, "scan": 400, "new": 10**9}
    assert judged(instructions=counts, waits={"append": 0, "new": 9}, append_over_copy=3.7) == []


def test_guard_says_what_has_become_more() -> None:
    """16 % more instructions, one more wait, or an append that takes too long for what it does: each is named."""
    (told,) = judged(instructions={"append": 11_600, "scan": 500})
    assert told == "append costs 11,600 instructions, 16% more than the 10,000 before"
    (told,) = judged(waits={"append": 1})
    assert told == "append gives the processor away 1 times, and 0 before: it sleeps or waits"
    (told,) = judged(append_over_copy=86.0)
    assert "it waits for something" in told


@pytest.mark.parametrize(
    ("name", "owner", "method"),
    [
        ("append", tidelog.Topic, "append"),
        ("append_many", tidelog.Topic, "append_many"),
        ("read", tidelog.Topic, "read"),
    ],
)
def test_sleep_of_50_us_that_is_planted_is_caught(
    name: str,
    owner: type,
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The guard passes, and fails once the call sleeps: instructions are not what tells it."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(GUARD.shutil, "which", lambda name: None)
    monkeypatch.setattr(GUARD, "WRITTEN", tmp_path / "guard.json")
    monkeypatch.setattr(sys, "argv", ["guard.py", "--only", name, "--write"])
    assert GUARD.main() == 0
    sound = getattr(owner, method)

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(SLEEP_SECONDS)
        return sound(*given, **named)

    monkeypatch.setattr(owner, method, slow)
    monkeypatch.setattr(sys, "argv", ["guard.py", "--only", name])
    assert GUARD.main() == 1
    assert f"{name} gives the processor away" in capsys.readouterr().out


IN_SCAN = ("log/frame.py", "_native.scan_frames(buffer,", "_native.scan_frames(bytes(memoryview(buffer)),")
IN_READER = ("log/segment.py", "result = scan(buffer, 0,", "result = scan(bytes(memoryview(buffer)), 0,")
IN_MESSAGES = (
    "topics/message.py",
    "frames.buffer, frames.positions",
    "bytes(memoryview(frames.buffer)), frames.positions",
)
IN_COLUMNS = ("topics/columns.py", "places = frames.buffer, ", "places = bytes(memoryview(frames.buffer)), ")
IN_ENGINE = (
    "engine/wal/files.py",
    "handle.read_ranges(0, joined.ranges))",
    "bytes(memoryview(handle.read_ranges(0, joined.ranges))))",
)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("scan", IN_SCAN),
        pytest.param("read", IN_READER, marks=pytest.mark.long),
        pytest.param("read", IN_MESSAGES, marks=pytest.mark.long),
        pytest.param("columns", IN_COLUMNS, marks=pytest.mark.long),
        pytest.param("engine_scan", IN_ENGINE, marks=pytest.mark.long),
    ],
)
def test_copy_that_is_planted_is_caught(
    name: str, planted: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more copy of what is read costs more instructions than may be, wherever between the file and the reader."""
    sound = GUARD.count_instructions([name])
    shutil.copytree(SOURCE, tmp_path / "tidelog", ignore=shutil.ignore_patterns("__pycache__"))
    file, old, new = planted
    path = tmp_path / "tidelog" / file
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (told,) = GUARD.judged(
        {"instructions": GUARD.count_instructions([name]), "waits": {}, "append_over_copy": 0.0},
        {"instructions": sound, "append_over_copy": 1.0},
    )
    assert told.startswith(f"{name} costs")


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
