"""The rows of an engine as workers read them for `digest` and `verify`: what each source says about keys of the tree.

    source   key        lsn, step                        cell
    BASE     tree key   0, 0                             a row of a state or of a version index
    LOG      tree key   of the record and in it          what the record left there; none: it removed the key
    ACTUAL   tree key   0, 0                             as BASE, of what is compared with the other two
    START    empty      the seq, 0                       a record says that history begins there
    DAMAGE   empty      0, 0                             msgpack of `Unreadable`

Invariants
- Records are done again as recovery does them: operations, compensations and removals by retention, in order of LSN. A
  restore, and the jobs that build something (`log_rows.py`), decide instead which entries were whole. A check is worth
  more when it comes to the same rows by another way.
- Operations and compensations in ranges that the manifest calls rolled back do not count; removals do, as in a restore.
- What cannot be read is a row that says so, and ends its source: nothing is raised for what is in the bytes.
- Fit for executors: of the engine it reaches codecs alone.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from tidelog.engine.gate import LsnRange
from tidelog.engine.manifest import StoredCheckpoint
from tidelog.engine.place import cell_of
from tidelog.engine.record_header import COMPENSATION, HEADER_BYTES, OPERATION, VACUUM, decode_header
from tidelog.engine.row_file import RowFile, RowPart
from tidelog.engine.store_checkpoint import StoredState
from tidelog.engine.updates import INSERT, REMOVE, REPLACE, decode, record_updates
from tidelog.errors import DataError, GapError, NotFoundError, TidelogError
from tidelog.log.cache import Batch
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.history import History
from tidelog.tier.planned_catalog import PlannedCatalog

if TYPE_CHECKING:
    import pyarrow as pa

BASE: Final = 0
LOG: Final = 1
ACTUAL: Final = 2
START: Final = 8
DAMAGE: Final = 9

ROW_SCHEMA: Final = "source int, key binary, lsn bigint, step int, cell binary"
_BATCH_ROWS = 8192
_SEQ_BYTES = 8
# The kinds of records that change cells of the tree by key.
_CHANGING = (OPERATION, COMPENSATION, VACUUM)

RawRow = tuple[int, bytes, int, int, bytes | None]


class Unreadable(msgspec.Struct, frozen=True):
    """Something that could not be read: where, why, and as which source."""

    place: str
    reason: str
    source: int = BASE


class LogRange(msgspec.Struct, frozen=True, kw_only=True):
    """Records from an LSN up to another (exclusive); `dead` are the rolled-back ranges among them."""

    place: EnginePlace
    first_lsn: int
    stop_lsn: int
    dead: tuple[LsnRange, ...] = ()
    descriptors: tuple[Descriptor, ...] = ()


class StateRows(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of a state that is one object."""

    place: EnginePlace
    state: StoredCheckpoint
    source: int = BASE


