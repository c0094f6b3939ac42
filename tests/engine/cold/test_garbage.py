"""Garbage of the log: what nobody needs goes, from the front; what is needed stays, whoever needs it."""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.campaign import every
from tests.engine.engines import SMALL, RandomEntries, assert_state, open_local
from tests.engine.model import Model
from tests.engine.stations import DIRECTORY, KEYS, EngineNode, new_store, successor, use_replica, usurp

from tidelog.clock import ManualClock, SystemClock
from tidelog.engine.cold.garbage import Piece, Usage, drop_below
from tidelog.engine.cold.manifest import Pinning
from tidelog.engine.core import Core
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CopyObject, CreateBucket, PutObject
from tidelog.errors import FencedError, NotFoundError, StoreUnavailableError, TidelogError
from tidelog.files import LocalFiles
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import Crash, FaultyFiles, World

VALUE = b"v" * 1500
SETTINGS: dict[str, Any] = {"local_retention_bytes": 0, "rotate_max_bytes": 8 << 10}


def overwrite(node: EngineNode, times: int, keys: int = 3) -> None:
    """The same few objects again and again, shipped, with a state in the store and one before it."""
    first = node.engine.applied_seq + 1
    if first == 1:
        node.apply_these([(1, CreateBucket("b"))])
        first = 2
    for half in (range(first, first + times // 2), range(first + times // 2, first + times)):
        node.apply_these([(seq, PutObject("b", f"k{seq % keys}", VALUE + b"%d" % seq)) for seq in half])
        node.ship_all()
        node.engine.create_checkpoint()


def assert_kept(node: EngineNode, start: int | None = None) -> None:
    """Every state that is to be kept is what it was, and none before it is to be read."""
    found = node.engine.statistics().history_start_seq
    assert start is None or found == start
    states = [found, *[seq for seq in node.model.states if seq > found]]
    for seq in states if len(states) < 40 else [*states[:10], *states[-10:]]:
        assert_state(node.engine, node.model, seq)
    if found:
        with pytest.raises(NotFoundError, match="no longer kept"):
            node.engine.digest(found - 1)


# Which pieces


def piece(number: int) -> Piece:
    """Ten records in a hundred bytes."""
    return Piece(f"piece-{number}", 10 * number, 10 * number + 10, 100, 90)


@pytest.mark.parametrize(
    ("live", "needed_from_lsn", "expected", "below"),
    [
        ({}, 99, "drop drop drop newest", 30),
        ({}, 20, "drop drop replay newest", 20),
        ({}, 19, "drop replay replay newest", 10),
        ({}, 0, "replay replay replay newest", 0),
        ({1: 7}, 99, "drop live behind newest", 10),
        ({0: 7}, 99, "live behind behind newest", 0),
        ({3: 7}, 99, "drop drop drop live", 30),
    ],
)
def test_what_becomes_of_pieces(live: dict[int, int], needed_from_lsn: int, expected: str, below: int) -> None:
    """Dead ones go from the front; the newest stays, and so does what is replayed."""
    usage = Usage([piece(number) for number in range(4)])
    for number, size in live.items():
        usage.numbers[3 + 3 * number] = size
    uses = usage.judged(needed_from_lsn)
    assert " ".join(use.fate for use in uses) == expected
    assert drop_below(uses) == below
    assert all(use.live_bytes + use.dead_bytes == 100 and use.reason for use in uses)


@pytest.mark.parametrize(
    ("compacted_lsn", "needed_from_lsn", "expected", "below"),
    [
        (20, 99, "drop drop live newest", 20),
        (19, 99, "drop live live newest", 10),
        (99, 99, "drop drop drop newest", 30),
        (99, 20, "drop drop replay newest", 20),
        (0, 99, "live live live newest", 0),
    ],
)
def test_what_is_compacted_need_not_stay_for_its_values(
    compacted_lsn: int, needed_from_lsn: int, expected: str, below: int
) -> None:
    """Pieces that are wholly compacted go although versions point into them, unless a restore reads them."""
    usage = Usage([piece(number) for number in range(4)])
    for number in range(3):
        usage.numbers[3 + 3 * number] = 7
    uses = usage.judged(needed_from_lsn, compacted_lsn)
    assert " ".join(use.fate for use in uses) == expected
    assert drop_below(uses) == below
    assert [use.live_bytes for use in uses] == [7, 7, 7, 0]


# On the disk alone


def test_files_of_an_engine_without_a_store_go() -> None:
    """Those that no version is in, and that neither opening nor a rollback would read; the rest is found as it was."""
    files, settings = FaultyFiles(), msgspec.structs.replace(SMALL, rotate_max_bytes=8 << 10)
    with open_local(Path("/engine"), files, settings) as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply_many([(seq, PutObject("b", f"k{seq % 3}", VALUE + b"%d" % seq)) for seq in range(2, 80)])
        assert engine.collect_garbage(horizon=79).dropped_pieces == 0, "all of it may be rolled back"
        engine.update_low_water_mark(70)
        assert engine.collect_garbage(horizon=79).dropped_pieces == 0, "opening needs all of it"
        engine.create_checkpoint()
        plan = engine.plan_garbage(horizon=79)
        assert (plan.place, plan.removable_versions, plan.is_empty) == ("disk", 0, False)
        before = engine.statistics().wal.file_bytes
        report = engine.collect_garbage()
        assert report.dropped_pieces == len(plan.dropped) > 5
        assert before - engine.statistics().wal.file_bytes == report.dropped_bytes == plan.droppable_bytes
        engine.rollback_to(72)
        engine.apply(73, PutObject("b", "k1", b"again"))
    with open_local(Path("/engine"), files, settings) as engine:
        expected = [(f"k{key}", max(seq for seq in range(2, 73) if seq % 3 == key)) for key in (0, 2)]
        assert [(item.key, item.seq) for item in engine.list_objects("b") if item.key != "k1"] == expected
        assert engine.read("b", "k1").data == b"again"
        assert engine.read("b", "k0").data == VALUE + b"72"
        assert engine.read("b", "k0", 70).data == VALUE + b"69"
        assert engine.apply(30, PutObject("b", "k0", VALUE + b"30")).status == "applied", "though it is long gone"


def test_files_that_a_rollback_reads_stay() -> None:
    """Although no version points into them: these values are small, and kept in the index."""
    files, settings = FaultyFiles(), msgspec.structs.replace(SMALL, rotate_max_bytes=8 << 10)
    with open_local(Path("/engine"), files, settings) as engine:
        engine.apply(1, CreateBucket("b"))
        engine.apply_many([(seq, PutObject("b", f"k{seq % 3}", b"%d" % seq)) for seq in range(2, 400)])
        engine.update_low_water_mark(200)
        before = engine.digest(200)
        engine.create_checkpoint()
        assert 0 < engine.collect_garbage(horizon=200).dropped_pieces < len(engine.plan_garbage().pieces)
        engine.rollback_to(200)
        assert engine.digest() == before


def test_files_that_a_store_has_are_not_dropped_without_it() -> None:
    """An engine that is opened for looking, without its store, does not take its log for the only copy."""
    node = EngineNode(new_store(), **{**SETTINGS, "local_retention_bytes": 1 << 30}).open()
    overwrite(node, 60)
    node.close()
    with open_local(DIRECTORY, node.files, node.settings) as engine:
        assert engine.collect_garbage(horizon=60).dropped_pieces == 0


# In the store


def test_objects_go_from_the_front() -> None:
    """What is planned is what goes; the store has less, and everything that is kept is read as before."""
    with EngineNode(new_store(), **SETTINGS).open() as node:
        overwrite(node, 90)
        before = node.view.object_keys()
        assert node.engine.collect_garbage().dropped_pieces == 0, "all versions are kept"
        plan = node.engine.plan_garbage(horizon=80)
        assert plan.place == "store"
        assert node.view.object_keys() == before
        report = node.engine.collect_garbage(plan)
        dropped = {use.name for use in plan.dropped}
        assert report.dropped_pieces == len(dropped) > 5
        assert {key.rpartition("/")[2] for key in before} - {
            key.rpartition("/")[2] for key in node.view.object_keys()
        } == dropped
        assert report.dropped_bytes == plan.droppable_bytes
        assert (report.live_bytes, report.dead_bytes) == (
            plan.live_bytes,
            plan.dead_bytes - sum(use.dead_bytes for use in plan.dropped),
        )
        assert node.view.manifest.history_start_seq == 80
        assert node.view.descriptors()[0].start_offset == plan.drop_below_lsn
        assert_kept(node, 80)
        assert node.engine.plan_garbage(horizon=80).is_empty


def test_collection_that_moved_values_counts_them_where_they_are() -> None:
    """Live bytes are those of all values that stay, moved ones too; a piece that waits is dead until it goes."""
    keys = 20
    with EngineNode(new_store(), keep_versions=1, **SETTINGS).open() as node:
        overwrite(node, 2 * keys, keys)
        has_waited = False
        for seq in range(node.engine.applied_seq + 1, node.engine.applied_seq + 400, 40):
            node.apply_these([(seq + n, PutObject("b", f"k{n % 10}", VALUE + b"%d" % n)) for n in range(40)])
            node.ship_all()
            report = node.engine.collect_garbage()
            plan = node.engine.plan_garbage()
            assert (report.live_bytes, report.dead_bytes) == (plan.live_bytes, plan.dead_bytes)
            assert keys * len(VALUE) <= report.live_bytes <= keys * (len(VALUE) + 100)
            has_waited |= bool(report.moved_values) and "drop" in {use.fate for use in plan.pieces}
        assert has_waited
        assert_kept(node)


def test_a_restore_finds_all_that_is_kept() -> None:
    """From the newest state, and from the one before it if that is damaged."""
    store = new_store()
    with EngineNode(store, **SETTINGS).open() as node:
        overwrite(node, 90)
        node.engine.collect_garbage(horizon=88)
        overwrite(node, 20)
        node.engine.collect_garbage(horizon=100)
        assert_kept(node, 100)
    for damaged in (False, True):
        if damaged:
            store.tamper(node.view.manifest.checkpoints[-1].key, b"nonsense")
        with successor(node, f"heir-{damaged}", **SETTINGS) as heir:
            heir.model = copy.deepcopy(node.model)
            report = heir.restore()
            assert bool(report.damaged_states) == damaged
            heir.open()
            assert_kept(heir, 105 if damaged else 100)
            assert heir.engine.digest() == node.model.digest()
            heir.engine.collect_garbage(horizon=105)
            assert_kept(heir, 105)


def test_nothing_goes_before_a_state_is_in_the_store() -> None:
    """Without one a restore replays the log from its beginning."""
    with EngineNode(new_store(), **SETTINGS).open() as node:
        node.apply_these([(1, CreateBucket("b")), *((seq, PutObject("b", "k", VALUE)) for seq in range(2, 60))])
        node.ship_all()
        report = node.engine.collect_garbage(horizon=59)
        assert (report.removed_versions, report.dropped_pieces) == (57, 0)
        assert {use.fate for use in node.engine.plan_garbage().pieces} <= {"replay", "live", "newest"}


def test_an_old_value_that_is_still_seen_holds_the_front() -> None:
    """What is dead behind it is counted for a compaction; a copy of it does the same."""
    with EngineNode(new_store(), **SETTINGS).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "old", VALUE)), (3, PutObject("b", "k", VALUE))])
        node.apply_these([(4, CopyObject("b", "k", "b", "copy"))])
        overwrite(node, 90)
        report = node.engine.collect_garbage(horizon=90)
        assert report.dropped_pieces == 0
        assert report.dead_bytes > 5 * report.live_bytes
        assert {use.fate for use in node.engine.plan_garbage().pieces} >= {"live", "behind"}
        node.apply_these([(100, PutObject("b", "old", b"new")), (101, PutObject("b", "k", b"new"))])
        overwrite(node, 10)
        assert node.engine.collect_garbage(horizon=105).dropped_pieces == 0, "the copy is there"
        assert node.engine.read("b", "copy").data == VALUE
        node.apply_these([(200, PutObject("b", "copy", b"new"))])
        overwrite(node, 10)
        assert node.engine.collect_garbage(horizon=205).dropped_pieces > 5
        assert_kept(node, 205)


