"""Share groups (KIP-932): consumers of a group share the messages of a partition, and settle each by itself.

A share group is a subscription of the kind "shared" with the group's name, one in each partition: what was delivered,
acknowledged and given up lives there, is stored with the topic, and shows in `tidelog sub list`.

    acquire    a message is delivered to one member, for `lock_seconds`     receive
    accept     it is done with                                              ack
    release    it may be delivered again                                    nack without a pause
    reject     it is never delivered again                                  ack
    otherwise  the lock ends: it is delivered again, up to `max_deliveries` times, then it becomes a dead letter

Invariants
- A member has one session: its partitions, and an epoch that every request raises by one. A request with another epoch
  is refused, so no answer is taken for that of another request.
- Nobody is answered with a message that a kill of this process could take back, as with Fetch.
- A member that leaves, closes its session or falls silent gives back what it has not settled.
- Deliveries are at least once: what was accepted shortly before a crash may be delivered again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tidelog.errors import InputError, TidelogError
from tidelog.service.kafka.broker import Broker, ServedTopic, error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.group_configs import GroupConfigs
from tidelog.service.kafka.groups.share_members import LEAVE_EPOCH, ShareGroup, ShareGroupSettings
from tidelog.service.kafka.partitions import Partition
from tidelog.service.kafka.primitives import Buffer
from tidelog.service.kafka.requests import Handler, RequestContext, known_name, listed_name
from tidelog.service.kafka.slots import Slots
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.subscription.subscription import Part, receive_from_any_async

HEARTBEAT, DESCRIBE, SHARE_FETCH, ACKNOWLEDGE = 76, 77, 78, 79
_OPEN_EPOCH, _CLOSE_EPOCH = 0, -1
_MAX_EPOCH = (1 << 31) - 1
_GAP, _ACCEPT, _RELEASE, _REJECT = range(4)
_MAX_RECORDS = 2000
_LOCK_SECONDS = 30.0
_MAX_DELIVERIES = 5
_CHECK_SECONDS = 1.0
_SESSION_IDLE_MS = 60_000  # of one that is no member of its group

TopicPartition = tuple[bytes, int]


class _Session:
    """What a member fetches from: its consumers by topic id and partition."""

    def __init__(self) -> None:
        self.epoch = _OPEN_EPOCH
        self.consumers: dict[TopicPartition, tuple[Partition, Consumer]] = {}
        self.turn: deque[TopicPartition] = deque()
        self.used_ms = 0

    def add(self, key: TopicPartition, partition: Partition, consumer: Consumer) -> None:
        self.consumers[key] = partition, consumer
        self.turn.append(key)

    def drop(self, key: TopicPartition) -> None:
        found = self.consumers.pop(key, None)
        if found is not None:
            self.turn.remove(key)
            with contextlib.suppress(TidelogError):
                found[1].close()

    def close(self) -> None:
        for key in list(self.consumers):
            self.drop(key)

    def in_turn(self) -> list[TopicPartition]:
        """Another partition is the first each time, so that a busy one does not starve the others."""
        self.turn.rotate(-1)
        return list(self.turn)


class _Answers:
    """The parts of an answer, by partition; one is made when there is something to say about it."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._found: dict[TopicPartition, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def of(self, key: TopicPartition) -> Any:
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._make(partition_index=key[1], records=[])
        return found

    def by_topic(self, make: Callable[..., Any]) -> list[Any]:
        topics: dict[bytes, list[Any]] = {}
        for (topic_id, _), answer in self._found.items():
            topics.setdefault(topic_id, []).append(answer)
        return [make(topic_id=topic_id, partitions=partitions) for topic_id, partitions in topics.items()]


