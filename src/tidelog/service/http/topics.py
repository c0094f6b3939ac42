"""Topics over HTTP: list, create, describe, change and delete.

Invariants
- Topics change only through the broker, so that clients of Kafka see the same ones at once.
- Listing opens nothing and asks no store. Describing opens the partitions, as a consumer would, and reads no messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from http import HTTPStatus
from typing import Annotated, Any

import msgspec

from tidelog.client.transport import path_of
from tidelog.errors import ConfigError, ConflictError, InputError, NotFoundError, TidelogError
from tidelog.log.settings import LogStatistics
from tidelog.service.auth.access import Kind, Permission, topic_resource
from tidelog.service.http.call import Call
from tidelog.service.http.placed import check_here, look
from tidelog.service.http.routes import RouteTable
from tidelog.service.http.spread.parts import ask_node, merged_by_number
from tidelog.service.kafka.broker import Broker, ServedTopic
from tidelog.service.kafka.configs import configs_of
from tidelog.service.kafka.partitions import Partition
from tidelog.service.placement import NodeAddress
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import TopicName, read_own

routes = RouteTable("Topics")
_MAX_LISTED = 10_000
_OPENED_AT_ONCE = 16
_TOLD_SECONDS = 10.0


class TopicQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Which topics to list."""

    prefix: str = ""
    after: str = ""
    """Names up to this one are left out: the `next` of the answer before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LISTED)] = 1000
    standing: bool = False
    """Also where the open partitions stand: what is shipped, and what the loss of this disk would cost."""


class DescribeQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to describe exactly."""

    partition: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Where several nodes serve the topic: answered by the one that serves this partition."""


class PartitionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a partition stands."""

    partition: int
    start_offset: int
    """The oldest offset that can be read."""
    hot_start_offset: int
    """The oldest offset on the server's disk."""
    shipped_offset: int
    """Everything below is in the object store."""
    durable_offset: int
    """Everything below is synced to the disk."""
    next_offset: int
    """The offset that the next message gets."""
    last_stable_offset: int
    """Everything below is committed or aborted."""
    high_watermark: int | None = None
    """Readers get everything below: it is in the files, or in the store where that acknowledges messages."""
    cached_messages: int
    """The newest messages that are in memory too."""
    epoch: int
    """The owner's epoch; 0 without a store, -1 where its node was not asked: then all offsets are those of the
    store."""
    hot_bytes: int
    """The bytes of its files on the server's disk."""
    unshipped_bytes: int | None = None
    """What is on this disk only; null without a store: then it is all of it."""
    unshipped_seconds: float | None = None
    """The age of the oldest message that is on this disk only."""
    node: str | None = None
    """The node that serves it, where that is another one."""


class ListedTopic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic in a list. Offsets are those of partitions that are open in the server, by number."""

    name: str
    partitions: int
    next_offsets: dict[str, int]
    start_offsets: dict[str, int]
    open_partitions: list[PartitionInfo] | None = None
    """Where they stand, if it was asked for."""
    nodes: dict[str, int] | None = None
    """In a cluster, if where they stand was asked for: how many partitions each node serves."""


class TopicList(msgspec.Struct, frozen=True, kw_only=True):
    """Topics by name."""

    topics: list[ListedTopic]
    next: str | None = None
    """There are more: ask again with this as `after`."""


class NewTopic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to create a topic."""

    partitions: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    settings: dict[str, Any] = {}
    """The topic's own settings, such as `retention_seconds`."""


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, where its partitions stand, and its settings."""

    name: str
    id: str
    partitions: list[PartitionInfo]
    settings: dict[str, Any]
    """The topic's own settings."""
    effective_settings: dict[str, Any]
    """All settings, with the defaults of the server."""
    kafka_configs: dict[str, str]
    """The same as clients of Kafka see them."""
    is_placed: bool = False
    """Whether its partitions may be on several nodes: requests for several of them are made for each then."""


class Purge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which messages to delete."""

    before: dict[str, Annotated[int, msgspec.Meta(ge=0)]] | None = None
    """The first offset that stays, by number of partition. Default: everything there is now is deleted."""


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """The offsets that the partitions begin with now, by number."""

    start_offsets: dict[str, int]


class TopicChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change: settings that are given replace the topic's own, null takes one back."""

    settings: dict[str, Any] = {}
    partitions: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    """More partitions than it has."""


@routes.add("GET", "/v1/topics", None, TopicList, query=TopicQuery)
async def list_topics(call: Call) -> TopicList:
    """Lists the topics that the client may see."""
    query: TopicQuery = call.query
    found: list[ListedTopic] = []
    for served in call.service.broker.topics():
        name = str(served.name)
        if not name.startswith(query.prefix) or name <= query.after:
            continue
        if not call.allows(None, topic_resource(served.name)):
            continue
        if len(found) == query.limit:
            return TopicList(topics=found, next=found[-1].name)
        found.append(await _listed(call, served, name, query.standing))
    return TopicList(topics=found)


