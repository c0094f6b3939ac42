"""The listener of Kafka's protocol: connections, requests in their order, answers in the same order.

    bytes -> frames ([i32 size][size bytes]) -> one request after the other -> handlers -> answers, in order

Invariants
- Requests of a connection are begun in the order in which they came, one at a time; answers go out in that order. Only
  Produce has a second step, the wait for the disk, that runs beside the requests after it.
- A request is begun as it arrives. A task is made only for what has to wait, and for the requests behind it.
- Bytes are hostile. A frame that is too large, cut, or no request of the protocol closes its connection and no other.
  No frame takes memory before its bytes arrive, beyond a first small piece.
- A client that does not read its answers is not read from: at most `_MAX_PENDING` answers wait for it, and requests
  until they have `_MAX_QUEUED_BYTES`.
- A client beyond its quota is answered, and then not read from for as long as the answer says.
- Stopping lets the requests that were begun finish, within a limit, and refuses new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

import msgspec

from tidelog.clock import Histogram, Stopwatch
from tidelog.events import tell
from tidelog.service.auth.access import Kind, NotAuthenticatedError, Permission
from tidelog.service.auth.security import Security
from tidelog.service.kafka.authorization import RULES, Access, Decision
from tidelog.service.kafka.broker import Broker
from tidelog.service.kafka.codec import (
    API_VERSIONS,
    APIS,
    RequestHeader,
    UnsupportedVersionError,
    api_versions,
    decode_header,
    decode_request,
    encode_fallback,
    encode_response,
    gather_response,
)
from tidelog.service.kafka.fetch import FETCH, Fetch
from tidelog.service.kafka.groups.share_fetch import SHARE_FETCH
from tidelog.service.kafka.history import History
from tidelog.service.kafka.metadata import Metadata
from tidelog.service.kafka.offsets import Offsets
from tidelog.service.kafka.primitives import Buffer, ProtocolError
from tidelog.service.kafka.produce import PRODUCE, LaterAnswer, Lookup, PendingProduce, Produce, Verify
from tidelog.service.kafka.produce_runs import ProduceRuns
from tidelog.service.kafka.quotas import FETCH_RATE, PRODUCE_RATE, ClientQuotas
from tidelog.service.kafka.requests import Handler, RequestContext
from tidelog.service.kafka.session import SASL_AUTHENTICATE, SASL_HANDSHAKE, ClientSession
from tidelog.service.unread import UnreadWatch
from tidelog.tracing import TRACING, record_span

_logger = logging.getLogger("tidelog.kafka")
_SIZE = struct.Struct(">i")
_SIZE_AND_KEY = struct.Struct(">ih")
_RECEIVE_BYTES = 256 << 10
_FIRST_PIECE_BYTES = 64 << 10
_MAX_PENDING = 100
_MAX_QUEUED_FRAMES = 100
_MAX_QUEUED_BYTES = 8 << 20
_STOP_SECONDS = 10.0
_AUTHENTICATION_SECONDS = 30.0
_TLS_SECONDS = 15.0
_LONGEST_ERROR = 300
_GATHERED_BYTES = 64 << 10
_WITH_RECORDS = (FETCH, SHARE_FETCH)

Answer = list[Buffer] | Buffer | None
_ALLOWED = Decision()


class KafkaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the listener."""

    connections: int
    received_bytes: int
    sent_bytes: int
    cut_clients: int
    """Connections that were cut because their client read nothing."""
    request_seconds: Mapping[str, Histogram]
    """By API."""


