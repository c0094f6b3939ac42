"""The sweep removes what belongs to nothing, shows what is lost, and touches nothing that somebody may still need."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.cold.published import KEYS, KINDS, PublishedTopic, topic_in

from tidelog.cold.catalog import Catalog, Descriptor, encode_descriptor
from tidelog.cold.gc import Candidate, Collector, Plan, Reason, Report, finish_deletion
from tidelog.cold.ownership import OwnedCatalog
from tidelog.errors import FencedError, InputError, NotFoundError, StoreUnavailableError
from tidelog.store.keys import ObjectId
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.published import PublishedMetadata
from tidelog.testing import FaultyMetadata, FaultyStore, History, World, cut_world_everywhere

DAY = 24 * 3600


def collector_of(
    topic: PublishedTopic,
    *,
    in_flight: set[str] | None = None,
    as_owner: bool = True,
    owned: OwnedCatalog | None = None,
) -> Collector:
    owned = owned or (topic.owned if as_owner else None)
    return Collector(topic.catalog, topic.store, topic.clock.now_us(), owned=owned, in_flight=in_flight)


def plan_of(topic: PublishedTopic, *, in_flight: set[str] | None = None, as_owner: bool = True) -> Plan:
    return collector_of(topic, in_flight=in_flight, as_owner=as_owner).plan()


def sweep(topic: PublishedTopic, *drop: Reason) -> Report:
    return collector_of(topic).apply(plan_of(topic), drop=drop)


def apply_beside(topic: PublishedTopic, plan: Plan) -> Report:
    """As somebody does who does not own the topic."""
    return collector_of(topic, as_owner=False).apply(plan)


def names(found: tuple[Candidate, ...]) -> list[str]:
    return [str(one.name) for one in found]


def why_kept(report: Report) -> list[tuple[str, Reason]]:
    return [(one.key, one.reason) for one in report.kept]


def tell(plan: Plan) -> dict[str, list[str]]:
    """What a plan has found, by its reason."""
    found: dict[str, list[str]] = {}
    for one in plan.found:
        found.setdefault(str(one.reason), []).append(str(one.name))
    return found


def topic_with_an_orphan(kind: str = "multi-key") -> PublishedTopic:
    """The first owner died between upload and publishing; the second shipped the same offsets."""
    topic = PublishedTopic(kind)
    topic.publish(10)
    topic.upload(10, 14)
    topic.take_over("b")
    topic.publish(10)
    return topic


# Orphans


def test_a_topic_in_order_has_nothing_to_sweep(topic: PublishedTopic) -> None:
    """What is published and there is not even mentioned."""
    topic.publish_hourly(3)
    plan = plan_of(topic)
    assert (plan.is_empty, tell(plan), list(plan.lines()), plan.bytes) == (True, {}, [], 0)
    assert sweep(topic) == Report()


def test_many_objects_are_looked_at_with_few_requests() -> None:
    """A request for each would take minutes over a long history."""
    requests = []
    for objects in (3, 30):
        metadata = FaultyMetadata()
        topic = PublishedTopic(metadata=metadata)
        topic.publish_hourly(objects, count=1)
        metadata.reset_traffic()
        assert plan_of(topic).is_empty
        requests.append(metadata.traffic.request_count)
    assert requests[0] == requests[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_owner", [True, False])
def test_what_an_earlier_owner_uploaded_in_vain_is_removed(kind: str, as_owner: bool) -> None:
    """It needs no claim: nobody can publish it any more."""
    topic = topic_with_an_orphan(kind)
    plan = plan_of(topic, as_owner=as_owner)
    assert tell(plan) == {"orphan": ["data-10-14-e1.tlog"]}
    report = collector_of(topic, as_owner=as_owner).apply(plan)
    assert report.objects == (KEYS.object(ObjectId(10, 14, 1)),)
    assert report.bytes == plan.bytes > 0
    assert topic.object_names() == topic.names_in_catalog()
    assert collector_of(topic, as_owner=as_owner).apply(plan) == Report(), "there is nothing to tell the second time"
    assert plan.after(Report()) == ()


def test_the_only_copy_of_something_stays_until_it_is_told_to_go(topic: PublishedTopic) -> None:
    """Loses, without this: a catalog that was restored from an old copy has its newer objects swept away."""
    topic.publish(10)
    topic.upload(10, 19)
    topic.take_over("b")
    topic.publish(5)
    assert tell(plan_of(topic)) == {"only-copy": ["data-10-19-e1.tlog"]}
    assert sweep(topic) == Report()
    forged = msgspec.structs.replace(plan_of(topic).found[0], action="remove")
    assert collector_of(topic).apply(msgspec.structs.replace(plan_of(topic), found=(forged,))) == Report()
    assert sweep(topic, Reason.ONLY_COPY).objects == (KEYS.object(ObjectId(10, 19, 1)),)
    assert topic.object_names() == topic.names_in_catalog()


def test_a_copy_of_what_is_lost_stays(topic: PublishedTopic) -> None:
    """An orphan whose offsets are published in an object that is gone is all that is left of them."""
    topic.publish(10)
    topic.upload(10, 19)
    topic.take_over("b")
    lost = topic.publish(10)
    topic.store.delete(KEYS.object(lost.name))
    assert tell(plan_of(topic)) == {"only-copy": ["data-10-19-e1.tlog"], "lost": [lost.object_id]}


def test_what_the_owner_is_about_to_publish_is_left_alone(topic: PublishedTopic) -> None:
    """Objects of the current epoch are nobody else's business."""
    topic.publish(10)
    topic.upload(10, 14)
    topic.upload(0, 4)
    assert tell(plan_of(topic)) == {"in-progress": ["data-0-4-e1.tlog", "data-10-14-e1.tlog"]}
    assert sweep(topic).objects == ()


