"""A cluster without machines: real documents, leases, epochs and load manager over an etcd in memory, by clocks that
are moved by hand. One seed is one history, and the same each time.

What is real: `Member`, `ClusterState`, `LeaderRounds`, `Inventory`, `plan`, `Wanted`, heartbeats, and the epochs of the
cold tier: what an owner publishes goes through `Ownership.change`.
What is not: etcd, the time, the network, and the logs themselves (opening and shipping take a while, and that is all).

What goes wrong, by chance:

    nodes      killed, paused, slow, with a full disk or a wall clock that jumps, drained, the leader more often
    network    a node is cut off; answers of etcd are lost, before or after it has done what was asked; what a node has
               sent arrives much later
    etcd       leases end before their time, a node that got a new one cannot register, watches are late or begin anew,
               nothing is answered for a while

What must hold is said in `Checker`.
"""

from __future__ import annotations

import contextlib
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.clock import ManualClock
from tidelog.cluster.agent import Piece, Wanted
from tidelog.cluster.documents import ClusterSettings, ClusterState, TopicPlacement, topic_of_key
from tidelog.cluster.inventory import load_key
from tidelog.cluster.leader import LeaderRounds, Reports, read_decisions
from tidelog.cluster.load_manager import imbalance
from tidelog.cluster.member import Identity, Member, changed_drain
from tidelog.cold.catalog import Catalog, Owner
from tidelog.cold.lease import NodeLease
from tidelog.cold.ownership import Ownership, claim_topic, give_back_unknown_claim
from tidelog.errors import ConflictError, FencedError, HeldError, LeaseLostError, StoreUnavailableError, TidelogError
from tidelog.service.cluster_control import Load, NodeLoad, NodeTail
from tidelog.store.document import Step, encode_json
from tidelog.store.keys import ClusterKeys, TopicKeys
from tidelog.store.metadata.base import Check, DelegatingMetadata, Entry, Lease, Put, Write, end_of
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.watch import Changes
from tidelog.topics.names import TopicName

LEASE_SECONDS = 10
STEP_SECONDS = 0.25
FAILOVER_SECONDS = LEASE_SECONDS + 2.0
"""The bound: so long after its last misfortune a partition is served again."""
KEYS = ClusterKeys()
_REPORT_SECONDS = 5.0


