"""Tables of topics with partitions: all partitions in one table, each from its own offset on."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import SparkSession

import tidelog
from tidelog.errors import OffsetOutOfRangeError
from tidelog.pipeline.address import find_root
from tidelog.pipeline.tables.files import table_location
from tidelog.pipeline.tables.iceberg import iceberg_table
from tidelog.pipeline.tables.parquet import ParquetTable
from tidelog.pipeline.tables.table import TableOptions, TableTarget, table
from tidelog.pipeline.tables.tasks import read_table
from tidelog.pipeline.tables.verify import TableContent, iceberg_content, parquet_content, verify_table
from tidelog.store.settings import StoreSettings

TOPIC = "shop/orders"


def fill(log: tidelog.LogDirectory, counts: dict[int, int]) -> None:
    topic = cast(tidelog.PartitionedTopic, log.topic(TOPIC))
    for number, count in counts.items():
        topic.append_many([b'{"n": %d}' % (10 * number + each) for each in range(count)], partition=number, sync=True)


@pytest.mark.parametrize("kind", ["raw", "json", "iceberg"])
def test_a_table_has_all_partitions(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Also of a topic that had none when the table was made; each run adds what came, and verify finds it equal."""
    root = find_root(tmp_path / "data")
    options = TableOptions(values="raw" if kind == "raw" else "json")

    def target() -> TableTarget:
        if kind != "iceberg":
            return ParquetTable(table_location(tmp_path / "table"))
        uri = f"sqlite:///{tmp_path}/catalog.db"
        return iceberg_table(uri, "shop.orders", warehouse=(tmp_path / "warehouse").as_uri())

    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC).append_many([b'{"n": 100}', b'{"n": 101}'], sync=True)
        table(spark, root, TOPIC, target(), options)
        log.topic(TOPIC, partitions=3)
        fill(log, {0: 1, 1: 4})
        second = table(spark, root, TOPIC, target(), options)
        assert [(one.first_offset, one.next_offset) for one in second.partitions] == [(0, 3), (0, 4), (0, 0)]
        fill(log, {2: 2, 1: 1})
        third = table(spark, root, TOPIC, target(), options)
        assert [(one.first_offset, one.next_offset) for one in third.partitions] == [(0, 3), (0, 5), (0, 2)]
        assert (third.next_offset, third.reconciliations[0].went_in.messages) == (10, 3)
        assert "the table is up to date" in table(spark, root, TOPIC, target(), options).notes
        if kind == "iceberg":
            content = iceberg_content(spark, target()._catalog, "shop.orders")  # type: ignore[attr-defined]
        else:
            content = parquet_content(spark, str(tmp_path / "table"), StoreSettings())
        assert verify_table(spark, root, content).ok
        if kind == "json":
            rows = read_table(spark, tmp_path / "table").selectExpr("coalesce(_partition, 0) p", "_offset o", "n")
            assert sorted((row.p, row.o, row.n) for row in rows.collect()) == sorted(
                [
                    (0, 0, 100),
                    (0, 1, 101),
                    (0, 2, 0),
                    *((1, at, 10 + at % 4) for at in range(5)),
                    (2, 0, 20),
                    (2, 1, 21),
                ]
            )
        if kind == "raw":
            rows = read_table(spark, tmp_path / "table").groupBy("topic", "partition").count()
            assert {row.partition: row["count"] for row in rows.collect()} == {0: 3, 1: 5, 2: 2}
            log.delete_topic(TOPIC)
            log.topic(TOPIC).append(b"{}", sync=True)
            with pytest.raises(OffsetOutOfRangeError, match="the table has 3 partitions, but shop/orders has 1"):
                table(spark, root, TOPIC, target(), options)


def test_a_row_that_is_missing_is_named_with_its_partition(spark: SparkSession, tmp_path: Path) -> None:
    """What the topic has behind a table that lost rows is told as partition and offset."""
    root = find_root(tmp_path / "data")
    with tidelog.open(tmp_path / "data") as log:
        log.topic(TOPIC, partitions=2)
        fill(log, {0: 2, 1: 2})
        table(spark, root, TOPIC, ParquetTable(table_location(tmp_path / "table")))
        content = parquet_content(spark, str(tmp_path / "table"), StoreSettings())
        less = content.rows.where("partition = 0 OR offset = 0")
        found = verify_table(spark, root, TableContent(content.name, content.state, less))
    assert [one.message for one in found.findings] == ["1 rows are missing from the table: offsets 1:1"]
