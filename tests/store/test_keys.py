"""Keys and object names: built and parsed without loss, and nothing hostile gets in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.codec import MAX_OFFSET
from tidelog.errors import InputError
from tidelog.store import keys
from tidelog.store.keys import MAX_NUMBER, ObjectId, TopicKeys, parse_object_id
from tidelog.topics.names import is_name_part

PARTS = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True)
OFFSETS = st.integers(0, MAX_OFFSET) | st.sampled_from([0, 9, 10, MAX_OFFSET])
TOPIC = TopicKeys("shop", "orders")
HOSTILE = ["", ".", "..", ".hidden", "a/b", "/", "a b", "ü", "a\n", "a\0", "a#1", "a\\b", "x" * 201, "%2e%2e"]


def test_the_keys_of_a_topic() -> None:
    """They are what the documents say, letter by letter: other people's tools may look for them."""
    assert TOPIC.descriptor(42) == "tidelog/storage/topics/shop/orders/segments/00000000000000000042"
    assert TOPIC.current == "tidelog/storage/topics/shop/orders/segments/cur"
    assert TOPIC.state == "tidelog/storage/topics/shop/orders/state"
    assert TOPIC.owner == "tidelog/storage/topics/shop/orders/owner"
    assert TOPIC.subscription("billing") == "tidelog/storage/topics/shop/orders/subscriptions/billing"
    assert TOPIC.object(ObjectId(42, 99, 7)) == "storage/topics/shop/orders/objects/data-42-99-e7.tlog"
    assert TOPIC.object(ObjectId(42, 99, 7, 3)) == "storage/topics/shop/orders/objects/data-42-99-e7-c3.tlog"
    assert TOPIC.rewrite_state == "tidelog/storage/topics/shop/orders/replacements/state"
    assert TOPIC.replacement(3, 42).endswith("/replacements/00000000000000000003/00000000000000000042")
    assert TopicKeys("shop", "orders", root="other").state == "other/storage/topics/shop/orders/state"


@given(OFFSETS)
def test_descriptors_round_trip(start: int) -> None:
    """Every 64-bit offset has one key, and the key gives it back."""
    key = TOPIC.descriptor(start)
    assert TOPIC.parse_descriptor(key) == start == keys.parse_padded(keys.padded(start))
    assert keys.check_key(key) == key


@given(OFFSETS, OFFSETS)
def test_keys_sort_as_offsets_do(one: int, other: int) -> None:
    """A range of keys is a range of offsets, and `cur` is behind all of them."""
    assert (TOPIC.descriptor(one) < TOPIC.descriptor(other)) is (one < other)
    assert TOPIC.descriptor(one) < TOPIC.current


@given(OFFSETS, OFFSETS, OFFSETS, OFFSETS)
def test_object_names_round_trip(one: int, other: int, epoch: int, generation: int) -> None:
    """The numbers in a name are the numbers that it was built from."""
    name = ObjectId(min(one, other), max(one, other), epoch, generation)
    key = TOPIC.object(name)
    assert TOPIC.parse_object(key) == name == parse_object_id(str(name))
    assert keys.check_key(key) == key


@given(PARTS, PARTS, PARTS, PARTS)
def test_topics_and_subscriptions_round_trip(root: str, namespace: str, topic: str, subscription: str) -> None:
    """A key says whose it is."""
    built = TopicKeys(namespace, topic, root)
    key = built.subscription(subscription)
    assert built.parse_subscription(key) == subscription
    assert keys.parse_topic_key(key, root) == (namespace, topic, f"subscriptions/{subscription}")
    assert keys.parse_topic_key(built.state, root) == (namespace, topic, "state")
    assert key.startswith(keys.topics_prefix(root))


@given(
    st.text(max_size=60)
    | st.from_regex(r"data-[0-9]{1,22}-[0-9]{1,22}-e[0-9]{1,22}(-c[0-9]{1,22})?\.tlog", fullmatch=True)
)
def test_names_that_were_not_built_here_are_not_ours(name: str) -> None:
    """What parses is exactly what building would give."""
    found = parse_object_id(name)
    assert found is None or str(found) == name
    assert TOPIC.parse_object(TOPIC.objects_prefix + name) == found


