"""The documents of a cluster, and the state of it as one node sees it.

Keys are those of `ClusterKeys` (`store/keys.py`). Every document is JSON. Nodes of two versions share them while an
installation is upgraded: fields that are unknown here are passed over, and stay when the document is changed here.

Invariants
- `nodes/`, `loads/` and `leader` hang on the lease of the node they are about: a node that dies is gone from all three
  at once, and no clock of another machine is asked.
- One document a topic, not a partition: a cluster costs as many documents as it has topics.
- An entry that cannot be understood is passed over with a warning: one damaged document does not stop the cluster. Of
  the settings each is looked at by itself: a strategy of a newer version does not lift the version gate.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec

from tidelog.codec import JSON_ERRORS, from_json
from tidelog.errors import InputError
from tidelog.service.placement import SLOTS
from tidelog.store.keys import ClusterKeys
from tidelog.store.metadata.base import Entry
from tidelog.store.metadata.watch import Changes
from tidelog.topics.names import TopicName

_logger = logging.getLogger("tidelog.cluster")
Strategy = Literal["fair", "balanced", "weighted"]
NOBODY = ""
"""Instead of a node: nobody serves it."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is alive."""

    name: str
    node_id: int
    kafka: str
    """HOST:PORT"""
    http: str
    """Its URL."""
    zone: str = ""
    version: str = ""
    started_us: int = 0
    session: str = ""
    """Of the heartbeat of its log directory."""
    directory: str = ""
    """Names its log directory among all others."""
    is_leaving: bool = False
    """It is being stopped, and hands over what it has."""


class NodeId(msgspec.Struct, frozen=True, kw_only=True):
    """The number of a node in Kafka's protocol. `is_draining`: it gets nothing, whether it is alive or not."""

    node_id: int
    is_draining: bool = False


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs the load manager."""

    node: str
    since_us: int


class TopicPlacement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who serves the partitions of a topic: a node for each, or NOBODY."""

    id: str
    created_us: int
    partitions: tuple[str, ...]
    pins: dict[int, str] = {}
    settings: dict[str, object] = {}
    """Those that it was created with."""
    is_deleting: bool = False


