"""Segments: the metadata of each WAL file (offset range, size, times, sparse index), their list, a frame scanner, the
search for frame boundaries, and the checkpoint that lists the files.

Invariants
- `size` is a frame boundary: before it, the file holds whole frames for `first_offset` to `next_offset - 1`.
- Only the writer changes a segment, and only under the log's mutex; others read it under the mutex too.
- Every index entry is a real frame boundary. The index may be coarse, or empty for a file that was not scanned yet.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import CorruptionError, DataError
from tidelog.files import File, Files
from tidelog.log.binding import REPAIR_HINT
from tidelog.log.directory import CHECKPOINT
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames, Stop, scan

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


# The WAL files of one log, in order of their offsets.
#
# Invariants (every method is called under the log's mutex)
# - Each segment begins at the offset where the one before ends.
# - Segments are added at the end and removed from the start, so `start_offset` never decreases. It may lie inside the
#   oldest one: what is below it was deleted (`floor`, the mark of the start), and goes with its file.


class FileSpan(NamedTuple):
    """A WAL file at one moment, for deciding whether it may be deleted."""

    first_offset: int
    next_offset: int
    size: int
    created_us: int
    max_time_us: int | None


class Segments:
    """The list of segments that the writer maintains and the readers search."""

    def __init__(self, segments: list[Segment], start_offset: int) -> None:
        self._segments = segments
        self._start_offset = start_offset
        self.floor = 0
        """Nothing below is to be read, although the oldest file may have it."""

    def __iter__(self) -> Iterator[Segment]:
        return iter(tuple(self._segments))

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def start_offset(self) -> int:
        """The oldest offset that is in a file and may be read; the next offset without files."""
        return max(self.first_offset, self.floor) if self._segments else self._start_offset

    @property
    def first_offset(self) -> int:
        """Where the oldest file begins; the next offset without files."""
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
        """Where the log would begin if all segments that lie below an offset were taken out, but the last one."""
        start_offset = self.first_offset
        for segment in self._segments[:-1]:
            if segment.next_offset > offset:
                break
            start_offset = segment.next_offset
        return max(start_offset, self.floor) if self._segments else start_offset

    def find(self, offset: int) -> Segment | None:
        """The segment that holds an offset that may be read; None when none does."""
        found = bisect_right(self._segments, offset, key=attrgetter("first_offset")) - 1
        if found < 0 or offset >= self._segments[found].next_offset or offset < self.floor:
            return None
        return self._segments[found]

    def first_for_time(self, time_us: int) -> Segment | None:
        """The first segment that holds a message of this time or later. Times need not be in order."""
        return next((s for s in self._segments if s.max_time_us is not None and s.max_time_us >= time_us), None)


# Scans the frames of one file in bounded memory.
#
# Invariants
# - Every frame returned has been verified: checksum, length, and the expected offset.
# - `position` is always the boundary after the last frame returned, `offset` the one that comes next there.
# - No more than one chunk, or one frame where it is larger, is in memory.


class FileScanner:
    """Frames of a file from a known boundary on, a chunk at a time."""

    def __init__(self, file: File, position: int, offset: int, chunk_bytes: int) -> None:
        self.position = position
        self.offset = offset
        self.stop = Stop.END
        self._file = file
        self._chunk_bytes = chunk_bytes

    def read(self, end: int) -> Frames | None:
        """The next frames before byte `end`; None if there are none: then `stop` says why.

        Positions in the result are relative to its buffer, which begins at the `position` before the call.
        """
        size = min(self._chunk_bytes, end - self.position)
        buffer = self._file.read_at(self.position, size) if size > 0 else b""
        result = scan(buffer, 0, self.offset)
        if result.stop is Stop.PARTIAL and not result.frames.count:
            needed = self._whole_frame_bytes(buffer, end)
            if needed > len(buffer):
                buffer = self._file.read_at(self.position, needed)
                result = scan(buffer, 0, self.offset)
        self.stop = result.stop
        if not result.frames.count:
            return None
        self.position += result.end
        self.offset = result.frames.next_offset
        return result.frames

    def _whole_frame_bytes(self, buffer: bytes, end: int) -> int:
        """How much must be read for the frame at the start of the buffer, or 0 when the file does not have it."""
        if len(buffer) < HEADER_BYTES:
            return 0
        _, length, _ = HEADER.unpack_from(buffer)
        needed = HEADER_BYTES + int(length)
        return needed if self.position + needed <= end else 0


class FilePart:
    """Where an offset is in the files: the segment, and how far it goes at this moment."""

    __slots__ = ("end_byte", "next_offset", "offset", "position", "segment")

    def __init__(self, segment: Segment, offset: int) -> None:
        start = segment.index.floor(offset)
        self.segment = segment
        self.offset, self.position = start if start is not None else (segment.first_offset, 0)
        self.next_offset = segment.next_offset
        self.end_byte = segment.size


# Finds frame boundaries in a file, by offset or by byte, close to where the sparse index points.


_CHUNK_BYTES = 256 << 10
Place = TypeVar("Place")


def byte_of_offset(files: Files, part: FilePart, offset: int) -> int:
    """Where the frame of an offset begins; the part's end for the offset after its last."""
    if offset >= part.next_offset:
        return part.end_byte
    return _search_frame(files, part, lambda frames, base: _start_of(frames, base, offset))


