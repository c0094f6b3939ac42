"""A topic with partitions: its messages are spread over several logs, each of which is a topic of its own.

    shop/orders, 3 partitions    shop/orders-part-0, shop/orders-part-1, shop/orders-part-2
    shop/orders, grown from 1    shop/orders, shop/orders-part-1, shop/orders-part-2

Invariants
- Messages with the same key go to the same partition, the one that Kafka's clients choose (murmur2), unless the caller
  names one or the number of partitions changes. Within a partition there is one order; across partitions there is none.
- Offsets, durability, ownership and retention are each partition's own. `append_many` is atomic for the messages of one
  partition.
- The number of partitions never shrinks. It is recorded before the first message goes to a new partition.
- A partition is opened when it is first used: several nodes may each own some of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Literal, TypeVar, Unpack

import msgspec

from tidelog import _native
from tidelog.cold.catalog import PartitionLayout
from tidelog.errors import ClosedError, ConflictError, Hint, InputError, NotFoundError, TidelogError
from tidelog.findings import VerifyReport, merged
from tidelog.log import Position
from tidelog.log.append_queue import Bell
from tidelog.log.isolation import READ_COMMITTED, Isolation
from tidelog.log.reader import BatchReader
from tidelog.store.aio import ClosedAtExit, twin, twin_by, twin_of
from tidelog.store.scheduler import in_parallel
from tidelog.topics.base import TopicStatistics
from tidelog.topics.latest_by_key import LatestByKey
from tidelog.topics.message import AppendOptions, Message, OnGap, Sync, several
from tidelog.topics.names import TopicName
from tidelog.topics.producer.producer import Producer, checked_sequence
from tidelog.topics.producer.registry import check_name
from tidelog.topics.subscription.consumer import Consumer, Lag, checked_count, checked_timeout
from tidelog.topics.subscription.feed import Filter
from tidelog.topics.subscription.options import Kind, SubscribeOptions
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.subscription.registry import SubscriptionInfo, subscription_not_found
from tidelog.topics.subscription.subscription import Part, receive_from_any, receive_from_any_async
from tidelog.topics.topic import Topic

_AT_ONCE = 16
# A topic that another process owns tells nobody of its messages.
_POLL_SECONDS = 0.1

Positions = Position | Mapping[int, Position]
"""Where to begin in every partition, or an offset for each; partitions that a mapping leaves out are left out."""
Order = Literal["time", "arrival"]
Result = TypeVar("Result")


class PartitionOffset(int):
    """An offset, and the partition whose offset it is."""

    partition: int

    def __new__(cls, offset: int, partition: int) -> PartitionOffset:
        made = super().__new__(cls, offset)
        made.partition = partition
        return made

    def __repr__(self) -> str:
        return f"PartitionOffset({int(self)}, partition={self.partition})"

    def __reduce__(self) -> tuple[type[PartitionOffset], tuple[int, int]]:
        return PartitionOffset, (int(self), self.partition)


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, as Kafka's clients choose it."""
    if not isinstance(key, bytes | bytearray | memoryview):
        raise InputError(
            f"key must be bytes, not {type(key).__name__}", hint="Encode text first, for example with .encode()"
        )
    return (_native.murmur2(key) & 0x7FFFFFFF) % partitions


def no_such_partition(topic: str, partitions: int, number: object) -> InputError:
    """For a number that no partition has."""
    return InputError(
        f"{topic} has partitions 0 to {partitions - 1}, not {number!r}",
        hint=Hint(
            "log.topic(name, partitions=...) with a larger number adds partitions",
            command=f"--partition takes 0 to {partitions - 1}",
        ),
    )


def offset_of_which_partition(topic: str, partitions: int, name: str, given: object) -> InputError:
    """For an offset alone. `name` is the argument."""
    return InputError(
        f"{topic} has {partitions} partitions, and each has its own offsets: {given!r} alone names none",
        hint=Hint(
            f"Give an offset for each, as in {name}={{0: {given!r}}}, or use topic.partition(n)",
            command="Choose one with --partition N, or name a time, earliest or latest",
        ),
    )


