"""Producers, killed at every call of disk and stores: whoever repeats everything ends up with each message once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.campaign import every
from tests.crash.tier_promises import NAME, open_node, tier_settings

from tidelog.log import LogSettings
from tidelog.testing import CrashPlan, FaultyFiles, History, World, crash_everywhere, cut_world_everywhere
from tidelog.topics.directory import LogDirectory
from tidelog.topics.topic import Topic

ROOT = Path("/data")
SETTINGS = LogSettings(rotate_max_bytes=300, fsync_interval_ms=3_600_000)
WORK = [(0, 1), (1, 3), (4, 1), (5, 2), (9, 4), (13, 1), (14, 1)]


def value(sequence: int) -> bytes:
    return b"%d" % sequence


def produce(topic: Topic, history: History, *, ship: bool = False) -> None:
    """Sequences with a gap, alone and in batches; what was synced is written down."""
    producer = topic.producer("app-1")
    for step, (first, count) in enumerate(WORK):
        sync = step % 2 == 1
        producer.append_many([value(first + number) for number in range(count)], sequence=first, sync=sync)
        if sync:
            history.attempted("synced", first + count - 1)
        topic.append(b"plain")
        if ship and step % 3 == 1:
            history.attempted("shipped", topic.ship())


def repeat(topic: Topic) -> None:
    """All of it again, by a process that knows nothing of the one before: each is there once, in order."""
    again = topic.producer("app-1")
    offsets = {}
    for first, count in WORK:
        values = [value(first + number) for number in range(count)]
        for number, offset in enumerate(again.append_many(values, sequence=first, sync=True)):
            offsets[first + number] = offset
    found = {message.offset: message.value for message in topic.read() if message.value != b"plain"}
    assert list(found.values()) == [value(sequence) for sequence in offsets]
    assert {offset: value(sequence) for sequence, offset in offsets.items()} == found


def assert_promises(topic: Topic, history: History, kind: str) -> None:
    promised = [number for life in history.lives for what, number in life.attempts if what == kind]
    last = topic.producer("app-1").last_sequence
    if promised and kind == "synced":
        assert last is not None
        assert last >= promised[-1]


@pytest.mark.deeper
def test_on_a_disk() -> None:
    """Cut anywhere, also while the file of the producers is written."""

    def workload(files: FaultyFiles, history: History) -> None:
        with closing(LogDirectory(ROOT, SETTINGS, files=files)) as log:
            produce(log.topic(NAME), history)

    def check(files: FaultyFiles, history: History) -> None:
        for number in range(2):
            with closing(LogDirectory(ROOT, SETTINGS, files=files)) as log:
                if number == 0:
                    assert_promises(log.topic(NAME), history, "synced")
                repeat(log.topic(NAME))

    assert crash_everywhere(workload, check, CrashPlan(every=every(3))).cut_points > 20


@pytest.mark.deeper
@pytest.mark.parametrize("multi_key", [True, False])
def test_with_a_store(multi_key: bool) -> None:
    """The same node goes on, or another one, or the same one after it lost its disk."""

    def workload(world: World, history: History) -> None:
        with closing(open_node(world, "a", tier_settings())) as log:
            topic = log.topic(NAME)
            produce(topic, history, ship=True)
            topic.seal()

    def check(world: World, history: History) -> None:
        worlds = [(world.after_crash("keep"), "a"), (world.after_crash("keep"), "b"), (world.lose_disk("a"), "a")]
        for remains, node in worlds:
            with closing(open_node(remains, node, tier_settings())) as log:
                repeat(log.topic(NAME))

    plan = CrashPlan(every=every(11))
    summary = cut_world_everywhere(
        workload, check, plan, start=lambda crash_at: World(crash_at=crash_at, multi_key=multi_key)
    )
    assert summary.cut_points > 5
