"""Topics with partitions as a source: all partitions of a topic, each with its own offsets."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import tidelog
from tidelog.errors import InputError, OffsetOutOfRangeError
from tidelog.pipeline.source.options import parse_source_options, source_schema
from tidelog.pipeline.source.topics import TopicReader, read_partition
from tidelog.pipeline.source.topics_stream import TopicStreamReader

TOPIC = "shop/orders"
COUNTS = {0: 10, 1: 20, 2: 30}
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
ALL = ReadAllAvailable()
Found = list[tuple[str, int, int, bytes]]


def fill(log: tidelog.LogDirectory, counts: dict[int, int]) -> None:
    """So many messages in each partition, a second apart."""
    topic = cast(tidelog.PartitionedTopic, log.topic(TOPIC))
    for number, count in counts.items():
        first = topic.partition(number).next_offset
        messages = [
            tidelog.Message(b"%d-%d" % (number, offset), timestamp=BEGIN + timedelta(seconds=offset))
            for offset in range(first, first + count)
        ]
        topic.append_many(messages, partition=number, sync=True)


@pytest.fixture(scope="module", params=["directory", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three partitions, on a disk without a store, or all of it in a bucket alone."""
    place = tmp_path_factory.mktemp("partitions")
    store = None if request.param == "directory" else (place / "store").as_uri()
    with tidelog.open(place / "data", store=store, metadata=None if store is None else "bucket") as log:
        log.topic(TOPIC, partitions=3)
        fill(log, COUNTS)
        log.topic("shop/plain").append(b"x")
        if store is not None:
            log.topic(TOPIC).ship()
    return store or str(place / "data")


def rows(root: str | Path, **options: object) -> Found:
    """What a batch reads, without Spark."""
    given = {"root": str(root), "subscribe": TOPIC, **{name: str(value) for name, value in options.items()}}
    parsed = parse_source_options({name: value for name, value in given.items() if value != "None"})
    schema = source_schema(["topic", "partition", "offset", "value"])
    reader = TopicReader(parsed, schema)
    return [
        tuple(row.values())
        for part in reader.partitions()
        for batch in read_partition(part, parsed, schema)
        for row in batch.to_pylist()
    ]


def expected(ranges: dict[int, tuple[int, int]]) -> Found:
    return [
        (TOPIC, number, offset, b"%d-%d" % (number, offset))
        for number, (first, stop) in ranges.items()
        for offset in range(first, stop)
    ]


def test_a_topic_is_all_its_partitions(root: str) -> None:
    """Rows name the topic and the number of the partition, whether they are named, assigned or matched."""
    whole = expected({number: (0, count) for number, count in COUNTS.items()})
    assert rows(root) == whole
    assert rows(root, subscribe=None, assign=json.dumps({TOPIC: [2, 0]})) == expected({0: (0, 10), 2: (0, 30)})
    assert rows(root, subscribe=None, subscribePattern="shop/ord.*") == whole
    assert rows(root, subscribe=None, subscribePattern="shop/orders-part-.*") == []
    assert {row[:2] for row in rows(root, subscribe=f"{TOPIC}-part-1")} == {(f"{TOPIC}-part-1", 0)}


def test_places_are_those_of_partitions(root: str) -> None:
    """Offsets and times by partition; those that are not named keep the default."""
    starting, ending = {TOPIC: {"0": 4, "1": -2}}, {TOPIC: {"0": -1, "2": 25}}
    given = {"startingOffsets": json.dumps(starting), "endingOffsets": json.dumps(ending)}
    assert rows(root, **given) == expected({0: (4, 10), 1: (0, 20), 2: (0, 25)})
    at = {second: int((BEGIN + timedelta(seconds=second)).timestamp() * 1000) for second in (5, 9, 15)}
    assert rows(root, startingTimestamp=at[9]) == expected({0: (9, 10), 1: (9, 20), 2: (9, 30)})
    for times in ({TOPIC: {"0": at[5], "1": at[15]}}, {TOPIC: at[5]}):
        found = Counter(row[1] for row in rows(root, startingOffsetsByTimestamp=json.dumps(times)))
        assert found == ({0: 5, 1: 5, 2: 30} if isinstance(times[TOPIC], dict) else {0: 5, 1: 15, 2: 25})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": json.dumps({TOPIC: {"3": 0}})}, "partition 3 of shop/orders, which is not read"),
        ({"startingOffsets": json.dumps({TOPIC: 5})}, "one offset is given for all"),
        ({"subscribe": None, "assign": json.dumps({TOPIC: [3]})}, "has partitions 0 to 2"),
        ({"subscribe": None, "assign": json.dumps({"shop/plain": [1]})}, "has partition 0 alone"),
        ({"subscribe": None, "assign": json.dumps({TOPIC: [1, 1]})}, "each partition once"),
        (
            {"subscribe": None, "assign": json.dumps({TOPIC: [0]}), "endingOffsets": json.dumps({TOPIC: {"1": 5}})},
            "partition 1 of shop/orders, which is not read",
        ),
        ({"subscribe": f"{TOPIC},{TOPIC}-part-0"}, "read twice"),
    ],
)
def test_slips_are_refused(root: str, options: dict[str, object], message: str) -> None:
    """A partition that there is not, or is not read, would be ignored otherwise."""
    with pytest.raises(InputError, match=message):
        rows(root, **options)


