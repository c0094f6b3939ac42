"""Kafka's record batches (magic 2) as frames of the log, and frames as batches.

    byte  0             8        12             16      17      21           23                   27
          +-------------+--------+--------------+-------+-------+------------+--------------------+
          | base offset | length | leader epoch | magic | crc   | attributes | last offset delta  |
          | i64         | i32    | i32          | i8 =2 | u32   | i16        | i32                |
          +-------------+--------+--------------+-------+-------+------------+--------------------+
          | base time, ms (27) | max time (35) | producer id (43) | epoch (51) | sequence (53) | count (57) |
          | i64                | i64           | i64              | i16        | i32           | i32        |
          +--------------------+---------------+------------------+------------+---------------+------------+
    61    count x [varint length][i8][varint time delta][varint offset delta][key][value][varint headers] headers

    attributes: bits 0-2 compression, 3 time of append, 4 transactional, 5 control; crc: CRC-32C from byte 21 on

Numbers are big-endian; a varint is zigzag, and -1 as a length is null. Batches are not stored as they come: the log
holds one frame a message, for Spark, subscriptions and compaction read the same log. What an envelope had no place for
is in its extension (docs/formats.md): nulls in kind 4, the producer in kind 5, kind 6 where the time is the broker's. A
transaction's marker is a payload of 24 bytes that begins with 2 (`log/transactions.py`).

Invariants
- A batch from a client is hostile: its checksum, count, lengths, deltas, times and names are checked before a frame is
  made of it; RecordError has Kafka's code for what is wrong. Nothing decompresses to more than it may.
- What a client stored is what a client gets: null and empty are two things, headers keep their order and repeat, times
  are those of the client in ms, or ours where the topic says so, and the batch says which. A batch may come back cut
  or joined differently.
- Offsets without a message (removed by a compaction, lost to damage) have no record, but are covered by a batch, so
  that a consumer goes on behind them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import cramjam

from tidelog import _native
from tidelog.errors import InputError
from tidelog.log.frame import MAX_PAYLOAD_BYTES, Frames, writable_frames
from tidelog.log.transactions import Control as Control
from tidelog.log.transactions import control_payload as control_payload
from tidelog.log.transactions import read_control as read_control
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.primitives import Buffer

HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES = HEADER.size
_CRC_FROM = 21
_BEFORE_LENGTH = 12
_MAGIC = 2
_COMPRESSION = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20
_PRODUCER_BODY = struct.Struct("<qhiB")
DEFAULT_MAX_BATCH_BYTES = 1 << 20
"""How large a batch gets that is fetched; a consumer holds at least one in memory."""
DEFAULT_MAX_PRODUCED_BYTES = 128 << 20
"""What the records of a produced batch may decompress to; a broker holds so much of each for a moment."""
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_XERIAL_BLOCK_BYTES = 32 * 1024
_GUESS_FACTOR = 8
_GUESS_BYTES = 64 * 1024


class RecordError(InputError):
    """A batch cannot be stored; `code` is what its producer is answered with."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Compression(IntEnum):
    """How the records of a batch are compressed."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class BatchHeader(NamedTuple):
    """The first 61 bytes of a batch."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """The bytes of the whole batch."""
        return self.length + _BEFORE_LENGTH

    @property
    def compression(self) -> int:
        return self.attributes & _COMPRESSION

    @property
    def is_transactional(self) -> bool:
        return self.attributes & _TRANSACTIONAL != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & _CONTROL != 0

    @property
    def has_producer(self) -> bool:
        return self.producer_id >= 0


class DecodedBatch(NamedTuple):
    """A batch from a client, ready for the log."""

    header: BatchHeader
    frames: Frames


_FAULTS = {
    1: (ErrorCode.CORRUPT_MESSAGE, "is cut short"),
    2: (ErrorCode.INVALID_RECORD, "has another length than it says"),
    3: (ErrorCode.INVALID_RECORD, "has an offset that is not the next one"),
    4: (ErrorCode.INVALID_TIMESTAMP, "has a time outside of the years 1 to 9999"),
    5: (ErrorCode.INVALID_RECORD, "has headers that do not fit"),
    6: (ErrorCode.INVALID_RECORD, "has a header name that is not UTF-8"),
    7: (ErrorCode.INVALID_RECORD, "has too many headers, or one with too long a name"),
    8: (ErrorCode.MESSAGE_TOO_LARGE, "is larger than a message may be"),
    9: (ErrorCode.INVALID_RECORD, "is followed by bytes that are not a record"),
}


def read_header(data: Buffer, at: int = 0) -> BatchHeader:
    """The header of the batch at a position, once length, magic and checksum are right."""
    if len(data) - at < HEADER_BYTES:
        raise RecordError(ErrorCode.CORRUPT_MESSAGE, f"a batch has at least {HEADER_BYTES} bytes, not {len(data) - at}")
    header = BatchHeader._make(HEADER.unpack_from(data, at))
    if header.magic != _MAGIC:
        code = ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT
        raise RecordError(code, f"batches must have format 2 (Kafka 0.11 or newer), this one has {header.magic}")
    if not HEADER_BYTES <= header.size <= len(data) - at:
        raise RecordError(ErrorCode.CORRUPT_MESSAGE, "a batch has another length than it says")
    if _native.crc32c(memoryview(data)[at + _CRC_FROM : at + header.size]) != header.crc:
        raise RecordError(ErrorCode.CORRUPT_MESSAGE, "the checksum of a batch does not match")
    return header


def check_produced(header: BatchHeader) -> None:
    """What a batch from a producer must be beyond sound: the rules of Kafka's brokers."""
    if header.record_count < 1 or header.last_offset_delta != header.record_count - 1:
        raise RecordError(ErrorCode.INVALID_RECORD, "the offsets of a batch do not match its count of records")
    if header.is_control:
        raise RecordError(ErrorCode.INVALID_RECORD, "clients must not write control records")
    if header.has_producer and (header.base_sequence < 0 or header.producer_epoch < 0):
        raise RecordError(ErrorCode.INVALID_RECORD, "a batch of a producer needs an epoch and a sequence")
    if header.is_transactional and not header.has_producer:
        raise RecordError(ErrorCode.INVALID_RECORD, "a transactional batch needs a producer")


