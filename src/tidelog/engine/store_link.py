"""An engine's claim on its store: the epoch, the manifest, the shipper and its gate, as they are while it lasts.

Invariants
- It exists only after the claim: whatever it publishes is published under the epoch, or raises FencedError.
- The manifest never says more than the catalog has. It may say less after a crash; then it catches up here.
- The high-water mark that is handed out was read back from the published manifest.
- Others may change the manifest too: they publish compactions and states, set pins, and move the start of history. What
  is noted here of that the engine goes by from then on: states before the start are no longer read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

import msgspec

from tidelog.engine.claim import claim_engine
from tidelog.engine.core import WAL, Core
from tidelog.engine.gate import EntryEnd, LsnRange, SeqIndex
from tidelog.engine.manifest import Manifest, OwnedManifest
from tidelog.errors import DataError
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.node_lease import NodeLease
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.shipper import Shipper
from tidelog.tier.tier_settings import TierSettings


class StoreLink:
    """The store in the hands of an engine that owns it."""

    def __init__(
        self,
        core: Core,
        objects: ObjectStore,
        metadata: MetadataStore,
        keys: EngineKeys,
        lease: NodeLease,
        *,
        take_over: bool = False,
    ) -> None:
        self._core = core
        self.objects = objects
        self.metadata = metadata
        self.lease = lease
        catalog = Catalog(metadata, keys)
        taken = claim_engine(
            *(core.files, core.directory / WAL, catalog, objects, core.clock, lease), take_over=take_over
        )
        self.owned = taken.catalog
        self.manifest = OwnedManifest(taken.catalog, keys, core.clock)
        self.published = self.manifest.settle_in()
        """The newest manifest that is known to be published."""
        self._noting = Lock()
        take_over_start(self._core, self.published)
        _refuse_lost_objects(self.published, taken.next_offset)
        self.index = self._new_index()
        self.shipper = self._new_shipper(taken.next_offset)

    def _new_index(self) -> SeqIndex:
        last = EntryEnd(self.published.high_water_mark, self.published.high_water_lsn)
        return SeqIndex(self._core.wal.batches, last, self.published.shipped_lsn)

    def _new_shipper(self, next_lsn: int) -> Shipper:
        core, settings = self._core, self._core.settings
        tier_settings = TierSettings(
            max_object_bytes=settings.wal_segment_size,
            ship_compression=settings.s3_compression,
            ship_compression_level=settings.cold_compression_level,
        )
        return Shipper(
            *(core.wal.log, self.owned, self.objects, tier_settings, core.clock, None, next_lsn, self._gate),
            concurrency=settings.shipping_concurrency,
            first_position=0,
        )

    def _gate(self) -> int:
        low_water_mark = self._core.marks.low_water_mark  # before the durable LSN: see `gate.py`
        return self.index.gate(low_water_mark, self._core.wal.log.durable_offset)

    @property
    def is_behind(self) -> bool:
        """Whether objects are published that the manifest does not tell of."""
        return self.shipper.shipped_offset > self.published.shipped_lsn

    def publish(self, before: Callable[[Manifest], None]) -> Manifest:
        """Tells of everything that was shipped, and reads it back. `before` may refuse: then nothing is told."""
        shipped_lsn, position = self.shipper.shipped_offset, self.shipper.shipped_position
        self.index.learn(self._core.wal.log.durable_offset)
        last = self.index.last_entry_below(shipped_lsn)
        ranges = self.index.rolled_back_below(shipped_lsn)
        history_start_seq = self._core.checkpointer.history_start_seq

        def advance(manifest: Manifest) -> Manifest:
            return msgspec.structs.replace(
                manifest,
                high_water_mark=last.seq,
                high_water_lsn=last.lsn,
                shipped_lsn=shipped_lsn,
                shipped_position=position,
                history_start_seq=max(history_start_seq, manifest.history_start_seq),
                rolled_back=merged((*manifest.rolled_back, *ranges)),
            )

        before(advance(self.published))
        self.manifest.change(advance)
        self.note(self.manifest.read())
        self.index.forget_below(shipped_lsn)
        return self.published

    def note(self, manifest: Manifest) -> None:
        """A manifest was published or read. Others do the same: the newest one counts."""
        with self._noting:
            if manifest.revision > self.published.revision:
                self.published = manifest
        take_over_start(self._core, self.published)

    def refresh(self) -> Manifest:
        """The manifest as it is in the store now: somebody who does not own the engine may have changed it."""
        self.note(self.manifest.read())
        return self.published

    def close(self) -> None:
        """Nothing is published from now on, and other nodes may open the engine."""
        self.shipper.close()
        try:
            self.lease.release()
        finally:
            self.metadata.close()


def take_over_start(core: Core, manifest: Manifest) -> None:
    """Somebody may have moved the start of history. Who reads an older state meanwhile keeps what is here.

    Not behind what is applied: the newest state can always be read.
    """
    start_seq = min(manifest.history_start_seq, core.marks.applied_seq)
    if start_seq > core.history.start_seq:
        core.history.move_start(start_seq)


def merged(ranges: Iterable[LsnRange]) -> tuple[LsnRange, ...]:
    """The same LSNs as ranges in order, none of which touch each other."""
    found: list[LsnRange] = []
    for one in sorted(ranges):
        if found and one.first <= found[-1].last + 1:
            found[-1] = LsnRange(found[-1].first, max(found[-1].last, one.last))
        else:
            found.append(one)
    return tuple(found)


def _refuse_lost_objects(manifest: Manifest, next_lsn: int) -> None:
    if manifest.shipped_lsn > next_lsn:
        raise DataError(
            f"the manifest says that LSN {manifest.shipped_lsn - 1} is in the store, and the catalog ends at "
            f"{next_lsn - 1}",
            operation="open",
            hint="Put the descriptors back from a replica, or restore the engine from one",
        )
