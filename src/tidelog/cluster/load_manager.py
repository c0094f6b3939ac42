"""Who serves what: from the state of a cluster to the moves that it needs, each with its reason. A pure function.

    plan(situation) -> [Decision, ...]

In this order, and each as far as its limit goes:

    failover, assign   what nobody alive serves gets a node, at once and without a limit
    drain              what a node serves that is being drained or stopped, or is too old, goes elsewhere
    pin, move          what an operator asked for
    balance            from the node that has most to the one that has least, while one is out of the band

Invariants
- The same situation gives the same decisions: nothing here asks a clock, a store or chance.
- No move for the sake of balance makes the larger of its two nodes larger: repeating it ends.
- Hysteresis: balancing begins when a node is more than `hysteresis` off the average and goes on to half of that. A
  partition that was moved rests. `max_moves_per_hour` is a limit for all of it.
- Partitions of a topic are spread over nodes, and over zones in proportion to their nodes, when they are given out.
- A partition is decided on once in a plan.
- Engines are spread by their number, and the rest is as for partitions: pins, drains, requests, limits, rest.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from tidelog.cluster.documents import (
    NOBODY,
    ClusterSettings,
    Coordinators,
    Decision,
    DecisionKind,
    EnginePlacement,
    Load,
    Request,
    TopicPlacement,
)
from tidelog.topics.names import TopicName

HOUR_US = 3_600_000_000
_MEGA = 1e6
_KILO = 1e3
# What a partition counts for by being there, in MB/s: so loads that are next to nothing move nothing.
_IDLE_WEIGHT = 0.1
_NONE = Load()
_UNEVEN_ENGINES = 2
"""A node has so many engines more than another before one is moved."""


class Candidate(NamedTuple):
    """A node as the load manager sees it. One that is not usable keeps what it has only until it is elsewhere."""

    name: str
    zone: str = ""
    is_usable: bool = True
    why_not: str = ""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan depends on."""

    now_us: int
    settings: ClusterSettings
    nodes: Mapping[str, Candidate]
    """Those that are alive."""
    topics: Mapping[TopicName, TopicPlacement]
    engines: Mapping[str, EnginePlacement] = {}
    coordinators: Coordinators = Coordinators()
    loads: Mapping[str, Load] = {}
    """Of partitions, by `load_key`."""
    requests: Mapping[str, Request] = {}
    moved_us: Mapping[str, int] = {}
    """When partitions were moved for the sake of balance, in the last hour at least."""
    under_way: int = 0
    """Moves that have not ended."""
    is_settled: bool = True
    """Whether it is long enough since a node came: before that nothing is balanced."""


def load_key(topic: TopicName, partition: int) -> str:
    """How a partition is named among loads."""
    return f"{topic}/{partition}"


def weigher(settings: ClusterSettings) -> Callable[[Load], float]:
    """What a partition with this load weighs."""
    if settings.strategy == "fair":
        return lambda load: 1.0
    if settings.strategy == "balanced":
        return lambda load: _IDLE_WEIGHT + (load.bytes_in + load.bytes_out) / _MEGA

    def weighted(load: Load) -> float:
        return (
            settings.weight_partition
            + settings.weight_bytes_in * load.bytes_in / _MEGA
            + settings.weight_bytes_out * load.bytes_out / _MEGA
            + settings.weight_messages_in * load.messages_in / _KILO
            + settings.weight_messages_out * load.messages_out / _KILO
        )

    return weighted


class _Part(NamedTuple):
    """A partition with its weight."""

    topic: TopicName
    number: int
    weight: float

    @property
    def key(self) -> str:
        return load_key(self.topic, self.number)


def plan(situation: Situation) -> list[Decision]:
    """What is to be moved now."""
    return _Plan(situation).decisions()


def imbalance(situation: Situation) -> float:
    """How far the node that is farthest off the average is off it, as a part of the average."""
    made = _Plan(situation)
    return made.spread() if made.usable else 0.0


