"""Values: the same bytes for the same object, and nothing believed that comes from a disk."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tidelog.engine.entry import MAX_METADATA_BYTES, PutObject
from tidelog.engine.wal.value import (
    CODEC_NONE,
    CODEC_ZSTD,
    ValueEncoder,
    beginning_bytes,
    decode_value,
    encode_value,
    metadata_in,
)
from tidelog.errors import DataError, InputError
from tidelog.log.frame import crc32

LSN = 77
VALUES = st.one_of(
    st.text(max_size=20),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.binary(max_size=20),
)
METADATA = st.dictionaries(st.text(max_size=10), VALUES, max_size=5)


def damage(stored: bytes, codec: int, size: int, crc: int) -> str:
    """What is said about a value that cannot be right."""
    with pytest.raises(DataError) as caught:
        decode_value(stored, codec, size, crc, LSN)
    assert f"LSN {LSN}" in str(caught.value)
    return str(caught.value)


@given(st.binary(max_size=500), METADATA, st.sampled_from(["none", "zstd"]))
def test_what_is_stored_comes_back(data: bytes, metadata: dict[str, Any], compression: Any) -> None:
    """Data and metadata survive, compressed or not."""
    entry = PutObject("b", "k", data, metadata)
    stored, codec, size, crc = ValueEncoder(compression).store(entry.data, entry.metadata)
    assert decode_value(stored, codec, size, crc, LSN) == (data, metadata)
    assert decode_value(memoryview(stored), codec, size, crc, LSN) == (data, metadata)


@given(st.binary(max_size=500), METADATA)
def test_checksum_and_size_do_not_depend_on_compression(data: bytes, metadata: dict[str, Any]) -> None:
    """Replicas with other settings agree on what an object is."""
    plain, packed = ValueEncoder().store(data, metadata), ValueEncoder("zstd", 3).store(data, metadata)
    assert (plain.size, plain.crc) == (packed.size, packed.crc)


def test_the_order_of_metadata_does_not_matter() -> None:
    """The same metadata gives the same bytes."""
    assert encode_value(b"d", {"a": 1, "b": 2}) == encode_value(b"d", {"b": 2, "a": 1})


def test_no_metadata_takes_no_bytes() -> None:
    """Four bytes say that there is none."""
    assert encode_value(b"data", {}) == b"\0\0\0\0data"


def test_what_does_not_become_smaller_is_stored_as_it_is() -> None:
    """Compression is used where it helps."""
    encoder = ValueEncoder("zstd", 1)
    assert encoder.store(bytes(1000), {}).codec == CODEC_ZSTD
    assert encoder.store(bytes(10), {}).codec == CODEC_NONE
    noise = zstandard.ZstdCompressor().compress(bytes(range(256)) * 3)
    assert encoder.store(noise, {}).codec == CODEC_NONE


def test_too_much_metadata_is_refused() -> None:
    """What would not fit into a frame beside the data is refused by name."""
    with pytest.raises(InputError, match="metadata takes"):
        encode_value(b"", {"a": "x" * MAX_METADATA_BYTES})


@given(st.binary(min_size=5, max_size=200), st.integers(0, 1 << 30), st.sampled_from(["none", "zstd"]))
def test_a_flipped_bit_is_found(data: bytes, where: int, compression: Any) -> None:
    """Whatever bit of a stored value is wrong, it is not handed out."""
    stored, codec, size, crc = ValueEncoder(compression).store(data * 3, {"a": "b"})
    flipped = bytearray(stored)
    flipped[where % len(stored)] ^= 1 << where % 8
    try:
        found = decode_value(bytes(flipped), codec, size, crc, LSN)
    except DataError:
        return
    assert found == (data * 3, {"a": "b"})  # zstd has bits that mean nothing


@given(st.binary(max_size=100), st.integers(0, 3), st.integers(0, 200))
def test_random_bytes_are_refused(stored: bytes, codec: int, size: int) -> None:
    """Bytes that are no value raise DataError and nothing else, even when their checksum is right."""
    try:
        data, metadata = decode_value(stored, codec, size, crc32(stored), LSN)
    except DataError:
        return
    assert len(data) == size
    assert encode_value(data, metadata)[4:][-size or len(stored) :] == data


@given(st.integers(0, 400_000), METADATA, st.sampled_from(["none", "zstd"]), st.integers(0, 1))
def test_metadata_is_read_from_the_beginning_of_a_value(
    size: int, metadata: dict[str, Any], how: Any, part: int
) -> None:
    """Of data that compresses well, and of data that does not."""
    data = b"compresses well" * (size // 15) if part else random.Random(size).randbytes(size)
    stored, codec, size, _ = ValueEncoder(how).store(data, metadata)
    beginning = stored[: beginning_bytes(codec, len(stored), size)]
    assert len(beginning) <= 132_000
    assert metadata_in(beginning, codec, size, LSN) == metadata


@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 300))
def test_a_beginning_of_random_bytes_is_refused(beginning: bytes, codec: int, size: int) -> None:
    """Or has metadata; nothing else is raised, and no more memory is taken than the size allows."""
    with contextlib.suppress(DataError):
        metadata_in(beginning, codec, size, LSN)


def test_a_beginning_that_ends_too_early_is_refused() -> None:
    """The caller reads the whole value then."""
    data, metadata = random.Random(1).randbytes(1000), {"text": "long" * 2000}
    stored, codec, size, _ = ValueEncoder("zstd").store(data, metadata)
    assert codec == CODEC_ZSTD
    for end in (0, 5, 12, 20):
        with pytest.raises(DataError):
            metadata_in(stored[:end], codec, size, LSN)


def test_sizes_that_do_not_add_up_are_refused() -> None:
    """The size in the cell and the lengths in the value must agree."""
    value = encode_value(b"data", {"a": 1})
    assert "cannot hold" in damage(value, CODEC_NONE, 5, crc32(value))
    assert "cannot hold" in damage(b"\0\0", CODEC_NONE, 0, crc32(b"\0\0"))


def test_metadata_that_is_none_is_refused() -> None:
    """A value whose metadata is no map, or holds what metadata cannot, is damage."""
    for packed in (b"\x93\x01\x02\x03", b"\x81\xa1a\x90", b"\x81\x01\x02", b"\xc1", b"\x81\xa1a"):
        value = len(packed).to_bytes(4, "little") + packed
        assert "metadata" in damage(value, CODEC_NONE, 0, crc32(value))


def test_a_compressed_value_that_grows_too_large_is_refused_before_it_does() -> None:
    """A few bytes that say that they are gigabytes take no memory."""
    bomb = zstandard.ZstdCompressor().compress(bytes(8 << 20))
    assert "impossible size" in damage(bomb, CODEC_ZSTD, 100, 0)


def test_a_compressed_value_must_say_its_size() -> None:
    """Without it the memory that it takes is not known beforehand."""
    stored = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    assert "impossible size" in damage(stored, CODEC_ZSTD, 96, 0)


def test_an_unknown_codec_is_named() -> None:
    """A value of a later version is not taken for damage of another kind."""
    assert "codec 7" in damage(b"\0\0\0\0", 7, 0, 0)