def last_boundary(files: Files, part: FilePart, offset: int, max_byte: int) -> tuple[int, int]:
    """The last boundary (offset, byte) at or before a byte, but at least one frame after `offset`."""
    if part.end_byte <= max_byte:
        return part.next_offset, part.end_byte
    return _search_frame(files, part, lambda frames, base: _boundary_in(frames, base, offset, max_byte))


def _search_frame(files: Files, part: FilePart, look: Callable[[Frames, int], Place | None]) -> Place:
    """Scans from the nearest indexed position until `look` finds something in a chunk of frames."""
    file = files.open(part.segment.path)
    try:
        scanner = FileScanner(file, part.position, part.offset, _CHUNK_BYTES)
        while True:
            base = scanner.position
            frames = scanner.read(part.end_byte)
            if frames is None:
                reason = scanner.stop.reason
                raise CorruptionError(reason, path=part.segment.path, byte=base, operation="read", hint=REPAIR_HINT)
            part.segment.index.extend(frames, base)
            found = look(frames, base)
            if found is not None:
                return found
    finally:
        file.close()


def _start_of(frames: Frames, base: int, offset: int) -> int | None:
    return base + frames.start_of(offset - frames.first_offset) if offset < frames.next_offset else None


def _boundary_in(frames: Frames, base: int, offset: int, max_byte: int) -> tuple[int, int] | None:
    """The last boundary of these frames within the limit; None when the frames after them may still be within it."""
    if base + frames.end <= max_byte or frames.next_offset <= offset:
        return None
    starts = memoryview(frames.positions).cast("Q")
    index = bisect_right(starts, max_byte - base + HEADER_BYTES) - 1
    index = max(index, offset + 1 - frames.first_offset)
    return frames.first_offset + index, base + frames.start_of(index)


# `wal.ckpt`: the writer's view of its files when it last rotated or closed, or began a log without files; an engine
# also writes it when it first syncs a file.
#
# It is a hint. Recovery trusts an entry only where the file agrees with it, and finds the same state without it; the
# checkpoint only saves reading old files. It is replaced atomically: a crash leaves the new one or the previous one.

_KIND = "wal-checkpoint"
_VERSION = 1


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """One WAL file; `size` bytes of it were synced and end at a frame boundary."""

    seq: int
    first_offset: int
    next_offset: int
    size: int
    created_us: int
    min_time_us: int | None
    max_time_us: int | None
    last_frame_byte: int | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The whole hint. `last_offset` is -1 while the log is empty."""

    start_offset: int
    last_offset: int
    file_seq: int
    files: tuple[CheckpointFile, ...]
    written_us: int

    def file(self, seq: int) -> CheckpointFile | None:
        return next((file for file in self.files if file.seq == seq), None)

    def first_offset_of(self, seq: int) -> int | None:
        """Where a file begins, also the first one of a log that had none when this was written."""
        known = self.file(seq)
        if known is not None:
            return known.first_offset
        return self.start_offset if not self.files and seq == 0 else None


def describe_segments(segments: Sequence[Segment], start_offset: int, now_us: int) -> Checkpoint:
    """The checkpoint of these segments, all of whose bytes are synced."""
    files = tuple(
        CheckpointFile(
            seq=segment.seq,
            first_offset=segment.first_offset,
            next_offset=segment.next_offset,
            size=segment.size,
            created_us=segment.created_us,
            min_time_us=segment.min_time_us,
            max_time_us=segment.max_time_us,
            last_frame_byte=segment.last_frame_byte,
        )
        for segment in segments
    )
    return Checkpoint(
        start_offset=start_offset,
        last_offset=files[-1].next_offset - 1 if files else start_offset - 1,
        file_seq=files[-1].seq if files else -1,
        files=files,
        written_us=now_us,
    )


def write_checkpoint(files: Files, directory: Path, checkpoint: Checkpoint) -> None:
    """Replaces the checkpoint, durably."""
    files.write_atomically(directory / CHECKPOINT, encode_document(_KIND, _VERSION, checkpoint))


def read_checkpoint(files: Files, directory: Path) -> tuple[Checkpoint | None, str | None]:
    """The checkpoint, or None and why it cannot be used."""
    try:
        data = files.read(directory / CHECKPOINT)
    except FileNotFoundError:
        return None, "there is none"
    except OSError as error:
        return None, str(error)
    try:
        return decode_document(_KIND, _VERSION, data, Checkpoint), None
    except DataError as error:
        return None, str(error)
