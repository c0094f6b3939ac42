"""Merging small shipped objects of an engine's log into few large ones while shipping goes on; and the scheduling and
the public calls of compaction.

    plan -> build, read back -> persist the plan -> switch -> (an hour later) delete the old objects

The steps are the tier's, which does the same for topics; the engine adds who may run them.

Invariants
- A merged object has the frames of the old ones in order, and begins at the position of the first: pointers into the
  log stay valid, and every LSN is readable at every moment, with the same bytes.
- A crash leaves either the old objects or the merged one in the catalog. The next owner finishes a switch that was
  begun; an object that was only built is an orphan, which `remove_engine_orphans` deletes.
- Only the owner merges. It records its start, and then checks its ownership: either it learns that it lost the claim,
  or a later owner finds the recorded start and cancels it (`settle`). From then on the switch fails on the version of
  its state. So a former owner changes nothing.
- Objects are deleted by the plan that was persisted before the switch, and only after the grace period of their
  readers. Until then they take room: with `max_bytes`, no more than that waits at a time, and the rest is merged later.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Descriptor
from tidelog.cold.gc import DEFAULT_GRACE_SECONDS, Collector, Reason, ReplacedObjects, total_bytes
from tidelog.cold.rewrite import Built, Planned, Run, build_object, plan_merges
from tidelog.cold.rewrite_commit import Rewrite, RewriteCommit, begin, finish
from tidelog.engine.aio import TaskThreads, in_order, reaching_store
from tidelog.engine.cold.shared_store import SharedStore
from tidelog.engine.cold.shipping import Shipping
from tidelog.engine.cold.store_link import StoreLink
from tidelog.engine.core import Core, IndexCompactionReport, compact_index
from tidelog.engine.settings import EngineSettings
from tidelog.errors import ClosedError, DataError, Hint, InputError, NotSupportedError
from tidelog.events import tell
from tidelog.log.frame import HEADER, HEADER_BYTES, Frames
from tidelog.store.aio import twin
from tidelog.store.scheduler import Lazy

# New objects per switch: the work that a crash repeats.
_RUNS_AT_ONCE = 8
_MODULUS = 1 << 64


class CompactionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of log compactions, of one run or since the engine was opened."""

    replaced_objects: int = 0
    replaced_bytes: int = 0
    new_objects: int = 0
    new_bytes: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0


class CompactionReport(CompactionCounts, frozen=True, kw_only=True):
    """What one compaction did. Replaced objects are deleted after a grace period; the deleted ones are from earlier
    runs.
    """

    waiting_objects: int = 0
    waiting_bytes: int = 0


