"""Value compaction: moves values that are still needed out of the oldest pieces of the log, to its end, so that these
pieces can go.

    rows that point into a piece, in key order -> VACUUM(start of history, value, the rows' new cells) ... -> synced

Invariants
- A move changes where a value is, and nothing else: every state, its digest and the history of every object stay. Only
  versions at or below the low-water mark are moved, so that no rollback meets one.
- A record holds a value and all changes of cells that point to it: a reader of the record has both, after a crash, in a
  restore and in Spark. It is redone and never undone.
- The old copy stays until a later scan of the index finds that nothing points to it, so a crash anywhere leaves two
  good copies. A reader that looked a cell up before it was changed, and is too late for the old copy, looks again.
- A value is verified before it is moved. One that is damaged stays where it is, and its piece too.
- Values are written in the order of keys: what is read together lies together afterwards.
- Moves take turns with entries, and their pace is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tidelog._native import pointing_cells
from tidelog.engine.btree.page import CELL_HEADER_BYTES, MAX_CELL_BYTES, REPLACE, Update, encode
from tidelog.engine.core import Core
from tidelog.engine.mvcc.cells import (
    MAX_POINTER_BYTES,
    Cell,
    decode_cell,
    encode_pointer,
)
from tidelog.engine.wal.record_header import HEADER_BYTES
from tidelog.engine.wal.records import VACUUM_OWN_BYTES, encode_vacuum
from tidelog.engine.wal.value import CODEC_NONE, decode_value, encode_value
from tidelog.errors import DataError, DiskFullError, ExhaustedError, GapError, NotFoundError
from tidelog.log.frame import HEADER_BYTES as FRAME_HEADER_BYTES

_logger = logging.getLogger("tidelog.engine")
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 1024
# Of a value that many versions share (copies), so many change with one record; further ones get a copy of their own.
_MAX_SHARING = 16
_GROWTH_BYTES = 2 * 10
_MAX_ROWS = 200_000
_SCAN_CELLS = 1024

ReadCold = Callable[[Sequence[Cell]], list[tuple[bytes, dict[str, object]] | None]]


class Moved(NamedTuple):
    """How many values were moved, and their bytes."""

    values: int = 0
    bytes: int = 0


class _Row(NamedTuple):
    """A version that points into a piece: its key in the tree, and its cell as it is stored and decoded."""

    key: bytes
    raw: bytes
    cell: Cell


class _Value(NamedTuple):
    """A stored value, and the rows that point to it."""

    stored: bytes
    codec: int
    rows: list[_Row]


class Relocation:
    """Moves values of one engine. Not thread-safe.

    `read_cold` reads values that have left this disk; `pause` is called with the bytes of every batch, and bounds the
    pace.
    """

    def __init__(
        self,
        core: Core,
        check: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        read_cold: ReadCold | None,
        pause: Callable[[int], None],
    ) -> None:
        self._core = core
        self._check = check
        self._on_failure = on_failure
        self._read_cold = read_cold
        self._pause = pause

    def run(self, first_lsn: int, below_lsn: int) -> Moved:
        """Moves the values of records from one LSN up to another, of versions that are final."""
        resume: bytes | None = b""
        values = moved_bytes = 0
        while resume is not None:
            rows, resume = self._rows(first_lsn, below_lsn, resume)
            moved = self._move_rows(rows)
            values, moved_bytes = values + moved.values, moved_bytes + moved.bytes
        return Moved(values, moved_bytes)

    def _move_rows(self, rows: list[_Row]) -> Moved:
        values = moved_bytes = 0
        for batch in self._batches(rows):
            self._check()
            lsn = self._move(batch)
            if lsn:
                self._core.wal.wait_durable(lsn)  # outside of the lock: only readers of these values wait too
            values += len(batch)
            size = sum(len(value.stored) for value in batch)
            moved_bytes += size
            self._pause(size)
        return Moved(values, moved_bytes)

    def _rows(self, first_lsn: int, below_lsn: int, start: bytes) -> tuple[list[_Row], bytes | None]:
        """In the order of keys; so many that memory stays bounded, and the key after which there may be more."""
        final_seq, found = self._core.marks.low_water_mark, list[_Row]()
        for cells in self._core.tree.steps(start, most_cells=_SCAN_CELLS):
            self._check()
            pointing = pointing_cells(cells, first_lsn, below_lsn, final_seq)
            found += [_Row(key, raw, decode_cell(raw)) for key, raw in pointing]
            if len(found) >= _MAX_ROWS:
                return found, cells[-1][0] + b"\0"
        return found, None

    # Values

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Value]]:
        sharing: dict[int, list[_Row]] = {}
        for row in rows:
            sharing.setdefault(row.cell.position, []).append(row)
        batch: list[list[_Row]] = []
        size = count = 0
        for group in sharing.values():
            for begin in range(0, len(group), _MAX_SHARING):
                batch.append(group[begin : begin + _MAX_SHARING])
                size += group[0].cell.stored_bytes
                count += len(batch[-1])
                if size >= _BATCH_BYTES or count >= _BATCH_ROWS:
                    yield self._values(batch)
                    batch, size, count = [], 0, 0
        if batch:
            yield self._values(batch)

    def _values(self, groups: list[list[_Row]]) -> list[_Value]:
        """Those that can be read, as they are stored, verified."""
        found: list[_Value] = []
        cold: list[list[_Row]] = []
        for rows in groups:
            cell = rows[0].cell
            stored = self._core.wal.read_stored(cell.position, cell.stored_bytes)
            if stored is None:
                cold.append(rows)
            elif self._is_good(stored, cell):
                found.append(_Value(stored, cell.codec, rows))
        return found + self._cold_values(cold)

    def _is_good(self, stored: bytes, cell: Cell) -> bool:
        try:
            decode_value(stored, cell.codec, cell.size, cell.crc, cell.lsn)
        except DataError as error:
            _logger.warning("%s: a value is not moved: %s", self._core.directory, error)
            return False
        return True

    def _cold_values(self, groups: list[list[_Row]]) -> list[_Value]:
        if not groups or self._read_cold is None:
            return []
        try:
            values = self._read_cold([rows[0].cell for rows in groups])
        except (DataError, GapError, NotFoundError) as error:
            _logger.warning("%s: some values are not moved: %s", self._core.directory, error)
            return []
        return [
            _Value(encode_value(*value), CODEC_NONE, rows)
            for value, rows in zip(values, groups, strict=True)
            if value is not None
        ]

    # Records and pages

    def _move(self, batch: list[_Value]) -> int:
        """Logs and applies the moves of a batch; returns the last LSN, 0 if there was nothing left to move."""
        core, lsn, done = self._core, 0, 0
        while done < len(batch):
            with core.turns as turn:
                self._check()
                first_lsn, position = core.wal.next_lsn, core.wal.next_position
                core.tree.settle()
                try:
                    while True:
                        lsn = self._move_one(batch[done]) or lsn
                        done += 1
                        if done == len(batch) or core.pool.wants_settling or turn.is_over:
                            break
                    core.wal.hand_over()
                except BaseException as error:
                    core.wal.discard()
                    if core.wal.next_lsn > first_lsn and not isinstance(error, DiskFullError | ExhaustedError):
                        self._on_failure(error)
                    elif core.wal.next_lsn == first_lsn:
                        core.tree.take_back()
                    raise
                finally:
                    core.tree.settle()
                    core.moved_bytes += core.wal.next_position - position
        return lsn

    def _move_one(self, value: _Value) -> int:
        core, wal = self._core, self._core.wal
        rows = [row for row in value.rows if core.tree.get(row.key) == row.raw]  # others were removed, or moved
        if not rows:
            return 0
        pages = self._prepared(rows)
        lsn, position = wal.next_lsn, wal.next_position + FRAME_HEADER_BYTES + HEADER_BYTES + VACUUM_OWN_BYTES
        updates = [
            Update(page, REPLACE, row.key, _moved(row.cell, value, lsn, position), row.raw)
            for page, row in zip(pages, rows, strict=True)
        ]
        start_seq = core.checkpointer.history_start_seq
        wal.add(encode_vacuum(start_seq, b"".join(map(encode, updates)), value.stored))
        for update in updates:
            core.tree.apply(update, lsn)
        return lsn

    def _prepared(self, rows: list[_Row]) -> list[int]:
        """The pages of some rows, with room for all of them: making room for one may move another."""
        more = len(rows) * _GROWTH_BYTES
        fixed_bytes = CELL_HEADER_BYTES + MAX_POINTER_BYTES + more
        room = [min(MAX_CELL_BYTES, fixed_bytes + len(row.key)) for row in rows]
        while True:
            next_lsn = self._core.wal.next_lsn
            pages = [self._core.tree.prepare(row.key, size) for row, size in zip(rows, room, strict=True)]
            if self._core.wal.next_lsn == next_lsn:
                return pages


def _moved(cell: Cell, value: _Value, lsn: int, position: int) -> bytes:
    return encode_pointer(cell.order, cell.size, cell.crc, value.codec, lsn, position, len(value.stored))
