"""A message of Danube (0.15) as its WAL and its objects hold it, and what becomes of it in a topic.

The payload of a Danube frame is bincode 2 with the standard configuration: fields one after the other, no names.

    request_id         number, u64
    producer_id        number, u64
    topic_name         text
    broker_addr        text
    topic_offset       number, u64        the offset of the frame wins over it
    payload            bytes
    publish_time       number, u64        milliseconds since 1970
    producer_name      text
    subscription_name  optional text
    attributes         map of text to text
    schema_id          optional number, u64
    schema_version     optional number, u32
    routing_key        optional text      older messages end before it

    number     0..250    | byte |
               u16       | 251  | 2 bytes, little-endian |
               u32       | 252  | 4 bytes                |
               u64       | 253  | 8 bytes                                        |
    bytes      | number: length | that many bytes |            text: the same, UTF-8
    optional   | 0 |   or   | 1 | value |
    map        | number: count | count x key, value |

Invariants
- Every length is checked against what is left before anything is taken, so a hostile one costs nothing.
- There is one spelling for each message: a number in more bytes than it needs, a key given twice or bytes behind the
  last field are not what Danube 0.15 writes. They are refused, never guessed at.
- Nothing is lost on the way to a topic: what has no place of its own in our messages becomes a header.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from tidelog.errors import CorruptionError
from tidelog.topics.message import Message

HEADER_PREFIX = "danube-"
ATTRIBUTE_PREFIX = "danube-attribute-"
OFFSET_HEADER = "danube-offset"
TIME_HEADER = "danube-publish-time"

_WIDTHS = {251: 2, 252: 4, 253: 8}
_LEAST_OF_WIDTH = {2: 251, 4: 1 << 16, 8: 1 << 32}
_MAX_U32 = (1 << 32) - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MOMENT = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
_MAX_MILLISECONDS = (_LAST_MOMENT - _EPOCH) // timedelta(milliseconds=1)

# Headers made of fields; numbers are written in decimal digits.
_FIELD_HEADERS = {
    "request_id": "danube-request-id",
    "producer_id": "danube-producer-id",
    "topic_name": "danube-topic-name",
    "broker_addr": "danube-broker-addr",
    "producer_name": "danube-producer-name",
    "subscription_name": "danube-subscription-name",
    "schema_id": "danube-schema-id",
    "schema_version": "danube-schema-version",
}
_OFFSET_IN_MESSAGE_HEADER = "danube-topic-offset"
_OWN_HEADERS = frozenset({*_FIELD_HEADERS.values(), _OFFSET_IN_MESSAGE_HEADER, OFFSET_HEADER, TIME_HEADER})

Value = TypeVar("Value")


class DanubeMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What Danube stores, field by field."""

    request_id: int
    producer_id: int
    topic_name: str
    broker_addr: str
    topic_offset: int
    payload: bytes
    publish_time: int
    producer_name: str
    subscription_name: str | None
    attributes: dict[str, str]
    schema_id: int | None
    schema_version: int | None
    routing_key: str | None


def decode_danube_message(data: bytes, path: str | Path, byte: int) -> DanubeMessage:
    """The message in the payload of a frame; `path` and `byte` say where it was found, for errors."""
    fields = _Fields(data, path, byte)
    message = DanubeMessage(
        request_id=fields.number("request_id"),
        producer_id=fields.number("producer_id"),
        topic_name=fields.text("topic_name"),
        broker_addr=fields.text("broker_addr"),
        topic_offset=fields.number("topic_offset"),
        payload=fields.content("payload"),
        publish_time=fields.number("publish_time"),
        producer_name=fields.text("producer_name"),
        subscription_name=fields.optional(fields.text, "subscription_name"),
        attributes=fields.attributes("attributes"),
        schema_id=fields.optional(fields.number, "schema_id"),
        schema_version=fields.optional(fields.number_u32, "schema_version"),
        routing_key=fields.last_optional_text("routing_key"),
    )
    fields.expect_end()
    return message


