"""The steps of a job give the same rows with RDDs, with frames, and without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.pipeline.engines.table_flow import TableFlow

from tidelog.errors import CorruptionError, DataError
from tidelog.pipeline.flow import Flow, Rows
from tidelog.pipeline.spark_flow import FrameFlow, RddFlow, spark_flow

SCHEMA = "part int, key binary, number bigint"
MakeFlow = Callable[[SparkSession], Flow]
FLOWS: list[MakeFlow] = [FrameFlow, spark_flow]


def some_rows(first: int) -> Iterator[pa.RecordBatch]:
    """A thousand of them, in no order."""
    for start in range(first, first + 1000, 100):
        numbers = [start + (37 * number) % 100 for number in range(100)]
        keys = [b"%03d" % (number % 50) for number in numbers]
        arrays = [pa.array([number % 7 for number in numbers], pa.int32()), pa.array(keys, pa.binary())]
        yield pa.RecordBatch.from_arrays([*arrays, pa.array(numbers, pa.int64())], names=["part", "key", "number"])


def numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What a task sees: its rows in their order, as one text a task."""
    rows = [row for batch in batches for row in zip(*(batch.column(at).to_pylist() for at in range(3)), strict=True)]
    if rows:
        yield pa.RecordBatch.from_arrays([pa.array([repr(rows).encode()], pa.binary())], names=["told"])


def damaged(first: int) -> Iterator[pa.RecordBatch]:
    """A source that cannot be read."""
    yield from ()
    try:
        raise DataError("the checksum does not match")
    except DataError as error:
        raise CorruptionError(error.message, path="some/file", byte=7, operation="read") from error


def all_steps(flow: Flow) -> list[list[bytes]]:
    """What comes of every step, in any order of tasks."""
    one, other = flow.source(some_rows, [0, 5000], SCHEMA), flow.source(some_rows, [20000], SCHEMA)
    kept = one.joined_by(other).grouped("part", 3, ["part", "key", "number"]).kept()
    again = kept.where("part", 2).joined_by(other).grouped("number", 2, ["number"])
    steps: list[Rows] = [kept.mapped(numbered, "told binary"), again.mapped(numbered, "told binary")]
    found = [sorted(step.collected().column("told").to_pylist()) for step in steps]
    assert flow.source(some_rows, [0], SCHEMA).where("part", 9).collected().num_rows == 0
    flow.close()
    return found


@pytest.mark.parametrize("make", FLOWS)
def test_steps_with_spark_give_the_rows_of_those_without(spark: SparkSession, make: MakeFlow) -> None:
    """The same rows in the same tasks, in order."""
    assert all_steps(make(spark)) == all_steps(TableFlow())


@pytest.mark.parametrize("make", FLOWS)
def test_error_of_a_task_is_told_by_its_last_words(spark: SparkSession, make: MakeFlow) -> None:
    """Not by those of the error that it was raised from."""
    with pytest.raises(CorruptionError, match="some/file"):
        make(spark).source(damaged, [0], SCHEMA).collected()


def test_classic_sessions_have_rdds(spark: SparkSession) -> None:
    """Nothing is planned as a query where it need not be."""
    assert isinstance(spark_flow(spark), RddFlow)
