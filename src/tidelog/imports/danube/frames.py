"""Scans the frames of one Danube file or object and yields runs of good frames and the damaged ranges between them.

Danube's frames are laid out as ours are (`log/frame.py`), but their checksum covers the payload alone. Its files differ
from ours: offsets in them go back after a restart, frames of concurrent producers swap positions, and a write that
failed half-way was repeated after its torn first attempt. So this module assumes nothing about offsets; the caller that
orders the runs decides what is missing.

Invariants
- Everything yielded has been checked: length and checksum. Every byte belongs to a run or to a damaged range, in order.
- Memory is bounded for any input: one chunk, one message of the accepted size, and a range in which the next
  good frame is searched.
- A damaged frame whose length leads to the next good one is skipped as a whole: the contents of its message are not
  frames of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tidelog.errors import MessageTooLargeError, RetryError
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames, Stop, crc32, find_frame, scan

CHUNK_BYTES = 4 << 20
_SEARCH_BYTES = 16 << 20
_FEW_OFFSETS = 1 << 40
_MAX_JUMP = 1 << 32

ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Run:
    """Good frames with consecutive offsets. `shift` is added to Danube's offset to get that of the topic.

    `is_dated` is whether the name of the file says when it was written, or after which other one.
    """

    file: str
    buffer_byte: int
    frames: Frames
    shift: int = 0
    is_dated: bool = True

    @property
    def first_offset(self) -> int:
        return self.frames.first_offset + self.shift

    @property
    def next_offset(self) -> int:
        return self.frames.next_offset + self.shift

    @property
    def count(self) -> int:
        return self.frames.count

    @property
    def size(self) -> int:
        """In bytes, headers included."""
        return self.frames.end - self.frames.start_of(0)

    def byte(self, index: int = 0) -> int:
        """Where in the file the header of a frame is."""
        return self.buffer_byte + self.frames.start_of(index)

    def slice(self, start: int, stop: int | None = None) -> Run:
        return replace(self, frames=self.frames.slice(start, self.count if stop is None else stop))

    def shifted(self, shift: int) -> Run:
        """The same frames, to be stored elsewhere."""
        return replace(self, shift=shift)

    def alone(self) -> Run:
        """The same frames without the rest of the chunk that they were read with, to be kept for longer."""
        start = self.frames.start_of(0)
        own = self.frames.buffer[start : self.frames.end]
        return replace(
            self, buffer_byte=self.byte(), frames=scan(own, 0, self.frames.first_offset, payload_only=True).frames
        )


class Damage(NamedTuple):
    """Bytes that are not a good frame; `is_tail` if no good frame follows in the file either.

    `last_offset` is the one that the file should have ended with, if its name says so.
    """

    file: str
    byte: int
    size: int
    reason: str
    is_tail: bool
    last_offset: int | None = None


Event = Run | Damage


def read_frames(file: str, size: int, read_at: ReadAt, max_payload_bytes: int) -> Iterator[Event]:
    """Everything in a file, from the first byte to the last."""
    return _Walk(file, size, read_at, max_payload_bytes).events()


class _Walk:
    """`_position` is where the next frame should begin."""

    def __init__(self, file: str, size: int, read_at: ReadAt, max_payload_bytes: int) -> None:
        self._file = file
        self._size = size
        self._read_at = read_at
        self._max_payload_bytes = max_payload_bytes
        self._position = 0
        self._last_offset = 0

    def events(self) -> Iterator[Event]:
        want = CHUNK_BYTES
        while self._position < self._size:
            start = self._position
            buffer = self._read(start, want)
            stop = yield from self._runs(buffer)
            want = CHUNK_BYTES
            if stop is Stop.END or (stop is Stop.PARTIAL and self._position > start):
                continue
            needed = self._bytes_of_frame(buffer) if stop is Stop.PARTIAL else 0
            if needed:
                want = max(CHUNK_BYTES, needed)
            else:
                yield self._damage(stop)

    def _runs(self, buffer: bytes) -> Generator[Run, None, Stop]:
        """Yields the runs of a buffer that begins at the position; returns why it ended."""
        base, at = self._position, 0
        while True:
            if len(buffer) - at < HEADER_BYTES:
                return Stop.END if at == len(buffer) else Stop.PARTIAL
            result = scan(buffer, at, HEADER.unpack_from(buffer, at)[0], payload_only=True)
            if result.frames.count:
                self._position = base + result.end
                self._last_offset = result.frames.next_offset - 1
                yield Run(self._file, base, result.frames)
            if result.stop is not Stop.WRONG_OFFSET:
                return result.stop
            at = result.end

    def _bytes_of_frame(self, buffer: bytes) -> int:
        """The size of the frame at the start of the buffer, if the file has all of it; else 0."""
        if len(buffer) < HEADER_BYTES:
            return 0
        offset, length, crc = HEADER.unpack_from(buffer)
        if self._position + HEADER_BYTES + length > self._size:
            return 0
        if length <= self._max_payload_bytes:
            return HEADER_BYTES + int(length)
        if self._crc(self._position + HEADER_BYTES, length) != crc:
            return 0
        raise MessageTooLargeError(
            f"the message at offset {offset} has {length} bytes in Danube, more than max_message_bytes allows, "
            f"at byte {self._position} of {self._file}",
            path=self._file,
            hint="Raise max_message_bytes (TIDELOG_MAX_MESSAGE_BYTES) and import again: it continues from there",
        )

    def _crc(self, start: int, length: int) -> int:
        """Of any number of bytes, a piece at a time: a length over what is accepted may be no length at all."""
        crc = 0
        for position, size in _pieces(start, length):
            crc = crc32(self._read(position, size), crc)
        return crc

    def _damage(self, stop: Stop) -> Damage:
        """Steps over what is no frame, to the next one or to the end."""
        start = self._position
        found = self._behind_its_own_length() or self._search(start + 1)
        self._position = self._size if found is None else found
        return Damage(self._file, start, self._position - start, stop.reason, self._position == self._size)

    def _behind_its_own_length(self) -> int | None:
        """Where the damaged frame says that it ends, if a good one begins there."""
        header = self._read(self._position, HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return None
        end = self._position + HEADER_BYTES + int(HEADER.unpack(header)[1])
        return end if self._is_frame(end) else None

    def _is_frame(self, position: int) -> bool:
        if position + HEADER_BYTES > self._size:
            return False
        offset, length, _ = HEADER.unpack(self._read(position, HEADER_BYTES))
        if length > self._max_payload_bytes:
            return False
        return scan(self._read(position, HEADER_BYTES + length), 0, offset, payload_only=True).frames.count == 1

    def _search(self, start: int) -> int | None:
        """The next good frame at any position. Stretches overlap by half, so that half of one always fits.

        Offsets may have begun again at 0. Far above the last one there are none: in most bytes, few places look like
        the header of such a frame, and only those cost a checksum.
        """
        max_offset = max(self._last_offset + _MAX_JUMP, _FEW_OFFSETS)
        for position in range(start, self._size, _SEARCH_BYTES // 2):
            found = find_frame(self._read(position, _SEARCH_BYTES), 0, 0, max_offset, payload_only=True)
            if found is not None:
                return position + found[0]
        return None

    def _read(self, position: int, size: int) -> bytes:
        size = min(size, self._size - position)
        data = b"".join(self._read_at(at, length) for at, length in _pieces(position, size))
        if len(data) != size:
            raise RetryError("it became shorter during the import", path=self._file, hint="Import again")
        return data


def _pieces(position: int, size: int) -> Iterator[tuple[int, int]]:
    """(position, size) of reads that are no larger than a chunk."""
    end = position + size
    return ((at, min(CHUNK_BYTES, end - at)) for at in range(position, end, CHUNK_BYTES))
