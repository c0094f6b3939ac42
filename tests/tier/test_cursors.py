"""Cursors under an owner's epoch: all that a subscription remembers survives owners, and never goes beyond the end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.crash.tier_promises import NAME, open_node, tier_settings

import tidelog
from tidelog.clock import ManualClock
from tidelog.errors import FencedError
from tidelog.testing import World
from tidelog.testing.faults import Call
from tidelog.tier.owner import Cursor
from tidelog.topics.storage import LogDirectory
from tidelog.topics.topic import Topic

METADATA = ["bucket", "sqlite"]
FULL = Cursor(
    offset=2,
    epoch=0,
    moved_us=0,
    kind="shared",
    created_us=7,
    acked=((4, 6), (8, 20)),
    failures=((3, 2), (15, 1)),
    hold_retention=True,
)


def opened(path: Path, node: str, metadata: str) -> tuple[LogDirectory, Topic]:
    url = "bucket" if metadata == "bucket" else f"sqlite://{path}/metadata.db"
    log = tidelog.open(path / node, store=f"file://{path}/store", metadata=url)
    return log, log.topic("shop/orders")


def cursor_of(topic: Topic) -> Cursor:
    assert topic.tiered is not None
    found = topic.tiered.owned.catalog.cursor("billing")
    assert found is not None
    return found[0]


@pytest.mark.parametrize("metadata", METADATA)
def test_a_new_owner_keeps_all_of_a_cursor_that_the_topic_still_has(tmp_path: Path, metadata: str) -> None:
    """What is beyond the end of the topic is forgotten: those offsets are given to other messages."""
    first, topic = opened(tmp_path, "a", metadata)
    topic.append_many([b"x"] * 10)
    topic.ship()
    topic.append_many([b"only on this disk"] * 10)
    assert topic.tiered is not None
    topic.tiered.change(lambda owned: owned.store_cursor("billing", FULL))
    first.close()
    second, topic = opened(tmp_path, "b", metadata)
    cursor = cursor_of(topic)
    assert (cursor.offset, cursor.kind, cursor.created_us, cursor.hold_retention) == (2, "shared", 7, True)
    assert (cursor.acked, cursor.failures) == (((4, 6), (8, 10)), ((3, 2),))
    second.close()


@pytest.mark.parametrize("metadata", METADATA)
def test_the_same_disk_keeps_a_cursor_whole(tmp_path: Path, metadata: str) -> None:
    """Messages that are not shipped are still the topic's when their disk comes back."""
    log, topic = opened(tmp_path, "a", metadata)
    topic.append_many([b"x"] * 20, sync=True)
    assert topic.tiered is not None
    topic.tiered.change(lambda owned: owned.store_cursor("billing", FULL))
    log.close()
    log, topic = opened(tmp_path, "a", metadata)
    assert (cursor_of(topic).acked, cursor_of(topic).failures) == (FULL.acked, FULL.failures)
    log.close()


@pytest.mark.parametrize("metadata", METADATA)
def test_a_replaced_owner_cannot_move_a_cursor(tmp_path: Path, metadata: str) -> None:
    """It is fenced, also when it had read the cursor before."""
    first, old = opened(tmp_path, "a", metadata)
    old.append_many([b"x"] * 20)
    old.ship()
    assert old.tiered is not None
    old.tiered.change(lambda owned: owned.store_cursor("billing", FULL))
    second, new = opened(tmp_path, "b", metadata)
    before = cursor_of(new)
    with pytest.raises(FencedError):
        old.tiered.change(lambda owned: owned.move_cursor("billing", 19))
    assert cursor_of(new) == before
    first.close()
    second.close()


@pytest.mark.parametrize("multi_key", [True, False])
def test_a_replaced_owner_that_wakes_up_deletes_no_cursor(multi_key: bool) -> None:
    """It had asked whether the topic is its own before it fell asleep; the subscription is the new owner's by then."""
    world = World(multi_key=multi_key, clock=ManualClock())
    first = open_node(world, "a", tier_settings())
    old = first.topic(NAME)
    old.append_many([b"x"] * 20)
    old.ship()
    old.subscribe("billing").close()
    others: list[LogDirectory] = []

    def take_over(call: Call) -> None:
        if not others and "subscriptions/billing" in str(call):
            others.append(open_node(world, "b", tier_settings()))
            others[0].topic(NAME)

    world.faults.on_call = take_over
    with pytest.raises(FencedError):
        old.delete_subscription("billing")
    new = others[0].topic(NAME)
    assert new.subscriptions() == ["billing"]
    others[0].close()
    with contextlib.suppress(FencedError):
        first.close()


@pytest.mark.parametrize("metadata", METADATA)
def test_a_deleted_subscription_can_be_made_again(tmp_path: Path, metadata: str) -> None:
    """What the deletion leaves in a bucket is not taken for a subscription."""
    log, topic = opened(tmp_path, "a", metadata)
    topic.append_many([b"x"] * 3, sync=True)
    for _ in range(2):
        with topic.subscribe("billing") as sub:
            assert len(sub.receive_many(5, timeout=1)) == 3
        topic.delete_subscription("billing")
        assert topic.subscriptions() == []
    log.delete_topic("shop/orders")
    assert log.topics() == []
    log.close()
