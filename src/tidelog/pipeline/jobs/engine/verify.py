"""The job `verify` over an engine: workers read everything in its store and cross-check it.

    log: every frame, record and value   compaction: indexes, blob and data files   snapshots: each against the log
    manifest: its marks                  digest: of the newest state                replicas: every object of each
    values: every file of a large one

What one file can tell is checked as `engine.verify()` does (`engine/verify/store.py`). The states are computed another
way on purpose: from the log alone, by Spark, and compared with what the engine wrote.

Invariants
- Nothing is changed, and no lock is taken: it runs beside the owner, and beside jobs that change the store.
- Their changes are not findings: if something is wrong and the manifest or the catalog has changed by then, everything
  is checked again, and only what is still wrong is reported. Objects of the log that were verified are not read again.
- Small objects of the log are fetched once: they are verified while states are computed from them (`checked_log.py`).
- Findings are in the order of the parts above, and of keys within them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from tidelog.cold.planned_catalog import PlannedCatalog
from tidelog.cold.verify import LOOKS
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.cold.value_store import stored_values
from tidelog.engine.verify.describe import describe_key
from tidelog.engine.verify.store import FIRST_LSN, EngineLog, about_engine
from tidelog.findings import Finding
from tidelog.pipeline.address import EngineRoot, OpenedEngine
from tidelog.pipeline.jobs.engine.digest import NOTHING, Source, Sources, plan_log, sources_of
from tidelog.pipeline.jobs.engine.digest_tasks import ACTUAL, LOG, ComputedState, Unreadable, compute_state
from tidelog.pipeline.jobs.engine.rows import digest_totals
from tidelog.pipeline.jobs.engine.verify_columns import sound_compaction
from tidelog.pipeline.jobs.engine.verify_lost import NeededValues, find_lost_values
from tidelog.pipeline.jobs.engine.verify_replicas import ReplicaCheck, catalog_of, check_replicas
from tidelog.pipeline.jobs.engine.verify_tasks import (
    CompactionCheck,
    FileFound,
    FileWork,
    LogWork,
    ValueFileWork,
    check_compaction,
    check_file,
    check_log,
    check_value,
)
from tidelog.pipeline.jobs.job import (
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    counted_progress,
    ignore_progress,
    logged,
)
from tidelog.pipeline.jobs.verify import objects_per_task
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.spark_flow import spark_flow
from tidelog.pipeline.work import run_on_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.engine.sst.sstable import RowPart

OwnDigest = Callable[[int], str | None]
"""The digest that a node tells of its own state at a seq; None when it cannot be asked."""
_FILES_PER_TASK = 4
_COMPARING = "comparing states with the log"
_COMPACTED = "reading compacted data"


class StateCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A state that was compared: with what, and what it is the state of."""

    key: str
    seq: int
    rows: int
    digest: str
    compared_with: str | None
    problems: int


class EngineVerifyReport(JobReport, frozen=True, kw_only=True):
    """What was read of an engine, and what is wrong with it."""

    engine: str
    seq: int
    digest: str | None
    objects: int
    object_bytes: int
    records: int
    entries: int
    values: int
    value_files: int = 0
    states: tuple[StateCheck, ...] = ()
    compaction: CompactionCheck | None = None
    replicas: tuple[ReplicaCheck, ...] = ()


@logged
def verify_engine(
    spark: SparkSession,
    root: EngineRoot,
    *,
    digest: str | None = None,
    own_digest: OwnDigest | None = None,
    replicas: Sequence[str] | None = None,
    on_progress: OnProgress = ignore_progress,
) -> EngineVerifyReport:
    """Reads everything of an engine in its store, and in its replicas by URL, of which its settings may name some.

    `digest` is what the newest state is to have; `own_digest` is asked for it as well.
    """
    urls = root.load().storage_engine.replicas if replicas is None else replicas
    with root.open() as opened:
        log = EngineLog(opened.metadata, opened.keys)
        look = _settled_look(spark, root.place, opened, log, on_progress)
        compared = list(_compare_digest(root, look, digest, own_digest))
        large = _read_value_files(spark, root.place, opened, on_progress)
        copies = check_replicas(spark, root, opened, urls, on_progress)
    states, read = look.states, log.read()
    return EngineVerifyReport(
        job="verify",
        engine=root.name,
        seq=look.manifest.high_water_mark,
        digest=states.digest,
        objects=len(read),
        object_bytes=sum(one.size for one in read),
        records=sum(one.records for one in read),
        entries=sum(one.entries for one in read),
        values=sum(one.values for one in read),
        value_files=sum(one.is_there for one in large),
        states=tuple(states.checks),
        compaction=look.compaction,
        replicas=copies.checks,
        reconciliations=tuple(states.reconciliations),
        findings=(
            *look.findings,
            *sorted(_told(large), key=str),
            *(one for one in compared if isinstance(one, Finding)),
            *copies.findings,
        ),
        notes=(*states.notes, *(one for one in compared if isinstance(one, str)), *copies.notes),
    )


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    """Everything as it was at one moment."""

    manifest: Manifest
    states: _States
    compaction: CompactionCheck | None
    findings: tuple[Finding, ...]


