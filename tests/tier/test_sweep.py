"""The sweep removes what belongs to nothing, shows what is lost, and touches nothing that somebody may still need."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.tier.published import KEYS, KINDS, PublishedTopic, topic_in

from tidelog.errors import FencedError, InputError, NotFoundError, StoreUnavailableError
from tidelog.testing import FaultyStore, History, World, cut_world_everywhere
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import ObjectId
from tidelog.tier.sweep import SweepPlan, SweepReport, SweptObject, apply_sweep, finish_deletion, plan_sweep

DAY = 24 * 3600


def plan_of(topic: PublishedTopic, *, in_flight: set[str] | None = None, as_owner: bool = True) -> SweepPlan:
    owned = topic.owned if as_owner else None
    return plan_sweep(topic.catalog, topic.store, owned, topic.clock.now_us(), in_flight=in_flight)


def sweep(topic: PublishedTopic, *, drop_lost: bool = False, drop_uncovered: bool = False) -> SweepReport:
    return apply_sweep(
        *(plan_of(topic), topic.catalog, topic.store, topic.owned),
        drop_lost=drop_lost,
        drop_uncovered=drop_uncovered,
    )


def names(found: tuple[SweptObject, ...]) -> list[str]:
    return [one.object_id for one in found]


def tell(plan: SweepPlan) -> dict[str, list[str]]:
    """What a plan has found, by kind, without what it has not."""
    kinds = ("below_start", "left_over", "orphans", "uncovered", "lost", "damaged", "pending", "newer")
    found = {kind: names(getattr(plan, kind)) for kind in kinds}
    return {kind: objects for kind, objects in found.items() if objects}


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
    assert sweep(topic) == SweepReport()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_owner", [True, False])
def test_what_an_earlier_owner_uploaded_in_vain_is_removed(kind: str, as_owner: bool) -> None:
    """It needs no claim: nobody can publish it any more."""
    topic = topic_with_an_orphan(kind)
    plan = plan_of(topic, as_owner=as_owner)
    assert tell(plan) == {"orphans": ["data-10-14-e1.tlog"]}
    report = apply_sweep(plan, topic.catalog, topic.store, topic.owned if as_owner else None)
    assert report.objects == (KEYS.object(ObjectId(10, 14, 1)),)
    assert report.bytes == plan.bytes > 0
    assert topic.object_names() == topic.names_in_catalog()


def test_the_only_copy_of_something_stays_until_it_is_told_to_go(topic: PublishedTopic) -> None:
    """Loses, without this: a catalog that was restored from an old copy has its newer objects swept away."""
    topic.publish(10)
    topic.upload(10, 19)
    topic.take_over("b")
    topic.publish(5)
    assert tell(plan_of(topic)) == {"uncovered": ["data-10-19-e1.tlog"]}
    assert sweep(topic) == SweepReport()
    assert sweep(topic, drop_uncovered=True).objects == (KEYS.object(ObjectId(10, 19, 1)),)
    assert topic.object_names() == topic.names_in_catalog()


def test_a_copy_of_what_is_lost_stays(topic: PublishedTopic) -> None:
    """An orphan whose offsets are published in an object that is gone is all that is left of them."""
    topic.publish(10)
    topic.upload(10, 19)
    topic.take_over("b")
    lost = topic.publish(10)
    topic.store.delete(KEYS.object(lost.name))
    assert tell(plan_of(topic)) == {"uncovered": ["data-10-19-e1.tlog"], "lost": [lost.object_id]}


def test_what_the_owner_is_about_to_publish_is_left_alone(topic: PublishedTopic) -> None:
    """Objects of the current epoch are nobody else's business."""
    topic.publish(10)
    topic.upload(10, 14)
    topic.upload(0, 4)
    assert tell(plan_of(topic)) == {"pending": ["data-0-4-e1.tlog", "data-10-14-e1.tlog"]}
    assert sweep(topic).objects == ()


def test_the_owner_sweeps_its_own_failed_attempts(topic: PublishedTopic) -> None:
    """With a list of what its shipper is busy with, and only what others cover."""
    topic.publish(10)
    busy, failed = topic.upload(0, 6), topic.upload(0, 4)
    topic.upload(10, 14)
    in_flight = {KEYS.object(busy.name)}
    plan = plan_of(topic, in_flight=in_flight)
    assert names(plan.orphans) == [failed.object_id]
    assert apply_sweep(plan, topic.catalog, topic.store, topic.owned).objects == ()
    report = apply_sweep(plan, topic.catalog, topic.store, topic.owned, in_flight=in_flight)
    assert report.objects == (KEYS.object(failed.name),)


