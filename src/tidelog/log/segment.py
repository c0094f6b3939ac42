"""One WAL file as the log knows it: its range of offsets, its size, its times, and a sparse index into it.

Invariants
- `size` is a frame boundary: the file holds whole frames for `first_offset` to `next_offset - 1` before it.
- Only the writer changes a segment, and only under the log's mutex; others read it under the mutex too.
- The index never lies: an entry is a real boundary. It may be coarse, or empty for a file that was not scanned yet.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from threading import Lock

from tidelog.log.frame import HEADER_BYTES, Frames

INDEX_EVERY_BYTES = 64 << 10


class SparseIndex:
    """Frame boundaries about every 64 KiB: (offset, byte position)."""

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._positions = array("Q")
        self._growing = Lock()

    def __len__(self) -> int:
        return len(self._offsets)

    def floor(self, offset: int) -> tuple[int, int] | None:
        """The last known boundary at or before an offset."""
        found = bisect_right(self._offsets, offset) - 1
        return None if found < 0 else (self._offsets[found], self._positions[found])

    def extend(self, frames: Frames, base: int) -> None:
        """Learns boundaries from frames whose buffer begins at byte `base` of the file. Costs one step an entry.

        Readers of a file that was not scanned at opening teach it as well, several at a time.
        """
        with self._growing:
            self._extend(frames, base)

    def _extend(self, frames: Frames, base: int) -> None:
        if not frames.count or (self._offsets and frames.next_offset - 1 <= self._offsets[-1]):
            return
        payload_positions = memoryview(frames.positions).cast("Q")
        due = self._positions[-1] + INDEX_EVERY_BYTES if self._positions else 0
        index = bisect_left(payload_positions, due - base + HEADER_BYTES) if due > base else 0
        while index < frames.count:
            position = base + payload_positions[index] - HEADER_BYTES
            self._positions.append(position)  # before the offset: `floor` looks at offsets first, without the lock
            self._offsets.append(frames.first_offset + index)
            wanted = position - base + INDEX_EVERY_BYTES + HEADER_BYTES
            index = bisect_left(payload_positions, wanted, lo=index + 1)


class Segment:
    """A WAL file, sealed or active."""

    def __init__(self, seq: int, path: Path, first_offset: int, created_us: int) -> None:
        self.seq = seq
        self.path = path
        self.first_offset = first_offset
        self.next_offset = first_offset
        self.size = 0
        self.created_us = created_us
        self.min_time_us: int | None = None
        self.max_time_us: int | None = None
        self.last_frame_byte: int | None = None
        """Where the last frame begins; None while it is not known."""
        self.index = SparseIndex()

    @property
    def count(self) -> int:
        return self.next_offset - self.first_offset

    def extend(self, frames: Frames, base: int, end: int, time_field: int | None) -> None:
        """Takes note of frames that are in the file; their buffer begins at byte `base`, they end at byte `end`."""
        self.index.extend(frames, base)
        if time_field is not None and (times := frames.field_range(time_field)) is not None:
            self.min_time_us = times[0] if self.min_time_us is None else min(self.min_time_us, times[0])
            self.max_time_us = times[1] if self.max_time_us is None else max(self.max_time_us, times[1])
        if frames.count:
            self.last_frame_byte = base + frames.start_of(frames.count - 1)
        self.next_offset = frames.next_offset
        self.size = end
