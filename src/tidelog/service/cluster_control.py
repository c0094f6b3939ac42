"""What a cluster shows to its operators, and what they can ask of it: the seam between the service and `cluster/`.

Invariants
- What the command line and HTTP show is the same: both get these rows.
- A load is what a node has reported, and is stored as it is here: fields are added, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import msgspec


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster in a few numbers."""

    leader: str | None
    nodes: int
    topics: int
    partitions: int
    unassigned: int
    """Partitions whose node is not alive, or that have none."""
    engines: int
    unassigned_engines: int
    failing_engines: int
    """Those that their node cannot open, or another one not let go: `engines` says why."""
    moving: int
    """Partitions and engines that are being opened."""
    strategy: str
    imbalance: float
    """How far the node that is farthest off the average is off it, as a part of the average."""
    requests: int
    """What was asked for, and is not carried out yet."""
    unshipped_messages: int
    """Of nodes that are alive."""
    unshipped_bytes: int
    unshipped_seconds: float
    unshipped_entries: int
    """Of engines."""
    left_messages: int
    """What nodes that are gone had not shipped when they reported last, and what nodes keep for a rescue: it is on
    their disks, and readers do not get it."""


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is done for something, a second."""

    bytes_in: float = 0.0
    bytes_out: float = 0.0
    messages_in: float = 0.0
    messages_out: float = 0.0


class Unshipped(msgspec.Struct, frozen=True, kw_only=True):
    """What is only on the disk of a node: that much would be missing if it died for good."""

    messages: int
    bytes: int
    seconds: float
    """How old the oldest of it is."""


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node has to do."""

    node: str
    at_us: int
    total: Load = Load()
    cpu: float = 0.0
    """Cores in use."""
    memory_bytes: int = 0
    disk_free_bytes: int = 0
    cold_reads: int = 0
    """Reads of the store under way."""
    open: int = 0
    """Partitions that are open."""
    opening: int = 0
    """Those that are assigned to it and not open yet."""
    releasing: int = 0
    """Those that it still has and that are not assigned to it any more."""
    partitions: dict[str, Load] = {}
    """Of the busiest partitions, `namespace/topic/number`."""
    engines: int = 0
    """Engines that are open."""
    engine_loads: dict[str, Load] = {}
    """Of engines that are open: entries that they apply, reads of this disk, and bytes of their log."""
    failing_engines: dict[str, str] = {}
    """Why engines cannot be opened here, restored or let go; all of it is tried again."""


class NotServed(NamedTuple):
    """Why a node cannot serve what the cluster has given to it, and what to do: as clients may hear of it."""

    reason: str
    hint: str


class NodeTail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is only on the disk of a node, or in its flushes."""

    at_us: int
    topics: dict[str, Unshipped] = {}
    engines: dict[str, Unshipped] = {}
    """Entries that the orchestrator applies again if the node dies."""
    kept: dict[str, Unshipped] = {}
    """By topic, what is kept for a rescue: another node went on without it. Its age counts from when it was found."""
    flushed: dict[str, int] = {}
    """By topic, messages that are in the bucket, but in the flushes of the node alone: the loss of the node costs
    nothing, that of the bucket would, whatever replicas the topic has."""


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is alive, or was a member once."""

    name: str
    state: str
    """`alive`, `leaving`, `draining`, `drained` or `gone`."""
    node_id: int
    kafka: str
    http: str
    zone: str
    version: str
    is_leader: bool
    partitions: int
    engines: int
    slots: int
    load: NodeLoad | None = None
    """What it has to do, as it has reported last."""


class ClusterTopic(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves the partitions of a topic."""

    name: str
    partitions: tuple[str | None, ...]
    """The node of each, by number; null: nobody at the moment."""
    pins: dict[int, str] = {}
    """Partitions that are to stay at a node, by number."""


class ClusterEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the cluster."""

    name: str
    node: str | None
    """Who serves it, or is to open it; None: nobody at the moment."""
    state: str
    """`assigned` to a node, `failing` if that cannot open it, or `unassigned`."""
    pin: str | None
    store: str | None
    """None: that of the cluster."""
    unshipped: int
    """Entries that only the disk of its node and the orchestrator have."""
    reason: str | None = None
    """Why it is failing, and at which node."""


class Unsaved(msgspec.Struct, frozen=True, kw_only=True):
    """What would be missing of a topic or of an engine if the disk of its node were lost now; of a node that is gone,
    what is missing until it comes back; and what a node keeps for a rescue."""

    node: str
    is_alive: bool
    reported: datetime
    topic: str
    """Empty for an engine."""
    engine: str
    """Empty for a topic. Its orchestrator applies these entries again."""
    messages: int
    """Or entries."""
    bytes: int
    """Of the messages in the files; of an engine, of its log and its large values."""
    seconds: float
    """How long the oldest of it has been there; of what is to be rescued, how long ago the node found it."""
    to_rescue: bool = False
    """Another node went on without these messages: they are missing until `tidelog topic rescue` brings them back."""


class ClusterControl(Protocol):
    """What a cluster offers to its operators (`cluster/operations.py`). Called in threads."""

    def status(self) -> ClusterStatus: ...

    def nodes(self) -> Sequence[ClusterNode]: ...

    def engines(self) -> Sequence[ClusterEngine]: ...

    def topics(self) -> Sequence[ClusterTopic]: ...

    def plan(self, *, drain: Iterable[str], lose: Iterable[str], balance: bool) -> Sequence[Any]: ...

    def decisions(self) -> Sequence[Any]: ...

    def restore_point(self) -> Sequence[Unsaved]: ...

    def move(self, topic: str, partition: int, node: str, *, pin: bool, by: str) -> str: ...

    def move_engine(self, engine: str, node: str, *, pin: bool, by: str) -> str: ...

    def unpin(self, topic: str, partition: int) -> bool: ...

    def unpin_engine(self, engine: str) -> bool: ...

    def add_engine(
        self, name: str, *, store: str | None = None, metadata: str | None = None, must_exist: bool = False
    ) -> None: ...

    def remove_engine(self, name: str) -> None: ...

    def drain(self, node: str) -> bool: ...

    def undrain(self, node: str) -> bool: ...

    def balance(self, by: str) -> str: ...

    def state(self) -> Any: ...

    def is_empty(self, node: str) -> Callable[[Any], bool]: ...

    def is_carried_out(self, request: str) -> Callable[[Any], bool]: ...
