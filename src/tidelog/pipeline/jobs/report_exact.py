"""Messages over time, counted by Spark message by message: for topics whose times are not spread evenly.

Invariants
- It counts what the figures know: messages that arrived since are left out, so that both agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tidelog.pipeline.jobs.report_figures import TopicFigures
from tidelog.pipeline.jobs.report_times import TimeBins, TimeCounts
from tidelog.pipeline.jobs.topic_rows import read_rows
from tidelog.pipeline.root import Root

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


def exact_times(spark: SparkSession, root: Root, figures: Sequence[TopicFigures], bins: TimeBins) -> list[TimeCounts]:
    """The counts of each topic, in the order of the figures."""
    counts = {one.name: TimeCounts.empty(bins) for one in figures}
    readable = [one for one in figures if one.messages and one.problem is None]
    for row in _rows(spark, root, readable, bins) if readable else ():
        found, at = counts[row.topic], bins.index_of(bins.start_us + row.bin * bins.width_us)
        messages = found.cold_messages if row.is_cold else found.hot_messages
        size = found.cold_bytes if row.is_cold else found.hot_bytes
        messages[at] += row.messages
        size[at] += row.bytes
    return [counts[one.name] for one in figures]


def _rows(spark: SparkSession, root: Root, figures: Sequence[TopicFigures], bins: TimeBins) -> Iterable[Row]:
    from pyspark.sql import functions as sql

    offsets = {one.name: (one.start_offset, one.next_offset) for one in figures}
    ends = [(one.name, one.shipped_offset or 0) for one in figures]
    shipped = sql.broadcast(spark.createDataFrame(ends, "topic string, shipped_offset long"))
    since_us = sql.unix_micros("timestamp") - bins.start_us
    size = sql.coalesce(sql.octet_length("key"), sql.lit(0)) + sql.octet_length("value")
    counted = (
        read_rows(spark, root, offsets, columns="topic,offset,timestamp,key,value")
        .join(shipped, "topic")
        .withColumn("is_cold", sql.col("offset") < sql.col("shipped_offset"))
        .groupBy("topic", "is_cold", sql.floor(since_us / bins.width_us).alias("bin"))
        .agg(sql.count("*").alias("messages"), sql.sum(size).alias("bytes"))
    )
    return counted.collect()
