"""The frames of one object, from an offset on: fetched, checked, in order.

Invariants
- What is handed out has been checked: checksum, length, the offset that had to come, and that the object ends where
  its descriptor says, in bytes and in offsets.
- `position` is the boundary behind what was handed out, `offset` the one that comes next there.
- Bytes that are not what they must be are fetched once more, from the boundary before them: a bad transfer is not a
  bad object. If they come again as they were, the object is damaged.
- What a frame or block says about its length is compared with the descriptor before memory is taken for it.
- `skip_damage` goes on at the next good frame, or block, so that exactly what is damaged is left out. Where damage
  hides the next one, the sparse index knows a later boundary.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from tidelog.errors import CorruptionError, DataError, OtherLogError
from tidelog.log.damage import find_good_frame
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames, Stop, scan
from tidelog.tier import blocks
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.history_ranges import Fetcher, RangeStream

DAMAGE_HINT = "Put a good copy of the object in its place; for a good object `tidelog topic rebuild-catalog` helps"


class _Decoded(NamedTuple):
    """What a buffer begins with: frames (None: passed over) of so many bytes, or how many bytes are needed for any."""

    frames: Frames | None
    next_offset: int
    size: int
    needed: int = 0


class ObjectFrames:
    """A position in one object. `ahead`: whether ranges are fetched ahead from the first one on."""

    def __init__(
        self, fetcher: Fetcher, key: str, descriptor: Descriptor, offset: int, stop_offset: int, *, ahead: bool
    ) -> None:
        self.descriptor = descriptor
        self.key = key
        self.offset, self.position = descriptor.position_of(offset)
        self._is_bound = not descriptor.header_bytes
        if self.position == descriptor.header_bytes:
            self.position = 0  # the header comes with the first frames
        self._fetcher = fetcher
        self._wanted_offset = offset
        self._end = descriptor.end_of(min(stop_offset, descriptor.next_offset) - 1)
        self._boundaries = [position for _, position in descriptor.offset_index]
        self._buffer = b""
        self._buffer_at = 0
        self._is_second_try = False
        self._stream = self._stream_from_here(ahead=ahead)

    def next_frames(self) -> Frames | None:
        """The next frames, those with the wanted offset in front of them included; None behind the last."""
        while self.position < self._end:
            try:
                self._bind()
                decoded = self._decode_next()
                self._check_end(decoded)
            except DataError as damage:
                self._try_again(damage)
                continue
            self._accept(decoded)
            if decoded.frames is not None and decoded.next_offset > self._wanted_offset:
                return decoded.frames
        return None

    def close(self) -> None:
        """Lets go of what is on its way."""
        self._stream.close()

    def _accept(self, decoded: _Decoded) -> None:
        self._is_second_try = False
        self._buffer_at += decoded.size
        self.position += decoded.size
        self.offset = decoded.next_offset

    def _check_end(self, decoded: _Decoded) -> None:
        last, size = self.descriptor.end_offset, self.descriptor.size
        ends = self.position + decoded.size == size
        if decoded.next_offset > last + 1 or ends != (decoded.next_offset == last + 1):
            raise DataError(f"an object that does not end with offset {last} and {size} bytes")

    # Bytes that are not what they must be

    def _try_again(self, damage: DataError) -> None:
        if self._is_second_try:
            self._begin_anew(is_second_try=False)
            if isinstance(damage, OtherLogError):
                raise damage
            raise CorruptionError(
                damage.message, path=self.key, byte=self.position, operation="read", hint=DAMAGE_HINT
            ) from damage
        self._fetcher.counters.repeated()
        self._begin_anew(is_second_try=True)

    def _begin_anew(self, *, is_second_try: bool) -> None:
        self._stream.close()
        self._buffer, self._buffer_at = b"", 0
        self._is_second_try = is_second_try
        self._stream = self._stream_from_here(ahead=False)

    def _stream_from_here(self, *, ahead: bool) -> RangeStream:
        size, boundaries = self.descriptor.size, self._boundaries
        return RangeStream(self._fetcher, self.key, self.position, self._end, size, ahead=ahead, boundaries=boundaries)

    def skip_damage(self) -> None:
        """Goes on behind damage, which `next_frames` has just raised: `offset` is the next that can be read."""
        find = self._good_frame if self.descriptor.codec == "none" else self._good_block
        found = find()
        self.offset, self.position = self._next_boundary() if found is None else found
        self._begin_anew(is_second_try=False)

    def _next_boundary(self) -> tuple[int, int]:
        """The next one that the index knows, or the end of the object."""
        later = (entry for entry in self.descriptor.offset_index if entry[0] > self.offset)
        return next(later, (self.descriptor.next_offset, self.descriptor.size))

    def _good_frame(self) -> tuple[int, int] | None:
        """The first good frame before the next boundary, as (offset, position)."""
        end_offset, end = self._next_boundary()
        damaged = bytes(self._fetcher.fetch(self.key, self.position, end - self.position))
        found = find_good_frame(damaged, self.offset, min_offset=self.offset + 1)
        if found is None or found[1] >= end_offset:
            return None
        return found[1], self.position + found[0]

    def _good_block(self) -> tuple[int, int] | None:
        """The block behind the damaged one, if that can still be told its length, and one begins there."""
        header_bytes = blocks.HEADER_BYTES
        try:
            damaged = blocks.parse_header(self._fetcher.fetch(self.key, self.position, header_bytes), 0, self.offset)
            if damaged is None or self.position + damaged.size + header_bytes > self.descriptor.end_of(self.offset):
                return None
            position = self.position + damaged.size
            behind = self._fetcher.fetch(self.key, position, header_bytes)
            blocks.parse_header(behind, 0, damaged.next_offset)
        except DataError:
            return None
        return damaged.next_offset, position

    # Decoding

    def _bind(self) -> None:
        """Who begins inside the object fetches its header by itself, once."""
        if not self._is_bound and self.position:
            self.descriptor.check_header(self._fetcher.fetch(self.key, 0, self.descriptor.header_bytes), self.key)
            self._is_bound = True

    def _decode_header(self) -> _Decoded:
        size = self.descriptor.header_bytes
        if len(self._buffer) - self._buffer_at < size:
            return _Decoded(None, self.offset, 0, size)
        self.descriptor.check_header(memoryview(self._buffer)[self._buffer_at :], self.key)
        self._is_bound = True
        return _Decoded(None, self.offset, size)

    def _decode_next(self) -> _Decoded:
        while True:
            decoded = self._decode_one()
            if decoded.size:
                return decoded
            self._refuse_to_take(decoded.needed)
            self._fetch(decoded.needed)

    def _refuse_to_take(self, needed: int) -> None:
        """The index knows where the next frames or blocks begin, so that no length can reach behind that."""
        if self.position + needed > self.descriptor.end_of(self.offset):
            raise DataError("a length that leads too far")

    def _fetch(self, needed: int) -> None:
        """Brings more bytes into the buffer, until there are as many as are needed behind its position."""
        parts: list[memoryview] = [memoryview(self._buffer)[self._buffer_at :]]
        missing = needed - len(parts[0])
        try:
            while missing > 0:
                parts.append(self._next_range())
                missing -= len(parts[-1])
        finally:
            # After an error too: the stream does not give what it gave once more.
            kept = [part for part in parts if len(part)]
            # One range that stands for itself is used as it came: a view reads like bytes, and the copy costs as much
            # as the checksums.
            self._buffer, self._buffer_at = cast(bytes, kept[0]) if len(kept) == 1 else b"".join(kept), 0

    def _next_range(self) -> memoryview:
        data = self._stream.next()
        if data is None:
            raise DataError("an object that is cut short")
        if self._stream.has_surplus:
            raise DataError(f"an object that is longer than the {self.descriptor.size} bytes of its descriptor")
        return data

    def _decode_one(self) -> _Decoded:
        if not self._is_bound:
            return self._decode_header()
        return self._decode_frames() if self.descriptor.codec == "none" else self._decode_block()

    def _decode_frames(self) -> _Decoded:
        frames, end, stop = scan(self._buffer, self._buffer_at, self.offset)
        if frames.count:
            return _Decoded(frames, frames.next_offset, end - self._buffer_at)
        if stop not in (Stop.PARTIAL, Stop.END):
            raise DataError(stop.reason)
        needed = HEADER_BYTES
        if len(self._buffer) - self._buffer_at >= HEADER_BYTES:
            needed += HEADER.unpack_from(self._buffer, self._buffer_at)[1]
        return _Decoded(None, self.offset, 0, needed)

    def _decode_block(self) -> _Decoded:
        header = blocks.parse_header(self._buffer, self._buffer_at, self.offset, self.descriptor.raw_size)
        if header is None:
            return _Decoded(None, self.offset, 0, blocks.HEADER_BYTES)
        end = self._buffer_at + header.size
        if end > len(self._buffer):
            return _Decoded(None, self.offset, 0, header.size)
        block = memoryview(self._buffer)[self._buffer_at : end]
        if header.next_offset <= self._wanted_offset:
            blocks.check_block(block)
            return _Decoded(None, header.next_offset, header.size)
        return _Decoded(blocks.decode_block(header, block), header.next_offset, header.size)
