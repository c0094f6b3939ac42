"""The transaction coordinator with its store, partitions and groups, killed at every step of its work."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from tidelog.errors import NotFoundError, StoreUnavailableError, TidelogError
from tidelog.service.kafka.codec import APIS, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.records import Control, StoredBatch
from tidelog.service.kafka.requests import RequestContext
from tidelog.service.kafka.transactions.coordinator import TransactionService
from tidelog.service.kafka.transactions.producers import PartitionProducers
from tidelog.service.kafka.transactions.state_machine import Partition, Persist, TransactionRecord
from tidelog.service.kafka.transactions.store import Superseded, TransactionStore
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.topics.subscription.group_offsets import GroupOffset

A, B = ("shop/a", 0), ("shop/b", 1)
GROUP = "readers"
TIMEOUT_MS = 60_000
RETRIED = (
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
)


class DeadError(TidelogError):
    """The process was killed: nothing that it does has an effect."""


class Machine:
    """What outlives a kill: the metadata, the logs and the offsets of groups. Counts steps, and dies at one of them.

    Every effect has two steps, before and after: after the second it is durable, and nobody heard of it.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self.metadata = MemoryMetadataStore()
        self.logs: dict[Partition, list[StoredBatch]] = {A: [], B: []}
        self.values: dict[Partition, list[object]] = {A: [], B: []}
        self.offsets: dict[str, dict[Partition, int]] = {}
        self.now_ms = 1_000
        self.steps = 0
        self.dies_at: int | None = None
        self.chance = chance
        self.failures: dict[Partition, list[Exception]] = {}
        self.group_failures: list[TidelogError] = []

    @property
    def is_dead(self) -> bool:
        return self.dies_at is not None and self.steps >= self.dies_at

    def step(self) -> None:
        self.steps += 1
        if self.is_dead:
            raise DeadError("killed")

    async def pause(self) -> None:
        for _ in range(0 if self.chance is None else self.chance.choice([0, 0, 1, 2, 5])):
            await asyncio.sleep(0)


