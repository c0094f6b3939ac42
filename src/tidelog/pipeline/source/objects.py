"""`format("tidelog_objects")`: all objects of an engine as of a seq, or all of their versions, straight from its store.

    spark.read.format("tidelog_objects").option("root", "s3://bucket/prefix").option("seq", 1200).load()

Invariants
- What is to be seen is decided by the engine's own rule; rows are those that `list_objects` and `read` of the engine
  give at that seq.
- A DataFrame is a snapshot: it is planned on the manifest of its first action.
- The driver plans, tasks read rows and values straight from the store; the engine is not asked.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from tidelog.clock import SystemClock
from tidelog.config import EngineConfig
from tidelog.engine.cold.manifest import Manifest, Pinning
from tidelog.engine.mvcc.cells import OBJECTS, SEQ_BYTES, objects_of, prefix_end
from tidelog.engine.mvcc.retention import forgotten
from tidelog.engine.mvcc.versions import Buckets
from tidelog.engine.sst.block import Row, rows_in
from tidelog.engine.sst.snapshot import named_states
from tidelog.engine.sst.sstable import RowPart, SSTable
from tidelog.errors import DataError, InputError, NotFoundError, NotSupportedError, RetryError
from tidelog.pipeline.address import OpenedEngine
from tidelog.pipeline.source.declared import declared, found_declaration, is_table, options_for, options_in
from tidelog.pipeline.source.engine_options import (
    OBJECT_COLUMNS,
    ObjectOptions,
    no_writer,
    parse_object_options,
    schema_of,
)
from tidelog.pipeline.source.entries import refuse_large_seqs
from tidelog.pipeline.source.entry_batches import PART_BYTES, LogPart, plan_log
from tidelog.pipeline.source.explained import PlannedRead, tell_planned
from tidelog.pipeline.source.log_changes import LastChanges, RangedChanges, change_columns, rows_before
from tidelog.pipeline.source.object_batches import VALUE_COLUMNS, ObjectPart, RowBlocks, merged_rows, packed_tail
from tidelog.pipeline.source.options import checked_schema
from tidelog.pipeline.source.told import refused_stream, told_in_one_line, told_rows
from tidelog.pipeline.tasks import reading_ahead
from tidelog.store.scheduler import in_parallel

# The driver's view of an engine's objects: the base snapshot, the changes of the log after it, and the parts.
#
#     newest usable snapshot or compaction -> rows of buckets -> the log after it, once -> ranges of keys for tasks
#
# Invariants
# - Nothing after the manifest's last entry is read, and nothing before the start of history is returned: what was
#   removed there cannot be distinguished from what never existed.
# - The driver reads the log after the snapshot once, several parts of it at the same time, as columns, and its changes
#   travel with the parts. They are settled by ranges of keys, several at the same time. Their size is limited
#   (`maxTailBytes`), with an error that says how to make it smaller.
# - If the footer of a snapshot is damaged, the one before it is used. Damage in its rows is reported by the task that
#   finds it.


_logger = logging.getLogger("tidelog.pipeline")
_ROWS_PER_TASK = 200_000
_ROWS_WITH_VALUES_PER_TASK = 20_000
_TAIL_ROWS_PER_PIECE = 1000
_TAIL_PART_BYTES = PART_BYTES
_TAIL_THREADS = 4
_TAIL_PARTS_AT_ONCE = 8


class Base(NamedTuple):
    """What the rows begin with: a state, or nothing (all from the log). `key` is that of a listed state."""

    lsn: int
    history_start_seq: int
    key: str | None = None
    files: tuple[RowPart, ...] = ()


class _Piece(NamedTuple):
    """Rows that begin with a key: about how many."""

    first_key: bytes
    rows: int


class Tail(NamedTuple):
    """What the log changed: tables in order of key, one behind the other. Each row is there once, one that was removed
    without a cell.
    """

    tables: tuple[pa.Table, ...]

    @classmethod
    def of(cls, tables: Iterable[pa.Table]) -> Tail:
        """Tables of `RangedChanges`."""
        return cls(tuple(one.select(["key", "cell"]).combine_chunks() for one in tables if one.num_rows))

    @property
    def rows(self) -> int:
        return sum(table.num_rows for table in self.tables)

    def between(self, start: bytes, stop: bytes) -> Tail:
        """The rows of a range of keys."""
        found = list[pa.Table]()
        for table in self.tables:
            keys = table.column("key").combine_chunks()
            first, end = rows_before(keys, start), rows_before(keys, stop)
            found.append(table.slice(first, end - first))
        return Tail(tuple(one for one in found if one.num_rows))

    def packed(self) -> bytes:
        """The rows as a task gets them."""
        columns = ((table.column("key"), table.column("cell")) for table in self.tables)
        return b"".join(packed_tail(keys.combine_chunks(), cells.combine_chunks()) for keys, cells in columns)


class PartChanges(NamedTuple):
    """What a part of the log changed, and where history begins as far as it says so."""

    changes: LastChanges
    history_start_seq: int


def changes_in(part: LogPart, fetchers: Executor) -> PartChanges:
    """The changes of a part, the last of each row alone."""
    changes, history_start_seq = LastChanges(), 0
    for starts, columns in change_columns(part, part.log(fetchers=fetchers)):
        changes.add(columns)
        history_start_seq = max(history_start_seq, *starts, 0)
    changes.settle()
    return PartChanges(changes, history_start_seq)


class ObjectPlan:
    """One read of objects, planned on the manifest that is published now."""

    def __init__(self, options: ObjectOptions, engine: OpenedEngine, oldest_seq: int | None = None) -> None:
        """`oldest_seq`: the oldest state that versions are to tell of, if not that of the seq."""
        self._options = options
        self._engine = engine
        self._oldest_seq = oldest_seq
        self._manifest = engine.manifest
        refuse_large_seqs(self._manifest)
        self._seq = self._checked_seq()
        self._known_files: dict[str, RowBlocks] = {}
        self._base = find_base(engine, self._manifest)
        self._pin()
        self._tail = self._read_tail()
        self.buckets = self._read_buckets()

    def parts(self) -> list[ObjectPart]:
        """The keys that are asked for, divided among tasks."""
        start, stop = self._range()
        cuts = [start, *self._cuts(start, stop), stop]
        created = {name: (one.seq, one.order) for name, one in self.buckets.alive(self._seq)}
        return [self._part(low, high, created) for low, high in pairwise(cuts) if low < high]

    def described(self, parts: Sequence[ObjectPart]) -> PlannedRead:
        """What is read with these parts, of rows: values are read as they are needed."""
        places = {(file.key, one.byte): one.size for part in parts for file in part.files for one in file.blocks}
        size = sum(places.values()) + sum(len(part.tail) for part in parts)
        subject = self._options.root.subject
        return PlannedRead(subject=subject, unit="seq", start=self._seq, stop=self._seq + 1, bytes=size)

    def _checked_seq(self) -> int:
        seq, mark = self._options.seq, self._manifest.high_water_mark
        if seq is not None and seq > mark:
            raise InputError(
                f"the engine has shipped entries up to seq {mark}, and seq {seq} was asked for",
                operation="read objects",
                hint="Leave seq out for the newest state in the store",
            )
        return mark if seq is None else seq

    def _pin(self) -> None:
        """Pins the snapshot, and the log after it, for as long as the options say."""
        seconds, key = self._options.pin_seconds, self._base.key
        if seconds is None or key is None:
            return
        name = f"spark-{secrets.token_hex(8)}"
        if not Pinning(self._engine.metadata, self._engine.keys, SystemClock(), name, seconds).pin(key):
            raise RetryError(
                f"the state {key} was replaced by a newer one while the read was planned",
                operation="read objects",
                hint="Run the query again",
            )

    def _read_tail(self) -> Tail:
        changes = RangedChanges(_TAIL_THREADS)
        known = [self._manifest.history_start_seq, self._base.history_start_seq]
        most_bytes = self._options.max_tail_bytes
        for found in self._changed_parts():
            changes.merge(found.changes)
            known.append(found.history_start_seq)
            if changes.held_bytes > most_bytes:
                changes.settle()
            if changes.held_bytes > most_bytes:
                raise _long_tail(most_bytes)
        history_start_seq = max(known)
        if self._seq < history_start_seq:
            raise forgotten(history_start_seq)
        if self._oldest_seq is not None and self._oldest_seq < history_start_seq:
            raise _forgotten_changes(history_start_seq)
        return Tail.of(changes.settle())

    def _changed_parts(self) -> Iterator[PartChanges]:
        """What each part of the log after the base changed; several are read at the same time."""
        place = self._options.root.place
        parts = plan_log(self._engine.catalog, place, self._manifest, self._base.lsn, part_bytes=_TAIL_PART_BYTES)
        work = partial(changes_in, fetchers=reading_ahead(place.store_url))
        for at in range(0, len(parts), _TAIL_PARTS_AT_ONCE):
            yield from in_parallel(work, parts[at : at + _TAIL_PARTS_AT_ONCE], _TAIL_THREADS, "tidelog-tail")

    # Buckets: few, and all tasks need them

    def _read_buckets(self) -> Buckets:
        buckets = Buckets()
        buckets.load(self)
        bucket = self._options.bucket
        if bucket is not None and not self._options.all_versions and buckets.created(bucket, self._seq) is None:
            raise NotFoundError(f"there is no bucket {bucket!r} at seq {self._seq}", operation="read objects")
        return buckets

    def scan(self, start: bytes, stop: bytes) -> Iterator[Row]:
        """Rows of a range, as the tree would have them."""
        tail = self._tail.between(start, stop).packed()
        for raw, count in merged_rows(self._engine.objects, self._files_in(start, stop), tail):
            yield from (row for row in rows_in(raw, count, b"") if start <= row[0] < stop)

    def _files_in(self, start: bytes, stop: bytes) -> tuple[RowBlocks, ...]:
        """Blocks that may have rows of a range; the footers of row files are read when they are first needed."""
        parts = (part for part in self._base.files if part.last_key >= start and part.first_key < stop)
        found = (self._opened(part).between(start, stop) for part in parts)
        return tuple(one for one in found if one.blocks)

    def _opened(self, part: RowPart) -> RowBlocks:
        known = self._known_files.get(part.key)
        if known is None:
            footer = SSTable(self._engine.objects, part, kind="versions").footer
            known = self._known_files[part.key] = RowBlocks(part.key, footer.blocks)
        return known

    # Ranges

    def _range(self) -> tuple[bytes, bytes]:
        bucket = self._options.bucket
        return (OBJECTS, prefix_end(OBJECTS)) if bucket is None else objects_of(bucket, self._options.prefix)

    def _cuts(self, start: bytes, stop: bytes) -> list[bytes]:
        """Names at which one task ends and the next begins, so that all have about the same number of rows."""
        pieces = sorted(self._pieces(start, stop))
        total = sum(piece.rows for piece in pieces)
        most = _ROWS_WITH_VALUES_PER_TASK if VALUE_COLUMNS.intersection(self._options.columns) else _ROWS_PER_TASK
        tasks = max(self._options.min_partitions or 1, round(total / most))
        cuts: list[bytes] = []
        seen = 0
        for piece in pieces:
            name = piece.first_key[:-SEQ_BYTES]
            if seen * tasks >= total * (len(cuts) + 1) and start < name < stop and (not cuts or cuts[-1] < name):
                cuts.append(name)
            seen += piece.rows
        return cuts

    def _pieces(self, start: bytes, stop: bytes) -> Iterator[_Piece]:
        for file in self._files_in(start, stop):
            for place in file.blocks:
                yield _Piece(place.first_key, place.rows)
        tail = self._tail.between(start, stop)
        per_piece = min(_TAIL_ROWS_PER_PIECE, max(1, tail.rows // (4 * (self._options.min_partitions or 1))))
        for keys in (table.column("key") for table in tail.tables):
            for at in range(0, len(keys), per_piece):
                yield _Piece(keys[at].as_py(), min(per_piece, len(keys) - at))

    def _part(self, start: bytes, stop: bytes, created: dict[str, tuple[int, int]]) -> ObjectPart:
        return ObjectPart(
            place=self._options.root.place,
            seq=self._seq,
            start=start,
            stop=stop,
            all_versions=self._options.all_versions,
            created=created,
            files=self._files_in(start, stop),
            tail=self._tail.between(start, stop).packed(),
        )


def _forgotten_changes(history_start_seq: int) -> NotFoundError:
    return NotFoundError(
        f"changes up to seq {history_start_seq} are no longer kept",
        operation="read changes",
        hint=f"Begin with the state at seq {history_start_seq} (tidelog_objects), and with startingSeq "
        f"{history_start_seq + 1} behind it",
    )


def _long_tail(most_bytes: int) -> NotSupportedError:
    return NotSupportedError(
        f"the log after the newest snapshot changes more than {most_bytes} bytes of rows, which the driver must hold",
        operation="read objects",
        hint="`tidelog pipeline checkpoint --engine` writes a newer state; maxTailBytes allows for more",
    )


def find_base(engine: OpenedEngine, manifest: Manifest) -> Base:
    """The newest state or compaction that can be read; the beginning of the log where there is none."""
    for named in reversed(named_states(engine.objects, engine.keys, manifest)):
        try:
            state = named.open()
        except (DataError, NotFoundError) as error:
            _logger.warning("%s: a state in the store cannot be used: %s", engine.objects.url, error)
        else:
            key = named.key if named.is_listed else None
            return Base(named.lsn, state.footer.history_start_seq, key, state.parts())
    start_lsn = engine.catalog.start_offset()
    if start_lsn > 1:
        raise DataError(
            f"no state in the store can be read, and its log begins at LSN {start_lsn}",
            operation="read objects",
            hint="Read from a replica, or put a good copy of a state in its place",
        )
    return Base(1, 0)


FORMAT = "tidelog_objects"
_Made = TypeVar("_Made")


class ObjectPartition(InputPartition):
    """One task's range of keys."""

    def __init__(self, part: ObjectPart) -> None:
        super().__init__((part.start, part.stop))
        self.part = part


