"""Reading what servers have, and have not shipped yet, with the option `server`."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.service.http.serving import Served, serving

import tidelog
from tidelog.client import tail
from tidelog.client.tail import ServerPlace
from tidelog.errors import ConfigError, CorruptionError, InputError, OffsetOutOfRangeError
from tidelog.pipeline.source.options import parse_source_options, source_schema
from tidelog.pipeline.source.topics import TidelogDataSource, TopicReader
from tidelog.pipeline.source.topics_stream import TopicStreamReader
from tidelog.secret import Secret

TOPIC = "shop/orders"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server with a store, and a topic with two partitions, which are shipped when a test says so."""
    (tmp_path / "bucket").mkdir()
    with serving(tmp_path / "data", store=f"file://{tmp_path}/bucket") as found:
        found.ok("PUT", f"/v1/topics/{TOPIC}", {"partitions": 2, "settings": {"ship_max_delay_seconds": 3600}})
        yield found


def url_of(served: Served) -> str:
    return f"http://{served.address.host}:{served.address.port}"


def options_of(tmp_path: Path, served: Served, **more: str) -> dict[str, str]:
    store = f"file://{tmp_path}/bucket"
    return {"root": store, "metadata": "bucket", "subscribe": TOPIC, "server": url_of(served), **more}


def values_of(reader: Any, partitions: Any) -> list[str]:
    """What tasks read: each of them gets its partition and the reader as they are pickled."""
    rows: list[str] = []
    for partition in partitions:
        there: Any = pickle.loads(pickle.dumps(reader))
        for batch in there.read(pickle.loads(pickle.dumps(partition))):
            rows += [value.decode() for value in batch.column("value").to_pylist()]
    return rows


def read_batch(given: dict[str, str]) -> list[str]:
    reader = TopicReader(parse_source_options(given), source_schema(("value",)))
    return sorted(values_of(reader, reader.partitions()))


def shipped(served: Served) -> None:
    served.ok("POST", f"/v1/topics/{TOPIC}/ship?wait=30")


def test_newest_messages_of_a_server_are_read(spark: SparkSession, tmp_path: Path, served: Served) -> None:
    """Without the option a reader of the bucket sees what was shipped before; with it everything that was accepted."""
    spark.dataSource.register(TidelogDataSource)
    for number in range(4):
        served.produce(TOPIC, f"v{number}", partition=str(number % 2))
    shipped(served)
    for number in range(4, 10):
        served.produce(TOPIC, f"v{number}", partition=str(number % 2))
    given = options_of(tmp_path, served)
    del given["server"]
    reader = spark.read.format("tidelog").options(**given)
    assert reader.load().count() == 4
    rows = reader.option("server", url_of(served)).load().selectExpr("cast(value as string) as v").collect()
    assert sorted(row["v"] for row in rows) == [f"v{number}" for number in range(10)]
    again = spark.read.format("tidelog").options(**given).load()
    assert again.count() == 4, "nothing was shipped for it"


def test_a_tail_that_is_shipped_and_pruned_after_the_plan_is_read_from_the_store(
    tmp_path: Path, served: Served
) -> None:
    """Parts say what was at the owner when they were planned; tasks find it where it is by then."""
    served.produce(TOPIC, "a", "b", partition="0")
    reader = TopicReader(parse_source_options(options_of(tmp_path, served)), source_schema(("value",)))
    planned: Any = reader.partitions()
    assert [part.owner is not None for task in planned for part in task.parts] == [True]
    served.ok("PATCH", f"/v1/topics/{TOPIC}", {"settings": {"local_retention_bytes": 1}})
    shipped(served)
    served.ok("POST", f"/v1/topics/{TOPIC}/retention?wait=30")
    assert values_of(reader, planned) == ["a", "b"]


def test_an_end_by_time_is_found_at_the_owner(tmp_path: Path, served: Served) -> None:
    """Times are looked up in what is not shipped yet, too."""
    served.produce(TOPIC, "a", partition="0")
    shipped(served)
    time.sleep(0.002)  # times are told apart by milliseconds
    served.produce(TOPIC, "b", partition="0")
    found = served.ok("GET", f"/v1/topics/{TOPIC}/messages?partition=0")["messages"]
    times = [message["timestamp"] for message in found]
    last_ms = int(datetime.fromisoformat(times[1]).timestamp() * 1000)
    given = options_of(tmp_path, served, endingTimestamp=str(last_ms))
    assert read_batch(given) == ["a"]
    assert read_batch(options_of(tmp_path, served, endingTimestamp=str(last_ms + 3_600_000))) == ["a", "b"]


def test_a_stream_reads_the_newest_and_goes_on(tmp_path: Path, served: Served) -> None:
    """Each batch ends where owners end, nothing is read twice, and batches can be planned again."""
    reader = stream_of(tmp_path, served)
    begin = reader.initialOffset()
    served.produce(TOPIC, "a", partition="0")
    served.produce(TOPIC, "b", partition="1")
    first = reader.latestOffset(begin, ReadAllAvailable())
    shipped(served)
    served.produce(TOPIC, "c", partition="0")
    second = reader.latestOffset(first, ReadAllAvailable())
    assert sorted(values_of(reader, reader.partitions(begin, first))) == ["a", "b"]
    assert values_of(reader, reader.partitions(first, second)) == ["c"]
    assert sorted(values_of(reader, reader.partitions(begin, second))) == ["a", "b", "c"]
    reader.stop()


