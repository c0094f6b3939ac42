"""The catalog in an owner's hands: publishing in order, once, under one epoch; what is undecided is settled."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from tests.cold.published import KEYS, KINDS, PublishedTopic

from tidelog.cold.catalog import Descriptor, Reservation
from tidelog.cold.ownership import OwnedCatalog
from tidelog.errors import ConflictError, DataError, FencedError, InputError, StoreUnavailableError
from tidelog.store.document import Step
from tidelog.testing import FaultyMetadata, FaultyStore

UNDECIDED = ["unanswered", "late", "unavailable"]


@pytest.fixture(params=KINDS)
def topic(request: pytest.FixtureRequest) -> PublishedTopic:
    return PublishedTopic(request.param)


@pytest.fixture(params=KINDS[:2])
def faulty(request: pytest.FixtureRequest) -> PublishedTopic:
    """Over a metadata store that can be made to fail."""
    return PublishedTopic(request.param)


def metadata_of(topic: PublishedTopic) -> FaultyMetadata:
    assert isinstance(topic.metadata, FaultyMetadata)
    return topic.metadata


def current(topic: PublishedTopic) -> int | None:
    found = topic.catalog.current()
    return None if found is None else found[0]


def next_of(topic: PublishedTopic, count: int = 5) -> Descriptor:
    """The next object, uploaded and not published."""
    start = topic.catalog.next_offset()
    return topic.upload(start, start + count - 1)


# Publishing


def test_objects_are_published_in_order(topic: PublishedTopic) -> None:
    """Each begins where the one before ended, and `cur` points at the newest."""
    for start in range(0, 25, 5):
        topic.owned.publish(next_of(topic))
        assert (topic.catalog.next_offset(), current(topic)) == (start + 5, start)


def test_publishing_twice_is_fine(topic: PublishedTopic) -> None:
    """The first answer may have been lost; nothing changes."""
    first = next_of(topic)
    topic.owned.publish(first)
    topic.owned.publish(first)
    second = next_of(topic)
    topic.owned.publish(second)
    topic.owned.publish(first)
    assert topic.descriptors() == [first, second]
    assert current(topic) == 5


def test_another_object_for_the_same_offsets_is_refused(topic: PublishedTopic) -> None:
    """The same place with other bytes, or another end, is not the same object."""
    descriptor = next_of(topic)
    topic.owned.publish(descriptor)
    for other in (msgspec.structs.replace(descriptor, checksum="crc32:00000001"), topic.upload(0, 7)):
        with pytest.raises(DataError, match="are published already"):
            topic.owned.publish(other)
    assert topic.descriptors() == [descriptor]


@pytest.mark.parametrize("start", [3, 6, 100])
def test_an_object_out_of_order_is_refused(topic: PublishedTopic, start: int) -> None:
    """Neither an overlap nor a hole gets in."""
    topic.publish(5)
    with pytest.raises(DataError, match="continues at offset 5"):
        topic.owned.publish(topic.upload(start, start + 4))
    assert topic.catalog.next_offset() == 5


def test_a_hint_that_was_not_moved_is_moved_later(topic: PublishedTopic) -> None:
    """A crash between a descriptor and `cur` is mended when it is published again."""
    descriptor = topic.publish(5)
    topic.metadata.delete(KEYS.current)
    topic.owned.publish(descriptor)
    assert current(topic) == 0


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("fault", UNDECIDED)
def test_an_undecided_publication_settles(faulty: PublishedTopic, fault: str, nth: int) -> None:
    """Done, not done or done later: publishing again ends with one descriptor, and the next one follows it."""
    descriptor = next_of(faulty)
    metadata_of(faulty).fail("commit", fault, nth=nth)  # type: ignore[arg-type]  # all are faults
    with contextlib.suppress(StoreUnavailableError):
        faulty.owned.publish(descriptor)
    metadata_of(faulty).heal()
    faulty.owned.publish(descriptor)
    metadata_of(faulty).land_late_writes()
    following = next_of(faulty)
    faulty.owned.publish(following)
    assert faulty.descriptors() == [descriptor, following]
    assert current(faulty) == 5


def test_a_late_publication_of_a_replaced_owner_does_not_land(faulty: PublishedTopic) -> None:
    """Whatever was on its way when the topic changed hands fails on its condition."""
    old = faulty.owned
    descriptor = next_of(faulty)
    metadata_of(faulty).fail("commit", "late")
    with pytest.raises(StoreUnavailableError):
        old.publish(descriptor)
    faulty.take_over("b")
    metadata_of(faulty).land_late_writes()
    assert faulty.descriptors() == []
    mine = faulty.publish(3)
    assert faulty.descriptors() == [mine]
    with pytest.raises(FencedError):
        old.publish(descriptor)


# Fencing


def test_a_replaced_owner_can_do_nothing(topic: PublishedTopic) -> None:
    """Neither publish nor seal nor move nor delete; and nothing has changed afterwards."""
    topic.publish(10)
    topic.owned.move_cursor("billing", 3)
    old, descriptor = topic.owned, next_of(topic)
    topic.take_over("b")
    topic.owned.move_cursor("billing", 4)
    before = {entry.key: entry.value for entry in topic.metadata.range(KEYS.metadata_prefix)}
    attempts = [
        lambda: old.publish(descriptor),
        lambda: old.publish(topic.descriptors()[0]),
        lambda: old.seal(10),
        lambda: old.move_start(7),
        old.mark_deleted,
        lambda: old.remove_descriptors(topic.descriptors()),
        lambda: old.move_cursor("billing", 9),
        lambda: old.move_cursor("new", 9),
        lambda: old.delete_cursor("billing"),
        old.remove_everything,
    ]
    for attempt in attempts:
        with pytest.raises(FencedError, match="taken over by node b"):
            attempt()
    assert {entry.key: entry.value for entry in topic.metadata.range(KEYS.metadata_prefix)} == before


def act(owned: OwnedCatalog, what: str, descriptor: Descriptor) -> None:
    """One of the things that an owner does."""
    if what == "publish":
        owned.publish(descriptor)
    elif what == "start":
        owned.move_start(5)
    else:
        owned.move_cursor("billing", 8)


def prepared(kind: str) -> tuple[PublishedTopic, Descriptor]:
    """Ten messages, a cursor at 3, and an object that is ready to be published."""
    topic = PublishedTopic(kind)
    topic.publish(10)
    topic.owned.move_cursor("billing", 3)
    return topic, next_of(topic)


def is_as_prepared(topic: PublishedTopic) -> bool:
    found = topic.catalog.cursor("billing")
    assert found is not None
    return (topic.catalog.next_offset(), topic.catalog.start_offset(), found[0].offset) == (10, 0, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["publish", "start", "cursor"])
def test_a_change_that_began_before_the_takeover_does_not_get_through(kind: str, what: str) -> None:
    """The old owner has read everything, sleeps, and writes after the new one settled in: each write is refused."""
    topic, descriptor = prepared(kind)
    old = topic.owned
    change = old.ownership.change

    def nap_and_change(steps: Sequence[Step]) -> Mapping[str, str]:
        topic.take_over("next")
        return change(steps)

    old.ownership.change = nap_and_change  # type: ignore[method-assign]  # the moment of the nap
    with pytest.raises(FencedError):
        act(old, what, descriptor)
    assert is_as_prepared(topic)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("what", ["publish", "start", "cursor"])
def test_an_owner_that_verified_and_then_slept_is_refused(kind: str, what: str) -> None:
    """In a store of single keys the owner's entry was fine when it was read: the entry's own version says no."""
    topic, descriptor = prepared(kind)
    old, fired = topic.owned, list[int]()

    def take_over_before(operation: str, _keys: str) -> None:
        if operation == "commit" and not fired:
            fired.append(1)
            topic.take_over("b")

    metadata_of(topic).on_request = take_over_before
    with pytest.raises(FencedError):
        act(old, what, descriptor)
    assert fired == [1]
    assert is_as_prepared(topic)


# Settling in


def test_settling_in_gives_the_end(topic: PublishedTopic) -> None:
    """The catalog's next offset; a topic without a past begins where it is asked to, once."""
    topic.publish(10)
    assert topic.take_over("b", settle=False).settle_in(500) == 10
    assert topic.catalog.start_offset() == 0


