"""Executor tasks of a compaction that count, copy and file values: columns of them, without an object for each.

Invariants
- Every value is checked against its cell before it is written, and what was written is read back and compared.
- The same values give the same bytes under the same names: building a unit twice gives the same result.
- Values that are files of their own, or compressed, are looked at one by one: their bytes are what they cost.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import zstandard

from tidelog import _native
from tidelog.cold.catalog import Descriptor
from tidelog.cold.planned_catalog import PlannedCatalog
from tidelog.cold.reader import History
from tidelog.engine.mvcc.cells import decode_cell, parse, seq_of
from tidelog.engine.sst.blob_file import HEADER_BYTES as BLOB_HEADER_BYTES
from tidelog.engine.sst.blob_file import FilePointer, decode_value_pointer, encode_blob_file, encode_value_pointer
from tidelog.engine.sst.sorted_index import BlobFileInfo
from tidelog.engine.sst.sstable import SSTable
from tidelog.engine.wal.value import CODEC_NONE, CODEC_ZSTD, MAX_VALUE_BYTES, decode_value, decompressed
from tidelog.errors import CorruptionError, DataError, GapError, InternalError
from tidelog.log.frame import crc32
from tidelog.pipeline.jobs.engine.blobs import LiveValues, Unit, ValuePlan, WindowCount
from tidelog.pipeline.jobs.engine.columns import (
    NOWHERE,
    OWN_FILE,
    LiveColumns,
    PointingRows,
    blob_pointers,
    counted_up,
    file_rows,
    live_values,
    one_array,
    place_rows,
    pointing_rows,
    position_keys,
    raw_numbers,
    version_values,
    whole_groups,
)
from tidelog.pipeline.jobs.engine.columns import numbers as numbers_of
from tidelog.pipeline.jobs.engine.rows import (
    PartWork,
    as_filed,
    as_told,
    write_checked,
)
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.pieces import order_of_columns
from tidelog.store.keys import CompactedId, EngineKeys
from tidelog.store.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa


# Values as rows: the versions that point to each, and the location that the previous compaction gave it.
#
#     unit int          the partition of the row: the window, or the unit, of its position
#     position bigint   of the value in the log
#     kind int          0: a location from the last compaction (`value`); 1: a version (`key`, and `value` is its cell)
#
# Invariants
# - Grouped by `unit` and ordered by position, kind and key, a value is its location, if it has one, then its versions.
# - A value to which no version points is dead, and is not returned.
# - A large value gets a file named after the oldest version that points to it (by seq, then by its order in the batch),
#   which is the put that wrote it unless retention has removed that one. No other value ever has that name: a version
#   has one value, and later values are pointed to by later seqs.


VALUE_SCHEMA = "unit int, position bigint, kind int, key binary, value binary"
PLACE, VERSION = 0, 1


class Grouping:
    """Which task a value goes to: that of its window while values are counted, that of its unit when they are built."""

    def __init__(self, window_bytes: int, unit_cuts: Sequence[int] | None = None) -> None:
        self._window_bytes = window_bytes
        self._unit_cuts = unit_cuts

    def pointing(self, keys: pa.Array, cells: pa.Array) -> PointingRows:
        """The rows that point to values, with the numbers by which these are grouped."""
        return pointing_rows(keys, cells, self._window_bytes, self._unit_cuts)

    def places(self, keys: pa.Array) -> tuple[pa.Array, pa.Array]:
        """The same numbers, and the positions, of rows of the value index."""
        return place_rows(keys, self._window_bytes, self._unit_cuts)


class Pointing:
    """The versions that point to values."""

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            keys, cells = batch.column("key"), batch.column("cell")
            found = self._grouping.pointing(keys, cells)
            yield _value_batch(found.units, found.positions, VERSION, keys.take(found.rows), cells.take(found.rows))


def _value_batch(units: pa.Array, positions: pa.Array, kind: int, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
    """Rows of `VALUE_SCHEMA`."""
    import pyarrow as pa

    kinds = pa.repeat(pa.scalar(kind, pa.int32()), len(units))
    names = [field.split()[0] for field in VALUE_SCHEMA.split(", ")]
    return pa.RecordBatch.from_arrays([units, positions, kinds, keys, values], names=names)


class OldPlaces:
    """The places that the compaction before gave to values."""

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping

    def __call__(self, work: PartWork) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for rows in file_rows(SSTable(work.place.opened().objects, work.part, kind="values")):
            units, positions = self._grouping.places(rows.keys)
            yield _value_batch(units, positions, PLACE, pa.nulls(len(units), pa.binary()), rows.values)


class UnitValues:
    """The values of a window or a unit that are alive, and the rows that point to them.

    Columns have a row a value, in order of position. Values that are files, or are to be, have a name.
    """

    def __init__(self, rows: pa.Table) -> None:
        self.columns = live_values(rows)
        self._keys, self._values = one_array(rows.column("key")), one_array(rows.column("value"))

    @property
    def is_new(self) -> pa.Array:
        """Which of them have no place yet."""
        import pyarrow.compute as pc

        return pc.equal(self.columns.blob_file, NOWHERE)

    def require_new(self, first_new_lsn: int) -> None:
        """A value without a location is newer than the previous compaction: the older ones are all in its index."""
        import pyarrow.compute as pc

        lost = self.columns.at(pc.and_(self.is_new, pc.less(self.columns.lsn, first_new_lsn)))
        if len(lost.lsn):
            raise DataError(
                f"the value at position {lost.position[0]}, LSN {lost.lsn[0]}, has a pointer and is not in the index "
                "of the compaction before",
                hint="`tidelog pipeline verify --engine` tells what is wrong with that; a replica may have a good copy",
            )

    def names(self, large_bytes: int, keys: EngineKeys) -> dict[int, str]:
        """The names of the files of values that are compacted for the first time and large, by their numbers here.

        One whose name would be too long goes into a blob file.
        """
        import pyarrow.compute as pc

        large = pc.and_(self.is_new, pc.greater_equal(self.columns.stored_bytes, large_bytes))
        found = ((number, self._file_name(number, keys)) for number in pc.indices_nonzero(large).to_pylist())
        return {number: name for number, name in found if name is not None}

    def _file_name(self, number: int, keys: EngineKeys) -> str | None:
        """The name below `data/`: of the oldest version that points to it."""
        first, count = self.columns.first_row[number].as_py(), self.columns.versions[number].as_py()
        rows = zip(
            self._keys.slice(first, count).to_pylist(), self._values.slice(first, count).to_pylist(), strict=True
        )
        key = min(rows, key=lambda row: (seq_of(row[0]), decode_cell(row[1]).order))[0]
        name = parse(key)
        data_key = keys.data_file(name.bucket, name.key or "", name.seq)
        return None if data_key is None else data_key.removeprefix(keys.data_prefix)

    def in_key_order(self, numbers: pa.Array) -> pa.Array:
        """Which of some values is to be the first, the second and so on in the order of the first key that has each."""
        return order_of_columns([self._keys.take(self.columns.first_row.take(numbers))], len(numbers))

    def file_pointer(self, number: int) -> bytes:
        """The pointer to the file that a value is already, checked."""
        data: bytes = self._values[self.columns.place_row[number].as_py()].as_py()
        decode_value_pointer(data)
        return data

    def versions(self, pointers: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Keys and values of the rows of the version index, given the pointer to each value."""
        import pyarrow as pa
        import pyarrow.compute as pc

        values = pa.RunEndEncodedArray.from_arrays(pc.cumulative_sum(self.columns.versions), counted_up(len(pointers)))
        number = pc.run_end_decode(values)
        starts = pc.subtract(pc.cumulative_sum(self.columns.versions), self.columns.versions)
        within = pc.subtract(counted_up(len(number)), starts.take(number))
        rows = pc.add(self.columns.first_row.take(number), within)
        return self._keys.take(rows), version_values(self._values.take(rows), pointers.take(number))


