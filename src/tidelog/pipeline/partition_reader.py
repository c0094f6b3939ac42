"""What a task does: from the bytes of a part to Arrow batches, without an object for a row.

Invariants
- Exactly the offsets of the part, in order, each once, or an error that names what is missing. With `skips_gaps`
  what is lost is passed over.
- Objects and files are read where the plan says they are. When one is gone meanwhile (pruned, compacted), the catalog
  is asked where its messages are now, and reading goes on at the same offset.
- Stores are opened in the process that reads, and kept for its next task: a fork must not inherit one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tidelog.errors import CorruptionError, OffsetOutOfRangeError
from tidelog.log.bound_files import BoundFiles
from tidelog.log.cache import Batch, framed_batch
from tidelog.log.scanner import FileScanner
from tidelog.pipeline.part import ColdPlace, FilePiece, ReadPart
from tidelog.pipeline.reading_ahead import reading_ahead
from tidelog.tier.catalog import Catalog
from tidelog.tier.history import History
from tidelog.tier.keys import TopicKeys
from tidelog.tier.metadata.open import open_metadata_store
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.planned_catalog import PlannedCatalog
from tidelog.tier.stores import open_store

_READ_BYTES = 4 << 20
_KEPT_PLACES = 16


def read_batches(part: ReadPart, place: ColdPlace | None, *, skips_gaps: bool) -> Iterator[Batch]:
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
    part: ReadPart, place: ColdPlace | None, start: int, stop: int, *, skips_gaps: bool
) -> Iterator[Batch]:
    if start >= stop:
        return
    assert place is not None, "what is in objects has a store"
    opened = _opened(place)
    namespace, _, name = part.topic.partition("/")
    keys = TopicKeys(namespace, name, place.metadata_root)
    catalog = PlannedCatalog(part.descriptors, keys, lambda: Catalog(_metadata(place), keys))
    reader = History(catalog, opened.objects, opened.fetchers).read(
        start, stop, on_gap="skip" if skips_gaps else "raise"
    )
    try:
        while (batch := reader.next_batch()) is not None:
            yield batch
    finally:
        reader.close()
    if not reader.reached_stop and not skips_gaps:
        raise OffsetOutOfRangeError(f"{part.topic}: offset {reader.offset} is not in the store any more")


@lru_cache(1)
def spare_collections() -> None:
    """Once in a worker, when everything is loaded: Spark collects garbage after every task, and would look at every
    module each time, which takes as long as reading some MiB."""
    gc.freeze()


def open_objects(place: ColdPlace) -> ObjectStore:
    """The store of a place, as this process has it open."""
    return _opened(place).objects


class _Opened(NamedTuple):
    """A store that this process has open."""

    objects: ObjectStore
    fetchers: Executor


@lru_cache(_KEPT_PLACES)
def _opened(place: ColdPlace) -> _Opened:
    return _Opened(open_store(place.store_url, place.store_settings), reading_ahead(place.store_url))


@lru_cache(_KEPT_PLACES)
def _metadata(place: ColdPlace) -> MetadataStore:
    return open_metadata_store(place.metadata_url, _opened(place).objects, read_only=True)
