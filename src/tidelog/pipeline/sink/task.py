"""The task's half of a write: encodes rows to frames and stages them as parts, one or more for each log.

A topic is one log, or one for each of its partitions. A row goes to the partition that its column `partition` names,
else to that of its key, and rows without either take turns.

Invariants
- The name of a part is unique to its attempt, so tasks that run twice do not conflict.
- Nothing staged here is part of a topic: the coordinator of the write commits the parts of the tasks that succeeded,
  and only those.
- No object per row: one call per batch turns columns into frames, and one finds the partitions of its keys.
- The rows of a log stay in their order.
- Memory and open files are bounded, however many topics the rows of a task name.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog import _native
from tidelog.cold.catalog import PartitionLayout
from tidelog.errors import InputError, TidelogError
from tidelog.files import LocalFiles
from tidelog.log.frame import Frames
from tidelog.pipeline.location import TopicLocation
from tidelog.pipeline.source.arrow import bytes_column, frames_of
from tidelog.pipeline.tasks import tune_worker
from tidelog.staging.area import PartWriter, StagedPart, staged_commit_of
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import open_store
from tidelog.topics.names import parse_topic_name, read_topic_info

_MOST_OPEN = 256
# What the client of a store may buffer of an object that is being written: one piece that fills, four in flight.
_MOST_HELD_BYTES_A_PART = 40 << 20
_MOST_HELD_BYTES = 160 << 20


class StagingLocation(msgspec.Struct, frozen=True):
    """Where a write stages its rows, and the largest message that it may have there.

    `layout` is that of the topic, if there is one for all rows. `directory` is the log directory that has no store.
    `is_table`: the rows are those of an INSERT into a table of Spark's catalog. `log_id` is that of the log of the
    topic, or the one that a new topic is to have; empty where it is not one log, or has no store. Parts have no more
    than about `max_part_bytes`.
    """

    place: TopicLocation
    topic: str | None
    max_message_bytes: int
    layout: PartitionLayout | None = None
    directory: Path | None = None
    is_table: bool = False
    log_id: str = ""
    max_part_bytes: int = sys.maxsize


class StagedParts(dict[str, list[StagedPart]]):
    """Parts by the names of logs; `topics` has the topics of those that are partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.topics: dict[str, str] = {}

    def add(self, other: StagedParts) -> None:
        """The parts of another task, behind these."""
        for log, parts in other.items():
            self.setdefault(log, []).extend(parts)
        self.topics.update(other.topics)


def layout_of(place: TopicLocation, directory: Path | None, topic: str) -> PartitionLayout | None:
    """How a topic is divided into partitions: as the catalog says, or without a store the topic's directory."""
    if directory is None:
        found = place.catalog(topic).partitions_document().read()
        return None if found is None else found.value
    info = read_topic_info(LocalFiles(), parse_topic_name(topic).directory(directory))
    return None if info is None else info.partitions


def stage_rows(
    batches: Iterator[pa.RecordBatch], target: StagingLocation, app: str, version: int, partition: int
) -> StagedParts:
    """Stages all rows of a task; returns the parts by the names of logs. If it raises, it leaves no files."""
    tune_worker()
    staging, routes = _Staging(target, staged_commit_of(app, version), partition), _Routes(target, partition)
    try:
        for batch in batches:
            if target.is_table:
                refuse_read_rows(batch)
            for topic, of_topic in _by_topic(batch, target.topic):
                for log, rows in routes.of(topic, of_topic):
                    staging.write(log, rows)
                    if log not in staging.parts.topics and routes.has_partitions(topic):
                        staging.parts.topics[log] = topic
        return staging.finish()
    except BaseException as error:
        staging.abandon(error)
        raise


def refuse_read_rows(rows: pa.RecordBatch) -> None:
    """InputError for rows of an INSERT that were read from a topic.

    Spark may hand rows of another table over as if they were for that one (`source.declared` says when and why).
    """
    if rows.column("offset").null_count < rows.num_rows:
        raise InputError(
            "a row that is inserted has an offset: it was read from a topic, and gets a new one in this table",
            hint="Name the columns that are written: INSERT INTO t (key, value) SELECT key, value FROM ... . "
            "CREATE TABLE ... AS SELECT is not possible: Spark does not hand its OPTIONS on",
        )
    if not pc.all(pc.or_(pc.is_valid(rows.column("key")), pc.is_valid(rows.column("value")))).as_py():
        raise InputError("a row that is inserted has neither a key nor a value", hint="A tombstone has a key")


def _by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    if topic is not None:
        yield topic, batch
        return
    names = batch.column("topic")
    if names.null_count:
        raise InputError(
            "a row has no topic: the column topic is null",
            hint="Set the option topic, which is for all rows, or fill the column topic in every row",
        )
    for name in pc.unique(names).to_pylist():
        yield name, batch.filter(pc.equal(names, name))


