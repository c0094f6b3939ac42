"""The output of an engine's compaction (the sorted index), and lookup of versions and values in it.

    root, a document:   generation, seq, lsn, position, history_start_seq, large_bytes,
                        blob_files [...], versions [part ...], values [part ...], data_files, data_bytes, kept_from

    by key:        version index -> cell and value pointer -> value     two requests
    by position:   value index -> value pointer -> value                two requests

`blob_files` lists the blob files, `values` the parts of the value index.

Invariants
- The version index holds all versions up to `seq` that retention kept; the value index holds every value that one of
  them points to, once. `lsn` is the first record that is not covered, `position` that record's position in the log.
- A root contains no timestamp: the same log produces the same bytes.
- Roots are verified against the manifest entry that names them, and as a whole. Files are content-addressed, so a file
  that a root names never changes; it may be deleted once a later compaction is published.
- Checksums of values are in cells: the reader of a value verifies it with the cell that led there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.cold.fetch import ByteSource, ColdCache
from tidelog.engine.cold.manifest import KeptFrom, StoredCompaction
from tidelog.engine.mvcc.cells import SEQ_BYTES, at, decode_cell, is_pointer, seq_of
from tidelog.engine.sst.blob_file import (
    BlobPointer,
    FilePointer,
    Place,
    decode_value_pointer,
    decode_version,
    position_of,
    value_key,
)
from tidelog.engine.sst.sstable import RowKind, RowPart, SSTable
from tidelog.errors import CorruptionError, DataError
from tidelog.store.keys import CompactedId, EngineKeys, FileKind, digest_of

_KIND = "engine-compaction"
_VERSION = 1
MAX_ROOT_BYTES = 256 << 20
CACHE_BYTES = 8 << 20
_HINT = "Put a good copy of the file in its place, or restore from a replica"

Number = Annotated[int, msgspec.Meta(ge=0)]
Decoded = TypeVar("Decoded")


class BlobFileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A blob file: how many values it has, and how many of them are still referenced."""

    key: str
    size: Number
    values: Number
    live_values: Number
    live_bytes: Number
    first_position: Number
    last_position: Number


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """The root of a compaction. Values of `large_bytes` or more get a file each, unless its name would be too long."""

    generation: Number
    seq: Number
    lsn: Number
    position: Number
    history_start_seq: Number = 0
    large_bytes: Number = 0
    blob_files: tuple[BlobFileInfo, ...] = ()
    versions: tuple[RowPart, ...] = ()
    values: tuple[RowPart, ...] = ()
    data_files: Number = 0
    data_bytes: Number = 0
    kept_from: KeptFrom | None = None
    """What was left out of it by a rule; None where all versions are in it that were found."""

    def keys(self) -> list[str]:
        """The keys of all blob files and index files (data files are in the value index)."""
        return [blob_file.key for blob_file in self.blob_files] + [part.key for part in (*self.versions, *self.values)]


class EncodedCompaction(NamedTuple):
    """An encoded root; `digest` goes into its name."""

    data: bytes
    digest: str

    def stored(self, keys: EngineKeys, root: Compaction, created_us: int) -> StoredCompaction:
        """Returns the manifest entry for this root once it is uploaded."""
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
    """Encodes a root."""
    told = {name: value for name, value in msgspec.structs.asdict(compaction).items() if value is not None}
    data = encode_document(_KIND, _VERSION, told)
    return EncodedCompaction(data, digest_of(data))


def decode_compaction(data: bytes, keys: EngineKeys) -> Compaction:
    """Decodes and checks a root; DataError says what is wrong."""
    compaction = decode_document(_KIND, _VERSION, data, Compaction)
    _check(compaction, keys)
    return compaction


def read_compaction(objects: ByteSource, keys: EngineKeys, compacted: StoredCompaction) -> Compaction:
    """Reads the root that the manifest names. One request."""
    try:
        if compacted.size > MAX_ROOT_BYTES:
            raise DataError(f"{compacted.size} bytes are too many")
        data = bytes(objects.read_range(compacted.key, 0, compacted.size + 1))
        if len(data) != compacted.size or digest_of(data) != compacted.digest:
            raise DataError("content does not match the digest in the name")
        root = decode_compaction(data, keys)
        said = (root.generation, root.seq, root.lsn, root.position)
        if said != (compacted.generation, compacted.seq, compacted.lsn, compacted.position):
            raise DataError("it does not match the manifest")
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
    _require(root.history_start_seq <= root.seq, "history_start_seq is after seq")
    for blob_file in root.blob_files:
        _check_name(blob_file.key, "blob", root, keys)
        _require(0 < blob_file.live_values <= blob_file.values, f"{blob_file.key} has no value that is pointed to")
        _require(
            blob_file.first_position <= blob_file.last_position < max(1, root.position),
            f"{blob_file.key} is not of that log",
        )
    _require(
        len({blob_file.key for blob_file in root.blob_files}) == len(root.blob_files), "a blob file is in it twice"
    )
    _check_parts(root.versions, "versions", root, keys)
    _check_parts(root.values, "values", root, keys)


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
    """A version in the index: its cell as in the tree, and its value pointer (None: the value is inline, or there is
    none).
    """

    cell: bytes
    place: Place | None
    seq: int