class NodeClock:
    """The clock of one machine: its wall time may be anything."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.ahead_us = 0

    def now_us(self) -> int:
        return max(0, self._clock.now_us() + self.ahead_us)

    def monotonic(self) -> float:
        return self._clock.monotonic()


class FakeEtcd(MemoryMetadataStore):
    """etcd: one order of all changes, which watches follow. Keys are kept sorted, so that many cost little."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.events: list[tuple[float, str, Entry | None]] = []
        self.on_write: Callable[[Write], None] = lambda write: None
        self._order: list[str] = []
        self._next_lapse = float("-inf")

    def _write(self, writes: Sequence[Write], version: str) -> dict[str, str]:
        for write in writes:
            self.on_write(write)
            if isinstance(write, Put) and write.key not in self._entries:
                insort(self._order, write.key)
            elif not isinstance(write, Put) and write.key in self._entries:
                self._forget(write.key)
        versions = super()._write(writes, version)
        now = self._clock.monotonic()
        self.events.extend((now, write.key, self._entries.get(write.key)) for write in writes)
        return versions

    def _forget(self, key: str) -> None:
        del self._order[bisect_left(self._order, key)]

    def _sorted_keys(self, prefix: str, start: str) -> list[str]:
        self._drop_lapsed()
        return self._order[bisect_left(self._order, start) : bisect_left(self._order, end_of(prefix))]

    def _drop_lapsed(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_lapse:
            return
        before = {key for key, lease in self._leased.items() if now >= self._lease_ends.get(lease, now)}
        super()._drop_lapsed()
        self._next_lapse = min(self._lease_ends.values(), default=float("-inf"))
        for key in sorted(before):
            self._forget(key)
            self.events.append((now, key, None))

    def _lease(self, ttl_seconds: int) -> Lease:
        self._next_lapse = float("-inf")
        return super()._lease(ttl_seconds)

    def end_lease(self, lease_id: int) -> None:
        self._next_lapse = float("-inf")
        super().end_lease(lease_id)

    def leases_of(self, prefix: str) -> list[int]:
        """Those that something below a prefix hangs on."""
        return sorted({lease for key, lease in self._leased.items() if key.startswith(prefix)})


class InFlight(NamedTuple):
    """A transaction that was sent, and that etcd has not got yet."""

    arrives_at: float
    checks: Sequence[Check]
    writes: Sequence[Write]


class Wire(DelegatingMetadata):
    """The way of one node to etcd."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.etcd)
        self._simulation = simulation
        self.is_cut = False
        self.loses_until = float("-inf")
        """Until then some answers are lost."""
        self.lags_until = float("-inf")
        """Until then some transactions arrive late."""
        self.refuses_registration = False
        """Whether the next one is lost, on the way there or back."""

    @property
    def is_bad(self) -> bool:
        now = self._simulation.now
        return now < self.loses_until or now < self.lags_until

    def _check(self) -> None:
        if self.is_cut or self._simulation.now < self._simulation.etcd_down_until:
            raise StoreUnavailableError("cut off")

    def get(self, key: str) -> Entry | None:
        self._check()
        return super().get(key)

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        self._check()
        return super()._range(prefix, start, limit)

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        self._check()
        return super()._keys(prefix, start, limit)

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        self._check()
        now, chance = self._simulation.now, self._simulation.random
        is_claim = any(write.key.endswith("/owner") for write in writes)
        if now < self.lags_until and not is_claim and chance.random() < 0.3:
            self._simulation.in_flight.append(InFlight(now + chance.random() * 20, checks, writes))
            raise StoreUnavailableError("no answer")
        is_lost = now < self.loses_until and chance.random() < 0.3
        if self.refuses_registration and any(write.key.startswith(KEYS.nodes_prefix) for write in writes):
            is_lost, self.refuses_registration = True, False
        if is_lost and chance.random() < 0.5:
            raise StoreUnavailableError("it never arrived")
        versions = super()._commit(checks, writes)
        if is_lost:
            raise StoreUnavailableError("the answer was lost")
        return versions

    def _lease(self, ttl_seconds: int) -> Lease:
        self._check()
        lease = super()._lease(ttl_seconds)
        renew = lease._refresh

        def refresh() -> bool:
            self._check()
            return renew()

        lease._refresh = refresh  # type: ignore[method-assign]
        return lease


class View:
    """The documents and loads as a node has read them so far. What is watched comes late by `late_seconds`."""

    def __init__(self, etcd: FakeEtcd, late_seconds: float = 0.0) -> None:
        self._etcd = etcd
        self._at: int | None = None
        self.late_seconds = late_seconds
        self.state = ClusterState(KEYS)
        self.reports: Reports | None = None

    def begin_anew(self) -> None:
        """etcd has forgotten the changes in between."""
        self._at = None

    def look(self, now: float) -> set[str]:
        """What is new, by keys."""
        self._etcd.change_mark()  # leases that have run out
        events = self._etcd.events
        if self._at is None:
            self._at = len(events)
            if self.reports is not None:
                self.reports.apply(Changes(True, self._everything(KEYS.loads_prefix)))
            return self.state.apply(Changes(True, self._everything(KEYS.prefix)))
        entries: dict[str, Entry | None] = {}
        loads: dict[str, Entry | None] = {}
        at, until = self._at, now - self.late_seconds
        while at < len(events) and events[at][0] <= until:
            _, key, entry = events[at]
            if key.startswith(KEYS.prefix):
                entries[key] = entry
            elif key.startswith(KEYS.loads_prefix):
                loads[key] = entry
            at += 1
        self._at = at
        if loads and self.reports is not None:
            self.reports.apply(Changes(False, loads))
        return self.state.apply(Changes(False, entries)) if entries else set()

    def _everything(self, prefix: str) -> dict[str, Entry | None]:
        return {entry.key: entry for entry in self._etcd.range(prefix)}


class News:
    """What is new in a view that many nodes share, for each of them: a thousand nodes do not all look at a topic that
    two of them have."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._nodes_of: dict[str, frozenset[str]] = {}
        self._for_all: list[str] = []
        self._for_one: dict[str, list[str]] = {}

    def look(self, now: float) -> None:
        self._for_all, self._for_one = [], {}
        for key in sorted(self._view.look(now)):
            if not key.startswith(KEYS.topics_prefix):
                self._for_all.append(key)
                continue
            placement = self._view.state.topics.get(topic_of_key(key, KEYS))
            after = frozenset() if placement is None else frozenset(placement.partitions)
            for node in self._nodes_of.get(key, frozenset()) | after:
                self._for_one.setdefault(node, []).append(key)
            self._nodes_of[key] = after

    def of(self, node: str) -> list[str]:
        return self._for_all + self._for_one.get(node, [])


class SimulatedNode:
    """A node, with what it owns."""

    def __init__(self, simulation: Simulation, number: int, zone: str) -> None:
        self.name = f"n{number}"
        self.number = number
        self.zone = zone
        self.is_up = False
        self.paused_until = float("-inf")
        self.slow_until = float("-inf")
        self.late_until = float("-inf")
        self.full_until = float("-inf")
        self.clock = NodeClock(simulation.clock)
        self._simulation = simulation
        self.wire = Wire(simulation)
        self.owned: dict[Piece, Ownership] = {}
        self.answering: set[Piece] = set()
        """As `Checker` has seen it last."""
        self.was_alive = self.was_serving = self.has_missed = False
        self.is_changed = True
        """Whether what it answers for may have changed since."""

    def start(self) -> None:
        """As a process begins."""
        simulation = self._simulation
        self.is_up = True
        self.owned = {}
        identity = Identity(self.name, self.name, "127.0.0.1:1", "", self.zone, "1.0")
        self.member = Member(self.wire, KEYS, self.clock, identity, LEASE_SECONDS)
        self.heartbeat = NodeLease(
            self.wire,
            self.clock,
            self.name,
            Path("/simulated", self.name),
            lease_seconds=LEASE_SECONDS,
            renews_itself=False,
        )
        self.heartbeat.session = f"{simulation.random.getrandbits(64):016x}"  # as `NodeLease` makes it, by the seed
        self.view = simulation.view_of(self)
        self.wanted = Wanted(self.name)
        self._wanted_parts: set[Piece] = set()
        self._doubtful: set[Piece] = set()
        self._begun: dict[Piece, float] = {}
        self._is_due = True
        self._beat_at = self._report_at = self._led_at = self._stepped_at = float("-inf")
        self._has_news = self._is_joined = False
        self.is_changed = True
        self.rounds = LeaderRounds(self.wire, KEYS, self.clock, self.name)

    @property
    def runs(self) -> bool:
        return self.is_up and self._simulation.now >= self.paused_until

    @property
    def is_impaired(self) -> bool:
        """It works, but for long not as it should."""
        now = self._simulation.now
        return now < self.slow_until or now < self.late_until or self.wire.is_bad

    def says_ours(self, piece: Piece) -> bool:
        """As `ClusterPlacement.is_ours`, without the lease."""
        placement = self.view.state.topics.get(piece.topic)
        return placement is not None and placement.partitions[piece.number] == self.name

    def step(self, changed: Iterable[str] | None = None) -> None:
        """What a node does within a quarter of a second, or within two seconds if it is slow."""
        now = self._simulation.now
        if now < self.slow_until and now - self._stepped_at < 2.0:
            return
        self._stepped_at = now
        if self.view.late_seconds > 0.5 and now >= self.late_until:
            self.view.late_seconds = 0.5
        self._publish()
        try:
            if not self._is_joined:
                self.member.join()
                self._is_joined = True
                self._simulation.view_is_used(self.view)
                changed = list(self.view.state.versions)
            self._beat()
            if changed is None:
                changed = self.view.look(now) if not self.wire.is_cut else ()
            self._follow(changed)
            self._reconcile()
            self._lead()
            self._report()
        except (HeldError, StoreUnavailableError, ConflictError, LeaseLostError):
            pass  # its name is still alive, etcd does not answer, or another was faster

    # Publishing

    def _publish(self) -> None:
        """What was accepted is shipped, by an owner that may have lost its lease long ago."""
        is_chosen = self._simulation.random.random() < self._simulation.publish_chance
        if self.owned and (is_chosen or not self.member.is_alive):
            pieces = sorted(self.owned) if len(self.owned) < 50 else list(self.owned)
            self._ship(self._simulation.random.choice(pieces))

    def _ship(self, piece: Piece) -> None:
        ownership = self.owned[piece]
        offset = self._simulation.checker.next_offset[piece]
        write = Put(ownership.catalog.keys.descriptor(offset), b"%d" % ownership.epoch)
        try:
            ownership.change([Step(write, None)])
            self._simulation.happened["published"] += 1
        except FencedError:
            self._simulation.happened["refused by the fence"] += 1
        except TidelogError:
            pass

    # Membership

    def _beat(self) -> None:
        now = self._simulation.now
        if now - self._beat_at >= self.member.beat_seconds:
            self._beat_at = now
            try:
                self.member.beat()
            except LeaseLostError:
                self._rejoin()
            self.heartbeat.renew()

    def _rejoin(self) -> None:
        self._beat_at = float("-inf")
        self.heartbeat.renew()
        for piece in [piece for piece, ownership in self.owned.items() if not self._simulation.is_current(ownership)]:
            self._drop(piece)
        self.member.join()

    def _drop(self, piece: Piece) -> None:
        del self.owned[piece]
        self._is_due = self.is_changed = True

    def _follow(self, changed: Iterable[str]) -> None:
        keys = list(changed)
        if not keys:
            return
        self._has_news = True
        if KEYS.leader in keys:
            self.member.seen_leader(self.view.state.leader, self.view.state.versions.get(KEYS.leader))
        if self.wanted.follow(self.view.state, keys):
            self._wanted_parts = {piece for piece in self.wanted.pieces if piece.kind == "partition"}
            self._is_due = self.is_changed = True

    def _reconcile(self) -> None:
        """Opening and shipping take up to half a second, and longer on a slow node."""
        if not self._is_due:
            return
        now, pieces = self._simulation.now, self._wanted_parts
        due = sorted((pieces ^ self.owned.keys()) | (self._doubtful - pieces))
        slowness = 2.0 if now < self.slow_until else 0.5
        self._begun = {
            piece: self._begun.get(piece, now + self._simulation.random.random() * slowness) for piece in due
        }
        self._is_due = bool(due)
        for piece, ready_at in self._begun.items():
            if now >= ready_at:
                self._change(piece, piece in pieces)

    def _change(self, piece: Piece, opens: bool) -> None:
        log = f"{piece.topic.name}-part-{piece.number}"
        catalog = Catalog(self.wire, TopicKeys(piece.topic.namespace, log))
        try:
            with contextlib.suppress(HeldError, ConflictError):  # another node has it
                if opens:
                    self._open(piece, catalog, log)
                else:
                    self._release(piece, catalog)
        except StoreUnavailableError:
            self._doubtful.add(piece)
            raise
        self._doubtful.discard(piece)

    def _open(self, piece: Piece, catalog: Catalog, log: str) -> None:
        found = catalog.owner()
        if found is not None:
            self.heartbeat.refuse_held(found[0], "topic", Path(log))
        claim = f"{self._simulation.random.getrandbits(64):016x}"
        self.owned[piece] = claim_topic(catalog, found, self.heartbeat, self.clock, claim, log_id="00" * 16)
        self.is_changed = True

    def _release(self, piece: Piece, catalog: Catalog) -> None:
        """An error leaves it open, as with `Agent`; but for that another node has it."""
        ownership = self.owned.get(piece)
        if ownership is None:
            give_back_unknown_claim(catalog, self.heartbeat)
            return
        self._ship(piece)
        try:
            ownership.release()
        except StoreUnavailableError:
            self._drop(piece)
            raise
        except ConflictError:
            pass
        self._drop(piece)

    # Leading and reporting

    def _lead(self) -> None:
        if self.view.state.leader is None:
            entry = self.member.campaign()
            if entry is not None:
                self.view.state.written([entry])
        leads_by = self.member.leads_by
        if leads_by is None:
            self.rounds.forget()
        elif self.member.is_alive and (self._has_news or self._simulation.now - self._led_at >= 1.0):
            self._has_news, self._led_at = False, self._simulation.now
            self.view.state.written(self.rounds.round(self.view.state, self._simulation.reports.loads, leads_by))

    def _report(self) -> None:
        now = self._simulation.now
        opening = len(self._wanted_parts - self.owned.keys()) if self._is_due else 0
        if now - self._report_at < (1.0 if self._is_due else _REPORT_SECONDS):
            return
        self._report_at = now
        loads = self._simulation.loads
        self.member.report(
            NodeLoad(
                node=self.name,
                at_us=self.clock.now_us(),
                open=len(self.owned),
                opening=opening,
                disk_free_bytes=0 if now < self.full_until else 1 << 40,
                partitions={key: loads[key] for piece in self.owned if (key := key_of(piece))},
            ),
            NodeTail(at_us=self.clock.now_us()),
        )


def key_of(piece: Piece) -> str:
    """How a partition is named among loads."""
    return load_key(piece.topic, piece.number)


class Checker:
    """What must hold, looked at after every step, and at every write that etcd gets.

    - Only the owner whose epoch is the last one publishes: the fence is asked by every publication, also by those of
      owners that sleep, are cut off, or whose transactions arrive late.
    - No two nodes answer producers for a partition, and none that is fenced does. (A node whose lease etcd has ended
      before its time cannot know it before it renews it.)
    - A partition is without a node that serves it for no longer than the lease and two seconds, counted from the last
      misfortune that has to do with it.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._piece_of_owner: dict[str, Piece] = {}
        self._piece_of_segments: dict[str, Piece] = {}
        self._epochs: dict[Piece, int] = {}
        self.next_offset: Counter[Piece] = Counter()
        self.answering: dict[Piece, set[SimulatedNode]] = {}
        self._served: Counter[Piece] = Counter()
        self.unserved_since: dict[Piece, float] = {}
        self.longest_unserved = 0.0
        self.hurt_at: dict[str, float] = {}

    def add(self, piece: Piece) -> None:
        keys = TopicKeys(piece.topic.namespace, f"{piece.topic.name}-part-{piece.number}")
        self._piece_of_owner[keys.owner] = self._piece_of_segments[keys.segments_prefix] = piece
        self.answering[piece] = set()
        self.unserved_since[piece] = self._simulation.now

    # What etcd gets

    def wrote(self, write: Write) -> None:
        if not isinstance(write, Put):
            return
        piece = self._piece_of_owner.get(write.key)
        if piece is not None:
            owner = msgspec.json.decode(write.value, type=Owner)
            assert owner.epoch >= self._epochs.get(piece, 0), f"{piece}: an epoch goes back"
            self._epochs[piece] = owner.epoch
            for node in self.answering[piece]:
                node.is_changed = True
            return
        piece = self._piece_of_segments.get(write.key.rpartition("/")[0] + "/")
        if piece is not None:
            epoch = int(write.value)
            assert epoch == self._epochs[piece], f"{piece}: epoch {epoch} publishes after {self._epochs[piece]}"
            self.next_offset[piece] += 1

    # What nodes answer

    def look(self) -> None:
        changed = []
        for node in self._simulation.nodes:
            is_alive = node.is_up and node.member.is_alive
            serves = is_alive and node.runs and not node.wire.is_cut
            if node.is_changed or is_alive != node.was_alive or serves != node.was_serving:
                changed.append(node)
                self._forget(node)
                node.was_alive, node.was_serving = is_alive, serves
        for node in changed:
            self._take(node)
        if self.unserved_since:
            self._look_at_time()

    def _forget(self, node: SimulatedNode) -> None:
        for piece in node.answering:
            self.answering[piece].discard(node)
            if node.was_serving:
                self._count(piece, -1)

    def _take(self, node: SimulatedNode) -> None:
        simulation = self._simulation
        node.answering = {piece for piece in node.owned if node.says_ours(piece)} if node.was_alive else set()
        node.is_changed = False
        for piece in node.answering:
            self.answering[piece].add(node)
            if node.was_serving:
                self._count(piece, 1)
            if node.name in simulation.robbed:
                continue
            others = [other.name for other in self.answering[piece] if other.name not in simulation.robbed]
            assert len(others) <= 1, f"{piece}: {others} would answer producers"
            assert simulation.is_current(node.owned[piece]), f"{piece} on {node.name}: it answers, and is fenced"

    def _count(self, piece: Piece, change: int) -> None:
        self._served[piece] += change
        if not self._served[piece]:
            self.unserved_since.setdefault(piece, self._simulation.now)
        elif piece in self.unserved_since:
            self.longest_unserved = max(self.longest_unserved, self._unserved_seconds(piece))
            del self.unserved_since[piece]

    def _unserved_seconds(self, piece: Piece) -> float:
        """It may have been given to a node that was not well already."""
        since = max(self.unserved_since[piece], self.hurt_at.get(self.placed_on(piece), 0.0))
        self.unserved_since[piece] = since
        return self._simulation.now - since

    def excuse(self, nodes: Collection[SimulatedNode] | None) -> None:
        """A misfortune has to do with what these nodes have, or are given; with everything, if it is None."""
        names = None if nodes is None else {node.name for node in nodes}
        for piece in self.unserved_since:
            if names is None or self.placed_on(piece) in names or any(piece in node.owned for node in nodes or ()):
                self.unserved_since[piece] = self._simulation.now

    def placed_on(self, piece: Piece) -> str:
        """Where the documents say, now."""
        return self._simulation.truth.state.topics[piece.topic].partitions[piece.number]

    def _look_at_time(self) -> None:
        simulation = self._simulation
        now = simulation.now
        leader = simulation.leader()
        if now < simulation.etcd_down_until or (leader is not None and leader.is_impaired):
            self.excuse(None)
        elif impaired := [node for node in simulation.nodes if node.is_impaired]:
            self.excuse(impaired)
        for piece in self.unserved_since:
            seconds = self._unserved_seconds(piece)
            assert seconds <= FAILOVER_SECONDS, f"{piece}: served by nobody for {seconds} s"


class Simulation:
    """A cluster of so many nodes and partitions."""

    def __init__(
        self,
        seed: int,
        nodes: int,
        topics: int,
        partitions: int,
        settings: ClusterSettings | None = None,
        *,
        views: int = 0,
        step_seconds: float = STEP_SECONDS,
        publish_chance: float = 0.1,
    ) -> None:
        """`views`: so many pairs of eyes, each late by another time, are shared by all nodes, which is faster than one
        for each; 0: one for each."""
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.etcd = FakeEtcd(self.clock)
        self.etcd_down_until = float("-inf")
        self.in_flight: list[InFlight] = []
        self.robbed: dict[str, float] = {}
        """Nodes whose lease etcd has ended before its time, and when they seemed to know it."""
        self.happened: Counter[str] = Counter()
        self.step_seconds = step_seconds
        self.publish_chance = publish_chance
        self.reports = Reports()
        self.truth = View(self.etcd)
        self.truth.reports = self.reports
        self._views = [View(self.etcd, self.random.random() * 0.2) for _ in range(views)]
        self._news = [News(view) for view in self._views]
        self.nodes = [SimulatedNode(self, number, f"z{number % 3}") for number in range(nodes)]
        self.loads: dict[str, Load] = {}
        self.pieces: list[Piece] = []
        self.settings = settings or ClusterSettings()
        self.checker = Checker(self)
        self.etcd.put(KEYS.settings, encode_json(self.settings))
        for number in range(topics):
            self._create(TopicName("s", f"t{number}"), partitions)
        self.etcd.on_write = self.checker.wrote
        for node in self.nodes:
            node.start()

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def leader(self) -> SimulatedNode | None:
        """Who the documents say leads."""
        leader = self.truth.state.leader
        return None if leader is None else self.nodes[int(leader.node[1:])]

    def view_of(self, node: SimulatedNode) -> View:
        """What a node that begins looks at the documents with."""
        if self._views:
            return self._views[node.number % len(self._views)]
        return View(self.etcd, self.random.random() * 0.5)

    def view_is_used(self, view: View) -> None:
        """One that is shared is looked at in each step anyway."""
        if not self._views:
            view.look(self.now)

    def _create(self, topic: TopicName, partitions: int) -> None:
        placement = TopicPlacement(id="00" * 16, created_us=1, partitions=("",) * partitions)
        self.etcd.put(KEYS.topic(*topic), encode_json(placement))
        for number in range(partitions):
            piece = Piece("partition", topic, number)
            self.pieces.append(piece)
            self.checker.add(piece)
            self.loads[key_of(piece)] = self._new_load()

    def _new_load(self) -> Load:
        return Load(bytes_in=self.random.random() * 5e5)

    def run(self, seconds: float, *, chance_of_misfortune: float = 0.0) -> None:
        """So much time, in which misfortunes come by chance."""
        end = self.now + seconds
        while self.now < end:
            self.clock.advance(self.step_seconds)
            self.truth.look(self.now)
            if self.random.random() < chance_of_misfortune:
                self.misfortune()
            self._deliver()
            for news in self._news:
                news.look(self.now)
            for node in self.random.sample(self.nodes, len(self.nodes)) if chance_of_misfortune else self.nodes:
                if node.runs:
                    node.step(self._news_for(node))
                else:
                    node.has_missed = True
            self.truth.look(self.now)
            self._see_who_was_robbed()
            self.checker.look()

    def _news_for(self, node: SimulatedNode) -> Collection[str] | None:
        """None: it looks for itself. Who was away, slow or cut off looks at everything."""
        if not self._news:
            return None
        has_missed, node.has_missed = node.has_missed, node.wire.is_cut or self.now < node.slow_until
        if node.has_missed:
            return ()
        return list(node.view.state.versions) if has_missed else self._news[node.number % len(self._news)].of(node.name)

    def _deliver(self) -> None:
        """What was sent long ago arrives."""
        due = [sent for sent in self.in_flight if sent.arrives_at <= self.now]
        self.in_flight = [sent for sent in self.in_flight if sent.arrives_at > self.now]
        for sent in due:
            with contextlib.suppress(ConflictError, LeaseLostError):
                self.etcd.commit(sent.checks, sent.writes)
                self.happened["arrived late"] += 1

    # What goes wrong

    def misfortune(self) -> None:
        """One, by chance. At least three nodes are left as they are, so that somebody can take over."""
        node = self.random.choice(self.nodes)
        if self.random.random() < 0.25:
            node = self.leader() or node
        whole = sum(self._is_whole(other) for other in self.nodes if other is not node)
        what = self.random.choice(_MISFORTUNES)
        self.happened[what] += 1
        if what in ("drain", "undrain"):
            self.drain(node.name, what == "drain" and whole > 2)
        elif what in ("load", "etcd is down"):
            self._change_for_all(what)
        elif not node.is_up:
            node.start()
        elif node.wire.is_cut:
            node.wire.is_cut = False
        elif whole > 2:
            self.hurt(node, what)

    def _change_for_all(self, what: str) -> None:
        if what == "etcd is down":
            self.etcd_down_until = self.now + self.random.random() * 15
            return
        for piece in self.random.sample(self.pieces, len(self.pieces) // 20):
            self.loads[key_of(piece)] = self._new_load()

    def _is_whole(self, node: SimulatedNode) -> bool:
        return node.runs and not node.wire.is_cut and not node.is_impaired

    def hurt(self, node: SimulatedNode, what: str) -> None:
        """Something happens to one node."""
        self.checker.excuse(None if node is self.leader() else [node])
        self.checker.hurt_at[node.name] = self.now
        until = self.now + self.random.random() * 20
        if what in ("kill", "lease"):
            self._end(node, what)
        elif what in ("pause", "slow", "clock", "full disk"):
            self._disturb(node, what, until)
        elif what == "half joined":
            self._rob(node)
            node.wire.refuses_registration = True
        elif what == "watch anew":
            node.view.begin_anew()
        elif what == "late watch" and not self._views:
            node.late_until, node.view.late_seconds = until, self.random.random() * 5
        else:
            self._hamper(node.wire, what, until)

    def _end(self, node: SimulatedNode, what: str) -> None:
        if what == "lease":
            self._rob(node)
        else:
            node.is_up = False
            node.is_changed = True

    def _disturb(self, node: SimulatedNode, what: str, until: float) -> None:
        if what == "pause":
            node.paused_until = self.now + self.random.random() * 40
        elif what == "slow":
            node.slow_until = until
        elif what == "full disk":
            node.full_until = until
        else:
            node.clock.ahead_us = int(self.random.uniform(-1, 1) * self.random.choice([5e6, 7200e6, 1e12]))

    def _hamper(self, wire: Wire, what: str, until: float) -> None:
        if what == "cut":
            wire.is_cut = True
        elif what == "answers lost":
            wire.loses_until = until
        elif what == "arrives late":
            wire.lags_until = until

    def _rob(self, node: SimulatedNode) -> None:
        """etcd ends what it has promised: the lease of the member, of its log directory, or both."""
        prefixes = [KEYS.node(node.name), f"tidelog/nodes/{node.name}/"]
        for prefix in self.random.sample(prefixes, self.random.randint(1, 2)):
            for lease in self.etcd.leases_of(prefix):
                self.robbed[node.name] = float("inf")
                self.etcd.end_lease(lease)

    def _see_who_was_robbed(self) -> None:
        for name, knows_at in list(self.robbed.items()):
            node = self.nodes[int(name[1:])]
            leases = [node.member._lease, node.heartbeat._lease]
            if knows_at == float("inf"):
                if all(lease is not None and lease.lease_id in self.etcd._lease_ends for lease in leases):
                    self.robbed[name] = self.now
            elif self.now - knows_at > 3.0 and not node.is_impaired:
                del self.robbed[name]
                node.is_changed = True

    def drain(self, name: str, is_draining: bool) -> None:
        """As an operator does."""
        with contextlib.suppress(TidelogError):  # it never joined
            changed_drain(self.etcd, KEYS, name, is_draining=is_draining)

    def recover(self) -> None:
        """Everything works again."""
        self.etcd_down_until = float("-inf")
        for node in self.nodes:
            self.checker.excuse([node])
            node.wire.is_cut = False
            node.paused_until = node.slow_until = node.late_until = float("-inf")
            node.full_until = float("-inf")
            node.wire.loses_until = node.wire.lags_until = float("-inf")
            self.drain(node.name, False)
            if not node.is_up:
                node.start()

    # What can be asked

    def is_current(self, ownership: Ownership) -> bool:
        """Whether nobody has claimed it since."""
        entry = self.etcd._entries.get(ownership.catalog.keys.owner)
        return entry is not None and entry.version == ownership.version

    def absent(self) -> list[str]:
        """Nodes that are up, and that the documents do not name: they would get nothing for ever."""
        return [node.name for node in self.nodes if node.is_up and node.name not in self.truth.state.nodes]

    def moves(self, kind: str) -> int:
        """How many were decided of a kind."""
        return sum(one.kind == kind for rounds in read_decisions(self.etcd, KEYS) for one in rounds.decisions)

    def off_balance(self) -> float:
        """How far the node that is farthest off the average is off it."""
        rounds = LeaderRounds(self.etcd, KEYS, self.clock, "observer")
        return imbalance(rounds.situation(self.truth.state, self.reports.loads))

    def crowded(self) -> dict[TopicName, int]:
        """Topics of which a zone has more than its share, and how many more."""
        zones = Counter(node.zone for node in self.nodes)
        zone_of = {node.name: node.zone for node in self.nodes}
        found = {}
        for topic, placement in self.truth.state.topics.items():
            counts = Counter(zone_of[node] for node in placement.partitions)
            shares = {zone: -(-len(placement.partitions) * size // len(self.nodes)) for zone, size in zones.items()}
            found[topic] = sum(max(0, count - shares[zone]) for zone, count in counts.items())
        return {topic: too_many for topic, too_many in found.items() if too_many}


_MISFORTUNES = (
    *(
        "kill",
        "kill",
        "pause",
        "cut",
        "slow",
        "full disk",
        "late watch",
        "watch anew",
        "clock",
        "answers lost",
        "arrives late",
    ),
    *("lease", "half joined", "etcd is down", "drain", "undrain", "load"),
)
