"""Blocks of tree cells in key order, used by sorted files and by the spill files of a restore.

    byte   0        4       8           12             16      20
           +--------+-------+-----------+--------------+-------+----------------------+
           | "TCKB" | count | raw_bytes | stored_bytes | crc32 | stored: one zstd     |
           | 4s     | u32   | u32       | u32          | u32   | frame of raw_bytes   |
           +--------+-------+-----------+--------------+-------+----------------------+

    raw: cells one after the other, each   key length u16, value length u16, key, value        little-endian

Invariants
- The crc covers the 16 bytes before it and the stored bytes. It is verified before decompression.
- Sizes are checked against bounds before memory is allocated. Keys increase strictly from cell to cell, across blocks
  too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import zstandard

from tidelog.errors import DataError
from tidelog.log.frame import crc32

MAGIC = b"TCKB"
TARGET_BLOCK_BYTES = 1 << 20
# The cell that fills a block ends it, and a cell has at most 128 KiB.
MAX_BLOCK_BYTES = TARGET_BLOCK_BYTES + (1 << 17) + 4

_CLAIMS = struct.Struct("<4sIII")
_CRC = struct.Struct("<I")
_LENGTHS = struct.Struct("<HH")
HEADER_BYTES = _CLAIMS.size + _CRC.size

Row = tuple[bytes, bytes]
Buffer = bytes | memoryview


class CellBlock:
    """An encoded block, its number of rows and its key range."""

    __slots__ = ("count", "data", "first_key", "last_key", "raw")

    def __init__(self, data: bytes, raw: bytes, count: int, first_key: bytes, last_key: bytes) -> None:
        self.data = data
        self.raw = raw
        self.count = count
        self.first_key = first_key
        self.last_key = last_key


class PackedRows(NamedTuple):
    """The rows of a block before compression, their number and their key range."""

    raw: bytes
    rows: int
    first_key: bytes
    last_key: bytes


def pack_rows(rows: Iterable[Row], target_block_bytes: int = TARGET_BLOCK_BYTES) -> Iterator[PackedRows]:
    """Packs rows, given in order, into pieces of about that size. One is in memory at a time."""
    parts: list[bytes] = []
    size, first_key, key = 0, b"", b""
    for key, value in rows:
        if not parts:
            first_key = key
        parts += (_LENGTHS.pack(len(key), len(value)), key, value)
        size += 4 + len(key) + len(value)
        if size >= target_block_bytes:
            yield PackedRows(b"".join(parts), len(parts) // 3, first_key, key)
            parts, size = [], 0
    if parts:
        yield PackedRows(b"".join(parts), len(parts) // 3, first_key, key)


def encode_packed_blocks(blocks: Iterable[PackedRows], level: int) -> Iterator[CellBlock]:
    """Encodes rows that are packed, as blocks. One block is in memory at a time."""
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)
    for packed in blocks:
        yield _encoded(packed, compressor)


def _encoded(packed: PackedRows, compressor: zstandard.ZstdCompressor) -> CellBlock:
    raw, count, first_key, last_key = packed
    stored = compressor.compress(raw)
    claims = _CLAIMS.pack(MAGIC, count, len(raw), len(stored))
    data = b"".join((claims, _CRC.pack(crc32(stored, crc32(claims))), stored))
    return CellBlock(data, raw, count, first_key, last_key)


def block_bytes(header: Buffer) -> int:
    """Returns the size in bytes of the block with this header; DataError if the header is invalid."""
    if len(header) < HEADER_BYTES:
        raise DataError("truncated block")
    magic, count, raw_bytes, stored_bytes = _CLAIMS.unpack_from(header)
    if magic != MAGIC:
        raise DataError("no block at this byte")
    if not 0 < count * 5 <= raw_bytes <= MAX_BLOCK_BYTES or not 0 < stored_bytes <= raw_bytes + raw_bytes // 64 + 1024:
        raise DataError("block header has impossible sizes")
    return HEADER_BYTES + int(stored_bytes)


def decode_block(block: Buffer) -> bytes:
    """Returns the decompressed cells of a whole block."""
    view = memoryview(block)
    if block_bytes(view) != len(view):
        raise DataError("truncated block")
    _, _, raw_bytes, _ = _CLAIMS.unpack_from(view)
    (expected,) = _CRC.unpack_from(view, _CLAIMS.size)
    stored = view[HEADER_BYTES:]
    if crc32(stored, crc32(view[: _CLAIMS.size])) != expected:
        raise DataError("block checksum does not match")
    try:
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise DataError("corrupted block: decompressed size does not match its header")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DataError("block cannot be decompressed") from error


def rows_in(raw: bytes, count: int, after_key: bytes) -> Iterator[Row]:
    """Yields the rows of a block; the first key must be greater than `after_key`."""
    at, end = 0, len(raw)
    for _ in range(count):
        if at + 4 > end:
            raise DataError("block has fewer rows than its header says")
        key_bytes, value_bytes = _LENGTHS.unpack_from(raw, at)
        at += 4
        key = raw[at : at + key_bytes]
        at += key_bytes + value_bytes
        if at > end:
            raise DataError("truncated row in a block")
        if key <= after_key:
            raise DataError("rows of a block are not in order")
        after_key = key
        yield key, raw[at - value_bytes : at]
    if at != end:
        raise DataError("block has more rows than its header says")


def row_at(raw: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Returns the row at an offset: key, value, and the offset of the next row."""
    key_at = at + _LENGTHS.size
    if key_at > len(raw):
        raise DataError("truncated row in a block")
    key_bytes, value_bytes = _LENGTHS.unpack_from(raw, at)
    value_at = key_at + key_bytes
    end = value_at + value_bytes
    if end > len(raw):
        raise DataError("truncated row in a block")
    return raw[key_at:value_at], raw[value_at:end], end


def count_of(block: Buffer) -> int:
    """Returns the number of rows that the block's header states."""
    return int(_CLAIMS.unpack_from(block)[1])


def joined(rows: Iterable[bytes], enough_bytes: int) -> Iterator[bytes]:
    """Rows of several blocks together, about so many bytes at a time."""
    waiting: list[bytes] = []
    size = 0
    for raw in rows:
        waiting.append(raw)
        size += len(raw)
        if size >= enough_bytes:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
