"""A topic: messages with keys, headers and times, over one log.

Everything is done once a batch: a batch of frames becomes a list of messages in one call, and the iterator hands that
list out.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Unpack

import msgspec

from tidelog.clock import Clock
from tidelog.errors import FencedError, InputError, NotFoundError, NotSupportedError, TidelogError
from tidelog.log import Log, Position
from tidelog.log.reader import Reader
from tidelog.log.repair import LOST_PAYLOAD
from tidelog.log.statistics import LogStatistics
from tidelog.log.view import LogView
from tidelog.tier.background import Background
from tidelog.tier.daemon_pool import in_store_thread
from tidelog.tier.intake_taker import IntakeStatistics, IntakeTaker
from tidelog.tier.joined import JoinedLog, JoinedReader
from tidelog.tier.local_pruner import LocalPruner
from tidelog.tier.sweep_plan import SweepPlan, SweepReport
from tidelog.tier.tier_statistics import TierStatistics
from tidelog.tier.tiered_log import TieredLog
from tidelog.topics.cursor_store import CursorStore
from tidelog.topics.delivery_counters import SubscriptionStatistics
from tidelog.topics.delivery_options import Kind, SubscribeOptions
from tidelog.topics.durability import SHIPPED, Sync, check_sync, wait_shipped, wait_shipped_async
from tidelog.topics.latest_by_key import LatestByKey, ReadableTopic
from tidelog.topics.live_log import LiveLog, LiveStatistics
from tidelog.topics.local_intake import LocalIntake
from tidelog.topics.message import Message
from tidelog.topics.names import TopicName
from tidelog.topics.payloads import PayloadEncoder
from tidelog.topics.producer import Producer
from tidelog.topics.producer_registry import ProducerRegistry
from tidelog.topics.reading import OnGap, read_messages, read_messages_async
from tidelog.topics.subscription_consumer import Consumer
from tidelog.topics.subscription_feed import Filter, Source
from tidelog.topics.subscription_registry import SubscriptionInfo, SubscriptionRegistry
from tidelog.topics.topic_tasks import TopicTasks
from tidelog.topics.worker_thread import made_in_worker_thread
from tidelog.units import to_seconds


class TopicStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a topic; `log` is None when it was opened for reading only, `tier` when it has no store."""

    name: str
    start_offset: int
    next_offset: int
    hot_start_offset: int
    shipped_offset: int
    log: LogStatistics | None
    tier: TierStatistics | None
    subscriptions: tuple[SubscriptionStatistics, ...] = ()
    intake: IntakeStatistics | None = None
    """What was handed over by others and taken in; None when it was opened for reading only."""
    live: LiveStatistics | None = None
    """Of a topic with `reliable=False`, which has no `log`."""