class _Routes:
    """To which logs the rows of topics go."""

    def __init__(self, target: StagingLocation, task: int) -> None:
        self._target = target
        self._layouts: dict[str, PartitionLayout | None] = {}
        if target.topic is not None:
            self._layouts[target.topic] = target.layout
        self._turn = task
        """Whose turn it is among rows without a key: not that of the same partition in every task."""

    def has_partitions(self, topic: str) -> bool:
        return self._layout(topic) is not None

    def of(self, topic: str, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The logs, and the rows of each in their order."""
        layout = self._layout(topic)
        if layout is None:
            yield topic, rows
            return
        name = parse_topic_name(topic)
        numbers = self._numbers(topic, layout.count, rows)
        in_order = pc.sort_indices(numbers)  # a stable sort
        sorted_rows, sorted_numbers = rows.take(in_order), numbers.take(in_order)
        first = 0
        for run in pc.run_end_encode(sorted_numbers).run_ends.to_pylist():
            yield str(name.log_of(sorted_numbers[first].as_py(), layout)), sorted_rows.slice(first, run - first)
            first = run

    def _numbers(self, topic: str, count: int, rows: pa.RecordBatch) -> pa.Array:
        found, self._turn = _native.partitions_of(rows.num_rows, bytes_column(rows, "key"), count, self._turn)
        numbers = pa.Array.from_buffers(pa.int32(), rows.num_rows, [None, pa.py_buffer(found)])
        if "partition" not in rows.schema.names:
            return numbers
        given = rows.column("partition").cast(pa.int64())
        wrong = pc.filter(given, pc.or_(pc.less(given, 0), pc.greater_equal(given, count)))
        if len(wrong):
            raise InputError(
                f"a row has the partition {wrong[0]}, and {topic} has 0 to {count - 1}",
                hint="Leave the column partition out, or set it to null where the key is to decide",
            )
        return pc.coalesce(given.cast(pa.int32()), numbers)

    def _layout(self, topic: str) -> PartitionLayout | None:
        if topic not in self._layouts:
            name = str(parse_topic_name(topic))
            self._layouts[topic] = layout_of(self._target.place, self._target.directory, name)
        return self._layouts[topic]


def _store_for_writing(place: TopicLocation) -> ObjectStore:
    """A directory is opened again, which creates it: it may have been removed since the last task of this worker."""
    is_directory = place.store_url.startswith("file:")
    return open_store(place.store_url, place.store_settings) if is_directory else place.objects


class _Staging:
    """The parts that one task writes: one open for each log, as long as they are not too many or too large."""

    def __init__(self, target: StagingLocation, staged_commit: str, partition: int) -> None:
        self._place = target.place
        self._max_message_bytes = target.max_message_bytes
        self._max_part_bytes = target.max_part_bytes
        self._log_id = target.log_id
        self._staged = staged_commit
        self._partition = partition
        self._writers: dict[str, PartWriter] = {}
        self._held_bytes: dict[str, int] = {}
        self.parts = StagedParts()

    def write(self, topic: str, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        writer = self._writers.get(topic) or self._open(topic)
        try:
            frames = self._frames_of(rows, writer.rows)
        except InputError as error:
            before = sum(part.rows for part in self.parts.get(topic, ())) + writer.rows
            error.operation = f"task {self._partition}, after its first {before} rows for {topic}"
            raise
        if writer.rows and writer.bytes_written + len(frames.buffer) > self._max_part_bytes:
            self._finish(topic)
            self.write(topic, rows)
            return
        writer.write(frames.buffer, rows.num_rows)
        self._held_bytes[topic] = min(self._held_bytes[topic] + len(frames.buffer), _MOST_HELD_BYTES_A_PART)
        while len(self._writers) > _MOST_OPEN or sum(self._held_bytes.values()) > _MOST_HELD_BYTES:
            self._finish(max(self._held_bytes, key=self._held_bytes.__getitem__))

    def _frames_of(self, rows: pa.RecordBatch, first_row: int) -> Frames:
        return frames_of(
            rows,
            first_row,
            timestamp_us=time.time_ns() // 1000,
            keeps_timestamps="timestamp" in rows.schema.names,
            max_message_bytes=self._max_message_bytes,
        )

    def _open(self, topic: str) -> PartWriter:
        keys = self._place.keys(str(parse_topic_name(topic)))
        key = keys.staged_part(self._staged, self._partition, secrets.token_hex(8))
        writer = self._writers[topic] = PartWriter(_store_for_writing(self._place), key, self._log_id)
        self._held_bytes[topic] = 0
        return writer

    def _finish(self, topic: str) -> None:
        """Publishes what is open of a topic; its next rows make another part."""
        del self._held_bytes[topic]
        writer = self._writers.pop(topic)
        writer.__exit__(None, None, None)
        if writer.part is not None:
            self.parts.setdefault(topic, []).append(writer.part)

    def finish(self) -> StagedParts:
        """Publishes everything; the parts of each log in the order of their rows."""
        for topic in list(self._writers):
            self._finish(topic)
        return self.parts

    def abandon(self, error: BaseException) -> None:
        """Leaves nothing open. Published parts are deleted when the write is aborted, or by the next orphan removal."""
        for writer in self._writers.values():
            with contextlib.suppress(TidelogError):
                writer.__exit__(type(error), error, None)
        keys = [part.key for parts in self.parts.values() for part in parts]
        with contextlib.suppress(TidelogError):
            self._place.objects.delete(keys)
