"""Appends over the network: what comes together shares a request, and nothing is stored twice.

    program: append, append, append_many ...  ->  queue  ->  POST .../messages?producer=NAME&sequence=N  (one at a time)
             append of a thread, nothing before it       ->  the same, by the thread itself

Invariants
- Every message has the name of its producer and a sequence. A request that got no answer is sent again as it was, and
  the server stores it once, whether or not it was started again meanwhile.
- One request of a producer is on its way at a time, in the order of the sequences: a message is never overtaken.
- What waits meanwhile goes together in the next request, up to `MAX_BATCH_BYTES`. If the server refuses that, each
  append is sent by itself with the sequences that it had, so that nobody gets the error of another.
- A sequence is used for one content only. After an append whose outcome is not known its sequences are not used again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from threading import Lock
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from tidelog.client.bridge import Bridge, awaited, named, waited
from tidelog.client.transport import Answer, Http, path_of
from tidelog.client.wire import MSGPACK, Appendable, checked, checked_several, decode_appended, encode, joined
from tidelog.codec import JSON_ERRORS
from tidelog.errors import ClosedError, DataError, Hint, InputError, RetryError, TidelogError
from tidelog.store.aio import ClosedAtExit
from tidelog.topics.message import SHIPPED, HeadersGiven, Message, Sync
from tidelog.topics.partitioned import PartitionOffset
from tidelog.topics.producer.producer import checked_sequence
from tidelog.units import to_seconds

MAX_BATCH_BYTES = 4 << 20
MAX_BATCH_MESSAGES = 20_000
# A request that is not answered for so long is sent again. The server may wait for a slow disk.
_ATTEMPT_SECONDS = 20.0
_SHIPPED_SECONDS = 600.0


class _Append(NamedTuple):
    """What one call appends."""

    body: bytes
    messages: int
    sync: Sync
    timeout: float | None
    sequence: int | None
    answer: Future[list[int]]


class Appender:
    """The queue of one producer. `put` is called by any thread, the rest runs in the client's loop."""

    def __init__(
        self,
        bridge: Bridge,
        http: Http,
        path: str,
        partition: int | None,
        name: str,
        *,
        says_partition: bool = False,
    ) -> None:
        """`partition` is None where the server chooses it by the key. Offsets say it then, or if they are to."""
        self._says_partition = says_partition or partition is None
        self._bridge = bridge
        self._http = http
        self._path = path + "/messages"
        self._partition = partition
        self._about = (self._path, partition, False)
        self.name = name
        self._waiting: deque[_Append] = deque()
        self._next_sequence = 0
        self._turn = Lock()
        """Of the sender: the task in the client's loop, or one thread that waits."""
        self._task: asyncio.Task[None] | None = None
        self.is_closed = False
        self.epoch: int | None = None
        """Of a producer whose name others may open, too."""

    def append(
        self, messages: Sequence[Appendable], sync: Sync, timeout: float | str | None, sequence: int | None = None
    ) -> list[int]:
        """As `put`, for a thread that waits: it makes the request by itself where no other append is on its way."""
        one = self._made(messages, sync, timeout, sequence)
        if one.answer.done():
            return one.answer.result()
        self._bridge.check()
        if not self._turn.acquire(blocking=False):
            return waited(self._queued(one))
        try:
            if self._waiting:
                self._waiting.append(one)
            else:
                one = self._numbered(one)
                head, body, seconds = self._request([one])
                at = self._http.at(self._about)
                answer = at.direct.ask(head if at is self._http else at.readdressed(head), body, seconds)
                if answer is not None:
                    return self._offsets(answer, one.messages)
                self._waiting.appendleft(one)  # the same again, with its sequence: it is stored once
        finally:
            self._turn.release()
            if self._waiting:
                self._bridge.soon(self._begin)
        return waited(one.answer)

    def put(
        self, messages: Sequence[Appendable], sync: Sync, timeout: float | str | None, sequence: int | None = None
    ) -> Future[list[int]]:
        """The offsets of these messages, when the server has them."""
        one = self._made(messages, sync, timeout, sequence)
        return one.answer if one.answer.done() else self._queued(one)

    def _queued(self, one: _Append) -> Future[list[int]]:
        self._waiting.append(one)
        self._bridge.soon(self._begin)
        return one.answer

    def _made(
        self, messages: Sequence[Appendable], sync: Sync, timeout: float | str | None, sequence: int | None
    ) -> _Append:
        if sync not in (True, False, SHIPPED):
            raise InputError(f'sync must be True, False or "shipped", not {sync!r}', operation="append")
        seconds = to_seconds(timeout)
        if sequence is not None:
            checked_sequence(sequence, 0, len(messages))
        answer: Future[list[int]] = Future()
        if not messages:
            answer.set_result([])
        return _Append(encode(messages), len(messages), sync, seconds, sequence, answer)

    def begin_after(self, sequence: int | None) -> None:
        """Goes on after the last sequence that is stored."""
        self._next_sequence = 0 if sequence is None else sequence + 1

    def _begin(self) -> None:
        if self._waiting and self._turn.acquire(blocking=False):
            self._task = asyncio.ensure_future(self._send_all())

    async def _send_all(self) -> None:
        taken: list[_Append] = []
        try:
            while self._waiting:
                taken = self._take()
                await self._send(taken)
        except BaseException as error:  # the client is closed, or made a mistake: nobody waits for ever
            why = error if isinstance(error, TidelogError) else ClosedError("the client was closed meanwhile")
            for one in (*taken, *self._waiting):
                _fail(one, why)
            self._waiting.clear()
            raise
        finally:
            self._task = None
            self._turn.release()
            self._begin()  # what came after the last look, while it was this one's turn

    def _take(self) -> list[_Append]:
        """Appends that can share a request, from the first one on."""
        taken = [self._numbered(self._waiting.popleft())]
        size, count = len(taken[0].body), taken[0].messages
        while self._waiting:
            last, after = taken[-1], self._waiting[0]
            size, count = size + len(after.body), count + after.messages
            fits = size <= MAX_BATCH_BYTES and count <= MAX_BATCH_MESSAGES
            assert last.sequence is not None
            follows = after.sequence is None or after.sequence == last.sequence + last.messages
            if not fits or not follows or (after.sync, after.timeout) != (last.sync, last.timeout):
                break
            taken.append(self._numbered(self._waiting.popleft()))
        return taken

    def _numbered(self, one: _Append) -> _Append:
        sequence = self._next_sequence if one.sequence is None else one.sequence
        self._next_sequence = max(self._next_sequence, sequence + one.messages)
        return one._replace(sequence=sequence)

    async def _send(self, taken: list[_Append]) -> None:
        try:
            offsets = await self._post(taken)
        except RetryError as error:
            for one in taken:
                _fail(one, error)
        except TidelogError as error:
            if len(taken) == 1:
                _fail(taken[0], error)
                return
            for one in taken:
                await self._send([one])
        else:
            _answer(taken, offsets)

    def _request(self, taken: list[_Append]) -> tuple[bytes, bytes, float]:
        """Head and body, and how long one attempt waits for its answer."""
        first = taken[0]
        sync = first.sync if isinstance(first.sync, str) else bool(first.sync)
        query = {
            "producer": self.name,
            "epoch": self.epoch,
            "sequence": first.sequence,
            "sync": sync,
            "timeout": None if first.timeout is None else min(first.timeout, _SHIPPED_SECONDS),
            "partition": self._partition,
        }
        body = joined([(one.body, one.messages) for one in taken])
        head = self._http.head("POST", self._path, query, body, MSGPACK, MSGPACK)
        return head, body, _SHIPPED_SECONDS if first.sync == SHIPPED else _ATTEMPT_SECONDS + (first.timeout or 0.0)

    async def _post(self, taken: list[_Append]) -> list[int]:
        head, body, attempt = self._request(taken)
        total = self._http.timeout_seconds + (taken[0].timeout or 0.0)
        answer = await self._http.send(head, body, self._about, timeout=total, attempt=attempt)
        return self._offsets(answer, sum(one.messages for one in taken))

    def _offsets(self, answer: Answer, count: int) -> list[int]:
        try:
            found = decode_appended(answer.body)
        except JSON_ERRORS as error:
            raise DataError(f"the answer of the server does not fit: {error}") from None
        if len(found.offsets) != count or len(found.partitions) != count:
            raise DataError(f"the server answered with {len(found.offsets)} offsets for {count} messages")
        if not self._says_partition:
            return found.offsets
        return [PartitionOffset(offset, number) for offset, number in zip(found.offsets, found.partitions, strict=True)]


