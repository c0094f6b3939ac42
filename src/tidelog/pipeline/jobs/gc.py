"""The job `gc`: collects the garbage of all topics in a store, or of an engine, by the library's rules.

`cold/gc.py` and `engine/cold/gc.py` say what is garbage and delete it. Spark does what one machine should not: its
workers take a topic each, and compare the names of an engine's data files with the index that names them.

Invariants
- Nothing is removed without a plan: the one that was just made, or one that was saved to a file and reviewed.
- A plan names its store, and is applied only there. A plan from a file can name only objects of its own topics or
  engine: one that was edited by hand, or made for another, deletes nothing of others.
- A job killed at any point has removed some of the objects in the plan; the same plan can be applied again, and tells
  only of what it still found.
- A topic that cannot be read is a finding of the report; the others are processed.
- What is published, and what an engine refers to, is compared with what is in the store at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.codec import decode_document, encode_document
from tidelog.cold.gc import DEFAULT_GRACE_SECONDS, Action, Candidate, Plan, Reason, Report, total_bytes
from tidelog.cold.rebuild import topics_in
from tidelog.engine.cold.gc import ComparedDataFiles, EngineCollector
from tidelog.engine.cold.manifest import move_history_start
from tidelog.engine.mvcc.cells import OBJECTS, parse
from tidelog.engine.sst.sorted_index import Compaction
from tidelog.engine.sst.sstable import RowPart
from tidelog.errors import DataError, InputError, NotFoundError, TidelogError
from tidelog.files import LocalFiles, explained
from tidelog.findings import Finding
from tidelog.log.frame import crc32
from tidelog.pipeline.address import EngineRoot, OpenedEngine, Root
from tidelog.pipeline.jobs.gc_tasks import NAMES, Collected, NameRange, TopicWork, collect_topic, list_names, read_names
from tidelog.pipeline.jobs.job import (
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    Totals,
    counted_progress,
    ignore_progress,
    logged,
    sum_text,
)
from tidelog.pipeline.jobs.tally import cataloged_topics, chosen_logs, notes_on, store_of
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.tasks import rows_of_items
from tidelog.pipeline.work import run_on_workers
from tidelog.store.keys import MAX_NUMBER, EngineKeys, TopicKeys, escape
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidelog.topics.directory import LogDirectory

_WITHOUT_STORE = "Without one nothing is left over: there is nothing to do"
# A small topic is looked at sooner than a task is started.
_TOPICS_A_TASK = 16
_MODULUS = 1 << 64
_KIND = "gc-plan"
_VERSION = 2


# Plan and report


class GcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done about topics of a store, or about an engine. `keep_from` is where its history is to begin."""

    store: str
    made_us: int
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    engine: str | None = None
    keep_from: int | None = None
    plans: tuple[Plan, ...] = ()

    @property
    def found(self) -> tuple[Candidate, ...]:
        """Everything that was found."""
        return tuple(one for plan in self.plans for one in plan.found)

    @property
    def removable(self) -> tuple[Candidate, ...]:
        """What goes when it is applied."""
        return tuple(one for plan in self.plans for one in plan.removable)


class Found(msgspec.Struct, frozen=True):
    """One thing that was found, to be shown: `topic` is the topic or the engine. `action` is remove or removed, keep,
    owner (its owner removes it), move, LOST or DAMAGED; `reason` is a word for programs, and `why` says it.
    """

    topic: str
    action: Action
    kind: str
    reason: Reason
    object: str
    bytes: int | None
    why: str


def _shown(subject: str, found: Iterable[Candidate]) -> Iterator[Found]:
    return (Found(subject, one.action, one.kind, one.reason, one.key, one.bytes, one.why) for one in found)


class GcReport(JobReport, frozen=True, kw_only=True):
    """What was found, and what became of it if the plan was applied: `kept` is what was to go and stayed, and why."""

    found: tuple[Found, ...] = ()
    removable_objects: int = 0
    removable_bytes: int = 0
    is_applied: bool = False
    removed_objects: int = 0
    removed_bytes: int = 0
    kept: tuple[Found, ...] = ()


class EngineGcReport(GcReport, frozen=True, kw_only=True):
    """Of an engine also where its log and its history begin now."""

    log_start_lsn: int = 0
    history_start_seq: int = 0


def write_plan(path: Path, plan: GcPlan) -> None:
    """Saves a plan to a file."""
    with explained("gc", path):
        LocalFiles().write_atomically(path, encode_document(_KIND, _VERSION, plan))


