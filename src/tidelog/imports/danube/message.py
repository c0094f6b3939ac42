"""A message of Danube (0.5 to 0.15) as stored in its WAL and its objects, and its conversion to a message of a topic.

The payload of a Danube frame is bincode: fields one after the other, no names. Danube 0.5.0 wrote bincode 1 with
its defaults, 0.5.1 and all that follow write bincode 2 with the standard configuration.

    request_id         number, u64
    producer_id        number, u64
    topic_name         text
    broker_addr        text
    topic_offset       number, u64        the offset of the frame wins over it
    payload            bytes
    publish_time       number, u64        milliseconds since 1970
    producer_name      text
    subscription_name  optional text
    attributes         map of text to text      Danube 0.5 ends after it
    schema_id          optional number, u64
    schema_version     optional number, u32     0.6 to 0.11 end after it
    routing_key        optional text

    number     bincode 1           | 8 bytes, little-endian |
               bincode 2: 0..250   | byte |
                          u16      | 251  | 2 bytes, little-endian |
                          u32      | 252  | 4 bytes                |
                          u64      | 253  | 8 bytes                                        |
    bytes      | number: length | that many bytes |            text: the same, UTF-8
    optional   | 0 |   or   | 1 | value |
    map        | number: count | count x key, value |

Nothing marks which of the two a message is written in, and one WAL file may hold both: each message is decoded in both
ways, and must fit to its last byte. If it fits in both, the offset decides: Danube stores the frame's own in each.

Invariants
- Every length is checked against the remaining bytes before anything is read, so a hostile one costs nothing.
- Each message of a version has one encoding: a number in more bytes than it needs, a key given twice or bytes after the
  last field are not what Danube writes. They are refused, never guessed at; so is what fits in both ways.
- The conversion is lossless: a field that our messages do not have becomes a header.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from tidelog.errors import CorruptionError
from tidelog.topics.message import Message

ATTRIBUTE_PREFIX = "danube-attribute-"
OFFSET_HEADER = "danube-offset"
TIME_HEADER = "danube-publish-time"

_WIDTHS = {251: 2, 252: 4, 253: 8}
_LEAST_OF_WIDTH = {2: 251, 4: 1 << 16, 8: 1 << 32}
# Eight numbers and lengths up to producer_name, no subscription_name, and the count of attributes.
_LEAST_BYTES_OF_BINCODE_1 = 8 * 8 + 1 + 8
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


def decode_danube_message(data: bytes, offset: int, path: str | Path, byte: int) -> DanubeMessage:
    """The message in the payload of a frame of this offset; `path` and `byte` say where it was found, for errors."""
    if not _may_be_bincode_1(data):
        return _decode(_Fields(data, path, byte))
    found, errors = [], []
    for fields in (_Fields(data, path, byte), _FixedFields(data, path, byte)):
        try:
            found.append(_decode(fields))
        except CorruptionError as error:
            errors.append(error)
    if not found:
        raise max(errors, key=lambda error: error.byte)  # the way that fits further is the one that was meant
    likely = [message for message in found if message.topic_offset == offset] if len(found) > 1 else found
    if len(likely) == 1:
        return likely[0]
    raise CorruptionError(
        "this is a message of Danube in bincode 1 and a different one in bincode 2: it is ambiguous which was sent",
        path=path,
        byte=byte,
    )


def _may_be_bincode_1(data: bytes) -> bool:
    """Whether the length of topic_name, after two numbers, leaves room for the other fields."""
    room = len(data) - _LEAST_BYTES_OF_BINCODE_1
    return room >= 0 and int.from_bytes(data[16:24], "little") <= room


def _decode(fields: _Fields) -> DanubeMessage:
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
        # Fields that were added later, in two versions: a message may end before them.
        schema_id=fields.optional(fields.number, "schema_id") if (has_schema := fields.has_more) else None,
        schema_version=fields.optional(fields.number_u32, "schema_version") if has_schema else None,
        routing_key=fields.optional(fields.text, "routing_key") if fields.has_more else None,
    )
    fields.expect_end()
    return message


class _Fields:
    """The bytes of a message in bincode 2, and how far they have been taken."""

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

    @property
    def has_more(self) -> bool:
        """Whether there are fields that later versions of Danube added."""
        return self._position < len(self._data)

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
            raise self._error(f"{left} bytes after the last known field", self._position)

    def _take(self, size: int, field: str) -> bytes:
        start, end = self._position, self._position + size
        if end > len(self._data):
            raise self._error(f"the message ends in the middle of {field}", start)
        self._position = end
        return self._data[start:end]

    def _error(self, reason: str, position: int) -> CorruptionError:
        return CorruptionError(
            f"this is not a message of Danube: {reason}", path=self._path, byte=self._byte + position
        )


class _FixedFields(_Fields):
    """The same in bincode 1: numbers have 8 bytes. Only Danube 0.5.0 wrote it, so there are no later fields."""

    has_more = False

    def number(self, field: str) -> int:
        return int.from_bytes(self._take(8, field), "little")


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
