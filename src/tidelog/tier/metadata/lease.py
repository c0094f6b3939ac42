"""Leases: entries that vanish when their holder does.

Invariants
- A holder believes in its lease for less time than the server does: the time counts from before the request was sent. A
  process that was paused for longer finds `is_held` false as soon as it looks, before it hears from the server.
- A lost lease stays lost. Whoever needs one takes a new one.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from tidelog.clock import Clock
from tidelog.errors import LeaseLostError, RetryError
from tidelog.limits import start_thread

_REFRESHES_PER_TTL = 3


class Lease(ABC):
    """A granted lease. As a context manager it is kept alive in the background and given back at the end."""

    def __init__(self, lease_id: int, ttl_seconds: int, clock: Clock, asked_at: float) -> None:
        self.lease_id = lease_id
        self.ttl_seconds = ttl_seconds
        self._clock = clock
        self._held_until = asked_at + ttl_seconds
        self._is_over = threading.Event()
        self._keeper: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is certain that the server has not given up on us yet."""
        return not self._is_over.is_set() and self._clock.monotonic() < self._held_until

    def refresh(self) -> None:
        """Another `ttl_seconds` from now; LeaseLostError when it is too late."""
        asked_at = self._clock.monotonic()
        if not self.is_held or not self._refresh():
            self._is_over.set()
            raise LeaseLostError(f"the lease {self.lease_id} ran out", hint="Take a new one")
        self._held_until = asked_at + self.ttl_seconds

    def revoke(self) -> None:
        """Gives it back at once, with everything that hangs on it. Twice is fine."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._revoke()

    def __enter__(self) -> Self:
        keeper = threading.Thread(target=self._keep, name=f"lease-{self.lease_id}", daemon=True)
        start_thread(keeper)
        self._keeper = keeper
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(RetryError):  # out of reach: it runs out by itself
            self.revoke()
        if self._keeper is not None:
            self._keeper.join()

    def _keep(self) -> None:
        while not self._is_over.wait(self.ttl_seconds / _REFRESHES_PER_TTL):
            try:
                self.refresh()
            except LeaseLostError:
                return
            except RetryError:
                continue  # the server may be back before the lease is over

    @abstractmethod
    def _refresh(self) -> bool:
        """Asks the server; False when it knows the lease no more."""

    @abstractmethod
    def _revoke(self) -> None: ...
