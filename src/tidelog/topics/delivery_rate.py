"""A limit on messages a second: it holds back, it never drops. Pure."""

from __future__ import annotations

_US = 1_000_000
_BURST_SECONDS = 0.1


class RateLimit:
    """A bucket of permits that fills with time; it holds those of a tenth of a second, and at least one."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second * _BURST_SECONDS)
        self._permits = self._most
        self._filled_us: int | None = None

    def available(self, now_us: int) -> int:
        """How many messages may go now."""
        if self._filled_us is not None:
            gained = max(0, now_us - self._filled_us) * self._per_second / _US
            self._permits = min(self._most, self._permits + gained)
        self._filled_us = now_us
        return int(self._permits)

    def spend(self, count: int) -> None:
        """So many went."""
        self._permits -= count

    def next_us(self, now_us: int) -> int:
        """When the next may go."""
        missing = max(0.0, 1.0 - self._permits)
        return now_us + int(missing * _US / self._per_second) + 1
