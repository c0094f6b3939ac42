"""Verifies that a table equals its topic: Spark counts and sums up both sides, and finds the rows that differ.

Invariants
- Both sides are computed by the same expressions over partition, offset, key, value and time. If a table has parsed its
  values, those are left out: the originals cannot be derived from columns.
- The topic is compared between the offsets that the table claims to have, as far as the topic still keeps them.
- If the sums differ, offsets are named: missing from the table, twice in it, unknown to the topic, or different.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import msgspec

from tidelog.errors import NotFoundError
from tidelog.findings import Finding
from tidelog.pipeline.address import Root
from tidelog.pipeline.jobs.job import (
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    Totals,
    ignore_progress,
    logged,
    sum_text,
    told_in_our_words,
)
from tidelog.pipeline.jobs.tally import read_rows
from tidelog.pipeline.tables.commits import TableCommits
from tidelog.pipeline.tables.files import table_location
from tidelog.pipeline.tables.table import TargetState
from tidelog.pipeline.tables.tasks import read_files
from tidelog.store.settings import StoreSettings
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.topic import Topic

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark.sql import Column, DataFrame, SparkSession


_NAMED_OFFSETS = 10
_KINDS = "CASE WHEN rows IS NULL THEN 1 WHEN hash IS NULL THEN 2 WHEN rows > 1 THEN 3 WHEN hash <> found THEN 4 END"
_KIND_TEXTS = (
    "rows are missing from the table",
    "rows of the table are not in the topic",
    "rows are in the table more than once",
    "rows of the table differ from the topic",
)


@dataclass(frozen=True)
class TableContent:
    """A table as it is compared: what it says of itself, and its rows."""

    name: str
    state: TargetState
    rows: DataFrame


class TableVerifyReport(JobReport, frozen=True, kw_only=True):
    """Whether a table equals its topic."""

    topic: str
    table: str


@logged
def verify_table(
    spark: SparkSession, root: Root, table: TableContent, on_progress: OnProgress = ignore_progress
) -> TableVerifyReport:
    """Compares a table with its topic."""
    state = table.state
    ranges, notes = _ranges_kept(root, state)
    topic_rows = _hashed_topic(spark, root, state, ranges)
    table_rows = _hashed(table.rows, state, "_" if state.values != "raw" else "")
    kept = [f"(partition = {number} AND offset >= {first})" for number, (first, _) in enumerate(ranges)]
    table_rows = table_rows.where(" OR ".join(kept))
    with told_in_our_words("compare"):
        on_progress(Progress("summing up the topic", 0, 2))
        went_in = _tally(topic_rows)
        on_progress(Progress("summing up the table", 1, 2))
        came_out = _tally(table_rows)
        proof = Reconciliation(subject=f"{state.topic} and {table.name}", went_in=went_in, came_out=came_out)
        problems = () if proof.holds else tuple(_differences(topic_rows, table_rows, state, table.name))
        on_progress(Progress("summing up the table", 2, 2))
    return TableVerifyReport(
        job="verify",
        topic=state.topic,
        table=table.name,
        reconciliations=(proof,),
        findings=problems,
        notes=tuple(notes),
    )


def _ranges_kept(root: Root, state: TargetState) -> tuple[list[tuple[int, int]], list[str]]:
    """The offsets of each partition that are compared."""
    with root.open() as log:
        if not log.has_topic(state.topic):
            raise NotFoundError(f"the topic {state.topic} of this table does not exist")
        topic: Topic | PartitionedTopic = log.topic(state.topic)
        starts = topic.start_offsets if isinstance(topic, PartitionedTopic) else {0: topic.start_offset}
    notes = [f"values were parsed into columns ({state.values}): compared are offset, key and time"]
    notes = notes if state.values != "raw" else []
    known = state.known_partitions()
    for number, (first, _) in enumerate(known):
        if starts[number] > first:
            where = state.topic if len(known) == 1 else f"{state.topic}, partition {number},"
            notes.append(f"{where} no longer keeps offsets below {starts[number]}: compared from there on")
    return [(max(starts[number], first), end) for number, (first, end) in enumerate(known)], notes


def _hashed_topic(spark: SparkSession, root: Root, state: TargetState, ranges: Sequence[tuple[int, int]]) -> DataFrame:
    columns = ["key", "partition", "offset", "timestamp", *(["value"] if state.values == "raw" else [])]
    parts = [
        read_rows(spark, root, {state.topic: each}, number, columns=",".join(columns))
        for number, each in enumerate(ranges)
        if each[0] < each[1]
    ]
    if not parts:
        return spark.createDataFrame([], "partition int, offset long, hash long")
    return _hashed(reduce(lambda some, more: some.union(more), parts), state, "")


def _hashed(rows: DataFrame, state: TargetState, prefix: str) -> DataFrame:
    from pyspark.sql import functions as sql

    def named(name: str) -> Column:
        return sql.col(f"`{prefix}{name}`")

    has_partitions = state.partitions is not msgspec.UNSET
    # A table that was made before its topic had partitions has none in its older rows: those were all the first one's.
    partition = sql.coalesce(named("partition"), sql.lit(0)) if has_partitions else sql.lit(0)
    key, parts = named("key"), [named("offset"), *([partition] if has_partitions else [])]
    # A hash passes over nulls: without the flag a missing key would be the same as no column.
    parts += [key.isNull(), key]
    parts += [named("value").isNull(), named("value")] if state.values == "raw" else []
    parts.append(sql.unix_micros(named("timestamp")))
    hashed = sql.xxhash64(*parts).alias("hash")
    return rows.select(partition.alias("partition"), named("offset").alias("offset"), hashed)


def _tally(rows: DataFrame) -> Totals:
    from pyspark.sql import functions as sql

    found = rows.agg(
        sql.count(sql.lit(1)).alias("messages"),
        sql.min("offset").alias("first"),
        sql.max("offset").alias("last"),
        sql.sum(sql.col("hash").cast("decimal(38,0)")).alias("digest"),
    ).collect()[0]
    return Totals(
        messages=found.messages,
        first_offset=found.first,
        last_offset=found.last,
        checksum=sum_text("xxhash64", int(found.digest or 0)),
    )


def _differences(topic: DataFrame, table: DataFrame, state: TargetState, name: str) -> Iterator[Finding]:
    """One query: every row that differs gets its kind, and of each kind the first offsets are named."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    where = ["partition", "offset"]
    grouped = table.groupBy(*where).agg(sql.count(sql.lit(1)).alias("rows"), sql.max("hash").alias("found"))
    different = topic.join(grouped, where, "full_outer").withColumn("kind", sql.expr(_KINDS)).where("kind > 0")
    kinds = Window.partitionBy("kind")
    numbered = different.select(
        *where,
        "kind",
        sql.count(sql.lit(1)).over(kinds).alias("count"),
        sql.row_number().over(kinds.orderBy(*where)).alias("number"),
    )
    rows = numbered.where(f"number <= {_NAMED_OFFSETS}").orderBy("kind", "number").collect()
    for kind, text in enumerate(_KIND_TEXTS, 1):
        found = [row for row in rows if row.kind == kind]
        if found:
            has_partitions = state.partitions is not msgspec.UNSET
            listed = ", ".join(f"{row.partition}:{row.offset}" if has_partitions else f"{row.offset}" for row in found)
            more = " ..." if found[0]["count"] > len(found) else ""
            yield Finding(subject=state.topic, path=name, message=f"{found[0]['count']} {text}: offsets {listed}{more}")