class EngineArguments(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node needs to open an engine."""

    store: str | None = None
    """Its store; None: that of the cluster's topics, where it has its own name."""
    metadata: str | None = None
    """Of an engine with a store of its own; None: that store itself."""
    metadata_root: str | None = None
    name: str = ""
    """Its name in its store, if that is another one."""
    must_exist: bool = False
    """Whether it is an error that its store has none; else it is created."""


class EnginePlacement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who serves an engine. `pin`: who is to serve it, as long as that node can."""

    node: str = NOBODY
    pin: str = NOBODY
    arguments: EngineArguments = EngineArguments()


class Coordinators(msgspec.Struct, frozen=True, kw_only=True):
    """Who coordinates the groups and transactional ids of each slot."""

    slots: tuple[str, ...] = (NOBODY,) * SLOTS


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the load manager decides. They are the installation's: `tidelog cluster settings` changes them for all."""

    strategy: Strategy = "balanced"
    """`fair`: as many partitions on each node; `balanced`: as many bytes a second, those of engines too; `weighted`: as
    much of what the weights below say."""

    hysteresis: Annotated[float, msgspec.Meta(ge=0.01, le=1)] = 0.1
    """A node that has more than this over the average is relieved, until it has less than half of that over it."""

    max_moves_at_once: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Partitions that are under way from one node to another for the sake of balance, drains and requests."""

    max_moves_per_hour: Annotated[int, msgspec.Meta(ge=0)] = 200
    """Partitions that are moved for the sake of balance. 0: nothing is, except on request."""

    rest_seconds: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    """A partition that was moved for the sake of balance stays where it is for so long."""

    settle_seconds: Annotated[float, msgspec.Meta(ge=0)] = 15.0
    """After a node has come, nothing is moved for the sake of balance for so long: others may be coming too."""

    min_disk_free_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30
    """A node with less room on its disk gets nothing, as long as another one has more, but for pins and what was asked
    for. It keeps what it has. 0: disks are not looked at."""

    weight_partition: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """What a partition weighs by being there (`weighted`)."""
    weight_bytes_in: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """What a MB/s of produced data weighs (`weighted`), and so on."""
    weight_bytes_out: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    weight_messages_in: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    """Of 1,000 messages a second."""
    weight_messages_out: Annotated[float, msgspec.Meta(ge=0)] = 0.05
    weight_cpu: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    """What a core in use weighs at its node, whatever uses it (`weighted`)."""
    weight_cold_reads: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    """Of a read of the store under way."""

    minimum_version: str = ""
    """Nodes of an older version do not join, and get nothing. Raised once all nodes are upgraded."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an operator asked for. A move is that of a partition, or of an engine."""

    kind: Literal["move", "balance", "move-engine"]
    asked_us: int
    by: str = ""
    topic: str = ""
    partition: int = 0
    engine: str = ""
    node: str = NOBODY
    pin: bool = False

    @property
    def subject(self) -> str:
        """What it is about, as `Decision.subject`."""
        return f"engine {self.engine}" if self.kind == "move-engine" else f"{self.topic}/{self.partition}"


DecisionKind = Literal["assign", "failover", "drain", "pin", "move", "balance", "slot", "engine"]


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing gets another node, and why."""

    kind: DecisionKind
    reason: str
    to: str
    source: str = NOBODY
    topic: str = ""
    partition: int = -1
    slot: int = -1
    engine: str = ""

    @property
    def is_of_slot(self) -> bool:
        """A share of the coordinators of groups and transactions: 64 of them follow the nodes, and hide the rest."""
        return self.slot >= 0

    @property
    def subject(self) -> str:
        """What it is about, for people."""
        if self.topic:
            return f"{self.topic}/{self.partition}"
        return f"slot {self.slot}" if self.slot >= 0 else f"engine {self.engine}"


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided in one round."""

    at_us: int
    leader: str
    decisions: list[Decision]


Document = TypeVar("Document", bound=msgspec.Struct)


def version_tuple(text: str) -> tuple[int, ...]:
    """What a version is compared by; one without numbers is the oldest."""
    parts = text.split("+")[0].split(".")
    digits = ("".join(character for character in part if character.isdigit()) for part in parts)
    return tuple(int(part or 0) for part in digits) if text else ()


def is_too_old(version: str, minimum: str) -> bool:
    """Whether a node of this version may not take part."""
    return bool(minimum) and version_tuple(version) < version_tuple(minimum)


def topic_of_key(key: str, keys: ClusterKeys) -> TopicName:
    """The topic whose placement is under this key."""
    namespace, _, name = key.removeprefix(keys.topics_prefix).partition("/")
    return TopicName(namespace, name)


def split_address(text: str) -> tuple[str, int]:
    """HOST:PORT of a document; InputError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


class ClusterState:
    """All documents that nodes watch, decoded, with the versions to replace them by. Changes come by `apply`."""

    def __init__(self, keys: ClusterKeys) -> None:
        self.keys = keys
        self.is_known = False
        """Whether anything was read yet."""
        self.nodes: dict[str, NodeInfo] = {}
        self.node_ids: dict[str, NodeId] = {}
        self.topics: dict[TopicName, TopicPlacement] = {}
        self.engines: dict[str, EnginePlacement] = {}
        self.requests: dict[str, Request] = {}
        self.leader: Leader | None = None
        self.coordinators = Coordinators()
        self.settings = ClusterSettings()
        self.versions: dict[str, str] = {}
        self.values: dict[str, bytes] = {}
        """As they are stored, to be changed by `encode_json`."""

    def apply(self, changes: Changes) -> set[str]:
        """Takes in what a watch has said; returns the keys that have changed."""
        changed = dict(changes.entries)
        if changes.is_whole:
            changed.update(dict.fromkeys(self.versions.keys() - changed.keys()))
            self.is_known = True
        for key, entry in changed.items():
            self._take(key, entry)
        return set(changed)

    def copy(self) -> ClusterState:
        """For another thread: the documents themselves never change."""
        made = ClusterState(self.keys)
        made.is_known, made.leader = self.is_known, self.leader
        made.coordinators, made.settings = self.coordinators, self.settings
        for name in ("nodes", "node_ids", "topics", "engines", "requests", "versions", "values"):
            setattr(made, name, dict(getattr(self, name)))
        return made

    def written(self, entries: Iterable[Entry]) -> None:
        """What this node has written itself, before the watch says so."""
        for entry in entries:
            self._take(entry.key, entry)

    def _take(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self.versions.pop(key, None)
            self.values.pop(key, None)
        elif int(self.versions.get(key, "0")) > int(entry.version):
            return  # older than what this node has written itself
        else:
            self.versions[key] = entry.version
            self.values[key] = entry.value
        self._decode(key, entry)

    def _decode(self, key: str, entry: Entry | None) -> None:
        keys = self.keys
        if key == keys.leader:
            self.leader = decoded(entry, Leader)
        elif key == keys.coordinators:
            self.coordinators = decoded(entry, Coordinators) or Coordinators()
        elif key == keys.settings:
            self.settings = decoded_settings(entry)
        elif key.startswith(keys.topics_prefix):
            _set(self.topics, topic_of_key(key, keys), decoded(entry, TopicPlacement))
        else:
            self._decode_named(key, entry)

    def _decode_named(self, key: str, entry: Entry | None) -> None:
        keys = self.keys
        if key.startswith(keys.nodes_prefix):
            _set(self.nodes, key.removeprefix(keys.nodes_prefix), decoded(entry, NodeInfo))
        elif key.startswith(keys.node_ids_prefix):
            _set(self.node_ids, key.removeprefix(keys.node_ids_prefix), decoded(entry, NodeId))
        elif key.startswith(keys.engines_prefix):
            _set(self.engines, key.removeprefix(keys.engines_prefix), decoded(entry, EnginePlacement))
        elif key.startswith(keys.requests_prefix):
            _set(self.requests, key.removeprefix(keys.requests_prefix), decoded(entry, Request))

    def is_usable(self, node: str) -> bool:
        """Whether a node may be given something."""
        info = self.nodes.get(node)
        return (
            info is not None
            and not info.is_leaving
            and not self.is_draining(node)
            and not is_too_old(info.version, self.settings.minimum_version)
        )

    def is_draining(self, node: str) -> bool:
        known = self.node_ids.get(node)
        return known is not None and known.is_draining

    def summary(self) -> dict[str, int]:
        """How many partitions each living node has."""
        counts = dict.fromkeys(self.nodes, 0)
        for placement in self.topics.values():
            for node in placement.partitions:
                if node in counts:
                    counts[node] += 1
        return counts


Key = TypeVar("Key")


def _set(there: dict[Key, Document], key: Key, value: Document | None) -> None:
    if value is None:
        there.pop(key, None)
    else:
        there[key] = value


def decoded(entry: Entry | None, kind: type[Document]) -> Document | None:
    """The document of an entry; None where there is none, or it cannot be understood."""
    if entry is None:
        return None
    try:
        return from_json(entry.value, kind)
    except JSON_ERRORS as error:
        _logger.warning("%s in the metadata store cannot be understood, and is passed over: %s", entry.key, error)
        return None


def decoded_settings(entry: Entry | None) -> ClusterSettings:
    """The settings of an entry; where not all are understood, those that are, and the defaults of the others."""
    found = decoded(entry, ClusterSettings)
    if found is not None or entry is None:
        return found or ClusterSettings()
    settings = ClusterSettings()
    with contextlib.suppress(*JSON_ERRORS):
        known = from_json(entry.value, dict[str, msgspec.Raw])
        for name in known.keys() & set(ClusterSettings.__struct_fields__):
            with contextlib.suppress(*JSON_ERRORS):
                one = from_json(msgspec.json.encode({name: known[name]}), ClusterSettings)
                settings = msgspec.structs.replace(settings, **{name: getattr(one, name)})
    return settings
