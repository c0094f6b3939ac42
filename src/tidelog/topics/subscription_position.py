"""Storing how far a subscription is: when it is made, now and then, and when it is closed.

Invariants
- What is stored is durable in the log: a position beyond that would pass over other messages after a crash.
- One store at a time, never under the lock of the subscription: acknowledging does not wait for a metadata store.
"""

from __future__ import annotations

from threading import Lock

import msgspec

from tidelog.errors import TidelogError
from tidelog.log import Log
from tidelog.tier.owner import Cursor
from tidelog.topics.cursor_store import CursorStore
from tidelog.topics.delivery import DeliveryState
from tidelog.topics.live_log import LiveLog

_NEVER = 1 << 64


class StoredPosition:
    """The cursor of one subscription, as it is stored."""

    def __init__(self, name: str, cursor: Cursor, cursors: CursorStore, log: Log | LiveLog, min_delta: int) -> None:
        self._name = name
        self._cursors = cursors
        self._log = log
        self._min_delta = min_delta
        self._storing = Lock()
        self.cursor = cursor
        self.soon_at = cursor.offset + min_delta
        """From this offset on it is worth to store it before the next regular time."""

    @property
    def offset(self) -> int:
        return self.cursor.offset

    def wanted(self) -> None:
        """Somebody has asked for it to be stored soon."""
        self.soon_at = _NEVER

    def store(self, state: DeliveryState, guard: Lock, *, is_last: bool = False) -> None:
        """Stores what `state` says now, if that is news; the last time with all that was acknowledged."""
        with self._storing:
            if is_last:
                _flush(self._log)
            with guard:
                cursor = self._snapshot(state)
            if cursor != self.cursor:
                self._cursors.store(self._name, cursor)
            self.cursor = cursor
            self.soon_at = cursor.offset + self._min_delta

    def misses_acknowledgements(self, state: DeliveryState) -> bool:
        """Whether something is acknowledged that is not stored so."""
        progress = state.progress
        return (progress.floor, tuple(progress.ranges)) != (self.cursor.offset, self.cursor.acked)

    def _snapshot(self, state: DeliveryState) -> Cursor:
        progress = state.progress
        known = msgspec.structs.replace(
            self.cursor,
            offset=progress.floor,
            acked=tuple(progress.ranges),
            failures=tuple(state.stored_failures().items()),
            dead_letter_offset=state.dead_letter_offset,
            kind=state.options.kind,
            hold_retention=state.options.hold_retention,
        )
        return known.clipped(self._log.durable_offset)

    def delete(self) -> None:
        """There is no such subscription any more."""
        with self._storing:
            self._cursors.delete(self._name)


def _flush(log: Log | LiveLog) -> None:
    """What cannot be made durable is not stored as acknowledged either; closing the log says why."""
    try:
        log.flush()
    except TidelogError:
        return
