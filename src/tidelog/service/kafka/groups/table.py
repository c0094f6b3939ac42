"""The consumer groups of a broker, of both protocols, and their timers.

Invariants
- Everything here runs in the thread of the event loop.
- A group id names one group, of one protocol. A group changes its protocol only while it has no members: a member of
  the other protocol is refused until then.
- A group is kept while it has members, or a request waits for it, or it has committed offsets. Nothing stays of
  any other one: neither a timer nor an entry.
- Each group has one timer at most, which is never later than its next deadline.
- A request that waits is answered once. One whose connection was closed waits no more: `abandon`.
- What a broker needs to go on with a group is kept before anybody is answered who might act on it. So a broker that was
  killed goes on with members of the last generation that a member has heard of, or has none of them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, Protocol

from tidelog.errors import DataError, TidelogError
from tidelog.service.kafka.codec import decode_data
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.classic import (
    ClassicGroup,
    GroupSettings,
    GroupState,
    JoinResult,
    Reply,
    SyncResult,
)
from tidelog.service.kafka.groups.consumer import ConsumerGroup, ConsumerGroupSettings
from tidelog.service.kafka.groups.shared_writes import SharedWrites
from tidelog.service.kafka.groups.store import GroupRecord
from tidelog.service.kafka.groups.topic_pattern import topic_pattern
from tidelog.service.kafka.primitives import ProtocolError
from tidelog.service.kafka.requests import known_name, listed_name
from tidelog.topics.names import TopicName, parse_topic_name

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
_logger = logging.getLogger("tidelog.kafka")
Group = ClassicGroup | ConsumerGroup
Parked = asyncio.Future[JoinResult | SyncResult]
"""A request that waits, as the token of its group."""


class TopicFacts(Protocol):
    """What groups need to know of a topic."""

    @property
    def name(self) -> TopicName: ...
    @property
    def id(self) -> bytes: ...
    @property
    def count(self) -> int: ...


class Topics(Protocol):
    """The topics of the broker. `on_change`: some came, went, or got more partitions."""

    def topics(self) -> Iterable[TopicFacts]: ...
    def find(self, name: TopicName) -> TopicFacts | None: ...
    def find_id(self, topic_id: bytes) -> TopicFacts | None: ...
    def on_change(self, callback: Callable[[], None]) -> None: ...


class CoordinatorSettings(NamedTuple):
    """The settings of the group coordinator; Kafka's names are in the docs."""

    classic: GroupSettings = GroupSettings()
    consumer: ConsumerGroupSettings = ConsumerGroupSettings()
    offsets_retention_seconds: float = 7 * 24 * 3600.0
    """Offsets of a group are deleted when it has had no members for so long."""
    retention_check_seconds: float = 600.0
    max_metadata_bytes: int = 4096
    """The longest text that a client may commit with an offset."""


class RecordStore(Protocol):
    """Where groups are kept (`store.py`). Its methods wait for disks and stores."""

    def load(self) -> dict[str, GroupRecord]: ...
    def store(self, changes: Mapping[str, GroupRecord | None]) -> dict[str, TidelogError]: ...


