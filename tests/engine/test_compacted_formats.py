"""The page of formats is held to the bytes of compacted data."""

from __future__ import annotations

import msgspec
from tests.engine.stations import KEYS
from tests.oracles.blob_file import packed
from tests.test_docs import FORMATS, block, hex_block

from tidelog.engine.cold.manifest import decode_manifest, encode_manifest
from tidelog.engine.sst.blob_file import (
    BlobPointer,
    FilePointer,
    check_blob_file,
    decode_value_pointer,
    encode_value_pointer,
    value_key,
)
from tidelog.engine.sst.sorted_index import decode_compaction, encode_compaction
from tidelog.engine.sst.sstable import opened_in_memory
from tidelog.store.keys import CheckpointId, CompactedId, digest_of

ROOT = decode_compaction(block(FORMATS, "text compaction").encode(), KEYS)


def test_the_bytes_of_a_pack_are_those_of_the_page() -> None:
    """Written so and read so, and its name is that which the root has."""
    shown = hex_block("hex blob file")
    assert packed([(200, b"paid"), (520, b"sent!")]).data == shown
    assert [entry.position for entry in check_blob_file(shown)] == [200, 520]
    assert ROOT.blob_files[0].key == KEYS.compacted(CompactedId("blob", 1, digest_of(shown)))
    assert ROOT.blob_files[0].size == len(shown)


def test_the_bytes_of_places_are_those_of_the_page() -> None:
    """Both kinds."""
    for shown, place in (
        (hex_block("hex place in a blob file"), BlobPointer(0, 0, 12, 5)),
        (hex_block("hex place of a file"), FilePointer(1, 70_000, "shop/a_2fb/v0000000007.dat")),
    ):
        assert decode_value_pointer(shown) == place
        assert encode_value_pointer(place) == shown


def test_the_bytes_of_a_row_file_are_those_of_the_page() -> None:
    """What the page shows is read as a file of the root that it shows. (zstd may compress otherwise one day.)"""
    file = opened_in_memory(hex_block("hex row file"), ROOT.values[0], "values")
    assert list(file.rows()) == [(value_key(520), hex_block("hex place in a blob file"))]


def test_the_root_is_that_of_the_page() -> None:
    """To the letter, and so is the manifest that names it."""
    shown = block(FORMATS, "text compaction").encode()
    encoded = encode_compaction(ROOT)
    assert encoded.data == shown
    text = block(FORMATS, "text manifest 2").encode()
    manifest = decode_manifest(text, "manifest", KEYS)
    assert encode_manifest(manifest) == text
    assert manifest.compacted is not None
    assert manifest.compacted == encoded.stored(KEYS, ROOT, manifest.compacted.created_us)
    named = {field for field in msgspec.structs.asdict(ROOT) if f"`{field}`" in FORMATS}
    assert named == set(msgspec.structs.asdict(ROOT))


def test_the_names_are_those_of_the_page() -> None:
    """To the letter."""
    names = [line.split()[0] for line in block(FORMATS, "text compacted names").splitlines()]
    assert ROOT.blob_files
    assert names == [
        KEYS.data_file("shop", "a/b", 7),
        ROOT.blob_files[0].key,
        ROOT.versions[0].key,
        ROOT.values[0].key,
        KEYS.compacted(CompactedId("root", 2, encode_compaction(ROOT).digest)),
        KEYS.checkpoint(CheckpointId(900, 1841, 3, "0d" * 16)),
    ]
