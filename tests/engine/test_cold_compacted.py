"""Values whose records were dropped: read from compacted data, with few requests, mended where there are two copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.engine.compacting import compact_by_hand, data_of, manifest_of
from tests.engine.stations import KEYS, EngineNode, new_store, successor

from tidelog.engine.cold.gc import drop_wal, droppable_below_lsn
from tidelog.engine.cold.manifest import move_history_start
from tidelog.engine.entry import CopyObject, CreateBucket, Entry, PutObject
from tidelog.errors import CorruptionError, GapError, NotFoundError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyStore

SETTINGS: dict[str, Any] = {"local_retention_bytes": 0, "rotate_max_bytes": 8 << 10}
COUNT = 80
LARGE = 3000


def value_of(number: int) -> bytes:
    """The value of an object: some are large, no two are the same."""
    return b"%06d" % number * (LARGE // 6 if number % 10 == 0 else 50)


def entries() -> list[tuple[int, Entry]]:
    """One object each, and a bucket for them."""
    puts = [(seq, PutObject("b", f"k{seq:04}", value_of(seq))) for seq in range(2, COUNT)]
    return [(1, CreateBucket("b")), *puts]


def drop(store: FaultyStore) -> int:
    """Drops what of the log a compaction made unnecessary; where it begins then."""
    metadata = BucketMetadataStore(store)
    return drop_wal(store, metadata, KEYS, 1 << 60).start_lsn


def cold_node(store: FaultyStore, name: str = "b", **settings: Any) -> EngineNode:
    """A restored engine: no value is on its disk."""
    node = EngineNode(store, name=name, **{**SETTINGS, **settings})
    node.restore()
    return node.open()


def shipped_store(codec: str = "none", **settings: Any) -> FaultyStore:
    """An engine's store, with a state and some log behind it."""
    store = new_store()
    with EngineNode(store, ship_compression=codec, **{**SETTINGS, **settings}).open() as node:
        node.apply_these(entries())
        node.ship_all()
        node.apply_these([(COUNT, PutObject("b", "last", b"x" * 9000)), (COUNT + 1, PutObject("b", "end", b"e" * 100))])
        node.ship_all()
    return store


@pytest.fixture(params=["none", "zstd"])
def compacted(request: pytest.FixtureRequest) -> FaultyStore:
    """A store whose log was compacted, and dropped as far as that goes."""
    store = shipped_store(request.param)
    compact_by_hand(store)
    assert drop(store) > COUNT // 2
    return store


def ranged_reads(store: FaultyStore) -> list[str]:
    """Every request of the store from here on that reads."""
    seen: list[str] = []

    def look(operation: str, key: str) -> None:
        seen.append(f"{operation} {key}")

    store.on_request = look
    return seen


def read(node: EngineNode, seq: int) -> bytes:
    """The value that an entry wrote; it comes from the store."""
    found = node.engine.read("b", f"k{seq:04}")
    assert found.tier == "cold"
    return found.data


def test_every_value_is_read_although_its_record_is_gone(compacted: FaultyStore) -> None:
    """From blob files and from files of their own, in any order."""
    with cold_node(compacted) as node:
        for seq in (*range(2, COUNT, 3), *range(COUNT - 1, 1, -7)):
            assert read(node, seq) == value_of(seq)
        assert node.shipping.reader.statistics().from_compacted > 5
    assert any(KEYS.parse_data_file(key) for key in compacted.contents())


def test_a_value_costs_two_requests_and_one_when_the_index_is_known(compacted: FaultyStore) -> None:
    """The root and the footers are read once; then a block of the index and the value, or the value alone."""
    with cold_node(compacted, cold_cache_bytes=0) as node:
        read(node, 3)
        node.shipping.reader._compacted._blocks._stretches.clear()  # type: ignore[union-attr]
        seen = ranged_reads(compacted)
        read(node, 5)
        assert [one.split()[0] for one in seen] == ["read_range", "read_range"]
        assert "/index/values-" in seen[0]
        assert "/blobs/" in seen[1]
        del seen[:]
        read(node, 4)
        assert len(seen) == 1
        del seen[:]
        read(node, 10)
        assert len(seen) == 1
        assert "/data/b/k0010/v0000000010.dat" in seen[0]


