"""Promotion: a replica becomes the first store of an installation, and what is lost is said before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.clock import SystemClock
from tidelog.cluster import promotion
from tidelog.cluster.documents import EngineArguments, EnginePlacement
from tidelog.cluster.promotion import plan_promotion, promote
from tidelog.cold.catalog import Catalog
from tidelog.config import EngineConfig, load_engine_config
from tidelog.engine_wiring import open_engine_at, restore_directory
from tidelog.errors import ConfigError, FencedError, InputError, StoreUnavailableError
from tidelog.service.cluster_control import NodeTail, Unshipped
from tidelog.store.document import encode_json
from tidelog.store.keys import DEFAULT_ROOT, ClusterKeys, EngineKeys
from tidelog.store.metadata.base import Check, MetadataStore, Put, Write
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import open_store

ORDERS, EVENTS = "shop/orders", "shop/events"
PHOTOS, DRAFTS = "photos", "drafts"


class Region:
    """An installation with a replica, over one metadata store."""

    def __init__(self, directory: Path, metadata: str, stores: tuple[str, str], **keys: Any) -> None:
        self.directory = directory
        self.metadata = metadata
        self.first, self.second = stores
        self.keys = keys

    def open(self, name: str, store: str, **settings: Any) -> tidelog.LogDirectory:
        quiet: dict[str, Any] = {"ship_interval_seconds": 3600, "replication_mode": "sync"}
        return tidelog.open(
            self.directory / name, store=store, metadata=self.metadata, **self.keys, **(quiet | settings)
        )

    def engine(self, store: str, **settings: Any) -> EngineConfig:
        """How an engine of the installation is opened."""
        quiet: dict[str, Any] = {"ship_interval_seconds": 3600, "replication_mode": "sync", "metadata": self.metadata}
        return load_engine_config(None, {}, quiet | {"store": store} | settings)

    def live(self) -> None:
        """Two topics: one with a replica and more in the first store than there, one without."""
        with self.open("a", self.first) as log:
            orders = log.topic(ORDERS, partitions=2, replicas=[self.second])
            for number in range(6):
                orders.partition(number % 2).append(b"%d" % number)
            for number in range(2):
                orders.partition(number).ship()
            log.topic(EVENTS).append(b"of the first store alone", sync=True)
            log.topic(EVENTS).ship()
        with self.open("a", self.first) as log:
            log.configure_topic(ORDERS, replicas=None)
        with self.open("a", self.first) as log:
            log.topic(ORDERS).partition(0).append(b"after the replica")
            log.topic(ORDERS).partition(0).ship()


def check_promotion(region: Region, replica: Any) -> None:
    region.live()
    with open_metadata_store(region.metadata) as metadata:
        found = plan_promotion(metadata, DEFAULT_ROOT, replica)
        ends = {log.name: (log.in_catalog, log.in_replica, log.lost) for log in found.logs}
        assert ends == {
            f"{ORDERS}-part-0": (4, 3, 1),
            f"{ORDERS}-part-1": (3, 3, 0),
            EVENTS: (1, None, 1),
        }
        assert promote(metadata, DEFAULT_ROOT, replica, SystemClock()) == found
        with pytest.raises(ConfigError, match="already"):
            plan_promotion(metadata, DEFAULT_ROOT, replica)
    with pytest.raises(ConfigError), region.open("a", region.first) as log:
        log.topic(EVENTS)
    with region.open("b", region.second) as log:
        assert log.topics() == [ORDERS]
        partition = log.topic(ORDERS).partition(0)
        assert [message.value for message in partition.read(0)] == [b"0", b"2", b"4"]
        assert partition.append(b"goes on", sync=True) == 3
        partition.ship()
        assert [message.value for message in partition.read(0)] == [b"0", b"2", b"4", b"goes on"]


def shipped(engine: tidelog.Engine) -> None:
    engine.update_low_water_mark(engine.applied_seq)
    engine.ship()


def local_region(directory: Path) -> Region:
    stores = []
    for name in ("first", "second"):
        (directory / name).mkdir()
        stores.append((directory / name).as_uri())
    return Region(directory, f"sqlite://{directory}/catalog.db", (stores[0], stores[1]))


def test_replica_becomes_the_first_store(tmp_path: Path) -> None:
    """Its topics go on where it ends; topics without a replica are gone, and that is said."""
    region = local_region(tmp_path)
    check_promotion(region, open_store(region.second))


def test_what_nodes_had_not_shipped_is_said_with_the_loss(tmp_path: Path) -> None:
    """Loss prevented: what was acknowledged by the first store and was in its flushes alone counted as nothing. Of
    all nodes, once for a topic whose partitions are listed; without a cluster nobody has reported it."""
    region, keys = local_region(tmp_path), ClusterKeys()
    region.live()
    with open_metadata_store(region.metadata) as metadata:
        found = plan_promotion(metadata, DEFAULT_ROOT, open_store(region.second))
        assert (found.unshipped("topic"), {log.unshipped for log in found.logs}) == (None, {None})
        for number, node in enumerate(("n1", "n2")):
            metadata.put(keys.node_id(node), b"{}")
            lag = Unshipped(messages=10 + number, bytes=1, seconds=1.0)
            tail = NodeTail(at_us=1, topics={ORDERS: lag}, flushed={ORDERS: 100 * number})
            metadata.put(keys.tail(node), encode_json(tail))
        found = plan_promotion(metadata, DEFAULT_ROOT, open_store(region.second))
        assert [(log.name, log.unshipped) for log in found.logs] == [
            (EVENTS, 0),
            (f"{ORDERS}-part-0", 121),
            (f"{ORDERS}-part-1", None),
        ]
        assert (found.unshipped("topic"), found.unshipped("engine"), found.lost("topic")) == (121, 0, 2)


def test_what_a_lost_metadata_store_knew_is_unknown_and_not_nothing(tmp_path: Path) -> None:
    """Loss prevented: a region was lost with its etcd, and the promotion with a new one said that nothing was lost."""
    region = local_region(tmp_path)
    region.live()
    with open_metadata_store(f"sqlite://{tmp_path}/new.db") as metadata:
        found = promote(metadata, DEFAULT_ROOT, open_store(region.second), SystemClock())
    assert [(log.name, log.in_catalog, log.in_replica, log.lost) for log in found.logs] == [
        (f"{ORDERS}-part-0", None, 3, None),
        (f"{ORDERS}-part-1", None, 3, None),
    ]
    assert (found.first, found.lost("topic"), found.lost("engine"), found.unshipped("topic")) == ("", None, 0, None)
    after = Region(tmp_path, f"sqlite://{tmp_path}/new.db", (region.first, region.second))
    with after.open("b", region.second) as log:
        assert log.topic(ORDERS).partition(0).append(b"goes on", sync=True) == 3


def test_engine_goes_on_with_what_the_replica_has(tmp_path: Path) -> None:
    """What it loses is said before; it is restored from the replica, and the owner of before changes nothing."""
    region = local_region(tmp_path)
    with open_engine_at(tmp_path / "e", region.engine(region.first, replicas=[region.second]), name=PHOTOS) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply(2, tidelog.PutObject("b", "in both", b"2"))
        shipped(engine)
    with open_engine_at(tmp_path / "e", region.engine(region.first), name=PHOTOS) as engine:
        for seq in (3, 4):
            engine.apply(seq, tidelog.PutObject("b", "in the first alone", b"%d" % seq))
        shipped(engine)
        with open_metadata_store(region.metadata) as metadata:
            found = plan_promotion(metadata, DEFAULT_ROOT, open_store(region.second))
            assert [tuple(log) for log in found.logs] == [("engine", PHOTOS, 4, 2, None)]
            assert (found.lost("engine"), found.lost("topic")) == (2, 0)
            assert promote(metadata, DEFAULT_ROOT, open_store(region.second), SystemClock()) == found
        engine.apply(5, tidelog.PutObject("b", "of the owner of before", b"5"))
        with pytest.raises(FencedError):
            shipped(engine)
    with pytest.raises(ConfigError):
        open_engine_at(tmp_path / "e", region.engine(region.first), name=PHOTOS)
    for directory, keys in (("new", ["in both"]), ("newer", ["after it", "in both"])):
        restore_directory(tmp_path / directory, region.engine(region.second), name=PHOTOS)
        with open_engine_at(tmp_path / directory, region.engine(region.second), name=PHOTOS) as engine:
            assert [found.key for found in engine.scan("b")] == keys
            if engine.applied_seq == 2:
                engine.apply(3, tidelog.PutObject("b", "after it", b"3"))
                shipped(engine)


def test_engine_without_a_replica_is_not_opened_as_a_new_one(tmp_path: Path) -> None:
    """Nobody serves an empty engine under its name; one with a store of its own, and one that is promoted, stay."""
    region, keys = local_region(tmp_path), ClusterKeys()
    placements = {
        PHOTOS: EnginePlacement(node="n1"),
        DRAFTS: EnginePlacement(node="n1"),
        "alias": EnginePlacement(node="n1", arguments=EngineArguments(name=DRAFTS)),
        "elsewhere": EnginePlacement(node="n1", arguments=EngineArguments(name=DRAFTS, store="s3://own")),
    }
    for name, replicas in ((PHOTOS, [region.second]), (DRAFTS, [])):
        with open_engine_at(tmp_path / name, region.engine(region.first, replicas=replicas), name=name) as engine:
            engine.apply(1, tidelog.CreateBucket("b"))
            shipped(engine)
    with open_metadata_store(region.metadata) as metadata:
        for name, placement in placements.items():
            metadata.put(keys.engine(name), encode_json(placement))
        found = promote(metadata, DEFAULT_ROOT, open_store(region.second), SystemClock())
        assert [tuple(log)[1:4] for log in found.logs] == [(DRAFTS, 1, None), (PHOTOS, 1, 1)]
        left = [key.removeprefix(keys.engines_prefix) for key in metadata.keys(keys.engines_prefix)]
        assert left == ["elsewhere", PHOTOS]


def test_promotion_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each write once: the catalog stays that of the first store, no engine that is lost stays placed without a
    catalog by which the next promotion finds it, and the next one ends with all that the replica has."""
    region, keys = local_region(tmp_path), ClusterKeys()
    for name, replicas in ((PHOTOS, [region.second]), (DRAFTS, [])):
        with open_engine_at(tmp_path / name, region.engine(region.first, replicas=replicas), name=name) as engine:
            engine.apply(1, tidelog.CreateBucket("b"))
            engine.apply(2, tidelog.PutObject("b", "k", b"2"))
            shipped(engine)
    replica = open_store(region.second)
    monkeypatch.setattr(promotion, "_WRITES_AT_ONCE", 1)
    with open_metadata_store(region.metadata) as metadata:
        for name in (PHOTOS, DRAFTS):
            metadata.put(keys.engine(name), encode_json(EnginePlacement(node="n1")))
        before, first_epoch = metadata.range(f"{DEFAULT_ROOT}/"), epoch_of(metadata)
        writes = 0
        while is_interrupted(metadata, replica, writes):
            placed = metadata.keys(keys.engines_prefix)
            assert keys.engine(PHOTOS) in placed
            assert keys.engine(DRAFTS) not in placed or metadata.keys(EngineKeys(DRAFTS).metadata_prefix)
            assert promote(metadata, DEFAULT_ROOT, replica, SystemClock()).first == region.first
            assert metadata.keys(keys.engines_prefix) == [keys.engine(PHOTOS)]
            assert metadata.keys(EngineKeys(DRAFTS).metadata_prefix) == []
            assert epoch_of(metadata) > first_epoch
            for key in metadata.keys(f"{DEFAULT_ROOT}/"):
                metadata.delete(key)
            for entry in before:
                metadata.put(entry.key, entry.value)
            writes += 1
        assert writes > 5
    restore_directory(tmp_path / "new", region.engine(region.second), name=PHOTOS)
    with open_engine_at(tmp_path / "new", region.engine(region.second), name=PHOTOS) as engine:
        assert [found.key for found in engine.scan("b")] == ["k"]


