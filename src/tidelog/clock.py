"""The one seam to time, so that tests can move it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Clock(Protocol):
    """Wall time for timestamps, monotonic time for durations."""

    def now_us(self) -> int:
        """Microseconds since 1970 in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self._monotonic = 0.0

    def now_us(self) -> int:
        return self._now_us

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward."""
        self._now_us += int(seconds * 1_000_000)
        self._monotonic += seconds


def to_microseconds(moment: datetime) -> int:
    """Microseconds since 1970; a datetime without a zone is taken as UTC, so that no machine's zone leaks in."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND


def to_datetime(microseconds: int) -> datetime:
    """The UTC datetime of a stored timestamp."""
    return _EPOCH + timedelta(microseconds=microseconds)
