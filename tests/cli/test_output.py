"""Tables, records and progress, on a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, environment

from tidelog.cli.output import human_bytes, plain_text, terminal_text


def run_on_a_terminal(arguments: list[str], directory: Path) -> str:
    """What a command writes when stdout and stderr are a terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "tidelog.cli.main", *arguments]
    variables = environment(TERM="xterm", COLUMNS="120")
    child = subprocess.Popen(command, cwd=directory, stdin=follower, stdout=follower, stderr=follower, env=variables)
    os.close(follower)
    parts = []
    try:
        while part := os.read(leader, 65536):
            parts.append(part)
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(leader)
    assert child.wait(60) == 0
    return b"".join(parts).decode()


def test_a_terminal_gets_tables(cli: Cli, tmp_path: Path) -> None:
    """On a terminal a list is a drawn table with sizes for people."""
    cli("produce", "a/b", stdin=b"x" * 5000 + b"\n")
    shown = run_on_a_terminal(["topic", "list"], tmp_path)
    assert "next offset" in shown
    assert "4.9 KiB" in shown
    assert "\t" not in shown


def test_long_work_has_a_bar_on_a_terminal(cli: Cli, tmp_path: Path) -> None:
    """Progress is drawn on stderr when that is a terminal."""
    cli("produce", "a/b", stdin=b"x\n" * 1000)
    assert "verifying a/b" in run_on_a_terminal(["verify"], tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "true"), (1.5, "1.500"), ("a\tb\nc\\", "a\\tb\\nc\\\\"), ([1, 2], "1,2"), ({"a": "b"}, "a=b")],
)
def test_values_in_a_line(value: object, text: str) -> None:
    """A value never breaks the line or the column it stands in."""
    assert plain_text(value) == text


def test_values_for_people() -> None:
    """Numbers are grouped, and sizes have a unit."""
    assert terminal_text("messages", 1234567) == "1,234,567"
    assert terminal_text("total_bytes", 1536) == "1.5 KiB"
    assert [terminal_text("rate", rate) for rate in (1234.6, 12.345, 0.1234)] == ["1,235", "12.3", "0.12"]
    assert (human_bytes(0), human_bytes(1 << 62)) == ("0 B", "4096.0 PiB")
