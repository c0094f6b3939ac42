"""Bodies that are in compacted data, found by their position in the log: for values whose records were dropped.

    pointer: LSN, position -> body index (a block, kept in memory for a while) -> pack or data file

Invariants
- A pointer costs two requests at most, and one when the block of the index is known: the root and the footers of the
  index are read once and kept, until another compaction is published.
- The manifest is asked when a pointer is not in the compaction that is known, or when a file of it is gone: another one
  may have been published since. What is in neither is not here.
- What is handed out has the checksum of its cell. Damage is named by file and byte.
- Who reads in order gets more of a pack than was asked for: bodies are in there as they are in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from tidelog.engine.block_cache import BlockCache
from tidelog.engine.body import CODEC_NONE, decode_body, decompressed
from tidelog.engine.cell import Cell
from tidelog.engine.cold_objects import Stretch
from tidelog.engine.compacted import CompactedData, read_compaction
from tidelog.engine.manifest import Manifest, StoredCompaction, read_manifest
from tidelog.engine.place import PackPlace, Place
from tidelog.errors import CorruptionError, DataError, NotFoundError
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.object_store import ObjectStore

_HINT = "Put a good copy of the file in its place; an engine with replicas reads theirs"
INDEX_CACHE_BYTES = 8 << 20
# A compaction takes longer than a read: that several are published during one of those, and collected, is rare.
_ATTEMPTS = 4

ReadManifest = Callable[[], Manifest | None]
OnRequest = Callable[[int], None]


class CompactedBody(NamedTuple):
    """A stored body, how it is compressed here, and others that came with it, by their positions in the log."""

    stored: bytes
    codec: int
    others: tuple[Stretch, ...] = ()


class _Opened(NamedTuple):
    compacted: StoredCompaction
    data: CompactedData


class CompactedBodies:
    """The bodies in the compacted data of one engine in one store. Threads may share it.

    `on_manifest` hears of every manifest that is read, `on_request` of every request and its bytes.
    """

    def __init__(
        self,
        objects: ObjectStore,
        keys: EngineKeys,
        manifest: ReadManifest,
        *,
        on_manifest: Callable[[Manifest], None] = lambda manifest: None,
        on_request: OnRequest = lambda size: None,
    ) -> None:
        self._source = _CountedSource(objects, on_request)
        self._keys = keys
        self._manifest = manifest
        self._on_manifest = on_manifest
        self._blocks = BlockCache(INDEX_CACHE_BYTES)
        self._opened: _Opened | None = None
        self._opening = Lock()
        self.history_start_seq = 0
        """Where history begins, by the newest manifest that was read."""

    def read(self, cell: Cell, window_bytes: int = 0) -> CompactedBody | None:
        """The body that a cell points to; None when no compaction has it. With a window, what is behind it too."""
        known, failure = self._opened, None
        for _ in range(_ATTEMPTS):
            try:
                found = None if known is None else self._read_from(known.data, cell, window_bytes)
                failure = None
            except NotFoundError as error:  # a file that a later compaction does without
                found, failure = None, error
            if found is not None:
                return found
            try:
                newest = self._refreshed()
            except NotFoundError as error:  # its root: another was published since the manifest was read
                known, failure = None, error
                continue
            if newest is None or newest is known:
                break
            known = newest
        if failure is not None:
            raise failure
        return None

    def _refreshed(self) -> _Opened | None:
        """The compaction that is published now."""
        manifest = self._manifest()
        if manifest is None:
            return None
        self._on_manifest(manifest)
        self.history_start_seq = max(self.history_start_seq, manifest.history_start_seq)
        compacted = manifest.compacted
        if compacted is None:
            return None
        with self._opening:
            known = self._opened
            if known is None or known.compacted.generation < compacted.generation:
                root = read_compaction(self._source, self._keys, compacted)
                data = CompactedData(self._source, self._keys, root, cache=self._blocks)
                known = self._opened = _Opened(compacted, data)
            return known

    def _read_from(self, data: CompactedData, cell: Cell, window_bytes: int) -> CompactedBody | None:
        if cell.lsn >= data.compaction.lsn:
            return None
        place = data.find_body(cell.position)
        if place is None:
            return None
        key, byte = data.locate(place)
        length = max(place.stored_bytes, _worth_fetching(data, place, window_bytes))
        fetched = self._source.read_range(key, byte, length)
        stored = bytes(fetched[: place.stored_bytes])
        try:
            if len(stored) != place.stored_bytes:
                raise DataError(f"{len(stored)} bytes where a body of {place.stored_bytes} must be")
            decode_body(stored, place.codec, cell.size, cell.crc, cell.lsn)
        except DataError as error:
            raise CorruptionError(error.message, path=key, byte=byte, operation="read", hint=_HINT) from error
        if (place.codec, place.stored_bytes) == (cell.codec, cell.stored_bytes):
            return CompactedBody(stored, place.codec, _others(data, cell, place, fetched))
        if cell.codec == CODEC_NONE:  # what is compressed here alone is as it was in the log when it is not
            return CompactedBody(decompressed(stored, place.codec, cell.size, cell.lsn), CODEC_NONE)
        return CompactedBody(stored, place.codec)


def _worth_fetching(data: CompactedData, place: Place, window_bytes: int) -> int:
    if not window_bytes or not isinstance(place, PackPlace):
        return 0
    return min(window_bytes, data.compaction.packs[place.pack].size - place.byte)


def _others(data: CompactedData, cell: Cell, place: Place, fetched: memoryview) -> tuple[Stretch, ...]:
    """The bodies behind one in the same pack, as far as they were fetched and the block of the index tells of them."""
    if not isinstance(place, PackPlace) or len(fetched) <= place.stored_bytes:
        return ()
    found = []
    for position, other in data.bodies_behind(cell.position):
        begin = other.byte - place.byte if isinstance(other, PackPlace) and other.pack == place.pack else -1
        if begin < 0 or begin + other.stored_bytes > len(fetched):
            break
        found.append(Stretch(position, bytes(fetched[begin : begin + other.stored_bytes])))
    return tuple(found)


class _CountedSource:
    """A store that counts what is asked of it."""

    def __init__(self, objects: ObjectStore, on_request: OnRequest) -> None:
        self._objects = objects
        self._on_request = on_request

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """As the store's own."""
        data = self._objects.read_range(key, start, length)
        self._on_request(len(data))
        return data


def manifest_in(objects: ObjectStore, keys: EngineKeys) -> Manifest | None:
    """What a store says about an engine; None where it says nothing. For stores that are asked rarely."""
    with open_metadata_store(BUCKET, objects, read_only=True) as metadata:
        found = read_manifest(metadata, keys)
    return None if found is None else found[0]
