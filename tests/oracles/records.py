"""The oracle of `native/records.c`: the same answers, put together from the formats where they are at home."""

from __future__ import annotations

from tests.oracles.cells import cell_parts
from tests.oracles.frames import crc32

from tidelog.engine.btree.page import PUT, PUT_HEADER, encode_insert
from tidelog.engine.mvcc.cells import at, encode_inline, encode_pointer
from tidelog.engine.mvcc.cells import object_prefix as _object_prefix
from tidelog.engine.wal.operations import PUT_OBJECT
from tidelog.engine.wal.record_header import (
    COPY_OBJECT,
    FIXED,
    OPERATION,
    PART_OF_BATCH,
    REFUSED,
    U16,
    U32,
    encode_varint,
)
from tidelog.engine.wal.value import StoredValue, ValueEncoder
from tidelog.log.frame import HEADER_BYTES as FRAME_HEADER_BYTES

__all__ = ["cell_parts", "object_key", "operation_head", "plain_data", "put_record", "stored_record"]

_values = ValueEncoder()


def object_key(bucket: str, name: str, seq: int, /) -> bytes:
    """The key of a version in the tree."""
    return at(_object_prefix(bucket, name), seq)


def operation_head(
    flags: int,
    time_us: int,
    crc: int,
    op: int,
    codec: int,
    seq: int,
    previous_lsn: int,
    order: int,
    size: int,
    stored_bytes: int,
    *lengths: int,
) -> bytes:
    """All of an operation before its names."""
    number = encode_varint
    is_part, is_copy, is_refused = flags & PART_OF_BATCH, op == COPY_OBJECT, flags & REFUSED
    if (not is_part and (previous_lsn or order)) or (not is_refused and lengths[4]):
        raise ValueError("an operation that is no part of a batch has none before it, and one that counts no reason")
    bucket, key, *source, reason = lengths
    parts = [FIXED.pack(OPERATION, flags, time_us, crc, op | codec << 4), number(seq)]  # neither half is over 15
    if is_part:
        parts += (number(previous_lsn), number(order, U32))
    parts += (number(size), number(stored_bytes, U32), number(bucket, U16), number(key, U16))
    if is_copy:
        parts += (number(length, U16) for length in source)
    if is_refused:
        parts.append(number(reason, U16))
    return b"".join(parts)


def put_record(
    seq: int,
    flags: int,
    previous_lsn: int,
    time_us: int,
    order: int,
    bucket: str,
    name: str,
    data: bytes,
    page: int,
    lsn: int,
    position: int,
    /,
) -> tuple[bytes, bytes]:
    """The record of a put without metadata, stored as it is, and the cell that points to its value.

    The cell is inserted into `page` under the key of the version. The record will have this LSN, and its frame begins
    at `position`.
    """
    value = _values.store(data, {})
    return stored_record(
        *(seq, flags, previous_lsn, time_us, order, bucket, name, value.stored, page, lsn, position),
        *(value.codec, value.size, value.crc, False),
    )


def stored_record(
    seq: int,
    flags: int,
    previous_lsn: int,
    time_us: int,
    order: int,
    bucket: str,
    name: str,
    stored: bytes,
    page: int,
    lsn: int,
    position: int,
    codec: int,
    size: int,
    crc: int,
    is_inline: bool,
    /,
) -> tuple[bytes, bytes]:
    """The same for a value that is given as it is stored. `is_inline` puts it into the cell, too."""
    names = bucket.encode(), name.encode()
    head = put_head(seq, flags, previous_lsn, time_us, order, *names, StoredValue(stored, codec, size, crc))
    if is_inline:
        value = encode_inline(order, size, crc, codec, stored)
        updates = encode_insert(page, object_key(bucket, name, seq), value)
    else:
        place = value_position(position, head, *names)
        value = encode_pointer(order, size, crc, codec, lsn, place, len(stored))
        updates = encode_put_update(page, place)
    return b"".join((head, *names, stored, updates)), value


def value_position(frame_position: int, head: bytes, bucket: bytes, key: bytes) -> int:
    """The position of a put's value in the log, given its frame at `frame_position`."""
    return frame_position + FRAME_HEADER_BYTES + len(head) + len(bucket) + len(key)


def put_head(
    seq: int, flags: int, previous_lsn: int, time_us: int, order: int, bucket: bytes, key: bytes, value: StoredValue
) -> bytes:
    """The bytes of a put's record before its names."""
    stored, codec, size, crc = value
    lengths = (len(bucket), len(key), 0, 0, 0)
    numbers = (seq, previous_lsn, order, size, len(stored))
    return operation_head(flags, time_us, crc, PUT_OBJECT, codec, *numbers, *lengths)


def encode_put_update(page: int, position: int) -> bytes:
    """Encodes a PUT, whose value is at a position of the log."""
    return PUT_HEADER.pack(page, PUT) + encode_varint(position)


def plain_data(stored: bytes, size: int, crc: int, /) -> bytes | None:
    """The data of a value without metadata that is as it must be, else None."""
    if len(stored) != size + 4 or stored[:4] != bytes(4) or crc32(stored) != crc:
        return None
    return stored[4:]
