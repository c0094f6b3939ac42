"""`tidelog pipeline gc`: what in a store belongs to nothing, of topics or an engine. Plan, show, remove when told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tidelog.cli.pipeline_engine import (
    EngineNameOption,
    EngineOption,
    engine_root,
    refuse_engine_options,
    refuse_topic_options,
    run_engine_job,
)
from tidelog.cli.pipeline_job import MasterOption, RootOption, run_job
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.engine_jobs.gc import EngineGcReport
    from tidelog.pipeline.engines.place import EngineRoot
    from tidelog.pipeline.jobs.gc import GcReport
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.root import Root

_ENGINE_COLUMNS = ("action", "kind", "key", "bytes", "why")
_COLUMNS = ("topic", "action", "kind", "object", "bytes")


def gc(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name [default: all topics].")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Keep the plan in this file, to look at and to apply.")
    ] = None,
    apply: Annotated[
        Path | None, typer.Option("--apply", metavar="PLAN", help="Carry out a plan that was kept.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Remove what is found at once, without a plan in a file.")] = False,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", min=0, help="How long replaced objects stay, from the switch."),
    ] = 3600.0,
    engine: EngineOption = None,
    engine_name: EngineNameOption = None,
    keep_from: Annotated[
        int | None,
        typer.Option("--keep-from", metavar="SEQ", min=0, help="Of an engine: where history is to begin from now on."),
    ] = None,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Shows what in the store belongs to nothing; removes it with --apply PLAN, or with --now.

    Uploads that never ended, objects of interrupted shipping, what an interrupted retention left, rows that dead Spark
    jobs have staged, and objects that a compaction has replaced. With --engine also the log that compacted data has
    made unnecessary, files of compactions that are over, and old states. It claims nothing, so it runs beside owners;
    each thing is looked at again before it goes. The exit code is 1 when objects are lost or damaged.
    """
    from tidelog.errors import InputError

    if apply is not None and (topics or plan is not None or now or keep_from is not None):
        hint = "Leave the topics, --plan, --now and --keep-from out"
        raise InputError("--apply carries out a plan as it is", hint=hint)
    if engine is not None:
        refuse_topic_options(engine, {"TOPIC": topics, "--root": root})
        _collect_engine(session, engine, engine_name, master, _Wanted(plan, apply, now, grace, keep_from))
        return
    refuse_engine_options({"--engine-name": engine_name, "--keep-from": keep_from})
    _collect_topics(session, topics, root, master, _Wanted(plan, apply, now, grace))


class _Wanted(NamedTuple):
    """What is to be done, as the options say it."""

    plan: Path | None
    apply: Path | None
    now: bool
    grace: float
    keep_from: int | None = None


def _collect_topics(
    session: Session, topics: list[str] | None, root: str | None, master: str | None, wanted: _Wanted
) -> None:
    from tidelog.pipeline.jobs.gc import apply_gc, plan_gc
    from tidelog.pipeline.jobs.gc_plan import read_plan, write_plan

    kept = None if wanted.apply is None else read_plan(wanted.apply)

    def work(spark: SparkSession, place: Root, on_progress: OnProgress) -> GcReport:
        if kept is not None:
            return apply_gc(spark, place, kept, on_progress=on_progress)
        made, report = plan_gc(spark, place, topics or None, grace_seconds=wanted.grace, on_progress=on_progress)
        if wanted.plan is not None:
            write_plan(wanted.plan, made)
        return apply_gc(spark, place, made, on_progress=on_progress) if wanted.now else report

    run_job(session, "gc", root, master, work, lambda output, report: _show(output, report, wanted.plan))


def _collect_engine(session: Session, engine: str, name: str | None, master: str | None, wanted: _Wanted) -> None:
    from tidelog.pipeline.engine_jobs.gc import apply_engine_gc, plan_engine_gc
    from tidelog.pipeline.engine_jobs.gc_plan import read_engine_plan, write_engine_plan

    kept = None if wanted.apply is None else read_engine_plan(wanted.apply)

    def work(spark: SparkSession, place: EngineRoot, on_progress: OnProgress) -> EngineGcReport:
        if kept is not None:
            return apply_engine_gc(spark, place, kept, on_progress=on_progress)
        made, report = plan_engine_gc(
            spark, place, keep_from=wanted.keep_from, grace_seconds=wanted.grace, on_progress=on_progress
        )
        if wanted.plan is not None:
            write_engine_plan(wanted.plan, made)
        return apply_engine_gc(spark, place, made, on_progress=on_progress) if wanted.now else report

    def show(output: Output, report: EngineGcReport) -> None:
        _show_engine(output, report, wanted.plan)

    run_engine_job(session, "gc", engine_root(session, engine, name), master, work, show)


def _show(output: Output, report: GcReport, plan: Path | None) -> None:
    import msgspec

    if report.found:
        rows = [msgspec.structs.asdict(one) for one in report.found]
        output.table(_COLUMNS, rows, narrower=[("action", "kind", "object", "bytes")])
    _show_sums(output, report, plan)


def _show_engine(output: Output, report: EngineGcReport, plan: Path | None) -> None:
    import msgspec

    if report.found:
        rows = [msgspec.structs.asdict(one) for one in report.found]
        output.table(_ENGINE_COLUMNS, rows, narrower=[("action", "kind", "key", "bytes")])
    _show_sums(output, report, plan)


def _show_sums(output: Output, report: GcReport | EngineGcReport, plan: Path | None) -> None:
    from tidelog.cli.output import counted, human_bytes

    if report.is_applied:
        output.note(f"removed {counted(report.removed_objects, 'object')}, {human_bytes(report.removed_bytes)}")
        for key, why in report.kept:
            output.note(f"kept {key}: {why}")
    elif report.removable_objects:
        size = human_bytes(report.removable_bytes)
        how = "keep a --plan and --apply it" if plan is None else f"--apply {plan} removes what it names"
        output.note(f"{counted(report.removable_objects, 'object')} to remove, {size}; {how}")
    else:
        output.note("nothing to remove")
