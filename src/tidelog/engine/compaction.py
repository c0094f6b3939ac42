"""Putting small shipped objects of an engine's log together, beside its shipping: few large ones take their place.

    plan -> build, read back -> written down -> switch -> (an hour later) the old objects go

The parts are the tier's (`replacement*.py`), which do the same for topics; what is the engine's own is who may do it.

Invariants
- A new object has the frames of the old ones, one after the other, and begins at the position of the first: pointers
  into the log stay right, and every LSN is found at every moment, with the same bytes.
- A crash leaves the old objects or the new one in the catalog. What was begun to be switched is finished by whoever
  owns the engine next; what was only built is an orphan, which the sweep removes.
- Only the owner compacts. It begins, and then asks whether it is still the owner: either it is told that it is not, or
  whoever claims later finds what was begun, and takes it away (`replacement_switch.settle`). From then on the switch
  fails on the version of its state. So who lost the claim changes nothing.
- Objects go by the plan that was written down before the switch, and not before nobody needs to hold them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from tidelog.clock import Clock
from tidelog.engine.settings import EngineSettings
from tidelog.engine.store_link import StoreLink
from tidelog.errors import ClosedError, DataError
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.replacement import Replacement
from tidelog.tier.replacement_build import Built, build_object
from tidelog.tier.replacement_cleanup import DEFAULT_GRACE_SECONDS, apply_cleanup, plan_cleanup
from tidelog.tier.replacement_plan import Planned, Run, plan_merges
from tidelog.tier.replacement_switch import Replacing, begin, finish

# New objects that are switched to together: what a crash makes to be built again.
_RUNS_AT_ONCE = 8
_MODULUS = 1 << 64


class CompactionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What compactions of the log count, one of them or all since the engine was opened."""

    replaced_objects: int = 0
    replaced_bytes: int = 0
    new_objects: int = 0
    new_bytes: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0


class CompactionReport(CompactionCounts, frozen=True, kw_only=True):
    """What one compaction did. Replaced objects wait for a while before they are deleted; deleted are earlier ones."""

    waiting_objects: int = 0
    waiting_bytes: int = 0


class LogCompaction:
    """One compaction of an engine's shipped log, in the hands of its owner."""

    def __init__(
        self,
        link: StoreLink,
        settings: EngineSettings,
        clock: Clock,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = link
        self._owned = link.owned
        self._catalog = link.owned.catalog
        self._settings = settings
        self._clock = clock
        self._is_stopped = is_stopped
        self._done: list[tuple[Run, Descriptor]] = []

    def run(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> CompactionReport:
        """Puts together what is small, and deletes what was replaced longer ago than `grace_seconds`."""
        self._owned.ownership.verify()
        finish(self._catalog, self._clock)
        from_lsn: int | None = 0
        while from_lsn is not None:
            from_lsn = self._round(from_lsn)
        cleanup = self._clean_up(grace_seconds)
        return msgspec.structs.replace(
            cleanup,
            replaced_objects=sum(len(run.descriptors) for run, _ in self._done),
            replaced_bytes=sum(run.bytes for run, _ in self._done),
            new_objects=len(self._done),
            new_bytes=sum(made.size for _, made in self._done),
        )

    # Some new objects at a time

    def _round(self, from_lsn: int) -> int | None:
        """Makes some new objects; the LSN from which on there may be more to do."""
        planned = self._planned(from_lsn)
        if planned.runs:
            # Nobody else may compact, so whoever seems to be at work is one who lost the claim, or a former life.
            work = begin(self._catalog, self._link.objects, self._clock, take_over=True)
            with work.abandoned_on_error():
                self._owned.ownership.verify()
                self._replace(work, planned.runs)
        return planned.next_offset

    def _planned(self, from_lsn: int) -> Planned:
        target_bytes = self._settings.compaction_size_threshold
        return plan_merges(self._catalog, target_bytes=target_bytes, from_offset=from_lsn, max_runs=_RUNS_AT_ONCE)

    def _replace(self, work: Replacing, runs: Sequence[Run]) -> None:
        made = [(run, self._built(run, work.generation).descriptor) for run in runs]
        self._owned.ownership.verify()
        switched = work.switch([Replacement(descriptor=new, replaced=run.replaced) for run, new in made])
        starts = {one.descriptor.start_offset for one in switched}
        self._done += [(run, new) for run, new in made if new.start_offset in starts]

    def _built(self, run: Run, generation: int) -> Built:
        _check_positions(run.descriptors)
        return build_object(
            *(self._link.objects, self._catalog.keys, run.descriptors, generation),
            codec=self._settings.s3_compression,
            digest=self._digest,
            level=self._settings.cold_compression_level,
        )

    def _digest(self, frames: Frames, start: int, stop: int) -> int:
        """A sum over frames: their LSNs and the checksums that they were read with."""
        if self._is_stopped():
            raise ClosedError("the engine is closed", operation="compact")
        buffer, places = frames.buffer, memoryview(frames.positions).cast("Q")[start:stop]
        headers = (HEADER.unpack_from(buffer, place - HEADER_BYTES) for place in places)
        found: int = sum((lsn << 1 | 1) * (length << 32 | crc) for lsn, length, crc in headers)
        return found % _MODULUS

    # What was replaced

    def _clean_up(self, grace_seconds: float) -> CompactionReport:
        self._owned.ownership.verify()
        plan = plan_cleanup(self._catalog, self._clock.now_us(), grace_seconds)
        if plan.claim != self._owned.ownership.owner.claim:
            self._owned.ownership.verify()
        report = apply_cleanup(plan, self._catalog, self._link.objects)
        return CompactionReport(
            deleted_objects=len(report.objects),
            deleted_bytes=report.bytes,
            waiting_objects=plan.waiting_objects,
            waiting_bytes=plan.waiting_bytes,
        )


def _check_positions(descriptors: Sequence[Descriptor]) -> None:
    """Pointers are positions: objects that do not follow each other by them cannot become one."""
    for one, behind in pairwise(descriptors):
        if one.start_position + one.raw_size != behind.start_position:
            raise DataError(
                f"{behind.object_id} begins at position {behind.start_position}, and {one.object_id} ends at "
                f"{one.start_position + one.raw_size}",
                operation="compact",
                hint="Nothing was replaced; put the descriptors back from a replica",
            )
