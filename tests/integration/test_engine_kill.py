"""kill -9 of a real process whose engine does everything at once, again and again, on one directory and one store."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from tests.campaign import SEED, examples
from tests.engine.engines import RandomEntries
from tests.engine.model import Model
from tests.log.workbench import python, python_environment

import tidelog
from tidelog.engine.entry import Entry

KILLS = examples(2)
ENTRIES = 1500
SMALL = {
    "WAL_SEGMENT_SIZE": 64 << 10,
    "BUFFER_POOL_SIZE": 64 * 8192,
    "HOT_TIER_BYTES": 0,
    "KEEP_VERSIONS": 2,
    "LARGE_VALUE_BYTES": 1024,
}

# It tells the last seq of each batch once that is on the disk, by one write a line.
CHILD = """
import os, sys, threading, tidelog
from tests.engine.engines import RandomEntries

entries = dict(RandomEntries("killed").entries(int(sys.argv[3])))
engine = tidelog.open_engine(sys.argv[1], store=sys.argv[2])

def again_and_again(work):
    while True:
        work()

for work in (engine.ship, engine.create_checkpoint, engine.collect_garbage, engine.compact, engine.compact_index):
    threading.Thread(target=again_and_again, args=(work,), daemon=True).start()
left = [(seq, entry) for seq, entry in entries.items() if seq > engine.applied_seq]
for begin in range(0, len(left), 5):
    some = left[begin : begin + 5]
    engine.apply_many(some)
    os.write(1, b"%d\\n" % some[-1][0])
    if begin >= 50:
        engine.update_low_water_mark(left[begin - 50][0])
threading.Event().wait()
"""


def killed_after(seconds: float, directory: Path, store: str) -> int:
    """Runs the child until it has acknowledged something, and some time more; the last seq that it acknowledged."""
    program = python(CHILD, directory, store, str(ENTRIES))
    root = Path(__file__).parents[2]
    with subprocess.Popen(program, env=python_environment(), stdout=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(seconds)
        child.kill()
        lines += child.stdout.readlines()
    assert lines[0], "it ended by itself"
    return max(int(line) for line in lines if line.endswith(b"\n"))


def model_of(entries: list[tuple[int, Entry]]) -> Model:
    """All states."""
    model = Model()
    for seq, entry in entries:
        model.apply(seq, entry)
    return model


@pytest.mark.deeper
def test_everything_that_was_acknowledged_is_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every kill, and at last in a copy that is made from the store."""
    chance, store = random.Random(7 + SEED), (tmp_path / "store").as_uri()
    model = model_of(RandomEntries("killed").entries(ENTRIES))
    for name, value in SMALL.items():
        monkeypatch.setenv(f"TIDELOG_ENGINE_{name}", f"{value}")
    reached = 0
    for _ in range(KILLS):
        acknowledged = killed_after(chance.uniform(0.1, 0.8), tmp_path / "e", store)
        with tidelog.open_engine(tmp_path / "e") as engine:
            assert engine.applied_seq >= acknowledged
            assert engine.digest() == model.digest(engine.applied_seq)
            engine.update_low_water_mark(engine.applied_seq)
            engine.create_checkpoint()
            reached = engine.applied_seq
    with tidelog.restore_engine(tmp_path / "new", store=store) as engine:
        assert engine.applied_seq == reached
        assert engine.digest() == model.digest(reached)
