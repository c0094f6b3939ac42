"""Values in compacted data, found by their position in the log: for values whose records were dropped.

    pointer: LSN, position -> value index (a block, cached for a while) -> blob file or data file

Invariants
- A pointer costs at most two requests, and one if the index block is cached: the root and the footers of the index
  are read once and cached, until another compaction is published.
- The manifest is read if a pointer is not in the known compaction, or if a file of it is missing: another one may
  have been published since. A value that is in neither is not here.
- Every returned value has the checksum of its cell. Errors name the file and the byte.
- The values of a scan are found by the keys of their versions: neighbours share blocks of that index, and lie together
  in blob files.
- Sequential reads are prefetched from the blob file, as far as its values lie in the order of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

from tidelog.cold.fetch import ColdCache
from tidelog.engine.cold.manifest import Manifest, StoredCompaction
from tidelog.engine.mvcc.cells import Cell, at
from tidelog.engine.sst.blob_file import BlobPointer, Place
from tidelog.engine.sst.sorted_index import SortedIndex, read_compaction
from tidelog.engine.wal.scan_values import Places, ScannedRows
from tidelog.engine.wal.value import CODEC_NONE, decode_value, decompressed
from tidelog.errors import CorruptionError, DataError, NotFoundError
from tidelog.store.keys import EngineKeys
from tidelog.store.object_store import ObjectStore

_HINT = "Put a good copy of the file in its place; an engine with replicas reads theirs"
INDEX_CACHE_BYTES = 8 << 20
# Of a scan that goes on: the blocks of the index for several batches come with one request.
_BATCHES_AHEAD = 3
# A compaction takes longer than a read: it is rare that several are published and collected during one read.
_ATTEMPTS = 4

ReadManifest = Callable[[], Manifest | None]
OnRequest = Callable[[int], None]


class Stretch(NamedTuple):
    """Bytes of the log, and the position of the first of them."""

    position: int
    data: bytes | memoryview


class CompactedValue(NamedTuple):
    """A stored value, its codec, and other values that came with it, by their positions in the log."""

    stored: bytes
    codec: int
    others: tuple[Stretch, ...] = ()


class _Opened(NamedTuple):
    compacted: StoredCompaction
    data: SortedIndex


class CompactedValues:
    """The values in the compacted data of one engine in one store. Thread-safe.

    `on_manifest` is called with every manifest that is read, `on_request` with the bytes of every request.
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
        self._source = CountedSource(objects, on_request)
        self._keys = keys
        self._manifest = manifest
        self._on_manifest = on_manifest
        self._blocks = ColdCache(INDEX_CACHE_BYTES)
        self._opened: _Opened | None = None
        self._opening = Lock()
        self._has_looked = False
        self.history_start_seq = 0
        """Where history begins, by the newest manifest that was read."""

    def read(self, cell: Cell, window_bytes: int = 0) -> CompactedValue | None:
        """Returns the value that a cell points to; None if no compaction has it. With a window, also the values after
        it.
        """
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

    def warm(self, keys: Sequence[bytes], *, ahead: int = 0) -> bool:
        """Prepares `locate` for versions with these keys of the tree, and for those behind them, `ahead` times as many;
        returns whether there is a compaction that may have them.
        """
        if not self._has_looked:
            self._has_looked = True  # a later one becomes known with the first value whose record is gone
            self._refreshed()
        known = self._opened
        if known is not None:
            known.data.warm(min(keys), max(keys), ahead=ahead)
        return known is not None

    def place(self, scanned: ScannedRows, places: Places, first_unit: int, *, goes_on: bool) -> list[str]:
        """Finds the values of rows of a scan by the keys of their versions; returns the keys of the blob files, the
        units from the first on. `goes_on`: the rows behind them are wanted next.
        """
        rows = (scanned.rows[-1], scanned.rows[0]) if scanned.is_reverse else (scanned.rows[0], scanned.rows[-1])
        low, high = (at(scanned.prefix + row[0].encode() + b"\0", row[2]) for row in rows)
        ahead = _BATCHES_AHEAD if goes_on and not scanned.is_reverse else 0
        known = self._opened if self.warm((low, high), ahead=ahead) else None
        if known is None:
            return []
        places.in_index(first_unit, list(known.data.version_blocks(low, high)))
        return [blob_file.key for blob_file in known.data.compaction.blob_files]

    def locate(self, cell: Cell, key: bytes | None = None) -> tuple[str, int, int, int] | None:
        """Returns object, byte, stored bytes and codec of the value that a cell points to, as of the known compaction;
        None if that does not have it. With the key of the version in the tree it is looked up by that: the keys of a
        scan are neighbours in that index, their positions are not in the other.
        """
        known = self._opened or self._refreshed()
        if known is None or cell.lsn >= known.data.compaction.lsn:
            return None
        place = None if key is None else known.data.place_of(key, cell.position)
        place = place or known.data.find_value(cell.position)
        return None if place is None else (*known.data.locate(place), place.stored_bytes, place.codec)

    def _refreshed(self) -> _Opened | None:
        """Returns the compaction that is published now."""
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
                data = SortedIndex(self._source, self._keys, root, cache=self._blocks)
                known = self._opened = _Opened(compacted, data)
            return known

    def _read_from(self, data: SortedIndex, cell: Cell, window_bytes: int) -> CompactedValue | None:
        if cell.lsn >= data.compaction.lsn:
            return None
        place = data.find_value(cell.position)
        if place is None:
            return None
        key, byte = data.locate(place)
        length = max(place.stored_bytes, _worth_fetching(data, place, window_bytes))
        fetched = self._source.read_range(key, byte, length)
        stored = bytes(fetched[: place.stored_bytes])
        try:
            if len(stored) != place.stored_bytes:
                raise DataError(f"got {len(stored)} bytes of a value of {place.stored_bytes}")
            decode_value(stored, place.codec, cell.size, cell.crc, cell.lsn)
        except DataError as error:
            raise CorruptionError(error.message, path=key, byte=byte, operation="read", hint=_HINT) from error
        if (place.codec, place.stored_bytes) == (cell.codec, cell.stored_bytes):
            return CompactedValue(stored, place.codec, _others(data, cell, place, fetched))
        if cell.codec == CODEC_NONE:  # what is compressed here alone is as it was in the log when it is not
            return CompactedValue(decompressed(stored, place.codec, cell.size, cell.lsn), CODEC_NONE)
        return CompactedValue(stored, place.codec)


def _worth_fetching(data: SortedIndex, place: Place, window_bytes: int) -> int:
    if not window_bytes or not isinstance(place, BlobPointer):
        return 0
    return min(window_bytes, data.compaction.blob_files[place.blob_file].size - place.byte)


def _others(data: SortedIndex, cell: Cell, place: Place, fetched: memoryview) -> tuple[Stretch, ...]:
    """The values after one in the same blob file, as far as they were fetched and the index block lists them."""
    if not isinstance(place, BlobPointer) or len(fetched) <= place.stored_bytes:
        return ()
    found = []
    for position, other in data.values_after(cell.position):
        begin = other.byte - place.byte if isinstance(other, BlobPointer) and other.blob_file == place.blob_file else -1
        if begin < 0 or begin + other.stored_bytes > len(fetched):
            break
        found.append(Stretch(position, bytes(fetched[begin : begin + other.stored_bytes])))
    return tuple(found)


class CountedSource:
    """A store that counts requests."""

    def __init__(self, objects: ObjectStore, on_request: OnRequest) -> None:
        self._objects = objects
        self._on_request = on_request

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Like the store's own method."""
        data = self._objects.read_range(key, start, length)
        self._on_request(len(data))
        return data
