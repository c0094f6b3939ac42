"""An engine in a store of files, with everything that an engine can have there, and ways to damage it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tests.engine.compacting import compact_by_hand, manifest_of, rows_of
from tests.engine.stations import EngineNode
from tests.pipeline.engines.eventful import SETTINGS

from tidelog.cold.catalog import Catalog, Descriptor, encode_descriptor
from tidelog.engine.cold.manifest import Manifest, encode_manifest
from tidelog.engine.sst.blob_file import encode_version
from tidelog.engine.sst.block import Row
from tidelog.engine.sst.snapshot import write_parts_state
from tidelog.engine.sst.sorted_index import Compaction, encode_compaction, read_compaction
from tidelog.engine.sst.sstable import RowKind, RowPart, SSTable, encode_sstable
from tidelog.pipeline.address import EngineRoot, find_engine
from tidelog.store.keys import CheckpointId, CompactedId, EngineKeys, StatePartId
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

KEYS = EngineKeys()
Rows = Callable[[list[Row]], list[Row]]


class StoredEngine:
    """An engine that nobody has open: a log, a state of one object, a compaction with its state, and a tail."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.objects = open_store(store.as_uri(), StoreSettings())
        self.metadata = BucketMetadataStore(self.objects)
        self.catalog = Catalog(self.metadata, KEYS)

    @classmethod
    def make(cls, store: Path) -> StoredEngine:
        """A healthy one."""
        store.mkdir(parents=True)
        made = cls(store)
        with EngineNode(made.objects, name="damaged", **SETTINGS).open() as node:
            for _ in range(2):
                node.apply(40)
                node.ship_all()
                node.engine.create_checkpoint()
            node.apply(20)
            node.ship_all()
            compact_by_hand(made.objects)
            node.apply(20)
            node.ship_all()
        return made

    def copied(self, store: Path) -> StoredEngine:
        """The same in another place."""
        shutil.copytree(self.store, store)
        return StoredEngine(store)

    @property
    def root(self) -> EngineRoot:
        return find_engine(self.store.as_uri())

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.metadata)

    @property
    def compaction(self) -> Compaction:
        compacted = self.manifest.compacted
        assert compacted is not None
        return read_compaction(self.objects, KEYS, compacted)

    @property
    def descriptors(self) -> list[Descriptor]:
        return list(self.catalog.walk(1))

    # Files

    def path(self, key: str) -> Path:
        return self.store / key

    def log_object(self, number: int) -> Path:
        return self.path(KEYS.object(self.descriptors[number].name))

    def data_file(self) -> Path:
        return sorted(self.path(KEYS.data_prefix).rglob("*.dat"))[0]

    def flip(self, path: Path, byte: int = -30) -> None:
        """One bit is another."""
        data = bytearray(path.read_bytes())
        data[byte] ^= 0x10
        path.write_bytes(data)

    def cut(self, path: Path) -> None:
        """Its last bytes are gone."""
        path.write_bytes(path.read_bytes()[:-5])

    # Documents

    def rewrite_descriptor(self, number: int, **changes: object) -> None:
        descriptor = self.descriptors[number]
        value = encode_descriptor(msgspec.structs.replace(descriptor, **changes))
        self.metadata.put(KEYS.descriptor(descriptor.start_offset), value)

    def withdraw(self, number: int) -> None:
        """Takes a descriptor out of the catalog."""
        self.metadata.delete(KEYS.descriptor(self.descriptors[number].start_offset))

    def overlap(self) -> None:
        """One more object, which begins inside another."""
        first = self.descriptors[1]
        start = first.start_offset + 1
        name = f"data-{start}-{first.end_offset}-e{first.epoch}.tlog"
        self.path(KEYS.objects_prefix + name).write_bytes(self.log_object(1).read_bytes())
        changed = msgspec.structs.replace(
            first, start_offset=start, object_id=name, offset_index=((start, first.header_bytes),)
        )
        self.metadata.put(KEYS.descriptor(start), encode_descriptor(changed))

    def rewrite_manifest(self, **changes: object) -> None:
        changed = msgspec.structs.replace(self.manifest, **changes)
        self.metadata.put(KEYS.engine_manifest, encode_manifest(changed))

    # What somebody wrote who was wrong: all checksums are right

    def rewrite_index(self, versions: Rows | None = None, values: Rows | None = None) -> None:
        """Another compaction, with changed rows."""
        root = self.compaction
        changed = msgspec.structs.replace(
            root,
            versions=self._index(root, "versions", root.versions, versions),
            values=self._index(root, "values", root.values, values),
        )
        encoded = encode_compaction(changed)
        compacted = encoded.stored(KEYS, changed, 0)
        self.objects.put(compacted.key, encoded.data)
        self.rewrite_manifest(compacted=compacted)

    def _index(
        self, root: Compaction, kind: RowKind, parts: Sequence[RowPart], change: Rows | None
    ) -> tuple[RowPart, ...]:
        if change is None:
            return tuple(parts)
        encoded = encode_sstable(kind, change([row for part in parts for row in SSTable(self.objects, part).rows()]))
        key = KEYS.compacted(CompactedId(kind, root.generation, encoded.digest))
        self.objects.put(key, encoded.data)
        return (encoded.part(key),)

    def add_state(self, change: Rows) -> str:
        """A state at the high-water mark whose rows are others; its key."""
        manifest = self.manifest
        rows = [
            (key, encode_version(cell, None)) for key, cell in change(rows_of(self.objects, self.catalog, manifest))
        ]
        seq, lsn = manifest.high_water_mark, manifest.high_water_lsn + 1
        encoded = encode_sstable("versions", rows)
        key = KEYS.state_part(StatePartId(seq, lsn, encoded.digest))
        self.objects.put(key, encoded.data)
        name = CheckpointId(seq, lsn, manifest.epoch)
        state = write_parts_state(
            *(self.objects, KEYS, name, [encoded.part(key)]), created_us=0, history_start_seq=manifest.history_start_seq
        )
        self.rewrite_manifest(checkpoints=(*manifest.checkpoints, state))
        return state.key
