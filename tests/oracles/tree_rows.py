"""The oracle of rows of the tree as columns: the same answers as `native/tree_rows.c`, one row after the other."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from tests.oracles.cells import decode_cell
from tests.oracles.rows import row_at

from tidelog.engine.mvcc.cells import BUCKETS, OBJECTS, POINTER, SEQ_BYTES, Cell, is_pointer, seq_of
from tidelog.engine.mvcc.digest import Digest
from tidelog.engine.mvcc.versions import BucketVersion
from tidelog.engine.sst.blob_file import BlobPointer, encode_value_pointer
from tidelog.engine.wal.record_header import decode_header
from tidelog.engine.wal.value import CODEC_NONE
from tidelog.errors import DataError, InputError
from tidelog.log.frame import Buffer

Column = tuple[Any, Any, Any, int, int]
_LEAST_KEY_BYTES = 5 + SEQ_BYTES
_MAX_UNIT = 0x7FFFFFFF


def _numbers(data: Any, code: Any) -> memoryview:
    return memoryview(data).cast("B").cast(code)


def cells_of(column: Column, count: int) -> list[bytes | None]:
    """The rows of a column."""
    validity, ends, data, first, width = column
    limits = _numbers(ends, {4: "i", 8: "q"}[width])
    if len(limits) < first + count + 1 and (count or len(limits)):
        raise ValueError("a column has fewer rows than were named")
    bits, view = None if validity is None else memoryview(validity), memoryview(data)
    found: list[bytes | None] = []
    for row in range(first, first + count):
        is_there = bits is None or bits[row // 8] >> row % 8 & 1
        found.append(bytes(view[limits[row] : limits[row + 1]]) if is_there else None)
    return found


def _both(keys: Column, cells: Column, count: int) -> list[tuple[bytes, bytes]]:
    return [(key or b"", cell or b"") for key, cell in zip(cells_of(keys, count), cells_of(cells, count), strict=True)]


def _created(ends: bytes, names: bytes, seqs: bytes, orders: bytes) -> dict[bytes, BucketVersion]:
    limits, times, places = (_numbers(data, code) for data, code in ((ends, "I"), (seqs, "Q"), (orders, "I")))
    return {names[limits[at] : limits[at + 1]]: BucketVersion(times[at], places[at], False) for at in range(len(times))}


def _names(key: bytes) -> tuple[bytes, bytes]:
    """Bucket and name of a version of an object."""
    if len(key) >= _LEAST_KEY_BYTES and key[:1] == OBJECTS and key[-SEQ_BYTES - 1] == 0:
        bucket, _, name = key[1 : -SEQ_BYTES - 1].partition(b"\0")
        if bucket and name and b"\0" not in name:
            return bucket, name
    raise DataError("a row that is no version of an object")


def _cell(data: bytes) -> Cell:
    try:
        return decode_cell(data)
    except DataError:
        raise DataError(f"invalid version: {len(data)} bytes") from None


def survey_rows(
    keys: Column, cells: Column, count: int, seq: int, every: int, settled: bytes, *created: bytes
) -> tuple[bytes, int, bytes, list[bytes]]:
    """(sum of digests, things, the last name, sampled keys)."""
    there, digest, samples = _created(*created), Digest(), list[bytes]()
    for key, data in _both(keys, cells, count):
        if not (len(key) > SEQ_BYTES and key[:1] == BUCKETS):
            bucket, name = _names(key)
            prefix, at = key[:-SEQ_BYTES], seq_of(key)
            if at <= seq and prefix != settled:
                settled, cell, made = prefix, _cell(data), there.get(bucket)
                if not cell.is_tombstone and made is not None and (at, cell.order) >= (made.seq, made.order):
                    digest.add_object(bucket, name, at, cell.size, cell.crc)
        if every and crc32(key) % every == 0:
            samples.append(key)
    return digest.total.to_bytes(32, "little"), digest.count, settled, samples


def judge_rows(keys: Column, cells: Column, count: int, horizon: int, keep_versions: int, *created: bytes) -> bytes:
    """A byte a row, 1 when the rule lets it go: as `vacuum_rules.py` says. Cells that go anyway are not looked at."""
    there, goes, name = _created(*created), bytearray(count), b""
    kept: list[tuple[int, bytes]] = []
    for row, (key, data) in enumerate(_both(keys, cells, count)):
        if len(key) <= SEQ_BYTES:
            raise DataError("a row that is no version of an object")
        if row == 0 or key[:-SEQ_BYTES] != name:
            _let_tombstones_go(goes, kept)
            name, kept = key[:-SEQ_BYTES], []
        is_bucket = key[:1] == BUCKETS
        if not data:
            raise DataError("a row that is no version of an object")
        bucket = b"" if is_bucket else _names(key)[0]
        if seq_of(key) > horizon:
            continue
        if len(kept) >= (1 if is_bucket else keep_versions) or not (
            is_bucket or _is_seen(key, data, there.get(bucket))
        ):
            goes[row] = 1
        else:
            kept.append((row, data))
    _let_tombstones_go(goes, kept)
    return bytes(goes)


def _is_seen(key: bytes, data: bytes, made: BucketVersion | None) -> bool:
    cell = _cell(data)
    return made is not None and (seq_of(key), cell.order) >= (made.seq, made.order)


def _let_tombstones_go(goes: bytearray, kept: list[tuple[int, bytes]]) -> None:
    """Below the oldest ones that were kept nothing is left."""
    while kept and kept[-1][1][0] & 1:
        goes[kept.pop()[0]] = 1


def _unit(position: int, window_bytes: int, cuts: bytes) -> int:
    if window_bytes:
        return position // window_bytes & _MAX_UNIT
    return bisect_right(memoryview(cuts).cast("Q"), position)


def point_rows(
    keys: Column, cells: Column, count: int, window_bytes: int, cuts: bytes
) -> tuple[int, tuple[bytes, bytes, bytes]]:
    """(how many, (rows, units, positions))."""
    found = []
    for row, (key, data) in enumerate(_both(keys, cells, count)):
        if key[:1] == OBJECTS and is_pointer(data):
            position = _cell(data).position
            found.append((row, _unit(position, window_bytes, cuts), position))
    columns = list(zip(*found, strict=True)) or [(), (), ()]
    codes = zip(columns, "IIQ", (4, 4, 8), strict=True)
    whole = [struct.pack(f"<{len(found)}{code}", *column) + bytes(0) for column, code, _ in codes]
    return len(found), (whole[0], whole[1], whole[2])


def place_units(keys: Column, count: int, window_bytes: int, cuts: bytes) -> tuple[bytes, bytes]:
    """(units, positions)."""
    positions = []
    for key in cells_of(keys, count):
        if key is None or len(key) != 8:
            raise DataError(f"invalid WAL position: {len(key or b'')} bytes")
        positions.append(int.from_bytes(key, "big"))
    units = [_unit(position, window_bytes, cuts) for position in positions]
    return struct.pack(f"<{count}I", *units), struct.pack(f"<{count}Q", *positions)


def merge_values(positions: Buffer, keys: Column, values: Column, count: int) -> tuple[int, tuple[bytes, ...]]:
    """(how many, columns of the values that are alive)."""
    at, found = _numbers(positions, "Q"), list[tuple[int, ...]]()
    if len(at) < count:
        raise ValueError("a column has fewer rows than were named")
    names, contents = cells_of(keys, count), cells_of(values, count)
    row = 0
    while row < count:
        end = row
        while end < count and at[end] == at[row]:
            end += 1
        found += _merged(row, at[row], names[row:end], [one or b"" for one in contents[row:end]])
        row = end
    columns = list(zip(*found, strict=True)) or [()] * 13
    packed = (
        struct.pack(f"<{len(found)}{code}", *column) for code, column in zip("IIiQQQIIBqQIB", columns, strict=True)
    )
    return len(found), tuple(packed)


def _merged(first: int, position: int, keys: list[bytes | None], values: list[bytes]) -> Iterator[tuple[int, ...]]:
    place, place_row, cell, first_row, versions = (-1, 0, 0, 0), -1, None, 0, 0
    for row, (key, value) in enumerate(zip(keys, values, strict=True), first):
        if key is None:
            place, place_row = _place(value), row
            continue
        parsed = _cell(value)
        if parsed.flags != POINTER:
            raise DataError(f"invalid version: {len(value)} bytes")
        if cell is None:
            cell, first_row = parsed, row
        elif parsed[2:] != cell[2:]:
            raise DataError(f"versions tell different things of the value at position {position}")
        versions += 1
    if cell is not None:
        numbers = (cell.lsn, position, cell.size, cell.stored_bytes, cell.crc, cell.codec)
        yield (first_row, versions, place_row, *numbers, *place)


def _place(data: bytes) -> tuple[int, int, int, int]:
    kind = data[0] if data else 0
    if kind == 1 and len(data) == 18:
        _, codec, blob_file, byte, stored = struct.unpack("<BBIQI", data)
    elif kind == 2 and len(data) > 6:
        (codec, stored), blob_file, byte = struct.unpack_from("<BI", data, 1), -2, 0
    else:
        raise DataError(f"invalid value pointer: kind {kind}, {len(data)} bytes")
    if codec > 1:
        raise DataError(f"value pointer has unknown codec {codec}")
    return blob_file, byte, stored, codec


def gather_values(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    lsns: Buffer,
    sizes: Buffer,
    stored: Buffer,
    crcs: Buffer,
    codecs: Buffer,
    start: int,
    stop: int,
) -> tuple[bytes, bytes]:
    """(stored values, their checksums)."""
    view, data, found = memoryview(buffer), list[bytes](), list[int]()
    starts, counts = _numbers(positions, "Q"), _numbers(lengths, "I")
    claims = [_numbers(one, code) for one, code in ((lsns, "Q"), (sizes, "Q"), (stored, "I"), (crcs, "I"))]
    for row in range(start, stop):
        lsn, size, stored_bytes, crc = (claim[row] for claim in claims)
        index = lsn - first_lsn
        if not 0 <= index < len(starts):
            raise ValueError(f"there is no record {lsn}")
        end = decode_header(view[starts[index] : starts[index] + counts[index]], lsn).updates_offset
        if stored_bytes > end:
            raise DataError(f"a record has no value of {stored_bytes} bytes, LSN {lsn}")
        value = bytes(view[starts[index] + end - stored_bytes : starts[index] + end])
        data.append(value)
        found.append(crc32(value))
        if memoryview(codecs)[row] == CODEC_NONE:
            _require_value(value, size, crc, lsn)
    return b"".join(data), struct.pack(f"<{len(found)}I", *found)


def cut_values(
    first_byte: int,
    buffer: Buffer,
    places: Buffer,
    lengths: Buffer,
    lsns: Buffer,
    sizes: Buffer,
    stored: Buffer,
    crcs: Buffer,
    codecs: Buffer,
    start: int,
    stop: int,
) -> tuple[bytes, bytes]:
    """(stored values, their checksums)."""
    view, data = memoryview(buffer), list[bytes]()
    starts, counts = _numbers(places, "Q"), _numbers(lengths, "I")
    if len(starts) != len(counts):
        raise ValueError("positions and lengths are not arrays of the same count")
    claims = [_numbers(one, code) for one, code in ((lsns, "Q"), (sizes, "Q"), (stored, "I"), (crcs, "I"))]
    if any(len(claim) < stop for claim in claims):
        raise ValueError("a column has fewer rows than were named")
    for row in range(start, stop):
        lsn, size, stored_bytes, crc = (claim[row] for claim in claims)
        if row >= len(starts):
            raise ValueError(f"there is no place {row}")
        at = starts[row] - first_byte
        if at < 0 or at + stored_bytes > len(view):
            raise DataError(f"{stored_bytes} bytes at byte {starts[row]} are not in the file, LSN {lsn}")
        data.append(bytes(view[at : at + stored_bytes]))
        if memoryview(codecs)[row] == CODEC_NONE:
            _require_value(data[-1], size, crc, lsn)
    return b"".join(data), struct.pack(f"<{len(data)}I", *map(crc32, data))


def _require_value(value: bytes, size: int, crc: int, lsn: int) -> None:
    if crc32(value) != crc:
        raise DataError(f"the checksum of the object's value does not match, LSN {lsn}")
    head = max(0, len(value) - size)
    metadata = struct.unpack_from("<I", value)[0] if head >= 4 else 0
    if head != 4 + metadata:
        raise DataError(f"{head} bytes before the data cannot hold {metadata} of metadata, LSN {lsn}")


def block_rows(raw: bytes, has_places: bool) -> tuple[int, tuple[bytes, bytes, bytes, bytes, bytes]]:
    """(rows, (key ends, keys, value ends, values, parts))."""
    keys, values, at = list[bytes](), list[bytes](), 0
    while at < len(raw):
        key, value, at = row_at(raw, at, has_places)
        keys.append(key)
        values.append(value)
    parts = struct.pack(f"<{len(keys)}I", *(crc32(key[:-SEQ_BYTES]) & 0x7FFFFFFF for key in keys))
    return len(keys), (_ends(keys), b"".join(keys), _ends(values), b"".join(values), parts)


def _ends(values: list[bytes]) -> bytes:
    ends = [0]
    for value in values:
        ends.append(ends[-1] + len(value))
    return struct.pack(f"<{len(ends)}i", *ends)


def pack_rows(
    keys: Column, values: Column, count: int, start: int, target_bytes: int, after_key: bytes
) -> tuple[int, bytes]:
    """(where the next block begins, raw)."""
    rows, raw, row = _both(keys, values, count), b"", start
    while row < count and len(raw) < target_bytes:
        key, value = rows[row]
        if key <= after_key:
            raise InputError("rows of a file are not in order, or a key comes twice")
        raw += struct.pack("<HH", len(key), len(value)) + key + value
        after_key, row = key, row + 1
    return row, raw


def file_numbers(keys: Column, count: int, cuts: tuple[bytes, ...]) -> bytes:
    """How many cuts are not above each key."""
    return struct.pack(f"<{count}I", *(bisect_right(cuts, key or b"") for key in cells_of(keys, count)))


def join_versions(cells: Column, pointers: Column, count: int) -> tuple[bytes, bytes]:
    """(ends, data)."""
    joined = [struct.pack("<H", len(cell)) + cell + pointer for cell, pointer in _both(cells, pointers, count)]
    return _ends(joined), b"".join(joined)


def encode_pointers(codecs: Buffer, blob_files: Buffer, places: Buffer, stored: Buffer) -> bytes:
    """Pointers into blob files, one after the other."""
    columns = [_numbers(one, code) for one, code in zip((codecs, blob_files, places, stored), "BIQI", strict=True)]
    if len({len(one) for one in columns}) > 1:
        raise ValueError("columns have different numbers of rows")
    return b"".join(encode_value_pointer(BlobPointer(*row)) for row in zip(*columns, strict=True))


def blob_directory(positions: Buffer, stored: Buffer, crcs: Buffer) -> bytes:
    """The directory of a blob file."""
    columns = [_numbers(one, code) for one, code in zip((positions, stored, crcs), "QII", strict=True)]
    if len({len(one) for one in columns}) > 1:
        raise ValueError("columns have different numbers of rows")
    directory = b""
    for position, length, crc in zip(*columns, strict=True):
        if not length:
            raise InputError("a value of a blob file is empty")
        directory += struct.pack("<QII", position, length, crc)
    return directory


def position_keys(positions: Buffer) -> bytes:
    """Keys of the value index, one after the other."""
    return b"".join(position.to_bytes(8, "big") for position in _numbers(positions, "Q"))


def order_rows(columns: tuple[Any, ...], count: int) -> bytes:
    """The numbers of rows, in the order of some columns."""
    values = [cells_of(one, count) if len(one) == 5 else _signed(one, count) for one in columns]

    def rank(row: int) -> list[tuple[Any, ...]]:
        return [(1,) if column[row] is None else (0, column[row]) for column in values]

    return struct.pack(f"={count}I", *sorted(range(count), key=rank))


def _signed(column: tuple[Any, Any, int, int], count: int) -> list[int | None]:
    validity, data, first, width = column
    found = _numbers(data, {4: "i", 8: "q"}[width])
    if len(found) < first + count:
        raise ValueError("a column has fewer rows than were named")
    bits = None if validity is None else memoryview(validity)
    rows = range(first, first + count)
    return [found[row] if bits is None or bits[row // 8] >> row % 8 & 1 else None for row in rows]
