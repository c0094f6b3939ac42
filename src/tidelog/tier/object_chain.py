"""Which objects are the topic, when only their names are known: some were never published, or were replaced.

Invariants
- The chain has no overlap: each object begins where the one before ends, or behind a hole.
- Of all chains it is one that misses the fewest offsets between its beginning and the last object that begins anywhere.
- Where several do, at each offset the highest epoch wins (its owner could know the others and did not go on behind
  them), then the highest generation (a compaction made it from the others), then the one that leads furthest, then the
  longest. A compacted object has the highest epoch of those that it was made from, and all their messages that count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tidelog.tier.keys import ObjectId


class Chain(NamedTuple):
    """Objects in order, the holes between them (first and last offset), and what was not used."""

    objects: tuple[ObjectId, ...]
    holes: tuple[tuple[int, int], ...]
    unused: tuple[ObjectId, ...]


class _Way(NamedTuple):
    """The best way on from an offset. Smaller is better."""

    missing: int
    lower_epoch: int
    lower_generation: int
    nearer_end: int
    shorter: int
    begin: ObjectId
    next_start: int | None


def choose_chain(names: Iterable[ObjectId], start_offset: int | None = None) -> Chain:
    """The chain from the object that holds `start_offset`, or without it from the first of all.

    Objects wholly below the start do not take part and are among the unused.
    """
    candidates = set(names)
    usable = sorted(name for name in candidates if start_offset is None or name.end >= start_offset)
    if not usable:
        return Chain((), (), tuple(sorted(candidates)))
    chain = tuple(_follow(usable, usable[0].start if start_offset is None else start_offset))
    expected = chain[0].start if start_offset is None else max(start_offset, 0)
    return Chain(chain, tuple(_holes(chain, expected)), tuple(sorted(candidates.difference(chain))))


def _follow(usable: list[ObjectId], begin: int) -> Iterator[ObjectId]:
    by_start: dict[int, list[ObjectId]] = {}
    for name in usable:
        # Where the topic begins within an object, that object is as good as one that begins there.
        by_start.setdefault(max(name.start, begin), []).append(name)
    starts = sorted(by_start)
    ways: dict[int, _Way] = {}
    for start in reversed(starts):
        ways[start] = min(_way(name, starts, ways) for name in by_start[start])
    at: int | None = starts[0]
    while at is not None:
        way = ways[at]
        yield way.begin
        at = way.next_start


def _way(name: ObjectId, starts: list[int], ways: dict[int, _Way]) -> _Way:
    next_offset = name.end + 1
    index = bisect_left(starts, next_offset)
    if index == len(starts):
        return _Way(0, -name.epoch, -name.generation, -next_offset, -name.end, name, None)
    on = ways[starts[index]]
    missing = starts[index] - next_offset + on.missing
    return _Way(missing, -name.epoch, -name.generation, on.nearer_end, -name.end, name, starts[index])


def _holes(chain: Iterable[ObjectId], expected: int) -> Iterator[tuple[int, int]]:
    for name in chain:
        if name.start > expected:
            yield expected, name.start - 1
        expected = name.end + 1
