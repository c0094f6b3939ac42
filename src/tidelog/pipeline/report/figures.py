"""The data of a report: the state of every topic, from descriptors and from the files on this disk.

Only the catalog and the ends of files are read, so the cost is small per descriptor and zero per message.

Invariants
- A topic that cannot be read is reported with its problem; the others are still reported.
- A message is counted once over time: in an object while the catalog has it, else in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.clock import to_microseconds
from tidelog.cold.catalog import Catalog
from tidelog.errors import TidelogError
from tidelog.log.segment import FilePart
from tidelog.log.view import LogView
from tidelog.pipeline.address import Root
from tidelog.pipeline.ingest import opened_log
from tidelog.pipeline.jobs.tally import chosen_logs, read_rows
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import TIMESTAMP_FIELD, group_of
from tidelog.topics.names import parse_topic_name
from tidelog.topics.topic import Topic

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring messages in one object or file. `raw_bytes` are those of their frames, `size` what they take."""

    start_offset: int
    next_offset: int
    size: int
    raw_bytes: int
    first_time_us: int | None
    last_time_us: int | None

    @property
    def messages(self) -> int:
        return self.next_offset - self.start_offset


class SubscriptionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The lag of a subscription."""

    name: str
    kind: str
    offset: int
    lag_messages: int
    moved_us: int


class TopicFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One topic at one moment; `shipped_offset` is None where there is no store."""

    name: str
    start_offset: int = 0
    next_offset: int = 0
    shipped_offset: int | None = None
    objects: tuple[Stretch, ...] = ()
    files: tuple[Stretch, ...] = ()
    subscriptions: tuple[SubscriptionFigures, ...] = ()
    problem: str | None = None

    @property
    def messages(self) -> int:
        """Those that can be read."""
        return max(0, self.next_offset - self.start_offset)

    @property
    def cold_bytes(self) -> int:
        return sum(one.size for one in self.objects)

    @property
    def hot_bytes(self) -> int:
        return sum(one.size for one in self.files)

    @property
    def unshipped_messages(self) -> int:
        """What only this disk has; 0 where there is no store that it could be shipped to."""
        return 0 if self.shipped_offset is None else max(0, self.next_offset - self.shipped_offset)

    @property
    def hot_start_offset(self) -> int:
        """The oldest offset that is on this disk."""
        return max(self.start_offset, self.files[0].start_offset) if self.files else self.next_offset

    @property
    def kept_messages(self) -> tuple[int, int, int]:
        """How many are in the store alone, in both, and on this disk alone."""
        shipped = self.start_offset if self.shipped_offset is None else self.shipped_offset
        cold = min(shipped, self.hot_start_offset) - self.start_offset
        both = max(0, shipped - self.hot_start_offset)
        return cold, both, max(0, self.messages - cold - both)

    @property
    def lag_messages(self) -> int:
        """That of the slowest subscription."""
        return max((one.lag_messages for one in self.subscriptions), default=0)

    def only_hot(self) -> Iterator[Stretch]:
        """The files' messages that no object has, each file cut where the store's part ends."""
        covered = max([self.start_offset, *(one.next_offset for one in self.objects[-1:])])
        for file in self.files:
            if file.next_offset > covered:
                yield _from(file, max(covered, file.start_offset))


def _from(stretch: Stretch, offset: int) -> Stretch:
    """The part of a stretch from an offset on, as large as its share of the messages is."""
    if offset <= stretch.start_offset:
        return stretch
    share = (stretch.next_offset - offset) / stretch.messages
    return msgspec.structs.replace(
        stretch, start_offset=offset, size=round(stretch.size * share), raw_bytes=round(stretch.raw_bytes * share)
    )


def chosen_names(root: Root, topics: Sequence[str] | None) -> list[str]:
    """The names of the logs of these topics, of all by default: a topic with partitions has one for each."""
    with root.open() as log:
        return chosen_logs(log, log.topics(), topics, root.location)


def gather_figures(root: Root, names: Sequence[str]) -> Iterator[TopicFigures]:
    """Where each of these topics stands now, one after the other."""
    with root.open() as log:
        for name in names:
            yield _figures_or_problem(log, name)


def _figures_or_problem(log: LogDirectory, name: str) -> TopicFigures:
    try:
        return _figures(log, name)
    except (TidelogError, OSError) as error:
        return TopicFigures(name=name, problem=str(error))


