"""The manifest: what an engine says about itself in the store, as one document that is changed by compare-and-swap.

    high_water_mark, high_water_lsn     the last entry that is in the store, and the record that completes it
    shipped_lsn, shipped_position       the first record, and the first byte of the log, that are not in the store
    history_start_seq                   the oldest seq that may be asked for
    rolled_back                         ranges of LSNs of which no entry counts
    checkpoints                         states that a restore may begin with, oldest first
    leaving                             keys of states that are to be deleted: the written plan
    pins                                who reads states just now, until when
    compacted                           the compaction that cold reads may use, if there was one
    collected                           the rule by which the owner has removed versions, if it has

Invariants
- An epoch never goes back, and neither does a mark, an LSN or a position. The owner alone moves them, under its epoch.
  A new owner rewrites the document before anything else: a change that an earlier one has begun fails on its version.
- The generation of the compaction never goes back. It may be published by anybody, as may be a state behind the newest
  one and a later start of the history, on the version that was read (`publishing`).
- A document with a compaction has version 2, so that a program which does not know of it cannot drop it. One without is
  what it was before: version 1.
- Pins may be set by anybody, on the version that was read. No state is deleted that a pin names, until the pin is old.
- The document is checksummed and checked as a whole: what does not hold together is refused, never half believed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

import msgspec

from tidelog.clock import Clock
from tidelog.codec import decode_document, encode_document
from tidelog.engine.gate import LsnRange
from tidelog.errors import ConflictError, DataError
from tidelog.tier.bounds import impossible_number
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.store import MAX_VALUE_BYTES, Check, MetadataStore, Put
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.ownership import Step

_KIND = "engine-manifest"
_VERSION = 1
_VERSION_WITH_COMPACTION = 2
_ATTEMPTS = 20
# Ranges before the oldest state are of no use to a restore; they are kept as long as there is room.
MAX_RANGES = 10_000

Number = Annotated[int, msgspec.Meta(ge=0)]


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A state in the store: its object, the seq that it is the state of, and the LSN from which on the log goes on."""

    key: str
    seq: Number
    lsn: Number
    epoch: Number
    rows: Number
    size: Number
    digest: str
    created_us: int


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody reads this state, or is about to."""

    name: str
    key: str
    until_us: int


class KeptFrom(msgspec.Struct, frozen=True, kw_only=True):
    """What `vacuum_rules` lets go with this horizon is gone: of what is not above `seq`, so many `versions` stay."""

    seq: Number
    versions: Number


class StoredCompaction(msgspec.Struct, frozen=True, kw_only=True):
    """A compaction in the store: its root, and how far it goes. All versions up to `seq` are in it; `lsn` is the first
    record that is not, `position` its place in the log. `digest` is the one in the root's name."""

    generation: Number
    key: str
    size: Number
    digest: str
    seq: Number
    lsn: Number
    position: Number
    created_us: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of it."""

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
        """That of its compaction; 0 where there was none yet."""
        return 0 if self.compacted is None else self.compacted.generation

    def is_pinned(self, key: str, now_us: int) -> bool:
        """Whether somebody reads this state."""
        return any(pin.key == key and pin.until_us > now_us for pin in self.pins)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of it; ranges that nobody needs any more are left out when there are too many."""
    bounded = _bounded(manifest)
    told = {name: value for name, value in msgspec.structs.asdict(bounded).items() if value is not None}
    return encode_document(_KIND, _VERSION if bounded.compacted is None else _VERSION_WITH_COMPACTION, told)


def decode_manifest(data: bytes, key: str, keys: EngineKeys) -> Manifest:
    """The manifest in these bytes; DataError names the key when it cannot be one."""
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
    """DataError says what does not hold together in it."""
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


def read_manifest(metadata: MetadataStore, keys: EngineKeys) -> tuple[Manifest, str] | None:
    """The manifest that is published, and its version; None where there is none."""
    entry = metadata.get(keys.engine_manifest)
    return None if entry is None else (decode_manifest(entry.value, entry.key, keys), entry.version)


