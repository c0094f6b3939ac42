"""Where frames begin when none before them can vouch for that: in the oldest file, and behind a gap.

A header alone is not believed, only a whole frame is. One flipped bit in the first offset would make every frame behind
it look wrong: the log would be cut there as if it were a torn tail, or a repair would fill a gap of billions of
messages that never were. The header of the file is asked first, then the checkpoint, then the frames.
"""

from __future__ import annotations

from tidelog.files import File
from tidelog.log.bound_files import first_offset_of
from tidelog.log.checkpoint import Checkpoint
from tidelog.log.frame import HEADER, HEADER_BYTES, find_frame
from tidelog.log.scanner import FileScanner

_MAX_OFFSET = (1 << 63) - 1
_LEAST_FRAME_BYTES = HEADER_BYTES + 1


def oldest_offset(
    checkpoint: Checkpoint | None, seq: int, file: File, default: int, marked_start: int | None = None
) -> int:
    """Where the oldest file begins; `default` when neither the checkpoint nor the file can tell.

    The file's own header has a checksum and is believed before all.
    Two frames that agree are believed before the checkpoint, which may be of another state of the log. `marked_start`,
    where the log is marked to begin, is believed when the file does not begin with a frame.
    """
    bound_to = first_offset_of(file)
    if bound_to is not None:
        return bound_to
    known = checkpoint.first_offset_of(seq) if checkpoint is not None else None
    if known is None:
        if marked_start is not None and not _next_offsets(file, 0):
            return marked_start
        return _offset_by_frames(file, default)
    if header_offset(file) == known:
        return known
    offsets = _next_offsets(file, 0)[:2]
    return offsets[0] if len(offsets) == 2 and offsets[1] == offsets[0] + 1 else known


def header_offset(file: File, position: int = 0) -> int | None:
    """The offset in the header at this byte, right or wrong; None when there is no whole header."""
    header = file.read_at(position, HEADER_BYTES)
    return int(HEADER.unpack(header)[0]) if len(header) == HEADER_BYTES else None


def offset_behind_gap(
    file: File, expected: int, known: int | None = None, max_jump: int = _MAX_OFFSET, position: int = 0
) -> int | None:
    """The offset at which frames begin at a byte if it is later than `expected` and credible; None otherwise.

    `known` is what the checkpoint says. Without it the frames behind decide, or where there are none, whether so many
    messages (`max_jump`) can be missing.
    """
    found = header_offset(file, position)
    if found is None or found <= expected or (known is not None and known != found):
        return None
    offsets = _next_offsets(file, position)
    if not offsets:
        return None
    credible = found - expected <= max_jump if len(offsets) == 1 else _is_confirmed(offsets)
    return found if credible else None


def _offset_by_frames(file: File, default: int) -> int:
    found = header_offset(file)
    if found is None:
        return default
    offsets = _next_offsets(file, 0)
    if not offsets:
        return _offset_by_a_later_frame(file, found)
    return found if len(offsets) == 1 or _is_confirmed(offsets) else max(0, offsets[1] - 1)


def _is_confirmed(offsets: list[int]) -> bool:
    """Whether one of the frames behind agrees with the first; the other one may be damaged itself."""
    return any(offset == offsets[0] + distance for distance, offset in enumerate(offsets[1:], 1))


def _next_offsets(file: File, position: int) -> list[int]:
    """What the headers of three frames say, as far as there are whole frames."""
    offsets: list[int] = []
    size = file.size()
    while len(offsets) < 3 and (offset := header_offset(file, position)) is not None:
        scanner = FileScanner(file, position, offset, HEADER_BYTES)
        if scanner.read(size) is None:
            break
        offsets.append(offset)
        position = scanner.position
    return offsets


def _offset_by_a_later_frame(file: File, found: int) -> int:
    """The first frame is damaged: its offset is believed if the first good one can follow it."""
    size = file.size()
    behind = find_frame(file.read_at(0, size), 1, 0, _MAX_OFFSET)
    if behind is None or found < behind[1] <= found + size // _LEAST_FRAME_BYTES:
        return found
    return max(0, behind[1] - 1)
