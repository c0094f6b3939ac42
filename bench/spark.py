"""Spark over a topic, against Spark over the same rows in Parquet, in one run.

    python bench/spark.py [--megabytes 1024] [--rounds 3] [--size 1024 --size 100] [--no-write]

Reading is `sum(length(value))` in local[2], over the objects of a shipped topic in a directory; the peers are Parquet
without dictionary, a Python data source that yields tuples, and one that yields the same Arrow batch again and again:
it reads nothing, so it is what Spark itself costs, and no Python source is faster. Writing takes the rows of that
Parquet to a topic, against writing them as Parquet again. Every round reads with each of them in turn; medians are
compared.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
from measuring import Figure, at_least, parser_for, report, scratch_directory
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import tidelog
from tidelog.pipeline.source.options import parse_source_options
from tidelog.pipeline.source.partition_reader import read_batches
from tidelog.pipeline.source.planning import OpenTopics
from tidelog.pipeline.tasks import tune_worker
from tidelog.topics.message import decode_frames

TOPIC = "bench/rows"
SMALL_BYTES = 100
PART_BYTES = 128 << 20
BATCH_BYTES = 3 << 20
BATCH_ROWS = 16384


def make_topic(root: Path, megabytes: int, size: int) -> int:
    """A shipped topic of random messages of one size; how many there are."""
    count = megabytes * 1024 * 1024 // size
    noise = os.urandom(1 << 20)
    with tidelog.open(root / "data", store=f"file://{root}/store", metadata="bucket", local_retention_bytes=1) as log:
        topic = log.topic(TOPIC)
        for first in range(0, count, 4096):
            many = range(first, min(count, first + 4096))
            topic.append_many([noise[n * 61 % (len(noise) - size) :][:size] for n in many])
        topic.ship()
        topic.prune()
    return count


def load(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    """The topic's values."""
    reader = spark.read.format("tidelog").option("root", f"file://{root}/store").option("subscribe", TOPIC)
    return reader.options(**{"columns": "value", **options}).load()


class TupleSource(DataSource):
    """What a Python source costs that makes an object a row."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def schema(self) -> str:
        return "value binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        return TupleReader(self.options["root"])


class TupleReader(DataSourceReader):
    """The same parts, the same bytes."""

    def __init__(self, root: str) -> None:
        self._options = parse_source_options({"root": root, "subscribe": TOPIC})

    def partitions(self) -> list[InputPartition]:
        with OpenTopics(self._options) as topics:
            ranges = {TOPIC: (0, topics.log(TOPIC).next_offset)}
            return [InputPartition((part, topics.place)) for part in topics.plan(ranges)]

    def read(self, partition: InputPartition) -> Iterator[tuple[bytes]]:
        for batch in read_batches(*partition.value, skips_gaps=False):
            assert batch.frames is not None
            for message in decode_frames(batch.frames, batch.start, batch.stop):
                yield (message.value,)


class ReadySource(DataSource):
    """What a Python source costs that has its rows ready, in batches of the size of ours."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return "value binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        return ReadyReader(int(self.options["size"]), int(self.options["count"]))


class ReadyReader(DataSourceReader):
    """As many parts as a topic of so many rows of that size has."""

    def __init__(self, size: int, count: int) -> None:
        self._size = size
        self._count = count

    def partitions(self) -> list[InputPartition]:
        parts = max(1, self._count * self._size // PART_BYTES)
        edges = [self._count * number // parts for number in range(parts + 1)]
        return [InputPartition(behind - first) for first, behind in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        tune_worker()
        rows = min(BATCH_ROWS, BATCH_BYTES // self._size)
        values = pa.array([os.urandom(self._size)] * rows, pa.binary())
        batch = pa.RecordBatch.from_arrays([values], names=["value"])
        for first in range(0, partition.value, rows):
            yield batch.slice(0, min(rows, partition.value - first))


def total(frame: DataFrame) -> int:
    """The query."""
    return int(frame.selectExpr("sum(length(value)) AS total").collect()[0].total)


def medians(rounds: int, work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each, measured in turn after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, one in work.items():
            begin = time.perf_counter()
            one()
            if number:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def read_rows(spark: SparkSession, root: Path, size: int, count: int, rounds: int) -> list[Figure]:
    """How fast the query is over each of them."""
    parquet = str(root / "parquet")
    load(spark, root).write.option("parquet.enable.dictionary", "false").parquet(parquet)
    work: dict[str, Callable[[], object]] = {
        "tidelog": lambda: total(load(spark, root)),
        "parquet": lambda: total(spark.read.parquet(parquet)),
        "ready": lambda: total(spark.read.format("ready").options(size=str(size), count=str(count)).load()),
    }
    if size <= SMALL_BYTES:
        work["tuples"] = lambda: total(spark.read.format("tuples").option("root", f"file://{root}/store").load())
    assert all(one() == size * count for one in work.values())
    found = medians(rounds, work)
    target = 0.7 if size <= SMALL_BYTES else 0.9
    figures = [compared(f"read {size} B rows, of Parquet", found, "parquet", count, target)]
    target = 0.7 if size <= SMALL_BYTES else 0.95
    figures.append(compared(f"read {size} B rows, of a source that has them ready", found, "ready", count, target))
    if "tuples" in found:
        figures.append(compared(f"read {size} B rows, of a source of tuples", found, "tuples", count, 3.0))
    return figures


def write_rows(spark: SparkSession, root: Path, size: int, count: int, rounds: int) -> list[Figure]:
    """How fast the rows are written to each of them."""
    rows = spark.read.parquet(str(root / "parquet"))

    def to_topic() -> None:
        target = Path(tempfile.mkdtemp(dir=root))
        rows.write.format("tidelog").option("root", str(target)).option("topic", TOPIC).mode("append").save()
        shutil.rmtree(target)

    def to_parquet() -> None:
        target = tempfile.mkdtemp(dir=root)
        rows.write.mode("overwrite").option("parquet.enable.dictionary", "false").parquet(target)
        shutil.rmtree(target)

    found = medians(rounds, {"tidelog": to_topic, "parquet": to_parquet})
    return [compared(f"write {size} B rows, of Parquet", found, "parquet", count, 0.6)]


def compared(what: str, seconds: dict[str, float], peer: str, count: int, target: float) -> Figure:
    """Rows a second of ours and of a peer."""
    ours, theirs = (f"{count / seconds[name] / 1e6:.2f} M rows/s" for name in ("tidelog", peer))
    return at_least(what, ours, f"{peer} {theirs}", seconds[peer] / seconds["tidelog"], target)


def main() -> None:
    """Runs it."""
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, action="append", help="bytes of a message (1024, then 100)")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    spark = tidelog.spark_session("bench", "local[2]")
    for source in (TupleSource, ReadySource):
        spark.dataSource.register(source)
    figures: list[Figure] = []
    for size in arguments.size or [1024, SMALL_BYTES]:
        with scratch_directory(arguments.dir) as root:
            count = make_topic(root, arguments.megabytes, size)
            figures += read_rows(spark, root, size, count, arguments.rounds)
            if not arguments.no_write:
                figures += write_rows(spark, root, size, count, arguments.rounds)
    spark.stop()
    report("spark", figures, {"megabytes": arguments.megabytes}, as_json=arguments.json)


if __name__ == "__main__":
    main()
