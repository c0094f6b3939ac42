"""Topics as a stream: which offsets the next micro-batch reads, as much of it as is allowed at once.

Invariants
- A batch is what its two offsets say, however often and by whomever it is run again: planning looks at nothing else.
- An offset never goes back. A topic that is gone, or ends before what was read already, is data loss: an error, or with
  failOnDataLoss=false a topic from which nothing comes until it is longer again.
- A topic that a pattern matches later begins at its oldest message: nothing of it was missed.
- With Trigger.AvailableNow the end is the one of the moment at which the query began.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tidelog.errors import NotFoundError, OffsetOutOfRangeError
from tidelog.pipeline.admission import admit_bytes, admit_rows
from tidelog.pipeline.open_topics import OpenTopics
from tidelog.pipeline.options import SourceOptions
from tidelog.pipeline.positions import from_checkpoint, resolve_start, to_checkpoint
from tidelog.pipeline.source import TopicPartition, read_partition

Checkpoint = dict[str, Any]


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver's half of a stream; one process keeps it for as long as the query runs."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: OpenTopics | None = None
        self._target: dict[str, int] | None = None
        self._initial: dict[str, int] | None = None
        self._waiting_since: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get a copy of it: what is open stays here."""
        return {**self.__dict__, "_opened": None}

    @property
    def _topics(self) -> OpenTopics:
        if self._opened is None:
            self._opened = OpenTopics(self._options)
        return self._opened

    # Where it begins and ends

    def initialOffset(self) -> Checkpoint:
        if self._initial is None:
            self._initial = {topic: self._start_of(topic) for topic in self._topics.names()}
        return to_checkpoint(self._initial)

    def _start_of(self, topic: str) -> int:
        options = self._options
        log = self._topics.log(topic)
        start = resolve_start(options.starting, topic, log, "latest", options.when_no_later_message)
        self._topics.check_start(topic, start)
        return start

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._known_ends()

    def reportLatestOffset(self) -> Checkpoint | None:
        return to_checkpoint(self._known_ends())

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    # The next batch

    def latestOffset(self, start: Checkpoint, limit: ReadLimit) -> Checkpoint:
        begun = from_checkpoint(start)
        ends = self._ends_from(begun)
        starts = {topic: begun[topic] if topic in begun else self._topics.log(topic).start_offset for topic in ends}
        if self._should_wait(starts, ends, limit):
            return start
        return to_checkpoint(self._admitted(starts, ends, limit))

    def _ends_from(self, begun: Mapping[str, int]) -> dict[str, int]:
        """Where topics end now; those that are gone, or shorter than what was read of them, where they stood."""
        ends = dict(self._target if self._target is not None else self._known_ends())
        for topic in {*(self._options.topics or ())} - {*ends, *begun}:
            self._topics.log(topic)  # says that there is none of this name
        for topic, offset in begun.items():
            reached = ends.get(topic)
            if reached is None or reached < offset:
                self._topics.lost(self._loss(topic, offset, reached))
                ends[topic] = offset
        return ends

    def _loss(self, topic: str, offset: int, reached: int | None) -> str:
        read = f"was read up to offset {offset}"
        if reached is not None:
            return f"{topic} ends at offset {reached}, and {read}: it was deleted and made again, or lost its end"
        if self._options.topics is not None and topic not in self._options.topics:
            return f"{topic} {read} by the query of this checkpoint, and is not among the topics of this one"
        return f"{topic} is gone, and {read}"

    def _known_ends(self) -> dict[str, int]:
        """Those of the topics that are there: whether it matters that one is not depends on what was read of it."""
        ends: dict[str, int] = {}
        for topic in self._topics.names():
            with suppress(NotFoundError):
                ends[topic] = self._topics.log(topic).next_offset
        return ends

    def _admitted(self, starts: Mapping[str, int], ends: Mapping[str, int], limit: ReadLimit) -> dict[str, int]:
        if isinstance(limit, ReadAllAvailable):
            return dict(ends)
        options = self._options
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else options.max_offsets_per_trigger
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else options.max_bytes_per_trigger
        admitted = dict(ends)
        if max_bytes is not None:
            admitted = admit_bytes(starts, admitted, max_bytes, self._topics)
        return admitted if max_rows is None else admit_rows(starts, admitted, max_rows)

    def _should_wait(self, starts: Mapping[str, int], ends: Mapping[str, int], limit: ReadLimit) -> bool:
        """Whether there is less than the least that makes a batch worth while, and it has not waited long enough."""
        least = limit.min_rows if isinstance(limit, ReadMinRows) else self._options.min_offsets_per_trigger
        if least is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return False
        available = sum(ends[topic] - starts[topic] for topic in ends)
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        waited_enough = now - self._waiting_since >= self._options.max_trigger_delay_seconds
        if available < least and not (available and waited_enough):
            return True
        self._waiting_since = now
        return False

    # Its parts

    def partitions(self, start: Checkpoint, end: Checkpoint) -> list[InputPartition]:
        begun, ends = from_checkpoint(start), from_checkpoint(end)
        ranges = {topic: self._range(topic, begun.get(topic), stop) for topic, stop in ends.items()}
        return [TopicPartition(parts, self._topics.place) for parts in self._topics.plan_tasks(ranges)]

    def _range(self, topic: str, start: int | None, stop: int) -> tuple[int, int]:
        if start is not None and start >= stop:
            return stop, stop
        try:
            first = self._topics.log(topic).start_offset if start is None else start
            return self._topics.readable_range(topic, first, stop)
        except OffsetOutOfRangeError:
            raise
        except NotFoundError:
            self._topics.lost(f"{topic} is gone, and was to be read up to offset {stop}")
            return stop, stop

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._schema)

    def commit(self, end: Checkpoint) -> None:
        """Spark keeps the position itself."""

    def stop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
