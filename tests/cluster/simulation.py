"""A cluster without machines: real documents, leases, epochs and load manager over an etcd in memory, by a clock that
is moved by hand. One seed is one history, and the same each time.

What is real: `Member`, `ClusterState`, `LeaderRounds`, `plan`, `Wanted`, heartbeats and epochs of the cold tier.
What is not: etcd, the time, the network, and the logs themselves (opening and shipping take a while, and that is all).
"""

from __future__ import annotations

import contextlib
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tidelog.clock import ManualClock
from tidelog.cluster.agent import Piece, Wanted
from tidelog.cluster.documents import ClusterSettings, ClusterState, Load, NodeLoad, TopicPlacement
from tidelog.cluster.leader import LeaderRounds, read_decisions, read_loads
from tidelog.cluster.load_manager import imbalance, load_key
from tidelog.cluster.member import Identity, Member, changed_drain
from tidelog.cold.catalog import Catalog
from tidelog.cold.lease import NodeLease
from tidelog.cold.ownership import Ownership, claim_topic, new_claim
from tidelog.errors import ConflictError, HeldError, LeaseLostError, StoreUnavailableError, TidelogError
from tidelog.store.document import encode_json
from tidelog.store.keys import ClusterKeys, TopicKeys
from tidelog.store.metadata.base import DelegatingMetadata, Entry, Put, Write, end_of
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.watch import Changes
from tidelog.topics.names import TopicName

LEASE_SECONDS = 10
STEP_SECONDS = 0.25
FAILOVER_SECONDS = LEASE_SECONDS + 2.0
"""The bound: so long after its last misfortune a partition is served again."""
KEYS = ClusterKeys()


