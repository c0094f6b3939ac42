"""Bodies as workers read them to store them anew: from records of the log, or out of packs, many with a request.

Invariants
- What is handed out has the checksum of its cell, and from the log every frame's checksum was right too.
- Bodies that are near to each other come with the same requests; what lies between distant ones is not fetched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Literal, NamedTuple

import zstandard

from tidelog.engine.body import CODEC_NONE, CODEC_ZSTD, MAX_BODY_BYTES, decode_body, decompressed
from tidelog.engine.cell import Cell
from tidelog.engine.place import PackPlace
from tidelog.engine.record_header import HEADER, HEADER_BYTES
from tidelog.errors import CorruptionError, DataError, GapError
from tidelog.log.frame import Frames
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.history import History
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.planned_catalog import PlannedCatalog

_GAP_BYTES = 1 << 20
_RANGE_BYTES = 8 << 20
_LEVEL = 3
BodyCodec = Literal["none", "zstd"]


class Stored(NamedTuple):
    """A body as it is stored, and how."""

    data: bytes
    codec: int


def bodies_in_log(place: EnginePlace, descriptors: Sequence[Descriptor], cells: Sequence[Cell]) -> Iterator[bytes]:
    """The stored bodies of cells that are in order of LSN, in the same order, checked."""
    opened = place.opened()
    history = History(PlannedCatalog(descriptors, opened.keys, place.catalog), opened.objects, opened.fetchers)
    for run in _runs(cells):
        yield from _run_of_bodies(history, run)


def _runs(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    run: list[Cell] = []
    for cell in cells:
        if run and cell.position - (run[-1].position + run[-1].stored_bytes) > _GAP_BYTES:
            yield run
            run = []
        run.append(cell)
    if run:
        yield run


def _run_of_bodies(history: History, run: list[Cell]) -> Iterator[bytes]:
    done = 0
    with closing(history.read(run[0].lsn, run[-1].lsn + 1)) as reader:
        while (batch := reader.next_batch()) is not None:
            assert batch.frames is not None
            stop = bisect_left(run, batch.next_offset, lo=done, key=lambda cell: cell.lsn)
            yield from _stored_in(batch.frames, run[done:stop])
            done = stop
    if done < len(run):
        lsn = run[done].lsn
        raise GapError(f"LSN {lsn} is not in the store, and a version points to it", first=lsn, last=run[-1].lsn)


def _stored_in(frames: Frames, cells: Sequence[Cell]) -> Iterator[bytes]:
    """A body ends where the page updates of its record begin."""
    buffer = memoryview(frames.buffer)
    starts, lengths = memoryview(frames.positions).cast("Q"), memoryview(frames.lengths).cast("I")
    for cell in cells:
        index = cell.lsn - frames.first_offset
        start, length = starts[index], lengths[index]
        if length < HEADER_BYTES:
            raise DataError(f"a record of {length} bytes has no header, LSN {cell.lsn}")
        updates_offset = int(HEADER.unpack_from(buffer, start)[3])
        if not HEADER_BYTES + cell.stored_bytes <= updates_offset <= length:
            raise DataError(f"a record has no body of {cell.stored_bytes} bytes, LSN {cell.lsn}")
        end = start + updates_offset
        yield checked(bytes(buffer[end - cell.stored_bytes : end]), cell.codec, cell)


def checked(stored: bytes, codec: int, cell: Cell) -> bytes:
    """The same bytes, if they are the body that the cell tells of."""
    decode_body(stored, codec, cell.size, cell.crc, cell.lsn)
    return stored


def bodies_in_pack(objects: ObjectStore, key: str, bodies: Sequence[tuple[PackPlace, Cell]]) -> Iterator[bytes]:
    """The stored bodies at places of one pack, in order of their bytes, checked."""
    for group in _near(bodies):
        first, last = group[0][0], group[-1][0]
        data = objects.read_range(key, first.byte, last.byte + last.stored_bytes - first.byte)
        for place, cell in group:
            start = place.byte - first.byte
            try:
                yield checked(bytes(data[start : start + place.stored_bytes]), place.codec, cell)
            except DataError as error:
                raise CorruptionError(
                    error.message,
                    path=key,
                    byte=place.byte,
                    operation="compact",
                    hint="Put a good copy of the pack in its place; a replica has one",
                ) from error


def _near(bodies: Sequence[tuple[PackPlace, Cell]]) -> Iterator[list[tuple[PackPlace, Cell]]]:
    group: list[tuple[PackPlace, Cell]] = []
    for body in bodies:
        place = body[0]
        if group:
            is_far = place.byte - (group[-1][0].byte + group[-1][0].stored_bytes) > _GAP_BYTES
            if is_far or place.byte + place.stored_bytes - group[0][0].byte > _RANGE_BYTES:
                yield group
                group = []
        group.append(body)
    if group:
        yield group


def recoded(stored: Stored, codec: BodyCodec | None) -> Stored:
    """A body that was checked, as it is to be stored in a pack: as it is, unless a codec is asked for that differs."""
    if codec == "none" and stored.codec == CODEC_ZSTD:
        return Stored(decompressed(stored.data, stored.codec, MAX_BODY_BYTES, 0), CODEC_NONE)
    if codec == "zstd" and stored.codec == CODEC_NONE:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
        smaller = compressor.compress(stored.data)
        return Stored(smaller, CODEC_ZSTD) if len(smaller) < len(stored.data) else stored
    return stored
