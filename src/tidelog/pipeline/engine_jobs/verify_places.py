"""What workers do with the two indexes of a compaction: do they tell the same places, of the same bodies.

    version index, body index, list of packs -> rows by position -> one row a body, by the file that it is in

    source   position        rows of
    BODY     of the body     the body index
    VERSION  of the body     the version index, where a cell points into the log
    PACK     -1 - number     the list of packs in the root: each is looked at, whether or not anything points into it
    DAMAGE   0               what could not be read

Invariants
- Every version that points into the log has a place, and every other has none. The body index has each position once,
  with the place that every version of it tells; versions that share a body agree on its size, checksum and LSN.
- Nothing of the bodies themselves is read here. Fit for executors.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tidelog.engine.cell import decode_cell
from tidelog.engine.compacted import PackInfo
from tidelog.engine.place import FilePlace, Place, decode_place, decode_version, encode_place, position_of
from tidelog.engine.row_file import RowFile, RowPart
from tidelog.engine.vacuum_rules import is_pointer
from tidelog.engine.version_keys import BUCKETS
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.engine_jobs.verify_words import described_key, engine_problem, problem_of
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.jobs.job import Problem

if TYPE_CHECKING:
    import pyarrow as pa

BODY: Final = 0
VERSION: Final = 1
PACK: Final = 2
DAMAGE: Final = 9

PLACE_SCHEMA: Final = (
    "source int, position bigint, name string, place binary, size bigint, crc bigint, lsn bigint, stored bigint"
)
BODY_SCHEMA: Final = (
    "file string, byte bigint, position bigint, name string, place binary, size bigint, crc bigint, lsn bigint"
)
_BATCH_ROWS = 8192
# Of each task; the first ones say what happened, and how many there are is counted.
_MOST_PROBLEMS = 20
PROBLEM_FILE: Final = ""
MISMATCH_FILE: Final = "!"


class PlaceRow(NamedTuple):
    """What one index says of a body; `name` is the version or the file that says it."""

    source: int
    position: int
    name: str
    place: bytes
    size: int
    crc: int
    lsn: int
    stored: int


class BodyRow(NamedTuple):
    """A body to be read: in which file, and what it has to be. A pack itself is the row with byte -1."""

    file: str
    byte: int
    position: int
    name: str
    place: bytes
    size: int
    crc: int
    lsn: int


class IndexPart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of one of the two indexes."""

    place: EnginePlace
    part: RowPart
    is_bodies: bool


class PackList(msgspec.Struct, frozen=True, kw_only=True):
    """The packs that the root names."""

    place: EnginePlace
    packs: tuple[PackInfo, ...]


IndexItem = IndexPart | PackList


class PlaceReader:
    """What a task does with the numbers of items: rows of `PLACE_SCHEMA`."""

    def __init__(self, items: Sequence[IndexItem]) -> None:
        self._items = [pickle.dumps(item) for item in items]

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from to_batches(place_rows(pickle.loads(self._items[number])), PlaceRow)


def place_rows(item: IndexItem) -> Iterator[PlaceRow]:
    """The rows of one item; what cannot be read is the last of them."""
    if isinstance(item, PackList):
        for number, pack in enumerate(item.packs):
            yield PlaceRow(PACK, -1 - number, pack.key, b"", 0, 0, 0, 0)
        return
    try:
        file = RowFile(item.place.opened().objects, item.part, kind="bodies" if item.is_bodies else "versions")
        for key, value in file.rows():
            yield from _body_row(item, key, value) if item.is_bodies else _version_rows(item, key, value)
    except (DataError, NotFoundError) as error:
        yield _damage(problem_of(item.place.name, error, item.part.key))


def _body_row(item: IndexPart, key: bytes, value: bytes) -> Iterator[PlaceRow]:
    decode_place(value)
    yield PlaceRow(BODY, position_of(key), item.part.key, value, 0, 0, 0, 0)


def _version_rows(item: IndexPart, key: bytes, value: bytes) -> Iterator[PlaceRow]:
    cell, place = decode_version(value)
    name = described_key(key)
    if key[:1] == BUCKETS or not is_pointer(cell):
        if place is not None:
            yield _damage(engine_problem(item.place.name, item.part.key, f"{name} has a place, and no body elsewhere"))
        return
    version = decode_cell(cell)
    encoded = b"" if place is None else encode_place(place)
    yield PlaceRow(
        VERSION, version.position, name, encoded, version.size, version.crc, version.lsn, version.stored_bytes
    )


