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

from tidelog.clock import Clock, ManualClock
from tidelog.engine.body import CODEC_NONE, CODEC_ZSTD, decode_body
from tidelog.engine.buckets import BucketVersion
from tidelog.engine.cell import Cell, decode_bucket, decode_cell
from tidelog.engine.cell_blocks import Row
from tidelog.engine.compacted import CompactedData, Compaction, PackInfo, encode_compaction, read_compaction
from tidelog.engine.manifest import Manifest, StoredCheckpoint, StoredCompaction, read_manifest
from tidelog.engine.operation_record import OperationRecord, decode_operation
from tidelog.engine.pack import encode_pack
from tidelog.engine.place import FilePlace, PackPlace, Place, body_key, encode_place, encode_version, position_of
from tidelog.engine.publishing import move_history_start, publish_compaction, publish_state
from tidelog.engine.restore_replay import Replay
from tidelog.engine.restore_runs import Changes, Runs
from tidelog.engine.row_file import RowFile, RowKind, RowPart, encode_row_file
from tidelog.engine.store_checkpoint import StoredState, write_parts_state
from tidelog.engine.vacuum_rules import Rule, is_pointer, judged
from tidelog.engine.version_keys import BUCKETS, parse, seq_of
from tidelog.log.frame import HEADER_BYTES as FRAME_HEADER_BYTES
from tidelog.testing import FaultyFiles
from tidelog.tier.catalog import Catalog
from tidelog.tier.compacted_names import CompactedId, StatePartId
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.history import History
from tidelog.tier.keys import CheckpointId, EngineKeys
from tidelog.tier.metadata.bucket import BucketMetadataStore
from tidelog.tier.object_store import ObjectStore

