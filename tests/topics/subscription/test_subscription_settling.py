"""What can be acknowledged or rejected, and what is a mistake: each says so instead of losing a message in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import pytest

import tidelog
from tidelog.clock import ManualClock, to_datetime
from tidelog.errors import InputError, NotFoundError
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.options import Kind
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.topic import Topic

NAME = "shop/orders"
KINDS: list[Kind] = ["exclusive", "failover", "shared", "key_shared"]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Iterator[LogDirectory]:
    with LogDirectory(tmp_path / "data", clock=clock) as opened:
        yield opened


@pytest.fixture
def topic(log: LogDirectory) -> Topic:
    topic = log.topic(NAME)
    topic.append_many([tidelog.Message(b"%d" % number, key=b"%d" % (number % 3)) for number in range(10)])
    return topic


def received(sub: Consumer, count: int) -> list[Delivery]:
    taken = sub.receive_many(count, timeout=0)
    assert len(taken) == count
    return taken


# Acknowledging


@pytest.mark.parametrize("kind", KINDS)
def test_an_offset_that_was_never_handed_out_cannot_be_acknowledged(topic: Topic, kind: Kind) -> None:
    """Neither one that was read ahead nor one that was not read: the message would never come."""
    sub = topic.subscribe("work", kind)
    for offset in (0, 5):
        with pytest.raises(InputError, match="not delivered"):
            sub.ack(offset)
    first = received(sub, 1)[0]
    sub.ack(first.offset)
    with pytest.raises(InputError, match="message 7 was not delivered"):
        sub.ack_many([0, 7])
    assert sub.lag.messages == 9


def test_a_delayed_message_cannot_be_acknowledged_before_it_came(topic: Topic, clock: ManualClock) -> None:
    """It waits for its time, and is acknowledged then."""
    topic.append(b"later", deliver_at=to_datetime(clock.now_us()) + timedelta(hours=1))
    topic.append(b"now")
    sub = topic.subscribe("work", start=10)
    assert received(sub, 1)[0].offset == 11
    for settle in (sub.ack, sub.ack_cumulative, sub.nack):
        with pytest.raises(InputError, match="message 10 was not delivered"):
            settle(10)
    clock.advance(3601)
    sub.ack(received(sub, 1)[0].offset)
    assert sub.lag.messages == 1


def test_acknowledging_twice_is_fine(topic: Topic) -> None:
    """By message and by offset, by this consumer and another one."""
    first, second = topic.subscribe("work", "shared"), topic.subscribe("work", "shared")
    message = received(first, 1)[0]
    for sub in (first, second, first):
        sub.ack(message)
        sub.ack(message.offset)
    assert first.lag.messages == 9


def test_a_received_message_is_acknowledged_after_the_subscription_was_opened_again(topic: Topic) -> None:
    """Whoever has the message has received it: it counts, although nothing was handed out since."""
    with topic.subscribe("work") as sub:
        message = received(sub, 3)[2]
    with topic.subscribe("work") as sub:
        with pytest.raises(InputError, match="not delivered"):
            sub.ack(message.offset)
        sub.ack(message)
        assert [one.offset for one in received(sub, 9)] == [0, 1, *range(3, 10)]


# Rejecting


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_acknowledged_cannot_be_rejected(topic: Topic, kind: Kind) -> None:
    """It does not come again, and whoever expects that hears so."""
    sub = topic.subscribe("work", kind)
    message = received(sub, 1)[0]
    sub.ack(message)
    with pytest.raises(InputError, match=f"message {message.offset} is settled"):
        sub.nack(message)
    with pytest.raises(InputError, match="not delivered"):
        sub.nack(9)


def test_rejecting_twice_counts_once(topic: Topic) -> None:
    """It waits to come again already."""
    sub = topic.subscribe("work", "shared", max_deliveries=5)
    message = received(sub, 1)[0]
    for _ in range(3):
        sub.nack(message)
    assert sub._subscription.statistics().nacked == 1


def test_a_consumer_that_is_late_may_reject_what_another_one_has_settled(topic: Topic, clock: ManualClock) -> None:
    """Its message timed out and went elsewhere: it cannot know."""
    slow, quick = (topic.subscribe("work", "shared", ack_timeout_seconds=5.0) for _ in range(2))
    message = received(slow, 1)[0]
    clock.advance(6)
    quick.ack(received(quick, 1)[0])
    slow.nack(message)
    with pytest.raises(InputError, match="settled"):
        quick.nack(message)


def test_what_was_had_before_a_seek_is_neither_settled_nor_an_error(topic: Topic) -> None:
    """It comes again, whatever is said of it meanwhile."""
    sub = topic.subscribe("work", "shared")
    before = received(sub, 3)
    sub.seek(0)
    sub.ack(before[0])
    sub.ack(before[1].offset)
    sub.nack(before[2])
    assert [message.offset for message in received(sub, 10)] == list(range(10))


# Deleting the topic


def test_consumers_of_a_deleted_topic_get_an_error_that_says_so(log: LogDirectory, topic: Topic) -> None:
    """Those that wait, in threads and tasks, and those that come later; a loop over messages does not just end."""
    sub = topic.subscribe("work", "shared", start="latest")
    raised: list[BaseException] = []

    def wait(work: object) -> None:
        try:
            assert callable(work)
            work()
        except NotFoundError as error:
            raised.append(error)

    waiting = [lambda: sub.receive(120), lambda: list(sub), lambda: asyncio.run(_receive(sub))]
    threads = [Thread(target=wait, args=(work,)) for work in waiting]
    for thread in threads:
        thread.start()
    pause = Event()
    while len(sub._subscription._waiters._waiting) < len(threads):
        pause.wait(0.01)
    log.delete_topic(NAME)
    for thread in threads:
        thread.join(120)
    for work in (lambda: sub.receive(0), lambda: sub.ack(0), lambda: sub.nack(0)):
        wait(work)
    assert [str(error) for error in raised] == ["the topic shop/orders was deleted. Close this consumer"] * 6
    sub.close()
    assert log.topic(NAME).subscriptions() == []


async def _receive(sub: Consumer) -> None:
    await sub.receive_async(120)
