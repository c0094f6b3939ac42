"""The steps of a job over an engine without Spark: tables in this process, split among tasks all the same."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.pipeline.flow import Flow, Rows
from tidelog.pipeline.tasks import BatchFunction, ItemFunction

_TYPES = {"binary": pa.binary(), "bigint": pa.int64(), "int": pa.int32()}
_BATCH_ROWS = 50


def arrow_schema(text: str) -> pa.Schema:
    """A schema as it is written for Spark."""
    return pa.schema([(name, _TYPES[kind]) for name, kind in (part.split() for part in text.split(","))])


class TableRows(Rows):
    """A table for each task; small batches, so that names and entries come apart."""

    def __init__(self, tables: list[pa.Table]) -> None:
        self.tables = tables

    def mapped(self, function: BatchFunction, schema: str) -> Rows:
        function = pickle.loads(pickle.dumps(function))
        return TableRows(
            [_table(function(iter(one.to_batches(max_chunksize=_BATCH_ROWS))), schema) for one in self.tables]
        )

    def grouped(self, by: str, tasks: int, order: Sequence[str]) -> Rows:
        table = pa.concat_tables(self.tables).combine_chunks()
        numbers = [number % tasks for number in table.column(by).to_pylist()]
        task_of = pa.array(numbers, pa.int32())
        sorting = [(name, "ascending") for name in order]
        return TableRows([table.filter(pc.equal(task_of, task)).sort_by(sorting) for task in range(tasks)])

    def where(self, name: str, number: int) -> Rows:
        return TableRows([one.filter(pc.equal(one.column(name), number)) for one in self.tables])

    def joined_by(self, others: Rows) -> Rows:
        assert isinstance(others, TableRows)
        return TableRows([*self.tables, *others.tables])

    def kept(self) -> Rows:
        return self

    def collected(self) -> pa.Table:
        return pa.concat_tables(self.tables)


class TableFlow(Flow):
    """Works are done one after the other; `tasks` is how many a shuffle has."""

    def __init__(self, tasks: int = 3) -> None:
        self._tasks = tasks

    def tasks_for(self, size: int) -> int:
        return self._tasks

    def source(self, function: ItemFunction, works: Sequence[object], schema: str) -> Rows:
        return TableRows([_table(function(work), schema) for work in works] or [_table(iter(()), schema)])

    def close(self) -> None:
        return


def _table(batches: Iterator[pa.RecordBatch], schema: str) -> pa.Table:
    return pa.Table.from_batches(list(batches), arrow_schema(schema))
