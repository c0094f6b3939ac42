"""What nodes keep of topics that another one went on with is counted until it is rescued."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.cluster.kept_tails import KeptTails
from tidelog.cluster.member import Identity, Member
from tidelog.cluster.operations import ClusterOperations
from tidelog.service.cluster_control import NodeLoad, NodeTail, Unshipped
from tidelog.store.keys import DEFAULT_ROOT, ClusterKeys
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.testing import ManualClock
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName
from tidelog.topics.rescue import Rescue

NONE_OPEN: frozenset[TopicName] = frozenset()
ORDERS = TopicName("shop", "orders")
LOOK_SECONDS = 31


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path) -> LogDirectory:
    """Its topic has three messages that were never shipped, and another directory has gone on with it."""
    settings: dict[str, Any] = {
        "store": f"file://{tmp_path}/store",
        "metadata": "bucket",
        "ship_max_delay_seconds": 1000.0,
    }
    with tidelog.open(tmp_path / "first", **settings) as log:
        topic = log.topic("shop/orders")
        topic.append(b"shipped", sync=True)
        topic.ship()
        topic.append_many([b"a", b"b", b"c"], sync=True)
    with tidelog.open(tmp_path / "second", **settings) as other:
        other.topic("shop/orders").append(b"theirs")
    return tidelog.open(tmp_path / "first")


def look(kept: KeptTails, clock: ManualClock, opened: Collection[TopicName] = NONE_OPEN) -> dict[str, int]:
    clock.advance(LOOK_SECONDS)
    return {topic: one.messages for topic, one in kept.by_topic(lambda: opened).items()}


def test_tail_of_a_node_that_came_back_counts_until_it_is_rescued(log: LogDirectory, clock: ManualClock) -> None:
    """Where it lies, once it is set aside, and while the partition is open here again; not once a rescue has begun."""
    with log:
        kept, rescue = KeptTails(log, clock), Rescue(log, "shop/orders")
        assert look(kept, clock) == {"shop/orders": 3}
        assert look(kept, clock) == {"shop/orders": 3}
        rescue.set_aside()
        assert look(kept, clock) == {"shop/orders": 3}
        topic = log.topic("shop/orders", take_over=True)
        assert look(kept, clock, {ORDERS}) == {"shop/orders": 3}
        (tail,) = rescue.tails()
        rescue.append_to(tail, topic)
        assert look(kept, clock, {ORDERS}) == {}


def test_what_is_kept_has_the_size_of_its_messages_and_an_age(log: LogDirectory, clock: ManualClock) -> None:
    """Not that of the files, in which there are shipped messages too; it counts from when the tail was found."""
    with log:
        kept, (tail,) = KeptTails(log, clock), Rescue(log, "shop/orders").tails()
        look(kept, clock)
        look(kept, clock)
        one = kept.by_topic(lambda: NONE_OPEN)["shop/orders"]
        assert (one.messages, one.seconds) == (3, float(LOOK_SECONDS))
        assert 0 < one.bytes < tail.file_bytes


def test_topic_that_nobody_took_keeps_nothing(tmp_path: Path, clock: ManualClock) -> None:
    """What is not shipped of it counts elsewhere: it is the end of the log."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/store", metadata="bucket") as log:
        log.topic("shop/orders").append(b"a", sync=True)
        kept = KeptTails(log, clock)
        assert look(kept, clock, {ORDERS}) == {}
        assert look(kept, clock) == {}


def test_restore_point_has_what_is_to_be_rescued(clock: ManualClock) -> None:
    """It says so of each, counts it as missing, and keeps it when the node leaves with nothing else."""
    etcd, keys = MemoryMetadataStore(clock), ClusterKeys()
    operations = ClusterOperations(etcd, DEFAULT_ROOT)
    one = Member(etcd, keys, clock, Identity("a", "a", "127.0.0.1:1", "http://a", "", "1.0"), 10)
    one.prepare()
    one.join()
    three = {"shop/orders": Unshipped(messages=3, bytes=90, seconds=0.0)}
    one.report(NodeLoad(node="a", at_us=1), NodeTail(at_us=1, topics=three, kept=three))
    assert [(row.topic, row.to_rescue) for row in operations.restore_point()] == [
        ("shop/orders", False),
        ("shop/orders", True),
    ]
    status = operations.status()
    assert (status.unshipped_messages, status.left_messages) == (3, 3)
    one.leave(is_empty=True)
    (row,) = operations.restore_point()
    assert (row.to_rescue, row.messages) == (True, 3)
