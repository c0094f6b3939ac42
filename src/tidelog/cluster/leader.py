"""What the leader does: from the documents of the cluster to a plan, and from the plan to the documents.

Invariants
- Every write of the leader checks the leader's document in the same transaction: a node that was replaced as the leader
  changes nothing any more, however long it slept.
- A topic's document is replaced on the version that the plan was made from; what was changed since is planned again.
- What was decided is written in the same transaction as its consequence: there is no move without its reason.
- A request goes after its consequences were written, among them the pin that it sets or ends, also if it made no move.
- The log of decisions is bounded: the oldest go.
- A leader that is new reads the decisions of the last hour: limits an hour hold over changes of the leader. From there
  on it counts by a clock that never jumps.
- A leader that is new and finds more than half of all partitions without a living node lets the others come for a
  moment: after a start of all nodes, or after etcd was away, the first one is not given everything.
- A transaction has a size that etcd takes, however many partitions a topic has: what is more goes into the next one.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidelog.clock import Clock
from tidelog.cluster.documents import (
    NOBODY,
    ClusterState,
    Coordinators,
    Decision,
    Decisions,
    Request,
    TopicPlacement,
    decoded,
    is_too_old,
)
from tidelog.cluster.inventory import Inventory
from tidelog.cluster.load_manager import HOUR_SECONDS, Candidate, Situation, plan
from tidelog.errors import ConflictError
from tidelog.service.cluster_control import NodeLoad
from tidelog.store.document import encode_json
from tidelog.store.keys import ClusterKeys
from tidelog.store.metadata.base import Check, Delete, Entry, MetadataStore, Put, Write
from tidelog.store.metadata.watch import Changes
from tidelog.topics.names import TopicName

_logger = logging.getLogger("tidelog.cluster")
MAX_DECISIONS = 1000
"""Documents of decisions that are kept."""
_REPORTED_SECONDS = 1.0
_GATHER_SECONDS = 1.0
_RESTING = ("balance", "move")
_MOVED = "%s: %s goes from %s to %s: %s"
_DOCUMENTS_AT_ONCE = 50  # etcd takes 128 operations in one transaction,
_DECISIONS_AT_ONCE = 2000  # and 1.5 MiB: a decision has about 150 bytes
_BYTES_AT_ONCE = 512 << 10


class TopicSeen(NamedTuple):
    """A topic of the catalog that the cluster may not know."""

    created_us: int
    partitions: int


class _Change(NamedTuple):
    """A document that gets another value, with the decisions that are its reasons."""

    key: str
    value: bytes | None
    decisions: list[Decision]


class _Moves:
    """Moves of the last hour that count for limits."""

    def __init__(self) -> None:
        self.times: deque[float] = deque()
        self.last_at: dict[str, float] = {}

    def add(self, decisions: Iterable[Decision], at: float) -> None:
        for decision in decisions:
            if decision.kind in _RESTING:
                self.times.append(at)
                self.last_at.pop(decision.subject, None)  # the oldest stand first
                self.last_at[decision.subject] = at

    def forget_before(self, since: float) -> None:
        while self.times and self.times[0] <= since:
            self.times.popleft()
        while self.last_at and self.last_at[oldest := next(iter(self.last_at))] <= since:
            del self.last_at[oldest]


class LeaderRounds:
    """The rounds of a leader. One thread uses it."""

    def __init__(self, metadata: MetadataStore, keys: ClusterKeys, clock: Clock, node: str) -> None:
        self._metadata = metadata
        self._keys = keys
        self._clock = clock
        self._node = node
        self._moves: _Moves | None = None
        self._inventory: Inventory | None = None
        self._first_seen: dict[str, float] = {}
        self._strays: set[TopicName] = set()
        self._last_us = 0
        self._began_at: float | None = None
        self.is_gathering = False
        """Whether the last round let other nodes come."""
        self._issued: list[tuple[float, int]] = []
        self.decided = 0

    def forget(self) -> None:
        """This node does not lead any more."""
        self._moves = self._inventory = None
        self._began_at = None
        self._first_seen.clear()
        self._strays.clear()

    # Planning

    def situation(self, state: ClusterState, loads: Mapping[str, NodeLoad]) -> Situation:
        """What a plan depends on, by the documents."""
        now = self._clock.monotonic()
        moves = self._known_moves()
        moves.forget_before(now - HOUR_SECONDS)
        is_first = not self._first_seen
        for name in state.nodes:
            self._first_seen.setdefault(name, float("-inf") if is_first else now)
        for name in self._first_seen.keys() - state.nodes.keys():
            del self._first_seen[name]
        newest = max(self._first_seen.values(), default=float("-inf"))
        return Situation(
            now=now,
            settings=state.settings,
            nodes={name: candidate(state, name, loads.get(name)) for name in sorted(state.nodes)},
            topics=state.topics,
            engines=state.engines,
            coordinators=state.coordinators,
            inventory=self._counted(state, loads, now),
            requests=state.requests,
            moved_at=moves.last_at,
            moves_this_hour=len(moves.times),
            under_way=self._under_way(now, sum(one.opening for name, one in loads.items() if name in state.nodes)),
            is_settled=now - newest >= state.settings.settle_seconds,
        )

    def _under_way(self, now: float, reported: int) -> int:
        """What was decided a moment ago counts, whether the nodes have reported it or not."""
        self._issued = [(at, count) for at, count in self._issued if now - at < _REPORTED_SECONDS]
        return max(reported, sum(count for _, count in self._issued))

    def _counted(self, state: ClusterState, loads: Mapping[str, NodeLoad], now: float) -> Inventory:
        if self._inventory is None or not self._inventory.fits(state.settings):
            self._inventory = Inventory(state.settings)
        self._inventory.follow(state.topics, loads, now, state.engines)
        return self._inventory

    def _known_moves(self) -> _Moves:
        """Those of the last hour, also of leaders before this one; their clocks may have been ahead of this one."""
        if self._moves is None:
            now, now_us = self._clock.monotonic(), self._clock.now_us()
            moves = _Moves()
            for rounds in read_decisions(self._metadata, self._keys, max(0, now_us - int(HOUR_SECONDS * 1e6))):
                self._last_us = max(self._last_us, rounds.at_us)
                moves.add(rounds.decisions, now - max(0, now_us - rounds.at_us) / 1e6)
            self._moves = moves
        return self._moves

    # A round

    def round(self, state: ClusterState, loads: Mapping[str, NodeLoad], leads_by: Check) -> list[Entry]:
        """Plans and carries it out; returns what was written, for `ClusterState.written`."""
        situation = self.situation(state, loads)
        self.is_gathering = self._waits_for_others(situation)
        if self.is_gathering:
            return []
        decisions = plan(situation)
        carried_out, ends = self._answered(state, decisions)
        changes = [
            *self._topic_changes(state, decisions, carried_out),
            *self._other_changes(state, decisions, carried_out),
        ]
        versions = dict(state.versions)
        written: list[Entry] = []
        is_whole = True
        for some in _transactions(changes):
            entries = self._write(some, versions, leads_by)
            is_whole = is_whole and bool(entries)
            versions.update((entry.key, entry.version) for entry in entries)
            written += entries
        if is_whole:
            for some in _transactions(ends):
                self._write(some, versions, leads_by)
        return written

    def _waits_for_others(self, situation: Situation) -> bool:
        if self._began_at is None:
            self._began_at = situation.now
        if situation.now - self._began_at >= _GATHER_SECONDS:
            return False
        counts = {} if self._inventory is None else self._inventory.counts()
        return 2 * sum(count for node, count in counts.items() if node not in situation.nodes) > sum(counts.values())

    def _topic_changes(
        self, state: ClusterState, decisions: Sequence[Decision], carried_out: Sequence[Request]
    ) -> Iterable[_Change]:
        by_topic: dict[TopicName, list[Decision]] = defaultdict(list)
        for decision in decisions:
            if decision.topic:
                by_topic[TopicName(*decision.topic.split("/", 1))].append(decision)
        pins: dict[TopicName, dict[int, str]] = defaultdict(dict)
        for request in carried_out:
            if request.kind == "move":
                pins[TopicName(*request.topic.split("/", 1))][request.partition] = _pin_of(request)
        for topic in {**by_topic, **pins}:
            before, all_of_it = state.topics[topic], by_topic.get(topic, [])
            placement = _pinned(before, pins.get(topic, {}))
            if not all_of_it and placement == before:
                continue
            for first in range(0, max(1, len(all_of_it)), _DECISIONS_AT_ONCE):
                some = all_of_it[first : first + _DECISIONS_AT_ONCE]
                placement = _placed(placement, some)
                key = self._keys.topic(*topic)
                yield _Change(key, encode_json(placement, state.values.get(key)), some)

    def _other_changes(
        self, state: ClusterState, decisions: Sequence[Decision], carried_out: Sequence[Request]
    ) -> Iterable[_Change]:
        slots = {decision.slot: decision for decision in decisions if decision.slot >= 0}
        if slots:
            nodes = [slots[n].to if n in slots else node for n, node in enumerate(state.coordinators.slots)]
            key = self._keys.coordinators
            document = encode_json(Coordinators(slots=tuple(nodes)), state.values.get(key))
            yield _Change(key, document, list(slots.values()))
        by_engine = {decision.engine: decision for decision in decisions if decision.engine}
        pins = {request.engine: _pin_of(request) for request in carried_out if request.kind == "move-engine"}
        for name in {**by_engine, **pins}:
            before, decision = state.engines[name], by_engine.get(name)
            node = before.node if decision is None else decision.to
            changed = msgspec.structs.replace(before, node=node, pin=pins.get(name, before.pin))
            if changed != before:
                key = self._keys.engine(name)
                yield _Change(key, encode_json(changed, state.values.get(key)), [] if decision is None else [decision])

    # Requests

    def _answered(
        self, state: ClusterState, decisions: Sequence[Decision]
    ) -> tuple[Sequence[Request], Sequence[_Change]]:
        """The moves that are carried out by these decisions, or were before, in the order in which they were asked for;
        and the ends of all requests that are over. Of several about one thing each waits for the one before it. A
        request for balance goes when there is nothing to move."""
        is_balanced = not any(decision.kind in ("balance", "drain") for decision in decisions)
        goes_to = {decision.subject: decision.to for decision in decisions}
        at: dict[str, str] = {}
        waiting: set[str] = set()
        carried_out: list[Request] = []
        ends: list[_Change] = []
        for name, request in sorted(state.requests.items()):
            subject, is_over = request.subject, is_balanced
            if request.kind != "balance":
                found = _where(state, request)
                is_over = found is None
                if found is not None and subject not in waiting:
                    is_over = request.node in (at.get(subject, found), goes_to.get(subject))
                    if is_over:
                        at[subject] = request.node
                        carried_out.append(request)
                    else:
                        waiting.add(subject)
            if is_over:
                ends.append(_Change(self._keys.request(name), None, []))
        return carried_out, ends

    # Writing

    def _write(self, changes: Sequence[_Change], known: Mapping[str, str], leads_by: Check) -> list[Entry]:
        """One transaction; nothing is written if another node leads, or one of the documents was changed meanwhile."""
        at_us = self._last_us = max(self._clock.now_us(), self._last_us + 1)
        decisions = [decision for change in changes for decision in change.decisions]
        checks = [leads_by, *(Check(change.key, known.get(change.key)) for change in changes)]
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
        self._tell(decisions)
        return [Entry(change.key, change.value, versions[change.key]) for change in changes if change.value is not None]

    def _tell(self, decisions: Sequence[Decision]) -> None:
        if self._moves is not None:
            self._moves.add(decisions, self._clock.monotonic())
        self.decided += len(decisions)
        self._issued.append((self._clock.monotonic(), sum(decision.slot < 0 for decision in decisions)))
        slots: dict[tuple[str, str], list[str]] = defaultdict(list)
        for decision in decisions:
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
            written += self._write([_Change(self._keys.topic(*topic), encode_json(placement), [])], {}, leads_by)
        return written


def _transactions(changes: Iterable[_Change]) -> Iterator[list[_Change]]:
    """As few as etcd takes: none too large, and each key once in one."""
    some: list[_Change] = []
    keys: set[str] = set()
    decisions = size = 0
    for change in changes:
        more_bytes = len(change.value or b"")
        if some and (
            len(some) >= _DOCUMENTS_AT_ONCE
            or change.key in keys
            or decisions + len(change.decisions) > _DECISIONS_AT_ONCE
            or size + more_bytes > _BYTES_AT_ONCE
        ):
            yield some
            some, keys, decisions, size = [], set(), 0, 0
        some.append(change)
        keys.add(change.key)
        decisions += len(change.decisions)
        size += more_bytes
    if some:
        yield some


def candidate(state: ClusterState, name: str, load: NodeLoad | None) -> Candidate:
    """A node as the load manager sees it. One that has reported nothing yet has room."""
    info = state.nodes[name]
    why_not = ""
    if info.is_leaving:
        why_not = f"{name} is being stopped"
    elif state.is_draining(name):
        why_not = f"{name} is being drained"
    elif is_too_old(info.version, state.settings.minimum_version):
        why_not = f"{name} has version {info.version or '?'}, older than {state.settings.minimum_version}"
    has_room = load is None or load.disk_free_bytes >= state.settings.min_disk_free_bytes
    return Candidate(name, info.zone, not why_not, why_not, has_room)


def _placed(placement: TopicPlacement, decisions: Iterable[Decision]) -> TopicPlacement:
    """A topic after these decisions."""
    nodes = list(placement.partitions)
    for decision in decisions:
        nodes[decision.partition] = decision.to
    return msgspec.structs.replace(placement, partitions=tuple(nodes))


def _pinned(placement: TopicPlacement, pins: Mapping[int, str]) -> TopicPlacement:
    """A topic with these pins; NOBODY ends one."""
    changed = {number: node for number, node in {**placement.pins, **pins}.items() if node != NOBODY}
    return msgspec.structs.replace(placement, pins=changed)


def _pin_of(request: Request) -> str:
    """A move that was asked for pins, or ends a pin, also where there was nothing to move."""
    return request.node if request.pin else NOBODY


def _where(state: ClusterState, request: Request) -> str | None:
    """The node of what is to be moved; None where it cannot be."""
    if request.kind == "move-engine":
        engine = state.engines.get(request.engine)
        found = None if engine is None else engine.node
    else:
        topic = state.topics.get(TopicName(*request.topic.split("/", 1)))
        nodes = () if topic is None else topic.partitions
        found = nodes[request.partition] if 0 <= request.partition < len(nodes) else None
    if found is None:
        _logger.warning("there is no %s to move", request.subject)
    elif not state.is_usable(request.node):
        _logger.warning("%s is not moved to %s, which is not there to serve", request.subject, request.node)
        return None
    return found


class Reports:
    """What the nodes have told last, as a watch of `loads_prefix` brings it."""

    def __init__(self) -> None:
        self.loads: dict[str, NodeLoad] = {}
        self._node_of_key: dict[str, str] = {}

    def apply(self, changes: Changes) -> None:
        changed = dict(changes.entries)
        if changes.is_whole:
            changed.update(dict.fromkeys(self._node_of_key.keys() - changed.keys()))
        for key, entry in changed.items():
            self.loads.pop(self._node_of_key.pop(key, ""), None)
            report = decoded(entry, NodeLoad)
            if report is not None:
                self._node_of_key[key] = report.node
                self.loads[report.node] = report


def read_loads(metadata: MetadataStore, keys: ClusterKeys) -> dict[str, NodeLoad]:
    """What the nodes have told last."""
    reports = Reports()
    reports.apply(Changes(True, {entry.key: entry for entry in metadata.range(keys.loads_prefix)}))
    return reports.loads


def read_decisions(metadata: MetadataStore, keys: ClusterKeys, since_us: int = 0) -> list[Decisions]:
    """The rounds in which something was decided, the oldest first."""
    entries = metadata.range(keys.decisions_prefix, start=keys.decision(since_us))
    return [found for entry in entries if (found := decoded(entry, Decisions)) is not None]
