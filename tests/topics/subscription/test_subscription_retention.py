"""Retention and subscriptions: what a holding one has not acknowledged stays, for others it is counted."""

from __future__ import annotations

from pathlib import Path

import tidelog
from tidelog.clock import ManualClock
from tidelog.log.settings import LogSettings
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.topic import Topic

NAME = "shop/orders"


def opened(path: Path, clock: ManualClock) -> LogDirectory:
    return LogDirectory(path, LogSettings(rotate_max_bytes=4096), clock=clock)


def fill(topic: Topic, clock: ManualClock, count: int) -> None:
    """Many small files, each of its own time."""
    for _ in range(count):
        topic.append(bytes(1000), sync=True)
        clock.advance(10)


def ack(sub: Consumer, count: int) -> None:
    """The first messages are done with; they may come in several batches."""
    for _ in range(count):
        message = sub.receive(0)
        assert message is not None
        sub.ack(message)


def test_what_a_holding_subscription_needs_is_not_deleted(tmp_path: Path) -> None:
    """Also while it is not open, and also after a restart."""
    clock = ManualClock()
    with opened(tmp_path, clock) as log:
        topic = log.topic(NAME, retention_seconds=20)
        fill(topic, clock, 40)
        with topic.subscribe("billing", hold_retention=True) as sub:
            ack(sub, 20)
            topic.prune()
            assert topic.start_offset == 0  # only what is stored counts
        topic.prune()
        assert 0 < topic.start_offset <= 20
    with opened(tmp_path, clock) as log:
        topic = log.topic(NAME)
        clock.advance(1000)
        topic.prune()
        assert topic.start_offset <= 20
        topic.delete_subscription("billing")
        topic.prune()
        assert topic.start_offset > 20


def test_what_retention_deleted_is_passed_over_and_counted(tmp_path: Path) -> None:
    """A subscription that holds nothing goes on with what is kept."""
    clock = ManualClock()
    with opened(tmp_path, clock) as log:
        topic = log.topic(NAME, retention_seconds=20)
        sub = topic.subscribe("billing")
        fill(topic, clock, 40)
        topic.prune()
        first = sub.receive(0)
        assert first is not None
        assert first.offset == topic.start_offset > 0
        assert topic.statistics().subscriptions[0].expired == topic.start_offset


def test_objects_that_a_holding_subscription_needs_are_not_deleted(tmp_path: Path) -> None:
    """With a store as well: whole objects below the position go, the others stay."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/store", metadata="bucket") as log:
        topic = log.topic(NAME, retention_bytes=1, max_object_bytes=1000)
        for _ in range(10):
            topic.append(bytes(800))
            topic.ship()
        sub = topic.subscribe("billing", hold_retention=True)
        ack(sub, 5)
        sub.flush()
        topic.prune()
        assert topic.start_offset == 5
        rest = [sub.receive(0) for _ in range(5)]
        assert [message.offset for message in rest if message is not None] == [5, 6, 7, 8, 9]
