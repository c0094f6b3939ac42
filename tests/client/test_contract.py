"""What a program may rely on, whether its log is in this process or behind a server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.service.http.serving import serving

import tidelog
from tidelog import Message

WAIT_SECONDS = 60


@pytest.fixture(params=["embedded", "remote"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A log of a new directory. Any: one suite, two implementations."""
    if request.param == "embedded":
        with tidelog.open(tmp_path / "data") as opened:
            yield opened
        return
    with (
        serving(tmp_path / "data") as served,
        tidelog.connect(f"http://127.0.0.1:{served.address.port}") as connected,
    ):
        yield connected


class TestAppending:
    def test_append_returns_consecutive_offsets(self, log: Any) -> None:
        """Offsets count up from 0, over single appends and several at once."""
        topic = log.topic("shop/orders")
        assert [topic.append(b"a"), topic.append(b"b", sync=True)] == [0, 1]
        assert topic.append_many([b"c", Message(b"d", key=b"k")]) == [2, 3]
        assert topic.append_many([]) == []
        assert (topic.start_offset, topic.next_offset, topic.shipped_offset) == (0, 4, 0)

    def test_synced_append_is_durable(self, log: Any) -> None:
        """With sync everything up to the message is on the disk when append returns."""
        topic = log.topic("shop/orders")
        topic.append(b"a")
        offset = topic.append(b"b", sync=True)
        assert topic.durable_offset > offset

    def test_message_comes_back_as_it_was(self, log: Any) -> None:
        """Value, key, headers and times survive, nulls and repeated header names included."""
        moment = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
        headers = tidelog.Headers([("a", b"1"), ("a", None), ("", b"\xff")])
        sent = [
            Message(b"\x00\xff", key=b"", headers={"h": b"v"}, timestamp=moment),
            Message(None, key=b"gone", timestamp=moment),
            Message(b"", headers=headers, timestamp=moment, deliver_at=moment),
        ]
        topic = log.topic("shop/orders")
        topic.append_many(sent)
        read = list(topic.read())
        assert [(m.value, m.key, m.header_list, m.timestamp, m.deliver_at) for m in read] == [
            (m.value, m.key, m.header_list, m.timestamp, m.deliver_at) for m in sent
        ]
        assert [m.offset for m in read] == [0, 1, 2]

    @pytest.mark.parametrize("value", ["text", 7, ["list"]])
    def test_append_refuses_what_is_not_bytes(self, log: Any, value: Any) -> None:
        """A wrong type raises the same error, with the same words, before anything is stored."""
        topic = log.topic("shop/orders")
        with pytest.raises(tidelog.InputError, match="value must be bytes"):
            topic.append(value)
        assert topic.next_offset == 0

    def test_append_refuses_an_unknown_sync(self, log: Any) -> None:
        """What sync may be is checked."""
        with pytest.raises(tidelog.InputError, match="sync must be True, False"):
            log.topic("shop/orders").append(b"a", sync="maybe")

    def test_shipped_sync_without_a_store_is_refused(self, log: Any) -> None:
        """A log without a store cannot ship, and says so."""
        with pytest.raises(tidelog.NotSupportedError, match="needs an object store"):
            log.topic("shop/orders").append(b"a", sync="shipped")

    def test_too_large_message_is_refused_alone(self, log: Any) -> None:
        """A message over the limit raises MessageTooLargeError, and those before and after it are stored."""
        topic = log.topic("shop/orders")
        topic.append(b"before")
        with pytest.raises(tidelog.MessageTooLargeError):
            topic.append(b"x" * (17 << 20))
        topic.append(b"after")
        assert [m.value for m in topic.read()] == [b"before", b"after"]

    def test_threads_append_each_message_once(self, log: Any) -> None:
        """Appends of many threads all get an offset of their own."""
        topic = log.topic("shop/orders")
        offsets: list[int] = []

        def work(number: int) -> None:
            for count in range(5):
                offsets.append(topic.append(b"%d-%d" % (number, count)))

        threads = [Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert sorted(offsets) == list(range(40))
        values = [m.value for m in topic.read()]
        assert len(set(values)) == 40
        for number in range(8):
            own = [value for value in values if value is not None and value.startswith(b"%d-" % number)]
            assert own == [b"%d-%d" % (number, count) for count in range(5)]


class TestReading:
    def test_read_takes_positions(self, log: Any) -> None:
        """A start and a stop are offsets, names or times."""
        topic = log.topic("shop/orders")
        times = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3, 4)]
        topic.append_many([Message(b"m", timestamp=time) for time in times])

        def offsets(*position: Any) -> list[int]:
            return [m.offset for m in topic.read(*position)]

        assert offsets() == offsets("earliest") == [0, 1, 2, 3]
        assert offsets("latest") == offsets(4) == []
        assert offsets(1, 3) == offsets(times[1], times[3]) == [1, 2]
        assert offsets(2, "latest") == [2, 3]

    def test_read_ends_where_the_topic_ended(self, log: Any) -> None:
        """Without follow a reader ends at the offset that was next when it began."""
        topic = log.topic("shop/orders")
        topic.append_many([b"a", b"b"])
        messages = topic.read()
        topic.append(b"later")
        assert [m.value for m in messages] == [b"a", b"b"]

    def test_read_beyond_the_end_is_refused(self, log: Any) -> None:
        """An offset that was never written raises OffsetOutOfRangeError at once."""
        with pytest.raises(tidelog.OffsetOutOfRangeError):
            log.topic("shop/orders").read(7)

    def test_follower_gets_what_is_appended_later(self, log: Any) -> None:
        """With follow a reader waits for more."""
        topic = log.topic("shop/orders")
        topic.append(b"a")
        messages = topic.read(follow=True)
        assert next(messages).value == b"a"
        topic.append(b"b")
        assert next(messages).value == b"b"
        messages.close()

    def test_many_pages_are_one_sequence(self, log: Any) -> None:
        """What takes many requests arrives in order, each message once."""
        topic = log.topic("shop/orders")
        for start in range(0, 25_000, 5000):
            topic.append_many([b"%d" % number for number in range(start, start + 5000)])
        assert [int(m.value or b"") for m in topic.read()] == list(range(25_000))