def _figures(log: LogDirectory, name: str) -> TopicFigures:
    parsed = parse_topic_name(name)
    topic = opened_log(log, parsed)
    catalog = None if log._tier is None else log._tier.catalog(parsed.namespace, parsed.name)
    start_offset = topic.start_offset
    # The files first: what is shipped and pruned meanwhile is found in the catalog then, and not in neither of them.
    files = tuple(_files_of(log, topic))
    objects = () if catalog is None else tuple(_objects_of(catalog, start_offset))
    published = start_offset if not objects else objects[-1].next_offset
    return TopicFigures(
        name=name,
        start_offset=start_offset,
        next_offset=max([published, *(file.next_offset for file in files[-1:])]),
        shipped_offset=None if catalog is None else published,
        objects=objects,
        files=files,
        subscriptions=tuple(_subscriptions_of(topic)),
    )


def _objects_of(catalog: Catalog, start_offset: int) -> Iterator[Stretch]:
    for one in catalog.walk(start_offset):
        yield Stretch(
            start_offset=one.start_offset,
            next_offset=one.next_offset,
            size=one.size,
            raw_bytes=one.raw_size,
            first_time_us=one.first_time_us,
            last_time_us=one.last_time_us,
        )


def _files_of(log: LogDirectory, topic: Topic) -> Iterator[Stretch]:
    """The files of a topic, unless they are no longer its end: then the topic says that it has none here."""
    if not topic.is_reliable or topic.hot_start_offset >= topic.next_offset:
        return
    directory = log._topic_directory(topic.name)
    view = LogView(directory, time_field=TIMESTAMP_FIELD, first_offset=topic.hot_start_offset, group_of=group_of)
    offset, stop_offset = view.start_offset, view.next_offset
    while offset < stop_offset:
        part = view.locate(offset, stop_offset)
        if not isinstance(part, FilePart):
            return
        segment = part.segment
        yield Stretch(
            start_offset=segment.first_offset,
            next_offset=segment.next_offset,
            size=segment.size,
            raw_bytes=segment.size,
            first_time_us=segment.min_time_us,
            last_time_us=segment.max_time_us,
        )
        offset = segment.next_offset


def _subscriptions_of(topic: Topic) -> Iterator[SubscriptionFigures]:
    if not topic.is_reliable:
        return
    for name in topic.subscriptions():
        info = topic.subscription_info(name)
        yield SubscriptionFigures(
            name=name,
            kind=info.kind,
            offset=info.offset,
            lag_messages=info.lag_messages,
            moved_us=to_microseconds(info.moved),
        )


# Messages and bytes over time: which bins there are, and how much falls into each.
#
# Of an object or file only its first and its last time are known, so its messages are spread evenly between them. An
# exact histogram, counted from the messages, has the same bins.


_SECOND_US = 1_000_000
_MAX_BINS = 60
_HOUR, _DAY = 3600, 86_400
_WIDTHS_SECONDS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(_HOUR, 2 * _HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR),
    *(_DAY, 2 * _DAY, 7 * _DAY, 14 * _DAY, 28 * _DAY, 91 * _DAY, 182 * _DAY, 364 * _DAY),
)


