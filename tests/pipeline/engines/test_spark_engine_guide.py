"""The guides to engines in Spark keep their word: their blocks run in order, and the results are what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tidelog.pipeline.source.engine_options import _ENTRY_NAMES, _OBJECT_NAMES, ENTRY_COLUMNS, OBJECT_COLUMNS

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "spark-engine.md"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_guide_runs(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries, a stream and objects: whoever copies the blocks one by one gets these results."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, text in BLOCK.findall(GUIDE.read_text("utf-8")):
        if kind == "python spark":
            exec(compile(text, str(GUIDE), "exec"), names)
        else:  # over a table of another format
            assert spark._jsparkSession.sessionState().sqlParser().parsePlan(text).nodeName() == "MergeIntoTable"
    spark.catalog.dropTempView("changes")
    assert names["kinds"] == {"CreateBucket": 1, "PutObject": 201, "CopyObject": 1, "DeleteObject": 1}
    assert [tuple(row) for row in names["refused"]] == [(204, "there is no bucket 'nowhere'")]
    assert names["some_bytes"] == sum(range(98, 108))
    assert names["changed"] == {"insert": 103}
    assert sum(names["seen"]) == 204
    assert len(names["seen"]) == 2
    assert names["now_count"] == 199
    assert names["then_bytes"] == sum(range(200)) + 199
    assert names["deleted"] == ["2026/000.png"]


def test_the_jobs_of_the_other_guide_run(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is compacted, verified, copied and restored as the guide shows it, and every job proves what it did."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    ((kind, text),) = BLOCK.findall((GUIDE.parent / "engine-pipeline.md").read_text("utf-8"))
    assert kind == "python spark"
    exec(compile(text, "engine-pipeline.md", "exec"), names)
    assert [names[one].is_good for one in ("compacted", "checked", "copied", "restored")] == [True] * 4
    assert names["compacted"].seq == names["copied"].seq == names["restored"].seq == 201


def test_every_option_and_column_is_in_the_guide() -> None:
    """Nobody has to look into the code for what can be asked for."""
    text = GUIDE.read_text("utf-8")
    known = {*_ENTRY_NAMES, *_OBJECT_NAMES} - {"path", "config"}
    assert {name for name in known if f"`{name}`" not in text} == set()
    assert {name for name in {*ENTRY_COLUMNS, *OBJECT_COLUMNS} if not re.search(rf"\b{name}\b", text)} == set()
