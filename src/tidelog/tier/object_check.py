"""Reading a whole object to find out what it is: every frame, and what a descriptor of it has to say.

Invariants
- Nothing but the name, the size and the bytes is believed, and all of them must agree.
- One range is in memory, or one frame or block where that is larger.
- Bytes that are not what they must be are fetched once more: a bad transfer is not a bad object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from tidelog.errors import ConflictError, CorruptionError, DataError, NotFoundError, OtherLogError
from tidelog.log.binding import BINDING_BYTES, check_binding, decode_binding
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames, Stop, crc32, scan
from tidelog.tier import blocks
from tidelog.tier.descriptor import Codec, Descriptor
from tidelog.tier.keys import ObjectId
from tidelog.tier.object_store import ObjectInfo, ObjectStore
from tidelog.tier.offset_index import OffsetIndexBuilder
from tidelog.tier.upload import checksum_text

RANGE_BYTES = 4 << 20
# Is told each piece of frames that was found to be good, and at which byte of the object the piece begins.
OnFrames = Callable[[Frames, int], None]
_Result = TypeVar("_Result")


class _Piece(NamedTuple):
    """Good frames that take so many bytes of the object."""

    frames: Frames
    size: int


class ObjectCheck:
    """One pass over one object. `time_field` is where its payloads have their time.

    `log_id` is that of the log that it must belong to; None: it says so itself.
    """

    def __init__(
        self,
        objects: ObjectStore,
        info: ObjectInfo,
        name: ObjectId,
        log_id: str | None,
        time_field: int | None,
        on_bytes: Callable[[int], None] | None = None,
        on_frames: OnFrames | None = None,
    ) -> None:
        self._objects = objects
        self._info = info
        self._name = name
        self._log_id = log_id
        self._time_field = time_field
        self._on_bytes = on_bytes
        self._on_frames = on_frames
        self._codec: Codec = "none"
        self._offset = name.start
        self._position = 0
        self._buffer = b""
        self._at = 0
        self._crc = 0
        self._raw_size = 0
        self._index = OffsetIndexBuilder()
        self._times: tuple[int, int] | None = None

    def descriptor(self) -> Descriptor:
        """Reads everything. CorruptionError names the byte at which it is not what its name says."""
        self._retried(self._check_header)
        self._skip_header()
        self._retried(self._sniff)
        while self._position < self._info.size:
            piece = self._retried(self._next_piece)
            self._take(piece)
        if self._offset != self._name.end + 1:
            raise self._damage(f"the end, where offset {self._offset} has to come")
        first_time_us, last_time_us = self._times or (None, None)
        return Descriptor(
            object_id=str(self._name),
            start_offset=self._name.start,
            end_offset=self._name.end,
            first_time_us=first_time_us,
            last_time_us=last_time_us,
            reached_time_us=last_time_us,
            size=self._info.size,
            raw_size=self._raw_size,
            etag=self._info.etag,
            checksum=checksum_text(self._crc),
            codec=self._codec,
            epoch=self._name.epoch,
            created_us=self._info.modified_us,
            log_id=self._log_id or "",
            offset_index=self._index.entries(),
        )

    def _take(self, piece: _Piece) -> None:
        frames, stored = piece.frames, memoryview(self._buffer)[self._at : self._at + piece.size]
        if self._codec == "none":
            self._index.add_frames(frames, self._position - self._at)
        else:
            self._index.add_block(frames.first_offset, self._position)
        self._crc = crc32(stored, self._crc)
        self._raw_size += frames.end - frames.start_of(0)
        self._learn_times(frames)
        if self._on_frames is not None:
            self._on_frames(frames, self._position)
        self._offset = frames.next_offset
        self._at += piece.size
        self._position += piece.size
        if self._on_bytes is not None:
            self._on_bytes(piece.size)

    def _learn_times(self, frames: Frames) -> None:
        found = None if self._time_field is None else frames.field_range(self._time_field)
        if found is not None:
            known = self._times or found
            self._times = min(known[0], found[0]), max(known[1], found[1])

    # Decoding

    def _check_header(self) -> None:
        self._fill(BINDING_BYTES)
        self._log_id = self._log_id or decode_binding(self._buffer).log_id
        check_binding(self._buffer, self._info.key, self._log_id, self._name.start)

    def _skip_header(self) -> None:
        self._crc = crc32(self._buffer[:BINDING_BYTES])
        self._at = self._position = BINDING_BYTES
        if self._on_bytes is not None:
            self._on_bytes(BINDING_BYTES)

    def _sniff(self) -> None:
        self._fill(min(HEADER_BYTES, max(1, self._info.size - BINDING_BYTES)))
        codec = blocks.sniff_codec(self._buffer[self._at :], self._name.start)
        if codec is None:
            raise DataError("neither a frame nor a block with the offset of its name")
        self._codec = codec

    def _next_piece(self) -> _Piece:
        piece = None
        while piece is None:
            piece = self._frames() if self._codec == "none" else self._block()
        if piece.frames.next_offset > self._name.end + 1:
            raise DataError(f"more messages than up to offset {self._name.end}")
        return piece

    def _frames(self) -> _Piece | None:
        frames, end, stop = scan(self._buffer, self._at, self._offset)
        if frames.count:
            return _Piece(frames, end - self._at)
        if stop not in (Stop.PARTIAL, Stop.END):
            raise DataError(stop.reason)
        needed = HEADER_BYTES
        if len(self._buffer) - self._at >= HEADER_BYTES:
            needed += int(HEADER.unpack_from(self._buffer, self._at)[1])
        self._fill(needed)
        return None

    def _block(self) -> _Piece | None:
        header = blocks.parse_header(self._buffer, self._at, self._offset)
        needed = blocks.HEADER_BYTES if header is None else header.size
        if header is None or len(self._buffer) - self._at < needed:
            self._fill(needed)
            return None
        block = memoryview(self._buffer)[self._at : self._at + needed]
        return _Piece(blocks.decode_block(header, block), needed)

    # Bytes

    def _fill(self, needed: int) -> None:
        """Brings so many bytes behind the position into the buffer, and what else a range has."""
        if self._position + needed > self._info.size:
            raise DataError("a frame or block that is cut short")
        parts: list[bytes | memoryview] = [memoryview(self._buffer)[self._at :]]
        size = len(parts[0])
        while size < needed:
            data = self._read(self._position + size)
            parts.append(data)
            size += len(data)
        self._buffer, self._at = b"".join(parts), 0

    def _read(self, start: int) -> memoryview:
        length = min(RANGE_BYTES, self._info.size - start)
        try:
            data = self._objects.read_range(self._info.key, start, length)
        except NotFoundError as error:
            raise ConflictError(
                f"{self._info.key} was deleted while it was read", operation="rebuild", hint="Try again"
            ) from error
        if len(data) != length:
            raise DataError("an object that is shorter than the store said")
        return data

    def _retried(self, step: Callable[[], _Result]) -> _Result:
        try:
            return step()
        except DataError:
            self._buffer, self._at = b"", 0
        try:
            return step()
        except OtherLogError:
            raise
        except DataError as error:
            raise self._damage(error.message) from error

    def _damage(self, message: str) -> CorruptionError:
        return CorruptionError(
            message,
            path=self._info.key,
            byte=self._position,
            operation="rebuild",
            hint="Put a good copy of the object in its place, or allow gaps to go on without it",
        )
