"""Changed rows of an engine's log as Arrow columns, and the last change of each row, in order of key.

    key binary      the key in the tree
    lsn bigint      of the record that changed it: per key the last (lsn, number) counts
    number int      which of the record's changes it is
    cell binary     what the tree has there from then on; null if the row was removed
    part int        the same number for all versions of one name: group by it to have them in one task

    change_columns(part)     everything that a part of the log changed, in its order
    LastChanges              of several parts, in any order: one change a row, in order of key
    RangedChanges            the same of many rows, by ranges of keys

Invariants
- There is no object a row: records are taken apart in C (`native/changes.h`), rows are sorted and packed there, too.
- Which records count is decided as everywhere (`engine/wal/replay.py`).
- `LastChanges` holds the last change of each row, and of what may not be the last at most as much again: between
  `_UNSETTLED_BYTES` and `_MOST_UNSETTLED_BYTES`. Rows must be less than 2 GiB: so much fits into a column. Of
  `RangedChanges` that holds of each range.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tidelog import _native
from tidelog.engine.sst.block import PackedRows
from tidelog.engine.wal.record_header import LAST, VACUUM
from tidelog.engine.wal.replay import ShippedLog, counting, history_start_in
from tidelog.log.frame import Frames
from tidelog.pipeline.pieces import bytes_column, order_of
from tidelog.pipeline.source.entry_batches import LogPart
from tidelog.pipeline.tasks import BATCH_ROWS, arrow_schema
from tidelog.store.scheduler import in_parallel

if TYPE_CHECKING:
    import pyarrow as pa

CHANGE_SCHEMA = "key binary, lsn bigint, number int, cell binary, part int"


def change_batches(part: LogPart) -> Iterator[pa.RecordBatch]:
    """The rows that the entries of a part of the log changed, in its order, without an object for each of them."""
    import pyarrow as pa

    names = [field.split()[0] for field in CHANGE_SCHEMA.split(", ")]
    for _, columns in change_columns(part):
        yield pa.RecordBatch.from_arrays(list(columns), names=names)


class ChangeColumns(NamedTuple):
    """Rows that records changed, as Arrow arrays in the order of `CHANGE_SCHEMA`. A row without a cell is removed."""

    key: pa.Array
    lsn: pa.Array
    number: pa.Array
    cell: pa.Array
    part: pa.Array


def change_columns(
    part: LogPart, log: ShippedLog | None = None, on_records: Callable[[Frames, bytes], None] = lambda *records: None
) -> Iterator[tuple[list[int], ChangeColumns]]:
    """What the records of a part that count did to rows of the tree, and where retention says that history begins.

    `on_records` is called with these records: frames, and which of them.
    """
    for frames, indexes in counting(log or part.log(), part, removals=True):
        on_records(frames, indexes)
        at, there = 0, len(indexes) // 4
        while at < there:
            places = frames.buffer, frames.positions, frames.lengths
            rows, at, vacuums, found = _native.gather_changes(frames.first_offset, *places, indexes, at, BATCH_ROWS)
            starts = [
                history_start_in(memoryview(frames.payloads(one, one + 1)[0]), frames.first_offset + one)
                for one in vacuums
            ]
            yield [seq for seq in starts if seq is not None], _arrays(rows, *found)


def _arrays(
    rows: int,
    key_ends: bytes,
    keys: bytes,
    lsns: bytes,
    steps: bytes,
    is_there: bytes,
    cell_ends: bytes,
    cells: bytes,
    parts: bytes,
) -> ChangeColumns:
    import pyarrow as pa

    def of(kind: pa.DataType, *buffers: bytes | None) -> pa.Array:
        return pa.Array.from_buffers(kind, rows, [None if one is None else pa.py_buffer(one) for one in buffers])

    return ChangeColumns(
        of(pa.binary(), None, key_ends, keys),
        of(pa.int64(), None, lsns),
        of(pa.int32(), None, steps),
        of(pa.binary(), is_there, cell_ends, cells),
        of(pa.int32(), None, parts),
    )


class EntryEnds:
    """Counts the entries that records end; those of retention are none."""

    entries = 0

    def count(self, frames: Frames, indexes: bytes) -> None:
        """These records, too."""
        self.entries += _ends_in(frames, indexes)


def _ends_in(frames: Frames, indexes: bytes) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    count = len(indexes) // 4
    data = pa.Array.from_buffers(pa.uint8(), len(frames.buffer), [None, pa.py_buffer(frames.buffer)])
    positions = pa.Array.from_buffers(pa.uint64(), frames.count, [None, pa.py_buffer(frames.positions)])
    at = positions.take(pa.Array.from_buffers(pa.uint32(), count, [None, pa.py_buffer(indexes)]))
    is_entry = pc.not_equal(data.take(at), pa.scalar(VACUUM, pa.uint8()))
    flags = pc.bit_wise_and(data.take(pc.add(at, pa.scalar(1, pa.uint64()))), pa.scalar(LAST, pa.uint8()))
    return int(pc.sum(pc.and_(is_entry, pc.not_equal(flags, pa.scalar(0, pa.uint8())))).as_py() or 0)


class LastOfEach:
    """Of rows in the order of their keys the last of each key, without an object for each of them.

    The last row waits for the next ones, which may have more of the same key.
    """

    def __init__(self) -> None:
        self._held: pa.Table | None = None

    def take(self, rows: pa.Table) -> pa.Table:
        """The next rows, with the column `key`; returns those that are known to be the last of their keys."""
        import pyarrow as pa
        import pyarrow.compute as pc

        whole = rows if self._held is None else pa.concat_tables([self._held, rows])
        if not whole.num_rows:
            return whole
        self._held = whole.slice(whole.num_rows - 1)
        keys = whole.column("key").combine_chunks()
        known = whole.slice(0, whole.num_rows - 1)
        return known.filter(pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1)))

    def rest(self) -> pa.Table:
        """What waited: nothing comes any more."""
        import pyarrow as pa

        empty = pa.schema([("key", pa.binary()), ("cell", pa.binary())]).empty_table()
        return empty if self._held is None else self._held


_LAST_SCHEMA = "key binary, lsn bigint, number int, cell binary"
_UNSETTLED_BYTES = 64 << 20
_MOST_UNSETTLED_BYTES = 256 << 20
_RANGE_BYTES = 32 << 20


class LastChanges:
    """The last change of each row, of parts of the log that come in any order."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._is_settled = True
        self._settled_bytes = 0
        self.held_bytes = 0
        """The bytes of what is held, settled or not."""

    @classmethod
    def of(cls, settled: pa.Table) -> LastChanges:
        """Changes in order of key, one of each row."""
        made = cls()
        made.hold(settled)
        made._is_settled, made._settled_bytes = True, made.held_bytes
        return made

    def add(self, columns: ChangeColumns) -> None:
        """More changes."""
        import pyarrow as pa

        arrays = [columns.key, columns.lsn, columns.number, columns.cell]
        self._add(pa.Table.from_arrays(arrays, schema=arrow_schema(_LAST_SCHEMA)))

    def merge(self, other: LastChanges) -> None:
        """Those of other parts, too."""
        for table in other._tables:
            self._add(table)

    def _add(self, table: pa.Table) -> None:
        self.hold(table)
        if self.held_bytes - self._settled_bytes > _most_unsettled(self._settled_bytes):
            self.settle()

    def hold(self, table: pa.Table) -> None:
        """Changes that are not settled before somebody says so."""
        if table.num_rows:
            self._tables.append(table)
            self._is_settled = False
            self.held_bytes += table.nbytes

    def settle(self) -> pa.Table:
        """All rows in order of key, each with its last change. Of one that is removed the cell is null."""
        import pyarrow as pa

        if not self._is_settled:
            whole = pa.concat_tables(self._tables).combine_chunks()
            last = LastOfEach()
            in_order = last.take(whole.take(order_of(whole, ("key", "lsn", "number"))))
            self._tables = [pa.concat_tables([in_order, last.rest()]).combine_chunks()]
            self._is_settled = True
            self.held_bytes = self._settled_bytes = self._tables[0].nbytes
        return self._tables[0] if self._tables else arrow_schema(_LAST_SCHEMA).empty_table()


