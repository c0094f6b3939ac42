"""What was fetched from the store: stretches of the log by their position, up to a number of bytes.

Invariants
- Positions never change, so nothing in here is ever out of date.
- No stretch lies inside another. Their ends are then in the order of their beginnings, and the one that begins last at
  or before a position is the only one that can hold what begins there.
- Bytes are as they came: whoever reads them checks them, and takes out what was bad.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from threading import Lock

import msgspec


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a cache."""

    bytes: int
    capacity_bytes: int
    stretches: int
    hits: int
    misses: int
    evictions: int


class ColdCache:
    """A read-through cache; the stretches that were not used for the longest time leave first. Threads may share it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._stretches: OrderedDict[int, bytes | memoryview] = OrderedDict()
        self._starts: list[int] = []
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._mutex = Lock()

    def get(self, position: int, length: int) -> memoryview | None:
        """So many bytes of the log, if they are all here."""
        with self._mutex:
            start = self._holding(position, length)
            if start is None:
                self._misses += 1
                return None
            self._hits += 1
            self._stretches.move_to_end(start)
            begin = position - start
            return memoryview(self._stretches[start])[begin : begin + length]

    def holds(self, position: int, length: int) -> bool:
        """The same question; it counts neither as a use nor as a miss."""
        with self._mutex:
            return self._holding(position, length) is not None

    def add(self, position: int, data: bytes | memoryview) -> None:
        """Takes a stretch in. One that would push out most of the others is not kept."""
        if not len(data) or len(data) > self._capacity_bytes // 2:
            return
        with self._mutex:
            if self._holding(position, len(data)) is not None:
                return
            self._drop_inside(position, position + len(data))
            self._stretches[position] = data
            insort(self._starts, position)
            self._bytes += len(data)
            while self._bytes > self._capacity_bytes:
                self._drop(next(iter(self._stretches)))
                self._evictions += 1

    def discard(self, position: int, length: int) -> None:
        """Takes out what holds these bytes: they are not what they must be."""
        with self._mutex:
            while (start := self._holding(position, length)) is not None:
                self._drop(start)

    def _holding(self, position: int, length: int) -> int | None:
        at = bisect_right(self._starts, position)
        if not at:
            return None
        start = self._starts[at - 1]
        return start if position + length <= start + len(self._stretches[start]) else None

    def _drop_inside(self, start: int, end: int) -> None:
        first, behind = bisect_left(self._starts, start), bisect_left(self._starts, end)
        for inside in self._starts[first:behind]:
            if inside + len(self._stretches[inside]) <= end:
                self._drop(inside)

    def _drop(self, start: int) -> None:
        self._bytes -= len(self._stretches.pop(start))
        del self._starts[bisect_left(self._starts, start)]

    def statistics(self) -> CacheStatistics:
        """One moment of it."""
        with self._mutex:
            return CacheStatistics(
                bytes=self._bytes,
                capacity_bytes=self._capacity_bytes,
                stretches=len(self._stretches),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )
