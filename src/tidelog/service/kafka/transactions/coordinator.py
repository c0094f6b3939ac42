"""Kafka's transaction coordinator at work: drives `state_machine.py` on the event loop, with a durable store.

    request ──> TransactionCoordinator ──> Persist ──> one write for all that wait ──> answer
                          ^                                       │
                          └──── marker_written <── markers <──────┘

Invariants
- Nothing is answered, and no marker is written, before the record that says so is durable: effects of a record come
  from `persisted`, and that is called after the write alone.
- A write whose outcome is unknown is repeated until the store answers; the transactional id is busy so long. Another
  coordinator's record is never overwritten: it replaces ours, and our clients look for their coordinator.
- In a partition or group at most one marker of a transactional id is being written. A second one that came late could
  end the transaction after the next, which has the same producer and epoch.
- A marker is tried until it is written: partitions may be unavailable for a while. One whose topic is deleted is done.
- A request that comes while its transactional id is busy waits for a moment, and gets CONCURRENT_TRANSACTIONS after
  that: clients would come back only after a pause.
- Offsets that are committed within a transaction are pending in their group until it ends, also after a restart.
- The event loop never waits for the store.
- Where several nodes share the transactional ids, this one coordinates those of its slots. Markers go to the nodes that
  own the partitions and coordinate the groups; offsets of a transaction, which clients send to the coordinator of the
  group, are passed on to that of the transaction (`Remote`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from tidelog.clock import jittered
from tidelog.errors import NotFoundError, TidelogError
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.peers import is_forwarded
from tidelog.service.kafka.records import Control
from tidelog.service.kafka.requests import Handler, RequestContext, known_name
from tidelog.service.kafka.slots import Slots
from tidelog.service.kafka.transactions.state_machine import (
    DEFAULT_EXPIRATION_MS,
    DEFAULT_MAX_TIMEOUT_MS,
    CommittedOffset,
    Effect,
    Partition,
    Persist,
    Reply,
    Token,
    TransactionCoordinator,
    TransactionRecord,
    TransactionState,
    WriteMarkers,
)
from tidelog.service.kafka.transactions.store import Superseded, is_too_large
from tidelog.service.placement import slot_of
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.subscription.group_offsets import GroupOffset

INIT_PRODUCER_ID, ADD_PARTITIONS, ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT = 22, 24, 25, 26, 28
_FENCED_SINCE = {INIT_PRODUCER_ID: 4, ADD_PARTITIONS: 2, ADD_OFFSETS: 2, END_TXN: 2}
"""From which version on clients know PRODUCER_FENCED; before, and in the others, it is INVALID_PRODUCER_EPOCH."""
_ABORTABLE_SINCE = 11
"""From which version of Produce on clients know TRANSACTION_ABORTABLE."""
_PATIENCE_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_LONGEST_TIMER_SECONDS = 3600.0
_IDS_LOW = 100
_CHECK_SECONDS = 1.0
_PREPARED = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
_TRANSIENT = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)
_UNDECIDED = (TransactionState.ONGOING, *_PREPARED)
_logger = logging.getLogger("tidelog.kafka")

Place = Partition | str
InThread = Callable[..., Coroutine[Any, Any, Any]]


class Store(Protocol):
    """`TransactionStore`: durable, and waited for in a thread."""

    def load(self) -> list[TransactionRecord]: ...

    def read(self, transactional_id: str) -> TransactionRecord | None: ...

    def write(self, persists: list[Persist]) -> list[Superseded]: ...

    def take_producer_ids(self) -> range: ...


class Markers(Protocol):
    """The partitions of the broker, by the names of their topics and their numbers."""

    async def has_partition(self, topic: str, partition: int) -> bool: ...

    async def write_marker(self, topic: str, partition: int, control: Control) -> object:
        """Appends a control record; returns once it is durable.

        NotFoundError: there is no such partition any more. After any other error it will not be appended later.
        """


class Groups(Protocol):
    """What the group coordinator does for transactions. A transaction is known by its producer id."""

    def check_commit(self, group_id: str, member_id: str, generation: int, instance_id: str | None) -> ErrorCode:
        """Whether a consumer may commit."""

    def begin_pending(self, group_id: str, producer_id: int, partitions: Iterable[Partition]) -> None:
        """These partitions have an offset that is not decided: consumers that ask for stable ones wait."""

    async def complete(
        self, group_id: str, producer_id: int, commit: bool, offsets: Mapping[Partition, GroupOffset]
    ) -> Mapping[Partition, TidelogError]:
        """Decided: on a commit returns once they are durable. A second time changes nothing. Returns what failed."""


class Remote(Protocol):
    """Other nodes, which coordinate groups and transactions of an installation."""

    async def commit_offsets(self, context: RequestContext, request: Any) -> Any:
        """TxnOffsetCommit at the coordinator of its transaction. TidelogError: nobody is known to have it."""

    async def complete(
        self, group_id: str, producer_id: int, number: int, commit: bool, offsets: Mapping[Partition, GroupOffset]
    ) -> None:
        """As `Groups.complete` at the coordinator of the group, for the transaction of this number; raises what
        failed."""


class TransactionService:
    """Serves all transactional ids. Made, started and stopped on the event loop."""

    def __init__(
        self,
        store: Store,
        markers: Markers,
        groups: Groups,
        now_ms: Callable[[], int],
        *,
        max_timeout_ms: int = DEFAULT_MAX_TIMEOUT_MS,
        expiration_ms: int = DEFAULT_EXPIRATION_MS,
        patience_seconds: float = _PATIENCE_SECONDS,
        first_pause_seconds: float = _FIRST_PAUSE_SECONDS,
        in_thread: InThread = in_store_thread,
        slots: Slots | None = None,
        remote: Remote | None = None,
    ) -> None:
        """`now_ms` is wall time: deadlines outlive this process. `in_thread` waits for the store. With `slots` it
        coordinates the transactional ids of these alone, and asks other nodes through `remote`."""
        self._slots = slots
        self._remote = remote
        self._in_thread = in_thread
        self._store = store
        self._markers = markers
        self._groups = groups
        self._clock_ms = now_ms
        self._latest_ms = 0
        self._patience_seconds = patience_seconds
        self._first_pause_seconds = first_pause_seconds
        self._coordinator = TransactionCoordinator(
            self._new_producer_id, max_timeout_ms=max_timeout_ms, expiration_ms=expiration_ms
        )
        self._ids: deque[int] = deque()
        self._taking_ids: asyncio.Task[None] | None = None
        self._unwritten: list[Persist] = []
        self._has_unwritten = asyncio.Event()
        self._tokens: set[asyncio.Future[Reply]] = set()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._ending: dict[str, WriteMarkers] = {}
        self._marking: dict[tuple[str, Place], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        """What is due at once is no timer of uvloop, and does not know when."""
        self._loaded_pending: dict[tuple[str, int], str] = {}
        self._is_checking = False
        self._is_started = False
        self._is_stopped = False

    def handlers(self) -> dict[int, Handler]:
        """By API key."""
        return {
            INIT_PRODUCER_ID: self._init_producer_id,
            ADD_PARTITIONS: self._add_partitions,
            ADD_OFFSETS: self._add_offsets,
            END_TXN: self._end,
            TXN_OFFSET_COMMIT: self._commit_offsets,
        }

    # Life

    async def start(self) -> None:
        """Reads the records, and goes on with what was begun. Until then requests are answered that it loads."""
        records = [] if self._slots is not None else await self._in_thread(self._store.load)
        self._is_started = True
        self._spawn(self._write_records())
        self.take_over(records)

    def take_over(self, records: Iterable[TransactionRecord]) -> None:
        """Goes on with these transactional ids; of those that other nodes coordinate, groups here learn what is
        pending."""
        ours = []
        for record in records:
            if self._slots is None:
                self._begin_pending(record)
            else:
                self._load_pending(record, self._slots)
            if self._slots is None or self._slots.is_unloaded(record.transactional_id):
                ours.append(record)
        self._carry_out(self._coordinator.recover(ours))

    def _load_pending(self, record: TransactionRecord, slots: Slots) -> None:
        """Groups whose slot is being loaded have offsets pending, as the record says. The coordinator before may have
        been told the end of it, while the record does not say so yet: it is looked at again."""
        if record.state not in _UNDECIDED:
            return
        for group_id, offsets in record.offsets.items():
            if slots.is_unloaded(group_id):
                self._groups.begin_pending(group_id, record.producer_id, _flat(offsets))
                self._loaded_pending[group_id, record.producer_id] = record.transactional_id
        if self._loaded_pending and not self._is_checking:
            self._is_checking = True
            self._spawn(self._check_loaded())

    async def _check_loaded(self) -> None:
        while self._loaded_pending:
            await asyncio.sleep(_CHECK_SECONDS)
            for (group_id, producer_id), name in list(self._loaded_pending.items()):
                with contextlib.suppress(TidelogError):
                    record = await self._in_thread(self._store.read, name)
                    is_pending = record is not None and record.state in _UNDECIDED and group_id in record.offsets
                    if not is_pending and self._loaded_pending.pop((group_id, producer_id), None) is not None:
                        await self._groups.complete(group_id, producer_id, False, {})
        self._is_checking = False

    def hand_over(self, slot: int) -> None:
        """Another node coordinates the transactional ids of a slot from now on."""
        for name in self._coordinator.transactional_ids():
            if slot_of(name) == slot:
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._ending.pop(name, None)
        self._carry_out(self._coordinator.forget(name))
        self._wake(name)

    async def stop(self) -> None:
        """Stops at once. What was begun is finished by the next start; requests that wait hear that it is away."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._taking_ids is not None:
            await asyncio.wait([self._taking_ids])
        for token in self._tokens:
            _finish(token, Reply(token, ErrorCode.COORDINATOR_NOT_AVAILABLE))
        for waiters in self._waiting.values():
            for waiter in waiters:
                _finish(waiter, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("the transaction coordinator failed", exc_info=error)

    def _now_ms(self) -> int:
        self._latest_ms = max(self._latest_ms, self._clock_ms())
        return self._latest_ms

    # For partitions

    def verify(self, producer_id: int, epoch: int, topic: str, partition: int, version: int) -> ErrorCode:
        """What to answer to a Produce of this version with a transactional batch; NONE: append it.

        Call it in the turn of the event loop in which the batch gets its place before later markers.
        """
        if not self._is_started or self._is_stopped:
            return ErrorCode.NOT_ENOUGH_REPLICAS  # the client tries again
        error = self._coordinator.verify(producer_id, epoch, (topic, partition))
        if error is ErrorCode.INVALID_TXN_STATE and version >= _ABORTABLE_SINCE:
            return ErrorCode.TRANSACTION_ABORTABLE
        return error

    def knows(self, producer_id: int) -> bool:
        """Whether this node coordinates the transactions of a producer."""
        return self._coordinator.knows(producer_id)

    def describe(self, transactional_id: str) -> TransactionRecord | None:
        """What is known of a transactional id."""
        return self._coordinator.describe(transactional_id)

    def transactional_ids(self) -> list[str]:
        return self._coordinator.transactional_ids()

    # Requests

    async def _init_producer_id(self, context: RequestContext, request: Any) -> Any:
        reply = Reply(None, self.refusal(request.transactional_id))
        if reply.error is ErrorCode.NONE:
            reply = await self._init(request)
        return wire(INIT_PRODUCER_ID).InitProducerIdResponse(
            error_code=_code(context, reply.error),
            producer_id=reply.producer_id,
            producer_epoch=reply.epoch,
        )

    async def _init(self, request: Any) -> Reply:
        async def ask(now_ms: int, token: Token) -> list[Effect]:
            await self._need_ids()
            return self._coordinator.init_producer(
                now_ms,
                token,
                request.transactional_id,
                request.transaction_timeout_ms,
                request.producer_id,
                request.producer_epoch,
            )

        try:
            return await self._ask(request.transactional_id or "", ask)
        except TidelogError as error:
            _logger.warning("no ids for producers: %s", error)
            return Reply(None, ErrorCode.COORDINATOR_NOT_AVAILABLE)

    async def _add_partitions(self, context: RequestContext, request: Any) -> Any:
        error = self.refusal(request.v3_and_below_transactional_id)
        unknown: set[tuple[str, int]] = set()
        if error is ErrorCode.NONE:
            sent = [(topic.name, number) for topic in request.v3_and_below_topics for number in topic.partitions]
            found = {one: await self._known_partition(*one) for one in sent}
            unknown = {one for one, partition in found.items() if partition is None}
            error = ErrorCode.OPERATION_NOT_ATTEMPTED if unknown else await self._add(request, found.values())
        module = wire(ADD_PARTITIONS)
        code = _code(context, error)

        def result(name: str, number: int) -> Any:
            known = code if (name, number) not in unknown else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return module.AddPartitionsToTxnResponsePartitionResult(partition_index=number, partition_error_code=known)

        return module.AddPartitionsToTxnResponse(
            results_by_topic_v3_and_below=[
                module.AddPartitionsToTxnResponseTopicResult(
                    name=topic.name, results_by_partition=[result(topic.name, number) for number in topic.partitions]
                )
                for topic in request.v3_and_below_topics
            ]
        )

    async def _known_partition(self, sent: str, number: int) -> Partition | None:
        name = known_name(sent)
        if name is None or not await self._markers.has_partition(str(name), number):
            return None
        return str(name), number

    async def _add(self, request: Any, partitions: Any) -> ErrorCode:
        async def ask(now_ms: int, token: Token) -> list[Effect]:
            return self._coordinator.add_partitions(
                now_ms,
                token,
                request.v3_and_below_transactional_id,
                request.v3_and_below_producer_id,
                request.v3_and_below_producer_epoch,
                partitions,
            )

        return (await self._ask(request.v3_and_below_transactional_id, ask)).error

    async def _add_offsets(self, context: RequestContext, request: Any) -> Any:
        async def ask(now_ms: int, token: Token) -> list[Effect]:
            who = (request.transactional_id, request.producer_id, request.producer_epoch)
            return self._coordinator.add_offsets(now_ms, token, *who, request.group_id)

        error = self.refusal(request.transactional_id)
        if error is ErrorCode.NONE:
            error = (await self._ask(request.transactional_id, ask)).error
        return wire(ADD_OFFSETS).AddOffsetsToTxnResponse(error_code=_code(context, error))

    async def _end(self, context: RequestContext, request: Any) -> Any:
        async def ask(now_ms: int, token: Token) -> list[Effect]:
            who = (request.transactional_id, request.producer_id, request.producer_epoch)
            return self._coordinator.end(now_ms, token, *who, request.committed)

        error = self.refusal(request.transactional_id)
        if error is ErrorCode.NONE:
            error = (await self._ask(request.transactional_id, ask)).error
        return wire(END_TXN).EndTxnResponse(error_code=_code(context, error))

    async def _commit_offsets(self, context: RequestContext, request: Any) -> Any:
        error = self.refusal()
        is_passed_on = self._slots is not None and is_forwarded(context)
        if error is ErrorCode.NONE and not is_passed_on:
            who = (request.member_id, request.generation_id, request.group_instance_id)
            error = self._groups.check_commit(request.group_id, *who)
        if error is ErrorCode.NONE and self._slots is not None and not self._slots.has(request.transactional_id):
            return await self._commit_elsewhere(context, request, is_passed_on)
        if error is ErrorCode.NONE:
            error = self.refusal(request.transactional_id)
        unknown: set[str] = set()
        if error is ErrorCode.NONE:
            names = {topic.name: known_name(topic.name) for topic in request.topics}
            unknown = {sent for sent, name in names.items() if name is None}
            error = await self._commit(request, names)
        module = wire(TXN_OFFSET_COMMIT)
        code = _code(context, error)

        def results(topic: Any) -> list[Any]:
            known = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic.name in unknown else code
            return [
                module.TxnOffsetCommitResponsePartition(partition_index=one.partition_index, error_code=known)
                for one in topic.partitions
            ]

        return module.TxnOffsetCommitResponse(
            topics=[
                module.TxnOffsetCommitResponseTopic(name=topic.name, partitions=results(topic))
                for topic in request.topics
            ]
        )

    async def _commit_elsewhere(self, context: RequestContext, request: Any, is_passed_on: bool) -> Any:
        """Passes offsets on to the coordinator of their transaction; they are pending in the group here then."""
        module = wire(TXN_OFFSET_COMMIT)
        error = ErrorCode.NOT_COORDINATOR if is_passed_on else ErrorCode.COORDINATOR_NOT_AVAILABLE
        if self._remote is not None and not is_passed_on:
            try:
                answer = await self._remote.commit_offsets(context, request)
            except TidelogError as failed:
                _logger.info("offsets of the transaction %s wait: %s", request.transactional_id, failed)
            else:
                stored = [
                    (str(name), one.partition_index)
                    for topic in answer.topics
                    if (name := known_name(topic.name)) is not None
                    for one in topic.partitions
                    if one.error_code == ErrorCode.NONE
                ]
                self._loaded_pending.pop((request.group_id, request.producer_id), None)
                self._groups.begin_pending(request.group_id, request.producer_id, stored)
                for topic in answer.topics:
                    for one in topic.partitions:
                        if one.error_code in _TRANSIENT:  # of that coordinator, not of the group's
                            one.error_code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
                return answer
        return module.TxnOffsetCommitResponse(
            topics=[
                module.TxnOffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=[
                        module.TxnOffsetCommitResponsePartition(partition_index=one.partition_index, error_code=error)
                        for one in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    async def _commit(self, request: Any, names: Mapping[str, object]) -> ErrorCode:
        offsets = {
            (str(names[topic.name]), one.partition_index): CommittedOffset(
                one.committed_offset, one.committed_leader_epoch, one.committed_metadata
            )
            for topic in request.topics
            if names[topic.name] is not None
            for one in topic.partitions
        }

        async def ask(now_ms: int, token: Token) -> list[Effect]:
            who = (request.transactional_id, request.producer_id, request.producer_epoch)
            return self._coordinator.commit_offsets(now_ms, token, *who, request.group_id, offsets)

        error = (await self._ask(request.transactional_id, ask)).error
        # Clients know this of other requests alone; this one they simply repeat.
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if error is ErrorCode.CONCURRENT_TRANSACTIONS else error

    def refusal(self, transactional_id: str | None = None) -> ErrorCode:
        """Why requests are not answered now, or not here."""
        if self._is_stopped:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if not self._is_started:
            return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        refusal = None if self._slots is None or transactional_id is None else self._slots.refusal(transactional_id)
        return refusal or ErrorCode.NONE

    async def _ask(
        self, transactional_id: str, request: Callable[[int, Token], Coroutine[Any, Any, list[Effect]]]
    ) -> Reply:
        """Asks the coordinator; again when the transactional id was busy and has moved on."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_seconds
        while True:
            refusal = self.refusal(transactional_id or None)  # its slot may have been handed over while this waited
            if refusal is not ErrorCode.NONE:
                return Reply(None, refusal)
            token: asyncio.Future[Reply] = loop.create_future()
            self._carry_out(await request(self._now_ms(), token))
            self._tokens.add(token)
            try:
                reply = await token
            finally:
                self._tokens.discard(token)
            if reply.error is not ErrorCode.CONCURRENT_TRANSACTIONS:
                return reply
            if not await self._moved_on(transactional_id, deadline - loop.time()):
                return reply

    async def _moved_on(self, transactional_id: str, timeout_seconds: float) -> bool:
        """Waits until a record of a busy transactional id is durable; False after the time."""
        if timeout_seconds <= 0 or self._is_stopped:
            return False
        if not self._coordinator.is_busy(transactional_id):
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(transactional_id, [])
        waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_seconds):
                await waiter
        except TimeoutError:
            waiters.remove(waiter)
            return False
        return not self._is_stopped

    # Producer ids

    def _new_producer_id(self) -> int:
        return self._ids.popleft()

    async def _need_ids(self) -> None:
        """Until there is one; asks for the next block before the last one is used up."""
        if len(self._ids) < _IDS_LOW and self._taking_ids is None:
            self._taking_ids = asyncio.get_running_loop().create_task(self._take_ids())
        while not self._ids:
            taking = self._taking_ids
            if taking is None:
                taking = self._taking_ids = asyncio.get_running_loop().create_task(self._take_ids())
            await asyncio.shield(taking)

    async def _take_ids(self) -> None:
        try:
            self._ids.extend(await self._in_thread(self._store.take_producer_ids))
        except TidelogError:
            if not self._ids:
                raise
        finally:
            self._taking_ids = None

    # Effects

    def _carry_out(self, effects: list[Effect]) -> None:
        pending = deque(effects)
        while pending:
            effect = pending.popleft()
            if isinstance(effect, Reply):
                _finish(effect.token, effect)
            elif isinstance(effect, WriteMarkers):
                self._write_markers(effect)
            elif self._is_refused(effect):
                refused = self._coordinator.not_persisted(effect.transactional_id, ErrorCode.INVALID_REQUEST)
                pending.extend(refused)
                self._wake(effect.transactional_id)
            else:
                self._unwritten.append(effect)
                self._has_unwritten.set()
        self._set_timer()

    def _is_refused(self, persist: Persist) -> bool:
        record = persist.record
        return record is not None and record.state is TransactionState.ONGOING and is_too_large(record)

    def tick(self) -> None:
        """What time has brought. It happens by itself when it is due."""
        self._timer = None
        self._carry_out(self._coordinator.tick(self._now_ms()))

    def _set_timer(self) -> None:
        due_ms = self._coordinator.next_deadline_ms
        if due_ms is None or self._is_stopped:
            return
        loop = asyncio.get_running_loop()
        seconds = min(max(0, due_ms - self._now_ms()) / 1000, _LONGEST_TIMER_SECONDS)
        at = loop.time() + seconds
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = loop.call_later(seconds, self.tick)

    # Records

    async def _write_records(self) -> None:
        """All that wait are one write; those that come meanwhile are the next."""
        while True:
            await self._has_unwritten.wait()
            self._has_unwritten.clear()
            persists, self._unwritten = self._unwritten, []
            superseded = {one.transactional_id: one for one in await self._written(persists)}
            for persist in persists:
                self._persisted(persist, superseded.get(persist.transactional_id))

    async def _written(self, persists: list[Persist]) -> list[Superseded]:
        pause_seconds = self._first_pause_seconds
        while True:
            writing = asyncio.ensure_future(self._in_thread(self._store.write, persists))
            try:
                return await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # the store may be closed once this has ended
                raise
            except TidelogError as error:
                _logger.warning("transactions cannot be stored, and wait: %s", error)
            await asyncio.sleep(jittered(pause_seconds))
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _persisted(self, persist: Persist, superseded: Superseded | None) -> None:
        name = persist.transactional_id
        if self._slots is not None and not self._slots.has(name):
            self._forget(name)
            return
        if not self._coordinator.is_writing(name):
            return  # its slot was handed over meanwhile
        if superseded is not None:
            _logger.warning("another coordinator has changed the transactional id %s", name)
            effects = self._coordinator.superseded(name, superseded.record)
        else:
            effects = self._coordinator.persisted(name)
        record = self._coordinator.describe(name)
        if record is None or record.state not in _PREPARED:
            self._ending.pop(name, None)
        if record is not None:
            self._begin_pending(record)
        self._carry_out(effects)
        self._wake(name)

    def _begin_pending(self, record: TransactionRecord) -> None:
        if record.state in _UNDECIDED:
            for group_id, offsets in record.offsets.items():
                if self._slots is not None and not self._slots.has(group_id):
                    continue
                self._loaded_pending.pop((group_id, record.producer_id), None)
                self._groups.begin_pending(group_id, record.producer_id, _flat(offsets))

    def _wake(self, transactional_id: str) -> None:
        for waiter in self._waiting.pop(transactional_id, ()):
            _finish(waiter, None)

    # Markers

    def _write_markers(self, markers: WriteMarkers) -> None:
        name = markers.transactional_id
        self._ending[name] = markers
        places: list[Place] = [*sorted(markers.partitions), *markers.offsets]
        for place in places:
            if (name, place) not in self._marking:
                self._marking[name, place] = self._spawn(self._mark(name, place))

    async def _mark(self, name: str, place: Place) -> None:
        """Writes one marker until that succeeds, and as the newest effect has it: it may have been asked for again."""
        pause_seconds = self._first_pause_seconds
        written: WriteMarkers | None = None
        try:
            while (markers := self._ending.get(name)) is not None and _has(markers, place):
                if written is not None and _is_same_end(written, markers):
                    break
                try:
                    await self._write_marker(markers, place)
                    written = markers
                except TidelogError as error:
                    _logger.warning("a marker of the transaction %s waits for %s: %s", name, place, error)
                    await asyncio.sleep(jittered(pause_seconds))
                    pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        finally:
            del self._marking[name, place]
        if markers is not None:
            self._carry_out(self._coordinator.marker_written(self._now_ms(), markers, place))

    async def _write_marker(self, markers: WriteMarkers, place: Place) -> None:
        if isinstance(place, str):
            offsets = {one: _group_offset(at) for one, at in _flat(markers.offsets[place]).items()}
            if self._slots is not None and not self._slots.has(place):
                assert self._remote is not None, "with slots there are other nodes"
                await self._remote.complete(place, markers.producer_id, markers.number, markers.is_commit, offsets)
                return
            failed = await self._groups.complete(place, markers.producer_id, markers.is_commit, offsets)
            for error in failed.values():
                raise error
            return
        who = (markers.producer_id, markers.epoch, markers.number)
        control = Control(markers.is_commit, *who, self._now_ms() * 1000)
        try:
            await self._markers.write_marker(*place, control)
        except NotFoundError:
            _logger.info("%s, partition %d, is gone: nothing is left of a transaction there", *place)


def _has(markers: WriteMarkers, place: Place) -> bool:
    return place in markers.partitions or place in markers.offsets


def _is_same_end(one: WriteMarkers, other: WriteMarkers) -> bool:
    """Of the same transaction; partitions and offsets follow from that."""
    return one[:4] == other[:4] and one.number == other.number


def _flat(offsets: Mapping[str, Mapping[int, CommittedOffset]]) -> dict[Partition, CommittedOffset]:
    return {(topic, number): offset for topic, known in offsets.items() for number, offset in known.items()}


def _group_offset(committed: CommittedOffset) -> GroupOffset:
    return GroupOffset(committed.offset, committed.leader_epoch, committed.metadata or "")


def _finish(future: Any, result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _code(context: RequestContext, error: ErrorCode) -> ErrorCode:
    """The error as the client's version knows it."""
    if error is ErrorCode.PRODUCER_FENCED and context.version < _FENCED_SINCE.get(context.api_key, 1 << 15):
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error
