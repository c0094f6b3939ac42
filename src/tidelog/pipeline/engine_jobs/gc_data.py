"""Data files that the body index does not name, and those that it names and that are not there: found by Spark.

An engine may have millions of them, so neither the names in the store nor those in the index come together in one
place: tasks list ranges of names, others read files of the body index, and Spark joins both.

Invariants
- The index that counts is that of the published root, read before anything is listed.
- Only what does not match comes to the driver: garbage, and what is lost; of the rest the number and a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine.compacted import Compaction
from tidelog.engine.place import FilePlace, decode_place
from tidelog.engine.row_file import RowFile, RowPart
from tidelog.engine.version_keys import OBJECTS, parse
from tidelog.pipeline.arrow_map import map_in_arrow
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.compacted_names import escape
from tidelog.tier.keys import EngineKeys

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_SCHEMA = "key string, size bigint"
_ROWS_A_BATCH = 10_000
_MODULUS = 1 << 64


class NameRange(NamedTuple):
    """Keys behind one and up to another (inclusive); None for no bound."""

    start_after: str | None
    last: str | None


class DataFiles(NamedTuple):
    """What the comparison came to: files that the index does not name, and names whose file is not there or differs."""

    unnamed: list[tuple[str, int]]
    missing: list[tuple[str, int, int | None]]
    named: int
    named_bytes: int
    named_sum: int
    there: int
    there_sum: int


NO_DATA_FILES = DataFiles([], [], 0, 0, 0, 0, 0)


def compare_data_files(spark: SparkSession, place: EnginePlace, root: Compaction | None) -> DataFiles:
    """Lists all data files and holds them against the body index; without a root, against nothing."""
    parts = () if root is None else root.bodies
    ranges = name_ranges(place.keys, () if root is None else root.versions)
    listed = _rows(spark, ListNames(place, ranges), len(ranges)).withColumnRenamed("size", "found_bytes")
    if not parts:
        found = [(row.key, row.found_bytes) for row in listed.collect()]
        return DataFiles(found, [], 0, 0, 0, 0, 0)
    named = _rows(spark, ReadNames(place, parts), len(parts)).withColumnRenamed("size", "named_bytes").distinct()
    return _compared(listed, named)


def _rows(spark: SparkSession, function: object, tasks: int) -> DataFrame:
    return map_in_arrow(spark.range(0, tasks, 1, tasks), function, _SCHEMA)  # type: ignore[arg-type]


def _compared(listed: DataFrame, named: DataFrame) -> DataFiles:
    from pyspark.sql import functions as sql

    both = listed.join(named, "key", "full_outer").persist()
    try:
        is_there = sql.col("found_bytes").eqNullSafe(sql.col("named_bytes"))
        is_named = sql.col("named_bytes").isNotNull()
        hashed = sql.xxhash64("key", "named_bytes").cast("decimal(20,0)")
        sums = both.agg(
            sql.count_if(is_named).alias("named"),
            sql.sum("named_bytes").alias("named_bytes"),
            sql.sum(sql.when(is_named, hashed)).alias("named_sum"),
            sql.count_if(is_there).alias("there"),
            sql.sum(sql.when(is_there, hashed)).alias("there_sum"),
        ).first()
        odd = both.where(~is_there).orderBy("key").collect()
    finally:
        both.unpersist()
    assert sums is not None
    return DataFiles(
        unnamed=[(row.key, row.found_bytes) for row in odd if row.named_bytes is None],
        missing=[(row.key, row.named_bytes, row.found_bytes) for row in odd if row.named_bytes is not None],
        named=sums.named,
        named_bytes=int(sums.named_bytes or 0),
        named_sum=int(sums.named_sum or 0) % _MODULUS,
        there=sums.there,
        there_sum=int(sums.there_sum or 0) % _MODULUS,
    )


def name_ranges(keys: EngineKeys, versions: tuple[RowPart, ...]) -> tuple[NameRange, ...]:
    """Names cut about where files of the version index begin: each has a share of the objects."""
    firsts = (parse(part.first_key) for part in versions[1:] if part.first_key[:1] == OBJECTS)
    cuts = sorted({f"{keys.data_prefix}{escape(one.bucket)}/{escape(one.key or '')}/" for one in firsts})
    bounds: list[str | None] = [None, *cuts, None]
    return tuple(NameRange(first, last) for first, last in pairwise(bounds))


# What tasks do


class ListNames:
    """Lists the ranges whose numbers a task gets."""

    def __init__(self, place: EnginePlace, ranges: tuple[NameRange, ...]) -> None:
        self._place = place
        self._ranges = ranges

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _batched(self._listed(self._ranges[number]))

    def _listed(self, names: NameRange) -> Iterator[tuple[str, int]]:
        prefix = self._place.keys.data_prefix
        for info in self._place.opened().objects.list(prefix, start_after=names.start_after):
            if names.last is not None and info.key > names.last:
                return
            yield info.key, info.size


class ReadNames:
    """Reads the files of the body index whose numbers a task gets: the keys of data files, and their sizes."""

    def __init__(self, place: EnginePlace, parts: tuple[RowPart, ...]) -> None:
        self._place = place
        self._parts = parts

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _batched(self._named(self._parts[number]))

    def _named(self, part: RowPart) -> Iterator[tuple[str, int]]:
        prefix = self._place.keys.data_prefix
        for _, value in RowFile(self._place.opened().objects, part, kind="bodies").rows():
            place = decode_place(value)
            if isinstance(place, FilePlace):
                yield prefix + place.name, place.stored_bytes


def _batched(rows: Iterator[tuple[str, int]]) -> Iterator[pa.RecordBatch]:
    from itertools import islice

    import pyarrow as pa

    while taken := list(islice(rows, _ROWS_A_BATCH)):
        keys, sizes = zip(*taken, strict=True)
        yield pa.RecordBatch.from_arrays(
            [pa.array(keys, pa.string()), pa.array(sizes, pa.int64())], names=["key", "size"]
        )
