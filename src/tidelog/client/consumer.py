"""A consumer in another process than its subscription: messages are pushed over a WebSocket, and settled over it.

    server -> buffer -> receive() ... ack() -> pending -> {"op": "ack", "id": 7, ...} -> {"op": "done", "id": 7}

Invariants
- A lost connection is made again, under the same consumer name, until the consumer is closed or the server refuses it.
  The server delivers again what was not acknowledged: at least once, in order.
- An acknowledgement is kept until the server has confirmed it, and is sent again over the next connection. A message
  that comes again although it was acknowledged meanwhile is not shown, nor one that the program still had in hand and
  acknowledges after its copy arrived (the connection was lost, or the server was started again, in between).
- `close` returns when every acknowledgement is stored: nothing that was acknowledged comes again.
- At most `prefetch` messages are here and not settled. A message counts as delivered when it arrives here, not when
  `receive` returns it: `ack_timeout_seconds` runs from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from tidelog.client.bridge import Bridge, both
from tidelog.client.local_socket import short_path
from tidelog.client.reading import Positions, position_text
from tidelog.client.transport import Answer, Http, LostError, Problem, Server, error_of, unreachable, websockets_client
from tidelog.client.wire import PackedMessage, delivered, encode
from tidelog.clock import jittered
from tidelog.codec import JSON_ERRORS
from tidelog.errors import ClosedError, InputError, RetryError, ServerUnavailableError, TidelogError
from tidelog.log.reader import check_position
from tidelog.topics.message import Message
from tidelog.topics.partitioned import PartitionOffset, message_of_which_partition, offset_of_which_partition
from tidelog.topics.subscription.consumer import (
    Consumer,
    Lag,
    checked_count,
    checked_delay,
    checked_reason,
    checked_timeout,
    offset_of,
)
from tidelog.topics.subscription.feed import Filter, checked_filter
from tidelog.topics.subscription.options import Kind, parse_options
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.subscription.registry import check_names

_logger = logging.getLogger("tidelog.client")
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_PING_SECONDS = 20.0
_OPEN_SECONDS = 20.0
_MAX_FRAME_BYTES = 256 << 20
_BATCH = 500
_MAX_HOPS = 5
Place = tuple[int, int]
"""Partition and offset of a message."""


class _SentOnError(Exception):
    """Another node serves the topic."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location


def _sent_on(error: BaseException) -> str | None:
    """Where the handshake of a WebSocket was sent on to."""
    response = getattr(error, "response", None)
    if response is None or response.status_code != 307:
        return None
    location: str | None = response.headers.get("x-tidelog-location")
    return location


class _Event(msgspec.Struct):
    """What the server says; each `op` uses some of the fields."""

    op: str
    messages: list[tuple[PackedMessage, int]] = []
    id: int | None = None
    problem: Problem | None = None
    consumer: str = ""


_decode = msgspec.msgpack.Decoder(_Event).decode


