"""Collecting garbage: versions that are no longer kept, then the pieces of the log that nobody needs.

    horizon -> manifest -> VACUUM record on the disk -> versions go -> on the disk -> pieces of the log go

Invariants
- One collection at a time. Entries are applied and read meanwhile, and whoever has pinned a state reads it to the end.
- Versions are counted and removed in one walk over the index. What a version that comes meanwhile points to is either
  new, or pointed to by one that the walk has counted: copies are made of what is seen, and that is never removed.
- A plan is a promise of the most that is done: whatever it names is looked at again before it goes.
- It can be cut off anywhere. What is left is found by the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import Literal, Protocol, cast

import msgspec

from tidelog.engine.core import Core
from tidelog.engine.garbage_files import FileGarbage
from tidelog.engine.garbage_plan import GarbagePlan, GarbageReport, Piece, PieceUse, Usage, drop_below
from tidelog.engine.garbage_store import StoreGarbage
from tidelog.engine.garbage_view import ViewedStore
from tidelog.engine.retention import Retention
from tidelog.engine.retention_time import LocalTimes, ShippedTimes
from tidelog.engine.shipping import Shipping
from tidelog.engine.vacuum import Vacuum, Vacuumed
from tidelog.engine.vacuum_rules import Rule
from tidelog.errors import TidelogError

_logger = logging.getLogger("tidelog.engine")


class Place(Protocol):
    """Where the pieces of the log are."""

    @property
    def place(self) -> Literal["store", "disk"]: ...

    def pieces(self) -> list[Piece]: ...

    def needed_from_lsn(self) -> int: ...

    def compacted_lsn(self) -> int: ...

    def limit(self, horizon: int) -> int: ...

    def move_start(self, horizon: int, keep_versions: int) -> int: ...

    def drop_below(self, lsn: int) -> tuple[int, int]: ...

    def finish(self) -> None: ...


class GarbageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was collected since the engine was opened; live and dead bytes of the log as the last one saw them."""

    collections: int
    failed_collections: int
    last_error: str | None
    versions_removed: int
    bytes_removed: int
    pieces_dropped: int
    bytes_dropped: int
    live_bytes: int
    dead_bytes: int
    pins: int
    seconds: float


