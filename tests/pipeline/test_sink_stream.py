"""`df.writeStream.format("tidelog")`: micro-batches become messages once, over restarts, retention and moves."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming.query import StreamingQuery

import tidelog
from tidelog.pipeline.address import find_root

SOURCE = "shop/orders"
SINK = "shop/counts"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def read(spark: SparkSession, root: Path | str, **options: object) -> DataFrame:
    """A stream of the source from its beginning."""
    reader = spark.readStream.format("tidelog").option("root", str(root)).option("subscribe", SOURCE)
    for name, value in {"startingOffsets": "earliest", **options}.items():
        reader = reader.option(name, str(value))
    return reader.load()


def start(frame: DataFrame, root: Path | str, state: Path, mode: str = "append", **options: object) -> StreamingQuery:
    """Writes everything that is there now into the sink."""
    writer = frame.writeStream.format("tidelog").option("root", str(root)).outputMode(mode)
    for name, value in {"topic": SINK, **options}.items():
        writer = writer.option(name, str(value))
    return writer.option("checkpointLocation", str(state)).trigger(availableNow=True).start()


def contents(root: Path | str) -> list[bytes]:
    """The values in the sink."""
    with find_root(root).open() as log:
        return [message.value or b"" for message in log.topic(SINK).read()]


def order(number: int) -> tidelog.Message:
    """One a second."""
    return tidelog.Message(b"order %d" % number, timestamp=BEGIN + timedelta(seconds=number))


def test_counts_survive_restarts_retention_and_a_move(spark: SparkSession, tmp_path: Path) -> None:
    """Counts by time go on where they were, when the query, the hot files and the node of both topics are others."""
    store: dict[str, Any] = {"store": f"file://{tmp_path}/store", "metadata": "bucket", "rotate_max_bytes": 2000}

    def count_some_more(node: Path, first: int, *, limit: int, prunes: bool) -> None:
        with tidelog.open(node, **store, local_retention_bytes=1) as log:
            topic = log.topic(SOURCE)
            topic.append_many(map(order, range(first, first + 50)))
            if prunes:
                topic.ship()
                topic.prune()
            topic.append_many(map(order, range(first + 50, first + 60)))
        stream = read(spark, node, maxOffsetsPerTrigger=limit).withWatermark("timestamp", "0 seconds")
        counts = stream.groupBy(functions.window("timestamp", "10 seconds")).count()
        rows = counts.selectExpr("concat(unix_timestamp(window.start), ' ', count) value")
        start(rows, node, tmp_path / "state").awaitTermination()

    count_some_more(tmp_path / "one", 0, limit=35, prunes=False)
    count_some_more(tmp_path / "one", 60, limit=100, prunes=True)
    with tidelog.open(tmp_path / "one", **store) as log:
        for name in (SOURCE, SINK):
            log.topic(name).seal()
    count_some_more(tmp_path / "two", 120, limit=100, prunes=True)
    found = sorted(contents(tmp_path / "two"))
    # The last ten seconds are not over: a later message could still belong to them.
    assert found == [b"%d 10" % (BEGIN.timestamp() + number) for number in range(0, 170, 10)]


def test_two_streams_into_one_topic(spark: SparkSession, tmp_path: Path) -> None:
    """Queries with checkpoints of their own do not take each other's batches for their own."""
    with tidelog.open(tmp_path) as log:
        log.topic(SOURCE).append_many(map(order, range(60)))
    queries = [
        start(read(spark, tmp_path, maxOffsetsPerTrigger=20).select("value"), tmp_path, tmp_path / name)
        for name in ("state-1", "state-2")
    ]
    for query in queries:
        query.awaitTermination()
    assert Counter(contents(tmp_path)) == {order(number).value: 2 for number in range(60)}


def test_streams_with_one_name(spark: SparkSession, tmp_path: Path) -> None:
    """At once, or one behind the other, as after the loss of a checkpoint: each batch under the name comes in once."""
    with tidelog.open(tmp_path) as log:
        log.topic(SOURCE).append_many(map(order, range(40)))
    for attempts in (("a", "b"), ("c",)):
        rows = read(spark, tmp_path, maxOffsetsPerTrigger=20).select("value")
        queries = [start(rows, tmp_path, tmp_path / attempt, txnAppId="by name") for attempt in attempts]
        for query in queries:
            query.awaitTermination()
        assert contents(tmp_path) == [order(number).value for number in range(40)]


@pytest.mark.parametrize(
    ("mode", "options", "problem"),
    [
        ("complete", {}, "a log can only grow"),
        ("update", {}, "does not support Update mode"),
        (
            "append",
            {"txnVersion": 3, "txnAppId": "a"},
            "txnVersion is not allowed in a stream: Spark numbers its batches",
        ),
    ],
)
def test_mistakes_are_named(
    spark: SparkSession, tmp_path: Path, mode: str, options: dict[str, object], problem: str
) -> None:
    """What a stream cannot do stops it with the reason."""
    with tidelog.open(tmp_path) as log:
        log.topic(SOURCE).append(b"x", key=b"k")
    rows = read(spark, tmp_path).select("value")
    if mode == "complete":
        rows = rows.groupBy("value").count().select("value")
    with pytest.raises(PySparkException, match=problem):
        start(rows, tmp_path, tmp_path / "state", mode, **options).awaitTermination()