class _Plan:
    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._settings = situation.settings
        self.usable = {name: node for name, node in situation.nodes.items() if node.is_usable}
        self._weigh = weigher(situation.settings)
        self.load = dict.fromkeys(self.usable, 0.0)
        self._parts: dict[str, list[_Part]] = defaultdict(list)
        self._orphans: list[tuple[_Part, str]] = []
        self._pins: dict[tuple[TopicName, int], str] = {}
        self._found: list[Decision] = []
        self._decided: set[str] = set()
        self._spreads: dict[TopicName, Counter[str]] = {}
        self._zones: dict[TopicName, Counter[str]] = {}
        self._zone_sizes = Counter(node.zone for node in self.usable.values())
        self._heaps: dict[str, list[tuple[float, str]]] = {}
        self._room = max(0, self._settings.max_moves_at_once - situation.under_way)
        self._look()

    def _look(self) -> None:
        loads, weigh, nodes = self._situation.loads, self._weigh, self._situation.nodes
        for topic, placement in self._situation.topics.items():
            if placement.is_deleting:
                continue
            for number, node in enumerate(placement.partitions):
                part = _Part(topic, number, weigh(loads.get(f"{topic}/{number}", _NONE)))
                if node in nodes:
                    self._parts[node].append(part)
                else:
                    self._orphans.append((part, node))
            for number, pin in placement.pins.items():
                if pin in self.usable and number < len(placement.partitions):
                    self._pins[topic, number] = pin
        for node in self.load:
            self.load[node] = sum(part.weight for part in self._parts[node])
        self._total = sum(self.load.values())

    def decisions(self) -> list[Decision]:
        if not self.usable:
            return []
        self._make_heaps()
        self._assign_orphans()
        self._drain()
        self._carry_out()
        self._balance()
        self._slots()
        self._engines()
        return self._found

    @property
    def _average(self) -> float:
        return self._total / len(self.load)

    # Choosing a node

    def _make_heaps(self) -> None:
        for name, node in self.usable.items():
            self._heaps.setdefault(node.zone, []).append((self.load[name], name))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def _least(self, zone: str, has: Mapping[str, int], most: float) -> tuple[float, str] | None:
        """The node of a zone that has least, of those with fewer than `most` of a topic; `has` says how many."""
        heap, passed_over = self._heaps[zone], []
        found = None
        while heap and found is None:
            load, name = heap[0]
            if load != self.load[name]:  # what it had before
                heapq.heapreplace(heap, (self.load[name], name))
            elif has.get(name, 0) >= most:
                passed_over.append(heapq.heappop(heap))
            else:
                found = heap[0]
        for node in passed_over:
            heapq.heappush(heap, node)
        return found

    def _spread_of(self, topic: TopicName) -> Counter[str]:
        """How many partitions of a topic each node has."""
        found = self._spreads.get(topic)
        if found is None:
            nodes = self._situation.topics[topic].partitions
            found = self._spreads[topic] = Counter(node for node in nodes if node in self.usable)
            self._zones[topic] = Counter(self.usable[node].zone for node in nodes if node in self.usable)
        return found

    def _choose(self, part: _Part) -> str:
        """The pin. Else no node gets more of a topic than its share; the least loaded one of the zone that has fewest
        of the topic, unless that is out of the band: then the least loaded of all."""
        pin = self._pins.get((part.topic, part.number))
        if pin is not None:
            return pin
        has = self._spread_of(part.topic)
        share = math.ceil(len(self._situation.topics[part.topic].partitions) / len(self.usable))
        found = {zone: node for zone in self._heaps if (node := self._least(zone, has, share)) is not None}
        if not found:
            found = {zone: node for zone in self._heaps if (node := self._least(zone, {}, 1)) is not None}
        lowest = min(found.values())
        if len(found) == 1:
            return lowest[1]
        zones = self._zones[part.topic]
        _, load, name = min((zones[zone] / self._zone_sizes[zone], *node) for zone, node in found.items())
        return name if load <= max(lowest[0], self._average) * (1 + self._settings.hysteresis) else lowest[1]

    def _give(self, kind: DecisionKind, part: _Part, source: str, to: str, reason: str) -> None:
        self._found.append(
            Decision(kind=kind, reason=reason, to=to, source=source, topic=str(part.topic), partition=part.number)
        )
        self._decided.add(part.key)
        spread, zones = self._spread_of(part.topic), self._zones[part.topic]
        if source in self.load:
            self.load[source] -= part.weight
            self._total -= part.weight
            spread[source] -= 1
            zones[self.usable[source].zone] -= 1
        self.load[to] += part.weight
        self._total += part.weight
        spread[to] += 1
        zones[self.usable[to].zone] += 1

    # What must be

    def _assign_orphans(self) -> None:
        """The heaviest first: the light ones level what those leave."""
        for part, node in sorted(self._orphans, key=lambda each: (-each[0].weight, each[0].topic, each[0].number)):
            kind: DecisionKind = "failover" if node else "assign"
            reason = f"{node} is not alive" if node else "nobody serves it"
            self._give(kind, part, node, self._choose(part), reason)

    def _drain(self) -> None:
        for name in sorted(set(self._situation.nodes) - self.usable.keys()):
            node = self._situation.nodes[name]
            for part in self._parts[name]:
                if self._room <= 0:
                    return
                self._room -= 1
                self._give("drain", part, name, self._choose(part), node.why_not or f"{name} is being drained")

    def _carry_out(self) -> None:
        """Requests first: a pin may be one's consequence."""
        for _, request in sorted(self._situation.requests.items()):
            if request.kind == "move" and request.node in self.usable:
                self._move(TopicName(*request.topic.split("/", 1)), request.partition, request.node, "move", request.by)
        for (topic, number), pin in sorted(self._pins.items()):
            self._move(topic, number, pin, "pin", "")

    def _move(self, topic: TopicName, number: int, to: str, kind: DecisionKind, by: str) -> None:
        placement = self._situation.topics.get(topic)
        if placement is None or placement.is_deleting or not 0 <= number < len(placement.partitions):
            return
        source, key = placement.partitions[number], load_key(topic, number)
        if source == to or key in self._decided or self._room <= 0:
            return
        self._room -= 1
        part = _Part(topic, number, self._weigh(self._situation.loads.get(key, _NONE)))
        self._give(kind, part, source, to, f"it is pinned to {to}" if kind == "pin" else f"asked for by {by or '?'}")

    # Balance

    def spread(self) -> float:
        """How far off the average the farthest node is."""
        average = self._average
        if average <= 0:
            return 0.0
        return max(max(self.load.values()) - average, average - min(self.load.values())) / average

    def _balance(self) -> None:
        is_asked = any(request.kind == "balance" for request in self._situation.requests.values())
        before = self.spread()
        if not is_asked and (not self._situation.is_settled or before <= self._settings.hysteresis):
            return
        band = self._settings.hysteresis / 2
        room = self._room if is_asked else min(self._room, self._left_this_hour())
        movable = self._movable(is_asked)
        while room > 0 and self.spread() > band and (step := self._next_step(movable)) is not None:
            part, source, to = step
            movable[source].remove(part)
            room -= 1
            self._room -= 1
            reason = (
                f"{source} has {self.load[source]:.2f} and {to} {self.load[to]:.2f} "
                f"by the strategy {self._settings.strategy}: {before:.0%} off the average"
            )
            self._give("balance", part, source, to, reason)

    def _left_this_hour(self) -> int:
        since_us = self._situation.now_us - HOUR_US
        moved = sum(at_us > since_us for at_us in self._situation.moved_us.values())
        return max(0, self._settings.max_moves_per_hour - moved)

    def _movable(self, is_asked: bool) -> dict[str, list[_Part]]:
        """What each node could give away, the heaviest first."""
        rested_us = self._situation.now_us - int(self._settings.rest_seconds * 1e6)
        moved = {} if is_asked else self._situation.moved_us

        def free(part: _Part) -> bool:
            return (
                part.key not in self._decided
                and (part.topic, part.number) not in self._pins
                and moved.get(part.key, 0) <= rested_us
            )

        return {
            name: sorted(filter(free, self._parts[name]), key=lambda part: (-part.weight, part.topic, part.number))
            for name in self.usable
        }

    def _next_step(self, movable: Mapping[str, list[_Part]]) -> tuple[_Part, str, str] | None:
        """The best move from the node that has most to the one that has least, of its own zone if that helps."""
        order = sorted(self.load, key=lambda name: (self.load[name], name))
        for source in reversed(order[1:]):
            for to in self._receivers(source, order):
                part = _best(movable[source], self.load[source] - self.load[to])
                if part is not None:
                    return part, source, to
            if self.load[source] <= self._average:
                break
        return None

    def _receivers(self, source: str, order: list[str]) -> Iterator[str]:
        average = self._average
        zone = self.usable[source].zone
        near = next((name for name in order if self.usable[name].zone == zone), source)
        if self.load[near] < average * (1 - self._settings.hysteresis / 2):
            yield near
        yield order[0]

    # Coordinators and engines

    def _slots(self) -> None:
        counts = dict.fromkeys(sorted(self.usable), 0)
        slots = self._situation.coordinators.slots
        for node in slots:
            if node in counts:
                counts[node] += 1
        for slot, node in enumerate(slots):
            if node not in counts:
                self._slot(slot, node, counts, f"{node} does not serve any more" if node else "nobody has it")
        # A move ends the sessions of its groups for a moment: only what is clearly uneven is worth that.
        allowed = max(2, int(len(slots) / len(counts) * self._settings.hysteresis))
        if not self._situation.is_settled or max(counts.values()) - min(counts.values()) <= allowed:
            return
        for slot, node in enumerate(slots):
            least = min(counts.values())
            if node in counts and counts[node] > least + 1 and len(slots) / len(counts) < counts[node]:
                self._slot(slot, node, counts, f"{node} has {counts[node]} slots, others {least}")

    def _slot(self, slot: int, source: str, counts: dict[str, int], reason: str) -> None:
        to = min(counts, key=lambda name: (counts[name], name))
        counts[to] += 1
        if source in counts:
            counts[source] -= 1
        self._found.append(Decision(kind="slot", reason=reason, to=to, source=source, slot=slot))

    def _engines(self) -> None:
        """What nobody serves is given out at once; drains, requests and pins follow, then one at a time what makes the
        numbers even: an engine is restored where it goes."""
        engines = self._situation.engines
        counts = Counter(dict.fromkeys(self.usable, 0))
        counts.update(placement.node for placement in engines.values() if placement.node in self.usable)
        asked = {
            request.engine: request
            for _, request in sorted(self._situation.requests.items())
            if request.kind == "move-engine" and request.node in self.usable
        }
        moved = set[str]()
        for name, placement in sorted(engines.items()):
            found = self._engine_moved(placement, asked.get(name), counts)
            if found is not None:
                self._give_engine(name, placement.node, *found, counts)
                moved.add(name)
        self._even_engines(counts, moved | asked.keys())

    def _engine_moved(
        self, placement: EnginePlacement, request: Request | None, counts: Mapping[str, int]
    ) -> tuple[DecisionKind, str, str] | None:
        """Where an engine goes, and why; None: it stays."""
        node, pin = placement.node, placement.pin if placement.pin in self.usable else NOBODY
        least = min(counts, key=lambda name: (counts[name], name))
        if node not in self._situation.nodes:
            if not node:
                return "assign", pin or least, "nobody serves it"
            return "failover", pin or least, f"{node} is not alive"
        if node not in self.usable and self._takes_room():
            return "drain", pin or least, self._situation.nodes[node].why_not or f"{node} is being drained"
        if request is not None and node != request.node and self._takes_room():
            return "move", request.node, f"asked for by {request.by or '?'}"
        if pin and pin != node and request is None and self._takes_room():
            return "pin", pin, f"it is pinned to {pin}"
        return None

    def _takes_room(self) -> bool:
        self._room -= 1
        return self._room >= 0

    def _give_engine(
        self, name: str, source: str, kind: DecisionKind, to: str, reason: str, counts: Counter[str]
    ) -> None:
        counts[to] += 1
        if source in counts:
            counts[source] -= 1
        self._found.append(Decision(kind=kind, reason=reason, to=to, source=source, engine=name))

    def _even_engines(self, counts: Counter[str], stay: set[str]) -> None:
        is_asked = any(request.kind == "balance" for request in self._situation.requests.values())
        if not (is_asked or (self._situation.is_settled and self._left_this_hour() > 0)):
            return
        rested_us = self._situation.now_us - int(self._settings.rest_seconds * 1e6)
        most, least = max(counts, key=lambda node: (counts[node], node)), min(counts, key=lambda n: (counts[n], n))
        if counts[most] - counts[least] < _UNEVEN_ENGINES:
            return
        for name, placement in sorted(self._situation.engines.items()):
            has_rested = is_asked or self._situation.moved_us.get(f"engine {name}", 0) <= rested_us
            if placement.node == most and not placement.pin and name not in stay and has_rested and self._takes_room():
                reason = f"{most} has {counts[most]} engines, {least} {counts[least]}"
                self._give_engine(name, most, "balance", least, reason, counts)
                return


def _best(parts: list[_Part], gap: float) -> _Part | None:
    """The heaviest that takes at most half of the gap; else the lightest that takes less than all of it."""
    tolerance = 1e-9 * max(1.0, gap)
    half = next((part for part in parts if part.weight <= gap / 2 + tolerance), None)
    if half is not None and half.weight > 0:
        return half
    over = [part for part in parts if 0 < part.weight < gap - tolerance]
    return over[-1] if over else None
