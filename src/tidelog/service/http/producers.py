"""Producers over HTTP: a name, sequences, and an epoch for each process that opens the name.

    POST .../producers/app-1                              {"epoch": 3, "last_sequence": 41}
    POST .../messages?producer=app-1&epoch=3&sequence=42

Invariants
- A message of the same producer and sequence is stored once, whatever becomes of connections and server meanwhile.
- Who opens a name fences those who have opened it before: from the answer on nothing of theirs is stored, not even what
  was on its way, so that the sequences after `last_sequence` are the new one's alone.
- The epoch is in the metadata store before the answer: a server that is started again refuses the older ones, too.
- A producer without an epoch is not told from others of its name. Once somebody has opened that name, it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tidelog.errors import FencedError, ReopenError
from tidelog.service.auth.access import Kind, Permission
from tidelog.service.http.call import Call
from tidelog.service.http.routes import RouteTable
from tidelog.service.http.spread.others import is_trusted
from tidelog.service.http.spread.parts import from_each, part
from tidelog.service.kafka.broker import ServedTopic
from tidelog.service.placement import NodeAddress
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import http_producer_key
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.producer.registry import check_name
from tidelog.topics.topic import Topic

if TYPE_CHECKING:
    from tidelog.service.http.messages import ProduceQuery
    from tidelog.service.http.service import Service

routes = RouteTable("Messages")
_PRODUCER = "/v1/topics/{namespace}/{name}/producers/{producer}"
_KNOWN = 10_000


class ProducerQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Of which partition."""

    partition: int | None = None
    """Default: all of them."""
    epoch: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """For nodes among themselves: the epoch that one of them has opened."""
    first: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Which of `count` sequences from this one on are stored."""
    count: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class ProducerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a producer is."""

    last_sequence: int | None
    """The highest sequence that is stored."""
    stored: dict[str, int] = {}
    """Those of the sequences that were asked for that are stored, and their offsets; -1: it is forgotten."""


class OpenedProducer(ProducerState, frozen=True, kw_only=True):
    """A producer that was opened."""

    epoch: int
    """To be sent with its messages: those of lower epochs are refused."""


class _Epoch(msgspec.Struct, frozen=True):
    epoch: int


