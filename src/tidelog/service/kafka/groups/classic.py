"""A consumer group of the classic protocol, as a pure state machine: join, sync, heartbeat, leave.

                     first member                all have joined, or time is up         the leader's assignment
    EMPTY ─────────────────────────> PREPARING ────────────────────────────────> COMPLETING ───────────────> STABLE
      ^                              ^  │ nobody is left                              │                         │
      └──────────────────────────────┼──┘                                             │                         │
                                     └───── a member joins anew, leaves, or expires ──┴─────────────────────────┘

Nothing here waits. A request that has to wait is parked under the caller's token, and answered by the reply of a later
call; every call takes the time, in ms of a clock that never goes back. `tick` is due at `next_deadline_ms`.

Invariants
- Every token that was given is answered exactly once, by the call itself or by a later one, unless its request is
  abandoned. `close` answers the rest.
- The generation grows by one whenever a rebalance completes. All members of a generation have the same protocol, one of
  them leads, and only the leader gets the list of members.
- A member that heartbeats within its session timeout, and joins again within the rebalance timeout when it must,
  stays a member. A parked member is alive: its request is its heartbeat.
- An instance id (static membership) names at most one member. Who comes with the same instance id replaces the member;
  the one before is fenced, also where it waits.
- A member that was given an id and did not come back with it (pending) holds a rebalance up for its session timeout at
  the most.
- A stable group is restored from its snapshot as it was: members go on without a rebalance, and have their session
  timeout from then on. Of a group that rebalances only the generation is kept: its members join again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from tidelog.errors import DataError
from tidelog.service.kafka.error_codes import ErrorCode

UNKNOWN_MEMBER = ""
NO_GENERATION = -1
Token = Hashable


class GroupState(Enum):
    """As Kafka's tools show it."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class GroupSettings(NamedTuple):
    """The limits of all groups of a broker."""

    initial_rebalance_delay_ms: int = 3000
    """How long the first rebalance of an empty group waits for more members; costs the first member that long."""
    min_session_timeout_ms: int = 6000
    max_session_timeout_ms: int = 1_800_000
    max_members: int = 10_000


class JoinRequest(NamedTuple):
    """What a member says when it joins."""

    member_id: str
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    """Name and metadata, in the order of preference."""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    requires_known_id: bool = True
    """Versions 4 and above: a new dynamic member gets its id first, and joins with that."""
    can_skip_assignment: bool = False
    """Versions 9 and above: a static leader that comes back may be told to keep the assignment."""


class JoinResult(NamedTuple):
    """The answer to JoinGroup."""

    error: ErrorCode
    member_id: str = UNKNOWN_MEMBER
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader_id: str = UNKNOWN_MEMBER
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    """Id, instance id and metadata of all, for the leader."""
    skip_assignment: bool = False


class SyncResult(NamedTuple):
    """The answer to SyncGroup."""

    error: ErrorCode
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


class Reply(NamedTuple):
    """An answer to the request with this token."""

    token: Token
    result: JoinResult | SyncResult