def _damage(problem: Problem) -> PlaceRow:
    return PlaceRow(DAMAGE, 0, "", msgspec.msgpack.encode(problem), 0, 0, 0, 0)


def to_batches(rows: Iterable[NamedTuple], kind: type[PlaceRow] | type[BodyRow]) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow batches of their schema."""
    waiting: list[NamedTuple] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == _BATCH_ROWS:
            yield _batch(waiting, kind)
            waiting = []
    if waiting:
        yield _batch(waiting, kind)


def _batch(rows: list[NamedTuple], kind: type[PlaceRow] | type[BodyRow]) -> pa.RecordBatch:
    import pyarrow as pa

    types = {"source": pa.int32(), "name": pa.string(), "file": pa.string(), "place": pa.binary()}
    columns = zip(kind._fields, zip(*rows, strict=True), strict=True)
    arrays = [pa.array(column, types.get(name, pa.int64())) for name, column in columns]
    return pa.record_batch(arrays, names=list(kind._fields))


class PlaceMerge:
    """What a task does with rows in order of (position, source): rows of `BODY_SCHEMA`, one a body."""

    def __init__(self, engine: str, packs: int) -> None:
        self._engine = engine
        self._packs = packs
        self._problems = 0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self._problems = 0
        return to_batches(self._bodies(batches), BodyRow)

    def _bodies(self, batches: Iterator[pa.RecordBatch]) -> Iterator[BodyRow]:
        for position, rows in groupby(rows_in(batches), key=lambda row: row.position):
            yield from self._body(position, rows)

    def _body(self, position: int, rows: Iterable[PlaceRow]) -> Iterator[BodyRow]:
        told: PlaceRow | None = None
        first: PlaceRow | None = None
        for row in rows:
            if row.source == DAMAGE:
                yield BodyRow(PROBLEM_FILE, 0, 0, "", row.place, 0, 0, 0)
            elif row.source == PACK:
                yield BodyRow(pack_file(-1 - position), -1, 0, row.name, b"", 0, 0, 0)
            elif row.source == BODY:
                told = row
            else:
                yield from self._mismatches(row, told, first or row)
                first = first or row
        if told is not None:
            yield from self._to_read(told, first)

    def _mismatches(self, row: PlaceRow, told: PlaceRow | None, first: PlaceRow) -> Iterator[BodyRow]:
        if not row.place:
            yield from self._mismatch(row.name, "the version index does not say where its body is")
        elif told is None:
            yield from self._mismatch(row.name, f"its body, at position {row.position}, is not in the body index")
        elif told.place != row.place:
            yield from self._mismatch(row.name, f"the two indexes tell two places of its body, position {row.position}")
        if (row.size, row.crc, row.lsn, row.stored) != (first.size, first.crc, first.lsn, first.stored):
            yield from self._mismatch(row.name, f"it says something else than {first.name} of the body that they share")

    def _to_read(self, told: PlaceRow, version: PlaceRow | None) -> Iterator[BodyRow]:
        if version is None:
            yield from self._mismatch(told.name, f"position {told.position} is in the body index, and in no version")
            return
        place = decode_place(told.place)
        if not isinstance(place, FilePlace) and place.pack >= self._packs:
            yield from self._mismatch(version.name, f"its body is in pack {place.pack} of {self._packs}")
            return
        byte = 0 if isinstance(place, FilePlace) else place.byte
        wanted = (version.size, version.crc, version.lsn)
        yield BodyRow(file_of(place), byte, told.position, version.name, told.place, *wanted)

    def _mismatch(self, name: str, reason: str) -> Iterator[BodyRow]:
        self._problems += 1
        if self._problems <= _MOST_PROBLEMS:
            problem = msgspec.msgpack.encode(engine_problem(self._engine, name, reason))
            yield BodyRow(MISMATCH_FILE, 0, 0, "", problem, 0, 0, 0)


def rows_in(batches: Iterator[pa.RecordBatch]) -> Iterator[PlaceRow]:
    """The rows of batches of `PLACE_SCHEMA`."""
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in PlaceRow._fields]
        yield from map(PlaceRow._make, zip(*columns, strict=True))


def pack_file(number: int) -> str:
    """How a pack is called among the files that bodies are in."""
    return f"pack {number}"


def file_of(place: Place) -> str:
    """The file of a place: a pack by its number, or the name below `data/`."""
    return place.name if isinstance(place, FilePlace) else pack_file(place.pack)
