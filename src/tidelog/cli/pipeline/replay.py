"""`tidelog pipeline replay` and `backfill`: messages of a topic, or rows of files, into a topic; an engine's log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from tidelog.cli.output import Output, counted
from tidelog.cli.pipeline.job import (
    EngineNameOption,
    EngineOption,
    MasterOption,
    RootOption,
    engine_root,
    job_root,
    refuse_engine_options,
    refuse_topic_options,
    run_engine_job,
    run_job,
)
from tidelog.cli.session import Session
from tidelog.errors import InputError
from tidelog.pipeline.address import EngineRoot

if TYPE_CHECKING:
    from tidelog.pipeline.jobs.engine.replay import EngineReplayReport
    from tidelog.pipeline.jobs.replay_topic import ReplayReport

NameOption = Annotated[
    str | None,
    typer.Option("--name", help="Under which the target remembers how far it is [default: from the source]."),
]


def replay(
    session: Session,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="The topic that is read: namespace/name.")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="The topic that is written, made when absent.")
    ] = None,
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
    end: Annotated[
        str | None,
        typer.Option("--to", metavar="OFFSET|TOPIC", help="Where to end (exclusive); of an engine: into which topic."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="How many messages are one transaction [default: 1000000].")
    ] = None,
    target_root: Annotated[
        str | None, typer.Option("--target-root", metavar="DIR|URL", help="Where the target is [default: --root].")
    ] = None,
    target_metadata: Annotated[
        str | None, typer.Option("--target-metadata", metavar="URL", help="Where the catalog of --target-root is.")
    ] = None,
    name: NameOption = None,
    engine: EngineOption = None,
    engine_name: EngineNameOption = None,
    to_engine: Annotated[
        Path | None, typer.Option("--to-engine", metavar="DIR", help="Of an engine: into the engine in this directory.")
    ] = None,
    until_seq: Annotated[
        int | None, typer.Option("--until-seq", metavar="SEQ", min=0, help="Of an engine: up to this seq.")
    ] = None,
    seqs: Annotated[
        Literal["offset", "header"] | None,
        typer.Option(
            "--seqs", help="Of an engine into a topic: where the seqs are [default: offset, which is seq - 1]."
        ),
    ] = None,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Writes the messages of a topic into another one. In order and each once, all or some, unchanged or transformed.

    Conditions and expressions are Spark SQL over key, value, headers, timestamp and offset, such as --where "key IS NOT
    NULL" or --select "upper(cast(value AS string)) AS value" --select key. Killed and run again it continues; run again
    later it copies what was appended since. With --engine it applies the log of an engine to another one (--to-engine
    DIR), or writes it as entries into a topic (--to TOPIC).
    """
    if engine is not None:
        topics_only = {"SOURCE": source, "TARGET": target, "--where": where, "--select": select, "--from": start}
        topics_only |= {"--step": step, "--target-root": target_root, "--target-metadata": target_metadata}
        refuse_topic_options(engine, {one: value is not None for one, value in topics_only.items()})
        found = engine_root(session, engine, engine_name)
        if to_engine is not None:
            _refuse_for_a_copy({"--to": end, "--seqs": seqs, "--name": name, "--root": root})
            _replay_into_engine(session, found, to_engine, until_seq, master)
        else:
            _replay_into_topic(session, found, _EntriesInto(end, root, until_seq, seqs or "offset", name), master)
        return
    refuse_engine_options(
        {"--engine-name": engine_name, "--to-engine": to_engine, "--until-seq": until_seq, "--seqs": seqs}
    )
    _replay_topic(
        session,
        _named("SOURCE", source),
        _named("TARGET", target),
        root,
        master,
        into=None if target_root is None else (target_root, target_metadata),
        selection=(where, tuple(select or ())),
        offsets=(start, _offset(end)),
        step=step,
        name=name,
    )


def _named(what: str, topic: str | None) -> str:
    if topic is None:
        raise InputError(f"{what} is missing", hint="Name two topics: tidelog pipeline replay SOURCE TARGET")
    return topic


def _offset(text: str | None) -> int | None:
    if text is not None and not text.isdecimal():
        raise InputError(f"--to {text} is not an offset", hint="--to names a topic only with --engine")
    return None if text is None else int(text)


