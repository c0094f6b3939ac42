"""What a compaction of an engine tells: what went in, what came out, and the proof that both show the same."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tidelog.engine.compacted import Compaction
from tidelog.pipeline.engine_jobs.bodies_plan import BodyPlan
from tidelog.pipeline.engine_jobs.compact_options import CompactEngineOptions
from tidelog.pipeline.engine_jobs.index_source import RowsAt
from tidelog.pipeline.engine_jobs.index_survey import Survey, state_proof
from tidelog.pipeline.jobs.job import JobReport

_SAME = "another compaction was at work and was faster: it has published the very same files, so nothing was changed"


class CompactEngineReport(JobReport, frozen=True, kw_only=True):
    """What became of an engine; of a dry run, what would.

    `log_objects` and `log_bytes` are what was read of the log, `objects` and `bytes` all that the compaction consists
    of, data files included; of a dry run, without the packs and indexes that would be written. `is_new` is False where
    nothing had come since the last one, or another run was faster.
    """

    engine: str
    generation: int
    seq: int
    lsn: int
    is_new: bool = True
    is_dry_run: bool = False
    versions: int = 0
    dropped_versions: int = 0
    bodies: int = 0
    new_packed_bodies: int = 0
    new_data_files: int = 0
    kept_packs: int = 0
    rewritten_packs: int = 0
    packs: int = 0
    data_files: int = 0
    objects: int = 0
    bytes: int = 0
    log_objects: int = 0
    log_bytes: int = 0
    base: str | None = None
    digest: str | None = None


class Made(NamedTuple):
    """What a run has done: rows it read, what is to be seen in them, and in what it wrote (None: it wrote nothing).

    `is_first` is False when another run has published the same while this one was at work.
    """

    found: RowsAt
    went_in: Survey
    came_out: Survey | None
    dropped: int
    plan: BodyPlan
    is_first: bool = True


def report_of(
    engine: str, root: Compaction, made: Made | None, options: CompactEngineOptions, seconds: float
) -> CompactEngineReport:
    """The report of a run; `made` is None where there was nothing to do."""
    sizes = [pack.size for pack in root.packs] + [part.size for part in (*root.versions, *root.bodies)]
    report = CompactEngineReport(
        job="compact",
        engine=engine,
        generation=root.generation,
        seq=root.seq,
        lsn=root.lsn,
        is_dry_run=options.is_dry_run,
        packs=len(root.packs),
        data_files=root.data_files,
        objects=len(sizes) + root.data_files,
        bytes=sum(sizes) + root.data_bytes,
        seconds=seconds,
    )
    return _of_nothing(report, root) if made is None else _with_figures(report, made)


def _of_nothing(report: CompactEngineReport, root: Compaction) -> CompactEngineReport:
    return msgspec.structs.replace(
        report,
        is_new=False,
        versions=sum(part.rows for part in root.versions),
        notes=(f"nothing has come since generation {root.generation}, which goes up to seq {root.seq}",),
    )


def _with_figures(report: CompactEngineReport, made: Made) -> CompactEngineReport:
    plan, log, base = made.plan, made.found.log, made.found.base
    proof = None if made.came_out is None else state_proof(report.engine, report.seq, made.went_in, made.came_out)
    return msgspec.structs.replace(
        report,
        is_new=made.is_first,
        versions=made.went_in.rows - made.dropped,
        dropped_versions=made.dropped,
        bodies=plan.bodies,
        new_packed_bodies=plan.new_packed,
        new_data_files=plan.new_files,
        kept_packs=len(plan.kept),
        rewritten_packs=plan.rewritten,
        log_objects=sum(len(work.descriptors) for work in log),
        log_bytes=sum(one.size for work in log for one in work.descriptors),
        base=None if base is None else base.key,
        digest=made.went_in.digest,
        proofs=() if proof is None else (proof,),
        notes=made.found.passed_over if made.is_first else (*made.found.passed_over, _SAME),
    )
