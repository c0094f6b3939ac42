"""What a task of a write does: rows to frames, frames to staged parts, one for each topic.

Invariants
- A part has a name that no other attempt has, so tasks that run twice do not meet.
- Nothing that is staged here is part of a topic: whoever coordinates the write commits the parts of the tasks that
  succeeded, and of those alone.
- No object for a row: columns become frames in one call a batch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import InputError
from tidelog.pipeline.arrow_columns import frames_of
from tidelog.pipeline.part import ColdPlace
from tidelog.pipeline.partition_reader import open_objects
from tidelog.tier.intake_area import consignment_of
from tidelog.tier.intake_part import PartWriter, StagedPart
from tidelog.tier.keys import TopicKeys


class StagingPlace(msgspec.Struct, frozen=True):
    """Where a write stages its rows, and the largest message that it may have there."""

    place: ColdPlace
    topic: str | None
    max_message_bytes: int


def stage_rows(
    batches: Iterator[pa.RecordBatch], target: StagingPlace, app: str, version: int, partition: int
) -> dict[str, StagedPart]:
    """Stages all rows of a task; the parts by topic. What it raises leaves nothing that counts."""
    staging = _Staging(target, consignment_of(app, version), partition)
    try:
        for batch in batches:
            for name, rows in _by_topic(batch, target.topic):
                staging.write(name, rows)
    except BaseException as error:
        staging.close(error)
        raise
    return staging.close(None)


def _by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    if topic is not None:
        yield topic, batch
        return
    names = batch.column("topic")
    if names.null_count:
        raise InputError("a row has no topic: the column topic is null")
    for name in pc.unique(names).to_pylist():
        yield name, batch.filter(pc.equal(names, name))


class _Staging:
    """The parts that one task writes."""

    def __init__(self, target: StagingPlace, consignment: str, partition: int) -> None:
        self._place = target.place
        self._max_message_bytes = target.max_message_bytes
        self._consignment = consignment
        self._partition = partition
        self._attempt = secrets.token_hex(8)
        self._writers: dict[str, PartWriter] = {}

    def write(self, topic: str, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        writer = self._writers.get(topic) or self._open(topic)
        frames = frames_of(
            rows,
            writer.rows,
            timestamp_us=time.time_ns() // 1000,
            keeps_timestamps="timestamp" in rows.schema.names,
            max_message_bytes=self._max_message_bytes,
        )
        writer.write(frames.buffer, rows.num_rows)

    def _open(self, topic: str) -> PartWriter:
        namespace, _, name = topic.partition("/")
        keys = TopicKeys(namespace, name, self._place.metadata_root)
        key = keys.staged_part(self._consignment, self._partition, self._attempt)
        writer = self._writers[topic] = PartWriter(open_objects(self._place), key)
        return writer

    def close(self, error: BaseException | None) -> dict[str, StagedPart]:
        for writer in self._writers.values():
            writer.__exit__(None if error is None else type(error), error, None)
        return {topic: writer.part for topic, writer in self._writers.items() if writer.part is not None}