def _replay_topic(
    session: Session,
    source: str,
    target: str,
    root: str | None,
    master: str | None,
    *,
    into: tuple[str, str | None] | None,
    selection: tuple[str | None, tuple[str, ...]],
    offsets: tuple[int | None, int | None],
    step: int | None,
    name: str | None,
) -> None:
    from tidelog.pipeline.jobs.replay_topic import DEFAULT_STEP_MESSAGES, Selection
    from tidelog.pipeline.jobs.replay_topic import replay as job

    place_of_target = None if into is None else job_root(replace(session, metadata=into[1]), into[0])
    chosen = Selection(where=selection[0], select=selection[1])
    run_job(
        session,
        "replay",
        root,
        master,
        lambda spark, place, on_progress: job(
            spark,
            place,
            source,
            target,
            target_root=place_of_target,
            selection=chosen,
            start_offset=offsets[0],
            end_offset=offsets[1],
            step_messages=step or DEFAULT_STEP_MESSAGES,
            name=name,
            on_progress=on_progress,
        ),
        _show,
    )


def _refuse_for_a_copy(given: dict[str, str | None]) -> None:
    """InputError if something was given that says how entries come into a topic, when they go into an engine."""
    named = [one for one, value in given.items() if value is not None]
    if named:
        raise InputError(f"{', '.join(named)} is for a topic, but --to-engine names an engine", hint="Give one of them")


def _replay_into_engine(
    session: Session, engine: EngineRoot, directory: Path, until_seq: int | None, master: str | None
) -> None:
    from tidelog.pipeline.jobs.engine.replay import replay_engine

    run_engine_job(
        session,
        "replay",
        engine,
        master,
        lambda spark, place, on_progress: replay_engine(
            spark, place, directory, until_seq=until_seq, on_progress=on_progress
        ),
        _show_engine,
    )


class _EntriesInto(NamedTuple):
    """Into which topic the entries of an engine go, and how."""

    topic: str | None
    root: str | None
    until_seq: int | None
    seqs: Literal["offset", "header"]
    name: str | None


def _replay_into_topic(session: Session, engine: EngineRoot, into: _EntriesInto, master: str | None) -> None:
    from tidelog.pipeline.jobs.engine.replay import replay_engine_to_topic

    if into.topic is None:
        hint = "Name an engine (--to-engine DIR) or a topic (--to namespace/name --root DIR)"
        raise InputError("the target is missing", hint=hint)
    topic, topic_root = into.topic, job_root(session, into.root)
    run_engine_job(
        session,
        "replay",
        engine,
        master,
        lambda spark, place, on_progress: replay_engine_to_topic(
            spark,
            place,
            topic_root,
            topic,
            until_seq=into.until_seq,
            seqs=into.seqs,
            name=into.name,
            on_progress=on_progress,
        ),
        _show,
    )


def backfill(
    session: Session,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, or directories of files.")],
    to: Annotated[str, typer.Option("--to", metavar="TOPIC", help="The topic that is written, made when absent.")],
    format: Annotated[
        Literal["parquet", "csv", "json", "avro"], typer.Option("--format", help="What the files are.")
    ] = "parquet",
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
    """Writes the rows of files into a topic. Parquet, CSV, JSON or Avro, file by file in the order of their names, each
    once. JSON files have an object a line.

    Killed and run again it continues. If the files differ from those that it was begun with it refuses, since it could
    not tell which rows are new: then name only the new files.
    """
    from tidelog.pipeline.jobs.replay_topic import Mapping
    from tidelog.pipeline.jobs.replay_topic import backfill as job

    mapping = Mapping(value=value_column, key=key_column, timestamp=timestamp_column)
    options = {"header": str(header).lower(), "sep": separator} if format == "csv" else {}
    run_job(
        session,
        "backfill",
        root,
        master,
        lambda spark, place, on_progress: job(
            spark, place, paths, to, format=format, mapping=mapping, options=options, name=name, on_progress=on_progress
        ),
        _show,
    )


def _show(output: Output, report: ReplayReport) -> None:
    where = "" if report.target_first_offset is None else f", from offset {report.target_first_offset} on"
    output.line(f"{report.target}: {counted(report.messages, 'message')} in {counted(report.steps, 'step')}{where}")


def _show_engine(output: Output, report: EngineReplayReport) -> None:
    refused = f", {report.refused:,} of them refused as before" if report.refused else ""
    output.line(f"{report.target}: seq {report.seq}, {report.entries:,} entries{refused}")