class Counting:
    """Counts the values of windows, for the plan."""

    def __init__(self, keys: EngineKeys, window_bytes: int, large_bytes: int, first_new_lsn: int) -> None:
        self._keys = keys
        self._window_bytes = window_bytes
        self._large_bytes = large_bytes
        self._first_new_lsn = first_new_lsn

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told(self._counts(batches))

    def _counts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[WindowCount]:
        for _, rows in whole_groups(batches, "unit"):
            values = UnitValues(rows)
            if len(values.columns.position):
                yield self._count(values)

    def _count(self, values: UnitValues) -> WindowCount:
        import pyarrow as pa
        import pyarrow.compute as pc

        values.require_new(self._first_new_lsn)
        columns = values.columns
        new, files = columns.at(values.is_new), columns.at(pc.equal(columns.blob_file, OWN_FILE))
        named = columns.at(pa.array(list(values.names(self._large_bytes, self._keys)), pa.int32()))
        new_file_bytes = pc.sum(named.stored_bytes).as_py() or 0
        lsns = pc.min_max(new.lsn).as_py()
        return WindowCount(
            window=columns.position[0].as_py() // self._window_bytes,
            new_values=len(new.lsn) - len(named.lsn),
            new_bytes=(pc.sum(new.stored_bytes).as_py() or 0) - new_file_bytes,
            new_files=len(named.lsn),
            new_file_bytes=new_file_bytes,
            **({"first_new_lsn": lsns["min"], "last_new_lsn": lsns["max"]} if len(new.lsn) else {}),
            old_files=len(files.lsn),
            old_file_bytes=pc.sum(files.place_stored_bytes).as_py() or 0,
            packed=_packed(columns.at(pc.greater_equal(columns.blob_file, 0))),
        )


