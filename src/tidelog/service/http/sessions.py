"""Consumers in other processes: each is a session here, which holds what its client has received and not settled.

    subscribe -> session (a lease) -> receive, ack, nack, extend ... -> close, or the lease runs out

Invariants
- What a session holds goes back to the subscription when it is closed, when its lease runs out, and when a client with
  the same consumer name subscribes again: nothing waits for a client that is gone.
- A lease is renewed by every request of its client, and by `extend` while a handler takes its time; a request that
  waits for messages keeps it alive. A WebSocket needs none: its connection is the lease.
- An answer that was lost is given again: `receive` says which batch the client has seen last, and gets the one after
  it, the same messages as before as far as they are not settled.
- Closing returns when every acknowledgement is stored: nothing that was acknowledged comes again.
- The id of a session says which start of the server made it. What a client received from an earlier one it may still
  acknowledge: the work is done, and nothing else may have become of the message at its offset.
- A client gets what is in a file, which outlives a kill of the process. A client outlives it too, and what it says of
  an offset would otherwise count for the message that took the offset of one that was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec

from tidelog.errors import ConflictError, InputError, TidelogError
from tidelog.service.auth.access import Principal
from tidelog.service.http.problems import HttpError
from tidelog.service.http.spread.consumer import SpreadConsumer, held_by, is_held_by
from tidelog.topics.names import TopicName
from tidelog.topics.partitioned import PartitionedConsumer, PartitionOffset
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.options import Kind
from tidelog.topics.subscription.queue import Delivery

_logger = logging.getLogger("tidelog.http")
_MAX_SESSIONS = 10_000
CONSUMER_SEPARATOR = "."
"""Before the number of the node in the id of a consumer, where there are several nodes."""
_Seconds = Annotated[float, msgspec.Meta(ge=0.001, le=86_400 * 366)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 2)]
Settled = tuple[Annotated[int, msgspec.Meta(ge=0, le=100_000)], Offset]
"""Partition and offset of a message."""


class SubscribeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a subscription delivers. All its consumers give the same; what is left out has the default of the library."""

    kind: Kind = "exclusive"
    max_unacked: int | None = None
    ack_timeout_seconds: _Seconds | None = None
    max_deliveries: int | None = None
    on_exhausted: Literal["block", "drop", "dead_letter"] | None = None
    dead_letter_topic: str | None = None
    redelivery_backoff_seconds: float | None = None
    redelivery_backoff_max_seconds: float | None = None
    max_rate_per_second: float | None = None
    time_to_live_seconds: _Seconds | None = None
    on_gap: Literal["raise", "skip"] | None = None
    hold_retention: bool | None = None
    progress_flush_interval_seconds: _Seconds | None = None
    progress_min_offset_delta: int | None = None

    def given(self) -> dict[str, Any]:
        """What was said, for the library."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Subscribe(SubscribeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A new consumer of a subscription, which is created if there is none of its name."""

    start: str | dict[str, Offset] = "earliest"
    """Where a new subscription begins: `earliest`, `latest`, a time, an offset, or an offset for each partition."""
    consumer: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    """The name of this consumer. A client that comes again by its name takes over what it held before."""
    filter: dict[str, str] | None = None
    """Headers and the values that they must have; other messages are skipped."""
    lease_seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 30.0
    """Without a request for so long the consumer counts as gone."""

    def options(self) -> dict[str, Any]:
        own = ("start", "consumer", "filter", "lease_seconds")
        return {name: value for name, value in self.given().items() if name not in own}


def start_of(start: str | Mapping[str, int], partitions: int) -> Any:
    """The position that a client means, as the library takes it."""
    if not isinstance(start, str):
        try:
            return {int(number): offset for number, offset in start.items()}
        except ValueError:
            raise InputError("the keys of start must be numbers of partitions") from None
    if start in ("earliest", "latest"):
        return start
    if start.isascii() and start.isdigit() and len(start) <= 19:
        return int(start) if partitions == 1 else dict.fromkeys(range(partitions), int(start))
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        raise InputError(f"start is an offset, earliest, latest or a time, not {start[:60]!r}") from None
    if moment.tzinfo is None:
        raise InputError(f"the time {start[:60]!r} has no time zone", hint="Add one: 2026-11-17T10:00:00Z")
    return moment


