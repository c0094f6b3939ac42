"""Tables, records and progress, on a terminal and in a pipe."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli, environment

import tidelog
from tidelog.cli.app import COMMANDS, parser
from tidelog.cli.demo import steps as demo_steps
from tidelog.cli.dev_s3 import SeaweedServer
from tidelog.cli.output import Output, counted, plain_text, table_width, terminal_text, wrapped
from tidelog.cli.pipeline import job as pipeline_job
from tidelog.units import human_bytes


def run_on_a_terminal(arguments: list[str], directory: Path, columns: int = 120) -> str:
    """What a command writes when stdout and stderr are a terminal."""
    code, shown = type_on_a_terminal(arguments, directory, b"", columns)
    assert code == 0
    return shown


def type_on_a_terminal(arguments: list[str], directory: Path, typed: bytes, columns: int) -> tuple[int, str]:
    """The exit code and what is seen, when somebody sits at the terminal and types."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "tidelog.cli.main", *arguments]
    variables = environment(TERM="xterm", COLUMNS=str(columns))
    child = subprocess.Popen(command, cwd=directory, stdin=follower, stdout=follower, stderr=follower, env=variables)
    os.close(follower)
    os.write(leader, typed)
    parts = []
    try:
        while part := os.read(leader, 65536):
            parts.append(part)
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(leader)
    return child.wait(60), b"".join(parts).decode()


def visible_lines(shown: str) -> list[str]:
    """Without what moves the cursor and sets colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n").replace("\r", "\n").split("\n")


def groups(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The command itself and every one below it that has commands of its own."""
    commands = getattr(command, "commands", None)
    if commands is not None:
        yield path
        for name, one in commands.items():
            yield from groups(one, (*path, name))


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that has none below it."""
    commands = getattr(command, "commands", None)
    if commands is None:
        yield path
    for name, one in (commands or {}).items():
        yield from commands_of(one, (*path, name))


def test_summaries_fit_their_column(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns no summary of a command is cut off, and each is one line."""
    monkeypatch.setenv("COLUMNS", "80")
    seen = 0
    for path in groups(parser(COMMANDS)):
        lines = iter(cli(*path, "--help").lines)
        assert any(line == "Commands:" for line in lines), path
        for line in itertools.takewhile(lambda line: line.startswith("  "), lines):
            assert re.fullmatch(r"  [a-z0-9-]+  +[^ ].*[^.…,:;]\.?", line), (path, line)
            assert len(line) <= 80
            seen += 1
    assert seen > 60


def test_examples_fit_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 columns: they are the lines of a help that are never wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
    for path in commands_of(parser(COMMANDS)):
        assert [line for line in cli(*path, "--help").lines if len(line) > 80] == [], path


def test_a_terminal_gets_tables(cli: Cli, tmp_path: Path) -> None:
    """On a terminal a list is a drawn table with sizes for people."""
    cli("produce", "a/b", stdin=b"x" * 5000 + b"\n")
    shown = run_on_a_terminal(["topic", "list"], tmp_path)
    assert "next offset" in shown
    assert "5.0 KiB" in shown
    assert "\t" not in shown


def test_long_work_has_a_bar_on_a_terminal(cli: Cli, tmp_path: Path) -> None:
    """Progress is drawn on stderr when that is a terminal."""
    cli("produce", "a/b", stdin=b"x\n" * 1000)
    assert "verifying a/b" in run_on_a_terminal(["verify"], tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "true"),
        (1.5, "1.500"),
        (123456.7, "123457"),
        ("a\tb\nc\\", "a\\tb\\nc\\\\"),
        ([1, 2], "1,2"),
        ({"a": "b"}, "a=b"),
    ],
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
    assert (counted(1, "file"), counted(2000, "file")) == ("1 file", "2,000 files")


@pytest.mark.parametrize("columns", [40, 80, 100, 160])
def test_no_name_is_broken_however_small_the_terminal(cli: Cli, tmp_path: Path, columns: int) -> None:
    """The table of files keeps to the width of the terminal: fewer columns, and in the end a line a property."""
    cli("produce", "a/b", stdin=b"x\n" * 2000)
    lines = visible_lines(run_on_a_terminal(["inspect", "a/b"], tmp_path, columns))
    assert any(re.search(r"wal\.0000000000\.log\b", line) for line in lines)
    assert any("2,000" in line for line in lines)
    assert max(map(len, lines)) <= columns


