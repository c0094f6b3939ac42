"""Values: the stored form of an object, the same in the WAL, in a page and in the cold tier.

    byte   0                4
           +----------------+------------------------+------------+
           | metadata_bytes | metadata               | data       |   little-endian
           | u32            | msgpack map, sorted    |            |
           +----------------+------------------------+------------+

    codec 0   the value as it is
    codec 1   one zstd frame that states its content size
    codec 2   a reference to a value file, which has the value as it is, in blocks (`engine/sst/value_file.py`)

Invariants
- The same data and metadata produce the same value, in whatever order the metadata came; no metadata takes no bytes.
- `crc` covers the value before compression, `size` counts the data alone: both are the same on every replica, however
  its value is stored.
- Input of a decoder comes from a disk or a network. It allocates no more memory than `size` and the bound on metadata
  allow; inconsistent input raises DataError.
"""

from __future__ import annotations

import struct
from threading import local
from typing import Any, Final, Literal, NamedTuple

import msgspec
import zstandard

from tidelog.engine.entry import (
    MAX_DATA_BYTES,
    MAX_METADATA_BYTES,
    PutFile,
    PutObject,
    checked_metadata,
    packed_metadata,
)
from tidelog.errors import DataError, InputError
from tidelog.log.frame import crc32

Compression = Literal["none", "zstd"]
Buffer = bytes | memoryview

CODEC_NONE: Final = 0
CODEC_ZSTD: Final = 1
CODEC_FILE: Final = 2
MAX_VALUE_BYTES: Final = 4 + MAX_METADATA_BYTES + MAX_DATA_BYTES
# Below this size, the overhead of a zstd frame outweighs its gain.
_MIN_COMPRESSED_BYTES = 64
# The header of a frame, and its first block at its largest, with its own header.
_FIRST_BLOCK_BYTES = 18 + 3 + (128 << 10)

_LENGTH = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size
"""What a value has before its data when there is no metadata."""
_NO_METADATA = _LENGTH.pack(0)
_decode_metadata = msgspec.msgpack.Decoder(dict[str, Any]).decode
_of_thread = local()


class StoredValue(NamedTuple):
    """A value as stored in a record or a page, and the fields of its cell."""

    stored: bytes
    codec: int
    size: int
    crc: int


NO_VALUE: Final = StoredValue(b"", 0, 0, 0)


def encode_value(data: bytes | bytearray | memoryview, metadata: dict[str, Any]) -> bytes:
    """Encodes the value of an object."""
    if not metadata:
        return _NO_METADATA + data
    packed = packed_metadata(metadata)
    return b"".join((_LENGTH.pack(len(packed)), packed, data))


def stored_again(data: bytes, metadata: dict[str, Any], codec: int) -> bytes:
    """A value that was decoded, as its cell says it is stored; compressed anew, if it was."""
    value = encode_value(data, metadata)
    return _compressor(1).compress(value) if codec == CODEC_ZSTD else value


