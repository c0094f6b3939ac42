"""Faults 17 to 22 of Danube, in the delivery of messages: each test is the loss that it would cause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import tidelog
from tidelog.clock import ManualClock
from tidelog.errors import DataError, StoreUnavailableError
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.topic import Topic

NAME = "shop/orders"
KEY = "tidelog/storage/topics/shop/orders/subscriptions/billing"


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
    topic.append_many([b"%d" % number for number in range(20)])
    return topic


def offsets(sub: Consumer, count: int = 100) -> list[int]:
    """What it gets now."""
    return [message.offset for message in sub.receive_many(count, timeout=0)]


def read_through(sub: Consumer, open_reader: Any) -> None:
    """Has a subscription read in another way."""
    feed = sub._subscription._feed
    feed._source = feed._source._replace(open_reader=open_reader)


def test_17_a_rate_limit_drops_nothing(topic: Topic, clock: ManualClock) -> None:
    """Messages that may not go yet are held back, and all of them come."""
    sub = topic.subscribe("billing", max_rate_per_second=2)
    got: list[int] = []
    seconds = 0.0
    while len(got) < 20 and seconds < 60:
        got += offsets(sub)
        clock.advance(0.25)
        seconds += 0.25
    assert got == list(range(20))
    assert seconds >= 9


def test_18_a_broken_stream_opens_again_at_the_right_offset(tmp_path: Path) -> None:
    """A store that fails for a while costs time and no message."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number for number in range(20)])
        sub = topic.subscribe("billing")
        opens = sub._subscription._feed._source.open_reader
        failures = iter([StoreUnavailableError("down"), StoreUnavailableError("still down")])

        def fail_first(offset: int, on_gap: Any) -> Any:
            for error in failures:
                raise error
            return opens(offset, on_gap)

        read_through(sub, fail_first)
        assert [message.offset for message in sub.receive_many(100, timeout=120)] == list(range(20))


def test_18_an_error_is_told_and_the_next_call_goes_on(topic: Topic) -> None:
    """Who does not want to wait hears why, and loses nothing by it."""
    sub = topic.subscribe("billing")
    opens = sub._subscription._feed._source.open_reader

    def fail(offset: int, on_gap: Any) -> Any:
        raise StoreUnavailableError("down")

    read_through(sub, fail)
    with pytest.raises(StoreUnavailableError):
        sub.receive(0)
    read_through(sub, opens)
    assert offsets(sub) == list(range(20))


def test_19_a_subscription_that_lags_skips_nothing(tmp_path: Path) -> None:
    """Far more is appended than any buffer holds before it reads on."""
    with tidelog.open(tmp_path, cache_max_messages=16) as log:
        topic = log.topic(NAME)
        sub = topic.subscribe("billing")
        for number in range(5000):
            topic.append(b"%d" % number)
        got = 0
        while batch := sub.receive_many(700, timeout=0):
            assert [message.offset for message in batch] == list(range(got, got + len(batch)))
            got += len(batch)
            sub.ack_many(batch)
        assert got == 5000


def test_19_an_unreadable_cursor_is_an_error(log: LogDirectory, topic: Topic) -> None:
    """It never becomes "latest", nor anything else."""
    topic.subscribe("billing").close()
    metadata = log._metadata(False)
    assert metadata is not None
    for damaged in (
        b"",
        b'{"offset":-1,"epoch":0,"moved_us":0}',
        b'{"offset":9,"epoch":0,"moved_us":0,"acked":[[3,5]]}',
    ):
        metadata.put(KEY, damaged)
        with pytest.raises(DataError):
            topic.subscribe("billing")


