"""The steps of the demo that need Spark: query the bucket, write a topic, run the jobs, leave a page to look at."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tidelog.cli.demo_steps import TOPIC, Step
from tidelog.cli.demo_store_steps import Bucket, open_node
from tidelog.cli.output import human_bytes
from tidelog.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.jobs.job import JobReport
    from tidelog.pipeline.root import Root

CUSTOMERS = "demo/customers"
PAGE = "report.html"
_OBJECT_BYTES = 64 << 20
_INSTALL = "PySpark is not installed (pip install 'tidelog[spark]')"


def why_not() -> str | None:
    """Why there is no Spark here, and how to get it; None where there is."""
    if importlib.util.find_spec("pyspark") is None or importlib.util.find_spec("pyarrow") is None:
        return _INSTALL
    from tidelog.pipeline.java import find_java

    try:
        find_java()
    except ConfigError as error:
        return str(error)
    return None


@contextlib.contextmanager
def session() -> Iterator[SparkSession]:
    """A Spark session for as long as this lasts; one that runs already goes on."""
    from pyspark.sql import SparkSession

    from tidelog.pipeline import spark_session

    is_running = SparkSession.getActiveSession() is not None
    spark = spark_session("tidelog demo", "local[2]")
    try:
        yield spark
    finally:
        if not is_running:
            spark.stop()


def root_of(place: Bucket) -> Root:
    """The bucket as Spark finds it."""
    from tidelog.pipeline.root import find_root

    return find_root(place.url, None, **place.plain_settings())


def query(spark: SparkSession, place: Bucket, messages: int) -> Step:
    """Reads everything from the bucket, in SQL."""
    from tidelog.pipeline.jobs.topic_rows import root_options

    root = root_of(place)
    started = time.perf_counter()
    frame = spark.read.format("tidelog").options(subscribe=TOPIC, **root_options(root)).load()
    frame.createOrReplaceTempView("orders")
    found = spark.sql("""
        SELECT count(*) AS messages, count(DISTINCT offset) AS offsets, max(offset) AS last,
               count(DISTINCT key) AS customers, sum(length(value)) AS bytes
        FROM orders
    """).collect()[0]
    seconds = time.perf_counter() - started
    findings = [
        f"{found.messages:,} messages of {found.customers:,} customers, {human_bytes(found.bytes)}: {seconds:.1f} s"
    ]
    step = Step(findings=findings, numbers={"queried": found.messages, "query_seconds": seconds})
    step.proofs["Spark sees every message of the bucket once"] = (
        found.messages == found.offsets == messages and found.last == messages - 1
    )
    return step


def write(spark: SparkSession, owner: Path, place: Bucket) -> Step:
    """Writes what it found to another topic, beside the process that owns it."""
    from tidelog.pipeline.jobs.topic_rows import root_options

    root = root_of(place)
    with open_node(owner, place) as log:
        topic = log.topic(CUSTOMERS)
        counts = spark.sql("SELECT key, to_json(struct(count(*) AS orders)) AS value FROM orders GROUP BY key")
        options = {**root_options(root), "topic": CUSTOMERS, "txnAppId": "demo", "txnVersion": "1"}
        for _ in range(2):
            counts.write.format("tidelog").options(**options).mode("append").save()
        written = list(topic.read())
        topic.ship()
    customers = spark.sql("SELECT DISTINCT key FROM orders").count()
    step = Step(findings=[f"{len(written):,} rows came into {CUSTOMERS} through its owner; written twice, there once"])
    step.numbers = {"written_by_spark": len(written)}
    step.proofs["each row that Spark wrote is in the topic once"] = (
        len(written) == customers == len({message.key for message in written})
    )
    return step


def run_jobs(spark: SparkSession, directory: Path, place: Bucket) -> Step:
    """Verifies, compacts and verifies the bucket, makes a table of it and proves that it is equal."""
    from tidelog.pipeline.jobs.compact import CompactOptions, compact
    from tidelog.pipeline.jobs.verify import verify

    root, step = root_of(place), Step()
    before = verify(spark, root)
    compacted = compact(spark, root, options=CompactOptions(target_bytes=_OBJECT_BYTES))
    after = verify(spark, root)
    replaced = sum(one.replaced_objects for one in compacted.topics)
    step.findings.append(f"{replaced} small objects became {sum(one.new_objects for one in compacted.topics)}")
    step.numbers = {"compacted_objects": replaced}
    step.proofs["every frame in the bucket is good"] = before.is_good and after.is_good
    step.proofs["what was compacted is the same, message for message"] = compacted.is_good and _same(before, after)
    _make_table(spark, root, directory, step)
    _make_page(spark, root, directory, step)
    return step


def _same(before: JobReport, after: JobReport) -> bool:
    return [proof.went_in for proof in before.proofs] == [proof.went_in for proof in after.proofs]


def _make_table(spark: SparkSession, root: Root, directory: Path, step: Step) -> None:
    from tidelog.pipeline.jobs.table import table
    from tidelog.pipeline.jobs.table_parquet import parquet_table

    path = (directory / "table").resolve()
    made = table(spark, root, TOPIC, parquet_table(path))
    rows = spark.read.parquet(str(path)).count()
    step.findings.append(f"{path.name}/ is the topic as a Parquet table of {rows:,} rows")
    step.numbers["table_rows"] = rows
    step.proofs["the table has the rows of the topic"] = made.is_good and rows == spark.table("orders").count()


def _make_page(spark: SparkSession, root: Root, directory: Path, step: Step) -> None:
    from tidelog.pipeline.jobs.report import make_report

    page = directory / PAGE
    make_report(root, page, spark=spark, exact=True)
    step.findings.append(f"{page} is a page to look at")
    step.numbers["page"] = str(page)
