"""Messages as JSON and as msgpack: what clients send, and what they get.

    {"partition": 0, "offset": 7, "timestamp": "2026-11-17T10:36:51.250000Z", "key": "k", "value": "text",
     "headers": [["name", "value"]], "encoding": "utf-8"}

Invariants
- `encoding` says how the bytes of value, key and headers are written: `utf-8` as text, `base64`, or `json` (the value
  is JSON itself, the rest is text). What is read can be sent again as it is, and is the same message.
- A value that is not valid in the encoding that a reader asked for comes in base64: nothing is lost, nothing fails.
- msgpack (`client/wire.py`) has the same fields, as an array in the order of `tidelog.Message`, and bytes as they are.
"""

from __future__ import annotations

import base64
import binascii
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import InputError
from tidelog.topics.message import Headers, Message

Encoding = Literal["utf-8", "base64", "json"]
ReadEncoding = Literal["auto", "base64", "json"]
Time = Annotated[datetime, msgspec.Meta(tz=True)]


class NewMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message to append."""

    value: msgspec.Raw
    """Text, base64 or any JSON, as `encoding` says; null is a null value: with a key, a tombstone."""
    key: str | None = None
    headers: dict[str, str | None] | list[tuple[str, str | None]] = {}
    """An object, or pairs where names repeat."""
    timestamp: Time | None = None
    """Default: the time of the append."""
    deliver_at: Time | None = None
    """When subscriptions deliver it. Default: at once."""
    encoding: Encoding = "utf-8"
    partition: int | None = None
    """Not read: `partition` of the request says where it goes. It is here so that what was read can be sent again."""
    offset: int | None = None
    """Not read."""


class ReadMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was read."""

    partition: int
    offset: int
    timestamp: datetime
    key: str | None
    value: Any
    headers: list[tuple[str, str | None]]
    encoding: Encoding
    deliver_at: datetime | None = None


# From clients


def to_message(given: NewMessage) -> Message:
    """The message that a client means; InputError for what is not text or base64."""
    encode = _from_base64 if given.encoding == "base64" else _from_text
    pairs = list(given.headers.items() if isinstance(given.headers, dict) else given.headers)
    headers = Headers([(name, None if value is None else encode(value)) for name, value in pairs])
    return Message(
        value=_value_bytes(given),
        key=None if given.key is None else encode(given.key),
        headers=dict(headers) if headers.is_plain else headers,
        timestamp=given.timestamp,
        deliver_at=given.deliver_at,
    )


def _value_bytes(given: NewMessage) -> bytes | None:
    raw = bytes(given.value)
    if raw == b"null":
        return None
    if given.encoding == "json":
        return raw
    try:
        text = msgspec.json.decode(raw, type=str)
    except JSON_ERRORS:
        raise InputError(
            f"the value of a message with encoding {given.encoding} must be a string or null",
            hint='Send "encoding": "json" with the message to store JSON',
        ) from None
    return _from_base64(text) if given.encoding == "base64" else _from_text(text)


def _from_text(text: str) -> bytes:
    return text.encode("utf-8")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(
            "a text that should be base64 is not", hint="Use the standard alphabet, with padding"
        ) from None


# To clients


def to_json(message: Message, encoding: ReadEncoding) -> ReadMessage:
    """A message as JSON."""
    assert message.timestamp is not None
    used, write = _encoder_for(message, encoding)
    value: Any = None
    if message.value is not None:
        value = msgspec.Raw(message.value) if used == "json" else write(message.value)
    return ReadMessage(
        partition=message.partition,
        offset=message.offset,
        timestamp=message.timestamp,
        key=None if message.key is None else write(message.key),
        value=value,
        headers=[(name, None if content is None else write(content)) for name, content in message.header_list],
        encoding=used,
        deliver_at=message.deliver_at,
    )


def _encoder_for(message: Message, wanted: ReadEncoding) -> tuple[Encoding, Any]:
    if wanted == "base64":
        return "base64", _to_base64
    try:
        for part in (message.key, *(content for _, content in message.header_list)):
            _to_text(part or b"")
        text = _to_text(message.value or b"")
    except UnicodeDecodeError:
        return "base64", _to_base64
    if wanted == "json" and message.value and _is_json(text):
        return "json", _to_text
    return "utf-8", _to_text


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except JSON_ERRORS:
        return False
    return text.strip() != "null"


def _to_text(data: bytes) -> str:
    return data.decode("utf-8")


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
