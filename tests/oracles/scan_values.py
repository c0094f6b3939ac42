"""The oracle of the values of rows of a scan: where they are, which come with one read, and what is in them."""

from __future__ import annotations

import struct
import zlib
from array import array
from bisect import bisect_right
from typing import Any

from tidelog.engine.mvcc.cells import POINTER, at, decode_cell
from tidelog.engine.sst.blob_file import BlobPointer, decode_version
from tidelog.engine.sst.block import rows_in
from tidelog.errors import DataError

Row = tuple[Any, ...]
PLACE = struct.Struct("=QIIII")
NO_UNIT = 2**32 - 1
_MAX_CODEC = 1
_FILE = 2


def cut_rows(rows: list[Row], start: int, most_rows: int, most_bytes: int, /) -> int:
    """Where the next batch ends."""
    end, size = start, 0
    while end < len(rows) and end - start < most_rows and size < most_bytes:
        size += max(rows[end][1], rows[end][7])
        end += 1
    return end


def unfinished(values: list[Any], /) -> list[int]:
    """The numbers of values that are not rows with data."""
    return [number for number, value in enumerate(values) if not (isinstance(value, tuple) and len(value) == 6)]


def start_values(rows: list[Row], /) -> tuple[list[Any], int]:
    """The values that are in the index, and how many are not."""
    values = [None if row[8] is None or row[4] == _FILE else _value(row, row[8], row[4]) for row in rows]
    return values, values.count(None)


def _value(row: Row, stored: bytes, codec: int) -> Row:
    _, size, _, crc, *_ = row
    if codec or len(stored) != 4 + size or stored[:4] != bytes(4) or zlib.crc32(stored) != crc:
        return stored, codec
    return *row[:4], stored[4:], {}


def place_in_log(
    rows: list[Row],
    values: list[Any],
    places: bytearray,
    first_unit: int,
    starts: array[int],
    ends: array[int],
    start: int,
    /,
) -> int:
    """Places values in files of the log; the first row from one on whose value is in none of them."""
    left = []
    for index in _wanted(rows, values, places):
        *_, codec, _, position, stored_bytes, _ = rows[index]
        file = bisect_right(starts, position) - 1
        if file >= 0 and codec <= _MAX_CODEC and position + stored_bytes <= ends[file]:
            _put(places, index, position - starts[file], first_unit + file, stored_bytes, codec)
        elif index >= start:
            left.append(index)
    return left[0] if left else len(rows)


def place_in_index(
    rows: list[Row],
    values: list[Any],
    places: bytearray,
    first_unit: int,
    prefix: bytes,
    blocks: list[bytes],
    _: bool,
    /,
) -> int:
    """Places values in blob files, by blocks of the version index; how many."""
    versions = dict(row for raw in blocks for row in rows_in(raw, _count(raw), b""))
    placed = 0
    for index in _wanted(rows, values, places):
        found = versions.get(at(prefix + rows[index][0].encode() + b"\0", rows[index][2]))
        place = None if found is None else _blob_pointer(found, rows[index][6])
        if place is not None:
            _put(places, index, place.byte, first_unit + place.blob_file, place.stored_bytes, place.codec)
            placed += 1
    return placed


def _count(raw: bytes) -> int:
    count = byte = 0
    while byte < len(raw):
        key_bytes, value_bytes = struct.unpack_from("<HH", raw, byte)
        byte += 4 + key_bytes + value_bytes
        count += 1
    return count


def _blob_pointer(value: bytes, position: int) -> BlobPointer | None:
    try:
        cell, place = decode_version(value)
        version = decode_cell(cell)
    except DataError:
        return None
    is_it = version.flags == POINTER and version.position == position and isinstance(place, BlobPointer)
    return place if is_it and isinstance(place, BlobPointer) else None


def group_places(
    values: list[Any], places: bytearray, gap_bytes: int, range_bytes: int, /
) -> list[tuple[int, int, int, bytes]]:
    """Places of values that are not there, in order, neighbours together."""
    known = [(index, *PLACE.unpack_from(places, PLACE.size * index)) for index in range(len(values))]
    left = [(unit, byte, index, length) for index, byte, unit, length, *_ in known if unit != NO_UNIT]
    groups: list[tuple[int, int, int, list[int]]] = []
    for unit, byte, index, length in sorted(left):
        if values[index] is not None:
            continue
        if groups:
            last, first, end, indexes = groups[-1]
            if last == unit and byte - end <= gap_bytes and byte + length - first <= range_bytes:
                groups[-1] = unit, first, max(end, byte + length), [*indexes, index]
                continue
        groups.append((unit, byte, byte + length, [index]))
    return [(unit, first, end, array("I", indexes).tobytes()) for unit, first, end, indexes in groups]


def join_places(
    values: list[Any], places: bytearray, gap_bytes: int, most_bytes: int, /
) -> list[tuple[int, bytes, bytes]]:
    """The same in ranges that are read one after the other; places become those in what is read."""
    found: list[tuple[int, list[list[int]], list[int]]] = []
    for unit, first, _, (index,) in _one_by_one(values, places):
        _, _, length, codec, _ = PLACE.unpack_from(places, PLACE.size * index)
        behind = first + length
        if found and found[-1][0] == unit:
            _, ranges, indexes = found[-1]
            begin, size = ranges[-1]
            is_near = first - (begin + size) <= gap_bytes
            grows = max(0, behind - (begin + size)) if is_near else length
            before = sum(size for _, size in ranges)
            if before < most_bytes and grows <= most_bytes - before:
                if is_near:
                    _put(places, index, before - size + first - begin, unit, length, codec)
                    ranges[-1][1] += grows
                else:
                    _put(places, index, before, unit, length, codec)
                    ranges.append([first, length])
                indexes.append(index)
                continue
        _put(places, index, 0, unit, length, codec)
        found.append((unit, [[first, length]], [index]))
    return [
        (unit, array("Q", [number for one in ranges for number in one]).tobytes(), array("I", indexes).tobytes())
        for unit, ranges, indexes in found
    ]


def _one_by_one(values: list[Any], places: bytearray) -> list[tuple[int, int, int, tuple[int]]]:
    known = [(index, *PLACE.unpack_from(places, PLACE.size * index)) for index in range(len(values))]
    left = sorted((unit, byte, index, length) for index, byte, unit, length, *_ in known if unit != NO_UNIT)
    return [(unit, byte, byte + length, (index,)) for unit, byte, index, length in left if values[index] is None]


def take_values(
    rows: list[Row],
    values: list[Any],
    places: bytearray,
    indexes: bytes,
    data: bytes,
    first_byte: int,
    /,
) -> int:
    """Takes values out of what was read; how many bytes they have."""
    used = 0
    for index in array("I", indexes):
        byte, _, length, codec, _ = PLACE.unpack_from(places, PLACE.size * index)
        if byte >= first_byte and byte + length <= first_byte + len(data):
            values[index] = _value(rows[index], data[byte - first_byte : byte - first_byte + length], codec)
            used += length
    return used


def _wanted(rows: list[Row], values: list[Any], places: bytearray) -> list[int]:
    return [
        index
        for index, (row, value) in enumerate(zip(rows, values, strict=True))
        if value is None and row[8] is None and PLACE.unpack_from(places, PLACE.size * index)[1] == NO_UNIT
    ]


def _put(places: bytearray, index: int, byte: int, unit: int, length: int, codec: int) -> None:
    PLACE.pack_into(places, PLACE.size * index, byte, unit, length, codec, 0)