class ObjectsDataSource(DataSource):
    """The objects of an engine."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @told_in_one_line
    def schema(self) -> StructType:
        options = parse_object_options(options_in(self.options))
        if not is_table(self.options):
            with options.root.open():
                pass  # it says at `load()` that there is no such engine
        return declared(schema_of(OBJECT_COLUMNS, options.columns), self.options, options.root.location, EngineConfig)

    @told_in_one_line
    def reader(self, schema: StructType) -> DataSourceReader:
        of_table = found_declaration(schema) is not None
        options = parse_object_options(options_for(self.options, schema), is_table=of_table)
        return ObjectsReader(options, checked_schema(schema, OBJECT_COLUMNS))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        hint = "What changes is a stream of format tidelog_entries; a state is read with spark.read"
        return refused_stream(NotSupportedError("objects are a state, and there is no stream of them", hint=hint))

    @told_in_one_line
    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise no_writer(FORMAT)

    @told_in_one_line
    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise no_writer(FORMAT)


class ObjectsReader(DataSourceReader):
    """A batch read of the state at a seq."""

    def __init__(self, options: ObjectOptions, names: list[str]) -> None:
        self._options = options
        self._names = names

    @told_in_one_line
    def partitions(self) -> list[InputPartition]:
        return self._with_parts(self._options, self._tasks)

    def planned(self) -> list[PlannedRead]:
        unpinned = msgspec.structs.replace(self._options, pin_seconds=None)
        return self._with_parts(unpinned, lambda plan, parts: [plan.described(parts)])

    def _tasks(self, plan: ObjectPlan, parts: list[ObjectPart]) -> list[InputPartition]:
        tell_planned(lambda: [plan.described(parts)], len(parts))
        return [ObjectPartition(part) for part in parts]

    def _with_parts(
        self, options: ObjectOptions, make: Callable[[ObjectPlan, list[ObjectPart]], list[_Made]]
    ) -> list[_Made]:
        with ExitStack() as stack:
            try:
                engine = stack.enter_context(options.root.open(read_only=options.pin_seconds is None))
            except NotFoundError:
                if options.is_table and options.seq is None:
                    return []  # it has shipped nothing yet
                raise
            plan = ObjectPlan(options, engine)
            return make(plan, plan.parts())

    def read(self, partition: InputPartition) -> Iterator[Any]:
        from tidelog.pipeline.source.object_batches import read_object_batches
        from tidelog.pipeline.tasks import tune_worker

        if not isinstance(partition, ObjectPartition):
            return iter(())  # Spark makes one up where there are none
        tune_worker()
        return told_rows(read_object_batches(partition.part, self._names, self._options.max_rows_per_batch))
