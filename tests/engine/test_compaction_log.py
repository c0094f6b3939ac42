"""Small shipped objects of an engine become few large ones: the same bytes at every moment, by the owner alone."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import open_local
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store, successor, usurp

from tidelog.clock import ManualClock
from tidelog.cold.rewrite_commit import read_state
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.errors import CorruptionError, FencedError, InputError, StoreUnavailableError, TidelogError
from tidelog.log.binding import BINDING_BYTES
from tidelog.testing import Crash, FaultyStore, World

COLD: dict[str, Any] = {"local_retention_bytes": 0, "cold_cache_bytes": 0, "rotate_max_bytes": 4 << 10}


def shipped(store: FaultyStore, rounds: int = 4, **settings: Any) -> EngineNode:
    """An open engine that has shipped many small objects, and has files of its log on the disk no more."""
    node = EngineNode(store, **{**COLD, **settings}).open()
    for _ in range(rounds):
        node.apply(30)
        node.ship_all()
    node.engine.create_checkpoint()
    node.shipping.purge()
    return node


def assert_contiguous(view: StoreView) -> None:
    """Each object begins where the one before ends, by LSN and by position, and is there."""
    lsn, position = 1, 0
    for one in view.descriptors():
        assert (one.start_offset, one.start_position) == (lsn, position)
        assert view.objects.head(KEYS.object(one.name)).size == one.size
        lsn, position = one.next_offset, position + one.raw_size
    assert (view.manifest.shipped_lsn, view.manifest.shipped_position) == (lsn, position)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_many_small_objects_become_one(codec: str) -> None:
    """All but the newest; positions stay, every state is read as before, from the store alone."""
    with shipped(new_store(), ship_compression=codec) as node:
        before = len(node.view.descriptors())
        report = node.engine.compact()
        assert before > 6
        assert (report.replaced_objects, report.new_objects) == (before - 1, 1)
        assert len(node.view.descriptors()) == 2
        assert_contiguous(node.view)
        node.assert_same(sorted(node.model.states)[::9])
        statistics = node.engine.statistics().compaction
        assert (statistics.runs, statistics.replaced_objects) == (1, before - 1)


def test_the_same_bytes_are_in_the_store() -> None:
    """The new object is the frames of the old ones, one after the other."""

    def frames_of(node: EngineNode) -> bytes:
        found = (node.objects.get(KEYS.object(one.name)).data for one in node.view.descriptors())
        return b"".join(data[BINDING_BYTES:] for data in found)

    with shipped(new_store()) as node:
        before = frames_of(node)
        node.engine.compact()
        assert frames_of(node) == before


def test_no_object_is_larger_than_the_threshold() -> None:
    """Neighbours are put together as long as they fit; what is larger than half of it stays as it is."""
    with shipped(new_store(), 6, compaction_max_bytes=20_000) as node:
        sizes = [one.size for one in node.view.descriptors()]
        node.engine.compact()
        found = node.view.descriptors()
        assert 1 < len(found) < len(sizes)
        assert max(one.size for one in found) <= max(20_000, *sizes)
        assert_contiguous(node.view)
        again = node.engine.compact()
        assert again.replaced_objects <= len(found)
        node.assert_same()


def test_replaced_objects_stay_for_the_time_of_grace() -> None:
    """Who holds an old descriptor reads on; the written plan is carried out afterwards."""
    clock = ManualClock()
    with shipped(new_store(clock), clock=clock) as node:
        old = set(node.view.object_keys())
        report = node.engine.compact(grace_seconds=600)
        assert (report.deleted_objects, report.waiting_objects) == (0, report.replaced_objects)
        assert old < set(node.view.object_keys())
        node.shipping.remove_orphans()
        assert old < set(node.view.object_keys())
        clock.advance(601)
        assert node.engine.compact(grace_seconds=600).deleted_objects == report.replaced_objects
        assert set(node.view.object_keys()) == {KEYS.object(one.name) for one in node.view.descriptors()}
        node.assert_same()


def test_few_replaced_objects_wait_at_a_time_where_room_is_bounded() -> None:
    """The loss: a log that is merged at once is there twice for an hour. The rest is merged when the first went."""
    clock = ManualClock()
    with shipped(new_store(clock), rounds=12, clock=clock) as node:
        compaction, before = node.engine._upkeep.compaction(), len(node.view.descriptors())
        waiting, replaced = list[int](), list[int]()
        for _ in range(40):
            report = compaction.compact(3600, 20_000)
            waiting.append(report.waiting_bytes)
            replaced.append(report.replaced_objects)
            clock.advance(2000)
        assert 0 < max(waiting) <= 20_000
        assert sum(size > 0 for size in replaced) > 3, replaced
        assert replaced[-1] == waiting[-1] == 0, "all of it is merged some time"
        assert len(node.view.descriptors()) < before / 2
        assert_contiguous(node.view)
        node.assert_same(sorted(node.model.states)[::19])


def test_a_reader_that_knows_the_old_objects_finds_the_new_one() -> None:
    """Descriptors were remembered before the compaction, and the objects are gone."""
    with shipped(new_store()) as node:
        node.assert_same(sorted(node.model.states)[::7])
        node.engine.compact(grace_seconds=0)
        assert node.engine.compact(grace_seconds=0).replaced_objects == 0
        node.assert_same(sorted(node.model.states)[::7])


def test_shipping_goes_on() -> None:
    """New objects follow the large one, and are put together with it when there are enough of them."""
    with shipped(new_store()) as node:
        for _ in range(4):
            node.engine.compact(grace_seconds=0)
            node.apply(60)
            node.ship_all()
            assert_contiguous(node.view)
        node.assert_same(sorted(node.model.states)[::11])


def test_an_engine_is_restored_from_large_objects() -> None:
    """With the states, and from the log alone."""
    node = shipped(new_store())
    node.engine.compact(grace_seconds=0)
    node.apply(20)
    node.ship_all()
    node.crash()
    with successor(node) as other:
        other.restore()
        other.open()
        other.assert_same(sorted(other.model.states)[::9])
        other.apply(30)
        other.ship_all()
        other.engine.compact(grace_seconds=0)
        assert_contiguous(other.view)
        other.assert_same()


@pytest.mark.parametrize("nth", range(1, 60, 6))
def test_a_restore_goes_on_while_objects_are_replaced(nth: int) -> None:
    """At any of its requests the engine's owner compacts, and deletes what it replaced at once."""
    store = new_store()
    node = shipped(store)
    for key in node.view.state_keys():
        store.delete([key])  # so that the whole log is replayed
    asked = 0

    def compact(operation: str, key: str) -> None:
        nonlocal asked
        asked += 1
        if asked == nth:
            store.on_request = None
            with contextlib.suppress(FencedError):  # the restore may have claimed the engine before
                node.engine.compact(grace_seconds=0)
            store.on_request = compact

    other = successor(node)
    store.on_request = compact
    other.restore()
    store.on_request = None
    with other.open():
        other.assert_same(sorted(other.model.states)[::9])
    node.crash()


