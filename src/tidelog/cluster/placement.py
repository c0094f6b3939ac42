"""The placement of a cluster, as the service of one node asks for it (`service/placement.py`).

Invariants
- Questions are answered from memory, by the documents as the watch has brought them. Of a topic that it has not brought
  etcd is asked, at most 20 times a second and 4 times at once: it may be about to bring it. Only the watch changes what
  is known, so that a late answer never brings a deleted topic back.
- This node is among the nodes also while its lease has run out: when all of them lose theirs at once, clients must not
  hear of an installation without nodes. Some forget all addresses then, for good (librdkafka#5301).
- A partition is ours only while this node is certain that no other sees it gone (`Member.is_alive`): a node that is cut
  off from etcd stops to answer for its partitions before they are given to others.
- Creating, growing and deleting change a topic's document by compare-and-swap; the leader gives partitions to nodes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import msgspec

from tidelog.clock import Clock, jittered
from tidelog.cluster.documents import (
    NOBODY,
    ClusterState,
    NodeInfo,
    TopicPlacement,
    split_address,
    topic_of_key,
)
from tidelog.cluster.member import Member
from tidelog.errors import ConflictError, InputError, LockedError, NotFoundError, ServerUnavailableError
from tidelog.service.placement import Address, NodeAddress, TopicFacts, slot_of
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.metadata.base import Check, Entry, MetadataStore, Put
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import TopicName

OWNED_SECONDS = 15.0
"""So long the creation of a topic waits for owners of its partitions."""
_RELEASE_SECONDS = 60.0
"""So long a deletion waits for the owners to let go."""
_HELD_SECONDS = 0.1
_HEARD_SECONDS = 5.0
"""So long a request waits for a topic that is there, and that the watch has not brought yet."""
_ASKED_PER_SECOND = 20
_ASKED_AT_ONCE = 4


class ClusterPlacement:
    """Answers from the documents of a cluster."""

    is_alone = False

    def __init__(self, metadata: MetadataStore, clock: Clock, state: ClusterState, member: Member) -> None:
        self._metadata = metadata
        self._clock = clock
        self._state = state
        self._member = member
        self._addresses: dict[str, NodeAddress] = {}
        self._own: NodeAddress | None = None
        self._facts: dict[TopicName, TopicFacts] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._asked_at: deque[float] = deque(maxlen=_ASKED_PER_SECOND)
        self._asking = 0

    def follow(self, changed: Collection[str]) -> None:
        """The documents under these keys have changed."""
        keys = self._state.keys
        topics = [topic_of_key(key, keys) for key in changed if key.startswith(keys.topics_prefix)]
        if topics:
            self._facts = dict(self._facts)  # who has asked keeps what it got
        for topic in topics:
            self._take_topic(topic)
        for key in changed:
            if key.startswith(keys.nodes_prefix):
                self._take_node(key.removeprefix(keys.nodes_prefix))
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for callback in self._callbacks:
            callback()

    def _take_topic(self, topic: TopicName) -> None:
        placement = self._state.topics.get(topic)
        if placement is None or placement.is_deleting:
            self._facts.pop(topic, None)
        else:
            self._facts[topic] = _facts(placement)

    def _take_node(self, name: str) -> None:
        info = self._state.nodes.get(name)
        if info is None:
            self._addresses.pop(name, None)
        else:
            self._addresses[name] = _address(info)
            if name == self._member.name:
                self._own = self._addresses[name]

    # Questions

    @property
    def node_id(self) -> int:
        return self._member.node_id

    def nodes(self) -> Sequence[NodeAddress]:
        known = set(self._addresses.values())
        if self._own is not None:
            known.add(self._own)
        return sorted(known, key=lambda address: address.node_id)

    def controller(self) -> NodeAddress | None:
        leader = self._state.leader
        return None if leader is None else self._addresses.get(leader.node)

    def owner(self, topic: TopicName, partition: int) -> NodeAddress | None:
        return self._addresses.get(self._owner(topic, partition))

    def _owner(self, topic: TopicName, partition: int) -> str:
        placement = self._state.topics.get(topic)
        if placement is None or placement.is_deleting or not 0 <= partition < len(placement.partitions):
            return NOBODY
        return placement.partitions[partition]

    def is_ours(self, topic: TopicName, partition: int) -> bool:
        return self._owner(topic, partition) == self._member.name and self._member.is_alive

    def engines(self) -> Mapping[str, NodeAddress | None]:
        return {name: self._addresses.get(placement.node) for name, placement in self._state.engines.items()}

    @property
    def is_alive(self) -> bool:
        return self._member.is_alive

    def coordinator(self, key: str) -> NodeAddress | None:
        slots = self._state.coordinators.slots
        return self._addresses.get(slots[slot_of(key) % len(slots)])

    def topics(self) -> Mapping[TopicName, TopicFacts]:
        return self._facts

    async def hear_of(self, name: TopicName) -> None:
        now = self._clock.monotonic()
        is_often = len(self._asked_at) == _ASKED_PER_SECOND and now - self._asked_at[0] < 1.0
        if name in self._facts or is_often or self._asking >= _ASKED_AT_ONCE:
            return
        self._asked_at.append(now)
        self._asking += 1
        try:
            found = await in_store_thread(self._document(name).read)
        finally:
            self._asking -= 1
        if found is None or found.value.is_deleting:
            return
        await self._until(lambda: name in self._facts, _HEARD_SECONDS)
        if name not in self._facts:
            raise ServerUnavailableError(
                f"this node has not heard of the topic {name} yet", hint="Ask again in a moment, or another node"
            )

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    # Changes

    async def create(self, name: TopicName, partitions: int, settings: Mapping[str, object]) -> TopicFacts:
        placement = TopicPlacement(
            id=uuid.uuid4().hex,
            created_us=self._clock.now_us(),
            partitions=(NOBODY,) * partitions,
            settings=dict(settings),
        )
        key = self._state.keys.topic(*name)
        document = encode_json(placement)
        try:
            versions = await in_store_thread(self._metadata.commit, [Check(key, None)], [Put(key, document)])
        except ConflictError as error:
            raise ConflictError(f"the topic {name} exists") from error
        self._wrote(Entry(key, document, versions[key]))
        await self._owned(name, partitions)
        return _facts(placement)

    async def grow(self, name: TopicName, partitions: int) -> None:
        def change(known: TopicPlacement | None) -> TopicPlacement:
            if known is None or known.is_deleting:
                raise NotFoundError(f"there is no topic {name}")
            missing = max(0, partitions - len(known.partitions))
            return msgspec.structs.replace(known, partitions=known.partitions + (NOBODY,) * missing)

        await in_store_thread(self._document(name).update, change)
        await self._owned(name, partitions)

    async def delete(self, name: TopicName, remove: Callable[[], Awaitable[None]]) -> None:
        def mark(known: TopicPlacement | None) -> TopicPlacement | None:
            return None if known is None else msgspec.structs.replace(known, is_deleting=True)

        document = self._document(name)
        await in_store_thread(document.update, mark)
        await self._removed(remove)
        await in_store_thread(document.delete)
        await self._until(lambda: name not in self._state.topics or not self._state.topics[name].is_deleting)

    async def _removed(self, remove: Callable[[], Awaitable[None]]) -> None:
        """The owners let go when they see the document: until then the fencing says that they hold it."""
        deadline = self._clock.monotonic() + _RELEASE_SECONDS
        while True:
            try:
                return await remove()
            except LockedError:
                if self._clock.monotonic() >= deadline:
                    raise
            await asyncio.sleep(jittered(_HELD_SECONDS))

    def _document(self, name: TopicName) -> VersionedDocument[TopicPlacement]:
        def decode(data: bytes, key: str) -> TopicPlacement:
            return decode_json(data, key, TopicPlacement)

        return VersionedDocument(self._metadata, self._state.keys.topic(*name), encode_json, decode)

    def _wrote(self, entry: Entry) -> None:
        self._state.written([entry])
        self.follow([entry.key])

    async def _owned(self, name: TopicName, partitions: int) -> None:
        """Waits until each partition has an owner, as long as that may take with a leader."""
        await self._until(lambda: all(self.owner(name, number) is not None for number in range(partitions)))

    async def _until(self, is_so: Callable[[], bool], seconds: float = OWNED_SECONDS) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not is_so():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return


def _facts(placement: TopicPlacement) -> TopicFacts:
    return TopicFacts(bytes.fromhex(placement.id), placement.created_us, len(placement.partitions), placement.settings)


def _address(info: NodeInfo) -> NodeAddress:
    try:
        kafka = Address(*split_address(info.kafka))
    except InputError:
        kafka = Address("", 0)
    return NodeAddress(info.name, info.node_id, kafka, info.http, info.zone)
