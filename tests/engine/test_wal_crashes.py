"""The engine's log, killed at every write, sync, rename and removal: what was committed is there, where it was said."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest
from tests.campaign import every

from tidelog.engine.settings import EngineSettings
from tidelog.engine.wal.wal import FIRST, Anchor, Wal
from tidelog.log.frame import HEADER_BYTES
from tidelog.testing import CrashPlan, FaultyFiles, History, crash_everywhere

DIRECTORY = Path("/engine/wal")
SETTINGS = EngineSettings(rotate_max_bytes=4096)
ROUNDS = 40


class Promises:
    """What an engine was told: records by LSN with their positions, which are durable, and which may be gone."""

    def __init__(self) -> None:
        self.placed: dict[int, tuple[int, bytes]] = {}
        self.durable_lsn = 0
        self.removed_below = 0
        self.anchor = FIRST

    def added(self, wal: Wal, size: int) -> None:
        lsn, position = wal.next_lsn, wal.next_position
        content = f"{lsn}@{position}:".encode().ljust(size, b".")
        self.placed[lsn] = position, content
        assert wal.add(content) == lsn

    def committed(self, lsn: int) -> None:
        self.durable_lsn = max(self.durable_lsn, lsn)

    def discarded(self, next_lsn: int) -> None:
        self.placed = {lsn: place for lsn, place in self.placed.items() if lsn < next_lsn}


class Story:
    """One run after the other, each with promises of its own, and a check of those."""

    def __init__(self) -> None:
        self.promises = Promises()

    def workload(self, files: FaultyFiles, history: History) -> None:
        """Entries of several records, some given up, files ended by size and by hand, old ones removed."""
        promises = self.promises = Promises()
        chance = random.Random(7)
        with closing(Wal.open(DIRECTORY, SETTINGS, files=files)) as wal:
            for number in range(ROUNDS):
                for _ in range(chance.randint(1, 4)):
                    promises.added(wal, chance.randint(30, 900))
                if chance.random() < 0.15:
                    wal.discard()
                    promises.discarded(wal.next_lsn)
                    continue
                promises.committed(wal.commit())
                if number % 9 == 8:
                    wal.seal()
                if number % 12 == 11:
                    _remove(wal, promises)

    def check(self, files: FaultyFiles, history: History) -> None:
        """All that was committed is readable by LSN and by position, nothing else is there, and the log goes on."""
        with closing(Wal.open(DIRECTORY, SETTINGS, files=files, anchor=self.promises.anchor)) as wal:
            _check_contents(wal, self.promises)
            position, lsn = wal.next_position, wal.next_lsn
            wal.add(b"the next life")
            wal.commit()
            assert wal.read_stored(position + HEADER_BYTES, 13) == b"the next life"
            assert wal.record(lsn) == b"the next life"


def _remove(wal: Wal, promises: Promises) -> None:
    """As an engine does: the new anchor is known before the files go."""
    lsn = wal.durable_lsn
    promises.anchor = Anchor(lsn, wal.position_of(lsn))
    promises.removed_below = lsn - 5
    wal.remove_below(promises.removed_below)


def _check_contents(wal: Wal, promises: Promises) -> None:
    assert wal.durable_lsn >= promises.durable_lsn
    assert wal.first_lsn <= max(1, promises.removed_below)
    for frames in wal.batches(wal.first_lsn):
        for lsn, content in enumerate(frames.payloads(), frames.first_offset):
            position, expected = promises.placed[lsn]
            assert content == expected
            assert wal.read_stored(position + HEADER_BYTES, len(content)) == content
    back = [lsn for lsn, _ in wal.backwards(wal.durable_lsn, wal.first_lsn)] if wal.durable_lsn else []
    assert back == list(range(wal.durable_lsn, wal.first_lsn - 1, -1))[: len(back)]


@pytest.mark.deeper
def test_what_was_committed_is_there_at_every_cut_point() -> None:
    """Cut anywhere, with every kind of remains: LSNs, positions and bytes agree."""
    story, step = Story(), every(3)
    summary = crash_everywhere(story.workload, story.check, CrashPlan(every=step))
    assert summary.cut_points > 2 * ROUNDS // step
    assert summary.abandoned_threads == 0


@pytest.mark.deeper
def test_other_remains_are_no_different() -> None:
    """Torn and reordered writes, drawn several times for some of the cut points."""
    story = Story()
    plan = CrashPlan(policies=("tear", "reorder"), seeds=4, seed=100, every=every(7))
    assert crash_everywhere(story.workload, story.check, plan).checks > ROUNDS
