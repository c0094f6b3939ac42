"""What the nodes of a cluster have, and what it weighs: kept up to date by what changes, not counted again.

    follow(topics, loads) ──> parts of each node, heaviest first, and the sum of their weights

Invariants
- It is what the documents and the reports say, however many changes led there: `Inventory` made at once from the same
  documents has the same parts and sums.
- A round costs a look at each topic, and work for the partitions that have changed: a leader of 100,000 partitions
  does next to nothing while nothing happens.
- Weights are whole numbers (millionths), so that sums do not drift.
- Engines weigh what partitions with the same load do. They, and what a node does besides (`weighted`), count beside its
  partitions: it gets fewer of these. With `fair` nothing counts but numbers.
- What changes its node weighs what it weighed before, until its new node has had the time to measure it. A
  node that has got something does not look idle for that, and what a dead node had is given out by its load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from tidelog.cluster.documents import NOBODY, ClusterSettings, EnginePlacement, TopicPlacement
from tidelog.cluster.spread import Layout, TopicSpread
from tidelog.service.cluster_control import Load, NodeLoad
from tidelog.topics.names import TopicName

WEIGHT_UNIT = 1_000_000
MEASURED_SECONDS = 30.0
"""So long after a partition or an engine has changed its node, the reports of the new one do not count for it."""
_MEGA = 1e6
_KILO = 1e3
# What a partition counts for by being there, in MB/s: so loads that are next to nothing move nothing.
_IDLE_WEIGHT = 0.1
_IDLE = Load()


class Part(NamedTuple):
    """A partition with its weight. They sort by weight, the heaviest first."""

    minus_weight: int
    topic: TopicName
    number: int

    @property
    def weight(self) -> int:
        return -self.minus_weight

    @property
    def key(self) -> str:
        return load_key(self.topic, self.number)


def load_key(topic: TopicName, partition: int) -> str:
    """How a partition is named among loads."""
    return f"{topic}/{partition}"


def weigher(settings: ClusterSettings) -> Callable[[Load], int]:
    """What a partition with this load weighs."""

    def weight(load: Load) -> float:
        if settings.strategy == "fair":
            return 1.0
        if settings.strategy == "balanced":
            return _IDLE_WEIGHT + (load.bytes_in + load.bytes_out) / _MEGA
        return (
            settings.weight_partition
            + settings.weight_bytes_in * load.bytes_in / _MEGA
            + settings.weight_bytes_out * load.bytes_out / _MEGA
            + settings.weight_messages_in * load.messages_in / _KILO
            + settings.weight_messages_out * load.messages_out / _KILO
        )

    return lambda load: round(weight(load) * WEIGHT_UNIT)


def _node_weight(settings: ClusterSettings, report: NodeLoad) -> int:
    """What a node has to do besides, whatever it is for."""
    if settings.strategy != "weighted":
        return 0
    weight = settings.weight_cpu * report.cpu + settings.weight_cold_reads * report.cold_reads
    return round(weight * WEIGHT_UNIT)


def _weighed_by(settings: ClusterSettings) -> dict[str, object]:
    """The settings that weights depend on."""
    return {
        name: getattr(settings, name) for name in settings.__struct_fields__ if name.startswith(("strat", "weight"))
    }


class Inventory:
    """Who has what. One thread uses it."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.pins: dict[TopicName, dict[int, str]] = {}
        """Of the topics that have any."""
        self._settings = settings
        self._weighed_by = _weighed_by(settings)
        self._weigh = weigher(settings)
        self._idle_weight = self._weigh(_IDLE)
        self._topics: dict[TopicName, TopicPlacement] = {}
        self._layout: Layout | None = None
        self._crowded: set[TopicName] = set()
        self._not_looked_at: set[TopicName] = set()
        self._reports: dict[str, NodeLoad] = {}
        self._engines: dict[str, str] = {}
        self._engine_weights: dict[str, int] = {}
        self._engine_measured_at: dict[str, float] = {}
        self._beside: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._parts: dict[str, dict[tuple[TopicName, int], None]] = {}
        self._sums: dict[str, int] = {}
        self._sorted: dict[str, list[Part]] = {}
        self._not_measured: dict[str, float] = {}
        self._measured_at: deque[tuple[float, TopicName, int]] = deque()

    @classmethod
    def of(
        cls, settings: ClusterSettings, topics: Mapping[TopicName, TopicPlacement], loads: Mapping[str, Load]
    ) -> Inventory:
        """Made at once, from the loads of partitions, of all nodes."""
        made = cls(settings)
        report = NodeLoad(node="", at_us=0, partitions=dict(loads))
        nodes = {node for placement in topics.values() for node in placement.partitions}
        made.follow(topics, dict.fromkeys(nodes, report), 0.0)
        return made

    def fits(self, settings: ClusterSettings) -> bool:
        """Whether weights are what these settings say."""
        return self._weighed_by == _weighed_by(settings)

    def owners(self) -> Set[str]:
        """Those that the documents name, alive or not; NOBODY among them."""
        return self._parts.keys()

    def counts(self) -> dict[str, int]:
        """How many partitions each of them has."""
        return {node: len(parts) for node, parts in self._parts.items()}

    def weight(self, topic: TopicName, number: int) -> int:
        return self._weights.get(load_key(topic, number), self._idle_weight)

    def sum_of(self, node: str) -> int:
        """What all that a node has weighs."""
        return self._sums.get(node, 0)

    def beside(self, node: str) -> int:
        """What a node has besides partitions."""
        return self._beside.get(node, 0)

    def engine_weight(self, name: str) -> int:
        return self._engine_weights.get(name, self._idle_weight)

    def parts_of(self, node: str) -> list[Part]:
        """What a node has, the heaviest first. Not to be changed."""
        found = self._sorted.get(node)
        if found is None:
            found = self._sorted[node] = sorted(
                Part(-self.weight(topic, number), topic, number) for topic, number in self._parts.get(node, ())
            )
        return found

    def crowded(self, layout: Layout) -> list[TopicName]:
        """Topics of which a node or a zone has too many, by name."""
        if not layout.is_like(self._layout):
            self._layout = layout
            self._not_looked_at = set(self._topics)
        for topic in self._not_looked_at:
            placement = self._topics.get(topic)
            self._crowded.discard(topic)
            if placement is None or placement.is_deleting:
                continue
            if TopicSpread(placement.partitions, layout).is_crowded:
                self._crowded.add(topic)
        self._not_looked_at.clear()
        return sorted(self._crowded)

    # Following

    def follow(
        self,
        topics: Mapping[TopicName, TopicPlacement],
        loads: Mapping[str, NodeLoad],
        now: float,
        engines: Mapping[str, EnginePlacement] | None = None,
    ) -> None:
        """Takes in what is different from the last time: documents and reports that are the same objects as then are
        passed over."""
        known = self._topics
        for topic, placement in topics.items():
            if placement is not known.get(topic):
                self._take_topic(topic, placement, now)
        if len(known) > len(topics):
            for topic in known.keys() - topics.keys():
                self._drop_topic(topic)
        for node, report in loads.items():
            if report is not self._reports.get(node):
                self._take_report(node, report)
        for node in self._reports.keys() - loads.keys():
            del self._reports[node]  # what it had keeps its weight until another node has measured it
        self._measure(now)
        self._follow_engines(engines or {}, now)

    def _follow_engines(self, engines: Mapping[str, EnginePlacement], now: float) -> None:
        """There are few of them: all are looked at."""
        self._beside = {node: _node_weight(self._settings, report) for node, report in self._reports.items()}
        for name, placement in engines.items():
            node = placement.node
            if self._engines.get(name, node) != node:
                self._engine_measured_at[name] = now + MEASURED_SECONDS
            self._engines[name] = node
            report = self._reports.get(node)
            load = None if report is None else report.engine_loads.get(name)
            if load is not None and self._engine_measured_at.get(name, now) <= now:
                self._engine_weights[name] = self._weigh(load)
            if self._settings.strategy != "fair":
                self._beside[node] = self._beside.get(node, 0) + self.engine_weight(name)
        for name in self._engines.keys() - engines.keys():
            del self._engines[name]
            self._engine_weights.pop(name, None)
            self._engine_measured_at.pop(name, None)

    def _take_topic(self, topic: TopicName, placement: TopicPlacement, now: float) -> None:
        known = self._topics.get(topic)
        if known is not None and known.is_deleting != placement.is_deleting:
            self._drop_topic(topic)
            known = None
        self._topics[topic] = placement
        self._not_looked_at.add(topic)
        if placement.is_deleting:
            return
        before = () if known is None else known.partitions
        after = placement.partitions
        if before != after:
            for number in range(max(len(before), len(after))):
                source = before[number] if number < len(before) else None
                to = after[number] if number < len(after) else None
                if source != to:
                    self._move(topic, number, source, to, now)
        if placement.pins:
            self.pins[topic] = placement.pins
        else:
            self.pins.pop(topic, None)

    def _drop_topic(self, topic: TopicName) -> None:
        placement = self._topics.pop(topic)
        self._not_looked_at.add(topic)
        self.pins.pop(topic, None)
        if not placement.is_deleting:
            for number, node in enumerate(placement.partitions):
                self._move(topic, number, node, None, 0.0)

    def _move(self, topic: TopicName, number: int, source: str | None, to: str | None, now: float) -> None:
        key = load_key(topic, number)
        weight = self._weights.get(key, self._idle_weight)
        if source is not None:
            del self._parts[source][topic, number]
            self._sums[source] -= weight
            self._sorted.pop(source, None)
            if not self._parts[source]:
                del self._parts[source], self._sums[source]
        if to is None:
            self._weights.pop(key, None)
            self._not_measured.pop(key, None)
            return
        self._parts.setdefault(to, {})[topic, number] = None
        self._sums[to] = self._sums.get(to, 0) + weight
        self._sorted.pop(to, None)
        if source is None:
            self._weigh_again(topic, number, key, to)
        elif source != NOBODY:
            self._not_measured[key] = now + MEASURED_SECONDS
            self._measured_at.append((now + MEASURED_SECONDS, topic, number))

    def _measure(self, now: float) -> None:
        """From here on the reports of its new node count for what was moved."""
        while self._measured_at and self._measured_at[0][0] <= now:
            until, topic, number = self._measured_at.popleft()
            key = load_key(topic, number)
            if self._not_measured.get(key) == until:
                del self._not_measured[key]
                self._weigh_again(topic, number, key, self._topics[topic].partitions[number])

    def _weigh_again(self, topic: TopicName, number: int, key: str, node: str) -> None:
        report = self._reports.get(node)
        if report is not None:
            self._set_weight(topic, number, key, node, self._weigh(report.partitions.get(key, _IDLE)))

    def _take_report(self, node: str, report: NodeLoad) -> None:
        known = self._reports.get(node)
        before = {} if known is None else known.partitions
        self._reports[node] = report
        for key, load in report.partitions.items():
            if before.get(key) != load:
                self._reweigh(key, node, load)
        for key in before.keys() - report.partitions.keys():
            self._reweigh(key, node, _IDLE)

    def _reweigh(self, key: str, node: str, load: Load) -> None:
        name, _, digits = key.rpartition("/")
        namespace, _, rest = name.partition("/")
        if not digits.isdecimal() or key in self._not_measured:
            return
        topic, number = TopicName(namespace, rest), int(digits)
        placement = self._topics.get(topic)
        if placement is None or number >= len(placement.partitions) or placement.partitions[number] != node:
            return
        if not placement.is_deleting:
            self._set_weight(topic, number, key, node, self._weigh(load))

    def _set_weight(self, topic: TopicName, number: int, key: str, node: str, weight: int) -> None:
        before = self._weights.get(key, self._idle_weight)
        if weight == before:
            return
        if weight == self._idle_weight:
            del self._weights[key]
        else:
            self._weights[key] = weight
        self._sums[node] += weight - before
        self._sorted.pop(node, None)
