"""`format("tidelog")`: topics as Spark data, to read and to write, in batches and as a stream.

    spark.read.format("tidelog").option("root", "s3://bucket/prefix").option("subscribe", "shop/orders").load()

Invariants
- Filters are not pushed down: Spark keeps a pushed filter with the relation, and a second use of the same DataFrame
  would get filtered rows. Options say what is read instead: offsets, times, columns.
- Of options of Kafka a query is warned once, where it is planned: in `schema`, or where Spark asks for none, because it
  is that of a table of its catalog, in the reader; of a stream's readers in the one that plans.
- The driver plans, tasks read; messages never pass through the driver.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from tidelog.config import Settings
from tidelog.errors import GapError, InputError, NotFoundError, RetryError, offsets_text
from tidelog.log.frame import Frames
from tidelog.log.isolation import READ_COMMITTED, committed_batches
from tidelog.log.tail_cache import Batch
from tidelog.pipeline.location import ReadPart, TopicLocation
from tidelog.pipeline.source.arrow import arrow_schema, record_batch
from tidelog.pipeline.source.declared import declared, found_declaration, is_table, options_for, options_in
from tidelog.pipeline.source.explained import PlannedRead, tell_planned
from tidelog.pipeline.source.options import (
    TOPIC_COLUMNS,
    SourceOptions,
    TopicOptionReader,
    checked_schema,
    parse_source_options,
    resolve_range,
    source_schema,
)
from tidelog.pipeline.source.partition_reader import read_batches
from tidelog.pipeline.source.planning import OpenTopics
from tidelog.pipeline.source.told import stream_reader, told_in_one_line, told_rows
from tidelog.pipeline.tasks import tune_worker
from tidelog.topics.columns import Columns, Ended, gather_columns, lost_until, read_error

if TYPE_CHECKING:
    import pyarrow as pa


FORMAT = "tidelog"
_Made = TypeVar("_Made")


class TopicPartition(InputPartition):
    """One task's parts, and where their bytes are."""

    def __init__(self, parts: tuple[ReadPart, ...], place: TopicLocation | None) -> None:
        super().__init__(tuple((part.topic, part.start, part.stop) for part in parts))
        self.parts = parts
        self.place = place


class TidelogDataSource(DataSource):
    """Topics of a log directory or of a bucket."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @told_in_one_line
    def schema(self) -> StructType:
        options = parse_source_options(options_in(self.options), warns=True)
        if not is_table(self.options):
            _check_there(options)
        schema = source_schema(options.columns, include_headers=options.include_headers)
        return declared(schema, self.options, options.root.location, Settings)

    @told_in_one_line
    def reader(self, schema: StructType) -> DataSourceReader:
        options = options_for(self.options, schema)
        of_table = found_declaration(schema) is not None
        return TopicReader(parse_source_options(options, is_table=of_table, warns=of_table), _checked(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return stream_reader(lambda: self._stream_reader(schema))

    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        from tidelog.pipeline.source.topics_stream import TopicStreamReader

        given = options_for(self.options, schema)
        options = parse_source_options(given, is_stream=True)
        if options.ending is not None:
            raise InputError("a stream has no end", hint="Leave the ending offsets out; a batch query has both ends")
        of_table = found_declaration(schema) is not None
        return TopicStreamReader(options, _checked(schema), TopicOptionReader(given) if of_table else None)

    @told_in_one_line
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tidelog.pipeline.sink.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    @told_in_one_line
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tidelog.pipeline.sink.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)


def _check_there(options: SourceOptions) -> None:
    """Tells at `load()` of a root or a named topic that is not there. With `failOnDataLoss=false` a query may go on
    where a topic has gone, so only its root is looked for."""
    with OpenTopics(options) as topics:
        if options.fail_on_data_loss:
            topics.check_named()


def _checked(schema: StructType) -> StructType:
    checked_schema(schema, TOPIC_COLUMNS)
    return schema


def read_partition(partition: InputPartition, options: SourceOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    """What a task does."""

    if not isinstance(partition, TopicPartition):
        return iter(())  # Spark makes one up where there are none
    batches = (
        read_record_batches(part, partition.place, schema, options, max_rows=options.max_rows_per_batch)
        for part in partition.parts
    )
    return told_rows(chain.from_iterable(batches))


class TopicReader(DataSourceReader):
    """A batch read: what is there when it is planned."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @told_in_one_line
    def partitions(self) -> list[InputPartition]:
        return self._with_ranges(self._tasks)

    def planned(self) -> list[PlannedRead]:
        return self._with_ranges(OpenTopics.described)

    def _tasks(self, topics: OpenTopics, ranges: dict[str, tuple[int, int]]) -> list[InputPartition]:
        tasks = topics.plan_tasks(ranges)
        tell_planned(partial(topics.described, ranges), len(tasks))
        return [TopicPartition(parts, topics.place) for parts in tasks]

    def _with_ranges(self, make: Callable[[OpenTopics, dict[str, tuple[int, int]]], list[_Made]]) -> list[_Made]:
        """What is made of the range of each log that is read, by names."""
        _refuse_empty_ranges(self._options)
        if self._options.is_table and not self._options.root.is_there:
            return []  # the first INSERT makes it
        with OpenTopics(self._options) as topics:
            topics.check_places()
            ranges = {log: self._range(topics, log) for log in topics.names() if self._is_there(topics, log)}
            return make(topics, ranges)

    def _is_there(self, topics: OpenTopics, log: str) -> bool:
        """A table is empty while the topic that it is to have is not there."""
        try:
            topics.log(log)
        except NotFoundError:
            if not self._options.is_table:
                raise
            return False
        return True

    def _range(self, topics: OpenTopics, log: str) -> tuple[int, int]:
        options = self._options
        start, stop = resolve_range(
            options.starting, options.ending, topics.partition(log), topics.log(log), options.when_no_later_message
        )
        topics.check_start(log, start)
        return topics.readable_range(log, start, stop)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._schema)