def over() -> HttpError:
    """For the requests of a consumer that is there no longer."""
    return HttpError(
        HTTPStatus.GONE,
        "this consumer is closed: its lease ran out, it was closed, or the server was started again",
        hint="Subscribe again: what was not acknowledged is delivered again",
        error="ClosedError",
    )


async def _at_once(messages: Sequence[Delivery]) -> None:
    return None


class Session:
    """One consumer of one client."""

    def __init__(
        self,
        start: str,
        consumer: Consumer,
        principal: Principal,
        lease_seconds: float | None,
        key: tuple[Any, ...],
        suffix: str = "",
    ) -> None:
        """`start` names this start of the server, `suffix` its node; `lease_seconds` is None where a connection is the
        lease."""
        self.id = f"{start}.{secrets.token_urlsafe(18)}{suffix}"
        self.consumer = consumer
        self.principal = principal
        self.lease_seconds = lease_seconds
        self.key = key
        """Topic, subscription and name of the consumer."""
        self.is_closed = False
        self.on_close: Callable[[], None] = lambda: None
        """Told when the session ends otherwise than by its client."""
        self.until_in_files: Callable[[Sequence[Delivery]], Awaitable[None]] = _at_once
        """Returns when a kill of the process can no longer take these messages back."""
        self._busy = 0
        self._renewed_at = asyncio.get_running_loop().time()
        self._turn = asyncio.Lock()
        self._number = 0
        self._batch: list[Delivery] = []
        self._is_partitioned = isinstance(consumer, PartitionedConsumer | SpreadConsumer)

    @property
    def held(self) -> int:
        """How many messages the client has not settled."""
        if isinstance(self.consumer, SpreadConsumer):
            return self.consumer.held
        return held_by(self.consumer)

    @property
    def batch(self) -> int:
        """The number of the last batch that was sent."""
        return self._number

    def _is_held(self, message: Delivery) -> bool:
        if isinstance(self.consumer, SpreadConsumer):
            return self.consumer.is_held(message)
        return is_held_by(self.consumer, message)

    # The lease

    def renew(self) -> None:
        self._renewed_at = asyncio.get_running_loop().time()

    def expires_in(self) -> float | None:
        """The seconds that are left of the lease; None while there is no need for one."""
        if self.lease_seconds is None:
            return None
        if self._busy:
            return self.lease_seconds
        return self._renewed_at + self.lease_seconds - asyncio.get_running_loop().time()

    # Receiving and settling

    async def receive(self, limit: int, seconds: float, seen: int | None) -> tuple[int, list[Delivery]]:
        """The number of a batch and its messages; the last batch again, if the client has not seen it."""
        self._busy += 1
        try:
            async with self._turn:
                if seen is not None and seen == self._number - 1:
                    self._batch = [message for message in self._batch if self._is_held(message)]
                    if self._batch:
                        await self.until_in_files(self._batch)
                        return self._number, self._batch
                elif seen is not None and seen != self._number:
                    raise InputError(f"the last batch of this consumer is {self._number}, not {seen}")
                found = await self.consumer.receive_many_async(limit, seconds)
                if found:
                    self._batch = found
                    self._number += 1
                    await self.until_in_files(found)
                return self._number, found
        finally:
            self._busy -= 1
            self.renew()

    async def receive_next(self, limit: int) -> list[Delivery]:
        """Messages, as soon as there are some."""
        found: list[Delivery] = await self.consumer.receive_many_async(limit)
        await self.until_in_files(found)
        return found

    async def ack(self, messages: list[Settled]) -> None:
        """These are done with."""
        if not self._is_partitioned:
            for number, offset in messages:
                self._reference(number, offset)
        # The client has received them, or those of an earlier session: as with a message at hand.
        self.consumer.ack_many([Delivery(b"", offset=offset, partition=number) for number, offset in messages])
        if isinstance(self.consumer, SpreadConsumer):
            await self.consumer.confirm()

    async def ack_cumulative(self, number: int, offset: int) -> None:
        """This one and all before it in its partition are done with."""
        await self.consumer.ack_cumulative_async(self._reference(number, offset))

    async def nack(self, messages: list[Settled], delay: float | None, reason: str | None) -> None:
        """These are to come again."""
        for number, offset in messages:
            await self.consumer.nack_async(self._reference(number, offset), delay, reason=reason)

    def _reference(self, number: int, offset: int) -> int:
        if self._is_partitioned:
            return PartitionOffset(offset, number)
        if number != 0:
            raise InputError(f"the topic has one partition, 0, not {number}")
        return offset


