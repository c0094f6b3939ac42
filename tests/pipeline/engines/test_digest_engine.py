"""The digest that Spark computes is the engine's own, from every source, at every seq that is kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.engines.computing import work_without_spark
from tests.pipeline.engines.damaged import StoredEngine
from tests.pipeline.engines.eventful import EventfulEngine

import tidelog
from tidelog.errors import DataError, InputError, NotFoundError
from tidelog.pipeline.address import find_engine
from tidelog.pipeline.jobs.engine.digest import digest_engine
from tidelog.pipeline.jobs.engine.verify import verify_engine

NO_SPARK: Any = None


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
    assert report.reconciliations[0].went_in.messages == report.things > 0
    assert "things, digest:" in str(report.reconciliations[0])
    history.close()


def test_a_damaged_state_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it, and the log, lead to the same; when nothing does, what is wrong is named."""
    work_without_spark(monkeypatch)
    engine = StoredEngine.make(tmp_path / "store")
    right = digest_engine(NO_SPARK, engine.root)
    for part in engine.compaction.versions:
        engine.flip(engine.path(part.key), 60)
    again = digest_engine(NO_SPARK, engine.root)
    assert (again.digest, again.is_good) == (right.digest, True)
    assert any("versions-0000000001" in note and "passed over" in note for note in again.notes)
    for number in range(len(engine.descriptors)):
        engine.flip(engine.log_object(number))
    with pytest.raises(DataError, match="the state cannot be computed: storage/engine/main/"):
        digest_engine(NO_SPARK, engine.root)


def test_seqs_that_cannot_be_had_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not shipped yet, and what retention has removed; the error says what can be had."""
    work_without_spark(monkeypatch)
    history = EventfulEngine(tmp_path, "seqs")
    history.run(2, keeps_all=True)
    end = history.high_water_mark
    history.node.engine.collect_garbage(horizon=end - 5)
    history.close()
    with pytest.raises(InputError, match=f"up to seq {end}"):
        digest_engine(NO_SPARK, history.root, end + 1)
    with pytest.raises(NotFoundError, match=f"from seq {end - 5} on"):
        digest_engine(NO_SPARK, history.root, end - 6)


def test_what_a_crash_tore_apart_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a batch is in the log, taken back by recovery, and another entry has its seq."""
    work_without_spark(monkeypatch)
    puts = tidelog.Batch([tidelog.PutObject("b", f"k{number}", bytes(300)) for number in range(5)])
    with tidelog.open_engine(tmp_path / "whole") as engine:
        engine.apply_many([(1, tidelog.CreateBucket("b")), (2, puts)])
        shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    (newest,) = (tmp_path / "torn" / "wal").glob("wal.*.log")
    os.truncate(newest, newest.stat().st_size - 100)
    with tidelog.open_engine(tmp_path / "torn", store=(tmp_path / "store").as_uri()) as engine:
        engine.apply_many([(2, tidelog.PutObject("b", "other", bytes(300))), (3, tidelog.DeleteObject("b", "k1"))])
        engine.update_low_water_mark(3)
        engine.create_checkpoint()
        digest = engine.digest()
    root = find_engine((tmp_path / "store").as_uri())
    for from_log in (False, True):
        assert digest_engine(NO_SPARK, root, from_log=from_log).digest == digest
    assert verify_engine(NO_SPARK, root, digest=digest).findings == ()
