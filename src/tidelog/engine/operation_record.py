"""The record of one operation of an entry (kind OPERATION).

    byte 32  time_us u64, order u32, op u8, lengths u16 of (bucket, key, src_bucket, src_key, reason), crc u32,
             size u64, codec u8, stored_bytes u32
    byte 72  bucket, key, src_bucket, src_key, reason (UTF-8), stored body; then page updates

Invariants
- A lone entry is one record with LAST. A batch is one record for each of its operations (`order` 0, 1, ...), chained by
  `previous_lsn`; the last of them has LAST. Refused ones carry neither body nor updates, but crc and size of the body.
- Where the body of a put will be is known from the lengths of its names, before the record is built.
- Of a copy `bucket` and `key` are the destination; it has no body, and crc and size are those of its source.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from tidelog.engine.body import CODEC_ZSTD, StoredBody, decode_body, encode_body
from tidelog.engine.entry import (
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
    operations,
)
from tidelog.engine.record_header import LAST, OPERATION, PART_OF_BATCH, REFUSED, decode_header
from tidelog.engine.updates import record_updates
from tidelog.errors import DataError, InputError
from tidelog.log.frame import HEADER_BYTES as FRAME_HEADER_BYTES
from tidelog.log.frame import crc32

CREATE_BUCKET: Final = 1
DELETE_BUCKET: Final = 2
DELETE_BUCKET_FORCE: Final = 3
PUT_OBJECT: Final = 4
DELETE_OBJECT: Final = 5
COPY_OBJECT: Final = 6

_OPERATION = struct.Struct("<BBHIQQQQIBHHHHHIQBI")
OPERATION_BYTES: Final = _OPERATION.size
TIME_BYTE: Final = 32
"""Where an operation's time is in its payload."""
_MAX_REASON_BYTES = 4096
_MAX_FLAGS = LAST | REFUSED | PART_OF_BATCH
_NO_BODY = StoredBody(b"", 0, 0, 0)


class OperationRecord(msgspec.Struct, frozen=True, gc=False):
    """One operation of an entry, as it is in the log. `body_offset` is where the stored body begins in the payload."""

    transaction: int
    flags: int
    previous_lsn: int
    time_us: int
    order: int
    op: int
    bucket: str
    key: str
    src_bucket: str
    src_key: str
    reason: str
    crc: int
    size: int
    codec: int
    stored_bytes: int
    body_offset: int
    stored: bytes
    updates: bytes

    @property
    def is_last(self) -> bool:
        """Whether it completes its entry."""
        return bool(self.flags & LAST)

    @property
    def is_refused(self) -> bool:
        """Whether its entry changed nothing."""
        return bool(self.flags & REFUSED)

    @property
    def identity(self) -> Identity:
        """What it has in common with every other record of the same operation."""
        crc, size = (0, 0) if self.op == COPY_OBJECT else (self.crc, self.size)
        return Identity(self.order, Names(self.op, self.bucket, self.key, self.src_bucket, self.src_key), crc, size)


class Names(NamedTuple):
    """What an operation does to what."""

    op: int
    bucket: str
    key: str = ""
    src_bucket: str = ""
    src_key: str = ""


class Identity(NamedTuple):
    """What makes two operations the same. What a copy finds at its source does not belong to it."""

    order: int
    names: Names
    crc: int
    size: int


def names_of(operation: Operation) -> Names:
    """The op code and the names of an operation."""
    match operation:
        case PutObject():
            return Names(PUT_OBJECT, operation.bucket, operation.key)
        case DeleteObject():
            return Names(DELETE_OBJECT, operation.bucket, operation.key)
        case CopyObject():
            source = (operation.src_bucket, operation.src_key)
            return Names(COPY_OBJECT, operation.dest_bucket, operation.dest_key, *source)
        case CreateBucket():
            return Names(CREATE_BUCKET, operation.bucket)
        case DeleteBucket():
            return Names(DELETE_BUCKET_FORCE if operation.force else DELETE_BUCKET, operation.bucket)


def same_entry(records: Sequence[OperationRecord], entry: Entry) -> bool:
    """Whether these records, all of one transaction and in order, are of this entry."""
    wanted = operations(entry)
    if len(records) != len(wanted):
        return False
    return all(
        record.identity == identity_of(operation, order)
        for order, (record, operation) in enumerate(zip(records, wanted, strict=True))
    )


def identity_of(operation: Operation, order: int) -> Identity:
    """The identity that the record of an operation has, as the one with this number of its entry."""
    if isinstance(operation, PutObject):
        crc = crc32(encode_body(operation.data, operation.metadata))
        return Identity(order, names_of(operation), crc, len(operation.data))
    return Identity(order, names_of(operation), 0, 0)


def body_position(frame_position: int, bucket: bytes, key: bytes) -> int:
    """Where in the log the body of a put will be whose frame begins at `frame_position`."""
    return frame_position + FRAME_HEADER_BYTES + OPERATION_BYTES + len(bucket) + len(key)


def encode_put(
    seq: int,
    flags: int,
    previous_lsn: int,
    time_us: int,
    order: int,
    bucket: bytes,
    key: bytes,
    body: StoredBody,
    updates: bytes,
) -> bytes:
    """The record of a put; there are more of these than of all others."""
    stored, codec, size, crc = body
    bucket_bytes = len(bucket)
    key_bytes = len(key)
    stored_bytes = len(stored)
    updates_offset = OPERATION_BYTES + bucket_bytes + key_bytes + stored_bytes
    # fmt: off
    head = _OPERATION.pack(
        OPERATION, flags, 0, updates_offset, seq, previous_lsn, 0, time_us, order, PUT_OBJECT,
        bucket_bytes, key_bytes, 0, 0, 0, crc, size, codec, stored_bytes,
    )
    # fmt: on
    return b"".join((head, bucket, key, stored, updates))


