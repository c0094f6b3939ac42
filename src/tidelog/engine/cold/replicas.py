"""What a replica of an engine has besides its log: snapshots, the files of a compaction, and the manifest.

    files of compaction and snapshots, value files -> snapshots -> manifest -> deletion of what it no longer names

Invariants
- The manifest is written last, and references only what is there.
- Every file is verified while it is copied: content-addressed files against their name, data files against the checksum
  of a version that points to them. Corruption is not replica.
- Nothing is copied twice, and a compaction is walked once: its files do not change.
- Values whose records the engine's store has dropped are in compacted data: that is copied before the start of the log
  moves. A manifest that knows less of it than the start does, or than the replica, is refused.
- Deleted is what the replica's manifest does not reference and never will (`gc.py`). A restore from a replica
  pins a snapshot there, as anywhere: while there is a pin, nothing is deleted there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import msgspec
import zstandard

from tidelog.cold.catalog import StartMark
from tidelog.cold.replicas import Goal, Origin, Replica, damage, ranges
from tidelog.engine.cold.gc import DataFile, data_files, is_superseded
from tidelog.engine.cold.manifest import Manifest, Pin, PublishedManifest, read_manifest
from tidelog.engine.cold.value_store import copy_values, delete_values
from tidelog.engine.entry import MAX_METADATA_BYTES
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.sorted_index import Compaction, read_compaction
from tidelog.engine.wal.value import CODEC_NONE
from tidelog.errors import NotFoundError, RetryError
from tidelog.log.frame import crc32
from tidelog.store.keys import DIGEST_BYTES, EngineKeys
from tidelog.store.object_store import ObjectStore

Feed = Callable[[memoryview], None]


class ReplicaFiles:
    """Brings the files of one replica up to date. Used by one thread at a time.

    `on_copied` is called with the bytes of every copied file.
    """

    def __init__(self, objects: ObjectStore, on_copied: Callable[[int], None]) -> None:
        self._objects = objects
        self._on_copied = on_copied
        self._root_key: str | None = None
        self._of_compaction: frozenset[str] = frozenset()
        self._of_states: dict[str, tuple[str, ...]] = {}
        self._cleaned: tuple[object, ...] = ()

    def copy(self, manifest: Manifest, source: ObjectStore, keys: EngineKeys) -> None:
        """Copies everything that a manifest references, except its log and the snapshots themselves."""
        try:
            self._copy_compaction(manifest, source, keys)
            self._copy_parts(manifest, source, keys)
        except NotFoundError as error:
            raise RetryError(
                f"a file was deleted before it was copied: {error.message}",
                operation="replicate",
                hint="There is a newer compaction by now; if there is none, put the file back",
            ) from error

    def delete_superseded(self, manifest: Manifest, keys: EngineKeys) -> None:
        """Deletes what the replica's new manifest no longer references."""
        root_key = None if manifest.compacted is None else manifest.compacted.key
        leads_to = (root_key, *(state.key for state in manifest.checkpoints))
        is_known = root_key == self._root_key and all(state.key in self._of_states for state in manifest.checkpoints)
        if leads_to == self._cleaned or not is_known:
            return
        referenced = {*self._of_compaction, *(key for parts in self._of_states.values() for key in parts)}
        for prefix in (keys.index_prefix, keys.blobs_prefix, keys.data_prefix, keys.checkpoints_prefix):
            listed = [info.key for info in self._objects.list(prefix)]
            self._objects.delete([key for key in listed if is_superseded(key, manifest, referenced, keys)])
        self._cleaned = leads_to

    # The compaction

    def _copy_compaction(self, manifest: Manifest, source: ObjectStore, keys: EngineKeys) -> None:
        compacted = manifest.compacted
        if compacted is None or compacted.key == self._root_key:
            return
        root = read_compaction(source, keys, compacted)
        sizes = {blob_file.key: blob_file.size for blob_file in root.blob_files}
        sizes |= {part.key: part.size for part in (*root.versions, *root.values)}
        sizes[compacted.key] = compacted.size
        there = self._there(keys.index_prefix, keys.blobs_prefix)
        for key, size in sizes.items():
            if there.get(key) != size:
                self.copy_named(source, keys, key, size)
        data = self._copy_data(root, source, keys)
        self._root_key, self._of_compaction = compacted.key, frozenset((*sizes, *data))

    def _copy_data(self, root: Compaction, source: ObjectStore, keys: EngineKeys) -> set[str]:
        if not root.data_files:
            return set()
        there, seen = self._there(keys.data_prefix), set[str]()
        for file in data_files(source, keys, root):
            if file.key not in seen and there.get(file.key) != file.place.stored_bytes:
                self._copy_value(source, file)
            seen.add(file.key)
        return seen

    def _there(self, *prefixes: str) -> dict[str, int]:
        return {info.key: info.size for prefix in prefixes for info in self._objects.list(prefix)}

    # Snapshots

    def _copy_parts(self, manifest: Manifest, source: ObjectStore, keys: EngineKeys) -> None:
        copied: dict[str, tuple[str, ...]] = {}
        for state in manifest.checkpoints:
            if state.key in self._of_states:
                copied[state.key] = self._of_states[state.key]
                continue
            parts = StoredState(source, state).parts()
            for part in parts:
                if not self._has(part.key, part.size):
                    self.copy_named(source, keys, part.key, part.size)
            copied[state.key] = tuple(part.key for part in parts)
        self._of_states = copied

    def _has(self, key: str, size: int) -> bool:
        try:
            return self._objects.head(key).size == size
        except NotFoundError:
            return False

    # One file

    def copy_named(self, source: ObjectStore, keys: EngineKeys, key: str, size: int) -> None:
        """Copies a file whose name contains the digest of its bytes."""
        name = keys.parse_compacted(key) or keys.parse_state_part(key) or keys.parse_checkpoint(key)
        if name is None:
            raise damage(key, 0, "not a name of a tidelog file")
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._copy(source, key, size, digest.update, lambda: digest.hexdigest() == name.digest)

    def _copy_value(self, source: ObjectStore, file: DataFile) -> None:
        checksum = _ValueChecksum(file.place.codec, file.key, file.cell.size)
        self._copy(source, file.key, file.place.stored_bytes, checksum.feed, lambda: checksum.crc == file.cell.crc)

    def _copy(self, source: ObjectStore, key: str, size: int, feed: Feed, is_good: Callable[[], bool]) -> None:
        with self._objects.open_writer(key) as writer:
            for data in ranges(source, key, size):
                feed(data)
                writer.write(data)
            if not is_good():
                raise damage(key, 0, "checksum does not match")
        self._on_copied(size)