class ShareGroups:
    """All share groups of a broker. `start` it before the first request."""

    def __init__(
        self,
        broker: Broker,
        configs: GroupConfigs,
        settings: ShareGroupSettings | None = None,
        slots: Slots | None = None,
    ) -> None:
        """`slots` are those whose groups have their members here, where several nodes share the groups."""
        self._slots = slots
        self._broker = broker
        self._configs = configs
        self._settings = settings or ShareGroupSettings()
        self._groups: dict[str, ShareGroup] = {}
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._upkeep: asyncio.Task[None] | None = None

    def handlers(self) -> dict[int, Handler]:
        return {
            HEARTBEAT: self.heartbeat,
            DESCRIBE: self.describe,
            SHARE_FETCH: self.fetch,
            ACKNOWLEDGE: self.acknowledge,
        }

    async def start(self) -> None:
        """From here on silent members are removed."""
        self._broker.on_change(self._topics_changed)
        self._upkeep = asyncio.create_task(self._expire())

    async def stop(self) -> None:
        """Members give back what they have."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        sessions, self._sessions = list(self._sessions.values()), {}

        def close_all() -> None:
            for session in sessions:
                session.close()

        await in_store_thread(close_all)

    def _topics_changed(self) -> None:
        counts = {str(served.name): served.count for served in self._broker.topics()}
        for group in self._groups.values():
            group.set_topics(counts)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now_ms = self._now_ms()
            for group_id, group in list(self._groups.items()):
                for member_id in group.expire(now_ms):
                    self._end_session(group_id, member_id)
                if not group.members:
                    del self._groups[group_id]
            for key, session in list(self._sessions.items()):
                if not self._is_member(*key) and now_ms - session.used_ms > _SESSION_IDLE_MS:
                    self._end_session(*key)

    def _is_member(self, group_id: str, member_id: str) -> bool:
        group = self._groups.get(group_id)
        return group is not None and member_id in group.members

    def _now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    def _end_session(self, group_id: str, member_id: str) -> None:
        session = self._sessions.pop((group_id, member_id), None)
        if session is not None:
            session.close()

    # Membership

    async def heartbeat(self, context: RequestContext, request: Any) -> Any:
        module = wire(HEARTBEAT)
        if not request.group_id:
            return module.ShareGroupHeartbeatResponse(error_code=ErrorCode.INVALID_GROUP_ID)
        if self._slots is not None and (refusal := self._slots.refusal(request.group_id)) is not None:
            self._groups.pop(request.group_id, None)
            return module.ShareGroupHeartbeatResponse(error_code=refusal, member_id=request.member_id)
        group = self._groups.get(request.group_id)
        if group is None:
            group = self._groups[request.group_id] = ShareGroup(self._settings)
            self._topics_changed()
        error = group.heartbeat(
            self._now_ms(),
            request.member_id,
            request.member_epoch,
            _own_names(request.subscribed_topic_names),
            client_id=context.client_id or "",
            client_host=context.client_host,
        )
        if error is not ErrorCode.NONE:
            return module.ShareGroupHeartbeatResponse(error_code=error, member_id=request.member_id)
        answer = module.ShareGroupHeartbeatResponse(
            member_id=request.member_id,
            member_epoch=group.epoch,
            heartbeat_interval_ms=self._settings.heartbeat_interval_ms,
        )
        if request.member_epoch == LEAVE_EPOCH:
            answer.member_epoch = LEAVE_EPOCH
            self._end_session(request.group_id, request.member_id)
        elif request.member_epoch != group.epoch:
            answer.assignment = module.ShareGroupHeartbeatResponseAssignment(
                topic_partitions=[
                    module.ShareGroupHeartbeatResponseTopicPartitions(topic_id=served.id, partitions=partitions)
                    for served, partitions in self._assigned(group, request.member_id)
                ]
            )
        return answer

    def _assigned(self, group: ShareGroup, member_id: str) -> list[tuple[ServedTopic, list[int]]]:
        found = []
        for name, partitions in group.assignment(member_id).items():
            served = self._broker.find(parse_topic_name(name))
            if served is not None:
                found.append((served, partitions))
        return found

    async def describe(self, context: RequestContext, request: Any) -> Any:
        module = wire(DESCRIBE)
        described = []
        for group_id in request.group_ids:
            group = self._groups.get(group_id)
            if group is None:
                missing = ErrorCode.GROUP_ID_NOT_FOUND
                described.append(
                    module.ShareGroupDescribeResponseDescribedGroup(
                        error_code=missing, group_id=group_id, group_state="Dead"
                    )
                )
                continue
            described.append(
                module.ShareGroupDescribeResponseDescribedGroup(
                    group_id=group_id,
                    group_state=group.state,
                    group_epoch=group.epoch,
                    assignment_epoch=group.epoch,
                    assignor_name="simple",
                    members=[self._described(group, member_id) for member_id in group.members],
                )
            )
        return module.ShareGroupDescribeResponse(groups=described)

    def _described(self, group: ShareGroup, member_id: str) -> Any:
        module, member = wire(DESCRIBE), group.members[member_id]
        return module.ShareGroupDescribeResponseMember(
            member_id=member_id,
            member_epoch=group.epoch,
            client_id=member.client_id,
            client_host=member.client_host,
            subscribed_topic_names=[listed_name(parse_topic_name(name)) for name in sorted(member.topics)],
            assignment=module.ShareGroupDescribeResponseAssignment(
                topic_partitions=[
                    module.ShareGroupDescribeResponseTopicPartitions(
                        topic_id=served.id, topic_name=listed_name(served.name), partitions=partitions
                    )
                    for served, partitions in self._assigned(group, member_id)
                ]
            ),
        )

    # Sessions

    def _session(self, request: Any) -> _Session | ErrorCode:
        """The session of a request, whose epoch is checked; a request with epoch 0 opens a new one."""
        if not request.group_id or not request.member_id:
            return ErrorCode.INVALID_REQUEST
        key = request.group_id, request.member_id
        if request.share_session_epoch == _OPEN_EPOCH:
            self._end_session(*key)
            session = self._sessions[key] = _Session()
        else:
            known = self._sessions.get(key)
            if known is None:
                return ErrorCode.SHARE_SESSION_NOT_FOUND
            if request.share_session_epoch not in (known.epoch, _CLOSE_EPOCH):
                return ErrorCode.INVALID_SHARE_SESSION_EPOCH
            session = known
        session.used_ms = self._now_ms()
        session.epoch = 1 if session.epoch == _MAX_EPOCH else session.epoch + 1
        return session

    async def _joined(self, session: _Session, request: Any, topic_id: bytes, number: int) -> ErrorCode:
        """Adds a partition to a session, unless it is there."""
        if (topic_id, number) in session.consumers:
            return ErrorCode.NONE
        served = self._broker.find_id(topic_id)
        if served is None:
            return ErrorCode.UNKNOWN_TOPIC_ID
        try:
            partition = await self._broker.partition(served, number)
            consumer = await in_store_thread(
                lambda: partition.topic.subscribe(
                    request.group_id,
                    kind="shared",
                    start=self._configs.share_start(request.group_id),
                    consumer=request.member_id,
                    ack_timeout_seconds=_LOCK_SECONDS,
                    max_deliveries=_MAX_DELIVERIES,
                    max_unacked=_MAX_RECORDS,
                )
            )
        except TidelogError as error:
            return error_code(error)
        session.add((topic_id, number), partition, consumer)
        return ErrorCode.NONE

    # Fetching

    async def fetch(self, context: RequestContext, request: Any) -> Any:
        module = wire(SHARE_FETCH)
        session = self._session(request)
        if isinstance(session, ErrorCode):
            return module.ShareFetchResponse(error_code=session)
        answers = _Answers(module.ShareFetchResponsePartitionData)
        await self._prepare(session, request, answers)
        if request.share_session_epoch == _CLOSE_EPOCH:
            self._end_session(request.group_id, request.member_id)
        elif session.consumers:
            await self._acquire(session, request, answers)
        return module.ShareFetchResponse(
            acquisition_lock_timeout_ms=int(_LOCK_SECONDS * 1000),
            responses=answers.by_topic(module.ShareFetchResponseShareFetchableTopicResponse),
        )

    async def _prepare(self, session: _Session, request: Any, answers: _Answers) -> None:
        """Adds and forgets partitions, and carries out the acknowledgements that come along."""
        for topic in request.topics:
            for asked in topic.partitions:
                key = topic.topic_id, asked.partition_index
                error = await self._joined(session, request, *key)
                if error is not ErrorCode.NONE:
                    answers.of(key).error_code = error
                elif asked.acknowledgement_batches:
                    answers.of(key).acknowledge_error_code = _settle(session, key, asked.acknowledgement_batches)
        for topic in request.forgotten_topics_data:
            for number in topic.partitions:
                session.drop((topic.topic_id, number))

    async def _acquire(self, session: _Session, request: Any, answers: _Answers) -> None:
        """Takes messages of the first partition that has some; waits for them, unless there is something to answer."""
        wait_seconds = 0.0 if answers else request.max_wait_ms / 1000
        keys = session.in_turn()
        parts = [_part(session.consumers[key][1]) for key in keys]
        limit = max(1, min(request.max_records or _MAX_RECORDS, _MAX_RECORDS))
        try:
            taken = await receive_from_any_async(parts, limit, wait_seconds)
        except TidelogError as error:
            for key in keys:  # closed, deleted or taken over: the client asks for metadata, and comes back
                answers.of(key).error_code = error_code(error)
                session.drop(key)
            return
        if not taken:
            return
        key = next(key for key in keys if _has(session.consumers[key][1], taken[0]))
        data = answers.of(key)
        partition = session.consumers[key][0]
        data.records = await _batches(partition, taken, self._broker.settings.max_fetch_bytes)
        acquired = wire(SHARE_FETCH).ShareFetchResponseAcquiredRecords
        data.acquired_records = [acquired(*run) for run in _runs(taken)]

    async def acknowledge(self, context: RequestContext, request: Any) -> Any:
        module = wire(ACKNOWLEDGE)
        session = self._session(request) if request.share_session_epoch != _OPEN_EPOCH else None
        if session is None or isinstance(session, ErrorCode):
            return module.ShareAcknowledgeResponse(error_code=session or ErrorCode.INVALID_SHARE_SESSION_EPOCH)
        topics = []
        for topic in request.topics:
            partitions = [
                module.ShareAcknowledgeResponsePartitionData(
                    partition_index=asked.partition_index,
                    error_code=_settle(session, (topic.topic_id, asked.partition_index), asked.acknowledgement_batches),
                )
                for asked in topic.partitions
            ]
            topics.append(module.ShareAcknowledgeResponseTopicResponse(topic_id=topic.topic_id, partitions=partitions))
        if request.share_session_epoch == _CLOSE_EPOCH:
            self._end_session(request.group_id, request.member_id)
        return module.ShareAcknowledgeResponse(responses=topics)


def _own_names(sent: Sequence[str] | None) -> list[str] | None:
    """Topics as tidelog names them; what no topic can be called is passed over."""
    if sent is None:
        return None
    return [str(name) for name in map(known_name, sent) if name is not None]


def _part(consumer: Consumer) -> Part:
    return Part(consumer._subscription, consumer._holder)


def _has(consumer: Consumer, delivery: Delivery) -> bool:
    """Whether a delivery came from here: it is the one that holds it."""
    return consumer._holder.unacked.get(delivery.offset) is delivery


def _runs(taken: Iterable[Delivery]) -> list[tuple[int, int, int]]:
    """Consecutive offsets that were delivered equally often, as (first, last, count)."""
    runs: list[tuple[int, int, int]] = []
    for delivery in sorted(taken, key=lambda one: one.offset):
        if runs and runs[-1][1] == delivery.offset - 1 and runs[-1][2] == delivery.delivery_count:
            runs[-1] = runs[-1][0], delivery.offset, delivery.delivery_count
        else:
            runs.append((delivery.offset, delivery.offset, delivery.delivery_count))
    return runs


async def _batches(partition: Partition, taken: Sequence[Delivery], max_bytes: int) -> list[Buffer]:
    """The batches that hold these messages."""
    offsets = sorted(delivery.offset for delivery in taken)
    await partition.until_in_files(offsets[-1] + 1)
    found: list[Buffer] = []
    at = 0
    while at < len(offsets):
        last = at
        while last + 1 < len(offsets) and offsets[last + 1] == offsets[last] + 1:
            last += 1
        offset = offsets[at]
        while offset <= offsets[last]:
            fetched = await partition.reader.read(offset, offsets[last] + 1, max_bytes)
            if fetched.next_offset == offset:
                break
            found.append(fetched.records)
            offset = fetched.next_offset
        at = last + 1
    return found


def _settle(session: _Session, key: TopicPartition, batches: Iterable[Any]) -> ErrorCode:
    """Carries out acknowledgements, in their order."""
    found = session.consumers.get(key)
    if found is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    consumer = found[1]
    try:
        for batch in batches:
            count, kinds = batch.last_offset - batch.first_offset + 1, batch.acknowledge_types
            if not 0 < count <= _MAX_RECORDS or len(kinds) not in (1, count) or not set(kinds) <= {0, 1, 2, 3}:
                return ErrorCode.INVALID_REQUEST
            for index in range(count):
                kind, offset = kinds[index if len(kinds) > 1 else 0], batch.first_offset + index
                if kind == _RELEASE:
                    consumer.nack(offset, delay=0)
                else:
                    consumer.ack(offset)
    except InputError:
        return ErrorCode.INVALID_RECORD_STATE
    except TidelogError as error:
        return error_code(error)
    return ErrorCode.NONE
