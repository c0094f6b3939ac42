"""A compaction beside those who delete, sweep and rebuild: whoever is faster, nothing is lost or comes back."""

from __future__ import annotations

import pytest
from tests.cold.published import KEYS, KINDS, TIME_FIELD, PublishedTopic
from tests.cold.replacing import (
    HOUR,
    Watched,
    built,
    clean_up,
    compact,
    plan_of,
    read_all,
    sweeping,
    tell,
)

from tidelog.cold.catalog import Catalog
from tidelog.cold.rebuild import rebuild_catalog
from tidelog.cold.retention import apply_cold, finish_cold, plan_cold
from tidelog.cold.rewrite_commit import begin
from tidelog.cold.stale_catalog import refuse_stale_catalog
from tidelog.errors import ConflictError, DataError
from tidelog.store.keys import ObjectId
from tidelog.testing import FaultyMetadata

# Retention, beside it


def test_retention_that_is_faster_stops_the_switch(topic: PublishedTopic) -> None:
    """An object that begins below the start is not brought back; what was made for nothing goes."""
    topic.publish_hourly(6)
    work = begin(topic.catalog, topic.store, topic.clock)
    made = built(topic, work, plan_of(topic))
    apply_cold(topic.owned, topic.store, plan_cold(topic.catalog, topic.clock.now_us(), 5 * HOUR - 1, None))
    kept = topic.names_in_catalog()
    assert (kept[0].start, work.switch(made)) == (20, [])
    assert topic.names_in_catalog() == kept
    topic.clock.advance(HOUR)
    report = clean_up(topic)
    assert report.objects[0] == KEYS.object(ObjectId(0, 49, 1, 1))
    assert topic.object_names() == kept


