"""Frames: the bytes of the log, identical in memory, in WAL files and in shipped objects.

    byte   0        8         12      16
           +--------+---------+-------+---------------------+
           | offset | length  | crc32 | payload             |   all little-endian
           | u64    | u32     | u32   | `length` bytes      |
           +--------+---------+-------+---------------------+

Invariants
- Consecutive frames have consecutive offsets, so a scanner knows which offset must come next: any other is damage.
- A payload has at least one byte. A run of zero bytes (a hole left by a file system) is therefore never a frame.
- The crc covers the payload and then the 12 bytes of offset and length: it is completed once the offset is known, and
  the crc of a frame that gets another offset is derived from the old one without reading the payload.
- A valid frame is therefore the frame of that offset: a copy of it elsewhere is damage by itself.

The loops are C (`native/frames.c`).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import msgspec

from tidelog import _native

Buffer = bytes | bytearray | memoryview
HEADER = struct.Struct("<QII")
HEADER_BYTES = HEADER.size
# A bound of the format, not a setting: a smaller setting must not make older, larger messages look damaged.
MAX_PAYLOAD_BYTES = 1 << 30

crc32 = _native.crc32
frame_crc = _native.frame_crc


class Stop(enum.IntEnum):
    """Why a scan stopped."""

    END = 0
    PARTIAL = 1
    BAD_CRC = 2
    WRONG_OFFSET = 3
    BAD_LENGTH = 4

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
    """Whole frames in a buffer: where the payloads are, as arrays (native u64 and u32), no object a frame.

    `writable_frames` makes one whose buffer is a bytearray.
    """

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
        buffer, positions = _native.renumber(self.buffer, self.positions, self.lengths, first_offset)
        return Frames(first_offset, buffer, positions, self.lengths)

    def numbered(self, first_offset: int) -> Frames:
        """As `renumbered`; where the buffer can be written to, that happens in it, and payloads are not copied."""
        if memoryview(self.buffer).readonly:
            return self.renumbered(first_offset)
        _native.renumber_in_place(self.buffer, self.positions, self.lengths, first_offset)
        return Frames(first_offset, self.buffer, self.positions, self.lengths)

    def measure(self) -> tuple[int, int]:
        """Bytes of all payloads and of the largest; InputError when the headers do not agree with the arrays."""
        return _native.measure_frames(self.buffer, self.positions, self.lengths)

    def payloads(self, start: int = 0, stop: int | None = None) -> list[bytes]:
        """Copies of the payloads from `start` to `stop` (exclusive)."""
        stop = self.count if stop is None else stop
        return _native.payloads(self.buffer, self.positions, self.lengths, start, stop)

    def field_range(self, field: int) -> tuple[int, int] | None:
        """Least and greatest i64 at byte `field` of the payloads; None when no payload is that long."""
        return _native.field_range(self.buffer, self.positions, self.lengths, field)

    def first_at_least(self, field: int, minimum: int, start: int = 0) -> int | None:
        """Index of the first payload whose i64 at byte `field` is at least `minimum`."""
        found = _native.first_at_least(self.buffer, self.positions, self.lengths, field, minimum, start)
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
    return Frames(first_offset, *_native.encode_many(first_offset, payloads))


def join(first_offset: int, pieces: Sequence[Frames]) -> Frames:
    """Copies of several pieces one behind the other, as consecutive frames from `first_offset` on."""
    places = [(piece.buffer, piece.positions, piece.lengths) for piece in pieces]
    return Frames(first_offset, *_native.join_frames(first_offset, places))


def writable_frames(first_offset: int, buffer: bytearray, positions: bytes, lengths: bytes) -> Frames:
    """Frames in a buffer that the log may write into: the caller does not use it any more once they are appended."""
    return Frames(first_offset, cast("bytes", buffer), positions, lengths)


def scan(buffer: bytes, position: int = 0, offset: int = 0, *, payload_only: bool = False) -> Scan:
    """Checks frames from `position` on, the first of which must carry `offset`, up to the safe boundary.

    `payload_only`: the checksums cover the payloads alone, as in Danube's frames.
    """
    positions, lengths, end, stop = _native.scan_frames(buffer, position, offset, MAX_PAYLOAD_BYTES, payload_only)
    return Scan(Frames(offset, buffer, positions, lengths), end, Stop(stop))


def find_frame(
    buffer: bytes, position: int, min_offset: int, max_offset: int, *, payload_only: bool = False
) -> tuple[int, int] | None:
    """The first whole frame at or after `position` with an offset in the range: (position, offset).

    Tells a torn tail (nothing valid follows) from damage in the middle (something does).
    """
    return _native.find_frame(buffer, position, min_offset, max_offset, MAX_PAYLOAD_BYTES, payload_only)


# Offsets whose message a compaction has removed: they keep the log contiguous, and no reader sees them.
#
# Their frame has the single byte 1 as its payload. No message has such a payload, and it is not the byte that marks a
# lost offset (`repair.py`): a lost offset is reported as a gap, one removed on purpose is skipped silently.


REMOVED_PAYLOAD = b"\x01"


def is_removed(payload: bytes) -> bool:
    """Whether a payload only marks an offset whose message a compaction has removed."""
    return payload == REMOVED_PAYLOAD


# The end of a transaction takes an offset too (`service/kafka/records.py` draws it), and is no message either.
CONTROL_BYTE = 2
CONTROL_BYTES = 24


def is_control(payload: bytes) -> bool:
    """Whether a payload only marks the end of a transaction."""
    return len(payload) == CONTROL_BYTES and payload[0] == CONTROL_BYTE


def is_no_message(payload: bytes) -> bool:
    """Whether readers pass over a payload without a word: a removed message, or the end of a transaction."""
    return payload == REMOVED_PAYLOAD or is_control(payload)


def kept_runs(payloads: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """The stretches of messages between payloads that are none, as (start, stop), stop exclusive."""
    start = 0
    for index, payload in enumerate(payloads):
        if is_no_message(payload):
            if start < index:
                yield start, index
            start = index + 1
    if start < len(payloads):
        yield start, len(payloads)
