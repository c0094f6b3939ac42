"""`tidelog pipeline gc --engine` through Spark, with data files, and as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.engine.compacting import compact_by_hand
from tests.pipeline.engines.engine_places import EngineHome

import tidelog
from tidelog.cli.app import run
from tidelog.engine.sst.sorted_index import read_compaction
from tidelog.pipeline.jobs.gc import compare_data_files
from tidelog.pipeline.jobs.gc_tasks import read_names
from tidelog.store.urls import open_store


@pytest.fixture
def home(tmp_path: Path) -> EngineHome:
    """An engine that was compacted twice, with large values in files."""
    home = EngineHome(tmp_path, local_retention_bytes=0)
    with home.open() as engine:
        for _ in range(2):
            home.feed(engine, 120)
            compact_by_hand(open_store(home.url), large_bytes=800)
        home.feed(engine, 20)
    return home


def test_the_commands_plan_keep_and_apply(
    spark: SparkSession, home: EngineHome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan is shown and kept, carried out, and the engine that is opened afterwards has all it had."""
    with home.open() as engine:
        digest = engine.digest()
    stray = home.store / "storage/engine/main/data/bucket-0/gone/v0000000003.dat"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"x")
    command = ["--json", "pipeline", "gc", "--engine", home.url]
    assert run([*command, "--grace", "0", "--plan", str(tmp_path / "plan.json")]) == 0
    shown = json.loads(capsys.readouterr().out)
    kinds = {one["kind"] for one in shown["found"] if one["action"] == "remove"}
    assert {"compacted log", "index file", "root", "data file"} <= kinds
    before = home.stored()
    assert run([*command, "--apply", str(tmp_path / "plan.json")]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["removed_objects"] == shown["removable_objects"] == len(before - home.stored())
    assert done["is_good"]
    assert not stray.exists()
    assert run([*command, "--apply", str(tmp_path / "plan.json")]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["found"], again["removed_objects"], again["is_good"]) == ([], 0, True)
    with home.open() as engine:
        assert engine.digest() == digest
        read_everything(engine)


def read_everything(engine: tidelog.Engine) -> None:
    """Every value at the newest seq, wherever it is."""
    for bucket in engine.list_buckets():
        for item in engine.list_objects(bucket):
            assert len(engine.read(bucket, item.key).data) == item.size


def test_a_missing_data_file_is_told_and_the_log_stays(
    spark: SparkSession, home: EngineHome, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, the file is named, and nothing of the raw log is to go."""
    with home.root.open() as opened:
        assert opened.manifest.compacted is not None
        root = read_compaction(opened.objects, opened.keys, opened.manifest.compacted)
    named = next(read_names(home.root.place, root.values[0])).column(0)[0].as_py()
    (home.store / named).unlink()
    assert run(["--json", "pipeline", "gc", "--engine", home.url, "--grace", "0"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert [one["object"] for one in shown["found"] if one["action"] == "LOST"] == [named]
    assert not [one for one in shown["found"] if one["kind"] == "compacted log"]


def test_options_of_topics_and_of_engines_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    """What is for the other kind is refused by its name."""
    assert run(["pipeline", "gc", "shop/orders", "--engine", "file:///tmp"]) == 2
    assert run(["pipeline", "gc", "--keep-from", "5"]) == 2
    assert run(["pipeline", "gc", "--engine", "file:///tmp", "--apply", "x", "--now"]) == 2
    assert run(["pipeline", "gc", "--engine", "file:///tmp", "--dry-run", "--now"]) == 2
    told = capsys.readouterr().err
    assert "TOPIC is for topics" in told
    assert "--keep-from is for engines" in told


def test_spark_compares_names_in_the_store_with_the_index(spark: SparkSession, home: EngineHome) -> None:
    """Files that nothing names, files that are missing and those that match, from several ranges of names."""
    with home.root.open() as opened:
        assert opened.manifest.compacted is not None
        root = read_compaction(opened.objects, opened.keys, opened.manifest.compacted)
        clean = compare_data_files(spark, home.root.place, root)
        assert (clean.missing, clean.named, clean.there) == ([], root.data_files, root.data_files)
        assert (clean.named_bytes, clean.named_sum) == (root.data_bytes, clean.there_sum)
