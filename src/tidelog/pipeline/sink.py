"""Writing topics from Spark: tasks stage rows, the driver commits them as one consignment, the owner takes them in.

Invariants
- All rows of a write come into a topic, in order of the tasks, or none of them. With rows for several topics that holds
  for each topic.
- A write that has a name comes in once: a batch by `txnAppId` and `txnVersion`, a stream by its query and the number of
  its batch, however often it is written again.
- After a commit nothing is taken back, whatever Spark says: it may call `abort` after a commit that succeeded.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tidelog.errors import InputError, NotSupportedError
from tidelog.pipeline.consigning import HandOver, staging_place
from tidelog.pipeline.partition_writer import StagingPlace, stage_rows
from tidelog.pipeline.sink_options import SinkOptions, check_columns, parse_sink_options
from tidelog.pipeline.worker_memory import keep_memory
from tidelog.tier.intake_part import StagedPart

if TYPE_CHECKING:
    import pyarrow as pa

_logger = logging.getLogger("tidelog.pipeline")
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


class Staged(WriterCommitMessage):
    """What a task has staged: parts by topic, of which write, and which task."""

    def __init__(self, app: str, partition: int, parts: dict[str, list[StagedPart]]) -> None:
        self.app = app
        self.partition = partition
        self.parts = parts


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of `df.write`."""
    parsed = _checked(options, schema, overwrite, is_stream=False)
    return TopicWriter(parsed, staging_place(parsed), _own_name())


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of `df.writeStream`."""
    parsed = _checked(options, schema, overwrite, is_stream=True)
    return TopicStreamWriter(parsed, staging_place(parsed), _own_name())


def _checked(options: Mapping[str, str], schema: StructType, overwrite: bool, *, is_stream: bool) -> SinkOptions:
    parsed = parse_sink_options(options, is_stream=is_stream)
    if overwrite:
        what = "the output mode complete" if is_stream else 'mode("overwrite")'
        raise NotSupportedError(f"{what} would replace a topic, and a log only grows", hint='Use mode "append"')
    check_columns(schema, parsed.topic)
    return parsed


def _own_name() -> str:
    """For a write that nobody has named: no other one has it."""
    return f"once-{secrets.token_hex(12)}"


class TopicWriter(DataSourceArrowWriter):
    """A batch write."""

    def __init__(self, options: SinkOptions, place: StagingPlace, own_name: str) -> None:
        self._options = options
        self._place = place
        self._app = options.app or own_name
        self._version = options.version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task."""
        partition = _task().partitionId()
        parts = stage_rows(iterator, self._place, self._app, self._version, partition)
        return Staged(self._app, partition, parts)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when all tasks have succeeded."""
        keep_memory()
        self._over().commit(parts_by_topic(messages), self._options.wait_seconds)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when something failed."""
        self._over().discard(parts_by_topic(messages), self._options.topic)

    def _over(self) -> HandOver:
        return HandOver(self._options.root, self._app, self._version, is_once=self._options.app is None)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """A write of micro-batches."""

    def __init__(self, options: SinkOptions, place: StagingPlace, own_name: str) -> None:
        self._options = options
        self._place = place
        self._own_name = own_name

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task, which alone knows whose batch it is."""
        task = _task()
        query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
        app = self._options.app or query
        if app is None or batch is None:
            _logger.warning("Spark does not say which batch this is: its rows come at least once, not exactly once")
            # A name of its own, so that the next batch is not taken for this one.
            app, batch = f"{self._own_name}-{secrets.token_hex(4)}", "0"
        partition = task.partitionId()
        parts = stage_rows(iterator, self._place, app, int(batch), partition)
        return Staged(app, partition, parts)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """In the driver, on an object that has seen nothing of the batch but this."""
        keep_memory()
        for app, mine in _by_app(messages):
            self._over(app, batchId).commit(parts_by_topic(mine), self._options.wait_seconds)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """In the driver; it may come after a commit that succeeded, and then removes nothing."""
        for app, mine in _by_app(messages):
            self._over(app, batchId).discard(parts_by_topic(mine), self._options.topic)

    def _over(self, app: str, batch: int) -> HandOver:
        is_once = app.startswith(self._own_name)
        return HandOver(self._options.root, app, 0 if is_once else batch, is_once=is_once)


def parts_by_topic(messages: Sequence[WriterCommitMessage | None]) -> dict[str, list[StagedPart]]:
    """The parts of each topic, in order of the tasks that wrote them. A failed task has no message."""
    found: dict[str, list[StagedPart]] = {}
    for message in _staged(messages):
        for topic, parts in message.parts.items():
            found.setdefault(topic, []).extend(parts)
    return found


def _by_app(messages: Sequence[Any]) -> Iterator[tuple[str, list[Staged]]]:
    """All of a batch have one name, unless Spark did not say which batch it is."""
    staged = _staged(messages)
    for app in dict.fromkeys(one.app for one in staged):
        yield app, [one for one in staged if one.app == app]


def _staged(messages: Sequence[Any]) -> list[Staged]:
    """In order of the tasks."""
    return sorted((one for one in messages if isinstance(one, Staged)), key=lambda one: one.partition)


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise InputError("rows are written by Spark's tasks")
    return task
