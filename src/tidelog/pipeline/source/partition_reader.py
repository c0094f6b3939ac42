"""The read task of a topic: turns the bytes of a part into Arrow batches, without an object per row.

Invariants
- It yields exactly the offsets of the part, in order, each once, or an error that names what is missing. With
  `skips_gaps` lost offsets are skipped.
- Objects and files are read where the plan says they are. If one is gone meanwhile (pruned, compacted), the catalog is
  asked where its messages are now, and reading continues at the same offset.
- What is at the owner is read from the node that has the partition by then. If that node did not get it from the one
  that was asked when the read was planned, other messages have these offsets: they are lost, never mixed in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from tidelog.cold.planned_catalog import PlannedCatalog
from tidelog.cold.reader import History
from tidelog.errors import CorruptionError, OffsetOutOfRangeError, offsets_text
from tidelog.log.binding import BoundFiles
from tidelog.log.segment import FileScanner
from tidelog.log.tail_cache import Batch, framed_batch
from tidelog.pipeline.location import FilePiece, OwnerPart, ReadPart, TopicLocation

_logger = logging.getLogger("tidelog.pipeline")
_READ_BYTES = 4 << 20
_KEPT_PLACES = 16


def read_batches(part: ReadPart, place: TopicLocation | None, *, skips_gaps: bool) -> Iterator[Batch]:
    """The messages of a part, as framed batches."""
    yield from _from_objects(part, place, part.start, part.cold_stop, skips_gaps=skips_gaps)
    offset = part.cold_stop
    if part.owner is not None and offset < part.stop:
        yield from _from_owner(part, part.owner, place, offset, skips_gaps=skips_gaps)
        return
    for piece in part.files:
        try:
            for batch in _from_file(piece, offset, part.stop):
                yield batch
                offset = batch.next_offset
        except FileNotFoundError:
            break
    if offset < part.stop:
        if place is None:
            raise OffsetOutOfRangeError(f"{part.topic}: offset {offset} is no longer kept", operation="read")
        gone = ReadPart(topic=part.topic, start=offset, stop=part.stop, cold_stop=part.stop)
        yield from _from_objects(gone, place, offset, part.stop, skips_gaps=skips_gaps)


def _from_owner(
    part: ReadPart, owner: OwnerPart, place: TopicLocation | None, offset: int, *, skips_gaps: bool
) -> Iterator[Batch]:
    topic, stop = part.of_topic or part.topic, part.stop
    while offset < stop:
        try:
            piece = owner.server.frames(topic, part.partition, offset, epoch=owner.epoch)
        except OffsetOutOfRangeError:
            piece = owner.server.frames(topic, part.partition, "latest", epoch=owner.epoch, max_bytes=1)
        stop = min(stop, piece.kept_until_offset, piece.end_offset)
        if offset < min(stop, piece.hot_start_offset):  # shipped and pruned since
            shipped = min(stop, piece.hot_start_offset)
            gone = ReadPart(topic=part.topic, start=offset, stop=shipped, cold_stop=shipped)
            yield from _from_objects(gone, place, offset, shipped, skips_gaps=skips_gaps)
            offset = shipped
        elif offset < stop and piece.frames.count:
            batch = framed_batch(piece.frames, offset, stop)
            offset = batch.next_offset
            yield batch
    if offset < part.stop:
        _lost_with_owner(part, offset, skips_gaps=skips_gaps)


def _lost_with_owner(part: ReadPart, offset: int, *, skips_gaps: bool) -> None:
    problem = (
        f"{part.topic}: {offsets_text(offset, part.stop - 1)} went with the node that had not shipped them; "
        "what has these offsets now are other messages"
    )
    if not skips_gaps:
        raise OffsetOutOfRangeError(problem, operation="read", hint="failOnDataLoss=false reads what is there")
    _logger.warning("passed over: %s", problem)


def _from_file(piece: FilePiece, offset: int, stop: int) -> Iterator[Batch]:
    file = BoundFiles().open(Path(piece.path))
    try:
        scanner = FileScanner(file, piece.byte, piece.first_offset, _READ_BYTES)
        while scanner.offset < min(stop, piece.next_offset):
            frames = scanner.read(piece.end_byte)
            if frames is None:
                raise CorruptionError(scanner.stop.reason, path=piece.path, byte=scanner.position, operation="read")
            if frames.next_offset > offset:
                batch = framed_batch(frames, max(offset, frames.first_offset), stop)
                offset = batch.next_offset
                yield batch
    finally:
        file.close()


def _from_objects(
    part: ReadPart, place: TopicLocation | None, start: int, stop: int, *, skips_gaps: bool
) -> Iterator[Batch]:
    if start >= stop:
        return
    assert place is not None, "what is in objects has a store"
    catalog = PlannedCatalog(part.descriptors, place.keys(part.topic), lambda: place.catalog(part.topic))
    history = History(catalog, place.objects, place.fetchers, payloads_only=True)
    reader = history.read(start, stop, on_gap="skip" if skips_gaps else "raise")
    yield from reader
    if not reader.reached_stop and not skips_gaps:
        raise OffsetOutOfRangeError(f"{part.topic}: offset {reader.offset} is not in the store any more")
