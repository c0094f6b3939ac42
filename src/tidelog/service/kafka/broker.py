"""The topics of a log directory as a Kafka broker serves them: found by name or id, opened when first used.

Invariants
- Everything here runs in the thread of the event loop. Opening, creating and deleting happen in worker threads.
- The directory belongs to this process, so the list of topics changes only through this object: requests for metadata
  ask neither the disk nor the store.
- A partition is opened once: requests that need it meanwhile wait for the same opening. One that failed is tried again
  by the next request, and so is a log that failed while it was open: it has what had reached the disk.
- A topic is changed by one request at a time, and to the end, also when the client is gone. It is deleted when no
  partition is being opened, and created again when it is deleted: a log never outlives its topic.
- A topic's id is derived from its name and its creation: a topic that was deleted and created again has another one.
- With other nodes the placement lists the topics and their ids, and a partition is opened while it is assigned to this
  node, never otherwise. What was released is closed before another node can open it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from tidelog.cold.catalog import PartitionLayout
from tidelog.cold.settings import TierSettings
from tidelog.errors import (
    BackpressureError,
    ClosedError,
    ConflictError,
    FencedError,
    InputError,
    LockedError,
    MessageTooLargeError,
    NotFoundError,
    OffsetOutOfRangeError,
    TidelogError,
    TopicNameError,
)
from tidelog.service.kafka.configs import Serving, configs_of, serving_of, settings_of
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.partition_reader import ColdReads, EncodedBatches, ReadCounts
from tidelog.service.kafka.partitions import Partition
from tidelog.service.kafka.records import Compression, Control, RecordError
from tidelog.service.kafka.stored_partitions import StoredPartitions
from tidelog.service.kafka.transactions.producer_state import StoredProducers
from tidelog.service.kafka.transactions.producers import PartitionProducers
from tidelog.service.placement import Address, Alone, NotOwnerError, Placement, TopicFacts
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName, parse_topic_name, read_topic_info
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.subscription.dead_letters import is_dead_letter_name
from tidelog.topics.topic import Topic

_logger = logging.getLogger("tidelog.kafka")
_UPKEEP_SECONDS = 1.0
_REOPEN_SECONDS = 1.0
_ASK_AGAIN_SECONDS = 0.05
_HELD = "%s, partition %d: %s. Clients are answered NOT_LEADER_OR_FOLLOWER, and try again until it is free"
Result = TypeVar("Result")


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the broker behaves; names in the docs are those of Kafka's broker settings."""

    node_id: int = 1
    auto_create_topics: bool = True
    """A topic that is asked for is created."""
    default_partitions: int = 1
    """How many partitions a topic gets that is created without a number."""
    max_request_bytes: int = 100 << 20
    """A larger request closes the connection."""
    max_batch_bytes: int = 1_048_588
    """The largest batch of records, compressed, unless a topic has its own `max.message.bytes`."""
    max_connections: int = 10_000
    max_connections_per_address: int = 0
    """The same for the clients of one address; 0: no limit of its own."""
    idle_seconds: float = 600.0
    """A connection without a request for so long is closed."""
    history_from_any_node: bool = True
    """Consumers of Kafka's protocol that are far behind are sent to nodes that do not own their partitions."""
    far_behind_bytes: int = 8 << 20
    """So much, and more, that is in the store alone."""
    unread_seconds: float = 60.0
    """A client that reads nothing of its answers for so long is cut."""
    max_fetch_bytes: int = 55 << 20
    """An answer to a Fetch has no more than this, whatever the client asks for."""
    encoded_max_bytes: int = 16 << 20
    """Batches that are kept encoded, of all partitions together: consumers at the tail share them. With less of it more
    is encoded again, a third of a microsecond a message."""


class ServedTopic:
    """A topic, and those of its partitions that are open."""

    def __init__(self, name: TopicName, topic_id: bytes, count: int) -> None:
        self.name = name
        self.id = topic_id
        self.count = count
        self.open: dict[int, Partition] = {}
        self.opening: dict[int, asyncio.Future[Partition]] = {}
        self.held: set[int] = set()
        """Those that another node has, as far as this one was told: clients ask for them again and again."""
        self.opened_at: dict[int, float] = {}
        self.changing = asyncio.Lock()
        self.is_sealed = False
        """It was sealed here for another owner: no request opens it again."""
        self.released: set[int] = set()
        """Partitions that were handed over to another node: no request opens them until they are assigned again."""


