"""The offsets that consumer groups have committed: in memory for answers, and in the store before a commit is answered.

Invariants
- Everything here runs in the thread of the event loop, but for the store, which runs in worker threads.
- What is in memory is in the store. A commit is seen by nobody before it is durable.
- Commits that arrive while others are being written share the next write (`SharedWrites`).
- A write that has begun is finished, whatever becomes of the connection that asked for it.
- Offsets of a topic end with the topic. One that was created again under the same name begins without any.
- Offsets that a transaction would commit are pending, and are seen as that alone, until it ends.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from tidelog.errors import DataError, InputError, TidelogError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.shared_writes import SharedWrites
from tidelog.service.kafka.groups.table import Topics
from tidelog.service.kafka.slots import Slots
from tidelog.store.keys import group_cursor
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.group_offsets import GroupOffset, OffsetKey

TopicPartition = tuple[str, int]
"""A topic as `namespace/name`, and the number of a partition."""
Changes = Mapping[OffsetKey, GroupOffset | None]


class OffsetStore(Protocol):
    """Where offsets are kept (`topics/subscription/group_offsets.py`). Its methods wait for disks and stores."""

    def load(self, topic: str | None = None) -> dict[OffsetKey, GroupOffset | DataError]: ...
    def store(self, changes: Changes) -> dict[OffsetKey, TidelogError]: ...


class CommittedOffsets:
    """The offsets of all groups."""

    def __init__(
        self, store: OffsetStore, topics: Topics, emptied: Callable[[str], None], slots: Slots | None = None
    ) -> None:
        """`emptied` is called with a group that has no offsets any more. `slots` are those of this node, where several
        nodes share the groups."""
        self._topics = topics
        self._slots = slots
        self._emptied = emptied
        self._groups: dict[str, dict[TopicPartition, GroupOffset | DataError]] = {}
        self._topic_ids: dict[str, bytes] = {}
        self._pending: defaultdict[str, dict[int, set[TopicPartition]]] = defaultdict(dict)
        self._writes: SharedWrites[OffsetKey, GroupOffset | None] = SharedWrites(store.store)
        self._storing: set[asyncio.Task[dict[OffsetKey, TidelogError]]] = set()
        self.is_loaded = False
        self._ends: dict[TopicPartition, int] = {}
        """Where partitions ended that were opened before the offsets were there."""

    # Loading

    def use(self, found: Mapping[OffsetKey, GroupOffset | DataError]) -> None:
        """What is stored, once that was read."""
        for key, offset in found.items():
            self._put(key, offset, self._topic_id(key.topic))
        self.is_loaded = True
        for (topic, partition), next_offset in self._ends.items():
            self.clip(topic, partition, next_offset)
        self._ends.clear()

    def forget(self, groups: Iterable[str]) -> None:
        """Another node coordinates these groups from now on."""
        for group in groups:
            self._groups.pop(group, None)
            self._pending.pop(group, None)

    def known(self) -> set[str]:
        """All groups with offsets, or with some that are pending."""
        return {*self._groups, *self._pending}

    def clip(self, topic: str, partition: int, next_offset: int) -> None:
        """A partition was opened that ends here: what was committed beyond that is lost. Opening has stored it so."""
        place = topic, partition
        if not self.is_loaded:
            self._ends[place] = next_offset
        for offsets in self._groups.values():
            known = offsets.get(place)
            if isinstance(known, GroupOffset) and known.offset > next_offset:
                offsets[place] = known._replace(offset=next_offset)

    async def stop(self) -> None:
        """Finishes the writes that have begun."""
        if self._storing:
            await asyncio.wait(self._storing)

    # Looking

    def refusal(self, group_id: str) -> ErrorCode | None:
        """Why no request of this group can be answered now."""
        try:
            group_cursor(group_id)
        except InputError:
            return ErrorCode.INVALID_GROUP_ID
        if self._slots is not None:
            return self._slots.refusal(group_id)
        return None if self.is_loaded else ErrorCode.COORDINATOR_LOAD_IN_PROGRESS

    def statistics(self) -> dict[str, dict[TopicPartition, int]]:
        """What every group has committed, by topic and partition."""
        return {
            group: {place: one.offset for place, one in offsets.items() if isinstance(one, GroupOffset)}
            for group, offsets in self._groups.items()
        }

    def groups(self) -> Iterable[str]:
        """All groups with offsets."""
        return self._groups.keys()

    def has(self, group: str) -> bool:
        return group in self._groups

    def of(self, group: str) -> Mapping[TopicPartition, GroupOffset | DataError]:
        """What a group has committed; an error in place of what cannot be read."""
        return self._groups.get(group, {})

    # Writing

    async def store(self, changes: Changes) -> dict[OffsetKey, TidelogError]:
        """Writes offsets, or deletes them (None); returns those that failed."""
        if not changes:
            return {}
        task = asyncio.get_running_loop().create_task(self._store_all(changes))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)
        return await asyncio.shield(task)

    async def _store_all(self, changes: Changes) -> dict[OffsetKey, TidelogError]:
        topic_ids = {topic: self._topic_id(topic) for topic in {key.topic for key in changes}}
        failed = await self._writes.write(changes)
        for key, offset in changes.items():
            if key not in failed:
                self._put(key, offset, topic_ids[key.topic])
        return failed

    def _put(self, key: OffsetKey, offset: GroupOffset | DataError | None, topic_id: bytes | None) -> None:
        """In memory, unless the topic that was meant is gone by now."""
        if topic_id is None or self._topic_id(key.topic) != topic_id:
            offset = None
        place = key.topic, key.partition
        if offset is not None:
            assert topic_id is not None
            self._topic_ids[key.topic] = topic_id
            self._groups.setdefault(key.group, {})[place] = offset
        elif (offsets := self._groups.get(key.group)) is not None:
            offsets.pop(place, None)
            if not offsets:
                del self._groups[key.group]
                self._emptied(key.group)

    # Topics

    def _topic_id(self, topic: str) -> bytes | None:
        found = self._topics.find(parse_topic_name(topic))
        return None if found is None else found.id

    def topics_changed(self) -> None:
        """Forgets offsets of topics that were deleted; the store has done so with the topic."""
        gone = {topic for topic, topic_id in self._topic_ids.items() if self._topic_id(topic) != topic_id}
        for topic in gone:
            del self._topic_ids[topic]
        if gone:
            for group, offsets in list(self._groups.items()):
                for place in [place for place in offsets if place[0] in gone]:
                    self._put(OffsetKey(group, *place), None, None)

    # Transactions

    def begin_pending(self, group: str, producer_id: int, partitions: Iterable[TopicPartition]) -> None:
        """A transaction of this producer will commit offsets of these partitions, or will not."""
        self._pending[group].setdefault(producer_id, set()).update(partitions)

    def end_pending(self, group: str, producer_id: int) -> None:
        """The transaction has ended."""
        pending = self._pending.get(group)
        if pending is not None:
            pending.pop(producer_id, None)
            if not pending:
                del self._pending[group]

    def is_pending(self, group: str, place: TopicPartition) -> bool:
        """Whether a transaction that is not over may change this offset."""
        pending = self._pending.get(group)
        return pending is not None and any(place in places for places in pending.values())

    def has_pending(self, group: str) -> bool:
        return group in self._pending