def stream_of(tmp_path: Path, served: Served, **more: str) -> TopicStreamReader:
    given = options_of(tmp_path, served, startingOffsets="earliest", **more)
    return TopicStreamReader(parse_source_options(given, is_stream=True), source_schema(("value",)))


def test_a_stream_says_that_a_lost_node_took_what_it_had_read(tmp_path: Path) -> None:
    """The next owner uses the offsets again: to go on at them would pass over its messages and say nothing."""
    (tmp_path / "bucket").mkdir()
    store = f"file://{tmp_path}/bucket"
    with serving(tmp_path / "one", store=store) as served:
        served.ok("PUT", f"/v1/topics/{TOPIC}", {"settings": {"ship_max_delay_seconds": 3600}})
        served.produce(TOPIC, "a")
        served.ok("POST", f"/v1/topics/{TOPIC}/ship?wait=30")
        served.produce(TOPIC, "lost 1", "lost 2")
        reader = stream_of(tmp_path, served)
        begin = reader.initialOffset()
        read = reader.latestOffset(begin, ReadAllAvailable())
        assert values_of(reader, reader.partitions(begin, read)) == ["a", "lost 1", "lost 2"]
        planned = reader.partitions(begin, read)
        reader.stop()
        # Another node takes over while this one has its tail on its disk alone.
        with tidelog.open(tmp_path / "two", store=store, metadata="bucket") as taking:
            taking.topic(TOPIC, take_over=True)
        with serving(tmp_path / "two", store=store) as other:
            other.produce(TOPIC, "new 1", "new 2", "new 3")
            strict, lossy = stream_of(tmp_path, other), stream_of(tmp_path, other, failOnDataLoss="false")
            with pytest.raises(OffsetOutOfRangeError, match="other messages have these offsets now"):
                strict.latestOffset(read, ReadAllAvailable())
            with pytest.raises(OffsetOutOfRangeError, match="went with its node from 1 on"):
                strict.partitions(begin, read)
            end = lossy.latestOffset(read, ReadAllAvailable())
            assert values_of(lossy, lossy.partitions(read, end)) == ["new 1", "new 2", "new 3"]
            assert values_of(lossy, lossy.partitions(begin, read)) == ["a"]
            moved = [at_server(task, url_of(other)) for task in planned]
            with pytest.raises(OffsetOutOfRangeError, match="went with the node that had not shipped them"):
                values_of(strict, moved)
            assert values_of(lossy, moved) == ["a"]


def at_server(task: Any, url: str) -> Any:
    """The same task, where the partition is served by another node by now."""
    replace = msgspec.structs.replace
    task.parts = tuple(
        part if part.owner is None else replace(part, owner=replace(part.owner, server=ServerPlace(url)))
        for part in task.parts
    )
    return task


def test_transactions_that_end_in_the_tail_are_told_apart(tmp_path: Path, served: Served) -> None:
    """What is committed is read, what is aborted is not, though the marker is on the disk of the owner alone."""
    kafka = f"{served.kafka.host}:{served.kafka.port}"
    for number, is_committed in enumerate((True, False)):
        producer = Producer({"bootstrap.servers": kafka, "transactional.id": f"t{number}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(TOPIC, f"is {is_committed}", partition=0)
        producer.flush(30)
        if number == 0:
            shipped(served)
        producer.commit_transaction(30) if is_committed else producer.abort_transaction(30)
    assert read_batch(options_of(tmp_path, served)) == ["is True"]


def test_server_must_be_a_url() -> None:
    """What Spark is given by mistake is refused before anything is read."""
    with pytest.raises(InputError, match="server must be the URL"):
        parse_source_options({"root": "/tmp/none", "subscribe": "a/b", "server": "localhost:8080"})


def test_server_needs_a_store(tmp_path: Path) -> None:
    """A directory without a store is read from its files, and there is nothing to join to."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC).append(b"a", sync=True)
    given = {"root": str(tmp_path / "data"), "subscribe": TOPIC, "server": "http://127.0.0.1:1"}
    with pytest.raises(InputError, match="has no store"):
        TopicReader(parse_source_options(given), source_schema(("value",))).partitions()


def test_token_and_authority_go_to_tasks_and_into_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the driver count, options win, and the file is read on the driver."""
    monkeypatch.setenv("TIDELOG_TOKEN", "of-the-driver")
    given = {"root": f"file://{tmp_path}", "subscribe": TOPIC, "server": "https://node:8080"}
    place = pickle.loads(pickle.dumps(parse_source_options(given).server))
    assert place.token == Secret("of-the-driver")
    place = parse_source_options({**given, "serverToken": "given"}).server
    assert place is not None
    assert place.token == Secret("given")
    assert "given" not in repr(place)
    with pytest.raises(ConfigError, match="certificate of the authority"):
        parse_source_options({**given, "serverTlsCa": str(tmp_path / "none.pem")})


def test_frames_that_are_damaged_on_the_way_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checksum protects messages up to the task."""
    served.produce(TOPIC, "payload", partition="0")
    place = ServerPlace(url_of(served))
    assert place.frames(TOPIC, 0, 0).frames.count == 1
    real = tail._piece

    def damaged(answer: Any, asked: Any) -> Any:
        body = bytearray(answer.body)
        body[-1] ^= 1
        return real(answer._replace(body=bytes(body)), asked)

    monkeypatch.setattr(tail, "_piece", damaged)
    with pytest.raises(CorruptionError):
        place.frames(TOPIC, 0, 0)