class FakeEtcd(MemoryMetadataStore):
    """etcd: one order of all changes, which watches follow. Keys are kept sorted, so that many cost little."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.events: list[tuple[str, Entry | None]] = []
        self._order: list[str] = []
        self._next_lapse = float("-inf")

    def _write(self, writes: Sequence[Write], version: str) -> dict[str, str]:
        for write in writes:
            if isinstance(write, Put) and write.key not in self._entries:
                insort(self._order, write.key)
            elif not isinstance(write, Put) and write.key in self._entries:
                self._forget(write.key)
        versions = super()._write(writes, version)
        self.events.extend((write.key, self._entries.get(write.key)) for write in writes)
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
            self.events.append((key, None))

    def _lease(self, ttl_seconds: int):  # type: ignore[no-untyped-def]
        self._next_lapse = float("-inf")
        return super()._lease(ttl_seconds)

    def end_lease(self, lease_id: int) -> None:
        self._next_lapse = float("-inf")
        super().end_lease(lease_id)


class Wire(DelegatingMetadata):
    """The way of one node to etcd, which may be cut."""

    is_cut = False

    def _check(self) -> None:
        if self.is_cut:
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

    def _commit(self, checks, writes):  # type: ignore[no-untyped-def]
        self._check()
        return super()._commit(checks, writes)

    def _lease(self, ttl_seconds: int):  # type: ignore[no-untyped-def]
        self._check()
        lease = super()._lease(ttl_seconds)
        renew = lease._refresh

        def refresh() -> bool:
            self._check()
            return renew()

        lease._refresh = refresh  # type: ignore[method-assign]
        return lease


class View:
    """The documents as a node has read them so far."""

    def __init__(self, etcd: FakeEtcd) -> None:
        self._etcd = etcd
        self._at: int | None = None
        self.state = ClusterState(KEYS)

    def look(self) -> set[str]:
        """What is new, by keys."""
        self._etcd.change_mark()  # leases that have run out
        if self._at is None:
            self._at = len(self._etcd.events)
            whole: dict[str, Entry | None] = {entry.key: entry for entry in self._etcd.range(KEYS.prefix)}
            return self.state.apply(Changes(True, whole))
        news = self._etcd.events[self._at :]
        self._at = len(self._etcd.events)
        entries = {key: entry for key, entry in news if key.startswith(KEYS.prefix)}
        return self.state.apply(Changes(False, entries)) if entries else set()


class SimulatedNode:
    """A node, with what it owns."""

    def __init__(self, simulation: Simulation, name: str, zone: str) -> None:
        self.name = name
        self.zone = zone
        self.is_up = False
        self.paused_until = float("-inf")
        self._simulation = simulation
        self.wire = Wire(simulation.etcd)
        self.owned: dict[Piece, Ownership] = {}

    def start(self) -> None:
        """As a process begins."""
        simulation = self._simulation
        self.is_up = True
        self.owned = {}
        identity = Identity(self.name, self.name, "127.0.0.1:1", "", self.zone, "1.0")
        self.member = Member(self.wire, KEYS, simulation.clock, identity, LEASE_SECONDS)
        self.heartbeat = NodeLease(
            self.wire,
            simulation.clock,
            self.name,
            Path("/simulated", self.name),
            lease_seconds=LEASE_SECONDS,
            renews_itself=False,
        )
        self.view = simulation.shared_view or View(simulation.etcd)
        self.wanted = Wanted(self.name)
        self._begun: dict[Piece, float] = {}
        self._beat_at = self._report_at = float("-inf")
        self._led_at = float("-inf")
        self._has_news = False
        self._is_joined = False
        self.rounds = LeaderRounds(self.wire, KEYS, simulation.clock, self.name)

    @property
    def runs(self) -> bool:
        return self.is_up and self._simulation.now >= self.paused_until

    def serves(self, piece: Piece) -> bool:
        """Whether it would answer a producer now."""
        placement = self.view.state.topics.get(piece.topic)
        says_ours = placement is not None and placement.partitions[piece.number] == self.name
        return piece in self.owned and says_ours and self.member.is_alive

    def step(self, changed: Iterable[str] | None = None) -> None:
        """What a node does within a quarter of a second."""
        try:
            if not self._is_joined:
                self.member.join()
                self._is_joined = True
                if self._simulation.shared_view is None:
                    self.view.look()
                changed = list(self.view.state.versions)
            self._beat()
            if changed is None:
                changed = self.view.look() if not self.wire.is_cut else ()
            self._follow(changed)
            self._reconcile()
            self._lead()
            self._report()
        except HeldError:
            pass  # its name is still alive
        except (StoreUnavailableError, ConflictError):
            pass

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
        self.heartbeat.renew()
        for piece in [piece for piece, ownership in self.owned.items() if not self._simulation.is_current(ownership)]:
            del self.owned[piece]
        self._beat_at = float("-inf")
        self.member.join()

    def _follow(self, changed: Iterable[str]) -> None:
        keys = list(changed)
        if KEYS.leader in keys:
            self.member.seen_leader(self.view.state.versions.get(KEYS.leader))
        self.wanted.follow(self.view.state, keys)
        self._has_news = self._has_news or bool(keys)

    def _reconcile(self) -> None:
        """Opening and shipping take from no time to a second."""
        now, pieces = self._simulation.now, {piece for piece in self.wanted.pieces if piece.kind == "partition"}
        due = (pieces - self.owned.keys()) | (self.owned.keys() - pieces)
        if not due:
            self._begun = {}
            return
        self._begun = {piece: self._begun.get(piece, now + self._simulation.random.random()) for piece in sorted(due)}
        for piece, ready_at in self._begun.items():
            if now >= ready_at:
                self._change(piece, piece in pieces)

    def _change(self, piece: Piece, opens: bool) -> None:
        log = f"{piece.topic.name}-part-{piece.number}"
        if not opens:
            with contextlib.suppress(ConflictError):  # another node has it already
                self.owned[piece].release()
            del self.owned[piece]
            return
        catalog = Catalog(self.wire, TopicKeys(piece.topic.namespace, log))
        found = catalog.owner()
        try:
            if found is not None:
                self.heartbeat.refuse_held(found[0], "topic", Path(log))
            self.owned[piece] = claim_topic(catalog, found, self.heartbeat, self._simulation.clock, new_claim())
        except (HeldError, ConflictError):
            pass

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
            loads = read_loads(self.wire, KEYS)
            self.view.state.written(self.rounds.round(self.view.state, loads, leads_by))

    def _report(self) -> None:
        now = self._simulation.now
        if now - self._report_at < 2.0:
            return
        self._report_at = now
        pieces = {piece for piece in self.wanted.pieces if piece.kind == "partition"}
        self.member.report(
            NodeLoad(
                node=self.name,
                at_us=self._simulation.clock.now_us(),
                open=len(self.owned),
                opening=len(pieces - self.owned.keys()),
                partitions={key: self._simulation.loads[key] for piece in self.owned if (key := key_of(piece))},
            )
        )


def key_of(piece: Piece) -> str:
    """How a partition is named among loads."""
    return load_key(piece.topic, piece.number)


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
        shares_view: bool = False,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        """`shares_view`: all nodes read the documents through one pair of eyes, which is faster."""
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.etcd = FakeEtcd(self.clock)
        self.step_seconds = step_seconds
        self.shared_view = View(self.etcd) if shares_view else None
        self.nodes = [SimulatedNode(self, f"n{number}", f"z{number % 3}") for number in range(nodes)]
        self.loads: dict[str, Load] = {}
        self.pieces: list[Piece] = []
        self.settings = settings or ClusterSettings()
        self.unserved_since: dict[Piece, float] = {}
        self.last_misfortune = self.now
        self.longest_unserved = 0.0
        self.etcd.put(KEYS.settings, encode_json(self.settings))
        for number in range(topics):
            self._create(TopicName("s", f"t{number}"), partitions)
        for node in self.nodes:
            node.start()

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def _create(self, topic: TopicName, partitions: int) -> None:
        placement = TopicPlacement(id="00" * 16, created_us=1, partitions=("",) * partitions)
        self.etcd.put(KEYS.topic(*topic), encode_json(placement))
        for number in range(partitions):
            piece = Piece("partition", topic, number)
            self.pieces.append(piece)
            self.loads[key_of(piece)] = Load(bytes_in=self.random.random() * 5e5)

    def run(self, seconds: float, *, chance_of_misfortune: float = 0.0) -> None:
        """So much time, in which misfortunes come by chance."""
        end = self.now + seconds
        while self.now < end:
            self.clock.advance(self.step_seconds)
            if self.random.random() < chance_of_misfortune:
                self._misfortune()
            changed = None if self.shared_view is None else self.shared_view.look()
            for node in self.random.sample(self.nodes, len(self.nodes)) if chance_of_misfortune else self.nodes:
                if node.runs:
                    node.step(changed)
            self._check()

    # What goes wrong

    def _misfortune(self) -> None:
        node = self.random.choice(self.nodes)
        what = self.random.choice(["kill", "kill", "pause", "cut", "drain", "undrain", "load"])
        others = [other for other in self.nodes if other is not node and other.runs and not other.wire.is_cut]
        if what == "load":
            for piece in self.random.sample(self.pieces, len(self.pieces) // 20):
                self.loads[key_of(piece)] = Load(bytes_in=self.random.random() * 5e5)
        elif what in ("drain", "undrain"):
            self.drain(node.name, what == "drain" and len(others) > 2)
        elif not node.is_up:
            node.start()
        elif node.wire.is_cut:
            node.wire.is_cut = False
        elif len(others) > 2:
            self._hurt(node, what)

    def _hurt(self, node: SimulatedNode, what: str) -> None:
        self.last_misfortune = self.now
        if what == "kill":
            node.is_up = False
        elif what == "pause":
            node.paused_until = self.now + self.random.random() * 40
        else:
            node.wire.is_cut = True

    def drain(self, name: str, is_draining: bool) -> None:
        """As an operator does."""
        with contextlib.suppress(TidelogError):  # it never joined
            changed_drain(self.etcd, KEYS, name, is_draining=is_draining)

    def recover(self) -> None:
        """Everything works again."""
        for node in self.nodes:
            node.wire.is_cut = False
            node.paused_until = float("-inf")
            self.drain(node.name, False)
            if not node.is_up:
                node.start()

    # What must hold

    def _check(self) -> None:
        serving: Counter[Piece] = Counter()
        publishing: Counter[Piece] = Counter()
        for node in self.nodes:
            if not node.is_up:
                continue
            for piece, ownership in node.owned.items():
                if node.serves(piece):
                    serving[piece] += node.runs and not node.wire.is_cut
                    publishing[piece] += 1
                    assert publishing[piece] == 1, f"{piece}: two nodes would answer producers"
                    assert self.is_current(ownership), f"{piece} on {node.name}: it answers, and is fenced"
        now = self.now
        unserved = set(self.pieces) - serving.keys() if len(serving) < len(self.pieces) else set()
        unserved |= {piece for piece, count in serving.items() if not count}
        self.unserved_since = {piece: self.unserved_since.get(piece, now) for piece in unserved}
        for piece, since in self.unserved_since.items():
            seconds = now - max(since, self.last_misfortune)
            self.longest_unserved = max(self.longest_unserved, seconds)
            assert seconds <= FAILOVER_SECONDS, f"{piece}: served by nobody for {seconds} s"

    def is_current(self, ownership: Ownership) -> bool:
        """Whether nobody has claimed it since."""
        entry = self.etcd._entries.get(ownership.catalog.keys.owner)
        return entry is not None and entry.version == ownership.version

    def moves(self, kind: str) -> int:
        """How many were decided of a kind."""
        return sum(one.kind == kind for rounds in read_decisions(self.etcd, KEYS) for one in rounds.decisions)

    def off_balance(self) -> float:
        """How far the node that is farthest off the average is off it."""
        node = next(node for node in self.nodes if node.runs and not node.wire.is_cut)
        rounds = LeaderRounds(self.etcd, KEYS, self.clock, "observer")
        return imbalance(rounds.situation(node.view.state, read_loads(self.etcd, KEYS)))