# Tables as `verify` compares them: what they say of themselves, and their rows in Spark.


def parquet_content(spark: SparkSession, path: str, settings: StoreSettings) -> TableContent:
    """A table of Parquet files."""
    place = table_location(path, settings)
    commits = TableCommits(place.open_existing())
    state = commits.state()
    if state.newest is None:
        raise NotFoundError(f"there is no table in {place.url}", hint="`tidelog pipeline table` creates one")
    newest = state.newest
    rows = read_files(spark, place, commits.keys_of(state), newest.columns)
    told = TargetState(
        topic=newest.topic,
        values=newest.values,
        columns=newest.columns,
        first_offset=state.first_offset,
        next_offset=newest.next_offset,
        partitions=newest.partitions,
    )
    return TableContent(place.url, told, rows)


def iceberg_content(spark: SparkSession, catalog: Catalog, name: str) -> TableContent:
    """A table of an Iceberg catalog."""
    from pyiceberg.exceptions import NoSuchTableError

    from tidelog.pipeline.tables.iceberg import IcebergLocation, data_files, state_of
    from tidelog.pipeline.tables.table import told_of_catalog

    try:
        with told_of_catalog():
            table = catalog.load_table(name)
    except NoSuchTableError as error:
        raise NotFoundError(f"there is no table {name} in this catalog") from error
    state = state_of(table)
    if state is None:
        raise NotFoundError(f"{name} is not the table of a topic", hint="`tidelog pipeline table` creates one")
    place = IcebergLocation(tuple(sorted(table.io.properties.items())))
    return TableContent(name, state, read_files(spark, place, data_files(table), state.columns))
