"""`tidelog pipeline verify`: workers check every frame of topics, or all of an engine; tables against topics."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.engine.session import opened_core
from tidelog.cli.output import Output
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
from tidelog.cli.pipeline.table import CatalogOption, CatalogPropertyOption, chosen_content
from tidelog.cli.session import Session
from tidelog.engine.engine import Engine
from tidelog.engine.verify.overlay import OverlayFiles
from tidelog.errors import InputError, LockedError, NotFoundError
from tidelog.pipeline.address import EngineRoot, Root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.jobs.engine.verify import EngineVerifyReport, StateCheck
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.jobs.verify import TopicsVerifyReport


# `tidelog pipeline verify --engine`: its output, and the digest according to the engine's own directory.
#
# Invariant: the directory is recovered in an overlay, so its files stay unchanged; while another process has it open it
# is not asked, which is noted.


_STATES = ("state", "seq", "rows", "compared_with", "problems")
_REPLICAS = ("replica", "seq", "lag_bytes", "files", "bytes", "problems")


def verify_engine_command(
    session: Session,
    engine: str,
    name: str | None,
    digest: str | None,
    replicas: list[str] | None,
    master: str | None,
) -> None:
    """Runs it, and shows what it found."""
    _require_digest(digest)
    root = engine_root(session, engine, name)
    own_digest = None if root.directory is None else _own_digest(session, root.directory)

    def work(spark: SparkSession, root: EngineRoot, on_progress: OnProgress) -> EngineVerifyReport:
        from tidelog.pipeline.jobs.engine.verify import verify_engine

        return verify_engine(
            spark, root, digest=digest, own_digest=own_digest, replicas=replicas, on_progress=on_progress
        )

    run_engine_job(session, "verify", root, master, work, _show)


def _require_digest(digest: str | None) -> None:
    """Reports a mistyped one at once, not after everything was read and called wrong."""
    if digest is not None and re.fullmatch("[0-9a-f]{64}", digest) is None:
        hint = "It has 64 digits, 0 to 9 and a to f, as `tidelog engine digest` writes them"
        raise InputError(f"--digest {digest} is not the digest of an engine", hint=hint)


def _own_digest(session: Session, directory: Path) -> Callable[[int], str | None]:
    here = replace(session, directory=directory, store=None)

    def digest(seq: int) -> str | None:
        try:
            with OverlayFiles() as files, opened_core(here, directory, files) as core:
                engine = Engine(core, runs_in_background=False)
                try:
                    return engine.digest(seq)
                finally:
                    engine.close(checkpoint=False)
        except (LockedError, NotFoundError):
            return None

    return digest


def _show(output: Output, report: EngineVerifyReport) -> None:
    output.record(
        {
            "engine": report.engine,
            "seq": report.seq,
            "digest": report.digest or "unknown",
            "objects": report.objects,
            "object_bytes": report.object_bytes,
            "records": report.records,
            "values": report.values,
            "value_files": report.value_files,
            "compacted_values": 0 if report.compaction is None else report.compaction.values,
            "problems": len(report.findings),
        }
    )
    if report.states:
        output.table(_STATES, [_state_row(one) for one in report.states], narrower=[("state", "seq", "problems")])
    if report.replicas:
        rows = [
            {
                "replica": one.url,
                "seq": one.high_water_mark,
                "lag_bytes": one.lag_bytes,
                "files": one.files,
                "bytes": one.bytes,
                "problems": one.problems,
            }
            for one in report.replicas
        ]
        output.table(_REPLICAS, rows)


def _state_row(state: StateCheck) -> dict[str, object]:
    """By the last part of its key: the rest is the same for all."""
    other = state.compared_with
    return {
        "state": state.key.rpartition("/")[2],
        "seq": state.seq,
        "rows": state.rows,
        "compared_with": "nothing" if other is None else other.rpartition("/")[2],
        "problems": state.problems,
    }


_COLUMNS = ("topic", "objects", "object_bytes", "files", "file_bytes", "messages", "problems")


def verify(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name [default: all topics].")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option("--table", metavar="PATH|URL|NAME", help="Prove that this table equals its topic, instead."),
    ] = None,
    catalog: CatalogOption = None,
    catalog_property: CatalogPropertyOption = None,
    root: RootOption = None,
    engine: EngineOption = None,
    engine_name: EngineNameOption = None,
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="HEX", help="The digest that the engine's newest state must have.")
    ] = None,
    replica: Annotated[
        list[str] | None,
        typer.Option("--replica", metavar="URL", help="Compare this replica of the engine [default: as its settings]."),
    ] = None,
    master: MasterOption = None,
) -> None:
    """Reads every frame of every object, and checks the catalog. Spark's workers read, and compare with the catalog.

    Checksums, sizes, times, indexes, that every offset is in one object and none is missing, and the files after the
    objects if the root is a directory. Problems are listed and the exit code is 1. Nothing is changed and no lock is
    taken.

    With --table, a table that `tidelog pipeline table` wrote is compared with its topic: Spark counts and sums up both.

    With --engine, everything of an engine in its store: every record and value of its log, compacted data and its
    indexes, every state against the log, the marks, the digest, and its replicas byte by byte.
    """
    from tidelog.pipeline.jobs import verify as job

    if engine is not None:
        refuse_topic_options(engine, {"TOPIC": topics, "--table": table, "--catalog": catalog, "--root": root})
        verify_engine_command(session, engine, engine_name, digest, replica, master)
        return
    refuse_engine_options({"--engine-name": engine_name, "--digest": digest, "--replica": replica or None})
    if table is not None:
        if topics:
            raise InputError("a table is compared with the topic that it was made of", hint="Leave the topics out")
        _verify_table(session, table, catalog, catalog_property, root, master)
        return

    def show(output: Output, report: TopicsVerifyReport) -> None:
        rows = [
            {
                "topic": one.topic,
                "objects": one.objects,
                "object_bytes": one.object_bytes,
                "files": one.files,
                "file_bytes": one.file_bytes,
                "messages": one.totals.messages,
                "problems": one.problems,
            }
            for one in report.topics
        ]
        output.table(_COLUMNS, rows)

    run_job(
        session,
        "verify",
        root,
        master,
        lambda spark, place, on_progress: job.verify(spark, place, topics or None, on_progress),
        show,
    )


def _verify_table(
    session: Session,
    table: str,
    catalog: str | None,
    properties: list[str] | None,
    root: str | None,
    master: str | None,
) -> None:
    from tidelog.pipeline.tables.verify import TableVerifyReport, verify_table

    def work(spark: SparkSession, place: Root, on_progress: OnProgress) -> TableVerifyReport:
        return verify_table(spark, place, chosen_content(spark, place, table, catalog, properties), on_progress)

    run_job(session, "verify", root, master, work)
