"""`tidelog pipeline`: the group of Spark jobs over topics and engines, and the small ones of its commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.engine.session import TakeOverOption
from tidelog.cli.output import Output, counted
from tidelog.cli.pipeline.gc import compact, gc
from tidelog.cli.pipeline.job import (
    EngineNameOption,
    MasterOption,
    OnlyEngineOption,
    RootOption,
    engine_root,
    run_engine_job,
    run_job,
)
from tidelog.cli.pipeline.replay import backfill, replay
from tidelog.cli.pipeline.report import cost, report
from tidelog.cli.pipeline.run import plan, run
from tidelog.cli.pipeline.shell import shell
from tidelog.cli.pipeline.table import table
from tidelog.cli.pipeline.verify import verify
from tidelog.cli.session import Session, command, command_group
from tidelog.pipeline.address import EngineRoot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.jobs.engine.digest import DigestReport
    from tidelog.pipeline.jobs.engine.restore import RestoreJobReport
    from tidelog.pipeline.jobs.engine.snapshot import CheckpointReport
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.jobs.ship import ShipReport


# `tidelog pipeline ship`: ships the backlogs of many topics to the store, uploaded by Spark's workers.


_SHIP_COLUMNS = ("topic", "shipped_offset", "messages", "objects", "bytes")


def ship(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name [default: all that are owned here].")
    ] = None,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Brings everything on this disk to the store. Many topics at a time.

    For directories that no process has open: a running owner ships by itself, and is not disturbed. Workers read the
    files, so on a cluster the directory must be at the same path on each of them. Every object is read back and
    compared with the files before it counts.
    """
    from tidelog.pipeline.jobs import ship as job

    def show(output: Output, report: ShipReport) -> None:
        import msgspec

        output.table(_SHIP_COLUMNS, [msgspec.structs.asdict(one) for one in report.topics])

    run_job(
        session,
        "ship",
        root,
        master,
        lambda spark, place, on_progress: job.ship(spark, place, topics or None, on_progress),
        show,
    )


# `tidelog pipeline checkpoint`: Spark writes a snapshot of an engine, without the node.


_CHECKPOINT_COLUMNS = ("engine", "seq", "lsn", "rows", "files", "bytes", "state")


def checkpoint(
    session: Session,
    engine: OnlyEngineOption = None,
    engine_name: EngineNameOption = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, help="The state of this seq [default: the high-water mark].")
    ] = None,
    master: MasterOption = None,
) -> None:
    """Writes the state of an engine into its store. Works beside its owner; a restore then reads a few large files.

    It begins with the newest existing state and reads the log after it; what was written is read back before it counts.
    If a state as new as the requested one exists, nothing is written.
    """
    from tidelog.pipeline.jobs.engine import snapshot as job

    def work(spark: SparkSession, root: EngineRoot, on_progress: OnProgress) -> CheckpointReport:
        return job.checkpoint_engine(spark, root, seq=seq, on_progress=on_progress)

    run_engine_job(session, "checkpoint", engine_root(session, engine, engine_name), master, work, _show_checkpoint)


def _show_checkpoint(output: Output, report: CheckpointReport) -> None:
    output.table(_CHECKPOINT_COLUMNS, [{name: getattr(report, name) for name in _CHECKPOINT_COLUMNS}])


# `tidelog pipeline digest`: Spark computes the digest of an engine's state from its store alone.


def digest(
    session: Session,
    engine: OnlyEngineOption = None,
    engine_name: EngineNameOption = None,
    seq: Annotated[
        int | None, typer.Option("--seq", metavar="N", min=0, help="Of the state at this seq [default: the newest].")
    ] = None,
    from_log: Annotated[
        bool, typer.Option("--from-log", help="From the log as far back as it goes, not from the newest state.")
    ] = False,
    master: MasterOption = None,
) -> None:
    """Computes the digest of an engine's state at a seq. From its store alone.

    It equals what `tidelog engine digest` prints on every node that has the same log. With --from-log it is computed
    from the shipped records alone if the log still begins with the first, else from the oldest state and everything
    after it.
    """
    from tidelog.pipeline.jobs.engine.digest import digest_engine

    def work(spark: SparkSession, root: EngineRoot, on_progress: OnProgress) -> DigestReport:
        return digest_engine(spark, root, seq, from_log=from_log, on_progress=on_progress)

    def show(output: Output, report: DigestReport) -> None:
        output.line(report.digest)
        output.note(f"seq {report.seq}, from {report.source} and {report.log_bytes:,} bytes of the log after it")

    run_engine_job(session, "digest", engine_root(session, engine, engine_name), master, work, show)


# `tidelog pipeline restore`: Spark's workers restore a lost engine from its store into a new directory.


def restore(
    session: Session,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The new directory: empty, or made.")],
    engine: OnlyEngineOption = None,
    engine_name: EngineNameOption = None,
    replica: Annotated[
        list[str] | None,
        typer.Option("--replica", metavar="URL", help="A store with a copy, for when --engine cannot be read."),
    ] = None,
    take_over: TakeOverOption = False,
    master: MasterOption = None,
) -> None:
    """Restores a lost engine into an empty directory. From the newest snapshot in the store, and the log after it.

    As `tidelog engine restore`, with the work spread over Spark's workers. They write into the directory, so on a
    cluster all of them must share it with this machine. An engine that another node has open is refused, unless
    --take-over is given. To restart an interrupted restore, run the same command again.
    """
    from tidelog.pipeline.jobs.engine.restore import restore_engine_directory

    root = engine_root(session, engine, engine_name)
    replicas = [engine_root(session, one, engine_name) for one in replica or ()]
    run_engine_job(
        session,
        "restore",
        root,
        master,
        lambda spark, place, on_progress: restore_engine_directory(
            spark, place, target, replicas=replicas, on_progress=on_progress, take_over=take_over
        ),
        _show_restore,
        may_be_missing=bool(replicas),
    )


def _show_restore(output: Output, report: RestoreJobReport) -> None:
    begun = f"the state of seq {report.state_seq}" if report.state_seq else "the whole log"
    output.line(
        f"{report.directory}: seq {report.seq}, {counted(report.rows, 'row')} in {counted(report.pages, 'page')}, from "
        f"{begun} and {report.entries:,} entries after it"
    )


# By the name of the job; what they have in common is in `job.py`.
_JOBS: dict[str, Callable[..., None]] = {
    "run": run,
    "plan": plan,
    "verify": verify,
    "table": table,
    "ship": ship,
    "compact": compact,
    "checkpoint": checkpoint,
    "replay": replay,
    "backfill": backfill,
    "gc": gc,
    "restore": restore,
    "digest": digest,
    "cost": cost,
    "report": report,
    "shell": shell,
}


def add_to(app: typer.Typer) -> None:
    """Registers the group with its jobs."""
    group = command_group("Jobs of Spark over topics and engines, here or on a cluster.")
    for name, work in _JOBS.items():
        command(group, name)(work)
    app.add_typer(group, name="pipeline")
