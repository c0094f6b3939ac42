"""`tidelog pipeline gc`: what in a store belongs to nothing. Plan, show, and when told, remove."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_job import MasterOption, RootOption, run_job
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.jobs.gc import GcReport
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.root import Root

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
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Shows what in the store belongs to nothing; removes it with --apply PLAN, or with --now.

    Uploads that never ended, objects of interrupted shipping, what an interrupted retention left, rows that dead Spark
    jobs have staged, and objects that a compaction has replaced. It claims nothing, so it runs beside owners; each
    thing is looked at again before it goes. The exit code is 1 when objects are lost or damaged.
    """
    from tidelog.errors import InputError
    from tidelog.pipeline.jobs.gc import apply_gc, plan_gc
    from tidelog.pipeline.jobs.gc_plan import read_plan, write_plan

    if apply is not None and (topics or plan is not None or now):
        raise InputError("--apply carries out a plan as it is", hint="Leave the topics, --plan and --now out")
    kept = None if apply is None else read_plan(apply)

    def work(spark: SparkSession, place: Root, on_progress: OnProgress) -> GcReport:
        if kept is not None:
            return apply_gc(spark, place, kept, on_progress=on_progress)
        made, report = plan_gc(spark, place, topics or None, grace_seconds=grace, on_progress=on_progress)
        if plan is not None:
            write_plan(plan, made)
        return apply_gc(spark, place, made, on_progress=on_progress) if now else report

    run_job(session, "gc", root, master, work, _show)


def _show(output: Output, report: GcReport) -> None:
    import msgspec

    from tidelog.cli.output import counted, human_bytes

    if report.found:
        rows = [msgspec.structs.asdict(one) for one in report.found]
        output.table(_COLUMNS, rows, narrower=[("action", "kind", "object", "bytes")])
    if report.is_applied:
        output.note(f"removed {counted(report.removed_objects, 'object')}, {human_bytes(report.removed_bytes)}")
        for key, why in report.kept:
            output.note(f"kept {key}: {why}")
    elif report.removable_objects:
        size = human_bytes(report.removable_bytes)
        output.note(f"{counted(report.removable_objects, 'object')} to remove, {size}; keep a --plan and --apply it")
    else:
        output.note("nothing to remove")
