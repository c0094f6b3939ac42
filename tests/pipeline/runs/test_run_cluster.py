"""`tidelog pipeline run` beyond one short command: it stays and is killed; on a cluster, by Connect and spark-submit.

And tables over topics by Spark's own declarative pipelines. All of them start a Spark of their own.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
from pyspark.find_spark_home import _find_spark_home
from tests.campaign import first_seed
from tests.pipeline.spark_servers import JAVA_OPTIONS, connect_server, run_submit, standalone_cluster
from tests.servers import S3Server

import tidelog
from tidelog.cli.pipeline import submit
from tidelog.pipeline.address import find_root
from tidelog.pipeline.runs.definition import read_definition
from tidelog.pipeline.runs.run import open_book

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "how-to" / "pipeline-run.md"
SQL_GUIDE = ROOT / "docs" / "how-to" / "spark-sql.md"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_SECONDS = 600
MESSAGES = 200
ATTEMPTS = 5
PARTS = 8
LATEST_SECONDS = 20.0
PROGRAMS = Path(_find_spark_home(), "bin")
PARTITIONS = 12
HELD_OFFSET = 200
PARTITION_MESSAGES = HELD_OFFSET + 50
# Rows go on in small batches: a task that is held has handed over those before.
COPIED = f"""
name = "copied"
[spark.settings]
"spark.driver.host" = "127.0.0.1"
"spark.executor.memory" = "512m"
"spark.network.timeout" = "{LIMIT_SECONDS}s"
"spark.scheduler.minRegisteredResourcesRatio" = 1.0
"spark.scheduler.maxRegisteredResourcesWaitingTime" = "{LIMIT_SECONDS}s"
"spark.sql.execution.arrow.maxRecordsPerBatch" = 50
[places.shop]
root = "./data"
topics = ["shop/orders"]
[[steps]]
do = "ship"
[[steps]]
name = "copy"
do = "python"
function = "copied_jobs:copy"
after = "ship"
options = {{ signs = "SIGNS", held_offset = {HELD_OFFSET} }}
[[steps]]
do = "table"
after = "copy"
options = {{ to = "./table", values = "raw" }}
[[steps]]
do = "verify"
after = "table"
"""
COPIED_JOBS = """
import time
from pathlib import Path
from pyspark.sql.functions import udf

def copy(spark, context):
    signs, held_offset = context.options["signs"], context.options["held_offset"]

    def wait_for(name):  # executors have no such module: what goes to them is in here
        deadline = time.monotonic() + 600
        while not Path(signs, name).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(name)
            time.sleep(0.05)

    def held(value, offset):
        if offset == held_offset:
            Path("held").touch()  # in the working directory of the executor
            wait_for("goes-on")
        return value

    root = context.root.location
    rows = spark.read.format("tidelog").option("root", root).option("subscribe", "shop/orders").load()
    copied = rows.select(udf(held, "binary")("value", "offset").alias("value")).write.format("tidelog")
    copied.options(**context.once).option("root", root).option("topic", "shop/copy").mode("append").save()
    Path(signs, "copied").touch()
    wait_for("table-begins")
"""
ENVIRONMENT = {**os.environ, "JDK_JAVA_OPTIONS": JAVA_OPTIONS, "PYSPARK_PYTHON": sys.executable}
STEPS = {"ship", "compact", "verify", "table", "totals", "checkpoint", "digest", "gc", "report"}


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    """The pipeline of the guide, over two topics and an engine; everything in it is due every second."""
    return declare(tmp_path, tmp_path.as_uri())


@pytest.fixture
def declared_in_s3(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with the store in SeaweedFS."""
    settings = s3_server.settings()
    assert settings.store_secret_access_key is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(settings.store_endpoint))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(settings.store_access_key_id))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", settings.store_secret_access_key.reveal())
    return declare(tmp_path, store_of(s3_server, tmp_path))


def store_of(server: S3Server, directory: Path) -> str:
    return server.url(f"pipelines/{directory.name}")


