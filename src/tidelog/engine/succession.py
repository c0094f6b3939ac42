"""A replica that takes over by itself: it watches the owner of the store that they share, and goes on in its place.

    the owner's lease has run out ── take_over_after_seconds, and by chance up to half of that more ──> take over
        └── a sign of life, another owner, or no answer of the store: the wait begins again

Invariants
- It is taken over from the owner that was found dead and from no other: a replica that was slower than another one
  follows that one. Where two claim at once, the compare-and-swap of the epoch decides, as ever (`cold/ownership.py`).
- A store that gives no answer says nothing about the owner.
- Who uses the replica is given the engine to go on with: the one that it had is closed by then. Where the new one
  cannot be opened (a full disk), the log says so, and opening the directory again goes on.
- An attempt that fails before the copy takes the replica's place leaves that as it was, and is made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from tidelog.clock import Clock, jittered
from tidelog.cold.catalog import Owner
from tidelog.errors import ClosedError, ConflictError, HeldError, TidelogError
from tidelog.store.scheduler import in_thread

_logger = logging.getLogger("tidelog.engine")
_LOOKS = 4
_SHORTEST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 10.0


class Succession:
    """Looks after the owner of a store. `dead_owner` asks the store for one whose lease has run out; `take_over` goes
    on in its place, and may take long.
    """

    def __init__(
        self,
        after_seconds: float,
        clock: Clock,
        dead_owner: Callable[[], Owner | None],
        take_over: Callable[[Owner], Callable[[], object] | None],
    ) -> None:
        self._clock = clock
        self._dead_owner = dead_owner
        self._take_over = take_over
        self._wait_seconds = jittered(1.5 * after_seconds, 2 / 3)  # so that not all begin at once
        self.pause_seconds = min(max(after_seconds / _LOOKS, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        self._seen: tuple[int, float] | None = None
        """The epoch of an owner that was found dead, and when it was first."""
        self._attempt: Future[None] | None = None

    def look(self) -> float:
        """Looks once; returns the seconds until it wants to look again."""
        if self._attempt is not None and not self._attempt.done():
            return self.pause_seconds
        try:
            owner = self._dead_owner()
        except ClosedError:
            owner = None
        except (TidelogError, OSError) as error:
            _logger.warning("it is not known whether the owner of the store lives: %s", error)
            owner = None
        now = self._clock.monotonic()
        if owner is None:
            self._seen = None
        elif self._seen is None or self._seen[0] != owner.epoch:
            self._seen = owner.epoch, now
        elif now - self._seen[1] >= self._wait_seconds:
            self._seen = None
            self._attempt = in_thread(lambda: self._attempted(owner), "tidelog-engine-takeover")
        return self.pause_seconds

    def _attempted(self, owner: Owner) -> None:
        try:
            tell = self._take_over(owner)
        except ClosedError:
            return  # nobody uses the replica any more
        except (HeldError, ConflictError) as error:
            _logger.info("another replica was faster, and is followed: %s", error.message)
            return
        except Exception as error:
            is_known = isinstance(error, TidelogError | OSError)
            text = "taking over failed, and is tried again while the replica is open: %s"
            _logger.warning(text, error, exc_info=not is_known)
            return
        try:
            if tell is not None:
                tell()
        except Exception:  # its thread has nobody else to tell
            _logger.exception("the store was taken over, and on_take_over, or the orchestrator before it, failed")
