"""Executor tasks of `digest` and `verify`: read what each source says about keys of the tree, merge it and compare.

    source   key        lsn, step                        cell
    BASE     tree key   0, 0                             a row of a snapshot or of a version index
    LOG      tree key   of the record and in it          what the record left there; none: it removed the key
    ACTUAL   tree key   0, 0                             as BASE, of what is compared with the other two
    CHECKED  empty      0, 0                             msgpack of `LogObject`: an object that was verified on the way
    START    empty      the seq, 0                       a record says that history begins there
    DAMAGE   empty      0, 0                             msgpack of `Unreadable`

`part` is a number that all versions of a name have.

Invariants
- Which records count is decided as everywhere (`engine/wal/replay.py`).
- An unreadable part is a row that says so, and ends its source: the contents of the bytes never raise.
- Fit for executors: of the engine it imports codecs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tidelog.engine.mvcc.cells import BUCKETS, OBJECTS, SEQ_BYTES
from tidelog.engine.mvcc.digest import Digest
from tidelog.engine.mvcc.vacuum_rules import Rule
from tidelog.engine.mvcc.versions import BucketVersion
from tidelog.engine.sst.sstable import RowPart, SSTable
from tidelog.engine.verify.store import LogObject
from tidelog.engine.wal.replay import ShippedLog
from tidelog.errors import DataError, GapError, NotFoundError, TidelogError
from tidelog.pipeline.flow import Flow, Rows
from tidelog.pipeline.jobs.engine.checked_log import CheckedPart, Checking
from tidelog.pipeline.jobs.engine.columns import FileRows, file_rows, one_array, whole_groups
from tidelog.pipeline.jobs.engine.rows import (
    TOLD_SCHEMA,
    StateSum,
    Sum,
    as_told,
    doomed,
    note_alive,
    told_by,
)
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.pieces import remainders
from tidelog.pipeline.source.entry_batches import LogPart
from tidelog.pipeline.source.log_changes import LastOfEach, change_columns
from tidelog.pipeline.spark_flow import spark_flow
from tidelog.pipeline.tasks import as_batches, tuples_in

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


BASE: Final = 0
LOG: Final = 1
ACTUAL: Final = 2
CHECKED: Final = 7
START: Final = 8
DAMAGE: Final = 9

ROW_SCHEMA: Final = "source int, key binary, lsn bigint, step int, cell binary, part int"


class Unreadable(msgspec.Struct, frozen=True):
    """Something that could not be read: where, why, and as which source."""

    place: str
    reason: str
    source: int = BASE


class PartRows(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one file of a version index, or of a snapshot."""

    place: EngineLocation
    part: RowPart
    source: int = BASE


RowItem = LogPart | PartRows


def batches_of(item: RowItem) -> Iterator[pa.RecordBatch]:
    """The rows of one item; what cannot be read is the last of them."""
    try:
        if isinstance(item, LogPart):
            yield from _log_batches(item)
        else:
            for rows in file_rows(SSTable(item.place.opened().objects, item.part, kind="versions")):
                yield _file_batch(rows, item.source)
    except (DataError, GapError, NotFoundError) as error:
        source = LOG if isinstance(item, LogPart) else item.source
        unreadable = Unreadable(_place_of(item, error), error.reason, source)
        yield from as_batches([(DAMAGE, b"", 0, 0, msgspec.msgpack.encode(unreadable), 0)], ROW_SCHEMA)


def _file_batch(rows: FileRows, source: int) -> pa.RecordBatch:
    import pyarrow as pa

    def same(number: int, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(number, kind), len(rows.keys))

    arrays = [same(source, pa.int32()), rows.keys, same(0, pa.int64()), same(0, pa.int32()), rows.values, rows.parts]
    return pa.RecordBatch.from_arrays(arrays, names=[field.split()[0] for field in ROW_SCHEMA.split(", ")])


