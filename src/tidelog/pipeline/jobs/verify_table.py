"""The proof that a table is its topic: Spark counts and sums up both sides, and finds the rows that differ.

Invariants
- Both sides are computed by the same expressions over offset, key, value and time. Where a table has parsed its values,
  those are left out: what they were cannot be told from columns.
- The topic is compared between the offsets that the table says it has, as far as the topic still keeps them.
- Where the sums differ, offsets are named: missing from the table, twice in it, unknown to the topic, or different.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidelog.errors import NotFoundError
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Problem, Progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof, Tally, side_of
from tidelog.pipeline.jobs.spark_errors import told_in_our_words
from tidelog.pipeline.jobs.table_target import TargetState
from tidelog.pipeline.jobs.topic_rows import read_rows
from tidelog.pipeline.root import Root

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_MODULUS = 1 << 64
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


class TableProofReport(JobReport, frozen=True, kw_only=True):
    """Whether a table equals its topic."""

    topic: str
    table: str


def verify_table(
    spark: SparkSession, root: Root, table: TableContent, on_progress: OnProgress = ignore_progress
) -> TableProofReport:
    """Compares a table with its topic."""
    began = time.monotonic()
    state = table.state
    first, notes = _first_kept(root, state)
    topic_rows = _hashed_topic(spark, root, state, first)
    table_rows = _hashed(table.rows, state, "_" if state.values != "raw" else "")
    table_rows = table_rows.where(f"offset >= {first}")
    with told_in_our_words("compare"):
        on_progress(Progress("summing up the topic", 0, 2))
        went_in = _tally(topic_rows)
        on_progress(Progress("summing up the table", 1, 2))
        came_out = _tally(table_rows)
        proof = Proof(subject=f"{state.topic} and {table.name}", went_in=side_of(went_in), came_out=side_of(came_out))
        problems = () if proof.holds else tuple(_differences(topic_rows, table_rows, state, table.name))
        on_progress(Progress("summing up the table", 2, 2))
    return TableProofReport(
        job="verify",
        topic=state.topic,
        table=table.name,
        proofs=(proof,),
        problems=problems,
        notes=tuple(notes),
        seconds=round(time.monotonic() - began, 3),
    )


def _first_kept(root: Root, state: TargetState) -> tuple[int, list[str]]:
    with root.open() as log:
        if not log.has_topic(state.topic):
            raise NotFoundError(f"there is no topic {state.topic}, of which this is the table")
        oldest = log.topic(state.topic).start_offset
    notes = [f"values were parsed into columns ({state.values}): compared are offset, key and time"]
    notes = notes if state.values != "raw" else []
    if oldest > state.first_offset:
        notes.append(f"{state.topic} no longer keeps offsets below {oldest}: compared from there on")
    return max(oldest, state.first_offset), notes


def _hashed_topic(spark: SparkSession, root: Root, state: TargetState, first: int) -> DataFrame:
    columns = ["key", "offset", "timestamp"] if state.values != "raw" else ["key", "value", "offset", "timestamp"]
    if first >= state.next_offset:
        return spark.createDataFrame([], "offset long, hash long")
    rows = read_rows(spark, root, {state.topic: (first, state.next_offset)}, columns=",".join(columns))
    return _hashed(rows, state, "")


def _hashed(rows: DataFrame, state: TargetState, prefix: str) -> DataFrame:
    from pyspark.sql import functions as sql

    def named(name: str) -> Column:
        return sql.col(f"`{prefix}{name}`")

    key, parts = named("key"), [named("offset")]
    # A hash passes over nulls: without the flag a missing key would be the same as no column.
    parts += [key.isNull(), key]
    parts += [named("value").isNull(), named("value")] if state.values == "raw" else []
    parts.append(sql.unix_micros(named("timestamp")))
    return rows.select(named("offset").alias("offset"), sql.xxhash64(*parts).alias("hash"))


def _tally(rows: DataFrame) -> Tally:
    from pyspark.sql import functions as sql

    found = rows.agg(
        sql.count(sql.lit(1)).alias("messages"),
        sql.min("offset").alias("first"),
        sql.max("offset").alias("last"),
        sql.sum(sql.col("hash").cast("decimal(38,0)")).alias("digest"),
    ).collect()[0]
    return Tally(
        messages=found.messages,
        first_offset=found.first,
        last_offset=found.last,
        digest=int(found.digest or 0) % _MODULUS,
        kind="xxhash64",
    )


def _differences(topic: DataFrame, table: DataFrame, state: TargetState, name: str) -> Iterator[Problem]:
    """One query: every row that differs gets its kind, and of each kind the first offsets are named."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    grouped = table.groupBy("offset").agg(sql.count(sql.lit(1)).alias("rows"), sql.max("hash").alias("found"))
    different = topic.join(grouped, "offset", "full_outer").withColumn("kind", sql.expr(_KINDS)).where("kind > 0")
    kinds = Window.partitionBy("kind")
    numbered = different.select(
        "offset",
        "kind",
        sql.count(sql.lit(1)).over(kinds).alias("count"),
        sql.row_number().over(kinds.orderBy("offset")).alias("number"),
    )
    rows = numbered.where(f"number <= {_NAMED_OFFSETS}").orderBy("kind", "number").collect()
    for kind, text in enumerate(_KIND_TEXTS, 1):
        found = [row for row in rows if row.kind == kind]
        if found:
            listed = ", ".join(str(row.offset) for row in found)
            more = " ..." if found[0]["count"] > len(found) else ""
            yield Problem(topic=state.topic, place=name, reason=f"{found[0]['count']} {text}: offsets {listed}{more}")
