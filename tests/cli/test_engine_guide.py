"""The guide to the engine keeps its word: what it types works, and what it names is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.engine.test_engine_statistics import METRICS, value_of

import tidelog
from tidelog import errors
from tidelog.cli.engine.group import COMMANDS

ROOT = Path(__file__).resolve().parent.parent.parent
GUIDE = (ROOT / "docs/tutorial/engine.md").read_text("utf-8")
SHELL = re.compile(r"^```sh runs\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_shell_example_works(tmp_path: Path) -> None:
    """A user who types it sees both versions of the object, and an engine without a problem."""
    (script,) = SHELL.findall(GUIDE)
    shim = tmp_path / "bin" / "tidelog"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tidelog.cli.main "$@"\n', "utf-8")
    shim.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "MEOWmeow" in done.stdout
    assert "problems\t0" in done.stdout


def test_every_command_is_explained() -> None:
    """The table has them all, and no other."""
    table = GUIDE.partition("\n## Commands\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"(?:tidelog engine |, `)([a-z-]+)(?= |`)", table))
    assert {name for name in COMMANDS if name not in named} == set()


def test_every_number_to_watch_is_named_and_is_there(tmp_path: Path) -> None:
    """Whatever the table names can be read from the statistics of an engine with a store."""
    table = GUIDE.partition("\n## What to watch\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_.]+)`", table))
    assert set(METRICS.values()) <= named
    with tidelog.open_engine(tmp_path / "e", store=f"file://{tmp_path}/store") as engine:
        found = engine.statistics()
        for path in named:
            value_of(found, path)


def test_the_errors_that_it_names_exist() -> None:
    """Under these names, in `tidelog`."""
    table = GUIDE.partition("\n## Errors\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+Error)`", table))
    assert named
    assert {name for name in named if not hasattr(errors, name) or not hasattr(tidelog, name)} == set()
