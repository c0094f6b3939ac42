"""Replicas of topics: further stores from which a topic is read, and gone on with, when its own store is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.log.workbench import wait_until

import tidelog
from tidelog.clock import ManualClock
from tidelog.config import load_settings
from tidelog.errors import ConfigError, DataError, RetryError
from tidelog.store.urls import open_store
from tidelog.wiring import open_directory

SMALL = {"rotate_max_bytes": 4096, "max_object_bytes": 4096}


def open_by_hand(tmp_path: Path, name: str = "data", **settings: Any) -> tidelog.LogDirectory:
    """A directory with a store and two replicas, in which nothing runs by itself."""
    given: dict[str, Any] = {
        "store": (tmp_path / "store").as_uri(),
        "metadata": "bucket",
        "replicas": [(tmp_path / "one").as_uri(), (tmp_path / "two").as_uri()],
        **SMALL,
        **settings,
    }
    return open_directory(
        tmp_path / name, load_settings(None, {}, given), runs_in_background=False, clock=ManualClock()
    )


def append(topic: tidelog.Topic, first: int, stop: int) -> None:
    topic.append_many([b"%d" % number * 100 for number in range(first, stop)])
    topic.flush()


def values(log: tidelog.LogDirectory) -> list[bytes]:
    return [message.value or b"" for message in log.topic("shop/orders").read()]


def expected(stop: int) -> list[bytes]:
    return [b"%d" % number * 100 for number in range(stop)]


def replicate(topic: tidelog.Topic) -> None:
    assert topic._tiered is not None
    topic._tiered.replicate()


def test_store_is_no_replica_of_itself(tmp_path: Path) -> None:
    """Loses otherwise: one copy, where two were asked for. However its URL is written, and wherever it is named."""
    store = (tmp_path / "store").as_uri()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for same in (store, f"{store}/", store.replace("/store", "/./other/../store"), (tmp_path / "link").as_uri()):
        with pytest.raises(ConfigError, match="which is the store itself"):
            open_by_hand(tmp_path, replicas=[(tmp_path / "one").as_uri(), same])
        with open_by_hand(tmp_path, "own", replicas=[]) as log:
            log.topic("shop/orders")
            with pytest.raises(ConfigError, match="which is the store itself"):
                log.topic("shop/new", replicas=[same])
            with pytest.raises(ConfigError, match="which is the store itself"):
                log.topic("shop/parts", partitions=2, replicas=[same])
            with pytest.raises(ConfigError, match="which is the store itself"):
                log.configure_topic("shop/orders", replicas=[same])
            assert log.topics() == ["shop/orders"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_replica_has_the_history_when_the_store_is_lost(tmp_path: Path, mode: str) -> None:
    """Each replica alone is read without the first store and its disk, and another node goes on there."""
    with open_by_hand(tmp_path, replication_mode=mode) as log:
        topic = log.topic("shop/orders")
        append(topic, 0, 200)
        topic.subscribe("billing").close()
        topic.ship()
        if mode == "async":
            assert not (tmp_path / "one").exists() or not list((tmp_path / "one").rglob("*.tlog"))
            replicate(topic)
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(tmp_path / "data")
    for name in ("one", "two"):
        store = (tmp_path / name).as_uri()
        with tidelog.open(tmp_path / f"read-{name}", store=store, metadata="bucket", read_only=True) as log:
            assert values(log) == expected(200)
        with tidelog.open(tmp_path / f"goes-on-{name}", store=store, metadata="bucket") as log:
            topic = log.topic("shop/orders")
            assert topic.next_offset == 200
            assert topic.subscriptions() == ["billing"]
            append(topic, 200, 210)
            topic.ship()
            assert values(log) == expected(210)


def test_replicas_follow_by_themselves(tmp_path: Path) -> None:
    """In the background, soon after something was shipped, and what retention deletes goes there too."""
    replica = (tmp_path / "one").as_uri()
    with tidelog.open(
        tmp_path / "data",
        store=(tmp_path / "store").as_uri(),
        replicas=replica,
        ship_max_delay_seconds=0,
        ship_interval_seconds=0.05,
        retention_interval_seconds=0.05,
        retention_bytes=10_000,
        rotate_max_bytes=4096,
        max_object_bytes=4096,
    ) as log:
        topic = log.topic("shop/orders")
        append(topic, 0, 200)

        def has_followed() -> bool:
            tier = topic.statistics().tier
            assert tier is not None
            (one,) = tier.replicas
            names = {info.key for info in open_store(replica).list("storage/topics/")}
            kept = {info.key for info in open_store((tmp_path / "store").as_uri()).list("storage/topics/")}
            return one.high_water_mark == 200 and one.lag_bytes == 0 and topic.start_offset > 0 and names == kept

        wait_until(has_followed, "the replica to follow")


def test_sync_replica_that_is_away_holds_back_shipping_and_eviction(tmp_path: Path) -> None:
    """A message counts as shipped when all replicas have it, and no file leaves the disk before."""
    with open_by_hand(tmp_path, replication_mode="sync", local_retention_bytes=1) as log:
        topic = log.topic("shop/orders")
        append(topic, 0, 100)
        (tmp_path / "two").rename(tmp_path / "elsewhere")
        (tmp_path / "two").write_bytes(b"not a directory")
        with pytest.raises(tidelog.TidelogError):
            topic.ship()
        topic.prune()
        assert topic.hot_start_offset == 0
        (tmp_path / "two").unlink()
        (tmp_path / "elsewhere").rename(tmp_path / "two")
        assert topic.ship() == 100
        topic.prune()
        assert topic.hot_start_offset > 0
        assert values(log) == expected(100)


def test_sealed_topic_is_sealed_in_its_replicas(tmp_path: Path) -> None:
    """All of it is there, and the next owner goes on behind it."""
    with open_by_hand(tmp_path) as log:
        topic = log.topic("shop/orders")
        append(topic, 0, 50)
        topic.seal()
    with tidelog.open(tmp_path / "other", store=(tmp_path / "one").as_uri(), metadata="bucket") as log:
        assert values(log) == expected(50)


def test_replica_that_somebody_went_on_with_is_left_alone(tmp_path: Path) -> None:
    """It has messages of its own by then; the error says so, and the other replica is fed."""
    with open_by_hand(tmp_path) as log:
        topic = log.topic("shop/orders")
        append(topic, 0, 50)
        topic.ship()
        replicate(topic)
        with tidelog.open(tmp_path / "b", store=(tmp_path / "one").as_uri(), metadata="bucket") as other:
            gone_on = other.topic("shop/orders", take_over=True)
            gone_on.append(b"mine", sync=True)
            gone_on.ship()
        append(topic, 50, 60)
        topic.ship()
        with pytest.raises(RetryError, match="went on with the replica"):
            replicate(topic)
        tier = topic.statistics().tier
        assert tier is not None
        assert [one.high_water_mark for one in tier.replicas] == [50, 60]
    with tidelog.open(tmp_path / "c", store=(tmp_path / "one").as_uri(), metadata="bucket", read_only=True) as other:
        assert values(other) == [*expected(50), b"mine"]


def test_topic_of_the_same_name_is_not_mixed_into_a_replica(tmp_path: Path) -> None:
    """A topic that was deleted and created again is another log; its replicas keep what the first one had."""
    with open_by_hand(tmp_path) as log:
        topic = log.topic("shop/orders")
        append(topic, 0, 50)
        topic.ship()
        replicate(topic)
        log.delete_topic("shop/orders")
        again = log.topic("shop/orders")
        append(again, 0, 10)
        again.ship()
        with pytest.raises(DataError, match="another topic of this name"):
            replicate(again)
    with tidelog.open(tmp_path / "b", store=(tmp_path / "one").as_uri(), metadata="bucket", read_only=True) as other:
        assert values(other) == expected(50)


def test_replica_has_all_partitions_of_a_topic(tmp_path: Path) -> None:
    """And says how many there are."""
    with open_by_hand(tmp_path, replication_mode="sync") as log:
        topic = log.topic("shop/orders", partitions=3)
        for number in range(3):
            topic.partition(number).append(b"%d" % number, sync=True)
            topic.partition(number).ship()
    shutil.rmtree(tmp_path / "store")
    with tidelog.open(tmp_path / "other", store=(tmp_path / "one").as_uri(), metadata="bucket", read_only=True) as log:
        copied = log.topic("shop/orders")
        found = [[message.value for message in copied.partition(number).read()] for number in range(3)]
        assert found == [[b"0"], [b"1"], [b"2"]]


def test_topic_may_have_replicas_of_its_own(tmp_path: Path) -> None:
    """The setting is remembered with the topic, as all its settings are."""
    store, replica = (tmp_path / "store").as_uri(), (tmp_path / "one").as_uri()
    with tidelog.open(tmp_path / "data", store=store) as log:
        log.topic("shop/orders", replicas=replica, replication_mode="sync")
        log.topic("shop/other")
    with tidelog.open(tmp_path / "data") as log:
        for name in ("shop/orders", "shop/other"):
            append(log.topic(name), 0, 5)
            log.topic(name).ship()
    assert [path.parent.parent.name for path in (tmp_path / "one").rglob("*.tlog")] == ["orders"]


def test_replicas_without_a_store_are_refused(tmp_path: Path) -> None:
    """No setting is accepted and then ignored."""
    with (
        tidelog.open(tmp_path / "data", replicas=(tmp_path / "one").as_uri()) as log,
        pytest.raises(ConfigError, match="replicas"),
    ):
        log.topic("shop/orders")
