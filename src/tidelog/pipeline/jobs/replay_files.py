"""The job `backfill`: the rows of Parquet or CSV files as messages of a topic.

Invariants
- Files are taken in the order of their names, the rows of a file in their order; each comes in once, however often the
  job is killed and run again: some files are one step (`replay_steps.py`), and a step is one consignment.
- Which files there are is settled by the first run, with their sizes and times. When they are others later, nothing is
  written: what is new among them could not be told from what was written already.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from tidelog.errors import InputError, NotFoundError
from tidelog.pipeline.jobs.job import OnProgress, Progress, ignore_progress
from tidelog.pipeline.jobs.replay import ReplayReport, report_of
from tidelog.pipeline.jobs.replay_rows import StepWriter
from tidelog.pipeline.jobs.replay_steps import Step, open_steps
from tidelog.pipeline.jobs.spark_errors import told_as_bad_input
from tidelog.pipeline.root import Root
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType

DEFAULT_STEP_BYTES = 256 << 20
# Of these a plan is made with a scan for each, one behind the other, so that rows stay in order.
_MAX_STEP_FILES = 64
FileFormat = Literal["parquet", "csv"]
_FORMAT_HINTS: dict[FileFormat, str] = {
    "parquet": "If they are CSV files, say so: --format csv",
    "csv": "Check --format and --separator",
}


class Mapping(msgspec.Struct, frozen=True, kw_only=True):
    """Which columns become what. Without a `value` column the whole row is the value, as JSON."""

    value: str | None = None
    key: str | None = None
    timestamp: str | None = None

    def of(self, rows: DataFrame) -> DataFrame:
        """The rows as messages."""
        from pyspark.sql import functions as sql

        for name in (self.value, self.key, self.timestamp):
            if name is not None and name not in rows.columns:
                raise InputError(f"there is no column {name}", hint=f"There are {', '.join(rows.columns)}")
        whole = sql.to_json(sql.struct("*"), {"ignoreNullFields": "false"})
        columns = [_text_or_bytes(rows, self.value).alias("value") if self.value is not None else whole.alias("value")]
        if self.key is not None:
            columns.append(_text_or_bytes(rows, self.key).alias("key"))
        if self.timestamp is not None:
            columns.append(sql.col(_quoted(self.timestamp)).cast("timestamp").alias("timestamp"))
        return rows.select(*columns)


def _text_or_bytes(rows: DataFrame, name: str) -> Column:
    from pyspark.sql import functions as sql
    from pyspark.sql.types import BinaryType

    column = sql.col(_quoted(name))
    return column if isinstance(rows.schema[name].dataType, BinaryType) else column.cast("string")


def _quoted(name: str) -> str:
    """A name that may have dots in it."""
    return f"`{name.replace('`', '``')}`"


class SourceFile(NamedTuple):
    """A file as it was when it was looked at."""

    path: str
    size: int
    modified_us: int


def backfill(
    spark: SparkSession,
    root: Root,
    paths: Sequence[str],
    target: str,
    *,
    format: FileFormat = "parquet",
    mapping: Mapping | None = None,
    options: dict[str, str] | None = None,
    step_bytes: int = DEFAULT_STEP_BYTES,
    name: str | None = None,
    on_progress: OnProgress = ignore_progress,
) -> ReplayReport:
    """Writes the rows of files, or of all files in directories, into a topic, which is made when absent.

    `options` are those of Spark's reader for the format, such as `header` and `sep` of CSV.
    """
    began, target, mapping = time.monotonic(), str(parse_topic_name(target)), mapping or Mapping()
    reading = _Reading(spark, format, dict(options or {}), paths)
    files = reading.files()
    name = name or f"files-{hashlib.sha256(msgspec.json.encode([format, sorted(paths)])).hexdigest()[:20]}"
    source = f"{len(files)} {format} files of {', '.join(paths)}"
    mapping.of(reading.rows(files[:1]))  # a wrong column or format is told before the target remembers anything of it
    with open_steps(root, target, name, f"{source} ({_fingerprint(files, mapping)})") as steps:
        writer, done = StepWriter(spark, root, target, steps), list[Step]()
        for step in steps.all(0, lambda at: _end_of_step(files, at, step_bytes)):
            on_progress(Progress("backfilling files", step.first, len(files)))
            writer.write(step, mapping.of(reading.rows(files[step.first : step.end])))
            done.append(step)
    on_progress(Progress("backfilling files", len(files), len(files)))
    return report_of(writer, done, source, target, name, time.monotonic() - began)


def _fingerprint(files: Sequence[SourceFile], mapping: Mapping) -> str:
    return hashlib.sha256(msgspec.json.encode([files, mapping])).hexdigest()[:20]


def _end_of_step(files: Sequence[SourceFile], first: int, step_bytes: int) -> int:
    """As many files as fit, and one at least."""
    end, size = first, 0
    while end < len(files) and end - first < _MAX_STEP_FILES and (end == first or size + files[end].size <= step_bytes):
        size += files[end].size
        end += 1
    return end


class _Reading:
    """The files of a backfill, through Spark, which knows the file systems."""

    def __init__(self, spark: SparkSession, format: FileFormat, options: dict[str, str], paths: Sequence[str]) -> None:
        if not paths:
            raise InputError("no file is named")
        self._spark = spark
        self._format = format
        self._options = options
        self._paths = list(paths)
        self._schema: StructType | None = None

    def files(self) -> list[SourceFile]:
        """All of them, by name; those that Spark takes for hidden are left out, as it does."""
        from pyspark.errors import AnalysisException
        from pyspark.sql import functions as sql

        listing = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        try:
            with told_as_bad_input("the files cannot be listed", "Check the path; Spark needs a jar for some stores"):
                rows = listing.load(self._paths).select("path", "length", sql.unix_micros("modificationTime")).collect()
        except InputError as error:
            if not isinstance(error.__cause__, AnalysisException):
                raise
            raise NotFoundError(error.message, hint="Check the path") from error
        found = sorted(SourceFile(row[0], row[1], row[2]) for row in rows)
        if not found:
            named = ", ".join(self._paths)
            raise NotFoundError(f"there are no files in {named}, or empty ones alone", hint="Check the path")
        return found

    def rows(self, files: Sequence[SourceFile]) -> DataFrame:
        """The rows of some files, one file behind the other."""
        if self._schema is None:
            with told_as_bad_input(f"the files cannot be read as {self._format}", _FORMAT_HINTS[self._format]):
                self._schema = self._reader().option("recursiveFileLookup", "true").load(self._paths).schema
        parts = [self._reader().schema(self._schema).load(file.path) for file in files]
        return reduce(lambda before, behind: before.union(behind), parts)

    def _reader(self) -> DataFrameReader:
        return self._spark.read.format(self._format).options(**self._options)
