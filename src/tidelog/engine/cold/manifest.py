"""The manifest: the root document of an engine in the store, updated by compare-and-swap; and its publication by
owners, restores and jobs.

    high_water_mark, high_water_lsn     the last entry that is in the store, and the record that completes it
    shipped_lsn, shipped_position       the first record, and the first byte of the log, that are not in the store
    history_start_seq                   the oldest seq that can be read
    rolled_back                         ranges of LSNs whose entries do not count
    checkpoints                         snapshots that a restore may begin with, oldest first
    leaving                             keys of snapshots that are pending deletion: the persisted plan
    pins                                current readers of snapshots, with expiry
    compacted                           the compaction that cold reads may use, if there was one
    collected                           the rule by which the owner has removed versions, if it has

Invariants
- `PublishedManifest` is the only writer, and writes on the version of the predecessor. Epochs, marks, LSNs and
  positions never go back: such a change is refused. Only the owner moves them, under its epoch. A new owner rewrites
  the document before anything else: a change that an earlier owner has begun fails on its version.
- The generation of the compaction never goes back. Any process may publish a compaction, a snapshot newer than the
  newest one, and a later start of history, on the version that it read (`publish_compaction` and its neighbours).
- A document with a compaction has version 2, so that a program that does not know of compactions cannot drop it. One
  without is unchanged: version 1.
- Any process may set pins, on the version that it read. A pinned snapshot is not deleted until the pin expires.
- The document is checksummed and validated as a whole: an inconsistent one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated

import msgspec

from tidelog.clock import Clock
from tidelog.codec import decode_document, encode_document
from tidelog.cold.catalog import Catalog, impossible_number
from tidelog.cold.ownership import OwnedCatalog
from tidelog.engine.wal.ship_watermark import LsnRange
from tidelog.errors import ConflictError, DataError, InputError, NotFoundError
from tidelog.store.document import Fence, Versioned, VersionedDocument
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MAX_VALUE_BYTES, MetadataStore
from tidelog.store.object_store import ObjectStore

_KIND = "engine-manifest"
_VERSION = 1
_VERSION_WITH_COMPACTION = 2
# Ranges before the oldest snapshot are of no use to a restore; they are kept as long as there is room.
MAX_RANGES = 10_000

Number = Annotated[int, msgspec.Meta(ge=0)]


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot in the store: its object, its seq, and the LSN at which replay of the log starts."""

    key: str
    seq: Number
    lsn: Number
    epoch: Number
    rows: Number
    size: Number
    digest: str
    created_us: int


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A pin: somebody reads this snapshot, or is about to."""

    name: str
    key: str
    until_us: int


class KeptFrom(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `vacuum_rules` removes with this horizon is removed: of versions at or below `seq`, `versions`
    stay.
    """

    seq: Number
    versions: Number