class _ValueChecksum:
    """The checksum of a value before compression, computed from its stored bytes piece by piece.

    The size that a compressed value states is checked against its cell before anything is decompressed.
    """

    def __init__(self, codec: int, key: str, size: int) -> None:
        self._key = key
        self._most_bytes = 4 + MAX_METADATA_BYTES + size
        self._decompressor = None if codec == CODEC_NONE else zstandard.ZstdDecompressor().decompressobj()
        self._has_begun = False
        self.crc = 0

    def feed(self, data: memoryview) -> None:
        """Adds the next bytes."""
        try:
            value = data if self._decompressor is None else self._decompress(bytes(data))
        except zstandard.ZstdError as error:
            raise damage(self._key, 0, f"cannot decompress value: {error}") from error
        self.crc = crc32(value, self.crc)

    def _decompress(self, data: bytes) -> bytes:
        assert self._decompressor is not None
        if not self._has_begun:
            self._has_begun = True
            content_bytes = zstandard.frame_content_size(data)
            if not 4 <= content_bytes <= self._most_bytes:
                raise damage(self._key, 0, f"compressed value has an impossible size of {content_bytes} bytes")
        return self._decompressor.decompress(data)


def refuse_outdated(manifest: Manifest, start_lsn: int, generations: Iterable[int] = ()) -> None:
    """Raises RetryError if the engine's store has dropped what this manifest still references: there is a newer one.

    The same if compactions of these generations were published and the manifest lacks one: it does not say where the
    values of dropped records are.
    """
    is_compacted_since = any(generation > manifest.generation for generation in generations)
    if is_compacted_since or any(state.lsn < start_lsn for state in manifest.checkpoints):
        raise RetryError("the engine's store was cleaned up meanwhile", operation="replicate", hint="Try again")