def test_the_width_of_a_table() -> None:
    """Headings may be broken at words and prose may be wrapped; nothing else is."""
    rows = [{"last_time": "12:00", "detail": "two words"}]
    assert table_width(["last_time"], rows) == 5
    assert table_width(["last_time", "detail"], rows) == 5 + 1 + 6


def test_lines_are_broken_at_words_and_never_within_a_command() -> None:
    """What is in backticks stays in one piece, so that it can be pasted."""
    text = "mend it with `tidelog repair shop/orders --dir somewhere` and go on"
    assert wrapped(text, 30, "  ").split("\n") == [
        "mend it with",
        "  `tidelog repair shop/orders --dir somewhere`",
        "  and go on",
    ]


def test_problems_fit_the_terminal(cli: Cli, tmp_path: Path) -> None:
    """A long line of verify is broken between words; in a pipe it is one line."""
    cli("produce", "a/b", stdin=b"x" * 50 + b"\n" + b"y\n" * 100)
    (path,) = (tmp_path / "data/a/b").glob("wal.*.log")
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    (piped,) = [line for line in cli("verify").err.splitlines() if line.startswith("problem: ")]
    _, shown = type_on_a_terminal(["verify"], tmp_path, b"", 50)
    lines = visible_lines(shown)
    begin = next(number for number, line in enumerate(lines) if line.startswith("problem: "))
    assert len(piped) > 50
    assert " ".join(lines[begin:]).startswith(piped)
    assert len(lines[begin]) <= 50


def test_a_no_deletes_nothing(cli: Cli, tmp_path: Path) -> None:
    """Whoever answers the question with no is told that nothing happened, with code 1."""
    cli("produce", "a/b", stdin=b"x\n")
    code, shown = type_on_a_terminal(["topic", "delete", "a/b"], tmp_path, b"n\n", 80)
    assert code == 1
    assert "(1 file, 77 B)" in shown
    assert "nothing was deleted" in shown
    assert cli("consume", "a/b").out == b"x\n"
    code, _ = type_on_a_terminal(["topic", "delete", "a/b"], tmp_path, b"y\n", 80)
    assert (code, cli("topic", "list", "--json").json) == (0, [])


class Screen(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


class TestLongStarts:
    """Whoever waits for a server or for Spark sees that something is at work."""

    def test_a_pipe_gets_a_line_and_json_none(self, capsys: pytest.CaptureFixture[str]) -> None:
        """On stderr, before the work begins."""
        with Output(as_json=False).working("Starting it"):
            assert capsys.readouterr() == ("", "Starting it ...\n")
        with Output(as_json=True).working("Starting it"):
            pass
        assert capsys.readouterr() == ("", "")

    def test_a_terminal_gets_a_line_that_goes_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is drawn while the work lasts, with JSON too: a terminal is not parsed."""
        monkeypatch.setenv("TERM", "xterm")
        for as_json in (False, True):
            screen = Screen()
            monkeypatch.setattr(sys, "stderr", screen)
            with Output(as_json).working("Starting [it]"):
                pass
            assert "Starting [it] ..." in screen.getvalue()
            assert screen.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))

    def test_spark(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """The command says that Spark starts, unless it runs already."""
        spark = type("Session", (), {"stop": int})
        monkeypatch.setattr("tidelog.pipeline.session.session.spark_session", lambda *_: spark())
        for is_running, told in ((False, "Starting Spark ...\n"), (True, "")):
            monkeypatch.setattr(pipeline_job, "_is_running", lambda known=is_running: known)
            with pipeline_job.spark_for(Output(as_json=False), "verify", None):
                assert capsys.readouterr().err == told

    @pytest.mark.parametrize("command", ["dev-s3", "demo"])
    def test_seaweed(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        """A start is told, and one that fails is followed by its error."""

        def fail(server: SeaweedServer) -> None:
            raise tidelog.RetryError("the port is taken")

        monkeypatch.setattr(SeaweedServer, "start", fail)
        monkeypatch.setattr(demo_steps, "weed_program", lambda: "weed")
        where = ["--data", "s3"] if command == "dev-s3" else ["-d", str(tmp_path / "demo"), "--messages", "200"]
        result = cli(command, *where)
        assert result.code == 4
        lines = result.err.splitlines()
        assert lines[-2].startswith("Starting SeaweedFS")
        assert lines[-1] == "error: the port is taken"
