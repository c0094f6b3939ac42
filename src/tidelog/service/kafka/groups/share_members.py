"""The members of a share group (KIP-932), as a pure state machine: one request, ShareGroupHeartbeat.

Members share partitions: each partition has at least one member, and with more members than partitions some partitions
have several. Which messages a member gets is decided when it asks for some (`share_fetch.py`), not here.

Invariants
- Every partition of a topic that a member subscribes to is assigned to a member that does.
- The group's epoch grows when members, subscriptions or topics change; every member is given it with its assignment.
- A member that is silent for `session_timeout_ms` is removed. It gets UNKNOWN_MEMBER_ID when it comes back.
- Calls take the time, in ms of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidelog.service.kafka.error_codes import ErrorCode

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
Assignment = dict[str, list[int]]


class ShareGroupSettings(NamedTuple):
    """Kafka's names: group.share.session.timeout.ms, group.share.heartbeat.interval.ms, group.share.max.size."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_members: int = 200


class ShareMember:
    """A consumer of the group. `topics` are names as tidelog has them."""

    __slots__ = ("client_host", "client_id", "deadline_ms", "topics")

    def __init__(self, client_id: str, client_host: str) -> None:
        self.client_id = client_id
        self.client_host = client_host
        self.topics: frozenset[str] = frozenset()
        self.deadline_ms = 0


class ShareGroup:
    """The members of one group."""

    def __init__(self, settings: ShareGroupSettings | None = None) -> None:
        self._settings = settings or ShareGroupSettings()
        self.members: dict[str, ShareMember] = {}
        self.epoch = 0
        self._counts: dict[str, int] = {}

    def heartbeat(
        self,
        now_ms: int,
        member_id: str,
        member_epoch: int,
        topics: Sequence[str] | None,
        *,
        client_id: str = "",
        client_host: str = "",
    ) -> ErrorCode:
        """A member joins, stays or leaves; `topics` are what it subscribes to now, None: as before."""
        if not member_id:
            return ErrorCode.INVALID_REQUEST
        if member_epoch == LEAVE_EPOCH:
            return self.leave(member_id)
        member = self.members.get(member_id)
        if member is None:
            refusal = self._join_refusal(member_epoch, topics)
            if refusal is not ErrorCode.NONE:
                return refusal
            member = self.members[member_id] = ShareMember(client_id, client_host)
            self.epoch += 1
        elif member_epoch > self.epoch:
            return ErrorCode.FENCED_MEMBER_EPOCH
        if topics is not None and member.topics != frozenset(topics):
            member.topics = frozenset(topics)
            self.epoch += 1
        member.deadline_ms = now_ms + self._settings.session_timeout_ms
        return ErrorCode.NONE

    def _join_refusal(self, member_epoch: int, topics: Sequence[str] | None) -> ErrorCode:
        if member_epoch != JOIN_EPOCH:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if topics is None:
            return ErrorCode.INVALID_REQUEST
        return ErrorCode.NONE if len(self.members) < self._settings.max_members else ErrorCode.GROUP_MAX_SIZE_REACHED

    def leave(self, member_id: str) -> ErrorCode:
        """A member leaves, or is removed."""
        if self.members.pop(member_id, None) is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        self.epoch += 1
        return ErrorCode.NONE

    def set_topics(self, counts: Mapping[str, int]) -> None:
        """Which topics there are, and how many partitions each has."""
        if counts != self._counts:
            self._counts = dict(counts)
            self.epoch += 1

    def expire(self, now_ms: int) -> list[str]:
        """Removes the members that were silent for too long; returns them."""
        silent = [member_id for member_id, member in self.members.items() if member.deadline_ms <= now_ms]
        for member_id in silent:
            self.leave(member_id)
        return silent

    def assignment(self, member_id: str) -> Assignment:
        """The partitions of a member: each topic's are dealt to those who subscribe to it, again and again while there
        are more members than partitions."""
        found: Assignment = {}
        for topic in sorted(self.members[member_id].topics):
            count = self._counts.get(topic, 0)
            sharing = sorted(one for one, member in self.members.items() if topic in member.topics)
            place = sharing.index(member_id)
            if count >= len(sharing):
                found[topic] = list(range(place, count, len(sharing)))
            elif count:
                found[topic] = [place % count]
        return found

    @property
    def state(self) -> str:
        return "Stable" if self.members else "Empty"
