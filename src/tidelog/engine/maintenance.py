"""Background maintenance of an engine: checkpoints, shipping, purging files, garbage collection.

Invariants
- The durability of applied entries does not depend on maintenance, and a failure here never fails an apply.
- One checkpoint at a time; a periodic checkpoint is skipped if there is nothing new.
- Entries never outrun a collection by more than half of what makes one due, whatever the machine is busy with: they are
  slowed down first, and then wait until it is over. They do not wait for a store that has stopped to answer, nor while
  the collection itself waits for an entry.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from tidelog.cold.gc import DEFAULT_GRACE_SECONDS
from tidelog.engine.cold.garbage import Garbage
from tidelog.engine.cold.merge import Compaction, no_store
from tidelog.engine.cold.shipping import Shipping
from tidelog.engine.core import Core
from tidelog.engine.mvcc.retention import forgets_versions
from tidelog.errors import ClosedError, FencedError, TidelogError
from tidelog.store.scheduler import Lazy, Task, Threads

_logger = logging.getLogger("tidelog.engine")
# Not at once: a freshly opened engine is busy. Not after the whole interval: some programs never run that long.
_FIRST_COLLECTION_SECONDS = 60.0
_FIRST_GROWTH_BYTES = 16 << 20
_NEVER_POSITION = 1 << 64
# How far the log may grow during a collection, in what makes one due: before entries are slowed down, and how much
# then; and before they wait for its end.
_FREE_GROWTH = 0.25
_MOST_GROWTH = 0.5
_SLOWER = 20.0
_LONGEST_WAIT_SECONDS = 1.0
_LOOK_SECONDS = 0.01
# A collection that has done nothing for so long, and whose store has answered nothing, waits for that one: entries do
# not.
_STUCK_SECONDS = 5.0


class ColdTier(Protocol):
    """The cold tier, for an engine with a store."""

    def ship(self) -> int:
        """Ships everything up to the low-water mark; returns the new high-water mark."""
        ...

    def truncation_mark(self) -> int:
        """The high-water mark of the published manifest."""
        ...

    def checkpoint(self) -> None:
        """Writes the snapshot at the high-water mark into the store."""
        ...

    @property
    def refusal(self) -> Callable[[], TidelogError] | None:
        """Makes the error that every change is refused with: another node owns the engine. None while none does."""
        ...

    def start(self) -> None:
        """Starts shipping and purging in the background."""
        ...

    def stop(self) -> None:
        """Stops background work. Does not wait for requests that hang."""
        ...


class Maintenance:
    """The background work of one engine."""

    def __init__(
        self,
        core: Core,
        cold: ColdTier | None = None,
        *,
        garbage: Lazy[Garbage],
        compaction: Lazy[Compaction],
        threads: Threads,
        runs_in_background: bool = True,
    ) -> None:
        self._core = core
        self.cold = cold
        self.garbage = garbage
        self.compaction = compaction
        self._threads = threads
        self._tasks: list[Task] = []
        self._checkpointed_lsn = core.checkpointer.redo_lsn
        self.failed_checkpoints = 0
        self._collecting: Task | None = None
        self._collects_at = self._seals_at = self._due_bytes = _NEVER_POSITION
        self._awaited_seq: int | None = None
        self._is_collecting = self._is_stopped = False
        if runs_in_background:
            interval = core.settings.checkpoint_interval_seconds
            # After a long redo, checkpoint soon rather than after the whole interval: the next redo would be as long.
            is_long = core.recovery.records > 100_000
            self._tasks.append(threads.disk_work.add(self._checkpoint_if_due, 1.0 if is_long else interval))
            if cold is not None:
                cold.start()
            if forgets_versions(core.settings):
                self._collecting = self._repeat("garbage was not collected", self._collect)
                self._due_bytes = min(core.settings.rotate_max_bytes, _FIRST_GROWTH_BYTES)
                self._collects_at = core.written_bytes + self._due_bytes
                self._seals_at = core.wal.next_position + self._due_bytes
            self.add_compaction()

    def add_compaction(self) -> None:
        """Compacts the log in the store by itself, if there is one."""
        if isinstance(self.cold, Shipping):
            self._repeat("nothing was compacted", self._compact)

    def _compact(self) -> None:
        """Where values are moved, objects stay small enough to be dropped, and few of those that were replaced, which
        take room for an hour, wait at a time.
        """
        max_bytes = None if self._collecting is None else self.garbage().piece_bytes
        self.compaction().compact(DEFAULT_GRACE_SECONDS, max_bytes)

    def grown(self, position: int, seconds: float) -> float:
        """Log and value files have grown up to here, with entries that took so long. Returns how long the next ones
        should wait at least (`hold_back`): if they make garbage faster than it is collected, they are slowed down, and
        disk and store stay bounded.

        Garbage is collected when there may be much of it, however long ago it was, and when values that were moved need
        not be kept twice any longer.
        """
        if self._core.wal.next_position >= self._seals_at:
            self._end_file()
        awaited = self._awaited_seq
        if awaited is not None and self._core.marks.low_water_mark > awaited:
            self._awaited_seq, self._collects_at = None, min(position, self._collects_at)
        if position < self._collects_at or self._collecting is None:
            return 0.0
        if not self._is_collecting:
            self._is_collecting = True
            self.garbage().progress_seconds = self._core.clock.monotonic()
            self._collecting.soon()
        behind = self._outrun_by(position) - _FREE_GROWTH
        return min(_LONGEST_WAIT_SECONDS, seconds * _SLOWER * behind) if behind > 0 and not self._is_stuck else 0.0

    def _outrun_by(self, position: int) -> float:
        """How much entries have written since a collection was due, in what makes one due."""
        return (position - self._collects_at) / self._due_bytes

    @property
    def _is_stuck(self) -> bool:
        garbage = self.garbage()
        garbage.note_answers()
        return self._core.clock.monotonic() - garbage.progress_seconds > _STUCK_SECONDS

    def hold_back(self, seconds: float) -> None:
        """After entries were applied, which should wait so long: until the collection that they outrun is over."""
        with self.garbage().outrun():
            time.sleep(seconds)
            while self._is_full():
                time.sleep(_LOOK_SECONDS)

    def _is_full(self) -> bool:
        if not self._is_collecting or self._is_stopped or self.garbage().awaits_entry:
            return False
        return self._outrun_by(self._core.written_bytes) >= _MOST_GROWTH and not self._is_stuck

    def _end_file(self) -> None:
        """Files leave the disk as a whole: they are small beside what is live, so that dead ones are not kept long."""
        try:
            self._core.wal.seal()
        except (TidelogError, OSError) as error:
            _logger.warning("%s: a file of the log was not ended: %s", self._core.directory, error)
        self._seals_at = self._core.wal.next_position + self.garbage().piece_bytes

    def _collect(self) -> None:
        garbage, begin = self.garbage(), self._core.written_bytes
        try:
            if self.cold is not None:
                self.cold.ship()  # what is not in the store is kept
            self._awaited_seq = None
            garbage.collect()
            self._awaited_seq = garbage.awaited_seq
        finally:
            self._due_bytes = garbage.next_due_bytes
            # What was written meanwhile is not accounted for yet.
            soonest = self._core.written_bytes + self._due_bytes // 4
            self._collects_at = max(begin + self._due_bytes, soonest)
            self._is_collecting = False

    def _repeat(self, failed: str, work: Callable[[], object]) -> Task | None:
        """Does it every `compaction_interval_seconds`, unless the settings disable it; retries soon what failed."""
        interval = self._core.settings.compaction_interval_seconds
        first = min(_FIRST_COLLECTION_SECONDS, interval)

        def run() -> float:
            try:
                work()
            except (FencedError, ClosedError):
                return interval
            except (TidelogError, OSError) as error:
                _logger.warning("%s: %s, which is tried again: %s", self._core.directory, failed, error)
                return first
            return interval

        if not self._core.settings.compaction_enabled:
            return None
        task = self._threads.store_work.add(run, first)
        self._tasks.append(task)
        return task

    def checkpoint(self) -> int:
        """Takes a local checkpoint, and a snapshot in the store if there is one; returns the seq of the local one."""
        state = self._core.checkpointer.checkpoint()
        self._checkpointed_lsn = self._core.wal.next_lsn
        if self.cold is not None:
            self.cold.checkpoint()
        return state.applied_seq

    def ship(self) -> int:
        """Ships what may be shipped; returns the new high-water mark."""
        if self.cold is None:
            raise no_store("ship", self._core.directory)
        return self.cold.ship()

    def truncation_mark(self) -> int:
        """0 without a store: then the orchestrator's log is the only other copy."""
        return 0 if self.cold is None else self.cold.truncation_mark()

    def stop(self) -> None:
        """Stops all background work. Waits a few seconds at most."""
        self._is_stopped = True
        self.compaction.close()
        if self.cold is not None:
            self.cold.stop()
        for task in self._tasks:
            task.cancel()
        self._threads.close()

    def _checkpoint_if_due(self) -> float:
        interval = self._core.settings.checkpoint_interval_seconds
        if self._core.wal.next_lsn == self._checkpointed_lsn:
            return interval
        try:
            self._core.checkpointer.checkpoint()
            self._checkpointed_lsn = self._core.wal.next_lsn
        except (TidelogError, OSError) as error:
            self.failed_checkpoints += 1
            _logger.error("%s: a checkpoint failed and is tried again: %s", self._core.directory, error)
        return interval