class StoredCompaction(msgspec.Struct, frozen=True, kw_only=True):
    """A compaction in the store: its root and its extent. It holds all versions up to `seq`; `lsn` is the first record
    that is not in it, `position` that record's position in the log. `digest` is the one in the root's name.
    """

    generation: Number
    key: str
    size: Number
    digest: str
    seq: Number
    lsn: Number
    position: Number
    created_us: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the manifest."""

    epoch: Number
    revision: Number = 0
    high_water_mark: Number = 0
    high_water_lsn: Number = 0
    shipped_lsn: Number = 1
    shipped_position: Number = 0
    history_start_seq: Number = 0
    rolled_back: tuple[LsnRange, ...] = ()
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    leaving: tuple[str, ...] = ()
    pins: tuple[Pin, ...] = ()
    updated_us: int = 0
    compacted: StoredCompaction | None = None
    collected: KeptFrom | None = None
    """What the owner's own collection has removed, or is about to. The records of that may not be shipped yet."""

    @property
    def generation(self) -> int:
        """The generation of its compaction; 0 if there was none yet."""
        return 0 if self.compacted is None else self.compacted.generation

    @property
    def known_ends(self) -> list[tuple[int, int]]:
        """Seqs of snapshots and of the compaction, and the LSNs after all of their entries."""
        states = [*self.checkpoints, *(() if self.compacted is None else (self.compacted,))]
        return [(state.seq, state.lsn) for state in states]

    def is_pinned(self, key: str, now_us: int) -> bool:
        return any(pin.key == key and pin.until_us > now_us for pin in self.pins)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes the manifest; if there are too many ranges, those that are no longer needed are left out."""
    bounded = _bounded(manifest)
    told = {name: value for name, value in msgspec.structs.asdict(bounded).items() if value is not None}
    return encode_document(_KIND, _VERSION if bounded.compacted is None else _VERSION_WITH_COMPACTION, told)


def decode_manifest(data: bytes, key: str, keys: EngineKeys) -> Manifest:
    """Decodes a manifest; DataError names the invalid key."""
    try:
        if len(data) > MAX_VALUE_BYTES:
            raise DataError(f"{len(data)} bytes are too many")
        is_first = data.startswith(f"tidelog {_KIND} {_VERSION} ".encode("ascii"))
        manifest = decode_document(_KIND, _VERSION if is_first else _VERSION_WITH_COMPACTION, data, Manifest)
        _require(is_first == (manifest.compacted is None), "its version does not go with its compaction")
        check_manifest(manifest, keys)
    except DataError as error:
        raise DataError(
            f"the manifest {key} cannot be understood: {error.message}",
            hint="Put a good copy of it back, or restore from a replica",
        ) from error
    return manifest


def _bounded(manifest: Manifest) -> Manifest:
    ranges = manifest.rolled_back
    if len(ranges) <= MAX_RANGES or not manifest.checkpoints:
        return manifest
    oldest_lsn = min(
        manifest.checkpoints[0].lsn, manifest.shipped_lsn if (one := manifest.compacted) is None else one.lsn
    )
    return msgspec.structs.replace(manifest, rolled_back=tuple(one for one in ranges if one.last >= oldest_lsn))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DataError(otherwise)


def check_manifest(manifest: Manifest, keys: EngineKeys) -> None:
    """Raises DataError naming what is inconsistent."""
    impossible = impossible_number(manifest)
    _require(impossible is None, f"{impossible}, which cannot be")
    _require(manifest.shipped_lsn >= 1, "its log begins with LSN 1")
    _require(manifest.high_water_lsn < manifest.shipped_lsn, "its last entry is not shipped")
    _require(bool(manifest.high_water_mark) == bool(manifest.high_water_lsn), "its last entry has no LSN")
    ranges = manifest.rolled_back
    _require(all(1 <= one.first <= one.last for one in ranges), "a range ends before it begins")
    _require(all(a.last < b.first for a, b in pairwise(ranges)), "its ranges are not in order")
    _require(not ranges or ranges[-1].last < manifest.shipped_lsn, "a range is not shipped")
    _check_checkpoints(manifest, keys)
    if manifest.compacted is not None:
        _check_compacted(manifest.compacted, manifest, keys)
    if manifest.collected is not None:
        _require(manifest.collected.seq <= manifest.history_start_seq, "what is gone was to be kept")
        _require(manifest.collected.versions >= 1, "a collection that keeps nothing")


def _check_compacted(compacted: StoredCompaction, manifest: Manifest, keys: EngineKeys) -> None:
    name = keys.parse_compacted(compacted.key)
    _require(
        name == ("root", compacted.generation, compacted.digest), f"{compacted.key} is not the root of that compaction"
    )
    _require(compacted.seq <= manifest.high_water_mark, "its compaction is newer than the last entry")
    _require(1 <= compacted.lsn <= manifest.high_water_lsn + 1, "its compaction goes behind the last entry")
    _require(compacted.position <= manifest.shipped_position, "its compaction goes behind the log")
    _require(compacted.size > 0, "its compaction has an empty root")


def _check_checkpoints(manifest: Manifest, keys: EngineKeys) -> None:
    states = manifest.checkpoints
    for state in states:
        name = keys.parse_checkpoint(state.key)
        is_its_name = name is not None and name[:3] == (state.seq, state.lsn, state.epoch)
        _require(is_its_name, f"{state.key} is not the name of that state")
        _require(state.seq <= manifest.high_water_mark, "a state is newer than the last entry")
        _require(state.lsn <= manifest.shipped_lsn, "a state is newer than the log")
    _require(all((a.seq, a.lsn) < (b.seq, b.lsn) for a, b in pairwise(states)), "its states are not in order")
    known = {state.key for state in states}
    _require(not known.intersection(manifest.leaving), "a state is there and leaving")
    _require(all(keys.parse_checkpoint(key) is not None for key in manifest.leaving), "it names what is no state")


# Fields that never decrease. The generation of a compaction is one of them: a reader never returns to an older one.
_GROWING = (
    *("epoch", "high_water_mark", "high_water_lsn", "shipped_lsn", "shipped_position", "history_start_seq"),
    "generation",
)


def refuse_to_go_back(before: Manifest, after: Manifest) -> None:
    """Raises DataError naming the field that would go back."""
    for name in _GROWING:
        if getattr(after, name) < getattr(before, name):
            raise DataError(f"{name} would go back from {getattr(before, name)} to {getattr(after, name)}")


Change = Callable[[Manifest], Manifest]


class PublishedManifest:
    """The manifest in its store, and its only writer: every write is the successor of the version that was read."""

    def __init__(self, metadata: MetadataStore, keys: EngineKeys, fence: Fence | None = None) -> None:
        self._keys = keys
        self._document = VersionedDocument(
            metadata,
            keys.engine_manifest,
            encode_manifest,
            lambda data, key: decode_manifest(data, key, keys),
            fence=fence,
        )

    def read(self) -> Versioned[Manifest] | None:
        return self._document.read()

    def change(self, change: Callable[[Manifest | None], Manifest | None]) -> Manifest | None:
        """Publishes the result of `change` as the next revision, and returns it. None leaves the manifest as it is.

        `change` is called again after a lost race. If it changes nothing, nothing is written.
        """

        def next_revision(before: Manifest | None) -> Manifest | None:
            changed = change(before)
            if changed is None or changed == before:
                return changed
            revision = 1 if before is None else before.revision + 1
            return self._successor(before, msgspec.structs.replace(changed, revision=revision))

        return self._document.update(next_revision)

    def copy(self, manifest: Manifest) -> Manifest:
        """Publishes the manifest of another store in this one, with its revision; pins are those of readers of this
        store.
        """

        def copied(before: Manifest | None) -> Manifest:
            pins = () if before is None else before.pins
            return self._successor(before, msgspec.structs.replace(manifest, pins=pins, leaving=()))

        return self._document.update(copied)

    def _successor(self, before: Manifest | None, after: Manifest) -> Manifest:
        if before is not None:
            refuse_to_go_back(before, after)
        check_manifest(after, self._keys)
        return after


def no_engine(keys: EngineKeys, objects: ObjectStore, operation: str) -> NotFoundError:
    """The error for a store without an engine of that name."""
    return NotFoundError(
        f"there is no engine {keys.name!r} in {objects.url}",
        operation=operation,
        hint="Check the address of the store and the name of the engine. If its metadata is lost, " + keys.rebuilt_by,
    )


def read_manifest(metadata: MetadataStore, keys: EngineKeys) -> Versioned[Manifest] | None:
    """Returns the published manifest and its version; None if there is none."""
    return PublishedManifest(metadata, keys).read()


class OwnedManifest:
    """The manifest as the engine's owner changes it."""

    def __init__(self, owned: OwnedCatalog, keys: EngineKeys, clock: Clock) -> None:
        self._owned = owned
        self._published = PublishedManifest(owned.catalog.metadata, keys, owned.ownership)
        self._clock = clock

    def read(self) -> Manifest:
        found = self._published.read()
        return Manifest(epoch=self._owned.epoch) if found is None else found.value

    def change(self, change: Change) -> Manifest:
        """Publishes the result of `change`, and returns it. FencedError if another node owns the engine.

        `change` is called again after a lost race (a restore sets pins). If it changes nothing, nothing is written.
        """

        def under_our_epoch(found: Manifest | None) -> Manifest:
            before = found or Manifest(epoch=0)
            if before.epoch > self._owned.epoch:
                self._owned.ownership.verify()
                raise DataError(f"the manifest is of epoch {before.epoch}, the owner of epoch {self._owned.epoch}")
            changed = change(before)
            if changed == before and before.epoch == self._owned.epoch:
                return before
            return msgspec.structs.replace(changed, epoch=self._owned.epoch, updated_us=self._clock.now_us())

        published = self._published.change(under_our_epoch)
        assert published is not None
        return published

    def settle_in(self) -> Manifest:
        """Rewrites the manifest after the claim: no earlier owner can change it from here on."""
        return self.change(lambda manifest: manifest)


