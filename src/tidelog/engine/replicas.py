"""Replicas: further stores that get a copy of everything an engine ships, so that any of them alone can restore it.

    owner -> objects, each with its descriptor and `cur` -> files of compaction and states -> states -> manifest
          -> start, and what is below it goes

Invariants
- A replica is an engine's store in its own right: the same keys, the same documents. Its manifest is written last, and
  tells only of what is there.
- Objects are copied in order, and their checksum is compared with the descriptor on the way: damage is not copied.
- Only what the engine's own catalog has is copied, so there is one history. A replica that somebody restored from and
  went on with has a later epoch: it is left alone, and told as fenced.
- What a compaction put together in the engine's store is put together in a replica too (`compaction_replicas.py`).
- Values whose records the engine's store has dropped are in compacted data: that is copied before the start of the log
  moves (`replica_files.py`). A manifest that knows less of it than the start does, or than the replica, is refused.
- Whoever restores from a replica pins a state there, as anywhere: while there is a pin, nothing is deleted there.
- A replica that was away catches up from where it is. One that is away holds up nothing, unless the mode is "sync":
  then the high-water mark waits for all.
"""

from __future__ import annotations

import contextlib
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.engine.compaction_replicas import follow_compaction
from tidelog.engine.garbage_replicas import drop_below_start, refuse_outdated
from tidelog.engine.manifest import Manifest, Pin, StoredCheckpoint, encode_manifest, read_manifest
from tidelog.engine.replica_files import ReplicaFiles, damage, ranges
from tidelog.errors import DataError, FencedError, NotFoundError, TidelogError
from tidelog.log.frame import crc32
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor, encode_descriptor
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.metadata.store import Check, MetadataStore, Put
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.owner import StartMark
from tidelog.tier.replacement import read_state
from tidelog.tier.upload import checksum_text


class ReplicaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a replica. Lag is what the engine's store has and this one has not."""

    url: str
    high_water_mark: int
    lag_bytes: int
    objects_copied: int
    bytes_copied: int
    errors_total: int
    errors_in_a_row: int
    last_error: str | None
    last_success_us: int | None


class Origin(msgspec.Struct, frozen=True):
    """What replicas are copies of."""

    objects: ObjectStore
    catalog: Catalog
    keys: EngineKeys
    epoch: int


