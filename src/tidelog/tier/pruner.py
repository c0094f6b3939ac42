"""Carries out retention for a topic that this process owns, now and then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

from tidelog.clock import Clock
from tidelog.errors import FencedError, TidelogError
from tidelog.log import Log
from tidelog.tier.background import NEVER
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.retention import apply_cold, finish_cold, plan_cold, plan_local, safe_below
from tidelog.tier.tier_settings import TierSettings
from tidelog.tier.tier_statistics import RetentionStatistics

_logger = logging.getLogger("tidelog.tier")


class Pruner:
    """Deletes what is due, in the store and on the disk. `shipped_offset` tells how far the store may have it."""

    def __init__(
        self,
        log: Log,
        owned: OwnedCatalog,
        objects: ObjectStore,
        settings: TierSettings,
        clock: Clock,
        shipped_offset: Callable[[], int],
    ) -> None:
        self.start_offset = owned.catalog.start_offset()
        """The oldest offset that may be read, as this owner left it."""
        self._log = log
        self._owned = owned
        self._objects = objects
        self._settings = settings
        self._clock = clock
        self._shipped_offset = shipped_offset
        self.keep_from: Callable[[], int | None] = lambda: None
        """The lowest offset that somebody still needs: nothing from there on is deleted. None: nobody needs any."""
        self._pruning = Lock()
        self._must_finish = True
        self._local_bytes = 0
        self._cold_objects = 0
        self._cold_bytes = 0
        self._errors = 0
        self._last_error: str | None = None

    def prune_if_due(self) -> float:
        """One look in the background; returns the seconds until the next. Only FencedError gets out."""
        try:
            self.prune()
        except FencedError:
            raise
        except TidelogError as error:
            self._errors += 1
            self._last_error = str(error)
            _logger.warning("%s: retention failed and is tried again: %s", self._log.directory, error)
        return NEVER if self._is_done_for_good else self._settings.retention_interval_seconds

    @property
    def _is_done_for_good(self) -> bool:
        """Nothing will ever be due: nothing is to be deleted by age or size, and what was to be deleted is."""
        settings = self._settings
        limits = (
            *(settings.retention_seconds, settings.retention_bytes),
            *(settings.local_retention_seconds, settings.local_retention_bytes),
        )
        is_over = not self._must_finish and self._log.start_offset >= self.start_offset
        return is_over and all(limit is None for limit in limits)

    def prune(self) -> None:
        """Deletes everything that is due now."""
        with self._pruning:
            self._prune_cold()
            self._prune_local()
            self._last_error = None

    def _prune_cold(self) -> None:
        settings = self._settings
        if self._must_finish:
            self._begins_at(self._owned.catalog.start_offset())  # whether it was moved may have been undecided
            finish_cold(self._owned, self._objects)
            self._must_finish = False
        if settings.retention_seconds is None and settings.retention_bytes is None:
            return
        now_us = self._clock.now_us()
        plan = plan_cold(self._owned.catalog, now_us, settings.retention_seconds, settings.retention_bytes)
        plan = plan.below(self.keep_from())
        if plan.is_empty:
            return
        self._must_finish = True
        self._owned.move_start(plan.start_offset)
        self._begins_at(plan.start_offset)
        apply_cold(self._owned, self._objects, plan)
        self._must_finish = False
        self._cold_objects += len(plan.descriptors)
        self._cold_bytes += plan.bytes
        _logger.info(
            "%s: retention removed %d objects; the topic begins at %d now",
            *(self._log.directory, len(plan.descriptors), plan.start_offset),
        )

    def _begins_at(self, offset: int) -> None:
        """From the moment the start has moved nobody reads below it, however long the deletion takes."""
        self.start_offset = max(self.start_offset, offset)

    def _prune_local(self) -> None:
        """What is below the topic's start goes in any case; the rest as the local settings say."""
        files, settings = self._log.file_spans(), self._settings
        shipped = self._shipped_offset()
        offset = plan_local(
            *(files, shipped, self._clock.now_us()),
            *(settings.local_retention_seconds, settings.local_retention_bytes),
        )
        offset = max(offset, min(self.start_offset, shipped))
        if not files or offset <= files[0].first_offset:
            return
        self._owned.ownership.verify()
        safe = safe_below(files, offset, self._owned.catalog, self._objects, max_epoch=self._owned.epoch)
        self._local_bytes += self._log.remove_below(safe)

    def statistics(self) -> RetentionStatistics:
        """One moment of it."""
        return RetentionStatistics(
            local_bytes_removed=self._local_bytes,
            cold_objects_removed=self._cold_objects,
            cold_bytes_removed=self._cold_bytes,
            errors=self._errors,
            last_error=self._last_error,
        )
