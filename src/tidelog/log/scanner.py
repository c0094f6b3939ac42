"""Walks the frames of one file in bounded memory.

Invariants
- What is handed out has been checked: checksum, length, and the offset that had to come next.
- `position` is always the boundary after the last frame that was handed out, `offset` the one that comes next there.
- No more than one chunk, or one frame where it is larger, is in memory.
"""

from __future__ import annotations

from tidelog.files import File
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames, Stop, scan


class FileScanner:
    """Frames of a file from a known boundary on, a chunk at a time."""

    def __init__(self, file: File, position: int, offset: int, chunk_bytes: int) -> None:
        self.position = position
        self.offset = offset
        self.stop = Stop.END
        self._file = file
        self._chunk_bytes = chunk_bytes

    def read(self, end: int) -> Frames | None:
        """The next frames before byte `end`; None when there is none, and then `stop` says why.

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
