"""What operators ask of a cluster, on its documents: look, plan, move, drain, balance, settings.

Invariants
- Everything works on the metadata store alone, beside nodes that run or do not: a change is a document, and the leader
  carries it out.
- A plan is made by the function that the leader uses, from the same documents.
- Nothing here waits longer than it was told to.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from tidelog.clock import Clock, SystemClock, to_datetime
from tidelog.cluster.documents import (
    NOBODY,
    ClusterSettings,
    ClusterState,
    Decision,
    Decisions,
    EngineArguments,
    EnginePlacement,
    Request,
    TopicPlacement,
    decoded,
)
from tidelog.cluster.leader import LeaderRounds, read_decisions, read_loads
from tidelog.cluster.load_manager import Candidate, imbalance, plan
from tidelog.cluster.member import changed_drain
from tidelog.cluster.promotion import Promotion, plan_promotion, promote
from tidelog.errors import ConfigError, ConflictError, InputError, NotFoundError, StoreUnavailableError
from tidelog.fields import read_keywords
from tidelog.service.cluster_control import (
    ClusterEngine,
    ClusterNode,
    ClusterStatus,
    ClusterTopic,
    NodeLoad,
    NodeTail,
    Unsaved,
    Unshipped,
)
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import DEFAULT_ENGINE, ClusterKeys, is_part
from tidelog.store.metadata.base import Check, Delete, MetadataStore, Put
from tidelog.store.metadata.open import canonical_metadata_url
from tidelog.store.metadata.watch import Changes
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import in_thread
from tidelog.store.urls import canonical_url, is_store_directory
from tidelog.topics.names import TopicName, parse_topic_name

_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 2.0
"""etcd answers in milliseconds, and operators look here when it does not."""


def _no_engine(name: str) -> NotFoundError:
    return NotFoundError(f"the cluster has no engine {name[:80]}", hint="`tidelog cluster engines` lists them")


def _check_reachable(name: str, store: str) -> None:
    """InputError for a store that no node will ever find an engine in, as far as this machine can tell."""
    if canonical_url(store).startswith("memory:"):
        raise InputError(
            "a memory:// store is gone with its process, and no node reaches it",
            hint="Name a store that all nodes reach, such as s3://bucket/prefix",
        )
    if not is_store_directory(store):
        raise InputError(
            f"there is no engine at {store}: this machine has no such directory",
            hint="Check the path, which is to be the same on all nodes. "
            f"If only they have it, ask one of them: PUT /v1/cluster/engines/{name}",
        )


def _no_topic(name: TopicName) -> NotFoundError:
    return NotFoundError(f"the cluster has no topic {name}", hint="`tidelog cluster topics` lists them")


def _failing_engines(state: ClusterState, loads: Mapping[str, NodeLoad]) -> dict[str, str]:
    """Why engines are not served, as the nodes have reported it last."""
    return {
        name: f"{node}: {reason}"
        for node, load in sorted(loads.items())
        if node in state.nodes
        for name, reason in load.failing_engines.items()
        if name in state.engines
    }


def _unsaved(
    node: str,
    is_alive: bool,
    reported: datetime,
    one: Unshipped,
    *,
    topic: str = "",
    engine: str = "",
    to_rescue: bool = False,
) -> Unsaved:
    return Unsaved(
        node=node,
        is_alive=is_alive,
        reported=reported,
        topic=topic,
        engine=engine,
        messages=one.messages,
        bytes=one.bytes,
        seconds=one.seconds,
        to_rescue=to_rescue,
    )


class ClusterOperations:
    """A cluster, seen from outside. Every call reads the documents again."""

    def __init__(self, metadata: MetadataStore, root: str, clock: Clock | None = None) -> None:
        if not metadata.supports_leases:
            raise ConfigError(
                f"{metadata.url} has no cluster: nodes agree by etcd", hint="Name it with --metadata etcd://host:port"
            )
        self._metadata = metadata
        self._root = root
        self._clock = clock or SystemClock()
        self.keys = ClusterKeys(root)

    def plan_promotion(self, replica: ObjectStore) -> Promotion:
        """What would be lost if this replica became the first store."""
        return plan_promotion(self._metadata, self._root, replica)

    def promote(self, replica: ObjectStore) -> Promotion:
        """Makes this replica the first store; InputError while a node is alive."""
        return promote(self._metadata, self._root, replica, self._clock)

    def state(self) -> ClusterState:
        """The documents as they are now. StoreUnavailableError soon if etcd does not answer."""

        def ask() -> None:
            self._metadata.get(self.keys.leader)

        asked = in_thread(ask, "tidelog-cluster-question")
        try:
            asked.result(_ANSWER_SECONDS)
        except TimeoutError:
            raise StoreUnavailableError(
                f"{self._metadata.url} gave no answer within {_ANSWER_SECONDS:g} s",
                hint="Look at its members: most of them have to run. Nodes serve until their leases run out",
            ) from None
        return self._documents()

    def _documents(self) -> ClusterState:
        state = ClusterState(self.keys)
        state.apply(Changes(True, {entry.key: entry for entry in self._metadata.range(self.keys.prefix)}))
        return state

    def loads(self) -> dict[str, NodeLoad]:
        return read_loads(self._metadata, self.keys)

    def decisions(self, since_us: int = 0) -> list[Decisions]:
        """What was decided, the oldest first."""
        return read_decisions(self._metadata, self.keys, since_us)

    # Looking

    def nodes(self, state: ClusterState | None = None) -> list[ClusterNode]:
        """All nodes that were ever members."""
        state, loads = state or self.state(), self.loads()
        counts = Counter(node for placement in state.topics.values() for node in placement.partitions)
        return [self._row(state, name, counts[name], loads.get(name)) for name in sorted(state.node_ids)]

    def topics(self) -> list[ClusterTopic]:
        """All topics, by name, and who serves their partitions."""
        state = self.state()
        return [
            ClusterTopic(
                name=str(name),
                partitions=tuple(node if node in state.nodes else None for node in placement.partitions),
                pins=placement.pins,
            )
            for name, placement in sorted(state.topics.items())
            if not placement.is_deleting
        ]

    def engines(self) -> list[ClusterEngine]:
        """All engines, by name."""
        state = self.state()
        unshipped = {one.engine: one.messages for one in self.restore_point(state) if one.engine and one.is_alive}
        reasons = _failing_engines(state, self.loads())
        return [
            ClusterEngine(
                name=name,
                node=one.node if one.node in state.nodes else None,
                state="failing" if name in reasons else "assigned" if one.node in state.nodes else "unassigned",
                pin=one.pin or None,
                store=one.arguments.store,
                unshipped=unshipped.get(name, 0),
                reason=reasons.get(name),
            )
            for name, one in sorted(state.engines.items())
        ]

    def _row(self, state: ClusterState, name: str, partitions: int, load: NodeLoad | None) -> ClusterNode:
        info, slots = state.nodes.get(name), state.coordinators.slots.count(name)
        engines = sum(one.node == name for one in state.engines.values())
        if info is None:
            condition = "gone"
        elif info.is_leaving:
            condition = "leaving"
        elif state.is_draining(name):
            has_some = partitions or engines or slots or (load is not None and load.releasing)
            condition = "draining" if has_some else "drained"
        else:
            condition = "alive"
        return ClusterNode(
            name=name,
            state=condition,
            node_id=state.node_ids[name].node_id,
            kafka="" if info is None else info.kafka,
            http="" if info is None else info.http,
            zone="" if info is None else info.zone,
            version="" if info is None else info.version,
            is_leader=state.leader is not None and state.leader.node == name,
            partitions=partitions,
            engines=engines,
            slots=slots,
            load=load,
        )

    def status(self) -> ClusterStatus:
        """The cluster in a few numbers."""
        state, loads = self.state(), self.loads()
        owners = [node for placement in state.topics.values() for node in placement.partitions]
        unsaved = self.restore_point(state)
        lost = [one for one in unsaved if one.topic and one.is_alive and not one.to_rescue]
        return ClusterStatus(
            leader=None if state.leader is None else state.leader.node,
            nodes=len(state.nodes),
            topics=len(state.topics),
            partitions=len(owners),
            unassigned=sum(node not in state.nodes for node in owners),
            engines=len(state.engines),
            unassigned_engines=sum(one.node not in state.nodes for one in state.engines.values()),
            failing_engines=len(_failing_engines(state, loads)),
            moving=sum(load.opening for name, load in loads.items() if name in state.nodes),
            strategy=state.settings.strategy,
            imbalance=round(imbalance(self._situation(state, loads)), 3),
            requests=len(state.requests),
            unshipped_messages=sum(one.messages for one in lost),
            unshipped_bytes=sum(one.bytes for one in lost),
            unshipped_seconds=max((one.seconds for one in lost), default=0.0),
            unshipped_entries=sum(one.messages for one in unsaved if one.engine and one.is_alive),
            left_messages=sum(one.messages for one in unsaved if one.to_rescue or (one.topic and not one.is_alive)),
        )

    def restore_point(self, state: ClusterState | None = None) -> list[Unsaved]:
        """What is only on the disk of one node, as the nodes have reported it last, those that are gone, too; what they
        keep for a rescue among it."""
        state, topics, engines = state or self.state(), [], []
        for entry in self._metadata.range(self.keys.tails_prefix):
            tail, node = decoded(entry, NodeTail), entry.key.removeprefix(self.keys.tails_prefix)
            if tail is not None:
                row = partial(_unsaved, node, node in state.nodes, to_datetime(tail.at_us))
                topics += [row(one, topic=topic) for topic, one in sorted(tail.topics.items())]
                topics += [row(one, topic=topic, to_rescue=True) for topic, one in sorted(tail.kept.items())]
                engines += [row(one, engine=engine) for engine, one in sorted(tail.engines.items())]
        return topics + engines

    # Planning

    def _situation(self, state: ClusterState, loads: Mapping[str, NodeLoad]) -> Any:
        return LeaderRounds(self._metadata, self.keys, self._clock, "").situation(state, loads)

    def plan(self, *, drain: Iterable[str] = (), lose: Iterable[str] = (), balance: bool = False) -> list[Decision]:
        """What the leader would decide now; with nodes drained or lost, or as if balance were asked for."""
        state = self.state()
        drained, gone = self._known(state, drain), self._known(state, lose)
        situation = self._situation(state, self.loads())
        nodes = {name: node for name, node in situation.nodes.items() if name not in gone}
        nodes |= {
            name: Candidate(name, nodes[name].zone, False, f"{name} is drained") for name in drained if name in nodes
        }
        requests = dict(state.requests)
        if balance:
            requests["plan"] = Request(kind="balance", asked_us=0)
        whole = msgspec.structs.replace(state.settings, max_moves_at_once=1_000_000)
        return plan(msgspec.structs.replace(situation, nodes=nodes, requests=requests, settings=whole, is_settled=True))

    def _known(self, state: ClusterState, names: Iterable[str]) -> set[str]:
        for name in names:
            if name not in state.node_ids:
                raise NotFoundError(f"the cluster has no node {name}", hint="`tidelog cluster nodes` lists them")
        return set(names)

    # Asking

    def move(self, topic: str, partition: int, node: str, *, pin: bool = False, by: str = "") -> str:
        """Asks for a move; returns the name of the request. NotFoundError, InputError for what cannot be."""
        state = self.state()
        self._known(state, [node])
        placement = self._placement(state, parse_topic_name(topic))
        if not 0 <= partition < len(placement.partitions):
            raise NotFoundError(
                f"{topic} has {len(placement.partitions)} partitions, and none has the number {partition}",
                hint=f"Name one from 0 to {len(placement.partitions) - 1}",
            )
        if not state.is_usable(node):
            raise InputError(f"{node} gets no partitions: it is gone, drained or too old", hint="Choose another node")
        return self._ask(
            Request(
                kind="move", asked_us=self._clock.now_us(), by=by, topic=topic, partition=partition, node=node, pin=pin
            )
        )

    def move_engine(self, engine: str, node: str, *, pin: bool = False, by: str = "") -> str:
        """Asks for the move of an engine; returns the name of the request."""
        state = self.state()
        self._known(state, [node])
        if engine not in state.engines:
            raise _no_engine(engine)
        if not state.is_usable(node):
            raise InputError(f"{node} gets no engines: it is gone, drained or too old", hint="Choose another node")
        asked_us = self._clock.now_us()
        return self._ask(Request(kind="move-engine", asked_us=asked_us, by=by, engine=engine, node=node, pin=pin))

    def unpin_engine(self, engine: str) -> bool:
        """Lets the load manager move an engine again; returns whether it was pinned."""
        was_pinned = False

        def change(known: EnginePlacement | None) -> EnginePlacement:
            nonlocal was_pinned
            if known is None:
                raise _no_engine(engine)
            was_pinned = bool(known.pin)
            return msgspec.structs.replace(known, pin=NOBODY)

        self._document(self.keys.engine(engine), EnginePlacement).update(change)
        return was_pinned

    def add_engine(
        self, name: str, *, store: str | None = None, metadata: str | None = None, must_exist: bool = False
    ) -> None:
        """From here on a node serves an engine of this name; ConflictError if there is one. With a `store` it is one
        that exists there, with its metadata in `metadata`, or in that store."""
        if not is_part(name):
            raise InputError(f"{name!r} cannot be the name of an engine", hint="Use letters, digits, `.`, `_` and `-`")
        if metadata is not None and store is None:
            raise InputError("the metadata of an engine goes with its store", hint="Name both, or none of them")
        arguments = EngineArguments(must_exist=must_exist)
        if store is not None:
            _check_reachable(name, store)
            own = None if metadata is None else canonical_metadata_url(metadata)
            arguments = EngineArguments(store=canonical_url(store), metadata=own, name=DEFAULT_ENGINE, must_exist=True)
        key, document = self.keys.engine(name), encode_json(EnginePlacement(arguments=arguments))
        try:
            self._metadata.commit([Check(key, None)], [Put(key, document)])
        except ConflictError as error:
            raise ConflictError(f"the cluster has an engine {name}") from error

    def remove_engine(self, name: str) -> None:
        """No node serves it any more. What its store has stays, and it can be added again."""
        key = self.keys.engine(name)
        found = self._metadata.get(key)
        if found is None:
            raise _no_engine(name)
        self._metadata.commit([Check(key, found.version)], [Delete(key)])

    def _placement(self, state: ClusterState, name: TopicName) -> TopicPlacement:
        placement = state.topics.get(name)
        if placement is None or placement.is_deleting:
            raise _no_topic(name)
        return placement

    def unpin(self, topic: str, partition: int) -> bool:
        """Lets the load manager move a partition again; returns whether it was pinned."""
        name, was_pinned = parse_topic_name(topic), False

        def change(known: TopicPlacement | None) -> TopicPlacement:
            nonlocal was_pinned
            if known is None:
                raise _no_topic(name)
            was_pinned = partition in known.pins
            pins = {number: node for number, node in known.pins.items() if number != partition}
            return msgspec.structs.replace(known, pins=pins)

        self._document(self.keys.topic(*name), TopicPlacement).update(change)
        return was_pinned

    def balance(self, by: str = "") -> str:
        """Asks for balance now, whatever was moved within the hour; returns the name of the request."""
        return self._ask(Request(kind="balance", asked_us=self._clock.now_us(), by=by))

    def _ask(self, request: Request) -> str:
        name = f"{request.asked_us:020d}-{secrets.token_hex(4)}"
        self._metadata.put(self.keys.request(name), encode_json(request))
        return name

    def drain(self, node: str) -> bool:
        """Moves everything off a node, and keeps it empty; returns whether that is news.

        InputError for one that is alive, where no other node can take anything.
        """
        state = self.state()
        if node in state.nodes and not any(state.is_usable(name) for name in state.nodes if name != node):
            raise InputError(
                f"no other node can take what {node} has: all are gone, drained or too old",
                hint="Start or undrain another node first; to stop all of them, just stop them",
            )
        return changed_drain(self._metadata, self.keys, node, is_draining=True)

    def undrain(self, node: str) -> bool:
        """The node may serve again; returns whether that is news."""
        return changed_drain(self._metadata, self.keys, node, is_draining=False)

    def settings(self, **changes: object) -> ClusterSettings:
        """The settings of the load manager, with these changes made; None takes one back."""
        defaults = ClusterSettings()
        given = {name: getattr(defaults, name, None) if value is None else value for name, value in changes.items()}
        read = read_keywords(ClusterSettings, given, "a setting of the cluster", ConfigError, is_text=True)

        def change(known: ClusterSettings | None) -> ClusterSettings:
            return msgspec.structs.replace(known or defaults, **read)

        document: VersionedDocument[ClusterSettings] = self._document(self.keys.settings, ClusterSettings)
        if not changes:
            found = document.read()
            return defaults if found is None else found.value
        return document.update(change)

    def _document(self, key: str, kind: type[Any]) -> VersionedDocument[Any]:
        return VersionedDocument(self._metadata, key, encode_json, lambda data, at: decode_json(data, at, kind))

    # Waiting

    def until(self, is_so: Callable[[ClusterState], bool], seconds: float) -> bool:
        """Waits for a state of the documents; returns whether it came in time."""
        deadline = time.monotonic() + seconds
        while not is_so(self._documents()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def is_empty(self, node: str) -> Callable[[ClusterState], bool]:
        """Whether nothing is assigned to a node any more, and it has said since that it has let go of everything."""
        said_before: int | None = None

        def check(state: ClusterState) -> bool:
            nonlocal said_before
            is_assigned = any(node in placement.partitions for placement in state.topics.values())
            has_engine = any(one.node == node for one in state.engines.values())
            if is_assigned or has_engine or node in state.coordinators.slots:
                return False
            load = self.loads().get(node)
            if load is None or node not in state.nodes:
                return True
            if said_before is None:
                said_before = load.at_us
            return load.at_us != said_before and load.open == 0 and load.engines == 0 and load.releasing == 0

        return check

    def is_carried_out(self, request: str) -> Callable[[ClusterState], bool]:
        """Whether the leader has done with a request."""
        return lambda state: request not in state.requests