def _refuse_empty_ranges(options: SourceOptions) -> None:
    """As in Kafka's source: a batch that begins at the end, or ends at the beginning, is a mistake."""
    for positions, edge, name in ((options.starting, "latest", "start"), (options.ending, "earliest", "end")):
        if positions is None:
            continue
        given = [place for places in positions.offsets.values() for place in places.values()]
        if positions.everywhere == edge or edge in given:
            raise InputError(f"a batch query cannot {name} at {edge}: it would read nothing")


# Turns a part of a topic into Arrow record batches that match a Spark schema.
#
# Invariants
# - Columns that are not in the schema are neither gathered nor sent.
# - A batch is small enough for Spark to process at once and large enough that its overhead does not matter.
# - An offset that a repair marked as lost, or that has no message in it, raises GapError after everything before it, or
#   is skipped if gaps are skipped; the skipped offset is logged.
# - With read_committed a part has the committed messages of its range and no others. Where a transaction is open beyond
#   the time to wait it is an error, unless that time is 0: then what comes from there on in the part is left out.


_logger = logging.getLogger("tidelog.pipeline")
_MAX_BATCH_BYTES = 8 << 20
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_HINT = "failOnDataLoss=false reads on behind it"


def read_record_batches(
    part: ReadPart, place: TopicLocation | None, schema: StructType, options: SourceOptions, *, max_rows: int
) -> Iterator[pa.RecordBatch]:
    """The rows of a part."""
    tune_worker()
    names = schema.fieldNames()
    target, skips_gaps = arrow_schema(names), not options.fail_on_data_loss
    batches = read_batches(part, place, skips_gaps=skips_gaps)
    if options.isolation == READ_COMMITTED:
        batches = committed_batches(batches, lambda offset: _behind(part, offset, options))
    for batch in batches:
        for columns in _gathered(batch, names, max_rows, skips_gaps=skips_gaps):
            yield record_batch(columns, target, part.of_topic or part.topic, part.partition)


def _behind(part: ReadPart, offset: int, options: SourceOptions) -> Iterator[Batch]:
    """The messages of the log from an offset on, as far as it goes by then: somewhere there its transactions end."""
    deadline, pause_seconds = time.monotonic() + options.open_transaction_seconds, _FIRST_PAUSE_SECONDS
    begin = offset
    with OpenTopics(options) as topics:
        while True:
            for batch in topics.log(part.topic).scout(offset, follow=False):
                offset = batch.next_offset
                yield batch
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                break
            time.sleep(min(pause_seconds, left_seconds))
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
    if options.open_transaction_seconds:
        raise RetryError(
            f"{part.topic}: a transaction before offset {begin} is still open after "
            f"{options.open_transaction_seconds:g} s",
            operation="read",
            hint="Wait for its producer or its timeout; openTransactionTimeout waits longer, "
            "isolation=read_uncommitted reads it as it is",
        )


def _gathered(batch: Batch, names: list[str], max_rows: int, *, skips_gaps: bool) -> Iterator[Columns]:
    frames = batch.frames
    assert frames is not None, "what comes from files and objects is framed"
    index = batch.start
    while index < batch.stop:
        columns = gather_columns(
            frames,
            index,
            batch.stop,
            keys="key" in names,
            values="value" in names,
            headers="headers" in names,
            offsets="offset" in names,
            timestamps="timestamp" in names,
            max_rows=max_rows,
            max_bytes=_MAX_BATCH_BYTES,
        )
        if columns.count:
            yield columns
        index = columns.stopped_at
        if columns.ended is Ended.LOST:
            if not skips_gaps:
                raise _lost(
                    frames.first_offset + index, frames.first_offset + lost_until(frames, index, batch.stop) - 1
                )
            index = lost_until(frames, index, batch.stop)
        elif columns.ended is Ended.UNREADABLE:
            _pass_over(frames, index, skips_gaps=skips_gaps)
            index += 1


def _pass_over(frames: Frames, index: int, *, skips_gaps: bool) -> None:
    damage, offset = read_error(frames, index), frames.first_offset + index
    if not skips_gaps:
        raise GapError(f"{damage}: it cannot be read", first=offset, last=offset, hint=_HINT) from damage
    _logger.warning("passed over: %s", damage)


def _lost(first: int, last: int) -> GapError:
    return GapError(
        f"{offsets_text(first, last)} lost to damage, and marked so by a repair",
        first=first,
        last=last,
        hint=_HINT,
    )
