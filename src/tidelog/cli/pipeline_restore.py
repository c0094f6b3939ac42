"""`tidelog pipeline restore`: a lost engine from its store into a new directory, by Spark's workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.engine_session import TakeOverOption
from tidelog.cli.pipeline_engine import EngineNameOption, OnlyEngineOption, engine_root, run_engine_job
from tidelog.cli.pipeline_job import MasterOption
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.output import Output
    from tidelog.pipeline.engine_jobs.restore import RestoreJobReport


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
    """Builds a lost engine anew in an empty directory: the newest state in the store, and the log behind it.

    As `tidelog engine restore`, with the work spread over Spark's workers. They write into the directory, so on a
    cluster it must be one that all of them share with this machine. An engine that another node has open is refused,
    unless --take-over says so. A restore that was cut off is begun again by the same command.
    """
    from tidelog.pipeline.engine_jobs.restore import restore_engine_directory

    root = engine_root(session, engine, engine_name)
    replicas = [engine_root(session, one, engine_name) for one in replica or ()]
    run_engine_job(
        *(session, "restore", root, master),
        lambda spark, place, on_progress: restore_engine_directory(
            spark, place, target, replicas=replicas, on_progress=on_progress, take_over=take_over
        ),
        _show,
        may_be_missing=bool(replicas),
    )


def _show(output: Output, report: RestoreJobReport) -> None:
    from tidelog.cli.output import counted

    begun = f"the state of seq {report.state_seq}" if report.state_seq else "the whole log"
    output.line(
        f"{report.directory}: seq {report.seq}, {counted(report.rows, 'row')} in {counted(report.pages, 'page')}, from "
        f"{begun} and {report.entries:,} entries behind it"
    )
