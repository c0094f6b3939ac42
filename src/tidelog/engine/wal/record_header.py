"""Record headers: the first bytes of every WAL record; and the varints in them.

    an operation:

    byte   0      1       2         10    14           15
           +------+-------+---------+-----+------------+---------+-------+------+---------+
           | 1    | flags | time_us | crc | op, codec  | numbers | names | value | updates |
           | u8   | u8    | u64     | u32 | 4 bits each|         |       |      |         |
           +------+-------+---------+-----+------------+---------+-------+------+---------+

    numbers, each a varint (below): seq; with PART_OF_BATCH previous_lsn and order; size, stored_bytes; the
    lengths of bucket and key, of a copy those of src_bucket and src_key, and with REFUSED that of the reason

    every other kind:

    byte   0      1       2      4                8             16             24              32
           +------+-------+------+----------------+-------------+--------------+---------------+-----+---------+
           | kind | flags | zero | updates_offset | transaction | previous_lsn | undo_next_lsn | own | updates |
           | u8   | u8    | u16  | u32            | u64         | u64          | u64           |     |         |
           +------+-------+------+----------------+-------------+--------------+---------------+-----+---------+

    little-endian; `own` are the kind's own bytes up to `updates_offset`, `updates` the page updates to the end

Invariants
- `transaction` is the entry's seq for operations and their compensations, and 0 for what the engine does by itself;
  `previous_lsn` is the record before in the same transaction, 0 for the first.
- Operations are the most frequent records, and small: theirs is the shorter header. A single one has no record
  before it and is number 0, so it stores neither.
- Payloads come from a disk: inconsistent ones raise DataError with the LSN.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from tidelog.errors import DataError

U64: Final = (1 << 64) - 1
U32: Final = (1 << 32) - 1
U16: Final = (1 << 16) - 1
MAX_BYTES: Final = 10
MAX_U32_BYTES: Final = 5
_ONE_BYTE: Final = tuple(bytes((number,)) for number in range(128))

OPERATION: Final = 1
STRUCTURE: Final = 2
COMPENSATION: Final = 3
CHECKPOINT_BEGIN: Final = 4
CHECKPOINT_END: Final = 5
ROLLBACK_BEGIN: Final = 6
ROLLBACK_END: Final = 7
VACUUM: Final = 8
MARKS: Final = 9
REPACK: Final = 10

LAST: Final = 1
"""The record completes its transaction."""
REFUSED: Final = 2
"""The entry was refused: it has its seq, and changed nothing."""
PART_OF_BATCH: Final = 4
MAX_FLAGS: Final = LAST | REFUSED | PART_OF_BATCH

HEADER: Final = struct.Struct("<BBHIQQQ")
HEADER_BYTES: Final = HEADER.size


FIXED: Final = struct.Struct("<BBQIB")
"""What is at the same bytes in every operation: kind, flags, time_us, crc, op and codec."""
COPY_OBJECT: Final = 6


class OperationHead(NamedTuple):
    """What the record of an operation says before its names, and where its parts begin."""

    flags: int
    time_us: int
    crc: int
    op: int
    codec: int
    seq: int
    previous_lsn: int
    order: int
    size: int
    stored_bytes: int
    lengths: tuple[int, int, int, int, int]
    """Bytes of bucket, key, src_bucket, src_key, reason."""
    names_offset: int
    value_offset: int
    updates_offset: int


def decode_operation_head(record: bytes | memoryview, lsn: int) -> OperationHead:
    """The operation in a record, checked to lie inside of it; whether its parts go together is not looked at."""
    if len(record) < FIXED.size or record[0] != OPERATION:
        raise DataError(f"a record of {len(record)} bytes is no operation, LSN {lsn}")
    _, flags, time_us, crc, op = FIXED.unpack_from(record)
    try:
        return _head(record, (flags, time_us, crc, op & 15, op >> 4))
    except DataError as error:
        raise DataError(f"the lengths in an operation do not add up, LSN {lsn}") from error


def _head(record: bytes | memoryview, fixed: tuple[int, int, int, int, int]) -> OperationHead:
    number, flags = decode_varint, fixed[0]
    seq, at = number(record, FIXED.size)
    previous_lsn = order = 0
    if flags & PART_OF_BATCH:
        previous_lsn, at = number(record, at)
        order, at = number(record, at, U32)
    size, at = number(record, at)
    stored_bytes, at = number(record, at, U32)
    bucket, at = number(record, at, U16)
    key, at = number(record, at, U16)
    src_bucket = src_key = reason = 0
    if fixed[3] == COPY_OBJECT:
        src_bucket, at = number(record, at, U16)
        src_key, at = number(record, at, U16)
    if flags & REFUSED:
        reason, at = number(record, at, U16)
    value = at + bucket + key + src_bucket + src_key + reason
    if value + stored_bytes > len(record):
        raise DataError("it is cut short")
    lengths = bucket, key, src_bucket, src_key, reason
    return OperationHead(*fixed, seq, previous_lsn, order, size, stored_bytes, lengths, at, value, value + stored_bytes)


class Header(NamedTuple):
    """The header of every record. `LAST` and the others define the flags."""

    kind: int
    flags: int
    updates_offset: int
    transaction: int
    previous_lsn: int
    undo_next_lsn: int


def encode_header(
    kind: int, own_bytes: int, *, flags: int = 0, transaction: int = 0, previous_lsn: int = 0, undo_next_lsn: int = 0
) -> bytes:
    """The header of a record, not of an operation, with so many bytes of its own before its page updates."""
    assert kind != OPERATION
    return HEADER.pack(kind, flags, 0, HEADER_BYTES + own_bytes, transaction, previous_lsn, undo_next_lsn)


def decode_header(payload: bytes | memoryview, lsn: int) -> Header:
    """The header alone; the rest of the payload is not looked at."""
    header = _operation_header(payload, lsn) if payload and payload[0] == OPERATION else _header(payload, lsn)
    kind, flags, updates_offset, _, previous_lsn, undo_next_lsn = header
    if not OPERATION <= kind <= REPACK:
        raise DataError(f"record has unknown kind {kind}, LSN {lsn}")
    if flags > MAX_FLAGS:
        raise DataError(f"record has unknown flags {flags}, LSN {lsn}")
    if updates_offset > len(payload):
        raise DataError(f"a record of {len(payload)} bytes has its page updates at {updates_offset}, LSN {lsn}")
    if previous_lsn >= lsn > 0 or undo_next_lsn >= lsn > 0:
        raise DataError(f"a record points to LSN {max(previous_lsn, undo_next_lsn)}, which is not before LSN {lsn}")
    return header


def _operation_header(payload: bytes | memoryview, lsn: int) -> Header:
    head = decode_operation_head(payload, lsn)
    return Header(OPERATION, head.flags, head.updates_offset, head.seq, head.previous_lsn, 0)


def _header(payload: bytes | memoryview, lsn: int) -> Header:
    if len(payload) < HEADER_BYTES:
        raise DataError(f"a record of {len(payload)} bytes has no header, LSN {lsn}")
    kind, flags, zero, updates_offset, *numbers = HEADER.unpack_from(payload)
    if zero:
        raise DataError(f"record has unknown flags {flags} and {zero}, LSN {lsn}")
    if updates_offset < HEADER_BYTES:
        raise DataError(f"a record of {len(payload)} bytes has its page updates at {updates_offset}, LSN {lsn}")
    return Header(kind, flags, updates_offset, *numbers)


# Varints, variable-length integers: LEB128, seven bits per byte, lowest first; the eighth bit says that more bytes
# follow.
#
#     0 to 127        1 byte
#     up to 16383     2 bytes
#     ...
#     up to 2**64-1   10 bytes
#
# Invariants
# - Encodings are minimal. Non-minimal ones are accepted on decoding: encodings are never compared.
# - Input comes from a disk: a truncated or overlong number raises DataError.
#
# `native/varint.h` is the same in C.


def encode_varint(number: int, largest: int = U64) -> bytes:
    """Encodes a number; OverflowError if it is negative or too large."""
    if 0 <= number < 128:
        return _ONE_BYTE[number]
    if not 0 <= number <= largest:
        raise OverflowError(f"{number} does not fit")
    taken = bytearray()
    while number >= 128:
        taken.append(number & 127 | 128)
        number >>= 7
    taken.append(number)
    return bytes(taken)


def decode_varint(data: bytes | memoryview, at: int, largest: int = U64) -> tuple[int, int]:
    """Decodes the number that begins at a byte; returns it and the offset after it."""
    number = shift = 0
    for byte in data[at : at + MAX_BYTES]:
        at += 1
        if byte < 128:
            number |= byte << shift
            if number > largest:
                break
            return number, at
        number |= (byte & 127) << shift
        shift += 7
    raise DataError("a number is cut short, or too large")