class TestProducers:
    def test_sequence_is_stored_once(self, log: Any) -> None:
        """The same sequence twice has the offset of the first time."""
        topic = log.topic("shop/orders")
        with topic.producer("app-1") as producer:
            assert producer.append(b"a", sequence=7) == producer.append(b"a", sequence=7) == 0
            assert producer.append(b"b") == 1
            assert producer.last_sequence == 8
            assert producer.append_many([b"b", b"c"], sequence=8) == [1, 2]
        with topic.producer("app-1") as again:
            assert again.last_sequence == 9
            assert again.append(b"d") == 3
        assert [m.value for m in topic.read()] == [b"a", b"b", b"c", b"d"]

    def test_second_producer_of_a_name_fences_the_first(self, log: Any) -> None:
        """Two processes with one name: what the older one still sends is refused, and none of the newer one is lost."""
        topic = log.topic("shop/orders")
        older = topic.producer("app-1")
        older.append_many([b"a", b"b"])
        newer = topic.producer("app-1")
        assert newer.last_sequence == 1
        for sequence in (None, 2, 0):
            with pytest.raises(tidelog.FencedError, match="replaces this one"):
                older.append(b"late", sequence=sequence)
        assert newer.append(b"c") == 2
        with pytest.raises(tidelog.FencedError):
            older.append(b"late")
        assert newer.append(b"d") == 3
        assert [m.value for m in topic.read()] == [b"a", b"b", b"c", b"d"]

    def test_closed_producer_refuses(self, log: Any) -> None:
        """After close it appends nothing."""
        producer = log.topic("shop/orders").producer("app-1")
        producer.close()
        with pytest.raises(tidelog.ClosedError):
            producer.append(b"a")


