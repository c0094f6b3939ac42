"""A group coordinator without a server: requests and answers go through the codec, and time passes when nothing is left
to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from threading import Event, Lock
from typing import Any

import pytest

from tidelog.clock import ManualClock
from tidelog.errors import DataError, StoreUnavailableError, TidelogError
from tidelog.service.kafka import codec
from tidelog.service.kafka.groups import coordinator as group_coordinator
from tidelog.service.kafka.groups import shared_writes
from tidelog.service.kafka.groups.classic import GroupSettings
from tidelog.service.kafka.groups.coordinator import BrokerNode, GroupCoordinator
from tidelog.service.kafka.groups.store import GroupRecord
from tidelog.service.kafka.groups.table import CoordinatorSettings
from tidelog.service.kafka.requests import RequestContext
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.subscription.group_offsets import GroupOffset, OffsetKey

ORDERS, AUDIT = "shop/orders", "shop/audit"
SETTINGS = CoordinatorSettings(classic=GroupSettings(initial_rebalance_delay_ms=0))
RANGE = [{"name": "range", "metadata": b"meta"}]


@dataclass(frozen=True)
class Facts:
    """A topic."""

    name: TopicName
    id: bytes
    count: int


class FakeTopics:
    """Topics that a test makes and deletes."""

    def __init__(self) -> None:
        self._found: dict[TopicName, Facts] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._made = 0

    def topics(self) -> Iterable[Facts]:
        return list(self._found.values())

    def find(self, name: TopicName) -> Facts | None:
        return self._found.get(name)

    def find_id(self, topic_id: bytes) -> Facts | None:
        return next((one for one in self._found.values() if one.id == topic_id), None)

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def make(self, name: str, count: int = 1) -> Facts:
        """Creates a topic, or gives one more partitions."""
        parsed = parse_topic_name(name)
        known = self._found.get(parsed)
        self._made += 1
        topic_id = self._made.to_bytes(16, "big") if known is None else known.id
        self._found[parsed] = Facts(parsed, topic_id, count)
        self._changed()
        return self._found[parsed]

    def delete(self, name: str) -> None:
        del self._found[parse_topic_name(name)]
        self._changed()

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()


class FakeStore:
    """Offsets in memory; a test can make it wait and fail."""

    def __init__(self) -> None:
        self.stored: dict[OffsetKey, GroupOffset | DataError] = {}
        self.writes: list[int] = []
        self.failing: dict[OffsetKey, TidelogError] = {}
        self.is_down = False
        self.may_write = Event()
        self.may_write.set()
        self._guard = Lock()

    def load(self, topic: str | None = None) -> dict[OffsetKey, GroupOffset | DataError]:
        if self.is_down:
            raise StoreUnavailableError("no answer")
        return dict(self.stored)

    def store(self, changes: Any) -> dict[OffsetKey, TidelogError]:
        assert self.may_write.wait(60)
        if self.is_down:
            raise StoreUnavailableError("no answer")
        with self._guard:
            self.writes.append(len(changes))
            for key, offset in changes.items():
                if key not in self.failing:
                    if offset is None:
                        self.stored.pop(key, None)
                    else:
                        self.stored[key] = offset
        return {key: error for key, error in self.failing.items() if key in changes}


class FakeRecords:
    """Members of groups in memory; a test can make it wait and fail."""

    def __init__(self) -> None:
        self.kept: dict[str, GroupRecord] = {}
        self.is_down = False
        self.may_write = Event()
        self.may_write.set()

    def load(self) -> dict[str, GroupRecord]:
        return dict(self.kept)

    def store(self, changes: Mapping[str, GroupRecord | None]) -> dict[str, TidelogError]:
        assert self.may_write.wait(60)
        if self.is_down:
            raise StoreUnavailableError("no answer")
        for group, record in changes.items():
            if record is None:
                self.kept.pop(group, None)
            else:
                self.kept[group] = record
        return {}


class _Selector(selectors.DefaultSelector):
    """Waits for threads alone: where nothing but a timer is left, the time of the timer comes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self._in_threads = 0

    async def counted(self, *args: Any) -> Any:
        """As `in_store_thread`; no time passes meanwhile."""
        self._in_threads += 1
        try:
            return await in_store_thread(*args)
        finally:
            self._in_threads -= 1

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or self._in_threads:
            return super().select(timeout if timeout == 0 else 60)
        found = super().select(0)
        if not found and timeout > 0:
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _Selector) -> None:
        self._virtual = selector
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual.now


