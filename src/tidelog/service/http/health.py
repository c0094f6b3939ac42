"""Health, the description of the API, and what this server is."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from tidelog.service.auth.access import Permission
from tidelog.service.http.call import Call, Reply
from tidelog.service.http.routes import RouteTable

routes = RouteTable("Server")
_TEXT = "text/plain; charset=utf-8"


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What serves here."""

    version: str
    node: str
    """The identity of the log directory."""
    mode: str
    """`local`, `shared_fs` or `object_store`."""
    http: str
    kafka: str
    has_store: bool
    topics: int
    nodes: dict[str, str] = {}
    """The URLs of all nodes of the installation that are alive, by name."""


class ListedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the installation."""

    node: str
    http: str


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """Those that are alive: requests may be sent on to them."""

    nodes: list[ListedNode]


@routes.add("GET", "/health/live", None, is_public=True, response_types=("text/plain",))
async def live(call: Call) -> Reply:
    """Answers 200 while the process lives."""
    return Reply(b"live\n", _TEXT)


@routes.add("GET", "/health/ready", None, is_public=True, response_types=("text/plain",))
async def ready(call: Call) -> Reply:
    """Answers 200 while clients are served, 503 while it starts or stops."""
    if call.service.is_ready:
        return Reply(b"ready\n", _TEXT)
    return Reply(b"not ready\n", _TEXT, HTTPStatus.SERVICE_UNAVAILABLE)


@routes.add("GET", "/openapi.json", None, is_public=True, response_types=("application/json",))
async def openapi(call: Call) -> Reply:
    """This API as an OpenAPI 3.1 document."""
    return Reply(call.service.openapi())


@routes.add("GET", "/v1", Permission.READ, ServerInfo)
async def describe_server(call: Call) -> ServerInfo:
    """What serves here: versions, addresses and mode."""
    broker = call.service.broker
    address = broker.address
    return ServerInfo(
        version=call.service.version,
        node=broker.cluster_id or "",
        mode=broker.directory.mode,
        http=call.service.advertised,
        kafka=f"{address.host}:{address.port}",
        has_store=broker.has_store,
        topics=len(broker.topics()),
        nodes={one.node: one.http for one in broker.placement.nodes()},
    )


@routes.add("GET", "/v1/nodes", None, NodeList)
async def list_nodes(call: Call) -> NodeList:
    """Lists the nodes of the installation that are alive: a client sends its token to no other server."""
    return NodeList(nodes=[ListedNode(node=one.node, http=one.http) for one in call.service.broker.placement.nodes()])
