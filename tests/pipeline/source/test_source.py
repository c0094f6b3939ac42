"""`format("tidelog")` in Spark: rows, columns, offsets and times, in batches and as a stream."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import tidelog

TOPIC = "shop/orders"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 messages in the store and 200 on the disk alone, a second apart; another topic with ten."""
    root = tmp_path_factory.mktemp("spark-shop")
    with tidelog.open(root / "data", store=f"file://{root}/store", metadata="bucket") as log:
        topic = log.topic(TOPIC)
        for number in range(600):
            if number == 400:
                topic.ship()
            topic.append(_message(number))
        log.topic("shop/returns").append_many([b"r%d" % number for number in range(10)])
    return root


def _message(number: int) -> tidelog.Message:
    headers = {"origin": b"web", "n": b"%d" % number} if number % 4 == 0 else {}
    key = b"customer-%d" % (number % 7) if number % 5 else None
    return tidelog.Message(b"order %d" % number, key=key, headers=headers, timestamp=BEGIN + timedelta(seconds=number))


def _load(spark: SparkSession, root: Path | str, **options: object) -> DataFrame:
    reader = spark.read.format("tidelog").option("root", str(root))
    given = {"subscribe": TOPIC, **options}
    for name, value in given.items():
        if value is not None:
            reader = reader.option(name, str(value))
    return reader.load()


def _offsets(frame: DataFrame) -> list[int]:
    return sorted(row.offset for row in frame.select("offset").collect())


def test_rows_are_the_messages(spark: SparkSession, shop: Path) -> None:
    """Every column of every message is what was appended, from the store and from the disk alike."""
    rows = _load(spark, shop / "data", includeHeaders="true").orderBy("offset").collect()
    assert len(rows) == 600
    for number, row in enumerate(rows):
        message = _message(number)
        assert (row.offset, row.topic, row.partition, row.timestampType) == (number, TOPIC, 0, 0)
        assert row.value == message.value
        assert row.key == message.key
        assert row.timestamp.replace(tzinfo=UTC) == message.timestamp
        assert {one.key: bytes(one.value) for one in row.headers or []} == message.headers


def test_a_bucket_alone_is_enough(spark: SparkSession, shop: Path) -> None:
    """With the catalog in the bucket a store URL finds the topics, and gives what was shipped."""
    assert _offsets(_load(spark, f"file://{shop}/store")) == list(range(400))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": json.dumps({TOPIC: {"0": 100}}), "endingOffsets": json.dumps({TOPIC: 450})}, (100, 450)),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, (0, 600)),
        (
            {"startingOffsets": json.dumps({TOPIC: {"0": -2}}), "endingOffsets": json.dumps({TOPIC: {"0": -1}})},
            (0, 600),
        ),
        ({"startingTimestamp": _message(200).timestamp}, (200, 600)),
        ({"endingTimestamp": _message(450).timestamp, "startingOffsets": json.dumps({TOPIC: 440})}, (440, 450)),
        ({"startingOffsetsByTimestamp": {TOPIC: _message(590).timestamp}}, (590, 600)),
        ({"endingTimestamp": BEGIN + timedelta(days=1), "startingOffsets": json.dumps({TOPIC: 599})}, (599, 600)),
        ({"minPartitions": 7, "startingOffsets": json.dumps({TOPIC: 3})}, (3, 600)),
        ({"maxRecordsPerPartition": 11, "endingOffsets": json.dumps({TOPIC: 100})}, (0, 100)),
    ],
)
def test_options_say_what_is_read(
    spark: SparkSession, shop: Path, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    """Offsets, times and splits, with exclusive ends, as Spark's Kafka source has them."""
    given = {name: _milliseconds(value) for name, value in options.items()}
    assert _offsets(_load(spark, shop / "data", **given)) == list(range(*expected))


def _milliseconds(value: object) -> object:
    if isinstance(value, datetime):
        return int(value.timestamp() * 1000)
    return json.dumps({name: _milliseconds(one) for name, one in value.items()}) if isinstance(value, dict) else value


def test_splitting_makes_more_tasks(spark: SparkSession, shop: Path) -> None:
    """A topic has one partition in Kafka's words, and as many tasks as are wanted here."""
    assert _load(spark, shop / "data", minPartitions=7).rdd.getNumPartitions() >= 7
    assert _load(spark, shop / "data", maxRecordsPerPartition=100).rdd.getNumPartitions() >= 6


def test_columns_read_less(spark: SparkSession, shop: Path) -> None:
    """Only what is named is in the frame, in that order; also no data column at all."""
    frame = _load(spark, shop / "data", columns="offset, value")
    assert frame.columns == ["offset", "value"]
    assert frame.where("offset = 7").collect()[0].value == b"order 7"
    assert _load(spark, shop / "data", columns="topic").distinct().collect()[0].topic == TOPIC


def test_several_topics_and_patterns(spark: SparkSession, shop: Path) -> None:
    """A list, a pattern, and Kafka's assignment name topics."""
    for options in (
        {"subscribe": "shop/orders,shop/returns"},
        {"subscribe": None, "subscribePattern": "shop/.*"},
        {"subscribe": None, "assign": json.dumps({"shop/orders": [0], "shop/returns": [0]})},
    ):
        counts = _load(spark, shop / "data", **options).groupBy("topic").count().collect()
        assert {row.topic: row["count"] for row in counts} == {"shop/orders": 600, "shop/returns": 10}
    nothing = _load(spark, shop / "data", subscribe=None, subscribePattern="none/.*")
    assert nothing.count() == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subscribe": None}, "exactly one of subscribe"),
        ({"startingOfsets": "earliest"}, "Did you mean startingOffsets"),
        ({"columns": "value,nothing"}, "there is no column nothing"),
        ({"minPartitions": "0"}, "minPartitions"),
        ({"startingOffsets": "latest"}, "cannot start at latest"),
        ({"subscribe": "shop/nothing"}, "there is no topic shop/nothing"),
        ({"startingTimestamp": str(2**52)}, "no message of the starting time"),
        ({"endingOffsets": json.dumps({TOPIC: 601})}, "failOnDataLoss"),
        ({"startingOffsets": json.dumps({TOPIC: 601})}, "was to be read from 601 on"),
    ],
)
def test_mistakes_are_named(spark: SparkSession, shop: Path, options: dict[str, Any], problem: str) -> None:
    """An option that is wrong stops the query and says which one and why."""
    with pytest.raises((AnalysisException, PySparkException), match=problem):
        _load(spark, shop / "data", **options).collect()


