"""Plans a read: divides a range of offsets into parts of about equal size in bytes, and assigns parts to tasks.

Invariants
- The parts of a topic are contiguous and cover exactly the requested range.
- A part says where its bytes are (objects with the needed piece of their index, files), so a task asks no metadata
  store. Data in the bucket is read from there; only the rest is read from files, or from the owner of the partition.
- Cuts are at positions that an index knows where that costs little balance: any other cut makes the task after it read
  from the preceding index entry.
- Bytes are an estimate for balance; offsets are exact.
"""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from operator import itemgetter

import msgspec

from tidelog.client.tail import OwnerTail, Stands
from tidelog.clock import SystemClock
from tidelog.cold.catalog import Catalog, Catalogs, Descriptor, PartitionLayout
from tidelog.cold.fetch import FetchSettings
from tidelog.cold.reader import History
from tidelog.cold.tiered_reader import HistoryOf, TieredView
from tidelog.errors import InputError, NotFoundError, NotSupportedError, OffsetOutOfRangeError, RetryError
from tidelog.log.binding import known_log_id, unbound
from tidelog.log.segment import FilePart, Segment
from tidelog.log.view import LogView
from tidelog.pipeline.location import FilePiece, OwnerPart, ReadPart, TopicLocation
from tidelog.pipeline.source.explained import PlannedRead
from tidelog.pipeline.source.options import ALL_PARTITIONS, Partition, SourceOptions
from tidelog.store.binding import StoreBinding
from tidelog.topics.look import TopicViews
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import parse_topic_name

# A cut moves to a place of the index if that is not further away than this share of a part.
_SNAP_SHARE = 0.25


class Limits(msgspec.Struct, frozen=True):
    """How small parts must be, and how many there must be."""

    max_bytes: int
    max_records: int | None = None
    min_parts: int | None = None