def declare(directory: Path, store: str) -> Path:
    with tidelog.open(directory / "data", store=f"{store}/bucket", metadata="bucket") as log:
        for name in ("shop/orders", "shop/returns"):
            log.topic(name).append_many([b'{"id": %d}' % number for number in range(MESSAGES)], sync=True)
    with tidelog.open_engine(directory / "engine", store=f"{store}/objects") as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        engine.apply_many([(seq, tidelog.PutObject("photos", f"{seq % 7}", b"x" * seq)) for seq in range(2, 60)])
        engine.update_low_water_mark(59)
        engine.ship()
    blocks = dict(BLOCK.findall(GUIDE.read_text("utf-8")))
    text = re.sub(r'every = "\w+"', 'every = "1s"', blocks["toml"]).replace("local[*]", "local[2]")
    text = text.replace("keep_reports = 30", "keep_reports = 1000")
    (directory / "pipeline.toml").write_text(text)
    (directory / "our_jobs.py").write_text(blocks["python pipeline"])
    return directory / "pipeline.toml"


def command(file: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tidelog.cli.main", "pipeline", "run", str(file), *arguments]


def output_of(words: list[str], **how: Any) -> str:
    """What a program prints that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, **how)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def run_declared(directory: Path, environment: dict[str, str]) -> None:
    """Runs Spark's declarative pipelines; again where a worker of a busy machine was later than Spark waits for it."""
    lasting = "spark.sql.catalogImplementation=hive"  # the second run finds the tables of the first
    patient = f"spark.python.authenticate.socketTimeout={LIMIT_SECONDS}s"  # a worker of a busy machine starts late
    program = [str(PROGRAMS / "spark-pipelines"), "run", "--conf", lasting, "--conf", patient]
    said = ""
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            program, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
        if done.returncode == 0:
            return
        said = f"{done.stdout}\n{done.stderr}"
        if "Python worker failed to connect back" not in said:
            break
    pytest.fail(said)


def run_once(file: Path, *arguments: str) -> dict[str, Any]:
    """The report of one run by its command."""
    report: dict[str, Any] = json.loads(output_of(command(file, "--json", *arguments)))
    return report


def reports_of(file: Path) -> list[dict[str, Any]]:
    """The reports of all runs that have ended, oldest first."""
    with open_book(read_definition(file)) as book:
        found = [book.report(run, "report") for run in book.runs()]
    return [one for one in found if one is not None]


def totals(file: Path) -> int:
    """How many messages the step of the user's own has written: one a run."""
    with find_root(file.parent / "data").open() as log:
        return sum(1 for _ in log.topic("totals/orders").read()) if log.has_topic("totals/orders") else 0


class Killed:
    """A pipeline that stays, in a session of the system's, and is hit in one of these ways at some instant."""

    BELOW: ClassVar = {"java": "bin/java", "worker": "pyspark.daemon"}
    WAYS: ClassVar = (*BELOW, "driver", "everything", "store", "rival")

    def __init__(self, file: Path, server: S3Server, chance: random.Random) -> None:
        self._file = file
        self._server = server
        self._chance = chance
        self._said = (file.parent / "said").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def hit(self, way: str, after_seconds: float) -> bool:
        """Starts it where it does not run. It is at work when its time has come, whatever was there before, and ends
        only if that is what is done; whether it was."""
        if self._process is None:
            self._process = subprocess.Popen(
                command(self._file, "--every", "--debug"),
                start_new_session=True,
                stdout=self._said,
                stderr=subprocess.STDOUT,
            )
        time.sleep(after_seconds)  # where it is then does not matter
        assert self._process.poll() is None, (self._file.parent / "said").read_text("utf-8", "replace")[-5000:]
        if way in self.BELOW:
            found = [one for one, command in self._running().items() if self.BELOW[way] in command]
            with suppress(ProcessLookupError, IndexError):
                os.kill(self._chance.choice(found), signal.SIGKILL)
        elif way == "store":
            self._take_the_store_away(self._chance.uniform(0.5, LATEST_SECONDS / 2))
        elif way == "rival":
            rival = subprocess.run(
                command(self._file), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
            assert rival.returncode in (0, 4), rival.stderr  # 0 if it came between two runs
        else:
            self.end(only_driver=way == "driver")
            return True
        return False

    def _take_the_store_away(self, seconds: float) -> None:
        if self._chance.random() < 0.5:
            self._server.pause()
            time.sleep(seconds)
            self._server.resume()
        else:
            self._server.kill()
            time.sleep(seconds)
            self._server.start()

    def end(self, *, only_driver: bool = False) -> None:
        """Returns when nothing of it is left: its Java and its workers end with the driver."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            (os.kill if only_driver else os.killpg)(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + LIMIT_SECONDS / 2
        while left := self._running():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)
        self._process = None

    def close(self) -> None:
        self.end()
        self._said.close()

    def _running(self) -> dict[int, str]:
        """The commands of the processes of its session, by their ids."""
        assert self._process is not None
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._process.pid and state != "Z":
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = words.decode("utf-8", "replace")
        return found


def add_work(directory: Path, last_seq: int) -> int:
    """More messages and entries, so that every step has something to do again; the last entry's number."""
    with tidelog.open(directory / "data") as log:
        for name in ("shop/orders", "shop/returns"):
            log.topic(name).append_many([b'{"id": %d}' % number for number in range(MESSAGES)], sync=True)
    with tidelog.open_engine(directory / "engine") as engine:
        assert engine.applied_seq == last_seq
        many = range(last_seq + 1, last_seq + 21)
        engine.apply_many([(seq, tidelog.PutObject("photos", f"{seq % 7}", b"x" * seq)) for seq in many])
        engine.update_low_water_mark(many[-1])
        engine.ship()
    return many[-1]


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_pipeline_that_is_hit_in_any_way_goes_on_where_it_was(
    declared_in_s3: Path, s3_server: S3Server, part: int
) -> None:
    """At any instant the driver, a Python worker, all of Java, or everything is killed, the store goes away, or another
    run is started: the next run is not locked out, each step of a run is done once, and what is there in the end is
    what one run that nothing happens to makes."""
    every_way = random.Random(first_seed() + part // 2).sample(Killed.WAYS, len(Killed.WAYS))
    ways, chance = every_way[part % 2 :: 2], random.Random(first_seed() + part)
    last_seq, filled = 59, 1
    pipeline = Killed(declared_in_s3, s3_server, chance)
    try:
        for way in ways:
            if pipeline.hit(way, chance.uniform(0.5, LATEST_SECONDS)):
                last_seq, filled = add_work(declared_in_s3.parent, last_seq), filled + 1
    finally:
        pipeline.close()
    report = run_once(declared_in_s3)
    assert report["run"] == reports_of(declared_in_s3)[-1]["run"]
    time.sleep(1)  # all of it is due again: a run from its beginning
    assert {step["step"] for step in run_once(declared_in_s3)["steps"]} == STEPS
    check_done_once(declared_in_s3, store_of(s3_server, declared_in_s3.parent), filled * MESSAGES, last_seq)


def check_done_once(file: Path, store: str, messages: int, last_seq: int) -> None:
    """Reports, tables, the topic of the user's step, the engine and its checkpoint: whole, and nothing twice."""
    reports = reports_of(file)
    for one in reports:
        assert one["ok"], one["findings"]
        places = [(step["step"], step["on"], step["topic"]) for step in one["steps"]]
        assert len(set(places)) == len(places)
    with_totals = [one for one in reports if any(step["step"] == "totals" for step in one["steps"])]
    assert totals(file) == len(with_totals) > 0
    for name in ("orders", "returns"):
        rows = pq.read_table(file.parent / "tables" / "shop" / name, columns=["_offset"])
        assert sorted(rows.column("_offset").to_pylist()) == list(range(messages))
    with tidelog.open_engine(file.parent / "engine") as engine:
        found = engine.applied_seq, engine.digest()
    with tidelog.restore_engine(file.parent / "restored", store=f"{store}/objects") as restored:
        assert (restored.applied_seq, restored.digest()) == found
    assert found[0] == last_seq


@pytest.mark.long
def test_pipeline_runs_on_a_cluster_by_command_and_by_submit(declared: Path, tmp_path: Path) -> None:
    """Executors that have never heard of tidelog; spark-submit gives master and settings."""
    (tmp_path / "servers").mkdir()
    with standalone_cluster(tmp_path / "servers") as url:
        report = run_once(declared, "--master", url)
        assert {step["step"] for step in report["steps"]} == STEPS
        time.sleep(1)  # all of it is due again
        run_submit(url, "", {}, submit.__file__, "run", str(declared))
    assert len(reports_of(declared)) == totals(declared) == 2


@pytest.mark.long
def test_run_whose_executors_are_killed_at_work_ends_well_and_does_nothing_twice(tmp_path: Path) -> None:
    """One dies while its task has read most of its rows, then all of them while a table is written: Spark gives their
    tasks to new ones. Every proof holds; the copy and the table have each message once."""
    with tidelog.open(tmp_path / "data", store=(tmp_path / "bucket").as_uri(), metadata="bucket") as log:
        orders = log.topic("shop/orders", partitions=PARTITIONS)
        for partition in range(PARTITIONS):
            ids = range(partition, PARTITIONS * PARTITION_MESSAGES, PARTITIONS)
            orders.append_many([b'{"id": %d}' % number for number in ids], partition=partition, sync=True)
    signs, servers, said = tmp_path / "signs", tmp_path / "servers", tmp_path / "said"
    (tmp_path / "pipeline.toml").write_text(COPIED.replace("SIGNS", str(signs)))
    (tmp_path / "copied_jobs.py").write_text(COPIED_JOBS)
    for directory in (signs, servers):
        directory.mkdir()
    words = command(tmp_path / "pipeline.toml", "--json", "--master")
    with standalone_cluster(servers) as url, said.open("wb") as file:
        running = subprocess.Popen([*words, url], stdout=subprocess.PIPE, stderr=file)
        try:
            wait_until(lambda: len(executors(servers, "held")) == 2, running, said)
            first, second = executors(servers, "held")
            os.kill(first, signal.SIGKILL)
            (signs / "goes-on").touch()
            wait_until((signs / "copied").exists, running, said)
            os.kill(second, signal.SIGSTOP)  # the table is not done without the task that it is given
            (signs / "table-begins").touch()
            wait_until(lambda: any((tmp_path / "table").glob("**/*.parquet")), running, said)
            at_work = executors(servers)
            for executor in at_work:
                os.kill(executor, signal.SIGKILL)
            written = len(list((tmp_path / "table").glob("**/*.parquet")))
            printed, _ = running.communicate(timeout=LIMIT_SECONDS)
        finally:
            running.kill()
            running.wait()
    assert running.returncode == 0, said.read_text("utf-8", "replace")
    assert len({*at_work} - {first, second}) == 1  # the one that came for the first
    assert written < PARTITIONS
    check_copied_once(tmp_path, json.loads(printed))


def check_copied_once(directory: Path, report: dict[str, Any]) -> None:
    """The report's proofs, and the rows of the copy and of the table."""
    assert {one["step"]: one["status"] for one in report["steps"]} == dict.fromkeys(
        ("ship", "copy", "table", "verify"), "done"
    )
    assert report["ok"], report["findings"]
    assert all(one["came_out"] in (None, one["went_in"]) for one in report["reconciliations"])
    (proof,) = (one for one in report["reconciliations"] if one["subject"].startswith("shop/orders to "))
    assert proof["came_out"]["messages"] == PARTITIONS * PARTITION_MESSAGES
    ids = range(PARTITIONS * PARTITION_MESSAGES)
    with find_root(directory / "data").open() as log:
        copied = [(one.offset, json.loads(one.value or b"")["id"]) for one in log.topic("shop/copy").read()]
    assert [offset for offset, _ in copied] == list(ids)
    assert sorted(number for _, number in copied) == list(ids)
    rows = pq.read_table(directory / "table", columns=["partition", "offset", "value"]).to_pylist()
    assert sorted((json.loads(one["value"])["id"], one["partition"], one["offset"]) for one in rows) == [
        (number, number % PARTITIONS, number // PARTITIONS) for number in ids
    ]


def executors(servers: Path, marked: str = "") -> list[int]:
    """The executors of a cluster, by their ids: those in whose working directory there is a file of this name."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            place = (entry / "cwd").readlink()
            is_executor = b"CoarseGrainedExecutorBackend" in (entry / "cmdline").read_bytes()
            if is_executor and place.is_relative_to(servers) and (place / marked).exists():
                found.append(int(entry.name))
    return found


def wait_until(is_so: Callable[[], bool], running: subprocess.Popen[bytes], said: Path) -> None:
    """Until it is so, while the run goes on."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert running.poll() is None, said.read_text("utf-8", "replace")[-5000:]
        assert time.monotonic() < deadline, said.read_text("utf-8", "replace")[-5000:]
        time.sleep(0.01)


@pytest.mark.long
def test_pipeline_runs_through_spark_connect(declared: Path, tmp_path: Path) -> None:
    """The server has the session; nothing of Java is started here."""
    (tmp_path / "servers").mkdir()
    with connect_server(tmp_path / "servers") as url:
        report = run_once(declared, "--remote", url)
    assert {(step["step"], step["status"]) for step in report["steps"]} == {(name, "done") for name in STEPS}


@pytest.mark.parametrize("counts", [(MESSAGES,), pytest.param((MESSAGES, MESSAGES + 5), marks=pytest.mark.long)])
def test_declarative_pipelines_of_spark_keep_tables_over_topics(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """The example: a streaming table and a materialized view; a second run takes only what came since the first."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("shop/orders").append_many([b'{"id": %d}' % number for number in range(MESSAGES)], sync=True)
    shutil.copytree(ROOT / "examples" / "spark_pipelines", tmp_path / "declarative")
    spec = tmp_path / "declarative" / "spark-pipeline.yml"
    spec.write_text(spec.read_text("utf-8").replace("/var/lib/tidelog/spark-pipelines", str(tmp_path / "storage")))
    environment = ENVIRONMENT | {"TIDELOG_ROOT": str(tmp_path / "data")}
    for count in counts:
        if count > MESSAGES:
            with tidelog.open(tmp_path / "data") as log:
                log.topic("shop/orders").append_many([b"later"] * 5, sync=True)
        run_declared(spec.parent, environment)
        warehouse = tmp_path / "declarative" / "spark-warehouse"
        offsets = [
            offset
            for file in sorted((warehouse / "orders").glob("*.parquet"))
            for offset in pq.read_table(file).column("offset").to_pylist()
        ]
        assert sorted(offsets) == list(range(count))
        (view,) = (warehouse / "totals").glob("*.parquet")
        assert pq.read_table(view).column("count").to_pylist() == [count]


@pytest.mark.long
def test_guide_to_sql_is_followed_without_python(tmp_path: Path) -> None:
    """By `spark-sql` and `spark-pipelines` alone: a table, an insert, a view, a copy, an engine, a stream."""
    with tidelog.open_engine(tmp_path / "node", store=(tmp_path / "engine").as_uri()) as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        engine.apply_many([(seq, tidelog.PutObject("photos", f"{seq}.png", b"x" * seq)) for seq in (2, 3)])
        engine.update_low_water_mark(3)
        engine.ship()
    blocks = BLOCK.findall(SQL_GUIDE.read_text("utf-8").replace("/data/", f"{tmp_path}/"))
    project = tmp_path / "project"
    (project / "transformations").mkdir(parents=True)
    (project / "guide.sql").write_text("\n".join(text for kind, text in blocks if kind == "sql"))
    (project / "spark-pipeline.yml").write_text(dict(blocks)["yaml"])
    (project / "transformations" / "orders.sql").write_text(dict(blocks)["sql pipeline"])
    spark_sql = [str(PROGRAMS / "spark-sql"), "--master", "local[2]"]
    printed = output_of([*spark_sql, "-f", "guide.sql"], cwd=project, env=ENVIRONMENT).splitlines()
    for row in ("customer-0\t30", "customer-2\t70", 'shop/loud\t0\t{"ID":0,"AMOUNT":0}', "PutObject\t2", "3.png\t3"):
        assert row in printed
    for count in (6, 7):
        if count > 6:
            insert = "INSERT INTO orders (value) SELECT CAST('later' AS BINARY)"
            output_of([*spark_sql, "-e", insert], cwd=project, env=ENVIRONMENT)
        run_declared(project, ENVIRONMENT)
        (view,) = (project / "spark-warehouse" / "seen_count").glob("*.parquet")
        assert pq.read_table(view).column("messages").to_pylist() == [count]