def _packed(columns: LiveColumns) -> tuple[LiveValues, ...]:
    """What is live of each old blob file."""
    import pyarrow as pa

    table = pa.table({"file": columns.blob_file, "bytes": columns.place_stored_bytes})
    summed = table.group_by("file").aggregate([("bytes", "count"), ("bytes", "sum")]).sort_by("file")
    rows = zip(*(summed.column(name).to_pylist() for name in ("file", "bytes_count", "bytes_sum")), strict=True)
    return tuple(LiveValues(*row) for row in rows)


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
    """Values as they are stored, one after the other: their bytes, the codec, length and checksum of each.

    `numbers` says which values of the unit they are.
    """

    numbers: pa.Array
    data: bytes | memoryview
    codecs: pa.Array
    lengths: pa.Array
    crcs: pa.Array


def values_in_log(
    place: EngineLocation, descriptors: Sequence[Descriptor], columns: LiveColumns, numbers: pa.Array
) -> Iterator[Stored]:
    """The stored values of a unit that are in the log, in order, checked; as many at a time as come together."""
    opened = place.opened()
    history = History(PlannedCatalog(descriptors, opened.keys, place.catalog), opened.objects, opened.fetchers)
    for start, stop in _neighbours(columns.position, columns.stored_bytes):
        yield from _run_of_values(history, columns, numbers, start, stop)


