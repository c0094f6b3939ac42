"""`tidelog pipeline compact`: small objects become large ones; by key, what newer messages have superseded goes.

With --engine the log of an engine becomes data that is found by key, and a state that a restore begins with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

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
    from tidelog.pipeline.engine_jobs.compact import CompactEngineOptions, CompactEngineReport
    from tidelog.pipeline.engines.place import EngineRoot
    from tidelog.pipeline.jobs.compact import CompactReport
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.root import Root

Codec = Literal["none", "zstd"]
_ENGINE_COLUMNS = ("engine", "generation", "seq", "versions", "dropped", "packs", "data_files", "objects", "bytes")
_COLUMNS = ("topic", "objects", "bytes", "into", "new_bytes", "removed", "deleted")


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
            help="How new objects, or the packs of an engine, are compressed [default: as before; by key zstd].",
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
        typer.Option("--keep-newest", min=1, help="So many of the newest objects are left alone [default: 1]."),
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
    pack_bytes: Annotated[
        str | None,
        typer.Option("--pack-bytes", metavar="SIZE", help="Engine: how large a pack of values is [default: 64MiB]."),
    ] = None,
    keep_from: Annotated[
        int | None,
        typer.Option(
            "--keep-from", metavar="SEQ", min=1, help="Engine: history begins here; older versions are left out."
        ),
    ] = None,
    keep_versions: Annotated[
        int | None,
        typer.Option("--keep-versions", min=1, help="Engine: so many versions stay below --keep-from [default: 1]."),
    ] = None,
    master: MasterOption = None,
) -> None:
    """Makes few large objects out of many small ones, beside the owners of the topics, or of an engine.

    Every frame is read, checked, written and read back by Spark's workers, then the catalog switches; the old objects
    stay readable until then and are deleted --grace seconds later, by the next run or by `tidelog pipeline gc`. By key,
    superseded messages are removed and their offsets stay. It can be killed at any point and run again.

    With --engine its log up to the high-water mark becomes packs and files of values, an index by key and a state. The
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
        "--pack-bytes": pack_bytes,
        "--keep-from": keep_from,
        "--keep-versions": keep_versions,
    }
    if engine is not None:
        refuse_topic_options(engine, {name: value is not None for name, value in of_topics.items()})
        chosen = _engine_options(large_bytes, pack_bytes, codec, keep_from, keep_versions, is_dry_run=dry_run)
        _compact_engine(session, engine_root(session, engine, engine_name), master, chosen)
        return
    refuse_engine_options(dict(of_engines))
    from tidelog.pipeline.jobs import compact as job

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

    run_job(session, "compact", root, master, work, _show)


def _engine_options(
    large_bytes: str | None,
    pack_bytes: str | None,
    codec: Codec | None,
    keep_from: int | None,
    keep_versions: int | None,
    *,
    is_dry_run: bool,
) -> CompactEngineOptions:
    from tidelog.pipeline.engine_jobs.compact import CompactEngineOptions

    sizes = {"large_bytes": ("--large-bytes", large_bytes), "pack_bytes": ("--pack-bytes", pack_bytes)}
    given = {name: _bytes(*size) for name, size in sizes.items() if size[1] is not None}
    return CompactEngineOptions(
        **given,
        codec=codec,
        keep_from=keep_from,
        keep_versions=1 if keep_versions is None else keep_versions,
        is_dry_run=is_dry_run,
    )


def _compact_engine(session: Session, root: EngineRoot, master: str | None, options: CompactEngineOptions) -> None:
    from tidelog.pipeline.engine_jobs import compact as job

    def work(spark: SparkSession, place: EngineRoot, on_progress: OnProgress) -> CompactEngineReport:
        return job.compact_engine(spark, place, options, on_progress=on_progress)

    run_engine_job(session, "compact", root, master, work, _show_engine)


def _show_engine(output: Output, report: CompactEngineReport) -> None:
    row = {name: getattr(report, "dropped_versions" if name == "dropped" else name) for name in _ENGINE_COLUMNS}
    if report.is_dry_run:  # packs and indexes are known when they are written
        row |= dict.fromkeys(("packs", "objects", "bytes"))
    output.table(_ENGINE_COLUMNS, [row])
    if report.is_dry_run:
        output.note(
            f"nothing was changed; {report.new_packed_bodies} values would be packed, {report.new_data_files} would be "
            "files of their own"
        )


def _bytes(option: str, text: str | None) -> int:
    from tidelog.errors import InputError
    from tidelog.units import parse_bytes

    size = parse_bytes(text or "")
    if not isinstance(size, int) or size < 1:
        raise InputError(f"{option} is a size, not {text}", hint="For example 256MiB")
    return size


def _show(output: Output, report: CompactReport) -> None:
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
    output.table(_COLUMNS, rows)
    if report.is_dry_run:
        output.note("nothing was changed; `removed` is what is superseded, whether it is worth removing or not")
