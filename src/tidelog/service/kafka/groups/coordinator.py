"""The group coordinator: answers every request of consumer groups, of the classic protocol and of the new one.

    GroupTable          groups, members, timers       requests that wait are futures
    CommittedOffsets    what groups have committed    durable before the answer

Invariants
- Refusals are Kafka's, in every version of a request: clients act on the error code.
- Before offsets and members are loaded, requests are answered with COORDINATOR_LOAD_IN_PROGRESS: an offset that was not
  read yet is not taken for none.
- Members are in memory, and kept in the store whenever a group has changed: a broker that is started again, also after
  a kill, goes on with them. Where that is lost, members are unknown, join again, and go on at what is committed.
- A group whose members speak one protocol refuses members of the other.
- Groups never hold back retention.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tidelog.clock import Clock, SystemClock
from tidelog.errors import (
    ConflictError,
    DataError,
    InputError,
    NotFoundError,
    ServerUnavailableError,
    TidelogError,
)
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.classic import (
    UNKNOWN_MEMBER,
    ClassicGroup,
    JoinRequest,
    JoinResult,
    Reply,
    SyncResult,
)
from tidelog.service.kafka.groups.committed_offsets import CommittedOffsets, OffsetStore, TopicPartition
from tidelog.service.kafka.groups.consumer import (
    JOIN_EPOCH,
    LEAVE_STATIC_EPOCH,
    ConsumerGroup,
    HeartbeatRequest,
    HeartbeatResult,
)
from tidelog.service.kafka.groups.offset_requests import OffsetRequests, error_code, own_name
from tidelog.service.kafka.groups.store import GroupRecord
from tidelog.service.kafka.groups.table import CoordinatorSettings, GroupTable, RecordStore, Topics
from tidelog.service.kafka.groups.views import GroupViews, by_topic
from tidelog.service.kafka.peers import is_forwarded
from tidelog.service.kafka.requests import Handler, RequestContext
from tidelog.service.kafka.slots import Slots
from tidelog.service.kafka.transactions.producers import is_after
from tidelog.service.placement import slot_of
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.subscription.group_offsets import GroupOffset, OffsetKey

_logger = logging.getLogger("tidelog.kafka")
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
FIND_COORDINATOR = 10
_OFFSET_COMMIT = 8
_MAX_ENDED = 100_000
_GROUP_KEY, _TRANSACTION_KEY = 0, 1


class BrokerNode(NamedTuple):
    """Where clients find a coordinator."""

    node_id: int
    host: str
    port: int


class GroupCoordinator:
    """Coordinates all groups of a broker. `start` it before the first request."""

    def __init__(
        self,
        offsets: OffsetStore,
        records: RecordStore,
        topics: Topics,
        node_of: Callable[[str], BrokerNode | None],
        settings: CoordinatorSettings | None = None,
        *,
        clock: Clock | None = None,
        clock_ms: Callable[[], int] | None = None,
        slots: Slots | None = None,
    ) -> None:
        """`node_of` says who coordinates a group or a transactional id, None: nobody at the moment. `clock_ms` never
        goes back; without it, that of the event loop. With `slots` it coordinates the groups of these alone."""
        self.settings = settings or CoordinatorSettings()
        self._clock = clock or SystemClock()
        self._clock_ms = clock_ms or (lambda: int(asyncio.get_running_loop().time() * 1000))
        self._topics = topics
        self._node_of = node_of
        self._slots = slots
        self._offsets = CommittedOffsets(offsets, topics, self._emptied, slots)
        self._table = GroupTable(topics, self.settings, records, self._offsets.has, self._clock_ms, self._clock.now_us)
        self._offset_store, self._records = offsets, records
        self._offset_requests = OffsetRequests(self._table, self._offsets, topics, self.settings, self._clock)
        self._views = GroupViews(self._table, self._offsets, topics)
        self._ended: dict[tuple[str, int], int] = {}
        """By group and producer: the number of the last transaction of which another node has told the end."""
        self._started_us = 0
        self._loader: asyncio.Task[None] | None = None
        self._expiry: asyncio.Task[None] | None = None

    def statistics(self) -> dict[str, dict[tuple[str, int], int]]:
        """The committed offsets of all groups, by topic and partition; from memory."""
        return self._offsets.statistics()

    def handlers(self) -> dict[int, Handler]:
        """By API key."""
        return {
            **self._offset_requests.handlers(),
            **self._views.handlers(),
            _OFFSET_COMMIT: self._offset_commit,
            FIND_COORDINATOR: self._find_coordinator,
            11: self._join_group,
            12: self._heartbeat,
            13: self._leave_group,
            14: self._sync_group,
            68: self._consumer_heartbeat,
        }

    async def start(self) -> None:
        """Reads the committed offsets, and follows the topics from here on."""
        self._started_us = self._clock.now_us()
        self._topics.on_change(self._topics_changed)
        self._expiry = asyncio.get_running_loop().create_task(self._expire_for_ever())
        if self._slots is not None:
            self._offsets.use({})
            return
        self._loader = asyncio.get_running_loop().create_task(self._load_until_done())
        await asyncio.wait([self._loader], timeout=_LONGEST_PAUSE_SECONDS)

    async def _load_until_done(self) -> None:
        """While the store does not answer, it is asked again."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            try:
                offsets, records = await in_store_thread(self._load)
            except TidelogError as error:
                _logger.warning("consumer groups cannot be read yet: %s", error)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)
                continue
            self._offsets.use(offsets)
            self._table.restore(records)
            return

    def _load(self) -> tuple[dict[OffsetKey, GroupOffset | DataError], dict[str, GroupRecord]]:
        return self._offset_store.load(), self._records.load()

    def take_over(
        self, offsets: Mapping[OffsetKey, GroupOffset | DataError], records: Mapping[str, GroupRecord]
    ) -> None:
        """Goes on with the groups of slots that this node has now."""
        self._started_us = self._clock.now_us()
        self._offsets.use(offsets)
        self._table.restore(records)

    async def hand_over(self, slot: int) -> None:
        """Forgets the groups of a slot, once what is being written of them is written."""
        groups = [one for one in {*self._table.ids(), *self._offsets.known()} if slot_of(one) == slot]
        self._table.forget(groups)
        await self._table.finish()
        await self._offsets.stop()
        self._offsets.forget(groups)

    def release(self) -> None:
        """The broker is about to end: everybody who waits is answered, and finds another coordinator or this one again.

        Offsets can be committed until `stop`.
        """
        self._table.close()

    async def stop(self) -> None:
        """Finishes the writes that have begun."""
        for task in (self._loader, self._expiry):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self.release()
        await self._table.finish()
        await self._offsets.stop()

    def _emptied(self, group_id: str) -> None:
        """The last offset of a group is gone, and the group too if it has no members."""
        self._table.changed(group_id)

    def partition_opened(self, topic: str, partition: int, next_offset: int) -> None:
        """Offsets beyond its end, which an owner has lost with its disk, are moved back to the end."""
        self._offsets.clip(topic, partition, next_offset)

    def _topics_changed(self) -> None:
        self._table.topics_changed()
        self._offsets.topics_changed()

    # For administrators

    async def move(self, group_id: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commits offsets of a topic, by partition, for a group without members; ConflictError while it has some."""
        if self._offsets.refusal(group_id) is not None:
            raise ServerUnavailableError("the offsets of groups are still being read", hint="Try again in a moment")
        if self._table.has_members(group_id):
            raise ConflictError(
                f"the consumer group {group_id} has members, which would go on where they are",
                hint="Stop its consumers first",
            )
        now_us = self._clock.now_us()
        moved = {OffsetKey(group_id, topic, number): GroupOffset(at, -1, "", now_us) for number, at in offsets.items()}
        for error in (await self._offsets.store(moved)).values():
            raise error

    # For transactions

    def check_commit(
        self, group_id: str, member_id: str = "", generation: int = -1, instance_id: str | None = None
    ) -> ErrorCode:
        """Whether TxnOffsetCommit may commit for a group; what a client does not say is not checked."""
        refusal = self._offsets.refusal(group_id)
        if refusal is not None:
            return refusal
        return self._table.transaction_error(group_id, member_id, generation, instance_id)

    def begin_pending(self, group_id: str, producer_id: int, partitions: Iterable[TopicPartition]) -> None:
        """Offsets of a transaction wait for its end: OffsetFetch that wants stable ones has to wait, too."""
        self._offsets.begin_pending(group_id, producer_id, partitions)

    async def complete(
        self,
        group_id: str,
        producer_id: int,
        commit: bool,
        offsets: Mapping[TopicPartition, GroupOffset] | None = None,
    ) -> dict[TopicPartition, TidelogError]:
        """The transaction has ended: its offsets count, or are forgotten. Again is fine.

        Returns those that could not be stored; while there are some, all stay pending. A topic that is gone is no
        error.
        """
        failed = await self.commit_transactional(group_id, offsets) if commit and offsets else {}
        if not failed:
            self._offsets.end_pending(group_id, producer_id)
        return failed

    async def commit_transactional(
        self, group_id: str, offsets: Mapping[TopicPartition, GroupOffset]
    ) -> dict[TopicPartition, TidelogError]:
        """Writes offsets of one group, in one transaction of the metadata store where it has them."""
        changes = {OffsetKey(group_id, *place): offset for place, offset in offsets.items()}
        failed = await self._offsets.store(changes)
        return {
            (key.topic, key.partition): error
            for key, error in failed.items()
            if not isinstance(error, NotFoundError | InputError)
        }

    async def _offset_commit(self, context: RequestContext, request: Any) -> Any:
        if self._slots is None or not is_forwarded(context):
            return await self._offset_requests.commit(context, request)
        return await self._complete_forwarded(request)

    async def _complete_forwarded(self, request: Any) -> Any:
        """A transaction that another node coordinates has ended: its generation says how, its member whose it was, and
        its instance which one. What comes late is about offsets that count already, or are about to be replaced."""
        group_id, who = request.group_id, (request.group_id, int(request.member_id))
        number = int(request.group_instance_id or 0)
        is_late = number > 0 and who in self._ended and not is_after(number, self._ended[who])
        error, failed = self._offsets.refusal(group_id), dict[TopicPartition, TidelogError]()
        names = {topic.name: own_name(topic.name) for topic in request.topics}
        if error is None and not is_late:
            offsets = {
                (names[topic.name], one.partition_index): GroupOffset(
                    one.committed_offset, one.committed_leader_epoch, one.committed_metadata or "", self._clock.now_us()
                )
                for topic in request.topics
                for one in topic.partitions
            }
            is_commit = request.generation_id_or_member_epoch == 1
            failed = await self.complete(*who, is_commit, offsets)
            if not failed and number > 0:
                self._ended.pop(who, None)
                self._ended[who] = number
                while len(self._ended) > _MAX_ENDED:
                    del self._ended[next(iter(self._ended))]
        api = wire(_OFFSET_COMMIT)

        def code(place: TopicPartition) -> ErrorCode:
            return error or (error_code(failed[place]) if place in failed else ErrorCode.NONE)

        return api.OffsetCommitResponse(
            topics=[
                api.OffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=[
                        api.OffsetCommitResponsePartition(
                            one.partition_index, code((names[topic.name], one.partition_index))
                        )
                        for one in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    # Finding the coordinator

    async def _find_coordinator(self, context: RequestContext, request: Any) -> Any:
        api = wire(FIND_COORDINATOR)
        if context.version < 4:
            return api.FindCoordinatorResponse(**self._found(request.key_type, request.key))
        coordinators = []
        for key in request.coordinator_keys:
            one = api.FindCoordinatorResponseCoordinator(key=key, **self._found(request.key_type, key))
            one.error_message = one.error_message or ""
            coordinators.append(one)
        return api.FindCoordinatorResponse(coordinators=coordinators)

    def _found(self, kind: int, key: str) -> dict[str, Any]:
        """Who coordinates a group or a transactional id, in the fields of an answer."""
        is_known = kind in (_GROUP_KEY, _TRANSACTION_KEY)
        node = self._node_of(key) if is_known else None
        error, message = ErrorCode.NONE, None
        if not is_known:
            error, message = ErrorCode.INVALID_REQUEST, f"coordinators of the kind {kind} are not known"
        elif node is None:
            error, message = ErrorCode.COORDINATOR_NOT_AVAILABLE, "nobody coordinates it at the moment"
        node = node or BrokerNode(-1, "", -1)
        return {
            "node_id": node.node_id,
            "host": node.host,
            "port": node.port,
            "error_code": error,
            "error_message": message,
        }

    # The classic protocol

    async def _join_group(self, context: RequestContext, request: Any) -> Any:
        result = await self._join(context, request)
        api = wire(11)
        unnamed = None if context.version >= 7 else ""
        return api.JoinGroupResponse(
            error_code=result.error,
            generation_id=result.generation,
            protocol_type=result.protocol_type,
            protocol_name=unnamed if result.protocol_name is None else result.protocol_name,
            leader=result.leader_id,
            skip_assignment=result.skip_assignment,
            member_id=result.member_id,
            members=[api.JoinGroupResponseMember(*member) for member in result.members],
        )

    async def _join(self, context: RequestContext, request: Any) -> JoinResult:
        group_id, member_id = request.group_id, request.member_id
        refusal = self._offsets.refusal(group_id)
        if refusal is not None:
            return JoinResult(refusal, member_id)
        group = self._table.classic(group_id, is_new_member=member_id == UNKNOWN_MEMBER)
        if not isinstance(group, ClassicGroup):
            return JoinResult(group, member_id)
        rebalance_ms = request.rebalance_timeout_ms
        joining = JoinRequest(
            member_id,
            request.protocol_type,
            tuple((one.name, bytes(one.metadata)) for one in request.protocols),
            request.session_timeout_ms,
            request.session_timeout_ms if rebalance_ms < 0 else rebalance_ms,
            request.group_instance_id,
            context.client_id or "",
            context.client_host,
            requires_known_id=context.version >= 4,
            can_skip_assignment=context.version >= 9,
        )
        parked = asyncio.get_running_loop().create_future()
        self._table.changed(group_id, group.join(self._clock_ms(), parked, joining))
        result = await self._table.answer(group_id, group, parked)
        assert isinstance(result, JoinResult)
        return result

    async def _sync_group(self, context: RequestContext, request: Any) -> Any:
        result = await self._sync(context, request)
        return wire(14).SyncGroupResponse(
            error_code=result.error,
            protocol_type=result.protocol_type,
            protocol_name=result.protocol_name,
            assignment=result.assignment,
        )

    async def _sync(self, context: RequestContext, request: Any) -> SyncResult:
        group_id = request.group_id
        refusal = self._offsets.refusal(group_id)
        if refusal is not None:
            return SyncResult(refusal)
        if context.version >= 5 and None in (request.protocol_type, request.protocol_name):
            return SyncResult(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        group = self._classic_or_none(group_id)
        if group is None:
            return SyncResult(ErrorCode.UNKNOWN_MEMBER_ID)
        parked = asyncio.get_running_loop().create_future()
        replies = group.sync(
            self._clock_ms(),
            parked,
            request.member_id,
            request.generation_id,
            {one.member_id: bytes(one.assignment) for one in request.assignments},
            instance_id=request.group_instance_id,
            protocol_type=request.protocol_type,
            protocol_name=request.protocol_name,
        )
        self._table.changed(group_id, replies)
        result = await self._table.answer(group_id, group, parked)
        assert isinstance(result, SyncResult)
        return result

    def _classic_or_none(self, group_id: str) -> ClassicGroup | None:
        group = self._table.find(group_id)
        return group if isinstance(group, ClassicGroup) else None

    async def _heartbeat(self, context: RequestContext, request: Any) -> Any:
        error = self._offsets.refusal(request.group_id)
        if error is None:
            group = self._classic_or_none(request.group_id)
            error = ErrorCode.UNKNOWN_MEMBER_ID
            if group is not None:
                error = group.heartbeat(
                    self._clock_ms(), request.member_id, request.generation_id, request.group_instance_id
                )
                self._table.kept_alive(request.group_id)
        return wire(12).HeartbeatResponse(error_code=error)

    async def _leave_group(self, context: RequestContext, request: Any) -> Any:
        api = wire(13)
        refusal = self._offsets.refusal(request.group_id)
        if refusal is not None:
            return api.LeaveGroupResponse(error_code=refusal)
        if context.version < 3:
            return api.LeaveGroupResponse(error_code=await self._leave(request.group_id, request.member_id, None))
        answer, answers = api.LeaveGroupResponseMemberResponse, []
        for one in request.members:
            error = await self._leave(request.group_id, one.member_id, one.group_instance_id)
            answers.append(answer(one.member_id, one.group_instance_id, error))
        return api.LeaveGroupResponse(members=answers)

    async def _leave(self, group_id: str, member_id: str, instance_id: str | None) -> ErrorCode:
        group = self._table.find(group_id)
        if group is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if isinstance(group, ConsumerGroup):
            error, replies = group.leave(member_id, instance_id), list[Reply]()
        else:
            error, replies = group.leave(self._clock_ms(), member_id, instance_id)
        await _finished(self._table.changed(group_id, replies))
        return error

    # The new protocol

    async def _consumer_heartbeat(self, context: RequestContext, request: Any) -> Any:
        result = self._beat(context, request)
        if result.error is ErrorCode.NONE:
            await _finished(self._table.changed(request.group_id))
        api = wire(68)
        assignment = None
        if result.assignment is not None:
            one = api.ConsumerGroupHeartbeatResponseTopicPartitions
            found = by_topic(self._topics, result.assignment)
            assignment = api.ConsumerGroupHeartbeatResponseAssignment(
                [one(facts.id, partitions) for facts, partitions in found]
            )
        return api.ConsumerGroupHeartbeatResponse(
            error_code=result.error,
            error_message=result.message,
            member_id=result.member_id,
            member_epoch=result.member_epoch,
            heartbeat_interval_ms=result.heartbeat_interval_ms,
            assignment=assignment,
        )

    def _beat(self, context: RequestContext, request: Any) -> HeartbeatResult:
        problem = _wrong_heartbeat(context, request)
        if problem is not None:
            return HeartbeatResult(ErrorCode.INVALID_REQUEST, problem)
        group_id = request.group_id
        refusal = self._offsets.refusal(group_id)
        if refusal is not None:
            return HeartbeatResult(refusal, "the group id is too long, or offsets are still being loaded")
        group = self._table.consumer(group_id, is_new_member=request.member_epoch == JOIN_EPOCH)
        if not isinstance(group, ConsumerGroup):
            return HeartbeatResult(group, _NOT_OURS[group].format(group_id))
        names = request.subscribed_topic_names
        result = group.heartbeat(
            self._clock_ms(),
            HeartbeatRequest(
                request.member_id,
                request.member_epoch,
                request.instance_id,
                request.rack_id,
                request.rebalance_timeout_ms,
                None if names is None else frozenset(map(own_name, names)),
                request.subscribed_topic_regex,
                request.server_assignor,
                self._owned(request.topic_partitions),
                context.client_id or "",
                context.client_host,
            ),
        )
        if result.error is not ErrorCode.NONE:
            self._table.changed(group_id)
        return result

    def _owned(self, sent: list[Any] | None) -> frozenset[TopicPartition] | None:
        """What a member says it owns; topics that are gone do not count."""
        if sent is None:
            return None
        known = [(self._topics.find_id(bytes(one.topic_id)), one.partitions) for one in sent]
        return frozenset((str(one.name), number) for one, numbers in known if one is not None for number in numbers)

    # Expiration

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.retention_check_seconds)
            await self.expire()

    async def expire(self) -> None:
        """Deletes the offsets of groups that have had no members for `offsets_retention_seconds`, and those that a
        group with members has committed so long ago for topics that it no longer reads."""
        if self._offsets.is_loaded:
            expired = [key for group_id in list(self._offsets.groups()) for key in self._expired(group_id)]
            await self._offsets.store(dict.fromkeys(expired))

    def _expired(self, group_id: str) -> list[OffsetKey]:
        before_us = self._clock.now_us() - int(self.settings.offsets_retention_seconds * 1_000_000)
        if not self._table.has_members(group_id):
            emptied_us = self._table.emptied_us(group_id)
            if (self._started_us if emptied_us is None else emptied_us) > before_us:
                return []
            kept: frozenset[str] | None = frozenset()
        else:
            kept = self._table.subscribed(group_id)
        if kept is None or self._offsets.has_pending(group_id):
            return []
        return [
            OffsetKey(group_id, *place)
            for place, offset in self._offsets.of(group_id).items()
            if place[0] not in kept and isinstance(offset, GroupOffset) and offset.committed_us <= before_us
        ]


_NOT_OURS = {
    ErrorCode.GROUP_ID_NOT_FOUND: "Group {} has members of the classic protocol. They must leave first.",
    ErrorCode.UNKNOWN_MEMBER_ID: "The member is not known to group {}. Join again.",
    ErrorCode.NOT_COORDINATOR: "The coordinator of group {} is about to end.",
}


async def _finished(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await asyncio.shield(task)


def _wrong_heartbeat(context: RequestContext, request: Any) -> str | None:
    """What no client may send."""
    if not request.group_id:
        return "GroupId can't be empty."
    if not request.member_id and (request.member_epoch != JOIN_EPOCH or context.version >= 1):
        return "MemberId can't be empty."
    if request.member_epoch < LEAVE_STATIC_EPOCH:
        return "MemberEpoch is invalid."
    if request.instance_id == "":
        return "InstanceId can't be empty."
    if request.rack_id == "":
        return "RackId can't be empty."
    if request.member_epoch == JOIN_EPOCH and request.topic_partitions is None:
        return "TopicPartitions must be empty when (re-)joining."
    if request.member_epoch == LEAVE_STATIC_EPOCH and request.instance_id is None:
        return "InstanceId can't be null."
    return None