def test_a_place_is_reserved_where_keys_are_changed_one_by_one(topic: PublishedTopic) -> None:
    """So that an earlier owner about to publish there gets it now or never; other stores need none."""
    topic.publish(10)
    topic.take_over("b")
    found = topic.catalog.find(10)
    if topic.metadata.supports_multi_key:
        assert found is None
    else:
        assert found is not None
        assert found.value == Reservation(start_offset=10, epoch=2)
    assert topic.publish(4).start_offset == 10
    topic.take_over("c")
    topic.take_over("d")
    assert topic.publish(4).epoch == 4
    assert topic.catalog.next_offset() == 18


def test_settling_in_takes_over_what_others_may_change(topic: PublishedTopic) -> None:
    """Start and cursors keep what they say and have the new epoch where that is needed."""
    topic.publish(10)
    topic.owned.move_start(5)
    topic.owned.move_cursor("billing", 7)
    topic.take_over("b")
    mark, cursor = topic.catalog.start_mark(), topic.catalog.cursor("billing")
    assert mark is not None
    assert cursor is not None
    assert (mark[0].start_offset, cursor[0].offset) == (5, 7)
    if not topic.metadata.supports_multi_key:
        assert (mark[0].epoch, cursor[0].epoch) == (2, 2)


def test_a_mark_of_deletion_stays_when_the_topic_changes_hands(topic: PublishedTopic) -> None:
    """The next owner must finish it."""
    topic.publish(10)
    topic.owned.mark_deleted()
    topic.take_over("b")
    mark = topic.catalog.start_mark()
    assert mark is not None
    assert (mark[0].deleted, mark[0].start_offset) == (True, 10)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("fault", UNDECIDED)
