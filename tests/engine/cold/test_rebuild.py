"""An engine's metadata comes back from its published copy: whole or not at all, and above every epoch there was."""

from __future__ import annotations

import pytest
from tests.engine.stations import DIRECTORY, KEYS, EngineNode, new_store, successor

from tidelog.clock import ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.cold.ownership import read_local_claim
from tidelog.engine.cold.rebuild import RebuiltManifest, rebuild_manifest
from tidelog.engine.core import WAL
from tidelog.errors import DataError, FencedError, StoreUnavailableError
from tidelog.store.keys import CheckpointId, ObjectId
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.published import PublishedMetadata
from tidelog.testing import FaultyMetadata, FaultyStore


def shipped(store: FaultyStore) -> EngineNode:
    """An engine with objects and snapshots, whose metadata is not in its bucket."""
    node = EngineNode(store, metadata=PublishedMetadata(MemoryMetadataStore(), store)).open()
    for _ in range(3):
        node.apply(20)
        node.ship_all()
        node.shipping.write_state()
    return node


def rebuild(metadata: MetadataStore, node: EngineNode, *, keeps: bool = True) -> RebuiltManifest:
    local = read_local_claim(node.files, DIRECTORY / WAL) if keeps else None
    return rebuild_manifest(metadata, KEYS, node.objects, clock=ManualClock(), local=local)


def copy_in(store: FaultyStore) -> dict[str, bytes]:
    with BucketMetadataStore(store, read_only=True) as copy:
        return {entry.key: entry.value for entry in copy.range(KEYS.metadata_prefix)}


def test_interrupted_rebuild_is_repeated() -> None:
    """Cut at every write: there is no engine until all of it is there, and the copy stays for the next attempt."""
    store = new_store()
    with shipped(store) as node:
        node.crash()
        copy = copy_in(store)
        truth = FaultyMetadata()
        for writes in range(len(copy)):
            truth = FaultyMetadata()
            truth.fail("commit", nth=writes + 1, times=None)
            with pytest.raises(StoreUnavailableError):
                rebuild(PublishedMetadata(truth, store), node)
            truth.heal()
            assert truth.get(KEYS.owner) is None
            assert copy_in(store) == copy
        report = rebuild(PublishedMetadata(truth, store), node)
        assert (report.objects, report.snapshots, report.missing) == (3, 2, ())
        rebuilt = {entry.key: entry.value for entry in truth.range(KEYS.metadata_prefix)}
        assert {key: value for key, value in rebuilt.items() if key != KEYS.owner} == {
            key: value for key, value in copy.items() if key != KEYS.owner
        }
        node.metadata = PublishedMetadata(truth, store)
        node.open()
        node.assert_same()
        node.apply(5)
        node.ship_all()


def test_epoch_is_above_all_that_is_mentioned() -> None:
    """By objects and snapshots that the copy does not know: their names are never used again."""
    store = new_store()
    with shipped(store) as node:
        node.crash()
        end = node.view.manifest.shipped_lsn
        store.put(late := KEYS.object(ObjectId(end, end + 5, 7)), b"x")
        store.put(KEYS.checkpoint(CheckpointId(9, 9, 8, "0" * 32)), b"x")
        truth = MemoryMetadataStore()
        report = rebuild(truth, node)
        assert (report.epoch, report.unpublished) == (9, (late,))


def test_directory_that_was_left_behind_stays_so() -> None:
    """The copy names the directory that went on; one that was replaced before is refused as it was."""
    store = new_store()
    with shipped(store) as old:
        old.crash()
        taken_over = MemoryMetadataStore()
        rebuild(taken_over, old)
        with successor(old) as other:
            other.metadata = PublishedMetadata(taken_over, store)
            other.restore()
            other.open()
            other.apply(10)
            other.ship_all()
            other.crash()
            truth = MemoryMetadataStore()
            rebuild(truth, old)
            old.metadata = PublishedMetadata(truth, store)
            with pytest.raises(FencedError):
                old.open()
            old.crash()
            other.metadata = PublishedMetadata(truth, store)
            other.open()
            other.assert_same()


def test_copy_that_contradicts_itself_is_refused() -> None:
    """Before anything is written."""
    store = new_store()
    with shipped(store) as node:
        node.crash()
        with BucketMetadataStore(store, takes_copies=True) as copies:
            newest = Catalog(copies, KEYS).newest()
            assert newest is not None
            copies.delete(KEYS.descriptor(newest.start_offset))
            copies.delete(KEYS.current)
        truth = MemoryMetadataStore()
        with pytest.raises(DataError, match="the copy of the catalog ends at"):
            rebuild(truth, node)
        assert truth.keys(KEYS.metadata_prefix) == []