def _settled_look(
    spark: SparkSession, place: EngineLocation, opened: OpenedEngine, log: EngineLog, on_progress: OnProgress
) -> _Look:
    """Looks until nothing is wrong, or nothing has changed while it was looked at."""
    for _ in range(LOOKS - 1):
        manifest = opened.newest_manifest()
        look = _look_at(spark, place, opened, manifest, log, on_progress)
        changed = opened.newest_manifest().revision != manifest.revision or catalog_of(opened) != log.seen
        if not look.findings or not changed:
            return look
    return _look_at(spark, place, opened, opened.newest_manifest(), log, on_progress)


def _look_at(
    spark: SparkSession,
    place: EngineLocation,
    opened: OpenedEngine,
    manifest: Manifest,
    log: EngineLog,
    on_progress: OnProgress,
) -> _Look:
    log.look_at(manifest)
    is_whole = log.seen is not None and not log.seen.findings
    catalog = PlannedCatalog(log.descriptors, opened.keys, place.catalog) if is_whole else log.catalog
    now = OpenedEngine(opened.objects, opened.metadata, catalog, opened.keys, manifest)
    sources = sources_of(now)
    states = _States(spark, place, now, log)
    with ThreadPoolExecutor(1, thread_name_prefix="tidelog-verify") as pool:  # none of them has to wait for the other
        checking = pool.submit(_check_compacted, spark, place, sources)
        on_progress(Progress(_COMPARING, 0, 1))
        states.compare(sources)
        on_progress(Progress(_COMPARING, 1, 1))
        _read_log(spark, place, log, on_progress)
        on_progress(Progress(_COMPACTED, 0, 1))
        checking.result()
        on_progress(Progress(_COMPACTED, 1, 1))
    compaction, told = checking.result()
    told += states.findings
    told = [*(list(log.findings()) or states.log_findings), *told]
    findings = tuple({str(one): one for one in told}.values())  # two checks may meet the same damage
    return _Look(manifest=manifest, states=states, compaction=compaction, findings=findings)


def _read_log(spark: SparkSession, place: EngineLocation, log: EngineLog, on_progress: OnProgress) -> None:
    """What was not verified on the way, because it is large, or no state was computed from it."""
    descriptors = log.works()
    works = [LogWork(place=place, descriptor=one, high_water_lsn=log.high_water_lsn) for one in descriptors]
    done, total = 0, sum(one.size for one in descriptors)
    for found in run_on_workers(spark, check_log, works, items_per_task=objects_per_task(descriptors)):
        log.found[found.object_id] = found
        done += found.size
        on_progress(Progress("reading the log", done, total))


def _check_compacted(
    spark: SparkSession, place: EngineLocation, sources: Sources
) -> tuple[CompactionCheck | None, list[Finding]]:
    """Index files and those of snapshots, whether they have the bytes that their names tell; and compacted data."""
    parts = {part.key: part for source in sources.found for part in source.parts}
    if sources.compaction is not None:
        parts |= {part.key: part for part in sources.compaction.values}
    works = [FileWork(place=place, part=part) for _, part in sorted(parts.items())]
    results = run_on_workers(spark, check_file, works, items_per_task=_FILES_PER_TASK)
    told = sorted((finding for one in results for finding in one.findings), key=str)
    if sources.compaction is None:
        return None, told
    compaction = sound_compaction(spark_flow(spark), place, sources.compaction)
    if compaction is None:  # once more, row by row, to say what is wrong
        compaction, found = check_compaction(spark, place, sources.compaction)
        told += found
    return compaction, told


