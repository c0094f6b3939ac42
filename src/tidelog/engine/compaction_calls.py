"""Compaction as an engine has it: on demand, by itself every now and then, counted.

Invariants
- One compaction of the log, and one of the index, at a time.
- It needs no lock of the engine while it works in the store; the index is another matter (`index_compaction.py`).
- In the background the log is compacted, where there is a store and `compaction_enabled` says so; never the index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

import msgspec

from tidelog.engine.compaction import CompactionCounts, CompactionReport, LogCompaction
from tidelog.engine.core import Core
from tidelog.engine.engine_tasks import TaskThreads
from tidelog.engine.index_compaction import IndexCompactionReport, compact_index
from tidelog.engine.shipping import Shipping
from tidelog.engine.upkeep import no_store
from tidelog.errors import ClosedError, FencedError, InputError, TidelogError
from tidelog.tier.background import Background, Task
from tidelog.tier.replacement_cleanup import DEFAULT_GRACE_SECONDS

_logger = logging.getLogger("tidelog.engine")
# Not at once: what just opened has other things to do. Not after the interval either: some programs never run so long.
_FIRST_SECONDS = 120.0


class CompactionStatistics(CompactionCounts, frozen=True, kw_only=True):
    """What compactions have done since the engine was opened. Bytes are those in the store."""

    runs: int = 0
    failed_runs: int = 0
    index_runs: int = 0
    index_pages_before: int = 0
    index_pages_after: int = 0


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
        self._check = check
        self._on_failure = on_failure
        self._one_at_a_time = Lock()
        self._statistics = CompactionStatistics()
        self._background = Background(1, "tidelog-compact")  # its own: it may wait for a store
        self._task: Task | None = None
        self._is_stopped = False

    def compact(self, grace_seconds: float) -> CompactionReport:
        """The log in the store."""
        self._check()
        if grace_seconds < 0:
            raise InputError(f"objects cannot be kept for {grace_seconds} seconds")
        if self._shipping is None:
            raise no_store("compact", self._core.directory)
        with self._one_at_a_time:
            try:
                with self._shipping.linked() as link:
                    compaction = LogCompaction(
                        *(link, self._core.settings, self._core.clock), is_stopped=lambda: self._is_stopped
                    )
                    report = compaction.run(grace_seconds)
            except BaseException:
                self._count(failed_runs=1)
                raise
            counted = CompactionCounts.__struct_fields__
            self._count(runs=1, **{name: getattr(report, name) for name in counted})
            return report

    def compact_index(self) -> IndexCompactionReport:
        """The index on this disk."""
        self._check()
        report = compact_index(self._core, check=self._check, on_failure=self._on_failure)
        self._count(index_runs=1)
        self._statistics = msgspec.structs.replace(
            self._statistics, index_pages_before=report.pages_before, index_pages_after=report.pages_after
        )
        return report

    def _count(self, **more: int) -> None:
        known = {name: getattr(self._statistics, name) + value for name, value in more.items()}
        self._statistics = msgspec.structs.replace(self._statistics, **known)

    def statistics(self) -> CompactionStatistics:
        """One moment of it."""
        return self._statistics

    # In the background

    def start(self) -> None:
        """Compacts by itself from now on, if there is a store and the settings say so."""
        settings = self._core.settings
        if self._shipping is not None and settings.compaction_enabled:
            first = min(_FIRST_SECONDS, settings.compaction_interval_secs)
            self._task = self._background.add(self._compact_by_itself, first)

    def stop(self) -> None:
        """Ends that, and gives up what is being built. Waits a few seconds at most."""
        self._is_stopped = True
        if self._task is not None:
            self._background.cancel(self._task)
        self._background.close()

    def _compact_by_itself(self) -> float:
        interval = self._core.settings.compaction_interval_secs
        try:
            self.compact(DEFAULT_GRACE_SECONDS)
        except (FencedError, ClosedError):
            return interval
        except (TidelogError, OSError) as error:
            _logger.warning("%s: nothing was compacted, which is tried again: %s", self._core.directory, error)
            return min(interval, _FIRST_SECONDS)
        return interval


class CompactionCalls:
    """The part of an engine that is about compaction."""

    _compaction: Compaction
    _tasks: TaskThreads

    def compact(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> CompactionReport:
        """Puts small objects of the store together now (`compaction_size_threshold`), while everything else goes on.

        Objects that were replaced longer than `grace_seconds` ago are deleted.
        """
        return self._compaction.compact(grace_seconds)

    def compact_index(self) -> IndexCompactionReport:
        """Writes the version index anew, in full pages. Entries wait until it is done; readers do not."""
        return self._compaction.compact_index()

    async def compact_async(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> CompactionReport:
        """As `compact`."""
        return await self._tasks.reach_store(lambda: self.compact(grace_seconds))

    async def compact_index_async(self) -> IndexCompactionReport:
        """As `compact_index`."""
        return await self._tasks.run_in_order(self.compact_index)
