"""`df.write.format("tidelog")`: rows become messages, all of a write or none, once, beside an owner and without one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, EtcdServer, S3Server

import tidelog
from tidelog.pipeline.address import find_root
from tidelog.pipeline.jobs.compact_topic import superseded_offsets
from tidelog.pipeline.sink.sink import SinkCommit

TOPIC = "shop/orders"
# Spark wraps what happens in tasks and commits once more.
FAILURES = (PySparkException, Py4JJavaError)
SOON: dict[str, Any] = {"ingest_check_seconds": 0.1}


def rows(spark: SparkSession, count: int, *, tasks: int = 2, first: int = 0) -> DataFrame:
    """Numbers as values, in order over the tasks."""
    return spark.range(first, first + count, 1, tasks).selectExpr("cast(id as string) as value")


def write(frame: DataFrame, root: Path | str, topic: str | None = TOPIC, **options: object) -> None:
    """An append."""
    writer = frame.write.format("tidelog").mode("append").option("root", str(root))
    for name, value in {"topic": topic, **options}.items():
        writer = writer if value is None else writer.option(name, str(value))
    writer.save()


def values(root: Path | str, topic: str = TOPIC) -> list[bytes]:
    """What is in a topic."""
    with find_root(root).open() as log:
        return [message.value or b"" for message in log.topic(topic).read()]


def numbers(*parts: range) -> list[bytes]:
    """The values of `rows`."""
    return [b"%d" % number for part in parts for number in part]


def staged(root: Path) -> list[Path]:
    """Every staged object under a directory."""
    return [path for path in root.rglob("*") if path.is_file() and "/staging/" in path.as_posix()]


@contextmanager
def owner(root: Path, **settings: Any) -> Iterator[tidelog.LogDirectory]:
    """An owner in this process. Spark commits in another."""
    with tidelog.open(root, **SOON, **settings) as log:
        log.topic(TOPIC)
        yield log


# Where rows come in


@pytest.mark.parametrize("place", ["directory", "sqlite", "bucket", "bucket alone"])
def test_rows_come_in_once_and_in_order(spark: SparkSession, tmp_path: Path, place: str) -> None:
    """In a directory, in one with a store, and in a store alone: the tasks' rows in order, write behind write."""
    root: Path | str = tmp_path / "data"
    store = f"file://{tmp_path}/store"
    if place == "bucket alone":
        root = store
    elif place != "directory":
        metadata = f"sqlite:///{tmp_path}/meta.db" if place == "sqlite" else "bucket"
        with tidelog.open(root, store=store, metadata=metadata):
            pass
    write(rows(spark, 1000, tasks=3), root)
    write(rows(spark, 100, first=1000), root)
    assert values(root) == numbers(range(1100))
    assert staged(tmp_path) == []


def test_over_real_servers(spark: SparkSession, s3_server: S3Server, etcd_server: EtcdServer) -> None:
    """In S3 alone, with the catalog in the bucket or in etcd: the same, and once."""
    settings = {
        "store_endpoint": s3_server.endpoint,
        "store_access_key_id": ACCESS_KEY_ID,
        "store_secret_access_key": SECRET_ACCESS_KEY,
    }
    for metadata in ("bucket", etcd_server.url):
        url = s3_server.url(f"sink-{metadata.partition(':')[0]}")
        for version in (1, 1, 2):
            frame = rows(spark, 100, first=100 * version)
            write(frame, url, metadata=metadata, txnAppId="nightly", txnVersion=version, **settings)
        with find_root(url, metadata, **settings).open() as log:
            assert [message.value for message in log.topic(TOPIC).read()] == numbers(range(100, 300))


def test_a_live_owner_takes_them_in_as_one(spark: SparkSession, tmp_path: Path) -> None:
    """Beside an owner that goes on appending: what was written is contiguous, and none of either is lost."""
    with owner(tmp_path) as log:
        topic, ends = log.topic(TOPIC), threading.Event()
        appended = threading.Thread(target=lambda: _append_until(topic, ends))
        appended.start()
        write(rows(spark, 5000), tmp_path)
        ends.set()
        appended.join()
    found = values(tmp_path)
    written = [index for index, value in enumerate(found) if not value.startswith(b"mine")]
    assert [found[index] for index in written] == numbers(range(5000))
    assert written == list(range(written[0], written[0] + 5000))
    mine = [value for value in found if value.startswith(b"mine")]
    assert mine == [b"mine %d" % number for number in range(len(mine))]
    assert mine