class TestSubscriptions:
    def test_acknowledged_messages_do_not_return(self, log: Any) -> None:
        """After a clean close a consumer goes on with what was not acknowledged."""
        topic = log.topic("shop/orders")
        topic.append_many([b"a", b"b", b"c"])
        with topic.subscribe("billing") as sub:
            first = sub.receive(timeout=WAIT_SECONDS)
            assert (first.value, first.offset, first.delivery_count) == (b"a", 0, 1)
            sub.ack(first)
            assert sub.receive(timeout=WAIT_SECONDS).value == b"b"
        with topic.subscribe("billing") as sub:
            assert [m.value for m in (sub.receive(WAIT_SECONDS), sub.receive(WAIT_SECONDS))] == [b"b", b"c"]
            assert sub.lag.messages == 2

    def test_receive_returns_none_after_its_timeout(self, log: Any) -> None:
        """Without a message it gives up in time."""
        with log.topic("shop/orders").subscribe("billing") as sub:
            assert sub.receive(timeout=0.01) is None
            assert sub.receive_many(10, timeout="10ms") == []

    def test_rejected_message_comes_again_with_a_count(self, log: Any) -> None:
        """nack has it delivered again, and counts."""
        topic = log.topic("shop/orders")
        topic.append(b"a")
        with topic.subscribe("billing", redelivery_backoff_seconds=0.0) as sub:
            sub.nack(sub.receive(WAIT_SECONDS), reason="not today")
            again = sub.receive(WAIT_SECONDS)
            assert (again.value, again.delivery_count) == (b"a", 2)
            sub.ack(again)

    def test_rejecting_an_acknowledged_message_is_refused(self, log: Any) -> None:
        """What is acknowledged cannot be rejected any more."""
        topic = log.topic("shop/orders")
        topic.append(b"a")
        with topic.subscribe("billing") as sub:
            message = sub.receive(WAIT_SECONDS)
            sub.ack(message)
            with pytest.raises(tidelog.InputError):
                sub.nack(message)

    def test_exhausted_message_becomes_a_dead_letter(self, log: Any) -> None:
        """After max_deliveries it is in the topic of dead letters, with the reason of the consumer."""
        topic = log.topic("shop/orders")
        topic.append(b"poison")
        options = {"max_deliveries": 1, "on_exhausted": "dead_letter", "dead_letter_topic": "shop/dead"}
        with topic.subscribe("billing", **options) as sub:
            sub.nack(sub.receive(WAIT_SECONDS), reason="cannot parse")
            letter = next(iter(log.topic("shop/dead").read(follow=True)))
        assert letter.value == b"poison"
        assert b"cannot parse" in letter.headers.values()

    def test_second_exclusive_consumer_is_refused(self, log: Any) -> None:
        """One consumer has an exclusive subscription for itself."""
        topic = log.topic("shop/orders")
        with topic.subscribe("billing"), pytest.raises(tidelog.ConflictError):
            topic.subscribe("billing")

    def test_shared_consumers_get_each_message_once(self, log: Any) -> None:
        """Consumers of a shared subscription divide the messages among them."""
        topic = log.topic("shop/orders")
        topic.append_many([b"%d" % number for number in range(50)])
        with topic.subscribe("work", "shared") as one, topic.subscribe("work", "shared") as two:
            found: list[bytes] = []
            while len(found) < 50:
                for sub in (one, two):
                    messages = sub.receive_many(7, timeout=0.05)
                    found += [m.value for m in messages]
                    sub.ack_many(messages)
        assert sorted(found, key=int) == [b"%d" % number for number in range(50)]

    def test_filter_leaves_out_other_messages(self, log: Any) -> None:
        """A filter is a mapping of headers or a function."""
        topic = log.topic("shop/orders")
        topic.append_many([Message(b"%d" % n, headers={"even": b"%d" % (n % 2 == 0)}) for n in range(6)])
        with topic.subscribe("by-header", filter={"even": b"1"}) as sub:
            assert [m.value for m in (sub.receive(WAIT_SECONDS) for _ in range(3))] == [b"0", b"2", b"4"]
        with topic.subscribe("by-function", filter=lambda m: m.value in (b"1", b"4")) as sub:
            assert [m.value for m in (sub.receive(WAIT_SECONDS) for _ in range(2))] == [b"1", b"4"]

    def test_seek_moves_the_subscription(self, log: Any) -> None:
        """After seek delivery resumes there."""
        topic = log.topic("shop/orders")
        topic.append_many([b"a", b"b", b"c"])
        with topic.subscribe("billing") as sub:
            sub.ack(sub.receive(WAIT_SECONDS))
            sub.seek(2)
            assert sub.receive(WAIT_SECONDS).value == b"c"
            sub.seek("earliest")
            assert sub.receive(WAIT_SECONDS).value == b"a"

    def test_cumulative_ack_and_flush_move_the_position(self, log: Any) -> None:
        """Everything up to a message is acknowledged at once, and stored by flush."""
        topic = log.topic("shop/orders")
        topic.append_many([b"a", b"b", b"c"])
        with topic.subscribe("billing") as sub:
            sub.receive(WAIT_SECONDS)
            sub.ack_cumulative(sub.receive(WAIT_SECONDS))
            sub.flush()
            assert sub.lag.messages == 1

    def test_unsubscribe_forgets_the_subscription(self, log: Any) -> None:
        """Afterwards there is none of its name."""
        topic = log.topic("shop/orders")
        sub = topic.subscribe("billing")
        assert topic.subscriptions() == ["billing"]
        sub.unsubscribe()
        assert topic.subscriptions() == []

    def test_closed_consumer_refuses(self, log: Any) -> None:
        """After close nothing is received, and an iteration ends."""
        sub = log.topic("shop/orders").subscribe("billing")
        sub.close()
        with pytest.raises(tidelog.ClosedError):
            sub.receive(1)
        assert list(sub) == []