def test_the_horizon_stays_at_or_below_what_is_shipped() -> None:
    """States in the store are of the high-water mark: what is above it may be needed to make one."""
    with EngineNode(new_store(), **SETTINGS).open() as node:
        overwrite(node, 20)
        node.apply_these([(seq, PutObject("b", "k0", VALUE)) for seq in range(50, 60)])
        node.engine.update_low_water_mark(59)
        assert node.engine.collect_garbage(horizon=59).history_start_seq == 21


def test_a_state_that_is_read_in_the_store_holds_history() -> None:
    """Whoever pinned it reads what it shows, until the pin is old."""
    clock = ManualClock()
    with EngineNode(new_store(clock), clock=clock, **SETTINGS).open() as node:
        overwrite(node, 20)
        oldest = node.view.manifest.checkpoints[0]
        pinning = Pinning(BucketMetadataStore(node.objects), KEYS, clock, "reader", 3600)
        assert pinning.pin(oldest.key)
        assert node.engine.plan_garbage(horizon=20).horizon_seq == oldest.seq
        assert node.engine.collect_garbage(horizon=20).history_start_seq == oldest.seq
        assert node.view.manifest.history_start_seq == oldest.seq
        pinning.release()
        assert node.engine.collect_garbage(horizon=20).history_start_seq == 20