class Replica:
    """One further store. One thread at a time brings it up to date; any may look."""

    def __init__(self, objects: ObjectStore, clock: Clock) -> None:
        self.objects = objects
        self.manifest: Manifest | None = None
        """What it has, as far as is known."""
        self._clock = clock
        self._metadata: MetadataStore | None = None
        self._bringing = Lock()
        self._objects_copied = 0
        self._bytes_copied = 0
        self._errors = 0
        self._errors_in_a_row = 0
        self._last_error: str | None = None
        self._last_success_us: int | None = None
        self._followed: tuple[int, str] | None = None
        self._dropped_below = -1
        self._states_left: set[str] | None = None
        self._files = ReplicaFiles(objects, self._count_copied)

    def bring_up_to(self, manifest: Manifest, origin: Origin) -> None:
        """Copies what it has not, and then its manifest."""
        with self._bringing:
            try:
                self._bring(manifest, origin)
            except TidelogError as error:
                self._errors += 1
                self._errors_in_a_row += 1
                self._last_error = str(error)
                raise
            self._errors_in_a_row, self._last_error = 0, None
            self._last_success_us = self._clock.now_us()

    def _bring(self, manifest: Manifest, origin: Origin) -> None:
        metadata, keys = self._connected(), origin.keys
        found = read_manifest(metadata, keys)
        self._refuse_later_owner(Catalog(metadata, keys), origin.epoch)
        start = self._start_of(origin)
        refuse_outdated(manifest, start.start_offset, _generations(found, origin, start, self._dropped_below))
        self._follow_compaction(metadata, origin)
        pins = () if found is None else found[0].pins
        if found is None or not _says_the_same(found[0], manifest):
            pins = self._copy_all(metadata, manifest, origin, start)
        if all(pin.until_us <= self._clock.now_us() for pin in pins):
            self._let_go(metadata, manifest, origin, start)
        self.manifest = manifest

    def _let_go(self, metadata: MetadataStore, manifest: Manifest, origin: Origin, start: StartMark) -> None:
        """What the manifest no longer leads to."""
        self._delete_old_states(manifest, origin.keys)
        self._follow_start(metadata, origin, start)
        self._files.copy(manifest, origin.objects, origin.keys)  # they are there; which ones is to be known
        self._files.delete_superseded(manifest, origin.keys)

    def _start_of(self, origin: Origin) -> StartMark:
        """As it is now: what is copied later must not begin later than what the manifest is compared with."""
        found = origin.catalog.start_mark()
        return StartMark(start_offset=0, epoch=0, moved_us=0) if found is None else found[0]

    def _copy_all(
        self, metadata: MetadataStore, manifest: Manifest, origin: Origin, start: StartMark
    ) -> tuple[Pin, ...]:
        """Everything, and the manifest last; who reads states here."""
        keys = origin.keys
        if start.epoch and metadata.get(keys.start) is None:
            self._put(metadata, keys.start, documents.encode(start))
        self._copy_entry(metadata, origin.catalog.metadata, keys.owner)
        self._copy_log(metadata, manifest.shipped_lsn, origin, start.start_offset)
        self._files.copy(manifest, origin.objects, keys)
        self._copy_states(manifest, origin)
        there = read_manifest(metadata, keys)
        pins = () if there is None else there[0].pins
        written = encode_manifest(msgspec.structs.replace(manifest, pins=pins, leaving=()))
        check = Check(keys.engine_manifest, None if there is None else there[1])
        metadata.commit([check], [Put(keys.engine_manifest, written)])
        return pins

    def _follow_start(self, metadata: MetadataStore, origin: Origin, start: StartMark) -> None:
        """What the engine's store has dropped goes here too, once the manifest speaks of it no more."""
        if start.epoch and start.start_offset != self._dropped_below:
            self._put(metadata, origin.keys.start, documents.encode(start))
            drop_below_start(Catalog(metadata, origin.keys), self.objects)
            self._dropped_below = start.start_offset

    def _connected(self) -> MetadataStore:
        if self._metadata is None:
            self._metadata = open_metadata_store(BUCKET, self.objects)
        return self._metadata

    def _refuse_later_owner(self, catalog: Catalog, epoch: int) -> None:
        found = catalog.owner()
        if found is not None and found[0].epoch > epoch:
            raise FencedError(
                f"{found[0].node} went on with the replica {self.objects.url}, with epoch {found[0].epoch}",
                operation="replicate",
                hint="It is the store of another engine now; take it out of the replicas of this one",
            )

    # The log

    def _follow_compaction(self, metadata: MetadataStore, origin: Origin) -> None:
        """Before anything else is copied: what comes next begins where an object of the engine's store ends by now."""
        copied = Catalog(metadata, origin.keys)
        while (seen := _compaction_of(origin)) != self._followed:
            try:
                follow_compaction(origin.catalog, copied, self.objects, lambda one: self._copy_object(origin, one))
            except NotFoundError:
                if _compaction_of(origin) == seen:
                    raise
            else:
                self._followed = seen

    def _copy_log(self, metadata: MetadataStore, shipped_lsn: int, origin: Origin, start_lsn: int) -> None:
        """A compaction may come at any moment: then its objects are followed first, and the rest is copied."""
        copied = Catalog(metadata, origin.keys)
        while not self._copy_objects(copied, shipped_lsn, origin, start_lsn):
            end, is_new = copied.next_offset(), _compaction_of(origin) != self._followed
            self._followed = None
            self._follow_compaction(metadata, origin)
            if not is_new and copied.next_offset() == end:
                raise self._other_history(end)

    def _copy_objects(self, copied: Catalog, shipped_lsn: int, origin: Origin, start_lsn: int) -> bool:
        """Whether all were copied; False when one of them was put together with others meanwhile."""
        for descriptor in origin.catalog.walk(max(1, copied.next_offset(), start_lsn)):
            if descriptor.start_offset >= shipped_lsn:
                return True
            if not self._goes_on_with(copied, descriptor, start_lsn):
                return False
            try:
                self._copy_object(origin, descriptor)
            except NotFoundError:
                if _compaction_of(origin) == self._followed:
                    raise
                return False
            self._put(copied.metadata, origin.keys.descriptor(descriptor.start_offset), encode_descriptor(descriptor))
            self._put_hint(copied, descriptor)
        return True

    def _put_hint(self, copied: Catalog, descriptor: Descriptor) -> None:
        value, version = copied.moved_current(descriptor.start_offset)
        copied.metadata.commit([Check(copied.keys.current, version)], [Put(copied.keys.current, value)])

    def _goes_on_with(self, copied: Catalog, descriptor: Descriptor, start_lsn: int) -> bool:
        """Whether an object follows what is here, unless everything between was dropped in the engine's store.

        False when it is one that was put together from others, and what is here ends inside of it.
        """
        expected = max(1, copied.next_offset())
        if descriptor.start_offset == expected or expected < descriptor.start_offset <= start_lsn:
            return True
        begins_inside = descriptor.start_offset < expected <= descriptor.end_offset
        if begins_inside and copied.newest() is None:
            return True
        if not begins_inside or not descriptor.name.generation:
            raise self._other_history(expected)
        return False

    def _other_history(self, expected: int) -> DataError:
        return DataError(
            f"the replica {self.objects.url} ends at LSN {expected - 1}, where no object of this engine ends",
            operation="replicate",
            hint="Is it the replica of another engine? Give each engine a place of its own",
        )

    def _copy_object(self, origin: Origin, descriptor: Descriptor) -> None:
        source, key = origin.objects, origin.keys.object(descriptor.name)
        if self._has(key, descriptor.size):
            return
        crc = 0
        with self.objects.open_writer(key) as writer:
            for data in ranges(source, key, descriptor.size):
                crc = crc32(data, crc)
                writer.write(data)
            if checksum_text(crc) != descriptor.checksum:
                raise damage(key, 0, "a checksum that does not match")
        self._count_copied(descriptor.size)

    def _has(self, key: str, size: int) -> bool:
        with contextlib.suppress(NotFoundError):
            return self.objects.head(key).size == size
        return False

    # States and documents

    def _copy_states(self, manifest: Manifest, origin: Origin) -> None:
        for state in manifest.checkpoints:
            if not self._has(state.key, state.size):
                name = origin.keys.parse_checkpoint(state.key)
                if name is not None and name.digest:
                    self._files.copy_named(origin.objects, origin.keys, state.key, state.size)
                else:
                    self._copy_state(state, origin.objects)

    def _copy_state(self, state: StoredCheckpoint, source: ObjectStore) -> None:
        with self.objects.open_writer(state.key) as writer:
            for data in ranges(source, state.key, state.size):
                writer.write(data)
        self._count_copied(state.size)

    def _delete_old_states(self, manifest: Manifest, keys: EngineKeys) -> None:
        """What the manifest no longer names, in the replica too; what is newer than it is somebody else's business."""
        kept = {state.key for state in manifest.checkpoints}
        if kept == self._states_left:
            return
        listed = [info.key for info in self.objects.list(keys.checkpoints_prefix)]
        names = [(key, keys.parse_checkpoint(key)) for key in listed if key not in kept]
        newest = manifest.checkpoints[-1].seq if manifest.checkpoints else 0
        self.objects.delete([key for key, name in names if name is not None and name.seq < newest])
        self._states_left = kept

    def _copy_entry(self, metadata: MetadataStore, source: MetadataStore, key: str) -> None:
        entry = source.get(key)
        if entry is not None:
            self._put(metadata, key, entry.value)

    def _put(self, metadata: MetadataStore, key: str, value: bytes) -> None:
        """On the version that was read: what somebody else writes meanwhile is not overwritten."""
        there = metadata.get(key)
        if there is None or there.value != value:
            metadata.commit([Check(key, None if there is None else there.version)], [Put(key, value)])

    def _count_copied(self, size: int) -> None:
        self._objects_copied += 1
        self._bytes_copied += size

    def statistics(self, position: int) -> ReplicaStatistics:
        """One moment of it; the engine's store has the log up to this position."""
        known = self.manifest
        return ReplicaStatistics(
            url=self.objects.url,
            high_water_mark=0 if known is None else known.high_water_mark,
            lag_bytes=max(0, position - (0 if known is None else known.shipped_position)),
            objects_copied=self._objects_copied,
            bytes_copied=self._bytes_copied,
            errors_total=self._errors,
            errors_in_a_row=self._errors_in_a_row,
            last_error=self._last_error,
            last_success_us=self._last_success_us,
        )

    def close(self) -> None:
        """Closing twice is fine."""
        if self._metadata is not None:
            self._metadata.close()


def _generations(
    found: tuple[Manifest, str] | None, origin: Origin, start: StartMark, dropped_below: int
) -> tuple[int, ...]:
    """Generations of compactions that a manifest must know of to be copied: the replica's, and if the log begins later
    than before also that of the engine's store: it is what allowed that."""
    generations = () if found is None else (found[0].generation,)
    if start.start_offset == dropped_below:
        return generations
    published = read_manifest(origin.catalog.metadata, origin.keys)
    return generations if published is None else (*generations, published[0].generation)


def _compaction_of(origin: Origin) -> tuple[int, str]:
    """How far the compactions of the engine's store are."""
    state, _ = read_state(origin.catalog)
    return state.generation, state.phase


def _says_the_same(there: Manifest, wanted: Manifest) -> bool:
    """Who reads states of the engine's store, and when it was written, does not matter to a replica."""
    as_wanted = msgspec.structs.replace(
        there, pins=wanted.pins, revision=wanted.revision, updated_us=wanted.updated_us, leaving=wanted.leaving
    )
    return as_wanted == wanted