def decode_produced(
    records: Buffer,
    *,
    first_offset: int = 0,
    max_message_bytes: int = MAX_PAYLOAD_BYTES,
    max_batch_bytes: int = DEFAULT_MAX_PRODUCED_BYTES,
    append_time_us: int | None = None,
) -> DecodedBatch:
    """The one batch of a partition in a Produce request, as frames that begin at `first_offset`, for `append_frames`.

    With `append_time_us` all messages get that time, and say so (`message.timestamp.type=LogAppendTime`). More than one
    message are marked as an atomic batch. `max_batch_bytes` bounds what the records may decompress to.
    """
    header = read_header(records)
    if header.size != len(records):
        raise RecordError(ErrorCode.INVALID_RECORD, "a partition must be sent exactly one batch")
    check_produced(header)
    body = decompress(header.compression, memoryview(records)[HEADER_BYTES:], max_batch_bytes)
    made = _native.records_to_frames(
        body,
        header.record_count,
        first_offset,
        header.base_timestamp,
        append_time_us,
        header.record_count > 1,
        _producer_body(header),
        min(max_message_bytes, MAX_PAYLOAD_BYTES),
    )
    if len(made) == 2:
        code, words = _FAULTS[made[0]]
        raise RecordError(code, f"record {made[1]} of a batch {words}")
    return DecodedBatch(header, writable_frames(first_offset, *made))


def _producer_body(header: BatchHeader) -> bytes:
    if not header.has_producer:
        return b""
    return _PRODUCER_BODY.pack(
        header.producer_id, header.producer_epoch, header.base_sequence, 1 if header.is_transactional else 0
    )


def encode_batches(
    frames: Frames,
    start: int = 0,
    stop: int | None = None,
    *,
    leader_epoch: int = 0,
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
) -> bytes:
    """Messages `start` to `stop` (exclusive) as batches, one after the other; DataError names a damaged one."""
    stop = frames.count if stop is None else stop
    return _native.frames_to_batches(
        frames.first_offset,
        frames.buffer,
        frames.positions,
        frames.lengths,
        start,
        stop,
        max_batch_bytes,
        leader_epoch & 0xFFFF_FFFF,
    )


class StoredBatch(NamedTuple):
    """Consecutive messages of one producer in the log, or a control record."""

    first_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    """Of a control record, the number of its transaction; 0 when nobody knows it."""
    is_transactional: bool
    is_control: bool
    is_commit: bool
    timestamp_us: int
    """Of the last message."""


def stored_batches(frames: Frames, start: int = 0, stop: int | None = None) -> list[StoredBatch]:
    """The batches of idempotent producers and the control records among frames: what their state is rebuilt from."""
    stop = frames.count if stop is None else stop
    found = _native.producer_batches(frames.first_offset, frames.buffer, frames.positions, frames.lengths, start, stop)
    return [
        StoredBatch(
            first, last, producer_id, epoch, sequence, bool(transactional), bool(control), bool(commit), time_us
        )
        for first, last, producer_id, epoch, sequence, transactional, control, commit, time_us in found
    ]


# Compression