class _Entry:
    """A group, its timer, since when it has no members, and what is kept of it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.timer: asyncio.TimerHandle | None = None
        self.due_ms = 0
        self.emptied_us: int | None = None
        self.protocol_type = ""
        """The last one that it had: a group without members keeps it."""
        self.mark: object = None
        self.wanted: GroupRecord | None = None
        self.stored: GroupRecord | None = None
        self.held: list[Reply] = []
        """Answers that wait until what is wanted is stored."""
        self.writer: asyncio.Task[None] | None = None


class GroupTable:
    """All groups. `has_offsets` says whether a group has committed any."""

    def __init__(
        self,
        topics: Topics,
        settings: CoordinatorSettings,
        records: RecordStore,
        has_offsets: Callable[[str], bool],
        clock_ms: Callable[[], int],
        now_us: Callable[[], int],
    ) -> None:
        self._topics = topics
        self._settings = settings
        self._records: SharedWrites[str, GroupRecord | None] = SharedWrites(records.store)
        self._has_offsets = has_offsets
        self._clock_ms = clock_ms
        self._now_us = now_us
        self._entries: dict[str, _Entry] = {}
        self._is_news = False
        self._is_closed = False
        self._writers: set[asyncio.Task[None]] = set()

    # Finding

    def find(self, group_id: str) -> Group | None:
        """The group, if it has members or had some."""
        entry = self._entries.get(group_id)
        return None if entry is None else entry.group

    def ids(self) -> Iterator[str]:
        return iter(self._entries)

    def protocol_type(self, group_id: str) -> str:
        """`consumer` as a rule; empty for a group that only has offsets."""
        entry = self._entries.get(group_id)
        return "" if entry is None else entry.protocol_type

    def emptied_us(self, group_id: str) -> int | None:
        """Since when it has had no members; None while it has some, and when that is not known."""
        entry = self._entries.get(group_id)
        return None if entry is None else entry.emptied_us

    def has_members(self, group_id: str) -> bool:
        """Members, or requests that wait."""
        entry = self._entries.get(group_id)
        return entry is not None and not _is_empty(entry.group)

    def classic(self, group_id: str, *, is_new_member: bool) -> ClassicGroup | ErrorCode:
        """The group as one of the classic protocol, which a new member may make it."""
        entry = self._entries.get(group_id)
        if entry is not None and isinstance(entry.group, ClassicGroup):
            return entry.group
        if entry is not None and not _is_empty(entry.group):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if self._is_closed or not is_new_member:
            return ErrorCode.NOT_COORDINATOR if self._is_closed else ErrorCode.UNKNOWN_MEMBER_ID
        generation = entry.group.epoch if entry is not None and isinstance(entry.group, ConsumerGroup) else 0
        made = ClassicGroup(group_id, _new_member_id, self._settings.classic, generation=generation)
        self._replace(group_id, made)
        return made

    def consumer(self, group_id: str, *, is_new_member: bool) -> ConsumerGroup | ErrorCode:
        """The group as one of the new protocol, which a new member may make it."""
        entry = self._entries.get(group_id)
        if entry is not None and isinstance(entry.group, ConsumerGroup):
            return entry.group
        if entry is not None and not _is_empty(entry.group):
            return ErrorCode.GROUP_ID_NOT_FOUND
        if self._is_closed or not is_new_member:  # a member of a group that was lost joins again
            return ErrorCode.NOT_COORDINATOR if self._is_closed else ErrorCode.UNKNOWN_MEMBER_ID
        epoch = entry.group.generation if entry is not None and isinstance(entry.group, ClassicGroup) else 0
        made = ConsumerGroup(group_id, _new_id, self._settings.consumer, match=_matching, epoch=epoch)
        made.topics = self._counts()
        self._replace(group_id, made)
        return made

    def _replace(self, group_id: str, group: Group) -> None:
        old = self._entries.get(group_id)
        entry = self._entries[group_id] = _Entry(group)
        if old is not None:
            entry.wanted = entry.stored = old.wanted
            if old.timer is not None:
                old.timer.cancel()

    # Waiting

    def deliver(self, replies: Iterable[Reply]) -> None:
        """Answers requests that waited; those whose connection was closed are gone."""
        for token, result in replies:
            assert isinstance(token, asyncio.Future)
            if not token.done():
                token.set_result(result)

    async def answer(self, group_id: str, group: ClassicGroup, parked: Parked) -> JoinResult | SyncResult:
        """What a request is answered with in the end."""
        try:
            return await parked
        except asyncio.CancelledError:
            group.abandon(self._clock_ms(), parked)
            self.changed(group_id)
            raise

    # Time

    def changed(self, group_id: str, replies: Iterable[Reply] = ()) -> asyncio.Task[None] | None:
        """A request has changed a group: its timer is set again, and it is forgotten when nothing is left of it.

        Replies are delivered once the group is kept as it is now. Returns what keeps it, if there is news.
        """
        entry = self._entries.get(group_id)
        if entry is None:
            self.deliver(replies)
            return None
        self._note(group_id, entry)
        if self._entries.get(group_id) is entry:
            self._arm(group_id, entry)
        self._keep(group_id, entry, replies)
        return entry.writer

    def kept_alive(self, group_id: str) -> None:
        """A request has only moved a deadline back: the timer that is there comes early, and finds that."""
        entry = self._entries.get(group_id)
        if entry is not None and entry.timer is None:
            self._arm(group_id, entry)

    def _note(self, group_id: str, entry: _Entry) -> None:
        group = entry.group
        if not _is_empty(group):
            entry.emptied_us = None
            entry.protocol_type = CONSUMER if isinstance(group, ConsumerGroup) else group.protocol_type or ""
        elif not self._has_offsets(group_id):
            self._drop(group_id, entry)
        elif entry.emptied_us is None:
            entry.emptied_us = self._now_us()

    def _drop(self, group_id: str, entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        del self._entries[group_id]

    def _arm(self, group_id: str, entry: _Entry) -> None:
        due_ms = entry.group.next_deadline_ms
        if self._is_closed or due_ms is None or (entry.timer is not None and entry.due_ms <= due_ms):
            return
        if entry.timer is not None:
            entry.timer.cancel()
        entry.due_ms = due_ms
        loop = asyncio.get_running_loop()
        delay_seconds = max(0, due_ms - self._clock_ms()) / 1000
        entry.timer = loop.call_later(delay_seconds, self._tick, group_id, entry)

    def _tick(self, group_id: str, entry: _Entry) -> None:
        entry.timer = None
        now_ms, due_ms = self._clock_ms(), entry.group.next_deadline_ms
        if due_ms is not None and due_ms <= now_ms:
            if isinstance(entry.group, ClassicGroup):
                self.changed(group_id, entry.group.tick(now_ms))
                return
            entry.group.tick(now_ms)
        self.changed(group_id)

    # What is kept

    def _keep(self, group_id: str, entry: _Entry, replies: Iterable[Reply]) -> None:
        if isinstance(entry.group, ClassicGroup) and entry.group.state is GroupState.DEAD:
            self.deliver(replies)
            return
        record = self._record(group_id, entry)
        if record == entry.wanted and entry.writer is None:
            self.deliver(replies)
            return
        entry.wanted = record
        entry.held += replies
        if entry.writer is None:
            entry.writer = asyncio.get_running_loop().create_task(self._persist(group_id, entry))
            self._writers.add(entry.writer)
            entry.writer.add_done_callback(self._writers.discard)

    def _record(self, group_id: str, entry: _Entry) -> GroupRecord | None:
        group = entry.group
        if self._entries.get(group_id) is not entry:
            return None
        if isinstance(group, ClassicGroup):
            if group.generation == 0:
                return None  # nobody was told anything yet
            return GroupRecord(CLASSIC, entry.protocol_type, entry.emptied_us, group.snapshot())
        mark = group.fingerprint(), entry.emptied_us
        if mark == entry.mark:
            return entry.wanted
        entry.mark = mark
        return GroupRecord(CONSUMER, entry.protocol_type, entry.emptied_us, group.snapshot())

    async def _persist(self, group_id: str, entry: _Entry) -> None:
        try:
            while entry.held or entry.wanted != entry.stored:
                record, held, entry.held = entry.wanted, entry.held, []
                if record != entry.stored:
                    failed = await self._records.write({group_id: record})
                    for error in failed.values():
                        _logger.warning("the members of group %s are not kept: %s", group_id, error)
                    entry.stored = record
                self.deliver(held)
        finally:
            entry.writer = None

    def restore(self, records: Mapping[str, GroupRecord]) -> None:
        """Goes on with the groups that an earlier broker of this node has kept."""
        for group_id, record in records.items():
            group: Group
            if record.protocol == CLASSIC:
                group = ClassicGroup(group_id, _new_member_id, self._settings.classic)
            else:
                group = ConsumerGroup(group_id, _new_id, self._settings.consumer, match=_matching)
            entry = self._entries[group_id] = _Entry(group)
            entry.protocol_type, entry.emptied_us = record.protocol_type, record.emptied_us
            entry.wanted = entry.stored = record
            try:
                group.restore(self._clock_ms(), record.snapshot)
            except DataError as error:
                _logger.warning("the members of group %s join again: %s", group_id, error)
            if isinstance(group, ConsumerGroup):
                group.set_topics(self._counts())
            self.changed(group_id)

    async def finish(self) -> None:
        """Returns when everything is kept."""
        while self._writers:
            await asyncio.wait(self._writers)

    # Topics

    def topics_changed(self) -> None:
        """Subscriptions are resolved again, once for all changes of this moment."""
        if not self._is_news:
            self._is_news = True
            asyncio.get_running_loop().call_soon(self._resolve)

    def _resolve(self) -> None:
        self._is_news = False
        counts = self._counts()
        for entry in self._entries.values():
            if isinstance(entry.group, ConsumerGroup):
                entry.group.set_topics(counts)

    def _counts(self) -> dict[str, int]:
        return {str(one.name): one.count for one in self._topics.topics()}

    # Rules

    def commit_error(
        self, group_id: str, member_id: str, generation: int, instance_id: str | None, *, version: int
    ) -> ErrorCode:
        """Whether an OffsetCommit of this version is accepted; a member of a classic group that commits is alive."""
        group = self.find(group_id)
        if group is None:
            if generation < 0:
                return ErrorCode.NONE
            return ErrorCode.ILLEGAL_GENERATION if version < 9 else ErrorCode.UNKNOWN_MEMBER_ID
        if isinstance(group, ClassicGroup):
            return group.commit(self._clock_ms(), member_id, generation, instance_id)
        error = group.commit_error(member_id, generation)
        if version < 9 and member_id in group.members:
            return ErrorCode.UNSUPPORTED_VERSION
        return error

    def transaction_error(self, group_id: str, member_id: str, generation: int, instance_id: str | None) -> ErrorCode:
        """Whether offsets may be committed within a transaction. A producer need not say who consumes."""
        if generation < 0 and not member_id and instance_id is None:
            return ErrorCode.NONE
        group = self.find(group_id)
        if group is None:
            return ErrorCode.NONE if generation < 0 else ErrorCode.ILLEGAL_GENERATION
        if isinstance(group, ClassicGroup):
            error = group.commit_error(member_id, generation, instance_id)
            return ErrorCode.NONE if error is ErrorCode.REBALANCE_IN_PROGRESS else error
        return group.commit_error(member_id, generation)

    def subscribed(self, group_id: str) -> frozenset[str] | None:
        """The topics that a group subscribes to; None when that is not known: its protocol is another, or it joins."""
        group = self.find(group_id)
        if group is None or _is_empty(group):
            return frozenset()
        if isinstance(group, ConsumerGroup):
            return group.subscribed_topics()
        if group.protocol_type != CONSUMER or group.state is not GroupState.STABLE:
            return None
        return _subscribed(group)

    def delete(self, group_id: str) -> ErrorCode:
        """Forgets a group without members."""
        entry = self._entries.get(group_id)
        if entry is None:
            return ErrorCode.NONE if self._has_offsets(group_id) else ErrorCode.GROUP_ID_NOT_FOUND
        if not _is_empty(entry.group):
            return ErrorCode.NON_EMPTY_GROUP
        self._drop(group_id, entry)
        self._keep(group_id, entry, ())
        return ErrorCode.NONE

    def forget(self, groups: Iterable[str]) -> None:
        """Another node coordinates these groups from now on: who waits is answered, and nothing is kept of them."""
        for group_id in groups:
            entry = self._entries.pop(group_id, None)
            if entry is None:
                continue
            if entry.timer is not None:
                entry.timer.cancel()
            if isinstance(entry.group, ClassicGroup):
                self.deliver(entry.group.close())

    def close(self) -> None:
        """The broker ends: everybody who waits is answered, and nobody waits from here on."""
        self._is_closed = True
        for entry in self._entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
            if isinstance(entry.group, ClassicGroup):
                self.deliver(entry.group.close())


def _is_empty(group: Group) -> bool:
    return group.is_empty if isinstance(group, ClassicGroup) else not group.members


def _subscribed(group: ClassicGroup) -> frozenset[str] | None:
    """From the metadata of the standard consumers; None when somebody has sent something else."""
    found: set[str] = set()
    for member in group.members():
        try:
            names = decode_data("consumer_protocol_subscription", member.metadata).topics
        except ProtocolError:
            return None
        found.update(str(name) for sent in names if (name := known_name(sent)) is not None)
    return frozenset(found)


def _new_member_id(client: str) -> str:
    return f"{client}-{uuid.uuid4()}"


def _new_id() -> str:
    return str(uuid.uuid4())


def _matching(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """The topics that a pattern matches, by the names that Kafka's tools show and by those with a slash."""
    matches = topic_pattern(pattern).matches
    return frozenset(name for name in names if matches(listed_name(parse_topic_name(name))) or matches(name))
