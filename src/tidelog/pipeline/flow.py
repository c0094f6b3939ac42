"""The dataflow steps with which jobs over an engine are written; Spark executes them (`spark_flow.py`).

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
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.pipeline.tasks import BatchFunction, ItemFunction

if TYPE_CHECKING:
    import pyarrow as pa


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
