"""The job `gc`: what in a store belongs to nothing any more. Plan, show, apply.

    objects of interrupted uploads, and uploads that never ended        tier/sweep.py
    what a retention that was interrupted left below the start          tier/sweep.py
    rows that a Spark job has staged and never committed, after a day   tier/sweep.py
    objects that a compaction has replaced, after their time of grace   tier/replacement_cleanup.py

Workers list the objects of the topics, each holds those of one topic against its catalog. Nothing is removed unless it
is asked for, with the plan that was made just now or with one that was kept as a file and looked at by somebody.

Invariants
- Nothing that the catalog names is removed, and nothing that may be the only copy of something.
- Killed anywhere it has removed some of what is in the plan; the same plan can be carried out again.
- A topic that cannot be looked at is a problem of the report; the others are done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tidelog.clock import Clock, SystemClock
from tidelog.errors import InputError
from tidelog.pipeline.jobs.choosing import cataloged_topics, chosen_topics, notes_on, store_of
from tidelog.pipeline.jobs.gc_plan import Found, GcPlan, TopicGarbage, found_in
from tidelog.pipeline.jobs.gc_topic import FindWork, Removed, RemoveWork, find_garbage, remove_garbage
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Problem, counted_progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof
from tidelog.pipeline.root import Root
from tidelog.pipeline.work import run_on_workers
from tidelog.tier.rebuild import topics_in
from tidelog.tier.replacement_cleanup import DEFAULT_GRACE_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.topics.storage import LogDirectory

_WITHOUT_STORE = "Without one nothing is left over: there is nothing to do"
# A small topic is looked at sooner than a task is started.
_TOPICS_A_TASK = 16
_WRONG = {"LOST": "the object is gone", "DAMAGED": "the object has another size than its descriptor says"}


class GcReport(JobReport, frozen=True, kw_only=True):
    """What was found, and what was removed if that was asked for. `kept` is what turned out otherwise, and why."""

    found: tuple[Found, ...] = ()
    removable_objects: int = 0
    removable_bytes: int = 0
    is_applied: bool = False
    removed_objects: int = 0
    removed_bytes: int = 0
    kept: tuple[tuple[str, str], ...] = ()


def plan_gc(
    spark: SparkSession,
    root: Root,
    topics: Sequence[str] | None = None,
    *,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> tuple[GcPlan, GcReport]:
    """Looks at these topics, all by default, and changes nothing."""
    began, now_us = time.monotonic(), (clock or SystemClock()).now_us()
    with root.open() as log:
        place = store_of(root, log, _WITHOUT_STORE)
        names = chosen_topics(cataloged_topics(log), topics, root.location)
        notes = (*notes_on(names, root.location), *_without_catalog(log))
    works = [FindWork(place=place, topic=name, now_us=now_us, grace_seconds=grace_seconds) for name in names]
    results = run_on_workers(spark, find_garbage, works, items_per_task=max(1, min(_TOPICS_A_TASK, len(works) // 16)))
    looked = sorted(counted_progress(results, "looking at topics", len(works), on_progress), key=lambda one: one.topic)
    found = tuple(one.garbage for one in looked if one.garbage is not None)
    plan = GcPlan(store=place.store_url, made_us=now_us, topics=found)
    proofs = tuple(Proof(subject=one.topic, went_in=one.catalog) for one in plan.topics)
    problems = tuple(Problem(topic=one.topic, reason=one.problem) for one in looked if one.problem is not None)
    return plan, _report(plan, proofs, problems, (*notes, *_notes(plan)), time.monotonic() - began)


def apply_gc(spark: SparkSession, root: Root, plan: GcPlan, *, on_progress: OnProgress = ignore_progress) -> GcReport:
    """Carries out a plan."""
    began = time.monotonic()
    with root.open() as log:
        place = store_of(root, log, _WITHOUT_STORE)
    if plan.store != place.store_url:
        raise InputError(f"this plan is for {plan.store}, not for {place.store_url}", hint="Make one for this root")
    works = [RemoveWork(place=place, garbage=one) for one in plan.topics if _has_work(one)]
    results = run_on_workers(spark, remove_garbage, works)
    done = list(counted_progress(results, "removing", len(works), on_progress))
    proofs = tuple(
        Proof(subject=one.topic, went_in=one.before, came_out=one.after) for one in done if one.before is not None
    )
    problems = tuple(Problem(topic=one.topic, reason=one.problem) for one in done if one.problem is not None)
    return _report(plan, proofs, problems, tuple(_notes(plan)), time.monotonic() - began, done)


def _without_catalog(log: LogDirectory) -> Iterator[str]:
    """Objects of topics that no catalog knows may be all that is left of them: they are named, and left alone."""
    assert log.tier is not None, "there is a store"
    found = {"/".join(topic) for topic in topics_in(log.tier.objects)}
    for name in sorted(found - set(cataloged_topics(log))):
        yield f"left out: the store has objects of {name}, and there is no catalog of it"


def _notes(plan: GcPlan) -> Iterator[str]:
    for one in plan.topics:
        if one.sweep.is_deleted:
            yield f"{one.topic} is being deleted: whoever opens it finishes that"
        if one.cleanup.waiting_objects:
            yield f"{one.topic}: {one.cleanup.waiting_objects} replaced objects have not waited long enough yet"


def _has_work(one: TopicGarbage) -> bool:
    return not (one.sweep.is_empty and one.cleanup.is_empty)


def _report(
    plan: GcPlan,
    proofs: tuple[Proof, ...],
    problems: tuple[Problem, ...],
    notes: tuple[str, ...],
    seconds: float,
    removed: Sequence[Removed] | None = None,
) -> GcReport:
    found = tuple(found_in(plan))
    removable = [one for one in found if one.action == "remove"]
    wrong = (Problem(topic=one.topic, reason=_WRONG[one.action], place=one.object) for one in found if one.is_wrong)
    done = removed or ()
    swept = [
        key
        for one in done
        for key in (*one.sweep.objects, *one.sweep.unfinished, *one.sweep.staged, *one.cleanup.objects)
    ]
    return GcReport(
        job="gc",
        proofs=proofs,
        problems=(*problems, *wrong),
        notes=notes,
        seconds=round(seconds, 3),
        found=found,
        removable_objects=len(removable),
        removable_bytes=sum(one.bytes or 0 for one in removable),
        is_applied=removed is not None,
        removed_objects=len(swept),
        removed_bytes=sum(one.sweep.bytes + one.cleanup.bytes for one in done),
        kept=tuple(skip for one in done for skip in (*one.sweep.skipped, *one.cleanup.skipped)),
    )