class Bench:
    """The coordinator under test, and what is around it."""

    def __init__(self, settings: CoordinatorSettings = SETTINGS) -> None:
        self.topics = FakeTopics()
        self.store = FakeStore()
        self.records = FakeRecords()
        self.clock = ManualClock()
        self.coordinator = GroupCoordinator(
            self.store, self.records, self.topics, lambda _: BrokerNode(1, "broker", 9092), settings, clock=self.clock
        )
        self.handlers = self.coordinator.handlers()
        self.tasks: list[asyncio.Task[Any]] = []
        self.sent = 0

    async def restart(self, *, is_killed: bool) -> None:
        """Another broker over the same stores; after a kill the one before has said nothing to anybody."""
        old = self.coordinator
        if is_killed:
            old._table._records._store = FakeRecords().store
            await old._table._records.finish()
        else:
            await old.stop()
        self.coordinator = GroupCoordinator(
            self.store, self.records, self.topics, lambda _: BrokerNode(1, "broker", 9092), SETTINGS, clock=self.clock
        )
        self.handlers = self.coordinator.handlers()
        await self.coordinator.start()
        if is_killed:
            await old.stop()

    async def kept(self) -> list[str]:
        """The groups that are stored, once nothing waits to be written."""
        await self.coordinator._table.finish()
        return sorted(self.records.kept)

    async def ask(self, api: int, version: int | None = None, client: str = "c", **fields: Any) -> Any:
        """Sends a request as a client would, and returns the answer as a client reads it."""
        version = codec.APIS[api].last if version is None else version
        self.sent += 1
        frame = bytes(codec.encode_request(api, version, self.sent, client, built(api, fields)))[4:]
        header = codec.decode_header(frame)
        request = codec.decode_request(header, frame)
        context = RequestContext(api, version, header.client_id, "/10.0.0.1")
        response = await self.handlers[api](context, request)
        answer = bytes(codec.encode_response(header, response))[4:]
        return codec.decode_response(api, version, answer)[1]

    def begin(self, api: int, version: int | None = None, **fields: Any) -> asyncio.Task[Any]:
        """Sends a request, and does not wait for the answer."""
        task = asyncio.get_running_loop().create_task(self.ask(api, version, **fields))
        self.tasks.append(task)
        return task

    # What clients do

    def join(self, member_id: str = "", group: str = "g", version: int = 3, **more: Any) -> asyncio.Task[Any]:
        given = {
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 30_000,
            "protocol_type": "consumer",
            "protocols": RANGE,
            **more,
        }
        return self.begin(11, version, group_id=group, member_id=member_id, **given)

    async def stable(self, group: str = "g", **more: Any) -> tuple[str, int]:
        """A group with one member; its id and generation."""
        joined = await self.join(group=group, **more)
        assert joined.error_code == 0
        assignments = [{"member_id": joined.member_id, "assignment": b"all"}]
        synced = await self.ask(
            14,
            3,
            group_id=group,
            generation_id=joined.generation_id,
            member_id=joined.member_id,
            assignments=assignments,
        )
        assert (synced.error_code, synced.assignment) == (0, b"all")
        return joined.member_id, joined.generation_id

    async def heartbeat(self, member_id: str, generation: int, group: str = "g", **more: Any) -> int:
        answer = await self.ask(12, 4, group_id=group, member_id=member_id, generation_id=generation, **more)
        return int(answer.error_code)

    async def commit(
        self,
        offsets: dict[tuple[str, int], int],
        group: str = "g",
        member_id: str = "",
        generation: int = -1,
        version: int = 9,
        **more: Any,
    ) -> dict[tuple[str, int], int]:
        """The error codes by topic and partition."""
        topics = [
            {"name": topic, "partitions": [{"partition_index": number, "committed_offset": offset, **more}]}
            for (topic, number), offset in offsets.items()
        ]
        answer = await self.ask(
            8,
            version,
            group_id=group,
            member_id=member_id,
            generation_id_or_member_epoch=generation,
            topics=topics,
        )
        return {(one.name, row.partition_index): row.error_code for one in answer.topics for row in one.partitions}

    async def fetch(self, *places: tuple[str, int], group: str = "g", stable: bool = False) -> Any:
        """Offset, text and error code by topic and partition; all that there are without places."""
        topics = [{"name": topic, "partition_indexes": [number]} for topic, number in places] if places else None
        answer = await self.ask(9, 9, groups=[{"group_id": group, "topics": topics}], require_stable=stable)
        found = answer.groups[0]
        assert found.error_code == 0
        return {
            (one.name, row.partition_index): (row.committed_offset, row.metadata, row.error_code)
            for one in found.topics
            for row in one.partitions
        }

    async def beat(self, member_id: str = "m1", epoch: int = 0, group: str = "g", **more: Any) -> Any:
        """ConsumerGroupHeartbeat; the first one joins."""
        if epoch == 0:
            joining = {"rebalance_timeout_ms": 30_000, "topic_partitions": [], "subscribed_topic_names": [ORDERS]}
            more = {**joining, **more}
        return await self.ask(68, 1, group_id=group, member_id=member_id, member_epoch=epoch, **more)

    def owned(self, answer: Any) -> dict[str, list[int]] | None:
        """What an answer assigns, by topic."""
        if answer.assignment is None:
            return None
        found = {}
        for one in answer.assignment.topic_partitions:
            facts = self.topics.find_id(one.topic_id)
            assert facts is not None
            found[str(facts.name)] = one.partitions
        return found


