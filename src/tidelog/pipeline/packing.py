"""Small parts of many topics, put together for one task: a task that is started for a handful of rows costs more than
they do.

Invariants
- Parts stay as they are and in order: only where one task ends and the next begins is decided here.
- A task gets no more records than the options allow, and no more than one part where parts are as large as wanted.
- Few parts are left alone: there is a task for each, as everybody expects who reads a few topics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tidelog.pipeline.part import ReadPart
from tidelog.pipeline.planning import Limits
from tidelog.tier.descriptor import Descriptor

_FEW_TASKS = 128
# To find a part, open it and end it takes about as long as to read so much.
_BYTES_TO_OPEN = 256 << 10


def packed(parts: Sequence[ReadPart], limits: Limits, few_tasks: int = _FEW_TASKS) -> list[tuple[ReadPart, ...]]:
    """The parts of each task: one, or where that would be very many tasks, several that are small."""
    weights = [_BYTES_TO_OPEN + _bytes_of(part) for part in parts]
    tasks = max(few_tasks, limits.min_parts or 1)
    if len(parts) <= tasks:
        return [(part,) for part in parts]
    room = _Room(min(sum(weights) / tasks, limits.max_bytes), len(parts) // tasks, limits.max_records)
    groups: list[list[ReadPart]] = []
    for part, weight in zip(parts, weights, strict=True):
        if not groups or not room.takes(part, weight):
            groups.append([])
            room.is_new(part, weight)
        groups[-1].append(part)
    return [tuple(group) for group in groups]


class _Room:
    """What may still come to the parts of a task. The number of parts is limited too: else one that is large would
    leave fewer tasks than were asked for."""

    def __init__(self, most_bytes: float, most_parts: int, most_records: int | None) -> None:
        self._most = (most_bytes, most_parts, math.inf if most_records is None else most_records)
        self._taken: tuple[float, ...] = ()

    def takes(self, part: ReadPart, weight: float) -> bool:
        taken = tuple(map(sum, zip(self._taken, (weight, 1, part.stop - part.start), strict=True)))
        if any(one > most for one, most in zip(taken, self._most, strict=True)):
            return False
        self._taken = taken
        return True

    def is_new(self, part: ReadPart, weight: float) -> None:
        self._taken = (weight, 1, part.stop - part.start)


def _bytes_of(part: ReadPart) -> float:
    in_objects = sum(one.size * _share(one, part.start, part.cold_stop) for one in part.descriptors)
    return in_objects + sum(piece.size for piece in part.files)


def _share(descriptor: Descriptor, start: int, stop: int) -> float:
    first, last = max(start, descriptor.start_offset), min(stop, descriptor.next_offset)
    return max(0, last - first) / (descriptor.next_offset - descriptor.start_offset)
