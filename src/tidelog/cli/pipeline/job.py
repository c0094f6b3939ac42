"""What the jobs of `tidelog pipeline` share on the command line: where the topics are, where Spark runs, the report.

Invariants
- Nothing of Spark is imported before a job runs.
- A report is printed whole: its table and reconciliations, or JSON, on stdout; notes and findings on stderr, or in the
  JSON.
- The exit code is 1 when a job found something wrong, or what came out is not what went in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.output import Output
from tidelog.cli.session import Session
from tidelog.errors import InputError, RetryError
from tidelog.pipeline.address import EngineRoot, Root, find_engine, find_root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.jobs.job import JobReport, OnProgress


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
        *("--master", "--remote"),
        metavar="URL",
        help="Where Spark runs: local[*], spark://host:7077, sc://host [default: here].",
    ),
]
_CONNECT_MODULE = "pyspark.sql.connect.session"
Report = TypeVar("Report", bound="JobReport")


def job_root(session: Session, root: str | None) -> Root:
    """The place that the options name: --root; else the log directory; else the store alone."""
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
    """The same for work that already knows its address."""
    from tidelog.pipeline.jobs.job import told_in_our_words

    try:
        with (
            spark_for(session.output, job, master) as spark,
            progress_bars(session.output) as on_progress,
            told_in_our_words(job),
        ):
            report = work(spark, on_progress)
    except KeyboardInterrupt:
        session.output.note(f"{job} was interrupted; run it again, and what it had done already counts once")
        raise
    tell(session, report, show)


@contextmanager
def spark_for(
    output: Output, job: str, master: str | None, *, may_be_kept: bool = True, **conf: object
) -> Iterator[SparkSession]:
    """A session for the job; one that was already running in this process is kept when the job is done.

    It is one of the server that `tidelog pipeline shell --keep` has started, where that can stand in for it.
    """
    from tidelog.pipeline.session.kept import is_kept, leave
    from tidelog.pipeline.session.session import has_ended, spark_session

    was_running = _is_running()
    with nullcontext() if was_running else output.working("Starting Spark"):
        spark = None if was_running or not may_be_kept else _kept_session(output, f"tidelog {job}", master, conf)
        if spark is None:
            spark = spark_session(f"tidelog {job}", master, **conf)
    try:
        yield spark
    except Exception as error:
        if has_ended(spark):
            text = f"Spark has ended while {job} was at work: it was stopped or killed, or had no memory left"
            raise RetryError(text, operation=job, hint="Run it again: what was done already counts once") from error
        raise
    finally:
        if not was_running and is_kept(spark):
            leave(spark)
        elif not was_running and not has_ended(spark):
            _stop(spark)


def _stop(spark: SparkSession) -> None:
    from tidelog.pipeline.session.session import java_has_died

    try:
        spark.stop()
    except Exception:
        if not java_has_died():
            raise


def _kept_session(output: Output, name: str, master: str | None, conf: dict[str, object]) -> SparkSession | None:
    from tidelog.pipeline.session.kept import connect_to, differences, find_kept, running

    kept = find_kept(master)
    if kept is not None:
        return connect_to(kept, name, conf)
    if master is None and (other := running()) is not None and (names := differences(other, None)):
        output.note(f"the kept session is not used, for it was started with another: {', '.join(names)}")
    return None


def _is_running() -> bool:
    """Whether this process has a session, of any thread, or one through Spark Connect."""
    from tidelog.pipeline.session.kept import leave
    from tidelog.pipeline.session.session import forget_dead_java, has_ended

    if "pyspark" in sys.modules:
        forget_dead_java()
        if sys.modules["pyspark"].SparkContext._active_spark_context is not None:
            return True
    connect = sys.modules.get(_CONNECT_MODULE)
    active = None if connect is None else connect.SparkSession.getActiveSession()
    if active is not None and has_ended(active):
        leave(active)
        return False
    return active is not None


def tell(session: Session, report: Report, show: Callable[[Output, Report], None] | None = None) -> None:
    """Prints a report, and leaves with 1 when it is not good."""
    import msgspec

    if session.as_json:
        session.output.document({**msgspec.to_builtins(report), "ok": report.ok, "is_good": report.ok})
    else:
        if show is not None:
            show(session.output, report)
        for note in report.notes:
            session.output.note(f"note: {note}")
        for reconciliation in report.reconciliations:
            session.output.line(f"reconciliation: {reconciliation}", indent="  ")
        for finding in report.findings:
            session.output.note(f"problem: {finding}")
    if not report.is_good:
        raise typer.Exit(ExitCode.FOUND_WRONG)


@contextmanager
def progress_bars(output: Output) -> Iterator[OnProgress]:
    """A bar for each step of a job, one after the other."""
    with output.steps() as show:
        yield lambda progress: show(*progress)


# What the jobs of `tidelog pipeline` over an engine share on the command line: which engine it is, and how they run.
#
# Invariants
# - Nothing of Spark, and nothing of the pipeline, is imported before a job runs.
# - A command is about topics or about an engine: options of both at once are an error that names them.
# - The engine is looked up before Spark is started.
# - Reports, progress and exit codes are those of the jobs over topics (`job.py`).


EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="DIR|URL", help="An engine instead of topics: its directory, or the store that it ships to."
    ),
]
# Of the commands that are about engines alone.
OnlyEngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="DIR|URL",
        help="The engine: its directory, or the store that it ships to [default: --dir, or --store].",
    ),
]
EngineNameOption = Annotated[
    str | None,
    typer.Option("--engine-name", metavar="NAME", help="The engine's name in its store [default: main]."),
]


def engine_root(session: Session, engine: str | None, name: str | None = None) -> EngineRoot:
    """The engine that the options name: --engine; else the common --dir, else the common --store."""
    settings = {} if session.config is None else {"config": os.path.abspath(session.config)}
    location = engine or session.directory or session.store
    if location is None:
        raise InputError("no engine was named", hint="Name its directory or its store: --engine s3://bucket/prefix")
    return find_engine(location, name, **settings)


def refuse_topic_options(engine: str, given: dict[str, object]) -> None:
    """InputError if something was given that is only for topics; `given` has those options by the names users type."""
    named = [name for name, value in given.items() if value]
    if named:
        hint = f"Leave --engine out, or {' and '.join(named)}"
        raise InputError(f"{', '.join(named)} is for topics, but --engine {engine} names an engine", hint=hint)


def refuse_engine_options(given: dict[str, object]) -> None:
    """InputError if something was given that is only for engines, and no engine was."""
    named = [name for name, value in given.items() if value is not None and value is not False]
    if named:
        raise InputError(f"{', '.join(named)} is for engines", hint="Name the engine: --engine DIR, or --engine URL")


def run_engine_job(
    session: Session,
    job: str,
    root: EngineRoot,
    master: str | None,
    work: Callable[[SparkSession, EngineRoot, OnProgress], Report],
    show: Callable[[Output, Report], None] | None = None,
    *,
    may_be_missing: bool = False,
) -> None:
    """Runs a job over an engine in a session of its own and tells its report; `show` draws what only this job has.

    `may_be_missing` is for a job that can do without this store, since it knows of others.
    """
    if not may_be_missing:
        _require_engine(root)
    run_in_spark(session, job, master, lambda spark, on_progress: work(spark, root, on_progress), show)


def _require_engine(root: EngineRoot) -> None:
    """Reports a mistyped address at once, not after Spark has started."""
    with root.open():
        pass
