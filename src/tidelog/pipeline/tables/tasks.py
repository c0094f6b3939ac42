"""Executor tasks of `table`: infer the fields of a part of a topic, write a part as a Parquet file, rewrite and read
files.

Invariants
- A file holds exactly the messages of its part, in order. It is read back before it counts, and both sides are summed
  up: offset, key and time, and the value if the table keeps it.
- A task that runs twice writes the same rows under the same name.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tidelog.config import load_settings
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.jobs.job import NO_ROWS, Totals, total
from tidelog.pipeline.jobs.tally import tally_rows
from tidelog.pipeline.location import ReadPart, TopicLocation
from tidelog.pipeline.source.options import SourceOptions, source_schema
from tidelog.pipeline.source.topics import read_record_batches
from tidelog.pipeline.tables.commits import TableCommits
from tidelog.pipeline.tables.files import FilePointer, table_location, write_batches
from tidelog.pipeline.tables.types import RowMaker, TableShape, inferred_fields

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_BATCH_ROWS = 16_384
# Arrow's default of eight times as many is 64 MiB at once with rows of 1 KiB: twice the memory, and half the speed.
_READ_ROWS = 8192
_SUMMED = ("offset", "key", "value", "timestamp")
PARSED_SUMMED = ("_offset", "_key", "_timestamp")


@dataclass(frozen=True, kw_only=True)
class InferWork:
    """A part of a topic whose values are looked at."""

    part: ReadPart
    cold: TopicLocation | None
    source: SourceOptions


@dataclass(frozen=True, kw_only=True)
class WriteWork(InferWork):
    """A part of a topic, what its rows become, and where."""

    shape: TableShape
    place: FilePointer
    key: str


class WrittenPart(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a part; a part without messages has no file."""

    key: str
    start: int
    stop: int
    bytes: int
    went_in: Totals
    came_out: Totals
    rejected: int


class InferredPart(msgspec.Struct, frozen=True):
    """The fields of a part's values, as Arrow describes types; some of them only inference knows."""

    start: int
    description: bytes

    @property
    def fields(self) -> pa.DataType:
        return pa.ipc.read_schema(pa.py_buffer(self.description)).field(0).type


def infer_part(work: InferWork) -> InferredPart:
    """Looks at every value of a part."""
    found = inferred_fields(_source_batches(work, ("value",)))
    return InferredPart(work.part.start, pa.schema([pa.field("fields", found)]).serialize().to_pybytes())


def write_part(work: WriteWork) -> WrittenPart:
    """Reads a part, writes its file, and reads that again."""
    rows = _Rows(work)
    first = next(rows, None)
    size, came_out = 0, NO_ROWS
    if first is not None:
        with work.place.writing(work.key) as sink:
            size = write_batches(sink, work.shape.schema, chain([first], rows))
        came_out = _read_back(work)
    return WrittenPart(
        key=work.key,
        start=work.part.start,
        stop=work.part.stop,
        bytes=size,
        went_in=rows.tally,
        came_out=came_out,
        rejected=rows.maker.rejected,
    )


class _Rows(Iterator[pa.RecordBatch]):
    """The rows that a part becomes, batch by batch, and the sum of the messages that they were made of."""

    def __init__(self, work: WriteWork) -> None:
        self.maker = RowMaker(work.shape)
        self.tally = NO_ROWS
        self._is_raw = work.shape.values == "raw"
        self._batches = _source_batches(work, work.shape.source_columns)

    def __next__(self) -> pa.RecordBatch:
        batch = next(self._batches)
        offset, key, value, timestamp = (batch.column(name) for name in _SUMMED)
        self.tally += tally_rows(offset, key, value if self._is_raw else None, timestamp)
        return self.maker.rows(batch)


