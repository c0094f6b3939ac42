"""States that somebody without the engine has made, beside an owner that writes its own, lets go and sweeps."""

from __future__ import annotations

import pytest
from tests.engine.compacting import checkpoint_by_hand, compact_by_hand
from tests.engine.stations import KEYS, EngineNode, new_store, successor

from tidelog.clock import ManualClock
from tidelog.engine.cold.gc import superseded_parts
from tidelog.engine.cold.manifest import Pinning
from tidelog.engine.sst.snapshot import StoredState
from tidelog.store.keys import CheckpointId, StatePartId
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyStore

FOREIGN = KEYS.checkpoints_prefix + "part-notes.txt"


def parts_in(store: FaultyStore) -> list[str]:
    """The files of states that are there."""
    return [key for key in store.contents() if KEYS.parse_state_part(key)]


def used_parts(node: EngineNode) -> list[str]:
    """The files of the states that are listed."""
    states = (StoredState(node.objects, listed) for listed in node.view.manifest.checkpoints)
    return sorted(part.key for state in states for part in state.parts() if KEYS.parse_state_part(part.key))


def shipped(node: EngineNode, count: int = 20) -> None:
    """Some more entries, in the store."""
    node.apply(count)
    node.ship_all()


def test_files_of_a_state_go_with_it() -> None:
    """When two newer states are listed; those of others stay, and so do the files of a compaction."""
    store = new_store()
    with EngineNode(store).open() as node:
        shipped(node)
        oldest = checkpoint_by_hand(store)
        of_oldest = parts_in(store)
        store.put(FOREIGN, b"x")
        shipped(node)
        compact_by_hand(store)
        compacted = {key for key in store.contents() if KEYS.parse_compacted(key)}
        shipped(node)
        checkpoint_by_hand(store)
        assert set(of_oldest) < set(parts_in(store))
        shipped(node)
        node.shipping.write_state()
        assert oldest.key not in node.view.state_keys()
        left = parts_in(store)
        assert left
        assert not set(left) & set(of_oldest)
        assert FOREIGN in store.contents()
        shipped(node)
        node.shipping.write_state()
        assert not set(parts_in(store)) & set(left[:1])
        assert parts_in(store) == used_parts(node)
        assert {key for key in store.contents() if KEYS.parse_compacted(key)} == compacted


def test_a_pinned_state_keeps_its_files() -> None:
    """Somebody restores from it just now."""
    clock = ManualClock()
    store = new_store(clock)
    with EngineNode(store, clock=clock).open() as node:
        shipped(node)
        pinned = checkpoint_by_hand(store)
        pinning = Pinning(BucketMetadataStore(store), KEYS, clock, "reader", 3600)
        assert pinning.pin(pinned.key)
        before = parts_in(store)
        for _ in range(3):
            shipped(node)
            node.shipping.write_state()
        node.shipping.remove_orphans()
        assert set(before) < set(parts_in(store))
        assert parts_in(store) == used_parts(node)
        pinning.release()
        shipped(node)
        node.shipping.write_state()
        assert not set(before) & set(parts_in(store))
        assert parts_in(store) == used_parts(node)


def test_a_crash_between_a_state_and_its_files_is_cleaned_up_by_the_next_owner() -> None:
    """What no listed state has, and is older than the newest of them, goes with the sweep; what is newer stays."""
    store = new_store()
    node = EngineNode(store).open()
    shipped(node)
    checkpoint_by_hand(store)
    shipped(node)
    node.shipping.write_state()
    listed = parts_in(store)
    node.crash()
    mark = node.view.manifest.high_water_mark
    old, young = (KEYS.state_part(StatePartId(seq, 9, "0" * 32)) for seq in (mark - 1, mark))
    old_state, young_state = (KEYS.checkpoint(CheckpointId(seq, 9, 1, "1" * 32)) for seq in (mark - 1, mark + 1))
    for key in (old, young, old_state, young_state):
        store.put(key, b"x")
    with node.open():
        assert set(node.shipping.remove_orphans()) == {old, old_state}
        assert set(parts_in(store)) == {*listed, young}
        assert young_state in store.contents()


def test_nothing_goes_because_a_state_cannot_be_read() -> None:
    """Which files it has is not known then."""
    store = new_store()
    with EngineNode(store).open() as node:
        shipped(node)
        state = checkpoint_by_hand(store)
        shipped(node)
        node.shipping.write_state()
        orphan = KEYS.state_part(StatePartId(1, 2, "0" * 32))
        store.put(orphan, b"x")
        assert superseded_parts(store, KEYS, node.view.manifest) == [orphan]
        store.tamper(state.key, b"nonsense")
        assert superseded_parts(store, KEYS, node.view.manifest) == []


@pytest.mark.parametrize("is_compaction", [False, True])
def test_a_state_that_was_listed_while_the_owner_wrote_the_same(is_compaction: bool) -> None:
    """There is one of each seq: the owner's own goes, and a restore begins with the other."""
    store = new_store()
    node = EngineNode(store).open()
    shipped(node)
    done: list[str] = []

    def be_faster(operation: str, key: str) -> None:
        if operation == "put" and key.endswith(".tckp") and key.startswith(KEYS.checkpoints_prefix) and not done:
            done.append(key)
            compact_by_hand(store) if is_compaction else checkpoint_by_hand(store)

    store.on_request = be_faster
    found = node.shipping.write_state()
    store.on_request = None
    assert found is not None
    assert done[0] != found.key
    assert [state.key for state in node.view.manifest.checkpoints] == [found.key]
    assert done[0] not in store.contents()
    assert node.shipping.write_state() == found
    node.crash()
    with successor(node) as other:
        assert other.restore().state_seq == found.seq
        other.open()
        other.assert_same()