class Sessions:
    """The consumers of all clients."""

    def __init__(self) -> None:
        self._start = secrets.token_urlsafe(6)
        self.suffix: Callable[[], str] = lambda: ""
        """What ids of this node end with."""
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[tuple[Any, ...], Session] = {}
        self._opening: dict[tuple[Any, ...], asyncio.Lock] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    async def open(
        self,
        topic: TopicName,
        subscription: str,
        wanted: Subscribe,
        principal: Principal,
        subscribe: Callable[..., Awaitable[Consumer]],
        *,
        has_lease: bool = True,
    ) -> Session:
        """A new session. One with the same consumer name is closed first: its client lost its connection."""
        if len(self._by_id) >= _MAX_SESSIONS:
            raise HttpError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"there are {_MAX_SESSIONS} consumers already",
                error="BackpressureError",
                headers=(("retry-after", "1"),),
            )
        name = wanted.consumer or f"remote-{secrets.token_hex(6)}"
        key = (topic, subscription, name)
        # One after the other: two that come at once by one name must not both find nobody.
        turn = self._opening.setdefault(key, asyncio.Lock())
        try:
            async with turn:
                before = self._by_key.get(key)
                if before is not None:
                    if before.principal.name != principal.name:
                        raise ConflictError(f"the consumer {name} is another user's", hint="Choose another name")
                    await self.close(before)
                options = wanted.options()
                kind = options.pop("kind")
                match = None if wanted.filter is None else {k: v.encode() for k, v in wanted.filter.items()}
                consumer = await subscribe(subscription, kind, consumer=name, filter=match, **options)
                lease_seconds = wanted.lease_seconds if has_lease else None
                session = Session(self._start, consumer, principal, lease_seconds, key, self.suffix())
                self._by_id[session.id] = self._by_key[key] = session
                self._watch()
                return session
        finally:  # also after a refusal: names are the client's
            if not turn.locked():
                self._opening.pop(key, None)

    def find(self, session_id: str, topic: TopicName, subscription: str, principal: Principal) -> Session:
        """A session by its id; HttpError (410) when it is over, or was never this client's."""
        found = self._by_id.get(session_id)
        if found is None or found.key[:2] != (topic, subscription) or found.principal.name != principal.name:
            raise over()
        found.renew()
        return found

    def has(self, session_id: str) -> bool:
        return session_id in self._by_id

    def is_of_an_earlier_start(self, session_id: str) -> bool:
        """Whether this is the id of a session that was lost with an earlier server, not closed by this one."""
        start, dot, _ = session_id.partition(".")
        return bool(dot) and start != self._start

    def of(self, topic: TopicName, subscription: str) -> list[Session]:
        return [one for one in self._by_id.values() if one.key[:2] == (topic, subscription)]

    async def close(self, session: Session) -> None:
        """Gives back what the session holds, and stores what was acknowledged. Idempotent."""
        if session.is_closed:
            return
        session.is_closed = True
        self._by_id.pop(session.id, None)
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]
        session.on_close()
        await session.consumer.close_async()

    # Leases

    def _watch(self) -> None:
        if self._sweep is None and any(one.lease_seconds is not None for one in self._by_id.values()):
            self._sweep = asyncio.get_running_loop().call_later(1.0, self._close_expired)

    def _close_expired(self) -> None:
        self._sweep = None
        for session in list(self._by_id.values()):
            left = session.expires_in()
            if left is not None and left <= 0:
                task = asyncio.ensure_future(self.close_quietly(session))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._watch()

    async def close_quietly(self, session: Session) -> None:
        """The same, where nobody is there to hear of an error."""
        try:
            await self.close(session)
        except TidelogError as error:
            _logger.warning("closing the consumer %s of %s: %s", session.key[2], session.key[0], error)

    async def stop(self) -> None:
        """Closes all of them: their messages go back, and what was acknowledged is stored."""
        if self._sweep is not None:
            self._sweep.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.gather(*(self.close_quietly(one) for one in list(self._by_id.values())), *self._closing)
