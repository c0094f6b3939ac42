"""Requests to a server: connections, their pool, retries, and the errors that answers stand for.

Invariants
- At most `max_connections` requests are on their way at once, and as many appends of threads that wait. A request
  that waits for news has a connection of its own, so that readers that follow never keep an append waiting.
- A connection has one request at a time. It is used again only after a whole answer; otherwise it is closed.
- A request that got no whole answer, or was told to come again, is sent again until its time is up. So every request
  that is made here must be one that does nothing twice.
- A refusal raises the class that the embedded library raises, with the same message and hint.
- An answer is at most `MAX_ANSWER_BYTES` long.
- A server that has nodes beside it sends requests on to them (307). The token goes to nodes that a server which has it
  already lists as its own (`GET /v1/nodes`), to no other host, and never without TLS from one with it. Where a
  request was sent on is remembered, until that node does not answer. The others are asked when the first server is
  gone: a server is asked for its nodes with the first answer, and again when something failed or time has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from threading import Semaphore
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from tidelog import errors
from tidelog.client.local_socket import short_path
from tidelog.clock import jittered
from tidelog.codec import JSON_ERRORS
from tidelog.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    ConflictError,
    DataError,
    DiskFullError,
    GapError,
    Hint,
    InputError,
    InternalError,
    NotFoundError,
    ServerUnavailableError,
    TidelogError,
)
from tidelog.secret import Secret

MAX_ANSWER_BYTES = 256 << 20
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_OPERATION_SECONDS = 30.0
_OPENING_SECONDS = 10.0
_READ_BYTES = 1 << 16
_SENT_BYTES = 1 << 18
_SYNCED_BYTES_A_SECOND = 10 << 20
_SENT_ON = 307
_MAX_HOPS = 5
_MAX_NODES = 100
_LEARN_SECONDS = 60.0
_WAITING: dict[str, Any] = {"waits": True, "timeout": 3 * _OPERATION_SECONDS, "attempt": 2 * _OPERATION_SECONDS}
_MISSING = "tidelog.connect needs the packages of the extra `client`"
_HINT = "Install them: pip install 'tidelog[client]'"


class Server(NamedTuple):
    """Where a server is: over TCP, with or without TLS, or by a socket in the file system."""

    url: str
    host: str
    port: int
    is_tls: bool
    socket_path: str | None
    base: str
    """What stands before every path."""

    @property
    def authority(self) -> str:
        """As requests name it."""
        if self.socket_path is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    def is_same(self, other: Server) -> bool:
        """Whether both are reached at one place."""
        return (self.host, self.port, self.is_tls) == (other.host, other.port, other.is_tls)


class _Node(msgspec.Struct):
    http: str


class _Nodes(msgspec.Struct):
    """What a server lists as its nodes."""

    nodes: list[_Node]


def parse_server(url: str) -> Server:
    """`http://host:port`, `https://host` or `unix:///path/to/socket`."""
    if not isinstance(url, str):
        raise InputError(
            f"the address of a server must be str, not {type(url).__name__}",
            hint="Name one server; a cluster's tells where the others are",
        )
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return Server(url, "localhost", 0, False, parts.path, "")
    is_bad = parts.scheme not in ("http", "https") or not parts.hostname or port == -1
    if is_bad or parts.username or parts.password or parts.query or parts.fragment:
        raise InputError(
            "the address of a server must be a URL such as http://127.0.0.1:8080",
            hint=Hint(
                "Credentials are not part of it: pass token=...", "Credentials are not part of it: set TIDELOG_TOKEN"
            ),
        )
    assert parts.hostname is not None
    is_tls = parts.scheme == "https"
    return Server(url, parts.hostname, port or (443 if is_tls else 80), is_tls, None, parts.path.rstrip("/"))


def path_of(*parts: str) -> str:
    """A path of the API; what a part contains cannot lead elsewhere."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class Answer(NamedTuple):
    """What the server said."""

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})
    """Our own, by name in lower case."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def json(self, kind: Any = Any) -> Any:
        """The document in it."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except JSON_ERRORS as error:
            raise _odd(f"its answer does not fit: {error}") from None


def _odd(what: str) -> DataError:
    return DataError(f"the server does not speak as expected: {what}", hint="Does the URL name a tidelog server?")


class LostError(Exception):
    """The connection ended, or was never there: whether a request was carried out is not known."""


# Errors


