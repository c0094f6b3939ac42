"""An engine with a store, killed at every change of disk and store, and writers that sleep at any request.

What is promised: an entry that was applied is there on the same disk. What the truncation mark covered is there without
the disk. Nothing that was rolled back comes back. A writer that was replaced while it slept changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from tests.campaign import every
from tests.engine.engines import RandomEntries
from tests.engine.model import Model
from tests.engine.stations import EngineNode, new_store, successor

from tidelog.clock import ManualClock
from tidelog.errors import FencedError, TidelogError
from tidelog.testing import Crash, World

SETTINGS: dict[str, Any] = {"local_retention_bytes": 0, "rotate_max_bytes": 4 << 10, "large_value_bytes": 1024}
EVERY = every(15)


class Promises:
    """What whoever used the engine was told, and what it may find afterwards."""

    def __init__(self, model: Model) -> None:
        self.possible = [copy.deepcopy(model)]
        self.truncation_mark = 0

    def may_become(self, model: Model) -> None:
        """A call is under way: it is done or it is not."""
        self.possible.append(copy.deepcopy(model))

    def became(self) -> None:
        """It is done."""
        self.possible = self.possible[-1:]


def node_in(world: World, name: str = "a", concurrency: int = 1) -> EngineNode:
    """A node of a world."""
    clock = world.clock
    assert isinstance(clock, ManualClock)
    files = world.files(name)
    return EngineNode(world.store, name=name, files=files, clock=clock, ship_concurrency=concurrency, **SETTINGS)


def prepared() -> tuple[World, Model]:
    """A world with a past: an engine that has shipped, with a state in the store and some more on the disk."""
    world = World(clock=ManualClock())
    with node_in(world).open() as node:
        node.apply(25)
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(10)
    return world, node.model


def steps(node: EngineNode, promises: Promises) -> Iterator[None]:
    """What is cut: entries, a rollback, shipping, states, files that leave."""
    entries = RandomEntries("cut")

    def apply(count: int) -> None:
        for seq, entry in entries.entries(count, node.engine.applied_seq + 1):
            node.model.apply(seq, entry)
            promises.may_become(node.model)
            node.engine.apply(seq, entry)
            promises.became()

    def ship() -> None:
        node.ship_all()
        promises.truncation_mark = node.engine.truncation_mark

    low = node.engine.applied_seq
    apply(6)
    yield
    node.engine.update_low_water_mark(low)
    promises.truncation_mark = max(promises.truncation_mark, node.engine.ship())
    yield
    node.model.roll_back(low + 1)
    promises.may_become(node.model)
    node.engine.rollback_to(low + 1)
    promises.became()
    apply(6)
    yield
    ship()
    node.engine.create_checkpoint()
    yield
    apply(6)
    ship()
    node.engine.create_checkpoint()
    ship()


def run_until_it_dies(world: World, model: Model, concurrency: int) -> tuple[Promises, bool]:
    """What was promised until then, and whether it died at all."""
    promises = Promises(model)
    node = node_in(world, concurrency=concurrency)
    node.model = copy.deepcopy(model)
    try:
        node.open()
        promises.truncation_mark = node.engine.truncation_mark
        for _ in steps(node, promises):
            pass
        node.close()
    except (Crash, TidelogError):
        if not world.crashed:
            raise
    finally:
        with contextlib.suppress(Crash, TidelogError, OSError):
            node.crash()
    return promises, world.crashed


@pytest.mark.deeper
@pytest.mark.parametrize("concurrency", [1, 3])
def test_nothing_that_was_promised_is_lost(concurrency: int) -> None:
    """Whichever change of disk or store is the last one, on the same disk and without it."""
    past, model = prepared()
    died, crash_at = True, 1 + concurrency
    while died:
        world = past.after_crash("keep", crash_at=crash_at)
        promises, died = run_until_it_dies(world, model, concurrency)
        left = world.after_crash("lose" if crash_at % 2 else "tear", seed=crash_at, torn_bytes=crash_at % 3)
        check_without_the_disk(left.lose_disk("a"), copy.deepcopy(promises))
        check_the_same_disk(left, promises)
        crash_at += EVERY
    assert crash_at > 100


def check_the_same_disk(world: World, promises: Promises) -> None:
    """Every entry that was acknowledged is there, and the engine goes on."""
    with node_in(world).open() as node:
        node.model = next(one for one in reversed(promises.possible) if one.applied_seq == node.engine.applied_seq)
        node.assert_same()
        assert node.engine.truncation_mark >= promises.truncation_mark
        node.apply(5)
        assert node.ship_all() == node.engine.applied_seq
        node.assert_same()


def check_without_the_disk(world: World, promises: Promises) -> None:
    """What the orchestrator may have truncated is in the store, exactly as it was."""
    node = node_in(world, "b")
    node.restore()
    with node.open():
        restored = node.engine.applied_seq
        assert restored >= promises.truncation_mark
        node.model = next(one for one in promises.possible if restored in one.states or not restored)
        node.model.roll_back(restored)
        node.assert_same()


@pytest.mark.parametrize("nth", range(1, 40, 2))
def test_a_writer_that_sleeps_at_any_request_changes_nothing_afterwards(nth: int) -> None:
    """Somebody restores the engine and goes on while it sleeps: it wakes up, and the store is the new owner's alone."""
    store = new_store()
    old = EngineNode(store, name="old", ship_concurrency=1).open()
    old.apply(40)
    old.ship_all()
    old.engine.create_checkpoint()
    old.apply(60)
    old.engine.update_low_water_mark(old.engine.applied_seq)
    asked, heirs = 0, list[EngineNode]()

    def sleep(operation: str, key: str) -> None:
        nonlocal asked
        asked += 1
        if asked == nth and not heirs:
            heirs.append(take_over(old))

    store.on_request = sleep
    try:
        old.engine.create_checkpoint()
    except FencedError:
        assert heirs
    store.on_request = None
    heir = heirs[0] if heirs else take_over(old)
    heir.assert_same()
    heir.apply(10)
    assert heir.ship_all() == heir.engine.applied_seq
    heir.crash()
    with successor(heir, "third") as third:
        third.restore()
        third.open()
        third.assert_same(sorted(third.model.states)[::17])
    old.close()


def take_over(old: EngineNode) -> EngineNode:
    """Another node restores the engine, applies what the orchestrator has, and ships."""
    heir = successor(old, "heir")
    heir.restore()
    heir.model = copy.deepcopy(old.model)
    heir.model.roll_back(heir.view.manifest.high_water_mark)
    heir.open()
    heir.apply(30)
    heir.ship_all()
    heir.engine.create_checkpoint()
    return heir
