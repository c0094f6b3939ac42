"""`tidelog pipeline restore`: a lost engine from its store, by many workers; what comes out is the engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession
from tests.engine.compacting import compact_by_hand
from tests.engine.engines import SMALL, assert_same
from tests.engine.stations import KEYS, EngineNode, new_store, node_of
from tests.pipeline.engines.engine_places import EngineHome, work_here
from tests.pipeline.engines.in_memory import place_of

import tidelog
from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.engine.cold.shipping import Shipping
from tidelog.engine.core import Core
from tidelog.engine.directory import EngineDirectory
from tidelog.engine.engine import Engine
from tidelog.engine.recovery.checkpoint import MARKER
from tidelog.engine.recovery.restore import Restore, RestoreReport
from tidelog.errors import AccessDeniedError, ConfigError, InputError, NotFoundError
from tidelog.files import LocalFiles
from tidelog.pipeline.address import EngineRoot, find_engine
from tidelog.pipeline.jobs.engine import restore as restore_steps
from tidelog.pipeline.jobs.engine.restore import SparkSteps, restore_engine_directory
from tidelog.pipeline.jobs.engine.restore_tasks import Workshop
from tidelog.pipeline.jobs.job import ignore_progress
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyStore


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cut into many small pieces, and done in this process."""
    monkeypatch.setattr(restore_steps, "_PIECE_BYTES", 4000)
    monkeypatch.setattr(restore_steps, "_STATE_PIECE_BYTES", 1000)
    monkeypatch.setattr(restore_steps, "_RANGE_ROWS", 40)
    monkeypatch.setattr(restore_steps, "_ALONE_BYTES", -1)
    work_here(monkeypatch, "engine.restore")


def restore(node: EngineNode, directory: Path, objects: ObjectStore | None = None) -> RestoreReport:
    """Into a directory of this disk, with workers in this process."""
    store = node.objects if objects is None else objects
    metadata, remembered = BucketMetadataStore(store), EngineDirectory(node="restored", store=store.url)
    spark: Any = None
    steps = SparkSteps(spark, place_of(store), Catalog(metadata, KEYS), directory, remembered, ignore_progress)
    job = Restore(
        *(directory, store, metadata),
        keys=KEYS,
        node="restored",
        settings=SMALL,
        files=LocalFiles(),
        clock=ManualClock(),
        take_over=True,
        renews_lease=False,
        steps=steps,
    )
    return job.run()


def opened(node: EngineNode, directory: Path) -> Engine:
    """The engine in a directory that was restored."""
    core = Core.open(directory, SMALL, LocalFiles(), ManualClock())
    shipping = Shipping(core, node_of(node.objects, ManualClock(), "restored"), keys=KEYS, take_over=True)
    shipping.connect()
    return Engine(core, shipping.reader, shipping, runs_in_background=False)


@pytest.mark.parametrize("kind", ["log", "state", "compaction"])
@pytest.mark.parametrize("seed", ["a", "b"])
@pytest.mark.usefixtures("small_pieces")
def test_every_state_is_what_it_was(tmp_path: Path, kind: str, seed: str) -> None:
    """From the log alone, from a state and from a compaction: all versions, through pieces that cut batches in two."""
    node = EngineNode(new_store(), name=seed).open()
    for number in range(3):
        node.apply(120)
        node.roll_back(sorted(node.model.states)[-9])
        node.apply(10)
        node.ship_all()
        if kind == "compaction" and number == 1:
            compact_by_hand(node.objects)
        elif kind == "state" and number == 1:
            node.engine.create_checkpoint()
    node.crash()
    report = restore(node, tmp_path / "new")
    assert bool(report.state_seq) == (kind != "log")
    with opened(node, tmp_path / "new") as engine:
        assert_same(engine, node.model, sorted(node.model.states)[::7])
        found = engine._core.tree.check()
        assert found.cells == report.rows
        assert found.pages > 3


@pytest.mark.usefixtures("small_pieces")
def test_a_damaged_state_is_passed_over(tmp_path: Path) -> None:
    """Before anything is claimed the newest state turns out to be damaged, and the one before it is taken."""
    node = EngineNode(new_store()).open()
    for _ in range(2):
        node.apply(60)
        node.ship_all()
        node.engine.create_checkpoint()
    node.crash()
    good, bad = node.view.manifest.checkpoints
    assert isinstance(node.objects, FaultyStore)
    data = bytearray(node.objects.get(bad.key).data)
    data[100] ^= 1
    node.objects.tamper(bad.key, bytes(data))
    report = restore(node, tmp_path / "new")
    assert (report.state_seq, report.damaged_states) == (good.seq, (bad.key,))
    with opened(node, tmp_path / "new") as engine:
        assert_same(engine, node.model)


@pytest.mark.usefixtures("small_pieces")
def test_without_a_good_state_the_compaction_is_one(tmp_path: Path) -> None:
    """The state that came with a compaction is gone: its versions are read as the compaction names them."""
    node = EngineNode(new_store()).open()
    node.apply(150)
    node.ship_all()
    compact_by_hand(node.objects)
    node.apply(30)
    node.ship_all()
    node.crash()
    (state,) = node.view.manifest.checkpoints
    node.objects.delete(state.key)
    report = restore(node, tmp_path / "new")
    assert (report.state_seq, report.damaged_states) == (state.seq, (state.key,))
    with opened(node, tmp_path / "new") as engine:
        assert_same(engine, node.model, sorted(node.model.states)[::9])


