"""Plans where a compaction stores values: the driver decides, from counts that the workers made per window of the log.

    window    a range of the log of a fixed size: the workers count what is live in it
    unit      consecutive windows, for one task: it writes at most one blob file, and the data files of the unit

Invariants
- The plan depends on the set of live values and on the previous compaction, not on the number of tasks.
- A value that has a location keeps it, unless more than half of its blob file is dead: live values of such a file move
  to a new one. Whether a value is a file or in a blob file is decided once, when it is first compacted.
- Blob files are numbered before they are written: retained ones first, in their old order, then those of the units.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import zstandard

from tidelog.cold.catalog import Descriptor, PlannedCatalog
from tidelog.cold.fetch import coalesced, fetch_many
from tidelog.cold.reader import History
from tidelog.engine.mvcc.cells import OBJECTS, Cell, decode_cell, is_pointer, parse, seq_of
from tidelog.engine.sst.blob_file import (
    BlobPointer,
    FilePointer,
    Place,
    decode_value_pointer,
    encode_blob_file,
    encode_value_pointer,
    encode_version,
    position_of,
    value_key,
)
from tidelog.engine.sst.block import Row
from tidelog.engine.sst.sorted_index import BlobFileInfo, Compaction
from tidelog.engine.sst.sstable import SSTable
from tidelog.engine.wal.record_header import decode_header
from tidelog.engine.wal.value import CODEC_NONE, CODEC_ZSTD, MAX_VALUE_BYTES, decode_value, decompressed
from tidelog.errors import CorruptionError, DataError, GapError, InternalError
from tidelog.log.frame import Frames
from tidelog.pipeline.jobs.engine.rows import (
    FILED_SCHEMA,
    TOLD_ROW,
    VALUE_ROW,
    VERSION_ROW,
    PartWork,
    as_filed,
    as_told,
    rows_of,
    write_checked,
)
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.tasks import as_batches, tuples_in
from tidelog.store.keys import CompactedId, EngineKeys, digest_of
from tidelog.store.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

    from tidelog.pipeline.flow import Rows


DEFAULT_LARGE_BYTES = 1 << 20
DEFAULT_BLOB_FILE_BYTES = 64 << 20
_WINDOWS_PER_BLOB_FILE = 16
# A unit ends with so many blob files' worth of data files too, so that no task has all of the large values.
_FILE_BYTES_PER_BLOB_BYTE = 8
_MAX_UNIT_VALUES = 1_000_000
_NO_LSN = (1 << 64) - 1


class LiveValues(msgspec.Struct, frozen=True, array_like=True):
    """What is live of an old blob file, in a window."""

    blob_file: int
    values: int
    stored_bytes: int


class WindowCount(msgspec.Struct, frozen=True, kw_only=True):
    """The live values of a window: new ones for blob files, new ones for files, those in files, those in blob files."""

    window: int
    new_values: int = 0
    new_bytes: int = 0
    new_files: int = 0
    new_file_bytes: int = 0
    first_new_lsn: int = _NO_LSN
    last_new_lsn: int = 0
    old_files: int = 0
    old_file_bytes: int = 0
    packed: tuple[LiveValues, ...] = ()

    @property
    def values(self) -> int:
        """All of them."""
        return self.new_values + self.new_files + self.old_files + sum(one.values for one in self.packed)


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What one task builds: the blob file with this number, if any, out of records in these objects of the log."""

    blob_file: int | None
    descriptors: tuple[Descriptor, ...] = ()


class ValuePlan(NamedTuple):
    """Everything that is decided before values are read.

    `unit_cuts` and `file_cuts`: the first positions of all units, and of all files of the value index, but the first.
    `kept` are old blob files by their new numbers, `renumbered` gives the new numbers of old ones that stay.
    """

    window_bytes: int
    unit_cuts: tuple[int, ...]
    units: tuple[Unit, ...]
    file_cuts: tuple[bytes, ...]
    kept: tuple[BlobFileInfo, ...]
    renumbered: Mapping[int, int]
    rewritten: int
    values: int
    new_blob_values: int
    new_files: int
    data_files: int
    data_bytes: int