def _source_batches(work: InferWork, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    schema = source_schema(columns)
    return read_record_batches(work.part, work.cold, schema, work.source, max_rows=_BATCH_ROWS)


def _read_back(work: WriteWork) -> Totals:
    names = _SUMMED if work.shape.values == "raw" else PARSED_SUMMED
    with work.place.reading(work.key) as source, pq.ParquetFile(source) as file:
        return total((tally_table(batch, names) for batch in _batches(file, names)), NO_ROWS)


def _batches(file: pq.ParquetFile, names: tuple[str, ...] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a file, with all columns or with these, some MiB at a time."""
    yield from file.iter_batches(batch_size=_READ_ROWS, columns=None if names is None else list(names))


def tally_table(batch: pa.RecordBatch, names: tuple[str, ...]) -> Totals:
    """The rows of a table with these columns, which have the names of the source's, or the same with a line before."""
    columns = {name: batch.column(name) for name in names}
    own = {name.removeprefix("_"): column for name, column in columns.items()}
    return tally_rows(own["offset"], own["key"], own.get("value"), own["timestamp"])


# Executor task of `table` when a column has become wider: rewrites the files that have the narrow type.
#
# A Parquet reader takes one type for a column from all of its files, so files of both types cannot coexist.


@dataclass(frozen=True, kw_only=True)
class RewriteWork:
    """A file, and the one that takes its place."""

    place: FilePointer
    source: str
    key: str
    shape: TableShape


class RewrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """What was made of it."""

    source: str
    key: str
    bytes: int
    rows: int


def rewrite_file(work: RewriteWork) -> RewrittenFile:
    """Writes the rows of a file with the columns of today, and reads them back."""
    place, schema = work.place, work.shape.schema
    with place.reading(work.source) as source, pq.ParquetFile(source) as file, place.writing(work.key) as sink:
        batches = (widened_batch(batch, schema) for batch in _batches(file))
        size = write_batches(sink, schema, batches)
    went_in, came_out = (_sum_up(place, key) for key in (work.source, work.key))
    if went_in != came_out:
        raise DataError(f"{work.key} does not have the rows of {work.source}", hint="Run it again")
    return RewrittenFile(source=work.source, key=work.key, bytes=size, rows=came_out.messages)


def _sum_up(place: FilePointer, key: str) -> Totals:
    with place.reading(key) as source, pq.ParquetFile(source) as file:
        return total((tally_table(batch, PARSED_SUMMED) for batch in _batches(file, PARSED_SUMMED)), NO_ROWS)


def widened_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The same rows with these columns; those that are new are null."""
    arrays = [_column(batch, field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field) -> Any:
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    found = batch.column(field.name)
    if found.type == field.type:
        return found
    if pa.types.is_nested(field.type):  # a cast cannot add fields to structs
        return pa.array(found.to_pylist(), field.type)
    return found.cast(field.type)


# Reads the tables that `table` writes: exactly what is committed.
#
# Invariants
# - What is on a file system is read by Spark itself; what is in a bucket is fetched by workers and read by Arrow, so
#   that no jar is needed.
# - Columns are those of the newest commit; files from before a column was added have null in it.


_FORMAT = "tidelog_table_files"
# Spark takes paths for patterns.
_PATTERN_SIGNS = re.compile(r"[\[\]{}*?\\]")


def read_table(spark: SparkSession, path: str | os.PathLike[str], **settings: object) -> DataFrame:
    """The rows of a Parquet table, as of now. `settings` say how its store is reached, as those of `tidelog.open`."""
    place = table_location(path, load_settings(None, os.environ, settings).object_store)
    commits = TableCommits(place.open_existing())
    state = commits.state()
    if state.newest is None:
        raise NotFoundError(f"there is no table in {place.url}", hint="`tidelog pipeline table` creates one")
    return read_files(spark, place, commits.keys_of(state), state.newest.columns)


def read_files(spark: SparkSession, place: FilePointer, keys: Sequence[str], columns: dict[str, Any]) -> DataFrame:
    """The rows of these files."""
    schema = StructType.fromJson(columns)
    if not keys:
        return spark.createDataFrame([], schema)
    paths = [path for key in keys if (path := place.path_of(key)) is not None]
    if len(paths) == len(keys):
        return spark.read.schema(schema).parquet(*(_PATTERN_SIGNS.sub(r"\\\g<0>", path) for path in paths))
    spark.dataSource.register(TableFiles)
    # Spark shows options in plans, and hides those with this word in their name: settings of a store have keys in them.
    packed = base64.b64encode(pickle.dumps((place, tuple(keys), columns))).decode()
    return spark.read.format(_FORMAT).schema(schema).option("secretPlace", packed).load()


class _FilePartition(InputPartition):
    """One file."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class TableFiles(DataSource):
    """Parquet files that Spark's own reader cannot reach."""

    @classmethod
    def name(cls) -> str:
        return _FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        place, keys, columns = pickle.loads(base64.b64decode(self.options["secretPlace"]))
        return _FilesReader(place, keys, columns)


class _FilesReader(DataSourceReader):
    def __init__(self, place: FilePointer, keys: Sequence[str], columns: dict[str, Any]) -> None:
        self._place = place
        self._keys = keys
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        return [_FilePartition(key) for key in self._keys]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _FilePartition)
        schema = TableShape(values="raw", columns=self._columns).schema
        with self._place.reading(partition.key) as source, pq.ParquetFile(source) as file:
            for batch in _batches(file):
                yield widened_batch(batch, schema)