def _neighbours(starts: pa.Array, lengths: pa.Array) -> Iterator[tuple[int, int]]:
    """Runs of values without a large gap between them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count = len(starts)
    if not count:
        return
    behind = pc.add(pc.add(starts, lengths.cast(starts.type)), pa.scalar(_GAP_BYTES, starts.type))
    cuts = [
        index + 1 for index in pc.indices_nonzero(pc.greater(starts.slice(1), behind.slice(0, count - 1))).to_pylist()
    ]
    yield from pairwise((0, *cuts, count))


def _requests(starts: pa.Array, lengths: pa.Array) -> Iterator[tuple[int, int]]:
    """The same, none of them of more bytes than are asked for at once, unless it is one value."""
    firsts = raw_numbers(starts).cast("Q")
    for start, stop in _neighbours(starts, lengths):
        at = start
        while at < stop:
            end = bisect_right(firsts, firsts[at] + _RANGE_BYTES, lo=at + 1, hi=stop)
            yield at, end
            at = end


def _run_of_values(
    history: History, columns: LiveColumns, numbers: pa.Array, start: int, stop: int
) -> Iterator[Stored]:
    lsns, sizes, stored, crcs, codecs = _claims(columns)
    done = start
    for frames in history.frames(lsns[start], lsns[stop - 1] + 1):
        end = bisect_left(lsns, frames.next_offset, lo=done, hi=stop)
        if end > done:
            places = frames.first_offset, frames.buffer, frames.positions, frames.lengths
            found = _native.gather_values(*places, lsns, sizes, stored, crcs, codecs, done, end)
            yield _checked(columns, numbers, done, end, *found)
        done = end
    if done < stop:
        raise GapError(
            f"LSN {lsns[done]} is not in the store, and a version points to it", first=lsns[done], last=lsns[stop - 1]
        )


def _claims(columns: LiveColumns) -> tuple[memoryview, memoryview, memoryview, memoryview, memoryview]:
    """What cells say of values: LSNs, sizes, stored bytes, checksums, codecs."""
    lsns, *others = columns.lsn, columns.size, columns.stored_bytes, columns.crc, columns.codec
    sizes, stored, crcs, codecs = map(raw_numbers, others)
    return raw_numbers(lsns).cast("Q"), sizes, stored, crcs, codecs


def _checked(columns: LiveColumns, numbers: pa.Array, start: int, stop: int, data: bytes, crcs: bytes) -> Stored:
    """The same bytes, if they are the values that the cells tell of: those that are not compressed are known to be."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count = stop - start
    some = LiveColumns(*(column.slice(start, count) for column in columns))
    stored = Stored(
        numbers.slice(start, count), data, some.codec, some.stored_bytes, numbers_of(pa.uint32(), crcs, count)
    )
    if pc.any(pc.not_equal(some.codec, CODEC_NONE)).as_py():
        at = 0
        for index, (codec, length) in enumerate(
            zip(some.codec.to_pylist(), some.stored_bytes.to_pylist(), strict=True)
        ):
            if codec != CODEC_NONE:
                claims = (some.size[index].as_py(), some.crc[index].as_py(), some.lsn[index].as_py())
                decode_value(data[at : at + length], codec, *claims)
            at += length
    return stored


def values_in_blob_file(objects: ObjectStore, key: str, columns: LiveColumns, numbers: pa.Array) -> Iterator[Stored]:
    """The stored values of one blob file, in order of their bytes, checked; as many at a time as come together."""
    places = raw_numbers(columns.byte).cast("Q"), raw_numbers(columns.stored_bytes).cast("I")
    lsns, sizes, stored, crcs, codecs = _claims(columns)

    def cut(data: memoryview, first: int, start: int, stop: int) -> Stored:
        found = _native.cut_values(first, data, *places, lsns, sizes, stored, crcs, codecs, start, stop)
        return _checked(columns, numbers, start, stop, *found)

    for start, stop in _requests(columns.byte, columns.stored_bytes):
        first = places[0][start]
        data = objects.read_range(key, first, places[0][stop - 1] + places[1][stop - 1] - first)
        try:
            yield cut(data, first, start, stop)
        except DataError:
            for row in range(start, stop):  # once more, to say which it is
                with _told_of_blob_file(key, places[0][row]):
                    cut(data, first, row, row + 1)
            raise


