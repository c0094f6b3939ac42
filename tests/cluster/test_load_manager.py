"""What the load manager decides, and why."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from tidelog.cluster.documents import ClusterSettings, Coordinators, Decision, EnginePlacement, Request, TopicPlacement
from tidelog.cluster.inventory import Inventory
from tidelog.cluster.load_manager import Candidate, Situation, imbalance, plan
from tidelog.service.cluster_control import Load, NodeLoad
from tidelog.service.placement import SLOTS
from tidelog.topics.names import TopicName

NOW = 1e6
ORDERS = TopicName("shop", "orders")
FAIR = ClusterSettings(strategy="fair")


def nodes(*names: str, zones: Sequence[str] = ("",)) -> dict[str, Candidate]:
    return {name: Candidate(name, zones[number % len(zones)]) for number, name in enumerate(names)}


def topic(*owners: str, pins: Mapping[int, str] | None = None) -> TopicPlacement:
    return TopicPlacement(id="00", created_us=1, partitions=owners, pins=dict(pins or {}))


def settled(*names: str) -> Coordinators:
    return Coordinators(slots=tuple(names[slot % len(names)] for slot in range(SLOTS)))


def situation(
    there: Mapping[str, Candidate],
    topics: Mapping[TopicName, TopicPlacement],
    settings: ClusterSettings = FAIR,
    **more: object,
) -> Situation:
    """A cluster whose coordinators are fine, unless something else is said."""
    found = Situation(now=NOW, settings=settings, nodes=there, topics=topics, coordinators=settled(*there))
    return msgspec.structs.replace(found, **more)


def carried_out(before: Situation, decisions: Sequence[Decision]) -> Situation:
    """The same cluster with the decisions made."""
    placed = {name: list(placement.partitions) for name, placement in before.topics.items()}
    for decision in decisions:
        if decision.topic:
            placed[TopicName(*decision.topic.split("/"))][decision.partition] = decision.to
    topics = {
        name: msgspec.structs.replace(placement, partitions=tuple(placed[name]))
        for name, placement in before.topics.items()
    }
    return msgspec.structs.replace(before, topics=topics)


def counts(found: Situation) -> Counter[str]:
    return Counter(node for placement in found.topics.values() for node in placement.partitions)


def test_new_partitions_are_spread_over_nodes_and_zones() -> None:
    """Each node gets its share of a topic, and each zone too."""
    there = nodes("a", "b", "c", "d", "e", "f", zones=("x", "y", "z"))
    before = situation(there, {ORDERS: topic(*[""] * 6), TopicName("shop", "small"): topic("", "", "")})
    decisions = plan(before)
    assert {decision.kind for decision in decisions} == {"assign"}
    after = carried_out(before, decisions)
    assert Counter(after.topics[ORDERS].partitions) == dict.fromkeys(there, 1)
    zones = Counter(there[node].zone for node in after.topics[TopicName("shop", "small")].partitions)
    assert zones == {"x": 1, "y": 1, "z": 1}


def test_a_node_without_room_on_its_disk_gets_nothing_while_another_has_some() -> None:
    """Not by assignment, failover, drain or balance; what is pinned there or asked for it gets, and it keeps what it
    has. When all are full the partitions are served all the same."""
    there = nodes("a", "b", "c", "d", zones=("x", "y"))
    there["a"] = there["a"]._replace(has_room=False)
    there["d"] = there["d"]._replace(is_usable=False)
    topics = {
        ORDERS: topic("", "gone", "d", "a", "", "c", pins={4: "a"}),
        TopicName("shop", "busy"): topic(*["b", "c"] * 12),
    }
    engines = {name: EnginePlacement(node=node) for name, node in (("new", ""), ("old", "b"), ("older", "b"))}
    before = situation(there, topics, engines=engines, requests={"1": Request(kind="balance", asked_us=1)})
    decisions = plan(before)
    assert [one.subject for one in decisions if one.to == "a" and one.slot < 0] == ["shop/orders/4"]
    after = carried_out(before, decisions)
    assert after.topics[ORDERS].partitions[3] == "a"
    assert not {"", "gone", "d"} & set(after.topics[ORDERS].partitions)
    assert {one.kind for one in decisions if one.engine} == {"assign"}
    full = {name: node._replace(has_room=False) for name, node in nodes("a", "b").items()}
    before = situation(full, {ORDERS: topic("", "", "", "")})
    assert counts(carried_out(before, plan(before))) == {"a": 2, "b": 2}


def test_a_node_that_is_empty_does_not_get_a_whole_topic() -> None:
    """Others have more already, and get their share of it all the same: its load would be on one node."""
    there = nodes("a", "b", "c")
    before = situation(there, {TopicName("shop", "old"): topic(*["b", "c"] * 3), ORDERS: topic("", "", "")})
    after = carried_out(before, [one for one in plan(before) if one.kind == "assign"])
    assert set(after.topics[ORDERS].partitions) == {"a", "b", "c"}


def test_partitions_of_a_dead_node_go_to_the_living_with_the_reason() -> None:
    """At once, without a limit, and nothing else is moved."""
    before = situation(nodes("a", "b"), {ORDERS: topic("dead", "a", "dead", "b")}, under_way=10_000)
    decisions = plan(before)
    assert [(one.kind, one.partition, one.source) for one in decisions] == [
        ("failover", 0, "dead"),
        ("failover", 2, "dead"),
    ]
    assert {one.to for one in decisions} == {"a", "b"}
    assert all(one.reason == "dead is not alive" for one in decisions)


def test_nothing_is_decided_without_a_usable_node() -> None:
    """There is nobody to give it to."""
    assert plan(situation({"a": Candidate("a", "", False)}, {ORDERS: topic("dead")})) == []


def test_a_draining_node_is_emptied_as_fast_as_the_limit_allows() -> None:
    """Moves that are under way count."""
    there = {**nodes("a", "b"), "c": Candidate("c", "", False, "c is being drained")}
    settings = ClusterSettings(strategy="fair", max_moves_at_once=3)
    before = situation(
        there, {ORDERS: topic("c", "c", "c", "c", "a", "b")}, settings, under_way=1, coordinators=settled("a")
    )
    decisions = [one for one in plan(before) if one.topic]
    assert [(one.kind, one.reason) for one in decisions] == [("drain", "c is being drained")] * 2


def test_a_pinned_partition_goes_to_its_node_and_stays() -> None:
    """Also when its node has more than others; while that is not alive, elsewhere."""
    pinned = {ORDERS: topic("a", "a", "a", "a", pins={0: "b", 1: "b", 2: "b", 3: "b"})}
    before = situation(nodes("a", "b"), pinned)
    after = carried_out(before, plan(before))
    assert after.topics[ORDERS].partitions == ("b", "b", "b", "b")
    assert plan(after) == []
    assert {one.kind for one in plan(before)} == {"pin"}
    without = situation(nodes("a", "c"), {ORDERS: topic("b", "a", pins={0: "b"})})
    assert [(one.kind, one.to) for one in plan(without)] == [("failover", "c")]


def test_a_requested_move_is_made_once_and_by_whom_is_said() -> None:
    """Only if the node can serve."""
    request = Request(kind="move", asked_us=1, by="ops", topic="shop/orders", partition=1, node="b")
    before = situation(nodes("a", "b"), {ORDERS: topic("b", "a")}, requests={"1": request}, is_settled=False)
    assert [(one.kind, one.partition, one.to, one.reason) for one in plan(before)] == [
        ("move", 1, "b", "asked for by ops")
    ]
    elsewhere = msgspec.structs.replace(request, node="nowhere")
    assert plan(msgspec.structs.replace(before, requests={"1": elsewhere})) == []


@pytest.mark.parametrize("strategy", ["fair", "balanced", "weighted"])
def test_balancing_ends_within_the_band_and_then_rests(strategy: str) -> None:
    """From one node with everything to all nodes with about the same."""
    settings = msgspec.convert(
        {"strategy": strategy, "max_moves_at_once": 1000, "max_moves_per_hour": 1000}, ClusterSettings
    )
    before = situation(nodes("a", "b", "c", "d"), {ORDERS: topic(*["a"] * 80)}, settings)
    loads = {f"shop/orders/{number}": Load(bytes_in=1e5 * (number % 7), messages_in=number) for number in range(80)}
    before = msgspec.structs.replace(before, loads=loads)
    after = carried_out(before, plan(before))
    assert imbalance(before) > 1
    assert imbalance(after) <= settings.hysteresis / 2 + 0.02
    after = carried_out(after, plan(after))  # by load alone a node may have too many of the topic
    assert imbalance(after) <= settings.hysteresis
    assert plan(after) == []


def crowded(found: Situation, most_of_node: int, most_of_zone: int) -> list[TopicName]:
    """Topics with more than that in one place."""
    zones = {name: node.zone for name, node in found.nodes.items()}
    return [
        name
        for name, placement in found.topics.items()
        if max(Counter(placement.partitions).values()) > most_of_node
        or max(Counter(zones[node] for node in placement.partitions).values()) > most_of_zone
    ]


def lived(before: Situation, seconds: int, there: Mapping[str, Candidate]) -> Situation:
    """A plan each second with these nodes, each carried out at once."""
    moved_at = dict(before.moved_at)
    found = msgspec.structs.replace(before, nodes=there)
    for _ in range(seconds):
        found = msgspec.structs.replace(
            found, now=found.now + 1, moved_at=dict(moved_at), moves_this_hour=len(moved_at)
        )
        decisions = plan(found)
        moved_at |= {one.subject: found.now for one in decisions if one.kind == "balance"}
        found = carried_out(found, decisions)
    return found


@pytest.mark.parametrize("strategy", ["fair", "balanced"])
def test_spread_over_zones_comes_back_after_the_outage_of_a_zone(strategy: str) -> None:
    """Loss prevented: nearly all partitions of nearly all topics stayed in the zone that had been left, for good."""
    there = nodes("a1", "b1", "a2", "b2", zones=("a", "b"))
    left = {name: node for name, node in there.items() if node.zone == "a"}
    chance = random.Random(5)
    loads = {f"s/t{n}/{partition}": Load(bytes_in=chance.random() * 5e5) for n in range(20) for partition in range(6)}
    topics = {TopicName("s", f"t{number}"): topic(*[""] * 6) for number in range(20)}
    settings = msgspec.convert({"strategy": strategy}, ClusterSettings)
    found = lived(situation(there, topics, settings, loads=loads), 1, there)
    assert crowded(found, 2, 3) == []
    found = lived(found, 1, left)
    assert len(crowded(found, 2, 3)) == 20
    found = lived(found, 320, there)
    assert len(crowded(found, 2, 3)) <= (strategy == "balanced")  # where no exchange leaves loads as even as they are
    assert crowded(found, 3, 4) == []
    assert imbalance(found) <= settings.hysteresis
    assert len(found.moved_at) <= 100
    assert plan(found) == []


def test_topics_in_one_place_each_are_exchanged() -> None:
    """Both nodes have as much as before, and one partition of each topic. It waits for what balance waits for, and is
    no half of an exchange where one move is left."""
    carts = TopicName("shop", "carts")
    before = situation(nodes("a", "b", zones=("x", "y")), {ORDERS: topic("a", "a"), carts: topic("b", "b")})
    decisions = plan(before)
    assert [(one.kind, one.subject, one.source, one.to, one.reason) for one in decisions] == [
        ("balance", "shop/carts/0", "b", "a", "of shop/carts's 2 partitions zone y has 2, where 1 are enough"),
        ("balance", "shop/orders/0", "a", "b", "in exchange for shop/carts/0"),
    ]
    assert plan(carried_out(before, decisions)) == []
    for reason in (
        {"is_settled": False},
        {"moves_this_hour": before.settings.max_moves_per_hour - 1},
        {"under_way": before.settings.max_moves_at_once - 1},
        {"moved_at": {f"shop/{name}/{number}": NOW - 1 for name in ("orders", "carts") for number in (0, 1)}},
    ):
        assert plan(msgspec.structs.replace(before, **reason)) == []
    pinned = {ORDERS: topic("a", "a", pins={0: "a", 1: "a"}), carts: topic("b", "b")}
    assert plan(msgspec.structs.replace(before, topics=pinned)) == []


def test_two_light_partitions_are_exchanged_for_a_heavy_one() -> None:
    """A topic is spread over zones where no single exchange leaves the loads as they are."""
    owners = ["a", "a", "a", "a", "b", "b"]
    loads = {
        f"shop/orders/{number}": Load(bytes_in=9e6 if node == "b" else 4.45e6) for number, node in enumerate(owners)
    }
    settings = ClusterSettings(strategy="balanced")
    before = situation(nodes("a", "b", zones=("x", "y")), {ORDERS: topic(*owners)}, settings, loads=loads)
    after = carried_out(before, plan(before))
    assert counts(after) == {"a": 3, "b": 3}
    assert imbalance(after) < settings.hysteresis
    assert plan(after) == []


def test_balance_moves_what_is_too_many_where_it_is() -> None:
    """Of partitions with the same weight, not the first one by name; and not one of which the other node has enough."""
    there = nodes("a", "b", zones=("x", "y"))
    topics = {TopicName("a", "single"): topic("a", "b"), TopicName("b", "whole"): topic("a", "a")}
    (decision,) = plan(situation(there, topics))
    assert decision.subject in {"b/whole/0", "b/whole/1"}


def test_fair_counts_partitions_and_balanced_counts_bytes() -> None:
    """One busy partition weighs as much as many idle ones by its bytes, and as one by its number."""
    loads = {"shop/orders/0": Load(bytes_in=10e6)}
    owners = ["a", "b", "b", "b", "b"]
    fair = situation(nodes("a", "b"), {ORDERS: topic(*owners)}, loads=loads)
    assert [(one.source, one.to) for one in plan(fair)] == [("b", "a")]
    by_load = msgspec.structs.replace(fair, settings=ClusterSettings(strategy="balanced"))
    assert plan(by_load) == []


def test_hysteresis_leaves_small_differences_alone() -> None:
    """Within the band nothing is moved; outside of it everything down to half of it."""
    close = situation(nodes("a", "b"), {ORDERS: topic(*["a"] * 53, *["b"] * 47)})
    assert plan(close) == []
    apart = situation(nodes("a", "b"), {ORDERS: topic(*["a"] * 60, *["b"] * 40)})
    assert counts(carried_out(apart, plan(apart))) == {"a": 52, "b": 48}


def test_balance_respects_rest_settling_and_the_hourly_limit() -> None:
    """Each of them alone keeps partitions where they are."""
    moved_at = {f"shop/orders/{number}": NOW - 1 for number in range(10)}
    before = situation(nodes("a", "b"), {ORDERS: topic(*["a"] * 10)})
    assert len(plan(before)) == 5
    assert plan(msgspec.structs.replace(before, is_settled=False)) == []
    assert plan(msgspec.structs.replace(before, moved_at=moved_at)) == []
    limited = ClusterSettings(strategy="fair", max_moves_per_hour=3)
    assert len(plan(msgspec.structs.replace(before, settings=limited, moves_this_hour=1))) == 2


SMOOTHED = 1 / 6
"""What is new of a load counts for so much after ten seconds, as nodes report it."""


@pytest.mark.parametrize("seed", range(2))
def test_three_hours_of_changing_loads_move_little_and_nothing_to_and_fro(seed: int) -> None:
    """With the defaults: loads that go up and down by 30 % from one report to the next move next to nothing, and one
    that changes for good, every five minutes, is made up for. No node is more than 10 % off the average."""
    chance = random.Random(seed)
    there = nodes(*(f"n{number}" for number in range(6)), zones=("x", "y", "z"))
    found = situation(there, {TopicName("s", f"t{n}"): topic(*[""] * 10) for n in range(12)}, ClusterSettings())
    keys = [f"{name}/{number}" for name in found.topics for number in range(10)]
    usual = {key: chance.random() * 1e6 for key in keys}
    measured = dict.fromkeys(keys, 0.0)
    inventory = Inventory(found.settings)
    moved: list[tuple[float, str]] = []
    off: list[float] = []
    for second in range(0, 3 * 3600, 10):
        if second % 300 == 0:
            usual[chance.choice(keys)] = chance.random() * 1e6
        for key in keys:
            measured[key] += (usual[key] * chance.uniform(0.7, 1.3) - measured[key]) * (SMOOTHED if second else 1)
        reports: dict[str, dict[str, Load]] = {name: {} for name in there}
        for name, placement in found.topics.items():
            for number, node in enumerate(placement.partitions):
                reports.setdefault(node, {})[f"{name}/{number}"] = Load(bytes_in=measured[f"{name}/{number}"])
        now = NOW + second
        loads = {node: NodeLoad(node=node, at_us=1, partitions=reports[node]) for node in there}
        inventory.follow(found.topics, loads, now)
        recent = {key: at for at, key in moved if at > now - 3600}
        found = msgspec.structs.replace(
            found,
            now=now,
            inventory=inventory,
            moved_at=recent,
            moves_this_hour=sum(at > now - 3600 for at, _ in moved),
        )
        decisions = plan(found)
        moved += [(now, one.subject) for one in decisions if one.kind == "balance"]
        found = carried_out(found, decisions)
        if second >= 600:
            inventory.follow(found.topics, loads, now)
            off.append(imbalance(msgspec.structs.replace(found, inventory=inventory)))
    assert 0 < len(moved) <= 3 * 12
    assert max(Counter(key for _, key in moved).values()) <= 2
    assert max(off) <= found.settings.hysteresis
    assert crowded(found, 2, 4) == []


def test_a_request_for_balance_ignores_rest_and_the_hourly_limit() -> None:
    """An operator has asked for it."""
    asked = Request(kind="balance", asked_us=1)
    settings = ClusterSettings(strategy="fair", max_moves_per_hour=0)
    before = situation(nodes("a", "b"), {ORDERS: topic(*["a"] * 10)}, settings, requests={"1": asked})
    assert counts(carried_out(before, plan(before))) == {"a": 5, "b": 5}


def test_coordinator_slots_and_engines_follow_the_living() -> None:
    """Each slot has a node, and each node about as many."""
    engines = {"photos": EnginePlacement(node="dead"), "maps": EnginePlacement(node="a", pin="b")}
    before = situation(nodes("a", "b"), {}, coordinators=settled("dead", "a"), engines=engines)
    decisions = plan(before)
    slots = Counter(one.to for one in decisions if one.kind == "slot")
    assert slots["b"] == SLOTS // 2
    assert sum(slots.values()) == SLOTS // 2
    assert {(one.engine, one.to) for one in decisions if one.engine} == {("photos", "a"), ("maps", "b")}


def test_engines_are_drained_moved_and_made_even_one_at_a_time() -> None:
    """A request wins over a pin, limits hold as for partitions, and what was moved a moment ago rests."""
    engines = {f"e{number}": EnginePlacement(node="a") for number in range(5)}
    here = situation(nodes("a", "b"), {}, coordinators=settled("a", "b"), engines=engines)
    (even,) = plan(here)
    assert (even.kind, even.engine, even.source, even.to) == ("balance", "e0", "a", "b")
    assert even.reason == "a has 5 engines, b 0"
    resting = {f"engine e{number}": NOW - 1 for number in range(5)}
    assert plan(msgspec.structs.replace(here, moved_at=resting)) == []
    assert plan(msgspec.structs.replace(here, is_settled=False)) == []
    asked = {"1": Request(kind="move-engine", asked_us=1, engine="e3", node="b", by="ops")}
    moved = plan(msgspec.structs.replace(here, requests=asked, is_settled=False))
    assert [(one.kind, one.engine, one.to, one.reason) for one in moved] == [("move", "e3", "b", "asked for by ops")]
    draining = {"a": Candidate("a", is_usable=False, why_not="a is being drained"), "b": Candidate("b")}
    limited = ClusterSettings(max_moves_at_once=2)
    drained = plan(situation(draining, {}, limited, coordinators=settled("b", "b"), engines=engines, is_settled=False))
    assert [(one.kind, one.engine, one.to) for one in drained] == [("drain", "e0", "b"), ("drain", "e1", "b")]
    lost = plan(situation(nodes("b"), {}, limited, coordinators=settled("b", "b"), engines=engines))
    assert [one.kind for one in lost] == ["failover"] * 5


def test_engines_are_spread_by_what_they_do_and_partitions_around_them() -> None:
    """Not the idle ones, of which a node has more; and not before a node's engines are clearly heavier."""
    rates = {"busy": 6e6, "brisk": 4e6, **{f"idle{number}": 0.0 for number in range(4)}}
    engines = {name: EnginePlacement(node="b" if name.startswith("idle") else "a") for name in rates}
    loads = {
        node: NodeLoad(
            node=node,
            at_us=1,
            engine_loads={name: Load(bytes_in=rate) for name, rate in rates.items() if engines[name].node == node},
        )
        for node in "ab"
    }
    topics = {ORDERS: topic(*["a", "b"] * 30)}

    def decided(strategy: str, engines: Mapping[str, EnginePlacement]) -> list[Decision]:
        settings = msgspec.convert({"strategy": strategy, "max_moves_at_once": 100}, ClusterSettings)
        inventory = Inventory(settings)
        inventory.follow(topics, loads, NOW, engines)
        return plan(situation(nodes("a", "b"), topics, settings, engines=engines, inventory=inventory))

    assert [(one.engine, one.source, one.to) for one in decided("fair", engines)] == [("idle0", "b", "a")]
    *partitions, engine = decided("balanced", engines)
    assert {(one.kind, one.source, one.to) for one in partitions} == {("balance", "a", "b")}
    assert (engine.engine, engine.to) == ("brisk", "b")
    assert engine.reason == "the engines of a weigh 10.20, those of b 0.40"
    even = engines | {"brisk": EnginePlacement(node="b")}
    loads["b"] = msgspec.structs.replace(loads["b"], engine_loads={"brisk": Load(bytes_in=5.2e6)})
    assert [one for one in decided("balanced", even) if one.engine] == []


def test_weights_of_cpu_and_cold_reads_keep_partitions_from_a_busy_node() -> None:
    """Whatever it is busy with; with the other strategies it makes no difference."""
    topics = {ORDERS: topic(*["a", "b"] * 20)}
    busy = {"a": NodeLoad(node="a", at_us=1, cpu=4.0, cold_reads=20), "b": NodeLoad(node="b", at_us=1, cpu=0.1)}
    moved = {}
    for strategy in ("fair", "balanced", "weighted"):
        settings = msgspec.convert({"strategy": strategy}, ClusterSettings)
        inventory = Inventory(settings)
        inventory.follow(topics, busy, NOW)
        found = plan(situation(nodes("a", "b"), topics, settings, inventory=inventory))
        moved[strategy] = Counter((one.source, one.to) for one in found)
    assert moved == {"fair": {}, "balanced": {}, "weighted": {("a", "b"): 4}}


def test_topics_that_are_being_deleted_are_left_alone() -> None:
    """Nobody is to open them again."""
    going = msgspec.structs.replace(topic("dead", ""), is_deleting=True)
    assert plan(situation(nodes("a"), {ORDERS: going})) == []