Change = Callable[[Manifest], Manifest]


class OwnedManifest:
    """The manifest in the hands of the engine's owner."""

    def __init__(self, owned: OwnedCatalog, keys: EngineKeys, clock: Clock) -> None:
        self._owned = owned
        self._keys = keys
        self._clock = clock

    def read(self) -> Manifest:
        """What is published now."""
        found = read_manifest(self._owned.catalog.metadata, self._keys)
        return Manifest(epoch=self._owned.epoch) if found is None else found[0]

    def change(self, change: Change) -> Manifest:
        """Publishes what `change` makes of it, and returns that. FencedError when somebody else owns the engine.

        `change` is called again where others were faster (a restore sets pins). If it changes nothing, nothing is
        written.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._change_once(change)
            except ConflictError:
                continue
        return self._change_once(change)

    def settle_in(self) -> Manifest:
        """After the claim: no earlier owner can change it from here on."""
        return self.change(lambda manifest: manifest)

    def _change_once(self, change: Change) -> Manifest:
        found = read_manifest(self._owned.catalog.metadata, self._keys)
        before = Manifest(epoch=0) if found is None else found[0]
        if before.epoch > self._owned.epoch:
            self._owned.ownership.verify()
            raise DataError(f"the manifest is of epoch {before.epoch}, the owner of epoch {self._owned.epoch}")
        changed = change(before)
        if changed == before and before.epoch == self._owned.epoch:
            return before
        refuse_to_go_back(before, changed)
        after = msgspec.structs.replace(
            changed, epoch=self._owned.epoch, revision=before.revision + 1, updated_us=self._clock.now_us()
        )
        check_manifest(after, self._keys)
        write = Put(self._keys.engine_manifest, encode_manifest(after))
        self._owned.ownership.change([Step(write, None if found is None else found[1])])
        return after


_GROWING = ("high_water_mark", "high_water_lsn", "shipped_lsn", "shipped_position", "history_start_seq", "generation")


def refuse_to_go_back(before: Manifest, after: Manifest) -> None:
    """DataError names what would."""
    for name in _GROWING:
        if getattr(after, name) < getattr(before, name):
            raise DataError(f"{name} would go back from {getattr(before, name)} to {getattr(after, name)}")


class Pinning:
    """Pins of somebody who does not own the engine: a restore."""

    def __init__(self, metadata: MetadataStore, keys: EngineKeys, clock: Clock, name: str, seconds: int) -> None:
        self._metadata = metadata
        self._keys = keys
        self._clock = clock
        self._name = name
        self._seconds = seconds

    def pin(self, key: str) -> bool:
        """Nobody deletes this state for a while; False when it is on its way out already."""
        until_us = self._clock.now_us() + self._seconds * 1_000_000
        pin = Pin(name=self._name, key=key, until_us=until_us)
        return self._set(lambda manifest: (*self._others(manifest), pin), key)

    def release(self) -> None:
        """It may go, as far as we are concerned."""
        self._set(self._others, None)

    def _others(self, manifest: Manifest) -> tuple[Pin, ...]:
        now_us = self._clock.now_us()
        return tuple(pin for pin in manifest.pins if pin.name != self._name and pin.until_us > now_us)

    def _set(self, pins: Callable[[Manifest], tuple[Pin, ...]], key: str | None) -> bool:
        for attempt in range(_ATTEMPTS):
            found = read_manifest(self._metadata, self._keys)
            if found is None or (key is not None and all(state.key != key for state in found[0].checkpoints)):
                return False
            after = msgspec.structs.replace(found[0], pins=pins(found[0]), revision=found[0].revision + 1)
            try:
                self._metadata.commit(
                    [Check(self._keys.engine_manifest, found[1])],
                    [Put(self._keys.engine_manifest, encode_manifest(after))],
                )
            except ConflictError:
                if attempt + 1 == _ATTEMPTS:
                    raise
            else:
                return True
        return False
