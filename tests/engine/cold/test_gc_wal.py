"""Dropping the log that a compaction made unnecessary: by an owner, by somebody else, by both, cut off anywhere.

What is promised: every state from the start of history on is read as it was, by the engine that runs and by one that is
restored, whoever drops, compacts, restores or takes over between any two requests.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.campaign import every
from tests.engine.compacting import BuiltCompaction, build_by_hand, compact_by_hand, publish_by_hand
from tests.engine.stations import KEYS, EngineNode, new_store, successor, usurp

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.engine.cold.gc import DroppedLog, drop_wal, droppable_below_lsn, whole_objects_below
from tidelog.engine.cold.manifest import Pinning
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.errors import ConflictError, FencedError, TidelogError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import Crash, FaultyStore, World

SETTINGS: dict[str, Any] = {"local_retention_bytes": 0, "rotate_max_bytes": 4 << 10, "cold_cache_bytes": 0}
ALL = 1 << 60


def prepared(store: FaultyStore | None = None, **settings: Any) -> EngineNode:
    """An engine whose log is in the store in several objects, nearly all of it compacted; nothing is dropped yet."""
    node = EngineNode(store or new_store(), **{**SETTINGS, **settings}).open()
    node.apply_these(
        [(1, CreateBucket("b")), *((seq, PutObject("b", f"k{seq % 9}", b"%d" % seq * 300)) for seq in range(2, 30))]
    )
    node.ship_all()
    compact_by_hand(node.objects)
    node.apply_these([(seq, PutObject("b", f"n{seq}", b"%d" % seq * 300)) for seq in range(30, 34)])
    node.ship_all()
    return node


def drop(store: FaultyStore, below_lsn: int = ALL) -> DroppedLog:
    """As somebody does who does not own the engine."""
    return drop_wal(store, BucketMetadataStore(store), KEYS, below_lsn)


def store_of(node: EngineNode) -> FaultyStore:
    """The store in memory that a node has."""
    assert isinstance(node.objects, FaultyStore)
    return node.objects


def at_request(store: FaultyStore, nth: int, action: Callable[[], object], about: str = "") -> list[int]:
    """Something happens in front of a request about something, whichever it is; the list counts the requests."""
    count = [0]

    def look(operation: str, key: str) -> None:
        count[0] += about in key
        if count[0] == nth and about in key:
            store.on_request = None
            action()
            store.on_request = look

    store.on_request = look
    return count


def in_front_of_every_request(
    run: Callable[[EngineNode], object], action: Callable[[EngineNode], object], step: int = 1, about: str = ""
) -> Iterator[EngineNode]:
    """Engines on which `run` was done, and `action` in front of one of its requests, each time another."""
    nth = 1
    while True:
        node = prepared()
        count = at_request(store_of(node), nth, partial(action, node), about)
        run(node)
        store_of(node).on_request = None
        yield node
        node.close()
        if count[0] < nth:
            return
        nth += every(step)


def collected(node: EngineNode) -> int:
    """What an owner drops that may have lost its claim."""
    try:
        return node.engine.collect_garbage().dropped_pieces
    except (FencedError, ConflictError):
        return 0


def assert_whole(node: EngineNode) -> None:
    """The engine reads everything, the catalog and the objects go together, and so does a restore."""
    node.assert_same([1, 9, 17, 29])
    descriptors = node.view.descriptors()
    assert set(node.view.object_keys()) == {KEYS.object(one.name) for one in descriptors}
    start = Catalog(node.view.metadata, KEYS).start_offset()
    assert descriptors[0].start_offset == start
    with successor(node, "heir", **SETTINGS) as heir:
        heir.restore()
        heir.open()
        heir.assert_same([1, 9, 17, 29])


def test_an_owner_drops_what_is_compacted() -> None:
    """Although versions point into it: their values are in compacted data too. What is not compacted stays."""
    with prepared() as node:
        plan = node.engine.plan_garbage()
        compacted = node.view.manifest.compacted
        assert compacted is not None
        assert {use.fate for use in plan.pieces if use.next_lsn <= compacted.lsn} == {"drop"}
        assert "drop" not in {use.fate for use in plan.pieces if use.next_lsn > compacted.lsn}
        report = node.engine.collect_garbage(plan)
        assert report.dropped_pieces == len(plan.dropped) > 2
        assert (report.removed_versions, report.history_start_seq) == (0, 0)
        node.apply_these([(40, PutObject("b", "more", b"m" * 900))])
        node.ship_all()
        assert_whole(node)


def test_somebody_else_drops_the_same() -> None:
    """As much as an owner does, and no more than was asked for."""
    with prepared() as node:
        limit = droppable_below_lsn(node.view.manifest)
        first = node.view.descriptors()[0]
        some = drop(store_of(node), first.next_offset)
        assert (some.objects, some.bytes, some.start_lsn) == (1, first.size, first.next_offset)
        rest = drop(store_of(node))
        assert rest.objects > 2
        assert rest.start_lsn <= limit < node.view.descriptors()[0].next_offset
        assert drop(store_of(node)).objects == 0
        assert_whole(node)


def test_nothing_is_dropped_where_nothing_may() -> None:
    """Without an engine, without a compaction, and below a state that somebody reads."""
    assert drop(new_store()).start_lsn == 0
    clock = ManualClock()
    with EngineNode(new_store(clock), clock=clock, **SETTINGS).open() as node:
        node.apply(30)
        node.ship_all()
        node.engine.create_checkpoint()
        assert drop(store_of(node)).objects == 0
        oldest = node.view.manifest.checkpoints[0]
        assert Pinning(BucketMetadataStore(node.objects), KEYS, clock, "reader", 3600).pin(oldest.key)
        for _ in range(3):
            node.apply(20)
            node.ship_all()
            node.engine.create_checkpoint()
        compact_by_hand(node.objects)
        assert drop(store_of(node)).start_lsn <= oldest.lsn
        assert node.engine.collect_garbage().dropped_pieces == 0
        clock.advance(7200)
        node.apply(20)
        node.ship_all()
        node.engine.create_checkpoint()
        assert drop(store_of(node)).start_lsn > oldest.lsn
        node.assert_same(sorted(node.model.states)[::20])


@pytest.mark.deeper
@pytest.mark.parametrize(("step", "about"), [(9, ""), (1, "main/start"), (5, "segments/")])
def test_an_owner_drops_while_somebody_else_does(step: int, about: str) -> None:
    """In front of any request of the other one."""

    def collect(node: EngineNode) -> object:
        return node.engine.collect_garbage()

    for node in in_front_of_every_request(lambda one: drop(store_of(one)), collect, step, about):
        assert_whole(node)


@pytest.mark.deeper
@pytest.mark.parametrize(("step", "about"), [(11, ""), (1, "main/start"), (7, "segments/")])
def test_somebody_else_drops_while_an_owner_does(step: int, about: str) -> None:
    """In front of any request of the owner."""

    def collect(node: EngineNode) -> object:
        return node.engine.collect_garbage()

    for node in in_front_of_every_request(collect, lambda one: drop(store_of(one)), step, about):
        assert_whole(node)


@pytest.mark.deeper
def test_the_start_of_the_log_never_goes_back() -> None:
    """Somebody wants to drop little, and an owner has dropped more meanwhile."""

    def drop_one(node: EngineNode) -> object:
        return drop(store_of(node), 20)

    for node in in_front_of_every_request(drop_one, lambda one: one.engine.collect_garbage(), 1, "main/start"):
        first = node.view.descriptors()[0].start_offset
        assert Catalog(node.view.metadata, KEYS).start_offset() == first
        assert_whole(node)


def test_the_newest_object_stays_although_all_of_it_is_compacted() -> None:
    """The log goes on behind it: without it nobody would know at which position."""
    node = prepared()
    compact_by_hand(node.objects)
    manifest = node.view.manifest
    assert droppable_below_lsn(manifest) <= manifest.shipped_lsn
    assert whole_objects_below(Catalog(node.view.metadata, KEYS), ALL) == node.view.descriptors()[:-1]
    node.engine.create_checkpoint()
    for _ in range(2):
        node.ship_all()
        node.engine.create_checkpoint()
        compact_by_hand(node.objects)
        node.engine.collect_garbage()
        drop(store_of(node))
        assert len(node.view.object_keys()) >= 1
        node.close()
        heir = successor(node, node.name + "x", **SETTINGS)
        assert heir.restore().next_position == node.view.manifest.shipped_position
        node = heir.open()
        node.apply_these([(node.engine.applied_seq + 1, PutObject("b", "more", b"m" * 400))])
        node.ship_all()
        node.assert_same([1, 9, 17, 29])
    node.close()


@pytest.mark.deeper
def test_an_owner_ships_and_compacts_small_objects_while_somebody_drops() -> None:
    """In front of any request, an object is published, small ones become a large one, and a state is written."""

    def work(node: EngineNode) -> None:
        node.apply_these([(50, PutObject("b", "new", b"w" * 700))])
        node.ship_all()
        node.engine.compact()
        node.engine.create_checkpoint()

    for node in in_front_of_every_request(lambda one: drop(store_of(one)), work, step=5):
        node.assert_same([1, 9, 17, 29])
        drop(store_of(node))
        node.engine.compact(grace_seconds=0)
        node.assert_same([1, 9, 17, 29])


@pytest.mark.deeper
def test_a_new_owner_while_somebody_drops() -> None:
    """In front of any request; the old owner changes nothing any more, and the new one has everything."""

    for node in in_front_of_every_request(lambda one: drop(store_of(one)), lambda one: usurp(store_of(one)), step=11):
        if node.view.manifest.epoch == 1:
            usurp(store_of(node))
        assert collected(node) == 0
        with successor(node, "heir", **SETTINGS) as heir:
            heir.restore()
            heir.open()
            heir.assert_same([1, 9, 17, 29])
            assert heir.engine.collect_garbage().dropped_pieces >= 0
            heir.assert_same([1, 9, 17, 29])


@pytest.mark.deeper
def test_an_owner_that_slept_deletes_nothing_that_is_needed() -> None:
    """It wakes up in the middle of its collection, in front of any request, and is told or does what is right."""

    def take_over(node: EngineNode) -> None:
        usurp(store_of(node))
        drop(store_of(node))

    for node in in_front_of_every_request(collected, take_over, step=11):
        with successor(node, "heir", **SETTINGS) as heir:
            heir.restore()
            heir.open()
            heir.assert_same([1, 9, 17, 29])


@pytest.mark.deeper
def test_a_compaction_that_is_published_and_a_log_that_goes_while_somebody_restores() -> None:
    """In front of any request of the restore: it ends with the same engine, or says that it has to be run again."""
    nth = 1
    while True:
        node = EngineNode(new_store(), **SETTINGS).open()
        node.apply(30)
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(30)
        node.ship_all()

        def publish_and_drop(one: EngineNode = node) -> None:
            compact_by_hand(one.objects)
            drop(store_of(one))

        heir = successor(node, "heir", **SETTINGS)
        count = at_request(store_of(node), nth, publish_and_drop)
        heir.restore()
        store_of(node).on_request = None
        heir.open()
        heir.assert_same(sorted(heir.model.states)[::10])
        heir.close()
        node.crash()
        if count[0] < nth:
            break
        nth += every(11)
    assert nth > 20


@pytest.mark.deeper
def test_a_log_that_goes_while_somebody_restores_without_a_state() -> None:
    """There is none to be pinned: it is done, or told that it has to be run again, and then it is done."""
    told = 0
    for nth in range(1, 200, every(9)):
        node = EngineNode(new_store(), **SETTINGS).open()
        node.apply(30)
        node.ship_all()

        def publish_and_drop(one: EngineNode = node) -> None:
            compact_by_hand(one.objects)
            drop(store_of(one))

        heir = successor(node, "heir", **SETTINGS)
        count = at_request(store_of(node), nth, publish_and_drop)
        try:
            heir.restore()
        except ConflictError:
            told += 1
            heir.restore()
        store_of(node).on_request = None
        with heir.open():
            heir.assert_same(sorted(heir.model.states)[::10])
        node.crash()
        if count[0] < nth:
            break
    assert told > 0


@pytest.mark.deeper
def test_a_compaction_that_is_published_and_a_log_that_goes_while_somebody_reads() -> None:
    """In front of any request of a digest with all values: every one of them is what it was."""
    nth = 1
    while True:
        first = EngineNode(new_store(), **SETTINGS).open()
        first.apply(90)
        first.ship_all()
        first.close()
        node = successor(first, **SETTINGS)
        node.restore()
        node.open()
        built = build_by_hand(node.objects)

        def publish_and_drop(one: EngineNode = node, files: BuiltCompaction = built) -> None:
            publish_by_hand(one.objects, files)
            drop(store_of(one))

        count = at_request(store_of(node), nth, publish_and_drop)
        node.assert_same()
        store_of(node).on_request = None
        node.close()
        if count[0] < nth:
            break
        nth += every(3)
    assert nth > 5


@pytest.mark.deeper
@pytest.mark.parametrize("by_owner", [False, True])
def test_another_compaction_while_somebody_drops(by_owner: bool) -> None:
    """In front of any request: what is dropped is what one of the two allows, and every value is in the newer one."""

    def compact_again(node: EngineNode) -> None:
        compact_by_hand(node.objects)

    def run(node: EngineNode) -> object:
        return node.engine.collect_garbage() if by_owner else drop(store_of(node))

    for node in in_front_of_every_request(run, compact_again, step=9):
        assert node.view.manifest.generation in (1, 2)
        assert_whole(node)


@pytest.mark.deeper
def test_a_restore_from_a_state_whose_compaction_is_replaced_and_whose_log_goes() -> None:
    """It has pinned its state: that stays, with its files and the log behind it, whatever is listed meanwhile."""
    nth = 1
    while True:
        node = prepared()
        done: list[int] = []

        def live_on(one: EngineNode = node, seen: list[int] = done) -> None:
            for seq in (60, 61, 62):
                one.engine.apply(seq, PutObject("b", f"l{seq}", b"l" * 900))
                one.ship_all()
                compact_by_hand(one.objects)
                one.engine.create_checkpoint()
                one.engine.collect_garbage()
                drop(store_of(one))
            seen.append(one.engine.applied_seq)

        heir = successor(node, "heir", **SETTINGS)
        count = at_request(store_of(node), nth, lambda act=live_on: suppressed(act))  # type: ignore[misc]
        heir.restore()
        store_of(node).on_request = None
        for seq in (60, 61, 62) if done else ():
            heir.model.apply(seq, PutObject("b", f"l{seq}", b"l" * 900))
        with heir.open():
            heir.model.roll_back(heir.engine.applied_seq)
            heir.assert_same([1, 9, 17, 29])
        node.crash()
        if count[0] < nth:
            break
        nth += every(9)
    assert nth > 20


def suppressed(action: Callable[[], object]) -> None:
    """Done as far as the claim reaches."""
    with contextlib.suppress(FencedError):
        action()


def test_times_that_were_learned_before_the_log_was_dropped_count_on() -> None:
    """Versions go by age although the records that tell it are gone."""
    clock = ManualClock()
    with EngineNode(new_store(clock), clock=clock, keep_seconds=3600, **SETTINGS).open() as node:
        node.apply_these([(1, CreateBucket("b"))])
        for seq in range(2, 12):
            clock.advance(600)
            node.apply_these([(seq, PutObject("b", "k", b"%d" % seq * 500))])
            node.ship_all()
            node.engine.create_checkpoint()
            compact_by_hand(node.objects, clock=clock)
            node.engine.collect_garbage()
        assert node.view.descriptors()[0].start_offset > 5
        assert node.engine.statistics().history_start_seq == 5


@pytest.mark.deeper
@pytest.mark.parametrize("by_owner", [False, True])
def test_cut_off_anywhere_and_done_again(by_owner: bool) -> None:
    """At every change of the store: what is left is whole, and the next one finishes it."""
    past = World(clock=ManualClock())
    node = prepared(past.store, files=past.files("a"), clock=past.clock)
    model = node.model
    node.close()
    crash_at = 1
    while True:
        world = past.after_crash("keep", crash_at=crash_at)
        died = cut_off(world, by_owner=by_owner)
        left = world.after_crash("keep" if crash_at % 2 else "lose")
        with EngineNode(left.store, files=left.files("a"), clock=left.clock, **SETTINGS).open() as again:  # type: ignore[arg-type]
            again.model = copy.deepcopy(model)
            again.assert_same([1, 9, 17, 29])
            again.engine.collect_garbage() if crash_at % 2 else drop(left.store)
            assert_whole(again)
        if not died:
            return
        crash_at += every(7)


def cut_off(world: World, *, by_owner: bool) -> bool:
    """Drops until it dies; whether it did."""
    node = EngineNode(world.store, files=world.files("a"), clock=world.clock, **SETTINGS)  # type: ignore[arg-type]
    try:
        if by_owner:
            node.open()
            node.engine.collect_garbage()
        else:
            drop(world.store)
    except (Crash, TidelogError):
        if not world.crashed:
            raise
    finally:
        if by_owner:
            with contextlib.suppress(Crash, TidelogError, OSError, AssertionError):
                node.crash()
    return world.crashed