def _place_of(item: RowItem, error: TidelogError) -> str:
    named = f"LSN {item.start_lsn} to {item.stop_lsn - 1}" if isinstance(item, LogPart) else item.part.key
    path, byte = error.path, error.byte
    return f"{path or named}" if byte is None else f"{path or named}, byte {byte}"


def _log_batches(part: LogPart) -> Iterator[pa.RecordBatch]:
    """What the records of a part that count did to keys of the tree; and its objects, where they are to be verified."""
    if not isinstance(part, CheckedPart):
        yield from _changes(part, part.log())
        return
    checking = Checking(part)
    yield from _changes(part, checking.log(part))
    found = sorted(checking.found, key=lambda one: one.object_id)  # threads fetch
    checked = ((CHECKED, b"", 0, 0, msgspec.msgpack.encode(one), 0) for one in found)
    yield from as_batches(checked, ROW_SCHEMA)


def _changes(part: LogPart, log: ShippedLog) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    names = [field.split()[0] for field in ROW_SCHEMA.split(", ")]
    for starts, columns in change_columns(part, log):
        yield from as_batches([(START, b"", seq, 0, None, 0) for seq in starts], ROW_SCHEMA)
        source = pa.repeat(pa.scalar(LOG, pa.int32()), len(columns.key))
        arrays = [source, columns.key, columns.lsn, columns.number, columns.cell, columns.part]
        yield pa.RecordBatch.from_arrays(arrays, names=names)


# Merges sorted rows of several sources: computes the digest of the state, and finds where two states differ.
#
#     rows of `digest_rows`, with the number of a part, in order of (part, key, source, lsn, step)  ->  `PartResult`
#
# All rows of a name are in one part; rows of buckets are in every part, and counted in part 0 alone. They come before
# those of objects, so the buckets are known when an object is processed.
#
# Invariants
# - The contents of a state are decided as the engine decides them: the newest version that is not after the seq, unless
#   it is a deletion or from before the creation of its bucket (`engine/mvcc/versions.py`).
# - The expected row is what BASE and LOG leave of a key, the last change first; it is compared with ACTUAL byte by
#   byte.
# - A row that only one side has is not a difference if retention may remove it: its horizon is the latest known start
#   of history, and `engine/mvcc/vacuum_rules.py` says what is removed. A state may be written, and a node may be lost,
#   while retention is running.
# - The versions of one name are in memory, and all versions of buckets.


_NAMED = 5

Row = tuple[bytes, bytes]


class Difference(msgspec.Struct, frozen=True, order=True):
    """A key of the tree, and what is wrong there: "missing", "extra" or "different"."""

    key: bytes
    kind: str


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a task found. `differences` are the first ones, `counts` has all of them by kind."""

    expected: Sum = Sum()
    actual: Sum = Sum()
    counts: dict[str, int] = {}
    differences: tuple[Difference, ...] = ()
    damage: tuple[Unreadable, ...] = ()
    checked: tuple[LogObject, ...] = ()


class Merge:
    """The function of a task. `compares` is False where there is no ACTUAL."""

    def __init__(self, seq: int, horizon_seq: int, *, compares: bool) -> None:
        self._seq = seq
        self._horizon_seq = horizon_seq
        self._compares = compares

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = summed_parts(batches, self._merge_of)
        if self._compares:
            found = (self._compared(number, rows) for number, rows in whole_groups(batches, "part"))
        return as_told(found)

    def _compared(self, number: int, rows: pa.Table) -> PartResult:
        """A part, by columns where both sides are the same; otherwise row by row, to say what differs."""
        by_columns = _same_on_both_sides(self._merge_of(number), rows)
        if by_columns is not None:
            return by_columns
        return self._merge_of(number).result(InRow(*row) for row in tuples_in(rows.to_batches(), *InRow._fields))

    def _merge_of(self, part: int) -> PartMerge:
        return PartMerge(self._seq, self._horizon_seq, part == 0, self._compares)


def summed_parts(batches: Iterator[pa.RecordBatch], merge_of: Callable[[int], PartMerge]) -> Iterator[PartResult]:
    """The digests of parts of which nothing is compared: by columns, with an object only for what is to be seen."""
    number, sums = -1, None
    for batch in batches:
        for part, rows in _by_part(batch):
            if sums is None or part != number:
                if sums is not None:
                    yield sums.result()
                number, sums = part, _ColumnSums(merge_of(part))
            sums.take(rows)
    if sums is not None:
        yield sums.result()


def _same_on_both_sides(merge: PartMerge, rows: pa.Table) -> PartResult | None:
    """The result of a part whose objects are the same on both sides; None where they are not, or cannot be read."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_object = pc.equal(pc.binary_slice(rows.column("key"), 0, 1), pa.scalar(OBJECTS, pa.binary()))
    objects = rows.filter(is_object)
    is_actual = pc.equal(objects.column("source"), ACTUAL)
    last = LastOfEach()
    expected = pa.concat_tables([last.take(objects.filter(pc.invert(is_actual)).select(["key", "cell"])), last.rest()])
    expected = expected.filter(pc.is_valid(expected.column("cell"))).combine_chunks()
    actual = objects.filter(is_actual).select(["key", "cell"]).combine_chunks()
    if not expected.equals(actual):
        return None
    merge.take(InRow(*row) for row in tuples_in(rows.filter(pc.invert(is_object)).to_batches(), *InRow._fields))
    try:
        merge.add_same(one_array(actual.column("key")), one_array(actual.column("cell")))
    except DataError:
        return None
    return merge.result(())


