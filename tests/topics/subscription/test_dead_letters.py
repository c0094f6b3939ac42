"""Dead letters when their topic, the message or the moment is difficult: nothing is lost, nothing else held up."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.errors import InputError
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import Message
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.cursors import StoredPosition
from tidelog.topics.topic import Topic

NAME = "shop/orders"
LETTERS = "shop/orders.work.dlq"


def subscribed(topic: Topic, **options: Any) -> Consumer:
    return topic.subscribe("work", max_deliveries=1, progress_flush_interval_seconds=0.05, **options)


def give_up(sub: Consumer, count: int = 1) -> list[int]:
    """The next messages are rejected for good."""
    messages = sub.receive_many(count, timeout=120)
    for message in messages:
        sub.nack(message)
    return [message.offset for message in messages]


def letters(log: LogDirectory) -> list[int]:
    """The origins of what is there."""
    return [int(letter.headers["tidelog-origin-offset"]) for letter in log.topic(LETTERS).read()]


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stored_up_to(position: StoredPosition, offset: int) -> bool:
    return position.offset == offset


def filled(log: LogDirectory, count: int = 10) -> Topic:
    topic = log.topic(NAME)
    topic.append_many([b"%d" % number for number in range(count)], sync=True)  # no position is stored beyond that
    return topic


def crashed(log: LogDirectory, source: Path, copy: Path) -> LogDirectory:
    """The directory as a process that was killed now would leave it, opened again."""
    log.topic(NAME).flush()
    shutil.copytree(source, copy)
    return tidelog.open(copy)


def test_what_was_given_up_just_before_the_end_is_there(tmp_path: Path) -> None:
    """Closing writes it, also when the topic of the letters was opened first and would be closed first."""
    log = tidelog.open(tmp_path)
    log.topic(LETTERS)
    give_up(filled(log).subscribe("work", max_deliveries=1))
    log.close()
    with tidelog.open(tmp_path) as log:
        assert letters(log) == [0]
        assert log.topic(NAME).subscription_info("work").offset == 1


def test_letters_are_in_the_store_before_their_messages_are_settled(tmp_path: Path) -> None:
    """Positions are stored where they outlive this disk: with it gone, what was given up is still somewhere."""
    store = (tmp_path / "bucket").as_uri()
    with tidelog.open(tmp_path / "log", store=store, metadata="bucket", ship_interval_seconds=1000.0) as log:
        topic = filled(log)
        topic.ship()
        sub = subscribed(topic)
        give_up(sub)
        eventually(lambda: sub._subscription.position.offset == 1)
        assert log.topic(LETTERS).shipped_offset == 1


def test_a_deleted_topic_of_letters_is_made_again(tmp_path: Path) -> None:
    """Somebody cleared it away; what is given up later still has a place."""
    with tidelog.open(tmp_path) as log:
        sub = subscribed(filled(log))
        give_up(sub)
        eventually(lambda: log.has_topic(LETTERS) and letters(log) == [0])
        log.delete_topic(LETTERS)
        give_up(sub)
        eventually(lambda: letters(log) == [1])
        eventually(lambda: sub._subscription.position.offset == 2)


def test_one_that_does_not_fit_holds_up_no_other(tmp_path: Path) -> None:
    """With its origin a letter is larger than the message: such a one is kept, the others are moved."""
    with tidelog.open(tmp_path, max_message_bytes=1000) as log:
        topic = log.topic(NAME)
        topic.append_many([b"x" * 950, b"small"], sync=True)
        sub = subscribed(topic)
        give_up(sub, 2)
        eventually(lambda: letters(log) == [1])
        with pytest.raises(InputError, match="max_message_bytes"):
            sub._subscription.bury()
        assert list(sub._subscription.state.dead) == [0]
        sub.ack(0)
        eventually(lambda: sub._subscription.position.offset == 2)
    with tidelog.open(tmp_path) as log:
        assert letters(log) == [1]


def test_letters_that_cannot_be_written_do_not_keep_the_position_from_being_stored(tmp_path: Path) -> None:
    """What was acknowledged meanwhile does not come again after a crash."""
    with tidelog.open(tmp_path) as log:
        sub = subscribed(filled(log))
        log.topic(LETTERS)._log.close()
        give_up(sub)
        sub.ack_many(sub.receive_many(5, timeout=120))
        eventually(lambda: sub._subscription.position.cursor.acked == ((1, 6),))
        assert list(sub._subscription.state.dead) == [0]


def test_letters_are_looked_for_only_where_they_may_be_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position knows what it has as done with: a topic of many letters is not read from its beginning."""
    with tidelog.open(tmp_path / "data") as log:
        sub = subscribed(filled(log))
        give_up(sub, 5)
        eventually(lambda: sub._subscription.position.offset == 5)
        assert sub._subscription.position.cursor.dead_letter_offset == 5
        with crashed(log, tmp_path / "data", tmp_path / "copy") as again:
            sub = subscribed(again.topic(NAME))
            read_from: list[int] = []
            target = again.topic(LETTERS)
            read = target.read

            def watched(start: Any = "earliest", **options: Any) -> Iterator[Message]:
                read_from.append(start)
                return read(start, **options)

            monkeypatch.setattr(target, "read", watched)
            give_up(sub)
            eventually(lambda: target.next_offset == 6)
            assert read_from == [5]
            assert letters(again) == [0, 1, 2, 3, 4, 5]


