"""The Spark guide keeps its word: its blocks run in order, in one session, and their results are what it says."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tidelog.cli.app import run
from tidelog.pipeline.address import find_root

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "spark.md"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_commands(script: str) -> None:
    """The commands of a shell block, in this process: they share the session that is running."""
    for line in script.replace("\\\n", " ").splitlines():
        words = [word.replace("$PWD", os.getcwd()) for word in shlex.split(line)]
        assert words[0] == "tidelog"
        assert run(words[1:]) == 0, line


@pytest.mark.long
def test_the_guide_runs(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch, stream, lag, migration, table and jobs: whoever copies the blocks one by one gets these results."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, text in BLOCK.findall(GUIDE.read_text("utf-8")):
        if kind == "python spark":
            exec(compile(text, str(GUIDE), "exec"), names)
        elif kind == "sh spark":
            run_commands(text)
    names["spark"].streams.removeListener(names["lag"])
    assert names["totals"] == {"CH": (750, 37_500), "DE": (250, 12_000)}
    assert names["newest_count"] == 10
    assert names["streamed_amount"] == 49_500
    assert [one.lag_messages for one in names["seen"] if one.query_name == "slow"] == [402, 0]
    assert names["moved_count"] == 300
    assert names["table"].num_rows == 250
    with find_root(tmp_path / "spark-tour" / "data").open() as log:
        assert [one.value for one in log.topic("shop/from-kafka").read()] == [
            b"%d/%d" % (partition, offset) for partition in range(3) for offset in range(100)
        ]
        assert log.topic("shop/german-orders").next_offset == 250
    assert (tmp_path / "spark-tour" / "report.html").stat().st_size > 10_000


def test_the_readme_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who runs the first block and then that of Spark sees the counts that Spark wrote to a topic."""
    monkeypatch.chdir(tmp_path)
    blocks = dict(BLOCK.findall((GUIDE.parents[2] / "README.md").read_text("utf-8")))
    for kind in ("python", "python spark"):
        # The processes of the session are in another directory.
        exec(compile(blocks[kind].replace("./data", str(tmp_path / "data")), "README.md", "exec"), {})
    assert "shop/counts" in capsys.readouterr().out


def test_what_the_guide_does_not_run_is_marked() -> None:
    """Only the block that needs a broker is left out."""
    kinds = [kind for kind, _ in BLOCK.findall(GUIDE.read_text("utf-8"))]
    assert {kind for kind in kinds if kind not in ("python spark", "sh spark")} == {"python kafka"}
    assert kinds.count("python kafka") == 1