@contextmanager
def _told_of_blob_file(key: str, byte: int) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise CorruptionError(
            error.message,
            path=key,
            byte=byte,
            operation="compact",
            hint="Put a good copy of the blob file in its place; a replica has one",
        ) from error


def as_stored(values: Sequence[tuple[int, bytes, int]]) -> Stored:
    """Values with their numbers and codecs, one after the other."""
    import pyarrow as pa

    return Stored(
        pa.array([number for number, _, _ in values], pa.int32()),
        b"".join(data for _, data, _ in values),
        pa.array([codec for *_, codec in values], pa.uint8()),
        pa.array([len(data) for _, data, _ in values], pa.uint32()),
        pa.array([crc32(data) for _, data, _ in values], pa.uint32()),
    )


def each_of(stored: Stored) -> Iterator[tuple[int, bytes, int]]:
    """Numbers, bytes and codecs, one value after the other."""
    at = 0
    columns = (stored.numbers.to_pylist(), stored.lengths.to_pylist(), stored.codecs.to_pylist())
    for number, length, codec in zip(*columns, strict=True):
        yield number, bytes(stored.data[at : at + length]), codec
        at += length


def recoded(stored: Stored, codec: ValueCodec | None) -> Stored:
    """Checked values as a blob file stores them: unchanged, unless another codec is asked for."""
    import pyarrow.compute as pc

    wanted = None if codec is None else CODEC_ZSTD if codec == "zstd" else CODEC_NONE
    if wanted is None or not pc.any(pc.not_equal(stored.codecs, wanted)).as_py():
        return stored
    return as_stored([(number, *_recoded(data, had, wanted)) for number, data, had in each_of(stored)])


def _recoded(data: bytes, had: int, wanted: int) -> tuple[bytes, int]:
    if had == wanted:
        return data, had
    if wanted == CODEC_NONE:
        return decompressed(data, had, MAX_VALUE_BYTES, 0), CODEC_NONE
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
    smaller = compressor.compress(data)
    return (smaller, CODEC_ZSTD) if len(smaller) < len(data) else (data, had)


# Builds the values of a unit: reads those that have no location yet, writes them as a blob file and as data files, and
# returns the rows of both indexes.
#
# Invariants
# - Every value is checked against its cell before it is written, and what was written is read back and compared.
# - The same values give the same bytes under the same names: building a unit twice gives the same result.


class BuiltBlobFile(msgspec.Struct, frozen=True, kw_only=True):
    """A blob file that was written, and its number."""

    number: int
    info: BlobFileInfo


class BuildSettings(NamedTuple):
    """How a compaction is built, the same for all units; the numbers of files are those of `FileWriter`."""

    place: EngineLocation
    generation: int
    large_bytes: int
    first_new_lsn: int
    codec: ValueCodec | None
    old_blob_files: Sequence[str]
    version_cuts: Sequence[bytes]
    first_value_file: int
    told_file: int


