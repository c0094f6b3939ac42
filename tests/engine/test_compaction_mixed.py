"""Compactions of log and index among everything else: retention, garbage, rollbacks, replicas, crashes, restores."""

from __future__ import annotations

import random

import pytest
from tests.campaign import examples, first_seed
from tests.engine.engines import assert_state
from tests.engine.stations import EngineNode, new_store, successor
from tests.engine.test_compaction_log import COLD


class Mixed:
    """One engine with a replica, to which anything may happen."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"mixed {seed}")
        self._node = EngineNode(new_store(), name=f"a{seed}", replicas=[new_store()], **COLD).open()

    def run(self, steps: int) -> None:
        """Does steps, and looks at every state that is kept after some of them."""
        kinds = [self._ship, self._compact, self._compact_index, self._collect, self._roll_back, self._checkpoint]
        kinds += [self._reopen, self._kill, self._replicate, self._restore]
        for _ in range(steps):
            self._node.apply(self._chance.choice((1, 8, 25)))
            self._chance.choice(kinds)()
            if self._chance.random() < 0.3:
                self.check()
        self.check()
        self._node.close()

    def check(self) -> None:
        """All states from the start of history on, read in every way."""
        engine, model = self._node.engine, self._node.model
        assert engine.applied_seq == model.applied_seq
        start = engine.statistics().history_start_seq
        kept = [seq for seq in model.states if seq >= start]
        for seq in {kept[-1], *self._chance.sample(kept, min(4, len(kept)))}:
            assert_state(engine, model, seq)
        self._node.core.tree.check()

    def _ship(self) -> None:
        self._node.ship_all()
        self._node.shipping.purge()

    def _compact(self) -> None:
        self._node.engine.compact(grace_seconds=self._chance.choice((0, 3600)))

    def _compact_index(self) -> None:
        self._node.engine.compact_index()

    def _collect(self) -> None:
        self._ship()
        self._node.engine.collect_garbage(horizon=self._chance.randint(0, self._node.engine.applied_seq))

    def _roll_back(self) -> None:
        engine = self._node.engine
        seq = self._chance.randint(max(engine.low_water_mark, engine.applied_seq - 40), engine.applied_seq)
        self._node.roll_back(seq)

    def _checkpoint(self) -> None:
        self._node.engine.create_checkpoint()

    def _reopen(self) -> None:
        self._node.close()
        self._node.open()

    def _kill(self) -> None:
        self._node.crash()
        self._node.open()

    def _replicate(self) -> None:
        self._node.shipping.replicate()

    def _restore(self) -> None:
        """The disk is gone; sometimes the store as well, and a replica that is up to date is all there is."""
        self._ship()
        self._node.shipping.replicate()
        other = successor(self._node, **COLD)
        if self._chance.random() < 0.5:
            (replica,) = self._node.replicas
            other.objects, other.replicas = replica, [new_store()]
        self._node.crash()
        other.restore()
        other._entries = self._node._entries
        self._node = other.open()


@pytest.mark.deeper
@pytest.mark.parametrize("number", range(examples(5)))
def test_every_state_that_is_kept_is_read_as_it_was(number: int) -> None:
    """Whatever was done in whichever order."""
    Mixed(first_seed() + number).run(30)
