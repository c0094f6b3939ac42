"""What every topic has, whether it keeps its messages (`topic.py`) or not (`live_topic.py`): reading and subscriptions.

All work is done per batch: one call decodes a batch of frames into a list of messages, and the iterator yields from
that list.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Self

import msgspec

from tidelog.clock import Clock
from tidelog.cold.settings import TierStatistics
from tidelog.cold.tiered_log import TieredLog
from tidelog.cold.tiered_reader import TieredView
from tidelog.errors import FencedError, Hint, InputError, NotFoundError, NotSupportedError, TidelogError
from tidelog.log import Log, Position
from tidelog.log.isolation import READ_COMMITTED, Isolation, check_isolation
from tidelog.log.reader import BatchReader
from tidelog.log.settings import LogStatistics
from tidelog.log.tail_cache import Batch
from tidelog.log.view import LogView
from tidelog.staging.ingest import IngestStatistics
from tidelog.store.aio import made_in_thread, twin
from tidelog.store.scheduler import Background
from tidelog.topics.live_log import LiveLog, LiveStatistics
from tidelog.topics.message import BatchDecoder, Message, OnGap, PayloadEncoder, read_messages, read_messages_async
from tidelog.topics.names import TopicName
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.cursors import CursorStore
from tidelog.topics.subscription.dead_letters import DeadLetterTopic
from tidelog.topics.subscription.feed import Filter, Source
from tidelog.topics.subscription.options import Kind, SubscribeOptions, SubscriptionStatistics
from tidelog.topics.subscription.registry import SubscriptionInfo, SubscriptionRegistry


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
    ingest: IngestStatistics | None = None
    """The staged commits of other processes and their ingest; None if the topic was opened for reading only."""
    live: LiveStatistics | None = None
    """Of a topic with `reliable=False`, which has no `log`."""


class BaseTopic:
    """What `Topic` and `LiveTopic` have in common. Any number of threads and tasks may use it at once."""

    is_reliable = True
    """Whether its messages are stored; those of a `LiveTopic` go to current readers only."""

    _tiered: TieredLog | None = None
    """The log and its store, when this process owns both."""

    partitions = 1
    """How many partitions it has: it is partition 0 of itself. A topic with more is a `PartitionedTopic`."""

    def __init__(self, name: TopicName, log: Log | LogView | LiveLog | None, clock: Clock, partition: int = 0) -> None:
        """`log` is what this machine has. `partition`: it is one of those of another topic."""
        self._name = name
        self._partition = partition
        self._kind: Callable[..., Message] = partial(Message, partition=partition) if partition else Message
        self._hot = log
        self._clock = clock
        self._subscriptions: SubscriptionRegistry | None = None
        self._delivery_defaults: Mapping[str, object] = {}
        """Subscription options from the topic's settings, for callers that do not give them."""
        self._encoder = PayloadEncoder(clock.now_us)
        self._payload = self._encoder.one

    @property
    def name(self) -> str:
        """`namespace/name`."""
        return str(self._name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def partition(self, number: int) -> Self:
        """Partition 0, which is the topic itself."""
        check_only_partition(self.name, number)
        return self

    # Where it stands

    @property
    def next_offset(self) -> int:
        """The offset that the next message gets."""
        return self._readable.next_offset

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read. It never goes back."""
        return self._readable.start_offset

    @property
    def hot_start_offset(self) -> int:
        """The oldest offset that is on this machine."""
        return self.next_offset if self._hot is None else self._hot.start_offset

    @property
    def shipped_offset(self) -> int:
        """Everything below is in the object store; 0 without one."""
        return 0

    @property
    def _readable(self) -> TieredView | Log | LogView | LiveLog:
        assert self._hot is not None, "a topic is on this disk, in a store, or both"
        return self._hot

    def statistics(self) -> TopicStatistics:
        """An immutable snapshot."""
        return TopicStatistics(
            name=self.name,
            start_offset=self.start_offset,
            next_offset=self.next_offset,
            hot_start_offset=self.hot_start_offset,
            shipped_offset=self.shipped_offset,
            log=None,
            tier=None,
            subscriptions=() if self._subscriptions is None else self._subscriptions.statistics(),
        )

    # What the log directory does with it

    @property
    def _is_open(self) -> bool:
        """Whether the log below the topic is still usable."""
        return self._hot is not None and not self._hot.over

    def _close_storage(self) -> None:
        """Flushes and closes what is below the topic."""
        self._close_subscriptions()
        if self._hot is not None:
            self._hot.close()

    def _delete_storage(self) -> None:
        """Closes the log; readers find nothing any more."""
        self._close_subscriptions(self._deleted_error)
        with contextlib.suppress(TidelogError):
            self._close_storage()

    def _use_subscriptions(
        self, cursors: CursorStore, background: Background, open_topic: Callable[[str], DeadLetterTopic]
    ) -> None:
        """Says where the positions of subscriptions are kept, and how the topics for dead letters are opened."""
        log = self._subscribable
        source = None if log is None else self._subscription_source(log)
        self._subscriptions = SubscriptionRegistry(
            self.name, source, lambda: self.next_offset, cursors, self._clock, background, open_topic
        )

    @property
    def _subscribable(self) -> Log | LiveLog | None:
        """What subscriptions read from; None when it was opened for reading only."""
        raise NotImplementedError

    def _subscription_source(self, log: Log | LiveLog) -> Source:
        return Source(
            self.name,
            log,
            lambda offset, on_gap: self._reader(offset, None, True, on_gap),
            self._readable.resolve,
            lambda: self.start_offset,
            self._check_owned,
            self._partition,
        )

    def _check_owned(self) -> None:
        """FencedError when another node owns the topic by now."""

    def _close_subscriptions(self, make_error: Callable[[], TidelogError] | None = None) -> list[FencedError]:
        """Stores how far they are and ends them; consumers get an error. Returns one for each that lost something."""
        return [] if self._subscriptions is None else self._subscriptions.close(make_error)

    def _deleted_error(self) -> NotFoundError:
        return NotFoundError(f"the topic {self.name} was deleted", hint="Close this consumer")

    # Subscriptions

    def _subscribe(
        self,
        name: str,
        kind: Kind,
        start: Position,
        consumer: str | None,
        filter: Filter | None,
        options: SubscribeOptions,
    ) -> Consumer:
        given = {**self._delivery_defaults, "kind": kind, **options}
        return self._registry.subscribe(name, start=start, consumer=consumer, matches=filter, options=given)

    def subscriptions(self) -> list[str]:
        """The names of all subscriptions."""
        return self._registry.names()

    subscriptions_async = twin(subscriptions)

    def subscription_info(self, name: str) -> SubscriptionInfo:
        """The position and options of a subscription, open or not."""
        return self._registry.info(name)

    subscription_info_async = twin(subscription_info)

    def delete_subscription(self, name: str) -> None:
        """Deletes a subscription and its position; ConflictError while it has consumers."""
        self._registry.delete(name)

    delete_subscription_async = twin(delete_subscription)

    @property
    def _registry(self) -> SubscriptionRegistry:
        if self._subscriptions is None:
            raise NotSupportedError("this topic was opened without subscriptions")
        if self._hot is not None and self._is_owner:
            self._hot.read("latest").close()  # one that is closed says so, rather than the store of the positions
        return self._subscriptions

    # Reading

    def _read_async(
        self, start: Position, stop: Position | None, follow: bool, on_gap: OnGap, isolation: Isolation
    ) -> AsyncIterator[Message]:
        check_on_gap(on_gap)
        check_isolation(isolation)
        if self._is_owner and not isinstance(start, datetime) and not isinstance(stop, datetime):
            return self._messages_async(self._reader(start, stop, follow, on_gap, isolation), on_gap)
        return self._look_up_and_read(start, stop, follow, on_gap, isolation)

    async def _look_up_and_read(
        self, start: Position, stop: Position | None, follow: bool, on_gap: OnGap, isolation: Isolation
    ) -> AsyncIterator[Message]:
        reader = await made_in_thread(
            lambda: self._reader(start, stop, follow, on_gap, isolation), lambda reader: reader.close()
        )
        async for message in self._messages_async(reader, on_gap):
            yield message

    def _messages(self, reader: BatchReader, on_gap: OnGap) -> Iterator[Message]:
        return read_messages(reader, on_gap, self._kind)

    def _messages_async(self, reader: BatchReader, on_gap: OnGap) -> AsyncIterator[Message]:
        return read_messages_async(reader, on_gap, self._kind)

    def _decoded(self, reader: BatchReader, batch: Batch, on_gap: OnGap) -> Iterable[Message]:
        return BatchDecoder(self._kind, on_gap, reader.place_of).decode(batch)

    @property
    def _is_owner(self) -> bool:
        """Whether this process knows by itself where the topic begins and ends."""
        return self._subscribable is not None

    def _reader(
        self,
        start: Position,
        stop: Position | None,
        follow: bool,
        on_gap: OnGap,
        isolation: Isolation = READ_COMMITTED,
    ) -> BatchReader:
        check_on_gap(on_gap)
        check_isolation(isolation)
        assert self._hot is not None
        return self._hot.read(start, stop, follow=follow)


def check_only_partition(topic: str, number: object) -> None:
    """InputError unless this is the partition of a topic that has one."""
    if number != 0 or isinstance(number, bool):
        raise InputError(
            f"{topic} has one partition, 0, not {number!r}",
            hint=Hint(
                "log.topic(name, partitions=...) adds partitions",
                command="`tidelog topic create TOPIC --partitions N` makes a topic with more",
            ),
        )


def check_on_gap(on_gap: object) -> None:
    """InputError when it is neither of the two."""
    if on_gap not in ("raise", "skip"):
        raise InputError(f'on_gap is "raise" or "skip", not {on_gap!r}')
