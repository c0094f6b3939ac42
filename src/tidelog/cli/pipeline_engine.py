"""What the jobs of `tidelog pipeline` over an engine share on the command line: which engine it is, and how they run.

Invariants
- Nothing of Spark, and nothing of the pipeline, is imported before a job runs.
- A command is about topics or about an engine: options of both at once are an error that names them.
- The engine is looked up before Spark is started.
- Reports, progress and exit codes are those of the jobs over topics (`pipeline_job.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_job import Report, run_in_spark
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.engines.place import EngineRoot
    from tidelog.pipeline.jobs.job import OnProgress

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
    from tidelog.errors import InputError
    from tidelog.pipeline.engines.place import find_engine

    settings = {} if session.config is None else {"config": os.path.abspath(session.config)}
    location = engine or session.directory or session.store
    if location is None:
        raise InputError("no engine is named", hint="Name its directory or its store: --engine s3://bucket/prefix")
    return find_engine(location, name, **settings)


def refuse_topic_options(engine: str, given: dict[str, object]) -> None:
    """InputError if something was given that is only for topics; `given` has those options by the names users type."""
    from tidelog.errors import InputError

    named = [name for name, value in given.items() if value]
    if named:
        hint = f"Leave --engine out, or {' and '.join(named)}"
        raise InputError(f"{', '.join(named)} is for topics, and --engine {engine} names an engine", hint=hint)


def refuse_engine_options(given: dict[str, object]) -> None:
    """InputError if something was given that is only for engines, and no engine was."""
    from tidelog.errors import InputError

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
    """A slip in an address is told at once, not when Spark has started."""
    with root.open():
        pass
