"""The job `cost`: what an engine costs in its store and in its replicas, as it is and after compaction.

    before compaction        all of the log as it was shipped, the owner's own state  where there is a compaction
    now                      what is there
    after compaction and gc  what the compaction and the newest states need           counted where there is one,
                                                                                      else estimated from what is alive
Invariants
- Nothing is changed, and no value is read: objects are listed, rows of the newest state and of the log behind it are
  counted.
- Every number of the model can be told from the report: objects and bytes by kind, requests, prices.
- An estimate is told as one. What is not counted is in docs/guides/engine-pipeline.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.raw_log import droppable_below_lsn
from tidelog.errors import DataError
from tidelog.pipeline.engine_jobs.cost_live import LiveCount, LiveCounter, count_live
from tidelog.pipeline.engine_jobs.cost_model import Holding, Kind, KindUse, LogObject, Scenario, scenario
from tidelog.pipeline.engine_jobs.cost_prices import PriceList, Prices
from tidelog.pipeline.engine_jobs.cost_store import StoreUse, count_store
from tidelog.pipeline.engine_jobs.digest_sources import plan_log, sources_of
from tidelog.pipeline.engines.place import EngineRoot
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, ignore_progress
from tidelog.tier.stores import canonical_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LARGE_BYTES = 1 << 20
_PACK_BYTES = 64 << 20
_ROWS_A_FILE = 250_000
_STATE_BYTES = 1024
_PLACE_BYTES = 18
_BODY_ROW_BYTES = 30
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


def engine_cost(
    spark: SparkSession,
    root: EngineRoot,
    prices: PriceList | None = None,
    *,
    replicas: Sequence[str] | None = None,
    on_progress: OnProgress = ignore_progress,
) -> CostReport:
    """What an engine costs at given prices. Replicas are those of its settings unless others are named by URL."""
    began = time.monotonic()
    urls = root.load().storage_engine.replicas if replicas is None else replicas
    roots = [root, *(EngineRoot(url, url, root.name, root.settings) for url in map(canonical_url, urls))]
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
        seconds=round(time.monotonic() - began, 3),
    )


def _notes(use: StoreUse) -> tuple[str, ...]:
    if use.compaction is None:
        return ("there is no compaction yet: what would be after one is estimated from what is alive",)
    return ()


def _live(spark: SparkSession, root: EngineRoot, use: StoreUse) -> LiveCount:
    """From the newest source and the log behind it."""
    with root.open() as opened:
        sources = sources_of(opened).found
        if not sources:
            raise DataError(
                "no state in the store can be read, and its log does not begin with LSN 1",
                operation="cost",
                hint="`tidelog pipeline verify --engine` lists all that is wrong",
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
    kinds = dict(use.uses) | {kind: KindUse(kind=kind) for kind in _compacted_kinds()}
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


def _compacted_kinds() -> tuple[Kind, ...]:
    return ("packs", "data", "index", "garbage")


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
    bodies = round(_BODY_ROW_BYTES * live.values * _ROW_SHARE)
    files = max(1, -(-live.rows // _ROWS_A_FILE))
    log = use.log[-1:]
    kinds = dict(use.uses) | {
        "log": KindUse(kind="log", objects=len(log), bytes=sum(one.size for one in log)),
        "packs": KindUse(kind="packs", objects=-(-small_bytes // _PACK_BYTES), bytes=small_bytes),
        "data": KindUse(kind="data", objects=live.large_values, bytes=live.large_bytes),
        "index": KindUse(kind="index", objects=2 * files + 1, bytes=versions + bodies + _STATE_BYTES),
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
    """Without so many objects of the average size: descriptors of objects that went."""
    left = max(0, use.objects - gone)
    return KindUse(kind=use.kind, objects=left, bytes=use.bytes * left // max(1, use.objects))