class Builder:
    """Builds the units of a task. A unit's part of the plan is unpacked by the task that has it."""

    def __init__(self, settings: BuildSettings, plan: ValuePlan) -> None:
        self._settings = settings
        self._keys = settings.place.keys
        self._renumbered: Mapping[int, int] = plan.renumbered
        self._file_cuts = plan.file_cuts
        self._units = [pickle.dumps(unit) for unit in plan.units]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, rows in whole_groups(batches, "unit"):
            unit: Unit = pickle.loads(self._units[number])
            yield from self._build(unit, UnitValues(rows))

    def _build(self, unit: Unit, values: UnitValues) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        if not len(values.columns.position):
            return
        values.require_new(self._settings.first_new_lsn)
        names = values.names(self._settings.large_bytes, self._keys)
        pointers, small = _Pointers(values.columns), list[Stored]()
        self._keep(values, pointers)
        for stored in self._read(unit, values):
            small.append(recoded(self._without_files(stored, names, pointers), self._settings.codec))
        if any(len(one.numbers) for one in small):
            built = self._written_blob_file(unit, values, small, pointers)
            told = pa.array([msgspec.msgpack.encode(built)], pa.binary())
            yield as_filed(pa.array([b""], pa.binary()), told, (), self._settings.told_file)
        places = pointers.array()
        yield as_filed(*values.versions(places), self._settings.version_cuts)
        keys = position_keys(values.columns.position)
        yield as_filed(keys, places, self._file_cuts, self._settings.first_value_file)

    def _keep(self, values: UnitValues, pointers: _Pointers) -> None:
        """Those that stay where they are."""
        import pyarrow as pa
        import pyarrow.compute as pc

        columns = values.columns
        for number in pc.indices_nonzero(pc.equal(columns.blob_file, OWN_FILE)).to_pylist():
            pointers.put(number, values.file_pointer(number))
        staying = pa.array(sorted(self._renumbered), pa.int64())
        numbers = pc.indices_nonzero(pc.is_in(columns.blob_file, value_set=staying))
        kept = columns.at(numbers)
        renumbered = pa.array([self._renumbered[old] for old in staying.to_pylist()], pa.uint32())
        files = renumbered.take(pc.index_in(kept.blob_file, value_set=staying))
        pointers.put_blobs(numbers, kept.place_codec, files, kept.byte, kept.place_stored_bytes)

    def _read(self, unit: Unit, values: UnitValues) -> Iterator[Stored]:
        """Those that do not: from the log, and from blob files that are given up."""
        import pyarrow as pa
        import pyarrow.compute as pc

        columns = values.columns
        new = pc.indices_nonzero(values.is_new).cast(pa.int32())
        yield from values_in_log(self._settings.place, unit.descriptors, columns.at(new), new)
        staying = pa.array(sorted(self._renumbered), pa.int64())
        given_up = pc.and_(
            pc.greater_equal(columns.blob_file, 0), pc.invert(pc.is_in(columns.blob_file, value_set=staying))
        )
        numbers = pc.indices_nonzero(given_up)
        yield from self._moved(columns.at(numbers), numbers)

    def _moved(self, columns: LiveColumns, numbers: pa.Array) -> Iterator[Stored]:
        """Values in the order of their bytes, as they are stored where they are."""
        import pyarrow as pa
        import pyarrow.compute as pc

        order = order_of_columns([columns.blob_file, columns.byte.cast(pa.int64(), safe=False)], len(numbers))
        there = columns._replace(stored_bytes=columns.place_stored_bytes, codec=columns.place_codec).at(order)
        runs, first = pc.run_end_encode(there.blob_file), 0
        for blob_file, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            some = LiveColumns(*(column.slice(first, end - first) for column in there))
            key, rows = self._settings.old_blob_files[blob_file], numbers.take(order.slice(first, end - first))
            yield from values_in_blob_file(self._settings.place.opened().objects, key, some, rows)
            first = end

    def _without_files(self, stored: Stored, names: Mapping[int, str], pointers: _Pointers) -> Stored:
        """Writes those that get a file; what is left goes into the blob file."""
        if not names:
            return stored
        small = []
        for number, data, codec in each_of(stored):
            name = names.get(number)
            if name is None:
                small.append((number, data, codec))
            else:
                pointers.put(number, encode_value_pointer(self._written_file(name, data, codec)))
        return as_stored(small)

    def _written_file(self, name: str, data: bytes, codec: int) -> FilePointer:
        key = self._keys.data_file_named(name)
        if key is None:
            raise InternalError(f"{name} was to be the name of a data file")
        write_checked(self._settings.place.opened().objects, key, data)
        return FilePointer(codec, len(data), name)

    def _written_blob_file(
        self, unit: Unit, values: UnitValues, small: Sequence[Stored], pointers: _Pointers
    ) -> BuiltBlobFile:
        import pyarrow as pa
        import pyarrow.compute as pc

        if unit.blob_file is None:
            raise InternalError("a unit has values for a blob file, and none were counted")
        stored = _in_key_order(values, small)
        positions = values.columns.position.take(stored.numbers)
        encoded = encode_blob_file(
            stored.data, raw_numbers(positions), raw_numbers(stored.lengths), raw_numbers(stored.crcs)
        )
        key = self._keys.compacted(CompactedId("blob", self._settings.generation, encoded.digest))
        write_checked(self._settings.place.opened().objects, key, encoded.data)
        lengths = stored.lengths.cast(pa.uint64())
        places = pc.add(pc.subtract(pc.cumulative_sum(lengths), lengths), pa.scalar(BLOB_HEADER_BYTES, pa.uint64()))
        files = pa.repeat(pa.scalar(unit.blob_file, pa.uint32()), len(places))
        pointers.put_blobs(stored.numbers, stored.codecs, files, places, stored.lengths)
        info = BlobFileInfo(
            key=key,
            size=len(encoded.data),
            values=len(places),
            live_values=len(places),
            live_bytes=len(stored.data),
            first_position=pc.min(positions).as_py(),
            last_position=pc.max(positions).as_py(),
        )
        return BuiltBlobFile(number=unit.blob_file, info=info)