def test_the_owner_sweeps_its_own_failed_attempts(topic: PublishedTopic) -> None:
    """With a list of what its shipper is busy with, and only what others cover."""
    topic.publish(10)
    busy, failed = topic.upload(0, 6), topic.upload(0, 4)
    topic.upload(10, 14)
    in_flight = {KEYS.object(busy.name)}
    plan = plan_of(topic, in_flight=in_flight)
    assert names(plan.of(Reason.ORPHAN)) == [failed.object_id]
    assert collector_of(topic).apply(plan).objects == ()
    report = collector_of(topic, in_flight=in_flight).apply(plan)
    assert report.objects == (KEYS.object(failed.name),)


def test_objects_of_a_later_epoch_are_never_touched(topic: PublishedTopic) -> None:
    """They say that this catalog is an old one."""
    topic.publish(10)
    topic.upload(0, 4, epoch=9)
    topic.upload(30, 40, epoch=9)
    assert tell(plan_of(topic)) == {"later-epoch": ["data-0-4-e9.tlog", "data-30-40-e9.tlog"]}
    assert sweep(topic, Reason.ONLY_COPY, Reason.LOST).objects == ()


def test_names_that_are_not_ours_are_shown_and_kept(topic: PublishedTopic) -> None:
    """Somebody put them there, and may want them."""
    key = KEYS.objects_prefix + "notes.txt"
    topic.store.put(key, b"x")
    topic.publish(3)
    plan = plan_of(topic)
    assert [(one.key, one.action, one.reason) for one in plan.found] == [(key, "keep", Reason.FOREIGN)]
    assert list(plan.lines()) == [f"keep, tidelog did not create it: {key} (1 bytes)"]
    sweep(topic, Reason.ONLY_COPY, Reason.LOST)
    assert topic.store.get(key).data == b"x"


def test_a_topic_without_a_catalog_is_not_swept() -> None:
    """Where nothing is known, everything looks like an orphan."""
    topic = PublishedTopic()
    topic.publish(10)
    for key in topic.metadata.keys(KEYS.metadata_prefix):
        topic.metadata.delete(key)
    with pytest.raises(NotFoundError, match="rebuild-catalog"):
        plan_of(topic, as_owner=False)
    assert len(topic.object_names()) == 1


# Between plan and apply


def test_a_plan_is_worth_nothing_after_a_takeover() -> None:
    """The new owner may be a rebuild that has a use for what the old catalog did not know."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic, as_owner=False)
    topic.take_over("c")
    report = apply_beside(topic, plan)
    assert report.objects == ()
    assert why_kept(report) == [(plan.removable[0].key, Reason.TAKEN_OVER)]


def test_what_is_published_by_now_is_not_deleted() -> None:
    """A plan that is wrong, or old, does no harm."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic)
    published = topic.descriptors()[0]
    key = KEYS.object(published.name)
    wrong = [
        Candidate(kind="log object", action="remove", reason=reason, key=key, bytes=published.size)
        for reason in (Reason.ORPHAN, Reason.BELOW_START, Reason.ONLY_COPY)
    ]
    for one in wrong:
        report = collector_of(topic).apply(msgspec.structs.replace(plan, found=(one,)), drop=[Reason.ONLY_COPY])
        assert (report.objects, why_kept(report)) == ((), [(key, Reason.NEEDED)])


