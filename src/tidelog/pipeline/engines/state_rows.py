"""Rows of an engine's state as they are in the store, by ranges of keys, and what the log behind it changed.

Invariants
- Rows come in order of key, many at a time and without an object for each. A row of the tail wins over the state's; one
  without a value takes the key away.
- Blocks come whole: around the rows of a range there may be others.
- Every block is compared with its checksum and with what the footer says of it. Damage is named by file and byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tidelog.engine.cell_blocks import HEADER_BYTES, Row, block_bytes, count_of, decode_block, encode_blocks
from tidelog.engine.restore_runs import RawRows, merge_newest_first
from tidelog.engine.rows import check_rows
from tidelog.engine.store_checkpoint import BlockPlace
from tidelog.errors import CorruptionError, DataError, NotFoundError
from tidelog.pipeline.engines.object_part import RowBlocks
from tidelog.tier.object_store import ObjectStore

_RANGE_BYTES = 4 << 20
_FASTEST_LEVEL = 1
_LENGTHS_BYTES = 4


def merged_rows(objects: ObjectStore, files: Sequence[RowBlocks], tail: bytes) -> Iterator[RawRows]:
    """Keys and cells: those of the files, which are in order and of one kind, changed by those of the tail."""
    has_places = any(file.has_places for file in files)
    return merge_newest_first([(_unpacked(tail), False), (_stored(objects, files), has_places)])


def packed_rows(rows: Iterable[Row]) -> bytes:
    """Rows on their way to a task, compressed."""
    return b"".join(block.data for block in encode_blocks(rows, _FASTEST_LEVEL))


def _unpacked(data: bytes) -> Iterator[RawRows]:
    view, at, last_key = memoryview(data), 0, b""
    while at < len(view):
        block = view[at : at + block_bytes(view[at : at + HEADER_BYTES])]
        raw, count = decode_block(block), count_of(block)
        last_key = check_rows(raw, count, last_key, False)
        yield RawRows(raw, count)
        at += len(block)


def _stored(objects: ObjectStore, files: Sequence[RowBlocks]) -> Iterator[RawRows]:
    last_key = b""
    for file in files:
        for places in _together(file.blocks):
            first = places[0].byte
            data = _read(objects, file.key, first, places[-1].byte + places[-1].size - first)
            for place in places:
                block = data[place.byte - first : place.byte - first + place.size]
                yield _checked(block, place, file, last_key)
                last_key = place.last_key


def _read(objects: ObjectStore, key: str, start: int, length: int) -> memoryview:
    try:
        return objects.read_range(key, start, length)
    except NotFoundError as error:
        raise NotFoundError(
            f"{key} is not there any more: a newer state took its place while it was read",
            operation="read objects",
            hint="Run the query again; the option pinSeconds keeps a state for a while",
        ) from error


def _together(places: Sequence[BlockPlace]) -> Iterator[list[BlockPlace]]:
    """Blocks that are fetched with one request; those of a part lie side by side."""
    waiting: list[BlockPlace] = []
    for place in places:
        if waiting and place.byte + place.size - waiting[0].byte > _RANGE_BYTES:
            yield waiting
            waiting = []
        waiting.append(place)
    if waiting:
        yield waiting


def _checked(block: memoryview, place: BlockPlace, file: RowBlocks, after_key: bytes) -> RawRows:
    try:
        if len(block) != place.size or block_bytes(block) != place.size or count_of(block) != place.count:
            raise DataError("a block of another size than it must have")
        raw = decode_block(block)
        last_key = check_rows(raw, place.count, after_key, file.has_places)
        first_key = raw[_LENGTHS_BYTES : _LENGTHS_BYTES + len(place.first_key)]
        if last_key != place.last_key or first_key != place.first_key:
            raise DataError("a block that does not begin and end with the keys that it must")
    except DataError as error:
        raise CorruptionError(error.message, path=file.key, byte=place.byte, operation="read") from error
    return RawRows(raw, place.count)
