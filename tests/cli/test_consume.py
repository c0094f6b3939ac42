"""`tidelog consume`: which messages, in which form."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Spawn, environment

import tidelog

PROJECT = Path(__file__).resolve().parents[2]
BEGIN = datetime(2026, 1, 2, 3, 4, 5, 678900, tzinfo=UTC)


@pytest.fixture
def ten(tmp_path: Path) -> None:
    """Ten messages, a second apart."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/b")
        for number in range(10):
            topic.append(
                b"v%d" % number,
                key=b"k%d" % number if number % 2 else None,
                headers={"h": b"1", "i": b"2"} if number == 3 else None,
                timestamp=BEGIN + timedelta(seconds=number),
            )


@pytest.mark.usefixtures("ten")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), range(10)),
        (("--from", "earliest", "-n", "3"), range(3)),
        (("--from", "latest"), range(0)),
        (("--from", "7"), range(7, 10)),
        (("--from", "10"), range(0)),
        (("--from", "-2"), range(8, 10)),
        (("--from=-200"), range(10)),
        (("--from", "2026-01-02T03:04:10.6789Z"), range(5, 10)),
        (("--from", "2026-01-02T03:04:10"), range(5, 10)),
        (("--from", "2026-01-02T05:04:11+02:00", "-n", "1"), range(6, 7)),
        (("--from", "2", "--to", "5"), range(2, 5)),
        (("--to", "2026-01-02T03:04:07.6789Z"), range(2)),
        (("--from", "-5", "--to", "-2"), range(5, 8)),
        (("--to", "1000000"), range(10)),
        (("-n", "0"), range(0)),
        (("-n", "0", "--follow"), range(0)),
        (("--follow", "-n", "4"), range(4)),
        (("--follow", "--to", "6"), range(6)),
        (("--follow", "--from", "8", "--to", "latest"), range(8, 10)),
    ],
)
def test_positions(cli: Cli, options: tuple[str, ...] | str, expected: range) -> None:
    """Where to begin and to end can be said by offset, by time, by name, or counted from the end."""
    options = (options,) if isinstance(options, str) else options
    result = cli("consume", "a/b", *options)
    assert (result.code, result.lines) == (0, [f"v{number}" for number in expected])


@pytest.mark.usefixtures("ten")
@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (
            ("--from", "11"),
            3,
            "offset 11 is not in the topic a/b, which holds offsets 0 to 9\nhint: Give --from an offset from 0 to 10",
        ),
        (("--from", "5", "--to", "2"), 2, "--from 5 is after --to 2"),
        (("--from", "-2", "--to", "-5"), 2, "--from -2 is after --to -5"),
        (("--from", "2026-01-02", "--to", "2026-01-01T00:00:00Z"), 2, "is after --to"),
        (("--from", "yesterday"), 2, "--from 'yesterday' is not a position"),
        (("--to", "later"), 2, "--to 'later' is not a position"),
        (("--format", "%x"), 2, "unknown field %x"),
        (("--format", "%"), 2, "unknown field %"),
        (("--format", "\\q"), 2, "unknown escape \\q"),
        (("--json", "--format", "%v"), 2, "cannot be combined"),
        (("-n", "-1"), 2, "-n"),
    ],
)
def test_what_cannot_be(cli: Cli, options: tuple[str, ...], code: int, text: str) -> None:
    """A position or a format that means nothing is refused with a hint."""
    result = cli("consume", "a/b", *options)
    assert (result.code, result.out) == (code, b"")
    assert text in result.err
    assert result.err.startswith('{"error": ' if "--json" in options else "error: ")


@pytest.mark.usefixtures("ten")
def test_templates(cli: Cli) -> None:
    """A template names the parts of a message and how they stand together."""
    result = cli("consume", "a/b", "--from", "3", "-n", "1", "--format", r"%o|%t|%T|%k|%v|%h|%s|%%|\t\\ü\n")
    expected = "3|2026-01-02T03:04:08.678900Z|1767323048678|k3|v3|h=1,i=2|2|%|\t\\ü\n"
    assert result.out == expected.encode()


@pytest.mark.usefixtures("ten")
def test_json_lines(cli: Cli) -> None:
    """With --json every line is an object with all that the message has."""
    lines = [json.loads(line) for line in cli("--json", "consume", "a/b", "--from", "2", "-n", "2").lines]
    assert lines[0]["key"] is None
    assert lines[1] == {
        "topic": "a/b",
        "partition": 0,
        "offset": 3,
        "timestamp": "2026-01-02T03:04:08.678900Z",
        "key": "k3",
        "value": "v3",
        "headers": {"h": "1", "i": "2"},
    }


def test_json_of_bytes_that_are_no_text(cli: Cli, tmp_path: Path) -> None:
    """What is not UTF-8 is base64 in JSON, and a field beside it says so."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append(b"\xff\x00", key=b"\xfe", headers={"good": b"x", "bad": b"\xfd"})
    line = cli("consume", "a/b", "--json").json
    assert base64.b64decode(line["value"]) == b"\xff\x00"
    assert base64.b64decode(line["key"]) == b"\xfe"
    assert (line["value_encoding"], line["key_encoding"]) == ("base64", "base64")
    assert (line["headers"]["good"], line["headers_encoding"]) == ("x", {"bad": "base64"})


def test_follows_another_process_until_ctrl_c(spawn: Spawn, tmp_path: Path) -> None:
    """It shows what another process appends as it comes, and Ctrl-C ends it quietly."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/b")
        topic.append(b"before", sync=True)
        consumer = spawn("consume", "a/b", "--follow", "--format", r"%o %v\n")
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == b"0 before\n"
        for number in range(1, 4):
            topic.append(b"live", sync=True)
            assert consumer.stdout.readline() == b"%d live\n" % number
    consumer.send_signal(signal.SIGINT)
    out, err = consumer.communicate(timeout=120)
    assert (consumer.returncode, out, err) == (130, b"", b"")


def test_tests_in_the_background_can_send_ctrl_c() -> None:
    """A shell without job control makes them ignore it, which the programs that they start would inherit."""
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    program = f"{ignored}; import tests.conftest; print(signal.getsignal(signal.SIGINT))"
    said = subprocess.check_output([sys.executable, "-c", program], cwd=PROJECT, env=environment())
    assert b"default_int_handler" in said


def test_a_closed_pipe_is_no_error(spawn: Spawn, tmp_path: Path) -> None:
    """When the reader of the output goes away, the command ends quietly and with success."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append_many([b"x" * 100] * 20_000)
    consumer = spawn("consume", "a/b")
    assert consumer.stdout is not None
    consumer.stdout.readline()
    consumer.stdout.close()
    assert consumer.wait(120) == 0
    assert consumer.stderr is not None
    assert consumer.stderr.read() == b""
