"""What dead owners left in the store goes, and nothing else."""

from __future__ import annotations

import pytest
from tests.engine.stations import KEYS, EngineNode, new_store, successor

from tidelog.cold.catalog import Catalog
from tidelog.engine.cold.gc import ComparedDataFiles, EngineCollector, drop_wal, overlapping
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.value_file import ValueName
from tidelog.errors import FencedError, StoreUnavailableError
from tidelog.store.keys import CheckpointId, ObjectId
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.published import PublishedMetadata


def test_objects_of_a_crash_go_once_their_records_are_shipped_again() -> None:
    """Uploaded under an earlier epoch and never published: the same records are in other objects by then."""
    store = new_store()
    node = EngineNode(store, ship_concurrency=3).open()
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
        assert node.shipping.remove_orphans() == [], "they may be the only copy of something"
        node.engine.ship()
        assert set(node.shipping.remove_orphans()) == left
        assert node.shipping.remove_orphans() == []
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
    dead, foreign = KEYS.checkpoint(CheckpointId(5, 6, 1, "0" * 32)), KEYS.checkpoints_prefix + "notes.txt"
    young = KEYS.checkpoint(CheckpointId(kept.seq + 1, 8, 1, "0" * 32))
    for key in (dead, foreign, young):
        store.put(key, b"x")
    with node.open():
        assert node.shipping.remove_orphans() == [dead]
        assert set(node.view.state_keys()) == {kept.key, foreign, young}


def test_who_lost_the_claim_sweeps_nothing() -> None:
    """What it takes for a leftover may be another owner's."""
    store = new_store()
    old = EngineNode(store, name="old").open()
    old.apply(20)
    old.ship_all()
    old.shipping.write_state()
    store.put(KEYS.checkpoint(CheckpointId(5, 6, 0, "0" * 32)), b"x")
    with successor(old) as other:
        other.restore()
        with pytest.raises(FencedError):
            old.shipping.remove_orphans()
        assert KEYS.checkpoint(CheckpointId(5, 6, 0, "0" * 32)) in other.view.state_keys()
    old.close()


def test_only_names_that_overlap_are_asked_for() -> None:
    """Objects that follow each other cost nothing."""
    apart = [ObjectId(1, 9, 1), ObjectId(10, 19, 1), ObjectId(20, 29, 2)]
    assert overlapping(apart) == []
    assert overlapping([*apart, ObjectId(10, 14, 2)]) == [ObjectId(10, 14, 2), ObjectId(10, 19, 1)]
    wide = ObjectId(1, 100, 3)
    assert overlapping([*apart, wide]) == sorted([*apart, wide])


def test_snapshots_stay_while_the_published_copy_names_them() -> None:
    """Loses otherwise: a restore from the bucket is led to snapshots that are gone."""
    store = new_store()
    metadata = PublishedMetadata(MemoryMetadataStore(), store)
    with EngineNode(store, metadata=metadata).open() as node:
        for _ in range(2):
            node.apply(20)
            node.ship_all()
            node.shipping.write_state()
        store.fail("put_if_match", times=None, matching=KEYS.engine_manifest)
        for _ in range(2):
            node.apply(20)
            node.ship_all()
            node.shipping.write_state()
        named = {state.key for state in node.view.manifest.checkpoints}
        assert len(named) == 2
        assert named <= set(node.view.state_keys())
        store.put(dead := KEYS.checkpoint(CheckpointId(5, 6, 0, "0" * 32)), b"x")
        assert node.shipping.remove_orphans() == []
        store.heal()
        node.apply(20)
        node.ship_all()
        node.shipping.write_state()
        assert {state.key for state in node.view.manifest.checkpoints} | {dead} == set(node.view.state_keys())
        assert node.shipping.remove_orphans() == [dead]


def test_dropped_log_stays_while_the_published_copy_names_it() -> None:
    """The start moves and descriptors go; their objects go when readers of the bucket know that."""
    store = new_store()
    metadata = PublishedMetadata(MemoryMetadataStore(), store)
    with EngineNode(store, metadata=metadata, wal_segment_size=4096).open() as node:
        for _ in range(4):
            node.apply(40)
            node.ship_all()
        link, there = node.shipping._link, node.view.object_keys()
        assert link is not None
        link.owned.move_start(stop := node.view.descriptors()[-1].start_offset)
        store.fail("delete", times=None, matching=KEYS.segments_prefix + "*")
        assert drop_wal(store, metadata, KEYS, stop).objects == 0
        assert node.view.object_keys() == there
        store.heal()
        assert drop_wal(store, metadata, KEYS, stop).objects > 0
        assert len(node.view.object_keys()) < len(there)


def test_collection_beside_the_owner_removes_only_value_files_that_no_version_refers_to() -> None:
    """The loss: a job that removes what no snapshot, compaction or descriptor names would remove every large value.

    Rows of snapshots refer to them. One that was uploaded before its record is nobody's yet, and stays.
    """
    with EngineNode(new_store(), large_value_bytes=1024, local_retention_bytes=0).open() as node:
        puts = [(seq, PutObject("b", f"k{seq % 3}", bytes([seq]) * 3000)) for seq in range(2, 12)]
        node.apply_these([(1, CreateBucket("b")), *puts])
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(20)
        node.ship_all()
        node.engine.create_checkpoint()
        node.clock.advance(1_000_000)
        values = {info.key for info in node.objects.list(KEYS.values_prefix)}
        assert len(values) >= 10
        last_seq = node.view.manifest.checkpoints[-1].seq
        unused, young = (KEYS.values_prefix + str(ValueName(seq, 7, 3, 9)) for seq in (last_seq, last_seq + 1))
        for key in (unused, young):
            node.objects.put(key, b"x")
        metadata = BucketMetadataStore(node.objects)
        collector = EngineCollector(
            *(Catalog(metadata, KEYS), node.objects, KEYS, node.clock, lambda compaction: ComparedDataFiles()),
            grace_seconds=0,
        )
        plan = collector.plan()
        assert [one.key for one in plan.removable if one.kind == "value file"] == [unused]
        assert [one.key for one in plan.found if one.kind == "value file" and one.action == "keep"] == [young]
        collector.apply(plan)
        assert {info.key for info in node.objects.list(KEYS.values_prefix)} == {*values, young}
        node.assert_same([3, 7, 11])


def test_value_files_stay_while_a_snapshot_cannot_be_read() -> None:
    """The loss: its rows refer to values, and what they refer to is not known."""
    with EngineNode(new_store(), large_value_bytes=1024).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "k", b"v" * 3000))])
        node.ship_all()
        node.engine.create_checkpoint()
        node.clock.advance(1_000_000)
        (unused,) = (KEYS.values_prefix + str(ValueName(1, 7, 3, 9)),)
        node.objects.put(unused, b"x")
        (state,) = node.view.manifest.checkpoints
        (part,) = StoredState(node.objects, state).parts()
        node.objects.put(part.key, b"?" * part.size)
        metadata = BucketMetadataStore(node.objects)
        collector = EngineCollector(
            *(Catalog(metadata, KEYS), node.objects, KEYS, node.clock, lambda compaction: ComparedDataFiles()),
            grace_seconds=0,
        )
        assert not [one for one in collector.plan().removable if one.kind == "value file"]
        assert len([*node.objects.list(KEYS.values_prefix)]) == 2
