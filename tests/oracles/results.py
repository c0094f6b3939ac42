"""The oracle of what records say without being decoded: what became of entries, and what recovery must know.

`known_results.py` draws the print of an entry.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable

from tests.oracles.frames import byte_view, crc32, places

from tidelog.engine.mvcc.known_results import Found, Open
from tidelog.engine.wal.record_header import (
    COPY_OBJECT,
    FIXED,
    HEADER_BYTES,
    LAST,
    OPERATION,
    REFUSED,
    ROLLBACK_END,
    STRUCTURE,
    decode_operation_head,
    decode_varint,
)
from tidelog.errors import DataError
from tidelog.log.frame import Buffer

APPLIED, NOTHING, REFUSED_STATUS = range(3)
_NAMES = struct.Struct("<IB4H")
_VALUE = struct.Struct("<IQ")
_ROLLBACK_END = struct.Struct(f"<{HEADER_BYTES}xQ")


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
        if len(record) < (HEADER_BYTES if not record or record[0] != OPERATION else 1):
            raise DataError(f"a record of {len(record)} bytes has no header, LSN {first_lsn + index}")
        if record[0] == ROLLBACK_END:
            others.append((len(seqs), index))
        elif record[0] == OPERATION:
            open_entry, is_whole = _added(record, first_lsn + index, open_entry)
            if is_whole:
                seq, names, values, changed = open_entry
                open_entry = (0, names, values, changed)
                seqs.append(seq)
                prints.append(names << 32 | values)
                is_refused = bool(record[1] & REFUSED)
                statuses.append(REFUSED_STATUS if is_refused else APPLIED if changed else NOTHING)
                if is_refused:
                    others.append((len(seqs), index))
    return seqs.tobytes(), prints.tobytes(), bytes(statuses), others, open_entry


def _added(record: memoryview, lsn: int, open_entry: Open) -> tuple[Open, bool]:
    """The open entry with an operation more, and whether it is complete."""
    head = decode_operation_head(record, lsn)
    seq, (open_seq, names, values, changed) = head.seq, open_entry
    if not head.previous_lsn:
        names, values, changed = 0, 0, False
    elif seq != open_seq:
        return (0, names, values, changed), False  # its beginning was not seen, or it was never completed
    lengths = head.lengths[:4]
    texts = record[head.names_offset : head.names_offset + sum(lengths)]
    names = crc32(texts, crc32(_NAMES.pack(head.order, head.op, *lengths), names))
    values = crc32(_VALUE.pack(head.crc, head.size) if head.op != COPY_OBJECT else bytes(_VALUE.size), values)
    return (seq, names, values, changed or head.updates_offset < len(record)), bool(head.flags & LAST)


def survey(
    first_lsn: int, buffer: Buffer, positions: Buffer, lengths: Buffer, open_seq: int, open_lsn: int, /
) -> tuple[int, int, int, int, list[int]]:
    """(seq and LSN of the last entry that is complete, seq and newest LSN of one that is not, other records' indexes).

    `open_seq` and `open_lsn` are what the frames before ended with; 0 for nothing. Other records are all that are
    neither operations nor structure.
    """
    view = byte_view(buffer)
    applied_seq = applied_lsn = 0
    others: list[int] = []
    for index, position, length in places(view, positions, lengths, 0):
        lsn = first_lsn + index
        if length and view[position] == OPERATION:
            head = decode_operation_head(view[position : position + length], lsn)
            if head.flags & LAST:
                applied_seq, applied_lsn, open_seq, open_lsn = head.seq, lsn, 0, 0
            else:
                open_seq, open_lsn = head.seq, lsn
        elif length < HEADER_BYTES:
            raise DataError(f"a record of {length} bytes has no header, LSN {lsn}")
        elif view[position] != STRUCTURE:
            others.append(index)
    return applied_seq, applied_lsn, open_seq, open_lsn, others


def entry_ends(
    first_lsn: int, buffer: Buffer, positions: Buffer, lengths: Buffer, /
) -> tuple[bytes, bytes, list[tuple[int, int, int]]]:
    """(seqs of the entries that end here, the LSNs of the records they end with, the rollbacks that end here).

    A rollback is (how many of the ends come before it, its target seq, its LSN).
    """
    view = byte_view(buffer)
    seqs, lsns = array("Q"), array("Q")
    rollbacks: list[tuple[int, int, int]] = []
    least = {OPERATION: FIXED.size + 1, ROLLBACK_END: _ROLLBACK_END.size}
    for lsn, (_, at, length) in enumerate(places(view, positions, lengths, 0), first_lsn):
        record = view[at : at + length]
        kind = record[0] if record else 0
        if length < least.get(kind, HEADER_BYTES):
            raise DataError(f"a record of {length} bytes is cut short, LSN {lsn}")
        if kind == OPERATION and record[1] & LAST:
            try:
                seqs.append(decode_varint(record, FIXED.size)[0])
            except DataError as error:
                raise DataError(f"a record of {length} bytes is cut short, LSN {lsn}") from error
            lsns.append(lsn)
        elif kind == ROLLBACK_END:
            rollbacks.append((len(seqs), *_ROLLBACK_END.unpack_from(record), lsn))
    return seqs.tobytes(), lsns.tobytes(), rollbacks
