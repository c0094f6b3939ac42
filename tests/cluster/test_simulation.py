"""The load manager, membership and ownership together, in histories of misfortunes that a seed decides.

The campaigns are split by the environment: SIMULATION_SEEDS=2000:4000 of the histories of ten nodes, and
SIMULATION_LARGE_SEEDS=0:20 of those of a thousand.
"""

from __future__ import annotations

import os

import pytest
from tests.cluster.simulation import Simulation

from tidelog.cluster.documents import ClusterSettings, Strategy

STRATEGIES: tuple[Strategy, ...] = ("fair", "balanced", "weighted")
SEEDS_A_TEST = 100
MOVES_AN_HOUR = 250
BALANCED = 0.1 + 1e-9
CROWDED = 0.2
"""Of the topics so many may have more than their share in a zone: where loads leave no exchange, or time was short."""


def seeds_of(variable: str, count: int) -> range:
    """Those that the environment says, `first:end`; so many otherwise."""
    first, _, end = os.environ.get(variable, f"0:{count}").partition(":")
    return range(int(first), int(end))


def live_through(seed: int) -> Simulation:
    """Ten nodes and 200 partitions: everything goes wrong for a minute, and then nothing."""
    settings = ClusterSettings(strategy=STRATEGIES[seed % 3], rest_seconds=30, max_moves_per_hour=MOVES_AN_HOUR)
    simulation = Simulation(seed, 10, 20, 10, settings)
    simulation.run(20)
    simulation.run(60, chance_of_misfortune=0.05)
    simulation.recover()
    simulation.step_seconds = 0.5
    simulation.run(90)
    return simulation


def check_end(simulation: Simulation, seed: int) -> None:
    assert simulation.off_balance() <= BALANCED, f"seed {seed}"
    crowded, topics = simulation.crowded(), len(simulation.truth.state.topics)
    is_exhausted = simulation.moves("balance") >= simulation.settings.max_moves_per_hour - 2  # an exchange has three
    assert is_exhausted or len(crowded) <= CROWDED * topics, f"seed {seed}: {crowded}"
    assert simulation.moves("balance") <= simulation.settings.max_moves_per_hour, f"seed {seed}"
    assert not simulation.checker.unserved_since, f"seed {seed}"
    assert simulation.absent() == [], f"seed {seed}: up, and not registered"


@pytest.mark.parametrize("seed", range(12))
def test_every_partition_is_served_by_one_node_whatever_happens(seed: int) -> None:
    """None is without an owner for longer than lease + 2 s, none has two who publish, and the cluster is in balance
    afterwards."""
    check_end(live_through(seed), seed)


@pytest.mark.long
@pytest.mark.parametrize("first", seeds_of("SIMULATION_SEEDS", 10_000)[::SEEDS_A_TEST])
def test_every_partition_is_served_by_one_node_in_many_histories(first: int) -> None:
    """The same with 10,000 seeds."""
    for seed in range(first, min(first + SEEDS_A_TEST, seeds_of("SIMULATION_SEEDS", 10_000).stop)):
        check_end(live_through(seed), seed)


def test_histories_have_owners_that_are_fenced_while_they_publish() -> None:
    """What the histories above are for does happen in them."""
    simulation = live_through(3)
    assert simulation.happened["published"] > 100
    assert simulation.happened["refused by the fence"] > 0


def test_moves_for_balance_are_bounded_over_changes_of_the_leader() -> None:
    """A new leader knows what the ones before it have moved within the hour."""
    limit = 25
    simulation = Simulation(7, 6, 12, 10, ClusterSettings(strategy="fair", rest_seconds=0, max_moves_per_hour=limit))
    simulation.run(60)
    for _ in range(4):
        node = simulation.leader()
        assert node is not None
        simulation.hurt(node, "kill")
        simulation.run(30)
        node.start()
        simulation.run(40)
    assert 0 < simulation.moves("balance") <= limit


def test_a_drained_node_is_empty_and_stays_so() -> None:
    """Its partitions go elsewhere while it serves them, and it gets none until it is undrained."""
    simulation = Simulation(3, 5, 10, 6, ClusterSettings(strategy="fair", rest_seconds=0, settle_seconds=1))
    simulation.run(60)
    drained = simulation.nodes[2]
    assert drained.owned
    simulation.drain(drained.name, True)
    simulation.run(60)
    assert not drained.owned
    assert simulation.moves("failover") == 0
    simulation.drain(drained.name, False)
    simulation.run(60)
    assert drained.owned


def live_at_large(seed: int, nodes: int) -> Simulation:
    """As many topics of a hundred partitions as nodes. One node in a hundred dies, as many are paused, cut off or lose
    their lease, then the leader dies; all of them come back."""
    settings = ClusterSettings(
        strategy=STRATEGIES[seed % 3],
        rest_seconds=0,
        settle_seconds=1,
        max_moves_per_hour=10_000,
        max_moves_at_once=1000,
    )
    simulation = Simulation(seed, nodes, nodes, 100, settings, views=8, step_seconds=0.5, publish_chance=0.01)
    simulation.run(12)
    hundredth = max(1, nodes // 100)
    hurt = simulation.random.sample(simulation.nodes, 6 * hundredth)
    kinds = ("kill", "pause", "cut", "lease", "answers lost", "arrives late")
    for number, node in enumerate(hurt):
        simulation.hurt(node, kinds[number // hundredth])
    simulation.run(14)
    leader = simulation.leader()
    if leader is not None:
        simulation.hurt(leader, "kill")
    simulation.run(14)
    simulation.recover()
    simulation.run(60)
    return simulation


@pytest.mark.long
@pytest.mark.parametrize("nodes", [100, 1000])
@pytest.mark.parametrize("seed", seeds_of("SIMULATION_LARGE_SEEDS", 20))
def test_a_thousand_nodes_serve_a_hundred_thousand_partitions(seed: int, nodes: int) -> None:
    """The same promises, ten and a hundred times as large."""
    check_end(live_at_large(seed, nodes), seed)
