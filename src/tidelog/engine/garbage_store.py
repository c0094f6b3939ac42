"""Garbage in the store of an engine: what may go there, the written plan, and doing it.

    manifest: start of history -> catalog: start of the log -> descriptors -> objects

The start of the log in the catalog is the written plan: from the moment it has moved nobody reads below it, and whoever
collects next finishes what was cut off.

Invariants
- The manifest says where history begins before anything is dropped that older states need. A state that somebody has
  pinned there holds it back.
- Values below the LSN of the published compaction are in compacted data: for them no object of the log is needed.
- Others may drop the log at the same time without a claim (`raw_log.py`): what they were faster with is done again on
  what is there then.
- Nothing is dropped from the LSN on where the oldest listed state goes on: a restore may begin with any of them. No
  state, and nothing is dropped at all.
- Only whole objects go, oldest first, and their descriptors before them; the claim is checked before each.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidelog.engine.garbage_plan import Piece
from tidelog.engine.manifest import KeptFrom, Manifest
from tidelog.engine.raw_log import objects_without_name, retried, whole_objects_below
from tidelog.engine.shipping import Shipping
from tidelog.engine.store_link import StoreLink
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.retention import finish_cold, remove_published


class StoreGarbage:
    """The garbage of one engine in its store."""

    place: Final = "store"

    def __init__(self, shipping: Shipping) -> None:
        self._shipping = shipping
        self._has_swept = False

    def pieces(self) -> list[Piece]:
        """The objects of the log, oldest first."""
        with self._shipping.linked() as link:
            catalog = link.owned.catalog
            found = catalog.between(catalog.start_offset(), link.published.shipped_lsn)
            return [Piece(one.object_id, one.start_offset, one.next_offset, one.raw_size, one.size) for one in found]

    def needed_from_lsn(self) -> int:
        """Where the oldest state goes on."""
        with self._shipping.linked() as link:
            return min([state.lsn for state in link.refresh().checkpoints], default=0)

    def compacted_lsn(self) -> int:
        """The LSN below which all values are in compacted data; 0 where there is none."""
        with self._shipping.linked() as link:
            compacted = link.refresh().compacted
            return 0 if compacted is None else compacted.lsn

    def limit(self, horizon: int) -> int:
        """The horizon, as far as those allow it who read a state in the store."""
        with self._shipping.linked() as link:
            return allowed_by_pins(link.manifest.read(), horizon, self._shipping.now_us())

    def move_start(self, horizon: int, keep_versions: int) -> int:
        """Publishes where history begins and what goes below; where it does then."""
        with self._shipping.linked() as link:
            now_us = self._shipping.now_us()

            def begun(manifest: Manifest) -> Manifest:
                return _beginning_at(manifest, allowed_by_pins(manifest, horizon, now_us), keep_versions)

            link.note(link.manifest.change(begun))
            return allowed_by_pins(link.published, horizon, now_us)

    def drop_below(self, lsn: int) -> tuple[int, int]:
        """Drops the objects all of whose records are below an LSN; how many, and their bytes."""
        with self._shipping.linked() as link:
            below_lsn = min(lsn, self.needed_from_lsn())
            # As the catalog is then: a compaction may have put others in their place.
            doomed = retried(lambda: _start_behind(link, whole_objects_below(link.owned.catalog, below_lsn)))
            retried(lambda: _remove(link, doomed))
            return len(doomed), sum(one.size for one in doomed)

    def finish(self) -> None:
        """Goes on where a collection was cut off, and removes what it left without a name, once."""
        with self._shipping.linked() as link:
            retried(lambda: finish_cold(link.owned, link.objects))
            if not self._has_swept:
                _sweep_below_start(link)
                self._has_swept = True


def allowed_by_pins(manifest: Manifest, horizon: int, now_us: int) -> int:
    """The horizon, as far as those allow it who read a state in the store."""
    read = [state.seq for state in manifest.checkpoints if manifest.is_pinned(state.key, now_us)]
    return min([horizon, *read])


def _beginning_at(manifest: Manifest, seq: int, keep_versions: int) -> Manifest:
    before, collected = manifest.collected, KeptFrom(seq=seq, versions=keep_versions)
    if before is not None and (before.seq, -before.versions) >= (seq, -keep_versions):
        collected = before
    start_seq = max(seq, manifest.history_start_seq)
    return msgspec.structs.replace(manifest, history_start_seq=start_seq, collected=collected)


def _start_behind(link: StoreLink, doomed: list[Descriptor]) -> list[Descriptor]:
    if doomed:
        link.owned.move_start(doomed[-1].next_offset)
    return doomed


def _remove(link: StoreLink, doomed: list[Descriptor]) -> None:
    if doomed:
        remove_published(link.owned, link.objects, doomed)


def _sweep_below_start(link: StoreLink) -> None:
    """Objects that lost their descriptor and were not deleted: below the start nothing is ever published again."""
    catalog = link.owned.catalog
    left_over = objects_without_name(catalog, link.objects, catalog.start_offset())
    if left_over:
        link.owned.ownership.verify()
        link.objects.delete(left_over)