@pytest.mark.parametrize(
    ("format_name", "place", "options", "problem"),
    [
        ("tidelog", "nowhere", {"subscribe": TOPIC}, "there is no such directory"),
        ("tidelog", "nowhere", {"subscribePattern": ".*", "failOnDataLoss": "false"}, "there is no such directory"),
        ("tidelog", "data", {"subscribe": f"{TOPIC},shop/nothing"}, "there is no topic shop/nothing"),
        ("tidelog", "data", {"assign": '{"shop/nothing": [0]}'}, "there is no topic shop/nothing"),
        ("tidelog", "data", {"assign": '{"shop/orders": [1]}'}, "assign names partition 1 of shop/orders"),
        ("tidelog", "data", {"subscribe": TOPIC, "startingOffsets": '{"shop/orders": {"1": 0}}'}, "is not read"),
        ("tidelog_entries", "nowhere", {}, "there is no engine"),
        ("tidelog_entries", "store", {}, "there is no engine called main"),
        ("tidelog_objects", "nowhere", {}, "there is no engine"),
        ("tidelog_objects", "store", {}, "there is no engine called main"),
    ],
)
def test_place_and_topics_that_are_not_there_are_told_at_load(
    spark: SparkSession, shop: Path, format_name: str, place: str, options: dict[str, str], problem: str
) -> None:
    """A stream that is started at night, or a frame of a long program, fails where it is written, in one line."""
    root = (shop / place).as_uri() if place == "store" else str(shop / place)
    for reader in (spark.read, spark.readStream):
        with pytest.raises(AnalysisException, match=problem) as raised:
            reader.format(format_name).options(root=root, **options).load()
        assert "Traceback" not in str(raised.value)


def test_topic_that_may_be_gone_is_not_looked_for_at_load(spark: SparkSession, shop: Path) -> None:
    """With `failOnDataLoss=false` a query is started again after its topic has gone, and a pattern matches later."""
    for options in ({"subscribe": "shop/nothing", "failOnDataLoss": "false"}, {"subscribePattern": "none/.*"}):
        assert spark.readStream.format("tidelog").options(root=str(shop / "data"), **options).load().isStreaming


def test_what_is_gone_is_data_loss_unless_allowed(spark: SparkSession, tmp_path: Path) -> None:
    """Offsets that retention has deleted fail the query, or are passed over without a doubled row."""
    with tidelog.open(tmp_path, rotate_max_bytes=1024) as log:
        topic = log.topic(TOPIC, retention_bytes=2048)
        for number in range(100):
            topic.append(b"%0100d" % number)
        topic.flush()
        topic.prune()
        oldest = topic.start_offset
        assert oldest > 0
        start = {"startingOffsets": json.dumps({TOPIC: 0})}
        with pytest.raises(PySparkException, match="no longer kept"):
            _load(spark, tmp_path, **start).count()
        assert _offsets(_load(spark, tmp_path, **start, failOnDataLoss="false")) == list(range(oldest, 100))


# Streams


def _stream(spark: SparkSession, root: Path, checkpoint: Path, name: str, **options: object) -> StreamingQuery:
    reader = spark.readStream.format("tidelog").option("root", str(root))
    for option, value in {"startingOffsets": "earliest", **options}.items():
        reader = reader.option(option, str(value))
    frame = reader.load().select("topic", "offset", "value")
    writer = frame.writeStream.format("parquet").option("path", str(checkpoint / "out"))
    writer = writer.option("checkpointLocation", str(checkpoint / "state")).queryName(name)
    return writer.trigger(availableNow=True).start()


