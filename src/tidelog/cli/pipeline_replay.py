"""`tidelog pipeline replay` and `tidelog pipeline backfill`: messages of a topic, or rows of files, into a topic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tidelog.cli.pipeline_job import MasterOption, RootOption, job_root, run_job
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.output import Output
    from tidelog.pipeline.jobs.replay import ReplayReport

NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Under which the target remembers how far it is [default: from the source]."),
]


def replay(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The topic that is read: namespace/name.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The topic that is written, made when absent.")],
    where: Annotated[
        str | None, typer.Option("--where", metavar="SQL", help="Only messages for which this holds.")
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select", metavar="SQL", help="An expression with its name, for each of value, key, headers, timestamp."
        ),
    ] = None,
    start: Annotated[
        int | None, typer.Option("--from", metavar="OFFSET", help="Where to begin, the first time.")
    ] = None,
    end: Annotated[int | None, typer.Option("--to", metavar="OFFSET", help="Where to end (exclusive).")] = None,
    step: Annotated[int, typer.Option("--step", min=1, help="How many messages are one transaction.")] = 1_000_000,
    target_root: Annotated[
        str | None, typer.Option("--target-root", metavar="DIR|URL", help="Where the target is [default: --root].")
    ] = None,
    target_metadata: Annotated[
        str | None, typer.Option("--target-metadata", metavar="URL", help="Where the catalog of --target-root is.")
    ] = None,
    name: NameOption = None,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Writes the messages of a topic into another one, in order and each once, all or some, as they are or changed.

    Conditions and expressions are Spark SQL over key, value, headers, timestamp and offset, such as --where "key IS NOT
    NULL" or --select "upper(cast(value AS string)) AS value" --select key. Killed and run again it goes on; run again
    later it takes what has come since.
    """
    from tidelog.pipeline.jobs.replay import Selection
    from tidelog.pipeline.jobs.replay import replay as job

    into = None if target_root is None else job_root(replace(session, metadata=target_metadata), target_root)
    selection = Selection(where=where, select=tuple(select or ()))
    run_job(
        *(session, "replay", root, master),
        lambda spark, place, on_progress: job(
            *(spark, place, source, target),
            target_root=into,
            selection=selection,
            start_offset=start,
            end_offset=end,
            step_messages=step,
            name=name,
            on_progress=on_progress,
        ),
        _show,
    )


def backfill(
    session: Session,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, or directories of files.")],
    to: Annotated[str, typer.Option("--to", metavar="TOPIC", help="The topic that is written, made when absent.")],
    format: Annotated[Literal["parquet", "csv"], typer.Option("--format", help="What the files are.")] = "parquet",
    value_column: Annotated[
        str | None, typer.Option("--value-column", help="The value of a message [default: the whole row as JSON].")
    ] = None,
    key_column: Annotated[str | None, typer.Option("--key-column", help="The key of a message.")] = None,
    timestamp_column: Annotated[str | None, typer.Option("--timestamp-column", help="The time of a message.")] = None,
    header: Annotated[bool, typer.Option("--header/--no-header", help="Whether CSV files begin with names.")] = True,
    separator: Annotated[str, typer.Option("--separator", help="What stands between the fields of CSV files.")] = ",",
    name: NameOption = None,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Writes the rows of Parquet or CSV files into a topic, file by file in the order of their names, each once.

    Killed and run again it goes on. When the files are others than those that it was begun with it refuses, since it
    could not tell which rows are new: name the new files alone then.
    """
    from tidelog.pipeline.jobs.replay_files import Mapping
    from tidelog.pipeline.jobs.replay_files import backfill as job

    mapping = Mapping(value=value_column, key=key_column, timestamp=timestamp_column)
    options = {"header": str(header).lower(), "sep": separator} if format == "csv" else {}
    run_job(
        *(session, "backfill", root, master),
        lambda spark, place, on_progress: job(
            *(spark, place, paths, to),
            format=format,
            mapping=mapping,
            options=options,
            name=name,
            on_progress=on_progress,
        ),
        _show,
    )


def _show(output: Output, report: ReplayReport) -> None:
    from tidelog.cli.output import counted

    where = "" if report.target_first_offset is None else f", from offset {report.target_first_offset} on"
    output.line(f"{report.target}: {counted(report.messages, 'message')} in {counted(report.steps, 'step')}{where}")
