"""`tidelog pipeline`: the group of the jobs that Spark runs over topics and engines, each with a module of its own."""

from __future__ import annotations

from collections.abc import Callable

import typer

from tidelog.cli.pipeline_checkpoint import checkpoint
from tidelog.cli.pipeline_compact import compact
from tidelog.cli.pipeline_cost import cost
from tidelog.cli.pipeline_digest import digest
from tidelog.cli.pipeline_gc import gc
from tidelog.cli.pipeline_replay import backfill, replay
from tidelog.cli.pipeline_report import report
from tidelog.cli.pipeline_restore import restore
from tidelog.cli.pipeline_ship import ship
from tidelog.cli.pipeline_table import table
from tidelog.cli.pipeline_verify import verify
from tidelog.cli.session import command, command_group

# By the name of the job; what they have in common is in `pipeline_job.py`.
_JOBS: dict[str, Callable[..., None]] = {
    "verify": verify,
    "table": table,
    "ship": ship,
    "compact": compact,
    "checkpoint": checkpoint,
    "replay": replay,
    "backfill": backfill,
    "gc": gc,
    "restore": restore,
    "digest": digest,
    "cost": cost,
    "report": report,
}


def add_to(app: typer.Typer) -> None:
    """Registers the group with its jobs."""
    group = command_group("Jobs that Spark runs over topics and engines, on this machine or on a cluster.")
    for name, work in _JOBS.items():
        command(group, name)(work)
    app.add_typer(group, name="pipeline")