def _append_until(topic: tidelog.Topic, ends: threading.Event) -> None:
    number = 0
    while not ends.wait(0.001):
        topic.append(b"mine %d" % number)
        number += 1


OWNER = """
import sys, tidelog
with tidelog.open(sys.argv[1], store=sys.argv[2], metadata="bucket", ingest_check_seconds=0.1) as log:
    log.topic("shop/orders").append(b"theirs", sync=True)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("place", ["directory", "store"])
def test_an_owner_in_another_process_takes_them_in(spark: SparkSession, tmp_path: Path, place: str) -> None:
    """Whether its directory is named or its store: the owner has them, and keeps the topic."""
    root, store = tmp_path / "data", f"file://{tmp_path}/store"
    command = [sys.executable, "-c", OWNER, str(root), store]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        write(rows(spark, 50), root if place == "directory" else store)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(120) == 0
    assert values(root) == [b"theirs", *numbers(range(50))]


def test_an_owner_that_does_not_take_them_in(spark: SparkSession, tmp_path: Path) -> None:
    """The error says that they are handed over and must not be written again; they come when the owner looks."""
    with tidelog.open(tmp_path, ingest_check_seconds=3600) as log:
        topic = log.topic(TOPIC)
        with pytest.raises(FAILURES, match="Do not write it again"):
            write(rows(spark, 10), tmp_path, handOverTimeout="1s")
        assert topic.next_offset == 0
        assert topic.ingest() == 1
        assert [message.value for message in topic.read()] == numbers(range(10))


# What comes in


def test_what_was_read_is_written_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """From a topic through Spark into another one: every key, header, time and value is the same."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    messages = [
        tidelog.Message(
            b"" if number == 3 else b"\xff\x00 %d" % number,
            key=b"k%d" % number if number % 3 else None,
            headers={"a": b"1", "b": b"\xfe"} if number % 2 else {},
            timestamp=begin + timedelta(microseconds=number),
        )
        for number in range(60)
    ]
    with tidelog.open(tmp_path) as log:
        log.topic("shop/from").append_many(messages)
    reader = spark.read.format("tidelog").option("root", str(tmp_path)).option("includeHeaders", True)
    write(reader.option("subscribe", "shop/from").load(), tmp_path)
    with find_root(tmp_path).open() as log:
        pairs = zip(log.topic("shop/from").read(), log.topic(TOPIC).read(), strict=True)
        for there, here in pairs:
            assert (here.value, here.key, here.headers) == (there.value, there.key, there.headers)
            assert (here.timestamp, here.offset) == (there.timestamp, there.offset)


def test_text_and_bytes(spark: SparkSession, tmp_path: Path) -> None:
    """Text is its UTF-8, a missing key is none, and without a time it is that of the write."""
    before = datetime.now(UTC)
    frame = spark.range(2).selectExpr("'größe' as value", "if(id = 0, null, 'schlüssel') as key")
    write(frame.coalesce(1), tmp_path)
    with find_root(tmp_path).open() as log:
        first, second = log.topic(TOPIC).read()
    assert (first.value, first.key, second.key) == ("größe".encode(), None, "schlüssel".encode())
    assert first.timestamp is not None
    assert before <= first.timestamp <= datetime.now(UTC)


def test_a_column_names_the_topics(spark: SparkSession, tmp_path: Path) -> None:
    """Each row goes to its own topic, in order; the option `topic` wins over the column."""
    frame = spark.range(0, 90, 1, 3).selectExpr("cast(id as string) value", "concat('shop/t', id % 3) topic")
    write(frame, tmp_path, topic=None)
    for rest in range(3):
        assert values(tmp_path, f"shop/t{rest}") == numbers(range(rest, 90, 3))
    write(frame, tmp_path)
    assert values(tmp_path) == numbers(range(90))


