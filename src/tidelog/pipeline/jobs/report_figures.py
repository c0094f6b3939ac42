"""What a report is made of: where every topic stands, from descriptors and from the files on this disk.

Nothing is read but the catalog and the ends of files, so it costs a little a descriptor and nothing a message.

Invariants
- A topic that cannot be looked at is reported with its problem; the others are reported all the same.
- A message is counted once over time: in an object while the catalog has it, else in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tidelog.clock import to_microseconds
from tidelog.errors import TidelogError
from tidelog.log.reader import FilePart
from tidelog.log.view import LogView
from tidelog.pipeline.root import Root
from tidelog.tier.catalog import Catalog
from tidelog.topics.extension import group_of
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import parse_topic_name
from tidelog.topics.storage import LogDirectory
from tidelog.topics.topic import Topic


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
    """How far a subscription is behind."""

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


def topic_names(root: Root) -> list[str]:
    """All topics there."""
    with root.open() as log:
        return log.topics()


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
    topic, parsed = log.topic(name), parse_topic_name(name)
    catalog = None if log.tier is None else log.tier.catalog(parsed.namespace, parsed.name)
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
    directory = log.topic_directory(topic.name)
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
