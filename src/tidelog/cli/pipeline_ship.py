"""`tidelog pipeline ship`: brings the backlogs of many topics to the store, sent by Spark's workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_job import MasterOption, RootOption, run_job
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.output import Output
    from tidelog.pipeline.jobs.ship import ShipReport

_COLUMNS = ("topic", "shipped_offset", "messages", "objects", "bytes")


def ship(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name [default: all that are owned here].")
    ] = None,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Brings everything that is on this disk to the store, many topics at a time.

    For directories that nobody has open: a running owner ships by itself, and is not disturbed. Workers read the files,
    so on a cluster the directory must be at the same path on each of them. Every object is read back and compared with
    the files before it counts.
    """
    from tidelog.pipeline.jobs import ship as job

    def show(output: Output, report: ShipReport) -> None:
        import msgspec

        output.table(_COLUMNS, [msgspec.structs.asdict(one) for one in report.topics])

    run_job(
        *(session, "ship", root, master),
        lambda spark, place, on_progress: job.ship(spark, place, topics or None, on_progress),
        show,
    )