def read_plan(path: Path) -> GcPlan:
    """A plan from a file; DataError if it is none, or names what it has no business with."""
    hint = "Make one: `tidelog pipeline gc --plan FILE`"
    if not path.exists():
        raise NotFoundError("there is no plan", path=path, hint=hint)
    with explained("gc", path):
        data = LocalFiles().read(path.resolve())
    try:
        plan = decode_document(_KIND, _VERSION, data, GcPlan)
        for one in plan.plans:
            _check(plan, one)
    except TidelogError as error:
        raise DataError(f"this is not a plan of gc: {error.message}", path=path, hint=hint) from error
    return plan


def _check(plan: GcPlan, one: Plan) -> None:
    if plan.engine is None:
        name = parse_topic_name(one.subject)
        keys = TopicKeys(name.namespace, name.name)
        prefixes: tuple[str, ...] = (keys.objects_prefix, keys.staging_prefix)
    else:
        keys = engine = EngineKeys(plan.engine)
        prefixes = (engine.objects_prefix, engine.blobs_prefix, engine.index_prefix)
        prefixes += (engine.data_prefix, engine.checkpoints_prefix)
    for found in one.removable:
        if not found.key.startswith(prefixes) or ".." in found.key:
            raise DataError(f"{found.key} is not an object of the {keys.noun} {one.subject}")


# Topics