class TopicPlan:
    """One topic's range, with what is known about where its bytes are."""

    def __init__(
        self,
        name: Partition,
        start: int,
        stop: int,
        *,
        catalog: Catalog | None,
        view: LogView | None,
        cold_end: int,
        owner: OwnerPart | None = None,
    ) -> None:
        """`cold_end` is the first offset that no object has; `owner` has the rest, with the bytes of all of it."""
        self.name = name
        self.start = start
        self.stop = stop
        self._descriptors: list[Descriptor] = []
        if catalog is not None and start < min(stop, cold_end):
            self._descriptors = list(catalog.between(start, min(stop, cold_end)))
        self._cold_end = cold_end
        self._owner = owner
        self._segments = [] if view is None else [one for one in view.segments() if self._is_wanted(one, start, stop)]
        self._knots = self._find_knots()

    @property
    def bytes(self) -> float:
        return self._knots[-1][1] - self._knots[0][1]

    @property
    def records(self) -> int:
        return self.stop - self.start

    def _is_wanted(self, segment: Segment, start: int, stop: int) -> bool:
        return segment.next_offset > max(start, self._cold_end) and segment.first_offset < stop

    # Bytes by offset: a line through all places that an index knows

    def _find_knots(self) -> list[tuple[int, float]]:
        knots = [(self.start, 0.0)]
        for first, last, size in self._stretches():
            low, high = max(first, self.start), min(last, self.stop)
            if low < high and low >= knots[-1][0]:
                if low > knots[-1][0]:
                    knots.append((low, knots[-1][1]))
                knots.append((high, knots[-1][1] + size * (high - low) / (last - first)))
        if knots[-1][0] < self.stop:
            knots.append((self.stop, knots[-1][1]))
        return knots

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """(first offset, next offset, bytes), in order."""
        for descriptor in self._descriptors:
            places = [*descriptor.offset_index, (descriptor.next_offset, descriptor.size)]
            for (offset, position), (behind, end) in pairwise(places):
                yield offset, behind, end - position
        for segment in self._segments:
            begin, behind = max(segment.first_offset, self._cold_end), segment.next_offset
            part = FilePart(segment, begin)
            yield begin, behind, (part.end_byte - part.position) * (behind - begin) // (behind - part.offset)
        if self._owner is not None and self._cold_end < self.stop:
            yield max(self.start, self._cold_end), self.stop, round(self._owner.size)

    # Cutting

    def cut(self, parts: int, max_records: int | None) -> list[ReadPart]:
        """The range in about so many parts, none of them with more records than allowed."""
        edges = [self.start, *self._cuts(parts), self.stop]
        ranges = [piece for low, high in pairwise(edges) if low < high for piece in _divided(low, high, max_records)]
        return [self._part(low, high) for low, high in ranges]

    def offset_behind(self, share: float) -> int:
        """The offset after about this share of the bytes."""
        return self._offset_at(self.bytes * share, share)

    def _cuts(self, parts: int) -> list[int]:
        """Where parts of equal size end, moved to a place of the index if one is near."""
        parts = max(1, min(parts, self.records))
        wanted = [self.offset_behind(number / parts) for number in range(1, parts)]
        offsets = [offset for offset, _ in self._knots]
        reach = _SNAP_SHARE * self.records / parts
        snapped = [_nearest(offsets, offset, reach) for offset in wanted]
        evenly = [self.start + self.records * number // parts for number in range(1, parts)]
        return next(cuts for cuts in (snapped, wanted, evenly) if self._divide(cuts) or cuts is evenly)

    def _divide(self, cuts: Sequence[int]) -> bool:
        """Whether each of them makes one more part."""
        return all(low < high for low, high in pairwise([self.start, *cuts, self.stop]))

    def _offset_at(self, position: float, share_of_records: float) -> int:
        """The offset at which so many bytes are before; by numbers alone where nothing is known about bytes."""
        if self.bytes <= 0:
            return self.start + int(self.records * share_of_records)
        index = bisect_left(self._knots, position, key=itemgetter(1))
        (low, before), (high, behind) = self._knots[index - 1], self._knots[index]
        return low + round((high - low) * (position - before) / (behind - before)) if behind > before else high

    def _part(self, start: int, stop: int) -> ReadPart:
        objects = [one for one in self._descriptors if one.end_offset >= start and one.start_offset < stop]
        files = [one for one in self._segments if self._is_wanted(one, start, stop)]
        return ReadPart(
            topic=self.name.log,
            of_topic=self.name.topic,
            partition=self.name.number,
            start=start,
            stop=stop,
            cold_stop=max(start, min(stop, self._cold_end)),
            descriptors=tuple(_trimmed(descriptor, start, stop) for descriptor in objects),
            files=tuple(_piece(segment, max(start, self._cold_end)) for segment in files),
            owner=self._owner_part(max(start, self._cold_end), stop),
        )

    def _owner_part(self, start: int, stop: int) -> OwnerPart | None:
        owner = self._owner
        if owner is None or start >= stop:
            return None
        share = (stop - start) / (self.stop - max(self.start, self._cold_end))
        return msgspec.structs.replace(owner, size=owner.size * share)


def plan_parts(plans: Sequence[TopicPlan], limits: Limits) -> list[ReadPart]:
    """The parts of all topics: as many as their bytes ask for, and at least as many as wanted."""
    plans = [plan for plan in plans if plan.records > 0]
    total = sum(plan.bytes for plan in plans)
    # Rounded: one part more for the last few bytes would keep all cores but one waiting for it.
    wanted = max(limits.min_parts or 1, round(total / limits.max_bytes))
    parts: list[ReadPart] = []
    for plan in plans:
        share = plan.bytes / total if total else 1 / len(plans)
        parts += plan.cut(max(1, round(wanted * share)), limits.max_records)
    return parts


def _nearest(offsets: Sequence[int], offset: int, reach: float) -> int:
    index = bisect_left(offsets, offset)
    near = min(offsets[max(0, index - 1) : index + 1], key=lambda one: abs(one - offset))
    return near if abs(near - offset) <= reach else offset


def _divided(start: int, stop: int, max_records: int | None) -> Iterator[tuple[int, int]]:
    """Equal pieces of a range, none larger than allowed."""
    pieces = 1 if max_records is None else math.ceil((stop - start) / max_records)
    edges = [start + (stop - start) * number // pieces for number in range(pieces + 1)]
    return pairwise(edges)


def _piece(segment: Segment, start: int) -> FilePiece:
    """From as close before the offset as is known of this file."""
    part = FilePart(segment, max(start, segment.first_offset))
    return FilePiece(str(segment.path), part.offset, part.next_offset, part.position, part.end_byte)


def _trimmed(descriptor: Descriptor, start: int, stop: int) -> Descriptor:
    """With the part of its index that a range needs: a descriptor of a large object is long, and travels to a task."""
    first = descriptor.position_of(max(start, descriptor.start_offset))
    index = tuple(entry for entry in descriptor.offset_index if entry >= first and entry[0] <= stop)
    behind = next((entry for entry in descriptor.offset_index if entry[0] > stop), None)
    return msgspec.structs.replace(descriptor, offset_index=index if behind is None else (*index, behind))


# Combines small parts of many topics into one task: starting a task for a handful of rows costs more than they do.
#
# Invariants
# - Parts stay as they are and in order: only the boundaries between tasks are decided here.
# - A task gets no more records than the options allow, and no more than one part where parts have the desired size.
# - Few parts are left alone: each gets a task, as expected by a reader of a few topics.


_FEW_TASKS = 128
# To find a part, open it and end it takes about as long as to read so much.
_BYTES_TO_OPEN = 256 << 10


def packed(parts: Sequence[ReadPart], limits: Limits, few_tasks: int = _FEW_TASKS) -> list[tuple[ReadPart, ...]]:
    """The parts of each task: one, or where that would be very many tasks, several that are small."""
    weights = [_BYTES_TO_OPEN + _packed_bytes_of(part) for part in parts]
    tasks = max(few_tasks, limits.min_parts or 1)
    if len(parts) <= tasks:
        return [(part,) for part in parts]
    room = _Room(min(sum(weights) / tasks, limits.max_bytes), len(parts) // tasks, limits.max_records)
    groups: list[list[ReadPart]] = []
    for part, weight in zip(parts, weights, strict=True):
        if not groups or not room.takes(part, weight):
            groups.append([])
            room.is_new(part, weight)
        groups[-1].append(part)
    return [tuple(group) for group in groups]


class _Room:
    """What may still come to the parts of a task. The number of parts is limited too: else one that is large would
    leave fewer tasks than were asked for."""

    def __init__(self, most_bytes: float, most_parts: int, most_records: int | None) -> None:
        self._most = (most_bytes, most_parts, math.inf if most_records is None else most_records)
        self._taken: tuple[float, ...] = ()

    def takes(self, part: ReadPart, weight: float) -> bool:
        taken = tuple(map(sum, zip(self._taken, (weight, 1, part.stop - part.start), strict=True)))
        if any(one > most for one, most in zip(taken, self._most, strict=True)):
            return False
        self._taken = taken
        return True

    def is_new(self, part: ReadPart, weight: float) -> None:
        self._taken = (weight, 1, part.stop - part.start)


def _packed_bytes_of(part: ReadPart) -> float:
    in_objects = sum(one.size * _share(one, part.start, part.cold_stop) for one in part.descriptors)
    at_owner = 0.0 if part.owner is None else part.owner.size
    return in_objects + at_owner + sum(piece.size for piece in part.files)


def _share(descriptor: Descriptor, start: int, stop: int) -> float:
    first, last = max(start, descriptor.start_offset), min(stop, descriptor.next_offset)
    return max(0, last - first) / (descriptor.next_offset - descriptor.start_offset)


# The driver's view of the topics under a root: which exist, their first and last offsets, and how to read them.
#
# A topic with partitions is several logs, and what is said here of logs, by their names, is said of each of them. A
# topic without partitions is one log of the same name.
#
# Invariants
# - Nothing is changed. A topic is looked up when it is asked about, so topics that are created later are found.
# - With a server, topics end where their owners say that they do; that is asked once between two calls of `refresh`,
#   and before the catalog, so that what an owner prunes in between is found in the store.
# - The partitions of a topic are those that it had at the last `refresh`.
# - A range that cannot be read as requested is an error that names what is missing or, if data loss is allowed, is
#   reduced to the part that can be read. It is never moved back, so no row is read twice.


_logger = logging.getLogger("tidelog.pipeline")


class OpenTopics:
    """The topics that the options ask for. Close it, or use it in a `with` statement."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._opened = ExitStack()
        self._logs: dict[str, TieredView | LogView] = {}
        self._layouts: dict[str, PartitionLayout | None] = {}
        self._partitions: dict[str, Partition] = {}
        self.place = options.root.existing_place()
        """Where a task finds objects and catalogs; None without a store."""
        # What the checkpoint of a live owner vouches for is not read here: readers of messages check every frame.
        settings = options.root.load(open_check_bytes=0).log
        cold = (None, None) if self.place is None else self._open_stores(self.place, settings.max_message_bytes)
        self._views = TopicViews(options.root.directory, settings, None, SystemClock(), *cold)
        self._stands = None if options.server is None else Stands(options.server)
        if self._stands is not None and self.place is None:
            raise InputError(
                f"{options.root.location} has no store, and the option server is for what is not shipped to one yet",
                hint="Leave it out: a directory without a store has everything in its files",
            )

    def _open_stores(self, place: TopicLocation, max_message_bytes: int) -> tuple[Catalogs, HistoryOf]:
        objects, metadata = self._opened.enter_context(place.open_stores(read_only=True))
        check: Callable[[], None] = lambda: None  # noqa: E731
        if place.is_shared:
            check = StoreBinding(objects, metadata, place.metadata_root, SystemClock(), read_only=True).check

        def history_of(catalog: Catalog) -> History:
            settings = FetchSettings.of(objects.settings, max_message_bytes)
            return History(catalog, objects, place.fetchers, settings=settings)

        return Catalogs(metadata, place.metadata_root, check), history_of

    def __enter__(self) -> OpenTopics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    # Topics and their logs

    def refresh(self) -> None:
        """From now on topics have the partitions that they have now, and end where they end now."""
        self._layouts.clear()
        if self._stands is not None:
            self._stands.forget()

    def topics(self) -> list[str]:
        """The topics, sorted; a pattern may match none, or others later."""
        if self._options.topics is not None:
            return sorted(self._options.topics)
        pattern = re.compile(self._options.pattern or "")
        return sorted(name for name in self._views.names() if pattern.fullmatch(name))

    def names(self) -> list[str]:
        """The names of the logs of the topics, in the order of topics and partitions."""
        found = [partition for topic in self.topics() for partition in self.partitions(topic)]
        for partition in found:
            known = self._partitions.setdefault(partition.log, partition)
            if known != partition:
                raise InputError(f"{partition.log} is read twice: by its name, and as a partition of {known.topic}")
        return [partition.log for partition in found]

    def partitions(self, topic: str) -> list[Partition]:
        """The partitions of a topic that are read; one without partitions is its own partition 0."""
        layout = self._layout(topic)
        count = 1 if layout is None else layout.count
        numbers = self._options.assigned.get(topic, range(count))
        if numbers[-1] >= count:
            raise InputError(f"assign names partition {numbers[-1]} of {topic}, which has {_numbers_text(count)}")
        return [Partition(topic, number, self.log_name(topic, number)) for number in numbers]

    def partition(self, log: str) -> Partition:
        return self._partitions.get(log) or Partition(log, 0, log)

    def log_name(self, topic: str, number: int) -> str:
        """The name of the log of a partition, also of one that there is not."""
        layout, name = self._layout(topic), parse_topic_name(topic)
        if layout is None and number == 0:
            return topic
        log = str(name.log_of(number, layout or PartitionLayout(count=number + 1)))
        self._partitions.setdefault(log, Partition(topic, number, log))
        return log

    def _layout(self, topic: str) -> PartitionLayout | None:
        if topic not in self._layouts:
            self._layouts[topic] = self._views.layout(parse_topic_name(topic))
        return self._layouts[topic]

    def check_places(self) -> None:
        """A place for a partition that is not read is a slip, and so is one offset for several partitions."""
        for positions in (self._options.starting, self._options.ending):
            for topic, places in {} if positions is None else positions.topics.items():
                self._check_places(topic, places)

    def _check_places(self, topic: str, places: Mapping[int, object]) -> None:
        read = {partition.number for partition in self.partitions(topic)}
        wrong = next((number for number in places if number not in (ALL_PARTITIONS, *read)), None)
        if wrong is not None:
            raise InputError(
                f"offsets name partition {wrong} of {topic}, which is not read",
                hint=f"Partitions that are read: {', '.join(map(str, sorted(read)))}",
            )
        given = self._options.starting, self._options.ending
        offsets = [one.offsets.get(topic, {}).get(ALL_PARTITIONS) for one in given if one is not None]
        if len(read) > 1 and any(isinstance(offset, int) for offset in offsets):
            raise InputError(
                f"{topic} has partitions, and one offset is given for all of them",
                hint=f'Name the partitions: {{"{topic}": {{"0": 100, "1": -2}}}}',
            )

    def check_named(self) -> None:
        """NotFoundError for a topic that is named and not there; InputError for a partition of it. Patterns may match
        later."""
        self.check_places()
        for topic in self._options.topics or ():
            if not self._views.exists(parse_topic_name(topic)):
                self.log(topic)  # says that there is none of this name
            self.partitions(topic)

    # What owners have, with the option `server`

    def _owner_tail(self, name: str) -> OwnerTail | None:
        log = self.log(name)
        hot = log.hot if isinstance(log, TieredView) else None
        return hot if isinstance(hot, OwnerTail) else None

    def epochs(self, names: Iterable[str]) -> dict[str, int]:
        """The epochs under which the ends of logs are known; without a server none are."""
        if self._stands is None:
            return {}
        found: dict[str, int] = {}
        for name in names:
            with suppress(NotFoundError):
                if (tail := self._owner_tail(name)) is not None:
                    found[name] = tail.stand.epoch
        return found

    def kept_until(self, name: str, offset: int, epoch: int | None) -> int:
        """How far what was learnt of a log under an epoch, up to an offset, is still in it."""
        if epoch is None or (tail := self._owner_tail(name)) is None or tail.stand.epoch == epoch:
            return offset
        return min(offset, tail.kept_until(epoch))

    def log(self, name: str) -> TieredView | LogView:
        """Where the messages of a log are read from; NotFoundError when there is no such topic or partition."""
        known = self._logs.get(name)
        if known is None:
            known = self._look(name)
            if self._is_settled(name):
                self._logs[name] = known
        return known

    def _is_settled(self, name: str) -> bool:
        """A partition that nobody has used may come to be here, and then is read from the files as well."""
        return self.partition(name).topic == name or self._views.exists(parse_topic_name(name))

    def _look(self, name: str) -> TieredView | LogView:
        partition = self.partition(name)
        layout = self._layout(partition.topic)
        if layout is not None and self.log_name(partition.topic, partition.number) != name:
            logs = ", ".join(one.log for one in self.partitions(partition.topic))
            raise NotSupportedError(f"{name} has partitions, and no log of its own", hint=f"They are {logs}")
        is_partition = layout is not None and partition.number < layout.count and not layout.is_deleted
        try:
            found = self._views.look(parse_topic_name(name), is_partition=is_partition)
        except NotFoundError as error:
            raise NotFoundError(f"{error.message} in {self._options.root.location}", hint=error.hint) from error
        if found is None:
            raise InputError(f"{name} keeps nothing: it was made with reliable=False, so there is nothing to read")
        if self._stands is not None:
            tail = OwnerTail(self._stands, partition.topic, partition.number, TIMESTAMP_FIELD)
            return self._views.stored(parse_topic_name(name), tail)
        return found

    def log_id(self, topic: str) -> str | None:
        """Which log has this name: one that is made in its place has another id. None when that is not known (yet)."""
        log = self.log(topic)
        if isinstance(log, TieredView):
            owner = log.catalog.owner()
            return None if owner is None else owner[0].log_id
        with suppress(FileNotFoundError):
            return known_log_id(unbound(log.files), log.directory)
        return None

    def check_start(self, topic: str, start: int) -> None:
        """A read that is to begin where the topic has not come to yet would give nothing and say nothing."""
        latest = self.log(topic).next_offset
        if start > latest:
            self.lost(f"{topic}: it ends at offset {latest}, and was to be read from {start} on")

    def readable_range(self, topic: str, start: int, stop: int) -> tuple[int, int]:
        """The same range if all of it is there; see the head of the module for what happens otherwise."""
        log = self.log(topic)
        earliest, latest = log.start_offset, log.next_offset
        if start < earliest < stop or (start < stop <= earliest):
            self.lost(
                f"{topic}: offsets {start} to {min(earliest, stop) - 1} are no longer kept; {earliest} is the oldest"
            )
        if start < stop and stop > latest:
            self.lost(f"{topic}: it ends at offset {latest}, and {start} up to {stop} were to be read")
        start, stop = max(start, earliest), min(stop, latest)
        return start, max(start, stop)

    def lost(self, problem: str) -> None:
        """Something that was to be read is not there: an error, or a warning where that is allowed."""
        if self._options.fail_on_data_loss:
            raise OffsetOutOfRangeError(problem, operation="read", hint="failOnDataLoss=false reads what is there")
        _logger.warning("%s; what is there is read (failOnDataLoss=false)", problem)

    def plan(self, ranges: Mapping[str, tuple[int, int]]) -> list[ReadPart]:
        plans = [self._plan_topic(topic, *ends) for topic, ends in sorted(ranges.items()) if ends[0] < ends[1]]
        return plan_parts(plans, self._limits)

    def plan_tasks(self, ranges: Mapping[str, tuple[int, int]]) -> list[tuple[ReadPart, ...]]:
        """The same parts, as they go to tasks: small ones of very many topics together."""
        return packed(self.plan(ranges), self._limits)

    @property
    def _limits(self) -> Limits:
        options = self._options
        return Limits(options.max_partition_bytes, options.max_records_per_partition, options.min_partitions)

    def _plan_topic(self, topic: str, start: int, stop: int) -> TopicPlan:
        log = self.log(topic)
        if isinstance(log, LogView):
            return TopicPlan(self.partition(topic), start, stop, catalog=None, view=log, cold_end=0)
        # Before the catalog: what is pruned between the two looks is in the catalog by then.
        hot = log.hot
        if isinstance(hot, OwnerTail):
            return self._plan_with_owner(topic, start, stop, log.catalog, hot)
        view = hot if isinstance(hot, LogView) else None
        catalog = log.catalog
        cold_end = catalog.next_offset() if view is not None else stop
        return TopicPlan(self.partition(topic), start, stop, catalog=catalog, view=view, cold_end=cold_end)

    def _plan_with_owner(self, topic: str, start: int, stop: int, catalog: Catalog, tail: OwnerTail) -> TopicPlan:
        stand, cold_end = tail.stand, catalog.next_offset()
        if max(start, cold_end) < min(stop, stand.hot_start_offset):
            raise RetryError(
                f"{topic}: its owner begins at {stand.hot_start_offset}, and the catalog ends at {cold_end}",
                operation="read",
                hint="The copy of the catalog in the store is behind: wait, or name the metadata store as metadata",
            )
        unshipped = max(1, stand.next_offset - stand.shipped_offset)
        size = (stand.unshipped_bytes or 0) / unshipped * max(0, stop - max(start, cold_end))
        owner = OwnerPart(tail.place, stand.epoch, size)
        name = self.partition(topic)
        return TopicPlan(name, start, stop, catalog=catalog, view=None, cold_end=cold_end, owner=owner)

    def bytes_between(self, topic: str, start: int, stop: int) -> float:
        """About how many bytes a range has."""
        return self._plan_topic(topic, start, stop).bytes if start < stop else 0.0

    def described(self, ranges: Mapping[str, tuple[int, int]]) -> list[PlannedRead]:
        """What is read with these ranges, in the order of topics and partitions."""
        return [self._described(self.partition(log), *ends) for log, ends in ranges.items()]

    def _described(self, name: Partition, start: int, stop: int) -> PlannedRead:
        subject = name.topic if self._layout(name.topic) is None else f"{name.topic} partition {name.number}"
        size = self.bytes_between(name.log, start, stop)
        return PlannedRead(subject=subject, unit="offset", start=start, stop=stop, bytes=size)

    def offset_behind(self, topic: str, start: int, stop: int, share: float) -> int:
        """The offset after about this share of a range's bytes, and after at least one message."""
        if start >= stop:
            return stop
        plan = self._plan_topic(topic, start, stop)
        return min(stop, max(start + 1, plan.offset_behind(share)))


def _numbers_text(count: int) -> str:
    return "partition 0 alone" if count == 1 else f"partitions 0 to {count - 1}"