def _most_unsettled(settled_bytes: int) -> int:
    return max(_UNSETTLED_BYTES, min(settled_bytes, _MOST_UNSETTLED_BYTES))


class RangedChanges:
    """The same by ranges of keys, which are settled each by itself, several at the same time.

    A range that has become large is cut in two, so that no column comes near 2 GiB, however the keys are distributed.
    """

    def __init__(self, threads: int, range_bytes: int = _RANGE_BYTES) -> None:
        self._threads = threads
        self._range_bytes = range_bytes
        self._firsts = [b""]
        self._ranges = [LastChanges()]
        self._settled_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The bytes of what is held, settled or not."""
        return sum(one.held_bytes for one in self._ranges)

    def merge(self, other: LastChanges) -> None:
        """The changes of some part of the log."""
        rows = other.settle()
        keys = rows.column("key").combine_chunks()
        cuts = [0, *(rows_before(keys, first) for first in self._firsts[1:]), len(keys)]
        for one, (start, stop) in zip(self._ranges, pairwise(cuts), strict=True):
            one.hold(rows.slice(start, stop - start))
        if self.held_bytes - self._settled_bytes > _most_unsettled(self._settled_bytes):
            self.settle()

    def settle(self) -> list[pa.Table]:
        """All rows in order of key, a table a range, each row with its last change."""
        settled = in_parallel(LastChanges.settle, self._ranges, self._threads, "tidelog-settle")
        rest = list(reversed(list(zip(self._firsts, settled, strict=True))))
        self._firsts, self._ranges = [], []
        while rest:
            first, table = rest.pop()
            middle = table.num_rows // 2
            if middle and table.nbytes > self._range_bytes:
                second = table.slice(middle)
                rest += [(second.column("key")[0].as_py(), second), (first, table.slice(0, middle))]
            else:
                self._firsts.append(first)
                self._ranges.append(LastChanges.of(table))
        self._settled_bytes = self.held_bytes
        return [one.settle() for one in self._ranges]


def rows_before(keys: pa.Array, key: bytes) -> int:
    """How many of some keys, which are in order, are less than one."""
    return bisect_left(range(len(keys)), key, key=lambda row: keys[row].as_py())


def packed_rows(keys: pa.Array, values: pa.Array, target_bytes: int) -> Iterator[PackedRows]:
    """All rows of a file, in order, packed into blocks of about that size."""
    columns = bytes_column(keys), bytes_column(values), len(keys)
    start, last_key = 0, b""
    while start < len(keys):
        stop, raw = _native.pack_rows(*columns, start, target_bytes, last_key)
        last_key = keys[stop - 1].as_py()
        yield PackedRows(raw, stop - start, keys[start].as_py(), last_key)
        start = stop
