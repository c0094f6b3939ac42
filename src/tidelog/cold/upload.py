"""Plans and reads the next object to upload: consecutive frames, from the byte where the last one ended.

Invariants
- Only synced messages are shipped, so the store never has an offset that a power failure removes from the disk.
- An object takes whole files while they fit, continues across them, and splits only a file that is too large by itself.
- The end is known before the first byte is sent: it is part of the object's name.
- An atomic batch (`log/atomic_batches.py`) is shipped when all of it is synced, in one object: the object ends before
  the batch, or takes all of it however large it is.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.cold.blocks import TARGET_BLOCK_BYTES, block_compressor, encode_block
from tidelog.cold.catalog import Codec, Descriptor, largest_frame_bytes
from tidelog.cold.settings import TierSettings
from tidelog.errors import CorruptionError, DataError, OffsetOutOfRangeError
from tidelog.files import Files
from tidelog.log import Log
from tidelog.log.atomic_batches import GroupOf
from tidelog.log.binding import encode_binding
from tidelog.log.frame import HEADER_BYTES, Frames, crc32
from tidelog.log.recovery import REPAIR_HINT
from tidelog.log.segment import FilePart, FileScanner, byte_of_offset, last_boundary
from tidelog.store.keys import ObjectId
from tidelog.store.object_store import ObjectInfo, ObjectStore, ObjectWriter


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


class UploadPlan(NamedTuple):
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


def plan_upload(
    log: Log,
    offset: int,
    stop_offset: int,
    max_object_bytes: int,
    resume: Place | None,
    group_of: GroupOf | None = None,
) -> UploadPlan | None:
    """The next object from `offset` on, up to `stop_offset` (exclusive) at most; None when there is nothing.

    No group lies across `stop_offset` (`whole_groups`).
    """
    shipment = _plan(log, offset, stop_offset, max_object_bytes, resume)
    if shipment is None or group_of is None or shipment.next_offset == stop_offset:
        return shipment
    first, end = _group_at(log, shipment.next_offset - 1, group_of)
    if end <= shipment.next_offset or end > stop_offset:
        return shipment
    if first > offset:
        return _plan(log, offset, first, max_object_bytes, resume)
    return _plan(log, offset, end, sys.maxsize, resume)


def whole_groups(log: Log, stop_offset: int, group_of: GroupOf | None) -> int:
    """The same offset, or the first of the group that it lies inside of."""
    if group_of is None or stop_offset <= log.start_offset or log.ends_whole_at(stop_offset):
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


def _plan(log: Log, offset: int, stop_offset: int, max_object_bytes: int, resume: Place | None) -> UploadPlan | None:
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
    return UploadPlan(tuple(pieces)) if pieces else None


def bytes_behind(log: Log, offset: int, resume: Place | None) -> int:
    """About how many bytes of files wait from `offset` on. Exact where the position is known."""
    return bytes_from(log.parts(offset, log.next_offset), offset, resume)


def bytes_from(parts: Iterable[FilePart], offset: int, resume: Place | None) -> int:
    """The same of these parts of files."""
    return sum(
        part.end_byte - (resume.byte if resume is not None and _is_of(resume, part, offset) else part.position)
        for part in parts
    )


def _is_of(place: Place, part: FilePart, offset: int) -> bool:
    """Whether a place may be that of an offset in this part. A file that begins there is another one than the file of
    that number that was here before the log moved away and came back."""
    is_named = (place.offset, place.seq) == (offset, part.segment.seq) and offset > part.segment.first_offset
    return is_named and part.position <= place.byte <= part.end_byte


def place_of(files: Files, parts: Iterable[FilePart], offset: int) -> Place | None:
    """Where the frame of an offset begins, read from the files; None if it is in none of these parts."""
    for part in parts:
        if part.segment.first_offset <= offset < part.next_offset:
            byte = 0 if offset == part.segment.first_offset else byte_of_offset(files, part, offset)
            return Place(offset, part.segment.seq, byte)
    return None


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


# The sparse index of an object under construction: an entry every so many messages or bytes (1000 and 4 MiB).
#
# It is stored in the descriptor, so its size is bounded: an object of very many small messages gets a coarser one.


EVERY_MESSAGES = 1000
EVERY_BYTES = 4 << 20
MAX_ENTRIES = 8192


class OffsetIndexBuilder:
    """Receives positions in order; costs one step per entry, not one per message."""

    def __init__(self, every_messages: int | None = None, every_bytes: int | None = None) -> None:
        self._entries: list[tuple[int, int]] = []
        self._every_messages = every_messages or EVERY_MESSAGES
        self._every_bytes = every_bytes or EVERY_BYTES

    def add_frames(self, frames: Frames, base: int) -> None:
        """Frames whose buffer begins at byte `base` of the object."""
        starts = memoryview(frames.positions).cast("Q")
        index = self._next_due(starts, frames.first_offset, base, 0)
        while index < frames.count:
            self._add(frames.first_offset + index, base + starts[index] - HEADER_BYTES)
            index = self._next_due(starts, frames.first_offset, base, index + 1)

    def add_block(self, first_offset: int, position: int) -> None:
        """A compressed block; it is entered if one is due."""
        if not self._entries or self._is_due(first_offset, position):
            self._add(first_offset, position)

    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._entries)

    def _is_due(self, offset: int, position: int) -> bool:
        last_offset, last_position = self._entries[-1]
        return offset - last_offset >= self._every_messages or position - last_position >= self._every_bytes

    def _next_due(self, starts: memoryview, first_offset: int, base: int, low: int) -> int:
        if not self._entries:
            return 0
        last_offset, last_position = self._entries[-1]
        by_messages = last_offset + self._every_messages - first_offset
        by_bytes = bisect_left(starts, last_position + self._every_bytes - base + HEADER_BYTES, lo=low)
        return max(low, min(by_messages, by_bytes))

    def _add(self, offset: int, position: int) -> None:
        self._entries.append((offset, position))
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[1::2]
            self._every_messages *= 2


# Uploads one object: the bytes are read once, and verified, indexed, summed up and sent in one pass.
#
# Invariants
# - Every frame's checksum and offset is verified before its bytes are sent. Damage aborts the upload: no object
#   appears, and nothing after the damage counts as shipped.
# - The header that binds the object to its log is sent first.
# - A few parts are in memory, never a file.


_RAW_CHUNK_BYTES = 4 << 20


class Uploaded(msgspec.Struct, frozen=True):
    """An object that is in the store and in no catalog yet."""

    info: ObjectInfo
    checksum: str
    offset_index: tuple[tuple[int, int], ...]
    first_time_us: int | None
    last_time_us: int | None
    largest_bytes: int | msgspec.UnsetType = msgspec.UNSET


def describe_object(
    name: ObjectId,
    shipment: UploadPlan,
    uploaded: Uploaded,
    codec: Codec,
    log_id: str,
    reached_time_us: int | None,
    *,
    created_us: int = 0,
    position: int | msgspec.UnsetType = msgspec.UNSET,
) -> Descriptor:
    """The descriptor of an object that was uploaded."""
    return Descriptor(
        object_id=str(name),
        start_offset=name.start,
        end_offset=name.end,
        first_time_us=uploaded.first_time_us,
        last_time_us=uploaded.last_time_us,
        reached_time_us=reached_time_us,
        size=uploaded.info.size,
        raw_size=shipment.raw_bytes,
        etag=uploaded.info.etag,
        checksum=uploaded.checksum,
        codec=codec,
        epoch=name.epoch,
        created_us=created_us,
        log_id=log_id,
        offset_index=uploaded.offset_index,
        position=position,
        largest_bytes=uploaded.largest_bytes,
    )


class Upload:
    """One object being uploaded."""

    def __init__(
        self,
        files: Files,
        shipment: UploadPlan,
        log_id: str,
        codec: Codec,
        level: int,
        time_field: int | None,
        index: OffsetIndexBuilder | None = None,
    ) -> None:
        self._files = files
        self._shipment = shipment
        self._log_id = log_id
        self._time_field = time_field
        self._compressor = block_compressor(level) if codec == "zstd" else None
        self._index = index or OffsetIndexBuilder()
        self._crc = 0
        self._first_time_us: int | None = None
        self._last_time_us: int | None = None
        self._largest_bytes: int | msgspec.UnsetType = msgspec.UNSET

    def send(self, objects: ObjectStore, key: str, on_frames: Callable[[Frames], None] | None = None) -> Uploaded:
        """Reads, checks and sends everything; the object appears whole or not at all. `on_frames` gets all frames."""
        chunk_bytes = _RAW_CHUNK_BYTES if self._compressor is None else TARGET_BLOCK_BYTES
        with objects.open_writer(key) as writer:
            self._write(writer, encode_binding(self._log_id, self._shipment.first_offset))
            for piece in self._shipment.pieces:
                for frames in frames_of(self._files, piece, chunk_bytes):
                    self._send_frames(writer, frames)
                    if on_frames is not None:
                        on_frames(frames)
        assert writer.published is not None
        return Uploaded(
            writer.published,
            checksum_text(self._crc),
            self._index.entries(),
            self._first_time_us,
            self._last_time_us,
            self._largest_bytes,
        )

    def _send_frames(self, writer: ObjectWriter, frames: Frames) -> None:
        raw = memoryview(frames.buffer)[: frames.end]
        self._largest_bytes = largest_frame_bytes(frames, self._largest_bytes)
        if self._time_field is not None and (times := frames.field_range(self._time_field)) is not None:
            first, last = self._first_time_us, self._last_time_us
            self._first_time_us = times[0] if first is None else min(first, times[0])
            self._last_time_us = times[1] if last is None else max(last, times[1])
        if self._compressor is None:
            self._index.add_frames(frames, writer.bytes_written)
            data: bytes | memoryview = raw
        else:
            self._index.add_block(frames.first_offset, writer.bytes_written)
            data = encode_block(raw, frames.first_offset, frames.count, self._compressor)
        self._write(writer, data)

    def _write(self, writer: ObjectWriter, data: bytes | memoryview) -> None:
        self._crc = crc32(data, self._crc)
        writer.write(data)


def frames_of(files: Files, piece: Piece, chunk_bytes: int) -> Iterator[Frames]:
    """The frames of a piece, checked, as many at once as are about so many bytes; CorruptionError where one is
    damaged."""
    file = files.open(piece.path)
    try:
        scanner = FileScanner(file, piece.byte, piece.first_offset, chunk_bytes)
        while scanner.position < piece.end_byte:
            frames = scanner.read(piece.end_byte)
            if frames is None:
                raise CorruptionError(
                    scanner.stop.reason,
                    path=piece.path,
                    byte=scanner.position,
                    operation="ship",
                    hint=REPAIR_HINT,
                )
            yield frames
    finally:
        file.close()


def upload_of(
    files: Files, shipment: UploadPlan, log_id: str, settings: TierSettings, time_field: int | None
) -> Upload:
    """A shipment as the settings want it sent."""
    index = OffsetIndexBuilder(settings.ship_index_messages, settings.ship_index_bytes)
    codec, level = settings.ship_compression, settings.ship_compression_level
    return Upload(files, shipment, log_id, codec, level, time_field, index)


def checksum_text(crc: int) -> str:
    """How the checksum of a whole object is written down."""
    return f"crc32:{crc:08x}"