def test_many_tasks_few_rows_and_none(spark: SparkSession, tmp_path: Path) -> None:
    """Thirty tasks, some of them with nothing to write, are in order; no rows at all is no error."""
    write(rows(spark, 22, tasks=30), tmp_path)
    assert values(tmp_path) == numbers(range(22))
    write(rows(spark, 0), tmp_path)
    write(spark.createDataFrame([], "value string"), tmp_path)
    write(rows(spark, 10).where("value = 'none'"), tmp_path)
    assert values(tmp_path) == numbers(range(22))


# Once


@pytest.mark.parametrize("place", ["directory", "bucket alone"])
def test_a_named_write_comes_once(spark: SparkSession, tmp_path: Path, place: str) -> None:
    """The same version again and an older one are done already; a newer one comes in; nothing staged stays."""
    root = f"file://{tmp_path}/store" if place == "bucket alone" else tmp_path / "data"
    for version in (5, 5, 4, 6):
        write(rows(spark, 10, first=10 * version), root, txnAppId="nightly", txnVersion=version)
    write(rows(spark, 10), root, txnAppId="other", txnVersion=0)
    assert values(root) == numbers(range(50, 70), range(10))
    assert staged(tmp_path) == []


def test_a_batch_of_a_stream_written_by_hand(spark: SparkSession, tmp_path: Path) -> None:
    """`foreachBatch` with the number of the batch as version writes each batch once, however often it is run."""
    source, sink = tmp_path / "source", tmp_path / "sink"
    with tidelog.open(source) as log:
        log.topic(TOPIC).append_many(numbers(range(40)))

    def write_twice(frame: DataFrame, batch: int) -> None:
        for _ in range(2):
            write(frame.select("value"), sink, txnAppId="by hand", txnVersion=batch)

    reader = spark.readStream.format("tidelog").option("root", str(source)).option("subscribe", TOPIC)
    reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 20)
    query = reader.load().writeStream.foreachBatch(write_twice).trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path / "state")).start().awaitTermination()
    assert values(sink) == numbers(range(40))


# Not at all


def test_a_failing_task_spoils_the_write(spark: SparkSession, tmp_path: Path) -> None:
    """Rows of the other tasks are in no topic, and the same write works when it is mended."""
    bad = "case when id = 77 then raise_error('spoilt') else cast(id as string) end as value"
    with pytest.raises(FAILURES, match="spoilt"):
        write(spark.range(0, 100, 1, 4).selectExpr(bad), tmp_path, txnAppId="mended", txnVersion=0)
    assert not (tmp_path / "shop").exists()
    write(rows(spark, 100, tasks=4), tmp_path, txnAppId="mended", txnVersion=0)
    assert values(tmp_path) == numbers(range(100))
    assert staged(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "metadata.db/x", ""])
