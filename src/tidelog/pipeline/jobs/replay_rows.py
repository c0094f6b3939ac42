"""Rows on their way into a topic: written as one consignment, and counted on both sides.

Invariants
- The count and the sum of what goes in are taken from the rows as they are written, not from another look at the
  source; those of what came out are read back from the topic.
- The sum is over the columns that were chosen, of key, value, headers and timestamp; it is the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.errors import DataError
from tidelog.pipeline.jobs.proof import Side, Tally
from tidelog.pipeline.jobs.replay_steps import ReplaySteps, Step
from tidelog.pipeline.jobs.spark_errors import told_in_our_words
from tidelog.pipeline.jobs.topic_rows import read_rows, root_options
from tidelog.pipeline.root import Root
from tidelog.pipeline.sink_options import check_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

COLUMNS = ("key", "value", "headers", "timestamp")


class Written:
    """What the steps of a run came to, added up."""

    def __init__(self) -> None:
        self.went_in = Tally(kind="rows")
        self.came_out = Tally(kind="rows")
        self.first_offset: int | None = None
        self.next_offset: int | None = None
        self.unproven_messages = 0

    def sides(self) -> tuple[Side, Side]:
        """For a proof. The offsets of source and target are not comparable, and left out."""
        return _side(self.went_in), _side(self.came_out)


def _side(tally: Tally) -> Side:
    text = tally.checksum.replace("rows:", "content:")
    return Side(messages=tally.messages, first_offset=None, last_offset=None, checksum=text)


class StepWriter:
    """Writes the rows of steps into a topic."""

    def __init__(self, spark: SparkSession, root: Root, topic: str, steps: ReplaySteps) -> None:
        self.written = Written()
        self._spark = spark
        self._root = root
        self._topic = topic
        self._steps = steps

    def write(self, step: Step, rows: DataFrame) -> None:
        """Brings the rows of a step into the topic, or finds that they are there, and reads them back."""
        check_columns(rows.schema, self._topic)
        rows, columns = _with_times(rows), [name for name in COLUMNS if name in rows.columns]
        status = self._steps.status(step)
        if status.state in ("unknown", "refused"):
            went_in = self._append(step, rows, columns)
        else:
            with told_in_our_words("the rows cannot be read"):
                went_in = _tally(rows.agg(*_sums(columns)).first())
            self._steps.wait(step)
        self._read_back(step, went_in, columns)

    def _append(self, step: Step, rows: DataFrame, columns: Sequence[str]) -> Tally:
        from pyspark.sql import Observation

        observed = Observation()
        options = {"topic": self._topic, "txnAppId": self._steps.app, "txnVersion": str(step.end)}
        target = rows.observe(observed, *_sums(columns)).write.format("tidelog").options(**root_options(self._root))
        with told_in_our_words("the rows cannot be written"):
            target.options(**options).mode("append").save()
        counted = observed.get
        return _summed(counted["messages"], counted["digest"])

    def _read_back(self, step: Step, went_in: Tally, columns: Sequence[str]) -> None:
        status, written = self._steps.status(step), self.written
        if status.first_offset is None or status.next_offset is None:
            if went_in.messages and status.state != "taken":
                raise DataError(f"the rows of {step.first} to {step.end} were written, and are not in {self._topic}")
            written.unproven_messages += went_in.messages  # another run is further, and its rows are the newest known
            return
        written.went_in += went_in
        written.first_offset = status.first_offset if written.first_offset is None else written.first_offset
        written.next_offset = status.next_offset
        if status.first_offset < status.next_offset:
            offsets = {self._topic: (status.first_offset, status.next_offset)}
            rows = read_rows(self._spark, self._root, offsets, columns=",".join(columns))
            written.came_out += _tally(rows.agg(*_sums(columns)).first())


def _with_times(rows: DataFrame) -> DataFrame:
    """A row that was to have a time and has none gets that of the write here, so that it is counted as it is stored."""
    from pyspark.sql import functions as sql

    if "timestamp" not in rows.columns:
        return rows
    return rows.withColumn("timestamp", sql.coalesce("timestamp", sql.current_timestamp()))


def _tally(row: Row | None) -> Tally:
    return Tally(kind="rows") if row is None else _summed(row["messages"], row["digest"])


def _summed(messages: int, digest: object) -> Tally:
    return Tally(messages=messages, digest=int(str(digest or 0)), kind="rows")


def _sums(columns: Sequence[str]) -> list[Column]:
    """How many rows there are, and the sum of their hashes. As decimals: a sum of longs could leave their range."""
    from pyspark.sql import functions as sql

    parts = [part for name in columns for part in (sql.col(name).isNull(), _plain(name))]
    digest = sql.sum(sql.xxhash64(*parts).cast("decimal(20,0)"))
    return [sql.count(sql.lit(1)).alias("messages"), digest.alias("digest")]


def _plain(name: str) -> Column:
    """A column as it is read back, whether it was written as text or as bytes."""
    from pyspark.sql import functions as sql

    return sql.col(name).cast("binary") if name in ("key", "value") else sql.col(name)
