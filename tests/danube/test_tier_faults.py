"""Faults that a relative of this log had in its cold tier, one test or more each; the number is that of the fault."""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from tests.crash.tier_promises import DIRECTORY, KEYS, NAME, open_node, tier_settings

import tidelog
from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog, Codec
from tidelog.cold.settings import TierSettings
from tidelog.cold.shipper import read_uploader_checkpoint
from tidelog.cold.takeover import divergent_tails
from tidelog.errors import ConfigError, CorruptionError, DataError, FencedError, StoreUnavailableError, TidelogError
from tidelog.log import Position
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.directory import wal_files
from tidelog.log.frame import scan
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store
from tidelog.testing import POLICIES, Crash, World
from tidelog.topics.topic import Topic

SETTINGS = tier_settings()
PRUNING = tier_settings(local_retention_bytes=1)


@pytest.fixture(params=[True, False], ids=["multi-key", "single-key"])
def world(request: pytest.FixtureRequest) -> World:
    """Two nodes, a store, and metadata of each kind."""
    return World(multi_key=request.param, clock=ManualClock(), part_bytes=200)


def append(topic: Topic, start: int, stop: int) -> None:
    for number in range(start, stop):
        assert topic.append(b"%d" % number, sync=True) == number


def numbers(topic: Topic, start: Position = "earliest") -> list[int]:
    found = [(message.offset, message.value) for message in topic.read(start)]
    assert [value for _, value in found] == [b"%d" % offset for offset, _ in found]
    return [offset for offset, _ in found]


def shipped(world: World, count: int, settings: TierSettings = SETTINGS) -> None:
    """A topic whose first messages are in the store, and which is closed."""
    with open_node(world, "a", settings) as log:
        append(log.topic(NAME), 0, count)
        log.topic(NAME).ship()
        log.topic(NAME).prune()


def catalog(world: World) -> Catalog:
    return Catalog(world.metadata, KEYS)


# 3. Checkpoints and exports were renamed without being synced.


def test_3_the_uploaders_checkpoint_is_whole_or_absent_after_any_crash() -> None:
    """Loses the place where shipping goes on, or leaves half of it."""
    for crash_at in range(40, 90, 3):
        world = World(crash_at=crash_at)
        try:
            shipped(world, 8)
        except (Crash, TidelogError):
            world.crash()
        for policy in POLICIES:
            files = world.after_crash(policy, seed=crash_at).files("a")
            found = read_uploader_checkpoint(files, DIRECTORY)
            assert found is not None or not files.exists(DIRECTORY / "uploader.ckpt")


def test_3_the_uploaders_checkpoint_is_durable_once_it_is_written(world: World) -> None:
    """Loses the place where shipping goes on with the power, although it was written."""
    shipped(world, 8)
    found = read_uploader_checkpoint(world.after_crash("lose").files("a"), DIRECTORY)
    assert found is not None
    assert found.next_offset == 8


