"""`tidelog pipeline verify --engine`: what is shown of it, and the digest that the engine's own directory tells.

Invariant: the directory is recovered in an overlay, so its files stay as they are; while somebody has it open it is not
asked, which is noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidelog.cli.engine_session import opened_core
from tidelog.cli.pipeline_engine import engine_root, run_engine_job
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.cli.output import Output
    from tidelog.pipeline.engine_jobs.verify import EngineVerifyReport
    from tidelog.pipeline.engine_jobs.verify_states import StateCheck
    from tidelog.pipeline.engines.place import EngineRoot
    from tidelog.pipeline.jobs.job import OnProgress

_STATES = ("state", "seq", "rows", "compared_with", "problems")
_REPLICAS = ("replica", "seq", "lag_bytes", "files", "bytes", "problems")


def verify_engine_command(
    session: Session,
    engine: str,
    name: str | None,
    digest: str | None,
    replicas: list[str] | None,
    master: str | None,
) -> None:
    """Runs it, and shows what it found."""
    _require_digest(digest)
    root = engine_root(session, engine, name)
    own_digest = None if root.directory is None else _own_digest(session, root.directory)

    def work(spark: SparkSession, root: EngineRoot, on_progress: OnProgress) -> EngineVerifyReport:
        from tidelog.pipeline.engine_jobs.verify import verify_engine

        return verify_engine(
            spark, root, digest=digest, own_digest=own_digest, replicas=replicas, on_progress=on_progress
        )

    run_engine_job(session, "verify", root, master, work, _show)


def _require_digest(digest: str | None) -> None:
    """A slip in it is told at once, not when everything was read and called wrong."""
    from tidelog.errors import InputError

    if digest is not None and re.fullmatch("[0-9a-f]{64}", digest) is None:
        hint = "It has 64 digits, 0 to 9 and a to f, as `tidelog engine digest` writes them"
        raise InputError(f"--digest {digest} is not the digest of an engine", hint=hint)


def _own_digest(session: Session, directory: Path) -> Callable[[int], str | None]:
    from tidelog.cli.engine_overlay import OverlayFiles
    from tidelog.engine.engine import Engine
    from tidelog.errors import LockedError, NotFoundError

    here = replace(session, directory=directory, store=None)

    def digest(seq: int) -> str | None:
        try:
            with OverlayFiles() as files, opened_core(here, directory, files) as core:
                engine = Engine(core, runs_in_background=False)
                try:
                    return engine.digest(seq)
                finally:
                    engine.close(checkpoint=False)
        except (LockedError, NotFoundError):
            return None

    return digest


def _show(output: Output, report: EngineVerifyReport) -> None:
    output.record(
        {
            "engine": report.engine,
            "seq": report.seq,
            "digest": report.digest or "unknown",
            "objects": report.objects,
            "object_bytes": report.object_bytes,
            "records": report.records,
            "values": report.values,
            "compacted_values": 0 if report.compaction is None else report.compaction.bodies,
            "problems": len(report.problems),
        }
    )
    if report.states:
        output.table(_STATES, [_state_row(one) for one in report.states], narrower=[("state", "seq", "problems")])
    if report.replicas:
        rows = [
            {
                "replica": one.url,
                "seq": one.high_water_mark,
                "lag_bytes": one.lag_bytes,
                "files": one.files,
                "bytes": one.bytes,
                "problems": one.problems,
            }
            for one in report.replicas
        ]
        output.table(_REPLICAS, rows)


def _state_row(state: StateCheck) -> dict[str, object]:
    """By the last part of its key: the rest is the same for all."""
    other = state.compared_with
    return {
        "state": state.key.rpartition("/")[2],
        "seq": state.seq,
        "rows": state.rows,
        "compared_with": "nothing" if other is None else other.rpartition("/")[2],
        "problems": state.problems,
    }
