"""`tidelog pipeline report`: one page with plots of all topics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_job import MasterOption, RootOption, job_root, progress_bars, run_job, tell
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.output import Output
    from tidelog.pipeline.jobs.report import ReportReport

_DEFAULT_PAGE = Path("tidelog-report.html")


def report(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name [default: all].")
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Where the page goes.")] = _DEFAULT_PAGE,
    exact: Annotated[bool, typer.Option("--exact", help="Count every message over time, with Spark.")] = False,
    details: Annotated[int, typer.Option("--details", min=0, help="How many topics get charts of their own.")] = 100,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Writes a page with plots: messages and bytes over time, sizes, hot and cold, subscription lag.

    One file that needs nothing else, for a browser or an attachment. It is made from descriptors and files, in a moment
    and without Spark; --exact has Spark count every message over time, and --master looks at topics on its workers.
    """
    from tidelog.pipeline.jobs.report import make_report

    if exact or master is not None:
        run_job(
            *(session, "report", root, master),
            lambda spark, place, on_progress: make_report(
                place, to, topics or None, spark=spark, exact=exact, max_details=details, on_progress=on_progress
            ),
            _show,
        )
        return
    with progress_bars(session.output) as on_progress:
        made = make_report(job_root(session, root), to, topics or None, max_details=details, on_progress=on_progress)
    tell(session, made, _show)


def _show(output: Output, made: ReportReport) -> None:
    from tidelog.cli.output import counted, human_bytes

    output.line(f"{made.page}: {counted(made.topics, 'topic')}, {counted(made.messages, 'message')}")
    output.note(f"{human_bytes(made.cold_bytes)} in the store, {human_bytes(made.hot_bytes)} on this disk")