def _streamed(spark: SparkSession, checkpoint: Path) -> list[tuple[str, int]]:
    rows = spark.read.schema("topic string, offset long").parquet(str(checkpoint / "out")).collect()
    return sorted((row.topic, row.offset) for row in rows)


def test_a_stream_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """Limited batches, a restart, hot files that are pruned, and a topic that comes later: every row once."""
    root = tmp_path / "data"
    with tidelog.open(root, store=f"file://{tmp_path}/store", metadata="bucket", rotate_max_bytes=2048) as log:
        topic = log.topic("a/one")
        for number in range(100):
            topic.append(b"%050d" % number)
        topic.flush()
        options = {"subscribePattern": "a/.*", "maxOffsetsPerTrigger": 30}
        query = _stream(spark, root, tmp_path, "first", **options)
        query.awaitTermination()
        batches = [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]
        assert batches == [30, 30, 30, 10]
        for number in range(100, 150):
            topic.append(b"%050d" % number)
        topic.ship()
        log.topic("a/two").append_many([b"later %d" % number for number in range(20)])
    with tidelog.open(root, local_retention_bytes=1) as log:
        log.topic("a/one").prune()
    _stream(spark, root, tmp_path, "second", **options).awaitTermination()
    assert _streamed(spark, tmp_path) == [
        *(("a/one", number) for number in range(150)),
        *(("a/two", number) for number in range(20)),
    ]


def test_a_stream_says_how_far_behind_it_is(spark: SparkSession, shop: Path, tmp_path: Path) -> None:
    """Progress has the end of the topic beside the end of the batch, so lag can be seen."""
    query = _stream(spark, shop / "data", tmp_path, "lag", subscribe=TOPIC, maxOffsetsPerTrigger=500)
    query.awaitTermination()
    first = query.recentProgress[0]["sources"][0]
    assert json.loads(first["endOffset"])[TOPIC] == {"0": 500}
    assert json.loads(first["latestOffset"]) == {TOPIC: {"0": 600}}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"endingOffsets": "latest"}, "a stream has no end"),
        ({"startingOffsets": json.dumps({TOPIC: 601})}, "was to be read from 601 on"),
    ],
)
def test_mistakes_of_a_stream_are_named(
    spark: SparkSession, shop: Path, tmp_path: Path, options: dict[str, str], problem: str
) -> None:
    """An end that would be ignored, and a beginning that the topic has not come to, stop the query."""
    reader = spark.readStream.format("tidelog").option("root", str(shop / "data")).option("subscribe", TOPIC)
    with pytest.raises(PySparkException, match=problem):
        _drain(reader.options(**options).load(), tmp_path / "checkpoint")


def test_a_checkpoint_of_other_topics_is_told_from_a_topic_that_is_gone(
    spark: SparkSession, shop: Path, tmp_path: Path
) -> None:
    """Whoever changes what a query subscribes to learns that the checkpoint is of another subscription."""
    for topic in ("shop/returns", TOPIC):
        reader = spark.readStream.format("tidelog").option("root", str(shop / "data")).option("subscribe", topic)
        frame = reader.option("startingOffsets", "earliest").load()
        if topic == TOPIC:
            with pytest.raises(PySparkException, match="shop/returns was read up to offset 10 by the query of this"):
                _drain(frame, tmp_path / "checkpoint")
        else:
            _drain(frame, tmp_path / "checkpoint")


def _drain(frame: DataFrame, checkpoint: Path) -> None:
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def test_bytes_limit_a_batch(spark: SparkSession, shop: Path, tmp_path: Path) -> None:
    """About so many bytes a batch; all rows come in the end."""
    query = _stream(spark, shop / "data", tmp_path, "bytes", subscribe=TOPIC, maxBytesPerTrigger="20kB")
    query.awaitTermination()
    batches = [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]
    assert sum(batches) == 600
    assert len(batches) >= 2


def test_a_topic_that_was_made_again_is_data_loss(spark: SparkSession, tmp_path: Path) -> None:
    """A stream that has read further than the topic goes now stops, and does not begin anew."""
    root = tmp_path / "data"
    with tidelog.open(root) as log:
        log.topic(TOPIC).append_many([b"x"] * 50)
        log.topic(TOPIC).flush()
        _stream(spark, root, tmp_path, "before", subscribe=TOPIC).awaitTermination()
        log.delete_topic(TOPIC)
        log.topic(TOPIC).append_many([b"y"] * 5)
        log.topic(TOPIC).flush()
        query = _stream(spark, root, tmp_path, "after", subscribe=TOPIC)
        with pytest.raises(PySparkException, match="made again"):
            query.awaitTermination()
    assert len(_streamed(spark, tmp_path)) == 50
