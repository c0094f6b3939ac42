"""Replicas of an engine with compacted data: any of them alone has everything at every moment, and nothing more."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from tests.campaign import every
from tests.engine.compacting import checkpoint_by_hand, compact_by_hand
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store, successor, use_replica

from tidelog.engine.cold.gc import drop_wal
from tidelog.engine.cold.manifest import Pinning
from tidelog.engine.entry import CopyObject, CreateBucket, PutObject
from tidelog.errors import CorruptionError, RetryError, StoreUnavailableError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyStore

SETTINGS: dict[str, Any] = {"local_retention_bytes": 0, "rotate_max_bytes": 4 << 10}


def replicated(mode: str = "async", **settings: Any) -> tuple[EngineNode, FaultyStore]:
    """An open engine whose log is shipped, with a replica that has all of it."""
    replica = new_store()
    node = EngineNode(new_store(), replicas=[replica], replication_mode=mode, **{**SETTINGS, **settings}).open()
    fill(node, 30)
    node.shipping.replicate()
    return node, replica


def fill(node: EngineNode, count: int) -> None:
    """Large and small values, shipped."""
    first = node.engine.applied_seq + 1
    if first == 1:
        node.apply_these([(1, CreateBucket("b"))])
        first = 2
    for seq in range(first, first + count):
        node.apply_these([(seq, PutObject("b", f"k{seq % 8}", b"%d" % seq * (900 if seq % 5 == 0 else 100)))])
    node.apply_these([(first + count, CopyObject("b", "k0", "b", f"copy-{first}"))])
    node.ship_all()


def drop(store: FaultyStore) -> int:
    """Drops what of the log is compacted; how many objects."""
    return drop_wal(store, BucketMetadataStore(store), KEYS, 1 << 60).objects


def store_of(node: EngineNode) -> FaultyStore:
    """The store in memory that a node has."""
    assert isinstance(node.objects, FaultyStore)
    return node.objects


def files_of(store: FaultyStore) -> dict[str, bytes]:
    """Everything that an engine has in a store, documents apart."""
    return {key: data for key, data in store.contents().items() if key.startswith("storage/engine/")}


def copied(store: FaultyStore) -> FaultyStore:
    """The same content in another store."""
    other = new_store()
    for key, data in store.contents().items():
        other.put(key, data)
    return other


def assert_restores(node: EngineNode, store: FaultyStore) -> None:
    """A store alone has every state up to its high-water mark, and every value."""
    other = EngineNode(store, name="heir", **SETTINGS)
    other.model = successor(node).model
    other.restore()
    with other.open():
        other.model.roll_back(other.engine.applied_seq)
        states = sorted(seq for seq in other.model.states if seq >= other.engine.statistics().history_start_seq)
        other.assert_same(states[:: 1 + len(states) // 6])


def test_a_replica_restores_the_engine_after_the_log_was_dropped() -> None:
    """What is compacted is there, the log is not; the engine's own store is gone."""
    node, replica = replicated()
    compact_by_hand(node.objects)
    assert drop(store_of(node)) > 3
    node.shipping.replicate()
    assert files_of(replica) == files_of(store_of(node))
    fill(node, 5)
    node.shipping.replicate()
    node.crash()
    assert_restores(node, copied(replica))


def test_a_replica_that_comes_late_gets_what_is_left() -> None:
    """Compacted data, and the log from its beginning on."""
    node, _ = replicated()
    compact_by_hand(node.objects)
    drop(store_of(node))
    fill(node, 5)
    late = new_store()
    use_replica(node, late)
    node.shipping.replicate()
    assert files_of(late) == files_of(store_of(node))
    node.crash()
    assert_restores(node, late)


def test_what_no_compaction_and_no_state_needs_any_more_goes() -> None:
    """Files of earlier generations, data files that nobody points to, files of states; also after a restart."""
    node, replica = replicated(keep_versions=1)
    compact_by_hand(node.objects)
    node.shipping.replicate()
    for _ in range(3):
        fill(node, 12)
        checkpoint_by_hand(node.objects)
        fill(node, 12)
        node.engine.collect_garbage()
        compact_by_hand(node.objects)
        drop(store_of(node))
        node.shipping.replicate()
    manifest = node.view.manifest
    generations = {
        name.generation for key in files_of(replica) if (name := KEYS.parse_compacted(key)) and name.kind == "root"
    }
    assert generations == {manifest.generation}
    store = store_of(node)
    assert set(files_of(replica)) < set(files_of(store)), "nobody has collected in the engine's own store"
    node.close()
    extra = [key for key in files_of(store) if key not in files_of(replica) and not key.endswith(".tckp")]
    for key in extra:
        replica.put(key, store.contents()[key])
    with node.open():
        node.shipping.replicate()
        assert not set(extra) & set(files_of(replica))
        node.crash()
    assert_restores(node, copied(replica))


def test_a_replica_never_tells_of_what_it_has_not() -> None:
    """Cut off at any request, everything that its manifest tells of can be restored from it, with all values."""
    node, replica = replicated()
    compact_by_hand(node.objects)
    drop(store_of(node))
    for nth in range(1, 80, 2):
        replica.fail("*", nth=nth, times=None)
        try:
            node.shipping.replicate()
        except StoreUnavailableError:
            replica.heal()
        else:
            break
        assert_restores(node, copied(replica))
    replica.heal()
    node.shipping.replicate()
    assert files_of(replica) == files_of(store_of(node))
    node.close()


