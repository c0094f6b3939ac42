"""The job `cost`: the cost of an engine in its store and in its replicas, now and after compaction.

    before compaction        all of the log as it was shipped, the owner's own state  where there is a compaction
    now                      the present contents
    after compaction and gc  what the compaction and the newest states need           counted where there is one,
                                                                                      else estimated from what is alive

Invariants
- Nothing is changed, and no value is read: objects are listed, rows of the newest state and of the log after it are
  counted.
- Every number of the model can be derived from the report: objects and bytes by kind, requests, prices.
- An estimate is marked as one. docs/how-to/engine-pipeline.md lists what is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.cold.gc import droppable_below_lsn
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.sorted_index import Compaction, read_compaction
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.address import EngineRoot, OpenedEngine
from tidelog.pipeline.cost.model import KINDS, Holding, Kind, KindUse, LogObject, PriceList, Prices, Scenario, scenario
from tidelog.pipeline.cost.tasks import Listing, ListingWork, LiveCount, LiveCounter, count_live, list_place
from tidelog.pipeline.jobs.engine.digest import plan_log, sources_of
from tidelog.pipeline.jobs.engine.verify_replicas import references_of
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, ignore_progress, logged
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.work import run_on_workers
from tidelog.store.urls import canonical_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# What an engine has in one store, counted: objects and bytes by kind, and what of them belongs to nothing.
#
# Invariants
# - Listings are made by workers, one of each place, and come back as names and sizes; of data files, of which there may
#   be very many, as a count alone. What of those belongs to nothing is what there is more than the root of the
#   compaction says.
# - What the documents of the engine name is in use, and everything else is garbage: what `gc` would look at. Some of it
#   may be in use right now.


class StateUse(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot: its bytes, those of its files, and where the log continues. The default: no snapshot."""

    size: int = 0
    parts: tuple[int, ...] = ()
    lsn: int = 1


class StoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """An engine in one store: its files of each kind, its log, and the snapshot that a restore begins with."""

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


