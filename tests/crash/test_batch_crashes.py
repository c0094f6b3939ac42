"""`append_many` is all or nothing: on a disk that is cut at every call, in a store, and after the disk was lost."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.campaign import every
from tests.crash.tier_promises import KEYS, NAME, open_node, tier_settings

from tidelog.cold.catalog import Catalog
from tidelog.cold.settings import TierSettings
from tidelog.cold.upload import plan_upload, whole_groups
from tidelog.log import LogSettings
from tidelog.log.directory import wal_files
from tidelog.log.frame import encode_many, writable_frames
from tidelog.testing import CrashPlan, FaultyFiles, History, World, crash_everywhere, cut_world_everywhere
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import group_of
from tidelog.topics.rescue import Rescue
from tidelog.topics.topic import Topic

ROOT = Path("/data")
# A file takes about three messages, a sync comes only when it is asked for.
SETTINGS = LogSettings(rotate_max_bytes=250, fsync_interval_ms=3_600_000, open_check_bytes=0)
BATCHES = [(1, False), (4, False), (2, True), (9, False), (3, True), (1, True), (7, True), (5, False)]
PLAN = CrashPlan(every=every(3))


def values_of(number: int, count: int) -> list[bytes]:
    return [f"{number}:{index}".encode() for index in range(count)]


def append_batches(topic: Topic, history: History, *, framed: bool = False) -> None:
    """Batches over several files; of those that were synced it is written down."""
    for number, (count, sync) in enumerate(BATCHES):
        values = values_of(number, count)
        if framed:
            made = encode_many(number, topic._encoder.many(values))
            frames = writable_frames(number, bytearray(made.buffer), made.positions, made.lengths)
            topic.append_frames(frames if number % 3 else made, sync=sync)
        else:
            topic.append_many(values, sync=sync)
        if sync:
            history.attempted("synced", number)


def assert_whole(values: list[bytes], history: History) -> int:
    """The batches in `values` are whole, in order and include all that were promised; returns how many."""
    found = 0
    rest = list(values)
    while rest:
        expected = values_of(found, BATCHES[found][0])
        assert rest[: len(expected)] == expected
        rest = rest[len(expected) :]
        found += 1
    synced = [number for life in history.lives for what, number in life.attempts if what == "synced"]
    assert found > max(synced, default=-1)
    return found


def open_local(files: FaultyFiles) -> LogDirectory:
    return LogDirectory(ROOT, SETTINGS, files=files)


@pytest.mark.deeper
@pytest.mark.parametrize("framed", [False, True])
def test_a_batch_is_whole_after_a_crash_at_any_call(framed: bool) -> None:
    """With rotations inside batches: whatever is found begins with whole batches and ends with one. Also where they
    are appended as frames, which are joined for a write."""

    def workload(files: FaultyFiles, history: History) -> None:
        with closing(open_local(files)) as log:
            append_batches(log.topic(NAME), history, framed=framed)

    def check(files: FaultyFiles, history: History) -> None:
        with closing(LogDirectory(ROOT, SETTINGS, files=files, read_only=True)) as log:
            seen = [m.value for m in log.topic(NAME).read()] if log.topics() else []
        with closing(open_local(files)) as log:
            topic = log.topic(NAME)
            values = [message.value or b"" for message in topic.read()]
            assert values == seen
            assert_whole(values, history)
            topic.append_many([b"x", b"y"], sync=True)
        with closing(open_local(files)) as log:
            assert [message.value for message in log.topic(NAME).read()] == [*values, b"x", b"y"]

    def checked(files: FaultyFiles, history: History) -> None:
        if files.exists(ROOT / "tidelog.json"):
            check(files, history)

    summary = crash_everywhere(workload, checked, PLAN)
    assert summary.cut_points > 20


@pytest.mark.parametrize("max_object_bytes", [200, 700, 10_000])
def test_objects_hold_whole_batches(max_object_bytes: int) -> None:
    """Whatever the size of objects: each ends with a batch, and one larger than an object gets one for itself."""
    world = World()
    settings = TierSettings(max_object_bytes=max_object_bytes)
    with closing(open_node(world, "a", settings)) as log:
        topic = log.topic(NAME)
        append_batches(topic, History())
        assert topic.ship() == topic.next_offset
    ends = set()
    position = 0
    for count, _ in BATCHES:
        position += count
        ends.add(position)
    objects = list(Catalog(world.metadata, KEYS).walk(0))
    assert {descriptor.next_offset for descriptor in objects} <= ends
    if max_object_bytes == 200:
        assert len(objects) > 4


@pytest.mark.deeper
def test_a_batch_is_whole_in_the_store_after_a_crash_and_the_loss_of_the_disk() -> None:
    """Cut on disk and store together: who restores from the bucket alone finds whole batches, and so does the node."""

    def workload(world: World, history: History) -> None:
        with closing(open_node(world, "a", tier_settings())) as log:
            topic = log.topic(NAME)
            for number, (count, _) in enumerate(BATCHES):
                topic.append_many(values_of(number, count), sync=number % 2 == 0)
                if number % 3 == 2:
                    topic.ship()

    def check(world: World, history: History) -> None:
        lost = world.lose_disk("a")
        for remains, node in ((world, "a"), (lost, "b")):
            with closing(open_node(remains, node, tier_settings())) as log:
                assert_whole([message.value or b"" for message in log.topic(NAME).read()], history)

    summary = cut_world_everywhere(workload, check, PLAN)
    assert summary.cut_points > 10


def test_what_is_synced_of_an_unfinished_batch_is_not_shipped() -> None:
    """A sync may end inside a batch: the shipper goes up to the batch, and takes it when all of it is synced."""
    with closing(open_local(FaultyFiles())) as log:
        topic = log.topic(NAME)
        topic.append_many([b"a", b"b"], sync=True)
        topic.append_many([b"c"] * 5, sync=True)
        wal = topic._log
        assert [whole_groups(wal, stop, group_of) for stop in range(8)] == [0, 0, 2, 2, 2, 2, 2, 7]
        assert whole_groups(wal, 4, None) == 4
        # What no first message confirms holds nothing up.
        assert whole_groups(wal, 5, lambda _: (3, 9)) == 5
        for max_bytes, expected in ((1, [2, 7]), (300, [2, 7]), (10_000, [7])):
            ends, offset = [], 0
            while (shipment := plan_upload(wal, offset, 7, max_bytes, None, group_of)) is not None:
                ends.append(offset := shipment.next_offset)
            assert ends == expected


def test_a_rescue_returns_whole_batches() -> None:
    """Of what a fenced owner left, a batch whose end never reached its disk is left out."""
    world = World()
    with closing(open_node(world, "a", tier_settings())) as log:
        log.topic(NAME).append_many([b"whole"] * 2, sync=True)
        log.topic(NAME).append_many([b"torn"] * 2, sync=True)
    directory = ROOT / NAME
    files = world.files("a")
    last = files.open(directory / wal_files(files.list(directory))[-1][1], write=True)
    last.truncate(last.size() - 1)
    last.sync()
    last.close()
    with closing(open_node(world, "b", tier_settings())) as log:
        log.topic(NAME).append(b"of b", sync=True)
    with closing(open_node(world, "a", tier_settings())) as log:
        rescue = Rescue(log, NAME, files=files, clock=world.clock)
        (tail,) = rescue.set_aside()
        assert [message.value for message in rescue.messages(tail)] == [b"whole"] * 2
