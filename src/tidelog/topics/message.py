"""A message, and its envelope: the payload that topics put into the log's frames.

    byte  0         1       2              4           8             16               20                 24
          +---------+-------+--------------+-----------+-------------+----------------+------------------+
          | version | flags | header count | key bytes | timestamp   | headers bytes  | extension bytes  |
          | u8 = 1  | u8    | u16          | u32       | i64, us     | u32            | u32              |
          +---------+-------+--------------+-----------+-------------+----------------+------------------+
          | key | headers: count x [u16 name bytes][u32 value bytes][name, UTF-8][value] | extension | value ...

    flags: bit 0 = there is a key (an empty key and no key are two things); the others are 0 in version 1

Every length is at a fixed place, so a column of keys, times or values is gathered from many messages without parsing
each. What is in the extension is drawn in `extension.py`; most messages have none. The value is last: it takes what is
left of the payload. All numbers are little-endian.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tidelog.errors import InputError
from tidelog.log.frame import Frames
from tidelog.topics import envelope_python

if TYPE_CHECKING:
    _codec = envelope_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.topics import _envelope as _codec
    except ImportError:
        _codec = envelope_python

TIMESTAMP_FIELD = 8
CODEC_IS_NATIVE = _codec is not envelope_python
_Bytes = bytes | bytearray | memoryview


class Message(msgspec.Struct, frozen=True, gc=False):
    """What is appended and what is read back.

    To append, give `value` and what else you need; `timestamp` defaults to the time of the append, and `offset` is
    ignored. On a message that was read, all of them are set; times are in UTC. `deliver_at` is when subscriptions hand
    it out; None: at once. Who reads the topic itself sees it at once in either case.
    """

    value: bytes
    key: bytes | None = None
    headers: dict[str, bytes] = {}  # msgspec copies the empty dict for every message
    timestamp: datetime | None = None
    offset: int = -1
    deliver_at: datetime | None = None


encode_envelope: Callable[..., bytes] = _codec.encode
"""(value, key, headers, timestamp_us, extension=b"")"""
ENVELOPE_ERRORS = (TypeError, AttributeError, OverflowError)
"""What `encode_envelope` raises for input of the wrong type or size; `encode_message` says what is wrong with it."""


def encode_message(
    value: Any, key: bytes | None, headers: Mapping[str, bytes] | None, timestamp_us: int, extension: bytes = b""
) -> bytes:
    """The payload of a message; InputError names what is of the wrong type."""
    try:
        return encode_envelope(value, key, headers, timestamp_us, extension)
    except ENVELOPE_ERRORS as error:
        raise explain_envelope_error(error, value, key, headers) from error


MessageKind = TypeVar("MessageKind", bound=Message)


def decode_frames(frames: Frames, start: int, stop: int) -> list[Message]:
    """Messages `start` to `stop` (exclusive) of a batch of frames."""
    return decode_frames_as(Message, frames, start, stop)


def decode_frames_as(kind: type[MessageKind], frames: Frames, start: int, stop: int) -> list[MessageKind]:
    """As `decode_frames`, into a struct that has more fields than a message."""
    return _codec.decode_frames(kind, frames.first_offset, frames.buffer, frames.positions, frames.lengths, start, stop)


def decode_payloads(first_offset: int, payloads: Sequence[bytes]) -> list[Message]:
    """Messages that are not framed yet."""
    return _codec.decode_payloads(Message, first_offset, payloads)


def decode_payloads_as(kind: type[MessageKind], first_offset: int, payloads: Sequence[bytes]) -> list[MessageKind]:
    """As `decode_payloads`, into a struct that has more fields than a message."""
    return _codec.decode_payloads(kind, first_offset, payloads)


def raw_extensions(frames: Frames, start: int, stop: int) -> list[bytes | None] | None:
    """The extensions of messages `start` to `stop` (exclusive), undecoded; None when no message has one."""
    return _codec.extensions(frames.buffer, frames.positions, frames.lengths, start, stop)


def explain_envelope_error(error: Exception, value: object, key: object, headers: object) -> InputError:
    """Looks for the culprit only after something went wrong, so that the good path pays nothing."""
    if not isinstance(value, _Bytes):
        return InputError(f"value must be bytes, not {type(value).__name__}", hint=_encode_hint(value))
    if key is not None and not isinstance(key, _Bytes):
        return InputError(f"key must be bytes, not {type(key).__name__}", hint=_encode_hint(key))
    if headers is not None and not isinstance(headers, Mapping):
        return InputError(f"headers must be a mapping of str to bytes, not {type(headers).__name__}")
    for name, content in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(content, _Bytes):
            return InputError(
                f"headers must map str to bytes; {name!r} maps {type(name).__name__} to {type(content).__name__}"
            )
    return InputError(f"the message does not fit the envelope: {error}")


def _encode_hint(value: object) -> str | None:
    return "Encode text first, for example with .encode()" if isinstance(value, str) else None