class Broker:
    """A process that runs on the machine, from a start to a kill."""

    def __init__(self, machine: Machine, **more: Any) -> None:
        self.machine = machine
        self.records = TransactionStore(machine.metadata)
        self.partitions = {partition: PartitionProducers() for partition in machine.logs}
        for partition, log in machine.logs.items():
            self.partitions[partition].record_all(log)
        self.pending: dict[tuple[str, int], set[Partition]] = {}
        self.marking: set[tuple[Partition, int]] = set()
        self.group_error = ErrorCode.NONE
        given: dict[str, Any] = {"patience_seconds": 60.0, "first_pause_seconds": 0.001, "in_thread": self.in_thread}
        self.service = TransactionService(self, self, self, lambda: machine.now_ms, **{**given, **more})
        self.handlers = self.service.handlers()

    async def in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        await self.machine.pause()
        return work(*arguments)

    # The store

    def load(self) -> list[TransactionRecord]:
        return self.records.load()

    def read(self, transactional_id: str) -> TransactionRecord | None:
        return self.records.read(transactional_id)

    def write(self, persists: list[Persist]) -> list[Superseded]:
        self.machine.step()
        superseded = self.records.write(persists)
        self.machine.step()
        return superseded

    def take_producer_ids(self) -> range:
        self.machine.step()
        return self.records.take_producer_ids()

    # The partitions

    async def has_partition(self, topic: str, partition: int) -> bool:
        return (topic, partition) in self.machine.logs

    async def write_marker(self, topic: str, partition: int, control: Control) -> int:
        place = (topic, partition)
        assert (place, control.producer_id) not in self.marking, "two markers of one producer on their way at once"
        self.marking.add((place, control.producer_id))
        try:
            await self.machine.pause()
            if self.machine.failures.get(place):
                raise self.machine.failures[place].pop(0)
            self.machine.step()
            who = (control.producer_id, control.producer_epoch)
            offset = self.append(place, who, -1, None, is_control=True, is_commit=control.is_commit)
            await self.machine.pause()
            self.machine.step()
            return offset
        finally:
            self.marking.discard((place, control.producer_id))

    def append(
        self,
        place: Partition,
        who: tuple[int, int],
        sequence: int,
        value: object,
        *,
        is_control: bool = False,
        is_commit: bool = False,
    ) -> int:
        log = self.machine.logs[place]
        stored = StoredBatch(len(log), len(log), *who, sequence, True, is_control, is_commit, 0)
        log.append(stored)
        self.machine.values[place].append(value)
        self.partitions[place].record(stored)
        return stored.first_offset

    def produce(self, place: Partition, who: tuple[int, int], sequence: int, value: object) -> ErrorCode:
        """What a Produce request does."""
        self.machine.step()
        verdict = self.partitions[place].check(*who, sequence, 1)
        if verdict.error is not ErrorCode.NONE or verdict.duplicate_offset is not None:
            return verdict.error
        error = self.service.verify(*who, *place, 9)
        if error is ErrorCode.NONE:
            self.append(place, who, sequence, value)
            self.machine.step()
        return error

    # The groups

    def check_commit(self, group_id: str, member_id: str, generation: int, instance_id: str | None) -> ErrorCode:
        return self.group_error

    def begin_pending(self, group_id: str, producer_id: int, partitions: Iterable[Partition]) -> None:
        self.pending[group_id, producer_id] = set(partitions)

    async def complete(
        self, group_id: str, producer_id: int, commit: bool, offsets: Mapping[Partition, GroupOffset]
    ) -> dict[Partition, TidelogError]:
        await self.machine.pause()
        if self.machine.group_failures:
            return {one: self.machine.group_failures.pop() for one in offsets}
        self.machine.step()
        if commit:
            self.machine.offsets.setdefault(group_id, {}).update(
                {place: committed.offset for place, committed in offsets.items()}
            )
        self.pending.pop((group_id, producer_id), None)
        self.machine.step()
        return {}

    # Requests

    async def call(self, api_key: int, request: Any, version: int | None = None) -> Any:
        version = APIS[api_key].last if version is None else version
        return await self.handlers[api_key](RequestContext(api_key, version, None, "host"), request)

    async def init(self, name: str | None, timeout_ms: int = TIMEOUT_MS, **more: Any) -> Any:
        request = wire(22).InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=timeout_ms, **more)
        return await self.call(22, request)

    async def add(self, name: str, who: tuple[int, int], *partitions: Partition, version: int = 3) -> ErrorCode:
        module = wire(24)
        topics = [module.AddPartitionsToTxnRequestTopic(topic, [number]) for topic, number in partitions]
        answer = await self.call(24, module.AddPartitionsToTxnRequest([], name, *who, topics), version)
        [error] = {
            one.partition_error_code
            for topic in answer.results_by_topic_v3_and_below
            for one in topic.results_by_partition
        }
        return ErrorCode(error)

    async def add_offsets(self, name: str, who: tuple[int, int]) -> ErrorCode:
        return ErrorCode((await self.call(25, wire(25).AddOffsetsToTxnRequest(name, *who, GROUP))).error_code)

    async def commit(self, name: str, who: tuple[int, int], place: Partition, offset: int) -> ErrorCode:
        module = wire(28)
        partition = module.TxnOffsetCommitRequestPartition(place[1], offset, 0, "note")
        topic = module.TxnOffsetCommitRequestTopic(place[0], [partition])
        answer = await self.call(28, module.TxnOffsetCommitRequest(name, GROUP, *who, topics=[topic]))
        return ErrorCode(answer.topics[0].partitions[0].error_code)

    async def end(self, name: str, who: tuple[int, int], is_commit: bool, version: int = 4) -> ErrorCode:
        return ErrorCode((await self.call(26, wire(26).EndTxnRequest(name, *who, is_commit), version)).error_code)

    async def at_rest(self) -> None:
        """Until nothing is being written."""
        async with asyncio.timeout(60):
            while any(self.service._coordinator.is_busy(name) for name in self.service.transactional_ids()):
                await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def started(machine: Machine, **more: Any) -> Broker:
    broker = Broker(machine, **more)
    await broker.service.start()
    return broker


