"""Bodies: what is stored of an object, in the log, in a page and in the cold tier alike.

    byte   0                4
           +----------------+------------------------+------------+
           | metadata_bytes | metadata               | data       |   little-endian
           | u32            | msgpack map, sorted    |            |
           +----------------+------------------------+------------+

    codec 0   the body as it is
    codec 1   one zstd frame that says its content size

Invariants
- The same data and metadata give the same body, whatever order the metadata came in; no metadata takes no bytes.
- `crc` is that of the body before it was compressed, `size` counts the data alone: both are the same on every replica,
  however its body is stored.
- What is decoded comes from a disk or a network. No more memory is taken than `size` and the bound on metadata allow;
  what does not fit together raises DataError.
"""

from __future__ import annotations

import struct
from threading import local
from typing import Any, Final, Literal, NamedTuple

import msgspec
import zstandard

from tidelog.engine.entry import MAX_DATA_BYTES, MAX_METADATA_BYTES, checked_metadata, packed_metadata
from tidelog.errors import DataError, InputError
from tidelog.log.frame import crc32

Compression = Literal["none", "zstd"]
Buffer = bytes | memoryview

CODEC_NONE: Final = 0
CODEC_ZSTD: Final = 1
MAX_BODY_BYTES: Final = 4 + MAX_METADATA_BYTES + MAX_DATA_BYTES
# Below this, what zstd says about itself is most of what it gives.
_MIN_COMPRESSED_BYTES = 64

_LENGTH = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size
"""What a body has before its data when there is no metadata."""
_NO_METADATA = _LENGTH.pack(0)
_decode_metadata = msgspec.msgpack.Decoder(dict[str, Any]).decode
_of_thread = local()


class StoredBody(NamedTuple):
    """A body as it goes into a record or a page, and what its cell says about it."""

    stored: bytes
    codec: int
    size: int
    crc: int


def encode_body(data: bytes, metadata: dict[str, Any]) -> bytes:
    """The body of an object."""
    if not metadata:
        return _NO_METADATA + data
    packed = packed_metadata(metadata)
    return b"".join((_LENGTH.pack(len(packed)), packed, data))


class BodyEncoder:
    """Makes bodies ready to be stored. One is for one thread at a time."""

    def __init__(self, compression: Compression = "none", level: int = -1) -> None:
        self._compressor = None if compression == "none" else _compressor(level)

    def store(self, data: bytes, metadata: dict[str, Any]) -> StoredBody:
        """Compressed if that is asked for and makes it smaller."""
        body = encode_body(data, metadata) if metadata else _NO_METADATA + data
        crc = crc32(body)
        if self._compressor is not None and len(body) >= _MIN_COMPRESSED_BYTES:
            compressed = self._compressor.compress(body)
            if len(compressed) < len(body):
                return StoredBody(compressed, CODEC_ZSTD, len(data), crc)
        return StoredBody(body, CODEC_NONE, len(data), crc)


def decode_body(stored: Buffer, codec: int, size: int, crc: int, lsn: int) -> tuple[bytes, dict[str, Any]]:
    """Data and metadata; `lsn` is for the error."""
    body = stored if codec == CODEC_NONE else decompressed(stored, codec, size, lsn)
    if crc32(body) != crc:
        raise DataError(f"the checksum of the object's body does not match, LSN {lsn}")
    if len(body) == size + 4 and body[:4] == _NO_METADATA:
        return bytes(body[4:]), {}
    return _with_metadata(body, size, lsn)


def _with_metadata(body: Buffer, size: int, lsn: int) -> tuple[bytes, dict[str, Any]]:
    start = max(0, len(body) - size)
    return bytes(body[start:]), decode_metadata(body[:start], lsn)


def decode_metadata(head: Buffer, lsn: int) -> dict[str, Any]:
    """The metadata in what a body has before its data; `lsn` is for the error."""
    metadata_bytes = _LENGTH.unpack_from(head)[0] if len(head) >= LENGTH_BYTES else 0
    if len(head) != LENGTH_BYTES + metadata_bytes or metadata_bytes > MAX_METADATA_BYTES:
        raise DataError(f"{len(head)} bytes before the data cannot hold {metadata_bytes} of metadata, LSN {lsn}")
    try:
        return checked_metadata(_decode_metadata(head[LENGTH_BYTES:])) if metadata_bytes else {}
    except (msgspec.MsgspecError, InputError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"the metadata of the object cannot be read, LSN {lsn}: {error}") from error


def decompressed(stored: Buffer, codec: int, size: int, lsn: int) -> bytes:
    """A body that is compressed, as it was before. What it says about its size is compared with that of its data before
    memory is taken for it."""
    if codec != CODEC_ZSTD:
        raise DataError(f"a body has codec {codec}, which is not known, LSN {lsn}")
    try:
        content_bytes = zstandard.frame_content_size(stored)
        if not 4 <= content_bytes <= min(4 + MAX_METADATA_BYTES + size, MAX_BODY_BYTES):
            raise DataError(f"a compressed body says that it has {content_bytes} bytes, which cannot be, LSN {lsn}")
        return _decompressor().decompress(stored, max_output_size=content_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DataError(f"a compressed body cannot be read, LSN {lsn}: {error}") from error


def _compressor(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)


def _decompressor() -> zstandard.ZstdDecompressor:
    """One for each thread: readers decompress at the same time."""
    found: zstandard.ZstdDecompressor | None = getattr(_of_thread, "decompressor", None)
    if found is None:
        found = _of_thread.decompressor = zstandard.ZstdDecompressor()
    return found
