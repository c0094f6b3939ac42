"""One Spark session for all tests of the pipeline: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.spark_servers import connect_server, standalone_cluster

import tidelog
from tidelog.pipeline.session.session import JAVA_OPTIONS

# What lives for minutes is not worth a thorough compiler, which would take more of the machine than the tests do.
QUICK_JAVA = "-XX:TieredStopAtLevel=1"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with two cores and the format `tidelog`; whoever changes its settings puts them back."""
    settings = {JAVA_OPTIONS: QUICK_JAVA, "spark.sql.shuffle.partitions": "2"}
    session = tidelog.spark_session("tests", "local[2]", **settings)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a standalone master with two workers. A driver for it is a process of its own (`run_driver`)."""
    with standalone_cluster(tmp_path_factory.mktemp("spark-cluster")) as url:
        yield url


@pytest.fixture(scope="session")
def spark_connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Spark Connect server. A client of it is a process of its own (`run_driver`)."""
    with connect_server(tmp_path_factory.mktemp("spark-connect")) as url:
        yield url