def test_a_letter_that_was_written_before_a_crash_is_written_once(tmp_path: Path) -> None:
    """Several were, their acknowledgements were not stored, and they are given up again one by one, with crashes."""
    with tidelog.open(tmp_path / "0") as log:
        topic = filled(log)
        sub = topic.subscribe("work", max_deliveries=1, progress_flush_interval_seconds=3600)
        sub._subscription._bury_again_at = math.inf
        give_up(sub, 3)
        dead = list(sub._subscription.state.dead.values())
        assert sub._subscription._dead_letters is not None
        sub._subscription._dead_letters.write(dead, 0)
        again = crashed(log, tmp_path / "0", tmp_path / "1")
    for life in (1, 2, 3):
        with again:
            sub = subscribed(again.topic(NAME))
            assert give_up(sub) == [life - 1]
            position = sub._subscription.position
            eventually(partial(stored_up_to, position, life))
            assert letters(again) == [0, 1, 2]
            copy = crashed(again, tmp_path / str(life), tmp_path / str(life + 1))
        again = copy
    again.close()


def test_who_goes_back_gets_a_new_letter_for_what_fails_again(tmp_path: Path) -> None:
    """The first one may have been sent back since: without another the second failure would be seen nowhere."""
    with tidelog.open(tmp_path) as log:
        sub = subscribed(filled(log))
        give_up(sub)
        eventually(lambda: letters(log) == [0])
        sub.seek(0)
        assert give_up(sub) == [0]
        eventually(lambda: letters(log) == [0, 0])


def test_a_subscription_that_is_made_again_writes_its_own_letters(tmp_path: Path) -> None:
    """Those of one that had the same name are not taken for them."""
    with tidelog.open(tmp_path) as log:
        topic = filled(log)
        sub = subscribed(topic)
        give_up(sub)
        eventually(lambda: letters(log) == [0])
        sub.unsubscribe()
        give_up(subscribed(topic))
        eventually(lambda: letters(log) == [0, 0])


@pytest.mark.parametrize("target", [NAME, "", "no slash or/too many/parts", "shop/live"])
def test_a_place_that_cannot_take_letters_is_refused_at_once(tmp_path: Path, target: str) -> None:
    """The topic itself, a name that is none, and a topic that keeps nothing."""
    with tidelog.open(tmp_path) as log:
        log.topic("shop/live", reliable=False)
        topic = filled(log)
        with pytest.raises(InputError):
            subscribed(topic, dead_letter_topic=target)
        assert topic.subscriptions() == []


# Why


def reasons(log: LogDirectory) -> list[bytes | None]:
    return [letter.headers.get("tidelog-origin-nack-reason") for letter in log.topic(LETTERS).read()]


