"""Leases: entries that vanish when their holder does.

Invariants
- A holder believes in its lease for less time than the server does: the time counts from before the request was sent. A
  process that was paused for longer finds `is_held` false as soon as it looks, before it hears from the server.
- A lost lease stays lost. Whoever needs one takes a new one.
- Nothing here renews by itself: the holder calls `refresh`, as a rule from its background (`node_lease.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from tidelog.clock import Clock
from tidelog.errors import LeaseLostError


class Lease(ABC):
    """A granted lease."""

    def __init__(self, lease_id: int, ttl_seconds: int, clock: Clock, asked_at: float) -> None:
        self.lease_id = lease_id
        self.ttl_seconds = ttl_seconds
        self._clock = clock
        self._held_until = asked_at + ttl_seconds
        self._is_over = False

    @property
    def is_held(self) -> bool:
        """Whether it is certain that the server has not given up on us yet."""
        return not self._is_over and self._clock.monotonic() < self._held_until

    def refresh(self) -> None:
        """Another `ttl_seconds` from now; LeaseLostError when it is too late."""
        asked_at = self._clock.monotonic()
        if not self.is_held or not self._refresh():
            self._is_over = True
            raise LeaseLostError(f"the lease {self.lease_id} ran out", hint="Take a new one")
        self._held_until = asked_at + self.ttl_seconds

    def revoke(self) -> None:
        """Gives it back at once, with everything that hangs on it. Twice is fine."""
        if not self._is_over:
            self._is_over = True
            self._revoke()

    @abstractmethod
    def _refresh(self) -> bool:
        """Asks the server; False when it knows the lease no more."""

    @abstractmethod
    def _revoke(self) -> None: ...
