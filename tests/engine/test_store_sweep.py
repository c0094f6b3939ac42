"""What dead owners left in the store goes, and nothing else."""

from __future__ import annotations

import pytest
from tests.engine.stations import KEYS, EngineNode, new_store, successor

from tidelog.engine.store_sweep import overlapping
from tidelog.errors import FencedError, StoreUnavailableError
from tidelog.tier.keys import CheckpointId, ObjectId


def test_objects_of_a_crash_go_once_their_records_are_shipped_again() -> None:
    """Uploaded under an earlier epoch and never published: the same records are in other objects by then."""
    store = new_store()
    node = EngineNode(store, shipping_concurrency=3).open()
    node.apply(100)
    node.engine.update_low_water_mark(node.engine.applied_seq)
    store.fail("put*", times=None, matching="0000*")
    with pytest.raises(StoreUnavailableError):
        node.engine.ship()
    node.crash()
    store.heal()
    left = set(node.view.object_keys())
    assert left
    with node.open():
        assert node.shipping.sweep() == [], "they may be the only copy of something"
        node.engine.ship()
        assert set(node.shipping.sweep()) == left
        assert node.shipping.sweep() == []
        published = {KEYS.object(one.name) for one in node.view.descriptors()}
        assert set(node.view.object_keys()) == published
        node.crash()
    with successor(node) as other:
        other.restore()
        other.open()
        other.assert_same()


def test_states_that_were_never_listed_go() -> None:
    """A writer died between the object and the manifest."""
    store = new_store()
    node = EngineNode(store).open()
    node.apply(20)
    node.ship_all()
    kept = node.shipping.write_state()
    assert kept is not None
    node.crash()
    dead, foreign = KEYS.checkpoint(CheckpointId(5, 6, 1)), KEYS.checkpoints_prefix + "notes.txt"
    young = KEYS.checkpoint(CheckpointId(7, 8, 99))
    for key in (dead, foreign, young):
        store.put(key, b"x")
    with node.open():
        assert node.shipping.sweep() == [dead]
        assert set(node.view.state_keys()) == {kept.key, foreign, young}


def test_who_lost_the_claim_sweeps_nothing() -> None:
    """What it takes for a leftover may be another owner's."""
    store = new_store()
    old = EngineNode(store, name="old").open()
    old.apply(20)
    old.ship_all()
    store.put(KEYS.checkpoint(CheckpointId(5, 6, 0)), b"x")
    with successor(old) as other:
        other.restore()
        with pytest.raises(FencedError):
            old.shipping.sweep()
        assert KEYS.checkpoint(CheckpointId(5, 6, 0)) in other.view.state_keys()
    old.close()


def test_only_names_that_overlap_are_asked_for() -> None:
    """Objects that follow each other cost nothing."""
    apart = [ObjectId(1, 9, 1), ObjectId(10, 19, 1), ObjectId(20, 29, 2)]
    assert overlapping(apart) == []
    assert overlapping([*apart, ObjectId(10, 14, 2)]) == [ObjectId(10, 14, 2), ObjectId(10, 19, 1)]
    wide = ObjectId(1, 100, 3)
    assert overlapping([*apart, wide]) == sorted([*apart, wide])
