"""ListOffsets and OffsetForLeaderEpoch: where a partition begins and ends, at a time or under an owner."""

from __future__ import annotations

import functools
from typing import Any

from tidelog.errors import TidelogError
from tidelog.service.kafka.broker import Broker, error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.fetch import epoch_error
from tidelog.service.kafka.partitions import Partition
from tidelog.service.kafka.requests import Handler, RequestContext, known_name
from tidelog.store.scheduler import in_store_thread

_LIST_OFFSETS, _OFFSET_FOR_LEADER_EPOCH = 2, 23
_LATEST, _EARLIEST, _MAX_TIMESTAMP, _EARLIEST_LOCAL, _LATEST_TIERED = -1, -2, -3, -4, -5
_PLACES = (_EARLIEST, _EARLIEST_LOCAL, _LATEST_TIERED)
_READ_COMMITTED = 1
_FIRST_WITH_NOT_AVAILABLE = 5


class Offsets:
    """Answers about positions."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def handlers(self) -> dict[int, Handler]:
        return {_LIST_OFFSETS: self.list_offsets, _OFFSET_FOR_LEADER_EPOCH: self.offset_for_leader_epoch}

    async def _partition(self, sent: str, number: int) -> Partition | ErrorCode:
        name = known_name(sent)
        served = None if name is None else self._broker.find(name)
        if served is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        try:
            return await self._broker.partition(served, number)
        except TidelogError as error:
            return error_code(error)

    async def list_offsets(self, context: RequestContext, request: Any) -> Any:
        module, topics = wire(_LIST_OFFSETS), []
        is_committed = request.isolation_level == _READ_COMMITTED
        for topic in request.topics:
            answers = []
            for asked in topic.partitions:
                answer = module.ListOffsetsResponsePartitionResponse(partition_index=asked.partition_index)
                partition = await self._partition(topic.name, asked.partition_index)
                if isinstance(partition, ErrorCode):
                    answer.error_code = partition
                else:
                    answer.error_code = epoch_error(partition, asked.current_leader_epoch)
                    if answer.error_code == ErrorCode.NONE:
                        await self._place(partition, asked.timestamp, is_committed, answer)
                    if answer.error_code == ErrorCode.NONE and self._is_early(partition, asked.timestamp, answer):
                        answer.error_code = _not_available(context.version)
                        answer.offset = answer.timestamp = answer.leader_epoch = -1
                answers.append(answer)
            topics.append(module.ListOffsetsResponseTopicResponse(name=topic.name, partitions=answers))
        return module.ListOffsetsResponse(topics=topics)

    def _is_early(self, partition: Partition, timestamp: int, answer: Any) -> bool:
        """Ends never go back when the owner changes (KIP-207): the client asks again in a moment."""
        is_end = timestamp == _LATEST or (timestamp not in _PLACES and answer.offset < 0)
        return is_end and partition.may_have_shown_more

    async def _place(self, partition: Partition, timestamp: int, is_committed: bool, answer: Any) -> None:
        end = partition.last_stable_offset if is_committed else partition.high_watermark
        answer.leader_epoch = partition.leader_epoch
        if timestamp == _LATEST:
            answer.offset = end
        elif timestamp == _EARLIEST:
            answer.offset = partition.start_offset
        elif timestamp == _EARLIEST_LOCAL:
            answer.offset = partition.topic.hot_start_offset
        elif timestamp == _LATEST_TIERED:
            answer.offset = partition.topic.shipped_offset - 1
        else:
            try:
                found = await in_store_thread(lambda: partition.find_time(timestamp, end))
            except TidelogError as error:
                answer.error_code = error_code(error)
                return
            if found is None:
                answer.leader_epoch = -1
            else:
                answer.offset, answer.timestamp = found

    async def offset_for_leader_epoch(self, context: RequestContext, request: Any) -> Any:
        """The end of an owner's messages: a consumer whose position is beyond it has read what was lost since."""
        module, topics = wire(_OFFSET_FOR_LEADER_EPOCH), []
        for topic in request.topics:
            answers = []
            for asked in topic.partitions:
                answer = module.OffsetForLeaderEpochResponseEpochEndOffset(partition=asked.partition)
                partition = await self._partition(topic.topic, asked.partition)
                if isinstance(partition, ErrorCode):
                    answer.error_code = partition
                else:
                    answer.error_code = epoch_error(partition, asked.current_leader_epoch)
                    if answer.error_code == ErrorCode.NONE:
                        answer.leader_epoch, answer.end_offset = await in_store_thread(
                            functools.partial(partition.end_of_epoch, asked.leader_epoch)
                        )
                answers.append(answer)
            topics.append(
                module.OffsetForLeaderEpochResponseOffsetForLeaderTopicResult(topic=topic.topic, partitions=answers)
            )
        return module.OffsetForLeaderEpochResponse(topics=topics)


def _not_available(version: int) -> ErrorCode:
    return ErrorCode.OFFSET_NOT_AVAILABLE if version >= _FIRST_WITH_NOT_AVAILABLE else ErrorCode.LEADER_NOT_AVAILABLE
