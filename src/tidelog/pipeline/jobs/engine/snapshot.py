"""The job `checkpoint` over an engine: workers write a snapshot of its state at a seq, without the node.

    rows at the seq -> row files by ranges of keys -> read back -> the snapshot, which names them -> the manifest

Invariants
- A published snapshot was read back and has the digest of the rows that were read.
- A snapshot is listed after the newest one, or not at all: if one that is as new exists, it is left as it is, and this
  is reported.
- The same rows give the same files. A killed job is rerun, and writes the same files again.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from tidelog.clock import Clock, SystemClock
from tidelog.engine.cold.manifest import Manifest, StoredCheckpoint, publish_state, told_of_dropped_log
from tidelog.engine.mvcc.applier import shipped_results
from tidelog.engine.sst.snapshot import write_parts_state
from tidelog.engine.sst.sstable import RowPart
from tidelog.pipeline.address import EngineRoot, OpenedEngine
from tidelog.pipeline.flow import Flow
from tidelog.pipeline.jobs.engine.compact_steps import RowsAt, SourceOfRows, pinning_for
from tidelog.pipeline.jobs.engine.rows import (
    FILED_SCHEMA,
    ROWS_PER_FILE,
    FileNames,
    parts_of,
    read_back,
    require_equal,
    state_proof,
    survey,
    unplaced,
    write_files,
)
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, ignore_progress, logged
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entry_batches import objects_of
from tidelog.pipeline.spark_flow import spark_flow
from tidelog.store.keys import CheckpointId

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STEPS = 4


class CheckpointReport(JobReport, frozen=True, kw_only=True):
    """The state that was written, and from what. `is_new` is False where one as new was there already."""

    engine: str
    seq: int
    lsn: int
    state: str
    is_new: bool = True
    rows: int = 0
    files: int = 0
    bytes: int = 0
    digest: str | None = None
    base: str | None = None
    log_objects: int = 0
    log_bytes: int = 0


@logged
def checkpoint_engine(
    spark: SparkSession,
    root: EngineRoot,
    *,
    seq: int | None = None,
    rows_per_file: int = ROWS_PER_FILE,
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
) -> CheckpointReport:
    """Writes the state of an engine at a seq, at its high-water mark by default, beside its owner."""
    with closing(spark_flow(spark)) as flow, root.open(read_only=False) as opened:
        return CheckpointJob(flow, opened, root.place, clock or SystemClock(), on_progress, rows_per_file).run(seq)


class CheckpointJob:
    """One run of it, with the store open for writing."""

    def __init__(
        self,
        flow: Flow,
        opened: OpenedEngine,
        place: EngineLocation,
        clock: Clock,
        on_progress: OnProgress = ignore_progress,
        rows_per_file: int = ROWS_PER_FILE,
    ) -> None:
        self._flow = flow
        self._opened = opened
        self._place = place
        self._clock = clock
        self._on_progress = on_progress
        self._rows_per_file = rows_per_file

    def run(self, seq: int | None = None) -> CheckpointReport:
        """Writes the state, unless one that is as new is listed."""
        with told_of_dropped_log(self._opened.catalog):
            return self._run(seq)

    def _run(self, seq: int | None) -> CheckpointReport:
        manifest = self._opened.newest_manifest()
        newest = manifest.checkpoints[-1] if manifest.checkpoints else None
        wanted = manifest.high_water_mark if seq is None else seq
        if newest is not None and newest.seq >= wanted:
            return self._nothing_to_do(newest, wanted)
        with pinning_for("checkpoint", self._opened, self._clock) as pinning:
            self._tell("rows", 0)
            found = SourceOfRows(self._flow, self._opened, self._place).at(manifest, pinning, seq)
            return self._write(found, manifest)

    def _nothing_to_do(self, newest: StoredCheckpoint, wanted: int) -> CheckpointReport:
        return CheckpointReport(
            job="checkpoint",
            engine=self._opened.keys.name,
            seq=newest.seq,
            lsn=newest.lsn,
            state=newest.key,
            is_new=False,
            rows=newest.rows,
            notes=(f"a state of seq {newest.seq} is there already, and {wanted} was asked for: nothing was written",),
        )

    def _write(self, found: RowsAt, manifest: Manifest) -> CheckpointReport:
        went_in = survey(found.rows, found.created, found.seq, self._rows_per_file)
        self._tell("files", 1)
        names = FileNames(kind="state", seq=found.seq, lsn=found.lsn)
        filed = found.rows.mapped(partial(unplaced, went_in.cuts), FILED_SCHEMA)
        parts = parts_of(write_files(filed, self._place, (len(went_in.cuts) + 1, names)))
        self._tell("reading back", 2)
        came_out = read_back(self._flow, self._place, parts, found.created, found.seq)
        require_equal(went_in, came_out, found.seq)
        self._tell("publishing", 3)
        state = self._publish(found, manifest, parts)
        self._tell("publishing", _STEPS)
        return CheckpointReport(
            job="checkpoint",
            engine=self._opened.keys.name,
            seq=state.seq,
            lsn=state.lsn,
            state=state.key,
            rows=state.rows,
            files=len(parts),
            bytes=state.size + sum(part.size for part in parts),
            digest=came_out.digest,
            base=None if found.base is None else found.base.key,
            log_objects=len(objects_of(found.log)),
            log_bytes=sum(one.size for one in objects_of(found.log)),
            reconciliations=(state_proof(self._opened.keys.name, state.seq, went_in, came_out),),
            notes=found.passed_over,
        )

    def _publish(self, found: RowsAt, manifest: Manifest, parts: list[RowPart]) -> StoredCheckpoint:
        opened = self._opened
        name = CheckpointId(found.seq, found.lsn, manifest.epoch)
        state = write_parts_state(
            opened.objects,
            opened.keys,
            name,
            parts,
            created_us=self._clock.now_us(),
            history_start_seq=manifest.history_start_seq,
            results=shipped_results(
                found.catalog(opened, self._place),
                opened.objects,
                self._place.opened().fetchers,
                manifest,
                found.seq,
                found.lsn,
            ),
        )
        publish_state(opened.metadata, opened.keys, self._clock, state)
        return state

    def _tell(self, step: str, done: int) -> None:
        self._on_progress(Progress(step, done, _STEPS))
