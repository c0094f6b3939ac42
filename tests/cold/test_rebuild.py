"""The bucket alone gives a topic back: its catalog is made anew from the objects, and nothing is made up."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.cold.published import KEYS, KINDS, TIME_FIELD, PublishedTopic, open_metadata, put_object, topic_in

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog, Codec
from tidelog.cold.rebuild import RebuildReport, rebuild_catalog, topics_in
from tidelog.errors import (
    ConflictError,
    CorruptionError,
    FencedError,
    GapError,
    InputError,
    NotFoundError,
    StoreUnavailableError,
)
from tidelog.store.keys import ObjectId, TopicKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import open_store
from tidelog.testing import FaultyStore, History, World, cut_world_everywhere

NOW_US = 1_700_000_000_000_000


def rebuild(
    metadata: MetadataStore,
    store: ObjectStore,
    *,
    allow_gaps: bool = False,
    replace: bool = False,
    start_offset: int | None = None,
) -> RebuildReport:
    return rebuild_catalog(
        *(metadata, KEYS, store),
        clock=ManualClock(),
        time_field=TIME_FIELD,
        allow_gaps=allow_gaps,
        replace=replace,
        start_offset=start_offset,
    )


def rebuild_from(store: ObjectStore, *, allow_gaps: bool = False, start_offset: int | None = None) -> RebuildReport:
    """Into an empty metadata store."""
    metadata = open_metadata("multi-key", store)
    return rebuild(metadata, store, allow_gaps=allow_gaps, start_offset=start_offset)


def lose_catalog(topic: PublishedTopic, but: str | None = None) -> None:
    for key in topic.metadata.keys(KEYS.metadata_prefix):
        if key != but:
            topic.metadata.delete(key)


def put_all(store: ObjectStore, *names: tuple[int, int, int], codec: Codec = "none") -> None:
    for name in names:
        put_object(store, ObjectId(*name), NOW_US, codec)


def spoil(store: ObjectStore, name: tuple[int, ...], at: int = -1) -> None:
    """Changes one byte of an object."""
    key = KEYS.object(ObjectId(*name))
    data = bytearray(store.get(key).data)
    data[at] ^= 1
    store.put(key, bytes(data))


# The whole way


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_bucket_alone_gives_the_topic_back(topic: PublishedTopic, codec: Codec) -> None:
    """The new catalog says what the lost one said, to the last index entry."""
    published = []
    for count in (10, 3, 25):
        published.append(topic.publish(count, codec=codec))
        topic.clock.advance(60)
    named = topic.catalog.named_starts()
    lose_catalog(topic)
    report = rebuild(topic.metadata, topic.store)
    assert topic.descriptors() == published
    assert (report.objects, report.messages, report.start_offset, report.next_offset) == (3, 38, 0, 38)
    assert report.bytes == sum(one.size for one in published)
    assert (report.orphans, report.gaps, report.damaged, report.foreign) == ((), (), (), ())
    assert topic.catalog.named_starts() == named
    owner = topic.catalog.owner()
    assert owner is not None
    assert (owner[0].node, owner[0].epoch) == ("rebuild", 2)


def test_a_rebuilt_topic_goes_on(topic: PublishedTopic) -> None:
    """The next owner has a higher epoch than anybody before, and the next offset."""
    topic.publish(10)
    former = topic.owned
    lose_catalog(topic)
    rebuild(topic.metadata, topic.store)
    with pytest.raises(FencedError):
        former.ownership.verify()
    assert topic.take_over("b").epoch == 3
    assert topic.publish(5).start_offset == 10
    assert topic.catalog.covers(0, 15)


def test_a_replaced_owner_cannot_publish_into_a_rebuilt_topic(topic: PublishedTopic) -> None:
    """However late it wakes up."""
    topic.publish(10)
    former, late = topic.owned, topic.upload(10, 14)
    lose_catalog(topic)
    topic.store.delete(KEYS.object(late.name))
    rebuild(topic.metadata, topic.store)
    with pytest.raises(FencedError):
        former.publish(late)
    assert topic.catalog.next_offset() == 10


def test_times_are_the_least_and_the_greatest(topic: PublishedTopic) -> None:
    """Also where they go back: the reached time never does."""
    topic.publish(3)
    topic.clock.advance(-50)
    topic.publish(3)
    lose_catalog(topic)
    rebuild(topic.metadata, topic.store)
    first, second = topic.descriptors()
    assert second.last_time_us is not None
    assert first.last_time_us is not None
    assert second.last_time_us < first.last_time_us == second.reached_time_us


def test_what_is_left_of_the_metadata_is_kept(topic: PublishedTopic) -> None:
    """Cursors survive, and the start does not go back."""
    topic.publish_hourly(3)
    topic.owned.move_cursor("billing", 12)
    topic.owned.move_start(15)
    topic.metadata.delete(KEYS.owner)
    report = rebuild(topic.metadata, topic.store)
    assert (report.start_offset, report.next_offset, report.objects) == (15, 30, 2)
    assert report.below_start == (KEYS.object(ObjectId(0, 9, 1)),)
    assert topic.catalog.start_offset() == 15
    assert [one.start_offset for one in topic.descriptors()] == [10, 20]
    cursor = topic.catalog.cursor("billing")
    assert cursor is not None
    assert cursor[0].offset == 12


def test_a_topic_of_which_retention_left_nothing_keeps_its_end(topic: PublishedTopic) -> None:
    """The start says where it goes on."""
    topic.publish_hourly(2)
    topic.owned.move_start(20)
    topic.metadata.delete(KEYS.owner)
    report = rebuild(topic.metadata, topic.store)
    assert (report.objects, report.start_offset, report.next_offset) == (0, 20, 20)
    assert topic.descriptors() == []
    assert topic.catalog.next_offset() == 20


def test_a_damaged_catalog_is_no_hindrance(topic: PublishedTopic) -> None:
    """What cannot be understood is what a rebuild is for, the owner's entry and the start included."""
    published = topic.publish_hourly(2)
    for key in topic.metadata.keys(KEYS.metadata_prefix):
        topic.metadata.put(key, b"\xff{")
    with pytest.raises(InputError, match="has a catalog"):
        rebuild(topic.metadata, topic.store)
    rebuild(topic.metadata, topic.store, replace=True)
    assert [one.name for one in topic.descriptors()] == [one.name for one in published]
    assert topic.take_over("b").epoch > 1