@pytest.mark.usefixtures("small_pieces")
def test_an_engine_without_rows_is_restored(tmp_path: Path) -> None:
    """Nothing but refused entries: the tree is empty, and takes the next entry."""
    node = EngineNode(new_store()).open()
    node.apply_these([(seq, tidelog.PutObject("none", "k", b"x")) for seq in range(1, 9)])
    node.ship_all()
    node.crash()
    assert restore(node, tmp_path / "new").rows == 0
    with opened(node, tmp_path / "new") as engine:
        assert engine.applied_seq == 8
        engine.apply(9, tidelog.CreateBucket("now"))
        assert engine.list_buckets() == ["now"]


class _Killed(BaseException):
    """The process is gone."""


@pytest.mark.usefixtures("small_pieces")
def test_it_may_be_killed_at_any_request_and_run_again(tmp_path: Path) -> None:
    """Until it is complete the directory is no engine; the next run makes one of it, and nothing else is lost."""
    node = EngineNode(new_store()).open()
    node.apply(60)
    node.ship_all()
    node.engine.create_checkpoint()
    node.apply(40)
    node.ship_all()
    node.crash()
    assert isinstance(node.objects, FaultyStore)
    kills = 0
    for kill_at in range(1, 1000, 6):
        requests = itertools.count(1)

        def die(operation: str, key: str, last: int = kill_at, counter: itertools.count[int] = requests) -> None:
            if next(counter) >= last:
                raise _Killed

        client = FaultyStore(on_request=die)
        client._server = node.objects._server
        try:
            restore(node, tmp_path / "new", client)
        except _Killed:
            kills += 1
            assert not (tmp_path / "new").exists() or (tmp_path / "new" / MARKER).exists()
        else:
            break
    assert kills > 5
    with opened(node, tmp_path / "new") as engine:
        assert_same(engine, node.model)


def test_little_data_is_restored_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver alone does it, however many pieces there are, and proves the same."""
    for name, size in (("_PIECE_BYTES", 4000), ("_STATE_PIECE_BYTES", 1000), ("_RANGE_ROWS", 40)):
        monkeypatch.setattr(restore_steps, name, size)
    home, no_spark = EngineHome(tmp_path), cast(Any, None)
    with home.open() as engine:
        home.feed(engine, 300)
        engine.create_checkpoint()
        home.feed(engine, 200)
        digest, middle = engine.digest(), engine.digest(home.seq // 2)
    report = restore_engine_directory(no_spark, home.root, tmp_path / "new")
    assert (report.is_good, report.seq) == (True, home.seq)
    assert report.reconciliations[0].went_in.messages == report.rows > 100
    with tidelog.open_engine(tmp_path / "new") as engine:
        assert (engine.digest(), engine.digest(home.seq // 2)) == (digest, middle)
    monkeypatch.setattr(restore_steps, "_ALONE_BYTES", 1000)
    with pytest.raises(AttributeError):  # it is more than that: workers are asked for
        restore_engine_directory(no_spark, home.root, tmp_path / "other", take_over=True)


def test_spark_restores_an_engine_that_goes_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through Spark's workers, and the engine that comes out applies, ships, and can be restored again."""
    monkeypatch.setattr(restore_steps, "_DONE_BY_DRIVER", 0)
    monkeypatch.setattr(restore_steps, "_ALONE_BYTES", -1)
    home = EngineHome(tmp_path)
    with home.open() as engine:
        home.feed(engine, 300)
        engine.create_checkpoint()
        home.feed(engine, 200)
        digest, middle = engine.digest(), engine.digest(home.seq // 2)
    report = restore_engine_directory(spark, home.root, tmp_path / "new")
    assert report.is_good
    assert (report.seq, report.store) == (home.seq, home.url)
    with tidelog.open_engine(tmp_path / "new") as engine:
        assert (engine.applied_seq, engine.digest(), engine.digest(home.seq // 2)) == (home.seq, digest, middle)
        home.feed(engine, 50)
        digest = engine.digest()
    none = find_engine((tmp_path / "none").as_uri())
    again = restore_engine_directory(spark, none, tmp_path / "third", replicas=[home.root])
    assert [note for note in again.notes if "could not be used" in note]
    with tidelog.open_engine(tmp_path / "third") as engine:
        assert engine.digest() == digest


def test_a_bucket_that_is_gone_is_passed_over_for_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one that refuses our key: with a region or an account both may go."""
    tried: list[str] = []

    def restore(_spark: object, root: EngineRoot, *rest: object) -> list[str]:
        tried.append(root.store_url)
        if len(tried) < 3:
            raise (ConfigError, AccessDeniedError)[len(tried) - 1]("there is no such bucket")
        *_, failed, _take_over = rest
        return list(cast("list[str]", failed))

    monkeypatch.setattr("tidelog.pipeline.jobs.engine.restore._restore", restore)
    first, *others = [find_engine(f"s3://bucket-{number}/prefix") for number in range(3)]
    notes = restore_engine_directory(cast("SparkSession", None), first, tmp_path / "new", replicas=others)
    assert cast("list[str]", notes) == [f"{url} could not be used: there is no such bucket" for url in tried[:2]]


def test_what_cannot_be_restored_into_or_from_says_so(spark: SparkSession, tmp_path: Path) -> None:
    """A directory with something in it, a store without an engine, and workers that have another directory."""
    home = EngineHome(tmp_path)
    with home.open() as engine:
        home.feed(engine, 5)
    with pytest.raises(InputError, match="empty directory"):
        restore_engine_directory(spark, home.root, home.directory)
    (tmp_path / "empty").mkdir()
    elsewhere = find_engine((tmp_path / "empty").as_uri())
    with pytest.raises(NotFoundError, match="no engine"):
        restore_engine_directory(spark, elsewhere, tmp_path / "new")
    with pytest.raises(InputError, match="worker does not see the directory"):
        Workshop(folder=str(tmp_path), probe="probe-elsewhere").path("log", 1)
