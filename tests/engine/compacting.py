"""A compaction made by hand, in plain Python and in memory: what the jobs do at scale, small enough to be believed.

The log of an engine is replayed as a restore does it; what comes out is written with the codecs of `tidelog.engine` and
published. Tests of whatever lives with compacted data stand on it, and jobs are compared with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import zstandard
from tests.engine.stations import KEYS
from tests.oracles.blob_file import pack_by_hand

from tidelog.clock import Clock, ManualClock
from tidelog.cold.catalog import Catalog
from tidelog.cold.reader import History
from tidelog.engine.cold.manifest import (
    Manifest,
    StoredCheckpoint,
    StoredCompaction,
    move_history_start,
    publish_compaction,
    publish_state,
    read_manifest,
)
from tidelog.engine.mvcc.cells import BUCKETS, Cell, decode_bucket, decode_cell, is_pointer, parse, seq_of
from tidelog.engine.mvcc.vacuum_rules import Rule, judged
from tidelog.engine.mvcc.versions import BucketVersion
from tidelog.engine.recovery.sorted_runs import Changes, Runs
from tidelog.engine.sst.blob_file import (
    BlobPointer,
    FilePointer,
    Place,
    encode_value_pointer,
    encode_version,
    position_of,
    value_key,
)
from tidelog.engine.sst.block import Row
from tidelog.engine.sst.snapshot import StoredState, write_parts_state
from tidelog.engine.sst.sorted_index import BlobFileInfo, Compaction, SortedIndex, encode_compaction, read_compaction
from tidelog.engine.sst.sstable import RowKind, RowPart, SSTable, encode_sstable
from tidelog.engine.wal.record_header import decode_header
from tidelog.engine.wal.replay import Replay, ShippedLog
from tidelog.engine.wal.value import CODEC_NONE, CODEC_ZSTD, decode_value
from tidelog.log.frame import HEADER_BYTES as FRAME_HEADER_BYTES
from tidelog.store.keys import CheckpointId, CompactedId, EngineKeys, StatePartId
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import DaemonPool
from tidelog.testing import FaultyFiles

LARGE_BYTES = 1500
"""Values from here on have a file of their own, unless a test says otherwise."""


class BuiltCompaction(NamedTuple):
    """A compaction whose files are in the store, and which nobody has published yet."""

    base_generation: int
    root: Compaction
    compacted: StoredCompaction
    state: StoredCheckpoint


def compact_by_hand(
    objects: ObjectStore,
    keys: EngineKeys = KEYS,
    *,
    clock: Clock | None = None,
    large_bytes: int = LARGE_BYTES,
    blob_file_bytes: int = 8 << 10,
    rows_a_file: int = 40,
    keep_from: int = 0,
    recompress: bool = False,
) -> Compaction:
    """Compacts everything up to the high-water mark, and publishes that; the root.

    With `keep_from` history begins there from now on, and versions that no later state needs are left out. With
    `recompress` small values are compressed in blob files that are not in the log.
    """
    built = build_by_hand(
        *(objects, keys),
        clock=clock,
        large_bytes=large_bytes,
        blob_file_bytes=blob_file_bytes,
        rows_a_file=rows_a_file,
        keep_from=keep_from,
        recompress=recompress,
    )
    publish_by_hand(objects, built, keys, clock=clock)
    return built.root


def build_by_hand(
    objects: ObjectStore,
    keys: EngineKeys = KEYS,
    *,
    clock: Clock | None = None,
    large_bytes: int = LARGE_BYTES,
    blob_file_bytes: int = 8 << 10,
    rows_a_file: int = 40,
    keep_from: int = 0,
    recompress: bool = False,
) -> BuiltCompaction:
    """The same as far as the files go: no compaction is published."""
    metadata = BucketMetadataStore(objects)
    if keep_from:
        move_history_start(metadata, keys, clock or ManualClock(), keep_from)
    manifest = manifest_of(metadata, keys)
    work = _Work(objects, Catalog(metadata, keys), keys, manifest, large_bytes, keep_from)
    work.recompress = recompress
    return work.build(blob_file_bytes, rows_a_file, (clock or ManualClock()).now_us())


def publish_by_hand(
    objects: ObjectStore, built: BuiltCompaction, keys: EngineKeys = KEYS, *, clock: Clock | None = None
) -> Manifest:
    """Makes it the one that counts."""
    return publish_compaction(
        *(BucketMetadataStore(objects), keys, clock or ManualClock()),
        base_generation=built.base_generation,
        compacted=built.compacted,
        state=built.state,
    )


def checkpoint_by_hand(
    objects: ObjectStore, keys: EngineKeys = KEYS, *, clock: Clock | None = None, rows_a_file: int = 40
) -> StoredCheckpoint:
    """A state of several files at the high-water mark, without a compaction, published."""
    metadata = BucketMetadataStore(objects)
    manifest, clock = manifest_of(metadata, keys), clock or ManualClock()
    rows = [(key, encode_version(cell, None)) for key, cell in rows_of(objects, Catalog(metadata, keys), manifest)]
    seq, lsn = manifest.high_water_mark, manifest.high_water_lsn + 1
    parts = _row_files(
        objects, "versions", rows, rows_a_file, lambda digest: keys.state_part(StatePartId(seq, lsn, digest))
    )
    state = _state(objects, keys, manifest, parts, clock.now_us())
    publish_state(metadata, keys, clock, state)
    return state


def manifest_of(metadata: BucketMetadataStore, keys: EngineKeys = KEYS) -> Manifest:
    """What is published."""
    found = read_manifest(metadata, keys)
    assert found is not None
    return found[0]


def data_of(objects: ObjectStore, keys: EngineKeys = KEYS) -> SortedIndex:
    """The compaction that is published, opened."""
    compacted = manifest_of(BucketMetadataStore(objects, read_only=True), keys).compacted
    assert compacted is not None
    return SortedIndex(objects, keys, read_compaction(objects, keys, compacted))


def rows_of(objects: ObjectStore, catalog: Catalog, manifest: Manifest) -> list[Row]:
    """All rows of the tree at the high-water mark: the newest state, and the log behind it."""
    runs = Runs(FaultyFiles(), Path("/rows"))
    runs._files.make_directories(Path("/rows"))
    first_lsn = 1
    if manifest.checkpoints:
        state = StoredState(objects, manifest.checkpoints[-1])
        runs.add(state.rows())
        first_lsn = state.footer.lsn
    changes, fetchers = Changes(runs, 64 << 20), DaemonPool(1, "by-hand")
    try:
        Replay(ShippedLog(catalog, objects, fetchers), changes, first_lsn).run(manifest)
    finally:
        fetchers.shutdown(wait=False)
    changes.flush()
    return list(runs.merged())


def without_forgotten(rows: list[Row], horizon: int, keep_versions: int = 1) -> list[Row]:
    """Rows without those that no state from a seq on needs."""
    created: dict[bytes, BucketVersion] = {}
    for key, value in rows:
        name = parse(key)
        if key.startswith(BUCKETS) and name.seq <= horizon and name.bucket.encode() not in created:
            cell = decode_bucket(value)
            created[name.bucket.encode()] = BucketVersion(name.seq, cell.order, is_deleted=cell.is_deleted)
    alive = {name: version for name, version in created.items() if not version.is_deleted}
    gone = set[bytes]()
    for verdict in judged(rows, Rule(horizon, keep_versions, alive), lambda _: None):
        gone.update(verdict.doomed())
    return [row for row in rows if row[0] not in gone]


def oldest_versions(rows: list[Row]) -> dict[int, bytes]:
    """The first version that points to each value, by the value's position: no two values have the same."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for key, value in rows:
        if is_pointer(value):
            cell = decode_cell(value)
            version = seq_of(key), cell.order, key
            found[cell.position] = min(found.get(cell.position, version), version)
    return {position: key for position, (_, _, key) in found.items()}


