"""Who serves what, as a node sees it: partitions, engines and coordinators may be other nodes' to serve.

    Placement (this)  <──  service     asks who owns a partition, and for topics to be made, grown and deleted
    Placement (this)  ──>  cluster     an installation of several nodes implements it
    Node              <──  cluster     opens and releases what is assigned to this node (`node.py`)

Invariants
- A placement only says where to ask. That two nodes never write one log is ensured by the owners' epochs of the cold
  tier: a placement that is out of date costs a client one more question.
- Everything here is called in the event loop, and answers from memory. What changes the placement is awaited.
- `Alone` is a node by itself: its log directory knows the topics, and everything is its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tidelog.errors import LockedError
from tidelog.topics.names import TopicName

SLOTS = 64
"""Groups and transactional ids are coordinated by the node that has their slot."""


def slot_of(key: str) -> int:
    """The slot of a group or of a transactional id."""
    return zlib.crc32(key.encode()) % SLOTS


class Address(NamedTuple):
    """Where clients reach a listener."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """For HTTP."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class NodeAddress(NamedTuple):
    """A node, and where clients reach it."""

    node: str
    node_id: int
    kafka: Address
    http: str
    zone: str = ""


class NotOwnerError(LockedError):
    """Another node serves this, or nobody at the moment: `owner`."""

    def __init__(self, what: str, owner: NodeAddress | None) -> None:
        who = "no node" if owner is None else f"the node {owner.node}"
        super().__init__(f"{who} serves {what}, not this one", hint="Ask again in a moment, or ask that node")
        self.owner = owner


class TopicFacts(NamedTuple):
    """A topic as all nodes know it. `settings` are those that it was created with."""

    id: bytes
    created_us: int
    partitions: int
    settings: Mapping[str, object] = {}


class Placement(Protocol):
    """The placement of an installation."""

    @property
    def node_id(self) -> int:
        """Of this node, in Kafka's protocol."""

    @property
    def is_alone(self) -> bool:
        """Whether there are no other nodes, and never will be: nothing has to be asked for."""

    def nodes(self) -> Sequence[NodeAddress]:
        """Those that are alive; never none of them once this node was one."""

    def controller(self) -> NodeAddress | None: ...

    def owner(self, topic: TopicName, partition: int) -> NodeAddress | None:
        """None: nobody at the moment."""

    def is_ours(self, topic: TopicName, partition: int) -> bool: ...

    def engines(self) -> Mapping[str, NodeAddress | None]:
        """The engines that nodes get, with who serves each; those that a node was started with are not among them."""

    @property
    def is_alive(self) -> bool:
        """Whether this node is certain that no other sees it gone: only then it answers for what is its own."""

    def coordinator(self, key: str) -> NodeAddress | None:
        """Of a group or a transactional id: the node that has its slot (`slot_of`)."""

    def topics(self) -> Mapping[TopicName, TopicFacts] | None:
        """All topics of the installation; None: those that the log directory knows."""

    async def hear_of(self, name: TopicName) -> None:
        """Returns once `topics` has a topic that another node created a moment ago; at once if there is none, or it was
        asked too often. ServerUnavailableError if there is one, and this node does not hear of it."""

    async def create(self, name: TopicName, partitions: int, settings: Mapping[str, object]) -> TopicFacts:
        """Returns when every partition has an owner, or after a while; ConflictError if the topic exists."""

    async def grow(self, name: TopicName, partitions: int) -> None:
        """The topic has so many partitions now. What they are in the catalog was recorded before."""

    async def delete(self, name: TopicName, remove: Callable[[], Awaitable[None]]) -> None:
        """Takes the partitions from their owners, waits until these have let go, and calls `remove`, which deletes what
        is stored. After that the topic is gone. `remove` can be repeated, also by another node."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls this in the event loop whenever something of the above has changed."""


class Alone:
    """A node by itself."""

    is_alone = True

    def __init__(self, node: str = "local", node_id: int = 1) -> None:
        self.node_id = node_id
        self._node = node
        self._address = NodeAddress(node, node_id, Address("127.0.0.1", 9092), "")

    def serve_at(self, kafka: Address, http: str) -> None:
        """Where this node is reached, once it listens."""
        self._address = NodeAddress(self._node, self.node_id, kafka, http)

    def nodes(self) -> Sequence[NodeAddress]:
        return [self._address]

    def controller(self) -> NodeAddress:
        return self._address

    def owner(self, topic: TopicName, partition: int) -> NodeAddress:
        return self._address

    def is_ours(self, topic: TopicName, partition: int) -> bool:
        return True

    is_alive = True

    def engines(self) -> Mapping[str, NodeAddress | None]:
        return {}

    def coordinator(self, key: str) -> NodeAddress:
        return self._address

    def topics(self) -> None:
        return None

    async def hear_of(self, name: TopicName) -> None:
        """There is no other node."""

    async def create(self, name: TopicName, partitions: int, settings: Mapping[str, object]) -> TopicFacts:
        raise AssertionError("the directory of a node by itself creates its topics")

    async def grow(self, name: TopicName, partitions: int) -> None:
        """The directory has recorded it."""

    async def delete(self, name: TopicName, remove: Callable[[], Awaitable[None]]) -> None:
        await remove()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Nothing ever changes."""
