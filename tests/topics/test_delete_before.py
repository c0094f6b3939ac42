"""`topic.delete_before`: the start of a topic moves for good, with a store and without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.campaign import every
from tests.crash.tier_promises import open_node, tier_settings
from tests.topics.storage_modes import MODES, Storage, make_storage

from tidelog.errors import DiskFullError, InputError, OffsetOutOfRangeError
from tidelog.testing import CrashPlan, FaultyFiles, History, ManualClock, World, cut_world_everywhere
from tidelog.topics.topic import Topic

NAME = "shop/orders"


@pytest.fixture(params=MODES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    get_server: Callable[[str], Any] = request.getfixturevalue
    return make_storage(request.param, tmp_path, get_server)


def values(topic: Topic, **options: Any) -> list[bytes]:
    return [message.value or b"" for message in topic.read(**options)]


def test_deleted_messages_stay_deleted(storage: Storage, tmp_path: Path) -> None:
    """For readers, by offset and by time, for views and after the next opening; offsets go on."""
    with storage.open(tmp_path / "node", max_object_bytes=200) as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number for number in range(10)])
        if storage.has_store:
            topic.ship()
        topic.append_many([b"%d" % number for number in range(10, 20)], sync=True)
        assert topic.delete_before(7) == 7
        assert (topic.start_offset, values(topic)[0]) == (7, b"7")
        assert topic.delete_before(3) == 7
        with pytest.raises(OffsetOutOfRangeError):
            topic.read(6)
        assert topic.delete_before(15) == 15  # beyond what was shipped
        assert values(topic) == [b"%d" % number for number in range(15, 20)]
        with storage.open(tmp_path / "node", read_only=True) as view:
            assert values(view.topic(NAME)) == [b"%d" % number for number in range(15, 20)]
        assert topic.verify().ok
    with storage.open(tmp_path / "node") as log:
        topic = log.topic(NAME)
        assert (topic.start_offset, topic.next_offset) == (15, 20)
        assert topic.delete_before(topic.next_offset) == 20
        assert values(topic) == []
        assert topic.append(b"next") == 20
        assert values(topic) == [b"next"]
        assert topic.verify().ok


def test_reader_below_a_deletion_stops(storage: Storage, tmp_path: Path) -> None:
    """Also one that was made before, and whose messages are still in memory."""
    with storage.open(tmp_path / "node") as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number for number in range(10)], sync=True)
        readers = [topic.read(0), topic.read(0, follow=True)]
        topic.delete_before(5)
        for reader in readers:
            with pytest.raises(OffsetOutOfRangeError):
                next(reader)


def test_another_node_begins_where_the_deletion_ended(tmp_path: Path) -> None:
    """The start is in the catalog: a node without the disk of the first sees it too."""
    storage = make_storage("shared_fs-sqlite", tmp_path, lambda name: None)
    with storage.open(tmp_path / "a") as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number for number in range(10)])
        topic.delete_before(4)
        topic.seal()
    with storage.open(tmp_path / "b") as log:
        topic = log.topic(NAME)
        assert (topic.start_offset, values(topic)) == (4, [b"%d" % number for number in range(4, 10)])


def test_offset_after_the_end_is_refused(storage: Storage, tmp_path: Path) -> None:
    """What is not there cannot be deleted in advance."""
    with storage.open(tmp_path / "node") as log:
        topic = log.topic(NAME)
        topic.append(b"0")
        with pytest.raises(OffsetOutOfRangeError, match="offset 2 is after the end"):
            topic.delete_before(2)
        with pytest.raises(InputError):
            topic.delete_before("latest")  # type: ignore[arg-type]
        assert values(topic) == [b"0"]


def test_subscription_goes_on_at_the_new_start(storage: Storage, tmp_path: Path) -> None:
    """A consumer that has not come so far gets what is left, and nothing before."""
    with storage.open(tmp_path / "node") as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number for number in range(10)], sync=True)
        topic.subscribe("late").close()
        topic.delete_before(6)
        with topic.subscribe("late") as consumer:
            received = consumer.receive(60)
            assert received is not None
            assert received.value == b"6"


def test_partitions_are_deleted_by_number(tmp_path: Path) -> None:
    """Each partition has its own start."""
    storage = make_storage("local", tmp_path, lambda name: None)
    with storage.open(tmp_path / "node") as log:
        topic = log.topic(NAME, partitions=2)
        for number in (0, 1):
            topic.append_many([b"a", b"b", b"c"], partition=number)
        assert topic.delete_before({1: 2}) == {1: 2}
        assert topic.start_offsets == {0: 0, 1: 2}


def test_crash_anywhere_leaves_all_of_a_deletion_or_nothing() -> None:
    """With a store, cut at every call: what was deleted stays so, what was not deleted can be read."""
    settings = tier_settings()

    def workload(world: World, history: History) -> None:
        with open_node(world, "a", settings) as log:
            topic = log.topic(NAME)
            history.attempted("delete", 6)
            topic.delete_before(6)
            history.attempted("deleted", 6)

    def check(world: World, history: History) -> None:
        said = {kind for life in history.lives for kind, _ in life.attempts}
        with open_node(world, "a", settings) as log:
            topic = log.topic(NAME)
            start = topic.start_offset
            assert start in ((6,) if "deleted" in said else (0, 6))
            assert values(topic) == [b"%d" % number * 30 for number in range(start, 8)]
            assert topic.delete_before(6) == 6
            assert topic.verify().ok

    before = World(clock=ManualClock(), part_bytes=150)
    with open_node(before, "a", settings) as log:
        topic = log.topic(NAME)
        for number in range(8):
            topic.append(b"%d" % number * 30, sync=True)
            if number == 4:
                topic.ship()
    summary = cut_world_everywhere(
        workload,
        check,
        CrashPlan(policies=("lose", "keep"), every=every(3)),
        lambda crash_at: before.after_crash("keep", crash_at=crash_at),
    )
    assert summary.cut_points > 3


# Settings that change while a topic is open


def test_changed_retention_takes_effect_on_an_open_topic(storage: Storage, tmp_path: Path) -> None:
    """Nobody has to close it: what is deleted follows the settings of the moment, by itself too."""
    small: dict[str, Any] = {"max_object_bytes": 200} if storage.has_store else {}
    with storage.open(tmp_path / "node", rotate_max_bytes=300, retention_interval_seconds=0.05, **small) as log:
        topic = log.topic(NAME)
        for number in range(20):
            topic.append(b"%d" % number * 20, sync=True)
        if storage.has_store:
            topic.ship()
        topic.prune()
        assert topic.start_offset == 0
        assert log.configure_topic(NAME, retention_bytes=600)["retention_bytes"] == 600
        deadline = time.monotonic() + 120
        while topic.start_offset == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 0 < topic.start_offset < 20
        log.configure_topic(NAME, retention_bytes=None)
        begins = topic.start_offset
        topic.append(b"more" * 100, sync=True)
        topic.prune()
        assert topic.start_offset == begins


def fill_disk(world: World) -> FaultyFiles:
    """No room for one more message."""
    files = world.files("a")
    files.capacity_bytes = sum(len(content or b"") for content in files.tree().values())
    return files


@pytest.mark.parametrize("way", ["purge", "delete"])
def test_full_disk_is_freed_by_deleting_what_is_not_shipped(way: str) -> None:
    """Deleting is the way out of a full disk: it must not need room to begin with, with a store either."""
    world = World(clock=ManualClock())
    with open_node(world, "a", tier_settings()) as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number * 100 for number in range(10)], sync=True)
        files = fill_disk(world)
        with pytest.raises(DiskFullError):
            topic.append(b"late" * 100, sync=True)
        if way == "purge":
            assert topic.delete_before(10) == 10
            assert values(topic) == [b"late" * 100]
            assert topic.append(b"next", sync=True) == 11
            assert topic.verify().ok
        else:
            log.delete_topic(NAME)
            assert not log.has_topic(NAME)
        files.capacity_bytes = None