def decompress(compression: int, data: Buffer, max_bytes: int) -> Buffer:
    """The records of a batch; never more than `max_bytes`."""
    if compression == Compression.NONE:
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
        return data
    try:
        if compression == Compression.SNAPPY:
            return _decompress_snappy(data, max_bytes)
        return _decompress_into(_DECOMPRESS[compression], data, max_bytes)
    except KeyError:
        code = ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
        raise RecordError(code, f"compression {compression} is not known") from None
    except cramjam.DecompressionError as error:
        raise RecordError(ErrorCode.CORRUPT_MESSAGE, f"the records of a batch do not decompress: {error}") from error


def compress(compression: int, data: Buffer) -> bytes:
    """The same the other way; snappy in the framing of Java's, which every client reads."""
    if compression == Compression.NONE:
        return bytes(data)
    if compression == Compression.SNAPPY:
        return _compress_snappy(data)
    return bytes(_COMPRESS[compression](data))


def compressed_batches(batches: Buffer, compression: int) -> bytes:
    """Batches as `encode_batches` makes them, each with its records compressed; markers of transactions stay."""
    view, parts, at = memoryview(batches), [], 0
    while at < len(view):
        header = BatchHeader._make(HEADER.unpack_from(view, at))
        batch = view[at : at + header.size]
        is_plain = header.is_control or not header.record_count
        parts.append(bytes(batch) if is_plain else compressed_batch(batch, compression))
        at += header.size
    return b"".join(parts)


def compressed_batch(batch: Buffer, compression: int) -> bytes:
    """One uncompressed batch with its records compressed."""
    header = BatchHeader._make(HEADER.unpack_from(batch, 0))
    body = compress(compression, memoryview(batch)[HEADER_BYTES : header.size])
    attributes = header.attributes & ~_COMPRESSION | compression
    out = bytearray(HEADER_BYTES + len(body))
    HEADER.pack_into(out, 0, *header._replace(length=len(out) - _BEFORE_LENGTH, attributes=attributes, crc=0))
    out[HEADER_BYTES:] = body
    struct.pack_into(">I", out, 17, _native.crc32c(memoryview(out)[_CRC_FROM:]))
    return bytes(out)


_DECOMPRESS: dict[int, Callable[[Buffer, bytearray], int]] = {
    Compression.GZIP: cramjam.gzip.decompress_into,
    Compression.LZ4: cramjam.lz4.decompress_into,
    Compression.ZSTD: cramjam.zstd.decompress_into,
}
_COMPRESS: dict[int, Callable[[Buffer], cramjam.Buffer]] = {
    Compression.GZIP: cramjam.gzip.compress,
    Compression.LZ4: cramjam.lz4.compress,
    Compression.ZSTD: cramjam.zstd.compress,
}


def _decompress_into(function: Callable[[Buffer, bytearray], int], data: Buffer, max_bytes: int) -> Buffer:
    """First with the room that most need; the memory of a larger room is touched only as far as it is filled."""
    guess = min(len(data) * _GUESS_FACTOR + _GUESS_BYTES, max_bytes)
    out = bytearray(guess)
    try:
        return memoryview(out)[: function(data, out)]
    except cramjam.DecompressionError:
        if guess == max_bytes:
            raise
    out = bytearray(max_bytes)
    return memoryview(out)[: function(data, out)]


def _too_large(max_bytes: int) -> RecordError:
    return RecordError(ErrorCode.MESSAGE_TOO_LARGE, f"the records of a batch have more than {max_bytes} bytes")


def _decompress_snappy(data: Buffer, max_bytes: int) -> Buffer:
    if bytes(data[: len(_XERIAL)]) != _XERIAL:
        return _raw_snappy(data, max_bytes)
    parts, at, left = [], _XERIAL_HEADER_BYTES, max_bytes
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        at += 4
        if size > len(data) - at:
            raise RecordError(ErrorCode.CORRUPT_MESSAGE, "a block of snappy is cut short")
        parts.append(_raw_snappy(data[at : at + size], left))
        left -= len(parts[-1])
        at += size
    return b"".join(parts)


def _raw_snappy(data: Buffer, max_bytes: int) -> Buffer:
    size = cramjam.snappy.decompress_raw_len(data)
    if size > max_bytes:
        raise _too_large(max_bytes)
    # Snappy makes three bytes of 64 at best: a lie is found before memory is taken for it.
    if size > 64 * len(data) + 64:
        raise RecordError(ErrorCode.CORRUPT_MESSAGE, "a block of snappy says more than it can hold")
    out = bytearray(size)
    return memoryview(out)[: cramjam.snappy.decompress_raw_into(data, out)]


def _compress_snappy(data: Buffer) -> bytes:
    out = bytearray(_XERIAL) + struct.pack(">ii", 1, 1)
    for at in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + _XERIAL_BLOCK_BYTES]))
        out += struct.pack(">i", len(block)) + block
    return bytes(out)
