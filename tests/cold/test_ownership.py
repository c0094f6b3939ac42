"""Claims: the next one fences the one before, in every kind of store, and whatever answers get lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.cold.published import KEYS, KINDS, LOG_ID, lease_of
from tests.cold.station import Stores
from tests.log.workbench import Threads

from tidelog.cold.catalog import Catalog, EpochFloor, Owner
from tidelog.cold.ownership import Ownership, claim_topic, give_back_unknown_claim, new_claim
from tidelog.errors import ConflictError, DataError, FencedError, HeldError, StoreUnavailableError
from tidelog.store.document import Step, encode_json
from tidelog.store.keys import FlushSource
from tidelog.store.metadata.base import Check, Delete, Put, Write
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.urls import open_store
from tidelog.testing import FaultyMetadata

KEY = KEYS.subscription("billing")


@pytest.fixture(params=KINDS)
def stores(request: pytest.FixtureRequest) -> Stores:
    return Stores(request.param)


def claim(stores: Stores, node: str, *, claim: str | None = None, min_epoch: int = 1) -> Ownership:
    catalog, lease = stores.catalog, lease_of(stores.metadata, stores.clock, node)
    return claim_topic(catalog, catalog.owner(), lease, stores.clock, claim or new_claim(), min_epoch, LOG_ID)


def owner_of(stores: Stores) -> Owner:
    found = stores.catalog.owner()
    assert found is not None
    return found[0]


def put(value: bytes, version: str | None = None, *, is_hint: bool = False, key: str = KEY) -> Step:
    return Step(Put(key, value), version, is_hint=is_hint)


def test_the_first_claim_is_epoch_one(stores: Stores) -> None:
    """It is written down who claimed, when, and under which name."""
    ownership = claim(stores, "a", claim="c1")
    assert (ownership.epoch, ownership.previous) == (1, None)
    session = ownership.owner.session
    assert session
    now_us = stores.clock.now_us()
    expected = Owner(epoch=1, claim="c1", incarnation="c1", node="a", claimed_us=now_us, log_id=LOG_ID, session=session)
    assert owner_of(stores) == expected == ownership.owner
    ownership.verify()


def test_the_second_claim_fences_the_first(stores: Stores) -> None:
    """The first can neither verify nor change nor give back nor remove; the second can."""
    first = claim(stores, "a")
    second = claim(stores, "b")
    assert (second.epoch, second.previous) == (2, first.owner)
    for use in (first.verify, lambda: first.change([put(b"late")]), first.remove):
        with pytest.raises(FencedError, match=r"taken over by node b \(epoch 2\)"):
            use()
    assert stores.metadata.get(KEY) is None
    second.verify()
    second.change([put(b"mine")])
    entry = stores.metadata.get(KEY)
    assert entry is not None
    assert entry.value == b"mine"


def test_owner_of_a_cluster_is_called_by_its_name_there(stores: Stores) -> None:
    """Operators were told of a directory's id that no command of theirs lists."""
    first = claim(stores, "a")
    lease = lease_of(stores.metadata, stores.clock, "vm-4299b198")
    lease.node_name = "n2"
    claim_topic(stores.catalog, stores.catalog.owner(), lease, stores.clock, new_claim())
    with pytest.raises(FencedError, match=r"taken over by node n2 \(epoch 2\)"):
        first.verify()
    other = lease_of(stores.metadata, stores.clock, "b")
    with pytest.raises(HeldError, match="the topic is open on n2 "):
        other.refuse_held(owner_of(stores), "topic", Path("."))


def test_a_claim_whose_answer_was_lost_can_be_given_back(stores: Stores) -> None:
    """Its node lives and does not know of it: without that nobody could open the topic. Claims of others stay."""
    lease = lease_of(stores.metadata, stores.clock, "a")
    claim_topic(stores.catalog, None, lease, stores.clock, new_claim())
    give_back_unknown_claim(stores.catalog, lease_of(stores.metadata, stores.clock, "b"))
    assert owner_of(stores).session == lease.session
    give_back_unknown_claim(stores.catalog, lease)
    assert (owner_of(stores).session, owner_of(stores).epoch) == ("", 1)