def test_readers_see_the_same_at_every_moment() -> None:
    """Every request of a compaction is a moment at which everything is read."""
    store = new_store()
    with shipped(store) as node:
        seqs = sorted(node.model.states)[::40]

        def look(operation: str, key: str) -> None:
            store.on_request = None
            node.assert_same(seqs)
            store.on_request = look

        store.on_request = look
        node.engine.compact(grace_seconds=0)
        node.engine.compact(grace_seconds=0)
        store.on_request = None
        assert len(node.view.descriptors()) == 2


class TestWhoMayCompact:
    """The owner, and nobody else."""

    def test_who_lost_the_claim_changes_nothing(self) -> None:
        """It is told so, and the store stays as it was."""
        store = new_store()
        node = shipped(store)
        usurp(store)
        contents = store.contents()
        with pytest.raises(FencedError):
            node.engine.compact(grace_seconds=0)
        assert store.contents() == contents
        node.crash()

    @pytest.mark.parametrize("nth", range(1, 60, 3))
    def test_an_owner_that_sleeps_at_any_request_changes_nothing_afterwards(self, nth: int) -> None:
        """Somebody restores the engine and compacts while it sleeps: what is published is the new owner's alone."""
        store = new_store()
        node = shipped(store, ship_concurrency=1)
        asked, heirs, found = 0, list[EngineNode](), list[list[str]]()

        def sleep(operation: str, key: str) -> None:
            nonlocal asked
            asked += 1
            if asked == nth:
                store.on_request = None
                heirs.append(take_over(node))
                found.append(published(heirs[0]))

        store.on_request = sleep
        with contextlib.suppress(TidelogError):
            node.engine.compact(grace_seconds=0)
        store.on_request = None
        heir = heirs[0] if heirs else take_over(node)
        assert not found or published(heir) == found[0]
        assert_contiguous(heir.view)
        heir.assert_same(sorted(heir.model.states)[::17])
        heir.engine.compact(grace_seconds=0)
        heir.assert_same()
        heir.crash()
        node.crash()

    def test_an_engine_without_a_store_has_nothing_to_compact(self, tmp_path: Path) -> None:
        """That is told, with what to do."""
        with open_local(tmp_path / "engine") as engine, pytest.raises(InputError, match="without a store"):
            engine.compact()


def published(node: EngineNode) -> list[str]:
    """Which objects the catalog names."""
    return [one.object_id for one in node.view.descriptors()]


def take_over(node: EngineNode) -> EngineNode:
    """Another node restores the engine, goes on and compacts."""
    heir = successor(node, "heir", **COLD)
    heir.restore()
    heir.open()
    heir.apply(30)
    heir.ship_all()
    heir.engine.compact(grace_seconds=0)
    return heir