def _answer(taken: list[_Append], offsets: list[int]) -> None:
    start = 0
    for one in taken:
        if not one.answer.done():
            one.answer.set_result(offsets[start : start + one.messages])
        start += one.messages


def _fail(one: _Append, error: TidelogError) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)


# The names of a topic and a producer: what is to be sent is described once, as `both` has it for other calls.


class Appends(Protocol):
    """Who sends: a producer of one log, or what chooses among several."""

    def append(
        self, messages: Sequence[Appendable], sync: Sync, timeout: float | str | None, sequence: int | None = None
    ) -> list[int]: ...

    def put(
        self, messages: Sequence[Appendable], sync: Sync, timeout: float | str | None, sequence: int | None = None
    ) -> Future[list[int]]: ...


class Sending(NamedTuple):
    """What an append sends, and by whom."""

    appender: Appends
    messages: Sequence[Appendable]
    sync: Sync
    timeout: float | str | None
    sequence: int | None = None

    def wait(self) -> list[int]:
        """For a thread."""
        return self.appender.append(self.messages, self.sync, self.timeout, self.sequence)

    async def wait_async(self) -> list[int]:
        """For a task."""
        return await asyncio.wrap_future(self.appender.put(self.messages, self.sync, self.timeout, self.sequence))


Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")


