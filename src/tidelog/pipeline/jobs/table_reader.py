"""Reading the tables that `table` writes: exactly what is committed, wherever it is.

Invariants
- What is on a file system is read by Spark itself; what is in a bucket is fetched by workers and read by Arrow, so that
  no jar is needed.
- Columns are those of the newest commit; files from before a column was added have null in it.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tidelog.config import load_settings
from tidelog.errors import NotFoundError
from tidelog.pipeline.jobs.table_columns import TableShape
from tidelog.pipeline.jobs.table_commits import TableCommits
from tidelog.pipeline.jobs.table_files import FilePlace, table_place
from tidelog.pipeline.jobs.table_rewriter import widened_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORMAT = "tidelog_table_files"
# Spark takes paths for patterns.
_PATTERN_SIGNS = re.compile(r"[\[\]{}*?\\]")


def read_table(spark: SparkSession, path: str | os.PathLike[str], **settings: object) -> DataFrame:
    """The rows of a Parquet table, as of now. `settings` say how its store is reached, as those of `tidelog.open`."""
    place = table_place(path, load_settings(None, os.environ, settings).object_store)
    commits = TableCommits(place.open_existing())
    state = commits.state()
    if state.newest is None:
        raise NotFoundError(f"there is no table in {place.url}", hint="`tidelog pipeline table` makes one")
    return read_files(spark, place, commits.keys_of(state), state.newest.columns)


def read_files(spark: SparkSession, place: FilePlace, keys: Sequence[str], columns: dict[str, Any]) -> DataFrame:
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
    def __init__(self, place: FilePlace, keys: Sequence[str], columns: dict[str, Any]) -> None:
        self._place = place
        self._keys = keys
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        return [_FilePartition(key) for key in self._keys]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _FilePartition)
        schema = TableShape(values="raw", columns=self._columns).schema
        with self._place.reading(partition.key) as source, pq.ParquetFile(source) as file:
            for batch in file.iter_batches():
                yield widened_batch(batch, schema)
