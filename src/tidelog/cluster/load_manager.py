"""Who serves what: from the state of a cluster to the moves that it needs, each with its reason. A pure function.

    plan(situation) -> [Decision, ...]

In this order, and each as far as its limit goes:

    failover, assign   what nobody alive serves gets a node, at once and without a limit
    drain              what a node serves that is being drained or stopped, or is too old, goes elsewhere
    pin, move          what an operator asked for
    balance            from the node that has most to the one that has least, while one is out of the band; then, while
                       a zone or a node has too many of a topic, from there to where it has fewer: by a move where the
                       loads allow it, else in exchange for another partition

Invariants
- The same situation gives the same decisions: nothing here asks a clock, a store or chance.
- No move for the sake of balance makes the larger of its two nodes larger: repeating it ends.
- What spreads a topic takes neither node further off the average than the farther one was, or than three quarters of
  `hysteresis`: it gives balance nothing to do. All topics together are spread better by it, so it ends, too.
- Hysteresis: balancing begins when a node is more than `hysteresis` off the average and goes on to half of that. A
  partition that was moved rests. `max_moves_per_hour` is a limit for all of it.
- Partitions of a topic are spread over nodes, and over zones in proportion to their nodes (`spread.py`): when they are
  given out, and by balance, which of partitions of about the same weight takes one that is too many where it is.
- A partition is decided on once in a plan.
- A node whose disk has no room is given nothing but what is pinned to it or asked for, as long as another has room.
- Engines are spread by what they weigh among themselves (`fair`: by their number), and the rest is as for partitions:
  pins, drains, requests, limits, rest.
- A plan costs as much as there are nodes, and as it decides: what the nodes have is counted before (`inventory.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
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
from tidelog.cluster.spread import Layout, TopicSpread
from tidelog.service.cluster_control import Load
from tidelog.topics.names import TopicName

HOUR_SECONDS = 3600.0
_ENGINES_BAND = 2
"""So many times `hysteresis` a node's engines are heavier than another's before one is moved: that is a restore."""
_CANDIDATES = 100
"""Partitions that are compared to find one to move,"""
_PLACES = 2
"""nodes of a zone, and zones, that are tried for one that is too many where it is,"""
_ALONE = 0.75
"""So far off the average, as a part of `hysteresis`, a node may be by what spreads a topic."""
_TRIES = 4
"""partitions of a topic, and topics that stay as they are, in one plan: they are tried in turn, second by second."""


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


class _Step(NamedTuple):
    part: Part
    source: str
    to: str


class _Plan:
    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._settings = situation.settings
        self._inventory = situation.inventory or Inventory.of(situation.settings, situation.topics, situation.loads)
        self.usable = {name: node for name, node in situation.nodes.items() if node.is_usable}
        self.load = {name: self._inventory.sum_of(name) + self._inventory.beside(name) for name in self.usable}
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
        self._spreads: dict[TopicName, TopicSpread] = {}
        self._layout = Layout(
            {name: node.zone for name, node in self.usable.items()}, self._takers, self._settings.hysteresis
        )
        self._ranking = _Ranking(self.load)
        self._ranking_of_zone = {
            zone: _Ranking({name: self.load[name] for name, node in self._takers.items() if node.zone == zone})
            for zone in self._layout.zone_sizes
        }
        """Of those that are given something."""
        self._is_asked = any(request.kind == "balance" for request in situation.requests.values())
        self._room = max(0, self._settings.max_moves_at_once - situation.under_way)
        self._left_this_hour = max(0, self._settings.max_moves_per_hour - situation.moves_this_hour)

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

    def _spread_of(self, topic: TopicName) -> TopicSpread:
        found = self._spreads.get(topic)
        if found is None:
            found = self._spreads[topic] = TopicSpread(self._situation.topics[topic].partitions, self._layout)
        return found

    def _choose(self, part: Part) -> str:
        """The pin. Else no node gets more of a topic than its share; the least loaded one of the zone that has fewest
        of the topic, unless that is out of the band: then the least loaded of all."""
        pin = self._pins.get((part.topic, part.number))
        if pin is not None:
            return pin
        spread = self._spread_of(part.topic)
        has, share = spread.nodes, spread.node_share
        found = {zone: node for zone in self._ranking_of_zone if (node := self._least(zone, has, share)) is not None}
        if not found:
            found = {zone: node for zone in self._ranking_of_zone if (node := self._least(zone, {}, 1)) is not None}
        lowest = min(found.values())
        if len(found) == 1:
            return lowest[1]
        sizes = self._layout.zone_sizes
        _, load, name = min((spread.zones[zone] / sizes[zone], *node) for zone, node in found.items())
        return name if load <= max(lowest[0], self._average) * (1 + self._settings.hysteresis) else lowest[1]

    def _give(self, kind: DecisionKind, part: Part, source: str, to: str, reason: str) -> None:
        self._found.append(
            Decision(kind=kind, reason=reason, to=to, source=source, topic=str(part.topic), partition=part.number)
        )
        self._decided.add(part.key)
        self._spread_of(part.topic).move(source, to)
        if source in self.load:
            self._add(source, -part.weight)
        self._add(to, part.weight)

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
        before, found = self.spread(), len(self._found)
        if not self._is_asked and not self._situation.is_settled:
            return
        if self._is_asked or before > self._settings.hysteresis:
            self._level(before)
        if len(self._found) == found:
            self._spread_topics()

    def _level(self, before: float) -> None:
        """Until no node is out of half of the band."""
        band = self._settings.hysteresis / 2
        while self._moves_left() > 0 and self.spread() > band and (step := self._next_step()) is not None:
            part, source, to = step
            reason = (
                f"{source} has {self.load[source] / WEIGHT_UNIT:.2f} and {to} {self.load[to] / WEIGHT_UNIT:.2f} "
                f"by the strategy {self._settings.strategy}: {before:.0%} off the average"
            )
            self._give_balance(part, source, to, reason)

    def _moves_left(self) -> int:
        return self._room if self._is_asked else min(self._room, self._left_this_hour)

    def _give_balance(self, part: Part, source: str, to: str, reason: str) -> None:
        self._room -= 1
        self._left_this_hour -= 1
        self._give("balance", part, source, to, reason)

    def _is_movable(self, part: Part) -> bool:
        if part.key in self._decided or (part.topic, part.number) in self._pins:
            return False
        return self._has_rested(part.key)

    def _has_rested(self, subject: str) -> bool:
        """Whether it is long since this was moved; on request that does not matter."""
        moved_at = self._situation.moved_at.get(subject)
        return self._is_asked or moved_at is None or moved_at <= self._situation.now - self._settings.rest_seconds

    def _next_step(self) -> _Step | None:
        """The best move from the node that has most to the one that has least, of its own zone if that helps."""
        lowest, average = min(ranking.least for ranking in self._ranking_of_zone.values())[1], self._average
        for load, source in self._ranking.falling():
            if source == lowest:
                break
            for to in self._receivers(source, lowest):
                part = self._best(source, to)
                if part is not None:
                    return _Step(part, source, to)
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

    def _best(self, source: str, to: str) -> Part | None:
        """About the heaviest that takes at most half of the gap, by what it does to the spread of its topic; else the
        lightest that takes less than all of it."""
        gap, parts = self.load[source] - self.load[to], self._inventory.parts_of(source)
        fitting = bisect_left(parts, -(gap // 2), key=lambda part: part.minus_weight)
        weightless = bisect_left(parts, 0, key=lambda part: part.minus_weight)
        best = self._best_spread(islice(parts, fitting, weightless), source, to)
        if best is not None:
            return best
        for part in reversed(parts[:fitting]):
            if part.weight >= gap:
                break
            if self._is_movable(part):
                return part
        return None

    def _best_spread(self, parts: Iterator[Part], source: str, to: str) -> Part | None:
        """Of those that have at least half of the heaviest one's weight."""
        found: Part | None = None
        most, enough = 0, 0.0
        movable = (part for part in parts if self._is_movable(part))
        for part in islice(movable, _CANDIDATES):
            if part.weight < enough:
                break
            gain = self._spread_of(part.topic).gain(source, to)
            if found is None or gain > most:
                found, most, enough = part, gain, enough or part.weight / 2
            if gain > 0:
                break
        return found

    # Spreading topics

    def _spread_topics(self) -> None:
        """What has to go alone waits until there is nothing to exchange: it takes the slack that others may need."""
        crowded = self._inventory.crowded(self._layout) if self._moves_left() > 0 else []
        first = int(self._situation.now) * _TRIES % len(crowded) if crowded else 0
        before = len(self._found)
        for goes_alone in (False, True):
            tries = 0
            for topic in crowded[first:] + crowded[:first]:
                while self._moves_left() > 0 and self._spread_step(topic, goes_alone):
                    pass
                tries += self._spread_of(topic).is_crowded
                if tries >= _TRIES:
                    break
            if len(self._found) > before:
                return

    def _spread_step(self, topic: TopicName, goes_alone: bool) -> bool:
        """Moves one partition from where there are too many of its topic to where there are fewer; False: none can."""
        spread, tries = self._spread_of(topic), 0
        for number, source in enumerate(self._situation.topics[topic].partitions):
            part = Part(-self._inventory.weight(topic, number), topic, number)
            why = spread.too_many(source) if source in self.load and self._is_movable(part) else ""
            if not why:
                continue
            for to in self._roomier(spread, source):
                steps = self._alone(part, source, to) if goes_alone else self._exchange(part, source, to)
                if not steps or len(steps) > self._moves_left():
                    continue
                reason = f"of {topic}'s {spread.partitions} partitions {why}"
                for other, here, there in steps:
                    self._give_balance(other, here, there, reason)
                    reason = f"in exchange for {part.key}"
                return True
            tries += 1
            if tries >= _TRIES:
                break
        return False

    def _roomier(self, spread: TopicSpread, source: str) -> Iterator[str]:
        """The least loaded nodes where one more of a topic is not too many, of zones with the smallest part of it."""
        sizes = self._layout.zone_sizes
        zones = sorted(self._ranking_of_zone, key=lambda zone: (spread.zones[zone] / sizes[zone], zone))
        for zone in zones[:_PLACES]:
            rising = (name for _, name in self._ranking_of_zone[zone].rising())
            yield from list(islice((name for name in rising if spread.gain(source, name) > 0), _PLACES))

    def _exchange(self, part: Part, source: str, to: str) -> list[_Step]:
        """A move, with what goes back for it so that the loads stay as even as they are: nothing, a partition of about
        the same weight, or a heavier one for which one more goes along. Empty: it cannot be."""
        average = self._average
        high, low = self.load[source] - average, self.load[to] - average
        allowed = max(abs(high), abs(low), average * self._settings.hysteresis / 2)
        least, most = max(high - allowed, -allowed - low), min(high + allowed, allowed - low)
        first = _Step(part, source, to)
        if part.weight <= most:
            return [first]
        return self._one_back(first, part.weight - most, part.weight - least) or self._two_for_one(first, least, most)

    def _alone(self, part: Part, source: str, to: str) -> list[_Step]:
        """As far as that leaves balance nothing to do."""
        average, off = self._average, self._average * self._settings.hysteresis * _ALONE
        fits = self.load[source] - part.weight >= average - off and self.load[to] + part.weight <= average + off
        return [_Step(part, source, to)] if fits else []

    def _one_back(self, first: _Step, lightest: float, heaviest: float) -> list[_Step]:
        part, source, to = first
        alike = _between(self._inventory.parts_of(to), lightest, heaviest)
        alike.sort(key=lambda other: (abs(other.weight - part.weight), other))
        movable = (other for other in alike if other.topic != part.topic and self._is_movable(other))
        for other in islice(movable, _CANDIDATES):
            if self._spread_of(other.topic).gain(to, source) >= 0:
                return [first, _Step(other, to, source)]
        return []

    def _two_for_one(self, first: _Step, least: float, most: float) -> list[_Step]:
        part, source, to = first
        more = [
            other
            for other in self._inventory.parts_of(source)
            if other != part and self._spread_of(other.topic).gain(source, to) > 0 and self._is_movable(other)
        ]
        if not more:
            return []
        heaviest = part.weight + more[0].weight - least
        heavier = _between(self._inventory.parts_of(to), part.weight + more[-1].weight - most, heaviest)
        for back in islice(filter(self._is_movable, heavier), _CANDIDATES):
            rest = back.weight - part.weight
            for other in islice(_between(more, rest + least, rest + most), _PLACES):
                steps = [first, _Step(back, to, source), _Step(other, source, to)]
                if self._gain(steps) > 0:
                    return steps
        return []

    def _gain(self, steps: Sequence[_Step]) -> int:
        """Of all of them, one after the other."""
        gain = 0
        for part, source, to in steps:
            gain += self._spread_of(part.topic).gain(source, to)
            self._spread_of(part.topic).move(source, to)
        for part, source, to in steps:
            self._spread_of(part.topic).move(to, source)
        return gain

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
        """What nobody serves is given out at once; drains, requests and pins follow, then one at a time what makes
        nodes even: an engine is restored where it goes."""
        engines = self._situation.engines
        weights = Counter(dict.fromkeys(self.usable, 0))
        for name, placement in engines.items():
            if placement.node in self.usable:
                weights[placement.node] += self._inventory.engine_weight(name)
        asked = {
            request.engine: request
            for _, request in sorted(self._situation.requests.items(), reverse=True)  # the first is the last word here
            if request.kind == "move-engine" and request.node in self.usable
        }
        moved = set[str]()
        for name, placement in sorted(engines.items()):
            found = self._engine_moved(placement, asked.get(name), weights)
            if found is not None:
                self._give_engine(name, placement.node, *found, weights)
                moved.add(name)
        self._even_engines(weights, moved | asked.keys())

    def _engine_moved(
        self, placement: EnginePlacement, request: Request | None, weights: Mapping[str, int]
    ) -> tuple[DecisionKind, str, str] | None:
        """Where an engine goes, and why; None: it stays."""
        node, pin = placement.node, placement.pin if placement.pin in self.usable else NOBODY
        if node not in self._situation.nodes:
            if not node:
                return "assign", pin or self._lightest(weights), "nobody serves it"
            return "failover", pin or self._lightest(weights), f"{node} is not alive"
        if node not in self.usable and self._takes_room():
            reason = self._situation.nodes[node].why_not or f"{node} is being drained"
            return "drain", pin or self._lightest(weights), reason
        if request is not None and node != request.node and self._takes_room():
            return "move", request.node, f"asked for by {request.by or '?'}"
        if pin and pin != node and request is None and self._takes_room():
            return "pin", pin, f"it is pinned to {pin}"
        return None

    def _lightest(self, weights: Mapping[str, int]) -> str:
        return _fewest({name: weights[name] for name in self._takers})

    def _takes_room(self) -> bool:
        self._room -= 1
        return self._room >= 0

    def _give_engine(
        self, name: str, source: str, kind: DecisionKind, to: str, reason: str, weights: Counter[str]
    ) -> None:
        weight = self._inventory.engine_weight(name)
        weights[to] += weight
        if source in weights:
            weights[source] -= weight
        self._found.append(Decision(kind=kind, reason=reason, to=to, source=source, engine=name))

    def _even_engines(self, weights: Counter[str], stay: set[str]) -> None:
        """The heaviest that does not make the heavier of the two nodes heavier."""
        if not (self._is_asked or (self._situation.is_settled and self._left_this_hour > 0)):
            return
        most, least = max(weights, key=lambda node: (weights[node], node)), self._lightest(weights)
        gap, is_fair = weights[most] - weights[least], self._settings.strategy == "fair"
        average = sum(weights.values()) / len(weights)
        if not is_fair and gap <= average * self._settings.hysteresis * _ENGINES_BAND:
            return
        movable = [
            (-weight, name)
            for name, placement in self._situation.engines.items()
            if placement.node == most
            and not placement.pin
            and name not in stay
            and 2 * (weight := self._inventory.engine_weight(name)) <= gap
            and self._has_rested(f"engine {name}")
        ]
        if movable and self._takes_room():
            heavy, light = weights[most] / WEIGHT_UNIT, weights[least] / WEIGHT_UNIT
            reason = f"{most} has {heavy:.0f} engines, {least} {light:.0f}"
            if not is_fair:
                reason = f"the engines of {most} weigh {heavy:.2f}, those of {least} {light:.2f}"
            self._give_engine(min(movable)[1], most, "balance", least, reason, weights)


def _between(parts: list[Part], lightest: float, heaviest: float) -> list[Part]:
    """Those of such a weight; the parts are sorted."""
    first = bisect_left(parts, -heaviest, key=lambda part: part.minus_weight)
    return parts[first : bisect_right(parts, -lightest, key=lambda part: part.minus_weight)]


def _fewest(counts: Mapping[str, int]) -> str:
    return min(counts, key=lambda node: (counts[node], node))
