"""`format("tidelog_objects")` in Spark, before and after a compaction, and both formats found by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.pipeline.engines.histories import History

import pyspark_tidelog_entries
import pyspark_tidelog_objects
from tidelog.pipeline.source.entry_batches import as_text


def test_objects_in_spark_are_those_of_the_engine(spark: SparkSession, tmp_path: Path) -> None:
    """Rows, types and counts are right in Spark, with values and without, at an older seq, with the raw log gone."""
    history = History(tmp_path, "spark")
    with history.open() as engine:
        history.grow(engine)
        older = sorted(history.model.states)[-12]
        start_lsn = history.compact()
    assert start_lsn > 1
    source = spark.read.format("tidelog_objects").option("root", str(history.directory))
    whole = source.option("withData", True).option("withMetadata", True).option("seq", older).load()
    rows = [tuple(row) for row in whole.select("bucket", "key", "seq", "data", "metadata").collect()]
    assert sorted(rows, key=lambda row: row[:2]) == [
        (*one[:4], {name: as_text(value) for name, value in one[4].items()}) for one in history.objects_at(older)
    ]
    lean = spark.read.format("tidelog_objects").option("minPartitions", 3).load(history.store)
    assert lean.columns == ["bucket", "key", "seq", "order", "size", "crc"]
    assert lean.count() == len(history.objects_at(engine.high_water_mark))
    versions = spark.read.format("tidelog_objects").option("versions", True).load(history.store)
    assert versions.filter("is_deleted").count() > 0
    with pytest.raises(PySparkException, match="there is no column nope"):
        spark.read.format("tidelog_objects").option("columns", "nope").load(history.store).collect()


def test_spark_finds_the_formats_by_their_names() -> None:
    """Where tidelog is installed nobody registers anything; what a module does not have it says."""
    assert pyspark_tidelog_entries.DefaultSource.name() == "tidelog_entries"
    assert pyspark_tidelog_objects.DefaultSource.name() == "tidelog_objects"
    for module in (pyspark_tidelog_entries, pyspark_tidelog_objects):
        assert not hasattr(module, "another")
