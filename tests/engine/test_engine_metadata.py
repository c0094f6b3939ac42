"""Engines on every metadata store: claimed, shipped, restored and taken over, and remembered by their directory."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.log.workbench import wait_until
from tests.servers import EtcdServer

import tidelog
from tidelog.engine.directory import remembered
from tidelog.errors import ConfigError, FencedError, HeldError, InputError, LockedError, NotFoundError, TidelogError
from tidelog.files import LocalFiles
from tidelog.store.metadata.open import open_metadata_store


@pytest.fixture(params=["bucket", "sqlite", "etcd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A store, and a metadata store that several nodes share."""
    urls: dict[str, Any] = {"store": (tmp_path / "store").as_uri()}
    if request.param == "etcd":
        server: EtcdServer = request.getfixturevalue("etcd_server")
        return urls | {"metadata": server.url, "metadata_root": f"test-{secrets.token_hex(4)}"}
    return urls | {"metadata": "bucket" if request.param == "bucket" else f"sqlite://{tmp_path / 'metadata.db'}"}


def fill(engine: tidelog.Engine, first: int, stop: int) -> None:
    engine.apply_many(
        [
            (seq, tidelog.CreateBucket("b") if seq == 1 else tidelog.PutObject("b", f"k{seq}", b"v" * 500))
            for seq in range(first, stop)
        ]
    )
    engine.update_low_water_mark(engine.applied_seq)


def test_engine_ships_and_is_restored_with_its_metadata(tmp_path: Path, place: dict[str, Any]) -> None:
    """All of it comes back from the store, and the restored engine goes on, collects garbage and is opened again."""
    with tidelog.open_engine(tmp_path / "a", **place, wal_segment_size=20_000, hot_tier_bytes=0) as engine:
        fill(engine, 1, 200)
        engine.create_checkpoint()
        fill(engine, 200, 300)
        assert engine.ship() == 299 == engine.truncation_mark
        digest = engine.digest()
    known = remembered(LocalFiles(), tmp_path / "a")
    assert known is not None
    assert known.metadata == place["metadata"]
    with tidelog.open_engine(tmp_path / "a") as engine:
        assert engine.digest() == digest
        assert engine.truncation_mark == 299
    shutil.rmtree(tmp_path / "a")
    with tidelog.restore_engine(tmp_path / "b", **place) as engine:
        assert engine.digest() == digest
        fill(engine, 300, 310)
        engine.collect_garbage(horizon=305)
        engine.compact(grace_seconds=0)
        assert engine.ship() == 309
        digest = engine.digest()
    with tidelog.open_engine(tmp_path / "b") as engine:
        assert engine.digest() == digest


def test_engine_is_held_fenced_and_notices_it(tmp_path: Path, place: dict[str, Any]) -> None:
    """A live owner keeps others out; one that was replaced stops within `ownership_check_seconds`."""
    with tidelog.open_engine(tmp_path / "a", **place, ownership_check_seconds=0.05) as engine:
        fill(engine, 1, 20)
        engine.ship()
        with pytest.raises(HeldError):
            tidelog.restore_engine(tmp_path / "b", **place)
        with tidelog.restore_engine(tmp_path / "b", **place, take_over=True) as other:

            def is_fenced() -> bool:
                shipping = engine.statistics().shipping
                return shipping is not None and shipping.is_fenced

            wait_until(is_fenced, "the engine to notice")
            with pytest.raises(FencedError):
                engine.apply(20, tidelog.CreateBucket("c"))
            assert other.apply(20, tidelog.CreateBucket("c")).applied


def test_restore_drill_reads_with_the_metadata_of_the_engine(tmp_path: Path, place: dict[str, Any]) -> None:
    """The drill claims nothing; its copy remembers where to read."""
    with tidelog.open_engine(tmp_path / "a", **place) as engine:
        fill(engine, 1, 30)
        engine.create_checkpoint()
        with tidelog.restore_engine(tmp_path / "drill", **place, claim=False) as drill:
            assert drill.digest() == engine.digest()
        with tidelog.open_engine(tmp_path / "drill") as drill:
            assert drill.read("b", "k7").data == b"v" * 500
        fill(engine, 30, 31)
        assert engine.ship() == 30


