"""`tidelog pipeline checkpoint`: the state of an engine, written by Spark, without the node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.pipeline_engine import EngineNameOption, OnlyEngineOption, engine_root, run_engine_job
from tidelog.cli.pipeline_job import MasterOption
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.engine_jobs.checkpoint import CheckpointReport
    from tidelog.pipeline.engines.place import EngineRoot
    from tidelog.pipeline.jobs.job import OnProgress

_COLUMNS = ("engine", "seq", "lsn", "rows", "files", "bytes", "state")


def checkpoint(
    session: Session,
    engine: OnlyEngineOption = None,
    engine_name: EngineNameOption = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, help="The state of this seq [default: the high-water mark].")
    ] = None,
    master: MasterOption = None,
) -> None:
    """Writes the state of an engine into its store, beside whoever owns it, so that a restore reads a few large files.

    It begins with the newest state that is there and reads the log behind it; what was written is read back before it
    counts. A state that is as new as the one that is asked for is left alone.
    """
    from tidelog.pipeline.engine_jobs import checkpoint as job

    def work(spark: SparkSession, root: EngineRoot, on_progress: OnProgress) -> CheckpointReport:
        return job.checkpoint_engine(spark, root, seq=seq, on_progress=on_progress)

    run_engine_job(session, "checkpoint", engine_root(session, engine, engine_name), master, work, _show)


def _show(output: Output, report: CheckpointReport) -> None:
    output.table(_COLUMNS, [{name: getattr(report, name) for name in _COLUMNS}])