def test_retention_keeps_a_compacted_object_until_all_of_it_is_due(topic: PublishedTopic) -> None:
    """Then it goes as any other, with what a crash left of the old ones."""
    topic.publish_hourly(6)
    planned = plan_cold(topic.catalog, topic.clock.now_us(), 5 * HOUR - 1, None)
    compact(topic)
    apply_cold(topic.owned, topic.store, planned)
    assert topic.names_in_catalog() == [ObjectId(0, 49, 1, 1), ObjectId(50, 59, 1)]
    assert [offset for offset, _ in read_all(topic)] == list(range(20, 60))
    apply_cold(topic.owned, topic.store, plan_cold(topic.catalog, topic.clock.now_us(), HOUR + 1, None))
    finish_cold(topic.owned, topic.store)
    assert topic.names_in_catalog() == [ObjectId(50, 59, 1)]
    topic.clock.advance(HOUR)
    clean_up(topic)
    assert topic.object_names() == [ObjectId(50, 59, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", range(12))
def test_retention_at_any_step_of_a_switch_loses_nothing(kind: str, step: int) -> None:
    """Loses, without versions on both sides: the owner deletes the descriptor that has just replaced an old one."""
    watched = Watched(kind)
    topic = watched.topic
    topic.publish_hourly(6, count=3)
    expected = read_all(topic)
    plan = plan_cold(topic.catalog, topic.clock.now_us(), 5 * HOUR - 1, None)
    left = [step]

    def look() -> None:
        left[0] -= 1
        if left[0] == -1:
            apply_cold(topic.owned, topic.store, plan)

    watched.look = look
    compact(topic)
    watched.look = None
    apply_cold(topic.owned, topic.store, plan)
    assert read_all(topic) == expected[6:]
    assert topic.catalog.covers(6, 18)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", range(8))
def test_a_switch_at_any_step_of_retention_loses_nothing(kind: str, step: int) -> None:
    """The owner has read a descriptor and is about to remove it when it is replaced."""
    watched = Watched(kind)
    topic = watched.topic
    topic.publish_hourly(6, count=3)
    expected = read_all(topic)
    work = begin(topic.catalog, topic.store, topic.clock)
    made = built(topic, work, plan_of(topic))
    left = [step]

    def look() -> None:
        left[0] -= 1
        if left[0] == -1:
            work.switch(made)

    watched.look = look
    try:
        apply_cold(topic.owned, topic.store, plan_cold(topic.catalog, topic.clock.now_us(), 5 * HOUR - 1, None))
    except ConflictError:
        finish_cold(topic.owned, topic.store)
    watched.look = None
    assert read_all(topic) == expected[6:]
    assert topic.catalog.covers(6, 18)


# The sweep, and rebuilding


@pytest.mark.parametrize("is_newer", [True, False])
def test_the_sweep_leaves_alone_what_is_being_made(topic: PublishedTopic, is_newer: bool) -> None:
    """Loses, without this: a sweep removes a new object right before the catalog switches to it."""
    topic.publish_hourly(4)
    if is_newer:
        topic.take_over("b")
    work = begin(topic.catalog, topic.store, topic.clock)
    made = built(topic, work, plan_of(topic))
    plan = sweeping(topic).plan()
    assert tell(plan) == {"keep in-progress": 1}
    sweeping(topic).apply(plan)
    work.switch(made)
    after = sweeping(topic).plan()
    assert tell(after) == {"keep recent": 3}
    assert sweeping(topic).apply(after).objects == ()


@pytest.mark.parametrize("is_newer", [True, False])
def test_the_sweep_removes_what_was_made_in_vain(topic: PublishedTopic, is_newer: bool) -> None:
    """An abandoned generation is nobody's, whatever epoch its objects are of."""
    topic.publish_hourly(4)
    work = begin(topic.catalog, topic.store, topic.clock)
    built(topic, work, plan_of(topic))
    work.abandon()
    if is_newer:
        topic.take_over("b")
    plan = sweeping(topic).plan()
    assert tell(plan) == {"remove orphan": 1}
    assert sweeping(topic).apply(plan).objects == (KEYS.object(ObjectId(0, 29, 1, 1)),)


def test_who_fails_is_in_nobodys_way(topic: PublishedTopic) -> None:
    """What it was building is given up at once, so that the next one may begin; its own error is what is told."""
    topic.publish_hourly(4)
    work = begin(topic.catalog, topic.store, topic.clock)
    with pytest.raises(ConflictError, match="under way"):
        begin(topic.catalog, topic.store, topic.clock)
    built(topic, work, plan_of(topic))
    with pytest.raises(ZeroDivisionError), work.abandoned_on_error():
        raise ZeroDivisionError
    assert begin(topic.catalog, topic.store, topic.clock).generation > work.generation


def rebuilt(topic: PublishedTopic) -> list[ObjectId]:
    rebuild_catalog(
        topic.metadata, KEYS, topic.store, clock=topic.clock, time_field=TIME_FIELD, replace=True, node="rebuild"
    )
    return topic.names_in_catalog()


def test_a_rebuild_prefers_what_was_compacted(topic: PublishedTopic) -> None:
    """While the old objects wait for their deletion, and when they are gone."""
    topic.publish_hourly(6)
    expected = read_all(topic)
    compact(topic)
    names = [ObjectId(0, 49, 1, 1), ObjectId(50, 59, 1)]
    assert (rebuilt(topic), read_all(topic)) == (names, expected)
    topic.clock.advance(HOUR)
    assert len(clean_up(topic).objects) == 5
    assert (rebuilt(topic), read_all(topic)) == (names, expected)


def test_a_rebuild_in_the_middle_of_a_compaction_is_not_undone(topic: PublishedTopic) -> None:
    """The versions are others then: the switch does not happen, or has happened, and nothing is lost."""
    topic.publish_hourly(6)
    expected = read_all(topic)
    work = begin(topic.catalog, topic.store, topic.clock)
    made = built(topic, work, plan_of(topic))
    rebuilt(topic)
    work.switch(made)
    assert read_all(topic) == expected
    topic.clock.advance(HOUR)
    clean_up(topic)
    assert read_all(topic) == expected


def test_a_catalog_that_was_lost_does_not_make_a_name_used_twice(topic: PublishedTopic) -> None:
    """The generation goes on behind those that the names of the objects tell."""
    topic.publish_hourly(6)
    compact(topic)
    topic.metadata.delete(KEYS.rewrite_state)
    assert begin(topic.catalog, topic.store, topic.clock).generation == 2


@pytest.mark.parametrize("known", [2, 3, 5])
@pytest.mark.parametrize("is_cleaned", [True, False])
def test_a_catalog_from_before_a_compaction_is_not_gone_on_with(known: int, is_cleaned: bool) -> None:
    """Loses, without this: the metadata comes from a backup, and no object begins where that ends."""
    metadata = FaultyMetadata()
    topic = PublishedTopic(metadata=metadata)
    topic.publish_hourly(known)
    backup = metadata.contents()
    topic.publish_hourly(6 - known)
    compact(topic)
    refuse_stale_catalog(topic.catalog, topic.store)
    if is_cleaned:
        topic.clock.advance(HOUR)
        clean_up(topic)
        refuse_stale_catalog(topic.catalog, topic.store)
    restored = FaultyMetadata()
    for key, value in backup.items():
        restored.put(key, value)
    with pytest.raises(DataError, match="older than the bucket"):
        refuse_stale_catalog(Catalog(restored, KEYS), topic.store, known_epoch=0 if known == 5 else None)
