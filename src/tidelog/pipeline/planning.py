"""How a range of offsets is divided among tasks: into parts of about the same number of bytes.

Invariants
- The parts of a topic are contiguous and cover exactly the range that was asked for.
- A part says where its bytes are (objects with the piece of their index that is needed, files), so that a task asks no
  metadata store. What is in the bucket is read from there; only what is not is read from files.
- Cuts are at places that an index knows where that costs little balance: a cut elsewhere makes the task behind it read
  from the entry before.
- Bytes are an estimate for balance; offsets are exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from tidelog.log.reader import FilePart
from tidelog.log.segment import Segment
from tidelog.log.view import LogView
from tidelog.pipeline.part import FilePiece, ReadPart
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor

# A cut moves to a place of the index if that is not further away than this share of a part.
_SNAP_SHARE = 0.25


class Limits(msgspec.Struct, frozen=True):
    """How small parts must be, and how many there must be."""

    max_bytes: int
    max_records: int | None = None
    min_parts: int | None = None


class TopicPlan:
    """One topic's range, with what is known about where its bytes are."""

    def __init__(
        self, topic: str, start: int, stop: int, *, catalog: Catalog | None, view: LogView | None, cold_end: int
    ) -> None:
        """`cold_end` is the first offset that no object has."""
        self.topic = topic
        self.start = start
        self.stop = stop
        self._descriptors: list[Descriptor] = []
        if catalog is not None and start < min(stop, cold_end):
            self._descriptors = list(catalog.between(start, min(stop, cold_end)))
        self._cold_end = cold_end
        self._segments = [] if view is None else [one for one in view.segments() if self._is_wanted(one, start, stop)]
        self._knots = self._find_knots()

    @property
    def bytes(self) -> float:
        return self._knots[-1][1] - self._knots[0][1]

    @property
    def records(self) -> int:
        return self.stop - self.start

    def _is_wanted(self, segment: Segment, start: int, stop: int) -> bool:
        return segment.next_offset > max(start, self._cold_end) and segment.first_offset < stop

    # Bytes by offset: a line through all places that an index knows

    def _find_knots(self) -> list[tuple[int, float]]:
        knots = [(self.start, 0.0)]
        for first, last, size in self._stretches():
            low, high = max(first, self.start), min(last, self.stop)
            if low < high and low >= knots[-1][0]:
                if low > knots[-1][0]:
                    knots.append((low, knots[-1][1]))
                knots.append((high, knots[-1][1] + size * (high - low) / (last - first)))
        if knots[-1][0] < self.stop:
            knots.append((self.stop, knots[-1][1]))
        return knots

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """(first offset, next offset, bytes), in order."""
        for descriptor in self._descriptors:
            places = [*descriptor.offset_index, (descriptor.next_offset, descriptor.size)]
            for (offset, position), (behind, end) in pairwise(places):
                yield offset, behind, end - position
        for segment in self._segments:
            yield max(segment.first_offset, self._cold_end), segment.next_offset, segment.size

    # Cutting

    def cut(self, parts: int, max_records: int | None) -> list[ReadPart]:
        """The range in about so many parts, none of them with more records than allowed."""
        edges = [self.start, *self._cuts(parts), self.stop]
        ranges = [piece for low, high in pairwise(edges) if low < high for piece in _divided(low, high, max_records)]
        return [self._part(low, high) for low, high in ranges]

    def offset_behind(self, share: float) -> int:
        """The offset behind about this share of the bytes."""
        return self._offset_at(self.bytes * share, share)

    def _cuts(self, parts: int) -> list[int]:
        """Where parts of equal size end, moved to a place of the index if one is near."""
        parts = max(1, min(parts, self.records))
        wanted = [self.offset_behind(number / parts) for number in range(1, parts)]
        offsets = [offset for offset, _ in self._knots]
        reach = _SNAP_SHARE * self.records / parts
        snapped = [_nearest(offsets, offset, reach) for offset in wanted]
        evenly = [self.start + self.records * number // parts for number in range(1, parts)]
        return next(cuts for cuts in (snapped, wanted, evenly) if self._divide(cuts) or cuts is evenly)

    def _divide(self, cuts: Sequence[int]) -> bool:
        """Whether each of them makes one more part."""
        return all(low < high for low, high in pairwise([self.start, *cuts, self.stop]))

    def _offset_at(self, position: float, share_of_records: float) -> int:
        """The offset at which so many bytes are before; by numbers alone where nothing is known about bytes."""
        if self.bytes <= 0:
            return self.start + int(self.records * share_of_records)
        index = bisect_left(self._knots, position, key=_bytes_of)
        (low, before), (high, behind) = self._knots[index - 1], self._knots[index]
        return low + round((high - low) * (position - before) / (behind - before)) if behind > before else high

    def _part(self, start: int, stop: int) -> ReadPart:
        objects = [one for one in self._descriptors if one.end_offset >= start and one.start_offset < stop]
        files = [one for one in self._segments if self._is_wanted(one, start, stop)]
        return ReadPart(
            topic=self.topic,
            start=start,
            stop=stop,
            cold_stop=max(start, min(stop, self._cold_end)),
            descriptors=tuple(_trimmed(descriptor, start, stop) for descriptor in objects),
            files=tuple(_piece(segment, max(start, self._cold_end)) for segment in files),
        )


def plan_parts(plans: Sequence[TopicPlan], limits: Limits) -> list[ReadPart]:
    """The parts of all topics: as many as their bytes ask for, and at least as many as wanted."""
    plans = [plan for plan in plans if plan.records > 0]
    total = sum(plan.bytes for plan in plans)
    # Rounded: one part more for the last few bytes would keep all cores but one waiting for it.
    wanted = max(limits.min_parts or 1, round(total / limits.max_bytes))
    parts: list[ReadPart] = []
    for plan in plans:
        share = plan.bytes / total if total else 1 / len(plans)
        parts += plan.cut(max(1, round(wanted * share)), limits.max_records)
    return parts


def _bytes_of(knot: tuple[int, float]) -> float:
    return knot[1]


def _nearest(offsets: Sequence[int], offset: int, reach: float) -> int:
    index = bisect_left(offsets, offset)
    near = min(offsets[max(0, index - 1) : index + 1], key=lambda one: abs(one - offset))
    return near if abs(near - offset) <= reach else offset


def _divided(start: int, stop: int, max_records: int | None) -> Iterator[tuple[int, int]]:
    """Equal pieces of a range, none larger than allowed."""
    pieces = 1 if max_records is None else math.ceil((stop - start) / max_records)
    edges = [start + (stop - start) * number // pieces for number in range(pieces + 1)]
    return pairwise(edges)


def _piece(segment: Segment, start: int) -> FilePiece:
    """From as close before the offset as is known of this file."""
    part = FilePart(segment, max(start, segment.first_offset))
    return FilePiece(str(segment.path), part.offset, part.next_offset, part.position, part.end_byte)


def _trimmed(descriptor: Descriptor, start: int, stop: int) -> Descriptor:
    """With the part of its index that a range needs: a descriptor of a large object is long, and travels to a task."""
    first = descriptor.position_of(max(start, descriptor.start_offset))
    index = tuple(entry for entry in descriptor.offset_index if entry >= first and entry[0] <= stop)
    behind = next((entry for entry in descriptor.offset_index if entry[0] > stop), None)
    return msgspec.structs.replace(descriptor, offset_index=index if behind is None else (*index, behind))
