"""The job `verify` compares replicas of an engine with its store: what is wrong, what follows, what went on alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.compacting import compact_by_hand
from tests.engine.stations import KEYS, EngineNode
from tests.pipeline.engines.computing import work_here, work_without_spark
from tests.pipeline.engines.damaged import StoredEngine
from tests.pipeline.engines.eventful import SETTINGS, EventfulEngine

from tidelog.engine.cold.gc import drop_wal
from tidelog.pipeline.address import find_engine
from tidelog.pipeline.jobs.engine import verify_replicas
from tidelog.pipeline.jobs.engine.verify import verify_engine
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

NO_SPARK: Any = None


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> StoredEngine:
    """An engine with everything that one can have in a store."""
    return StoredEngine.make(tmp_path_factory.mktemp("verify-replicas") / "store")


def test_a_copy_is_one(healthy: StoredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of a replica was read and compared, data files included."""
    work_without_spark(monkeypatch)
    copy = healthy.copied(tmp_path / "copy")
    report = verify_engine(NO_SPARK, healthy.root, replicas=[copy.store.as_uri()])
    assert report.is_good
    (check,) = report.replicas
    files = [path for path in (copy.store / "storage").rglob("*") if path.is_file()]
    assert (check.files, check.lag_bytes, check.problems) == (len(files), 0, 0)


def test_what_an_engine_replicates_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and compactions too, and after the log was dropped in both."""
    work_without_spark(monkeypatch)
    stores = [tmp_path / name for name in ("store", "copy")]
    for store in stores:
        store.mkdir()
    origin, copy = (open_store(store.as_uri(), StoreSettings()) for store in stores)
    with EngineNode(origin, replicas=[copy], **SETTINGS).open() as node:
        for _ in range(3):
            node.apply(40)
            node.ship_all()
            node.engine.create_checkpoint()
            compact_by_hand(origin)
            drop_wal(origin, BucketMetadataStore(origin), KEYS, 1 << 62)
            node.apply(10)
            node.ship_all()
            node.shipping.replicate()
            report = verify_engine(NO_SPARK, find_engine(stores[0].as_uri()), replicas=[stores[1].as_uri()])
            assert report.findings == ()
            assert report.replicas[0].lag_bytes == 0


def test_what_is_wrong_is_named(healthy: StoredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes and missing files, data files among them, are problems of the replica; a stray file is a note."""
    work_without_spark(monkeypatch)
    copy = healthy.copied(tmp_path / "copy")
    copy.flip(copy.log_object(1))
    copy.path(copy.compaction.blob_files[0].key).unlink()
    copy.cut(copy.data_file())
    copy.path(KEYS.objects_prefix + "data-900-910-e1.tlog").write_bytes(b"left over")
    report = verify_engine(NO_SPARK, healthy.root, replicas=[copy.store.as_uri()])
    told = [str(problem) for problem in report.findings]
    assert len(told) == 3
    assert all(copy.store.as_uri() in problem for problem in told)
    for reason in (
        "it is missing in the replica",
        "its bytes in the replica are others",
        "bytes in the replica, and",
    ):
        assert any(reason in problem for problem in told)
    assert any("data-900-910-e1.tlog" in note for note in report.notes)


def test_one_that_follows_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has not yet is told as lag."""
    work_without_spark(monkeypatch)
    history = EventfulEngine(tmp_path / "origin", "replica")
    history.run(2)
    copy = StoredEngine(history.store).copied(tmp_path / "copy")
    history.run(2)
    report = verify_engine(NO_SPARK, history.root, replicas=[copy.store.as_uri()])
    assert report.findings == ()
    assert report.replicas[0].lag_bytes > 0
    assert any("follows: it is at seq" in note for note in report.notes)
    history.close()


def test_one_that_changes_meanwhile_is_compared_again(
    healthy: StoredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops its log while it is read: nothing is missing that it names then."""
    work_without_spark(monkeypatch)
    copy = healthy.copied(tmp_path / "copy")
    dropped: list[int] = []

    def drop_first(spark: object, function: Callable[[Any], Any], items: Sequence[Any], **_: int) -> Iterator[Any]:
        if not dropped:
            copy.rewrite_manifest(checkpoints=copy.manifest.checkpoints[-1:])
            dropped.append(drop_wal(copy.objects, copy.metadata, KEYS, 1 << 62).objects)
        return work_here(spark, function, items)

    monkeypatch.setattr(verify_replicas, "run_on_workers", drop_first)
    report = verify_engine(NO_SPARK, healthy.root, replicas=[copy.store.as_uri()])
    assert dropped != [0]
    assert report.findings == ()


def test_one_that_went_on_is_told(healthy: StoredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody restored from it: it is the store of another engine by now. So is one that is not there."""
    work_without_spark(monkeypatch)
    copy = healthy.copied(tmp_path / "copy")
    copy.rewrite_manifest(epoch=copy.manifest.epoch + 1)
    (tmp_path / "empty").mkdir()
    urls = [copy.store.as_uri(), (tmp_path / "empty").as_uri()]
    told = [str(one) for one in verify_engine(NO_SPARK, healthy.root, replicas=urls).findings]
    assert ["somebody went on with it" in told[0], "there is no engine called main" in told[1]] == [True, True]
