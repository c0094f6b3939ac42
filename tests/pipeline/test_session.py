"""The session: what `tidelog.spark_session` sets, and what it says when it cannot."""

from __future__ import annotations

from pyspark.sql import SparkSession


def test_a_session_runs_queries(spark: SparkSession) -> None:
    """The shared session counts."""
    assert spark.range(10).count() == 10
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
