"""A streaming query from one topic to another, killed at steps of its batches and started again, until all rows came.

    stream.py SOURCE SINK CHECKPOINT KILLS        with hooks/ on the PYTHONPATH and a KILL_DIRECTORY

KILLS is a file with a line for each kill: the step, at which time that it is reached, and who is killed. What became of
each goes to `ran` in the KILL_DIRECTORY: "killed", or "ended" when the query came to its end before. A kill of
everything ends this program too; whoever started it goes on with the rest of the lines.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import tidelog

ROWS_PER_BATCH = 60
_BATCHES_AT_ONCE = 2


def append_rows(source: str) -> None:
    """More to do; the rows are numbered."""
    with tidelog.open(source) as log:
        topic = log.topic("shop/from")
        numbers = range(topic.next_offset, topic.next_offset + _BATCHES_AT_ONCE * ROWS_PER_BATCH)
        topic.append_many(tidelog.Message(b"row %d" % number, key=b"%d" % (number % 5)) for number in numbers)


def run(spark: SparkSession, source: str, sink: str, checkpoint: str) -> bool:
    """Whether the query came to its end; else a process of it was killed."""
    reader = spark.readStream.format("tidelog").option("root", source).option("subscribe", "shop/from")
    reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", ROWS_PER_BATCH)
    rows = reader.option("minPartitions", 3).load().select("value", "key")
    writer = rows.writeStream.format("tidelog").option("root", sink).option("topic", "shop/to")
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except StreamingQueryException:
        if not (Path(os.environ["KILL_DIRECTORY"]) / "killed").exists():
            raise
        return False
    return True


def main(source: str, sink: str, checkpoint: str, kills: str) -> None:
    """Reads `shop/from` below SOURCE, writes `shop/to` below SINK."""
    directory = Path(os.environ["KILL_DIRECTORY"])
    spark = tidelog.spark_session("killed", "local[2]")
    for kill in Path(kills).read_text("utf-8").splitlines():
        append_rows(source)
        (directory / "hits").unlink(missing_ok=True)
        (directory / "now").write_text(kill.replace("\t", "\n"), encoding="utf-8")
        outcome = "ended" if run(spark, source, sink, checkpoint) else "killed"
        for name in ("now", "killed"):
            (directory / name).unlink(missing_ok=True)
        with (directory / "ran").open("a", encoding="utf-8") as ran:
            ran.write(f"{kill}\t{outcome}\n")
    run(spark, source, sink, checkpoint)
    (directory / "done").touch()
    # Ending Spark in order takes seconds, and proves nothing here: killing it is what this is about.
    importlib.import_module("sitecustomize").kill_all()


if __name__ == "__main__":
    main(*sys.argv[1:])
