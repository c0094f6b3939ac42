"""Messages and their envelope, the payload of a topic's frames: layout, extension, encoding, decoding and `sync`
levels.

    byte  0         1       2              4           8             16               20                 24
          +---------+-------+--------------+-----------+-------------+----------------+------------------+
          | version | flags | header count | key bytes | timestamp   | headers bytes  | extension bytes  |
          | u8 = 1  | u8    | u16          | u32       | i64, us     | u32            | u32              |
          +---------+-------+--------------+-----------+-------------+----------------+------------------+
          | key | headers: count x [u16 name bytes][u32 value bytes][name, UTF-8][value] | extension | value ...

    flags: bit 0 = there is a key (an empty key and no key are two things); the others are 0 in version 1

Every length is at a fixed position, so a column of keys, times or values can be gathered from many messages without
parsing each one. The extension is described below; most messages have none. The value comes last and takes the rest of
the payload. All numbers are little-endian. The loops are written in C (`native/envelopes.c`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import struct
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict, TypeVar, overload

import msgspec

from tidelog import _native
from tidelog.clock import to_microseconds
from tidelog.cold.tiered_log import TieredLog
from tidelog.errors import (
    NAME_A_STORE,
    DataError,
    GapError,
    InputError,
    NotSupportedError,
    StoreUnavailableError,
    offsets_text,
)
from tidelog.log.frame import Frames, encode_many, kept_runs
from tidelog.log.reader import BatchReader
from tidelog.log.repair import is_lost
from tidelog.log.tail_cache import Batch

TIMESTAMP_FIELD = 8
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LEAST_US = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
MOST_US = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""The first and the last moment that a datetime in UTC can hold."""
_Bytes = bytes | bytearray | memoryview


HeaderPairs = Sequence[tuple[str, bytes | None]]
"""Headers in their order: names may repeat, and a value may be null."""
HeadersGiven = Mapping[str, bytes | None] | HeaderPairs
"""What an append takes as headers: a mapping, or a list or tuple of pairs."""