class TimeBins(msgspec.Struct, frozen=True):
    """`count` neighbouring stretches of time, each `width_us` long. They begin at a multiple of their width."""

    start_us: int
    width_us: int
    count: int

    def index_of(self, time_us: int) -> int:
        """The bin of a moment; one outside belongs to the nearest."""
        return min(max((time_us - self.start_us) // self.width_us, 0), self.count - 1)

    def bounds_us(self, index: int) -> tuple[int, int]:
        """When a bin begins, and when the next one does."""
        first = self.start_us + index * self.width_us
        return first, first + self.width_us


class TimeCounts(msgspec.Struct):
    """Messages and bytes of each bin: those that the store has, and those that are on a disk alone."""

    cold_messages: list[float]
    cold_bytes: list[float]
    hot_messages: list[float]
    hot_bytes: list[float]

    @classmethod
    def empty(cls, bins: TimeBins) -> TimeCounts:
        return cls(*([0.0] * bins.count for _ in range(4)))

    def add(self, other: TimeCounts) -> None:
        """Sums up two topics."""
        for mine, theirs in zip(self._lists(), other._lists(), strict=True):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    def _lists(self) -> tuple[list[float], ...]:
        return self.cold_messages, self.cold_bytes, self.hot_messages, self.hot_bytes


def choose_bins(topics: Iterable[TopicFigures], max_bins: int = _MAX_BINS) -> TimeBins | None:
    """Bins for all times of these topics; None when there is no message with a time."""
    times = [
        time
        for topic in topics
        for stretch in (*topic.objects, *topic.files)
        for time in (stretch.first_time_us, stretch.last_time_us)
        if time is not None
    ]
    if not times:
        return None
    first, last = min(times), max(times)
    width = _width_us(first, last, max_bins)
    return TimeBins(first // width * width, width, last // width - first // width + 1)


def _width_us(first_us: int, last_us: int, max_bins: int) -> int:
    """The smallest width that people count in; beyond years, which only wrong clocks reach, any doubling of it."""
    widths = [seconds * _SECOND_US for seconds in _WIDTHS_SECONDS]
    while last_us // widths[-1] - first_us // widths[-1] >= max_bins:
        widths.append(widths[-1] * 2)
    return next(width for width in widths if last_us // width - first_us // width < max_bins)


def spread(topic: TopicFigures, bins: TimeBins) -> TimeCounts:
    """A topic over time, as far as descriptors and files tell."""
    counts = TimeCounts.empty(bins)
    for stretch in topic.objects:
        _spread_one(stretch, bins, counts.cold_messages, counts.cold_bytes)
    for stretch in topic.only_hot():
        _spread_one(stretch, bins, counts.hot_messages, counts.hot_bytes)
    return counts


def _spread_one(stretch: Stretch, bins: TimeBins, messages: list[float], size: list[float]) -> None:
    if stretch.first_time_us is None or stretch.last_time_us is None:
        return
    first, last = bins.index_of(stretch.first_time_us), bins.index_of(stretch.last_time_us)
    for index, share in zip(range(first, last + 1), _shares(stretch, bins, first, last), strict=True):
        messages[index] += stretch.messages * share
        size[index] += stretch.raw_bytes * share


def _shares(stretch: Stretch, bins: TimeBins, first: int, last: int) -> Sequence[float]:
    """How much of the time between the first and the last message lies in each bin."""
    assert stretch.first_time_us is not None and stretch.last_time_us is not None
    begin, end = stretch.first_time_us, stretch.last_time_us + 1
    bounds = (bins.bounds_us(index) for index in range(first, last + 1))
    parts = [max(0, min(end, upper) - max(begin, lower)) for lower, upper in bounds]
    return [part / sum(parts) for part in parts]


# Messages over time, counted by Spark message by message: for topics whose times are not spread evenly.
#
# Invariants
# - It counts what the figures know: messages that arrived since are left out, so that both agree.


def exact_times(spark: SparkSession, root: Root, figures: Sequence[TopicFigures], bins: TimeBins) -> list[TimeCounts]:
    """The counts of each topic, in the order of the figures."""
    counts = {one.name: TimeCounts.empty(bins) for one in figures}
    readable = [one for one in figures if one.messages and one.problem is None]
    for row in _rows(spark, root, readable, bins) if readable else ():
        found, at = counts[row.topic], bins.index_of(bins.start_us + row.bin * bins.width_us)
        messages = found.cold_messages if row.is_cold else found.hot_messages
        size = found.cold_bytes if row.is_cold else found.hot_bytes
        messages[at] += row.messages
        size[at] += row.bytes
    return [counts[one.name] for one in figures]


def _rows(spark: SparkSession, root: Root, figures: Sequence[TopicFigures], bins: TimeBins) -> Iterable[Row]:
    from pyspark.sql import functions as sql

    offsets = {one.name: (one.start_offset, one.next_offset) for one in figures}
    ends = [(one.name, one.shipped_offset or 0) for one in figures]
    shipped = sql.broadcast(spark.createDataFrame(ends, "topic string, shipped_offset long"))
    since_us = sql.unix_micros("timestamp") - bins.start_us
    size = sum((sql.coalesce(sql.octet_length(name), sql.lit(0)) for name in ("key", "value")), sql.lit(0))
    counted = (
        read_rows(spark, root, offsets, columns="topic,offset,timestamp,key,value")
        .join(shipped, "topic")
        .withColumn("is_cold", sql.col("offset") < sql.col("shipped_offset"))
        .groupBy("topic", "is_cold", sql.floor(since_us / bins.width_us).alias("bin"))
        .agg(sql.count("*").alias("messages"), sql.sum(size).alias("bytes"))
    )
    return counted.collect()
