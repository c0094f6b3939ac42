"""The digest that Spark computes is the engine's own, from every source, at every seq that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.engines.computing import work_without_spark
from tests.pipeline.engines.eventful import EventfulEngine

from tidelog.pipeline.engine_jobs.digest import digest_engine


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_engines_own_whatever_happened(
    tmp_path: Path, seed: int, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rollbacks, crashes, lost disks, retention and compactions; newest and earlier, from states and the log."""
    work_without_spark(monkeypatch)
    history = EventfulEngine(tmp_path, seed)
    history.run(8)
    engine = history.node.engine
    start, end = engine.statistics().history_start_seq, history.high_water_mark
    for seq in {end, start, (start + end) // 2}:
        for from_log in (False, True):
            report = digest_engine(spark, history.root, seq, from_log=from_log)
            assert (report.digest, report.seq) == (engine.digest(seq), seq)
    history.close()


def test_spark_computes_it(tmp_path: Path, spark: SparkSession) -> None:
    """With real tasks and a real shuffle; the proof tells how many things there are."""
    history = EventfulEngine(tmp_path, "spark")
    history.run(6)
    report = digest_engine(spark, history.root)
    assert report.digest == history.node.engine.digest(history.high_water_mark)
    assert report.is_good
    assert report.proofs[0].went_in.messages == report.things > 0
    assert "things, digest:" in str(report.proofs[0])
    history.close()
