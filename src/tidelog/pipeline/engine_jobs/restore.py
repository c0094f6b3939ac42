"""The job `restore`: a lost engine from its store into a new directory, by many workers at once.

    newest good state, piece by piece -> the log behind it, piece by piece -> claim -> what came meanwhile
    -> leaves of key ranges -> their numbers -> pages.db -> engine.ckpt, engine.json

It is the restore of `engine/restore.py`, with the same order of things: what is read, what is claimed when, and what a
crash leaves behind are decided there. What takes long is done by workers (`restore_steps.py`).

Invariants
- Driver and workers see one directory: on this machine always, on a cluster it must be a shared one. A worker that does
  not find the driver's file in it says so.
- The directory can be opened as an engine when the job has ended, and not before. Killed anywhere it is run again with
  the same arguments, and begins anew.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidelog.clock import Clock, SystemClock
from tidelog.engine.engine_directory import EngineDirectory
from tidelog.engine.restore import RestoreReport
from tidelog.errors import AccessDeniedError, ConfigError, DataError, HeldError, NotFoundError, RetryError
from tidelog.files import LocalFiles
from tidelog.pipeline.engine_jobs.restore_steps import SparkRestore
from tidelog.pipeline.engines.place import EngineRoot
from tidelog.pipeline.jobs.job import JobReport, OnProgress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof, Side

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A bucket that is gone and a key that no longer counts are mistakes of the settings as long as there is no replica.
_UNUSABLE = (AccessDeniedError, ConfigError, DataError, NotFoundError, RetryError)


class RestoreJobReport(JobReport, frozen=True, kw_only=True):
    """What was restored, and from what: `seq` is the last entry, `state_seq` that of the state it began with."""

    directory: str
    store: str
    seq: int
    state_seq: int
    damaged_states: tuple[str, ...]
    entries: int
    rows: int
    pages: int
    next_lsn: int
    epoch: int


def restore_engine_directory(
    spark: SparkSession,
    root: EngineRoot,
    directory: str | os.PathLike[str],
    *,
    replicas: Sequence[EngineRoot] = (),
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
    take_over: bool = False,
) -> RestoreJobReport:
    """Builds a lost engine anew in an empty directory, which can be opened as that engine then.

    HeldError while another node has the engine open, unless `take_over`. Entries above `seq` of the report are the
    orchestrator's to give again. Where the store cannot be read or has no good copy, the first of the `replicas` that
    has one takes its place for good.
    """
    path = Path(os.path.abspath(os.path.expanduser(directory)))
    failed: list[str] = []
    for one in (root, *replicas[:-1]) if replicas else ():
        try:
            return _restore(spark, one, path, on_progress, clock or SystemClock(), failed, take_over)
        except HeldError:
            raise  # the store is well, and so is the engine
        except _UNUSABLE as error:
            failed.append(f"{one.store_url} could not be used: {error.message}")
    return _restore(spark, (root, *replicas)[-1], path, on_progress, clock or SystemClock(), failed, take_over)


def _restore(
    spark: SparkSession,
    root: EngineRoot,
    path: Path,
    on_progress: OnProgress,
    clock: Clock,
    failed: Sequence[str],
    take_over: bool,
) -> RestoreJobReport:
    began, config = time.monotonic(), root.load()
    node = f"restore-{os.getpid()}-{secrets.token_hex(4)}"
    with root.open(read_only=False) as opened:
        restore = SparkRestore(
            *(path, opened.objects, opened.metadata),
            keys=opened.keys,
            node=node,
            settings=config.storage_engine,
            files=LocalFiles(),
            clock=clock,
            take_over=take_over,
            lease_seconds=config.lease_seconds,
        )
        restore.use(spark, root.place, EngineDirectory(node=node, store=root.store_url, name=root.name), on_progress)
        report = restore.run()
    return _report(restore, report, root, path, failed, time.monotonic() - began)


def _report(
    restore: SparkRestore, report: RestoreReport, root: EngineRoot, path: Path, failed: Sequence[str], seconds: float
) -> RestoreJobReport:
    damaged = (f"the state {key} could not be used; an older one was" for key in report.damaged_states)
    return RestoreJobReport(
        job="restore",
        proofs=(Proof(subject=f"rows of {path}", went_in=_side(*restore.filled), came_out=_side(*restore.placed)),),
        notes=(*failed, *damaged, f"entries above seq {report.seq} come from the orchestrator"),
        seconds=round(seconds, 3),
        directory=str(path),
        store=root.store_url,
        seq=report.seq,
        state_seq=report.state_seq,
        damaged_states=report.damaged_states,
        entries=report.entries,
        rows=report.rows,
        pages=restore.next_page - 1,
        next_lsn=report.next_lsn,
        epoch=report.epoch,
    )


def _side(rows: int, checksum: int) -> Side:
    return Side(messages=rows, first_offset=None, last_offset=None, checksum=f"cells:{checksum:016x}", unit="rows")