def epoch_of(metadata: MetadataStore) -> int:
    owner = Catalog(metadata, EngineKeys(PHOTOS)).owner()
    assert owner is not None
    return owner[0].epoch


def is_interrupted(metadata: MetadataStore, replica: ObjectStore, writes: int) -> bool:
    """Promotes; the metadata store is gone after so many writes."""
    whole, left = metadata.commit, writes

    def commit(checks: Sequence[Check], changes: Sequence[Write]) -> Mapping[str, str]:
        nonlocal left
        if left == 0:
            raise StoreUnavailableError("the metadata store is gone")
        left -= 1
        return whole(checks, changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "commit", commit)
        try:
            promote(metadata, DEFAULT_ROOT, replica, SystemClock())
        except StoreUnavailableError:
            return True
    return False


def test_promotion_is_refused_while_a_node_is_alive(tmp_path: Path) -> None:
    """It would go on with the first store."""
    (tmp_path / "second").mkdir()
    with open_metadata_store(f"sqlite://{tmp_path}/catalog.db") as metadata:
        metadata.put(ClusterKeys().node("n1"), b"{}")
        with pytest.raises(InputError, match="n1"):
            promote(metadata, DEFAULT_ROOT, open_store((tmp_path / "second").as_uri()), SystemClock())


