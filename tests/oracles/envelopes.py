"""The oracle of message envelopes: the same bytes and answers as `native/envelopes.c`, slower.

`message.py` draws the layout. Values, keys and header values may be bytes,
bytearray or a memoryview of bytes, and are read back as bytes.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from tests.oracles.frames import byte_view, places

from tidelog.errors import DataError, InputError
from tidelog.log.frame import Buffer
from tidelog.topics.message import LEAST_US, MOST_US, Headers, decode_extension

_FIXED = struct.Struct("<BBHIqII")
_HEADER = struct.Struct("<HI")
_VERSION = 1
_HAS_KEY = 1
_DELIVER_AT = 3
_NULLS = 4
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_U16 = 0xFFFF
_MAX_BITMAP = 254
_MAX_U32 = 0xFFFF_FFFF


def encode(
    value: Buffer | None,
    key: Buffer | None,
    headers: Mapping[str, Buffer | None] | Sequence[tuple[str, Buffer | None]] | None,
    timestamp_us: int,
    extension: Buffer = b"",
    /,
) -> bytes:
    """The envelope of one message."""
    items = _header_items(headers)
    value_bytes = b"" if value is None else _checked_bytes(value)
    key_bytes = b"" if key is None else _checked_bytes(key)
    block = _encode_headers(items)
    timestamp_us = operator.index(timestamp_us)
    if not -(1 << 63) <= timestamp_us < 1 << 63:
        raise OverflowError("timestamp_us does not fit in 64 bits")
    if not LEAST_US <= timestamp_us <= MOST_US:
        raise InputError(f"the timestamp is outside of the years 1 to 9999 in UTC ({timestamp_us} us since 1970)")
    _expect_u32("the key", len(key_bytes))
    own, nulls = _checked_bytes(extension), _encode_nulls(value, items)
    _expect_u32("the extension", len(own) + len(nulls))
    extension_bytes = bytes(own) + nulls
    flags = 0 if key is None else _HAS_KEY
    fixed = _FIXED.pack(_VERSION, flags, len(items), len(key_bytes), timestamp_us, len(block), len(extension_bytes))
    return b"".join((fixed, key_bytes, block, extension_bytes, value_bytes))


def encode_values(
    values: Sequence[object], timestamp_us: int, name: bytes | None, epoch: int, sequence: int, /
) -> list[bytes] | None:
    """The envelopes of values that are appended together, with their marks; None unless all are bytes."""
    plain = [value for value in values if type(value) is bytes]
    if not LEAST_US <= timestamp_us <= MOST_US:
        raise InputError(f"the timestamp is outside of the years 1 to 9999 in UTC ({timestamp_us} us since 1970)")
    if name is not None and len(name) > 239:
        raise OverflowError("the name of a producer has at most 239 bytes")
    if len(plain) < len(values):
        return None
    batch = [struct.pack("<BBII", 1, 8, number, len(plain)) if len(plain) > 1 else b"" for number in range(len(plain))]
    producer = [
        b"" if name is None else struct.pack("<BBQQ", 2, 16 + len(name), epoch, sequence + number) + name
        for number in range(len(plain))
    ]
    return [
        encode(value, None, None, timestamp_us, one + other)
        for value, one, other in zip(plain, batch, producer, strict=True)
    ]


def _header_items(
    headers: Mapping[str, Buffer | None] | Sequence[tuple[str, Buffer | None]] | None,
) -> list[tuple[str, Buffer | None]]:
    if isinstance(headers, Headers | list | tuple):
        items = list(headers.pairs) if isinstance(headers, Headers) else list(headers)
    else:
        items = list(headers.items()) if headers else []  # type: ignore[union-attr]
    if len(items) > _MAX_U16:
        raise InputError(f"a message has at most {_MAX_U16} headers, this one has {len(items)}")
    return items


def _encode_nulls(value: Buffer | None, items: list[tuple[str, Buffer | None]]) -> bytes:
    """The entry that says what is null; nothing when nothing is."""
    bits = sum(1 << index for index, (_, content) in enumerate(items) if content is None)
    bitmap = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    if len(bitmap) > _MAX_BITMAP:
        raise InputError(f"only the first {8 * _MAX_BITMAP} headers of a message can be null")
    return b"" if value is not None and not bits else bytes([_NULLS, 1 + len(bitmap), value is None]) + bitmap


def _encode_headers(items: list[tuple[str, Buffer | None]]) -> bytes:
    parts: list[Buffer] = []
    whole: list[Any] = list(items)
    for item in whole:
        if not isinstance(item, tuple) or len(item) != 2:
            raise TypeError("headers must be a mapping of str to bytes, or pairs of both")
        name, value = item
        encoded = _encode_name(name)
        content = b"" if value is None else _checked_bytes(value)
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


def newest_producers(
    first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[tuple[bytes, int]]:
    """The newest message of each producer that frames `start` to `stop` (exclusive) name; damage names nobody."""
    newest: dict[bytes, int] = {}
    for index, data in enumerate(extensions(buffer, positions, lengths, start, stop) or (), start):
        try:
            producer = None if data is None else decode_extension(data).producer
        except DataError:
            continue
        if producer is not None:
            newest[producer.name.encode()] = first_offset + index
    return list(newest.items())


def _extension(payload: bytes) -> bytes | None:
    """None also for what is no envelope of this version: decoding it says what is wrong."""
    if len(payload) < _FIXED.size or payload[0] != _VERSION:
        return None
    _, _, _, key_size, _, headers_size, size = _FIXED.unpack_from(payload)
    begin = _FIXED.size + key_size + headers_size
    return payload[begin : begin + size] if size and begin + size <= len(payload) else None


class Parts(NamedTuple):
    """What an envelope says. `delivery` is empty, or the one time of delivery; what is null is empty here."""

    value: bytes
    key: bytes | None
    headers: list[tuple[str, bytes]]
    timestamp: datetime
    delivery: tuple[datetime, ...]
    nulls: bytes = b""

    @property
    def value_or_null(self) -> bytes | None:
        """The value as it was given."""
        return None if self.nulls[:1] and self.nulls[0] & 1 else self.value

    @property
    def headers_or_nulls(self) -> list[tuple[str, bytes | None]]:
        """The headers as they were given."""
        return [(name, None if self._is_null(index) else value) for index, (name, value) in enumerate(self.headers)]

    def _is_null(self, index: int) -> bool:
        return len(self.nulls) > 1 + index // 8 and bool(self.nulls[1 + index // 8] >> index % 8 & 1)


def _decode(message_type: Any, offset: int, payload: bytes) -> Any:
    parts = parse_envelope(offset, payload)
    headers: dict[str, bytes] = dict(parts.headers)
    if len(parts.nulls) > 1 or len(headers) < len(parts.headers):
        headers = Headers(parts.headers_or_nulls)
    return message_type(parts.value_or_null, parts.key, headers, parts.timestamp, offset, *parts.delivery)


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
    delivery, nulls = _decode_extension(offset, payload[headers_end:value_start])
    key = payload[_FIXED.size : key_end] if flags & _HAS_KEY else None
    block = payload[key_end:headers_end]
    if nulls:
        _check_nulls(offset, nulls, Parts(payload[value_start:], key, _that_fit(block, count), timestamp, (), nulls))
    headers = _decode_headers(offset, block, count)
    return Parts(payload[value_start:], key, headers, timestamp, delivery, nulls)


def _check_nulls(offset: int, nulls: bytes, parts: Parts) -> None:
    """What is null has no bytes."""
    given = [(parts.value_or_null, parts.value)]
    given += [(null, value) for (_, null), (_, value) in zip(parts.headers_or_nulls, parts.headers, strict=True)]
    if any(null is None and value for null, value in given):
        raise DataError(f"message {offset} has an extension that does not fit")


def _that_fit(block: bytes, count: int) -> list[tuple[str, bytes]]:
    """The headers before the first that does not fit, whatever their names are."""
    headers: list[tuple[str, bytes]] = []
    position = 0
    for _ in range(count):
        name_size, value_size = _HEADER.unpack_from(block.ljust(position + _HEADER.size, b"\0"), position)
        value_start = position + _HEADER.size + name_size
        if position + _HEADER.size > len(block) or value_start + value_size > len(block):
            break
        position = value_start + value_size
        headers.append(("", block[value_start:position]))
    return headers


def _decode_time(offset: int, time_us: int, what: str) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        raise DataError(f"message {offset} has an impossible {what}") from None


def _decode_extension(offset: int, extension: bytes) -> tuple[tuple[datetime, ...], bytes]:
    """The time of delivery and the nulls, where they are; kinds that mean nothing here are stepped over."""
    found: list[int] = []
    nulls = b""
    position = 0
    while position < len(extension):
        start = position + 2
        end = start + extension[start - 1] if start <= len(extension) else start
        is_delivery = extension[position] == _DELIVER_AT
        if end > len(extension) or start > len(extension) or (is_delivery and (end - start != 8 or found)):
            raise DataError(f"message {offset} has an extension that does not fit")
        if extension[position] == _NULLS:
            if nulls or start == end:
                raise DataError(f"message {offset} has an extension that does not fit")
            nulls = extension[start:end]
        if is_delivery:
            found.append(int.from_bytes(extension[start:end], "little", signed=True))
        position = end
    return tuple(_decode_time(offset, time_us, "time of delivery") for time_us in found), nulls


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
