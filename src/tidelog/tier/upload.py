"""Sending one object: the bytes are read once, and checked, indexed, summed up and sent on the way.

Invariants
- Every frame's checksum and offset is checked before its bytes are sent. Damage aborts the upload: no object appears,
  and nothing behind the damage is taken for shipped.
- The header that binds the object to its log goes first.
- A few parts are in memory, never a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidelog.errors import CorruptionError
from tidelog.files import Files
from tidelog.log.binding import encode_binding
from tidelog.log.frame import Frames, crc32
from tidelog.log.recovery import REPAIR_HINT
from tidelog.log.scanner import FileScanner
from tidelog.tier.blocks import TARGET_BLOCK_BYTES, block_compressor, encode_block
from tidelog.tier.descriptor import Codec
from tidelog.tier.object_store import ObjectInfo, ObjectStore, ObjectWriter
from tidelog.tier.offset_index import OffsetIndexBuilder
from tidelog.tier.shipment import Piece, Shipment
from tidelog.tier.tier_settings import TierSettings

_RAW_CHUNK_BYTES = 4 << 20


class Uploaded(NamedTuple):
    """An object that is in the store and in no catalog yet."""

    info: ObjectInfo
    checksum: str
    offset_index: tuple[tuple[int, int], ...]
    first_time_us: int | None
    last_time_us: int | None


class Upload:
    """One object on its way."""

    def __init__(
        self,
        files: Files,
        shipment: Shipment,
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

    def send(self, objects: ObjectStore, key: str) -> Uploaded:
        """Reads, checks and sends everything; the object appears whole or not at all."""
        with objects.open_writer(key) as writer:
            self._write(writer, encode_binding(self._log_id, self._shipment.first_offset))
            for piece in self._shipment.pieces:
                for frames in self._frames_of(piece):
                    self._send_frames(writer, frames)
        assert writer.published is not None
        return Uploaded(
            writer.published,
            checksum_text(self._crc),
            self._index.entries(),
            self._first_time_us,
            self._last_time_us,
        )

    def _frames_of(self, piece: Piece) -> Iterator[Frames]:
        chunk_bytes = _RAW_CHUNK_BYTES if self._compressor is None else TARGET_BLOCK_BYTES
        file = self._files.open(piece.path)
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

    def _send_frames(self, writer: ObjectWriter, frames: Frames) -> None:
        raw = memoryview(frames.buffer)[: frames.end]
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


def upload_of(files: Files, shipment: Shipment, log_id: str, settings: TierSettings, time_field: int | None) -> Upload:
    """A shipment as the settings want it sent."""
    index = OffsetIndexBuilder(settings.ship_index_messages, settings.ship_index_bytes)
    codec, level = settings.ship_compression, settings.ship_compression_level
    return Upload(files, shipment, log_id, codec, level, time_field, index)


def checksum_text(crc: int) -> str:
    """How the checksum of a whole object is written down."""
    return f"crc32:{crc:08x}"
