"""Produce: batches of clients go into the logs, and the answer waits for what the client asked for.

    acks 0     no answer
    acks 1     everything is in a file: it outlives a kill of this process
    acks -1    everything is on the disk, unless the topic has `flush.messages` above 1: then as acks 1;
               with `tidelog.durability=shipped`, the store has everything

Invariants
- A request is appended before the next one of its connection is looked at, so a producer's batches stay in order. Only
  the wait for the disk happens beside it: requests that arrive together share one write and one sync.
- What can be appended at once is, without a task, a future or a timer of its own: small batches cost little else. What
  has to wait first (a partition that is not open, a full queue, a duplicate) is appended by `append_later`.
- Never is anything answered that a crash could take back, beyond what the client's acks allow.
- A batch that is refused is refused alone: the other partitions of the request are appended.
- A request is answered within its timeout, as one that timed out where the disk has not answered yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

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


class LaterAnswer:
    """An answer that is not there yet, in its place among the answers of a connection. No abstract class: asking an
    object whether it is one costs too much."""

    __slots__ = ()
    is_done: bool

    def encode(self) -> Buffer | None:
        """Its bytes once it is done; None when the client expects none."""
        raise NotImplementedError


class Timed(Protocol):
    """What is answered as timed out when its time has come."""

    @property
    def deadline(self) -> float: ...

    def time_out(self) -> None: ...


class Lookup(Protocol):
    """What `Verify` has to know of transactions that other nodes coordinate."""

    def is_known(self, producer_id: int, epoch: int, topic: str, partition: int) -> bool: ...

    async def prepare(
        self, transactional_id: str, producer_id: int, epoch: int, topic: str, partition: int
    ) -> None: ...


class PendingProduce:
    """The answer to a Produce, filled in as its partitions settle. `answered` is called when it is complete."""

    __slots__ = ("_left", "acks", "answered", "context", "deadline", "is_done", "later", "response", "transactional_id")

    def __init__(self, context: RequestContext, response: Any, acks: int, deadline: float) -> None:
        self.context = context
        self.response = response
        self.acks = acks
        self.deadline = deadline
        self.transactional_id: str | None = None
        self.later: list[tuple[str, Any, Any, DecodedBatch | None]] = []
        """Topic, part of the request, part of the answer and batch of what could not be appended at once."""
        self.is_done = False
        self.answered: Callable[[], None] | None = None
        self._left = 1

    @property
    def answer(self) -> Any:
        """None when the client expects none."""
        return None if self.acks == _NONE else self.response

    def wait_for(self) -> None:
        """One more partition has to settle."""
        self._left += 1

    def settled(self) -> None:
        """One partition less, or the request is appended as a whole."""
        self._left -= 1
        if not self._left and not self.is_done:
            self._finish()

    def time_out(self) -> None:
        """Whatever has not settled by now is answered as timed out; what it waits for may happen all the same."""
        for topic in self.response.responses:
            for partition in topic.partition_responses:
                if partition.error_code == ErrorCode.NONE:
                    partition.error_code = ErrorCode.REQUEST_TIMED_OUT
                    partition.base_offset = -1
        self._finish()

    def _finish(self) -> None:
        self.is_done = True
        if self.answered is not None:
            self.answered()


class Produce:
    """Handles Produce in two steps: `begin` appends, and what it returns is answered later."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.verify: Verify | None = None
        """Asked before a transactional batch is appended; without it, none is."""
        self.lookup: Lookup | None = None
        """Asked before `verify`, where there are other nodes."""
        self._module = wire(PRODUCE)
        self._pending: set[Timed] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        """What is due at once is no timer of uvloop, and does not know when."""

    def begin(self, context: RequestContext, request: Any) -> PendingProduce:
        """Appends what can be appended at once. While `later` has something, `append_later` is to be awaited before
        the next request of the connection is begun."""
        module, acks = self._module, request.acks
        topics: list[Any] = []
        deadline = asyncio.get_running_loop().time() + max(request.timeout_ms / 1000, 0.001)
        pending = PendingProduce(context, module.ProduceResponse(responses=topics), acks, deadline)
        pending.transactional_id = request.transactional_id
        for topic in request.topic_data:
            partitions = []
            for part in topic.partition_data:
                answer = module.ProduceResponsePartitionProduceResponse(index=part.index, base_offset=-1)
                partitions.append(answer)
                if acks not in (_ALL, _FILES, _NONE):
                    answer.error_code = ErrorCode.INVALID_REQUIRED_ACKS
                else:
                    self._append_at_once(pending, topic.name, part, answer)
            topics.append(module.ProduceResponseTopicProduceResponse(name=topic.name, partition_responses=partitions))
        if not pending.later:
            self._begun(pending)
        return pending

    async def append_later(self, pending: PendingProduce) -> None:
        """Appends what could not be appended at once."""
        for name, part, answer, batch in pending.later:
            await self._append(pending, name, part, answer, batch)
        pending.later.clear()
        self._begun(pending)

    def _begun(self, pending: PendingProduce) -> None:
        pending.settled()
        if not pending.is_done:
            self.watch(pending)

    def _append_at_once(self, pending: PendingProduce, name: str, part: Any, answer: Any) -> None:
        try:
            served = self._broker.find(topic_name(name))
            partition = None if served is None else self._broker.opened(served, part.index)
            if partition is None:
                pending.later.append((name, part, answer, None))
                return
            batch = self._decoded(part.records, partition)
            if batch.header.is_transactional and self.lookup is not None and not self._is_known(batch, partition):
                pending.later.append((name, part, answer, batch))
                return
            verify = self._verifying(pending.context, batch, partition) if batch.header.is_transactional else None
            appended = partition.append_at_once(batch, sync=partition.syncs(pending.acks == _ALL), verify=verify)
            if appended is None:
                pending.later.append((name, part, answer, batch))
            else:
                self._await_disk(pending, partition, appended, answer)
        except TidelogError as error:
            _refuse(answer, error)

    async def _append(
        self, pending: PendingProduce, name: str, part: Any, answer: Any, decoded: DecodedBatch | None
    ) -> None:
        try:
            served = await self._broker.find_or_create(topic_name(name))
            partition = await self._broker.partition(served, part.index)
            batch = decoded or self._decoded(part.records, partition)
            if batch.header.is_transactional and self.lookup is not None and not self._is_known(batch, partition):
                header, where = batch.header, (str(partition.name), partition.number)
                who = (pending.transactional_id or "", header.producer_id, header.producer_epoch)
                await self.lookup.prepare(*who, *where)
            verify = self._verifying(pending.context, batch, partition) if batch.header.is_transactional else None
            appended = await partition.append(batch, verify=verify)
            self._await_disk(pending, partition, appended, answer)
        except TidelogError as error:
            _refuse(answer, error)

    def _await_disk(self, pending: PendingProduce, partition: Partition, appended: Appended, answer: Any) -> None:
        answer.error_code = _code_for(pending.context.version, appended)
        if appended.error is not ErrorCode.NONE:
            return
        answer.base_offset = appended.first_offset
        answer.log_start_offset = partition.start_offset
        if partition.append_time_us is not None:
            answer.log_append_time_ms = partition.append_time_us // 1000
        if pending.acks == _NONE:
            return

        def settle(error: TidelogError | None) -> None:
            if error is not None and not pending.is_done:
                _refuse(answer, error)
            pending.settled()
            if pending.is_done:
                self.unwatch(pending)

        if partition.reach(pending.acks == _ALL)(appended.next_offset, settle):
            pending.wait_for()

    def _is_known(self, batch: DecodedBatch, partition: Partition) -> bool:
        assert self.lookup is not None
        header = batch.header
        where = (str(partition.name), partition.number)
        return self.lookup.is_known(header.producer_id, header.producer_epoch, *where)

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

    # Timeouts: one timer for all requests, since few are ever reached

    def watch(self, pending: Timed) -> None:
        """Calls its `time_out` when its time has come, unless `unwatch` is called first."""
        self._pending.add(pending)
        self._watch(pending.deadline)

    def unwatch(self, pending: Timed) -> None:
        self._pending.discard(pending)

    def _watch(self, deadline: float) -> None:
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_at(deadline, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for pending in [pending for pending in self._pending if pending.deadline <= now]:
            self._pending.discard(pending)
            pending.time_out()
        if self._pending:
            self._watch(min(pending.deadline for pending in self._pending))


def _refuse(answer: Any, error: TidelogError) -> None:
    answer.error_code = error_code(error)
    answer.error_message = error.message
    answer.base_offset = -1


def _code_for(version: int, appended: Appended) -> ErrorCode:
    if appended.error is ErrorCode.PRODUCER_FENCED and version < _FIRST_WITH_PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return appended.error