class TestTopics:
    def test_topics_are_listed_and_deleted(self, log: Any) -> None:
        """A deleted topic is gone, and its name can be used again."""
        topic = log.topic("shop/orders")
        assert log.topic("shop/orders") is topic
        topic.append(b"a")
        assert log.topics() == ["shop/orders"]
        assert log.has_topic("shop/orders")
        log.delete_topic("shop/orders")
        assert log.topics() == []
        assert not log.has_topic("shop/orders")
        assert log.topic("shop/orders").next_offset == 0

    def test_deleting_an_absent_topic_is_refused(self, log: Any) -> None:
        """NotFoundError, as everywhere."""
        with pytest.raises(tidelog.NotFoundError):
            log.delete_topic("shop/none")

    def test_bad_name_is_refused(self, log: Any) -> None:
        """The words are the same."""
        with pytest.raises(tidelog.TopicNameError, match="needs a namespace and a name"):
            log.topic("orders")

    def test_settings_are_kept(self, log: Any) -> None:
        """Settings of a topic are stored, and unknown ones refused."""
        log.topic("shop/orders", retention_seconds=3600)
        assert log.configure_topic("shop/orders", retention_seconds=7200)["retention_seconds"] == 7200
        with pytest.raises(tidelog.ConfigError):
            log.configure_topic("shop/orders", colour="red")

    def test_flush_makes_everything_durable(self, log: Any) -> None:
        """After flush all is on the disk."""
        topic = log.topic("shop/orders")
        topic.append(b"a")
        topic.flush()
        assert topic.durable_offset == topic.next_offset == 1

    def test_closed_log_refuses(self, log: Any) -> None:
        """After close every call raises ClosedError."""
        topic = log.topic("shop/orders")
        log.close()
        log.close()
        with pytest.raises(tidelog.ClosedError):
            topic.append(b"a")
        with pytest.raises(tidelog.ClosedError):
            log.topics()