class LogCompaction:
    """One compaction of an engine's shipped log, run by its owner."""

    def __init__(
        self,
        link: StoreLink,
        settings: EngineSettings,
        clock: Clock,
        *,
        max_bytes: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._target_bytes = min(settings.compaction_max_bytes, max_bytes or settings.compaction_max_bytes)
        self._max_bytes = max_bytes
        self._link = link
        self._owned = link.owned
        self._catalog = link.owned.catalog
        self._settings = settings
        self._clock = clock
        self._is_stopped = is_stopped
        self._done: list[tuple[Run, Descriptor]] = []

    def run(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> CompactionReport:
        """Merges small objects, and deletes what was replaced more than `grace_seconds` ago."""
        self._owned.ownership.verify()
        finish(self._catalog, self._clock)
        left_bytes = sys.maxsize
        if self._max_bytes is not None:
            left_bytes = self._max_bytes - total_bytes(self._collector(grace_seconds).plan().of(Reason.RECENT))
        from_lsn: int | None = 0
        while from_lsn is not None:
            from_lsn = self._round(from_lsn, left_bytes - sum(run.bytes for run, _ in self._done))
        cleanup = self._clean_up(grace_seconds)
        return msgspec.structs.replace(
            cleanup,
            replaced_objects=sum(len(run.descriptors) for run, _ in self._done),
            replaced_bytes=sum(run.bytes for run, _ in self._done),
            new_objects=len(self._done),
            new_bytes=sum(made.size for _, made in self._done),
        )

    # Some new objects at a time

    def _round(self, from_lsn: int, left_bytes: int) -> int | None:
        """Builds some new objects; returns the LSN at which to continue, None if no more can be replaced."""
        planned = self._planned(from_lsn)
        sums = accumulate(run.bytes for run in planned.runs)
        runs = [run for run, replaced_bytes in zip(planned.runs, sums, strict=True) if replaced_bytes <= left_bytes]
        if runs:
            # Nobody else may compact, so a compaction in progress is that of a former owner, or of an earlier run of
            # this process.
            work = begin(self._catalog, self._link.objects, self._clock, take_over=True)
            with work.abandoned_on_error():
                self._owned.ownership.verify()
                self._replace(work, runs)
        return planned.next_offset if len(runs) == len(planned.runs) else None

    def _planned(self, from_lsn: int) -> Planned:
        target_bytes = self._target_bytes
        return plan_merges(self._catalog, target_bytes=target_bytes, from_offset=from_lsn, max_runs=_RUNS_AT_ONCE)

    def _replace(self, work: RewriteCommit, runs: Sequence[Run]) -> None:
        made = [(run, self._built(run, work.generation).descriptor) for run in runs]
        self._owned.ownership.verify()
        switched = work.switch([Rewrite(descriptor=new, replaced=run.replaced) for run, new in made])
        starts = {one.descriptor.start_offset for one in switched}
        self._done += [(run, new) for run, new in made if new.start_offset in starts]

    def _built(self, run: Run, generation: int) -> Built:
        _check_positions(run.descriptors)
        return build_object(
            self._link.objects,
            self._catalog.keys,
            run.descriptors,
            generation,
            codec=self._settings.ship_compression,
            digest=self._digest,
            level=self._settings.ship_compression_level,
        )

    def _digest(self, frames: Frames, start: int, stop: int) -> int:
        """A digest over frames: their LSNs and verified checksums."""
        if self._is_stopped():
            raise ClosedError("the engine is closed", operation="compact")
        buffer, places = frames.buffer, memoryview(frames.positions).cast("Q")[start:stop]
        headers = (HEADER.unpack_from(buffer, place - HEADER_BYTES) for place in places)
        found: int = sum((lsn << 1 | 1) * (length << 32 | crc) for lsn, length, crc in headers)
        return found % _MODULUS

    # What was replaced

    def _collector(self, grace_seconds: float) -> Collector:
        return Collector(
            self._catalog,
            self._link.objects,
            self._clock.now_us(),
            owned=self._owned,
            grace_seconds=grace_seconds,
            rules=[ReplacedObjects],
        )

    def _clean_up(self, grace_seconds: float) -> CompactionReport:
        collector = self._collector(grace_seconds)
        plan = collector.plan()
        report, waiting = collector.apply(plan), plan.of(Reason.RECENT)
        return CompactionReport(
            deleted_objects=len(report.objects),
            deleted_bytes=report.bytes,
            waiting_objects=len(waiting),
            waiting_bytes=total_bytes(waiting),
        )


def _check_positions(descriptors: Sequence[Descriptor]) -> None:
    """Pointers are positions: objects whose positions are not contiguous cannot be merged."""
    for one, behind in pairwise(descriptors):
        if one.start_position + one.raw_size != behind.start_position:
            raise DataError(
                f"{behind.object_id} begins at position {behind.start_position}, and {one.object_id} ends at "
                f"{one.start_position + one.raw_size}",
                operation="compact",
                hint="Nothing was replaced; put the descriptors back from a replica",
            )


# Compaction of an engine: on demand, periodically in the background, with counters.
#
# Invariants
# - One compaction of the log, and one of the index, at a time.
# - It holds no lock of the engine while it works in the store; the index is different (`core.compact_index`).
# - The background compacts the log, if there is a store and `compaction_enabled` is set; never the index.


_logger = logging.getLogger("tidelog.engine")
# Not at once: a freshly opened engine is busy. Not after the whole interval: some programs never run that long.
_FIRST_SECONDS = 120.0


class CompactionStatistics(CompactionCounts, frozen=True, kw_only=True):
    """Compactions since the engine was opened. Bytes are those in the store."""

    runs: int = 0
    failed_runs: int = 0
    index_runs: int = 0
    index_pages_before: int = 0
    index_pages_after: int = 0


def no_store(operation: str, directory: Path) -> NotSupportedError:
    """The error for a store operation on an engine without a store."""
    return NotSupportedError(
        "an engine without a store cannot do that",
        operation=operation,
        path=directory,
        hint=Hint(
            'Open it with a store: tidelog.open_engine(dir, store="s3://bucket/prefix"); its directory remembers it',
            command="Name one with --store s3://bucket/prefix; its directory remembers it",
        ),
    )


class Compaction:
    """The compactions of one engine."""

    def __init__(
        self,
        core: Core,
        cold: object,
        *,
        check: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._shipping = cold if isinstance(cold, Shipping) else None
        self._follows = isinstance(cold, SharedStore)
        self._check = check
        self._on_failure = on_failure
        self._one_at_a_time = Lock()
        self._statistics = CompactionStatistics()
        self._is_stopped = False

    def compact(self, grace_seconds: float, max_bytes: int | None = None) -> CompactionReport:
        """Compacts the log in the store; into objects of `max_bytes` at most if that is less than the setting, and with
        no more than that of replaced objects, which wait for their deletion.
        """
        self._check()
        if grace_seconds < 0:
            raise InputError(f"objects cannot be kept for {grace_seconds} seconds")
        if self._follows:
            raise NotSupportedError(
                "another replica ships to the store that this one shares, and compacts what is in it",
                operation="compact",
                path=self._core.directory,
                hint="Compact at the owner, or take over first",
            )
        if self._shipping is None:
            raise no_store("compact", self._core.directory)
        with self._one_at_a_time:
            begin = self._core.clock.monotonic()
            try:
                with self._shipping.linked() as link:
                    compaction = LogCompaction(
                        link,
                        self._core.settings,
                        self._core.clock,
                        max_bytes=max_bytes,
                        is_stopped=lambda: self._is_stopped,
                    )
                    report = compaction.run(grace_seconds)
            except BaseException:
                self._count(failed_runs=1)
                raise
            counted = CompactionCounts.__struct_fields__
            counts = {name: getattr(report, name) for name in counted}
            self._count(runs=1, **counts)
            seconds = self._core.clock.monotonic() - begin
            tell(_logger, "log_compacted", engine=self._core.directory, **counts, seconds=seconds)
            return report

    def compact_index(self) -> IndexCompactionReport:
        """Compacts the index on this disk."""
        self._check()
        begin = self._core.clock.monotonic()
        report = compact_index(self._core, check=self._check, on_failure=self._on_failure)
        tell(
            _logger,
            "index_compacted",
            engine=self._core.directory,
            pages_before=report.pages_before,
            pages_after=report.pages_after,
            seconds=self._core.clock.monotonic() - begin,
        )
        self._count(index_runs=1)
        self._statistics = msgspec.structs.replace(
            self._statistics, index_pages_before=report.pages_before, index_pages_after=report.pages_after
        )
        return report

    def _count(self, **more: int) -> None:
        known = {name: getattr(self._statistics, name) + value for name, value in more.items()}
        self._statistics = msgspec.structs.replace(self._statistics, **known)

    def statistics(self) -> CompactionStatistics:
        return self._statistics

    def stop(self) -> None:
        """Abandons what is being built."""
        self._is_stopped = True


class CompactionCalls:
    """The compaction calls of an engine."""

    _compaction: Lazy[Compaction]
    _tasks: Lazy[TaskThreads]

    def compact(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> CompactionReport:
        """Merges small objects in the store now (`compaction_max_bytes`), while everything else goes on.

        Objects that were replaced more than `grace_seconds` ago are deleted.
        """
        return self._compaction().compact(grace_seconds)

    def compact_index(self) -> IndexCompactionReport:
        """Rewrites the version index in full pages. Entries wait until it is done; readers do not."""
        return self._compaction().compact_index()

    compact_async = twin(compact, reaching_store)
    compact_index_async = twin(compact_index, in_order)
