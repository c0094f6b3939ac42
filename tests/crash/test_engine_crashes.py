"""An engine, killed at every call of the disk: what it is afterwards is what the model was."""

from __future__ import annotations

import itertools
import random

import pytest
from tests.campaign import every
from tests.crash.engine_promises import Apply, Checkpoint, CompactIndex, Mark, Reopen, RollBack, Step, Workload
from tests.engine.engines import SMALL, WITH_VALUE_FILES, RandomEntries
from tests.engine.model import batch

from tidelog.engine.entry import CopyObject, CreateBucket, DeleteBucket, DeleteObject, Entry, PutObject
from tidelog.testing import CrashPlan, crash_everywhere

CREATE = CreateBucket("b")
PUT = PutObject("b", "k", b"v" * 300)
ENTRIES: dict[str, Entry] = {
    "create": CREATE,
    "put": PUT,
    "small": PutObject("b", "k", b"s", {"m": 1}),
    "copy": CopyObject("b", "k", "b", "j"),
    "delete": DeleteObject("b", "k"),
    "drop": DeleteBucket("b", force=True),
    "batch": batch(
        CreateBucket("c"), PutObject("c", "k", b"1" * 200), PutObject("c", "k", b"2"), DeleteObject("c", "k")
    ),
}


@pytest.mark.deeper
@pytest.mark.parametrize("first", ENTRIES)
def test_every_workload_of_up_to_three_entries(first: str) -> None:
    """Each kind of entry after each other, cut at every call; one sync each, and all in one.

    Where it is no campaign, of the longest ones only some, and each so-many-th cut.
    """
    longest = itertools.islice(itertools.product(ENTRIES, repeat=2), list(ENTRIES).index(first), None, every(10))
    for rest in [(), *itertools.product(ENTRIES, repeat=1), *longest]:
        entries = [(seq, ENTRIES[name]) for seq, name in enumerate((first, *rest), 1)]
        steps = [Apply(tuple(entries))] if len(rest) % 2 else [Apply((one,)) for one in entries]
        workload = Workload(steps, crashes_in_recovery=0)
        crash_everywhere(workload.run, workload.check, CrashPlan(policies=("lose", "tear"), every=every(9)))


def random_steps(seed: int, entries: int) -> list[Step]:
    """Entries in batches of all sizes, with rollbacks, marks, checkpoints and openings between them."""
    chance, source = random.Random(f"steps {seed}"), RandomEntries(seed, largest=1100)
    left, seq, mark = entries, 0, 0
    steps: list[Step] = []
    while left > 0:
        some = source.entries(min(left, chance.choice((1, 1, 3, 12))), seq + 1)
        left, seq = left - len(some), some[-1][0]
        steps.append(Apply(tuple(some)))
        kind = chance.random()
        if kind < 0.15:
            steps.append(Checkpoint())
        elif kind < 0.25:
            seq = chance.randint(max(mark, seq - 9), seq)
            steps.append(RollBack(seq))
        elif kind < 0.32:
            mark = chance.randint(mark, seq)
            steps.append(Mark(mark))
        elif kind < 0.38:
            steps.append(Reopen())
        elif kind < 0.45:
            steps.append(CompactIndex())
    return steps


@pytest.mark.deeper
@pytest.mark.parametrize("seed", range(6))
def test_random_workloads(seed: int) -> None:
    """Everything mixed, with crashes inside of recoveries too."""
    workload = Workload(random_steps(seed, 60))
    crash_everywhere(workload.run, workload.check, CrashPlan(every=every(29), seed=seed))


@pytest.mark.deeper
def test_an_index_that_is_written_anew_is_the_old_or_the_new_one() -> None:
    """Cut at every call of two compactions, with entries, a rollback and no checkpoint of their own between them."""
    keys = [f"{number * 7919 % 1000:04d}-{'long' * 220}" for number in range(30)]
    puts = [(seq, PutObject("b", key, b"v")) for seq, key in enumerate(keys, 2)]
    steps: list[Step] = [
        Apply(((1, CREATE), *puts[:20])),
        CompactIndex(),
        Apply(tuple(puts[20:])),
        RollBack(26),
        CompactIndex(),
        Apply(((40, PUT),)),
    ]
    workload = Workload(steps, WITH_VALUE_FILES)
    crash_everywhere(workload.run, workload.check, CrashPlan(policies=("lose", "tear", "reorder"), every=every(11)))


@pytest.mark.deeper
def test_a_large_batch_that_is_torn_is_taken_back() -> None:
    """Its records fill several files, and its pages leave a pool that is too small; without the last none counts."""
    keys = [f"{number * 7919 % 1000:04d}-{'long' * 220}" for number in range(250)]
    large = batch(CREATE, *(PutObject("b", key, b"v" * 150) for key in keys))
    workload = Workload([Apply(((1, large),)), Checkpoint(), Apply(((2, PUT),))], SMALL)
    crash_everywhere(workload.run, workload.check, CrashPlan(policies=("lose", "tear", "reorder"), every=every(67)))
