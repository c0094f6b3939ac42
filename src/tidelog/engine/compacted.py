"""What a compaction of an engine consists of, and finding versions and bodies in it.

    root, a document:   generation, seq, lsn, position, history_start_seq, large_bytes,
                        packs [...], versions [part ...], bodies [part ...], data_files, data_bytes, kept_from

    by key:        version index -> cell and place -> body          two requests
    by position:   body index -> place -> body                      two requests

Invariants
- All versions up to `seq` that the retention left are in the version index; every body that one of them points to is in
  the body index, once. `lsn` is the first record that is not in it, `position` that record's place in the log.
- There is no time in it: the same log gives the same bytes.
- Roots are read against what the manifest says of them, and checked as a whole. Files are named by their content, so
  whatever a root names does not change; it may be gone when a later compaction is published.
- Checksums of bodies are in cells: who reads a body checks it with the cell that led there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.engine.block_cache import BlockCache
from tidelog.engine.manifest import KeptFrom, StoredCompaction
from tidelog.engine.place import FilePlace, PackPlace, Place, body_key, decode_place, decode_version, position_of
from tidelog.engine.row_file import ByteSource, RowFile, RowKind, RowPart
from tidelog.engine.version_keys import SEQ_BYTES, at, seq_of
from tidelog.errors import CorruptionError, DataError
from tidelog.tier.compacted_names import CompactedId, FileKind, digest_of
from tidelog.tier.keys import EngineKeys

_KIND = "engine-compaction"
_VERSION = 1
MAX_ROOT_BYTES = 256 << 20
CACHE_BYTES = 8 << 20
_HINT = "Put a good copy of the file in its place, or restore from a replica"

Number = Annotated[int, msgspec.Meta(ge=0)]
Decoded = TypeVar("Decoded")


class PackInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A pack: how many bodies it has, and how many of them are still pointed to."""

    key: str
    size: Number
    bodies: Number
    live_bodies: Number
    live_bytes: Number
    first_position: Number
    last_position: Number


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """The root of a compaction. Bodies of `large_bytes` or more have a file each, unless its name were too long."""

    generation: Number
    seq: Number
    lsn: Number
    position: Number
    history_start_seq: Number = 0
    large_bytes: Number = 0
    packs: tuple[PackInfo, ...] = ()
    versions: tuple[RowPart, ...] = ()
    bodies: tuple[RowPart, ...] = ()
    data_files: Number = 0
    data_bytes: Number = 0
    kept_from: KeptFrom | None = None
    """What was left out of it by a rule; None where all versions are in it that were found."""

    def keys(self) -> list[str]:
        """The keys of all packs and index files (data files are in the body index)."""
        return [pack.key for pack in self.packs] + [part.key for part in (*self.versions, *self.bodies)]


class EncodedCompaction(NamedTuple):
    """A root in bytes; `digest` goes into its name."""

    data: bytes
    digest: str

    def stored(self, keys: EngineKeys, root: Compaction, created_us: int) -> StoredCompaction:
        """How the manifest names it, once it is there."""
        return StoredCompaction(
            generation=root.generation,
            key=keys.compacted(CompactedId("root", root.generation, self.digest)),
            size=len(self.data),
            digest=self.digest,
            seq=root.seq,
            lsn=root.lsn,
            position=root.position,
            created_us=created_us,
        )


def encode_compaction(compaction: Compaction) -> EncodedCompaction:
    """The bytes of a root."""
    told = {name: value for name, value in msgspec.structs.asdict(compaction).items() if value is not None}
    data = encode_document(_KIND, _VERSION, told)
    return EncodedCompaction(data, digest_of(data))


def decode_compaction(data: bytes, keys: EngineKeys) -> Compaction:
    """The root in these bytes, checked; DataError says what is wrong."""
    compaction = decode_document(_KIND, _VERSION, data, Compaction)
    _check(compaction, keys)
    return compaction


def read_compaction(objects: ByteSource, keys: EngineKeys, compacted: StoredCompaction) -> Compaction:
    """The root that the manifest names. One request."""
    try:
        if compacted.size > MAX_ROOT_BYTES:
            raise DataError(f"{compacted.size} bytes are too many")
        data = bytes(objects.read_range(compacted.key, 0, compacted.size + 1))
        if len(data) != compacted.size or digest_of(data) != compacted.digest:
            raise DataError("not the bytes that its name tells")
        root = decode_compaction(data, keys)
        said = (root.generation, root.seq, root.lsn, root.position)
        if said != (compacted.generation, compacted.seq, compacted.lsn, compacted.position):
            raise DataError("it says something else than the manifest")
    except DataError as error:
        raise CorruptionError(
            f"the root of a compaction cannot be used: {error.message}", path=compacted.key, byte=0, hint=_HINT
        ) from error
    return root


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DataError(otherwise)


def _check(root: Compaction, keys: EngineKeys) -> None:
    _require(root.generation >= 1 and root.lsn >= 1, "a compaction has a generation and an LSN from 1 on")
    _require(root.history_start_seq <= root.seq, "its history begins behind it")
    for pack in root.packs:
        _check_name(pack.key, "pack", root, keys)
        _require(0 < pack.live_bodies <= pack.bodies, f"{pack.key} has no body that is pointed to")
        _require(pack.first_position <= pack.last_position < max(1, root.position), f"{pack.key} is not of that log")
    _require(len({pack.key for pack in root.packs}) == len(root.packs), "a pack is in it twice")
    _check_parts(root.versions, "versions", root, keys)
    _check_parts(root.bodies, "bodies", root, keys)


