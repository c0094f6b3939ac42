"""One request as a handler sees it: where, who, what is asked, and how to read the rest of it.

Invariants
- A body is read up to the limit of its route and no further, and takes memory only as it arrives. All bodies together
  have a limit too: beyond it a request is refused, not the process killed.
- A client that sends no more of its body for `body_seconds` is answered 408.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
import shlex
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from tidelog.codec import JSON_ERRORS, from_json
from tidelog.service.auth.access import NotAuthorizedError, Permission, Principal, Resource, topic_resource
from tidelog.service.http.problems import HttpError
from tidelog.service.http.routes import JSON, Route
from tidelog.topics.names import TopicName, parse_topic_name

if TYPE_CHECKING:
    from tidelog.service.http.service import Service
    from tidelog.service.kafka.broker import ServedTopic
    from tidelog.service.placement import NodeAddress

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_MAX_PARAMETERS = 100
_LONGEST_DETAIL = 500
_GIVEN_VALUE = re.compile(r"^(Invalid(?: enum)? value) .*( - at `.*)$", re.DOTALL)


class Peer(NamedTuple):
    """What is known of a client before its request is looked at. Names of headers are in lower case."""

    headers: Mapping[str, str]
    address: str
    """Empty over a unix socket."""
    is_local_socket: bool
    """Whether it came over a socket in the file system, which protects that."""
    certificate_der: bytes | None = None
    """The certificate that the client has shown, verified."""


class Reply(NamedTuple):
    """An answer that is not simply the JSON of the declared type. A body in pieces says how many bytes it has; what
    fails midway cuts the connection."""

    body: bytes | AsyncGenerator[bytes, None]
    media_type: str = JSON
    status: HTTPStatus | None = None
    headers: tuple[tuple[str, str], ...] = ()
    length: int = 0


class BodyBudget:
    """The bytes of bodies that are in memory, all requests together."""

    def __init__(self, limit: int) -> None:
        self._free = limit

    @contextlib.contextmanager
    def spending(self) -> Iterator[Callable[[int], None]]:
        """Call what it gives with the bytes that are taken; at the end they are free again."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if count > self._free:
                raise HttpError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "the server has too many large requests at once",
                    error="BackpressureError",
                    headers=(("retry-after", "1"),),
                )
            self._free -= count
            taken += count

        try:
            yield take
        finally:
            self._free += taken