# Replacing a catalog


def test_a_catalog_is_replaced_only_on_demand(topic: PublishedTopic) -> None:
    """And its owner is fenced then."""
    published = topic.publish_hourly(2)
    former = topic.owned
    with pytest.raises(InputError, match="has a catalog"):
        rebuild(topic.metadata, topic.store)
    former.ownership.verify()
    rebuild(topic.metadata, topic.store, replace=True)
    with pytest.raises(FencedError):
        former.move_start(10)
    assert [one.name for one in topic.descriptors()] == [one.name for one in published]


def test_a_replaced_catalog_keeps_its_disk_when_it_ends_at_the_same_offset(topic: PublishedTopic) -> None:
    """What the owner accepted and did not ship is still the end of the topic."""
    topic.publish(10)
    rebuild(topic.metadata, topic.store, replace=True)
    owner = topic.catalog.owner()
    assert owner is not None
    assert owner[0].incarnation == topic.owned.ownership.owner.incarnation
    topic.upload(10, 12, epoch=1)
    rebuild(topic.metadata, topic.store, replace=True)
    owner = topic.catalog.owner()
    assert owner is not None
    assert owner[0].incarnation == owner[0].claim


def test_a_rebuild_that_is_refused_leaves_the_catalog_as_it_was(topic: PublishedTopic) -> None:
    """The owner is fenced, and nothing else has happened: its disk is still the end of the topic."""
    published = topic.publish_hourly(3)
    spoil(topic.store, published[1].name)
    with pytest.raises(CorruptionError):
        rebuild(topic.metadata, topic.store, replace=True)
    assert topic.descriptors() == published
    owner = topic.catalog.owner()
    assert owner is not None
    assert owner[0].incarnation == topic.owned.ownership.owner.incarnation
    assert topic.take_over("b").catalog.next_offset() == 30


