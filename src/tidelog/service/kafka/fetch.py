"""Fetch: messages from memory, files and the store, and the wait for new ones.

Invariants
- The event loop waits for nothing: what is not in memory is read in threads. A slow store delays only those who ask for
  what is there.
- An answer has at least one batch of the first partition that has any, however small the limits; beyond that the limits
  of the request hold.
- A consumer gets nothing at or above the high watermark; one that reads committed messages nothing at or above the last
  stable offset, and the aborted transactions below it.
- An answer with an error has empty records, not null: librdkafka takes null for damage, does not see the error, and
  asks again at once, for ever.
- A consumer that is far behind is sent to another node, which reads the store for it (`history.py`).
- With a session (`fetch_sessions.py`) a request reads all partitions of the session, and is answered with what is new.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidelog.errors import ClosedError, OffsetOutOfRangeError, TidelogError
from tidelog.service.kafka.broker import Broker, ServedTopic, error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.fetch_sessions import FetchSessions
from tidelog.service.kafka.history import History
from tidelog.service.kafka.partition_reader import PartitionReader
from tidelog.service.kafka.partitions import Partition
from tidelog.service.kafka.primitives import Buffer
from tidelog.service.kafka.requests import RequestContext, known_name
from tidelog.service.kafka.stored_partitions import StoredPartition
from tidelog.service.placement import NotOwnerError
from tidelog.topics.names import TopicName

FETCH = 1
_READ_COMMITTED = 1
_MIN_READ_BYTES = 1


class _Wanted(NamedTuple):
    """A partition of the request, and its part of the answer."""

    asked: Any
    answer: Any
    partition: Partition | None
    stored: StoredPartition | None = None
    """One of another node, of which the store has what is asked."""
    topic: TopicName | None = None


class _Consumer(NamedTuple):
    """Who asks, and what it is to see."""

    context: RequestContext
    rack: str
    is_committed: bool


class Fetch:
    """Handles Fetch."""

    def __init__(self, broker: Broker, history: History) -> None:
        self._broker = broker
        self._history = history
        self._module = wire(FETCH)
        self._sessions = FetchSessions(time.monotonic)

    async def handle(self, context: RequestContext, request: Any) -> Any:
        session = self._sessions.begin(context.principal, request)
        if isinstance(session, ErrorCode):
            return self._module.FetchResponse(error_code=session)
        if session is None:
            response = await self._fetched(
                context, request, [(topic.topic, topic.partitions) for topic in request.topics]
            )
            made = self._sessions.make(context.principal, request)
            if made is not None:
                response.session_id = made.id
                response.responses = made.answered(response.responses, is_full=True)
            return response
        session.is_in_use = True
        try:
            response = await self._fetched(context, request, session.asked())
        finally:
            session.is_in_use = False
        response.session_id = session.id
        response.responses = session.answered(response.responses, is_full=False)
        return response

    async def _fetched(self, context: RequestContext, request: Any, asked: Sequence[tuple[str, Sequence[Any]]]) -> Any:
        """The whole answer for these partitions, once there is enough of it or the time is up."""
        topics, wanted = await self._resolved(context, asked)
        response = self._module.FetchResponse(responses=topics)
        max_bytes = min(request.max_bytes, self._broker.settings.max_fetch_bytes)
        consumer = _Consumer(context, request.rack_id, request.isolation_level == _READ_COMMITTED)
        deadline = asyncio.get_running_loop().time() + request.max_wait_ms / 1000
        while True:
            size = await self._read(wanted, max_bytes, consumer)
            has_news = any(
                one.answer.error_code or one.answer.preferred_read_replica >= 0 or one.stored is not None
                for one in wanted
            )
            if size >= request.min_bytes or has_news or not wanted:
                return response
            if not await self._news(wanted, deadline):
                return response

    async def _resolved(
        self, context: RequestContext, asked_topics: Sequence[tuple[str, Sequence[Any]]]
    ) -> tuple[list[Any], list[_Wanted]]:
        module, topics, wanted = self._module, [], []
        for sent, partitions in asked_topics:
            name = known_name(sent)
            served = None if name is None else self._broker.find(name)
            answers = []
            for asked in partitions:
                answer = module.FetchResponsePartitionData(
                    partition_index=asked.partition, high_watermark=-1, aborted_transactions=None, records=[]
                )
                partition = stored = None
                if served is None:
                    answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                else:
                    partition = self._broker.opened(served, asked.partition)
                    if partition is None:
                        stored = await self._history.stored(context, served, asked.partition, asked.fetch_offset)
                    if partition is None and stored is None:
                        partition = await self._opened(context, served, asked.partition, answer)
                if partition is not None:
                    answer.error_code = epoch_error(partition, asked.current_leader_epoch)
                answers.append(answer)
                wanted.append(_Wanted(asked, answer, partition, stored, name))
            topics.append(module.FetchResponseFetchableTopicResponse(topic=sent, partitions=answers))
        return topics, wanted

    async def _opened(self, context: RequestContext, served: ServedTopic, number: int, answer: Any) -> Partition | None:
        """A partition that has to be opened first; else the answer says why not, or where it is."""
        try:
            return await self._broker.partition(served, number)
        except NotOwnerError as error:
            if self._history.was_given(context, served.name, number):
                self._history.send_to_owner(answer, served.name, number)
            else:
                answer.error_code = error_code(error)
        except TidelogError as error:
            answer.error_code = error_code(error)
        return None

    async def _read(self, wanted: list[_Wanted], max_bytes: int, consumer: _Consumer) -> int:
        """Fills in the answers as far as there is something; returns how many bytes they have."""
        size = 0
        for asked, answer, partition, stored, topic in wanted:
            if answer.error_code:
                continue
            limit, is_first = min(asked.partition_max_bytes, max_bytes - size), size == 0
            if stored is not None and topic is not None and (limit > 0 or is_first):
                size += await self._read_stored(asked, answer, topic, stored, limit, consumer)
            if partition is None:
                continue
            try:
                size += await self._read_one(asked, answer, partition, limit, is_first, consumer)
            except TidelogError as error:
                answer.error_code = error_code(error)
                answer.records = []  # librdkafka takes null for a broken answer
        return size

    async def _read_one(
        self, asked: Any, answer: Any, partition: Partition, limit: int, is_first: bool, consumer: _Consumer
    ) -> int:
        if not partition.is_open:
            raise ClosedError(f"{partition.name}, partition {partition.number}, is closed here")
        offset, high = asked.fetch_offset, partition.high_watermark
        stable = min(high, partition.last_stable_offset)
        answer.high_watermark, answer.last_stable_offset = high, stable
        answer.log_start_offset = partition.start_offset
        # Beyond the high watermark, and in the log: a new owner has recovered it, and the store has yet to confirm it.
        # Out of range, a consumer would begin again at its beginning.
        if not answer.log_start_offset <= offset <= max(high, partition.topic.next_offset):
            raise OffsetOutOfRangeError(f"offset {offset} is not in the partition")
        stop = stable if consumer.is_committed else high
        answer.records, answer.aborted_transactions = [], [] if consumer.is_committed else None
        if offset >= stop or (limit <= 0 and not is_first):
            return 0
        elsewhere = self._history.node_for(consumer.context, consumer.rack, partition, offset, stop)
        if elsewhere is not None:
            answer.preferred_read_replica = elsewhere
            return 0
        answer.records, size, reached = await self._gather(partition.reader, offset, stop, limit)
        if consumer.is_committed:
            found = partition.producers.aborted(offset, reached)
            aborted = self._module.FetchResponseAbortedTransaction
            answer.aborted_transactions = [aborted(one.producer_id, one.first_offset) for one in found]
        return size

    async def _read_stored(
        self, asked: Any, answer: Any, topic: TopicName, stored: StoredPartition, limit: int, consumer: _Consumer
    ) -> int:
        """The same for a partition of another node."""
        answer.high_watermark = answer.last_stable_offset = stored.end_offset
        answer.log_start_offset = stored.start_offset
        answer.aborted_transactions = [] if consumer.is_committed else None
        wanted = max(limit, _MIN_READ_BYTES)
        found = await self._history.read(stored, asked.fetch_offset, wanted, is_committed=consumer.is_committed)
        if found is None:
            self._history.send_to_owner(answer, topic, asked.partition)
            return 0
        answer.records = [found.records]
        return len(found.records)

    async def _gather(
        self, reader: PartitionReader, offset: int, stop: int, limit: int
    ) -> tuple[list[Buffer], int, int]:
        """Batches from an offset on, their bytes, and where they end. What is in memory never waits for a disk."""
        parts: list[Buffer] = []
        size = 0
        while offset < stop and (room := limit - size) >= size // 8:  # a small rest is not worth a batch of its own
            fetched = reader.read_cached(offset, stop, max(room, _MIN_READ_BYTES))
            if fetched is None:
                if parts:
                    break
                fetched = await reader.read(offset, stop, max(room, _MIN_READ_BYTES))
            if fetched.next_offset == offset:
                break
            parts.append(fetched.records)
            size += len(fetched.records)
            offset = fetched.next_offset
        return parts, size, offset

    async def _news(self, wanted: list[_Wanted], deadline: float) -> bool:
        """Waits until a partition has more than the request has seen; False when the time is up."""
        loop = asyncio.get_running_loop()
        left = deadline - loop.time()
        if left <= 0:
            return False
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(left, _ring, waiter)
        partitions = [(one.partition, one.answer.high_watermark) for one in wanted if one.partition is not None]
        try:
            for partition, high in partitions:
                partition.listen(waiter, high)
            await waiter
        finally:
            timer.cancel()
            for partition, _ in partitions:
                partition.stop_listening(waiter)
        return loop.time() < deadline


def _ring(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def epoch_error(partition: Partition, epoch: int) -> ErrorCode:
    """Whether this is the leader, and a client's idea of its epoch that of the partition; -1: it has none."""
    if partition.is_fenced:
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    if epoch < 0 or epoch == partition.leader_epoch:
        return ErrorCode.NONE
    return ErrorCode.FENCED_LEADER_EPOCH if epoch < partition.leader_epoch else ErrorCode.UNKNOWN_LEADER_EPOCH