def test_a_dead_letter_says_why_it_was_rejected_last(tmp_path: Path) -> None:
    """The newest reason wins, also over a rejection without one; what was never said is not there."""
    with tidelog.open(tmp_path) as log:
        topic = filled(log, 3)
        with topic.subscribe("work", "shared", max_deliveries=3, redelivery_backoff_seconds=0) as sub:
            for reason in ("first", "second", None):
                for message in sub.receive_many(3, timeout=120):
                    sub.nack(message, reason=None if message.offset == 2 else reason)
        assert letters(log) == [0, 1, 2]
        assert reasons(log) == [b"second", b"second", None]


def test_reasons_are_bounded_and_checked(tmp_path: Path) -> None:
    """The beginning of a long one is kept; what is no text, or cannot be stored as such, holds no message up."""
    with tidelog.open(tmp_path) as log:
        topic = filled(log, 3)
        with subscribed(topic) as sub:
            one, two, three = sub.receive_many(3, timeout=120)
            with pytest.raises(InputError, match="reason must be str"):
                sub.nack(one, reason=ValueError("x"))  # type: ignore[arg-type]
            sub.nack(one, reason="\xe4" * 5000)
            sub.nack(two, reason="a\ud800b")
            asyncio.run(sub.nack_async(three, reason="from a task"))
        assert reasons(log) == ["\xe4".encode() * 1000, b"a?b", b"from a task"]


def test_a_reason_that_makes_a_letter_too_large_is_left_out(tmp_path: Path) -> None:
    """The message matters more."""
    with tidelog.open(tmp_path, max_message_bytes=1000) as log:
        topic = log.topic(NAME)
        topic.append_many([b"x" * 500, b"small"])
        with subscribed(topic) as sub:
            for message in sub.receive_many(2, timeout=120):
                sub.nack(message, reason="y" * 500)
        assert letters(log) == [0, 1]
        assert reasons(log) == [None, b"y" * 500]


def test_what_is_acknowledged_in_the_end_leaves_no_reason_behind(tmp_path: Path) -> None:
    """In memory there are reasons of open messages alone."""
    with tidelog.open(tmp_path) as log, filled(log, 4).subscribe("work", redelivery_backoff_seconds=0) as sub:
        for message in sub.receive_many(4, timeout=120):
            sub.nack(message, reason="busy")
        again = sub.receive_many(4, timeout=120)
        state = sub._subscription.state
        assert len(state.reasons) == 4
        sub.ack(again[3])
        sub.ack_cumulative(again[1])
        assert list(state.reasons) == [2]
        sub.seek(0)
        assert state.reasons == {}


def test_empty_topics_for_dead_letters_go_with_their_topic(tmp_path: Path) -> None:
    """Also those of partitions. Letters that nobody has looked at stay, and so do what may be another topic's, and a
    user's own topic whose name ends like one."""
    with tidelog.open(tmp_path) as log:
        for name in ("shop/orders", "shop/orders.eu"):
            log.topic(name).subscribe("work", max_deliveries=1)
        for number in (0, 1):
            log.topic("shop/split", partitions=2).partition(number).subscribe("work", max_deliveries=1)
        topic = log.topic("shop/orders")
        topic.append(b"bad")
        with topic.subscribe("other", max_deliveries=1) as sub:
            give_up(sub)
            eventually(lambda: log.topic("shop/orders.other.dlq").next_offset == 1)
        log.topic("shop/orders.notes.dlq.old")
        log.topic("shop/orders.mine.dlq")
        log.delete_topic("shop/split")
        log.delete_topic("shop/orders")
        assert log.topics() == [
            "shop/orders.eu",
            "shop/orders.eu.work.dlq",
            "shop/orders.mine.dlq",
            "shop/orders.notes.dlq.old",
            "shop/orders.other.dlq",
        ]
        log.delete_topic("shop/orders.eu")
        assert log.topics() == ["shop/orders.mine.dlq", "shop/orders.notes.dlq.old", "shop/orders.other.dlq"]
