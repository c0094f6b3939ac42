"""Retention deletes what is too old or too much, oldest first, and nothing because something could not be read."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cold.published import KEYS, KINDS, SECOND_US, PublishedTopic, topic_in

from tidelog.cold.gc import Collector
from tidelog.cold.retention import (
    ColdPlan,
    apply_cold,
    finish_cold,
    is_safe_to_remove,
    plan_cold,
    plan_local,
    safe_below,
)
from tidelog.errors import AccessDeniedError, FencedError, StoreUnavailableError
from tidelog.log.segment import FileSpan
from tidelog.testing import FaultyStore, History, World, cut_world_everywhere

HOUR = 3600


def plan_of(topic: PublishedTopic, age: int | None = None, size: int | None = None) -> ColdPlan:
    return plan_cold(topic.catalog, topic.clock.now_us(), age, size)


# Planning in the store


def test_nothing_is_due_when_nothing_is_set(topic: PublishedTopic) -> None:
    """Without limits a topic is kept for ever, and is not even looked at."""
    topic.publish_hourly(3)
    plan = plan_of(topic)
    assert plan == ColdPlan(start_offset=0)
    assert plan.is_empty


def test_an_object_goes_when_all_of_it_is_too_old(topic: PublishedTopic) -> None:
    """By age the oldest objects go, up to the first that has a message young enough."""
    published = topic.publish_hourly(4)
    plan = plan_of(topic, age=2 * HOUR + 1)
    assert plan.descriptors == tuple(published[:2])
    assert plan.reasons == ("age", "age")
    assert plan.start_offset == 20
    assert plan.bytes == published[0].size + published[1].size


def test_an_object_of_exactly_the_age_stays(topic: PublishedTopic) -> None:
    """Older means older: at the limit an object is kept."""
    topic.publish_hourly(1)
    assert plan_of(topic, age=HOUR).is_empty
    assert not plan_of(topic, age=HOUR - 1).is_empty


def test_an_object_without_times_is_as_old_as_it_is_published(topic: PublishedTopic) -> None:
    """Where messages have no time, the time of shipping counts."""
    topic.publish(5, with_times=False)
    topic.clock.advance(HOUR)
    assert plan_of(topic, age=HOUR + 1).is_empty
    assert plan_of(topic, age=HOUR - 1).start_offset == 5


def test_an_old_object_behind_a_young_one_waits(topic: PublishedTopic) -> None:
    """The topic is cut at its start only, so a young object keeps the ones behind it."""
    topic.publish(5)
    topic.clock.advance(-10 * HOUR)
    topic.publish(5)
    topic.clock.advance(10 * HOUR + 10)
    assert plan_of(topic, age=HOUR).is_empty


def test_the_oldest_go_while_there_is_too_much(topic: PublishedTopic) -> None:
    """By size just as many go that the rest is within the limit."""
    published = topic.publish_hourly(4)
    rest = published[2].size + published[3].size
    assert plan_of(topic, size=rest).descriptors == tuple(published[:2])
    assert plan_of(topic, size=rest - 1).descriptors == tuple(published[:3])
    assert plan_of(topic, size=rest).reasons == ("size", "size")
    assert plan_of(topic, size=sum(one.size for one in published)).is_empty


def test_both_limits_hold_together(topic: PublishedTopic) -> None:
    """What is old goes for its age, and of the rest as much as is too much."""
    published = topic.publish_hourly(4)
    plan = plan_of(topic, age=3 * HOUR + 1, size=published[3].size)
    assert plan.reasons == ("age", "size", "size")
    assert plan.start_offset == 30


def test_planning_by_age_reads_no_further_than_what_stays() -> None:
    """However long a topic is, a look that finds nothing costs a few requests."""
    topic = PublishedTopic()
    topic.publish_hourly(50, count=1)
    topic.metadata.reset_traffic()  # type: ignore[attr-defined]
    assert plan_of(topic, age=1000 * HOUR).is_empty
    assert topic.metadata.traffic.request_count < 6  # type: ignore[attr-defined]


@given(
    sizes=st.lists(st.integers(1, 9), max_size=8),
    age=st.none() | st.integers(0, 9 * HOUR),
    keep=st.none() | st.integers(0, 60),
)
def test_a_plan_is_the_shortest_prefix_that_meets_the_limits(
    sizes: list[int], age: int | None, keep: int | None
) -> None:
    """Against a simple model: the first object that may stay by age and by size is the new start."""
    topic = PublishedTopic()
    published = []
    for size in sizes:
        published.append(topic.publish(size))
        topic.clock.advance(HOUR)
    unit = published[0].size // published[0].count if published else 1
    limit = None if keep is None else keep * unit
    now_us = topic.clock.now_us()

    def is_due(index: int) -> bool:
        old = age is not None and all(
            now_us - (one.last_time_us or 0) > age * SECOND_US for one in published[: index + 1]
        )
        return old or (limit is not None and sum(one.size for one in published[index:]) > limit)

    plan = plan_of(topic, age, limit)
    assert list(plan.descriptors) == [one for index, one in enumerate(published) if is_due(index)]


# Deleting in the store


def test_what_was_planned_is_deleted(topic: PublishedTopic) -> None:
    """Afterwards catalog and store agree, and the start has moved."""
    published = topic.publish_hourly(4)
    apply_cold(topic.owned, topic.store, plan_of(topic, age=2 * HOUR + 1))
    assert topic.catalog.start_offset() == 20
    assert topic.descriptors() == published[2:]
    assert topic.object_names() == topic.names_in_catalog()


def test_all_of_a_topic_may_go_and_it_goes_on_where_it_ended(topic: PublishedTopic) -> None:
    """The start remembers the end, so no offset is used twice."""
    topic.publish_hourly(3)
    apply_cold(topic.owned, topic.store, plan_of(topic, age=1))
    assert topic.descriptors() == []
    assert topic.object_names() == []
    assert topic.catalog.next_offset() == 30
    assert topic.publish(5).start_offset == 30


def test_an_object_that_straddles_the_start_stays(topic: PublishedTopic) -> None:
    """A start within an object keeps all of it, until all of it is due."""
    published = topic.publish_hourly(3)
    topic.owned.move_start(15)
    assert finish_cold(topic.owned, topic.store) == published[:1]
    assert topic.descriptors() == published[1:]
    apply_cold(topic.owned, topic.store, plan_of(topic, age=HOUR + 1))
    assert topic.descriptors() == published[2:]
    assert topic.catalog.start_offset() == 20


def test_an_empty_plan_changes_nothing(topic: PublishedTopic) -> None:
    """Applying it needs nothing of the store."""
    topic.publish_hourly(1)
    topic.store.fail("*", times=None)  # type: ignore[attr-defined]
    apply_cold(topic.owned, topic.store, ColdPlan(start_offset=0))


def test_a_start_that_is_further_by_now_stays(topic: PublishedTopic) -> None:
    """An old plan never moves the start back."""
    topic.publish_hourly(3)
    plan = plan_of(topic, age=2 * HOUR + 1)
    topic.owned.move_start(20)
    apply_cold(topic.owned, topic.store, plan)
    assert topic.catalog.start_offset() == 20


def test_a_replaced_owner_deletes_nothing(topic: PublishedTopic) -> None:
    """After a takeover the plan of the one before is worth nothing."""
    published = topic.publish_hourly(3)
    former, plan = topic.owned, plan_of(topic, age=1)
    topic.take_over("b")
    with pytest.raises(FencedError):
        apply_cold(former, topic.store, plan)
    assert topic.descriptors() == published
    assert topic.object_names() == topic.names_in_catalog()


def test_a_replaced_owner_that_is_in_the_middle_of_it_deletes_no_object(topic: PublishedTopic) -> None:
    """It finds out between two objects, and leaves the rest to the new owner."""
    topic.publish_hourly(3)
    former = topic.owned
    former.move_start(20)
    topic.take_over("b")
    with pytest.raises(FencedError):
        finish_cold(former, topic.store)
    assert len(topic.object_names()) == 3
    finish_cold(topic.owned, topic.store)
    assert topic.object_names() == topic.names_in_catalog()


def test_an_object_that_is_named_again_is_not_deleted(topic: PublishedTopic) -> None:
    """A plan is a list of descriptors as they were; what is in the catalog now decides."""
    published = topic.publish_hourly(2)
    stale = msgspec.structs.replace(published[0], created_us=1)
    plan = ColdPlan(start_offset=10, descriptors=(stale,), reasons=("age",), bytes=1)
    apply_cold(topic.owned, topic.store, plan)
    assert topic.object_names() == topic.names_in_catalog()
    assert len(topic.object_names()) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_anywhere_in_a_deletion_is_finished_by_the_next_owner(kind: str) -> None:
    """Never a hole, never a descriptor without its object, and after the sweep nothing is left over."""
    prepared = World(multi_key=kind == "multi-key")
    with topic_in(prepared, kind) as first:
        first.publish_hourly(4, count=3)

    def workload(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            topic.clock.advance(4 * HOUR)
            apply_cold(topic.owned, topic.store, plan_of(topic, age=2 * HOUR + 1))

    def check(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            assert topic.catalog.start_offset() in (0, 6)
            assert set(topic.names_in_catalog()) <= set(topic.object_names())
            assert topic.catalog.covers(topic.catalog.start_offset(), 12)
            finish_cold(topic.owned, topic.store)
            collector = Collector(topic.catalog, topic.store, 0, owned=topic.owned)
            collector.apply(collector.plan())
            assert topic.object_names() == topic.names_in_catalog()
            assert topic.catalog.covers(topic.catalog.start_offset(), 12)
            assert topic.catalog.next_offset() == 12

    cut_world_everywhere(workload, check, start=lambda crash_at: prepared.after_crash("keep", crash_at=crash_at))


# Local files


def files_of(*sizes: int, first_offset: int = 0, hours: bool = True) -> list[FileSpan]:
    """Files of so many messages, a byte each, one an hour."""
    spans = []
    for index, size in enumerate(sizes):
        begun_us = index * HOUR * SECOND_US
        spans.append(FileSpan(first_offset, first_offset + size, size, begun_us, begun_us + 1 if hours else None))
        first_offset += size
    return spans


@pytest.mark.parametrize(
    ("covered", "age", "size", "expected"),
    [
        (100, None, None, 5),
        (100, 0, None, 35),
        (100, None, 0, 35),
        (100, None, 20, 25),
        (100, None, 40, 5),
        (100, 2 * HOUR, None, 25),
        (25, 0, None, 25),
        (24, 0, None, 15),
        (0, 0, None, 5),
        (None, 0, None, 35),
        (None, 2 * HOUR, 15, 35),
    ],
)
def test_local_files_go_oldest_first_and_only_when_covered(
    covered: int | None, age: int | None, size: int | None, expected: int
) -> None:
    """The newest file stays, and so does the first that is not covered, with all behind it."""
    files = files_of(10, 10, 10, 10, first_offset=5)
    assert plan_local(files, covered, 3 * HOUR * SECOND_US + 10, age, size) == expected


def test_a_file_without_times_is_as_old_as_the_next_one_is() -> None:
    """Its messages may be as young as its end: when the next file began."""
    files = files_of(10, 10, 10, hours=False)
    now_us = 2 * HOUR * SECOND_US
    assert plan_local(files, None, now_us, HOUR, None) == 0
    assert plan_local(files, None, now_us, HOUR - 1, None) == 10


def test_a_log_without_files_has_nothing_to_remove() -> None:
    """A new log is no special case."""
    assert plan_local([], 10, 0, 0, 0) == 0


def test_a_file_is_safe_to_remove_when_the_store_has_it(topic: PublishedTopic) -> None:
    """Whole ranges only, and only what is published."""
    topic.publish_hourly(3)
    topic.upload(30, 39)
    for first, behind, expected in [(0, 30, True), (5, 25, True), (0, 31, False), (30, 40, False), (29, 30, True)]:
        assert is_safe_to_remove(topic.catalog, topic.store, first, behind) is expected


def test_what_is_below_the_start_needs_no_copy(topic: PublishedTopic) -> None:
    """Nobody may read it any more."""
    topic.publish_hourly(3)
    apply_cold(topic.owned, topic.store, plan_of(topic, age=HOUR + 1))
    assert topic.catalog.start_offset() == 20
    assert is_safe_to_remove(topic.catalog, topic.store, 0, 20)
    assert is_safe_to_remove(topic.catalog, topic.store, 5, 30)
    assert not is_safe_to_remove(topic.catalog, topic.store, 5, 31)


@pytest.mark.parametrize("spoil", [lambda data: None, lambda data: data[:-1]], ids=["gone", "cut short"])
def test_a_file_stays_when_its_object_is_not_what_was_published(
    topic: PublishedTopic, spoil: Callable[[bytes], bytes | None]
) -> None:
    """The catalog alone is not believed: the object is asked for."""
    second = topic.publish_hourly(3)[1]
    key = KEYS.object(second.name)
    spoilt = spoil(topic.store.get(key).data)
    if spoilt is None:
        topic.store.delete(key)
    else:
        topic.store.put(key, spoilt)
    files = files_of(10, 10, 10)
    assert safe_below(files, 30, topic.catalog, topic.store) == 10
    assert not is_safe_to_remove(topic.catalog, topic.store, 10, 20)


def test_the_messages_of_a_later_owner_are_no_copy_of_ours(topic: PublishedTopic) -> None:
    """Loses, without this: a replaced owner prunes what it never shipped, since somebody else used the offsets."""
    topic.publish(10)
    former = topic.epoch
    topic.take_over("b")
    topic.publish(10)
    assert is_safe_to_remove(topic.catalog, topic.store, 10, 20)
    assert not is_safe_to_remove(topic.catalog, topic.store, 10, 20, max_epoch=former)
    assert safe_below(files_of(10, 10, 10), 30, topic.catalog, topic.store, max_epoch=former) == 10


@pytest.mark.parametrize("fault", ["unavailable", "denied"])
def test_what_cannot_be_asked_is_an_error(fault: str) -> None:
    """Nothing is deleted because something could not be read."""
    topic = PublishedTopic()
    topic.publish_hourly(2)
    assert isinstance(topic.store, FaultyStore)
    topic.store.fail("head", fault)  # type: ignore[arg-type]
    with pytest.raises((StoreUnavailableError, AccessDeniedError)):
        is_safe_to_remove(topic.catalog, topic.store, 0, 20)
    topic.metadata.fail("*", fault, times=None)  # type: ignore[attr-defined]
    for look in (lambda: is_safe_to_remove(topic.catalog, topic.store, 0, 20), lambda: plan_of(topic, age=1)):
        with pytest.raises((StoreUnavailableError, AccessDeniedError)):
            look()


def test_an_outage_in_the_middle_is_finished_later(topic: PublishedTopic) -> None:
    """The store goes away between two deletions; the next round removes the rest."""
    topic.publish_hourly(4)
    assert isinstance(topic.store, FaultyStore)
    plan = plan_of(topic, age=HOUR + 1)
    topic.store.fail("delete", nth=2, matching="data-*")
    with pytest.raises(StoreUnavailableError):
        apply_cold(topic.owned, topic.store, plan)
    assert topic.catalog.start_offset() == 30
    apply_cold(topic.owned, topic.store, plan)
    assert topic.object_names() == topic.names_in_catalog()
