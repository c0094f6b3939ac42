"""The offsets that consumer groups of Kafka's protocol have committed, of all topics of a log directory.

Invariants
- An offset is kept under the log of its partition, as the cursors of subscriptions are: it moves with the log, is
  changed under the owner's epoch, and is deleted with the topic.
- `store` returns when the offsets are durable. Those of one call are written in one transaction where the metadata
  store has transactions (`write_cursors`).
- No offset is written to a topic that is being deleted: a topic of the same name would inherit it.
- Groups never hold back retention.
- Where several nodes share the groups, the coordinator of a group need not own the partitions: it writes under a check
  of its own (`CoordinatedOffsets`), and what it writes is as good as what an owner writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from tidelog.cold.cursor import Cursor
from tidelog.errors import ConflictError, DataError, LockedError, NotFoundError, TidelogError
from tidelog.store.keys import group_cursor
from tidelog.store.metadata.base import Check, Delete, Put
from tidelog.store.scheduler import in_parallel
from tidelog.topics.base import BaseTopic
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.subscription.cursors import CursorWrite, write_cursors

if TYPE_CHECKING:
    from tidelog.topics.directory import LogDirectory

GROUP_KIND = "group"
_READ_AT_ONCE = 16
_WRITES_AT_ONCE = 100  # etcd takes 128 operations


class OffsetKey(NamedTuple):
    """Whose offset, and of what; `topic` is `namespace/name`."""

    group: str
    topic: str
    partition: int


class GroupOffset(NamedTuple):
    """What a group has committed: the offset of the next message, and what the client said with it."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    committed_us: int = 0


class GroupOffsets:
    """All offsets of a directory. Threads may share it."""

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        self.writing = Lock()
        """Held while offsets are written, and while a topic is taken out of the directory to be deleted."""

    def load(self, topic: str | None = None) -> dict[OffsetKey, GroupOffset | DataError]:
        """The offsets of one topic or of all; an error in place of one that cannot be understood.

        It opens no topic. With etcd it asks once for some dozens of partitions, with another store once for each.
        """
        topics = self._directory.topics() if topic is None else [topic]
        found = in_parallel(self._load_topic, topics, _READ_AT_ONCE, "tidelog-offsets")
        return dict(itertools.chain.from_iterable(one.items() for one in found))

    def _load_topic(self, topic: str) -> dict[OffsetKey, GroupOffset | DataError]:
        found: dict[OffsetKey, GroupOffset | DataError] = {}
        logs = [parse_topic_name(log_name) for log_name in self._directory.partition_logs(topic)]
        for partition, cursors in enumerate(self._directory._group_cursors(logs)):
            for group, cursor in cursors.items():
                key = OffsetKey(group, topic, partition)
                found[key] = cursor if isinstance(cursor, DataError) else _offset_of(cursor)
        return found

    def store(self, changes: Mapping[OffsetKey, GroupOffset | None]) -> dict[OffsetKey, TidelogError]:
        """Stores offsets durably, or deletes them (None); returns those that failed, and why.

        A topic that does not exist is not created: NotFoundError.
        """
        failed: dict[OffsetKey, TidelogError] = {}
        logs: dict[OffsetKey, BaseTopic] = {}
        for key in changes:
            try:
                group_cursor(key.group)
                logs[key] = self._log_of(key.topic, key.partition)
            except TidelogError as error:
                failed[key] = error
        with self.writing:
            for key, log in list(logs.items()):
                if self._directory._topics.get(log._name) is not log:
                    failed[key] = NotFoundError(f"the topic {key.topic} was deleted")
                    del logs[key]
            writes = [_write(log, key, changes[key]) for key, log in logs.items()]
            errors = write_cursors(writes)
        return failed | {key: error for key, error in zip(logs, errors, strict=True) if error is not None}

    def _log_of(self, topic: str, partition: int) -> BaseTopic:
        """The log of a partition, opened if it is not."""
        directory = self._directory
        name = parse_topic_name(topic)
        if name not in directory._topics and name not in directory._partitioned:
            with directory._guard:  # between the question and the opening nobody deletes it
                self._require(name)
                return directory.topic(topic).partition(partition)
        return directory.topic(topic).partition(partition)

    def _require(self, name: TopicName) -> None:
        if not self._directory.has_topic(str(name)):
            raise NotFoundError(f"there is no topic {name}", hint="`tidelog topic list` shows them")


