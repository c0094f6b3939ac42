"""The pure-Python twin of the C message codec: the same bytes, the same answers, slower.

Signatures are those of `_envelope.c`; `message.py` draws the layout. Values, keys and header values may be bytes,
bytearray or a memoryview of bytes, and are read back as bytes.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from tidelog.errors import DataError, InputError
from tidelog.log.frame_python import Buffer, byte_view, places

_FIXED = struct.Struct("<BBHIqII")
_HEADER = struct.Struct("<HI")
_VERSION = 1
_HAS_KEY = 1
_DELIVER_AT = 3
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LEAST_US = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
MOST_US = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""The first and the last moment that a datetime in UTC can hold."""
_MAX_U16 = 0xFFFF
_MAX_U32 = 0xFFFF_FFFF


def encode(
    value: Buffer,
    key: Buffer | None,
    headers: Mapping[str, Buffer] | None,
    timestamp_us: int,
    extension: Buffer = b"",
    /,
) -> bytes:
    """The envelope of one message."""
    items = _header_items(headers)
    value_bytes = _checked_bytes(value)
    key_bytes = b"" if key is None else _checked_bytes(key)
    block = _encode_headers(items)
    timestamp_us = operator.index(timestamp_us)
    if not -(1 << 63) <= timestamp_us < 1 << 63:
        raise OverflowError("timestamp_us does not fit in 64 bits")
    if not LEAST_US <= timestamp_us <= MOST_US:
        raise InputError(f"the timestamp is outside of the years 1 to 9999 in UTC ({timestamp_us} us since 1970)")
    _expect_u32("the key", len(key_bytes))
    extension_bytes = _checked_bytes(extension)
    _expect_u32("the extension", len(extension_bytes))
    flags = 0 if key is None else _HAS_KEY
    fixed = _FIXED.pack(_VERSION, flags, len(items), len(key_bytes), timestamp_us, len(block), len(extension_bytes))
    return b"".join((fixed, key_bytes, block, extension_bytes, value_bytes))


def _header_items(headers: Mapping[str, Buffer] | None) -> list[tuple[str, Buffer]]:
    items = list(headers.items()) if headers else []
    if len(items) > _MAX_U16:
        raise InputError(f"a message has at most {_MAX_U16} headers, this one has {len(items)}")
    return items


def _encode_headers(items: list[tuple[str, Buffer]]) -> bytes:
    parts: list[Buffer] = []
    for name, value in items:
        encoded = _encode_name(name)
        content = _checked_bytes(value)
        _expect_u32("a header value", len(content))
        parts += [_HEADER.pack(len(encoded), len(content)), encoded, content]
    _expect_u32("the block of headers", sum(map(len, parts)))
    return b"".join(parts)


def _encode_name(name: object) -> bytes:
    if not isinstance(name, str):
        raise TypeError(f"a header name must be str, not {type(name).__name__}")
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("a header name must be text that UTF-8 can hold") from None
    if len(encoded) > _MAX_U16:
        raise InputError(f"a header name has at most {_MAX_U16} bytes")
    return encoded


def _checked_bytes(content: object) -> Buffer:
    if isinstance(content, bytes | bytearray):
        return content
    if not isinstance(content, memoryview):
        raise TypeError(f"bytes, bytearray or memoryview expected, not {type(content).__name__}")
    if content.ndim != 1 or content.itemsize != 1 or not content.c_contiguous:
        raise TypeError("a memoryview must be contiguous, of one dimension and of bytes")
    return content


def _expect_u32(what: str, size: int) -> None:
    if size > _MAX_U32:
        raise OverflowError(f"{what} does not fit in 32 bits")


def decode_frames(
    message_type: Any, first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[Any]:
    """Messages `start` to `stop` (exclusive) of the frames in a buffer."""
    view = byte_view(buffer)
    return [
        _decode(message_type, first_offset + index, bytes(view[position : position + length]))
        for index, position, length in places(view, positions, lengths, start, stop)
    ]


def decode_payloads(message_type: Any, first_offset: int, payloads: Iterable[Buffer], /) -> list[Any]:
    """Messages of payloads that are not framed yet."""
    return [
        _decode(message_type, offset, bytes(byte_view(payload)))
        for offset, payload in enumerate(tuple(payloads), first_offset)
    ]


def extensions(
    buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[bytes | None] | None:
    """The extensions of frames `start` to `stop` (exclusive); None when no message has one."""
    view = byte_view(buffer)
    found = [
        _extension(bytes(view[position : position + length]))
        for _, position, length in places(view, positions, lengths, start, stop)
    ]
    return found if any(found) else None


def _extension(payload: bytes) -> bytes | None:
    """None also for what is no envelope of this version: decoding it says what is wrong."""
    if len(payload) < _FIXED.size or payload[0] != _VERSION:
        return None
    _, _, _, key_size, _, headers_size, size = _FIXED.unpack_from(payload)
    begin = _FIXED.size + key_size + headers_size
    return payload[begin : begin + size] if size and begin + size <= len(payload) else None


class Parts(NamedTuple):
    """What an envelope says. `delivery` is empty, or the one time of delivery."""

    value: bytes
    key: bytes | None
    headers: list[tuple[str, bytes]]
    timestamp: datetime
    delivery: tuple[datetime, ...]


def _decode(message_type: Any, offset: int, payload: bytes) -> Any:
    parts = parse_envelope(offset, payload)
    return message_type(parts.value, parts.key, dict(parts.headers), parts.timestamp, offset, *parts.delivery)


def parse_envelope(offset: int, payload: bytes) -> Parts:
    """The parts of a payload, everything checked; DataError names the offset."""
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
    timestamp = _decode_time(offset, timestamp_us, "timestamp")
    delivery = _decode_delivery(offset, payload[headers_end:value_start]) if extension_size else ()
    key = payload[_FIXED.size : key_end] if flags & _HAS_KEY else None
    headers = _decode_headers(offset, payload[key_end:headers_end], count)
    return Parts(payload[value_start:], key, headers, timestamp, delivery)


def _decode_time(offset: int, time_us: int, what: str) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        raise DataError(f"message {offset} has an impossible {what}") from None


def _decode_delivery(offset: int, extension: bytes) -> tuple[datetime, ...]:
    """The time of delivery, where there is one; kinds that mean nothing here are stepped over."""
    found: list[int] = []
    position = 0
    while position < len(extension):
        start = position + 2
        end = start + extension[start - 1] if start <= len(extension) else start
        is_delivery = extension[position] == _DELIVER_AT
        if end > len(extension) or start > len(extension) or (is_delivery and (end - start != 8 or found)):
            raise DataError(f"message {offset} has an extension that does not fit")
        if is_delivery:
            found.append(int.from_bytes(extension[start:end], "little", signed=True))
        position = end
    return tuple(_decode_time(offset, time_us, "time of delivery") for time_us in found)


def _decode_headers(offset: int, block: bytes, count: int) -> list[tuple[str, bytes]]:
    headers: list[tuple[str, bytes]] = []
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
        headers.append((name, block[value_start:position]))
    if position != len(block):
        raise DataError(f"message {offset} has headers that do not fit")
    return headers
