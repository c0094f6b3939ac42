"""Messages over HTTP: append, read from an offset, follow.

Invariants
- An append is answered when it is on the disk, unless the client asks for less (`sync=false`: in a file, which outlives
  a kill of the process) or for more (`sync=shipped`). It is never answered before that.
- An append that was begun is finished, whether or not its client is still there. With `producer` and `sequence` a
  client may send it again: it is stored once.
- The messages of one request that go to one partition are stored together or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec

from tidelog.client.wire import Appendable, packed, to_append
from tidelog.codec import JSON_ERRORS
from tidelog.errors import InputError
from tidelog.log.isolation import Isolation
from tidelog.service.auth.access import Kind, Permission
from tidelog.service.http.call import Call, Reply, parse_body, without_values
from tidelog.service.http.message_json import (
    NewMessage,
    ReadEncoding,
    ReadMessage,
    to_json,
    to_message,
)
from tidelog.service.http.placed import check_here, read_stored
from tidelog.service.http.problems import HttpError
from tidelog.service.http.producers import append_once
from tidelog.service.http.reading import Limits, news, positions, read_several
from tidelog.service.http.routes import BYTES, EVENTS, JSON, MSGPACK, RouteTable
from tidelog.service.http.service import Service
from tidelog.service.http.spread.append import NUMBERED_HEADER, append_elsewhere, groups_of
from tidelog.service.http.spread.reading import SpreadReader
from tidelog.service.kafka.broker import ServedTopic
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.message import SHIPPED, Message, OnGap, Sync
from tidelog.topics.partitioned import PartitionOffset
from tidelog.tracing import TRACING, record_span

routes = RouteTable("Messages")
_TEXT = "text/plain"
_MAX_READ = 10_000
_HEARTBEAT_SECONDS = 15.0
_TAIL_MESSAGES = 500
_LINE_BREAKS_TO_SPACE = bytes.maketrans(b"\r\n", b"  ")
_decode_packed = msgspec.msgpack.Decoder(list[Appendable]).decode
_decode_numbered = msgspec.msgpack.Decoder(
    tuple[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], list[Appendable]]
).decode
_encode_packed = msgspec.msgpack.Encoder().encode

PartitionNumber = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class NewMessages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages to append."""

    messages: Annotated[list[NewMessage], msgspec.Meta(min_length=1, max_length=100_000)]


class ProduceQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Where messages go, and when the answer comes."""

    partition: PartitionNumber | None = None
    """Default: that of the key (as Kafka's clients choose it), else one after the other."""
    key: str | None = None
    """The key of a message whose value is the whole body."""
    producer: Name | None = None
    """With a sequence: what this producer has stored is not stored again."""
    epoch: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """That of `POST .../producers/NAME`: once another process has opened the name, messages of this one are refused."""
    sequence: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The sequence of the first message; the others have the numbers after it."""
    sync: Literal["true", "false", "shipped"] = "true"
    """`true`: the answer comes when the messages are on the disk; `false`: in a file; `shipped`: in the store too."""
    timeout: Annotated[float, msgspec.Meta(ge=0, le=600)] | None = None
    """Seconds to wait for room, and for the store."""

    @property
    def sync_wanted(self) -> Sync:
        """As the library has it."""
        return SHIPPED if self.sync == "shipped" else self.sync == "true"


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """Where the messages are, in the order of the request; -1: stored earlier, and the offset is forgotten."""

    offsets: list[int]
    partitions: list[int]


@routes.add(
    "POST",
    "/v1/topics/{namespace}/{name}/messages",
    Permission.WRITE,
    Appended,
    resource=Kind.TOPIC,
    query=ProduceQuery,
    body=NewMessages,
    body_types=(MSGPACK, BYTES, _TEXT),
    response_types=(JSON, MSGPACK),
    max_body_bytes=0,
    takes_a_part=True,
)
async def produce(call: Call) -> Appended | Reply:
    """Appends messages; answers when they are on the disk.

    A body of JSON has `messages`. A body of msgpack is an array of messages, each an array of value, key, headers,
    timestamp, offset, deliver_at and partition, or a value alone. A body of `application/octet-stream` or `text/plain`
    is the value of one message.
    """
    query: ProduceQuery = call.query
    sequences, messages = _messages_of(call)
    served = await call.topic_in_use()
    began = time.perf_counter()
    groups = await groups_of(call, served, messages) if query.partition is None else None
    if groups is not None:
        result = await _append_spread(call, served, messages, groups)
    else:
        result = await _append(call.service, served, messages, query, sequences)
    if TRACING.is_on:
        seen = {"tidelog.topic": str(served.name), "tidelog.messages": len(messages), "tidelog.sync": query.sync}
        record_span("tidelog.append", time.perf_counter() - began, seen)
    if call.media_type == MSGPACK or call.accepts(MSGPACK):
        return Reply(_encode_packed(result), MSGPACK)
    return result


async def _append_spread(
    call: Call, served: ServedTopic, messages: list[bytes | Message], groups: Mapping[int, list[int]]
) -> Appended:
    """Appends to partitions of several nodes; an error of one is raised after all were tried."""
    query: ProduceQuery = call.query
    first = query.sequence

    async def store(number: int, indexes: list[int]) -> list[int]:
        some = [messages[index] for index in indexes]
        sequences = None if first is None else tuple(first + index for index in indexes)
        if call.service.broker.placement.is_ours(served.name, number):
            of_one = msgspec.structs.replace(query, partition=number)
            return (await _append(call.service, served, some, of_one, sequences)).offsets
        return await append_elsewhere(call, served, number, some, sequences)

    stored = await asyncio.gather(*(store(*one) for one in groups.items()), return_exceptions=True)
    offsets, partitions = [0] * len(messages), [0] * len(messages)
    for (number, indexes), found in zip(groups.items(), stored, strict=True):
        if isinstance(found, BaseException):
            raise found
        for index, offset in zip(indexes, found, strict=True):
            offsets[index], partitions[index] = offset, number
    return Appended(offsets=offsets, partitions=partitions)


def _messages_of(call: Call) -> tuple[tuple[int, ...] | None, list[bytes | Message]]:
    """The messages, and their sequences where another node has numbered them."""
    if NUMBERED_HEADER not in call.headers or call.media_type != MSGPACK:
        return None, _plain_messages_of(call)
    try:
        sequences, messages = _decode_numbered(call.body)
    except JSON_ERRORS as error:
        raise InputError(f"the body does not fit: {without_values(error)}") from None
    is_counted = call.query.producer is not None and call.query.partition is not None
    if not sequences or len(sequences) != len(messages) or list(sequences) != sorted(sequences) or not is_counted:
        raise InputError("numbered messages have a sequence each, which increase, a producer and a partition")
    return sequences, to_append(messages)


def _plain_messages_of(call: Call) -> list[bytes | Message]:
    media_type, query = call.media_type, call.query
    if media_type in (BYTES, _TEXT):
        return [Message(call.body, None if query.key is None else query.key.encode("utf-8"))]
    if query.key is not None:
        raise InputError("the parameter key is for a body that is the value of one message")
    if media_type == MSGPACK:
        try:
            found = to_append(_decode_packed(call.body))
        except JSON_ERRORS as error:
            raise InputError(f"the body does not fit: {without_values(error)}") from None
        if not found:
            raise InputError("there are no messages in the body")
        return found
    return [to_message(one) for one in call.body.messages]


async def _append(
    service: Service,
    served: ServedTopic,
    messages: list[bytes | Message],
    query: ProduceQuery,
    sequences: tuple[int, ...] | None,
) -> Appended:
    sync = query.sync_wanted
    options: dict[str, Any] = {"sync": sync, "timeout": query.timeout}
    number = 0 if served.count == 1 and query.partition is None else query.partition
    target: Any
    if number is not None:
        target = (await service.broker.partition(served, number)).topic
    else:
        target = await in_store_thread(service.broker.directory.topic, str(served.name))
    if query.producer is not None:
        offsets = await append_once(service, served, target, number, messages, query, sequences)
    elif query.sequence is not None or query.epoch is not None:
        raise InputError("a sequence and an epoch need a producer", hint="Add producer=NAME")
    else:
        offsets = await asyncio.shield(target.append_many_async(messages, **options))
    if number is not None:
        partitions = [number] * len(offsets)
    else:
        partitions = [one.partition for one in offsets if isinstance(one, PartitionOffset)]
        offsets = [int(one) for one in offsets]
    if sync is False:
        await _in_files(service, served, offsets, partitions)
    return Appended(offsets=offsets, partitions=partitions)


async def _in_files(service: Service, served: ServedTopic, offsets: list[int], partitions: list[int]) -> None:
    last: dict[int, int] = {}
    for offset, number in zip(offsets, partitions, strict=True):
        last[number] = max(offset, last.get(number, -1))
    for number, offset in last.items():
        await (await service.broker.partition(served, number)).until_in_files(offset + 1)


# Reading


class ReadQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to read, and how."""

    offset: str = "earliest"
    """A number, `earliest`, `latest`, a time, or minus a number: so many newest messages of each partition (`limit`
    counts all of them, oldest first). In all partitions, unless one is named."""
    offsets: str = ""
    """Where to begin in each partition, as JSON: `{"0": 100, "1": 7}`; `next_offsets` of the answer before."""
    partition: PartitionNumber | None = None
    """Default: all partitions, merged by time."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MAX_READ)] = 100
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=64 << 20)] = 1 << 20
    """Stops after so many bytes of keys and values; at least one message comes."""
    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """Seconds to wait for a message when there is none."""
    encoding: ReadEncoding = "auto"
    """`auto`: text where it is UTF-8, else base64; `json`: values that are JSON come as JSON."""
    isolation: Isolation = "read_committed"
    on_gap: OnGap = "raise"
    stored: bool = False
    """Messages of a partition, from a numbered offset on, that are in the store may come from any node, which need not
    ask their owner; `end_offsets` says where the store ends then."""


class ReadMessages(msgspec.Struct, frozen=True, kw_only=True):
    """Messages, and where to read on. Keys of the offsets are numbers of partitions."""

    messages: list[ReadMessage]
    next_offsets: dict[str, int]
    end_offsets: dict[str, int]
    """Where the partitions end now."""


@routes.add(
    "GET",
    "/v1/topics/{namespace}/{name}/messages",
    Permission.READ,
    ReadMessages,
    resource=Kind.TOPIC,
    query=ReadQuery,
    reads_stored=True,
    spreads=True,
    mode="wait",
    response_types=(JSON, MSGPACK),
)
async def consume(call: Call) -> ReadMessages | Reply:
    """Reads messages from an offset on; with `wait` it waits for the first one.

    With `accept: application/msgpack` the answer is msgpack: a map with `messages` (arrays, as they are sent),
    `next_offsets` and `end_offsets`.
    """
    query: ReadQuery = call.query
    service = call.service
    limits = Limits(query.limit, query.max_bytes, query.isolation, query.on_gap)
    wants_stored = query.stored and not query.offsets
    stored = await read_stored(call, query.offset, query.partition, limits) if wants_stored else None
    if stored is not None:
        read, number, end = stored
        return _page(call, read.messages, {number: read.next_offset}, {number: end})
    check_here(call, call.target)
    served = await service.topic(call.topic_name)
    seconds = min(query.wait, service.settings.max_wait_seconds)
    if call.spread is not None:
        reading = SpreadReader(call, served, limits).page(_given_offsets(query) or query.offset, seconds)
        page = await service.unless_stopping(reading)
        return _page(call, *(page or ([], {}, {})))
    offsets = await _positions(call, served, query)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        partitions = {number: await service.broker.partition(served, number) for number in offsets}
        ends = {number: one.high_watermark for number, one in partitions.items()}
        found, offsets = await read_several(service, served, offsets, limits)
        watched = [(one, ends[number]) for number, one in partitions.items()]
        if found or not await news(service, watched, deadline - loop.time()):
            break
    return _page(call, found, offsets, ends)


def _page(call: Call, found: list[Message], offsets: dict[int, int], ends: dict[int, int]) -> ReadMessages | Reply:
    next_offsets = {str(number): offset for number, offset in offsets.items()}
    end_offsets = {str(number): offset for number, offset in ends.items()}
    if call.accepts(MSGPACK):
        body = {"messages": packed(found), "next_offsets": next_offsets, "end_offsets": end_offsets}
        return Reply(_encode_packed(body), MSGPACK)
    shown = [to_json(message, call.query.encoding) for message in found]
    return ReadMessages(messages=shown, next_offsets=next_offsets, end_offsets=end_offsets)


def _given_offsets(query: ReadQuery | TailQuery) -> dict[int, int] | None:
    if not query.offsets:
        return None
    given = parse_body(query.offsets.encode("utf-8"), JSON, dict[PartitionNumber, Annotated[int, msgspec.Meta(ge=0)]])
    if not given:
        raise InputError("offsets names no partition")
    return dict(given)


async def _positions(call: Call, served: ServedTopic, query: ReadQuery | TailQuery) -> dict[int, int]:
    given = _given_offsets(query)
    if given is not None:
        return given
    numbers = call.numbers(served) if query.partition is None else (query.partition,)
    return await positions(call.service, served, query.offset, numbers)


# Following


class TailQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to follow, and how."""

    offset: str = "latest"
    """As for reading."""
    offsets: str = ""
    partition: PartitionNumber | None = None
    encoding: ReadEncoding = "auto"
    isolation: Isolation = "read_committed"
    max_per_second: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    """Of more messages in a second only the newest come; an event `skipped` says how many did not."""


class Skipped(msgspec.Struct, frozen=True):
    """How many messages were left out because there were too many."""

    count: int


@routes.add(
    "GET",
    "/v1/topics/{namespace}/{name}/tail",
    Permission.READ,
    resource=Kind.TOPIC,
    query=TailQuery,
    mode="stream",
    response_types=(EVENTS,),
    spreads=True,
)
async def tail(call: Call) -> AsyncIterator[bytes]:
    """Follows a topic as server-sent events: each message is an event `message`, as JSON.

    A client that connects again with the `Last-Event-ID` that it has seen misses nothing.
    """
    query: TailQuery = call.query
    service = call.service
    served = await service.topic(call.topic_name)
    limits = Limits(_TAIL_MESSAGES, 1 << 20, query.isolation, "skip")
    rate = _Rate(query.max_per_second)
    if call.spread is not None:
        async for piece in _tail_of_all(call, served, limits, rate):
            yield piece
        return
    offsets = _resumed(call) or await _positions(call, served, query)
    yield b": follows\n\n"
    while not service.stopping.is_set():
        partitions = {number: await service.broker.partition(served, number) for number in offsets}
        ends = {number: one.high_watermark for number, one in partitions.items()}
        found, following = await read_several(service, served, offsets, limits)
        yield _shown_events(found, offsets, rate, query.encoding)
        offsets = following
        if not found and not await news(
            service, [(one, ends[number]) for number, one in partitions.items()], _HEARTBEAT_SECONDS
        ):
            yield b": still here\n\n"


async def _tail_of_all(call: Call, served: ServedTopic, limits: Limits, rate: _Rate) -> AsyncIterator[bytes]:
    """The same from several nodes."""
    query, service = call.query, call.service
    reader = SpreadReader(call, served, limits)
    yield b": follows\n\n"
    page = await reader.page(_resumed(call) or _given_offsets(query) or query.offset, 0.0)
    before = page.next_offsets
    for message in reversed(page.messages):
        before = before | {message.partition: message.offset}
    while not service.stopping.is_set():
        yield _shown_events(page.messages, before, rate, query.encoding) or b": still here\n\n"
        before = page.next_offsets
        following = await service.unless_stopping(reader.page(before, _HEARTBEAT_SECONDS))
        if following is None:
            return
        page = following


def _shown_events(messages: list[Message], offsets: dict[int, int], rate: _Rate, encoding: ReadEncoding) -> bytes:
    """Events for what fits into the second, and one for the rest; nothing for nothing."""
    shown, skipped = rate.choose(messages)
    left_out = b"event: skipped\ndata: " + msgspec.json.encode(Skipped(skipped)) + b"\n\n" if skipped else b""
    return left_out + (_events(shown, offsets, encoding) if shown else b"")


def _events(messages: list[Message], offsets: dict[int, int], encoding: ReadEncoding) -> bytes:
    """`offsets` are those before the first message; the id of an event is where to read on after it."""
    at = dict(offsets)
    parts: list[bytes] = []
    for message in messages:
        at[message.partition] = message.offset + 1
        event_id = ",".join(f"{number}:{offset}" for number, offset in at.items())
        data = msgspec.json.encode(to_json(message, encoding))
        # JSON that was stored with line breaks, which either of these is to a reader of events. In a string they are
        # escaped, so here they are space.
        data = data.translate(_LINE_BREAKS_TO_SPACE)
        parts.append(b"id: " + event_id.encode("ascii") + b"\nevent: message\ndata: " + data + b"\n\n")
    return b"".join(parts)


def _resumed(call: Call) -> dict[int, int] | None:
    """Where a client that was connected before goes on."""
    seen = call.headers.get("last-event-id")
    if not seen:
        return None
    try:
        pairs = [one.split(":") for one in seen.split(",")]
        return {int(number): int(offset) for number, offset in pairs}
    except ValueError:
        raise HttpError(HTTPStatus.BAD_REQUEST, "Last-Event-ID is not one of this stream") from None


class _Rate:
    """Which of the messages fit into a second."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._second = -1
        self._used = 0

    def choose(self, messages: list[Message]) -> tuple[list[Message], int]:
        """The newest that still fit, and how many do not."""
        if self._limit is None:
            return messages, 0
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._used = second, 0
        room = max(0, self._limit - self._used)
        shown = messages[len(messages) - room :] if room < len(messages) else messages
        self._used += len(shown)
        return shown, len(messages) - len(shown)
