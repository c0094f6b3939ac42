"""Requests for what another node serves: they are sent on (307), or answered from the store where that is enough.

Invariants
- A request about one partition, or about a topic whose partitions one node has, is sent to that node with its path and
  query as they are. The client sends its body and its token again, to a node that this one names: nothing of it was
  carried out here.
- A request about partitions of several nodes is answered by all of them together (`spread/`), unless a part of them
  is enough.
- A client that says that it cannot follow gets the answer of the other node to a GET, with what this client may see,
  and 421 for the rest.
- What nobody serves at the moment is 503 with Retry-After.
- Messages that are in the store can be read at any node, without asking their owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import AccessDeniedError, InputError, TidelogError
from tidelog.service.auth.access import Kind, NotAuthorizedError
from tidelog.service.http.call import Reply
from tidelog.service.http.operations import OPERATION_SEPARATOR
from tidelog.service.http.problems import HttpError
from tidelog.service.http.reading import Limits, Read, collect
from tidelog.service.http.routes import JSON
from tidelog.service.http.sessions import CONSUMER_SEPARATOR
from tidelog.service.http.spread.others import said_as
from tidelog.service.http.spread.parts import ask_node, nobody, node_of, parts_of
from tidelog.service.kafka.broker import Broker, ServedTopic
from tidelog.service.kafka.stored_partitions import stored_topic
from tidelog.service.placement import NodeAddress
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.topic import Topic

if TYPE_CHECKING:
    from tidelog.service.http.call import Call

NODE_HEADER = "x-tidelog-node"
LOCATION_HEADER = "x-tidelog-location"
REDIRECT_HEADER = "x-tidelog-redirect"


class ElsewhereError(HttpError):
    """Another node answers this: 307 to it."""

    def __init__(self, node: NodeAddress, target: str) -> None:
        self.node = node
        location = node.http.rstrip("/") + target
        super().__init__(
            HTTPStatus.TEMPORARY_REDIRECT,
            f"the node {node.node} serves this",
            hint="Send the same request there",
            error="LockedError",
            headers=(("location", location), (LOCATION_HEADER, location), (NODE_HEADER, node.node)),
        )


async def answer_of_other(call: Call, error: ElsewhereError) -> Reply | None:
    """For a client that cannot follow, as a page of the console: its browser asks no other host. What another node
    answers to a look is passed on; for anything else HttpError 421 says which node it is. None: the client can."""
    if call.headers.get(REDIRECT_HEADER) != "no":
        return None
    said = said_as(call.principal)
    if call.route.method == "GET" and call.route.mode != "stream" and said is not None:
        accept = call.headers.get("accept", JSON)
        try:
            answer = await ask_node(call, error.node, "GET", call.target, said=said, accept=accept)
        except AccessDeniedError as refused:  # of the client, not of this node
            raise NotAuthorizedError(refused.message, hint=refused.hint) from refused
        return Reply(answer.body, answer.media_type, HTTPStatus(answer.status), tuple(answer.headers.items()))
    headers = tuple(one for one in error.headers if one[0] != "location")
    raise HttpError(
        HTTPStatus.MISDIRECTED_REQUEST, error.detail, hint=error.hint, error=error.error, headers=headers
    ) from error


def check_here(call: Call, target: str, *, is_asked: bool = False) -> None:
    """HttpError for a request that this node does not answer; `target` is its path and query. `is_asked`: by a handler
    whose route every node answers otherwise. Where several nodes answer together, `call.spread` says which."""
    broker, route = call.service.broker, call.route
    if broker.placement.is_alone:
        return
    if _is_of_this_node(call, target) or (route.at_any_node and not is_asked):
        return
    if route.resource is Kind.ENGINE:
        _check_engine(call, target)
    elif route.resource is Kind.TOPIC and "namespace" in call.path:
        try:
            served = broker.find(call.topic_name)
        except InputError:
            return  # the handler says what is wrong with it
        if served is not None:
            _check_partitions(call, served, _asked(call, served), target)


async def hear_of(call: Call) -> None:
    """Another node may have created the topic a moment ago: it is known here before it is decided who answers."""
    if call.route.resource is Kind.TOPIC and "namespace" in call.path:
        with contextlib.suppress(InputError):  # the handler says what is wrong with the name
            await call.service.broker.find_newest(call.topic_name)


def check_here_for(call: Call, served: ServedTopic, numbers: Iterable[int], target: str) -> None:
    """The same for these partitions."""
    _check_partitions(call, served, numbers, target)


def _is_of_this_node(call: Call, target: str) -> bool:
    """Whether this is about an operation, a plan or a consumer that this node has; ElsewhereError if another one."""
    path = call.path
    for identity, separator in (
        (path.get("operation"), OPERATION_SEPARATOR),
        (getattr(call.query, "plan", None), OPERATION_SEPARATOR),
        (path.get("consumer"), CONSUMER_SEPARATOR),
    ):
        node = node_of(identity or "", separator, call.service.broker.placement.nodes())
        if node is not None and node.node_id != call.service.broker.node_id:
            raise ElsewhereError(node, target)
        if node is not None and "consumer" in path:
            return call.service.sessions.has(path["consumer"])
    return False


def _check_engine(call: Call, target: str) -> None:
    """An engine that is open here is answered for here, also while it is about to be moved: until it is closed, no
    other node can have it."""
    name, service, placement = call.path["engine"], call.service, call.service.broker.placement
    placed = placement.engines()
    if name not in placed:
        return  # one that the server was started with, or none
    if service.serves_engine(name):
        if not placement.is_alive:
            raise nobody(f"the engine {name}")
        return
    owner = placed[name]
    if owner is None or owner.node_id == placement.node_id:
        why = None if owner is None else service.why_not_served(name)
        raise nobody(f"the engine {name}", why)
    raise ElsewhereError(owner, target)


def _asked(call: Call, served: ServedTopic) -> Iterable[int]:
    """The partitions that a request is about."""
    if call.only is not None:
        return call.only
    partition, offsets = getattr(call.query, "partition", None), getattr(call.query, "offsets", "")
    numbers = [] if partition is None else [partition]
    if isinstance(offsets, str) and offsets:
        try:
            numbers += msgspec.json.decode(offsets.encode(), type=dict[int, Any])
        except JSON_ERRORS:
            numbers = []  # the handler says what is wrong with it
    known = [number for number in numbers if 0 <= number < served.count]
    return known or range(served.count)


def _check_partitions(call: Call, served: ServedTopic, numbers: Iterable[int], target: str) -> None:
    broker, route = call.service.broker, call.route
    placement = broker.placement
    owners = {number: placement.owner(served.name, number) for number in numbers}
    ids = {None if owner is None else owner.node_id for owner in owners.values()}
    if ids == {broker.node_id} or (route.takes_a_part and broker.node_id in ids):
        return
    if call.only is not None:  # another node has asked, and looks again where they are
        raise nobody(f"these partitions of {served.name} alone")
    found = [owner for owner in owners.values() if owner is not None]
    if route.takes_a_part and found:
        raise ElsewhereError(found[0], target)
    if len(found) < len(owners):
        missing = next(number for number, owner in owners.items() if owner is None)
        raise nobody(f"{served.name}, partition {missing},")
    if len(ids) == 1:
        raise ElsewhereError(found[0], target)
    if not route.spreads and route.join is None:
        raise InputError(
            f"the partitions of {served.name} are on {len(ids)} nodes",
            hint="Ask for one: partition=N in the query. A client of tidelog does that by itself",
        )
    call.spread = parts_of(broker, served, owners)


async def read_stored(call: Call, offset: str, partition: int | None, limits: Limits) -> tuple[Read, int, int] | None:
    """Messages of a partition of another node from a numbered offset on, with the partition and the end of what is in
    the store; None where they are not there, or this is not what was asked."""
    broker = call.service.broker
    if broker.placement.is_alone or not (offset.isascii() and offset.isdigit()):
        return None
    served = broker.find(call.topic_name)
    if served is None or (partition is None and served.count > 1):
        return None
    number = partition or 0
    if not 0 <= number < served.count or broker.placement.is_ours(served.name, number):
        return None
    try:
        topic, start, end = await in_store_thread(look, broker, served, number)
    except TidelogError:
        return None  # its owner may know more
    if not start <= int(offset) < end:
        return None
    broker.read_counts.for_others += 1
    read = await broker.read_cold(lambda: collect(topic, int(offset), end, limits))
    return read, number, end


def look(broker: Broker, served: ServedTopic, number: int) -> tuple[Topic, int, int]:
    """In a thread: a partition as the store has it, where it starts and ends; NotFoundError before its owner has opened
    it for the first time."""
    topic = stored_topic(broker.directory, served.name, number)
    return topic, topic.start_offset, topic.shipped_offset
