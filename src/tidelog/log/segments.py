"""The WAL files of one log, in order of their offsets.

Invariants (every method is called under the log's mutex)
- Each segment begins at the offset where the one before ends.
- Segments are added at the end and removed from the start, so `start_offset` never goes back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from tidelog.log.segment import Segment


class FileSpan(NamedTuple):
    """A WAL file at one moment, for those who decide whether it may go."""

    first_offset: int
    next_offset: int
    size: int
    created_us: int
    max_time_us: int | None


def _first_offset(segment: Segment) -> int:
    return segment.first_offset


class Segments:
    """The list that the writer keeps and the readers look into."""

    def __init__(self, segments: list[Segment], start_offset: int) -> None:
        self._segments = segments
        self._start_offset = start_offset

    def __iter__(self) -> Iterator[Segment]:
        return iter(tuple(self._segments))

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def start_offset(self) -> int:
        """The oldest offset that is in a file, or the next one while there is none."""
        return self._segments[0].first_offset if self._segments else self._start_offset

    @property
    def last(self) -> Segment | None:
        return self._segments[-1] if self._segments else None

    @property
    def total_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def add(self, segment: Segment) -> None:
        assert self.last is None or self.last.next_offset == segment.first_offset
        self._segments.append(segment)

    def remove_empty_last(self) -> None:
        """Takes out the newest segment, which has no frames."""
        assert self.last is not None and not self.last.size
        self._start_offset = self._segments.pop().first_offset

    def remove_first_below(self, offset: int) -> Segment | None:
        """Takes out the oldest segment if all of it is below an offset. The last one stays: it may be written to."""
        if len(self._segments) < 2 or self._segments[0].next_offset > offset:
            return None
        return self._segments.pop(0)

    def start_without(self, offset: int) -> int:
        """Where the oldest segment would begin if all that lie below an offset were taken out, but the last one."""
        start_offset = self.start_offset
        for segment in self._segments[:-1]:
            if segment.next_offset > offset:
                break
            start_offset = segment.next_offset
        return start_offset

    def find(self, offset: int) -> Segment | None:
        """The segment that holds an offset; None when none does."""
        found = bisect_right(self._segments, offset, key=_first_offset) - 1
        if found < 0 or offset >= self._segments[found].next_offset:
            return None
        return self._segments[found]

    def first_for_time(self, time_us: int) -> Segment | None:
        """The first segment that holds a message of this time or later. Times need not be in order."""
        return next((s for s in self._segments if s.max_time_us is not None and s.max_time_us >= time_us), None)
