"""`format("tidelog_entries")`: the shipped log of an engine as rows, in batches and as a stream.

    spark.read.format("tidelog_entries").option("root", "s3://bucket/prefix").load()

Invariants
- Every entry that counts is there once, with a row for each of its operations; entries that were rolled back or never
  completed are never there. Refused entries are rows that say why, unless `includeRefused` is false.
- `startingSeq` and `endingSeq` belong to the range, both: as everywhere in the engine, a seq names a state with its
  entry in it.
- Filters are not pushed down: Spark keeps a pushed filter with the relation, and a second use of the same DataFrame
  would get filtered rows.
- The driver plans, tasks read straight from the store; entries never pass through the driver or the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from tidelog.errors import InputError
from tidelog.pipeline.engines.entry_log import EntryLog
from tidelog.pipeline.engines.log_part import LogPart
from tidelog.pipeline.engines.options import EARLIEST, LATEST, EntryOptions, no_writer, parse_entry_options
from tidelog.pipeline.engines.schema import ENTRY_COLUMNS, checked_schema, schema_of

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "tidelog_entries"


class EntryPartition(InputPartition):
    """One task's part of the log."""

    def __init__(self, part: LogPart) -> None:
        super().__init__((part.start, part.stop))
        self.part = part


class EntriesDataSource(DataSource):
    """The log of an engine."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return schema_of(ENTRY_COLUMNS, parse_entry_options(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_entry_options(self.options)
        if options.starting == LATEST:
            raise InputError("a batch query cannot start at latest: it would read nothing")
        return EntriesReader(options, checked_schema(schema, ENTRY_COLUMNS))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from tidelog.pipeline.engines.entries_stream import EntriesStreamReader

        options = parse_entry_options(self.options)
        if options.ending_seq is not None:
            raise InputError("a stream has no end", hint="Leave endingSeq out; a batch query has both ends")
        return EntriesStreamReader(options, checked_schema(schema, ENTRY_COLUMNS))

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise no_writer(FORMAT)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise no_writer(FORMAT)


def read_partition(partition: InputPartition, options: EntryOptions, names: list[str]) -> Iterator[pa.RecordBatch]:
    """What a task does."""
    from tidelog.pipeline.engines.entry_batches import read_entry_batches
    from tidelog.pipeline.partition_reader import spare_collections
    from tidelog.pipeline.worker_memory import keep_memory

    if not isinstance(partition, EntryPartition):
        return iter(())  # Spark makes one up where there are none
    keep_memory()
    spare_collections()
    return read_entry_batches(
        partition.part,
        names,
        includes_refused=options.includes_refused,
        skips_gaps=not options.fail_on_data_loss,
        max_rows=options.max_rows_per_batch,
    )


class EntriesReader(DataSourceReader):
    """A batch read: what is shipped when it is planned."""

    def __init__(self, options: EntryOptions, names: list[str]) -> None:
        self._options = options
        self._names = names

    def partitions(self) -> list[InputPartition]:
        options = self._options
        starting = EARLIEST if options.starting is None else options.starting
        with EntryLog(options) as log:
            manifest = log.manifest()
            log.check_start(starting, manifest)
            stop_lsn = log.lsn_behind(options.ending_seq, manifest)
            start_lsn = log.readable_from(log.lsn_from(starting, manifest), stop_lsn)
            parts = log.parts(start_lsn, stop_lsn, log.first_seq_of(starting), options.ending_seq)
            return [EntryPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._names)