class SortedIndex:
    """The opened files of one compaction. Thread-safe."""

    def __init__(
        self, objects: ByteSource, keys: EngineKeys, compaction: Compaction, *, cache: ColdCache | None = None
    ) -> None:
        self._objects = objects
        self._keys = keys
        self.compaction = compaction
        kept = ColdCache(CACHE_BYTES) if cache is None else cache
        self._versions = _Index(objects, compaction.versions, "versions", kept)
        self._values = _Index(objects, compaction.values, "values", kept)

    def find_value(self, position: int) -> Place | None:
        """Returns the value pointer for a position of the log; None if this compaction does not hold it."""
        found = self._values.at_or_after(value_key(position))
        if found is None or found.row[0] != value_key(position):
            return None
        return found.decoded(decode_value_pointer)

    def values_after(self, position: int) -> Iterator[tuple[int, Place]]:
        """Yields the next value pointers in log order, up to the end of the same index block; no further request."""
        for row in self._values.in_block(value_key(position + 1)):
            yield position_of(row.row[0]), row.decoded(decode_value_pointer)

    def place_of(self, key: bytes, position: int) -> Place | None:
        """Returns the value pointer of the version with this key of the tree; None if it is not here, or its value was
        at another position when this compaction was made.
        """
        found = self._versions.at_or_after(key)
        if found is None or found.row[0] != key:
            return None
        cell, place = found.decoded(decode_version)
        return place if is_pointer(cell) and decode_cell(cell).position == position else None

    def warm(self, low: bytes, high: bytes, *, ahead: int = 0) -> None:
        """Fetches what `place_of` needs for keys between two others, several blocks with one request; and `ahead` times
        as much behind them, if it has to ask for some.
        """
        self._versions.warm(low, high, ahead=ahead)

    def version_blocks(self, low: bytes, high: bytes) -> Iterator[bytes]:
        """Yields the blocks of the version index that may have keys between two others, both included."""
        return self._versions.blocks(low, high)

    def find_version(self, prefix: bytes, seq: int) -> FoundVersion | None:
        """Returns the version of an object (`version_keys.object_prefix`) or a bucket that is visible at a seq."""
        found = self._versions.at_or_after(at(prefix, seq))
        if found is None or not found.row[0].startswith(prefix) or len(found.row[0]) != len(prefix) + SEQ_BYTES:
            return None
        return FoundVersion(*found.decoded(decode_version), seq_of(found.row[0]))

    def locate(self, place: Place) -> tuple[str, int]:
        """Returns the object that a value pointer names, and the byte of it where the stored value begins."""
        if isinstance(place, FilePointer):
            key = self._keys.data_file_named(place.name)
            if key is None:
                raise DataError(f"value pointer names an unknown data file {place.name!r}")
            return key, 0
        return self._blob_file_of(place).key, place.byte

    def _blob_file_of(self, place: BlobPointer) -> BlobFileInfo:
        blob_files = self.compaction.blob_files
        if place.blob_file >= len(blob_files):
            raise DataError(f"value pointer names blob file {place.blob_file} of {len(blob_files)}")
        return blob_files[place.blob_file]


class _FoundRow(NamedTuple):
    row: tuple[bytes, bytes]
    part: RowPart

    def decoded(self, decode: Callable[[bytes], Decoded]) -> Decoded:
        """Decodes an index value; corruption is reported against its file."""
        try:
            return decode(self.row[1])
        except DataError as error:
            raise _damage(self.part.key, 0, error.message) from error


class _Index:
    """A sequence of sorted files that forms one index."""

    def __init__(self, objects: ByteSource, parts: Sequence[RowPart], kind: RowKind, cache: ColdCache) -> None:
        self._last_keys = [part.last_key for part in parts]
        self._files = [SSTable(objects, part, kind=kind, cache=cache) for part in parts]

    def at_or_after(self, key: bytes) -> _FoundRow | None:
        index = bisect_left(self._last_keys, key)
        if index == len(self._files):
            return None
        file = self._files[index]
        row = file.at_or_after(key)
        return None if row is None else _FoundRow(row, file.part)

    def warm(self, low: bytes, high: bytes, *, ahead: int = 0) -> None:
        """Fetches the blocks between two keys, and others behind them."""
        for file in self._files[bisect_left(self._last_keys, low) : bisect_left(self._last_keys, high) + 1]:
            file.warm(low, high, ahead=ahead)

    def blocks(self, low: bytes, high: bytes) -> Iterator[bytes]:
        """Yields the blocks between two keys, as far as they are cached without a request."""
        for file in self._files[bisect_left(self._last_keys, low) : bisect_left(self._last_keys, high) + 1]:
            yield from file.raw_blocks(low, high)

    def in_block(self, key: bytes) -> Iterator[_FoundRow]:
        """Yields the rows at or after a key, up to the end of one block."""
        index = bisect_left(self._last_keys, key)
        if index < len(self._files):
            file = self._files[index]
            yield from (_FoundRow(row, file.part) for row in file.in_block(key))


def _damage(key: str, byte: int, message: str) -> CorruptionError:
    return CorruptionError(message, path=key, byte=byte, operation="read", hint=_HINT)
