"""The offsets that consumer groups of Kafka's protocol have committed, of all topics of a log directory.

Invariants
- An offset is kept under the log of its partition, as the cursors of subscriptions are: it moves with the log, is
  changed under the owner's epoch, and is deleted with the topic.
- `store` returns when the offsets are durable. Those of one call are written in one transaction where the metadata
  store has transactions (`write_cursors`).
- No offset is written to a topic that is being deleted: a topic of the same name would inherit it.
- Groups never hold back retention.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from tidelog.cold.cursor import Cursor
from tidelog.errors import DataError, NotFoundError, TidelogError
from tidelog.store.keys import group_cursor
from tidelog.store.scheduler import in_parallel
from tidelog.topics.base import BaseTopic
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.subscription.cursors import CursorWrite, write_cursors

if TYPE_CHECKING:
    from tidelog.topics.directory import LogDirectory

GROUP_KIND = "group"
_READ_AT_ONCE = 16


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

        It opens no topic. With a store it asks once for each partition.
        """
        topics = self._directory.topics() if topic is None else [topic]
        found = in_parallel(self._load_topic, topics, _READ_AT_ONCE, "tidelog-offsets")
        return dict(itertools.chain.from_iterable(one.items() for one in found))

    def _load_topic(self, topic: str) -> dict[OffsetKey, GroupOffset | DataError]:
        found: dict[OffsetKey, GroupOffset | DataError] = {}
        for partition, log_name in enumerate(self._directory.partition_logs(topic)):
            for group, cursor in self._directory._group_cursors(parse_topic_name(log_name)).items():
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
    cursor = None
    if offset is not None:
        cursor = Cursor(
            offset=offset.offset,
            epoch=0,
            moved_us=0,
            kind=GROUP_KIND,
            leader_epoch=offset.leader_epoch,
            metadata=offset.metadata,
        )
    return CursorWrite(log._subscriptions.cursors, group_cursor(key.group), cursor)
