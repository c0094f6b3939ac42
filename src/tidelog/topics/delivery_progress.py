"""How far a subscription is: which offsets are settled. Pure.

    settled   settled   open   settled  open   settled          open ...
    0 ------------------ 10     11 --- 13       14 ---- 20
                         ^ floor [11, 13)        [14, 20)  ranges

Invariants
- Everything below `floor` is settled, `floor` itself never is.
- Ranges are in order and apart: between two of them, and between `floor` and the first, at least one offset is open.
- Settling in order costs one step; out of order a search among the ranges, of which there are as many as holes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Range = tuple[int, int]


class Progress:
    """Settled offsets. `ranges` are (start, stop), stop exclusive, and lie above `floor`."""

    __slots__ = ("_starts", "_stops", "floor")

    def __init__(self, floor: int, ranges: Iterable[Range] = ()) -> None:
        self.floor = floor
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.settle_range(start, stop)

    @property
    def ranges(self) -> list[Range]:
        return list(zip(self._starts, self._stops, strict=True))

    @property
    def range_count(self) -> int:
        return len(self._starts)

    @property
    def end(self) -> int:
        """Nothing at or above it is settled."""
        return self._stops[-1] if self._stops else self.floor

    @property
    def settled_above(self) -> int:
        """How many offsets above the floor are settled."""
        return sum(self._stops) - sum(self._starts)

    def is_settled(self, offset: int) -> bool:
        if offset < self.floor:
            return True
        index = bisect_right(self._starts, offset)
        return index > 0 and offset < self._stops[index - 1]

    def settle(self, offset: int) -> bool:
        """False when it was settled before."""
        if offset == self.floor:
            self.floor = offset + 1
            if self._starts and self._starts[0] == self.floor:
                del self._starts[0]
                self.floor = self._stops.pop(0)
            return True
        if self.is_settled(offset):
            return False
        self.settle_range(offset, offset + 1)
        return True

    def settle_below(self, offset: int) -> None:
        """Everything below is settled."""
        if offset > self.floor:
            self.settle_range(self.floor, offset)

    def settle_range(self, start: int, stop: int) -> None:
        """All of `start` up to `stop` (exclusive), whatever of it was settled before."""
        start = max(start, self.floor)
        if start >= stop:
            return
        if start > self.floor:
            self._insert(start, stop)
            return
        self.floor = stop
        passed = bisect_right(self._starts, stop)
        if passed:
            self.floor = max(stop, self._stops[passed - 1])
            del self._starts[:passed], self._stops[:passed]

    def _insert(self, start: int, stop: int) -> None:
        """Joins it with every range that it touches."""
        first = bisect_right(self._starts, start)
        if first and self._stops[first - 1] >= start:
            first -= 1
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def clipped(self, limit: int) -> Progress:
        """The same, as if nothing at or above `limit` had been settled."""
        below = [(start, min(stop, limit)) for start, stop in self.ranges if start < limit]
        return Progress(min(self.floor, limit), below)