def test_a_store_that_is_away_changes_nothing() -> None:
    """No version goes before the manifest says so; the next attempt does it."""
    store = new_store()
    with EngineNode(store, **SETTINGS).open() as node:
        overwrite(node, 60)
        rows = node.engine.plan_garbage(horizon=50).versions
        store.fail("*", times=None)
        with pytest.raises(StoreUnavailableError):
            node.engine.collect_garbage(horizon=50)
        store.heal()
        found = node.engine.statistics()
        assert found.garbage is not None
        assert (found.history_start_seq, found.garbage.failed_collections) == (0, 1)
        assert node.engine.plan_garbage(horizon=50).versions == rows
        assert node.engine.collect_garbage(horizon=50).dropped_pieces > 0


def test_who_lost_the_engine_drops_nothing() -> None:
    """The store is the new owner's."""
    store = new_store()
    with EngineNode(store, **SETTINGS).open() as node:
        overwrite(node, 60)
        plan = node.engine.plan_garbage(horizon=50)
        usurp(store)
        before = store.contents().keys()
        with pytest.raises(FencedError):
            node.engine.collect_garbage(plan)
        assert store.contents().keys() == before


def test_replicas_let_go_too() -> None:
    """What the engine's own store dropped is dropped there, and a restore from one finds all that is kept."""
    store, replica = new_store(), new_store()
    with EngineNode(store, replicas=[replica], **SETTINGS).open() as node:
        overwrite(node, 60)
        node.shipping.replicate()
        node.engine.collect_garbage(horizon=60)
        node.shipping.replicate()
        assert [info.key for info in replica.list(KEYS.objects_prefix)] == node.view.object_keys()
        overwrite(node, 20)
        node.engine.collect_garbage(horizon=75)
        late = new_store()
        use_replica(node, late)
        node.shipping.replicate()
        assert [info.key for info in late.list(KEYS.objects_prefix)] == node.view.object_keys()
    with successor(node, "heir", **SETTINGS) as heir:
        heir.model = copy.deepcopy(node.model)
        heir.restore(late)
        heir.objects = late
        heir.open()
        assert_kept(heir, 75)


