"""Leases of nodes: what a living node holds is not opened elsewhere by accident, and nothing else stays locked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.cold.published import KINDS, lease_of
from tests.cold.station import DIRECTORY, TIME_FIELD, Node, Stores
from tests.log.workbench import wait_until

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Owner
from tidelog.cold.lease import DEFAULT_LEASE_SECONDS, Heartbeat, NodeLease
from tidelog.cold.settings import TierSettings
from tidelog.cold.tiered_log import Tier
from tidelog.errors import ClosedError, DataError, FencedError, HeldError, LockedError, StoreUnavailableError
from tidelog.log import LogSettings
from tidelog.log.directory import LOCK
from tidelog.store.document import encode_json
from tidelog.store.keys import node_key, node_prefix
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.testing import FaultyFiles, FaultyMetadata

LEASE = DEFAULT_LEASE_SECONDS


@pytest.fixture(params=KINDS)
def stores(request: pytest.FixtureRequest) -> Stores:
    return Stores(request.param)


@pytest.fixture(params=["time in the entry", "leases of the store"])
def shared(request: pytest.FixtureRequest) -> tuple[MetadataStore, ManualClock]:
    """A metadata store with leases of its own, and one without."""
    clock = ManualClock()
    return FaultyMetadata() if request.param == "time in the entry" else MemoryMetadataStore(clock), clock


def owned_by(lease: NodeLease) -> Owner:
    return Owner(
        epoch=1, claim="c", incarnation="c", node=lease.node, claimed_us=0, log_id="00" * 16, session=lease.session
    )


def heartbeats(metadata: MetadataStore, node: str) -> list[Heartbeat]:
    return [msgspec.json.decode(entry.value, type=Heartbeat) for entry in metadata.range(node_prefix(node))]


# Opening what another node holds


def test_a_topic_of_a_living_node_is_not_opened_elsewhere(stores: Stores) -> None:
    """The error names who has it, where, since when it was not heard of, and what to do; the owner goes on."""
    with Node(stores, "a").open() as first:
        stores.clock.advance(3.5)
        with pytest.raises(HeldError) as raised:
            Node(stores, "b").take(take_over=False)
        text = str(raised.value)
        for part in ("the topic is open on a (host ", "directory /data, pid ", "3.5 s old", "take_over=True", "--take"):
            assert part in text
        first.append(3)
        assert first.shipper.ship() == 3


def test_a_topic_is_taken_from_a_living_node_on_purpose(stores: Stores) -> None:
    """`take_over` fences the owner."""
    with Node(stores, "a").open() as first:
        Node(stores, "b").take(take_over=True)
        first.append(1)
        with pytest.raises(FencedError):
            first.shipper.ship()


def test_a_refused_opening_changes_nothing(stores: Stores) -> None:
    """Neither the owner nor the files of an earlier time, which may still be wanted there."""
    with Node(stores, "b").open() as replaced:
        replaced.append(2)
        with Node(stores, "a").open():
            before = replaced.files.image()
            found = stores.catalog.owner()
            with pytest.raises(HeldError):
                replaced.take(take_over=False)
            assert stores.catalog.owner() == found
            assert replaced.files.image() == before


def test_a_topic_is_free_once_the_lease_has_run_out(stores: Stores) -> None:
    """Not a moment before, and a heartbeat begins it again."""
    node = Node(stores, "a")
    node.take()
    stores.clock.advance(LEASE - 1)
    node.lease.renew()
    stores.clock.advance(LEASE - 0.001)
    with pytest.raises(HeldError):
        Node(stores, "b").take(take_over=False)
    stores.clock.advance(0.001)
    assert Node(stores, "b").take(take_over=False).catalog.epoch == 2


def test_a_topic_is_free_at_once_when_its_node_closes(stores: Stores) -> None:
    """The heartbeat goes with the node."""
    node = Node(stores, "a")
    node.take()
    node.lease.release()
    node.lease.release()
    assert heartbeats(stores.metadata, "a") == []
    Node(stores, "b").take(take_over=False)
    with pytest.raises(ClosedError):
        node.lease.hold()


def test_a_topic_that_its_node_let_go_of_is_free_while_the_node_lives(stores: Stores) -> None:
    """The owner document says so; everything else that the node holds stays its own."""
    node = Node(stores, "a")
    owned = node.take().catalog
    owned.ownership.release()
    owned.ownership.release()
    owned.ownership.verify()
    Node(stores, "b").take(take_over=False)
    with pytest.raises(FencedError):
        owned.ownership.verify()


def test_a_sealed_topic_is_free_while_its_node_lives(stores: Stores) -> None:
    """It was sealed for the next owner."""
    with Node(stores, "a").open() as first:
        first.append(3)
        first.shipper.ship()
        first.owned.seal(3)
        assert Node(stores, "b").take(take_over=False).next_offset == 3


def test_a_topic_that_a_living_node_deletes_is_not_finished_elsewhere(stores: Stores) -> None:
    """Two that delete at once would be in each other's way; once the node is gone, the next one finishes it."""
    node = Node(stores, "a")
    node.take().catalog.mark_deleted()
    with pytest.raises(HeldError):
        Node(stores, "b").take(take_over=False)
    stores.clock.advance(LEASE)
    taken = Node(stores, "b").take(take_over=False)
    assert (taken.next_offset, taken.catalog.epoch) == (0, 3)


