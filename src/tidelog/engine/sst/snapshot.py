"""Snapshots in the store: every version up to a seq, with the tree's own cells. A restore starts from one.

    snapshot, a document:   seq, lsn, epoch, history_start_seq, parts [...], results

`parts` are sorted files (`sstable.py`) in key order, `lsn` is where replay of the log starts, `results` are those of
the last entries (`known_results`). A compaction and its snapshot share the same files, and the version index of a
compaction can serve as a snapshot by itself (`CompactionState`).

Invariants
- A snapshot is written and read as a stream: about one file is in memory, plus what is prefetched.
- A document contains no timestamp, and its name contains its digest: writing it again produces the same object.
- It takes effect when the manifest names it, after all of its files are in the store.
- The document is verified against the digest in its name and against the manifest, every file against its part: a
  snapshot that was read to its end is the one that was written. Errors name the corrupted byte.
- Rows up to a seq do not change once the seq is at or below the low-water mark, so a snapshot can be written while
  entries are applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.engine.cold.manifest import Manifest, StoredCheckpoint, StoredCompaction
from tidelog.engine.mvcc.known_results import KnownResults
from tidelog.engine.sst.blob_file import cell_of, encode_version
from tidelog.engine.sst.block import Row, rows_in
from tidelog.engine.sst.sorted_index import read_compaction
from tidelog.engine.sst.sstable import RowBlock, RowPart, encode_sstable, open_parts
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.store.keys import CheckpointId, EngineKeys, StatePartId, digest_of
from tidelog.store.object_store import ObjectStore

MAX_DOCUMENT_BYTES = 256 << 20
_KIND = "engine-snapshot"
_VERSION = 1
_DIGEST_BYTES = 32
_FILE_BYTES = 32 << 20
_HINT = "A restore begins with the snapshot before it; `engine.create_checkpoint()` writes a new one"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The document of a snapshot."""

    seq: int
    lsn: int
    epoch: int = 0
    history_start_seq: int = 0
    parts: tuple[RowPart, ...] = ()
    results: KnownResults | None = None

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def digest(self) -> str:
        """The digest of all rows: that of the digests of the files."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for part in self.parts:
            digest.update(part.digest.encode())
        return digest.hexdigest()


def write_row_parts(
    objects: ObjectStore, keys: EngineKeys, name: CheckpointId, rows: Iterable[Row], *, level: int
) -> list[RowPart]:
    """Writes the sorted files of a snapshot: tree keys and their cells, in key order."""
    parts: list[RowPart] = []
    for some in _files_of(rows):
        encoded = encode_sstable("versions", some, level)
        key = keys.state_part(StatePartId(name.seq, name.lsn, encoded.digest))
        objects.put(key, encoded.data)
        parts.append(encoded.part(key))
    return parts


def _files_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    gathered: list[Row] = []
    size = 0
    for key, cell in rows:
        gathered.append((key, encode_version(cell, None)))
        size += len(key) + len(cell)
        if size >= _FILE_BYTES:
            yield gathered
            gathered, size = [], 0
    if gathered:
        yield gathered


def write_parts_state(
    objects: ObjectStore,
    keys: EngineKeys,
    name: CheckpointId,
    parts: Sequence[RowPart],
    *,
    created_us: int,
    history_start_seq: int,
    results: KnownResults | None = None,
) -> StoredCheckpoint:
    """Writes the document of a snapshot whose files are in the store, given in key order.

    Returns the entry for the manifest; `created_us` is for that alone.
    """
    if any(before.last_key >= part.first_key for before, part in pairwise(parts)):
        raise InputError("the files of a snapshot are not in key order")
    snapshot = Snapshot(
        seq=name.seq,
        lsn=name.lsn,
        epoch=name.epoch,
        history_start_seq=history_start_seq,
        parts=tuple(parts),
        results=results,
    )
    data = encode_document(_KIND, _VERSION, snapshot)
    key = keys.checkpoint(name._replace(digest=digest_of(data)))
    objects.put(key, data)
    return _listed(key, snapshot, len(data), created_us)


def _listed(key: str, snapshot: Snapshot, size: int, created_us: int) -> StoredCheckpoint:
    return StoredCheckpoint(
        key=key,
        seq=snapshot.seq,
        lsn=snapshot.lsn,
        epoch=snapshot.epoch,
        rows=snapshot.rows,
        size=size,
        digest=snapshot.digest,
        created_us=created_us,
    )


class StoredState:
    """An opened snapshot in a store: its document has been read and checked, its rows have not."""

    def __init__(self, objects: ObjectStore, listed: StoredCheckpoint) -> None:
        self.key = listed.key
        self.footer = _read(objects, listed)
        self._objects = objects
        self._size = listed.size

    def parts(self) -> tuple[RowPart, ...]:
        """Its sorted files."""
        return self.footer.parts

    @property
    def stored_bytes(self) -> int:
        """Its size in the store, including its sorted files."""
        return self._size + sum(part.size for part in self.parts())

    def rows(self, fetchers: Executor | None = None) -> Iterator[Row]:
        """Yields all rows in order: tree keys and their cells. With `fetchers`, files are prefetched."""
        for block in self.blocks(fetchers):
            for key, value in rows_in(block.raw, block.place.rows, b""):
                yield key, cell_of(value)

    def blocks(self, fetchers: Executor | None = None) -> Iterator[RowBlock]:
        """Yields the rows as verified blocks, whose values are those of a version index."""
        for file in open_parts(self._objects, self.parts(), "versions", fetchers):
            yield from file.blocks()


class CompactionState(StoredState):
    """The version index of a compaction as the snapshot at its seq: the fallback of a restore that finds no other.

    Its rows are those of the tree, minus what retention removed.
    """

    def __init__(self, objects: ObjectStore, keys: EngineKeys, compacted: StoredCompaction) -> None:
        self.root = root = read_compaction(objects, keys, compacted)
        self.key = compacted.key
        self.footer = Snapshot(
            seq=root.seq, lsn=root.lsn, history_start_seq=root.history_start_seq, parts=root.versions
        )
        self._objects = objects
        self._size = compacted.size


class NamedState(NamedTuple):
    """A snapshot that a manifest lists, or its compaction, which is one too; `open` reads and checks the document."""

    key: str
    lsn: int
    is_listed: bool
    open: Callable[[], StoredState]


def named_states(objects: ObjectStore, keys: EngineKeys, manifest: Manifest) -> list[NamedState]:
    """All of them, oldest first. A listed snapshot comes after the compaction with the same rows: it can be pinned."""
    found = [NamedState(one.key, one.lsn, True, partial(StoredState, objects, one)) for one in manifest.checkpoints]
    if (compacted := manifest.compacted) is not None:
        opened = partial(CompactionState, objects, keys, compacted)
        found.append(NamedState(compacted.key, compacted.lsn, False, opened))
    return sorted(found, key=lambda one: (one.lsn, one.is_listed))


def _read(objects: ObjectStore, listed: StoredCheckpoint) -> Snapshot:
    """Reads the document that the manifest names. One request."""
    try:
        if listed.size > MAX_DOCUMENT_BYTES:
            raise DataError(f"snapshot too large: {listed.size} bytes")
        data = bytes(objects.read_range(listed.key, 0, listed.size + 1))
        if len(data) != listed.size:
            found = f"{len(data)} bytes" if len(data) < listed.size else "more bytes"
            raise DataError(f"the snapshot has {found}, and the manifest says {listed.size}")
        if digest_of(data) not in listed.key:
            raise DataError("the bytes do not match the digest in the name")
        snapshot = decode_document(_KIND, _VERSION, data, Snapshot)
        if _listed(listed.key, snapshot, listed.size, listed.created_us) != listed:
            raise DataError("the snapshot does not match the manifest")
        _check_parts(snapshot.parts)
    except DataError as error:
        raise CorruptionError(error.message, path=listed.key, byte=0, operation="read", hint=_HINT) from error
    return snapshot


def _check_parts(parts: Sequence[RowPart]) -> None:
    if any(part.rows <= 0 or part.size <= 0 or part.first_key > part.last_key for part in parts):
        raise DataError("the snapshot has a file without rows")
    if any(before.last_key >= part.first_key for before, part in pairwise(parts)):
        raise DataError("the files of the snapshot are not in key order")