@pytest.mark.parametrize("place", ["blobs", "data", "index/versions", "index/values", "index/root", "checkpoints/part"])
def test_damage_is_not_copied(place: str) -> None:
    """A file that went bad is told by its name, and the replica stays at what is good."""
    node, replica = replicated()
    compact_by_hand(node.objects)
    fill(node, 3)
    checkpoint_by_hand(node.objects)
    store = store_of(node)
    key = next(key for key in files_of(store) if key.startswith(f"storage/engine/main/{place}"))
    good = store.contents()[key]
    store.tamper(key, good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with pytest.raises(CorruptionError) as failed:
        node.shipping.replicate()
    assert str(failed.value.path) == key
    assert key not in replica.contents()
    assert StoreView(replica).manifest.generation == 0
    store.tamper(key, good)
    node.shipping.replicate()
    assert files_of(replica) == files_of(store)
    node.close()


def test_a_manifest_from_before_a_compaction_is_not_copied_once_the_log_was_dropped() -> None:
    """Nor onto a replica that knows of the compaction already: values would be nowhere."""
    node, replica = replicated()
    old = node.view.manifest
    compact_by_hand(node.objects)
    drop(store_of(node))
    with pytest.raises(RetryError, match="cleaned up meanwhile"):
        node.shipping._bring_replicas(old)
    assert len([key for key in files_of(replica) if KEYS.parse_object(key)]) > 5
    node.shipping.replicate()
    with pytest.raises(RetryError, match="cleaned up meanwhile"):
        node.shipping._bring_replicas(old)
    assert StoreView(replica).manifest.generation == 1
    node.close()


def test_with_sync_a_compaction_goes_to_the_replica_with_the_next_mark() -> None:
    """The engine reads the manifest before it moves its mark: what others published is copied first."""
    node, replica = replicated("sync")
    compact_by_hand(node.objects)
    drop(store_of(node))
    fill(node, 4)
    assert StoreView(replica).manifest.high_water_mark == node.engine.applied_seq
    assert StoreView(replica).manifest.generation == 1
    node.crash()
    assert_restores(node, copied(replica))


def test_a_file_that_went_while_it_was_copied() -> None:
    """Another compaction was published and the old one collected: the next attempt copies that."""
    node, replica = replicated()
    compact_by_hand(node.objects)
    store = store_of(node)
    done: list[str] = []

    def replace(operation: str, key: str) -> None:
        if operation == "read_range" and "/index/values-" in key and not done:
            done.append(key)
            fill(node, 4)
            compact_by_hand(store)
            store.delete([name for name in files_of(store) if "-0000000001-" in name and "/index/" in name])

    store.on_request = replace
    with pytest.raises(RetryError, match="was deleted before it was copied"):
        node.shipping.replicate()
    store.on_request = None
    node.shipping.replicate()
    assert StoreView(replica).manifest.generation == 2
    node.crash()
    assert_restores(node, copied(replica))


@pytest.mark.deeper
def test_a_restore_from_a_replica_while_the_engine_lives_on() -> None:
    """In front of any of its requests: the engine compacts, drops, writes states and replicates; a pin holds it all."""
    nth = 1
    while True:
        node, replica = replicated()
        compact_by_hand(node.objects)
        fill(node, 4)
        node.shipping.replicate()
        heir = EngineNode(replica, name="heir", clock=node.clock, **SETTINGS)
        count = [0]

        def live_on(operation: str, key: str, one: EngineNode = node, seen: list[int] = count, at: int = nth) -> None:
            seen[0] += 1
            if seen[0] == at:
                for _ in range(3):
                    fill(one, 3)
                    compact_by_hand(one.objects)
                    one.shipping.write_state()
                    drop(store_of(one))
                    with contextlib.suppress(RetryError):
                        one.shipping.replicate()

        replica.on_request = live_on
        heir.restore()
        replica.on_request = None
        heir.model = copy.deepcopy(node.model)
        with heir.open():
            heir.model.roll_back(heir.engine.applied_seq)
            heir.assert_same([5, 20, 30])
        node.close()
        if count[0] < nth:
            break
        nth += every(9)
    assert nth > 20


def test_what_a_pin_held_back_goes_when_it_is_over() -> None:
    """The next time that the replica is brought up to date."""
    node, replica = replicated()
    node.engine.create_checkpoint()
    node.shipping.replicate()
    pinned = StoreView(replica).manifest.checkpoints[0]
    pinning = Pinning(BucketMetadataStore(replica), KEYS, node.clock, "reader", 3600)
    assert pinning.pin(pinned.key)
    before = set(files_of(replica))
    for _ in range(3):
        fill(node, 3)
        node.shipping.write_state()
    compact_by_hand(node.objects)
    drop(store_of(node))
    node.shipping.replicate()
    assert before <= set(files_of(replica))
    assert [pin.name for pin in StoreView(replica).manifest.pins] == ["reader"]
    node.clock.advance(7200)
    node.shipping.replicate()
    assert set(files_of(replica)) <= set(files_of(store_of(node)))
    assert pinned.key not in replica.contents()
    node.close()