def object_crc(data: bytes | bytearray | memoryview, metadata: dict[str, Any] | None = None) -> int:
    """Returns the checksum of an object with this data and metadata, for `if_match_crc`."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InputError(f"data must be bytes, not {type(data).__name__}")
    return crc32(encode_value(data, checked_metadata({} if metadata is None else metadata)))


def size_and_crc(put: PutObject) -> tuple[int, int]:
    """Size of the data of a put, and checksum of its value."""
    if isinstance(put, PutFile):
        return put.size, put.crc
    return len(put.data), object_crc(put.data, put.metadata)


class ValueEncoder:
    """Encodes and compresses values for storage. Not thread-safe."""

    def __init__(self, compression: Compression = "none", level: int = -1) -> None:
        self._compressor = None if compression == "none" else _compressor(level)

    def store(self, data: bytes, metadata: dict[str, Any]) -> StoredValue:
        """Compresses if requested and if that makes it smaller."""
        value = encode_value(data, metadata) if metadata else _NO_METADATA + data
        crc = crc32(value)
        if self._compressor is not None and len(value) >= _MIN_COMPRESSED_BYTES:
            compressed = self._compressor.compress(value)
            if len(compressed) < len(value):
                return StoredValue(compressed, CODEC_ZSTD, len(data), crc)
        return StoredValue(value, CODEC_NONE, len(data), crc)


def decode_value(stored: Buffer, codec: int, size: int, crc: int, lsn: int) -> tuple[bytes, dict[str, Any]]:
    """Returns data and metadata; `lsn` is for the error. Of a value with a file of its own, `stored` is the value in
    it.
    """
    value = stored if codec in (CODEC_NONE, CODEC_FILE) else decompressed(stored, codec, size, lsn)
    if crc32(value) != crc:
        raise DataError(f"the checksum of the object's value does not match, LSN {lsn}")
    if len(value) == size + 4 and value[:4] == _NO_METADATA:
        return bytes(value[4:]), {}
    return _with_metadata(value, size, lsn)


def _with_metadata(value: Buffer, size: int, lsn: int) -> tuple[bytes, dict[str, Any]]:
    start = max(0, len(value) - size)
    return bytes(value[start:]), decode_metadata(value[:start], lsn)


def beginning_bytes(codec: int, stored_bytes: int, size: int) -> int:
    """How much of a stored value has what is before its data: exactly that much, or the first block of a zstd frame."""
    return stored_bytes - size if codec == CODEC_NONE else min(stored_bytes, _FIRST_BLOCK_BYTES)


def metadata_in(beginning: Buffer, codec: int, size: int, lsn: int) -> dict[str, Any]:
    """Decodes the metadata of a value from the beginning of its stored form; DataError if that is not enough for it.
    No checksum covers it without the rest.
    """
    if codec == CODEC_NONE:
        return decode_metadata(beginning, lsn)
    try:
        head_bytes = _content_bytes(beginning, codec, size, lsn) - size
        with _decompressor().stream_reader(beginning) as reader:
            return decode_metadata(reader.read(head_bytes) if head_bytes > 0 else b"", lsn)
    except zstandard.ZstdError as error:
        raise _unreadable(error, lsn) from error


def decode_metadata(head: Buffer, lsn: int) -> dict[str, Any]:
    """Decodes the metadata from the part of a value before its data; `lsn` is for the error."""
    metadata_bytes = _LENGTH.unpack_from(head)[0] if len(head) >= LENGTH_BYTES else 0
    if len(head) != LENGTH_BYTES + metadata_bytes or metadata_bytes > MAX_METADATA_BYTES:
        raise DataError(f"{len(head)} bytes before the data cannot hold {metadata_bytes} of metadata, LSN {lsn}")
    try:
        return checked_metadata(_decode_metadata(head[LENGTH_BYTES:])) if metadata_bytes else {}
    except (msgspec.MsgspecError, InputError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"the metadata of the object cannot be read, LSN {lsn}: {error}") from error


def decompressed(stored: Buffer, codec: int, size: int, lsn: int) -> bytes:
    """Decompresses a value. The size that it states is checked against that of its data before memory is allocated."""
    try:
        content_bytes = _content_bytes(stored, codec, size, lsn)
        return _decompressor().decompress(stored, max_output_size=content_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _unreadable(error, lsn) from error


def _content_bytes(stored: Buffer, codec: int, size: int, lsn: int) -> int:
    """The size that a compressed value states, checked against that of its data."""
    if codec != CODEC_ZSTD:
        raise DataError(f"value has unknown codec {codec}, LSN {lsn}")
    content_bytes = zstandard.frame_content_size(stored)
    if not 4 <= content_bytes <= min(4 + MAX_METADATA_BYTES + size, MAX_VALUE_BYTES):
        raise DataError(f"compressed value has an impossible size of {content_bytes} bytes, LSN {lsn}")
    return content_bytes


def _unreadable(error: zstandard.ZstdError, lsn: int) -> DataError:
    return DataError(f"a compressed value cannot be read, LSN {lsn}: {error}")


def _compressor(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)


def _decompressor() -> zstandard.ZstdDecompressor:
    """One per thread: readers decompress concurrently."""
    found: zstandard.ZstdDecompressor | None = getattr(_of_thread, "decompressor", None)
    if found is None:
        found = _of_thread.decompressor = zstandard.ZstdDecompressor()
    return found