def _works(place: EngineLocation) -> list[ListingWork]:
    keys = place.keys
    prefixes: list[tuple[str, Kind]] = [
        (keys.objects_prefix, "log"),
        (keys.blobs_prefix, "blob_files"),
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


_COMPACTED_KINDS: tuple[Kind, ...] = ("blob_files", "data", "index", "garbage")
_LARGE_BYTES = 1 << 20
_BLOB_FILE_BYTES = 64 << 20
_ROWS_A_FILE = 250_000
_STATE_BYTES = 1024
_PLACE_BYTES = 18
_VALUE_ROW_BYTES = 30
# Rows of an index, compressed: keys of neighbours begin alike, checksums do not compress.
_ROW_SHARE = 0.5


class StoreCost(msgspec.Struct, frozen=True, kw_only=True):
    """One store: what is in it, and what it costs."""

    url: str
    high_water_mark: int
    kinds: tuple[KindUse, ...]
    scenarios: tuple[Scenario, ...]
    prices: Prices


class CostReport(JobReport, frozen=True, kw_only=True):
    """The engine's own store first, then its replicas."""

    engine: str
    live: LiveCount
    stores: tuple[StoreCost, ...]


@logged
def engine_cost(
    spark: SparkSession,
    root: EngineRoot,
    prices: PriceList | None = None,
    *,
    replicas: Sequence[str] | None = None,
    on_progress: OnProgress = ignore_progress,
) -> CostReport:
    """What an engine costs at given prices. Replicas are those of its settings unless others are named by URL."""
    urls = root.load().storage_engine.replicas if replicas is None else replicas
    roots = [root, *(root.at(url) for url in map(canonical_url, urls))]
    listed = prices or PriceList()
    uses = []
    for number, one in enumerate(roots):
        on_progress(Progress("counting objects", number, len(roots)))
        uses.append(count_store(spark, one))
    on_progress(Progress("counting what is alive", 0, 1))
    live = _live(spark, root, uses[0])
    on_progress(Progress("counting what is alive", 1, 1))
    return CostReport(
        job="cost",
        engine=root.name,
        live=live,
        stores=tuple(_store_cost(use, live, listed.of(use.url)) for use in uses),
        notes=_notes(uses[0]),
    )


def _notes(use: StoreUse) -> tuple[str, ...]:
    if use.compaction is None:
        return ("there is no compaction yet: what would be after one is estimated from what is alive",)
    return ()


def _live(spark: SparkSession, root: EngineRoot, use: StoreUse) -> LiveCount:
    """From the newest source and the log after it."""
    with root.open() as opened:
        sources = sources_of(opened).found
        if not sources:
            raise DataError(
                "no snapshot in the store can be read, and its log does not begin with LSN 1",
                operation="cost",
                hint="`tidelog pipeline verify --engine` lists all problems",
            )
        source = sources[-1]
        plan = plan_log(opened, root.place, source.lsn, opened.manifest.high_water_lsn + 1)
        end_lsn = opened.manifest.high_water_lsn + 1
    compaction = use.compaction
    large_bytes = _LARGE_BYTES if compaction is None else compaction.large_bytes
    counter = LiveCounter(use.start_lsn, end_lsn if compaction is None else compaction.lsn, large_bytes)
    return count_live(spark, [*source.items(root.place), *plan.items], source.size + plan.size, counter)


def _store_cost(use: StoreUse, live: LiveCount, prices: Prices) -> StoreCost:
    now = scenario("now", _now(use, live), prices, is_estimated=False)
    after_holding = _after_estimated(use, live) if use.compaction is None else _after_measured(use, live)
    after = scenario("after compaction and gc", after_holding, prices, is_estimated=use.compaction is None)
    before = []
    if use.compaction is not None:
        is_estimated = use.start_lsn > 1
        before = [scenario("before compaction", _before(use, live), prices, is_estimated=is_estimated)]
    return StoreCost(
        url=use.url,
        high_water_mark=use.manifest.high_water_mark,
        kinds=tuple(use.uses.values()),
        scenarios=(*before, now, after),
        prices=prices,
    )


def _now(use: StoreUse, live: LiveCount) -> Holding:
    """A value is read in the log as long as its object is there."""
    return Holding(
        uses=tuple(use.uses.values()),
        log=use.log,
        state_bytes=use.state.size,
        state_parts=use.state.parts,
        state_lsn=use.state.lsn,
        values_in_log=live.values - live.below_start,
        values_compacted=live.below_start,
        value_bytes=live.value_bytes,
    )


def _before(use: StoreUse, live: LiveCount) -> Holding:
    """The whole log; what of it is gone is counted by its positions, in objects of the size of those that are left."""
    log_bytes = sum(one.size for one in use.log)
    average = max(1, log_bytes // max(1, len(use.log)))
    gone = -(-use.start_position // average)
    missing = tuple(
        LogObject(size=average, lsn=1, next_lsn=2, created_us=0, is_shipped=False, is_compressed=False)
        for _ in range(gone)
    )
    kinds = dict(use.uses) | {kind: KindUse(kind=kind) for kind in _COMPACTED_KINDS}
    kinds["log"] = KindUse(kind="log", objects=len(use.log) + gone, bytes=log_bytes + use.start_position)
    kinds["states"] = KindUse(kind="states", objects=int(use.own_state.size > 0), bytes=use.own_state.size)
    return Holding(
        uses=tuple(kinds.values()),
        log=(*missing, *use.log),
        state_bytes=use.own_state.size,
        state_lsn=use.own_state.lsn,
        values_in_log=live.values,
        value_bytes=live.value_bytes,
    )


def _after_measured(use: StoreUse, live: LiveCount) -> Holding:
    """Without what `gc` removes: garbage, and the log that neither a state nor a value needs."""
    below = droppable_below_lsn(use.manifest)
    log = tuple(one for one in use.log if one.next_lsn > below) or use.log[-1:]
    kinds = dict(use.uses) | {"garbage": KindUse(kind="garbage")}
    kinds["log"] = KindUse(kind="log", objects=len(log), bytes=sum(one.size for one in log))
    kinds["metadata"] = _fewer(use.uses["metadata"], len(use.log) - len(log))
    return msgspec.structs.replace(
        _now(use, live),
        uses=tuple(kinds.values()),
        log=log,
        values_in_log=live.values - live.below_compaction,
        values_compacted=live.below_compaction,
    )


def _after_estimated(use: StoreUse, live: LiveCount) -> Holding:
    """A compaction of everything that is alive, a state that shares its index, and the newest object of the log."""
    small_bytes = live.value_bytes - live.large_bytes
    versions = round((live.row_bytes + _PLACE_BYTES * live.values) * _ROW_SHARE)
    values = round(_VALUE_ROW_BYTES * live.values * _ROW_SHARE)
    files = max(1, -(-live.rows // _ROWS_A_FILE))
    log = use.log[-1:]
    kinds = dict(use.uses) | {
        "log": KindUse(kind="log", objects=len(log), bytes=sum(one.size for one in log)),
        "blob_files": KindUse(kind="blob_files", objects=-(-small_bytes // _BLOB_FILE_BYTES), bytes=small_bytes),
        "data": KindUse(kind="data", objects=live.large_values, bytes=live.large_bytes),
        "index": KindUse(kind="index", objects=2 * files + 1, bytes=versions + values + _STATE_BYTES),
        "states": KindUse(kind="states", objects=1, bytes=_STATE_BYTES),
        "metadata": _fewer(use.uses["metadata"], len(use.log) - len(log)),
        "garbage": KindUse(kind="garbage"),
    }
    return Holding(
        uses=tuple(kinds.values()),
        log=log,
        state_bytes=_STATE_BYTES,
        state_parts=(versions // files,) * files,
        state_lsn=use.manifest.high_water_lsn + 1,
        values_compacted=live.values,
        value_bytes=live.value_bytes,
    )


def _fewer(use: KindUse, gone: int) -> KindUse:
    """Without this many objects of average size, whose descriptors are deleted."""
    left = max(0, use.objects - gone)
    return KindUse(kind=use.kind, objects=left, bytes=use.bytes * left // max(1, use.objects))
