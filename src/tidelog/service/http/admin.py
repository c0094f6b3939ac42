"""Administration of topics over HTTP: ship, seal, verification, rescue, raw frames.

Invariants
- Everything happens in the process that owns the topics: no lock is broken, no owner has to stop.
- A sealed topic is not opened again by the next request: it stays closed here until it is opened on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from tidelog.client.wire import packed
from tidelog.cold.gc import DEFAULT_GRACE_SECONDS
from tidelog.cold.merging import MergeReport, Merging
from tidelog.cold.rewrite import DEFAULT_TARGET_BYTES
from tidelog.errors import InputError, NotFoundError, NotSupportedError, OffsetOutOfRangeError
from tidelog.findings import VerifyReport, merged
from tidelog.log.frame import encode_many
from tidelog.service.auth.access import Kind, Permission, topic_resource
from tidelog.service.http.call import Call, Reply
from tidelog.service.http.message_json import ReadEncoding, ReadMessage, to_json
from tidelog.service.http.operations import Report, WaitQuery, begun, starting
from tidelog.service.http.placed import ElsewhereError
from tidelog.service.http.reading import news, position
from tidelog.service.http.routes import BYTES, JSON, MSGPACK, RouteTable
from tidelog.service.http.service import Service
from tidelog.service.http.spread.parts import Joined, ask_node, by_number, nothing
from tidelog.service.http.subscriptions import partition_logs
from tidelog.service.http.topics import TopicDescription, describe, join_described
from tidelog.service.kafka.broker import ServedTopic
from tidelog.service.kafka.partitions import Partition
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.columns import frames_digest
from tidelog.topics.message import TIMESTAMP_FIELD, Message
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.rescue import RescuableTail, Rescue, RescueInto, RescueTarget
from tidelog.topics.topic import Topic

routes = RouteTable("Administration")
_TAILS_SECONDS = 30.0
_TAIL_PAGE_BYTES = 16 << 20
_TOPIC = "/v1/topics/{namespace}/{name}"


class VerifyQuery(WaitQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to verify."""

    cold: bool = True
    """Also every object in the store, which are paid reads."""


