"""The Spark sink for topics: tasks stage rows, the driver commits them as one staged commit, the owner ingests them.

Invariants
- A write is atomic per topic, with all of its partitions: all of its rows are ingested, in order of the tasks, or none.
- A write that has a name is ingested exactly once: a batch by `txnAppId` and `txnVersion`, a stream by its query and
  the number of its batch, however often it is written again.
- A commit is never undone: Spark may call `abort` after a commit that succeeded.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegralType, StringType, StructType, TimestampType

from tidelog.errors import (
    IngestPendingError,
    InputError,
    NotSupportedError,
    RetryError,
)
from tidelog.files import LocalFiles, explained
from tidelog.log.binding import new_log_id
from tidelog.pipeline.address import Root
from tidelog.pipeline.ingest import (
    bound_place,
    directory_alone,
    ingest,
    ingest_unowned,
    open_area,
    open_for_writing,
    write_place,
)
from tidelog.pipeline.location import TopicLocation
from tidelog.pipeline.sink.task import StagedParts, StagingLocation, layout_of, stage_rows
from tidelog.pipeline.source.declared import options_for_insert, options_in
from tidelog.pipeline.source.options import TopicOptionReader, source_schema
from tidelog.pipeline.source.told import told_in_one_line
from tidelog.pipeline.tasks import keep_memory
from tidelog.staging.area import StagedPart, StagingArea, staged_commit_of
from tidelog.staging.partitions import PartitionedArea
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.topics.names import TopicName, parse_topic_name, read_topic_info

if TYPE_CHECKING:
    import pyarrow as pa

_logger = logging.getLogger("tidelog.pipeline")
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


class Staged(WriterCommitMessage):
    """What a task has staged: parts by log, of which write, and which task."""

    def __init__(self, app: str, partition: int, parts: StagedParts) -> None:
        self.app = app
        self.partition = partition
        self.parts = parts


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of `df.write`, and of `INSERT INTO` a table."""
    given, is_table = options_for_insert(options, schema)
    parsed = _checked(given, schema, overwrite, is_stream=False, is_table=is_table)
    return TopicWriter(parsed, staging_location(parsed), _own_name())


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of `df.writeStream`."""
    parsed = _checked(options_in(options), schema, overwrite, is_stream=True)
    return TopicStreamWriter(parsed, staging_location(parsed), _own_name())


def _checked(
    options: Mapping[str, str], schema: StructType, overwrite: bool, *, is_stream: bool, is_table: bool = False
) -> SinkOptions:
    parsed = parse_sink_options(options, is_stream=is_stream, is_table=is_table)
    if overwrite:
        what = "the output mode complete" if is_stream else "INSERT OVERWRITE" if is_table else 'mode("overwrite")'
        hint = "Use INSERT INTO" if is_table else 'Use mode "append"'
        raise NotSupportedError(f"{what} would replace a topic, but a log can only grow", hint=hint)
    check_columns(schema, parsed.topic)
    return parsed


def _own_name() -> str:
    """A unique name for a write without one."""
    return f"once-{secrets.token_hex(12)}"


class TopicWriter(DataSourceArrowWriter):
    """A batch write."""

    def __init__(self, options: SinkOptions, place: StagingLocation, own_name: str) -> None:
        self._options = options
        self._place = place
        self._app = options.app or own_name
        self._version = options.version or 0

    @told_in_one_line
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task."""
        partition = _task().partitionId()
        parts = stage_rows(iterator, self._place, self._app, self._version, partition)
        return Staged(self._app, partition, parts)

    @told_in_one_line
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when all tasks have succeeded."""
        keep_memory()
        self._over().commit(parts_by_log(messages), self._options.wait_seconds)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when something failed."""
        self._over().discard(parts_by_log(messages), self._options.topic)

    def _over(self) -> SinkCommit:
        return SinkCommit(self._options.root, self._app, self._version, is_once=self._options.app is None)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """A write of micro-batches."""

    def __init__(self, options: SinkOptions, place: StagingLocation, own_name: str) -> None:
        self._options = options
        self._place = place
        self._own_name = own_name

    @told_in_one_line
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

    @told_in_one_line
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """In the driver, on an object that has seen nothing of the batch but this."""
        keep_memory()
        for app, mine in _by_app(messages):
            self._over(app, batchId).commit(parts_by_log(mine), self._options.wait_seconds)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """In the driver; it may come after a commit that succeeded, and then removes nothing."""
        for app, mine in _by_app(messages):
            self._over(app, batchId).discard(parts_by_log(mine), self._options.topic)

    def _over(self, app: str, batch: int) -> SinkCommit:
        is_once = app.startswith(self._own_name)
        return SinkCommit(self._options.root, app, 0 if is_once else batch, is_once=is_once)


