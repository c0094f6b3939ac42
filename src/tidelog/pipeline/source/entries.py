"""`format("tidelog_entries")`: the shipped log of an engine as rows, in batches and as a stream.

    spark.read.format("tidelog_entries").option("root", "s3://bucket/prefix").load()

Invariants
- Every entry that counts appears once, with a row for each of its operations; entries that were rolled back or never
  completed do not appear. Refused entries are rows with the reason, unless `includeRefused` is false.
- `startingSeq` and `endingSeq` are both inclusive: as everywhere in the engine, a seq names the state that includes its
  entry.
- Filters are not pushed down: Spark keeps a pushed filter with the relation, and a second use of the same DataFrame
  would get filtered rows.
- The driver plans, tasks read straight from the store; entries never pass through the driver or the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import DataType, StructType

from tidelog.config import EngineConfig
from tidelog.engine.cold.manifest import Manifest
from tidelog.errors import InputError, NotFoundError, NotSupportedError, OffsetOutOfRangeError
from tidelog.pipeline.address import OpenedEngine
from tidelog.pipeline.location import ReadPart
from tidelog.pipeline.source.declared import declared, found_declaration, is_table, options_for, options_in
from tidelog.pipeline.source.engine_options import (
    CHANGE_COLUMNS,
    EARLIEST,
    ENTRY_COLUMNS,
    LATEST,
    EntryOptions,
    Start,
    no_writer,
    parse_entry_options,
    schema_of,
)
from tidelog.pipeline.source.entry_batches import LogPart, log_part, read_entry_batches
from tidelog.pipeline.source.explained import PlannedRead, tell_planned
from tidelog.pipeline.source.options import alone, checked_schema
from tidelog.pipeline.source.planning import Limits, TopicPlan, plan_parts
from tidelog.pipeline.source.told import stream_reader, told_in_one_line, told_rows

if TYPE_CHECKING:
    import pyarrow as pa


# The driver's view of an engine's log: where it begins and ends, which LSNs contain a range of seqs, and its parts.
#
# Invariants
# - Nothing after the manifest's last entry is read: it may still be rolled back.
# - The position of a seq is estimated from the snapshots and the compaction of the manifest, each of which says how far
#   the log had come: a range of LSNs may be too wide, never too narrow. Tasks check the seqs themselves.
# - A missing part of the range is an error that names it or, if data loss is allowed, left out with a warning.


_logger = logging.getLogger("tidelog.pipeline")
MAX_BIGINT = (1 << 63) - 1
_FIRST_LSN = 1


def refuse_large_seqs(manifest: Manifest) -> None:
    """NotSupportedError for an engine whose seqs Spark's numbers cannot hold."""
    if manifest.high_water_mark > MAX_BIGINT:
        raise NotSupportedError(
            f"the engine is at seq {manifest.high_water_mark}, and Spark's largest number is {MAX_BIGINT}",
            hint="Give entries seqs below 2**63, such as microseconds since 1970",
        )


