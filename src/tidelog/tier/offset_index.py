"""The sparse index of an object while it is made: a place to begin every so many messages or bytes (1000 and 4 MiB).

It ends up in the descriptor, so its size is bounded: an object of very many small messages gets a coarser one.
"""

from __future__ import annotations

from bisect import bisect_left

from tidelog.log.frame import HEADER_BYTES, Frames

EVERY_MESSAGES = 1000
EVERY_BYTES = 4 << 20
MAX_ENTRIES = 8192


class OffsetIndexBuilder:
    """Learns places in order; costs one step an entry, not one a message."""

    def __init__(self, every_messages: int | None = None, every_bytes: int | None = None) -> None:
        self._entries: list[tuple[int, int]] = []
        self._every_messages = every_messages or EVERY_MESSAGES
        self._every_bytes = every_bytes or EVERY_BYTES

    def add_frames(self, frames: Frames, base: int) -> None:
        """Frames whose buffer begins at byte `base` of the object."""
        starts = memoryview(frames.positions).cast("Q")
        index = self._next_due(starts, frames.first_offset, base, 0)
        while index < frames.count:
            self._add(frames.first_offset + index, base + starts[index] - HEADER_BYTES)
            index = self._next_due(starts, frames.first_offset, base, index + 1)

    def add_block(self, first_offset: int, position: int) -> None:
        """A compressed block; it is entered if one is due."""
        if not self._entries or self._is_due(first_offset, position):
            self._add(first_offset, position)

    def entries(self) -> tuple[tuple[int, int], ...]:
        """The index so far."""
        return tuple(self._entries)

    def _is_due(self, offset: int, position: int) -> bool:
        last_offset, last_position = self._entries[-1]
        return offset - last_offset >= self._every_messages or position - last_position >= self._every_bytes

    def _next_due(self, starts: memoryview, first_offset: int, base: int, low: int) -> int:
        if not self._entries:
            return 0
        last_offset, last_position = self._entries[-1]
        by_messages = last_offset + self._every_messages - first_offset
        by_bytes = bisect_left(starts, last_position + self._every_bytes - base + HEADER_BYTES, lo=low)
        return max(low, min(by_messages, by_bytes))

    def _add(self, offset: int, position: int) -> None:
        self._entries.append((offset, position))
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[1::2]
            self._every_messages *= 2
