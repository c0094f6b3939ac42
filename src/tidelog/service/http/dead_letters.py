"""Dead letters over HTTP: what subscriptions gave up, sent back or discarded.

Invariants
- A topic of dead letters is an ordinary topic; which of its letters are done with is the position of a subscription of
  it, `dead-letters-done`. Its lag is the number of open letters, and nothing is deleted by discarding.
- A letter that is sent back is on the disk there before it counts as done. It is sent once: a crash in between is found
  by the producer that sends, unless letters were chosen against their order more than 1000 letters ago.
- Sending back asks for the permission to write to each topic that gets a letter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from tidelog.client.wire import checked
from tidelog.errors import NotFoundError, ReopenError, TidelogError
from tidelog.service.auth.access import Kind, Permission, topic_resource
from tidelog.service.http.call import Call, forbidden
from tidelog.service.http.message_json import ReadEncoding, ReadMessage, to_json
from tidelog.service.http.routes import RouteTable
from tidelog.service.http.service import Service
from tidelog.service.http.sessions import Offset
from tidelog.service.kafka.broker import ServedTopic
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.dead_letters import Letter
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.topic import Topic

routes = RouteTable("Dead letters")
DONE = "dead-letters-done"
"""The subscription whose position says which letters are done with."""
_PATH = "/v1/topics/{namespace}/{name}/dead-letters"
_CHUNK = 500
_MOST = 10_000


class LettersQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which letters to list."""

    offset: Offset = 0
    """The first one; the `next` of the answer before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    encoding: ReadEncoding = "auto"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a subscription gave up; what its headers do not say is null."""

    offset: int
    """Its offset among the letters."""
    origin_topic: str | None
    origin_offset: int | None
    subscription: str | None
    deliveries: int | None
    reason: str | None
    nack_reason: str | None
    """What the consumer said when it rejected the message the last time."""
    message: ReadMessage


class DeadLetterList(msgspec.Struct, frozen=True, kw_only=True):
    """Open letters."""

    letters: list[DeadLetter]
    next: int | None
    """Where there may be more."""