class Topic(TopicTasks):
    """A topic. Any number of threads and tasks may use it at once."""

    is_reliable = True
    """Whether its messages are kept; those of a `LiveTopic` go to whoever reads at that moment."""

    def __init__(
        self,
        name: TopicName,
        log: Log | LogView | LiveLog | None,
        clock: Clock,
        tier: JoinedLog | None = None,
        seal: Callable[[Topic], None] | None = None,
        pruner: LocalPruner | None = None,
        intake: LocalIntake | None = None,
    ) -> None:
        """`log` is what this disk has, `tier` joins it to the store; `seal` has the directory let go of the topic."""
        self._name = name
        self._hot = log
        self._owned = log if isinstance(log, Log) else None
        self._joined = tier
        self._tiered = tier if isinstance(tier, TieredLog) else None
        self._check_awake = None if self._tiered is None else self._tiered.check_awake
        self._seal = seal
        self._pruner = pruner
        self._intake = intake
        self._clock = clock
        self._subscriptions: SubscriptionRegistry | None = None
        self.delivery_defaults: Mapping[str, object] = {}
        """Options of subscriptions that the topic's settings say, for those who do not say them."""
        self._encoder = PayloadEncoder(clock.now_us)
        self._payload = self._encoder.one
        self._producers: ProducerRegistry | None = None
        if self._owned is not None:
            self._producers = ProducerRegistry(
                self._owned, self._tiered, lambda start, stop: self._reader(start, stop, False, "skip")
            )

    @property
    def name(self) -> str:
        """`namespace/name`."""
        return str(self._name)

    def __repr__(self) -> str:
        return f"<Topic {self.name}>"

    # Where it stands

    @property
    def next_offset(self) -> int:
        """The offset that the next message gets."""
        return self._readable.next_offset

    @property
    def durable_offset(self) -> int:
        """Everything below is synced to the disk. It may lie inside the messages of one `append_many`: while that is
        so, a crash takes all of them."""
        return self._log.durable_offset

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read. It never goes back."""
        return self._readable.start_offset

    @property
    def hot_start_offset(self) -> int:
        """The oldest offset that is on this machine's disk."""
        return self.next_offset if self._hot is None else self._hot.start_offset

    @property
    def shipped_offset(self) -> int:
        """Everything below is in the object store; 0 without one."""
        if self._tiered is not None:
            return self._tiered.shipped_offset
        return 0 if self._joined is None else self._joined.history.catalog.next_offset()

    @property
    def readable(self) -> JoinedLog | Log | LogView | LiveLog:
        """What its messages are read from, for those who want frames rather than messages."""
        return self._readable

    @property
    def _readable(self) -> JoinedLog | Log | LogView | LiveLog:
        readable = self._joined or self._hot
        assert readable is not None, "a topic is on this disk, in a store, or both"
        return readable

    def statistics(self) -> TopicStatistics:
        """An immutable snapshot."""
        return TopicStatistics(
            name=self.name,
            start_offset=self.start_offset,
            next_offset=self.next_offset,
            hot_start_offset=self.hot_start_offset,
            shipped_offset=self.shipped_offset,
            log=None if self._owned is None else self._owned.statistics(),
            tier=None if self._tiered is None else self._tiered.statistics(),
            subscriptions=() if self._subscriptions is None else self._subscriptions.statistics(),
            intake=None if self._taker is None else self._taker.statistics(),
        )

    # The store

    def ship(self) -> int:
        """Brings everything accepted so far to the object store; returns the first offset that is not there yet."""
        return self._with_store("ship").ship()

    def prune(self) -> None:
        """Deletes now what the retention settings say; it happens by itself every `retention_interval_seconds`."""
        _ = self._log
        if self._tiered is not None:
            self._tiered.prune()
        elif self._pruner is not None:
            self._pruner.prune()

    def take_in(self) -> int:
        """Appends now what others have handed over to the topic, Spark as a rule; returns how many consignments.

        It happens by itself when the topic is opened, and every `intake_check_seconds`.
        """
        _ = self._log
        if self._tiered is not None:
            return self._tiered.take_in()
        return 0 if self._taker is None else self._taker.take_in()

    @property
    def _taker(self) -> IntakeTaker | None:
        if self._tiered is not None:
            return self._tiered.intake
        return None if self._intake is None else self._intake.taker

    def seal(self) -> None:
        """Hands the topic over: everything is shipped, where to go on is written down, and it is closed here.

        Another node that opens it goes on without a gap. Without a store there is no other node: NotSupportedError.
        """
        self._with_store("seal")
        assert self._seal is not None, "whoever opens a topic for writing can seal it"
        self._seal(self)

    def plan_sweep(self) -> SweepPlan:
        """What a sweep of the store would remove for this topic, and what it found to be lost. Changes nothing."""
        return self._with_store("sweep").plan_sweep()

    def sweep(self, plan: SweepPlan, *, drop_lost: bool = False, drop_uncovered: bool = False) -> SweepReport:
        """Carries out a plan, looking at each thing again before it goes.

        What is lost, and what an earlier owner uploaded and never published, stays unless it is asked for.
        """
        return self._with_store("sweep").sweep(plan, drop_lost=drop_lost, drop_uncovered=drop_uncovered)

    def _with_store(self, operation: str) -> TieredLog:
        if self._tiered is None:
            _ = self._log
            raise NotSupportedError(
                "this topic has no object store",
                operation=operation,
                hint='Name one: tidelog.open("./data", store="s3://bucket/prefix")',
            )
        return self._tiered

    # What the log directory does with it

    @property
    def is_open(self) -> bool:
        """Whether what is below the topic still goes on."""
        return self._hot is not None and not self._hot.over

    def seal_storage(self) -> None:
        """Seals and closes what is below the topic."""
        self.close_subscriptions()
        if self._producers is not None:
            self._producers.before_seal()
        self._with_store("seal").seal()

    def close_storage(self) -> None:
        """Flushes and closes what is below the topic."""
        self.close_subscriptions()
        if self._pruner is not None:
            self._pruner.stop()
        if self._intake is not None:
            self._intake.stop()
        try:
            if self._producers is not None:
                self._producers.close()
        finally:
            if self._tiered is not None:
                self._tiered.close()
            elif self._hot is not None:
                self._hot.close()

    def delete_storage(self) -> None:
        """Takes the topic out of the store and closes its log; readers find nothing any more."""
        # What is stored of them goes with the rest: not before it, should that fail.
        self.close_subscriptions(self._deleted_error)
        if self._tiered is not None:
            self._tiered.delete()
        else:
            with contextlib.suppress(TidelogError):
                self.close_storage()
        if self._owned is not None:
            self._owned.forget()

    @property
    def has_store(self) -> bool:
        """Whether its messages go to an object store."""
        return self._joined is not None

    @property
    def tiered(self) -> TieredLog | None:
        """What is below it, when this process owns it and it has a store."""
        return self._tiered

    def use_subscriptions(
        self, cursors: CursorStore, background: Background, open_topic: Callable[[str], Topic]
    ) -> None:
        """Says where the positions of subscriptions are kept, and how the topics for dead letters are opened."""
        log = self._subscribable
        source = None if log is None else self._subscription_source(log)
        self._subscriptions = SubscriptionRegistry(
            *(self.name, source, lambda: self.next_offset, cursors, self._clock, background, open_topic)
        )
        if self._pruner is not None:
            self._pruner.keep_from = self._subscriptions.lowest_held_offset
        if self._tiered is not None:
            self._tiered.pruner.keep_from = self._subscriptions.lowest_held_offset

    @property
    def _subscribable(self) -> Log | LiveLog | None:
        """What subscriptions read from; None when it was opened for reading only."""
        return self._owned

    def _subscription_source(self, log: Log | LiveLog) -> Source:
        check_owned = (lambda: None) if self._tiered is None else self._tiered.check_not_fenced
        return Source(
            self.name,
            log,
            lambda offset, on_gap: self._reader(offset, None, True, on_gap),
            self._readable.resolve,
            lambda: self.start_offset,
            check_owned,
        )

    def close_subscriptions(self, make_error: Callable[[], TidelogError] | None = None) -> list[FencedError]:
        """Stores how far they are and ends them; consumers get an error. Returns one for each that lost something."""
        return [] if self._subscriptions is None else self._subscriptions.close(make_error)

    def _deleted_error(self) -> NotFoundError:
        return NotFoundError(f"the topic {self.name} was deleted", hint="Close this consumer")

    # Subscriptions

    def subscribe(
        self,
        name: str,
        kind: Kind = "exclusive",
        *,
        start: Position = "earliest",
        consumer: str | None = None,
        filter: Filter | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> Consumer:
        """A consumer of the subscription of this name, which is made when it is new, at `start`.

        A subscription goes on where it was left: `start` (an offset, "earliest", "latest" or a datetime) counts for a
        new one only. `kind` is "exclusive", "failover", "shared" or "key_shared". `filter` is a mapping of headers to
        the values that they must have, or a function of a message; others are passed over. `options` are those of
        `DeliveryOptions`, such as `max_unacked=1000`, `ack_timeout_seconds=30` or `max_deliveries=5`.
        """
        given = {**self.delivery_defaults, "kind": kind, **options}
        return self._registry.subscribe(name, start=start, consumer=consumer, matches=filter, options=given)

    def subscriptions(self) -> list[str]:
        """The names of all subscriptions."""
        return self._registry.names()

    def subscription_info(self, name: str) -> SubscriptionInfo:
        """How far a subscription is, whether it is open or not."""
        return self._registry.info(name)

    def delete_subscription(self, name: str) -> None:
        """Forgets a subscription and how far it was; ConflictError while it has consumers."""
        self._registry.delete(name)

    @property
    def _registry(self) -> SubscriptionRegistry:
        if self._subscriptions is None:
            raise NotSupportedError("this topic was opened without a place for subscriptions")
        if self._hot is not None and self._is_owner:
            self._hot.read("latest").close()  # one that is closed says so, rather than the store of the positions
        return self._subscriptions

    # Reading

    def read(
        self,
        start: Position = "earliest",
        stop: Position | None = None,
        *,
        follow: bool = False,
        on_gap: OnGap = "raise",
    ) -> Iterator[Message]:
        """Messages from `start` (an offset, "earliest", "latest" or a datetime) up to `stop` (exclusive), in order.

        Without `follow` it ends at the offset that is next now; with it, it waits for more and ends when the log is
        closed. Where the positions lie is settled by this call, not by the first message. Messages that a repair could
        not save raise GapError, or are left out with `on_gap="skip"`.
        """
        return read_messages(self._reader(start, stop, follow, on_gap), on_gap)

    def read_async(
        self,
        start: Position = "earliest",
        stop: Position | None = None,
        *,
        follow: bool = False,
        on_gap: OnGap = "raise",
    ) -> AsyncIterator[Message]:
        """As `read`, for `async for`: waiting and reading files never block the event loop.

        A time is looked up when the iteration begins, not by this call; so is every position in a topic that another
        process owns.
        """
        _check_on_gap(on_gap)
        if self._is_owner and not isinstance(start, datetime) and not isinstance(stop, datetime):
            return read_messages_async(self._reader(start, stop, follow, on_gap), on_gap)
        return self._look_up_and_read(start, stop, follow, on_gap)

    async def _look_up_and_read(
        self, start: Position, stop: Position | None, follow: bool, on_gap: OnGap
    ) -> AsyncIterator[Message]:
        reader = await made_in_worker_thread(
            lambda: self._reader(start, stop, follow, on_gap), lambda reader: reader.close()
        )
        async for message in read_messages_async(reader, on_gap):
            yield message

    @property
    def _is_owner(self) -> bool:
        """Whether this process knows by itself where the topic begins and ends."""
        return self._owned is not None or isinstance(self._hot, LiveLog)

    def latest_by_key(
        self,
        *,
        prefix: bytes | None = None,
        stop: Position | None = None,
        values: bool = True,
        on_gap: OnGap = "raise",
    ) -> LatestByKey:
        """The newest message of every key, as a mapping; `refresh()` takes in what was appended since.

        A message with a key and an empty value is a tombstone: it takes the key out. Messages without a key are left
        out. `prefix` narrows it to keys that begin so, `stop` to messages below an offset or a time. It is in memory:
        `values=False` keeps keys and offsets only, and reads a message when it is asked for.
        """
        _check_on_gap(on_gap)
        topic = ReadableTopic(
            lambda start, end: self._reader(start, end, False, on_gap),
            self._readable.resolve,
            lambda: self.start_offset,
        )
        return LatestByKey(topic, prefix=prefix, stop=stop, values=values, on_gap=on_gap)

    def _reader(self, start: Position, stop: Position | None, follow: bool, on_gap: OnGap) -> Reader | JoinedReader:
        _check_on_gap(on_gap)
        if self._joined is not None:
            return self._joined.read(start, stop, follow=follow, on_gap=on_gap)
        assert self._hot is not None
        return self._hot.read(start, stop, follow=follow)

    # Appending

    @property
    def _log(self) -> Log:
        if self._owned is None:
            raise InputError(
                "the log directory was opened with read_only=True",
                operation=f"topic {self.name}",
                hint="Do it in the process that owns the topic, or open the directory without read_only",
            )
        return self._owned

    @property
    def _appendable(self) -> Log:
        """The log, after a look at whether this process was asleep and the topic has another owner by now."""
        if self._check_awake is not None:
            self._check_awake()
        return self._log

    def append(
        self,
        value: bytes | Message,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> int:
        """Accepts a message and returns its offset; with `sync` once it is on the disk, or, with `sync="shipped"`, in
        the object store too (those who wait together share one object).

        Subscriptions hand it out when it is time for `deliver_at`; reading the topic shows it at once.
        Blocks while the writer is behind, for `timeout` seconds at most (default: `append_timeout_ms`), then raises
        BackpressureError without having used an offset. With `sync="shipped"` it bounds the wait for the store too.
        """
        log = self._owned or self._log
        if sync:
            check_sync(sync, self._tiered)
        if self._check_awake is not None:
            self._check_awake()
        if timeout is not None:
            timeout = to_seconds(timeout)
        payload = self._payload(value, key, headers, timestamp, deliver_at)
        offset = log.try_append(payload)
        if offset is not None and not sync:
            return offset
        offset = log.finish_append(payload, offset, sync is True, timeout)
        if sync == SHIPPED and self._tiered is not None:
            wait_shipped(self._tiered, offset, offset, timeout)
        return offset

    def append_many(
        self, messages: Iterable[bytes | Message], *, sync: Sync = False, timeout: float | str | None = None
    ) -> list[int]:
        """Accepts all messages with consecutive offsets, or none of them; returns the offsets.

        They stay together: after a crash, a move or the loss of the disk all of them are there, or none. With `sync`
        it returns once all of them are on the disk.
        """
        timeout = to_seconds(timeout)
        check_sync(sync, self._tiered)
        payloads = self._encoder.many(messages)
        offsets = self._appendable.append_many(payloads, sync=sync is True, timeout_seconds=timeout)
        if sync == SHIPPED and offsets and self._tiered is not None:
            wait_shipped(self._tiered, offsets[0], offsets[-1], timeout)
        return list(offsets)

    def append_async(
        self,
        value: bytes | Message,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> Coroutine[Any, Any, int]:
        """As `append`, to be awaited: the task is suspended instead of blocking the thread."""
        timeout = to_seconds(timeout)
        check_sync(sync, self._tiered)
        payload = self._payload(value, key, headers, timestamp, deliver_at)
        if self._tiered is not None and (sync == SHIPPED or self._tiered.may_have_slept):
            return self._append_tiered(self._tiered, payload, sync, timeout)
        return self._log.append_async(payload, sync=sync is True, timeout_seconds=timeout)

    async def _append_tiered(self, tiered: TieredLog, payload: bytes, sync: Sync, timeout: float | None) -> int:
        await self._check_awake_async()
        offset = await self._log.append_async(payload, sync=sync is True, timeout_seconds=timeout)
        if sync == SHIPPED:
            await wait_shipped_async(tiered, offset, offset, timeout)
        return offset

    async def _check_awake_async(self) -> None:
        """Who owns the topic is asked in a worker thread: the store may take its time, and the loop goes on."""
        if self._tiered is not None and self._tiered.may_have_slept:
            await in_store_thread(self._tiered.check_awake)

    def _appendable_at_once(self) -> Log | None:
        """None where the store has to be asked first who owns the topic."""
        return None if self._tiered is not None and self._tiered.may_have_slept else self._log

    async def append_many_async(
        self, messages: Iterable[bytes | Message], *, sync: Sync = False, timeout: float | str | None = None
    ) -> list[int]:
        """As `append_many`, suspending the task."""
        timeout = to_seconds(timeout)
        check_sync(sync, self._tiered)
        payloads = self._encoder.many(messages)
        await self._check_awake_async()
        offsets = await self._log.append_many_async(payloads, sync=sync is True, timeout_seconds=timeout)
        if sync == SHIPPED and offsets and self._tiered is not None:
            await wait_shipped_async(self._tiered, offsets[0], offsets[-1], timeout)
        return list(offsets)

    def producer(self, name: str) -> Producer:
        """Appends that can be made again: a message of the same producer and sequence is stored once.

        What is stored is found again after a restart, a move to another node or the loss of the disk. A second
        producer of the same name takes over: the first one's appends raise FencedError from then on. Of at most 10,000
        producers a topic remembers what they stored; those that have been silent longest are forgotten.
        """
        _ = self._log
        assert self._producers is not None
        return Producer(self._producers, name, self._encoder, lambda: self._appendable, self._appendable_at_once)

    def append_lost(self, count: int) -> None:
        """Takes the next offsets for messages that are lost, as a repair does: for whoever copies a damaged log.

        Readers get GapError there, or pass over them with `on_gap="skip"`.
        """
        if count < 0:
            raise InputError(f"{count} messages cannot be lost")
        self._appendable.append_many([LOST_PAYLOAD] * count)

    def flush(self) -> None:
        """Returns once everything accepted so far is on the disk."""
        self._log.flush()

    async def flush_async(self) -> None:
        """As `flush`, suspending the task."""
        await self._log.flush_async()


def _check_on_gap(on_gap: object) -> None:
    if on_gap not in ("raise", "skip"):
        raise InputError(f'on_gap is "raise" or "skip", not {on_gap!r}')
