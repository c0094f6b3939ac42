"""Spark over a cluster: the newest messages come from the nodes that own their partitions, wherever these move to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.cluster.processes import PARTITIONS, DevCluster, Producing, until

import tidelog
from tidelog.cli.dev_s3 import SeaweedDirectory
from tidelog.pipeline.source.topics import TidelogDataSource

LEASE_SECONDS = 12.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """Three nodes."""
    running = DevCluster(tmp_path_factory.mktemp("spark-cluster"), LEASE_SECONDS)
    try:
        yield running
    finally:
        running.stop()


def options_of(cluster: DevCluster, topic: str, node: str) -> dict[str, str]:
    keys = SeaweedDirectory(cluster.directory / "s3").keys()
    return {
        "root": cluster.facts["store"],
        "metadata": cluster.facts["metadata"],
        "subscribe": topic.replace(".", "/", 1),
        "server": cluster.nodes[node]["http"],
        "store_endpoint": cluster.facts["endpoint"],
        "store_access_key_id": keys.access_key_id,
        "store_secret_access_key": keys.secret_access_key.reveal(),
    }


def rows_of(frame: DataFrame) -> dict[int, list[tuple[int, int]]]:
    """Offsets and values, by partition."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row in frame.selectExpr("partition", "offset", "cast(value as string) v").collect():
        found.setdefault(row["partition"], []).append((row["offset"], int(row["v"])))
    return {number: sorted(some) for number, some in found.items()}


def test_what_no_node_has_shipped_is_read(spark: SparkSession, cluster: DevCluster) -> None:
    """A batch has every acknowledged message of all nodes, though none of them has shipped anything."""
    spark.dataSource.register(TidelogDataSource)
    topic = cluster.create()
    with tidelog.connect(cluster.nodes[min(cluster.nodes)]["http"]) as client:
        client.configure_topic(topic.replace(".", "/", 1), ship_max_delay_seconds=3600)
    until(lambda: len(set(cluster.leaders(topic).values()) - {""}) > 1)  # partitions are on several nodes
    producing = Producing(cluster, topic)
    producing.more()
    producing.stop()
    given = options_of(cluster, topic, min(cluster.nodes))
    written = {number: sorted(some) for number, some in producing.acknowledged.items()}
    assert rows_of(spark.read.format("tidelog").options(**given).load()) == written
    del given["server"]
    assert rows_of(spark.read.format("tidelog").options(**given).load()) == {}


def test_spark_follows_partitions_to_other_nodes(spark: SparkSession, cluster: DevCluster, tmp_path: Path) -> None:
    """A batch and a stream have every acknowledged message, once, while a partition moves and after a node died."""
    spark.dataSource.register(TidelogDataSource)
    topic = cluster.create(**{"tidelog.durability": "shipped"})
    producing = Producing(cluster, topic)
    producing.more()
    asked, victim, _ = sorted(cluster.nodes)
    given = options_of(cluster, topic, asked)
    table = f"newest_{topic.partition('.')[2]}"
    query = (
        spark.readStream.format("tidelog")
        .options(startingOffsets="earliest", **given)
        .load()
        .writeStream.format("memory")
        .queryName(table)
        .trigger(processingTime="1 second")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        cluster.move(topic, 0, victim)
        producing.more()
        cluster.kill(victim)
        until(lambda: not {victim, ""} & set(cluster.leaders(topic).values()))
        producing.more()
        producing.stop()
        written = {number: sorted(some) for number, some in producing.acknowledged.items()}
        assert rows_of(spark.read.format("tidelog").options(**given).load()) == written
        total = sum(map(len, written.values()))
        until(lambda: spark.table(table).count() >= total or not query.isActive)
        assert query.exception() is None
        assert rows_of(spark.table(table)) == written
        assert set(written) <= set(range(PARTITIONS))
    finally:
        query.stop()
        cluster.start(victim)
        until(lambda: cluster.operations.status().nodes == 3)