def test_values_that_were_read_come_from_the_cache(compacted: FaultyStore) -> None:
    """The same cache as ever: by position in the log."""
    with cold_node(compacted) as node:
        read(node, 7)
        seen = ranged_reads(compacted)
        assert read(node, 7) == value_of(7)
        assert seen == []
        assert node.shipping.reader.statistics().cache.hits == 1


def test_reading_in_order_takes_few_requests() -> None:
    """Several values of a blob file come with one request."""
    store = shipped_store()
    compact_by_hand(store, large_bytes=1 << 30, blob_file_bytes=1 << 20)
    drop(store)
    with cold_node(store) as node:
        read(node, 2)
        seen = ranged_reads(store)
        for seq in range(3, COUNT - 20):
            assert read(node, seq) == value_of(seq)
        assert len(seen) < 15


def test_values_that_are_compressed_in_another_way_than_in_the_log() -> None:
    """They are read, and in the cache as they were in the log."""
    store = shipped_store()
    compact_by_hand(store, large_bytes=1 << 30, blob_file_bytes=1 << 20, recompress=True)
    drop(store)
    with cold_node(store) as node:
        for seq in (*range(2, COUNT), *range(2, COUNT, 7)):
            assert read(node, seq) == value_of(seq)
        statistics = node.shipping.reader.statistics()
        assert statistics.repeated == 0
        assert COUNT - 30 < statistics.from_compacted < COUNT
        assert statistics.cache.hits >= COUNT // 7


def test_the_log_is_preferred_while_it_is_there() -> None:
    """A compaction that was published changes nothing for values whose records are still in the store."""
    store = shipped_store()
    compact_by_hand(store)
    with cold_node(store) as node:
        assert read(node, 5) == value_of(5)
        assert node.shipping.reader.statistics().from_compacted == 0


def test_a_log_that_is_dropped_while_an_engine_reads() -> None:
    """It knew the objects, and finds the values all the same: the manifest is asked again."""
    store = shipped_store()
    with cold_node(store, cold_cache_bytes=0) as node:
        assert read(node, 5) == value_of(5)
        compact_by_hand(store)
        drop(store)
        for seq in range(2, COUNT, 5):
            assert read(node, seq) == value_of(seq)


def test_a_compaction_that_is_replaced_while_an_engine_reads() -> None:
    """Files of the compaction that it knew are gone: there is a later one, which has the values."""
    store = shipped_store()
    compact_by_hand(store, blob_file_bytes=2 << 10)
    drop(store)
    with cold_node(store, cold_cache_bytes=0) as node:
        assert read(node, 5) == value_of(5)
        old = data_of(store).compaction
        node.apply_these([(200 + n, PutObject("b", f"n{n}", b"new" * 100)) for n in range(5)])
        node.ship_all()
        root = compact_by_hand(store)
        store.delete([part.key for part in old.values if part not in root.values])
        node.shipping.reader._compacted._blocks._stretches.clear()  # type: ignore[union-attr]
        for seq in range(2, COUNT, 5):
            assert read(node, seq) == value_of(seq)


def test_compactions_that_are_replaced_and_collected_between_any_two_requests() -> None:
    """Two further ones, in front of each request of a first read, and what they do without is gone: it is read."""
    for at_request in range(1, 50):
        store, requests = shipped_store(), itertools.count(1)
        compact_by_hand(store)
        drop(store)
        with cold_node(store) as node:

            def replace(*_: str, at: int = at_request, counted: Iterator[int] = requests) -> None:
                if next(counted) == at:
                    compact_twice_and_collect(store)  # noqa: B023  # called before the next one is made

            store.on_request = replace
            assert node.engine.read("b", "k0011").data == value_of(11)
            store.on_request = None
        if next(requests) <= at_request:
            break
    assert at_request > 5


def compact_twice_and_collect(store: FaultyStore) -> None:
    """Indexes and roots of earlier compactions are gone then."""
    for blob_file_bytes in (2 << 10, 4 << 10):
        with EngineNode(store, name="writer", **SETTINGS) as node:
            node.restore()
            node.open().apply_these([(node.engine.applied_seq + 1, PutObject("b", "more", b"m" * 900))])
            node.ship_all()
        compact_by_hand(store, blob_file_bytes=blob_file_bytes)
    manifest, named = manifest_of(BucketMetadataStore(store)), data_of(store).compaction.keys()
    assert manifest.compacted is not None
    kept = {manifest.compacted.key, *named}
    for info in list(store.list(KEYS.index_prefix)):
        if info.key not in kept:
            store.delete(info.key)