def test_3_an_export_to_a_shared_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loses objects that the catalog names: neither file nor directory was synced around the rename."""
    synced: list[str] = []
    fsync, fdatasync = os.fsync, os.fdatasync
    for name, real in (("fsync", fsync), ("fdatasync", fdatasync)):

        def sync(descriptor: int, real: object = real) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            real(descriptor)  # type: ignore[operator]

        monkeypatch.setattr(os, name, sync)
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket") as log:
        append(log.topic(NAME), 0, 3)
        log.topic(NAME).ship()
    folder = tmp_path / "bucket" / "storage/topics" / NAME / "objects"
    assert [path.name for path in folder.iterdir() if "#" not in path.name] == ["data-0-2-e1.tlog"]
    assert any(path.startswith(f"{folder}/") for path in synced)
    assert str(folder) in synced


# 5. What was recorded of a file was not what was in it: it was uploaded again and again.


def test_5_every_message_is_uploaded_once(world: World) -> None:
    """Costs an upload of the same file at each look, for ever."""
    with open_node(world, "a", SETTINGS) as log:
        topic, seen = log.topic(NAME), 0
        for stop in range(7, 71, 7):
            append(topic, seen, stop)
            topic.ship()
            topic.ship()
            seen = stop
    descriptors = list(catalog(world).walk(0))
    raw_bytes = sum(descriptor.raw_size for descriptor in descriptors)
    sent_bytes = raw_bytes + BINDING_BYTES * len(descriptors)
    assert world.store.traffic.bytes_written == sum(descriptor.size for descriptor in descriptors) == sent_bytes
    assert world.store.traffic.requests["publish"] == len(descriptors) == len(world.store.contents())
    with open_node(world, "a", SETTINGS) as log:
        log.topic(NAME).ship()
    assert world.store.traffic.requests["publish"] == len(descriptors)


# 6. An error was taken for an empty topic.


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize("operation", ["get", "range", "floor", "keys", "commit"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
def test_6_an_error_is_never_an_empty_topic(world: World, node: str, operation: str, nth: int) -> None:
    """Loses everything: the catalog could not be read, and the topic began again at 0."""
    shipped(world, 8)
    world.metadata.fail(operation, nth=nth)
    with contextlib.suppress(StoreUnavailableError), open_node(world, node, SETTINGS) as log:
        assert log.topic(NAME).next_offset == 8
    world.heal()
    with open_node(world, node, SETTINGS) as log:
        append(log.topic(NAME), 8, 9)
        assert numbers(log.topic(NAME)) == list(range(9))


@pytest.mark.parametrize("key", [KEYS.owner, KEYS.start, KEYS.state, KEYS.descriptor(0)])
def test_6_what_cannot_be_understood_is_never_an_empty_topic(world: World, key: str) -> None:
    """Loses everything: nonsense in the catalog was read as nothing."""
    with open_node(world, "a", SETTINGS) as log:
        append(log.topic(NAME), 0, 3)
        log.topic(NAME).seal()
    world.metadata.put(key, b"{nonsense")
    with open_node(world, "b", SETTINGS) as log, pytest.raises(DataError):
        log.topic(NAME)


def test_6_a_lost_catalog_is_not_a_new_topic(world: World) -> None:
    """Loses the history: with the metadata gone, the topic began at 0 beside its own objects."""
    shipped(world, 8)
    for key in list(world.metadata.contents()):
        world.metadata.delete(key)
    with open_node(world, "b", SETTINGS) as log, pytest.raises(DataError, match="rebuild-catalog"):
        log.topic(NAME)


# 7. There was no fencing.


def test_7_an_old_owner_can_change_nothing(world: World) -> None:
    """Loses the new owner's messages: the old one went on exporting over them."""
    shipped(world, 3)
    with open_node(world, "a", PRUNING) as first, open_node(world, "b", SETTINGS) as second:
        old = first.topic(NAME)
        append_late = partial(old.append, b"late")
        append(old, 3, 6)
        new = second.topic(NAME, take_over=True)
        append(new, 3, 5)
        entries, objects = world.metadata.contents(), world.store.contents()
        for change in (old.ship, append_late, old.prune, old.seal, old.plan_orphans, append_late):
            with pytest.raises(FencedError):
                change()
        with pytest.raises(FencedError):
            first.delete_topic(NAME)
        assert world.metadata.contents() == entries
        assert world.store.contents().items() >= objects.items(), "an upload that is never published may be left"
        new.ship()
        assert numbers(new) == list(range(5))


def test_7_the_tail_of_an_old_owner_is_kept_apart(world: World) -> None:
    """Loses the unexported tail, or mixes it into messages that have the same offsets."""
    shipped(world, 3)
    with open_node(world, "a", SETTINGS) as log:
        for _ in range(4):
            log.topic(NAME).append(b"tail", sync=True)
    with open_node(world, "b", SETTINGS) as log:
        append(log.topic(NAME), 3, 5)
        log.topic(NAME).ship()
    with open_node(world, "a", SETTINGS) as log:
        assert numbers(log.topic(NAME)) == list(range(5))
    assert [(tail.first_offset, tail.next_offset) for tail in divergent_tails(world.files("a"), DIRECTORY)] == [(3, 7)]