class Pinning:
    """Pins of a process that does not own the engine: a restore."""

    def __init__(self, metadata: MetadataStore, keys: EngineKeys, clock: Clock, name: str, seconds: int) -> None:
        self._published = PublishedManifest(metadata, keys)
        self._clock = clock
        self._name = name
        self._seconds = seconds

    def pin(self, key: str) -> bool:
        """Protects this snapshot from deletion for a while; False if its deletion is pending already."""
        until_us = self._clock.now_us() + self._seconds * 1_000_000
        pin = Pin(name=self._name, key=key, until_us=until_us)
        return self._set(lambda manifest: (*self._others(manifest), pin), key)

    def release(self) -> None:
        """Releases our pin."""
        self._set(self._others, None)

    def _others(self, manifest: Manifest) -> tuple[Pin, ...]:
        now_us = self._clock.now_us()
        return tuple(pin for pin in manifest.pins if pin.name != self._name and pin.until_us > now_us)

    def _set(self, pins: Callable[[Manifest], tuple[Pin, ...]], key: str | None) -> bool:
        """False if there is no such snapshot."""

        def pinned(found: Manifest | None) -> Manifest | None:
            if found is None or (key is not None and all(state.key != key for state in found.checkpoints)):
                return None
            return msgspec.structs.replace(found, pins=pins(found))

        return self._published.change(pinned) is not None