def test_another_directory_is_refused_by_an_engine_that_is_there(tmp_path: Path, place: dict[str, Any]) -> None:
    """Before anything is created."""
    with tidelog.open_engine(tmp_path / "a", **place):
        pass
    with pytest.raises(InputError, match="already has an engine"):
        tidelog.open_engine(tmp_path / "b", **place)
    assert not (tmp_path / "b").exists()


def test_engine_in_memory(tmp_path: Path) -> None:
    """For tests: store and metadata are gone with the engine."""
    with tidelog.open_engine(tmp_path / "a", store="memory://", metadata="memory://") as engine:
        fill(engine, 1, 20)
        assert engine.ship() == 19


def test_other_metadata_is_refused(tmp_path: Path) -> None:
    """What was shipped would not be found again."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open_engine(tmp_path / "a", store=store):
        pass
    with pytest.raises(ConfigError, match="keeps its metadata in bucket"):
        tidelog.open_engine(tmp_path / "a", metadata=f"sqlite://{tmp_path / 'm.db'}")
    with tidelog.open_engine(tmp_path / "a", metadata="bucket"):
        pass


def test_metadata_without_a_store_is_refused(tmp_path: Path) -> None:
    """It would be accepted and ignored."""
    with pytest.raises(ConfigError, match="without a store"):
        tidelog.open_engine(tmp_path / "a", metadata="bucket")


def test_catalog_of_another_store_is_refused(tmp_path: Path) -> None:
    """Two engines in one metadata store have roots of their own; else the second would read the first one's catalog."""
    metadata = f"sqlite://{tmp_path / 'm.db'}"
    with tidelog.open_engine(tmp_path / "a", store=(tmp_path / "one").as_uri(), metadata=metadata):
        pass
    with pytest.raises((ConfigError, InputError)):
        tidelog.open_engine(tmp_path / "b", store=(tmp_path / "two").as_uri(), metadata=metadata)
    other: dict[str, Any] = {"store": (tmp_path / "two").as_uri(), "metadata": metadata, "metadata_root": "second"}
    with tidelog.open_engine(tmp_path / "c", **other) as engine:
        fill(engine, 1, 5)
        assert engine.ship() == 4


def test_metadata_of_an_engine_is_set_like_its_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its table of a file that has topics' metadata too, and by its variable."""
    path = tmp_path / "tidelog.toml"
    path.write_text(
        f'store = "{(tmp_path / "store").as_uri()}"\nmetadata = "sqlite"\n'
        f'[storage_engine]\nmetadata = "sqlite://{tmp_path / "one.db"}"\n'
    )
    with tidelog.open_engine(tmp_path / "a", config=path):
        pass
    assert (tmp_path / "one.db").exists()
    with tidelog.open(tmp_path / "topics", config=path) as log:
        assert log._info.metadata == "sqlite"
    monkeypatch.setenv("TIDELOG_ENGINE_METADATA", f"sqlite://{tmp_path / 'two.db'}")
    with tidelog.open_engine(tmp_path / "b", store=(tmp_path / "other").as_uri()):
        pass
    assert (tmp_path / "two.db").exists()


def test_restore_drill_needs_only_the_bucket(tmp_path: Path, place: dict[str, Any]) -> None:
    """Loses otherwise: with metadata in SQLite or etcd the bucket alone is not enough to practise a restore."""
    bucket = {**place, "metadata": "bucket"}
    with tidelog.open_engine(tmp_path / "a", **place, hot_tier_bytes=0) as engine:
        fill(engine, 1, 30)
        engine.create_checkpoint()
        fill(engine, 30, 40)
        engine.ship()
        with tidelog.restore_engine(tmp_path / "drill", **bucket, claim=False) as drill:
            assert (drill.applied_seq, drill.digest()) == (39, engine.digest())
        with tidelog.open_engine(tmp_path / "drill") as drill:
            assert drill.read("b", "k7").data == b"v" * 500
        fill(engine, 40, 41)
        assert engine.ship() == 40