def window_bytes_for(blob_file_bytes: int) -> int:
    """How long a window is, for blob files of about this size."""
    return max(1, blob_file_bytes // _WINDOWS_PER_BLOB_FILE)


def plan_values(
    counts: Sequence[WindowCount],
    previous: Compaction | None,
    descriptors: Sequence[Descriptor],
    *,
    blob_file_bytes: int,
    rows_per_file: int,
) -> ValuePlan:
    """The plan for the windows that were counted, in order."""
    blob_files = () if previous is None else previous.blob_files
    live = _live_of(blob_files, counts)
    staying = [number for number, blob_file in enumerate(blob_files) if _stays(blob_file, live[number])]
    kept = tuple(
        msgspec.structs.replace(
            blob_files[number], live_values=live[number].values, live_bytes=live[number].stored_bytes
        )
        for number in staying
    )
    renumbered = {old: new for new, old in enumerate(staying)}
    window_bytes = window_bytes_for(blob_file_bytes)
    groups = _grouped(counts, renumbered, blob_file_bytes)
    return ValuePlan(
        window_bytes=window_bytes,
        unit_cuts=tuple(group[0].window * window_bytes for group in groups[1:]),
        units=_units(groups, renumbered, descriptors),
        file_cuts=_file_cuts(counts, window_bytes, rows_per_file),
        kept=kept,
        renumbered=renumbered,
        rewritten=sum(1 for number, one in live.items() if one.values and number not in renumbered),
        values=sum(one.values for one in counts),
        new_blob_values=sum(_to_write(one, renumbered).values for one in counts),
        new_files=sum(one.new_files for one in counts),
        data_files=sum(one.new_files + one.old_files for one in counts),
        data_bytes=sum(one.new_file_bytes + one.old_file_bytes for one in counts),
    )


def _live_of(blob_files: Sequence[BlobFileInfo], counts: Iterable[WindowCount]) -> dict[int, LiveValues]:
    live = {number: LiveValues(number, 0, 0) for number in range(len(blob_files))}
    for count in counts:
        for one in count.packed:
            before = live[one.blob_file]
            live[one.blob_file] = LiveValues(
                one.blob_file, before.values + one.values, before.stored_bytes + one.stored_bytes
            )
    return live


def _stays(blob_file: BlobFileInfo, live: LiveValues) -> bool:
    return live.values > 0 and 2 * live.stored_bytes >= blob_file.size


def _to_write(count: WindowCount, renumbered: Mapping[int, int]) -> LiveValues:
    """What of a window is to be packed: new values, and those of blob files that do not stay."""
    moved = [one for one in count.packed if one.blob_file not in renumbered]
    values = count.new_values + sum(one.values for one in moved)
    return LiveValues(-1, values, count.new_bytes + sum(one.stored_bytes for one in moved))


def _grouped(
    counts: Sequence[WindowCount], renumbered: Mapping[int, int], blob_file_bytes: int
) -> list[list[WindowCount]]:
    groups: list[list[WindowCount]] = [[]]
    packed = files = values = 0
    for count in counts:
        is_full = (
            packed >= blob_file_bytes
            or files >= blob_file_bytes * _FILE_BYTES_PER_BLOB_BYTE
            or values >= _MAX_UNIT_VALUES
        )
        if is_full:
            groups.append([])
            packed = files = values = 0
        groups[-1].append(count)
        packed += _to_write(count, renumbered).stored_bytes
        files += count.new_file_bytes
        values += count.values
    return groups


def _units(
    groups: Sequence[Sequence[WindowCount]], renumbered: Mapping[int, int], descriptors: Sequence[Descriptor]
) -> tuple[Unit, ...]:
    units, number = list[Unit](), len(renumbered)
    for group in groups:
        has_blob_file = any(_to_write(count, renumbered).values for count in group)
        first = min((count.first_new_lsn for count in group), default=_NO_LSN)
        last = max((count.last_new_lsn for count in group), default=0)
        units.append(Unit(blob_file=number if has_blob_file else None, descriptors=_between(descriptors, first, last)))
        number += has_blob_file
    return tuple(units)


def _between(descriptors: Sequence[Descriptor], first_lsn: int, last_lsn: int) -> tuple[Descriptor, ...]:
    low = bisect_left(descriptors, first_lsn, key=lambda one: one.end_offset)
    return tuple(descriptors[low : bisect_right(descriptors, last_lsn, key=lambda one: one.start_offset)])


def _file_cuts(counts: Sequence[WindowCount], window_bytes: int, rows_per_file: int) -> tuple[bytes, ...]:
    cuts, rows = list[bytes](), 0
    for count in counts:
        if rows >= rows_per_file:
            cuts.append(value_key(count.window * window_bytes))
            rows = 0
        rows += count.values
    return tuple(cuts)


# Values as rows: the versions that point to each, and the location that the previous compaction gave it.
#
#     unit int          the partition of the row: the window, or the unit, of its position
#     position bigint   of the value in the log
#     kind int          0: a location from the last compaction (`value`); 1: a version (`key`, and `value` is its cell)
#
# Invariants
# - Grouped by `unit` and ordered by position and kind, a value is its location, if it has one, then its versions.
# - A value to which no version points is dead, and is not returned.
# - A large value gets a file named after the oldest version that points to it (by seq, then by its order in the batch),
#   which is the put that wrote it unless retention has removed that one. No other value ever has that name: a version
#   has one value, and later values are pointed to by later seqs.


VALUE_SCHEMA = "unit int, position bigint, kind int, key binary, value binary"
PLACE, VERSION = 0, 1
_MAX_UNIT = 0x7FFFFFFF

ValueRow = tuple[int, int, bytes | None, bytes]
"""Position, kind, key, value."""


class Value(NamedTuple):
    """A value that is alive: a cell that points to it, its place before, and the versions that point to it."""

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
    """Which task a value goes to: that of its window while values are counted, that of its unit when they are built."""

    def __init__(self, window_bytes: int, unit_cuts: Sequence[int] | None = None) -> None:
        self._window_bytes = window_bytes
        self._unit_cuts = unit_cuts

    def unit_of(self, position: int) -> int:
        """The number by which it is grouped."""
        if self._unit_cuts is not None:
            return bisect_right(self._unit_cuts, position)
        return position // self._window_bytes & _MAX_UNIT

    def batches(self, rows: Iterable[ValueRow]) -> Iterator[pa.RecordBatch]:
        """Rows as batches of `VALUE_SCHEMA`."""
        return as_batches(((self.unit_of(row[0]), *row) for row in rows), VALUE_SCHEMA)


class Pointing:
    """The versions that point to values."""

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pointing = ((key, cell) for key, cell in rows_of(batches) if points_to_value(key, cell))
        return self._grouping.batches((decode_cell(cell).position, VERSION, key, cell) for key, cell in pointing)


def points_to_value(key: bytes, cell: bytes) -> bool:
    """Whether a row is a version whose value is in the log."""
    return is_pointer(cell) and key.startswith(OBJECTS)


class OldPlaces:
    """The places that the compaction before gave to values."""

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping

    def __call__(self, work: PartWork) -> Iterator[pa.RecordBatch]:
        rows = SSTable(work.place.opened().objects, work.part, kind="values").rows()
        return self._grouping.batches((position_of(key), PLACE, None, value) for key, value in rows)


def values_of(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Value]]:
    """The values that are alive, each with its unit; rows are in order of unit, position and kind."""
    rows = tuples_in(batches, "unit", "position", "kind", "key", "value")
    unit = position = -1
    place: Place | None = None
    versions: list[Row] = []
    for row_unit, row_position, kind, key, value in rows:
        if row_position != position or row_unit != unit:
            if versions:
                yield unit, Value(position, _common_cell(versions, position), place, versions)
            unit, position, place, versions = row_unit, row_position, None, []
        if kind == PLACE:
            place = decode_value_pointer(value)
        else:
            versions.append((key, value))
    if versions:
        yield unit, Value(position, _common_cell(versions, position), place, versions)