class Garbage:
    """The garbage collection of one engine.

    `check` raises when the engine is closed or has failed, `on_failure` hears of what only opening again can mend, and
    `least_read_seq` gives the oldest seq that transactions read at. With a `view` it plans, and collects nothing.
    """

    def __init__(
        self,
        core: Core,
        cold: object | None,
        *,
        check: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        least_read_seq: Callable[[], int | None],
        view: ViewedStore | None = None,
    ) -> None:
        shipping = cold if isinstance(cold, Shipping) else None
        self._core = core
        self._history = history = core.history
        self._place: Place = view or (FileGarbage(core) if shipping is None else StoreGarbage(shipping))
        linked = view or shipping
        times = LocalTimes(core) if linked is None else ShippedTimes(core, cast(Shipping, linked))
        self.retention = Retention(
            *(core.settings, core.marks, history),
            has_store=linked is not None,
            seq_at=times.seq_at,
            least_read_seq=least_read_seq,
            now_us=core.clock.now_us,
        )
        self._vacuum = Vacuum(core, check, on_failure)
        self._check = check
        self._collecting = Lock()
        self._collections = self._failures = 0
        self._last_error: str | None = None
        self._removed = self._removed_bytes = 0
        self._dropped = self._dropped_bytes = 0
        self._live_bytes = self._dead_bytes = 0
        self._seconds = 0.0

    def plan(self, horizon: int | None = None) -> GarbagePlan:
        """What a collection would do. Changes nothing."""
        self._check()
        with self._collecting:
            start_seq, is_wanted = self._history.start_seq, horizon is not None or self.retention.is_set
            allowed = self.retention.horizon(horizon) if is_wanted else 0
            wanted = max(start_seq, self._place.limit(allowed))
            usage = Usage(self._place.pieces())
            found = self._vacuum.look(self._rule(wanted if is_wanted else 0), usage.note)
            plan = self._planned(wanted, found, self._judged(usage))
            return msgspec.structs.replace(plan, held_back_by=self._held_back_by(horizon, allowed, wanted))

    def _held_back_by(self, horizon: int | None, allowed: int, wanted: int) -> str | None:
        if wanted < allowed:
            return f"a restore that reads the state of seq {wanted} in the store"
        return self.retention.held_back_by(horizon)

    def _judged(self, usage: Usage) -> tuple[PieceUse, ...]:
        return usage.judged(self._place.needed_from_lsn(), self._place.compacted_lsn())

    def _rule(self, horizon: int) -> Rule:
        """With a horizon of 0 everything stays: nobody has asked for versions to go."""
        return self._vacuum.rule(horizon, self.retention.keep_versions)

    def _planned(self, horizon: int, found: Vacuumed, uses: tuple[PieceUse, ...]) -> GarbagePlan:
        return GarbagePlan(
            horizon_seq=horizon,
            history_start_seq=self._history.start_seq,
            keep_versions=self.retention.keep_versions,
            versions=found.kept,
            removable_versions=found.removed,
            removable_bytes=found.removed_bytes,
            place=self._place.place,
            drop_below_lsn=drop_below(uses),
            droppable_bytes=sum(use.size for use in uses if use.fate == "drop"),
            live_bytes=sum(use.live_bytes for use in uses),
            dead_bytes=sum(use.dead_bytes for use in uses),
            pieces=uses,
        )

    def collect(self, plan: GarbagePlan | None = None, horizon: int | None = None) -> GarbageReport:
        """Does it: what was planned, or what is to be done now."""
        self._check()
        with self._collecting:
            try:
                report = self._collect(plan, self._wanted(plan, horizon))
            except TidelogError as error:
                self._failures += 1
                self._last_error = str(error)
                raise
            self._count(report)
            return report

    def _wanted(self, plan: GarbagePlan | None, horizon: int | None) -> int | None:
        """Up to where versions are to go; None when none are."""
        if plan is not None:
            return plan.horizon_seq if plan.removable_versions else None
        return self.retention.horizon(horizon) if horizon is not None or self.retention.is_set else None

    def _collect(self, plan: GarbagePlan | None, wanted: int | None) -> GarbageReport:
        begin = self._core.clock.monotonic()
        self._place.finish()
        start_seq = self._history.start_seq if wanted is None else self._move_start(self.retention.horizon(wanted))
        usage = Usage(self._place.pieces())
        found = self._vacuum.run(self._rule(0 if wanted is None else start_seq), usage.note)
        uses = self._judged(usage)
        below = drop_below(uses) if plan is None else min(drop_below(uses), plan.drop_below_lsn)
        dropped, dropped_bytes = self._place.drop_below(below) if below else (0, 0)
        left = [use for use in uses if use.next_lsn > below]
        return GarbageReport(
            history_start_seq=start_seq,
            versions=found.kept,
            removed_versions=found.removed,
            removed_bytes=found.removed_bytes,
            dropped_pieces=dropped,
            dropped_bytes=dropped_bytes,
            live_bytes=sum(use.live_bytes for use in left),
            dead_bytes=sum(use.dead_bytes for use in left),
            seconds=self._core.clock.monotonic() - begin,
        )

    def _move_start(self, horizon: int) -> int:
        """The store is told first, then the log of this engine: when this returns nobody reads below."""
        before = self._history.start_seq
        if horizon < before:
            return before
        allowed = self._place.move_start(horizon, self.retention.keep_versions)
        start_seq = self._history.move_start(max(before, allowed))
        if start_seq > before:
            self._vacuum.announce(start_seq)
        return start_seq

    def _count(self, report: GarbageReport) -> None:
        self._collections += 1
        self._last_error = None
        self._removed += report.removed_versions
        self._removed_bytes += report.removed_bytes
        self._dropped += report.dropped_pieces
        self._dropped_bytes += report.dropped_bytes
        self._live_bytes, self._dead_bytes = report.live_bytes, report.dead_bytes
        self._seconds = report.seconds
        if report.removed_versions or report.dropped_pieces:
            _logger.info(
                "%s: %d versions and %d pieces of the log were removed; history begins at seq %d",
                *(self._core.directory, report.removed_versions, report.dropped_pieces, report.history_start_seq),
            )

    def statistics(self) -> GarbageStatistics:
        """One moment of it."""
        return GarbageStatistics(
            collections=self._collections,
            failed_collections=self._failures,
            last_error=self._last_error,
            versions_removed=self._removed,
            bytes_removed=self._removed_bytes,
            pieces_dropped=self._dropped,
            bytes_dropped=self._dropped_bytes,
            live_bytes=self._live_bytes,
            dead_bytes=self._dead_bytes,
            pins=self._history.pins,
            seconds=self._seconds,
        )