def lose(place: dict[str, Any]) -> None:
    """All of a metadata store, as after the loss of its disk."""
    if place["metadata"].startswith("sqlite"):
        for path in Path(place["metadata"].removeprefix("sqlite://")).parent.glob("metadata.db*"):
            path.unlink()
        return
    with open_metadata_store(place["metadata"]) as metadata:
        for key in metadata.keys(f"{place['metadata_root']}/"):
            metadata.delete(key)


@pytest.mark.parametrize("place", ["sqlite", "etcd"], indirect=True)
def test_lost_metadata_is_rebuilt_from_the_bucket(tmp_path: Path, place: dict[str, Any]) -> None:
    """The directory goes on where it was, with all that it had not shipped, and the copy follows the new one."""
    with tidelog.open_engine(tmp_path / "a", **place, wal_segment_size=20_000, hot_tier_bytes=0) as engine:
        fill(engine, 1, 100)
        engine.create_checkpoint()
        fill(engine, 100, 150)
        engine.ship()
        engine.apply(150, tidelog.PutObject("b", "unshipped", b"x"))
        digest = engine.digest()
        with pytest.raises(LockedError):
            tidelog.rebuild_engine_manifest(tmp_path / "a")
    lose(place)
    with pytest.raises(TidelogError):
        tidelog.open_engine(tmp_path / "a").close()
    report = tidelog.rebuild_engine_manifest(tmp_path / "a")
    assert (report.seq, report.snapshots, report.missing, report.unpublished) == (149, 1, (), ())
    assert report.objects > 1
    with tidelog.open_engine(tmp_path / "a") as engine:
        assert (engine.digest(), engine.truncation_mark) == (digest, 149)
        engine.update_low_water_mark(150)
        assert engine.ship() == 150
        assert engine.verify()
    with pytest.raises(InputError, match="Nothing has to be rebuilt"):
        tidelog.rebuild_engine_manifest(tmp_path / "a")
    with tidelog.restore_engine(tmp_path / "drill", **{**place, "metadata": "bucket"}, claim=False) as drill:
        assert drill.digest() == digest


def test_lost_disk_and_metadata_come_back_from_the_bucket(tmp_path: Path) -> None:
    """With another metadata store than before: rebuilt, then restored."""
    store, before, after = (tmp_path / "store").as_uri(), f"sqlite://{tmp_path}/one.db", f"sqlite://{tmp_path}/two.db"
    with tidelog.open_engine(tmp_path / "a", store=store, metadata=before) as engine:
        fill(engine, 1, 50)
        engine.ship()
        digest = engine.digest()
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "one.db").unlink()
    with pytest.raises(ConfigError, match=r"is a copy.*rebuild-manifest"):
        tidelog.restore_engine(tmp_path / "b", store=store)
    report = tidelog.rebuild_engine_manifest(store=store, metadata=after)
    assert report.seq == 49
    with tidelog.restore_engine(tmp_path / "b", store=store, metadata=after) as engine:
        assert engine.digest() == digest
        fill(engine, 50, 60)
        assert engine.ship() == 59


def test_nothing_is_rebuilt_without_a_copy(tmp_path: Path) -> None:
    """Where the bucket has no engine, or is the metadata store itself, and where no other one is named."""
    store, metadata = (tmp_path / "store").as_uri(), f"sqlite://{tmp_path}/m.db"
    (tmp_path / "store").mkdir()
    with pytest.raises(NotFoundError, match="no published copy"):
        tidelog.rebuild_engine_manifest(store=store, metadata=metadata)
    with pytest.raises(ConfigError, match="no store was named"):
        tidelog.rebuild_engine_manifest(metadata=metadata)
    with tidelog.open_engine(tmp_path / "a", store=store) as engine:
        fill(engine, 1, 5)
        engine.ship()
    with pytest.raises(ConfigError, match="the bucket itself"):
        tidelog.rebuild_engine_manifest(store=store)
    with pytest.raises(NotFoundError, match="the bucket itself"):
        tidelog.rebuild_engine_manifest(store=store, metadata=metadata)
    with tidelog.open_engine(tmp_path / "a") as engine:
        assert engine.applied_seq == 4