def test_promotion_stops_when_a_node_comes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss prevented: it was asked once, and a node that started a moment later served from a catalog that was being
    replaced. When the node is gone it goes on to its end."""
    region, keys = local_region(tmp_path), ClusterKeys()
    region.live()
    replica = open_store(region.second)
    with open_metadata_store(region.metadata) as metadata:
        whole = metadata.commit
        commits: list[int] = []

        def joined_after_the_first(checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
            commits.append(len(writes))
            written = whole(checks, writes)
            if len(commits) == 1:
                whole([], [Put(keys.node("n1"), b"{}")])
            return written

        with monkeypatch.context() as patch:
            patch.setattr(metadata, "commit", joined_after_the_first)
            with pytest.raises(InputError, match="these nodes are alive: n1"):
                promote(metadata, DEFAULT_ROOT, replica, SystemClock())
        assert len(commits) == 1
        metadata.delete(keys.node("n1"))
        promote(metadata, DEFAULT_ROOT, replica, SystemClock())
        with pytest.raises(ConfigError, match="already"):
            plan_promotion(metadata, DEFAULT_ROOT, replica)


def test_store_that_is_no_replica_is_refused(tmp_path: Path) -> None:
    """Nothing is changed for a store that has nothing of the installation."""
    (tmp_path / "second").mkdir()
    with open_metadata_store(f"sqlite://{tmp_path}/catalog.db") as metadata:
        with pytest.raises(ConfigError, match="no replica"):
            plan_promotion(metadata, DEFAULT_ROOT, open_store((tmp_path / "second").as_uri()))
        assert metadata.keys(f"{DEFAULT_ROOT}/") == []