def test_copies_made_after_a_compaction_of_values_from_before() -> None:
    """A copy is a pointer: it leads into compacted data as the original does, also after the next compaction."""
    store = shipped_store()
    compact_by_hand(store)
    drop(store)
    with cold_node(store) as node:
        copies: list[tuple[int, Entry]] = [
            (300, CopyObject("b", "k0005", "b", "copy")),
            (301, CopyObject("b", "k0010", "b", "big")),
        ]
        gone: list[tuple[int, Entry]] = [
            (302, PutObject("b", "k0005", b"other")),
            (303, PutObject("b", "k0010", b"other")),
        ]
        node.apply_these([*copies, *gone])
        for _ in range(2):
            assert node.engine.read("b", "copy").data == value_of(5)
            assert node.engine.read("b", "big").data == value_of(10)
            node.ship_all()
            compact_by_hand(store)
            drop(store)
    with cold_node(store, "c") as node:
        assert node.engine.read("b", "copy").data == value_of(5)
        assert node.engine.read("b", "big").data == value_of(10)


class TestTwoCopies:
    """While the record is in the store too, either copy stands in for the other."""

    @pytest.mark.parametrize("trouble", ["damaged", "missing"])
    def test_compacted_data_mends_the_log(self, trouble: str) -> None:
        """The object of the record is bad or gone."""
        store = shipped_store()
        compact_by_hand(store)
        with cold_node(store) as node:
            for key in node.view.object_keys():
                if trouble == "damaged":
                    store.tamper(key, bytes(len(store.contents()[key])))
                else:
                    store.delete(key)
            assert read(node, 5) == value_of(5)
            assert read(node, 10) == value_of(10)
            assert node.shipping.reader.statistics().from_compacted == 2

    @pytest.mark.parametrize("place", ["blobs", "data", "index/values", "index/root"])
    def test_damage_without_another_copy_is_named(self, place: str) -> None:
        """By file and byte."""
        store = shipped_store()
        compact_by_hand(store)
        drop(store)
        with cold_node(store) as node:
            for key, data in store.contents().items():
                if f"/{place}" in key and key.startswith("storage/"):
                    store.tamper(key, bytes(len(data)))
            with pytest.raises(CorruptionError) as failed:
                read(node, 10 if place == "data" else 5)
            assert f"/{place}" in str(failed.value.path)

    @pytest.mark.parametrize("place", ["blobs", "data", "index/values"])
    def test_a_missing_file_is_named(self, place: str) -> None:
        """It is a hole in the data, not an object that was never there."""
        store = shipped_store()
        compact_by_hand(store)
        drop(store)
        with cold_node(store) as node:
            store.delete([key for key in store.contents() if f"/{place}" in key and key.startswith("storage/")])
            with pytest.raises(GapError, match=place):
                read(node, 10 if place == "data" else 5)

    def test_a_bad_transfer_is_made_good(self) -> None:
        """Bytes that were damaged on the way are fetched once more."""
        store = shipped_store()
        compact_by_hand(store)
        drop(store)
        with cold_node(store) as node:
            store.fail("read_range", "flipped", matching="*.tblb")
            assert read(node, 5) == value_of(5)
            assert node.shipping.reader.statistics().repeated == 1

    def test_a_replica_has_a_good_copy(self) -> None:
        """It has its own compacted data."""
        store = shipped_store()
        compact_by_hand(store)
        drop(store)
        copied = new_store()
        for key, data in store.contents().items():
            copied.put(key, data)
        node = EngineNode(store, name="b", replicas=[copied], **SETTINGS)
        node.restore()
        with node.open():
            store.delete([key for key in store.contents() if "/blobs/" in key])
            assert read(node, 5) == value_of(5)
            assert node.shipping.reader.statistics().from_replicas == 1


