"""The table of routes: each is declared once, and dispatch, checks, OpenAPI, permissions and metrics follow from it.

    @routes.get("/v1/topics/{namespace}/{name}", Permission.READ, TopicDescription, resource=Kind.TOPIC)
    async def describe_topic(call: Call) -> TopicDescription:
        '''Describes a topic.'''

Invariants
- A path is matched segment by segment; what is in braces matches one segment, never a slash. A fixed segment wins over
  one in braces. No two routes have the same method and form.
- A handler gets a query and a body that fit the declared types, from a client that has the permission.
- The first line of a handler's docstring is its summary, the rest its description.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

import msgspec

from tidelog.errors import InternalError
from tidelog.service.auth.access import SERVER, Kind, Permission, Resource, topic_resource
from tidelog.service.http.problems import HttpError

if TYPE_CHECKING:
    from tidelog.service.http.call import Call, Socket

Handler = Callable[["Call"], Awaitable[Any]]
StreamHandler = Callable[["Call"], AsyncIterator[bytes]]
SocketHandler = Callable[["Call", "Socket"], Awaitable[None]]
Join = Callable[["Call", list[Any]], Any]
"""Makes one answer of those of several nodes, in the declared type."""
Mode = Literal["answer", "wait", "stream", "socket"]
"""`answer`: an answer at once. `wait`: the handler may wait for news, and is cancelled when its client is gone.
`stream`: an async generator of pieces. `socket`: a WebSocket."""

JSON = "application/json"
MSGPACK = "application/msgpack"
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
DEFAULT_BODY_BYTES = 1 << 20


class NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    """A route without parameters in its query."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    method: str
    path: str
    permission: Permission | None
    """What the client must have on `resource`; None: the handler decides what it shows."""
    handler: Callable[..., Any]
    mode: Mode
    summary: str
    description: str
    tag: str
    resource: Kind
    query: type[msgspec.Struct]
    body: Any = None
    """The type of the body, as JSON; None: there is none."""
    body_types: tuple[str, ...] = ()
    """Media types that the handler reads by itself."""
    response: Any = None
    """The type of the answer, as JSON; None: nothing, or `response_types`."""
    response_types: tuple[str, ...] = ()
    """Media types that the handler writes by itself."""
    status: HTTPStatus = HTTPStatus.OK
    may_go_on: bool = False
    """Whether the answer may also be 202: the same, of work that has not ended."""
    at_any_node: bool = False
    """Whether every node answers it, and not the owner alone."""
    reads_stored: bool = False
    """Whether its handler asks first whether the store is enough, and then `check_here` by itself."""
    takes_a_part: bool = False
    """Whether a node answers it that has some of the partitions."""
    spreads: bool = False
    """Whether its handler serves a topic whose partitions are on several nodes by itself (`Call.spread`)."""
    join: Join | None = None
    """Makes one answer of those of several nodes, each for its own partitions (`spread/`)."""
    is_public: bool = False
    """Whether it is answered without authentication."""
    max_body_bytes: int = DEFAULT_BODY_BYTES
    """0: as much as the server's settings allow."""
    streams_body: bool = False
    """Whether its handler reads the body by itself (`Call.pieces`): it may be larger than memory."""

    @property
    def name(self) -> str:
        """As metrics and the audit log call it."""
        return f"{self.method} {self.path}"

    @property
    def parameters(self) -> list[str]:
        """The names in braces, in their order."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    def resources_of(self, path: dict[str, str]) -> list[Resource]:
        """What a request is about: the client needs the permission on all of it."""
        if self.resource is Kind.ENGINE:
            return [Resource(Kind.ENGINE, path["engine"])]
        if self.resource is not Kind.TOPIC:
            return [SERVER]
        found = [topic_resource(f"{path['namespace']}/{path['name']}")]
        return [*found, Resource(Kind.GROUP, path["subscription"])] if "subscription" in path else found


class RouteTable:
    """The routes of one module, in the order in which they are declared."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._routes: list[Route] = []

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def add(
        self,
        method: str,
        path: str,
        permission: Permission | None,
        response: Any = None,
        *,
        mode: Mode = "answer",
        resource: Kind = Kind.SERVER,
        query: type[msgspec.Struct] = NoQuery,
        **options: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declares the decorated function as the handler of a route."""

        def declare(handler: Callable[..., Any]) -> Callable[..., Any]:
            text = inspect.getdoc(handler)
            if not text:
                raise InternalError(f"the handler of {method} {path} has no docstring")
            summary, _, description = text.partition("\n\n")
            self._routes.append(
                Route(
                    method=method,
                    path=path,
                    permission=permission,
                    handler=handler,
                    mode=mode,
                    summary=" ".join(summary.split()),
                    description=description.strip(),
                    tag=self._tag,
                    resource=resource,
                    query=query,
                    response=response,
                    **options,
                )
            )
            return handler

        return declare


class Match(NamedTuple):
    """The route of a request, and the values of the names in braces."""

    route: Route
    path: dict[str, str]


class _Node:
    """One segment of paths."""

    __slots__ = ("any", "fixed", "routes")

    def __init__(self) -> None:
        self.fixed: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.routes: dict[str, Route] = {}


class Router:
    """Finds the route of a request."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = routes
        self._root = _Node()
        for route in routes:
            self._insert(route)

    def _insert(self, route: Route) -> None:
        node = self._root
        for segment in _segments(route.path):
            if not segment.startswith("{"):
                node = node.fixed.setdefault(segment, _Node())
                continue
            if node.any is None:
                node.any = _Node()
            node = node.any
        if route.method in node.routes:
            raise InternalError(f"two routes are {route.name}")
        node.routes[route.method] = route

    def find(self, method: str, raw_path: str) -> Match:
        """The route of a request, whose path is still percent-encoded; HttpError (404, 405) where there is none."""
        node, values = self._walk(self._root, _segments(raw_path), 0, [])
        if node is None or not node.routes:
            raise HttpError(
                HTTPStatus.NOT_FOUND,
                "there is nothing at this path",
                hint="/openapi.json lists what there is",
                error="NotFoundError",
            )
        route = node.routes.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(node.routes))
            raise HttpError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"this path takes {allowed}, not {method[:20]}",
                headers=(("allow", ", ".join(sorted(set(node.routes) - {"WEBSOCKET"}))),),
            )
        return Match(route, dict(zip(route.parameters, values, strict=True)))

    def _walk(
        self, node: _Node | None, segments: list[str], at: int, values: list[str]
    ) -> tuple[_Node | None, list[str]]:
        if node is None or at == len(segments):
            return node, values
        segment = segments[at]
        fixed = node.fixed.get(segment)
        if fixed is not None:
            found, taken = self._walk(fixed, segments, at + 1, values)
            if found is not None and found.routes:
                return found, taken
        return self._walk(node.any, segments, at + 1, [*values, unquote(segment)])


def _segments(path: str) -> list[str]:
    return path.split("/")[1:]
