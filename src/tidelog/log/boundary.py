"""Finds frame boundaries in a file, by offset or by byte, close to where the sparse index points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TypeVar

from tidelog.errors import CorruptionError
from tidelog.files import Files
from tidelog.log.frame import HEADER_BYTES, Frames
from tidelog.log.reader import FilePart
from tidelog.log.recovery import REPAIR_HINT
from tidelog.log.scanner import FileScanner

_CHUNK_BYTES = 256 << 10
Place = TypeVar("Place")


def byte_of_offset(files: Files, part: FilePart, offset: int) -> int:
    """Where the frame of an offset begins; the part's end for the offset behind its last."""
    if offset >= part.next_offset:
        return part.end_byte
    return _search(files, part, lambda frames, base: _start_of(frames, base, offset))


def last_boundary(files: Files, part: FilePart, offset: int, max_byte: int) -> tuple[int, int]:
    """The last boundary (offset, byte) at or before a byte, but at least one frame behind `offset`."""
    if part.end_byte <= max_byte:
        return part.next_offset, part.end_byte
    return _search(files, part, lambda frames, base: _boundary_in(frames, base, offset, max_byte))


def _search(files: Files, part: FilePart, look: Callable[[Frames, int], Place | None]) -> Place:
    """Scans from the place that the index knows until `look` finds something in a chunk of frames."""
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
    """The last boundary of these frames within the limit; None when the frames behind them may still be within it."""
    if base + frames.end <= max_byte or frames.next_offset <= offset:
        return None
    starts = memoryview(frames.positions).cast("Q")
    index = bisect_right(starts, max_byte - base + HEADER_BYTES) - 1
    index = max(index, offset + 1 - frames.first_offset)
    return frames.first_offset + index, base + frames.start_of(index)
