"""Messages of a topic, page by page: the next page is asked for while the program looks at this one.

Invariants
- Messages of a partition come in the order of their offsets, each once, whatever happens to the connection: a page is
  asked for by its offsets, and asked for again when it did not arrive.
- Positions are resolved when the reader is opened. Without `follow` it ends at the offsets that were next then.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from tidelog.client.bridge import Bridge, waited
from tidelog.client.transport import Http
from tidelog.client.wire import MSGPACK, ReadPage, decode_page, unpacked
from tidelog.codec import JSON_ERRORS
from tidelog.errors import ClosedError, DataError
from tidelog.log.isolation import Isolation, check_isolation
from tidelog.log.reader import Position, check_position
from tidelog.topics.base import check_on_gap
from tidelog.topics.message import Message, OnGap

Positions = Position | Mapping[int, Position]

_PAGE_MESSAGES = 10_000
_PAGE_BYTES = 4 << 20
_WAIT_SECONDS = 20.0
_ATTEMPT_SECONDS = 30.0


class Wanted(NamedTuple):
    """What to read, as the program said it."""

    start: Positions
    stop: Positions | None
    follow: bool
    on_gap: OnGap
    isolation: Isolation

    def check(self) -> None:
        """InputError for what is no position, before a server is asked."""
        check_on_gap(self.on_gap)
        check_isolation(self.isolation)
        for given in (self.start, self.stop):
            for one in given.values() if isinstance(given, Mapping) else (given,):
                if one is not None:
                    check_position(one)


def position_text(position: Position) -> str:
    """A position as the server reads it."""
    if isinstance(position, datetime):
        moment = position if position.tzinfo is not None else position.replace(tzinfo=UTC)
        return moment.isoformat()
    return str(position)


class AnyReader(Protocol):
    """One reading, page by page."""

    async def open(self) -> list[Message]: ...

    async def more(self) -> list[Message] | None: ...


class Reader:
    """One reading of a topic, or of one of its partitions. Everything here runs in the client's loop."""

    def __init__(self, http: Http, topic_path: str, partition: int | None, wanted: Wanted) -> None:
        self._http = http
        self._path = topic_path + "/messages"
        self._partition = partition
        self._wanted = wanted
        self._next: dict[str, int] = {}
        self._stop: dict[str, int] = {}

    async def open(self) -> list[Message]:
        """Resolves the positions; the first messages."""
        wanted = self._wanted
        wanted.check()
        if wanted.stop is not None:
            self._stop = await self._resolved(wanted.stop)
        page = await self._page(self._begin(wanted.start), 0.0)
        if wanted.stop is None and not wanted.follow:
            self._stop = dict(page.end_offsets)
        return self._taken(page)

    def _begin(self, start: Positions) -> dict[str, object]:
        if isinstance(start, Mapping):
            return {"offsets": msgspec.json.encode({str(n): one for n, one in start.items()}).decode()}
        return {"offset": position_text(start), "partition": self._partition}

    async def _resolved(self, position: Positions) -> dict[str, int]:
        """The offsets of a position: those of the first message there, else where the partitions end."""
        if isinstance(position, Mapping):
            return {str(number): one for number, one in position.items() if isinstance(one, int)}
        if isinstance(position, int):
            return {str(self._partition or 0): position}
        limits: dict[str, object] = {"limit": 1, "max_bytes": 1, "isolation": "read_uncommitted", "on_gap": "skip"}
        page = await self._page(self._begin(position) | limits, 0.0)
        found = dict(page.next_offsets)
        for message in page.messages:
            found[str(message.partition)] = message.offset
        return found

    async def _page(self, query: dict[str, object], wait: float) -> ReadPage:
        wanted = self._wanted
        query = {
            "limit": _PAGE_MESSAGES,
            "max_bytes": _PAGE_BYTES,
            "isolation": wanted.isolation,
            "on_gap": wanted.on_gap,
            "wait": wait or None,
            **query,
        }
        attempt = _ATTEMPT_SECONDS + wait
        total = max(self._http.timeout_seconds, attempt)
        answer = await self._http.ask(
            "GET", self._path, query, accept=MSGPACK, timeout=total, attempt=attempt, waits=wait > 0
        )
        try:
            return decode_page(answer.body)
        except JSON_ERRORS as error:
            raise DataError(f"the answer of the server does not fit: {error}") from None

    async def more(self) -> list[Message] | None:
        """The next messages, maybe none; None at the end."""
        if self._is_over:
            return None
        left = {number: offset for number, offset in self._next.items() if offset < self._stop.get(number, offset + 1)}
        if self._partition is not None:
            query: dict[str, object] = {"partition": self._partition, "offset": next(iter(left.values()))}
            query["stored"] = None if self._wanted.follow else True
        else:
            query = {"offsets": msgspec.json.encode(left).decode()}
        before = dict(self._next)
        messages = self._taken(await self._page(query, _WAIT_SECONDS if self._wanted.follow else 0.0))
        if not messages and not self._wanted.follow and self._next == before:
            return None  # an open transaction, or what was deleted meanwhile
        return messages

    @property
    def _is_over(self) -> bool:
        if not self._stop:
            return False
        return all(self._next.get(number, 0) >= offset for number, offset in self._stop.items())

    def _taken(self, page: ReadPage) -> list[Message]:
        self._next.update(page.next_offsets)
        messages = unpacked(page.messages)
        if not self._stop:
            return messages
        stops = {int(number): offset for number, offset in self._stop.items()}
        return [one for one in messages if one.offset < stops.get(one.partition, one.offset + 1)]


