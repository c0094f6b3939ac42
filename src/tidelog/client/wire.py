"""Messages between client and server, in msgpack: an array in the order of `tidelog.Message`, bytes as they are.

Both sides use this module. The loops over messages are in msgspec; what is left is one call a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec

from tidelog.topics.message import Headers, HeadersGiven, Message, PayloadEncoder, several
from tidelog.topics.subscription.queue import Delivery

MSGPACK = "application/msgpack"
_PLAIN = (None, None, None)
_VALUES = {bytes}


class PackedMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message in msgpack, in both directions; what a sender does not know it leaves out."""

    value: bytes | None
    key: bytes | None = None
    headers: dict[str, bytes] | list[tuple[str, bytes | None]] = {}
    timestamp: datetime | None = None
    offset: int = -1
    deliver_at: datetime | None = None
    partition: int = 0


class Appended(msgspec.Struct, frozen=True):
    """What the server says of an append."""

    offsets: list[int]
    partitions: list[int]


class ReadPage(msgspec.Struct, frozen=True):
    """One answer with messages, and where the next one begins."""

    messages: list[PackedMessage]
    next_offsets: dict[str, int]
    end_offsets: dict[str, int]


class TailPage(msgspec.Struct, frozen=True):
    """Some messages of a tail that was left behind, and where it goes on."""

    messages: list[PackedMessage]
    next_offset: int | None
    handed_over: int


Appendable = PackedMessage | bytes
"""A message to append: one that is a value and nothing else goes as its bytes."""
encode = msgspec.msgpack.Encoder().encode
decode_appended = msgspec.msgpack.Decoder(Appended).decode
decode_page = msgspec.msgpack.Decoder(ReadPage).decode
decode_tail_page = msgspec.msgpack.Decoder(TailPage).decode
_check = PayloadEncoder(lambda: 0).one


def packed(messages: Iterable[Message]) -> list[PackedMessage]:
    """Messages as they go over the network."""
    return [
        PackedMessage(
            one.value,
            one.key,
            list(one.headers.pairs) if isinstance(one.headers, Headers) else one.headers,
            _in_utc(one.timestamp),
            one.offset,
            _in_utc(one.deliver_at),
            one.partition,
        )
        for one in messages
    ]


def _headers(given: dict[str, bytes] | list[tuple[str, bytes | None]]) -> dict[str, bytes]:
    return given if isinstance(given, dict) else Headers(given)


def unpacked(given: Sequence[PackedMessage]) -> list[Message]:
    """The messages that were packed."""
    return [
        Message(one.value, one.key, _headers(one.headers), one.timestamp, one.offset, one.deliver_at, one.partition)
        for one in given
    ]


def to_append(given: list[Appendable]) -> list[bytes | Message]:
    """What a client appends: a value alone where there is nothing else, which the log encodes in C, all at once."""
    if set(map(type, given)) == _VALUES:
        return given  # type: ignore[return-value]
    return [_to_append(one) for one in given]


def _to_append(one: Appendable) -> bytes | Message:
    if isinstance(one, bytes):
        return one
    if one.value is not None and not one.headers and (one.key, one.timestamp, one.deliver_at) == _PLAIN:
        return one.value
    return Message(one.value, one.key, _headers(one.headers), one.timestamp, -1, one.deliver_at)


def delivered(given: Iterable[tuple[PackedMessage, int]]) -> list[Delivery]:
    """Messages that came with the number of their deliveries."""
    return [
        Delivery(
            one.value, one.key, _headers(one.headers), one.timestamp, one.offset, one.deliver_at, one.partition, count
        )
        for one, count in given
    ]


# What a program appends


def checked_several(messages: Iterable[bytes | Message]) -> Sequence[Appendable]:
    """Messages to append together; InputError as from an embedded topic."""
    whole = several(messages)
    return whole if set(map(type, whole)) == _VALUES else [checked(one) for one in whole]  # type: ignore[return-value]


def checked(
    value: bytes | Message | None,
    key: bytes | None = None,
    headers: HeadersGiven | None = None,
    timestamp: datetime | None = None,
    deliver_at: datetime | None = None,
) -> Appendable:
    """One message to append; InputError as from an embedded topic."""
    if type(value) is bytes and (key is None or type(key) is bytes) and not headers and timestamp is deliver_at is None:
        return value if key is None else PackedMessage(value, key)
    _check(value, key, headers, timestamp, deliver_at)  # the same checks, and the same words
    if isinstance(value, Message):
        return packed([value])[0]
    given = Headers(headers or ())
    return PackedMessage(
        None if value is None else bytes(value),
        None if key is None else bytes(key),
        dict(given) if given.is_plain else list(given.pairs),
        _in_utc(timestamp),
        -1,
        _in_utc(deliver_at),
    )


def _in_utc(moment: datetime | None) -> datetime | None:
    """One without a zone is in UTC, as everywhere."""
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def joined(arrays: Sequence[tuple[bytes, int]]) -> bytes:
    """One array of msgpack from several, each with the number of its elements."""
    if len(arrays) == 1:
        return arrays[0][0]
    elements = [memoryview(data)[len(_array_head(count)) :] for data, count in arrays]
    return b"".join((_array_head(sum(count for _, count in arrays)), *elements))


def _array_head(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")
