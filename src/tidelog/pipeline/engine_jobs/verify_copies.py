"""What a worker does to compare a replica with the engine's store: the same files, byte for byte, read in both.

Invariants
- Both copies are read to their end; what is said about them is not believed. One range of each is in memory.
- A file that the engine's store has not is for others to tell: here it is compared what is in both.
- Fit for executors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from tidelog.engine.place import FilePlace, decode_place
from tidelog.engine.row_file import RowFile, RowPart
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.object_store import ObjectStore

_RANGE_BYTES = 4 << 20


class CopyWork(msgspec.Struct, frozen=True, kw_only=True):
    """Files that a replica refers to, by key; or, with `bodies`, the data files that a part of its body index names."""

    origin: EnginePlace
    copy: EnginePlace
    keys: tuple[str, ...] = ()
    bodies: RowPart | None = None


class CopyFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared: how many files, their bytes, and (key, what is wrong) where something is."""

    files: int = 0
    bytes: int = 0
    wrong: tuple[tuple[str, str], ...] = ()


def compare_copies(work: CopyWork) -> CopyFinding:
    """Reads the files of both stores."""
    origin, copy = work.origin.opened().objects, work.copy.opened().objects
    files, size, wrong = 0, 0, list[tuple[str, str]]()
    try:
        for key in _keys(work, copy):
            there = _digest(copy, key)
            reason = "it is missing in the replica" if there is None else _difference(there, _digest(origin, key))
            if reason is not None:
                wrong.append((key, reason))
            files += 1
            size += 0 if there is None else there[1]
    except (DataError, NotFoundError) as error:
        wrong.append(("" if work.bodies is None else work.bodies.key, error.message))
    return CopyFinding(files=files, bytes=size, wrong=tuple(wrong))


def _keys(work: CopyWork, copy: ObjectStore) -> Iterator[str]:
    yield from work.keys
    if work.bodies is not None:
        for _, value in RowFile(copy, work.bodies, kind="bodies").rows():
            place = decode_place(value)
            if isinstance(place, FilePlace):
                yield work.copy.keys.data_prefix + place.name


def _difference(copy: tuple[str, int], origin: tuple[str, int] | None) -> str | None:
    if origin is None or copy == origin:
        return None
    if copy[1] != origin[1]:
        return f"it has {copy[1]} bytes in the replica, and {origin[1]} in the engine's store"
    return "its bytes in the replica are others than in the engine's store"


def _digest(objects: ObjectStore, key: str) -> tuple[str, int] | None:
    """Checksum and size of a file; None when it is not there."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    try:
        while data := objects.read_range(key, size, _RANGE_BYTES):
            digest.update(data)
            size += len(data)
            if len(data) < _RANGE_BYTES:
                break
    except NotFoundError:
        return None
    return digest.hexdigest(), size
