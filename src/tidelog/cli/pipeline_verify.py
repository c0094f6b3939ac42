"""`tidelog pipeline verify`: every frame of every object, read by Spark's workers; and whether a table is its topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_job import MasterOption, RootOption, run_job
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
    master: MasterOption = None,
) -> None:
    """Reads every frame of every object on Spark's workers and holds it against the catalog.

    Checksums, sizes, times, indexes, that every offset is in one object and none is missing, and the files behind the
    objects where the root is a directory. Problems are listed and the exit code is 1. Nothing is changed and no lock is
    taken.

    With --table, a table that `tidelog pipeline table` wrote is compared with its topic: Spark counts and sums up both.
    """
    from tidelog.errors import InputError
    from tidelog.pipeline.jobs import verify as job

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
