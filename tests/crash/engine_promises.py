"""What an engine promises about crashes: steps that are written down as they are done, and a check of what is left.

After a crash an engine is what the model is after all steps that returned, and after some whole entries of the one that
did not. A rollback that had begun in the log is finished. Giving it the same entries again leads to the same end.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.engine.engines import WITH_VALUE_FILES, assert_same, open_local
from tests.engine.model import Model

from tidelog.engine.engine import Engine
from tidelog.engine.entry import Entry
from tidelog.engine.settings import EngineSettings
from tidelog.testing import Crash, FaultyFiles, History, Policy

DIRECTORY = Path("/data/engine")


class Apply(NamedTuple):
    """Some entries at once."""

    entries: tuple[tuple[int, Entry], ...]


class RollBack(NamedTuple):
    """Back to a seq."""

    seq: int


class Mark(NamedTuple):
    """A low-water mark."""

    seq: int


class Checkpoint(NamedTuple):
    """A checkpoint."""


class CompactIndex(NamedTuple):
    """The index is written anew."""


class Reopen(NamedTuple):
    """Closed and opened again."""


Step = Apply | RollBack | Mark | Checkpoint | CompactIndex | Reopen


class Workload:
    """Steps on one engine, and what may be found after some of them."""

    def __init__(
        self, steps: Sequence[Step], settings: EngineSettings = WITH_VALUE_FILES, crashes_in_recovery: int = 1
    ) -> None:
        self._steps = steps
        self._settings = settings
        self._crashes_in_recovery = crashes_in_recovery

    def run(self, files: FaultyFiles, history: History) -> None:
        """Does all steps, and notes the beginning and the end of each."""
        engine = open_local(DIRECTORY, files, self._settings)
        try:
            for number, step in enumerate(self._steps):
                history.attempted("begun", number)
                engine = self._do(engine, step, files)
                history.attempted("done", number)
        finally:
            engine.close()

    def _do(self, engine: Engine, step: Step, files: FaultyFiles) -> Engine:
        match step:
            case Apply():
                engine.apply_many(step.entries)
            case RollBack():
                engine.rollback_to(step.seq)
            case Mark():
                engine.update_low_water_mark(step.seq)
            case Checkpoint():
                engine.create_checkpoint()
            case CompactIndex():
                engine.compact_index()
            case Reopen():
                engine.close()
                return open_local(DIRECTORY, files, self._settings)
        return engine

    def check(self, files: FaultyFiles, history: History) -> None:
        """What is left is one of the states that may be, and leads to the same end as without the crash."""
        begun, done = (sum(what == name for what, _ in history.lives[0].attempts) for name in ("begun", "done"))
        for number in range(self._crashes_in_recovery):
            files = _crash_in_recovery(files, self._settings, seed=f"{number}-{len(history.lives[0].attempts)}")
        engine = open_local(DIRECTORY, files, self._settings)
        try:
            model = self._matching(engine, done, begun)
            assert_same(engine, model, sorted(model.states)[-3:])
            engine._core.tree.check()
            self._go_on(engine, model, done, files)
        finally:
            engine.close()

    def _matching(self, engine: Engine, done: int, begun: int) -> Model:
        allowed = list(self._allowed(done, begun))
        for model in allowed:
            if engine.applied_seq == model.applied_seq and engine.digest() == model.digest():
                return model
        seqs = [model.applied_seq for model in allowed]
        raise AssertionError(f"at seq {engine.applied_seq}, with none of the states that may be: those at {seqs}")

    def _allowed(self, done: int, begun: int) -> Iterator[Model]:
        yield self._model(done)
        if begun > done:
            step = self._steps[done]
            if isinstance(step, Apply):
                for count in range(1, len(step.entries) + 1):
                    yield self._model(done, step.entries[:count])
            elif isinstance(step, RollBack):
                yield self._model(begun)

    def _model(self, done: int, entries: Sequence[tuple[int, Entry]] = ()) -> Model:
        model = Model()
        for step in self._steps[:done]:
            _on_model(model, step)
        _on_model(model, Apply(tuple(entries)))
        return model

    def _go_on(self, engine: Engine, model: Model, done: int, files: FaultyFiles) -> None:
        """The orchestrator repeats what got no answer, and goes on; entries that are there already do nothing."""
        for step in self._steps[done:]:
            if isinstance(step, Apply):
                engine.apply_many(step.entries)
                _on_model(model, Apply(tuple(one for one in step.entries if one[0] > model.applied_seq)))
            elif isinstance(step, RollBack):
                engine.rollback_to(step.seq)
                _on_model(model, step)
        assert engine.digest() == model.digest() == self._model(len(self._steps)).digest()


def _on_model(model: Model, step: Step) -> None:
    if isinstance(step, Apply):
        for seq, entry in step.entries:
            model.apply(seq, entry)
    elif isinstance(step, RollBack) and step.seq < model.applied_seq:
        model.roll_back(step.seq)


def _crash_in_recovery(files: FaultyFiles, settings: EngineSettings, seed: str) -> FaultyFiles:
    """Opens it and dies at one of the first calls; what is left then."""
    chance = random.Random(seed)
    policy: Policy = chance.choice(("lose", "keep", "tear", "reorder"))
    dying = files.after_crash("keep", crash_at=chance.randint(1, 25))
    with contextlib.suppress(Crash, Exception):
        open_local(DIRECTORY, dying, settings).close()
    dying.crash()
    return dying.after_crash(
        policy, seed=chance.randrange(1 << 30), torn_bytes=chance.randint(0, dying.in_flight_bytes)
    )
