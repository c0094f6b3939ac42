"""What all jobs have in common: proofs, reports, and the command line around them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.spark_servers import run_driver

import tidelog
from tidelog.cli.main import main
from tidelog.cli.pipeline import submit as pipeline_submit
from tidelog.errors import InputError
from tidelog.findings import Finding
from tidelog.pipeline.jobs import verify as verify_job
from tidelog.pipeline.jobs.job import JobReport, Progress, Reconciliation, Totals, counted_progress, sum_text, total

TIMEOUT_SECONDS = 300
GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "pipeline.md"


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


class Shell:
    """A directory with a topic, and the command line in this process."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._capsys = capsys
        with tidelog.open(directory / "data", store=(directory / "store").as_uri(), metadata="bucket") as log:
            topic = log.topic("shop/orders")
            topic.append_many([b"value %d" % number for number in range(30)])
            topic.ship()

    def run(self, *arguments: str) -> Result:
        self._capsys.readouterr()
        code = main(["pipeline", *arguments])
        found = self._capsys.readouterr()
        return Result(code, found.out, found.err)

    @property
    def root(self) -> tuple[str, str]:
        return "--root", str(self.directory / "data")

    @property
    def object(self) -> Path:
        return next((self.directory / "store").rglob("data-*.tlog"))


@pytest.fixture
def shell(tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> Shell:
    """The session that the tests share is the one that the commands find."""
    return Shell(tmp_path, capsys)


def side(messages: int, digest: int, kind: str = "frames") -> Totals:
    last = messages - 1 if messages else None
    first = 0 if messages else None
    return Totals(messages=messages, first_offset=first, last_offset=last, checksum=sum_text(kind, digest))


def test_ctrl_c_says_how_to_go_on(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops a job learns that it may be run again, and gets the exit code of an interrupt."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_job, "verify", interrupted)
    result = shell.run("verify", *shell.root)
    assert (result.code, result.out) == (130, "")
    assert "run it again" in result.err


def test_tallies_add_up_in_any_order() -> None:
    """The sum of parts is that of the whole, and nothing changes it but a message."""
    parts = [
        Totals(messages=2, first_offset=5, last_offset=6, checksum=sum_text("frames", -1)),
        Totals(),
        Totals(messages=1, first_offset=0, last_offset=0, checksum=sum_text("frames", 3)),
    ]
    whole = total(parts)
    assert whole == total(reversed(parts))
    assert (whole.messages, whole.first_offset, whole.last_offset, whole.checksum) == (
        *(3, 0, 6),
        "frames:0000000000000002",
    )


def test_sums_of_different_things_are_never_equal() -> None:
    """A sum over frames says nothing about one over rows."""
    assert side(1, 5) != side(1, 5, "rows")
    with pytest.raises(InputError, match="cannot be added"):
        side(1, 5) + side(1, 5, "rows")


def test_report_is_good_when_nothing_is_wrong_and_it_reconciles() -> None:
    """A finding or a reconciliation that does not hold is enough; it says which."""
    equal = Reconciliation(subject="a", went_in=side(3, 9), came_out=side(3, 9))
    other = Reconciliation(subject="a", went_in=side(3, 9), came_out=side(2, 8))
    assert JobReport(job="x", reconciliations=(equal,)).is_good
    assert not JobReport(job="x", reconciliations=(equal, other)).is_good
    assert not JobReport(job="x", findings=(Finding(subject="a/b", message="bad"),)).is_good
    assert str(equal).endswith("equal")
    assert "NOT EQUAL" in str(other)


def test_progress_counts_results() -> None:
    """It begins with nothing done and ends with everything."""
    told: list[Progress] = []
    assert list(counted_progress("abc", "reading", 3, told.append)) == ["a", "b", "c"]
    assert [progress.done for progress in told] == [0, 1, 2, 3]


def test_verify_on_the_command_line(shell: Shell) -> None:
    """It prints a table and a proof and ends with 0; with damage it names it and ends with 1, also as JSON."""
    good = shell.run("verify", *shell.root)
    assert (good.code, "reconciliation: shop/orders: 30 messages, offsets 0 to 29, frames:" in good.out) == (0, True)
    data = bytearray(shell.object.read_bytes())
    data[-1] ^= 1
    shell.object.write_bytes(data)
    bad = shell.run("verify", *shell.root)
    assert (bad.code, "a checksum that does not match" in bad.err) == (1, True)
    told = json.loads(shell.run("verify", "--json", "--root", (shell.directory / "store").as_uri()).out)
    assert (told["is_good"], told["findings"][0]["subject"]) == (False, "shop/orders")


def test_table_on_the_command_line(shell: Shell) -> None:
    """A table is made, proven, brought up to date with nothing, and refused where it cannot be."""
    place = str(shell.directory / "table")
    made = shell.run("table", "shop/orders", "--to", place, *shell.root)
    assert (made.code, "out 30 messages" in made.out) == (0, True)
    proven = json.loads(shell.run("verify", "--table", place, "--json", *shell.root).out)
    assert (proven["is_good"], proven["reconciliations"][0]["came_out"]["messages"]) == (True, 30)
    again = json.loads(shell.run("table", "shop/orders", "--to", place, "--json", *shell.root).out)
    assert (again["files"], again["next_offset"]) == (0, 30)
    assert shell.run("table", "shop/orders", "--to", place, "--format", "iceberg", *shell.root).code == 2
    assert shell.run("table", "shop/none", "--to", place + "2", *shell.root).code == 3
    assert shell.run("verify", "--table", place + "3", *shell.root).code == 3


def test_the_session_of_the_caller_stays(shell: Shell, spark: SparkSession) -> None:
    """A job that finds a session uses it and does not end it, whichever thread it runs in."""
    assert shell.run("verify", *shell.root).code == 0
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(shell.run, "verify", *shell.root).result().code == 0
    assert spark.range(3).count() == 3


BAD_LINES: list[tuple[str, int, str]] = [
    ("compact --tombstone-seconds nan", 2, "greater than or equal to 0"),
    ("compact --min-dirty-ratio 2", 2, "at most 1"),
    ("verify shop/orders --table t", 2, "Leave the topics out"),
    ("verify --root file:///nowhere/at/all", 3, "there is no such directory"),
    ("verify --table nowhere", 3, "there is no table"),
    ("verify --table a.b --catalog bogus", 2, "Check --catalog"),
    ("verify --table a.b --catalog sqlite:////nowhere/at/all.db", 4, "Check --catalog"),
    ("verify --table a.b --catalog http://127.0.0.1:1", 4, "does not answer"),
    ("table shop/orders --to=", 2, "is empty"),
    ("table shop/orders --to t --schema a", 2, "--schema goes with"),
    ("table shop/orders --to t --values json --headers", 2, "--headers goes with"),
    ("table shop/orders --to t --values json --schema {bad", 2, "cannot be understood"),
    ('table shop/orders --to t --values json --schema {"type":"struct","fields":[{}]}', 2, "a name and a type"),
    ("table shop/orders --to t --values json --schema _OFFSET:long", 2, "a column that every table has"),
    ("table shop/orders --to t --values json --schema a:int,A:string", 2, "twice"),
    ("table shop/orders --to a.b --catalog sqlite:///catalog.db", 2, "warehouse="),
    ("gc --apply nowhere", 3, "gc --plan FILE"),
    ("replay shop/orders shop/orders --target-root file:{directory}/store", 2, "into itself"),
]


def test_bad_input_is_told_with_the_fix(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong options end with a stable code and a hint, are never a bug of ours, and make no place that was mistyped."""
    monkeypatch.chdir(shell.directory)
    for line, code, problem in BAD_LINES:
        words = [word.replace("{directory}", f"//{shell.directory}") for word in line.split()]
        found = shell.run(*words, *(() if "--root" in words else shell.root))
        assert (found.code, found.out) == (code, ""), f"{line}: {found}"
        assert problem in found.err, line
        assert "Traceback" not in found.err
    assert not (shell.directory / "nowhere").exists()
    assert not Path("/nowhere").exists()


def test_a_command_in_a_hint_is_about_the_root_of_the_job(shell: Shell) -> None:
    """Pasted as it is told, it shows the topics of the place that was named, not those of ./data."""
    found = shell.run("verify", "shop/none", *shell.root)
    assert f"topic list --dir {shell.directory}/data` shows them" in found.err
    store = (shell.directory / "store").as_uri()
    found = shell.run("verify", "shop/none", "--root", store)
    assert f"topic list --store {store} --metadata bucket` shows them" in found.err


def test_no_topics_are_told_as_such(shell: Shell) -> None:
    """Nothing is wrong where nothing is; that may be a slip in the name of the place."""
    (shell.directory / "empty").mkdir()
    for job in ("verify", "compact", "gc"):
        found = shell.run(job, "--root", (shell.directory / "empty").as_uri())
        assert found.code == 0
        assert "note: there are no topics in file:" in found.err
    assert shell.run("compact", "--by-key", "--tombstone-seconds", "inf", *shell.root).code == 0


def test_the_example_of_the_guide_runs(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guide shows works as it stands, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python spark\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(example, str(GUIDE), "exec"), {})


def test_help_starts_without_spark() -> None:
    """Nothing of Spark, Arrow or Iceberg is imported before a job runs."""
    code = (
        "import sys, tidelog.cli.main as m; m.main(['pipeline', 'table', '--help']); "
        "sys.exit(any(name in sys.modules for name in ('pyspark', 'pyarrow', 'pyiceberg')))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
    assert finished.returncode == 0, finished.stderr


# The command line as a process of its own: table, then verify of both, as one JSON document.
ELSEWHERE = """
import contextlib, io, json, sys, tidelog
from tidelog.cli.main import main

spark = tidelog.spark_session("jobs", sys.argv[1])  # which the commands find, and leave alone

def told(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["pipeline", *arguments, "--json", "--master", sys.argv[1], "--root", sys.argv[2]])
    return code, json.loads(out.getvalue())["reconciliations"][0]

place = sys.argv[2] + "-table"
runs = [told("table", "shop/orders", "--to", place), told("verify"), told("verify", "--table", place)]
print(json.dumps([[code, (proof["came_out"] or proof["went_in"])["messages"]] for code, proof in runs]))
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["spark_cluster", "spark_connect"])
def test_the_same_command_runs_elsewhere(where: str, shell: Shell, request: pytest.FixtureRequest) -> None:
    """On a cluster of two workers, and through a Spark Connect server, a job does what it does here."""
    master = request.getfixturevalue(where)
    told = run_driver(ELSEWHERE, master, shell.root[1], XDG_CACHE_HOME=str(shell.directory / "cache"))
    assert json.loads(told) == [[0, 30], [0, 30], [0, 30]]


def test_the_file_for_spark_submit_runs_a_job(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arguments are those of `tidelog pipeline`, and the session is the one that is running."""
    monkeypatch.setattr(sys, "argv", [pipeline_submit.__file__, "verify", "--json", *shell.root])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(pipeline_submit.__file__, run_name="__main__")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["is_good"] is True


@pytest.mark.long
def test_spark_submit_runs_a_job(shell: Shell) -> None:
    """The file for spark-submit takes the arguments of `tidelog pipeline`, and the master from spark-submit."""
    submit = Path(sys.executable).with_name("spark-submit")
    command = [str(submit), "--master", "local[1]", "--conf", "spark.ui.enabled=false", pipeline_submit.__file__]
    finished = subprocess.run(
        [*command, "verify", "--json", *shell.root],
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(Path(tidelog.__file__).parent.parent)},
    )
    assert finished.returncode == 0, finished
    assert json.loads(finished.stdout)["is_good"] is True
