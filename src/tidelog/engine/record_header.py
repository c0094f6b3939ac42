"""What every record of the engine's log begins with.

    byte   0      1       2      4                8             16             24              32
           +------+-------+------+----------------+-------------+--------------+---------------+-----+---------+
           | kind | flags | zero | updates_offset | transaction | previous_lsn | undo_next_lsn | own | updates |
           | u8   | u8    | u16  | u32            | u64         | u64          | u64           |     |         |
           +------+-------+------+----------------+-------------+--------------+---------------+-----+---------+

    little-endian; `own` are the kind's own bytes up to `updates_offset`, `updates` the page updates to the end

Invariants
- `transaction` is the entry's seq for operations and their compensations, and 0 for what the engine does by itself;
  `previous_lsn` is the record before in the same transaction, 0 for the first.
- Payloads come from a disk: what does not fit together raises DataError with the LSN.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from tidelog.errors import DataError

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
_MAX_FLAGS = LAST | REFUSED | PART_OF_BATCH

HEADER: Final = struct.Struct("<BBHIQQQ")
HEADER_BYTES: Final = HEADER.size


class Header(NamedTuple):
    """The first 32 bytes of a record. What its flags mean is told by `LAST` and the others."""

    kind: int
    flags: int
    updates_offset: int
    transaction: int
    previous_lsn: int
    undo_next_lsn: int


def encode_header(
    kind: int, own_bytes: int, *, flags: int = 0, transaction: int = 0, previous_lsn: int = 0, undo_next_lsn: int = 0
) -> bytes:
    """The header of a record with so many bytes of its own before its page updates."""
    return HEADER.pack(kind, flags, 0, HEADER_BYTES + own_bytes, transaction, previous_lsn, undo_next_lsn)


def decode_header(payload: bytes, lsn: int) -> Header:
    """The header alone; the rest of the payload is not looked at."""
    if len(payload) < HEADER_BYTES:
        raise DataError(f"a record of {len(payload)} bytes has no header, LSN {lsn}")
    kind, flags, zero, updates_offset, transaction, previous_lsn, undo_next_lsn = HEADER.unpack_from(payload)
    if not OPERATION <= kind <= REPACK:
        raise DataError(f"a record has kind {kind}, which is not known, LSN {lsn}")
    if flags > _MAX_FLAGS or zero:
        raise DataError(f"a record has flags {flags} and {zero}, which are not known, LSN {lsn}")
    if not HEADER_BYTES <= updates_offset <= len(payload):
        raise DataError(f"a record of {len(payload)} bytes has its page updates at {updates_offset}, LSN {lsn}")
    if previous_lsn >= lsn > 0 or undo_next_lsn >= lsn > 0:
        raise DataError(f"a record points to LSN {max(previous_lsn, undo_next_lsn)}, which is not before LSN {lsn}")
    return Header(kind, flags, updates_offset, transaction, previous_lsn, undo_next_lsn)
