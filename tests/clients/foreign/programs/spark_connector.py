"""Spark's own Kafka connector does what foreign/test_foreign.py asks, and prints what it saw as one line of JSON."""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f


def main(broker: str, topic: str, jars: str, checkpoint: str) -> None:
    """Writes 1,000 rows, reads them as a batch and as a stream that ends."""
    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars)
    spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    rows = spark.range(1000).select(
        f.concat(f.lit("key "), "id").cast("binary").alias("key"),
        f.col("id").cast("string").cast("binary").alias("value"),
    )
    options = {"kafka.bootstrap.servers": broker}
    rows.write.format("kafka").options(**options).option("topic", topic).save()
    read = spark.read.format("kafka").options(**options).option("subscribe", topic).load()
    found = read.agg(f.count("*"), f.countDistinct("key"), f.max("offset")).first()
    stream = spark.readStream.format("kafka").options(**options).option("subscribe", topic)
    counted = stream.option("startingOffsets", "earliest").load().groupBy().count()
    query = counted.writeStream.format("memory").queryName("counted").outputMode("complete")
    query.trigger(availableNow=True).option("checkpointLocation", checkpoint).start().awaitTermination()
    streamed = spark.sql("select * from counted").first()
    assert found is not None
    assert streamed is not None
    sys.stdout.write(json.dumps({"batch": list(found), "stream": streamed[0]}) + "\n")
    spark.stop()


main(*sys.argv[1:])
