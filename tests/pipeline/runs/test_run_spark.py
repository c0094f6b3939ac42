"""`tidelog pipeline run` in Spark: the guide's pipeline runs, and a short one by its command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.cli.app import run
from tidelog.errors import StoreUnavailableError, TidelogError
from tidelog.pipeline.address import find_root
from tidelog.pipeline.runs.definition import read_definition
from tidelog.pipeline.runs.run import run_pipeline

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "pipeline-run.md"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = """
name = "short"
[places.shop]
root = "./data"
topics = ["shop/orders"]
[[steps]]
do = "ship"
[[steps]]
name = "totals"
do = "python"
function = "short_jobs:totals"
after = "ship"
[[steps]]
do = "verify"
every = "1d"
after = "ship"
"""
FRAGILE = """
name = "fragile"
spark.master = "local[2]"
places.shop.root = "./data"
[[steps]]
name = "copy"
do = "python"
function = "fragile_jobs:copy"
options = { noted = "NOTED" }
"""
FRAGILE_JOBS = """
import os, signal
from pathlib import Path

def copy(spark, context):
    noted = Path(context.options["noted"])
    attempt = len(noted.read_text().split()) if noted.exists() else 0
    with noted.open("a") as file:
        print(attempt, file=file)
    rows = spark.range(5).selectExpr("CAST(id AS string) AS value").write.format("tidelog").options(**context.once)
    rows.option("root", context.root.location).option("topic", "shop/copy").mode("append").save()
    if attempt == 0:
        os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
    if attempt == 1:
        spark.sparkContext.parallelize([0], 1).map(lambda _: os.kill(os.getpid(), signal.SIGKILL)).count()
    return {"rows": spark.range(5).count()}
"""
LIMIT_SECONDS = 600


def _make(path: Path) -> None:
    """Topics with something to ship, and the code of the guide."""
    with tidelog.open(path / "data", store=(path / "bucket").as_uri(), metadata="bucket") as log:
        for name in ("shop/orders", "shop/returns"):
            log.topic(name).append_many([b'{"id": %d}' % number for number in range(20)], sync=True)
    blocks = dict(BLOCK.findall(GUIDE.read_text("utf-8")))
    for name in ("our_jobs", "short_jobs"):
        (path / f"{name}.py").write_text(blocks["python pipeline"])


def test_short_pipeline_is_run_by_its_command(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ships, verifies and counts; what is done once a day is not done again. Damage is found, and is the exit code."""
    _make(tmp_path)
    file = tmp_path / "pipeline.toml"
    file.write_text(SHORT)
    assert run(["pipeline", "run", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["status"]) for one in report["steps"]] == [
        ("ship", "done"),
        ("totals", "done"),
        ("verify", "done"),
    ]
    assert [one["subject"] for one in report["reconciliations"]] == ["shop/orders", "shop/orders"]
    assert "totals messages: 20" in report["notes"]
    with find_root(tmp_path / "data").open() as log:
        assert [message.value for message in log.topic("totals/orders").read()] == [b"20"]
    assert run(["pipeline", "plan", str(file), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["steps"]
    assert [(one["step"], one["is_due"]) for one in planned] == [("ship", True), ("totals", True), ("verify", False)]
    (damaged,) = (tmp_path / "bucket").rglob("shop/orders/objects/data-*.tlog")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    file.write_text(SHORT.replace('every = "1d"', ""))
    assert run(["pipeline", "run", str(file)]) == 5
    told = capsys.readouterr().err
    assert "problem: totals shop: read: a checksum that does not match" in told
    assert "problem: shop/orders: storage/topics/shop/orders" in told


@pytest.mark.long
def test_pipeline_of_the_guide_runs(spark: SparkSession, tmp_path: Path) -> None:
    """Every kind of step, on topics and an engine, in one run; the next one has less to do."""
    _make(tmp_path)
    with tidelog.open_engine(tmp_path / "engine", store=(tmp_path / "objects").as_uri()) as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        engine.apply_many([(seq, tidelog.PutObject("photos", f"{seq}", b"x" * seq)) for seq in range(2, 30)])
        engine.update_low_water_mark(29)
        engine.ship()
    blocks = dict(BLOCK.findall(GUIDE.read_text("utf-8")))
    (tmp_path / "pipeline.toml").write_text(blocks["toml"])
    definition = read_definition(tmp_path / "pipeline.toml")
    report = run_pipeline(definition, lambda: spark)
    assert report.ok, report.findings
    assert {one.step for one in report.steps} == {step.name for step in definition.steps}
    assert [one.topic for one in report.steps if one.step == "table"] == ["shop/orders", "shop/returns"]
    assert spark.read.parquet(str(tmp_path / "tables" / "shop" / "orders")).count() == 20
    assert (tmp_path / "report.html").stat().st_size > 1000
    again = run_pipeline(definition, lambda: spark)
    assert again.ok, again.findings
    assert {one.step for one in again.steps} == {"ship", "table", "totals", "checkpoint", "digest", "report"}


def test_run_whose_spark_is_killed_below_it_goes_on_with_another(tmp_path: Path) -> None:
    """First all of Java is killed, then a Python worker: the step is tried again, and what it wrote is there once."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("shop/orders").append(b"x")
    (tmp_path / "pipeline.toml").write_text(FRAGILE.replace("NOTED", str(tmp_path / "noted")))
    (tmp_path / "fragile_jobs.py").write_text(FRAGILE_JOBS)
    command = [sys.executable, "-m", "tidelog.cli.main", "pipeline", "run", str(tmp_path / "pipeline.toml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(done.stdout)["steps"]
    assert (step["status"], step["attempts"]) == ("done", 3)
    assert (tmp_path / "noted").read_text().split() == ["0", "1", "2"]
    with tidelog.open(tmp_path / "data") as log:
        assert sorted(message.value or b"" for message in log.topic("shop/copy").read()) == [
            b"%d" % n for n in range(5)
        ]


def test_error_of_a_run_is_not_taken_for_the_end_of_a_session_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A session whose Java was killed is left before the next one starts: what is raised later passes by it."""
    seen: list[str] = []

    @contextmanager
    def session(*_: object, **__: object) -> Iterator[int]:
        number = len(seen)
        seen.append("open")
        try:
            yield number
        except TidelogError:
            seen[number] = "failed"
            raise
        seen[number] = "left"

    def run_twice(_: object, started: Callable[[], int], **__: object) -> None:
        assert (started(), started()) == (0, 1)
        raise StoreUnavailableError("away")

    monkeypatch.setattr("tidelog.cli.pipeline.run.spark_for", session)
    monkeypatch.setattr("tidelog.pipeline.session.session.has_ended", lambda spark: spark == 0)
    monkeypatch.setattr("tidelog.pipeline.runs.run.run_pipeline", run_twice)
    tidelog.open(tmp_path / "data").close()
    (tmp_path / "pipeline.toml").write_text(SHORT)
    assert run(["pipeline", "run", str(tmp_path / "pipeline.toml")]) == 4
    assert seen == ["left", "failed"]
    assert "away" in capsys.readouterr().err
