"""The ASGI application: finds the route of a request, lets the client prove what it may, and runs the handler.

    find the route -> authenticate -> authorise -> query -> body -> handler -> answer -> count, audit

Invariants
- Nothing of a request beyond its head is looked at before the client has the permission of the route.
- Every failure is a problem document. A bug is logged, and its answer says nothing of it.
- A page of another origin cannot use a browser to talk to the server: a request whose `Origin` is not the host that it
  was sent to is refused. A server on a loopback address that asks nobody who they are answers to no other name than
  those of this machine, so that no name can be made to point to it for a page.
- A client that goes away cancels what waits for news; an append that was begun is finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from http import HTTPStatus
from typing import Any

import msgspec

from tidelog.errors import TidelogError
from tidelog.service.auth.access import ANONYMOUS, SERVER, NotAuthorizedError, Permission, Resource
from tidelog.service.http import (
    admin,
    cluster,
    dead_letters,
    engines,
    health,
    messages,
    metrics_page,
    operations,
    plans,
    producers,
    reports,
    subscriptions,
    topics,
    websocket,
)
from tidelog.service.http.call import (
    Call,
    DisconnectedError,
    Peer,
    Receive,
    Reply,
    Scope,
    Send,
    Socket,
    forbidden,
    parse_body,
    parse_query,
)
from tidelog.service.http.openapi import describe
from tidelog.service.http.placed import ElsewhereError, answer_of_other, check_here, hear_of
from tidelog.service.http.problems import (
    PROBLEM_TYPE,
    HttpError,
    Problem,
    internal_problem,
    problem_headers,
    problem_of,
)
from tidelog.service.http.routes import JSON, Match, Route, Router
from tidelog.service.http.service import Service
from tidelog.service.http.spread.others import PARTITIONS_HEADER
from tidelog.service.http.spread.parts import answered_by_all
from tidelog.tracing import TRACING, request_span

_logger = logging.getLogger("tidelog.http")
_NORMAL, _GOING_AWAY, _POLICY_VIOLATION, _INTERNAL = 1000, 1001, 1008, 1011
_NO_BODY = (HTTPStatus.NO_CONTENT,)

_MODULES = (
    health,
    metrics_page,
    topics,
    messages,
    producers,
    subscriptions,
    websocket,
    dead_letters,
    admin,
    engines,
    plans,
    operations,
    cluster,
    reports,
)
TABLE: list[Route] = [route for module in _MODULES for route in module.routes]
"""All routes of the API, in the order of the documentation."""


class App:
    """Serves the table of routes over any ASGI server."""

    def __init__(self, service: Service, further: tuple[Route, ...] = ()) -> None:
        """`further` are served too and are not part of the API, as the console's pages."""
        self.service = service
        self._router = Router([*TABLE, *further])
        self._openapi: bytes | None = None
        self._encoder = msgspec.json.Encoder()
        service.openapi = self.openapi
        placement = service.broker.placement
        service.operations = operations.Operations(
            lambda: "" if placement.is_alone else f"{operations.OPERATION_SEPARATOR}{placement.node_id}"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Request(self, scope, receive, send).answer()
        elif scope["type"] == "websocket":
            await _Request(self, scope, receive, send).converse()

    def find(self, method: str, scope: Scope) -> Match:
        return self._router.find(method, scope["raw_path"].decode("latin-1"))

    def openapi(self) -> bytes:
        """The description of the API."""
        if self._openapi is None:
            self._openapi = self._encoder.encode(describe(TABLE, self.service.version))
        return self._openapi

    def encode(self, value: Any) -> bytes:
        return self._encoder.encode(value)


class _Request:
    """One request, or one WebSocket, from its head to its end."""

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._service = app.service
        self._scope = scope
        self._receive = receive
        self._send = send
        self._peer = _peer_of(scope)
        self._principal = ANONYMOUS
        self._route: Route | None = None
        self._call: Call | None = None
        self._resource: Resource = SERVER
        self._resources: list[Resource] = []
        self._status = 0
        self._sent = 0

    # HTTP

    async def answer(self) -> None:
        if not TRACING.is_on:
            await self._answer_timed()
            return
        with request_span(self._scope["method"], self._peer.headers) as span:
            await self._answer_timed()
            if span is not None:
                self._describe(span)

    def _describe(self, span: Any) -> None:
        """The route says what was asked for; the path and the query are the client's own."""
        route = "other" if self._route is None else self._route.path
        span.update_name(f"{self._scope['method']} {route}")
        attributes = {"http.route": route, "http.response.status_code": self._status}
        span.set_attributes({"http.request.method": self._scope["method"], **attributes})

    async def _answer_timed(self) -> None:
        began = time.perf_counter()
        try:
            await self._answer_somewhere(self._scope["method"])
        except (TidelogError, HttpError) as error:
            await self._refuse(problem_of(error), problem_headers(error))
        except asyncio.CancelledError:
            self._status = self._status or 499  # the client is gone, or the server stops: nobody reads an answer
        except Exception:
            _logger.exception("%s failed", self._route.name if self._route else "a request")
            await self._refuse(internal_problem(), ())
        finally:
            self._count(time.perf_counter() - began)

    async def _answer_somewhere(self, method: str) -> None:
        try:
            await self._answer(method)
        except ElsewhereError as error:
            assert self._call is not None
            reply = await answer_of_other(self._call, error)
            if reply is None:
                raise
            await self._reply(reply, HTTPStatus.OK)

    async def _answer(self, method: str) -> None:
        call = await self._admitted(method)
        route = call.route
        with self._service.bodies.spending() as take:
            if (route.body is not None or route.body_types) and not route.streams_body:
                data = await call.read(take)
                call.raw_body = data
                is_own = call.media_type in route.body_types or route.body is None
                call.body = data if is_own else parse_body(data, call.media_type, route.body, route.body_types)
            if route.mode == "stream":
                await self._stream(call)
                return
            work = route.handler(call) if call.spread is None or route.spreads else answered_by_all(call)
            result = await (self._while_connected(call, work) if route.mode == "wait" else work)
        if isinstance(result, Reply):
            await self._reply(result, route.status)
        elif result is None:
            await self._respond(HTTPStatus.NO_CONTENT, b"", "", ())
        else:
            await self._respond(route.status, self._app.encode(result), JSON, ())

    async def _reply(self, reply: Reply, status: HTTPStatus) -> None:
        status = reply.status or status
        if isinstance(reply.body, bytes):
            await self._respond(status, reply.body, reply.media_type, reply.headers)
        else:
            await self._respond_in_pieces(reply, status, reply.body)

    async def _admitted(self, method: str) -> Call:
        """The request as its handler gets it, once it is known that the client may make it."""
        self._service.check_origin(self._peer)
        self._service.check_host(self._peer)
        match = self._app.find(method, self._scope)
        route = self._route = match.route
        resources = self._resources = route.resources_of(match.path)
        self._resource = resources[0]
        if not route.is_public:
            self._principal = await self._service.authenticate(self._peer)
        if route.permission is not None:
            for resource in resources:
                if not self._service.authorizer.allows(self._principal, route.permission, resource):
                    raise forbidden(route.permission, resource)
        call = self._call = Call(self._service, route, match.path, self._peer, self._principal, self._receive)
        call.query = parse_query(self._scope["query_string"], route.query)
        call.target = self._scope["raw_path"].decode("latin-1")
        if self._scope["query_string"]:
            call.target += "?" + self._scope["query_string"].decode("latin-1")
        call.only = _only(self._peer.headers.get(PARTITIONS_HEADER))
        await hear_of(call)
        if not route.reads_stored:
            check_here(call, call.target)
        return call

    async def _while_connected(self, call: Call, work: Coroutine[Any, Any, Any]) -> Any:
        """The result, unless the client goes away before, or may no longer have it."""
        gone = asyncio.ensure_future(call.gone())
        try:
            return await self._while_allowed(work, gone)
        finally:
            gone.cancel()
            with contextlib.suppress(BaseException):
                await gone

    async def _while_allowed(self, work: Coroutine[Any, Any, Any], *ends: asyncio.Future[Any]) -> Any:
        """The result, unless one of these ends it, or the client's token or grant does."""
        working = asyncio.ensure_future(work)
        with self._service.until_revoked(self._is_allowed) as revoked:
            try:
                await asyncio.wait([working, revoked, *ends], return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return working.result()
                if revoked.done():
                    raise NotAuthorizedError("the permission for this was revoked, or its token has ended")
                raise asyncio.CancelledError
            finally:
                if not working.done():
                    working.cancel()
                    with contextlib.suppress(BaseException):
                        await working

    def _is_allowed(self) -> bool:
        permission = None if self._route is None else self._route.permission
        allows = self._service.authorizer.allows
        is_granted = permission is None or all(allows(self._principal, permission, one) for one in self._resources)
        return is_granted and self._service.is_current(self._principal)

    async def _stream(self, call: Call) -> None:
        pieces: AsyncGenerator[bytes, None] = call.route.handler(call)
        first = await anext(pieces, b"")  # what is wrong with the request is found before the head of the answer is out
        media_type = call.route.response_types[0]
        await self._begin(HTTPStatus.OK, media_type, (("cache-control", "no-store"),), None)
        sending = self._send_pieces(first, pieces)
        try:
            await self._while_connected(call, sending)
        except NotAuthorizedError:  # the head is out
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await pieces.aclose()

    async def _send_pieces(self, first: bytes, pieces: AsyncGenerator[bytes, None]) -> None:
        await self._send_piece(first)
        try:
            async for piece in pieces:
                await self._send_piece(piece)
        except TidelogError as error:
            # The head is out. A client sees that the answer was cut, and the log why.
            _logger.warning("%s ended: %s", self._route.name if self._route else "", error.message)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, piece: bytes) -> None:
        if piece:
            self._sent += len(piece)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _refuse(self, problem: Problem, headers: tuple[tuple[str, str], ...]) -> None:
        if self._status == 0:
            body = self._app.encode(problem)
            await self._respond(HTTPStatus(problem.status), body, PROBLEM_TYPE, headers)

    async def _respond(
        self, status: HTTPStatus, body: bytes, media_type: str, headers: tuple[tuple[str, str], ...]
    ) -> None:
        self._sent = len(body)
        await self._begin(status, media_type, headers, len(body))
        await self._send({"type": "http.response.body", "body": body})

    async def _respond_in_pieces(self, reply: Reply, status: HTTPStatus, pieces: AsyncGenerator[bytes, None]) -> None:
        """An answer of a known length. If it ends before that, the connection is cut, and the client sees it."""
        try:
            await self._begin(status, reply.media_type, reply.headers, reply.length)
            if self._scope["method"] != "HEAD":
                async for piece in pieces:
                    await self._send_piece(piece)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await pieces.aclose()

    async def _begin(
        self, status: HTTPStatus, media_type: str, headers: tuple[tuple[str, str], ...], length: int | None
    ) -> None:
        self._status = status.value
        sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        sent.append((b"x-content-type-options", b"nosniff"))
        if status not in _NO_BODY:
            sent.append((b"content-type", media_type.encode("latin-1")))
            if length is not None:
                sent.append((b"content-length", str(length).encode("ascii")))
        await self._send({"type": "http.response.start", "status": status.value, "headers": sent})

    # WebSocket

    async def converse(self) -> None:
        began = time.perf_counter()
        await self._receive()  # websocket.connect
        try:
            call = await self._admitted("WEBSOCKET")
        except (TidelogError, HttpError) as error:
            await self._deny(problem_of(error), problem_headers(error))
            self._count(time.perf_counter() - began)
            return
        await self._send({"type": "websocket.accept"})
        self._status = HTTPStatus.SWITCHING_PROTOCOLS.value
        self._count(time.perf_counter() - began)
        await self._talk(call, Socket(self._receive, self._send))

    async def _talk(self, call: Call, socket: Socket) -> None:
        code, reason = _NORMAL, ""
        try:
            await self._while_allowed(call.route.handler(call, socket))
            if self._service.stopping.is_set():
                code, reason = _GOING_AWAY, "the server stops"
        except (DisconnectedError, asyncio.CancelledError):
            return
        except (TidelogError, HttpError) as error:
            code, reason = _POLICY_VIOLATION, problem_of(error).detail
        except Exception:
            _logger.exception("%s failed", call.route.name)
            code, reason = _INTERNAL, "the server made a mistake"
        with contextlib.suppress(Exception):  # it may be gone
            await socket.close(code, reason)

    async def _deny(self, problem: Problem, headers: tuple[tuple[str, str], ...]) -> None:
        """Answers the handshake as a request is answered."""
        self._status = problem.status
        body = self._app.encode(problem)
        # Clients of WebSockets do not take an address of HTTP for one of theirs; ours know where else it is said.
        given = [(name, value) for name, value in headers if name != "location"]
        sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given]
        sent += [(b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        start = {"type": "websocket.http.response.start", "status": problem.status, "headers": sent}
        await self._send(start)
        await self._send({"type": "websocket.http.response.body", "body": body})

    # Afterwards

    def _count(self, seconds: float) -> None:
        name = "other" if self._route is None else self._route.name
        received = 0 if self._call is None else self._call.received_bytes
        self._service.requests.observe_request(name, self._status, seconds, received, self._sent)
        changes = self._route is not None and self._route.permission in (Permission.WRITE, Permission.ADMIN)
        if changes or self._status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            self._service.audit(self._principal, self._peer, name, self._resource, self._status)


def _only(given: str | None) -> tuple[int, ...] | None:
    """The partitions that another node asks for."""
    if given is None:
        return None
    numbers = given.split(",")
    if not all(number.isascii() and number.isdigit() and len(number) <= 6 for number in numbers):
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{PARTITIONS_HEADER} must be numbers of partitions, as in 0,2")
    return tuple(dict.fromkeys(map(int, numbers)))


def _peer_of(scope: Scope) -> Peer:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers[name.decode("latin-1")] = value.decode("latin-1")
    client = scope.get("client")
    state = scope.get("state") or {}
    return Peer(headers, client[0] if client else "", bool(state.get("is_local_socket")), state.get("certificate_der"))