def test_descriptors_that_are_not_in_the_chain_go(topic: PublishedTopic) -> None:
    """A catalog that was wrong is not mixed with the right one."""
    published = topic.publish_hourly(3)
    topic.store.delete(KEYS.object(published[1].name))
    topic.store.delete(KEYS.object(published[2].name))
    put_all(topic.store, (10, 14, 5))
    rebuild(topic.metadata, topic.store, replace=True)
    assert topic.names_in_catalog() == [ObjectId(0, 9, 1), ObjectId(10, 14, 5)]
    assert topic.take_over("b").catalog.next_offset() == 15


def test_a_topic_that_is_being_deleted_is_not_brought_back(topic: PublishedTopic) -> None:
    """Somebody meant to delete it."""
    topic.publish(3)
    topic.owned.mark_deleted()
    with pytest.raises(InputError, match="being deleted"):
        rebuild(topic.metadata, topic.store, replace=True)


# Which objects


@settings(max_examples=examples(60))
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["publish", "publish", "fail", "take over"]), st.integers(1, 6)), max_size=12
    )
)
def test_what_was_published_last_is_found_among_orphans(steps: list[tuple[str, int]]) -> None:
    """Whatever owners left behind: if every orphan is older than what was published in its place, it is found."""
    topic = PublishedTopic()
    failed = False
    for kind, number in steps:
        end = topic.catalog.next_offset()
        if kind == "publish":
            topic.publish(number)
            failed = False
        elif kind == "fail":
            # An owner makes the same object again until it is published, so a failed one is its last.
            topic.upload(end, end + number - 1)
            topic.take_over("b")
            failed = True
        else:
            topic.take_over("c")
    if failed or not steps:
        topic.publish(1)
    if not topic.names_in_catalog():
        return
    expected = topic.names_in_catalog()
    lose_catalog(topic)
    report = rebuild(topic.metadata, topic.store)
    assert topic.names_in_catalog() == expected
    assert report.gaps == ()
    assert len(report.orphans) == len(topic.object_names()) - len(expected)


def test_orphans_are_reported_and_stay() -> None:
    """The sweep may remove them, once there is a catalog that says so."""
    store = FaultyStore()
    put_all(store, (0, 9, 1), (10, 14, 1), (10, 19, 2))
    store.put(KEYS.objects_prefix + "notes.txt", b"x")
    report = rebuild_from(store)
    assert report.orphans == (KEYS.object(ObjectId(10, 14, 1)),)
    assert report.foreign == (KEYS.objects_prefix + "notes.txt",)
    assert len(store.contents()) == 4


# Holes and damage


def test_a_hole_is_refused_with_its_range() -> None:
    """Nothing is written then."""
    store = FaultyStore()
    put_all(store, (0, 9, 1), (20, 29, 1))
    metadata = open_metadata("multi-key", store)
    with pytest.raises(GapError, match="offsets 10 to 19") as caught:
        rebuild(metadata, store)
    assert (caught.value.first, caught.value.last) == (10, 19)
    assert metadata.keys(KEYS.metadata_prefix) == []


def test_a_hole_can_be_allowed() -> None:
    """The catalog then has the hole, and the report says so."""
    store = FaultyStore()
    put_all(store, (0, 9, 1), (20, 29, 1))
    metadata = open_metadata("multi-key", store)
    report = rebuild(metadata, store, allow_gaps=True)
    assert report.gaps == ((10, 19),)
    assert [one.start_offset for one in Catalog(metadata, KEYS).walk(0)] == [0, 20]


