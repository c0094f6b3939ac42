"""Lives of engines with a store, each cut at some call of disk or store, inside of recoveries too.

A campaign has a thousand of them, of other seeds.
"""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

import pytest
from tests.campaign import examples, first_seed
from tests.crash.engine_promises import Apply, Checkpoint, CompactIndex, Mark, Reopen, RollBack, Step
from tests.crash.test_engine_crashes import random_steps
from tests.engine.compacting import compact_by_hand
from tests.engine.engines import assert_state
from tests.engine.model import Model
from tests.engine.stations import KEYS, EngineNode

from tidelog.clock import ManualClock
from tidelog.engine.cold.gc import drop_wal
from tidelog.errors import TidelogError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import POLICIES, Crash, World
from tidelog.testing.crash import quiet_crashes

pytestmark = pytest.mark.deeper
GROUPS = 20
SEEDS_OF_A_GROUP = examples(5)
ENTRIES = 200
# About as many calls as a life makes; a cut behind the last one is a power failure at the end.
CALLS = 700


class Ship(NamedTuple):
    """Everything up to the low-water mark goes to the store."""


class Compact(NamedTuple):
    """Small objects of the store are put together, and those that were go."""


class CompactData(NamedTuple):
    """Somebody without the engine compacts its log into blob files and indexes, and drops what is then unnecessary."""


Late = Ship | Compact | CompactData


class Life:
    """Steps on an engine, as far as they came."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"life {seed}")
        self._steps = self._with_shipping(random_steps(seed, ENTRIES))
        self._done = 0
        self._is_within = False
        self.truncation_mark = 0

    def _with_shipping(self, steps: list[Step]) -> list[Step | Late]:
        found: list[Step | Late] = []
        for step in steps:
            found.append(step)
            if isinstance(step, Mark):
                found.append(Ship())
                if self._chance.random() < 0.4:
                    found.append(Compact())
                if self._chance.random() < 0.3:
                    found.append(CompactData())
        return found

    def node(self, world: World, name: str = "a") -> EngineNode:
        """The engine's node; files leave its disk as soon as they may."""
        clock = world.clock
        assert isinstance(clock, ManualClock)
        return EngineNode(world.store, name=name, files=world.files(name), clock=clock, local_retention_bytes=0)

    def run(self, world: World) -> None:
        """Does the steps until it dies."""
        node = self.node(world)
        try:
            node.open()
            for step in self._steps:
                self._is_within = True
                self._do(node, step)
                self._done += 1
                self._is_within = False
            node.close()
        except (Crash, TidelogError):
            if not world.crashed:
                raise
        finally:
            world.crash()
            with contextlib.suppress(Crash, TidelogError, OSError):
                node.crash()

    def _do(self, node: EngineNode, step: Step | Late) -> None:
        match step:
            case Apply():
                node.engine.apply_many(step.entries)
            case RollBack():
                node.engine.rollback_to(step.seq)
            case Mark():
                node.engine.update_low_water_mark(step.seq)
            case Checkpoint():
                node.engine.create_checkpoint()
                self.truncation_mark = node.engine.truncation_mark
            case Ship():
                node.engine.ship()
                self.truncation_mark = node.engine.truncation_mark
            case Reopen():
                node.close()
                node.open()
            case _:
                _compact(node, step)

    def check(self, world: World) -> None:
        """On the same disk it is what it was; without it, it is what the store was told of."""
        if self._chance.random() < 0.5:
            world = self._killed_again(world)
            node = self.node(world).open()
            model = self._found(node.engine.applied_seq, node.engine.digest())
        else:
            world = world.lose_disk("a")
            node = self.node(world)
            if not list(world.store.list("tidelog/")):
                assert not self.truncation_mark
                return
            try:
                seq = node.restore().seq
            except TidelogError:
                assert not self.truncation_mark
                return
            assert seq >= self.truncation_mark
            node.open()
            model = self._found(seq, node.engine.digest(), may_be_older=True)
        with node:
            for seq in {node.engine.applied_seq, self._chance.choice(sorted(model.states))}:
                assert_state(node.engine, model, seq)
            node.core.tree.check()
            node.engine.apply_many(
                [(seq, entry) for seq, entry in model.entries.items() if seq <= model.applied_seq][-3:]
            )

    def _killed_again(self, world: World) -> World:
        """Some are killed once more while they open."""
        if self._chance.random() < 0.6:
            return world
        dying = world.after_crash("keep", crash_at=self._chance.randint(1, 30))
        node = self.node(dying)
        with contextlib.suppress(Crash, TidelogError, OSError):
            node.open()
            node.close()
        dying.crash()
        with contextlib.suppress(Crash, TidelogError, OSError):
            node.crash()
        return self.remains(dying)

    def remains(self, world: World) -> World:
        """What a crash leaves, by one of the policies."""
        chance = self._chance
        policy = chance.choice([policy for policy in POLICIES if policy != "holes"])
        torn = chance.randint(0, max(1, world.in_flight_bytes))
        return world.after_crash(policy, seed=chance.randrange(1 << 30), torn_bytes=torn)

    def _found(self, seq: int, digest: str, *, may_be_older: bool = False) -> Model:
        """The model at that seq, if it is one of those that may be."""
        model = Model()
        for step in self._steps[: self._done]:
            _on_model(model, step)
        if model.applied_seq != seq and self._is_within:
            self._advance(model, self._steps[self._done], seq)
        if may_be_older and seq < model.applied_seq:
            model.roll_back(seq)
        assert (model.applied_seq, model.digest()) == (seq, digest)
        return model

    def _advance(self, model: Model, step: Step | Late, seq: int) -> None:
        if isinstance(step, Apply):
            for number, entry in step.entries:
                if number <= seq:
                    model.apply(number, entry)
        else:
            _on_model(model, step)


def _compact(node: EngineNode, step: Step | Late) -> None:
    if isinstance(step, Compact):
        node.engine.compact(grace_seconds=0)
    elif isinstance(step, CompactData) and node.engine.high_water_mark:
        compact_by_hand(node.objects, clock=node.clock)
        drop_wal(node.objects, BucketMetadataStore(node.objects), KEYS, 1 << 60, clock=node.clock)
    elif isinstance(step, CompactIndex):
        node.engine.compact_index()


def _on_model(model: Model, step: Step | Late) -> None:
    if isinstance(step, Apply):
        for seq, entry in step.entries:
            model.apply(seq, entry)
    elif isinstance(step, RollBack) and step.seq < model.applied_seq:
        model.roll_back(step.seq)


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_life_ends_as_it_may(group: int) -> None:
    """A failure names its seed."""
    begin = first_seed() + group * SEEDS_OF_A_GROUP
    for seed in range(begin, begin + SEEDS_OF_A_GROUP):
        life = Life(seed)
        world = World(crash_at=random.Random(seed).randint(1, CALLS), clock=ManualClock())
        try:
            with quiet_crashes():
                life.run(world)
                life.check(life.remains(world))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
