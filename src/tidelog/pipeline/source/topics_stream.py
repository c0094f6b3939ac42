"""Topics as a stream: which offsets the next micro-batch reads, within the rate limits.

Invariants
- Its two offsets determine a batch, however often and wherever it is rerun: planning depends on nothing else.
- An offset never goes back. A topic that is gone, or ends before what was already read, is data loss: an error, or with
  failOnDataLoss=false a topic that yields nothing until it is longer again.
- A topic that was deleted and created again is a different log, however long it is: the unread rest of the first is
  lost. With failOnDataLoss=false the new one is read from its oldest message on. The checkpoint has the ids of both.
- A topic that a pattern matches later begins at its oldest message, and so does a partition that is added later:
  nothing of it was missed.
- Offsets are those of logs, by their names: a topic with partitions has one for each. Checkpoints name the partitions.
- With a server the end of a partition is known under the epoch of its owner, which is in the checkpoint too. Where a
  later owner did not get the end that was read, it is data loss; with failOnDataLoss=false what the later one has from
  there on is read: these are other messages.
- With Trigger.AvailableNow the end is that of the moment at which the query began.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
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
from tidelog.pipeline.source.explained import PlannedRead
from tidelog.pipeline.source.options import (
    Partition,
    SourceOptions,
    TopicOptionReader,
    epochs_in,
    from_checkpoint,
    resolve_start,
    to_checkpoint,
)
from tidelog.pipeline.source.planning import OpenTopics
from tidelog.pipeline.source.told import told_in_one_line
from tidelog.pipeline.source.topics import TopicPartition, read_partition

# Rate limiting: how much of the backlog goes into one micro-batch, divided among topics and partitions by backlog.


def admit_rows(starts: Mapping[str, int], ends: Mapping[str, int], max_rows: int) -> dict[str, int]:
    """Ends with at most so many rows before them; every topic moves in the end, since remainders are given out too."""
    waiting = {topic: ends[topic] - starts[topic] for topic in ends}
    total = sum(waiting.values())
    if total <= max_rows:
        return dict(ends)
    shares = {topic: max_rows * rows // total for topic, rows in waiting.items()}
    left = max_rows - sum(shares.values())
    # Those that have waited for longest by their own measure first; names decide between equals, so it is repeatable.
    for topic in sorted(waiting, key=lambda one: (-(max_rows * waiting[one] % total), one))[:left]:
        shares[topic] += 1
    return {topic: starts[topic] + min(shares[topic], waiting[topic]) for topic in ends}


def admit_bytes(
    starts: Mapping[str, int], ends: Mapping[str, int], max_bytes: int, topics: OpenTopics
) -> dict[str, int]:
    """Ends with about so many bytes before them; at least one message of every topic that has any."""
    sizes = {topic: topics.bytes_between(topic, starts[topic], ends[topic]) for topic in ends}
    total = sum(sizes.values())
    if total <= max_bytes:
        return dict(ends)
    share = max_bytes / total
    return {topic: topics.offset_behind(topic, starts[topic], ends[topic], share) for topic in ends}


Checkpoint = dict[str, Any]


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver's half of a stream; one process keeps it for as long as the query runs."""

    def __init__(self, options: SourceOptions, schema: StructType, untold: TopicOptionReader | None = None) -> None:
        self._options = options
        self._schema = schema
        self._untold = untold  # has options that nobody was warned of yet
        self._opened: OpenTopics | None = None
        self._target: dict[str, int] | None = None
        self._initial: Checkpoint | None = None
        self._waiting_since: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get a copy of it: what is open stays here."""
        return {**self.__dict__, "_opened": None, "_untold": None}

    @property
    def _topics(self) -> OpenTopics:
        if self._opened is None:
            untold, self._untold = self._untold, None
            if untold is not None:
                untold.warn_of_kafka()  # Spark makes a reader for the tasks too, which opens nothing on the driver
            self._opened = OpenTopics(self._options)
        return self._opened

    # Where it begins and ends

    @told_in_one_line
    def initialOffset(self) -> Checkpoint:
        if self._initial is None:
            self._topics.check_places()
            names = self._topics.names()
            log_ids = self._log_ids(names)  # before the offsets: one that is made in between is noticed later
            self._initial = self._kept({topic: self._start_of(topic) for topic in names}, log_ids)
        return self._initial

    def _kept(self, offsets: Mapping[str, int], log_ids: Mapping[str, str] | None = None) -> Checkpoint:
        return to_checkpoint(offsets, log_ids, self._topics.partition, self._topics.epochs(offsets))

    def _found(self, kept: Checkpoint) -> tuple[dict[str, int], dict[str, str]]:
        return from_checkpoint(kept, self._topics.log_name)

    def _start_of(self, topic: str) -> int:
        options = self._options
        log = self._topics.log(topic)
        name = self._topics.partition(topic)
        start = resolve_start(options.starting, name, log, "latest", options.when_no_later_message)
        self._topics.check_start(topic, start)
        return start

    @told_in_one_line
    def prepareForTriggerAvailableNow(self) -> None:
        self._topics.refresh()
        self._target = self._known_ends()

    @told_in_one_line
    def reportLatestOffset(self) -> Checkpoint | None:
        return self._kept(self._known_ends())

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def planned(self) -> list[PlannedRead]:
        """What a query that begins now reads first."""
        starts, _ = self._found(self.initialOffset())
        ends = self._known_ends()
        found = self._topics.described(
            {log: (start, max(start, ends.get(log, start))) for log, start in starts.items()}
        )
        self.stop()
        return found

    # The next batch

    @told_in_one_line
    def latestOffset(self, start: Checkpoint, limit: ReadLimit) -> Checkpoint:
        self._topics.refresh()
        begun, known = self._found(start)
        log_ids = known | self._log_ids({*begun, *self._topics.names()})
        made_again = [topic for topic in begun if log_ids.get(topic) != known.get(topic, log_ids.get(topic))]
        for topic in made_again:
            self._topics.lost(_made_again(topic, f"was read up to offset {begun.pop(topic)}"))
        self._check_epochs(start, begun)
        ends = self._ends_from(begun) | {topic: self._topics.log(topic).next_offset for topic in made_again}
        starts = {topic: begun[topic] if topic in begun else self._topics.log(topic).start_offset for topic in ends}
        if self._should_wait(starts, ends, limit):
            return start
        return self._kept(self._admitted(starts, ends, limit), log_ids)

    def _check_epochs(self, start: Checkpoint, begun: dict[str, int]) -> None:
        """Goes on behind what later owners have got of what was read."""
        for topic, epoch in epochs_in(start, self._topics.log_name).items():
            read = kept = begun.get(topic, 0)
            with suppress(NotFoundError):
                kept = self._topics.kept_until(topic, read, epoch)
            if kept < read:
                self._topics.lost(
                    f"{topic} was read up to offset {read}, and the node that had it was lost before it had shipped "
                    f"{kept} and later: other messages have these offsets now"
                )
                begun[topic] = kept

    def _log_ids(self, topics: Collection[str]) -> dict[str, str]:
        """Which logs the topics are now, of those that are there."""
        found: dict[str, str] = {}
        for topic in topics:
            with suppress(NotFoundError):
                if (log_id := self._topics.log_id(topic)) is not None:
                    found[topic] = log_id
        return found

    def _ends_from(self, begun: Mapping[str, int]) -> dict[str, int]:
        """Where topics end now; those that are gone, or shorter than what was read of them, where they stood."""
        ends = dict(self._target if self._target is not None else self._known_ends())
        if self._options.topics is not None:
            for name in {*self._topics.names()} - {*ends, *begun}:
                self._topics.log(name)  # says that there is none of this name
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
        if not self._is_read(self._topics.partition(topic)):
            return f"{topic} {read} by the query of this checkpoint, and is not among the topics of this one"
        return f"{topic} is gone, and {read}"

    def _is_read(self, partition: Partition) -> bool:
        """Whether the options ask for it, if it is there."""
        topics, assigned = self._options.topics, self._options.assigned.get(partition.topic)
        return topics is None or (partition.topic in topics and (assigned is None or partition.number in assigned))

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

    @told_in_one_line
    def partitions(self, start: Checkpoint, end: Checkpoint) -> list[InputPartition]:
        (begun, before), (ends, planned) = self._found(start), self._found(end)
        for topic in [one for one, log_id in planned.items() if before.get(one, log_id) != log_id]:
            begun.pop(topic, None)
        under = epochs_in(end, self._topics.log_name)
        for topic, epoch in epochs_in(start, self._topics.log_name).items():
            if topic in begun and under.get(topic, epoch) != epoch:
                begun[topic] = self._topics.kept_until(topic, begun[topic], epoch)
        now = self._log_ids(planned)
        ranges: dict[str, tuple[int, int]] = {}
        for topic, stop in ends.items():
            if now.get(topic) == planned.get(topic, now.get(topic)) or topic not in now:
                ranges[topic] = self._range(topic, begun.get(topic), stop, under.get(topic))
            elif begun.get(topic) != stop:
                self._topics.lost(_made_again(topic, f"was to be read up to offset {stop}"))
        return [TopicPartition(parts, self._topics.place) for parts in self._topics.plan_tasks(ranges)]

    def _range(self, topic: str, start: int | None, stop: int, epoch: int | None) -> tuple[int, int]:
        if start is not None and start >= stop:
            return stop, stop
        try:
            kept = self._topics.kept_until(topic, stop, epoch)
            if kept < stop:
                self._topics.lost(f"{topic}: what was to be read up to {stop} went with its node from {kept} on")
                stop = max(kept, start or 0)
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


def _made_again(topic: str, what: str) -> str:
    return f"{topic} was deleted and made again: the one that {what} is gone"
