"""An engine that removes old versions and files of its log, killed at every call of the disk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from tests.campaign import every
from tests.crash.engine_promises import (
    DIRECTORY,
    Apply,
    Checkpoint,
    Mark,
    Reopen,
    RollBack,
    Step,
    Workload,
    _crash_in_recovery,
)
from tests.crash.test_engine_crashes import random_steps
from tests.engine.engines import WITH_VALUE_FILES, assert_state, open_local
from tests.engine.model import Model

from tidelog.engine.engine import Engine
from tidelog.engine.entry import CreateBucket, DeleteBucket, DeleteObject, Entry, PutObject
from tidelog.errors import NotFoundError
from tidelog.testing import CrashPlan, FaultyFiles, History, crash_everywhere


class Vacuum(NamedTuple):
    """Versions go that no state from a seq on needs; the seq is at or below the low-water mark."""

    horizon: int


class GarbageWorkload(Workload):
    """Steps with vacuums between them. What is kept is found whole after a crash, and what is not is told as gone."""

    def __init__(self, steps: Sequence[Step | Vacuum], keep_versions: int | None = None) -> None:
        settings = msgspec.structs.replace(WITH_VALUE_FILES, keep_versions=keep_versions)
        super().__init__(steps, settings)  # type: ignore[arg-type]
        self._all: Sequence[Step | Vacuum] = steps

    def _do(self, engine: Engine, step: Step | Vacuum, files: FaultyFiles) -> Engine:
        if isinstance(step, Vacuum):
            engine.collect_garbage(horizon=step.horizon)
            return engine
        return super()._do(engine, step, files)

    def check(self, files: FaultyFiles, history: History) -> None:
        """As ever, for the states that are kept; and history begins where a vacuum said, finished or not."""
        begun, done = (sum(what == name for what, _ in history.lives[0].attempts) for name in ("begun", "done"))
        files = _crash_in_recovery(files, self._settings, seed=f"{len(history.lives[0].attempts)}")
        with open_local(DIRECTORY, files, self._settings) as engine:
            model = self._matching(engine, done, begun)
            start = engine.statistics().history_start_seq
            assert start in (self._start_after(done), self._start_after(begun))
            assert_kept(engine, model, start)
            engine._core.tree.check()
            self._go_on(engine, model, done, files)
            engine.update_low_water_mark(engine.applied_seq)
            engine.collect_garbage(horizon=engine.applied_seq)
            assert_kept(engine, model, engine.applied_seq)

    def _start_after(self, count: int) -> int:
        return max([step.horizon for step in self._all[:count] if isinstance(step, Vacuum)], default=0)


def assert_kept(engine: Engine, model: Model, start: int) -> None:
    """All states from a seq on, and none before."""
    for seq in [start, *[seq for seq in model.states if seq > start][-6:]]:
        assert_state(engine, model, seq)
    if start:
        with pytest.raises(NotFoundError, match="no longer kept"):
            engine.digest(start - 1)


@pytest.mark.deeper
def test_every_step_of_a_vacuum() -> None:
    """Versions, deletions and buckets that go, with a checkpoint in the middle and without."""
    puts = [(seq, PutObject("b", f"k{seq % 3}", b"v" * 300 + b"%d" % seq)) for seq in range(3, 40)]
    ends: list[tuple[int, Entry]] = [
        (40, DeleteObject("b", "k1")),
        (41, DeleteBucket("c", force=True)),
        (42, PutObject("b", "k0", b"s")),
    ]
    first = Apply(((1, CreateBucket("b")), (2, CreateBucket("c")), *puts, *ends))
    ways: list[list[Step | Vacuum]] = [
        [first, Mark(42), Vacuum(20), Vacuum(42)],
        [first, Mark(42), Checkpoint(), Vacuum(42), Checkpoint(), Vacuum(42)],
        [first, Mark(42), Vacuum(41), Reopen(), Apply(((43, CreateBucket("c")),)), RollBack(42), Vacuum(42)],
    ]
    for steps in ways:
        workload = GarbageWorkload(steps)
        crash_everywhere(workload.run, workload.check, CrashPlan(policies=("lose", "tear", "reorder"), every=every(11)))


def with_vacuums(steps: list[Step], seed: int) -> list[Step | Vacuum]:
    """The same steps, with vacuums up to the low-water mark of the moment."""
    chance, mark, found = random.Random(f"vacuums {seed}"), 0, list[Step | Vacuum]()
    for step in steps:
        found.append(step)
        if isinstance(step, Mark):
            mark = max(mark, step.seq)
        if mark and chance.random() < 0.5:
            found.append(Vacuum(chance.randint(mark // 2, mark)))
    return found


@pytest.mark.deeper
@pytest.mark.parametrize("seed", range(4))
def test_random_workloads(seed: int) -> None:
    """Everything mixed: entries, rollbacks, marks, checkpoints, openings and vacuums; files of the log go meanwhile."""
    workload = GarbageWorkload(with_vacuums(random_steps(seed, 60), seed), keep_versions=seed % 3 or None)
    crash_everywhere(workload.run, workload.check, CrashPlan(every=every(41), seed=seed))
