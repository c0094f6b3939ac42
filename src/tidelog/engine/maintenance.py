"""Background maintenance of an engine: checkpoints, shipping, purging files, garbage collection.

Invariants
- The durability of applied entries does not depend on maintenance, and a failure here never fails an apply.
- One checkpoint at a time; a periodic checkpoint is skipped if there is nothing new.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tidelog.engine.cold.garbage import Garbage
from tidelog.engine.core import Core
from tidelog.errors import ClosedError, FencedError, NotSupportedError, TidelogError
from tidelog.store.scheduler import Task, Threads

_logger = logging.getLogger("tidelog.engine")
# Not at once: a freshly opened engine is busy. Not after the whole interval: some programs never run that long.
_FIRST_COLLECTION_SECONDS = 60.0


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


def no_store(operation: str, directory: Path) -> NotSupportedError:
    """The error for a store operation on an engine without a store."""
    return NotSupportedError(
        "an engine without a store cannot do that",
        operation=operation,
        path=directory,
        hint='Open it with a store: tidelog.open_engine(dir, store="s3://bucket/prefix"); its directory remembers it',
    )


class Maintenance:
    """The background work of one engine."""

    def __init__(
        self,
        core: Core,
        cold: ColdTier | None = None,
        garbage: Garbage | None = None,
        *,
        threads: Threads,
        runs_in_background: bool = True,
    ) -> None:
        self._core = core
        self.cold = cold
        self.garbage = garbage
        self._threads = threads
        self._tasks: list[Task] = []
        self._checkpointed_lsn = core.checkpointer.redo_lsn
        self.failed_checkpoints = 0
        if runs_in_background:
            interval = core.settings.checkpoint_interval_seconds
            # After a long redo, checkpoint soon rather than after the whole interval: the next redo would be as long.
            is_long = core.recovery.records > 100_000
            self._tasks.append(threads.disk_work.add(self._checkpoint_if_due, 1.0 if is_long else interval))
            if cold is not None:
                cold.start()
            if garbage is not None and garbage.retention.is_set and core.settings.compaction_enabled:
                first = min(_FIRST_COLLECTION_SECONDS, core.settings.compaction_interval_seconds)
                self._tasks.append(threads.store_work.add(self._collect, first))

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
        """Stops all background work."""
        if self.cold is not None:
            self.cold.stop()
        for task in self._tasks:
            task.cancel()
        self._threads.close()

    def _collect(self) -> float:
        """Removes old versions, and the parts of the log that are no longer needed then. Retries later what fails
        now.
        """
        assert self.garbage is not None
        interval = self._core.settings.compaction_interval_seconds
        try:
            self.garbage.collect()
        except (FencedError, ClosedError):
            return interval
        except (TidelogError, OSError) as error:
            _logger.warning("%s: garbage was not collected, which is tried again: %s", self._core.directory, error)
            return min(interval, _FIRST_COLLECTION_SECONDS)
        return interval

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