def test_the_remains_of_a_retention_can_be_left_out() -> None:
    """A topic can be told where to begin."""
    store = FaultyStore()
    put_all(store, (0, 9, 1), (20, 29, 1), (30, 39, 1))
    report = rebuild_from(store, start_offset=20)
    assert (report.start_offset, report.objects, report.gaps) == (20, 2, ())
    assert report.below_start == (KEYS.object(ObjectId(0, 9, 1)),)
    with pytest.raises(InputError, match="no objects from offset 40"):
        rebuild_from(store, start_offset=40)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("at", [0, 5, 13, 40, -1])
def test_a_damaged_object_is_refused_with_key_and_byte(codec: Codec, at: int) -> None:
    """Or left out, if that is allowed; whatever else holds its offsets is then used."""
    store = FaultyStore()
    put_all(store, (0, 19, 1), (20, 29, 1), codec=codec)
    put_all(store, (20, 29, 0))
    spoil(store, (20, 29, 1), at)
    with pytest.raises(CorruptionError) as caught:
        rebuild_from(store)
    assert caught.value.path is not None
    assert caught.value.path.name == "data-20-29-e1.tlog"
    report = rebuild_from(store, allow_gaps=True)
    assert [one.key for one in report.damaged] == [KEYS.object(ObjectId(20, 29, 1))]
    assert report.damaged[0].byte == caught.value.byte
    assert (report.objects, report.next_offset, report.gaps) == (2, 30, ())


def test_a_damaged_object_that_is_not_part_of_the_topic_is_no_matter() -> None:
    """Orphans are not read."""
    store = FaultyStore()
    put_all(store, (0, 9, 1), (0, 9, 2))
    spoil(store, (0, 9, 1))
    assert rebuild_from(store).orphans == (KEYS.object(ObjectId(0, 9, 1)),)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (ObjectId(0, 9, 1), ObjectId(0, 8, 1)),
        (ObjectId(0, 9, 1), ObjectId(0, 10, 1)),
        (ObjectId(0, 9, 1), ObjectId(1, 10, 1)),
    ],
)
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_name_that_lies_is_damage(name: ObjectId, content: ObjectId, codec: Codec) -> None:
    """Name and content must say the same."""
    store = FaultyStore()
    put_object(store, content, NOW_US, codec)
    store.copy(KEYS.object(content), KEYS.object(name))
    store.delete(KEYS.object(content))
    with pytest.raises(CorruptionError):
        rebuild_from(store)


@pytest.mark.parametrize("data", [b"", b"x", b"\x00" * 11, b"\x00" * 5000, struct.pack("<QII", 0, 1 << 29, 7) + b"abc"])
def test_hostile_bytes_are_damage(data: bytes) -> None:
    """Whatever they claim to be."""
    store = FaultyStore()
    store.put(KEYS.object(ObjectId(0, 9, 1)), data)
    with pytest.raises(CorruptionError):
        rebuild_from(store)


def test_a_bad_transfer_is_not_a_bad_object() -> None:
    """Bytes that are wrong once are fetched once more."""
    store = FaultyStore()
    put_all(store, (0, 99, 1))
    for fault in ("flipped", "truncated"):
        store.fail("read_range", fault)
        assert rebuild_from(store).objects == 1
        store.fail("read_range", fault, times=None)
        with pytest.raises(CorruptionError):
            rebuild_from(store)
        store.heal()


@pytest.mark.parametrize("operation", ["list", "read_range"])
def test_a_store_that_does_not_answer_is_an_error(operation: str) -> None:
    """Never an empty topic."""
    store = FaultyStore()
    put_all(store, (0, 9, 1))
    store.fail(operation)
    with pytest.raises(StoreUnavailableError):
        rebuild_from(store, allow_gaps=True)


def test_a_topic_without_objects_is_not_made() -> None:
    """There is nothing to make it from."""
    with pytest.raises(NotFoundError, match="no objects"):
        rebuild_from(FaultyStore())


