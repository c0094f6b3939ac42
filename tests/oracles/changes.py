"""The oracle of what records did to rows of the tree: one record after the other, one row after the other."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from zlib import crc32

from tests.oracles.frames import byte_view, places

from tidelog.engine.mvcc.cells import SEQ_BYTES
from tidelog.engine.wal.record_header import VACUUM
from tidelog.engine.wal.replay import Change, LogRange, ShippedLog, changes_of, counting, history_start_in, records_of

Columns = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]


def read_changes(log: ShippedLog, part: LogRange) -> Iterator[Change]:
    """Yields the rows that the entries of a range, and retention in it, changed, in log order."""
    for frames, indexes in counting(log, part, removals=True):
        for lsn, record in records_of(frames, indexes):
            history_start_in(record, lsn)
            yield from changes_of(record, lsn)


def gather_changes(
    first_lsn: int, buffer: bytes, positions: bytes, lengths: bytes, indexes: bytes, start: int, max_rows: int
) -> tuple[int, int, list[int], Columns]:
    """The columns of as many records as it takes to have so many rows."""
    view = byte_view(buffer)
    found = [(position, length) for _, position, length in places(view, positions, lengths, 0)]
    rows: list[Change] = []
    vacuums, at = [], start
    chosen = struct.unpack(f"<{len(indexes) // 4}I", indexes)
    while at < len(chosen) and len(rows) < max_rows:
        index = chosen[at]
        if index >= len(found):
            raise ValueError(f"there is no record {index}")
        position, length = found[index]
        record = view[position : position + length]
        if record[0] == VACUUM:
            vacuums.append(index)
        rows += changes_of(record, first_lsn + index)
        at += 1
    return len(rows), at, vacuums, _columns(rows)


def _columns(rows: list[Change]) -> Columns:
    keys, cells = [bytes(key) for key, *_ in rows], [cell for *_, cell in rows]
    bits = bytearray((len(rows) + 7) // 8)
    for row, cell in enumerate(cells):
        bits[row // 8] |= (cell is not None) << (row % 8)
    numbers = f"<{len(rows)}"
    return (
        _ends(keys),
        b"".join(keys),
        struct.pack(f"{numbers}q", *(lsn for _, lsn, _, _ in rows)),
        struct.pack(f"{numbers}i", *(step for _, _, step, _ in rows)),
        bytes(bits),
        _ends([cell or b"" for cell in cells]),
        b"".join(cell or b"" for cell in cells),
        struct.pack(f"{numbers}i", *(crc32(key[:-SEQ_BYTES]) & 0x7FFFFFFF for key in keys)),
    )


def _ends(values: list[bytes]) -> bytes:
    ends = [0]
    for value in values:
        ends.append(ends[-1] + len(value))
    return struct.pack(f"<{len(ends)}i", *ends)