def test_objects_of_a_later_epoch_are_never_touched(topic: PublishedTopic) -> None:
    """They say that this catalog is an old one."""
    topic.publish(10)
    topic.upload(0, 4, epoch=9)
    topic.upload(30, 40, epoch=9)
    assert tell(plan_of(topic)) == {"newer": ["data-0-4-e9.tlog", "data-30-40-e9.tlog"]}
    assert sweep(topic, drop_uncovered=True, drop_lost=True).objects == ()


def test_names_that_are_not_ours_are_shown_and_kept(topic: PublishedTopic) -> None:
    """Somebody put them there, and may want them."""
    key = KEYS.objects_prefix + "notes.txt"
    topic.store.put(key, b"x")
    topic.publish(3)
    plan = plan_of(topic)
    assert plan.foreign == (key,)
    assert list(plan.lines()) == [f"keep, not ours: {key}"]
    sweep(topic, drop_uncovered=True, drop_lost=True)
    assert topic.store.get(key).data == b"x"


def test_a_topic_without_a_catalog_is_not_swept() -> None:
    """Where nothing is known, everything looks like an orphan."""
    topic = PublishedTopic()
    topic.publish(10)
    for key in topic.metadata.keys(KEYS.metadata_prefix):
        topic.metadata.delete(key)
    with pytest.raises(NotFoundError, match="rebuild-catalog"):
        plan_sweep(topic.catalog, topic.store, None, 0)
    assert len(topic.object_names()) == 1


# Between plan and apply


def test_a_plan_is_worth_nothing_after_a_takeover() -> None:
    """The new owner may be a rebuild that has a use for what the old catalog did not know."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic, as_owner=False)
    topic.take_over("c")
    report = apply_sweep(plan, topic.catalog, topic.store)
    assert report.objects == ()
    assert report.skipped == ((plan.orphans[0].key, "c has taken the topic over since"),)


def test_what_is_published_by_now_is_not_deleted() -> None:
    """A plan that is wrong, or old, does no harm."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic)
    published = topic.descriptors()[0]
    wrong = SweptObject(
        key=KEYS.object(published.name),
        start_offset=published.start_offset,
        end_offset=published.end_offset,
        epoch=published.epoch,
        size=published.size,
    )
    wrong_plan = msgspec.structs.replace(plan, orphans=(wrong,), left_over=(wrong,), below_start=(wrong,))
    report = apply_sweep(wrong_plan, topic.catalog, topic.store, topic.owned)
    assert report.objects == ()
    assert [why for _, why in report.skipped] == [
        "it is not below the start",
        "it is not below the start",
        "it is published",
    ]


def test_an_orphan_is_kept_when_what_covers_it_is_gone_by_now() -> None:
    """Each object is looked at again, with the store, right before it goes."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic)
    topic.store.delete(KEYS.object(topic.descriptors()[-1].name))
    report = apply_sweep(plan, topic.catalog, topic.store)
    assert report.skipped == ((plan.orphans[0].key, "its offsets are not all in other objects"),)


def test_a_replaced_owner_sweeps_nothing(topic: PublishedTopic) -> None:
    """Neither a plan nor a deletion is left to it."""
    topic.publish_hourly(2)
    former, plan = topic.owned, plan_of(topic)
    topic.take_over("b")
    with pytest.raises(FencedError):
        plan_sweep(topic.catalog, topic.store, former, 0)
    with pytest.raises(FencedError):
        apply_sweep(plan, topic.catalog, topic.store, former)


def test_what_cannot_be_read_is_not_an_orphan() -> None:
    """An outage while looking is an error, before the plan and after it."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic)
    for operation in ("get", "floor"):
        topic.metadata.fail(operation, times=None)  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailableError):
            plan_of(topic, as_owner=False)
        with pytest.raises(StoreUnavailableError):
            apply_sweep(plan, topic.catalog, topic.store)
        topic.metadata.heal()  # type: ignore[attr-defined]
    assert len(topic.object_names()) == 3


# Below the start


