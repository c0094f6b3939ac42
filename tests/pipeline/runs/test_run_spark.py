"""`tidelog pipeline run` in Spark: the guide's pipeline runs, and a short one by its command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.cli.app import run
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