@pytest.mark.parametrize("seed", range(6))
def test_random_entries_and_horizons(seed: int) -> None:
    """Shipping, states, rollbacks, collections and restores in any order: what is kept is always what it was."""
    chance, store = random.Random(f"garbage {seed}"), new_store()
    settings = {**SETTINGS, "keep_versions": chance.choice((None, 1, 3))}
    node = EngineNode(store, name=f"a{seed}", **settings).open()
    for number in range(10):
        node.apply(chance.randint(5, 40))
        if chance.random() < 0.3:
            node.roll_back(
                chance.randint(max(node.engine.low_water_mark, node.engine.applied_seq - 9), node.engine.applied_seq)
            )
        if chance.random() < 0.8:
            node.engine.update_low_water_mark(chance.randint(node.engine.low_water_mark, node.engine.applied_seq))
            node.engine.ship()
        if chance.random() < 0.5:
            node.engine.create_checkpoint()
        if chance.random() < 0.8:
            node.engine.collect_garbage(horizon=chance.randint(0, node.engine.applied_seq))
        assert_kept(node)
        if chance.random() < 0.3 and node.engine.high_water_mark:
            start = node.engine.statistics().history_start_seq
            node.close()
            heir = successor(node, f"{number}-{seed}", **settings)
            heir.restore()
            node = heir.open()
            assert node.engine.statistics().history_start_seq >= start
            assert_kept(node)
    node.close()


