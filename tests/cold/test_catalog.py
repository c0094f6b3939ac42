"""Reading a catalog: walks, holes, ranges and times, against a linear model, in a few requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.cold.cold import ColdTopic
from tests.cold.published import KINDS, open_metadata

from tidelog.cold.catalog import Catalog, Descriptor, Reservation, encode_descriptor
from tidelog.errors import AccessDeniedError, DataError, StoreUnavailableError
from tidelog.store.keys import ObjectId, padded
from tidelog.testing import FaultyMetadata, FaultyStore

NONSENSE = [
    b"",
    b"{}",
    b"null",
    b"\xff\xff",
    b'{"start": 7}',
    b'{"start": "7"}',
    b'{"start": "99999999999999999999"}',
    b'{"start": "00000000000000099999"}',
    b'{"start": "00000000000000000035"}',
    b'{"start": "", "starts": [1e400]}',
    b'{"start": ' + b"[" * 100_000,
]


@pytest.fixture(params=KINDS)
def topic(request: pytest.FixtureRequest) -> ColdTopic:
    """Ten objects of ten messages each."""
    objects = FaultyStore()
    topic = ColdTopic(objects, open_metadata(request.param, objects))
    topic.fill([b"x"] * 100, per_object=10)
    return topic


def fresh(topic: ColdTopic) -> Catalog:
    """One that remembers nothing."""
    return Catalog(topic.catalog.metadata, topic.catalog.keys)


def starts(catalog: Catalog, offset: int) -> list[int]:
    return [descriptor.start_offset for descriptor in catalog.walk(offset)]


def reserve(topic: ColdTopic, offset: int) -> None:
    reservation = Reservation(start_offset=offset, epoch=1)
    topic.catalog.metadata.put(topic.catalog.keys.descriptor(offset), encode_descriptor(reservation))


# Walking


@pytest.mark.parametrize("offset", [0, 1, 9, 10, 55, 99])
def test_a_walk_begins_with_the_object_of_the_offset(topic: ColdTopic, offset: int) -> None:
    """And goes on to the newest, one after the other."""
    assert starts(fresh(topic), offset) == list(range(offset // 10 * 10, 100, 10))


def test_a_walk_behind_the_end_is_empty(topic: ColdTopic) -> None:
    """Nothing is there, and nothing is made up."""
    assert starts(fresh(topic), 100) == []
    assert starts(fresh(topic), 10**18) == []


def test_a_walk_passes_holes_and_shows_them(topic: ColdTopic) -> None:
    """A descriptor that is missing leaves a jump that whoever walks can see."""
    for lost in (3, 4, 7):
        topic.withdraw(topic.descriptors[lost])
    assert starts(fresh(topic), 0) == [0, 10, 20, 50, 60, 80, 90]
    assert starts(fresh(topic), 35) == [50, 60, 80, 90]
    assert fresh(topic).at(35) is None


def test_a_reservation_is_no_object(topic: ColdTopic) -> None:
    """The place of the next object is not an end, nor a part of a walk."""
    reserve(topic, 100)
    catalog = fresh(topic)
    newest = catalog.newest()
    assert newest is not None
    assert newest.start_offset == 90
    assert (catalog.next_offset(), starts(catalog, 0)[-1]) == (100, 90)
    assert catalog.at(100) is None
    assert starts(catalog, 100) == []
    found = catalog.find(100)
    assert found is not None
    assert isinstance(found.value, Reservation)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_catalog_ends_where_it_begins(kind: str) -> None:
    """Without objects the start says where the topic goes on; without that, it is a topic without a past."""
    objects = FaultyStore()
    topic = ColdTopic(objects, open_metadata(kind, objects))
    assert (topic.catalog.newest(), topic.catalog.oldest(), topic.catalog.next_offset()) == (None, None, 0)
    topic.move_start(70)
    assert (topic.catalog.next_offset(), topic.catalog.start_offset()) == (70, 70)
    reserve(topic, 70)
    assert (fresh(topic).newest(), fresh(topic).next_offset()) == (None, 70)


def test_an_end_that_retention_removed_is_remembered(topic: ColdTopic) -> None:
    """When every object went, the start remembers where the topic ends."""
    topic.move_start(100)
    for descriptor in topic.descriptors:
        topic.withdraw(descriptor)
    assert (fresh(topic).newest(), fresh(topic).next_offset()) == (None, 100)


def test_a_start_beyond_the_newest_object_is_refused(topic: ColdTopic) -> None:
    """The newest went first, by a hand that was not ours, or the start is not ours: neither of them is believed."""
    topic.withdraw(topic.descriptors[-1])
    topic.move_start(100)
    with pytest.raises(DataError, match=r"/start .*start_offset is 100, and the catalog ends at 90"):
        fresh(topic).next_offset()


# Covering


def test_a_range_is_covered_when_every_offset_is_in_an_object(topic: ColdTopic) -> None:
    """Up to the last published offset and not one further."""
    catalog = fresh(topic)
    assert catalog.covers(0, 100)
    assert catalog.covers(37, 38)
    assert catalog.covers(40, 40)
    assert not catalog.covers(0, 101)
    assert not catalog.covers(100, 101)


def test_a_hole_is_not_covered(topic: ColdTopic) -> None:
    """A range with a lost descriptor in it is not covered, at its start, in it or at its end."""
    topic.withdraw(topic.descriptors[5])
    catalog = fresh(topic)
    assert catalog.covers(0, 50)
    assert catalog.covers(60, 100)
    for first, stop in ((0, 51), (45, 65), (50, 60), (55, 70), (59, 60)):
        assert not catalog.covers(first, stop), (first, stop)


# The hint


@pytest.mark.parametrize("hint", [None, *NONSENSE], ids=range(len(NONSENSE) + 1))
def test_the_newest_is_found_whatever_the_hint_says(topic: ColdTopic, hint: bytes | None) -> None:
    """Missing, stale, too far or nonsense: `cur` is where to begin to look, never the answer."""
    metadata, keys = topic.catalog.metadata, topic.catalog.keys
    if hint is None:
        metadata.delete(keys.current)
    else:
        metadata.put(keys.current, hint)
    catalog = fresh(topic)
    newest = catalog.newest()
    assert newest is not None
    assert (newest.start_offset, catalog.next_offset()) == (90, 100)
    assert starts(catalog, 42) == [40, 50, 60, 70, 80, 90]


def test_a_stale_hint_is_passed(topic: ColdTopic) -> None:
    """A crash between a descriptor and `cur` hides nothing."""
    for start in range(0, 100, 10):
        topic.catalog.metadata.put(topic.catalog.keys.current, msgspec.json.encode({"start": padded(start)}))
        newest = fresh(topic).newest()
        assert newest is not None
        assert newest.start_offset == 90


# Times


def timed(kind: str, reached: list[int | None], messages: int = 10) -> ColdTopic:
    """Objects of so many messages that reach these times."""
    objects = FaultyStore()
    topic = ColdTopic(objects, open_metadata(kind, objects))
    for number, time_us in enumerate(reached):
        descriptor = topic.put_object([b"x"] * messages, number * messages)
        topic.publish(
            msgspec.structs.replace(descriptor, first_time_us=time_us, last_time_us=time_us, reached_time_us=time_us)
        )
    return topic


@settings(max_examples=examples(60))
@given(
    kind=st.sampled_from(KINDS[:2]),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    lost=st.sets(st.integers(0, 24), max_size=10),
    timeless=st.integers(0, 5),
    messages=st.integers(1, 4),
    time_us=st.integers(-1, 80),
)
def test_the_first_object_of_a_time_is_the_one_that_a_walk_finds(
    kind: str, steps: list[int], lost: set[int], timeless: int, messages: int, time_us: int
) -> None:
    """Bisection over offsets gives the same as looking at each, with holes and with objects that have no times."""
    times: list[int | None] = []
    for number, step in enumerate(steps):
        before = next((time for time in reversed(times) if time is not None), 0)
        times.append(None if number < timeless else before + step)
    topic = timed(kind, times, messages)
    for number in lost:
        if number < len(times):
            topic.withdraw(topic.descriptors[number])
    catalog = fresh(topic)
    reached = (one for one in catalog.walk(0) if one.reached_time_us is not None and one.reached_time_us >= time_us)
    assert fresh(topic).first_for_time(time_us) == next(reached, None)


def test_a_time_is_found_beside_a_hole() -> None:
    """A lost descriptor must not keep the search from ending."""
    topic = timed("multi-key", [10, 20, 30])
    topic.withdraw(topic.descriptors[1])
    found = fresh(topic).first_for_time(15)
    assert found is not None
    assert found.start_offset == 20


# What it costs


@pytest.mark.parametrize("multi_key", [True, False])
def test_a_lookup_reads_a_few_entries_of_many(multi_key: bool) -> None:
    """With 20 objects or with 500, the object of an offset and the newest one cost the same few requests."""
    costs = []
    for count in (20, 500):
        metadata = FaultyMetadata(multi_key=multi_key)
        topic = ColdTopic(FaultyStore(), metadata)
        topic.fill([b"x"] * count, per_object=1)
        metadata.reset_traffic()
        assert fresh(topic).at(count // 2) is not None
        assert fresh(topic).newest() is not None
        assert next(iter(fresh(topic).walk(count // 2))) is not None
        costs.append((metadata.traffic.request_count, metadata.traffic.bytes_read))
    assert costs[0][0] == costs[1][0] <= 8
    # The starts that `cur` names are a few bytes each; descriptors are hundreds.
    assert costs[1][1] - costs[0][1] < 480 * 30


def test_a_time_is_found_in_a_few_lookups() -> None:
    """Bisection, not a walk."""
    metadata = FaultyMetadata()
    topic = ColdTopic(FaultyStore(), metadata, time_field=None)
    for number in range(300):
        descriptor = topic.put_object([b"x"], number)
        topic.publish(
            msgspec.structs.replace(descriptor, first_time_us=number, last_time_us=number, reached_time_us=number)
        )
    metadata.reset_traffic()
    found = fresh(topic).first_for_time(200)
    assert found is not None
    assert found.start_offset == 200
    assert metadata.traffic.request_count <= 20


def test_a_walk_reads_what_is_asked_for(topic: ColdTopic) -> None:
    """Whoever takes two descriptors has not paid for ten."""
    metadata = topic.catalog.metadata
    if not isinstance(metadata, FaultyMetadata):
        return
    metadata.reset_traffic()
    walk = fresh(topic).walk(0)
    next(walk), next(walk)
    assert metadata.traffic.request_count <= 4


# Errors are errors


@pytest.mark.parametrize("fault", ["unavailable", "denied"])
@pytest.mark.parametrize("operation", ["get", "range", "floor", "keys"])
def test_what_could_not_be_read_is_never_nothing(operation: str, fault: str) -> None:
    """An outage is raised by every question that meets it, and none of them answers "empty"."""
    for multi_key in (True, False):
        metadata = FaultyMetadata(multi_key=multi_key)
        topic = ColdTopic(FaultyStore(), metadata)
        topic.fill([b"x"] * 30, per_object=10)
        topic.withdraw(topic.descriptors[1])
        metadata.fail(operation, fault, times=None)  # type: ignore[arg-type]  # both are faults
        for question in (
            lambda catalog: catalog.next_offset(),
            lambda catalog: catalog.newest(),
            lambda catalog: catalog.oldest(),
            lambda catalog: list(catalog.walk(15)),
            lambda catalog: catalog.at(15),
            lambda catalog: catalog.covers(0, 30),
            lambda catalog: catalog.first_for_time(0),
        ):
            before = metadata.traffic.requests.get(operation, 0)
            try:
                question(fresh(topic))
            except (StoreUnavailableError, AccessDeniedError):
                continue
            assert metadata.traffic.requests.get(operation, 0) == before, "it met the fault and said nothing"


def test_a_damaged_descriptor_is_named(topic: ColdTopic) -> None:
    """Nobody steps over it."""
    topic.catalog.metadata.put(topic.catalog.keys.descriptor(50), b'{"completed": true}')
    with pytest.raises(DataError, match="00000000000000000050"):
        list(fresh(topic).walk(0))
    with pytest.raises(DataError, match="00000000000000000050"):
        fresh(topic).at(55)
    with pytest.raises(DataError, match="00000000000000000050"):
        fresh(topic).covers(0, 100)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"epoch": "x"}', b"[" * 100_000])
def test_damaged_documents_are_named(data: bytes) -> None:
    """Owner, state, start, cursors and the epoch floor: what cannot be understood is not "none"."""
    catalog = ColdTopic(FaultyStore(), FaultyMetadata()).catalog
    keys = catalog.keys
    for key, question in (
        (keys.owner, catalog.owner),
        (keys.state, catalog.sealed),
        (keys.start, catalog.start_offset),
        (keys.epoch_floor, catalog.epoch_floor),
        (keys.subscription("billing"), lambda: catalog.cursor("billing")),
    ):
        catalog.metadata.put(key, data)
        with pytest.raises(DataError, match=key):
            question()


def test_subscriptions_are_listed_by_name() -> None:
    """Names that were not made here are passed over."""
    catalog = ColdTopic(FaultyStore(), FaultyMetadata()).catalog
    for name in ("billing", "audit"):
        catalog.metadata.put(catalog.keys.subscription(name), b"{}")
    catalog.metadata.put(catalog.keys.subscriptions_prefix + "deeper/one", b"{}")
    assert catalog.subscriptions() == ["audit", "billing"]


def test_foreign_keys_among_the_descriptors_are_passed_over() -> None:
    """A key that is no offset is not a descriptor, and does not end a walk."""
    topic = ColdTopic(FaultyStore(), FaultyMetadata())
    topic.fill([b"x"] * 30, per_object=10)
    prefix = topic.catalog.keys.segments_prefix
    for name in ("00000000000000000010-copy", "0000000000000000001", "zzz"):
        topic.catalog.metadata.put(prefix + name, b"junk")
    topic.withdraw(topic.descriptors[1])
    assert starts(fresh(topic), 0) == [0, 20]
    newest = fresh(topic).newest()
    assert isinstance(newest, Descriptor)
    assert newest.start_offset == 20
    found = fresh(topic).at(25)
    assert found is not None
    assert found.start_offset == 20


# Beside a compaction


def replace_most(topic: ColdTopic) -> None:
    """Small objects become a large one: its descriptor first, then theirs go."""
    metadata, keys = topic.catalog.metadata, topic.catalog.keys
    name = ObjectId(20, 79, 1, 1)
    large = msgspec.structs.replace(topic.descriptors[2], end_offset=name.end, object_id=str(name))
    metadata.put(keys.descriptor(20), encode_descriptor(large))
    for start in range(30, 80, 10):
        metadata.delete(keys.descriptor(start))


@pytest.mark.parametrize("first_offset", [0, 20, 55])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_range_has_no_hole_when_objects_are_replaced(first_offset: int, is_slow: bool) -> None:
    """In front of any request of it: small ones are told, or the large one, and nothing twice."""
    for at_request in range(1, 100):
        objects = FaultyStore()
        topic = ColdTopic(objects, open_metadata("bucket", objects))
        topic.fill([b"x"] * 100, per_object=10)
        requests = itertools.count(1)

        def replace(*_: str, number: int = at_request, counted: Iterator[int] = requests) -> None:
            if next(counted) == number:
                replace_most(topic)  # noqa: B023  # called before the next one is made

        catalog = fresh(topic)
        objects.on_request = replace
        if is_slow:
            catalog.named_starts = list  # type: ignore[method-assign]  # as if `cur` named none
        found = list(catalog.between(first_offset, 100))
        objects.on_request = None
        assert found[0].start_offset <= first_offset
        assert [one.start_offset for one in found[1:]] == [one.next_offset for one in found[:-1]]
        assert found[-1].next_offset == 100
        if next(requests) <= at_request:
            break
    assert at_request > 3