def test_a_crash_anywhere_leaves_the_old_objects_or_the_new_one() -> None:
    """Cut at every change of the store: everything is there, and the next owner compacts the rest."""
    past = World(clock=ManualClock())
    node = node_in(past)
    for _ in range(3):
        node.apply(25)
        node.ship_all()
    node.crash()
    crash_at, died = 1, True
    while died:
        world = past.after_crash("keep", crash_at=crash_at)
        dying = node_in(world, opens=False)
        with contextlib.suppress(Crash, TidelogError):
            dying.open()
            dying.engine.compact(grace_seconds=0)
            dying.engine.compact(grace_seconds=0)
        died = world.crashed
        world.crash()
        with contextlib.suppress(Crash, TidelogError, OSError):
            dying.crash()
        with node_in(world.after_crash("lose")) as heir:
            heir.model = copy.deepcopy(node.model)
            heir.assert_same()
            heir.engine.compact(grace_seconds=0)
            heir.engine.compact(grace_seconds=0)
            assert len(heir.view.descriptors()) <= 3
            assert_contiguous(heir.view)
            heir.shipping.remove_orphans()
            assert set(heir.view.object_keys()) == {KEYS.object(one.name) for one in heir.view.descriptors()}
            heir.assert_same()
        crash_at += 2
    assert crash_at > 20


def node_in(world: World, *, opens: bool = True) -> EngineNode:
    """A node of a world."""
    clock = world.clock
    assert isinstance(clock, ManualClock)
    node = EngineNode(world.store, files=world.files("a"), clock=clock, **COLD)
    return node.open() if opens else node


def test_damage_in_an_old_object_is_told_and_nothing_is_replaced() -> None:
    """The object and the byte are named."""
    store = new_store()
    with shipped(store) as node:
        before = published(node)
        key = KEYS.object(node.view.descriptors()[2].name)
        good = store.contents()[key]
        store.tamper(key, good[:50] + bytes([good[50] ^ 1]) + good[51:])
        with pytest.raises(CorruptionError, match="data-"):
            node.engine.compact()
        assert published(node) == before
        store.tamper(key, good)
        node.engine.compact()
        node.assert_same()


def test_a_store_that_is_away_changes_nothing() -> None:
    """It is tried again; entries are applied meanwhile."""
    store = new_store()
    with shipped(store) as node:
        before = published(node)
        store.fail("*", times=None)
        with pytest.raises(StoreUnavailableError):
            node.engine.compact()
        node.apply(10)
        store.heal()
        assert published(node) == before
        assert node.engine.statistics().compaction.failed_runs == 1
        node.engine.compact()
        assert len(published(node)) == 2
        node.assert_same()


class TestInTheBackground:
    """`compaction_enabled`, `compaction_interval_seconds`."""

    def wait_for(self, node: EngineNode, seconds: float) -> int:
        """How many objects there are, when there are few or the time is over."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and len(published(node)) > 2:
            time.sleep(0.02)
        return len(published(node))

    def test_it_runs_by_itself(self) -> None:
        """Every so often."""
        with shipped(new_store(), compaction_interval_seconds=0.05) as node:
            node.engine._upkeep.add_compaction()
            assert self.wait_for(node, 120) == 2
            node.assert_same()

    def test_it_can_be_turned_off(self) -> None:
        """Then only `compact` does it."""
        with shipped(new_store(), compaction_interval_seconds=0.05, compaction_enabled=False) as node:
            node.engine._upkeep.add_compaction()
            assert self.wait_for(node, 0.3) > 2

    def test_closing_gives_up_what_is_being_built(self) -> None:
        """It waits for no object to be complete; nothing is left that stops the next compaction."""
        store = new_store()
        node = shipped(store, compaction_interval_seconds=0.01)
        building, goes_on = threading.Event(), threading.Event()

        def hold(operation: str, key: str) -> None:
            if threading.current_thread().name.startswith("tidelog-store") and operation == "read_range":
                building.set()
                goes_on.wait(120)

        store.on_request = hold
        node.engine._upkeep.add_compaction()
        assert building.wait(120)
        threading.Timer(0.2, goes_on.set).start()
        node.close()
        store.on_request = None
        with node.open():
            state = read_state(node.shipping.owner.owned.catalog)
            assert state.phase == "idle"
            node.engine.compact()
            assert len(published(node)) <= 3


def test_a_lone_read_is_still_one_request_for_exactly_the_value() -> None:
    """The position of the large object is that of the first small one."""
    with EngineNode(new_store(), **COLD).open() as node:
        puts = [(seq, PutObject("b", f"k{seq}", b"%d" % seq * 200)) for seq in range(2, 90)]
        node.apply_these([(1, CreateBucket("b")), *puts])
        node.ship_all()
        node.engine.create_checkpoint()
        node.shipping.purge()
        node.engine.compact(grace_seconds=0)
        node.engine.compact(grace_seconds=0)
        before = node.shipping.reader.statistics()
        for seq in (2, 60, 17):
            assert node.engine.read("b", f"k{seq}").data == b"%d" % seq * 200
        after = node.shipping.reader.statistics()
        assert after.requests - before.requests == 3 + 1  # and the header of the object, once
        assert after.bytes_fetched - before.bytes_fetched < 3 * 700
