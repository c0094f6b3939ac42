"""One Spark session for all tests of the pipeline: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

import tidelog.pipeline


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with two cores and the format `tidelog`; whoever changes its settings puts them back."""
    session = tidelog.pipeline.spark_session("tests", "local[2]")
    yield session
    session.stop()
