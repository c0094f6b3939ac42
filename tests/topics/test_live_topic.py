"""Topics with `reliable=False`: messages for whoever reads or subscribes now, in memory that is bounded."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.topics.storage_modes import Storage, storage_fixture

import tidelog
from tidelog.log import LogSettings
from tidelog.testing import FaultyFiles, ManualClock
from tidelog.topics.directory import LogDirectory
from tidelog.topics.live_log import LiveLog
from tidelog.topics.live_topic import LiveTopic
from tidelog.topics.message import TIMESTAMP_FIELD, encode_message
from tidelog.topics.topic import Topic

storage = storage_fixture(["local", "shared_fs-sqlite"])
TIMEOUT_SECONDS = 120
NAME = "shop/clicks"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tidelog.LogDirectory]:
    """A log directory whose live topics keep 32 messages at most."""
    with tidelog.open(tmp_path / "data", cache_max_messages=32) as opened:
        yield opened


def live_log(messages: int, size_bytes: int = 1 << 20, max_message_bytes: int = 1 << 20) -> LiveLog:
    """A live log without a topic."""
    limits = LogSettings(cache_max_messages=messages, cache_max_bytes=size_bytes, max_message_bytes=max_message_bytes)
    return LiveLog(Path("/data"), limits, FaultyFiles(), TIMESTAMP_FIELD)


def values_of(messages: Any) -> list[bytes]:
    """What the messages carry."""
    return [message.value for message in messages]


def kept(topic: Topic) -> list[bytes]:
    """What is in memory now."""
    return values_of(topic.read("earliest", follow=False))


def in_thread(work: Callable[[], None]) -> Thread:
    """Runs beside the test."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(thread: Thread) -> None:
    """Waits for its end, not for ever."""
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()


# Reading


def test_messages_go_to_whoever_reads_at_that_moment(log: tidelog.LogDirectory) -> None:
    """Reading begins with what comes next, and goes on until the topic is closed."""
    topic = log.topic(NAME, reliable=False)
    topic.append(b"before")
    readers = [topic.read(), topic.read()]
    got: list[list[bytes]] = [[], []]
    threads = [in_thread(lambda n=n: got[n].extend(values_of(readers[n]))) for n in range(2)]  # type: ignore[misc]
    assert topic.append(b"one", key=b"k", headers={"h": b"v"}) == 1
    assert topic.append_many([b"two", tidelog.Message(b"three")]) == [2, 3]
    log.close()
    for thread in threads:
        joined(thread)
    assert got == [[b"one", b"two", b"three"]] * 2


def test_a_message_is_read_as_it_was_appended(log: tidelog.LogDirectory) -> None:
    """Key, headers and time are those of any message; what is still in memory can be read from an offset or a time."""
    topic = log.topic(NAME, reliable=False)
    time = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(3):
        topic.append(b"%d" % number, key=b"k", headers={"h": b"v"}, timestamp=time + timedelta(seconds=number))
    (message,) = topic.read(1, 2)
    assert (message.value, message.key, message.headers, message.offset) == (b"1", b"k", {"h": b"v"}, 1)
    assert message.timestamp == time + timedelta(seconds=1)
    assert values_of(topic.read(time + timedelta(seconds=1), follow=False)) == [b"1", b"2"]
    assert values_of(topic.read(time + timedelta(seconds=9), follow=False)) == []
    assert values_of(topic.read(follow=False)) == []
    with pytest.raises(tidelog.OffsetOutOfRangeError):
        topic.read(4)


def test_tasks_append_and_read(log: tidelog.LogDirectory) -> None:
    """The same in one event loop, which is never blocked."""
    topic = log.topic(NAME, reliable=False)

    async def run() -> list[bytes]:
        stream = topic.read_async(stop=3)

        async def gather() -> list[bytes]:
            return [message.value or b"" async for message in stream]

        reading = asyncio.create_task(gather())
        await asyncio.sleep(0)
        await topic.append_async(b"a")
        await topic.append_many_async([b"b", b"c"])
        await topic.flush_async()
        return await asyncio.wait_for(reading, TIMEOUT_SECONDS)

    assert asyncio.run(run()) == [b"a", b"b", b"c"]


