"""Cursors under an owner's epoch: all that a subscription remembers survives owners, and never goes beyond the end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.crash.tier_promises import NAME, open_node, tier_settings

import tidelog
from tidelog.clock import ManualClock
from tidelog.cold.cursor import Cursor
from tidelog.errors import FencedError
from tidelog.testing import World
from tidelog.testing.faults import Call
from tidelog.topics.directory import LogDirectory
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


def opened(path: Path, node: str, metadata: str, *, take_over: bool = False) -> tuple[LogDirectory, Topic]:
    url = "bucket" if metadata == "bucket" else f"sqlite://{path}/metadata.db"
    log = tidelog.open(path / node, store=f"file://{path}/store", metadata=url)
    return log, log.topic("shop/orders", take_over=take_over)


def cursor_of(topic: Topic) -> Cursor:
    assert topic._tiered is not None
    found = topic._tiered.owned.catalog.cursor("billing")
    assert found is not None
    return found[0]


@pytest.mark.parametrize("metadata", METADATA)
def test_a_new_owner_keeps_all_of_a_cursor_that_the_topic_still_has(tmp_path: Path, metadata: str) -> None:
    """What is beyond the end of the topic is forgotten: those offsets are given to other messages."""
    first, topic = opened(tmp_path, "a", metadata)
    topic.append_many([b"x"] * 10)
    topic.ship()
    topic.append_many([b"only on this disk"] * 10)
    assert topic._tiered is not None
    topic._tiered.change(lambda owned: owned.store_cursor("billing", FULL))
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
    assert topic._tiered is not None
    topic._tiered.change(lambda owned: owned.store_cursor("billing", FULL))
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
    assert old._tiered is not None
    old._tiered.change(lambda owned: owned.store_cursor("billing", FULL))
    second, new = opened(tmp_path, "b", metadata, take_over=True)
    before = cursor_of(new)
    with pytest.raises(FencedError):
        old._tiered.change(lambda owned: owned.move_cursor("billing", 19))
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
            others[0].topic(NAME, take_over=True)

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
            assert len(sub.receive_many(5, timeout=120)) == 3
        topic.delete_subscription("billing")
        assert topic.subscriptions() == []
    log.delete_topic("shop/orders")
    assert log.topics() == []
    log.close()


# Owners that accept nothing


def left_by_the_first(path: Path, metadata: str) -> None:
    """Thirty messages, the first twenty shipped; the subscription has acknowledged, rejected and given up some."""
    log, topic = opened(path, "a", metadata)
    topic.append_many([b"%d" % number for number in range(20)], sync=True)
    topic.ship()
    topic.append_many([b"%d" % number for number in range(20, 30)], sync=True)
    sub = topic.subscribe("billing", "shared", max_deliveries=3, redelivery_backoff_seconds=0)
    taken = sub.receive_many(28, timeout=120)
    sub.ack_many([*taken[:5], *taken[6:25]])
    for _ in range(3):
        sub.nack(25)
        sub.receive_many(1, timeout=0)
    sub._subscription.bury()
    sub.nack(26)
    log.close()


def left_for(path: Path, node: str, metadata: str) -> list[tuple[int, int]]:
    """What comes there: offsets with their delivery counts."""
    log, topic = opened(path, node, metadata)
    sub = topic.subscribe("billing", "shared", max_deliveries=3, redelivery_backoff_seconds=0)
    found = []
    while messages := sub.receive_many(100, timeout=0):
        found += [(message.offset, message.delivery_count) for message in messages]
    log.close()
    return found


@pytest.mark.parametrize("metadata", METADATA)
def test_an_owner_that_accepts_nothing_sets_no_subscription_back(tmp_path: Path, metadata: str) -> None:
    """A node that opens and closes a topic gives back what the owner before has on its disk, and its acknowledgements:
    none of those messages comes again, their delivery counts stay, and no second dead letter is written."""
    left_by_the_first(tmp_path, metadata)
    for node in ("b", "c"):
        log, topic = opened(tmp_path, node, metadata)
        assert cursor_of(topic).acked == ((6, 20),)
        log.close()
    assert left_for(tmp_path, "a", metadata) == [(5, 1), (26, 2), (27, 1), (28, 1), (29, 1)]
    log, _ = opened(tmp_path, "a", metadata)
    assert [letter.value for letter in log.topic("shop/orders.billing.dlq").read()] == [b"25"]
    log.close()


@pytest.mark.parametrize("metadata", METADATA)
def test_what_an_owner_acknowledges_that_accepts_nothing_stays_too(tmp_path: Path, metadata: str) -> None:
    """It gets what the store has, and both are joined when it closes."""
    left_by_the_first(tmp_path, metadata)
    log, topic = opened(tmp_path, "b", metadata)
    with topic.subscribe("billing", "shared") as sub:
        (message,) = sub.receive_many(100, timeout=120)
        sub.ack(message)
    assert cursor_of(topic).offset == 20
    log.close()
    assert left_for(tmp_path, "a", metadata) == [(26, 2), (27, 1), (28, 1), (29, 1)]


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("change", ["seek", "delete"])
def test_a_subscription_that_was_moved_back_stays_there(tmp_path: Path, metadata: str, change: str) -> None:
    """An owner that accepts nothing may still go back: then everything comes again."""
    left_by_the_first(tmp_path, metadata)
    log, topic = opened(tmp_path, "b", metadata)
    with topic.subscribe("billing", "shared") as sub:
        if change == "seek":
            sub.seek(3)
        else:
            sub.unsubscribe()
            topic.subscribe("billing", "shared", start=3).close()
    log.close()
    assert [offset for offset, _ in left_for(tmp_path, "a", metadata)] == list(range(3, 30))


@pytest.mark.parametrize("metadata", METADATA)
def test_an_owner_that_accepts_messages_hands_them_out(tmp_path: Path, metadata: str) -> None:
    """They have the offsets of messages that were acknowledged at the owner before, and are others."""
    left_by_the_first(tmp_path, metadata)
    log, topic = opened(tmp_path, "b", metadata)
    topic.append_many([b"new"] * 8, sync=True)
    log.close()
    assert left_for(tmp_path, "b", metadata) == [(5, 1), *((offset, 1) for offset in range(20, 28))]
