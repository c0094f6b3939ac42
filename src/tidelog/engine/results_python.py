"""The pure-Python twin of the C kernel that tells what became of entries, as their records say.

    print of an entry, u64      high half: crc32 over order, op and lengths of names, then the names, of each operation
                                low half:  crc32 over crc and size of each operation's body; zeros for a copy
    status                      0 applied, 1 nothing, 2 refused

The same answers as `_engine.c`, slower.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable

from tidelog.engine.record_header import HEADER_BYTES, LAST, OPERATION, REFUSED, ROLLBACK_END
from tidelog.errors import DataError
from tidelog.log.frame_python import Buffer, byte_view, crc32, places

APPLIED, NOTHING, REFUSED_STATUS = range(3)
_COPY_OBJECT = 6
_OPERATION_BYTES = 72
_HEAD = struct.Struct("<BB2xIQQ")
_LENGTHS = struct.Struct("<4H")

Open = tuple[int, int, int, bool]
"""An entry that is not complete yet: its seq (0 for none), both halves of its print, whether it changed anything."""
NONE_OPEN: Open = (0, 0, 0, False)
Found = tuple[bytes, bytes, bytes, list[tuple[int, int]], Open]
"""Seqs and prints (native u64) and statuses of the entries that became complete; (rows before, index) of the records
that say more: refused ones and ends of rollbacks; and what is open then."""


def results_in(first_lsn: int, buffer: Buffer, positions: Buffer, lengths: Buffer, open_entry: Open, /) -> Found:
    """What the records in frames say."""
    view = byte_view(buffer)
    return _found(
        first_lsn, (view[at : at + length] for _, at, length in places(view, positions, lengths, 0)), open_entry
    )


def results_of(first_lsn: int, records: list[bytes], open_entry: Open, /) -> Found:
    """What a list of records says."""
    return _found(first_lsn, map(memoryview, records), open_entry)


def _found(first_lsn: int, records: Iterable[memoryview], open_entry: Open) -> Found:
    seqs, prints, statuses = array("Q"), array("Q"), bytearray()
    others: list[tuple[int, int]] = []
    for index, record in enumerate(records):
        if len(record) < HEADER_BYTES:
            raise DataError(f"record {first_lsn + index}: it is too short for a record")
        if record[0] == ROLLBACK_END:
            others.append((len(seqs), index))
        elif record[0] == OPERATION:
            open_entry, is_whole = _added(record, first_lsn + index, open_entry)
            if is_whole:
                seq, names, bodies, changed = open_entry
                open_entry = (0, names, bodies, changed)
                seqs.append(seq)
                prints.append(names << 32 | bodies)
                is_refused = bool(record[1] & REFUSED)
                statuses.append(REFUSED_STATUS if is_refused else APPLIED if changed else NOTHING)
                if is_refused:
                    others.append((len(seqs), index))
    return seqs.tobytes(), prints.tobytes(), bytes(statuses), others, open_entry


def _added(record: memoryview, lsn: int, open_entry: Open) -> tuple[Open, bool]:
    """The open entry with an operation more, and whether it is complete."""
    if len(record) < _OPERATION_BYTES:
        raise DataError(f"record {lsn}: it is too short for an operation")
    _, flags, updates_offset, seq, previous_lsn = _HEAD.unpack_from(record)
    name_bytes = sum(_LENGTHS.unpack_from(record, 45))
    if _OPERATION_BYTES + name_bytes > len(record):
        raise DataError(f"record {lsn}: its names go beyond its end")
    open_seq, names, bodies, changed = open_entry
    if not previous_lsn:
        names, bodies, changed = 0, 0, False
    elif seq != open_seq:
        return (0, names, bodies, changed), False  # its beginning was not seen, or it was never completed
    names = crc32(record[_OPERATION_BYTES : _OPERATION_BYTES + name_bytes], crc32(record[40:53], names))
    bodies = crc32(bytes(12) if record[44] == _COPY_OBJECT else record[55:67], bodies)
    return (seq, names, bodies, changed or updates_offset < len(record)), bool(flags & LAST)