class Headers(dict[str, bytes]):
    """Headers that a dict cannot hold, as Kafka's clients may send them: names that repeat, values that are null.

    `pairs` has all of them in their order. As a mapping it has the last value of each name, and b"" for null. It cannot
    be changed; `dict(headers)` can.
    """

    __slots__ = ("pairs",)
    pairs: tuple[tuple[str, bytes | None], ...]

    def __init__(self, headers: HeadersGiven = ()) -> None:
        given = headers.items() if isinstance(headers, Mapping) else headers
        pairs = headers.pairs if isinstance(headers, Headers) else tuple((name, value) for name, value in given)
        super().__init__((name, b"" if value is None else value) for name, value in pairs)
        self.pairs = pairs

    @property
    def is_plain(self) -> bool:
        """Whether a dict would do."""
        return len(self.pairs) == len(self) and all(value is not None for _, value in self.pairs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Headers):
            return self.pairs == other.pairs
        return self.is_plain and dict.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return f"Headers({list(self.pairs)})"

    def __reduce__(self) -> tuple[type[Headers], tuple[HeaderPairs]]:
        return Headers, (self.pairs,)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("headers of a message cannot be changed: make a dict of them first")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message to append, or one that was read.

    To append, give `value` and any other fields; `timestamp` defaults to the time of the append, and `offset` and
    `partition` are ignored. On a message that was read, all of them are set; times are in UTC. `deliver_at` is the time
    at which subscriptions deliver it; None: at once. A reader of the topic itself sees it at once in either case.

    A value of None is null, which is not the same as an empty one: with a key it is a tombstone. Headers whose names
    repeat, or whose values are null, are given as `Headers([("name", None), ...])` and read as `header_list`.
    """

    value: bytes | None
    key: bytes | None = None
    headers: dict[str, bytes] = {}  # msgspec copies the empty dict for every message
    timestamp: datetime | None = None
    offset: int = -1
    deliver_at: datetime | None = None
    partition: int = 0

    @property
    def header_list(self) -> tuple[tuple[str, bytes | None], ...]:
        """All headers in their order, with every value of a name that repeats, and None for a null value."""
        return self.headers.pairs if isinstance(self.headers, Headers) else tuple(self.headers.items())


def with_headers(headers: Mapping[str, bytes], added: Mapping[str, bytes]) -> dict[str, bytes]:
    """The headers of a message with others in place of those of the same name, or after them."""
    if isinstance(headers, Headers):
        return Headers([*without_headers(headers, added).pairs, *added.items()])
    return {**headers, **added}


@overload
def without_headers(headers: Headers, names: Container[str]) -> Headers: ...


@overload
def without_headers(headers: Mapping[str, bytes], names: Container[str]) -> dict[str, bytes]: ...


def without_headers(headers: Mapping[str, bytes], names: Container[str]) -> dict[str, bytes]:
    """The headers of a message without those of these names."""
    if isinstance(headers, Headers):
        return Headers([(name, value) for name, value in headers.pairs if name not in names])
    return {name: value for name, value in headers.items() if name not in names}


encode_envelope: Callable[..., bytes] = _native.encode
"""(value, key, headers, timestamp_us, extension=b"")"""
ENVELOPE_ERRORS = (TypeError, AttributeError, OverflowError)
"""What `encode_envelope` raises for input of the wrong type or size; `encode_message` says what is wrong with it."""


def encode_message(
    value: Any, key: bytes | None, headers: HeadersGiven | None, timestamp_us: int, extension: bytes = b""
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


def decode_frames_as(kind: Callable[..., MessageKind], frames: Frames, start: int, stop: int) -> list[MessageKind]:
    """As `decode_frames`; `kind` is called with the fields of a message, and may add others."""
    return _native.decode_frames(
        kind, frames.first_offset, frames.buffer, frames.positions, frames.lengths, start, stop
    )


def decode_payloads(first_offset: int, payloads: Sequence[bytes]) -> list[Message]:
    """Messages that are not framed yet."""
    return _native.decode_payloads(Message, first_offset, payloads)


def decode_payloads_as(
    kind: Callable[..., MessageKind], first_offset: int, payloads: Sequence[bytes]
) -> list[MessageKind]:
    """As `decode_payloads`; `kind` is called with the fields of a message, and may add others."""
    return _native.decode_payloads(kind, first_offset, payloads)


def raw_extensions(frames: Frames, start: int, stop: int) -> list[bytes | None] | None:
    """The extensions of messages `start` to `stop` (exclusive), undecoded; None when no message has one."""
    return _native.extensions(frames.buffer, frames.positions, frames.lengths, start, stop)


def explain_envelope_error(error: Exception, value: object, key: object, headers: object) -> InputError:
    """Looks for the culprit only after something went wrong, so that the good path pays nothing."""
    if value is not None and not isinstance(value, _Bytes):
        return InputError(f"value must be bytes, not {type(value).__name__}", hint=_encode_hint(value))
    if key is not None and not isinstance(key, _Bytes):
        return InputError(f"key must be bytes, not {type(key).__name__}", hint=_encode_hint(key))
    if headers is not None and not isinstance(headers, Mapping | list | tuple):
        return InputError(f"headers must be a mapping of str to bytes, not {type(headers).__name__}")
    for pair in list(headers.items() if isinstance(headers, Mapping) else headers or ()):
        if not isinstance(pair, tuple) or len(pair) != 2:
            return InputError(f"a header in a list must be a tuple of name and value, not {pair!r}")
        name, content = pair
        if not isinstance(name, str):
            return InputError(f"the name of a header must be str, not {type(name).__name__}: {name!r}")
        if content is not None and not isinstance(content, _Bytes):
            problem = f"header {name!r} must be bytes, not {type(content).__name__}"
            return InputError(problem, hint=_encode_hint(content))
    return InputError(f"the message does not fit the envelope: {error}")


def _encode_hint(value: object) -> str | None:
    return "Encode text first, for example with .encode()" if isinstance(value, str) else None


# The extension of a message: optional fields that few messages carry, between the headers and the value of the
# envelope.
#
#     a sequence of    [u8 kind][u8 length][`length` bytes]
#
#     kind 1, batch         [u32 number][u32 total]                                message `number` of `total` in one
#     kind 2, producer      [u64 producer epoch][u64 sequence][name, UTF-8]        the producer and its sequence number
#     kind 3, deliver_at    [i64 us]                                               not to be delivered before this time
#     kind 4, nulls         [u8 flags][bitmap]                                     the value, the headers that are null
#     kind 5                [i64 id][i16 epoch][i32 sequence][u8 flags]            the idempotent producer of Kafka
#     kind 6                nothing                                                the timestamp is the broker's
#
# All numbers are little-endian.
#
# Invariants
# - Each kind occurs at most once; kinds are written in ascending order.
# - An unknown kind is skipped. A known kind with a malformed body is damage: DataError.


_BATCH = 1
_PRODUCER = 2
_DELIVER_AT = 3
_HEAD_BYTES = 2
_BATCH_ENTRY = struct.Struct("<BBII")
_PRODUCER_HEAD = struct.Struct("<BBQQ")
_DELIVER_AT_ENTRY = struct.Struct("<BBq")
_BATCH_BODY = struct.Struct("<II")
_PRODUCER_NUMBERS = struct.Struct("<QQ")
_DELIVER_AT_BODY = struct.Struct("<q")
_NO_EXTENSION = bytes(4)
_ALONE = (0, 1)
MAX_PRODUCER_NAME_BYTES = 255 - _PRODUCER_NUMBERS.size


class BatchMark(NamedTuple):
    """This is message `number` (from 0 on) of `total` that are stored together or not at all."""

    number: int
    total: int


class ProducerMark(NamedTuple):
    """Who appended it: which opening of the producer of this name, and the number that it gave the message."""

    epoch: int
    sequence: int
    name: str


class Extension(NamedTuple):
    """What an extension says; None: nothing about that."""

    batch: BatchMark | None = None
    producer: ProducerMark | None = None
    deliver_at_us: int | None = None


def encode_extension(
    batch: BatchMark | None = None, producer: ProducerMark | None = None, deliver_at_us: int | None = None
) -> bytes:
    """The bytes of an extension; empty when there is nothing to say."""
    data = b"" if batch is None else _BATCH_ENTRY.pack(_BATCH, _BATCH_BODY.size, *batch)
    if producer is not None:
        data += _encode_producer(producer)
    return data if deliver_at_us is None else data + encode_deliver_at(deliver_at_us)


def batch_marks(total: int) -> list[bytes]:
    """The entries of all messages of a batch."""
    pack = _BATCH_ENTRY.pack
    return [pack(_BATCH, _BATCH_BODY.size, number, total) for number in range(total)]


def is_batch_mark(data: bytes) -> bool:
    """Whether an extension says only that, as nearly all do that are there."""
    return len(data) == _BATCH_ENTRY.size and data[0] == _BATCH


def encode_deliver_at(time_us: int) -> bytes:
    """The entry that holds a message back until a time; InputError when nobody could read that back."""
    if not LEAST_US <= time_us <= MOST_US:
        raise InputError(f"the time of delivery is outside of the years 1 to 9999 in UTC ({time_us} us since 1970)")
    return _DELIVER_AT_ENTRY.pack(_DELIVER_AT, _DELIVER_AT_BODY.size, time_us)


def _encode_producer(mark: ProducerMark) -> bytes:
    name = mark.name.encode("utf-8")
    if len(name) > MAX_PRODUCER_NAME_BYTES:
        raise InputError(f"the name of a producer has at most {MAX_PRODUCER_NAME_BYTES} bytes")
    return producer_entry(mark.epoch, mark.sequence, name)


def producer_entry(epoch: int, sequence: int, name: bytes) -> bytes:
    """The entry that says who appended a message; the name has been checked."""
    return _PRODUCER_HEAD.pack(_PRODUCER, _PRODUCER_NUMBERS.size + len(name), epoch, sequence) + name


def decode_extension(data: bytes) -> Extension:
    """What the bytes say; DataError when they are damaged."""
    found: dict[int, bytes] = {}
    position = 0
    while position < len(data):
        body = position + _HEAD_BYTES
        end = body + data[body - 1] if body <= len(data) else body
        if end > len(data):
            raise DataError("an extension does not fit its length")
        kind = data[position]
        if kind in found:
            raise DataError(f"an extension has kind {kind} twice")
        found[kind] = data[body:end]
        position = end
    return Extension(
        batch=None if _BATCH not in found else _decode_batch(found[_BATCH]),
        producer=None if _PRODUCER not in found else _decode_producer(found[_PRODUCER]),
        deliver_at_us=None if _DELIVER_AT not in found else _decode_deliver_at(found[_DELIVER_AT]),
    )


def _decode_batch(body: bytes) -> BatchMark:
    if len(body) != _BATCH_BODY.size:
        raise DataError(f"a batch mark has {_BATCH_BODY.size} bytes, not {len(body)}")
    mark = BatchMark(*_BATCH_BODY.unpack(body))
    if mark.number >= mark.total:
        raise DataError(f"there is no message {mark.number} in a batch of {mark.total}")
    return mark


def _decode_producer(body: bytes) -> ProducerMark:
    if len(body) < _PRODUCER_NUMBERS.size:
        raise DataError(f"a producer mark has {_PRODUCER_NUMBERS.size} bytes and a name, not {len(body)} bytes")
    epoch, sequence = _PRODUCER_NUMBERS.unpack_from(body)
    try:
        return ProducerMark(epoch, sequence, body[_PRODUCER_NUMBERS.size :].decode("utf-8"))
    except UnicodeDecodeError:
        raise DataError("the name of a producer is not UTF-8") from None


def _decode_deliver_at(body: bytes) -> int:
    if len(body) != _DELIVER_AT_BODY.size:
        raise DataError(f"a time of delivery has {_DELIVER_AT_BODY.size} bytes, not {len(body)}")
    return int(_DELIVER_AT_BODY.unpack(body)[0])


def group_of(payload: bytes) -> tuple[int, int]:
    """Which message (from 0 on) of how many that count only together; what cannot be understood is on its own."""
    if payload[20:24] == _NO_EXTENSION:
        return _ALONE
    data = raw_extensions(encode_many(0, [payload]), 0, 1)
    try:
        batch = None if data is None or data[0] is None else decode_extension(data[0]).batch
    except DataError:
        return _ALONE
    return batch or _ALONE


def decode_extensions(frames: Frames, start: int, stop: int) -> list[Extension | None]:
    """Of messages `start` to `stop` (exclusive) of a batch of frames. Costs next to nothing where there are none."""
    raw = raw_extensions(frames, start, stop)
    if raw is None:
        return [None] * max(0, min(stop, frames.count) - start)
    return [None if data is None else decode_extension(data) for data in raw]


def batch_extensions(batch: Batch) -> list[Extension | None] | None:
    """Of all messages that a reader returned together; None if no message has one."""
    frames = batch.frames
    if frames is None:
        if all(payload[20:24] == _NO_EXTENSION for payload in batch.bare):
            return None
        frames = encode_many(batch.first_offset, batch.bare)
    raw = raw_extensions(frames, batch.start, batch.stop)
    return None if raw is None else [None if data is None else decode_extension(data) for data in raw]


# Encoding: from the caller's arguments to the payload of a frame, for one message or for an atomic batch.


class PayloadEncoder:
    """Puts messages into envelopes; those without a time get the time of the append."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us

    def one(
        self,
        value: bytes | Message | None,
        key: bytes | None,
        headers: HeadersGiven | None,
        timestamp: datetime | None,
        deliver_at: datetime | None = None,
        extension: bytes = b"",
    ) -> bytes:
        """A single message; a `Message` carries everything itself."""
        time_us = self._now_us() if timestamp is None else _checked_time_us(timestamp, "timestamp")
        whole = extension if deliver_at is None else extension + _delivery(deliver_at)
        try:
            return encode_envelope(value, key, headers, time_us, whole)
        except ENVELOPE_ERRORS as error:
            # Not bytes: a Message, or a mistake. Looked at only now, so that the common way pays nothing for it.
            if not isinstance(value, Message):
                raise explain_envelope_error(error, value, key, headers) from error
        if key is not None or headers is not None or timestamp is not None or deliver_at is not None:
            raise InputError("a Message carries its own key, headers and times; give them there")
        return self.one(value.value, value.key, value.headers, value.timestamp, value.deliver_at, extension)

    def many(self, messages: Iterable[bytes | Message]) -> list[bytes]:
        """Messages that are appended together; more than one of them are marked as a batch."""
        whole = several(messages)
        values = self.values(whole)
        if values is not None:
            return values
        marks = batch_marks(len(whole)) if len(whole) > 1 else [b""]
        return [self.one(message, None, None, None, None, mark) for message, mark in zip(whole, marks, strict=True)]

    def values(
        self, messages: Sequence[bytes | Message], producer: bytes | None = None, epoch: int = 0, sequence: int = 0
    ) -> list[bytes] | None:
        """As `many` where all of them are bytes, else None; with the marks of a producer, whose sequences follow each
        other."""
        return _native.encode_values(messages, self._now_us(), producer, epoch, sequence)


