"""The pure-Python twin of the C kernel that looks over records: what recovery must know of them, without decoding them.

The same answers as `_engine.c`, slower.
"""

from __future__ import annotations

import struct

from tidelog.engine.record_header import HEADER_BYTES, LAST, OPERATION, STRUCTURE
from tidelog.errors import DataError
from tidelog.log.frame_python import Buffer, byte_view, places

_HEAD = struct.Struct("<BB6xQ")


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
        if length < HEADER_BYTES:
            raise DataError(f"record {first_lsn + index}: it is too short for a record")
        kind, flags, transaction = _HEAD.unpack_from(view, position)
        if kind == OPERATION:
            if flags & LAST:
                applied_seq, applied_lsn, open_seq, open_lsn = transaction, first_lsn + index, 0, 0
            else:
                open_seq, open_lsn = transaction, first_lsn + index
        elif kind != STRUCTURE:
            others.append(index)
    return applied_seq, applied_lsn, open_seq, open_lsn, others
