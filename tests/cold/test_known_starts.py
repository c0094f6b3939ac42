"""Finding an object in a catalog that can only be listed forwards: always the right one, and in a few reads."""

from __future__ import annotations

import random

import pytest
from tests.campaign import examples, first_seed
from tests.cold.cold import ColdTopic

from tidelog.cold.catalog import MAX_NAMED_STARTS, Catalog, Descriptor, Reservation, encode_descriptor, with_start
from tidelog.testing import FaultyMetadata, FaultyStore

NONSENSE = [b"", b"{}", b"\xff", b'{"start": "x", "starts": [-1, 5, 5, 3]}', b'{"start": "00000000000000000900"}']


def new_topic() -> ColdTopic:
    return ColdTopic(FaultyStore(), FaultyMetadata(multi_key=False))


def metadata_of(topic: ColdTopic) -> FaultyMetadata:
    assert isinstance(topic.catalog.metadata, FaultyMetadata)
    return topic.catalog.metadata


def newcomer(topic: ColdTopic) -> Catalog:
    """A catalog of somebody who knows nothing yet."""
    return Catalog(topic.catalog.metadata, topic.catalog.keys)


def present(topic: ColdTopic) -> list[Descriptor]:
    """What was published and not withdrawn."""
    return [one for one in topic.descriptors if topic.catalog.find(one.start_offset) is not None]


def last_of(topic: ColdTopic) -> Descriptor | None:
    return next(reversed(present(topic)), None)


def holder_of(topic: ColdTopic, offset: int) -> Descriptor | None:
    """The same by looking at everything."""
    return next((one for one in present(topic) if one.start_offset <= offset <= one.end_offset), None)


@pytest.mark.deeper
@pytest.mark.parametrize("number", range(examples(10)))
def test_the_object_of_an_offset_is_found_whatever_happened(number: int) -> None:
    """Published, removed in front or between, reserved, with `cur` late or nonsense: by old hands and newcomers."""
    choose, topic, next_offset = random.Random(first_seed() + number), new_topic(), 0
    old_hand, keys = newcomer(topic), topic.catalog.keys
    for _ in range(60):
        step, there = choose.random(), present(topic)
        if step < 0.6:
            cur = topic.catalog.metadata.get(keys.current)
            topic.fill([b"x"] * choose.randint(1, 5), 5, next_offset)
            next_offset = topic.descriptors[-1].next_offset
            if cur is not None and choose.random() < 0.3:
                topic.catalog.metadata.put(keys.current, cur.value)  # a crash before `cur` was moved
        elif step < 0.7 and there:
            topic.withdraw(there[0])
        elif step < 0.75 and there:
            topic.withdraw(choose.choice(there))
        elif step < 0.8:
            reservation = Reservation(start_offset=next_offset, epoch=1)
            topic.catalog.metadata.put(keys.descriptor(next_offset), encode_descriptor(reservation))
        elif step < 0.83:
            topic.catalog.metadata.put(
                keys.current, choose.choice([b"", b"{}", b'{"start": "x", "starts": [-1, 5, 5, 3]}'])
            )
        offset = choose.randint(0, next_offset + 2)
        expected = holder_of(topic, offset)
        assert old_hand.at(offset) == expected
        assert newcomer(topic).at(offset) == expected
        assert old_hand.newest() == newcomer(topic).newest() == last_of(topic)


def test_a_newcomer_finds_any_object_in_two_reads() -> None:
    """Whatever the length of the catalog, nothing is listed."""
    topic = new_topic()
    topic.fill([b"x"] * 500, 1)
    metadata = metadata_of(topic)
    for offset in range(0, 500, 7):
        catalog = newcomer(topic)
        metadata.reset_traffic()
        assert next(catalog.walk(offset)).start_offset == offset
        assert metadata.traffic.requests == {"get": 2}


def test_starts_that_are_not_named_are_a_few_steps_away() -> None:
    """When only some are named, what is between them is reached from the one before."""
    topic = new_topic()
    topic.fill([b"x"] * 100, 1)
    value = topic.catalog.moved_current(99)[0]
    named = b'{"start": "00000000000000000099", "starts": [0, 4, 8, 20, 99]}'
    assert value != named
    metadata = metadata_of(topic)
    metadata.put(topic.catalog.keys.current, named)
    metadata.reset_traffic()
    found = newcomer(topic).at(7)
    assert found is not None
    assert found.start_offset == 7
    assert metadata.traffic.requests == {"get": 5}


def test_a_descriptor_that_was_put_back_is_found() -> None:
    """Also by somebody who has listed everything while it was lost."""
    topic = new_topic()
    topic.fill([b"x"] * 20, 1)
    lost = topic.descriptors[7]
    topic.withdraw(lost)
    catalog = newcomer(topic)
    assert catalog.at(7) is None
    topic.catalog.metadata.put(topic.catalog.keys.descriptor(7), encode_descriptor(lost))
    assert catalog.at(7) == lost


def test_the_names_in_cur_are_bounded() -> None:
    """A catalog of any length has a `cur` of bounded size, with the newest in it and the oldest not forgotten."""
    starts: list[int] = []
    for start in range(3 * MAX_NAMED_STARTS):
        starts = with_start(starts, start)
        assert len(starts) <= MAX_NAMED_STARTS
    assert starts[0] == 0
    assert starts[-1] >= 3 * MAX_NAMED_STARTS - 2


def test_a_store_that_can_look_backwards_needs_no_names() -> None:
    """There `cur` stays as short as it was."""
    topic = ColdTopic(FaultyStore(), FaultyMetadata())
    topic.fill([b"x"] * 10, 1)
    entry = topic.catalog.metadata.get(topic.catalog.keys.current)
    assert entry is not None
    assert entry.value == b'{"start":"00000000000000000009"}'
