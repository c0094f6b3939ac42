"""Change data of an engine in Python: `tidelog_entries` with the option `changes`, for MERGE into a table.

    change_data(spark, find_engine("s3://bucket/prefix"), 1201).createOrReplaceTempView("changes")

What the rows are is said in `source/change_data.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.errors import InputError
from tidelog.pipeline.address import EngineRoot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def change_data(
    spark: SparkSession,
    engine: EngineRoot,
    starting_seq: int = 1,
    ending_seq: int | None = None,
    *,
    newest_only: bool = False,
    with_data: bool = True,
) -> DataFrame:
    """The changes of an engine's objects from one seq to another, both included; by default all that is shipped.

    With `newest_only` there is one row for each object that differs at the end, `before` as it was before the first
    seq: that is what MERGE takes. Without `with_data` the values are not read, and `data` and `metadata` are null.
    """
    with engine.open() as opened:
        mark = opened.manifest.high_water_mark
    last = mark if ending_seq is None else ending_seq
    if not 1 <= starting_seq <= last + 1 <= mark + 1:
        raise InputError(
            f"there are no changes from seq {starting_seq} to {last}: the store has entries up to {mark}",
            hint="Begin at 1 or later, and end at what is shipped",
        )
    reader = spark.read.format("tidelog_entries").option("root", engine.store_url).option("engine", engine.name)
    reader = reader.options(startingSeq=starting_seq, endingSeq=last, changes=True, newestOnly=newest_only)
    return reader.options(includeValue=with_data, includeMetadata=with_data, **engine.settings).load()
