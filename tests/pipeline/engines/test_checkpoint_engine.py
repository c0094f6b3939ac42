"""A state of an engine that was written without its node: what a restore makes of it, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.engine.stations import EngineNode, new_store, successor
from tests.pipeline.engines.jobs_here import copy_of, keys_of, new_files, write_state

import tidelog
from tidelog.cli.main import main
from tidelog.engine.mvcc.cells import seq_of
from tidelog.engine.sst.snapshot import StoredState
from tidelog.errors import DataError, InputError
from tidelog.pipeline.address import find_engine
from tidelog.pipeline.jobs.engine.snapshot import checkpoint_engine


@pytest.mark.parametrize("seed", range(3))
def test_a_restore_from_it_is_the_same_engine(seed: int) -> None:
    """Every state of the past and every value is what the old node had; only records behind the state are read."""
    with EngineNode(new_store(), name=f"state-{seed}").open() as node:
        node.apply(150)
        node.ship_all()
        report = write_state(node.objects)
        assert (report.is_new, report.is_good, report.seq) == (True, True, node.engine.high_water_mark)
        assert report.digest == node.engine.digest()
        assert report.files > 1
        node.apply(30)
        node.ship_all()
        other = successor(node)
        node.crash()
        restored = other.restore()
        assert (restored.state_seq, restored.damaged_states) == (report.seq, ())
        with other.open():
            other.assert_same([report.seq, report.seq // 2])


def test_bytes_depend_on_the_rows_alone() -> None:
    """However many tasks there are, and from whichever state it begins: the same files."""
    with EngineNode(new_store(), name="same").open() as node:
        node.apply(80)
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(60)
        node.ship_all()
        copies = [copy_of(node.objects) for _ in range(3)]
        without_states = copies[2]
        for key in [one for one in keys_of(without_states) if one.endswith(".tckp")]:
            without_states.delete(key)
        for objects, tasks in zip(copies, (1, 4, 2), strict=True):
            assert write_state(objects, tasks=tasks).is_good
        written = [new_files(objects, node.objects) for objects in copies]
        assert written[0] == written[1] == written[2]


def test_a_seq_in_the_past() -> None:
    """The state of an earlier seq has the versions up to it, and the log goes on with the first record behind them."""
    with EngineNode(new_store(), name="past").open() as node:
        node.apply(60)
        node.ship_all()
        rows = dict(node.core.tree.scan())
        seqs = sorted(map(seq_of, rows))
        middle = seqs[len(seqs) // 2]
        report = write_state(node.objects, middle)
        assert report.digest == node.engine.digest(middle)
        (listed,) = node.view.manifest.checkpoints
        state = StoredState(node.objects, listed)
        assert dict(state.rows()) == {key: cell for key, cell in rows.items() if seq_of(key) <= middle}
        other = successor(node)
        node.crash()
        assert other.restore().state_seq == middle
        with other.open():
            other.assert_same([middle])


def test_a_state_that_is_there_is_left_alone() -> None:
    """One that is as new is told, and nothing is written; so is a seq that cannot be had."""
    with EngineNode(new_store()).open() as node:
        with pytest.raises(InputError, match="shipped"):
            write_state(node.objects)
        node.apply(30)
        node.ship_all()
        node.engine.create_checkpoint()
        before = keys_of(node.objects)
        report = write_state(node.objects)
        assert not report.is_new
        assert "nothing was written" in report.notes[0]
        assert keys_of(node.objects) == before
        with pytest.raises(InputError, match="cannot be had"):
            write_state(node.objects, report.seq + 1)


def test_a_damaged_state_is_passed_over() -> None:
    """The one before it is begun with, and the report says so; without the beginning of the log there must be one."""
    with EngineNode(new_store(), name="damaged").open() as node:
        for _ in range(2):
            node.apply(60)
            node.ship_all()
            node.engine.create_checkpoint()
        node.apply(10)
        node.ship_all()
        good, bad = node.view.manifest.checkpoints
        data = bytearray(node.objects.get(bad.key).data)
        data[len(data) // 3] ^= 4
        node.objects.put(bad.key, bytes(data))
        report = write_state(node.objects)
        assert report.base == good.key
        assert bad.key in report.notes[0]
        assert report.digest == node.engine.digest()


def test_damage_of_the_log_is_told() -> None:
    """A flipped bit in an object of the log ends the job, and nothing is published."""
    with EngineNode(new_store(), name="log").open() as node:
        node.apply(60)
        node.ship_all()
        key = node.view.object_keys()[0]
        data = bytearray(node.objects.get(key).data)
        data[len(data) // 2] ^= 1
        node.objects.put(key, bytes(data))
        with pytest.raises(DataError):
            write_state(node.objects)
        assert not node.view.manifest.checkpoints
        assert not node.view.manifest.pins


def test_with_spark(spark: SparkSession, tmp_path: Path) -> None:
    """The job itself, on a store of files: a new node begins with its state, and a damaged one is passed over."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open_engine(tmp_path / "engine", store=store, ship_interval_seconds=3600) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        put_and_ship(engine, 300)
        report = checkpoint_engine(spark, find_engine(tmp_path / "engine"), rows_per_file=100)
        assert (report.is_good, report.digest, report.seq) == (True, engine.digest(), 301)
        assert report.files >= 2
        put_and_ship(engine, 20)
        digest = engine.digest()
    part = next((tmp_path / "store").glob("storage/engine/main/checkpoints/part-*"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    report = checkpoint_engine(spark, find_engine(store))
    assert (report.is_good, report.base, report.digest) == (True, None, digest)
    assert "passed over" in report.notes[0]
    with tidelog.restore_engine(tmp_path / "new", store=store) as restored:
        assert restored.digest() == digest


def put_and_ship(engine: tidelog.Engine, count: int) -> None:
    """So many more entries, in the store."""
    first = engine.applied_seq + 1
    puts = [tidelog.PutObject("b", f"key-{seq % 50}", bytes(seq)) for seq in range(first, first + count)]
    engine.apply_many(list(enumerate(puts, first)))
    engine.update_low_water_mark(engine.applied_seq)
    engine.ship()


def test_the_command_is_about_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an engine, or with one that is nowhere, the command says what to name before it starts Spark."""
    assert main(["pipeline", "checkpoint", "--engine", "/nowhere/engine"]) != 0
    assert "no engine" in capsys.readouterr().err