def _read_value_files(
    spark: SparkSession, place: EngineLocation, opened: OpenedEngine, on_progress: OnProgress
) -> list[FileFound]:
    """Files of large values: whether they have what their names tell. One that no version refers to is garbage."""
    there = sorted(stored_values(opened.objects, opened.keys).items())
    works = [ValueFileWork(place=place, name=name, size=size) for name, size in there]
    results = run_on_workers(spark, check_value, works, items_per_task=_FILES_PER_TASK) if works else ()
    return list(counted_progress(results, "reading value files", len(works), on_progress))


def _told(found: Iterable[FileFound]) -> Iterator[Finding]:
    return (finding for one in found for finding in one.findings)


def _compare_digest(
    root: EngineRoot, look: _Look, digest: str | None, own_digest: OwnDigest | None
) -> Iterator[Finding | str]:
    """The digest of the newest state with the one that was given, and with the one that a node tells; or a note."""
    found, seq, about = look.states.digest, look.manifest.high_water_mark, about_engine(root.name)
    if found is None:
        return
    if digest is not None and digest != found:
        yield about.finding("digest", None, f"its digest at seq {seq} is {found}, not {digest}")
    own = None if own_digest is None else own_digest(seq)
    if own_digest is not None and own is None:
        yield f"the node could not be asked for its own digest at seq {seq}"
    elif own is not None and own != found:
        reason = f"its digest at seq {seq} is {found} in the store, and {own} on the node"
        yield about.finding("digest", root.directory or root.location, reason)


# Every snapshot of an engine, and the version index of its compaction: each equals the one before plus the log.
#
#     the empty engine (if the log begins with LSN 1) + records -> oldest snapshot? + records -> ... -> high-water mark
#
# Invariants
# - A correct snapshot is the base for the next one; a wrong or damaged one is left out, and the next is computed from
#   the one before it. So all of them are compared with the oldest base that exists.
# - A snapshot without an older base, or without the log from there, is only read to its end, and this is noted. The
#   same rows under two names (a compaction and the snapshot that it published) are compared once.
# - Last comes the digest of the state at the high-water mark, and whether all of its values exist.


