"""Frames: the bytes of the log, in memory, in WAL files and in shipped objects alike.

    byte   0        8         12      16
           +--------+---------+-------+---------------------+
           | offset | length  | crc32 | payload             |   all little-endian
           | u64    | u32     | u32   | `length` bytes      |
           +--------+---------+-------+---------------------+

Invariants
- Offsets of consecutive frames are consecutive, so a scanner knows which offset must come next: another one is damage.
- A payload has at least one byte. A run of zero bytes (a hole left by a file system) is therefore never a frame.
- The crc covers the payload and then the 12 bytes offset and length: it is finished once the offset is known, and of a
  frame that gets another offset it follows from the old one without reading the payload.
- A frame that is whole is therefore the frame of that offset: a copy of it elsewhere is damage by itself.

The loops live in the C kernel (`_kernel.c`); `frame_python` gives the same answers where it could not be built.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidelog.log import frame_python

if TYPE_CHECKING:
    _kernel = frame_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.log import _kernel
    except ImportError:
        _kernel = frame_python

HEADER = struct.Struct("<QII")
HEADER_BYTES = HEADER.size
# A bound of the format, not a setting: a smaller setting must not make older, larger messages look damaged.
MAX_PAYLOAD_BYTES = 1 << 30
KERNEL_IS_NATIVE = _kernel is not frame_python

crc32 = _kernel.crc32
frame_crc = _kernel.frame_crc


class Stop(enum.IntEnum):
    """Why a scan stopped."""

    END = frame_python.END
    PARTIAL = frame_python.PARTIAL
    BAD_CRC = frame_python.BAD_CRC
    WRONG_OFFSET = frame_python.WRONG_OFFSET
    BAD_LENGTH = frame_python.BAD_LENGTH

    @property
    def reason(self) -> str:
        """In words, for errors and reports."""
        return _REASONS[self]


_REASONS = {
    Stop.END: "end of the data",
    Stop.PARTIAL: "a frame that is cut short",
    Stop.BAD_CRC: "a checksum that does not match",
    Stop.WRONG_OFFSET: "an offset that is not the next one",
    Stop.BAD_LENGTH: "an impossible length",
}


class Frames(msgspec.Struct, frozen=True, gc=False):
    """Whole frames in a buffer: where the payloads are, as arrays (native u64 and u32), no object a frame."""

    first_offset: int
    buffer: bytes
    positions: bytes
    lengths: bytes

    @property
    def count(self) -> int:
        return len(self.lengths) // 4

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.count

    def start_of(self, index: int) -> int:
        """Byte position of a frame's header in the buffer; `count` gives the end of the last frame."""
        if index == self.count:
            return self.end
        return memoryview(self.positions).cast("Q")[index] - HEADER_BYTES

    @property
    def end(self) -> int:
        """Byte position after the last frame."""
        if not self.lengths:
            return 0
        return memoryview(self.positions).cast("Q")[-1] + memoryview(self.lengths).cast("I")[-1]

    def slice(self, start: int, stop: int) -> Frames:
        """Some of the frames, in the same buffer."""
        positions, lengths = self.positions[start * 8 : stop * 8], self.lengths[start * 4 : stop * 4]
        return Frames(self.first_offset + start, self.buffer, positions, lengths)

    def renumbered(self, first_offset: int) -> Frames:
        """The same payloads in frames of other offsets, in a buffer of their own."""
        buffer, positions = _kernel.renumber(self.buffer, self.positions, self.lengths, first_offset)
        return Frames(first_offset, buffer, positions, self.lengths)

    def payloads(self, start: int = 0, stop: int | None = None) -> list[bytes]:
        """Copies of the payloads from `start` to `stop` (exclusive)."""
        stop = self.count if stop is None else stop
        return _kernel.payloads(self.buffer, self.positions, self.lengths, start, stop)

    def field_range(self, field: int) -> tuple[int, int] | None:
        """Least and greatest i64 at byte `field` of the payloads; None when no payload is that long."""
        return _kernel.field_range(self.buffer, self.positions, self.lengths, field)

    def first_at_least(self, field: int, minimum: int, start: int = 0) -> int | None:
        """Index of the first payload whose i64 at byte `field` is at least `minimum`."""
        found = _kernel.first_at_least(self.buffer, self.positions, self.lengths, field, minimum, start)
        return None if found < 0 else found


class Scan(NamedTuple):
    """The whole frames of a buffer, the safe boundary after them, and why the scan went no further."""

    frames: Frames
    end: int
    stop: Stop


def encode(offset: int, payload: bytes) -> bytes:
    """One frame."""
    return encode_many(offset, [payload]).buffer


def encode_many(first_offset: int, payloads: Sequence[bytes]) -> Frames:
    """Consecutive frames, with the positions of their payloads."""
    return Frames(first_offset, *_kernel.encode_many(first_offset, payloads))


def scan(buffer: bytes, position: int = 0, offset: int = 0, *, payload_only: bool = False) -> Scan:
    """Checks frames from `position` on, the first of which must carry `offset`, up to the safe boundary.

    `payload_only`: the checksums cover the payloads alone, as in Danube's frames.
    """
    positions, lengths, end, stop = _kernel.scan(buffer, position, offset, MAX_PAYLOAD_BYTES, payload_only)
    return Scan(Frames(offset, buffer, positions, lengths), end, Stop(stop))


def find_frame(
    buffer: bytes, position: int, min_offset: int, max_offset: int, *, payload_only: bool = False
) -> tuple[int, int] | None:
    """The first whole frame at or after `position` with an offset in the range: (position, offset).

    Tells a torn tail (nothing valid follows) from damage in the middle (something does).
    """
    return _kernel.find_frame(buffer, position, min_offset, max_offset, MAX_PAYLOAD_BYTES, payload_only)