def built(api: int, fields: dict[str, Any]) -> Any:
    """A request from plain values: lists of dicts become lists of the classes of its fields."""
    module = codec.wire(api)
    stem = "".join(part.capitalize() for part in codec.APIS[api].name.split("_")) + "Request"
    return _filled(module, getattr(module, stem), stem, fields)


_CLASSES = {
    "protocols": "Protocol",
    "assignments": "Assignment",
    "members": "MemberIdentity",
    "groups": "Group",
    "partitions": "Partition",
    "topic_partitions": "TopicPartitions",
}


def _filled(module: Any, kind: Any, stem: str, fields: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = "Topic" if name == "topics" else _CLASSES[name]
            if kind.__name__.endswith("OffsetFetchRequestGroup"):
                inner = "Topics"
            found = getattr(module, stem + inner)
            values[name] = [_filled(module, found, stem, one) for one in value]
        else:
            values[name] = value
    return kind(**values)


def run(work: Callable[[Bench], Coroutine[Any, Any, None]], settings: CoordinatorSettings = SETTINGS) -> None:
    """Runs a test with a coordinator that has started; in the end nothing may be left behind."""
    selector = _Selector()
    loop = _Loop(selector)
    with pytest.MonkeyPatch.context() as patch:
        for module in (group_coordinator, shared_writes):
            patch.setattr(module, "in_store_thread", selector.counted)
        try:
            loop.run_until_complete(_run(work, settings))
        finally:
            loop.close()


async def _run(work: Callable[[Bench], Coroutine[Any, Any, None]], settings: CoordinatorSettings) -> None:
    bench = Bench(settings)
    try:
        await work(bench)
    finally:
        for task in bench.tasks:
            task.cancel()
        await asyncio.gather(*bench.tasks, return_exceptions=True)
        await bench.coordinator.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def started(bench: Bench) -> None:
    """Two topics, and the coordinator serves."""
    bench.topics.make(ORDERS, 2)
    bench.topics.make(AUDIT)
    await bench.coordinator.start()