LARGE_BYTES = 1500
"""Bodies from here on have a file of their own, unless a test says otherwise."""


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
    pack_bytes: int = 8 << 10,
    rows_a_file: int = 40,
    keep_from: int = 0,
    recompress: bool = False,
) -> Compaction:
    """Compacts everything up to the high-water mark, and publishes that; the root.

    With `keep_from` history begins there from now on, and versions that no later state needs are left out. With
    `recompress` small bodies are compressed in packs that are not in the log.
    """
    built = build_by_hand(
        *(objects, keys),
        clock=clock,
        large_bytes=large_bytes,
        pack_bytes=pack_bytes,
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
    pack_bytes: int = 8 << 10,
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
    return work.build(pack_bytes, rows_a_file, (clock or ManualClock()).now_us())


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


def data_of(objects: ObjectStore, keys: EngineKeys = KEYS) -> CompactedData:
    """The compaction that is published, opened."""
    compacted = manifest_of(BucketMetadataStore(objects, read_only=True), keys).compacted
    assert compacted is not None
    return CompactedData(objects, keys, read_compaction(objects, keys, compacted))


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
        Replay(catalog, objects, fetchers, changes, first_lsn).run(manifest, lambda _: None)
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
    """The first version that points to each body, by the body's position: no two bodies have the same."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for key, value in rows:
        if is_pointer(value):
            cell = decode_cell(value)
            version = seq_of(key), cell.order, key
            found[cell.position] = min(found.get(cell.position, version), version)
    return {position: key for position, (_, _, key) in found.items()}


class _Body(NamedTuple):
    """A body as it is in the log, and who wrote it."""

    cell: Cell
    record: OperationRecord


class _Stored(NamedTuple):
    """A body as it is in a pack."""

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
        self._base = None if base is None else CompactedData(objects, keys, read_compaction(objects, keys, base))
        self._large_bytes = large_bytes if self._base is None else self._base.compaction.large_bytes
        self._generation = manifest.generation + 1
        self._keep_from = keep_from
        self._oldest: dict[int, bytes] = {}
        self.recompress = False

    def build(self, pack_bytes: int, rows_a_file: int, created_us: int) -> BuiltCompaction:
        manifest = self._manifest
        rows = self._rows()
        cells = {cell.position: cell for _, value in rows if is_pointer(value) for cell in [decode_cell(value)]}
        self._oldest = oldest_versions(rows)
        places, packs = self._placed(cells, pack_bytes)
        versions = [(key, encode_version(value, _place_of(value, places))) for key, value in rows]
        bodies = [(body_key(position), encode_place(place)) for position, place in sorted(places.items())]
        root = Compaction(
            generation=self._generation,
            seq=manifest.high_water_mark,
            lsn=manifest.high_water_lsn + 1,
            position=self._end_position(),
            history_start_seq=manifest.history_start_seq,
            large_bytes=self._large_bytes,
            packs=tuple(packs),
            versions=self._index("versions", versions, rows_a_file),
            bodies=self._index("bodies", bodies, rows_a_file),
            data_files=sum(isinstance(place, FilePlace) for place in places.values()),
            data_bytes=sum(place.stored_bytes for place in places.values() if isinstance(place, FilePlace)),
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
        return [row for row in rows if not is_pointer(row[1]) or self._has_body(decode_cell(row[1]))]

    def _has_body(self, cell: Cell) -> bool:
        base = self._base
        return base is None or cell.lsn >= base.compaction.lsn or base.find_body(cell.position) is not None

    def _end_position(self) -> int:
        """Where the first record behind the last entry begins."""
        last_lsn = self._manifest.high_water_lsn
        found = self._catalog.at(last_lsn)
        assert found is not None
        behind = self._records(range(last_lsn + 1, found.next_offset))
        return found.start_position + found.raw_size - sum(len(payload) + FRAME_HEADER_BYTES for _, payload in behind)

    # Bodies

    def _placed(self, cells: dict[int, Cell], pack_bytes: int) -> tuple[dict[int, Place], list[PackInfo]]:
        """Where each body is from now on, and the packs that are left."""
        known = self._known(cells)
        fresh = {body.cell.position: body for body in self._bodies([cells[one] for one in cells if one not in known])}
        files = self._data_files(fresh)
        packed = {position: self._stored(fresh[position]) for position in sorted(fresh) if position not in files}
        packs, numbers = self._kept_packs(known)
        places: dict[int, Place] = {**files}
        for position, place in known.items():
            places[position] = place._replace(pack=numbers[place.pack]) if isinstance(place, PackPlace) else place
        for some in _cut([(position, one.stored) for position, one in packed.items()], pack_bytes):
            encoded = encode_pack(some)
            key = self._keys.compacted(CompactedId("pack", self._generation, encoded.digest))
            self._objects.put(key, encoded.data)
            for one in encoded.places:
                places[one.position] = PackPlace(packed[one.position].codec, len(packs), one.byte, one.stored_bytes)
            packs.append(_pack_info(key, encoded.data, [(one.position, one.stored_bytes) for one in encoded.places]))
        return places, packs

    def _stored(self, body: _Body) -> _Stored:
        """As it goes into a pack."""
        if not self.recompress or body.cell.codec != CODEC_NONE:
            return _Stored(body.record.stored, body.cell.codec)
        return _Stored(zstandard.ZstdCompressor().compress(body.record.stored), CODEC_ZSTD)

    def _known(self, cells: dict[int, Cell]) -> dict[int, Place]:
        """Those that the compaction before has a place for."""
        if self._base is None:
            return {}
        below = (position for position in cells if position < self._base.compaction.position)
        return {position: place for position in below if (place := self._base.find_body(position)) is not None}

    def _kept_packs(self, known: dict[int, Place]) -> tuple[list[PackInfo], dict[int, int]]:
        """The packs of the compaction before that are still pointed into, and their new numbers."""
        used: dict[int, list[Place]] = {}
        for place in known.values():
            if isinstance(place, PackPlace):
                used.setdefault(place.pack, []).append(place)
        packs, numbers = list[PackInfo](), dict[int, int]()
        for number in sorted(used):
            assert self._base is not None
            numbers[number] = len(packs)
            live = {"live_bodies": len(used[number]), "live_bytes": sum(one.stored_bytes for one in used[number])}
            packs.append(msgspec.structs.replace(self._base.compaction.packs[number], **live))
        return packs, numbers

    def _data_files(self, fresh: dict[int, _Body]) -> dict[int, Place]:
        """Large ones become files, named by the oldest version that points to them."""
        found: dict[int, Place] = {}
        for position in sorted(fresh):
            cell, record = fresh[position]
            name = parse(self._oldest[position])
            key = self._keys.data_file(name.bucket, name.key or "", name.seq)
            if cell.stored_bytes >= self._large_bytes and key is not None:
                self._objects.put(key, record.stored)
                found[position] = FilePlace(cell.codec, cell.stored_bytes, key.removeprefix(self._keys.data_prefix))
        return found

    def _bodies(self, cells: Sequence[Cell]) -> Iterator[_Body]:
        """From the log, each checked."""
        by_lsn = {cell.lsn: cell for cell in cells}
        for lsn, payload in self._records(by_lsn):
            cell, record = by_lsn[lsn], decode_operation(payload, lsn)
            decode_body(record.stored, cell.codec, cell.size, cell.crc, cell.lsn)
            yield _Body(cell, record)

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
        encoded = encode_row_file(kind, rows[begin : begin + rows_a_file])
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


def _cut(bodies: Sequence[tuple[int, bytes]], pack_bytes: int) -> Iterator[list[tuple[int, bytes]]]:
    some: list[tuple[int, bytes]] = []
    for body in bodies:
        some.append(body)
        if sum(len(stored) for _, stored in some) >= pack_bytes:
            yield some
            some = []
    if some:
        yield some


def _pack_info(key: str, data: bytes, bodies: Sequence[tuple[int, int]]) -> PackInfo:
    return PackInfo(
        key=key,
        size=len(data),
        bodies=len(bodies),
        live_bodies=len(bodies),
        live_bytes=sum(stored_bytes for _, stored_bytes in bodies),
        first_position=bodies[0][0],
        last_position=bodies[-1][0],
    )


def _place_of(value: bytes, places: dict[int, Place]) -> Place | None:
    return places[decode_cell(value).position] if is_pointer(value) else None


def body_rows(objects: ObjectStore, root: Compaction) -> dict[int, bytes]:
    """The body index: positions and places."""
    return {position_of(key): value for part in root.bodies for key, value in RowFile(objects, part).rows()}