def sends_several(
    work: Callable[Concatenate[Owner, Arguments], Sending],
) -> tuple[
    Callable[Concatenate[Owner, Arguments], list[int]],
    Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, list[int]]],
]:
    """The method that blocks and the one that is awaited, made from one that says what is sent; both return offsets."""

    def call(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> list[int]:
        return work(self, *args, **kwargs).wait()

    async def call_async(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> list[int]:
        return await work(self, *args, **kwargs).wait_async()

    return named(call, work, "", "list[int]"), named(call_async, work, "_async", "list[int]")


def sends_one(
    work: Callable[Concatenate[Owner, Arguments], Sending],
) -> tuple[
    Callable[Concatenate[Owner, Arguments], int],
    Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, int]],
]:
    """The same for a message alone, whose offset they return."""

    def call(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        return work(self, *args, **kwargs).wait()[0]

    async def call_async(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        return (await work(self, *args, **kwargs).wait_async())[0]

    return named(call, work, "", "int"), named(call_async, work, "_async", "int")


def new_name() -> str:
    """A producer's name that nobody else has."""
    return f"connect-{secrets.token_hex(12)}"


class RemoteProducer(ClosedAtExit):
    """Made by `topic.producer(name)` of a client. Repeated appends of the same name and sequence are stored once.

    Each name has one live producer: once another client has opened it, this one raises FencedError and stores nothing.
    """

    def __init__(self, bridge: Bridge, http: Http, topic_path: str, partition: int | None, name: str) -> None:
        self._bridge = bridge
        self._http = http
        self._path = f"{topic_path}/producers/{path_of(name).removeprefix('/v1/')}"
        self._partition = partition
        self._appender = Appender(bridge, http, topic_path, partition, name)

    @property
    def name(self) -> str:
        return self._appender.name

    def __repr__(self) -> str:
        return f"<RemoteProducer {self.name}>"

    async def _open(self) -> None:
        found = await self._http.json("POST", self._path, query={"partition": self._partition})
        self._appender.epoch = found["epoch"]
        self._appender.begin_after(found["last_sequence"])

    @property
    def last_sequence(self) -> int | None:
        """The highest sequence that is stored; None before the first. It asks the server."""
        return self._bridge.wait(self._last_sequence())

    async def _last_sequence(self) -> int | None:
        found = await self._http.json("GET", self._path, query={"partition": self._partition})
        last: int | None = found["last_sequence"]
        return last

    last_sequence_async = awaited(_last_sequence)

    def _append(
        self,
        value: bytes | Message | None,
        *,
        sequence: int | None = None,
        key: bytes | None = None,
        headers: HeadersGiven | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> Sending:
        """Appends a message, unless its sequence is stored already; returns its offset, -1 if that is forgotten.

        Without a sequence it gets the one after the last.
        """
        message = checked(value, key, headers, timestamp, deliver_at)
        return Sending(self._open_appender, [message], sync, timeout, sequence)

    def _append_many(
        self,
        messages: Iterable[bytes | Message],
        *,
        sequence: int | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> Sending:
        """Appends messages with consecutive sequences, the first of which is `sequence`; returns their offsets."""
        return Sending(self._open_appender, checked_several(messages), sync, timeout, sequence)

    append, append_async = sends_one(_append)
    append_many, append_many_async = sends_several(_append_many)

    @property
    def _open_appender(self) -> Appender:
        if self._appender.is_closed:
            raise ClosedError(
                f"the producer {self.name!r} is closed",
                hint=Hint("Open it again: topic.producer(name)", "Run it again"),
            )
        return self._appender

    def close(self) -> None:
        """Appends that were begun are finished; new ones raise ClosedError."""
        self._appender.is_closed = True

    async def close_async(self) -> None:
        """Like `close`, without blocking the event loop."""
        self.close()
