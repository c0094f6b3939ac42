"""Produce: batches of clients go into the logs, and the answer waits for what the client asked for.

    acks 0     no answer
    acks 1     everything is in a file: it outlives a kill of this process
    acks -1    everything is on the disk, unless the topic has `flush.messages` above 1: then as acks 1

Invariants
- A request is appended before the next one of its connection is looked at, so a producer's batches stay in order. Only
  the wait for the disk happens beside it: requests that arrive together share one write and one sync.
- Never is anything answered that a crash could take back, beyond what the client's acks allow.
- A batch that is refused is refused alone: the other partitions of the request are appended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tidelog.errors import InputError, TidelogError
from tidelog.service.kafka.broker import Broker, error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.partitions import Appended, Partition
from tidelog.service.kafka.primitives import Buffer
from tidelog.service.kafka.records import DecodedBatch, RecordError, decode_produced
from tidelog.service.kafka.requests import RequestContext, topic_name

PRODUCE = 0
_ALL, _FILES, _NONE = -1, 1, 0
_FIRST_WITH_PRODUCER_FENCED = 9  # clients before it know only INVALID_PRODUCER_EPOCH

Verify = Callable[[int, int, str, int, int], ErrorCode]
"""Whether a batch of a producer and an epoch may be appended to a topic's partition, for a version of the request."""


class Produce:
    """Handles Produce in two steps: `begin` appends, and what it returns waits."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.verify: Verify | None = None
        """Asked before a transactional batch is appended; without it, none is."""
        self._module = wire(PRODUCE)

    async def begin(self, context: RequestContext, request: Any) -> Coroutine[Any, Any, Any]:
        """Appends what can be appended; returns the rest of the work, whose result is the answer."""
        module, acks = self._module, request.acks
        waits: list[Awaitable[None]] = []
        topics = []
        for topic in request.topic_data:
            partitions = []
            for part in topic.partition_data:
                answer = module.ProduceResponsePartitionProduceResponse(index=part.index, base_offset=-1)
                partitions.append(answer)
                if acks in (_ALL, _FILES, _NONE):
                    await self._append(context, topic.name, part, acks, answer, waits)
                else:
                    answer.error_code = ErrorCode.INVALID_REQUIRED_ACKS
            topics.append(module.ProduceResponseTopicProduceResponse(name=topic.name, partition_responses=partitions))
        response = module.ProduceResponse(responses=topics)
        return self._finish(response, waits, acks, request.timeout_ms / 1000)

    async def _append(
        self,
        context: RequestContext,
        name: str,
        part: Any,
        acks: int,
        answer: Any,
        waits: list[Awaitable[None]],
    ) -> None:
        try:
            served = await self._broker.find_or_create(topic_name(name))
            partition = await self._broker.partition(served, part.index)
            batch = self._decoded(part.records, partition)
            verify = self._verifying(context, batch, partition) if batch.header.is_transactional else None
            appended = await partition.append(batch, verify=verify)
        except TidelogError as error:
            answer.error_code = error_code(error)
            answer.error_message = error.message
            return
        answer.error_code = _code_for(context.version, appended)
        if appended.error is not ErrorCode.NONE:
            return
        answer.base_offset = appended.first_offset
        answer.log_start_offset = partition.start_offset
        if partition.append_time_us is not None:
            answer.log_append_time_ms = partition.append_time_us // 1000
        if acks == _ALL and partition.serving.syncs_all:
            waits.append(_settled(answer, partition.on_disk(appended.next_offset)))
        elif acks != _NONE and (written := partition.in_files(appended.next_offset)) is not None:
            waits.append(_settled(answer, written))

    def _verifying(self, context: RequestContext, batch: DecodedBatch, partition: Partition) -> Callable[[], ErrorCode]:
        verify, header = self.verify, batch.header
        if verify is None:
            return lambda: ErrorCode.INVALID_TXN_STATE
        who, where = (header.producer_id, header.producer_epoch), (str(partition.name), partition.number)
        return lambda: verify(*who, *where, context.version)

    def _decoded(self, records: Buffer | None, partition: Partition) -> DecodedBatch:
        if records is None:
            raise InputError("a partition of a Produce request has no records")
        if len(records) > partition.serving.max_batch_bytes:
            limit = partition.serving.max_batch_bytes
            text = f"the batch has {len(records)} bytes, and max.message.bytes of the topic is {limit}"
            raise RecordError(ErrorCode.MESSAGE_TOO_LARGE, text)
        return decode_produced(
            records,
            max_message_bytes=partition.max_message_bytes,
            append_time_us=partition.now_if_log_append_time(),
        )

    async def _finish(self, response: Any, waits: list[Awaitable[None]], acks: int, timeout_seconds: float) -> Any:
        if len(waits) == 1:
            await self._wait(response, waits[0], timeout_seconds)
        elif waits:
            await self._wait(response, asyncio.gather(*waits), timeout_seconds)
        return None if acks == _NONE else response

    async def _wait(self, response: Any, wait: Awaitable[Any], timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(max(timeout_seconds, 0.001)):
                await wait
        except TimeoutError:
            for topic in response.responses:
                for partition in topic.partition_responses:
                    if partition.error_code == ErrorCode.NONE:
                        partition.error_code = ErrorCode.REQUEST_TIMED_OUT
                        partition.base_offset = -1


async def _settled(answer: Any, wait: Awaitable[None]) -> None:
    """Waits for one partition; its failure is its own."""
    try:
        await wait
    except TidelogError as error:
        answer.error_code = error_code(error)
        answer.error_message = error.message
        answer.base_offset = -1


def _code_for(version: int, appended: Appended) -> ErrorCode:
    if appended.error is ErrorCode.PRODUCER_FENCED and version < _FIRST_WITH_PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return appended.error
