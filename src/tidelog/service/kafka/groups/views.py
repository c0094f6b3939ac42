"""What administrators see of groups, and delete: DescribeGroups, ConsumerGroupDescribe, ListGroups, DeleteGroups.

Invariants
- A group that only has committed offsets is listed, as one of the classic protocol without members.
- Each of the two describing requests knows the groups of its protocol alone; Kafka's tools ask with both.
- A group with members is not deleted. With a group go its offsets, durably, before the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.classic import ClassicGroup, GroupState
from tidelog.service.kafka.groups.committed_offsets import CommittedOffsets, TopicPartition
from tidelog.service.kafka.groups.consumer import ConsumerGroup, ConsumerMember
from tidelog.service.kafka.groups.offset_requests import error_code
from tidelog.service.kafka.groups.table import CLASSIC, CONSUMER, GroupTable, TopicFacts, Topics
from tidelog.service.kafka.requests import Handler, RequestContext, known_name, listed_name
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.group_offsets import OffsetKey

_DESCRIBE_GROUPS, _LIST_GROUPS, _DELETE_GROUPS, _CONSUMER_DESCRIBE = 15, 16, 42, 69
_CONSUMER_MEMBER = 1
"""The type of a member of the new protocol."""
_ALL_OPERATIONS = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
"""Read, delete, describe, describe and alter configurations: nobody is refused here."""
_NOT_ASKED = -(1 << 31)


def by_topic(topics: Topics, places: Iterable[TopicPartition]) -> list[tuple[TopicFacts, list[int]]]:
    """Partitions by topic, in order; without topics that are gone."""
    found: dict[str, list[int]] = {}
    for topic, partition in sorted(places):
        found.setdefault(topic, []).append(partition)
    facts = [(topics.find(parse_topic_name(topic)), partitions) for topic, partitions in found.items()]
    return [(one, partitions) for one, partitions in facts if one is not None]


class GroupViews:
    """Answers requests about groups."""

    def __init__(self, table: GroupTable, offsets: CommittedOffsets, topics: Topics) -> None:
        self._table = table
        self._offsets = offsets
        self._topics = topics

    def handlers(self) -> dict[int, Handler]:
        """By API key."""
        return {
            _DESCRIBE_GROUPS: self._describe_groups,
            _LIST_GROUPS: self._list_groups,
            _DELETE_GROUPS: self._delete_groups,
            _CONSUMER_DESCRIBE: self._describe_consumer_groups,
        }

    # The classic protocol

    async def _describe_groups(self, context: RequestContext, request: Any) -> Any:
        operations = _operations(request)
        groups = [self._described(context.version, group_id, operations) for group_id in request.groups]
        return wire(_DESCRIBE_GROUPS).DescribeGroupsResponse(groups=groups)

    def _described(self, version: int, group_id: str, operations: int) -> Any:
        described = wire(_DESCRIBE_GROUPS).DescribeGroupsResponseDescribedGroup
        refusal = self._offsets.refusal(group_id)
        if refusal is not None:
            return described(error_code=refusal, group_id=group_id)
        group = self._table.find(group_id)
        if isinstance(group, ConsumerGroup) or (group is None and not self._offsets.has(group_id)):
            error = ErrorCode.NONE if version < 6 else ErrorCode.GROUP_ID_NOT_FOUND
            message = None if version < 6 else f"Group {group_id} not found."
            return described(
                error_code=error,
                error_message=message,
                group_id=group_id,
                group_state=GroupState.DEAD.value,
                authorized_operations=operations,
            )
        is_stable = group is not None and group.state is GroupState.STABLE
        return described(
            group_id=group_id,
            group_state=GroupState.EMPTY.value if group is None else group.state.value,
            protocol_type=self._table.protocol_type(group_id),
            protocol_data=(group.protocol_name or "") if group is not None and is_stable else "",
            members=[] if group is None else _members(group),
            authorized_operations=operations,
        )

    # The new protocol

    async def _describe_consumer_groups(self, context: RequestContext, request: Any) -> Any:
        operations = _operations(request)
        groups = [self._described_consumers(group_id, operations) for group_id in request.group_ids]
        return wire(_CONSUMER_DESCRIBE).ConsumerGroupDescribeResponse(groups=groups)

    def _described_consumers(self, group_id: str, operations: int) -> Any:
        described = wire(_CONSUMER_DESCRIBE).ConsumerGroupDescribeResponseDescribedGroup
        refusal = self._offsets.refusal(group_id)
        group = self._table.find(group_id)
        if refusal is not None or not isinstance(group, ConsumerGroup):
            return described(
                error_code=ErrorCode.GROUP_ID_NOT_FOUND if refusal is None else refusal,
                error_message=f"Group {group_id} is not a consumer group.",
                group_id=group_id,
            )
        return described(
            group_id=group_id,
            group_state=group.state,
            group_epoch=group.epoch,
            assignment_epoch=group.assignment_epoch,
            assignor_name=group.assignor_name(),
            members=[self._consumer_member(group, member) for member in group.members.values()],
            authorized_operations=operations,
        )

    def _consumer_member(self, group: ConsumerGroup, member: ConsumerMember) -> Any:
        return wire(_CONSUMER_DESCRIBE).ConsumerGroupDescribeResponseMember(
            member_id=member.id,
            instance_id=member.instance_id,
            rack_id=member.rack_id,
            member_epoch=member.epoch,
            client_id=member.client_id,
            client_host=member.client_host,
            subscribed_topic_names=sorted(_shown(name) for name in member.topics),
            subscribed_topic_regex=member.regex,
            assignment=self._assignment(member.assigned),
            target_assignment=self._assignment(group.target.get(member.id, ())),
            member_type=_CONSUMER_MEMBER,
        )

    def _assignment(self, places: Iterable[TopicPartition]) -> Any:
        api = wire(_CONSUMER_DESCRIBE)
        one = api.ConsumerGroupDescribeResponseTopicPartitions
        return api.ConsumerGroupDescribeResponseAssignment(
            [one(facts.id, listed_name(facts.name), partitions) for facts, partitions in by_topic(self._topics, places)]
        )

    # All groups

    async def _list_groups(self, context: RequestContext, request: Any) -> Any:
        api = wire(_LIST_GROUPS)
        if not self._offsets.is_loaded:
            return api.ListGroupsResponse(error_code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        states = {state.lower() for state in request.states_filter}
        types = {kind.lower() for kind in request.types_filter}
        listed = [self._listed(group_id) for group_id in sorted({*self._table.ids(), *self._offsets.groups()})]
        return api.ListGroupsResponse(
            groups=[
                one
                for one in listed
                if (not states or one.group_state.lower() in states) and (not types or one.group_type in types)
            ]
        )

    def _listed(self, group_id: str) -> Any:
        group = self._table.find(group_id)
        state = GroupState.EMPTY.value
        if group is not None:
            state = group.state.value if isinstance(group, ClassicGroup) else group.state
        return wire(_LIST_GROUPS).ListGroupsResponseListedGroup(
            group_id=group_id,
            protocol_type=self._table.protocol_type(group_id),
            group_state=state,
            group_type=CONSUMER if isinstance(group, ConsumerGroup) else CLASSIC,
        )

    async def _delete_groups(self, context: RequestContext, request: Any) -> Any:
        api = wire(_DELETE_GROUPS)
        result = api.DeleteGroupsResponseDeletableGroupResult
        return api.DeleteGroupsResponse(
            results=[result(one, await self._delete(one)) for one in dict.fromkeys(request.groups_names)]
        )

    async def _delete(self, group_id: str) -> ErrorCode:
        error = self._offsets.refusal(group_id) or self._table.delete(group_id)
        if error is not ErrorCode.NONE:
            return error
        changes = {OffsetKey(group_id, *place): None for place in self._offsets.of(group_id)}
        failed = await self._offsets.store(changes)
        return next(map(error_code, failed.values()), ErrorCode.NONE)


def _members(group: ClassicGroup) -> list[Any]:
    one = wire(_DESCRIBE_GROUPS).DescribeGroupsResponseDescribedGroupMember
    return [
        one(
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            member_metadata=member.metadata,
            member_assignment=member.assignment,
        )
        for member in group.members()
    ]


def _shown(topic: str) -> str:
    """A name in Kafka's form; one that no topic can have, as the client sent it."""
    name = known_name(topic)
    return topic if name is None else listed_name(name)


def _operations(request: Any) -> int:
    return _ALL_OPERATIONS if request.include_authorized_operations else _NOT_ASKED