@logged
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
    now_us = (clock or SystemClock()).now_us()
    with root.open() as log:
        place = store_of(root, log, _WITHOUT_STORE)
        names = chosen_logs(log, cataloged_topics(log), topics, root.location)
        notes = (*notes_on(names, root.location), *_without_catalog(log))
    works = [TopicWork(place=place, topic=name, now_us=now_us, grace_seconds=grace_seconds) for name in names]
    per_task = max(1, min(_TOPICS_A_TASK, len(works) // 16))
    results = run_on_workers(spark, collect_topic, works, items_per_task=per_task)
    done = sorted(counted_progress(results, "looking at topics", len(works), on_progress), key=lambda one: one.subject)
    plans = tuple(one.plan for one in done if one.plan is not None)
    plan = GcPlan(store=place.store_url, made_us=now_us, grace_seconds=grace_seconds, plans=plans)
    return plan, GcReport(**_report(plan, done, notes=notes))


@logged
def apply_gc(
    spark: SparkSession,
    root: Root,
    plan: GcPlan,
    *,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> GcReport:
    """Carries out a plan."""
    now_us = (clock or SystemClock()).now_us()
    with root.open() as log:
        place = store_of(root, log, _WITHOUT_STORE)
    _refuse_other(plan, place.store_url, None)
    works = [
        TopicWork(place=place, topic=one.subject, now_us=now_us, grace_seconds=plan.grace_seconds, plan=one)
        for one in plan.plans
        if not one.is_empty
    ]
    results = run_on_workers(spark, collect_topic, works)
    done = list(counted_progress(results, "removing", len(works), on_progress))
    return GcReport(**_report(plan, done, is_applied=True))


def _refuse_other(plan: GcPlan, store_url: str, engine: str | None) -> None:
    if (plan.store, plan.engine) != (store_url, engine):
        what = "topics" if plan.engine is None else f"the engine {plan.engine}"
        wanted = "topics" if engine is None else f"the engine {engine}"
        raise InputError(
            f"this plan is for {what} in {plan.store}, not for {wanted} in {store_url}", hint="Make one for this place"
        )


def _without_catalog(log: LogDirectory) -> Iterator[str]:
    """Objects of topics that no catalog knows may be all that is left of them: they are named, and left alone."""
    assert log._tier is not None, "there is a store"
    found = {"/".join(topic) for topic in topics_in(log._tier.objects)}
    for name in sorted(found - set(cataloged_topics(log))):
        yield f"left out: the store has objects of {name}, and there is no catalog of it"


def _report(
    plan: GcPlan,
    done: Sequence[Collected],
    *,
    notes: Iterable[str] = (),
    problems: Iterable[str] = (),
    is_applied: bool = False,
) -> dict[str, Any]:
    """The fields of a report, of topics or of an engine."""
    by_subject = {one.subject: one for one in done}
    found = [(one.subject, _found(one, by_subject.get(one.subject), is_applied)) for one in plan.plans]
    shown = [each for subject, candidates in found for each in _shown(subject, candidates)]
    removed = [one for each in done for one in each.report.removed]
    kept = {one.key: one for each in done for one in each.report.kept}
    removable = (*removed, *kept.values()) if is_applied else plan.removable
    referrer = None if plan.engine is None else f"what the engine {plan.engine} refers to"
    told = [(one.subject, one.problem) for one in done if one.problem is not None]
    told += [(plan.engine or "", problem) for problem in problems]
    return {
        "job": "gc",
        "reconciliations": tuple(
            Reconciliation(subject=referrer or one.subject, went_in=one.before, came_out=one.after)
            for one in done
            if one.before is not None
        ),
        "findings": (
            *(Finding(subject=subject, message=problem) for subject, problem in told),
            *(Finding(subject=one.topic, message=one.why, path=one.object) for one in shown if one.action.isupper()),
        ),
        "notes": (
            *notes,
            *(note for one in plan.plans for note in _notes(one, dict(found)[one.subject])),
            *(_why_nothing(plan) if not removable else ()),
        ),
        "found": tuple(shown),
        "removable_objects": len(removable),
        "removable_bytes": total_bytes(removable),
        "is_applied": is_applied,
        "removed_objects": len(removed),
        "removed_bytes": total_bytes(removed),
        "kept": tuple(one for one in shown if one.object in kept),
    }


def _found(planned: Plan, done: Collected | None, is_applied: bool) -> tuple[Candidate, ...]:
    """What was found, with what became of it; and what is wrong at the end."""
    if not is_applied:
        return planned.found
    now = planned if done is None or done.plan is None else done.plan
    after = planned.after(Report() if done is None else done.report)
    return (*(one for one in after if not one.is_wrong), *(one for one in now.found if one.is_wrong))


def _why_nothing(plan: GcPlan) -> Iterator[str]:
    """Why there is nothing to remove."""
    left = Counter(str(one.reason.value) for one in plan.found if not one.is_wrong)
    if left:
        yield f"what was found stays: {', '.join(f'{count} {reason}' for reason, count in sorted(left.items()))}"
    elif plan.plans:
        what = "of the engine" if plan.engine is not None else f"of {len(plan.plans)} topics"
        yield f"everything {what} in the store is in use: a catalog, a compaction or a snapshot names it"


def _notes(plan: Plan, found: Iterable[Candidate]) -> Iterator[str]:
    if plan.is_deleted:
        yield f"{plan.subject} is being deleted: opening it finishes that"
    recent = sum(one.reason is Reason.RECENT for one in found)
    if recent:
        yield f"{plan.subject}: {recent} superseded objects have not waited long enough yet (--grace)"


# An engine


@logged
def plan_engine_gc(
    spark: SparkSession,
    root: EngineRoot,
    *,
    keep_from: int | None = None,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> tuple[GcPlan, EngineGcReport]:
    """Looks at everything the engine has in its store, and changes nothing.

    With `keep_from` history is to begin at that seq: versions that no later state needs go with the next compaction.
    """
    clock = clock or SystemClock()
    with root.open() as opened:
        if keep_from is not None and keep_from > opened.manifest.high_water_mark:
            raise InputError(
                f"history cannot begin at seq {keep_from}: the last entry is {opened.manifest.high_water_mark}"
            )
        collector = _collector(spark, root, opened, clock, grace_seconds, on_progress)
        found = collector.plan()
        if keep_from is not None and keep_from > collector.marked.published.history_start_seq:
            move = Candidate(kind="history", action="move", reason=Reason.HISTORY, key=f"seq {keep_from}")
            found = msgspec.structs.replace(found, found=(move, *found.found))
        plan = GcPlan(
            store=root.store_url,
            made_us=collector.now_us,
            grace_seconds=grace_seconds,
            engine=root.name,
            keep_from=keep_from,
            plans=(found,),
        )
        return plan, _engine_report(plan, found, collector)


@logged
def apply_engine_gc(
    spark: SparkSession,
    root: EngineRoot,
    plan: GcPlan,
    *,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> EngineGcReport:
    """Carries out a plan: what it names and what is garbage at this moment too."""
    clock = clock or SystemClock()
    _refuse_other(plan, root.store_url, root.name)
    with root.open(read_only=False) as opened:
        if plan.keep_from is not None:
            move_history_start(opened.metadata, opened.keys, clock, plan.keep_from)
        collector = _collector(spark, root, opened, clock, plan.grace_seconds, on_progress)
        (planned,) = plan.plans
        report = collector.apply(planned)
        after = _collector(spark, root, opened, clock, plan.grace_seconds, on_progress)
        return _engine_report(plan, after.plan(), after, report)


def _collector(
    spark: SparkSession,
    root: EngineRoot,
    opened: OpenedEngine,
    clock: Clock,
    grace_seconds: float,
    on_progress: OnProgress,
) -> EngineCollector:
    def compare(compaction: Compaction | None) -> ComparedDataFiles:
        on_progress(Progress("comparing data files", 0, 1))
        found = compare_data_files(spark, root.place, compaction)
        on_progress(Progress("comparing data files", 1, 1))
        return found

    return EngineCollector(opened.catalog, opened.objects, opened.keys, clock, compare, grace_seconds=grace_seconds)


def _engine_report(plan: GcPlan, now: Plan, collector: EngineCollector, report: Report | None = None) -> EngineGcReport:
    """`now` is what is found at this moment: after a plan was applied, what is still wrong."""
    marked = collector.marked
    referenced, there = _totals(collector, now)
    done = Collected(subject=now.subject, plan=now, report=report or Report(), before=referenced, after=there)
    notes = []
    if marked.published.compacted is None:
        notes.append("there is no compaction yet: `tidelog pipeline compact --engine` lets the log go")
    fields = _report(plan, [done], notes=notes, problems=marked.references.problems, is_applied=report is not None)
    start_seq = marked.published.history_start_seq
    return EngineGcReport(**fields, log_start_lsn=now.start_offset, history_start_seq=start_seq)


def _totals(collector: EngineCollector, now: Plan) -> tuple[Totals, Totals]:
    """All that is referenced, and all of that which is in the store."""
    marked, catalog = collector.marked, collector.catalog
    wrong = {one.key for one in now.found if one.is_wrong}
    log = [(catalog.keys.object(one.name), one.size) for one in catalog.between(now.start_offset, MAX_NUMBER)]
    named = [*marked.references.sizes.items(), *log]
    there = [(key, size) for key, size in named if key not in wrong]
    return (
        _total(named, marked.data.named, marked.data.named_sum),
        _total(there, marked.data.there, marked.data.there_sum),
    )


def _total(objects: Sequence[tuple[str, int]], others: int, others_sum: int) -> Totals:
    digest = others_sum + sum(crc32(f"{key} {size}".encode()) for key, size in objects)
    return Totals(messages=len(objects) + others, checksum=sum_text("objects", digest), unit="objects")


# Data files: names in the store and names in the index, compared by Spark. Neither is gathered on one machine


def compare_data_files(spark: SparkSession, place: EngineLocation, root: Compaction | None) -> ComparedDataFiles:
    """Lists all data files and holds them against the value index of a root; without one, against nothing.

    Only mismatches are sent to the driver; of the rest a count and a sum.
    """
    parts = () if root is None else root.values
    ranges = name_ranges(place.keys, () if root is None else root.versions)
    listed = rows_of_items(spark, partial(list_names, place), ranges, NAMES).withColumnRenamed("size", "found_bytes")
    if not parts:
        return ComparedDataFiles({row.key: row.found_bytes for row in listed.collect()})
    named = rows_of_items(spark, partial(read_names, place), parts, NAMES).withColumnRenamed("size", "named_bytes")
    return _compared(listed, named.distinct())


def _compared(listed: DataFrame, named: DataFrame) -> ComparedDataFiles:
    from pyspark.sql import functions as sql

    both = listed.join(named, "key", "full_outer").persist()
    try:
        is_there = sql.col("found_bytes").eqNullSafe(sql.col("named_bytes"))
        is_named = sql.col("named_bytes").isNotNull()
        hashed = sql.xxhash64("key", "named_bytes").cast("decimal(20,0)")
        sums = both.agg(
            sql.count_if(is_named).alias("named"),
            sql.sum("named_bytes").alias("named_bytes"),
            sql.sum(sql.when(is_named, hashed)).alias("named_sum"),
            sql.count_if(is_there).alias("there"),
            sql.sum(sql.when(is_there, hashed)).alias("there_sum"),
        ).first()
        odd = both.where(~is_there).orderBy("key").collect()
    finally:
        both.unpersist()
    assert sums is not None
    return ComparedDataFiles(
        unnamed={row.key: row.found_bytes for row in odd if row.named_bytes is None},
        missing=[(row.key, row.named_bytes, row.found_bytes) for row in odd if row.named_bytes is not None],
        named=sums.named,
        named_bytes=int(sums.named_bytes or 0),
        named_sum=int(sums.named_sum or 0) % _MODULUS,
        there=sums.there,
        there_sum=int(sums.there_sum or 0) % _MODULUS,
    )


def name_ranges(keys: EngineKeys, versions: tuple[RowPart, ...]) -> tuple[NameRange, ...]:
    """Names cut about where files of the version index begin: each has a share of the objects."""
    firsts = (parse(part.first_key) for part in versions[1:] if part.first_key[:1] == OBJECTS)
    cuts = sorted({f"{keys.data_prefix}{escape(one.bucket)}/{escape(one.key or '')}/" for one in firsts})
    bounds: list[str | None] = [None, *cuts, None]
    return tuple(NameRange(first, last) for first, last in pairwise(bounds))
