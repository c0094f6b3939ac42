"""`tidelog pipeline compact`: small objects become large ones; by key, what newer messages have superseded goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tidelog.cli.pipeline_job import MasterOption, RootOption, run_job
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.jobs.compact import CompactReport
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.root import Root

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
        str, typer.Option("--target-bytes", metavar="SIZE", help="How large an object may become.")
    ] = "256MiB",
    codec: Annotated[
        Literal["none", "zstd"] | None,
        typer.Option("--codec", help="How new objects are compressed [default: as before; by key zstd]."),
    ] = None,
    min_dirty_ratio: Annotated[
        float,
        typer.Option("--min-dirty-ratio", help="By key: which share of superseded messages is worth it."),
    ] = 0.5,
    tombstone_seconds: Annotated[
        float, typer.Option("--tombstone-seconds", min=0, help="By key: how long a tombstone stays, by its time.")
    ] = 86400.0,
    keep_newest: Annotated[
        int, typer.Option("--keep-newest", min=1, help="So many of the newest objects are left alone.")
    ] = 1,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", min=0, help="How long replaced objects stay, from the switch."),
    ] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Do not wait for a compaction that seems to be at work.")
    ] = False,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Makes few large objects out of many small ones, beside the owners of the topics.

    Every frame is read, checked, written and read back by Spark's workers, then the catalog switches; the old objects
    stay readable until then and are deleted --grace seconds later, by the next run or by `tidelog pipeline gc`. By key,
    superseded messages are removed and their offsets stay. It can be killed at any point and run again.
    """
    from tidelog.pipeline.jobs import compact as job

    options = job.CompactOptions(
        target_bytes=_bytes(target_bytes),
        keep_newest=keep_newest,
        codec=codec,
        by_key=by_key,
        min_dirty_ratio=min_dirty_ratio,
        tombstone_seconds=tombstone_seconds,
        grace_seconds=grace,
        take_over=take_over,
        is_dry_run=dry_run,
    )

    def work(spark: SparkSession, place: Root, on_progress: OnProgress) -> CompactReport:
        return job.compact(spark, place, topics or None, options, on_progress=on_progress)

    run_job(session, "compact", root, master, work, _show)


def _bytes(text: str) -> int:
    from tidelog.errors import InputError
    from tidelog.units import parse_bytes

    size = parse_bytes(text)
    if not isinstance(size, int) or size < 1:
        raise InputError(f"--target-bytes is a size, not {text}", hint="For example 256MiB")
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
