"""Makes a replica the first store of an installation, after the loss of the first one.

    plan_promotion -> what would be lost, log by log -> promote -> start the nodes with the new store

A replica has the objects of every topic and engine that has it among its `replicas`, and their catalog in its bucket.
Promotion brings that catalog into the metadata store of the cluster, in place of the one of the first store. An engine
with a store of its own is not part of it.

Invariants
- Nothing is changed while a node of the cluster is alive: who serves would go on with the first store. That is asked
  before each transaction: a node that came meanwhile interrupts the promotion.
- What is lost is said before: messages and entries that the catalog knows and the replica does not have. Of a log that
  the catalog does not know it is unknown, not 0: the metadata store may have been lost with the region.
- What was not shipped is on the disks of the nodes, or in flushes of the first store, where it was acknowledged with
  `durability=shipped`. How much it is, is what the nodes of a cluster reported last; without a cluster nobody knows.
- A promoted log has a higher epoch than any owner had: an owner that comes back is fenced, and its tail can be rescued.
- The catalog is bound to the new store last. What is interrupted before is done again by the next promotion; nodes of
  either store are refused, or find a whole catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from tidelog.clock import Clock
from tidelog.cluster.documents import EnginePlacement, decoded
from tidelog.cold.catalog import Catalog, Owner
from tidelog.cold.ownership import new_claim
from tidelog.engine.cold.manifest import read_manifest
from tidelog.errors import ConfigError, InputError
from tidelog.service.cluster_control import NodeTail
from tidelog.store.binding import BoundStore, StoreBinding
from tidelog.store.document import decode_json, encode_json
from tidelog.store.keys import (
    ClusterKeys,
    EngineKeys,
    TopicKeys,
    engines_prefix,
    is_part,
    parse_topic_key,
    store_key,
    topics_prefix,
)
from tidelog.store.metadata.base import Delete, Entry, MetadataStore, Put, Write
from tidelog.store.metadata.open import BUCKET, open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.topics.names import TopicName

Kind = Literal["topic", "engine"]
_WRITES_AT_ONCE = 50
PROMOTED = "promoted"
"""Whom a promoted log belongs to, until a node claims it."""


class PromotedLog(NamedTuple):
    """A topic without partitions, a partition or an engine: where the catalog and the replica end, by offsets or by
    seqs. `in_catalog` is None where the catalog does not know it, `in_replica` where the replica has nothing of it."""

    kind: Kind
    name: str
    in_catalog: int | None
    in_replica: int | None
    unshipped: int | None = None
    """Messages or entries that nodes had not shipped when they reported last, those in flushes among them; of all
    partitions of a topic, at its first one. None: nobody has reported it."""

    @property
    def lost(self) -> int | None:
        """How many messages are gone, or seqs: as many entries at most. None: unknown."""
        return None if self.in_catalog is None else max(0, self.in_catalog - (self.in_replica or 0))


class _Name(NamedTuple):
    kind: Kind
    text: str


class Promotion(NamedTuple):
    """What a promotion would do."""

    store: str
    first: str
    logs: tuple[PromotedLog, ...]
    has_reports: bool = False
    """Whether it is an installation of a cluster, whose nodes report what they have not shipped."""

    def lost(self, kind: Kind) -> int | None:
        """Messages of topics, or seqs of engines; None: of some it is unknown."""
        lost = [log.lost for log in self.logs if log.kind == kind]
        return None if None in lost else sum(one for one in lost if one is not None)

    def unshipped(self, kind: Kind) -> int | None:
        """What nodes had not shipped besides, when they reported last. None: nobody has reported."""
        found = [log.unshipped for log in self.logs if log.kind == kind and log.unshipped is not None]
        return sum(found) if found or self.has_reports else None


def plan_promotion(metadata: MetadataStore, root: str, replica: ObjectStore) -> Promotion:
    """What would be lost. Changes nothing; ConfigError where the store is no replica of this installation."""
    copies = open_metadata_store(BUCKET, replica, read_only=True)
    known, copied = _ends(metadata, root), _ends(copies, root)
    if not copied:
        raise ConfigError(
            f"{replica.url} is no replica: it has no topic and no engine below the root {root!r}",
            hint="Name a store that is among the `replicas` of the topics and engines",
        )
    first = _bound_store(metadata, root)
    if first == replica.url:
        raise ConfigError(f"{replica.url} is the first store of this installation already")
    strangers = [name for name, end in copied.items() if name in known and known[name][1] != end[1]]
    if strangers:
        raise ConfigError(f"{replica.url} has another log than this installation under the name {strangers[0].text}")
    keys = ClusterKeys(root)
    has_reports = bool(metadata.keys(keys.node_ids_prefix))
    unshipped = _unshipped(metadata, keys)
    logs: list[PromotedLog] = []
    for name in sorted(known.keys() | copied.keys(), key=_order):
        in_catalog = known[name][0] if name in known else None
        in_replica = copied[name][0] if name in copied else None
        is_first = has_reports and all(_whole(_Name(log.kind, log.name)) != _whole(name) for log in logs[-1:])
        of_it = unshipped[_whole(name)] if is_first else None
        logs.append(PromotedLog(*name, in_catalog, in_replica, of_it))
    return Promotion(replica.url, first, tuple(logs), has_reports)


def _unshipped(metadata: MetadataStore, keys: ClusterKeys) -> Counter[_Name]:
    """By whole topics and engines, of all nodes."""
    found: Counter[_Name] = Counter()
    for entry in metadata.range(keys.tails_prefix):
        tail = decoded(entry, NodeTail)
        if tail is not None:
            found.update({_Name("topic", name): one.messages for name, one in tail.topics.items()})
            found.update({_Name("topic", name): messages for name, messages in tail.flushed.items()})
            found.update({_Name("engine", name): one.messages for name, one in tail.engines.items()})
    return found


def _parent(name: _Name) -> tuple[TopicName, int] | None:
    return None if name.kind == "engine" else TopicName(*name.text.split("/", 1)).parent()


def _whole(name: _Name) -> _Name:
    """The topic of a partition; the same of everything else."""
    parent = _parent(name)
    return name if parent is None else _Name(name.kind, str(parent[0]))


def _order(name: _Name) -> tuple[_Name, int]:
    """By name; partitions by number."""
    parent = _parent(name)
    return _whole(name), -1 if parent is None else parent[1]


def promote(metadata: MetadataStore, root: str, replica: ObjectStore, clock: Clock) -> Promotion:
    """Carries it out; InputError while a node is alive."""
    keys = ClusterKeys(root)
    _refuse_alive(metadata, keys)
    promotion = plan_promotion(metadata, root, replica)
    copies = open_metadata_store(BUCKET, replica, read_only=True)
    documents = {name: list(some) for name, some in _documents(copies, root)}
    for name, known in _documents(metadata, root):
        if name not in documents:
            # Placements first: after an interruption between the two, the next promotion finds the rest by its catalog.
            _commit(metadata, keys, [*_placements(metadata, keys, name), *(Delete(one.key) for one in known)])
    for name, found in documents.items():
        _bring(metadata, root, name, found, replica.url, clock)
    _refuse_alive(metadata, keys)
    StoreBinding(replica, metadata, root, clock).rebind()
    return promotion


def _refuse_alive(metadata: MetadataStore, keys: ClusterKeys) -> None:
    alive = [key.removeprefix(keys.nodes_prefix) for key in metadata.keys(keys.nodes_prefix)]
    if alive:
        raise InputError(
            f"these nodes are alive: {', '.join(alive)}",
            hint="Stop them, or wait until their leases have run out; a promotion that had begun goes on then",
        )


def _placements(metadata: MetadataStore, keys: ClusterKeys, name: _Name) -> list[Write]:
    """Who served it: nobody is to open it as a new one."""
    if name.kind == "topic":
        return [Delete(keys.topic(*name.text.split("/", 1)))]
    found = {entry.key: decoded(entry, EnginePlacement) for entry in metadata.range(keys.engines_prefix)}
    return [
        Delete(key)
        for key, one in found.items()
        if one is not None
        and one.arguments.store is None
        and (one.arguments.name or key.removeprefix(keys.engines_prefix)) == name.text
    ]


def _bring(metadata: MetadataStore, root: str, name: _Name, found: Sequence[Entry], store: str, clock: Clock) -> None:
    """The catalog of one name as the replica has it, in place of the one that is there."""
    topic, keys = _keys_of(name, root), ClusterKeys(root)
    there = {entry.key: entry for entry in metadata.range(topic.metadata_prefix)}
    wanted = {entry.key: entry.value for entry in found}
    if topic.owner in wanted:
        owner = decode_json(wanted[topic.owner], topic.owner, Owner)
        known = decode_json(there[topic.owner].value, topic.owner, Owner) if topic.owner in there else owner
        claim = new_claim()
        promoted = Owner(
            epoch=max(owner.epoch, known.epoch) + 1,
            claim=claim,
            incarnation=claim,
            node=PROMOTED,
            claimed_us=clock.now_us(),
            log_id=owner.log_id,
        )
        _commit(metadata, keys, [Put(topic.owner, encode_json(promoted))])  # first: earlier owners are fenced
        del wanted[topic.owner]
    if topic.settings in wanted:
        wanted[topic.settings] = _without_replica(wanted[topic.settings], store)
    kept = {topic.owner, *wanted}
    writes: list[Write] = [Delete(key) for key in there if key not in kept]
    _commit(metadata, keys, [*writes, *(Put(key, value) for key, value in wanted.items())])


def _without_replica(settings: bytes, store: str) -> bytes:
    """A store is no replica of itself."""
    own = msgspec.json.decode(settings, type=dict[str, object])
    replicas = own.get("replicas")
    if isinstance(replicas, list):
        own["replicas"] = [url for url in replicas if url != store]
    return msgspec.json.encode(own)


def _commit(metadata: MetadataStore, keys: ClusterKeys, writes: Sequence[Write]) -> None:
    for first in range(0, len(writes), _WRITES_AT_ONCE):
        _refuse_alive(metadata, keys)
        metadata.commit([], writes[first : first + _WRITES_AT_ONCE])


def _documents(metadata: MetadataStore, root: str) -> Iterator[tuple[_Name, list[Entry]]]:
    """All documents of topics and engines, by what they are of."""

    def topic_of(entry: Entry) -> str:
        found = parse_topic_key(entry.key, root)
        return "" if found is None else f"{found.namespace}/{found.topic}"

    def engine_of(entry: Entry) -> str:
        return entry.key.removeprefix(engines_prefix(root)).partition("/")[0]

    for name, entries in groupby(metadata.range(topics_prefix(root)), key=topic_of):
        if name:
            yield _Name("topic", name), list(entries)
    for name, entries in groupby(metadata.range(engines_prefix(root)), key=engine_of):
        if is_part(name):
            yield _Name("engine", name), list(entries)


def _keys_of(name: _Name, root: str) -> TopicKeys:
    if name.kind == "engine":
        return EngineKeys(name.text, root)
    namespace, topic = name.text.split("/", 1)
    return TopicKeys(namespace, topic, root)


def _ends(metadata: MetadataStore, root: str) -> dict[_Name, tuple[int, str]]:
    """Where each log ends in a catalog, and which log it is."""
    found = {}
    for name, _ in _documents(metadata, root):
        keys = _keys_of(name, root)
        catalog = Catalog(metadata, keys)
        owner = catalog.owner()
        if owner is not None:
            end = _last_seq(metadata, keys) if isinstance(keys, EngineKeys) else catalog.next_offset()
            found[name] = end, owner[0].log_id
    return found


def _last_seq(metadata: MetadataStore, keys: EngineKeys) -> int:
    manifest = read_manifest(metadata, keys)
    return 0 if manifest is None else manifest.value.high_water_mark


def _bound_store(metadata: MetadataStore, root: str) -> str:
    entry = metadata.get(store_key(root))
    return "" if entry is None else decode_json(entry.value, entry.key, BoundStore).store
