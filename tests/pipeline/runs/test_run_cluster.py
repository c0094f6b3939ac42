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
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.find_spark_home import _find_spark_home
from tests.campaign import first_seed
from tests.pipeline.spark_servers import JAVA_OPTIONS, connect_server, run_submit, standalone_cluster

import tidelog
from tidelog.cli.pipeline import submit
from tidelog.pipeline.address import find_root
from tidelog.pipeline.runs.definition import read_definition
from tidelog.pipeline.runs.run import open_book

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "how-to" / "pipeline-run.md"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_SECONDS = 600
MESSAGES = 200
ATTEMPTS = 5
KILLS = 4
STEPS = {"ship", "compact", "verify", "table", "totals", "checkpoint", "digest", "gc", "report"}

pytestmark = pytest.mark.long


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    """The pipeline of the guide, over two topics and an engine; everything in it is due every second."""
    with tidelog.open(tmp_path / "data", store=(tmp_path / "bucket").as_uri(), metadata="bucket") as log:
        for name in ("shop/orders", "shop/returns"):
            log.topic(name).append_many([b'{"id": %d}' % number for number in range(MESSAGES)], sync=True)
    with tidelog.open_engine(tmp_path / "engine", store=(tmp_path / "objects").as_uri()) as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        engine.apply_many([(seq, tidelog.PutObject("photos", f"{seq % 7}", b"x" * seq)) for seq in range(2, 60)])
        engine.update_low_water_mark(59)
        engine.ship()
    blocks = dict(BLOCK.findall(GUIDE.read_text("utf-8")))
    text = re.sub(r'every = "\w+"', 'every = "1s"', blocks["toml"]).replace("local[*]", "local[2]")
    (tmp_path / "pipeline.toml").write_text(text)
    (tmp_path / "our_jobs.py").write_text(blocks["python pipeline"])
    return tmp_path / "pipeline.toml"


def command(file: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tidelog.cli.main", "pipeline", "run", str(file), *arguments]


def output_of(words: list[str], **how: Any) -> str:
    """What a program prints that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, **how)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def run_declared(program: list[str], directory: Path, environment: dict[str, str]) -> None:
    """Runs Spark's declarative pipelines; again where a worker of a busy machine was later than Spark waits for it."""
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


def test_pipeline_that_stays_and_is_killed_goes_on_where_it_was(declared: Path) -> None:
    """Killed with its Spark at any moment and started again: each step of a run is done once, and all is well."""
    chance = random.Random(first_seed())
    for _ in range(KILLS):
        process = subprocess.Popen(
            command(declared, "--every"), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(chance.uniform(1, 60))  # where it is then does not matter
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(
        command(declared, "--json"), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    reports = reports_of(declared)
    assert all(one["ok"] for one in reports)
    assert json.loads(done.stdout)["run"] == reports[-1]["run"]
    with_totals = [one for one in reports if any(step["step"] == "totals" for step in one["steps"])]
    assert totals(declared) == len(with_totals) > 0
    rows = pq.read_table(declared.parent / "tables" / "shop" / "orders", columns=["_offset"])
    assert sorted(rows.column("_offset").to_pylist()) == list(range(MESSAGES))


def test_pipeline_runs_on_a_cluster_by_command_and_by_submit(declared: Path, tmp_path: Path) -> None:
    """Executors that have never heard of tidelog; spark-submit gives master and settings."""
    (tmp_path / "servers").mkdir()
    with standalone_cluster(tmp_path / "servers") as url:
        report = run_once(declared, "--master", url)
        assert {step["step"] for step in report["steps"]} == STEPS
        time.sleep(1)  # all of it is due again
        run_submit(url, "", {}, submit.__file__, "run", str(declared))
    assert len(reports_of(declared)) == totals(declared) == 2


def test_pipeline_runs_through_spark_connect(declared: Path, tmp_path: Path) -> None:
    """The server has the session; nothing of Java is started here."""
    (tmp_path / "servers").mkdir()
    with connect_server(tmp_path / "servers") as url:
        report = run_once(declared, "--remote", url)
    assert {(step["step"], step["status"]) for step in report["steps"]} == {(name, "done") for name in STEPS}


def test_declarative_pipelines_of_spark_keep_tables_over_topics(declared: Path, tmp_path: Path) -> None:
    """The example: a streaming table and a materialized view; a second run takes only what came since the first."""
    shutil.copytree(ROOT / "examples" / "spark_pipelines", tmp_path / "declarative")
    spec = tmp_path / "declarative" / "spark-pipeline.yml"
    spec.write_text(spec.read_text("utf-8").replace("/var/lib/tidelog/spark-pipelines", str(tmp_path / "storage")))
    lasting = "spark.sql.catalogImplementation=hive"  # the second run finds the tables of the first
    patient = f"spark.python.authenticate.socketTimeout={LIMIT_SECONDS}s"  # a worker of a busy machine starts late
    program = [str(Path(_find_spark_home(), "bin", "spark-pipelines")), "run", "--conf", lasting, "--conf", patient]
    environment = {
        **os.environ,
        "JDK_JAVA_OPTIONS": JAVA_OPTIONS,
        "PYSPARK_PYTHON": sys.executable,
        "TIDELOG_ROOT": str(tmp_path / "data"),
    }
    for count in (MESSAGES, MESSAGES + 5):
        if count > MESSAGES:
            with tidelog.open(tmp_path / "data") as log:
                log.topic("shop/orders").append_many([b"later"] * 5, sync=True)
        run_declared(program, spec.parent, environment)
        warehouse = tmp_path / "declarative" / "spark-warehouse"
        offsets = [
            offset
            for file in sorted((warehouse / "orders").glob("*.parquet"))
            for offset in pq.read_table(file).column("offset").to_pylist()
        ]
        assert sorted(offsets) == list(range(count))
        (view,) = (warehouse / "totals").glob("*.parquet")
        assert pq.read_table(view).column("count").to_pylist() == [count]
