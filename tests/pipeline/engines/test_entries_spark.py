"""`format("tidelog_entries")` in Spark: batch queries, and streams that go on, catch up and notice what is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from tests.pipeline.engines.histories import History
from tests.pipeline.engines.test_entries import expected_rows

from tidelog.engine.changes import Change
from tidelog.engine.entry import CopyObject, operations


def read(spark: SparkSession, root: object, **options: object) -> DataFrame:
    """A batch of entries."""
    return spark.read.format("tidelog_entries").options(**options).load(str(root))  # type: ignore[arg-type]


FEED_COLUMNS = ("seq", "order", "kind", "bucket", "key", "is_refused", "reason")


def rows_of_change(change: Change) -> list[tuple[object, ...]]:
    """What the feed of an engine says of an entry, as rows."""
    is_refused = change.result.status == "refused"
    return [
        (
            *(change.seq, order, type(part).__name__),
            part.dest_bucket if isinstance(part, CopyObject) else part.bucket,
            part.dest_key if isinstance(part, CopyObject) else getattr(part, "key", None),
            *(is_refused, change.result.reason if is_refused else None),
        )
        for order, part in enumerate(operations(change.entry))
    ]


class Stream:
    """A query with a checkpoint of its own, run until everything is read."""

    def __init__(self, spark: SparkSession, directory: Path, root: object) -> None:
        self._spark = spark
        self._checkpoint = str(directory / "checkpoint")
        self._root = str(root)
        self.batches: list[list[Any]] = []
        self.progress: list[dict[str, Any]] = []

    def run(self, **options: object) -> list[Any]:
        """The rows of all batches that were run."""
        rows = self._spark.readStream.format("tidelog_entries").options(**options).load(self._root)  # type: ignore[arg-type]
        self.batches = []
        query = (
            rows.writeStream.foreachBatch(lambda frame, _: self.batches.append(frame.collect()))
            .option("checkpointLocation", self._checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(240)
        self.progress = [json.loads(one.json) for one in query.recentProgress]
        return [row for batch in self.batches for row in batch]


def test_a_batch_query_has_every_entry(spark: SparkSession, tmp_path: Path) -> None:
    """Rows, types and counts are right in Spark, with all columns and with none; the engine's change feed has the same
    rows.
    """
    history = History(tmp_path, "spark")
    with history.open() as engine:
        history.grow(engine)
        frame = read(spark, history.directory, includeValue=True, minPartitions=3)
        expected = expected_rows(history)
        found = [row.asDict() for row in frame.orderBy("seq", "order").collect()]
        assert frame.count() == len(expected)
        feed = [row for change in engine.changes() for row in rows_of_change(change)]
    assert [tuple(row[name] for name in FEED_COLUMNS) for row in found] == feed
    assert any(row["is_refused"] for row in found)
    for row, wanted in zip(found, expected, strict=True):
        metadata = None if wanted["metadata"] is None else dict(wanted["metadata"])
        assert {name: row[name] for name in wanted} == {**wanted, "metadata": metadata}
    assert frame.filter("kind = 'PutObject' and not is_refused").selectExpr("max(length(value))").first() is not None


def test_a_stream_reads_every_entry_once_and_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    """In bites of some entries, over restarts, from the beginning or from a seq, with the lag reported."""
    history = History(tmp_path, "stream")
    with history.open() as engine:
        history.grow(engine)
        stream = Stream(spark, tmp_path, history.store)
        first = stream.run(startingSeq="earliest", maxEntriesPerTrigger=60, minPartitions=2)
        assert len(stream.batches) > 1
        assert [row.seq for row in first] == [row["seq"] for row in expected_rows(history)]
        known = len(first)
        history.grow(engine)
        more = stream.run(startingSeq=10**9)
        assert [(row.seq, row.order) for row in more] == [
            (row["seq"], row["order"]) for row in expected_rows(history)[known:]
        ]
        assert stream.run() == []
        middle = first[known // 2].seq
        late = Stream(spark, tmp_path / "late", history.store).run(startingSeq=middle)
        assert [row.seq for row in late] == [row["seq"] for row in expected_rows(history) if row["seq"] >= middle]
    source = stream.progress[-1]["sources"][0]
    assert source["latestOffset"]["lsn"] >= source["endOffset"]["lsn"] > more[-1].lsn


def test_a_stream_notices_that_the_log_was_dropped(spark: SparkSession, tmp_path: Path) -> None:
    """What was not read yet and is gone is an error, unless loss is allowed: then what is there is read."""
    history = History(tmp_path, "dropped")
    with history.open() as engine:
        history.grow(engine, 15)
        stream = Stream(spark, tmp_path, history.store)
        stream.run(startingSeq="earliest")
        history.grow(engine, 60)
        start_lsn = history.compact()
        with pytest.raises(StreamingQueryException, match="no longer in the log"):
            stream.run()
        rows = stream.run(failOnDataLoss=False)
    assert start_lsn <= rows[0].lsn
    assert [row.seq for row in rows] == [row["seq"] for row in expected_rows(history)][-len(rows) :]
