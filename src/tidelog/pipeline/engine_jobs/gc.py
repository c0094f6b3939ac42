"""The job `gc` over an engine: what in its store nobody needs any more. Plan, show, apply.

    raw log      objects below what the compaction and every listed state need (`engine/raw_log.py`)
    the log      interrupted uploads and deletions, objects that engine.compact() replaced (`tier/sweep.py`)
    compacted    packs, index files, roots and data files of compactions that are over (`gc_rules.py`)
    states       those beyond the two newest, and files of states that nobody lists

Listing, and comparing data files with the body index, is the work of Spark's workers. Nothing is removed unless that is
asked for, with the plan that was made just now or with one that was kept as a file and looked at by somebody.

Invariants
- Nothing that the manifest, a listed or pinned state, the published root or the catalog leads to is removed.
- It claims nothing: owners, restores and compactions go on beside it. What is to go is looked at again right before.
- Killed anywhere it has removed some of what is in the plan; the same plan can be carried out again.
- The proof is read back: everything that is referenced when it has ended, against what is in the store then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.engine.publishing import change_manifest, move_history_start
from tidelog.engine.raw_log import drop_raw_log
from tidelog.errors import InputError
from tidelog.pipeline.engine_jobs.gc_look import Look, look_at
from tidelog.pipeline.engine_jobs.gc_plan import EngineGcPlan
from tidelog.pipeline.engine_jobs.gc_rules import Garbage
from tidelog.pipeline.engine_jobs.gc_states import forget_gone, leaving_of, planned_states
from tidelog.pipeline.engine_jobs.gc_work import Deleted, DeleteWork, delete_garbage
from tidelog.pipeline.engines.place import EngineRoot, OpenedEngine
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Problem, counted_progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof
from tidelog.pipeline.work import run_on_workers
from tidelog.tier.replacement_cleanup import DEFAULT_GRACE_SECONDS, apply_cleanup
from tidelog.tier.sweep import apply_sweep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KEYS_A_TASK = 1000
# These go by the rules of `gc_rules.py`; the others have ways of their own.
_BY_RULE = ("state", "state part", "pack", "index", "root", "data file")


class EngineGcReport(JobReport, frozen=True, kw_only=True):
    """What was found, and what was removed if that was asked for. `kept` is what turned out otherwise, and why."""

    found: tuple[Garbage, ...] = ()
    removable_objects: int = 0
    removable_bytes: int = 0
    is_applied: bool = False
    removed_objects: int = 0
    removed_bytes: int = 0
    kept: tuple[tuple[str, str], ...] = ()
    log_start_lsn: int = 0
    history_start_seq: int = 0


def plan_engine_gc(
    spark: SparkSession,
    root: EngineRoot,
    *,
    keep_from: int | None = None,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> tuple[EngineGcPlan, EngineGcReport]:
    """Looks at everything the engine has in its store, and changes nothing.

    With `keep_from` history is to begin at that seq: versions that no later state needs go with the next compaction.
    """
    began, now_us = time.monotonic(), (clock or SystemClock()).now_us()
    with root.open() as opened:
        if keep_from is not None and keep_from > opened.manifest.high_water_mark:
            raise InputError(
                f"history cannot begin at seq {keep_from}: the last entry is {opened.manifest.high_water_mark}"
            )
        look = look_at(spark, root.place, opened, now_us, grace_seconds, on_progress)
    found = (*_history(look, keep_from), *look.found)
    plan = EngineGcPlan(
        store=root.store_url,
        engine=root.name,
        made_us=now_us,
        generation=look.references.generation,
        grace_seconds=grace_seconds,
        drop_below_lsn=look.drop_below_lsn,
        keep_from=keep_from,
        found=tuple(found),
        sweep=look.sweep,
        cleanup=look.cleanup,
    )
    return plan, _report(plan, look, time.monotonic() - began)


def _history(look: Look, keep_from: int | None) -> Iterator[Garbage]:
    if keep_from is not None and keep_from > look.manifest.history_start_seq:
        why = f"history begins at seq {look.manifest.history_start_seq} now; older versions go with the next compaction"
        yield Garbage(kind="history", action="move", key=f"seq {keep_from}", why=why)


def apply_engine_gc(
    spark: SparkSession,
    root: EngineRoot,
    plan: EngineGcPlan,
    *,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> EngineGcReport:
    """Carries out a plan: what it names and what is garbage at this moment too."""
    began, clock = time.monotonic(), clock or SystemClock()
    if (plan.store, plan.engine) != (root.store_url, root.name):
        raise InputError(
            f"this plan is for the engine {plan.engine} in {plan.store}, not for {root.name} in {root.store_url}",
            hint="Make one for this engine",
        )
    with root.open(read_only=False) as opened:
        carrying_out = _CarryingOut(spark, root, opened, plan, clock, on_progress)
        done = carrying_out.run()
        after = look_at(spark, root.place, opened, clock.now_us(), plan.grace_seconds, on_progress)
    return _report(plan, after, time.monotonic() - began, done)


class _CarryingOut:
    """One plan that is carried out."""

    def __init__(
        self,
        spark: SparkSession,
        root: EngineRoot,
        opened: OpenedEngine,
        plan: EngineGcPlan,
        clock: Clock,
        on_progress: OnProgress,
    ) -> None:
        self._spark = spark
        self._root = root
        self._opened = opened
        self._plan = plan
        self._clock = clock
        self._on_progress = on_progress

    def run(self) -> Deleted:
        """In this order: history, states, the log, and then what nothing leads to any more."""
        opened, plan = self._opened, self._plan
        if plan.keep_from is not None:
            move_history_start(opened.metadata, opened.keys, self._clock, plan.keep_from)
        self._let_states_go()
        look = look_at(
            self._spark, self._root.place, opened, self._clock.now_us(), plan.grace_seconds, self._on_progress
        )
        removed = [*self._drop_log(look), *self._remove_by_rule(look)]
        change_manifest(opened.metadata, opened.keys, self._clock, lambda one: forget_gone(one, opened.objects))
        return Deleted(
            keys=tuple(key for one in removed for key in one.keys),
            bytes=sum(one.bytes for one in removed),
            kept=tuple(kept for one in removed for kept in one.kept),
        )

    def _let_states_go(self) -> None:
        """First written down, then deleted with the rest: a state that somebody has pinned meanwhile stays listed."""
        planned = planned_states(self._plan)
        opened, now_us = self._opened, self._clock.now_us()
        if planned:
            change_manifest(opened.metadata, opened.keys, self._clock, lambda one: leaving_of(one, planned, now_us))

    def _drop_log(self, look: Look) -> Iterator[Deleted]:
        opened, plan = self._opened, self._plan
        cleanup = apply_cleanup(plan.cleanup, opened.catalog, opened.objects)
        yield Deleted(keys=cleanup.objects, bytes=cleanup.bytes, kept=cleanup.skipped)
        # Where nothing is to be dropped it finishes what was cut off.
        below_lsn = min(plan.drop_below_lsn, look.drop_below_lsn)
        gone = drop_raw_log(opened.objects, opened.metadata, opened.keys, below_lsn, clock=self._clock)
        yield Deleted(keys=gone.keys, bytes=gone.bytes)
        # What is below the start has just gone with its descriptors, which a sweep leaves to owners.
        sweep = msgspec.structs.replace(plan.sweep, below_start=(), left_over=())
        swept = apply_sweep(sweep, opened.catalog, opened.objects)
        keys = (*swept.objects, *swept.unfinished, *swept.staged)
        yield Deleted(keys=keys, bytes=swept.bytes, kept=swept.skipped)

    def _remove_by_rule(self, look: Look) -> Iterator[Deleted]:
        planned = {one.key for one in self._plan.removable if one.kind in (*_BY_RULE, "unfinished")}
        uploads = [one for one in look.unfinished if one.key in planned]
        self._opened.objects.delete_unfinished(uploads)
        yield Deleted(keys=tuple(one.key for one in uploads), bytes=sum(one.size for one in uploads))
        fresh = {one.key: one for one in look.found if one.kind in _BY_RULE}
        yield Deleted(
            kept=tuple((key, fresh[key].why) for key in sorted(planned & set(fresh)) if fresh[key].action != "remove")
        )
        doomed = [one for one in fresh.values() if one.action == "remove" and one.key in planned]
        yield from self._delete(doomed, look.references.generation)

    def _delete(self, doomed: Sequence[Garbage], generation: int) -> Iterator[Deleted]:
        chunks = [doomed[at : at + _KEYS_A_TASK] for at in range(0, len(doomed), _KEYS_A_TASK)]
        works = [
            DeleteWork(
                place=self._root.place,
                objects=tuple((one.key, one.bytes or 0) for one in chunk),
                generation=generation,
            )
            for chunk in chunks
        ]
        results = run_on_workers(self._spark, delete_garbage, works)
        yield from counted_progress(results, "removing", len(works), self._on_progress)


def _report(plan: EngineGcPlan, look: Look, seconds: float, done: Deleted | None = None) -> EngineGcReport:
    found = plan.found if done is None else (*plan.found, *(one for one in look.found if one.is_wrong))
    wrong = {one.key: one for one in look.found if one.is_wrong}.values()
    proof = Proof(subject=f"what the engine {plan.engine} refers to", went_in=look.referenced, came_out=look.there)
    return EngineGcReport(
        job="gc",
        proofs=(proof,),
        problems=(
            *(Problem(topic=plan.engine, reason=one.why, place=one.key) for one in wrong),
            *(Problem(topic=plan.engine, reason=reason) for reason in look.references.problems),
        ),
        notes=tuple(_notes(look)),
        seconds=round(seconds, 3),
        found=tuple(dict.fromkeys(found)),
        removable_objects=len(plan.removable),
        removable_bytes=sum(one.bytes or 0 for one in plan.removable),
        is_applied=done is not None,
        removed_objects=0 if done is None else len(done.keys),
        removed_bytes=0 if done is None else done.bytes,
        kept=() if done is None else done.kept,
        log_start_lsn=look.sweep.start_offset,
        history_start_seq=look.manifest.history_start_seq,
    )


def _notes(look: Look) -> Iterator[str]:
    if look.manifest.compacted is None:
        yield "there is no compaction yet: `tidelog pipeline compact --engine` lets the log go"
    if look.cleanup.waiting_objects:
        yield f"{look.cleanup.waiting_objects} replaced objects of the log have not waited long enough yet"
    recent = [one for one in look.found if one.action == "keep" and one.why.startswith("superseded")]
    if recent:
        yield f"{len(recent)} objects were superseded less than the time of grace ago"
