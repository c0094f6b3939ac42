"""The oracle of `native/sound_records.h` and `native/sound_values.h`: the same answers, by the decoders of formats."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from tests.oracles.rows import row_at
from tests.oracles.tree_rows import Column, cells_of

from tidelog.engine.mvcc.cells import decode_cell, is_pointer
from tidelog.engine.sst.blob_file import (
    BlobPointer,
    DirectoryEntry,
    FilePointer,
    check_blob_file,
    decode_value_pointer,
    decode_version,
    position_of,
)
from tidelog.engine.verify.store import check_stored, checked_record
from tidelog.engine.wal.operations import DELETE_OBJECT, PUT_OBJECT, OperationRecord
from tidelog.errors import DataError
from tidelog.log.frame import Buffer

__all__ = ["said_places", "sound_blob_file", "sound_records"]

_PLACE = struct.Struct("<QIB")
_VERSION = struct.Struct("<QIBQIQI")
_OWN_FILE_NUMBERS = 1024


def sound_records(first_lsn: int, buffer: Buffer, positions: Buffer, lengths: Buffer, /) -> tuple[int, int, list[int]]:
    """Puts of plain values and deletions with nothing wrong: how many entries end there, values, other records."""
    entries, values, others = 0, 0, list[int]()
    places = zip(memoryview(positions).cast("Q"), memoryview(lengths).cast("I"), strict=True)
    for index, (at, length) in enumerate(places):
        record = _sound(bytes(memoryview(buffer)[at : at + length]), first_lsn + index)
        if record is None:
            others.append(index)
        else:
            entries += record.is_last
            values += record.op == PUT_OBJECT
    return entries, values, others


def _sound(payload: bytes, lsn: int) -> OperationRecord | None:
    try:
        record, _ = checked_record(payload, lsn)
        if not isinstance(record, OperationRecord) or record.is_refused or record.codec:
            return None
        if record.op == PUT_OBJECT:
            check_stored(record, lsn)
    except DataError:
        return None
    is_plain = len(record.stored) == 4 + record.size and record.stored[:4] == bytes(4)
    is_plain = is_plain if record.op == PUT_OBJECT else record.op == DELETE_OBJECT
    return record if is_plain and (record.bucket + record.key).isascii() else None


def said_places(
    raw: bytes, is_values: bool, blob_files: int, /
) -> tuple[int, tuple[bytes, bytes, bytes, bytes, bytes]]:
    """What an index says of values, as columns."""
    files, places, said, names, ends = b"", b"", b"", b"", struct.pack("<I", 0)
    count = 0
    for pointer, claim in _claims(raw, is_values):
        number, name = _file_of(pointer, blob_files)
        files += struct.pack("<I", number)
        places += struct.pack("<Q", pointer.byte if isinstance(pointer, BlobPointer) else 0)
        said += claim
        names += name
        ends += struct.pack("<I", len(names))
        count += 1
    return count, (files, places, said, ends, names)


def _file_of(pointer: BlobPointer | FilePointer, blob_files: int) -> tuple[int, bytes]:
    if isinstance(pointer, FilePointer):
        name = pointer.name.encode()
        return blob_files + zlib.crc32(name) % _OWN_FILE_NUMBERS, name
    if pointer.blob_file >= blob_files:
        raise DataError("a pointer to a blob file that is not there")
    return pointer.blob_file, b""


def _claims(raw: bytes, is_values: bool) -> Iterator[tuple[BlobPointer | FilePointer, bytes]]:
    at = 0
    while at < len(raw):
        key, value, at = row_at(raw, at, False)
        if is_values:
            pointer = decode_value_pointer(value)
            yield pointer, _PLACE.pack(position_of(key), pointer.stored_bytes, pointer.codec)
            continue
        cell, place = decode_version(value)
        if key[:1] != b"o" or not is_pointer(cell):
            if place is not None:
                raise DataError("a place of what has no value elsewhere")
            continue
        if place is None:
            raise DataError("invalid value pointer: kind 0, 0 bytes")
        version = decode_cell(cell)
        told = version.size, version.crc, version.lsn, version.stored_bytes
        yield place, _VERSION.pack(version.position, place.stored_bytes, place.codec, *told)


class _Told(NamedTuple):
    """What was said of a value: by the index of values, and by the first version."""

    place: bytes
    version: bytes | None = None


def sound_blob_file(
    data: bytes, places: Buffer, sources: Buffer, said: Column, /
) -> tuple[int, int, int, int, int, list[int]] | None:
    """What a blob file has of what is said of it; None where that does not fit."""
    bytes_of, sources_of = memoryview(places).cast("B").cast("Q"), memoryview(sources).cast("B").cast("I")
    told, others = dict[int, _Told](), list[int]()
    try:
        directory = {entry.byte: entry for entry in check_blob_file(data)}
        if list(bytes_of) != sorted(bytes_of):
            return None
        for row, claim in enumerate(cells_of(said, len(bytes_of))):
            byte = bytes_of[row]
            told[byte] = _added(told.get(byte), directory[byte], sources_of[row], claim or b"")
            if sources_of[row] and not _is_plain(data, directory[byte], told[byte]):
                others += [] if any(bytes_of[other] == byte for other in others) else [row]
    except (DataError, KeyError):
        return None
    if any(one.version is None for one in told.values()):
        return None
    positions = [entry.position for entry in directory.values()]
    live_bytes = sum(directory[byte].stored_bytes for byte in told)
    return len(directory), len(told), live_bytes, min(positions), max(positions), others


def _added(told: _Told | None, entry: DirectoryEntry, source: int, claim: bytes) -> _Told:
    """What is known with one more row; DataError where they do not go together."""
    if source == 0:
        is_same = len(claim) == _PLACE.size and _PLACE.unpack(claim)[:2] == (entry.position, entry.stored_bytes)
        if told is not None or not is_same:
            raise DataError("two places, or another than the directory has")
        return _Told(claim)
    if told is None or len(claim) != _VERSION.size or claim[: _PLACE.size] != told.place:
        raise DataError("a version without a place, or with another")
    if told.version not in (None, claim):
        raise DataError("two versions say different things of a value")
    return _Told(told.place, claim)


def _is_plain(data: bytes, entry: DirectoryEntry, told: _Told) -> bool:
    """Whether the value is stored as it is, without metadata; DataError where it has another checksum."""
    assert told.version is not None
    _, _, codec, size, crc, _, _ = _VERSION.unpack(told.version)
    if codec == 0 and crc != entry.crc:
        raise DataError("another checksum")
    return codec == 0 and entry.stored_bytes == size + 4 and data[entry.byte : entry.byte + 4] == bytes(4)