def _by_part(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a batch, which are in the order of their parts."""
    import pyarrow.compute as pc

    if not batch.num_rows:
        return
    runs, first = pc.run_end_encode(batch.column("part")), 0
    for part, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        yield part, batch.slice(first, end - first)
        first = end


class _ColumnSums:
    """One part: the last change of each key, and of those the newest version of each name that is not after the seq."""

    def __init__(self, merge: PartMerge) -> None:
        self._merge = merge
        self._others: list[pa.RecordBatch] = []
        """Rows of buckets, and notes: few, and before all objects. They are taken together."""
        self._last = LastOfEach()

    def take(self, rows: pa.RecordBatch) -> None:
        """The next rows, in order of key, LSN and step."""
        import pyarrow as pa
        import pyarrow.compute as pc

        is_object = pc.equal(pc.binary_slice(rows.column("key"), 0, 1), pa.scalar(OBJECTS, pa.binary()))
        self._others.append(rows.filter(pc.invert(is_object)))
        objects = pa.Table.from_batches([rows.filter(is_object).select(["key", "cell"])])
        if objects.num_rows:
            self._take_others()
            self._add(self._last.take(objects))

    def result(self) -> PartResult:
        self._add(self._last.rest())
        self._take_others()
        return self._merge.result(())

    def _take_others(self) -> None:
        self._merge.take(InRow(*row) for row in tuples_in(self._others, *InRow._fields))
        self._others = []

    def _add(self, settled: pa.Table) -> None:
        import pyarrow.compute as pc

        there = settled.filter(pc.is_valid(settled.column("cell")))
        self._merge.add_objects(one_array(there.column("key")), one_array(there.column("cell")))


class InRow(NamedTuple):
    """A row as it comes out of the shuffle."""

    source: int
    key: bytes
    lsn: int
    cell: bytes | None


class Part(NamedTuple):
    """All rows of a part, in order."""

    number: int
    rows: Iterable[InRow]


def parts_in(batches: Iterator[pa.RecordBatch]) -> Iterator[Part]:
    """The rows of a partition, part after part. Each is taken to its end before the next one is asked for."""
    for number, rows in groupby(_rows(batches), key=lambda row: row[0]):
        yield Part(number, (row[1] for row in rows))


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, InRow]]:
    for part, *row in tuples_in(batches, "part", *InRow._fields):
        yield part, InRow(*row)


class PartMerge:
    """One part: keys one after the other, names one after the other."""

    def __init__(self, seq: int, horizon_seq: int, counts_buckets: bool, compares: bool) -> None:
        self._horizon_seq = horizon_seq
        self._compares = compares
        self._expected = StateSum(seq, counts_buckets=counts_buckets)
        self._actual = StateSum(seq, counts_buckets=counts_buckets)
        self._counts_buckets = counts_buckets
        self._alive: dict[bytes, BucketVersion] = {}
        self._counts: dict[str, int] = {}
        self._differences: list[Difference] = []
        self._damage: list[Unreadable] = []
        self._checked: list[LogObject] = []
        self._name = b""
        self._union: list[Row] = []
        self._suspects: list[Difference] = []

    def take(self, rows: Iterable[InRow]) -> None:
        """The next rows; all of a key are in one call."""
        for key, group in groupby(rows, key=lambda row: row.key):
            if key:
                self._take_key(key, group)
            else:
                self._take_notes(group)

    def add_objects(self, keys: pa.Array, cells: pa.Array) -> None:
        """Rows of objects in the state that is expected, when nothing is compared."""
        try:
            self._expected.add_objects(keys, cells)
        except DataError:  # one after the other, to say which
            for key, cell in zip(keys.to_pylist(), cells.to_pylist(), strict=True):
                self._note(self._expected, key, cell, BASE)

    def add_same(self, keys: pa.Array, cells: pa.Array) -> None:
        """Rows of objects that both sides have."""
        self._end_name()
        for side in (self._expected, self._actual):
            side.add_objects(keys, cells)

    def result(self, rows: Iterable[InRow]) -> PartResult:
        self.take(rows)
        self._end_name()
        return PartResult(
            expected=self._expected.sum(),
            actual=self._actual.sum(),
            counts=self._counts,
            differences=tuple(self._differences),
            damage=tuple(self._damage),
            checked=tuple(self._checked),
        )

    def _take_notes(self, rows: Iterable[InRow]) -> None:
        for row in rows:
            if row.source == START:
                self._horizon_seq = max(self._horizon_seq, row.lsn)
            elif row.source == DAMAGE and row.cell is not None:
                self._damage.append(msgspec.msgpack.decode(row.cell, type=Unreadable))
            elif row.source == CHECKED and row.cell is not None:
                self._checked.append(msgspec.msgpack.decode(row.cell, type=LogObject))

    def _take_key(self, key: bytes, rows: Iterable[InRow]) -> None:
        expected: bytes | None = None
        actual: bytes | None = None
        for row in rows:
            if row.source == ACTUAL:
                actual = row.cell
            else:
                expected = row.cell
        if key[:-SEQ_BYTES] != self._name:
            self._end_name()
            self._name = key[:-SEQ_BYTES]
        self._note(self._expected, key, expected, BASE)
        if self._compares:
            self._note(self._actual, key, actual, ACTUAL)
            self._compare(key, expected, actual)

    def _note(self, side: StateSum, key: bytes, cell: bytes | None, source: int) -> None:
        if cell is None:
            return
        try:
            side.add(key, cell)
        except DataError as error:
            self._damage.append(Unreadable(f"row {key.hex()}", error.message, source))

    def _compare(self, key: bytes, expected: bytes | None, actual: bytes | None) -> None:
        known = expected or actual
        if known is not None:
            self._union.append((key, known))
        if expected != actual:
            kind = "missing" if actual is None else "extra" if expected is None else "different"
            self._suspects.append(Difference(key, kind))

    def _end_name(self) -> None:
        """All versions of a name are known: what differs is wrong unless retention may have removed it."""
        if self._name[:1] == BUCKETS:
            note_alive(self._alive, self._name[1:-1], self._union, self._horizon_seq)
        if self._suspects and (self._counts_buckets or self._name[:1] != BUCKETS):
            gone = doomed(self._union, Rule(self._horizon_seq, 1, self._alive))
            for suspect in self._suspects:
                if suspect.kind == "different" or suspect.key not in gone:
                    self._add(suspect)
        self._union, self._suspects = [], []

    def _add(self, difference: Difference) -> None:
        self._counts[difference.kind] = self._counts.get(difference.kind, 0) + 1
        if len(self._differences) < _NAMED:
            self._differences.append(difference)


# Computes a state of an engine in Spark, from a source and the log after it, and compares it with another one.
#
#     items -> rows -> parts by name -> in each part in order of key -> sums and differences -> added up by the driver
#
# Invariants
# - Data moves between workers only; the driver gets one small result per part.
# - The number of parts depends on the amount of data and does not affect the result.


_PART_BYTES = 32 << 20
_MAX_PARTS = 1024


class Placed:
    """Rows with the number of their part: what everybody needs (buckets, where history begins) goes to each of them."""

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.compute as pc

        for batch in batches:
            key, source = batch.column("key"), batch.column("source")
            is_for_all = pc.or_(pc.equal(source, START), pc.starts_with(key, pattern=BUCKETS))
            if not pc.any(is_for_all).as_py():
                yield _with_part(batch, remainders(batch.column("part"), self._parts))
                continue
            one, all_of_them = batch.filter(pc.invert(is_for_all)), batch.filter(is_for_all)
            yield _with_part(one, remainders(one.column("part"), self._parts))
            for part in range(self._parts if all_of_them.num_rows else 0):
                yield _with_part(all_of_them, pa.repeat(pa.scalar(part, pa.int32()), all_of_them.num_rows))


def _with_part(rows: pa.RecordBatch, parts: pa.Array) -> pa.RecordBatch:
    return rows.set_column(rows.schema.get_field_index("part"), "part", parts)


class ComputedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state as it was computed, and how it compares. `differences` are the first ones in order of key, `checked` the
    objects of the log that were verified on the way."""

    seq: int
    digest: str
    things: int
    rows: int
    actual_digest: str
    actual_things: int
    actual_rows: int
    counts: dict[str, int]
    differences: tuple[Difference, ...]
    damage: tuple[Unreadable, ...]
    checked: tuple[LogObject, ...] = ()


def compute_state(
    spark: SparkSession,
    items: Sequence[RowItem],
    size: int,
    *,
    seq: int,
    horizon_seq: int,
    compares: bool = False,
) -> ComputedState:
    """The state at a seq from these items, of about so many bytes; with `compares`, beside the ACTUAL ones of them."""
    merged = sorted_rows(spark_flow(spark), items, size).mapped(Merge(seq, horizon_seq, compares=compares), TOLD_SCHEMA)
    return _added_up(told_by(merged, PartResult), seq)


def sorted_rows(flow: Flow, items: Sequence[RowItem], size: int) -> Rows:
    """The rows of items of about so many bytes, as `Merge` takes them: all of a name in one part, in order of key."""
    parts = min(_MAX_PARTS, max(1, -(-size // _PART_BYTES)))
    placed = flow.source(batches_of, items, ROW_SCHEMA).mapped(Placed(parts), ROW_SCHEMA)
    return placed.grouped("part", parts, ["part", "key", "source", "lsn", "step"])


def _added_up(results: Sequence[PartResult], seq: int) -> ComputedState:
    expected, actual, rows, actual_rows = Digest(), Digest(), 0, 0
    counts: dict[str, int] = {}
    differences: list[Difference] = []
    damage: set[tuple[str, str, int]] = set()
    for one in results:
        expected.add(one.expected.digest())
        actual.add(one.actual.digest())
        rows, actual_rows = rows + one.expected.rows, actual_rows + one.actual.rows
        for kind, count in one.counts.items():
            counts[kind] = counts.get(kind, 0) + count
        differences += one.differences
        damage.update((found.place, found.reason, found.source) for found in one.damage)
    return ComputedState(
        seq=seq,
        digest=expected.text(),
        things=expected.count,
        rows=rows,
        actual_digest=actual.text(),
        actual_things=actual.count,
        actual_rows=actual_rows,
        counts=counts,
        differences=tuple(sorted(differences)[:_NAMED]),
        damage=tuple(Unreadable(*one) for one in sorted(damage)),
        checked=tuple(found for one in results for found in one.checked),
    )