async def _listed(call: Call, served: ServedTopic, name: str, with_standing: bool) -> ListedTopic:
    opened = {str(number): one for number, one in sorted(served.open.items()) if one.is_open}
    standing = await in_store_thread(_stand, list(opened.values())) if with_standing else None
    placement, nodes = call.service.broker.placement, None
    if with_standing and not placement.is_alone:
        owners = (placement.owner(served.name, number) for number in range(served.count))
        nodes = dict(Counter(owner.node for owner in owners if owner is not None))
    return ListedTopic(
        open_partitions=standing,
        nodes=nodes,
        name=name,
        partitions=served.count,
        next_offsets={number: one.topic.next_offset for number, one in opened.items()},
        start_offsets={number: one.start_offset for number, one in opened.items()},
    )


@routes.add(
    "PUT",
    "/v1/topics/{namespace}/{name}",
    Permission.ADMIN,
    TopicDescription,
    resource=Kind.TOPIC,
    at_any_node=True,
    body=NewTopic,
    status=HTTPStatus.CREATED,
)
async def create_topic(call: Call) -> TopicDescription:
    """Creates a topic; 409 when it exists."""
    wanted: NewTopic = call.body
    settings = {key: value for key, value in _settings(wanted.settings).items() if value is not None}
    served = await call.service.broker.create(call.topic_name, wanted.partitions, **settings)
    return await describe(call, served)


@routes.add(
    "GET",
    "/v1/topics/{namespace}/{name}",
    Permission.READ,
    TopicDescription,
    resource=Kind.TOPIC,
    at_any_node=True,
    query=DescribeQuery,
)
async def describe_topic(call: Call) -> TopicDescription:
    """Describes a topic: offsets of its partitions, and settings.

    Partitions of other nodes are described by these, and `node` says which it is. Of one whose node does not answer the
    offsets are those of the store, and `epoch` is -1. Asked for by its number, a partition is described by its owner.
    """
    served = await call.service.topic(call.topic_name)
    if call.query.partition is not None:
        check_here(call, call.target, is_asked=True)
        await call.service.broker.partition(served, call.query.partition)
        return await describe(call, served, asks_others=False)
    return await describe(call, served, asks_others=call.only is None)


@routes.add(
    "PATCH",
    "/v1/topics/{namespace}/{name}",
    Permission.ADMIN,
    TopicDescription,
    resource=Kind.TOPIC,
    at_any_node=True,
    body=TopicChange,
)
async def change_topic(call: Call) -> TopicDescription:
    """Changes settings of a topic, or adds partitions."""
    change: TopicChange = call.body
    served = await call.service.topic(call.topic_name)
    if change.partitions is not None and change.partitions < served.count:
        raise ConflictError(f"{served.name} has {served.count} partitions, and cannot have fewer")
    if change.settings:
        await call.service.broker.change_settings(served, _settings(change.settings))
    if change.partitions is not None and change.partitions != served.count:
        await call.service.broker.grow(served, change.partitions)
    return await describe(call, served)


@routes.add("DELETE", "/v1/topics/{namespace}/{name}", Permission.ADMIN, resource=Kind.TOPIC, at_any_node=True)
async def delete_topic(call: Call) -> None:
    """Deletes a topic with everything in it, for good, from the disk and from the store."""
    await call.service.broker.delete(await call.service.topic(call.topic_name))


def _join_purged(call: Call, parts: list[Purged]) -> Purged:
    return Purged(start_offsets=merged_by_number(part.start_offsets for part in parts))


@routes.add(
    "POST",
    "/v1/topics/{namespace}/{name}/purge",
    Permission.ADMIN,
    Purged,
    resource=Kind.TOPIC,
    body=Purge,
    join=_join_purged,
)
async def purge_topic(call: Call) -> Purged:
    """Deletes messages for good, from the disk and from the store: all of them, or those before an offset.

    The topic, its settings and its offsets go on. Subscriptions that are below continue at the new beginning.
    """
    served = await call.service.topic(call.topic_name)
    wanted: Purge = call.body
    before = wanted.before
    if before is None:
        before = dict.fromkeys((str(number) for number in call.numbers(served)), -1)
    chosen: list[tuple[Partition, int]] = []
    for text, offset in before.items():
        if not (text.isascii() and text.isdigit() and int(text) < served.count):
            raise InputError(f"{served.name} has partitions 0 to {served.count - 1}, not {text[:20]!r}")
        if int(text) not in call.numbers(served):
            continue  # another node is asked for it
        partition = await call.service.broker.partition(served, int(text))
        chosen.append((partition, partition.high_watermark if offset == -1 else offset))
    starts: dict[str, int] = {}
    for partition, offset in chosen:
        deleting = asyncio.ensure_future(partition.topic.delete_before_async(offset))
        starts[str(partition.number)] = await asyncio.shield(deleting)
    return Purged(start_offsets=starts)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """ConfigError for what is no setting of a topic."""
    if "kafka_configs" in given:
        raise ConfigError("kafka_configs is what clients of Kafka have set", hint="Set the setting itself")
    return read_own(given)


