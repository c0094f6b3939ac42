"""The files in deploy/: what they call exists, and systemd accepts its unit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
UNIT = DEPLOY / "systemd" / "tidelog.service"
CONTAINER = DEPLOY / "container" / "Containerfile"


def options(text: str) -> set[str]:
    """The options of `tidelog serve` that a command line names."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The options that `tidelog serve` has."""
    command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--help"]
    return options(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_unit_calls_options_that_serve_has(known: set[str]) -> None:
    """A renamed option would keep the service from starting."""
    (line,) = re.findall(r"^ExecStart=(.*)", UNIT.read_text("utf-8"), re.MULTILINE)
    assert " serve " in line
    assert options(line) == {"--dir"} <= known


def test_container_calls_options_that_serve_has(known: set[str]) -> None:
    """Its command is what `tidelog serve` takes, and lets other machines connect by name only."""
    calls = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])", CONTAINER.read_text("utf-8"), re.MULTILINE)
    words = [word for call in calls for word in json.loads(call)]
    assert words[:4] == ["tini", "--", "tidelog", "serve"]
    assert {"--allow-plaintext", "--allow-anonymous"} <= options(" ".join(words)) <= known


def test_compose_publishes_to_loopback_only() -> None:
    """The example has no authentication, so no other machine may reach it."""
    (ports,) = re.findall(r"ports: (\[.*\])", (DEPLOY / "container" / "compose.yaml").read_text("utf-8"))
    assert all(one.startswith("127.0.0.1:") for one in json.loads(ports))


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` finds no fault; where there is none, the sections and keys are looked at."""
    text = UNIT.read_text("utf-8")
    assert re.findall(r"^\[(\w+)\]", text, re.MULTILINE) == ["Unit", "Service", "Install"]
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        copy = tmp_path / UNIT.name
        copy.write_text(text.replace("/opt/tidelog/bin/tidelog", "/bin/true"), "utf-8")
        result = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False)
        mine = [line for line in result.stderr.splitlines() if UNIT.name in line]
        assert mine == []
