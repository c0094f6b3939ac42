"""Which clock decides what: pauses are steady, only the times that messages carry follow the wall clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tidelog.clock import ManualClock, to_datetime
from tidelog.errors import InputError
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.options import WaitingRoom
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.topic import Topic

NAME = "shop/orders"
DAY_SECONDS = 86_400


class SteppedClock(ManualClock):
    """Somebody sets the wall clock, forwards or back; the steady one goes on as ever."""

    def step(self, seconds: float) -> None:
        self._now_us += int(seconds * 1_000_000)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def topic(tmp_path: Path, clock: SteppedClock) -> Iterator[Topic]:
    with LogDirectory(tmp_path / "data", clock=clock) as log:
        yield log.topic(NAME)


def offsets(sub: Consumer, count: int = 100) -> list[int]:
    """What it gets now."""
    return [message.offset for message in sub.receive_many(count, timeout=0)]


@pytest.mark.parametrize("step_seconds", [DAY_SECONDS, -DAY_SECONDS])
def test_a_step_of_the_clock_moves_no_time_out(topic: Topic, clock: SteppedClock, step_seconds: int) -> None:
    """A message that is being worked on neither comes again too early, nor a day too late."""
    topic.append(b"x")
    sub = topic.subscribe("work", "shared", ack_timeout_seconds=10)
    assert offsets(sub) == [0]
    clock.step(step_seconds)
    clock.advance(9)
    assert offsets(sub) == []
    clock.advance(2)
    assert offsets(sub) == [0]


@pytest.mark.parametrize("step_seconds", [DAY_SECONDS, -DAY_SECONDS])
def test_a_step_of_the_clock_moves_no_pause(topic: Topic, clock: SteppedClock, step_seconds: int) -> None:
    """A rejected message waits as long as it was told to."""
    topic.append(b"x")
    sub = topic.subscribe("work")
    sub.nack(sub.receive(0) or 0, delay=10)
    clock.step(step_seconds)
    clock.advance(9)
    assert offsets(sub) == []
    clock.advance(2)
    assert offsets(sub) == [0]


@pytest.mark.parametrize("step_seconds", [DAY_SECONDS, -DAY_SECONDS])
def test_a_step_of_the_clock_moves_no_rate(topic: Topic, clock: SteppedClock, step_seconds: int) -> None:
    """A limit of one a second stays one a second."""
    topic.append_many([b"x"] * 5)
    sub = topic.subscribe("work", max_rate_per_second=1)
    assert offsets(sub) == [0]
    clock.step(step_seconds)
    assert offsets(sub) == []
    clock.advance(1)
    assert offsets(sub) == [1]


def test_delayed_messages_follow_the_wall_clock(topic: Topic, clock: SteppedClock) -> None:
    """They name a time, and that is when it has come by the clock that people set, whichever way it is set."""
    topic.append(b"x", deliver_at=to_datetime(clock.now_us()) + timedelta(hours=1))
    sub = topic.subscribe("work")
    assert offsets(sub) == []
    clock.step(-1800)
    clock.advance(3600)
    assert offsets(sub) == []
    clock.step(1800)
    assert offsets(sub) == [0]


def test_who_waits_for_a_delayed_message_looks_at_the_clock_again(topic: Topic, clock: SteppedClock) -> None:
    """A clock that is set forward brings it within about a second, however long the wait seemed to be."""
    topic.append(b"x", deliver_at=to_datetime(clock.now_us()) + timedelta(days=1))
    sub = topic.subscribe("work")
    assert offsets(sub) == []
    state, now = sub._subscription.state, sub._subscription._now()
    due_us = state.next_due_us(now)
    assert due_us is not None
    assert due_us - now.steady_us <= 1_000_000


def test_a_delayed_message_does_not_expire_before_its_time(topic: Topic, clock: SteppedClock) -> None:
    """Its time to live begins when it may be handed out; counted from the append it would never come."""
    topic.append(b"x", deliver_at=to_datetime(clock.now_us()) + timedelta(hours=1))
    sub = topic.subscribe("work", time_to_live_seconds=60)
    assert offsets(sub) == []
    clock.advance(3601)
    assert offsets(sub) == [0]
    late = topic.subscribe("late", time_to_live_seconds=60)
    clock.advance(60)
    assert offsets(late) == []


@pytest.mark.parametrize(
    "option",
    [
        "ack_timeout_seconds",
        "redelivery_backoff_seconds",
        "redelivery_backoff_max_seconds",
        "max_rate_per_second",
        "time_to_live_seconds",
        "progress_flush_interval_seconds",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, -1, 10**400])
def test_times_that_make_no_sense_are_refused(topic: Topic, option: str, value: Any) -> None:
    """Whoever subscribes is told, not whoever rejects the first message; and nothing is made."""
    with pytest.raises(InputError):
        topic.subscribe("work", **{option: value})
    assert topic.subscriptions() == []


@pytest.mark.parametrize("delay", [math.inf, math.nan, -1, 1e300, 10**400, "soon", True])
def test_a_pause_that_makes_no_sense_loses_no_message(topic: Topic, delay: Any) -> None:
    """The message stays with its consumer, which can still settle it."""
    topic.append(b"x")
    sub = topic.subscribe("work")
    message = sub.receive(0)
    assert message is not None
    with pytest.raises(InputError):
        sub.nack(message, delay=delay)
    sub.nack(message, delay=0)
    assert offsets(sub) == [0]


def test_messages_that_left_the_waiting_room_take_no_memory() -> None:
    """Rejected for a long time and acknowledged after all, again and again."""
    room = WaitingRoom()
    for offset in range(10_000):
        room.add(Delivery(b"", offset=offset), 10**15)
        assert room.remove(offset) is not None
    assert len(room._heap) < 100
