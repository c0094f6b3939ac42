"""Exit codes and what is said with them; scripts rely on both."""

from __future__ import annotations

import ast
import errno
import itertools
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, environment
from tests.service.http.serving import serving

import tidelog
from tidelog.cli.errors import ExitCode, exit_code_of, program, text_of
from tidelog.cli.main import main
from tidelog.cli.session import Session, run_reporting, shown_warnings


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (tidelog.NotFoundError("x"), 3),
        (tidelog.OffsetOutOfRangeError("x"), 3),
        (tidelog.ConfigError("x"), 2),
        (tidelog.MessageTooLargeError("x"), 2),
        (tidelog.LockedError("x"), 4),
        (tidelog.BackpressureError("x"), 4),
        (tidelog.DiskFullError("x"), 6),
        (tidelog.LogFailedError("x"), 6),
        (tidelog.CorruptionError("x", path="p", byte=1), 5),
        (tidelog.GapError("x", first=1, last=2), 5),
        (OSError(errno.EIO, "Input/output error"), 6),
        (OSError(errno.ENOSPC, "No space left on device"), 6),
        (PermissionError(errno.EACCES, "Permission denied", "f"), 2),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "f"), 2),
        (tidelog.InternalError("x"), 70),
        (RuntimeError("x"), 70),
    ],
)
def test_every_error_has_its_code(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What the shell gets depends on what has to be done next, and never is a traceback."""

    def fail() -> None:
        raise error

    assert run_reporting(fail, Session()) == code == exit_code_of(error)
    told = capsys.readouterr().err
    assert told.startswith(f"error: {text_of(error)}\n")
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["consume", "x/y", "--json"], "NotFoundError", 3),
        (["--json", "consume", "x/y"], "NotFoundError", 3),
        (["--json", "topic", "create", "no name"], "TopicNameError", 2),
        (["topic", "list", "--json", "--no-such-option"], "UsageError", 2),
        (["no-such-command", "--json"], "UsageError", 2),
        (["produce", "--json"], "UsageError", 2),
    ],
)
def test_with_json_an_error_is_json(cli: Cli, arguments: list[str], kind: str, code: int) -> None:
    """A script that reads JSON need not parse prose: one object with class, message, hint and exit code."""
    cli("topic", "create", "a/b")
    plain = cli(*[argument for argument in arguments if argument != "--json"])
    result = cli(*arguments)
    assert (result.code, result.out) == (code, b"") == (plain.code, plain.out)
    (line,) = result.err.splitlines()
    error = json.loads(line)["error"]
    assert list(error) == ["type", "message", "hint", "exit_code"]
    assert (error["type"], error["exit_code"]) == (kind, code)
    assert plain.err.splitlines()[0] == f"error: {error['message']}"


def test_json_behind_two_dashes_is_an_argument(cli: Cli) -> None:
    """It asks for nothing there."""
    assert cli("topic", "create", "--", "--json").err.startswith("error: ")


def test_with_json_a_traceback_is_part_of_the_error(cli: Cli) -> None:
    """So that stderr has one object all the same."""
    cli("topic", "create", "a/b")
    error = json.loads(cli("consume", "x/y", "--json", "--debug").err)["error"]
    assert error["traceback"].startswith("Traceback")


@pytest.mark.parametrize(("mode", "begin"), [("info", "time="), ("json", '{"time":')])
def test_a_variable_turns_logs_on(cli: Cli, monkeypatch: pytest.MonkeyPatch, mode: str, begin: str) -> None:
    """Events go to stderr, each in a line, and results to stdout as ever; without it there is nothing."""
    assert cli("produce", "a/b", stdin=b"one\n").err.count("log_opened") == 0
    logger = logging.getLogger("tidelog")
    handlers, level = list(logger.handlers), logger.level
    monkeypatch.setenv("TIDELOG_LOG", mode)
    try:
        result = cli("produce", "a/b", stdin=b"two\n")
        assert result.code == 0
        events = [line for line in result.err.splitlines() if "log_opened" in line]
        assert len(events) == 1
        assert events[0].startswith(begin)
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def test_debug_shows_where(cli: Cli) -> None:
    """With --debug the traceback comes with the error."""
    cli("topic", "create", "a/b")
    result = cli("--debug", "consume", "x/y")
    assert result.code == 3
    assert "Traceback" in result.err
    assert "error: there is no topic x/y" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("frobnicate",), 2, "frobnicate"),
        (("consume",), 2, "topic"),
        (("consume", "a/b", "--frob"), 2, "--frob"),
        (("consume", "nonsense"), 3, "there is no log directory data"),
        (("produce", "nonsense"), 2, "'nonsense' needs a namespace and a name"),
        (("produce", "../x"), 2, "not allowed"),
        (("consume", "a/b", "-d", "nowhere"), 3, "there is no log directory nowhere"),
        (("verify", "-d", "."), 3, "not a log directory"),
        (("produce", "a/b", "."), 2, "is a directory"),
        (("topic", "list", "-c", "nowhere.toml"), 2, "there is no settings file nowhere.toml"),
        (("bench", "append", "--mode", "waves"), 2, "waves"),
    ],
)
def test_bad_command_lines(cli: Cli, arguments: tuple[str, ...], code: int, text: str) -> None:
    """What is wrong is said in one line on stderr, and a hint says what to do about it."""
    result = cli(*arguments)
    assert (result.code, result.out) == (code, b"")
    first, *_ = result.err.splitlines()
    assert text.lower() in result.err.lower()
    assert first.startswith("error: ")


def test_a_directory_that_is_in_use(cli: Cli) -> None:
    """A second writer gets code 4 at once, and readers are let in."""
    with tidelog.open("data") as log:
        log.topic("a/b").append(b"x", sync=True)
        result = cli("produce", "a/b", stdin=b"y\n")
        assert result.code == 4
        assert "is already open in process" in result.err
        assert "hint: Stop that process or wait for it" in result.err
        assert cli("consume", "a/b").out == b"x\n"


def test_where_the_directory_comes_from(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option wins over the variable, the variable over the file, and ./data is the last resort."""
    (tmp_path / "t.toml").write_text('dir = "from-file"\n')
    cli("topic", "create", "a/b", "-c", "t.toml")
    monkeypatch.setenv("TIDELOG_DIR", "from-variable")
    cli("topic", "create", "a/b", "-c", "t.toml")
    cli("-d", "from-option", "-c", "t.toml", "topic", "create", "a/b")
    cli("-d", "ignored", "topic", "create", "a/b", "--dir", "from-later-option")
    monkeypatch.delenv("TIDELOG_DIR")
    cli("topic", "create", "a/b")
    made = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert made == {"from-file", "from-variable", "from-option", "from-later-option", "data"}


def test_help_documents_the_codes(cli: Cli) -> None:
    """The help lists every exit code and every command; it is what is shown without arguments."""
    text = cli("--help").out.decode()
    assert cli().out.decode() == text
    for code in ExitCode:
        assert f"\n    {code.value:<5}" in text
    for name in ("demo", "produce", "consume", "topic", "inspect", "verify", "repair", "doctor", "bench"):
        assert f"\n  {name} " in text


def test_the_guide_documents_the_codes() -> None:
    """The operations guide has a row for every exit code, and for no other."""
    guide = Path(__file__).resolve().parents[2] / "docs" / "reference" / "operations.md"
    listed = re.findall(r"^\| (\d+) \|", guide.read_text("utf-8"), re.MULTILINE)
    assert list(map(int, listed)) == list(ExitCode)


def test_version(cli: Cli) -> None:
    """The version is that of the package."""
    assert cli("--version").lines == [f"tidelog {tidelog.__version__}"]


def test_it_starts_without_what_it_does_not_need() -> None:
    """A command that is named first imports no other one; help imports the work of none, nor the terminal library."""
    program = (
        "import sys; from tidelog.cli.main import main\n"
        "for words in (['topic', '--help'], ['--help']):\n"
        "    main(words); print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    first, second = (set(line.split()) for line in result.stderr.splitlines())
    assert "tidelog.cli.topic.group" in first
    assert not {f"tidelog.cli.{name}" for name in ("consume", "engine", "pipeline", "verify")} & first
    assert "tidelog.cli.verify" in second
    assert not {name for name in second if name.split(".")[0] == "rich"}
    assert not {name for name in second if name.startswith(("pyspark", "pyarrow", "tidelog.pipeline.jobs"))}


def test_without_the_parser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where only the library was installed, the command says what is missing."""
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("tidelog.cli.") and name != "tidelog.cli.main"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("tidelog.cli.app")
    assert main(["--help"]) == 2
    assert "tidelog[cli]" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["topic", "bench"])
def test_a_group_alone_shows_its_help(cli: Cli, group: str) -> None:
    """A command of commands says which there are."""
    result = cli(group)
    assert (result.code, result.err) == (0, "")
    assert result.out == cli(group, "--help").out


def test_usage_lines_are_plain(cli: Cli) -> None:
    """What is needed stands bare, what may be left out in one pair of brackets."""
    assert cli("produce", "--help").lines[0] == "Usage: tidelog produce [OPTIONS] TOPIC [FILE]"
    assert cli("verify", "--help").lines[0] == "Usage: tidelog verify [OPTIONS] [TARGET]..."


def test_hints_can_be_pasted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in a hint names the directory in use and the topic in question."""
    monkeypatch.setattr("tidelog.cli.session.program", lambda: "PROGRAM")
    cli("produce", "shop/orders", "-d", "my log", stdin=b"x\n" * 100)
    missing = cli("consume", "shop/order", "-d", "my log")
    assert missing.code == 3
    assert "hint: Did you mean shop/orders? All topics: `PROGRAM topic list --dir 'my log'`" in missing.err
    (path,) = Path("my log/shop/orders").glob("wal.*.log")
    path.write_bytes(path.read_bytes().replace(b"x", b"y", 1))
    damaged = cli("consume", "shop/orders", "-d", "my log")
    assert damaged.code == 5
    assert "`PROGRAM repair shop/orders --dir 'my log'`" in damaged.err
    assert "hint: `PROGRAM repair shop/orders --dir 'my log'` says" in cli("-d", "my log", "verify").err
    monkeypatch.setenv("TIDELOG_DIR", "my log")
    assert "hint: `PROGRAM repair shop/orders` says" in cli("verify").err
    assert "hint: See `PROGRAM consume --help`" in cli("consume").err


def test_the_program_is_named_as_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its bare name where that is on the path, else where it lies, else the module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    find = program.__wrapped__
    assert find().endswith("/.venv/bin/python -m tidelog.cli.main")
    script = tmp_path / ".venv" / "bin" / "tidelog"
    script.parent.mkdir(parents=True)
    script.touch(0o755)
    assert find() == ".venv/bin/tidelog"
    monkeypatch.setenv("PATH", str(script.parent))
    assert find() == "tidelog"


STREAMS = (">&-", "2>&-", "<&-", ">&- 2>&- <&-")
COMMANDS = ("consume a/b", "topic list", "produce a/b")
# Each command and each stream once; campaigns have all pairs.
PAIRS = {(">&-", "consume a/b"), ("2>&-", "topic list"), ("<&-", "produce a/b"), (">&- 2>&- <&-", "consume a/b")}


@pytest.mark.parametrize(
    ("closed", "arguments"),
    [
        pytest.param(*pair, marks=() if pair in PAIRS else pytest.mark.long)
        for pair in itertools.product(STREAMS, COMMANDS)
    ],
)
def test_closed_streams_are_no_bug(cli: Cli, closed: str, arguments: str) -> None:
    """A stream that is not there takes nothing and gives nothing."""
    cli("produce", "a/b", stdin=b"x\n")
    script = f"{sys.executable} -m tidelog.cli.main {arguments} {closed}"
    result = subprocess.run(["sh", "-c", script], env=environment(), capture_output=True, timeout=60, check=False)
    assert result.returncode == 0
    assert b"bug" not in result.stderr
    assert set(cli("consume", "a/b").lines) <= {"x"}


def test_a_full_stdout_is_told_once(cli: Cli) -> None:
    """Output that cannot be written is one error line and code 6."""
    cli("produce", "a/b", stdin=b"x\n")
    script = f"{sys.executable} -m tidelog.cli.main topic list > /dev/full"
    result = subprocess.run(["sh", "-c", script], env=environment(), capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr.count(b"\n")) == (6, 1)


@pytest.mark.parametrize("error", [tidelog.DiskFullError("full"), tidelog.LogFailedError("failed"), None])
def test_warnings_of_the_log(error: Exception | None, capsys: pytest.CaptureFixture[str]) -> None:
    """They look like the command's own messages, and what the final error repeats is left out."""
    logger = logging.getLogger("tidelog.log")

    def record(module: str, level: int, text: str) -> None:
        logger.handle(logging.LogRecord(logger.name, level, f"/{module}.py", 1, text, (), None))

    def work() -> None:
        with shown_warnings():
            record("recovery", logging.WARNING, "a tail was cut")
            record("writer", logging.ERROR, "the disk is full")
            if error is not None:
                raise error

    run_reporting(work, Session())
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "warning: a tail was cut"
    assert ("warning: the disk is full" in told) == (error is None)


def test_a_fault_of_ours_is_shown_with_where_it_happened(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that went on said that something failed, and nothing about what."""
    with shown_warnings():
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            logging.getLogger("tidelog.kafka").exception("the coordinator failed")
    told = capsys.readouterr().err
    assert told.startswith("warning: the coordinator failed\nTraceback (most recent call last):")
    assert told.endswith("RuntimeError: boom\n")


# What a command can never meet, or says by itself (`hint_of`).
_OF_PROGRAMS = (
    *(
        "client/bridge.py",
        "engine/orchestrator/",
        "pipeline/",
        "service/kafka/wire/",
        "testing/",
        "topics/latest_by_key.py",
        "files.py",
    ),
    *("topics/subscription/consumer.py", "topics/subscription/feed.py", "topics/subscription/options.py"),
    *("topics/subscription/dead_letters.py", "topics/directory.py"),
)
_PYTHON = re.compile(
    r"\btidelog\.\w|\b(topic|log|sub|client)\.\w+\(|\w\(\)|=(True|False|None)\b|\w=[\"'{]|read_only|create=|take_over"
)


def test_hints_name_options_where_they_name_python() -> None:
    """Loss prevented: a command told its user to call a method. Such a hint has words for commands beside it."""
    package = Path(tidelog.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        source = path.read_text("utf-8")
        if name.startswith(_OF_PROGRAMS) or "hint=" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                texts = [one.value for one in ast.walk(keyword.value) if isinstance(one, ast.Constant)]
                text = " ".join(one for one in texts if isinstance(one, str))
                has_both = isinstance(keyword.value, ast.Call)  # a Hint
                is_gap = "on_gap" in text or "encode()" in text  # `hint_of` says --skip-gaps; commands read bytes
                if keyword.arg == "hint" and _PYTHON.search(text) and not has_both and not is_gap:
                    found.append(f"{name}:{keyword.lineno}: {text}")
    assert found == []


def test_command_says_its_own_options(cli: Cli, tmp_path: Path) -> None:
    """Where the library's error names what a program calls."""
    cli("topic", "create", "shop/one")
    cli("topic", "create", "shop/many", "--partitions", "3")
    shipped = cli("topic", "ship", "shop/one")
    assert "--store s3://bucket/prefix" in shipped.err
    assert "tidelog.open" not in shipped.err
    read = cli("consume", "shop/many", "--from", "1")
    assert "Choose one with --partition N" in read.err
    assert "topic.partition" not in read.err
    with serving(tmp_path / "served") as served:
        server = ("--server", f"http://127.0.0.1:{served.address.port}")
        cli("topic", "create", "shop/one", *server)
        assert "--store s3://bucket/prefix" in cli("topic", "ship", "shop/one", *server).err
