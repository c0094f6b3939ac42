"""What a program holds of a subscription: one consumer of it.

For example:

    with topic.subscribe("billing") as sub:
        for message in sub:
            print(message.value)
            sub.ack(message)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import NamedTuple, Self

from tidelog.errors import ClosedError, InputError
from tidelog.log.readable import Position
from tidelog.tier.daemon_pool import in_store_thread
from tidelog.topics.dead_letters import MAX_REASON_CHARACTERS
from tidelog.topics.delivery import Holder
from tidelog.topics.delivery_options import MAX_SECONDS
from tidelog.topics.delivery_queue import Delivery
from tidelog.topics.message import Message
from tidelog.topics.subscription import Subscription
from tidelog.units import to_seconds


class Lag(NamedTuple):
    """How far a subscription is behind: messages that are not acknowledged, and the age of the oldest of them."""

    messages: int
    seconds: float


class Consumer:
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
        """How far the subscription is behind."""
        return self._lag(self._subscription)

    async def lag_async(self) -> Lag:
        """As `lag`, in a worker thread: the oldest message may have to be read from a disk or a store."""
        return await in_store_thread(lambda: self.lag)

    def __repr__(self) -> str:
        return f"<Consumer {self.consumer} of {self.name}>"

    # Receiving

    def receive(self, timeout: float | str | None = None) -> Delivery | None:
        """The next message, as soon as there is one; None when `timeout` seconds passed."""
        return self._subscription.receive_one(self._holder, _checked_timeout(timeout))

    def receive_many(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        """Up to so many messages, as soon as there is at least one; none when `timeout` seconds passed."""
        count = _checked_count(max_messages)
        return list(self._subscription.receive(self._holder, count, _checked_timeout(timeout)))

    async def receive_async(self, timeout: float | str | None = None) -> Delivery | None:
        """As `receive`, suspending the task."""
        taken = await self._subscription.receive_async(self._holder, 1, _checked_timeout(timeout))
        return taken[0] if taken else None

    async def receive_many_async(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        """As `receive_many`, suspending the task."""
        count = _checked_count(max_messages)
        return list(await self._subscription.receive_async(self._holder, count, _checked_timeout(timeout)))

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
        """The message (or the one with this offset) is done with. It counts whenever it comes.

        An offset alone counts for what was handed out since the subscription was opened here, or moved; else it is an
        InputError. A message that was received counts also when the subscription was closed and opened in between.
        """
        offset = message if type(message) is int and message >= 0 else _offset(message)
        self._subscription.ack(self._holder, offset, has_receipt=isinstance(message, Delivery))

    def ack_many(self, messages: Iterable[Message | int]) -> None:
        """All of these are done with."""
        given = [(_offset(message), isinstance(message, Delivery)) for message in messages]
        self._subscription.ack_many(self._holder, given)

    def ack_cumulative(self, message: Message | int) -> None:
        """This one and all before it are done with; only exclusive and failover."""
        self._subscription.ack_cumulative(self._holder, _offset(message))

    def nack(self, message: Message | int, delay: float | str | None = None, *, reason: str | None = None) -> None:
        """The message is to come again, after `delay` seconds or the pause that the options say.

        `reason` is kept in memory until the message is acknowledged or given up: then its dead letter has the newest
        one, up to 1,000 characters of it.
        InputError when it is acknowledged or given up already, or was never handed out.
        """
        self._subscription.nack(self._holder, _offset(message), _checked_delay(delay), _checked_reason(reason))

    async def ack_async(self, message: Message | int) -> None:
        """As `ack`, which waits for nothing."""
        self.ack(message)

    async def ack_many_async(self, messages: Iterable[Message | int]) -> None:
        """As `ack_many`."""
        self.ack_many(messages)

    async def nack_async(
        self, message: Message | int, delay: float | str | None = None, *, reason: str | None = None
    ) -> None:
        """As `nack`."""
        self.nack(message, delay, reason=reason)

    async def ack_cumulative_async(self, message: Message | int) -> None:
        """As `ack_cumulative`."""
        self.ack_cumulative(message)

    # Moving

    def seek(self, position: Position) -> None:
        """Moves the subscription, for all its consumers: what is there and behind it comes (again).

        `position` is an offset, a datetime, "earliest" or "latest". What consumers have now is no longer theirs.
        """
        self._subscription.seek(self._subscription.source.resolve(position))

    def flush(self) -> None:
        """Stores the position now: of what was acknowledged before, nothing comes again after a crash."""
        self._subscription.flush()

    async def seek_async(self, position: Position) -> None:
        """As `seek`, in a worker thread."""
        await in_store_thread(self.seek, position)

    async def flush_async(self) -> None:
        """As `flush`, in a worker thread."""
        await in_store_thread(self.flush)

    # Ending

    def close(self) -> None:
        """Leaves: what was not acknowledged goes to other consumers. The last one stores the position."""
        if self._subscription.leave(self._holder):
            self._on_leave(self._subscription)

    def unsubscribe(self) -> None:
        """Leaves and deletes the subscription; ConflictError while it has other consumers."""
        self._on_delete(self._subscription)

    async def close_async(self) -> None:
        """As `close`, in a worker thread."""
        await in_store_thread(self.close)

    async def unsubscribe_async(self) -> None:
        """As `unsubscribe`, in a worker thread."""
        await in_store_thread(self.unsubscribe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close_async()


def _offset(message: Message | int) -> int:
    offset = message.offset if isinstance(message, Message) else message
    if type(offset) is int and offset >= 0:
        return offset
    if isinstance(message, Message):
        raise InputError("this message has no offset: it was not received", hint="Settle what `receive` has returned")
    raise InputError(f"a message or its offset is settled, not {message!r}")


def _checked_timeout(timeout: float | str | None, name: str = "timeout") -> float | None:
    seconds = to_seconds(timeout, name)
    return seconds if seconds is None else min(seconds, MAX_SECONDS)


def _checked_delay(delay: float | str | None) -> float | None:
    """A message cannot wait for ever: who never wants it again acknowledges it."""
    checked = _checked_timeout(delay, "delay")
    if checked is not None and checked >= MAX_SECONDS:
        raise InputError(f"a pause of {delay!r} seconds is too long", hint="Acknowledge what is not to come again")
    return checked


def _checked_reason(reason: object) -> str | None:
    """What it says of an error may be long: the beginning is kept."""
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise InputError(f"reason must be str, not {type(reason).__name__}", hint="As in reason=str(error)")
    return reason[:MAX_REASON_CHARACTERS].encode("utf-8", "replace").decode()


def _checked_count(count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"max_messages must be 1 or more, not {count!r}")
    return count
