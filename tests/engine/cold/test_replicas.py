"""Replicas: further stores from which an engine can be restored, and that mend what the first one lost."""

from __future__ import annotations

import pytest
from tests.engine.stations import EngineNode, StoreView, new_store, successor

from tidelog.errors import CorruptionError, RetryError, StoreUnavailableError
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyStore


def replicated(mode: str = "async", replicas: int = 2) -> tuple[EngineNode, list[FaultyStore]]:
    """An open engine with replicas that are empty."""
    stores = [new_store() for _ in range(replicas)]
    return EngineNode(new_store(), replicas=stores, replication_mode=mode).open(), stores


def test_any_replica_alone_restores_the_engine() -> None:
    """The engine's own store and the other replica are gone."""
    node, stores = replicated()
    node.apply(80)
    node.ship_all()
    node.engine.create_checkpoint()
    node.apply(80)
    node.ship_all()
    node.shipping.replicate()
    node.crash()
    for store in stores:
        other = successor(node)
        other.objects = store
        other.replicas = ()
        report = other.restore()
        assert report.state_seq > 0
        with other.open():
            other.assert_same(sorted(other.model.states)[::15])
            other.apply(30)
            assert other.ship_all() == other.engine.applied_seq
            other.assert_same()


def test_a_replica_catches_up_after_it_was_away() -> None:
    """What was shipped meanwhile is copied, once, and nothing else."""
    node, (first, second) = replicated()
    node.apply(50)
    node.ship_all()
    node.shipping.replicate()
    first.fail("*", times=None)
    for _ in range(3):
        node.apply(50)
        node.ship_all()
        with pytest.raises(StoreUnavailableError):
            node.shipping.replicate()
    behind, there = node.shipping.statistics().replicas
    assert behind.lag_bytes > 0
    assert behind.errors_in_a_row == 3
    assert (there.lag_bytes, there.errors_in_a_row) == (0, 0)
    first.heal()
    first.reset_traffic()
    node.shipping.replicate()
    assert node.shipping.statistics().replicas[0].lag_bytes == 0
    assert objects_of(first) == objects_of(second) == objects_of(node.objects)
    assert StoreView(first).manifest.high_water_mark == node.engine.high_water_mark
    node.close()


def test_async_replicas_hold_up_nothing() -> None:
    """The high-water mark moves while they are away."""
    node, (first, _) = replicated()
    first.fail("*", times=None)
    node.apply(50)
    assert node.ship_all() == node.engine.applied_seq == node.engine.truncation_mark
    node.close()


def test_with_sync_the_high_water_mark_waits_for_all() -> None:
    """A replica that is away keeps the mark where it is, and the orchestrator its log."""
    node, (first, second) = replicated("sync")
    node.apply(50)
    mark = node.ship_all()
    assert StoreView(first).manifest.high_water_mark == StoreView(second).manifest.high_water_mark == mark
    second.fail("*", times=None)
    node.apply(50)
    node.engine.update_low_water_mark(node.engine.applied_seq)
    with pytest.raises(StoreUnavailableError):
        node.engine.ship()
    assert node.engine.high_water_mark == node.engine.truncation_mark == mark
    assert node.view.manifest.high_water_mark == mark
    second.heal()
    assert node.engine.ship() == node.engine.applied_seq
    assert StoreView(second).manifest.high_water_mark == node.engine.applied_seq
    node.close()


def test_a_replica_never_tells_of_what_it_has_not() -> None:
    """Cut off at any request, what its manifest says can be restored from it."""
    node, (replica,) = replicated(replicas=1)
    node.apply(40)
    node.ship_all()
    node.engine.create_checkpoint()
    for nth in range(1, 60, 3):
        replica.fail("*", nth=nth, times=None)
        try:
            node.shipping.replicate()
        except StoreUnavailableError:
            replica.heal()
        else:
            break
        if any(key.endswith("/manifest") for key in replica.contents()):
            other = successor(node)
            other.objects = copied(replica)
            other.replicas = ()
            other.restore()
            with other.open():
                assert other.engine.applied_seq == StoreView(replica).manifest.high_water_mark
    replica.heal()
    node.shipping.replicate()
    assert objects_of(replica) == objects_of(node.objects)
    node.close()