def message_of_which_partition(given: object) -> InputError:
    """For what is settled by its offset alone."""
    return InputError(
        f"expected a message that was received, got {given!r}", hint="An offset alone does not say its partition"
    )


class PartitionedTopicStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a topic with partitions, those that are open in this process."""

    name: str
    partitions: Mapping[int, TopicStatistics]


class PartitionedTopic:
    """A topic with partitions; `log.topic(name, partitions=8)` makes it. Threads and tasks may share it."""

    is_reliable = True

    def __init__(
        self,
        name: TopicName,
        layout: PartitionLayout,
        read_layout: Callable[[], PartitionLayout],
        open_partition: Callable[[int, PartitionLayout], Topic],
        forget: Callable[[], object],
    ) -> None:
        """`read_layout` returns what is recorded by now, or raises. `open_partition` returns the log of a partition as
        a topic, always the same while it is open; `forget` is called when this object can be used no longer."""
        self._name = name
        self._forget = forget
        self._over: Callable[[], TidelogError] | None = None
        self._layout = layout
        self._read_layout = read_layout
        self._open_partition = open_partition
        self._open: dict[int, Topic] = {}
        self._turns = itertools.count()

    @property
    def name(self) -> str:
        """`namespace/name`."""
        return str(self._name)

    @property
    def partitions(self) -> int:
        """How many partitions it has; `log.topic(name, partitions=...)` with a larger number adds some.

        Those that another node adds are noticed when a partition is opened.
        """
        return self._layout.count

    def __repr__(self) -> str:
        return f"<PartitionedTopic {self.name} of {self.partitions}>"

    def partition(self, number: int) -> Topic:
        """One partition, as a topic with offsets, readers, subscriptions and statistics of its own."""
        known = self._open.get(number)
        if known is not None and known._is_open:
            return known
        if self._over is not None:
            raise self._over()
        if type(number) is int and number >= 0:
            self._grown(self._read_layout())  # another node may have added some
        if type(number) is not int or not 0 <= number < self.partitions:
            raise no_such_partition(self.name, self.partitions, number)
        opened = self._open[number] = self._open_partition(number, self._layout)
        return opened

    partition_async = twin(partition)

    def _each(self, work: Callable[[Topic], Result]) -> list[Result]:
        """The work done for every partition, several at a time; all are tried before the first error is raised."""
        numbers = range(self.partitions)
        return in_parallel(lambda number: work(self.partition(number)), numbers, _AT_ONCE, "tidelog-partitions")

    def _end(self, make_error: Callable[[], TidelogError]) -> None:
        """The topic is deleted, or moves: nothing is opened through this object any more."""
        self._over = make_error
        self._forget()

    def _grown(self, layout: PartitionLayout) -> None:
        """So many partitions are recorded. There may be more of them, never fewer."""
        if layout.count > self._layout.count:
            self._layout = layout

    # Where it stands

    @property
    def next_offsets(self) -> dict[int, int]:
        """The offset that the next message of each partition gets."""
        return dict(enumerate(self._each(lambda topic: topic.next_offset)))

    @property
    def start_offsets(self) -> dict[int, int]:
        """The oldest offset of each partition that can be read."""
        return dict(enumerate(self._each(lambda topic: topic.start_offset)))

    @property
    def shipped_offsets(self) -> dict[int, int]:
        """Everything below these offsets is in the object store; 0 without one."""
        return dict(enumerate(self._each(lambda topic: topic.shipped_offset)))

    def statistics(self) -> PartitionedTopicStatistics:
        """An immutable snapshot of the partitions that are open in this process."""
        opened = {number: topic for number, topic in sorted(self._open.items()) if topic._is_open}
        return PartitionedTopicStatistics(
            name=self.name, partitions={number: topic.statistics() for number, topic in opened.items()}
        )

    # The store

    def verify(self, *, cold: bool = True) -> VerifyReport:
        """As `Topic.verify`, for every partition: all findings in one report."""
        return merged(self.name, self._each(lambda topic: topic.verify(cold=cold)))

    verify_async = twin(verify)

    def flush(self) -> None:
        """Returns once everything accepted so far is on the disk."""
        self._each(Topic.flush)

    flush_async = twin(flush)

    def ship(self) -> dict[int, int]:
        """Ships every partition; returns the first offset of each that is not in the store yet."""
        return dict(enumerate(self._each(Topic.ship)))

    ship_async = twin(ship)

    def prune(self) -> None:
        """Deletes now what the retention settings say, in every partition."""
        self._each(Topic.prune)

    prune_async = twin(prune)

    def delete_before(self, offsets: Mapping[int, int]) -> dict[int, int]:
        """Deletes the messages below an offset of each partition that is named, for good; see `Topic.delete_before`.

        Returns the offsets that these partitions begin with then.
        """
        if not isinstance(offsets, Mapping):
            raise offset_of_which_partition(self.name, self.partitions, "offsets", offsets)
        return {number: self.partition(number).delete_before(offset) for number, offset in offsets.items()}

    delete_before_async = twin(delete_before)

    def ingest(self) -> int:
        """Ingests the commits that others have staged for the partitions; returns how many."""
        return sum(self._each(Topic.ingest))

    ingest_async = twin(ingest)

    def seal(self) -> None:
        """Seals every partition for another owner; see `Topic.seal`."""
        self._each(Topic.seal)
        self._end(lambda: ClosedError(f"the topic {self.name} is sealed", hint="Open it again to own it again"))

    seal_async = twin(seal)

    # Appending

    def _choose(self, key: bytes | None, partition: int | None) -> int:
        if partition is not None:
            return partition
        if key is not None:
            return partition_of(key, self.partitions)
        return next(self._turns) % self.partitions

    def append(
        self,
        value: bytes | Message | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        **options: Unpack[AppendOptions],
    ) -> PartitionOffset:
        """Appends a message to `partition`, else to that of its key, else to each in turn; returns its offset there.

        The offset has the partition as `offset.partition`. Everything else is as for a topic without partitions.
        """
        number = self._choose(value.key if isinstance(value, Message) else key, partition)
        offset = self.partition(number).append(value, key=key, **options)
        return PartitionOffset(offset, number)

    @twin_of(append)
    async def append_async(
        self,
        value: bytes | Message | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        **options: Unpack[AppendOptions],
    ) -> PartitionOffset:
        number = self._choose(value.key if isinstance(value, Message) else key, partition)
        topic = self._open.get(number) or await self.partition_async(number)
        offset = await topic.append_async(value, key=key, **options)
        return PartitionOffset(offset, number)

    def append_many(
        self,
        messages: Iterable[bytes | Message],
        *,
        partition: int | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> list[PartitionOffset]:
        """Appends messages to the partitions of their keys, those without a key to one partition; returns the offsets.

        The messages of one partition are accepted together or not at all. An error of one partition is raised after all
        were tried: what the others accepted stays.
        """
        whole = several(messages)

        def store(number: int, indexes: Sequence[int]) -> list[int]:
            some = [whole[index] for index in indexes]
            return self.partition(number).append_many(some, sync=sync, timeout=timeout)

        return _stored_in_groups(self._grouped(whole, partition), store, _AT_ONCE if sync else 1)

    append_many_async = twin(append_many)

    @property
    def _counts(self) -> tuple[int, ...]:
        """How many partitions it had before, and has now."""
        return *self._layout.earlier_counts, self._layout.count

    def _grouped(self, messages: Sequence[bytes | Message], partition: int | None) -> dict[int, list[int]]:
        """The indexes of the messages of each partition."""
        groups: dict[int, list[int]] = {}
        for_keyless: int | None = partition
        for index, message in enumerate(messages):
            key = message.key if isinstance(message, Message) else None
            if key is None and for_keyless is None:
                for_keyless = self._choose(None, None)
            number = for_keyless if key is None else self._choose(key, partition)
            assert number is not None
            groups.setdefault(number, []).append(index)
        return groups

    def producer(self, name: str) -> PartitionedProducer:
        """Idempotent appends: a message of the same producer and sequence is stored once."""
        check_name(name)
        return PartitionedProducer(self, name)

    producer_async = twin(producer)

    # Reading

    def read(
        self,
        start: Positions = "earliest",
        stop: Positions | None = None,
        *,
        follow: bool = False,
        on_gap: OnGap = "raise",
        order: Order = "time",
        isolation: Isolation = READ_COMMITTED,
    ) -> Iterator[Message]:
        """Messages of all partitions; each has its `partition` and its offset there.

        `start` and `stop` are "earliest", "latest" or a datetime for all partitions, or a mapping of partitions to
        offsets, which reads these partitions only. In the `order` of "time" partitions are merged by timestamp; with
        `follow`, those that are there at the same moment. In the order of "arrival" they come as they arrive.
        `isolation` is as for a topic without partitions; each partition has its own last stable offset.
        """
        readers = self._readers(start, stop, follow, on_gap, order, isolation)
        return self._follow(readers, on_gap, order) if follow else _merged(readers, on_gap, order)

    async def _read_async(
        self,
        start: Positions,
        stop: Positions | None,
        follow: bool,
        on_gap: OnGap,
        order: Order,
        isolation: Isolation,
    ) -> AsyncIterator[Message]:
        readers = await self._readers_async(start, stop, follow, on_gap, order, isolation)
        if order == "time" and not follow:
            async for message in _merged_by_time(readers, on_gap):
                yield message
        else:
            async for message in _as_they_come(readers, on_gap):
                yield message

    read_async = twin_by(read, _read_async, "With `follow` messages come as they arrive, whatever the order.")

    def _readers(
        self,
        start: Positions,
        stop: Positions | None,
        follow: bool,
        on_gap: OnGap,
        order: object,
        isolation: Isolation = READ_COMMITTED,
    ) -> dict[Topic, BatchReader]:
        if order not in ("time", "arrival"):
            raise InputError(f'order is "time" or "arrival", not {order!r}')
        starts, stops = self._positions(start, "start"), self._positions(stop, "stop")
        topics = self._topics(starts)
        return {
            topic: topic._reader(position, stops.get(number), follow, on_gap, isolation)
            for topic, (number, position) in zip(topics, starts.items(), strict=True)
            if position is not None
        }

    _readers_async = twin(_readers)

    def _topics(self, numbers: Iterable[int]) -> list[Topic]:
        return in_parallel(self.partition, list(numbers), _AT_ONCE, "tidelog-partitions")

    def _positions(self, given: Positions | None, name: str) -> dict[int, Position | None]:
        if isinstance(given, Mapping):
            return dict(given)
        if isinstance(given, int):
            raise offset_of_which_partition(self.name, self.partitions, name, given)
        return dict.fromkeys(range(self.partitions), given)

    def _follow(self, readers: dict[Topic, BatchReader], on_gap: OnGap, order: Order) -> Iterator[Message]:
        with contextlib.ExitStack() as ending:
            for reader in readers.values():
                ending.callback(reader.close)
            while True:
                batches = [
                    topic._decoded(reader, batch, on_gap)
                    for topic, reader in readers.items()
                    if (batch := reader.next_batch(0)) is not None
                ]
                if batches:
                    yield from heapq.merge(*batches, key=_time_of) if order == "time" else itertools.chain(*batches)
                elif not _wait_for_any(readers):
                    return

    def latest_by_key(
        self,
        *,
        prefix: bytes | None = None,
        stop: Positions | None = None,
        values: bool = True,
        on_gap: OnGap = "raise",
        isolation: Isolation = READ_COMMITTED,
    ) -> PartitionedLatestByKey:
        """The newest message of every key, as a mapping over all partitions; `refresh()` applies what came since."""
        stops = self._positions(stop, "stop")
        # Where partitions were added, a key may be removed in another partition than it is in.
        has_moved = bool(self._layout.earlier_counts)
        views = [
            topic._latest_by_key(prefix, stops[number], values, on_gap, isolation, tombstones=has_moved)
            for number, topic in zip(stops, self._topics(stops), strict=True)
        ]
        return PartitionedLatestByKey(dict(zip(stops, views, strict=True)))

    latest_by_key_async = twin(latest_by_key)

    # Subscriptions

    def subscribe(
        self,
        name: str,
        kind: Kind = "exclusive",
        *,
        start: Positions = "earliest",
        consumer: str | None = None,
        filter: Filter | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> Consumer:
        """Returns a consumer of the subscription of this name in all partitions; see `Topic.subscribe`.

        Each partition keeps its own position. Messages of one partition come in order; there
        is no order between partitions. Partitions that are added later need a new consumer.
        """
        starts = self._positions(start, "start")
        with contextlib.ExitStack() as undo:
            parts: dict[int, Consumer] = {}
            for number, topic in zip(starts, self._topics(starts), strict=True):
                position = starts[number]
                assert position is not None
                made = topic.subscribe(name, kind, start=position, consumer=consumer, filter=filter, **options)
                undo.callback(made.close)
                parts[number] = made
            undo.pop_all()
        return PartitionedConsumer(parts)

    subscribe_async = twin(subscribe, give_back=Consumer.close)

    def subscriptions(self) -> list[str]:
        """The names of all subscriptions, of all partitions or some."""
        return sorted(set(itertools.chain(*self._each(Topic.subscriptions))))

    subscriptions_async = twin(subscriptions)

    def subscription_info(self, name: str) -> dict[int, SubscriptionInfo]:
        """How far a subscription is in each partition that it has been in."""
        found: dict[int, SubscriptionInfo] = {}
        for number, topic in enumerate(self._each(lambda topic: topic)):
            with contextlib.suppress(NotFoundError):
                found[number] = topic.subscription_info(name)
        if not found:
            raise subscription_not_found(name, self.name)
        return found

    subscription_info_async = twin(subscription_info)

    def delete_subscription(self, name: str) -> None:
        """Forgets a subscription in every partition; ConflictError while it has consumers."""
        known = self.subscription_info(name)
        opened = [number for number, info in known.items() if info.is_open]
        if opened:
            raise ConflictError(f"the subscription {name} has consumers", hint="Close them first")
        for number in known:
            self.partition(number).delete_subscription(name)

    delete_subscription_async = twin(delete_subscription)


def of_sequence(key: bytes | None, sequence: int, partitions: int) -> int:
    """The partition of a message of a producer, among so many."""
    return sequence % partitions if key is None else partition_of(key, partitions)


def _stored_in_groups(
    groups: Mapping[int, Sequence[int]], store: Callable[[int, Sequence[int]], Sequence[int]], at_once: int
) -> list[PartitionOffset]:
    """Stores the messages of each partition, which are given by their indexes; the offsets, in order of the indexes."""
    stored = in_parallel(lambda number: store(number, groups[number]), list(groups), at_once, "tidelog-append")
    offsets: dict[int, PartitionOffset] = {}
    for (number, indexes), found in zip(groups.items(), stored, strict=True):
        offsets.update((index, PartitionOffset(offset, number)) for index, offset in zip(indexes, found, strict=True))
    return [offsets[index] for index in range(len(offsets))]


def _time_of(message: Message) -> datetime:
    assert message.timestamp is not None
    return message.timestamp


def _merged(readers: dict[Topic, BatchReader], on_gap: OnGap, order: Order) -> Iterator[Message]:
    messages = [topic._messages(reader, on_gap) for topic, reader in readers.items()]
    try:
        yield from heapq.merge(*messages, key=_time_of) if order == "time" else itertools.chain(*messages)
    finally:
        for reader in readers.values():
            reader.close()


async def _merged_by_time(readers: dict[Topic, BatchReader], on_gap: OnGap) -> AsyncIterator[Message]:
    sources = [topic._messages_async(reader, on_gap) for topic, reader in readers.items()]
    waiting: list[tuple[datetime, int, Message]] = []
    try:
        for number, source in enumerate(sources):
            await _push_next(waiting, number, source)
        while waiting:
            _, number, message = heapq.heappop(waiting)
            yield message
            await _push_next(waiting, number, sources[number])
    finally:
        for reader in readers.values():
            reader.close()


async def _push_next(waiting: list[tuple[datetime, int, Message]], number: int, source: AsyncIterator[Message]) -> None:
    message = await anext(source, None)
    if message is not None:
        heapq.heappush(waiting, (_time_of(message), number, message))


async def _as_they_come(readers: dict[Topic, BatchReader], on_gap: OnGap) -> AsyncIterator[Message]:
    asked = {asyncio.ensure_future(reader.next_batch_async()): topic for topic, reader in readers.items()}
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                topic, batch = asked.pop(future), future.result()
                if batch is not None:
                    reader = readers[topic]
                    for message in topic._decoded(reader, batch, on_gap):
                        yield message
                    asked[asyncio.ensure_future(reader.next_batch_async())] = topic
    finally:
        for future in asked:
            future.cancel()
        for reader in readers.values():
            reader.close()


def _wait_for_any(readers: dict[Topic, BatchReader]) -> bool:
    """Waits until one of the partitions may have a message; False when none ever will."""
    logs = {topic: topic._subscribable for topic in readers}
    alive = {topic: log for topic, log in logs.items() if log is None or not log.over}
    if not alive:
        return False
    bell = Bell()
    listening = []
    try:
        for topic, log in alive.items():
            if log is not None:
                waiter = bell.waiter()
                if not log.listen(waiter, readers[topic].waits_at):
                    return True
                listening.append((log, waiter))
        bell.wait(None if len(listening) == len(alive) else _POLL_SECONDS)
    finally:
        for log, waiter in listening:
            log.stop_listening(waiter)
    return True


class PartitionedConsumer(Consumer):
    """A consumer of a subscription in several partitions. Messages are settled in the partition that they came from."""

    def __init__(self, consumers: Mapping[int, Consumer]) -> None:
        """Use `topic.subscribe()`."""
        if not consumers:
            raise InputError(
                "start names no partition", hint=Hint("Name at least one, as in start={0: 0}", "Name at least one")
            )
        self._consumers = consumers
        self._parts = deque(Part(each._subscription, each._holder) for each in consumers.values())
        self._any = next(iter(consumers.values()))

    @property
    def name(self) -> str:
        return self._any.name

    @property
    def consumer(self) -> str:
        return self._any.consumer

    @property
    def lag(self) -> Lag:
        """The lag of all partitions, and the age of the oldest message in any of them."""
        each = [consumer.lag for consumer in self._consumers.values()]
        return Lag(sum(lag.messages for lag in each), max(lag.seconds for lag in each))

    def partition(self, number: int) -> Consumer:
        """The consumer of one partition."""
        if number not in self._consumers:
            raise InputError(f"this consumer of {self.name} has partitions {sorted(self._consumers)}, not {number!r}")
        return self._consumers[number]

    # Receiving

    def _in_turn(self) -> list[Part]:
        """Another partition is the first each time, so that a busy one does not starve the others."""
        self._parts.rotate(-1)
        return list(self._parts)

    def receive(self, timeout: float | str | None = None) -> Delivery | None:
        taken = receive_from_any(self._in_turn(), 1, checked_timeout(timeout))
        return taken[0] if taken else None

    def receive_many(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        """Up to so many messages of one partition, as soon as one has some; none when `timeout` seconds passed."""
        return list(receive_from_any(self._in_turn(), checked_count(max_messages), checked_timeout(timeout)))

    @twin_of(receive)
    async def receive_async(self, timeout: float | str | None = None) -> Delivery | None:
        taken = await receive_from_any_async(self._in_turn(), 1, checked_timeout(timeout))
        return taken[0] if taken else None

    @twin_of(receive_many)
    async def receive_many_async(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        count = checked_count(max_messages)
        return list(await receive_from_any_async(self._in_turn(), count, checked_timeout(timeout)))

    def __iter__(self) -> Iterator[Delivery]:
        with contextlib.suppress(ClosedError):
            while True:
                yield from receive_from_any(self._in_turn(), 1, None)

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        with contextlib.suppress(ClosedError):
            while True:
                for message in await receive_from_any_async(self._in_turn(), 1, None):
                    yield message

    # Settling

    def _settling(self, message: Message | int) -> tuple[Consumer, Message | int]:
        if isinstance(message, Message):
            return self.partition(message.partition), message
        if isinstance(message, PartitionOffset):
            return self.partition(message.partition), int(message)
        raise message_of_which_partition(message)

    def ack(self, message: Message | int) -> None:
        """Acknowledges a message, or a `PartitionOffset`, however late."""
        consumer, given = self._settling(message)
        consumer.ack(given)

    def ack_many(self, messages: Iterable[Message | int]) -> None:
        """All of these are done with."""
        by_consumer: dict[Consumer, list[Message | int]] = {}
        for consumer, given in map(self._settling, messages):
            by_consumer.setdefault(consumer, []).append(given)
        for consumer, several_given in by_consumer.items():
            consumer.ack_many(several_given)

    def ack_cumulative(self, message: Message | int) -> None:
        """This one and all before it in its partition are done with; only exclusive and failover."""
        consumer, given = self._settling(message)
        consumer.ack_cumulative(given)

    def nack(self, message: Message | int, delay: float | str | None = None, *, reason: str | None = None) -> None:
        """Requests redelivery of a message; see `Consumer.nack`."""
        consumer, given = self._settling(message)
        consumer.nack(given, delay, reason=reason)

    # Moving and ending

    def seek(self, position: Positions) -> None:
        """Moves the subscription to a time, "earliest" or "latest" in all partitions, or to an offset in each."""
        if isinstance(position, int):
            raise offset_of_which_partition(self.name, len(self._consumers), "position", position)
        given = position if isinstance(position, Mapping) else dict.fromkeys(self._consumers, position)
        for number, each in given.items():
            self.partition(number).seek(each)

    def flush(self) -> None:
        """Stores the positions now: of what was acknowledged before, nothing comes again after a crash."""
        for consumer in self._consumers.values():
            consumer.flush()

    def close(self) -> None:
        """Leaves: what was not acknowledged goes to other consumers. The last one stores the positions."""
        with contextlib.ExitStack() as ending:  # all of them, and the last error
            for consumer in self._consumers.values():
                ending.callback(consumer.close)

    def unsubscribe(self) -> None:
        """Leaves and deletes the subscription in all partitions; ConflictError while it has other consumers."""
        for consumer in self._consumers.values():
            consumer.unsubscribe()


class PartitionedLatestByKey(Mapping[bytes, Message]):
    """The newest message of every key of all partitions, as of the last `refresh`."""

    def __init__(self, views: Mapping[int, LatestByKey]) -> None:
        """Use `topic.latest_by_key()`."""
        self._views = views

    def refresh(self) -> dict[int, int]:
        """Applies the messages appended since; returns the offset that the view has reached in each partition."""
        return {number: view.refresh() for number, view in self._views.items()}

    refresh_async = twin(refresh)

    def __getitem__(self, key: bytes) -> Message:
        """A key is in one partition, unless messages were appended to partitions by number, or partitions were added:
        then the one with the newest timestamp counts."""
        newest = max((view[key] for view in self._views.values() if key in view), key=_time_of, default=None)
        if newest is None or any(removed >= _time_of(newest) for removed in self._removals(key)):
            raise KeyError(key)
        return newest

    def _removals(self, key: bytes) -> list[datetime]:
        """When the key was removed, in partitions that it is not in."""
        return [removed for view in self._views.values() if (removed := view._removed_at(key)) is not None]

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, bytes) or not any(key in view for view in self._views.values()):
            return False
        return not self._removals(key) or self.get(key) is not None

    def __iter__(self) -> Iterator[bytes]:
        return filter(self.__contains__, dict.fromkeys(itertools.chain.from_iterable(self._views.values())))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<PartitionedLatestByKey {len(self)} keys of {len(self._views)} partitions>"


class PartitionedProducer(ClosedAtExit):
    """Made by `topic.producer(name)`: one producer of that name in every partition that it uses.

    A sequence is used once by a producer: a message that is appended again, with the same key or without one, is stored
    once, also after partitions were added. Where messages are given a `partition` by number, each partition has
    sequences of its own. A message with a sequence and without a key goes to the partition of its sequence.
    """

    def __init__(self, topic: PartitionedTopic, name: str) -> None:
        self._topic = topic
        self._name = name
        self._producers: dict[int, Producer] = {}

    @property
    def name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"<PartitionedProducer {self.name}>"

    def _in(self, number: int) -> Producer:
        known = self._producers.get(number)
        if known is None:
            known = self._producers[number] = self._topic.partition(number).producer(self._name)
        return known

    def _choose(self, key: bytes | None, partition: int | None, sequence: int | None) -> int:
        if partition is not None or sequence is None:
            return self._topic._choose(key, partition)
        *earlier, now = (of_sequence(key, sequence, count) for count in self._topic._counts)
        if not earlier:
            return now
        # It may have been stored before there were so many partitions.
        found = {number: self._in(number)._find(sequence) for number in (now, *earlier)}
        known = [number for number, offset in found.items() if offset is not None]
        return max(known, key=lambda number: found[number] or 0, default=now)

    def append(
        self,
        value: bytes | Message | None,
        *,
        sequence: int | None = None,
        key: bytes | None = None,
        partition: int | None = None,
        **options: Unpack[AppendOptions],
    ) -> PartitionOffset:
        """Stores a message, unless its sequence is stored already; returns its offset either way."""
        if sequence is not None:
            sequence = checked_sequence(sequence, 0, 1)
        number = self._choose(value.key if isinstance(value, Message) else key, partition, sequence)
        offset = self._in(number).append(value, sequence=sequence, key=key, **options)
        return PartitionOffset(offset, number)

    append_async = twin(append)

    def append_many(
        self,
        messages: Iterable[bytes | Message],
        *,
        sequence: int | None = None,
        partition: int | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> list[PartitionOffset]:
        """Stores messages with consecutive sequences, the first of which is `sequence`; returns their offsets.

        Each goes where `append` would store it with its sequence. Those of one partition that are new are stored
        together or not at all. Without `sequence` each gets the one after the last of its partition, and those without
        a key go to one partition. An error of one partition is raised after all were tried.
        """
        whole = several(messages)
        if sequence is None:
            groups = self._topic._grouped(whole, partition)
        else:
            first, groups = checked_sequence(sequence, 0, len(whole)), {}
            for index, message in enumerate(whole):
                key = message.key if isinstance(message, Message) else None
                groups.setdefault(self._choose(key, partition, first + index), []).append(index)

        def store(number: int, indexes: Sequence[int]) -> list[int]:
            some = [whole[index] for index in indexes]
            if sequence is None:
                return self._in(number).append_many(some, sync=sync, timeout=timeout)
            return self._in(number)._append_numbered(some, tuple(first + index for index in indexes), sync, timeout)

        return _stored_in_groups(groups, store, _AT_ONCE if sync else 1)

    append_many_async = twin(append_many)

    def last_sequence(self, partition: int) -> int | None:
        """The highest sequence that is stored in a partition; None when there is none."""
        return self._in(partition).last_sequence

    last_sequence_async = twin(last_sequence)

    def close(self) -> None:
        """It appends nothing any more; what it stored is remembered. Closing twice is fine."""
        for producer in self._producers.values():
            producer.close()

    close_async = twin(close)
