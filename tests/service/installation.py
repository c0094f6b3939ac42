"""Several nodes in this process over one store and one catalog, placed by hand: what a cluster does, without etcd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.service.kafka.test_server import LOOPBACK, WAIT_SECONDS, Client

import tidelog
from tidelog.errors import ConflictError, NotFoundError
from tidelog.service.auth.security import Security
from tidelog.service.kafka.broker import BrokerSettings
from tidelog.service.kafka.groups.classic import GroupSettings
from tidelog.service.kafka.groups.table import CoordinatorSettings
from tidelog.service.node import Node
from tidelog.service.placement import SLOTS, NodeAddress, TopicFacts, slot_of
from tidelog.topics.names import TopicName, parse_topic_name


class HandPlacement:
    """The placement of one node of an `Installation`."""

    is_alone = False

    def __init__(self, installation: Installation, number: int) -> None:
        self._installation = installation
        self.node_id = number

    def nodes(self) -> Sequence[NodeAddress]:
        return list(self._installation.addresses.values())

    def controller(self) -> NodeAddress | None:
        return next(iter(self.nodes()), None)

    def owner(self, topic: TopicName, partition: int) -> NodeAddress | None:
        number = self._installation.owners.get((topic, partition))
        return None if number is None else self._installation.addresses.get(number)

    def is_ours(self, topic: TopicName, partition: int) -> bool:
        return self._installation.owners.get((topic, partition)) == self.node_id

    is_alive = True

    def engines(self) -> Mapping[str, NodeAddress | None]:
        return {}

    def coordinator(self, key: str) -> NodeAddress | None:
        number = self._installation.slots.get(slot_of(key))
        return None if number is None else self._installation.addresses.get(number)

    def topics(self) -> Mapping[TopicName, TopicFacts]:
        unheard = self._installation.unheard
        return {name: facts for name, facts in self._installation.topics.items() if (self.node_id, name) not in unheard}

    async def hear_of(self, name: TopicName) -> None:
        self._installation.unheard.discard((self.node_id, name))
        self._installation._changed()

    async def create(self, name: TopicName, partitions: int, settings: Mapping[str, object]) -> TopicFacts:
        return await self._installation.create(name, partitions, settings)

    async def grow(self, name: TopicName, partitions: int) -> None:
        await self._installation.grow(name, partitions)

    async def delete(self, name: TopicName, remove: Callable[[], Awaitable[None]]) -> None:
        await self._installation.delete(name, remove)

    def on_change(self, callback: Callable[[], None]) -> None:
        self._installation.callbacks.append(callback)


class Installation:
    """What all nodes know, and the hand that moves it. Partitions go to the nodes in turn."""

    def __init__(self, root: Path, log_settings: Mapping[str, Any]) -> None:
        self._root = root
        self._log_settings = log_settings
        self.zones: dict[int, str] = {}
        """Of nodes that are started from now on."""
        self.nodes: dict[int, Node] = {}
        self.addresses: dict[int, NodeAddress] = {}
        self.owners: dict[tuple[TopicName, int], int] = {}
        self.slots: dict[int, int] = {}
        self.topics: dict[TopicName, TopicFacts] = {}
        self.unheard: set[tuple[int, TopicName]] = set()
        """Topics that a node does not know before it asks for them."""
        self.callbacks: list[Callable[[], None]] = []
        self._turns = itertools.count()
        self._clients: list[Client] = []

    # Nodes

    async def start_node(self, number: int, security: Security | None = None, **settings: Any) -> Node:
        directory = tidelog.open(
            self._root / f"node{number}",
            store=f"file://{self._root}/bucket",
            metadata=f"sqlite://{self._root}/catalog.db",
            **self._log_settings,
        )
        groups = CoordinatorSettings(classic=GroupSettings(initial_rebalance_delay_ms=0))
        node = Node(
            directory, BrokerSettings(**settings), groups, security=security, placement=HandPlacement(self, number)
        )
        listening = await node.start(LOOPBACK, LOOPBACK)
        self.nodes[number] = node
        zone = self.zones.get(number, "")
        self.addresses[number] = NodeAddress(f"node{number}", number, listening.kafka, listening.http_url, zone)
        self._changed()
        return node

    async def stop_node(self, number: int) -> None:
        self.addresses.pop(number)
        await self.nodes.pop(number).stop()
        self._changed()

    async def stop(self) -> None:
        for client in self._clients:
            await client.close()
        for number in list(self.nodes):
            await self.stop_node(number)

    async def client(self, number: int) -> Client:
        client = Client(*await asyncio.open_connection(*self.addresses[number].kafka))
        self._clients.append(client)
        return client

    async def call(self, number: int, api_key: int, version: int, body: Any) -> Any:
        """One request to one node."""
        return await (await self.client(number)).call(api_key, version, body)

    # The placement

    def _changed(self) -> None:
        self.topics = dict(self.topics)  # as one that was read anew
        for callback in self.callbacks:
            callback()

    def owner(self, topic: str, partition: int = 0) -> int:
        return self.owners[parse_topic_name(topic), partition]

    async def create(self, name: TopicName, partitions: int, settings: Mapping[str, object]) -> TopicFacts:
        if name in self.topics:
            raise ConflictError(f"the topic {name} exists")
        facts = TopicFacts(secrets.token_bytes(16), time.time_ns() // 1000, partitions, dict(settings))
        self.topics[name] = facts
        await self._assign(name, 0, partitions)
        return facts

    async def create_topic(self, topic: str, partitions: int) -> None:
        await self.create(parse_topic_name(topic), partitions, {})

    async def _assign(self, name: TopicName, first: int, stop: int) -> None:
        for partition in range(first, stop):
            numbers = sorted(self.nodes)
            self.owners[name, partition] = numbers[next(self._turns) % len(numbers)]
        self._changed()
        for partition in range(first, stop):
            await self.nodes[self.owners[name, partition]].open_partition(name, partition)

    async def grow(self, name: TopicName, partitions: int) -> None:
        before = self.topics[name]
        self.topics[name] = before._replace(partitions=partitions)
        await self._assign(name, before.partitions, partitions)

    async def delete(self, name: TopicName, remove: Callable[[], Awaitable[None]]) -> None:
        if name not in self.topics:
            raise NotFoundError(f"there is no topic {name}")
        facts = self.topics.pop(name)
        self._changed()
        for partition in range(facts.partitions):
            number = self.owners.pop((name, partition), None)
            if number is not None and number in self.nodes:
                await self.nodes[number].release_partition(name, partition)
        await remove()

    async def give_slots(self, number: int) -> None:
        """One node coordinates everything that is not coordinated yet, or was by a node that has ended."""
        free = [slot for slot in range(SLOTS) if self.slots.get(slot) not in self.nodes]
        self.slots |= dict.fromkeys(free, number)
        self._changed()
        await asyncio.gather(*(self.nodes[number].acquire_slot(slot) for slot in free))

    async def move_slot(self, key: str, number: int) -> None:
        """The slot of a group or a transactional id goes to a node."""
        slot = slot_of(key)
        before = self.slots.get(slot)
        self.slots[slot] = number
        self._changed()
        if before in self.nodes:
            await self.nodes[before].release_slot(slot)
        await self.nodes[number].acquire_slot(slot)

    async def move(self, topic: str, partition: int, number: int) -> None:
        """A planned move."""
        name = parse_topic_name(topic)
        before = self.owners[name, partition]
        self.owners[name, partition] = number
        self._changed()
        if before in self.nodes:
            await self.nodes[before].release_partition(name, partition)
        await self.nodes[number].open_partition(name, partition)


@contextlib.asynccontextmanager
async def installed(
    root: Path,
    count: int = 2,
    *,
    secure: Callable[[int], Security] | None = None,
    log_settings: Mapping[str, Any] | None = None,
    zones: Mapping[int, str] | None = None,
    **settings: Any,
) -> AsyncIterator[Installation]:
    """So many nodes, numbered from 1; `secure` makes the security of each. Their directories have `log_settings`."""
    installation = Installation(root, log_settings or {})
    installation.zones.update(zones or {})
    try:
        for number in range(1, count + 1):
            await installation.start_node(number, secure(number) if secure else None, **settings)
        yield installation
    finally:
        await installation.stop()


def run(work: Coroutine[Any, Any, None]) -> None:
    """A test in an event loop of its own."""

    async def in_time() -> None:
        async with asyncio.timeout(2 * WAIT_SECONDS):
            await work

    asyncio.run(in_time())
