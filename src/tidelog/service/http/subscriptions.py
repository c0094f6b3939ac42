"""Subscriptions over HTTP: list, describe, move and delete; and consumers that ask by long poll.

A WebSocket (`websocket.py`) does the same with less work per message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any

import msgspec

from tidelog.client.wire import PackedMessage, packed
from tidelog.errors import ClosedError, InputError, NotFoundError
from tidelog.service.auth.access import Kind, Permission, Resource, topic_resource
from tidelog.service.http.call import Call, Reply
from tidelog.service.http.message_json import ReadEncoding, ReadMessage, to_json
from tidelog.service.http.routes import JSON, MSGPACK, RouteTable
from tidelog.service.http.sessions import Offset, Session, Settled, Subscribe, over, start_of
from tidelog.service.http.spread.consumer import SpreadSubscribing
from tidelog.service.http.spread.parts import nothing
from tidelog.service.kafka.broker import ServedTopic
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.delivery import Holder
from tidelog.topics.subscription.options import SubscriptionStatistics
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.subscription.registry import SubscriptionInfo
from tidelog.topics.subscription.subscription import Subscription
from tidelog.topics.topic import Topic

routes = RouteTable("Subscriptions")
_TOPIC = "/v1/topics/{namespace}/{name}"
_ONE = _TOPIC + "/subscriptions/{subscription}"
_CONSUMER = _ONE + "/consumers/{consumer}"
_AHEAD = 100
_encode_packed = msgspec.msgpack.Encoder().encode


class SubscriptionPart(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription in one partition."""

    partition: int
    offset: int
    """Everything below is acknowledged."""
    acked_above: int
    """Messages above `offset` that are acknowledged too."""
    lag_messages: int
    end_offset: int
    lag_seconds: float | None = None
    """The age of the oldest message that is not acknowledged; only if it was asked for."""


class SubscriptionDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription, or a consumer group of Kafka's protocol (kind `group`)."""

    name: str
    kind: str
    lag_messages: int
    partitions: list[SubscriptionPart]
    consumers: list[str]
    """Those that are connected, by name."""
    created: datetime
    moved: datetime
    is_open: bool


class SubscriptionList(msgspec.Struct, frozen=True, kw_only=True):
    """The subscriptions and consumer groups of a topic."""

    subscriptions: list[SubscriptionDescription]


class LagQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to find out."""

    age: bool = False
    """Also the age of the oldest message that is not acknowledged: that message is read, from the store if it is
    there."""


class Seek(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Where a subscription goes on."""

    position: str = ""
    """`earliest`, `latest`, a time or an offset, in all partitions."""
    offsets: dict[str, Offset] = {}
    """Or an offset for each partition that moves."""


class NewConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer that was made."""

    id: str
    """To be used in the paths of its requests."""
    consumer: str
    lease_seconds: float


class ReceiveQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How much to receive."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """Seconds to wait for the first message."""
    seen: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The `batch` of the last answer that arrived, 0 before the first. If a later one was sent and lost, it comes
    again. Without it, what was lost comes again when the consumer is closed."""
    encoding: ReadEncoding = "auto"


class ReceivedMessage(ReadMessage, frozen=True, kw_only=True):
    """A message that was delivered to a consumer."""

    delivery_count: int
    """How often it was delivered, this time included."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """Messages for a consumer; each has to be acknowledged or rejected."""

    batch: int
    messages: list[ReceivedMessage]


class Ack(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Messages that are done with, as pairs of partition and offset."""

    messages: Annotated[list[Settled], msgspec.Meta(max_length=100_000)] = []
    cumulative: Annotated[list[Settled], msgspec.Meta(max_length=10_000)] = []
    """These and all before them in their partitions; for the kinds exclusive and failover."""
    flush: bool = False
    """Answer when it is stored: after a crash of the server, too, none of them comes again."""


