"""Reading what a server has, and has not shipped yet, with the option `server`."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.service.http.serving import serving

from tidelog.errors import InputError
from tidelog.pipeline.source.options import parse_source_options
from tidelog.pipeline.source.topics import TidelogDataSource


def test_newest_messages_of_a_server_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """Without the option a reader of the bucket sees what was shipped before; with it everything that was accepted."""
    store = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    spark.dataSource.register(TidelogDataSource)
    with serving(tmp_path / "data", store=store) as served:
        served.ok("PUT", "/v1/topics/shop/orders", {"partitions": 2})
        for number in range(10):
            served.produce("shop/orders", f"v{number}", partition=str(number % 2))
        options = {"root": store, "metadata": "bucket", "subscribe": "shop/orders"}
        reader = spark.read.format("tidelog").options(**options)
        assert reader.load().count() == 0
        url = f"http://{served.address.host}:{served.address.port}"
        rows = reader.option("server", url).load().selectExpr("cast(value as string) as v").collect()
        assert sorted(row["v"] for row in rows) == [f"v{number}" for number in range(10)]


def test_server_must_be_a_url() -> None:
    """What Spark is given by mistake is refused before anything is read."""
    with pytest.raises(InputError, match="server must be the URL"):
        parse_source_options({"root": "/tmp/none", "subscribe": "a/b", "server": "localhost:8080"})
