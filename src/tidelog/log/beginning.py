"""Where a file begins when no file before it can vouch for that: the oldest one, and one behind a gap.

A frame's checksum does not cover its offset, so a first header alone is not believed. One flipped bit in it would make
every frame behind it look wrong: the log would be cut there as if it were a torn tail, or a repair would fill a gap of
billions of messages that never were. The checkpoint is asked first, then the frame behind.
"""

from __future__ import annotations

from tidelog.files import File
from tidelog.log.checkpoint import Checkpoint
from tidelog.log.frame import HEADER, HEADER_BYTES
from tidelog.log.scanner import FileScanner, find_frame_after

_MAX_OFFSET = (1 << 63) - 1
_LEAST_FRAME_BYTES = HEADER_BYTES + 1


def oldest_offset(checkpoint: Checkpoint | None, seq: int, file: File, default: int) -> int:
    """Where the oldest file begins; `default` when neither the checkpoint nor the file can tell."""
    known = checkpoint.first_offset_of(seq) if checkpoint is not None else None
    return known if known is not None else _offset_by_frames(file, default)


def header_offset(file: File, position: int = 0) -> int | None:
    """The offset in the header at this byte, right or wrong; None when there is no whole header."""
    header = file.read_at(position, HEADER_BYTES)
    return int(HEADER.unpack(header)[0]) if len(header) == HEADER_BYTES else None


def offset_behind_gap(file: File, expected: int, known: int | None = None, max_jump: int = _MAX_OFFSET) -> int | None:
    """The offset at which a file begins if it is later than `expected` and credible; None otherwise.

    `known` is what the checkpoint says. Without it the frame behind decides, or where there is none, whether so many
    messages (`max_jump`) can be missing.
    """
    found = header_offset(file)
    if found is None or found <= expected:
        return None
    end = _end_of_frame(file, 0, found)
    if end is None or (known is not None and known != found):
        return None
    behind = _whole_frame_offset(file, end)
    credible = found - expected <= max_jump if behind is None else behind == found + 1
    return found if credible else None


def _offset_by_frames(file: File, default: int) -> int:
    found = header_offset(file)
    if found is None:
        return default
    end = _end_of_frame(file, 0, found)
    if end is None:
        return _offset_by_a_later_frame(file, found)
    behind = _whole_frame_offset(file, end)
    return found if behind is None or behind == found + 1 else max(0, behind - 1)


def _offset_by_a_later_frame(file: File, found: int) -> int:
    """The first frame is damaged: its offset is believed if the first good one can follow it."""
    size = file.size()
    behind = find_frame_after(file, 1, size, 0, _MAX_OFFSET)
    if behind is None or found < behind[1] <= found + size // _LEAST_FRAME_BYTES:
        return found
    return max(0, behind[1] - 1)


def _whole_frame_offset(file: File, position: int) -> int | None:
    """The offset of the frame at this byte; None when there is no whole frame."""
    found = header_offset(file, position)
    return found if found is not None and _end_of_frame(file, position, found) is not None else None


def _end_of_frame(file: File, position: int, offset: int) -> int | None:
    scanner = FileScanner(file, position, offset, HEADER_BYTES)
    return scanner.position if scanner.read(file.size()) is not None else None
