"""`tidelog pipeline verify`: every frame of topics, or all of an engine, read by workers; tables against topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_engine import EngineNameOption, EngineOption, refuse_engine_options, refuse_topic_options
from tidelog.cli.pipeline_job import MasterOption, RootOption, run_job
from tidelog.cli.pipeline_verify_engine import verify_engine_command
from tidelog.cli.session import Session
from tidelog.cli.table_choice import CatalogOption, CatalogPropertyOption, chosen_content

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.jobs.verify import VerifyReport
    from tidelog.pipeline.root import Root

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
    """Reads every frame of every object on Spark's workers and holds it against the catalog.

    Checksums, sizes, times, indexes, that every offset is in one object and none is missing, and the files behind the
    objects where the root is a directory. Problems are listed and the exit code is 1. Nothing is changed and no lock is
    taken.

    With --table, a table that `tidelog pipeline table` wrote is compared with its topic: Spark counts and sums up both.

    With --engine, everything of an engine in its store: every record and value of its log, compacted data and its
    indexes, every state against the log, the marks, the digest, and its replicas byte by byte.
    """
    from tidelog.errors import InputError
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

    def show(output: Output, report: VerifyReport) -> None:
        rows = [
            {
                "topic": one.topic,
                "objects": one.objects,
                "object_bytes": one.object_bytes,
                "files": one.files,
                "file_bytes": one.file_bytes,
                "messages": one.side.messages,
                "problems": one.problems,
            }
            for one in report.topics
        ]
        output.table(_COLUMNS, rows)

    run_job(
        *(session, "verify", root, master),
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
    from tidelog.pipeline.jobs.verify_table import TableProofReport, verify_table

    def work(spark: SparkSession, place: Root, on_progress: OnProgress) -> TableProofReport:
        return verify_table(spark, place, chosen_content(spark, place, table, catalog, properties), on_progress)

    run_job(session, "verify", root, master, work)