def test_an_object_that_vanishes_on_the_way_is_noticed() -> None:
    """A sweep that was under way had its last word."""
    store = FaultyStore()
    put_all(store, (0, 9, 1), (10, 19, 1))
    read: list[str] = []

    def vanish(operation: str, place: str) -> None:
        if operation == "read_range":
            read.append(place)
            if len(read) == 2:
                store.on_request = None
                store.delete(KEYS.object(ObjectId(0, 9, 1)))

    store.on_request = vanish
    metadata = open_metadata("multi-key", store)
    with pytest.raises(ConflictError, match="not what it was"):
        rebuild(metadata, store)
    assert metadata.keys(KEYS.metadata_prefix) == []


# Telling


def test_progress_is_told_in_bytes() -> None:
    """It grows up to the whole."""
    store = FaultyStore()
    put_all(store, (0, 99, 1), (100, 150, 1), codec="zstd")
    told: list[tuple[int, int]] = []
    metadata = open_metadata("multi-key", store)
    rebuild_catalog(metadata, KEYS, store, clock=ManualClock(), progress=lambda done, total: told.append((done, total)))
    total = sum(len(data) for data in store.contents().values())
    assert told == sorted(told)
    assert told[-1] == (total, total)


# Crashes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replace", [False, True])
def test_a_crash_anywhere_in_a_rebuild_leaves_no_catalog_or_a_whole_one(kind: str, replace: bool) -> None:
    """And it can be made again, with the same result."""
    prepared = World(multi_key=kind == "multi-key")
    with topic_in(prepared, kind) as first:
        first.publish_hourly(3, count=3)
        first.upload(6, 7, epoch=0)
        first.owned.move_cursor("billing", 4)
        if not replace:
            lose_catalog(first, but=KEYS.subscription("billing"))

    def open_in(world: World) -> MetadataStore:
        return BucketMetadataStore(world.store) if kind == "bucket" else world.metadata

    def workload(world: World, history: History) -> None:
        with open_in(world) as metadata:
            rebuild(metadata, world.store, replace=replace)

    def check(world: World, history: History) -> None:
        with open_in(world) as metadata:
            catalog = Catalog(metadata, KEYS)
            if catalog.owner() is None:
                rebuild(metadata, world.store)
        with topic_in(world, kind) as topic:
            assert topic.names_in_catalog() == [ObjectId(0, 2, 1), ObjectId(3, 5, 1), ObjectId(6, 8, 1)]
            assert (topic.catalog.start_offset(), topic.catalog.next_offset()) == (0, 9)
            assert topic.epoch > 1
            assert topic.publish(2).start_offset == 9
            cursor = topic.catalog.cursor("billing")
            assert cursor is not None
            assert cursor[0].offset == 4

    cut_world_everywhere(workload, check, start=lambda crash_at: prepared.after_crash("keep", crash_at=crash_at))


# A whole bucket


@pytest.mark.parametrize("url", ["faulty", "memory", "file"])
def test_the_topics_of_a_bucket_are_found(url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those that have objects, with one request each; what else is in the bucket does not count."""
    directory = tmp_path_factory.mktemp("bucket")
    store = FaultyStore() if url == "faulty" else open_store("memory://" if url == "memory" else f"file://{directory}")
    topics = [("a", "x"), ("a", "y"), ("b", "x"), ("shop", "orders"), ("shop", "orders-eu")]
    for namespace, name in topics:
        for start in range(0, 30, 10):
            store.put(TopicKeys(namespace, name).object(ObjectId(start, start + 9, 1)), b"x")
    for key in ("storage/topics/c/z/objects/notes", "storage/topics/c/z/other/data-0-9-e1.tlog", "storage/topics/q"):
        store.put(key, b"x")
    store.put(TopicKeys("a", "x").objects_prefix + "notes", b"x")
    store.put("tidelog/storage/topics/d/z/owner", b"x")
    assert sorted(topics_in(store)) == topics
    assert topics_in(FaultyStore()) == []


def test_a_report_is_json() -> None:
    """For programs."""
    store = FaultyStore()
    put_all(store, (0, 9, 1))
    report = rebuild_from(store)
    assert msgspec.json.decode(msgspec.json.encode(report), type=RebuildReport) == report