class TestPartitions:
    def test_key_decides_the_partition(self, log: Any) -> None:
        """Messages of one key are in one partition, in order; an offset says which."""
        topic = log.topic("shop/orders", partitions=3)
        assert topic.partitions == 3
        offsets = [topic.append(b"%d" % n, key=b"same") for n in range(3)]
        assert len({offset.partition for offset in offsets}) == 1
        assert [int(offset) for offset in offsets] == [0, 1, 2]
        assert topic.append(b"x", partition=2).partition == 2
        assert sum(topic.next_offsets.values()) == 4

    def test_all_partitions_are_read_and_received(self, log: Any) -> None:
        """A reader and a consumer get the messages of all partitions."""
        topic = log.topic("shop/orders", partitions=3)
        topic.append_many([Message(b"%d" % n, key=b"k%d" % n) for n in range(20)])
        assert {m.value for m in topic.read()} == {b"%d" % n for n in range(20)}
        assert topic.partition(1).next_offset == topic.next_offsets[1]
        with topic.subscribe("billing", "shared") as sub:
            found = [sub.receive(WAIT_SECONDS) for _ in range(20)]
            sub.ack_many(found)
            sub.flush()
            assert sub.lag.messages == 0
        assert {m.value for m in found} == {b"%d" % n for n in range(20)}


class TestAsync:
    def test_async_names_do_the_same(self, log: Any) -> None:
        """Every name has a twin to be awaited."""

        async def work() -> None:
            topic = await log.topic_async("shop/orders")
            assert await topic.append_async(b"a", sync=True) == 0
            assert await topic.append_many_async([b"b", b"c"]) == [1, 2]
            assert [m.value async for m in topic.read_async(1)] == [b"b", b"c"]
            async with await topic.producer_async("app-1") as producer:
                assert await producer.append_async(b"d", sequence=1) == 3
                assert await producer.last_sequence_async() == 1
            async with await topic.subscribe_async("billing") as sub:
                message = await sub.receive_async(WAIT_SECONDS)
                await sub.ack_async(message)
                await sub.nack_async(await sub.receive_async(WAIT_SECONDS))
                await sub.flush_async()
            await topic.flush_async()
            assert await log.topics_async() == ["shop/orders"]
            await log.delete_topic_async("shop/orders")

        asyncio.run(work())

    def test_tasks_share_the_client(self, log: Any) -> None:
        """Appends of many tasks all get an offset of their own."""

        async def work() -> list[int]:
            topic = await log.topic_async("shop/orders")
            return list(await asyncio.gather(*(topic.append_async(b"%d" % n, sync=True) for n in range(50))))

        assert sorted(asyncio.run(work())) == list(range(50))


WRONG: dict[str, Any] = {
    "partitions of another type": lambda log: log.topic("a/new", partitions="3"),
    "no partitions": lambda log: log.topic("a/new", partitions=0),
    "fewer partitions": lambda log: log.topic("a/many", partitions=2),
    "a setting in another unit": lambda log: log.topic("a/new", retention_ms=3),
    "a setting of another type": lambda log: log.topic("a/new", retention_seconds="x"),
    "a partition of one": lambda log: log.topic("a/one").partition(9),
    "a partition of several": lambda log: log.topic("a/many", partitions=3).partition(9),
    "a partition that is no number": lambda log: log.topic("a/many", partitions=3).partition("1"),
    "a key of text": lambda log: log.topic("a/many", partitions=3).append(b"a", key="k"),
    "shipped without a store": lambda log: log.topic("a/one").append(b"a", sync="shipped"),
    "ship without a store": lambda log: log.topic("a/one").ship(),
    "a position of text": lambda log: list(log.topic("a/one").read("begin")),
    "an offset below 0": lambda log: list(log.topic("a/one").read(-1)),
    "an offset of which partition": lambda log: list(log.topic("a/many", partitions=3).read(1)),
    "a subscription with a slash": lambda log: log.topic("a/one").subscribe("a/b"),
    "a subscription without a name": lambda log: log.topic("a/one").subscribe(None),
    "an unknown kind": lambda log: log.topic("a/one").subscribe("s", "foo"),
    "an unknown option": lambda log: log.topic("a/one").subscribe("s", foo=1),
    "an option of another type": lambda log: log.topic("a/one").subscribe("s", max_unacked="x"),
    "an option in vain": lambda log: log.topic("a/one").subscribe("s", on_exhausted="drop"),
    "a filter that is none": lambda log: log.topic("a/one").subscribe("s", filter=3),
    "a filter of text": lambda log: log.topic("a/one").subscribe("s", filter={"a": "b"}),
    "a consumer that is no text": lambda log: log.topic("a/one").subscribe("s", consumer=3),
    "a start that is none": lambda log: log.topic("a/one").subscribe("s", start="foo"),
    "a start in which partition": lambda log: log.topic("a/many", partitions=3).subscribe("s", start=4),
    "an ack of nothing": lambda log: log.topic("a/one").subscribe("s", "shared").ack(None),
    "an ack in which partition": lambda log: log.topic("a/many", partitions=3).subscribe("s", "shared").ack(3),
    "a nack that was not received": lambda log: log.topic("a/one").subscribe("s", "shared").nack(50),
    "a seek to nowhere": lambda log: log.topic("a/one").subscribe("s", "shared").seek("x"),
    "a seek in which partition": lambda log: log.topic("a/many", partitions=3).subscribe("s", "shared").seek(3),
    "a producer without a name": lambda log: log.topic("a/many", partitions=3).producer(None),
    "deleting before what": lambda log: log.topic("a/many", partitions=3).delete_before("x"),
    "deleting after the end": lambda log: log.topic("a/one").delete_before(1000),
}