class MemberView(NamedTuple):
    """A member, as DescribeGroups shows it."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class _Snapshot(msgspec.Struct, array_like=True):
    version: int
    generation: int
    protocol_type: str | None
    protocol_name: str | None
    leader_id: str | None
    members: list[tuple[JoinRequest, bytes]]
    """In the order in which they joined, each with its assignment."""


_SNAPSHOT_VERSION = 1


@dataclass
class _Member:
    id: str
    request: JoinRequest
    deadline_ms: int
    assignment: bytes = b""
    join_token: Token | None = None
    sync_token: Token | None = None
    has_synced: bool = True
    """False from the answer to its join to its sync: for that long it may not be silent."""

    @property
    def instance_id(self) -> str | None:
        return self.request.instance_id

    @property
    def is_waiting(self) -> bool:
        return self.join_token is not None or self.sync_token is not None

    def metadata(self, protocol: str | None) -> bytes:
        return dict(self.request.protocols).get(protocol or "", b"")


@dataclass
class ClassicGroup:
    """One group. `new_member_id` makes an id from a client's name; it never makes the same twice."""

    group_id: str
    new_member_id: Callable[[str], str]
    settings: GroupSettings = field(default_factory=GroupSettings)
    state: GroupState = GroupState.EMPTY
    generation: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader_id: str | None = None
    _members: dict[str, _Member] = field(default_factory=dict)
    _instances: dict[str, str] = field(default_factory=dict)
    _pending: dict[str, int] = field(default_factory=dict)
    """Ids that were given out, and until when they are waited for."""
    _join_deadline_ms: int = 0
    _initial_until_ms: int | None = None
    """While the first rebalance of an empty group waits for more members: until when at the most."""
    _sync_deadline_ms: int = 0
    _replies: list[Reply] = field(default_factory=list)

    # Requests

    def join(self, now_ms: int, token: Token, request: JoinRequest) -> list[Reply]:
        """JoinGroup. The answer to `token` may come with a later call."""
        error = self._join_refusal(request)
        if error is not None:
            self._reply(token, JoinResult(error, request.member_id))
        elif request.member_id == UNKNOWN_MEMBER:
            self._join_new(now_ms, token, request)
        elif self._pending.pop(request.member_id, None) is not None:
            self._add_member(now_ms, token, request, request.member_id)
        else:
            self._join_known(now_ms, token, request)
        return self._take_replies()

    def sync(
        self,
        now_ms: int,
        token: Token,
        member_id: str,
        generation: int,
        assignments: Mapping[str, bytes],
        *,
        instance_id: str | None = None,
        protocol_type: str | None = None,
        protocol_name: str | None = None,
    ) -> list[Reply]:
        """SyncGroup; `assignments` are the leader's."""
        error = self._member_error(member_id, instance_id, generation)
        if error is ErrorCode.NONE:
            error = self._sync_refusal(protocol_type, protocol_name)
        if error is not ErrorCode.NONE:
            self._reply(token, SyncResult(error))
            return self._take_replies()
        member = self._members[member_id]
        self._keep_alive(now_ms, member)
        if self.state is GroupState.STABLE:
            self._reply(token, self._sync_result(member))
            return self._take_replies()
        if member.sync_token is not None:
            self._reply(member.sync_token, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS))
        member.sync_token, member.has_synced = token, True
        if member_id == self.leader_id:
            self._finish_sync(now_ms, assignments)
        return self._take_replies()

    def heartbeat(self, now_ms: int, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        """Heartbeat. It changes nothing but how long the member is waited for."""
        error = self._member_error(member_id, instance_id, generation)
        if error is not ErrorCode.NONE:
            return error
        self._keep_alive(now_ms, self._members[member_id])
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is GroupState.PREPARING else ErrorCode.NONE

    def leave(self, now_ms: int, member_id: str, instance_id: str | None = None) -> tuple[ErrorCode, list[Reply]]:
        """LeaveGroup, of one member; an administrator names a static one by its instance id alone."""
        if self.state is GroupState.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE, []
        if member_id in self._pending:
            del self._pending[member_id]
            self._try_complete_join(now_ms)
            return ErrorCode.NONE, self._take_replies()
        if instance_id is not None and member_id == UNKNOWN_MEMBER:
            member_id = self._instances.get(instance_id, UNKNOWN_MEMBER)
        error = self._identity_error(member_id, instance_id)
        if error is ErrorCode.NONE:
            self._remove(now_ms, member_id)
        return error, self._take_replies()

    def commit_error(self, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        """Whether somebody may commit offsets: a member of this generation, or anybody while there are no members."""
        if self.state is GroupState.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.state is GroupState.EMPTY:
            return ErrorCode.NONE
        error = self._member_error(member_id, instance_id, generation)
        if error is not ErrorCode.NONE:
            return error
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is GroupState.COMPLETING else ErrorCode.NONE

    def commit(self, now_ms: int, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        """As `commit_error`; a member that commits is alive."""
        error = self.commit_error(member_id, generation, instance_id)
        if error is ErrorCode.NONE and member_id in self._members:
            self._keep_alive(now_ms, self._members[member_id])
        return error

    def abandon(self, now_ms: int, token: Token) -> None:
        """The connection of a request that waits was closed: nobody reads its answer, and its member is silent now."""
        for member in self._members.values():
            if token is member.join_token:
                member.join_token = None
                self._keep_alive(now_ms, member)
            elif token is member.sync_token:
                member.sync_token, member.has_synced = None, False
                self._keep_alive(now_ms, member)

    # Time

    @property
    def next_deadline_ms(self) -> int | None:
        """When `tick` is due; None: nothing can happen by itself."""
        due = [member.deadline_ms for member in self._members.values() if not member.is_waiting]
        due += self._pending.values()
        if self.state is GroupState.PREPARING:
            due.append(self._join_deadline_ms)
        if self.state is GroupState.COMPLETING:
            due.append(self._sync_deadline_ms)
        return min(due, default=None)

    def tick(self, now_ms: int) -> list[Reply]:
        """Removes who was silent for too long, and ends a rebalance whose time is up."""
        for member_id in [name for name, until_ms in self._pending.items() if until_ms <= now_ms]:
            del self._pending[member_id]
        silent = [one.id for one in self._members.values() if not one.is_waiting and one.deadline_ms <= now_ms]
        if self.state is GroupState.COMPLETING and self._sync_deadline_ms <= now_ms:
            silent += [one.id for one in self._members.values() if not one.has_synced]
        for member_id in dict.fromkeys(silent):
            self._remove(now_ms, member_id)
        if self.state is GroupState.PREPARING and self._join_deadline_ms <= now_ms:
            self._end_join_wait(now_ms)
        self._try_complete_join(now_ms)
        return self._take_replies()

    def close(self, error: ErrorCode = ErrorCode.NOT_COORDINATOR) -> list[Reply]:
        """The group is deleted, or another node coordinates it now: every waiting request is answered."""
        for member in self._members.values():
            self._answer_parked(member, error)
        self._members.clear()
        self._instances.clear()
        self._pending.clear()
        self.state, self.leader_id = GroupState.DEAD, None
        return self._take_replies()

    # Views

    @property
    def is_empty(self) -> bool:
        """No member, and no request waits: it may be deleted."""
        return not self._members and not self._pending

    @property
    def is_settled(self) -> bool:
        """Stable, and no request waits: `snapshot` has all of it."""
        return self.state is GroupState.STABLE and not self._pending

    @property
    def member_ids(self) -> list[str]:
        return list(self._members)

    def members(self) -> list[MemberView]:
        """All members; their metadata counts in a stable group only."""
        is_stable = self.state is GroupState.STABLE
        return [
            MemberView(
                one.id,
                one.instance_id,
                one.request.client_id,
                one.request.client_host,
                one.metadata(self.protocol_name) if is_stable else b"",
                one.assignment,
            )
            for one in self._members.values()
        ]

    # Persistence

    def snapshot(self) -> bytes:
        """What a coordinator needs to go on; to be kept whenever a group becomes stable or empty."""
        is_stable = self.state is GroupState.STABLE
        members = [(one.request, one.assignment) for one in self._members.values()] if is_stable else []
        agreed = (self.protocol_type, self.protocol_name, self.leader_id) if is_stable else (None, None, None)
        return msgspec.msgpack.encode(_Snapshot(_SNAPSHOT_VERSION, self.generation, *agreed, members))

    def restore(self, now_ms: int, data: bytes) -> None:
        """Makes a new group what `snapshot` says; DataError when that is damaged: then members join again."""
        try:
            found = msgspec.msgpack.decode(data, type=_Snapshot)
        except msgspec.DecodeError as error:
            raise DataError(f"the snapshot of group {self.group_id} is damaged: {error}") from error
        ids = [request.member_id for request, _ in found.members]
        is_sound = len(set(ids)) == len(ids) and (found.leader_id in ids or not ids)
        if found.version != _SNAPSHOT_VERSION or not is_sound:
            raise DataError(f"the snapshot of group {self.group_id} is damaged or of another version")
        self.generation = found.generation
        for request, assignment in found.members:
            deadline_ms = now_ms + request.session_timeout_ms
            self._members[request.member_id] = _Member(request.member_id, request, deadline_ms, assignment)
            if request.instance_id is not None:
                self._instances[request.instance_id] = request.member_id
        if found.members:
            self.state = GroupState.STABLE
            self.protocol_type, self.protocol_name, self.leader_id = (
                found.protocol_type,
                found.protocol_name,
                found.leader_id,
            )

    # Checks

    def _join_refusal(self, request: JoinRequest) -> ErrorCode | None:
        limits = self.settings
        if self.state is GroupState.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if not limits.min_session_timeout_ms <= request.session_timeout_ms <= limits.max_session_timeout_ms:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        is_new = request.member_id == UNKNOWN_MEMBER and request.instance_id not in self._instances
        if is_new and len(self._members) + len(self._pending) >= limits.max_members:
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if not self._supports(request):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return None

    def _supports(self, request: JoinRequest) -> bool:
        """Whether some protocol would still be common to all."""
        if not request.protocol_type or not request.protocols:
            return False
        others = [one for one in self._members.values() if one.id != request.member_id]
        if request.instance_id is not None:
            others = [one for one in others if one.instance_id != request.instance_id]
        if not others:
            return True
        common = set.intersection(*({name for name, _ in one.request.protocols} for one in others))
        return request.protocol_type == self.protocol_type and any(name in common for name, _ in request.protocols)

    def _identity_error(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if instance_id is not None:
            owner = self._instances.get(instance_id)
            if owner is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if owner != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self._members else ErrorCode.UNKNOWN_MEMBER_ID

    def _member_error(self, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        error = self._identity_error(member_id, instance_id)
        if error is ErrorCode.NONE and generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        return error

    def _sync_refusal(self, protocol_type: str | None, protocol_name: str | None) -> ErrorCode:
        if self.state is GroupState.PREPARING:
            return ErrorCode.REBALANCE_IN_PROGRESS
        asked = ((protocol_type, self.protocol_type), (protocol_name, self.protocol_name))
        if any(said is not None and said != own for said, own in asked):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return ErrorCode.NONE

    # Joining

    def _join_new(self, now_ms: int, token: Token, request: JoinRequest) -> None:
        member_id = self.new_member_id(request.client_id if request.instance_id is None else request.instance_id)
        if request.instance_id is not None:
            if request.instance_id in self._instances:
                self._replace_static(now_ms, token, request, member_id)
            else:
                self._add_member(now_ms, token, request, member_id)
        elif request.requires_known_id:
            self._pending[member_id] = now_ms + request.session_timeout_ms
            self._reply(token, JoinResult(ErrorCode.MEMBER_ID_REQUIRED, member_id))
        else:
            self._add_member(now_ms, token, request, member_id)

    def _join_known(self, now_ms: int, token: Token, request: JoinRequest) -> None:
        error = self._identity_error(request.member_id, request.instance_id)
        if error is not ErrorCode.NONE:
            self._reply(token, JoinResult(error, request.member_id))
            return
        member = self._members[request.member_id]
        is_changed = member.request.protocols != request.protocols
        knows_all = (
            (self.state is GroupState.COMPLETING and not is_changed)
            # A leader that joins again asks for a rebalance: what it assigns may have changed, though it has not.
            or (self.state is GroupState.STABLE and not is_changed and member.id != self.leader_id)
        )
        self._keep_alive(now_ms, member)
        if knows_all:
            self._reply(token, self._join_result(member))
        else:
            self._park_join(now_ms, member, token, request)
            self._rebalance(now_ms)

    def _add_member(self, now_ms: int, token: Token, request: JoinRequest, member_id: str) -> None:
        member = _Member(member_id, request._replace(member_id=member_id), now_ms + request.session_timeout_ms)
        if not self._members:
            self.protocol_type = request.protocol_type
        self._members[member_id] = member
        if request.instance_id is not None:
            self._instances[request.instance_id] = member_id
        if self.leader_id is None:
            self.leader_id = member_id
        member.join_token = token
        if self.state is GroupState.PREPARING and self._initial_until_ms is not None:
            # One more while an empty group waits for its first members: wait for others that come just after it.
            later = now_ms + self.settings.initial_rebalance_delay_ms
            self._join_deadline_ms = min(max(self._join_deadline_ms, later), self._initial_until_ms)
        self._rebalance(now_ms)

    def _replace_static(self, now_ms: int, token: Token, request: JoinRequest, member_id: str) -> None:
        """The same instance, started again: it takes the place of the member that it was."""
        assert request.instance_id is not None
        old = self._members.pop(self._instances[request.instance_id])
        self._answer_parked(old, ErrorCode.FENCED_INSTANCE_ID)
        was_leader = old.id == self.leader_id
        member = _Member(member_id, request._replace(member_id=member_id), now_ms + request.session_timeout_ms)
        member.assignment = old.assignment
        self._members[member_id] = member
        self._instances[request.instance_id] = member_id
        if was_leader:
            self.leader_id = member_id
        if self.state is GroupState.STABLE and self._is_same_to_all(old, member):
            self._reply(token, self._returned_static(member, was_leader, old.id))
        else:
            member.join_token = token
            self._rebalance(now_ms)

    def _is_same_to_all(self, old: _Member, member: _Member) -> bool:
        """Whether the group would come to the same protocol with the same metadata."""
        name = self.protocol_name
        return self._choose_protocol() == name and old.metadata(name) == member.metadata(name)

    def _returned_static(self, member: _Member, was_leader: bool, old_id: str) -> JoinResult:
        """Nothing is rebalanced. A leader that cannot be told to skip the assignment is told that the old one leads."""
        result = self._join_result(member)
        if not was_leader:
            return result
        if member.request.can_skip_assignment:
            return result._replace(skip_assignment=True)
        return result._replace(leader_id=old_id, members=())

    def _park_join(self, now_ms: int, member: _Member, token: Token, request: JoinRequest) -> None:
        if member.join_token is not None:  # its client gave up and asks again
            self._reply(member.join_token, JoinResult(ErrorCode.REBALANCE_IN_PROGRESS, member.id))
        member.request = request._replace(instance_id=member.instance_id)
        member.join_token = token
        self._keep_alive(now_ms, member)

    def _rebalance(self, now_ms: int) -> None:
        """Begins a rebalance, unless one waits for members already, and ends it when it has all of them."""
        if self.state is not GroupState.PREPARING:
            for member in self._members.values():
                if member.sync_token is not None:
                    self._reply(member.sync_token, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS))
                    member.sync_token = None
            patience_ms = max((one.request.rebalance_timeout_ms for one in self._members.values()), default=0)
            self._initial_until_ms = None
            self._join_deadline_ms = now_ms + patience_ms
            if self.state is GroupState.EMPTY and self.settings.initial_rebalance_delay_ms > 0:
                self._initial_until_ms = now_ms + patience_ms
                self._join_deadline_ms = min(now_ms + self.settings.initial_rebalance_delay_ms, self._initial_until_ms)
            self.state = GroupState.PREPARING
        self._try_complete_join(now_ms)

    def _try_complete_join(self, now_ms: int) -> None:
        if self.state is not GroupState.PREPARING or self._initial_until_ms is not None:
            return
        if not self._pending and all(one.join_token is not None for one in self._members.values()):
            self._complete_join(now_ms)

    def _end_join_wait(self, now_ms: int) -> None:
        """Goes on without those who have not joined; static members may be away for their session timeout."""
        self._initial_until_ms = None
        for member in [one for one in self._members.values() if one.join_token is None and one.instance_id is None]:
            self._drop(member)
        if self._members and all(one.join_token is None for one in self._members.values()):
            # Only static members, and none is here to lead: their sessions decide.
            self._join_deadline_ms = now_ms + max(one.request.rebalance_timeout_ms for one in self._members.values())
            return
        self._complete_join(now_ms)

    def _complete_join(self, now_ms: int) -> None:
        self.generation += 1
        if not self._members:
            self.state, self.protocol_name, self.leader_id = GroupState.EMPTY, None, None
            self.protocol_type = None
            return
        if self.leader_id is None or self._members[self.leader_id].join_token is None:
            self.leader_id = next(one.id for one in self._members.values() if one.join_token is not None)
        self.protocol_name = self._choose_protocol()
        self.state = GroupState.COMPLETING
        patience_ms = max(one.request.rebalance_timeout_ms for one in self._members.values())
        self._sync_deadline_ms = now_ms + patience_ms
        for member in self._members.values():
            member.has_synced = member.join_token is None  # a static member that is away owes nothing yet
            if member.join_token is not None:
                self._reply(member.join_token, self._join_result(member))
                member.join_token = None
                self._keep_alive(now_ms, member)

    def _choose_protocol(self) -> str:
        """The one that most members like best of those that all have; the leader's order settles a tie."""
        members = list(self._members.values())
        common = set.intersection(*({name for name, _ in one.request.protocols} for one in members))
        votes = Counter(next(name for name, _ in one.request.protocols if name in common) for one in members)
        order = [name for name, _ in self._members[self.leader_id or members[0].id].request.protocols]
        return max(votes, key=lambda name: (votes[name], -order.index(name)))

    def _join_result(self, member: _Member) -> JoinResult:
        leads = member.id == self.leader_id
        everybody = tuple((one.id, one.instance_id, one.metadata(self.protocol_name)) for one in self._members.values())
        return JoinResult(
            ErrorCode.NONE,
            member.id,
            self.generation,
            self.protocol_type,
            self.protocol_name,
            self.leader_id or UNKNOWN_MEMBER,
            everybody if leads else (),
        )

    # Syncing

    def _finish_sync(self, now_ms: int, assignments: Mapping[str, bytes]) -> None:
        self.state = GroupState.STABLE
        for member in self._members.values():
            member.assignment = assignments.get(member.id, b"")
            if member.sync_token is not None:
                self._reply(member.sync_token, self._sync_result(member))
                member.sync_token = None
                self._keep_alive(now_ms, member)

    def _sync_result(self, member: _Member) -> SyncResult:
        return SyncResult(ErrorCode.NONE, self.protocol_type, self.protocol_name, member.assignment)

    # Leaving

    def _remove(self, now_ms: int, member_id: str) -> None:
        self._drop(self._members[member_id])
        if self.state in (GroupState.STABLE, GroupState.COMPLETING):
            self._rebalance(now_ms)
        else:
            self._try_complete_join(now_ms)
        if not self._members and self.state is GroupState.PREPARING and not self._pending:
            self._initial_until_ms = None
            self._complete_join(now_ms)

    def _drop(self, member: _Member) -> None:
        self._answer_parked(member, ErrorCode.UNKNOWN_MEMBER_ID)
        del self._members[member.id]
        if member.instance_id is not None:
            del self._instances[member.instance_id]
        if self.leader_id == member.id:
            self.leader_id = next(iter(self._members), None)

    # Answers

    def _keep_alive(self, now_ms: int, member: _Member) -> None:
        member.deadline_ms = now_ms + member.request.session_timeout_ms

    def _answer_parked(self, member: _Member, error: ErrorCode) -> None:
        if member.join_token is not None:
            self._reply(member.join_token, JoinResult(error, member.id))
        if member.sync_token is not None:
            self._reply(member.sync_token, SyncResult(error))
        member.join_token = member.sync_token = None

    def _reply(self, token: Token, result: JoinResult | SyncResult) -> None:
        self._replies.append(Reply(token, result))

    def _take_replies(self) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies
