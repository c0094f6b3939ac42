"""The rows of an engine at a seq, as jobs read them: a base, and the changes of the log after it.

The base is the newest readable snapshot or compaction, so that only the tail of the log is read. Rolled back ranges of
older records may be forgotten, so the log is read from its beginning only if there is no base.

Invariants
- A base has all rows up to a seq, and the LSN from which the log continues.
- Tasks share the files of a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from tidelog.cold.catalog import Catalog
from tidelog.engine.cold.manifest import StoredCheckpoint
from tidelog.engine.mvcc.cells import BUCKETS, OBJECTS, SEQ_BYTES, Cell, decode_bucket, decode_cell, is_pointer, seq_of
from tidelog.engine.mvcc.digest import Digest
from tidelog.engine.mvcc.vacuum_rules import Rule, judged
from tidelog.engine.mvcc.versions import Buckets, BucketVersion, CreatedColumns
from tidelog.engine.sst.block import Row
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.sorted_index import Compaction, SortedIndex
from tidelog.engine.sst.sstable import TARGET_BLOCK_BYTES, RowKind, RowPart, SSTable, encode_packed
from tidelog.engine.wal.replay import ShippedLog, first_counting
from tidelog.errors import CorruptionError, DataError
from tidelog.pipeline.jobs.engine.columns import (
    file_numbers,
    file_rows,
    going_rows,
    numbers,
    one_array,
    survey_rows,
    version_values,
    whole_groups,
    whole_names,
)
from tidelog.pipeline.jobs.job import Reconciliation, Totals, told_in_our_words
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entry_batches import LogPart
from tidelog.pipeline.source.log_changes import CHANGE_SCHEMA, LastOfEach, change_batches, packed_rows
from tidelog.pipeline.tasks import as_batches, tuples_in
from tidelog.store.keys import CompactedId, EngineKeys, StatePartId
from tidelog.store.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from tidelog.pipeline.flow import Flow, Rows


def position_of_lsn(catalog: Catalog, place: EngineLocation, lsn: int) -> int | None:
    """How many bytes of the log are before a record; None for one that is in no object."""
    descriptor = catalog.at(lsn)
    if descriptor is None:
        return None
    opened, position = place.opened(), descriptor.start_position
    for batch in ShippedLog(catalog, opened.objects, opened.fetchers).read(descriptor.start_offset, lsn):
        assert batch.frames is not None
        position += batch.frames.start_of(batch.stop) - batch.frames.start_of(batch.start)
    return position


# Rows of an engine at a seq: those of a snapshot or a compaction, and the changes of the log after it.
#
#     base rows + changes of the log -> grouped by name, in order of key and LSN -> the last of each key -> retention
#
# Invariants
# - The result depends on the engine alone, not on the base snapshot or the number of tasks.
# - All versions of a name are in one task, newest first, after `settled`: retention and the digest evaluate them
#   together.
# - Cells are passed through unchanged. Everything read is checked, block by block.


ROW_SCHEMA = "key binary, cell binary"
TOLD_SCHEMA = "told binary"
Told = TypeVar("Told", bound=msgspec.Struct)


class PartWork(msgspec.Struct, frozen=True, kw_only=True):
    """A row file of the version index, or of a state."""

    place: EngineLocation
    part: RowPart


def part_batches(work: PartWork) -> Iterator[pa.RecordBatch]:
    """The rows of such a file as changes that came before every record of the log."""
    import pyarrow as pa

    names = [field.split()[0] for field in CHANGE_SCHEMA.split(", ")]
    for rows in file_rows(SSTable(work.place.opened().objects, work.part, kind="versions")):
        count = len(rows.keys)
        lsns, steps = pa.repeat(pa.scalar(0, pa.int64()), count), pa.repeat(pa.scalar(0, pa.int32()), count)
        yield pa.RecordBatch.from_arrays([rows.keys, lsns, steps, rows.values, rows.parts], names=names)


def settled_rows(flow: Flow, base: Rows | None, log: list[LogPart], tasks: int) -> Rows:
    """The rows after the log is applied, each key once; cached, since all other steps read them."""
    changes = flow.source(change_batches, log, CHANGE_SCHEMA) if log or base is None else None
    if base is not None:
        changes = base if changes is None else changes.joined_by(base)
    assert changes is not None
    grouped = changes.grouped("part", tasks, ["key", "lsn", "number"])
    return grouped.mapped(settled, ROW_SCHEMA).kept()


def settled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The last change of each key; batches are in order of key, LSN and number."""
    import pyarrow as pa

    last = LastOfEach()
    for batch in batches:
        yield from _there(last.take(pa.Table.from_batches([batch.select(["key", "cell"])])))
    yield from _there(last.rest())


def _there(rows: pa.Table) -> list[pa.RecordBatch]:
    import pyarrow.compute as pc

    batches: list[pa.RecordBatch] = rows.filter(pc.is_valid(rows.column("cell"))).to_batches()
    return batches


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bytes, bytes]]:
    """Key and cell of each row."""
    return tuples_in(batches, "key", "cell")


# Results that tasks return to the driver.


def as_told(things: Iterable[msgspec.Struct]) -> Iterator[pa.RecordBatch]:
    """Things for the driver as batches of `TOLD_SCHEMA`."""
    return as_batches(((msgspec.msgpack.encode(one),) for one in things), TOLD_SCHEMA)


def told_by(rows: Rows, kind: type[Told]) -> list[Told]:
    """What the tasks told."""
    return [msgspec.msgpack.decode(data, type=kind) for data in rows.collected().column("told").to_pylist()]


def told_in(rows: DataFrame, kind: type[Told], what: str) -> list[Told]:
    """The same of a frame of `TOLD_SCHEMA`."""
    with told_in_our_words(what):
        return [msgspec.msgpack.decode(bytes(row.told), type=kind) for row in rows.collect()]


class FirstLsn(msgspec.Struct, frozen=True):
    """Where the first entry of a part begins."""

    lsn: int


def first_lsn(part: LogPart) -> Iterator[pa.RecordBatch]:
    """The same, for the driver; nothing when none of them counts."""
    lsn = first_counting(part.log(), part)
    return as_told([] if lsn is None else [FirstLsn(lsn)])


# Buckets: few, and needed for what is to be seen of objects

Created = Mapping[bytes, BucketVersion]
"""The buckets that are there at a seq, by their names as bytes."""


class BucketRow(msgspec.Struct, frozen=True):
    """A row of a bucket."""

    key: bytes
    cell: bytes


def bucket_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of buckets, for the driver."""
    import pyarrow.compute as pc

    some = (batch.filter(pc.starts_with(batch.column("key"), pattern=BUCKETS)) for batch in batches)
    return as_told(BucketRow(key, cell) for key, cell in rows_of(some))


def buckets_in(rows: Rows) -> Buckets:
    """All buckets that rows tell of."""
    found = sorted((row.key, row.cell) for row in told_by(rows.mapped(bucket_rows, TOLD_SCHEMA), BucketRow))
    buckets = Buckets()
    buckets.load(_Listed(found))
    return buckets


def created_at(buckets: Buckets, seq: int) -> Created:
    """The buckets that are there at a seq."""
    return {name.encode(): version for name, version in buckets.alive(seq)}


class _Listed:
    """Rows that are asked for as those of a tree are."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def scan(self, start: bytes, stop: bytes) -> Iterator[Row]:
        return iter(self._rows)


# Retention


class CompactedValues:
    """Which values are in the data of a compaction; asked by tasks."""

    def __init__(self, place: EngineLocation, compaction: Compaction) -> None:
        self._place = place
        self._compaction = compaction
        self._data: SortedIndex | None = None

    def has(self, position: int) -> bool:
        """Whether the value at a position of the log is in it."""
        if self._data is None:
            opened = self._place.opened()
            self._data = SortedIndex(opened.objects, opened.keys, self._compaction)
        return self._data.find_value(position) is not None


class Retained:
    """Leaves out what a rule lets go; for tasks that have all versions of a name.

    With `below_lsn` only versions go whose value is in a record below it, and with `packed` only those of them whose
    value is not in compacted data either.
    """

    def __init__(
        self,
        horizon: int,
        keep_versions: int,
        created: Created,
        below_lsn: int | None = None,
        packed: CompactedValues | None = None,
    ) -> None:
        self._rule = horizon, keep_versions, CreatedColumns.of(created)
        self._below_lsn = below_lsn
        self._packed = packed

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.compute as pc

        for rows in whole_names(batches):
            keys, cells = one_array(rows.column("key")), one_array(rows.column("cell"))
            going = going_rows(keys, cells, *self._rule)
            if self._below_lsn is not None:
                going = self._without_value(cells, going, self._below_lsn)
            yield from rows.filter(pc.invert(going)).to_batches()

    def _without_value(self, cells: pa.Array, going: pa.Array, below_lsn: int) -> pa.Array:
        """Those of the rows that go whose value is not to be had any more; the others stay although the rule lets them
        go."""
        import pyarrow as pa
        import pyarrow.compute as pc

        gone = [
            index for index in pc.indices_nonzero(going).to_pylist() if self._is_lost(cells[index].as_py(), below_lsn)
        ]
        mask = bytearray(len(cells))
        for index in gone:
            mask[index] = 1
        return numbers(pa.uint8(), bytes(mask), len(cells)).cast(pa.bool_())

    def _is_lost(self, cell: bytes, below_lsn: int) -> bool:
        return is_pointer(cell) and not self._has_value(decode_cell(cell), below_lsn)

    def _has_value(self, cell: Cell, below_lsn: int) -> bool:
        return cell.lsn >= below_lsn or (self._packed is not None and self._packed.has(cell.position))


def doomed(versions: list[Row], rule: Rule) -> set[bytes]:
    """The keys of versions of one name that retention may remove."""
    return {key for verdict in judged(versions, rule, _nothing) for key in verdict.doomed()}


_nothing: Callable[[bytes], None] = bytes.__len__  # type: ignore[assignment]


def note_alive(alive: dict[bytes, BucketVersion], name: bytes, versions: list[Row], horizon_seq: int) -> None:
    """Records a bucket that is there at the horizon: by the newest of its rows that is not after it."""
    newest = next((row for row in versions if seq_of(row[0]) <= horizon_seq), None)
    with suppress(DataError):  # the comparison of states reports it
        if newest is not None and not (version := decode_bucket(newest[1])).is_deleted:
            alive[name] = BucketVersion(seq_of(newest[0]), version.order, False)


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """Rows up to `seq`; the log continues with `lsn`. `key` is what they are read from."""

    key: str
    seq: int
    lsn: int
    parts: tuple[RowPart, ...] = ()

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def changes(self, flow: Flow, place: EngineLocation) -> Rows | None:
        """Its rows, as changes before those of the log; None where it has none."""
        works = [PartWork(place=place, part=part) for part in self.parts]
        return flow.source(part_batches, works, CHANGE_SCHEMA) if works else None


def base_of(objects: ObjectStore, listed: StoredCheckpoint) -> Base:
    """A snapshot as a base; DataError or NotFoundError when it cannot be read."""
    return Base(key=listed.key, seq=listed.seq, lsn=listed.lsn, parts=StoredState(objects, listed).parts())


# Writes sorted index files: counts the rows, chooses where to cut them into files, and computes the digest of what is
# visible.
#
# Invariants
# - Cuts depend on the rows alone. A checksum selects a sample of the keys, always the same for the same rows, and every
#   n-th of the sample begins a file: files have about the intended number of rows, without a sort of all of them.
# - The digest is the engine's own (`engine/mvcc/digest.py`), as a sum over the tasks.

ROWS_PER_FILE = 250_000
_SAMPLES_PER_FILE = 64
_DIGEST_BYTES = 32


class Sum(msgspec.Struct, frozen=True):
    """A part of the digest of a state, and how many rows it was made of."""

    total: bytes = bytes(_DIGEST_BYTES)
    things: int = 0
    rows: int = 0

    @classmethod
    def of(cls, digest: Digest, rows: int) -> Sum:
        """What was added up."""
        return cls(digest.total.to_bytes(_DIGEST_BYTES, "little"), digest.count, rows)

    def digest(self) -> Digest:
        """The part as it is added up."""
        return Digest(int.from_bytes(self.total, "little"), self.things)


class StateSum:
    """The digest of the state at a seq, from all rows in order of key.

    The buckets that are there are found in the rows, counted or not.
    """

    def __init__(self, seq: int, *, counts_buckets: bool = False) -> None:
        self._seq = seq
        self._counts_buckets = counts_buckets
        self._digest = Digest()
        self._rows = 0
        self._created: dict[bytes, BucketVersion] = {}
        self._created_columns: CreatedColumns | None = None
        self._settled = b""

    def add(self, key: bytes, cell: bytes) -> None:
        prefix, seq = key[:-SEQ_BYTES], seq_of(key)
        is_bucket = prefix[:1] == BUCKETS
        self._rows += not is_bucket or self._counts_buckets
        if seq > self._seq or prefix == self._settled:
            return
        self._settled = prefix
        if is_bucket:
            self._add_bucket(prefix[1:-1], seq, cell)
        elif prefix[:1] == OBJECTS:
            self._add_object(prefix, seq, cell)
        else:
            raise DataError("index key belongs neither to a bucket nor to an object")

    def add_objects(self, keys: pa.Array, cells: pa.Array) -> None:
        """The next rows, all of objects. DataError when one of them is not sound: then nothing was added."""
        if self._created_columns is None:
            self._created_columns = CreatedColumns.of(self._created)
        found = survey_rows(keys, cells, self._seq, self._created_columns, settled=self._settled)
        self._digest.add(Digest(found.total, found.things))
        self._rows += len(keys)
        self._settled = found.settled

    def _add_bucket(self, name: bytes, seq: int, cell: bytes) -> None:
        version, self._created_columns = decode_bucket(cell), None
        if not version.is_deleted:
            self._created[name] = BucketVersion(seq, version.order, False)
            if self._counts_buckets:
                self._digest.add_bucket(name, seq)

    def _add_object(self, prefix: bytes, seq: int, cell: bytes) -> None:
        bucket, _, name = prefix[1:-1].partition(b"\0")
        created, version = self._created.get(bucket), decode_cell(cell)
        if created is None or version.is_tombstone or (seq, version.order) < (created.seq, created.order):
            return
        self._digest.add_object(bucket, name, seq, version.size, version.crc)

    def sum(self) -> Sum:
        return Sum.of(self._digest, self._rows)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one task saw: rows, the digest of its part of the visible objects, and a sample of the keys."""

    rows: int
    sum: Sum
    samples: tuple[bytes, ...] = ()


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What all of them saw: rows, and the objects and buckets that are to be seen.

    `cuts` are the first keys of all files but the first.
    """

    rows: int
    things: int
    digest: str
    cuts: tuple[bytes, ...] = ()


class Surveyor:
    """Looks at the rows of a task, which has all versions of a name."""

    def __init__(self, created: Created, seq: int, every: int) -> None:
        self._created = CreatedColumns.of(created)
        self._seq = seq
        self._every = every

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told([self.seen((batch.column("key"), batch.column("cell")) for batch in batches)])

    def seen(self, rows: Iterable[tuple[pa.Array, pa.Array]], settled: bytes = b"") -> Seen:
        """What these rows are: keys and cells, in order of key."""
        digest, count, samples = Digest(), 0, list[bytes]()
        for keys, cells in rows:
            found = survey_rows(keys, cells, self._seq, self._created, every=self._every, settled=settled)
            digest.add(Digest(found.total, found.things))
            count += len(keys)
            samples += found.samples
            settled = found.settled
        return Seen(rows=count, sum=Sum.of(digest, count), samples=tuple(samples))


