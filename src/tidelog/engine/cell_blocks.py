"""Blocks of tree cells in order of key, for states in the store and for what a restore keeps on the disk meanwhile.

    byte   0        4       8           12             16      20
           +--------+-------+-----------+--------------+-------+----------------------+
           | "TCKB" | count | raw_bytes | stored_bytes | crc32 | stored: one zstd     |
           | 4s     | u32   | u32       | u32          | u32   | frame of raw_bytes   |
           +--------+-------+-----------+--------------+-------+----------------------+

    raw: cells one after the other, each   key length u16, value length u16, key, value        little-endian

Invariants
- The crc covers the 16 bytes before it and what is stored: it is checked before anything is decompressed.
- Sizes are compared with bounds before memory is taken for them. Keys grow from cell to cell, across blocks too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import zstandard

from tidelog.errors import DataError
from tidelog.log.frame import crc32

MAGIC = b"TCKB"
TARGET_BLOCK_BYTES = 1 << 20
# A block is ended by the cell that fills it, and a cell has 128 KiB at most.
MAX_BLOCK_BYTES = TARGET_BLOCK_BYTES + (1 << 17) + 4

_CLAIMS = struct.Struct("<4sIII")
_CRC = struct.Struct("<I")
_LENGTHS = struct.Struct("<HH")
HEADER_BYTES = _CLAIMS.size + _CRC.size

Row = tuple[bytes, bytes]
Buffer = bytes | memoryview


class CellBlock:
    """A block in bytes, with what it holds."""

    __slots__ = ("count", "data", "first_key", "last_key", "raw")

    def __init__(self, data: bytes, raw: bytes, count: int, first_key: bytes, last_key: bytes) -> None:
        self.data = data
        self.raw = raw
        self.count = count
        self.first_key = first_key
        self.last_key = last_key


def encode_blocks(rows: Iterable[Row], level: int, target_block_bytes: int = TARGET_BLOCK_BYTES) -> Iterator[CellBlock]:
    """Rows, which are in order, as blocks of about that size. One block is in memory."""
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)
    parts: list[bytes] = []
    size, first_key, key = 0, b"", b""
    for key, value in rows:
        if not parts:
            first_key = key
        parts += (_LENGTHS.pack(len(key), len(value)), key, value)
        size += 4 + len(key) + len(value)
        if size >= target_block_bytes:
            yield _encoded(parts, first_key, key, compressor)
            parts, size = [], 0
    if parts:
        yield _encoded(parts, first_key, key, compressor)


def _encoded(parts: list[bytes], first_key: bytes, last_key: bytes, compressor: zstandard.ZstdCompressor) -> CellBlock:
    raw = b"".join(parts)
    stored = compressor.compress(raw)
    claims = _CLAIMS.pack(MAGIC, len(parts) // 3, len(raw), len(stored))
    data = b"".join((claims, _CRC.pack(crc32(stored, crc32(claims))), stored))
    return CellBlock(data, raw, len(parts) // 3, first_key, last_key)


def block_bytes(header: Buffer) -> int:
    """How many bytes the block with this header has; DataError when there is none."""
    if len(header) < HEADER_BYTES:
        raise DataError("a block that is cut short")
    magic, count, raw_bytes, stored_bytes = _CLAIMS.unpack_from(header)
    if magic != MAGIC:
        raise DataError("no block where one must begin")
    if not 0 < count * 5 <= raw_bytes <= MAX_BLOCK_BYTES or not 0 < stored_bytes <= raw_bytes + raw_bytes // 64 + 1024:
        raise DataError("a block with impossible sizes")
    return HEADER_BYTES + int(stored_bytes)


def decode_block(block: Buffer) -> bytes:
    """The cells of a whole block, as they were before they were compressed."""
    view = memoryview(block)
    if block_bytes(view) != len(view):
        raise DataError("a block that is cut short")
    _, _, raw_bytes, _ = _CLAIMS.unpack_from(view)
    (expected,) = _CRC.unpack_from(view, _CLAIMS.size)
    stored = view[HEADER_BYTES:]
    if crc32(stored, crc32(view[: _CLAIMS.size])) != expected:
        raise DataError("a block with a checksum that does not match")
    try:
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise DataError("a block that decompresses to another size than it says")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DataError("a block that cannot be decompressed") from error


def rows_in(raw: bytes, count: int, after_key: bytes) -> Iterator[Row]:
    """The rows of a block; the first key must be behind `after_key`."""
    at, end = 0, len(raw)
    for _ in range(count):
        if at + 4 > end:
            raise DataError("a block with fewer rows than it says")
        key_bytes, value_bytes = _LENGTHS.unpack_from(raw, at)
        at += 4
        key = raw[at : at + key_bytes]
        at += key_bytes + value_bytes
        if at > end:
            raise DataError("a block with a row that is cut short")
        if key <= after_key:
            raise DataError("a block with rows that are not in order")
        after_key = key
        yield key, raw[at - value_bytes : at]
    if at != end:
        raise DataError("a block with more rows than it says")


def count_of(block: Buffer) -> int:
    """How many rows a block says that it has."""
    return int(_CLAIMS.unpack_from(block)[1])
