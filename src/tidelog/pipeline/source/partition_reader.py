"""The read task of a topic: turns the bytes of a part into Arrow batches, without an object per row.

Invariants
- It yields exactly the offsets of the part, in order, each once, or an error that names what is missing. With
  `skips_gaps` lost offsets are skipped.
- Objects and files are read where the plan says they are. If one is gone meanwhile (pruned, compacted), the catalog is
  asked where its messages are now, and reading continues at the same offset.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tidelog.cold.catalog import PlannedCatalog
from tidelog.cold.reader import History
from tidelog.errors import CorruptionError, OffsetOutOfRangeError
from tidelog.log.binding import BoundFiles
from tidelog.log.segment import FileScanner
from tidelog.log.tail_cache import Batch, framed_batch
from tidelog.pipeline.location import FilePiece, ReadPart, TopicLocation

_READ_BYTES = 4 << 20
_KEPT_PLACES = 16


def read_batches(part: ReadPart, place: TopicLocation | None, *, skips_gaps: bool) -> Iterator[Batch]:
    """The messages of a part, as framed batches."""
    yield from _from_objects(part, place, part.start, part.cold_stop, skips_gaps=skips_gaps)
    offset = part.cold_stop
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
    reader = History(catalog, place.objects, place.fetchers).read(start, stop, on_gap="skip" if skips_gaps else "raise")
    yield from reader
    if not reader.reached_stop and not skips_gaps:
        raise OffsetOutOfRangeError(f"{part.topic}: offset {reader.offset} is not in the store any more")


@lru_cache(1)
def spare_collections() -> None:
    """Once in a worker, when everything is loaded: Spark collects garbage after every task, and would look at every
    module each time, which takes as long as reading some MiB."""
    gc.freeze()
