"""The pure-Python twin of the C message codec: the same bytes, the same answers, slower.

Signatures are those of `_envelope.c`; `message.py` draws the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from tidelog.errors import DataError, InputError

_FIXED = struct.Struct("<BBHIqII")
_HEADER = struct.Struct("<HI")
_VERSION = 1
_HAS_KEY = 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_U16 = 0xFFFF

Buffer = bytes | bytearray | memoryview


def encode(value: bytes, key: bytes | None, headers: Mapping[str, bytes] | None, timestamp_us: int) -> bytes:
    """The envelope of one message."""
    block = _encode_headers(headers) if headers else b""
    flags = 0 if key is None else _HAS_KEY
    key = key or b""
    fixed = _FIXED.pack(_VERSION, flags, len(headers or ()), len(key), timestamp_us, len(block), 0)
    return b"".join((fixed, key, block, value))


def _encode_headers(headers: Mapping[str, bytes]) -> bytes:
    if len(headers) > _MAX_U16:
        raise InputError(f"a message has at most {_MAX_U16} headers, this one has {len(headers)}")
    parts = []
    for name, value in headers.items():
        encoded = name.encode("utf-8")
        if len(encoded) > _MAX_U16:
            raise InputError(f"a header name has at most {_MAX_U16} bytes")
        parts += [_HEADER.pack(len(encoded), len(value)), encoded, value]
    return b"".join(parts)


def decode_frames(
    message_type: Any, first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int
) -> list[Any]:
    """Messages `start` to `stop` (exclusive) of the frames in a buffer."""
    view = memoryview(buffer).cast("B")
    at = memoryview(positions).cast("B").cast("Q")[start:stop]
    long = memoryview(lengths).cast("B").cast("I")[start:stop]
    return [
        _decode(message_type, first_offset + index, bytes(view[position : position + length]))
        for index, (position, length) in enumerate(zip(at, long, strict=True), start)
    ]


def decode_payloads(message_type: Any, first_offset: int, payloads: Sequence[bytes]) -> list[Any]:
    """Messages of payloads that are not framed yet."""
    return [_decode(message_type, first_offset + index, payload) for index, payload in enumerate(payloads)]


def _decode(message_type: Any, offset: int, payload: bytes) -> Any:
    size = len(payload)
    if size < _FIXED.size:
        raise DataError(f"message {offset} is too short for an envelope ({size} bytes)")
    version, flags, count, key_size, timestamp_us, headers_size, extension_size = _FIXED.unpack_from(payload)
    if version != _VERSION:
        raise DataError(f"message {offset} has envelope version {version}, this tidelog reads version {_VERSION}")
    if flags & ~_HAS_KEY:
        raise DataError(f"message {offset} has unknown envelope flags {flags:#04x}")
    key_end = _FIXED.size + key_size
    headers_end = key_end + headers_size
    value_start = headers_end + extension_size
    if value_start > size or (key_size and not flags & _HAS_KEY):
        raise DataError(f"message {offset} has an envelope whose lengths do not fit")
    try:
        timestamp = _EPOCH + timedelta(microseconds=timestamp_us)
    except OverflowError:
        raise DataError(f"message {offset} has an impossible timestamp") from None
    key = payload[_FIXED.size : key_end] if flags & _HAS_KEY else None
    headers = _decode_headers(offset, payload[key_end:headers_end], count)
    return message_type(payload[value_start:], key, headers, timestamp, offset)


def _decode_headers(offset: int, block: bytes, count: int) -> dict[str, bytes]:
    headers: dict[str, bytes] = {}
    position = 0
    for _ in range(count):
        if position + _HEADER.size > len(block):
            raise DataError(f"message {offset} has headers that do not fit")
        name_size, value_size = _HEADER.unpack_from(block, position)
        name_start = position + _HEADER.size
        value_start = name_start + name_size
        position = value_start + value_size
        if position > len(block):
            raise DataError(f"message {offset} has headers that do not fit")
        try:
            name = block[name_start:value_start].decode("utf-8")
        except UnicodeDecodeError:
            raise DataError(f"message {offset} has a header name that is not UTF-8") from None
        headers[name] = block[value_start:position]
    if position != len(block):
        raise DataError(f"message {offset} has headers that do not fit")
    return headers
