"""Files of states and of a compaction in a replica: copied before its manifest names them, deleted when it stops that.

    root -> packs, files of the indexes -> data files (as the version index names them) -> parts of states

Invariants
- Whatever is copied is checked on the way: files that are named by their content against their name, data files against
  the checksum of a version that points to them. Damage is not copied.
- Nothing is copied twice, and a compaction is walked through once: its files do not change.
- What goes is what the manifest of the replica does not lead to and never will (`references.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import zstandard

from tidelog.engine.body import CODEC_NONE
from tidelog.engine.compacted import Compaction, read_compaction
from tidelog.engine.entry import MAX_METADATA_BYTES
from tidelog.engine.manifest import Manifest
from tidelog.engine.references import DataFile, data_files, is_superseded, parts_of
from tidelog.errors import CorruptionError, NotFoundError, RetryError
from tidelog.log.frame import crc32
from tidelog.tier.compacted_names import DIGEST_BYTES
from tidelog.tier.keys import EngineKeys
from tidelog.tier.object_store import ObjectStore

_RANGE_BYTES = 4 << 20
DAMAGE_HINT = "Put a good copy of the object in its place; what is behind it is not replicated before"
Feed = Callable[[memoryview], None]


class ReplicaFiles:
    """Brings the files of one replica up to date. One thread at a time uses it.

    `on_copied` hears of the bytes of every file that was copied.
    """

    def __init__(self, objects: ObjectStore, on_copied: Callable[[int], None]) -> None:
        self._objects = objects
        self._on_copied = on_copied
        self._root_key: str | None = None
        self._of_compaction: frozenset[str] = frozenset()
        self._of_states: dict[str, tuple[str, ...]] = {}
        self._cleaned: tuple[object, ...] = ()

    def copy(self, manifest: Manifest, source: ObjectStore, keys: EngineKeys) -> None:
        """Everything that a manifest leads to besides its log and its states themselves."""
        try:
            self._copy_compaction(manifest, source, keys)
            self._copy_parts(manifest, source, keys)
        except NotFoundError as error:
            raise RetryError(
                f"a file went while it was to be copied: {error.message}",
                operation="replicate",
                hint="There is a newer compaction by now; if there is none, put the file back",
            ) from error

    def delete_superseded(self, manifest: Manifest, keys: EngineKeys) -> None:
        """What the manifest, which is the replica's own by now, does not lead to any more."""
        root_key = None if manifest.compacted is None else manifest.compacted.key
        leads_to = (root_key, *(state.key for state in manifest.checkpoints))
        is_known = root_key == self._root_key and all(state.key in self._of_states for state in manifest.checkpoints)
        if leads_to == self._cleaned or not is_known:
            return
        referenced = {*self._of_compaction, *(key for parts in self._of_states.values() for key in parts)}
        for prefix in (keys.index_prefix, keys.packs_prefix, keys.data_prefix, keys.checkpoints_prefix):
            listed = [info.key for info in self._objects.list(prefix)]
            self._objects.delete([key for key in listed if is_superseded(key, manifest, referenced, keys)])
        self._cleaned = leads_to

    # The compaction

    def _copy_compaction(self, manifest: Manifest, source: ObjectStore, keys: EngineKeys) -> None:
        compacted = manifest.compacted
        if compacted is None or compacted.key == self._root_key:
            return
        root = read_compaction(source, keys, compacted)
        sizes = {pack.key: pack.size for pack in root.packs}
        sizes |= {part.key: part.size for part in (*root.versions, *root.bodies)}
        sizes[compacted.key] = compacted.size
        there = self._there(keys.index_prefix, keys.packs_prefix)
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
                self._copy_body(source, file)
            seen.add(file.key)
        return seen

    def _there(self, *prefixes: str) -> dict[str, int]:
        return {info.key: info.size for prefix in prefixes for info in self._objects.list(prefix)}

    # States

    def _copy_parts(self, manifest: Manifest, source: ObjectStore, keys: EngineKeys) -> None:
        copied: dict[str, tuple[str, ...]] = {}
        for state in manifest.checkpoints:
            if state.key in self._of_states:
                copied[state.key] = self._of_states[state.key]
                continue
            parts = parts_of(source, keys, state)
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
        """Copies a file whose name has the digest of its bytes."""
        name = keys.parse_compacted(key) or keys.parse_state_part(key) or keys.parse_checkpoint(key)
        if name is None:
            raise damage(key, 0, "a name that is none of ours")
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._copy(source, key, size, digest.update, lambda: digest.hexdigest() == name.digest)

    def _copy_body(self, source: ObjectStore, file: DataFile) -> None:
        checksum = _BodyChecksum(file.place.codec, file.key, file.cell.size)
        self._copy(source, file.key, file.place.stored_bytes, checksum.feed, lambda: checksum.crc == file.cell.crc)

    def _copy(self, source: ObjectStore, key: str, size: int, feed: Feed, is_good: Callable[[], bool]) -> None:
        with self._objects.open_writer(key) as writer:
            for data in ranges(source, key, size):
                feed(data)
                writer.write(data)
            if not is_good():
                raise damage(key, 0, "a checksum that does not match")
        self._on_copied(size)


class _BodyChecksum:
    """The checksum of a body before it was compressed, from what is stored of it, a piece at a time.

    What a compressed one says about its size is compared with that of its data before anything is decompressed.
    """

    def __init__(self, codec: int, key: str, size: int) -> None:
        self._key = key
        self._most_bytes = 4 + MAX_METADATA_BYTES + size
        self._decompressor = None if codec == CODEC_NONE else zstandard.ZstdDecompressor().decompressobj()
        self._has_begun = False
        self.crc = 0

    def feed(self, data: memoryview) -> None:
        """The next bytes."""
        try:
            body = data if self._decompressor is None else self._decompress(bytes(data))
        except zstandard.ZstdError as error:
            raise damage(self._key, 0, f"a compressed body that cannot be read: {error}") from error
        self.crc = crc32(body, self.crc)

    def _decompress(self, data: bytes) -> bytes:
        assert self._decompressor is not None
        if not self._has_begun:
            self._has_begun = True
            content_bytes = zstandard.frame_content_size(data)
            if not 4 <= content_bytes <= self._most_bytes:
                raise damage(self._key, 0, f"a compressed body that says that it has {content_bytes} bytes")
        return self._decompressor.decompress(data)


def ranges(source: ObjectStore, key: str, size: int) -> Iterator[memoryview]:
    """An object of that many bytes, a piece at a time."""
    for start in range(0, size, _RANGE_BYTES):
        length = min(_RANGE_BYTES, size - start)
        data = source.read_range(key, start, length)
        if len(data) != length:
            raise damage(key, start + len(data), f"an object that must have {size} bytes ends")
        yield data


def damage(key: str, byte: int, message: str) -> CorruptionError:
    """What is told of an object that is not to be copied."""
    return CorruptionError(message, path=key, byte=byte, operation="replicate", hint=DAMAGE_HINT)
