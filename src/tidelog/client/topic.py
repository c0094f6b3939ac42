"""A topic of a server: the names of an embedded topic, over the network.

Invariants
- An append is stored once, whatever becomes of connections and server meanwhile (`producer.py`). It returns when the
  server has the message in a file, with `sync` when it is on the disk.
- Offsets are those of the moment at which the server answers: each look at a property is a request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, Unpack

import msgspec

from tidelog.client.bridge import Bridge, both, waited
from tidelog.client.consumer import RemoteConsumer
from tidelog.client.producer import Appender, Appends, RemoteProducer, Sending, new_name, sends_one, sends_several
from tidelog.client.reading import AnyReader, Positions, Reader, SpreadReader, Wanted, read, read_async
from tidelog.client.tail import PartitionState, TopicState, described
from tidelog.client.transport import Http, operate, path_of
from tidelog.client.wire import Appendable, checked, checked_several
from tidelog.errors import InputError, NotFoundError
from tidelog.findings import VerifyReport
from tidelog.log.isolation import READ_COMMITTED, Isolation
from tidelog.log.reader import Position, checked_offset
from tidelog.store.aio import twin_by
from tidelog.topics.base import TopicStatistics, check_only_partition
from tidelog.topics.message import HeadersGiven, Message, OnGap, Sync
from tidelog.topics.names import TopicName
from tidelog.topics.partitioned import (
    PartitionedTopicStatistics,
    no_such_partition,
    offset_of_which_partition,
    partition_of,
)
from tidelog.topics.producer.registry import check_name
from tidelog.topics.subscription.feed import Filter
from tidelog.topics.subscription.options import Kind, SubscribeOptions


class Link:
    """What the objects of one client share."""

    def __init__(self, bridge: Bridge, http: Http, prefetch: int) -> None:
        self.bridge = bridge
        self.http = http
        self.prefetch = prefetch


def _statistics_of(name: str, stand: PartitionState) -> TopicStatistics:
    return TopicStatistics(
        name=name,
        start_offset=stand.start_offset,
        next_offset=stand.next_offset,
        hot_start_offset=stand.hot_start_offset,
        shipped_offset=stand.shipped_offset,
        log=None,
        tier=None,
    )


class _Topic:
    """What both kinds of topics have."""

    def __init__(self, link: Link, name: TopicName, partition: int | None) -> None:
        """`partition` is None for a topic with several."""
        self._link = link
        self._bridge = link.bridge
        self._http = link.http
        self._topic_name = name
        self._partition = partition
        self._path = path_of("topics", name.namespace, name.name)
        self._appender = Appender(link.bridge, link.http, self._path, partition, new_name())

    @property
    def name(self) -> str:
        """`namespace/name`."""
        return str(self._topic_name)

    @property
    def partitions(self) -> int:
        """How many partitions it has."""
        return 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    # Where it stands

    async def _state(self) -> TopicState:
        return await described(self._http, self._path)

    async def _flush(self) -> None:
        """Returns once everything that the server has accepted so far is on its disk."""
        await self._http.json("POST", f"{self._path}/flush")

    async def _prune(self) -> None:
        """Deletes now what the retention settings say."""
        await operate(self._http, f"{self._path}/retention")

    async def _seal(self) -> None:
        """Seals the topic for another owner: the server ships everything and closes it."""
        await operate(self._http, f"{self._path}/seal")

    async def _verify(self, *, cold: bool = True) -> VerifyReport:
        """Has the server read and check every frame on its disk and, with `cold`, every object in the store."""
        found = await operate(self._http, f"{self._path}/verify", {"cold": cold})
        return msgspec.convert({name: found[name] for name in VerifyReport.__struct_fields__}, VerifyReport)

    _is_one_of_several = False

    flush, flush_async = both(_flush)
    prune, prune_async = both(_prune)
    seal, seal_async = both(_seal)
    verify, verify_async = both(_verify)

    # Producers

    async def _producer(self, name: str) -> RemoteProducer:
        """Returns a producer: repeated appends of the same producer and sequence are stored once."""
        check_name(name)
        made = RemoteProducer(self._bridge, self._http, self._path, self._partition, name)
        await made._open()
        return made

    producer, producer_async = both(_producer)

    # Subscriptions

    async def _subscribe(
        self,
        name: str,
        kind: Kind = "exclusive",
        *,
        start: Positions = "earliest",
        consumer: str | None = None,
        filter: Filter | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> RemoteConsumer:
        """Returns a consumer of the subscription of this name, which is created at `start` if it is new.

        It is as with an embedded log; a `filter` that is a function is called here, and what it refuses is
        acknowledged.
        """
        if self._is_one_of_several:
            raise InputError("subscribe to the topic, not to one of its partitions")
        made = RemoteConsumer(
            self._bridge,
            self._http,
            self.name,
            self._path,
            self.partitions,
            name,
            kind,
            start,
            consumer,
            filter,
            options,
            self._link.prefetch,
        )
        await made.open()
        return made

    async def _subscriptions(self) -> list[str]:
        """The names of the subscriptions."""
        found = await self._http.json("GET", f"{self._path}/subscriptions")
        return [one["name"] for one in found["subscriptions"] if one["kind"] != "group"]

    async def _delete_subscription(self, name: str) -> None:
        """Forgets a subscription and how far it is; ConflictError while it has consumers."""
        await self._http.json("DELETE", f"{self._path}/subscriptions/{path_of(name).removeprefix('/v1/')}")

    subscribe, subscribe_async = both(_subscribe)
    subscriptions, subscriptions_async = both(_subscriptions)
    delete_subscription, delete_subscription_async = both(_delete_subscription)


async def _shipped(http: Http, path: str, partition: int) -> int:
    found = await operate(http, f"{path}/ship", {"partition": partition})
    shipped: int = found["shipped_offsets"][str(partition)]
    return shipped


async def _purge(http: Http, path: str, before: Mapping[int, int]) -> dict[int, int]:
    document = {"before": {str(number): checked_offset(offset) for number, offset in before.items()}}
    found = await http.json("POST", f"{path}/purge", document)
    return {int(number): offset for number, offset in found["start_offsets"].items()}


class RemoteTopic(_Topic):
    """A topic of a server, or one partition of it. Any number of threads and tasks may use it at once."""

    is_reliable = True
    """Whether its messages are stored."""

    def __init__(self, link: Link, name: TopicName, partition: int = 0, *, is_one_of_several: bool = False) -> None:
        super().__init__(link, name, partition)
        self._is_one_of_several = is_one_of_several

    def partition(self, number: int) -> RemoteTopic:
        """Partition 0, which is the topic itself."""
        check_only_partition(self.name, number)
        return self

    # Where it stands

    async def _stand(self) -> PartitionState:
        state = await self._state()
        found = next((one for one in state.partitions if one.partition == self._partition), None)
        if found is None:
            raise NotFoundError(f"{self.name} has no partition {self._partition}")
        return found

    async def _statistics(self) -> TopicStatistics:
        """Where the topic stands at one moment; what only its process knows is None."""
        return _statistics_of(self.name, await self._stand())

    statistics, statistics_async = both(_statistics)

    @property
    def next_offset(self) -> int:
        """The offset that the next message gets."""
        return self._bridge.wait(self._stand()).next_offset

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._bridge.wait(self._stand()).start_offset

    @property
    def hot_start_offset(self) -> int:
        """The oldest offset that is on the server's disk."""
        return self._bridge.wait(self._stand()).hot_start_offset

    @property
    def durable_offset(self) -> int:
        """Everything below is synced to the server's disk."""
        return self._bridge.wait(self._stand()).durable_offset

    @property
    def shipped_offset(self) -> int:
        """Everything below is in the object store; 0 without one."""
        return self._bridge.wait(self._stand()).shipped_offset

    async def _ship(self) -> int:
        """Ships everything accepted so far to the object store; returns the first offset that is not shipped."""
        return await _shipped(self._http, self._path, self._partition or 0)

    async def _delete_before(self, offset: int) -> int:
        """Deletes every message below an offset, for good, and returns the offset that the topic begins with then."""
        number = self._partition or 0
        return (await _purge(self._http, self._path, {number: offset}))[number]

    ship, ship_async = both(_ship)
    delete_before, delete_before_async = both(_delete_before)

    # Appending

    def _append(
        self,
        value: bytes | Message | None,
        *,
        key: bytes | None = None,
        headers: HeadersGiven | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> Sending:
        """Appends a message and returns its offset, once the server has it in a file: a kill of the server does not
        take it. With `sync` it is on the disk and, with `sync="shipped"`, also in the object store.

        Appends of several threads or tasks share requests. `timeout` is the server's for backpressure and the store;
        how long an unreachable server is tried is the client's.
        """
        return Sending(self._appender, [checked(value, key, headers, timestamp, deliver_at)], sync, timeout)

    def _append_many(
        self, messages: Iterable[bytes | Message], *, sync: Sync = False, timeout: float | str | None = None
    ) -> Sending:
        """Appends messages atomically with consecutive offsets; returns the offsets."""
        return Sending(self._appender, checked_several(messages), sync, timeout)

    append, append_async = sends_one(_append)
    append_many, append_many_async = sends_several(_append_many)

    # Reading

    def read(
        self,
        start: Position = "earliest",
        stop: Position | None = None,
        *,
        follow: bool = False,
        on_gap: OnGap = "raise",
        isolation: Isolation = READ_COMMITTED,
    ) -> Iterator[Message]:
        """Messages from `start` (an offset, "earliest", "latest" or a datetime) up to `stop` (exclusive), in order.

        As with an embedded log: without `follow` it ends at the offset that is next now.
        """
        return read(self._bridge, self._reader(start, stop, follow, on_gap, isolation))

    def _read_async(self, *wanted: Any, **options: Any) -> AsyncIterator[Message]:
        return read_async(self._bridge, self._reader(*wanted, **options))

    read_async = twin_by(read, _read_async, "The positions are resolved when the iteration begins.")

    def _reader(
        self, start: Position, stop: Position | None, follow: bool, on_gap: OnGap, isolation: Isolation
    ) -> Reader:
        return Reader(self._http, self._path, self._partition, Wanted(start, stop, follow, on_gap, isolation))


class RemotePartitionedTopic(_Topic):
    """A topic of a server with several partitions: messages go to that of their key."""

    is_reliable = True

    def __init__(self, link: Link, name: TopicName, partitions: int, *, is_placed: bool = False) -> None:
        """`is_placed`: several nodes may serve its partitions, and each is asked for by itself."""
        super().__init__(link, name, None)
        self._count = partitions
        self._is_placed = is_placed
        self._spread = _Spread(self)
        self._opened: dict[int, RemoteTopic] = {}
        self._appenders: dict[int, Appender] = {}

    @property
    def partitions(self) -> int:
        """How many partitions it had when it was last looked at."""
        return self._count

    def partition(self, number: int) -> RemoteTopic:
        """One of the partitions, as a topic of its own."""
        if type(number) is not int or not 0 <= number < self._count:
            raise no_such_partition(self.name, self._count, number)
        return self._opened.setdefault(
            number, RemoteTopic(self._link, self._topic_name, number, is_one_of_several=True)
        )

    # Where it stands

    async def _offsets(self, field: str) -> dict[int, int]:
        state = await self._state()
        self._count = max(self._count, len(state.partitions))
        return {one.partition: getattr(one, field) for one in state.partitions}

    @property
    def next_offsets(self) -> dict[int, int]:
        """The offset that the next message gets, in each partition."""
        return self._bridge.wait(self._offsets("next_offset"))

    @property
    def start_offsets(self) -> dict[int, int]:
        """The oldest offset that can be read, in each partition."""
        return self._bridge.wait(self._offsets("start_offset"))

    @property
    def shipped_offsets(self) -> dict[int, int]:
        """Everything below is in the object store, in each partition."""
        return self._bridge.wait(self._offsets("shipped_offset"))

    async def _statistics(self) -> PartitionedTopicStatistics:
        """Where the partitions stand at one moment."""
        state = await self._state()
        self._count = max(self._count, len(state.partitions))
        parts = {one.partition: _statistics_of(self.name, one) for one in state.partitions}
        return PartitionedTopicStatistics(name=self.name, partitions=parts)

    async def _ship(self) -> dict[int, int]:
        """Ships everything accepted so far; returns the first offset of each partition that is not shipped."""
        if self._is_placed:
            numbers = range(self._count)
            shipped = await asyncio.gather(*(_shipped(self._http, self._path, number) for number in numbers))
            return dict(zip(numbers, shipped, strict=True))
        found = await operate(self._http, f"{self._path}/ship")
        return {int(number): offset for number, offset in found["shipped_offsets"].items()}

    async def _delete_before(self, offsets: Mapping[int, int]) -> dict[int, int]:
        """Deletes the messages below an offset of each partition that is named, for good."""
        if not isinstance(offsets, Mapping):
            raise offset_of_which_partition(self.name, self._count, "offsets", offsets)
        found = await _purge(self._http, self._path, offsets)
        return {number: found[number] for number in offsets}

    statistics, statistics_async = both(_statistics)
    ship, ship_async = both(_ship)
    delete_before, delete_before_async = both(_delete_before)

    # Appending

    def _target(self, partition: int | None) -> Appends:
        if partition is None:
            return self._spread if self._is_placed else self._appender
        return self._appender_of(partition)

    def _appender_of(self, partition: int) -> Appender:
        self.partition(partition)  # it has to exist
        if partition not in self._appenders:
            made = Appender(self._bridge, self._http, self._path, partition, new_name(), says_partition=True)
            self._appenders.setdefault(partition, made)
        return self._appenders[partition]

    def _append(
        self,
        value: bytes | Message | None,
        *,
        key: bytes | None = None,
        headers: HeadersGiven | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        partition: int | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> Sending:
        """Appends a message to the partition of its key, or to the one that is named; its offset has `partition`."""
        message = checked(value, key, headers, timestamp, deliver_at)
        return Sending(self._target(partition), [message], sync, timeout)

    def _append_many(
        self,
        messages: Iterable[bytes | Message],
        *,
        partition: int | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> Sending:
        """Appends messages, those of one partition atomically; returns their offsets in the order given."""
        return Sending(self._target(partition), checked_several(messages), sync, timeout)

    append, append_async = sends_one(_append)
    append_many, append_many_async = sends_several(_append_many)

    # Reading

    def read(
        self,
        start: Positions = "earliest",
        stop: Positions | None = None,
        *,
        follow: bool = False,
        on_gap: OnGap = "raise",
        isolation: Isolation = READ_COMMITTED,
    ) -> Iterator[Message]:
        """Messages of all partitions, merged by time page by page; each has its `partition` and its offset there.

        `start` and `stop` are "earliest", "latest" or a datetime, or a mapping of partitions to offsets.
        """
        return read(self._bridge, self._reader(start, stop, follow, on_gap, isolation))

    def _read_async(self, *wanted: Any, **options: Any) -> AsyncIterator[Message]:
        return read_async(self._bridge, self._reader(*wanted, **options))

    read_async = twin_by(read, _read_async, "The positions are resolved when the iteration begins.")

    def _reader(
        self, start: Positions, stop: Positions | None, follow: bool, on_gap: OnGap, isolation: Isolation
    ) -> AnyReader:
        for name, given in (("start", start), ("stop", stop)):
            if isinstance(given, int):
                raise offset_of_which_partition(self.name, self._count, name, given)
        wanted = Wanted(start, stop, follow, on_gap, isolation)
        if self._is_placed:
            return SpreadReader(self._http, self._path, self._count, wanted)
        return Reader(self._http, self._path, None, wanted)


class _Spread:
    """Appends to partitions that several nodes serve: each message goes to that of its key."""

    def __init__(self, topic: RemotePartitionedTopic) -> None:
        self._topic = topic
        self._turns = itertools.count()

    def append(
        self, messages: Sequence[Appendable], sync: Sync, timeout: float | str | None, sequence: int | None = None
    ) -> list[int]:
        return waited(self.put(messages, sync, timeout, sequence))

    def put(
        self, messages: Sequence[Appendable], sync: Sync, timeout: float | str | None, sequence: int | None = None
    ) -> Future[list[int]]:
        topic, count = self._topic, self._topic.partitions
        groups: dict[int, list[int]] = {}
        for_keyless: int | None = None
        for index, message in enumerate(messages):
            key = None if isinstance(message, bytes) else message.key
            if key is None and for_keyless is None:
                for_keyless = next(self._turns) % count
            number = partition_of(key, count) if key is not None else for_keyless
            groups.setdefault(number or 0, []).append(index)
        parts = {
            number: topic._appender_of(number).put([messages[index] for index in indexes], sync, timeout)
            for number, indexes in groups.items()
        }
        return topic._bridge.start(_joined(len(messages), groups, parts))


async def _joined(count: int, groups: Mapping[int, list[int]], parts: Mapping[int, Future[list[int]]]) -> list[int]:
    """The offsets of messages that went to several partitions, in the order given; the first error after all ended."""
    offsets = [0] * count
    ended = await asyncio.gather(*map(asyncio.wrap_future, parts.values()), return_exceptions=True)
    for indexes, found in zip(groups.values(), ended, strict=True):
        if isinstance(found, BaseException):
            raise found
        for index, offset in zip(indexes, found, strict=True):
            offsets[index] = offset
    return offsets
