"""What one node asks of another over HTTP, at the address that clients use.

Invariants
- A node proves itself with the secret of the installation, and says for whom it asks: the node that a client has asked
  checks what that client may do, the others trust it. Nothing of a client's own credentials is passed on.
- An answer that goes to the client as it is (`said_as`) has what that client may see: the other node looks at the
  client's own grants, which are those of the installation.
- The secret goes to the addresses of nodes that are alive, never elsewhere, whatever an answer says.
- Requests may be sent several times, so each must be one that does nothing twice (`client/transport.py`).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any

from tidelog.client.bridge import Bridge, LoopBridge
from tidelog.client.producer import Appender
from tidelog.client.topic import Link, RemoteTopic
from tidelog.client.transport import Http, Server, parse_server, path_of
from tidelog.errors import InputError, ServerUnavailableError
from tidelog.secret import Secret
from tidelog.service.auth.access import ANONYMOUS, NODE, TRUSTED, Principal, check_principal_name
from tidelog.service.auth.security import Security
from tidelog.service.kafka.peers import client_tls
from tidelog.service.placement import NodeAddress, Placement
from tidelog.topics.names import TopicName

FOR_HEADER = "x-tidelog-for"
PARTITIONS_HEADER = "x-tidelog-partitions"
RIGHTS_HEADER = "x-tidelog-rights"
_OWN = "own"
_FORWARDED = "forwarded"
_BEARER = "bearer "
_ANSWER_SECONDS = 30.0
_CONNECTIONS = 16
_PREFETCH = 100
_TOPICS = 10_000


class TopicElsewhere(RemoteTopic):
    """A topic that another node serves, wherever it moves to."""

    _has_store = True

    def appender(self, name: str) -> Appender:
        """Appends by a producer of this name, with sequences that are given."""
        return Appender(self._bridge, self._http, self._path, self._partition, name)

    async def producer_state(self, name: str, sequence: int) -> Any:
        """How far a producer is, and whether a sequence is `stored`."""
        path = f"{self._path}/producers/{path_of(name).removeprefix('/v1/')}"
        query = {"partition": self._partition, "first": sequence, "count": 1}
        return await self._http.json("GET", path, query=query)


class Others:
    """Connections to the other nodes, opened when they are needed and kept. All but `topic` is for the event loop."""

    def __init__(self, placement: Placement, security: Security) -> None:
        self._placement = placement
        self._security = security
        self._https: dict[str, Http] = {}
        self._topics: dict[tuple[TopicName, int, str], TopicElsewhere] = {}
        self._bridge: Bridge | None = None

    def start(self) -> None:
        """In the event loop of the server."""
        self._bridge = LoopBridge(asyncio.get_running_loop())

    @property
    def bridge(self) -> Bridge:
        """For the objects of the client."""
        assert self._bridge is not None, "not started"
        return self._bridge

    def http(self, node: NodeAddress) -> Http:
        """Requests to a node."""
        known = self._https.get(node.http)
        if known is None:
            alive = {one.http for one in self._placement.nodes()}
            for gone in self._https.keys() - alive:
                self._https.pop(gone).close()
            known = self._https[node.http] = self._made(node)
        return known

    def _made(self, node: NodeAddress) -> Http:
        security = self._security
        token = Secret(security.node_secret) if security.is_required else None
        return Http(
            parse_server(node.http),
            token,
            client_tls(security) if node.http.startswith("https:") else None,
            timeout_seconds=_ANSWER_SECONDS,
            max_connections=_CONNECTIONS,
            may_follow=self._is_node,
        )

    def _is_node(self, server: Server) -> bool:
        return any(parse_server(one.http).is_same(server) for one in self._placement.nodes())

    def topic(self, name: TopicName, partition: int = 0) -> TopicElsewhere:
        """A partition of other nodes, as a client has it: it follows when the partition moves. Threads may wait for
        what it does; in the event loop only its names with `_async` are used."""
        node = self._placement.owner(name, partition)
        if node is None:
            raise ServerUnavailableError(f"no node serves {name} at the moment", hint="Try again in a moment")
        key = (name, partition, node.http)
        known = self._topics.pop(key, None)
        if known is None:
            link = Link(self.bridge, self.http(node), _PREFETCH)
            known = TopicElsewhere(link, name, partition, is_one_of_several=True)
        self._topics[key] = known
        if len(self._topics) > _TOPICS:
            del self._topics[next(iter(self._topics))]
        return known

    def close(self) -> None:
        """Ends all connections; requests that wait fail."""
        if self._bridge is not None:
            self._bridge.close()
        for http in self._https.values():
            http.close()
        self._https.clear()


def said_for(principal: Principal) -> dict[str, str]:
    """The header that names for whom a node asks."""
    name = principal.name
    return {FOR_HEADER: name} if not principal.is_anonymous and name.isascii() and name.isprintable() else {}


def said_as(principal: Principal) -> dict[str, str] | None:
    """The headers of a request that another node answers as to the client itself; None: its name cannot be said."""
    said = said_for(principal)
    if principal.is_anonymous or principal.method in TRUSTED:
        return said
    return {**said, RIGHTS_HEADER: _OWN} if said else None


def asking_node(headers: Mapping[str, str], security: Security) -> Principal | None:
    """The client for whom another node asks; None for a request that is no node's."""
    given = headers.get("authorization", "")
    if not security.node_secret or not given.lower().startswith(_BEARER):
        return None
    token = given[len(_BEARER) :].strip()
    if not hmac.compare_digest(token.encode("utf-8", "replace"), security.node_secret.encode()):
        return None
    try:
        name = check_principal_name(headers[FOR_HEADER]) if FOR_HEADER in headers else NODE.name
    except InputError:
        name = NODE.name
    if headers.get(RIGHTS_HEADER) == _OWN:
        return ANONYMOUS if name == NODE.name else Principal(name, _FORWARDED)
    return NODE._replace(name=name)


def is_trusted(principal: Principal) -> bool:
    """Whether another node may be asking: without authentication everybody may say so, as they may everything."""
    return principal.method in (NODE.method, ANONYMOUS.method)
