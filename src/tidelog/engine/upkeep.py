"""What runs beside an engine: checkpoints, shipping, letting go of files, collecting garbage.

Invariants
- Nothing in here is needed for what was applied to be safe, and nothing that fails in here stops an apply.
- One checkpoint at a time; one that has nothing new to say is not made by itself.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from tidelog.engine.core import Core
from tidelog.engine.garbage import Garbage
from tidelog.errors import ClosedError, FencedError, NotSupportedError, TidelogError
from tidelog.tier.background import Background, Task

_logger = logging.getLogger("tidelog.engine")
# Not at once: what just opened has other things to do. Not after the interval either: some programs never run so long.
_FIRST_COLLECTION_SECONDS = 60.0


class ColdTier(Protocol):
    """The cold half, where there is a store."""

    def ship(self) -> int:
        """Ships everything up to the low-water mark; the new high-water mark."""
        ...

    def truncation_mark(self) -> int:
        """The high-water mark as the published manifest has it."""
        ...

    def checkpoint(self) -> None:
        """Writes the state at the high-water mark into the store."""
        ...

    def check_not_fenced(self) -> None:
        """FencedError when another node is known to own the engine. Asks nobody."""
        ...

    def start(self, background: Background) -> None:
        """Ships and lets go by itself from now on."""
        ...

    def stop(self) -> None:
        """Ends that. Waits for nothing that hangs."""
        ...


def no_store(operation: str, directory: Path) -> NotSupportedError:
    """What an engine answers that is asked for something in a store, and has none."""
    return NotSupportedError(
        "an engine without a store cannot do that",
        operation=operation,
        path=directory,
        hint='Open it with a store: tidelog.open_engine(dir, store="s3://bucket/prefix"); its directory remembers it',
    )


class Upkeep:
    """The background of one engine."""

    def __init__(
        self,
        core: Core,
        cold: ColdTier | None = None,
        garbage: Garbage | None = None,
        *,
        runs_in_background: bool = True,
    ) -> None:
        self._core = core
        self.cold = cold
        self.garbage = garbage
        self._background = Background(2, "tidelog-engine")
        self._collecting = Background(1, "tidelog-garbage")  # its own: it may wait for a store
        self._collection: Task | None = None
        self._task: Task | None = None
        self._checkpointed_lsn = core.checkpointer.redo_lsn
        self.failed_checkpoints = 0
        if runs_in_background:
            interval = core.settings.checkpoint_interval_secs
            # After a long redo the next one would be as long: not for the whole interval.
            is_long = core.recovery.records > 100_000
            self._task = self._background.add(self._checkpoint_if_due, 1.0 if is_long else interval)
            if cold is not None:
                cold.start(self._background)
            if garbage is not None and garbage.retention.is_set and core.settings.compaction_enabled:
                first = min(_FIRST_COLLECTION_SECONDS, core.settings.compaction_interval_secs)
                self._collection = self._collecting.add(self._collect, first)

    def checkpoint(self) -> int:
        """One here, and one in the store where there is one; the seq of the one here."""
        state = self._core.checkpointer.checkpoint()
        self._checkpointed_lsn = self._core.wal.next_lsn
        if self.cold is not None:
            self.cold.checkpoint()
        return state.applied_seq

    def ship(self) -> int:
        """Ships what may be shipped; the high-water mark then."""
        if self.cold is None:
            raise no_store("ship", self._core.directory)
        return self.cold.ship()

    def check_not_fenced(self) -> None:
        """FencedError when another node owns the store by now."""
        if self.cold is not None:
            self.cold.check_not_fenced()

    def truncation_mark(self) -> int:
        """0 without a store: then the orchestrator's log is the only other copy."""
        return 0 if self.cold is None else self.cold.truncation_mark()

    def stop(self) -> None:
        """Ends everything that runs by itself."""
        if self.cold is not None:
            self.cold.stop()
        if self._task is not None:
            self._background.cancel(self._task)
        if self._collection is not None:
            self._collecting.cancel(self._collection)
        self._collecting.close()
        self._background.close()

    def _collect(self) -> float:
        """Old versions go, and what of the log nobody needs then. What cannot be done now is tried again."""
        assert self.garbage is not None
        interval = self._core.settings.compaction_interval_secs
        try:
            self.garbage.collect()
        except (FencedError, ClosedError):
            return interval
        except (TidelogError, OSError) as error:
            _logger.warning("%s: garbage was not collected, which is tried again: %s", self._core.directory, error)
            return min(interval, _FIRST_COLLECTION_SECONDS)
        return interval

    def _checkpoint_if_due(self) -> float:
        interval = self._core.settings.checkpoint_interval_secs
        if self._core.wal.next_lsn == self._checkpointed_lsn:
            return interval
        try:
            self._core.checkpointer.checkpoint()
            self._checkpointed_lsn = self._core.wal.next_lsn
        except (TidelogError, OSError) as error:
            self.failed_checkpoints += 1
            _logger.error("%s: a checkpoint failed and is tried again: %s", self._core.directory, error)
        return interval
