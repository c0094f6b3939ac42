"""Bodies of many objects at once, in the order in which the log has them: what lies near comes with one request.

    pointer -> object of the log, or pack or file of the compaction -> ranges -> bodies

Invariants
- What is handed out has the checksum of its version. What cannot be read this way (objects of compressed blocks, bad
  bytes, something that was moved meanwhile) is read one by one as the engine reads it, which looks again and names
  what is wrong.
- A request takes a few MiB at most, unless one body is larger. Bytes between two bodies are fetched along where that is
  cheaper than another request.
- A reader is opened in the process that reads, and kept for its next task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from tidelog.engine.body import decode_body
from tidelog.engine.cell import Cell
from tidelog.engine.cold import Body, ColdReader
from tidelog.engine.cold_objects import CheckedHeaders, ColdObjects
from tidelog.engine.compacted import CompactedData, read_compaction
from tidelog.engine.manifest import read_manifest
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.engines.store_place import EnginePlace

_CACHE_BYTES = 64 << 20
_RANGE_BYTES = 8 << 20
_GAP_BYTES = 256 << 10
_KEPT_READERS = 4


def read_bodies(place: EnginePlace, cells: Sequence[Cell]) -> list[Body | None]:
    """Data and metadata for each cell; None for a deletion."""
    return _reader(place).read(cells)


@lru_cache(_KEPT_READERS)
def _reader(place: EnginePlace) -> BodyReader:
    return BodyReader(place)


class _Span(NamedTuple):
    """Where a stored body is, how it is compressed there, and which of the cells wants it."""

    key: str
    byte: int
    stored_bytes: int
    codec: int
    number: int

    @property
    def end(self) -> int:
        return self.byte + self.stored_bytes


class BodyReader:
    """Reads bodies of one engine. It is for one thread."""

    def __init__(self, place: EnginePlace) -> None:
        self._store = place.opened().objects
        self._catalog = place.catalog()
        self._one_by_one = ColdReader(self._catalog, self._store, _CACHE_BYTES)
        self._objects = ColdObjects(self._catalog)
        self._headers = CheckedHeaders()
        self._compacted: CompactedData | None = None

    def read(self, cells: Sequence[Cell]) -> list[Body | None]:
        """Data and metadata for each cell; None for a deletion."""
        bodies: list[Body | None] = [None] * len(cells)
        for group in _together(self._spans(cells, bodies)):
            self._fetch(group, cells, bodies)
        for index, cell in enumerate(cells):
            if bodies[index] is None and not cell.is_tombstone:
                bodies[index] = self._one_by_one.read(cell)
        return bodies

    def _spans(self, cells: Sequence[Cell], bodies: list[Body | None]) -> list[_Span]:
        """Where the bodies are that can be read together; those that are in their cells are done at once."""
        spans: list[_Span] = []
        for index, cell in enumerate(cells):
            if cell.inline is not None:
                bodies[index] = decode_body(cell.inline, cell.codec, cell.size, cell.crc, cell.lsn)
            elif not cell.is_tombstone and (span := self._located(cell, index)) is not None:
                spans.append(span)
        return sorted(spans)

    def _located(self, cell: Cell, index: int) -> _Span | None:
        found = self._objects.find_kept(cell.lsn)
        if found is None:
            return self._in_compaction(cell, index)
        byte = found.byte_at(cell.position)
        if found.descriptor.codec != "none" or byte < found.descriptor.header_bytes:
            return None
        self._headers.check(self._store, found)
        return _Span(found.key, byte, cell.stored_bytes, cell.codec, index)

    def _in_compaction(self, cell: Cell, index: int) -> _Span | None:
        data = self._compacted or self._opened()
        place = None if data is None else data.find_body(cell.position)
        if data is None or place is None:
            return None
        return _Span(*data.locate(place), place.stored_bytes, place.codec, index)

    def _opened(self) -> CompactedData | None:
        keys = self._objects.keys
        found = read_manifest(self._catalog.metadata, keys)
        if found is not None and found[0].compacted is not None:
            self._compacted = CompactedData(self._store, keys, read_compaction(self._store, keys, found[0].compacted))
        return self._compacted

    def _fetch(self, group: list[_Span], cells: Sequence[Cell], bodies: list[Body | None]) -> None:
        start = group[0].byte
        try:
            data = self._store.read_range(group[0].key, start, max(span.end for span in group) - start)
        except NotFoundError:  # compacted, or dropped, since it was looked up
            self._objects, self._compacted = ColdObjects(self._catalog), None
            return
        for span in group:
            cell = cells[span.number]
            try:
                stored = data[span.byte - start : span.end - start]
                bodies[span.number] = decode_body(stored, span.codec, cell.size, cell.crc, cell.lsn)
            except DataError:
                continue  # read again by itself: then it is right, or the error names the place


def _together(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Neighbours that one request fetches."""
    group: list[_Span] = []
    for span in spans:
        if group and (
            span.key != group[0].key
            or span.byte - group[-1].end > _GAP_BYTES
            or span.end - group[0].byte > _RANGE_BYTES
        ):
            yield group
            group = []
        group.append(span)
    if group:
        yield group