def several(messages: Iterable[bytes | Message]) -> Sequence[bytes | Message]:
    """The messages as a sequence; InputError for a single one."""
    if isinstance(messages, (bytes, bytearray, str, Message)) or not isinstance(messages, Iterable):
        raise InputError(f"append_many takes several messages, not one {type(messages).__name__}")
    return messages if isinstance(messages, list | tuple) else list(messages)


def _delivery(deliver_at: object) -> bytes:
    return encode_deliver_at(_checked_time_us(deliver_at, "deliver_at"))


def _checked_time_us(time: object, what: str) -> int:
    if not isinstance(time, datetime):
        raise InputError(f"{what} must be a datetime, not {type(time).__name__}")
    time_us = to_microseconds(time)
    if not LEAST_US <= time_us <= MOST_US:
        raise InputError(f"{what} is outside of the years 1 to 9999 in UTC: {time.isoformat()}")
    return time_us


# Decoding: from batches of frames to messages, one batch at a time.
#
# A batch is decoded in one call. If that fails, the ranges between compacted frames are decoded one by one; only a
# range that fails again is decoded message by message, to distinguish an offset that a repair marked as lost from a
# damaged one, and to return every message before it first.
#
# A frame with a valid checksum that does not contain a message counts as lost: GapError names its offset, its file or
# object, and the reason. With `on_gap="skip"` that frame is skipped, and a warning reports the same.


