"""Staged rows: frames in objects of their own, numbered from 0 in each, and the manifest that lists those that count.

    .../intake/{consignment}/{partition:05}-{attempt}.tlog     frames as in a file of the log
    .../intake/{consignment}/manifest-{token}.json             {"id": ..., "parts": [{"key": ..., "rows": ..., ...}]}

Invariants
- A part is written once, under a name that no other attempt has, and appears whole or not at all.
- What is read of a part has been checked: every frame, its number, how many there are, how many bytes. Whoever reads
  all of it for the first time checks its checksum as well.
- A part without rows is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.log.frame import Frames, crc32
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.history_object import ObjectFrames
from tidelog.tier.history_ranges import Fetcher
from tidelog.tier.keys import MAX_OFFSET, ObjectId
from tidelog.tier.object_store import ObjectStore, ObjectWriter
from tidelog.tier.upload import checksum_text


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one task, in the object store. Plain data: it travels from the task to whoever commits."""

    key: str
    rows: int
    bytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a consignment, in the order of their rows."""

    id: str
    parts: tuple[StagedPart, ...]


class PartWriter:
    """Writes one part. Leaving its `with` publishes it, leaving by an exception leaves nothing behind.

    `part` is there afterwards, unless there was no row.
    """

    def __init__(self, objects: ObjectStore, key: str) -> None:
        self.part: StagedPart | None = None
        self.rows = 0
        """So many rows were written: the number that the next frame must have."""
        self._objects = objects
        self._key = key
        self._writer: ObjectWriter | None = None
        self._crc = 0

    def write(self, frames: bytes | memoryview, rows: int) -> None:
        """Takes whole frames, of which the first has the number `rows` of this writer."""
        if rows < 1 or not len(frames):
            raise InputError(f"{rows} rows in {len(frames)} bytes cannot be written")
        if self._writer is None:
            self._writer = self._objects.open_writer(self._key)
        self._writer.write(frames)
        self._crc = crc32(frames, self._crc)
        self.rows += rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        self._writer.__exit__(kind, error, traceback)
        if kind is None:
            size = self._writer.bytes_written
            self.part = StagedPart(key=self._key, rows=self.rows, bytes=size, checksum=checksum_text(self._crc))


def read_part(
    fetcher: Fetcher, part: StagedPart, first_row: int = 0, done_below: Callable[[int], None] | None = None
) -> Iterator[Frames]:
    """The frames of a part from a row on, checked; CorruptionError or NotFoundError when they are not there as said.

    `done_below` is told up to which byte of the part its frames have been used.
    """
    reader = ObjectFrames(fetcher, part.key, _described(part), first_row, part.rows, ahead=True)
    try:
        while (frames := reader.next_frames()) is not None:
            passed = max(0, first_row - frames.first_offset)
            yield frames.slice(passed, frames.count)
            if done_below is not None:
                done_below(reader.position)
    finally:
        reader.close()


def read_whole_part(
    fetcher: Fetcher, part: StagedPart, done_below: Callable[[int], None] | None = None
) -> Iterator[Frames]:
    """All frames of a part; behind the last one it is known that the part is what was committed."""
    crc = 0
    for frames in read_part(fetcher, part, 0, done_below):
        crc = crc32(memoryview(frames.buffer)[frames.start_of(0) : frames.end], crc)
        yield frames
    if checksum_text(crc) != part.checksum:
        raise CorruptionError(
            f"a checksum that is not {part.checksum} of its manifest", path=part.key, byte=0, operation="take in"
        )


def _described(part: StagedPart) -> Descriptor:
    """What the reader of objects wants to know."""
    return Descriptor(
        object_id=str(ObjectId(0, part.rows - 1, 0)),
        start_offset=0,
        end_offset=part.rows - 1,
        first_time_us=None,
        last_time_us=None,
        reached_time_us=None,
        size=part.bytes,
        raw_size=part.bytes,
        etag="",
        checksum=part.checksum,
        codec="none",
        epoch=0,
        created_us=0,
        log_id="",
        offset_index=((0, 0),),
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """The JSON of it."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, key: str, checksum: str) -> Manifest:
    """The parts that count; DataError when it is not what was committed."""
    if checksum_text(crc32(data, 0)) != checksum:
        raise DataError(f"{key} is not the manifest that was committed", operation="take in")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except JSON_ERRORS as error:
        raise DataError(f"{key} cannot be understood: {error}", operation="take in") from error
    for part in manifest.parts:
        if not (0 < part.rows <= MAX_OFFSET and 0 < part.bytes <= MAX_OFFSET):
            raise DataError(f"{key} lists {part.key} with {part.rows} rows in {part.bytes} bytes", operation="take in")
    return manifest