class _Fields:
    """The bytes of a message and how far they have been taken."""

    def __init__(self, data: bytes, path: str | Path, byte: int) -> None:
        self._data = data
        self._path = path
        self._byte = byte
        self._position = 0

    def number(self, field: str) -> int:
        start = self._position
        first = self._take(1, field)[0]
        if first <= 250:
            return first
        width = _WIDTHS.get(first)
        if width is None:
            raise self._error(f"the number {field} begins with {first}, which no number does", start)
        number = int.from_bytes(self._take(width, field), "little")
        if number < _LEAST_OF_WIDTH[width]:
            raise self._error(f"the number {field} is written in more bytes than it needs", start)
        return number

    def number_u32(self, field: str) -> int:
        start = self._position
        number = self.number(field)
        if number > _MAX_U32:
            raise self._error(f"the number {field} does not fit in 32 bits", start)
        return number

    def content(self, field: str) -> bytes:
        start = self._position
        length = self.number(field)
        if length > len(self._data) - self._position:
            left = len(self._data) - self._position
            raise self._error(f"{field} says that it has {length} bytes, and {left} are left", start)
        return self._take(length, field)

    def text(self, field: str) -> str:
        start = self._position
        try:
            return self.content(field).decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{field} is not UTF-8", start) from None

    def optional(self, take: Callable[[str], Value], field: str) -> Value | None:
        start = self._position
        tag = self._take(1, field)[0]
        if tag > 1:
            raise self._error(f"{field} is neither there (1) nor not there (0): {tag}", start)
        return take(field) if tag else None

    def last_optional_text(self, field: str) -> str | None:
        """A field that was added later: a message may end before it."""
        return self.optional(self.text, field) if self._position < len(self._data) else None

    def attributes(self, field: str) -> dict[str, str]:
        start = self._position
        count = self.number(field)
        found: dict[str, str] = {}
        # Not trusted to be a size: every entry takes two bytes at least, so a count too large runs out of bytes soon.
        for _ in range(count):
            name = self.text(field)
            if name in found:
                raise self._error(f"{field} has a name twice", start)
            found[name] = self.text(field)
        return found

    def expect_end(self) -> None:
        left = len(self._data) - self._position
        if left:
            raise self._error(f"{left} bytes behind the last field that is known", self._position)

    def _take(self, size: int, field: str) -> bytes:
        start, end = self._position, self._position + size
        if end > len(self._data):
            raise self._error(f"the message ends in the middle of {field}", start)
        self._position = end
        return self._data[start:end]

    def _error(self, reason: str, position: int) -> CorruptionError:
        return CorruptionError(
            f"this is not a message of Danube 0.15: {reason}", path=self._path, byte=self._byte + position
        )


def to_message(danube: DanubeMessage, frame_offset: int, offset: int) -> Message:
    """The message of ours that stands for one of Danube's, at the offset that it gets in the topic."""
    headers = _attribute_headers(danube.attributes)
    for field, name in _FIELD_HEADERS.items():
        value = getattr(danube, field)
        # A plain number or text is not set when it is 0 or empty; an optional one is set whenever it is there.
        if value is not None and (value or field in ("subscription_name", "schema_id", "schema_version")):
            headers[name] = str(value).encode("utf-8")
    if danube.topic_offset != frame_offset:
        headers[_OFFSET_IN_MESSAGE_HEADER] = b"%d" % danube.topic_offset
    if offset != frame_offset:
        headers[OFFSET_HEADER] = b"%d" % frame_offset
    if danube.publish_time > _MAX_MILLISECONDS:
        headers[TIME_HEADER] = b"%d" % danube.publish_time
    key = None if danube.routing_key is None else danube.routing_key.encode("utf-8")
    return Message(danube.payload, key, headers, _timestamp(danube.publish_time), offset)


def _attribute_headers(attributes: dict[str, str]) -> dict[str, bytes]:
    """Attributes by their own names, except those that would be taken for a header of ours."""
    headers = {}
    for name, value in attributes.items():
        is_taken = name in _OWN_HEADERS or name.startswith(ATTRIBUTE_PREFIX)
        headers[ATTRIBUTE_PREFIX + name if is_taken else name] = value.encode("utf-8")
    return headers


def _timestamp(milliseconds: int) -> datetime:
    """No datetime is later than the year 9999; such a time is kept whole in a header."""
    return _EPOCH + timedelta(milliseconds=min(milliseconds, _MAX_MILLISECONDS))
