"""`format("tidelog_objects")`: all objects of an engine as of a seq, or all of their versions, straight from its store.

    spark.read.format("tidelog_objects").option("root", "s3://bucket/prefix").option("seq", 1200).load()

Invariants
- What is to be seen is decided by the engine's own rule; rows are those that `list_objects` and `read` of the engine
  give at that seq.
- A DataFrame is a snapshot: it is planned on the manifest of its first action.
- The driver plans, tasks read rows and bodies straight from the store; the engine is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tidelog.errors import NotSupportedError
from tidelog.pipeline.engines.object_part import ObjectPart
from tidelog.pipeline.engines.object_plan import ObjectPlan
from tidelog.pipeline.engines.options import ObjectOptions, no_writer, parse_object_options
from tidelog.pipeline.engines.schema import OBJECT_COLUMNS, checked_schema, schema_of

FORMAT = "tidelog_objects"


class ObjectPartition(InputPartition):
    """One task's range of keys."""

    def __init__(self, part: ObjectPart) -> None:
        super().__init__((part.start, part.stop))
        self.part = part


class ObjectsDataSource(DataSource):
    """The objects of an engine."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return schema_of(OBJECT_COLUMNS, parse_object_options(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        return ObjectsReader(parse_object_options(self.options), checked_schema(schema, OBJECT_COLUMNS))

    def streamReader(self, schema: StructType) -> NoReturn:
        hint = "What changes is a stream of format tidelog_entries; a state is read with spark.read"
        raise NotSupportedError("objects are a state, and there is no stream of them", hint=hint)

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise no_writer(FORMAT)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise no_writer(FORMAT)


class ObjectsReader(DataSourceReader):
    """A batch read of the state at a seq."""

    def __init__(self, options: ObjectOptions, names: list[str]) -> None:
        self._options = options
        self._names = names

    def partitions(self) -> list[InputPartition]:
        with self._options.root.open(read_only=self._options.pin_seconds is None) as engine:
            return [ObjectPartition(part) for part in ObjectPlan(self._options, engine).parts()]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        from tidelog.pipeline.engines.object_batches import read_object_batches
        from tidelog.pipeline.partition_reader import spare_collections
        from tidelog.pipeline.worker_memory import keep_memory

        if not isinstance(partition, ObjectPartition):
            return iter(())  # Spark makes one up where there are none
        keep_memory()
        spare_collections()
        return read_object_batches(partition.part, self._names, self._options.max_rows_per_batch)