class EntryLog:
    """An engine's log, open for planning. Close it, or use it in a `with` statement."""

    def __init__(self, options: EntryOptions) -> None:
        self._options = options
        self._place = options.root.place
        self._stack = ExitStack()
        self._engine: OpenedEngine = self._stack.enter_context(options.root.open())
        refuse_large_seqs(self._engine.manifest)

    def __enter__(self) -> EntryLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is planned."""
        self._stack.close()

    def manifest(self) -> Manifest:
        manifest = self._engine.newest_manifest()
        refuse_large_seqs(manifest)  # a stream that began below may come there
        return manifest

    def start_lsn(self) -> int:
        """The first record that is in the store."""
        return max(_FIRST_LSN, self._engine.catalog.start_offset())

    # From seqs to LSNs

    def lsn_from(self, starting: Start, manifest: Manifest) -> int:
        """From where on to read: the first LSN, or one at or before the first entry with this seq."""
        if starting == LATEST:
            return manifest.high_water_lsn + 1
        start_lsn = self.start_lsn()
        if starting == EARLIEST:
            return start_lsn
        assert isinstance(starting, int)
        known = max((lsn for seq, lsn in manifest.known_ends if seq < starting), default=_FIRST_LSN)
        if known < start_lsn:
            self._check_lost_beginning(starting, start_lsn, manifest)
        return max(known, start_lsn)

    def check_start(self, starting: Start, manifest: Manifest) -> None:
        """A read that is to begin where the log has not come to yet would give nothing and say nothing."""
        mark = manifest.high_water_mark
        if isinstance(starting, int) and starting > mark + 1:
            self.lost(f"the engine has shipped entries up to seq {mark}, and was to be read from seq {starting} on")

    def _check_lost_beginning(self, starting_seq: int, start_lsn: int, manifest: Manifest) -> None:
        """The log no longer has its beginning: whether the seq that is asked for was in what is gone."""
        first_seq = self._first_seq(start_lsn, manifest)
        if first_seq is None or starting_seq < first_seq:
            begins = "nothing is left of it" if first_seq is None else f"it begins with seq {first_seq}"
            self.lost(f"entries from seq {starting_seq} on are no longer in the log: {begins}")

    def _first_seq(self, start_lsn: int, manifest: Manifest) -> int | None:
        part = self._part(start_lsn, manifest.high_water_lsn + 1, manifest)
        batches = read_entry_batches(part, ["seq"], includes_refused=True, skips_gaps=False, max_rows=1)
        return next((int(batch.column(0)[0].as_py()) for batch in islice(batches, 1)), None)

    def lsn_behind(self, ending_seq: int | None, manifest: Manifest) -> int:
        """Where to stop reading (exclusive): after the last entry with at most this seq."""
        end_lsn = manifest.high_water_lsn + 1
        if ending_seq is None:
            return end_lsn
        if ending_seq > manifest.high_water_mark:
            self.lost(f"the engine has shipped entries up to seq {manifest.high_water_mark}, not up to {ending_seq}")
        return min((lsn for seq, lsn in manifest.known_ends if seq >= ending_seq), default=end_lsn)

    def first_seq_of(self, starting: Start) -> int:
        """The smallest seq that counts."""
        return starting if isinstance(starting, int) else 0

    # Ranges and parts

    def readable_from(self, lsn: int, stop_lsn: int) -> int:
        """The same LSN if the log still has it; what happens otherwise is at the head of the module."""
        start_lsn = self.start_lsn()
        if lsn < min(start_lsn, stop_lsn):
            gone = min(start_lsn, stop_lsn)
            self.lost(f"LSNs {lsn} to {gone - 1} are no longer in the log: it begins at LSN {start_lsn}")
        return min(max(lsn, start_lsn), max(lsn, stop_lsn))

    def lost(self, problem: str) -> None:
        """Something that was to be read is not there: an error, or a warning where that is allowed."""
        if self._options.fail_on_data_loss:
            raise OffsetOutOfRangeError(
                problem,
                operation="read entries",
                hint="failOnDataLoss=false reads what is there; tidelog_objects has the states, of older seqs too",
            )
        _logger.warning("%s; what is there is read (failOnDataLoss=false)", problem)

    def parts(self, start_lsn: int, stop_lsn: int, first_seq: int, last_seq: int | None) -> list[LogPart]:
        """The entries that begin in a range of LSNs, divided among tasks."""
        manifest = self.manifest()
        if stop_lsn > manifest.high_water_lsn + 1:
            raise InputError(
                f"the log ends at LSN {manifest.high_water_lsn}, and was to be read up to LSN {stop_lsn - 1}",
                hint="Is it the same engine? A new one needs a new checkpoint location",
            )
        options = self._options
        limits = Limits(options.max_partition_bytes, None, options.min_partitions)
        parts = plan_parts([self._plan(start_lsn, stop_lsn)], limits)
        return [self._part(one.start, one.stop, manifest, first_seq, last_seq, one) for one in parts]

    def described(self, start_lsn: int, stop_lsn: int) -> PlannedRead:
        """What is read with this range."""
        size = self._plan(start_lsn, stop_lsn).bytes if start_lsn < stop_lsn else 0.0
        subject = self._options.root.subject
        return PlannedRead(subject=subject, unit="LSN", start=start_lsn, stop=stop_lsn, bytes=size)

    def _plan(self, start_lsn: int, stop_lsn: int) -> TopicPlan:
        catalog = self._engine.catalog
        return TopicPlan(alone(""), start_lsn, stop_lsn, catalog=catalog, view=None, cold_end=stop_lsn)

    def _part(
        self,
        start: int,
        stop: int,
        manifest: Manifest,
        first_seq: int = 0,
        last_seq: int | None = None,
        read: ReadPart | None = None,
    ) -> LogPart:
        descriptors = () if read is None else read.descriptors
        return log_part(
            self._place, manifest, start, stop, first_seq=first_seq, last_seq=last_seq, descriptors=descriptors
        )


FORMAT = "tidelog_entries"
_Made = TypeVar("_Made")


class EntryPartition(InputPartition):
    """One task's part of the log."""

    def __init__(self, part: LogPart) -> None:
        super().__init__((part.start_lsn, part.stop_lsn))
        self.part = part