def survey(rows: Rows, created: Created, seq: int, rows_per_file: int = ROWS_PER_FILE) -> Survey:
    """Everything about rows at once."""
    every = max(1, rows_per_file // _SAMPLES_PER_FILE)
    seen = told_by(rows.mapped(Surveyor(created, seq, every), TOLD_SCHEMA), Seen)
    samples = sorted(key for one in seen for key in one.samples)
    step = max(1, rows_per_file // every)
    return summed(seen, created, cuts=tuple(samples[step::step]))


def look(rows: Rows, created: Created, seq: int) -> Survey:
    """The same without cuts: for rows that are not going to be written as they are."""
    return summed(told_by(rows.mapped(Surveyor(created, seq, every=0), TOLD_SCHEMA), Seen), created)


def summed(seen: Iterable[Seen], created: Created, cuts: tuple[bytes, ...] = ()) -> Survey:
    """What tasks saw, all of them together."""
    digest, rows = Digest(), 0
    for one in seen:
        digest.add(one.sum.digest())
        rows += one.rows
    for bucket, version in created.items():
        digest.add_bucket(bucket, version.seq)
    return Survey(rows=rows, things=digest.count, digest=digest.text(), cuts=cuts)


def state_proof(engine: str, seq: int, went_in: Survey, came_out: Survey) -> Reconciliation:
    """What was to be seen in the rows that were read, and in those that were written."""
    sides = [digest_totals(one.things, one.digest) for one in (went_in, came_out)]
    return Reconciliation(subject=f"engine {engine} at seq {seq}", went_in=sides[0], came_out=sides[1])


def digest_totals(things: int, digest: str, unit: str = "things") -> Totals:
    """A state by its digest, as a side of a reconciliation."""
    return Totals(messages=things, checksum=f"digest:{digest}", unit=unit)


# Row files, written and read back by workers: those of the version index, the value index, and snapshots.
#
# Invariants
# - A file is named by its bytes, and the same rows give the same bytes: written twice, it is the same file.
# - A file is read back and compared before it is reported.


FILED_SCHEMA = "file int, key binary, value binary"
_RANGE_BYTES = 8 << 20


def as_filed(keys: pa.Array, values: pa.Array, cuts: Sequence[bytes], first_file: int = 0) -> pa.RecordBatch:
    """Rows of row files with the number of the file that each belongs to, as a batch of `FILED_SCHEMA`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    files = pc.add(file_numbers(keys, cuts), pa.scalar(first_file, pa.int32()))
    return pa.RecordBatch.from_arrays([files, keys, values], names=["file", "key", "value"])


def unplaced(cuts: Sequence[bytes], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of a tree as those of row files, without places: what a state consists of."""
    for batch in batches:
        yield as_filed(batch.column("key"), version_values(batch.column("cell")), cuts)


class FileNames(msgspec.Struct, frozen=True, kw_only=True):
    """How files are called: those of a generation of a compaction, or those of a state."""

    kind: Literal["versions", "values", "state"]
    generation: int = 0
    seq: int = 0
    lsn: int = 0

    @property
    def row_kind(self) -> RowKind:
        return "values" if self.kind == "values" else "versions"

    def key(self, keys: EngineKeys, digest: str) -> str:
        if self.kind == "state":
            return keys.state_part(StatePartId(self.seq, self.lsn, digest))
        return keys.compacted(CompactedId(self.kind, self.generation, digest))


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was written, by its number; or, without one, what another step has to tell the driver."""

    file: int
    part: RowPart | None = None
    told: bytes = b""


class FileWriter:
    """Writes the rows of a task, which has them file by file in order of key.

    `names` says how the files are called: so many of them this way, then so many that way. Rows of a number behind them
    all are not for files: their values go to the driver.
    """

    def __init__(self, place: EngineLocation, names: Sequence[tuple[int, FileNames]]) -> None:
        self._place = place
        self._names = [one for count, one in names for _ in range(count)]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told(self._written(batches))

    def _written(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Written]:
        for number, rows in whole_groups(batches, "file"):
            if number < len(self._names):
                yield Written(file=number, part=self.written(rows, self._names[number]))
            else:
                yield from (Written(file=number, told=told) for told in rows.column("value").to_pylist())

    def written(self, rows: pa.Table, names: FileNames) -> RowPart:
        opened = self._place.opened()
        blocks = packed_rows(one_array(rows.column("key")), one_array(rows.column("value")), TARGET_BLOCK_BYTES)
        encoded = encode_packed(names.row_kind, blocks)
        key = names.key(opened.keys, encoded.digest)
        write_checked(opened.objects, key, encoded.data)
        return encoded.part(key)


def write_checked(objects: ObjectStore, key: str, data: bytes) -> None:
    """Writes a file, reads it back, and compares, byte by byte."""
    with objects.open_writer(key) as writer:
        for start in range(0, len(data), _RANGE_BYTES):
            writer.write(memoryview(data)[start : start + _RANGE_BYTES])
    for start in range(0, len(data) + 1, _RANGE_BYTES):
        found = objects.read_range(key, start, _RANGE_BYTES)
        if len(found) != min(_RANGE_BYTES, len(data) - start) or not data.startswith(found, start):
            raise CorruptionError(
                "what was written is not what is there",
                path=key,
                byte=start,
                operation="write",
                hint="Run the job again",
            )


def write_files(filed: Rows, place: EngineLocation, *names: tuple[int, FileNames]) -> list[Written]:
    """All files, a task for each, and what else there is for the driver; in order of their numbers."""
    tasks = sum(count for count, _ in names) + 1
    grouped = filed.grouped("file", tasks, ["file", "key"])
    written = told_by(grouped.mapped(FileWriter(place, names), TOLD_SCHEMA), Written)
    return sorted(written, key=lambda one: one.file)


def parts_of(written: Iterable[Written], first_file: int = 0, stop_file: int | None = None) -> list[RowPart]:
    """The files with these numbers, in order of key."""
    return [
        one.part
        for one in written
        if one.part is not None and one.file >= first_file and (stop_file is None or one.file < stop_file)
    ]


# Reading them back, for the proof.


class ReadBackWork(msgspec.Struct, frozen=True, kw_only=True):
    """A file of versions, and the last key of the one before it."""

    place: EngineLocation
    part: RowPart
    before: bytes


class _ReadBack:
    def __init__(self, created: Created, seq: int) -> None:
        self._surveyor = Surveyor(created, seq, every=0)

    def __call__(self, work: ReadBackWork) -> Iterator[pa.RecordBatch]:
        rows = file_rows(SSTable(work.place.opened().objects, work.part, kind="versions"))
        settled = work.before[:-SEQ_BYTES]
        return as_told([self._surveyor.seen(((one.keys, one.values) for one in rows), settled)])


def read_back(flow: Flow, place: EngineLocation, parts: Sequence[RowPart], created: Created, seq: int) -> Survey:
    """The same survey as of the rows that were to be written, from what was."""
    befores = [b"", *(part.last_key for part in parts)]
    works = [ReadBackWork(place=place, part=part, before=before) for part, before in zip(parts, befores, strict=False)]
    seen = told_by(flow.source(_ReadBack(created, seq), works, TOLD_SCHEMA), Seen) if works else []
    return summed(seen, created)


def require_equal(went_in: Survey, came_out: Survey, seq: int) -> None:
    """CorruptionError when what was written is not what was read: then nothing is published."""
    if (went_in.rows, went_in.things, went_in.digest) != (came_out.rows, came_out.things, came_out.digest):
        raise CorruptionError(
            f"the rows that were written for seq {seq} are not those that were read: {came_out.rows} rows with the "
            f"digest {came_out.digest}, and there were {went_in.rows} with {went_in.digest}",
            path="index",
            byte=0,
            hint="Nothing was published; run it again",
        )
