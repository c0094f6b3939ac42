"""Records of the engine's log from its files: forwards for recovery, backwards for undo, one by one.

Invariants
- Every frame that is handed out was checked. Damage raises and names file and byte.
- Memory is bounded by one chunk, in both directions; a record that is larger is a chunk of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.errors import CorruptionError, OffsetOutOfRangeError
from tidelog.files import File, explained
from tidelog.log.frame import Frames
from tidelog.log.log import Log
from tidelog.log.reader import FilePart
from tidelog.log.recovery import REPAIR_HINT
from tidelog.log.scanner import FileScanner

# Fits into the caches of a processor: larger pieces are slower to check.
FORWARD_CHUNK_BYTES = 2 << 20
# The log's index knows a place about every 64 KiB: one look back is one such piece as a rule.
_BACKWARD_CHUNK_BYTES = 128 << 10


def batches(log: Log, first_lsn: int, stop_lsn: int) -> Iterator[Frames]:
    """All records from one LSN up to another (exclusive), as far as they are in the files."""
    for part in _parts(log, first_lsn, stop_lsn):
        with explained("read", part.segment.path):
            file = log.files.open(part.segment.path)
            try:
                yield from _frames_of(file, part, first_lsn, stop_lsn)
            finally:
                file.close()


def _parts(log: Log, first_lsn: int, stop_lsn: int) -> list[FilePart]:
    parts = log.parts(first_lsn, stop_lsn)
    if first_lsn < stop_lsn and (not parts or parts[0].segment.first_offset > first_lsn):
        start = parts[0].segment.first_offset if parts else log.next_offset
        raise OffsetOutOfRangeError(
            f"LSN {first_lsn} is not in the files of the log, the oldest there is {start}",
            operation="read",
            path=log.directory,
        )
    return parts


def _frames_of(file: File, part: FilePart, first_lsn: int, stop_lsn: int) -> Iterator[Frames]:
    scanner = FileScanner(file, part.position, part.offset, FORWARD_CHUNK_BYTES)
    stop_lsn = min(stop_lsn, part.next_offset)
    while scanner.offset < stop_lsn:
        frames = _read(scanner, part)
        if frames.next_offset > first_lsn:
            yield _within(frames, first_lsn, stop_lsn)


def _read(scanner: FileScanner, part: FilePart) -> Frames:
    base = scanner.position
    frames = scanner.read(part.end_byte)
    if frames is None:
        reason, path = scanner.stop.reason, part.segment.path
        raise CorruptionError(reason, path=path, byte=scanner.position, operation="read", hint=REPAIR_HINT)
    part.segment.index.extend(frames, base)
    return frames


def _within(frames: Frames, first_lsn: int, stop_lsn: int) -> Frames:
    start = max(0, first_lsn - frames.first_offset)
    stop = min(frames.count, stop_lsn - frames.first_offset)
    return frames if (start, stop) == (0, frames.count) else frames.slice(start, stop)


def frames_around(log: Log, lsn: int) -> Frames:
    """A checked piece of the log that holds a record, and some before and behind it as a rule."""
    return next(_chunks_back_from(log, lsn))


def backwards(log: Log, lsn: int, stop_lsn: int) -> Iterator[tuple[int, bytes]]:
    """(LSN, payload) from one LSN down to another, both included, newest first."""
    while lsn >= stop_lsn:
        for frames in _chunks_back_from(log, lsn):
            first = max(frames.first_offset, stop_lsn)
            payloads = frames.payloads(first - frames.first_offset, lsn + 1 - frames.first_offset)
            for payload in reversed(payloads):
                yield lsn, payload
                lsn -= 1
            if lsn < stop_lsn:
                return


def _chunks_back_from(log: Log, lsn: int) -> Iterator[Frames]:
    """The frames up to this LSN, newest chunk first, from the nearest place on that the log's index knows.

    Where the index knows little, the way from there is walked twice: once to find the chunks, once to read each.
    """
    part = _parts(log, lsn, lsn + 1)[0]
    with explained("read", part.segment.path):
        file = log.files.open(part.segment.path)
        try:
            places, frames = _walk(file, part, lsn)
            yield frames
            for position, offset in reversed(places[:-1]):
                scanner = FileScanner(file, position, offset, _BACKWARD_CHUNK_BYTES)
                yield _read(scanner, part)
        finally:
            file.close()


def _walk(file: File, part: FilePart, lsn: int) -> tuple[list[tuple[int, int]], Frames]:
    """Where the chunks begin up to the one that holds an LSN, and the frames of that one."""
    scanner = FileScanner(file, part.position, part.offset, _BACKWARD_CHUNK_BYTES)
    places: list[tuple[int, int]] = []
    while True:
        places.append((scanner.position, scanner.offset))
        frames = _read(scanner, part)
        if frames.next_offset > lsn:
            return places, frames