def encode_operation(
    operation: Operation,
    seq: int,
    *,
    flags: int,
    previous_lsn: int = 0,
    time_us: int,
    order: int = 0,
    body: StoredBody = _NO_BODY,
    reason: str = "",
    updates: bytes = b"",
) -> bytes:
    """The record of any operation.

    `body` is that of a put; of a copy it is the source's crc and size without anything stored; of a refused put the
    same for the object that was to be.
    """
    op, *names = names_of(operation)
    texts = [*(name.encode() for name in names), _cut_text(reason)]
    lengths = [len(text) for text in texts]
    stored = b"" if flags & REFUSED else body.stored
    # fmt: off
    head = _OPERATION.pack(
        OPERATION, flags, 0, OPERATION_BYTES + sum(lengths) + len(stored), seq, previous_lsn, 0, time_us, order, op,
        *lengths, body.crc, body.size, body.codec, len(stored),
    )
    # fmt: on
    return b"".join((head, *texts, stored, updates))


def _cut_text(text: str) -> bytes:
    """A reason is for people: too much of it is cut, between two characters."""
    return text.encode("utf-8", "replace")[:_MAX_REASON_BYTES].decode("utf-8", "ignore").encode()


def decode_operation(payload: bytes, lsn: int) -> OperationRecord:
    """A record of this kind; DataError for any other."""
    if len(payload) < OPERATION_BYTES or payload[0] != OPERATION:
        kind = decode_header(payload, lsn).kind
        raise DataError(f"a record of kind {kind} with {len(payload)} bytes is no operation, LSN {lsn}")
    # fmt: off
    (_, flags, zero, end, seq, previous_lsn, undo_next_lsn, time_us, order, op, *lengths, crc, size, codec,
     stored_bytes) = _OPERATION.unpack_from(payload)
    # fmt: on
    if flags > _MAX_FLAGS or zero or undo_next_lsn or previous_lsn >= lsn or end > len(payload):
        decode_header(payload, lsn)  # says what is wrong with it, unless the LSN was not known
    body_offset = OPERATION_BYTES + sum(lengths)
    if body_offset + stored_bytes != end:
        raise DataError(f"the lengths in an operation do not add up, LSN {lsn}")
    bucket, key, src_bucket, src_key, reason = _texts(payload, lengths, lsn)
    # fmt: off
    record = OperationRecord(
        seq, flags, previous_lsn, time_us, order, op, bucket, key, src_bucket, src_key, reason, crc, size, codec,
        stored_bytes, body_offset, payload[body_offset:end], record_updates(payload, lsn),
    )
    # fmt: on
    _check(record, lsn)
    return record


def _texts(payload: bytes, lengths: list[int], lsn: int) -> list[str]:
    texts: list[str] = []
    start = OPERATION_BYTES
    try:
        for length in lengths:
            texts.append(payload[start : start + length].decode() if length else "")
            start += length
    except UnicodeDecodeError as error:
        raise DataError(f"a name in an operation is not UTF-8, LSN {lsn}") from error
    return texts


# Which names each operation has besides its bucket: key, src_bucket, src_key.
_NAMES = {
    CREATE_BUCKET: (False, False, False),
    DELETE_BUCKET: (False, False, False),
    DELETE_BUCKET_FORCE: (False, False, False),
    PUT_OBJECT: (True, False, False),
    DELETE_OBJECT: (True, False, False),
    COPY_OBJECT: (True, True, True),
}


def _check(record: OperationRecord, lsn: int) -> None:
    """Whether it can be the record of an operation at all; whether its names can be names is told by `operation_of`."""
    op, flags = record.op, record.flags
    if op not in _NAMES or _NAMES[op] != (bool(record.key), bool(record.src_bucket), bool(record.src_key)):
        raise DataError(f"an operation has op {op} with names that do not go with it, LSN {lsn}")
    if not record.bucket or not record.transaction or record.codec > CODEC_ZSTD:
        raise DataError(f"an operation has no bucket, or codec {record.codec} or seq {record.transaction}, LSN {lsn}")
    if bool(record.stored_bytes) != (op == PUT_OBJECT and not flags & REFUSED):
        raise DataError(f"an operation has op {op} with a body of {record.stored_bytes} bytes, LSN {lsn}")
    if flags & REFUSED and record.updates:
        raise DataError(f"a refused operation changes pages, LSN {lsn}")
    if record.order and not flags & PART_OF_BATCH:
        raise DataError(f"a lone operation says that it is number {record.order} of a batch, LSN {lsn}")


def operation_of(record: OperationRecord, lsn: int) -> Operation:
    """The operation itself, with data and metadata. A refused put has lost them: DataError."""
    try:
        return _operation_of(record, lsn)
    except InputError as error:
        raise DataError(f"an operation in the log cannot have been one, LSN {lsn}: {error}") from error


def _operation_of(record: OperationRecord, lsn: int) -> Operation:
    bucket, key = record.bucket, record.key
    match record.op:
        case 1:
            return CreateBucket(bucket)
        case 2 | 3:
            return DeleteBucket(bucket, record.op == DELETE_BUCKET_FORCE)
        case 4:
            data, metadata = decode_body(record.stored, record.codec, record.size, record.crc, lsn)
            return PutObject(bucket, key, data, metadata)
        case 5:
            return DeleteObject(bucket, key)
        case _:
            return CopyObject(record.src_bucket, record.src_key, bucket, key)
