"""Blocks: whole frames, compressed together, one block after the other in an object with the codec "zstd".

    byte   0        4              12      16          20             24      28
           +--------+--------------+-------+-----------+--------------+-------+------------------------+
           | "TLZB" | first_offset | count | raw_bytes | stored_bytes | crc32 | stored                 |
           | 4s     | u64          | u32   | u32       | u32          | u32   | `stored_bytes` bytes   |
           +--------+--------------+-------+-----------+--------------+-------+------------------------+

    little-endian; `stored` is one zstd frame that declares its content size, which is `raw_bytes`

Invariants
- The crc covers the 24 bytes before it and the stored bytes, so it is checked before anything is decompressed.
- A block is 8 MiB of frames at most, except when it holds a single one. The sizes a block declares are checked against
  these bounds, the descriptor of its object and the reader's limit before memory is allocated for it.
- Decompressed, it is exactly `count` good frames from `first_offset` on.
- An object begins with "TLZB" and its start offset, or, with the codec "none", with its start offset alone.
"""

from __future__ import annotations

import struct

import msgspec
import zstandard

from tidelog.codec import MAX_OFFSET
from tidelog.cold.catalog import MAX_BLOCK_BYTES, Codec
from tidelog.cold.fetch import check_frame_size
from tidelog.errors import DataError, InputError
from tidelog.log.frame import HEADER_BYTES as FRAME_HEADER_BYTES
from tidelog.log.frame import MAX_PAYLOAD_BYTES, Frames, Stop, crc32, scan

MAGIC = b"TLZB"
# What a writer should aim at: large enough to compress well, small enough to be fetched for a single message.
TARGET_BLOCK_BYTES = 1 << 20
DEFAULT_LEVEL = 3

_CLAIMS = struct.Struct("<4sQIII")
_CRC = struct.Struct("<I")
_RAW_BEGINNING = struct.Struct("<QI")
HEADER_BYTES = _CLAIMS.size + _CRC.size
_MOST_WINDOW_BYTES = 1 << 31
MAX_FRAME_BYTES = FRAME_HEADER_BYTES + MAX_PAYLOAD_BYTES

Buffer = bytes | memoryview


class BlockHeader(msgspec.Struct, frozen=True, gc=False):
    """What a block says about itself: sizes are within bounds, the rest is known to be true when it is decoded."""

    first_offset: int
    count: int
    raw_bytes: int
    stored_bytes: int

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.count

    @property
    def size(self) -> int:
        """How many bytes the whole block has in its object."""
        return HEADER_BYTES + self.stored_bytes


