"""Rows handed over, and everything killed at every change of disk, bucket and metadata: each row is in the topic once.

Writer and owner are one process here, so that each of their steps is a cut point. What a cut leaves is looked at by the
same node, by another one, without the disk and after a second crash; the writer comes back too, and writes all of it
again under the same versions. A campaign cuts at all calls, and looks in all ways.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.campaign import IS_DEEP, every
from tests.crash.tier_promises import KEYS, NAME, open_node, tier_settings
from tests.staging.staged_commits import LocalTopic, hand_over, local_topic, stage

from tidelog.clock import ManualClock
from tidelog.errors import FencedError, TidelogError
from tidelog.log import LogSettings
from tidelog.staging import rows as staging_rows
from tidelog.staging.area import StagingArea
from tidelog.staging.document import decode_staging
from tidelog.testing import (
    Crash,
    CrashPlan,
    FaultyFiles,
    FaultyMetadata,
    FaultyStore,
    History,
    World,
    cut_world_everywhere,
)
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import encode_message
from tidelog.topics.topic import Topic

pytestmark = pytest.mark.deeper
SETTINGS = tier_settings()
# So many rows has each version: one of them none, one of them more than fit into a file.
ROWS = {0: 3, 1: 0, 2: 9, 3: 2}
each_kind = pytest.mark.parametrize("multi_key", [True, False], ids=["multi-key", "single-key"])


def area_in(world: World) -> StagingArea:
    return StagingArea(world.store, world.metadata, KEYS, world.clock)


def values(version: int) -> list[bytes]:
    return [b"v%d-%d" % (version, number) for number in range(ROWS[version])]


def payloads(version: int) -> list[bytes]:
    return [encode_message(value, None, {}, 1) for value in values(version)]


def write(world: World, history: History, version: int, parts: int = 2) -> None:
    """As a writer does, also one that was restarted: what was promised is written down."""
    hand_over(area_in(world), "etl", version, payloads(version), parts)
    history.attempted("committed", version)


def committed(history: History) -> set[int]:
    return {int(version) for life in history.lives for kind, version in life.attempts if kind == "committed"}


@contextlib.contextmanager
def opened(world: World, node: str = "a") -> Iterator[LogDirectory]:
    with closing(open_node(world, node, SETTINGS)) as log:
        yield log


# What must be so


def rows_in(topic: Topic) -> dict[int, list[int]]:
    """Where the rows of each version are."""
    found: dict[int, list[int]] = {version: [] for version in ROWS}
    for message in topic.read("earliest"):
        if (message.value or b"").startswith(b"v"):
            version, number = (message.value or b"")[1:].split(b"-")
            assert int(number) == len(found[int(version)]), f"{message} is not the next row"
            found[int(version)].append(message.offset)
    return found


def check_rows(topic: Topic, expected: set[int]) -> None:
    """All rows of these versions, in one piece, once, and in order of the versions; of others all or none."""
    found = rows_in(topic)
    for version, offsets in found.items():
        assert offsets == [] or len(offsets) == ROWS[version], f"version {version}: {offsets}"
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets))) if offsets else True
        assert version not in expected or len(offsets) == ROWS[version], f"version {version} is missing: {offsets}"
    places = [offsets[0] for _, offsets in sorted(found.items()) if offsets]
    assert places == sorted(places)


def check_tidy(world: World) -> None:
    """Everything is taken in and shipped: nothing is staged any more, and nothing waits."""
    document = decode_staging(world.metadata.contents()[KEYS.staging], KEYS.staging)
    assert (document.pending, document.refused) == ((), ())
    named = [key for key in world.store.contents() if key.startswith(KEYS.staging_prefix)]
    assert named == []


def look(world: World, history: History, node: str) -> None:
    """What was committed is there; the writer comes back, and then all of it is, once, and nothing is left over."""
    with opened(world, node) as log:
        topic = log.topic(NAME)
        check_rows(topic, committed(history))
        topic.append(b"other", sync=True)
        for version in ROWS:
            write(world, history, version)
            topic.ingest()
        check_rows(topic, set(ROWS))
        topic.ship()
        topic.ingest()
    with opened(world, node) as log:
        check_rows(log.topic(NAME), set(ROWS))
        status = area_in(world).status("etl", 2)
        offsets = rows_in(log.topic(NAME))[2]
        assert status.state == "taken"
        assert status.first_offset in (None, offsets[0])
    forget_leftovers(world)
    check_tidy(world)


def forget_leftovers(world: World) -> None:
    """A writer that was killed leaves what it had staged: a sweep removes it, a day later."""
    assert isinstance(world.clock, ManualClock)
    world.clock.advance(48 * 3600)
    with opened(world) as log:
        topic = log.topic(NAME)
        topic.remove_orphans(topic.plan_orphans())


# Ways to look


def by_the_same_node(world: World, history: History) -> None:
    look(world, history, "a")


def by_another_node_and_back(world: World, history: History) -> None:
    look(world, history, "b")
    look(world, history, "a")


def without_the_disk(world: World, history: History) -> None:
    look(world.lose_disk("a"), history, "a")


def after_a_second_crash(world: World, history: History) -> None:
    crash_at = random.Random(len(world.metadata.contents()) + len(world.store.contents())).randint(1, 30)
    cut = world.after_crash("keep", crash_at=crash_at)
    with contextlib.suppress(Crash, TidelogError), opened(cut) as log:
        log.topic(NAME).append(b"again")
        log.topic(NAME).ship()
        log.topic(NAME).ingest()
    cut.crash()
    look(cut.after_crash("lose", seed=crash_at, torn_bytes=crash_at % 2), history, "a")


def cut_everywhere(workload: object, multi_key: bool, step: int = 1) -> None:
    others = [by_another_node_and_back, without_the_disk, after_a_second_crash]
    turns = itertools.cycle(others)

    def check(world: World, history: History) -> None:
        for way in [by_the_same_node, *(others if IS_DEEP else [next(turns)])]:
            way(world.after_crash("keep"), history.copy())

    def start(crash_at: int | None) -> World:
        return World(crash_at=crash_at, multi_key=multi_key, clock=ManualClock(), part_bytes=100)

    plan = CrashPlan(policies=("lose", "keep"), every=every(step))
    summary = cut_world_everywhere(workload, check, plan, start)  # type: ignore[arg-type]
    assert summary.cut_points > 5
    assert summary.abandoned_threads == 0


# What is cut


def before_and_beside_an_owner(world: World, history: History) -> None:
    """Handed over before anybody owned the topic, then beside an owner, with other messages in between."""
    write(world, history, 0)
    with opened(world) as log:
        topic = log.topic(NAME)
        topic.append(b"other")
        write(world, history, 1)
        write(world, history, 2)
        topic.ingest()
        topic.append(b"other", sync=True)
        topic.ship()
        write(world, history, 3)
        topic.ingest()
        topic.append(b"other")


@each_kind
def test_handing_over_and_taking_in(multi_key: bool) -> None:
    """Doubles or loses, without the place: the rows of a consignment that was cut in the middle."""
    cut_everywhere(before_and_beside_an_owner, multi_key, step=23)


def taken_in_and_sealed(world: World, history: History) -> None:
    """Everything goes to the store, and another node takes in what comes then."""
    with opened(world) as log:
        topic = log.topic(NAME)
        write(world, history, 0)
        topic.ingest()
        topic.seal()
    write(world, history, 1)
    write(world, history, 2)
    with opened(world, "b") as log:
        log.topic(NAME).ship()


@each_kind
def test_sealing(multi_key: bool) -> None:
    """Loses, without its order: rows whose parts went before they were shipped."""
    cut_everywhere(taken_in_and_sealed, multi_key, step=23)


def two_owners(world: World, history: History) -> None:
    """One node takes the topic from another in the middle, which then tries to go on."""
    write(world, history, 0)
    with opened(world) as first, opened(world, "b") as second:
        topic = first.topic(NAME)
        write(world, history, 1)
        write(world, history, 2)
        taken = second.topic(NAME, take_over=True)
        with contextlib.suppress(FencedError):
            topic.ingest()
        write(world, history, 3)
        with pytest.raises(FencedError):
            topic.ingest()
        taken.ingest()
        taken.ship()
        taken.ingest()


@each_kind
def test_two_owners(multi_key: bool) -> None:
    """Doubles, without fencing: what both of them take in."""
    cut_everywhere(two_owners, multi_key, step=23)


@pytest.mark.parametrize("call", range(1, 40, 3))
@each_kind
def test_an_owner_that_is_replaced_at_any_step(multi_key: bool, call: int) -> None:
    """Another node takes the topic just before a change of the first, which goes on: each row is there once."""
    history = History()

    def take_over(_: object) -> None:
        if len(world.calls) == begin + call and history.lives[0].attempts[-1][0] != "taken over":
            history.attempted("taken over", call)
            with closing(open_node(other, "b", SETTINGS)) as log:
                log.topic(NAME).ingest()
                log.topic(NAME).ship()

    world = World(multi_key=multi_key, clock=ManualClock(), on_call=take_over, part_bytes=100)
    other = World(multi_key=multi_key, clock=world.clock)
    other.store, other.metadata = world.store.another_client(), world.metadata.another_client()
    begin = 10**9
    with contextlib.suppress(FencedError), opened(world) as log:
        topic = log.topic(NAME)
        write(world, history, 0)
        write(world, history, 2)
        begin = len(world.calls)
        topic.ingest()
        topic.ship()
        topic.ingest()
    with closing(open_node(other, "b", SETTINGS)) as log:
        check_rows(log.topic(NAME), {0, 2})


# Without a store


DIRECTORY = Path("/data/shop/orders")
SMALL_FILES = LogSettings(rotate_max_bytes=300, fsync_interval_ms=3_600_000)


def local_rows(world: World) -> list[bytes]:
    with local_topic(DIRECTORY, world.files("a"), world.store, world.metadata, SMALL_FILES) as topic:
        return topic.payloads()


@pytest.mark.parametrize("way", ["appended", "written beside"])
def test_without_a_store(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on one disk, where what was staged goes as soon as the rows are synced; in whichever way they come."""
    if way == "written beside":
        monkeypatch.setattr(staging_rows, "_KEPT_BYTES", 0)
        monkeypatch.setattr(LocalTopic, "is_local", True)

    def workload(world: World, history: History) -> None:
        area = area_in(world)
        area.commit("etl", 0, stage(area, "etl", 0, payloads(0)))
        history.attempted("committed", 0)
        with local_topic(DIRECTORY, world.files("a"), world.store, world.metadata, SMALL_FILES) as topic:
            topic.log.append(encode_message(b"other", None, {}, 1))
            for version in (1, 2, 3):
                area.commit("etl", version, stage(area, "etl", version, payloads(version), parts=2))
                history.attempted("committed", version)
                topic.taker.ingest()
                topic.log.append(encode_message(b"other", None, {}, 1), sync=True)

    def check(world: World, history: History) -> None:
        for number in range(2):
            found = [payload for payload in local_rows(world) if b"other" not in payload]
            done = [payload for version in ROWS for payload in payloads(version)]
            assert found == done[: len(found)]
            assert len(found) in [sum(list(ROWS.values())[:count]) for count in range(5)]
            assert all(payload in found for version in committed(history) for payload in payloads(version))
            if number == 0:
                for version in ROWS:
                    hand_over(area_in(world), "etl", version, payloads(version))
                    local_rows(world)

    plan = CrashPlan(every=every(9))
    summary = cut_world_everywhere(
        workload, check, plan, lambda crash_at: World(crash_at=crash_at, clock=ManualClock(), part_bytes=100)
    )
    assert summary.cut_points > 10
    assert summary.abandoned_threads == 0


def test_the_disk_dies_in_the_middle() -> None:
    """A log that failed takes nothing in any more, and what it had is gone on with when it is opened again."""
    files, objects, metadata = FaultyFiles(), FaultyStore(), FaultyMetadata()
    area = StagingArea(objects, metadata, KEYS)
    with contextlib.suppress(TidelogError), local_topic(DIRECTORY, files, objects, metadata, SMALL_FILES) as topic:
        hand_over(area, "etl", 2, payloads(2))
        files.fail("sync", nth=2)
        topic.taker.ingest()
    files.heal()
    with local_topic(DIRECTORY, files, objects, metadata, SMALL_FILES) as topic:
        assert topic.payloads() == payloads(2)
