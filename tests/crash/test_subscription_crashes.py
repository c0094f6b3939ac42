"""Subscriptions, killed at every call of disk and stores: what was not acknowledged comes, what was stored does not.

Every message has a value of its own. A workload writes down what it is about to acknowledge, and what it was told is
stored; whoever goes on, on the same node, on another one or with an empty disk, is held to both.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import Any

import pytest
from tests.campaign import every
from tests.crash.tier_promises import NAME, open_node, tier_settings

from tidelog.clock import ManualClock
from tidelog.testing import CrashPlan, History, World, cut_world_everywhere
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.topic import Topic

LETTERS = f"{NAME}.work.dlq"
_numbers = itertools.count()


def subscribed(topic: Topic) -> Consumer:
    """Positions are stored when the workload says so, not at some other moment."""
    return topic.subscribe(
        "work",
        "shared",
        max_deliveries=2,
        redelivery_backoff_seconds=0,
        progress_flush_interval_seconds=3600,
        progress_min_offset_delta=1_000_000,
    )


class Book:
    """What a workload did with one subscription, kept in a `History`, which the crash driver hands on."""

    def __init__(self, history: History) -> None:
        self._history = history

    def note(self, what: str, value: Any = None) -> None:
        self._history.attempted(what, value)

    def append(self, topic: Topic, count: int) -> None:
        topic.append_many([b"<%d>" % next(_numbers) for _ in range(count)], sync=True)

    def ack(self, sub: Consumer, count: int, *, every: int = 1) -> None:
        """Of the next messages each so-many-th is acknowledged."""
        for message in sub.receive_many(count, timeout=0)[::every]:
            self.note("acking", message.value)
            sub.ack(message)

    def flush(self, sub: Consumer) -> None:
        sub.flush()
        self.note("stored")

    def seek(self, topic: Topic, sub: Consumer, offset: int) -> None:
        passed = {message.value for message in topic.read(stop=offset)}
        self.note("seeking", passed)
        sub.seek(offset)
        self.note("sought", passed)

    def give_up(self, sub: Consumer) -> None:
        """The next message is rejected until it is a dead letter."""
        for _ in range(2):
            (message,) = sub.receive_many(1, timeout=0)
            sub.nack(message)
        sub._subscription.bury()

    def ship(self, topic: Topic) -> None:
        self.note("shipped", topic.ship())

    # What follows

    def _events(self) -> list[tuple[str, Any]]:
        return [(str(what), value) for life in self._history.lives for what, value in life.attempts]

    @property
    def excused(self) -> set[bytes]:
        """What need not come: perhaps it was acknowledged, and since then nobody went back for certain."""
        excused: set[bytes] = set()
        for what, value in self._events():
            if what == "seeking":
                excused |= value
            elif what == "sought":
                excused = set(value)
            elif what == "acking":
                excused.add(value)
        return excused

    @property
    def settled(self) -> set[bytes]:
        """What must not come: its acknowledgement is stored, and nobody began to go back since."""
        settled: set[bytes] = set()
        acked: set[bytes] = set()
        for what, value in self._events():
            if what == "seeking":
                settled, acked = set(), set()
            elif what == "died":
                acked = set()
            elif what == "acking":
                acked.add(value)
            elif what == "stored":
                settled |= acked
        return settled

    @property
    def shipped_offset(self) -> int:
        return max([value for what, value in self._events() if what == "shipped"], default=0)


def work(log: LogDirectory, book: Book) -> None:
    """A subscription is made, acknowledged out of order, moved, and has something to give up."""
    topic = log.topic(NAME)
    book.append(topic, 6)
    sub = subscribed(topic)
    book.ack(sub, 4, every=2)
    book.flush(sub)
    book.ship(topic)
    book.seek(topic, sub, 1)
    book.append(topic, 4)
    book.ack(sub, 5, every=3)
    book.give_up(sub)
    book.ship(topic)
    book.flush(sub)
    book.ack(sub, 2)


def drained(sub: Consumer) -> list[bytes]:
    """Everything that comes, acknowledged."""
    found = []
    while messages := sub.receive_many(100, timeout=0):
        found += [message.value or b"" for message in messages]
        sub.ack_many(messages)
    return found


def check_node(world: World, node: str, book: Book, *, has_tail: bool) -> None:
    """Opens the topic there; `has_tail`: with everything that was synced."""
    with closing(open_node(world, node, tier_settings())) as log:
        topic = log.topic(NAME)
        messages = {message.value: message.offset for message in topic.read()}
        letters = [letter.value for letter in log.topic(LETTERS).read()]
        sub = subscribed(topic)
        got = drained(sub)
        assert len(set(got)) == len(got)
        assert len(set(letters)) == len(letters), "a dead letter was written twice"
        excused = book.excused | set(letters)
        assert set(messages) - set(got) <= excused, "a message that nobody acknowledged does not come"
        settled = {value for value in book.settled if has_tail or messages.get(value, 1 << 62) < book.shipped_offset}
        assert not settled & set(got), "what was stored as acknowledged comes again"
        sub.close()
        assert drained(subscribed(topic)) == []


def check(world: World, history: History) -> None:
    """The same node goes on, or another one, or the same one after it lost its disk."""
    check_node(world.after_crash("keep"), "a", Book(history), has_tail=True)
    check_node(world.after_crash("keep"), "b", Book(history), has_tail=False)
    check_node(world.lose_disk("a"), "a", Book(history), has_tail=False)


@pytest.mark.deeper
@pytest.mark.parametrize("multi_key", [True, False])
def test_positions_survive_a_crash_at_any_call(multi_key: bool) -> None:
    """Made, stored, moved, given up and closed: cut anywhere, nothing open is lost and nothing stored comes again."""

    def workload(world: World, history: History) -> None:
        book = Book(history)
        with closing(open_node(world, "a", tier_settings())) as log:
            work(log, book)
        book.note("stored")

    summary = cut_world_everywhere(
        workload,
        check,
        CrashPlan(every=every(13), policies=("lose", "keep"), grace_seconds=0.5),
        start=lambda crash_at: World(crash_at=crash_at, multi_key=multi_key, clock=ManualClock()),
    )
    assert summary.cut_points > 8


@pytest.mark.deeper
@pytest.mark.parametrize("multi_key", [True, False])
def test_positions_survive_a_crash_in_the_life_after(multi_key: bool) -> None:
    """Another node takes over with what the first one left, goes on, hands the topic back, and is cut anywhere."""
    before, past = World(multi_key=multi_key, clock=ManualClock()), History()
    first = open_node(before, "a", tier_settings())
    work(first, Book(past))
    left = before.after_crash("keep")
    first.close()

    def workload(world: World, history: History) -> None:
        book = Book(history)
        for what, value in Book(past)._events():
            book.note(what, value)
        book.note("died")
        with closing(open_node(world, "a", tier_settings())) as log:
            topic = log.topic(NAME)
            sub = subscribed(topic)
            book.ack(sub, 3, every=2)
            book.append(topic, 2)
            book.flush(sub)
            book.ack(sub, 1)
            topic.seal()
            book.note("stored")
            book.note("shipped", 1 << 62)
        with closing(open_node(world, "b", tier_settings())) as log:
            book.ack(subscribed(log.topic(NAME)), 1)
        book.note("stored")

    summary = cut_world_everywhere(
        workload,
        check_after_move,
        CrashPlan(every=every(13), policies=("lose", "keep"), grace_seconds=0.5),
        start=lambda crash_at: left.after_crash("keep", crash_at=crash_at),
    )
    assert summary.cut_points > 8


def check_after_move(world: World, history: History) -> None:
    """Wherever the topic is by now, node b takes it; what node a had not shipped may stay behind there."""
    check_node(world.after_crash("keep"), "b", Book(history), has_tail=False)
    check_node(world.after_crash("keep"), "a", Book(history), has_tail=False)


@pytest.mark.deeper
@pytest.mark.parametrize("multi_key", [True, False])
def test_positions_survive_a_crash_of_an_owner_that_accepts_nothing(multi_key: bool) -> None:
    """Another node opens the topic and closes it, cut anywhere: nothing open is lost, and once it has given the topic
    back, nothing that was stored as acknowledged comes again where the messages are."""
    before, past = World(multi_key=multi_key, clock=ManualClock()), History()
    with closing(open_node(before, "a", tier_settings())) as log:
        work(log, Book(past))
    Book(past).note("stored")

    def workload(world: World, history: History) -> None:
        book = Book(history)
        for what, value in Book(past)._events():
            book.note(what, value)
        with closing(open_node(world, "b", tier_settings())) as log:
            book.ack(subscribed(log.topic(NAME)), 1)
        book.note("stored")
        book.note("gave back")

    def check_both(world: World, history: History) -> None:
        has_given_back = ("gave back", None) in Book(history)._events()
        check_node(world.after_crash("keep"), "a", Book(history), has_tail=has_given_back)
        check_node(world.after_crash("keep"), "b", Book(history), has_tail=False)

    summary = cut_world_everywhere(
        workload,
        check_both,
        CrashPlan(every=every(5), policies=("lose", "keep"), grace_seconds=0.5),
        start=lambda crash_at: before.after_crash("keep", crash_at=crash_at),
    )
    assert summary.cut_points > 8


@pytest.mark.deeper
@pytest.mark.parametrize("multi_key", [True, False])
def test_a_deleted_topic_takes_its_subscriptions_and_settings_with_it(multi_key: bool) -> None:
    """Cut anywhere in the deletion, all of a topic is there or nothing: no messages without their subscriptions, and
    none of the old settings in the topic that is made in its place."""
    before = World(multi_key=multi_key, clock=ManualClock())
    with closing(open_node(before, "a", tier_settings())) as log:
        topic = log.topic(NAME, retention_seconds=86_400)
        topic.append_many([b"%d" % number for number in range(5)])
        topic.ship()
        with topic.subscribe("work") as sub:
            sub.ack_many(sub.receive_many(3, timeout=0))
    before.crash()

    def workload(world: World, history: History) -> None:
        with closing(open_node(world, "a", tier_settings())) as log:
            log.topic(NAME).subscribe("work")
            log.delete_topic(NAME)

    def check_all_or_nothing(world: World, history: History) -> None:
        for node in ("a", "b"):
            with closing(open_node(world.after_crash("keep"), node, tier_settings())) as log:
                topic = log.topic(NAME)
                settings = log.configure_topic(NAME)
                if topic.next_offset:
                    assert settings == {"retention_seconds": 86_400}
                    assert topic.subscription_info("work").offset == 3
                else:
                    assert settings == {}
                    assert topic.subscriptions() == []

    summary = cut_world_everywhere(
        workload,
        check_all_or_nothing,
        CrashPlan(every=every(3), policies=("lose", "keep")),
        start=lambda crash_at: before.after_crash("keep", crash_at=crash_at),
    )
    assert summary.cut_points > 8
