"""OffsetCommit, OffsetFetch and OffsetDelete.

Invariants
- A commit is answered when it is durable. What cannot be stored is answered with its error, partition by partition.
- An offset that cannot be read is an error, never "none": a consumer would begin somewhere else.
- Topics are answered under the names that the client sent; where it sent none, under those that Kafka's tools show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tidelog.clock import Clock
from tidelog.errors import DataError, FencedError, InputError, LockedError, NotFoundError, TidelogError
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.classic import ClassicGroup
from tidelog.service.kafka.groups.committed_offsets import CommittedOffsets, TopicPartition
from tidelog.service.kafka.groups.consumer import ConsumerGroup
from tidelog.service.kafka.groups.table import CONSUMER, CoordinatorSettings, GroupTable, TopicFacts, Topics
from tidelog.service.kafka.requests import Handler, RequestContext, known_name, listed_name
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.group_offsets import GroupOffset, OffsetKey

_OFFSET_COMMIT, _OFFSET_FETCH, _OFFSET_DELETE = 8, 9, 47
_Verdict = GroupOffset | None | ErrorCode
"""What is to be stored for a partition (None: nothing any more), or why not."""
_Row = tuple[int, int, int, str, ErrorCode]
"""Partition, offset, leader epoch, text, error: in the order of the answer's fields."""
_CODES: tuple[tuple[type[TidelogError], ErrorCode], ...] = (
    (NotFoundError, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    (InputError, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    (FencedError, ErrorCode.NOT_COORDINATOR),
    (LockedError, ErrorCode.NOT_COORDINATOR),
)


class OffsetRequests:
    """Answers requests for committed offsets."""

    def __init__(
        self,
        table: GroupTable,
        offsets: CommittedOffsets,
        topics: Topics,
        settings: CoordinatorSettings,
        clock: Clock,
    ) -> None:
        self._table = table
        self._offsets = offsets
        self._topics = topics
        self._settings = settings
        self._clock = clock

    def handlers(self) -> dict[int, Handler]:
        """By API key."""
        return {_OFFSET_COMMIT: self.commit, _OFFSET_FETCH: self._fetch, _OFFSET_DELETE: self._delete}

    # Changing

    async def commit(self, context: RequestContext, request: Any) -> Any:
        group_id = request.group_id
        error = self._offsets.refusal(group_id)
        if error is None:
            generation, instance_id = request.generation_id_or_member_epoch, request.group_instance_id
            error = self._table.commit_error(
                group_id, request.member_id, generation, instance_id, version=context.version
            )
            self._table.kept_alive(group_id)
        found = await self._change(group_id, request.topics, lambda _, sent: error or self._offset(sent))
        api = wire(_OFFSET_COMMIT)
        topic, partition = api.OffsetCommitResponseTopic, api.OffsetCommitResponsePartition
        return api.OffsetCommitResponse(
            topics=[topic(name=name, partitions=[partition(*row) for row in rows]) for name, rows in found]
        )

    def _offset(self, sent: Any) -> _Verdict:
        metadata = sent.committed_metadata or ""
        if len(metadata.encode()) > self._settings.max_metadata_bytes:
            return ErrorCode.OFFSET_METADATA_TOO_LARGE
        if sent.committed_offset < 0:
            return None  # as good as none: that is what it is answered as
        leader_epoch = max(-1, sent.committed_leader_epoch)
        return GroupOffset(sent.committed_offset, leader_epoch, metadata, self._clock.now_us())

    async def _delete(self, context: RequestContext, request: Any) -> Any:
        api = wire(_OFFSET_DELETE)
        group_id = request.group_id
        error = self._offsets.refusal(group_id) or self._delete_error(group_id)
        if error is not None:
            return api.OffsetDeleteResponse(error_code=error)
        subscribed = self._table.subscribed(group_id)

        def verdict(facts: TopicFacts, _: Any) -> _Verdict:
            is_read = subscribed is None or str(facts.name) in subscribed
            return ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if is_read else None

        found = await self._change(group_id, request.topics, verdict)
        topic, partition = api.OffsetDeleteResponseTopic, api.OffsetDeleteResponsePartition
        return api.OffsetDeleteResponse(
            topics=[topic(name=name, partitions=[partition(*row) for row in rows]) for name, rows in found]
        )

    def _delete_error(self, group_id: str) -> ErrorCode | None:
        group = self._table.find(group_id)
        if group is None and not self._offsets.has(group_id):
            return ErrorCode.GROUP_ID_NOT_FOUND
        is_other = isinstance(group, ClassicGroup) and group.protocol_type != CONSUMER
        return ErrorCode.NON_EMPTY_GROUP if is_other and self._table.has_members(group_id) else None

    async def _change(
        self, group_id: str, topics: Iterable[Any], verdict: Callable[[TopicFacts, Any], _Verdict]
    ) -> list[tuple[str, list[tuple[int, ErrorCode]]]]:
        """Stores what the verdict says of each partition that exists; returns an error code for each that was sent."""
        changes: dict[OffsetKey, GroupOffset | None] = {}
        asked: list[tuple[str, list[tuple[int, ErrorCode | OffsetKey]]]] = []
        for topic in topics:
            rows: list[tuple[int, ErrorCode | OffsetKey]] = []
            facts = self._facts(topic.name)
            for sent in topic.partitions:
                number = sent.partition_index
                if facts is None or not 0 <= number < facts.count:
                    rows.append((number, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
                    continue
                found = verdict(facts, sent)
                key = OffsetKey(group_id, str(facts.name), number)
                if not isinstance(found, ErrorCode):
                    changes[key] = found
                rows.append((number, found if isinstance(found, ErrorCode) else key))
            asked.append((topic.name, rows))
        failed = {key: error_code(error) for key, error in (await self._offsets.store(changes)).items()}

        def code(one: ErrorCode | OffsetKey) -> ErrorCode:
            return one if isinstance(one, ErrorCode) else failed.get(one, ErrorCode.NONE)

        return [(name, [(number, code(one)) for number, one in rows]) for name, rows in asked]

    def _facts(self, sent: str) -> TopicFacts | None:
        name = known_name(sent)
        return None if name is None else self._topics.find(name)

    # Looking

    async def _fetch(self, context: RequestContext, request: Any) -> Any:
        if context.version >= 8:
            return self._fetch_groups(request)
        api = wire(_OFFSET_FETCH)
        error = self._offsets.refusal(request.group_id)
        if error is not None and context.version >= 2:
            return api.OffsetFetchResponse(error_code=error)
        found = self._fetched(request.group_id, request.topics, request.require_stable)
        if error is not None:  # version 1 has it at each partition
            found = [(name, [(row[0], -1, -1, "", error) for row in rows]) for name, rows in found]
        topic, partition = api.OffsetFetchResponseTopic, api.OffsetFetchResponsePartition
        return api.OffsetFetchResponse(
            topics=[topic(name=name, partitions=[partition(*row) for row in rows]) for name, rows in found]
        )

    def _fetch_groups(self, request: Any) -> Any:
        api = wire(_OFFSET_FETCH)
        topic, partition = api.OffsetFetchResponseTopics, api.OffsetFetchResponsePartitions
        groups = []
        for one in request.groups:
            error = self._offsets.refusal(one.group_id) or self._fetch_error(one)
            found = [] if error else self._fetched(one.group_id, one.topics, request.require_stable)
            topics = [topic(name=name, partitions=[partition(*row) for row in rows]) for name, rows in found]
            groups.append(api.OffsetFetchResponseGroup(one.group_id, topics, error))
        return api.OffsetFetchResponse(groups=groups)

    def _fetch_error(self, asked: Any) -> ErrorCode:
        """A member of the new protocol says who it is, and learns that it is no longer."""
        group = self._table.find(asked.group_id)
        if isinstance(group, ConsumerGroup) and (asked.member_id is not None or asked.member_epoch >= 0):
            return group.commit_error(asked.member_id or "", asked.member_epoch)
        return ErrorCode.NONE

    def _fetched(
        self, group_id: str, topics: list[Any] | None, is_stable_required: bool
    ) -> list[tuple[str, list[_Row]]]:
        if topics is not None:
            wanted = [(one.name, own_name(one.name), one.partition_indexes) for one in topics]
        else:
            by_topic: dict[str, list[int]] = {}
            for topic, partition in sorted(self._offsets.of(group_id)):
                by_topic.setdefault(topic, []).append(partition)
            wanted = [(listed_name(parse_topic_name(topic)), topic, numbers) for topic, numbers in by_topic.items()]
        return [
            (shown, [self._row(group_id, (topic, number), is_stable_required) for number in numbers])
            for shown, topic, numbers in wanted
        ]

    def _row(self, group_id: str, place: TopicPartition, is_stable_required: bool) -> _Row:
        if is_stable_required and self._offsets.is_pending(group_id, place):
            return place[1], -1, -1, "", ErrorCode.UNSTABLE_OFFSET_COMMIT
        found = self._offsets.of(group_id).get(place)
        if found is None:
            return place[1], -1, -1, "", ErrorCode.NONE
        if isinstance(found, DataError):
            return place[1], -1, -1, "", ErrorCode.UNKNOWN_SERVER_ERROR
        return place[1], found.offset, found.leader_epoch, found.metadata, ErrorCode.NONE


def own_name(sent: str) -> str:
    """The name of a topic as it is known here; what no topic can be called stays as it is."""
    name = known_name(sent)
    return sent if name is None else str(name)


def error_code(error: TidelogError) -> ErrorCode:
    """Why an offset was not stored. What is not the client's doing is tried again by it."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.COORDINATOR_NOT_AVAILABLE)
