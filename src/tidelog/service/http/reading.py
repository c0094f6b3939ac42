"""Reads messages of partitions for HTTP: from an offset, with limits, waiting for news.

Invariants
- Nothing is read that a kill of the process could take back: reads end at what the files have.
- Reads of the store share the broker's limit of reads that wait for it. None blocks the event loop.
- The offsets that come back are where to read on: nothing between them and what was returned was left out, but for what
  is not visible (aborted transactions, compacted messages).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from tidelog.errors import InputError, OffsetOutOfRangeError
from tidelog.log.isolation import Isolation
from tidelog.service.http.service import Service
from tidelog.service.kafka.broker import ServedTopic
from tidelog.service.kafka.partitions import Partition
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.message import Message, OnGap
from tidelog.topics.topic import Topic

_MESSAGE_OVERHEAD_BYTES = 64


class Limits(NamedTuple):
    """How much to read, and how."""

    messages: int
    bytes: int
    isolation: Isolation = "read_committed"
    on_gap: OnGap = "raise"


class Read(NamedTuple):
    """What was read from one partition, and where to read on."""

    messages: list[Message]
    next_offset: int


async def position(partition: Partition, text: str) -> int:
    """The offset that a client means: a number, `earliest`, `latest`, a time, or minus the number of the last ones."""
    end = partition.high_watermark
    if text == "earliest":
        return partition.start_offset
    if text == "latest":
        return end
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= 19:
        return int(text) if text is digits else max(partition.start_offset, end - int(digits))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"an offset is a number, earliest, latest or a time such as 2026-11-17T10:00:00Z, not {text[:60]!r}"
        ) from None
    if time.tzinfo is None:
        raise InputError(f"the time {text[:60]!r} has no time zone", hint="Add one: 2026-11-17T10:00:00Z")
    found = await in_store_thread(partition.topic._readable.resolve, time)
    return min(found, end)


async def positions(service: Service, served: ServedTopic, text: str, numbers: Iterable[int]) -> dict[int, int]:
    """The offsets that a client means in these partitions."""
    return {number: await position(await service.broker.partition(served, number), text) for number in numbers}


async def read_one(service: Service, partition: Partition, offset: int, limits: Limits) -> Read:
    """Messages of a partition from an offset on, as far as there are any now."""
    end = partition.high_watermark
    if not partition.start_offset <= offset <= end:
        raise OffsetOutOfRangeError(
            f"offset {offset} is not in partition {partition.number} of {partition.name}, which holds "
            f"{partition.start_offset} up to {end} (exclusive)",
            hint="Read from earliest, latest or a time",
        )
    if offset == end:
        return Read([], offset)
    if offset < partition.topic._log.start_offset:
        read = await service.broker.read_cold(lambda: collect(partition.topic, offset, end, limits))
    else:
        read = await collect(partition.topic, offset, end, limits)
    partition.reader.count_sent(sum(map(_size, read.messages)), len(read.messages))
    return read


async def collect(topic: Topic, offset: int, end: int, limits: Limits) -> Read:
    """Messages of a log from an offset on, up to `end`."""
    reader = topic._reader(offset, end, False, limits.on_gap, limits.isolation)
    found: list[Message] = []
    room_bytes = limits.bytes
    try:
        while len(found) < limits.messages and room_bytes > 0:
            batch = await reader.next_batch_async()
            if batch is None:
                return Read(found, max(offset, reader.offset))
            wanted = min(batch.stop - batch.start, limits.messages - len(found))
            part = batch._replace(stop=batch.start + wanted) if batch.frames is not None else batch
            part = part if batch.frames is not None else part._replace(stop=wanted, bare=batch.bare[:wanted])
            offset = part.next_offset
            for message in topic._decoded(reader, part, limits.on_gap):
                if room_bytes <= 0:
                    return Read(found, message.offset)
                room_bytes -= _size(message)
                found.append(message)
        return Read(found, offset)
    finally:
        reader.close()


def _size(message: Message) -> int:
    return len(message.value or b"") + len(message.key or b"") + _MESSAGE_OVERHEAD_BYTES


async def read_several(
    service: Service, served: ServedTopic, offsets: dict[int, int], limits: Limits
) -> tuple[list[Message], dict[int, int]]:
    """Messages of several partitions, merged by time; and where to read on in each."""
    if len(offsets) == 1:
        ((number, offset),) = offsets.items()
        read = await read_one(service, await service.broker.partition(served, number), offset, limits)
        return read.messages, {number: read.next_offset}
    share = limits._replace(bytes=max(1, limits.bytes // len(offsets)))
    reads: dict[int, Read] = {}
    for number, offset in offsets.items():
        reads[number] = await read_one(service, await service.broker.partition(served, number), offset, share)
    merged = heapq.merge(*(read.messages for read in reads.values()), key=time_of)
    taken = [message for message, _ in zip(merged, range(limits.messages), strict=False)]
    following = dict(offsets)
    counts = dict.fromkeys(offsets, 0)
    for message in taken:
        counts[message.partition] += 1
        following[message.partition] = message.offset + 1
    for number, read in reads.items():
        if counts[number] == len(read.messages):
            following[number] = read.next_offset
    return taken, following


def time_of(message: Message) -> datetime:
    """By which messages of several partitions are merged."""
    assert message.timestamp is not None
    return message.timestamp


async def news(service: Service, partitions: Iterable[tuple[Partition, int]], seconds: float) -> bool:
    """Waits until a partition has more than up to the offset that is given with it; False when the time is up, or the
    server stops."""
    if seconds <= 0 or service.stopping.is_set():
        return False
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    watched = list(partitions)
    is_late = False

    def late() -> None:
        nonlocal is_late
        is_late = True
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(seconds, late)
    service.waiters.add(waiter)
    try:
        for partition, offset in watched:
            partition.listen(waiter, offset)
        await waiter
    finally:
        timer.cancel()
        service.waiters.discard(waiter)
        for partition, _ in watched:
            partition.stop_listening(waiter)
    return not is_late and not service.stopping.is_set()