class _Value(NamedTuple):
    """A value as it is in the log, and who wrote it."""

    cell: Cell
    stored: bytes


class _Stored(NamedTuple):
    """A value as it is in a blob file."""

    stored: bytes
    codec: int


class _Work:
    """One compaction."""

    def __init__(
        self,
        objects: ObjectStore,
        catalog: Catalog,
        keys: EngineKeys,
        manifest: Manifest,
        large_bytes: int,
        keep_from: int,
    ) -> None:
        self._objects = objects
        self._catalog = catalog
        self._keys = keys
        self._manifest = manifest
        base = manifest.compacted
        self._base = None if base is None else SortedIndex(objects, keys, read_compaction(objects, keys, base))
        self._large_bytes = large_bytes if self._base is None else self._base.compaction.large_bytes
        self._generation = manifest.generation + 1
        self._keep_from = keep_from
        self._oldest: dict[int, bytes] = {}
        self.recompress = False

    def build(self, blob_file_bytes: int, rows_a_file: int, created_us: int) -> BuiltCompaction:
        manifest = self._manifest
        rows = self._rows()
        cells = {cell.position: cell for _, value in rows if is_pointer(value) for cell in [decode_cell(value)]}
        self._oldest = oldest_versions(rows)
        places, blob_files = self._placed(cells, blob_file_bytes)
        versions = [(key, encode_version(value, _place_of(value, places))) for key, value in rows]
        values = [(value_key(position), encode_value_pointer(place)) for position, place in sorted(places.items())]
        root = Compaction(
            generation=self._generation,
            seq=manifest.high_water_mark,
            lsn=manifest.high_water_lsn + 1,
            position=self._end_position(),
            history_start_seq=manifest.history_start_seq,
            large_bytes=self._large_bytes,
            blob_files=tuple(blob_files),
            versions=self._index("versions", versions, rows_a_file),
            values=self._index("values", values, rows_a_file),
            data_files=sum(isinstance(place, FilePointer) for place in places.values()),
            data_bytes=sum(place.stored_bytes for place in places.values() if isinstance(place, FilePointer)),
        )
        encoded = encode_compaction(root)
        compacted = encoded.stored(self._keys, root, created_us)
        self._objects.put(compacted.key, encoded.data)
        state = _state(self._objects, self._keys, manifest, root.versions, created_us)
        return BuiltCompaction(manifest.generation, root, compacted, state)

    def _rows(self) -> list[Row]:
        """What is kept. A node whose history begins earlier may have brought back what a compaction left out."""
        rows = rows_of(self._objects, self._catalog, self._manifest)
        if self._keep_from:
            rows = without_forgotten(rows, self._keep_from)
        return [row for row in rows if not is_pointer(row[1]) or self._has_value(decode_cell(row[1]))]

    def _has_value(self, cell: Cell) -> bool:
        base = self._base
        return base is None or cell.lsn >= base.compaction.lsn or base.find_value(cell.position) is not None

    def _end_position(self) -> int:
        """Where the first record behind the last entry begins."""
        last_lsn = self._manifest.high_water_lsn
        found = self._catalog.at(last_lsn)
        if found is None:  # all of the log was compacted and dropped
            return self._manifest.shipped_position
        behind = self._records(range(last_lsn + 1, found.next_offset))
        return found.start_position + found.raw_size - sum(len(payload) + FRAME_HEADER_BYTES for _, payload in behind)

    # Values

    def _placed(self, cells: dict[int, Cell], blob_file_bytes: int) -> tuple[dict[int, Place], list[BlobFileInfo]]:
        """Where each value is from now on, and the blob files that are left."""
        known = self._known(cells)
        fresh = {
            value.cell.position: value for value in self._values([cells[one] for one in cells if one not in known])
        }
        files = self._data_files(fresh)
        packed = {position: self._stored(fresh[position]) for position in sorted(fresh) if position not in files}
        blob_files, numbers = self._kept_blob_files(known)
        places: dict[int, Place] = {**files}
        for position, place in known.items():
            places[position] = (
                place._replace(blob_file=numbers[place.blob_file]) if isinstance(place, BlobPointer) else place
            )
        for some in _cut([(position, one.stored) for position, one in packed.items()], blob_file_bytes):
            encoded = pack_by_hand(some)
            key = self._keys.compacted(CompactedId("blob", self._generation, encoded.digest))
            self._objects.put(key, encoded.data)
            for position, byte, stored_bytes in encoded.places:
                places[position] = BlobPointer(packed[position].codec, len(blob_files), byte, stored_bytes)
            sizes = [(position, stored_bytes) for position, _, stored_bytes in encoded.places]
            blob_files.append(_blob_file_info(key, encoded.data, sizes))
        return places, blob_files

    def _stored(self, value: _Value) -> _Stored:
        """As it goes into a blob file."""
        if not self.recompress or value.cell.codec != CODEC_NONE:
            return _Stored(value.stored, value.cell.codec)
        return _Stored(zstandard.ZstdCompressor().compress(value.stored), CODEC_ZSTD)

    def _known(self, cells: dict[int, Cell]) -> dict[int, Place]:
        """Those that the compaction before has a place for."""
        if self._base is None:
            return {}
        below = (position for position in cells if position < self._base.compaction.position)
        return {position: place for position in below if (place := self._base.find_value(position)) is not None}

    def _kept_blob_files(self, known: dict[int, Place]) -> tuple[list[BlobFileInfo], dict[int, int]]:
        """The blob files of the compaction before that are still pointed into, and their new numbers."""
        used: dict[int, list[Place]] = {}
        for place in known.values():
            if isinstance(place, BlobPointer):
                used.setdefault(place.blob_file, []).append(place)
        blob_files, numbers = list[BlobFileInfo](), dict[int, int]()
        for number in sorted(used):
            assert self._base is not None
            numbers[number] = len(blob_files)
            live = {"live_values": len(used[number]), "live_bytes": sum(one.stored_bytes for one in used[number])}
            blob_files.append(msgspec.structs.replace(self._base.compaction.blob_files[number], **live))
        return blob_files, numbers

    def _data_files(self, fresh: dict[int, _Value]) -> dict[int, Place]:
        """Large ones become files, named by the oldest version that points to them."""
        found: dict[int, Place] = {}
        for position in sorted(fresh):
            cell, stored = fresh[position]
            name = parse(self._oldest[position])
            key = self._keys.data_file(name.bucket, name.key or "", name.seq)
            if cell.stored_bytes >= self._large_bytes and key is not None:
                self._objects.put(key, stored)
                found[position] = FilePointer(cell.codec, cell.stored_bytes, key.removeprefix(self._keys.data_prefix))
        return found

    def _values(self, cells: Sequence[Cell]) -> Iterator[_Value]:
        """From the log, each checked."""
        by_lsn = {cell.lsn: cell for cell in cells}
        for lsn, payload in self._records(by_lsn):
            cell, end = by_lsn[lsn], decode_header(payload, lsn).updates_offset
            stored = payload[end - cell.stored_bytes : end]  # in whatever kind of record: it may have been moved there
            decode_value(stored, cell.codec, cell.size, cell.crc, cell.lsn)
            yield _Value(cell, stored)

    def _records(self, lsns: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """Records of the log, with their LSNs."""
        if not lsns:
            return
        fetchers = DaemonPool(1, "by-hand")
        history = History(self._catalog, self._objects, fetchers)
        try:
            with contextlib.closing(history.read(min(lsns), max(lsns) + 1)) as reader:
                while (batch := reader.next_batch()) is not None:
                    assert batch.frames is not None
                    first_lsn = batch.frames.first_offset + batch.start
                    payloads = enumerate(batch.frames.payloads(batch.start, batch.stop), first_lsn)
                    yield from ((lsn, payload) for lsn, payload in payloads if lsn in lsns)
        finally:
            fetchers.shutdown(wait=False)

    # Files of rows

    def _index(self, kind: RowKind, rows: Sequence[Row], rows_a_file: int) -> tuple[RowPart, ...]:
        def key(digest: str) -> str:
            return self._keys.compacted(CompactedId(kind, self._generation, digest))

        return _row_files(self._objects, kind, rows, rows_a_file, key)


def _row_files(
    objects: ObjectStore, kind: RowKind, rows: Sequence[Row], rows_a_file: int, key: Callable[[str], str]
) -> tuple[RowPart, ...]:
    parts = []
    for begin in range(0, len(rows), rows_a_file):
        encoded = encode_sstable(kind, rows[begin : begin + rows_a_file])
        objects.put(key(encoded.digest), encoded.data)
        parts.append(encoded.part(key(encoded.digest)))
    return tuple(parts)


def _state(
    objects: ObjectStore, keys: EngineKeys, manifest: Manifest, parts: Sequence[RowPart], created_us: int
) -> StoredCheckpoint:
    name = CheckpointId(manifest.high_water_mark, manifest.high_water_lsn + 1, manifest.epoch)
    return write_parts_state(
        *(objects, keys, name, parts), created_us=created_us, history_start_seq=manifest.history_start_seq
    )


def _cut(values: Sequence[tuple[int, bytes]], blob_file_bytes: int) -> Iterator[list[tuple[int, bytes]]]:
    some: list[tuple[int, bytes]] = []
    for value in values:
        some.append(value)
        if sum(len(stored) for _, stored in some) >= blob_file_bytes:
            yield some
            some = []
    if some:
        yield some


def _blob_file_info(key: str, data: bytes, values: Sequence[tuple[int, int]]) -> BlobFileInfo:
    return BlobFileInfo(
        key=key,
        size=len(data),
        values=len(values),
        live_values=len(values),
        live_bytes=sum(stored_bytes for _, stored_bytes in values),
        first_position=values[0][0],
        last_position=values[-1][0],
    )


def _place_of(value: bytes, places: dict[int, Place]) -> Place | None:
    return places[decode_cell(value).position] if is_pointer(value) else None


def value_rows(objects: ObjectStore, root: Compaction) -> dict[int, bytes]:
    """The value index: positions and places."""
    return {position_of(key): value for part in root.values for key, value in SSTable(objects, part).rows()}


def value_at(objects: ObjectStore, data: SortedIndex, place: Place) -> bytes:
    """The stored value at a value pointer."""
    key, byte = data.locate(place)
    return bytes(objects.read_range(key, byte, place.stored_bytes))