def test_a_partition_that_lost_its_beginning_is_data_loss(root: str) -> None:
    """Of that partition alone; with failOnDataLoss=false what is there is read."""
    given = {"startingOffsets": json.dumps({TOPIC: {"1": 25}})}
    with pytest.raises(OffsetOutOfRangeError, match="shop/orders-part-1: it ends at offset 20"):
        rows(root, **given)
    assert rows(root, failOnDataLoss="false", **given) == expected({0: (0, 10), 2: (0, 30)})


def stream(root: str | Path, **options: str) -> TopicStreamReader:
    given = {"root": str(root), "subscribe": TOPIC, "startingOffsets": "earliest", **options}
    return TopicStreamReader(parse_source_options(given), source_schema())


def read(reader: TopicStreamReader, start: dict[str, Any], end: dict[str, Any]) -> Counter[int]:
    """How many rows of each partition a batch has."""
    return Counter(
        number
        for part in reader.partitions(start, end)
        for batch in read_partition(part, reader._options, source_schema())
        for number in batch.column("partition").to_pylist()
    )


@pytest.mark.parametrize("has_store", [False, True])
def test_a_stream_picks_up_partitions_that_are_added(tmp_path: Path, has_store: bool) -> None:
    """They begin at their oldest message; the checkpoint has an offset for each, and goes on from one without any."""
    with tidelog.open(tmp_path / "data", store=(tmp_path / "store").as_uri() if has_store else None) as log:
        log.topic(TOPIC).append_many([b"x"] * 4, sync=True)
        reader = stream(tmp_path / "data")
        start = reader.initialOffset()
        assert start[TOPIC] == {"0": 0}
        log.topic(TOPIC, partitions=3)
        fill(log, {1: 5})
        end = reader.latestOffset(start, ALL)
        assert end[TOPIC] == {"0": 4, "1": 5, "2": 0}
        assert read(reader, start, end) == {0: 4, 1: 5}
        fill(log, {0: 1, 2: 6})
        later = stream(tmp_path / "data").latestOffset(end, ALL)
        assert later[TOPIC] == {"0": 5, "1": 5, "2": 6}
        assert set(later["log_ids"][TOPIC]) == {"0", "1", "2"}
        assert read(reader, end, later) == {0: 1, 2: 6}
        assert stream(tmp_path / "data").reportLatestOffset() == {TOPIC: later[TOPIC]}


def test_a_limit_is_divided_over_the_partitions(root: str) -> None:
    """By what waits in each of them."""
    reader = stream(root)
    end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(30))
    assert end[TOPIC] == {"0": 5, "1": 10, "2": 15}


def test_a_topic_that_was_made_again_with_partitions_is_noticed(tmp_path: Path) -> None:
    """Its partition 0 is another log than the topic was."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC).append_many([b"x"] * 4, sync=True)
        strict, lossy = stream(tmp_path / "data"), stream(tmp_path / "data", failOnDataLoss="false")
        start = lossy.initialOffset()
        log.delete_topic(TOPIC)
        log.topic(TOPIC, partitions=2)
        fill(log, {0: 2, 1: 3})
        with pytest.raises(OffsetOutOfRangeError, match="made again"):
            strict.latestOffset(start, ALL)
        end = lossy.latestOffset(start, ALL)
        assert read(lossy, start, end) == {0: 2, 1: 3}
        log.delete_topic(TOPIC)
        with pytest.raises(OffsetOutOfRangeError, match=r"shop/orders(-part-1)? is gone"):
            stream(tmp_path / "data").latestOffset(end, ALL)


def test_spark_reads_partitions(spark: SparkSession, root: str) -> None:
    """The same through Spark, as a batch and as a stream."""
    frame = spark.read.format("tidelog").option("root", root).option("subscribe", TOPIC).load()
    assert {row.partition: row["count"] for row in frame.groupBy("topic", "partition").count().collect()} == COUNTS
    seen: list[int] = []
    query = (
        spark.readStream.format("tidelog")
        .options(root=root, subscribe=TOPIC, startingOffsets="earliest")
        .load()
        .writeStream.foreachBatch(lambda batch, _: seen.extend(row.partition for row in batch.collect()))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert Counter(seen) == COUNTS