def test_an_interrupted_retention_is_finished(topic: PublishedTopic) -> None:
    """Descriptors below the start go with their objects, and so do objects that lost their descriptors already."""
    published = topic.publish_hourly(4)
    topic.owned.move_start(25)
    topic.owned.remove_descriptors(published[:1])
    plan = plan_of(topic)
    assert tell(plan) == {"below_start": ["data-10-19-e1.tlog"], "left_over": ["data-0-9-e1.tlog"]}
    report = sweep(topic)
    assert (report.descriptors, len(report.objects)) == ((10,), 2)
    assert topic.descriptors() == published[2:]
    assert topic.object_names() == topic.names_in_catalog()


def test_only_the_owner_removes_descriptors(topic: PublishedTopic) -> None:
    """Anybody may delete what no descriptor names; the catalog is the owner's."""
    published = topic.publish_hourly(3)
    topic.owned.move_start(20)
    topic.owned.remove_descriptors(published[:1])
    plan = plan_of(topic, as_owner=False)
    report = apply_sweep(plan, topic.catalog, topic.store)
    assert report.objects == (KEYS.object(published[0].name),)
    assert report.skipped == ((KEYS.object(published[1].name), "only the owner removes descriptors"),)


def test_a_descriptor_below_the_start_needs_no_object(topic: PublishedTopic) -> None:
    """What a very late owner publishes there is taken out without a fuss."""
    published = topic.publish_hourly(3)
    topic.owned.move_start(20)
    topic.store.delete(KEYS.object(published[0].name))
    assert tell(plan_of(topic)) == {"below_start": [one.object_id for one in published[:2]]}
    sweep(topic)
    assert topic.descriptors() == published[2:]


# Lost and damaged


def test_lost_data_is_shown_and_stays_in_the_catalog(topic: PublishedTopic) -> None:
    """A descriptor without its object says what is missing; nobody forgets that by accident."""
    published = topic.publish_hourly(3)
    topic.store.delete(KEYS.object(published[1].name))
    plan = plan_of(topic)
    assert [(one.start_offset, one.end_offset) for one in plan.lost] == [(10, 19)]
    assert plan.is_empty
    assert any("LOST" in line and "offsets 10 to 19" in line for line in plan.lines())
    assert sweep(topic) == SweepReport()
    assert topic.descriptors() == published


def test_lost_data_can_be_given_up(topic: PublishedTopic) -> None:
    """Only by the owner, only when told; the rest stays readable and the topic goes on where it was."""
    published = topic.publish_hourly(4)
    for one in (published[1], published[3]):
        topic.store.delete(KEYS.object(one.name))
    with pytest.raises(InputError):
        apply_sweep(plan_of(topic), topic.catalog, topic.store, drop_lost=True)
    report = sweep(topic, drop_lost=True)
    assert report.dropped_lost == (10,)
    assert report.skipped == ((KEYS.object(published[3].name), "it says where the topic ends"),)
    assert topic.descriptors() == [published[0], published[2], published[3]]
    assert topic.owned.catalog.next_offset() == 40
    assert topic.owned.catalog.at(5) == published[0]
    assert topic.publish(2).start_offset == 40


def test_an_object_of_another_size_is_shown(topic: PublishedTopic) -> None:
    """It is neither lost nor in order, and it stays."""
    published = topic.publish_hourly(2)
    topic.store.put(KEYS.object(published[0].name), b"short")
    assert tell(plan_of(topic)) == {"damaged": [published[0].object_id]}
    assert sweep(topic, drop_lost=True) == SweepReport()


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
    assert plan_of(topic).unfinished == ()
    topic.clock.advance(2)
    plan = plan_of(topic)
    assert len(plan.unfinished) == 1
    report = sweep(topic)
    assert (len(report.unfinished), report.bytes) == (1, 8)
    assert store.uploads() == {}


# Showing


def test_a_plan_survives_json() -> None:
    """It can be shown to people and programs, kept, and carried out later."""
    topic = topic_with_an_orphan()
    plan = plan_of(topic)
    again = msgspec.json.decode(msgspec.json.encode(plan), type=SweepPlan)
    assert again == plan
    assert list(again.lines()) == [f"remove, published by others: {plan.orphans[0]}"]
    assert apply_sweep(again, topic.catalog, topic.store).objects == (plan.orphans[0].key,)


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
            plan = plan_sweep(topic.catalog, topic.store, topic.owned, 0)
            apply_sweep(plan, topic.catalog, topic.store, topic.owned)

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