class PartRows(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one file of a version index, or of a state of several files."""

    place: EnginePlace
    part: RowPart
    source: int = BASE


RowItem = LogRange | StateRows | PartRows


class RowReader:
    """What a task does with the numbers of items: their rows, as batches of `ROW_SCHEMA`."""

    def __init__(self, items: Sequence[RowItem]) -> None:
        self._items = [pickle.dumps(item) for item in items]

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from _batches(rows_of(pickle.loads(self._items[number])))


def rows_of(item: RowItem) -> Iterator[RawRow]:
    """The rows of one item; what cannot be read is the last of them."""
    try:
        if isinstance(item, LogRange):
            yield from _LogRows(item).rows()
        elif isinstance(item, StateRows):
            state = StoredState(item.place.opened().objects, item.state)
            yield from ((item.source, key, 0, 0, cell) for key, cell in state.rows())
        else:
            file = RowFile(item.place.opened().objects, item.part, kind="versions")
            yield from ((item.source, key, 0, 0, cell_of(value)) for key, value in file.rows())
    except (DataError, GapError, NotFoundError) as error:
        source = LOG if isinstance(item, LogRange) else item.source
        unreadable = Unreadable(_place_of(item, error), reason_of(error), source)
        yield DAMAGE, b"", 0, 0, msgspec.msgpack.encode(unreadable)


def reason_of(error: TidelogError) -> str:
    """What is wrong, without where: that is told beside it."""
    return error.message.partition(" at byte ")[0]


def _place_of(item: RowItem, error: TidelogError) -> str:
    if isinstance(item, LogRange):
        named = f"LSN {item.first_lsn} to {item.stop_lsn - 1}"
    else:
        named = item.state.key if isinstance(item, StateRows) else item.part.key
    path, byte = getattr(error, "path", None), getattr(error, "byte", None)
    return f"{path or named}" if byte is None else f"{path or named}, byte {byte}"


class _LogRows:
    """What the records of a range did to keys of the tree."""

    def __init__(self, item: LogRange) -> None:
        self._item = item

    def rows(self) -> Iterator[RawRow]:
        item, opened = self._item, self._item.place.opened()
        catalog = PlannedCatalog(item.descriptors, opened.keys, item.place.catalog)
        reader = History(catalog, opened.objects, opened.fetchers).read(item.first_lsn, item.stop_lsn)
        reached = item.first_lsn
        try:
            while (batch := reader.next_batch()) is not None:
                yield from self._rows_in(batch)
                reached = batch.next_offset
        finally:
            reader.close()
        if reached < item.stop_lsn:
            raise GapError(
                f"the store has no records from LSN {reached} to {item.stop_lsn - 1}",
                first=reached,
                last=item.stop_lsn - 1,
            )

    def _rows_in(self, batch: Batch) -> Iterator[RawRow]:
        frames = batch.frames
        assert frames is not None, "history comes framed"
        buffer = memoryview(frames.buffer)
        positions, lengths = memoryview(frames.positions).cast("Q"), memoryview(frames.lengths).cast("I")
        for index in range(batch.start, batch.stop):
            at, length = positions[index], lengths[index]
            if length and buffer[at] in _CHANGING:
                yield from self._rows_of_record(bytes(buffer[at : at + length]), frames.first_offset + index)

    def _rows_of_record(self, record: bytes, lsn: int) -> Iterator[RawRow]:
        header = decode_header(record, lsn)
        if header.kind == VACUUM:
            yield START, b"", _history_start(record[HEADER_BYTES : header.updates_offset], lsn), 0, None
        elif self._is_dead(lsn):
            return
        for step, update in enumerate(decode(record_updates(record, lsn), lsn)):
            if update.what in (INSERT, REPLACE):
                yield LOG, update.key, lsn, step, update.value
            elif update.what == REMOVE:
                yield LOG, update.key, lsn, step, None
            else:
                raise DataError(f"a record of kind {header.kind} has an update of kind {update.what}, LSN {lsn}")

    def _is_dead(self, lsn: int) -> bool:
        dead = self._item.dead
        at = bisect_right(dead, lsn, key=lambda one: one.first)
        return at > 0 and lsn <= dead[at - 1].last


def _history_start(own: bytes, lsn: int) -> int:
    if len(own) != _SEQ_BYTES:
        raise DataError(f"a record of removed versions has {len(own)} bytes of its own, LSN {lsn}")
    return int.from_bytes(own, "little")


def _batches(rows: Iterator[RawRow]) -> Iterator[pa.RecordBatch]:
    waiting: list[RawRow] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == _BATCH_ROWS:
            yield _batch(waiting)
            waiting = []
    if waiting:
        yield _batch(waiting)


def _batch(rows: list[RawRow]) -> pa.RecordBatch:
    import pyarrow as pa

    sources, keys, lsns, steps, cells = zip(*rows, strict=True)
    columns = [
        pa.array(sources, pa.int32()),
        pa.array(keys, pa.binary()),
        pa.array(lsns, pa.int64()),
        pa.array(steps, pa.int32()),
        pa.array(cells, pa.binary()),
    ]
    return pa.record_batch(columns, names=["source", "key", "lsn", "step", "cell"])
