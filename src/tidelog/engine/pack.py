"""Packs: many small bodies in one object, in order of their position in the log.

    "TPCK" u32 version | stored body ... stored body | directory | count u32, crc32 of the directory u32, "TPCKEND1"

    directory: for each body    position u64, stored bytes u32, crc32 of the stored bytes u32          little-endian

Invariants
- The same bodies give the same bytes. Bodies follow each other without a gap, so the directory tells where each is, and
  every byte of the file is covered by a checksum.
- Reading one body needs no directory: its place is in the index, its checksum in its cell. The directory is for whoever
  checks the file, or makes a new index from it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from tidelog.engine.body import MAX_BODY_BYTES
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.log.frame import crc32
from tidelog.tier.compacted_names import digest_of
from tidelog.tier.object_store import ObjectStore

MAGIC = b"TPCK"
END_MAGIC = b"TPCKEND1"
VERSION = 1
_TAIL_GUESS_BYTES = 64 << 10

_HEAD = struct.Struct("<4sI")
_ENTRY = struct.Struct("<QII")
_TAIL = struct.Struct("<II8s")
HEADER_BYTES = _HEAD.size
_HINT = "Put a good copy of the pack in its place; a replica has one"


class PackedBody(NamedTuple):
    """Where in a pack a body is."""

    position: int
    byte: int
    stored_bytes: int


class DirectoryEntry(NamedTuple):
    """The same as the pack's own directory tells it, with the checksum of the stored bytes."""

    position: int
    byte: int
    stored_bytes: int
    crc: int


class EncodedPack(NamedTuple):
    """A pack in bytes, and where the bodies came to be in it. `digest` goes into its name."""

    data: bytes
    digest: str
    places: list[PackedBody]


def encode_pack(bodies: Iterable[tuple[int, bytes]]) -> EncodedPack:
    """(position, stored body), in order of position, as a pack."""
    written, directory, places = [_HEAD.pack(MAGIC, VERSION)], list[bytes](), list[PackedBody]()
    byte, last_position = _HEAD.size, -1
    for position, stored in bodies:
        if position <= last_position or not stored:
            raise InputError("bodies of a pack are not in order of position, or one is empty")
        last_position = position
        written.append(stored)
        directory.append(_ENTRY.pack(position, len(stored), crc32(stored)))
        places.append(PackedBody(position, byte, len(stored)))
        byte += len(stored)
    if not places:
        raise InputError("a pack has at least one body")
    listed = b"".join(directory)
    data = b"".join((*written, listed, _TAIL.pack(len(places), crc32(listed), END_MAGIC)))
    return EncodedPack(data, digest_of(data), places)


def read_directory(objects: ObjectStore, key: str, size: int) -> list[DirectoryEntry]:
    """What is in a pack of that many bytes, by its own directory: one request, or two for a large one."""
    guess = min(size, _TAIL_GUESS_BYTES)
    tail = objects.read_range(key, size - guess, guess + 1)
    try:
        if len(tail) != guess:
            raise DataError(f"a pack that has not the {size} bytes that it must have")
        begin = _directory_begin(tail, size)
        at = begin - (size - guess)
        listed = tail[at:] if at >= 0 else objects.read_range(key, begin, size - begin)
        return _directory(listed, begin)
    except DataError as error:
        raise _damage(key, max(0, size - _TAIL.size), error.message) from error


def _directory_begin(tail: memoryview, size: int) -> int:
    if size < _HEAD.size + _TAIL.size:
        raise DataError(f"a pack of {size} bytes is none")
    count, _, magic = _TAIL.unpack_from(tail, len(tail) - _TAIL.size)
    begin = size - _TAIL.size - int(count) * _ENTRY.size
    if magic != END_MAGIC or not count or begin < _HEAD.size:
        raise DataError("not the end of a pack")
    return begin


def _directory(listed: memoryview, end: int) -> list[DirectoryEntry]:
    """From the bytes of the directory and what is behind it; `end` is where the bodies end."""
    entries = listed[: -_TAIL.size]
    count, crc, _ = _TAIL.unpack_from(listed, len(entries))
    if len(entries) != count * _ENTRY.size or crc32(entries) != crc:
        raise DataError("a directory with a checksum that does not match")
    found, byte, last_position = list[DirectoryEntry](), _HEAD.size, -1
    for position, stored_bytes, body_crc in _ENTRY.iter_unpack(entries):
        if position <= last_position or not 0 < stored_bytes <= MAX_BODY_BYTES:
            raise DataError("a directory whose bodies are not in order")
        found.append(DirectoryEntry(position, byte, stored_bytes, body_crc))
        byte, last_position = byte + stored_bytes, position
    if byte != end:
        raise DataError("a directory whose bodies do not add up")
    return found


def check_pack(data: bytes, key: str = "pack") -> list[DirectoryEntry]:
    """Goes through a whole pack in memory: every byte of it. CorruptionError names what is wrong."""
    view = memoryview(data)
    if len(view) < _HEAD.size or view[: _HEAD.size] != _HEAD.pack(MAGIC, VERSION):
        raise _damage(key, 0, f"not the beginning of a pack of version {VERSION}")
    try:
        begin = _directory_begin(view, len(view))
        found = _directory(view[begin:], begin)
    except DataError as error:
        raise _damage(key, max(0, len(view) - _TAIL.size), error.message) from error
    for entry in found:
        if crc32(view[entry.byte : entry.byte + entry.stored_bytes]) != entry.crc:
            raise _damage(key, entry.byte, f"the body of position {entry.position} has another checksum")
    return found


def _damage(key: str, byte: int, message: str) -> CorruptionError:
    return CorruptionError(message, path=key, byte=byte, operation="read", hint=_HINT)
