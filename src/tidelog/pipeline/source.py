"""`format("tidelog")`: topics as Spark data, to read and to write, in batches and as a stream.

    spark.read.format("tidelog").option("root", "s3://bucket/prefix").option("subscribe", "shop/orders").load()

Invariants
- Filters are not pushed down: Spark keeps a pushed filter with the relation, and a second use of the same DataFrame
  would get filtered rows. Options say what is read instead: offsets, times, columns.
- The driver plans, tasks read; messages never pass through the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from tidelog.errors import InputError
from tidelog.pipeline.open_topics import OpenTopics
from tidelog.pipeline.options import SourceOptions, parse_source_options
from tidelog.pipeline.part import ColdPlace, ReadPart
from tidelog.pipeline.positions import resolve_range
from tidelog.pipeline.schema import source_schema

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "tidelog"


class TopicPartition(InputPartition):
    """One task's parts, and where their bytes are."""

    def __init__(self, parts: tuple[ReadPart, ...], place: ColdPlace | None) -> None:
        super().__init__(tuple((part.topic, part.start, part.stop) for part in parts))
        self.parts = parts
        self.place = place


class TidelogDataSource(DataSource):
    """Topics of a log directory or of a bucket."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        options = parse_source_options(self.options)
        return source_schema(options.columns, include_headers=options.include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        return TopicReader(parse_source_options(self.options), checked_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from tidelog.pipeline.stream_source import TopicStreamReader

        options = parse_source_options(self.options)
        if options.ending is not None:
            raise InputError("a stream has no end", hint="Leave the ending offsets out; a batch query has both ends")
        return TopicStreamReader(options, checked_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tidelog.pipeline.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tidelog.pipeline.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)


def checked_schema(schema: StructType) -> StructType:
    """The columns in this order, if they are columns of a topic; InputError for a schema of another kind."""
    known = {field.name: field.dataType for field in source_schema(include_headers=True)}
    for field in schema:
        if known.get(field.name) != field.dataType:
            raise InputError(
                f"a topic has no column {field.name} of type {field.dataType.simpleString()}",
                hint="Leave the schema out; the option columns says which ones are read",
            )
    return schema


def read_partition(partition: InputPartition, options: SourceOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    """What a task does."""
    from tidelog.pipeline.arrow_reader import read_record_batches

    if not isinstance(partition, TopicPartition):
        return iter(())  # Spark makes one up where there are none
    skips_gaps, max_rows, place = not options.fail_on_data_loss, options.max_rows_per_batch, partition.place
    return chain.from_iterable(
        read_record_batches(part, place, schema, skips_gaps=skips_gaps, max_rows=max_rows) for part in partition.parts
    )


class TopicReader(DataSourceReader):
    """A batch read: what is there when it is planned."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        with OpenTopics(self._options) as topics:
            ranges = {topic: self._range(topics, topic) for topic in topics.names()}
            return [TopicPartition(parts, topics.place) for parts in topics.plan_tasks(ranges)]

    def _range(self, topics: OpenTopics, topic: str) -> tuple[int, int]:
        options, log = self._options, topics.log(topic)
        _refuse_empty_ranges(options)
        start, stop = resolve_range(options.starting, options.ending, topic, log, options.when_no_later_message)
        topics.check_start(topic, start)
        return topics.readable_range(topic, start, stop)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._schema)


def _refuse_empty_ranges(options: SourceOptions) -> None:
    """As in Kafka's source: a batch that begins at the end, or ends at the beginning, is a mistake."""
    for positions, edge, name in ((options.starting, "latest", "start"), (options.ending, "earliest", "end")):
        if positions is not None and (positions.everywhere == edge or edge in positions.offsets.values()):
            raise InputError(f"a batch query cannot {name} at {edge}: it would read nothing")