def test_damage_is_not_copied() -> None:
    """An object that went bad in the store is told, and a replica stays at what is good."""
    node, (replica,) = replicated(replicas=1)
    node.apply(60)
    node.ship_all()
    store, key = node.objects, node.view.object_keys()[0]
    assert isinstance(store, FaultyStore)
    good = store.contents()[key]
    store.tamper(key, good[:50] + bytes([good[50] ^ 1]) + good[51:])
    with pytest.raises(CorruptionError, match="data-1-"):
        node.shipping.replicate()
    assert key not in replica.contents()
    store.tamper(key, good)
    node.shipping.replicate()
    assert objects_of(replica) == objects_of(store)
    node.close()


def test_a_replica_that_somebody_went_on_with_is_left_alone() -> None:
    """It is the store of another engine then; the first engine goes on without it."""
    node, (replica,) = replicated(replicas=1)
    node.apply(40)
    node.ship_all()
    node.shipping.replicate()
    other = successor(node)
    other.objects = replica
    other.replicas = ()
    other.restore()
    with other.open():
        other.apply(20)
        other.ship_all()
        before = replica.contents()
        node.apply(20)
        node.ship_all()
        with pytest.raises(RetryError, match="went on with the replica"):
            node.shipping.replicate()
        assert replica.contents() == before
        assert not node.shipping.statistics().is_fenced
        other.assert_same()
    node.close()


def test_old_states_leave_replicas_too() -> None:
    """A replica has the states that the manifest lists, and no others."""
    node, (replica,) = replicated(replicas=1)
    for _ in range(4):
        node.apply(20)
        node.ship_all()
        node.shipping.write_state()
        node.shipping.replicate()
    assert StoreView(replica).state_keys() == node.view.state_keys()
    node.close()


def test_values_are_read_from_a_replica_when_the_store_lost_them() -> None:
    """An engine with replicas reads on."""
    node, _ = replicated()
    node.apply(60)
    node.ship_all()
    node.shipping.replicate()
    node.crash()
    other = successor(node)
    other.restore()
    with other.open():
        other.objects.delete(node.view.object_keys())
        other.assert_same()


def flipped(store: ObjectStore, key: str) -> None:
    """One bit of an object is another one."""
    assert isinstance(store, FaultyStore)
    data = store.contents()[key]
    middle = len(data) // 2
    store.tamper(key, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


@pytest.mark.parametrize("loses_states", [True, False])
def test_a_restore_goes_on_with_a_replica_where_the_store_is_damaged(loses_states: bool) -> None:
    """Flipped bits and lost objects of the log, and of states; the first replica is behind, and damaged elsewhere."""
    node, (behind, good) = replicated()
    node.apply(60)
    node.ship_all()
    node.shipping.replicate()
    behind.fail("*", times=None)
    for _ in range(3):
        node.apply(40)
        node.ship_all()
        node.engine.create_checkpoint()
    with pytest.raises(StoreUnavailableError):
        node.shipping.replicate()
    behind.heal()
    objects, states = node.view.object_keys(), node.view.state_keys()
    node.crash()
    assert len(objects) > 4
    for key in objects[::2]:
        flipped(node.objects, key)
    node.objects.delete([objects[1]])
    flipped(behind, objects[0])
    for key in states:
        flipped(node.objects, key)
        if loses_states:
            good.delete([key])
    mark = node.view.manifest.high_water_mark
    with successor(node) as other:
        report = other.restore()
        assert (report.seq, bool(report.damaged_states)) == (mark, loses_states)
        other.open()
        other.assert_same(sorted(other.model.states)[::15])
        other.apply(20)
        assert other.ship_all() == other.engine.applied_seq


def test_without_a_good_copy_the_damage_of_the_store_is_told() -> None:
    """Whatever is wrong with replicas: one is away, the other has the same damage."""
    node, (first, second) = replicated()
    node.apply(60)
    node.ship_all()
    node.shipping.replicate()
    key = node.view.object_keys()[0]
    node.crash()
    flipped(node.objects, key)
    flipped(second, key)
    first.fail("*", times=None)
    with successor(node) as other, pytest.raises(CorruptionError, match="data-1-"):
        other.restore()


def objects_of(store: object) -> dict[str, bytes]:
    """The objects of an engine's log, and its states."""
    assert isinstance(store, FaultyStore)
    return {key: data for key, data in store.contents().items() if key.endswith((".tlog", ".tckp"))}


def copied(store: FaultyStore) -> FaultyStore:
    """The same content in another store."""
    other = new_store()
    for key, data in store.contents().items():
        other.put(key, data)
    return other
