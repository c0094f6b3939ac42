"""Rebuilds the metadata of an engine, if its SQLite file or etcd is lost, from the published copy in the bucket.

    copy of manifest, descriptors and start -> checked against the store -> metadata store, the owner's entry last

Invariants
- Nothing is written before all of the copy was read and understood.
- An engine is in the metadata store once it has the owner's entry, which is written last: a crash before that leaves
  none, and the next attempt starts over. An engine that is there is not replaced.
- The epoch of the new entry is higher than every epoch that the copy or a name in the store mentions, so that nobody
  who had the engine open publishes anything any more.
- The directory that was the end of the log stays so: one whose claim is the newest, or the one that the copy names.
- No object is changed or deleted. What the copy names and the store lacks is reported, and so are objects that were
  shipped after the copy was made: their entries come from the directory, or from the orchestrator.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, Owner
from tidelog.cold.ownership import LocalClaim, new_claim
from tidelog.cold.rebuild import NODE
from tidelog.engine.cold.manifest import Manifest, read_manifest
from tidelog.errors import DataError, InputError, NotFoundError
from tidelog.store.document import encode_json
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import Check, Entry, MetadataStore, Put
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.object_store import ObjectStore


class RebuiltManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the metadata store has now, and what of the store does not go with it."""

    epoch: int
    seq: int
    """The last entry that is in the store."""
    next_lsn: int
    updated_us: int
    """When the manifest was last changed that is back now."""
    objects: int
    bytes: int
    snapshots: int
    missing: tuple[str, ...] = ()
    """What is named and not there, or of another size."""
    unpublished: tuple[str, ...] = ()
    """Objects of the log behind the end of the copy."""


def rebuild_manifest(
    metadata: MetadataStore,
    keys: EngineKeys,
    objects: ObjectStore,
    *,
    clock: Clock,
    node: str = NODE,
    local: LocalClaim | None = None,
) -> RebuiltManifest:
    """Writes the published copy of an engine's metadata into an empty metadata store.

    `local` is the claim of a directory: it stays the end of the engine's log if nobody has claimed the engine since.
    """
    if metadata.get(keys.owner) is not None:
        raise InputError(
            f"the engine {keys.name!r} is in {metadata.url}",
            operation="rebuild",
            hint="Nothing has to be rebuilt. If it cannot be read any more, move that metadata store away first",
        )
    with BucketMetadataStore(objects, read_only=True) as copy:
        published = _Copy(copy, keys, objects)
        owner = published.next_owner(clock.now_us(), node, local)
        for entry in published.entries:
            if entry.key != keys.owner:
                known = metadata.get(entry.key)
                check = Check(entry.key, None if known is None else known.version)
                metadata.commit([check], [Put(entry.key, entry.value)])
        metadata.commit([Check(keys.owner, None)], [Put(keys.owner, encode_json(owner))])
        return published.report(owner.epoch)


class _Copy:
    """The copy of an engine's metadata, read whole."""

    def __init__(self, copy: BucketMetadataStore, keys: EngineKeys, objects: ObjectStore) -> None:
        catalog = Catalog(copy, keys)
        found = catalog.owner()
        if found is None or not isinstance(found[0].copy_of, str):
            raise _no_copy(keys, objects, is_catalog=found is not None)
        manifest = read_manifest(copy, keys)
        self._keys = keys
        self._owner = found[0]
        self._manifest = Manifest(epoch=self._owner.epoch) if manifest is None else manifest.value
        self._descriptors = list(catalog.walk(catalog.start_offset()))
        self._sizes = {info.key: info.size for info in objects.list(keys.objects_prefix)}
        self._snapshots = {info.key: info.size for info in objects.list(keys.checkpoints_prefix)}
        self.entries: list[Entry] = copy.range(keys.metadata_prefix)
        self._next_lsn = max((one.next_offset for one in self._descriptors), default=catalog.start_offset())
        if self._manifest.shipped_lsn > max(self._next_lsn, 1):
            raise DataError(
                f"the copy of the manifest in {objects.url} says that LSN {self._manifest.shipped_lsn - 1} is in the "
                f"store, and the copy of the catalog ends at {self._next_lsn - 1}",
                operation="rebuild",
                hint="Restore the engine from a replica",
            )

    def next_owner(self, now_us: int, node: str, local: LocalClaim | None) -> Owner:
        """An owner that holds nothing: the next node that opens the engine claims it from there."""
        epoch = max(self._epochs())
        is_newest = local is not None and local.epoch >= epoch
        claim = (local.claim or local.intended) if local is not None and is_newest else None
        return Owner(
            epoch=max(epoch, 0 if local is None else local.epoch) + 1,
            claim=new_claim(),
            incarnation=claim or self._owner.incarnation,
            node=node,
            claimed_us=now_us,
            log_id=self._owner.log_id,
        )

    def _epochs(self) -> Iterator[int]:
        yield from (self._owner.epoch, self._manifest.epoch)
        yield from (name.epoch for key in self._sizes if (name := self._keys.parse_object(key)) is not None)
        yield from (one.epoch for key in self._snapshots if (one := self._keys.parse_checkpoint(key)) is not None)

    def report(self, epoch: int) -> RebuiltManifest:
        named = {self._keys.object(one.name): one.size for one in self._descriptors}
        snapshots = {one.key: one.size for one in self._manifest.checkpoints}
        there = self._sizes | self._snapshots
        return RebuiltManifest(
            epoch=epoch,
            seq=self._manifest.high_water_mark,
            next_lsn=self._next_lsn,
            updated_us=self._manifest.updated_us,
            objects=len(named),
            bytes=sum(named.values()),
            snapshots=len(snapshots),
            missing=tuple(key for key, size in (named | snapshots).items() if there.get(key) != size),
            unpublished=tuple(key for key in self._sizes if self._is_behind(key)),
        )

    def _is_behind(self, key: str) -> bool:
        name = self._keys.parse_object(key)
        return name is not None and name.end >= self._next_lsn


def _no_copy(keys: EngineKeys, objects: ObjectStore, *, is_catalog: bool) -> NotFoundError:
    hint = (
        "Its metadata is the bucket itself (metadata='bucket'): nothing has to be rebuilt"
        if is_catalog
        else "Check the address of the store, the name of the engine and metadata_root; a replica has a copy too"
    )
    return NotFoundError(
        f"there is no published copy of the engine {keys.name!r} in {objects.url}", operation="rebuild", hint=hint
    )
