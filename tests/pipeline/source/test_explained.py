"""`explain` of the pipeline: a query says which topics, partitions, offsets and bytes it reads, and of engines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

import tidelog
from tidelog.errors import NotSupportedError
from tidelog.pipeline import explain
from tidelog.pipeline.source.options import source_schema
from tidelog.pipeline.source.topics import TidelogDataSource


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A topic with 30 messages, 20 of them in the store, and one with two partitions."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/store", metadata="bucket") as log:
        orders = log.topic("shop/orders")
        orders.append_many([b"x" * 1000] * 20)
        orders.ship()
        orders.append_many([b"x" * 1000] * 10)
        parts = log.topic("shop/parts", partitions=2)
        for number in range(2):
            parts.partition(number).append_many([b"y"] * (number + 1))
    return tmp_path / "data"


@pytest.fixture
def sql(spark: SparkSession) -> Iterator[SparkSession]:
    yield spark
    for table in spark.catalog.listTables():
        spark.sql(f"DROP {'VIEW' if table.isTemporary else 'TABLE'} IF EXISTS {table.name}")


def _read(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    return spark.read.format("tidelog").option("root", str(root)).options(**options).load()


def _explained(frame: DataFrame, capsys: pytest.CaptureFixture[str], mode: str | None = None) -> tuple[str, list[str]]:
    """What Spark said, and our lines."""
    explain(frame, mode)
    plan, _, ours = capsys.readouterr().out.partition("== tidelog ==\n")
    return plan, ours.strip().splitlines()


def test_query_says_topics_partitions_offsets_and_bytes(
    spark: SparkSession, shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under Spark's own plan, and for the range that the options ask for."""
    frame = _read(spark, shop, subscribePattern="shop/.*", startingOffsets='{"shop/orders": {"0": 5}}')
    plan, lines = _explained(frame.where("value IS NOT NULL"), capsys, "formatted")
    assert "BatchScan tidelog" in plan
    assert lines[0].startswith("shop/orders: offsets 5 to 29, 2")
    assert lines[0].endswith(" KiB")
    assert [line.rpartition(", ")[0] for line in lines[1:]] == [
        "shop/parts partition 0: offsets 0 to 0",
        "shop/parts partition 1: offsets 0 to 1",
    ]


def test_every_relation_of_a_query_is_named_also_in_subqueries_and_tables(
    sql: SparkSession, shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of the catalog has its options in its columns; a cached frame and one of other data read nothing."""
    sql.sql(f"CREATE TABLE orders USING tidelog OPTIONS (root '{shop}', topic 'shop/orders')")
    frame = sql.sql(
        'SELECT value FROM orders WITH (startingOffsets = \'{"shop/orders": {"0": 28}}\') '
        "WHERE offset > (SELECT min(offset) FROM orders)"
    )
    _, lines = _explained(frame, capsys)
    assert [line.partition(",")[0] for line in lines] == [
        "shop/orders: offsets 28 to 29",
        "shop/orders: offsets 0 to 29",
    ]
    assert _explained(sql.range(3), capsys)[1] == ["nothing of topics or engines"]


def test_stream_says_what_it_would_begin_with(
    spark: SparkSession, shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a checkpoint; a mistake that the query would tell is told here as well."""
    reader = spark.readStream.format("tidelog").option("root", str(shop)).option("subscribe", "shop/orders")
    _, lines = _explained(reader.option("startingOffsets", '{"shop/orders": 28}').load(), capsys)
    assert [line.partition(",")[0] for line in lines] == ["shop/orders: offsets 28 to 29"]
    assert lines[0].endswith("(a stream: without a checkpoint, as of now)")
    _, lines = _explained(reader.option("startingOffsets", "latest").load(), capsys)
    assert lines[0].startswith("shop/orders: nothing, from offset 30 on")


def test_engine_says_its_log_and_its_state(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LSNs of the entries, and the seq of the objects."""
    store = (tmp_path / "engine").as_uri()
    with tidelog.open_engine(tmp_path / "node", store=store) as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        engine.apply_many([(seq, tidelog.PutObject("photos", f"{seq}.png", b"x" * seq)) for seq in (2, 3)])
        engine.update_low_water_mark(3)
        engine.ship()
    entries = spark.read.format("tidelog_entries").option("root", store).load()
    objects = spark.read.format("tidelog_objects").option("root", store).option("seq", 2).load()
    _, lines = _explained(entries.select("key").union(objects.select("key")), capsys)
    assert lines[0].startswith(f"engine main in {store}: LSNs 1 to ")
    assert lines[1].startswith(f"engine main in {store}: the state at seq 2, ")
    stream = spark.readStream.format("tidelog_entries").option("root", store).option("startingSeq", 1).load()
    assert _explained(stream, capsys)[1][0].startswith(f"engine main in {store}: LSNs 1 to ")


def test_over_connect_it_says_that_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is at the server; nothing is shown that might not be so."""
    with pytest.raises(NotSupportedError, match="at the server"):
        explain(cast(DataFrame, SimpleNamespace(explain=None)))
    assert capsys.readouterr().out == ""


def test_planned_read_is_one_event(shop: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever turns on INFO sees what each query reads, and what it costs stays out of the way of the others."""
    options: Any = {"root": str(shop), "subscribePattern": "shop/.*"}
    schema: StructType = source_schema((), include_headers=False)
    reader = TidelogDataSource(options).reader(schema)
    with caplog.at_level(logging.WARNING, "tidelog.pipeline"):
        assert len(reader.partitions()) == 3
    assert not caplog.records
    with caplog.at_level(logging.INFO, "tidelog.pipeline"):
        reader.partitions()
    (record,) = caplog.records
    found = vars(record)
    assert (found["event"], found["tasks"]) == ("read_planned", 3)
    assert found["reads"].startswith("shop/orders: offsets 0 to 29, ")
    assert "shop/parts partition 1: offsets 0 to 1, " in found["reads"]


def test_mistake_is_told_by_explain_too(spark: SparkSession, shop: Path) -> None:
    """Offsets that are not there are an error of the query: the plan does not pretend."""
    frame = _read(spark, shop, subscribe="shop/orders", startingOffsets='{"shop/orders": 99}')
    with pytest.raises((PySparkException, tidelog.TidelogError), match="ends at offset 30"):
        explain(frame)
