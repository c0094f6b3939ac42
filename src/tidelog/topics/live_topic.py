"""A topic with `reliable=False`: messages go to whoever reads or subscribes at that moment, and are kept by nobody.

Invariants
- Nothing but `topic.json` is on the disk, nothing is shipped. With the process everything is gone, positions included,
  and offsets begin at 0 again.
- An append never waits for a reader, a disk or a store. Who is too slow misses messages, which is counted and no error.
- What needs messages that last raises NotSupportedError and says so; `flush` and `prune` have nothing to do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import NoReturn, Unpack

import msgspec

from tidelog.clock import Clock
from tidelog.errors import NotSupportedError
from tidelog.log.readable import Position
from tidelog.tier.background import Background
from tidelog.tier.owner import Cursor
from tidelog.tier.sweep_plan import SweepPlan, SweepReport
from tidelog.topics.cursor_store import CursorStore
from tidelog.topics.delivery_options import Kind, SubscribeOptions
from tidelog.topics.durability import Sync
from tidelog.topics.latest_by_key import LatestByKey
from tidelog.topics.live_log import LiveLog
from tidelog.topics.message import Message
from tidelog.topics.names import TopicName
from tidelog.topics.payloads import several
from tidelog.topics.producer import Producer
from tidelog.topics.reading import OnGap
from tidelog.topics.subscription_consumer import Consumer
from tidelog.topics.subscription_feed import Filter
from tidelog.topics.topic import Topic, TopicStatistics


class MemoryCursors:
    """The positions of subscriptions, for as long as the topic is open."""

    def __init__(self) -> None:
        self._cursors: dict[str, Cursor] = {}

    def names(self) -> list[str]:
        """All of them."""
        return list(self._cursors)

    def load(self, name: str) -> Cursor | None:
        """None when there is none."""
        return self._cursors.get(name)

    def store(self, name: str, cursor: Cursor) -> None:
        """Takes the place of the one before."""
        self._cursors[name] = cursor

    def delete(self, name: str) -> None:
        """Fine when there is none."""
        self._cursors.pop(name, None)


class LiveTopic(Topic):
    """A topic whose messages are in memory only. Any number of threads and tasks may use it at once."""

    is_reliable = False

    def __init__(self, name: TopicName, log: LiveLog, clock: Clock) -> None:
        """A log that is over already belongs to another process."""
        super().__init__(name, log, clock)
        self._live = log
        self._is_elsewhere = log.over
        self._try_append = log.try_append

    def __repr__(self) -> str:
        return f"<LiveTopic {self.name}>"

    # Where it stands

    @property
    def durable_offset(self) -> int:
        """0: nothing is on the disk."""
        return 0

    def statistics(self) -> TopicStatistics:
        """An immutable snapshot; `live` counts the messages that readers missed."""
        return msgspec.structs.replace(super().statistics(), live=self._live.statistics())

    # What the log directory does with it

    def use_subscriptions(
        self, cursors: CursorStore, background: Background, open_topic: Callable[[str], Topic]
    ) -> None:
        """Positions are kept in memory, wherever those of other topics are."""
        super().use_subscriptions(MemoryCursors(), background, open_topic)

    @property
    def _subscribable(self) -> LiveLog | None:
        return None if self._is_elsewhere else self._live

    def delete_storage(self) -> None:
        """Closes it; readers find nothing any more."""
        super().delete_storage()
        self._live.forget()

    # Reading

    def read(
        self,
        start: Position = "latest",
        stop: Position | None = None,
        *,
        follow: bool = True,
        on_gap: OnGap = "raise",
    ) -> Iterator[Message]:
        """Messages as they come, until the topic is closed; `start` may reach back to what is still in memory.

        A reader that is too slow goes on with the oldest message in memory; what it missed is counted in statistics.
        """
        return super().read(start, stop, follow=follow, on_gap=on_gap)

    def read_async(
        self,
        start: Position = "latest",
        stop: Position | None = None,
        *,
        follow: bool = True,
        on_gap: OnGap = "raise",
    ) -> AsyncIterator[Message]:
        """As `read`, for `async for`."""
        return super().read_async(start, stop, follow=follow, on_gap=on_gap)

    def latest_by_key(
        self,
        *,
        prefix: bytes | None = None,
        stop: Position | None = None,
        values: bool = True,
        on_gap: OnGap = "raise",
    ) -> LatestByKey:
        """Not possible: the newest message of a key may be gone."""
        self._refuse("latest_by_key")

    def subscribe(
        self,
        name: str,
        kind: Kind = "exclusive",
        *,
        start: Position = "latest",
        consumer: str | None = None,
        filter: Filter | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> Consumer:
        """As for other topics, of every kind, with a position that lasts as long as the topic is open.

        Nothing is held back for a subscription: one that is too slow goes on with the oldest message in memory, and
        `lost` in its statistics counts what it missed. There are no dead letters: they are told apart by offsets, which
        begin anew with every process.
        """
        if options.get("hold_retention"):
            self._refuse("hold_retention")
        if options.get("max_deliveries") is not None and options.get("on_exhausted", "dead_letter") == "dead_letter":
            self._refuse("a dead letter", 'Choose on_exhausted="drop" or "block"')
        return super().subscribe(name, kind, start=start, consumer=consumer, filter=filter, **options)

    # Appending

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
        """Hands a message to whoever reads now, and returns its offset. It never waits, so `timeout` has no effect."""
        if sync:
            self._refuse("sync")
        return self._try_append(self._payload(value, key, headers, timestamp, deliver_at))

    def append_many(
        self, messages: Iterable[bytes | Message], *, sync: Sync = False, timeout: float | str | None = None
    ) -> list[int]:
        """Messages with consecutive offsets, which readers see at the same moment; returns the offsets."""
        if sync:
            self._refuse("sync")
        return list(self._live.append_many([self._payload(message, None, None, None) for message in several(messages)]))

    async def append_async(
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
        """As `append`, to be awaited; the task is never suspended."""
        return self.append(value, key=key, headers=headers, timestamp=timestamp, deliver_at=deliver_at, sync=sync)

    async def append_many_async(
        self, messages: Iterable[bytes | Message], *, sync: Sync = False, timeout: float | str | None = None
    ) -> list[int]:
        """As `append_many`, to be awaited; the task is never suspended."""
        return self.append_many(messages, sync=sync)

    def flush(self) -> None:
        """Does nothing: there is nothing to wait for."""

    async def flush_async(self) -> None:
        """Does nothing: there is nothing to wait for."""

    # What needs messages that last

    def producer(self, name: str) -> Producer:
        """Not possible: what was stored is known from the messages."""
        self._refuse("producer")

    def append_lost(self, count: int) -> None:
        """Not possible."""
        self._refuse("append_lost")

    def ship(self) -> int:
        """Not possible."""
        self._refuse("ship")

    def prune(self) -> None:
        """Does nothing: memory is bounded at every moment, by `cache_max_messages` and `cache_max_bytes`."""

    def seal(self) -> None:
        """Not possible: there is nothing that another node could go on with."""
        self._refuse("seal")

    def plan_sweep(self) -> SweepPlan:
        """Not possible."""
        self._refuse("sweep")

    def sweep(self, plan: SweepPlan, *, drop_lost: bool = False, drop_uncovered: bool = False) -> SweepReport:
        """Not possible."""
        self._refuse("sweep")

    def _refuse(self, operation: str, hint: str = "Use a topic that is reliable") -> NoReturn:
        raise NotSupportedError(
            f"{self.name} has reliable=False and keeps no messages: {operation} is not possible", hint=hint
        )
