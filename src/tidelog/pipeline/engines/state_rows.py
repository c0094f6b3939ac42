"""Rows of an engine's state as they are in the store, by ranges of keys, and what the log behind it changed.

Invariants
- Rows come in order of key. A row of the tail wins over the state's; one without a value takes the key away.
- Every block is compared with its checksum and with what the footer says of it. Damage is named by file and byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tidelog.engine.cell_blocks import (
    HEADER_BYTES,
    Row,
    block_bytes,
    count_of,
    decode_block,
    encode_blocks,
    rows_in,
)
from tidelog.engine.place import cell_of
from tidelog.engine.restore_runs import REMOVED
from tidelog.engine.row_file import RowFile, RowPart
from tidelog.engine.store_checkpoint import BlockPlace
from tidelog.errors import CorruptionError, DataError
from tidelog.pipeline.engines.object_part import StateBlocks
from tidelog.tier.object_store import ObjectStore

_RANGE_BYTES = 4 << 20
_FASTEST_LEVEL = 1


def rows_of_files(objects: ObjectStore, parts: Iterable[RowPart], start: bytes, stop: bytes) -> Iterator[Row]:
    """Keys and cells from row files, which are in order."""
    for part in parts:
        for key, value in RowFile(objects, part, kind="versions").rows(start, stop):
            yield key, cell_of(value)


def rows_of_blocks(objects: ObjectStore, state: StateBlocks, start: bytes, stop: bytes) -> Iterator[Row]:
    """Keys and cells from blocks of a state that is one object."""
    for places in _together(state.blocks):
        first = places[0].byte
        data = objects.read_range(state.key, first, places[-1].byte + places[-1].size - first)
        for place in places:
            try:
                rows = _rows_of(data[place.byte - first : place.byte - first + place.size], place)
            except DataError as error:
                raise CorruptionError(error.message, path=state.key, byte=place.byte, operation="read") from error
            yield from (row for row in rows if start <= row[0] < stop)


def _together(places: Sequence[BlockPlace]) -> Iterator[list[BlockPlace]]:
    """Neighbours that are fetched with one request."""
    waiting: list[BlockPlace] = []
    for place in places:
        if waiting and (
            place.byte + place.size - waiting[0].byte > _RANGE_BYTES
            or waiting[-1].byte + waiting[-1].size != place.byte
        ):
            yield waiting
            waiting = []
        waiting.append(place)
    if waiting:
        yield waiting


def _rows_of(block: memoryview, place: BlockPlace) -> list[Row]:
    if len(block) != place.size or block_bytes(block) != place.size or count_of(block) != place.count:
        raise DataError("a block of another size than it must have")
    rows = list(rows_in(decode_block(block), place.count, b""))
    if rows[0][0] != place.first_key or rows[-1][0] != place.last_key:
        raise DataError("a block that does not begin or end with the key that it must")
    return rows


def packed_rows(rows: Iterable[Row]) -> bytes:
    """Rows on their way to a task, compressed."""
    return b"".join(block.data for block in encode_blocks(rows, _FASTEST_LEVEL))


def unpacked_rows(data: bytes) -> Iterator[Row]:
    """The rows again."""
    view, at, last_key = memoryview(data), 0, b""
    while at < len(view):
        size = block_bytes(view[at : at + HEADER_BYTES])
        block = view[at : at + size]
        for row in rows_in(decode_block(block), count_of(block), last_key):
            yield row
            last_key = row[0]
        at += size


def merged_rows(base: Iterator[Row], tail: Iterator[Row]) -> Iterator[Row]:
    """Both, in order of key; the tail wins, and takes away what it has no value for."""
    changed = next(tail, None)
    for row in base:
        while changed is not None and changed[0] < row[0]:
            if changed[1] != REMOVED:
                yield changed
            changed = next(tail, None)
        if changed is None or changed[0] != row[0]:
            yield row
    while changed is not None:
        if changed[1] != REMOVED:
            yield changed
        changed = next(tail, None)
