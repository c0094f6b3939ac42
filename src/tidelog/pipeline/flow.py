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
- The number of tasks, and which task a row is in, affect only the speed. Spark moves rows in pieces (`pieces.py`), and
  functions between two shuffles run in one task, one after the other.
- A tidelog error raised in a task is raised again as the same kind of error where the rows are collected.
- Jobs are written against these steps alone, so tests can execute them without Spark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from tidelog.pipeline.jobs.job import told_in_our_words
from tidelog.pipeline.pieces import PIECE_SCHEMA, TASK_SCHEMA, Divided, Gathered, packed, unpacked
from tidelog.pipeline.tasks import BatchFunction, ItemFunction, Items, map_in_arrow, slots_of

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
        numbers = self._spark.range(0, len(works), 1, max(1, len(works)))
        return _SparkRows([_Branch(numbers, (Items(function, works),))], schema, self._kept)

    def close(self) -> None:
        while self._kept:
            self._kept.pop().unpersist()


class _Branch(NamedTuple):
    """A frame, and what tasks still have to do with its batches."""

    frame: DataFrame
    functions: tuple[BatchFunction, ...]

    def done(self, schema: str, *more: BatchFunction) -> DataFrame:
        return map_in_arrow(self.frame, _Chained((*self.functions, *more)), schema)


class _Chained:
    """Functions one after the other, in one task."""

    def __init__(self, functions: Sequence[BatchFunction]) -> None:
        self._functions = functions

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for function in self._functions:
            batches = function(batches)
        return batches


class _Where:
    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.compute as pc

        return (batch.filter(pc.equal(batch.column(self._name), self._number)) for batch in batches)


class _SparkRows(Rows):
    """Rows of one or more frames. Spark sees them where they are divided, kept or collected, in pieces."""

    def __init__(self, branches: Sequence[_Branch], schema: str, kept: list[DataFrame]) -> None:
        self._branches = branches
        self._schema = schema
        self._kept = kept

    def mapped(self, function: BatchFunction, schema: str) -> Rows:
        return self._of([_Branch(one.frame, (*one.functions, function)) for one in self._branches], schema)

    def grouped(self, by: str, tasks: int, order: Sequence[str]) -> Rows:
        pieces = self._together(TASK_SCHEMA, Divided(by, tasks))
        apart = pieces.repartitionById(tasks, pieces["task"]).select("piece")
        return self._of([_Branch(apart, (Gathered(order),))], self._schema)

    def where(self, name: str, number: int) -> Rows:
        return self.mapped(_Where(name, number), self._schema)

    def joined_by(self, others: Rows) -> Rows:
        assert isinstance(others, _SparkRows), "rows of one flow"
        return self._of([*self._branches, *others._branches], self._schema)

    def kept(self) -> Rows:
        frame = self._together(PIECE_SCHEMA, packed).persist()
        self._kept.append(frame)
        return self._of([_Branch(frame, (unpacked,))], self._schema)

    def collected(self) -> pa.Table:
        with told_in_our_words("computing rows"):
            return self._together(self._schema).toArrow()

    def _of(self, branches: Sequence[_Branch], schema: str) -> Rows:
        return _SparkRows(branches, schema, self._kept)

    def _together(self, schema: str, *more: BatchFunction) -> DataFrame:
        return reduce(lambda one, other: one.union(other), (branch.done(schema, *more) for branch in self._branches))
