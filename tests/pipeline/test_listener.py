"""The lag of streaming queries, as Spark's listener tells it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import QueryProgressEvent, QueryTerminatedEvent

import tidelog
from tidelog.pipeline.listener import LagListener, TopicLag

OURS = "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream@1"
QUERY = "00000000-0000-0000-0000-000000000001"


def progress(*sources: tuple[str, object, object]) -> QueryProgressEvent:
    """What Spark tells after a batch: description, end and latest offset of each source."""
    document = {
        "id": QUERY,
        "runId": QUERY,
        "name": "counts",
        "timestamp": "2026-01-01T00:00:00.000Z",
        "batchId": 3,
        "batchDuration": 10,
        "numInputRows": 1,
        "inputRowsPerSecond": 1.0,
        "processedRowsPerSecond": 1.0,
        "durationMs": {},
        "eventTime": {},
        "stateOperators": [],
        "sources": [
            {
                "description": description,
                "startOffset": None,
                "endOffset": end,
                "latestOffset": latest,
                "numInputRows": 1,
                "inputRowsPerSecond": 1.0,
                "processedRowsPerSecond": 5.0,
            }
            for description, end, latest in sources
        ],
        "sink": {"description": "noop", "numOutputRows": 1},
        "observedMetrics": {},
    }
    return QueryProgressEvent.fromJson({"progress": document})


def test_the_lag_is_what_lies_between_the_batch_and_the_end_of_the_topic(caplog: pytest.LogCaptureFixture) -> None:
    """Each topic has its own; one that lags too much is a warning."""
    told: list[Sequence[TopicLag]] = []
    listener = LagListener(told.append, warn_messages=100)
    with caplog.at_level(logging.INFO, "tidelog.pipeline"):
        ids = {"log_ids": {"a/b": "0" * 32, "a/c": "1" * 32}}
        ends, latest = {"a/b": {"0": 30}, "a/c": {"0": 5}, **ids}, {"a/b": {"0": 130}, "a/c": {"0": 7}}
        listener.onQueryProgress(progress((OURS, ends, latest)))
    assert [(one.topic, one.lag_messages) for one in listener.lags()] == [("a/b", 100), ("a/c", 2)]
    assert [one.batch_id for batch in told for one in batch] == [3, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "query counts is 100 messages behind the end of a/b" in caplog.text


def test_sources_of_other_kinds_are_passed_over() -> None:
    """Kafka's offsets look alike, others are numbers or absent; none of them is a topic's."""
    listener = LagListener()
    offsets = {"a/b": {"0": 30}}
    listener.onQueryProgress(progress(("KafkaV2[Subscribe[a/b]]", offsets, offsets)))
    listener.onQueryProgress(progress((OURS, 7, 9), (OURS, offsets, None), (OURS, {"a/b": {"x": 1}}, offsets)))
    assert listener.lags() == ()


def test_partitions_have_their_own_lag(caplog: pytest.LogCaptureFixture) -> None:
    """One that was added since the batch was planned has none yet."""
    listener = LagListener()
    ids = {"log_ids": {"a/b": {"0": "0" * 32, "1": "1" * 32}}}
    with caplog.at_level(logging.INFO, "tidelog.pipeline"):
        latest = {"a/b": {"0": 7, "1": 30, "2": 1}}
        listener.onQueryProgress(progress((OURS, {"a/b": {"0": 5, "1": 10}, **ids}, latest)))
    assert [(one.topic, one.partition, one.lag_messages) for one in listener.lags()] == [("a/b", 1, 20), ("a/b", 0, 2)]
    assert "20 messages behind the end of a/b, partition 1" in caplog.text


def test_a_query_that_ended_has_no_lag() -> None:
    """It is forgotten when Spark says that it has terminated."""
    listener = LagListener()
    listener.onQueryProgress(progress((OURS, {"a/b": {"0": 1}}, {"a/b": {"0": 2}})))
    ended = {"id": QUERY, "runId": QUERY, "exception": None, "errorClassOnException": None}
    listener.onQueryTerminated(QueryTerminatedEvent.fromJson(ended))
    assert listener.lags() == ()


def test_a_callback_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The listener goes on, and the lag is known all the same."""

    def fail(_: Sequence[TopicLag]) -> None:
        raise RuntimeError("nobody answers")

    listener = LagListener(fail)
    listener.onQueryProgress(progress((OURS, {"a/b": {"0": 1}}, {"a/b": {"0": 2}})))
    assert "nobody answers" in caplog.text
    assert len(listener.lags()) == 1


def test_a_running_query_reports_its_lag(spark: SparkSession, tmp_path: Path) -> None:
    """A query that may take 30 messages at a time of 100 is 70 behind after its first batch, and 0 in the end."""
    batches: list[TopicLag] = []
    listener = LagListener(batches.extend)
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append_many([b"x"] * 100)
    spark.streams.addListener(listener)
    try:
        stream = spark.readStream.format("tidelog").option("root", str(tmp_path / "data")).option("subscribe", "a/b")
        stream = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 30)
        target = stream.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = target.queryName("lagging").trigger(availableNow=True).start()
        assert query.awaitTermination(240)
        deadline = time.monotonic() + 120
        while (len(batches) < 4 or listener.lags()) and time.monotonic() < deadline:
            time.sleep(0.05)  # Spark tells its listeners from a thread of its own
    finally:
        spark.streams.removeListener(listener)
    assert [one.lag_messages for one in batches] == [70, 40, 10, 0]
    assert {one.query_name for one in batches} == {"lagging"}
    assert listener.lags() == ()
