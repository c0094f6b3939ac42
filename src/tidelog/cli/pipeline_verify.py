"""`tidelog pipeline verify`: every frame of every object, read by Spark's workers; and whether a table is its topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_job import MasterOption, RootOption, run_job
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.output import Output
    from tidelog.pipeline.jobs.verify import VerifyReport

_COLUMNS = ("topic", "objects", "object_bytes", "files", "file_bytes", "messages", "problems")


def verify(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name [default: all topics].")
    ] = None,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Reads every frame of every object on Spark's workers and holds it against the catalog.

    Checksums, sizes, times, indexes, that every offset is in one object and none is missing, and the files behind the
    objects where the root is a directory. Problems are listed and the exit code is 1. Nothing is changed and no lock is
    taken.
    """
    from tidelog.pipeline.jobs import verify as job

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
        lambda spark, place, on_progress: job.verify(spark, place, topics, on_progress),
        show,
    )