# Publishing the output of a job without a node: a compaction, a snapshot, a later start of history.
#
# Each is one compare-and-swap of the manifest. Its owner changes it often, too: after a lost race the manifest is read
# again and the change is retried, as long as it is still valid.
#
# Invariants
# - A compaction of generation g + 1 is published on generation g or not at all. So a file of a published generation
#   that the published root does not name will never be named.
# - A snapshot is appended after the newest listed one or not at all, for the same reason.
# - Publishing is idempotent: an interrupted job may repeat it.
# - The epoch stays as it was found: nobody is fenced.


def publish_compaction(
    metadata: MetadataStore,
    keys: EngineKeys,
    clock: Clock,
    *,
    base_generation: int,
    compacted: StoredCompaction,
    state: StoredCheckpoint | None = None,
) -> Manifest:
    """Publishes a compaction, and with it a snapshot if that is newer than the newest.

    ConflictError if another was published since: nothing is written then.
    """
    if compacted.generation != base_generation + 1:
        raise InputError(f"a compaction built on generation {base_generation} cannot be {compacted.generation}")

    def change(manifest: Manifest) -> Manifest:
        if manifest.compacted is not None and manifest.compacted.key == compacted.key:
            return manifest
        if manifest.generation != base_generation:
            raise _another_compaction(manifest, base_generation)
        changed = msgspec.structs.replace(manifest, compacted=compacted)
        return changed if state is None or not _is_newer(state, manifest) else _with_state(changed, state)

    return change_manifest(metadata, keys, clock, change)


