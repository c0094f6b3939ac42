"""What the handlers of HTTP work with: the broker's topics, limits, permissions, and what must end with the server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec

from tidelog.errors import NotFoundError
from tidelog.service.auth.access import ANONYMOUS, Authorizer, Open, Principal, Resource
from tidelog.service.http.call import BodyBudget, Peer
from tidelog.service.http.problems import HttpError
from tidelog.service.http.producers import Fences
from tidelog.service.http.sessions import Sessions
from tidelog.service.kafka.broker import Broker, ServedTopic
from tidelog.service.metrics import RequestMetrics
from tidelog.topics.names import TopicName

if TYPE_CHECKING:
    from tidelog.engine.engine import Engine
    from tidelog.engine.restoring import RestoringEngine
    from tidelog.service.cluster_control import ClusterControl, NotServed
    from tidelog.service.http.metrics_page import Sources
    from tidelog.service.http.operations import Operations
    from tidelog.service.http.spread.others import Others

Result = TypeVar("Result")


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the HTTP side."""

    max_body_bytes: int = 64 << 20
    """The largest body of a request that carries messages or objects; others have at most 1 MiB."""
    max_buffered_bytes: int = 512 << 20
    """Bodies of requests that are in memory, all together."""
    max_connections: int = 10_000
    idle_seconds: float = 75.0
    """A connection without a request for so long is closed; a request must begin to arrive within it, too."""
    body_seconds: float = 60.0
    """A body of which nothing more arrives for so long is given up."""
    unread_seconds: float = 60.0
    """A client that reads nothing of its answer for so long is cut."""
    max_wait_seconds: float = 60.0
    """The longest that a long poll waits."""
    stop_seconds: float = 10.0
    """How long stopping waits for requests that were begun."""


Authenticate = Callable[[Peer], Awaitable[Principal]]
"""Runs in the event loop and must not block it; NotAuthenticatedError for credentials that are missing or wrong."""
Audit = Callable[[Principal, Peer, str, Resource, int], None]
"""Principal, client, route, resource and status."""

MoveGroup = Callable[[str, str, Mapping[int, int]], Awaitable[None]]
"""Group, topic, and offsets by partition; ConflictError while the group has members."""


async def _no_groups(group: str, topic: str, offsets: Mapping[int, int]) -> None:
    raise NotFoundError(f"there is no consumer group {group[:80]!r}")


async def _anonymous(peer: Peer) -> Principal:
    return ANONYMOUS


def _forget(principal: Principal, peer: Peer, route: str, resource: Resource, status: int) -> None:
    return None