def test_an_orphan_is_kept_when_what_covers_it_is_gone_by_now() -> None:
    """Each object is looked at again, with the store, right before it goes."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic)
    topic.store.delete(KEYS.object(topic.descriptors()[-1].name))
    report = apply_beside(topic, plan)
    assert why_kept(report) == [(plan.removable[0].key, Reason.ONLY_COPY)]


def test_a_replaced_owner_sweeps_nothing(topic: PublishedTopic) -> None:
    """Neither a plan nor a deletion is left to it."""
    topic.publish_hourly(2)
    former, plan = topic.owned, plan_of(topic)
    topic.take_over("b")
    with pytest.raises(FencedError):
        collector_of(topic, owned=former).plan()
    with pytest.raises(FencedError):
        collector_of(topic, owned=former).apply(plan)


def test_what_cannot_be_read_is_not_an_orphan() -> None:
    """An outage while looking is an error, before the plan and after it."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic)
    for operation in ("get", "floor"):
        topic.metadata.fail(operation, times=None)  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailableError):
            plan_of(topic, as_owner=False)
        with pytest.raises(StoreUnavailableError):
            apply_beside(topic, plan)
        topic.metadata.heal()  # type: ignore[attr-defined]
    assert len(topic.object_names()) == 3


# Below the start


def test_an_interrupted_retention_is_finished(topic: PublishedTopic) -> None:
    """Descriptors below the start go with their objects, and so do objects that lost their descriptors already."""
    published = topic.publish_hourly(4)
    topic.owned.move_start(25)
    topic.owned.remove_descriptors(published[:1])
    plan = plan_of(topic)
    assert tell(plan) == {"below-start": ["data-10-19-e1.tlog", "data-0-9-e1.tlog"]}
    assert len(sweep(topic).objects) == 2
    assert topic.descriptors() == published[2:]
    assert topic.object_names() == topic.names_in_catalog()


def test_only_the_owner_removes_descriptors(topic: PublishedTopic) -> None:
    """Anybody may delete what no descriptor names; the catalog is the owner's."""
    published = topic.publish_hourly(3)
    topic.owned.move_start(20)
    topic.owned.remove_descriptors(published[:1])
    plan = plan_of(topic, as_owner=False)
    assert [(one.action, one.key) for one in plan.found] == [
        ("owner", KEYS.object(published[1].name)),
        ("remove", KEYS.object(published[0].name)),
    ]
    report = apply_beside(topic, plan)
    assert (report.objects, report.kept) == ((KEYS.object(published[0].name),), ())
    forged = msgspec.structs.replace(plan.found[0], action="remove")
    report = apply_beside(topic, msgspec.structs.replace(plan, found=(forged,)))
    assert (report.objects, why_kept(report)) == ((), [(forged.key, Reason.OWNER)])


def test_a_descriptor_below_the_start_needs_no_object(topic: PublishedTopic) -> None:
    """What a very late owner publishes there is taken out without a fuss."""
    published = topic.publish_hourly(3)
    topic.owned.move_start(20)
    topic.store.delete(KEYS.object(published[0].name))
    assert tell(plan_of(topic)) == {"below-start": [one.object_id for one in published[:2]]}
    sweep(topic)
    assert topic.descriptors() == published[2:]


# Lost and damaged


def test_lost_data_is_shown_and_stays_in_the_catalog(topic: PublishedTopic) -> None:
    """A descriptor without its object says what is missing; nobody forgets that by accident."""
    published = topic.publish_hourly(3)
    topic.store.delete(KEYS.object(published[1].name))
    plan = plan_of(topic)
    assert names(plan.of(Reason.LOST)) == ["data-10-19-e1.tlog"]
    assert plan.is_empty
    assert any("LOST" in line and "offsets 10 to 19" in line for line in plan.lines())
    assert sweep(topic) == Report()
    assert topic.descriptors() == published


