"""Bodies as rows: the versions that point to each, and the place that the compaction before gave it.

    unit int          where the row travels to: the window, or the unit, of its position
    position bigint   of the body in the log
    kind int          0: a place of the compaction before (`value`); 1: a version (`key`, and `value` is its cell)

Invariants
- Grouped by `unit` and in order of position and kind, a body is its place, if it has one, and its versions behind it.
- A body to which no version points is dead, and is not told.
- A large body gets a file by the name of the oldest version that points to it (by seq, then by its order in the batch),
  which is the put that wrote it unless retention has removed that one. No other body ever has that name: a version has
  one body, and bodies that come later are pointed to by later seqs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine.cell import Cell, decode_cell
from tidelog.engine.cell_blocks import Row
from tidelog.engine.place import FilePlace, PackPlace, Place, decode_place, position_of
from tidelog.engine.row_file import RowFile
from tidelog.engine.vacuum_rules import is_pointer
from tidelog.engine.version_keys import OBJECTS, parse, seq_of
from tidelog.errors import DataError
from tidelog.pipeline.engine_jobs.bodies_plan import PackedLive, WindowCount
from tidelog.pipeline.engine_jobs.index_rows import PartWork, as_told, in_batches, rows_of
from tidelog.tier.keys import EngineKeys

if TYPE_CHECKING:
    import pyarrow as pa

BODY_SCHEMA = "unit int, position bigint, kind int, key binary, value binary"
PLACE, VERSION = 0, 1
_MAX_UNIT = 0x7FFFFFFF
_COLUMNS = ("unit", "position", "kind", "key", "value")

BodyRow = tuple[int, int, bytes | None, bytes]
"""Position, kind, key, value."""


class Body(NamedTuple):
    """A body that is alive: a cell that points to it, its place before, and the versions that point to it."""

    position: int
    cell: Cell
    place: Place | None
    versions: list[Row]

    def file_name(self, keys: EngineKeys) -> str | None:
        """The name of its file below `data/`, if it gets one; None when that would be too long."""
        key = min(self.versions, key=lambda row: (seq_of(row[0]), decode_cell(row[1]).order))[0]
        name = parse(key)
        data_key = keys.data_file(name.bucket, name.key or "", name.seq)
        return None if data_key is None else data_key.removeprefix(keys.data_prefix)


class Grouping:
    """Which task a body goes to: that of its window while bodies are counted, that of its unit when they are built."""

    def __init__(self, window_bytes: int, unit_cuts: Sequence[int] | None = None) -> None:
        self._window_bytes = window_bytes
        self._unit_cuts = unit_cuts

    def unit_of(self, position: int) -> int:
        """The number by which it is grouped."""
        if self._unit_cuts is not None:
            return bisect_right(self._unit_cuts, position)
        return position // self._window_bytes & _MAX_UNIT

    def batches(self, rows: Iterable[BodyRow]) -> Iterator[pa.RecordBatch]:
        """Rows as batches of `BODY_SCHEMA`."""
        import pyarrow as pa

        for some in in_batches(rows):
            columns = [
                pa.array([self.unit_of(row[0]) for row in some], pa.int32()),
                pa.array([row[0] for row in some], pa.int64()),
                pa.array([row[1] for row in some], pa.int32()),
                pa.array([row[2] for row in some], pa.binary()),
                pa.array([row[3] for row in some], pa.binary()),
            ]
            yield pa.RecordBatch.from_arrays(columns, names=list(_COLUMNS))


class Pointing:
    """The versions that point to bodies."""

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pointing = ((key, cell) for key, cell in rows_of(batches) if points_to_body(key, cell))
        return self._grouping.batches((decode_cell(cell).position, VERSION, key, cell) for key, cell in pointing)


def points_to_body(key: bytes, cell: bytes) -> bool:
    """Whether a row is a version whose body is in the log."""
    return is_pointer(cell) and key.startswith(OBJECTS)


class OldPlaces:
    """The places that the compaction before gave to bodies."""

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping

    def __call__(self, work: PartWork) -> Iterator[pa.RecordBatch]:
        rows = RowFile(work.place.opened().objects, work.part, kind="bodies").rows()
        return self._grouping.batches((position_of(key), PLACE, None, value) for key, value in rows)


def bodies_of(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Body]]:
    """The bodies that are alive, each with its unit; rows are in order of unit, position and kind."""
    rows = (
        row for batch in batches for row in zip(*(batch.column(name).to_pylist() for name in _COLUMNS), strict=True)
    )
    unit = position = -1
    place: Place | None = None
    versions: list[Row] = []
    for row_unit, row_position, kind, key, value in rows:
        if row_position != position or row_unit != unit:
            if versions:
                yield unit, Body(position, _common_cell(versions, position), place, versions)
            unit, position, place, versions = row_unit, row_position, None, []
        if kind == PLACE:
            place = decode_place(value)
        else:
            versions.append((key, value))
    if versions:
        yield unit, Body(position, _common_cell(versions, position), place, versions)


def _common_cell(versions: list[Row], position: int) -> Cell:
    """All versions tell the same of their body."""
    first = decode_cell(versions[0][1])
    if any(decode_cell(cell)[2:] != first[2:] for _, cell in versions[1:]):
        raise DataError(f"versions tell different things of the body at position {position}")
    return first


class Counting:
    """Counts the bodies of windows, for the plan."""

    def __init__(self, keys: EngineKeys, window_bytes: int, large_bytes: int, first_new_lsn: int) -> None:
        self._keys = keys
        self._window_bytes = window_bytes
        self._large_bytes = large_bytes
        self._first_new_lsn = first_new_lsn

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told(self._counts(body for _, body in bodies_of(batches)))

    def _counts(self, bodies: Iterator[Body]) -> Iterator[WindowCount]:
        for window, some in groupby(bodies, key=lambda body: body.position // self._window_bytes):
            yield self._count(window, some)

    def _count(self, window: int, bodies: Iterable[Body]) -> WindowCount:
        new: list[Body] = []
        new_files: list[Body] = []
        old_files: list[FilePlace] = []
        packed: dict[int, list[PackPlace]] = {}
        for body in bodies:
            if isinstance(body.place, PackPlace):
                packed.setdefault(body.place.pack, []).append(body.place)
            elif body.place is not None:
                old_files.append(body.place)
            else:
                require_new(body, self._first_new_lsn)
                is_file = gets_file(body, self._large_bytes, self._keys) is not None
                (new_files if is_file else new).append(body)
        lsns = [body.cell.lsn for body in (*new, *new_files)]
        return WindowCount(
            window=window,
            new_bodies=len(new),
            new_bytes=sum(body.cell.stored_bytes for body in new),
            new_files=len(new_files),
            new_file_bytes=sum(body.cell.stored_bytes for body in new_files),
            **({"first_new_lsn": min(lsns), "last_new_lsn": max(lsns)} if lsns else {}),
            old_files=len(old_files),
            old_file_bytes=sum(place.stored_bytes for place in old_files),
            packed=tuple(
                PackedLive(pack, len(places), sum(place.stored_bytes for place in places))
                for pack, places in sorted(packed.items())
            ),
        )


def gets_file(body: Body, large_bytes: int, keys: EngineKeys) -> str | None:
    """The name of the file of a body that is compacted for the first time; None when it goes into a pack."""
    return body.file_name(keys) if body.cell.stored_bytes >= large_bytes else None


def require_new(body: Body, first_new_lsn: int) -> None:
    """A body without a place came behind the compaction before: the older ones are all in its index."""
    if body.cell.lsn < first_new_lsn:
        raise DataError(
            f"the body at position {body.position}, LSN {body.cell.lsn}, is pointed to and is not in the index of the "
            "compaction before",
            hint="`tidelog pipeline verify --engine` tells what is wrong with that; a replica may have a good copy",
        )
