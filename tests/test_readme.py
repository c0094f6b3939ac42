"""The README keeps its word: what it shows runs, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clients.conftest import Service

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_SECONDS = 180


def blocks(kind: str) -> list[str]:
    """The fenced blocks of one kind, as `sh runs` in their first line."""
    return [text for info, text in BLOCK.findall(README) if info == kind]


def run(command: list[str], directory: Path) -> str:
    """What a command prints; it fails the test when the command fails."""
    shims = directory / "bin"
    shims.mkdir()
    shim = shims / "tidelog"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tidelog.cli.main "$@"\n', "utf-8")
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    finished = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_first_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    """A user who copies the first block sees exactly the second one."""
    (example,), (expected,) = blocks("python"), blocks("text prints")
    assert run([sys.executable, "-c", example], tmp_path) == expected


def test_the_first_example_fits_on_a_screen() -> None:
    """Ten to fifteen lines, so that one look is enough."""
    (example,) = blocks("python")
    assert 10 <= len(example.splitlines()) <= 15


def test_the_shell_example_works(tmp_path: Path) -> None:
    """A user who types the shell block gets the last two of a thousand lines, and a log without a problem."""
    (script,) = blocks("sh runs")
    printed = run(["sh", "-e", "-c", script], tmp_path)
    assert "999\n1000\n" in printed


def test_the_example_with_a_client_of_kafka_works(tmp_path: Path) -> None:
    """A user who starts the server and runs the block gets the message back."""
    (example,) = blocks("python serve")
    service = Service(tmp_path / "data").start()
    try:
        printed = run([sys.executable, "-c", example.replace("127.0.0.1:9092", service.kafka)], tmp_path)
    finally:
        service.close()
    assert printed == "b'created'\n"


def test_the_example_with_a_second_process_works(tmp_path: Path) -> None:
    """A user who starts the server and runs the block in another process gets the message back."""
    (example,) = blocks("python remote")
    service = Service(tmp_path / "data").start()
    try:
        printed = run([sys.executable, "-c", example.replace("http://127.0.0.1:8080", service.http)], tmp_path)
    finally:
        service.close()
    assert printed == "b'created'\n"


@pytest.mark.long
def test_the_spark_example_works(tmp_path: Path) -> None:
    """A user who runs the first block and then that of Spark sees the counts that Spark wrote to a topic."""
    (first,), (example,) = blocks("python"), blocks("python spark")
    printed = run([sys.executable, "-c", f"{first}\n{example}"], tmp_path)
    assert "shop/counts" in printed


def test_the_make_targets_exist() -> None:
    """Every `make` command that the README names is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)\b(?= |`)", README))
    assert named
    assert named <= targets


def test_the_benchmarks_that_it_names_exist() -> None:
    """Every figure names a program that reproduces it."""
    named = re.findall(r"`python (bench/\w+\.py)", README)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
