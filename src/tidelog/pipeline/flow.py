"""The dataflow steps with which jobs over an engine are written; Spark executes them.

    flow.source(function, works, schema)            one task a work: what the function makes of it
    rows.mapped(function, schema)                   a function over the batches of each task
    rows.grouped("part", tasks, ["part", "key"])    rows with the same number are in one task, in this order
    rows.where("kind", 1)                           some of them
    rows.kept()                                     computed once, however often it is used
    rows.collected()                                brought to the driver: for what is small

Invariants
- Rows are Arrow batches. Functions are found by name, or are objects of classes that are, in modules that the workers
  can import; they may run twice for the same rows and must be idempotent.
- The number of tasks, and which task a row is in, affect only the speed.
- A tidelog error raised in a task is raised again as the same kind of error where the rows are collected.
- Jobs are written against these steps alone, so tests can execute them without Spark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.pipeline.jobs.job import told_in_our_words
from tidelog.pipeline.tasks import BatchFunction, ItemFunction, map_in_arrow, rows_of_items, slots_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

# Enough for every core several times over, unless starting them would be the work; never more than a task can hold.
_TASKS_PER_SLOT = 3
_LEAST_TASK_BYTES = 4 << 20
_TASK_BYTES = 64 << 20


class Rows(ABC):
    """A dataset of rows."""

    @abstractmethod
    def mapped(self, function: BatchFunction, schema: str) -> Rows:
        """What a function makes of the batches of each task."""

    @abstractmethod
    def grouped(self, by: str, tasks: int, order: Sequence[str]) -> Rows:
        """Rows whose number in a column is the same are in one task, which has its rows in this order."""

    @abstractmethod
    def where(self, name: str, number: int) -> Rows:
        """The rows that have a number in a column."""

    @abstractmethod
    def joined_by(self, others: Rows) -> Rows:
        """These rows and others of the same columns."""

    @abstractmethod
    def kept(self) -> Rows:
        """The same rows, computed once."""

    @abstractmethod
    def collected(self) -> pa.Table:
        """All of them, in this process."""


class Flow(ABC):
    """Where rows come from."""

    @abstractmethod
    def tasks_for(self, size: int) -> int:
        """How many tasks are a good number for rows of about so many bytes."""

    @abstractmethod
    def source(self, function: ItemFunction, works: Sequence[object], schema: str) -> Rows:
        """What a function makes of works, one task for each."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what was kept."""


class SparkFlow(Flow):
    """The steps as Spark does them."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._kept: list[DataFrame] = []
        self._slots = slots_of(spark)

    def tasks_for(self, size: int) -> int:
        return max(1, size // _TASK_BYTES, min(self._slots * _TASKS_PER_SLOT, -(-size // _LEAST_TASK_BYTES)))

    def source(self, function: ItemFunction, works: Sequence[object], schema: str) -> Rows:
        return _SparkRows(rows_of_items(self._spark, function, works, schema), self._kept)

    def close(self) -> None:
        while self._kept:
            self._kept.pop().unpersist()


class _SparkRows(Rows):
    def __init__(self, frame: DataFrame, kept: list[DataFrame]) -> None:
        self._frame = frame
        self._kept = kept

    def mapped(self, function: BatchFunction, schema: str) -> Rows:
        return _SparkRows(map_in_arrow(self._frame, function, schema), self._kept)

    def grouped(self, by: str, tasks: int, order: Sequence[str]) -> Rows:
        apart = self._frame.repartitionById(tasks, self._frame[by])
        return _SparkRows(apart.sortWithinPartitions(*order), self._kept)

    def where(self, name: str, number: int) -> Rows:
        return _SparkRows(self._frame.where(self._frame[name] == number), self._kept)

    def joined_by(self, others: Rows) -> Rows:
        assert isinstance(others, _SparkRows), "rows of one flow"
        return _SparkRows(self._frame.unionByName(others._frame), self._kept)

    def kept(self) -> Rows:
        self._kept.append(self._frame.persist())
        return self

    def collected(self) -> pa.Table:
        with told_in_our_words("computing rows"):
            return self._frame.toArrow()