@pytest.fixture(scope="module")
def two_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """One in this process, and one behind a server, with the same topics."""
    path = tmp_path_factory.mktemp("logs")
    with serving(path / "served") as served:
        client = tidelog.connect(f"http://127.0.0.1:{served.address.port}")
        with tidelog.open(path / "data") as embedded, client as remote:
            for log in (embedded, remote):
                log.topic("a/one").append(b"x")
                log.topic("a/many", partitions=3)
            yield [embedded, remote]


@pytest.mark.parametrize("given", WRONG)
def test_wrong_argument_gets_the_same_error(two_logs: list[Any], given: str) -> None:
    """Loss prevented: a program that moved behind a server met other classes and texts for the same mistake."""
    here, there = [_refused(log, WRONG[given]) for log in two_logs]
    assert type(here) is type(there)
    assert str(here) == str(there)


def _refused(log: Any, call: Any) -> tidelog.TidelogError:
    with pytest.raises(tidelog.TidelogError) as raised:
        call(log)
    return raised.value


def test_messages_are_deleted_before_an_offset(log: Any) -> None:
    """The topic begins there from then on, in each partition by itself."""
    topic = log.topic("shop/orders")
    topic.append_many([b"0", b"1", b"2"], sync=True)
    assert topic.delete_before(2) == 2
    assert [message.offset for message in topic.read()] == [2]
    several = log.topic("shop/several", partitions=2)
    several.append(b"a", partition=1)
    several.append(b"b", partition=0)
    assert several.delete_before({1: 1}) == {1: 1}
    assert [message.value for message in several.read()] == [b"b"]


def test_producer_of_tasks_stores_each_sequence_once(log: Any) -> None:
    """The twins for tasks number messages and remember them as those for threads do."""
    topic = log.topic("shop/orders")

    async def play() -> None:
        with topic.producer("till") as producer:
            assert await producer.append_many_async([b"a", Message(b"b", key=b"k")], sequence=1) == [0, 1]
            assert await producer.append_async(b"c", sync=True) == 2
            assert await producer.append_many_async([b"a", b"b"], sequence=1) == [0, 1]

    asyncio.run(play())
    assert [message.value for message in topic.read()] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("kind", "embedded"), [(tidelog.RemoteTopic, tidelog.Topic), (tidelog.RemoteProducer, tidelog.Producer)]
)
def test_append_looks_as_it_does_in_an_embedded_log(kind: Any, embedded: Any) -> None:
    """For `help` and editors: parameters, defaults, what it returns, and the docstring of the twin."""
    for name in ("append", "append_many"):
        assert str(inspect.signature(getattr(kind, name))) == str(inspect.signature(getattr(embedded, name)))
        twin = getattr(kind, f"{name}_async")
        assert inspect.signature(twin) == inspect.signature(getattr(kind, name))
        assert inspect.iscoroutinefunction(twin)
        assert inspect.getdoc(twin) == f"Like `{name}`, without blocking the event loop."
