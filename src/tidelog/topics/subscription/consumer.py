"""A consumer: a program's handle on a subscription.

For example:

    with topic.subscribe("billing") as sub:
        for message in sub:
            print(message.value)
            sub.ack(message)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NamedTuple

from tidelog.errors import ClosedError, InputError
from tidelog.log.reader import Position
from tidelog.store.aio import ClosedAtExit, at_once, twin, twin_of
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.message import Message
from tidelog.topics.subscription.dead_letters import MAX_REASON_CHARACTERS
from tidelog.topics.subscription.delivery import Holder
from tidelog.topics.subscription.options import MAX_SECONDS
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.subscription.subscription import Subscription
from tidelog.units import to_seconds


class Lag(NamedTuple):
    """The lag of a subscription: the number of unacknowledged messages, and the age of the oldest of them."""

    messages: int
    seconds: float


class Consumer(ClosedAtExit):
    """One consumer of a subscription; `topic.subscribe` makes it. Threads and tasks may share it."""

    def __init__(
        self,
        subscription: Subscription,
        holder: Holder,
        on_leave: Callable[[Subscription], None],
        on_delete: Callable[[Subscription], None],
        lag: Callable[[Subscription], Lag],
    ) -> None:
        self._subscription = subscription
        self._holder = holder
        self._on_leave = on_leave
        self._on_delete = on_delete
        self._lag = lag

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self._subscription.name

    @property
    def consumer(self) -> str:
        """The name of this consumer of it."""
        return self._holder.name

    @property
    def lag(self) -> Lag:
        """The lag of the subscription."""
        return self._lag(self._subscription)

    async def lag_async(self) -> Lag:
        """As `lag`, in a worker thread: the oldest message may have to be read from a disk or a store."""
        return await in_store_thread(lambda: self.lag)

    def __repr__(self) -> str:
        return f"<Consumer {self.consumer} of {self.name}>"

    # Receiving

    def receive(self, timeout: float | str | None = None) -> Delivery | None:
        """Waits for the next message and returns it; returns None after `timeout` seconds."""
        return self._subscription.receive_one(self._holder, checked_timeout(timeout))

    def receive_many(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        """Returns up to `max_messages`, as soon as there is at least one; an empty list after `timeout` seconds."""
        count = checked_count(max_messages)
        return list(self._subscription.receive(self._holder, count, checked_timeout(timeout)))

    @twin_of(receive)
    async def receive_async(self, timeout: float | str | None = None) -> Delivery | None:
        taken = await self._subscription.receive_async(self._holder, 1, checked_timeout(timeout))
        return taken[0] if taken else None

    @twin_of(receive_many)
    async def receive_many_async(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        count = checked_count(max_messages)
        return list(await self._subscription.receive_async(self._holder, count, checked_timeout(timeout)))

    def __iter__(self) -> Iterator[Delivery]:
        """Messages as they come, until the consumer, the subscription or the topic is closed."""
        try:
            while True:
                yield from self._subscription.receive(self._holder, 1, None)
        except ClosedError:
            return

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        try:
            while True:
                for message in await self._subscription.receive_async(self._holder, 1, None):
                    yield message
        except ClosedError:
            return

    # Settling

    def ack(self, message: Message | int) -> None:
        """Acknowledges a message (or the one with this offset), however late.

        An offset alone is accepted for messages delivered since the subscription was opened here, or moved; otherwise
        it is an InputError. A received message is also accepted if the subscription was closed and opened in between.
        """
        offset = message if type(message) is int and message >= 0 else offset_of(message)
        self._subscription.ack(self._holder, offset, has_receipt=isinstance(message, Delivery))

    def ack_many(self, messages: Iterable[Message | int]) -> None:
        """Acknowledges several messages."""
        given = [(offset_of(message), isinstance(message, Delivery)) for message in messages]
        self._subscription.ack_many(self._holder, given)

    def ack_cumulative(self, message: Message | int) -> None:
        """Acknowledges this message and all before it; for the kinds exclusive and failover only."""
        self._subscription.ack_cumulative(self._holder, offset_of(message))

    def nack(self, message: Message | int, delay: float | str | None = None, *, reason: str | None = None) -> None:
        """Requests redelivery of a message, after `delay` seconds or the delay set in the options.

        `reason` is kept in memory until the message is acknowledged or given up: then its dead letter has the newest
        one, up to 1,000 characters of it. Raises InputError if the message is already acknowledged or given up, or was
        never delivered.
        """
        self._subscription.nack(self._holder, offset_of(message), checked_delay(delay), checked_reason(reason))

    ack_async = twin(ack, at_once)
    ack_many_async = twin(ack_many, at_once)
    ack_cumulative_async = twin(ack_cumulative, at_once)
    nack_async = twin(nack, at_once)

    # Moving

    def seek(self, position: Position) -> None:
        """Moves the subscription, for all its consumers: delivery resumes at `position`.

        `position` is an offset, a datetime, "earliest" or "latest". Consumers lose the messages that they hold now.
        """
        self._subscription.seek(self._subscription.source.resolve(position))

    def flush(self) -> None:
        """Stores the position now: messages acknowledged so far are not redelivered after a crash."""
        self._subscription.flush()

    seek_async = twin(seek)
    flush_async = twin(flush)

    # Ending

    def close(self) -> None:
        """Leaves: unacknowledged messages go to other consumers. The last one to leave stores the position."""
        if self._subscription.leave(self._holder):
            self._on_leave(self._subscription)

    def unsubscribe(self) -> None:
        """Leaves and deletes the subscription; ConflictError while it has other consumers."""
        self._on_delete(self._subscription)

    close_async = twin(close)
    unsubscribe_async = twin(unsubscribe)


def offset_of(message: Message | int) -> int:
    """The offset of a message that was received; InputError for what is none."""
    offset = message.offset if isinstance(message, Message) else message
    if type(offset) is int and offset >= 0:
        return offset
    if isinstance(message, Message):
        raise InputError(
            "the message has no offset: it was not received", hint="Pass a message that `receive` returned"
        )
    if message is None:
        raise InputError(
            "expected a message or its offset, got None", hint="`receive` returns None on timeout: check for that first"
        )
    raise InputError(f"expected a message or its offset, got {message!r}")


def checked_timeout(timeout: float | str | None, name: str = "timeout") -> float | None:
    """The seconds to wait; None: as long as it takes."""
    seconds = to_seconds(timeout, name)
    return seconds if seconds is None else min(seconds, MAX_SECONDS)


def checked_delay(delay: float | str | None) -> float | None:
    """The seconds until a redelivery. None can wait for ever: a consumer that never wants it again acknowledges."""
    checked = checked_timeout(delay, "delay")
    if checked is not None and checked >= MAX_SECONDS:
        raise InputError(
            f"a delay of {delay!r} seconds is too long", hint="Use ack() for a message that must not come again"
        )
    return checked


def checked_reason(reason: object) -> str | None:
    """The reason of a rejection. What it says of an error may be long: the beginning is kept."""
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise InputError(f"reason must be str, not {type(reason).__name__}", hint="For example reason=str(error)")
    return reason[:MAX_REASON_CHARACTERS].encode("utf-8", "replace").decode()


def checked_count(count: object) -> int:
    """How many messages are wanted; InputError when it is not a number from 1 on."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"max_messages must be 1 or more, not {count!r}")
    return count
