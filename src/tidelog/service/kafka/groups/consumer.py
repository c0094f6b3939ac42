"""A consumer group of the new protocol (KIP-848), as a pure state machine: one request, ConsumerGroupHeartbeat.

The coordinator computes the target assignment; each member is moved towards it on its own, by its heartbeats:

                        some of its partitions must go
    STABLE ──────────────────────────────────────────────> UNREVOKED: it is told what it may keep, until it says that it
      ^   │ its target is not free yet                        │       owns no more than that
      │   v                                                   │
      └─ UNRELEASED: it has what is free of its target  <─────┘
         and gets the rest as others give it up

The group's epoch grows when members, subscriptions or topics change; then there is a new target. A member's epoch
becomes the group's once it has given up what is not its target.

Invariants
- A partition is given to a member only when no other member has it or still has to give it up. So no two members that
  follow the protocol own a partition at the same time.
- A member that is silent for `session_timeout_ms`, or does not give up partitions within its rebalance timeout, is
  removed; what it had is free then. It gets UNKNOWN_MEMBER_ID when it comes back, and starts again at epoch 0.
- A heartbeat with another epoch than the member's is fenced, but for one whose answer was lost: the epoch before, with
  no more partitions than it was given.
- A group is restored from its snapshot as it was; timeouts start again.
- Calls take the time, in ms of a clock that never goes back; `tick` is due at `next_deadline_ms`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import msgspec

from tidelog.errors import DataError
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.assignors import ASSIGNORS, DEFAULT_ASSIGNOR, Partition
from tidelog.service.kafka.groups.topic_pattern import PatternError, topic_pattern

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
LEAVE_STATIC_EPOCH = -2
_NOTHING: frozenset[Partition] = frozenset()


class MemberState(Enum):
    """How far a member is from its target."""

    STABLE = "Stable"
    UNREVOKED = "UnrevokedPartitions"
    UNRELEASED = "UnreleasedPartitions"


class ConsumerGroupSettings(NamedTuple):
    """The limits of all groups of a broker."""

    session_timeout_ms: int = 45_000
    """A member that is silent for so long is removed; shorter finds dead ones sooner, and tolerates fewer pauses."""
    heartbeat_interval_ms: int = 5_000
    max_members: int = 10_000


class HeartbeatRequest(NamedTuple):
    """ConsumerGroupHeartbeat; None: as it was."""

    member_id: str
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topics: frozenset[str] | None = None
    regex: str | None = None
    assignor: str | None = None
    owned: frozenset[Partition] | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def says_all(self) -> bool:
        """A client does so when it joins, and after an answer that it did not get: then it wants all of the answer."""
        is_whole = self.owned is not None and self.rebalance_timeout_ms > 0
        return self.member_epoch == JOIN_EPOCH or (is_whole and (self.topics is not None or self.regex is not None))


class HeartbeatResult(NamedTuple):
    """The answer; `assignment` is None where the member has it already."""

    error: ErrorCode
    message: str | None = None
    member_id: str | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    assignment: frozenset[Partition] | None = None


@dataclass
class ConsumerMember:
    """A member, as the coordinator knows it."""

    id: str
    deadline_ms: int
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = 300_000
    topics: frozenset[str] = frozenset()
    regex: str = ""
    assignor: str | None = None
    epoch: int = 0
    previous_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: frozenset[Partition] = _NOTHING
    revoking: frozenset[Partition] = _NOTHING
    """What it has to give up, and may still own."""
    revoke_deadline_ms: int | None = None
    is_away: bool = False
    """A static member that said it will come back."""

    @property
    def holds(self) -> frozenset[Partition]:
        """What nobody else may be given."""
        return self.assigned | self.revoking


class _Snapshot(msgspec.Struct, array_like=True):
    version: int
    epoch: int
    assignment_epoch: int
    target: dict[str, frozenset[Partition]]
    members: list[ConsumerMember]
    topics: dict[str, int]


_SNAPSHOT_VERSION = 1


def match_topics(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """The names that a pattern matches as a whole; PatternError for none."""
    matches = topic_pattern(pattern).matches
    return frozenset(name for name in names if matches(name))


@dataclass
class ConsumerGroup:
    """One group. `match` finds the topics of a pattern."""

    group_id: str
    new_member_id: Callable[[], str]
    settings: ConsumerGroupSettings = field(default_factory=ConsumerGroupSettings)
    match: Callable[[str, Iterable[str]], frozenset[str]] = match_topics
    epoch: int = 0
    assignment_epoch: int = 0
    target: dict[str, frozenset[Partition]] = field(default_factory=dict)
    members: dict[str, ConsumerMember] = field(default_factory=dict)
    topics: dict[str, int] = field(default_factory=dict)
    """All topics, and how many partitions they have: what subscriptions are resolved by."""

    # Requests

    def heartbeat(self, now_ms: int, request: HeartbeatRequest) -> HeartbeatResult:
        """One heartbeat: join, go on, or leave."""
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if request.member_epoch < 0:
            return self._leave(now_ms, request)
        epoch = self.epoch
        member = self._join(now_ms, request) if request.member_epoch == JOIN_EPOCH else self._known(request)
        if isinstance(member, HeartbeatResult):
            return member
        before = (member.epoch, member.assigned)
        member.deadline_ms = now_ms + self.settings.session_timeout_ms
        member.is_away = False
        if self._update(member, request):
            self.epoch = epoch + 1
        self._retarget()
        if request.member_epoch == JOIN_EPOCH:
            # A process that has just started owns nothing, so what is not its target is free at once.
            member.assigned &= self.target.get(member.id, _NOTHING)
            member.state, member.revoking, member.revoke_deadline_ms = MemberState.STABLE, _NOTHING, None
        self._reconcile(now_ms, member, request.owned)
        has_new = before != (member.epoch, member.assigned) or request.says_all or request.member_epoch != member.epoch
        return HeartbeatResult(
            ErrorCode.NONE,
            None,
            member.id,
            member.epoch,
            self.settings.heartbeat_interval_ms,
            member.assigned if has_new else None,
        )

    def set_topics(self, topics: Mapping[str, int]) -> None:
        """Topics came, went or grew. Targets change with the next heartbeats."""
        before = self._relevant()
        self.topics = dict(topics)
        if self._relevant() != before:
            self.epoch += 1

    def commit_error(self, member_id: str, member_epoch: int) -> ErrorCode:
        """Whether somebody may commit offsets: a member with its current epoch, or anybody in a group without any."""
        if member_epoch < 0 and not self.members:
            return ErrorCode.NONE
        member = self.members.get(member_id)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if member_epoch == member.epoch else ErrorCode.STALE_MEMBER_EPOCH

    def leave(self, member_id: str, instance_id: str | None = None) -> ErrorCode:
        """LeaveGroup: an administrator takes a member out, a static one by its instance id alone."""
        owner = None if instance_id is None else self._by_instance(instance_id)
        if instance_id is not None and owner is not None and member_id not in ("", owner.id):
            return ErrorCode.FENCED_INSTANCE_ID
        found = owner if instance_id is not None else self.members.get(member_id)
        if found is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        self.remove(found.id)
        return ErrorCode.NONE

    def remove(self, member_id: str) -> None:
        """Takes a member out; what it had is free."""
        del self.members[member_id]
        self.target.pop(member_id, None)
        self.epoch += 1

    # Time

    @property
    def next_deadline_ms(self) -> int | None:
        """When `tick` is due."""
        due = [one.deadline_ms for one in self.members.values()]
        due += [one.revoke_deadline_ms for one in self.members.values() if one.revoke_deadline_ms is not None]
        return min(due, default=None)

    def tick(self, now_ms: int) -> list[str]:
        """Removes members that were silent, or did not give up partitions in time, and returns their ids."""
        late = [
            one.id
            for one in self.members.values()
            if one.deadline_ms <= now_ms or (one.revoke_deadline_ms is not None and one.revoke_deadline_ms <= now_ms)
        ]
        for member_id in late:
            self.remove(member_id)
        return late

    @property
    def state(self) -> str:
        """As Kafka's tools show it."""
        if not self.members:
            return "Empty"
        if self.epoch > self.assignment_epoch:
            return "Assigning"
        is_done = all(
            one.state is MemberState.STABLE and one.epoch == self.assignment_epoch for one in self.members.values()
        )
        return "Stable" if is_done else "Reconciling"

    # Persistence

    def snapshot(self) -> bytes:
        """What a coordinator needs to go on; to be kept whenever an epoch or an assignment has changed."""
        members = [
            replace(one, deadline_ms=0, revoke_deadline_ms=None if one.revoke_deadline_ms is None else 0)
            for one in self.members.values()
        ]
        return msgspec.msgpack.encode(
            _Snapshot(_SNAPSHOT_VERSION, self.epoch, self.assignment_epoch, self.target, members, self._relevant())
        )

    def fingerprint(self) -> tuple[object, ...]:
        """Another one whenever there is something new to keep; costs less than a snapshot."""
        members = [
            (one.id, one.epoch, one.state, one.assigned, one.revoking, one.is_away) for one in self.members.values()
        ]
        return (self.epoch, self.assignment_epoch, *members)

    def restore(self, now_ms: int, data: bytes) -> None:
        """Makes a new group what `snapshot` says; DataError when that is damaged: then members join again."""
        try:
            found = msgspec.msgpack.decode(data, type=_Snapshot)
        except msgspec.DecodeError as error:
            raise DataError(f"the snapshot of group {self.group_id} is damaged: {error}") from error
        if found.version != _SNAPSHOT_VERSION:
            raise DataError(f"the snapshot of group {self.group_id} has version {found.version}")
        self.epoch, self.assignment_epoch = found.epoch, found.assignment_epoch
        self.target, self.topics = found.target, found.topics
        self.members = {one.id: one for one in found.members}
        for member in self.members.values():
            member.deadline_ms = now_ms + self.settings.session_timeout_ms
            if member.revoke_deadline_ms is not None:
                member.revoke_deadline_ms = now_ms + member.rebalance_timeout_ms

    # Checks

    def _refusal(self, request: HeartbeatRequest) -> HeartbeatResult | None:
        if request.assignor is not None and request.assignor not in ASSIGNORS:
            known = ", ".join(sorted(ASSIGNORS))
            return _refused(ErrorCode.UNSUPPORTED_ASSIGNOR, f"assignor {request.assignor} is not one of {known}")
        if request.member_epoch < LEAVE_STATIC_EPOCH:
            return _refused(ErrorCode.INVALID_REQUEST, "the member epoch must be -2 or more")
        if request.member_epoch == JOIN_EPOCH:
            return self._join_refusal(request)
        return None

    def _join_refusal(self, request: HeartbeatRequest) -> HeartbeatResult | None:
        if request.topics is None and not request.regex:
            return _refused(ErrorCode.INVALID_REQUEST, "a member that joins must say what it subscribes to")
        if request.owned:
            return _refused(ErrorCode.INVALID_REQUEST, "a member that joins owns no partitions")
        if request.rebalance_timeout_ms <= 0:
            return _refused(ErrorCode.INVALID_REQUEST, "a member that joins must have a rebalance timeout")
        if request.member_id not in self.members and len(self.members) >= self.settings.max_members:
            return _refused(ErrorCode.GROUP_MAX_SIZE_REACHED, "the group is full")
        return self._regex_refusal(request.regex)

    def _regex_refusal(self, pattern: str | None) -> HeartbeatResult | None:
        try:
            if pattern:
                self.match(pattern, self.topics)
        except PatternError as error:
            return _refused(ErrorCode.INVALID_REGULAR_EXPRESSION, str(error))
        return None

    def _known(self, request: HeartbeatRequest) -> ConsumerMember | HeartbeatResult:
        member = self.members.get(request.member_id)
        if request.instance_id is not None:
            owner = self._by_instance(request.instance_id)
            if owner is None:
                return _refused(ErrorCode.UNKNOWN_MEMBER_ID, f"no member has the instance id {request.instance_id}")
            if owner is not member:
                return _refused(
                    ErrorCode.FENCED_INSTANCE_ID, f"another member has the instance id {request.instance_id}"
                )
        if member is None:
            return _refused(ErrorCode.UNKNOWN_MEMBER_ID, f"{request.member_id} is not a member of the group")
        is_lost_answer = request.member_epoch == member.previous_epoch and (
            request.owned is not None and request.owned <= member.assigned
        )
        if request.member_epoch != member.epoch and not is_lost_answer:
            return _refused(ErrorCode.FENCED_MEMBER_EPOCH, f"the epoch of {member.id} is {member.epoch}; join again")
        return self._regex_refusal(request.regex) or member

    def _by_instance(self, instance_id: str) -> ConsumerMember | None:
        return next((one for one in self.members.values() if one.instance_id == instance_id), None)

    # Coming and going

    def _join(self, now_ms: int, request: HeartbeatRequest) -> ConsumerMember | HeartbeatResult:
        member_id = request.member_id or self.new_member_id()
        old = None if request.instance_id is None else self._by_instance(request.instance_id)
        if old is not None and old.id != member_id:
            if not old.is_away:
                return _refused(
                    ErrorCode.UNRELEASED_INSTANCE_ID, f"{old.id} still has the instance id {request.instance_id}"
                )
            return self._return_static(now_ms, old, member_id)
        member = self.members.get(member_id)
        if member is None:
            member = ConsumerMember(member_id, now_ms, request.instance_id)
            self.members[member_id] = member
            self.epoch += 1
        elif not member.is_away:
            member.assigned = _NOTHING  # it has lost what it had, and says so by joining again
        member.epoch = member.previous_epoch = 0
        return member

    def _return_static(self, now_ms: int, old: ConsumerMember, member_id: str) -> ConsumerMember:
        """The same instance with another id: it goes on with what it had."""
        del self.members[old.id]
        target = self.target.pop(old.id, None)
        if target is not None:
            self.target[member_id] = target
        old.id, old.epoch, old.previous_epoch = member_id, 0, 0
        self.members[member_id] = old
        return old

    def _leave(self, now_ms: int, request: HeartbeatRequest) -> HeartbeatResult:
        member = self.members.get(request.member_id)
        if request.instance_id is not None:
            owner = self._by_instance(request.instance_id)
            if owner is not None and owner is not member:
                return _refused(
                    ErrorCode.FENCED_INSTANCE_ID, f"another member has the instance id {request.instance_id}"
                )
        if member is None:
            return _refused(ErrorCode.UNKNOWN_MEMBER_ID, f"{request.member_id} is not a member of the group")
        if request.member_epoch == LEAVE_STATIC_EPOCH and member.instance_id is not None:
            member.is_away = True
            member.epoch = LEAVE_STATIC_EPOCH
            member.revoking, member.revoke_deadline_ms = _NOTHING, None  # it owns nothing while it is away
        else:
            self.remove(member.id)
        return HeartbeatResult(ErrorCode.NONE, None, request.member_id, request.member_epoch)

    def _update(self, member: ConsumerMember, request: HeartbeatRequest) -> bool:
        """Takes over what the member says, and tells whether that may change the target."""
        before = (member.topics, member.regex, member.assignor)
        member.topics = member.topics if request.topics is None else request.topics
        member.regex = member.regex if request.regex is None else request.regex
        member.assignor = member.assignor if request.assignor is None else request.assignor
        member.rack_id = member.rack_id if request.rack_id is None else request.rack_id
        if request.rebalance_timeout_ms > 0:
            member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.client_id = request.client_id or member.client_id
        member.client_host = request.client_host or member.client_host
        return before != (member.topics, member.regex, member.assignor)

    # Targets

    def _subscription(self, member: ConsumerMember) -> frozenset[str]:
        found = frozenset(name for name in member.topics if name in self.topics)
        if not member.regex:
            return found
        try:
            return found | self.match(member.regex, self.topics)
        except PatternError:  # there are more topics than when it was accepted, and it takes too long for them
            return found

    def subscribed_topics(self) -> frozenset[str]:
        """All topics that somebody subscribes to."""
        return frozenset().union(*(self._subscription(one) for one in self.members.values()))

    def _relevant(self) -> dict[str, int]:
        return {name: self.topics[name] for name in self.subscribed_topics()}

    def _retarget(self) -> None:
        if self.assignment_epoch == self.epoch:
            return
        subscriptions = {one.id: self._subscription(one) for one in self.members.values()}
        assign = ASSIGNORS[self.assignor_name()]
        self.target = assign(subscriptions, dict(sorted(self._relevant().items())), self.target)
        self.assignment_epoch = self.epoch

    def assignor_name(self) -> str:
        """The one that most members ask for."""
        votes = Counter(one.assignor for one in self.members.values() if one.assignor is not None)
        return max(votes, key=lambda name: (votes[name], name == DEFAULT_ASSIGNOR, name), default=DEFAULT_ASSIGNOR)

    # Towards the target

    def _reconcile(self, now_ms: int, member: ConsumerMember, owned: frozenset[Partition] | None) -> None:
        if member.state is MemberState.UNREVOKED:
            if owned is None or owned & member.revoking:
                return
            member.revoking, member.revoke_deadline_ms = _NOTHING, None
        elif member.state is MemberState.STABLE and member.epoch == self.assignment_epoch:
            return
        target = self.target.get(member.id, _NOTHING)
        surplus = member.assigned - target
        if surplus:
            member.assigned &= target
            member.revoking |= surplus
            member.state = MemberState.UNREVOKED
            member.revoke_deadline_ms = now_ms + member.rebalance_timeout_ms
            return
        held = frozenset[Partition]().union(*(one.holds for one in self.members.values() if one is not member))
        member.assigned = target - held
        member.state = MemberState.STABLE if member.assigned == target else MemberState.UNRELEASED
        if member.epoch != self.assignment_epoch:
            member.previous_epoch, member.epoch = member.epoch, self.assignment_epoch


def _refused(error: ErrorCode, message: str) -> HeartbeatResult:
    return HeartbeatResult(error, message)
