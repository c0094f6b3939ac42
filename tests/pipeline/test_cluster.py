"""Beyond one machine: a standalone cluster whose workers have never heard of tidelog, and Spark Connect."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.pipeline.spark_servers import run_driver, run_submit

import tidelog
from tidelog.pipeline.session.cluster import (
    ARCHIVES,
    EXECUTOR_PATH,
    cluster_settings,
    pack_for_cluster,
    sending_settings,
)

TOPIC = "shop/orders"
MESSAGES = 2000

ON_A_CLUSTER = """
import json, sys
import tidelog

master, root = sys.argv[1:]
spark = tidelog.spark_session("cluster", master, **{
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.scheduler.minRegisteredResourcesRatio": 1.0,
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
})
orders = spark.read.format("tidelog").option("root", root).option("subscribe", "shop/orders").option("minPartitions", 8)
rows, length = orders.load().selectExpr("count(*)", "sum(length(value))").first()

def where(numbers):
    import os, tidelog
    yield os.getcwd(), tidelog.__file__

places = spark.sparkContext.parallelize(range(8), 8).mapPartitions(where).collect()
print(json.dumps({"rows": rows, "length": length, "places": places}))
spark.stop()
"""

SUBMITTED = """
import json, sys
import tidelog

spark = tidelog.spark_session()
orders = spark.read.format("tidelog").option("root", sys.argv[1]).option("subscribe", "shop/orders").load()
kept = [spark.conf.get(name) for name in ("spark.master", "spark.sql.session.timeZone", "spark.sql.shuffle.partitions")]
print(json.dumps({"rows": orders.count(), "kept": kept}))
spark.stop()
"""

THROUGH_CONNECT = """
import json, sys
import tidelog

remote, root = sys.argv[1:]
spark = tidelog.spark_session("client", remote)
read = spark.read.format("tidelog").option("root", root).option("subscribe", "shop/orders")
rows, length = read.load().selectExpr("count(*)", "sum(length(value))").first()
print(json.dumps({"rows": rows, "length": length, "module": type(spark).__module__}))
spark.stop()
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a store with a topic in it."""
    root = tmp_path_factory.mktemp("cluster-shop")
    with tidelog.open(root / "data", store=f"file://{root}/store", metadata="bucket") as log:
        topic = log.topic(TOPIC)
        topic.append_many([b"order %06d" % number for number in range(MESSAGES)])
        topic.ship()
    return f"file://{root}/store"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What executors are sent."""
    return pack_for_cluster(tmp_path_factory.mktemp("package") / "tidelog-cluster.zip")


@pytest.mark.long
def test_a_cluster_reads_topics_with_the_package_it_is_sent(spark_cluster: str, shop: str, tmp_path: Path) -> None:
    """Two workers that have no tidelog of their own read a topic, each with what the driver brought along."""
    told = json.loads(run_driver(ON_A_CLUSTER, spark_cluster, shop, XDG_CACHE_HOME=str(tmp_path)))
    assert (told["rows"], told["length"]) == (MESSAGES, MESSAGES * len(b"order 000000"))
    places = {Path(place) for place, _ in told["places"]}
    assert len(places) == 2
    assert {Path(place, found) for place, found in told["places"]} == {
        place / "tidelog_packages" / "tidelog" / "__init__.py" for place in places
    }


@pytest.mark.long
def test_spark_submit_sends_the_package_and_keeps_its_settings(spark_cluster: str, shop: str, tmp_path: Path) -> None:
    """The commands of the guide: what spark-submit was told stays, and executors get the package it names."""
    program = tmp_path / "program.py"
    program.write_text(SUBMITTED, "utf-8")
    settings = cluster_settings(pack_for_cluster(tmp_path / "tidelog-cluster.zip"))
    options = {"spark.executorEnv.PYTHONPATH": settings[EXECUTOR_PATH], "spark.driver.host": "127.0.0.1"}
    options |= {
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.executor.memory": "512m",
        "spark.ui.enabled": "false",
    }
    told = json.loads(run_submit(spark_cluster, settings[ARCHIVES], options, str(program), shop))
    assert told == {"rows": MESSAGES, "kept": [spark_cluster, "Asia/Tokyo", "200"]}


@pytest.mark.long
def test_spark_connect_reads_topics(spark_connect: str, shop: str) -> None:
    """A client of a Spark Connect server gets its session by the same call, and the rows of a topic."""
    told = json.loads(run_driver(THROUGH_CONNECT, spark_connect, shop))
    assert told == {"rows": MESSAGES, "length": MESSAGES * 12, "module": "pyspark.sql.connect.session"}


ALONE = """
import sys
from tidelog.pipeline.address import find_root

with find_root(sys.argv[1]).open() as log:
    print(sum(1 for _ in log.topic("shop/orders").read()), find_root.__code__.co_filename)
"""


def test_a_package_is_enough_to_read_topics(package: Path, shop: str, tmp_path: Path) -> None:
    """A Python without anything installed has, with the package on its path, all that reading takes."""
    with zipfile.ZipFile(package) as packed:
        packed.extractall(tmp_path / "there")
    found = subprocess.run(
        [sys.executable, "-S", "-c", ALONE, shop],
        env={"PYTHONPATH": str(tmp_path / "there")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(MESSAGES), str(tmp_path / "there" / "tidelog" / "pipeline" / "address.py")]


def test_a_package_has_the_kernels_and_the_same_bytes_each_time(package: Path, tmp_path: Path) -> None:
    """Made twice it is the same file, with compiled modules in it and nothing that was only cached."""
    assert pack_for_cluster(tmp_path / "again.zip").read_bytes() == package.read_bytes()
    with zipfile.ZipFile(package) as packed:
        names = packed.namelist()
    settings = "tidelog/pipeline/session/log4j2.properties"
    assert {"tidelog/__init__.py", "pyspark_tidelog/__init__.py", settings} <= set(names)
    assert any(name.startswith("obstore/") and name.endswith(".so") for name in names)
    assert not any("__pycache__" in name for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["again.zip"]


def test_a_package_is_made_once_and_not_where_the_caller_sends_his_own(tmp_path: Path) -> None:
    """The second session sends the file of the first; a caller's own setting is left alone."""
    first = sending_settings({}, tmp_path / "cache")
    (package,) = (tmp_path / "cache").iterdir()
    made = package.stat().st_ino
    assert first == {ARCHIVES: f"{package.as_uri()}#tidelog_packages", EXECUTOR_PATH: "tidelog_packages"}
    assert sending_settings({"spark.driver.memory": "1g"}, tmp_path / "cache") == first
    assert package.stat().st_ino == made
    assert sending_settings({ARCHIVES: "own.zip"}, tmp_path / "none") == {}
    assert not (tmp_path / "none").exists()
