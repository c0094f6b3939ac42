"""Rows of an engine's tree as Arrow columns: what jobs ask of all rows, without an object for each of them.

The loops are C (`native/tree_rows.c`); here are the arrays in front of them and behind them.

Invariants
- Rows come in batches that fit into memory. What goes over the end of a batch (a name, a unit) is carried on.
- Answers do not depend on how rows are divided into batches.
- Bytes are checked where they are used; what is wrong with them raises DataError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidelog import _native
from tidelog.engine.mvcc.cells import SEQ_BYTES
from tidelog.engine.mvcc.versions import CreatedColumns
from tidelog.engine.sst.blob_file import BLOB_POINTER_BYTES, BLOB_POINTER_HEADS
from tidelog.engine.sst.block import joined
from tidelog.engine.sst.sstable import SSTable
from tidelog.pipeline.pieces import bytes_column

if TYPE_CHECKING:
    import pyarrow as pa

# Blocks of a row file that make one batch.
_JOINED_BYTES = 1 << 20
_POSITION_BYTES = 8
NOWHERE = -1
OWN_FILE = -2
"""What a value has for the number of its blob file when it has no place, and when it is a file."""


def numbers(kind: pa.DataType, data: bytes, count: int) -> pa.Array:
    """The first numbers of an array that a kernel made."""
    import pyarrow as pa

    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])


def binary(count: int, ends: bytes, data: bytes) -> pa.Array:
    """An array of binary that a kernel made."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def raw_numbers(array: pa.Array) -> memoryview:
    """The bytes of an array of numbers without nulls: of these rows alone."""
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    view = memoryview(b"" if data is None else data)
    return view[array.offset * width : (array.offset + len(array)) * width]


def counted_up(count: int) -> pa.Array:
    """The numbers of so many rows, from 0 on."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.subtract(pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int32()), count)), pa.scalar(1, pa.int32()))


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column in one piece."""
    import pyarrow as pa

    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


# Reading row files


class FileRows(NamedTuple):
    """Rows of a row file: keys, values (of versions only their cells), and for each the number of its name."""

    keys: pa.Array
    values: pa.Array
    parts: pa.Array


def file_rows(table: SSTable) -> Iterator[FileRows]:
    """All rows of a file, some blocks at a time; read to the end they are exactly what was written."""
    import pyarrow as pa

    has_places = table.footer.kind == "versions"
    for raw in joined((block.raw for block in table.blocks()), _JOINED_BYTES):
        count, (key_ends, keys, value_ends, values, parts) = _native.block_rows(raw, has_places)
        yield FileRows(
            binary(count, key_ends, keys), binary(count, value_ends, values), numbers(pa.int32(), parts, count)
        )


def file_numbers(keys: pa.Array, cuts: Sequence[bytes]) -> pa.Array:
    """Which file each key belongs to."""
    import pyarrow as pa

    return numbers(pa.int32(), _native.file_numbers(bytes_column(keys), len(keys), tuple(cuts)), len(keys))


def version_values(cells: pa.Array, pointers: pa.Array | None = None) -> pa.Array:
    """The values of rows of the version index; without pointers, those of rows that point to nothing."""
    import pyarrow as pa

    places = pa.nulls(len(cells), pa.binary()) if pointers is None else pointers
    ends, data = _native.join_versions(bytes_column(cells), bytes_column(places), len(cells))
    return binary(len(cells), ends, data)


# What is to be seen of rows


class Surveyed(NamedTuple):
    """Rows in order of key: the sum of the digests of what is to be seen, how many things that is, the last name, and
    sampled keys."""

    total: int
    things: int
    settled: bytes
    samples: list[bytes]


def survey_rows(
    keys: pa.Array, cells: pa.Array, seq: int, created: CreatedColumns, *, every: int = 0, settled: bytes = b""
) -> Surveyed:
    """Looks at all rows; those of buckets are passed over."""
    total, things, settled, samples = _native.survey_rows(
        bytes_column(keys), bytes_column(cells), len(keys), seq, every, settled, *created
    )
    return Surveyed(int.from_bytes(total, "little"), things, settled, samples)


def going_rows(keys: pa.Array, cells: pa.Array, horizon: int, keep_versions: int, created: CreatedColumns) -> pa.Array:
    """Whether retention lets each row go. All versions of a name are among the rows."""
    import pyarrow as pa

    verdicts = _native.judge_rows(bytes_column(keys), bytes_column(cells), len(keys), horizon, keep_versions, *created)
    return numbers(pa.uint8(), verdicts, len(keys)).cast(pa.bool_())


