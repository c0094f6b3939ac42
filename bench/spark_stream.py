"""Streams of Spark over a topic: how late a message is in the output, and what large joins and state cost.

    python bench/spark_stream.py [--seconds 20] [--rows 1000000] [--rounds 3] [--only latency|queries]

Latency is the time from before `append(sync=True)` to the end of the micro-batch that had the message, for a message
every 10 ms, in local[2] with Spark's default trigger (the next batch begins when the last one has ended). The output
is collected by `foreachBatch`. The peer is a Python source that has its rows ready and looks for nothing: it is what
Spark itself takes, and no Python source is faster. Rounds alternate; the first seconds of a query are not counted.

The queries read everything that is there in batches of a fifth of it (`availableNow`): a join of two streams of as
many rows each on a key that both have once, and a count by key over 100,000 keys. State is in RocksDB. The peer reads
the same rows as a stream of Parquet files.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import Figure, alternate, compared, parser_for, percentile, report, scratch_directory
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

import tidelog

EVERY_SECONDS = 0.01
WARM_SECONDS = 5.0
KEYS = 100_000
BATCHES = 5
FILES = 10
LIMIT_SECONDS = 240
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
Query = Callable[[DataFrame, DataFrame], DataFrame]
STATE = {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}


# Latency


class ReadySource(DataSource):
    """A row for every hundredth of a second, that is the time at which it came to be, in microseconds."""

    @classmethod
    def name(cls) -> str:
        return "ready_stream"

    def schema(self) -> str:
        return "value binary"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return ReadyStream()


class ReadyStream(DataSourceStreamReader):
    """Its offset is the time."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"tick": int(time.time() / EVERY_SECONDS)}

    def latestOffset(self) -> dict[str, int]:  # noqa: N802
        return {"tick": int(time.time() / EVERY_SECONDS)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["tick"], end["tick"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[bytes]]:
        for tick in range(*partition.value):
            yield (b"%d" % int((tick + 1) * EVERY_SECONDS * 1e6),)


def latencies(stream: DataFrame, place: Path, seconds: float) -> list[float]:
    """Milliseconds from the time in each message to the end of its batch, sorted, for so long after a warm start."""
    found: list[float] = []
    first: list[float] = []

    def note(batch: DataFrame, _: int) -> None:
        values = [int(row.value) for row in batch.collect()]
        now = time.time()
        first.append(now)
        if now - first[0] > WARM_SECONDS:
            found.extend(1000 * (now - value / 1e6) for value in values)

    query = stream.writeStream.foreachBatch(note).option("checkpointLocation", str(place / "checkpoint")).start()
    deadline = time.time() + LIMIT_SECONDS
    try:
        while query.isActive and time.time() < deadline:
            time.sleep(0.05)
            if found and time.time() - first[0] > WARM_SECONDS + seconds:
                break
    finally:
        query.stop()
    if (problem := query.exception()) is not None:
        raise problem
    return sorted(found)


class Producer:
    """Appends the time, every hundredth of a second."""

    def __init__(self, directory: Path) -> None:
        self._log = tidelog.open(directory)
        self._topic = self._log.topic("bench/ticks")
        self._topic.append(b"%d" % (time.time_ns() // 1000), sync=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self._topic.append(b"%d" % (time.time_ns() // 1000), sync=True)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._log.close()


def measure_latency(spark: SparkSession, root: Path, seconds: float, rounds: int) -> list[Figure]:
    """p50 and p99 beside what Spark itself takes."""
    found: dict[str, list[list[float]]] = {"tidelog": [], "a source that is ready": []}

    def ours() -> float:
        place = root / "ours"
        producer = Producer(place / "data")
        try:
            stream = spark.readStream.format("tidelog").option("root", str(place / "data"))
            rows = stream.option("subscribe", "bench/ticks").option("columns", "value").load()
            found["tidelog"].append(latencies(rows, place, seconds))
        finally:
            producer.close()
            shutil.rmtree(place)
        return 0.0

    def ready() -> float:
        place = root / "ready"
        rows = spark.readStream.format("ready_stream").load()
        found["a source that is ready"].append(latencies(rows, place, seconds))
        shutil.rmtree(place)
        return 0.0

    alternate({"tidelog": ours, "a source that is ready": ready}, rounds)
    figures = []
    for percent, target in ((50, 1.3), (99, 1.5)):
        each = {name: [percentile(one, percent) for one in runs] for name, runs in found.items()}
        figures.append(
            compared(
                f"append to output of a micro-batch, p{percent}",
                each,
                "a source that is ready",
                1 / target,
                unit=" ms",
                durability="synced",
                smaller_is_better=True,
            )
        )
    return figures


# Joins and state


def make_rows(spark: SparkSession, root: Path, rows: int) -> None:
    """Two topics with as many messages each, in a directory and in files of Parquet."""
    with tidelog.open(root / "data") as log:
        for name in ("bench/orders", "bench/payments"):
            topic = log.topic(name)
            for first in range(0, rows, 4096):
                many = range(first, min(rows, first + 4096))
                topic.append_many([tidelog.Message(b"x" * 100, key=b"%d" % (n * 7919 % rows)) for n in many])
            topic.flush()
    for name in ("orders", "payments"):
        frame = spark.read.format("tidelog").option("root", str(root / "data")).option("subscribe", f"bench/{name}")
        kept = frame.load().select("key", "value", "timestamp")
        kept.repartition(FILES).write.parquet(str(root / "parquet" / name))


def join(orders: DataFrame, payments: DataFrame) -> DataFrame:
    """Each order with its payment within an hour."""
    left = orders.selectExpr("key AS id", "value AS ordered", "timestamp AS at").withWatermark("at", "1 hour")
    right = payments.selectExpr("key", "value AS paid", "timestamp").withWatermark("timestamp", "1 hour")
    soon = "id = key AND timestamp BETWEEN at - INTERVAL 1 HOUR AND at + INTERVAL 1 HOUR"
    return left.join(right, on=_expression(soon)).select("id", "ordered", "paid")


def _expression(text: str) -> Any:
    from pyspark.sql.functions import expr

    return expr(text)


def count_keys(orders: DataFrame, _: DataFrame) -> DataFrame:
    """How often each key came, of a hundred thousand."""
    return orders.selectExpr(f"CAST(CAST(key AS string) AS bigint) % {KEYS} AS id").groupBy("id").count()


def seconds_of(query: DataFrame, place: Path, expected: int, mode: str) -> float:
    """Until all that is there has been through the query; the rows of its output are counted."""
    counted = 0

    def note(batch: DataFrame, _: int) -> None:
        nonlocal counted
        counted += batch.count()

    writer = query.writeStream.foreachBatch(note).outputMode(mode).trigger(availableNow=True)
    begin = time.perf_counter()
    started = writer.option("checkpointLocation", str(place)).start()
    if not started.awaitTermination(LIMIT_SECONDS):
        started.stop()
        raise RuntimeError(f"the query took longer than {LIMIT_SECONDS} s")
    took = time.perf_counter() - begin
    shutil.rmtree(place)
    if counted < expected:
        raise RuntimeError(f"the query gave {counted} rows instead of {expected}")
    return took


def measure_queries(spark: SparkSession, root: Path, rows: int, rounds: int) -> list[Figure]:
    """Rows a second of the input, beside the same over Parquet."""
    make_rows(spark, root, rows)
    a_batch = max(1, -(-rows // BATCHES))

    def topic(name: str) -> DataFrame:
        stream = spark.readStream.format("tidelog").option("root", str(root / "data"))
        stream = stream.option("subscribe", f"bench/{name}").option("startingOffsets", "earliest")
        return stream.option("columns", "key,value,timestamp").option("maxOffsetsPerTrigger", a_batch).load()

    def files(name: str) -> DataFrame:
        stream = spark.readStream.schema("key binary, value binary, timestamp timestamp")
        return stream.option("maxFilesPerTrigger", FILES // BATCHES).parquet(str(root / "parquet" / name))

    queries: list[tuple[str, Query, int, int, str]] = [
        (f"join of two streams of {rows:,} rows", join, 2 * rows, rows, "append"),
        (f"count by key, {rows:,} rows", count_keys, rows, min(rows, KEYS), "update"),
    ]
    figures = []
    for what, query, read, expected, mode in queries:

        def rate(of: Callable[[str], DataFrame]) -> float:
            took = seconds_of(query(of("orders"), of("payments")), root / "checkpoint", expected, mode)  # noqa: B023
            return read / took  # noqa: B023

        found = alternate({"tidelog": lambda: rate(topic), "Parquet": lambda: rate(files)}, rounds)
        figures.append(compared(what, found, "Parquet", 0.9, unit=" rows/s"))
    return figures


def main() -> None:
    """Measures, and prints the result."""
    parser = parser_for(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of latency, a round and contender")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each stream of the queries")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("latency", "queries"))
    arguments = parser.parse_args()
    figures: list[Figure] = []
    with scratch_directory(arguments.dir) as root:
        spark = tidelog.spark_session("bench", "local[2]", **STATE)
        spark.dataSource.register(ReadySource)
        try:
            if arguments.only != "queries":
                figures += measure_latency(spark, root, arguments.seconds, arguments.rounds)
            if arguments.only != "latency":
                figures += measure_queries(spark, root, arguments.rows, arguments.rounds)
        finally:
            spark.stop()
    report("spark_stream", figures, {}, as_json=arguments.json)


if __name__ == "__main__":
    main()