class Broker:
    """Serves one log directory."""

    def __init__(
        self, directory: LogDirectory, settings: BrokerSettings | None = None, placement: Placement | None = None
    ) -> None:
        self.directory = directory
        self.settings = settings or BrokerSettings()
        self.placement = placement or Alone(directory._info.node or "local", self.settings.node_id)
        directory._shares_topics = not self.placement.is_alone
        self.address = Address("127.0.0.1", 9092)
        """What clients are sent to; set before the first request."""
        self.cluster_id = directory._info.node if self.placement.is_alone else _installation_id(directory)
        self._cold = ColdReads()
        self._encoded = EncodedBatches(self.settings.encoded_max_bytes)
        self.stored = StoredPartitions(directory, self._cold, self._encoded, self._compression_of)
        """Partitions of other nodes."""
        self._topics: dict[TopicName, ServedTopic] = {}
        self._by_id: dict[bytes, ServedTopic] = {}
        self._creating: dict[TopicName, asyncio.Future[ServedTopic]] = {}
        self._deleting: dict[TopicName, asyncio.Future[None]] = {}
        self._on_change: list[Callable[[], None]] = []
        self.on_open: Callable[[str, int, int], None] = lambda topic, partition, next_offset: None
        """Called with topic, partition and its next offset when a partition was opened."""
        self.on_marker: Callable[[str, int, int], None] = lambda topic, partition, producer_id: None
        """Called before a transaction of a producer is ended in a partition here."""
        self.write_marker_elsewhere: Callable[[str, int, Control], Awaitable[None]] | None = None
        """Ends a transaction in a partition of another node."""
        self._passed_over: set[TopicName] = set()
        """Live topics, which are not served."""
        self._upkeep: asyncio.Task[None] | None = None
        self._leaving: dict[TopicName, ServedTopic] = {}
        """Topics that are being deleted, until their partitions here are released."""
        self._settings_versions: dict[TopicName, str | None] = {}

    @property
    def node_id(self) -> int:
        """Of this node."""
        return self.placement.node_id

    async def start(self) -> None:
        """Learns which topics there are."""
        if self.placement.is_alone:
            found = await in_store_thread(self._look)
            for name, created, count in found:
                self._add(name, created, count)
        else:
            self.placement.on_change(self._follow)
            self._follow()
        self._upkeep = asyncio.create_task(self._look_after())

    def _look(self) -> list[tuple[TopicName, int, int]]:
        names = [parse_topic_name(name) for name in self.directory.topics()]
        return [(name, *self._facts(name)) for name in names if self._is_served(name)]

    def _is_served(self, name: TopicName) -> bool:
        """A live topic keeps nothing, so no offset of it can be read again."""
        info = read_topic_info(self.directory._files, name.directory(self.directory.root))
        return info is None or info.reliable

    def _facts(self, name: TopicName) -> tuple[int, int]:
        info = read_topic_info(self.directory._files, name.directory(self.directory.root))
        layout = self.directory._opener.layout(name)
        return 0 if info is None else info.created_us, 1 if layout is None else layout.count

    def _add(self, name: TopicName, created_us: int, count: int) -> ServedTopic:
        topic_id = hashlib.sha256(f"{name} {created_us}".encode()).digest()[:16]
        known = self._topics.get(name)
        if known is not None and known.id == topic_id:
            known.count = count
        else:
            known = ServedTopic(name, topic_id, count)
            self._topics[name] = known
            self._by_id[topic_id] = known
        self._changed()
        return known

    # With other nodes

    def _follow(self) -> None:
        """Serves the topics that the placement lists."""
        listed = self.placement.topics() or {}
        before = {name: (served.id, served.count) for name, served in self._topics.items()}
        for name in before.keys() - listed.keys():
            self._leave(self._topics.pop(name))
        for name, facts in listed.items():
            self._know(name, facts)
        if before != {name: (served.id, served.count) for name, served in self._topics.items()}:
            self._changed()

    def _know(self, name: TopicName, facts: TopicFacts) -> ServedTopic:
        known = self._topics.get(name)
        if known is not None and known.id != facts.id:
            self._leave(known)
            known = None
        if known is None:
            known = self._topics[name] = self._by_id[facts.id] = ServedTopic(name, facts.id, facts.partitions)
        known.count = max(known.count, facts.partitions)
        return known

    def _leave(self, served: ServedTopic) -> None:
        self._by_id.pop(served.id, None)
        if served.open or served.opening:
            self._leaving[served.name] = served
        for partition in served.open.values():
            partition.close()

    async def open_partition(self, name: TopicName, number: int) -> None:
        """Opens a partition that was assigned to this node; HeldError while another node has it open."""
        served = self._topics.get(name)
        if served is None:
            raise NotFoundError(f"there is no topic {name}")
        served.released.discard(number)
        await self.partition(served, number)

    async def release_partition(self, name: TopicName, number: int) -> None:
        """Ships what is left of a partition and closes it, so that another node can open it at once.

        Requests that need it are answered NOT_LEADER_OR_FOLLOWER from now on. When that fails, it is served on, until
        it is released again.
        """
        served = self._topics.get(name) or self._leaving.get(name)
        if served is None:
            return
        served.released.add(number)
        if (running := served.opening.get(number)) is not None:
            await asyncio.wait([running])
        partition = served.open.pop(number, None)
        if partition is None:
            await in_store_thread(self.directory._give_back_claim, name, number)
            return
        try:
            await in_store_thread(self.directory._hand_over, partition.topic)
        except BaseException:
            if partition.is_open:
                served.open[number] = partition
                served.released.discard(number)
            raise
        finally:
            if not partition.is_open:
                partition.close()
        if self._leaving.get(name) is served and not served.open:
            del self._leaving[name]

    async def remove_topic(self, name: TopicName) -> None:
        """Deletes what is stored of a topic whose partitions nobody has open. It can be repeated."""

        def remove() -> None:
            if self.directory.has_topic(str(name)):
                self.directory.delete_topic(str(name))

        await in_store_thread(remove)

    def _check_ours(self, served: ServedTopic, number: int) -> None:
        """NotOwnerError for a partition that another node serves, or nobody."""
        if number in served.released or not self.placement.is_ours(served.name, number):
            raise NotOwnerError(f"{served.name}, partition {number}", self.placement.owner(served.name, number))

    async def _follow_settings(self) -> None:
        """Settings that were changed on another node take effect here."""
        opened = {name: served for name, served in self._topics.items() if served.open}
        versions = await in_store_thread(self.directory._opener.settings_versions, list(opened))
        for name, served in opened.items():
            known = self._settings_versions.get(name)
            self._settings_versions[name] = versions.get(name)
            if known != versions.get(name):
                await self._reconfigure(served)
        self._settings_versions = {name: self._settings_versions[name] for name in opened}

    async def _reconfigure(self, served: ServedTopic) -> None:
        partitions = list(served.open.values())

        def change() -> Serving:
            own = self.directory._opener.settings_of(served.name)
            for partition in partitions:
                self.directory._opener.reconfigure(partition.topic, own)
            return serving_of(self.configs_of(served.name), self.settings.max_batch_bytes)

        serving = await in_store_thread(change)
        for partition in partitions:
            partition.configure(serving)

    # Topics

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls this whenever topics or their numbers of partitions have changed."""
        self._on_change.append(callback)

    def _changed(self) -> None:
        for callback in self._on_change:
            callback()

    def topics(self) -> list[ServedTopic]:
        """All of them, by name; in any thread."""
        return [topic for _, topic in sorted(self._topics.copy().items())]

    def find(self, name: TopicName) -> ServedTopic | None:
        return self._topics.get(name)

    async def find_newest(self, name: TopicName) -> ServedTopic | None:
        """Also a topic that another node created a moment ago."""
        if name not in self._topics:
            await self.placement.hear_of(name)
        return self._topics.get(name)

    def find_id(self, topic_id: bytes) -> ServedTopic | None:
        return self._by_id.get(topic_id)

    async def create(self, name: TopicName, partitions: int | None = None, **settings: object) -> ServedTopic:
        """Creates a topic; ConflictError when it exists, or another request has created it meanwhile."""
        while (running := self._creating.get(name)) is not None:
            await asyncio.wait([running])
        if name in self._topics:
            raise ConflictError(f"the topic {name} exists")
        return await self._shared_creation(name, partitions, settings)

    async def find_or_create(self, name: TopicName) -> ServedTopic:
        """For first use: NotFoundError where topics are not created by themselves."""
        known = await self.find_newest(name)
        if known is not None:
            return known
        if not self.settings.auto_create_topics:
            raise NotFoundError(f"there is no topic {name}")
        return await self._shared_creation(name, None, {})

    async def _shared_creation(
        self, name: TopicName, partitions: int | None, settings: dict[str, object]
    ) -> ServedTopic:
        running = self._creating.get(name)
        if running is None:
            running = asyncio.ensure_future(self._create(name, partitions, settings))
            self._creating[name] = running
            running.add_done_callback(lambda done: self._created(name, done))
        return await asyncio.shield(running)

    def _created(self, name: TopicName, done: asyncio.Future[ServedTopic]) -> None:
        del self._creating[name]
        if not done.cancelled():
            done.exception()  # those that wait for it raise it

    async def _create(self, name: TopicName, partitions: int | None, settings: dict[str, object]) -> ServedTopic:
        count = partitions or self.settings.default_partitions
        if not self.placement.is_alone:
            if name.parent() is not None:
                raise TopicNameError(f"the name {name} is reserved for a partition")
            return self._know(name, await self.placement.create(name, count, settings))

        def make() -> tuple[int, int]:
            if name.parent() is not None:
                raise TopicNameError(f"the name {name} is reserved for a partition")
            self.directory.topic(str(name), partitions=None if count == 1 else count, **settings)  # type: ignore[call-overload]
            return self._facts(name)

        while (deleting := self._deleting.get(name)) is not None:
            await asyncio.wait([deleting])
        return self._add(name, *await in_store_thread(make))

    async def _change(self, served: ServedTopic, work: Callable[[], Awaitable[None]]) -> None:
        """Does the work when no other change of the topic runs; NotFoundError when it was deleted before that."""

        async def alone() -> None:
            async with served.changing:
                if self._topics.get(served.name) is not served:
                    raise NotFoundError(f"the topic {served.name} was deleted")
                await work()

        await asyncio.shield(asyncio.ensure_future(alone()))

    async def grow(self, served: ServedTopic, count: int) -> None:
        """Gives a topic more partitions."""

        def divide() -> tuple[int, int]:
            self.directory.topic(str(served.name), partitions=count)
            return self._facts(served.name)

        async def work() -> None:
            _, grown = await in_store_thread(divide)
            await self.placement.grow(served.name, grown)
            served.count = grown
            self._changed()

        await self._change(served, work)

    async def delete(self, served: ServedTopic) -> None:
        """Deletes a topic with everything in it; requests that wait for it end. When that fails, it stays."""

        async def work() -> None:
            deleting = self._deleting[served.name] = asyncio.get_running_loop().create_future()
            if not self.placement.is_alone:
                try:
                    await self.placement.delete(served.name, lambda: self.remove_topic(served.name))
                finally:
                    del self._deleting[served.name]
                    deleting.set_result(None)
                return
            self._forget(served)
            try:
                while served.opening:
                    await asyncio.wait(list(served.opening.values()))
                _close_all(served)
                await in_store_thread(lambda: self.directory.delete_topic(str(served.name)))
                await self._forget_dead_letters()
            except TidelogError:
                if await in_store_thread(self._is_whole, served.name):
                    self._topics[served.name] = self._by_id[served.id] = served
                    self._changed()
                raise
            finally:
                del self._deleting[served.name]
                deleting.set_result(None)

        await self._change(served, work)

    async def seal(self, served: ServedTopic) -> None:
        """Seals a topic for another owner, and keeps it closed here. When that fails, it is served on."""

        async def work() -> None:
            if served.is_sealed:
                return  # to seal it again it would have to be opened, and claimed
            served.is_sealed = True
            try:
                while served.opening:
                    await asyncio.wait(list(served.opening.values()))
                await in_store_thread(self._seal, served)
            except BaseException:
                served.is_sealed = False
                raise
            _close_all(served)

        await self._change(served, work)

    def _seal(self, served: ServedTopic) -> None:
        """In a thread: all partitions, or those of this node."""
        topic: Topic | PartitionedTopic = self.directory.topic(str(served.name))
        if self.placement.is_alone or isinstance(topic, Topic):
            topic.seal()
            return
        for number in range(served.count):
            if self.placement.is_ours(served.name, number):
                topic.partition(number).seal()

    def _forget(self, served: ServedTopic) -> None:
        self._topics.pop(served.name, None)
        self._by_id.pop(served.id, None)
        _close_all(served)
        self._changed()

    async def _forget_dead_letters(self) -> None:
        """Topics for dead letters that were deleted with their topic, since they were empty."""
        candidates = [topic for topic in self._topics.values() if is_dead_letter_name(topic.name.name)]
        there = await in_store_thread(lambda: [self.directory.has_topic(str(topic.name)) for topic in candidates])
        for topic, is_there in zip(candidates, there, strict=True):
            if not is_there:
                self._forget(topic)

    def _is_whole(self, name: TopicName) -> bool:
        """In a thread: whether nothing of a topic was deleted."""
        layout = self.directory._opener.layout(name)
        return self.directory.has_topic(str(name)) and (layout is None or not layout.is_deleted)

    # Configs

    @property
    def has_store(self) -> bool:
        return self.directory._tier is not None

    @property
    def topic_defaults(self) -> TierSettings:
        """The settings of a topic that has none of its own."""
        return self.directory._opener.effective({})

    def _compression_of(self, name: TopicName) -> Compression:
        """In a thread."""
        return serving_of(self.configs_of(name), self.settings.max_batch_bytes).compression

    def settings_for(self, configs: dict[str, str]) -> dict[str, object]:
        """The library's settings for a new topic with these configs."""
        found = settings_of(configs, self.topic_defaults)
        return {name: value for name, value in found.items() if value is not None}

    def configs_of(self, name: TopicName) -> dict[str, str]:
        """In a thread: the configs that a topic was given."""
        return configs_of(self.directory._opener.settings_of(name), self.topic_defaults)

    async def configure(self, served: ServedTopic, configs: dict[str, str]) -> None:
        """Gives a topic these configs and no others; its open partitions follow at once."""
        settings = settings_of(configs, self.topic_defaults)

        async def work() -> None:
            await in_store_thread(self._configure, served, settings)
            serving = serving_of(configs, self.settings.max_batch_bytes)
            for partition in served.open.values():
                partition.configure(serving)

        await self._change(served, work)

    async def change_settings(self, served: ServedTopic, settings: dict[str, object]) -> None:
        """Changes settings of the library for a topic; None takes one back. Its open partitions follow at once."""

        def change() -> dict[str, str]:
            self._configure(served, settings)
            return self.configs_of(served.name)

        async def work() -> None:
            serving = serving_of(await in_store_thread(change), self.settings.max_batch_bytes)
            for partition in served.open.values():
                partition.configure(serving)

        await self._change(served, work)

    def _configure(self, served: ServedTopic, settings: dict[str, object]) -> None:
        """In a thread; also for a topic that another node created a moment ago and none has opened."""
        self._realize(served, None)
        if self.placement.is_alone or self.directory._opener.exists(served.name):
            self.directory.configure_topic(str(served.name), **settings)  # type: ignore[arg-type]
        else:
            self.directory._opener.configure(served.name, settings)

    def broker_configs(self) -> dict[str, str]:
        """What DescribeConfigs says of this broker."""
        settings, defaults, address = self.settings, self.topic_defaults, self.address
        retention_seconds, retention_bytes = defaults.retention_seconds, defaults.retention_bytes
        values: dict[str, object] = {
            "advertised.listeners": f"PLAINTEXT://{address.host}:{address.port}",
            "auto.create.topics.enable": settings.auto_create_topics,
            "broker.id": self.node_id,
            "compression.type": "producer",
            "connections.max.idle.ms": int(settings.idle_seconds * 1000),
            "default.replication.factor": 1,
            "delete.topic.enable": True,
            "fetch.max.bytes": settings.max_fetch_bytes,
            "log.cleanup.policy": "compact" if defaults.compaction == "by_key" else "delete",
            "log.dirs": self.directory.root,
            "log.message.timestamp.type": "CreateTime",
            "log.retention.bytes": -1 if retention_bytes is None else retention_bytes,
            "log.retention.ms": -1 if retention_seconds is None else retention_seconds * 1000,
            "max.connections": settings.max_connections,
            "message.max.bytes": settings.max_batch_bytes,
            "min.insync.replicas": 1,
            "node.id": self.node_id,
            "num.partitions": settings.default_partitions,
            "remote.log.storage.system.enable": self.has_store,
            "socket.request.max.bytes": settings.max_request_bytes,
            "unclean.leader.election.enable": False,
        }
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}

    # Partitions

    def opened(self, served: ServedTopic, number: int) -> Partition | None:
        """A partition that is open already, and ours: a node that is cut off from the others stops to answer for it
        before another one may have it."""
        partition = served.open.get(number)
        if partition is not None and not self.placement.is_alone and not self.placement.is_ours(served.name, number):
            return None
        if partition is not None and not partition.is_open:
            del served.open[number]  # it was sealed, or failed: the next request opens it again
            partition.close()
            return None
        return partition

    async def partition(self, served: ServedTopic, number: int) -> Partition:
        """A partition, opened if need be; NotFoundError when the topic has none of this number."""
        partition = self.opened(served, number)
        if partition is not None:
            return partition
        if not 0 <= number < served.count:
            raise NotFoundError(f"{served.name} has {served.count} partitions, and none has the number {number}")
        if self._topics.get(served.name) is not served:
            raise NotFoundError(f"the topic {served.name} was deleted")
        if served.is_sealed:
            raise ClosedError(f"the topic {served.name} is sealed", hint="Open it again on purpose to own it again")
        if not self.placement.is_alone:
            self._check_ours(served, number)
        running = served.opening.get(number)
        if running is None:
            running = asyncio.ensure_future(self._open(served, number))
            served.opening[number] = running
            running.add_done_callback(lambda done: self._opened(served, number, done))
        return await asyncio.shield(running)

    @property
    def read_counts(self) -> ReadCounts:
        """Where reads of consumers were answered from."""
        return self._cold.counts

    @property
    def cold_reads_under_way(self) -> int:
        """How many reads wait for the store now."""
        return self._cold.under_way

    async def read_cold(self, read: Callable[[], Awaitable[Result]]) -> Result:
        """A read that waits for the store, when there is room for one more of these."""
        return await self._cold.run(read)

    def _opened(self, served: ServedTopic, number: int, done: asyncio.Future[Partition]) -> None:
        del served.opening[number]
        if not done.cancelled():
            done.exception()

    async def _open(self, served: ServedTopic, number: int) -> Partition:
        await self._pause_before_opening(served, number)

        def open_log() -> tuple[Topic, StoredProducers, PartitionProducers, Serving]:
            layout = self._realize(served, number)
            self.directory._close_failed(served.name if layout is None else served.name.log_of(number, layout))
            topic: Topic | PartitionedTopic = self.directory.topic(str(served.name))
            if layout is not None and isinstance(topic, Topic):  # another node has divided it
                topic = self.directory.topic(str(served.name), partitions=layout.count)
            log = topic.partition(number)
            if log._tiered is not None:
                log._tiered.epoch_starts()  # recorded before the first batch is answered
            stored = StoredProducers(log)
            serving = serving_of(self.configs_of(served.name), self.settings.max_batch_bytes)
            return log, stored, stored.load(), serving

        def open_log_reading_once() -> tuple[Topic, StoredProducers, PartitionProducers, Serving]:
            with self.directory._opener.reading_once(served.name):
                return open_log()

        try:
            opened = await in_store_thread(open_log_reading_once)
        except (LockedError, ConflictError) as error:
            if not self.placement.is_alone:  # the node before has not let go yet
                raise NotOwnerError(f"{served.name}, partition {number}", None) from error
            if isinstance(error, LockedError) and number not in served.held:
                served.held.add(number)
                _logger.warning(_HELD, served.name, number, error.message)
            raise
        served.held.discard(number)
        partition = Partition(served.name, number, *opened, self._cold, self._encoded)
        served.open[number] = partition
        self.on_open(str(served.name), number, partition.topic.next_offset)
        return partition

    def _realize(self, served: ServedTopic, number: int | None) -> PartitionLayout | None:
        """In a thread: records in the catalog what a topic was created with on some node, unless that was done; how it
        is divided. What this disk says of an earlier topic of that name does not count; with a number, nor what it says
        of that partition."""
        listed = self.placement.topics()
        facts = None if listed is None else listed.get(served.name)
        opener = self.directory._opener
        layout = opener.layout(served.name)
        if facts is None:
            return layout
        log_name = served.name if layout is None or number is None else served.name.log_of(number, layout)
        for name in {served.name, log_name} - self.directory._topics.keys():
            opener.forget_earlier(name, facts.created_us)
        if facts.settings and not opener.has_settings(served.name):
            opener.configure(served.name, facts.settings)
        if facts.partitions > (1 if layout is None else layout.count):
            self.directory.topic(str(served.name), partitions=facts.partitions)
            return opener.layout(served.name)
        return layout

    async def log_names(self, served: ServedTopic) -> list[str]:
        """The names of the logs of its partitions, also of a topic that was created a moment ago and none is open."""

        def names() -> list[str]:
            self._realize(served, None)
            return self.directory.partition_logs(str(served.name))

        return await in_store_thread(names)

    async def _pause_before_opening(self, served: ServedTopic, number: int) -> None:
        """A disk that fails again and again is not asked more often than this; nor is one that another node has."""
        pause_seconds = _REOPEN_SECONDS if self.placement.is_alone else _ASK_AGAIN_SECONDS
        now = asyncio.get_running_loop().time()
        before = served.opened_at.get(number)
        if before is not None and before + pause_seconds > now:
            await asyncio.sleep(before + pause_seconds - now)
        served.opened_at[number] = asyncio.get_running_loop().time()

    # For transactions

    async def has_partition(self, topic: str, partition: int) -> bool:
        served = self.find(parse_topic_name(topic))
        return served is not None and 0 <= partition < served.count

    async def write_marker(self, topic: str, partition: int, control: Control) -> None:
        """Ends a transaction in a partition, at its owner; NotFoundError when there is none of this name and
        number."""
        is_elsewhere = not self.placement.is_ours(parse_topic_name(topic), partition)
        if is_elsewhere and self.find(parse_topic_name(topic)) is not None:
            assert self.write_marker_elsewhere is not None, "a node by itself serves everything"
            await self.write_marker_elsewhere(topic, partition, control)
        else:
            await self.write_own_marker(topic, partition, control)

    async def write_own_marker(self, topic: str, partition: int, control: Control) -> None:
        """The same in a partition of this node."""
        served = self.find(parse_topic_name(topic))
        if served is None:
            raise NotFoundError(f"there is no topic {topic}")
        found = await self.partition(served, partition)
        self.on_marker(topic, partition, control.producer_id)
        await found.write_marker(control)

    async def _look_after(self) -> None:
        """Notices topics that this process has opened by itself, as those for dead letters; closes idle readers."""
        while True:
            await asyncio.sleep(_UPKEEP_SECONDS)
            for name in (
                set()
                if not self.placement.is_alone
                else set(self.directory._topics) - self._topics.keys() - self._passed_over
            ):
                await self._adopt(name)
            if not self.placement.is_alone:
                with contextlib.suppress(TidelogError):  # the next look finds it
                    await self._follow_settings()
            now = asyncio.get_running_loop().time()
            self.stored.close_idle(now)
            for served in self._topics.values():
                for partition in served.open.values():
                    partition.reader.close_idle(now)

    async def find_opened(self, name: TopicName) -> ServedTopic | None:
        """A topic that this process has opened by itself a moment ago, as one for dead letters."""
        if name in self.directory._topics:
            await self._adopt(name)
        return self._topics.get(name)

    async def _adopt(self, name: TopicName) -> None:
        is_partition = name.parent() is not None
        if is_partition or name in self._creating or name in self._deleting:
            return
        with contextlib.suppress(TidelogError):  # the next look finds it
            if await in_store_thread(lambda: self._is_served(name)):
                self._add(name, *await in_store_thread(lambda: self._facts(name)))
            else:
                self._passed_over.add(name)

    async def stop(self) -> None:
        """Ends what waits here. The directory is closed by its owner."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        self.stored.close()
        for served in self._topics.values():
            _close_all(served)


def _installation_id(directory: LogDirectory) -> str:
    """The same for all nodes over one store and one catalog."""
    place = directory._info
    return hashlib.sha256(f"{place.store} {place.metadata_root}".encode()).hexdigest()[:22]


def _close_all(served: ServedTopic) -> None:
    for partition in served.open.values():
        partition.close()
    served.open.clear()


_CODES: tuple[tuple[type[TidelogError], ErrorCode], ...] = (
    (TopicNameError, ErrorCode.INVALID_TOPIC_EXCEPTION),
    (OffsetOutOfRangeError, ErrorCode.OFFSET_OUT_OF_RANGE),
    (NotFoundError, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    (MessageTooLargeError, ErrorCode.MESSAGE_TOO_LARGE),
    (LockedError, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (FencedError, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (ClosedError, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (BackpressureError, ErrorCode.REQUEST_TIMED_OUT),
    (InputError, ErrorCode.INVALID_REQUEST),
)


def error_code(error: TidelogError) -> ErrorCode:
    """What Kafka calls an error. What is not the client's doing is a storage error, which clients try again."""
    if isinstance(error, RecordError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.KAFKA_STORAGE_ERROR)