def test_19_a_new_subscription_survives_a_crash_before_its_first_flush(tmp_path: Path) -> None:
    """What was appended between making it and the crash is still its own."""
    clock = ManualClock()
    log = LogDirectory(tmp_path, clock=clock)
    topic = log.topic(NAME)
    topic.append(b"before", sync=True)
    sub = topic.subscribe("billing", start="latest")
    topic.append(b"after", sync=True)
    sub._subscription.stop(lambda: DataError("the process is killed"))  # nothing is stored from here on
    log.close()
    with LogDirectory(tmp_path, clock=clock) as again:
        assert offsets(again.topic(NAME).subscribe("billing", start="latest")) == [1]


def test_20_what_a_leaving_consumer_had_goes_to_the_others_in_order(log: LogDirectory) -> None:
    """Nothing that it left counts as acknowledged, and the order of each key holds."""
    topic = log.topic("shop/keys")
    for number in range(40):
        topic.append(b"%d" % number, key=b"k%d" % (number % 4))
    first, second = (topic.subscribe("work", "key_shared", consumer=name) for name in ("a", "b"))
    left_behind = offsets(first)
    got = second.receive_many(100, timeout=0)
    assert left_behind
    first.close()
    got += second.receive_many(100, timeout=0)
    assert sorted(message.offset for message in got) == list(range(40))
    for key in {message.key for message in got}:
        of_key = [message.offset for message in got if message.key == key]
        assert of_key == sorted(of_key)


def test_20_giving_up_a_message_touches_no_other_of_its_key(log: LogDirectory) -> None:
    """Only the poisonous one is dropped."""
    topic = log.topic("shop/keys")
    topic.append_many([tidelog.Message(b"%d" % number, key=b"k") for number in range(5)])
    sub = topic.subscribe("work", "key_shared", max_deliveries=1, on_exhausted="drop")
    sub.nack(sub.receive(0) or 0)
    assert offsets(sub) == [1, 2, 3, 4]
    assert topic.statistics().subscriptions[0].dropped == 1


def test_21_acknowledging_and_publishing_wait_for_nobody(tmp_path: Path) -> None:
    """One consumer hangs in the store; the other acknowledges and the producer appends at once."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number for number in range(4)])
        quick, stuck = topic.subscribe("work", "shared"), topic.subscribe("work", "shared")
        message = quick.receive(120)
        assert message is not None
        quick.receive_many(3, timeout=120)
        may_go_on = Event()
        opens = quick._subscription._feed._source.open_reader

        def hang(offset: int, on_gap: Any) -> Any:
            assert may_go_on.wait(120)
            return opens(offset, on_gap)

        quick._subscription._feed.close()
        read_through(quick, hang)
        topic.append(b"more")
        thread = Thread(target=stuck.receive, args=(120,))
        thread.start()
        time.sleep(0.1)
        quick.ack(message)
        topic.append(b"and more")
        assert thread.is_alive(), "it was waited for"
        may_go_on.set()
        thread.join(120)
        assert not thread.is_alive()


def test_22_an_acknowledgement_counts_after_its_time_out(topic: Topic, clock: ManualClock) -> None:
    """It is late, the message waits to be handed out again, and it is not."""
    sub = topic.subscribe("billing", ack_timeout_seconds=30)
    message = sub.receive(0)
    assert message is not None
    clock.advance(31)
    assert sub._subscription.receive(sub._holder, 1, 0)[0].offset == 0  # it is on its way again
    sub.nack(0, delay=5)
    sub.ack(message)
    clock.advance(60)
    assert 0 not in offsets(sub)


def test_22_an_acknowledgement_counts_while_another_consumer_has_the_message(topic: Topic, clock: ManualClock) -> None:
    """Whoever had it first and is done with it saves everybody else the work."""
    slow, quick = (topic.subscribe("work", "shared", ack_timeout_seconds=30) for _ in range(2))
    message = slow.receive(0)
    assert message is not None
    clock.advance(31)
    again = quick.receive(0)
    assert again is not None
    assert again.offset == message.offset
    slow.ack(message)
    clock.advance(31)
    assert message.offset not in offsets(quick)
    assert topic.subscription_info("work").offset == 1
