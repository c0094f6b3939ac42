"""Merges small objects of one log into large ones, in the process that owns it: no Spark, one object after the other.

The job `compact` does the same on workers, and removes superseded messages besides. Both plan by `rewrite.py` and
switch by `rewrite_commit.py`, which lets one of them work at a time and explains why that is safe beside the owner.

Invariants
- At every moment every offset can be read. A crash loses the round that is under way, and the next run goes on.
- An object is switched to after it was read back from the store, and has the frames that went in.
- Replaced objects stay for the grace period, for those who are reading them; a later run deletes them.
"""

from __future__ import annotations

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog
from tidelog.cold.gc import DEFAULT_GRACE_SECONDS, Collector, ReplacedObjects
from tidelog.cold.rewrite import DEFAULT_TARGET_BYTES, Built, Digest, Planned, Run, build_object, plan_merges
from tidelog.cold.rewrite_commit import Rewrite, RewriteCommit, begin, finish
from tidelog.errors import CorruptionError
from tidelog.store.object_store import ObjectStore

_RUNS_AT_ONCE = 8


class MergeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the objects of a log. Deleted are those that earlier runs had replaced."""

    replaced_objects: int = 0
    replaced_bytes: int = 0
    new_objects: int = 0
    new_bytes: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0


class Merging:
    """One run over one log."""

    def __init__(
        self,
        catalog: Catalog,
        objects: ObjectStore,
        clock: Clock,
        *,
        digest: Digest,
        time_field: int | None,
        target_bytes: int = DEFAULT_TARGET_BYTES,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
    ) -> None:
        self._catalog = catalog
        self._objects = objects
        self._clock = clock
        self._digest = digest
        self._time_field = time_field
        self._target_bytes = target_bytes
        self._grace_seconds = grace_seconds
        self._switched: list[tuple[Run, Built]] = []

    def run(self) -> MergeReport:
        """Everything there is to merge now; ConflictError while another compaction of the log is at work."""
        finish(self._catalog, self._clock)
        from_offset: int | None = 0
        while from_offset is not None:
            planned = self._plan(from_offset)
            if planned.runs:
                work = begin(self._catalog, self._objects, self._clock)
                with work.abandoned_on_error():
                    planned = self._plan(from_offset)  # again, now that no other one compacts
                    self._round(work, planned.runs)
            from_offset = planned.next_offset
        collector = Collector(
            *(self._catalog, self._objects, self._clock.now_us()),
            grace_seconds=self._grace_seconds,
            rules=[ReplacedObjects],
        )
        removed = collector.apply(collector.plan())
        return MergeReport(
            replaced_objects=sum(len(run.descriptors) for run, _ in self._switched),
            replaced_bytes=sum(run.bytes for run, _ in self._switched),
            new_objects=len(self._switched),
            new_bytes=sum(built.descriptor.size for _, built in self._switched),
            deleted_objects=len(removed.objects),
            deleted_bytes=removed.bytes,
        )

    def _plan(self, from_offset: int) -> Planned:
        return plan_merges(
            self._catalog, target_bytes=self._target_bytes, from_offset=from_offset, max_runs=_RUNS_AT_ONCE
        )

    def _round(self, work: RewriteCommit, runs: list[Run]) -> None:
        done = [(run, self._built(work, run)) for run in runs]
        if not done:
            work.abandon()
            return
        made = [Rewrite(descriptor=built.descriptor, replaced=run.replaced) for run, built in done]
        switched = {one.descriptor.start_offset for one in work.switch(made)}
        self._switched += [(run, built) for run, built in done if run.start_offset in switched]

    def _built(self, work: RewriteCommit, run: Run) -> Built:
        work.renew()
        built = build_object(
            *(self._objects, self._catalog.keys, run.descriptors, work.generation),
            codec=run.descriptors[-1].codec,
            digest=self._digest,
            time_field=self._time_field,
        )
        made = built.descriptor
        is_same_range = (made.start_offset, made.next_offset) == (run.start_offset, run.next_offset)
        if not is_same_range or built.went_in != built.came_out:
            raise CorruptionError(
                f"the new object lacks messages of {run.start_offset} to {run.next_offset - 1}",
                path=made.object_id,
                byte=0,
                operation="compact",
                hint="Nothing was replaced; run it again",
            )
        return built
