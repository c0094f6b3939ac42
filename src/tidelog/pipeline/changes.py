"""Change data of an engine: what each change left of an object, and what was there before, for MERGE into a table.

    change_data(spark, find_engine("s3://bucket/prefix"), 1201).createOrReplaceTempView("changes")

    bucket, key string   seq bigint, order int   change: insert | update | delete
    before, after        struct<seq, size, crc, metadata, data>, null where there is no object

Invariants
- It begins with what was to be seen before the first seq, and has every change of an object from there on, once and in
  the order of (seq, order). `before` of a change is `after` of the one before it.
- A bucket that is deleted with what is in it deletes each of its objects, though no version says so: these rows come
  from the entry in the log. Where the log no longer has the range, the error says so; no delete is left out silently.
- A deletion of what is not there is no change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.errors import InputError
from tidelog.pipeline.address import EngineRoot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OBJECT = ("seq", "size", "crc", "metadata", "data")


def change_data(
    spark: SparkSession,
    engine: EngineRoot,
    starting_seq: int = 1,
    ending_seq: int | None = None,
    *,
    newest_only: bool = False,
    with_data: bool = True,
) -> DataFrame:
    """The changes of an engine's objects from one seq to another, both included; by default all that is shipped.

    With `newest_only` there is one row for each object that differs at the end, `before` as it was before the first
    seq: that is what MERGE takes. Without `with_data` the values are not read, and `data` and `metadata` are null.
    """
    from pyspark.sql import functions as sql
    from pyspark.sql.window import Window

    first, last = _checked_range(engine, starting_seq, ending_seq)
    known = _versions(spark, engine, first, last, with_data=with_data)
    in_order = Window.partitionBy("bucket", "key").orderBy("seq", "order")
    both = known.withColumn("before", sql.lag("after").over(in_order)).where(sql.col("seq") >= first)
    both = both.where("before IS NOT NULL OR after IS NOT NULL")
    if newest_only:
        # Of structs, `min_by` and `max_by` keep nulls: an object that was not there is one that is inserted.
        place = sql.struct("seq", "order")
        ends = both.groupBy("bucket", "key").agg(
            sql.max(place).alias("at"),
            sql.min_by("before", place).alias("before"),
            sql.max_by("after", place).alias("after"),
        )
        both = ends.select("bucket", "key", "at.seq", "at.order", "before", "after")
        both = both.where("before IS NOT NULL OR after IS NOT NULL")
    change = sql.expr("CASE WHEN before IS NULL THEN 'insert' WHEN after IS NULL THEN 'delete' ELSE 'update' END")
    return both.select("bucket", "key", "seq", "order", change.alias("change"), "before", "after")


def _checked_range(engine: EngineRoot, starting_seq: int, ending_seq: int | None) -> tuple[int, int]:
    with engine.open() as opened:
        manifest = opened.manifest
    last = manifest.high_water_mark if ending_seq is None else ending_seq
    if starting_seq < 1 or last < starting_seq - 1 or last > manifest.high_water_mark:
        raise InputError(
            f"there are no changes from seq {starting_seq} to {last}: the store has entries up to "
            f"{manifest.high_water_mark}",
            hint="Begin at 1 or later, and end at what is shipped",
        )
    return starting_seq, last


def _versions(spark: SparkSession, engine: EngineRoot, first: int, last: int, *, with_data: bool) -> DataFrame:
    """What is to be seen before the first seq, every version from there on, and the deletions that are none."""
    versions = _objects(spark, engine, last, with_data=with_data, versions="true").where(f"seq >= {first}")
    if first > 1:
        versions = _objects(spark, engine, first - 1, with_data=with_data).unionByName(versions)
    emptied = _options(spark, "tidelog_entries", engine, startingSeq=first, endingSeq=last, includeMetadata="false")
    emptied = emptied.where("kind = 'DeleteBucket' AND NOT is_refused").select("bucket", "seq", "order")
    deleted = versions.select("bucket", "key").distinct().join(emptied, "bucket")
    return versions.unionByName(deleted, allowMissingColumns=True)


def _objects(spark: SparkSession, engine: EngineRoot, seq: int, *, with_data: bool, **options: str) -> DataFrame:
    """Objects as of a seq, or their versions, with all of an object as one column: null for a deletion."""
    values = {"withData": "true", "withMetadata": "true"} if with_data else {}
    found = _options(spark, "tidelog_objects", engine, seq=seq, **values, **options)
    if not with_data:
        found = found.selectExpr("*", "CAST(NULL AS map<string,string>) metadata", "CAST(NULL AS binary) data")
    after = f"struct({', '.join(_OBJECT)})"
    if "is_deleted" in found.columns:
        after = f"IF(is_deleted, NULL, {after})"
    return found.selectExpr("bucket", "key", "seq", "`order`", f"{after} AS after")


def _options(spark: SparkSession, source: str, engine: EngineRoot, **options: str | int) -> DataFrame:
    reader = spark.read.format(source).option("root", engine.store_url).option("engine", engine.name)
    return reader.options(**engine.settings).options(**options).load()
