"""Tables over the topic shop/orders, declared for `spark-pipelines run`.

`orders` is a streaming table: each run takes the messages that came since the last one, each once. `totals` is a
materialized view: each run computes it from all messages.
"""

from __future__ import annotations

import os

from pyspark import pipelines
from pyspark.sql import DataFrame, SparkSession

ROOT = os.environ.get("TIDELOG_ROOT", "./data")
spark = SparkSession.active()


@pipelines.table
def orders() -> DataFrame:
    """Offset, time and text of every message."""
    messages = spark.readStream.format("tidelog").option("root", ROOT).option("subscribe", "shop/orders")
    rows = messages.option("startingOffsets", "earliest").load()
    return rows.selectExpr("offset", "timestamp", "CAST(value AS string) AS value")


@pipelines.materialized_view
def totals() -> DataFrame:
    """How many messages each topic has."""
    rows = spark.read.format("tidelog").option("root", ROOT).option("subscribe", "shop/orders").load()
    return rows.groupBy("topic").count()