def parts_by_log(messages: Sequence[WriterCommitMessage | None]) -> StagedParts:
    """The parts of each log, in order of the tasks that wrote them. A failed task has no message."""
    found = StagedParts()
    for message in _staged(messages):
        found.add(message.parts)
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


# The options of a write, and the columns that make a message.
#
#     value       binary or string, required
#     key         binary or string
#     headers     array<struct<key string, value binary>>
#     topic       string, unless the option `topic` names one
#     timestamp   timestamp; without it, the time of the write
#     partition   a whole number, of a topic with partitions; where it is null the key decides
#
# `offset` and `timestampType`, as a read of a topic returns them, are accepted and ignored: a written message gets a
# new offset. So is `partition` where a topic has none. Any other column is refused, since it would be lost.


_PASSED_OVER = ("offset", "timestampType")
_TEXT_OR_BYTES = (BinaryType, StringType)
_DEFAULT_WAIT_SECONDS = 60.0


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows go, and the name under which they go there once."""

    root: Root
    topic: str | None = None
    app: str | None = None
    version: int | None = None
    wait_seconds: float = _DEFAULT_WAIT_SECONDS
    is_table: bool = False


def parse_sink_options(given: Mapping[str, str], *, is_stream: bool, is_table: bool = False) -> SinkOptions:
    """The options of a write; InputError names the one that is wrong."""
    options = TopicOptionReader(given)
    options.warn_of_kafka()
    app = options.text("txnAppId")
    version = options.count("txnVersion")
    _check_transaction(app, version, is_stream=is_stream)
    return SinkOptions(
        root=options.root(),
        topic=options.target(),
        app=app,
        version=version,
        wait_seconds=options.seconds("handOverTimeout", _DEFAULT_WAIT_SECONDS),
        is_table=is_table,
    )


def _check_transaction(app: str | None, version: int | None, *, is_stream: bool) -> None:
    if is_stream and version is not None:
        raise InputError(
            "txnVersion is not allowed in a stream: Spark numbers its batches",
            hint="Leave txnVersion out, or write in foreachBatch",
        )
    if not is_stream and (app is None) != (version is None):
        raise InputError("txnAppId and txnVersion must be given together", hint="Give both, or neither")
    if app is not None:
        staged_commit_of(app, version or 0)  # says what a name may be


def check_columns(schema: StructType, topic: str | None) -> None:
    """InputError says which column is missing, of the wrong type, or none of a message."""
    names = [field.name for field in schema]
    if len(set(names)) < len(names):
        raise InputError(f"a column occurs twice: {', '.join(names)}")
    if "value" not in names:
        raise InputError(
            "the column value is missing", hint="Add one, for example df.selectExpr('to_json(struct(*)) value')"
        )
    if topic is None and "topic" not in names:
        raise InputError("no topic was named", hint="Set the option topic, or add a column topic")
    for field in schema:
        if field.name not in _PASSED_OVER:
            _check_type(field.name, field.dataType)


def _check_type(name: str, kind: DataType) -> None:
    headers = source_schema(["headers"])["headers"].dataType
    if name in ("key", "value"):
        fits, expected = isinstance(kind, _TEXT_OR_BYTES), "binary or string"
    elif name == "topic":
        fits, expected = isinstance(kind, StringType), "string"
    elif name == "partition":
        fits, expected = isinstance(kind, IntegralType), "int"
    elif name == "timestamp":
        fits, expected = isinstance(kind, TimestampType), "timestamp"
    elif name == "headers":
        fits, expected = _is_headers(kind), headers.simpleString()
    else:
        raise InputError(
            f"{name} is not part of a message and would be lost",
            hint="Columns are value, key, headers, topic, partition, timestamp; put it into the value, as JSON",
        )
    if not fits:
        raise InputError(f"the column {name} is {kind.simpleString()}, and must be {expected}", hint="Cast it")


def _is_headers(kind: DataType) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = [(field.name, type(field.dataType)) for field in kind.elementType]
    return fields == [("key", StringType), ("value", BinaryType)]


# The driver's half of a write: commits the parts that tasks have staged, and has them ingested into their topics.
#
# Invariants
# - A commit whose outcome is unknown is retried under the same name: it takes effect once.
# - Committed rows belong to the topic. If its owner does not ingest them for a while, the error says that they must not
#   be written again.


def staging_location(options: SinkOptions) -> StagingLocation:
    """Where the tasks of a write stage their rows."""
    place, directory = bound_place(options.root), directory_alone(options.root)
    layout, log_id, settings = None, "", options.root.load()
    if options.topic is not None:
        _refuse_live(options.root, parse_topic_name(options.topic))
        layout = layout_of(place, directory, options.topic)
        if layout is None and directory is None:
            owner = place.catalog(options.topic).owner()
            log_id = new_log_id() if owner is None else owner[0].log_id
    return StagingLocation(
        *(place, options.topic, settings.log.max_message_bytes, layout, directory, options.is_table),
        log_id=log_id,
        max_part_bytes=settings.tier.max_object_bytes,
    )


class SinkCommit:
    """One write, by its name."""

    def __init__(self, root: Root, app: str, version: int, *, is_once: bool = False) -> None:
        self._root = root
        self._app = app
        self._version = version
        self._is_once = is_once

    def commit(self, parts: Mapping[str, Sequence[StagedPart]], wait_seconds: float) -> None:
        """All rows of each topic, and then they are brought into it. `parts` are those of logs, by their names."""
        topics = parts.topics if isinstance(parts, StagedParts) else {}
        for log in parts:
            _refuse_live(self._root, parse_topic_name(topics.get(log, log)))  # found before any is committed
        waiting = [log for log in sorted(parts) if log not in topics]
        was_committed = {log for log in waiting if not self._commit(log, parts[log])}
        unowned = {*waiting}
        for topic in sorted({*topics.values()}):
            of_topic = {log: parts[log] for log in sorted(parts) if topics.get(log) == topic}
            written, touched = self._commit_partitions(topic, of_topic)
            waiting += written
            unowned |= touched
        if len(unowned) > 1:  # one directory or temporary owner for all of them
            with _committed_already(", ".join(sorted(unowned))):
                ingest_unowned(self._root, *map(parse_topic_name, sorted(unowned)))
        for log in waiting:
            with _committed_already(log), self._area(log) as area:
                ingest(self._root, parse_topic_name(log), area, self._app, self._version, wait_seconds)
                if log in was_committed:
                    area.drop(self._app, self._version, parts[log])

    def _commit(self, topic: str, staged: Sequence[StagedPart]) -> bool:
        """Whether it was these parts that were committed, and not others before them."""
        with self._area(topic) as area:
            return area.commit(self._app, self._version, staged, is_once=self._is_once) == "committed"

    def _commit_partitions(self, topic: str, parts: Mapping[str, Sequence[StagedPart]]) -> tuple[list[str], set[str]]:
        """Decides which rows the write has in all partitions, and commits them in each.

        What an earlier process has decided and not committed everywhere is brought to its end before. Returns the logs
        that have rows of this write, and all that have something to ingest.
        """
        place = write_place(self._root)
        with open_for_writing(self._root) as (objects, metadata):
            writes = PartitionedArea(objects, metadata, place.keys(topic))
            areas = _Areas(objects, metadata, place)
            is_ours = writes.commit(self._app, self._version, parts, is_once=self._is_once)
            touched: set[str] = set()
            logs = [*parts] if is_ours else [log for log in parts if areas.knows(log, self._app, self._version)]
            for write in writes.pending(self._app):
                for log, staged in sorted(write.logs.items()):
                    areas.of(log).commit(self._app, write.version, staged, is_once=write.is_once)
                touched |= {*write.logs}
                if write.version == self._version:
                    logs = sorted(write.logs)
                writes.finish(write)
            if not is_ours:
                objects.delete([part.key for staged in parts.values() for part in staged])
        return logs, touched | {*logs}

    def discard(self, parts: Mapping[str, Sequence[StagedPart]], topic: str | None) -> None:
        """Removes what was staged, unless it was committed.

        Under a name that others may write under too, only these parts: what failed tasks have left goes when the write
        is made again. Else everything, since Spark does not say what failed tasks have staged.
        """
        for name in sorted(self._undecided(parts, topic)):
            keys = None if self._is_once else [part.key for part in parts.get(name, ())]
            with self._area(name) as area:
                area.discard(self._app, self._version, keys)

    def _undecided(self, parts: Mapping[str, Sequence[StagedPart]], topic: str | None) -> set[str]:
        """The logs whose rows may be removed: not those of a topic whose partitions are going to have them."""
        topics = dict(parts.topics) if isinstance(parts, StagedParts) else {}
        place = write_place(self._root)
        logs = {*parts}
        if topic is not None:
            layout = layout_of(place, directory_alone(self._root), topic)
            name = parse_topic_name(topic)
            numbers = range(0 if layout is None else layout.count)
            of_topic = [topic] if layout is None else [str(name.log_of(number, layout)) for number in numbers]
            topics |= {} if layout is None else dict.fromkeys(of_topic, topic)
            logs |= {*of_topic}
        with open_for_writing(self._root) as (objects, metadata):
            areas = {each: PartitionedArea(objects, metadata, place.keys(each)) for each in {*topics.values()}}
            decided = {each for each, area in areas.items() if not area.bar(self._app, self._version)}
        return {log for log in logs if topics.get(log) not in decided}

    def _area(self, topic: str) -> AbstractContextManager[StagingArea]:
        return open_area(self._root, parse_topic_name(topic))


class _Areas:
    """The staging of logs, in stores that are open."""

    def __init__(self, objects: ObjectStore, metadata: MetadataStore, place: TopicLocation) -> None:
        self._objects = objects
        self._metadata = metadata
        self._place = place

    def of(self, log: str) -> StagingArea:
        return StagingArea(self._objects, self._metadata, self._place.keys(log))

    def knows(self, log: str, app: str, version: int) -> bool:
        """Whether a version has rows in a log, or had some."""
        return self.of(log).status(app, version).state not in ("unknown", "refused")


@contextmanager
def _committed_already(topic: str) -> Iterator[None]:
    """From here on no error may sound as if the rows were to be written again."""
    try:
        yield
    except IngestPendingError:
        raise
    except RetryError as error:
        raise IngestPendingError(
            f"the rows for {topic} are committed; whether they are ingested is unknown: {error.message}",
            operation="write",
            hint="The owner of the topic ingests them when it runs. Do not write them again",
        ) from error


def _refuse_live(root: Root, name: TopicName) -> None:
    """Rows staged for a topic that stores nothing would wait forever."""
    if root.directory is None:
        return
    with explained("write", root.directory):
        info = read_topic_info(LocalFiles(), name.directory(root.directory))
    if info is not None and not info.reliable:
        raise InputError(f"{name} has reliable=False: it keeps no messages, so rows cannot be staged for it")