class Call:
    """A request whose route is known and whose client may make it."""

    def __init__(
        self,
        service: Service,
        route: Route,
        path: dict[str, str],
        peer: Peer,
        principal: Principal,
        receive: Receive,
    ) -> None:
        self.service = service
        self.route = route
        self.path = path
        self.peer = peer
        self.principal = principal
        self.target = ""
        """Its path and query, as they came."""
        self.query: Any = None
        self.body: Any = None
        self.raw_body = b""
        """As it came."""
        self.only: tuple[int, ...] | None = None
        """The partitions that are asked for, where another node asks the rest of others."""
        self.spread: Mapping[NodeAddress, list[int]] | None = None
        """The nodes of the partitions that are asked for, where these are several nodes."""
        self.received_bytes = 0
        """So many of its body have arrived."""
        self._receive = receive

    @property
    def headers(self) -> Mapping[str, str]:
        return self.peer.headers

    @property
    def topic_name(self) -> TopicName:
        """The topic in the path; TopicNameError when none can be called so."""
        return parse_topic_name(f"{self.path['namespace']}/{self.path['name']}")

    def numbers(self, served: ServedTopic) -> Sequence[int]:
        """The partitions of a topic that this request is about, on this node."""
        return range(served.count) if self.only is None else self.only

    def part(self, numbers: Sequence[int]) -> Call:
        """The same request for some of the partitions."""
        made = copy.copy(self)
        made.only, made.spread = tuple(numbers), None
        return made

    @property
    def media_type(self) -> str:
        """Of the body, without parameters; JSON where the client says nothing."""
        return self.headers.get("content-type", JSON).partition(";")[0].strip().lower() or JSON

    def accepts(self, media_type: str) -> bool:
        """Whether the client asks for this type by name."""
        accepted = self.headers.get("accept", "").split(",")
        return any(one.partition(";")[0].strip().lower() == media_type for one in accepted)

    def allows(self, permission: Permission | None, resource: Resource) -> bool:
        """Whether the client may do something else, too; None: whether it may see that this exists."""
        return self.service.authorizer.allows(self.principal, permission, resource)

    def check(self, permission: Permission, resource: Resource) -> None:
        """NotAuthorizedError unless the client may do this."""
        if not self.allows(permission, resource):
            raise forbidden(permission, resource)

    async def topic_in_use(self) -> ServedTopic:
        """The topic in the path. Its first use creates it, for those who may."""
        broker, name = self.service.broker, self.topic_name
        if broker.find(name) is None:
            self.check(Permission.ADMIN, topic_resource(name))
        return await broker.find_or_create(name)

    async def read(self, take: Callable[[int], None]) -> bytes:
        """The whole body; HttpError (413) when it is too large, (408) when it does not come."""
        pieces: list[bytes] = []
        async for piece in self.pieces(self.route.max_body_bytes or self.service.settings.max_body_bytes):
            take(len(piece))
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def announced_bytes(self) -> int | None:
        """How many the client says that its body has; None: it does not say."""
        announced = self.headers.get("content-length", "")
        return int(announced) if announced.isascii() and announced.isdigit() else None

    async def pieces(self, limit: int) -> AsyncIterator[bytes]:
        """The body as it arrives; the same errors. A client that goes away midway ends it with CancelledError."""
        seconds = self.service.settings.body_seconds
        if (self.announced_bytes or 0) > limit:
            raise _too_large(limit)
        is_over = False
        while not is_over:
            try:
                async with asyncio.timeout(seconds):
                    message = await self._receive()
            except TimeoutError:
                raise HttpError(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {seconds} s") from None
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            piece: bytes = message.get("body", b"")
            self.received_bytes += len(piece)
            if self.received_bytes > limit:
                raise _too_large(limit)
            is_over = not message.get("more_body")
            yield piece

    async def gone(self) -> None:
        """Returns when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class DisconnectedError(Exception):
    """The client of a WebSocket has gone."""


class Socket:
    """A WebSocket: messages in both directions, text or bytes."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    async def receive(self) -> str | bytes:
        """The next message; DisconnectedError at the end."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            raise DisconnectedError
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, data: str | bytes) -> None:
        """Waits while the client does not read."""
        kind = "text" if isinstance(data, str) else "bytes"
        try:
            await self._send({"type": "websocket.send", kind: data})
        except OSError:
            raise DisconnectedError from None

    async def close(self, code: int, reason: str = "") -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": reason[:120]})


def parse_query(query_string: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """The parameters of a query as the declared type; HttpError (400) names what does not fit."""
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_PARAMETERS, errors="strict"
        )
    except ValueError:
        raise _unfit("the query cannot be understood") from None
    given = dict(pairs)
    if len(given) != len(pairs):
        raise _unfit("a parameter of the query is given twice")
    try:
        return msgspec.convert(given, kind, strict=False)
    except JSON_ERRORS as error:
        raise _unfit(f"the query does not fit: {without_values(error)}") from None


def parse_body(data: bytes, media_type: str, kind: Any, other_types: Sequence[str] = ()) -> Any:
    """A body of JSON as the declared type; HttpError (400, 415) says what does not fit. `other_types` are those that
    the route takes as they are."""
    if media_type != JSON and not media_type.endswith("+json"):
        said = f"its content-type is {media_type[:60]}" if media_type else "it has no content-type"
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the body must be {' or '.join((JSON, *other_types))}; {said}",
            hint=f"Name what the body is: with curl, --json or -H 'content-type: {(JSON, *other_types)[-1]}'",
        )
    if not data.strip():
        data = b"{}"
    try:
        return from_json(data, kind)
    except JSON_ERRORS as error:
        raise _unfit(f"the body does not fit: {without_values(error)}") from None


def without_values(error: Exception) -> str:
    """What does not fit, and where; not what was given instead, which may be a secret in the wrong place."""
    return _GIVEN_VALUE.sub(r"\1\2", str(error))


def _unfit(detail: str) -> HttpError:
    return HttpError(HTTPStatus.BAD_REQUEST, detail[:_LONGEST_DETAIL], hint="/openapi.json says what is expected")


def _too_large(limit: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has more than {limit} bytes",
        hint="Send it in several requests",
        error="MessageTooLargeError",
        headers=(("connection", "close"),),
    )


def forbidden(permission: Permission, resource: Resource) -> NotAuthorizedError:
    """The refusal; it does not say whether the thing exists."""
    return NotAuthorizedError(
        f"the permission {permission.value} on {resource} is missing",
        hint=f"`tidelog auth grant NAME {permission.value} {shlex.quote(str(resource))}` gives it, at the server",
    )