def unreachable(error: BaseException, server: Server) -> TidelogError:
    """Why there is no connection, or no answer on it, as an error of ours."""
    if isinstance(error, ssl.SSLCertVerificationError):
        named = "the URL must have a name that is in the certificate"
        return ConfigError(
            f"the certificate of the server at {server.url} is refused: {error.verify_message or error}",
            hint=Hint(
                f"Name the authority that signed it: tls_ca=FILE or TIDELOG_TLS_CA; {named}",
                command=f"Name the authority that signed it: --tls-ca FILE or TIDELOG_TLS_CA; {named}",
            ),
        )
    why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    hint = "Is `tidelog serve` running there? What was sent may have been stored"
    if isinstance(error, ssl.SSLError):
        hint = "Does it speak TLS? A server without --tls-cert has a URL that begins with http://"
    elif not server.is_tls and server.socket_path is None and isinstance(error, LostError | TimeoutError):
        hint = f"{hint}. A server with --tls-cert has a URL that begins with https://"
    return ServerUnavailableError(f"the server at {server.url} cannot be reached: {why}", hint=hint)


class Problem(msgspec.Struct):
    """What the server says of an error."""

    error: str = ""
    detail: str = ""
    hint: str | None = None
    command_hint: str | None = None
    operation: str | None = None
    status: int = 500

    def as_error(self) -> TidelogError:
        """As the error that it was there."""
        hint = None if self.hint is None else Hint(self.hint, self.command_hint)
        error = make_error(self.error, self.detail or f"the server answered {self.status}", hint, self.status)
        error.operation = self.operation
        return error


def error_of(answer: Answer) -> TidelogError:
    """The error that a refusal stands for."""
    problem = Problem()
    if answer.media_type == "application/problem+json":
        with contextlib.suppress(*JSON_ERRORS):
            problem = msgspec.json.decode(answer.body, type=Problem)
    problem.status = answer.status
    return problem.as_error()


def make_error(name: str, detail: str, hint: str | None, status: int = 500) -> TidelogError:
    """The error of this class name."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, TidelogError)):
        kind = _kind_of(status)
    if issubclass(kind, GapError):
        return GapError(detail, first=-1, last=-1, hint=hint)
    if issubclass(kind, errors.CorruptionError):
        return DataError(detail, hint=hint or "The log of the server says where")
    if issubclass(kind, DiskFullError):
        return DiskFullError(detail)
    return kind(detail, hint=hint)


def _kind_of(status: int) -> type[TidelogError]:
    """For an answer that names no class of ours: a proxy's."""
    known: dict[int, type[TidelogError]] = {
        401: AccessDeniedError,
        403: AccessDeniedError,
        404: NotFoundError,
        409: ConflictError,
        429: ServerUnavailableError,
        502: ServerUnavailableError,
        503: ServerUnavailableError,
        504: ServerUnavailableError,
        507: ServerUnavailableError,
    }
    return known.get(status, InputError if status < 500 else InternalError)


def _is_worth_another_try(answer: Answer, error: TidelogError) -> bool:
    """What a server that starts or stops says, or a proxy before it; what a topic says is for the caller."""
    return isinstance(error, ServerUnavailableError) or (answer.status == 503 and isinstance(error, ClosedError))


# Connections


