"""The rounds of a leader: what they write, and what they never do."""

from __future__ import annotations

import msgspec
import pytest

from tidelog.clock import ManualClock
from tidelog.cluster.documents import (
    NOBODY,
    ClusterSettings,
    ClusterState,
    EnginePlacement,
    NodeId,
    Request,
    TopicPlacement,
    decoded,
)
from tidelog.cluster.leader import MAX_DECISIONS, LeaderRounds, TopicSeen, read_decisions
from tidelog.cluster.member import Identity, Member
from tidelog.service.cluster_control import NodeLoad
from tidelog.store.document import encode_json
from tidelog.store.keys import ClusterKeys
from tidelog.store.metadata.base import Check
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.watch import Changes
from tidelog.topics.names import TopicName

KEYS = ClusterKeys()
ORDERS = TopicName("shop", "orders")


class Bench:
    """A cluster of two nodes in a store in memory, of which `a` leads."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.etcd = MemoryMetadataStore(self.clock)
        self.members = [
            Member(self.etcd, KEYS, self.clock, Identity(name, name, "127.0.0.1:1", ""), 10) for name in ("a", "b")
        ]
        for member in self.members:
            member.join()
        assert self.members[0].campaign() is not None
        self.rounds = LeaderRounds(self.etcd, KEYS, self.clock, "a")
        self.rounds._began_at = float("-inf")  # it waits for nobody any more
        self._asked = 0

    @property
    def leads_by(self) -> Check:
        check = self.members[0].leads_by
        assert check is not None
        return check

    def state(self) -> ClusterState:
        state = ClusterState(KEYS)
        state.apply(Changes(True, {entry.key: entry for entry in self.etcd.range(KEYS.prefix)}))
        return state

    def create(self, *partitions: str) -> None:
        document = TopicPlacement(id="00", created_us=1, partitions=partitions)
        self.etcd.put(KEYS.topic(*ORDERS), encode_json(document))

    def placed(self) -> tuple[str, ...]:
        found = decoded(self.etcd.get(KEYS.topic(*ORDERS)), TopicPlacement)
        assert found is not None
        return found.partitions

    def ask(self, *requests: Request) -> None:
        """What operators ask for, one after the other."""
        for request in requests:
            self._asked += 1
            self.etcd.put(KEYS.request(f"{self._asked:04d}"), encode_json(request))


def move(node: str, partition: int = 0, *, pin: bool = False) -> Request:
    return Request(kind="move", asked_us=1, topic=str(ORDERS), partition=partition, node=node, pin=pin)


def move_engine(node: str, *, pin: bool = False) -> Request:
    return Request(kind="move-engine", asked_us=1, engine="photos", node=node, pin=pin)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_round_writes_placements_with_their_reasons(bench: Bench) -> None:
    """And nothing when there is nothing to decide."""
    bench.create("", "", "gone")
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert set(bench.placed()) == {"a", "b"}
    (found,) = read_decisions(bench.etcd, KEYS)
    assert found.leader == "a"
    reasons = {(one.kind, one.reason) for one in found.decisions if one.topic}
    assert reasons == {("assign", "nobody serves it"), ("failover", "gone is not alive")}
    before = bench.etcd.change_mark()
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert bench.etcd.change_mark() == before


def test_an_older_leader_keeps_what_newer_nodes_have_written(bench: Bench) -> None:
    """Lost fields of topics, engines and slots that it does not know, in the middle of an upgrade."""
    topic, engine = KEYS.topic(*ORDERS), KEYS.engine("photos")
    bench.etcd.put(topic, b'{"id":"00","created_us":1,"partitions":["",""],"newer":7}')
    bench.etcd.put(engine, b'{"arguments":{"newer":8},"newer":7}')
    bench.etcd.put(KEYS.coordinators, b'{"slots":["",""],"newer":7}')
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert set(bench.placed()) == {"a", "b"}
    found = {
        key: msgspec.json.decode(entry.value)
        for key in (topic, engine, KEYS.coordinators)
        if (entry := bench.etcd.get(key))
    }
    assert [one["newer"] for one in found.values()] == [7, 7, 7]
    assert found[engine]["node"] in ("a", "b")
    assert found[engine]["arguments"] == {"newer": 8}
    assert all(found[KEYS.coordinators]["slots"])


def test_a_leader_that_was_replaced_changes_nothing(bench: Bench) -> None:
    """Its plan may be right; it is not the one who carries it out."""
    bench.create("", "")
    stale, state = bench.leads_by, bench.state()
    bench.etcd.delete(KEYS.leader)
    assert bench.members[1].campaign() is not None
    assert bench.rounds.round(state, {}, stale) == []
    assert bench.placed() == ("", "")
    assert read_decisions(bench.etcd, KEYS) == []


def test_a_topic_that_was_changed_meanwhile_is_planned_again(bench: Bench) -> None:
    """The plan was made from what was there before."""
    bench.create("", "")
    state = bench.state()
    bench.create("b", "", "")
    assert bench.rounds.round(state, {}, bench.leads_by) == []
    assert bench.placed() == ("b", "", "")
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert "" not in bench.placed()


def test_requests_are_forgotten_when_they_are_done_or_cannot_be(bench: Bench) -> None:
    """A move, a move to nowhere, a move of nothing, and balance."""
    bench.create("a", "b")
    where = {"topic": str(ORDERS), "asked_us": 1}
    requests = {
        "1": Request(kind="move", partition=0, node="b", pin=True, **where),  # type: ignore[arg-type]
        "2": Request(kind="move", partition=1, node="nowhere", **where),  # type: ignore[arg-type]
        "3": Request(kind="move", partition=9, node="a", **where),  # type: ignore[arg-type]
    }
    for name, request in requests.items():
        bench.etcd.put(KEYS.request(name), encode_json(request))
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert bench.state().requests == {}
    assert bench.placed()[0] == "b"
    assert bench.state().topics[ORDERS].pins == {0: "b"}
    bench.etcd.put(KEYS.request("4"), encode_json(Request(kind="balance", asked_us=1)))
    for _ in range(3):
        bench.clock.advance(2)
        for member in bench.members:
            member.beat()
        bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert bench.state().requests == {}


def test_a_node_below_the_disk_floor_gets_nothing(bench: Bench) -> None:
    """By what it has reported last; one that has reported nothing yet has room, and a floor of 0 is none."""
    loads = {"a": NodeLoad(node="a", at_us=1, disk_free_bytes=(1 << 30) - 1)}
    bench.create("", "", "", "")
    bench.rounds.round(bench.state(), loads, bench.leads_by)
    assert bench.placed() == ("b",) * 4
    bench.etcd.put(KEYS.settings, encode_json(ClusterSettings(min_disk_free_bytes=0)))
    bench.create("", "", "", "")
    bench.rounds.round(bench.state(), loads, bench.leads_by)
    assert sorted(bench.placed()) == ["a", "a", "b", "b"]


def test_a_pin_is_set_and_ended_where_there_is_nothing_to_move(bench: Bench) -> None:
    """Loss prevented: the command said that it was done, nothing was written, and balance took the partition away."""
    bench.create("a", "b", "a")  # and b has the engine
    bench.etcd.put(KEYS.engine("photos"), encode_json(EnginePlacement(node="b")))
    for pin, expected in ((True, {1: "b"}), (False, {})):
        bench.ask(move("b", partition=1, pin=pin), move_engine("b", pin=pin))
        bench.rounds.round(bench.state(), {}, bench.leads_by)
        state = bench.state()
        assert (state.requests, bench.placed()) == ({}, ("a", "b", "a"))
        assert state.topics[ORDERS].pins == expected
        assert (state.engines["photos"].node, state.engines["photos"].pin) == ("b", "b" if pin else NOBODY)
    assert not [one for one in read_decisions(bench.etcd, KEYS) if one.decisions[0].slot < 0]


def test_a_pin_is_set_where_a_failover_was_faster(bench: Bench) -> None:
    """Loss prevented: what failed over to the node that was asked for was not pinned there."""
    bench.create("gone")
    bench.etcd.put(KEYS.engine("photos"), encode_json(EnginePlacement(node="gone")))
    bench.etcd.put(KEYS.node_id("b"), encode_json(NodeId(node_id=2, is_draining=True)))  # there is one node left
    bench.ask(move("a", pin=True), move_engine("a", pin=True))
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    kinds = {one.kind for rounds in read_decisions(bench.etcd, KEYS) for one in rounds.decisions if one.slot < 0}
    assert kinds == {"failover"}
    state = bench.state()
    assert (state.requests, state.topics[ORDERS].pins, state.engines["photos"].pin) == ({}, {0: "a"}, "a")


def test_requests_about_one_thing_are_carried_out_in_their_order(bench: Bench) -> None:
    """The last one says where it ends, and whether it is pinned."""
    bench.create("a", "b")
    bench.etcd.put(KEYS.engine("photos"), encode_json(EnginePlacement(node="a")))
    for ask in (move, move_engine):
        bench.ask(ask("a"), ask("b", pin=True), ask("a", pin=True), ask("b"), ask("a"))
    for _ in range(8):
        bench.rounds.round(bench.state(), {}, bench.leads_by)
    state = bench.state()
    assert (state.requests, bench.placed()[0], state.topics[ORDERS].pins) == ({}, "a", {})
    assert (state.engines["photos"].node, state.engines["photos"].pin) == ("a", NOBODY)


def test_a_request_stays_until_its_consequence_is_written(bench: Bench) -> None:
    """The topic was changed meanwhile: the move is planned again, and the pin comes with it."""
    bench.create("a", "b")
    bench.ask(move("b", pin=True))
    state = bench.state()
    bench.create("a", "b", "b")
    bench.rounds.round(state, {}, bench.leads_by)
    assert bench.state().requests
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert (bench.state().requests, bench.state().topics[ORDERS].pins) == ({}, {0: "b"})


def test_a_topic_of_many_partitions_is_given_out_in_transactions_that_etcd_takes(bench: Bench) -> None:
    """Its decisions would be larger than a document may be; none of them is lost."""
    bench.create(*[""] * 12_000)
    written = bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert [entry.key for entry in written].count(KEYS.topic(*ORDERS)) > 1
    assert {name: bench.placed().count(name) for name in ("a", "b", "")} == {"a": 6000, "b": 6000, "": 0}
    decided = [one.partition for rounds in read_decisions(bench.etcd, KEYS) for one in rounds.decisions if one.topic]
    assert sorted(decided) == list(range(12_000))


def test_a_new_leader_lets_others_come_before_it_gives_out_everything(bench: Bench) -> None:
    """After all nodes were started at once, the first one is not given what the others had; a single one that is lost
    is replaced at once."""
    bench.rounds = LeaderRounds(bench.etcd, KEYS, bench.clock, "a")
    bench.create("a", "c", "d", "e")
    assert bench.rounds.round(bench.state(), {}, bench.leads_by) == []
    assert bench.rounds.is_gathering
    bench.clock.advance(1)
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert set(bench.placed()) == {"a", "b"}
    bench.rounds.forget()
    bench.create("a", "b", "c")
    bench.rounds.round(bench.state(), {}, bench.leads_by)
    assert set(bench.placed()) == {"a", "b"}


def test_moves_are_counted_whatever_the_wall_clock_says(bench: Bench) -> None:
    """Each move of a partition counts, in the hour after it, though the clock was set forwards and backwards."""
    request = Request(kind="move", topic=str(ORDERS), partition=0, node="b", asked_us=1)
    bench.create("a", "b")
    bench.etcd.put(KEYS.settings, encode_json(ClusterSettings(hysteresis=1)))
    for number, ahead_us in enumerate([0, 7200 * 10**6, -(10**9), -(10**12)]):
        bench.clock._now_us += ahead_us
        asked = msgspec.structs.replace(request, node="ba"[number % 2])
        bench.etcd.put(KEYS.request(str(number)), encode_json(asked))
        bench.rounds.round(bench.state(), {}, bench.leads_by)
        assert bench.placed()[0] == asked.node
        assert bench.rounds.situation(bench.state(), {}).moves_this_hour == number + 1
    later = LeaderRounds(bench.etcd, KEYS, bench.clock, "a")
    assert later.situation(bench.state(), {}).moves_this_hour == 4
    bench.clock.advance(3601)
    assert bench.rounds.situation(bench.state(), {}).moves_this_hour == 0


def test_strays_are_adopted_when_they_were_seen_twice(bench: Bench) -> None:
    """One that is being deleted is not made again; where no topic is known, all are."""
    seen = {ORDERS: TopicSeen(5, 2)}
    other = TopicName("shop", "other")
    bench.rounds.adopt(bench.state(), seen, bench.leads_by, lambda: "00")
    assert bench.placed() == ("", "")
    bench.rounds.adopt(bench.state(), {**seen, other: TopicSeen(5, 1)}, bench.leads_by, lambda: "00")
    assert other not in bench.state().topics
    bench.rounds.adopt(bench.state(), {**seen, other: TopicSeen(5, 1)}, bench.leads_by, lambda: "00")
    assert other in bench.state().topics


def test_the_log_of_decisions_is_bounded(bench: Bench) -> None:
    """The oldest go."""
    for number in range(MAX_DECISIONS + 70):
        bench.etcd.put(KEYS.decision(number), b"{}")
    bench.rounds.trim()
    keys = bench.etcd.keys(KEYS.decisions_prefix)
    assert (len(keys), keys[0]) == (MAX_DECISIONS, KEYS.decision(70))
