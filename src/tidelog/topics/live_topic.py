"""A topic with `reliable=False`: messages go to current readers and subscribers and are not stored.

Invariants
- Only `topic.json` is on disk, and nothing is shipped. When the process ends, everything is lost, positions included,
  and offsets begin at 0 again.
- An append never waits for a reader, a disk or a store. A reader that is too slow misses messages; they are counted,
  and this is not an error.
- It has nothing that needs durable messages: asking for that raises NotSupportedError, which explains it. `flush` and
  `prune` are no-ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn, Unpack

import msgspec

from tidelog.clock import Clock
from tidelog.cold.cursor import Cursor
from tidelog.errors import NotSupportedError
from tidelog.log import Log, Position
from tidelog.log.isolation import READ_COMMITTED, Isolation
from tidelog.store.aio import at_once, twin, twin_by
from tidelog.store.keys import group_of_cursor
from tidelog.store.scheduler import Background
from tidelog.topics.base import BaseTopic, TopicStatistics
from tidelog.topics.live_log import LiveLog
from tidelog.topics.message import HeadersGiven, Message, OnGap, Sync, several
from tidelog.topics.names import TopicName
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.cursors import CursorStore
from tidelog.topics.subscription.dead_letters import DeadLetterTopic
from tidelog.topics.subscription.feed import Filter
from tidelog.topics.subscription.options import Kind, SubscribeOptions
from tidelog.topics.topic import Topic


class MemoryCursors:
    """The positions of subscriptions, for as long as the topic is open."""

    def __init__(self) -> None:
        self._cursors: dict[str, Cursor] = {}

    def names(self) -> list[str]:
        return [name for name in self._cursors if group_of_cursor(name) is None]

    def groups(self) -> list[str]:
        """The consumer groups among them."""
        return [group for name in self._cursors if (group := group_of_cursor(name)) is not None]

    def load(self, name: str) -> Cursor | None:
        return self._cursors.get(name)

    def store(self, name: str, cursor: Cursor) -> None:
        """Takes the place of the one before."""
        self._cursors[name] = cursor

    def delete(self, name: str) -> None:
        self._cursors.pop(name, None)


class _OnlyOfTopicError(NotSupportedError, AttributeError):
    """A live topic has no such method: `hasattr` says so too."""


class LiveTopic(BaseTopic):
    """A topic whose messages are in memory only. Any number of threads and tasks may use it at once."""

    is_reliable = False

    def __init__(self, name: TopicName, log: LiveLog, clock: Clock) -> None:
        """A log that is over already belongs to another process."""
        super().__init__(name, log, clock)
        self._live = log
        self._is_elsewhere = log.over
        self._try_append = log.try_append

    if not TYPE_CHECKING:  # a type checker knows it without

        def __getattr__(self, name: str) -> NoReturn:
            """Explains why there is nothing that needs messages that last."""
            if name.startswith("__") or not hasattr(Topic, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            self._refuse(name, kind=_OnlyOfTopicError)

    # Where it stands

    @property
    def durable_offset(self) -> int:
        """0: nothing is on the disk."""
        return 0

    def statistics(self) -> TopicStatistics:
        """An immutable snapshot; `live` counts the messages that readers missed."""
        return msgspec.structs.replace(super().statistics(), live=self._live.statistics())

    # What the log directory does with it

    def _use_subscriptions(
        self, cursors: CursorStore, background: Background, open_topic: Callable[[str], DeadLetterTopic]
    ) -> None:
        """Positions are kept in memory, wherever those of other topics are."""
        super()._use_subscriptions(MemoryCursors(), background, open_topic)

    @property
    def _subscribable(self) -> Log | LiveLog | None:
        return None if self._is_elsewhere else self._live

    @property
    def _is_owner(self) -> bool:
        return True

    def _delete_storage(self) -> None:
        super()._delete_storage()
        self._live.forget()

    # Reading

    def read(
        self,
        start: Position = "latest",
        stop: Position | None = None,
        *,
        follow: bool = True,
        on_gap: OnGap = "raise",
        isolation: Isolation = READ_COMMITTED,
    ) -> Iterator[Message]:
        """Yields messages as they arrive, until the topic is closed; `start` may go back to what is still in memory.

        A reader that is too slow continues with the oldest message in memory; the statistics count what it missed.
        A live topic has no transactions: both kinds of `isolation` show the same.
        """
        return self._messages(self._reader(start, stop, follow, on_gap, isolation), on_gap)

    read_async = twin_by(read, BaseTopic._read_async)

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

        Nothing is retained for a subscription: one that is too slow continues with the oldest message in memory, and
        `lost` in its statistics counts what it missed. There are no dead letters: they are identified by offsets, which
        start over with every process.
        """
        if options.get("hold_retention"):
            self._refuse("hold_retention")
        if options.get("max_deliveries") is not None and options.get("on_exhausted", "dead_letter") == "dead_letter":
            self._refuse("a dead letter", 'Choose on_exhausted="drop" or "block"')
        return self._subscribe(name, kind, start, consumer, filter, options)

    subscribe_async = twin(subscribe, give_back=Consumer.close)

    # Appending

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
        """Delivers a message to current readers and returns its offset. It never waits, so `timeout` has no effect."""
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

    append_async = twin(append, at_once)
    append_many_async = twin(append_many, at_once)

    def flush(self) -> None:
        """Does nothing: there is nothing to wait for."""

    flush_async = twin(flush, at_once)

    def prune(self) -> None:
        """Does nothing: memory is bounded at every moment, by `cache_max_messages` and `cache_max_bytes`."""

    prune_async = twin(prune, at_once)

    def _refuse(
        self,
        operation: str,
        hint: str = "Use a topic that is reliable",
        kind: type[NotSupportedError] = NotSupportedError,
    ) -> NoReturn:
        raise kind(f"{self.name} has reliable=False and keeps no messages: {operation} is not possible", hint=hint)