class AnswerParser:
    """Puts one answer together from the bytes of a connection."""

    def __init__(self, make_parser: Any) -> None:
        self._parser = make_parser(self)
        self._pieces: list[bytes] = []
        self._size = 0
        self._media_type = ""
        self._headers: dict[str, str] = {}
        self._answer: Answer | None = None
        self.keeps_alive = False
        """Whether the connection may be used again, once there is an answer."""

    def feed(self, data: bytes) -> Answer | None:
        """The answer, once it is whole; ServerUnavailableError for bytes that are none."""
        try:
            self._parser.feed_data(data)
        except Exception as error:  # noqa: BLE001 - the parser's own
            raise _odd(str(error)) from None
        return self._answer

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower().startswith(b"x-tidelog-"):
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        elif name.lower() == b"content-type":
            self._media_type = value.decode("latin-1").partition(";")[0].strip().lower()

    def on_body(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self.keeps_alive = self._parser.should_keep_alive()
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._answer = Answer(self._parser.get_status_code(), self._media_type, body, self._headers)


class _Connection(asyncio.Protocol):
    """One connection: a request, then its answer."""

    def __init__(self, make_parser: Any) -> None:
        self._make_parser = make_parser
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self.is_usable = False
        self.is_fresh = True
        self._may_write = asyncio.Event()
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.is_usable = True

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.close()  # nobody asked
            return
        try:
            found = self._parser.feed(data)
        except TidelogError as error:
            self._fail(error)
            return
        if found is not None:
            answer, self._answer = self._answer, None
            self.is_usable = self._parser.keeps_alive
            if not answer.done():
                answer.set_result(found)
            self._may_write.set()  # a server that answers before the end of a body may not read the rest

    def connection_lost(self, error: Exception | None) -> None:
        self.is_usable = False
        self._may_write.set()
        self._fail(LostError(str(error or "the connection was closed")))

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
        self.close()

    async def ask(self, head: bytes, body: bytes) -> Answer:
        """The answer to a request; LostError when it did not come."""
        assert self._transport is not None
        self._parser = AnswerParser(self._make_parser)
        self._answer = asyncio.get_running_loop().create_future()
        is_whole = False
        try:
            self._transport.writelines((head, body)) if body else self._transport.write(head)
            answer = await self._answer
            is_whole = True
            self.is_fresh = False
            return answer
        finally:
            if not is_whole:
                self._answer = None
                self.close()

    async def upload(self, head: bytes, pieces: AsyncIterator[bytes], seconds: float) -> Answer:
        """The answer to a request whose body is sent as it comes, and which may be answered before its end.

        TimeoutError when nothing of it can be sent for so long, or when no answer comes so long after its end, and
        after the time in which a slow disk syncs it.
        """
        assert self._transport is not None
        self._parser = AnswerParser(self._make_parser)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answer = answer
        sent = 0
        try:
            self._transport.write(head)
            async for piece in pieces:
                for part in _parts(piece):
                    if not answer.done():
                        self._transport.writelines((b"%x\r\n" % len(part), part, b"\r\n"))
                        sent += len(part)
                        async with asyncio.timeout(seconds):
                            await self._may_write.wait()
                if answer.done():
                    break
            else:
                self._transport.write(b"0\r\n\r\n")
            async with asyncio.timeout(seconds + sent / _SYNCED_BYTES_A_SECOND):
                return await answer
        finally:
            self._answer = None
            self.close()  # it may have been answered before all was sent

    def close(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()


def _parts(piece: bytes) -> Iterator[memoryview]:
    """A piece of a body as it is sent: so much at once that a slow connection takes it in time."""
    view = memoryview(piece)
    return (view[first : first + _SENT_BYTES] for first in range(0, len(view), _SENT_BYTES))


class DirectConnections:
    """Connections for threads that wait: a request needs no event loop, and half the time.

    One that did not work out is the caller's to make again by `Http.ask`, with its retries. So every request that is
    made here must be one that does nothing twice, as there.
    """

    def __init__(self, server: Server, tls: ssl.SSLContext | None, make_parser: Any, most: int) -> None:
        self._server = server
        self._tls = tls
        self._make_parser = make_parser
        self._free: deque[socket.socket] = deque()
        self._room = Semaphore(most)
        self._is_closed = False

    def ask(self, head: bytes, body: bytes, seconds: float) -> Answer | None:
        """The answer if it is a success, else None: nothing is known then of what the server did."""
        if not self._room.acquire(blocking=False):
            return None
        try:
            return self._asked(head, body, time.monotonic() + seconds)
        except (OSError, TidelogError):
            return None
        finally:
            self._room.release()

    def _asked(self, head: bytes, body: bytes, deadline: float) -> Answer | None:
        connection = self._taken()
        keeps = False
        try:
            connection.settimeout(_left(deadline))
            _send(connection, head, body)
            parser = AnswerParser(self._make_parser)
            answer = None
            while answer is None:
                connection.settimeout(_left(deadline))
                data = connection.recv(_READ_BYTES)
                if not data:
                    return None  # an idle one that the server has closed
                answer = parser.feed(data)
            keeps = parser.keeps_alive and not self._is_closed
            return answer if answer.is_success else None
        finally:
            if keeps:
                self._free.append(connection)
            else:
                connection.close()

    def _taken(self) -> socket.socket:
        with contextlib.suppress(IndexError):  # several threads may take
            return self._free.pop()
        server = self._server
        if server.socket_path is not None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                made.settimeout(_OPENING_SECONDS)
                with short_path(server.socket_path) as path:
                    made.connect(path)
            except BaseException:
                made.close()
                raise
            return made
        made = socket.create_connection((server.host, server.port), _OPENING_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made if self._tls is None else self._tls.wrap_socket(made, server_hostname=server.host)

    def close(self) -> None:
        """Closes those that are idle; the others when their answer came."""
        self._is_closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._free.pop().close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _send(connection: socket.socket, head: bytes, body: bytes) -> None:
    if isinstance(connection, ssl.SSLSocket):
        connection.sendall(head + body)
        return
    sent = connection.sendmsg((head, body))
    if sent < len(head) + len(body):
        connection.sendall(head[sent:])
        connection.sendall(memoryview(body)[max(0, sent - len(head)) :])


About = tuple[str, object, bool]
"""What decides which node answers: the path, the partition, and whether the store is enough."""


class Http:
    """Requests to one server. Everything here runs in the client's loop, but for `direct`."""

    def __init__(
        self,
        server: Server,
        token: Secret | None,
        tls: ssl.SSLContext | None,
        *,
        timeout_seconds: float,
        max_connections: int,
        further: Mapping[str, str] = MappingProxyType({}),
        may_follow: Callable[[Server], bool] | None = None,
    ) -> None:
        """`further` are headers of every request. `may_follow`: which servers requests may be sent on to."""
        self.server = server
        self._further = dict(further)
        self._may_follow = may_follow
        self.timeout_seconds = timeout_seconds
        self.tls = (tls or ssl.create_default_context()) if server.is_tls else None
        self._token = token
        self._make_parser = _parser_factory()
        self.direct = DirectConnections(server, self.tls, self._make_parser, max_connections)
        self._free: list[_Connection] = []
        self._others: dict[str, Http] = {}
        self._sent_on: dict[About, Http] = {}
        self._first: Http = self
        self._learn_at = 0.0
        """When the nodes are asked for again, in the time of the loop."""
        self._learning: asyncio.Task[None] | None = None
        self._max_connections = max_connections
        self._room = asyncio.Semaphore(max_connections)
        self._opening_seconds = min(timeout_seconds, _OPENING_SECONDS)

    @property
    def headers(self) -> dict[str, str]:
        """What every request says."""
        proof = {} if self._token is None else {"authorization": f"Bearer {self._token.reveal()}"}
        return proof | self._further

    async def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        body: bytes = b"",
        *,
        media_type: str = "application/json",
        accept: str = "application/json",
        timeout: float | None = None,
        attempt: float | None = None,
        waits: bool = False,
        is_only_try: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The answer to a request that may be sent several times; raises what a refusal stands for.

        `timeout`: for all tries together. `attempt`: how long one waits for its answer; None: as long as `timeout`.
        `waits`: the server may hold the answer back until there is news.
        """
        head = self.head(method, path, query, body, media_type, accept, headers)
        about = (path, (query or {}).get("partition"), bool((query or {}).get("stored")))
        return await self.send(
            head, body, about, timeout=timeout, attempt=attempt, waits=waits, is_only_try=is_only_try
        )

    async def send(
        self,
        head: bytes,
        body: bytes,
        about: About,
        *,
        timeout: float | None = None,
        attempt: float | None = None,
        waits: bool = False,
        is_only_try: bool = False,
    ) -> Answer:
        """As `ask`, where the head is made already."""
        total = self.timeout_seconds if timeout is None else timeout
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + total, _FIRST_PAUSE_SECONDS
        failure: TidelogError
        while True:
            left = max(0.001, deadline - loop.time())
            try:
                seconds = left if attempt is None else min(left, attempt)
                answer = await self._followed(head, body, about, seconds, waits)
            except ssl.SSLCertVerificationError as error:
                raise unreachable(error, self._failed(about).server) from None  # it stays so
            except (LostError, OSError, TimeoutError) as error:
                failure = unreachable(error, self._failed(about).server)
            else:
                if answer.is_success:
                    return answer
                self._sent_on.pop(about, None)
                failure = error_of(answer)
                if not _is_worth_another_try(answer, failure):
                    raise failure
            if is_only_try or loop.time() + pause >= deadline:
                raise failure
            await asyncio.sleep(jittered(pause))
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def at(self, about: About) -> Http:
        """The node that a request is sent to, as far as is known."""
        return self._sent_on.get(about, self._first)

    def remember(self, path: str, at: Http) -> None:
        """A path that one node alone answers."""
        if at is not self._first:
            self._sent_on[path, None, False] = at

    def readdressed(self, head: bytes, target: str = "") -> bytes:
        """The head of a request that was made for another node; with `target` for its path and query."""
        line, _, rest = head.split(b"\r\n", 2)
        method, before, version = line.split(b" ")
        line = b" ".join((method, target.encode("latin-1") or before, version))
        return b"\r\n".join((line, f"host: {self.server.authority}".encode("latin-1"), rest))

    async def _followed(self, head: bytes, body: bytes, about: About, seconds: float, waits: bool) -> Answer:
        """The answer of the node that a request is for."""
        at, target = self.at(about), ""
        for _ in range(_MAX_HOPS):
            addressed = head if at is self and not target else at.readdressed(head, target)
            answer = await at._once(addressed, body, seconds, waits)
            self._learn_soon(at)
            if answer.status != _SENT_ON:
                return answer
            at, target = await self.node_at(answer.headers.get("x-tidelog-location", ""), at)
            if not self.server.base:  # behind a proxy that adds one, nodes have other paths
                self._sent_on[about] = at
        self._sent_on.pop(about, None)
        raise LostError("nodes send the request to each other")

    @property
    def first(self) -> Http:
        """The node that is asked first."""
        return self._first

    async def node_at(self, location: str, said_by: Http) -> tuple[Http, str]:
        """A node by a URL that another one has sent a request on to, and the path and query in it."""
        parts = urlsplit(location)
        try:
            server = parse_server(f"{parts.scheme}://{parts.netloc}")
        except InputError:
            raise _odd("it sends requests on to what is no URL") from None
        if self.server.is_tls and not server.is_tls:
            raise _odd("it sends requests on to a server without TLS")
        known = self._others.get(server.url)
        if known is None:
            if not await self._is_node(server, said_by):
                raise _odd("it sends requests on to a server that is none of its nodes")
            known = self._other(server)
        return known, parts.path + (f"?{parts.query}" if parts.query else "")

    def _other(self, server: Server) -> Http:
        """A node beside this one; it may have what this one has."""
        known = self._others.get(server.url)
        if known is None:
            if len(self._others) >= _MAX_NODES:
                self._sent_on.clear()
                self._first = self
                self._others.pop(next(iter(self._others))).close()
            known = self._others[server.url] = Http(
                server,
                self._token,
                self.tls,
                timeout_seconds=self.timeout_seconds,
                max_connections=self._max_connections,
                further=self._further,
            )
        return known

    def _learn_soon(self, at: Http) -> None:
        """Asks a node that answers for the others, so that they can be asked when it does not any more."""
        server, now = self.server, asyncio.get_running_loop().time()
        is_one_of_many = self._may_follow is None and server.socket_path is None and not server.base
        if is_one_of_many and now >= self._learn_at and (self._learning is None or self._learning.done()):
            self._learn_at = now + _LEARN_SECONDS
            self._learning = asyncio.ensure_future(self._learn(at))

    async def _learn(self, at: Http) -> None:
        with contextlib.suppress(LostError, OSError, TidelogError):  # it is asked again later
            listed = await self._listed(at)
            for server in listed if len(listed) > 1 else ():  # one alone is this one, by whatever name
                if not server.is_same(self.server) and (server.is_tls or not self.server.is_tls):
                    self._other(server)

    async def _listed(self, said_by: Http) -> list[Server]:
        """What a server lists as its nodes."""
        head = said_by.head("GET", path_of("nodes"), None, b"", "", "application/json")
        answer = await said_by._once(head, b"", self._opening_seconds, False)
        if not answer.is_success:
            raise error_of(answer)
        return [parse_server(one.http) for one in answer.json(_Nodes).nodes if one.http][:_MAX_NODES]

    async def _is_node(self, server: Server, said_by: Http) -> bool:
        """Whether a server may have what this one has."""
        if self._may_follow is not None:
            return self._may_follow(server)
        if self._token is None:
            return True
        return any(server.is_same(one) for one in (self.server, *await self._listed(said_by)))

    def _failed(self, about: About) -> Http:
        """The node that has not answered: the next try is at the first one, or at another when that is gone."""
        failed = self._sent_on.pop(about, self._first)
        self.pass_over(failed)
        return failed

    def pass_over(self, failed: Http) -> None:
        """A node that does not answer is not asked first any more."""
        self._learn_at = 0.0
        if failed is self._first and self._others:
            everybody = [self, *self._others.values()]
            at = everybody.index(failed) + 1 if failed in everybody else 0
            self._first = everybody[at % len(everybody)]

    async def upload(self, path: str, query: Mapping[str, object], pieces: AsyncIterator[bytes], known: str) -> Answer:
        """PUTs a body that is read once, so that it is not tried again; raises what a refusal stands for. It goes to
        the node that was last asked for the path `known`.
        """
        at = self.at((known, None, False))
        head = at.head("PUT", path, query, b"", "", "application/json", {"transfer-encoding": "chunked"})
        head = head.replace(b"content-length: 0\r\n", b"content-type: application/octet-stream\r\n", 1)
        try:
            async with at._room:
                answer = await (await at._connect()).upload(head, pieces, at.timeout_seconds)
        except (LostError, OSError, TimeoutError) as error:
            raise unreachable(error, at.server) from None
        if answer.status == _SENT_ON:
            raise ServerUnavailableError(
                f"the server at {at.server.url} does not serve {path} any more: another node does",
                hint="Send it again, from its beginning",
            )
        if not answer.is_success:
            raise error_of(answer)
        return answer

    async def json(self, method: str, path: str, document: object = None, kind: Any = Any, **options: Any) -> Any:
        """The document of an answer; None where there is none."""
        body = b"" if document is None else msgspec.json.encode(document)
        answer = await self.ask(method, path, body=body, **options)
        return answer.json(kind) if answer.body else None

    def head(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None,
        body: bytes,
        media_type: str,
        accept: str,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The head of a request, with the token."""
        given = {name: _text(value) for name, value in (query or {}).items() if value is not None}
        target = self.server.base + path + (f"?{urlencode(given)}" if given else "")
        lines = [f"{method} {target} HTTP/1.1", f"host: {self.server.authority}", f"accept: {accept}"]
        lines += [f"{name}: {value}" for name, value in (self.headers | dict(headers or {})).items()]
        if body or method in ("POST", "PUT", "PATCH"):
            lines.append(f"content-length: {len(body)}")
        if body:
            lines.append(f"content-type: {media_type}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _once(self, head: bytes, body: bytes, seconds: float, waits: bool) -> Answer:
        async with asyncio.timeout(seconds), self._connection(waits) as connection:
            try:
                return await connection.ask(head, body)
            except LostError:
                if connection.is_fresh:
                    raise
            # The server had closed an idle connection, which says nothing about the server.
            again = await self._connect()
            try:
                return await again.ask(head, body)
            finally:
                self._give_back(again)

    @asynccontextmanager
    async def _connection(self, waits: bool) -> AsyncIterator[_Connection]:
        async with contextlib.nullcontext() if waits else self._room:
            connection = self._take() or await self._connect()
            try:
                yield connection
            finally:
                self._give_back(connection)

    def _take(self) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.is_usable:
                return connection
        return None

    def _give_back(self, connection: _Connection) -> None:
        if connection.is_usable:
            self._free.append(connection)

    async def _connect(self) -> _Connection:
        loop, server = asyncio.get_running_loop(), self.server
        async with asyncio.timeout(self._opening_seconds):
            if server.socket_path is not None:
                with short_path(server.socket_path) as path:
                    _, made = await loop.create_unix_connection(lambda: _Connection(self._make_parser), path)
                return made
            _, made = await loop.create_connection(
                lambda: _Connection(self._make_parser), server.host, server.port, ssl=self.tls
            )
            return made

    def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
        for other in self._others.values():
            other.close()
        for connection in self._free:
            connection.close()
        self._free.clear()
        self.direct.close()


async def operate(http: Http, path: str, query: Mapping[str, object] | None = None, method: str = "POST") -> Any:
    """Starts long work at the server and waits for its end, however long that takes; its result."""
    return (await ended_operation(http, path, query, method))["result"]


async def ended_operation(
    http: Http,
    path: str,
    query: Mapping[str, object] | None = None,
    method: str = "POST",
    document: object = None,
) -> Any:
    """The same, with the id of the operation: a plan is applied by that."""
    found = await http.json(method, path, document, query={"wait": _OPERATION_SECONDS, **(query or {})}, **_WAITING)
    begun_at = http.at((path, (query or {}).get("partition"), False))
    while found["state"] == "running":
        place = path_of("operations", found["id"])
        http.remember(place, begun_at)
        found = await http.json("GET", place, query={"wait": _OPERATION_SECONDS}, **_WAITING)
    problem = found.get("problem")
    if problem is not None:
        raise msgspec.convert(problem, Problem).as_error()
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parser_factory() -> Any:
    try:
        import httptools
    except ImportError:
        raise ConfigError(_MISSING, hint=_HINT) from None
    return httptools.HttpResponseParser


def websockets_client() -> Any:
    """The module that connects WebSockets."""
    try:
        import websockets.asyncio.client
    except ImportError:
        raise ConfigError(_MISSING, hint=_HINT) from None
    return websockets.asyncio.client
