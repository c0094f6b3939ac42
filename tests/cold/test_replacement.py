"""Many objects become one while others read, ship, delete and crash: no offset is ever without its message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.cold.published import KEYS, KINDS, TIME_FIELD, PublishedTopic, topic_in
from tests.cold.replacing import (
    HOUR,
    Watched,
    built,
    clean_up,
    cleanup_of,
    compact,
    plan_of,
    read_all,
    state_of,
    sweeping,
    tell,
)

from tidelog.cold.catalog import Codec
from tidelog.cold.gc import Candidate, Reason, Report
from tidelog.cold.reader import History as Cold
from tidelog.cold.rewrite_commit import begin, finish
from tidelog.cold.verify import check_cold
from tidelog.errors import ConflictError, NotFoundError
from tidelog.findings import About
from tidelog.store.keys import ObjectId
from tidelog.store.metadata.base import Check, Write
from tidelog.testing import History, World, cut_world_everywhere

# Switching


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_one_object_takes_the_place_of_many(topic: PublishedTopic, codec: Codec) -> None:
    """The same messages, in fewer objects; the newest one stays as it is, and the owner goes on publishing."""
    topic.publish_hourly(9)
    before, newest = read_all(topic), topic.descriptors()[-1]
    (switched,) = compact(topic, codec=codec)
    assert topic.names_in_catalog() == [ObjectId(0, 79, 1, 1), newest.name]
    assert topic.descriptors() == [switched.descriptor, newest]
    assert read_all(topic) == before
    topic.publish(10)
    assert [offset for offset, _ in read_all(topic)] == list(range(100))
    examined = check_cold(topic.catalog, topic.store, About("topic"), TIME_FIELD)
    assert (list(examined.findings()), examined.counts()["object_messages"]) == ([], 100)


def test_what_remembers_the_old_catalog_finds_everything(topic: PublishedTopic) -> None:
    """A reader elsewhere knows where objects began: each offset is found, by offset and by time."""
    descriptors = topic.publish_hourly(9)
    old = topic.catalog
    assert all(old.at(offset) is not None for offset in range(90))
    compact(topic)
    for offset in range(90):
        found = old.at(offset)
        assert found is not None
        assert found.start_offset <= offset <= found.end_offset
    for descriptor in descriptors:
        assert descriptor.last_time_us is not None
        found = old.first_for_time(descriptor.last_time_us)
        assert found is not None
        assert found.start_offset <= descriptor.start_offset <= found.end_offset


@pytest.mark.parametrize("kind", KINDS)
def test_every_offset_is_found_at_every_step(kind: str) -> None:
    """Before each change of the catalog, and after the last: by a new reader and by one that has been there before."""
    watched = Watched(kind)
    topic = watched.topic
    topic.publish_hourly(6, count=3)
    expected = read_all(topic)
    remembered = topic.catalog
    read_all(topic, remembered)

    def look() -> None:
        assert read_all(topic) == read_all(topic, remembered) == expected
        assert topic.catalog.covers(0, 18)
        assert remembered.covers(0, 18)
        assert [topic.catalog.at(offset) is not None for offset in range(18)] == [True] * 18
        assert topic.catalog.next_offset() == 18

    watched.look = look
    compact(topic)
    watched.look = None
    look()
    assert watched.looks > (3 if kind == "multi-key" else 8)
    assert topic.names_in_catalog() == [ObjectId(0, 14, 1, 1), ObjectId(15, 17, 1)]


def test_a_walk_that_was_overtaken_sees_no_hole(topic: PublishedTopic) -> None:
    """Who has read an old descriptor and wants the next one gets the new one, which has it."""
    topic.publish_hourly(6)
    walk = topic.catalog.walk(0)
    first = next(walk)
    compact(topic)
    rest = list(walk)
    assert (first.end_offset, [one.name for one in rest]) == (9, [ObjectId(0, 49, 1, 1), ObjectId(50, 59, 1)])


def test_a_check_that_was_overtaken_finds_nothing_wrong(topic: PublishedTopic) -> None:
    """What a compaction replaces while history is verified is neither a gap nor there twice."""
    topic.publish_hourly(6)
    is_done: list[bool] = []

    def on_progress(done: int, total: int) -> None:
        if not is_done:
            is_done.append(True)
            compact(topic)

    assert list(check_cold(topic.catalog, topic.store, About("topic"), TIME_FIELD, on_progress).findings()) == []


def test_a_reader_goes_on_when_its_object_is_deleted(topic: PublishedTopic) -> None:
    """It holds a descriptor of an object that is gone: the catalog says where its messages are now."""
    topic.publish_hourly(6)
    expected = read_all(topic)
    with ThreadPoolExecutor(2) as executor:
        reader = Cold(topic.catalog, topic.store, executor).read(0, 60)
        batch = reader.next_batch()
        assert batch is not None
        assert batch.next_offset == 10
        compact(topic)
        topic.clock.advance(HOUR)
        assert len(clean_up(topic).objects) == 5
        found = [offset for offset, _ in expected[:10]]
        while (batch := reader.next_batch()) is not None:
            found += range(batch.first_offset, batch.next_offset)
    assert found == list(range(60))


def test_compacting_again_takes_in_what_came_since(topic: PublishedTopic) -> None:
    """Generation by generation; a large object is left alone until there is as much beside it."""
    topic.publish_hourly(9)
    compact(topic)
    topic.publish(2)
    topic.publish(2)
    assert plan_of(topic) == []
    topic.publish_hourly(9)
    expected = read_all(topic)
    compact(topic)
    assert topic.names_in_catalog()[0] == ObjectId(0, 173, 1, 2)
    assert read_all(topic) == expected


def test_a_long_run_is_switched_in_several_transactions() -> None:
    """More keys than a transaction takes: the catalog has one object for all of them in the end."""
    topic = PublishedTopic()
    for _ in range(251):
        topic.publish(1)
    expected = read_all(topic)
    compact(topic)
    assert topic.names_in_catalog() == [ObjectId(0, 249, 1, 1), ObjectId(250, 250, 1)]
    assert read_all(topic) == expected


# Several at once


def test_of_two_compactions_one_is_told_so(topic: PublishedTopic) -> None:
    """While somebody is at work nobody else begins."""
    topic.publish_hourly(4)
    begin(topic.catalog, topic.store, topic.clock)
    with pytest.raises(ConflictError, match="is under way"):
        begin(topic.catalog, topic.store, topic.clock)


def test_who_begins_a_moment_later_is_told_who_is_at_work(
    topic: PublishedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that look at the same moment find nobody at work; the slower one looks again."""
    topic.publish_hourly(4)
    metadata = topic.catalog.metadata
    commit = metadata.commit

    def overtaken(checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        monkeypatch.setattr(metadata, "commit", commit)
        begin(topic.catalog, topic.store, topic.clock)
        return commit(checks, writes)

    monkeypatch.setattr(metadata, "commit", overtaken)
    with pytest.raises(ConflictError, match="is under way"):
        begin(topic.catalog, topic.store, topic.clock)


def test_who_was_taken_over_changes_nothing(topic: PublishedTopic) -> None:
    """It finds out when it wants to switch; what the other one does counts."""
    topic.publish_hourly(4)
    slow = begin(topic.catalog, topic.store, topic.clock)
    made = built(topic, slow, plan_of(topic))
    fast = begin(topic.catalog, topic.store, topic.clock, take_over=True)
    with pytest.raises(ConflictError, match="taken over"):
        slow.renew()
    fast.switch(built(topic, fast, plan_of(topic)))
    with pytest.raises(ConflictError, match="taken over"):
        slow.switch(made)
    assert topic.names_in_catalog()[0] == ObjectId(0, 29, 1, 2)
    assert tell(sweeping(topic).plan()) == {"remove orphan": 1, "keep recent": 3}


def test_who_has_been_silent_for_long_is_taken_over(topic: PublishedTopic) -> None:
    """A dead process does not hold up a topic; one that says that it is there does."""
    topic.publish_hourly(4)
    work = begin(topic.catalog, topic.store, topic.clock)
    topic.clock.advance(100)
    work.renew()
    topic.clock.advance(100)
    with pytest.raises(ConflictError, match="is under way"):
        begin(topic.catalog, topic.store, topic.clock)
    topic.clock.advance(100)
    assert begin(topic.catalog, topic.store, topic.clock).generation == 2


def test_a_process_of_this_machine_that_is_gone_is_taken_over_at_once(topic: PublishedTopic) -> None:
    """Who kills a compaction and runs it again does not have to wait."""
    topic.publish_hourly(4)
    begin(topic.catalog, topic.store, topic.clock)
    dead = msgspec.structs.replace(state_of(topic), pid=2**22 + 1)
    topic.metadata.put(KEYS.rewrite_state, msgspec.json.encode(dead))
    assert begin(topic.catalog, topic.store, topic.clock).generation == 2


def test_a_cleanup_does_not_disturb_who_builds(topic: PublishedTopic) -> None:
    """What waits is deleted while the next generation is made."""
    topic.publish_hourly(4)
    compact(topic)
    topic.publish_hourly(9)
    topic.clock.advance(HOUR)
    work = begin(topic.catalog, topic.store, topic.clock)
    made = built(topic, work, plan_of(topic))
    assert len(clean_up(topic).objects) == 3
    assert len(work.switch(made)) == 1
    assert [one.generation for one in state_of(topic).waiting] == [2]


# Cleaning up


def test_the_old_objects_go_some_time_after_the_switch(topic: PublishedTopic) -> None:
    """Not before: somebody may be reading them."""
    topic.publish_hourly(6)
    compact(topic)
    assert tell(cleanup_of(topic).plan()) == {"keep recent": 5}
    topic.clock.advance(HOUR)
    plan = cleanup_of(topic).plan()
    assert tell(plan) == {"remove replaced": 5}
    report = cleanup_of(topic).apply(plan)
    assert (len(report.objects), report.bytes, report.kept) == (5, plan.bytes, ())
    assert topic.object_names() == topic.names_in_catalog()
    assert (clean_up(topic), state_of(topic).waiting) == (Report(), ())
    assert cleanup_of(topic).apply(plan) == Report(), "there is nothing to tell the second time"
    assert topic.metadata.keys(KEYS.rewrites_prefix) == [KEYS.rewrite_state]


def test_what_was_compacted_twice_is_deleted_once(topic: PublishedTopic) -> None:
    """The object of one generation is what the next one replaced: it is told once."""
    topic.publish_hourly(4)
    compact(topic)
    topic.publish_hourly(6)
    compact(topic)
    topic.clock.advance(HOUR)
    plan = cleanup_of(topic).plan()
    report = cleanup_of(topic).apply(plan)
    assert len(report.objects) == len(set(report.objects)) == len(plan.removable) == 3 + 1 + 6
    assert (report.bytes, report.kept) == (plan.bytes, ())
    assert topic.object_names() == topic.names_in_catalog() == [ObjectId(0, 89, 1, 2), ObjectId(90, 99, 1)]


def test_old_objects_stay_while_the_new_one_is_missing(topic: PublishedTopic) -> None:
    """They may be the only copy: what is not there is not relied upon."""
    topic.publish_hourly(6)
    compact(topic)
    topic.store.delete(KEYS.object(ObjectId(0, 49, 1, 1)))
    topic.clock.advance(HOUR)
    report = clean_up(topic)
    assert (report.objects, [one.reason for one in report.kept]) == ((), [Reason.ONLY_COPY] * 5)
    assert len(clean_up(topic).kept) == 5, "what stayed is not forgotten"


def test_published_objects_stay_whatever_a_plan_says_of_them(topic: PublishedTopic) -> None:
    """Loses, without this: of many keys only the first are asked for, and what is behind them counts as unpublished."""
    published = topic.publish_hourly(9)
    wanted = [
        Candidate(kind="replaced object", action="remove", reason=Reason.REPLACED, key=KEYS.object(one.name), by="x")
        for one in (published[0], published[6], published[7])
    ]
    plan = msgspec.structs.replace(cleanup_of(topic).plan(), found=tuple(wanted))
    report = cleanup_of(topic).apply(plan)
    assert (report.objects, [one.reason for one in report.kept]) == ((), [Reason.NEEDED] * 3)
    assert topic.object_names() == topic.names_in_catalog()


def test_a_new_owner_stops_the_cleanup(topic: PublishedTopic) -> None:
    """It may be a rebuild that looks at the objects just now; the next cleanup goes on."""
    topic.publish_hourly(6)
    compact(topic)
    topic.clock.advance(HOUR)
    plan = cleanup_of(topic).plan()
    topic.take_over("b")
    assert cleanup_of(topic).apply(plan).objects == ()
    assert len(clean_up(topic).objects) == 5


def test_a_deleted_topic_is_not_compacted(topic: PublishedTopic) -> None:
    """Neither at the beginning nor when it was deleted meanwhile."""
    topic.publish_hourly(4)
    work = begin(topic.catalog, topic.store, topic.clock)
    made = built(topic, work, plan_of(topic))
    topic.owned.mark_deleted()
    with pytest.raises(NotFoundError, match="deleted"):
        work.switch(made)
    with pytest.raises(NotFoundError, match="deleted"):
        begin(topic.catalog, topic.store, topic.clock, take_over=True)


# Crashes


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_anywhere_in_a_compaction_is_made_good_by_the_next(kind: str) -> None:
    """At each changing call: all messages are there at once, and another run ends as an undisturbed one does."""
    prepared = World(multi_key=kind == "multi-key")
    with topic_in(prepared, kind) as first:
        first.publish_hourly(5, count=3)
        expected = read_all(first)
        first.upload(15, 16)  # of an owner that crashed, which must not get in the way
    final = [ObjectId(0, 11, 1), ObjectId(12, 14, 1)]

    def work_on(topic: PublishedTopic) -> None:
        replacing = begin(topic.catalog, topic.store, topic.clock, take_over=True)
        runs = plan_of(topic)
        replacing.switch(built(topic, replacing, runs)) if runs else replacing.abandon()
        topic.clock.advance(HOUR)
        clean_up(topic)

    def workload(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            work_on(topic)

    def check(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            assert read_all(topic) == expected
            work_on(topic)
            assert read_all(topic) == expected
            assert [name[:3] for name in topic.names_in_catalog()] == [name[:3] for name in final]
            work_on(topic)
            sweeping(topic).apply(sweeping(topic).plan())
            left = [name for name in topic.object_names() if name.start < 15]
            assert left == topic.names_in_catalog()
            assert topic.metadata.keys(KEYS.rewrites_prefix) == [KEYS.rewrite_state]

    cut_world_everywhere(workload, check, start=lambda crash_at: prepared.after_crash("keep", crash_at=crash_at))


def test_anybody_can_finish_a_switch(topic: PublishedTopic) -> None:
    """Twice as well as once, and nothing is left to do then."""
    topic.publish_hourly(5)
    expected = read_all(topic)
    work = begin(topic.catalog, topic.store, topic.clock)
    made = built(topic, work, plan_of(topic))
    for one in made:
        topic.metadata.put(KEYS.replacement(1, one.descriptor.start_offset), msgspec.json.encode(one))
    switching = msgspec.structs.replace(state_of(topic), phase="switching", starts=(0,))
    topic.metadata.put(KEYS.rewrite_state, msgspec.json.encode(switching))
    assert len(finish(topic.catalog, topic.clock)) == 1
    assert (finish(topic.catalog, topic.clock), read_all(topic)) == ([], expected)
    topic.metadata.put(KEYS.rewrite_state, msgspec.json.encode(switching))
    assert len(finish(topic.catalog, topic.clock)) == 1
    assert read_all(topic) == expected
