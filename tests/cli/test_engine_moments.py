"""Looking at an engine at any moment of its life: what is seen from outside is what opening finds, and all is well."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.cli.conftest import Cli
from tests.engine.engines import SMALL, RandomEntries, copy_alive

from tidelog.clock import SystemClock
from tidelog.engine.core import Core
from tidelog.engine.engine import Engine
from tidelog.files import LocalFiles


def play(engine: Engine, choose: random.Random, entries: RandomEntries) -> None:
    """Something that changes the engine, its log or its files."""
    match choose.randrange(10):
        case 3:
            engine.compact_index()
        case 4:
            engine.collect_garbage(horizon=choose.randint(0, engine.low_water_mark))
        case 0:
            engine.create_checkpoint()
        case 1:
            engine.update_low_water_mark(choose.randint(0, engine.applied_seq))
        case 2:
            engine.rollback_to(choose.randint(engine.low_water_mark, engine.applied_seq))
        case _:
            engine.apply_many(entries.entries(choose.randint(1, 40), engine.applied_seq + 1))


def last_file(directory: Path) -> Path:
    return sorted((directory / "wal").glob("wal.*.log"))[-1]


def cut_end(last: Path, choose: random.Random, kept_bytes: int) -> None:
    """A crash that loses the end of the log: bytes that came since the last checkpoint."""
    size = last.stat().st_size
    if size > kept_bytes:
        os.truncate(last, choose.randint(kept_bytes, size))


@pytest.mark.parametrize("seed", range(6))
def test_every_moment_is_a_good_one(cli: Cli, tmp_path: Path, seed: int) -> None:
    """Killed anywhere, an engine verifies, and its status says what opening then comes to."""
    choose, entries = random.Random(seed), RandomEntries(f"moments {seed}")
    engine = Engine(Core.open(tmp_path / "engine", SMALL, LocalFiles(), SystemClock()), runs_in_background=False)
    with engine:
        for moment in range(4):
            for _ in range(choose.randint(1, 8)):
                play(engine, choose, entries)
            engine.create_checkpoint()
            kept, redo_lsn = last_file(tmp_path / "engine"), engine.statistics().redo_lsn
            kept_bytes = kept.stat().st_size
            for _ in range(choose.randint(0, 3)):
                play(engine, choose, entries)
            copy = tmp_path / f"moment-{moment}"
            copy_alive(tmp_path / "engine", copy)
            # What a checkpoint needs was synced: a crash does not lose it.
            if last_file(copy).name == kept.name and engine.statistics().redo_lsn == redo_lsn:
                cut_end(last_file(copy), choose, kept_bytes)
            check_moment(cli, copy)


def check_moment(cli: Cli, copy: Path) -> None:
    about = cli("engine", "status", copy, "--json").json
    assert about["problems"] == []
    verified = cli("engine", "verify", copy, "--json")
    assert [one["text"] for one in verified.json["findings"] if one["severity"] == "error"] == []
    core = Core.open(copy, SMALL, LocalFiles(), SystemClock())
    try:
        marks = core.marks
        found = (about["applied_seq"], about["low_water_mark"], about["history_start_seq"])
        assert found == (marks.applied_seq, marks.low_water_mark, core.checkpointer.history_start_seq)
        assert (about["recovery"]["undone_seq"], about["recovery"]["redo_lsn"]) == (
            core.recovery.undone_seq,
            core.recovery.begin_lsn,
        )
        assert about["recovery"]["redo_records"] == core.recovery.records
    finally:
        core.close()
    assert cli("engine", "verify", copy).code == 0