_logger = logging.getLogger("tidelog.topics")
OnGap = Literal["raise", "skip"]
PlaceOf = Callable[[int], Path | str]
"""In which file or object an offset is."""


def read_messages(reader: BatchReader, on_gap: OnGap, kind: Callable[..., Message] = Message) -> Iterator[Message]:
    """All messages of a reader."""
    decode = BatchDecoder(kind, on_gap, reader.place_of).decode
    for batch in reader:
        yield from decode(batch)


async def read_messages_async(
    reader: BatchReader, on_gap: OnGap, kind: Callable[..., Message] = Message
) -> AsyncIterator[Message]:
    """All messages of a reader, in a task."""
    decode = BatchDecoder(kind, on_gap, reader.place_of).decode
    async for batch in reader:
        for message in decode(batch):
            yield message


class BatchDecoder(NamedTuple):
    """Decodes what a reader has read; one by one only where a batch has something that is not a message."""

    kind: Callable[..., Message]
    on_gap: OnGap
    place_of: PlaceOf

    def decode(self, batch: Batch) -> list[Message] | Iterator[Message]:
        try:
            if batch.frames is None:
                return decode_payloads_as(self.kind, batch.first_offset, batch.bare)
            return decode_frames_as(self.kind, batch.frames, batch.start, batch.stop)
        except DataError:
            return self._kept(batch)

    def _kept(self, batch: Batch) -> Iterator[Message]:
        payloads = batch.payloads()
        for start, stop in kept_runs(payloads):
            kept, offset = payloads[start:stop], batch.first_offset + start
            try:
                messages: Iterable[Message] = decode_payloads_as(self.kind, offset, kept)
            except DataError:
                messages = self._one_by_one(offset, kept)
            yield from messages

    def _one_by_one(self, first_offset: int, payloads: list[bytes]) -> Iterator[Message]:
        for index, payload in enumerate(payloads):
            if not is_lost(payload):
                yield from self._one(first_offset + index, payload)
            elif self.on_gap == "raise":
                raise _gap_error(payloads, index, first_offset)

    def _one(self, offset: int, payload: bytes) -> list[Message]:
        try:
            return decode_payloads_as(self.kind, offset, [payload])
        except DataError as damage:
            if self.on_gap == "raise":
                hint = f'Read on from {offset + 1}, or with on_gap="skip"'
                raise unreadable_error(damage, offset, self.place_of(offset), hint) from damage
            warn_of_unreadable(damage, self.place_of(offset))
            return []


