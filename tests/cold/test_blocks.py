"""Compressed blocks: what goes in comes out, and whatever else is in the bytes is refused within bounds."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tidelog.cold import blocks
from tidelog.cold.blocks import HEADER_BYTES, block_compressor, decode_block, encode_block, parse_header, sniff_codec
from tidelog.errors import DataError, InputError
from tidelog.log.frame import encode, encode_many

FORMATS = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text("utf-8")
# The one start offset whose eight bytes are those that a compressed object begins with as well.
AMBIGUOUS_OFFSET = int.from_bytes(blocks.MAGIC * 2, "little")


def block_of(payloads: list[bytes], first_offset: int = 0) -> bytes:
    frames = encode_many(first_offset, payloads)
    return encode_block(frames.buffer, first_offset, frames.count, block_compressor())


def decoded(block: bytes, offset: int = 0) -> list[bytes]:
    header = parse_header(block, 0, offset)
    assert header is not None
    return decode_block(header, block).payloads()


def forged(stored: bytes, *, first_offset: int = 0, count: int = 1, raw_bytes: int) -> bytes:
    """A block with a right checksum over any claims."""
    claims = struct.pack("<4sQIII", b"TLZB", first_offset, count, raw_bytes, len(stored))
    return claims + struct.pack("<I", zlib.crc32(claims + stored)) + stored


@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=50), st.integers(0, 2**63 - 52))
def test_what_goes_in_comes_out(payloads: list[bytes], first_offset: int) -> None:
    """Any payloads at any offset are the same after encoding and decoding."""
    assert decoded(block_of(payloads, first_offset), first_offset) == payloads


def test_the_header_tells_where_the_next_block_begins() -> None:
    """Blocks stand one after the other, each with the offset behind the one before."""
    first = block_of([b"a", b"bb"], 5)
    data = first + block_of([b"c"], 7)
    header = parse_header(data, 0, 5)
    assert header is not None
    assert (header.next_offset, header.size) == (7, len(first))
    behind = parse_header(data, header.size, header.next_offset)
    assert behind is not None
    assert behind.next_offset == 8


def test_a_header_that_is_not_all_there_is_asked_for_again() -> None:
    """A buffer that ends inside a header is not damage: the rest may be in the next range."""
    block = block_of([b"a"])
    assert parse_header(block[: HEADER_BYTES - 1], 0, 0) is None
    assert parse_header(block, len(block), 1) is None


@pytest.mark.parametrize("position", range(HEADER_BYTES + 10))
def test_every_flipped_bit_is_found(position: int) -> None:
    """Wherever a bit of a block changes, it is refused."""
    block = bytearray(block_of([b"payload" * 20] * 10))
    block[position] ^= 0x10
    with pytest.raises(DataError):
        decoded(bytes(block))


def test_a_block_that_is_cut_short_is_refused() -> None:
    """The whole block must be there."""
    block = block_of([b"payload" * 20] * 10)
    header = parse_header(block, 0, 0)
    assert header is not None
    with pytest.raises(DataError, match="truncated"):
        decode_block(header, block[:-1])


def test_another_offset_is_refused() -> None:
    """A block in the wrong place is not taken for the one that must come."""
    with pytest.raises(DataError, match="offset 3 where 4 is next"):
        parse_header(block_of([b"a"], 3), 0, 4)


@pytest.mark.parametrize(
    ("count", "raw_bytes"),
    [(0, 17), (1, 16), (2, 33), (2, (8 << 20) + 1), (1, (1 << 30) + 17), (2**32 - 1, 2**32 - 1)],
)
def test_impossible_sizes_are_refused_before_anything_is_decompressed(count: int, raw_bytes: int) -> None:
    """Claims over the bounds of the format are not believed, whatever the checksum says."""
    with pytest.raises(DataError, match="impossible sizes"):
        parse_header(forged(b"x", count=count, raw_bytes=raw_bytes), 0, 0)


def test_a_bomb_is_refused_without_taking_memory() -> None:
    """Stored bytes that decompress to far more than the block says cost nothing."""
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="decompressed size"):
            decoded(forged(bomb, raw_bytes=1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_of_unknown_size_is_refused() -> None:
    """A zstd frame that does not say how large it is was not written here."""
    raw = encode(0, b"payload")
    stored = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    with pytest.raises(DataError):
        decoded(forged(stored, raw_bytes=len(raw)))


@pytest.mark.parametrize("stored", [b"", b"\x28\xb5\x2f\xfd", b"not zstd at all", bytes(64)])
def test_what_zstd_cannot_read_is_refused(stored: bytes) -> None:
    """Nonsense with a right checksum is an error of ours."""
    with pytest.raises(DataError):
        decoded(forged(stored, raw_bytes=64))


def test_bytes_behind_the_zstd_frame_are_refused() -> None:
    """Nothing can be hidden in a block."""
    raw = encode(0, b"payload" * 100)
    stored = block_compressor().compress(raw) + b"more"
    with pytest.raises(DataError):
        decoded(forged(stored, raw_bytes=len(raw)))


@pytest.mark.parametrize(
    ("raw", "count", "reason"),
    [
        (encode_many(0, [b"a", b"b"]).buffer, 1, "holds 2 messages and says 1"),
        (encode_many(0, [b"a", b"bcdefghijklmnopqrstuv"]).buffer, 3, "holds 2 messages and says 3"),
        (encode(1, b"a"), 1, "not the next one"),
        (encode(0, b"a") + b"rest", 1, "cut short"),
        (encode(0, b"a")[:-1] + b"b", 1, "checksum"),
    ],
)
def test_the_frames_inside_are_checked(raw: bytes, count: int, reason: str) -> None:
    """Exactly the number of good frames that the block says, from its first offset on."""
    with pytest.raises(DataError, match=reason):
        decoded(forged(block_compressor().compress(raw), count=count, raw_bytes=len(raw)))


def test_offsets_do_not_run_over() -> None:
    """A block cannot say that it goes past the last offset there can be."""
    raw = bytes(100)
    with pytest.raises(DataError, match="impossible offsets"):
        parse_header(forged(raw, first_offset=2**64 - 1, count=2, raw_bytes=100), 0, 2**64 - 1)


def test_random_bytes_are_refused() -> None:
    """No bytes make the parser raise anything but its own error."""
    random_bytes = random.Random(7)
    for _ in range(500):
        stored = random_bytes.randbytes(random_bytes.randrange(1, 80))
        with pytest.raises(DataError):
            decoded(forged(stored, count=random_bytes.randrange(3), raw_bytes=random_bytes.randrange(1, 100)))


def test_too_much_for_a_block_is_refused_when_writing() -> None:
    """What a reader would refuse is never written."""
    frames = encode_many(0, [bytes(5 << 20), bytes(5 << 20)])
    with pytest.raises(InputError, match="not a block"):
        encode_block(frames.buffer, 0, 2, block_compressor())


def test_a_single_message_may_be_larger_than_a_block() -> None:
    """A message over the bound is a block of its own."""
    payload = bytes(9 << 20)
    assert decoded(block_of([payload])) == [payload]


@pytest.mark.parametrize("start_offset", [0, 7, 2**64 - 1, int.from_bytes(b"TLZB", "little"), AMBIGUOUS_OFFSET])
def test_an_object_says_what_it_is(start_offset: int) -> None:
    """The first bytes tell raw frames from blocks, whatever the offset."""
    assert sniff_codec(encode(start_offset, b"a"), start_offset) == "none"
    assert sniff_codec(block_of([b"a"], start_offset), start_offset) == "zstd"


@pytest.mark.parametrize("first_bytes", [b"", b"TLZB", bytes(12), b"PK\x03\x04aaaaaaaaaaaa", encode(8, b"a")])
def test_an_object_that_is_not_ours_says_nothing(first_bytes: bytes) -> None:
    """Bytes that begin neither way are not guessed at."""
    assert sniff_codec(first_bytes, 7) is None


def test_the_bytes_of_a_block_are_those_of_the_formats_page() -> None:
    """A reader written from the page alone reads what the code writes."""
    (text,) = re.findall(r"^```hex block\n(.*?)^```$", FORMATS, re.MULTILINE | re.DOTALL)
    shown = bytes.fromhex("".join(line.split("  ")[0] for line in text.splitlines()))
    assert decoded(shown, 42) == [b"aaaaaaaa", b"bbbbbbbb"]
    # What zstd makes of it may change with its release; what we write around it may not.
    assert shown[:20] == block_of([b"aaaaaaaa", b"bbbbbbbb"], 42)[:20]


def peak_bytes_of(block: bytes, most_raw_bytes: int | None = None) -> int:
    """What it costs to refuse a block."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            decode_block_of(block, most_raw_bytes)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def decode_block_of(block: bytes, most_raw_bytes: int | None) -> None:
    header = parse_header(block, 0, 0, most_raw_bytes)
    assert header is not None
    decode_block(header, block)


def test_a_large_block_that_holds_no_frame_costs_little() -> None:
    """Taken before it was refused: as much memory as it claimed, up to 1 GiB for some KiB."""
    content = bytes(48 << 20)
    block = forged(block_compressor().compress(content), raw_bytes=len(content))
    assert len(block) < 1 << 16
    assert peak_bytes_of(block) < 8 << 20


def test_a_block_is_not_larger_than_its_object() -> None:
    """What the descriptor says of all frames bounds each block, before anything is decompressed."""
    payload = bytes(48 << 20)
    block = block_of([payload])
    assert decoded(block) == [payload]
    assert peak_bytes_of(block, most_raw_bytes=len(payload)) < 1 << 20
    with pytest.raises(DataError, match=r"a block of .* bytes in an object of"):
        parse_header(block, 0, 0, len(payload))
    assert parse_header(block, 0, 0, len(payload) + 16) is not None