def test_what_was_claimed_and_could_not_be_opened_is_free(stores: Stores) -> None:
    """The node lives and has nothing open: it must not keep others out."""
    files = FaultyFiles()
    files.make_directories(DIRECTORY)
    lock = files.lock(DIRECTORY / LOCK)
    tier = Tier(stores.objects, stores.metadata, files=files, clock=stores.clock, node="a", runs_in_background=False)
    with pytest.raises(LockedError, match="already open in process"):
        tier.open_log(DIRECTORY, "shop", "orders", LogSettings(), TierSettings(), time_field=TIME_FIELD)
    assert [one.node for one in heartbeats(stores.metadata, "a")] == ["a"]
    assert Node(stores, "b").take(take_over=False).catalog.epoch == 2
    lock.release()
    tier.lease.release()


# The same directory


def test_the_same_directory_opens_again_at_once_after_a_kill(stores: Stores) -> None:
    """Its lock proves that the process of the heartbeat is dead, and what that left in the store goes."""
    node = Node(stores, "a")
    node.take()
    dead = node.lease.session
    node.take(take_over=False)
    assert [one.session for one in heartbeats(stores.metadata, "a")] == [node.lease.session] != [dead]


@pytest.mark.parametrize("field", ["host", "boot", "directory"])
def test_a_copy_of_the_directory_is_another_node(stores: Stores, field: str) -> None:
    """A heartbeat of the own name from another place is not ours to bury while it lives."""
    node = Node(stores, "a")
    node.take()
    key = node_key("a", node.lease.session)
    (found,) = heartbeats(stores.metadata, "a")
    stores.metadata.put(key, encode_json(msgspec.structs.replace(found, **{field: "elsewhere"})))
    with pytest.raises(HeldError, match="open on a "):
        node.take(take_over=False)
    stores.clock.advance(LEASE)
    node.take(take_over=False)
    assert [one.session for one in heartbeats(stores.metadata, "a")] == [node.lease.session]


def test_a_topic_of_an_earlier_session_is_free_for_others(stores: Stores) -> None:
    """The node was opened again and has not asked for this topic: nobody has it open."""
    Node(stores, "a").take()
    lease_of(stores.metadata, stores.clock, "a").hold()
    Node(stores, "b").take(take_over=False)


def test_a_node_that_opens_many_topics_again_asks_once_for_its_last_session() -> None:
    """Not once for each of them; and again after a while, since a copy of the directory may have come back."""
    metadata, clock = FaultyMetadata(), ManualClock()
    last, lease = lease_of(metadata, clock, "a"), lease_of(metadata, clock, "a")
    last.hold()
    last.release()
    metadata.reset_traffic()
    for _ in range(100):
        assert lease.holder(owned_by(last)) is None
    assert metadata.traffic.requests["get"] == 1
    copy = lease_of(metadata, clock, "a", "/copy")
    copy.session = last.session
    copy._first = msgspec.structs.replace(copy._first, session=last.session)
    copy.hold()
    clock.advance(LEASE / 3)
    assert lease.holder(owned_by(last)) is not None


# The heartbeat


def test_a_heartbeat_says_who_and_where(shared: tuple[MetadataStore, ManualClock]) -> None:
    """And when it was renewed: each time that a third of the lease has passed and something is claimed."""
    metadata, clock = shared
    lease = lease_of(metadata, clock, "a", "/srv/log")
    lease.hold()
    (first,) = heartbeats(metadata, "a")
    assert (first.node, first.session, first.directory) == ("a", lease.session, "/srv/log")
    assert (first.lease_seconds, first.renewed_us) == (LEASE, clock.now_us())
    assert first.host
    clock.advance(1)
    lease.hold()
    assert heartbeats(metadata, "a") == [first]
    clock.advance(LEASE / 3)
    lease.hold()
    assert heartbeats(metadata, "a") == [msgspec.structs.replace(first, renewed_us=clock.now_us())]


def test_leases_of_every_kind_of_store_run_out(shared: tuple[MetadataStore, ManualClock]) -> None:
    """And come back when the node does: who slept takes a new lease."""
    metadata, clock = shared
    holder, other = lease_of(metadata, clock, "a"), lease_of(metadata, clock, "b")
    holder.hold()
    clock.advance(LEASE - 0.1)
    assert other.holder(owned_by(holder)) is not None
    holder.renew()
    clock.advance(LEASE - 0.1)
    assert other.holder(owned_by(holder)) is not None
    clock.advance(0.1)
    assert other.holder(owned_by(holder)) is None
    holder.renew()
    assert other.holder(owned_by(holder)) is not None
    holder.release()
    assert other.holder(owned_by(holder)) is None