def test_a_slow_reader_goes_on_with_the_oldest_and_is_counted(
    log: tidelog.LogDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no error and holds nobody up; statistics say how many were missed, the log says it once."""
    topic = log.topic(NAME, reliable=False)
    slow = topic.read()
    topic.append(b"first")
    assert next(slow).value == b"first"
    with caplog.at_level(logging.WARNING, "tidelog.topics"):
        for round_number in range(2):
            for number in range(100):
                topic.append(b"%d %d" % (round_number, number))
            oldest = topic.start_offset
            assert oldest in [next(slow).offset for _ in range(3)]  # the rest of a batch may be in its hands
    live = topic.statistics().live
    assert live is not None
    assert live.missed_messages > 100
    assert live.kept_messages <= 32
    assert topic.statistics().log is None
    assert len([record for record in caplog.records if "missed" in record.message]) == 1


def test_an_append_waits_for_nobody(log: tidelog.LogDirectory) -> None:
    """A reader that is stuck in its work holds up neither the appender nor another reader."""
    topic = log.topic(NAME, reliable=False)
    stuck, go_on = Event(), Event()
    other, seen = topic.read(), list[int]()

    def work() -> None:
        for message in topic.read("earliest"):
            seen.append(message.offset)
            stuck.set()
            go_on.wait(TIMEOUT_SECONDS)

    topic.append(b"x")
    thread = in_thread(work)
    assert stuck.wait(TIMEOUT_SECONDS)
    for number in range(1000):
        topic.append(b"x")
        assert next(other).offset == number
    go_on.set()
    log.close()
    joined(thread)
    assert seen[0] == 0
    assert seen[-1] == 1000


def test_a_reader_with_a_stop_that_was_dropped_ends(log: tidelog.LogDirectory) -> None:
    """Also one that follows: what it waits for will never come."""
    topic = log.topic(NAME, reliable=False)
    reader = topic.read(0, 5)
    for _ in range(100):
        topic.append(b"x")
    assert list(reader) == []
    live = topic.statistics().live
    assert live is not None
    assert live.missed_messages == 5


@given(
    st.integers(1, 40),
    st.integers(30, 3000),
    st.lists(st.lists(st.integers(0, 400), max_size=8), max_size=30),
)
@settings(max_examples=examples(60), deadline=None)
def test_memory_is_bounded_and_holds_the_newest(messages: int, size_bytes: int, appends: list[list[int]]) -> None:
    """Whatever is appended, what is kept is the end of it, within both bounds or one message alone."""
    log = live_log(messages, size_bytes)
    everything: list[bytes] = []
    for sizes in appends:
        payloads = [encode_message(b"%d" % number + b"x" * size, None, None, 0) for number, size in enumerate(sizes)]
        if len(payloads) == 1:
            assert log.try_append(payloads[0]) == len(everything)
        else:
            assert log.append_many(payloads) == range(len(everything), len(everything) + len(payloads))
        everything += payloads
        batches = list(log.read("earliest"))
        found = [payload for batch in batches for payload in batch.payloads()]
        assert found == everything[log.start_offset :]
        assert len(found) <= messages
        assert sum(map(len, found)) <= size_bytes or len(found) == 1
        assert log.statistics().kept_bytes == sum(map(len, found))
        assert bool(found) == bool(everything)
    log.close()


def test_a_message_that_is_too_large_is_refused() -> None:
    """By either way of appending, and nothing of it is kept."""
    log = live_log(100, max_message_bytes=50)
    for append in (lambda: log.try_append(b"x" * 51), lambda: log.append_many([b"x", b"x" * 51])):
        with pytest.raises(tidelog.MessageTooLargeError):
            append()
    assert log.next_offset == 0
    log.close()


def test_threads_see_one_order() -> None:
    """However many append, every reader that keeps up gets the same messages in the same order."""
    big = live_log(1 << 16)
    readers = [big.read("earliest", 4000, follow=True) for _ in range(2)]
    got: list[list[bytes]] = [[], []]

    def read(number: int) -> None:
        for batch in readers[number]:
            got[number] += batch.payloads()

    def append(number: int) -> None:
        for count in range(1000):
            big.try_append(b"%d %d" % (number, count))

    threads = [in_thread(lambda n=n: read(n)) for n in range(2)]  # type: ignore[misc]
    threads += [in_thread(lambda n=n: append(n)) for n in range(4)]  # type: ignore[misc]
    for thread in threads:
        joined(thread)
    assert got[0] == got[1]
    assert [entry for entry in got[0] if entry.startswith(b"2 ")] == [b"2 %d" % count for count in range(1000)]
    big.close()


# Subscriptions


@pytest.mark.parametrize("kind", ["exclusive", "failover", "shared", "key_shared"])
def test_subscriptions_of_every_kind_work(log: tidelog.LogDirectory, kind: Any) -> None:
    """They begin with what comes next; what is not acknowledged comes again."""
    topic = log.topic(NAME, reliable=False)
    topic.append(b"before")
    with topic.subscribe("billing", kind, redelivery_backoff_seconds=0) as consumer:
        topic.append_many([b"one", b"two"])
        first, second = consumer.receive(timeout=TIMEOUT_SECONDS), consumer.receive(timeout=TIMEOUT_SECONDS)
        assert first is not None
        assert second is not None
        assert [first.value, second.value] == [b"one", b"two"]
        consumer.nack(second)
        consumer.ack(first)
        again = consumer.receive(timeout=TIMEOUT_SECONDS)
        assert again is not None
        assert again.value == b"two"
        consumer.ack(again)


def test_a_subscription_goes_on_where_it_was_while_the_topic_is_open(tmp_path: Path) -> None:
    """Its position is in memory: a later consumer goes on there, a later process begins anew."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME, reliable=False)
        with topic.subscribe("billing", start="earliest") as consumer:
            topic.append_many([b"one", b"two"])
            message = consumer.receive(timeout=TIMEOUT_SECONDS)
            assert message is not None
            consumer.ack(message)
        assert topic.subscriptions() == ["billing"]
        with topic.subscribe("billing") as consumer:
            message = consumer.receive(timeout=TIMEOUT_SECONDS)
            assert message is not None
            assert message.value == b"two"
        topic.delete_subscription("billing")
        assert topic.subscriptions() == []
        topic.subscribe("again").close()
    with tidelog.open(tmp_path) as log:
        assert log.topic(NAME).subscriptions() == []


def test_a_slow_subscription_goes_on_with_the_oldest(log: tidelog.LogDirectory) -> None:
    """What it missed is counted as lost, and what it acknowledges afterwards counts."""
    topic = log.topic(NAME, reliable=False)
    with topic.subscribe("billing") as consumer:
        for number in range(200):
            topic.append(b"%d" % number)
        got = []
        while (message := consumer.receive(timeout=0)) is not None:
            got.append(message.offset)
            consumer.ack(message)
        assert got == list(range(topic.start_offset, 200))
        (statistics,) = topic.statistics().subscriptions
        assert statistics.lost == topic.start_offset
        assert consumer.lag.messages == 0


def test_what_a_live_topic_cannot_do_says_so(log: tidelog.LogDirectory) -> None:
    """Nothing that needs messages that last is done by halves."""
    topic = log.topic(NAME, reliable=False)
    impossible: list[Callable[[], object]] = [
        lambda: topic.append(b"x", sync=True),
        lambda: topic.append_many([b"x"], sync=True),
        lambda: asyncio.run(topic.append_async(b"x", sync=True)),
        lambda: topic.producer("till"),
        lambda: topic._append_lost(1),
        lambda: asyncio.run(topic.ship_async()),
        lambda: topic.subscribe("billing", hold_retention=True),
        lambda: topic.subscribe("billing", max_deliveries=3),
        lambda: log.topic("shop/more", reliable=False, first_offset=3),
    ]
    for name in ("ship", "seal", "ingest", "plan_orphans", "latest_by_key"):
        impossible.append(partial(getattr, topic, name))
    for attempt in impossible:
        with pytest.raises(tidelog.NotSupportedError, match="reliable=False"):
            attempt()
    assert topic.next_offset == 0
    assert topic.durable_offset == 0
    assert topic.subscriptions() == []
    topic.flush()
    topic.prune()


def test_a_live_topic_has_no_methods_that_only_refuse(log: tidelog.LogDirectory) -> None:
    """It shares a base with `Topic`, and does not promise what it cannot do."""
    topic = log.topic(NAME, reliable=False)
    assert not hasattr(topic, "ship")
    assert not hasattr(topic, "producer_async")
    assert not issubclass(LiveTopic, tidelog.Topic)
    with pytest.raises(AttributeError, match="no attribute 'shipp'"):
        topic.shipp  # type: ignore[attr-defined]  # noqa: B018


def test_dead_letters_of_other_topics_do_not_go_to_a_live_one(log: tidelog.LogDirectory) -> None:
    """It would not keep them."""
    log.topic(NAME, reliable=False)
    with pytest.raises(tidelog.InputError, match="reliable"):
        log.topic("shop/orders").subscribe("billing", max_deliveries=2, dead_letter_topic=NAME)


# In the directory


def test_nothing_but_what_it_is_is_on_the_disk(storage: Storage, tmp_path: Path) -> None:
    """The directory remembers the topic and what it is; messages are gone, and offsets begin at 0 again."""
    place = tmp_path / "data"
    with storage.open(place) as log:
        topic = log.topic(NAME, reliable=False)
        assert isinstance(topic, LiveTopic)
        topic.append(b"x")
        with topic.subscribe("billing"):
            topic.append(b"y")
        assert log.topic(NAME) is log.topic(NAME, reliable=False) is topic
    assert os.listdir(place / NAME) == ["topic.json"]
    assert b'"reliable": false' in (place / NAME / "topic.json").read_bytes()
    with storage.open(place) as log:
        assert log.topics() == [NAME]
        topic = log.topic(NAME)
        assert isinstance(topic, LiveTopic)
        assert topic.next_offset == 0
        log.delete_topic(NAME)
        assert log.topics() == []
        assert not isinstance(log.topic(NAME), LiveTopic)


def test_what_a_topic_is_does_not_change(storage: Storage, tmp_path: Path) -> None:
    """Neither way, whether it is open or not, here or only in the store."""
    with storage.open(tmp_path / "data") as log:
        log.topic(NAME, reliable=False)
        log.topic("shop/orders").append(b"x")
        for name, reliable in ((NAME, True), ("shop/orders", False)):
            with pytest.raises(tidelog.InputError, match="reliable"):
                log.topic(name, reliable=reliable)
        if storage.has_store:
            log.topic("shop/orders").seal()
    with storage.open(tmp_path / "data") as log:
        for name, reliable in ((NAME, True), ("shop/orders", False)):
            with pytest.raises(tidelog.InputError, match="reliable"):
                log.topic(name, reliable=reliable)
        assert not log.topic("shop/new", reliable=True).statistics().live
    if storage.has_store:
        with storage.open(tmp_path / "other") as log, pytest.raises(tidelog.InputError, match="reliable"):
            log.topic("shop/orders", reliable=False)


def test_settings_of_what_is_kept_are_refused(log: tidelog.LogDirectory) -> None:
    """A live topic has none of its own."""
    with pytest.raises(tidelog.ConfigError, match="retention_seconds"):
        log.topic(NAME, reliable=False, retention_seconds=60)
    log.topic(NAME, reliable=False)
    with pytest.raises(tidelog.ConfigError, match="compaction"):
        log.configure_topic(NAME, compaction="by_key")
    assert log.configure_topic(NAME) == {}


def test_who_looks_from_outside_is_told_where_the_messages_are(log: tidelog.LogDirectory) -> None:
    """The topic is listed as empty; reading it is an error that says why, not silence."""
    log.topic(NAME, reliable=False).append(b"x")
    with tidelog.open(log.root, read_only=True) as onlooker:
        assert onlooker.topics() == [NAME]
        topic = onlooker.topic(NAME)
        assert topic.next_offset == topic.start_offset == 0
        with pytest.raises(tidelog.NotSupportedError, match="memory of the process"):
            topic.read()
        with pytest.raises(tidelog.NotSupportedError, match="memory of the process"):
            topic.append(b"x")
        with pytest.raises(tidelog.NotSupportedError, match="memory of the process"):
            topic.subscribe("billing")


def test_a_closed_topic_refuses_and_a_deleted_one_is_empty() -> None:
    """Readers that follow end; nobody waits for ever."""
    with LogDirectory(Path("/data"), files=FaultyFiles(), clock=ManualClock()) as log:
        topic = log.topic(NAME, reliable=False)
        topic.append(b"x")
        reader, consumer = topic.read("earliest"), topic.subscribe("billing")
        log.delete_topic(NAME)
        assert list(reader) == []
        with pytest.raises(tidelog.NotFoundError, match="was deleted"):
            consumer.receive(timeout=TIMEOUT_SECONDS)
        with pytest.raises(tidelog.ClosedError):
            topic.append(b"y")
        with pytest.raises(tidelog.ClosedError):
            topic.read()
        assert log.topic(NAME, reliable=False).append(b"z") == 0


def test_a_forked_child_does_not_append_to_nobody(log: tidelog.LogDirectory) -> None:
    """The readers are in the parent; the child is told instead of being heard by no one."""
    topic = log.topic(NAME, reliable=False)
    child = os.fork()
    if child == 0:
        try:
            topic.append(b"x")
        except tidelog.ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert topic.append(b"y") == 0
