"""Appends to a topic whose partitions several nodes serve: the messages of each partition go to its node.

Invariants
- A message goes to the partition that it has on one node: that of its key or, with a sequence and without a key,
  that of its sequence. Without either it goes to a partition of the node that was asked.
- A message of a producer and sequence is stored once, whichever node is asked and wherever its partition is: also when
  it was stored before partitions were added.
- Messages without a producer are sent on by one of this node's own, so that what is sent again is stored once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidelog.client.transport import path_of
from tidelog.client.wire import MSGPACK, checked_several, decode_appended, encode
from tidelog.codec import JSON_ERRORS
from tidelog.errors import InputError, ServerUnavailableError
from tidelog.service.http.placed import check_here_for
from tidelog.service.http.producers import ProducerState
from tidelog.service.http.spread.others import said_for
from tidelog.service.http.spread.parts import nobody
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.message import Message
from tidelog.topics.partitioned import of_sequence, partition_of

if TYPE_CHECKING:
    from tidelog.service.http.call import Call
    from tidelog.service.kafka.broker import ServedTopic

NUMBERED_HEADER = "x-tidelog-numbered"
"""For nodes among themselves: the body is an array of the sequences and one of the messages."""
_ATTEMPT_SECONDS = 20.0
_SHIPPED_SECONDS = 600.0
_TURNS = itertools.count()


async def groups_of(
    call: Call, served: ServedTopic, messages: Sequence[bytes | Message]
) -> dict[int, list[int]] | None:
    """The indexes of the messages of each partition; None where all partitions are here. ElsewhereError where all
    messages are for one partition of another node."""
    placement, query = call.service.broker.placement, call.query
    if placement.is_alone or served.count == 1:
        return None
    ours = [number for number in range(served.count) if placement.is_ours(served.name, number)]
    if len(ours) == served.count:
        return None
    keys = [message.key if isinstance(message, Message) else None for message in messages]
    if query.producer is not None and query.sequence is not None:
        groups = await _by_sequence(call, served, keys)
    else:
        chosen = ours or range(served.count)
        for_keyless = chosen[next(_TURNS) % len(chosen)]
        groups = _grouped([for_keyless if key is None else partition_of(key, served.count) for key in keys])
    if len(groups) == 1:
        (number,) = groups
        separator = "&" if "?" in call.target else "?"
        check_here_for(call, served, [number], f"{call.target}{separator}partition={number}")
    return groups


def _grouped(numbers: Sequence[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for index, number in enumerate(numbers):
        groups.setdefault(number, []).append(index)
    return groups


async def _by_sequence(call: Call, served: ServedTopic, keys: Sequence[bytes | None]) -> dict[int, list[int]]:
    first: int = call.query.sequence
    opener = call.service.broker.directory._opener
    layout = await in_store_thread(opener.layout, served.name)
    earlier = () if layout is None else layout.earlier_counts
    counts = (*earlier, served.count)
    choices = [
        list(dict.fromkeys(of_sequence(key, first + index, count) for count in reversed(counts)))
        for index, key in enumerate(keys)
    ]
    looked_at = {number for numbers in choices if len(numbers) > 1 for number in numbers}
    stored = dict(
        zip(looked_at, await asyncio.gather(*(_stored(call, served, one, len(keys)) for one in looked_at)), strict=True)
    )

    def chosen(index: int, numbers: Sequence[int]) -> int:
        """It may have been stored before there were so many partitions."""
        known = [number for number in numbers if first + index in stored.get(number, {})]
        return max(known, key=lambda number: stored[number][first + index], default=numbers[0])

    return _grouped([chosen(index, numbers) for index, numbers in enumerate(choices)])


async def _stored(call: Call, served: ServedTopic, number: int, count: int) -> dict[int, int]:
    """Which sequences of a request are stored in a partition, and where."""
    name = served.name
    path = path_of("topics", name.namespace, name.name, "producers", call.query.producer)
    http, headers = _owner(call, served, number), said_for(call.principal)
    query = {"partition": number, "first": call.query.sequence, "count": count}
    answer = await http.ask("GET", path, query, headers=headers)
    found: ProducerState = answer.json(ProducerState)
    return {int(sequence): offset for sequence, offset in found.stored.items()}


def _owner(call: Call, served: ServedTopic, number: int) -> Any:
    broker, others = call.service.broker, call.service.others
    node = broker.placement.owner(served.name, number)
    if node is None:
        raise nobody(f"{served.name}, partition {number},")
    assert others is not None, "a node by itself serves everything"
    return others.http(node)


async def append_elsewhere(
    call: Call, served: ServedTopic, number: int, messages: Sequence[bytes | Message], sequences: Sequence[int] | None
) -> list[int]:
    """The offsets of messages that another node has stored."""
    query, others = call.query, call.service.others
    assert others is not None, "a node by itself serves everything"
    if query.producer is None:
        topic = others.topic(served.name, number)
        appended: list[int] = await topic.append_many_async(messages, sync=query.sync_wanted, timeout=query.timeout)
        return appended
    if sequences is None:
        raise InputError(
            "the partitions of this topic are on several nodes: messages of a producer need sequences",
            hint="Add sequence=N, or send the messages of one partition with partition=N",
        )
    path = path_of("topics", served.name.namespace, served.name.name, "messages")
    given = {
        "partition": number,
        "producer": query.producer,
        "epoch": query.epoch,
        "sync": query.sync,
        "timeout": query.timeout,
    }
    body = encode((list(sequences), checked_several(messages)))
    attempt = _SHIPPED_SECONDS if query.sync == "shipped" else _ATTEMPT_SECONDS + (query.timeout or 0.0)
    answer = await _owner(call, served, number).ask(
        *("POST", path, given, body),
        media_type=MSGPACK,
        accept=MSGPACK,
        headers=said_for(call.principal) | {NUMBERED_HEADER: "1"},
        timeout=max(attempt, 30.0),
        attempt=attempt,
    )
    try:
        found = decode_appended(answer.body)
    except JSON_ERRORS as error:
        raise ServerUnavailableError(f"the answer of another node does not fit: {error}") from None
    return found.offsets