# Crashes


def node_in(world: World, name: str = "a") -> EngineNode:
    """A node of a world."""
    clock = world.clock
    assert isinstance(clock, ManualClock)
    return EngineNode(world.store, name=name, files=world.files(name), clock=clock, ship_concurrency=1, **SETTINGS)


def collected(node: EngineNode) -> Iterator[None]:
    """Two collections, with entries between them."""
    node.engine.collect_garbage(horizon=20)
    yield
    node.engine.apply(100, PutObject("b", "k1", VALUE))
    yield
    node.engine.collect_garbage(horizon=29)


@pytest.mark.deeper
def test_a_collection_that_is_cut_off_anywhere_loses_nothing() -> None:
    """On the same disk and without it: what is kept is there, and the next collection leaves no more than one would."""
    past = World(clock=ManualClock())
    with node_in(past).open() as node:
        overwrite(node, 30)
        model = node.model
    crash_at, died = 1, True
    while died:
        world = past.after_crash("keep", crash_at=crash_at)
        cut = node_in(world)
        try:
            cut.open()
            for _ in collected(cut):
                pass
            cut.close()
        except (Crash, TidelogError):
            if not world.crashed:
                raise
        finally:
            with contextlib.suppress(Crash, TidelogError, OSError):
                cut.crash()
        died = world.crashed
        left = world.after_crash("lose" if crash_at % 2 else "tear", seed=crash_at, torn_bytes=crash_at % 3)
        check_what_is_left(left.lose_disk("a"), model, "b", restores=True)
        check_what_is_left(left, model, "a", restores=False)
        crash_at += every(5)
    assert crash_at > 30


def check_what_is_left(world: World, model: Model, name: str, *, restores: bool) -> None:
    """All that is kept, and another collection."""
    node = node_in(world, name)
    node.model = copy.deepcopy(model)
    if restores:
        node.restore()
    with node.open():
        if node.engine.applied_seq == 100:
            node.model.apply(100, PutObject("b", "k1", VALUE))
        assert_kept(node)
        node.engine.collect_garbage(horizon=29)
        assert_kept(node, 29)
        names = {one.object_id for one in node.view.descriptors()}
        assert {key.rpartition("/")[2] for key in node.view.object_keys()} == names
        overwrite(node, 6)
        assert_kept(node)


def test_it_runs_by_itself_where_something_is_to_go(tmp_path: Path) -> None:
    """With retention set, after the interval."""
    settings = msgspec.structs.replace(SMALL, keep_versions=1, compaction_interval_seconds=0.05)
    with Engine(Core.open(tmp_path, settings, LocalFiles(), SystemClock())) as engine:
        engine.apply_many([(1, CreateBucket("b")), *((seq, PutObject("b", "k", VALUE)) for seq in range(2, 9))])
        engine.update_low_water_mark(8)
        deadline = time.monotonic() + 120
        while len(engine.versions("b", "k")) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [version.seq for version in engine.versions("b", "k")] == [8]


def test_what_went_is_counted(tmp_path: Path) -> None:
    """In the statistics, with what is live and dead of the log."""
    with open_local(tmp_path) as engine:
        engine.apply_many(RandomEntries("counted").entries(200))
        engine.update_low_water_mark(engine.applied_seq)
        engine.create_checkpoint()
        report = engine.collect_garbage(horizon=engine.applied_seq)
        found = engine.statistics().garbage
        assert found is not None
        assert (found.collections, found.versions_removed) == (1, report.removed_versions)
        assert (found.pieces_dropped, found.bytes_dropped) == (report.dropped_pieces, report.dropped_bytes)
        assert (found.live_bytes, found.dead_bytes, found.pins) == (report.live_bytes, report.dead_bytes, 0)
