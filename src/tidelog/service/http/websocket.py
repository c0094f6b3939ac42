"""A consumer over a WebSocket: messages are pushed in batches, and settled by messages the other way.

    client -> server                                          server -> client
                                                              {"op": "subscribed", "consumer": "c1"}
                                                              {"op": "messages", "messages": [...]}
    {"op": "ack", "messages": [[0, 7], [0, 8]]}
    {"op": "nack", "messages": [[0, 9]], "reason": "why"}
    {"op": "flush", "id": 1}                                  {"op": "done", "id": 1}
    {"op": "close"}                                           {"op": "closed"}, and the connection ends
                                                              {"op": "error", "id": 1, "problem": {...}}

Invariants
- The connection is the lease: while it lives, a handler may take any time; when it is lost, its messages go to others.
  Pings find out within 40 s that a client has vanished without a word.
- At most `window` messages are with the client and not settled; more are sent as it settles them.
- Messages of the client are carried out in their order. With an `id` each is answered, `done` or `error`.
- `closed` is sent when every acknowledgement is stored.
- With `format=msgpack` both sides send msgpack in binary frames: delivered messages are [message, delivery count], the
  message an array as everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any, Literal

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import ClosedError, ConflictError, InputError, TidelogError
from tidelog.service.auth.access import Kind, Permission
from tidelog.service.http.call import Call, DisconnectedError, Socket, without_values
from tidelog.service.http.message_json import ReadEncoding
from tidelog.service.http.problems import HttpError, Problem, problem_of
from tidelog.service.http.routes import RouteTable
from tidelog.service.http.sessions import Session, Settled, Subscribe
from tidelog.service.http.spread.consumer import SpreadConsumer
from tidelog.service.http.subscriptions import Ack, delivered, open_session, received_json, settle
from tidelog.topics.subscription.options import Kind as SubscriptionKind

routes = RouteTable("Subscriptions")
_LOOK_SECONDS = 1.0
_Id = int | str | None


class ConnectQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The consumer, and how it gets its messages."""

    kind: SubscriptionKind = "exclusive"
    start: str = "earliest"
    """Where a new subscription begins."""
    consumer: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    """A client that connects again by the same name takes over what it held before."""
    options: str = ""
    """Further options of the subscription and `filter`, as JSON, as for `POST .../consumers`."""
    window: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """So many messages are sent before the client has settled the first of them."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    """Messages in one frame."""
    format: Literal["json", "msgpack"] = "json"
    encoding: ReadEncoding = "auto"


class AckOp(msgspec.Struct, tag_field="op", tag="ack", forbid_unknown_fields=True):
    """Messages that are done with."""

    messages: list[Settled] = []
    cumulative: list[Settled] = []
    id: _Id = None


class NackOp(msgspec.Struct, tag_field="op", tag="nack", forbid_unknown_fields=True):
    """Messages that are to come again."""

    messages: list[Settled]
    delay: Annotated[float, msgspec.Meta(ge=0, le=86_400 * 366)] | None = None
    reason: str | None = None
    id: _Id = None


class WindowOp(msgspec.Struct, tag_field="op", tag="window", forbid_unknown_fields=True):
    """Another window from now on."""

    window: Annotated[int, msgspec.Meta(ge=0, le=10_000)]
    id: _Id = None


class FlushOp(msgspec.Struct, tag_field="op", tag="flush", forbid_unknown_fields=True):
    """Has what was acknowledged stored now."""

    id: _Id = None


class CloseOp(msgspec.Struct, tag_field="op", tag="close", forbid_unknown_fields=True):
    """The end: what was acknowledged is stored first."""

    id: _Id = None


Op = AckOp | NackOp | WindowOp | FlushOp | CloseOp


class ErrorEvent(msgspec.Struct, tag_field="op", tag="error"):
    """Something that a client asked for was refused. The connection goes on."""

    id: _Id
    problem: Problem


class _Conversation:
    """One WebSocket and its consumer."""

    def __init__(self, call: Call, socket: Socket, session: Session) -> None:
        self._query: ConnectQuery = call.query
        self._socket = socket
        self._session = session
        self._service = call.service
        self._window = self._query.window
        self._room = asyncio.Event()
        is_packed = self._query.format == "msgpack"
        self._encode: Any = msgspec.msgpack.Encoder().encode if is_packed else msgspec.json.Encoder().encode
        self._decode: Any = (msgspec.msgpack.Decoder if is_packed else msgspec.json.Decoder)(Op).decode
        self._is_packed = is_packed
        self._is_closing = False

    async def run(self) -> None:
        """Until the client closes it, goes away, or the server stops."""
        await self._say({"op": "subscribed", "consumer": self._session.consumer.consumer})
        pushing = asyncio.ensure_future(self._push())
        listening = asyncio.ensure_future(self._listen())
        stopping = asyncio.ensure_future(self._service.stopping.wait())
        ended = asyncio.Event()
        self._session.on_close = ended.set
        replaced = asyncio.ensure_future(ended.wait())
        tasks = [listening, pushing, stopping, replaced]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._is_closing:
                await listening  # what was pushed into the closed consumer has nothing to say any more
                return
            if replaced.done():
                raise ConflictError("another client took the place of this consumer")
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _push(self) -> None:
        session = self._session
        while True:
            room = self._window - session.held
            if room <= 0:
                # Time-outs free room, too, and say nothing of it.
                self._room.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._room.wait()
                continue
            found = await session.receive_next(min(room, self._query.limit))
            if self._is_packed:
                await self._say({"op": "messages", "messages": delivered(found)})
            else:
                shown = [received_json(message, self._query.encoding) for message in found]
                await self._say({"op": "messages", "messages": shown})

    async def _listen(self) -> None:
        while True:
            data = await self._socket.receive()
            identity: _Id = None
            try:
                op = self._parsed(data)
                identity = op.id
                if isinstance(op, CloseOp):
                    self._is_closing = True
                    await self._service.sessions.close(self._session)
                    await self._say({"op": "closed", "id": identity})
                    return
                await self._carry_out(op)
            except (TidelogError, HttpError) as error:
                if isinstance(error, ClosedError) and isinstance(self._session.consumer, SpreadConsumer):
                    raise  # a partition moved: the client connects again, and says what is not confirmed once more
                await self._say(ErrorEvent(identity, problem_of(error)))
            else:
                if identity is not None:
                    await self._say({"op": "done", "id": identity})

    def _parsed(self, data: str | bytes) -> Op:
        try:
            op: Op = self._decode(data.encode() if isinstance(data, str) else data)
        except JSON_ERRORS as error:
            raise InputError(f"the message does not fit: {without_values(error)}") from None
        return op

    async def _carry_out(self, op: Op) -> None:
        if isinstance(op, AckOp):
            await settle(self._session, Ack(messages=op.messages, cumulative=op.cumulative))
        elif isinstance(op, NackOp):
            await self._session.nack(op.messages, op.delay, op.reason)
        elif isinstance(op, WindowOp):
            self._window = op.window
        elif isinstance(op, FlushOp):
            await self._session.consumer.flush_async()
        self._room.set()

    async def _say(self, message: Any) -> None:
        data: bytes = self._encode(message)
        await self._socket.send(data if self._is_packed else data.decode())


@routes.add(
    "WEBSOCKET",
    "/v1/topics/{namespace}/{name}/subscriptions/{subscription}/connect",
    Permission.READ,
    mode="socket",
    resource=Kind.TOPIC,
    query=ConnectQuery,
    spreads=True,
)
async def connect(call: Call, socket: Socket) -> None:
    """Receives and settles messages over a WebSocket: batches are pushed, and the connection is the lease.

    The server sends `{"op": "messages", "messages": [...]}`; the client sends `{"op": "ack", "messages": [[partition,
    offset], ...]}`, `nack` (with `delay` and `reason`), `flush`, `window` and `close`. With an `id` each of them is
    answered, `done` or `error`. `closed` comes when every acknowledgement is stored.
    """
    try:
        session = await open_session(call, _wanted(call.query), has_lease=False, ahead=call.query.window)
        try:
            await _Conversation(call, socket, session).run()
        finally:
            await call.service.sessions.close(session)
    except (TidelogError, HttpError) as error:
        await _tell(call.query, socket, error)
        raise


async def _tell(query: ConnectQuery, socket: Socket, error: TidelogError | HttpError) -> None:
    """Says why the connection ends: its own last words have room for a short text only."""
    event = ErrorEvent(None, problem_of(error))
    with contextlib.suppress(DisconnectedError):
        is_packed = query.format == "msgpack"
        await socket.send(msgspec.msgpack.encode(event) if is_packed else msgspec.json.encode(event).decode())


def _wanted(query: ConnectQuery) -> Subscribe:
    given: dict[str, Any] = {"kind": query.kind}
    if query.consumer is not None:
        given["consumer"] = query.consumer
    try:
        further = msgspec.json.decode(query.options or "{}", type=dict[str, Any])
        return msgspec.convert({"start": query.start, **further, **given}, Subscribe)
    except JSON_ERRORS as error:
        raise InputError(f"options do not fit: {without_values(error)}") from None