def test_a_change_succeeds_while_the_owner_document_is_rewritten_under_the_same_claim(stores: Stores) -> None:
    """The first flush of an owner names itself there while an object is published: neither is a conflict, and neither
    looks like another owner."""
    ownership = claim(stores, "a")
    commit = stores.metadata.commit
    rewritten: list[bool] = []

    def rewrite_first(checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        if not rewritten and any(write.key == KEY for write in writes):
            rewritten.append(True)
            ownership.name_flushes(FlushSource("a", "session", ownership.epoch))
        return commit(checks, writes)

    stores.metadata.commit = rewrite_first  # type: ignore[method-assign]
    ownership.change([put(b"mine")])
    assert rewritten
    entry = stores.metadata.get(KEY)
    assert entry is not None
    assert entry.value == b"mine"
    ownership.verify()
    with pytest.raises(ConflictError):
        ownership.change([put(b"again")])  # of the entry itself it is one


def test_the_same_node_fences_itself(stores: Stores) -> None:
    """A node that was restarted does not share the claim of its earlier life."""
    first = claim(stores, "a")
    claim(stores, "a")
    with pytest.raises(FencedError):
        first.verify()


def test_an_epoch_is_never_used_twice(stores: Stores) -> None:
    """Not after a deletion either: the floor remembers, and so does a node that was further."""
    claims = [claim(stores, "a") for _ in range(3)]
    assert [one.epoch for one in claims] == [1, 2, 3]
    claims[-1].remove()
    stores.metadata.put(KEYS.epoch_floor, encode_json(EpochFloor(epoch=3)))
    assert claim(stores, "b").epoch == 4
    assert claim(stores, "c", min_epoch=9).epoch == 9
    assert claim(stores, "c", min_epoch=5).epoch == 10


def test_a_topic_that_was_deleted_elsewhere_fences(stores: Stores) -> None:
    """Whoever still holds a claim hears that there is nothing to own."""
    first = claim(stores, "a")
    claim(stores, "b").remove()
    with pytest.raises(FencedError, match="deleted elsewhere"):
        first.verify()
    with pytest.raises(FencedError):
        first.change([put(b"late")])


def test_a_change_that_meets_another_version_is_a_conflict(stores: Stores) -> None:
    """The claim holds, but the entry is not what it was: nothing is written."""
    ownership = claim(stores, "a")
    version = stores.metadata.put(KEY, b"one")
    stores.metadata.put(KEY, b"two")
    for wrong in (None, version):
        with pytest.raises(ConflictError):
            ownership.change([put(b"three", wrong)])
    entry = stores.metadata.get(KEY)
    assert entry is not None
    assert entry.value == b"two"


def test_a_hint_may_lose_a_race_where_keys_are_changed_one_by_one(stores: Stores) -> None:
    """In a store of single keys the steps before a hint stand; one that can do both at once does neither."""
    ownership = claim(stores, "a")
    hint = KEYS.current
    stores.metadata.put(hint, b"somebody's")
    steps = [put(b"mine"), put(b"mine", None, is_hint=True, key=hint)]
    if stores.metadata.supports_multi_key:
        with pytest.raises(ConflictError):
            ownership.change(steps)
        assert stores.metadata.get(KEY) is None
    else:
        ownership.change(steps)
        entry = stores.metadata.get(KEY)
        assert entry is not None
        assert entry.value == b"mine"
    kept = stores.metadata.get(hint)
    assert kept is not None
    assert kept.value == b"somebody's"


def test_steps_can_delete(stores: Stores) -> None:
    """A deletion is a change like any other."""
    ownership = claim(stores, "a")
    version = stores.metadata.put(KEY, b"x")
    ownership.change([Step(Delete(KEY), version)])
    assert stores.metadata.get(KEY) is None


# Lineage


def test_lineage_goes_back_to_the_one_before(stores: Stores) -> None:
    """An owner that accepted nothing leaves the topic's end on the other node's disk; its claim still holds."""
    first = claim(stores, "a", claim="ca")
    second = claim(stores, "b", claim="cb")
    second.give_back_incarnation()
    found = owner_of(stores)
    assert (found.claim, found.incarnation, found.epoch) == ("cb", "ca", 2)
    second.verify()
    second.change([put(b"still mine")])
    second.give_back_incarnation()
    with pytest.raises(FencedError):
        first.verify()


def test_lineage_goes_back_over_several_owners(stores: Stores) -> None:
    """Two who only looked, one after the other: it is still the first one's."""
    claim(stores, "a", claim="ca")
    claim(stores, "b", claim="cb").give_back_incarnation()
    claim(stores, "c", claim="cc").give_back_incarnation()
    assert owner_of(stores).incarnation == "ca"


def test_a_first_owner_has_nobody_to_give_it_back_to(stores: Stores) -> None:
    """It keeps its own."""
    ownership = claim(stores, "a", claim="ca")
    ownership.give_back_incarnation()
    assert owner_of(stores).incarnation == "ca"


def test_a_fenced_owner_gives_nothing_back(stores: Stores) -> None:
    """It must not touch the entry of the one that replaced it."""
    claim(stores, "a", claim="ca")
    second = claim(stores, "b", claim="cb")
    claim(stores, "c", claim="cc")
    with pytest.raises(ConflictError):
        second.give_back_incarnation()
    assert owner_of(stores).incarnation == "cc"


# Races and lost answers


def test_of_those_who_claim_at_once_one_is_first(stores: Stores) -> None:
    """Every claim that got through has an epoch of its own, and only the last one holds."""
    claimed: list[Ownership] = []

    def race(node: str) -> None:
        for _ in range(5):
            try:
                claimed.append(claim(stores, node))
            except ConflictError:
                continue

    with Threads() as threads:
        for number in range(4):
            threads.start(lambda node=f"n{number}": race(node))  # type: ignore[misc]  # binds the loop's value
    epochs = [ownership.epoch for ownership in claimed]
    assert sorted(epochs) == list(range(1, len(claimed) + 1))
    holding = []
    for ownership in claimed:
        try:
            ownership.verify()
            holding.append(ownership.epoch)
        except FencedError:
            pass
    assert holding == [len(claimed)]


def test_a_claim_between_reading_and_writing_is_a_conflict() -> None:
    """The version that was read is the one that is replaced, or nothing is."""
    stores = Stores()
    assert isinstance(stores.metadata, FaultyMetadata)
    others: list[int] = []

    def interfere(operation: str, _keys: str) -> None:
        if operation == "commit" and not others:
            others.append(1)
            claim(stores, "fast")

    stores.metadata.on_request = interfere
    with pytest.raises(ConflictError, match="at the same moment") as raised:
        claim(stores, "slow")
    assert "Open it again" in str(raised.value)
    assert owner_of(stores).node == "fast"


@pytest.mark.parametrize("kind", ["multi-key", "single-key"])
@pytest.mark.parametrize("fault", ["unanswered", "late", "unavailable"])
def test_an_undecided_claim_is_raised_and_the_next_one_is_higher(kind: str, fault: str) -> None:
    """It may have been made or not; whoever claims again, at once or later, has an epoch that nobody had."""
    stores = Stores(kind)
    assert isinstance(stores.metadata, FaultyMetadata)
    stores.metadata.fail("commit", fault, nth=2)  # type: ignore[arg-type]  # all three are faults; the heartbeat is first
    with pytest.raises(StoreUnavailableError):
        claim(stores, "a")
    again = claim(stores, "a")
    stores.metadata.land_late_writes()
    again.verify()
    assert again.epoch == (2 if fault == "unanswered" else 1)
    assert claim(stores, "b").epoch == again.epoch + 1


def test_a_late_claim_that_lands_fences_whoever_has_none_since() -> None:
    """A claim that was given up and happens after all is a claim: the one before it is fenced."""
    stores = Stores()
    assert isinstance(stores.metadata, FaultyMetadata)
    first = claim(stores, "a")
    stores.metadata.fail("commit", "late", nth=2)  # the heartbeat is the first
    with pytest.raises(StoreUnavailableError):
        claim(stores, "b")
    first.verify()
    stores.metadata.land_late_writes()
    with pytest.raises(FencedError, match="taken over by node b"):
        first.change([put(b"late")])


@pytest.mark.parametrize("kind", ["multi-key", "single-key"])
def test_verifying_out_of_reach_is_not_being_fenced(kind: str) -> None:
    """Nobody stops because nobody answered."""
    stores = Stores(kind)
    assert isinstance(stores.metadata, FaultyMetadata)
    ownership = claim(stores, "a")
    stores.metadata.fail("*", times=None)
    for use in (ownership.verify, lambda: ownership.change([put(b"x")])):
        with pytest.raises(StoreUnavailableError):
            use()
    stores.metadata.heal()
    ownership.verify()


def test_a_damaged_owner_is_an_error_and_not_nobody(stores: Stores) -> None:
    """Nobody takes a topic over because its owner's entry cannot be read."""
    ownership = claim(stores, "a")
    stores.metadata.put(KEYS.owner, b'{"epoch": 1')
    with pytest.raises(DataError, match="owner"):
        ownership.verify()
    with pytest.raises(DataError, match="owner"):
        claim(stores, "b")


@pytest.fixture
def bucket_of_two() -> Iterator[tuple[Catalog, Catalog]]:
    """Two nodes with a metadata store each, over one real object store in memory."""
    objects = open_store("memory://")
    with BucketMetadataStore(objects) as a, BucketMetadataStore(objects) as b:
        yield Catalog(a, KEYS), Catalog(b, KEYS)


def test_two_nodes_of_a_bucket_fence_each_other(bucket_of_two: tuple[Catalog, Catalog]) -> None:
    """Conditional writes of the object store alone are enough."""
    stores = Stores()
    a, b = bucket_of_two
    first = claim_topic(a, a.owner(), lease_of(stores.metadata, stores.clock, "a"), stores.clock, new_claim())
    first.change([put(b"one")])
    second = claim_topic(b, b.owner(), lease_of(stores.metadata, stores.clock, "b"), stores.clock, new_claim())
    with pytest.raises(FencedError):
        first.change([put(b"two", None)])
    third = claim_topic(a, a.owner(), lease_of(stores.metadata, stores.clock, "a"), stores.clock, new_claim())
    assert (second.epoch, third.epoch) == (2, 3)
    with pytest.raises(FencedError):
        second.verify()