def test_7_of_many_that_open_at_once_one_writes(world: World) -> None:
    """Loses messages to two writers of one topic."""
    logs = [open_node(world, f"n{number}", SETTINGS) for number in range(8)]
    barrier, opened = threading.Barrier(len(logs)), list[Topic]()

    def race(log: tidelog.LogDirectory) -> None:
        barrier.wait()
        try:
            opened.append(log.topic(NAME))
        except TidelogError:
            return

    threads = [threading.Thread(target=race, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    published = 0
    for number, topic in enumerate(opened):
        topic.append(b"%d" % number, sync=True)
        try:
            topic.ship()
            published += 1
        except FencedError:
            continue
    assert published == 1
    assert [descriptor.start_offset for descriptor in catalog(world).walk(0)] == [0]
    for log in logs:
        log.close()


def test_7_sealing_an_empty_topic_resumes_at_zero(world: World) -> None:
    """Loses offset 0: an empty topic was resumed at 1."""
    with open_node(world, "a", SETTINGS) as log:
        log.topic(NAME).seal()
    with open_node(world, "b", SETTINGS) as log:
        append(log.topic(NAME), 0, 1)


# 8. Messages were stored without their offsets.


def test_8_objects_carry_their_offsets(world: World) -> None:
    """Loses every consumer's position: messages were numbered anew when they were recovered."""
    with open_node(world, "a", SETTINGS) as log:
        topic = log.topic(NAME, first_offset=1000)
        topic.append_many([b"x" * 50] * 20)
        topic.ship()
    for descriptor in catalog(world).walk(0):
        data = world.store.contents()[KEYS.object(descriptor.name)]
        frames = scan(data, BINDING_BYTES, descriptor.start_offset).frames
        assert frames.next_offset == descriptor.next_offset
    with open_node(world.lose_disk("a"), "a", SETTINGS) as log:
        assert [message.offset for message in log.topic(NAME).read()] == list(range(1000, 1020))
        assert log.topic(NAME).append(b"next") == 1020


# 9. The next flush undid retention, and pruned offsets could not be read.


def test_9_the_start_never_goes_back(world: World) -> None:
    """Loses the place where the topic begins: the next flush set it back to 0."""
    settings, start = tier_settings(retention_bytes=500), 0
    for round_number in range(4):
        with open_node(world, "ab"[round_number % 2], settings) as log:
            topic = log.topic(NAME)
            assert topic.start_offset == start
            append(topic, round_number * 10, round_number * 10 + 10)
            topic.ship()
            topic.prune()
            assert topic.start_offset > start or round_number == 0
            start = topic.start_offset
            topic.flush()
            assert topic.start_offset == start
            assert numbers(topic) == list(range(start, round_number * 10 + 10))
            topic.seal()


def test_9_what_left_the_disk_is_read_from_the_store(world: World) -> None:
    """Loses sight of pruned messages: reading them failed although the store had them."""
    with open_node(world, "a", PRUNING) as log:
        topic = log.topic(NAME)
        append(topic, 0, 20)
        topic.ship()
        topic.prune()
        assert topic.hot_start_offset > 0 == topic.start_offset
        for start in (0, 1, topic.hot_start_offset - 1, topic.hot_start_offset):
            assert numbers(topic, start) == list(range(start, 20))


# 10. After a move, what had left the cache and was not exported was skipped.


def test_10_nothing_is_skipped_between_store_files_and_memory(world: World) -> None:
    """Loses messages between the exported part and the cache, without an error."""
    shipped(world, 10)
    with open_node(world, "b", SETTINGS) as log:
        topic = log.topic(NAME)
        reader = topic.read(0, follow=True)
        append(topic, 10, 60)
        assert [next(reader).offset for _ in range(60)] == list(range(60))
        assert topic.shipped_offset == 10
        assert numbers(topic) == list(range(60))


# 13. Damage ended a read or an export in silence.


@pytest.mark.parametrize("byte", [0, 8, 12, 20])
def test_13_a_damaged_file_stops_shipping_and_is_kept(world: World, byte: int) -> None:
    """Loses the rest of a damaged file: its good beginning was exported, and then it was deleted."""
    with open_node(world, "a", PRUNING) as log:
        topic = log.topic(NAME)
        append(topic, 0, 20)
        files = world.files("a")
        names = [name for _, name in wal_files(files.list(DIRECTORY))]
        data = bytearray(files.read(DIRECTORY / names[1]))
        data[byte] ^= 0x10
        file = files.open(DIRECTORY / names[1], write=True)
        file.write_at(0, bytes(data))
        file.close()
        with pytest.raises(CorruptionError, match=names[1]):
            topic.ship()
        topic.prune()
        assert names[1] in files.list(DIRECTORY)
        assert topic.shipped_offset == catalog(world).next_offset() < 20
        assert topic.statistics().tier.shipper.errors > 0  # type: ignore[union-attr]
    assert all(descriptor.next_offset <= topic.shipped_offset for descriptor in catalog(world).walk(0))


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("byte", [0, 8, 12, 30, 70])
def test_13_a_damaged_object_never_ends_a_read_in_silence(world: World, codec: Codec, byte: int) -> None:
    """Loses the objects behind a damaged one: its damage looked like the end of the topic."""
    shipped(world, 30, tier_settings(codec))
    damaged = list(catalog(world).walk(0))[1]
    key = KEYS.object(damaged.name)
    data = bytearray(world.store.contents()[key])
    data[byte] ^= 0x40
    world.store.tamper(key, bytes(data))
    with open_node(world.lose_disk("a"), "a", SETTINGS) as log:
        reader, found = log.topic(NAME).read(), list[int]()
        with pytest.raises(TidelogError, match=str(damaged.name)):
            found.extend(message.offset for message in reader)
        assert found == list(range(len(found)))
        assert len(found) <= damaged.end_offset
        assert numbers(log.topic(NAME), damaged.next_offset) == list(range(damaged.next_offset, 30))


# 14. Descriptor and `cur` were two writes.


@pytest.mark.parametrize("fault", ["unavailable", "unanswered"])
def test_14_a_stale_cur_costs_nothing(fault: str) -> None:
    """Loses the newest objects for ever: a crash between two writes left `cur` behind."""
    world = World(multi_key=False, clock=ManualClock())
    shipped(world, 8)
    with open_node(world, "a", SETTINGS) as log:
        append(log.topic(NAME), 8, 12)
        world.metadata.fail("commit", fault, matching="cur", times=None)  # type: ignore[arg-type]
        with pytest.raises(StoreUnavailableError):
            log.topic(NAME).ship()
    world.heal()
    assert catalog(world).next_offset() == 12
    with open_node(world, "b", SETTINGS) as log:
        append(log.topic(NAME), 12, 14)
        log.topic(NAME).ship()
        assert numbers(log.topic(NAME)) == list(range(14))
    current, newest = catalog(world).current(), catalog(world).newest()
    assert current is not None
    assert newest is not None
    assert current[0] == newest.start_offset


# 15. Nothing expired, and everything was scanned.


def test_15_durable_segments_expire(world: World) -> None:
    """Costs a bucket that only grows."""
    settings = tier_settings(retention_seconds=3600)
    with open_node(world, "a", settings) as log:
        topic = log.topic(NAME)
        append(topic, 0, 10)
        topic.ship()
        world.clock.advance(7200)  # type: ignore[attr-defined]
        append(topic, 10, 12)
        topic.ship()
        topic.prune()
        assert topic.start_offset == 10
        assert numbers(topic) == [10, 11]
    assert [KEYS.object(descriptor.name) for descriptor in catalog(world).walk(0)] == list(world.store.contents())


def test_15_a_read_in_the_middle_does_not_scan_the_catalog(world: World) -> None:
    """Costs a look at every descriptor for each read: with ten times as many objects it costs about the same."""
    requests = [requests_for_a_read(World(multi_key=world.metadata.supports_multi_key), count) for count in (40, 400)]
    assert requests[1] <= 3 * requests[0]


def requests_for_a_read(world: World, messages: int) -> int:
    with open_node(world, "a", PRUNING) as log:
        topic = log.topic(NAME)
        topic.append_many([b"%d" % number for number in range(messages)])
        topic.ship()
        topic.prune()
    with open_node(world, "a", PRUNING) as log:
        topic = log.topic(NAME)
        world.metadata.reset_traffic()
        middle = messages // 2
        assert [message.offset for message in topic.read(middle, middle + 2)] == [middle, middle + 1]
        return sum(world.metadata.traffic.requests.values()) + world.metadata.traffic.bytes_read // 1000


def test_15_a_read_starts_in_the_right_file(world: World) -> None:
    """Costs a replay of the oldest file first, however new the message is that is asked for."""
    with open_node(world, "a", SETTINGS) as log:
        append(log.topic(NAME), 0, 40)
    with open_node(world, "a", SETTINGS) as log:
        topic, files = log.topic(NAME), world.files("a")
        oldest = min(name for _, name in wal_files(files.list(DIRECTORY)))
        files.fail("open", matching=oldest, times=None)
        assert numbers(topic, 35) == [35, 36, 37, 38, 39]


# 16. Some credentials settings were accepted and ignored.


@pytest.mark.parametrize("setting", ["store_access_key_id", "store_account_name", "store_service_account_path"])
@pytest.mark.parametrize("url", ["file://{}/bucket", "memory://"])
def test_16_a_setting_that_means_nothing_is_refused(tmp_path: Path, url: str, setting: str) -> None:
    """Loses the wrong bucket's data: a key was accepted, ignored, and another one was used."""
    with pytest.raises(ConfigError, match=setting):
        open_store(url.format(tmp_path), StoreSettings(**{setting: "x"}))  # type: ignore[arg-type]


def test_16_half_a_key_is_refused() -> None:
    """Loses the same: a name without its key fell back to what the machine had."""
    with pytest.raises(ConfigError, match="store_secret_access_key"):
        open_store("s3://bucket", StoreSettings(store_access_key_id="x"))
