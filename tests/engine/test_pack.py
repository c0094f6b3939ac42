"""Packs: bodies come back from where the pack says, and every damage is noticed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.stations import KEYS, new_store

from tidelog.engine.pack import check_pack, encode_pack, read_directory
from tidelog.errors import CorruptionError, InputError
from tidelog.log.frame import crc32
from tidelog.testing import FaultyStore
from tidelog.tier.compacted_names import CompactedId

BODIES = st.dictionaries(st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=80), min_size=1, max_size=40).map(
    lambda bodies: sorted(bodies.items())
)


def written(store: FaultyStore, bodies: list[tuple[int, bytes]]) -> str:
    """The key of a pack with these bodies."""
    encoded = encode_pack(bodies)
    key = KEYS.compacted(CompactedId("pack", 1, encoded.digest))
    store.put(key, encoded.data)
    return key


@given(BODIES)
def test_what_was_packed_is_found(bodies: list[tuple[int, bytes]]) -> None:
    """Each body is at its place, and the pack's own directory says the same."""
    encoded = encode_pack(bodies)
    assert [place.position for place in encoded.places] == [position for position, _ in bodies]
    for (_, stored), (_, byte, size) in zip(bodies, encoded.places, strict=True):
        assert encoded.data[byte : byte + size] == stored
    directory = check_pack(encoded.data)
    assert [entry[:3] for entry in directory] == encoded.places
    assert [entry.crc for entry in directory] == [crc32(stored) for _, stored in bodies]
    assert encode_pack(bodies) == encoded
    store = new_store()
    assert read_directory(store, written(store, bodies), len(encoded.data)) == directory


def test_a_large_directory_takes_two_requests() -> None:
    """A small one comes with the end of the pack."""
    store, chance = new_store(), random.Random(1)
    for count, requests in ((100, 1), (9000, 2)):
        bodies = [(number, chance.randbytes(5)) for number in range(count)]
        key = written(store, bodies)
        store.reset_traffic()
        assert len(read_directory(store, key, len(store.contents()[key]))) == count
        assert store.traffic.requests["read_range"] == requests


def test_every_flipped_bit_is_noticed() -> None:
    """Every byte of a pack is covered, and the error names the file."""
    good = encode_pack([(number * 10, b"body-%d" % number) for number in range(7)]).data
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError) as caught:
            check_pack(bytes(bad), "the-pack")
        assert str(caught.value.path) == "the-pack"


def test_a_damaged_directory_is_refused() -> None:
    """Also where only the directory is read; so is a pack of another size."""
    store = new_store()
    key = written(store, [(number, b"body") for number in range(5)])
    good = store.contents()[key]
    for byte in range(len(good) - 5 * 16 - 16, len(good)):
        bad = bytearray(good)
        bad[byte] ^= 16
        store.put(key, bytes(bad))
        with pytest.raises(CorruptionError):
            read_directory(store, key, len(good))
    for data in (b"", good[:-1], good + b"x", good[:12]):
        store.put(key, data)
        with pytest.raises(CorruptionError):
            read_directory(store, key, len(good))
        with pytest.raises(CorruptionError):
            check_pack(data)


@pytest.mark.parametrize("bodies", [[], [(2, b"a"), (1, b"b")], [(1, b"a"), (1, b"b")], [(1, b"")]])
def test_bodies_that_cannot_be_a_pack(bodies: list[tuple[int, bytes]]) -> None:
    """None at all, out of order, a position twice, an empty one."""
    with pytest.raises(InputError):
        encode_pack(bodies)