def test_an_undecided_settling_can_be_done_again(faulty: PublishedTopic, fault: str, nth: int) -> None:
    """By the same owner, or by the next: the end is the same."""
    faulty.publish(10)
    owned = faulty.take_over("b", settle=False)
    metadata_of(faulty).fail("commit", fault, nth=nth)  # type: ignore[arg-type]  # all are faults
    with contextlib.suppress(StoreUnavailableError):
        owned.settle_in(0)
    metadata_of(faulty).heal()
    assert owned.settle_in(0) == 10
    metadata_of(faulty).land_late_writes()
    faulty.owned = owned
    assert faulty.publish(2).start_offset == 10


# Sealing


def test_a_topic_is_sealed_at_its_end_only(topic: PublishedTopic) -> None:
    """A marker that the catalog contradicts is never written."""
    topic.publish(10)
    for wrong in (9, 11):
        with pytest.raises(DataError, match=f"ends at {wrong}"):
            topic.owned.seal(wrong)
    topic.owned.seal(10)
    marker = topic.catalog.sealed()
    assert marker is not None
    assert (marker.sealed, marker.last_committed_offset, marker.node, marker.epoch) == (True, 9, "a", 1)
    topic.owned.seal(10)
    topic.owned.unseal()
    assert topic.catalog.sealed() is None
    topic.owned.unseal()


def test_an_empty_topic_is_sealed_without_a_last_offset(topic: PublishedTopic) -> None:
    """There is none."""
    topic.owned.seal(0)
    marker = topic.catalog.sealed()
    assert marker is not None
    assert marker.last_committed_offset is None


# Start, cursors


def test_the_start_never_goes_back(topic: PublishedTopic) -> None:
    """A smaller offset changes nothing, not even the time."""
    topic.publish(10)
    for offset, expected in ((4, 4), (2, 4), (0, 4), (7, 7), (7, 7)):
        before = topic.catalog.start_mark()
        topic.owned.move_start(offset)
        assert topic.catalog.start_offset() == expected
        if offset < expected:
            assert topic.catalog.start_mark() == before


def test_descriptors_are_removed_only_as_they_are(topic: PublishedTopic) -> None:
    """One that is another by now, or gone, is left alone."""
    topic.publish_hourly(3)
    first, second, third = topic.descriptors()
    topic.owned.remove_descriptors([first, msgspec.structs.replace(second, etag="other"), first])
    assert topic.descriptors() == [second, third]


