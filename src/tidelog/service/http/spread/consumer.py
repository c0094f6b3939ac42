"""A consumer of a subscription whose partitions several nodes serve: the node that a client has asked consumes for it.

    client <── session ── node A ──┬── its own partitions
                                   └── WebSocket ──> node B: its partitions   (as any client, client/consumer.py)

Invariants
- Each partition keeps its position on its own node. Messages of one partition come in order.
- Up to `ahead` messages of each other node may be here before the client asks for them; they count as delivered. When
  the consumer ends they go to others.
- When a partition moves, the consumer is over (ClosedError): its client subscribes again, and what was not acknowledged
  comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidelog.client.consumer import RemoteConsumer
from tidelog.client.transport import path_of
from tidelog.errors import ClosedError, TidelogError
from tidelog.service.http.spread.others import PARTITIONS_HEADER, said_for
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.message import Message
from tidelog.topics.partitioned import PartitionedConsumer, PartitionOffset, message_of_which_partition
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.queue import Delivery

if TYPE_CHECKING:
    from tidelog.service.http.call import Call
    from tidelog.service.kafka.broker import ServedTopic
    from tidelog.service.placement import NodeAddress

_MOST_HELD = 100_000
_LOOK_SECONDS = 1.0
_MOVED_SECONDS = 2.0


def held_by(consumer: Consumer) -> int:
    """How many messages a consumer of this process has not settled."""
    if isinstance(consumer, PartitionedConsumer):
        return sum(len(one._holder.unacked) for one in consumer._consumers.values())
    return len(consumer._holder.unacked)


def is_held_by(consumer: Consumer, message: Message) -> bool:
    """Whether a message was delivered to a consumer of this process and not settled."""
    one = consumer.partition(message.partition) if isinstance(consumer, PartitionedConsumer) else consumer
    return message.offset in one._holder.unacked


class SpreadConsumer(Consumer):
    """The consumers of one client on several nodes, as one. Everything here runs in the event loop."""

    def __init__(self, parts: Mapping[tuple[int, ...], Consumer], has_moved: Callable[[], bool]) -> None:
        """By the partitions that each has. `has_moved`: whether one of them has."""
        self._by_partition = {number: consumer for numbers, consumer in parts.items() for number in numbers}
        self._parts = list(parts.values())
        self._has_moved = has_moved
        self._receiving: dict[Consumer, asyncio.Task[list[Delivery]]] = {}
        self._elsewhere: dict[tuple[int, int], None] = {}
        """What was received from other nodes and not settled, by partition and offset."""
        self._is_over = False

    @property
    def name(self) -> str:
        return self._parts[0].name

    @property
    def consumer(self) -> str:
        return self._parts[0].consumer

    @property
    def held(self) -> int:
        """How many messages of this node the client has not settled; the others have windows of their own."""
        return sum(held_by(one) for one in self._parts if not isinstance(one, RemoteConsumer))

    def is_held(self, message: Message) -> bool:
        """Whether the client has a message and did not settle it."""
        part = self._part(message.partition)
        if isinstance(part, RemoteConsumer):
            return (message.partition, message.offset) in self._elsewhere
        return is_held_by(part, message)

    def _part(self, number: int) -> Consumer:
        found = self._by_partition.get(number)
        if found is None:
            raise message_of_which_partition(number)
        return found

    # Receiving

    async def receive_many_async(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        """Up to so many messages of one node, as soon as one has some; none when `timeout` seconds passed.

        A request to a node that has nothing yet goes on after that, and what it gets is for the next call.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + float(timeout)
        while True:
            self._check()
            self._ask(max_messages)
            left = None if deadline is None else max(0.0, deadline - loop.time())
            wait = _LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS)
            await asyncio.wait(self._receiving.values(), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            if found := self._taken(max_messages):
                return found
            if deadline is not None and loop.time() >= deadline:
                return []

    def _check(self) -> None:
        if self._is_over or self._has_moved():
            raise ClosedError("a partition moved to another node", hint="Subscribe again: it goes on there")

    def _ask(self, count: int) -> None:
        for part in self._parts:
            if part not in self._receiving:
                self._receiving[part] = asyncio.ensure_future(part.receive_many_async(count, _LOOK_SECONDS))

    def _taken(self, count: int) -> list[Delivery]:
        """The messages of the first node that has some; the next call begins with another one."""
        for part in list(self._parts):
            task = self._receiving.get(part)
            if task is None or not task.done():
                continue
            del self._receiving[part]
            found = task.result()
            if not found:
                continue
            self._parts.remove(part)
            self._parts.append(part)
            if len(found) > count:  # an earlier call has asked for more
                self._receiving[part] = asyncio.ensure_future(_again(found[count:]))
                found = found[:count]
            if isinstance(part, RemoteConsumer):
                self._elsewhere.update(dict.fromkeys((one.partition, one.offset) for one in found))
                while len(self._elsewhere) > _MOST_HELD:
                    del self._elsewhere[next(iter(self._elsewhere))]
            return found
        return []

    # Settling

    def ack_many(self, messages: Iterable[Message | int]) -> None:
        by_part: dict[Consumer, list[Message | int]] = {}
        for message in messages:
            number, offset = _place(message)
            self._elsewhere.pop((number, offset), None)
            by_part.setdefault(self._part(number), []).append(message)
        for part, some in by_part.items():
            part.ack_many(some)

    async def confirm(self) -> None:
        """Returns when the other nodes have what was acknowledged; ClosedError when they may never have it."""
        confirming = [
            asyncio.ensure_future(part._confirm()) for part in self._parts if isinstance(part, RemoteConsumer)
        ]
        left: set[asyncio.Task[None]] = set(confirming)
        try:
            while left:
                self._check()
                _, left = await asyncio.wait(left, timeout=_LOOK_SECONDS)
            for task in confirming:
                task.result()
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def ack_cumulative_async(self, message: Message | int) -> None:
        number, offset = _place(message)
        await self._part(number).ack_cumulative_async(message)
        for place in [place for place in self._elsewhere if place[0] == number and place[1] <= offset]:
            del self._elsewhere[place]

    async def nack_async(
        self, message: Message | int, delay: float | str | None = None, *, reason: str | None = None
    ) -> None:
        self._elsewhere.pop(_place(message), None)
        await self._part(_place(message)[0]).nack_async(message, delay, reason=reason)

    async def flush_async(self) -> None:
        await asyncio.gather(*(part.flush_async() for part in self._parts))

    async def close_async(self) -> None:
        """Leaves everywhere; the first error is raised when all have been told."""
        if self._is_over:
            return
        self._is_over, has_moved = True, self._has_moved()
        for task in self._receiving.values():
            task.cancel()
        await asyncio.gather(*self._receiving.values(), return_exceptions=True)
        self._receiving.clear()
        ends = (asyncio.wait_for(part.close_async(), _MOVED_SECONDS if has_moved else None) for part in self._parts)
        ended = await asyncio.gather(*ends, return_exceptions=True)
        for failure in ended:
            # A partition that moved has stored nothing more: what was acknowledged last comes again.
            if isinstance(failure, BaseException) and not (
                has_moved and isinstance(failure, TidelogError | TimeoutError)
            ):
                raise failure


async def _again(messages: list[Delivery]) -> list[Delivery]:
    return messages


def _place(message: Message | int) -> tuple[int, int]:
    if not isinstance(message, Message | PartitionOffset):
        raise message_of_which_partition(message)
    return message.partition, message.offset if isinstance(message, Message) else int(message)


class SpreadSubscribing:
    """Subscribes at all nodes of a topic for one client."""

    def __init__(self, call: Call, served: ServedTopic, start: Any, ahead: int) -> None:
        assert call.spread is not None
        self._call = call
        self._served = served
        self._spread = dict(call.spread)
        self._start = start
        self._ahead = max(1, ahead // len(self._spread))

    async def subscribe(self, name: str, kind: Any, **options: Any) -> SpreadConsumer:
        """A consumer of all partitions, or none: what was subscribed before an error is closed."""
        parts: dict[tuple[int, ...], Consumer] = {}
        try:
            for node, numbers in self._spread.items():
                wanted = self._positions(numbers)
                if wanted:
                    parts[tuple(wanted)] = await self._at(node, wanted, name, kind, options)
        except BaseException:
            await asyncio.gather(*(part.close_async() for part in parts.values()), return_exceptions=True)
            raise
        return SpreadConsumer(parts, self._has_moved)

    def _positions(self, numbers: Sequence[int]) -> dict[int, Any]:
        if not isinstance(self._start, dict):
            return dict.fromkeys(numbers, self._start)
        return {number: position for number, position in self._start.items() if number in numbers}

    async def _at(
        self, node: NodeAddress, positions: dict[int, Any], name: str, kind: Any, options: dict[str, Any]
    ) -> Consumer:
        service, served = self._call.service, self._served
        if node.node_id == service.broker.node_id:
            for number in positions:
                await service.broker.partition(served, number)
            topic: Any = await in_store_thread(service.broker.directory.topic, str(served.name))
            consumer: Consumer = await topic.subscribe_async(name, kind, start=positions, **options)
            return consumer
        others = service.others
        assert others is not None, "a node by itself serves everything"
        given = dict(options)
        headers = said_for(self._call.principal) | {PARTITIONS_HEADER: ",".join(map(str, positions))}
        made = RemoteConsumer(
            others.bridge,
            others.http(node),
            str(served.name),
            path_of("topics", served.name.namespace, served.name.name),
            served.count,
            name,
            kind,
            positions if isinstance(self._start, dict) else self._start,
            given.pop("consumer"),
            given.pop("filter"),
            given,
            self._ahead,
            headers,
        )
        await made.open()
        return made

    def _has_moved(self) -> bool:
        """Whether a partition has another owner than it had."""
        placement, name = self._call.service.broker.placement, self._served.name
        owners = {number: node.node_id for node, numbers in self._spread.items() for number in numbers}
        now = {number: placement.owner(name, number) for number in owners}
        return any(node is None or node.node_id != owners[number] for number, node in now.items())