async def describe(call: Call, served: ServedTopic, *, asks_others: bool = True) -> TopicDescription:
    """A topic; its partitions are opened. `asks_others`: how far those of other nodes are."""
    broker = call.service.broker
    opener = broker.directory._opener
    room = asyncio.Semaphore(_OPENED_AT_ONCE)

    told = await _told_by_others(call, served) if asks_others and not broker.placement.is_alone else {}

    async def stand(number: int) -> PartitionInfo:
        if number in told:
            return told[number]
        async with room:
            if not broker.placement.is_alone and not broker.placement.is_ours(served.name, number):
                return await in_store_thread(stored_info, broker, served, number)
            return await in_store_thread(partition_info, await broker.partition(served, number))

    partitions = await asyncio.gather(*(stand(number) for number in call.numbers(served)))
    own = await in_store_thread(_own_settings, opener, served.name)
    effective = msgspec.to_builtins(opener.effective(own))
    return TopicDescription(
        name=str(served.name),
        id=served.id.hex(),
        partitions=list(partitions),
        settings=msgspec.to_builtins(own),
        effective_settings=effective,
        kafka_configs=configs_of(own, broker.topic_defaults),
        is_placed=not broker.placement.is_alone,
    )


async def _told_by_others(call: Call, served: ServedTopic) -> dict[int, PartitionInfo]:
    """What other nodes say of their partitions; those of nodes that do not answer are left out."""
    placement = call.service.broker.placement
    elsewhere: dict[NodeAddress, list[int]] = {}
    for number in call.numbers(served):
        owner = placement.owner(served.name, number)
        if owner is not None and owner.node_id != placement.node_id:
            elsewhere.setdefault(owner, []).append(number)
    target = path_of("topics", served.name.namespace, served.name.name)

    async def ask(node: NodeAddress, numbers: list[int]) -> list[PartitionInfo]:
        answer = await ask_node(call, node, "GET", target, numbers, timeout=_TOLD_SECONDS, attempt=_TOLD_SECONDS)
        found: TopicDescription = answer.json(TopicDescription)
        return [one if one.epoch == -1 else msgspec.structs.replace(one, node=node.node) for one in found.partitions]

    told = await asyncio.gather(*(ask(*one) for one in elsewhere.items()), return_exceptions=True)
    for failure in told:
        if isinstance(failure, BaseException) and not isinstance(failure, TidelogError):
            raise failure
    return {one.partition: one for some in told if isinstance(some, list) for one in some}


def join_described(call: Call, parts: list[TopicDescription]) -> TopicDescription:
    """One description of those of several nodes, each of its own partitions."""
    found = sorted((one for part in parts for one in part.partitions), key=lambda one: one.partition)
    return msgspec.structs.replace(parts[0], partitions=found)


def _own_settings(opener: Any, name: TopicName) -> dict[str, object]:
    found: dict[str, object] = opener.settings_of(name)
    return found


def stored_info(broker: Broker, served: ServedTopic, number: int) -> PartitionInfo:
    """In a thread: what the store says of a partition of another node."""
    owner = broker.placement.owner(served.name, number)
    start = end = 0
    with contextlib.suppress(NotFoundError):
        _, start, end = look(broker, served, number)
    return PartitionInfo(
        partition=number,
        start_offset=start,
        hot_start_offset=end,
        shipped_offset=end,
        durable_offset=end,
        next_offset=end,
        last_stable_offset=end,
        high_watermark=end,
        cached_messages=0,
        epoch=-1,
        hot_bytes=0,
        node="" if owner is None else owner.node,
    )


def _stand(partitions: list[Partition]) -> list[PartitionInfo]:
    """In a thread: where those stand that are still open."""
    return [partition_info(one) for one in partitions if one.is_open]


def partition_info(partition: Partition) -> PartitionInfo:
    """In a thread: where an open partition stands. It asks no store, and reads at most one frame of the disk."""
    topic = partition.topic
    log: LogStatistics = topic._log.statistics()
    shipper = None if topic._tiered is None else topic._tiered.shipper.statistics()
    return PartitionInfo(
        partition=partition.number,
        start_offset=topic.start_offset,
        hot_start_offset=topic.hot_start_offset,
        shipped_offset=topic.shipped_offset,
        durable_offset=topic.durable_offset,
        next_offset=topic.next_offset,
        last_stable_offset=partition.last_stable_offset,
        high_watermark=partition.high_watermark,
        cached_messages=log.cached_messages,
        epoch=partition.leader_epoch,
        hot_bytes=log.file_bytes,
        unshipped_bytes=None if shipper is None else shipper.lag_bytes,
        unshipped_seconds=None if shipper is None else shipper.lag_seconds,
    )
