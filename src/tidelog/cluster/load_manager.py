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
- A node whose disk has no room is given nothing but what is pinned to it or asked for, as long as another has room.
- Engines are spread by their number, and the rest is as for partitions: pins, drains, requests, limits, rest.
- A plan costs as much as there are nodes, and as it decides: what the nodes have is counted before (`inventory.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import msgspec

from tidelog.cluster.documents import (
    NOBODY,
    ClusterSettings,
    Coordinators,
    Decision,
    DecisionKind,
    EnginePlacement,
    Request,
    TopicPlacement,
)
from tidelog.cluster.inventory import WEIGHT_UNIT, Inventory, Part, load_key
from tidelog.service.cluster_control import Load
from tidelog.topics.names import TopicName

HOUR_SECONDS = 3600.0
_UNEVEN_ENGINES = 2
"""A node has so many engines more than another before one is moved."""


class Candidate(NamedTuple):
    """A node as the load manager sees it. One that is not usable keeps what it has only until it is elsewhere."""

    name: str
    zone: str = ""
    is_usable: bool = True
    why_not: str = ""
    has_room: bool = True
    """On its disk."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan depends on."""

    now: float
    """In seconds, by a clock that never jumps; times are compared with it and with nothing else."""
    settings: ClusterSettings
    nodes: Mapping[str, Candidate]
    """Those that are alive."""
    topics: Mapping[TopicName, TopicPlacement]
    engines: Mapping[str, EnginePlacement] = {}
    coordinators: Coordinators = Coordinators()
    loads: Mapping[str, Load] = {}
    """Of partitions, by `load_key`, where no inventory says what they weigh."""
    inventory: Inventory | None = None
    """Of `topics`; without one it is made."""
    requests: Mapping[str, Request] = {}
    moved_at: Mapping[str, float] = {}
    """When partitions were moved last for the sake of balance or on request, of the last hour at least."""
    moves_this_hour: int = 0
    """How often any partition was moved so in the last hour."""
    under_way: int = 0
    """Moves that have not ended."""
    is_settled: bool = True
    """Whether it is long enough since a node came: before that nothing is balanced."""


def plan(situation: Situation) -> list[Decision]:
    """What is to be moved now."""
    return _Plan(situation).decisions()


def imbalance(situation: Situation) -> float:
    """How far the node that is farthest off the average is off it, as a part of the average."""
    made = _Plan(situation)
    return made.spread() if made.usable else 0.0


class _Ranking:
    """Nodes by what they have, the least first."""

    def __init__(self, loads: Mapping[str, int]) -> None:
        self._ranked = sorted((load, name) for name, load in loads.items())

    def change(self, name: str, before: int, after: int) -> None:
        del self._ranked[bisect_left(self._ranked, (before, name))]
        insort(self._ranked, (after, name))

    def rising(self) -> Iterator[tuple[int, str]]:
        """Not to be gone on with after a change."""
        return iter(self._ranked)

    def falling(self) -> Iterator[tuple[int, str]]:
        return reversed(self._ranked)

    @property
    def least(self) -> tuple[int, str]:
        return self._ranked[0]

    @property
    def most(self) -> tuple[int, str]:
        return self._ranked[-1]


class _Plan:
    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._settings = situation.settings
        self._inventory = situation.inventory or Inventory.of(situation.settings, situation.topics, situation.loads)
        self.usable = {name: node for name, node in situation.nodes.items() if node.is_usable}
        self.load = {name: self._inventory.sum_of(name) for name in self.usable}
        self._total = sum(self.load.values())
        self._takers = {name: node for name, node in self.usable.items() if node.has_room} or self.usable
        self._pins = {
            (topic, number): pin
            for topic, pins in self._inventory.pins.items()
            for number, pin in pins.items()
            if pin in self.usable and number < len(situation.topics[topic].partitions)
        }
        self._found: list[Decision] = []
        self._decided: set[str] = set()
        self._spreads: dict[TopicName, Counter[str]] = {}
        self._zones: dict[TopicName, Counter[str]] = {}
        self._zone_sizes = Counter(node.zone for node in self._takers.values())
        self._ranking = _Ranking(self.load)
        self._ranking_of_zone = {
            zone: _Ranking({name: self.load[name] for name, node in self._takers.items() if node.zone == zone})
            for zone in self._zone_sizes
        }
        """Of those that are given something."""
        self._room = max(0, self._settings.max_moves_at_once - situation.under_way)

    def decisions(self) -> list[Decision]:
        if not self.usable:
            return []
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

    def _least(self, zone: str, has: Mapping[str, int], most: float) -> tuple[int, str] | None:
        """The node of a zone that has least, of those with fewer than `most` of a topic; `has` says how many."""
        return next((found for found in self._ranking_of_zone[zone].rising() if has.get(found[1], 0) < most), None)

    def _spread_of(self, topic: TopicName) -> Counter[str]:
        """How many partitions of a topic each node has."""
        found = self._spreads.get(topic)
        if found is None:
            nodes = self._situation.topics[topic].partitions
            found = self._spreads[topic] = Counter(node for node in nodes if node in self.usable)
            self._zones[topic] = Counter(self.usable[node].zone for node in nodes if node in self.usable)
        return found

    def _choose(self, part: Part) -> str:
        """The pin. Else no node gets more of a topic than its share; the least loaded one of the zone that has fewest
        of the topic, unless that is out of the band: then the least loaded of all."""
        pin = self._pins.get((part.topic, part.number))
        if pin is not None:
            return pin
        has = self._spread_of(part.topic)
        share = math.ceil(len(self._situation.topics[part.topic].partitions) / len(self._takers))
        found = {zone: node for zone in self._ranking_of_zone if (node := self._least(zone, has, share)) is not None}
        if not found:
            found = {zone: node for zone in self._ranking_of_zone if (node := self._least(zone, {}, 1)) is not None}
        lowest = min(found.values())
        if len(found) == 1:
            return lowest[1]
        zones = self._zones[part.topic]
        _, load, name = min((zones[zone] / self._zone_sizes[zone], *node) for zone, node in found.items())
        return name if load <= max(lowest[0], self._average) * (1 + self._settings.hysteresis) else lowest[1]

    def _give(self, kind: DecisionKind, part: Part, source: str, to: str, reason: str) -> None:
        self._found.append(
            Decision(kind=kind, reason=reason, to=to, source=source, topic=str(part.topic), partition=part.number)
        )
        self._decided.add(part.key)
        spread, zones = self._spread_of(part.topic), self._zones[part.topic]
        if source in self.load:
            self._add(source, -part.weight)
            spread[source] -= 1
            zones[self.usable[source].zone] -= 1
        self._add(to, part.weight)
        spread[to] += 1
        zones[self.usable[to].zone] += 1

    def _add(self, name: str, weight: int) -> None:
        before = self.load[name]
        after = self.load[name] = before + weight
        self._total += weight
        self._ranking.change(name, before, after)
        if name in self._takers:
            self._ranking_of_zone[self.usable[name].zone].change(name, before, after)

    # What must be

    def _assign_orphans(self) -> None:
        """The heaviest first: the light ones level what those leave."""
        gone = self._inventory.owners() - self._situation.nodes.keys()
        for part, node in sorted((part, name) for name in gone for part in self._inventory.parts_of(name)):
            kind: DecisionKind = "failover" if node else "assign"
            reason = f"{node} is not alive" if node else "nobody serves it"
            self._give(kind, part, node, self._choose(part), reason)

    def _drain(self) -> None:
        for name in sorted(self._situation.nodes.keys() - self.usable.keys()):
            node = self._situation.nodes[name]
            for part in self._inventory.parts_of(name):
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
        if source == to:
            self._decided.add(key)  # it is where it was asked for: balance leaves it there
        if key in self._decided or self._room <= 0:
            return
        self._room -= 1
        part = Part(-self._inventory.weight(topic, number), topic, number)
        self._give(kind, part, source, to, f"it is pinned to {to}" if kind == "pin" else f"asked for by {by or '?'}")

    # Balance

    def spread(self) -> float:
        """How far off the average the farthest node is."""
        average = self._average
        if average <= 0:
            return 0.0
        return max(self._ranking.most[0] - average, average - self._ranking.least[0]) / average

    def _balance(self) -> None:
        is_asked = any(request.kind == "balance" for request in self._situation.requests.values())
        before = self.spread()
        if not is_asked and (not self._situation.is_settled or before <= self._settings.hysteresis):
            return
        band = self._settings.hysteresis / 2
        room = self._room if is_asked else min(self._room, self._left_this_hour())
        while room > 0 and self.spread() > band and (step := self._next_step(is_asked)) is not None:
            part, source, to = step
            room -= 1
            self._room -= 1
            reason = (
                f"{source} has {self.load[source] / WEIGHT_UNIT:.2f} and {to} {self.load[to] / WEIGHT_UNIT:.2f} "
                f"by the strategy {self._settings.strategy}: {before:.0%} off the average"
            )
            self._give("balance", part, source, to, reason)

    def _left_this_hour(self) -> int:
        return max(0, self._settings.max_moves_per_hour - self._situation.moves_this_hour)

    def _is_movable(self, part: Part, is_asked: bool) -> bool:
        if part.key in self._decided or (part.topic, part.number) in self._pins:
            return False
        return self._has_rested(part.key, is_asked)

    def _has_rested(self, subject: str, is_asked: bool) -> bool:
        """Whether it is long since this was moved; on request that does not matter."""
        moved_at = self._situation.moved_at.get(subject)
        return is_asked or moved_at is None or moved_at <= self._situation.now - self._settings.rest_seconds

    def _next_step(self, is_asked: bool) -> tuple[Part, str, str] | None:
        """The best move from the node that has most to the one that has least, of its own zone if that helps."""
        lowest, average = min(ranking.least for ranking in self._ranking_of_zone.values())[1], self._average
        for load, source in self._ranking.falling():
            if source == lowest:
                break
            for to in self._receivers(source, lowest):
                part = self._best(source, load - self.load[to], is_asked)
                if part is not None:
                    return part, source, to
            if load <= average:
                break
        return None

    def _receivers(self, source: str, lowest: str) -> Iterator[str]:
        of_zone = self._ranking_of_zone.get(self.usable[source].zone)
        if of_zone is not None:
            load, near = of_zone.least
            if load < self._average * (1 - self._settings.hysteresis / 2):
                yield near
        yield lowest

    def _best(self, source: str, gap: int, is_asked: bool) -> Part | None:
        """The heaviest that takes at most half of the gap; else the lightest that takes less than all of it."""
        parts = self._inventory.parts_of(source)
        fitting = bisect_left(parts, -(gap // 2), key=lambda part: part.minus_weight)
        weightless = bisect_left(parts, 0, key=lambda part: part.minus_weight)
        for at in chain(range(fitting, weightless), range(fitting - 1, -1, -1)):
            if parts[at].weight >= gap:
                break
            if self._is_movable(parts[at], is_asked):
                return parts[at]
        return None

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
        to = _fewest(counts)
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
            for _, request in sorted(self._situation.requests.items(), reverse=True)  # the first is the last word here
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
        if node not in self._situation.nodes:
            if not node:
                return "assign", pin or self._fewest_engines(counts), "nobody serves it"
            return "failover", pin or self._fewest_engines(counts), f"{node} is not alive"
        if node not in self.usable and self._takes_room():
            reason = self._situation.nodes[node].why_not or f"{node} is being drained"
            return "drain", pin or self._fewest_engines(counts), reason
        if request is not None and node != request.node and self._takes_room():
            return "move", request.node, f"asked for by {request.by or '?'}"
        if pin and pin != node and request is None and self._takes_room():
            return "pin", pin, f"it is pinned to {pin}"
        return None

    def _fewest_engines(self, counts: Mapping[str, int]) -> str:
        return _fewest({name: counts[name] for name in self._takers})

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
        most, least = max(counts, key=lambda node: (counts[node], node)), self._fewest_engines(counts)
        if counts[most] - counts[least] < _UNEVEN_ENGINES:
            return
        for name, placement in sorted(self._situation.engines.items()):
            if (
                placement.node == most
                and not placement.pin
                and name not in stay
                and self._has_rested(f"engine {name}", is_asked)
                and self._takes_room()
            ):
                reason = f"{most} has {counts[most]} engines, {least} {counts[least]}"
                self._give_engine(name, most, "balance", least, reason, counts)
                return


def _fewest(counts: Mapping[str, int]) -> str:
    return min(counts, key=lambda node: (counts[node], node))