def test_cursors_are_moved_and_forgotten(topic: PublishedTopic) -> None:
    """Forwards and back, by name; forgetting twice is fine."""
    for offset in (5, 9, 2):
        topic.owned.move_cursor("billing", offset)
        found = topic.catalog.cursor("billing")
        assert found is not None
        assert found[0].offset == offset
    topic.owned.move_cursor("audit", 0)
    assert topic.catalog.subscriptions() == ["audit", "billing"]
    topic.owned.delete_cursor("billing")
    topic.owned.delete_cursor("billing")
    assert topic.catalog.subscriptions() == ["audit"]
    with pytest.raises(InputError):
        topic.owned.move_cursor("audit", -1)
    with pytest.raises(InputError):
        topic.owned.move_cursor("../owner", 1)


@pytest.mark.parametrize("fault", UNDECIDED)
def test_an_undecided_cursor_can_be_moved_again(faulty: PublishedTopic, fault: str) -> None:
    """What is on its way when it is moved again does not win over it."""
    faulty.owned.move_cursor("billing", 1)
    metadata_of(faulty).fail("commit", fault)  # type: ignore[arg-type]  # all are faults
    with pytest.raises(StoreUnavailableError):
        faulty.owned.move_cursor("billing", 5)
    faulty.owned.move_cursor("billing", 6)
    metadata_of(faulty).land_late_writes()
    found = faulty.catalog.cursor("billing")
    assert found is not None
    assert found[0].offset == 6


# Deleting


def test_deleting_leaves_nothing_but_the_floor(topic: PublishedTopic) -> None:
    """All entries of the topic are gone, its epochs are remembered, and the topic can be made again."""
    topic.publish(10)
    topic.owned.move_cursor("billing", 3)
    topic.metadata.put(KEYS.settings, b"{}")
    topic.owned.seal(10)
    topic.owned.remove_everything()
    assert topic.metadata.keys(KEYS.metadata_prefix) == []
    assert topic.catalog.owner() is None
    assert topic.catalog.epoch_floor() == 1
    again = topic.take_over("b")
    assert again.epoch == 2
    topic.take_over("c")
    with pytest.raises(FencedError):
        again.move_start(1)


def test_a_deleted_topic_leaves_one_stamp_in_a_bucket() -> None:
    """Nothing else of it is in the object store: names that come and go do not add up."""
    store = FaultyStore()
    topic = PublishedTopic("bucket", store)
    for name in ("billing", "audit"):
        topic.owned.move_cursor(name, 1)
    topic.publish(10)
    topic.owned.seal(10)
    store.delete([info.key for info in store.list(KEYS.objects_prefix)])
    topic.owned.remove_everything()
    left = [key for key in store.contents() if "shop/orders" in key]
    assert len(left) == 1
    assert left[0].endswith("owner")


def test_the_floor_only_rises(topic: PublishedTopic) -> None:
    """The highest epoch of all deleted topics counts."""
    for _ in range(4):
        topic.take_over("a")
    topic.owned.remove_everything()
    assert topic.catalog.epoch_floor() == 5
    other = PublishedTopic(metadata=topic.metadata, store=topic.store)
    assert other.epoch == 6
    other.owned.remove_everything()
    assert topic.catalog.epoch_floor() == 6


@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("fault", UNDECIDED)
def test_a_deletion_that_is_undecided_can_be_finished(faulty: PublishedTopic, fault: str, nth: int) -> None:
    """By the same owner, or, when its own entry went without an answer, it hears that it is done."""
    faulty.publish(10)
    faulty.owned.move_cursor("billing", 3)
    metadata_of(faulty).fail("commit", fault, nth=nth)  # type: ignore[arg-type]  # all are faults
    with contextlib.suppress(StoreUnavailableError):
        faulty.owned.remove_everything()
    metadata_of(faulty).heal()
    try:
        faulty.owned.remove_everything()
    except FencedError:
        assert faulty.catalog.owner() is None
    metadata_of(faulty).land_late_writes()
    assert faulty.metadata.keys(KEYS.metadata_prefix) == []


def test_others_that_are_always_faster_are_given_up_on(faulty: PublishedTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conflict that never ends is raised in the end, not tried for ever."""
    monkeypatch.setattr("tidelog.store.document.FIRST_PAUSE_SECONDS", 0.0)
    faulty.take_over("b", settle=False)
    metadata_of(faulty).fail("commit", "conflict", times=None, matching="*floor")
    with pytest.raises(ConflictError, match="gave up after 20 conflicting writes"):
        faulty.owned.remove_everything()