@pytest.mark.parametrize(
    "name",
    [
        "data-1-0-e1.tlog",
        "data-01-2-e1.tlog",
        "data-1-2-e01.tlog",
        "data-1-2-e1-c0.tlog",
        "data-1-2-e1-c01.tlog",
        "data-1-2-c1.tlog",
        "data-1-2-e1.tlog\n",
        "data--1-2-e1.tlog",
        "data-1-2.tlog",
        "data-1-2-e1.tlog.tmp",
        "data-1-18446744073709551616-e1.tlog",
        "data-\u0661-2-e1.tlog",
    ],
)
def test_names_that_are_nearly_right_are_not_ours(name: str) -> None:
    """One object has one spelling."""
    assert parse_object_id(name) is None


@pytest.mark.parametrize(
    "digits", ["0", "0" * 19, "0" * 21, "cur", "9" * 20, "\u0660" * 20, "0" * 20 + "\n", " " + "0" * 19]
)
def test_what_is_not_twenty_digits_is_no_descriptor(digits: str) -> None:
    """`cur` is not taken for an offset, and a number beyond 64 bits is not one."""
    assert TOPIC.parse_descriptor(TOPIC.segments_prefix + digits) is None


def test_keys_of_others_are_not_ours() -> None:
    """A topic whose name begins alike, and another installation, stay apart."""
    other = TopicKeys("shop", "orders-2")
    assert TOPIC.parse_descriptor(other.descriptor(1)) is None
    assert TOPIC.parse_object(other.object(ObjectId(0, 1, 1))) is None
    assert TOPIC.parse_subscription(other.subscription("a")) is None
    assert keys.parse_topic_key(TOPIC.state, root="tide") is None
    assert keys.parse_topic_key("tidelog/storage/topics/../x/state") is None
    assert keys.parse_topic_key("tidelog/storage/topics/shop") is None


@pytest.mark.parametrize("part", HOSTILE)
def test_hostile_parts_are_refused(part: str) -> None:
    """No name from outside climbs out of its place."""
    builders: list[Callable[[], object]] = [
        lambda: TopicKeys(part, "orders"),
        lambda: TopicKeys("shop", part),
        lambda: TopicKeys("shop", "orders", part),
        lambda: TOPIC.subscription(part),
        lambda: keys.topics_prefix(part),
    ]
    for build in builders:
        with pytest.raises(InputError):
            build()
    assert TOPIC.parse_subscription(TOPIC.subscriptions_prefix + part) is None


@pytest.mark.parametrize("number", [-1, MAX_NUMBER + 1])
def test_numbers_beyond_64_bits_are_refused(number: int) -> None:
    """They would not sort where they belong."""
    builders: list[Callable[[], object]] = [
        lambda: TOPIC.descriptor(number),
        lambda: keys.padded(number),
        lambda: TOPIC.object(ObjectId(0, 1, number)),
        lambda: TOPIC.object(ObjectId(number, MAX_OFFSET, 1)),
    ]
    for build in builders:
        with pytest.raises(InputError):
            build()
    with pytest.raises(InputError):
        TOPIC.object(ObjectId(2, 1, 0))


@given(st.text(max_size=12) | PARTS)
def test_every_topic_name_can_be_in_a_key(text: str) -> None:
    """The rule for keys and the rule for topic names are the same one."""
    assert keys.is_part(text) is is_name_part(text)


def test_prefixes_are_folders() -> None:
    """Stores list whole parts only, so a prefix that ends inside a part is a mistake."""
    assert keys.check_prefix("") == ""
    assert keys.check_prefix("a/b/") == "a/b/"
    for prefix in ("a", "/", "a//", "../", "a b/"):
        with pytest.raises(InputError):
            keys.check_prefix(prefix)
