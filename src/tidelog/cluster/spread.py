"""How the partitions of a topic are spread over nodes and zones, and what is too many of them in one place.

    a node's share of a topic   ceil(partitions / nodes)
    a zone's share              ceil(partitions * nodes of the zone / nodes)

Too many is what is above the share by more than `hysteresis`, which allows for something where a share is ten or more.

Invariants
- Nodes that may be given something make the shares. One that may not, as its disk is full, has its share as others do;
  a zone that has no other nodes keeps what it has.
- A topic that is within its shares can always be kept so: they add up to at least all of its partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class _Shares(NamedTuple):
    """Of a topic with so many partitions: the share of a node, and what is not too many."""

    node: int
    most_of_node: int
    most_of_zones: dict[str, int]


class Layout:
    """The nodes that are served by, with their zones, and those of them that may be given something."""

    def __init__(self, zones: Mapping[str, str], takers: Collection[str], hysteresis: float) -> None:
        self.zones = dict(zones)
        self.hysteresis = hysteresis
        self.zone_sizes = Counter(self.zones[name] for name in takers)
        """How many of those that are given something each zone has."""
        self._takers = len(takers)
        self._shares: dict[int, _Shares] = {}

    def is_like(self, other: Layout | None) -> bool:
        """Whether the same is too many."""
        return (
            other is not None
            and self.zones == other.zones
            and self.zone_sizes == other.zone_sizes
            and self.hysteresis == other.hysteresis
        )

    def shares(self, partitions: int) -> _Shares:
        found = self._shares.get(partitions)
        if found is None:
            node = -(-partitions // self._takers)
            zones = {zone: self._most(-(-partitions * size // self._takers)) for zone, size in self.zone_sizes.items()}
            found = self._shares[partitions] = _Shares(node, self._most(node), zones)
        return found

    def _most(self, share: int) -> int:
        return share + int(share * self.hysteresis)


class TopicSpread:
    """How many partitions of a topic each node and each zone has."""

    __slots__ = ("_layout", "_shares", "nodes", "partitions", "zones")

    def __init__(self, nodes: Sequence[str], layout: Layout) -> None:
        """`nodes` has that of each partition; those that serve no more do not count."""
        self._layout = layout
        self.partitions = len(nodes)
        self._shares = layout.shares(self.partitions)
        self.nodes = Counter(filter(layout.zones.__contains__, nodes))
        self.zones: Counter[str] = Counter()
        for node, count in self.nodes.items():
            self.zones[layout.zones[node]] += count

    @property
    def node_share(self) -> int:
        return self._shares.node

    def _most_of(self, zone: str) -> int:
        return self._shares.most_of_zones.get(zone, self.partitions)

    @property
    def is_crowded(self) -> bool:
        """Whether a node or a zone has too many."""
        most = self._shares.most_of_node
        return any(count > most for count in self.nodes.values()) or any(
            count > self._most_of(zone) for zone, count in self.zones.items()
        )

    def too_many(self, node: str) -> str:
        """Where there are too many, of a node and its zone; empty: nowhere."""
        zone = self._layout.zones[node]
        if self.zones[zone] > self._most_of(zone):
            return f"zone {zone or '(none)'} has {self.zones[zone]}, where {self._most_of(zone)} are enough"
        if self.nodes[node] > self._shares.most_of_node:
            return f"{node} has {self.nodes[node]}, where {self._shares.most_of_node} are enough"
        return ""

    def gain(self, source: str, to: str) -> int:
        """By how many less there would be too many after a move; below 0: by how many more."""
        most, zones = self._shares.most_of_node, self._layout.zones
        gain = (self.nodes[source] > most) - (self.nodes[to] >= most)
        here, there = zones[source], zones[to]
        if here != there:
            gain += (self.zones[here] > self._most_of(here)) - (self.zones[there] >= self._most_of(there))
        return gain

    def move(self, source: str, to: str) -> None:
        """Takes in a move; the source may be one that does not serve any more."""
        if source in self._layout.zones:
            self.nodes[source] -= 1
            self.zones[self._layout.zones[source]] -= 1
        self.nodes[to] += 1
        self.zones[self._layout.zones[to]] += 1
