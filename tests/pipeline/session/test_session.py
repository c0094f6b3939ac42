"""The session: what `tidelog.spark_session` sets, whom it disturbs, and what it says when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark import SparkConf
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.pipeline.spark_servers import run_driver

import pyspark_tidelog
import tidelog
import tidelog.pipeline
from tidelog.pipeline.session import java, session
from tidelog.pipeline.session.java import GatewayError, installed_home, lean_home, start_gateway
from tidelog.pipeline.session.session import JAVA_OPTIONS, defaults_for

TOPIC = "shop/orders"


def count_messages(spark: SparkSession, root: Path) -> int:
    reader = spark.read.format("tidelog").option("root", str(root)).option("subscribe", TOPIC)
    return reader.load().count()


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A log directory with three messages."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC).append_many([b"a", b"b", b"c"], sync=True)
    return tmp_path / "data"


def test_a_session_that_nobody_prepared_knows_the_format(spark: SparkSession, shop: Path) -> None:
    """A new session has none of the registrations of the first, and finds `tidelog` all the same."""
    assert count_messages(spark.newSession(), shop) == 3


def test_a_thread_of_its_own_writes_once_it_has_registered(spark: SparkSession, shop: Path) -> None:
    """Spark looks for a format to write to in the session of the thread, and a new none."""

    def append() -> None:
        rows = tidelog.pipeline.register(spark).range(2).selectExpr("CAST(id AS string) AS value")
        rows.write.format("tidelog").option("root", str(shop)).option("topic", TOPIC).mode("append").save()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(append).result()
    assert count_messages(spark, shop) == 5


def test_a_running_session_is_used(spark: SparkSession) -> None:
    """A second call gets the same session and may change what can be changed while it runs."""
    assert tidelog.spark_session(**{"spark.sql.shuffle.partitions": "3"}) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
    tidelog.spark_session(**{"spark.sql.shuffle.partitions": "2"})
    with pytest.raises(tidelog.ConfigError, match=r"already runs a session with master local\[2\].*spark.stop"):
        tidelog.spark_session(master="local[1]")


def test_a_session_is_set_up_for_topics(spark: SparkSession) -> None:
    """No page of its own, times in UTC, workers on the Python of the driver that import no zipped Spark."""
    assert spark.sparkContext.uiWebUrl is None
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    worker = spark.sparkContext.parallelize([0], 1).map(lambda _: (sys.executable, list(sys.path))).first()
    assert worker[0] == sys.executable
    assert not any(entry.endswith("pyspark.zip") and os.path.exists(entry) for entry in worker[1])


def test_a_server_of_spark_connect_is_asked_by_the_same_call(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its URL as the master, or in Spark's own variable; the settings go there, and the format is registered."""
    asked: list[dict[str, str]] = []

    def connect(builder: SparkSession.Builder) -> SparkSession:
        asked.append({name: str(value) for name, value in builder._options.items()})
        return spark

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", connect)
    monkeypatch.setattr(session, "check_master", lambda master: None)
    tidelog.spark_session("mine", "sc://there:15002", **{"spark.sql.shuffle.partitions": 3})
    monkeypatch.setenv("SPARK_REMOTE", "sc://elsewhere")
    tidelog.spark_session("mine")
    assert (
        asked[0].items()
        >= {
            "spark.app.name": "mine",
            "spark.remote": "sc://there:15002",
            "spark.sql.shuffle.partitions": "3",
        }.items()
    )
    assert "spark.remote" not in asked[1]


def _context(master: str, *settings: str) -> SimpleNamespace:
    """As much of Spark's context as `register` looks at."""
    return SimpleNamespace(
        master=master, pythonExec="python3", getConf=lambda: SimpleNamespace(contains=settings.__contains__)
    )


@pytest.mark.parametrize(
    ("context", "variable", "expected"),
    [
        (_context("local[2]"), None, sys.executable),
        (_context("local[2]"), "/usr/bin/python3", "python3"),
        (_context("local[2]", "spark.pyspark.python"), None, "python3"),
        (_context("spark://host:7077"), None, "python3"),
    ],
)
def test_registering_gives_local_workers_the_python_of_the_driver(
    context: SimpleNamespace, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A venv that is not activated ended in ModuleNotFoundError from a worker; what the user chose stays."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYSPARK_PYTHON", variable)
    session._choose_python(cast(SparkSession, SimpleNamespace(_sc=context)))
    assert context.pythonExec == expected