class RefusedError(Exception):
    """A client gets an error that it does not repeat the request for."""

    def __init__(self, error: ErrorCode) -> None:
        super().__init__(error.name)
        self.error = error


async def good(ask: Callable[[], Awaitable[ErrorCode]]) -> None:
    """Asks as a client does: again after an error that passes."""
    while (error := await ask()) in RETRIED:
        await asyncio.sleep(0)
    if error is not ErrorCode.NONE:
        raise RefusedError(error)


async def transaction(broker: Broker, name: str, value: object, is_commit: bool, told: list[object]) -> None:
    """A producer that copies: two batches, an offset, the end. `told` gets the value when the end is confirmed."""
    answer = await broker.init(name)
    while answer.error_code in RETRIED:
        answer = await broker.init(name)
    if answer.error_code:
        raise RefusedError(ErrorCode(answer.error_code))
    who = answer.producer_id, answer.producer_epoch
    await good(lambda: broker.add(name, who, A))
    for place in (A, B):
        if place == B:
            await good(lambda: broker.add(name, who, B))
        error = broker.produce(place, who, 0, value)
        if error is not ErrorCode.NONE:
            raise RefusedError(error)
    await good(lambda: broker.add_offsets(name, who))
    await good(lambda: broker.commit(name, who, ("shop/input", 0), int(str(value))))
    await good(lambda: broker.end(name, who, is_commit))
    told.append(value)


def committed(machine: Machine, place: Partition) -> list[object]:
    """What a consumer with read_committed gets; nothing may be open."""
    state = PartitionProducers()
    log = machine.logs[place]
    state.record_all(log)
    assert state.last_stable_offset(len(log)) == len(log), "a transaction is open for ever"
    aborted = state.aborted(0, len(log))
    return [
        machine.values[place][one.first_offset]
        for one in log
        if not one.is_control
        and not any(
            end.producer_id == one.producer_id and end.first_offset <= one.first_offset <= end.last_offset
            for end in aborted
        )
    ]


