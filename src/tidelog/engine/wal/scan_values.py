"""The values of the rows of a scan, a batch at a time: what takes a step for each row is C (`native/scan_values.c`).

    rows of the index ─> those with their values in them
                      ─> values in files of the log, on this disk or in the store      by their positions
                      ─> values in blob files of a compaction                          by the keys of their versions
                             └── neighbours come with one read, each checked when it is taken; those on this disk with
                                 one call for many ranges, without the GIL

Invariants
- A value that was taken has the checksum of its row. What is compressed or has metadata is decoded one by one.
- What cannot be found or read this way is left out, and read alone by the caller, which says what is wrong with it.
- Where values are is known for one source at a time: `Places` of the disk are not those of the store.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from tidelog._native import (
    cut_rows,
    group_places,
    join_places,
    place_in_index,
    place_in_log,
    start_values,
    take_values,
    unfinished,
)
from tidelog.engine.wal.value import decode_value
from tidelog.errors import DataError

Row = tuple[Any, ...]
"""A row of a listing with values (`mvcc/versions.py`)."""
PLAIN_COLUMNS: Final = 6
"""Of a row with its data: (key, size, seq, crc, data, metadata)."""
Stored = tuple[bytes, int]
"""A stored value and its codec."""

_PLACE_BYTES = 24


def batches_of(lists: Iterator[list[Row]], sizes: Iterator[tuple[int, int]]) -> Iterator[list[Row]]:
    """Cuts lists of rows into batches: of at most so many rows, and of so many bytes of values, or one that is larger;
    each of the next size.
    """
    rows, begin = list[Row](), 0
    for most_rows, most_bytes in sizes:
        end = cut_rows(rows, begin, most_rows, most_bytes)
        while end == len(rows) and (more := next(lists, None)) is not None:
            rows, begin = rows[begin:] + more, 0
            end = cut_rows(rows, begin, most_rows, most_bytes)
        if begin == end:
            return
        yield rows[begin:end]
        begin = end


class Group(NamedTuple):
    """Values that come with one read: bytes of a file, and the numbers of the rows in it."""

    unit: int
    first_byte: int
    end: int
    indexes: bytes

    def span(self) -> tuple[int, int]:
        return self.first_byte, self.end


class Joined(NamedTuple):
    """Values of one file that come one after the other: pairs of a byte and a count, and the numbers of the rows."""

    unit: int
    ranges: bytes
    indexes: bytes


class ScannedRows:
    """Rows of a scan, in the order of keys or in reverse, and the values that were found so far."""

    def __init__(self, rows: list[Row], prefix: bytes, *, is_reverse: bool) -> None:
        self.rows = rows
        self.prefix = prefix
        """What the keys of their versions in the tree begin with."""
        self.is_reverse = is_reverse
        self.values: list[Row | Stored | None]
        self.values, self.missing = start_values(rows)

    def left_in_log(self) -> list[tuple[int, Row]]:
        """The rows, with their numbers, whose values are in the log and were not found yet."""
        left = ((number, self.rows[number]) for number in unfinished(self.values) if self.values[number] is None)
        return [(number, row) for number, row in left if row[8] is None]

    def finished(self, read_alone: Callable[[Row], Row]) -> list[Row]:
        """The rows with data and metadata. Those whose values were not found, or are damaged, are read alone."""
        found: list[Any] = self.values
        for number in unfinished(self.values):
            row, value = self.rows[number], found[number]
            found[number] = (None if value is None else _decoded(row, value)) or read_alone(row)
        return found


def _decoded(row: Row, value: Stored) -> Row | None:
    _, size, _, crc, _, lsn, *_ = row
    try:
        return *row[:4], *decode_value(value[0], value[1], size, crc, lsn)
    except DataError:
        return None


class Places:
    """Where the values are that are not there yet: in units, which are files of some kind, counted from 0 on."""

    def __init__(self, scanned: ScannedRows) -> None:
        self._scanned = scanned
        self._batch = scanned.rows, scanned.values, bytearray(b"\xff" * (_PLACE_BYTES * len(scanned.rows)))

    def in_log(self, first_unit: int, starts: Sequence[int], ends: Sequence[int], first_row: int = 0) -> int:
        """Finds values in files that have these bytes of the log; returns the first row from one on whose value is in
        none, or the number of rows.
        """
        return place_in_log(
            *self._batch, first_unit, array("Q", starts).tobytes(), array("Q", ends).tobytes(), first_row
        )

    def in_index(self, first_unit: int, blocks: list[bytes]) -> int:
        """Finds values of blob files by blocks of the version index of a compaction, which follow each other; returns
        how many.
        """
        return place_in_index(*self._batch, first_unit, self._scanned.prefix, blocks, self._scanned.is_reverse)

    def groups(self, *, gap_bytes: int, range_bytes: int) -> list[Group]:
        """Those that come with one read: at most so far apart, and so many bytes together, or one value of more."""
        return list(map(Group._make, group_places(*self._batch[1:], gap_bytes, range_bytes)))

    def joined(self, *, gap_bytes: int, most_bytes: int) -> list[Joined]:
        """Those that come with one call, as ranges of a file: so many bytes together, or one value of more. Afterwards
        the places are those in what comes; `take_joined` takes them.
        """
        return list(map(Joined._make, join_places(*self._batch[1:], gap_bytes, most_bytes)))

    def take_joined(self, joined: Joined, data: bytes) -> None:
        """Takes the values out of what was read. Its checksum shows one that is not there as the row says."""
        take_values(*self._batch, joined.indexes, data, 0)

    def take(self, group: Group, data: bytes | memoryview) -> int:
        """Takes the values of a group out of what was read; returns how many bytes they have."""
        return take_values(*self._batch, group.indexes, data, group.first_byte)