def test_a_node_does_not_lock_itself_out(shared: tuple[MetadataStore, ManualClock]) -> None:
    """What its own session holds is its own."""
    metadata, clock = shared
    lease = lease_of(metadata, clock, "a")
    lease.hold()
    assert lease.holder(owned_by(lease)) is None


def test_a_node_that_is_looked_at_gives_no_sign_of_life(shared: tuple[MetadataStore, ManualClock]) -> None:
    """Before the first claim nothing is written, and nothing is removed at the end."""
    metadata, clock = shared
    lease = lease_of(metadata, clock, "a")
    lease.renew()
    lease.release()
    assert metadata.keys("") == []


def test_a_claim_needs_a_heartbeat() -> None:
    """Without one, others would take the topic for free: while the store gives no answer nothing is claimed."""
    stores = Stores()
    assert isinstance(stores.metadata, FaultyMetadata)
    stores.metadata.fail("commit", "unavailable")
    with pytest.raises(StoreUnavailableError):
        Node(stores, "a").take()
    assert stores.catalog.owner() is None


def test_a_damaged_heartbeat_is_told_and_does_not_stop_a_takeover(stores: Stores) -> None:
    """Nobody can tell then whether that node lives."""
    node = Node(stores, "a")
    node.take()
    stores.metadata.put(node_key("a", node.lease.session), b"{")
    with pytest.raises(DataError, match="is no heartbeat"):
        Node(stores, "b").take(take_over=False)
    node.take(take_over=True)


@pytest.fixture
def beating() -> Iterator[tuple[FaultyMetadata, NodeLease]]:
    """A lease that renews itself, often."""
    metadata = FaultyMetadata()
    lease = NodeLease(metadata, ManualClock(), "a", Path("/data"), lease_seconds=0.01)
    yield metadata, lease
    lease.release()


def test_the_heartbeat_goes_on_by_itself(beating: tuple[FaultyMetadata, NodeLease]) -> None:
    """One for the node, however many topics it claims; the end ends it."""
    metadata, lease = beating
    for _ in range(3):
        lease.hold()
    versions: set[str] = set()

    def is_renewed() -> bool:
        versions.update(entry.version for entry in metadata.range(node_prefix("a")))
        return len(versions) > 3

    wait_until(is_renewed, "heartbeats")
    assert len(metadata.keys(node_prefix("a"))) == 1
    lease.release()
    assert metadata.keys(node_prefix("a")) == []


def test_a_heartbeat_that_fails_is_told_once_and_goes_on(
    beating: tuple[FaultyMetadata, NodeLease], caplog: pytest.LogCaptureFixture
) -> None:
    """What it means is said: another node may open what this one holds."""
    metadata, lease = beating
    lease.hold()
    caplog.set_level(logging.WARNING)
    metadata.fail("commit", "unavailable", times=None)
    wait_until(lambda: "another node may open what this one holds" in caplog.text, "the warning")
    metadata.heal()
    wait_until(lambda: "is written again" in caplog.text, "the end of it")
    assert caplog.text.count("another node may open") == 1


def test_a_heartbeat_that_the_store_held_up_is_followed_at_once() -> None:
    """It is as old as its request: with a pause behind it, others would take the node for dead."""
    clock = ManualClock()
    is_slow = False
    metadata = FaultyMetadata(on_request=lambda *_: clock.advance(0.8 * LEASE if is_slow else 0.0))
    lease = NodeLease(metadata, clock, "a", Path("/data"), renews_itself=False)
    lease.hold()
    assert lease._renew_now_and_then() == pytest.approx(LEASE / 3)
    is_slow = True
    assert lease._renew_now_and_then() == 0.0
    is_slow = False
    assert lease._renew_now_and_then() == pytest.approx(LEASE / 3)
    lease.release()


def test_lease_that_follows_another_is_renewed_with_it_alone() -> None:
    """Loss prevented: renewed in between, it outlived the node's lease in the cluster, and others waited for it."""
    clock = ManualClock()
    metadata = MemoryMetadataStore(clock)
    lease = NodeLease(metadata, clock, "a", DIRECTORY)
    lease.follow(4.0)
    lease.hold()
    assert lease._task is None
    assert [one.lease_seconds for one in heartbeats(metadata, "a")] == [4.0]
    clock.advance(3.9)
    lease.renew()
    clock.advance(3.9)
    assert heartbeats(metadata, "a")
    clock.advance(0.2)
    assert not heartbeats(metadata, "a")
    lease.release()
