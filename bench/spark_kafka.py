"""Spark's Kafka connector over a real Kafka, beside Spark over a topic of tidelog: the same rows, the same session.

Reading is `sum(length(value))` in local[2] over rows of 1 KiB; writing takes such rows from Parquet into a new topic.
Tidelog's topic is one of a store in a directory, as Spark's jobs see it; Kafka's is a broker on this machine with its
defaults (acks=all of one replica: in its file, not synced), with two partitions, so that both cores read. Rounds
alternate; the first one of each does not count.

python bench/spark_kafka.py [--megabytes 500] [--rounds 3] [--jars DIR] [--dir .] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient, NewTopic
from kafka_peer import CLIENTS, JARS, Kafka, maven_jars
from measuring import Figure, MissingPeerError, alternate, compared, parser_for, report, scratch_directory

import tidelog
from tidelog.cli.dev_s3 import free_ports

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The newest that Maven Central had as this was written: neither the connector of Spark 4.3.0 was there, nor a token
# provider after 4.0.0, which only a Kafka with delegation tokens uses.
CONNECTOR = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
ROW_BYTES = 1024
PARTITIONS = 2
TOPIC = "bench/rows"
TARGET = 4.0


class Sides:
    """The same rows on both sides, and what Spark does with them."""

    def __init__(self, spark: SparkSession, kafka: Kafka, scratch: Path, megabytes: int) -> None:
        self._spark = spark
        self._kafka = kafka
        self._scratch = scratch
        self._count = megabytes << 10
        self._parquet = str(scratch / "parquet")
        self._numbers = itertools.count()
        self._admin = AdminClient({"bootstrap.servers": kafka.address})

    def fill(self) -> None:
        """One Parquet of the rows, written to either side once."""
        noise = os.urandom(512).hex()
        rows = self._spark.range(0, self._count, 1, PARTITIONS)
        value = f"CAST(concat(lpad(CAST(id AS STRING), 16, '0'), '{noise[16:]}') AS BINARY) AS value"
        plain = {"parquet.enable.dictionary": "false", "compression": "none"}
        rows.selectExpr(value).write.options(**plain).parquet(self._parquet)
        self._to_kafka(self._new_topic("rows"))
        self._to_tidelog(self._scratch / "rows")

    def read_kafka(self) -> float:
        """Rows a second by the connector."""
        reader = self._spark.read.format("kafka").option("kafka.bootstrap.servers", self._kafka.address)
        return self._sum(reader.option("subscribe", "rows").load())

    def read_tidelog(self) -> float:
        """Rows a second by our source."""
        reader = self._spark.read.format("tidelog").option("root", f"file://{self._scratch / 'rows'}")
        return self._sum(reader.option("subscribe", TOPIC).option("columns", "value").load())

    def write_kafka(self) -> float:
        """Rows a second into a new topic."""
        topic = self._new_topic(f"written-{next(self._numbers)}")
        rate = self._timed(lambda: self._to_kafka(topic))
        self._admin.delete_topics([topic])[topic].result(60)
        return rate

    def write_tidelog(self) -> float:
        """Rows a second into a new topic."""
        target = self._scratch / f"written-{next(self._numbers)}"
        rate = self._timed(lambda: self._to_tidelog(target))
        shutil.rmtree(target)
        return rate

    def _rows(self) -> DataFrame:
        return self._spark.read.parquet(self._parquet)

    def _to_kafka(self, topic: str) -> None:
        writer = self._rows().write.format("kafka").option("kafka.bootstrap.servers", self._kafka.address)
        writer.option("topic", topic).save()

    def _to_tidelog(self, target: Path) -> None:
        target.mkdir()
        writer = self._rows().write.format("tidelog").option("root", f"file://{target}").option("topic", TOPIC)
        writer.mode("append").save()

    def _new_topic(self, name: str) -> str:
        self._admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(60)
        return name

    def _sum(self, rows: DataFrame) -> float:
        def ask() -> None:
            total = rows.selectExpr("sum(length(value)) AS total").collect()[0].total
            assert total == self._count * ROW_BYTES, f"{total} bytes came, not {self._count * ROW_BYTES}"

        return self._timed(ask)

    def _timed(self, work: Callable[[], None]) -> float:
        begin = time.perf_counter()
        work()
        return self._count / (time.perf_counter() - begin)


def measured(arguments: argparse.Namespace) -> tuple[list[Figure], dict[str, object]]:
    """Both directions."""
    jars = maven_jars(CLIENTS / "spark-kafka" / "jars", CONNECTOR)
    with scratch_directory(arguments.dir) as scratch, ExitStack() as running:
        kafka = running.enter_context(Kafka(scratch / "kafka", arguments.jars, free_ports(2)[0]))
        # Beside, not through `spark.jars`: those would be copied to every worker of the session.
        settings = {"spark.driver.extraClassPath": ":".join(map(str, jars))}
        spark = tidelog.spark_session("bench", "local[2]", **settings)
        running.callback(spark.stop)
        sides = Sides(spark, kafka, scratch, arguments.megabytes)
        sides.fill()
        reading = {"tidelog": sides.read_tidelog, "Kafka's connector": sides.read_kafka}
        writing = {"tidelog": sides.write_tidelog, "Kafka's connector": sides.write_kafka}
        alternate(reading, 1)
        reads = alternate(reading, arguments.rounds)
        alternate(writing, 1)
        writes = alternate(writing, arguments.rounds)
    peer, size = "Kafka's connector", f"{arguments.megabytes} MiB of 1 KiB rows"
    figures = [
        compared(f"Spark reads {size}", reads, peer, TARGET, unit=" rows/s"),
        compared(f"Spark writes {size}", writes, peer, TARGET, unit=" rows/s", durability="staged / in the file"),
    ]
    return figures, {"reads": reads, "writes": writes}


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="of rows (500)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    parser.add_argument("--jars", type=Path, default=JARS, help="where Kafka's jars are kept")
    arguments = parser.parse_args()
    missing: list[str] = []
    figures, details = list[Figure](), dict[str, object]()
    try:
        figures, details = measured(arguments)
    except MissingPeerError as error:
        missing.append(f"Spark's Kafka connector: {error}")
    report("spark_kafka", figures, details, as_json=arguments.json, missing=missing)


if __name__ == "__main__":
    main()