def test_lost_data_can_be_given_up(topic: PublishedTopic) -> None:
    """Only by the owner, only when told; the rest stays readable and the topic goes on where it was."""
    published = topic.publish_hourly(4)
    for one in (published[1], published[3]):
        topic.store.delete(KEYS.object(one.name))
    with pytest.raises(InputError):
        collector_of(topic, as_owner=False).apply(plan_of(topic), drop=[Reason.LOST])
    report = sweep(topic, Reason.LOST)
    assert (names(report.removed), report.objects, report.bytes) == ([published[1].object_id], (), 0)
    assert why_kept(report) == [(KEYS.object(published[3].name), Reason.END)]
    assert topic.descriptors() == [published[0], published[2], published[3]]
    assert topic.owned.catalog.next_offset() == 40
    assert topic.owned.catalog.at(5) == published[0]
    assert topic.publish(2).start_offset == 40


def test_an_object_of_another_size_is_shown(topic: PublishedTopic) -> None:
    """It is neither lost nor in order, and it stays."""
    published = topic.publish_hourly(2)
    topic.store.put(KEYS.object(published[0].name), b"short")
    assert tell(plan_of(topic)) == {"damaged": [published[0].object_id]}
    assert sweep(topic, Reason.LOST) == Report()


def test_what_is_published_while_a_plan_is_made_is_not_lost() -> None:
    """The listing is older than the catalog, so a new object is asked for by its name."""
    topic = PublishedTopic()
    topic.publish(5)
    assert isinstance(topic.store, FaultyStore)

    def publish_once(operation: str, place: str) -> None:
        if operation == "list_uploads":
            return
        topic.metadata.on_request = None  # type: ignore[attr-defined]
        topic.publish(5)

    listed = [False]

    def after_listing(operation: str, place: str) -> None:
        if operation == "list":
            listed[0] = True

    def before_catalog(operation: str, place: str) -> None:
        if listed[0]:
            publish_once(operation, place)

    topic.store.on_request = after_listing
    topic.metadata.on_request = before_catalog  # type: ignore[attr-defined]
    plan = plan_of(topic, as_owner=False)
    assert len(topic.descriptors()) == 2
    assert tell(plan) == {}


# Unfinished uploads


def test_uploads_that_nobody_finishes_are_removed_after_a_day(topic: PublishedTopic) -> None:
    """A younger one may be somebody at work."""
    store = topic.store
    assert isinstance(store, FaultyStore)
    store.part_bytes = 4
    topic.publish(1)
    writer = store.open_writer(KEYS.object(ObjectId(1, 9, 1)))
    writer.write(b"12345678")
    topic.clock.advance(DAY - 1)
    assert plan_of(topic).found == ()
    topic.clock.advance(2)
    plan = plan_of(topic)
    assert [(one.kind, one.reason) for one in plan.found] == [("upload", Reason.UNFINISHED)]
    report = collector_of(topic).apply(plan)
    assert (len(report.removed), report.bytes) == (1, 8)
    assert store.uploads() == {}
    assert collector_of(topic).apply(plan) == Report()


# Showing


