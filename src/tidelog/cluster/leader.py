"""What the leader does: from the documents of the cluster to a plan, and from the plan to the documents.

Invariants
- Every write of the leader checks the leader's document in the same transaction: a node that was replaced as the leader
  changes nothing any more, however long it slept.
- A topic's document is replaced on the version that the plan was made from; what was changed since is planned again.
- What was decided is written in the same transaction as its consequence: there is no move without its reason.
- The log of decisions is bounded: the oldest go.
- A leader that is new reads the decisions of the last hour: limits an hour hold over changes of the leader.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidelog.clock import Clock
from tidelog.cluster.documents import (
    NOBODY,
    ClusterState,
    Coordinators,
    Decision,
    Decisions,
    NodeLoad,
    Request,
    TopicPlacement,
    decoded,
    is_too_old,
)
from tidelog.cluster.load_manager import HOUR_US, Candidate, Situation, plan
from tidelog.errors import ConflictError
from tidelog.store.document import encode_json
from tidelog.store.keys import ClusterKeys
from tidelog.store.metadata.base import Check, Delete, Entry, MetadataStore, Put, Write
from tidelog.topics.names import TopicName

_logger = logging.getLogger("tidelog.cluster")
MAX_DECISIONS = 1000
"""Documents of decisions that are kept."""
_REPORTED_SECONDS = 1.0
_RESTING = ("balance", "move")
_MOVED = "%s: %s goes from %s to %s: %s"
_DOCUMENTS_AT_ONCE = 50  # etcd takes 128 operations in one transaction


class TopicSeen(NamedTuple):
    """A topic of the catalog that the cluster may not know."""

    created_us: int
    partitions: int


class _Change(NamedTuple):
    """A document that gets another value, with the decisions that are its reasons."""

    key: str
    version: str | None
    value: bytes | None
    decisions: list[Decision]


class LeaderRounds:
    """The rounds of a leader. One thread uses it."""

    def __init__(self, metadata: MetadataStore, keys: ClusterKeys, clock: Clock, node: str) -> None:
        self._metadata = metadata
        self._keys = keys
        self._clock = clock
        self._node = node
        self._moved_us: dict[str, int] | None = None
        self._first_seen: dict[str, float] = {}
        self._strays: set[TopicName] = set()
        self._last_us = 0
        self._issued: list[tuple[float, int]] = []
        self.decided = 0

    def forget(self) -> None:
        """This node does not lead any more."""
        self._moved_us = None
        self._first_seen.clear()
        self._strays.clear()

    # Planning

    def situation(self, state: ClusterState, loads: Mapping[str, NodeLoad]) -> Situation:
        """What a plan depends on, by the documents."""
        moved = self._moved()
        now = self._clock.monotonic()
        is_first = not self._first_seen
        for name in state.nodes:
            self._first_seen.setdefault(name, float("-inf") if is_first else now)
        for name in self._first_seen.keys() - state.nodes.keys():
            del self._first_seen[name]
        newest = max(self._first_seen.values(), default=float("-inf"))
        return Situation(
            now_us=self._clock.now_us(),
            settings=state.settings,
            nodes={name: candidate(state, name) for name in sorted(state.nodes)},
            topics=state.topics,
            engines=state.engines,
            coordinators=state.coordinators,
            loads={key: load for one in loads.values() for key, load in one.partitions.items()},
            requests=state.requests,
            moved_us=moved,
            under_way=self._under_way(now, sum(one.opening for name, one in loads.items() if name in state.nodes)),
            is_settled=now - newest >= state.settings.settle_seconds,
        )

    def _under_way(self, now: float, reported: int) -> int:
        """What was decided a moment ago counts, whether the nodes have reported it or not."""
        self._issued = [(at, count) for at, count in self._issued if now - at < _REPORTED_SECONDS]
        return max(reported, sum(count for _, count in self._issued))

    def _moved(self) -> dict[str, int]:
        """When partitions were moved for the sake of balance in the last hour, also by leaders before this one."""
        since_us = max(0, self._clock.now_us() - HOUR_US)
        if self._moved_us is None:
            self._moved_us = {}
            for rounds in read_decisions(self._metadata, self._keys, since_us):
                for decision in rounds.decisions:
                    if decision.kind in _RESTING:
                        self._moved_us[decision.subject] = rounds.at_us
        self._moved_us = {key: at_us for key, at_us in self._moved_us.items() if at_us > since_us}
        return self._moved_us

    # A round

    def round(self, state: ClusterState, loads: Mapping[str, NodeLoad], leads_by: Check) -> list[Entry]:
        """Plans and carries it out; returns what was written, for `ClusterState.written`."""
        situation = self.situation(state, loads)
        decisions = plan(situation)
        changes = [*self._topic_changes(state, decisions), *self._other_changes(state, decisions)]
        changes += self._request_changes(state, decisions)
        written: list[Entry] = []
        for first in range(0, len(changes), _DOCUMENTS_AT_ONCE):
            written += self._write(changes[first : first + _DOCUMENTS_AT_ONCE], leads_by)
        return written

    def _topic_changes(self, state: ClusterState, decisions: Sequence[Decision]) -> Iterable[_Change]:
        by_topic: dict[TopicName, list[Decision]] = defaultdict(list)
        for decision in decisions:
            if decision.topic:
                by_topic[TopicName(*decision.topic.split("/", 1))].append(decision)
        pins = {(request.topic, request.partition): request.node for request in _moves(state) if request.pin}
        unpinned = {(request.topic, request.partition) for request in _moves(state) if not request.pin}
        for topic, some in by_topic.items():
            placement = state.topics[topic]
            nodes, kept = list(placement.partitions), dict(placement.pins)
            for decision in some:
                nodes[decision.partition] = decision.to
                if decision.kind == "move":
                    at = (decision.topic, decision.partition)
                    if at in pins:
                        kept[decision.partition] = pins[at]
                    elif at in unpinned:
                        kept.pop(decision.partition, None)
            changed = msgspec.structs.replace(placement, partitions=tuple(nodes), pins=kept)
            key = self._keys.topic(*topic)
            yield _Change(key, state.versions.get(key), encode_json(changed), some)

    def _other_changes(self, state: ClusterState, decisions: Sequence[Decision]) -> Iterable[_Change]:
        slots = {decision.slot: decision for decision in decisions if decision.slot >= 0}
        if slots:
            nodes = [slots[n].to if n in slots else node for n, node in enumerate(state.coordinators.slots)]
            key = self._keys.coordinators
            document = encode_json(Coordinators(slots=tuple(nodes)))
            yield _Change(key, state.versions.get(key), document, list(slots.values()))
        pins = {request.engine: request.node if request.pin else NOBODY for request in _moves(state, "move-engine")}
        for decision in decisions:
            if decision.engine:
                placement = state.engines[decision.engine]
                pin = pins.get(decision.engine, placement.pin) if decision.kind == "move" else placement.pin
                changed = msgspec.structs.replace(placement, node=decision.to, pin=pin)
                key = self._keys.engine(decision.engine)
                yield _Change(key, state.versions.get(key), encode_json(changed), [decision])

    def _request_changes(self, state: ClusterState, decisions: Sequence[Decision]) -> Iterable[_Change]:
        """Those that are carried out, or never can be. A request for balance goes when there is nothing to move."""
        is_balanced = not any(decision.kind in ("balance", "drain") for decision in decisions)
        for name, request in state.requests.items():
            if is_balanced if request.kind == "balance" else self._is_done(state, request, decisions):
                key = self._keys.request(name)
                yield _Change(key, state.versions.get(key), None, [])

    def _is_done(self, state: ClusterState, request: Request, decisions: Sequence[Decision]) -> bool:
        if request.kind == "move-engine":
            return self._is_engine_done(state, request, decisions)
        topic = TopicName(*request.topic.split("/", 1))
        placement = state.topics.get(topic)
        if placement is None or not 0 <= request.partition < len(placement.partitions):
            _logger.warning("there is no partition %s/%d to move", request.topic, request.partition)
            return True
        if not state.is_usable(request.node):
            _logger.warning(
                "%s/%d is not moved to %s, which is not there to serve", request.topic, request.partition, request.node
            )
            return True
        if placement.partitions[request.partition] == request.node:
            return True
        at = (request.topic, request.partition)
        return any((one.topic, one.partition) == at and one.kind == "move" for one in decisions)

    def _is_engine_done(self, state: ClusterState, request: Request, decisions: Sequence[Decision]) -> bool:
        placement = state.engines.get(request.engine)
        if placement is None or not state.is_usable(request.node):
            _logger.warning("the engine %s cannot be moved to %s", request.engine, request.node)
            return True
        if placement.node == request.node:
            return True
        return any(one.engine == request.engine and one.kind == "move" for one in decisions)

    # Writing

    def _write(self, changes: Sequence[_Change], leads_by: Check) -> list[Entry]:
        """One transaction; nothing is written if another node leads, or one of the documents was changed meanwhile."""
        at_us = self._last_us = max(self._clock.now_us(), self._last_us + 1)
        decisions = [decision for change in changes for decision in change.decisions]
        checks = [leads_by, *(Check(change.key, change.version) for change in changes)]
        writes: list[Write] = [
            Delete(change.key) if change.value is None else Put(change.key, change.value) for change in changes
        ]
        if decisions:
            log = Decisions(at_us=at_us, leader=self._node, decisions=decisions)
            writes.append(Put(self._keys.decision(at_us), encode_json(log)))
        try:
            versions = self._metadata.commit(checks, writes)
        except ConflictError:
            _logger.info("the documents of the cluster were changed while a plan was made: it is made again")
            return []
        self._tell(decisions, at_us)
        return [Entry(change.key, change.value, versions[change.key]) for change in changes if change.value is not None]

    def _tell(self, decisions: Sequence[Decision], at_us: int) -> None:
        if self._moved_us is None:
            self._moved_us = {}
        self.decided += len(decisions)
        self._issued.append((self._clock.monotonic(), sum(decision.slot < 0 for decision in decisions)))
        slots: dict[tuple[str, str], list[str]] = defaultdict(list)
        for decision in decisions:
            if decision.kind in _RESTING:
                self._moved_us[decision.subject] = at_us
            source = decision.source or "nobody"
            if decision.slot >= 0:
                slots[source, decision.to].append(str(decision.slot))
            else:
                _logger.info(_MOVED, decision.kind, decision.subject, source, decision.to, decision.reason)
        for (source, to), some in slots.items():
            _logger.info("the coordinator slots %s go from %s to %s", ",".join(some), source, to)

    def trim(self) -> None:
        """Forgets the oldest decisions, now and then."""
        keys = self._metadata.keys(self._keys.decisions_prefix)
        for first in range(0, len(keys) - MAX_DECISIONS, _DOCUMENTS_AT_ONCE):
            oldest = keys[first : min(first + _DOCUMENTS_AT_ONCE, len(keys) - MAX_DECISIONS)]
            self._metadata.commit([], [Delete(key) for key in oldest])

    # Topics that the cluster does not know

    def adopt(
        self, state: ClusterState, seen: Mapping[TopicName, TopicSeen], leads_by: Check, new_id: Callable[[], str]
    ) -> list[Entry]:
        """Makes documents for topics of the catalog without one: of the time before the cluster, or made by a program
        that opened the store itself. Each must have been seen twice, so that one that is being deleted is not."""
        strays = seen.keys() - state.topics.keys()
        found, self._strays = sorted(strays & self._strays), set(strays)
        if not state.topics:
            found = sorted(strays)  # the cluster begins
        written: list[Entry] = []
        for topic in found:
            facts = seen[topic]
            placement = TopicPlacement(id=new_id(), created_us=facts.created_us, partitions=("",) * facts.partitions)
            written += self._write([_Change(self._keys.topic(*topic), None, encode_json(placement), [])], leads_by)
        return written


def candidate(state: ClusterState, name: str) -> Candidate:
    """A node as the load manager sees it."""
    info = state.nodes[name]
    why_not = ""
    if info.is_leaving:
        why_not = f"{name} is being stopped"
    elif state.is_draining(name):
        why_not = f"{name} is being drained"
    elif is_too_old(info.version, state.settings.minimum_version):
        why_not = f"{name} has version {info.version or '?'}, older than {state.settings.minimum_version}"
    return Candidate(name, info.zone, not why_not, why_not)


def _moves(state: ClusterState, kind: str = "move") -> list[Request]:
    return [request for request in state.requests.values() if request.kind == kind]


def read_loads(metadata: MetadataStore, keys: ClusterKeys) -> dict[str, NodeLoad]:
    """What the nodes have told last."""
    found = (decoded(entry, NodeLoad) for entry in metadata.range(keys.loads_prefix))
    return {load.node: load for load in found if load is not None}


def read_decisions(metadata: MetadataStore, keys: ClusterKeys, since_us: int = 0) -> list[Decisions]:
    """The rounds in which something was decided, the oldest first."""
    entries = metadata.range(keys.decisions_prefix, start=keys.decision(since_us))
    return [found for entry in entries if (found := decoded(entry, Decisions)) is not None]
