"""A topic that keeps its messages: with keys, headers and timestamps, over one log and its store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from datetime import datetime
from typing import Any, Unpack

import msgspec

from tidelog.clock import Clock
from tidelog.cold.gc import Plan, Report
from tidelog.cold.retention import LocalPruner, RetentionPlan
from tidelog.cold.settings import TierSettings
from tidelog.cold.tiered_log import TieredLog
from tidelog.cold.tiered_reader import TieredView
from tidelog.errors import NAME_A_STORE, Hint, InputError, NotSupportedError, OffsetOutOfRangeError
from tidelog.findings import VerifyReport
from tidelog.log import Log, Position
from tidelog.log.frame import Frames
from tidelog.log.isolation import READ_COMMITTED, CommittedReader, Isolation, check_isolation
from tidelog.log.reader import BatchReader, checked_offset
from tidelog.log.repair import LOST_PAYLOAD
from tidelog.log.transactions import OpenTransaction, TopicTransactions
from tidelog.log.view import LogView
from tidelog.staging.ingest import Ingester
from tidelog.store.aio import twin, twin_by, twin_of
from tidelog.store.scheduler import Background, in_store_thread
from tidelog.topics.base import BaseTopic, TopicStatistics, check_on_gap
from tidelog.topics.ingest import LocalStaging
from tidelog.topics.latest_by_key import LatestByKey, ReadableTopic
from tidelog.topics.live_log import LiveLog
from tidelog.topics.message import (
    SHIPPED,
    HeadersGiven,
    Message,
    OnGap,
    Sync,
    checked_sync,
    wait_shipped,
    wait_shipped_async,
)
from tidelog.topics.names import TopicName
from tidelog.topics.producer.producer import Producer
from tidelog.topics.producer.registry import ProducerRegistry
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.cursors import CursorStore
from tidelog.topics.subscription.dead_letters import DeadLetterTopic
from tidelog.topics.subscription.feed import Filter
from tidelog.topics.subscription.options import Kind, SubscribeOptions
from tidelog.topics.verify import verify_topic
from tidelog.units import to_seconds


class Topic(BaseTopic):
    """A topic that keeps its messages. Any number of threads and tasks may use it at once."""

    def __init__(
        self,
        name: TopicName,
        log: Log | LogView | None,
        clock: Clock,
        tier: TieredView | None = None,
        seal: Callable[[Topic], None] | None = None,
        pruner: LocalPruner | None = None,
        staging: LocalStaging | None = None,
        partition: int = 0,
    ) -> None:
        """`log` is what this disk has, `tier` joins it to the store; `seal` has the directory let go of the topic."""
        super().__init__(name, log, clock, partition)
        self._owned = log if isinstance(log, Log) else None
        self._joined = tier
        self._tiered = tier if isinstance(tier, TieredLog) else None
        self._check_awake = None if self._tiered is None else self._tiered.check_awake
        self._seal = seal
        self._pruner = pruner
        self._staging = staging
        self._producers: ProducerRegistry | None = None
        if self._owned is not None:
            self._producers = ProducerRegistry(
                self._owned,
                self._tiered,
                lambda start, stop: self._reader(start, stop, False, "skip", "read_uncommitted"),
            )

    # Where it stands

    @property
    def durable_offset(self) -> int:
        """Everything below is synced to the disk. It may lie inside the messages of one `append_many`: while that is
        so, a crash takes all of them."""
        return self._log.durable_offset

    @property
    def shipped_offset(self) -> int:
        """Everything below is in the object store; 0 without one."""
        if self._tiered is not None:
            return self._tiered.shipped_offset
        return 0 if self._joined is None else self._joined.history.catalog.next_offset()

    @property
    def _readable(self) -> TieredView | Log | LogView | LiveLog:
        return self._joined or super()._readable

    def statistics(self) -> TopicStatistics:
        """An immutable snapshot."""
        return msgspec.structs.replace(
            super().statistics(),
            log=None if self._owned is None else self._owned.statistics(),
            tier=None if self._tiered is None else self._tiered.statistics(),
            ingest=None if self._taker is None else self._taker.statistics(),
        )

    def verify(self, *, cold: bool = True) -> VerifyReport:
        """Reads and checks every frame on this disk and, with `cold`, every object in the store. Changes nothing.

        The report is true if nothing is wrong; `findings` say what is, with path, byte, offsets and fix.
        """
        hot, tier = self._hot, self._joined if cold else None
        directory, files = (hot.directory, hot.files) if isinstance(hot, Log | LogView) else (None, None)
        store = () if tier is None else (tier.history.catalog, tier.history.objects)
        synced = 0 if self._owned is None else self._owned.durable_offset
        return verify_topic(self.name, directory, *store, files=files, durable_offset=synced)

    verify_async = twin(verify)

    # The store

    def ship(self) -> int:
        """Ships everything accepted so far to the object store; returns the first offset that is not shipped."""
        return self._with_store("ship").ship()

    ship_async = twin(ship)

    def plan_retention(self) -> RetentionPlan:
        """What the retention settings would delete now. Changes nothing."""
        log = self._log
        if self._tiered is not None:
            return self._tiered.plan_retention()
        return (self._pruner or LocalPruner(log, TierSettings(), self._clock)).plan()

    plan_retention_async = twin(plan_retention)

    def prune(self, plan: RetentionPlan | None = None) -> None:
        """Deletes now what the retention settings say; it happens by itself every `retention_interval_seconds`.

        With a plan of `plan_retention` exactly that is deleted; ConflictError if it is not what is due by now.
        """
        _ = self._log
        if self._tiered is not None:
            self._tiered.prune(plan)
        elif self._pruner is not None:
            self._pruner.prune(plan)

    prune_async = twin(prune)

    def delete_before(self, offset: int) -> int:
        """Deletes every message below an offset, for good, and returns the offset that the topic begins with then.

        It is durable when it returns: nobody reads these messages any more, from the disk or the store, and readers and
        subscriptions that are below continue at the new start or raise OffsetOutOfRangeError, as with retention. Whole
        files and objects are deleted at once; one that holds later messages too goes with the last of them. With a
        store, messages that are not shipped yet are shipped first. `topic.next_offset` deletes everything; an offset
        that is deleted already changes nothing, and one after the end raises OffsetOutOfRangeError.
        """
        log = self._log
        if checked_offset(offset) > log.next_offset:
            raise OffsetOutOfRangeError(
                f"offset {offset} is after the end of {self.name}, which is {log.next_offset}", operation="delete"
            )
        if offset > self.start_offset:
            if self._tiered is not None:
                self._tiered.delete_before(offset)
            else:
                log.delete_before(offset)
        return self.start_offset

    delete_before_async = twin(delete_before)

    def ingest(self) -> int:
        """Ingests the commits that others, usually Spark, have staged for the topic; returns how many.

        It happens automatically when the topic is opened, and every `ingest_check_seconds`.
        """
        _ = self._log
        if self._tiered is not None:
            return self._tiered.ingest()
        return 0 if self._taker is None else self._taker.ingest()

    ingest_async = twin(ingest)

    @property
    def _taker(self) -> Ingester | None:
        if self._tiered is not None:
            return self._tiered.staged if isinstance(self._tiered.staged, Ingester) else None
        return None if self._staging is None else self._staging.taker

    def seal(self) -> None:
        """Seals the topic for another owner: ships everything, records where to continue, and closes it here.

        Another node that opens it continues without a gap. Without a store there is no other node: NotSupportedError.
        """
        self._with_store("seal")
        assert self._seal is not None, "a topic that is open for writing can be sealed"
        self._seal(self)

    seal_async = twin(seal)

    def plan_orphans(self) -> Plan:
        """What orphan removal would delete for this topic, and what it found to be lost. Changes nothing."""
        return self._with_store("remove-orphans").plan_orphans()

    plan_orphans_async = twin(plan_orphans)

    def remove_orphans(self, plan: Plan, *, drop_lost: bool = False, drop_uncovered: bool = False) -> Report:
        """Carries out a plan; each object is checked again before it is deleted.

        `drop_lost` and `drop_uncovered` also remove descriptors of lost objects, and objects that were never published.
        """
        return self._with_store("remove-orphans").remove_orphans(
            plan, drop_lost=drop_lost, drop_uncovered=drop_uncovered
        )

    remove_orphans_async = twin(remove_orphans)

    def _with_store(self, operation: str) -> TieredLog:
        if self._tiered is None:
            _ = self._log
            raise NotSupportedError(
                "this topic has no object store",
                operation=operation,
                hint=NAME_A_STORE,
            )
        return self._tiered

    # What the log directory does with it

    def _configure(self, settings: TierSettings) -> None:
        """Has changed settings take effect, as far as they can while it is open."""
        if self._tiered is not None:
            self._tiered.configure(settings)
        elif self._pruner is not None:
            self._pruner.configure(settings)

    def _seal_storage(self) -> None:
        self._close_subscriptions()
        if self._producers is not None:
            self._producers.before_seal()
        self._with_store("seal").seal()

    def _close_storage(self) -> None:
        """Flushes and closes what is below the topic."""
        self._close_subscriptions()
        if self._pruner is not None:
            self._pruner.stop()
        if self._staging is not None:
            self._staging.stop()
        try:
            if self._producers is not None:
                self._producers.close()
        finally:
            if self._tiered is not None:
                self._tiered.close()
            else:
                super()._close_storage()

    def _delete_storage(self) -> None:
        """Takes the topic out of the store and closes its log; readers find nothing any more."""
        if self._tiered is None:
            super()._delete_storage()
        else:
            # What is stored of subscriptions goes with the rest: not before it, should that fail.
            self._close_subscriptions(self._deleted_error)
            self._tiered.delete()
        if self._owned is not None:
            self._owned.forget()

    @property
    def _has_store(self) -> bool:
        """Whether its messages go to an object store."""
        return self._joined is not None

    def _use_subscriptions(
        self, cursors: CursorStore, background: Background, open_topic: Callable[[str], DeadLetterTopic]
    ) -> None:
        super()._use_subscriptions(cursors, background, open_topic)
        assert self._subscriptions is not None
        pruner = self._pruner if self._tiered is None else self._tiered.pruner
        if pruner is not None:
            pruner.keep_from = self._subscriptions.lowest_held_offset

    @property
    def _subscribable(self) -> Log | LiveLog | None:
        return self._owned

    def _check_owned(self) -> None:
        if self._tiered is not None:
            self._tiered.check_not_fenced()

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
        """Returns a consumer of the subscription of this name, which is created at `start` if it is new.

        A subscription resumes where it left off: `start` (an offset, "earliest", "latest" or a datetime) applies to a
        new one only. `kind` is "exclusive", "failover", "shared" or "key_shared". `filter` is a mapping of headers to
        their required values, or a function of a message; other messages are skipped. `options` are those of
        `DeliveryOptions`, such as `max_unacked=1000`, `ack_timeout_seconds=30` or `max_deliveries=5`.
        """
        return self._subscribe(name, kind, start, consumer, filter, options)

    subscribe_async = twin(subscribe, give_back=Consumer.close)

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

        Without `follow` it ends at the offset that is next now; with it, it waits for more and ends when the log is
        closed. The positions are resolved by this call, not by the first message. Messages that a repair could
        not restore raise GapError, or are skipped with `on_gap="skip"`.

        Messages of transactions are seen once those are committed: at an open transaction it ends, or waits for the
        outcome with `follow`. `isolation="read_uncommitted"` shows them at once, and those that are aborted too.
        """
        return self._messages(self._reader(start, stop, follow, on_gap, isolation), on_gap)

    read_async = twin_by(
        read,
        BaseTopic._read_async,
        "A time is looked up when the iteration begins, not by this call; so is every position in a topic that another "
        "process owns.",
    )

    def latest_by_key(
        self,
        *,
        prefix: bytes | None = None,
        stop: Position | None = None,
        values: bool = True,
        on_gap: OnGap = "raise",
        isolation: Isolation = READ_COMMITTED,
    ) -> LatestByKey:
        """Returns the newest message of every key, as a mapping; `refresh()` applies later messages.

        A message with a key and a null or empty value is a tombstone: it removes the key. Messages without a key are
        ignored.
        `prefix` selects keys that begin with it, `stop` messages below an offset or a time. It is in memory:
        `values=False` keeps keys and offsets only, and reads a message on access. `isolation` is as for `read`.
        """
        return self._latest_by_key(prefix, stop, values, on_gap, isolation)

    latest_by_key_async = twin(latest_by_key)

    def _latest_by_key(
        self,
        prefix: bytes | None,
        stop: Position | None,
        values: bool,
        on_gap: OnGap,
        isolation: Isolation,
        *,
        tombstones: bool = False,
    ) -> LatestByKey:
        check_on_gap(on_gap)
        check_isolation(isolation)
        topic = ReadableTopic(
            lambda start, end: self._reader(start, end, False, on_gap, isolation),
            lambda offset: self._reader(offset, offset + 1, False, on_gap, "read_uncommitted"),
            self._readable.resolve,
            lambda: self.start_offset,
        )
        return LatestByKey(topic, prefix=prefix, stop=stop, values=values, on_gap=on_gap, tombstones=tombstones)

    # Transactions

    def open_transactions(self) -> list[OpenTransaction]:
        """The transactions of Kafka's clients that are open, oldest first: at the first one readers end or wait.

        The first call reads the whole topic, in the store too; later ones read what was appended since.
        """
        return self._transactions.open()

    open_transactions_async = twin(open_transactions)

    def last_stable_offset(self) -> int:
        """The first offset of the oldest open transaction, else the next offset; reads as `open_transactions` does."""
        return self._transactions.last_stable_offset()

    last_stable_offset_async = twin(last_stable_offset)

    def abort_transaction(self, producer_id: int) -> OpenTransaction:
        """Ends the open transaction of a producer whose coordinator is gone; NotFoundError if it has none.

        Its messages are never seen by readers of what is committed. Only for one that nobody else will end: a producer
        that is alive would go on, and the rest of its messages would be a transaction of their own.
        """
        return self._transactions.abort(
            producer_id, self._clock.now_us(), lambda payload: self._appendable.append(payload, sync=True)
        )

    abort_transaction_async = twin(abort_transaction)

    @functools.cached_property
    def _transactions(self) -> TopicTransactions:
        return TopicTransactions(
            self.name,
            lambda offset: self._reader(offset, None, False, "skip", "read_uncommitted"),
            lambda: self.start_offset,
        )

    def _reader(
        self,
        start: Position,
        stop: Position | None,
        follow: bool,
        on_gap: OnGap,
        isolation: Isolation = READ_COMMITTED,
    ) -> BatchReader:
        if self._joined is None:
            reader = super()._reader(start, stop, follow, on_gap, isolation)
        else:
            check_on_gap(on_gap)
            check_isolation(isolation)
            reader = self._joined.read(start, stop, follow=follow, on_gap=on_gap)
        if isolation != READ_COMMITTED:
            return reader
        return CommittedReader(reader, lambda offset: self._scout(offset, follow, on_gap))

    def _scout(self, offset: int, follow: bool, on_gap: OnGap) -> BatchReader:
        if self._joined is not None:
            return self._joined.scout(offset, follow=follow, on_gap=on_gap)
        assert self._hot is not None, "a topic is on this disk, in a store, or both"
        return self._hot.scout(offset, follow=follow)

    # Appending

    @property
    def _log(self) -> Log:
        if self._owned is None:
            raise InputError(
                "the log directory was opened with read_only=True",
                operation=f"topic {self.name}",
                hint=Hint(
                    "Do it in the process that owns the topic, or open the directory without read_only",
                    command="Do it in the process that owns the topic",
                ),
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
        value: bytes | Message | None,
        *,
        key: bytes | None = None,
        headers: HeadersGiven | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> int:
        """Appends a message and returns its offset; with `sync` once it is on disk or, with `sync="shipped"`, also in
        the object store (concurrent waiters share one object).

        A value of None is null: with a key it is a tombstone. `headers` is a mapping, or a list of (name, value) pairs
        whose names may repeat; a value may be None.

        Subscriptions deliver it at `deliver_at`; reading the topic shows it at once. Blocks under backpressure, for
        `timeout` seconds at most (default: `append_timeout_ms`), then raises BackpressureError without having used an
        offset. With `sync="shipped"` the timeout also bounds the wait for the store.
        """
        log = self._owned or self._log
        if sync:
            sync = checked_sync(sync, self._tiered)
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
        """Appends messages atomically with consecutive offsets; returns the offsets.

        After a crash, a move or the loss of the disk either all of them exist or none. With `sync`
        it returns once all of them are on disk.
        """
        timeout = to_seconds(timeout)
        sync = checked_sync(sync, self._tiered)
        payloads = self._encoder.many(messages)
        offsets = self._appendable.append_many(payloads, sync=sync is True, timeout_seconds=timeout)
        if sync == SHIPPED and offsets and self._tiered is not None:
            wait_shipped(self._tiered, offsets[0], offsets[-1], timeout)
        return list(offsets)

    def append_frames(self, frames: Frames, *, sync: Sync = False, timeout: float | str | None = None) -> int:
        """Appends messages that are framed already (`tidelog.log.frame.encode_many` over payloads of
        `tidelog.topics.message`), as `append_many` does; returns the first offset.

        The log gives the frames its own offsets, whatever they have, and the caller gives them up: frames in a
        bytearray are completed there, others in a copy. Messages that must survive together must say so themselves.
        """
        timeout = to_seconds(timeout)
        sync = checked_sync(sync, self._tiered)
        first = self._appendable.append_frames(frames, sync=sync is True, timeout_seconds=timeout)
        if sync == SHIPPED and frames.count and self._tiered is not None:
            wait_shipped(self._tiered, first, first + frames.count - 1, timeout)
        return first

    @twin_of(append)
    def append_async(
        self,
        value: bytes | Message | None,
        *,
        key: bytes | None = None,
        headers: HeadersGiven | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> Coroutine[Any, Any, int]:
        timeout = to_seconds(timeout)
        sync = checked_sync(sync, self._tiered)
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
        """Asks for the topic's owner in a worker thread: the store may be slow, and the event loop must not block."""
        if self._tiered is not None and self._tiered.may_have_slept:
            await in_store_thread(self._tiered.check_awake)

    def _appendable_at_once(self) -> Log | None:
        """None where the store has to be asked first who owns the topic."""
        return None if self._tiered is not None and self._tiered.may_have_slept else self._log

    @twin_of(append_many)
    async def append_many_async(
        self, messages: Iterable[bytes | Message], *, sync: Sync = False, timeout: float | str | None = None
    ) -> list[int]:
        timeout = to_seconds(timeout)
        sync = checked_sync(sync, self._tiered)
        payloads = self._encoder.many(messages)
        await self._check_awake_async()
        offsets = await self._log.append_many_async(payloads, sync=sync is True, timeout_seconds=timeout)
        if sync == SHIPPED and offsets and self._tiered is not None:
            await wait_shipped_async(self._tiered, offsets[0], offsets[-1], timeout)
        return list(offsets)

    @twin_of(append_frames)
    async def append_frames_async(
        self, frames: Frames, *, sync: Sync = False, timeout: float | str | None = None
    ) -> int:
        timeout = to_seconds(timeout)
        sync = checked_sync(sync, self._tiered)
        await self._check_awake_async()
        first = await self._log.append_frames_async(frames, sync=sync is True, timeout_seconds=timeout)
        if sync == SHIPPED and frames.count and self._tiered is not None:
            await wait_shipped_async(self._tiered, first, first + frames.count - 1, timeout)
        return first

    def producer(self, name: str) -> Producer:
        """Returns a producer: repeated appends of the same producer and sequence are stored once.

        Deduplication survives a restart, a move to another node and the loss of the disk. A second
        producer of the same name takes over: appends of the first one raise FencedError. A topic remembers at most
        10,000 producers; the ones silent longest are forgotten.
        """
        _ = self._log
        assert self._producers is not None
        return Producer(self._producers, name, self._encoder, lambda: self._appendable, self._appendable_at_once)

    producer_async = twin(producer, give_back=Producer.close)

    def _append_lost(self, count: int) -> None:
        """Uses up the next offsets for lost messages, as a repair does: for programs that copy a damaged log.

        Readers get GapError there, or skip them with `on_gap="skip"`.
        """
        if count < 0:
            raise InputError(f"{count} messages cannot be lost")
        self._appendable.append_many([LOST_PAYLOAD] * count)

    def flush(self) -> None:
        """Returns once everything accepted so far is on the disk."""
        self._log.flush()

    @twin_of(flush)
    async def flush_async(self) -> None:
        await self._log.flush_async()