def whole_names(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Rows in order of key, so divided that all versions of a name are together."""
    import pyarrow.compute as pc

    def name_of(batch: pa.RecordBatch) -> pa.Array:
        return pc.binary_slice(batch.column("key"), 0, -SEQ_BYTES)

    return _whole(batches, name_of)


def whole_groups(batches: Iterable[pa.RecordBatch], by: str) -> Iterator[tuple[int, pa.Table]]:
    """Rows in order of a number: those of each number by themselves."""
    import pyarrow.compute as pc

    for table in _whole(batches, lambda batch: batch.column(by)):
        runs, first = pc.run_end_encode(one_array(table.column(by))), 0
        for number, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            yield number, table.slice(first, end - first)
            first = end


def _whole(batches: Iterable[pa.RecordBatch], group_of: Callable[[pa.RecordBatch], pa.Array]) -> Iterator[pa.Table]:
    """Cuts where a group ends: what may go on in the next batch waits for it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        groups = group_of(batch)
        last = groups[len(groups) - 1]
        begin = pc.index(groups, last).as_py()
        if begin > 0 or (waiting and group_of(waiting[-1])[waiting[-1].num_rows - 1] != last):
            waiting.append(batch.slice(0, begin))
            yield pa.Table.from_batches(waiting)
            waiting = []
        waiting.append(batch.slice(begin))
    if waiting:
        yield pa.Table.from_batches(waiting)


# Values that rows point to


class PointingRows(NamedTuple):
    """Rows whose value is in the log: which they are, the unit of each, and the position of its value."""

    rows: pa.Array
    units: pa.Array
    positions: pa.Array


def pointing_rows(keys: pa.Array, cells: pa.Array, window_bytes: int, unit_cuts: Sequence[int] | None) -> PointingRows:
    """Units are windows of the log, unless it is given where they begin."""
    import pyarrow as pa

    window, cuts = _units(window_bytes, unit_cuts)
    count, (rows, units, positions) = _native.point_rows(
        bytes_column(keys), bytes_column(cells), len(keys), window, cuts
    )
    return PointingRows(
        numbers(pa.int32(), rows, count), numbers(pa.int32(), units, count), numbers(pa.int64(), positions, count)
    )


def place_rows(keys: pa.Array, window_bytes: int, unit_cuts: Sequence[int] | None) -> tuple[pa.Array, pa.Array]:
    """Unit and position of each row of the value index."""
    import pyarrow as pa

    window, cuts = _units(window_bytes, unit_cuts)
    units, positions = _native.place_units(bytes_column(keys), len(keys), window, cuts)
    return numbers(pa.int32(), units, len(keys)), numbers(pa.int64(), positions, len(keys))


def _units(window_bytes: int, unit_cuts: Sequence[int] | None) -> tuple[int, bytes]:
    """How the kernels take what units are."""
    if unit_cuts is None:
        return window_bytes, b""
    return 0, struct.pack(f"={len(unit_cuts)}Q", *unit_cuts)


class LiveColumns(NamedTuple):
    """Values that are alive, in order of position.

    `first_row` and `versions` say which rows of their unit point to each, `place_row` (-1: none) has where it is.
    `blob_file` is -1 for a value that has no place, -2 for one that is a file.
    """

    first_row: pa.Array
    versions: pa.Array
    place_row: pa.Array
    lsn: pa.Array
    position: pa.Array
    size: pa.Array
    stored_bytes: pa.Array
    crc: pa.Array
    codec: pa.Array
    blob_file: pa.Array
    byte: pa.Array
    place_stored_bytes: pa.Array
    place_codec: pa.Array

    def at(self, rows: pa.Array) -> LiveColumns:
        """Some of them: by a mask, or by their indexes."""
        import pyarrow as pa

        is_mask = pa.types.is_boolean(rows.type)
        return LiveColumns(*(column.filter(rows) if is_mask else column.take(rows) for column in self))


def live_values(unit: pa.Table) -> LiveColumns:
    """The values of a unit, whose rows are in order of position, places first."""
    import pyarrow as pa

    positions, keys, values = (one_array(unit.column(name)) for name in ("position", "key", "value"))
    count, columns = _native.merge_values(
        raw_numbers(positions), bytes_column(keys), bytes_column(values), unit.num_rows
    )
    kinds = (
        *(pa.int32(), pa.int32(), pa.int32(), pa.uint64(), pa.int64(), pa.uint64(), pa.uint32(), pa.uint32()),
        *(pa.uint8(), pa.int64(), pa.uint64(), pa.uint32(), pa.uint8()),
    )
    return LiveColumns(*(numbers(kind, data, count) for kind, data in zip(kinds, columns, strict=True)))


def blob_pointers(codecs: pa.Array, blob_files: pa.Array, places: pa.Array, stored_bytes: pa.Array) -> pa.Array:
    """Pointers into blob files."""
    encoded = _native.encode_pointers(*(raw_numbers(one) for one in (codecs, blob_files, places, stored_bytes)))
    return _of_width(encoded, BLOB_POINTER_BYTES)


def pointing_elsewhere(pointers: pa.Array) -> pa.Array:
    """Which pointers are not sound ones into blob files: they name a file of its own, or are wrong."""
    import pyarrow as pa
    import pyarrow.compute as pc

    heads = pa.array(BLOB_POINTER_HEADS, pa.binary())
    is_blob = pc.is_in(pc.binary_slice(pointers, 0, len(BLOB_POINTER_HEADS[0])), value_set=heads)
    return pc.invert(pc.and_(is_blob, pc.equal(pc.binary_length(pointers), BLOB_POINTER_BYTES)))


def position_keys(positions: pa.Array) -> pa.Array:
    """The keys of rows of the value index."""
    return _of_width(_native.position_keys(raw_numbers(positions)), _POSITION_BYTES)


def _of_width(data: bytes, width: int) -> pa.Array:
    import pyarrow as pa

    fixed = pa.Array.from_buffers(pa.binary(width), len(data) // width, [None, pa.py_buffer(data)])
    return fixed.cast(pa.binary())