def test_a_hostile_topic_stops_the_whole_write(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A name in the column that cannot be a topic is refused by name, and nothing is written to the others either."""
    root = tmp_path / "in" / "data"
    frame = spark.range(0, 4, 1, 2).selectExpr("'x' value", f"if(id = 3, {json.dumps(name)}, '{TOPIC}') topic")
    with pytest.raises(FAILURES, match="TopicNameError"):
        write(frame, root, topic=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert {path.name for path in root.iterdir()} <= {".staging", "metadata.db"}


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        ("'x' as text", {}, "the column value is missing"),
        ("1 as value", {}, "the column value is int, and must be binary or string"),
        pytest.param("'x' as value, 'y' as VALUE", {}, "VALUE|twice", marks=pytest.mark.long),
        ("'x' as value, 'y' as customer", {}, "customer is not part of a message"),
        pytest.param("'x' as value, 5 as timestamp", {}, "the column timestamp is int", marks=pytest.mark.long),
        pytest.param("'x' as value, array('h') as headers", {}, "the column headers", marks=pytest.mark.long),
        ("'x' as value", {"topic": None}, "no topic was named"),
        ("'x' as value, cast(null as string) as topic", {"topic": None}, "column topic is null. Set the option topic"),
        pytest.param("'x' as value", {"topic": "orders"}, "needs a namespace and a name", marks=pytest.mark.long),
        ("'x' as value", {"topik": "a/b"}, "Did you mean topic"),
        ("'x' as value", {"txnAppId": "a"}, "txnAppId and txnVersion must be given together"),
        pytest.param("'x' as value", {"txnAppId": "a", "txnVersion": "-1"}, "txnVersion", marks=pytest.mark.long),
        pytest.param("'x' as value", {"txnAppId": "a", "txnVersion": "one"}, "txnVersion", marks=pytest.mark.long),
        pytest.param(
            "'x' as value", {"txnAppId": "a" * 201, "txnVersion": "1"}, "1 to 200 bytes", marks=pytest.mark.long
        ),
        ("'x' as value", {"handOverTimeout": "soon"}, "handOverTimeout"),
        ("repeat('x', 20000000) as value", {}, "rows for shop/orders: row 0 makes a message of .* max_message_bytes"),
    ],
)
def test_mistakes_are_named(
    spark: SparkSession, tmp_path: Path, columns: str, options: dict[str, Any], problem: str
) -> None:
    """A column or option that is wrong stops the write and says which one and why; nothing is made."""
    with pytest.raises(FAILURES, match=problem):
        write(spark.sql(f"select {columns}"), tmp_path / "data", **options)
    assert not (tmp_path / "data" / "shop").exists()
    assert staged(tmp_path) == []


def test_nulls_and_repeated_headers_are_kept(spark: SparkSession, tmp_path: Path) -> None:
    """A row with a null value is a tombstone, as Kafka's sink takes it, and is read as it was written."""
    headers = "array(named_struct('key', 'a', 'value', cast(null as binary)), named_struct('key', 'a', 'value', X'02'))"
    columns = "cast(if(id = 1, null, string(id)) as binary) as value", "string(id % 2) as key"
    frame = spark.range(0, 3, 1, 1).selectExpr(*columns, f"if(id = 0, {headers}, null) as headers")
    write(frame, tmp_path)
    reader = spark.read.format("tidelog").options(root=str(tmp_path), subscribe=TOPIC, includeHeaders="true")
    found = reader.load().orderBy("offset").select("value", "headers").collect()
    assert [row.value for row in found] == [b"0", None, b"2"]
    assert [row.headers and [tuple(one) for one in row.headers] for row in found] == [
        [("a", None), ("a", b"\x02")],
        None,
        None,
    ]
    with find_root(tmp_path).open() as log:
        messages = list(log.topic(TOPIC).read())
    assert [message.value for message in messages] == [b"0", None, b"2"]
    assert messages[0].header_list == (("a", None), ("a", b"\x02"))
    gone = superseded_offsets(spark, find_root(tmp_path), TOPIC, 0, 3, 0, 0)
    assert gone.count(0, 3) == 0  # too young: `min_compaction_lag_seconds`
    gone = superseded_offsets(spark, find_root(tmp_path), TOPIC, 0, 3, 1 << 60, 1 << 60)
    assert [offset for offset in range(3) if gone.count(offset, offset + 1)] == [0, 1]


def test_a_topic_is_not_replaced(spark: SparkSession, tmp_path: Path) -> None:
    """Overwriting is refused and says what to use; what is there stays."""
    write(rows(spark, 3), tmp_path)
    writer = rows(spark, 1).write.format("tidelog").option("root", str(tmp_path)).option("topic", TOPIC)
    with pytest.raises(FAILURES, match='Use mode "append"'):
        writer.mode("overwrite").save()
    assert values(tmp_path) == numbers(range(3))


def test_a_live_topic_keeps_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """A topic made with reliable=False is refused by name, and no rows wait for it."""
    with tidelog.open(tmp_path) as log:
        log.topic("shop/live", reliable=False)
    with pytest.raises(FAILURES, match="reliable=False"):
        write(rows(spark, 3), tmp_path, topic="shop/live")
    assert staged(tmp_path) == []


def test_abort_after_a_commit_takes_nothing_back(spark: SparkSession, tmp_path: Path) -> None:
    """Spark may abort a write that was committed; its rows stay, whether they were taken in or wait."""
    with tidelog.open(tmp_path, ingest_check_seconds=3600) as log:
        topic = log.topic(TOPIC)
        with pytest.raises(FAILURES, match="is committed"):
            write(rows(spark, 10), tmp_path, handOverTimeout="100ms", txnAppId="nightly", txnVersion=1)
        SinkCommit(find_root(tmp_path), "nightly", 1).discard({}, TOPIC)
        topic.ingest()
        SinkCommit(find_root(tmp_path), "nightly", 1).discard({}, TOPIC)
        assert [message.value for message in topic.read()] == numbers(range(10))
