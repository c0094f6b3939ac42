"""The inventory of a cluster: kept up to date by changes, it is what it would be if it was counted anew."""

from __future__ import annotations

import random

import msgspec

from tidelog.cluster.documents import ClusterSettings, EnginePlacement, TopicPlacement
from tidelog.cluster.inventory import MEASURED_SECONDS, WEIGHT_UNIT, Inventory
from tidelog.cluster.spread import Layout
from tidelog.service.cluster_control import Load, NodeLoad
from tidelog.topics.names import TopicName

ORDERS = TopicName("shop", "orders")
BALANCED = ClusterSettings(strategy="balanced")
NODES = ("", "a", "b", "c")
LAYOUT = Layout({"a": "x", "b": "x", "c": "y"}, "abc", 0.1)


def placed(*nodes: str, is_deleting: bool = False, pins: dict[int, str] | None = None) -> TopicPlacement:
    return TopicPlacement(id="00", created_us=1, partitions=nodes, is_deleting=is_deleting, pins=pins or {})


def report(node: str, **bytes_in: float) -> NodeLoad:
    loads = {f"shop/orders/{key.removeprefix('p')}": Load(bytes_in=value) for key, value in bytes_in.items()}
    return NodeLoad(node=node, at_us=1, partitions=loads)


def weights(inventory: Inventory) -> dict[str, float]:
    return {node: inventory.sum_of(node) / WEIGHT_UNIT for node in sorted(inventory.owners())}


def test_an_inventory_that_followed_changes_is_the_one_made_at_once() -> None:
    """Topics come, grow, move, are deleted and gone; loads change; long after it all the sums are the same."""
    chance = random.Random(5)
    followed = Inventory(BALANCED)
    topics: dict[TopicName, TopicPlacement] = {}
    loads: dict[str, NodeLoad] = {}
    for now in range(400):
        name = TopicName("s", f"t{chance.randrange(6)}")
        if chance.random() < 0.1:
            topics.pop(name, None)
        else:
            nodes = [chance.choice(NODES) for _ in range(chance.randrange(1, 6))]
            topics[name] = placed(*nodes, is_deleting=chance.random() < 0.1)
        if chance.random() < 0.5:
            node = chance.choice(NODES[1:])
            busy = {f"s/t{t}/{n}": Load(bytes_in=chance.randrange(10**7)) for t in range(6) for n in range(5)}
            loads[node] = NodeLoad(node=node, at_us=now, partitions=dict(chance.sample(sorted(busy.items()), 20)))
        followed.follow(topics, loads, float(now))
        followed.crowded(LAYOUT if now % 3 else Layout(dict.fromkeys("ab", "x"), "a", 0.1))
        if now % 20 == 0:
            assert {node: sum(part.weight for part in followed.parts_of(node)) for node in followed.owners()} == {
                node: followed.sum_of(node) for node in followed.owners()
            }
    followed.follow(topics, loads, 400 + MEASURED_SECONDS)
    at_once = Inventory(BALANCED)
    at_once.follow(topics, loads, 0.0)
    assert loads.keys() == set(NODES[1:])
    assert followed.counts() == at_once.counts()
    assert followed.crowded(LAYOUT) == at_once.crowded(LAYOUT) != []
    for node in loads:  # what nobody has keeps the weight that it had
        assert (followed.sum_of(node), followed.parts_of(node)) == (at_once.sum_of(node), at_once.parts_of(node))


def test_a_partition_that_moves_keeps_its_weight_until_its_new_node_has_measured_it() -> None:
    """The node that gave it away reports it no more, and the one that got it not yet, or too little."""
    inventory = Inventory(BALANCED)
    loads = {"a": report("a", p0=5e6, p1=1e6), "b": report("b")}
    inventory.follow({ORDERS: placed("a", "a")}, loads, 0.0)
    assert weights(inventory) == {"a": 6.2}
    moved = {ORDERS: placed("b", "a")}
    inventory.follow(moved, loads, 1.0)
    loads = {"a": report("a", p1=1e6), "b": report("b", p0=1e3)}
    inventory.follow(moved, loads, 2.0)
    assert weights(inventory) == {"a": 1.1, "b": 5.1}
    inventory.follow(moved, loads, 1.0 + MEASURED_SECONDS)
    assert weights(inventory) == {"a": 1.1, "b": 0.101}


def test_engines_and_what_a_node_does_besides_count_beside_its_partitions() -> None:
    """An engine that moves keeps its weight until its new node has measured it. CPU and reads of the store count with
    `weighted`; with `fair` nothing does."""
    engines = {name: EnginePlacement(node=node) for name, node in (("maps", "a"), ("new", "b"))}
    loads = {
        "a": NodeLoad(
            node="a", at_us=1, cpu=1.5, cold_reads=4, engine_loads={"maps": Load(bytes_in=3e6, bytes_out=1e6)}
        ),
        "b": NodeLoad(node="b", at_us=1),
    }
    beside = {}
    for strategy in ("fair", "balanced", "weighted"):
        inventory = Inventory(msgspec.convert({"strategy": strategy}, ClusterSettings))
        inventory.follow({}, loads, 0.0, engines)
        beside[strategy] = [inventory.beside(node) / WEIGHT_UNIT for node in "ab"]
    assert beside == {"fair": [0, 0], "balanced": [4.1, 0.1], "weighted": [1 + 3 + 0.5 + 3 + 0.4, 1]}
    inventory = Inventory(BALANCED)
    inventory.follow({}, loads, 0.0, engines)
    moved = engines | {"maps": EnginePlacement(node="b")}
    loads["b"] = NodeLoad(node="b", at_us=2, engine_loads={"maps": Load(bytes_in=1e3)})
    inventory.follow({}, loads, 1.0, moved)
    assert [inventory.beside(node) / WEIGHT_UNIT for node in "ab"] == [0, 4.2]
    inventory.follow({}, loads, 1.0 + MEASURED_SECONDS, moved)
    assert inventory.engine_weight("maps") == 101_000
    inventory.follow({}, loads, 40.0, {})
    assert [inventory.beside(node) for node in "ab"] == [0, 0]


def test_what_a_dead_node_had_is_given_out_by_its_weight() -> None:
    """Its report is gone with it."""
    inventory = Inventory(BALANCED)
    inventory.follow({ORDERS: placed("a", "a")}, {"a": report("a", p1=3e6)}, 0.0)
    inventory.follow({ORDERS: placed("a", "a")}, {}, 1.0)
    assert [(part.number, part.weight) for part in inventory.parts_of("a")] == [(1, 3_100_000), (0, 100_000)]


def test_only_what_has_changed_costs_work() -> None:
    """A round in which nothing has changed moves nothing and sorts nothing again."""
    inventory = Inventory(BALANCED)
    topics = {TopicName("s", f"t{number}"): placed("a", "b") for number in range(50)}
    loads = {"a": report("a"), "b": report("b")}
    inventory.follow(topics, loads, 0.0)
    before = inventory.parts_of("a"), inventory.parts_of("b")
    inventory.follow(dict(topics), dict(loads), 1.0)
    assert (inventory.parts_of("a") is before[0], inventory.parts_of("b") is before[1]) == (True, True)
    topics[TopicName("s", "t3")] = placed("c", "b")
    inventory.follow(topics, loads, 2.0)
    assert (inventory.parts_of("a") is before[0], inventory.parts_of("b") is before[1]) == (False, True)
