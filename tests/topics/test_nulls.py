"""Null values, null headers and repeated names, wherever a message goes: what was appended is what is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples

import tidelog
from tidelog import Headers, Message
from tidelog.errors import InputError

PAIRS = (("trace", b"1"), ("trace", None), ("empty", b""), ("trace", b"3"))
Content = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
TOMBSTONE: Content = (None, b"k", PAIRS)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tidelog.LogDirectory]:
    with tidelog.open(tmp_path / "data") as opened:
        yield opened


def content(message: Message | None) -> Content:
    assert message is not None
    return message.value, message.key, message.header_list


def _produce(topic: Any) -> None:
    with topic.producer("app") as producer:
        producer.append(None, key=b"k", headers=PAIRS)
        producer.append_many([Message(None, key=b"k", headers=Headers(PAIRS))])
        asyncio.run(producer.append_async(None, key=b"k", headers=list(PAIRS)))


WAYS: dict[str, Callable[[Any], object]] = {
    "append": lambda topic: topic.append(None, key=b"k", headers=PAIRS),
    "append a message": lambda topic: topic.append(Message(None, key=b"k", headers=Headers(PAIRS))),
    "append_many": lambda topic: topic.append_many([Message(None, key=b"k", headers=Headers(PAIRS))] * 3),
    "append_async": lambda topic: asyncio.run(topic.append_async(None, key=b"k", headers=PAIRS)),
    "producer": _produce,
}


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_nulls_are_appended_and_read(log: tidelog.LogDirectory, way: str, partitions: int) -> None:
    """From memory, from the disk, by tasks and by subscriptions."""
    topic: Any = log.topic("shop/orders", partitions=partitions)
    WAYS[way](topic)
    found = list(topic.read())
    assert {content(message) for message in found} == {TOMBSTONE}
    assert found[0].headers == Headers(PAIRS)
    assert dict(found[0].headers) == {"trace": b"3", "empty": b""}
    topic.flush()
    with topic.subscribe("billing", filter={"trace": b"3"}) as sub:
        assert content(sub.receive(timeout=60)) == TOMBSTONE
    assert "k" not in topic.latest_by_key()


def test_nulls_go_through_live_topics(log: tidelog.LogDirectory) -> None:
    """As through all others."""
    topic = log.topic("shop/live", reliable=False)
    with topic.subscribe("billing") as sub:
        topic.append(None, key=b"k", headers=PAIRS)
        assert content(sub.receive(timeout=60)) == TOMBSTONE


def test_nulls_stay_in_dead_letters(log: tidelog.LogDirectory) -> None:
    """A letter has the headers of the message, and those of a letter once."""
    topic = log.topic("shop/orders")
    topic.append(None, key=b"k", headers=PAIRS)
    with topic.subscribe("billing", max_deliveries=1) as sub:
        sub.nack(sub.receive(timeout=60) or 0, reason="bad")
        assert sub.receive(timeout=0) is None
    (letter,) = list(log.topic("shop/orders.billing.dlq").read())
    value, key, pairs = content(letter)
    assert (value, key, pairs[: len(PAIRS)]) == TOMBSTONE
    assert len({name for name, _ in pairs[len(PAIRS) :]}) == len(pairs) - len(PAIRS)


def test_a_null_value_removes_a_key_as_an_empty_one_does(log: tidelog.LogDirectory) -> None:
    """And messages after it bring the key back."""
    topic = log.topic("shop/prices")
    for key in (b"a", b"b", b"c"):
        topic.append(b"1", key=key)
    topic.append(None, key=b"a")
    topic.append(b"", key=b"b")
    assert list(topic.latest_by_key()) == list(topic.latest_by_key(values=False)) == [b"c"]
    topic.append(b"2", key=b"a")
    assert {key: message.value for key, message in topic.latest_by_key().items()} == {b"c": b"1", b"a": b"2"}


@settings(max_examples=examples(15))
@given(
    st.lists(
        st.tuples(
            st.none() | st.binary(max_size=5),
            st.none() | st.binary(max_size=5),
            st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.binary(max_size=3)), max_size=10),
        ),
        max_size=8,
    )
)
def test_whatever_is_null_is_read_back(tmp_path_factory: pytest.TempPathFactory, contents: list[Any]) -> None:
    """Also after the directory was opened again."""
    root = tmp_path_factory.mktemp("data")
    wanted = [(value, key, tuple(pairs)) for value, key, pairs in contents]
    with tidelog.open(root) as log:
        for value, key, pairs in contents:
            log.topic("a/b").append(value, key=key, headers=pairs)
        assert [content(message) for message in log.topic("a/b").read()] == wanted
    with tidelog.open(root) as log:
        assert [content(message) for message in log.topic("a/b").read()] == wanted


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([["a", b""]], "tuple of name and value"),
        ([("a", "text")], "header 'a' must be bytes, not str"),
        ([(b"a", b"")], "name of a header must be str"),
        ({("a", b"")}, "mapping of str to bytes, not set"),
        ("text", "mapping of str to bytes, not str"),
    ],
)
def test_wrong_headers_are_named(log: tidelog.LogDirectory, headers: Any, words: str) -> None:
    """Nothing is appended."""
    topic = log.topic("a/b")
    with pytest.raises(InputError, match=words):
        topic.append(None, headers=headers)
    assert topic.next_offset == 0
