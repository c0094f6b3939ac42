"""What goes into the next object: consecutive frames, from the byte where the last one ended.

Invariants
- Only what is synced is shipped, so the store never has an offset that a power cut takes from the disk.
- An object takes whole files while they fit, goes on across them, and cuts only a file that is too large by itself.
- The end is known before the first byte is sent: it is part of the object's name.
- Messages that count only together (`log/groups.py`) are shipped when all of them are synced, in one object: it ends
  before such a group, or takes all of it however large it is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from tidelog.errors import DataError, OffsetOutOfRangeError
from tidelog.files import Files
from tidelog.log import Log
from tidelog.log.boundary import byte_of_offset, last_boundary
from tidelog.log.frame import HEADER_BYTES
from tidelog.log.groups import GroupOf
from tidelog.log.reader import FilePart
from tidelog.log.scanner import FileScanner


class Place(NamedTuple):
    """The file and the byte at which the frame of an offset begins."""

    offset: int
    seq: int
    byte: int


class Piece(NamedTuple):
    """A run of frames in one file."""

    seq: int
    path: Path
    byte: int
    end_byte: int
    first_offset: int
    next_offset: int

    @property
    def size(self) -> int:
        return self.end_byte - self.byte


class Shipment(NamedTuple):
    """The frames of one object, piece by piece."""

    pieces: tuple[Piece, ...]

    @property
    def first_offset(self) -> int:
        return self.pieces[0].first_offset

    @property
    def next_offset(self) -> int:
        return self.pieces[-1].next_offset

    @property
    def raw_bytes(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def end(self) -> Place:
        """Where the next shipment begins, as far as the files go now."""
        last = self.pieces[-1]
        return Place(last.next_offset, last.seq, last.end_byte)


def plan_shipment(
    log: Log,
    offset: int,
    stop_offset: int,
    max_object_bytes: int,
    resume: Place | None,
    group_of: GroupOf | None = None,
) -> Shipment | None:
    """The next object from `offset` on, up to `stop_offset` (exclusive) at most; None when there is nothing."""
    shipment = _plan(log, offset, stop_offset, max_object_bytes, resume)
    if shipment is None or group_of is None:
        return shipment
    first, end = _group_at(log, shipment.next_offset - 1, group_of)
    if end <= shipment.next_offset or end > stop_offset:
        return shipment
    if first > offset:
        return _plan(log, offset, first, max_object_bytes, resume)
    return _plan(log, offset, end, sys.maxsize, resume)


def whole_groups(log: Log, stop_offset: int, group_of: GroupOf | None) -> int:
    """The same offset, or the first of the group that it lies inside of."""
    if group_of is None or stop_offset <= log.start_offset:
        return stop_offset
    first, end = _group_at(log, stop_offset - 1, group_of)
    return stop_offset if end <= stop_offset else first


def _group_at(log: Log, offset: int, group_of: GroupOf) -> tuple[int, int]:
    """First and next offset of the group that a message belongs to, if the first message of the group agrees."""
    number, total = _member(log, offset, group_of)
    first = offset - number
    if number and _member(log, first, group_of) != (0, total):
        return offset, offset + 1
    return first, first + total


def _member(log: Log, offset: int, group_of: GroupOf) -> tuple[int, int]:
    """What a message says of its group. One that is damaged is on its own here, and is met again when it is sent."""
    try:
        batch = log.read(max(offset, 0), offset + 1).next_batch()
    except (DataError, OffsetOutOfRangeError):
        batch = None
    return (0, 1) if batch is None else group_of(batch.payloads()[0])


def _plan(log: Log, offset: int, stop_offset: int, max_object_bytes: int, resume: Place | None) -> Shipment | None:
    pieces: list[Piece] = []
    room = max_object_bytes
    for part in log.parts(offset, stop_offset):
        piece = _piece(log.files, part, offset, stop_offset, resume)
        if piece.size > room:
            if not pieces:
                pieces.append(_cut(log.files, part, piece, room))
            break
        if piece.size:
            pieces.append(piece)
        room -= piece.size
        offset = piece.next_offset
    return Shipment(tuple(pieces)) if pieces else None


def bytes_behind(log: Log, offset: int, resume: Place | None) -> int:
    """About how many bytes of files wait from `offset` on. Exact where the place is known."""
    waiting = 0
    for part in log.parts(offset, log.next_offset):
        known = resume is not None and (resume.offset, resume.seq) == (offset, part.segment.seq)
        waiting += part.end_byte - (resume.byte if known and resume is not None else part.position)
    return waiting


def _piece(files: Files, part: FilePart, offset: int, stop_offset: int, resume: Place | None) -> Piece:
    segment = part.segment
    first_offset = max(offset, segment.first_offset)
    next_offset = min(stop_offset, part.next_offset)
    return Piece(
        seq=segment.seq,
        path=segment.path,
        byte=_begin(files, part, first_offset, resume),
        end_byte=byte_of_offset(files, _near(part, next_offset), next_offset),
        first_offset=first_offset,
        next_offset=next_offset,
    )


def _near(part: FilePart, offset: int) -> FilePart:
    """The same part, as close to an offset as its index knows."""
    closer = FilePart(part.segment, offset)
    closer.next_offset, closer.end_byte = part.next_offset, part.end_byte
    return closer


def _begin(files: Files, part: FilePart, offset: int, resume: Place | None) -> int:
    """The resume point is a hint: it counts if the whole frame of that offset is there."""
    if offset == part.segment.first_offset:
        return 0
    if resume is not None and (resume.offset, resume.seq) == (offset, part.segment.seq):
        file = files.open(part.segment.path)
        try:
            if FileScanner(file, resume.byte, offset, HEADER_BYTES).read(part.end_byte) is not None:
                return resume.byte
        finally:
            file.close()
    return byte_of_offset(files, part, offset)


def _cut(files: Files, part: FilePart, piece: Piece, room: int) -> Piece:
    next_offset, end_byte = last_boundary(files, part, piece.first_offset, piece.byte + room)
    if end_byte >= piece.end_byte:
        return piece
    return piece._replace(next_offset=next_offset, end_byte=end_byte)
