"""Membership: leases, names, numbers, the version gate and the election."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import msgspec
import pytest

from tidelog.clock import ManualClock
from tidelog.cluster.documents import (
    ClusterSettings,
    ClusterState,
    Leader,
    NodeInfo,
    decoded,
    decoded_settings,
    is_too_old,
)
from tidelog.cluster.leader import read_loads
from tidelog.cluster.member import Identity, Member, changed_drain
from tidelog.cluster.operations import ClusterOperations
from tidelog.errors import (
    ConfigError,
    HeldError,
    InputError,
    LeaseLostError,
    NotFoundError,
    StoreUnavailableError,
)
from tidelog.service.cluster_control import NodeLoad, NodeTail, Unshipped
from tidelog.store.document import encode_json
from tidelog.store.keys import DEFAULT_ROOT, ClusterKeys
from tidelog.store.metadata.base import Check, DelegatingMetadata, Entry, Write
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.watch import PollingWatch

KEYS = ClusterKeys()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def etcd(clock: ManualClock) -> MemoryMetadataStore:
    return MemoryMetadataStore(clock)


def member(
    etcd: MemoryMetadataStore, clock: ManualClock, name: str, directory: str = "", version: str = "1.2"
) -> Member:
    return Member(etcd, KEYS, clock, Identity(name, directory or name, "127.0.0.1:1", "http://x", "z", version), 10)


def alive(one: Member) -> bool:
    """Asked anew each time."""
    return one.is_alive


def leads(one: Member) -> bool:
    return one.leads_by is not None


def test_a_member_is_seen_until_its_lease_runs_out(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """And stops to believe in itself before others stop to see it."""
    one = member(etcd, clock, "a")
    one.join()
    found = decoded(etcd.get(KEYS.node("a")), NodeInfo)
    assert found is not None
    assert (found.name, found.kafka, found.zone, found.version) == ("a", "127.0.0.1:1", "z", "1.2")
    clock.advance(9)
    one.beat()
    clock.advance(9)
    assert alive(one)
    clock.advance(1)
    assert not alive(one)
    assert etcd.get(KEYS.node("a")) is None
    with pytest.raises(LeaseLostError):
        one.beat()
    one.join()
    assert alive(one)
    assert (one.leases_lost, one.node_id) == (1, 1)


def test_a_node_whose_registration_failed_joins_again(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """Loss prevented: it renewed the lease that it had got, took itself for a member, and no other node ever saw it."""

    class RefusesOnce(DelegatingMetadata):
        is_refusing = True

        def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
            if self.is_refusing:
                self.is_refusing = False
                raise StoreUnavailableError("it never arrived")
            return super()._commit(checks, writes)

    one = member(etcd, clock, "a")
    one.prepare()
    one._metadata = RefusesOnce(etcd)
    with pytest.raises(StoreUnavailableError):
        one.join()
    assert not alive(one)
    assert not etcd._lease_ends, "the lease that it could not use is given back"
    with pytest.raises(LeaseLostError):
        one.beat()
    one.join()
    assert alive(one)
    assert etcd.get(KEYS.node("a")) is not None


def test_leaving_ends_a_membership_at_once(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """With everything that hung on its lease."""
    one = member(etcd, clock, "a")
    one.join()
    one.campaign()
    one.report(NodeLoad(node="a", at_us=1, open=3), NodeTail(at_us=1))
    assert read_loads(etcd, KEYS)["a"].open == 3
    one.begin_to_leave()
    found = decoded(etcd.get(KEYS.node("a")), NodeInfo)
    assert found is not None
    assert found.is_leaving
    one.leave()
    assert [etcd.get(key) for key in (KEYS.node("a"), KEYS.leader, KEYS.load("a"))] == [None, None, None]


def test_what_is_only_on_the_disk_of_a_dead_node_stays_known(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """Until a node of that name says otherwise, or has handed over everything."""
    operations = ClusterOperations(etcd, DEFAULT_ROOT)
    tail = NodeTail(at_us=7_000_000, topics={"shop/orders": Unshipped(messages=3, bytes=90, seconds=1.5)})
    one = member(etcd, clock, "a")
    one.join()
    one.report(NodeLoad(node="a", at_us=1), tail)
    (row,) = operations.restore_point()
    assert (row.node, row.is_alive, row.topic, row.messages) == ("a", True, "shop/orders", 3)
    assert (operations.status().unshipped_messages, operations.status().left_messages) == (3, 0)
    clock.advance(10)
    (row,) = operations.restore_point()
    assert (row.is_alive, row.messages, row.reported.timestamp()) == (False, 3, 7.0)
    assert (operations.status().unshipped_messages, operations.status().left_messages) == (0, 3)
    again = member(etcd, clock, "a")
    again.join()
    assert operations.restore_point()
    again.report(NodeLoad(node="a", at_us=2), NodeTail(at_us=2))
    assert operations.restore_point() == []
    again.report(NodeLoad(node="a", at_us=3), tail)
    again.leave(is_empty=True)
    assert operations.restore_point() == []
    last = member(etcd, clock, "a")
    last.join()
    last.report(NodeLoad(node="a", at_us=4), tail)
    last.leave()
    assert len(operations.restore_point()) == 1


def test_a_name_belongs_to_one_directory_at_a_time(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """The same directory, started again, replaces what its last process left."""
    member(etcd, clock, "a", "one").join()
    with pytest.raises(HeldError, match="another node of this cluster is called a"):
        member(etcd, clock, "a", "two").join()
    again = member(etcd, clock, "a", "one")
    again.join()
    assert alive(again)
    clock.advance(10)
    member(etcd, clock, "a", "two").join()


def test_numbers_of_nodes_are_given_once(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """Nodes that come at the same moment get different ones, and keep them."""
    members = [member(etcd, clock, f"n{number}") for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(Member.join, members))
    assert sorted(one.node_id for one in members) == list(range(1, 13))
    again = member(etcd, clock, "n3")
    again.join()
    assert again.node_id == members[3].node_id


def test_one_node_at_a_time_is_elected(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """Another one follows when its lease has run out."""
    one, other = member(etcd, clock, "a"), member(etcd, clock, "b")
    one.join()
    clock.advance(5)
    other.join()
    assert one.campaign() is not None
    assert other.campaign() is None
    assert not leads(other)
    clock.advance(5)
    entry = other.campaign()
    assert entry is not None
    assert leads(one)  # it does not know yet, and its commits check the document
    seen = decoded(entry, Leader)
    one.seen_leader(seen, entry.version)
    assert not leads(one)
    other.seen_leader(seen, entry.version)
    assert leads(other)


def test_a_candidate_whose_answer_was_lost_leads_when_it_sees_the_document(
    etcd: MemoryMetadataStore, clock: ManualClock
) -> None:
    """Nobody else can become the leader while it lives: the cluster would be without one."""

    class LosesAnswer(DelegatingMetadata):
        def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
            super()._commit(checks, writes)
            raise StoreUnavailableError("the answer was lost")

    one = member(etcd, clock, "a")
    one.join()
    one._metadata = LosesAnswer(etcd)
    with pytest.raises(StoreUnavailableError):
        one.campaign()
    assert not leads(one)
    entry = etcd.get(KEYS.leader)
    assert entry is not None
    one.seen_leader(decoded(entry, Leader), entry.version)
    assert leads(one)


def test_a_node_that_is_too_old_does_not_join(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """The version gate is raised when all nodes are upgraded."""
    etcd.put(KEYS.settings, encode_json(ClusterSettings(minimum_version="1.10")))
    with pytest.raises(ConfigError, match=r"the cluster requires 1\.10"):
        member(etcd, clock, "a", version="1.9.3").join()
    member(etcd, clock, "a", version="1.10.0").join()
    assert [is_too_old(version, "1.10") for version in ("", "1.2.dev0", "1.10", "2.0", "1.10.1+local")] == [
        *(True, True, False, False, False)
    ]


def test_settings_of_a_newer_version_do_not_lift_the_version_gate(
    etcd: MemoryMetadataStore, clock: ManualClock
) -> None:
    """Let old nodes in as soon as one setting had a value that they did not know: all settings counted as absent."""
    etcd.put(
        KEYS.settings, b'{"strategy":"quantum","rest_seconds":7,"hysteresis":9,"minimum_version":"1.10","newer":1}'
    )
    with pytest.raises(ConfigError, match=r"the cluster requires 1\.10"):
        member(etcd, clock, "a", version="1.9.3").join()
    expected = ClusterSettings(rest_seconds=7, minimum_version="1.10")
    assert decoded_settings(etcd.get(KEYS.settings)) == expected
    assert decoded_settings(Entry(KEYS.settings, b"[]", "1")) == decoded_settings(None) == ClusterSettings()


def test_a_drain_by_an_older_version_keeps_what_a_newer_one_wrote(
    etcd: MemoryMetadataStore, clock: ManualClock
) -> None:
    """Lost the fields that it does not know."""
    member(etcd, clock, "a").join()
    etcd.put(KEYS.node_id("a"), b'{"node_id":1,"newer":7}')
    changed_drain(etcd, KEYS, "a", is_draining=True)
    found = etcd.get(KEYS.node_id("a"))
    assert found is not None
    assert msgspec.json.decode(found.value) == {"node_id": 1, "is_draining": True, "newer": 7}


def test_draining_is_remembered_of_known_nodes_only(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """Alive or not; the state of every node says so."""
    one = member(etcd, clock, "a")
    one.join()
    with pytest.raises(NotFoundError, match="no node b"):
        changed_drain(etcd, KEYS, "b", is_draining=True)
    assert changed_drain(etcd, KEYS, "a", is_draining=True)
    assert not changed_drain(etcd, KEYS, "a", is_draining=True)
    state = ClusterState(KEYS)
    changes = PollingWatch(etcd, KEYS.prefix).look()
    assert changes is not None
    state.apply(changes)
    assert (state.is_draining("a"), state.is_usable("a")) == (True, False)


def test_node_that_nobody_can_take_over_from_is_not_drained(etcd: MemoryMetadataStore, clock: ManualClock) -> None:
    """It was, and the command waited for what could not happen."""
    operations = ClusterOperations(etcd, DEFAULT_ROOT)
    for name in ("a", "b"):
        member(etcd, clock, name).join()
    assert operations.drain("a")
    for _ in range(2):
        with pytest.raises(InputError, match="no other node can take what b has"):
            operations.drain("b")
    assert not operations.drain("a")
    assert not operations.state().is_draining("b")
    with pytest.raises(NotFoundError, match="no node c"):
        operations.drain("c")
    clock.advance(100)
    assert operations.drain("b"), "one that is gone has nothing to hand over"


class SilentMetadata(DelegatingMetadata):
    """One that does not answer."""

    def __init__(self, inner: MemoryMetadataStore) -> None:
        super().__init__(inner)
        self.answers = Event()

    def get(self, key: str) -> Entry | None:
        self.answers.wait()
        return super().get(key)


def test_operators_hear_soon_that_etcd_does_not_answer(
    etcd: MemoryMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited for longer than their tools do, and learned nothing."""
    monkeypatch.setattr("tidelog.cluster.operations._ANSWER_SECONDS", 0.01)
    silent = SilentMetadata(etcd)
    operations = ClusterOperations(silent, DEFAULT_ROOT)
    for look in (operations.status, operations.nodes, operations.topics, operations.engines, operations.plan):
        with pytest.raises(StoreUnavailableError, match=r"memory://.* gave no answer within"):
            look()
    silent.answers.set()
    monkeypatch.undo()
    assert operations.status().nodes == 0
