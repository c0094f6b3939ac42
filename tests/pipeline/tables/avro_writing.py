"""Writes Avro container files, as other programs do, for tests of their reader."""

from __future__ import annotations

import bz2
import json
import lzma
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import zstandard

SYNC = bytes(range(16))


def long(number: int) -> bytes:
    """A zigzag varint."""
    number = (number << 1) ^ (number >> 63)
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _deflated(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def _snappy(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="snappy", asbytes=True)
    return packed + zlib.crc32(data).to_bytes(4, "big")


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": bytes,
    "deflate": _deflated,
    "zstandard": zstandard.ZstdCompressor().compress,
    "snappy": _snappy,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


def avro_file(
    schema: dict[str, Any] | str, rows: Sequence[bytes], *, codec: str = "null", rows_per_block: int = 2
) -> bytes:
    """A file with these rows, which are encoded already."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    metadata = {"avro.schema": text.encode(), "avro.codec": codec.encode()}
    pairs = b"".join(long(len(name)) + name.encode() + long(len(one)) + one for name, one in metadata.items())
    found = b"Obj\x01" + long(len(metadata)) + pairs + long(0) + SYNC
    for at in range(0, len(rows), rows_per_block):
        block = rows[at : at + rows_per_block]
        found += avro_block(len(block), CODECS[codec](b"".join(block)))
    return found


def avro_block(rows: int, stored: bytes) -> bytes:
    """A block that claims so many rows."""
    return long(rows) + long(len(stored)) + stored + SYNC
