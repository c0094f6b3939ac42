"""What is behind a place where the frames stop: nothing (a torn tail), or good frames (damage).

Invariants
- A message may hold frames itself, a copy of a log for example. So what lies inside the frame that stopped proves
  nothing, unless that frame's own length is shown to be wrong: its checksum fits another length, or the frames found
  inside it run on to the very end of the file.
- A frame whose header has another offset, and whose checksum fits the expected one, was whole: its offset is damaged.
- A frame of any offset behind the stop is evidence against a torn tail, also one that does not belong there: what has
  good frames in it is never cut.
- The rest of the file is read whole, to find a frame of any size: the one place where memory grows with a file.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.files import File
from tidelog.log.frame import HEADER, HEADER_BYTES, MAX_PAYLOAD_BYTES, Stop, find_frame, frame_crc, scan

_MAX_CANDIDATES = 64


def find_good_frames(
    file: File, position: int, size: int, expected: int, *, min_offset: int, known_next_offset: int = 0
) -> tuple[int, int] | None:
    """The first good frame where no good frame of the expected offset begins: (byte, offset).

    Offsets are looked for from `min_offset` up to as many as there is room for, or, where bytes were taken out, up to
    the end that the file is known to have. A frame right at `position` counts only if its offset is a smaller one: it
    is good, and does not belong there.
    """
    buffer = file.read_at(position, size - position)
    found = find_good_frame(buffer, expected, min_offset=min_offset, known_next_offset=known_next_offset)
    return None if found is None else (position + found[0], found[1])


def find_good_frame(
    buffer: bytes, expected: int, *, min_offset: int, known_next_offset: int = 0
) -> tuple[int, int] | None:
    """The same in bytes that begin where no good frame of the expected offset does."""
    max_offset = max(expected + len(buffer) // HEADER_BYTES, known_next_offset - 1)
    own_end = _own_end(buffer, expected)
    found = _frame_inside(buffer, expected, max_offset, own_end) if own_end > 0 else None
    if found is None:
        start = min(own_end or int(min_offset >= expected), len(buffer))
        found = find_frame(buffer, start, min_offset, max_offset)
    return found


def is_misnumbered(file: File, position: int, size: int, expected: int) -> bool:
    """Whether the frame at a byte is the expected one, whole, but for the offset in its header: no torn tail."""
    header = file.read_at(position, HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return False
    offset, length, crc = HEADER.unpack(header)
    end = position + HEADER_BYTES + int(length)
    if offset == expected or not 0 < length <= MAX_PAYLOAD_BYTES or end > size:
        return False
    return bool(frame_crc(expected, file.read_at(position + HEADER_BYTES, int(length))) == crc)


def _own_end(buffer: bytes, expected: int) -> int:
    """How far the frame at the start says that it goes; 0 when its header is not to be believed."""
    if len(buffer) < HEADER_BYTES:
        return 0
    offset, length, _ = HEADER.unpack_from(buffer)
    credible = offset == expected and 0 < length <= MAX_PAYLOAD_BYTES
    return HEADER_BYTES + int(length) if credible else 0


def _frame_inside(buffer: bytes, expected: int, max_offset: int, own_end: int) -> tuple[int, int] | None:
    """A later frame inside what the one that stopped claims for itself, if that claim is shown to be wrong."""
    own_crc = HEADER.unpack_from(buffer)[2]
    is_torn = own_end > len(buffer)
    for found in (
        _offset_by_offset(buffer, expected, max_offset) if is_torn else _in_order(buffer, expected, max_offset)
    ):
        ends_here = found[0] > HEADER_BYTES and _crc_up_to(buffer, expected, found[0]) == own_crc
        if ends_here or scan(buffer, found[0], found[1]).stop is Stop.END:
            return found
    return None


def _crc_up_to(buffer: bytes, offset: int, end: int) -> int:
    """The checksum that the frame at the start would have if it ended there."""
    return frame_crc(offset, memoryview(buffer)[HEADER_BYTES:end])


def _in_order(buffer: bytes, expected: int, max_offset: int) -> Iterator[tuple[int, int]]:
    """The good frames behind the first byte, as they come."""
    position = 1
    for _ in range(_MAX_CANDIDATES):
        found = find_frame(buffer, position, expected + 1, max_offset)
        if found is None:
            return
        yield found
        position = found[0] + 1


def _offset_by_offset(buffer: bytes, expected: int, max_offset: int) -> Iterator[tuple[int, int]]:
    """The first good frame of each of the next offsets.

    A frame that runs past the end of the file is torn as a rule, and trying every number in its value as a header would
    take long: one offset at a time, there are few places to try.
    """
    for offset in range(expected + 1, min(expected + _MAX_CANDIDATES, max_offset) + 1):
        found = find_frame(buffer, 1, offset, offset)
        if found is not None:
            yield found