class CompactQuery(WaitQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How to compact."""

    target_bytes: Annotated[int, msgspec.Meta(ge=1, le=16 << 30)] = DEFAULT_TARGET_BYTES
    """Objects are merged up to this size."""
    grace_seconds: Annotated[float, msgspec.Meta(ge=0)] = DEFAULT_GRACE_SECONDS
    """Objects that were replaced longer ago than this are deleted."""
    by_key: bool = False
    """Also remove messages that a later one of their key supersedes: 422, that is a job of Spark."""


class RescueTail(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that this node accepted before another one took the topic over, and did not ship."""

    partition: int
    name: str
    epoch: int
    first_offset: int
    next_offset: int
    bytes: int
    is_set_aside: bool
    node: str = ""
    """The node that has it on its disk; empty where there is one node only."""


class RescueTails(msgspec.Struct, frozen=True, kw_only=True):
    """The tails of a topic."""

    tails: list[RescueTail]


class RescueRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to do with a tail."""

    name: str
    partition: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    into: str | None = None
    """The topic that it is appended to, created if absent. Default: the one that it belonged to."""
    discard: bool = False
    """Delete the tail for good, instead."""
    node: str = ""
    """The node that has it. Default: the one that is asked."""


class TailMessagesQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which messages of a tail."""

    partition: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    node: str = ""
    """The node that has it. Default: the one that is asked."""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The first one; the `next_offset` of the answer before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    encoding: ReadEncoding = "auto"


class TailMessages(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a tail, with the offsets that they had."""

    messages: list[ReadMessage]
    next_offset: int | None
    """Where it goes on; null at its end."""
    handed_over: int
    """How many messages the owner of the topic has ingested again from where they were staged: they are left out."""


# Operations


async def for_each(logs: Sequence[Topic], report: Report, work: Callable[[Topic], Any]) -> list[Any]:
    """The work done for one partition after the other, in threads."""
    results = []
    for number, log in enumerate(logs):
        report(number, len(logs))
        results.append(await in_store_thread(work, log))
    return results


class ShipQuery(WaitQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to ship."""

    partition: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None
    """Default: all of them."""


async def _begun(call: Call, kind: str, work: Callable[[Topic], Any], join: Callable[[dict[int, Any]], Any]) -> Reply:
    served = await call.service.topic(call.topic_name)
    logs = await partition_logs(call, served)

    async def run(report: Report) -> Any:
        return join(dict(zip(logs, await for_each(list(logs.values()), report, work), strict=True)))

    return await begun(call, kind, topic_resource(served.name), run, call.query.wait)


def by_partition(name: str) -> Callable[[dict[int, Any]], dict[str, Any]]:
    """Makes a result of those of all partitions, by number."""
    return lambda results: {name: {str(number): value for number, value in results.items()}}


@starting(routes, "POST", f"{_TOPIC}/ship", Kind.TOPIC, ShipQuery, join=Joined("ship", by_number("shipped_offsets")))
async def ship(call: Call) -> Reply:
    """Ships everything that was accepted so far to the object store; the result has `shipped_offsets`."""
    number = call.query.partition
    if number is not None:
        served = await call.service.topic(call.topic_name)
        log = (await call.service.broker.partition(served, number)).topic

        async def run(report: Report) -> Any:
            return {"shipped_offsets": {str(number): await in_store_thread(log.ship)}}

        return await begun(call, "ship", topic_resource(served.name), run, call.query.wait)
    return await _begun(call, "ship", Topic.ship, by_partition("shipped_offsets"))


@routes.add("POST", f"{_TOPIC}/flush", Permission.WRITE, resource=Kind.TOPIC, join=nothing)
async def flush(call: Call) -> None:
    """Answers when everything that was accepted so far is on the disk."""
    served = await call.service.topic(call.topic_name)
    for log in (await partition_logs(call, served)).values():
        await log.flush_async()


def _join_verified(results: list[Any]) -> dict[str, Any]:
    reports = [
        msgspec.convert({name: one[name] for name in VerifyReport.__struct_fields__}, VerifyReport) for one in results
    ]
    return report_of(merged(reports[0].subject, reports))


@starting(routes, "POST", f"{_TOPIC}/verify", Kind.TOPIC, VerifyQuery, join=Joined("verify", _join_verified))
async def verify(call: Call) -> Reply:
    """Reads and checks every frame on the disk and, with `cold`, every object in the store.

    The result has `verdict` (ok, torn or damaged), `findings`, `notes` and how much was `read`.
    """
    cold = call.query.cold
    subject = str(call.topic_name)
    return await _begun(
        call,
        "verify",
        lambda log: log.verify(cold=cold),
        lambda reports: report_of(merged(subject, list(reports.values()))),
    )


@starting(routes, "POST", f"{_TOPIC}/compact", Kind.TOPIC, CompactQuery, join=Joined("compact", by_number("reports")))
async def compact(call: Call) -> Reply:
    """Merges small objects in the store into large ones; the result has a report for each partition.

    It reads and writes each object that is merged. Removing superseded messages by their keys needs all keys at once,
    and is a job of Spark, which runs beside the server: `tidelog pipeline compact`.
    """
    query: CompactQuery = call.query
    if query.by_key:
        raise NotSupportedError(
            "a server does not compact by key: that needs all keys of a topic at once",
            hint="Run `tidelog pipeline compact NAMESPACE/NAME --by-key` on the same store: it works beside the server",
        )

    def merge(log: Topic) -> MergeReport:
        tiered = log._with_store("compact")
        return Merging(
            *(tiered.owned.catalog, tiered.node.objects, log._clock),
            digest=frames_digest,
            time_field=TIMESTAMP_FIELD,
            target_bytes=query.target_bytes,
            grace_seconds=query.grace_seconds,
        ).run()

    return await _begun(call, "compact", merge, by_partition("reports"))


def report_of(report: VerifyReport) -> dict[str, Any]:
    """A report as JSON. It is for those who may administrate: it names files."""
    document: dict[str, Any] = msgspec.to_builtins(report)
    return {"ok": report.ok, "verdict": report.verdict, **document}


@starting(routes, "POST", f"{_TOPIC}/seal", Kind.TOPIC, join=Joined("seal", lambda results: results[0]))
async def seal(call: Call) -> Reply:
    """Seals a topic for another owner: ships everything, records where to continue, and closes it here.

    It stays closed until `open`, or until the server is started again and somebody uses it.
    """
    served = await call.service.topic(call.topic_name)

    async def run(report: Report) -> dict[str, bool]:
        await call.service.broker.seal(served)
        return {"sealed": True}

    return await begun(call, "seal", topic_resource(served.name), run, call.query.wait)


@routes.add("POST", f"{_TOPIC}/open", Permission.ADMIN, TopicDescription, resource=Kind.TOPIC, join=join_described)
async def open_topic(call: Call) -> TopicDescription:
    """Opens a topic that was sealed here: this node owns it again."""
    served = await call.service.topic(call.topic_name)
    served.is_sealed = False
    return await describe(call, served, asks_others=False)


# Rescue


@routes.add("GET", f"{_TOPIC}/rescue", Permission.ADMIN, RescueTails, resource=Kind.TOPIC, at_any_node=True)
async def list_tails(call: Call) -> RescueTails:
    """Lists messages that a node accepted before another one took the topic over, and did not ship.

    Where there are several nodes, all that are alive are asked: each tail is on the disk of its `node`.
    """
    served = await call.service.topic(call.topic_name)
    directory, own_node = call.service.broker.directory, _own_node(call)

    def look() -> list[RescueTail]:
        return [
            RescueTail(
                partition=rescue.origin.number,
                name=tail.name,
                epoch=tail.epoch,
                first_offset=tail.first_offset,
                next_offset=tail.next_offset,
                bytes=tail.file_bytes,
                is_set_aside=tail.set_aside_us is not None,
                node=own_node,
            )
            for rescue in Rescue.of_partitions(directory, str(served.name))
            for tail in rescue.tails()
        ]

    own = await in_store_thread(look)
    if call.only is not None or call.service.broker.placement.is_alone:
        return RescueTails(tails=own)
    others = [node for node in call.service.broker.placement.nodes() if node.node != own_node]
    all_partitions = list(range(served.count))
    answers = await asyncio.gather(
        *(ask_node(call, node, "GET", call.target, all_partitions, timeout=_TAILS_SECONDS) for node in others)
    )
    tails = own + [tail for answer in answers for tail in answer.json(RescueTails).tails]
    return RescueTails(tails=sorted(tails, key=lambda tail: (tail.partition, tail.node, tail.name)))


@routes.add(
    "GET",
    f"{_TOPIC}/rescue/{{tail}}/messages",
    Permission.ADMIN,
    TailMessages,
    resource=Kind.TOPIC,
    query=TailMessagesQuery,
    at_any_node=True,
    response_types=(JSON, MSGPACK),
)
async def read_tail(call: Call) -> TailMessages | Reply:
    """Reads the messages of a tail, without those whose end never reached the disk and those of open transactions.

    With `accept: application/msgpack` the answer is msgpack: a map with `messages` (arrays, as they are sent),
    `next_offset` and `handed_over`.
    """
    query: TailMessagesQuery = call.query
    served = await call.service.topic(call.topic_name)
    _check_node(call, query.node)
    saved = await _rescue_of(call.service, served, query.partition)

    def look() -> tuple[list[Message], int | None, int]:
        tail = _named(saved.tails(), call.path["tail"])
        found: list[Message] = []
        room_bytes = _TAIL_PAGE_BYTES
        for message in saved.messages(tail, max(query.offset, tail.first_offset)):
            if found and (len(found) == query.limit or room_bytes <= 0):
                return found, message.offset, saved.handed_over(tail)
            found.append(msgspec.structs.replace(message, partition=query.partition))
            room_bytes -= len(message.value or b"") + len(message.key or b"")
        return found, None, saved.handed_over(tail)

    found, next_offset, handed_over = await in_store_thread(look)
    if call.accepts(MSGPACK):
        page = {"messages": packed(found), "next_offset": next_offset, "handed_over": handed_over}
        return Reply(msgspec.msgpack.encode(page), MSGPACK)
    shown = [to_json(message, query.encoding) for message in found]
    return TailMessages(messages=shown, next_offset=next_offset, handed_over=handed_over)


async def _rescue_of(service: Service, served: ServedTopic, number: int) -> Rescue:
    """The tails of a partition on this disk."""
    found = await in_store_thread(Rescue.of_partitions, service.broker.directory, str(served.name))
    if number >= len(found):
        raise NotFoundError(f"{served.name} has no partition {number}")
    return found[number]


def _named(tails: list[RescuableTail], name: str) -> RescuableTail:
    tail = next((one for one in tails if one.name == name), None)
    if tail is None:
        raise NotFoundError(f"there is no tail {name[:80]!r}", hint="GET .../rescue lists them")
    return tail


def _own_node(call: Call) -> str:
    placement = call.service.broker.placement
    if placement.is_alone:
        return ""
    return next((node.node for node in placement.nodes() if node.node_id == placement.node_id), "")


@starting(routes, "POST", f"{_TOPIC}/rescue", Kind.TOPIC, mode="answer", body=RescueRequest, at_any_node=True)
async def rescue(call: Call) -> Reply:
    """Appends a tail to its topic, or to another one, as new messages; or discards it.

    In their own topic messages get the partition that they came from. Another topic is created if it is absent, with as
    many partitions as this one. With as many, messages keep their partition there; else the key says which they get.
    """
    wanted: RescueRequest = call.body
    service = call.service
    served = await service.topic(call.topic_name)
    _check_node(call, wanted.node)
    saved = await _rescue_of(service, served, wanted.partition)
    name = served.name if wanted.into is None else _into_name(call, wanted.into)

    def the_tail() -> RescuableTail:
        return _named(saved.set_aside(), wanted.name)

    def discard() -> dict[str, int]:
        tail = the_tail()
        saved.discard(tail)
        return {"discarded": tail.count}

    async def work(report: Report) -> Any:
        async with service.lock(("rescue", saved.topic, wanted.name)):  # two at once would store its messages twice
            if wanted.discard:
                return await in_store_thread(discard)
            tail = await in_store_thread(the_tail)  # before another topic is created for it
            into = await _into(service, name, saved.origin.partitions)
            return await in_store_thread(saved.append_into, tail, into)

    return await begun(call, "rescue", topic_resource(served.name), work, call.query.wait)


def _check_node(call: Call, name: str) -> None:
    """ElsewhereError for a tail of another node."""
    if not name or name == _own_node(call):
        return
    node = next((one for one in call.service.broker.placement.nodes() if one.node == name), None)
    if node is None:
        raise NotFoundError(f"the node {name[:80]!r} is not alive", hint="`tidelog cluster nodes` shows them")
    raise ElsewhereError(node, call.target)


def _into_name(call: Call, name: str) -> TopicName:
    """The topic that is to get a tail; InputError for a partition: which one a message gets is not chosen."""
    parsed = parse_topic_name(name)
    parent = parsed.parent()
    if parent is not None and call.service.broker.find(parsed) is None:
        raise InputError(
            f"{name} is the name of a partition",
            hint=f"Name the topic, {parent[0]}: messages get the partition that they came from, or that of their key",
        )
    call.check(Permission.WRITE, topic_resource(parsed))
    if call.service.broker.find(parsed) is None:
        call.check(Permission.ADMIN, topic_resource(parsed))  # it is created
    return parsed


async def _into(service: Service, name: TopicName, partitions: int) -> RescueInto:
    """The topic that gets a tail, with the logs of this node, and the partitions that other nodes serve."""
    broker, loop = service.broker, asyncio.get_running_loop()
    served = await broker.find_newest(name)
    if served is None:
        served = await broker.create(name, partitions)
    logs = await broker.log_names(served)

    def opened(number: int) -> RescueTarget:
        if broker.placement.is_ours(name, number):
            found = asyncio.run_coroutine_threadsafe(broker.partition(served, number), loop)
            return found.result().topic
        assert service.others is not None, "a node by itself serves everything"
        return service.others.topic(name, number)

    return RescueInto(str(name), logs, opened)


# Raw frames


class FramesQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which frames."""

    partition: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    offset: str = "earliest"
    """As for reading messages; before what the server has on its disk is 404: that is in the store."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=64 << 20)] = 4 << 20
    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    epoch: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The epoch under which these offsets were learnt: the answer says what of it is still there."""


@routes.add(
    "GET",
    f"{_TOPIC}/frames",
    Permission.READ,
    resource=Kind.TOPIC,
    query=FramesQuery,
    mode="wait",
    response_types=(BYTES,),
)
async def read_frames(call: Call) -> Reply:
    """Reads frames as they are in the log, control records included: the hot tail for readers of whole logs.

    Headers say where they begin and where to go on: `x-tidelog-first-offset`, `x-tidelog-next-offset`,
    `x-tidelog-hot-start-offset`, `x-tidelog-end-offset`, `x-tidelog-last-stable-offset` and `x-tidelog-epoch`, that of
    the owner. If `epoch` is an earlier one, `x-tidelog-kept-until-offset` says how far its messages are still there: an
    owner that did not get what another one had not shipped has other messages from there on.
    """
    query: FramesQuery = call.query
    served = await call.service.topic(call.topic_name)
    partition = await call.service.broker.partition(served, query.partition)
    hot_start = partition.topic.hot_start_offset
    start = hot_start if query.offset == "earliest" else await position(partition, query.offset)
    end = partition.high_watermark
    if not hot_start <= start <= end:
        raise OffsetOutOfRangeError(
            f"offset {start} is not on the disk of the server, which has {hot_start} up to {end} (exclusive)",
            hint="Read what is before that from the store",
        )
    if start == end and await news(call.service, [(partition, end)], query.wait):
        end = partition.high_watermark
    data, reached = await _frames(partition, start, end, query.max_bytes)
    headers = {
        "first-offset": start,
        "next-offset": reached,
        "hot-start-offset": hot_start,
        "end-offset": end,
        "last-stable-offset": partition.last_stable_offset,
        "epoch": partition.leader_epoch,
    }
    if query.epoch is not None and query.epoch != partition.leader_epoch:
        headers["kept-until-offset"] = await in_store_thread(partition.kept_until, query.epoch)
    return Reply(data, BYTES, headers=tuple((f"x-tidelog-{name}", str(value)) for name, value in headers.items()))


async def _frames(partition: Partition, start: int, end: int, max_bytes: int) -> tuple[bytes, int]:
    reader = partition.topic._reader(start, end, False, "skip", "read_uncommitted")
    pieces: list[bytes] = []
    size, reached = 0, start
    try:
        while size < max_bytes and (batch := await reader.next_batch_async()) is not None:
            # Numbered again: what is in memory may not have its offsets in the headers yet.
            frames = batch.frames
            framed = (
                encode_many(batch.first_offset, batch.bare)
                if frames is None
                else frames.slice(batch.start, batch.stop).renumbered(batch.first_offset)
            )
            piece = framed.buffer
            pieces.append(piece)
            size, reached = size + len(piece), batch.next_offset
    finally:
        reader.close()
    return b"".join(pieces), reached
