"""Retention for a log without a store: what goes is gone for good."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidelog.clock import Clock
from tidelog.errors import TidelogError
from tidelog.log import Log
from tidelog.tier.background import Background, Task
from tidelog.tier.retention import plan_local
from tidelog.tier.tier_settings import TierSettings

_logger = logging.getLogger("tidelog.tier")


class LocalPruner:
    """Deletes the oldest files of a log by age and size; the newest stays."""

    def __init__(self, log: Log, settings: TierSettings, clock: Clock) -> None:
        self._log = log
        self._settings = settings
        self._clock = clock
        self._task: Task | None = None
        self.keep_from: Callable[[], int | None] = lambda: None
        """The lowest offset that somebody still needs: nothing from there on is deleted. None: nobody needs any."""

    @property
    def has_work(self) -> bool:
        """Whether anything is ever to be deleted."""
        return self._settings.retention_seconds is not None or self._settings.retention_bytes is not None

    def start(self, background: Background) -> None:
        """Looks now and then, in the background."""
        self._task = background.add(self._prune_if_due, self._settings.retention_interval_seconds)

    def prune(self) -> None:
        """Deletes everything that is due now."""
        if self.has_work:
            limits = (self._settings.retention_seconds, self._settings.retention_bytes)
            due = plan_local(self._log.file_spans(), None, self._clock.now_us(), *limits)
            needed = self.keep_from()
            self._log.remove_below(due if needed is None else min(due, needed))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _prune_if_due(self) -> float:
        try:
            self.prune()
        except TidelogError as error:
            _logger.warning("%s: retention failed and is tried again: %s", self._log.directory, error)
        return self._settings.retention_interval_seconds
