"""The job `digest`: the digest of an engine's state at a seq, computed in Spark from what is in its store.

Invariants
- It equals `engine.digest(seq)` of every node that has the same log. Nothing is changed, and no node is asked.
- The newest source that can be read is taken, and the log behind it only where the seq is behind it. From the log alone
  (`from_log`) the oldest is taken: nothing at all while the log begins with LSN 1.
- A source that turns out to be damaged is passed over for the one before it, and noted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidelog.errors import DataError, InputError, NotFoundError
from tidelog.pipeline.engine_jobs.digest_rows import Unreadable
from tidelog.pipeline.engine_jobs.digest_sources import LogPlan, Source, plan_log, sources_of
from tidelog.pipeline.engine_jobs.digest_state import ComputedState, compute_state
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof, Side

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.engine.manifest import Manifest
    from tidelog.pipeline.engines.place import EngineRoot, OpenedEngine


class DigestReport(JobReport, frozen=True, kw_only=True):
    """The digest of the state at a seq. `things` are its buckets and objects, `rows` all versions that were read."""

    engine: str
    seq: int
    digest: str
    things: int
    rows: int
    source: str
    log_bytes: int


def digest_engine(
    spark: SparkSession,
    root: EngineRoot,
    seq: int | None = None,
    *,
    from_log: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> DigestReport:
    """The digest at a seq, of the newest state in the store by default."""
    began = time.monotonic()
    with root.open() as opened:
        at = checked_seq(opened.manifest, seq)
        job = _DigestJob(spark, root, opened, at)
        on_progress(Progress("computing the state", 0, 1))
        source, plan, state = job.run(from_log=from_log)
        on_progress(Progress("computing the state", 1, 1))
    return DigestReport(
        job="digest",
        engine=root.name,
        seq=at,
        digest=state.digest,
        things=state.things,
        rows=state.rows,
        source=source.key,
        log_bytes=plan.size,
        proofs=(Proof(subject=f"engine {root.name} at seq {at}", went_in=side_of_state(state)),),
        notes=tuple(f"{one.place}: {one.reason}; it was passed over" for one in job.damage),
        seconds=round(time.monotonic() - began, 3),
    )


def side_of_state(state: ComputedState) -> Side:
    """A state that was computed, as a side of a proof."""
    return Side(
        messages=state.things, first_offset=None, last_offset=None, checksum=f"digest:{state.digest}", unit="things"
    )


def checked_seq(manifest: Manifest, seq: int | None) -> int:
    """The seq that is meant; an error that says which can be had, where it is none of them."""
    at = manifest.high_water_mark if seq is None else seq
    if at > manifest.high_water_mark:
        raise InputError(
            f"seq {at} is not in the store, which has the log up to seq {manifest.high_water_mark}",
            hint="Ship first, or ask for an earlier seq",
        )
    if at < manifest.history_start_seq:
        raise NotFoundError(f"states are kept from seq {manifest.history_start_seq} on", hint="Ask for a later seq")
    return at


class _DigestJob:
    """One digest: sources from the best to the worst, until one can be read."""

    def __init__(self, spark: SparkSession, root: EngineRoot, opened: OpenedEngine, seq: int) -> None:
        self._spark = spark
        self._place = root.place
        self._opened = opened
        self._seq = seq
        self.damage: list[Unreadable] = []

    def run(self, *, from_log: bool) -> tuple[Source, LogPlan, ComputedState]:
        for source in self._candidates(from_log):
            plan = self._plan(source, from_log)
            items = [*source.items(self._place), *plan.items]
            size = source.size + plan.size
            state = compute_state(self._spark, items, size, seq=self._seq, horizon_seq=0)
            if not state.damage:
                return source, plan, state
            self.damage += state.damage
        first = self.damage[0] if self.damage else None
        raise DataError(
            "no state in the store can be read, and its log does not begin with LSN 1"
            if first is None
            else f"the state cannot be computed: {first.place}: {first.reason}",
            operation="digest",
            hint="`tidelog pipeline verify --engine` lists all that is wrong; a replica may have good copies",
        )

    def _candidates(self, from_log: bool) -> Iterator[Source]:
        sources = sources_of(self._opened)
        self.damage += sources.unreadable
        usable = [one for one in sources.found if one.history_start_seq <= self._seq]
        yield from usable[:1] if from_log else reversed(usable)

    def _plan(self, source: Source, from_log: bool) -> LogPlan:
        """Versions up to the seq are all in a source that is not before it."""
        if self._seq <= source.seq and not from_log:
            return LogPlan([], 0)
        return plan_log(self._opened, self._place, source.lsn, self._opened.manifest.high_water_lsn + 1)