class Fences:
    """The newest epoch of each producer that was opened, those used last in memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, str], int] = {}

    async def open(self, service: Service, served: ServedTopic, name: str) -> int:
        """The next epoch of a producer; lower ones are refused from here on, by this process and the next."""
        epoch = await in_store_thread(_next_epoch, service, served, name)
        self.note(served, name, epoch)
        return epoch

    def forget(self, topic_id: bytes) -> None:
        """What is known of a topic may be old: another node had a partition of it."""
        for key in [key for key in self._known if key[0] == topic_id]:
            del self._known[key]

    async def check(self, service: Service, served: ServedTopic, name: str, epoch: int | None) -> None:
        """FencedError for a producer that another one has replaced."""
        newest = self._known.get((served.id, name))
        if newest is None and epoch is not None:  # opened before the server was started
            newest = max(epoch, await in_store_thread(_stored_epoch, service, served, name))
            self.note(served, name, newest)
        if newest is not None and (epoch or 0) < newest:
            raise FencedError(
                f"another process has opened the producer {name!r}, and replaces this one",
                operation="append",
                hint="Give each producer that is in use at the same time a name of its own",
            )

    def note(self, served: ServedTopic, name: str, epoch: int) -> None:
        """Lower epochs are refused by this process from here on."""
        before = self._known.pop((served.id, name), 0)
        self._known[served.id, name] = max(before, epoch)
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]


def _document(service: Service, served: ServedTopic, name: str) -> VersionedDocument[_Epoch]:
    metadata, root = service.broker.directory._shared_metadata()
    key = http_producer_key(served.id.hex(), name, root)
    return VersionedDocument(metadata, key, encode_json, partial(decode_json, kind=_Epoch))


def _next_epoch(service: Service, served: ServedTopic, name: str) -> int:
    def raised(known: _Epoch | None) -> _Epoch:
        return _Epoch(1 if known is None else known.epoch + 1)

    return _document(service, served, name).update(raised).epoch


def _stored_epoch(service: Service, served: ServedTopic, name: str) -> int:
    found = _document(service, served, name).read()
    return 0 if found is None else found.value.epoch


async def append_once(
    service: Service,
    served: ServedTopic,
    target: Any,
    number: int | None,
    messages: list[Any],
    query: ProduceQuery,
    sequences: tuple[int, ...] | None = None,
) -> list[int]:
    """Appends by a producer that the server keeps open, so that the same sequence twice is stored once. `sequences` are
    those of the messages of one partition, where they do not follow each other."""
    name = query.producer
    assert name is not None
    key = (served.id, number, name)
    for attempt in (1, 2):
        await service.fences.check(service, served, name, query.epoch)
        producer = await service.producers.get(key, lambda: target.producer_async(name))
        try:
            if sequences is not None:
                append = partial(producer._append_numbered, messages, sequences, query.sync_wanted, query.timeout)
                work = asyncio.ensure_future(in_store_thread(append))
            else:
                work = producer.append_many_async(
                    messages, sequence=query.sequence, sync=query.sync_wanted, timeout=query.timeout
                )
            stored: list[int] = await asyncio.shield(work)
        except ReopenError:
            service.producers.forget(key)  # the topic was sealed and opened again, or the producer was fenced
            if attempt == 2:
                raise
        else:
            return stored
    raise AssertionError


def _highest(parts: list[Any]) -> int | None:
    return max((one.last_sequence for one in parts if one.last_sequence is not None), default=None)


def _join_state(call: Call, parts: list[ProducerState]) -> ProducerState:
    return ProducerState(last_sequence=_highest(parts))


@routes.add(
    "GET", _PRODUCER, Permission.WRITE, ProducerState, resource=Kind.TOPIC, query=ProducerQuery, join=_join_state
)
async def describe_producer(call: Call) -> ProducerState:
    """Says up to which sequence the messages of a producer are stored: where a client goes on that was started again.

    A producer that stored nothing has none.
    """
    broker, name = call.service.broker, call.topic_name
    if broker.settings.auto_create_topics and (broker.find(name) or await broker.find_opened(name)) is None:
        return ProducerState(last_sequence=None)  # the first message creates it, for those who may; a question does not
    served = await call.service.topic(name)
    logs = await _logs(call, served)
    last = await in_store_thread(_last_sequence, logs, call.path["producer"])
    query: ProducerQuery = call.query
    if last is None or last < query.first or not query.count or query.partition is None:
        return ProducerState(last_sequence=last)
    key = (served.id, query.partition, call.path["producer"])
    producer = await call.service.producers.get(key, lambda: logs[0].producer_async(call.path["producer"]))
    sequences = range(query.first, query.first + query.count)
    found = await in_store_thread(lambda: {str(one): producer._find(one) for one in sequences})
    return ProducerState(last_sequence=last, stored={key: at for key, at in found.items() if at is not None})


@routes.add("POST", _PRODUCER, Permission.WRITE, OpenedProducer, resource=Kind.TOPIC, query=ProducerQuery, spreads=True)
async def open_producer(call: Call) -> OpenedProducer:
    """Opens a producer: those who have opened its name before are fenced, and their messages refused (409).

    Its messages carry the `epoch` of the answer, and sequences after `last_sequence`.
    """
    name = call.path["producer"]
    check_name(name)
    service, served = call.service, await call.topic_in_use()
    if call.spread is not None:
        return await _opened_by_all(call, served, name)
    logs = await _logs(call, served)
    if call.query.epoch is not None and is_trusted(call.principal):
        epoch = call.query.epoch
        service.fences.note(served, name, epoch)
    else:
        epoch = await service.fences.open(service, served, name)
    last = await in_store_thread(_fence, logs, name)
    return OpenedProducer(epoch=epoch, last_sequence=last)


async def _opened_by_all(call: Call, served: ServedTopic, name: str) -> OpenedProducer:
    """One epoch for the partitions of several nodes: each fences those before in its own."""
    service = call.service
    epoch = await service.fences.open(service, served, name)
    target = f"{call.target.partition('?')[0]}?epoch={epoch}"

    async def ask(node: NodeAddress, numbers: Sequence[int]) -> OpenedProducer:
        found: OpenedProducer = await part(call, node, numbers, target)
        return found

    parts = await from_each(service.broker, served, range(served.count), ask)
    return OpenedProducer(epoch=epoch, last_sequence=_highest([one.answer for one in parts]))


async def _logs(call: Call, served: ServedTopic) -> list[Topic]:
    wanted = call.query.partition
    numbers = call.numbers(served) if wanted is None else (wanted,)
    return [(await call.service.broker.partition(served, number)).topic for number in numbers]


def _fence(logs: list[Topic], name: str) -> int | None:
    """In a thread: what is on its way by earlier producers is stored before this, or never."""
    for log in logs:
        with contextlib.closing(log.producer(name)):
            pass
    return _last_sequence(logs, name)


def _last_sequence(logs: list[Topic], name: str) -> int | None:
    known = [log._producers.last_sequence(name) for log in logs if log._producers is not None]
    return max((one for one in known if one is not None), default=None)
