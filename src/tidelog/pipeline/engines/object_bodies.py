"""Bodies of many objects at once, fetched in the order in which the log has them: what is near comes with one request.

Invariants
- What is handed out has the checksum of its version. A body whose record was dropped is read from compacted data;
  what is in neither is an error that names it.
- A reader is opened in the process that reads, and kept for its next task.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tidelog.engine.body import decode_body
from tidelog.engine.cell import Cell
from tidelog.engine.cold import Body, ColdReader
from tidelog.pipeline.engines.store_place import EnginePlace

_CACHE_BYTES = 64 << 20
_KEPT_READERS = 4


def read_bodies(place: EnginePlace, cells: Sequence[Cell]) -> list[Body | None]:
    """Data and metadata for each cell; None for a deletion."""
    bodies: list[Body | None] = [None] * len(cells)
    reader = _reader(place)
    for index in sorted(range(len(cells)), key=lambda one: cells[one].position):
        cell = cells[index]
        if cell.is_tombstone:
            continue
        if cell.inline is not None:
            bodies[index] = decode_body(cell.inline, cell.codec, cell.size, cell.crc, cell.lsn)
        else:
            bodies[index] = reader.read(cell)
    return bodies


@lru_cache(_KEPT_READERS)
def _reader(place: EnginePlace) -> ColdReader:
    return ColdReader(place.catalog(), place.opened().objects, _CACHE_BYTES)