def _check_name(key: str, kind: FileKind, root: Compaction, keys: EngineKeys) -> None:
    name = keys.parse_compacted(key)
    ours = name is not None and name.kind == kind and name.generation <= root.generation
    _require(ours, f"{key} is not a file of that compaction")


def _check_parts(parts: Sequence[RowPart], kind: RowKind, root: Compaction, keys: EngineKeys) -> None:
    for part in parts:
        _check_name(part.key, kind, root, keys)
        _require(part.rows > 0 and part.size > 0 and part.first_key <= part.last_key, f"{part.key} has no rows")
    in_order = all(a.last_key < b.first_key for a, b in pairwise(parts))
    _require(in_order, f"its {kind} are not in order of key")


class FoundVersion(NamedTuple):
    """A version in the index: its cell as the tree has it, and where its body is (None: in the cell, or no body)."""

    cell: bytes
    place: Place | None
    seq: int


class CompactedData:
    """The files of one compaction, opened. Threads may share it."""

    def __init__(
        self, objects: ByteSource, keys: EngineKeys, compaction: Compaction, *, cache: BlockCache | None = None
    ) -> None:
        self._objects = objects
        self._keys = keys
        self.compaction = compaction
        kept = BlockCache(CACHE_BYTES) if cache is None else cache
        self._versions = _Index(objects, compaction.versions, "versions", kept)
        self._bodies = _Index(objects, compaction.bodies, "bodies", kept)

    def find_body(self, position: int) -> Place | None:
        """Where the body is that is at a position of the log; None when it is not in this compaction."""
        found = self._bodies.at_or_after(body_key(position))
        if found is None or found.row[0] != body_key(position):
            return None
        return found.decoded(decode_place)

    def bodies_behind(self, position: int) -> Iterator[tuple[int, Place]]:
        """Those that come next in the log, as far as the same block of the index tells of them: no request more."""
        for row in self._bodies.in_block(body_key(position + 1)):
            yield position_of(row.row[0]), row.decoded(decode_place)

    def find_version(self, prefix: bytes, seq: int) -> FoundVersion | None:
        """The version of an object (`version_keys.object_prefix`) or a bucket that is to be seen at a seq."""
        found = self._versions.at_or_after(at(prefix, seq))
        if found is None or not found.row[0].startswith(prefix) or len(found.row[0]) != len(prefix) + SEQ_BYTES:
            return None
        return FoundVersion(*found.decoded(decode_version), seq_of(found.row[0]))

    def read_body(self, place: Place) -> bytes:
        """The stored body at a place: one request."""
        key, byte = self.locate(place)
        data = bytes(self._objects.read_range(key, byte, place.stored_bytes))
        if len(data) != place.stored_bytes:
            raise _damage(key, byte, f"{len(data)} bytes where a body of {place.stored_bytes} must be")
        return data

    def locate(self, place: Place) -> tuple[str, int]:
        """The object of a place, and the byte of it where the stored body begins."""
        if isinstance(place, FilePlace):
            key = self._keys.data_file_named(place.name)
            if key is None:
                raise DataError(f"a place in {place.name!r}, which is no file of ours")
            return key, 0
        return self._pack_of(place).key, place.byte

    def _pack_of(self, place: PackPlace) -> PackInfo:
        packs = self.compaction.packs
        if place.pack >= len(packs):
            raise DataError(f"a place in pack {place.pack} of {len(packs)}")
        return packs[place.pack]


class _FoundRow(NamedTuple):
    row: tuple[bytes, bytes]
    part: RowPart

    def decoded(self, decode: Callable[[bytes], Decoded]) -> Decoded:
        """What the value says; damage is that of its file."""
        try:
            return decode(self.row[1])
        except DataError as error:
            raise _damage(self.part.key, 0, error.message) from error


class _Index:
    """Row files one behind the other."""

    def __init__(self, objects: ByteSource, parts: Sequence[RowPart], kind: RowKind, cache: BlockCache) -> None:
        self._last_keys = [part.last_key for part in parts]
        self._files = [RowFile(objects, part, kind=kind, cache=cache) for part in parts]

    def at_or_after(self, key: bytes) -> _FoundRow | None:
        """The first row that is not before a key."""
        index = bisect_left(self._last_keys, key)
        if index == len(self._files):
            return None
        file = self._files[index]
        row = file.at_or_after(key)
        return None if row is None else _FoundRow(row, file.part)

    def in_block(self, key: bytes) -> Iterator[_FoundRow]:
        """The rows from a key on, as far as one block goes."""
        index = bisect_left(self._last_keys, key)
        if index < len(self._files):
            file = self._files[index]
            yield from (_FoundRow(row, file.part) for row in file.in_block(key))


def _damage(key: str, byte: int, message: str) -> CorruptionError:
    return CorruptionError(message, path=key, byte=byte, operation="read", hint=_HINT)
