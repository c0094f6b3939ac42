"""States in the store: writing one, and letting old ones go.

Invariants
- The two newest ones are kept: if one is damaged, a restore begins with the other.
- A state is listed behind the newest one or not at all: somebody without the engine may have listed one meanwhile.
- Whatever goes is written down first (`leaving` in the manifest), then deleted, then taken from the list. Whoever owns
  the engine next finishes that. A state that is pinned stays. With one of several files go those that no other has;
  files of a compaction stay.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidelog.engine.cell_blocks import Row
from tidelog.engine.core import Core
from tidelog.engine.manifest import Manifest, StoredCheckpoint
from tidelog.engine.references import superseded_parts
from tidelog.engine.store_checkpoint import write_checkpoint
from tidelog.engine.store_link import StoreLink
from tidelog.engine.version_keys import MAX_SEQ, SEQ_BYTES
from tidelog.tier.keys import CheckpointId, EngineKeys
from tidelog.tier.object_store import ObjectStore

KEPT = 2


class StoreStates:
    """The states of one engine in its store."""

    def __init__(self, core: Core, objects: ObjectStore, keys: EngineKeys) -> None:
        self._core = core
        self._objects = objects
        self._keys = keys

    def write(self, link: StoreLink) -> StoredCheckpoint | None:
        """Writes the state at the published high-water mark, if there is none yet; None where nothing is shipped."""
        published = link.refresh()  # somebody else may have listed one
        seq, lsn = published.high_water_mark, published.high_water_lsn + 1
        newest = published.checkpoints[-1] if published.checkpoints else None
        if not seq or (newest is not None and (newest.seq, newest.lsn) >= (seq, lsn)):
            return newest
        with self._core.history.pin(seq):
            written = write_checkpoint(
                *(self._objects, self._keys, CheckpointId(seq, lsn, link.owned.epoch), self._rows(seq)),
                level=self._core.settings.cold_compression_level,
                created_us=self._core.clock.now_us(),
                history_start_seq=lambda: self._core.history.start_seq,
                results=self._core.results.known_up_to(seq),
            )
        changed = link.manifest.change(lambda manifest: _with(manifest, written))
        link.note(changed)
        if all(state.key != written.key for state in changed.checkpoints):
            link.owned.ownership.verify()
            self._objects.delete(written.key)  # somebody else's is listed, and is as new
        self.let_go(link)
        return changed.checkpoints[-1]

    def _rows(self, seq: int) -> Iterator[Row]:
        """All versions up to a seq, in the order of the tree."""
        least = (MAX_SEQ - seq).to_bytes(SEQ_BYTES, "big")
        for key, value in self._core.tree.scan(b"", None):
            if key[-SEQ_BYTES:] >= least:
                yield key, value

    def let_go(self, link: StoreLink) -> None:
        """Deletes what is old, and what an interrupted attempt has left."""
        now_us = self._core.clock.now_us()
        planned = link.manifest.change(lambda manifest: without_old(manifest, now_us))
        link.note(planned)
        if planned.leaving:
            link.owned.ownership.verify()
            self._objects.delete([*planned.leaving, *self._parts_left_by(planned)])
            gone = frozenset(planned.leaving)
            link.note(link.manifest.change(lambda manifest: _without_gone(manifest, gone)))

    def _parts_left_by(self, manifest: Manifest) -> list[str]:
        names = [self._keys.parse_checkpoint(key) for key in manifest.leaving]
        has_parts = any(name is not None and name.digest for name in names)
        return superseded_parts(self._objects, self._keys, manifest) if has_parts else []


def _with(manifest: Manifest, written: StoredCheckpoint) -> Manifest:
    states = manifest.checkpoints
    if states and (written.seq, written.lsn) <= (states[-1].seq, states[-1].lsn):
        return manifest
    return msgspec.structs.replace(manifest, checkpoints=(*states, written))


def without_old(manifest: Manifest, now_us: int) -> Manifest:
    """The plan: which states stay, which leave. Pins that are over are forgotten."""
    old = manifest.checkpoints[:-KEPT]
    leaving = tuple(one for one in old if not manifest.is_pinned(one.key, now_us))
    keys = tuple(one.key for one in leaving)
    return msgspec.structs.replace(
        manifest,
        checkpoints=tuple(one for one in manifest.checkpoints if one.key not in keys),
        leaving=(*manifest.leaving, *(key for key in keys if key not in manifest.leaving)),
        pins=tuple(pin for pin in manifest.pins if pin.until_us > now_us),
    )


def _without_gone(manifest: Manifest, gone: frozenset[str]) -> Manifest:
    return msgspec.structs.replace(manifest, leaving=tuple(key for key in manifest.leaving if key not in gone))