class EntriesDataSource(DataSource):
    """The log of an engine."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @told_in_one_line
    def schema(self) -> StructType:
        options = parse_entry_options(options_in(self.options))
        if not is_table(self.options):
            EntryLog(options).close()  # says at `load()` that there is no such engine
        schema = schema_of(_columns_of(options), options.columns)
        return declared(schema, self.options, options.root.location, EngineConfig)

    @told_in_one_line
    def reader(self, schema: StructType) -> DataSourceReader:
        of_table = found_declaration(schema) is not None
        options = parse_entry_options(options_for(self.options, schema), is_table=of_table)
        if options.starting == LATEST:
            raise InputError("a batch query cannot start at latest: it would read nothing")
        names = checked_schema(schema, _columns_of(options))
        if options.are_changes:
            from tidelog.pipeline.source.change_data import ChangesReader

            return ChangesReader(options, names)
        return EntriesReader(options, names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return stream_reader(lambda: self._stream_reader(schema))

    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        options = parse_entry_options(options_for(self.options, schema))
        if options.ending_seq is not None:
            raise InputError("a stream has no end", hint="Leave endingSeq out; a batch query has both ends")
        names = checked_schema(schema, _columns_of(options))
        if options.are_changes:
            from tidelog.pipeline.source.change_data import ChangesStreamReader

            return ChangesStreamReader(options, names)
        return EntriesStreamReader(options, names)

    @told_in_one_line
    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise no_writer(FORMAT)

    @told_in_one_line
    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise no_writer(FORMAT)


def _columns_of(options: EntryOptions) -> Mapping[str, DataType]:
    return CHANGE_COLUMNS if options.are_changes else ENTRY_COLUMNS


def read_partition(partition: InputPartition, options: EntryOptions, names: list[str]) -> Iterator[pa.RecordBatch]:
    """What a task does."""
    from tidelog.pipeline.source.entry_batches import read_entry_batches
    from tidelog.pipeline.tasks import tune_worker

    if not isinstance(partition, EntryPartition):
        return iter(())  # Spark makes one up where there are none
    tune_worker()
    return told_rows(
        read_entry_batches(
            partition.part,
            names,
            includes_refused=options.includes_refused,
            skips_gaps=not options.fail_on_data_loss,
            max_rows=options.max_rows_per_batch,
        )
    )


class EntriesReader(DataSourceReader):
    """A batch read: what is shipped when it is planned."""

    def __init__(self, options: EntryOptions, names: list[str]) -> None:
        self._options = options
        self._names = names

    @told_in_one_line
    def partitions(self) -> list[InputPartition]:
        return self._with_range(self._tasks)

    def planned(self) -> list[PlannedRead]:
        return self._with_range(lambda log, start_lsn, stop_lsn: [log.described(start_lsn, stop_lsn)])

    def _tasks(self, log: EntryLog, start_lsn: int, stop_lsn: int) -> list[InputPartition]:
        first_seq = log.first_seq_of(self._starting)
        tasks = [EntryPartition(part) for part in log.parts(start_lsn, stop_lsn, first_seq, self._options.ending_seq)]
        tell_planned(lambda: [log.described(start_lsn, stop_lsn)], len(tasks))
        return [*tasks]

    @property
    def _starting(self) -> Start:
        return EARLIEST if self._options.starting is None else self._options.starting

    def _with_range(self, make: Callable[[EntryLog, int, int], list[_Made]]) -> list[_Made]:
        """What is made of the LSNs that are read."""
        options, starting = self._options, self._starting
        try:
            log = EntryLog(options)
        except NotFoundError:
            if options.is_table and not isinstance(starting, int) and options.ending_seq is None:
                return []  # it has shipped nothing yet
            raise
        with log:
            manifest = log.manifest()
            log.check_start(starting, manifest)
            stop_lsn = log.lsn_behind(options.ending_seq, manifest)
            return make(log, log.readable_from(log.lsn_from(starting, manifest), stop_lsn), stop_lsn)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._names)


# An engine's log as a stream: which records the next micro-batch reads, and how many entries at most.
#
#     {"lsn": 1201, "first_seq": 0}       all that begins before this LSN was read, except entries below first_seq
#
# Invariants
# - Its two offsets determine a batch, however often and wherever it is rerun: an entry belongs to the batch that
#   contains its first record, and what is at or below the manifest's last entry never changes.
# - An offset never goes back. A log that ends before what was already read, or has lost what was not read yet, is data
#   loss: an error, or with failOnDataLoss=false left out.
# - With Trigger.AvailableNow the end is that of the moment at which the query began.


Offset = dict[str, int]


class EntriesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver's half of a stream; one process keeps it for as long as the query runs."""

    def __init__(self, options: EntryOptions, names: list[str]) -> None:
        self._options = options
        self._names = names
        self._opened: EntryLog | None = None
        self._initial: Offset | None = None
        self._target: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get a copy of it: what is open stays here."""
        return {**self.__dict__, "_opened": None}

    @property
    def _log(self) -> EntryLog:
        if self._opened is None:
            self._opened = EntryLog(self._options)
        return self._opened

    @property
    def _starting(self) -> Start:
        return LATEST if self._options.starting is None else self._options.starting

    @told_in_one_line
    def initialOffset(self) -> Offset:
        if self._initial is None:
            lsn = self._log.lsn_from(self._starting, self._log.manifest())
            self._initial = {"lsn": lsn, "first_seq": self._log.first_seq_of(self._starting)}
        return self._initial

    @told_in_one_line
    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._end_lsn()

    @told_in_one_line
    def reportLatestOffset(self) -> Offset | None:
        return {"lsn": self._end_lsn(), "first_seq": self._log.first_seq_of(self._starting)}

    def planned(self) -> list[PlannedRead]:
        """What a query that begins now reads first."""
        lsn, _ = _checked(self.initialOffset())
        found = self._log.described(lsn, max(lsn, self._end_lsn()))
        self.stop()
        return [found]

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.max_entries_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    @told_in_one_line
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        lsn, first_seq = _checked(start)
        end_lsn = self._end_lsn() if self._target is None else self._target
        if end_lsn < lsn:
            self._log.lost(f"the log ends at LSN {end_lsn - 1}, and was read up to LSN {lsn - 1}: it is another one")
        if isinstance(limit, ReadMaxRows):
            # An entry has a record at least, so these are not too many; records that are no entries make them fewer.
            end_lsn = min(end_lsn, lsn + limit.max_rows)
        return {"lsn": max(lsn, end_lsn), "first_seq": first_seq}

    @told_in_one_line
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        (start_lsn, first_seq), (stop_lsn, _) = _checked(start), _checked(end)
        if start_lsn >= stop_lsn:
            return []
        start_lsn = self._log.readable_from(start_lsn, stop_lsn)
        return [EntryPartition(part) for part in self._log.parts(start_lsn, stop_lsn, first_seq, None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._names)

    def commit(self, end: Offset) -> None:
        """Spark keeps the position itself."""

    def stop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _end_lsn(self) -> int:
        return self._log.manifest().high_water_lsn + 1


def _checked(offset: Offset) -> tuple[int, int]:
    """The LSN and the first seq of an offset; a checkpoint of another source is reported as such."""
    lsn, first_seq = offset.get("lsn"), offset.get("first_seq", 0)
    if type(lsn) is not int or type(first_seq) is not int or lsn < 1 or first_seq < 0:
        raise InputError(f"{offset} is not a position in an engine's log", hint="Use a new checkpoint location")
    return lsn, first_seq