def block_compressor(level: int = DEFAULT_LEVEL) -> zstandard.ZstdCompressor:
    """For `encode_block`. One is for one thread at a time."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)


def encode_block(frames: Buffer, first_offset: int, count: int, compressor: zstandard.ZstdCompressor) -> bytes:
    """A block of `count` whole frames, the first of which carries `first_offset`."""
    if not _is_possible(count, len(frames)):
        raise InputError(f"{count} frames of {len(frames)} bytes together are not a block")
    stored = compressor.compress(frames)
    claims = _CLAIMS.pack(MAGIC, first_offset, count, len(frames), len(stored))
    return b"".join((claims, _CRC.pack(crc32(stored, crc32(claims))), stored))


def parse_header(
    buffer: Buffer,
    position: int,
    offset: int,
    most_raw_bytes: int | None = None,
    most_frame_bytes: int = MAX_FRAME_BYTES,
) -> BlockHeader | None:
    """The header of the block at `position`, which must begin at `offset`; None when the buffer ends within it.

    DataError when no block begins there, or one of more than `most_raw_bytes`, which is what its whole object has, or
    of a frame that is larger than `most_frame_bytes`.
    """
    if len(buffer) - position < HEADER_BYTES:
        return None
    magic, first_offset, count, raw_bytes, stored_bytes = _CLAIMS.unpack_from(buffer, position)
    if magic != MAGIC:
        raise DataError("no block at this byte")
    if first_offset != offset:
        raise DataError(f"a block with offset {first_offset} where {offset} is next")
    if not _is_possible(count, raw_bytes) or not 0 < stored_bytes <= _most_stored(raw_bytes):
        raise DataError("block header has impossible sizes")
    if most_raw_bytes is not None and raw_bytes > most_raw_bytes:
        raise DataError(f"a block of {raw_bytes} bytes in an object of {most_raw_bytes}")
    if first_offset + count - 1 > MAX_OFFSET:
        raise DataError("a block with impossible offsets")
    if raw_bytes > MAX_BLOCK_BYTES:
        check_frame_size(raw_bytes, most_frame_bytes)
    return BlockHeader(first_offset, count, raw_bytes, stored_bytes)


def check_block(block: Buffer) -> None:
    """Compares the checksum of a whole block, header included; DataError when it does not match."""
    view = memoryview(block)
    (expected,) = _CRC.unpack_from(view, _CLAIMS.size)
    if crc32(view[HEADER_BYTES:], crc32(view[: _CLAIMS.size])) != expected:
        raise DataError("block checksum does not match")


def decode_block(header: BlockHeader, block: Buffer) -> Frames:
    """The frames of a whole block, checked one by one; DataError says what is wrong with it."""
    if len(block) != header.size:
        raise DataError("truncated block")
    check_block(block)
    stored = memoryview(block)[HEADER_BYTES:]
    _check_content_size(stored, header.raw_bytes)
    if header.raw_bytes > MAX_BLOCK_BYTES:
        _check_single_frame(stored, header)
    raw = _decompressed(stored, header.raw_bytes)
    frames, _, stop = scan(raw, 0, header.first_offset)
    if stop is not Stop.END:
        raise DataError(f"a block with {stop.reason} inside")
    if frames.count != header.count:
        raise DataError(f"a block that holds {frames.count} messages and says {header.count}")
    return frames


def sniff_codec(first_bytes: Buffer, start_offset: int) -> Codec | None:
    """The codec of an object that begins with these bytes (twelve are enough); None when it is no tidelog object.

    One start offset has the bytes of both beginnings. There the length after it decides: as that of a frame it is
    impossible.
    """
    if len(first_bytes) < _RAW_BEGINNING.size:
        return None
    offset, length = _RAW_BEGINNING.unpack_from(first_bytes)
    if offset == start_offset and 0 < length <= MAX_PAYLOAD_BYTES:
        return "none"
    if first_bytes[:12] == MAGIC + start_offset.to_bytes(8, "little"):
        return "zstd"
    return None


def _is_possible(count: int, raw_bytes: int) -> bool:
    """Whether so many frames can have so many bytes, and may be one block."""
    most = MAX_FRAME_BYTES if count == 1 else MAX_BLOCK_BYTES
    return count > 0 and count * (FRAME_HEADER_BYTES + 1) <= raw_bytes <= most


def _most_stored(raw_bytes: int) -> int:
    """More than zstd ever makes of so many bytes."""
    return raw_bytes + raw_bytes // 128 + 1024


def _check_single_frame(stored: memoryview, header: BlockHeader) -> None:
    """A block of one large frame: its first bytes must say the same, before memory is taken for all of them."""
    window_bytes = min(2 * header.raw_bytes, _MOST_WINDOW_BYTES)  # zstd takes as much as its frame asks for
    try:
        with zstandard.ZstdDecompressor(max_window_size=window_bytes).stream_reader(stored) as reader:
            head = reader.read(FRAME_HEADER_BYTES)
    except zstandard.ZstdError as error:
        raise DataError("block cannot be decompressed") from error
    offset, length = _RAW_BEGINNING.unpack_from(head) if len(head) == FRAME_HEADER_BYTES else (None, 0)
    if offset != header.first_offset or FRAME_HEADER_BYTES + length != header.raw_bytes:
        raise DataError("corrupted block: the size of its frame does not match its header")


def _check_content_size(stored: memoryview, raw_bytes: int) -> None:
    """zstd allocates as much memory as its frame asks for: the size is checked first."""
    try:
        found = zstandard.frame_content_size(stored)
    except zstandard.ZstdError as error:
        raise DataError("block cannot be decompressed") from error
    if found != raw_bytes:
        raise DataError("corrupted block: decompressed size does not match its header")


def _decompressed(stored: memoryview, raw_bytes: int) -> bytes:
    try:
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DataError("block cannot be decompressed") from error
    if len(raw) != raw_bytes:
        raise DataError("corrupted block: decompressed size does not match its header")
    return raw
