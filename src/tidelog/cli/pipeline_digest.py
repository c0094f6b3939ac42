"""`tidelog pipeline digest`: the digest of an engine's state, computed by Spark from its store alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_engine import EngineNameOption, OnlyEngineOption, engine_root, run_engine_job
from tidelog.cli.pipeline_job import MasterOption
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.engine_jobs.digest import DigestReport
    from tidelog.pipeline.engines.place import EngineRoot
    from tidelog.pipeline.jobs.job import OnProgress


def digest(
    session: Session,
    engine: OnlyEngineOption = None,
    engine_name: EngineNameOption = None,
    seq: Annotated[
        int | None, typer.Option("--seq", metavar="N", min=0, help="Of the state at this seq [default: the newest].")
    ] = None,
    from_log: Annotated[
        bool, typer.Option("--from-log", help="From the log as far back as it goes, not from the newest state.")
    ] = False,
    master: MasterOption = None,
) -> None:
    """Computes the digest of an engine's state at a seq, from what is in its store.

    It is the one that `tidelog engine digest` tells on every node that has the same log. With --from-log it is made of
    the shipped records alone where the log still begins with the first, else of the oldest state and all behind it.
    """
    from tidelog.pipeline.engine_jobs.digest import digest_engine

    def work(spark: SparkSession, root: EngineRoot, on_progress: OnProgress) -> DigestReport:
        return digest_engine(spark, root, seq, from_log=from_log, on_progress=on_progress)

    def show(output: Output, report: DigestReport) -> None:
        output.line(report.digest)
        output.note(f"seq {report.seq}, from {report.source} and {report.log_bytes:,} bytes of the log behind it")

    run_engine_job(session, "digest", engine_root(session, engine, engine_name), master, work, show)