def test_a_plan_survives_json() -> None:
    """It can be shown to people and programs, kept, and carried out later."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic)
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert again == plan
    (orphan,) = again.found
    assert list(again.lines()) == [
        f"remove, no descriptor names it, and others have all that is in it: {orphan.key} "
        f"(offsets 10 to 14, {orphan.bytes} bytes)"
    ]
    assert apply_beside(topic, again).objects == (orphan.key,)


# Crashes


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_anywhere_in_a_sweep_leaves_a_topic_in_order(kind: str) -> None:
    """Nothing that is published is ever missing, and the next sweep removes the rest."""
    prepared = World(multi_key=kind == "multi-key")
    with topic_in(prepared, kind) as first:
        published = first.publish_hourly(3, count=3)
        first.upload(9, 10)
        first.owned.move_start(6)
        first.owned.remove_descriptors(published[:1])
    with topic_in(prepared, kind) as second:
        second.publish(3)

    def workload(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            sweep(topic)

    def check(world: World, history: History) -> None:
        workload(world, history)
        with topic_in(world, kind) as topic:
            assert topic.names_in_catalog() == topic.object_names() == [ObjectId(6, 8, 1), ObjectId(9, 11, 2)]
            assert topic.catalog.next_offset() == 12

    cut_world_everywhere(workload, check, start=lambda crash_at: prepared.after_crash("keep", crash_at=crash_at))


class Life(msgspec.Struct):
    """What happens to a topic: takeovers, uploads that are published or not, a start that moves."""

    topic: PublishedTopic
    kept: list[Descriptor]

    def step(self, kind: str, number: int) -> None:
        topic = self.topic
        end = topic.catalog.next_offset()
        if kind == "publish":
            self.kept.append(topic.publish(number))
        elif kind == "fail":
            topic.upload(end, end + number - 1)
        elif kind == "take over":
            topic.take_over("n")
        else:
            topic.owned.move_start(min(end, topic.catalog.start_offset() + number))


@pytest.mark.parametrize("kind", ["multi-key", "single-key"])
@settings(max_examples=examples(60))
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["publish", "publish", "fail", "take over", "start"]), st.integers(1, 6)), max_size=15
    )
)
def test_a_sweep_leaves_exactly_what_is_published(kind: str, steps: list[tuple[str, int]]) -> None:
    """Whatever happened before, everything readable stays readable, and nothing else of earlier owners stays."""
    life = Life(PublishedTopic(kind), [])
    for step in steps:
        life.step(*step)
    topic = life.topic
    topic.take_over("last")
    topic.publish(7)
    before = topic.descriptors()
    start = topic.catalog.start_offset()
    sweep(topic)
    assert topic.descriptors() == [one for one in before if one.next_offset > start]
    assert topic.object_names() == topic.names_in_catalog()
    assert plan_of(topic).is_empty


# Deleting a topic


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_anywhere_in_the_deletion_of_a_topic_is_finished_by_the_next_owner(kind: str) -> None:
    """All objects go before the last entry does, so nothing is left that nobody knows of."""
    prepared = World(multi_key=kind == "multi-key")
    with topic_in(prepared, kind) as first:
        first.publish_hourly(2, count=2)
        first.upload(10, 12)
        first.owned.move_cursor("billing", 1)

    def workload(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            topic.owned.mark_deleted()
            finish_deletion(topic.owned, topic.store)

    def check(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            mark = topic.catalog.start_mark()
            if mark is not None and mark[0].deleted:
                finish_deletion(topic.owned, topic.store)
                assert topic.metadata.keys(KEYS.metadata_prefix) == []
            elif len(topic.object_names()) == 3:
                assert topic.catalog.next_offset() == 4
                return
            assert topic.object_names() == []
            assert topic.descriptors() == []

    cut_world_everywhere(workload, check, start=lambda crash_at: prepared.after_crash("keep", crash_at=crash_at))


def test_only_a_topic_that_is_marked_is_deleted(topic: PublishedTopic) -> None:
    """The mark is what makes it safe to be interrupted."""
    topic.publish(3)
    with pytest.raises(InputError, match="not marked"):
        finish_deletion(topic.owned, topic.store)
    assert len(topic.object_names()) == 1


def test_a_deleted_topic_that_changes_hands_stays_deleted(topic: PublishedTopic) -> None:
    """Loses, without this: whoever opens it next finds an empty topic, and its objects stay for ever."""
    topic.publish(3)
    topic.owned.mark_deleted()
    topic.take_over("b")
    mark = topic.catalog.start_mark()
    assert mark is not None
    assert mark[0].deleted


def test_orphans_stay_while_the_published_copy_may_name_them() -> None:
    """Loses otherwise: readers of the bucket are led to objects that are gone."""
    store = FaultyStore()
    topic = PublishedTopic(store=store, metadata=PublishedMetadata(truth := MemoryMetadataStore(), store))
    first = topic.publish(10)
    second = topic.publish(10)
    topic.take_over("b")
    covering = topic.upload(0, 19)
    # A process replaced both by one object, and died before it had copied that.
    truth.put(KEYS.descriptor(0), encode_descriptor(covering))
    truth.delete(KEYS.descriptor(10))
    plan = plan_of(topic)
    assert names(plan.removable) == [first.object_id, second.object_id]
    store.fail("put_if_match", times=None, matching=KEYS.segments_prefix + "*")
    report = collector_of(topic).apply(plan)
    assert why_kept(report) == [(one.key, Reason.PUBLISHED) for one in plan.removable]
    store.heal()
    assert names(collector_of(topic).apply(plan).removed) == [first.object_id, second.object_id]
    with BucketMetadataStore(store, read_only=True) as copy:
        assert Catalog(copy, KEYS).next_offset() == 20