def _offset_of(cursor: Cursor) -> GroupOffset:
    return GroupOffset(cursor.offset, cursor.leader_epoch, cursor.metadata, cursor.moved_us)


def _write(log: BaseTopic, key: OffsetKey, offset: GroupOffset | None) -> CursorWrite:
    assert log._subscriptions is not None
    return CursorWrite(log._subscriptions.cursors, group_cursor(key.group), _cursor(offset))


def _cursor(offset: GroupOffset | None) -> Cursor | None:
    if offset is None:
        return None
    return Cursor(
        offset=offset.offset,
        epoch=0,
        moved_us=0,
        kind=GROUP_KIND,
        leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
    )


class CoordinatedOffsets:
    """The same offsets, written by the coordinator of a group, for partitions of any owner. Threads may share it.

    `check_of` returns what a write for a group checks, and raises where this node is not its coordinator; `conflict`
    says what it means that this check has failed; `count_of` returns how many partitions a topic has, 0 for none.
    """

    def __init__(
        self,
        directory: LogDirectory,
        check_of: Callable[[str], Check],
        conflict: Callable[[str, ConflictError], TidelogError],
        count_of: Callable[[str], int],
    ) -> None:
        self._directory = directory
        self._count_of = count_of
        self._check_of = check_of
        self._conflict = conflict
        self._layouts: dict[tuple[str, int], TopicName] = {}

    def load(self, topic: str | None = None) -> dict[OffsetKey, GroupOffset | DataError]:
        """As `GroupOffsets.load`."""
        return self._directory._group_offsets.load(topic)

    def topics_changed(self) -> None:
        """One that was created again may have its messages in other logs."""
        self._layouts = {}

    def store(self, changes: Mapping[OffsetKey, GroupOffset | None]) -> dict[OffsetKey, TidelogError]:
        """As `GroupOffsets.store`, in one commit for as many of a group as one takes. No topic is opened."""
        failed: dict[OffsetKey, TidelogError] = {}
        by_group: dict[str, list[OffsetKey]] = {}
        for key in changes:
            by_group.setdefault(key.group, []).append(key)
        for keys in by_group.values():
            for some in _batches(keys):
                try:
                    self._commit(some, changes)
                except TidelogError as error:
                    failed |= dict.fromkeys(some, error)
        return failed

    def _commit(self, keys: Sequence[OffsetKey], changes: Mapping[OffsetKey, GroupOffset | None]) -> None:
        check = self._check_of(keys[0].group)
        metadata, _ = self._directory._shared_metadata()
        writes = [self._write(key, changes[key]) for key in keys]
        try:
            metadata.commit([check], writes)
        except ConflictError as error:
            raise self._conflict(keys[0].group, error) from error

    def _write(self, key: OffsetKey, offset: GroupOffset | None) -> Put | Delete:
        place = key.topic, key.partition
        log_name = self._layouts.get(place)
        if log_name is None:
            count, names = self._count_of(key.topic), self._directory.partition_logs(key.topic)
            if not 0 <= key.partition < count:
                raise NotFoundError(f"{key.topic} has no partition {key.partition}")
            if len(names) < count:
                raise LockedError(f"the partitions of {key.topic} are being made", hint="Try again in a moment")
            log_name = self._layouts[place] = parse_topic_name(names[key.partition])
        return self._directory._group_cursor_write(log_name, group_cursor(key.group), _cursor(offset))


def _batches(keys: Sequence[OffsetKey]) -> Iterator[Sequence[OffsetKey]]:
    for first in range(0, len(keys), _WRITES_AT_ONCE):
        yield keys[first : first + _WRITES_AT_ONCE]
