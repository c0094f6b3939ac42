"""Every example runs, as its reader would run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tidelog

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NAMED_IN = (ROOT / "README.md").read_text("utf-8")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
TIMEOUT_SECONDS = 120


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    """It ends well, says something, and warns about nothing."""
    command = [sys.executable, "-W", "error", str(path)]
    result = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


def test_there_are_examples() -> None:
    """A directory that was moved would otherwise pass as one without faults."""
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_named_in_the_readme(path: Path) -> None:
    """Whoever looks for one finds it."""
    assert f"(examples/{path.name})" in NAMED_IN


# The transfer between two topics, killed where it does not expect it


def values_of(directory: Path, topic: str) -> list[bytes]:
    with tidelog.open(directory, read_only=True) as log:
        return [message.value or b"" for message in log.topic(topic).read()] if log.has_topic(topic) else []


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("wal.*.log"))


def start_transfer(directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "examples" / "exactly_once_transfer.py"), "work", str(directory)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_a_killed_transfer_neither_loses_nor_doubles(tmp_path: Path) -> None:
    """A worker that is killed while it writes, again and again, leaves what the next one goes on from."""
    count = 5000
    expected = [b"V%d" % number for number in range(count)]
    with tidelog.open(tmp_path) as log:
        log.topic("bank/in").append_many([b"v%d" % number for number in range(count)], sync=True)
    for _ in range(2):
        before = size_of(tmp_path / "bank/out")
        with start_transfer(tmp_path) as worker:
            while size_of(tmp_path / "bank/out") < before + 20_000 and worker.poll() is None:
                time.sleep(0.001)
            worker.kill()
        if worker.returncode == 0:
            break  # on a busy machine it may be done before it is killed
        assert worker.returncode == -signal.SIGKILL
        stored = values_of(tmp_path, "bank/out")
        assert stored
        assert stored == expected[: len(stored)]
    with start_transfer(tmp_path) as worker:
        _, problems = worker.communicate(timeout=TIMEOUT_SECONDS)
    assert worker.returncode == 0, problems.decode()
    assert values_of(tmp_path, "bank/out") == expected
