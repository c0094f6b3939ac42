"""History from any node (KIP-392): an owner sends consumers that are far behind to nodes that read the store for them.

    consumer ── Fetch, old offsets ──────────────> owner        no records; preferred read replica: another node
             ── Fetch, old offsets ──────────────> other node   records, from the store
             ── Fetch, behind what is shipped ───> other node   no records; preferred read replica: the owner

Invariants
- Who is at the tail is never sent away: only who asks for what is in the store alone and may be seen, and for enough of
  it (`far_behind_bytes`).
- Who comes back within `_AT_ONCE_SECONDS` for such offsets is served by the owner for `_SERVED_SECONDS`: a client that
  ignores where it was sent, or a node that is gone, cost one empty answer. Clients whose lease of a node has run out
  (five minutes in librdkafka, `metadata.max.age.ms` in Java) come later than that, and are sent again.
- A node that is no owner never answers that an offset is out of range, for clients may reset their position then, nor
  that it is the end of the partition, nor without records and without a word where to read on. Where it has nothing, it
  names the owner. An error would do for Java and librdkafka; others stay where they are (franz-go: half an hour).
- It says nothing about leader epochs: what it reads is in the catalog, whoever owns the partition. A client that was
  not sent there, and takes it for the leader by old metadata, is told NOT_LEADER_OR_FOLLOWER as ever.
- Consumers of committed messages get none of aborted or open transactions there, and no control records: their ends are
  looked for in the log itself (`log/isolation.py`), and what is left out is like messages that were compacted.
- All nodes say the same about which nodes read a partition: Java goes only to a node that metadata has as a replica.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from tidelog.errors import TidelogError
from tidelog.service.kafka.broker import Broker, ServedTopic
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.partition_reader import Fetched
from tidelog.service.kafka.partitions import Partition
from tidelog.service.kafka.requests import RequestContext
from tidelog.service.kafka.stored_partitions import StoredPartition
from tidelog.service.placement import NodeAddress
from tidelog.topics.names import TopicName

_FIRST_WITH_REPLICAS = 11
_AT_ONCE_SECONDS = 60.0
_SERVED_SECONDS = 300.0
_IN_ONE_ZONE = 2
_GUESSED_BYTES = 1024
"""Of a message, where none is on the disk to be measured."""
_Key = tuple[TopicName, int]


class HistoryNodes:
    """Which nodes read the history of a partition for its owner: one a zone, or two where there is one zone."""

    def __init__(self, nodes: Iterable[NodeAddress]) -> None:
        zones: dict[str, list[NodeAddress]] = {}
        for node in sorted(nodes, key=lambda one: one.node_id):
            if node.kafka.port:
                zones.setdefault(node.zone, []).append(node)
        self._zones = [zones[zone] for zone in sorted(zones)]

    def of(self, topic: TopicName, number: int, owner_id: int) -> list[NodeAddress]:
        """Without the owner. Partitions begin at different ones."""
        first = zlib.crc32(str(topic).encode()) + number
        wanted, found = _IN_ONE_ZONE if len(self._zones) == 1 else 1, []
        for members in self._zones:
            turned = (members[(first + step) % len(members)] for step in range(len(members)))
            found += [node for node in turned if node.node_id != owner_id][:wanted]
        at = first % max(1, len(found))
        return found[at:] + found[:at]


class _Told:
    """What the client of a connection was told."""

    __slots__ = ("given", "sent_at", "served_until")

    def __init__(self) -> None:
        self.sent_at: dict[_Key, float] = {}
        self.served_until: dict[_Key, float] = {}
        self.given: set[_Key] = set()
        """Partitions of other nodes whose history it got here."""


class History:
    """Decides for Fetch and Metadata who reads what where."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._told: WeakKeyDictionary[object, _Told] = WeakKeyDictionary()
        self._turns: Counter[_Key] = Counter()

    @property
    def is_on(self) -> bool:
        broker = self._broker
        return broker.settings.history_from_any_node and not broker.placement.is_alone and broker.has_store

    def nodes(self) -> HistoryNodes:
        """Of this moment; none where history is read from owners alone."""
        return HistoryNodes(self._broker.placement.nodes() if self.is_on else ())

    # At the owner

    def node_for(self, context: RequestContext, rack: str, partition: Partition, offset: int, stop: int) -> int | None:
        """The node that a consumer is sent to which asks for this offset, and may see up to `stop`; None: it stays."""
        if not self._takes_part(context):
            return None
        key = partition.name, partition.number
        told = self._told.get(context.connection)
        if not self._is_far_behind(partition, offset, stop):
            if told is not None:
                told.sent_at.pop(key, None)
            return None
        now = asyncio.get_running_loop().time()
        if told is None:
            told = self._told[context.connection] = _Told()
        if now < told.served_until.get(key, 0.0):
            return None
        if now - told.sent_at.pop(key, -_AT_ONCE_SECONDS) < _AT_ONCE_SECONDS:
            told.served_until[key] = now + _SERVED_SECONDS
            return None
        found = self.nodes().of(*key, self._broker.node_id)
        near = [node for node in found if rack and node.zone == rack] or found
        if not near:
            return None
        told.sent_at[key] = now
        self._broker.read_counts.sent_away += 1
        self._turns[key] += 1
        return near[(self._turns[key] - 1) % len(near)].node_id

    def _takes_part(self, context: RequestContext) -> bool:
        return context.version >= _FIRST_WITH_REPLICAS and context.connection is not None and self.is_on

    def _is_far_behind(self, partition: Partition, offset: int, stop: int) -> bool:
        missing = min(partition.topic.hot_start_offset, stop) - offset
        if missing <= 0:
            return False
        here = partition.topic._log.statistics()
        messages = here.next_offset - here.start_offset
        size = here.file_bytes / messages if messages else _GUESSED_BYTES
        return missing * size >= self._broker.settings.far_behind_bytes

    # At the others

    async def stored(
        self, context: RequestContext, served: ServedTopic, number: int, offset: int
    ) -> StoredPartition | None:
        """A partition of another node whose store has this offset; None for one that is ours, or whose owner is to
        answer."""
        placement = self._broker.placement
        if not self._takes_part(context) or not 0 <= number < served.count or placement.is_ours(served.name, number):
            return None
        try:
            found = await self._broker.stored.covering(served, number, offset)
        except TidelogError:
            return None
        if found is not None:
            told = self._told.get(context.connection)
            if told is None:
                told = self._told[context.connection] = _Told()
            told.given.add((served.name, number))
        return found

    def was_given(self, context: RequestContext, topic: TopicName, number: int) -> bool:
        """Whether this client reads history of a partition of another node here."""
        told = self._told.get(context.connection)
        return told is not None and (topic, number) in told.given

    async def read(self, stored: StoredPartition, offset: int, limit: int, *, is_committed: bool) -> Fetched | None:
        """What comes next; None where the owner is to be asked."""
        try:
            found = await stored.read(offset, limit, is_committed=is_committed)
        except TidelogError:
            self._broker.stored.forget(stored)
            return None
        return None if found.next_offset == offset else found

    def send_to_owner(self, answer: Any, topic: TopicName, number: int) -> None:
        """Fills in an answer that says so."""
        owner = self._broker.placement.owner(topic, number)
        answer.records = []
        if owner is None or owner.node_id == self._broker.node_id:
            answer.error_code = ErrorCode.OFFSET_NOT_AVAILABLE  # clients ask again, here or at the leader
            answer.high_watermark = answer.last_stable_offset = -1
        else:
            answer.preferred_read_replica = owner.node_id
