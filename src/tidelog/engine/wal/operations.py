"""The record of one operation of an entry (kind OPERATION).

Its header is drawn in `record_header.py`; then follow bucket, key, src_bucket, src_key and reason (UTF-8), as far as it
has them, the stored value, and page updates to the end.

Invariants
- A single-operation entry is one record with LAST. A batch is one record per operation (`order` 0, 1, ...), chained by
  `previous_lsn`; the last of them has LAST. Refused ones carry neither value nor updates, but crc and size of the
  value.
- The location of a put's value is known from its header, before page updates are.
- In a copy, `bucket` and `key` are the destination; it has no value, and crc and size are those of its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from tidelog._native import operation_head
from tidelog.engine.btree.page import record_updates
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
from tidelog.engine.wal.record_header import (
    COPY_OBJECT,
    LAST,
    MAX_FLAGS,
    OPERATION,
    REFUSED,
    OperationHead,
    decode_header,
    decode_operation_head,
)
from tidelog.engine.wal.value import CODEC_FILE, NO_VALUE, StoredValue, decode_value, size_and_crc
from tidelog.errors import DataError, InputError

CREATE_BUCKET: Final = 1
DELETE_BUCKET: Final = 2
DELETE_BUCKET_FORCE: Final = 3
PUT_OBJECT: Final = 4
DELETE_OBJECT: Final = 5

_MAX_REASON_BYTES = 4096


class OperationRecord(msgspec.Struct, frozen=True, gc=False):
    """One operation of an entry, as in the WAL. `value_offset` is where the stored value begins in the payload."""

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
    value_offset: int
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
    """What makes two operations the same. What a copy finds at its source is not part of it."""

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
    """Whether these records, all of one transaction and in order, are those of this entry."""
    wanted = operations(entry)
    if len(records) != len(wanted):
        return False
    return all(
        record.identity == identity_of(operation, order)
        for order, (record, operation) in enumerate(zip(records, wanted, strict=True))
    )


def identity_of(operation: Operation, order: int) -> Identity:
    """The identity in the record of an operation, given its number in its entry."""
    if isinstance(operation, PutObject):
        size, crc = size_and_crc(operation)
        return Identity(order, names_of(operation), crc, size)
    return Identity(order, names_of(operation), 0, 0)


def encode_operation(
    operation: Operation,
    seq: int,
    *,
    flags: int,
    previous_lsn: int = 0,
    time_us: int,
    order: int = 0,
    value: StoredValue = NO_VALUE,
    reason: str = "",
    updates: bytes = b"",
) -> bytes:
    """Encodes the record of any operation.

    `value` is that of a put; for a copy the source's crc and size without stored bytes; for a refused put the same for
    the rejected object.
    """
    op, *names = names_of(operation)
    texts = [*(name.encode() for name in names), _cut_text(reason)]
    stored = b"" if flags & REFUSED else value.stored
    lengths = tuple(len(text) for text in texts)
    numbers = (seq, previous_lsn, order, value.size, len(stored))
    head = operation_head(flags, time_us, value.crc, op, value.codec, *numbers, *lengths)
    return b"".join((head, *texts, stored, updates))


def _cut_text(text: str) -> bytes:
    """Truncates a reason, which is for people, at a character boundary."""
    return text.encode("utf-8", "replace")[:_MAX_REASON_BYTES].decode("utf-8", "ignore").encode()


def decode_operation(payload: bytes, lsn: int) -> OperationRecord:
    """Decodes a record of this kind; DataError for any other."""
    if not payload or payload[0] != OPERATION:
        kind = decode_header(payload, lsn).kind
        raise DataError(f"a record of kind {kind} with {len(payload)} bytes is no operation, LSN {lsn}")
    head = decode_operation_head(payload, lsn)
    if head.flags > MAX_FLAGS or head.previous_lsn >= lsn:
        decode_header(payload, lsn)  # says what is wrong with it, unless the LSN was not known
    bucket, key, src_bucket, src_key, reason = _texts(payload, head, lsn)
    # fmt: off
    record = OperationRecord(
        head.seq, head.flags, head.previous_lsn, head.time_us, head.order, head.op, bucket, key, src_bucket, src_key,
        reason, head.crc, head.size, head.codec, head.stored_bytes, head.value_offset,
        payload[head.value_offset : head.updates_offset], record_updates(payload, lsn),
    )
    # fmt: on
    _check(record, lsn)
    return record


def _texts(payload: bytes, head: OperationHead, lsn: int) -> list[str]:
    texts: list[str] = []
    start = head.names_offset
    try:
        for length in head.lengths:
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
    """Checks that it can be the record of an operation; `operation_of` validates the names."""
    op, flags = record.op, record.flags
    if op not in _NAMES or _NAMES[op] != (bool(record.key), bool(record.src_bucket), bool(record.src_key)):
        raise DataError(f"an operation has op {op} with names that do not go with it, LSN {lsn}")
    if not record.bucket or not record.transaction or record.codec > CODEC_FILE:
        raise DataError(f"an operation has no bucket, or codec {record.codec} or seq {record.transaction}, LSN {lsn}")
    if bool(record.stored_bytes) != (op == PUT_OBJECT and not flags & REFUSED):
        raise DataError(f"an operation has op {op} with a value of {record.stored_bytes} bytes, LSN {lsn}")
    if flags & REFUSED and record.updates:
        raise DataError(f"a refused operation changes pages, LSN {lsn}")


def operation_of(record: OperationRecord, lsn: int) -> Operation:
    """Returns the operation itself, with data and metadata. A refused put has lost them, and those of one with a value
    file are there: DataError.
    """
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
            data, metadata = decode_value(record.stored, record.codec, record.size, record.crc, lsn)
            return PutObject(bucket, key, data, metadata)
        case 5:
            return DeleteObject(bucket, key)
        case _:
            return CopyObject(record.src_bucket, record.src_key, bucket, key)
