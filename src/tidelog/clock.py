"""The only access to time, so that tests can control it; also measures and counts durations."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# Not the generator of the `random` module: programs and tests that seed that one get the numbers they expect.
_chance = random.SystemRandom()


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


class SteadyClock:
    """Wall time that does not jump: as another clock had it when this was made, and from there on with the monotonic
    one. For deadlines that are kept with their wall time: an operator who sets a clock does not end them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_us = clock.now_us() - int(clock.monotonic() * 1_000_000)

    def now_us(self) -> int:
        return self._begun_us + int(self._clock.monotonic() * 1_000_000)

    def monotonic(self) -> float:
        return self._clock.monotonic()


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self._monotonic = 0.0

    def now_us(self) -> int:
        """Microseconds since 1970."""
        return self._now_us

    def monotonic(self) -> float:
        """Seconds since it was made."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward."""
        self._now_us += int(seconds * 1_000_000)
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Moves wall time alone, as somebody does who sets the clock of a machine."""
        self._now_us += int(seconds * 1_000_000)


def to_microseconds(moment: datetime) -> int:
    """Microseconds since 1970; a datetime without a zone is taken as UTC, so that no machine's zone leaks in."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND


def to_datetime(microseconds: int) -> datetime:
    """The UTC datetime of a stored timestamp."""
    return _EPOCH + timedelta(microseconds=microseconds)


def jittered(seconds: float, least: float = 0.5) -> float:
    """A random part of a pause, at least this fraction of it: callers that fail together do not retry together."""
    return seconds * _chance.uniform(least, 1.0)


def iso_time(moment: datetime) -> str:
    """A UTC time for people, as the command line accepts it again."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class Histogram(msgspec.Struct, frozen=True):
    """Durations in powers of two of a microsecond: `counts[i]` took less than 2**i us and not less than half of it."""

    counts: tuple[int, ...]
    total_seconds: float
    max_seconds: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, part: float) -> float:
        """Seconds within which this part of them ended, as 0.99 of all, rounded up to a power of two of a microsecond;
        0 when there were none.
        """
        wanted, seen = part * self.count, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen and seen >= wanted:
                return min(self.max_seconds, (1 << bucket) / 1_000_000)
        return self.max_seconds


class Stopwatch:
    """Gathers durations; one thread adds, any thread may take a snapshot."""

    _BUCKETS = 32

    def __init__(self) -> None:
        self._counts = [0] * self._BUCKETS
        self._total_seconds = 0.0
        self._max_seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """So many took so long each."""
        bucket = min(int(seconds * 1_000_000).bit_length(), self._BUCKETS - 1)
        self._counts[bucket] += count
        self._total_seconds += seconds * count
        self._max_seconds = max(self._max_seconds, seconds)

    def snapshot(self) -> Histogram:
        return Histogram(tuple(self._counts), self._total_seconds, self._max_seconds)