class Replay(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which letters to send back."""

    offsets: Annotated[list[Offset], msgspec.Meta(max_length=_MOST)] | None = None
    """Default: all open ones, at most 10,000."""
    into: str | None = None
    """Another topic than those that they came from."""


class Discard(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which letters are done with. They stay in the topic until its retention deletes them."""

    offsets: Annotated[list[Offset], msgspec.Meta(min_length=1, max_length=_MOST)]


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A letter that was not sent back, and why."""

    offset: int
    detail: str


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the letters."""

    sent: int
    already_sent: int
    """Found sent by a run that was interrupted."""
    refused: list[Refused]


@routes.add("GET", _PATH, Permission.READ, DeadLetterList, resource=Kind.TOPIC, query=LettersQuery)
async def list_dead_letters(call: Call) -> DeadLetterList:
    """Lists the open letters of a topic of dead letters, with their origin and the reasons."""
    query: LettersQuery = call.query
    topic = await _letters_topic(call)

    def look() -> DeadLetterList:
        found = _open_letters(topic, query.offset, query.limit)
        shown = [_shown(letter, query.encoding) for letter in found]
        return DeadLetterList(letters=shown, next=found[-1].offset + 1 if len(found) == query.limit else None)

    return await in_store_thread(look)


@routes.add("POST", f"{_PATH}/replay", Permission.WRITE, Replayed, resource=Kind.TOPIC, body=Replay)
async def replay_dead_letters(call: Call) -> Replayed:
    """Appends open letters again to the topics that they came from, each once.

    They are new messages there, without the headers of a dead letter and with `tidelog-replayed-from`; all
    subscriptions of the topic get them.
    """
    wanted: Replay = call.body
    topic = await _letters_topic(call)
    served = await call.service.topic(call.topic_name)
    into = None if wanted.into is None else str(parse_topic_name(wanted.into))
    async with call.service.lock(("dead letters", served.name)):  # two at once would send a letter twice
        return await _replay(call, served, topic, wanted.offsets, into)


async def _replay(
    call: Call, served: ServedTopic, topic: Topic, offsets: list[int] | None, into: str | None
) -> Replayed:
    letters = await in_store_thread(_chosen, topic, offsets)
    sent = already = 0
    refused: list[Refused] = []
    for start in range(0, len(letters), _CHUNK):
        done: list[int] = []
        for letter in letters[start : start + _CHUNK]:
            try:
                is_new = await _send_back(call, served, letter, into)
            except TidelogError as error:
                refused.append(Refused(offset=letter.offset, detail=error.message))
            else:
                sent, already = sent + is_new, already + (not is_new)
                done.append(letter.offset)
        await in_store_thread(_settle, topic, done)
    return Replayed(sent=sent, already_sent=already, refused=refused)


@routes.add("POST", f"{_PATH}/discard", Permission.WRITE, resource=Kind.TOPIC, body=Discard)
async def discard_dead_letters(call: Call) -> None:
    """Marks letters as done with: they are not listed and not sent back any more."""
    wanted: Discard = call.body
    topic = await _letters_topic(call)
    letters = await in_store_thread(_chosen, topic, wanted.offsets)
    await in_store_thread(_settle, topic, [letter.offset for letter in letters])


async def _letters_topic(call: Call) -> Topic:
    served = await call.service.topic(call.topic_name)
    return (await call.service.broker.partition(served, 0)).topic


async def _send_back(call: Call, letters: ServedTopic, letter: Letter, into: str | None) -> bool:
    """False when it had been sent already."""
    target = into or letter.origin_topic
    if target is None:
        raise NotFoundError("the letter does not say where it came from")
    if not call.allows(Permission.WRITE, topic_resource(target)):
        raise forbidden(Permission.WRITE, topic_resource(target))
    if target == letter.topic:
        raise NotFoundError("a letter cannot go back to the topic of the letters")
    name = f"dlq-replay {letter.topic[:100]} {letters.id.hex()[:12]}"
    served, number = await _target(call.service, target)
    placement = call.service.broker.placement
    if not placement.is_alone and not placement.is_ours(served.name, number):
        return await _send_elsewhere(call.service, served, number, letter, name)
    log = (await call.service.broker.partition(served, number)).topic
    key = log.name, name
    producer: Any = await call.service.producers.get(key, lambda: log.producer_async(name))
    try:
        known = await in_store_thread(producer._find, letter.offset)
        if known is not None:
            return False
        last = await producer.last_sequence_async()
        if last is not None and letter.offset < last:
            await log.append_async(letter.reborn(), sync=True)
        else:
            await producer.append_async(letter.reborn(), sequence=letter.offset, sync=True)
    except ReopenError:  # its topic was sealed or deleted since: the next attempt opens another one
        call.service.producers.forget(key)
        raise
    return True


async def _send_elsewhere(service: Service, served: ServedTopic, number: int, letter: Letter, name: str) -> bool:
    """The same to a partition of another node."""
    assert service.others is not None, "a node by itself serves everything"
    topic = service.others.topic(served.name, number)
    state = await topic.producer_state(name, letter.offset)
    if state["last_sequence"] is not None and letter.offset <= state["last_sequence"]:
        if str(letter.offset) in state.get("stored", {}):
            return False
        await topic.append_async(letter.reborn(), sync=True)
        return True
    await asyncio.wrap_future(topic.appender(name).put([checked(letter.reborn())], True, None, letter.offset))
    return True


async def _target(service: Service, name: str) -> tuple[ServedTopic, int]:
    """The topic, or the partition, that is called so."""
    parsed, number = parse_topic_name(name), 0
    if service.broker.find(parsed) is None and (parent := parsed.parent()) is not None:
        parsed, number = parent
    return await service.topic(parsed), number


# In a thread


def _open_letters(topic: Topic, offset: int, limit: int) -> list[Letter]:
    found: list[Letter] = []
    is_done = _done_test(topic)
    start = max(offset, topic.start_offset)
    if start >= topic.next_offset:
        return found
    for message in topic.read(start, on_gap="skip"):
        if not is_done(message.offset):
            found.append(Letter(topic.name, message))
            if len(found) == limit:
                break
    return found


def _done_test(topic: Topic) -> Any:
    """Whether the letter at an offset is done with."""
    cursor = topic._registry.cursors.load(DONE)
    if cursor is None:
        return lambda offset: False
    ranges = cursor.acked
    return lambda offset: offset < cursor.offset or any(first <= offset < stop for first, stop in ranges)


def _chosen(topic: Topic, offsets: list[int] | None) -> list[Letter]:
    if offsets is None:
        return _open_letters(topic, 0, _MOST)
    is_done = _done_test(topic)
    found: list[Letter] = []
    for offset in sorted(set(offsets)):
        if not topic.start_offset <= offset < topic.next_offset:
            raise NotFoundError(f"there is no letter {offset} in {topic.name}")
        if not is_done(offset):
            found += [Letter(topic.name, message) for message in topic.read(offset, offset + 1, on_gap="skip")]
    return found


def _settle(topic: Topic, offsets: Iterable[int]) -> None:
    """Durable when it returns."""
    done = [Delivery(b"", offset=offset) for offset in offsets]
    if not done:
        return
    consumer: Consumer = topic.subscribe(DONE, "shared", start="earliest")
    with consumer:
        consumer.ack_many(done)
        consumer.flush()


def _shown(letter: Letter, encoding: ReadEncoding) -> DeadLetter:
    row = letter.row()
    return DeadLetter(
        offset=letter.offset,
        origin_topic=letter.origin_topic,
        origin_offset=row["origin_offset"],  # type: ignore[arg-type]
        subscription=letter.subscription,
        deliveries=row["deliveries"],  # type: ignore[arg-type]
        reason=row["reason"],  # type: ignore[arg-type]
        nack_reason=row["nack_reason"],  # type: ignore[arg-type]
        message=to_json(letter.message, encoding),
    )
