"""The async twins of what a topic and a log directory do by waiting for a disk or a store.

Each does the same as the method without `_async`, in a thread that may wait for a store, so that the event loop goes
on. What is made for a task that is cancelled meanwhile is closed again: a consumer that nobody holds would keep its
subscription for ever. Appending and reading are not here: their twins use no threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, Unpack

from tidelog.log.readable import Position
from tidelog.tier.daemon_pool import in_store_thread
from tidelog.tier.sweep_plan import SweepPlan, SweepReport
from tidelog.tier.tier_settings import TierOptions
from tidelog.topics.delivery_options import Kind, SubscribeOptions
from tidelog.topics.latest_by_key import LatestByKey
from tidelog.topics.producer import Producer
from tidelog.topics.reading import OnGap
from tidelog.topics.subscription_consumer import Consumer
from tidelog.topics.subscription_feed import Filter
from tidelog.topics.subscription_registry import SubscriptionInfo
from tidelog.topics.worker_thread import made_in_worker_thread

if TYPE_CHECKING:
    from tidelog.topics.topic import Topic


class _Topic(Protocol):
    """What a topic does by waiting."""

    @property
    def subscribe(self) -> Callable[..., Consumer]: ...

    @property
    def latest_by_key(self) -> Callable[..., LatestByKey]: ...

    def subscriptions(self) -> list[str]: ...

    def subscription_info(self, name: str) -> SubscriptionInfo: ...

    def delete_subscription(self, name: str) -> None: ...

    def producer(self, name: str) -> Producer: ...

    def ship(self) -> int: ...

    def prune(self) -> None: ...

    def take_in(self) -> int: ...

    def seal(self) -> None: ...

    def plan_sweep(self) -> SweepPlan: ...

    def sweep(self, plan: SweepPlan, *, drop_lost: bool = False, drop_uncovered: bool = False) -> SweepReport: ...


class _Directory(Protocol):
    """What a log directory does by waiting."""

    @property
    def topic(self) -> Callable[..., Topic]: ...

    def configure_topic(self, name: str, **settings: Unpack[TierOptions]) -> dict[str, object]: ...

    def has_topic(self, name: str) -> bool: ...

    def topics(self) -> list[str]: ...

    def open_topics(self, names: Sequence[str]) -> list[Topic]: ...

    def delete_topic(self, name: str, *, take_over: bool = False) -> None: ...

    def close(self) -> None: ...


class TopicTasks:
    """What a topic has for tasks, beside appending and reading."""

    async def subscribe_async(
        self: _Topic,
        name: str,
        kind: Kind = "exclusive",
        *,
        start: Position | None = None,
        consumer: str | None = None,
        filter: Filter | None = None,
        **options: Unpack[SubscribeOptions],
    ) -> Consumer:
        """As `subscribe`. Without `start` a new subscription begins where it would there."""
        given = options if start is None else {"start": start, **options}
        return await made_in_worker_thread(
            lambda: self.subscribe(name, kind, consumer=consumer, filter=filter, **given),
            Consumer.close,
        )

    async def subscriptions_async(self: _Topic) -> list[str]:
        """As `subscriptions`."""
        return await in_store_thread(self.subscriptions)

    async def subscription_info_async(self: _Topic, name: str) -> SubscriptionInfo:
        """As `subscription_info`."""
        return await in_store_thread(self.subscription_info, name)

    async def delete_subscription_async(self: _Topic, name: str) -> None:
        """As `delete_subscription`."""
        await in_store_thread(self.delete_subscription, name)

    async def producer_async(self: _Topic, name: str) -> Producer:
        """As `producer`: the first one of a topic may have to read much of it."""
        return await made_in_worker_thread(lambda: self.producer(name), Producer.close)

    async def latest_by_key_async(
        self: _Topic,
        *,
        prefix: bytes | None = None,
        stop: Position | None = None,
        values: bool = True,
        on_gap: OnGap = "raise",
    ) -> LatestByKey:
        """As `latest_by_key`, which reads the whole topic."""
        return await in_store_thread(self.latest_by_key, prefix=prefix, stop=stop, values=values, on_gap=on_gap)

    async def ship_async(self: _Topic) -> int:
        """As `ship`."""
        return await in_store_thread(self.ship)

    async def prune_async(self: _Topic) -> None:
        """As `prune`."""
        await in_store_thread(self.prune)

    async def take_in_async(self: _Topic) -> int:
        """As `take_in`."""
        return await in_store_thread(self.take_in)

    async def seal_async(self: _Topic) -> None:
        """As `seal`."""
        await in_store_thread(self.seal)

    async def plan_sweep_async(self: _Topic) -> SweepPlan:
        """As `plan_sweep`."""
        return await in_store_thread(self.plan_sweep)

    async def sweep_async(
        self: _Topic, plan: SweepPlan, *, drop_lost: bool = False, drop_uncovered: bool = False
    ) -> SweepReport:
        """As `sweep`."""
        return await in_store_thread(self.sweep, plan, drop_lost=drop_lost, drop_uncovered=drop_uncovered)


class DirectoryTasks:
    """What a log directory has for tasks."""

    async def topic_async(
        self: _Directory,
        name: str,
        *,
        first_offset: int = 0,
        reliable: bool | None = None,
        take_over: bool = False,
        **settings: Unpack[TierOptions],
    ) -> Topic:
        """As `topic`: opening one recovers its files and, with a store, claims it."""
        return await in_store_thread(
            self.topic, name, first_offset=first_offset, reliable=reliable, take_over=take_over, **settings
        )

    async def configure_topic_async(self: _Directory, name: str, **settings: Unpack[TierOptions]) -> dict[str, object]:
        """As `configure_topic`."""
        return await in_store_thread(self.configure_topic, name, **settings)

    async def has_topic_async(self: _Directory, name: str) -> bool:
        """As `has_topic`."""
        return await in_store_thread(self.has_topic, name)

    async def topics_async(self: _Directory) -> list[str]:
        """As `topics`."""
        return await in_store_thread(self.topics)

    async def open_topics_async(self: _Directory, names: Sequence[str]) -> list[Topic]:
        """As `open_topics`."""
        return await in_store_thread(self.open_topics, names)

    async def delete_topic_async(self: _Directory, name: str, *, take_over: bool = False) -> None:
        """As `delete_topic`."""
        await in_store_thread(self.delete_topic, name, take_over=take_over)

    async def close_async(self: _Directory) -> None:
        """As `close`."""
        await in_store_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self: _Directory,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await in_store_thread(self.close)