def publish_state(metadata: MetadataStore, keys: EngineKeys, clock: Clock, state: StoredCheckpoint) -> Manifest:
    """Lists a snapshot. ConflictError if one that is as new is listed already: nothing is written then."""

    def change(manifest: Manifest) -> Manifest:
        if any(listed.key == state.key for listed in manifest.checkpoints):
            return manifest
        if not _is_newer(state, manifest):
            newest = manifest.checkpoints[-1]
            raise ConflictError(
                f"a state of seq {newest.seq} is listed already, {newest.key}: one of seq {state.seq} is not behind it",
                hint="There is nothing left to do, unless you want a newer one: run it again then",
            )
        return _with_state(manifest, state)

    return change_manifest(metadata, keys, clock, change)


def move_history_start(metadata: MetadataStore, keys: EngineKeys, clock: Clock, seq: int) -> Manifest:
    """Moves the start of history forward; earlier seqs can no longer be read. A pinned snapshot stays readable."""

    def change(manifest: Manifest) -> Manifest:
        if seq > manifest.high_water_mark:
            raise InputError(f"the history cannot begin at seq {seq}: the last entry is {manifest.high_water_mark}")
        now_us = clock.now_us()
        pinned = [one.seq for one in manifest.checkpoints if manifest.is_pinned(one.key, now_us)]
        wanted = min((seq, *pinned))
        return msgspec.structs.replace(manifest, history_start_seq=max(wanted, manifest.history_start_seq))

    return change_manifest(metadata, keys, clock, change)


def change_manifest(metadata: MetadataStore, keys: EngineKeys, clock: Clock, change: Change) -> Manifest:
    """Publishes the result of `change` under the epoch that is found in the manifest, and returns it.

    `change` is called again after a lost race. If it changes nothing, nothing is written.
    """

    def by_anybody(before: Manifest | None) -> Manifest:
        if before is None:
            raise NotFoundError(
                f"there is no engine {keys.name!r} in this store",
                hint="Check the address of the store and the name of the engine",
            )
        changed = change(before)
        return before if changed == before else msgspec.structs.replace(changed, updated_us=clock.now_us())

    published = PublishedManifest(metadata, keys).change(by_anybody)
    assert published is not None
    return published


def _is_newer(state: StoredCheckpoint, manifest: Manifest) -> bool:
    return not manifest.checkpoints or (state.seq, state.lsn) > (
        manifest.checkpoints[-1].seq,
        manifest.checkpoints[-1].lsn,
    )


def _with_state(manifest: Manifest, state: StoredCheckpoint) -> Manifest:
    return msgspec.structs.replace(manifest, checkpoints=(*manifest.checkpoints, state))


def _another_compaction(manifest: Manifest, base_generation: int) -> ConflictError:
    other = manifest.compacted
    told = "is gone" if other is None else f"is {other.generation} up to seq {other.seq}, published meanwhile"
    return ConflictError(
        f"this compaction was built on generation {base_generation}, and the engine's {told}",
        hint="Nothing was lost and nothing written; run it again to compact what has come since then",
    )


KEPT_SNAPSHOTS = 2


def without_old(manifest: Manifest, now_us: int) -> Manifest:
    """Which snapshots stay and which are deleted: the two newest stay, and so do pinned ones. Drops expired pins."""
    old = [one.key for one in manifest.checkpoints[:-KEPT_SNAPSHOTS] if not manifest.is_pinned(one.key, now_us)]
    return msgspec.structs.replace(
        manifest,
        checkpoints=tuple(one for one in manifest.checkpoints if one.key not in old),
        leaving=(*manifest.leaving, *(key for key in old if key not in manifest.leaving)),
        pins=tuple(pin for pin in manifest.pins if pin.until_us > now_us),
    )


@contextmanager
def told_of_dropped_log(catalog: Catalog) -> Iterator[None]:
    """A reader of the log without a pin may find it dropped meanwhile: raises ConflictError, which says to start again.

    Other failures are unchanged.
    """
    start_lsn = catalog.start_offset()
    try:
        yield
    except (DataError, NotFoundError) as error:
        now_lsn = catalog.start_offset()
        if now_lsn <= start_lsn:
            raise
        raise ConflictError(
            f"the log before LSN {now_lsn} was dropped while this was at work",
            hint="Nothing was lost; run it again, and it begins with what has taken its place",
        ) from error