def _common_cell(versions: list[Row], position: int) -> Cell:
    """All versions tell the same of their value."""
    first = decode_cell(versions[0][1])
    if any(decode_cell(cell)[2:] != first[2:] for _, cell in versions[1:]):
        raise DataError(f"versions tell different things of the value at position {position}")
    return first


class Counting:
    """Counts the values of windows, for the plan."""

    def __init__(self, keys: EngineKeys, window_bytes: int, large_bytes: int, first_new_lsn: int) -> None:
        self._keys = keys
        self._window_bytes = window_bytes
        self._large_bytes = large_bytes
        self._first_new_lsn = first_new_lsn

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told(self._counts(value for _, value in values_of(batches)))

    def _counts(self, values: Iterator[Value]) -> Iterator[WindowCount]:
        for window, some in groupby(values, key=lambda value: value.position // self._window_bytes):
            yield self._count(window, some)

    def _count(self, window: int, values: Iterable[Value]) -> WindowCount:
        new: list[Value] = []
        new_files: list[Value] = []
        old_files: list[FilePointer] = []
        packed: dict[int, list[BlobPointer]] = {}
        for value in values:
            if isinstance(value.place, BlobPointer):
                packed.setdefault(value.place.blob_file, []).append(value.place)
            elif value.place is not None:
                old_files.append(value.place)
            else:
                require_new(value, self._first_new_lsn)
                is_file = gets_file(value, self._large_bytes, self._keys) is not None
                (new_files if is_file else new).append(value)
        lsns = [value.cell.lsn for value in (*new, *new_files)]
        return WindowCount(
            window=window,
            new_values=len(new),
            new_bytes=sum(value.cell.stored_bytes for value in new),
            new_files=len(new_files),
            new_file_bytes=sum(value.cell.stored_bytes for value in new_files),
            **({"first_new_lsn": min(lsns), "last_new_lsn": max(lsns)} if lsns else {}),
            old_files=len(old_files),
            old_file_bytes=sum(place.stored_bytes for place in old_files),
            packed=tuple(
                LiveValues(blob_file, len(places), sum(place.stored_bytes for place in places))
                for blob_file, places in sorted(packed.items())
            ),
        )


def gets_file(value: Value, large_bytes: int, keys: EngineKeys) -> str | None:
    """The name of the file of a value that is compacted for the first time; None when it goes into a blob file."""
    return value.file_name(keys) if value.cell.stored_bytes >= large_bytes else None


def require_new(value: Value, first_new_lsn: int) -> None:
    """A value without a location is newer than the previous compaction: the older ones are all in its index."""
    if value.cell.lsn < first_new_lsn:
        raise DataError(
            f"the value at position {value.position}, LSN {value.cell.lsn}, has a pointer and is not in the index of "
            "the compaction before",
            hint="`tidelog pipeline verify --engine` tells what is wrong with that; a replica may have a good copy",
        )


# Executor tasks of a compaction that copy values: from log records or blob files, many per request.
#
# Invariants
# - Every returned value matches the checksum of its cell; for values from the log, every frame's checksum was checked
#   too.
# - Values that are close together share a request; the gaps between distant ones are not fetched.

_GAP_BYTES = 1 << 20
_RANGE_BYTES = 8 << 20
_LEVEL = 3
ValueCodec = Literal["none", "zstd"]


class Stored(NamedTuple):
    """A value as it is stored, and how."""

    data: bytes
    codec: int


def values_in_log(place: EngineLocation, descriptors: Sequence[Descriptor], cells: Sequence[Cell]) -> Iterator[bytes]:
    """The stored values of cells that are in order of LSN, in the same order, checked."""
    opened = place.opened()
    history = History(PlannedCatalog(descriptors, opened.keys, place.catalog), opened.objects, opened.fetchers)
    for run in coalesced(cells, _span_in_log, range_bytes=1 << 62, gap_bytes=_GAP_BYTES):
        yield from _run_of_values(history, run)


def _run_of_values(history: History, run: list[Cell]) -> Iterator[bytes]:
    done = 0
    with closing(history.read(run[0].lsn, run[-1].lsn + 1)) as reader:
        while (batch := reader.next_batch()) is not None:
            assert batch.frames is not None
            stop = bisect_left(run, batch.next_offset, lo=done, key=lambda cell: cell.lsn)
            yield from _stored_in(batch.frames, run[done:stop])
            done = stop
    if done < len(run):
        lsn = run[done].lsn
        raise GapError(f"LSN {lsn} is not in the store, and a version points to it", first=lsn, last=run[-1].lsn)


def _stored_in(frames: Frames, cells: Sequence[Cell]) -> Iterator[bytes]:
    """A value ends where the page updates of its record begin."""
    buffer = memoryview(frames.buffer)
    starts, lengths = memoryview(frames.positions).cast("Q"), memoryview(frames.lengths).cast("I")
    for cell in cells:
        index = cell.lsn - frames.first_offset
        start, length = starts[index], lengths[index]
        updates_offset = decode_header(buffer[start : start + length], cell.lsn).updates_offset
        if cell.stored_bytes > updates_offset:
            raise DataError(f"a record has no value of {cell.stored_bytes} bytes, LSN {cell.lsn}")
        end = start + updates_offset
        yield checked(bytes(buffer[end - cell.stored_bytes : end]), cell.codec, cell)


def checked(stored: bytes, codec: int, cell: Cell) -> bytes:
    """The same bytes, if they are the value that the cell tells of."""
    decode_value(stored, codec, cell.size, cell.crc, cell.lsn)
    return stored


def values_in_blob_file(objects: ObjectStore, key: str, values: Sequence[tuple[BlobPointer, Cell]]) -> Iterator[bytes]:
    """The stored values at places of one blob file, in order of their bytes, checked."""
    spans = fetch_many(objects, key, values, _span_in_blob_file, range_bytes=_RANGE_BYTES, gap_bytes=_GAP_BYTES)
    for (place, cell), data in spans:
        try:
            yield checked(bytes(data), place.codec, cell)
        except DataError as error:
            raise CorruptionError(
                error.message,
                path=key,
                byte=place.byte,
                operation="compact",
                hint="Put a good copy of the blob file in its place; a replica has one",
            ) from error


def _span_in_blob_file(value: tuple[BlobPointer, Cell]) -> tuple[int, int]:
    return value[0].byte, value[0].byte + value[0].stored_bytes


def _span_in_log(cell: Cell) -> tuple[int, int]:
    return cell.position, cell.position + cell.stored_bytes


def recoded(stored: Stored, codec: ValueCodec | None) -> Stored:
    """A checked value as a blob file stores it: unchanged, unless another codec is asked for."""
    if codec == "none" and stored.codec == CODEC_ZSTD:
        return Stored(decompressed(stored.data, stored.codec, MAX_VALUE_BYTES, 0), CODEC_NONE)
    if codec == "zstd" and stored.codec == CODEC_NONE:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
        smaller = compressor.compress(stored.data)
        return Stored(smaller, CODEC_ZSTD) if len(smaller) < len(stored.data) else stored
    return stored


# Builds the values of a unit: reads those that have no location yet, writes them as a blob file and as data files, and
# returns the rows of both indexes.
#
# Invariants
# - Every value is checked against its cell before it is written, and what was written is read back and compared.
# - The same values give the same bytes under the same names: building a unit twice gives the same result.


Placed = tuple[Value, Place]


class BuiltBlobFile(msgspec.Struct, frozen=True, kw_only=True):
    """A blob file that was written, and its number."""

    number: int
    info: BlobFileInfo


class BuildSettings(NamedTuple):
    """How a compaction is built, the same for all units."""

    place: EngineLocation
    generation: int
    large_bytes: int
    first_new_lsn: int
    codec: ValueCodec | None
    old_blob_files: Sequence[str]
    version_cuts: Sequence[bytes]


class Builder:
    """Builds the units of a task. A unit's part of the plan is unpacked by the task that has it."""

    def __init__(self, settings: BuildSettings, plan: ValuePlan) -> None:
        self._settings = settings
        self._keys = settings.place.keys
        self._renumbered: Mapping[int, int] = plan.renumbered
        self._file_cuts = plan.file_cuts
        self._units = [pickle.dumps(unit) for unit in plan.units]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, values in groupby(values_of(batches), key=lambda one: one[0]):
            unit: Unit = pickle.loads(self._units[number])
            yield from self._build(unit, [value for _, value in values])

    def _build(self, unit: Unit, values: Sequence[Value]) -> Iterator[pa.RecordBatch]:
        placed, small = self._settled(values), list[tuple[Value, Stored]]()
        for value, stored in self._read(unit, values):
            name = None if value.place is not None else gets_file(value, self._settings.large_bytes, self._keys)
            if name is None:
                small.append((value, recoded(stored, self._settings.codec)))
            else:
                placed.append((value, self._written_file(name, stored)))
        if small:
            built, packed = self._written_blob_file(unit, sorted(small, key=lambda one: one[0].position))
            placed += packed
            yield from as_filed([(b"", msgspec.msgpack.encode(built))], (), TOLD_ROW)
        yield from as_filed(_version_rows(placed), self._settings.version_cuts, VERSION_ROW)
        yield from as_filed(_value_rows(placed), self._file_cuts, VALUE_ROW)

    def _settled(self, values: Iterable[Value]) -> list[Placed]:
        """Those that stay where they are."""
        found: list[Placed] = []
        for value in values:
            place = value.place
            if isinstance(place, FilePointer):
                found.append((value, place))
            elif place is not None and place.blob_file in self._renumbered:
                found.append((value, place._replace(blob_file=self._renumbered[place.blob_file])))
        return found

    def _read(self, unit: Unit, values: Sequence[Value]) -> Iterator[tuple[Value, Stored]]:
        """Those that do not: from the log, and from blob files that are given up."""
        new, moved = list[Value](), dict[int, list[tuple[BlobPointer, Value]]]()
        for value in values:
            if value.place is None:
                require_new(value, self._settings.first_new_lsn)
                new.append(value)
            elif isinstance(value.place, BlobPointer) and value.place.blob_file not in self._renumbered:
                moved.setdefault(value.place.blob_file, []).append((value.place, value))
        from_log = values_in_log(self._settings.place, unit.descriptors, [value.cell for value in new])
        for value, data in zip(new, from_log, strict=True):
            yield value, Stored(data, value.cell.codec)
        for blob_file, group in sorted(moved.items()):
            key = self._settings.old_blob_files[blob_file]
            cells = [(place, value.cell) for place, value in group]
            from_blob_file = values_in_blob_file(self._settings.place.opened().objects, key, cells)
            for (place, value), data in zip(group, from_blob_file, strict=True):
                yield value, Stored(data, place.codec)

    def _written_file(self, name: str, stored: Stored) -> FilePointer:
        key = self._keys.data_file_named(name)
        if key is None:
            raise InternalError(f"{name} was to be the name of a data file")
        write_checked(self._settings.place.opened().objects, key, stored.data, digest_of(stored.data))
        return FilePointer(stored.codec, len(stored.data), name)

    def _written_blob_file(
        self, unit: Unit, values: Sequence[tuple[Value, Stored]]
    ) -> tuple[BuiltBlobFile, list[Placed]]:
        if unit.blob_file is None:
            raise InternalError("a unit has values for a blob file, and none were counted")
        encoded = encode_blob_file((value.position, stored.data) for value, stored in values)
        key = self._keys.compacted(CompactedId("blob", self._settings.generation, encoded.digest))
        write_checked(self._settings.place.opened().objects, key, encoded.data, encoded.digest)
        info = BlobFileInfo(
            key=key,
            size=len(encoded.data),
            values=len(values),
            live_values=len(values),
            live_bytes=sum(len(stored.data) for _, stored in values),
            first_position=values[0][0].position,
            last_position=values[-1][0].position,
        )
        placed: list[Placed] = [
            (value, BlobPointer(stored.codec, unit.blob_file, at.byte, at.stored_bytes))
            for (value, stored), at in zip(values, encoded.places, strict=True)
        ]
        return BuiltBlobFile(number=unit.blob_file, info=info), placed


def _version_rows(placed: Iterable[Placed]) -> Iterator[Row]:
    return ((key, encode_version(cell, place)) for value, place in placed for key, cell in value.versions)


def _value_rows(placed: Iterable[Placed]) -> Iterator[Row]:
    return ((value_key(value.position), encode_value_pointer(place)) for value, place in placed)


class Bodiless:
    """The rows that point to no value, as those of the version index."""

    def __init__(self, cuts: Sequence[bytes]) -> None:
        self._cuts = cuts

    def of(self, rows: Rows) -> Rows:
        """Them, with the numbers of their files."""
        return rows.mapped(self, FILED_SCHEMA)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = ((key, encode_version(cell, None)) for key, cell in rows_of(batches) if not points_to_value(key, cell))
        return as_filed(found, self._cuts)
