"""The job `verify` over an engine: everything in its store, read by workers and held against everything else.

    log: every frame, record and value   compaction: indexes, packs, data files   states: each against the log
    manifest: its marks                  digest: of the newest state              replicas: every object of each

Invariants
- Nothing is changed, and no lock is taken: it runs beside the owner, and beside jobs that change the store.
- What they change meanwhile is no problem: where something is wrong and the manifest or the catalog is another by then,
  all of it is looked at again, and only what is still wrong is told. Objects of the log are read once.
- The order of what is told is that of the parts above, and of keys within them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.manifest import Manifest
from tidelog.pipeline.engine_jobs.digest_sources import Sources, sources_of
from tidelog.pipeline.engine_jobs.verify_catalog import LogVerification, catalog_of
from tidelog.pipeline.engine_jobs.verify_compaction import (
    CompactionCheck,
    NamedFile,
    check_compaction,
    check_named_file,
)
from tidelog.pipeline.engine_jobs.verify_log import LogWork, check_log_object
from tidelog.pipeline.engine_jobs.verify_replicas import ReplicaCheck, check_replicas
from tidelog.pipeline.engine_jobs.verify_states import StateCheck, StatesResult, check_states
from tidelog.pipeline.engine_jobs.verify_words import engine_problem
from tidelog.pipeline.engines.place import EngineRoot, OpenedEngine
from tidelog.pipeline.jobs.job import (
    JobReport,
    OnProgress,
    Problem,
    Progress,
    counted_progress,
    ignore_progress,
)
from tidelog.pipeline.jobs.proof import Proof
from tidelog.pipeline.work import run_on_workers
from tidelog.tier.catalog import Catalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.engine.row_file import RowPart

OwnDigest = Callable[[int], str | None]
"""The digest that a node tells of its own state at a seq; None when it cannot be asked."""

_LOOKS = 3
_TASK_BYTES = 64 << 20
_MAX_OBJECTS_PER_TASK = 64
_FILES_PER_TASK = 4


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
    states: tuple[StateCheck, ...] = ()
    compaction: CompactionCheck | None = None
    replicas: tuple[ReplicaCheck, ...] = ()


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
    began = time.monotonic()
    urls = root.load().storage_engine.replicas if replicas is None else replicas
    verification = _Verification(spark, root, on_progress)
    with root.open() as opened:
        look = verification.run(opened)
        compared = verification.compare_digest(look, digest, own_digest)
        copies = check_replicas(spark, root, opened, urls, on_progress)
    states, log = look.states, verification.log.findings()
    return EngineVerifyReport(
        job="verify",
        engine=root.name,
        seq=look.manifest.high_water_mark,
        digest=states.digest,
        objects=len(log),
        object_bytes=sum(one.size for one in log),
        records=sum(one.records for one in log),
        entries=sum(one.entries for one in log),
        values=sum(one.bodies for one in log),
        states=states.checks,
        compaction=look.compaction,
        replicas=copies.checks,
        proofs=(*states.proofs, *compared.proofs),
        problems=(*look.problems, *compared.problems, *copies.problems),
        notes=(*states.notes, *compared.notes, *copies.notes),
        seconds=round(time.monotonic() - began, 3),
    )


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    """Everything as it was at one moment."""

    manifest: Manifest
    states: StatesResult
    compaction: CompactionCheck | None
    problems: tuple[Problem, ...]


class _Told(msgspec.Struct, frozen=True):
    """What a comparison adds to a report."""

    problems: tuple[Problem, ...] = ()
    proofs: tuple[Proof, ...] = ()
    notes: tuple[str, ...] = ()


class _Verification:
    """The steps of a run."""

    def __init__(self, spark: SparkSession, root: EngineRoot, on_progress: OnProgress) -> None:
        self._spark = spark
        self._root = root
        self._place = root.place
        self._on_progress = on_progress
        self.log = LogVerification(self._place)

    def run(self, opened: OpenedEngine) -> _Look:
        """Looks until nothing is wrong, or nothing has changed while it was looked at."""
        for _ in range(_LOOKS - 1):
            manifest = opened.newest_manifest()
            look = self._look(opened, manifest)
            if not look.problems or not _has_changed(opened, manifest, self.log):
                return look
        return self._look(opened, opened.newest_manifest())

    def _look(self, opened: OpenedEngine, manifest: Manifest) -> _Look:
        # A catalog remembers which descriptors it has seen; a new one is as the store is now.
        now = OpenedEngine(
            opened.objects, opened.metadata, Catalog(opened.metadata, opened.keys), opened.keys, manifest
        )
        self.log.look(now, manifest)
        self._read_log()
        sources = sources_of(now)
        damaged_files = self._read_named_files(sources)
        compaction, found = self._read_compaction(sources)
        states = self._read_states(now, sources)
        log = list(self.log.problems())
        told = [*damaged_files, *found, *states.problems]
        return _Look(
            manifest=manifest,
            states=states,
            compaction=compaction,
            problems=(*(log or states.log_problems), *dict.fromkeys(told)),
        )

    def _read_log(self) -> None:
        works: list[LogWork] = self.log.works()
        total = sum(work.descriptor.size for work in works)
        per_task = max(1, min(_MAX_OBJECTS_PER_TASK, len(works) * _TASK_BYTES // max(1, total), len(works) // 16))
        done = 0
        for finding in run_on_workers(self._spark, check_log_object, works, items_per_task=per_task):
            self.log.found[finding.object_id] = finding
            done += finding.size
            self._on_progress(Progress("reading the log", done, total))

    def _read_named_files(self, sources: Sources) -> list[Problem]:
        """Index files and those of states: whether they have the bytes that their names tell."""
        parts = {part.key: part for source in sources.found for part in source.parts}
        if sources.compaction is not None:
            parts |= {part.key: part for part in sources.compaction.bodies}
        works = [self._named_file(part) for _, part in sorted(parts.items())]
        results = run_on_workers(self._spark, check_named_file, works, items_per_task=_FILES_PER_TASK)
        found = counted_progress(results, "reading index files", len(works), self._on_progress)
        return sorted((one.problem for one in found if one.problem is not None), key=str)

    def _named_file(self, part: RowPart) -> NamedFile:
        keys = self._place.keys
        name = keys.parse_compacted(part.key) or keys.parse_state_part(part.key)
        return NamedFile(place=self._place, key=part.key, size=part.size, digest="" if name is None else name.digest)

    def _read_compaction(self, sources: Sources) -> tuple[CompactionCheck | None, tuple[Problem, ...]]:
        if sources.compaction is None:
            return None, ()
        self._on_progress(Progress("reading compacted data", 0, 1))
        found = check_compaction(self._spark, self._place, sources.compaction)
        self._on_progress(Progress("reading compacted data", 1, 1))
        return found

    def _read_states(self, opened: OpenedEngine, sources: Sources) -> StatesResult:
        total, done = len(sources.found), 0

        def on_done() -> None:
            nonlocal done
            done += 1
            self._on_progress(Progress("comparing states with the log", done, total))

        return check_states(self._spark, self._place, opened, sources, on_done)

    def compare_digest(self, look: _Look, digest: str | None, own_digest: OwnDigest | None) -> _Told:
        """The digest of the newest state with the one that was given, and with the one that a node tells."""
        found, seq, name = look.states.digest, look.manifest.high_water_mark, self._root.name
        if found is None:
            return _Told()
        problems: list[Problem] = []
        notes: list[str] = []
        if digest is not None and digest != found:
            problems.append(engine_problem(name, None, f"its digest at seq {seq} is {found}, not {digest}"))
        if own_digest is not None:
            own = own_digest(seq)
            if own is None:
                notes.append(f"the node could not be asked for its own digest at seq {seq}")
            elif own != found:
                reason = f"its digest at seq {seq} is {found} in the store, and {own} on the node"
                problems.append(engine_problem(name, str(self._root.directory or self._root.location), reason))
        return _Told(tuple(problems), (), tuple(notes))


def _has_changed(opened: OpenedEngine, manifest: Manifest, log: LogVerification) -> bool:
    """Whether somebody has changed the manifest, the start of the log or its objects since they were read."""
    if opened.newest_manifest().revision != manifest.revision:
        return True
    return catalog_of(opened) != log.seen
