"""Compactions: versions and bodies are found with two requests, and a root that does not hold together is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.engine.compacting import compact_by_hand, data_of
from tests.engine.stations import KEYS, EngineNode, StoreView, new_store

from tidelog.engine.body import decode_body
from tidelog.engine.cell import decode_cell
from tidelog.engine.compacted import (
    CompactedData,
    Compaction,
    PackInfo,
    decode_compaction,
    encode_compaction,
    read_compaction,
)
from tidelog.engine.manifest import StoredCompaction
from tidelog.engine.place import FilePlace, PackPlace
from tidelog.engine.row_file import RowPart
from tidelog.engine.version_keys import BUCKETS, MAX_SEQ, bucket_prefix, object_prefix, parse
from tidelog.errors import CorruptionError, DataError, NotFoundError
from tidelog.testing import FaultyStore
from tidelog.tier.compacted_names import CompactedId

PACK = KEYS.compacted(CompactedId("pack", 2, "a" * 32))
VERSIONS = KEYS.compacted(CompactedId("versions", 3, "b" * 32))
BODIES = KEYS.compacted(CompactedId("bodies", 3, "c" * 32))


def part(key: str, first: bytes, last: bytes) -> RowPart:
    """A part that says so."""
    return RowPart(key=key, size=100, rows=2, digest="d" * 64, first_key=first, last_key=last)


def pack(**changes: Any) -> PackInfo:
    """A pack that is right, but for these."""
    info = PackInfo(key=PACK, size=900, bodies=5, live_bodies=4, live_bytes=300, first_position=10, last_position=700)
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
        packs=(pack(),),
        versions=(part(VERSIONS, b"oa", b"ob"), part(VERSIONS, b"oc", b"od")),
        bodies=(part(BODIES, b"\0" * 8, b"\1" * 8),),
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
        {"packs": (pack(live_bodies=0),)},
        {"packs": (pack(live_bodies=6),)},
        {"packs": (pack(last_position=4000),)},
        {"packs": (pack(first_position=701),)},
        {"packs": (pack(), pack())},
        {"packs": (pack(key=VERSIONS),)},
        {"packs": (pack(key="storage/engine/other/packs/pack-0000000002-" + "a" * 32 + ".tpck"),)},
        {"versions": (part(BODIES, b"a", b"b"),)},
        {"versions": (part(VERSIONS, b"b", b"a"),)},
        {"versions": (part(VERSIONS, b"a", b"c"), part(VERSIONS, b"c", b"d"))},
        {"bodies": (part(VERSIONS, b"a", b"b"),)},
        {"bodies": (part("owner", b"a", b"b"),)},
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


def test_every_version_is_found_and_its_body_read() -> None:
    """By key and by position, and it is what the engine has."""
    store, node = compacted_store()
    data, seen = data_of(store), {FilePlace: 0, PackPlace: 0}
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
        assert found.place == data.find_body(cell.position)
        decode_body(data.read_body(found.place), cell.codec, cell.size, cell.crc, cell.lsn)
        seen[type(found.place)] += 1
    assert all(seen.values()), "both kinds of places"
    node.close()


def test_what_is_not_there_is_not_found() -> None:
    """Other keys, seqs before the first version, positions between bodies and behind all of them."""
    store, node = compacted_store()
    data = data_of(store)
    assert data.find_version(object_prefix("nowhere", "nothing"), MAX_SEQ) is None
    assert data.find_version(object_prefix("bucket-0", "key-00000\0"), MAX_SEQ) is None
    assert data.find_version(bucket_prefix("bucket-0"), 0) is None
    assert data.find_body(1) is None
    assert data.find_body(2**64 - 1) is None
    assert CompactedData(store, KEYS, Compaction(generation=1, seq=0, lsn=1, position=0)).find_body(0) is None
    node.close()


def test_a_read_costs_two_requests() -> None:
    """The root and the footers are known; then a block of an index, and the value."""
    store, node = compacted_store()
    data = data_of(store)
    pointers = [
        (key, decode_cell(value))
        for key, value in node.core.tree.scan(b"o", None)
        if len(value) > 20 and not decode_cell(value).is_tombstone and decode_cell(value).inline is None
    ]
    for key, cell in pointers:  # every footer is read once
        name = parse(key)
        assert data.find_body(cell.position) is not None
        assert data.find_version(object_prefix(name.bucket, name.key or ""), name.seq) is not None
    key, cell = pointers[len(pointers) // 2]
    name = parse(key)
    for finds_by_key in (True, False):
        cold = CompactedData(store, KEYS, data.compaction)
        for file in (*cold._versions._files, *cold._bodies._files):
            assert file.footer.rows
        store.reset_traffic()
        if finds_by_key:
            version = cold.find_version(object_prefix(name.bucket, name.key or ""), name.seq)
            place = None if version is None else version.place
        else:
            place = cold.find_body(cell.position)
        assert place is not None
        cold.read_body(place)
        assert sum(store.traffic.requests.values()) == 2
    node.close()


def test_places_that_lead_nowhere_are_refused() -> None:
    """A pack that the root does not have, a body behind the end of its file."""
    store, node = compacted_store()
    data = data_of(store)
    with pytest.raises(DataError, match="pack 99"):
        data.read_body(PackPlace(0, 99, 8, 10))
    with pytest.raises(CorruptionError):
        data.read_body(PackPlace(0, 0, 8, 10**6))
    with pytest.raises(DataError, match="no file of ours"):
        data.read_body(FilePlace(0, 5, "../manifest"))
    with pytest.raises(NotFoundError):
        data.read_body(FilePlace(0, 5, "b/k/v0000000007.dat"))
    node.close()