class TestHistoryThatBeginsLater:
    """Somebody without the node moved the start of history, and left out what is before it."""

    def test_what_is_before_is_refused_and_never_wrong(self) -> None:
        """As soon as the engine notices: at the latest when it looks for a value that is gone."""
        store = shipped_store()
        with cold_node(store, cold_cache_bytes=0) as node:
            node.apply_these(
                [(400, PutObject("b", "k0005", b"newer" * 100)), (401, PutObject("b", "k0006", b"n" * 500))]
            )
            node.ship_all()
            compact_by_hand(store, keep_from=401)
            drop(store)
            with pytest.raises(NotFoundError, match="before seq 401 are no longer kept"):
                node.engine.read("b", "k0005", 399)
            assert node.engine.statistics().history_start_seq == 401
            with pytest.raises(NotFoundError, match="no longer kept"):
                node.engine.digest(399)
            assert node.engine.read("b", "k0007", 401).data == value_of(7)
            node.engine.create_checkpoint()
            node.ship_all()
            compact_by_hand(store)
        with cold_node(store, "c") as heir:
            assert heir.engine.digest() == heir.engine.digest(401)
            assert heir.engine.read("b", "k0007").data == value_of(7)
            with pytest.raises(NotFoundError, match="no longer kept"):
                heir.engine.read("b", "k0005", 399)

    def test_a_state_that_is_pinned_here_is_refused_where_its_values_are_gone(self) -> None:
        """What is listed stays listed; a value that nobody has any more is told as such."""
        store = shipped_store()
        with cold_node(store, cold_cache_bytes=0) as node:
            node.apply_these(
                [(400, PutObject("b", "k0005", b"newer" * 100)), (401, PutObject("b", "k0006", b"n" * 500))]
            )
            node.ship_all()
            with node.engine.pin(399):
                compact_by_hand(store, keep_from=401)
                drop(store)
                with pytest.raises(NotFoundError, match="before seq 401 are no longer kept"):
                    node.engine.read("b", "k0005", 399)
                assert "k0005" in [item.key for item in node.engine.list_objects("b", seq=399)]
                assert node.engine.read("b", "k0007", 399).data == value_of(7)

    def test_it_is_taken_over_when_the_manifest_is_next_changed(self) -> None:
        """Also by an engine that has everything on its disk."""
        store = new_store()
        with EngineNode(store).open() as node:
            node.apply_these(entries())
            node.ship_all()
            move_history_start(BucketMetadataStore(store), KEYS, node.clock, 50)
            assert node.engine.statistics().history_start_seq == 0
            node.apply_these([(COUNT, PutObject("b", "last", b"x"))])
            node.ship_all()
            assert node.engine.statistics().history_start_seq == 50
            with pytest.raises(NotFoundError, match="no longer kept"):
                node.engine.digest(49)


def test_nothing_is_droppable_before_there_is_a_compaction_and_a_state() -> None:
    """Neither alone is enough: a restore has to begin somewhere, and values have to be somewhere."""
    store = shipped_store()
    with cold_node(store) as node:
        assert droppable_below_lsn(node.view.manifest) == 0
        node.engine.create_checkpoint()
        assert droppable_below_lsn(node.view.manifest) == 0
        compact_by_hand(store)
        manifest = node.view.manifest
        assert manifest.compacted is not None
        assert droppable_below_lsn(manifest) == min(manifest.compacted.lsn, manifest.checkpoints[0].lsn) > 0
        assert droppable_below_lsn(msgspec.structs.replace(manifest, checkpoints=())) == 0


def test_a_restored_engine_goes_on_after_its_log_was_dropped() -> None:
    """Random entries, compactions, drops and restores: every state is what it was."""
    store = new_store()
    node = EngineNode(store, name="a", **SETTINGS).open()
    for number in range(4):
        node.apply(40)
        node.ship_all()
        if number % 2:
            node.engine.create_checkpoint()
        compact_by_hand(store)
        drop(store)
        node.assert_same(sorted(node.model.states)[:: 1 + len(node.model.states) // 5])
        node.close()
        heir = successor(node, f"heir-{number}", **SETTINGS)
        heir.restore()
        node = heir.open()
        node.assert_same(sorted(node.model.states)[:: 1 + len(node.model.states) // 5])
    node.close()