def goal_of(manifest: Manifest) -> Goal:
    """An engine as a manifest has it."""
    return Goal(manifest.shipped_lsn, manifest.shipped_position, manifest.high_water_mark, manifest)


class EngineDocuments:
    """The manifest of one replica, with what it names. Used by one thread at a time."""

    def __init__(self, keys: EngineKeys) -> None:
        self._keys = keys
        self._pins: tuple[Pin, ...] = ()
        self._files: ReplicaFiles | None = None
        self._states_left: set[str] | None = None

    def _files_of(self, replica: Replica) -> ReplicaFiles:
        if self._files is None:
            self._files = ReplicaFiles(replica.objects, replica.count_copied)
        return self._files

    def is_needed(self, goal: Goal, replica: Replica, origin: Origin, start: StartMark) -> bool:
        found = read_manifest(replica.catalog.metadata, self._keys)
        refuse_outdated(goal.manifest, start.start_offset, self._generations(found, replica, origin, start))
        self._pins = () if found is None else found[0].pins
        return found is None or not _says_the_same(found[0], goal.manifest)

    def _generations(
        self, found: tuple[Manifest, str] | None, replica: Replica, origin: Origin, start: StartMark
    ) -> tuple[int, ...]:
        """Generations of compactions that a manifest must know of to be copied: the replica's, and if the log begins
        later than before also that of the engine's store: it is what allowed that."""
        generations = () if found is None else (found[0].generation,)
        if start.start_offset == replica.dropped_below:
            return generations
        published = read_manifest(origin.catalog.metadata, self._keys)
        return generations if published is None else (*generations, published[0].generation)

    def copy(self, goal: Goal, replica: Replica, origin: Origin) -> None:
        manifest, files = goal.manifest, self._files_of(replica)
        files.copy(manifest, origin.objects, self._keys)
        copy_values(origin.objects, replica.objects, self._keys, manifest.high_water_mark, replica.count_copied)
        for state in manifest.checkpoints:
            if not replica.has(state.key, state.size):
                files.copy_named(origin.objects, self._keys, state.key, state.size)
        self._pins = PublishedManifest(replica.catalog.metadata, self._keys).copy(manifest).pins

    def may_delete(self, now_us: int) -> bool:
        return all(pin.until_us <= now_us for pin in self._pins)

    def let_go(self, goal: Goal, replica: Replica, origin: Origin) -> None:
        manifest, files = goal.manifest, self._files_of(replica)
        self._delete_old_states(manifest, replica.objects)
        files.copy(manifest, origin.objects, self._keys)  # they are there; which ones is to be known
        files.delete_superseded(manifest, self._keys)
        delete_values(origin.objects, replica.objects, self._keys, manifest.high_water_mark)

    def _delete_old_states(self, manifest: Manifest, objects: ObjectStore) -> None:
        """Deletes snapshots that the manifest no longer names; newer ones belong to somebody else."""
        kept = {state.key for state in manifest.checkpoints}
        if kept == self._states_left:
            return
        listed = [info.key for info in objects.list(self._keys.checkpoints_prefix)]
        names = [(key, self._keys.parse_checkpoint(key)) for key in listed if key not in kept]
        newest = manifest.checkpoints[-1].seq if manifest.checkpoints else 0
        objects.delete([key for key, name in names if name is not None and name.seq < newest])
        self._states_left = kept


def _says_the_same(there: Manifest, wanted: Manifest) -> bool:
    """Compares manifests, ignoring pins in the engine's store and the time of writing."""
    as_wanted = msgspec.structs.replace(
        there, pins=wanted.pins, revision=wanted.revision, updated_us=wanted.updated_us, leaving=wanted.leaving
    )
    return as_wanted == wanted
