"""Reads a topic whose partitions several nodes serve: a page of each node, merged by time.

Invariants
- As in `reading.py`: the offsets that come back are where to read on, and nothing before them was left out.
- A wait ends with the first node that has something.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

import msgspec

from tidelog.client.wire import MSGPACK, decode_page, unpacked
from tidelog.codec import JSON_ERRORS
from tidelog.errors import ServerUnavailableError
from tidelog.service.http.reading import Limits, news, positions, read_several, time_of
from tidelog.service.http.spread.parts import ask_node, from_each
from tidelog.service.placement import NodeAddress
from tidelog.topics.message import Message

if TYPE_CHECKING:
    from tidelog.service.http.call import Call
    from tidelog.service.kafka.broker import ServedTopic

_LONGEST_WAIT_SECONDS = 20.0


class Page(NamedTuple):
    """Messages of several partitions, where to read on in each, and where each ends."""

    messages: list[Message]
    next_offsets: dict[int, int]
    end_offsets: dict[int, int]


class SpreadReader:
    """Reads for one request."""

    def __init__(self, call: Call, served: ServedTopic, limits: Limits) -> None:
        assert call.spread is not None
        self._call = call
        self._served = served
        self._numbers = sorted(number for numbers in call.spread.values() for number in numbers)
        self._limits = limits._replace(bytes=max(1, limits.bytes // len(call.spread)))
        self._most = limits.messages

    async def page(self, start: str | Mapping[int, int], wait: float) -> Page:
        """From a position, or from an offset in each partition."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait

        async def ask(node: NodeAddress, numbers: Sequence[int]) -> Page:
            return await self._of(node, numbers, start, 0.0)

        broker = self._call.service.broker
        parts = await from_each(broker, self._served, self._numbers, ask)
        found = self._merged([one.answer for one in parts])
        while not found.messages and loop.time() < deadline:
            found = self._after(found, await self._news(found.next_offsets, deadline - loop.time()))
        return found

    async def _news(self, offsets: Mapping[int, int], seconds: float) -> Page:
        """What the first node says that has something; nothing when the time is up."""
        wait = min(seconds, _LONGEST_WAIT_SECONDS)
        empty = Page([], dict(offsets), {})

        async def ask(node: NodeAddress, numbers: Sequence[int]) -> Page:
            return await self._of(node, numbers, offsets, wait)

        async def of_one(node: NodeAddress, numbers: Sequence[int]) -> Page:
            parts = await from_each(self._call.service.broker, self._served, numbers, ask)
            return self._merged([one.answer for one in parts])

        assert self._call.spread is not None
        asked = {asyncio.ensure_future(of_one(node, some)) for node, some in self._call.spread.items()}
        try:
            while asked:
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (found := task.result()).messages:
                        return found
            return empty
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _after(self, before: Page, found: Page) -> Page:
        """A page of some partitions; the others are where they were."""
        return Page(found.messages, before.next_offsets | found.next_offsets, before.end_offsets | found.end_offsets)

    async def _of(self, node: NodeAddress, numbers: Sequence[int], start: str | Mapping[int, int], wait: float) -> Page:
        own = start if isinstance(start, str) else {number: start[number] for number in numbers}
        if node.node_id == self._call.service.broker.node_id:
            return await self._here(numbers, own, wait)
        query: dict[str, object] = {
            "limit": self._limits.messages,
            "max_bytes": self._limits.bytes,
            "isolation": self._limits.isolation,
            "on_gap": self._limits.on_gap,
            "wait": wait,
        }
        if isinstance(own, str):
            query["offset"] = own
        else:
            query["offsets"] = msgspec.json.encode({str(number): offset for number, offset in own.items()}).decode()
        topic = f"{self._call.target.partition('?')[0].rpartition('/')[0]}/messages"
        answer = await ask_node(
            self._call, node, "GET", f"{topic}?{urlencode(query)}", numbers, accept=MSGPACK, timeout=wait + 60
        )
        try:
            page = decode_page(answer.body)
        except JSON_ERRORS as error:
            raise ServerUnavailableError(f"the answer of the node {node.node} does not fit: {error}") from None
        return Page(
            unpacked(page.messages),
            {int(number): offset for number, offset in page.next_offsets.items()},
            {int(number): offset for number, offset in page.end_offsets.items()},
        )

    async def _here(self, numbers: Sequence[int], start: str | Mapping[int, int], wait: float) -> Page:
        service, served = self._call.service, self._served
        offsets = await positions(service, served, start, numbers) if isinstance(start, str) else dict(start)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            partitions = {number: await service.broker.partition(served, number) for number in offsets}
            ends = {number: one.high_watermark for number, one in partitions.items()}
            found, offsets = await read_several(service, served, offsets, self._limits)
            watched = [(one, ends[number]) for number, one in partitions.items()]
            if found or not await news(service, watched, deadline - loop.time()):
                return Page(found, offsets, ends)

    def _merged(self, pages: Sequence[Page]) -> Page:
        following = {number: offset for page in pages for number, offset in page.next_offsets.items()}
        ends = {number: offset for page in pages for number, offset in page.end_offsets.items()}
        messages = list(heapq.merge(*(page.messages for page in pages), key=time_of))
        for left in reversed(messages[self._most :]):
            following[left.partition] = min(left.offset, following[left.partition])
        return Page(messages[: self._most], following, ends)
