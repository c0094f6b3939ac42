"""`tidelog pipeline gc` and `compact`: remove unreferenced objects, and compact topics or an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tidelog.cli.output import Output, counted
from tidelog.cli.pipeline.job import (
    EngineNameOption,
    EngineOption,
    MasterOption,
    RootOption,
    engine_root,
    refuse_engine_options,
    refuse_topic_options,
    run_engine_job,
    run_job,
)
from tidelog.cli.session import Session
from tidelog.errors import InputError
from tidelog.pipeline.address import EngineRoot, Root
from tidelog.units import human_bytes, parse_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.jobs.compact_topic import CompactReport
    from tidelog.pipeline.jobs.engine.compact import CompactEngineOptions, CompactEngineReport
    from tidelog.pipeline.jobs.gc import GcPlan, GcReport
    from tidelog.pipeline.jobs.job import OnProgress


_COLUMNS = ("topic", "action", "kind", "reason", "object", "bytes")


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed (the default).")] = False,
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
    """Shows what in the store belongs to nothing. Removes it with --apply PLAN, or with --now.

    Uploads that never ended, objects of interrupted shipping, what an interrupted retention left, rows that dead Spark
    jobs have staged, and objects that a compaction has replaced. With --engine also the log that compacted data has
    made unnecessary, files of compactions that are over, and old states. It claims nothing, so it runs beside owners;
    each thing is looked at again before it goes. The exit code is 1 when objects are lost or damaged.
    """
    from tidelog.pipeline.jobs.gc import apply_engine_gc, apply_gc, plan_engine_gc, plan_gc, read_plan

    if dry_run and (now or apply is not None):
        raise InputError("--dry-run changes nothing, --now and --apply do", hint="Leave one of them out")
    if apply is not None and (topics or plan is not None or now or keep_from is not None):
        hint = "Leave the topics, --plan, --now and --keep-from out"
        raise InputError("--apply carries out a plan as it is", hint=hint)
    if engine is not None:
        refuse_topic_options(engine, {"TOPIC": topics, "--root": root})
    else:
        refuse_engine_options({"--engine-name": engine_name, "--keep-from": keep_from})
    saved = None if apply is None else read_plan(apply)

    def show(output: Output, report: GcReport) -> None:
        _show(output, report, plan)

    if engine is not None:
        make_engine_plan = partial(plan_engine_gc, keep_from=keep_from, grace_seconds=grace)
        work_on_engine = partial(_collect, saved, make_engine_plan, apply_engine_gc, plan, now)
        run_engine_job(session, "gc", engine_root(session, engine, engine_name), master, work_on_engine, show)
    else:
        make_plan = partial(plan_gc, topics=topics or None, grace_seconds=grace)
        run_job(session, "gc", root, master, partial(_collect, saved, make_plan, apply_gc, plan, now), show)


def _collect(
    saved: GcPlan | None,
    make_plan: Callable[..., tuple[GcPlan, GcReport]],
    apply_plan: Callable[..., GcReport],
    plan_file: Path | None,
    now: bool,
    spark: SparkSession,
    place: object,
    on_progress: OnProgress,
) -> GcReport:
    """Applies a saved plan, or makes one, which is saved, applied at once, or shown."""
    from tidelog.pipeline.jobs.gc import write_plan

    if saved is not None:
        return apply_plan(spark, place, saved, on_progress=on_progress)
    made, report = make_plan(spark, place, on_progress=on_progress)
    if plan_file is not None:
        write_plan(plan_file, made)
    return apply_plan(spark, place, made, on_progress=on_progress) if now else report


def _show(output: Output, report: GcReport, plan: Path | None) -> None:
    import msgspec

    if report.found:
        rows = [msgspec.structs.asdict(one) for one in report.found]
        output.table(_COLUMNS, rows, narrower=[("action", "reason", "object", "bytes")])
    if report.is_applied:
        output.note(f"removed {counted(report.removed_objects, 'object')}, {human_bytes(report.removed_bytes)}")
        for one in report.kept:
            output.note(f"kept {one.object}: {one.why}")
    elif report.removable_objects:
        size = human_bytes(report.removable_bytes)
        how = "keep a --plan and --apply it" if plan is None else f"--apply {plan} removes what it names"
        output.note(f"{counted(report.removable_objects, 'object')} to remove, {size}; {how}")
    else:
        output.note("nothing to remove")


# `tidelog pipeline compact`: merges small objects; by key, removes messages that newer ones have superseded.
#
# With --engine it turns the log of an engine into data indexed by key, and a snapshot with which a restore begins.


Codec = Literal["none", "zstd"]
_COMPACT_ENGINE_COLUMNS = (
    "engine",
    "generation",
    "seq",
    "versions",
    "dropped",
    "blob_files",
    "data_files",
    "objects",
    "bytes",
)
_COMPACT_COLUMNS = ("topic", "objects", "bytes", "into", "new_bytes", "removed", "deleted")


def compact(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name [default: all topics].")
    ] = None,
    by_key: Annotated[
        bool | None,
        typer.Option(
            "--by-key/--not-by-key",
            help="Remove what a later message of its key supersedes [default: as the topic's setting compaction].",
            show_default=False,
        ),
    ] = None,
    target_bytes: Annotated[
        str | None,
        typer.Option("--target-bytes", metavar="SIZE", help="How large an object may become [default: 256MiB]."),
    ] = None,
    codec: Annotated[
        Codec | None,
        typer.Option(
            "--codec",
            help="How new objects, or the blob files of an engine, are compressed [default: as before; by key zstd].",
        ),
    ] = None,
    min_dirty_ratio: Annotated[
        float | None,
        typer.Option(
            "--min-dirty-ratio", help="By key: which share of superseded messages is worth it [default: 0.5]."
        ),
    ] = None,
    tombstone_seconds: Annotated[
        float | None,
        typer.Option(
            "--tombstone-seconds", min=0, help="By key: how long a tombstone stays, by its time [default: 86400]."
        ),
    ] = None,
    keep_newest: Annotated[
        int | None,
        typer.Option("--keep-newest", min=1, help="Leave the N newest objects alone [default: 1]."),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace", metavar="SECONDS", min=0, help="How long replaced objects stay, from the switch [default: 3600]."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Do not wait for a compaction that seems to be at work.")
    ] = False,
    root: RootOption = None,
    engine: EngineOption = None,
    engine_name: EngineNameOption = None,
    large_bytes: Annotated[
        str | None,
        typer.Option(
            "--large-bytes",
            metavar="SIZE",
            help="Engine: values from here on are files of their own; the first time only [default: 1MiB].",
        ),
    ] = None,
    blob_file_bytes: Annotated[
        str | None,
        typer.Option(
            "--blob-file-bytes",
            "--pack-bytes",
            metavar="SIZE",
            help="Engine: how large a blob file of values is [default: 64MiB].",
        ),
    ] = None,
    keep_from: Annotated[
        int | None,
        typer.Option(
            "--keep-from", metavar="SEQ", min=1, help="Engine: history begins here; older versions are left out."
        ),
    ] = None,
    keep_versions: Annotated[
        int | None,
        typer.Option("--keep-versions", min=1, help="Engine: keep N versions below --keep-from [default: 1]."),
    ] = None,
    master: MasterOption = None,
) -> None:
    """Makes few large objects out of many small ones. Works beside the owners of the topics, or of an engine.

    Every frame is read, checked, written and read back by Spark's workers, then the catalog switches; the old objects
    stay readable until then and are deleted --grace seconds later, by the next run or by `tidelog pipeline gc`. By key,
    superseded messages are removed and their offsets stay. It can be killed at any point and run again.

    With --engine its log up to the high-water mark becomes blob files, data files, an index by key and a state. The
    raw log stays until `tidelog pipeline gc --engine` removes it.
    """
    of_topics = {
        "TOPIC": topics or None,
        "--by-key": by_key,
        "--target-bytes": target_bytes,
        "--min-dirty-ratio": min_dirty_ratio,
        "--tombstone-seconds": tombstone_seconds,
        "--keep-newest": keep_newest,
        "--grace": grace,
        "--take-over": take_over or None,
        "--root": root,
    }
    of_engines = {
        "--engine-name": engine_name,
        "--large-bytes": large_bytes,
        "--blob-file-bytes": blob_file_bytes,
        "--keep-from": keep_from,
        "--keep-versions": keep_versions,
    }
    if engine is not None:
        refuse_topic_options(engine, {name: value is not None for name, value in of_topics.items()})
        chosen = _engine_options(large_bytes, blob_file_bytes, codec, keep_from, keep_versions, is_dry_run=dry_run)
        _compact_engine(session, engine_root(session, engine, engine_name), master, chosen)
        return
    refuse_engine_options(dict(of_engines))
    from tidelog.pipeline.jobs import compact_topic as job

    options = job.CompactOptions(
        target_bytes=_bytes("--target-bytes", target_bytes or "256MiB"),
        keep_newest=1 if keep_newest is None else keep_newest,
        codec=codec,
        by_key=by_key,
        min_dirty_ratio=0.5 if min_dirty_ratio is None else min_dirty_ratio,
        tombstone_seconds=86400.0 if tombstone_seconds is None else tombstone_seconds,
        grace_seconds=3600.0 if grace is None else grace,
        take_over=take_over,
        is_dry_run=dry_run,
    )

    def work(spark: SparkSession, place: Root, on_progress: OnProgress) -> CompactReport:
        return job.compact(spark, place, topics or None, options, on_progress=on_progress)

    run_job(session, "compact", root, master, work, _show_compact)


def _engine_options(
    large_bytes: str | None,
    blob_file_bytes: str | None,
    codec: Codec | None,
    keep_from: int | None,
    keep_versions: int | None,
    *,
    is_dry_run: bool,
) -> CompactEngineOptions:
    from tidelog.pipeline.jobs.engine.compact import CompactEngineOptions

    sizes = {"large_bytes": ("--large-bytes", large_bytes), "blob_file_bytes": ("--blob-file-bytes", blob_file_bytes)}
    given = {name: _bytes(*size) for name, size in sizes.items() if size[1] is not None}
    return CompactEngineOptions(
        **given,
        codec=codec,
        keep_from=keep_from,
        keep_versions=1 if keep_versions is None else keep_versions,
        is_dry_run=is_dry_run,
    )


def _compact_engine(session: Session, root: EngineRoot, master: str | None, options: CompactEngineOptions) -> None:
    from tidelog.pipeline.jobs.engine import compact as job

    def work(spark: SparkSession, place: EngineRoot, on_progress: OnProgress) -> CompactEngineReport:
        return job.compact_engine(spark, place, options, on_progress=on_progress)

    run_engine_job(session, "compact", root, master, work, _show_compact_engine)


def _show_compact_engine(output: Output, report: CompactEngineReport) -> None:
    row = {name: getattr(report, "dropped_versions" if name == "dropped" else name) for name in _COMPACT_ENGINE_COLUMNS}
    if report.is_dry_run:  # blob files and indexes are known when they are written
        row |= dict.fromkeys(("blob_files", "objects", "bytes"))
    output.table(_COMPACT_ENGINE_COLUMNS, [row])
    if report.is_dry_run:
        output.note(
            f"nothing was changed; {report.new_blob_values} values would be packed, {report.new_data_files} would be "
            "files of their own"
        )


def _bytes(option: str, text: str | None) -> int:
    size = parse_bytes(text or "")
    if not isinstance(size, int) or size < 1:
        raise InputError(f"{option} is a size, not {text}", hint="For example 256MiB")
    return size


def _show_compact(output: Output, report: CompactReport) -> None:
    rows = [
        {
            "topic": one.topic,
            "objects": one.replaced_objects,
            "bytes": one.replaced_bytes,
            "into": one.new_objects,
            "new_bytes": one.new_bytes if not report.is_dry_run else None,
            "removed": one.removed_messages if not report.is_dry_run else one.superseded_messages,
            "deleted": one.deleted_objects,
        }
        for one in report.topics
    ]
    output.table(_COMPACT_COLUMNS, rows)
    if report.is_dry_run:
        output.note("nothing was changed; `removed` is what is superseded, whether it is worth removing or not")