class RemoteConsumer(Consumer):
    """One consumer of a subscription, over the network; `topic.subscribe` of a client makes it."""

    def __init__(
        self,
        bridge: Bridge,
        http: Http,
        topic: str,
        topic_path: str,
        partitions: int,
        name: str,
        kind: Kind,
        start: Positions,
        consumer: str | None,
        filter: Filter | None,
        options: Mapping[str, object],
        prefetch: int,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers` are sent with every connection, beside those of the client."""
        self._headers = dict(headers or {})
        check_names(name, consumer)
        checked_filter(filter)
        self._partitions = partitions
        self._check_positions("start", start, topic)
        self._bridge = bridge
        self._http = http
        self._name = name
        self._consumer = consumer or f"connect-{secrets.token_hex(6)}"
        self._path = f"{topic_path}/subscriptions/{name}"
        self._accepts = filter if callable(filter) else None
        self._query = _query(kind, start, self._consumer, filter, options, prefetch)
        self._buffer: deque[Delivery] = deque()
        self._pending: deque[Place] = deque()
        self._is_sending_soon = False
        self._unconfirmed: dict[int, dict[str, Any]] = {}
        self._acked: set[Place] = set()
        self._reached: dict[int, int] = {}
        """By partition: the largest offset that arrived."""
        self._copied_below: dict[int, int] = {}
        """What arrives at or below may be a copy of what the program has in hand, from before a lost connection."""
        self._copies: set[Place] = set()
        """Such messages in the buffer."""
        self._withdrawn: set[Place] = set()
        """Those of them that were settled since: `receive` passes over them."""
        self._has_unstored = False
        """Whether something was acknowledged that the server may not have stored yet."""
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._numbers = iter(range(1, 1 << 62))
        self._socket: Any = None
        self._failure: TidelogError | None = None
        self._is_closed = False
        self._changed = asyncio.Event()
        """Set, and replaced, when a waiter should look again."""
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Future[None]] = set()

    # What it is

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self._name

    @property
    def consumer(self) -> str:
        """The name of this consumer of it."""
        return self._consumer

    @property
    def lag(self) -> Lag:
        """The lag of the subscription. It asks the server."""
        return self._bridge.wait(self._ask_lag())

    async def lag_async(self) -> Lag:
        """As `lag`, without blocking the event loop."""
        return await asyncio.wrap_future(self._bridge.start(self._ask_lag()))

    async def _ask_lag(self) -> Lag:
        found = await self._http.json("GET", self._path, query={"age": True})
        ages = [part.get("lag_seconds") or 0.0 for part in found["partitions"]]
        return Lag(found["lag_messages"], max(ages, default=0.0))

    # The connection; in the client's loop

    async def open(self) -> None:
        """Connects; raises what the server refuses it for."""
        deadline = asyncio.get_running_loop().time() + self._http.timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                self._socket = await self._connect()
                break
            except ServerUnavailableError:
                if asyncio.get_running_loop().time() + pause > deadline:
                    raise
                await asyncio.sleep(jittered(pause))
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        """Listens, and connects again whenever the connection is lost."""
        pause = _FIRST_PAUSE_SECONDS
        try:
            while not self._is_closed:
                try:
                    if self._socket is None:
                        self._socket = await self._connect()
                        await self._send_again()
                    pause = _FIRST_PAUSE_SECONDS
                    self._tell()
                    await self._listen(self._socket)
                except RetryError as error:
                    if not self._is_closed:
                        _logger.warning("%s: the connection is lost and made again: %s", self._name, error)
                self._lose()
                if not self._is_closed:
                    await asyncio.sleep(jittered(pause))
                    pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
        except TidelogError as error:
            self._failure = error
        finally:
            self._lose()

    def _lose(self) -> None:
        """What is here and was not shown comes again."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()
        self._buffer.clear()
        self._copies.clear()
        self._withdrawn.clear()
        self._copied_below = dict(self._reached)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ServerUnavailableError("the connection was lost"))
        self._answers.clear()
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _connect(self) -> Any:
        """A WebSocket to the node that serves the topic."""
        at = self._http.first
        for _ in range(_MAX_HOPS):
            try:
                return await self._connect_to(at)
            except _SentOnError as error:
                at, _ = await self._node_at(error.location, at)
            except ServerUnavailableError:
                self._http.pass_over(at)
                raise
        raise ServerUnavailableError("nodes send the consumer to each other", hint="Try again in a moment")

    async def _node_at(self, location: str, said_by: Http) -> tuple[Http, str]:
        try:
            return await self._http.node_at(location, said_by)
        except (LostError, OSError, TimeoutError) as error:
            self._http.pass_over(said_by)
            raise unreachable(error, said_by.server) from None

    async def _connect_to(self, http: Http) -> Any:
        """A WebSocket of which the server has said that the consumer is subscribed."""
        module, server = websockets_client(), http.server
        scheme = "wss" if server.is_tls else "ws"
        uri = f"{scheme}://{server.authority}{server.base}{self._path}/connect?{self._query}"
        options: dict[str, Any] = {
            "additional_headers": http.headers | self._headers,
            "compression": None,
            "max_size": _MAX_FRAME_BYTES,
            "max_queue": 4,
            "ping_interval": _PING_SECONDS,
            "ping_timeout": _PING_SECONDS,
            "open_timeout": _OPEN_SECONDS,
            "close_timeout": 5,
            "user_agent_header": None,
        }
        socket: Any = None
        try:
            if server.socket_path is not None:
                with short_path(server.socket_path) as path:
                    socket = await module.unix_connect(path, uri, **options)
            else:
                socket = await module.connect(uri, ssl=http.tls, proxy=None, **options)
            async with asyncio.timeout(_OPEN_SECONDS):
                await self._hear(socket)
            return socket
        except BaseException as error:
            if socket is not None:
                socket.transport.abort()
            if isinstance(error, TidelogError | asyncio.CancelledError):
                raise
            if (location := _sent_on(error)) is not None:
                raise _SentOnError(location) from None
            raise _told(error, server) from error

    async def _hear(self, socket: Any) -> None:
        event = _parsed(await socket.recv(decode=False))
        if event.op == "error" and event.problem is not None:
            raise _error(event.problem)
        if event.op != "subscribed":
            raise _odd(event.op)

    async def _listen(self, socket: Any) -> None:
        while True:
            try:
                data = await socket.recv(decode=False)
            except Exception as error:
                if socket is not self._socket:
                    return
                raise _told(error, self._http.server) from error
            if socket is not self._socket:
                return  # it was given up meanwhile: what it still had is of before
            self._take(_parsed(data))

    def _take(self, event: _Event) -> None:
        if event.op == "messages":
            self._take_messages(delivered(event.messages))
        elif event.op in ("done", "closed", "error"):
            self._take_answer(event)

    def _take_messages(self, messages: list[Delivery]) -> None:
        if self._acked or self._pending:
            known = self._acked.union(list(self._pending))
            messages = [one for one in messages if (one.partition, one.offset) not in known]
        if self._accepts is not None:
            looked_at = [(one, self._accepts(one)) for one in messages]
            self._pending.extend((one.partition, one.offset) for one, is_wanted in looked_at if not is_wanted)
            messages = [one for one, is_wanted in looked_at if is_wanted]
            self._send_acks()
        self._note_copies(messages)
        self._buffer.extend(messages)
        self._tell()

    def _note_copies(self, messages: list[Delivery]) -> None:
        reached, copied_below = self._reached, self._copied_below
        for one in messages:
            if one.offset > reached.get(one.partition, -1):
                reached[one.partition] = one.offset
            if copied_below and one.offset <= copied_below.get(one.partition, -1):
                self._copies.add((one.partition, one.offset))

    def _withdraw(self, places: Iterable[Place]) -> None:
        """What is settled is not shown again, if a copy of it is here."""
        if self._copies:
            self._withdrawn.update(self._copies.intersection(places))

    def _take_answer(self, event: _Event) -> None:
        if event.id is None:
            if event.problem is not None:
                raise _error(event.problem)
            return
        if event.op == "closed":
            self._is_closed = True
        op = self._unconfirmed.pop(event.id, None)
        if op is not None:
            self._acked.difference_update(op["messages"])
            if event.problem is not None:
                _logger.warning("%s: an acknowledgement was refused: %s", self._name, event.problem.detail)
            self._tell()
        answer = self._answers.pop(event.id, None)
        if answer is not None and not answer.done():
            answer.set_result(None) if event.problem is None else answer.set_exception(_error(event.problem))

    # Sending; in the client's loop

    def _send_acks(self) -> None:
        """Everything that was acknowledged since, in one message."""
        self._is_sending_soon = False
        places: list[Place] = []
        while self._pending:
            places.append(self._pending.popleft())
        if not places:
            return
        number = next(self._numbers)
        op = {"op": "ack", "id": number, "messages": places}
        self._unconfirmed[number] = op
        self._has_unstored = True
        self._acked.update(places)
        if self._socket is not None:
            self._spawn(self._say(op))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _say(self, op: Mapping[str, Any]) -> None:
        """Sends, if there is a connection; a lost one is noticed by the listener."""
        socket = self._socket
        if socket is not None:
            with contextlib.suppress(Exception):
                await socket.send(encode(op))

    async def _send_again(self) -> None:
        for op in list(self._unconfirmed.values()):
            await self._say(op)

    async def _request(self, op: dict[str, Any]) -> None:
        """Has something done by the server, over as many connections as it takes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._http.timeout_seconds
        self._send_acks()
        while True:
            self._check()
            if self._socket is not None:
                number = next(self._numbers)
                answer = self._answers[number] = loop.create_future()
                await self._say({**op, "id": number})
                try:
                    async with asyncio.timeout_at(deadline):
                        await answer
                    return
                except (ServerUnavailableError, TimeoutError):
                    pass
                finally:
                    self._answers.pop(number, None)
            if loop.time() >= deadline:
                raise ServerUnavailableError(
                    f"the server at {self._http.server.url} gave no answer",
                    hint="What was acknowledged last may come again",
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()

    def _place(self, message: Message | int) -> Place:
        if self._partitions > 1 and not isinstance(message, Message | PartitionOffset):
            raise message_of_which_partition(message)
        given = int(message) if isinstance(message, PartitionOffset) else message
        return getattr(message, "partition", 0), offset_of(given)

    def _check_positions(self, name: str, given: Positions, of: str) -> None:
        if self._partitions > 1 and isinstance(given, int):
            raise offset_of_which_partition(of, self._partitions, name, given)
        for one in given.values() if isinstance(given, Mapping) else (given,):
            check_position(one)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise ClosedError(f"this consumer of {self._name} is closed", hint="Subscribe again")

    # Receiving

    async def _wait(self, count: int, timeout: float | None) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            changed = self._changed
            if taken := self._taken(count):
                return taken
            self._check()
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return self._taken(count)

    def _taken(self, count: int) -> list[Delivery]:
        taken: list[Delivery] = []
        with contextlib.suppress(IndexError):  # several threads may take
            while len(taken) < count:
                message = self._buffer.popleft()
                if self._copies and not self._is_shown(message):
                    continue
                taken.append(message)
        return taken

    def _is_shown(self, message: Delivery) -> bool:
        place = (message.partition, message.offset)
        self._copies.discard(place)
        if place not in self._withdrawn:
            return True
        self._withdrawn.discard(place)
        return False

    def _receive_now(self, count: int, timeout: float | str | None) -> tuple[list[Delivery], float | None]:
        seconds = checked_timeout(timeout)
        if self._failure is None and not self._is_closed:
            return self._taken(count), seconds
        return [], seconds

    def receive(self, timeout: float | str | None = None) -> Delivery | None:
        """Waits for the next message and returns it; returns None after `timeout` seconds."""
        taken, seconds = self._receive_now(1, timeout)
        taken = taken or self._bridge.wait(self._wait(1, seconds))
        return taken[0] if taken else None

    def receive_many(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        """Returns up to `max_messages`, as soon as there is at least one; an empty list after `timeout` seconds."""
        taken, seconds = self._receive_now(checked_count(max_messages), timeout)
        return taken or self._bridge.wait(self._wait(max_messages, seconds))

    async def receive_async(self, timeout: float | str | None = None) -> Delivery | None:
        """Like `receive`, without blocking the event loop."""
        taken = await self.receive_many_async(1, timeout)
        return taken[0] if taken else None

    async def receive_many_async(self, max_messages: int, timeout: float | str | None = None) -> list[Delivery]:
        """Like `receive_many`, without blocking the event loop."""
        taken, seconds = self._receive_now(checked_count(max_messages), timeout)
        return taken or await asyncio.wrap_future(self._bridge.start(self._wait(max_messages, seconds)))

    def __iter__(self) -> Iterator[Delivery]:
        """Messages as they come, until the consumer or the client is closed."""
        try:
            while True:
                message = self.receive()
                if message is not None:
                    yield message
        except ClosedError:
            return

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        try:
            while True:
                message = await self.receive_async()
                if message is not None:
                    yield message
        except ClosedError:
            return

    # Settling

    def ack(self, message: Message | int) -> None:
        """Acknowledges a message (or the one with this offset). It is sent at once, and confirmed by `flush` or
        `close`; whatever the connection does meanwhile, it is not lost while this process lives."""
        self.ack_many((message,))

    def ack_many(self, messages: Iterable[Message | int]) -> None:
        """Acknowledges several messages."""
        self._check()
        places = [self._place(message) for message in messages]
        self._withdraw(places)
        self._pending.extend(places)
        if not self._is_sending_soon:
            self._is_sending_soon = True
            self._bridge.soon(self._send_acks)

    async def _ack_cumulative(self, message: Message | int) -> None:
        """Acknowledges this message and all before it; for the kinds exclusive and failover only."""
        self._has_unstored = True
        number, offset = self._place(message)
        await self._request({"op": "ack", "cumulative": [(number, offset)]})
        self._withdraw([place for place in list(self._copies) if place[0] == number and place[1] <= offset])

    async def _nack(
        self, message: Message | int, delay: float | str | None = None, *, reason: str | None = None
    ) -> None:
        """Requests redelivery of a message, after `delay` seconds or the delay set in the options; `reason` is kept
        with its dead letter."""
        place = self._place(message)
        await self._request(
            {
                "op": "nack",
                "messages": [place],
                "delay": checked_delay(delay),
                "reason": checked_reason(reason),
            }
        )
        self._withdraw([place])

    ack_cumulative, ack_cumulative_async = both(_ack_cumulative)
    nack, nack_async = both(_nack)

    async def ack_async(self, message: Message | int) -> None:
        """Like `ack`."""
        self.ack_many((message,))

    async def ack_many_async(self, messages: Iterable[Message | int]) -> None:
        """Like `ack_many`."""
        self.ack_many(messages)

    # Moving and ending

    async def _seek(self, position: Positions) -> None:
        """Moves the subscription, for all its consumers: delivery resumes at `position`."""
        self._check_positions("position", position, self._name)
        self._send_acks()
        document = (
            {"offsets": {str(number): offset for number, offset in position.items()}}
            if isinstance(position, Mapping)
            else {"position": position_text(position)}
        )
        await self._http.json("POST", f"{self._path}/seek", document)
        self._unconfirmed.clear()
        self._acked.clear()
        self._lose()  # what is on its way is of before; the next connection begins there

    async def _flush(self) -> None:
        """Stores the position now: messages acknowledged so far are not redelivered after a crash of any side."""
        self._send_acks()
        self._has_unstored = False
        try:
            await self._request({"op": "flush"})
        except BaseException:
            self._has_unstored = True
            raise

    async def _confirm(self) -> None:
        """In the client's loop: returns when the server has every acknowledgement so far, over as many connections as
        it takes."""
        self._send_acks()
        wanted = set(self._unconfirmed)
        while wanted & self._unconfirmed.keys():
            self._check()
            await self._changed.wait()

    async def _close(self) -> None:
        """Leaves: unacknowledged messages go to other consumers. Returns when what was acknowledged is stored."""
        if self._is_closed:
            return
        try:
            self._send_acks()
            if self._failure is None and (self._has_unstored or self._socket is not None):
                await self._request({"op": "close"})
        except ServerUnavailableError:
            if self._has_unstored:
                raise
        finally:
            self._is_closed = True
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            self._lose()

    async def _unsubscribe(self) -> None:
        """Leaves and deletes the subscription; ConflictError while it has other consumers."""
        await self._close()
        await self._http.json("DELETE", self._path)

    seek, seek_async = both(_seek)
    flush, flush_async = both(_flush)
    close, close_async = both(_close)
    unsubscribe, unsubscribe_async = both(_unsubscribe)


def _query(
    kind: Kind,
    start: Positions,
    consumer: str,
    filter: Filter | None,
    options: Mapping[str, object],
    prefetch: int,
) -> str:
    parsed = parse_options({"kind": kind, **options})
    given: dict[str, object] = {name: getattr(parsed, name) for name, value in options.items() if value is not None}
    if isinstance(filter, Mapping):
        given["filter"] = {name: _filter_text(value) for name, value in filter.items()}
    query: dict[str, object] = {"kind": kind, "consumer": consumer, "format": "msgpack"}
    if isinstance(start, Mapping):
        given["start"] = {str(number): offset for number, offset in start.items()}
    else:
        query["start"] = position_text(start)
    query |= {"window": prefetch, "limit": min(prefetch, _BATCH)}
    if given:
        query["options"] = msgspec.json.encode(given).decode()
    return urlencode(query)


def _filter_text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("a filter of a remote subscription maps headers to UTF-8") from None


def _parsed(data: bytes) -> _Event:
    try:
        return _decode(data)
    except JSON_ERRORS as error:
        raise _odd(str(error)) from None


def _odd(what: str) -> ServerUnavailableError:
    return ServerUnavailableError(f"the server does not speak as expected: {what[:200]}")


def _error(problem: Problem) -> TidelogError:
    """A topic that is closed in the server may be open again when the server is back."""
    error = problem.as_error()
    if isinstance(error, ClosedError) and problem.status == 503:
        return ServerUnavailableError(problem.detail, hint=problem.hint)
    return error


def _told(error: BaseException, server: Server) -> TidelogError:
    """What became of a connection, as an error of ours."""
    response = getattr(error, "response", None)
    if response is not None:
        media_type = response.headers.get("content-type", "").partition(";")[0]
        return error_of(Answer(response.status_code, media_type, bytes(response.body or b"")))
    return unreachable(error, server)