class SpreadReader:
    """One reading of a topic whose partitions several nodes serve: a reader for each, merged by time page by page."""

    def __init__(self, http: Http, topic_path: str, partitions: int, wanted: Wanted) -> None:
        def part(given: Positions | None, number: int) -> Position | None:
            return given.get(number) if isinstance(given, Mapping) else given

        numbers = [number for number in range(partitions) if part(wanted.start, number) is not None]
        self._wanted = wanted
        self._readers = {
            number: Reader(
                http,
                topic_path,
                number,
                wanted._replace(start=part(wanted.start, number), stop=part(wanted.stop, number)),  # type: ignore[arg-type]
            )
            for number in numbers
        }
        self._reading: dict[asyncio.Task[list[Message] | None], int] = {}

    async def open(self) -> list[Message]:
        """Resolves the positions; the first messages."""
        self._wanted.check()
        return _by_time(await asyncio.gather(*(reader.open() for reader in self._readers.values())))

    async def more(self) -> list[Message] | None:
        """The next messages, maybe none; None at the end of all partitions."""
        if not self._wanted.follow:
            pages = await asyncio.gather(*(reader.more() for reader in self._readers.values()))
            ended = [number for number, page in zip(self._readers, pages, strict=True) if page is None]
            for number in ended:
                del self._readers[number]
            found = [page for page in pages if page is not None]
            return _by_time(found) if found else None
        for number in self._readers.keys() - set(self._reading.values()):
            self._reading[asyncio.ensure_future(self._readers[number].more())] = number
        try:
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            for task in self._reading:
                task.cancel()
            raise
        for task in done:
            del self._reading[task]
        return _by_time([task.result() or [] for task in done])


def _by_time(pages: Iterable[list[Message]]) -> list[Message]:
    return list(heapq.merge(*pages, key=lambda message: message.timestamp))  # type: ignore[arg-type, return-value]


def read(bridge: Bridge, reader: AnyReader) -> Iterator[Message]:
    """The messages for a thread. The positions are resolved by this call."""
    first = bridge.wait(reader.open())
    return _iterate(bridge, reader, first)


def _iterate(bridge: Bridge, reader: AnyReader, messages: list[Message] | None) -> Iterator[Message]:
    following: Future[list[Message] | None] | None = None
    try:
        while messages is not None:
            following = bridge.start(reader.more())
            yield from messages
            try:
                messages = waited(following)
            except ClosedError:
                return
            following = None
    finally:
        if following is not None:
            following.cancel()


async def read_async(bridge: Bridge, reader: AnyReader) -> AsyncIterator[Message]:
    """The messages for a task."""
    messages: list[Message] | None = await asyncio.wrap_future(bridge.start(reader.open()))
    following: Future[Any] | None = None
    try:
        while messages is not None:
            following = bridge.start(reader.more())
            for message in messages:
                yield message
            try:
                messages = await asyncio.wrap_future(following)
            except ClosedError:
                return
            following = None
    finally:
        if following is not None:
            following.cancel()