def unreadable_error(damage: DataError, offset: int, place: Path | str, hint: str) -> GapError:
    """The error that a reader gets for a frame that is not a message."""
    return GapError(f"{damage.message}: it cannot be read", first=offset, last=offset, path=place, hint=hint)


def warn_of_unreadable(damage: DataError, place: Path | str) -> None:
    """What is said when it is passed over."""
    _logger.warning("%s: passed over: %s", place, damage.message)


def _gap_error(payloads: list[bytes], index: int, first_offset: int) -> GapError:
    last = index
    while last + 1 < len(payloads) and is_lost(payloads[last + 1]):
        last += 1
    first, final = first_offset + index, first_offset + last
    return GapError(
        f"{offsets_text(first, final)} lost to damage, and marked so by a repair",
        first=first,
        last=final,
        hint=f'Read on from {final + 1}, or with on_gap="skip"',
    )


# How durable an append is when it returns: accepted, synced to the local disk, or shipped to the object store.
#
#     sync=False       the message has its offset; the writer holds it
#     sync=True        the local disk has it
#     sync="shipped"   the object store has it too: losing the local disk does not lose it


Sync = bool | Literal["shipped"]
SHIPPED: Literal["shipped"] = "shipped"


class AppendOptions(TypedDict, total=False):
    """What an append takes besides value and key; see `Topic.append`."""

    headers: HeadersGiven | None
    timestamp: datetime | None
    deliver_at: datetime | None
    sync: Sync
    timeout: float | str | None


