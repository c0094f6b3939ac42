"""Messages that a compaction removed: their offsets stay, and nobody is shown them, told a gap or held up by them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import envelopes
from tests.topics.removing import NAME, Shop

import tidelog
from tidelog.cold.verify import ColdCopy
from tidelog.errors import OffsetOutOfRangeError
from tidelog.log.frame import REMOVED_PAYLOAD, encode_many, is_removed, kept_runs
from tidelog.log.repair import LOST_PAYLOAD, is_lost, plan_repair
from tidelog.topics.message import TIMESTAMP_FIELD, raw_extensions
from tidelog.topics.topic import Topic


def ten(topic: Topic) -> None:
    """Ten prices of three articles, as one batch."""
    topic.append_many([tidelog.Message(b"%d" % number, key=b"k%d" % (number % 3)) for number in range(10)])


def ten_by_producer(topic: Topic) -> None:
    with topic.producer("till") as producer:
        for number in range(10):
            producer.append(b"%d" % number, key=b"k%d" % (number % 3), sequence=number + 1)


SUPERSEDED = [0, 1, 2, 3, 4, 5, 6]
KEPT = [7, 8, 9, 10]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """Two objects of ten messages, of which a compaction removed those with a newer one of their key, and a third."""
    shop = Shop(tmp_path)
    shop.ship(ten)
    shop.remove(SUPERSEDED)
    return shop


def offsets(messages: Sequence[tidelog.Message]) -> list[int | None]:
    return [message.offset for message in messages]


def test_reading_passes_over_them(shop: Shop) -> None:
    """From the beginning, from a removed offset, up to one, and by tasks."""
    with shop.open() as log:
        topic = log.topic(NAME)
        assert offsets(list(topic.read(0))) == KEPT
        assert offsets(list(topic.read(3))) == KEPT
        assert offsets(list(topic.read(0, 5))) == []
        assert offsets(list(topic.read(8))) == [8, 9, 10]
        assert (topic.start_offset, topic.next_offset) == (0, 11)

        async def read() -> list[int | None]:
            return [message.offset async for message in topic.read_async(0)]

        assert asyncio.run(read()) == KEPT


def test_a_time_is_found_behind_them(shop: Shop) -> None:
    """The first message that is still there at this time or later."""
    with shop.open() as log:
        topic = log.topic(NAME)
        (first, *_) = topic.read(0)
        assert first.timestamp is not None
        assert offsets(list(topic.read(first.timestamp))) == KEPT


def test_a_table_is_the_same_before_and_after(tmp_path: Path) -> None:
    """The newest message of every key is what stays."""
    shop = Shop(tmp_path)
    shop.ship(ten)
    with shop.open() as log:
        before = dict(log.topic(NAME).latest_by_key())
    shop.remove(SUPERSEDED)
    with shop.open() as log:
        topic = log.topic(NAME)
        view = topic.latest_by_key()
        assert dict(view) == before
        assert list(view) == list(before)
        assert view.next_offset == 11


def test_a_table_without_values_says_what_became_of_an_old_message(tmp_path: Path) -> None:
    """It knows an offset that was superseded and removed since: a refresh finds the new one."""
    shop = Shop(tmp_path)
    shop.ship(ten, ten)
    with shop.open() as log:
        view = log.topic(NAME).latest_by_key(values=False, stop=10)
        later = log.topic(NAME).latest_by_key(values=False)
        shop.remove(range(17))
        with pytest.raises(OffsetOutOfRangeError, match="removed by a compaction"):
            view[b"k0"]
        assert later[b"k0"].offset == 19


@pytest.mark.parametrize("kind", ["exclusive", "shared", "key_shared"])
def test_a_subscription_is_never_handed_one(shop: Shop, kind: str) -> None:
    """It gets what is kept, is at the end then, and stays there."""
    with shop.open() as log:
        topic = log.topic(NAME)
        with topic.subscribe("billing", kind=kind, start="earliest") as sub:  # type: ignore[arg-type]
            received = []
            while (message := sub.receive(0)) is not None:
                received.append(message)
                sub.ack(message)
            assert {message.offset for message in received} == set(KEPT)
            assert len(received) == len(KEPT)
            (statistics,) = topic.statistics().subscriptions
            assert (statistics.lag_messages, statistics.lost, statistics.filtered) == (0, 0, 0)
    with shop.open() as log, log.topic(NAME).subscribe("billing", kind=kind) as sub:  # type: ignore[arg-type]
        assert sub.receive(0) is None


def test_a_subscription_that_had_not_acknowledged_them_goes_on(tmp_path: Path) -> None:
    """They were open when they were removed: they are not handed out again, and hold nothing up."""
    shop = Shop(tmp_path)
    shop.ship(ten)
    with shop.open() as log, log.topic(NAME).subscribe("billing", start="earliest") as sub:
        for _ in range(5):
            message = sub.receive(0)
            assert message is not None
            if message.offset == 3:
                sub.ack(message)
    shop.remove(SUPERSEDED)
    with shop.open() as log, log.topic(NAME).subscribe("billing") as sub:
        received = []
        while (message := sub.receive(0)) is not None:
            received.append(message)
            sub.ack(message)
        assert offsets(received) == KEPT
    with shop.open() as log:
        topic = log.topic(NAME)
        with topic.subscribe("billing"):
            assert topic.statistics().subscriptions[0].lag_messages == 0


def test_producers_are_known_by_what_is_left(tmp_path: Path) -> None:
    """The newest message of each stays, so a sequence is not stored twice; where older ones were is forgotten."""
    shop = Shop(tmp_path)
    shop.ship(ten_by_producer)
    shop.remove(SUPERSEDED)
    with shop.open() as log:
        topic = log.topic(NAME)
        with topic.producer("till") as producer:
            assert producer.last_sequence == 10
            producer.append(b"again", sequence=10)
            producer.append(b"again", sequence=3)
            assert topic.next_offset == 11
            producer.append(b"new", sequence=11)
        assert [message.value for message in topic.read(10)] == [b"last", b"new"]


def test_a_repair_puts_them_back_as_they_are_in_the_store(shop: Shop) -> None:
    """The owner's files have the messages still; where one is damaged, the mark of its removal takes its place."""
    directory = shop.directory / "shop" / "prices"
    (file,) = directory.glob("wal.*.log")
    data = file.read_bytes()
    place = data.index(b"k2", data.index(b"k2") + 1)  # in the message with offset 5
    file.write_bytes(data[:place] + b"x" + data[place + 1 :])
    with shop.open_reading() as log:
        assert log._tier is not None
        history = log._tier.view("shop", "prices", None, TIMESTAMP_FIELD).history
        plan = plan_repair(directory, copy=ColdCopy(history, epoch=1))
        assert (plan.restored, plan.lost) == (((5, 5),), ())
        plan.apply()
    with shop.open_again() as log:
        assert offsets(list(log.topic(NAME).read(0))) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]


PAYLOADS = st.lists(st.sampled_from([REMOVED_PAYLOAD, LOST_PAYLOAD, b"message"]), max_size=12)


@given(PAYLOADS)
def test_stretches_are_what_is_between(payloads: list[bytes]) -> None:
    """All that was not removed, in order, and as few stretches as there can be."""
    runs = list(kept_runs(payloads))
    kept = [index for start, stop in runs for index in range(start, stop)]
    assert kept == [index for index, payload in enumerate(payloads) if not is_removed(payload)]
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs))


def test_they_have_no_extension() -> None:
    """Nothing is read out of a payload of one byte, in C as in Python, and it is not what marks a loss."""
    frames = encode_many(0, [REMOVED_PAYLOAD, LOST_PAYLOAD])
    assert raw_extensions(frames, 0, 2) is None
    assert envelopes.extensions(frames.buffer, frames.positions, frames.lengths, 0, 2) is None
    assert not is_lost(REMOVED_PAYLOAD)