class Nack(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Messages that are to be delivered again."""

    messages: Annotated[list[Settled], msgspec.Meta(max_length=100_000)]
    delay: Annotated[float, msgspec.Meta(ge=0, le=86_400 * 366)] | None = None
    """Seconds until then; default: the pause of the subscription, which grows."""
    reason: str | None = None
    """Kept with the message if it becomes a dead letter."""


# Describing


def _join(parts: list[SubscriptionDescription]) -> SubscriptionDescription:
    return msgspec.structs.replace(
        parts[0],
        lag_messages=sum(one.lag_messages for one in parts),
        partitions=sorted((each for one in parts for each in one.partitions), key=lambda each: each.partition),
        consumers=sorted({name for one in parts for name in one.consumers}),
        created=min(one.created for one in parts),
        moved=max(one.moved for one in parts),
        is_open=any(one.is_open for one in parts),
    )


def _join_described(call: Call, parts: list[SubscriptionDescription]) -> SubscriptionDescription:
    return _join(parts)


def _join_listed(call: Call, parts: list[SubscriptionList]) -> SubscriptionList:
    """Nodes tell each other of all; a client sees what it may."""
    same: dict[tuple[str, bool], list[SubscriptionDescription]] = {}
    for one in (each for part in parts for each in part.subscriptions):
        same.setdefault((one.name, one.kind == "group"), []).append(one)
    visible = [some for (name, _), some in sorted(same.items()) if call.allows(None, Resource(Kind.GROUP, name))]
    return SubscriptionList(subscriptions=[_join(some) for some in visible])


@routes.add(
    "GET",
    f"{_TOPIC}/subscriptions",
    Permission.READ,
    SubscriptionList,
    resource=Kind.TOPIC,
    query=LagQuery,
    join=_join_listed,
)
async def list_subscriptions(call: Call) -> SubscriptionList:
    """Lists the subscriptions and consumer groups of a topic, with their lag."""
    served = await call.service.topic(call.topic_name)
    logs = await partition_logs(call, served)
    found = await in_store_thread(_describe_all, logs, call.query.age)
    visible = [one for one in found if call.allows(None, Resource(Kind.GROUP, one.name))]
    return SubscriptionList(subscriptions=visible)


@routes.add(
    "GET",
    _ONE,
    Permission.READ,
    SubscriptionDescription,
    resource=Kind.TOPIC,
    query=LagQuery,
    join=_join_described,
)
async def describe_subscription(call: Call) -> SubscriptionDescription:
    """Describes a subscription or a consumer group: position and lag in each partition."""
    served = await call.service.topic(call.topic_name)
    logs = await partition_logs(call, served)
    return await in_store_thread(_described, logs, call.path["subscription"], call.query.age)


async def partition_logs(call: Call, served: ServedTopic) -> dict[int, Topic]:
    """The logs of the partitions that a request is about, opened."""
    broker = call.service.broker
    return {number: (await broker.partition(served, number)).topic for number in call.numbers(served)}


def _described(logs: Mapping[int, Topic], name: str, with_age: bool) -> SubscriptionDescription:
    found = next((one for one in _describe_all(logs, with_age) if one.name == name), None)
    if found is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"there is no subscription {name[:80]}", hint="GET .../subscriptions lists them")


def _describe_all(logs: Mapping[int, Topic], with_age: bool) -> list[SubscriptionDescription]:
    parts: dict[tuple[str, bool], list[tuple[int, Topic, SubscriptionInfo]]] = {}
    open_now: dict[str, set[str]] = {}
    for number, log in logs.items():
        registry = log._registry
        for name in registry.names():
            parts.setdefault((name, False), []).append((number, log, registry.info(name)))
        for name in registry.groups():
            parts.setdefault((name, True), []).append((number, log, registry.group_info(name)))
        for statistics in registry.statistics():
            open_now.setdefault(statistics.name, set()).update(_consumers(statistics))
    return [
        _description(name, some, set() if is_group else open_now.get(name, set()), with_age)
        for (name, is_group), some in sorted(parts.items())
    ]


def _consumers(statistics: SubscriptionStatistics) -> Sequence[str]:
    return statistics.consumers


def _description(
    name: str, parts: list[tuple[int, Topic, SubscriptionInfo]], consumers: set[str], with_age: bool
) -> SubscriptionDescription:
    infos = [info for _, _, info in parts]
    return SubscriptionDescription(
        name=name,
        kind=infos[0].kind,
        lag_messages=sum(info.lag_messages for info in infos),
        partitions=[
            SubscriptionPart(
                partition=number,
                offset=info.offset,
                acked_above=info.acked_above,
                lag_messages=info.lag_messages,
                end_offset=log.next_offset,
                lag_seconds=_lag_seconds(log, info) if with_age else None,
            )
            for number, log, info in parts
        ],
        consumers=sorted(consumers),
        created=min(info.created for info in infos),
        moved=max(info.moved for info in infos),
        is_open=any(info.is_open for info in infos),
    )


def _lag_seconds(log: Topic, info: SubscriptionInfo) -> float:
    start = max(info.offset, log.start_offset)
    if not info.lag_messages or start >= log.next_offset:
        return 0.0
    oldest = next((message.timestamp for message in log.read(start, on_gap="skip")), None)
    now_us = log._clock.now_us()
    return 0.0 if oldest is None else max(0.0, now_us / 1e6 - oldest.timestamp())


# Changing


@routes.add(
    "POST",
    f"{_ONE}/seek",
    Permission.WRITE,
    SubscriptionDescription,
    resource=Kind.TOPIC,
    body=Seek,
    join=_join_described,
)
async def seek_subscription(call: Call) -> SubscriptionDescription:
    """Moves a subscription: delivery resumes there, and earlier messages count as acknowledged.

    Its consumers stay connected, and lose the messages that they hold now. A consumer group of Kafka's protocol is
    moved while it has no members; 409 while it has some.
    """
    wanted: Seek = call.body
    served = await call.service.topic(call.topic_name)
    logs = await partition_logs(call, served)
    if bool(wanted.position) == bool(wanted.offsets):
        raise InputError("give position, or offsets for partitions")
    start = start_of(wanted.offsets or wanted.position, served.count)
    positions: dict[int, Any] = start if isinstance(start, dict) else dict.fromkeys(range(served.count), start)
    unknown = [number for number in positions if not 0 <= number < served.count]
    if unknown:
        raise InputError(f"{served.name} has partitions 0 to {served.count - 1}, not {unknown[0]}")
    positions = {number: position for number, position in positions.items() if number in logs}

    name = call.path["subscription"]
    if await in_store_thread(_is_group, logs, name):
        offsets = await in_store_thread(
            lambda: {number: logs[number]._readable.resolve(at) for number, at in positions.items()}
        )
        await call.service.move_group(name, str(served.name), offsets)
        return await in_store_thread(_described, logs, name, False)

    def move() -> SubscriptionDescription:
        for number, position in positions.items():
            move_subscription(logs[number], name, position)
        return _described(logs, name, False)

    return await in_store_thread(move)


def _is_group(logs: Mapping[int, Topic], name: str) -> bool:
    """Whether only a consumer group is called so, and no subscription."""
    if any(name in log._registry.names() for log in logs.values()):
        return False
    return any(name in log._registry.groups() for log in logs.values())


def move_subscription(log: Topic, name: str, position: Any) -> None:
    """Moves a subscription in one partition, whether or not it has consumers."""
    with opened_subscription(log, name) as subscription:
        subscription.seek(subscription.source.resolve(position))


@contextmanager
def opened_subscription(log: Topic, name: str) -> Iterator[Subscription]:
    """A subscription in one partition that exists, whether or not it has consumers."""
    registry = log._registry
    info = registry.info(name)
    subscription = registry._open.get(name)
    if subscription is not None and not subscription.is_unstored:
        yield subscription
        return
    # Its own kind and hold: what a consumer says is stored with the position.
    with log.subscribe(name, info.kind, hold_retention=info.hold_retention) as consumer:  # type: ignore[arg-type]
        yield consumer._subscription


@routes.add("DELETE", _ONE, Permission.ADMIN, resource=Kind.TOPIC, join=nothing)
async def delete_subscription(call: Call) -> None:
    """Forgets a subscription and how far it is; 409 while it has consumers. The messages stay."""
    served = await call.service.topic(call.topic_name)
    logs = await partition_logs(call, served)
    name = call.path["subscription"]

    def delete() -> None:
        known = [log for log in logs.values() if name in log.subscriptions()]
        if not known:
            raise _unknown(name)
        for log in known:
            log.delete_subscription(name)

    await in_store_thread(delete)


# Consumers


async def _subscribing(call: Call, served: ServedTopic, wanted: Subscribe, ahead: int) -> Any:
    """Subscribes to the partitions that a request is about."""
    start = start_of(wanted.start, served.count)
    if served.count == 1 and isinstance(start, dict):
        start = start.get(0, "earliest")
    if call.spread is not None:
        return SpreadSubscribing(call, served, start, ahead).subscribe
    topic: Any = await in_store_thread(call.service.broker.directory.topic, str(served.name))
    if call.only is not None and served.count > 1:
        given = start if isinstance(start, dict) else dict.fromkeys(call.only, start)
        start = {number: position for number, position in given.items() if number in call.only}

    async def subscribe(name: str, kind: Any, **options: Any) -> Any:
        return await topic.subscribe_async(name, kind, start=start, **options)

    return subscribe


def _check_letters(call: Call, wanted: Subscribe) -> None:
    if wanted.dead_letter_topic is not None:
        letters = parse_topic_name(wanted.dead_letter_topic)
        call.check(Permission.WRITE, topic_resource(letters))  # who lacks that does not learn whether it exists
        if call.service.broker.find(letters) is None:  # the first letter creates it
            call.check(Permission.ADMIN, topic_resource(letters))


async def open_session(call: Call, wanted: Subscribe, *, has_lease: bool, ahead: int = _AHEAD) -> Session:
    """Subscribes for a client. So many messages of each other node may be here `ahead` of it."""
    service = call.service
    served = await call.topic_in_use()
    if call.spread is None:
        await partition_logs(call, served)
    _check_letters(call, wanted)
    subscribe = await _subscribing(call, served, wanted, ahead)

    async def until_in_files(messages: Sequence[Delivery]) -> None:
        reached: dict[int, int] = {}
        for message in messages:
            reached[message.partition] = max(message.offset + 1, reached.get(message.partition, 0))
        for number, offset in reached.items():
            if service.broker.placement.is_ours(served.name, number):  # others have done so before they sent it
                await (await service.broker.partition(served, number)).until_in_files(offset)

    session = await service.sessions.open(
        served.name, call.path["subscription"], wanted, call.principal, subscribe, has_lease=has_lease
    )
    session.until_in_files = until_in_files
    return session


def _session(call: Call) -> Session:
    return call.service.sessions.find(call.path["consumer"], call.topic_name, call.path["subscription"], call.principal)


@routes.add(
    "POST",
    f"{_ONE}/consumers",
    Permission.READ,
    NewConsumer,
    resource=Kind.TOPIC,
    body=Subscribe,
    status=HTTPStatus.CREATED,
    spreads=True,
)
async def subscribe(call: Call) -> NewConsumer:
    """Makes a consumer of a subscription, which is created if there is none of its name.

    The consumer lives as long as its client renews the lease: every request does, and `extend`. Then its messages go to
    other consumers. A client that subscribes again with the same `consumer` takes the place of its former self.
    """
    session = await open_session(call, call.body, has_lease=True)
    assert session.lease_seconds is not None
    return NewConsumer(id=session.id, consumer=session.consumer.consumer, lease_seconds=session.lease_seconds)


@routes.add(
    "POST",
    f"{_CONSUMER}/receive",
    Permission.READ,
    Received,
    resource=Kind.TOPIC,
    query=ReceiveQuery,
    mode="wait",
    response_types=(JSON, MSGPACK),
)
async def receive(call: Call) -> Received | Reply:
    """Receives messages, as soon as there are some; none when the time is up.

    With `seen` an answer that was lost comes again. Messages stay the consumer's until it acknowledges or rejects them.
    """
    query: ReceiveQuery = call.query
    session = _session(call)
    seconds = min(query.wait, call.service.settings.max_wait_seconds)
    try:
        number, found = await call.service.unless_stopping(session.receive(query.limit, seconds, query.seen)) or (
            session.batch,
            [],
        )
    except ClosedError:
        if call.service.broker.placement.is_alone:
            raise
        await call.service.sessions.close_quietly(session)
        raise over() from None  # a partition is with another node now
    if call.accepts(MSGPACK):
        return Reply(_encode_packed({"batch": number, "messages": delivered(found)}), MSGPACK)
    shown = [received_json(message, query.encoding) for message in found]
    return Received(batch=number, messages=shown)


def received_json(message: Delivery, encoding: ReadEncoding) -> ReceivedMessage:
    """A delivered message as JSON."""
    fields = msgspec.structs.asdict(to_json(message, encoding))
    return ReceivedMessage(**fields, delivery_count=message.delivery_count)


def delivered(messages: Sequence[Delivery]) -> list[tuple[PackedMessage, int]]:
    """Delivered messages for msgpack, each with its delivery count."""
    return [(one, message.delivery_count) for one, message in zip(packed(messages), messages, strict=True)]


@routes.add("POST", f"{_CONSUMER}/ack", Permission.READ, resource=Kind.TOPIC, body=Ack, join=nothing)
async def ack(call: Call) -> None:
    """Acknowledges messages: they are not delivered again. The same twice is fine.

    A consumer that was lost because the server was started again may still acknowledge `messages` that it received.
    """
    wanted: Ack = call.body
    sessions = call.service.sessions
    if wanted.messages and not wanted.cumulative and sessions.is_of_an_earlier_start(call.path["consumer"]):
        logs = await partition_logs(call, await call.topic_in_use())
        await in_store_thread(_ack_of_an_earlier_start, logs, call.path["subscription"], wanted.messages, call.only)
        return
    await settle(_session(call), wanted)


def _ack_of_an_earlier_start(
    logs: Mapping[int, Topic], name: str, messages: Sequence[Settled], only: Sequence[int] | None
) -> None:
    by_partition: dict[int, list[tuple[int, bool]]] = {}
    for number, offset in messages:
        if only is None or number in only:
            by_partition.setdefault(number, []).append((offset, True))
    unknown = [number for number in by_partition if number not in logs]
    if unknown:
        raise InputError(f"the topic has partitions 0 to {len(logs) - 1}, not {unknown[0]}")
    for number, offsets in by_partition.items():
        with opened_subscription(logs[number], name) as subscription:
            subscription.ack_many(Holder("earlier"), offsets)
            subscription.flush()


async def settle(session: Session, wanted: Ack) -> None:
    """Carries out an acknowledgement."""
    if wanted.messages:
        await session.ack(wanted.messages)
    for number, offset in wanted.cumulative:
        await session.ack_cumulative(number, offset)
    if wanted.flush:
        await session.consumer.flush_async()


@routes.add("POST", f"{_CONSUMER}/nack", Permission.READ, resource=Kind.TOPIC, body=Nack)
async def nack(call: Call) -> None:
    """Rejects messages: they are delivered again, after a pause, or become dead letters."""
    wanted: Nack = call.body
    await _session(call).nack(wanted.messages, wanted.delay, wanted.reason)


@routes.add("POST", f"{_CONSUMER}/extend", Permission.READ, resource=Kind.TOPIC)
async def extend(call: Call) -> None:
    """Renews the lease of a consumer whose handler takes its time."""
    _session(call).renew()


@routes.add("DELETE", _CONSUMER, Permission.READ, resource=Kind.TOPIC)
async def close_consumer(call: Call) -> None:
    """Closes a consumer: what it did not acknowledge goes to others, and what it did is stored."""
    await call.service.sessions.close(_session(call))