async def until_dead(machine: Machine, work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Lets clients work until they are done or the broker is dead; then they are gone, too."""
    tasks = [asyncio.ensure_future(one) for one in work]
    async with asyncio.timeout(60):
        while not machine.is_dead and not all(task.done() for task in tasks):
            await asyncio.sleep(0)
    for task in tasks:
        error = task.exception() if task.done() else None
        if error is not None and not isinstance(error, DeadError | RefusedError):
            raise error
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def recovered(machine: Machine) -> Broker:
    """After a kill: what was decided is finished, and what was open is aborted in time."""
    machine.dies_at = None
    broker = await started(machine)
    await broker.at_rest()
    machine.now_ms += TIMEOUT_MS + 1
    broker.service.tick()
    await broker.at_rest()
    assert not broker.pending
    return broker


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_kill_at_any_step_leaves_all_of_a_transaction_or_nothing(is_commit: bool) -> None:
    """In both partitions and in the group; and what the client was told is so."""

    async def cut(dies_at: int | None) -> int:
        machine, told = Machine(), list[object]()
        machine.dies_at = dies_at
        broker = await started(machine)
        await until_dead(machine, [transaction(broker, "app", 7, is_commit, told)])
        if dies_at is None:
            await broker.at_rest()
        steps = machine.steps
        await broker.service.stop()
        broker = await recovered(machine)
        outcome = committed(machine, A)
        assert outcome in ([], [7])
        assert committed(machine, B) == outcome
        assert machine.offsets.get(GROUP, {}) == ({("shop/input", 0): 7} if outcome else {})
        if told or dies_at is None:
            assert outcome == ([7] if is_commit else [])
        await transaction(broker, "app", 8, True, told)
        await broker.at_rest()
        assert committed(machine, B) == [*outcome, 8]
        await broker.service.stop()
        return steps

    async def all_of_them() -> None:
        steps = await cut(None)
        assert steps > 20
        for dies_at in range(1, steps + 1):
            await cut(dies_at)

    run(all_of_them)


@given(seed=st.integers(0, 1 << 32), kills=st.lists(st.integers(1, 60), max_size=4))
def test_concurrent_producers_and_kills_keep_every_promise(seed: int, kills: list[int]) -> None:
    """Instances of three applications, some of the same transactional id, on a broker that is killed again and again.

    Each value is in both partitions and in its group's past, or nowhere; each that was confirmed is as confirmed.
    """

    async def test() -> None:
        chance = random.Random(seed)
        machine = Machine(chance)
        numbers = itertools.count(1)
        wished: dict[object, bool] = {}
        told: list[object] = []

        async def application(broker: Broker, name: str) -> None:
            for _ in range(chance.randint(1, 4)):
                number = next(numbers)
                wished[number] = chance.random() < 0.7
                await machine.pause()
                try:
                    await transaction(broker, name, number, wished[number], told)
                except RefusedError as error:
                    if error.error is ErrorCode.UNKNOWN_SERVER_ERROR:
                        raise

        for kill in (*kills, None):
            machine.dies_at = None if kill is None else machine.steps + kill
            broker = await started(machine)
            names = [chance.choice(["x", "y", "z"]) for _ in range(4)]
            await until_dead(machine, [application(broker, name) for name in names])
            await broker.service.stop()
        await (await recovered(machine)).service.stop()
        seen = committed(machine, A)
        # Of two partitions each transaction has one batch, unless it was aborted in between.
        assert sorted(map(str, seen)) == sorted(map(str, committed(machine, B)))
        assert len(seen) == len(set(seen))
        for value in told:
            assert (value in seen) is wished[value]

    run(test)


def test_requests_before_the_records_are_read_are_answered_that_it_loads() -> None:
    """And after the end that it is away; partitions refuse transactional batches so that clients try again."""

    async def test() -> None:
        broker = Broker(Machine())
        assert (await broker.init("app")).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        assert broker.service.verify(1, 0, *A, 9) is ErrorCode.NOT_ENOUGH_REPLICAS
        await broker.service.start()
        assert (await broker.init("app")).error_code == ErrorCode.NONE
        await broker.service.stop()
        assert (await broker.init("app")).error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert await broker.end("app", (1, 0), True) is ErrorCode.COORDINATOR_NOT_AVAILABLE

    run(test)


def test_errors_are_those_that_the_version_knows() -> None:
    """PRODUCER_FENCED came later than INVALID_PRODUCER_EPOCH, and TRANSACTION_ABORTABLE later still."""

    async def test() -> None:
        broker = await started(Machine())
        answer = await broker.init("app")
        who = answer.producer_id, answer.producer_epoch
        zombie = who[0], who[1]
        assert broker.service.verify(*who, *A, 10) is ErrorCode.INVALID_TXN_STATE
        assert broker.service.verify(*who, *A, 11) is ErrorCode.TRANSACTION_ABORTABLE
        await broker.add("app", who, A)
        assert broker.service.verify(*who, *A, 11) is ErrorCode.NONE
        again = await broker.init("app")
        assert (again.error_code, again.producer_id, again.producer_epoch) == (0, who[0], 2)
        assert broker.service.verify(*zombie, *A, 9) is ErrorCode.INVALID_PRODUCER_EPOCH
        assert await broker.end("app", zombie, True) is ErrorCode.PRODUCER_FENCED
        assert await broker.end("app", zombie, True, version=1) is ErrorCode.INVALID_PRODUCER_EPOCH
        assert await broker.add("app", zombie, A) is ErrorCode.PRODUCER_FENCED
        assert await broker.add("app", zombie, A, version=1) is ErrorCode.INVALID_PRODUCER_EPOCH
        assert await broker.commit("app", zombie, A, 1) is ErrorCode.INVALID_PRODUCER_EPOCH
        await broker.service.stop()

    run(test)


def test_idempotent_producers_get_ids_over_many_blocks() -> None:
    """None of them twice, asked for all at once."""

    async def test() -> None:
        broker = await started(Machine())
        answers = await asyncio.gather(*(broker.init(None, 0) for _ in range(2500)))
        assert {one.error_code for one in answers} == {0}
        assert len({one.producer_id for one in answers}) == 2500
        await broker.service.stop()

    run(test)


def test_a_store_without_room_for_ids_is_reported() -> None:
    """And clients try again."""

    async def test() -> None:
        machine = Machine()
        broker = await started(machine)
        machine.dies_at = 0
        assert (await broker.init(None, 0)).error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        machine.dies_at = None
        assert (await broker.init(None, 0)).error_code == ErrorCode.NONE
        await broker.service.stop()

    run(test)


def test_unknown_partitions_are_refused_and_the_others_not_attempted() -> None:
    """Nothing is added then."""

    async def test() -> None:
        broker = await started(Machine())
        answer = await broker.init("app")
        who = answer.producer_id, answer.producer_epoch
        module = wire(24)
        names = ["shop/a", "shop/nowhere", "not a name"]
        topics = [module.AddPartitionsToTxnRequestTopic(name, [0]) for name in names]
        answer = await broker.call(24, module.AddPartitionsToTxnRequest([], "app", *who, topics))
        found = [one.results_by_partition[0].partition_error_code for one in answer.results_by_topic_v3_and_below]
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert found == [ErrorCode.OPERATION_NOT_ATTEMPTED, unknown, unknown]
        assert broker.service.verify(*who, *A, 9) is ErrorCode.INVALID_TXN_STATE
        await broker.service.stop()

    run(test)


def test_offsets_of_a_consumer_that_its_group_does_not_know_are_refused() -> None:
    """Its coordinator decides."""

    async def test() -> None:
        broker = await started(Machine())
        answer = await broker.init("app")
        who = answer.producer_id, answer.producer_epoch
        await broker.add_offsets("app", who)
        broker.group_error = ErrorCode.ILLEGAL_GENERATION
        assert await broker.commit("app", who, A, 5) is ErrorCode.ILLEGAL_GENERATION
        broker.group_error = ErrorCode.NONE
        assert await broker.commit("app", who, A, 5) is ErrorCode.NONE
        assert broker.pending == {(GROUP, who[0]): {A}}
        await broker.service.stop()
        again = await started(broker.machine)
        assert again.pending == broker.pending
        await again.service.stop()

    run(test)


def test_a_partition_that_is_away_is_tried_again() -> None:
    """One that is deleted is not waited for."""

    async def test() -> None:
        machine = Machine()
        broker = await started(machine)
        machine.failures = {A: [StoreUnavailableError("away")] * 3, B: [NotFoundError("deleted")]}
        machine.group_failures = [StoreUnavailableError("away")]
        await transaction(broker, "app", 1, True, [])
        await broker.at_rest()
        assert [one.is_commit for one in machine.logs[A] if one.is_control] == [True]
        assert not any(one.is_control for one in machine.logs[B])
        assert machine.offsets == {GROUP: {("shop/input", 0): 1}}
        await broker.service.stop()

    run(test)


def test_markers_that_are_asked_for_again_are_not_written_twice_at_once() -> None:
    """A late one would end the next transaction of the same producer."""

    async def test() -> None:
        machine = Machine()
        broker = await started(machine, first_pause_seconds=0.05)
        machine.failures = {A: [StoreUnavailableError("away")] * 2}
        await transaction(broker, "app", 1, True, [])
        machine.now_ms += TIMEOUT_MS + 1
        broker.service.tick()
        await broker.at_rest()
        assert [one.is_commit for one in machine.logs[A] if one.is_control] == [True]
        await broker.service.stop()

    run(test)


def test_a_record_of_another_coordinator_replaces_ours() -> None:
    """The client looks for its coordinator, and what the other has decided is carried out."""

    async def test() -> None:
        machine = Machine()
        broker, rival = await started(machine), Broker(machine)
        answer = await broker.init("app")
        await rival.service.start()
        who = answer.producer_id, answer.producer_epoch
        assert await rival.add("app", who, A) is ErrorCode.NONE
        assert await broker.add("app", who, B) is ErrorCode.NOT_COORDINATOR
        assert broker.service.verify(*who, *A, 9) is ErrorCode.NONE
        assert await broker.end("app", who, True) is ErrorCode.NONE
        await broker.at_rest()
        assert [one.is_commit for one in machine.logs[A]] == [True]
        await broker.service.stop()
        await rival.service.stop()

    run(test)


def test_a_transaction_that_no_record_can_hold_is_refused() -> None:
    """Without harm to what it has already."""

    async def test() -> None:
        broker = await started(Machine())
        answer = await broker.init("app")
        who = answer.producer_id, answer.producer_epoch
        await broker.add("app", who, A)
        await broker.add_offsets("app", who)
        module = wire(28)
        partitions = [module.TxnOffsetCommitRequestPartition(number, 1, 0, "x" * 4000) for number in range(300)]
        topics = [module.TxnOffsetCommitRequestTopic("shop/input", partitions)]
        answer = await broker.call(28, module.TxnOffsetCommitRequest("app", GROUP, *who, topics=topics))
        assert {one.error_code for one in answer.topics[0].partitions} == {ErrorCode.INVALID_REQUEST}
        assert await broker.end("app", who, True) is ErrorCode.NONE
        await broker.service.stop()

    run(test)


def test_time_aborts_by_itself() -> None:
    """Nobody calls: a timer does, and a transaction begun later does not put it off."""

    async def test() -> None:
        machine = Machine()
        broker = await started(machine)
        who = (0, 0)
        for name, timeout_ms in (("slow", TIMEOUT_MS), ("quick", 1)):
            answer = await broker.init(name, timeout_ms)
            who = answer.producer_id, answer.producer_epoch
            await broker.add(name, who, A)
        machine.now_ms += 10
        async with asyncio.timeout(60):
            while not any(one.is_control for one in machine.logs[A]):
                await asyncio.sleep(0.001)
        assert await broker.end("quick", who, True) is ErrorCode.PRODUCER_FENCED
        await broker.service.stop()

    run(test)


def test_a_deadline_that_has_just_come_disturbs_no_request() -> None:
    """With uvloop the coordinator stopped when something else happened in the moment in which a transaction was due: it
    wrote no record any more, or left a transaction open until its timeout."""

    async def test() -> None:
        machine = Machine()
        broker = await started(machine)
        answer = await broker.init("app", TIMEOUT_MS)
        await broker.add("app", (answer.producer_id, answer.producer_epoch), A)
        machine.now_ms += TIMEOUT_MS
        for _ in range(2):
            broker.service._carry_out([])
        async with asyncio.timeout(60):
            while not any(one.is_control for one in machine.logs[A]):
                await asyncio.sleep(0.001)
        await broker.service.stop()

    uvloop.run(test())


def test_every_version_of_the_apis_is_served() -> None:
    """Answers encode in all of them."""

    async def test() -> None:
        broker = await started(Machine())
        for key in broker.handlers:
            module = wire(key)
            kind = next(getattr(module, name) for name in dir(module) if name.endswith("Request"))
            for version in range(APIS[key].first, APIS[key].last + 1):
                answer = await broker.call(key, kind(), version)
                module.ENCODE_RESPONSE[version](answer, bytearray())
        await broker.service.stop()

    run(test)
