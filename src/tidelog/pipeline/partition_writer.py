"""What a task of a write does: rows to frames, frames to staged parts, one or more for each topic.

Invariants
- A part has a name that no other attempt has, so tasks that run twice do not meet.
- Nothing that is staged here is part of a topic: whoever coordinates the write commits the parts of the tasks that
  succeeded, and of those alone.
- No object for a row: columns become frames in one call a batch.
- Memory and open files are bounded, however many topics the rows of a task name.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import InputError, TidelogError
from tidelog.log.frame import Frames
from tidelog.pipeline.arrow_columns import frames_of
from tidelog.pipeline.part import ColdPlace
from tidelog.pipeline.partition_reader import open_objects, spare_collections
from tidelog.pipeline.worker_memory import keep_memory
from tidelog.tier.intake_area import consignment_of
from tidelog.tier.intake_part import PartWriter, StagedPart
from tidelog.tier.keys import TopicKeys
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.stores import open_store
from tidelog.topics.names import parse_topic_name

_MOST_OPEN = 256
# What the client of a store may hold of an object that is being written: one piece that fills, four on their way.
_MOST_HELD_BYTES_A_PART = 40 << 20
_MOST_HELD_BYTES = 160 << 20


class StagingPlace(msgspec.Struct, frozen=True):
    """Where a write stages its rows, and the largest message that it may have there."""

    place: ColdPlace
    topic: str | None
    max_message_bytes: int


def stage_rows(
    batches: Iterator[pa.RecordBatch], target: StagingPlace, app: str, version: int, partition: int
) -> dict[str, list[StagedPart]]:
    """Stages all rows of a task; the parts by topic. What it raises leaves nothing behind."""
    spare_collections()
    keep_memory()
    staging = _Staging(target, consignment_of(app, version), partition)
    try:
        for batch in batches:
            for name, rows in _by_topic(batch, target.topic):
                staging.write(name, rows)
        return staging.finish()
    except BaseException as error:
        staging.abandon(error)
        raise


def _by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    if topic is not None:
        yield topic, batch
        return
    names = batch.column("topic")
    if names.null_count:
        raise InputError("a row has no topic: the column topic is null")
    for name in pc.unique(names).to_pylist():
        yield name, batch.filter(pc.equal(names, name))


def _store_for_writing(place: ColdPlace) -> ObjectStore:
    """A directory is opened anew, which makes it: it may have been removed since the last task of this worker."""
    is_directory = place.store_url.startswith("file:")
    return open_store(place.store_url, place.store_settings) if is_directory else open_objects(place)


class _Staging:
    """The parts that one task writes: one open for each topic, as long as they are not too many or too large."""

    def __init__(self, target: StagingPlace, consignment: str, partition: int) -> None:
        self._place = target.place
        self._max_message_bytes = target.max_message_bytes
        self._consignment = consignment
        self._partition = partition
        self._writers: dict[str, PartWriter] = {}
        self._held_bytes: dict[str, int] = {}
        self._parts: dict[str, list[StagedPart]] = {}

    def write(self, topic: str, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        writer = self._writers.get(topic) or self._open(topic)
        try:
            frames = self._frames_of(rows, writer.rows)
        except InputError as error:
            before = sum(part.rows for part in self._parts.get(topic, ())) + writer.rows
            error.operation = f"task {self._partition}, behind its first {before} rows for {topic}"
            raise
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
        name = parse_topic_name(topic)
        keys = TopicKeys(name.namespace, name.name, self._place.metadata_root)
        key = keys.staged_part(self._consignment, self._partition, secrets.token_hex(8))
        writer = self._writers[topic] = PartWriter(_store_for_writing(self._place), key)
        self._held_bytes[topic] = 0
        return writer

    def _finish(self, topic: str) -> None:
        """Publishes what is open of a topic; its next rows make another part."""
        del self._held_bytes[topic]
        writer = self._writers.pop(topic)
        writer.__exit__(None, None, None)
        if writer.part is not None:
            self._parts.setdefault(topic, []).append(writer.part)

    def finish(self) -> dict[str, list[StagedPart]]:
        """Publishes everything; the parts of each topic in the order of their rows."""
        for topic in list(self._writers):
            self._finish(topic)
        return self._parts

    def abandon(self, error: BaseException) -> None:
        """Leaves nothing open. What was published goes when the write is aborted, or with the next sweep."""
        for writer in self._writers.values():
            with contextlib.suppress(TidelogError):
                writer.__exit__(type(error), error, None)
        keys = [part.key for parts in self._parts.values() for part in parts]
        with contextlib.suppress(TidelogError):
            open_objects(self._place).delete(keys)
