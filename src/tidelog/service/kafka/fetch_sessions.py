"""Fetch sessions (KIP-227): a consumer names its partitions once, then only what changes, and is answered so, too.

    session id   epoch
        0          0     a full request that asks for a session; the answer has its id, or 0 where there is no room
        0         -1     a full request without one
        n          0     a full request; the session n ends, and another one is made
        n         -1     a full request; the session n ends
        n         >0     an incremental request: partitions that are new or fetched from elsewhere, and forgotten ones

Invariants
- A session belongs to the principal that made it. To others it does not exist.
- An incremental request has the epoch after the last one, else the session is refused: client and server could know
  different partitions. After 2^31 - 1 comes 1.
- An incremental answer has a partition when it has records, an error, another node to read from, or another high
  watermark or start than the client was told last. After an error it has it once more.
- Partitions that were answered with records go behind the others, so that each has its turn when limits are small.
- At most `max_sessions` are kept. For a new one that which was silent longest goes, if that was for `eviction_seconds`;
  else one with fewer partitions than the new one has, if it is as old. A client whose session went makes another one.
- Nothing here waits: all of it happens in one turn of the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from tidelog.service.kafka.error_codes import ErrorCode

DEFAULT_MAX_SESSIONS = 1000
DEFAULT_EVICTION_SECONDS = 120.0
_NO_SESSION = 0
_INITIAL, _FINAL = 0, -1
_LAST_EPOCH = (1 << 31) - 1
Key = tuple[str, int]
"""A topic as the client says it, and a partition."""


class _Cached:
    """A partition of a session: what the client asked last, and what it was told."""

    __slots__ = ("asked", "high_watermark", "start_offset")

    def __init__(self, asked: Any) -> None:
        self.asked = asked
        self.high_watermark = -1
        self.start_offset = -1

    def told(self, answer: Any) -> bool:
        """Whether an answer has something that the client does not know; it is told then."""
        is_news = (
            answer.error_code != ErrorCode.NONE
            or any(map(len, answer.records or ()))
            or answer.preferred_read_replica >= 0
            or answer.high_watermark != self.high_watermark
            or answer.log_start_offset != self.start_offset
        )
        has_error = answer.error_code != ErrorCode.NONE
        self.high_watermark = -1 if has_error else answer.high_watermark
        self.start_offset = -1 if has_error else answer.log_start_offset
        return is_news


class FetchSession:
    """What one consumer fetches from one broker."""

    def __init__(self, session_id: int, principal: str, now: float) -> None:
        self.id = session_id
        self.principal = principal
        self.made_at = self.used_at = now
        self.next_epoch = 1
        self._partitions: dict[Key, _Cached] = {}
        self.is_in_use = False
        """A request of it is being answered."""

    @property
    def size(self) -> int:
        return len(self._partitions)

    def update(self, topics: Any, forgotten: Any) -> None:
        """What a request says."""
        for topic in topics:
            for asked in topic.partitions:
                known = self._partitions.get((topic.topic, asked.partition))
                if known is None:
                    self._partitions[topic.topic, asked.partition] = _Cached(asked)
                else:
                    known.asked = asked
        for topic in forgotten:
            for number in topic.partitions:
                self._partitions.pop((topic.topic, number), None)

    def asked(self) -> list[tuple[str, list[Any]]]:
        """Everything that it fetches, by topic, in the order in which it is served. A topic may come more than once."""
        found: list[tuple[str, list[Any]]] = []
        for (topic, _), cached in self._partitions.items():
            if not found or found[-1][0] != topic:
                found.append((topic, []))
            found[-1][1].append(cached.asked)
        return found

    def answered(self, topics: list[Any], *, is_full: bool) -> list[Any]:
        """The part of a full answer that the client is told: all of it, or what it does not know."""
        kept = []
        for topic in topics:
            news = [answer for answer in topic.partitions if self._told(topic.topic, answer) or is_full]
            if news:
                topic.partitions = news
                kept.append(topic)
        return kept

    def _told(self, topic: str, answer: Any) -> bool:
        cached = self._partitions.get((topic, answer.partition_index))
        if cached is None:
            return True
        is_news = cached.told(answer)
        if any(map(len, answer.records or ())):
            self._partitions[topic, answer.partition_index] = self._partitions.pop((topic, answer.partition_index))
        return is_news


class FetchSessions:
    """The sessions of one broker."""

    def __init__(
        self,
        now: Callable[[], float],
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        eviction_seconds: float = DEFAULT_EVICTION_SECONDS,
    ) -> None:
        self._now = now
        self._max_sessions = max_sessions
        self._eviction_seconds = eviction_seconds
        # The one that was used longest ago first.
        self._sessions: dict[int, FetchSession] = {}
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, principal: str, request: Any) -> FetchSession | ErrorCode | None:
        """The session of a request, up to date with it; None where there is none; why there should be and is not."""
        known = self._sessions.get(request.session_id)
        if known is not None and known.principal != principal:
            known = None
        if request.session_epoch in (_INITIAL, _FINAL):
            if known is not None:
                del self._sessions[known.id]
            return None
        if known is None:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if request.session_epoch != known.next_epoch or known.is_in_use:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        known.next_epoch = 1 if known.next_epoch == _LAST_EPOCH else known.next_epoch + 1
        known.used_at = self._now()
        self._sessions[known.id] = self._sessions.pop(known.id)
        known.update(request.topics, request.forgotten_topics_data)
        return known

    def make(self, principal: str, request: Any) -> FetchSession | None:
        """A session for a full request that asks for one, if there is room."""
        if request.session_epoch != _INITIAL:
            return None
        now = self._now()
        made = FetchSession(self._new_id(), principal, now)
        made.update(request.topics, ())
        if not made.size or not self._make_room(made.size, now):
            return None
        self._sessions[made.id] = made
        return made

    def _new_id(self) -> int:
        while True:
            made = 1 + secrets.randbelow(_LAST_EPOCH - 1)
            if made not in self._sessions:
                return made

    def _make_room(self, size: int, now: float) -> bool:
        if len(self._sessions) < self._max_sessions:
            return True
        if not self._sessions:
            return False
        silent = next(iter(self._sessions.values()))
        if now - silent.used_at < self._eviction_seconds:
            old = [one for one in self._sessions.values() if now - one.made_at >= self._eviction_seconds]
            silent = min(old, key=lambda one: one.size, default=silent)
            if silent not in old or silent.size >= size:
                return False
        del self._sessions[silent.id]
        self.evicted += 1
        return True