def _in_key_order(values: UnitValues, small: Sequence[Stored]) -> Stored:
    """All values of a unit for its blob file, in the order of keys: what a scan reads together lies together."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pa.concat_arrays([one.numbers.cast(pa.int32()) for one in small])
    data = b"".join(one.data for one in small)
    columns = [pa.concat_arrays([getattr(one, name) for one in small]) for name in ("codecs", "lengths", "crcs")]
    order = values.in_key_order(numbers)
    ends = pc.cumulative_sum(columns[1].cast(pa.int64()))
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    pieces = pa.Array.from_buffers(
        pa.large_binary(), len(numbers), [None, offsets.buffers()[1], pa.py_buffer(data)]
    ).take(order)
    moved = memoryview(pieces.buffers()[2])[: len(data)]
    return Stored(numbers.take(order), moved, *(column.take(order) for column in columns))


class _Pointers:
    """The pointer to each value of a unit, as they become known."""

    def __init__(self, columns: LiveColumns) -> None:
        self._count = len(columns.position)
        self._numbers: list[pa.Array] = []
        self._pointers: list[pa.Array] = []
        self._files: dict[int, bytes] = {}

    def put(self, number: int, pointer: bytes) -> None:
        """That of a value that is a file."""
        self._files[number] = pointer

    def put_blobs(
        self, numbers: pa.Array, codecs: pa.Array, blob_files: pa.Array, places: pa.Array, lengths: pa.Array
    ) -> None:
        """Those of values in blob files."""
        import pyarrow as pa

        self._numbers.append(numbers.cast(pa.int32()))
        self._pointers.append(blob_pointers(codecs, blob_files, places, lengths))

    def array(self) -> pa.Array:
        """All of them, in the order of the values."""
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = pa.concat_arrays([*self._numbers, pa.array(list(self._files), pa.int32())])
        pointers = pa.concat_arrays([*self._pointers, pa.array(list(self._files.values()), pa.binary())])
        if len(numbers) != self._count:
            raise InternalError(f"a unit has {self._count} values, and {len(numbers)} of them have a place")
        return pointers.take(pc.sort_indices(numbers))


def bodiless(cuts: Sequence[bytes], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows that point to no value, as those of the version index."""
    import pyarrow.compute as pc

    for batch in batches:
        keys, cells = batch.column("key"), batch.column("cell")
        pointing = pointing_rows(keys, cells, 1, None).rows
        if len(pointing) == len(keys):
            continue
        others = pc.invert(pc.is_in(counted_up(len(keys)), value_set=pointing))
        yield as_filed(keys.filter(others), version_values(cells.filter(others)), cuts)
