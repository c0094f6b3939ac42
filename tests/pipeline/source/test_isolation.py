"""Transactions in Spark's source: what is committed is read, once, wherever a part is cut."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.campaign import examples
from tests.transactional import PLAIN, STEPS, Step, fill, outcome, stored, visible

import tidelog
from tidelog.errors import InputError, RetryError
from tidelog.pipeline.source.options import SourceOptions, parse_source_options, source_schema
from tidelog.pipeline.source.topics import TopicReader, read_partition
from tidelog.pipeline.source.topics_stream import TopicStreamReader

TOPIC = "shop/orders"
SCHEMA = source_schema(["offset"])
# A message of a transaction, a plain one, and one of another transaction that is open.
OPEN_END = [PLAIN, Step(1), PLAIN, Step(2), Step(1, commits=True), PLAIN]


def options_of(root: Path | str, *, is_stream: bool = False, **more: object) -> SourceOptions:
    given = {"root": str(root), "subscribe": TOPIC, **{name: str(value) for name, value in more.items()}}
    return parse_source_options(given, is_stream=is_stream)


def offsets(options: SourceOptions) -> list[int]:
    """What a batch reads, without Spark."""
    reader = TopicReader(options, SCHEMA)
    batches = (batch for part in reader.partitions() for batch in read_partition(part, options, SCHEMA))
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


@pytest.fixture(scope="module", params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """Where topics are made, and whether they are read from a bucket alone."""
    return tmp_path_factory.mktemp("isolation"), request.param == "bucket"


def made(place: tuple[Path, bool], steps: Sequence[Step], number: list[int] = [0]) -> str:  # noqa: B006
    """A new root with these steps."""
    number[0] += 1
    directory, store = place[0] / f"data{number[0]}", (place[0] / f"store{number[0]}").as_uri()
    with tidelog.open(directory, store=store, metadata="bucket") if place[1] else tidelog.open(directory) as log:
        topic = log.topic(TOPIC)
        fill(topic, steps)
        if place[1]:
            topic.ship()
    return store if place[1] else str(directory)


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_a_batch_reads_what_is_committed(place: tuple[Path, bool], steps: list[Step]) -> None:
    """Whole, it is what the library reads; cut into parts, nothing that is open or aborted is among the rows."""
    root = made(place, steps)
    assert offsets(options_of(root, isolation="read_uncommitted")) == stored(steps)
    if steps:
        assert offsets(options_of(root)) == visible(steps)
    cut = offsets(options_of(root, maxRecordsPerPartition=3))
    assert cut == sorted(set(cut))
    decided = {at for at in stored(steps) if outcome(steps, at)}
    assert {*visible(steps)} <= {*cut} <= decided


def test_an_open_transaction_is_waited_for(tmp_path: Path) -> None:
    """A stream's batch has all of its range, and so waits; without a time to wait it would be lost to the stream."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic(TOPIC)
        fill(topic, OPEN_END)
        topic.flush()
        options = options_of(tmp_path / "data", is_stream=True, startingOffsets="earliest")
        assert options.open_transaction_seconds == 900
        reader = TopicStreamReader(options, SCHEMA)
        end = reader.latestOffset(start := reader.initialOffset(), ReadAllAvailable())
        (part,) = reader.partitions(start, end)
        ending = threading.Timer(0.3, fill, (topic, [Step(2, commits=True)]))
        ending.start()
        found = [each for batch in reader.read(part) for each in batch.column("offset").to_pylist()]
        ending.join()
        assert found == [0, 1, 2, 3, 5]
        reader.stop()


def test_a_transaction_that_stays_open_is_told(tmp_path: Path) -> None:
    """The error names the log and what to do; a batch leaves it out unless it is to wait."""
    with tidelog.open(tmp_path / "data") as log:
        fill(log.topic(TOPIC), OPEN_END)
    assert offsets(options_of(tmp_path / "data")) == [0, 1, 2]
    with pytest.raises(RetryError, match="shop/orders: a transaction before offset 6 is still open after"):
        offsets(options_of(tmp_path / "data", openTransactionTimeout="100ms"))
    with pytest.raises(InputError, match="isolation is read_committed or read_uncommitted, not dirty"):
        options_of(tmp_path / "data", isolation="dirty")


def test_spark_reads_what_is_committed(spark: SparkSession, tmp_path: Path) -> None:
    """By default; the option shows everything."""
    with tidelog.open(tmp_path / "data") as log:
        fill(log.topic(TOPIC), [Step(1), Step(2), Step(1, commits=False), Step(2, commits=True), PLAIN])
    reader = spark.read.format("tidelog").options(root=str(tmp_path / "data"), subscribe=TOPIC)
    assert sorted(row.offset for row in reader.load().collect()) == [1, 4]
    assert sorted(row.offset for row in reader.option("isolation", "read_uncommitted").load().collect()) == [0, 1, 4]
