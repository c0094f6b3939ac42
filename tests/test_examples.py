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


# The task of Airflow, run with a command that ends as the test says


AIRFLOW = """
class AirflowException(Exception): pass
class AirflowFailException(AirflowException): pass
"""
SDK = """
import contextlib
tasks = []
DAG = lambda *_, **__: contextlib.nullcontext()
def task(function, **how):
    tasks.append((function, how))
    return lambda: None
"""
RUN_TASK = """
import runpy, sys
from airflow import sdk
runpy.run_path(sys.argv[1])
((function, how),) = sdk.tasks
assert how["retries"] > 0
try:
    function()
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, ""), (4, "AirflowException"), (1, "AirflowFailException"), (2, "AirflowFailException")]
)
def test_airflow_tries_again_what_may_pass_and_fails_the_rest(tmp_path: Path, code: int, outcome: str) -> None:
    """A pipeline that is run elsewhere is no failure of the night, and one that found damage is not hidden by it."""
    for name, text in (("airflow/__init__.py", ""), ("airflow/exceptions.py", AIRFLOW), ("airflow/sdk.py", SDK)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    program = tmp_path / "tidelog"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit {code}\n')
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", RUN_TASK, str(ROOT / "examples" / "airflow_pipeline.py")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, outcome), done.stderr
    assert (tmp_path / "asked").read_text() == "pipeline run /etc/tidelog/pipeline.toml --json\n"
