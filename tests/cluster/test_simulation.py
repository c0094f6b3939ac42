"""The load manager, membership and ownership together, in histories of misfortunes that a seed decides."""

from __future__ import annotations

import pytest
from tests.campaign import first_seed
from tests.cluster.simulation import Simulation

from tidelog.cluster.documents import ClusterSettings, Strategy

STRATEGIES: tuple[Strategy, ...] = ("fair", "balanced", "weighted")
SEEDS_A_TEST = 100
BALANCED = 0.1 + 1e-9


def live_through(seed: int) -> Simulation:
    """Ten nodes and 200 partitions: kills, pauses, cuts, drains and changing loads, and then calm."""
    settings = ClusterSettings(strategy=STRATEGIES[seed % 3], rest_seconds=30, max_moves_per_hour=5000)
    simulation = Simulation(seed, 10, 20, 10, settings)
    simulation.run(20)
    simulation.run(60, chance_of_misfortune=0.05)
    simulation.recover()
    simulation.run(90)
    return simulation


@pytest.mark.parametrize("seed", range(9))
def test_every_partition_is_served_by_one_node_whatever_happens(seed: int) -> None:
    """None is without an owner for longer than lease + 2 s, none has two, and the cluster is in balance afterwards."""
    assert live_through(seed).off_balance() <= BALANCED


@pytest.mark.long
@pytest.mark.parametrize("part", range(100))
def test_every_partition_is_served_by_one_node_in_many_histories(part: int) -> None:
    """The same with 10,000 seeds."""
    for seed in range(first_seed() + part * SEEDS_A_TEST, first_seed() + (part + 1) * SEEDS_A_TEST):
        assert live_through(seed).off_balance() <= BALANCED, f"seed {seed}"


def test_moves_for_balance_are_bounded_over_changes_of_the_leader() -> None:
    """A new leader knows what the ones before it have moved within the hour."""
    limit = 25
    simulation = Simulation(7, 6, 12, 10, ClusterSettings(strategy="fair", rest_seconds=0, max_moves_per_hour=limit))
    simulation.run(60)
    for _ in range(4):
        leader = simulation.nodes[0].view.state.leader
        assert leader is not None
        node = next(node for node in simulation.nodes if node.name == leader.node)
        simulation._hurt(node, "kill")
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
    simulation.last_misfortune = float("inf")  # from here on nothing may be unserved but for the moves themselves
    simulation.drain(drained.name, True)
    simulation.run(60)
    assert not drained.owned
    assert simulation.moves("failover") == 0
    simulation.drain(drained.name, False)
    simulation.run(60)
    assert drained.owned


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [100, 1000])
def test_a_thousand_nodes_serve_a_hundred_thousand_partitions(size: int, seed: int) -> None:
    """As many topics of a hundred partitions as nodes; one node in a hundred dies, and comes back."""
    settings = ClusterSettings(
        strategy="fair", rest_seconds=0, settle_seconds=1, max_moves_per_hour=100_000, max_moves_at_once=1000
    )
    simulation = Simulation(seed, size, size, 100, settings, shares_view=True, step_seconds=1.0)
    simulation.run(20)
    for node in simulation.random.sample(simulation.nodes, size // 100):
        simulation._hurt(node, "kill")
    simulation.run(16)
    simulation.recover()
    simulation.run(30)
    assert simulation.off_balance() <= BALANCED
