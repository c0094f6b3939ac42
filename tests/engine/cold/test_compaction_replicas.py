"""Replicas follow a compaction of the engine's own store: wherever they were, and cut off anywhere."""

from __future__ import annotations

import pytest
from tests.campaign import every
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store, successor
from tests.engine.test_compaction_log import COLD, assert_contiguous

from tidelog.cold import replicas
from tidelog.errors import StoreUnavailableError
from tidelog.testing import FaultyStore


def replicated(**settings: str) -> tuple[EngineNode, FaultyStore]:
    """An open engine with one replica, which has the first half of what was shipped."""
    replica = new_store()
    node = EngineNode(new_store(), replicas=[replica], **{**COLD, **settings}).open()
    node.apply(60)
    node.ship_all()
    node.shipping.replicate()
    node.apply(60)
    node.ship_all()
    return node, replica


def assert_follows(node: EngineNode, replica: FaultyStore) -> None:
    """The replica has the same objects, and nothing but those."""
    assert StoreView(replica).descriptors() == node.view.descriptors()
    named = {KEYS.object(one.name) for one in node.view.descriptors()}
    assert set(StoreView(replica).object_keys()) == named
    assert_contiguous(StoreView(replica))


def restored_from(node: EngineNode, replica: FaultyStore) -> None:
    """The replica alone is enough."""
    other = successor(node)
    other.objects, other.replicas = copied(replica), ()
    other.restore()
    with other.open():
        other.model.roll_back(other.engine.applied_seq)
        other.assert_same(sorted(other.model.states)[::15])


def copied(store: FaultyStore) -> FaultyStore:
    """Another store with the same in it."""
    other = new_store()
    for key, data in store.contents().items():
        other.put(key, data)
    return other


def test_a_replica_that_is_behind_catches_up_over_a_compaction() -> None:
    """Its end is in the middle of the large object."""
    node, replica = replicated()
    node.engine.compact(grace_seconds=0)
    node.engine.compact(grace_seconds=0)
    node.shipping.replicate()
    assert len(node.view.descriptors()) == 2
    assert_follows(node, replica)
    restored_from(node, replica)
    node.close()


def test_a_replica_that_has_everything_follows() -> None:
    """Nothing new was shipped: only the objects are others."""
    node, replica = replicated()
    node.shipping.replicate()
    node.engine.compact(grace_seconds=0)
    node.shipping.replicate()
    assert_follows(node, replica)
    node.apply(40)
    node.ship_all()
    node.shipping.replicate()
    assert_follows(node, replica)
    restored_from(node, replica)
    node.close()


def test_a_new_replica_gets_the_large_objects() -> None:
    """It never had the small ones."""
    node, _ = replicated()
    node.engine.compact(grace_seconds=0)
    node.close()
    empty = new_store()
    node.replicas = [empty]
    with node.open():
        node.shipping.replicate()
        assert_follows(node, empty)
        restored_from(node, empty)


@pytest.mark.deeper
def test_cut_off_anywhere_a_replica_can_be_restored_from_and_follows_later() -> None:
    """At every request to it."""
    node, replica = replicated()
    node.engine.compact(grace_seconds=0)
    nth, is_done = 1, False
    while not is_done:
        part = copied(replica)
        node.close()
        node.replicas = [part]
        node.open()
        part.fail("*", nth=nth, times=None)
        try:
            node.shipping.replicate()
            is_done = True
        except StoreUnavailableError:
            pass
        part.heal()
        restored_from(node, part)
        node.shipping.replicate()
        assert_follows(node, part)
        nth += every(6)
    assert nth > 10
    node.close()


def test_with_sync_the_high_water_mark_moves_on() -> None:
    """Compactions between publishes do not hold it up."""
    node, replica = replicated(replication_mode="sync")
    for _ in range(3):
        node.engine.compact(grace_seconds=0)
        node.apply(30)
        assert node.ship_all() == node.engine.applied_seq
        assert StoreView(replica).manifest.high_water_mark == node.engine.applied_seq
    assert_follows(node, replica)
    node.close()


@pytest.mark.parametrize("step", ["_follow_compaction", "_copy"])
def test_ship_with_sync_replicas_goes_on_when_a_compaction_comes_between(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The engine's store is compacted after a replica has followed it, before the log or an object is copied."""
    node, replica = replicated(replication_mode="sync")
    compactions: list[int] = []

    def compact_once() -> None:
        if not compactions:
            compactions.append(node.engine.compact(grace_seconds=0).new_objects)
            node.engine.compact(grace_seconds=0)  # the small objects go

    method = getattr(replicas.Replica, step)

    def compacted_beside(*given: object) -> None:
        if step == "_copy":
            compact_once()
        method(*given)
        compact_once()

    monkeypatch.setattr(replicas.Replica, step, compacted_beside)
    node.apply(30)
    assert node.ship_all() == node.engine.applied_seq
    assert compactions[0] > 0
    assert StoreView(replica).manifest.high_water_mark == node.engine.applied_seq
    shipping = node.engine.statistics().shipping
    assert shipping is not None
    assert shipping.errors_total == 0
    node.shipping.replicate()
    assert_follows(node, replica)
    restored_from(node, replica)
    node.close()


@pytest.mark.parametrize("follows", [False, True])
def test_damage_is_mended_from_a_replica_whatever_objects_it_has(follows: bool) -> None:
    """A large object went bad; the replica has the small ones, or the large one as well."""
    node, _ = replicated()
    node.shipping.replicate()
    node.engine.create_checkpoint()
    node.shipping.purge()
    node.engine.compact(grace_seconds=0)
    if follows:
        node.shipping.replicate()
    store, key = node.objects, KEYS.object(node.view.descriptors()[0].name)
    assert isinstance(store, FaultyStore)
    store.tamper(key, bytes(len(store.contents()[key])))
    node.assert_same(sorted(node.model.states)[::15])
    assert node.shipping.reader.statistics().from_replicas > 0
    node.close()
