"""The extension of a message: what only few messages carry, between the headers and the value of the envelope.

    a sequence of    [u8 kind][u8 length][`length` bytes]

    kind 1, batch         [u32 number][u32 total]                                message `number` of `total` in one
    kind 2, producer      [u64 producer epoch][u64 sequence][name, UTF-8]        who appended it, and its number there
    kind 3, deliver_at    [i64 us]                                               not to be handed out before this time

All numbers are little-endian.

Invariants
- A kind is there once at most; kinds are written in ascending order.
- A kind that is not known here is stepped over. A known one of a wrong shape is damage: DataError.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidelog.errors import DataError, InputError
from tidelog.log.cache import Batch
from tidelog.log.frame import Frames, encode_many
from tidelog.topics.envelope_python import LEAST_US, MOST_US
from tidelog.topics.message import raw_extensions

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
    """Of all messages that a reader handed out together; None when no message has one."""
    frames = batch.frames
    if frames is None:
        if all(payload[20:24] == _NO_EXTENSION for payload in batch.bare):
            return None
        frames = encode_many(batch.first_offset, batch.bare)
    raw = raw_extensions(frames, batch.start, batch.stop)
    return None if raw is None else [None if data is None else decode_extension(data) for data in raw]
