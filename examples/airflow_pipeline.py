"""A DAG for Airflow that runs a declared pipeline (docs/how-to/pipeline-run.md) every quarter of an hour.

Put it into the folder of DAGs. Exit code 4 means that another run is at work, or that something failed in a way that
may pass: Airflow tries the task again. Any other failure fails it at once. Without Airflow this file prints what it
would run.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from datetime import UTC, datetime, timedelta

COMMAND = ["tidelog", "pipeline", "run", "/etc/tidelog/pipeline.toml", "--json"]
TRY_LATER = 4


def run_pipeline() -> None:
    """The task: its output is the report, in the log of the task."""
    exceptions = importlib.import_module("airflow.exceptions")
    code = subprocess.run(COMMAND, check=False).returncode
    if code == TRY_LATER:
        raise exceptions.AirflowException("try later")
    if code != 0:
        raise exceptions.AirflowFailException(f"the pipeline ended with {code}: its report says why")


if importlib.util.find_spec("airflow") is None:
    print("Airflow is not installed; the task would run:", *COMMAND)
else:
    sdk = importlib.import_module("airflow.sdk")
    with sdk.DAG(
        "tidelog_pipeline",
        schedule=timedelta(minutes=15),
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
    ):
        sdk.task(run_pipeline, retries=3, retry_delay=timedelta(minutes=2))()
