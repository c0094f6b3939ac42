"""Random lives of a topic to which rows are handed over: two nodes, failing stores, crashes, lost disks, moves.

Whatever happens in whatever order: when all is well again, each row that was committed is in the topic once, in one
piece with the other rows of its version, and versions are in order. A campaign has more of them, of other seeds.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
from tests.campaign import examples, first_seed
from tests.crash.tier_promises import KEYS, NAME, open_node, tier_settings
from tests.staging.staged_commits import hand_over

from tidelog.clock import ManualClock
from tidelog.errors import TidelogError
from tidelog.staging.area import StagingArea
from tidelog.staging.document import decode_staging
from tidelog.testing import Crash, World
from tidelog.testing.crash import quiet_crashes
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import encode_message

pytestmark = pytest.mark.deeper
PARTS = 4
WALKS = examples(10)
STEPS = 30
SETTINGS = tier_settings()
STORE_FAULTS = [("store", "*", "unavailable"), ("store", "read_range", "unavailable"), ("store", "get", "unavailable")]
METADATA_FAULTS = [("metadata", "commit", fault) for fault in ("unavailable", "unanswered", "late")]


class Walk:
    """One life."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = World(multi_key=self.chance.random() < 0.5, clock=ManualClock(), part_bytes=100)
        self.open: dict[str, LogDirectory] = {}
        self.rows: list[int] = []
        self.committed: set[int] = set()
        self.told: list[str] = []

    def run(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (4, self.write),
            (1, self.write_again),
            (4, self.open_node),
            (1, self.close_node),
            (4, self.append),
            (4, self.ingest),
            (2, self.ship),
            (1, self.seal),
            (2, self.fail),
            (2, self.heal),
            (2, self.crash),
            (1, self.crash_soon),
            (1, self.lose_disk),
        ]
        weights = [weight for weight, _ in steps]
        self.write()
        for _ in range(STEPS):
            (step,) = self.chance.choices([step for _, step in steps], weights)
            self.told.append(step.__name__)
            try:
                step()
            except TidelogError as error:
                self.told.append(f"  {type(error).__name__}")
            except Crash:
                self.begin_anew()
        self.end()

    # Steps

    def area(self) -> StagingArea:
        return StagingArea(self.world.store, self.world.metadata, KEYS, self.world.clock)

    def payloads(self, version: int) -> list[bytes]:
        return [encode_message(b"v%d-%d" % (version, number), None, {}, 1) for number in range(self.rows[version])]

    def write(self) -> None:
        """The next version, or the last one again if it is not known to be committed."""
        if not self.rows or len(self.rows) - 1 in self.committed:
            self.rows.append(self.chance.choice([0, 1, 3, 8, 20]))
        version = len(self.rows) - 1
        hand_over(self.area(), "etl", version, self.payloads(version), parts=self.chance.randint(1, 3))
        self.committed.add(version)

    def write_again(self) -> None:
        for version in sorted(self.committed):
            assert hand_over(self.area(), "etl", version, self.payloads(version)) == "already committed"

    def a_node(self) -> str:
        return self.chance.choice("aab")

    def open_node(self) -> None:
        node = self.a_node()
        if node not in self.open:
            self.open[node] = open_node(self.world, node, SETTINGS)
        self.open[node].topic(NAME, take_over=True)

    def a_log(self) -> LogDirectory | None:
        return self.open.get(self.a_node())

    def close_node(self) -> None:
        node = self.a_node()
        if node in self.open:
            self.open.pop(node).close()

    def append(self) -> None:
        log = self.a_log()
        if log is not None:
            log.topic(NAME, take_over=True).append(b"other", sync=self.chance.random() < 0.5, timeout=0.01)

    def ingest(self) -> None:
        log = self.a_log()
        if log is not None:
            log.topic(NAME, take_over=True).ingest()

    def ship(self) -> None:
        log = self.a_log()
        if log is not None:
            log.topic(NAME, take_over=True).ship()

    def seal(self) -> None:
        log = self.a_log()
        if log is not None:
            log.topic(NAME, take_over=True).seal()

    def fail(self) -> None:
        part, operation, fault = self.chance.choice(STORE_FAULTS + METADATA_FAULTS * 2)
        times = self.chance.choice([1, 1, 3, None])
        target = self.world.store if part == "store" else self.world.metadata
        target.fail(operation, fault, nth=self.chance.randint(1, 4), times=times)  # type: ignore[arg-type]

    def heal(self) -> None:
        self.world.heal()
        self.world.metadata.land_late_writes()

    def crash(self) -> None:
        self.world.crash()
        self.begin_anew()

    def crash_soon(self) -> None:
        """At one of the next changes, whatever they are."""
        self.world.faults.crash_at = len(self.world.calls) + self.chance.randint(1, 25)

    def lose_disk(self) -> None:
        self.world.crash()
        self.begin_anew(lost=self.a_node())

    def begin_anew(self, lost: str | None = None) -> None:
        for log in self.open.values():
            with contextlib.suppress(TidelogError, Crash):
                log.close()
        self.open = {}
        policy = self.chance.choice(["keep", "lose", "tear"])
        torn_bytes = self.chance.randint(0, 1)
        self.world = self.world.after_crash(policy, seed=self.chance.randrange(99), torn_bytes=torn_bytes)  # type: ignore[arg-type]
        if lost is not None:
            self.world = self.world.lose_disk(lost)

    # When all is well again

    def end(self) -> None:
        self.world.crash()
        self.begin_anew()
        self.world.heal()
        self.world.metadata.land_late_writes()
        self.told.append("end")
        for node in ("b", "a"):
            with contextlib.closing(open_node(self.world, node, SETTINGS)) as log:
                topic = log.topic(NAME, take_over=True)
                for version in range(len(self.rows)):
                    hand_over(self.area(), "etl", version, self.payloads(version))
                topic.ingest()
                self.check([message.value or b"" for message in topic.read("earliest")])
                topic.ship()
                topic.ingest()
        document = decode_staging(self.world.metadata.contents()[KEYS.staging], KEYS.staging)
        assert (document.pending, document.refused) == ((), ())

    def check(self, found: list[bytes]) -> None:
        rows = [value for value in found if value.startswith(b"v")]
        expected = [b"v%d-%d" % (version, row) for version, count in enumerate(self.rows) for row in range(count)]
        assert rows == expected
        for version, count in enumerate(self.rows):
            if count:
                first = found.index(b"v%d-0" % version)
                assert found[first + count - 1] == b"v%d-%d" % (version, count - 1), "not in one piece"


@pytest.mark.parametrize("part", range(PARTS))
def test_each_row_is_there_once_whatever_happens(part: int) -> None:
    """The seed of a life that fails is named, with all that happened in it."""
    with quiet_crashes():
        for seed in range(first_seed() + part * WALKS, first_seed() + (part + 1) * WALKS):
            walk = Walk(seed)
            try:
                walk.run()
            except BaseException as error:
                error.add_note(f"seed {seed}: {' '.join(walk.told)}")
                raise