def test_a_failing_query_is_told_once(spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    """Why a task failed is the exception; nothing is printed besides."""
    with pytest.raises(PySparkException, match="is not true"):
        spark.range(4).selectExpr("assert_true(id < 2)").collect()
    with pytest.raises(PySparkException, match="nosuch"):
        spark.range(4).where("nosuch = 1")
    assert_not_printed(capfd, "is not true", "nosuch")


def test_a_failing_write_is_told_once(spark: SparkSession, shop: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A row that is no message fails the write with one exception, and without Spark's account of its clean-up."""
    header = "named_struct('key', CAST(NULL AS string), 'value', X'')"
    frame = spark.range(1).selectExpr("'x' AS value", f"array({header}) AS headers")
    with pytest.raises(PySparkException, match="a header without a name"):
        frame.write.format("tidelog").option("root", str(shop)).option("topic", TOPIC).mode("append").save()
    assert_not_printed(capfd, "has no value")


STOPPED_EARLY = """
import sys, tidelog
spark = tidelog.spark_session("limits", "local[2]")
frame = spark.read.format("tidelog").options(root=sys.argv[1], subscribe="shop/orders", minPartitions=4).load()
frame.select("offset").show(2)
print(frame.limit(3).count(), len(frame.take(1)))
spark.stop()
"""


def test_limit_that_ends_a_reading_early_is_quiet(tmp_path: Path) -> None:
    """`show`, `limit` and `take` print what was asked for; that workers had more to give is nobody's error."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC).append_many([b"x" * 4096] * 8000)
    command = [sys.executable, "-c", STOPPED_EARLY, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "only showing top 2 rows" in done.stdout
    assert done.stdout.endswith("3 1\n")


def assert_not_printed(capfd: pytest.CaptureFixture[str], *texts: str) -> None:
    """Spark prints from threads of its own; what it still has to say about another test does not count."""
    time.sleep(0.2)
    printed = "".join(capfd.readouterr())
    assert not any(text in printed for text in texts), printed


INTERRUPTED_START = """
import os, signal, threading, time, tidelog
from pathlib import Path

def interrupt():
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while not children.read_text():
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

from tidelog.pipeline.session import java, session
session.find_java = lambda found=java.find_java(): found  # so that the first child is Spark's
threading.Thread(target=interrupt, daemon=True).start()
try:
    tidelog.spark_session(master="local[1]")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_no_java_outlives_a_start_that_was_interrupted() -> None:
    """Ctrl-C while Java starts ends both: a Java that stayed would hold the output of the command open for ever."""
    command = [sys.executable, "-c", INTERRUPTED_START]
    # It returns when no process has the other end of the pipes any more.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_importing_tidelog_imports_no_spark() -> None:
    """Neither the package, nor its pipeline, nor the command line load Spark or Arrow before they are needed."""
    program = (
        "import sys, tidelog, tidelog.pipeline, tidelog.pipeline.session.session, pyspark_tidelog\n"
        "from tidelog.cli.main import main\n"
        "for words in (['--help'], ['pipeline', '--help']):\n"
        "    assert main(words) == 0\n"
        "assert not {'pyspark', 'pyarrow', 'pyiceberg'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_arrow_other_formats_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark asks every such module for its source; one that cannot be imported is as good as none."""
    assert pyspark_tidelog.DefaultSource.name() == "tidelog"
    monkeypatch.setitem(sys.modules, "tidelog.pipeline.source.topics", None)
    assert not hasattr(pyspark_tidelog, "DefaultSource")
    assert not hasattr(pyspark_tidelog, "another")


def test_java_that_does_not_start_is_quoted() -> None:
    """The error has what Java said, and how to get another one."""
    program = (
        "import tidelog\n"
        "try:\n"
        "    tidelog.spark_session('x', 'local[1]', **{'spark.driver.memory': 'much'})\n"
        "except tidelog.ConfigError as error:\n"
        "    print(error)\n"
    )
    told = run_driver(program)
    assert "Invalid maximum heap size: -Xmxmuch" in told
    assert "JAVA_HOME" in told


def test_what_java_says_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    """All lines but the one that every start of Spark prints."""
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "wb") as pipe:
        pipe.write(b"WARNING: Using incubator modules: jdk.incubator.vector\nspark ERROR of importance\nno end")
    java._pass_on(ours)
    assert capfd.readouterr().err == "spark ERROR of importance\nno end"


@pytest.mark.parametrize("error", [ConnectionRefusedError(), Py4JNetworkError()])
def test_java_that_ends_while_it_is_first_spoken_to_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It had said where it listens, and was killed."""

    def launch(*_: object) -> None:
        raise error

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", launch)
    with pytest.raises(GatewayError, match="Java ended while Spark started"):
        start_gateway(SparkConf(loadDefaults=False))


def test_an_archive_that_java_cannot_bear_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When Java ends over an archive, the archive goes and Java starts without it."""
    archive = tmp_path / "broken.jsa"
    archive.write_bytes(b"")
    use = f"-XX:SharedArchiveFile={archive}"
    started: list[str] = []

    def start_context(settings: dict[str, str], home: Path | None) -> None:
        started.append(settings[JAVA_OPTIONS])
        if use in settings[JAVA_OPTIONS]:
            raise GatewayError("a bus error")

    monkeypatch.setattr(session, "_start_context", start_context)
    monkeypatch.setattr(session, "archive_options", lambda *_: [use])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    session._start_java({JAVA_OPTIONS: "-Dmine=1", "spark.master": "local"})
    assert [use in options for options in started] == [True, False]
    assert all(options.endswith("-Dmine=1") for options in started)
    assert not archive.exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PySpark the error says what to install."""
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    with pytest.raises(tidelog.ConfigError, match=r"pyspark is not installed.*pip install 'tidelog\[spark\]'"):
        tidelog.spark_session()


def test_defaults_fit_the_master() -> None:
    """A local session has few shuffle partitions and stays on this machine; a cluster is left to its settings."""
    assert defaults_for("local[8]")["spark.sql.shuffle.partitions"] == "16"
    assert defaults_for("local")["spark.sql.shuffle.partitions"] == "4"
    assert "spark.sql.shuffle.partitions" not in defaults_for("spark://host:7077")
    assert "spark.driver.host" not in defaults_for("yarn")


def test_workers_take_the_installed_spark(tmp_path: Path) -> None:
    """The home of local sessions has all of Spark but its zips, is made once, and is done without if it cannot be."""
    lean = lean_home(tmp_path / "cache")
    assert lean is not None
    assert (lean / "bin" / "spark-submit").is_file()
    assert (lean / "jars").samefile(installed_home() / "jars")
    assert not (lean / "python").exists()
    assert lean_home(tmp_path / "cache") == lean
    assert list((tmp_path / "cache").iterdir()) == [lean]
    (tmp_path / "file").touch()
    assert lean_home(tmp_path / "file" / "cache") is None


def test_another_spark_keeps_its_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A distribution that SPARK_HOME names may not be the installed package, so its files are taken."""
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert lean_home(tmp_path / "cache") is None