class _States:
    """One run along the log."""

    def __init__(self, spark: SparkSession, place: EngineLocation, opened: OpenedEngine, log: EngineLog) -> None:
        self._spark = spark
        self._place = place
        self._log = log
        self._opened = opened
        self._manifest = opened.manifest
        self._about = about_engine(place.name)
        self._start_lsn = opened.catalog.start_offset()
        self._known: dict[Source, ComputedState] = {}
        """What is to be seen in sources that are right."""
        self.digest: str | None = None
        self.checks: list[StateCheck] = []
        self.findings: list[Finding] = []
        self.log_findings: list[Finding] = []
        """What of the log could not be read; the check of its objects tells the same more exactly."""
        self.reconciliations: list[Reconciliation] = []
        self.notes: list[str] = []

    def compare(self, sources: Sources) -> None:
        """All of them, and the newest state."""
        self.findings += self._unreadable(sources.unreadable)
        good: Source | None = None
        for source in sources.found:
            if source is NOTHING or (good is not None and _same_rows(good, source)):
                good = good or source
            elif self._is_right(source, self._usable(good)):
                good = source
        state = self._newest(self._usable(good), () if sources.compaction is None else sources.compaction.values)
        if state is not None:
            self.digest = state.digest
            subject = f"engine {self._place.name} at seq {state.seq}"
            self.reconciliations.append(
                Reconciliation(subject=subject, went_in=digest_totals(state.things, state.digest))
            )

    def _usable(self, source: Source | None) -> Source | None:
        """What something later can be computed from: the records behind it are there."""
        return source if source is not None and source.lsn >= self._start_lsn else None

    def _is_right(self, source: Source, base: Source | None) -> bool:
        state = None if base is None else self._computed(base, source, source.lsn, source.seq)
        if state is not None and any(one.source == LOG for one in state.damage):
            self.log_findings += self._unreadable(one for one in state.damage if one.source == LOG)
            state = None
        if state is None:
            base = None
            self.notes.append(f"{source.key} was read to its end, and nothing is in the store to compare it with")
            state = self._computed(source, None, source.lsn, source.seq)
        findings = list(self._unreadable(state.damage)) or list(self._differences(source, base, state))
        self.findings += findings
        self.reconciliations += [] if findings else [_reconciliation(source, base, state)]
        self._known[source] = state if base is None else _actual(state)
        self.checks.append(
            StateCheck(
                key=source.key,
                seq=source.seq,
                rows=state.rows if base is None else state.actual_rows,
                digest=state.digest if base is None else state.actual_digest,
                compared_with=None if base is None else base.key,
                problems=len(findings),
            )
        )
        return not findings

    def _computed(self, base: Source, actual: Source | None, stop_lsn: int, seq: int) -> ComputedState:
        """The state to which a source and the records after it lead, beside another one."""
        plan = plan_log(self._opened, self._place, base.lsn, stop_lsn, checks=True)
        items, size = [*base.items(self._place), *plan.items], base.size + plan.size
        starts = [self._manifest.history_start_seq, base.history_start_seq]
        if actual is not None:
            items += actual.items(self._place, ACTUAL)
            size += actual.size
            starts.append(actual.history_start_seq)
        horizon = max(starts)
        state = compute_state(self._spark, items, size, seq=seq, horizon_seq=horizon, compares=actual is not None)
        for found in state.checked:
            self._log.found.setdefault(found.object_id, found)
        return state

    def _differences(self, source: Source, base: Source | None, state: ComputedState) -> Iterator[Finding]:
        if state.counts and base is not None:
            counted = ", ".join(f"{state.counts[kind]:,} rows {kind}" for kind in sorted(state.counts))
            first = state.differences[0]
            reason = f"it is not the state that the log leads to from {base.key}: {counted}"
            text = f"{reason}; the first: {describe_key(first.key)} is {first.kind}"
            yield self._about.finding("snapshot", source.key, text)

    def _newest(self, good: Source | None, values: tuple[RowPart, ...]) -> ComputedState | None:
        """At the high-water mark; and whether its values are somewhere."""
        if good is None:
            reason = "its newest state cannot be computed: no state that is right is followed by the log"
            self.findings.append(self._about.finding("snapshot", None, reason))
            return None
        manifest = self._manifest
        is_newest = (good.lsn, good.seq) == (manifest.high_water_lsn + 1, manifest.high_water_mark)
        state = self._known.get(good) if is_newest else None
        state = state or self._computed(good, None, manifest.high_water_lsn + 1, manifest.high_water_mark)
        self.log_findings += self._unreadable(state.damage)
        if not state.damage and self._start_lsn > FIRST_LSN:
            plan = plan_log(self._opened, self._place, good.lsn, manifest.high_water_lsn + 1)
            items, size = [*good.items(self._place), *plan.items], good.size + plan.size
            needed = NeededValues(self._start_lsn, max(manifest.history_start_seq, good.history_start_seq))
            self.findings += find_lost_values(self._spark, self._place, items, size, values, needed)
        return None if state.damage else state

    def _unreadable(self, found: Iterable[Unreadable]) -> Iterator[Finding]:
        return (self._about.finding("snapshot", one.place, one.reason) for one in found)


def _same_rows(one: Source, other: Source) -> bool:
    return bool(one.parts) and (one.lsn, one.parts) == (other.lsn, other.parts)


def _actual(state: ComputedState) -> ComputedState:
    """The state that another one was compared with, by itself."""
    return msgspec.structs.replace(
        state, digest=state.actual_digest, things=state.actual_things, rows=state.actual_rows, counts={}, differences=()
    )


def _reconciliation(source: Source, base: Source | None, state: ComputedState) -> Reconciliation:
    """Retention may have taken from one side what the other still has: then there is one side to tell of."""
    expected = digest_totals(state.things, state.digest)
    actual = digest_totals(state.actual_things, state.actual_digest)
    subject = f"{source.key.rpartition('/')[2]} at seq {source.seq}"
    if base is None:
        return Reconciliation(subject=subject, went_in=expected)
    return Reconciliation(subject=subject, went_in=actual, came_out=expected if expected == actual else None)
