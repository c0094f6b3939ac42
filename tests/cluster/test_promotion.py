"""Promotion: a replica becomes the first store of an installation, and what is lost is said before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.clock import SystemClock
from tidelog.cluster.promotion import plan_promotion, promote
from tidelog.errors import ConfigError, InputError
from tidelog.store.keys import DEFAULT_ROOT, ClusterKeys
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store

ORDERS, EVENTS = "shop/orders", "shop/events"


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
        ends = {log.topic: (log.in_catalog, log.in_replica, log.lost) for log in found.logs}
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


def test_replica_becomes_the_first_store(tmp_path: Path) -> None:
    """Its topics go on where it ends; topics without a replica are gone, and that is said."""
    stores = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        stores.append((tmp_path / name).as_uri())
    region = Region(tmp_path, f"sqlite://{tmp_path}/catalog.db", (stores[0], stores[1]))
    check_promotion(region, open_store(stores[1]))


def test_promotion_is_refused_while_a_node_is_alive(tmp_path: Path) -> None:
    """It would go on with the first store."""
    (tmp_path / "second").mkdir()
    with open_metadata_store(f"sqlite://{tmp_path}/catalog.db") as metadata:
        metadata.put(ClusterKeys().node("n1"), b"{}")
        with pytest.raises(InputError, match="n1"):
            promote(metadata, DEFAULT_ROOT, open_store((tmp_path / "second").as_uri()), SystemClock())


def test_store_that_is_no_replica_is_refused(tmp_path: Path) -> None:
    """Nothing is changed for a store that has nothing of the installation."""
    (tmp_path / "second").mkdir()
    with open_metadata_store(f"sqlite://{tmp_path}/catalog.db") as metadata:
        with pytest.raises(ConfigError, match="no replica"):
            plan_promotion(metadata, DEFAULT_ROOT, open_store((tmp_path / "second").as_uri()))
        assert metadata.keys(f"{DEFAULT_ROOT}/") == []
