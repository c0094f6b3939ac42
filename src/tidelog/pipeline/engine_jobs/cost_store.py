"""What an engine has in one store, counted: objects and bytes by kind, and what of them belongs to nothing.

Invariants
- Listings are made by workers, one of each place, and come back as names and sizes; of data files, of which there may
  be very many, as a count alone. What of those belongs to nothing is what there is more than the root of the
  compaction says.
- What the documents of the engine name is in use, and everything else is garbage: what `gc` would look at. Some of it
  may be in somebody's hands just now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.compacted import Compaction, read_compaction
from tidelog.engine.manifest import Manifest
from tidelog.engine.store_checkpoint import StoredState
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.engine_jobs.cost_listing import Listing, ListingWork, list_place
from tidelog.pipeline.engine_jobs.cost_model import KINDS, Kind, KindUse, LogObject
from tidelog.pipeline.engine_jobs.verify_references import references_of
from tidelog.pipeline.engines.place import EngineRoot, OpenedEngine
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.work import run_on_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class StateUse(msgspec.Struct, frozen=True, kw_only=True):
    """A state: its bytes, those of its files, and where the log goes on. As it is, there is none."""

    size: int = 0
    parts: tuple[int, ...] = ()
    lsn: int = 1


class StoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in one store: what is there of each kind, its log, and the state that a restore begins with."""

    url: str
    manifest: Manifest
    uses: dict[Kind, KindUse]
    log: tuple[LogObject, ...]
    start_lsn: int
    start_position: int
    compaction: Compaction | None
    state: StateUse
    own_state: StateUse
    """The newest one that the engine's owner wrote: what a restore would begin with if there were no compaction."""


def count_store(spark: SparkSession, root: EngineRoot) -> StoreUse:
    """Counts everything of an engine in the store of a root."""
    with root.open() as opened:
        works = _works(root.place)
        listings = list(run_on_workers(spark, list_place, works, items_per_task=2))
        compaction = _compaction(opened)
        referenced = references_of(opened.objects, opened.catalog, opened.keys, opened.manifest).files
        descriptors = list(opened.catalog.between(opened.catalog.start_offset(), 1 << 63))
        states = _states(opened)
    return StoreUse(
        url=root.store_url,
        manifest=opened.manifest,
        uses=_uses(listings, set(referenced), compaction),
        log=tuple(
            LogObject(
                size=one.size,
                lsn=one.start_offset,
                next_lsn=one.next_offset,
                created_us=one.created_us,
                is_shipped=not one.name.generation,
                is_compressed=one.codec != "none",
            )
            for one in descriptors
        ),
        start_lsn=descriptors[0].start_offset if descriptors else 1,
        start_position=descriptors[0].start_position if descriptors else 0,
        compaction=compaction,
        state=states[-1] if states else StateUse(),
        own_state=next((one for one in reversed(states) if not one.parts), StateUse()),
    )


def _works(place: EnginePlace) -> list[ListingWork]:
    keys = place.keys
    prefixes: list[tuple[str, Kind]] = [
        (keys.objects_prefix, "log"),
        (keys.packs_prefix, "packs"),
        (keys.index_prefix, "index"),
        (keys.checkpoints_prefix, "states"),
    ]
    works = [ListingWork(place=place, prefix=prefix, kind=kind) for prefix, kind in prefixes]
    works.append(ListingWork(place=place, prefix=keys.data_prefix, kind="data", names=False))
    return [*works, ListingWork(place=place, prefix=keys.metadata_prefix, kind="metadata", names=False)]


def _compaction(opened: OpenedEngine) -> Compaction | None:
    compacted = opened.manifest.compacted
    return None if compacted is None else read_compaction(opened.objects, opened.keys, compacted)


def _states(opened: OpenedEngine) -> list[StateUse]:
    """Those that can be opened, oldest first."""
    found: list[StateUse] = []
    for state in opened.manifest.checkpoints:
        try:
            parts = StoredState(opened.objects, state).parts()
        except (DataError, NotFoundError):
            continue
        found.append(StateUse(size=state.size, parts=tuple(part.size for part in parts), lsn=state.lsn))
    return found


def _uses(listings: Iterable[Listing], referenced: set[str], compaction: Compaction | None) -> dict[Kind, KindUse]:
    found = {kind: KindUse(kind=kind) for kind in KINDS}
    for listing in listings:
        used = _in_use(listing, referenced, compaction)
        found[listing.kind] = used
        garbage = found["garbage"]
        found["garbage"] = KindUse(
            kind="garbage",
            objects=garbage.objects + listing.objects - used.objects,
            bytes=garbage.bytes + listing.bytes - used.bytes,
        )
    return found


def _in_use(listing: Listing, referenced: set[str], compaction: Compaction | None) -> KindUse:
    kind = listing.kind
    if kind == "metadata":
        return KindUse(kind=kind, objects=listing.objects, bytes=listing.bytes)
    if kind == "data":
        said = (0, 0) if compaction is None else (compaction.data_files, compaction.data_bytes)
        return KindUse(kind=kind, objects=min(said[0], listing.objects), bytes=min(said[1], listing.bytes))
    used = [size for key, size in listing.names.items() if key in referenced]
    return KindUse(kind=kind, objects=len(used), bytes=sum(used))