def checked_sync(sync: Sync, tiered: TieredLog | None) -> Sync:
    """What an append has to wait for: a topic with `durability = "shipped"` syncs to the store. Refuses a value that
    means nothing, and "shipped" without a store; nothing is appended then."""
    if not sync or sync is True:
        return SHIPPED if sync and tiered is not None and tiered.flushed is not None else sync
    if sync != SHIPPED:
        raise InputError(f'sync must be True, False or "shipped", not {sync!r}', operation="append")
    if tiered is None:
        raise NotSupportedError(
            'sync="shipped" needs an object store, and this topic has none',
            operation="append",
            hint=NAME_A_STORE,
        )
    return sync


def wait_shipped(tiered: TieredLog, first: int, last: int, timeout_seconds: float | None) -> None:
    """Returns once the accepted messages `first` to `last` are in the store; all who wait together share one object."""
    try:
        tiered.wait_shipped(last).result(timeout_seconds)
    except concurrent.futures.TimeoutError:
        _refuse(first, last, f"it took longer than {timeout_seconds} s")
    except StoreUnavailableError as error:
        _refuse(first, last, error.message, error)


async def wait_shipped_async(tiered: TieredLog, first: int, last: int, timeout_seconds: float | None) -> None:
    """As `wait_shipped`, suspending the task."""
    try:
        await asyncio.wait_for(asyncio.wrap_future(tiered.wait_shipped(last)), timeout_seconds)
    except TimeoutError:
        _refuse(first, last, f"it took longer than {timeout_seconds} s")
    except StoreUnavailableError as error:
        _refuse(first, last, error.message, error)


def _refuse(first: int, last: int, reason: str, cause: Exception | None = None) -> NoReturn:
    raise StoreUnavailableError(
        f"{offsets_text(first, last)} on this disk, but not in the store yet: {reason}",
        operation="append",
        hint="Do not append again: what is on the disk is shipped as soon as the store answers",
    ) from cause