class Producers:
    """The producers that are open for clients: the ones used longest ago are closed."""

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._open: dict[Any, asyncio.Future[Any]] = {}

    async def get(self, key: Any, make: Any) -> Any:
        """The producer of this key, opened once."""
        known = self._open.pop(key, None)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = asyncio.ensure_future(make())
        self._open[key] = known
        if len(self._open) > self._limit:
            self.forget(next(iter(self._open)))
        return await asyncio.shield(known)

    def forget(self, key: Any) -> None:
        """What it stored is remembered by its topic."""
        known = self._open.pop(key, None)
        if known is not None and known.done() and not known.cancelled() and known.exception() is None:
            known.result().close()


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None for what is none."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Service:
    """One serving process as the handlers see it. Everything here runs in the event loop."""

    def __init__(
        self,
        broker: Broker,
        settings: HttpSettings | None = None,
    ) -> None:
        self.broker = broker
        self.settings = settings or HttpSettings()
        self.authenticate: Authenticate = _anonymous
        """Who a request comes from."""
        self.authorizer: Authorizer = Open()
        self.is_current: Callable[[Principal], bool] = lambda principal: True
        """Whether the credential of a client still counts; `end_revoked` is called when that may have changed."""
        self._lasting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self.audit: Audit = _forget
        """Told of every request that was refused, or changes something, once it is answered."""
        self.requests = RequestMetrics()
        self.sources: Sources | None = None
        """What `/metrics` shows of the rest of the process."""
        self.bodies = BodyBudget(self.settings.max_buffered_bytes)
        self.version = version("tidelog")
        self.openapi: Callable[[], bytes] = lambda: b"{}"
        """The description of the API; the application sets it."""
        self.is_ready = False
        self.advertised = ""
        """The URL that clients are told; set before the first request."""
        self.allowed_hosts: frozenset[str] | None = None
        """The names by which clients may call it, beside addresses; None: any."""
        self.stopping = asyncio.Event()
        """Set when the server begins to stop: streams and long polls end."""
        self.producers = Producers()
        self.fences = Fences()
        self.sessions = Sessions()
        self.move_group: MoveGroup = _no_groups
        """Commits offsets for a consumer group of Kafka's protocol, which its coordinator does."""
        self.engines: dict[str, Engine] = {}
        """Those that are served, by name."""
        self.restoring: dict[str, RestoringEngine] = {}
        """Those that can be read, and are changed once their disk is filled."""
        self.why_not_served: Callable[[str], NotServed | None] = lambda engine: None
        """What keeps this node from serving an engine that the cluster has given to it."""
        self.others: Others | None = None
        """The other nodes; None: there are none."""
        self.cluster: ClusterControl | None = None
        """The cluster that this node is a member of."""
        self.operations: Operations
        """Set by the application."""
        self._locks: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()
        self.waiters: set[asyncio.Future[None]] = set()
        """What long polls wait for."""

    @contextlib.contextmanager
    def until_revoked(self, is_allowed: Callable[[], bool]) -> Iterator[asyncio.Future[None]]:
        """For what lasts: a future that is done when the client may no longer do it."""
        revoked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lasting[revoked] = is_allowed
        try:
            yield revoked
        finally:
            del self._lasting[revoked]

    def end_revoked(self) -> None:
        """Ends the streams, long polls and WebSockets of those whose token or grant is gone."""
        for revoked, is_allowed in list(self._lasting.items()):
            if not revoked.done() and not is_allowed():
                revoked.set_result(None)

    def begin_to_stop(self) -> None:
        """Ends what waits for news."""
        self.is_ready = False
        self.stopping.set()
        for waiter in list(self.waiters):
            if not waiter.done():
                waiter.set_result(None)

    async def unless_stopping(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of what waits for news; None when the server stops before."""
        working: asyncio.Future[Any] = asyncio.ensure_future(work)
        stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters.add(stopping)
        if self.stopping.is_set():
            stopping.set_result(None)
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            result: Result | None = working.result() if working.done() else None
            return result
        finally:
            self.waiters.discard(stopping)
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait([working])

    def check_origin(self, peer: Peer) -> None:
        """HttpError (403) for a request that a page of another origin made. Behind a proxy the origin is the advertised
        URL."""
        origin = peer.headers.get("origin")
        own = (peer.headers.get("host", ""), urlsplit(self.advertised).netloc)
        if origin is not None and _netloc(origin) not in own:
            raise HttpError(
                HTTPStatus.FORBIDDEN, "requests of pages from another origin are refused", error="AccessDeniedError"
            )

    def check_host(self, peer: Peer) -> None:
        """HttpError (421) for a name that is not this server's, where that matters."""
        host = peer.headers.get("host")
        if self.allowed_hosts is None or host is None or peer.is_local_socket:
            return
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # brackets that do not fit
            name = ""
        if name not in self.allowed_hosts and not _is_address(name):
            raise HttpError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this server is not called so",
                hint="Use its address, or start it with --advertise-http and its name",
                error="AccessDeniedError",
            )

    def serves_engine(self, name: str) -> bool:
        """Whether it can be read here."""
        return name in self.engines or name in self.restoring

    def lock(self, key: Any) -> asyncio.Lock:
        """For work that must not be done twice at once."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def topic(self, name: TopicName) -> ServedTopic:
        """A topic that exists; NotFoundError otherwise."""
        served = self.broker.find(name) or await self.broker.find_opened(name)
        if served is None:
            raise NotFoundError(f"there is no topic {name}", hint="GET /v1/topics lists them")
        return served
