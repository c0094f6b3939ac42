"""What the jobs of `tidelog pipeline` share on the command line: where the topics are, where Spark runs, the report.

Invariants
- Nothing of Spark is imported before a job runs.
- A report is printed whole: its table and proofs, or JSON, on stdout; notes and problems on stderr, or in the JSON.
- The exit code is 1 when a job found something wrong or its proof does not hold.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import OnDone, Output
    from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress
    from tidelog.pipeline.root import Root

RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="DIR|URL",
        help="Where the topics are: a log directory, or a store with its catalog [default: --dir, or --store alone].",
    ),
]
MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master", metavar="URL", help="Where Spark runs: local[*], spark://host:7077, sc://host [default: here]."
    ),
]
_CONNECT_MODULE = "pyspark.sql.connect.session"
Report = TypeVar("Report", bound="JobReport")


def job_root(session: Session, root: str | None) -> Root:
    """The place that the options name: --root; else the log directory; else the store alone."""
    from tidelog.pipeline.root import find_root

    settings = {} if session.config is None else {"config": os.path.abspath(session.config)}
    if root is not None:
        return find_root(root, session.metadata, **settings)
    if session.settings.store is not None and not session.root.is_dir():
        return find_root(session.settings.store, session.settings.metadata, **settings)
    return find_root(session.root, session.metadata, **settings)


def run_job(
    session: Session,
    job: str,
    root: str | None,
    master: str | None,
    work: Callable[[SparkSession, Root, OnProgress], Report],
    show: Callable[[Output, Report], None] | None = None,
) -> None:
    """Runs a job in a session of its own and tells its report; `show` draws what only this job has."""
    place = job_root(session, root)
    run_in_spark(session, job, master, lambda spark, on_progress: work(spark, place, on_progress), show)


def run_in_spark(
    session: Session,
    job: str,
    master: str | None,
    work: Callable[[SparkSession, OnProgress], Report],
    show: Callable[[Output, Report], None] | None = None,
) -> None:
    """The same for work that knows its place already, whatever that is the place of."""
    from tidelog.pipeline.jobs.spark_errors import told_in_our_words

    try:
        with _spark(job, master) as spark, progress_bars(session.output) as on_progress, told_in_our_words(job):
            report = work(spark, on_progress)
    except KeyboardInterrupt:
        session.output.note(f"{job} was interrupted; run it again, and what it had done already counts once")
        raise
    tell(session, report, show)


@contextmanager
def _spark(job: str, master: str | None) -> Iterator[SparkSession]:
    """A session for the job; one that ran in this process before goes on when the job is done."""
    from tidelog.pipeline.session import spark_session

    was_running = _is_running()
    spark = spark_session(f"tidelog {job}", master)
    try:
        yield spark
    finally:
        if not was_running:
            spark.stop()


def _is_running() -> bool:
    """Whichever thread began it: a session of this process, or one through Spark Connect."""
    if "pyspark" in sys.modules and sys.modules["pyspark"].SparkContext._active_spark_context is not None:
        return True
    connect = sys.modules.get(_CONNECT_MODULE)
    return connect is not None and connect.SparkSession.getActiveSession() is not None


def tell(session: Session, report: Report, show: Callable[[Output, Report], None] | None = None) -> None:
    """Prints a report, and leaves with 1 when it is not good."""
    import msgspec

    if session.as_json:
        session.output.document({**msgspec.to_builtins(report), "is_good": report.is_good})
    else:
        if show is not None:
            show(session.output, report)
        for note in report.notes:
            session.output.note(f"note: {note}")
        for proof in report.proofs:
            session.output.line(f"proof: {proof}", indent="  ")
        for problem in report.problems:
            session.output.note(f"problem: {problem}")
    if not report.is_good:
        raise typer.Exit(ExitCode.FOUND_WRONG)


@contextmanager
def progress_bars(output: Output) -> Iterator[OnProgress]:
    """A bar for each step of a job, one after the other."""
    with _Bars(output) as bars:
        yield bars.show


class _Bars:
    """Draws the step that a job is at; a new step takes the place of the one before."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._step: tuple[str, int] | None = None
        self._bar = ExitStack()
        self._on_done: OnDone = lambda done: None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, progress: Progress) -> None:
        if self._step != (progress.step, progress.total):
            self._step = (progress.step, progress.total)
            self._bar.close()
            self._on_done = self._bar.enter_context(self._output.progress(progress.step, progress.total))
        self._on_done(progress.done)