class KafkaServer:
    """Listens on an address, and serves a broker's topics to any number of clients."""

    def __init__(self, broker: Broker, security: Security | None = None) -> None:
        """Without `security` everybody may do everything."""
        self._broker = broker
        self.security = security or Security()
        self.security.on_change(self._end_revoked)
        self._produce = Produce(broker)
        self._runs = ProduceRuns(broker, self._produce, self.took)
        history = History(broker)
        self._handlers: dict[int, Handler] = {FETCH: Fetch(broker, history).handle, API_VERSIONS: self._api_versions}
        self._handlers |= Metadata(broker, history).handlers()
        self._handlers |= Offsets(broker).handlers()
        self._connections: set[Connection] = set()
        self._by_host: Counter[str] = Counter()
        self.receive_view = memoryview(bytearray(_RECEIVE_BYTES))
        """What is received goes here first, for all connections: what is left of it belongs to one at once."""
        self._server: asyncio.Server | None = None
        self._is_stopping = False
        self._request_seconds: dict[int, Stopwatch] = {}
        self._received_bytes = 0
        self.sent_bytes = 0
        self.cut_clients = 0
        self.quotas: ClientQuotas | None = None
        """What clients may send and get; without it, anything."""

    def add(self, handlers: dict[int, Handler]) -> None:
        """Serves further APIs. Before `start`."""
        self._handlers |= handlers

    def verify_with(self, verify: Verify, lookup: Lookup | None = None) -> None:
        """Accepts transactional batches that this approves; `lookup` is asked before it. Before `start`."""
        self._produce.verify, self._produce.lookup = verify, lookup

    async def _api_versions(self, context: RequestContext, request: Any) -> Any:
        return api_versions(self.served)

    @property
    def served(self) -> list[int]:
        """The keys of the APIs that are answered."""
        sasl = (SASL_HANDSHAKE, SASL_AUTHENTICATE) if self.security.is_required else ()
        return sorted({PRODUCE, *self._handlers, *sasl})

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listens; returns the address, with the port that was chosen where `port` is 0."""
        loop = asyncio.get_running_loop()
        tls = self.security.ssl_context
        tls_seconds = None if tls is None else _TLS_SECONDS
        self._server = await loop.create_server(
            lambda: Connection(self), host, port, backlog=1024, ssl=tls, ssl_handshake_timeout=tls_seconds
        )
        found = self._server.sockets[0].getsockname()
        return found[0], found[1]

    async def stop(self) -> None:
        """Accepts nothing more, and ends when the requests that were begun are answered, or the time is up."""
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.stop()
        if connections:
            ended = [connection.ended for connection in connections]
            await asyncio.wait(ended, timeout=_STOP_SECONDS)
        for connection in list(self._connections):
            connection.abort("the server stops")
        if self._server is not None:
            await self._server.wait_closed()

    def statistics(self) -> KafkaStatistics:
        """An immutable snapshot."""
        taken = {_title(key): watch.snapshot() for key, watch in sorted(self._request_seconds.items())}
        return KafkaStatistics(
            connections=len(self._connections),
            received_bytes=self._received_bytes + self._runs.received_bytes,
            sent_bytes=self.sent_bytes,
            cut_clients=self.cut_clients,
            request_seconds=taken,
        )

    def took(self, api_key: int, began: float, count: int = 1) -> None:
        """Requests were handled that began then: Fetch with its wait for messages, Produce with that for the disk."""
        watch = self._request_seconds.get(api_key)
        if watch is None:
            watch = self._request_seconds[api_key] = Stopwatch()
        seconds = time.perf_counter() - began
        watch.add(seconds, count)
        if TRACING.is_on:
            record_span(f"kafka {_title(api_key)}", seconds, {"tidelog.requests": count})

    # For connections

    @property
    def settings(self) -> Any:
        return self._broker.settings

    def opened(self, connection: Connection, host: str) -> bool:
        """Whether there is room for one more connection."""
        most_of_host = self.settings.max_connections_per_address or self.settings.max_connections
        is_full = len(self._connections) >= self.settings.max_connections or self._by_host[host] >= most_of_host
        if self._is_stopping or is_full:
            return False
        self._connections.add(connection)
        self._by_host[host] += 1
        return True

    def cut(self) -> None:
        self.cut_clients += 1

    def closed(self, connection: Connection, host: str) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    @property
    def asks_nobody(self) -> bool:
        """Whether everybody may do everything, as often as they like."""
        quotas = self.quotas
        return not self.security.is_required and (quotas is None or not quotas.is_needed)

    def gather(self, connection: Connection, data: bytes) -> None:
        """Bytes of a connection that begin with a Produce request."""
        self._runs.add(connection, data)

    def _end_revoked(self) -> None:
        """Closes the connections of users that were removed, and of passwords that were changed."""
        for connection in list(self._connections):
            connection.end_if_revoked()

    def begin(self, session: ClientSession, frame: Buffer, mute: Callable[[float], None]) -> Begun:
        """Handles a request: its answer, or what has still to be waited for. `mute` is called with the seconds that the
        client has to wait after it."""
        self._received_bytes += len(frame)
        if session.takes_bare_messages:
            return session.bare_message(frame)
        try:
            header = decode_header(frame)
            session.check(header.api_key)
            request = decode_request(header, frame)
        except UnsupportedVersionError as error:
            if error.header.api_key == API_VERSIONS:
                return encode_fallback(error.header)
            raise
        name = str(session.principal)
        context = RequestContext(header.api_key, header.api_version, header.client_id, session.host, name, session)
        if not self.security.is_required:
            return self._begin_allowed(header, context, request, len(frame), mute, _ALLOWED)
        if header.api_key in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
            answer = session.handshake if header.api_key == SASL_HANDSHAKE else session.authenticate
            return self._handle(answer, header, context, request, mute, _ALLOWED)
        decision = self._decide(session, context, request)
        if decision.response is not None:
            has_no_answer = header.api_key == PRODUCE and request.acks == 0
            return None if has_no_answer else encode(header, decision.response)
        return self._begin_allowed(header, context, request, len(frame), mute, decision)

    def _begin_allowed(
        self,
        header: RequestHeader,
        context: RequestContext,
        request: Any,
        size: int,
        mute: Callable[[float], None],
        decision: Decision,
    ) -> Begun:
        """A request, or what is left of it without what its client may not do."""
        if header.api_key == PRODUCE:
            pending = self._produce.begin(context, request)
            if decision.amend is not None:
                decision.amend(pending.response)
            pending.response.throttle_time_ms = self._throttled(PRODUCE_RATE, context, size, mute)
            later = ProduceAnswer(header, pending, self.took)
            return self._append_later(later) if pending.later else later
        handler = self._handlers.get(header.api_key)
        if handler is None:
            raise ProtocolError(f"{APIS[header.api_key].name} is not served")
        return self._handle(handler, header, context, request, mute, decision)

    def _decide(self, session: ClientSession, context: RequestContext, request: Any) -> Decision:
        rule = RULES.get(context.api_key)
        if rule is None:
            raise ProtocolError(f"{APIS[context.api_key].name} has no rule for who may send it")
        if rule.decide is None:
            return _ALLOWED
        security, principal, name = self.security, session.principal, APIS[context.api_key].name
        access = Access(
            self._broker,
            lambda permission, resource: security.allows(principal, name, permission, resource, session.host),
            lambda: security.allows_any(principal, Permission.WRITE, Kind.TOPIC),
        )
        return rule.decide(access, context, request)

    async def _append_later(self, answer: ProduceAnswer) -> LaterAnswer:
        await self._produce.append_later(answer.pending)
        return answer

    async def _handle(
        self,
        handler: Handler,
        header: RequestHeader,
        context: RequestContext,
        request: Any,
        mute: Callable[[float], None],
        decision: Decision,
    ) -> Answer:
        began = time.perf_counter()
        response = await handler(context, request)
        self.took(header.api_key, began)
        if decision.amend is not None:
            decision.amend(response)
        if header.api_key == FETCH and self.quotas is not None and self.quotas.is_needed:
            response.throttle_time_ms = self._throttled(FETCH_RATE, context, _record_bytes(response), mute)
        return encode(header, response)

    def _throttled(self, key: str, context: RequestContext, size: int, mute: Callable[[float], None]) -> int:
        """How many ms the client has to wait for a request of so many bytes."""
        if self.quotas is None or not self.quotas.is_needed:
            return 0
        seconds = self.quotas.used(key, context.client_id, size)
        if seconds:
            mute(seconds)
        return round(seconds * 1000)


def _title(api_key: int) -> str:
    """The name of an API as Kafka's documentation writes it: FindCoordinator."""
    return APIS[api_key].name.title().replace("_", "")


