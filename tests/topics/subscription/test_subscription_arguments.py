"""What a subscription is asked for wrongly: the error names the argument, what it may be, and nothing was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog import ClosedError, ConfigError, InputError, Message, NotFoundError, Topic

NAME = "shop/orders"


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    with tidelog.open(tmp_path) as log:
        yield log.topic(NAME)


WRONG = [
    ({"kind": "keyshared"}, "kind must be one of exclusive, failover, key_shared, shared, not 'keyshared'"),
    ({"ack_timeout": 3}, "ack_timeout is not an option of a subscription. Did you mean ack_timeout_seconds?"),
    ({"max_unacked": 0}, "max_unacked must be a whole number, at least 1, at most 10000, not 0"),
    ({"max_deliveries": "5"}, "max_deliveries must be a whole number, at least 1, not '5'"),
    ({"hold_retention": 1}, "hold_retention must be true or false, not 1"),
    ({"dead_letter_topic": "shop/dead"}, "dead_letter_topic has no effect without max_deliveries"),
    ({"on_exhausted": "drop"}, "on_exhausted has no effect without max_deliveries"),
    (
        {"on_exhausted": "drop", "max_deliveries": 2, "dead_letter_topic": "shop/dead"},
        'dead_letter_topic has no effect with on_exhausted="drop"',
    ),
    ({"consumer": 5}, "5 cannot be the name of a consumer"),
    ({"name": "a/b"}, "'a/b' cannot be the name of a subscription"),
    ({"name": None}, "None cannot be the name of a subscription"),
    ({"filter": {"kind": "order"}}, "filter must map str headers to bytes"),
    ({"filter": "kind=order"}, "filter must be a mapping of headers to values, or a function"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_argument_is_named_with_what_it_may_be(topic: Topic, arguments: dict[str, Any], text: str) -> None:
    """And no subscription is made: one that passes over everything would look like one without messages."""
    with pytest.raises(InputError) as raised:
        topic.subscribe(**{"name": "billing", **arguments})
    assert text in str(raised.value)
    assert topic.subscriptions() == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"compaction": "key"}, "compaction must be one of by_key"),
        ({"retention_seconds": "1 dya"}, "retention_seconds must be a whole number"),
        ({"retention_secs": 5}, "Did you mean retention_seconds?"),
    ],
)
def test_so_is_a_wrong_setting_of_a_topic(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    """In words, not as the path and the type of a decoder."""
    with tidelog.open(tmp_path) as log:
        with pytest.raises(ConfigError) as raised:
            log.topic(NAME, **settings)
        assert text in str(raised.value)
        assert log.topics() == []


@pytest.mark.parametrize("settle", ["ack", "nack", "ack_cumulative"])
@pytest.mark.parametrize("wrong", [-1, Message(b"never received"), "7", None, True])
def test_what_was_never_received_cannot_be_settled(topic: Topic, settle: str, wrong: Any) -> None:
    """A message of one's own has no offset, and settling it did nothing without a word."""
    topic.append(b"x")
    with (
        topic.subscribe("billing") as sub,
        pytest.raises(InputError, match=r"not received|expected a message or its offset"),
    ):
        getattr(sub, settle)(wrong)


def test_none_says_where_it_comes_from(topic: Topic) -> None:
    """A time-out that nobody looked for is what it is as a rule."""
    with topic.subscribe("billing") as sub, pytest.raises(InputError, match=r"got None.*returns None on timeout"):
        sub.ack(sub.receive(timeout=0))  # type: ignore[arg-type]


CALLS: list[Callable[[Topic], object]] = [
    lambda topic: topic.subscribe("billing"),
    lambda topic: topic.subscriptions(),
    lambda topic: topic.subscription_info("billing"),
    lambda topic: topic.delete_subscription("billing"),
]


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a_closed_topic_says_so(tmp_path: Path, call: Callable[[Topic], object], has_store: bool) -> None:
    """Rather than the store of the positions, of which the caller knows nothing."""
    with tidelog.open(tmp_path / "log", store=f"file://{tmp_path}/bucket" if has_store else None) as log:
        topic = log.topic(NAME)
        topic.subscribe("billing").close()
    with pytest.raises(ClosedError, match=r"the log is closed.*Open it again"):
        call(topic)


def test_beside_the_owner_the_error_says_where_consumers_are(tmp_path: Path) -> None:
    """A directory that is open for reading only has none."""
    with tidelog.open(tmp_path) as log:
        log.topic(NAME)
        with tidelog.open(tmp_path, read_only=True) as beside:
            topic = beside.topic(NAME)
            for call in (topic.subscribe, topic.producer):
                with pytest.raises(InputError, match="process that owns the topic"):
                    call("x")


def test_one_that_is_not_there_is_told_with_where_to_look(topic: Topic) -> None:
    """Both for looking and for deleting."""
    for call in (topic.subscription_info, topic.delete_subscription):
        with pytest.raises(NotFoundError, match=r"no subscription billing.*subscriptions\(\)"):
            call("billing")


def test_a_topic_stays_what_it_is(tmp_path: Path) -> None:
    """Whether it is open or not, and the error says what can be done."""
    with tidelog.open(tmp_path) as log:
        live = log.topic("shop/ticks", reliable=False)
        assert repr(live) == "<LiveTopic shop/ticks>"
        with pytest.raises(InputError, match=r"reliable=False, and that cannot be changed.*delete it first"):
            log.topic("shop/ticks", reliable=True)
