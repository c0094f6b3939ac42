"""Compactions: versions and values are found with two requests, and a root that does not hold together is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.engine.compacting import compact_by_hand, data_of, value_at
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store

from tidelog.engine.cold.manifest import StoredCompaction
from tidelog.engine.mvcc.cells import BUCKETS, MAX_SEQ, bucket_prefix, decode_cell, is_pointer, object_prefix, parse
from tidelog.engine.sst.blob_file import BlobPointer, FilePointer
from tidelog.engine.sst.sorted_index import (
    BlobFileInfo,
    Compaction,
    SortedIndex,
    decode_compaction,
    encode_compaction,
    read_compaction,
)
from tidelog.engine.sst.sstable import RowPart
from tidelog.engine.wal.value import decode_value
from tidelog.errors import CorruptionError, DataError, NotFoundError
from tidelog.store.keys import CompactedId
from tidelog.testing import FaultyStore

BLOB = KEYS.compacted(CompactedId("blob", 2, "a" * 32))
VERSIONS = KEYS.compacted(CompactedId("versions", 3, "b" * 32))
VALUES = KEYS.compacted(CompactedId("values", 3, "c" * 32))


def part(key: str, first: bytes, last: bytes) -> RowPart:
    """A part that says so."""
    return RowPart(key=key, size=100, rows=2, digest="d" * 64, first_key=first, last_key=last)


def blob_file(**changes: Any) -> BlobFileInfo:
    """A blob file that is right, but for these."""
    info = BlobFileInfo(
        key=BLOB, size=900, values=5, live_values=4, live_bytes=300, first_position=10, last_position=700
    )
    return msgspec.structs.replace(info, **changes)


def root(**changes: Any) -> Compaction:
    """A root that is right, but for these."""
    good = Compaction(
        generation=3,
        seq=50,
        lsn=81,
        position=4000,
        history_start_seq=7,
        large_bytes=1000,
        blob_files=(blob_file(),),
        versions=(part(VERSIONS, b"oa", b"ob"), part(VERSIONS, b"oc", b"od")),
        values=(part(VALUES, b"\0" * 8, b"\1" * 8),),
        data_files=1,
        data_bytes=2000,
    )
    return msgspec.structs.replace(good, **changes)


def compacted_store() -> tuple[FaultyStore, EngineNode]:
    """An engine with a compaction of everything that it has."""
    store = new_store()
    node = EngineNode(store).open()
    node.apply(400)
    node.ship_all()
    compact_by_hand(store)
    return store, node


def stored(store: FaultyStore) -> StoredCompaction:
    """What the manifest says of it."""
    found = StoreView(store).manifest.compacted
    assert found is not None
    return found


def test_a_root_is_what_it_was() -> None:
    """And the same root gives the same bytes, at whatever time."""
    encoded = encode_compaction(root())
    assert decode_compaction(encoded.data, KEYS) == root()
    assert encode_compaction(root()) == encoded
    listed = encoded.stored(KEYS, root(), created_us=5)
    assert KEYS.parse_compacted(listed.key) == CompactedId("root", 3, encoded.digest)
    assert (listed.seq, listed.lsn, listed.position, listed.size) == (50, 81, 4000, len(encoded.data))


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 0},
        {"lsn": 0},
        {"history_start_seq": 51},
        {"generation": 2},
        {"blob_files": (blob_file(live_values=0),)},
        {"blob_files": (blob_file(live_values=6),)},
        {"blob_files": (blob_file(last_position=4000),)},
        {"blob_files": (blob_file(first_position=701),)},
        {"blob_files": (blob_file(), blob_file())},
        {"blob_files": (blob_file(key=VERSIONS),)},
        {"blob_files": (blob_file(key="storage/engine/other/blobs/blob-0000000002-" + "a" * 32 + ".tblb"),)},
        {"versions": (part(VALUES, b"a", b"b"),)},
        {"versions": (part(VERSIONS, b"b", b"a"),)},
        {"versions": (part(VERSIONS, b"a", b"c"), part(VERSIONS, b"c", b"d"))},
        {"values": (part(VERSIONS, b"a", b"b"),)},
        {"values": (part("owner", b"a", b"b"),)},
    ],
)
def test_a_root_that_does_not_hold_together(changes: dict[str, Any]) -> None:
    """It is refused as a whole."""
    with pytest.raises(DataError):
        decode_compaction(encode_compaction(root(**changes)).data, KEYS)


def test_every_flipped_bit_of_a_root_is_noticed() -> None:
    """Its name tells its bytes."""
    store, node = compacted_store()
    listed = stored(store)
    good = store.contents()[listed.key]
    for byte in range(0, len(good), 3):
        bad = bytearray(good)
        bad[byte] ^= 1
        store.put(listed.key, bytes(bad))
        with pytest.raises(CorruptionError, match="root"):
            read_compaction(store, KEYS, listed)
    store.put(listed.key, good[:-1])
    with pytest.raises(CorruptionError):
        read_compaction(store, KEYS, listed)
    store.put(listed.key, good)
    with pytest.raises(CorruptionError, match="manifest"):
        read_compaction(store, KEYS, msgspec.structs.replace(listed, seq=listed.seq - 1))
    store.delete(listed.key)
    with pytest.raises(NotFoundError):
        read_compaction(store, KEYS, listed)
    node.close()


def test_every_version_is_found_and_its_value_read() -> None:
    """By key and by position, and it is what the engine has."""
    store, node = compacted_store()
    data, seen = data_of(store), {FilePointer: 0, BlobPointer: 0}
    for key, value in node.core.tree.scan(b"", None):
        name = parse(key)
        prefix = bucket_prefix(name.bucket) if name.key is None else object_prefix(name.bucket, name.key)
        found = data.find_version(prefix, name.seq)
        assert found is not None
        assert (found.cell, found.seq) == (value, name.seq)
        cell = None if key[:1] == BUCKETS else decode_cell(value)
        if cell is None or cell.is_tombstone or cell.inline is not None:
            assert found.place is None
            continue
        assert found.place is not None
        assert found.place == data.find_value(cell.position)
        decode_value(value_at(store, data, found.place), cell.codec, cell.size, cell.crc, cell.lsn)
        seen[type(found.place)] += 1
    assert all(seen.values()), "both kinds of places"
    node.close()


def test_what_is_not_there_is_not_found() -> None:
    """Other keys, seqs before the first version, positions between values and behind all of them."""
    store, node = compacted_store()
    data = data_of(store)
    assert data.find_version(object_prefix("nowhere", "nothing"), MAX_SEQ) is None
    assert data.find_version(object_prefix("bucket-0", "key-00000\0"), MAX_SEQ) is None
    assert data.find_version(bucket_prefix("bucket-0"), 0) is None
    assert data.find_value(1) is None
    assert data.find_value(2**64 - 1) is None
    assert SortedIndex(store, KEYS, Compaction(generation=1, seq=0, lsn=1, position=0)).find_value(0) is None
    node.close()


def test_a_read_costs_two_requests() -> None:
    """The root and the footers are known; then a block of an index, and the value."""
    store, node = compacted_store()
    data = data_of(store)
    pointers = [(key, decode_cell(value)) for key, value in node.core.tree.scan(b"o", None) if is_pointer(value)]
    for key, cell in pointers:  # every footer is read once
        name = parse(key)
        assert data.find_value(cell.position) is not None
        assert data.find_version(object_prefix(name.bucket, name.key or ""), name.seq) is not None
    key, cell = pointers[len(pointers) // 2]
    name = parse(key)
    for finds_by_key in (True, False):
        cold = SortedIndex(store, KEYS, data.compaction)
        for file in (*cold._versions._files, *cold._values._files):
            assert file.footer.rows
        store.reset_traffic()
        if finds_by_key:
            version = cold.find_version(object_prefix(name.bucket, name.key or ""), name.seq)
            place = None if version is None else version.place
        else:
            place = cold.find_value(cell.position)
        assert place is not None
        value_at(store, cold, place)
        assert sum(store.traffic.requests.values()) == 2
    node.close()


def test_places_that_lead_nowhere_are_refused() -> None:
    """A blob file that the root does not have, a data file of another name."""
    store, node = compacted_store()
    data = data_of(store)
    with pytest.raises(DataError, match="blob file 99"):
        data.locate(BlobPointer(0, 99, 8, 10))
    with pytest.raises(DataError, match="unknown data file"):
        data.locate(FilePointer(0, 5, "../manifest"))
    node.close()