class ProduceAnswer(LaterAnswer):
    """The answer to a Produce that was begun by itself."""

    __slots__ = ("_began", "_header", "_took", "pending")

    def __init__(self, header: RequestHeader, pending: PendingProduce, took: Callable[[int, float], None]) -> None:
        self._header = header
        self._began = time.perf_counter()
        self._took = took
        self.pending = pending

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        return self.pending.is_done

    def encode(self) -> Buffer | None:
        self._took(self._header.api_key, self._began)
        answer = self.pending.answer
        return None if answer is None else encode_response(self._header, answer)


Begun = Answer | LaterAnswer | Coroutine[Any, Any, Answer | LaterAnswer]


def _record_bytes(response: Any) -> int:
    """How many bytes of records an answer to Fetch has."""
    partitions = (partition for topic in response.responses for partition in topic.partitions)
    return sum(len(part) for partition in partitions for part in partition.records or ())


def encode(header: RequestHeader, response: Any) -> Answer:
    """The bytes of an answer; None when there is to be none."""
    if response is None:
        return None
    return gather_response(header, response) if header.api_key in _WITH_RECORDS else encode_response(header, response)


class Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, server: KafkaServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._host = ""
        self._session = cast(ClientSession, None)
        self._connected_at = self._loop.time()
        self._begun = b""
        """The first bytes of a size."""
        self._frame: bytearray | None = None
        """The frame that is being received, `_filled` of `_size` bytes of it."""
        self._filled = 0
        self._size = 0
        self._frames: deque[Buffer] = deque()
        self._queued_bytes = 0
        self._is_reading = True
        self._worker: asyncio.Task[None] | None = None
        self._answers: deque[Answer | LaterAnswer] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._is_stopping = False
        self._mute_seconds = 0.0
        self._unmuted = asyncio.Event()
        """Set when the server stops, which waits for no quota."""
        self._last_request_at = self._loop.time()
        self._idle: asyncio.TimerHandle | None = None
        self._unread = cast(UnreadWatch, None)

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        seconds = self._server.settings.unread_seconds
        self._unread = UnreadWatch(self._loop, self._transport, seconds, self._server.cut)
        peer = self._transport.get_extra_info("peername")
        self._host = peer[0] if isinstance(peer, tuple) else ""
        secured = self._transport.get_extra_info("ssl_object")
        try:
            certificate = None if secured is None else secured.getpeercert(binary_form=True)
            self._session = ClientSession(self._server.security, self._host, certificate)
        except NotAuthenticatedError as error:
            self.abort(error.message)
            return
        if not self._server.opened(self, self._host):
            self.abort("too many connections")
            return
        self._watch_idle()

    def connection_lost(self, error: Exception | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is not None:
            self._worker.cancel()
        # A Produce that was begun is appended whether or not its client hears of it.
        for answer in self._answers:
            if isinstance(answer, ProduceAnswer):
                answer.pending.answered = None
        self._answers.clear()
        self._frames.clear()
        self._room.set()
        self._can_write.set()
        self._unread.resume()
        self._server.closed(self, self._host)
        if not self.ended.done():
            self.ended.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is None:
            return self._server.receive_view
        if self._filled == len(self._frame):
            # Memory is taken as bytes arrive: a size alone costs nothing.
            self._frame.extend(bytes(min(self._size, 4 * self._filled) - self._filled))
        return memoryview(self._frame)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._frame is None:
                received = self._server.receive_view[:nbytes]
                if nbytes <= _GATHERED_BYTES and self._begins_with_produce(received):
                    self._last_request_at = self._loop.time()
                    self._server.gather(self, bytes(received))
                else:
                    self._cut_frames(received)
                return
            self._filled += nbytes
            if self._filled == self._size:
                frame, self._frame = self._frame, None
                self._received(frame)
        except ProtocolError as error:
            self.abort(error.message)

    def _begins_with_produce(self, received: memoryview) -> bool:
        """Whether these bytes begin with a whole Produce request that is looked at together with others."""
        if self._begun or len(received) < _SIZE_AND_KEY.size:
            return False
        size, api_key = _SIZE_AND_KEY.unpack_from(received)
        return api_key == PRODUCE and size <= len(received) - _SIZE.size and self._server.asks_nobody

    def takes_at_once(self, count: int) -> bool:
        is_idle = self._worker is None and self._frame is None and not self._begun and not self._is_stopping
        return is_idle and self._may_begin and len(self._answers) + count <= _MAX_PENDING

    def feed(self, data: bytes) -> None:
        """Begins the requests in bytes that were received."""
        if self._transport.is_closing():
            return
        try:
            self._cut_frames(data)
        except ProtocolError as error:
            self.abort(error.message)

    def _cut_frames(self, data: Buffer) -> None:
        """Takes the whole frames out of what was received; the rest is the beginning of the next one."""
        if self._begun:
            data, self._begun = self._begun + data, b""
        at, end = 0, len(data)
        while end - at >= _SIZE.size:
            size = _SIZE.unpack_from(data, at)[0]
            limit = self._session.max_request_bytes(self._server.settings.max_request_bytes)
            if not 0 < size <= limit and not (size == 0 and self._session.takes_bare_messages):
                raise ProtocolError(f"a request must have 1 to {limit} bytes, not {size}")
            at += _SIZE.size
            if end - at < size:
                self._begin_frame(size, data[at:])
                return
            self._received(bytes(data[at : at + size]))
            at += size
        self._begun = bytes(data[at:])

    def _begin_frame(self, size: int, there: Buffer) -> None:
        self._frame = bytearray(min(size, max(4 * len(there), _FIRST_PIECE_BYTES)))
        self._frame[: len(there)] = there
        self._filled, self._size = len(there), size

    def _received(self, frame: Buffer) -> None:
        self._last_request_at = self._loop.time()
        if self._is_stopping:
            return
        if self._worker is None and self._may_begin:
            self._begin(frame)
            return
        self._frames.append(frame)
        self._queued_bytes += len(frame)
        if self._worker is None:
            self._worker = self._loop.create_task(self._work(None))
        is_full = len(self._frames) >= _MAX_QUEUED_FRAMES or self._queued_bytes >= _MAX_QUEUED_BYTES
        if is_full and self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    def _read_on_if_room(self) -> None:
        has_room = len(self._frames) < _MAX_QUEUED_FRAMES // 2 and self._queued_bytes < _MAX_QUEUED_BYTES // 2
        if has_room and not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._can_write.clear()
        self._unread.pause()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._unread.resume()

    # Requests

    @property
    def _may_begin(self) -> bool:
        """Whether the client reads its answers."""
        return self._room.is_set() and self._can_write.is_set()

    def _begin(self, frame: Buffer) -> None:
        """Begins a request that no other one is before; what has to wait becomes a task."""
        try:
            begun = self._server.begin(self._session, frame, self._mute)
        except ProtocolError:
            raise
        except Exception as error:
            _logger.exception("a request of %s failed", self._host)
            raise ProtocolError("an internal error") from error
        if isinstance(begun, Coroutine):
            self._worker = self._loop.create_task(self._work(begun))
            return
        self.queue(begun)
        if self._mute_seconds:
            self._worker = self._loop.create_task(self._work(None))

    async def _work(self, begun: Coroutine[Any, Any, Answer | LaterAnswer] | None) -> None:
        """Finishes a request that was begun; then begins one after the other, until there is none."""
        try:
            await self._finish(begun)
            while self._frames:
                frame = self._frames.popleft()
                self._queued_bytes -= len(frame)
                self._read_on_if_room()
                await self._room.wait()
                await self._can_write.wait()
                if self._transport.is_closing():
                    return
                await self._finish(self._server.begin(self._session, frame, self._mute))
        except ProtocolError as error:
            self.abort(error.message)
        except asyncio.CancelledError:
            raise
        except Exception:
            _logger.exception("a request of %s failed", self._host)
            self.abort("an internal error")
        finally:
            self._worker = None
            self._end_if_done()

    async def _finish(self, begun: Begun) -> None:
        answer = await begun if isinstance(begun, Coroutine) else begun
        if answer is not None:
            self.queue(answer)
        if self._session.is_over:
            self.stop()
        if self._mute_seconds:
            await self._wait_muted()

    def _mute(self, seconds: float) -> None:
        self._mute_seconds = seconds

    async def _wait_muted(self) -> None:
        """The client is beyond its quota: nothing more is read from it for a while."""
        seconds, self._mute_seconds = self._mute_seconds, 0.0
        if self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._unmuted.wait()
        self._read_on_if_room()

    def queue(self, answer: Answer | LaterAnswer) -> None:
        if self._transport.is_closing():
            return
        self._answers.append(answer)
        if len(self._answers) >= _MAX_PENDING:
            self._room.clear()
        if isinstance(answer, LaterAnswer) and not answer.is_done:
            if isinstance(answer, ProduceAnswer):
                answer.pending.answered = self.answered
        elif len(self._answers) == 1:
            self._send()

    def queue_later(self, answer: LaterAnswer) -> None:
        self._answers.append(answer)
        if len(self._answers) >= _MAX_PENDING:
            self._room.clear()

    def answered(self) -> None:
        """Sends the answers that are complete."""
        first = self._answers[0] if self._answers else None
        if isinstance(first, LaterAnswer) and first.is_done:
            self._send()

    def _send(self) -> None:
        """Writes the answers that are there, up to the first that is not."""
        ready: list[Buffer] = []
        while self._answers:
            answer = self._answers[0]
            if isinstance(answer, LaterAnswer):
                if not answer.is_done:
                    break
                answer = answer.encode()
            self._answers.popleft()
            if isinstance(answer, list):
                ready += answer
            elif answer is not None:
                ready.append(answer)
        if len(self._answers) < _MAX_PENDING:
            self._room.set()
        if ready and not self._transport.is_closing():
            self._server.sent_bytes += sum(map(len, ready))
            self._transport.writelines(ready)
        self._end_if_done()

    # Ending

    def _watch_idle(self) -> None:
        left = self._last_request_at + self._server.settings.idle_seconds - self._loop.time()
        if not self._session.is_authenticated:
            left = min(left, self._connected_at + _AUTHENTICATION_SECONDS - self._loop.time())
            if left <= 0:
                self.abort("the client has not authenticated in time")
                return
        if left <= 0 and not self._answers and self._worker is None:
            self._transport.close()
            return
        self._idle = self._loop.call_later(max(left, 1.0), self._watch_idle)

    def end_if_revoked(self) -> None:
        """Closes the connection if the credential of its client counts no more."""
        if not self._session.is_current:
            self.abort("the credential of the client was changed or revoked")

    def stop(self) -> None:
        """Reads no further requests; the connection closes when those that were begun are answered."""
        self._is_stopping = True
        self._frames.clear()
        self._queued_bytes = 0
        self._unmuted.set()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_stopping and not self._answers and self._worker is None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Closes the connection at once."""
        tell(_logger, "kafka_connection_closed", client=self._host, reason=reason[:_LONGEST_ERROR])
        self._transport.abort()
